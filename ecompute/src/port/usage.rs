//! The host's load and what guests have used, for whoever asks twice and makes rates of it.

use std::time::Duration;

use ec_model::InstanceId;
use ec_plan::engine::Engine;
use serde_json::{Value, json};
use tokio::{sync::Mutex, time::Instant};

use super::{Asked, ask};
use crate::parts::Parts;

/// However many ask, libvirt is asked no more often than this, and for one at a time.
const FRESH: Duration = Duration::from_millis(500);

/// What was answered last, and when.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<Option<(Instant, Value)>>);

/// What is used; why that cannot be told.
pub(super) async fn usage(parts: &Parts) -> Result<Value, String> {
    let mut recent = parts.usage.0.lock().await;
    if let Some((_, told)) = recent.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
        return Ok(told.clone());
    }
    let instances = match ask(parts, here).await {
        Asked::Answered(instances) => instances,
        Asked::NoLoop => return Err("the agent starts or ends".to_owned()),
        Asked::Silent => return Err("the agent's loop does not turn".to_owned()),
    };
    let used = parts.hypervisor.usage(&instances).await.map_err(|error| error.to_string())?;
    let told = json!({
        "node": parts.node,
        "at": parts.host.now(),
        "load1": sysinfo::System::load_average().ok().map(|load| load.one),
        "instances": used,
    });
    *recent = Some((Instant::now(), told.clone()));
    Ok(told)
}

/// Those that have a domain here.
fn here(engine: &Engine) -> Vec<InstanceId> {
    let has_domain = |sight: &ec_plan::engine::Sight<'_>| sight.observed.domain.is_some();
    engine.sights().filter(has_domain).map(|sight| sight.instance).collect()
}

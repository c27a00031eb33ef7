//! The host's load and what guests have used, for whoever asks twice and makes rates of it.

use std::{
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ec_model::InstanceId;
use ec_plan::engine::Engine;
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use super::{Asked, ask};
use crate::parts::Parts;

/// However many ask, libvirt is asked no more often than this, and for one at a time.
const FRESH: Duration = Duration::from_millis(500);

/// Who asks is told after so long that libvirt does not answer. Whoever waited for as long as a call may take would keep others from
/// the port, its health too.
const PATIENCE: Duration = Duration::from_secs(3);

/// However long libvirt took, what it told is told on for no longer than this.
const OLDEST: Duration = Duration::from_secs(30);

/// What came of asking, and until when whoever asks is told that.
#[derive(Debug, Clone)]
struct Told {
    until: Instant,
    what: Result<Value, String>,
}

/// What was found out last, or is being found out: nothing before anybody asked. While it is, its sender is there.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<Option<watch::Receiver<Option<Told>>>>);

/// What is used; why that cannot be told.
pub(super) async fn usage(parts: &Arc<Parts>) -> Result<Value, String> {
    let mut round = join(parts);
    // It ends without a word where the process ends.
    let told = round.wait_for(Option::is_some).await.ok().and_then(|told| told.clone());
    told.map_or_else(|| Err("the agent ends".to_owned()), |told| told.what)
}

/// What all share that ask now.
fn join(parts: &Arc<Parts>) -> watch::Receiver<Option<Told>> {
    let mut recent = parts.usage.0.lock().unwrap_or_else(PoisonError::into_inner);
    let is_fresh = |round: &watch::Receiver<Option<Told>>| {
        let is_under_way = round.has_changed().is_ok();
        is_under_way || round.borrow().as_ref().is_some_and(|told| Instant::now() < told.until)
    };
    if let Some(round) = recent.as_ref().filter(|round| is_fresh(round)) {
        return round.clone();
    }
    let (tell, round) = watch::channel(None);
    tokio::spawn(find_out(Arc::clone(parts), tell));
    *recent = Some(round.clone());
    round
}

/// Tells what is used. A call that takes too long goes on, and till it ends libvirt is asked nothing else of this: all who ask are told so
/// at once.
async fn find_out(parts: Arc<Parts>, tell: watch::Sender<Option<Told>>) {
    let tell = |what, fresh| tell.send_replace(Some(Told { until: Instant::now() + fresh, what }));
    let instances = match ask(&parts, here).await {
        Asked::Answered(instances) => instances,
        Asked::NoLoop => return drop(tell(Err("the agent starts or ends".to_owned()), FRESH)),
        Asked::Silent => return drop(tell(Err("the agent's loop does not turn".to_owned()), FRESH)),
    };
    let begun = Instant::now();
    let mut call = pin!(parts.hypervisor.usage(&instances));
    let (used, fresh) = match timeout(PATIENCE, call.as_mut()).await {
        Ok(used) => (used, FRESH),
        Err(_) => {
            tell(Err(format!("libvirt has not answered in {} s", PATIENCE.as_secs())), FRESH);
            let late = call.await;
            // Nobody waited for it. Where libvirt always takes that long, whoever asks again would only wait for the next in vain.
            let fresh = if late.is_ok() { begun.elapsed().min(OLDEST) } else { FRESH };
            (late, fresh)
        }
    };
    let told = used.map(|used| {
        json!({
            "node": parts.node,
            "at": parts.host.now(),
            "load1": sysinfo::System::load_average().ok().map(|load| load.one),
            "instances": used,
        })
    });
    tell(told.map_err(|error| error.to_string()), fresh);
}

/// Those that have a domain here.
fn here(engine: &Engine) -> Vec<InstanceId> {
    let has_domain = |sight: &ec_plan::engine::Sight<'_>| sight.observed.domain.is_some();
    engine.sights().filter(has_domain).map(|sight| sight.instance).collect()
}

//! The product's agent on a simulated hypervisor: for what real guests would only slow down.

use std::{path::Path, sync::Arc};

use anyhow::Result;
use ec_hypervisor::SimulatedHypervisor;
use ec_model::NodeId;
use ec_store::{EtcdStore, Store};
use ecompute::{agent, config::Settings};
use tokio_util::sync::CancellationToken;

/// Runs the agent until `shutdown`, on the store that `wrap` makes of the configured etcd.
pub(crate) async fn run(
    config: &Path,
    shutdown: CancellationToken,
    wrap: impl FnOnce(EtcdStore) -> Arc<dyn Store>,
) -> Result<()> {
    let (settings, _) = Settings::load(Some(config))?;
    let node = settings.uuid.unwrap_or_else(|| NodeId::new(uuid::Uuid::new_v4()));
    std::fs::create_dir_all(&settings.state_dir)?;
    let store = wrap(EtcdStore::connect(settings.etcd.clone()).await?);
    let hypervisor = Arc::new(SimulatedHypervisor::new(node));
    let parts = agent::assemble(settings, node, store, hypervisor).await?;
    agent::run_with(parts, shutdown).await
}

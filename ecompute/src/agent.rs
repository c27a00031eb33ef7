//! Putting the agent together, and taking it apart in the right order.

use std::{collections::HashSet, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use ec_hypervisor::{HostInfo, Hypervisor};
use ec_image::{CacheConfig, ImageCache};
use ec_libvirt::{LibvirtConfig, LibvirtHypervisor};
use ec_metadata::{MetadataConfig, RecordDir};
use ec_model::NodeId;
use ec_placement_client::{PlacementClient, PlacementError};
use ec_store::{EtcdStore, Store};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Settings,
    driver,
    identity::StateDir,
    parts::Parts,
    register::{keep_alive, register},
};

/// Placement gets so long to take the lock when the agent ends.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two tries to reach what is not there yet.
const RETRY: Duration = Duration::from_secs(2);
/// How soon packet rules come back that somebody took away.
const PROTECTION_PERIOD: Duration = Duration::from_secs(30);
/// How often an agent makes sure that placement still knows its node.
const REGISTRATION_PERIOD: Duration = Duration::from_secs(60);

/// Runs an agent on the real parts until `shutdown`.
pub async fn run(settings: Settings, shutdown: CancellationToken) -> Result<()> {
    let state = StateDir::take(&settings.state_dir)?;
    let node = state.node(settings.uuid)?;
    tracing::info!(%node, name = settings.name, version = env!("CARGO_PKG_VERSION"), "starting");
    let store: Arc<dyn Store> = Arc::new(EtcdStore::connect(settings.etcd.clone()).await?);
    let hypervisor: Arc<dyn Hypervisor> =
        Arc::new(LibvirtHypervisor::connect(libvirt_config(&settings, node))?);
    let parts = assemble(settings, node, store, hypervisor).await?;
    run_with(parts, shutdown).await
}

/// How libvirt is to be used on this node.
pub fn libvirt_config(settings: &Settings, node: NodeId) -> LibvirtConfig {
    LibvirtConfig {
        uri: settings.libvirt_uri.clone(),
        node,
        virt_type: settings.virt_type,
        network: settings.network.clone(),
        bridge: settings.bridge.clone(),
        address_filter: settings.address_filter,
        filter_required: settings.filter_required,
        control: settings.control_endpoints(),
        // By the directory and not by the node: `uuid` may be set anew, the directory stays.
        pool: format!("ecompute{}", settings.disks().display()).replace('/', "-"),
        pool_path: settings.disks(),
        console_dir: settings.consoles(),
        call_timeout: Duration::from_secs(30),
    }
}

/// Makes the rest of the parts around a store and a hypervisor.
pub async fn assemble(
    settings: Settings,
    node: NodeId,
    store: Arc<dyn Store>,
    hypervisor: Arc<dyn Hypervisor>,
) -> Result<Arc<Parts>> {
    let placement = PlacementClient::new(&settings.placement)?;
    let records =
        Arc::new(RecordDir::open(settings.records()).context("failed to open the instances' records")?);
    let cache = CacheConfig {
        directory: settings.images.clone(),
        max_bytes: settings.images_max_bytes,
        stall_timeout: settings.stall_timeout,
    };
    let (in_use, bases) = (Arc::clone(&records), settings.images.join("base"));
    let images = ImageCache::open(cache, move || bases_in_use(&in_use, &bases))
        .await
        .context("failed to open the image cache")?;
    Ok(Arc::new(Parts { node, settings, store, hypervisor, placement, images, records }))
}

/// The digests of the bases that some overlay lies on. Where the records cannot be read, that is all of
/// them: rather a full disk than a guest without its base.
fn bases_in_use(records: &RecordDir, bases: &Path) -> HashSet<String> {
    match records.list() {
        Ok(records) => records.into_iter().filter_map(|record| record.base_digest).collect(),
        Err(error) => {
            tracing::warn!(error = ec_runtime::exit::chain(&error), "no image is evicted");
            let names = std::fs::read_dir(bases).into_iter().flatten().flatten();
            names.filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_owned())).collect()
        }
    }
}

/// Runs an agent on these parts until `shutdown`: the way for benchmarks and tests, too.
pub async fn run_with(parts: Arc<Parts>, shutdown: CancellationToken) -> Result<()> {
    let Some(host) = prepare(&parts, &shutdown).await? else { return Ok(()) };
    tracing::info!(
        hypervisor = host.version,
        virt_type = host.virt_type,
        bridge = host.bridge,
        "hypervisor is ready"
    );

    let fatal = CancellationToken::new();
    let stop = CancellationToken::new();
    let presence = tokio::spawn(be_present(Arc::clone(&parts), host.clone(), stop.clone(), fatal.clone()));
    let metadata = host.bridge.clone().map(|bridge| {
        let config = MetadataConfig::new(bridge, RecordDir::clone(&parts.records));
        let stop = stop.clone();
        tokio::spawn(async move {
            if let Err(error) = ec_metadata::serve(config, stop).await {
                tracing::error!(error = ec_runtime::exit::chain(&error), "the metadata service ended");
            }
        })
    });

    let protection = tokio::spawn(protect(Arc::clone(&parts), stop.clone()));

    let ending = shutdown.clone();
    let cancel_on_fatal = fatal.clone();
    let driver_stop = CancellationToken::new();
    let driver = tokio::spawn(driver::run(Arc::clone(&parts), driver_stop.clone()));
    tokio::select! {
        () = ending.cancelled() => {}
        () = cancel_on_fatal.cancelled() => {}
    }
    // Nothing new may be claimed here while work comes to its end.
    if !fatal.is_cancelled() {
        lock(&parts).await;
    }
    driver_stop.cancel();
    driver.await.context("the agent's loop broke")?;
    stop.cancel();
    if let Some(metadata) = metadata {
        metadata.await.context("the metadata service broke")?;
    }
    protection.await.context("looking after the packet rules broke")?;
    presence.await.context("the registration broke")??;
    tracing::info!("ended; guests go on running");
    Ok(())
}

/// Looks after what holds guests to their own addresses, until `stop`.
async fn protect(parts: Arc<Parts>, stop: CancellationToken) {
    let mut troubled = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(PROTECTION_PERIOD) => {}
        }
        let outcome = parts.hypervisor.protect().await;
        if let Err(error) = &outcome
            && !troubled
        {
            tracing::warn!(%error, "failed to look after the packet rules around guests; trying on");
        }
        troubled = outcome.is_err();
    }
}

/// Waits for the hypervisor: an agent may be started before libvirtd is. `None` when asked to end.
async fn prepare(parts: &Parts, shutdown: &CancellationToken) -> Result<Option<HostInfo>> {
    let mut told = false;
    loop {
        match parts.hypervisor.prepare().await {
            Ok(host) => return Ok(Some(host)),
            Err(error) if error.is_transient() => {
                if !told {
                    tracing::warn!(%error, "waiting for the hypervisor");
                    told = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

/// Registers with placement, then shows the node as alive, and keeps both so.
async fn be_present(
    parts: Arc<Parts>,
    host: HostInfo,
    stop: CancellationToken,
    fatal: CancellationToken,
) -> Result<()> {
    let mut told = false;
    while let Err(error) = register(&parts.placement, parts.node, &parts.settings).await {
        if !error.is_transient() {
            fatal.cancel();
            return Err(error).context("failed to register with placement");
        }
        if !told {
            tracing::warn!(%error, "waiting for placement");
            told = true;
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    // The start is over, and what comes now needs little of its code.
    if let Err(error) = ec_runtime::memory::forget_code() {
        tracing::debug!(%error, "code that only the start needed stays resident");
    }
    let settings = &parts.settings;
    let alive = keep_alive(
        Arc::clone(&parts.store),
        settings.keys.clone(),
        parts.node,
        settings.name.clone(),
        host,
        stop.clone(),
    );
    let known = async {
        loop {
            tokio::time::sleep(REGISTRATION_PERIOD).await;
            // A placement that was wiped or restored does not know us any more.
            if let Err(PlacementError::NotFound(_)) = parts.placement.inventory(parts.node).await
                && let Err(error) = register(&parts.placement, parts.node, settings).await
            {
                tracing::warn!(%error, "failed to register again with a placement that forgot this node");
            }
        }
    };
    tokio::select! {
        () = alive => {}
        () = known => {}
    }
    Ok(())
}

async fn lock(parts: &Parts) {
    match tokio::time::timeout(LOCK_TIMEOUT, parts.placement.lock(parts.node)).await {
        Ok(Ok(())) => tracing::info!("locked the inventory: nothing new comes here"),
        Ok(Err(PlacementError::NotFound(_))) => {}
        Ok(Err(error)) => tracing::warn!(%error, "failed to lock the inventory"),
        Err(_) => tracing::warn!("failed to lock the inventory: placement did not answer"),
    }
}

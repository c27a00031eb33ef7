//! Putting the agent together, and taking it apart in the right order.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use anyhow::{Context, Result};
use ec_calls::{CountedStore, CountedTransport, Part};
use ec_hypervisor::{HostInfo, Hypervisor};
use ec_image::{CacheConfig, ImageCache};
use ec_libvirt::{LibvirtConfig, LibvirtHypervisor};
use ec_metadata::{Account, MetadataConfig, MetadataError, RecordDir};
use ec_model::{Alive, NodeId};
use ec_placement_client::{PlacementClient, PlacementError};
use ec_runtime::{Host, exit::Failure, service};
use ec_store::{EtcdStore, Sealed, Store, StoreResult};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{
    bases::bases_in_use,
    calls::{Calls, CountedHypervisor},
    config::Settings,
    driver, health,
    identity::StateDir,
    jobs::Jobs,
    parts::Parts,
    port::{self, Port, Recent, Streams},
    presence::{self, Presence, Taken, machine},
    register::{RETRY, keep_registered},
    storage::{self, Asked},
};

/// Placement gets so long to take the lock when the agent ends.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// A start that is refused for what lies on this host is refused within so long.
const REFUSED_AT_ONCE: Duration = Duration::from_secs(10);
/// What fails where images cannot be kept.
const CACHE: &str = "failed to open the image cache";
/// How soon packet rules come back that somebody took away.
const PROTECTION_PERIOD: Duration = Duration::from_secs(30);

/// Runs an agent on the real parts, with its port where it has one, until `shutdown`.
pub async fn run(settings: Settings, port: Option<Port>, shutdown: CancellationToken) -> Result<()> {
    let state = StateDir::take(&settings.state_dir)?;
    let records = RecordDir::reader(settings.records());
    let node = state.node(settings.uuid, &records)?;
    let placement = PlacementClient::new(&settings.placement)?;
    let recorded = storage::recorded(&records)?;
    storage::place::take(&settings.state_dir, &recorded)?;
    storage::refuse_moved(settings.shared.as_ref(), &settings.state_dir, &recorded)?;
    let taken = async {
        // A server that is away holds up who asks it, and not this agent's end.
        let host = Host::default();
        mounted(&host, &settings).await?;
        if let Some(shared) = &settings.shared {
            storage::refuse_new(shared, &placement, node).await?;
        }
        let settings = settings.clone();
        host.blocking(move || storage::take(&settings, node)).await??;
        anyhow::Ok(())
    };
    tokio::select! {
        taken = taken => taken?,
        () = shutdown.cancelled() => return Ok(()),
        never = waits() => match never {},
    }
    tracing::info!(%node, name = settings.name, version = env!("CARGO_PKG_VERSION"), "starting");
    let store: Arc<dyn Store> =
        Arc::new(sealed(&settings, EtcdStore::connect(settings.etcd.clone()).await?)?);
    let hypervisor: Arc<dyn Hypervisor> =
        Arc::new(LibvirtHypervisor::connect(libvirt_config(&settings, node))?);
    let parts = tokio::select! {
        parts = assemble(settings, node, store, hypervisor, placement, Host::default()) => parts?,
        () = shutdown.cancelled() => return Ok(()),
    };
    let closed = CancellationToken::new();
    if let Some(port) = &port {
        let url = port.url(&parts.settings).context("failed to tell where the agent's port is")?;
        // There is one port in the life of an agent.
        parts.url.set(url).ok();
    }
    let served = port.map(|port| tokio::spawn(port.serve(Arc::clone(&parts), closed.clone())));
    health::look(&parts).await;
    let (looked_at, stop_looking) = (Arc::clone(&parts), closed.clone());
    let health = tokio::spawn(async move { health::watch(&looked_at, stop_looking).await });
    let ended = tokio::select! {
        ended = run_with(Arc::clone(&parts), shutdown) => ended,
        never = service::vouch(async || port::turns(&parts).await) => match never {},
    };
    closed.cancel();
    health.await.context("looking at the host broke")?;
    if let Some(served) = served {
        served.await.context("the agent's port broke")?;
    }
    ended
}

/// What is told of why an agent ended, with its exit code. Where another one is the node, that is wrong configuration: whoever starts
/// agents again does so after anything else, and a clone that is always about to start takes the node over as soon as the first
/// one's agent is started anew, while its guests run there.
pub fn failure(error: &anyhow::Error) -> Failure {
    let message = format!("{error:#}");
    match error.downcast_ref::<Taken>() {
        Some(_) => Failure::usage(message),
        None => Failure::failed(message),
    }
}

/// Says that the agent waits for its storage, or for placement, where that takes longer than what is refused at once.
async fn waits() -> Infallible {
    tokio::time::sleep(REFUSED_AT_ONCE).await;
    service::vouch(async || true).await
}

/// An etcd of which this node's user-data is opened.
pub(crate) fn sealed(settings: &Settings, etcd: EtcdStore) -> StoreResult<Sealed> {
    Sealed::new(Arc::new(etcd), settings.etcd.user_data_key.as_deref(), settings.keys.secrets())
}

/// How libvirt is to be used on this node.
pub fn libvirt_config(settings: &Settings, node: NodeId) -> LibvirtConfig {
    LibvirtConfig {
        uri: settings.libvirt_uri.clone(),
        node,
        virt_type: settings.virt_type,
        network: settings.network.clone(),
        bridge: settings.bridge.clone(),
        graphics: settings.graphics,
        address_filter: settings.address_filter,
        filter_required: settings.filter_required,
        control: settings.control_endpoints(),
        // By the directory and not by the node: `uuid` may be set anew, the directory stays.
        pool: format!("ecompute{}", settings.disks(node).display()).replace('/', "-"),
        pool_path: settings.disks(node),
        console_dir: settings.consoles(),
        addresses: settings.addresses(),
        call_timeout: ec_libvirt::CALL_TIMEOUT,
    }
}

/// Makes the rest of the parts around the services that they talk to, on the host that they run on.
pub async fn assemble(
    settings: Settings,
    node: NodeId,
    store: Arc<dyn Store>,
    hypervisor: Arc<dyn Hypervisor>,
    placement: PlacementClient,
    host: Host,
) -> Result<Arc<Parts>> {
    let calls = Calls::new(&host);
    let store = Arc::new(CountedStore::new(store, Arc::clone(&calls.etcd)));
    let hypervisor = Arc::new(CountedHypervisor(hypervisor, Arc::clone(&calls.libvirt)));
    let placement = placement.through(|way| Arc::new(CountedTransport(way, Arc::clone(&calls.placement))));
    let records =
        Arc::new(RecordDir::open(settings.records()).context("failed to open the instances' records")?);
    let cache = CacheConfig {
        stall_timeout: settings.stall_timeout,
        local: settings.images_local.clone(),
        allow_addresses: settings.images_allow_addresses.clone(),
        store: Some(settings.images_store.clone()),
        host: host.clone(),
        ..CacheConfig::new(&settings.images, settings.images_max_bytes)
    };
    let (in_use, bases, disks) = (Arc::clone(&records), settings.images.join("base"), settings.disks(node));
    let of_storage = settings.clone();
    let check = move || storage::check(&of_storage);
    let images = ImageCache::begin(cache, move || bases_in_use(&in_use, &bases, &disks, &check));
    let images = images.context(CACHE)?;
    // What runs has no need of it.
    match tokio::time::timeout(storage::ANSWERS_IN, images.opened()).await {
        Ok(opened) => opened.context(CACHE)?,
        Err(_) => tracing::warn!("{}: what needs an image waits for it", storage::silent(&settings.images)),
    }
    let presence = Presence::new(&settings.keys, node, &host);
    Ok(Arc::new(Parts {
        node,
        registration: Part::new(&host),
        host,
        settings,
        store,
        hypervisor,
        placement,
        images,
        records,
        presence,
        uncounted: watch::Sender::default(),
        reserved: Mutex::default(),
        telling: tokio::sync::Mutex::default(),
        troubles: watch::Sender::default(),
        registered: watch::Sender::default(),
        calls,
        health: health::Questions::default(),
        disks: Arc::default(),
        capacity: Asked::default(),
        measured: Mutex::default(),
        metadata: Arc::new(Account::default()),
        jobs: Jobs::default(),
        streams: Streams::default(),
        usage: Recent::default(),
        url: OnceLock::new(),
        inquiries: OnceLock::new(),
    }))
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

    let stop = CancellationToken::new();
    let record = Alive {
        node: parts.node,
        name: parts.settings.name.clone(),
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        formats: Alive::formats_of_this_release(),
        virt_type: host.virt_type.clone(),
        machine: machine(&parts.settings.state_dir).context("failed to tell this machine from others")?,
        host: nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned(),
        url: parts.url.get().cloned(),
        storage: parts.settings.shared.as_ref().map(|shared| shared.storage.clone()),
        started_at: parts.host.now(),
    };
    let mut around = Around::begin(&parts, record, host.bridge, &stop);
    // Nothing is told to anybody as this node before it is certain that no other agent is it.
    let ended = tokio::select! {
        biased;
        () = parts.presence.wait() => None,
        () = shutdown.cancelled() => Some(Ok(())),
        error = around.broken() => Some(Err(error)),
    };
    if let Some(ended) = ended {
        stop.cancel();
        around.end().await?;
        return ended;
    }
    let stop_registration = stop.child_token();
    let (in_registration, registration_stops) = (Arc::clone(&parts), stop_registration.clone());
    let mut registration =
        tokio::spawn(async move { keep_registered(&in_registration, registration_stops).await });
    let driver_stop = CancellationToken::new();
    let mut driver = tokio::spawn(driver::run(Arc::clone(&parts), driver_stop.clone()));
    // Whichever of these ends before it was asked to takes the agent along: nothing lives on deaf.
    let broken: Option<anyhow::Error> = tokio::select! {
        biased;
        () = shutdown.cancelled() => None,
        error = around.broken() => Some(error),
        ended = &mut registration => Some(early(ended, "the registration with placement")),
        ended = &mut driver => Some(early(ended, "the agent's loop")),
    };
    // Nothing new may be claimed here while work comes to its end. Who is not the node any more locks nothing.
    if parts.presence.fence().is_some() {
        // What it is writing at this moment would take the lock away again.
        stop_registration.cancel();
        if !registration.is_finished() {
            tokio::time::timeout(LOCK_TIMEOUT, &mut registration).await.ok();
        }
        lock(&parts).await;
    }
    driver_stop.cancel();
    if !driver.is_finished() {
        driver.await.context("the agent's loop broke")??;
    }
    stop.cancel();
    if !registration.is_finished() {
        registration.await.context("the registration broke")??;
    }
    around.end().await?;
    if let Some(error) = broken {
        return Err(error);
    }
    tracing::info!("ended; guests go on running");
    Ok(())
}

/// What lives as long as the agent, whether it is the node or cannot know that yet: guests have their metadata and are held to their
/// rules also while etcd is away.
struct Around {
    presence: JoinHandle<Result<(), Taken>>,
    metadata: JoinHandle<Result<(), MetadataError>>,
    protection: JoinHandle<()>,
}

impl Around {
    fn begin(parts: &Arc<Parts>, record: Alive, bridge: Option<String>, stop: &CancellationToken) -> Self {
        let (in_presence, stop_presence) = (Arc::clone(parts), stop.clone());
        let (bridges, bridge) = watch::channel(bridge);
        let (answers, stop_metadata) = (Arc::clone(parts), stop.clone());
        let serve =
            async move |bridge, stop| ec_metadata::serve(metadata_config(&answers, bridge), stop).await;
        Self {
            presence: tokio::spawn(async move {
                let (store, state_dir) = (Arc::clone(&in_presence.store), &in_presence.settings.state_dir);
                presence::keep(&in_presence.presence, store, record, state_dir, stop_presence).await
            }),
            metadata: tokio::spawn(async move { serve_metadata(bridge, serve, stop_metadata).await }),
            protection: tokio::spawn(protect(Arc::clone(parts), bridges, stop.clone())),
        }
    }

    /// Why one of them ended before it was asked to.
    async fn broken(&mut self) -> anyhow::Error {
        tokio::select! {
            biased;
            ended = &mut self.presence => early(ended, "the node's key"),
            ended = &mut self.metadata => early(ended, "the metadata service"),
            _ = &mut self.protection => anyhow::anyhow!("looking after the packet rules ended unexpectedly"),
        }
    }

    /// Waits for their end, which they were asked for.
    async fn end(self) -> Result<()> {
        if !self.metadata.is_finished() {
            self.metadata.await.context("the metadata service broke")??;
        }
        if !self.protection.is_finished() {
            self.protection.await.context("looking after the packet rules broke")?;
        }
        if !self.presence.is_finished() {
            self.presence.await.context("the node's key broke")??;
        }
        Ok(())
    }
}

/// Why a task that is to live as long as the agent has ended.
fn early<E: std::error::Error + Send + Sync + 'static>(
    ended: Result<Result<(), E>, tokio::task::JoinError>,
    what: &'static str,
) -> anyhow::Error {
    match ended {
        Ok(Err(error)) => anyhow::Error::from(error).context(what),
        Ok(Ok(())) => anyhow::anyhow!("{what} ended unexpectedly"),
        Err(error) => anyhow::Error::from(error).context(what),
    }
}

fn metadata_config(parts: &Parts, bridge: String) -> MetadataConfig {
    let account = Arc::clone(&parts.metadata);
    MetadataConfig { account, ..MetadataConfig::new(bridge, RecordDir::clone(&parts.records)) }
}

/// Answers the guests on the bridge, where there is one and this process may, until `stop`; on another one, once that is told.
async fn serve_metadata(
    mut bridge: watch::Receiver<Option<String>>,
    serve: impl AsyncFn(String, CancellationToken) -> Result<(), MetadataError>,
    stop: CancellationToken,
) -> Result<(), MetadataError> {
    let mut is_first = true;
    loop {
        let (served, over) = (bridge.borrow_and_update().clone(), stop.child_token());
        let mut serving = std::pin::pin!(async {
            if let Some(served) = served {
                match serve(served, over.clone()).await {
                    Err(error @ MetadataError::NotPermitted { .. }) => {
                        tracing::error!(%error, "guests get no metadata from this agent");
                    }
                    ended => return ended,
                }
            }
            over.cancelled().await;
            Ok(())
        });
        tokio::select! {
            biased;
            ended = &mut serving => match ended {
                // A bridge that is being made at this moment may be half there.
                Err(error) if !is_first => {
                    tracing::warn!(%error, "failed to answer for metadata on the network's new bridge; trying on");
                    tokio::select! {
                        () = tokio::time::sleep(PROTECTION_PERIOD) => continue,
                        () = stop.cancelled() => return Ok(()),
                    }
                }
                ended => return ended,
            },
            // Where nobody will tell of one any more, the agent ends.
            Ok(()) = bridge.changed() => {}
        }
        // It leaves the first one before it goes to the next.
        over.cancel();
        if let Err(error) = serving.await {
            tracing::warn!(%error, "failed to leave the bridge that the network had");
        }
        is_first = false;
    }
}

/// Looks after what holds guests to their own addresses, and at the bridge on which they ask for metadata, until `stop`.
async fn protect(parts: Arc<Parts>, bridges: watch::Sender<Option<String>>, stop: CancellationToken) {
    let mut troubled = false;
    loop {
        tokio::select! {
        biased;
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
        // A network that is being defined anew has none for a while, and may have the same one again.
        if let Ok(Some(bridge)) = parts.hypervisor.bridge().await
            && bridges.borrow().as_ref() != Some(&bridge)
        {
            tracing::info!(bridge, "the guests' network has another bridge: metadata is answered there now");
            bridges.send_replace(Some(bridge));
        }
    }
}

/// Waits for the hypervisor: an agent may be started before libvirtd is. `None` when asked to end.
async fn prepare(parts: &Parts, shutdown: &CancellationToken) -> Result<Option<HostInfo>> {
    tokio::select! {
        biased;
        () = shutdown.cancelled() => Ok(None),
        ready = ready(parts) => ready.map(Some),
    }
}

async fn ready(parts: &Parts) -> Result<HostInfo> {
    let mut told = false;
    loop {
        // It may have gone while libvirt was waited for; the directory that is made ready is the one that counts from then on.
        mounted(&parts.host, &parts.settings).await?;
        match parts.hypervisor.prepare().await {
            Ok(host) => {
                mounted(&parts.host, &parts.settings).await?;
                return Ok(host);
            }
            Err(error) if error.is_transient() => {
                if !told {
                    tracing::warn!(%error, "waiting for the hypervisor");
                    told = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Makes sure that what guests' disks lie on is there, and waits for it where it does not answer.
async fn mounted(host: &Host, settings: &Settings) -> Result<()> {
    let (settings, path) = (settings.clone(), settings.storage());
    let check = move || storage::check(&settings).map_err(|error| ec_runtime::exit::chain(&error));
    storage::answer(host, &path, check).await.map_err(anyhow::Error::msg)
}

async fn lock(parts: &Parts) {
    match tokio::time::timeout(LOCK_TIMEOUT, parts.placement.lock(parts.node)).await {
        Ok(Ok(())) => tracing::info!("locked the inventory: nothing new comes here"),
        Ok(Err(PlacementError::NotFound(_))) => {}
        Ok(Err(error)) => tracing::warn!(%error, "failed to lock the inventory"),
        Err(_) => tracing::warn!("failed to lock the inventory: placement did not answer"),
    }
}

#[cfg(test)]
#[path = "agent_tests.rs"]
mod tests;

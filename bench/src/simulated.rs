//! An agent whose hypervisor is simulated: in this process to see its first act, in one of its own to
//! see its memory.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow};
use async_trait::async_trait;
use ec_hypervisor::SimulatedHypervisor;
use ec_model::NodeId;
use ec_placement_client::PlacementClient;
use ec_runtime::{Host, shutdown_on_signals};
use ec_store::{EtcdStore, Layer, Op, Store, StoreResult, Txn, TxnOutcome};
use ec_tests::tiny_image;
use ecompute::{agent, config::Settings};
use tokio::{runtime::Runtime, sync::mpsc};
use tokio_util::sync::CancellationToken;

/// A write that an agent is about to send.
#[derive(Debug)]
pub(crate) struct Noted {
    /// When the agent asked its store for it.
    pub(crate) at: Instant,
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
}

/// Writes the configuration of a simulated agent into a directory, which becomes its state directory.
pub(crate) fn configure(directory: &Path, node: NodeId, etcd: &str, placement: &str) -> Result<PathBuf> {
    let path = directory.join("compute.yaml");
    // Simulated guests take nothing, so there is room for a thousand on any host.
    let text = format!(
        "uuid: {node}\nname: {node}\netcd: {{endpoints: [\"{etcd}\"]}}\nplacement: {{endpoint: \"{placement}\"}}\n\
         state_dir: {}\nallocation_ratio: {{VCPU: 1000.0, MEMORY_MB: 1000.0}}\nreserved: {{MEMORY_MB: 0, DISK_GB: 0}}\n\
         images: {{local: [{}]}}\n",
        directory.display(),
        tiny_image().parent().unwrap_or(Path::new("/")).display()
    );
    fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
    Ok(path)
}

/// As many threads as the real agent has.
fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("failed to start a runtime")
}

async fn run(config: &Path, noted: Option<mpsc::Sender<Noted>>, shutdown: CancellationToken) -> Result<()> {
    let (settings, _) = Settings::load(Some(config))?;
    let node = settings.uuid.context("the configuration names no uuid")?;
    let etcd = EtcdStore::connect(settings.etcd.clone()).await?;
    let store: Arc<dyn Store> = match noted {
        Some(noted) => Arc::new(NotingStore { etcd, noted }),
        None => Arc::new(etcd),
    };
    let hypervisor = Arc::new(SimulatedHypervisor::new(node));
    let placement = PlacementClient::new(&settings.placement)?;
    let parts = agent::assemble(settings, node, store, hypervisor, placement, Host::default()).await?;
    agent::run_with(parts, shutdown).await
}

/// The whole of a process that is such an agent, until a signal ends it.
pub(crate) fn process(config: &Path) -> Result<()> {
    runtime()?.block_on(async { run(config, None, shutdown_on_signals()?).await })
}

/// Such an agent on threads of this process.
pub(crate) struct AgentThread {
    shutdown: CancellationToken,
    thread: thread::JoinHandle<Result<()>>,
}

impl AgentThread {
    /// Starts it; it tells what it writes.
    pub(crate) fn start(config: PathBuf, noted: mpsc::Sender<Noted>) -> Result<Self> {
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let thread = thread::Builder::new()
            .name("agent".to_owned())
            .spawn(move || runtime()?.block_on(run(&config, Some(noted), stop)))?;
        Ok(Self { shutdown, thread })
    }

    /// Ends it; answers how it ended.
    pub(crate) fn end(self) -> Result<()> {
        self.shutdown.cancel();
        tokio::task::block_in_place(|| self.thread.join())
            .map_err(|_| anyhow!("the simulated agent panicked"))?
    }
}

/// etcd, telling each put before it is sent.
struct NotingStore {
    etcd: EtcdStore,
    noted: mpsc::Sender<Noted>,
}

#[async_trait]
impl Layer for NotingStore {
    fn inner(&self) -> &dyn Store {
        &self.etcd
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let at = Instant::now();
        for op in &txn.then {
            if let Op::Put { key, value, .. } = op {
                // Nobody waits for more than a handful: a full queue is one that is not read now.
                self.noted.try_send(Noted { at, key: key.clone(), value: value.clone() }).ok();
            }
        }
        self.etcd.txn(txn).await
    }
}

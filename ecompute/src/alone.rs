//! For tests: an agent alone with its records, on a store in memory, with a placement of the test's own; or with one that is not reached,
//! and knows how often it was asked.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use ec_hypervisor::SimulatedHypervisor;
use ec_model::{Alive, NodeId};
use ec_placement_client::{Answer, PlacementClient, Request, Transport};
use ec_runtime::{Host, config::parse};
use ec_store::MemoryStore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{agent::assemble, config::Settings, parts::Parts, presence};

#[derive(Default)]
struct Away(AtomicUsize);

#[async_trait]
impl Transport for Away {
    async fn exchange(&self, _: Request) -> Result<Answer, String> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err("it is away".into())
    }
}

/// An agent of this configuration, which is not the node yet.
pub(crate) async fn assembled(
    configuration: &str,
    placement: Arc<dyn Transport>,
) -> (Arc<Parts>, Arc<MemoryStore>) {
    ec_runtime::install_tls_provider();
    let settings = Settings::check(&parse(configuration, Path::new("compute.yaml")).unwrap()).unwrap();
    let node = NodeId::new(uuid::Uuid::from_u128(9));
    let client = PlacementClient::new(&settings.placement).unwrap().over(placement);
    let (store, hypervisor) = (Arc::new(MemoryStore::new()), Arc::new(SimulatedHypervisor::new(node)));
    let parts = assemble(settings, node, store.clone(), hypervisor, client, Host::default());
    (parts.await.unwrap(), store)
}

/// The agent, which is not the node yet.
pub(crate) struct Alone {
    pub(crate) parts: Arc<Parts>,
    pub(crate) store: Arc<MemoryStore>,
    placement: Arc<Away>,
}

impl Alone {
    pub(crate) async fn new(state: &Path) -> Self {
        let placement = Arc::new(Away::default());
        let configuration = format!("name: n\nstate_dir: {}\n", state.display());
        let (parts, store) = assembled(&configuration, placement.clone()).await;
        Self { parts, store, placement }
    }

    /// How often placement was asked until now.
    pub(crate) fn asked(&self) -> usize {
        self.placement.0.load(Ordering::Relaxed)
    }

    /// It is the node until `ends`.
    pub(crate) fn be_the_node(&self, ends: CancellationToken) -> JoinHandle<()> {
        let (running, store) = (Arc::clone(&self.parts), self.store.clone());
        let record = Alive {
            node: running.node,
            name: "n".into(),
            agent: "test".into(),
            formats: Alive::formats_of_this_release(),
            virt_type: "qemu".into(),
            machine: "a".into(),
            host: "h".into(),
            url: None,
            storage: None,
            started_at: running.host.now(),
        };
        tokio::spawn(async move {
            presence::keep(&running.presence, store, record, Path::new("/state"), ends).await.unwrap();
        })
    }
}

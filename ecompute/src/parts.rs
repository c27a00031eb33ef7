//! The parts that an agent works with, made once at its start.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use ec_hypervisor::Hypervisor;
use ec_image::ImageCache;
use ec_metadata::RecordDir;
use ec_model::{InstanceId, NodeId, Resources};
use ec_placement_client::PlacementClient;
use ec_runtime::Host;
use ec_store::Store;
use tokio::sync::watch;

use crate::{config::Settings, presence::Presence};

/// Everything outside the agent that it talks to.
pub struct Parts {
    /// This node.
    pub node: NodeId,
    /// The machine that this agent runs on.
    pub host: Host,
    /// The checked configuration.
    pub settings: Settings,
    /// etcd, or its twin.
    pub store: Arc<dyn Store>,
    /// libvirt, or a simulated one.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// Where capacity is counted.
    pub placement: PlacementClient,
    /// Base images.
    pub images: ImageCache,
    /// The node's own records, which the metadata service reads.
    pub records: Arc<RecordDir>,
    /// Whether this agent is the node.
    pub presence: Presence,
    /// What guests take that are here and that placement does not count, or has no room to: reserved in the inventory.
    pub uncounted: watch::Sender<BTreeMap<InstanceId, Resources>>,
    /// What of each class this agent has reserved last: what an operator reserved is told from it.
    pub reserved: Mutex<BTreeMap<String, u64>>,
    /// Told when the node was registered anew, so that what it holds is looked at.
    pub registered: watch::Sender<()>,
}

impl Parts {
    /// The key of the instance's request on this node.
    pub fn request_key(&self, instance: InstanceId) -> String {
        self.settings.keys.request(self.node, instance)
    }

    /// The key of the instance's status on this node.
    pub fn status_key(&self, instance: InstanceId) -> String {
        self.settings.keys.status(self.node, instance)
    }
}

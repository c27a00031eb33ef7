//! The parts that an agent works with, made once at its start.

use std::sync::Arc;

use ec_hypervisor::Hypervisor;
use ec_image::ImageCache;
use ec_metadata::RecordDir;
use ec_model::{InstanceId, NodeId};
use ec_placement_client::PlacementClient;
use ec_store::Store;

use crate::config::Settings;

/// Everything outside the agent that it talks to.
pub struct Parts {
    /// This node.
    pub node: NodeId,
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

//! The parts that an agent works with, made once at its start.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
};

use ec_calls::{Part, Standing};
use ec_hypervisor::{FirstDirectory, Hypervisor};
use ec_image::ImageCache;
use ec_metadata::{Account, RecordDir};
use ec_model::{InstanceId, NodeId, Resources, Trouble};
use ec_placement_client::PlacementClient;
use ec_runtime::Host;
use ec_store::Store;
use tokio::sync::{mpsc, watch};

use crate::{
    calls::Calls,
    config::Settings,
    health::Questions,
    inventory,
    jobs::Jobs,
    port::{Inquiry, Recent, Streams},
    presence::Presence,
    register::{Capacity, Reserved, Stood},
    storage::Asked,
};

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
    /// What of each class this agent may have reserved: what an operator reserved is told from it.
    pub(crate) reserved: Mutex<Reserved>,
    /// Held by who tells placement of amounts: what one part of this agent has just reserved would pass for an operator's with another.
    pub(crate) telling: tokio::sync::Mutex<Stood>,
    /// What of the host keeps new work away.
    pub troubles: watch::Sender<Vec<Trouble>>,
    /// What was measured of its file systems, for that.
    pub(crate) health: Questions,
    /// In which directory guests' disks were first looked for.
    pub(crate) disks: Arc<FirstDirectory>,
    /// What was measured of what it has to give, and whether its storage was there.
    pub(crate) capacity: Asked<Capacity>,
    /// What of that could be measured last.
    pub(crate) measured: Mutex<Option<inventory::Measured>>,
    /// Told when the node was registered anew, so that what it holds is looked at.
    pub registered: watch::Sender<()>,
    /// Whether placement knows the node as it is.
    pub(crate) registration: Part,
    /// The calls to all of these.
    pub(crate) calls: Calls,
    /// What guests asked of the metadata service.
    pub(crate) metadata: Arc<Account>,
    /// The jobs that ended.
    pub(crate) jobs: Jobs,
    /// Who may look at guests through the agent's port.
    pub(crate) streams: Streams,
    /// What guests used when somebody asked last.
    pub(crate) usage: Recent,
    /// Where others reach that port, where there is one.
    pub url: OnceLock<String>,
    /// Where the agent's loop takes questions, once it has begun.
    pub(crate) inquiries: OnceLock<mpsc::Sender<Inquiry>>,
}

impl Parts {
    /// How all stands that the agent needs to do its work, by name.
    pub(crate) fn standings(&self) -> [(&'static str, Standing); 5] {
        [
            ("etcd", &self.calls.etcd.part),
            ("lease", &self.presence.lease),
            ("placement", &self.calls.placement.part),
            ("registration", &self.registration),
            ("libvirt", &self.calls.libvirt.part),
        ]
        .map(|(name, part)| (name, part.standing()))
    }

    /// The key of the instance's request on this node.
    pub fn request_key(&self, instance: InstanceId) -> String {
        self.settings.keys.request(self.node, instance)
    }

    /// The key of the instance's status on this node.
    pub fn status_key(&self, instance: InstanceId) -> String {
        self.settings.keys.status(self.node, instance)
    }
}

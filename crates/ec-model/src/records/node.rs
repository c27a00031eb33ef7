//! The nodes: those that there are, and those that are alive.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Record, Request};
use crate::NodeId;

/// A node of the cluster, alive or not. Its agent writes it when it comes for the first time; it stays until somebody
/// deletes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The node, as in the key; its resource provider's uuid.
    pub node: NodeId,
    /// Its resource provider's name.
    pub name: String,
    /// When it came for the first time.
    pub created_at: Timestamp,
}

/// A living agent. The key is on a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alive {
    /// The node, as in the key.
    pub node: NodeId,
    /// Its resource provider's name.
    pub name: String,
    /// The release of the agent.
    pub agent: String,
    /// The last format of each kind of record that the agent reads: nothing newer is written for it.
    #[serde(default)]
    pub formats: BTreeMap<String, u32>,
    /// How guests run: `kvm` or `qemu` (emulated).
    pub virt_type: String,
    /// The machine it runs on: its kernel's boot and its state directory. Two agents with one uuid differ in it.
    #[serde(default)]
    pub machine: String,
    /// That machine's hostname, for messages.
    #[serde(default)]
    pub host: String,
    /// Where its port is, as others reach it: `http://host:port`, or `https`; nothing where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// When the agent came up.
    pub started_at: Timestamp,
}

impl Alive {
    /// What an agent of this release reads.
    pub fn formats_of_this_release() -> BTreeMap<String, u32> {
        BTreeMap::from([(Request::WHAT.to_owned(), Request::FORMAT)])
    }

    /// Whether the agent reads records of this kind as this release writes them.
    pub fn reads<R: Record>(&self) -> bool {
        self.formats.get(R::WHAT).is_some_and(|last| *last >= R::FORMAT)
    }
}

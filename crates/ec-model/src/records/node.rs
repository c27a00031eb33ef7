//! The nodes: those that there are, and those that are alive.

use std::{collections::BTreeMap, fmt};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

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
    /// What of its host keeps new work away, as its agent told last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,
    /// Whether it is let in no more (`eschedule node revoke`): nothing new is written for it, since whoever has its credentials
    /// may still watch what is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub revoked: bool,
}

/// What keeps new work away from a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// What it is about.
    pub kind: TroubleKind,
    /// Since when.
    pub since: Timestamp,
    /// What was measured then, for people.
    pub why: String,
}

/// What a host can be in trouble with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TroubleKind {
    /// Hardly any memory is left, or everything waits for it.
    Memory,
    /// A file system with guests' disks or images is nearly full, has hardly an inode left or cannot be written.
    Disk,
    /// The time of day is another than placement's.
    Clock,
    /// The guests' network has no address for another one.
    Network,
    /// One that a later release has.
    #[serde(other)]
    Unknown,
}

impl TroubleKind {
    /// All that this release knows.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Disk, Self::Clock, Self::Network];
}

impl fmt::Display for TroubleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Clock => "clock",
            Self::Network => "network",
            Self::Unknown => "unknown",
        })
    }
}

/// Storage that several nodes share: a directory that each of them has mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedStorage {
    /// The resource provider of which guests' disks there are claimed.
    pub provider: NodeId,
    /// What operators call it, on each of its nodes alike.
    pub name: String,
}

impl SharedStorage {
    /// The storage of that name. Its provider's uuid comes of the name, so that its nodes agree without asking each other.
    pub fn named(name: &str) -> Self {
        const SPACE: Uuid = Uuid::from_u128(0x6a0f_7d3c_52b1_4e0a_9f64_18c2_7b5e_d301);
        Self { provider: NodeId::new(Uuid::new_v5(&SPACE, name.as_bytes())), name: name.to_owned() }
    }

    /// The aggregate of those that share it (`MISC_SHARES_VIA_AGGREGATE`).
    pub fn aggregate(&self) -> Uuid {
        Uuid::new_v5(&self.provider.uuid(), b"aggregate")
    }

    /// The name of its provider: no node's, since those have no colon.
    pub fn provider_name(&self) -> String {
        format!("storage:{}", self.name)
    }
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
    /// The storage that it shares with others, where its guests' disks lie there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<SharedStorage>,
    /// When the agent came up.
    pub started_at: Timestamp,
}

impl Alive {
    /// What an agent of this release reads.
    pub fn formats_of_this_release() -> BTreeMap<String, u32> {
        BTreeMap::from([(Request::WHAT.to_owned(), Request::FORMAT)])
    }

    /// Whether the agent reads records of this kind that are of this format.
    pub fn reads<R: Record>(&self, format: u32) -> bool {
        self.formats.get(R::WHAT).is_some_and(|last| *last >= format)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_storage_is_the_same_by_its_name_and_its_provider_is_no_nodes() {
        let [nfs, other] = ["nfs", "other"].map(SharedStorage::named);
        assert_eq!(nfs, SharedStorage::named("nfs"));
        assert_eq!(nfs.provider_name(), "storage:nfs");
        let uuids = [&nfs, &other].map(|storage| [storage.provider.uuid(), storage.aggregate()]).concat();
        assert!(
            uuids.iter().all(|uuid| uuids.iter().filter(|other| *other == uuid).count() == 1),
            "{uuids:?}"
        );
        assert!(!uuids.contains(&Uuid::default()));
    }
}

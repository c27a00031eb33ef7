//! What is of an instance on one node.

use std::{fmt, net::IpAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Access, Attachment, Rebuilt, Rescued, Resized, Workload};
use crate::{InstanceId, MacAddr, NodeId};

/// Within [`Status::volumes_failed`]: a disk changes hands when its copy is made, and whoever waits for that goes on waiting.
pub const BEING_COPIED: &str = "is being copied";

/// Where an instance stands. The life: `SCHEDULED → PREPARING → STARTING → ACTIVE`, `STOPPED` when the
/// guest has ended, `DESTROYING` until its keys are gone, `ERROR` with a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// Seen by the agent, not begun.
    Scheduled,
    /// Image and overlay are being made.
    Preparing,
    /// The domain is defined, or runs and has no address yet.
    Starting,
    /// The domain runs and has its address.
    Active,
    /// The domain is there and its processors are halted: by hand, by an I/O error, by a full disk of the host.
    Paused,
    /// The domain is there and does not run.
    Stopped,
    /// The guest is asked to end, or being ended, since its user wants it stopped.
    Stopping,
    /// The same, and it is started again.
    Rebooting,
    /// The guest's memory is being written to the node's disk.
    Suspending,
    /// The guest does not run; its memory lies on the node's disk.
    Suspended,
    /// Its disk is being made anew; the guest runs until the new one is there.
    Rebuilding,
    /// It is being booted from another disk; the guest runs on its own until that is there.
    Rescuing,
    /// It runs from that disk, and its own is beside it.
    Rescued,
    /// It is being booted from its own disk again.
    Unrescuing,
    /// Its guest is being ended, or its disk grown, since it is to be of another size.
    Resizing,
    /// It has another size, which its user has neither confirmed nor reverted. Agents tell how it is besides.
    #[serde(rename = "VERIFY_RESIZE")]
    VerifyResize,
    /// Being taken apart.
    Destroying,
    /// Failed; the reason says why.
    Error,
    /// A guest of ours that no request speaks of: etcd was restored to a time before it. It runs on and is counted.
    Unclaimed,
    /// One that a later release has.
    #[serde(other)]
    Unknown,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::Scheduled,
        Self::Preparing,
        Self::Starting,
        Self::Active,
        Self::Paused,
        Self::Stopped,
        Self::Stopping,
        Self::Rebooting,
        Self::Suspending,
        Self::Suspended,
        Self::Rebuilding,
        Self::Rescuing,
        Self::Rescued,
        Self::Unrescuing,
        Self::Resizing,
        Self::VerifyResize,
        Self::Destroying,
        Self::Error,
        Self::Unclaimed,
        Self::Unknown,
    ];

    /// The word for it, in records and for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "SCHEDULED",
            Self::Preparing => "PREPARING",
            Self::Starting => "STARTING",
            Self::Active => "ACTIVE",
            Self::Paused => "PAUSED",
            Self::Stopped => "STOPPED",
            Self::Stopping => "STOPPING",
            Self::Rebooting => "REBOOTING",
            Self::Suspending => "SUSPENDING",
            Self::Suspended => "SUSPENDED",
            Self::Rebuilding => "REBUILDING",
            Self::Rescuing => "RESCUING",
            Self::Rescued => "RESCUED",
            Self::Unrescuing => "UNRESCUING",
            Self::Resizing => "RESIZING",
            Self::VerifyResize => "VERIFY_RESIZE",
            Self::Destroying => "DESTROYING",
            Self::Error => "ERROR",
            Self::Unclaimed => "UNCLAIMED",
            Self::Unknown => "UNKNOWN",
        }
    }

    /// The state that a word is.
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == word)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is of an instance. Written by its node's agent only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// What kind of workload it is.
    #[serde(default, skip_serializing_if = "Workload::is_machine")]
    pub kind: Workload,
    /// The node, as in the key.
    pub node: NodeId,
    /// The placement that this is about: the request's. 0 where there was none that could be read.
    #[serde(default)]
    pub epoch: u64,
    /// The generation of the request that was acted upon last.
    #[serde(default)]
    pub observed_generation: u64,
    /// The generation of the wish for power that was carried out last: [`crate::PowerWish::generation`].
    #[serde(default)]
    pub power_generation: u64,
    /// What came of the last wish for a new disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuilt: Option<Rebuilt>,
    /// What came of the wish to boot it from another disk, for as long as that is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescued: Option<Rescued>,
    /// What came of the last wish for another size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resized: Option<Resized>,
    /// How often in a row it was started again by its restart policy.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub restarts: u32,
    /// Where it stands.
    pub state: State,
    /// Why, where the state needs a reason: always with `ERROR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What its agent is about with it, or waits for, while it is on the way to where it shall be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
    /// How far a long step is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The first address of the first interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// Every address known, of every interface.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Address>,
    /// The guest's hostname.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The volumes that it has, as its agent saw them; while they are being changed, all that it may have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Attachment>,
    /// They are being changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub volumes_changing: bool,
    /// Why it has not all volumes that it is to have, or more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes_failed: Option<String>,
    /// The end of the guest's console, with an error that came after its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<String>,
    /// What became of the last wish to look at it: [`crate::Request::access`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// When the state was entered.
    pub since: Timestamp,
    /// When the domain was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// When this record was written.
    pub updated_at: Timestamp,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
pub(super) fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Status {
    /// Whether it boots from its rescue disk, as far as its agent has told.
    pub fn is_rescued(&self) -> bool {
        self.rescued.as_ref().is_some_and(|rescued| rescued.failed.is_none())
    }
}

/// How far a long step is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What is under way: `image`.
    pub step: String,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

impl Progress {
    /// Percent done, where the whole is known.
    pub fn percent(&self) -> Option<u64> {
        self.total.filter(|total| *total > 0).map(|total| (self.done.min(total)) * 100 / total)
    }
}

/// One address of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// The interface it belongs to.
    pub mac: MacAddr,
    /// Number of the interface: 0 on the network, 1 on the bridge.
    pub nic: u8,
    /// How it became known.
    pub source: AddressSource,
}

/// How an address became known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressSource {
    /// A DHCP lease of the libvirt network.
    Lease,
    /// The host's neighbour table.
    Arp,
    /// The guest agent.
    Agent,
    /// A way that a later release has.
    #[serde(other)]
    Unknown,
}

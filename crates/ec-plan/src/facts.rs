//! What is known of one instance at one moment.

use std::time::Duration;

use ec_model::{Observed, State};

/// What the request says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// There is no request.
    Nothing,
    /// Built and running.
    Active,
    /// Gone.
    Destroyed,
    /// The record cannot be read: malformed, or of a later release.
    Unreadable,
}

/// What is known of the instance's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// Not asked yet, or placement does not answer.
    Unknown,
    /// Placement has none.
    Absent,
    /// Placement has one, but from other nodes' providers.
    Elsewhere,
    /// Placement has one from this node's providers.
    Held {
        /// For how long this agent has seen it.
        seen_for: Duration,
    },
}

/// The status as it lies in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatusFacts {
    /// There is none.
    Absent,
    /// It cannot be read: malformed, or of a later release.
    Unreadable,
    /// It was read.
    Known(KnownStatus),
}

/// What decisions need of a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownStatus {
    /// The state written last.
    pub state: State,
    /// The reason written with it.
    pub reason: Option<String>,
    /// Whether it holds an address.
    pub has_address: bool,
    /// Whether the start of the domain was noted, by this agent or one before it.
    pub start_noted: bool,
}

/// The node's own record of an instance, on its disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RecordFacts {
    /// There is none.
    #[default]
    Absent,
    /// It cannot be read: damaged, or of a later release.
    Unreadable,
    /// It was read.
    Kept {
        /// A start was begun: from then on a guest may have written its disk.
        started: bool,
    },
}

/// Everything known of one instance at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// What shall be.
    pub wanted: Wanted,
    /// What was written last.
    pub status: StatusFacts,
    /// What the hypervisor has, as it was last seen.
    pub observed: Observed,
    /// Work of ours changed what the hypervisor has, and it could not be asked since.
    pub unseen: bool,
    /// The node's own record.
    pub record: RecordFacts,
    /// A user's destroy was begun here. A uuid is used once, so whatever turns up later goes too.
    pub buried: bool,
    /// What placement has.
    pub allocation: Allocation,
    /// Whether control tools of this cloud asked for the instance; `None` is not known.
    pub asked_for: Option<bool>,
    /// For how long this agent has looked for an address and found none.
    pub searched: Duration,
    /// How long ago it was let go on after a pause, by this agent.
    pub resumed: Option<Duration>,
}

/// The times that decisions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A guest without an address for so long is told.
    pub address: Duration,
    /// An allocation without a request for this long belongs to a claim whose request never arrived.
    pub grace: Duration,
}

//! What is known of one instance at one moment.

use ec_model::{Observed, State};
use jiff::{SignedDuration, Timestamp};

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
    /// Placement has one; first seen by this agent at that time.
    Held {
        /// When it was first seen; grace counts from here.
        since: Timestamp,
    },
}

/// What decisions need of the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusFacts {
    /// The state written last.
    pub state: State,
    /// Whether it holds an address.
    pub has_address: bool,
    /// When the domain was started, by this agent or one before it.
    pub started_at: Option<Timestamp>,
}

/// Everything known of one instance at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// What shall be.
    pub wanted: Wanted,
    /// What was written last; `None` where there is no status key.
    pub status: Option<StatusFacts>,
    /// What the hypervisor has.
    pub observed: Observed,
    /// Whether the node's own record of it (for metadata, for keeping its base image) is there.
    pub record: bool,
    /// What placement has.
    pub allocation: Allocation,
}

/// The times that decisions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A guest without an address for this long after its start has failed.
    pub address: SignedDuration,
    /// An allocation without a request for this long belongs to a claim whose request never arrived.
    pub grace: SignedDuration,
}

//! What is done for an instance, and what is learnt from its end.

use std::{borrow::Cow, sync::Arc};

use ec_model::{Address, Edition, InstanceId, Observed, Request, Resources};

use super::{Held, StatusEntry};
use crate::{RecordFacts, machine::Effect};

/// Everything a worker needs to know of its instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The instance.
    pub instance: InstanceId,
    /// What to do.
    pub work: Work,
    /// What for, in a few words.
    pub why: Cow<'static, str>,
    /// Its request, where there is a readable one.
    pub request: Option<Arc<Request>>,
    /// The revision of its request's key, where there is one.
    pub request_revision: Option<i64>,
    /// Of which request the node's own record keeps a copy.
    pub kept: Option<Edition>,
    /// Its status as last read or written.
    pub status: StatusEntry,
    /// What it holds in placement.
    pub allocated: Option<Resources>,
}

/// What is to be done for an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// These effects, in order.
    Effects(Vec<Effect>),
    /// Write ERROR with this reason.
    Fail(String),
    /// Write what stands in the way for now, whose status says otherwise.
    Delayed(String),
    /// Write these addresses of a guest that runs, which makes one that was requested ACTIVE.
    Addresses(Vec<Address>),
}

/// What was done, and how it stopped.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The instance.
    pub instance: InstanceId,
    /// What is otherwise than before, in the order in which it became so.
    pub done: Vec<Change>,
    /// How it stopped.
    pub outcome: Outcome,
}

/// Something that a job changed, or learnt.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The status that lies in etcd now.
    Status(StatusEntry),
    /// What the hypervisor has now; or why that cannot be told, although it is otherwise than before.
    Observed(Result<Observed, String>),
    /// The node's own record now.
    Record(RecordFacts),
    /// It was noted that a user destroyed the instance here, as of that placement where it is known.
    Buried(Option<u64>),
    /// That was taken back.
    Unburied,
    /// What it holds in placement now.
    Allocation(Held),
    /// The guest was asked to end by itself.
    AskedToEnd,
    /// The hypervisor is there, and it could not be asked: it may never be.
    AskedInVain,
    /// A paused guest was let go on.
    Resumed,
    /// It cannot have the volumes that it is to have, for now.
    VolumesFailed,
    /// Its request's key was deleted.
    RequestDropped,
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All was done.
    Done,
    /// It was asked to stop, at a safe point; or what it stood on has changed.
    Abandoned,
    /// For a passing reason; try again later.
    Retry(String),
    /// For a reason that may pass; if it has not in a while, it is for good.
    RetryBounded(String),
    /// For good.
    Failed(String),
}

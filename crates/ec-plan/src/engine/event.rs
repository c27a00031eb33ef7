//! What goes into the engine, and what comes out.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_model::{InstanceId, Observed, Resources};
use jiff::Timestamp;

use super::{Found, Held, Job, Report, Requested, Search, Seen};

/// A moment, as the runtime read it from its clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Since the agent's start, by a clock that never goes back.
    pub since_start: Duration,
    /// By the clock on the wall.
    pub stamp: Timestamp,
}

/// The moment at which a look began, as the engine counts them: to tell what it saw from what was done since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Begun(pub(super) u64);

/// What happens.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Every request of this node, as listed: what is not among them is gone.
    Listed(Vec<(InstanceId, Requested)>),
    /// Requests that were put, or deleted.
    Changed(Vec<(InstanceId, Option<Requested>)>),
    /// The watch on the requests broke; it is being made anew, and lists them again.
    WatchLost(String),
    /// The answer to [`Command::LookAtAll`].
    Looked(Begun, Result<Seen, String>),
    /// The answer to [`Command::Observe`].
    Observed(InstanceId, Begun, Result<Observed, String>),
    /// The answer to [`Command::AskPlacement`].
    Allocation(InstanceId, Result<Held, String>),
    /// The answer to [`Command::AskWhose`].
    Whose(InstanceId, Result<Whose, String>),
    /// The answer to [`Command::Audit`]; nothing where placement does not know the node.
    Audited(Begun, Result<Option<Audit>, String>),
    /// A search for addresses that worked.
    Found(Found),
    /// The hypervisor has something to tell of an instance.
    Hint(InstanceId),
    /// It may have missed to tell something.
    HintAll,
    /// A job has come to its end.
    Ended(Report),
    /// The node's keys were put anew or lost, which tells of an etcd that may be another.
    PresenceChanged,
    /// The node was registered with placement anew.
    Registered,
    /// The time has come that [`crate::engine::Engine::next_due`] told.
    Due,
    /// The agent ends. Nothing is to happen after it.
    Ending,
}

/// Every allocation of a node, and of which it is not known why: placement did not tell of that one, and may have told of all others.
pub type Audit = BTreeMap<InstanceId, Result<Resources, String>>;

/// What control tools have to do with an allocation that no request speaks of, as far as this agent knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Nothing: it is somebody else's.
    Nobodys,
    /// They asked for the instance, and have not requested it here.
    AskedFor,
    /// They have requested it here, and the watch was silent.
    Requested,
}

/// What is to be done. Each that has an answer gets exactly one.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Look at statuses, domains, disks and records: [`Event::Looked`].
    LookAtAll(Begun),
    /// Look at what the hypervisor has of one instance: [`Event::Observed`].
    Observe(InstanceId, Begun),
    /// Ask placement what one instance holds: [`Event::Allocation`].
    AskPlacement(InstanceId),
    /// Ask etcd whether control tools asked for one instance, and whether it is requested: [`Event::Whose`].
    AskWhose(InstanceId),
    /// Have the requests listed anew: the watch is silent.
    Relist,
    /// Ask placement for every allocation on this node: [`Event::Audited`].
    Audit(Begun),
    /// Begin this: [`Event::Ended`].
    Begin(Box<Job>),
    /// Ask this instance's job to stop at its next safe point.
    Cancel(InstanceId),
    /// Have this instance's job go on for this request, which differs from its own in nothing that the job is about.
    TakeUp(InstanceId, Requested),
    /// From now on look for the addresses of these.
    Search(Search),
    /// Placement counts these; nothing need be reserved for them.
    Counted(BTreeSet<InstanceId>),
    /// Tell people.
    Tell(Tell),
}

/// Something to tell people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tell {
    /// Whether an operator should read it, or only who looks for the reason of something.
    pub warning: bool,
    /// Of which instance, where it is of one.
    pub instance: Option<InstanceId>,
    /// What.
    pub what: Cow<'static, str>,
    /// Why, where somebody said so.
    pub why: Option<String>,
}

//! What to do about one instance: a virtual machine, or a volume ([`volume`]).
//!
//! [`plan`] first asks what is wanted, and whether a guest ever ran. Each of the answers has a short list of
//! **aspects** in order of dependency. An aspect is a pure function of the facts: nothing where all of it is as it
//! shall be, else the plan to get it there. The first that has a plan is the one that counts; what follows stands
//! on it, and is looked at when it is done.

mod kept;
mod new;
mod power;
mod rebuild;
mod rescue;
mod resize;
mod unrequested;
mod volume;
mod volumes;

use std::{borrow::Cow, time::Duration};

use ec_model::{AccessWish, Handover, InstanceId, Power, RunState, State, Workload};

use crate::{Facts, KnownStatus, Limits, RecordFacts, StatusFacts, Wanted};

/// One step in the world. Every one is idempotent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Write the status with this state, for this reason.
    Announce(State, Option<String>),
    /// Fetch the image, keep the node's record, make the overlay.
    PrepareDisk,
    /// Write the node's record of a guest that is here already.
    KeepRecord,
    /// Write into the node's record what is asked for: a copy of that, and what the guest is told of itself in its user's
    /// words.
    KeepIntent,
    /// Define the domain as allocated; one that is there for good already stays as it is.
    Define,
    /// Define the domain for good that is up and was undefined.
    Persist,
    /// Note in the node's record that a guest may write its disk from now on.
    MarkStarted,
    /// Start the domain.
    Start,
    /// Start the domain from its rescue disk, with its own beside it.
    StartRescue,
    /// Write the status with the time of the start.
    NoteStart,
    /// Let a paused domain go on.
    Resume,
    /// Ask the guest to end by itself.
    ShutDown,
    /// End the guest, and keep all that is of it.
    PowerOff,
    /// Halt the guest's processors.
    Pause,
    /// Write the guest's memory to the node's disk, and end it.
    Save,
    /// Delete the memory that was saved of the guest, which boots anew.
    DropMemory,
    /// Write the status with this state, for this reason, and that the wish for power was carried out.
    NotePower(State, Option<String>),
    /// Write STARTING, and that the wish for power is to be carried out once more; so often in a row it was started by
    /// its restart policy.
    Reopen(u32),
    /// Fetch the image of the wish for a new disk, and make an overlay on it beside the one that there is.
    PrepareRebuild,
    /// Put that overlay in the place of the old one, which goes, and note in the node's record that the wish was carried
    /// out.
    ReplaceDisk,
    /// Note in the node's record that the wish for a new disk failed, for this reason; the old one stays.
    GiveUpRebuild(String),
    /// Write the status with what came of the wish for a new disk.
    NoteRebuild,
    /// Delete the overlay that was to take the place of a disk.
    DropSuccessor,
    /// Fetch the image of the wish for a rescue disk, and make an overlay on it beside its own disk.
    PrepareRescue,
    /// Note in the node's record that its guest is started from that from now on.
    EnterRescue,
    /// Delete the rescue disk, and note in the node's record that its guest is started from its own from now on.
    LeaveRescue,
    /// Note in the node's record that the wish for a rescue disk failed, for this reason.
    GiveUpRescue(String),
    /// Write the status with what came of the wish for a rescue disk.
    NoteRescue,
    /// Claim in placement what it is to take, beside what it has claimed.
    Cover,
    /// Grow its disk, and give the guest that runs what it is to have beside what it has, and its domain for good, and
    /// note that in the node's record; where that cannot be, write RESIZING.
    Grow,
    /// Grow its disk, define its domain as large as is wanted, and note that in the node's record.
    Resize,
    /// Define its domain as large as it was, and note in the node's record that the wish for another size failed, for
    /// this reason.
    GiveUpResize(String),
    /// Note that it is well with its size, and write the status with what came of the wish for it.
    NoteResize,
    /// Give its domain the volumes that it is to have, and take others away, after the status says which it may have then;
    /// where that cannot be, the status says why.
    SetVolumes,
    /// Write the status with the volumes that it has.
    NoteVolumes,
    /// Keep the node's record of a volume, and make its disk: of an image, which is fetched, as a copy of another, or empty.
    PrepareVolume,
    /// Have a volume's disk be another node's, which has the same storage, and this node know no more of it.
    HandOver,
    /// Wait until another node has handed a volume's disk over, and keep the node's record of it.
    Receive,
    /// Grow a volume's disk, also under the guest that has it, and note that in the node's record.
    Extend,
    /// Have somebody look at it: answer this wish.
    Admit(AccessWish),
    /// Note on this node that a user destroyed the instance.
    Bury,
    /// End and undefine the domain, delete its disk and its console log.
    RemoveDomain,
    /// Delete the node's record.
    DropRecord,
    /// Look once more whether the node's record cannot be read, and stop where it can: somebody may have mended it since.
    Reread,
    /// Claim in placement what the guest takes.
    Claim,
    /// Look once more that nothing of it is here, and stop where something is: another node may have handed a volume over since.
    Ascertain,
    /// Ask etcd itself whether a request speaks of it, and stop where one does: the watch that would have told may be late.
    Inquire,
    /// Give the allocation back, where it is one of this node.
    Release,
    /// Delete request, user-data and status: the instance is gone.
    DropKeys,
    /// Delete the request and leave the ERROR status on a lease.
    EndInError,
}

use Effect::{
    Admit, Announce, Ascertain, Bury, Claim, Cover, Define, DropKeys, DropMemory, DropRecord, DropSuccessor,
    EndInError, EnterRescue, Extend, GiveUpRescue, GiveUpResize, Grow, HandOver, Inquire, KeepIntent,
    KeepRecord, LeaveRescue, MarkStarted, NotePower, NoteRebuild, NoteRescue, NoteResize, NoteStart,
    NoteVolumes, Pause, Persist, PowerOff, PrepareDisk, PrepareRebuild, PrepareRescue, PrepareVolume,
    Receive, Release, RemoveDomain, Reopen, ReplaceDisk, Reread, Resize, Resume, Save, SetVolumes, ShutDown,
    Start, StartRescue,
};

/// What to do about one instance, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What comes next.
    pub next: Next,
    /// What the agent is about, or what it waits for, in a few words.
    pub why: Cow<'static, str>,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Nothing: all is as it shall be.
    Settled,
    /// Perform these, in order, then plan again.
    Run(Vec<Effect>),
    /// Find this out, then plan again.
    Ask(Question),
    /// Nothing until then.
    Wait(Until),
    /// Nothing can be done about it until something changes.
    Stuck(Problem),
}

/// What has to be found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Placement: what the instance holds.
    Placement,
    /// etcd: whether the instance was asked for by this cloud's tools.
    Whose,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// An address of the guest, which runs.
    Address,
    /// A look at what the hypervisor has.
    Sight,
    /// That the copy is made which was wished before its disk is to be otherwise.
    Copied,
    /// So long.
    After(Duration),
}

/// What stands in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The status says it already.
    Told,
    /// ERROR is to be written with this reason; then what never ran is swept.
    Failed(String),
    /// The operator is to be told, and nothing touched.
    Report(&'static str),
}

/// A paused guest that was let go on is let go on again at the earliest after so long.
pub const RESUME_PERIOD: Duration = Duration::from_secs(10);

/// How it ends what is told of one that waits until its disk is copied.
const BEFORE: &str = ", and is made before that is otherwise";

/// What is waited for of a guest that was started.
pub(crate) const LOOKS_FOR_ADDRESS: &str = "the guest runs; looking for its address";

/// One side of an instance: its plan, or nothing where that side is as it shall be.
type Aspect = fn(&Facts, &Limits) -> Option<Plan>;

/// What to do about an instance, from everything known of it.
pub fn plan(facts: &Facts, limits: &Limits) -> Plan {
    let mut plan = decide(facts, limits);
    // That a wish cannot be carried out for want of the node's record is told for good: not by what was seen of that a while ago.
    if let Next::Run(effects) = &mut plan.next
        && !matches!(facts.record, RecordFacts::Kept { .. })
        && effects.iter().any(|effect| matches!(effect, NoteRebuild | NoteRescue | NoteResize))
    {
        effects.insert(0, Reread);
    }
    plan
}

fn decide(facts: &Facts, limits: &Limits) -> Plan {
    match facts.wanted {
        // Whose disk has not come is destroyed by the node that had it, too, and there it may lie still: that gives back what it holds.
        Wanted::Destroyed if matches!(facts.handover, Some(Handover::From(_))) && !ran(facts) => {
            destroy(&[], "its user destroyed it, and its disk has not come")
        }
        Wanted::Destroyed if let Some(copy) = facts.copied_by => {
            Plan::after_copy(facts, copy, Some(State::Destroying))
        }
        Wanted::Destroyed => destroy(&[Release], "its user destroyed it"),
        // What cannot be seen is not judged. A destroy takes everything, whatever it is.
        _ if facts.unseen => Plan::wait(Until::Sight, "waiting to see what there is of it"),
        Wanted::Unreadable => Plan::report("its request cannot be read; everything of it is left as it is"),
        _ if facts.status == StatusFacts::Unreadable => {
            Plan::report("its status cannot be read; everything of it is left as it is")
        }
        // The destroy was acknowledged. This request came back with an older etcd.
        Wanted::Active if facts.buried => {
            destroy(&[Release], "its user destroyed it before this request came back")
        }
        Wanted::Active if facts.kind == Workload::Volume => volume::plan(facts, limits),
        Wanted::Active if ran(facts) => kept::plan(facts, limits),
        Wanted::Active => first(&new::ASPECTS, facts, limits),
        Wanted::Nothing => first(&unrequested::ASPECTS, facts, limits),
    }
}

fn destroy(release: &[Effect], why: &'static str) -> Plan {
    let first = [Announce(State::Destroying, None), Bury, RemoveDomain, DropRecord];
    Plan::run(first.iter().chain(release).chain(&[DropKeys]).cloned().collect(), why)
}

/// Whether a guest may ever have written the disk. Where nobody can tell, it may have.
pub fn ran(facts: &Facts) -> bool {
    let told = known(facts).is_some_and(|status| status.start_noted || is_of_what_ran(status.state));
    let recorded = match facts.record {
        RecordFacts::Kept { started, .. } => started,
        RecordFacts::Unreadable => true,
        // A volume may be written by others.
        RecordFacts::Absent => facts.observed.volume && !facts.on_volume,
    };
    let seen = !matches!(facts.observed.domain, None | Some(RunState::NotStarted));
    told || recorded || seen
}

/// Whether only what ran is told to be so. Of a start whose note was lost nothing else may tell.
pub(crate) fn is_of_what_ran(state: State) -> bool {
    matches!(
        state,
        State::Active
            | State::Paused
            | State::Stopped
            | State::Stopping
            | State::Rebooting
            | State::Suspending
            | State::Suspended
            | State::Rebuilding
            | State::Rescuing
            | State::Rescued
            | State::Unrescuing
            | State::Resizing
            | State::VerifyResize
            | State::Unclaimed
    )
}

/// The plan of the first aspect that is not as it shall be.
fn first(aspects: &[Aspect], facts: &Facts, limits: &Limits) -> Plan {
    aspects
        .iter()
        .find_map(|aspect| aspect(facts, limits))
        .unwrap_or(Plan { next: Next::Settled, why: Cow::Borrowed("all is as it shall be") })
}

fn known(facts: &Facts) -> Option<&KnownStatus> {
    match &facts.status {
        StatusFacts::Known(status) => Some(status),
        StatusFacts::Absent | StatusFacts::Unreadable => None,
    }
}

/// Whether its memory is saved, and it is wished to go on from there, which it does before anything else is done to it.
fn goes_on_first(facts: &Facts) -> bool {
    facts.observed.domain == Some(RunState::Saved)
        && facts.power.pending
        && facts.power.wanted != Power::Suspended
}

/// The state told last.
fn state(facts: &Facts) -> Option<State> {
    known(facts).map(|status| status.state)
}

/// Whether its guest is up, running or paused.
fn is_up(facts: &Facts) -> bool {
    matches!(facts.observed.domain, Some(RunState::Running | RunState::Paused(_)))
}

/// What is left of a start whose domain is defined.
fn finish_start(facts: &Facts) -> Plan {
    Plan::run(vec![Announce(State::Starting, None), MarkStarted, start(facts), NoteStart], "starting it")
}

/// From the disk that it boots from.
fn start(facts: &Facts) -> Effect {
    if facts.record.is_rescued() { StartRescue } else { Start }
}

impl Plan {
    fn run(effects: Vec<Effect>, why: impl Into<Cow<'static, str>>) -> Self {
        Self { next: Next::Run(effects), why: why.into() }
    }

    fn ask(question: Question) -> Self {
        let why = match question {
            Question::Placement => "asking placement what it holds",
            Question::Whose => "asking etcd whether our tools asked for it",
        };
        Self { next: Next::Ask(question), why: why.into() }
    }

    fn wait(until: Until, why: &'static str) -> Self {
        Self { next: Next::Wait(until), why: why.into() }
    }

    /// Waits until the copy of its disk is made that was wished before, and tells so in this state.
    fn after_copy(facts: &Facts, copy: InstanceId, state: Option<State>) -> Self {
        let why = format!("{copy} is to be a copy of its disk{BEFORE}");
        match state.map(|state| Self::tell(facts, state, &why)) {
            Some(tell @ Self { next: Next::Run(_), .. }) => tell,
            _ => Self { next: Next::Wait(Until::Copied), why: why.into() },
        }
    }

    fn fail(reason: &str) -> Self {
        Self { next: Next::Stuck(Problem::Failed(reason.to_owned())), why: reason.to_owned().into() }
    }

    fn report(what: &'static str) -> Self {
        Self { next: Next::Stuck(Problem::Report(what)), why: what.into() }
    }

    /// The status says it already.
    fn told(why: impl Into<Cow<'static, str>>) -> Self {
        Self { next: Next::Stuck(Problem::Told), why: why.into() }
    }

    /// Has the status say this; where it does already, no more can be done.
    fn tell(facts: &Facts, state: State, reason: &str) -> Self {
        let next = match known(facts) {
            Some(status) if status.state == state && status.reason.as_deref() == Some(reason) => {
                Next::Stuck(Problem::Told)
            }
            _ => Next::Run(vec![Announce(state, Some(reason.to_owned()))]),
        };
        Self { next, why: reason.to_owned().into() }
    }
}

//! The comparison.

use ec_model::{RunState, State};
use jiff::Timestamp;

use crate::{Allocation, Facts, Limits, StatusFacts, Wanted};

/// One step in the world. Every one is idempotent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Write the status with this state.
    Announce(State),
    /// Fetch the image, keep the node's record, make the overlay.
    PrepareDisk,
    /// Define the domain as the allocation says.
    Define,
    /// Start the domain.
    Start,
    /// Write the status with the time of the start.
    NoteStart,
    /// End and undefine the domain, delete its disk and its console log.
    RemoveDomain,
    /// Delete the node's record.
    DropRecord,
    /// Give the allocation back.
    Release,
    /// Delete request, status and index: the instance is gone.
    DropKeys,
    /// Delete the request and leave the ERROR status on a lease.
    EndInError,
}

/// What to do about one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// All is as it shall be.
    Settled,
    /// Perform these, in order, then decide again.
    Run(&'static [Effect]),
    /// Ask placement for the allocation, then decide again.
    AskPlacement,
    /// The domain runs: look for its address, until then.
    AwaitAddress(Timestamp),
    /// Look again at that time.
    LookAgain(Timestamp),
    /// Write ERROR with this reason, then decide again.
    Fail(String),
    /// Tell the operator; touch nothing.
    Report(&'static str),
}

use Effect::{
    Announce, Define, DropKeys, DropRecord, EndInError, NoteStart, PrepareDisk, Release, RemoveDomain, Start,
};

/// Told before placement is asked: whoever waits sees at once that the node has the request.
const TAKE_ON: &[Effect] = &[Announce(State::Preparing)];
const BUILD: &[Effect] = &[PrepareDisk, Announce(State::Starting), Define, Start, NoteStart];
const FINISH_START: &[Effect] = &[Announce(State::Starting), Start, NoteStart];
const NOTE_START: &[Effect] = &[NoteStart];
const STOPPED: &[Effect] = &[Announce(State::Stopped)];
const ACTIVE: &[Effect] = &[Announce(State::Active)];
const DESTROY: &[Effect] = &[Announce(State::Destroying), RemoveDomain, DropRecord, Release, DropKeys];
/// The same way as a destroy, but the status stays for people to read.
const CLEAN_UP: &[Effect] = &[RemoveDomain, DropRecord, Release, EndInError];
const SWEEP: &[Effect] = &[RemoveDomain, DropRecord];
const FORGET: &[Effect] = &[DropKeys];
const RELEASE: &[Effect] = &[Release];

/// What to do about an instance, from everything known of it at `now`.
pub fn decide(facts: &Facts, now: Timestamp, limits: &Limits) -> Decision {
    let failed = facts.status.is_some_and(|status| status.state == State::Error);
    match facts.wanted {
        Wanted::Destroyed => Decision::Run(DESTROY),
        Wanted::Active if failed => Decision::Run(CLEAN_UP),
        Wanted::Active => bring_up(facts, now, limits),
        Wanted::Unreadable => unreadable(facts, failed),
        Wanted::Nothing => unrequested(facts, failed, now, limits),
    }
}

fn bring_up(facts: &Facts, now: Timestamp, limits: &Limits) -> Decision {
    let state = facts.status.map(|status| status.state);
    // Only these two were ever complete: before them an instance may still be built.
    let was_up = matches!(state, Some(State::Active | State::Stopped));
    match facts.observed.domain {
        Some(RunState::Running) => running(facts.status, now, limits),
        // Stopped by its guest, by an operator or by the host's own restart: its disk is kept as it is.
        Some(_) if state == Some(State::Stopped) => Decision::Settled,
        Some(_) if was_up => Decision::Run(STOPPED),
        // Without a status nobody knows whether its disk holds a user's data already: it is kept.
        Some(RunState::Ended) if state.is_none() => Decision::Run(STOPPED),
        Some(RunState::Ended) => Decision::Fail("the guest ended before it had an address".to_owned()),
        Some(RunState::NotStarted) => if_allocated(facts, FINISH_START),
        None if was_up => {
            Decision::Fail("its domain is gone from the hypervisor; something else removed it".to_owned())
        }
        None if state == Some(State::Preparing) => if_allocated(facts, BUILD),
        None => Decision::Run(TAKE_ON),
    }
}

fn running(status: Option<StatusFacts>, now: Timestamp, limits: &Limits) -> Decision {
    let Some(started_at) = status.and_then(|status| status.started_at) else {
        // A crash came between the start and its note.
        return Decision::Run(NOTE_START);
    };
    match status {
        Some(StatusFacts { state: State::Active, has_address: true, .. }) => Decision::Settled,
        Some(StatusFacts { has_address: true, .. }) => Decision::Run(ACTIVE),
        _ => {
            let deadline = started_at.saturating_add(limits.address).unwrap_or(Timestamp::MAX);
            if now >= deadline {
                let seconds = limits.address.as_secs();
                Decision::Fail(format!("the guest had no address {seconds} s after its start"))
            } else {
                Decision::AwaitAddress(deadline)
            }
        }
    }
}

/// A request without an allocation is refused, not built.
fn if_allocated(facts: &Facts, effects: &'static [Effect]) -> Decision {
    match facts.allocation {
        Allocation::Held { .. } => Decision::Run(effects),
        Allocation::Unknown => Decision::AskPlacement,
        Allocation::Absent => Decision::Fail(
            "placement holds no allocation for it, so it has no claim to room on this node".to_owned(),
        ),
    }
}

fn unreadable(facts: &Facts, failed: bool) -> Decision {
    if facts.observed.domain.is_some() {
        Decision::Report("its request cannot be read; the domain is left as it is")
    } else if failed {
        Decision::Run(CLEAN_UP)
    } else {
        Decision::Fail("its request cannot be read".to_owned())
    }
}

fn unrequested(facts: &Facts, failed: bool, now: Timestamp, limits: &Limits) -> Decision {
    if facts.observed.domain.is_some() {
        return Decision::Report("a domain of ours without a request; it is left as it is");
    }
    if facts.observed.volume || facts.record {
        return Decision::Run(SWEEP);
    }
    if facts.status.is_some() && !failed {
        return Decision::Run(FORGET);
    }
    match facts.allocation {
        Allocation::Held { since } => {
            let due = since.saturating_add(limits.grace).unwrap_or(Timestamp::MAX);
            if now >= due { Decision::Run(RELEASE) } else { Decision::LookAgain(due) }
        }
        Allocation::Unknown | Allocation::Absent => Decision::Settled,
    }
}

//! The comparison.

use std::time::Duration;

use ec_model::{End, Pause, RunState, State};

use crate::{Allocation, Facts, KnownStatus, Limits, RecordFacts, StatusFacts, Wanted};

/// One step in the world. Every one is idempotent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Write the status with this state, for this reason.
    Announce(State, Option<String>),
    /// Fetch the image, keep the node's record, make the overlay.
    PrepareDisk,
    /// Write the node's record of a guest that is here already.
    KeepRecord,
    /// Define the domain as allocated; one that is there for good already stays as it is.
    Define,
    /// Note in the node's record that a guest may write its disk from now on.
    MarkStarted,
    /// Start the domain.
    Start,
    /// Write the status with the time of the start.
    NoteStart,
    /// Let a paused domain go on.
    Resume,
    /// Note on this node that a user destroyed the instance.
    Bury,
    /// End and undefine the domain, delete its disk and its console log.
    RemoveDomain,
    /// Delete the node's record.
    DropRecord,
    /// Claim in placement what the guest takes.
    Claim,
    /// Give the allocation back, where it is one of this node.
    Release,
    /// Delete request, user-data and status: the instance is gone.
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
    Run(Vec<Effect>),
    /// Ask placement for the allocation, then decide again.
    AskPlacement,
    /// Ask etcd whether the instance was asked for by this cloud's tools, then decide again.
    AskWhose,
    /// The domain runs: look for its address.
    AwaitAddress,
    /// Decide again after so long.
    LookAgain(Duration),
    /// Write ERROR with this reason, then decide again. Only of what never ran.
    Fail(String),
    /// Tell the operator; touch nothing.
    Report(&'static str),
}

use Effect::{
    Announce, Bury, Claim, Define, DropKeys, DropRecord, EndInError, KeepRecord, MarkStarted, NoteStart,
    PrepareDisk, Release, RemoveDomain, Resume, Start,
};

/// What to do about an instance, from everything known of it.
pub fn decide(facts: &Facts, limits: &Limits) -> Decision {
    match facts.wanted {
        Wanted::Destroyed => destroy(),
        Wanted::Unreadable => {
            Decision::Report("its request cannot be read; everything of it is left as it is")
        }
        _ if facts.status == StatusFacts::Unreadable => {
            Decision::Report("its status cannot be read; everything of it is left as it is")
        }
        // The destroy was acknowledged. This request came back with an older etcd.
        Wanted::Active if facts.buried => destroy(),
        Wanted::Active if ran(facts) => keep(facts, limits),
        Wanted::Active => build(facts),
        Wanted::Nothing => unrequested(facts, limits),
    }
}

fn destroy() -> Decision {
    Decision::Run(vec![Announce(State::Destroying, None), Bury, RemoveDomain, DropRecord, Release, DropKeys])
}

/// Whether a guest may ever have written the disk. Where nobody can tell, it may have.
pub fn ran(facts: &Facts) -> bool {
    let told = match &facts.status {
        StatusFacts::Known(status) => {
            status.start_noted
                || matches!(status.state, State::Active | State::Paused | State::Stopped | State::Unclaimed)
        }
        StatusFacts::Absent | StatusFacts::Unreadable => false,
    };
    let recorded = match facts.record {
        RecordFacts::Kept { started } => started,
        RecordFacts::Unreadable => true,
        RecordFacts::Absent => facts.observed.volume,
    };
    let seen = !matches!(facts.observed.domain, None | Some(RunState::NotStarted));
    told || recorded || seen
}

fn status(facts: &Facts) -> Option<&KnownStatus> {
    match &facts.status {
        StatusFacts::Known(status) => Some(status),
        StatusFacts::Absent | StatusFacts::Unreadable => None,
    }
}

/// What never ran may be made anew, and is swept where it failed.
fn build(facts: &Facts) -> Decision {
    match (status(facts).map(|status| status.state), facts.observed.domain) {
        // The same way as a destroy, but the status stays for people to read.
        (Some(State::Error), _) => Decision::Run(vec![RemoveDomain, DropRecord, Release, EndInError]),
        (_, Some(_)) if facts.observed.volume => if_allocated(facts, finish_start()),
        // A domain whose disk is gone before it ever ran: both are made anew.
        (_, Some(_)) => if_allocated(facts, vec![RemoveDomain]),
        (Some(State::Preparing), None) => if_allocated(
            facts,
            vec![PrepareDisk, Announce(State::Starting, None), Define, MarkStarted, Start, NoteStart],
        ),
        // Told before placement is asked: whoever waits sees at once that the node has the request.
        (_, None) => Decision::Run(vec![Announce(State::Preparing, None)]),
    }
}

fn finish_start() -> Vec<Effect> {
    vec![Announce(State::Starting, None), MarkStarted, Start, NoteStart]
}

/// A request without an allocation is refused, not built.
fn if_allocated(facts: &Facts, effects: Vec<Effect>) -> Decision {
    match facts.allocation {
        Allocation::Held { .. } => Decision::Run(effects),
        Allocation::Unknown => Decision::AskPlacement,
        Allocation::Absent => Decision::Fail(
            "placement holds no allocation for it, so it has no claim to room on this node".to_owned(),
        ),
        Allocation::Elsewhere => Decision::Fail(
            "its allocation is on other resource providers, so it has no claim to room on this node"
                .to_owned(),
        ),
    }
}

/// What ever ran is kept: whatever is missing is made again or told, and nothing is deleted.
fn keep(facts: &Facts, limits: &Limits) -> Decision {
    let observed = facts.observed;
    if facts.record == RecordFacts::Absent && (observed.domain.is_some() || observed.volume) {
        return Decision::Run(vec![KeepRecord]);
    }
    let shown = match observed.domain {
        None | Some(RunState::NotStarted | RunState::Ended(_)) if !observed.volume => {
            say(facts, State::Error, "its disk is gone; the rest is kept until it is destroyed")
        }
        Some(RunState::Running | RunState::Paused(_)) if observed.transient => {
            return Decision::Run(vec![Define]);
        }
        None => redefine(
            facts,
            State::Stopped,
            "its domain was gone from libvirt; it is defined again from what this node knows",
        ),
        Some(RunState::Running | RunState::Paused(_)) if !observed.volume => say(
            facts,
            State::Error,
            "its disk file was deleted under the running guest; what the guest writes is lost when it ends",
        ),
        Some(RunState::Running) => running(facts, limits),
        Some(RunState::Paused(why)) => paused(facts, why),
        Some(RunState::NotStarted) => match status(facts).map(|status| status.state) {
            Some(State::Scheduled | State::Preparing | State::Starting) => return start_again(facts),
            // Its start failed, and nobody ever saw one work: tried again, with the reason told meanwhile.
            Some(State::Error) if !status(facts).is_some_and(|status| status.start_noted) => {
                return start_again(facts);
            }
            // Its reason, where it has one, is still the reason.
            Some(State::Stopped) => Decision::Settled,
            _ => say(facts, State::Stopped, "it does not run, perhaps since its host was started anew"),
        },
        // Nobody saw it come up: its hypervisor died while it was started, say, and took it along.
        Some(RunState::Ended(why)) if start_in_doubt(facts, why) => return start_again(facts),
        Some(RunState::Ended(why)) => ended(facts, why),
    };
    match (shown, facts.allocation) {
        // Placement forgot it: it is here all the same, and takes room.
        (Decision::Settled | Decision::AwaitAddress, Allocation::Absent) => Decision::Run(vec![Claim]),
        (shown, _) => shown,
    }
}

/// Whether a start was begun of which nobody wrote down that it worked; or that the hypervisor took back before the
/// guest was there.
fn start_in_doubt(facts: &Facts, why: End) -> bool {
    status(facts).is_some_and(|status| {
        status.state == State::Starting && (!status.start_noted || why == End::ByHypervisor)
    })
}

fn start_again(facts: &Facts) -> Decision {
    let failed = status(facts).is_some_and(|status| status.state == State::Error);
    match facts.allocation {
        // What failed last stands until it works.
        Allocation::Held { .. } if failed => Decision::Run(vec![MarkStarted, Start, NoteStart]),
        Allocation::Held { .. } => Decision::Run(finish_start()),
        Allocation::Unknown => Decision::AskPlacement,
        Allocation::Absent => Decision::Run(vec![Claim]),
        Allocation::Elsewhere => say(
            facts,
            State::Stopped,
            "its allocation is on other resource providers, so it is not started here",
        ),
    }
}

fn running(facts: &Facts, limits: &Limits) -> Decision {
    let Some(status) = status(facts).filter(|status| status.start_noted) else {
        // A crash came between the start and its note, or the status was lost.
        return Decision::Run(vec![NoteStart]);
    };
    if status.has_address {
        return tell(facts, State::Active, None);
    }
    if facts.searched < limits.address {
        return match status.state {
            State::Starting => Decision::AwaitAddress,
            _ => tell(facts, State::Starting, None),
        };
    }
    match say(
        facts,
        State::Starting,
        &format!(
            "the guest runs, but no address of it was seen in {} s: neither a lease, nor a neighbour, nor an answer of its agent",
            limits.address.as_secs()
        ),
    ) {
        Decision::Settled => Decision::AwaitAddress,
        told => told,
    }
}

fn paused(facts: &Facts, why: Pause) -> Decision {
    match why {
        Pause::Storage { room: true } => Decision::Run(vec![
            Announce(
                State::Paused,
                Some("an I/O error on its disk; there is room again, it is let go on".to_owned()),
            ),
            Resume,
        ]),
        Pause::Storage { room: false } => {
            say(facts, State::Paused, "no space on the host's disk; it goes on by itself when there is room")
        }
        Pause::ByHand => say(facts, State::Paused, "somebody suspended it; `virsh resume` lets it go on"),
        Pause::Crashed => say(facts, State::Paused, "the guest's system crashed and is kept as it was"),
        Pause::Other => {
            say(facts, State::Paused, "its hypervisor holds it, by a migration, a dump or a snapshot")
        }
    }
}

fn ended(facts: &Facts, why: End) -> Decision {
    let state = status(facts).map(|status| (status.state, status.has_address));
    if matches!(state, Some((State::Stopped, _))) {
        return Decision::Settled;
    }
    let before_address = matches!(state, Some((_, false)));
    let reason = match why {
        End::Crashed => "it crashed",
        End::ByHypervisor => "libvirtd gave it up when it was started anew",
        End::ByHand => "somebody ended it",
        _ if before_address => "the guest ended before it had an address",
        End::ByGuest => "the guest powered itself off",
        End::Unknown => "it ended",
    };
    say(facts, State::Stopped, reason)
}

/// Defines a domain anew that libvirt does not know any more, as large as it was.
fn redefine(facts: &Facts, state: State, reason: &str) -> Decision {
    match (facts.allocation, facts.record) {
        (Allocation::Held { .. }, _) | (_, RecordFacts::Kept { .. }) => {
            // Told first: of a domain that is there again, nobody could tell any more why it does not run.
            Decision::Run(vec![Announce(state, Some(reason.to_owned())), Define])
        }
        (Allocation::Unknown, _) => Decision::AskPlacement,
        (Allocation::Absent | Allocation::Elsewhere, _) => say(
            facts,
            State::Error,
            "its domain is gone from libvirt, and neither placement nor this node knows how large it was; its disk is kept",
        ),
    }
}

fn say(facts: &Facts, state: State, reason: &str) -> Decision {
    tell(facts, state, Some(reason.to_owned()))
}

/// Writes the status unless it says so already.
fn tell(facts: &Facts, state: State, reason: Option<String>) -> Decision {
    match status(facts) {
        Some(status) if status.state == state && status.reason == reason => Decision::Settled,
        _ => Decision::Run(vec![Announce(state, reason)]),
    }
}

fn unrequested(facts: &Facts, limits: &Limits) -> Decision {
    let observed = facts.observed;
    let here = observed.domain.is_some() || observed.volume;
    if here && !facts.buried && ran(facts) {
        return unclaimed(facts);
    }
    // Destroyed by a user, or never ran: what a call that came late left behind, or a build without its request.
    if here || facts.record != RecordFacts::Absent {
        return Decision::Run(vec![RemoveDomain, DropRecord]);
    }
    match status(facts).map(|status| status.state) {
        // What this node counted by itself it gives back by itself.
        Some(State::Unclaimed) => return Decision::Run(vec![Release, DropKeys]),
        None | Some(State::Error) => {}
        Some(_) => return Decision::Run(vec![DropKeys]),
    }
    match (facts.allocation, facts.asked_for) {
        (Allocation::Held { seen_for }, _) if seen_for < limits.grace => {
            Decision::LookAgain(limits.grace.saturating_sub(seen_for))
        }
        (Allocation::Held { .. }, None) => Decision::AskWhose,
        (Allocation::Held { .. }, Some(true)) => Decision::Run(vec![Release]),
        (Allocation::Held { .. }, Some(false)) => {
            Decision::Report("an allocation on this node that none of our requests made; it is left alone")
        }
        (Allocation::Unknown | Allocation::Absent | Allocation::Elsewhere, _) => Decision::Settled,
    }
}

/// A guest of this node without a request: etcd was restored to a time before it, or somebody deleted the
/// request. It goes on as it is, and is counted.
fn unclaimed(facts: &Facts) -> Decision {
    let reason = match facts.observed.domain {
        Some(RunState::Running) => "a guest of this node that runs without a request",
        Some(_) => "a guest of this node that does not run and has no request",
        None => "a disk of this node without a domain and without a request",
    };
    let reason = Some(format!("{reason}; it is kept until it is destroyed"));
    if facts.observed.transient && facts.record != RecordFacts::Absent {
        return Decision::Run(vec![Define]);
    }
    match facts.allocation {
        Allocation::Unknown => Decision::AskPlacement,
        Allocation::Absent => match tell(facts, State::Unclaimed, reason) {
            Decision::Settled => Decision::Run(vec![Claim]),
            told => told,
        },
        Allocation::Held { .. } | Allocation::Elsewhere => tell(facts, State::Unclaimed, reason),
    }
}

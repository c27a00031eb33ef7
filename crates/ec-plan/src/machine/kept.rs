//! What ever ran is kept: whatever is missing is made again or told, and nothing is deleted.

use ec_model::{End, Pause, RunState, State};

use super::{
    Announce, Aspect, Claim, Define, KeepRecord, LOOKS_FOR_ADDRESS, MarkStarted, Next, NoteStart, Plan,
    Problem, Question, RESUME_PERIOD, Resume, Start, Until, finish_start, first, known, state,
};
use crate::{Allocation, Facts, Limits, RecordFacts};

/// The definition comes before the disk: what somebody undefined while it runs is defined for good whatever else is
/// wrong with it, and nothing is defined on a disk that is gone.
const ASPECTS: [Aspect; 5] = [record, definition, disk, power, ready];

pub(super) fn plan(facts: &Facts, limits: &Limits) -> Plan {
    let plan = first(&ASPECTS, facts, limits);
    let at_rest =
        matches!(plan.next, Next::Settled | Next::Stuck(Problem::Told) | Next::Wait(Until::Address));
    // Last, since it is not in the guest's way: it is here all the same, and takes room.
    if at_rest && facts.allocation == Allocation::Absent { count() } else { plan }
}

fn count() -> Plan {
    Plan::run(vec![Claim], "placement forgot it; claiming what it takes")
}

/// The metadata service stands on it.
fn record(facts: &Facts, _: &Limits) -> Option<Plan> {
    let is_here = facts.observed.domain.is_some() || facts.observed.volume;
    (facts.record == RecordFacts::Absent && is_here)
        .then(|| Plan::run(vec![KeepRecord], "writing its record anew, which was gone from this node"))
}

fn definition(facts: &Facts, _: &Limits) -> Option<Plan> {
    match facts.observed.domain {
        Some(RunState::Running | RunState::Paused(_)) if facts.observed.transient => {
            Some(Plan::run(vec![Define], "somebody undefined it while it runs; defining it for good"))
        }
        None if facts.observed.volume => Some(redefine(facts)),
        _ => None,
    }
}

/// Defines a domain anew that libvirt does not know any more, as large as it was.
fn redefine(facts: &Facts) -> Plan {
    let reason = "its domain was gone from libvirt; it is defined again from what this node knows";
    match (facts.allocation, facts.record) {
        // Told first: of a domain that is there again, nobody could tell any more why it does not run.
        (Allocation::Held { .. }, _) | (_, RecordFacts::Kept { .. }) => {
            Plan::run(vec![Announce(State::Stopped, Some(reason.to_owned())), Define], reason)
        }
        (Allocation::Unknown, _) => Plan::ask(Question::Placement),
        (Allocation::Absent | Allocation::Elsewhere, _) => Plan::tell(
            facts,
            State::Error,
            "its domain is gone from libvirt, and neither placement nor this node knows how large it was; its disk is kept",
        ),
    }
}

fn disk(facts: &Facts, _: &Limits) -> Option<Plan> {
    if facts.observed.volume {
        return None;
    }
    let reason = match facts.observed.domain {
        Some(RunState::Running | RunState::Paused(_)) => {
            "its disk file was deleted under the running guest; what the guest writes is lost when it ends"
        }
        None | Some(RunState::NotStarted | RunState::Ended(_)) => {
            "its disk is gone; the rest is kept until it is destroyed"
        }
    };
    Some(Plan::tell(facts, State::Error, reason))
}

fn power(facts: &Facts, _: &Limits) -> Option<Plan> {
    match facts.observed.domain? {
        RunState::Running => None,
        RunState::Paused(why) => Some(paused(facts, why)),
        RunState::NotStarted => Some(not_started(facts)),
        // Nobody saw it come up: its hypervisor died while it was started, say, and took it along.
        RunState::Ended(why) if start_in_doubt(facts, why) => Some(start_again(facts)),
        RunState::Ended(why) => Some(ended(facts, why)),
    }
}

fn not_started(facts: &Facts) -> Plan {
    match known(facts).map(|status| (status.state, status.start_noted)) {
        Some((State::Scheduled | State::Preparing | State::Starting, _)) => start_again(facts),
        // Its start failed, and nobody ever saw one work: tried again, with the reason told meanwhile.
        Some((State::Error, false)) => start_again(facts),
        Some((State::Stopped, _)) => stopped(facts),
        _ => Plan::tell(facts, State::Stopped, "it does not run, perhaps since its host was started anew"),
    }
}

/// Its reason, where it has one, is still the reason.
fn stopped(facts: &Facts) -> Plan {
    let reason = known(facts).and_then(|status| status.reason.clone());
    Plan {
        next: Next::Stuck(Problem::Told),
        why: reason.map_or("it does not run, as its status says".into(), Into::into),
    }
}

/// Whether a start was begun of which nobody wrote down that it worked; or that the hypervisor took back before the
/// guest was there.
fn start_in_doubt(facts: &Facts, why: End) -> bool {
    known(facts).is_some_and(|status| {
        status.state == State::Starting && (!status.start_noted || why == End::ByHypervisor)
    })
}

fn start_again(facts: &Facts) -> Plan {
    match facts.allocation {
        // What failed last stands until it works.
        Allocation::Held { .. } if state(facts) == Some(State::Error) => {
            Plan::run(vec![MarkStarted, Start, NoteStart], "starting it again, which failed")
        }
        Allocation::Held { .. } => finish_start(),
        Allocation::Unknown => Plan::ask(Question::Placement),
        Allocation::Absent => count(),
        Allocation::Elsewhere => Plan::tell(
            facts,
            State::Stopped,
            "its allocation is on other resource providers, so it is not started here",
        ),
    }
}

fn paused(facts: &Facts, why: Pause) -> Plan {
    let reason = match why {
        Pause::Storage { room: true } => match facts.resumed {
            // It ran into the same wall again.
            Some(ago) if ago < RESUME_PERIOD => {
                let rest = RESUME_PERIOD.saturating_sub(ago);
                return Plan::wait(
                    Until::After(rest),
                    "its disk had an I/O error again; a pause before the next try",
                );
            }
            _ => {
                let reason = "an I/O error on its disk; there is room again, it is let go on";
                return Plan::run(vec![Announce(State::Paused, Some(reason.to_owned())), Resume], reason);
            }
        },
        Pause::Storage { room: false } => {
            "no space on the host's disk; it goes on by itself when there is room"
        }
        Pause::ByHand => "somebody suspended it; `virsh resume` lets it go on",
        Pause::Crashed => "the guest's system crashed and is kept as it was",
        Pause::Other => "its hypervisor holds it, by a migration, a dump or a snapshot",
    };
    Plan::tell(facts, State::Paused, reason)
}

fn ended(facts: &Facts, why: End) -> Plan {
    if state(facts) == Some(State::Stopped) {
        return stopped(facts);
    }
    let before_address = known(facts).is_some_and(|status| !status.has_address);
    let reason = match why {
        End::Crashed => "it crashed",
        End::ByHypervisor => "libvirtd gave it up when it was started anew",
        End::ByHand => "somebody ended it",
        _ if before_address => "the guest ended before it had an address",
        End::ByGuest => "the guest powered itself off",
        End::Unknown => "it ended",
    };
    Plan::tell(facts, State::Stopped, reason)
}

/// A guest that runs is ready when it has an address.
fn ready(facts: &Facts, limits: &Limits) -> Option<Plan> {
    let Some(status) = known(facts).filter(|status| status.start_noted) else {
        return Some(Plan::run(
            vec![NoteStart],
            "noting its start: a crash came between the two, or its status was lost",
        ));
    };
    let waits = Plan::wait(Until::Address, LOOKS_FOR_ADDRESS);
    if status.has_address {
        let told = status.state == State::Active && status.reason.is_none();
        return (!told)
            .then(|| Plan::run(vec![Announce(State::Active, None)], "it runs and has its address"));
    }
    if facts.searched < limits.address {
        return Some(match status.state {
            State::Starting => waits,
            _ => Plan::run(vec![Announce(State::Starting, None)], "it runs, and has no address yet"),
        });
    }
    let reason = format!(
        "the guest runs, but no address of it was seen in {} s: neither a lease, nor a neighbour, nor an answer of its agent",
        limits.address.as_secs()
    );
    let told = Plan::tell(facts, State::Starting, &reason);
    // Looked for on, all the same.
    Some(if told.next == Next::Stuck(Problem::Told) { Plan { why: told.why, ..waits } } else { told })
}

//! What never ran: it may be made anew, and is swept where it failed.

use ec_model::State;

use super::{
    Announce, Aspect, Define, DropRecord, EndInError, MarkStarted, NoteStart, Plan, PrepareDisk, Question,
    Release, RemoveDomain, Start, finish_start, state, volumes::volumes,
};
use crate::{Allocation, Facts, Limits};

/// The volumes of a domain that is defined come before its start: that keeps the definition as it is, and tells of what is asked for now.
pub(super) const ASPECTS: [Aspect; 5] = [failure, told, claim, volumes, machine];

/// The same way as a destroy, but the status stays for people to read.
pub(super) fn failure(facts: &Facts, _: &Limits) -> Option<Plan> {
    (state(facts) == Some(State::Error)).then(|| {
        Plan::run(
            vec![RemoveDomain, DropRecord, Release, EndInError],
            "it failed before it ever ran; sweeping",
        )
    })
}

/// Told before placement is asked: whoever waits sees at once that the node has the request.
pub(super) fn told(facts: &Facts, _: &Limits) -> Option<Plan> {
    (facts.observed.domain.is_none() && state(facts) != Some(State::Preparing)).then(|| {
        Plan::run(
            vec![Announce(State::Preparing, None)],
            "its claim is looked at, then it is built in its turn",
        )
    })
}

/// A request without an allocation is refused, not built.
pub(super) fn claim(facts: &Facts, _: &Limits) -> Option<Plan> {
    match facts.allocation {
        Allocation::Held { .. } => None,
        Allocation::Unknown => Some(Plan::ask(Question::Placement)),
        Allocation::Absent => {
            Some(Plan::fail("placement holds no allocation for it, so it has no claim to room on this node"))
        }
        Allocation::Elsewhere => Some(Plan::fail(
            "its allocation is on other resource providers, so it has no claim to room on this node",
        )),
    }
}

/// Disk, record, definition and first start, in one go.
fn machine(facts: &Facts, _: &Limits) -> Option<Plan> {
    Some(match (facts.observed.domain, facts.observed.volume) {
        (_, false) if facts.on_volume => {
            Plan::tell(facts, State::Preparing, "the volume that it is to boot from is not there yet")
        }
        (Some(_), true) => finish_start(facts),
        (Some(_), false) => {
            Plan::run(vec![RemoveDomain], "its disk is gone before it ever ran; both are made anew")
        }
        (None, _) => Plan::run(
            vec![PrepareDisk, Announce(State::Starting, None), Define, MarkStarted, Start, NoteStart],
            "building it",
        ),
    })
}

//! What no request speaks of.

use ec_model::{Edition, RunState, State};

use super::{
    Announce, Ascertain, Aspect, Claim, DropKeys, DropRecord, DropSuccessor, Inquire, Next, Persist, Plan,
    Problem, Question, Release, RemoveDomain, Until, known, ran, state,
};
use crate::{Allocation, Facts, Limits, RecordFacts};

pub(super) const ASPECTS: [Aspect; 4] = [guest, leftovers, status, claim];

/// Of what ran, or was kept for somebody, a disk beside a first one that is missed may be the rest of a snapshot.
fn is_here(facts: &Facts) -> bool {
    let observed = &facts.observed;
    observed.domain.is_some() || observed.volume || (observed.successor && ran(facts))
}

/// A guest of this node without a request: etcd was restored to a time before it, or somebody deleted the
/// request. It goes on as it is, and is counted.
fn guest(facts: &Facts, _: &Limits) -> Option<Plan> {
    if !is_here(facts) || facts.buried || !ran(facts) {
        return None;
    }
    if facts.observed.transient && facts.record != RecordFacts::Absent {
        return Some(Plan::run(vec![Persist], "somebody undefined it while it runs; defining it for good"));
    }
    if facts.allocation == Allocation::Unknown {
        return Some(Plan::ask(Question::Placement));
    }
    let what = match facts.observed.domain {
        Some(RunState::Running) => "a guest of this node that runs without a request",
        Some(_) => "a guest of this node that does not run and has no request",
        None if facts.on_volume => {
            "a guest of this node without a domain and without a request, whose disk is a volume"
        }
        None => "a disk of this node without a domain and without a request",
    };
    let reason = format!("{what}; it is kept until it is destroyed, or brought back (`eschedule heal`)");
    let told = Plan::tell(facts, State::Unclaimed, &reason);
    // With an etcd that was put back, what was held there of an older one came back, too.
    if told.next == Next::Stuck(Problem::Told) && holds_another(facts) {
        return Some(Plan::run(
            vec![Announce(State::Unclaimed, Some(reason))],
            "telling what was wanted of it last",
        ));
    }
    if told.next == Next::Stuck(Problem::Told) && facts.allocation == Allocation::Absent {
        return Some(Plan::run(vec![Claim], "claiming what a guest takes that placement does not know of"));
    }
    Some(told)
}

/// Whether what this node knows of what was wanted is not what it told with its status, or is held nowhere: nobody could read it
/// when that was told.
fn holds_another(facts: &Facts) -> bool {
    let Some(kept) = facts.record.kept() else { return false };
    !facts.is_held
        || known(facts)
            .is_some_and(|status| kept != Edition { epoch: status.epoch, generation: status.generation })
}

/// Destroyed by a user, or never ran: what a call that came late left behind, or a build without its request.
fn leftovers(facts: &Facts, _: &Limits) -> Option<Plan> {
    // Who handed it over after its user destroyed it here may have claimed for it since. Given back first: once nothing is here any
    // more, nobody would think of that again.
    if is_here(facts) && facts.buried {
        return Some(Plan::run(
            vec![Inquire, Release, RemoveDomain, DropRecord, DropKeys],
            "sweeping what came after its end",
        ));
    }
    if is_here(facts) || facts.record != RecordFacts::Absent {
        // What ran is not taken for gone by a look of a while ago.
        let effects = match is_here(facts) {
            true => vec![Inquire, RemoveDomain, DropRecord],
            false => vec![Inquire, Ascertain, RemoveDomain, DropRecord],
        };
        return Some(Plan::run(effects, "sweeping what is left of it"));
    }
    // The call for it cannot look whether its instance is gone: one whose disk is gone is given another. No guest wrote it,
    // as somebody's snapshot of the disk that was there may hold what one wrote, which stays.
    facts.observed.successor.then(|| {
        Plan::run(
            vec![Inquire, DropSuccessor],
            "sweeping a disk that was to take the place of one that is gone",
        )
    })
}

fn status(facts: &Facts, _: &Limits) -> Option<Plan> {
    match state(facts) {
        // What this node counted by itself it gives back by itself.
        Some(State::Unclaimed) => Some(Plan::run(
            vec![Ascertain, Inquire, Release, DropKeys],
            "the guest without a request is gone; giving back what this node claimed for it",
        )),
        // Somebody took the status away that told of it, and all of the guest.
        None if facts.is_held => Some(Plan::run(
            vec![Ascertain, Inquire, Release, DropKeys],
            "nothing is left of the guest that this node holds for its user; giving back what was claimed for it",
        )),
        None | Some(State::Error) => None,
        Some(_) => Some(Plan::run(vec![DropKeys], "nothing is left of it but its status")),
    }
}

/// A claim whose request never came.
fn claim(facts: &Facts, limits: &Limits) -> Option<Plan> {
    let Allocation::Held { seen_for } = facts.allocation else { return None };
    Some(match facts.asked_for {
        _ if seen_for < limits.grace => Plan::wait(
            Until::After(limits.grace.saturating_sub(seen_for)),
            "it has an allocation here and no request, which may still come",
        ),
        // With an older etcd, in which nobody asks for it any more, its allocation may have come back, and what
        // came of it here without the lease that ends that.
        _ if facts.buried => Plan::run(
            vec![Ascertain, Inquire, Release, DropKeys],
            "its user destroyed it here; giving back what an older placement holds for it",
        ),
        None => Plan::ask(Question::Whose),
        Some(true) => {
            Plan::run(vec![Ascertain, Inquire, Release], "its request never came; giving its allocation back")
        }
        Some(false) => {
            Plan::report("an allocation on this node that none of our requests made; it is left alone")
        }
    })
}

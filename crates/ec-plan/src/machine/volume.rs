//! A volume: a disk that machines of its node can have, and that outlives them.
//!
//! ```text
//!  wished ──▶ PREPARING ──▶ disk made of its image, as a copy, or empty ──▶ noted as one that is kept ──▶ told: ACTIVE
//!                                │ cannot be
//!                                └──▶ swept, as what never ran
//! ```
//!
//! One that moves to another node, with which this one shares storage, is handed over; there it is waited for, and nothing is made in
//! its place:
//!
//! ```text
//!  here:   wished to be there ──▶ disk handed over ──▶ node's record, request and status gone
//!  there:  PREPARING ──▶ disk received ──▶ noted as one that is kept ──▶ told: ACTIVE
//! ```
//!
//! Its disk gone, that is told, and a wish to make it anew is done all the same: that is what copies are for.
//!
//! From when it is told a guest may write it, and then it is kept like what ever ran. Which machine has it is that machine's
//! affair ([`super::volumes`]): nothing is done about it here.

use ec_model::{Handover, State};

use super::{
    Announce, Aspect, Cover, Extend, GiveUpResize, HandOver, MarkStarted, NoteRebuild, NoteResize, Plan,
    PrepareVolume, Question, Receive,
    kept::{self, count},
    known, new, ran,
    rebuild::restore,
    resize::{ELSEWHERE, is_told_otherwise},
    state,
};
use crate::{
    Allocation, Facts, KnownStatus, Limits, RecordFacts, SizeFacts,
    status::{NOT_WHOLE, WITHOUT_DISK},
};

/// Of one that nobody could write yet.
const NEW: [Aspect; 4] = [new::failure, new::told, new::claim, make];

/// Of one that somebody may have written. That it is there is told first, or that it is not: whatever else fails is told with how it
/// stands.
const KEPT: [Aspect; 7] = [disk, told, kept::access, kept::record, kept::intent, restore, size];

pub(super) fn plan(facts: &Facts, limits: &Limits) -> Plan {
    match facts.handover {
        Some(Handover::To(_)) if let Some(copy) = facts.copied_by => Plan::after_copy(facts, copy, None),
        Some(Handover::To(_)) => Plan::run(vec![HandOver], "handing it over to another node"),
        _ if ran(facts) && !comes(facts) => kept::keep(&KEPT, facts, limits),
        Some(Handover::From(_)) => receive(facts),
        None => super::first(&NEW, facts, limits),
    }
}

/// Whether it comes from another node, or came while nobody looked: nothing was told of it here, nor written down, since it was
/// placed here. What is from before then an older etcd told, or this node when it had it last.
fn comes(facts: &Facts) -> bool {
    let is_older = |epoch: u64| facts.edition.is_some_and(|asked| epoch < asked.epoch);
    let is_unrecorded = match facts.record {
        RecordFacts::Absent => true,
        RecordFacts::Kept { intent, .. } => {
            !facts.observed.volume && intent.is_some_and(|kept| is_older(kept.epoch))
        }
        RecordFacts::Unreadable => false,
    };
    let is_untold = known(facts)
        .is_none_or(|told| is_older(told.epoch) || matches!(told.state, State::Preparing | State::Error));
    matches!(facts.handover, Some(Handover::From(_))) && is_unrecorded && is_untold
}

/// Somebody has written it, wherever it is: nothing is made, and nothing swept.
fn receive(facts: &Facts) -> Plan {
    let why = "waiting until its node hands it over";
    match state(facts) {
        // Which is told where it takes too long.
        Some(State::Preparing | State::Error) => Plan::run(vec![Receive], why),
        _ => Plan::run(vec![Announce(State::Preparing, None)], why),
    }
}

/// Told last: who waits for it may give it to a guest at once.
fn make(_: &Facts, _: &Limits) -> Option<Plan> {
    Some(Plan::run(vec![PrepareVolume, MarkStarted, Announce(State::Active, None)], "making it"))
}

fn disk(facts: &Facts, limits: &Limits) -> Option<Plan> {
    if facts.observed.volume {
        return None;
    }
    if facts.is_to_be_rebuilt() {
        return kept::intent(facts, limits).or_else(|| restore(facts, limits));
    }
    // Nothing is made of which this node keeps no record, and who waits for it is told so.
    let is_forgotten = facts.record == RecordFacts::Absent && facts.rebuild.told < facts.rebuild.wished;
    let untold = match is_forgotten {
        true => Some(Plan::run(vec![NoteRebuild], "telling that it cannot be made anew")),
        false => restore(facts, limits),
    };
    Some(
        untold.unwrap_or_else(|| Plan::tell(facts, State::Error, &format!("its disk is gone{WITHOUT_DISK}"))),
    )
}

/// It only ever grows, and its guest goes on meanwhile.
fn size(facts: &Facts, _: &Limits) -> Option<Plan> {
    let noted = match facts.record {
        RecordFacts::Kept { size, .. } => size,
        // It is not done, and that is told.
        RecordFacts::Unreadable => SizeFacts::default(),
        RecordFacts::Absent => return None,
    };
    let is_untold = facts.resize.told < noted.wished_at.max(facts.resize.wished);
    if facts.gigabytes_to_have().is_some() {
        return match facts.allocation {
            Allocation::Unknown => Some(Plan::ask(Question::Placement)),
            Allocation::Absent => Some(count()),
            Allocation::Elsewhere => {
                is_untold.then(|| Plan::run(vec![GiveUpResize(ELSEWHERE.to_owned())], ELSEWHERE))
            }
            // Of one that failed elsewhere what was claimed for more may have been given back since this node was told of it.
            Allocation::Held { .. } => Some(Plan::run(vec![Cover, Extend], "growing it")),
        };
    }
    // A wish that asks for nothing more has come to its end, too.
    (is_untold || is_told_otherwise(facts, noted))
        .then(|| Plan::run(vec![NoteResize], "telling what came of the wish for another size"))
}

/// What is told of one that is well besides.
const UNREAD: &str = "its node's record of it cannot be read, so nothing is done about its size or what is on it: mend the file in `instances` of the agent's state directory";

fn told(facts: &Facts, _: &Limits) -> Option<Plan> {
    let is_unread = facts.record == RecordFacts::Unreadable;
    let is_whole = facts.observed.copies == facts.copies;
    let reason = (!is_whole).then_some(NOT_WHOLE).or(is_unread.then_some(UNREAD));
    let is_so = |status: &KnownStatus| status.state == State::Active && status.reason.as_deref() == reason;
    let is_told = known(facts).is_some_and(is_so);
    (!is_told).then(|| Plan::run(vec![Announce(State::Active, reason.map(str::to_owned))], "it is there"))
}

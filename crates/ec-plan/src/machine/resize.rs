//! A user's wish for another size, until the status tells what came of it.
//!
//! ```text
//!   size wanted ≠ size noted
//!     │ its memory is saved, its disk is gone, its allocation elsewhere: given up
//!     │ its claim has no room for it: claimed, or given up
//!     ├─ only the disk is larger ──────────────────────────▶ grown while the guest runs, noted ─▶ told
//!     ├─ nothing is less, and it runs ─▶ noted that it grows, given while the guest runs, noted ─▶ told
//!     │                                    │ cannot be
//!     └─ else: ◀───────────────────────────┘
//!        RESIZING, asked to end, ended after its grace ─▶ disk grown, domain defined anew, noted
//!                                                                 │            │ cannot be
//!                                             started as wanted ◀─┴────────────┤
//!                                                 │ does not start             ▼
//!                                                 └──▶ the old size defined again, noted as failed ─▶ told
//! ```
//!
//! What is wanted is a size, and not that something be done: whatever etcd was put back to, the guest comes to have the
//! size that is wanted there, or is found not to be able to: without a wish, what failed last is not tried again. A disk never shrinks, and a guest that nobody ever wished another size for is not measured.
//! Of one that boots from its rescue disk nothing is done about its size; a wish for a rescue waits for one for a size.

use ec_model::{Power, RunState, Size, State};

use super::{
    Announce, Cover, GiveUpResize, Grow, NoteResize, Plan, Question, Reopen, Resize, goes_on_first, is_up,
    kept::count,
    known,
    power::{GRACE, end_within},
    state,
};
use crate::{Allocation, Facts, KnownStatus, Limits, RecordFacts, ResizeFacts, SizeFacts};

/// Why a size is not had.
const SAVED: &str = "its memory lies on the node's disk, and goes on as large as it was; `eschedule resume` lets it go on first";
const WITHOUT_DISK: &str = "its disk is gone";
pub(super) const ELSEWHERE: &str = "placement has its allocation on other resource providers than its node's";

/// What is left to do of the wish.
pub(super) fn resize(facts: &Facts, _: &Limits) -> Option<Plan> {
    let status = known(facts)?;
    if facts.boots_elsewhere() || facts.record == RecordFacts::Absent {
        return tell_again(facts);
    }
    match facts.size_to_have() {
        Some(wanted) => make(facts, wanted),
        None => finish(facts, status),
    }
}

/// Of a wish that came to its end before its guest was rescued, or gone, and whose end is told no more, since its status was lost; or
/// that comes to none, since its node's record cannot be read. So it is of what cannot be made as large as an older etcd has it yet: by
/// what is told of its size its claim stays as large as it is.
fn tell_again(facts: &Facts) -> Option<Plan> {
    let is_untold = match facts.record {
        RecordFacts::Kept { size, .. } => {
            size.wished_at >= facts.resize.wished
                && !size.unproven
                && (facts.resize.told < size.wished_at || is_told_otherwise(facts, size))
        }
        // It is not done, and that is told. What is here and has no record has got one before.
        RecordFacts::Unreadable | RecordFacts::Absent => facts.resize.told < facts.resize.wished,
    };
    is_untold.then(|| Plan::run(vec![NoteResize], "telling what came of the wish for another size"))
}

/// Whether the status has another end of the wish than the node noted: one that was carried out may be wished again by an etcd that was
/// put back, and fail; and one that failed since the node could not read its record has come to its end since that can.
pub(super) fn is_told_otherwise(facts: &Facts, noted: SizeFacts) -> bool {
    let ResizeFacts { told, told_failed, wished, .. } = facts.resize;
    let is_read = matches!(facts.record, RecordFacts::Kept { .. });
    let was_unread = is_read && told_failed && told == wished && noted.wished_at < told;
    was_unread || noted.wished_at.is_some() && told == noted.wished_at && told_failed != noted.failed
}

/// Who waits for it is told; without a wish that waits it is as large as it is until that can be changed.
fn give_up(facts: &Facts, why: &'static str) -> Option<Plan> {
    (facts.resize.told < facts.resize.wished).then(|| Plan::run(vec![GiveUpResize(why.to_owned())], why))
}

fn make(facts: &Facts, wanted: Size) -> Option<Plan> {
    let RecordFacts::Kept { size, .. } = facts.record else { return None };
    // What memory was saved of has the size that it had then.
    if facts.observed.domain == Some(RunState::Saved) {
        let given_up = if goes_on_first(facts) { None } else { give_up(facts, SAVED) };
        return given_up.or_else(|| tell_again(facts));
    }
    // Nothing can be measured; and a guest that is up without its disk is not ended for it.
    if !facts.observed.volume {
        let given_up = if is_up(facts) { None } else { give_up(facts, WITHOUT_DISK) };
        return given_up.or_else(|| tell_again(facts));
    }
    facts.observed.domain?;
    match facts.allocation {
        Allocation::Unknown => return Some(Plan::ask(Question::Placement)),
        Allocation::Absent => return Some(count()),
        Allocation::Elsewhere | Allocation::Held { .. } => {}
    }
    let is_ending = is_up(facts) && state(facts) == Some(State::Resizing);
    if facts.allocation == Allocation::Elsewhere {
        // Ended for what it may have been given already, it would not be started again.
        return if size.growing.is_some() && is_up(facts) { None } else { give_up(facts, ELSEWHERE) };
    }
    if size.growing.is_some() && is_ending {
        // Whatever it may have, it loses; then it is seen whether placement has room for what it is to have.
        return Some(end_within(GRACE, facts, State::Resizing));
    }
    if !facts.held.covers(wanted) {
        return Some(Plan::run(vec![Cover], "looking whether its claim has room for its new size"));
    }
    // Killed while it was given more, nobody knows how much it has.
    let is_other = (wanted.vcpus, wanted.memory_mb) != (size.is.vcpus, size.is.memory_mb);
    if (is_other || size.growing.is_some()) && is_up(facts) {
        let loses = [Some(size.is), size.growing].into_iter().flatten().any(|has| !wanted.covers(has));
        // That it is RESIZING tells, also after a crash, that it cannot be without its end.
        let grows = facts.observed.domain == Some(RunState::Running) && !is_ending;
        if grows && !loses {
            return Some(Plan::run(vec![Grow], "giving it its new size while it runs"));
        }
        return Some(end_within(GRACE, facts, State::Resizing));
    }
    Some(Plan::run(vec![Resize], "giving it its new size"))
}

/// It has the size that it is to have, or that cannot be.
fn finish(facts: &Facts, status: &KnownStatus) -> Option<Plan> {
    let Some(domain) = facts.observed.domain else { return tell_again(facts) };
    let (is_up, wished) = (is_up(facts), facts.resize.wished);
    let size = match facts.record {
        RecordFacts::Kept { size, .. } => size,
        // It is not done, and that is told.
        RecordFacts::Unreadable | RecordFacts::Absent => SizeFacts::default(),
    };
    let SizeFacts { wished_at: noted, unproven, .. } = size;
    let is_resizing = status.state == State::Resizing;
    // It was asked to end for a size that is not wanted any more, and may end at any moment.
    if is_resizing && is_up && !unproven {
        return Some(end_within(GRACE, facts, State::Resizing));
    }
    let is_down = matches!(domain, RunState::NotStarted | RunState::Ended(_));
    let goes_on = is_resizing && is_down && facts.observed.volume && !facts.power.pending;
    let runs_soon = (goes_on || facts.power.pending) && facts.power.wanted == Power::Running && !is_up;
    let mut effects = Vec::new();
    // That it starts with its new size shows that it can have it.
    let is_news = unproven || facts.resize.told < noted.max(wished) || is_told_otherwise(facts, size);
    if is_news && !(unproven && runs_soon) {
        effects.push(NoteResize);
    }
    if goes_on {
        effects.push(match facts.power.wanted {
            Power::Running => Reopen(0),
            Power::Paused | Power::Suspended | Power::Stopped => Announce(State::Stopped, None),
        });
    }
    (!effects.is_empty()).then(|| Plan::run(effects, "telling what came of the wish for another size"))
}

/// Its guest is larger than its claim: with an older placement, or after a wish that was lost with one. Also while it runs from its rescue
/// disk.
pub(super) fn short(facts: &Facts) -> Option<Plan> {
    let RecordFacts::Kept { size, .. } = facts.record else { return None };
    let is_held = matches!(facts.allocation, Allocation::Held { .. });
    (is_held && size.wished_at.is_some() && !facts.held.covers(size.is))
        .then(|| Plan::run(vec![Cover], "claiming all of what it takes"))
}

//! A user's wish that an instance is booted from another disk. Not an event but a level: for as long as it is wanted.
//!
//! ```text
//!  wished ──▶ RESCUING ──▶ rescue disk beside its own ──▶ guest asked to end, ended after its grace ──▶ noted
//!                 │             │ image not to be had                                  told, started from it: RESCUED
//!                 │ taken back  ▼
//!                 │        noted as failed ──▶ told; the guest is as it was
//!                 ▼
//!             UNRESCUING ──▶ guest ended, where it runs from it ──▶ rescue disk deleted, noted ──▶ told; as its user
//!                 ▲                                                                              wants it: started, STOPPED
//!   not wanted any more, or another
//! ```
//!
//! What is noted stands in the node's own record, and says from which disk the guest is started from then on. Its own is
//! never touched, so whatever an older etcd wants is done: nothing is lost by doing it once more. Only what the
//! hypervisor itself tells says from which disk a guest was started that is up; one that is up from the wrong one is ended.
//! A guest that runs is asked to end once its rescue disk is there, so that what it has not written yet is on the disk that is to be
//! mended; then that is made once more, since another image may be wished by then.

use ec_model::{Power, RunState, State};

use super::{
    Announce, EnterRescue, GiveUpRescue, LeaveRescue, NoteRescue, Plan, PowerOff, PrepareRescue, Reopen,
    ShutDown, goes_on_first, is_up,
    kept::uncounted,
    known,
    power::{GRACE, end_within},
    state,
};
use crate::{Facts, Limits, RecordFacts, status::ASKED};

const SAVED: &str =
    "its memory lies on the node's disk and is of its own disk; `eschedule resume` lets it go on first";

/// What is left to do of the wish, or of one that is not wanted any more.
pub(super) fn rescue(facts: &Facts, _: &Limits) -> Option<Plan> {
    known(facts)?;
    let telling = state(facts);
    let mut effects = Vec::new();
    match facts.record {
        // It is not done, and that is told. What is here and has no record has got one before: what has none boots from nothing.
        RecordFacts::Unreadable | RecordFacts::Absent => {
            let told = facts.rescue.told.map(|told| told.wished_at);
            let is_over = facts.rescue.wished.is_some() || facts.record == RecordFacts::Absent;
            if facts.rescue.wished != told && is_over {
                effects.push(NoteRescue);
            }
        }
        RecordFacts::Kept { rescued, rescue_begun, .. } => {
            // Whether it starts with its new size is seen first, from its own disk.
            let proves = facts.record.is_unproven() && facts.power.wanted == Power::Running;
            if facts.is_to_be_rescued() && !proves && !goes_on_first(facts) {
                return Some(enter(facts));
            }
            let in_force = rescued.filter(|rescued| !rescued.failed);
            let is_unwanted = in_force.is_some_and(|was| facts.rescue.wished != Some(was.wished_at));
            // What was begun of it goes, too.
            let is_taken_back = facts.rescue.wished.is_none() && telling == Some(State::Rescuing);
            // The node's record of it was lost, and an older etcd knows nothing of it.
            let is_forgotten = is_up(facts) && facts.observed.rescued && in_force.is_none();
            if is_unwanted || is_taken_back || is_forgotten || is_ending(facts) {
                return Some(leave(facts));
            }
            // An etcd that was put back in its midst knows nothing of the wish; or it was given up while nobody could read the record.
            let is_over = facts.rescue.wished.is_none() || facts.rescue_was_given_up();
            if rescue_begun && rescued.is_none() && is_over {
                return Some(Plan::run(
                    vec![LeaveRescue],
                    "sweeping a rescue disk that nobody wishes any more",
                ));
            }
            if is_up(facts) && !facts.observed.rescued && in_force.is_some() {
                return Some(Plan::run(
                    vec![Announce(State::Rescuing, None), PowerOff],
                    "it was started from its own disk; ending it",
                ));
            }
            // What was told while nobody could read the record stands, which knows nothing of it.
            if facts.rescue.told != rescued && !(rescued.is_none() && facts.rescue_was_given_up()) {
                effects.push(NoteRescue);
            }
        }
    }
    let is_down = matches!(facts.observed.domain, Some(RunState::NotStarted | RunState::Ended(_)));
    let is_on_its_way = matches!(telling, Some(State::Rescuing | State::Unrescuing));
    if is_on_its_way && is_down && facts.observed.volume && !facts.power.pending {
        effects.push(match facts.power.wanted {
            Power::Running => Reopen(0),
            Power::Paused | Power::Suspended | Power::Stopped => Announce(State::Stopped, None),
        });
    }
    (!effects.is_empty()).then(|| Plan::run(effects, "telling from which disk it boots"))
}

/// Whether it runs from its own disk, and was asked to end for the other, perhaps by an agent of before: it ends.
fn is_ending(facts: &Facts) -> bool {
    let is_its = matches!(state(facts), Some(State::Rescuing | State::Unrescuing));
    is_its && is_up(facts) && !facts.observed.rescued && was_asked(facts)
}

/// Told before it is asked, so that the next agent knows, too, that the guest may be about to end.
fn was_asked(facts: &Facts) -> bool {
    known(facts).is_some_and(|status| status.reason.as_ref().is_some_and(|reason| reason.starts_with(ASKED)))
}

/// It was asked to end, which is told of it still, and has ended.
fn has_ended(facts: &Facts) -> bool {
    was_asked(facts) && !is_up(facts)
}

/// Has it end, telling all along that it was asked.
fn end(facts: &Facts, telling: State) -> Plan {
    if state(facts) != Some(telling) {
        return Plan::run(vec![Announce(telling, Some(ASKED.to_owned()))], "waiting for it to end");
    }
    end_within(GRACE, facts, telling)
}

/// The guest runs on until its rescue disk is there.
fn enter(facts: &Facts) -> Plan {
    if facts.observed.domain == Some(RunState::Saved) {
        return Plan::run(vec![GiveUpRescue(SAVED.to_owned())], SAVED);
    }
    if is_ending(facts) {
        return end(facts, State::Rescuing);
    }
    if let Some(first) = uncounted(facts) {
        return first;
    }
    let mut effects = Vec::new();
    if state(facts) != Some(State::Rescuing) || has_ended(facts) {
        effects.push(Announce(State::Rescuing, None));
    }
    if is_up(facts) && facts.observed.rescued {
        // From one of before; it must not be made anew under it.
        effects.push(PowerOff);
        return Plan::run(effects, "ending it, which runs from an older rescue disk");
    }
    effects.push(PrepareRescue);
    match facts.observed.domain {
        Some(RunState::Running) => {
            effects.extend([Announce(State::Rescuing, Some(ASKED.to_owned())), ShutDown]);
        }
        // It cannot hear.
        Some(RunState::Paused(_)) => effects.extend([PowerOff, EnterRescue]),
        _ => effects.push(EnterRescue),
    }
    Plan::run(effects, "making its rescue disk")
}

/// A guest that runs from its own disk, since the wish was taken back before it was asked to end, runs on.
fn leave(facts: &Facts) -> Plan {
    if is_ending(facts) {
        return end(facts, State::Unrescuing);
    }
    let mut effects = Vec::new();
    if state(facts) != Some(State::Unrescuing) || has_ended(facts) {
        effects.push(Announce(State::Unrescuing, None));
    }
    if is_up(facts) && facts.observed.rescued {
        effects.push(PowerOff);
    }
    effects.push(LeaveRescue);
    Plan::run(effects, "booting it from its own disk again")
}

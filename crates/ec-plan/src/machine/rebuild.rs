//! A user's wish for a new disk, from when it is made until the status tells what came of it.
//!
//! ```text
//!   wished ──▶ REBUILDING ──▶ new overlay beside the old one ──▶ guest ended ──▶ new in the old one's place, noted
//!                                  │ image not to be had                              │
//!                                  ▼                                                  ▼
//!                             noted as failed ──────────────────────────▶ told; as its user wants it: started, STOPPED
//! ```
//!
//! What is noted stands in the node's own record: an etcd that was put back has no disk made anew a second time. A crash
//! before that has the overlay made once more, on which no guest ran yet; a copy that is whole and of this wish is taken.

use ec_model::{Power, RunState, State};

use super::{
    Announce, BEFORE, Effect, NoteRebuild, Plan, PowerOff, PrepareRebuild, Reopen, ReplaceDisk, is_up,
    kept::uncounted, known, state,
};
use crate::{Facts, KnownStatus, Limits, RecordFacts};

/// What is left to do of the wish.
pub(super) fn rebuild(facts: &Facts, _: &Limits) -> Option<Plan> {
    if facts.is_to_be_rebuilt() {
        return Some(match facts.copied_by {
            Some(copy) => Plan::after_copy(facts, copy, Some(State::Rebuilding)),
            None => make(facts),
        });
    }
    let status = known(facts)?;
    let mut effects = Vec::new();
    effects.extend(untold(facts));
    let is_down = matches!(facts.observed.domain, Some(RunState::NotStarted | RunState::Ended(_)));
    if status.state == State::Rebuilding && is_down && facts.observed.volume && !facts.power.pending {
        effects.push(match facts.power.wanted {
            Power::Running => Reopen(0),
            Power::Paused | Power::Suspended | Power::Stopped => Announce(State::Stopped, None),
        });
    }
    (!effects.is_empty()).then(|| Plan::run(effects, "telling what came of the wish for a new disk"))
}

/// What came of it is to be told, where that is not.
fn untold(facts: &Facts) -> Option<Effect> {
    let ended = match facts.record {
        RecordFacts::Kept { rebuilt, .. } => rebuilt,
        // It is not done, and that is told.
        RecordFacts::Unreadable => facts.rebuild.wished,
        RecordFacts::Absent => None,
    };
    (facts.rebuild.told < ended).then_some(NoteRebuild)
}

/// The same of a volume, which no guest is up with.
pub(super) fn restore(facts: &Facts, _: &Limits) -> Option<Plan> {
    if facts.is_to_be_rebuilt() {
        if let Some(copy) = facts.copied_by {
            return Some(Plan::after_copy(facts, copy, None));
        }
        return Some(Plan::run(vec![PrepareRebuild, ReplaceDisk], "making it anew"));
    }
    untold(facts).map(|told| Plan::run(vec![told], "telling what came of the wish to make it anew"))
}

/// The guest runs on until the new disk is there.
fn make(facts: &Facts) -> Plan {
    if let Some(first) = uncounted(facts) {
        return first;
    }
    let mut effects = Vec::new();
    let waited = |status: &KnownStatus| status.reason.as_ref().is_some_and(|reason| reason.ends_with(BEFORE));
    if state(facts) != Some(State::Rebuilding) || known(facts).is_some_and(waited) {
        effects.push(Announce(State::Rebuilding, None));
    }
    effects.push(PrepareRebuild);
    if is_up(facts) {
        effects.push(PowerOff);
    }
    effects.push(ReplaceDisk);
    Plan::run(effects, "making its new disk")
}

//! The volumes that a machine has: a level, made so whether its guest runs or not.
//!
//! ```text
//!  wished ──▶ told which it may have ──▶ given and taken away, of the guest that is up and of the next start ──▶ told
//!                                            │ cannot be: the guest does not let go, a disk is gone, another has it
//!                                            └──▶ told why; tried again after a while, and nothing else waits for it
//! ```
//!
//! The status never tells of less than its domain has: whoever wants a volume for another machine looks there.

use std::time::Duration;

use ec_model::{Power, RunState, State};

use super::{Announce, NoteVolumes, Plan, SetVolumes, is_up, known};
use crate::{Facts, KnownStatus, Limits};

/// What cannot be is tried again at the next look after so long.
const AGAIN: Duration = Duration::from_secs(10);

/// A rescued guest has none of them: what is seen is what it has once it is started from its own disk, which stays so till then.
pub(super) fn volumes(facts: &Facts, _: &Limits) -> Option<Plan> {
    let status = known(facts)?;
    facts.observed.domain?;
    // Once it ended, and its memory is gone: what is told before would look as if the start after that had begun.
    let is_to_end = facts.power.pending && facts.power.anew;
    if is_to_end && (is_up(facts) || facts.observed.domain == Some(RunState::Saved)) {
        return None;
    }
    let is_in_error = is_in_error_before(facts, status);
    if is_in_error && facts.power.wanted != Power::Running {
        return None;
    }
    let starts = (is_in_error && facts.observed.volume).then_some(Announce(State::Starting, None));
    let then = |effect| starts.into_iter().chain([effect]).collect();
    if facts.observed.volumes == facts.volumes.wanted {
        return (facts.volumes.told != Some(facts.volumes.wanted))
            .then(|| Plan::run(then(NoteVolumes), "telling which volumes it has"));
    }
    if facts.boots_elsewhere() {
        return None;
    }
    // Memory that was saved goes on with the volumes that its guest had: that is told, and changes when it goes on.
    let pause = if facts.observed.domain == Some(RunState::Saved) { Duration::MAX } else { AGAIN };
    let is_too_early = facts.volumes.failed.is_some_and(|ago| ago < pause);
    (!is_too_early).then(|| Plan::run(then(SetVolumes), "giving it the volumes that it is to have"))
}

/// Whether it is in ERROR since before the wish for its power: what is told of its volumes would look as if that had come to this.
fn is_in_error_before(facts: &Facts, status: &KnownStatus) -> bool {
    status.state == State::Error && facts.power.pending && status.generation < facts.power.generation
}

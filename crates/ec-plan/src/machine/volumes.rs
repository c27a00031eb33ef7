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

use super::{Announce, NoteVolumes, Plan, SetVolumes, known};
use crate::{Facts, Limits};

/// What cannot be is tried again at the next look after so long.
const AGAIN: Duration = Duration::from_secs(10);

/// A rescued guest has none of them.
pub(super) fn volumes(facts: &Facts, _: &Limits) -> Option<Plan> {
    let status = known(facts)?;
    if facts.observed.domain.is_none() || facts.boots_elsewhere() {
        return None;
    }
    // Once it ended: what is told of one that is up would look as if the start after that had begun.
    let is_to_end = facts.power.pending && facts.power.anew;
    if is_to_end && matches!(facts.observed.domain, Some(RunState::Running | RunState::Paused(_))) {
        return None;
    }
    // Told of one that is in ERROR still, what came of its volumes would look as if a newer wish for power had come to that.
    let mut effects = Vec::new();
    if status.state == State::Error && facts.power.pending && status.generation < facts.power.generation {
        if facts.power.wanted != Power::Running {
            return None;
        }
        effects.extend(facts.observed.volume.then_some(Announce(State::Starting, None)));
    }
    if facts.observed.volumes == facts.volumes.wanted {
        effects.push(NoteVolumes);
        return (facts.volumes.told != Some(facts.volumes.wanted))
            .then(|| Plan::run(effects, "telling which volumes it has"));
    }
    // Memory that was saved goes on with the volumes that its guest had: that is told, and changes when it goes on.
    let pause = if facts.observed.domain == Some(RunState::Saved) { Duration::MAX } else { AGAIN };
    let is_too_early = facts.volumes.failed.is_some_and(|ago| ago < pause);
    effects.push(SetVolumes);
    (!is_too_early).then(|| Plan::run(effects, "giving it the volumes that it is to have"))
}

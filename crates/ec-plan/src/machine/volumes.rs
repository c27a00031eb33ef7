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

use ec_model::RunState;

use super::{NoteVolumes, Plan, SetVolumes, known};
use crate::{Facts, Limits};

/// What cannot be is tried again at the next look after so long.
const AGAIN: Duration = Duration::from_secs(10);

/// A rescued guest has none of them.
pub(super) fn volumes(facts: &Facts, _: &Limits) -> Option<Plan> {
    known(facts)?;
    if facts.observed.domain.is_none() || facts.boots_elsewhere() {
        return None;
    }
    // Once it ended: what is told of one that is up would look as if the start after that had begun.
    let is_to_end = facts.power.pending && facts.power.anew;
    if is_to_end && matches!(facts.observed.domain, Some(RunState::Running | RunState::Paused(_))) {
        return None;
    }
    if facts.observed.volumes == facts.volumes.wanted {
        return (facts.volumes.told != Some(facts.volumes.wanted))
            .then(|| Plan::run(vec![NoteVolumes], "telling which volumes it has"));
    }
    // Memory that was saved goes on with the volumes that its guest had: that is told, and changes when it goes on.
    let pause = if facts.observed.domain == Some(RunState::Saved) { Duration::MAX } else { AGAIN };
    let is_too_early = facts.volumes.failed.is_some_and(|ago| ago < pause);
    (!is_too_early).then(|| Plan::run(vec![SetVolumes], "giving it the volumes that it is to have"))
}

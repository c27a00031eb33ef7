//! Rules for what is told to whoever waited: it was so, by the word of its node and by its hypervisor.

use std::time::Duration;

use ec_cloud::Verb;
use ec_hypervisor::{Observed, RunState};
use ec_model::{InstanceId, State, Status};

use super::{Referee, observed};
use crate::world::World;

/// How a guest is, for whoever wished something of its power.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Being {
    Up,
    Halted,
    Down,
}

impl Being {
    pub(super) fn of(seen: &Observed) -> Self {
        match seen.domain {
            Some(RunState::Running) => Self::Up,
            Some(RunState::Paused(_)) => Self::Halted,
            Some(RunState::NotStarted | RunState::Ended(_) | RunState::Saved) | None => Self::Down,
        }
    }
}

/// How it was before, since that was wished.
fn before(verb: &Verb) -> &'static [Being] {
    match verb {
        Verb::Reboot(_) => &[Being::Down],
        _ => &[],
    }
}

/// How it is at some moment of which that is carried out. One that does not run when it is to be halted stays as it is.
fn wished(verb: &Verb) -> &'static [Being] {
    match verb {
        Verb::Start | Verb::Resume | Verb::Unpause | Verb::Reboot(_) => &[Being::Up],
        Verb::Stop(_) | Verb::Suspend => &[Being::Down],
        Verb::Pause => &[Being::Halted, Being::Down],
        _ => &[Being::Up, Being::Halted, Being::Down],
    }
}

impl Referee {
    /// How it is at this moment.
    pub(crate) fn see(&mut self, world: &World, instance: InstanceId) {
        let seen = world.computers.iter().find_map(|computer| observed(computer, instance));
        let being = Being::of(&seen.unwrap_or_default());
        self.known.entry(instance).or_default().seen.insert(being, world.elapsed());
    }

    /// A user who wished that `since` then was told that this wish for its power, or a later one, is carried out.
    pub(crate) fn power_answered(
        &mut self,
        world: &World,
        instance: InstanceId,
        (verb, generation, since): (&Verb, u64, Duration),
        told: &Status,
    ) {
        self.see(world, instance);
        let known = self.known(instance);
        if self.restored {
            return;
        }
        let verb_name = verb.name();
        if known.power_told < generation {
            self.found(format!("{verb_name} of {instance} was told to be done, which its node never told"));
            return;
        }
        // A later one came before it; or somebody else had a hand in it.
        let is_later = told.power_generation > generation;
        let excused = known.disturbed || known.by_hand || known.status_lost || known.request_lost;
        let is_seen = |being: &Being| known.seen.get(being) >= Some(&since);
        // Saved, it does not run, and is not where it was to be.
        let is_saved = told.state == State::Suspended && matches!(verb, Verb::Stop(_) | Verb::Pause);
        let was_so = !is_saved && wished(verb).iter().any(is_seen) && before(verb).iter().all(is_seen);
        if !(is_later || excused || was_so) {
            self.found(format!("{verb_name} of {instance} was told to be done, and it was never so"));
        }
    }
}

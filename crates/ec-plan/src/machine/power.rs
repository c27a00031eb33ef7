//! A user's wish for power, from when it is made until it is carried out once.
//!
//! ```text
//!                    Running                     Stopped                    Paused       Suspended
//! runs               noted; to be rebooted:      STOPPING, asked to end,    halted       SUSPENDING, saved
//!                    REBOOTING, ended as there   ended when its grace is
//!                                                over
//! is paused          let go on                   the same                   noted        the same
//! does not run       STARTING, started           noted: STOPPED             noted: STOPPED, it did not run any more
//! is saved           started, from there; to be  the same, and then ended   the same, then   noted: SUSPENDED
//!                    rebooted hard: REBOOTING,                              halted
//!                    its memory deleted
//! ```
//!
//! Saved though something else is wished it is where a call to save it that nobody waited for came to its end later.

use std::time::Duration;

use ec_model::{End, GRACE_SECONDS, Power, RunState, State};

use super::{
    Announce, DropMemory, NotePower, NoteStart, Pause, Plan, PowerOff, Resume, Save, ShutDown, Until, is_up,
    kept::{self, start_again},
    known, state,
};
use crate::{Allocation, Asked, Facts, KnownStatus, Limits};

/// A guest that does not end is asked again after so long: one that was booting did not hear.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// How long a guest may take to end by itself where its user could not say.
pub(super) const GRACE: Duration = Duration::from_secs(GRACE_SECONDS as u64);

/// What is left to do of the wish.
pub(super) fn wish(facts: &Facts, _: &Limits) -> Option<Plan> {
    if !facts.power.pending {
        return None;
    }
    let domain = facts.observed.domain?;
    let up = is_up(facts);
    Some(match (facts.power.wanted, domain) {
        (Power::Running, _) if up && ends_first(facts) => {
            return kept::uncounted(facts).or_else(|| Some(end(facts, State::Rebooting)));
        }
        (Power::Running, RunState::Paused(_)) => Plan::run(vec![Resume, came_up(facts)], "letting it go on"),
        (Power::Running, RunState::Running) => Plan::run(vec![came_up(facts)], "it runs, as is wanted"),
        // Without its disk it cannot; that is told.
        (Power::Running, _) if !facts.observed.volume => return None,
        (Power::Stopped | Power::Paused, RunState::Saved) if !facts.observed.volume => return None,
        // Said before, since of one that runs again nobody could tell any more that it lost its memory.
        (Power::Running, RunState::Ended(_) | RunState::NotStarted)
            if state(facts) == Some(State::Suspended) =>
        {
            kept::forgotten(facts)
        }
        (Power::Running, RunState::Saved) if is_to_forget(facts) => boot_anew(facts),
        (Power::Running, _) => start_again(facts),
        (Power::Stopped, _) if up => end(facts, State::Stopping),
        (Power::Stopped | Power::Paused, RunState::Saved) => start_again(facts),
        (Power::Suspended, RunState::Saved) => {
            done(State::Suspended, None, "its memory lies on the node's disk")
        }
        (Power::Stopped, _) => {
            done(State::Stopped, ended_hard(facts, domain), "it does not run, as is wanted")
        }
        (Power::Paused, RunState::Paused(_)) => done(State::Paused, None, "it is paused, as is wanted"),
        (Power::Paused, _) if up => Plan::run(vec![Pause, NotePower(State::Paused, None)], "pausing it"),
        (Power::Suspended, _) if up && state(facts) == Some(State::Suspending) => {
            Plan::run(vec![Save], "saving its memory")
        }
        (Power::Suspended, _) if up => {
            Plan::run(vec![Announce(State::Suspending, None), Save], "saving its memory")
        }
        (Power::Paused | Power::Suspended, _) => {
            let why = "it did not run any more when it was to be halted";
            done(State::Stopped, Some(why.to_owned()), why)
        }
    })
}

/// Ends a guest that is up and is not to be asked. All else that is wanted of it comes after that: it may wait for a guest that
/// stands still, and only its end frees what hangs.
pub(super) fn end_at_once(facts: &Facts, limits: &Limits) -> Option<Plan> {
    let ends = match facts.power.wanted {
        Power::Stopped => true,
        Power::Running => ends_first(facts),
        Power::Paused | Power::Suspended => false,
    };
    if is_up(facts) && ends && facts.power.grace.is_zero() { wish(facts, limits) } else { None }
}

fn done(state: State, reason: Option<String>, why: &'static str) -> Plan {
    Plan::run(vec![NotePower(state, reason)], why)
}

/// Whether a guest that is up has to end before it is as it shall be: it is to be rebooted and was not ended yet, or a
/// stop was under way when its user changed their mind.
fn ends_first(facts: &Facts) -> bool {
    let Some(KnownStatus { state, generation, .. }) = known(facts) else { return facts.power.anew };
    match state {
        State::Stopping | State::Rebooting => true,
        // Told since the wish is known, so it was ended before: this is the start after that.
        State::Starting if *generation >= facts.power.generation => false,
        _ => facts.power.anew,
    }
}

/// Whether a guest whose memory is saved is to boot anew, and not to go on from there: it would be ended without being asked, were it up.
fn is_to_forget(facts: &Facts) -> bool {
    facts.power.anew && facts.power.grace.is_zero() && ends_first(facts)
}

/// Its memory goes only where it can be started afterwards.
fn boot_anew(facts: &Facts) -> Plan {
    if !matches!(facts.allocation, Allocation::Held { .. }) {
        return start_again(facts);
    }
    let told = Some(Announce(State::Rebooting, None)).filter(|_| state(facts) != Some(State::Rebooting));
    Plan::run(told.into_iter().chain([DropMemory]).collect(), "deleting its saved memory, to boot it anew")
}

/// It is up again: of a start that was begun its time is noted, else only that it is so.
fn came_up(facts: &Facts) -> super::Effect {
    match known(facts) {
        Some(status) if status.state != State::Starting && status.start_noted => {
            let state = match status.has_address {
                _ if facts.observed.rescued => State::Rescued,
                true => State::Active,
                false => State::Starting,
            };
            NotePower(state, None)
        }
        _ => NoteStart,
    }
}

fn end(facts: &Facts, telling: State) -> Plan {
    end_within(facts.power.grace, facts, telling)
}

/// Asks the guest to end, and ends it when its time is over.
pub(super) fn end_within(grace: Duration, facts: &Facts, telling: State) -> Plan {
    let mut effects = Vec::new();
    if state(facts) != Some(telling) {
        effects.push(Announce(telling, None));
    }
    let asked = facts.asked_to_end;
    let wait = match asked {
        _ if grace.is_zero() => None,
        None => Some(Duration::ZERO),
        Some(Asked { first, .. }) if first >= grace => None,
        Some(Asked { first, last }) => Some(ASK_AGAIN.saturating_sub(last).min(grace.saturating_sub(first))),
    };
    match wait {
        None => {
            effects.push(PowerOff);
            Plan::run(effects, "ending it")
        }
        Some(Duration::ZERO) => {
            effects.push(ShutDown);
            Plan::run(effects, "asking it to end")
        }
        Some(_) if !effects.is_empty() => Plan::run(effects, "waiting for it to end"),
        Some(rest) => Plan::wait(Until::After(rest), "waiting for it to end"),
    }
}

/// What to tell of a guest that did not end by itself although it was given time.
fn ended_hard(facts: &Facts, domain: RunState) -> Option<String> {
    let hard = domain == RunState::Ended(End::ByHand) && state(facts) == Some(State::Stopping);
    (hard && !facts.power.grace.is_zero())
        .then(|| format!("it did not end by itself in {} s and was ended", facts.power.grace.as_secs()))
}

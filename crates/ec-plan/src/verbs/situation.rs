//! How an instance stands: what a verb is judged by, and what people are told.

use std::fmt;

use ec_model::{Desired, Instance, Power, Request, State, Status};

use crate::{
    machine::is_of_what_ran,
    sizes::{self, Resizing},
    status::is_lost,
};

/// How an instance stands for who asks something of it: by what it is told to be, and by what it is on the way to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Situation {
    /// It never ran yet, and will.
    Building,
    /// It runs, or is being started.
    Running,
    /// Its processors are halted.
    Paused,
    /// Its memory is being saved.
    Suspending,
    /// Its memory is saved.
    Suspended,
    /// It is being ended.
    Stopping,
    /// It does not run.
    Stopped,
    /// It is being ended, to be started again.
    Rebooting,
    /// Its disk is being made anew.
    Rebuilding,
    /// It is to boot from its rescue disk, and does not yet.
    Rescuing,
    /// It boots from its rescue disk, and runs, or is in ERROR.
    Rescued,
    /// It boots from its rescue disk, and ended by itself.
    RescuedOff,
    /// It is to boot from its own disk again, and does not yet.
    Unrescuing,
    /// It is being given another size.
    Resizing,
    /// It has another size, which is neither confirmed nor reverted.
    Resized,
    /// Something is wrong with it, and it is kept.
    Error,
}

impl fmt::Display for Situation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Building => "being built",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Suspending => "being suspended",
            Self::Suspended => "suspended",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Rebooting => "rebooting",
            Self::Rebuilding => "being rebuilt",
            Self::Rescuing => "being rescued",
            Self::Rescued => "rescued",
            Self::RescuedOff => "rescued and not running",
            Self::Unrescuing => "being unrescued",
            Self::Resizing => "being resized",
            Self::Resized => "resized and not confirmed",
            Self::Error => "in ERROR",
        })
    }
}

/// Whether its agent tells that it ran.
pub(crate) fn is_built(status: &Status) -> bool {
    status.started_at.is_some() || is_of_what_ran(status.state)
}

/// Whether its disk is to be made anew, and its agent has yet to tell what came of that.
pub fn is_to_be_made_anew(request: &Request, status: Option<&Status>) -> bool {
    let told = status.and_then(|status| status.rebuilt.as_ref()).map(|rebuilt| rebuilt.wished_at);
    told < request.rebuild.as_ref().map(|wish| wish.wished_at)
}

/// Whether its last wish to run or not is yet to be carried out: heard of by its agent or not.
fn is_pending(request: &Request, status: &Status) -> bool {
    let wish = &request.power;
    // Of one that is started again by itself it is not told which wish is carried out, but that it is to run.
    // Nor is there a way to a start that its agent knows of, and tells an ERROR. What else fails is tried again till it is taken back.
    let is_refused = status.state == State::Error
        && wish.power == Power::Running
        && status.observed_generation >= wish.generation;
    // What lost its disk ends no more: it did.
    let has_ended =
        wish.power == Power::Stopped && is_lost(status) && status.observed_generation >= wish.generation;
    status.power_generation < wish.generation
        && !is_refused
        && !has_ended
        && (status.power_generation != 0 || is_built(status) && wish.power != Power::Running)
}

/// Whether it runs, or is halted, by nothing yet but the wish for that.
pub(super) fn is_so_by_wish(situation: Situation, request: &Request, status: &Status) -> bool {
    let is_so = match situation {
        Situation::Running => matches!(status.state, State::Active | State::Starting),
        Situation::Paused => status.state == State::Paused,
        // Of all others the word itself says that it is on its way.
        _ => true,
    };
    !is_so && is_pending(request, status)
}

impl Situation {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 16] = [
        Self::Building,
        Self::Running,
        Self::Paused,
        Self::Suspending,
        Self::Suspended,
        Self::Stopping,
        Self::Stopped,
        Self::Rebooting,
        Self::Rebuilding,
        Self::Rescuing,
        Self::Rescued,
        Self::RescuedOff,
        Self::Unrescuing,
        Self::Resizing,
        Self::Resized,
        Self::Error,
    ];

    /// How an instance stands that is wanted, by its record, its request, and what its agent tells.
    pub(crate) fn of(instance: &Instance, request: &Request, status: Option<&Status>) -> Self {
        let Some(status) = status else {
            // What its agent told was taken away, and it tells again. Neither is wished of one that is being built.
            return match (&request.rescue, request.power.power) {
                (Some(_), _) => Self::Rescuing,
                (None, Power::Suspended) => Self::Suspending,
                (None, _) => Self::Building,
            };
        };
        let wish = &request.power;
        let is_built = is_built(status);
        if is_built && is_to_be_made_anew(request, Some(status)) {
            return Self::Rebuilding;
        }
        let is_starting = matches!(status.state, State::Rescuing | State::Starting);
        match (&request.rescue, &status.rescued) {
            (Some(wish), was)
                if is_built && was.as_ref().is_none_or(|was| was.wished_at != wish.wished_at) =>
            {
                return Self::Rescuing;
            }
            (Some(_), Some(_)) if status.is_rescued() && is_starting => return Self::Rescuing,
            // A wish of before the rescue that is not to run waits for its end.
            (Some(_), Some(_))
                if status.is_rescued() && wish.power == Power::Running && is_pending(request, status) =>
            {
                return Self::Rescuing;
            }
            (Some(_), Some(_)) if status.is_rescued() && status.state == State::Stopped => {
                return Self::RescuedOff;
            }
            (Some(_), Some(_)) if status.is_rescued() => return Self::Rescued,
            (None, Some(_)) if status.is_rescued() => return Self::Unrescuing,
            _ => {}
        }
        if is_built && status.state != State::Error {
            match sizes::resized(instance, request, status) {
                Some(Resizing::UnderWay) => return Self::Resizing,
                Some(Resizing::Done) => return Self::Resized,
                Some(Resizing::Failed) | None => {}
            }
        }
        // What was wished and is not carried out yet: the next wish is judged by where that leads. So is one for a disk or a
        // size that came to its end just now, which the state does not show yet.
        let has_just_ended = matches!(status.state, State::Rebuilding | State::Rescuing | State::Resizing);
        let is_wished = is_pending(request, status);
        if is_wished || has_just_ended {
            return match wish.power {
                Power::Running if wish.anew && is_wished => Self::Rebooting,
                Power::Running => Self::Running,
                Power::Paused => Self::Paused,
                Power::Suspended => Self::Suspending,
                Power::Stopped => Self::Stopping,
            };
        }
        match status.state {
            State::Scheduled | State::Preparing => Self::Building,
            State::Starting if status.started_at.is_none() => Self::Building,
            State::Starting | State::Active => Self::Running,
            State::Paused => Self::Paused,
            State::Suspending => Self::Suspending,
            State::Suspended => Self::Suspended,
            State::Stopping => Self::Stopping,
            State::Stopped => Self::Stopped,
            State::Rebooting => Self::Rebooting,
            State::Rebuilding => Self::Rebuilding,
            State::Rescuing => Self::Rescuing,
            State::Rescued => Self::Rescued,
            State::Unrescuing => Self::Unrescuing,
            State::Resizing => Self::Resizing,
            State::VerifyResize => Self::Resized,
            State::Error | State::Destroying | State::Unclaimed | State::Unknown => Self::Error,
        }
    }
}

/// What people are told of an instance whose agent tells this: what it is judged to be on the way to, also before its agent
/// has taken that up, so that a list and a refusal say the same. What is wrong is told whatever is wished.
pub fn shown(instance: &Instance, request: &Request, status: &Status) -> State {
    let is_wrong =
        matches!(status.state, State::Error | State::Destroying | State::Unclaimed | State::Unknown);
    if request.desired != Desired::Active || is_wrong {
        return status.state;
    }
    match Situation::of(instance, request, Some(status)) {
        Situation::Running if matches!(status.state, State::Stopped | State::Suspended) => State::Starting,
        Situation::Suspending => State::Suspending,
        Situation::Stopping => State::Stopping,
        Situation::Rebooting => State::Rebooting,
        Situation::Rebuilding => State::Rebuilding,
        Situation::Rescuing => State::Rescuing,
        Situation::Unrescuing => State::Unrescuing,
        Situation::Resizing => State::Resizing,
        Situation::Resized if matches!(status.state, State::Active | State::Stopped) => State::VerifyResize,
        _ => status.state,
    }
}

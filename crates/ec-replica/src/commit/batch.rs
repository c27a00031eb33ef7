//! What becomes of a batch of commands, from the first decision on them to their answers: a machine. It is told
//! what happened and says what is to be done next; it does nothing itself, and knows no store, no view and no clock.
//!
//! ```text
//!             ┌──────────────────── again, until the time is over ───────────────────────┐
//!             ▼                                                                          │
//!   begin ─▶ Yield ─┬─ all known ─────▶ Plan ─────▶ Sent ─▶ written: answer              │
//!             ▲     │                   ▲ │ │        ││└─ others were first ─▶ Conflict ─┤
//!             │     └─ not up to date   │ │ │        │└── not reached, lost ─▶ Pause ────┤
//!             │            ▼            │ │ │        └─── too much for etcd ─▶ halve ────┤
//!             │         CatchUp ────────┘ │ └── refusals want a fresh view, too large ───┘
//!             │            │ └─ an attempt of before is seen to have happened: answer
//!             └─ Pause ◀───┘ failed       └─ nothing to write, and known to be so: answer
//! ```
//!
//! **What cannot be.** Where the view is up to date and nothing of what a transaction stands on has changed, it cannot
//! fail for others. If it does all the same, one of its commands stands on what is in etcd otherwise than the view
//! knows: halves are tried, so that this one takes no other with it. Alone with it, all is read anew, once.
//!
//! **Doubt.** An attempt whose answer was lost may have happened, may happen yet, or never. It is kept, with its
//! answers, and the same commands are tried again; every attempt writes, or stands on, the same records, so that at
//! most one of them ever happens. After each catching up the ids of the attempts are looked for among the
//! transactions that the watch told of. While there is doubt nothing is left out of the batch and nothing put in
//! its place: what cannot be carried out as a whole any more is told as "not known".
//!
//! **Beside others.** Several batches may be under way ([`super::lanes`]), each a machine of its own that knows nothing of
//! the others. What one of them writes is to another what another replica writes: where it stands on that, its
//! comparisons fail. So a doubt is its own batch's, whatever those beside it come to.

use std::{fmt::Debug, time::Duration};

use ec_store::{Compare, StoreError, StoreResult, Txn, TxnOutcome};
use tokio::time::Instant;

use super::{Answer, BYTES_MAX, Plan, WriteError};
use crate::Unavailable;

/// The wait before etcd is tried again, and what it grows to.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Bytes that each condition or change takes beside its key and value, more or less.
const BYTES_EACH: usize = 32;

/// Who has waited so long, and met others so often, asks for its turn.
const TURN_AFTER: Duration = Duration::from_millis(200);
const TURN_CONFLICTS: u32 = 3;

/// A transaction that failed so often while everything that it stands on seemed unchanged has met a change
/// that no watch told of.
const UNTOLD: u32 = 3;

/// What is to be done next.
#[derive(Debug)]
pub(super) enum Action<O, R> {
    /// Wait while another replica has its turn, so long at most. Then tell [`Event::Free`].
    Yield(Duration),
    /// Bring the view up to date, within this time. Then tell [`Event::CaughtUp`].
    CatchUp(Duration),
    /// Decide so many commands, or as many of them as fit. Then tell [`Event::Planned`].
    Plan(usize),
    /// Write this. Then tell [`Event::Answered`].
    Send(Txn),
    /// Wait. Then tell [`Event::Performed`].
    Pause(Duration),
    /// What is in etcd is not what its watch told, or others are always faster. Then tell [`Event::Performed`].
    Resist(Resistance),
    /// The commands that were decided last are done: these are their answers. The machine has ended.
    Answer {
        answers: Vec<Answer<O, R>>,
        /// Whether anything was written.
        written: bool,
    },
    /// They are not, or it is not known. The machine has ended.
    Fail(Failed),
}

/// What is to be done about conflicts that do not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resistance {
    /// Have the state read anew.
    pub(super) distrust: bool,
    /// Ask the others to wait.
    pub(super) ask_for_turn: bool,
}

/// Which commands failed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failed {
    pub(super) who: Who,
    pub(super) why: Unavailable,
    /// Whether others kept changing the same records until the time was over.
    pub(super) contention: bool,
}

/// Of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// The first so many.
    First(usize),
    /// The first, and of so many those behind it whose time is over, too.
    Late(usize),
}

/// What happened.
#[derive(Debug)]
pub(super) enum Event<O, R> {
    /// No other replica has its turn; and why nothing may be written all the same.
    Free(Option<Unavailable>),
    /// The view has everything that was written before, or why not.
    CaughtUp(Result<Known, Unavailable>),
    /// What was decided.
    Planned(Plan<O, R>),
    /// What etcd says.
    Answered(StoreResult<TxnOutcome>),
    /// It was done.
    Performed,
}

/// What is known once the view is up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// Which of [`Batch::doubtful`] was seen to have happened.
    pub(super) happened: Option<usize>,
    /// How often the state was listed anew.
    pub(super) listings: u64,
}

/// What the machine waits for.
#[derive(Debug)]
enum Phase<O, R> {
    Yield,
    CatchUp,
    Plan,
    Sent(Sent<O, R>),
    /// Before it begins again.
    Again,
    Ended,
}

/// A transaction on its way.
#[derive(Debug)]
struct Sent<O, R> {
    id: String,
    answers: Vec<Answer<O, R>>,
    when: Vec<Compare>,
}

/// A transaction that was sent, and of which it is not known whether it arrived.
#[derive(Debug)]
struct Attempt<O, R> {
    id: String,
    answers: Vec<Answer<O, R>>,
}

/// What stood in the way of the last attempt.
#[derive(Debug, Clone)]
enum Obstacle {
    /// Nothing yet: there was no attempt.
    Queue,
    /// Other writers, so often.
    Contention(u32),
    /// etcd, in its words.
    Etcd(String),
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Queue => f.write_str("too many writes wait, and this one's time is over; nothing was done"),
            Self::Contention(times) => write!(
                f,
                "too much contention: others changed the same records each of {times} times; nothing was done"
            ),
            Self::Etcd(why) => write!(f, "{why}; nothing was done"),
        }
    }
}

/// See the module. Of commands with such outcomes and refusals, which it passes on.
#[derive(Debug)]
pub(super) struct Batch<O, R> {
    phase: Phase<O, R>,
    /// How many commands are to be decided.
    size: usize,
    began: Instant,
    /// Of the first command.
    deadline: Instant,
    /// What was left of the time when it last began.
    rest: Duration,
    /// How often the state had been listed anew when this began.
    listings: u64,
    /// In the order in which they were sent.
    doubtful: Vec<Attempt<O, R>>,
    obstacle: Obstacle,
    pause: Duration,
    conflicts: u32,
    untold: u32,
    /// Whether all was read anew for that.
    distrusted: bool,
    /// What the last transaction that met another's stood on.
    stood_on: Vec<Compare>,
    /// Whether the view has been brought up to date since the newest of these commands came in.
    fresh: bool,
    catch_up: bool,
    /// What etcd said where it had no space for the last attempt, which it may have done with its last.
    full: Option<String>,
}

impl<O: Debug, R: Debug> Batch<O, R> {
    /// So many commands, the first of which has time until `deadline`. `known`: how often the state was listed anew;
    /// none: never yet.
    pub(super) fn new(size: usize, deadline: Instant, now: Instant, known: Option<u64>) -> Self {
        Self {
            phase: Phase::Ended,
            size,
            began: now,
            deadline,
            rest: Duration::ZERO,
            listings: known.unwrap_or(0),
            doubtful: Vec::new(),
            obstacle: Obstacle::Queue,
            pause: PAUSE,
            conflicts: 0,
            untold: 0,
            distrusted: false,
            stood_on: Vec::new(),
            fresh: false,
            catch_up: known.is_none(),
            full: None,
        }
    }

    /// The ids of the attempts that are in doubt.
    pub(super) fn doubtful(&self) -> impl Iterator<Item = &str> {
        self.doubtful.iter().map(|attempt| &*attempt.id)
    }

    /// How many commands it has now.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Begins, or begins again.
    pub(super) fn begin(&mut self, now: Instant) -> Action<O, R> {
        self.rest = self.deadline.saturating_duration_since(now);
        if self.rest.is_zero() {
            return self.time_is_over();
        }
        self.phase = Phase::Yield;
        Action::Yield(self.rest)
    }

    /// Takes up what happened.
    pub(super) fn step(&mut self, event: Event<O, R>, now: Instant) -> Action<O, R> {
        match (std::mem::replace(&mut self.phase, Phase::Ended), event) {
            (Phase::Yield, Event::Free(why)) => self.free(why),
            (Phase::CatchUp, Event::CaughtUp(caught_up)) => self.caught_up(caught_up),
            (Phase::Plan, Event::Planned(plan)) => self.planned(plan, now),
            (Phase::Sent(sent), Event::Answered(answer)) => self.answered(sent, answer, now),
            (Phase::Again, Event::Performed) => self.begin(now),
            (phase, event) => unreachable!("in {phase:?} came {event:?}"),
        }
    }

    fn free(&mut self, why: Option<Unavailable>) -> Action<O, R> {
        match why {
            // What is in doubt is looked for all the same.
            Some(why) if self.doubtful.is_empty() => self.fail(why),
            _ if self.catch_up => {
                self.phase = Phase::CatchUp;
                Action::CatchUp(self.rest)
            }
            _ => self.plan(),
        }
    }

    fn plan(&mut self) -> Action<O, R> {
        self.phase = Phase::Plan;
        Action::Plan(self.size)
    }

    fn caught_up(&mut self, caught_up: Result<Known, Unavailable>) -> Action<O, R> {
        let known = match caught_up {
            Ok(known) => known,
            Err(why) => {
                // It may be well again before the time is over.
                self.obstacle = Obstacle::Etcd(why.0);
                return self.pause();
            }
        };
        (self.fresh, self.catch_up) = (true, false);
        // Every attempt had the same commands, so one that happened has done all of them.
        if let Some(happened) = known.happened {
            return Action::Answer { answers: self.doubtful.swap_remove(happened).answers, written: true };
        }
        if !self.doubtful.is_empty() && known.listings != self.listings {
            return self.fail(in_doubt("the state was read anew meanwhile"));
        }
        // That one has come to its end, and is not in the view: it was not done. Another before it may still come.
        if let Some(why) = self.full.take() {
            let certain = self.doubtful.len() == 1;
            return self.fail(if certain {
                Unavailable(format!("{why}; nothing was done"))
            } else {
                in_doubt(&why)
            });
        }
        self.plan()
    }

    fn planned(&mut self, plan: Plan<O, R>, now: Instant) -> Action<O, R> {
        let certain = self.doubtful.is_empty();
        let too_big = matches!(&*plan.answers, [Err(WriteError::TooBig { .. })]);
        if !certain && (too_big || plan.answers.len() != self.size) {
            return self.fail(in_doubt("the commands do not fit together any more"));
        }
        self.size = plan.answers.len();
        if plan.needs_fresh && !self.fresh {
            self.catch_up = true;
            return self.begin(now);
        }
        let Plan { id, answers, txn, .. } = plan;
        let Some(txn) = txn else { return Action::Answer { answers, written: false } };
        let bytes = txn.bytes() + BYTES_EACH * (txn.when.len() + txn.then.len());
        if bytes > BYTES_MAX {
            if !certain {
                return self.fail(in_doubt("the commands do not fit together any more"));
            }
            if self.size == 1 {
                return Action::Answer { answers: vec![Err(WriteError::TooLarge { bytes })], written: false };
            }
            self.size /= 2;
            return self.begin(now);
        }
        self.phase = Phase::Sent(Sent { id, answers, when: txn.when.clone() });
        Action::Send(txn)
    }

    fn answered(&mut self, sent: Sent<O, R>, answer: StoreResult<TxnOutcome>, now: Instant) -> Action<O, R> {
        match answer {
            Ok(outcome) if outcome.succeeded => Action::Answer { answers: sent.answers, written: true },
            Ok(_) => self.conflict(sent.when, now),
            // Certainly not done.
            Err(error @ StoreError::Unreachable { .. }) => {
                self.obstacle = Obstacle::Etcd(error.to_string());
                self.catch_up = true;
                self.pause()
            }
            // A later attempt writes, or stands on, the same records, so that at most one happens.
            Err(error @ StoreError::Unknown(_)) => {
                self.obstacle = Obstacle::Etcd(error.to_string());
                self.doubtful.push(Attempt { id: sent.id, answers: sent.answers });
                self.catch_up = true;
                self.pause()
            }
            Err(StoreError::Full(why)) => {
                tracing::error!(error = why, "etcd has no space for a transaction");
                self.obstacle = Obstacle::Etcd(why.clone());
                self.full = Some(why);
                self.doubtful.push(Attempt { id: sent.id, answers: sent.answers });
                self.catch_up = true;
                self.begin(now)
            }
            Err(error) => self.refused(error.to_string(), now),
        }
    }

    /// Others have changed what it stood on.
    fn conflict(&mut self, stood_on: Vec<Compare>, now: Instant) -> Action<O, R> {
        self.conflicts += 1;
        self.obstacle = Obstacle::Contention(self.conflicts);
        self.catch_up = true;
        // Up to date, and all is as it was: so it cannot fail, but it does. A half stands on nothing else than the whole
        // did; and that others moved the clock on is nothing that a transaction fails for.
        let is_known = |one| matches!(one, &Compare::NotBefore(..)) || self.stood_on.contains(one);
        let as_it_was = self.fresh && !self.stood_on.is_empty() && stood_on.iter().all(is_known);
        self.untold = if as_it_was { self.untold + 1 } else { 0 };
        self.stood_on = stood_on;
        let distrust = self.untold >= UNTOLD;
        if distrust && self.doubtful.is_empty() {
            if self.size > 1 {
                tracing::warn!(size = self.size, "a transaction failed that could not; trying half of it");
                self.size /= 2;
                return self.begin(now);
            }
            if self.distrusted {
                return self.fail(Unavailable(
                    "what it stands on is in etcd otherwise than all that was read anew; nothing was done"
                        .into(),
                ));
            }
        }
        if distrust {
            (self.untold, self.distrusted) = (0, true);
        }
        let ask_for_turn =
            self.conflicts >= TURN_CONFLICTS && now.saturating_duration_since(self.began) >= TURN_AFTER;
        if !distrust && !ask_for_turn {
            return self.begin(now);
        }
        self.phase = Phase::Again;
        Action::Resist(Resistance { distrust, ask_for_turn })
    }

    /// etcd does not take it, and says so.
    fn refused(&mut self, why: String, now: Instant) -> Action<O, R> {
        let certain = self.doubtful.is_empty();
        // One of them may be too much for an etcd whose limits are not what we were told; the others must not
        // suffer for it.
        if self.size > 1 && certain && may_be_for_size(&why) {
            tracing::warn!(error = why, size = self.size, "etcd refused a transaction; trying half of it");
            self.size /= 2;
            return self.begin(now);
        }
        if self.size == 1 && certain && is_for_size(&why) {
            return Action::Answer { answers: vec![Err(WriteError::NotTaken(why))], written: false };
        }
        tracing::error!(error = why, "etcd refused a transaction");
        self.fail(if certain { Unavailable(why) } else { in_doubt(&why) })
    }

    fn pause(&mut self) -> Action<O, R> {
        self.phase = Phase::Again;
        let pause = self.pause.min(self.rest);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Action::Pause(pause)
    }

    fn fail(&self, why: Unavailable) -> Action<O, R> {
        Action::Fail(Failed { who: Who::First(self.size), why, contention: false })
    }

    fn time_is_over(&self) -> Action<O, R> {
        let why = self.obstacle.to_string();
        if !self.doubtful.is_empty() {
            return self.fail(in_doubt(&why));
        }
        // Those that came later still have time.
        let contention = matches!(self.obstacle, Obstacle::Contention(_));
        Action::Fail(Failed { who: Who::Late(self.size), why: Unavailable(why), contention })
    }
}

/// Whether a refusal of etcd may not concern a smaller transaction.
fn may_be_for_size(why: &str) -> bool {
    !["permission denied", "auth"].iter().any(|phrase| why.contains(phrase))
}

/// Whether etcd said that it is: in its own words.
fn is_for_size(why: &str) -> bool {
    ["too many operations", "request is too large"].iter().any(|phrase| why.contains(phrase))
}

fn in_doubt(why: &str) -> Unavailable {
    let why = why.trim_end_matches("; nothing was done");
    Unavailable(format!("it is not known whether the change was made: etcd was lost while writing ({why})"))
}

#[cfg(test)]
mod tests;

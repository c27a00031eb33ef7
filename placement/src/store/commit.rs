//! Commands on their way into etcd: decided one after the other on one draft, written together.
//!
//! While one transaction is under way, commands gather for the next, so the busier a replica is, the more
//! share a write. A transaction that fails has met another replica's: the view catches up, and the same
//! commands are decided again. A replica that meets others again and again, because it is farther from etcd
//! than they are, asks for its turn: the others let one write of it pass.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use ec_placement_model::{Change, Command, Draft, ModelError, Outcome, Seconds, decide};
use ec_store::{Compare, Store, StoreError, Txn};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    Health, Unavailable,
    barrier::Barrier,
    keys::{self, Keys, Stand},
    view::{View, Written},
};
use crate::metrics::Metrics;

/// Commands that may wait; beyond them, the next wait to be let in.
pub(super) const QUEUE: usize = 4096;

/// The wait before etcd is tried again, and what it grows to.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Bytes of a transaction's keys and values. etcd takes requests of 1.5 MiB where nothing else is said.
const BYTES_MAX: usize = 1 << 20;
/// Bytes that each condition or change takes beside its key and value, more or less.
const BYTES_EACH: usize = 32;

/// Who has waited so long, and met others so often, asks for its turn.
const TURN_AFTER: Duration = Duration::from_millis(200);
const TURN_CONFLICTS: u32 = 3;
/// A turn lasts so long, whatever became of who asked for it.
const TURN_LASTS: Duration = Duration::from_secs(1);

/// A transaction that failed so often while everything that it stands on seemed unchanged has met a change
/// that no watch told of.
const UNTOLD: u32 = 3;

/// What one transaction may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Conditions, and changes; etcd's own `--max-txn-ops` is 128 where nothing else is said.
    pub operations: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { operations: 128 }
    }
}

/// Why a command was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// It must not be.
    #[error(transparent)]
    Refused(ModelError),
    /// It does not fit into one transaction.
    #[error(
        "The request changes {operations} records at once, more than the {limit} that one transaction of etcd may \
         change. Split it, or raise etcd's --max-txn-ops and max_txn_ops of eplacement."
    )]
    TooBig {
        /// What it needs.
        operations: usize,
        /// What there may be.
        limit: usize,
    },
    /// Its records are too large for one transaction.
    #[error(
        "The request writes {bytes} bytes at once, more than the {BYTES_MAX} that one transaction may write."
    )]
    TooLarge {
        /// What it needs.
        bytes: usize,
    },
    /// It is too much for an etcd whose limits are not what we were told.
    #[error(
        "The request changes more at once than this etcd takes ({0}). Split it, or raise etcd's --max-txn-ops or \
         --max-request-bytes; max_txn_ops of eplacement must not say more than etcd's."
    )]
    NotTaken(String),
    /// Not now.
    #[error(transparent)]
    Unavailable(Unavailable),
}

type Answer = Result<Outcome, WriteError>;

/// A command with somebody who waits for its outcome.
pub(super) struct Pending {
    /// None: nothing but a write, to see whether one is possible.
    command: Option<Command>,
    answer: oneshot::Sender<Answer>,
    deadline: Instant,
}

impl Pending {
    pub(super) fn new(command: Option<Command>, answer: oneshot::Sender<Answer>, patience: Duration) -> Self {
        Self { command, answer, deadline: Instant::now() + patience }
    }

    fn answer(self, answer: Answer) {
        // Whoever has gone does not wait for an answer.
        self.answer.send(answer).ok();
    }
}

/// The decisions on a batch, before they are written.
struct Plan {
    /// In the order of the batch, for as many as fit.
    answers: Vec<Answer>,
    /// What writes them; none where nothing changes.
    txn: Option<Txn>,
    /// Whether any answer stands only on what is known here.
    needs_fresh: bool,
    /// What the transaction changes, and what of the store it was decided on.
    written: (Stand, Vec<Change>),
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

/// See the module.
pub(super) struct Committer {
    store: Arc<dyn Store>,
    keys: Keys,
    limits: Limits,
    view: Arc<View>,
    barrier: Barrier,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    /// Distinguishes this replica's transactions from all others.
    name: String,
    count: u64,
    /// The watch on which this replica has last said that it is on this store.
    arrived: u64,
    /// Whether the others were asked to wait.
    has_turn: bool,
}

impl Committer {
    pub(super) fn new(
        store: Arc<dyn Store>,
        keys: Keys,
        limits: Limits,
        view: Arc<View>,
        barrier: Barrier,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
    ) -> Self {
        let name = format!("{:016x}", rand::random::<u64>());
        Self {
            store,
            keys,
            limits,
            view,
            barrier,
            metrics,
            health,
            name,
            count: 0,
            arrived: 0,
            has_turn: false,
        }
    }

    pub(super) async fn run(mut self, mut queue: mpsc::Receiver<Pending>, stop: CancellationToken) {
        let mut waiting = VecDeque::new();
        loop {
            if waiting.is_empty() {
                match stop.run_until_cancelled(queue.recv()).await {
                    Some(Some(first)) => waiting.push_back(first),
                    _ => return,
                }
            }
            while waiting.len() < self.limits.operations {
                let Ok(more) = queue.try_recv() else { break };
                waiting.push_back(more);
            }
            let carried = self.carry_out(&mut waiting).await;
            self.give_turn_back().await;
            match carried {
                Ok(answers) => {
                    for (pending, answer) in waiting.drain(..answers.len()).zip(answers) {
                        pending.answer(answer);
                    }
                }
                Err(Failed { size, why }) => {
                    self.health.note(Err(why.0.clone()));
                    for pending in waiting.drain(..size) {
                        pending.answer(Err(WriteError::Unavailable(why.clone())));
                    }
                }
            }
        }
    }

    /// Carries out as many commands from the front as fit into one transaction; answers as many.
    async fn carry_out(&mut self, waiting: &mut VecDeque<Pending>) -> Result<Vec<Answer>, Failed> {
        let mut size = waiting.len();
        let began = Instant::now();
        let deadline = waiting.front().map_or(began, |first| first.deadline);
        let listings = self.view.progress().listings;
        let mut doubtful: Vec<Attempt> = Vec::new();
        let mut pause = PAUSE;
        let mut obstacle = Obstacle::Queue;
        let (mut conflicts, mut untold) = (0, 0);
        // What the last transaction that met another's stood on.
        let mut stood_on: Vec<Compare> = Vec::new();
        // Whether the view has been brought up to date since the newest of these commands came in.
        let mut fresh = false;
        let mut catch_up = self.view.revision() == 0;
        loop {
            let now = Instant::now();
            let rest = deadline.saturating_duration_since(now);
            if rest.is_zero() {
                if !doubtful.is_empty() {
                    return Err(Failed { size, why: in_doubt(&obstacle.to_string()) });
                }
                if matches!(obstacle, Obstacle::Contention(_)) {
                    self.metrics.contention.add(1);
                }
                // Those that came later still have time.
                let late = waiting.iter().take(size).take_while(|one| one.deadline <= now).count();
                return Err(Failed { size: late.max(1), why: Unavailable(obstacle.to_string()) });
            }
            self.let_others_pass(rest).await;
            if let Some(why) = self.view.importing().filter(|_| doubtful.is_empty()) {
                return Err(Failed { size, why });
            }
            if catch_up {
                if let Err(why) = self.barrier.pass(rest).await {
                    // It may be well again before the time is over.
                    obstacle = Obstacle::Etcd(why.0);
                    tokio::time::sleep(pause.min(rest)).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                    continue;
                }
                (fresh, catch_up) = (true, false);
                // Every attempt had the same commands, so one that happened has done all of them.
                if let Some(done) = doubtful.iter().position(|attempt| self.view.has_seen(&attempt.id)) {
                    self.health.note(Ok(()));
                    return Ok(doubtful.swap_remove(done).answers);
                }
                if !doubtful.is_empty() && self.view.progress().listings != listings {
                    return Err(Failed { size, why: in_doubt("the state was read anew meanwhile") });
                }
            }
            let id = format!("{}-{}", self.name, self.count);
            self.count += 1;
            // Asked before the state is looked at: at worst it is said once more.
            let session = self.view.sessions();
            let plan = self.plan(waiting.range(..size), &id);
            if !doubtful.is_empty() && plan.answers.len() != size {
                return Err(Failed { size, why: in_doubt("the commands do not fit together any more") });
            }
            size = plan.answers.len();
            if plan.needs_fresh && !fresh {
                catch_up = true;
                continue;
            }
            let Some(mut txn) = plan.txn else { return Ok(plan.answers) };
            let bytes = txn.bytes() + BYTES_EACH * (txn.when.len() + txn.then.len());
            if bytes > BYTES_MAX {
                if size == 1 {
                    return Ok(vec![Err(WriteError::TooLarge { bytes })]);
                }
                size /= 2;
                continue;
            }
            if session != self.arrived {
                txn = txn.put(self.keys.epoch(), id.clone());
            }
            if self.has_turn {
                txn = txn.delete(self.keys.turn());
            }
            debug_assert!(txn.operations() <= self.limits.operations, "a transaction is too big");
            let when = txn.when.clone();
            self.metrics.batch_sizes.observe(size);
            let wanted = self.store.txn(txn).await;
            match wanted {
                Ok(outcome) if outcome.succeeded => {
                    let (stand, changes) = plan.written;
                    let (revision, epoch) = (outcome.revision, session != self.arrived);
                    self.view.take_written(stand, Written { revision, id: id.into(), changes, epoch });
                    (self.arrived, self.has_turn) = (session, false);
                    self.health.note(Ok(()));
                    return Ok(plan.answers);
                }
                Ok(_) => {
                    self.metrics.conflicts.add(1);
                    conflicts += 1;
                    obstacle = Obstacle::Contention(conflicts);
                    catch_up = true;
                    // Up to date, and all is as it was: so it cannot fail, but it does.
                    untold = if fresh && when == stood_on { untold + 1 } else { 0 };
                    stood_on = when;
                    if untold >= UNTOLD {
                        untold = 0;
                        self.view.doubt("what is in etcd is not what its watch told");
                    }
                    if conflicts >= TURN_CONFLICTS && began.elapsed() >= TURN_AFTER {
                        self.ask_for_turn().await;
                    }
                    continue;
                }
                // Certainly not done.
                Err(error @ StoreError::Unreachable { .. }) => {
                    obstacle = Obstacle::Etcd(error.to_string());
                    catch_up = true;
                }
                // A later attempt writes, or stands on, the same records, so that at most one happens.
                Err(error @ StoreError::Unknown(_)) => {
                    obstacle = Obstacle::Etcd(error.to_string());
                    doubtful.push(Attempt { id, answers: plan.answers });
                    catch_up = true;
                }
                Err(error) => {
                    let why = error.to_string();
                    // One of them may be too much for an etcd whose limits are not what we were told; the
                    // others must not suffer for it.
                    if size > 1 && doubtful.is_empty() && may_be_for_size(&why) {
                        tracing::warn!(why, size, "etcd refused a transaction; trying half of it");
                        size /= 2;
                        continue;
                    }
                    if size == 1 && doubtful.is_empty() && is_for_size(&why) {
                        return Ok(vec![Err(WriteError::NotTaken(why))]);
                    }
                    tracing::error!(why, "etcd refused a transaction");
                    let why = if doubtful.is_empty() { Unavailable(why) } else { in_doubt(&why) };
                    return Err(Failed { size, why });
                }
            }
            tokio::time::sleep(pause.min(rest)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Waits while another replica has its turn.
    async fn let_others_pass(&self, patience: Duration) {
        let mut progress = self.view.subscribe();
        let until = Instant::now() + patience;
        loop {
            progress.borrow_and_update();
            let Some(turn) = self.view.turn().filter(|turn| *turn.holder != *self.name) else { return };
            let over = (turn.since + TURN_LASTS).min(until);
            if over <= Instant::now() || tokio::time::timeout_at(over, progress.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Asks the others to wait, unless one of them has asked for that.
    async fn ask_for_turn(&mut self) {
        if self.has_turn {
            return;
        }
        let key = self.keys.turn();
        let free = match self.view.turn() {
            None => Compare::Absent(key.clone()),
            // Left behind by one that is gone.
            Some(turn) if turn.since.elapsed() >= TURN_LASTS || *turn.holder == *self.name => {
                Compare::Unchanged(key.clone(), turn.revision)
            }
            Some(_) => return,
        };
        let asked = self.store.txn(Txn::new().when(free).put(key, self.name.clone())).await;
        if asked.is_ok_and(|outcome| outcome.succeeded) {
            self.metrics.turns.add(1);
            self.has_turn = true;
        }
    }

    /// Lets the others go on where the turn was not used.
    async fn give_turn_back(&mut self) {
        if std::mem::take(&mut self.has_turn) {
            // Where that fails, the turn ends by itself.
            self.store.txn(Txn::new().delete(self.keys.turn())).await.ok();
        }
    }

    /// Decides commands on one draft, as many as fit.
    fn plan<'p>(&self, commands: impl Iterator<Item = &'p Pending>, id: &str) -> Plan {
        self.view.stand(|state, stand| self.plan_on(&mut Draft::new(state), stand, commands, id))
    }

    fn plan_on<'p>(
        &self,
        draft: &mut Draft<'_>,
        stand: Stand,
        commands: impl Iterator<Item = &'p Pending>,
        id: &str,
    ) -> Plan {
        let now = now();
        let limit = self.limits.operations;
        let mut answers = Vec::new();
        let (mut needs_fresh, mut beat) = (false, false);
        for pending in commands {
            let Some(command) = &pending.command else {
                beat = true;
                answers.push(Ok(Outcome::Done));
                continue;
            };
            let before = draft.savepoint();
            let answer = decide(draft, command, now).map_err(WriteError::Refused);
            let (conditions, changes) = Keys::operations(draft);
            let operations = (conditions + keys::CONDITIONS).max(changes + keys::CHANGES);
            if operations > limit {
                // It takes nothing with it: what it looked at is nobody's condition.
                draft.forget(before);
                if answers.is_empty() {
                    answers.push(Err(WriteError::TooBig { operations, limit }));
                    return Plan { answers, txn: None, needs_fresh: false, written: (stand, Vec::new()) };
                }
                break;
            }
            needs_fresh |= answer.is_err();
            answers.push(answer);
        }
        let txn = (draft.changes().len() > 0 || beat).then(|| self.keys.txn(draft, stand, id));
        Plan { needs_fresh: needs_fresh || txn.is_none(), answers, txn, written: (stand, draft.written()) }
    }
}

/// Whether a refusal of etcd may not concern a smaller transaction.
fn may_be_for_size(why: &str) -> bool {
    !["space exceeded", "permission denied", "auth"].iter().any(|phrase| why.contains(phrase))
}

/// Whether etcd said that it is: in its own words.
fn is_for_size(why: &str) -> bool {
    ["too many operations", "request is too large"].iter().any(|phrase| why.contains(phrase))
}

fn in_doubt(why: &str) -> Unavailable {
    let why = why.trim_end_matches("; nothing was done");
    Unavailable(format!("it is not known whether the change was made: etcd was lost while writing ({why})"))
}

/// Decisions that were sent, and of which it is not known whether they arrived.
struct Attempt {
    id: String,
    answers: Vec<Answer>,
}

/// The first `size` commands that wait cannot be carried out.
struct Failed {
    size: usize,
    why: Unavailable,
}

fn now() -> Seconds {
    jiff::Timestamp::now().as_second()
}

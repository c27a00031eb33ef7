//! Commands on their way into etcd: decided one after the other on one draft, written together.
//!
//! While one transaction is under way, commands gather for the next, so the busier a replica is, the more
//! share a write. A transaction that fails has met another replica's: the view catches up, and the same
//! commands are decided again.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use ec_store::{Op, Revision, Store, StoreError, Txn};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Unavailable, barrier::Barrier, keys::Keys, view::View};
use crate::{
    metrics::Metrics,
    model::{Command, Draft, ModelError, Outcome, Seconds, decide},
};

/// Commands that may wait; beyond them, the next wait to be let in.
pub(super) const QUEUE: usize = 4096;

/// The wait before etcd is tried again, and what it grows to.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Bytes of a transaction's keys and values. etcd takes requests of 1.5 MiB where nothing else is said.
const BYTES_MAX: usize = 1 << 20;

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
    /// Not now.
    #[error(transparent)]
    Unavailable(Unavailable),
}

type Answer = Result<Outcome, WriteError>;

/// A command with somebody who waits for its outcome.
pub(super) struct Pending {
    command: Command,
    answer: oneshot::Sender<Answer>,
    deadline: Instant,
}

impl Pending {
    pub(super) fn new(command: Command, answer: oneshot::Sender<Answer>, patience: Duration) -> Self {
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
}

/// See the module.
pub(super) struct Committer {
    store: Arc<dyn Store>,
    keys: Keys,
    limits: Limits,
    view: Arc<View>,
    barrier: Barrier,
    metrics: Arc<Metrics>,
    /// Distinguishes this replica's transactions from all others.
    name: String,
    count: u64,
    /// The newest revision that this replica has written.
    committed: Revision,
}

impl Committer {
    pub(super) fn new(
        store: Arc<dyn Store>,
        keys: Keys,
        limits: Limits,
        view: Arc<View>,
        barrier: Barrier,
        metrics: Arc<Metrics>,
    ) -> Self {
        let name = format!("{:016x}", rand::random::<u64>());
        Self { store, keys, limits, view, barrier, metrics, name, count: 0, committed: 0 }
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
            // A decision stands on everything that this replica has written. Where the view does not get
            // there, the transaction will say so.
            self.view.reach(self.committed, super::PATIENCE).await.ok();
            match self.carry_out(&mut waiting).await {
                Ok(answers) => {
                    for (pending, answer) in waiting.drain(..answers.len()).zip(answers) {
                        pending.answer(answer);
                    }
                }
                Err(Failed { size, why }) => {
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
        let deadline = waiting.front().map_or_else(Instant::now, |first| first.deadline);
        let listings = self.view.listings();
        let mut doubtful: Vec<Attempt> = Vec::new();
        let mut pause = PAUSE;
        // Whether the view has been brought up to date since the newest of these commands came in.
        let mut fresh = false;
        let mut catch_up = self.view.revision() == 0;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            let failed = |size, why| Failed { size, why };
            if rest.is_zero() {
                return Err(failed(size, Unavailable("etcd does not answer".into())));
            }
            if catch_up {
                self.barrier.pass(rest).await.map_err(|why| failed(size, why))?;
                (fresh, catch_up) = (true, false);
                // Every attempt had the same commands, so one that happened has done all of them.
                if let Some(done) = doubtful.iter().position(|attempt| self.view.has_seen(&attempt.id)) {
                    return Ok(doubtful.swap_remove(done).answers);
                }
                if !doubtful.is_empty() && self.view.listings() != listings {
                    return Err(failed(size, in_doubt()));
                }
            }
            let id = format!("{}-{}", self.name, self.count);
            self.count += 1;
            let plan = self.plan(waiting.range(..size), &id);
            if !doubtful.is_empty() && plan.answers.len() != size {
                return Err(failed(size, in_doubt()));
            }
            size = plan.answers.len();
            if plan.needs_fresh && !fresh {
                catch_up = true;
                continue;
            }
            let Some(txn) = plan.txn else { return Ok(plan.answers) };
            let bytes = size_of(&txn);
            if bytes > BYTES_MAX {
                if size == 1 {
                    return Ok(vec![Err(WriteError::TooLarge { bytes })]);
                }
                size /= 2;
                continue;
            }
            self.metrics.batch_sizes.observe(size);
            match self.store.txn(txn).await {
                Ok(outcome) if outcome.succeeded => {
                    self.committed = outcome.revision;
                    return Ok(plan.answers);
                }
                Ok(_) => {
                    self.metrics.conflicts.add(1);
                    catch_up = true;
                    continue;
                }
                // Certainly not done.
                Err(StoreError::Unreachable { .. }) => {}
                // A later attempt writes, or stands on, the same records, so that at most one happens.
                Err(StoreError::Unknown(_)) => {
                    doubtful.push(Attempt { id, answers: plan.answers });
                    catch_up = true;
                }
                Err(error) => {
                    let why = error.to_string();
                    tracing::error!(why, "etcd refused a transaction");
                    return Err(failed(size, Unavailable(why)));
                }
            }
            tokio::time::sleep(pause.min(rest)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Decides commands on one draft, as many as fit.
    fn plan<'p>(&self, commands: impl Iterator<Item = &'p Pending>, id: &str) -> Plan {
        let state = self.view.state();
        let now = now();
        let mut draft = Draft::new(&state);
        let mut answers = Vec::new();
        let mut needs_fresh = false;
        for pending in commands {
            let before = draft.savepoint();
            let answer = decide(&mut draft, &pending.command, now).map_err(WriteError::Refused);
            let operations = draft.operations();
            if operations > self.limits.operations {
                draft.roll_back(before);
                if answers.is_empty() {
                    let limit = self.limits.operations;
                    answers.push(Err(WriteError::TooBig { operations, limit }));
                    return Plan { answers, txn: None, needs_fresh: false };
                }
                break;
            }
            needs_fresh |= answer.is_err();
            answers.push(answer);
        }
        let txn = (draft.changes().len() > 0).then(|| self.keys.txn(&draft, id));
        Plan { needs_fresh: needs_fresh || txn.is_none(), answers, txn }
    }
}

/// Bytes of what a transaction writes.
fn size_of(txn: &Txn) -> usize {
    txn.then
        .iter()
        .map(|op| match op {
            Op::Put { key, value, .. } => key.len() + value.len(),
            Op::Delete(key) => key.len(),
        })
        .sum()
}

fn in_doubt() -> Unavailable {
    Unavailable("etcd was lost while writing; it is not known whether the change was made".into())
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

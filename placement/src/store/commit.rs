//! Commands on their way into etcd: decided one after the other on one draft, written together.
//!
//! While one transaction is under way, commands gather for the next, so the busier a replica is, the more
//! share a write. A transaction that fails has met another replica's: the view catches up, and the same
//! commands are decided again. A replica that meets others again and again, because it is farther from etcd
//! than they are, asks for its turn: the others let one write of it pass.
//!
//! ```text
//!   commands ─▶ queue ─▶ batch ─▶ Batch, a machine: what next? ──┐
//!                                    ▲                           ▼
//!                                    └──────────── here: does it, with view, barrier and store
//! ```
//!
//! What is done when is the machine's matter ([`batch`]), the decisions are [`plan`]'s; here it is done.

mod batch;
mod plan;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use ec_placement_model::{Command, ModelError, Outcome};
use ec_runtime::Host;
use ec_store::{Compare, Store, StoreResult, Txn, TxnOutcome};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use self::{
    batch::{Action, Batch, Event, Failed, Known, Resistance, Who},
    plan::{Landing, Plan},
};
use super::{
    Health, Unavailable,
    barrier::Barrier,
    history::History,
    keys::Keys,
    view::{View, Written},
};
use crate::metrics::Metrics;

/// Commands that may wait; beyond them, the next wait to be let in.
pub(super) const QUEUE: usize = 4096;

/// Bytes of a transaction's keys and values. etcd takes requests of 1.5 MiB where nothing else is said.
const BYTES_MAX: usize = 1 << 20;

/// A turn lasts so long, whatever became of who asked for it.
const TURN_LASTS: Duration = Duration::from_secs(1);

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

/// See the module.
pub(super) struct Committer {
    store: Arc<dyn Store>,
    keys: Keys,
    limits: Limits,
    view: Arc<View>,
    history: Arc<History>,
    barrier: Barrier,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    host: Host,
    /// Distinguishes this replica's transactions from all others.
    name: String,
    count: u64,
    /// Where this replica has last said that it is on this store.
    arrived: Option<Arrival>,
    /// Whether the others were asked to wait.
    has_turn: bool,
}

/// What may have become another store since: the listing that the state began with, and the watch after it. Before its
/// watch is there, a listing alone may have brought a replica to another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Arrival {
    listing: u64,
    session: u64,
}

/// A transaction that may be sent, and what is to be taken up once it is written.
struct Outbound {
    landing: Landing,
    id: String,
    /// Where it says that this replica is on this store.
    arrival: Arrival,
}

/// How a batch ended.
enum Ended {
    /// The first so many have these answers.
    Answered(Vec<Answer>),
    Failed(Failed),
}

impl Committer {
    pub(super) fn new(
        store: Arc<dyn Store>,
        keys: Keys,
        limits: Limits,
        view: Arc<View>,
        barrier: Barrier,
        metrics: Arc<Metrics>,
        host: Host,
    ) -> Self {
        let name = format!("{:016x}", host.uuid().as_u64_pair().0);
        let history = Arc::clone(view.history());
        Self {
            store,
            keys,
            limits,
            view,
            history,
            barrier,
            metrics,
            health: Arc::default(),
            host,
            name,
            count: 0,
            arrived: None,
            has_turn: false,
        }
    }

    /// How its writes go.
    pub(super) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
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
            let ended = self.carry_out(&waiting).await;
            self.give_turn_back().await;
            self.answer(&mut waiting, ended);
        }
    }

    /// Carries out as many commands from the front as fit into one transaction.
    async fn carry_out(&mut self, waiting: &VecDeque<Pending>) -> Ended {
        let began = Instant::now();
        let deadline = waiting.front().map_or(began, |first| first.deadline);
        let progress = self.history.progress();
        let known = (progress.through > 0).then_some(progress.listings);
        let mut batch = Batch::new(waiting.len(), deadline, began, known);
        let mut outbound = None;
        let mut action = batch.begin(began);
        loop {
            let event = match action {
                Action::Yield(patience) => {
                    self.let_others_pass(patience).await;
                    Event::Free(self.history.importing())
                }
                Action::CatchUp(patience) => Event::CaughtUp(self.catch_up(&batch, patience).await),
                Action::Plan(size) => {
                    let (plan, out) = self.plan(waiting.range(..size));
                    outbound = Some(out);
                    Event::Planned(plan)
                }
                Action::Send(txn) => {
                    self.metrics.batch_sizes.observe(batch.size());
                    let answer = self.store.txn(txn).await;
                    self.take_up(outbound.take(), &answer);
                    Event::Answered(answer)
                }
                Action::Pause(pause) => {
                    tokio::time::sleep(pause).await;
                    Event::Performed
                }
                Action::Resist(resistance) => {
                    self.resist(resistance).await;
                    Event::Performed
                }
                Action::Answer { answers, written } => {
                    if written {
                        self.health.note(Ok(()));
                    }
                    return Ended::Answered(answers);
                }
                Action::Fail(failed) => return Ended::Failed(failed),
            };
            action = batch.step(event, Instant::now());
        }
    }

    fn answer(&self, waiting: &mut VecDeque<Pending>, ended: Ended) {
        match ended {
            Ended::Answered(answers) => {
                for (pending, answer) in waiting.drain(..answers.len()).zip(answers) {
                    pending.answer(answer);
                }
            }
            Ended::Failed(Failed { who, why, contention }) => {
                self.health.note(Err(why.0.clone()));
                self.metrics.contention.add(u64::from(contention));
                let now = Instant::now();
                let size = match who {
                    Who::First(size) => size,
                    Who::Late(size) => {
                        waiting.iter().take(size).take_while(|one| one.deadline <= now).count().max(1)
                    }
                };
                for pending in waiting.drain(..size) {
                    pending.answer(Err(WriteError::Unavailable(why.clone())));
                }
            }
        }
    }

    /// Brings the view up to date, and looks there for what is in doubt.
    async fn catch_up(&self, batch: &Batch, patience: Duration) -> Result<Known, Unavailable> {
        self.barrier.pass(patience).await?;
        let happened = batch.doubtful().position(|id| self.history.has_seen(id));
        Ok(Known { happened, listings: self.history.progress().listings })
    }

    /// Decides commands, as many as fit.
    fn plan<'p>(&mut self, commands: impl Iterator<Item = &'p Pending>) -> (Plan, Outbound) {
        let id = format!("{}-{}", self.name, self.count);
        self.count += 1;
        // Asked before the state is looked at: at worst it is said once more.
        let session = self.history.sessions();
        let now = self.host.now().as_second();
        let (mut plan, landing) = plan::plan(&self.view, &self.keys, self.limits, commands, id.clone(), now);
        let arrival = Arrival { listing: landing.stand.listing, session };
        plan.txn = plan.txn.map(|mut txn| {
            if Some(arrival) != self.arrived {
                txn = txn.put(self.keys.epoch(), id.clone());
            }
            if self.has_turn {
                txn = txn.delete(self.keys.turn());
            }
            debug_assert!(txn.operations() <= self.limits.operations, "a transaction is too big");
            txn
        });
        (plan, Outbound { landing, id, arrival })
    }

    /// What was written is in the view at once: the next decision stands on it.
    fn take_up(&mut self, outbound: Option<Outbound>, answer: &StoreResult<TxnOutcome>) {
        let (Some(out), Ok(outcome)) = (outbound, answer) else { return };
        if !outcome.succeeded {
            self.metrics.conflicts.add(1);
            return;
        }
        let Landing { stand, changes } = out.landing;
        let epoch = Some(out.arrival) != self.arrived;
        let written = Written { revision: outcome.revision, id: out.id.into(), changes, epoch };
        self.view.take_written(stand, written);
        (self.arrived, self.has_turn) = (Some(out.arrival), false);
    }

    async fn resist(&mut self, resistance: Resistance) {
        if resistance.distrust {
            self.history.doubt("what is in etcd is not what its watch told");
        }
        if resistance.ask_for_turn {
            self.ask_for_turn().await;
        }
    }

    /// Waits while another replica has its turn.
    async fn let_others_pass(&self, patience: Duration) {
        let mut progress = self.history.subscribe();
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
}

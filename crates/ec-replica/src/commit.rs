//! Commands on their way into etcd: decided one after the other on one draft, written together.
//!
//! While one transaction is under way, commands gather for the next, so the busier a replica is, the more
//! share a write. A transaction that fails has met another replica's: the view catches up, and the same
//! commands are decided again. A replica that meets others again and again, because it is farther from etcd
//! than they are, asks for its turn: the others let one write of it pass.
//!
//! Where many wait, or etcd is slow, some transactions are under way at a time, each about other records.
//!
//! ```text
//!   commands ─▶ queue ─▶ Lanes: who sets out? ─▶ Batch, one for each lane: what next? ──┐
//!                          ▲                        ▲                                   ▼
//!                          └── what is under way    └──────── here: does it, with view, barrier and store
//! ```
//!
//! Which commands set out is [`lanes`]' matter, what is done when the machine's ([`batch`]), the decisions are
//! [`plan`]'s; here it is done.

mod batch;
mod lanes;
mod plan;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ec_runtime::Host;
use ec_store::{Compare, Revision, Store, StoreResult, Txn, TxnOutcome};
use futures::{StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use self::{
    batch::{Action, Batch, Event, Failed, Known, Resistance, Who},
    lanes::{Arrival, Growth, Lanes, Number},
    plan::{Landing, Plan},
};
use crate::{
    Health, Metrics, Prefix, Reader, Unavailable,
    barrier::Barrier,
    history::History,
    model::{Commands, Model},
    view::{View, Written},
};

/// Commands that may wait; beyond them, the next wait to be let in.
pub(crate) const QUEUE: usize = 4096;

/// Bytes of a transaction's keys and values. etcd takes requests of 1.5 MiB where nothing else is said.
const BYTES_MAX: usize = 1 << 20;

/// While a transaction is under way it is looked so often whether another could be: being woken by each command would
/// cost more.
const LOOK: Duration = Duration::from_millis(1);

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
pub enum WriteError<R> {
    /// It must not be.
    #[error(transparent)]
    Refused(R),
    /// It does not fit into one transaction.
    #[error(
        "The request changes {operations} records at once, more than the {limit} that one transaction of etcd may \
         change."
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
    #[error("The request changes more at once than this etcd takes ({0}).")]
    NotTaken(String),
    /// Not now.
    #[error(transparent)]
    Unavailable(Unavailable),
}

type Answer<O, R> = Result<O, WriteError<R>>;

/// Of a model's commands.
pub(crate) type AnswerOf<M> = Answer<<M as Commands>::Outcome, <M as Commands>::Refusal>;

/// A command with somebody who waits for its outcome.
pub(crate) struct Pending<M: Commands> {
    /// None: nothing but a write, to see whether one is possible.
    command: Option<M::Command>,
    answer: oneshot::Sender<AnswerOf<M>>,
    deadline: Instant,
}

impl<M: Commands> Pending<M> {
    pub(crate) fn new(
        command: Option<M::Command>,
        answer: oneshot::Sender<AnswerOf<M>>,
        patience: Duration,
    ) -> Self {
        Self { command, answer, deadline: Instant::now() + patience }
    }

    fn answer(self, answer: AnswerOf<M>) {
        // Whoever has gone does not wait for an answer.
        self.answer.send(answer).ok();
    }
}

/// See the module.
pub(crate) struct Committer<M: Commands> {
    store: Arc<dyn Store>,
    limits: Limits,
    view: Arc<View<M>>,
    history: Arc<History>,
    barrier: Barrier,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    host: Host,
    /// Distinguishes this replica's transactions from all others.
    name: String,
    count: AtomicU64,
    /// Where this replica has last said that it is on this store.
    arrived: Mutex<Option<Whereabouts>>,
    lanes: Mutex<Lanes<Pending<M>, M::Key>>,
    /// A transaction is under way.
    sent: Notify,
}

/// A batch of commands, of which there are several at a time.
struct Lane<M: Commands> {
    number: Number,
    commands: VecDeque<(Arrival, Pending<M>)>,
    outbound: Option<Outbound<M>>,
    /// Where the others were asked to wait for it: when.
    turn: Option<Revision>,
}

/// What may have become another store since: the listing that the state began with, and the watch after it. Before its
/// watch is there, a listing alone may have brought a replica to another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Whereabouts {
    listing: u64,
    session: u64,
}

/// A transaction that may be sent, and what is to be taken up once it is written.
struct Outbound<M: Model> {
    landing: Landing<M::Change, M::Key>,
    id: String,
    /// Where it says that this replica is on this store, where that was not said before.
    arrives: Option<Whereabouts>,
}

/// How a batch ended.
enum Ended<M: Commands> {
    /// The first so many have these answers.
    Answered(Vec<AnswerOf<M>>),
    Failed(Failed),
}

impl<M: Commands> Committer<M> {
    pub(crate) fn new(store: Arc<dyn Store>, limits: Limits, reader: &Reader<M>, host: Host) -> Self {
        let name = format!("{:016x}", host.uuid().as_u64_pair().0);
        Self {
            store,
            limits,
            view: Arc::clone(reader.view()),
            history: Arc::clone(reader.view().history()),
            barrier: reader.barrier().clone(),
            metrics: Arc::clone(reader.metrics()),
            health: Arc::default(),
            host,
            name,
            count: AtomicU64::default(),
            arrived: Mutex::default(),
            lanes: Mutex::new(Lanes::new(limits.operations)),
            sent: Notify::new(),
        }
    }

    /// How its writes go.
    pub(crate) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }

    pub(crate) async fn run(self, mut queue: mpsc::Receiver<Pending<M>>, stop: CancellationToken) {
        let mut under_way = FuturesUnordered::new();
        loop {
            if self.lanes().is_idle() {
                match stop.run_until_cancelled(queue.recv()).await {
                    Some(Some(first)) => self.lanes().push(first),
                    _ => return,
                }
            }
            self.take_in(&mut queue);
            while let Some(lane) = self.set_out() {
                under_way.push(self.carry_out(lane));
            }
            let may_grow = self.lanes().may_grow();
            tokio::select! {
                biased;
                _ = under_way.next() => {}
                () = self.sent.notified() => {}
                () = tokio::time::sleep(LOOK), if may_grow => {}
            }
        }
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes<Pending<M>, M::Key>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As many commands as may come in, of those that are there.
    fn take_in(&self, queue: &mut mpsc::Receiver<Pending<M>>) {
        let mut lanes = self.lanes();
        for _ in 0..lanes.room() {
            let Ok(more) = queue.try_recv() else { return };
            lanes.push(more);
        }
    }

    /// The next commands that may set out, beside what is under way.
    fn set_out(&self) -> Option<Lane<M>> {
        let mut lanes = self.lanes();
        let growth = lanes.growth(Instant::now())?;
        let choice = match growth {
            Growth::Alone => lanes.all(),
            // Where it has to be said that this replica is on this store, all others would meet that.
            _ if *self.arrived() != Some(self.here()) => return None,
            Growth::Full | Growth::Any => {
                let is_under_way = |key: &M::Key| lanes.is_under_way(key);
                plan::choose(&self.view, self.limits, lanes.waiting(), is_under_way, self.host.now())
            }
        };
        let (number, commands) = lanes.set_out(growth, &choice)?;
        Some(Lane { number, commands: commands.into(), outbound: None, turn: None })
    }

    /// Carries out as many commands from the front of a lane as fit into one transaction.
    async fn carry_out(&self, mut lane: Lane<M>) {
        let ended = self.work(&mut lane).await;
        self.answer(&mut lane.commands, ended);
        self.lanes().ended(lane.number, lane.commands);
        // Last: nobody who was answered, and no other lane, waits for that.
        if let Some(turn) = lane.turn {
            self.give_turn_back(turn).await;
        }
    }

    async fn work(&self, lane: &mut Lane<M>) -> Ended<M> {
        let began = Instant::now();
        let deadline = lane.commands.front().map_or(began, |(_, first)| first.deadline);
        let progress = self.history.progress();
        let known = (progress.through > 0).then_some(progress.listings);
        let mut batch = Batch::new(lane.commands.len(), deadline, began, known);
        let mut action = batch.begin(began);
        loop {
            let event = match action {
                Action::Yield(patience) => {
                    self.let_others_pass(patience).await;
                    Event::Free(self.history.importing())
                }
                Action::CatchUp(patience) => Event::CaughtUp(self.catch_up(&batch, patience).await),
                Action::Plan(size) => Event::Planned(self.plan(lane, size)),
                Action::Send(txn) => {
                    self.metrics.batch_sizes.observe(u64::try_from(batch.size()).unwrap_or(u64::MAX));
                    let rest = lane.commands.split_off(batch.size());
                    self.lanes().sent(lane.number, rest, Instant::now());
                    self.sent.notify_one();
                    let answer = self.store.txn(txn).await;
                    self.lanes().answered(lane.number);
                    self.take_up(lane, &answer);
                    Event::Answered(answer)
                }
                Action::Pause(pause) => {
                    tokio::time::sleep(pause).await;
                    Event::Performed
                }
                Action::Resist(resistance) => {
                    self.resist(lane, resistance).await;
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

    fn answer(&self, commands: &mut VecDeque<(Arrival, Pending<M>)>, ended: Ended<M>) {
        match ended {
            Ended::Answered(answers) => {
                for ((_, pending), answer) in commands.drain(..answers.len()).zip(answers) {
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
                        let late = commands.iter().take(size).take_while(|(_, one)| one.deadline <= now);
                        late.count().max(1)
                    }
                };
                for (_, pending) in commands.drain(..size) {
                    pending.answer(Err(WriteError::Unavailable(why.clone())));
                }
            }
        }
    }

    /// Brings the view up to date, and looks there for what is in doubt.
    async fn catch_up(
        &self,
        batch: &Batch<M::Outcome, M::Refusal>,
        patience: Duration,
    ) -> Result<Known, Unavailable> {
        self.barrier.pass(patience).await?;
        let happened = batch.doubtful().position(|id| self.history.has_seen(id));
        Ok(Known { happened, listings: self.history.progress().listings })
    }

    /// Decides so many commands of a lane, or as many of them as fit.
    fn plan(&self, lane: &mut Lane<M>, size: usize) -> Plan<M::Outcome, M::Refusal> {
        let id = format!("{}-{}", self.name, self.count.fetch_add(1, Ordering::Relaxed));
        // Asked before the state is looked at: at worst it is said once more.
        let session = self.history.sessions();
        let commands = lane.commands.range(..size).map(|(_, pending)| pending);
        let (mut plan, mut landing) =
            plan::plan(&self.view, self.limits, commands, id.clone(), self.host.now());
        let arrival = Whereabouts { listing: landing.stand.listing, session };
        let arrives = Some(arrival).filter(|arrival| Some(*arrival) != *self.arrived());
        plan.txn = plan.txn.map(|mut txn| {
            if arrives.is_some() {
                txn = txn.put(self.prefix().epoch(), id.clone());
            }
            if lane.turn.is_some_and(|own| !self.is_others_turn(own)) {
                txn = txn.delete(self.prefix().turn());
            }
            debug_assert!(txn.operations() <= self.limits.operations, "a transaction is too big");
            txn
        });
        self.lanes().decided(lane.number, std::mem::take(&mut landing.records));
        lane.outbound = Some(Outbound { landing, id, arrives });
        plan
    }

    fn prefix(&self) -> &Prefix {
        self.view.model().prefix()
    }

    /// Where this replica is now.
    fn here(&self) -> Whereabouts {
        let session = self.history.sessions();
        Whereabouts { listing: self.view.stand(|_, stance| stance.stand.listing), session }
    }

    fn arrived(&self) -> MutexGuard<'_, Option<Whereabouts>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was written is in the view at once: the next decision stands on it.
    fn take_up(&self, lane: &mut Lane<M>, answer: &StoreResult<TxnOutcome>) {
        let (Some(out), Ok(outcome)) = (lane.outbound.take(), answer) else { return };
        if !outcome.succeeded {
            self.metrics.conflicts.add(1);
            return;
        }
        let Landing { stand, changes, .. } = out.landing;
        let epoch = out.arrives.is_some();
        let written = Written { revision: outcome.revision, id: out.id.into(), changes, epoch };
        self.view.take_written(&stand, written);
        // Of two that were under way at once the later place holds.
        let mut arrived = self.arrived();
        *arrived = out.arrives.max(*arrived);
        drop(arrived);
        lane.turn = None;
    }

    async fn resist(&self, lane: &mut Lane<M>, resistance: Resistance) {
        if resistance.distrust {
            self.history.doubt("what is in etcd is not what its watch told");
        }
        if resistance.ask_for_turn && lane.turn.is_none() {
            lane.turn = self.ask_for_turn().await;
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

    /// Asks the others to wait, unless one of them has asked for that. Answers when they were asked, where they do.
    async fn ask_for_turn(&self) -> Option<Revision> {
        let key = self.prefix().turn();
        let free = match self.view.turn() {
            None => Compare::Absent(key.clone()),
            // Left behind by one that is gone.
            Some(turn) if turn.since.elapsed() >= TURN_LASTS || *turn.holder == *self.name => {
                Compare::Unchanged(key.clone(), turn.revision)
            }
            Some(_) => return None,
        };
        let asked = self.store.txn(Txn::new().when(free).put(key, self.name.clone())).await;
        let taken = asked.ok().filter(|outcome| outcome.succeeded).map(|outcome| outcome.revision);
        self.metrics.turns.add(u64::from(taken.is_some()));
        taken
    }

    /// Whether somebody else has taken the turn since it was ours: it had lasted long enough.
    fn is_others_turn(&self, own: Revision) -> bool {
        self.view.turn().is_some_and(|turn| turn.revision > own)
    }

    /// Lets the others go on where the turn was not used, if it is still ours.
    async fn give_turn_back(&self, own: Revision) {
        let key = self.prefix().turn();
        // Where that fails, the turn ends by itself.
        self.store.txn(Txn::new().when(Compare::Unchanged(key.clone(), own)).delete(key)).await.ok();
    }
}

#[cfg(test)]
mod tests;

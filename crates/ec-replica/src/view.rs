//! The state in memory, as of a revision of etcd.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak},
};

use ec_store::{Change, Event, KeyValue, Listing, Revision, Store, WatchBatch};
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    Metrics,
    history::{Clock, History},
    model::{Model, Reading},
    prefix::{Common, Epoch, Stand},
};

/// A replica that asks the others to let it write.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    /// Its name.
    pub(crate) holder: Arc<str>,
    /// The revision of its wish.
    pub(crate) revision: Revision,
    /// When it was seen here.
    pub(crate) since: Instant,
}

/// All that must be seen together.
struct Held<M: Model> {
    state: M::State,
    stand: Stand,
    turn: Option<Turn>,
    /// Everything up to here is in the state.
    through: Revision,
    /// What this replica has written beyond that, and when: it is in the state, too.
    written: HashMap<M::Key, Revision>,
    /// By which transactions, in their order. The watch is to tell of each.
    untold: VecDeque<(Revision, Arc<str>)>,
}

impl<M: Model> Held<M> {
    /// No records yet.
    fn new(stand: Stand, through: Revision) -> Self {
        Self {
            state: M::State::default(),
            stand,
            turn: None,
            through,
            written: HashMap::new(),
            untold: VecDeque::new(),
        }
    }

    /// Takes up what the watch told, at which revision, through this one. Answers whether it told of all that this
    /// replica has written so far.
    fn take_told(&mut self, told: Vec<(Revision, M::Change)>, clocks: &[Clock], through: Revision) -> bool {
        if self.written.is_empty() {
            M::apply(&mut self.state, told.into_iter().map(|(_, change)| change));
        } else {
            // What is older than our own write of the same record is our own, too, and was taken up: with another's,
            // that write would not have succeeded.
            let newer = told.into_iter().filter(|(revision, change)| {
                self.written.get(&M::key(change)).is_none_or(|written| written <= revision)
            });
            M::apply(&mut self.state, newer.map(|(_, change)| change));
        }
        self.through = self.through.max(through);
        self.written.retain(|_, written| *written > through);
        let mut all = true;
        while let Some((revision, id)) = self.untold.pop_front_if(|(revision, _)| *revision <= through) {
            all &= clocks.iter().any(|clock| clock.revision == revision && clock.id == id);
        }
        all
    }
}

/// See the module.
pub(crate) struct View<M: Model> {
    model: M,
    held: RwLock<Held<M>>,
    /// The last copy of the state, as long as somebody looks at it.
    copy: Mutex<(Revision, u64, Weak<M::State>)>,
    history: Arc<History>,
    metrics: Arc<Metrics>,
}

impl<M: Model> View<M> {
    pub(crate) fn new(model: M, history: Arc<History>, metrics: Arc<Metrics>) -> Self {
        let held = RwLock::new(Held::new(Stand::default(), 0));
        Self { model, held, copy: Mutex::default(), history, metrics }
    }

    /// What it is a view of.
    pub(crate) fn model(&self) -> &M {
        &self.model
    }

    fn held(&self) -> RwLockReadGuard<'_, Held<M>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state as it is now. Briefly: what comes by the watch waits meanwhile, and then everybody.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&M::State) -> T) -> T {
        look(&self.held().state)
    }

    /// Looks at the state together with where in the store's history it stands.
    pub(crate) fn stand<T>(&self, look: impl FnOnce(&M::State, Stance) -> T) -> T {
        let held = self.held();
        look(&held.state, Stance { stand: held.stand.clone(), whole: held.untold.is_empty() })
    }

    /// A copy of the state, to look at for long. Who asks while it is the same shares one.
    pub(crate) fn copy(&self) -> Arc<M::State> {
        let mut copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        let held = self.held();
        let progress = self.history.progress();
        let now = (progress.through, progress.listings);
        if (copy.0, copy.1) == now
            && let Some(state) = copy.2.upgrade()
        {
            return state;
        }
        let state = Arc::new(held.state.clone());
        *copy = (now.0, now.1, Arc::downgrade(&state));
        state
    }

    /// Who asks for the others to wait.
    pub(crate) fn turn(&self) -> Option<Turn> {
        self.held().turn.clone()
    }

    /// Where in etcd's history it is.
    pub(crate) fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// Takes up what this replica has written itself, before the watch tells of it: the next decision stands on it.
    ///
    /// What others wrote before it may be missing still; of that, nothing that was written stands on. Reads wait
    /// for the watch all the same. Of two transactions under way the later may be answered first: it stands on no
    /// record that the other writes, or one of the two would have failed.
    pub(crate) fn take_written(&self, stand: &Stand, written: Written<M::Change>) {
        let Written { revision, id, changes, epoch } = written;
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        // It is in the state already; or that is of another history.
        if held.stand.listing != stand.listing || held.through >= revision {
            return;
        }
        held.written.extend(changes.iter().map(|change| (M::key(change), revision)));
        M::apply(&mut held.state, changes.into_iter().map(|change| M::written_at(change, revision)));
        let at = held.untold.partition_point(|(earlier, _)| *earlier < revision);
        held.untold.insert(at, (revision, Arc::clone(&id)));
        held.stand.clock = held.stand.clock.max(revision);
        if epoch {
            held.stand.epoch = Some(Epoch::Of(id.as_bytes().into()));
        }
        self.history.wrote(revision, id);
    }

    async fn apply(&self, store: &dyn Store, change: Change) {
        match change {
            Change::Reset(listing) => self.reset(store, listing).await,
            Change::Events(batch) => self.events(&batch),
            Change::Lost(error) => {
                tracing::warn!(%error, "lost the watch on the state; trying on");
            }
        }
    }

    async fn reset(&self, store: &dyn Store, listing: Listing) {
        let stand = Stand { listing: self.history.progress().listings + 1, ..Stand::default() };
        let mut held = Held::<M>::new(stand, listing.revision);
        let mut beside = Beside::default();
        let mut clock = Clock::default();
        let mut foreign: Vec<String> = Vec::new();
        for pair in listing.pairs {
            if let Some(common) = self.model.prefix().common(&pair.key) {
                beside.put(common, &pair);
                if common == Common::Clock {
                    clock = Clock::of(Some(&pair));
                }
                continue;
            }
            match self.model.read(&pair) {
                Reading::Sound(changes) => M::apply(&mut held.state, changes),
                Reading::Unreadable { why, known, change } => {
                    tell_unreadable(&why);
                    let known = match known {
                        Some(known) => Some(known),
                        None => self.model.recall(store, &pair).await,
                    };
                    M::apply(&mut held.state, known.into_iter().chain([change]));
                }
                Reading::Foreign => foreign.push(pair.key),
            }
        }
        if let Some(first) = foreign.first() {
            tracing::warn!(
                count = foreign.len(),
                key = first,
                "keys under our prefix that are not ours; passed over"
            );
        }
        let importing = beside.importing.unwrap_or(false);
        beside.take_up(&mut held);
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = held;
        self.history.listed(listing.revision, clock, importing);
    }

    fn events(&self, batch: &WatchBatch) {
        let mut clock = self.history.progress().clock;
        // What this replica wrote itself is in the state: it need not be read again.
        let own: HashSet<Revision> = self.held().untold.iter().map(|(revision, _)| *revision).collect();
        let mut changes: Vec<(Revision, M::Change)> = Vec::with_capacity(batch.events.len());
        let mut clocks: Vec<Clock> = Vec::new();
        let mut beside = Beside::default();
        for event in &batch.events {
            match (event, self.model.prefix().common(event.key())) {
                (Event::Put(pair), Some(common)) => {
                    beside.put(common, pair);
                    if common == Common::Clock {
                        self.history.tick(&mut clock, pair);
                        clocks.push(clock.clone());
                    }
                }
                (Event::Delete { .. }, Some(common)) => {
                    beside.delete(common);
                    if common == Common::Clock {
                        clock = Clock::default();
                    }
                }
                _ if own.contains(&event.revision()) => {}
                (Event::Put(pair), None) => match self.read(pair) {
                    Some(more) => changes.extend(more.into_iter().map(|change| (pair.mod_revision, change))),
                    None => {
                        tracing::warn!(
                            key = pair.key,
                            "a key under our prefix that is not ours; passed over"
                        );
                    }
                },
                (Event::Delete { key, revision }, None) => {
                    changes.extend(self.model.deleted(key).map(|change| (*revision, change)));
                }
            }
        }
        self.metrics.events.add(u64::try_from(changes.len()).unwrap_or(u64::MAX));
        let (through, importing) = (batch.resume_from - 1, beside.importing);
        let told_all = {
            let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
            let told_all = held.take_told(changes, &clocks, through);
            beside.take_up(&mut held);
            told_all
        };
        if !told_all {
            self.history
                .doubt("what this replica has written is not in etcd's history: it was restored or replaced");
        }
        self.history.told(through, clock, importing);
    }

    /// What a pair says; none where it is nothing of the model's.
    fn read(&self, pair: &KeyValue) -> Option<Vec<M::Change>> {
        let reading = self.model.read(pair);
        if let Reading::Unreadable { why, .. } = &reading {
            tell_unreadable(why);
        }
        reading.into_changes()
    }
}

/// How a state stands in the store's history.
#[derive(Debug, Clone)]
pub(crate) struct Stance {
    /// What a transaction on it has to believe.
    pub(crate) stand: Stand,
    /// Whether it is all that was there at some moment: what this replica wrote, and what others wrote before that.
    pub(crate) whole: bool,
}

/// What this replica has written itself.
pub(crate) struct Written<C> {
    /// When.
    pub(crate) revision: Revision,
    /// The transaction's id.
    pub(crate) id: Arc<str>,
    /// What.
    pub(crate) changes: Vec<C>,
    /// Whether the epoch, too.
    pub(crate) epoch: bool,
}

/// What events tell beside the state.
#[derive(Default)]
struct Beside {
    clock: Option<Revision>,
    epoch: Option<Option<Epoch>>,
    turn: Option<Option<Turn>>,
    importing: Option<bool>,
}

impl Beside {
    fn put(&mut self, common: Common, pair: &KeyValue) {
        match common {
            Common::Clock => self.clock = Some(pair.mod_revision),
            Common::Epoch => self.epoch = Some(Some(Epoch::of(pair))),
            Common::Turn => {
                let holder = String::from_utf8_lossy(&pair.value).into();
                self.turn = Some(Some(Turn { holder, revision: pair.mod_revision, since: Instant::now() }));
            }
            Common::Import => self.importing = Some(true),
        }
    }

    fn delete(&mut self, common: Common) {
        match common {
            Common::Clock => self.clock = Some(0),
            Common::Epoch => self.epoch = Some(None),
            Common::Turn => self.turn = Some(None),
            Common::Import => self.importing = Some(false),
        }
    }

    fn take_up<M: Model>(self, held: &mut Held<M>) {
        held.stand.clock = match self.clock {
            // Of what we have written ourselves, the watch tells later.
            Some(told) if told > 0 => told.max(held.stand.clock),
            Some(gone) => gone,
            None => held.stand.clock,
        };
        held.stand.epoch = self.epoch.unwrap_or(held.stand.epoch.take());
        held.turn = self.turn.unwrap_or(held.turn.take());
    }
}

fn tell_unreadable(why: &str) {
    tracing::error!(error = why, "what depends on this record is refused until it can be read, or is gone");
}

/// Keeps the view up to date until `stop`.
pub(crate) async fn follow<M: Model>(
    view: Arc<View<M>>,
    store: Arc<dyn Store>,
    mut changes: mpsc::Receiver<Change>,
    stop: CancellationToken,
) {
    while let Some(Some(change)) = stop.run_until_cancelled(changes.recv()).await {
        stop.run_until_cancelled(view.apply(&*store, change)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ec_store::{MemoryStore, Relist};

    use super::*;
    use crate::{
        history::tests::clock,
        quota::{Change as Record, Key, Quota},
    };

    /// Of nothing yet.
    fn view() -> Arc<View<Quota>> {
        let history = History::new(Relist::default(), Quota::IMPORTING, Arc::default());
        Arc::new(View::new(Quota::new(), Arc::new(history), Arc::default()))
    }

    /// A listing of a replica that was just started, read before a write that is asked for, and told after it.
    #[tokio::test(start_paused = true)]
    async fn a_listing_that_is_older_than_the_question_does_not_answer_it() {
        let store = MemoryStore::new();
        let wanted = Clock::of(Some(&clock(5)));
        let listing = |version: i64| {
            let pair = clock(version);
            Change::Reset(Listing { revision: pair.mod_revision, pairs: vec![pair] })
        };
        for catches_up in [true, false] {
            let view = view();
            let waiting = tokio::spawn({
                let (view, wanted) = (Arc::clone(&view), wanted.clone());
                async move { view.history.reach(&wanted, 10, Duration::from_secs(10)).await }
            });
            tokio::time::sleep(Duration::from_millis(10)).await;
            view.apply(&store, listing(4)).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert!(!waiting.is_finished(), "the write is not in it");
            if catches_up {
                let batch = WatchBatch { events: vec![Event::Put(clock(5))], resume_from: 11 };
                view.apply(&store, Change::Events(batch)).await;
            }
            assert_eq!(waiting.await.unwrap().is_ok(), catches_up);
        }
    }

    /// A replica that is started while etcd is put back: its listing was read before, its question answered after.
    #[tokio::test(start_paused = true)]
    async fn a_listing_of_another_history_does_not_answer_a_question() {
        let store = MemoryStore::new();
        for (at, same) in [(40, false), (23, true)] {
            let view = view();
            let pair = clock(12);
            let listing = Listing { revision: pair.mod_revision, pairs: vec![pair] };
            view.apply(&store, Change::Reset(listing)).await;
            // The clock of revision 10, when all of etcd was at this one; 24 was seen here.
            let answer = view.history.reach(&Clock::of(Some(&clock(5))), at, Duration::from_secs(1)).await;
            assert_eq!(answer.is_ok(), same, "{answer:?}");
        }
    }

    /// Two transactions were under way, and the later was answered first; then the watch tells of one and the other.
    #[tokio::test(start_paused = true)]
    async fn what_was_written_later_may_be_known_first() {
        let store = MemoryStore::new();
        let view = view();
        let history = Arc::clone(view.history());
        let listing = Listing { revision: 8, pairs: vec![clock(4)] };
        view.apply(&store, Change::Reset(listing)).await;
        let stand = view.stand(|_, stance| stance.stand);
        let key = |version: i64| Key::Limit(format!("p{version}").into());
        for version in [6, 5] {
            view.take_written(
                &stand,
                Written {
                    revision: version * 2,
                    id: format!("t-{version}").into(),
                    changes: vec![Record { key: key(version), stored: Some((version, 0)) }],
                    epoch: false,
                },
            );
        }
        for version in [5, 6] {
            let known = view.stand(|state, stance| {
                assert_eq!((state.get(&key(5)), state.get(&key(6))), (Some(5), Some(6)));
                (stance.stand.clock, stance.whole)
            });
            assert_eq!(known, (12, false));
            let batch = WatchBatch { events: vec![Event::Put(clock(version))], resume_from: version * 2 + 1 };
            view.apply(&store, Change::Events(batch)).await;
        }
        assert!(view.stand(|_, stance| stance.whole));
        let progress = history.progress();
        assert_eq!((progress.through, progress.written.map(|(newest, _)| newest)), (12, Some(12)));
        history.reach(&Clock::of(Some(&clock(6))), 12, Duration::from_secs(1)).await.unwrap();
    }
}

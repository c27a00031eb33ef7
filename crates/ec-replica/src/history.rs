//! How far the state in memory is in etcd's history, and whether that is still the history that was read.
//!
//! It knows nothing of what the state holds: whoever keeps one from a watch tells it what the watch told of the
//! clock, and asks it what may be believed. The barrier stands on this alone.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ec_store::{KeyValue, Relist, Revision};
use tokio::{sync::watch, time::Instant};

use crate::{Metrics, Unavailable};

/// So long transactions are remembered by their ids: longer than anybody looks for one.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A watch that is so late is given up.
const SILENT: Duration = Duration::from_secs(5);

/// After a listing its watch is there so soon, if it is of the same history.
const AFTER_LISTING: Duration = Duration::from_secs(2);

/// What the clock showed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// When it was last written. 0: never.
    pub(crate) revision: Revision,
    /// How often it was.
    version: i64,
    /// By which transaction.
    pub(crate) id: Arc<str>,
}

impl Clock {
    /// Of the clock's key.
    pub(crate) fn of(pair: Option<&KeyValue>) -> Self {
        pair.map_or_else(Self::default, |pair| Self {
            revision: pair.mod_revision,
            version: pair.version,
            id: String::from_utf8_lossy(&pair.value).into(),
        })
    }
}

/// How far the state is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    /// Everything up to here is in the state. 0: nothing was read yet.
    pub(crate) through: Revision,
    /// What the clock showed there.
    pub(crate) clock: Clock,
    /// How often the state was listed anew, so that events may have passed unseen.
    pub(crate) listings: u64,
    /// Whether an import is under way, or broke off.
    pub(crate) importing: bool,
    /// The newest transaction of this replica that is in the state.
    pub(crate) written: Option<(Revision, Arc<str>)>,
}

/// A transaction that was seen to have happened.
struct Seen {
    revision: Revision,
    id: Arc<str>,
    at: Instant,
}

/// See the module.
pub(crate) struct History {
    progress: watch::Sender<Progress>,
    /// The newest transactions, in their order.
    transactions: Mutex<VecDeque<Seen>>,
    /// Why what is in memory is not what is in etcd; until it was read anew.
    doubt: Mutex<Option<String>>,
    relist: Relist,
    /// What is told while an import is under way.
    importing: &'static str,
    metrics: Arc<Metrics>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl History {
    pub(crate) fn new(relist: Relist, importing: &'static str, metrics: Arc<Metrics>) -> Self {
        Self {
            progress: watch::Sender::new(Progress::default()),
            transactions: Mutex::default(),
            doubt: Mutex::default(),
            relist,
            importing,
            metrics,
        }
    }

    /// How far it is.
    pub(crate) fn revision(&self) -> Revision {
        self.progress.borrow().through
    }

    pub(crate) fn progress(&self) -> Progress {
        self.progress.borrow().clone()
    }

    /// Whoever wants to hear of progress.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// How many watches were opened so far.
    pub(crate) fn sessions(&self) -> u64 {
        self.relist.sessions()
    }

    /// Whether a transaction was seen to have happened.
    pub(crate) fn has_seen(&self, transaction: &str) -> bool {
        lock(&self.transactions).iter().rev().any(|own| *own.id == *transaction)
    }

    /// What is in memory is not what is in etcd: nothing is told of it any more, and all is read anew.
    pub(crate) fn doubt(&self, why: &str) -> Unavailable {
        let why = format!("{why}; reading it anew");
        let known = lock(&self.doubt).replace(why.clone()).is_some();
        if !known {
            self.metrics.relists.add(1);
            tracing::warn!("{why}");
            // Once: a second wish, while the listing that the first one began is being read, would have all read twice.
            self.relist.now();
        }
        Unavailable(why)
    }

    fn trouble(&self) -> Option<Unavailable> {
        lock(&self.doubt).clone().map(Unavailable).or_else(|| self.importing())
    }

    /// Why nothing is served and nothing written, where what is there is a part of a cloud.
    pub(crate) fn importing(&self) -> Option<Unavailable> {
        self.progress.borrow().importing.then(|| Unavailable(self.importing.into()))
    }

    /// Waits until everything up to what the clock showed, when etcd was at this revision, is in the state.
    pub(crate) async fn reach(
        &self,
        clock: &Clock,
        at: Revision,
        patience: Duration,
    ) -> Result<(), Unavailable> {
        let mut progress = self.progress.subscribe();
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        let (wanted, listings) = (clock.revision, progress.borrow().listings);
        let there =
            |now: &Progress| now.through > 0 && (now.clock.revision >= wanted || now.listings != listings);
        let reached = matches!(tokio::time::timeout(patience, progress.wait_for(there)).await, Ok(Ok(_)));
        // A listing that ended since may have been read before the question was answered: what it lacks, its
        // watch tells. Where that tells nothing of it, the answer was of another history.
        if reached && progress.borrow().clock.revision < wanted {
            let caught_up = progress.wait_for(|now| now.clock.revision >= wanted);
            if !matches!(tokio::time::timeout(patience.min(AFTER_LISTING), caught_up).await, Ok(Ok(_))) {
                return Err(Unavailable("the state was read anew at this moment".into()));
            }
        }
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        if !reached {
            // Where more was begun to be read than is in the state, there is no watch yet that could be silent.
            if patience >= SILENT && self.relist.listings() <= self.progress.borrow().listings {
                // A watch that tells nothing of what certainly is there may never do so again.
                return Err(
                    self.doubt(&format!("the watch on etcd did not come to revision {wanted} in time"))
                );
            }
            return Err(Unavailable(format!("the state is not up to revision {wanted} of etcd yet")));
        }
        // A revision alone says nothing: it may be that of another history.
        let same = {
            let seen = lock(&self.transactions);
            let newest = seen.iter().rev().find(|own| own.revision <= at);
            newest.is_none_or(|own| own.revision < wanted || own.revision == wanted && own.id == clock.id)
        };
        if same {
            return Ok(());
        }
        Err(self.doubt(&format!("etcd has another history than was seen here, at revision {wanted}")))
    }

    /// The state was listed anew.
    pub(crate) fn listed(&self, through: Revision, clock: Clock, importing: bool) {
        lock(&self.transactions).clear();
        if clock.revision > 0 {
            self.remember(&clock);
        }
        if lock(&self.doubt).take().is_some() {
            tracing::info!(revision = through, "the state was read anew");
        }
        // A store that was replaced by an older one has smaller revisions again.
        self.progress.send_modify(|now| {
            *now = Progress { through, clock, importing, written: None, listings: now.listings + 1 };
        });
    }

    /// The state has what the watch told through this revision; `importing`: where it told of that.
    pub(crate) fn told(&self, through: Revision, clock: Clock, importing: Option<bool>) {
        self.progress.send_modify(|now| {
            now.through = now.through.max(through);
            now.clock = clock;
            now.importing = importing.unwrap_or(now.importing);
        });
    }

    /// The state has what this replica wrote itself.
    pub(crate) fn wrote(&self, revision: Revision, id: Arc<str>) {
        self.progress.send_modify(|now| {
            if now.written.as_ref().is_none_or(|(newest, _)| *newest < revision) {
                now.written = Some((revision, id));
            }
        });
    }

    /// Takes a writing of the clock up. Its version counts them, so that none is missed unnoticed.
    pub(crate) fn tick(&self, known: &mut Clock, pair: &KeyValue) {
        let clock = Clock::of(Some(pair));
        // Where it was made anew, all else was, too.
        if known.version + 1 != clock.version {
            self.doubt("a change of etcd was not told by its watch");
        }
        self.remember(&clock);
        *known = clock;
    }

    fn remember(&self, clock: &Clock) {
        let mut seen = lock(&self.transactions);
        let now = Instant::now();
        while seen.front().is_some_and(|oldest| now.duration_since(oldest.at) > REMEMBERED) {
            seen.pop_front();
        }
        seen.push_back(Seen { revision: clock.revision, id: Arc::clone(&clock.id), at: now });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ec_store::{FollowOptions, Layer, Listing, MemoryStore, Store, StoreResult, follow_on_demand};

    use super::*;

    /// A store that takes so long for a listing, and how often it was asked for one.
    pub(crate) struct SlowToList(pub(crate) MemoryStore, pub(crate) Duration, pub(crate) AtomicUsize);

    impl SlowToList {
        pub(crate) fn new(takes: Duration) -> Arc<Self> {
            Arc::new(Self(MemoryStore::new(), takes, AtomicUsize::default()))
        }

        pub(crate) fn listings(&self) -> usize {
            self.2.load(Ordering::Relaxed)
        }
    }

    #[async_trait::async_trait]
    impl Layer for SlowToList {
        fn inner(&self) -> &dyn Store {
            &self.0
        }

        async fn list(&self, prefix: &str) -> StoreResult<Listing> {
            self.2.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(self.1).await;
            Store::list(&self.0, prefix).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_doubt_has_all_read_once_however_often_it_is_told() {
        let store = SlowToList::new(Duration::from_secs(1));
        let (mut changes, relist) =
            follow_on_demand(store.clone() as Arc<dyn Store>, "/q/".into(), None, FollowOptions::default());
        let history = History::new(relist, "", Arc::default());
        changes.recv().await.unwrap();
        for wait in [100, 500, 2000] {
            history.doubt("it is another");
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
        assert_eq!(store.listings(), 2);
    }

    /// The clock after so many transactions, each of which took two revisions.
    pub(crate) fn clock(version: i64) -> KeyValue {
        KeyValue {
            key: "/q/clock".into(),
            value: format!("t-{version}").into_bytes(),
            create_revision: 1,
            mod_revision: version * 2,
            version,
            lease: None,
        }
    }

    /// A thousand transactions a second, for a minute and a half.
    #[tokio::test(start_paused = true)]
    async fn a_transaction_is_known_for_longer_than_anybody_looks_for_it() {
        let history = History::new(Relist::default(), "", Arc::default());
        let mut known = Clock::default();
        for version in 1..=90_000 {
            history.tick(&mut known, &clock(version));
            tokio::time::advance(Duration::from_millis(1)).await;
            if version == 20_000 {
                // As late as a request waits, and longer.
                assert!(history.has_seen("t-5000"));
            }
        }
        assert!(history.has_seen("t-90000") && history.has_seen("t-31000") && !history.has_seen("t-29000"));
        assert!(history.trouble().is_none());
        history.tick(&mut known, &clock(90_002));
        assert!(history.trouble().is_some_and(|why| why.0.contains("not told by its watch")));
    }
}

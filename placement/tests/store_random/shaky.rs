//! A store whose answers, and whose transactions, come late or not at all, and which looks at what is
//! stored after each of them.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ec_store::{
    KeyValue, Layer, Listing, MemoryStore, Op, Revision, Store, StoreError, StoreResult, Txn, TxnOutcome,
    Watch, WatchBatch,
};
use placement::store::{Keys, Model};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::sleep;

use crate::audit::Audit;

/// Longer than any transaction is late.
pub(crate) const LATEST: Duration = Duration::from_millis(3000);

/// A replica's way to the store. Clones are the same way.
#[derive(Clone)]
pub(crate) struct Shaky {
    inner: MemoryStore,
    shared: Arc<Shared>,
}

struct Shared {
    keys: Keys,
    dice: Mutex<StdRng>,
    stormy: AtomicBool,
    slow: AtomicBool,
    /// Counted up when the store is replaced: what was on its way then is gone.
    era: AtomicU64,
    audit: Mutex<Audit>,
    applied: Mutex<HashSet<Vec<u8>>>,
}

/// What becomes of the transactions that are under way when the store is replaced.
#[derive(Debug, Clone, Copy)]
pub(crate) enum OnTheirWay {
    /// They arrive, at another content than they were sent to.
    Arrive,
    AreLost,
}

/// What becomes of a transaction.
enum Fate {
    Arrives,
    IsLost,
    LosesItsAnswer,
    IsLate(Duration),
}

impl Shaky {
    pub(crate) fn new(inner: MemoryStore, keys: Keys, seed: u64) -> Self {
        let shared = Shared {
            keys,
            dice: Mutex::new(StdRng::seed_from_u64(seed)),
            stormy: AtomicBool::new(false),
            slow: AtomicBool::new(false),
            era: AtomicU64::new(0),
            audit: Mutex::default(),
            applied: Mutex::default(),
        };
        Self { inner, shared: Arc::new(shared) }
    }

    /// Whether transactions get lost and late from now on.
    pub(crate) fn set_stormy(&self, stormy: bool) {
        self.shared.stormy.store(stormy, Ordering::Relaxed);
    }

    /// Whether every way takes its time from now on.
    pub(crate) fn set_slow(&self, slow: bool) {
        self.shared.slow.store(slow, Ordering::Relaxed);
    }

    /// The content is another from now on.
    pub(crate) fn replaced(&self, on_their_way: OnTheirWay) {
        if let OnTheirWay::AreLost = on_their_way {
            self.shared.era.fetch_add(1, Ordering::Relaxed);
        }
        *self.shared.audit.lock().unwrap() = Audit::of(&self.inner, &self.shared.keys);
        self.shared.applied.lock().unwrap().clear();
    }

    /// What was wrong with any content that there ever was.
    pub(crate) fn findings(&self) -> Vec<String> {
        self.shared.audit.lock().unwrap().findings().to_vec()
    }

    fn roll<T>(&self, roll: impl FnOnce(&mut StdRng) -> T) -> T {
        roll(&mut self.shared.dice.lock().unwrap())
    }

    /// The way there, or back.
    async fn way(&self) {
        let often = if self.shared.slow.load(Ordering::Relaxed) { 0.9 } else { 0.3 };
        let millis = self.roll(|dice| if dice.random_bool(often) { dice.random_range(1..40) } else { 0 });
        sleep(Duration::from_millis(millis)).await;
    }

    fn fate(&self) -> Fate {
        if !self.shared.stormy.load(Ordering::Relaxed) {
            return Fate::Arrives;
        }
        self.roll(|dice| match dice.random_range(0..100) {
            0..4 => Fate::IsLost,
            4..8 => Fate::LosesItsAnswer,
            8..12 => Fate::IsLate(Duration::from_millis(dice.random_range(5..200))),
            12..15 => {
                let latest = u64::try_from(LATEST.as_millis()).unwrap();
                Fate::IsLate(Duration::from_millis(dice.random_range(200..latest)))
            }
            _ => Fate::Arrives,
        })
    }

    async fn apply(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let clock = self.shared.keys.prefix().clock();
        let id = txn.then.iter().find_map(|op| match op {
            Op::Put { key, value, .. } if *key == clock => Some(value.clone()),
            _ => None,
        });
        let before = self.inner.revision();
        let outcome = self.inner.txn(txn).await;
        // Even where the answer is an error, it may have been applied.
        if self.inner.revision() != before {
            let mut audit = self.shared.audit.lock().unwrap();
            audit.look(&self.inner, &self.shared.keys);
            if id.is_some_and(|id| !self.shared.applied.lock().unwrap().insert(id)) {
                audit.found("a transaction happened twice".into());
            }
        }
        outcome
    }
}

#[async_trait]
impl Layer for Shaky {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        self.way().await;
        let answer = self.inner.get(key).await;
        self.way().await;
        answer
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.way().await;
        let answer = self.inner.list(prefix).await;
        self.way().await;
        answer
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let era = self.shared.era.load(Ordering::Relaxed);
        self.way().await;
        let unknown = |why: &str| Err(StoreError::Unknown(why.into()));
        if self.shared.era.load(Ordering::Relaxed) != era {
            return unknown("the store was replaced");
        }
        match self.fate() {
            Fate::Arrives => {
                let answer = self.apply(txn).await;
                self.way().await;
                answer
            }
            Fate::IsLost => unknown("the request was lost"),
            Fate::LosesItsAnswer => {
                self.apply(txn).await.ok();
                unknown("the answer was lost")
            }
            Fate::IsLate(by) => {
                let store = self.clone();
                tokio::spawn(async move {
                    sleep(by).await;
                    if store.shared.era.load(Ordering::Relaxed) == era {
                        store.apply(txn).await.ok();
                    }
                });
                unknown("the request is late")
            }
        }
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.way().await;
        let answer = self.inner.get_at(key, revision).await;
        self.way().await;
        answer
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.way().await;
        Ok(Box::new(LateWatch { inner: self.inner.watch(prefix, from).await?, store: self.clone() }))
    }
}

/// Tells everything in order, some of it late.
struct LateWatch {
    inner: Box<dyn Watch>,
    store: Shaky,
}

#[async_trait]
impl Watch for LateWatch {
    async fn next(&mut self) -> StoreResult<WatchBatch> {
        let batch = self.inner.next().await;
        let millis =
            self.store.roll(|dice| if dice.random_bool(0.1) { dice.random_range(1..300) } else { 0 });
        sleep(Duration::from_millis(millis)).await;
        batch
    }
}

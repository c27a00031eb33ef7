//! A store to which everything takes its time, and transactions get lost, lose their answers or come late. After each of
//! them somebody looks at what is stored.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ec_store::{
    KeyValue, Layer, Listing, MemoryStore, Revision, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::sleep;

/// Longer than any transaction is late.
pub(crate) const LATEST: Duration = Duration::from_millis(3000);

/// What is wrong with what is stored.
type Look = fn(&MemoryStore) -> Option<String>;

/// See the module. Clones are the same way to the same store.
#[derive(Clone)]
pub(crate) struct Late {
    inner: MemoryStore,
    look: Look,
    shared: Arc<Shared>,
}

struct Shared {
    dice: Mutex<StdRng>,
    stormy: AtomicBool,
    findings: Mutex<Vec<String>>,
}

impl Late {
    pub(crate) fn new(inner: &MemoryStore, seed: u64, look: Look) -> Self {
        let shared = Shared {
            dice: Mutex::new(StdRng::seed_from_u64(seed)),
            stormy: AtomicBool::new(false),
            findings: Mutex::default(),
        };
        Self { inner: inner.clone(), look, shared: Arc::new(shared) }
    }

    /// Whether transactions get lost and late from now on.
    pub(crate) fn set_stormy(&self, stormy: bool) {
        self.shared.stormy.store(stormy, Ordering::Relaxed);
    }

    /// What was wrong with any content that there ever was.
    pub(crate) fn findings(&self) -> Vec<String> {
        self.shared.findings.lock().unwrap().clone()
    }

    fn roll(&self, to: u64) -> u64 {
        self.shared.dice.lock().unwrap().random_range(0..to)
    }

    /// The way there, or back.
    async fn way(&self) {
        let millis = self.roll(20);
        sleep(Duration::from_millis(millis)).await;
    }

    async fn apply(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let outcome = self.inner.txn(txn).await;
        self.shared.findings.lock().unwrap().extend((self.look)(&self.inner));
        outcome
    }
}

#[async_trait]
impl Layer for Late {
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
        self.way().await;
        let fate = if self.shared.stormy.load(Ordering::Relaxed) { self.roll(100) } else { 100 };
        let unknown = |why: &str| Err(StoreError::Unknown(why.into()));
        match fate {
            0..4 => unknown("the request was lost"),
            4..8 => {
                self.apply(txn).await.ok();
                unknown("the answer was lost")
            }
            8..12 => {
                let (store, millis) = (self.clone(), 5 + self.roll(2900));
                tokio::spawn(async move {
                    sleep(Duration::from_millis(millis)).await;
                    store.apply(txn).await
                });
                unknown("the request is late")
            }
            _ => {
                let answer = self.apply(txn).await;
                self.way().await;
                answer
            }
        }
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.way().await;
        self.inner.watch(prefix, from).await
    }
}

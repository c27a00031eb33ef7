//! The deterministic twin of etcd: the same answers, no server, and faults on request.
//!
//! Time is tokio's, so that a test may pause it and let leases expire at once. Nothing runs in the
//! background: leases that are due expire when somebody looks, and a waiting watch wakes up for them.
//! What it does deliberately not have is a cluster: it answers at once or fails as told by [`Faults`].

mod faults;
mod state;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

pub use self::faults::{Backup, Faults};
use self::{faults::Plan, state::State};
use crate::{
    KeyValue, LeaseId, Listing, Revision, Server, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch,
    WatchBatch,
};

/// Revisions in one batch of a watch that catches up; etcd's own is 1000.
const BATCH: usize = 100;

/// A [`Store`] in memory. Clones are the same store.
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Mutex<Shared>,
    /// Counted up whenever a waiting watch has a reason to look.
    changed: watch::Sender<u64>,
}

struct Shared {
    state: State,
    plan: Plan,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("revision", &self.revision()).finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// An empty store, at revision 1 as a new etcd is.
    pub fn new() -> Self {
        let shared = Shared { state: State::new(), plan: Plan::default() };
        Self { inner: Arc::new(Inner { shared: Mutex::new(shared), changed: watch::Sender::new(0) }) }
    }

    /// The handle that makes things go wrong.
    pub fn faults(&self) -> Faults {
        Faults::new(self.clone())
    }

    /// The revision now. Works while the store is "unreachable", so that tests can compare.
    pub fn revision(&self) -> Revision {
        self.look(|shared| shared.state.revision())
    }

    /// What lies under a prefix now; like [`Self::revision`], never fails.
    pub fn content(&self, prefix: &str) -> Listing {
        self.look(|shared| shared.state.list(prefix))
    }

    /// The leases on which nothing hangs; like [`Self::revision`], never fails.
    pub fn idle_leases(&self) -> Vec<LeaseId> {
        self.look(|shared| shared.state.idle_leases())
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A test that panicked with the lock held has failed already; the others may go on.
        self.inner.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at, or changes, everything at one moment, with leases expired up to now.
    fn look<T>(&self, look: impl FnOnce(&mut Shared) -> T) -> T {
        let mut shared = self.lock();
        let before = (shared.state.revision(), shared.plan.generation());
        shared.state.expire(Instant::now());
        let seen = look(&mut shared);
        if before != (shared.state.revision(), shared.plan.generation()) {
            self.inner.changed.send_modify(|count| *count += 1);
        }
        seen
    }

    /// A read, with the planned faults.
    fn read<T>(&self, read: impl FnOnce(&mut State) -> StoreResult<T>) -> StoreResult<T> {
        self.look(|shared| {
            shared.plan.before_operation()?;
            read(&mut shared.state)
        })
    }

    /// A write, with the planned faults.
    fn write<T>(&self, write: impl FnOnce(&mut State) -> StoreResult<T>) -> StoreResult<T> {
        self.look(|shared| {
            shared.plan.before_write()?;
            let result = write(&mut shared.state);
            shared.plan.after_write()?;
            result
        })
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        self.read(|state| Ok((state.get(key), state.revision())))
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.read(|state| state.get_at(key, revision))
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.read(|state| Ok(state.list(prefix)))
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        if txn.then.is_empty() {
            self.read(|state| state.txn(txn))
        } else {
            self.write(|state| state.txn(txn))
        }
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.look(|shared| {
            shared.plan.before_operation()?;
            let lost = shared.state.compacted(from).then(|| shared.state.first_revision());
            let watch: Box<dyn Watch> = Box::new(MemoryWatch {
                store: self.clone(),
                changed: self.inner.changed.subscribe(),
                generation: shared.plan.generation(),
                prefix: prefix.to_owned(),
                next: from,
                lost,
            });
            Ok(watch)
        })
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        self.write(|state| Ok(state.grant(ttl, Instant::now())))
    }

    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId> {
        self.write(|state| Ok(state.grant_for(key, ttl, Instant::now())))
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.read(|state| state.renew(lease, Instant::now()))
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.write(|state| {
            state.revoke(lease);
            Ok(())
        })
    }

    async fn server(&self) -> StoreResult<Server> {
        self.look(|shared| {
            shared.plan.before_operation()?;
            Ok(Server {
                version: "3.5.0".into(),
                cluster: 1,
                member: 1,
                term: shared.plan.elections().saturating_add(1),
                revision: shared.state.revision(),
                errors: shared.plan.alarms(),
            })
        })
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        self.write(|state| state.compact(revision))
    }
}

struct MemoryWatch {
    store: MemoryStore,
    changed: watch::Receiver<u64>,
    /// The watch lives as long as the plan is of this generation.
    generation: u64,
    prefix: String,
    next: Revision,
    /// The first revision there was, where the one wanted was compacted already.
    lost: Option<Revision>,
}

impl MemoryWatch {
    /// What there is now, or when the next lease ends.
    fn poll(&self) -> StoreResult<Result<WatchBatch, Option<Instant>>> {
        self.store.look(|shared| {
            if shared.plan.is_frozen(self.generation) {
                return Ok(Err(None));
            }
            if shared.plan.generation() != self.generation {
                return Err(shared.plan.broken());
            }
            if let Some(first) = self.lost.or_else(|| shared.state.forgotten(self.next)) {
                return Err(StoreError::Compacted { wanted: self.next, first });
            }
            let events = shared.state.events(&self.prefix, self.next, BATCH);
            match events.last() {
                Some(last) => Ok(Ok(WatchBatch { resume_from: last.revision() + 1, events })),
                None => Ok(Err(shared.state.next_expiry())),
            }
        })
    }
}

#[async_trait]
impl Watch for MemoryWatch {
    async fn next(&mut self) -> StoreResult<WatchBatch> {
        loop {
            self.changed.borrow_and_update();
            match self.poll()? {
                Ok(batch) => {
                    self.next = batch.resume_from;
                    return Ok(batch);
                }
                // The sender lives in the store that this watch holds, so it cannot be gone.
                Err(None) => _ = self.changed.changed().await,
                Err(Some(expiry)) => tokio::select! {
                    biased;
                    _ = self.changed.changed() => {}
                    () = sleep_until(expiry) => {}
                },
            }
        }
    }
}

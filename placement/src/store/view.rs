//! The state in memory, as of a revision of etcd.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ec_store::{Change as StoreChange, Event, FollowOptions, Revision, Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Unavailable, keys::Keys};
use crate::{metrics::Metrics, model::State};

/// So many transactions are remembered by their ids.
const REMEMBERED: usize = 4096;

/// See the module.
pub struct View {
    state: RwLock<State>,
    /// Everything up to here is in the state. 0: nothing was read yet.
    revision: watch::Sender<Revision>,
    /// How often the state was listed anew, so that events may have passed unseen.
    listings: AtomicU64,
    /// The newest transactions, by the ids that they wrote.
    transactions: Mutex<VecDeque<String>>,
    /// A record that cannot be read: no answer would be right.
    broken: Mutex<Option<String>>,
    metrics: Arc<Metrics>,
}

impl View {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            state: RwLock::default(),
            revision: watch::Sender::new(0),
            listings: AtomicU64::new(0),
            transactions: Mutex::default(),
            broken: Mutex::default(),
            metrics,
        }
    }

    /// The state now.
    pub fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far it is.
    pub fn revision(&self) -> Revision {
        *self.revision.borrow()
    }

    fn trouble(&self) -> Option<String> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn listings(&self) -> u64 {
        self.listings.load(Ordering::Acquire)
    }

    /// Whether a transaction was seen to have happened.
    pub(super) fn has_seen(&self, transaction: &str) -> bool {
        let seen = self.transactions.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().rev().any(|own| own == transaction)
    }

    /// Waits until everything up to `revision` is in the state.
    pub(super) async fn reach(&self, revision: Revision, patience: Duration) -> Result<(), Unavailable> {
        let mut progress = self.revision.subscribe();
        let reached =
            tokio::time::timeout(patience, progress.wait_for(|now| *now >= revision && *now > 0)).await;
        match (reached, self.trouble()) {
            (_, Some(trouble)) => Err(Unavailable(trouble)),
            (Ok(Ok(_)), None) => Ok(()),
            _ => Err(Unavailable(format!("the state is not up to revision {revision} of etcd yet"))),
        }
    }

    fn remember(&self, transaction: &[u8]) {
        let mut seen = self.transactions.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() == REMEMBERED {
            seen.pop_front();
        }
        seen.push_back(String::from_utf8_lossy(transaction).into_owned());
    }

    fn apply(&self, keys: &Keys, change: StoreChange) {
        match self.try_apply(keys, change) {
            Ok(()) => {}
            Err(trouble) => {
                tracing::error!(
                    trouble,
                    "the stored state cannot be read; requests are refused until it can"
                );
                *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble);
            }
        }
    }

    fn try_apply(&self, keys: &Keys, change: StoreChange) -> Result<(), String> {
        let clock = keys.clock();
        match change {
            StoreChange::Reset(listing) => {
                let mut state = State::default();
                for pair in listing.pairs {
                    if pair.key == clock {
                        self.remember(&pair.value);
                    } else {
                        state.apply(keys.read(&pair)?);
                    }
                }
                *self.state.write().unwrap_or_else(PoisonError::into_inner) = state;
                *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = None;
                self.listings.fetch_add(1, Ordering::AcqRel);
                // A store that was replaced by an older one has smaller revisions again.
                self.revision.send_replace(listing.revision);
            }
            StoreChange::Events(batch) => {
                let mut changes = Vec::with_capacity(batch.events.len());
                for event in &batch.events {
                    match event {
                        Event::Put(pair) if pair.key == clock => self.remember(&pair.value),
                        Event::Put(pair) => changes.extend(keys.read(pair)?),
                        Event::Delete { key, .. } => changes.extend(keys.deleted(key)),
                    }
                }
                self.metrics.events.add(u64::try_from(changes.len()).unwrap_or(u64::MAX));
                if !changes.is_empty() {
                    self.state.write().unwrap_or_else(PoisonError::into_inner).apply(changes);
                }
                let through = batch.resume_from - 1;
                self.revision.send_if_modified(|now| {
                    let further = through > *now;
                    *now = (*now).max(through);
                    further
                });
            }
            StoreChange::Lost(error) => {
                tracing::warn!(%error, "lost the watch on the state; trying on");
            }
        }
        Ok(())
    }
}

/// Keeps the view up to date until `stop`.
pub(super) async fn follow(view: Arc<View>, store: Arc<dyn Store>, keys: Keys, stop: CancellationToken) {
    // Reading everything again in case an event was lost is for those who can afford it: once a day.
    let options = FollowOptions { resync: Duration::from_secs(24 * 3600), ..FollowOptions::default() };
    let mut changes = ec_store::follow(store, keys.prefix().to_owned(), options);
    while let Some(Some(change)) = stop.run_until_cancelled(changes.recv()).await {
        view.apply(&keys, change);
    }
}

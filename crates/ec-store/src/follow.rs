//! One prefix as one stream of changes that survives whatever happens to the store.
//!
//! ```text
//!          ┌────────────── compacted · gone back · resync due ─────────────┐
//!          ▼                                                               │
//!   list ──▶ Reset ──▶ watch from the revision after it ──▶ Events Events …─┤
//!          ▲                     ▲                                         │ broken
//!          └── nothing seen yet ─┴───────── wait, with jitter ◀── Lost ◀───┘
//! ```
//!
//! A broken watch is opened again where it stopped, so nothing is missed and nothing comes twice. Where
//! that cannot be, the receiver gets a new [`Change::Reset`], to be applied as a difference: what is not
//! in it has been deleted, and no event will say so.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};

use crate::{Listing, Revision, Store, StoreError, StoreResult, WatchBatch};

/// Batches of changes that may wait for the receiver. Beyond them the follower waits too, and etcd holds the rest.
const QUEUE: usize = 256;

/// The times of a follower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FollowOptions {
    /// After this time everything is listed again, in case an event was lost on the way.
    pub resync: Duration,
    /// The first wait after a failure; doubled for every one that follows without progress.
    pub backoff_min: Duration,
    /// The longest wait after a failure.
    pub backoff_max: Duration,
}

impl Default for FollowOptions {
    fn default() -> Self {
        Self {
            resync: Duration::from_secs(600),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
        }
    }
}

/// What a follower tells.
#[derive(Debug, Clone)]
pub enum Change {
    /// Everything there is under the prefix, in place of all that was told before.
    Reset(Listing),
    /// Changes to what was told before: all of one or more revisions. None at all where the store only told
    /// how far it has come.
    Events(WatchBatch),
    /// The store was lost; the follower goes on trying. Once per outage, to be logged or shown.
    Lost(StoreError),
}

/// Follows `prefix` until the receiver is dropped. The first change is a [`Change::Reset`], or a
/// [`Change::Lost`] before it where the store is not there yet.
pub fn follow(store: Arc<dyn Store>, prefix: String, options: FollowOptions) -> mpsc::Receiver<Change> {
    let (changes, receiver) = mpsc::channel(QUEUE);
    let closed = changes.clone();
    let follower =
        Follower { store, prefix, options, changes, next: None, lost: false, watching_since: None };
    tokio::spawn(async move {
        tokio::select! {
            // Everything in the follower may be dropped at any await: it holds nothing but its place.
            () = closed.closed() => {}
            () = follower.run() => {}
        }
    });
    receiver
}

/// Why a session ended.
enum End {
    /// The receiver is gone.
    Unwanted,
    /// List again, at once.
    Relist,
    /// Wait, and go on.
    Failed(StoreError),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Compacted { .. } => Self::Relist,
            error => Self::Failed(error),
        }
    }
}

struct Follower {
    store: Arc<dyn Store>,
    prefix: String,
    options: FollowOptions,
    changes: mpsc::Sender<Change>,
    /// The first revision not told yet; `None`: list first.
    next: Option<Revision>,
    /// An outage was told of, and is not over.
    lost: bool,
    /// When the present session's watch was accepted.
    watching_since: Option<Instant>,
}

impl Follower {
    async fn run(mut self) {
        let mut backoff = self.options.backoff_min;
        loop {
            let before = self.next;
            self.watching_since = None;
            let Err(end) = self.session().await;
            let lasted = self.watching_since.is_some_and(|since| since.elapsed() > self.options.backoff_max);
            if self.next != before || lasted {
                backoff = self.options.backoff_min;
            }
            match end {
                End::Unwanted => return,
                End::Relist => {
                    tracing::debug!(prefix = self.prefix, "listing again");
                    self.next = None;
                    // A store that takes back every listing at once must not make this loop spin.
                    if before.is_some() {
                        continue;
                    }
                }
                End::Failed(error) => {
                    tracing::debug!(prefix = self.prefix, %error, "following failed");
                    if !self.lost {
                        self.lost = true;
                        if self.changes.send(Change::Lost(error)).await.is_err() {
                            return;
                        }
                    }
                }
            }
            // Half of it random, so that a thousand agents do not come back in the same instant.
            sleep(backoff.mul_f64(rand::random_range(0.5..1.0))).await;
            backoff = (backoff * 2).min(self.options.backoff_max);
        }
    }

    /// Lists if need be, then passes on events. Only ends with a reason.
    async fn session(&mut self) -> Result<std::convert::Infallible, End> {
        let from = match self.next {
            Some(next) => next,
            None => self.list().await?,
        };
        let resync_at = Instant::now() + self.options.resync;
        let mut watch = self.store.watch(&self.prefix, from).await?;
        // Asked after the watch was accepted: a store that is replaced from now on breaks the watch.
        if self.revision().await? + 1 < from {
            // A restored backup, or a wiped store: a watch from the future would wait for ever.
            return Err(End::Relist);
        }
        self.lost = false;
        self.watching_since = Some(Instant::now());
        loop {
            let batch = tokio::select! {
                batch = watch.next() => batch?,
                () = sleep_until(resync_at) => return Err(End::Relist),
            };
            let next = batch.resume_from;
            self.tell(Change::Events(batch)).await?;
            self.next = Some(next);
        }
    }

    async fn list(&mut self) -> Result<Revision, End> {
        let listing = self.store.list(&self.prefix).await?;
        let next = listing.revision + 1;
        self.tell(Change::Reset(listing)).await?;
        self.next = Some(next);
        Ok(next)
    }

    /// The store's revision. The key asked for need not exist, but must be one that may be read.
    async fn revision(&self) -> StoreResult<Revision> {
        let key = if self.prefix.is_empty() { "/" } else { &self.prefix };
        self.store.get(key).await.map(|(_, revision)| revision)
    }

    async fn tell(&self, change: Change) -> Result<(), End> {
        self.changes.send(change).await.map_err(|_| End::Unwanted)
    }
}

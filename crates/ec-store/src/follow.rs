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
//!
//! While a watch is broken the store may have become another: restored from a backup, emptied, replaced. Its
//! revisions may even have overtaken ours, and then a watch from where we stopped begins in the midst of a
//! history that is not ours. So the follower keeps a *witness*, the newest change it knows of, and goes on
//! only if the store has that very change in its history; in any doubt it lists again.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, sleep, sleep_until},
};

use crate::{Event, KeyValue, Listing, Revision, Store, StoreError, WatchBatch};

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
    /// how far it has come, and where a watch goes on after an outage.
    Events(WatchBatch),
    /// The store was lost; the follower goes on trying. Once per outage, to be logged or shown, and once more where it was
    /// away and now refuses: whatever else is told after it says that it is over.
    Lost(StoreError),
}

/// Follows `prefix` until the receiver is dropped. The first change is a [`Change::Reset`], or a
/// [`Change::Lost`] before it where the store is not there yet.
pub fn follow(store: Arc<dyn Store>, prefix: String, options: FollowOptions) -> mpsc::Receiver<Change> {
    follow_on_demand(store, prefix, None, options).0
}

/// A handle on a follower, for who knows better than it that its history is not the store's any more.
#[derive(Debug, Clone, Default)]
pub struct Relist(Arc<Wishes>);

#[derive(Debug, Default)]
struct Wishes {
    wanted: Notify,
    sessions: AtomicU64,
    listings: AtomicU64,
}

impl Relist {
    /// Lists again, at once.
    pub fn now(&self) {
        self.0.wanted.notify_one();
    }

    /// How many watches were opened so far, and found to go on where the last one stopped.
    pub fn sessions(&self) -> u64 {
        self.0.sessions.load(Ordering::Acquire)
    }

    /// How many listings were begun so far: where that is more than were told, the last is still being read, or tried again.
    pub fn listings(&self) -> u64 {
        self.0.listings.load(Ordering::Acquire)
    }
}

/// Like [`follow`], with a handle to have everything listed again. `clock`: a key under the prefix that each transaction writes, with what
/// no other has written, where there is one. By others a history that is another may look the same: equal values at equal revisions.
pub fn follow_on_demand(
    store: Arc<dyn Store>,
    prefix: String,
    clock: Option<String>,
    options: FollowOptions,
) -> (mpsc::Receiver<Change>, Relist) {
    let (changes, receiver) = mpsc::channel(QUEUE);
    let closed = changes.clone();
    let relist = Relist::default();
    let follower = Follower {
        store,
        prefix,
        clock,
        options,
        changes,
        relist: relist.clone(),
        place: None,
        listings: 0,
        lost: None,
        watching_since: None,
        told: false,
    };
    tokio::spawn(async move {
        tokio::select! {
            biased;
            // Everything in the follower may be dropped at any await: it holds nothing but its place.
            () = closed.closed() => {}
            () = follower.run() => {}
        }
    });
    (receiver, relist)
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

/// How far a follower has told, and how it can tell that the store's history is still the same.
struct Place {
    /// The first revision not told yet.
    next: Revision,
    /// The newest change that it knows of: of several at once that of the clock.
    witness: Option<KeyValue>,
    /// Whether the witness was listed, so that there may have been deletions between it and `next`.
    listed: bool,
    /// When all was listed last, whatever watches broke since.
    listed_at: Instant,
}

impl Place {
    fn of(listing: &Listing, clock: Option<&str>) -> Self {
        let rank = |pair: &&KeyValue| (pair.mod_revision, Some(&*pair.key) == clock);
        let witness = listing.pairs.iter().max_by_key(rank).cloned();
        Self { next: listing.revision + 1, witness, listed: true, listed_at: Instant::now() }
    }

    /// The place after these changes were told.
    fn after(&mut self, batch: &WatchBatch, clock: Option<&str>) -> Self {
        let (next, listed_at) = (batch.resume_from, self.listed_at);
        let Some(newest) = batch.events.last().map(Event::revision) else {
            return Self { next, witness: self.witness.take(), listed: self.listed, listed_at };
        };
        // A deletion leaves nothing to ask for.
        let written = batch.events.iter().rev().take_while(|event| event.revision() == newest);
        let written = written.filter_map(|event| match event {
            Event::Put(pair) => Some(pair),
            Event::Delete { .. } => None,
        });
        let witness = written.max_by_key(|pair| Some(&*pair.key) == clock).cloned();
        Self { next, witness, listed: false, listed_at }
    }

    /// Where a new watch begins. After a break this is right behind the witness: with nothing but the word
    /// of another store for what lies between them, it might be that of another history.
    fn resume(&self, broken: bool) -> Option<Revision> {
        match &self.witness {
            _ if !broken => Some(self.next),
            Some(witness) if !self.listed || witness.mod_revision + 1 == self.next => {
                Some(witness.mod_revision + 1)
            }
            _ => None,
        }
    }
}

/// A number from 0 to 1 that is another for each prefix and each failure, so that a thousand agents, each of which
/// follows a prefix of its own, do not come back in the same instant.
fn spread(prefix: &str, failures: u32) -> f64 {
    let mut hasher = DefaultHasher::new();
    (prefix, failures).hash(&mut hasher);
    f64::from((hasher.finish() >> 32) as u32) / f64::from(u32::MAX)
}

struct Follower {
    store: Arc<dyn Store>,
    prefix: String,
    clock: Option<String>,
    options: FollowOptions,
    changes: mpsc::Sender<Change>,
    relist: Relist,
    /// How far it has told; `None`: list first.
    place: Option<Place>,
    /// How many listings it has told.
    listings: u64,
    /// An outage was told of, and is not over: whether it was one that passes by itself.
    lost: Option<bool>,
    /// When the present session's watch was accepted.
    watching_since: Option<Instant>,
    /// Whether that watch told anything.
    told: bool,
}

impl Follower {
    async fn run(mut self) {
        let mut backoff = self.options.backoff_min;
        let mut failures = 0;
        // Whether all that came since the last watch that was of use are listings.
        let mut only_listed = false;
        loop {
            let before = self.place.as_ref().map(|place| place.next);
            (self.watching_since, self.told) = (None, false);
            let Err(end) = self.session().await;
            let lasted = self.watching_since.is_some_and(|since| since.elapsed() > self.options.backoff_max);
            let listed = before.is_none() && self.place.is_some();
            // A store that lists and lets nobody watch is not to be listed on and on.
            if self.told || lasted || (listed && !only_listed) {
                backoff = self.options.backoff_min;
            }
            only_listed = (only_listed || listed) && !self.told && !lasted;
            match end {
                End::Unwanted => return,
                End::Relist => {
                    tracing::debug!(prefix = self.prefix, "listing again");
                    self.place = None;
                    // A store that takes back every listing at once must not make this loop spin.
                    if before.is_some() {
                        continue;
                    }
                }
                End::Failed(error) => {
                    tracing::debug!(prefix = self.prefix, %error, "following failed");
                    // Who waits for a store that is away must hear that it is there, and says no.
                    let news = self.lost.is_none_or(|passes| passes && !error.is_transient());
                    if news {
                        self.lost = Some(error.is_transient());
                        if self.changes.send(Change::Lost(error)).await.is_err() {
                            return;
                        }
                    }
                }
            }
            failures += 1;
            tokio::select! {
                biased;
                () = sleep(backoff.mul_f64(0.5 + 0.5 * spread(&self.prefix, failures))) => {}
                () = self.relist.0.wanted.notified() => self.place = None,
            }
            backoff = (backoff * 2).min(self.options.backoff_max);
        }
    }

    /// Lists if need be, then passes on events. Only ends with a reason.
    async fn session(&mut self) -> Result<std::convert::Infallible, End> {
        let broken = self.place.is_some();
        if !broken {
            self.list().await?;
        }
        let place = self.place.as_ref().ok_or(End::Relist)?;
        let (from, resync_at) =
            (place.resume(broken).ok_or(End::Relist)?, place.listed_at + self.options.resync);
        let mut watch = self.store.watch(&self.prefix, from).await?;
        // Asked after the watch was accepted: a store that is replaced from now on breaks the watch.
        self.expect_same_history(from).await?;
        self.relist.0.sessions.fetch_add(1, Ordering::AcqRel);
        self.watching_since = Some(Instant::now());
        // Where nothing was missed, nothing else says that the outage is over.
        if self.lost.take().is_some() && broken {
            self.tell(Change::Events(WatchBatch { events: Vec::new(), resume_from: from })).await?;
        }
        loop {
            let batch = tokio::select! {
                biased;
                batch = watch.next() => batch?,
                () = sleep_until(resync_at) => return Err(End::Relist),
                () = self.relist.0.wanted.notified() => return Err(End::Relist),
            };
            let place = self.place.as_mut().map(|place| place.after(&batch, self.clock.as_deref()));
            self.tell(Change::Events(batch)).await?;
            self.place = place;
            self.told = true;
        }
    }

    async fn list(&mut self) -> Result<(), End> {
        self.relist.0.listings.store(self.listings + 1, Ordering::Release);
        let listing = self.store.list(&self.prefix).await?;
        let place = Place::of(&listing, self.clock.as_deref());
        self.tell(Change::Reset(listing)).await?;
        self.listings += 1;
        self.place = Some(place);
        Ok(())
    }

    /// Fails where the store does not have in its history what was told of it.
    async fn expect_same_history(&self, from: Revision) -> Result<(), End> {
        let Some(witness) = self.place.as_ref().and_then(|place| place.witness.as_ref()) else {
            // The key asked for need not exist, but must be one that may be read.
            let key = if self.prefix.is_empty() { "/" } else { &self.prefix };
            let (_, revision) = self.store.get(key).await?;
            // A restored backup, or a wiped store: a watch from the future would wait for ever.
            return if revision + 1 < from { Err(End::Relist) } else { Ok(()) };
        };
        // Where that is compacted or not reached yet, this ends in a listing, too.
        let there = self.store.get_at(&witness.key, from - 1).await?;
        let same = there.is_some_and(|pair| {
            (pair.mod_revision, pair.version) == (witness.mod_revision, witness.version)
                && pair.value == witness.value
        });
        if same { Ok(()) } else { Err(End::Relist) }
    }

    async fn tell(&self, change: Change) -> Result<(), End> {
        self.changes.send(change).await.map_err(|_| End::Unwanted)
    }
}

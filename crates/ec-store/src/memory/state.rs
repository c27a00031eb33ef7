//! What the store in memory holds, and etcd's rules for it. No locks, no clock of its own.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ops::Bound,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    Compare, Event, KeyValue, LeaseId, Listing, Op, Revision, StoreError, StoreResult, Txn, TxnOutcome,
};

/// etcd's default limit of conditions, and of changes, in one transaction.
const TXN_MAX: usize = 128;
/// etcd's default limit of a request, in bytes.
const REQUEST_MAX: usize = 1536 * 1024;
/// etcd keeps history until it is told to compact; memory is not a disk, so this many revisions must do.
const HISTORY_MAX: usize = 100_000;

#[derive(Clone)]
pub(super) struct State {
    revision: Revision,
    /// Watches may begin from here on.
    compacted: Revision,
    keys: BTreeMap<String, KeyValue>,
    /// Kept beyond compaction, because a watch that runs already is not disturbed by it.
    history: BTreeMap<Revision, Vec<Event>>,
    leases: BTreeMap<LeaseId, Lease>,
    next_lease: i64,
    /// So many changes from now on leave no event behind.
    pub(super) silent_changes: usize,
}

#[derive(Clone)]
struct Lease {
    ttl: Duration,
    expires: Instant,
    keys: BTreeSet<String>,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            revision: 1,
            compacted: 0,
            keys: BTreeMap::new(),
            history: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_lease: 1,
            silent_changes: 0,
        }
    }

    /// Takes an older content. Ids of leases are never given twice, as etcd's are not, which are drawn.
    pub(super) fn replace(&mut self, older: Self) {
        let next_lease = self.next_lease.max(older.next_lease);
        *self = Self { next_lease, ..older };
    }

    pub(super) fn revision(&self) -> Revision {
        self.revision
    }

    pub(super) fn get(&self, key: &str) -> Option<KeyValue> {
        self.keys.get(key).cloned()
    }

    /// A key as it was, from the history that there is of it.
    pub(super) fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        let (oldest, unknown) =
            (self.compacted, StoreError::Compacted { wanted: revision, first: self.compacted });
        if revision < oldest || revision > self.revision {
            return Err(unknown);
        }
        match self.keys.get(key) {
            Some(now) if now.mod_revision <= revision => return Ok(Some(now.clone())),
            _ => {}
        }
        let mut past = self.history.range(..=revision).rev().flat_map(|(_, events)| events);
        match past.find(|event| event.key() == key) {
            Some(Event::Put(pair)) => Ok(Some(pair.clone())),
            Some(Event::Delete { .. }) | None => Ok(None),
        }
    }

    pub(super) fn list(&self, prefix: &str) -> Listing {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let pairs = self.keys.range::<str, _>(from).take_while(|(key, _)| key.starts_with(prefix));
        Listing { pairs: pairs.map(|(_, pair)| pair.clone()).collect(), revision: self.revision }
    }

    pub(super) fn txn(&mut self, txn: Txn) -> StoreResult<TxnOutcome> {
        check(&txn)?;
        if !txn.when.iter().all(|compare| self.holds(compare)) {
            return Ok(TxnOutcome { succeeded: false, revision: self.revision });
        }
        let lost = txn.then.iter().find_map(|op| match op {
            Op::Put { lease: Some(lease), .. } if !self.leases.contains_key(lease) => Some(*lease),
            _ => None,
        });
        if let Some(lease) = lost {
            return Err(StoreError::LeaseLost(lease));
        }
        let revision = self.revision + 1;
        let events = txn.then.into_iter().filter_map(|op| self.apply(op, revision)).collect();
        self.commit(events);
        Ok(TxnOutcome { succeeded: true, revision: self.revision })
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Absent(key) => !self.keys.contains_key(key),
            Compare::Present(key) => self.keys.contains_key(key),
            Compare::Unchanged(key, revision) => {
                // As in etcd, a key that is not there was last changed at revision 0.
                self.keys.get(key).map_or(0, |pair| pair.mod_revision) == *revision
            }
            Compare::Holds(key, value) => self.keys.get(key).is_some_and(|pair| pair.value == *value),
            Compare::NoneUnder(prefix) => self.list(prefix).pairs.is_empty(),
            Compare::NoneSince(prefix, revision) => {
                self.list(prefix).pairs.iter().all(|pair| pair.mod_revision <= *revision)
            }
            Compare::NotBefore(key, revision) => {
                self.keys.get(key).map_or(0, |pair| pair.mod_revision) >= *revision
            }
        }
    }

    fn apply(&mut self, op: Op, revision: Revision) -> Option<Event> {
        match op {
            Op::Put { key, value, lease } => {
                let old = self.keys.get(&key);
                let create_revision = old.map_or(revision, |old| old.create_revision);
                let version = old.map_or(0, |old| old.version) + 1;
                self.detach(&key);
                if let Some(lease) = lease.and_then(|lease| self.leases.get_mut(&lease)) {
                    lease.keys.insert(key.clone());
                }
                let pair = KeyValue {
                    key: key.clone(),
                    value,
                    create_revision,
                    mod_revision: revision,
                    version,
                    lease,
                };
                self.keys.insert(key, pair.clone());
                Some(Event::Put(pair))
            }
            Op::Delete(key) => {
                self.detach(&key);
                self.keys.remove(&key).map(|old| Event::Delete { key: old.key, revision })
            }
        }
    }

    /// Takes a key off the lease that it hangs on.
    fn detach(&mut self, key: &str) {
        let lease = self.keys.get(key).and_then(|pair| pair.lease);
        if let Some(lease) = lease.and_then(|lease| self.leases.get_mut(&lease)) {
            lease.keys.remove(key);
        }
    }

    /// Makes `events` the next revision; where nothing changed, there is none.
    fn commit(&mut self, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        self.revision += 1;
        if self.silent_changes > 0 {
            self.silent_changes -= 1;
            return;
        }
        self.history.insert(self.revision, events);
        if self.history.len() > HISTORY_MAX
            && let Some((oldest, _)) = self.history.pop_first()
        {
            self.compacted = self.compacted.max(oldest + 1);
        }
    }

    pub(super) fn grant(&mut self, ttl: Duration, now: Instant) -> LeaseId {
        let id = LeaseId(self.next_lease);
        self.next_lease += 1;
        self.begin(id, ttl, now);
        id
    }

    pub(super) fn grant_for(&mut self, key: &str, ttl: Duration, now: Instant) -> LeaseId {
        let id = LeaseId::of_key(key);
        if self.renew(id, now).is_err() {
            self.begin(id, ttl, now);
        }
        id
    }

    fn begin(&mut self, id: LeaseId, ttl: Duration, now: Instant) {
        // Whole seconds, as etcd grants them.
        let ttl = Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0))
            .max(Duration::from_secs(1));
        self.leases.insert(id, Lease { ttl, expires: now + ttl, keys: BTreeSet::new() });
    }

    pub(super) fn idle_leases(&self) -> Vec<LeaseId> {
        self.leases.iter().filter(|(_, lease)| lease.keys.is_empty()).map(|(id, _)| *id).collect()
    }

    pub(super) fn renew(&mut self, id: LeaseId, now: Instant) -> StoreResult<Duration> {
        let lease = self.leases.get_mut(&id).ok_or(StoreError::LeaseLost(id))?;
        lease.expires = now + lease.ttl;
        Ok(lease.ttl)
    }

    /// All leases begin anew, as they do when etcd restarts.
    pub(super) fn renew_all(&mut self, now: Instant) {
        for lease in self.leases.values_mut() {
            lease.expires = now + lease.ttl;
        }
    }

    pub(super) fn revoke(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.remove(&id) else { return };
        let revision = self.revision + 1;
        let events = lease
            .keys
            .into_iter()
            .filter_map(|key| self.keys.remove(&key).map(|old| Event::Delete { key: old.key, revision }))
            .collect();
        self.commit(events);
    }

    /// Ends the leases whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        let mut due: Vec<_> = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.expires <= now)
            .map(|(id, lease)| (lease.expires, *id))
            .collect();
        due.sort();
        for (_, id) in due {
            self.revoke(id);
        }
    }

    /// When the next lease ends.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.expires).min()
    }

    pub(super) fn compact(&mut self, revision: Revision) -> StoreResult<()> {
        if revision > self.revision {
            return Err(StoreError::Refused("required revision is a future revision".into()));
        }
        self.compacted = self.compacted.max(revision);
        Ok(())
    }

    /// Whether a new watch from this revision is refused.
    pub(super) fn compacted(&self, from: Revision) -> bool {
        from < self.compacted
    }

    /// The first revision that a watch may begin with.
    pub(super) fn first_revision(&self) -> Revision {
        self.compacted
    }

    /// The first revision left, where a running watch fell behind the bound of the history.
    pub(super) fn forgotten(&self, next: Revision) -> Option<Revision> {
        let (oldest, _) = self.history.first_key_value()?;
        (self.history.len() >= HISTORY_MAX && next < *oldest).then_some(*oldest)
    }

    /// Changes under `prefix` from a revision on, of `limit` revisions at most.
    pub(super) fn events(&self, prefix: &str, from: Revision, limit: usize) -> Vec<Event> {
        self.history
            .range(from..)
            .map(|(_, events)| events.iter().filter(|event| event.key().starts_with(prefix)))
            .filter(|events| events.clone().next().is_some())
            .take(limit)
            .flat_map(|events| events.cloned())
            .collect()
    }
}

/// What etcd refuses before it looks at any key.
fn check(txn: &Txn) -> StoreResult<()> {
    let refused = |text: &str| Err(StoreError::Refused(text.into()));
    if txn.operations() > TXN_MAX {
        return refused("too many operations in txn request");
    }
    let mut keys = HashSet::new();
    for op in &txn.then {
        let key = op.key();
        if key.is_empty() {
            return refused("key is not provided");
        }
        if !keys.insert(key) {
            return refused("duplicate key given in txn request");
        }
    }
    if txn.bytes() > REQUEST_MAX { refused("request is too large") } else { Ok(()) }
}

//! The store that the parts of etcd-compute share: keys, transactions, watches and leases.
//!
//! [`Store`] has two implementations which pass the same suite (`conformance`): [`EtcdStore`], the real
//! thing, and [`MemoryStore`], a deterministic twin with revisions, watches, leases, compaction and
//! injected faults. [`follow`] turns list and watch into one resilient stream of changes.
//!
//! With the feature `testing` come that suite and `testing::EtcdServer`, which runs an etcd of its own.

#[cfg(feature = "testing")]
pub mod conformance;
mod error;
mod etcd;
mod follow;
mod layer;
mod memory;
mod sealed;
#[cfg(feature = "testing")]
pub mod testing;
mod types;

use std::time::Duration;

use async_trait::async_trait;

pub use error::{StoreError, StoreResult};
pub use etcd::{EtcdConfig, EtcdSection, EtcdStore, EtcdTls, Grant, Piece, Snapshot};
pub use follow::{Change, FollowOptions, Relist, follow, follow_on_demand};
pub use layer::Layer;
pub use memory::{Backup, Faults, MemoryStore};
pub use sealed::Sealed;
pub use types::{
    Compare, Event, KeyValue, LeaseId, Listing, Op, Revision, Server, Txn, TxnOutcome, WatchBatch,
};

/// A linearizable key-value store with revisions; the part of etcd that we use.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// One key, or `None`, with the revision of the whole store at that moment.
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)>;

    /// One key as it was at a past revision. [`StoreError::Compacted`] where that is not known any more, or
    /// not yet reached.
    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        let _ = key;
        // Who cannot look back knows nothing of it.
        Err(StoreError::Compacted { wanted: revision, first: revision + 1 })
    }

    /// Every key under `prefix`, in key order, all as of one revision (big prefixes are read in pages
    /// pinned to the revision of the first).
    async fn list(&self, prefix: &str) -> StoreResult<Listing>;

    /// The keys under `prefix`, as [`Self::list`] reads them, without their values.
    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        Ok(self.list(prefix).await?.pairs.into_iter().map(|pair| pair.key).collect())
    }

    /// Applies `txn.then` if every compare holds, else nothing. Atomic.
    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome>;

    /// Changes under `prefix` from `from` on, inclusive. Returns when the server has accepted the watch.
    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>>;

    /// A new lease. The server may grant more than `ttl`, never less.
    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId>;

    /// The lease that is this key's own: granted, or renewed where it is there already. Whoever dies between this and the
    /// key's write leaves nothing that the next try does not take up again.
    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId>;

    /// Renews a lease once; answers the time it now has. [`StoreError::LeaseLost`] where it is gone.
    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration>;

    /// Ends a lease and deletes its keys. Ending one that is gone already is not an error.
    async fn revoke(&self, lease: LeaseId) -> StoreResult<()>;

    /// The server that answers: which release, of which cluster.
    async fn server(&self) -> StoreResult<Server>;

    /// Forgets history before `revision`. Compacting the same revision twice is not an error.
    async fn compact(&self, revision: Revision) -> StoreResult<()>;
}

/// Users and roles of an etcd that asks who somebody is. Everything here may be done again: what is there already is made as
/// it should be.
#[async_trait]
pub trait Users: Store {
    /// A role with these rights and no others.
    async fn ensure_role(&self, role: &str, grants: &[Grant]) -> StoreResult<()>;

    /// A user who has this role, and no password: a client certificate with this common name is who it is. A role that is
    /// not there is made, without any rights; `root` has all of itself.
    async fn ensure_user(&self, user: &str, role: &str) -> StoreResult<()>;

    /// Whoever comes as this user may do nothing from now on; nor has anybody the role of the same name.
    async fn drop_user(&self, user: &str) -> StoreResult<()>;

    /// From now on nobody may do anything but by their roles. The user `root` with the role `root` must be there.
    async fn enable_auth(&self) -> StoreResult<()>;
}

/// A running watch; dropping it ends it.
#[async_trait]
pub trait Watch: Send {
    /// The next changes; waits until there are some. After any error the watch is over and a new one is
    /// wanted; [`StoreError::Compacted`] means that changes were missed, so list first.
    async fn next(&mut self) -> StoreResult<WatchBatch>;
}

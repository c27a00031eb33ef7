//! A store in front of another.

use std::time::Duration;

use async_trait::async_trait;

use crate::{KeyValue, LeaseId, Listing, Revision, Server, Store, StoreResult, Txn, TxnOutcome, Watch};

/// A store that does what another does, but for what it does itself: each call goes on to the inner one unless it is
/// written out. What is a layer is a [`Store`].
#[async_trait]
pub trait Layer: Send + Sync + 'static {
    /// The store behind.
    fn inner(&self) -> &dyn Store;

    /// See [`Store::get`].
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        self.inner().get(key).await
    }

    /// See [`Store::get_at`].
    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.inner().get_at(key, revision).await
    }

    /// See [`Store::list`].
    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.inner().list(prefix).await
    }

    /// See [`Store::keys`].
    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        self.inner().keys(prefix).await
    }

    /// See [`Store::txn`].
    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        self.inner().txn(txn).await
    }

    /// See [`Store::watch`].
    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.inner().watch(prefix, from).await
    }
}

#[async_trait]
impl<L: Layer> Store for L {
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        Layer::get(self, key).await
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        Layer::get_at(self, key, revision).await
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        Layer::list(self, prefix).await
    }

    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        Layer::keys(self, prefix).await
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        Layer::txn(self, txn).await
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        Layer::watch(self, prefix, from).await
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        self.inner().grant(ttl).await
    }

    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId> {
        self.inner().grant_for(key, ttl).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.inner().keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.inner().revoke(lease).await
    }

    async fn server(&self) -> StoreResult<Server> {
        self.inner().server().await
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        self.inner().compact(revision).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryStore, StoreError};

    /// Lists nothing, as if that were too much.
    struct Unlisted(MemoryStore);

    #[async_trait]
    impl Layer for Unlisted {
        fn inner(&self) -> &dyn Store {
            &self.0
        }

        async fn list(&self, _: &str) -> StoreResult<Listing> {
            Err(StoreError::Refused("not listed".into()))
        }
    }

    #[tokio::test]
    async fn keys_are_asked_of_the_inner_store_and_not_listed_with_their_values() {
        let store = Unlisted(MemoryStore::new());
        Store::txn(&store, Txn::new().put("/a/1", "x").put("/b", "y")).await.unwrap();
        assert_eq!(Store::keys(&store, "/a/").await.unwrap(), ["/a/1"]);
    }
}

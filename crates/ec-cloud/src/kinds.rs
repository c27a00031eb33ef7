//! Which instances are volumes, for whoever asks again and again.

use std::collections::{HashMap, HashSet};

use ec_model::{Instance, InstanceId, Workload, decode_part};
use futures::StreamExt;
use serde::Deserialize;

use crate::{Cloud, CloudResult, lookup::CONCURRENCY};

/// Of more new ones than so many all are listed at once.
const FEW: usize = 64;

/// What a record says of its kind.
#[derive(Deserialize)]
struct Kind {
    #[serde(default)]
    kind: Workload,
}

/// Whether each instance is a volume, of those that were seen. That never changes, so a record is read once.
#[derive(Debug, Default)]
pub struct Kinds(HashMap<InstanceId, bool>);

impl Kinds {
    /// The volumes that there are now.
    pub(crate) async fn volumes(&mut self, cloud: &Cloud) -> CloudResult<HashSet<InstanceId>> {
        let (keys, store) = (&cloud.keys, &cloud.store);
        let new = match self.0.is_empty() {
            true => None,
            false => Some(self.new_of(&store.keys(&keys.instances()).await?, cloud)),
        };
        match new.filter(|new| new.len() <= FEW) {
            Some(new) => {
                let mut read = futures::stream::iter(new)
                    .map(async |instance| (instance, store.get(&keys.instance(instance)).await))
                    .buffer_unordered(CONCURRENCY);
                while let Some((instance, found)) = read.next().await {
                    found?.0.into_iter().for_each(|pair| self.learn(instance, &pair.value));
                }
            }
            None => {
                for pair in store.list(&keys.instances()).await?.pairs {
                    keys.parse_instance(&pair.key).into_iter().for_each(|own| self.learn(own, &pair.value));
                }
            }
        }
        Ok(self.0.iter().filter(|(_, is_volume)| **is_volume).map(|(instance, _)| *instance).collect())
    }

    /// Forgets those that are not there any more; which of the others were not seen yet.
    fn new_of(&mut self, there: &[String], cloud: &Cloud) -> Vec<InstanceId> {
        let there: HashSet<InstanceId> =
            there.iter().filter_map(|key| cloud.keys.parse_instance(key).ok()).collect();
        self.0.retain(|instance, _| there.contains(instance));
        there.into_iter().filter(|instance| !self.0.contains_key(instance)).collect()
    }

    /// One that cannot be read counts as a machine, and is read the next time, too.
    fn learn(&mut self, instance: InstanceId, record: &[u8]) {
        if let Ok(Kind { kind }) = decode_part::<Instance, Kind>(record) {
            self.0.insert(instance, !kind.is_machine());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use async_trait::async_trait;
    use ec_placement_client::{PlacementClient, PlacementConfig};
    use ec_store::{KeyValue, Layer, Listing, MemoryStore, Revision, Store, StoreResult, Txn};

    use super::*;

    /// Counts what is read with its values.
    #[derive(Default)]
    struct Counted {
        store: MemoryStore,
        listed: AtomicUsize,
        got: AtomicUsize,
    }

    #[async_trait]
    impl Layer for Counted {
        fn inner(&self) -> &dyn Store {
            &self.store
        }

        async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
            self.got.fetch_add(1, Ordering::Relaxed);
            self.store.get(key).await
        }

        async fn list(&self, prefix: &str) -> StoreResult<Listing> {
            self.listed.fetch_add(1, Ordering::Relaxed);
            self.store.list(prefix).await
        }

        async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
            self.store.keys(prefix).await
        }
    }

    #[tokio::test]
    async fn records_are_read_once_and_of_others_their_keys() {
        ec_runtime::install_tls_provider();
        let store = Arc::new(Counted::default());
        let placement = PlacementClient::new(&PlacementConfig::default()).unwrap();
        let cloud = Cloud {
            host: ec_runtime::Host::default(),
            store: store.clone(),
            placement: Arc::new(placement),
            keys: ec_model::Keyspace::default(),
            project: "p".into(),
            user: "u".into(),
            request_id: None,
            notice: |_| {},
        };
        let id = |number| InstanceId::new(uuid::Uuid::from_u128(number));
        let put = async |number, value: &str| {
            let txn = Txn::new().put(cloud.keys.instance(id(number)), value);
            cloud.store.txn(txn).await.unwrap();
        };
        let mut kinds = Kinds::default();
        let mut seen = async || {
            let volumes = kinds.volumes(&cloud).await.unwrap().into_iter().collect::<BTreeSet<_>>();
            (volumes, store.listed.swap(0, Ordering::Relaxed), store.got.swap(0, Ordering::Relaxed))
        };
        let (volume, machine) = (r#"{"version": 1, "kind": "volume"}"#, r#"{"version": 1}"#);
        for (number, record) in [(1, volume), (2, machine)] {
            put(number, record).await;
        }
        assert_eq!(seen().await, ([id(1)].into(), 1, 0));
        assert_eq!(seen().await, ([id(1)].into(), 0, 0), "all are known");
        for (number, record) in [(3, volume), (4, "of a later release")] {
            put(number, record).await;
        }
        assert_eq!(seen().await, ([id(1), id(3)].into(), 0, 2));
        cloud.store.txn(Txn::new().delete(cloud.keys.instance(id(1)))).await.unwrap();
        put(4, volume).await;
        assert_eq!(seen().await, ([id(3), id(4)].into(), 0, 1), "one went, one was mended");
        for number in 100..200 {
            put(number, machine).await;
        }
        assert_eq!(seen().await, ([id(3), id(4)].into(), 1, 0), "many at once");
    }
}

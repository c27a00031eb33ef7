//! What somebody else does while it is swept away stays.

use futures::{FutureExt, future::BoxFuture};

use super::*;
use crate::destroy;

/// An etcd in which somebody does something before a record is taken away, once.
struct Meanwhile {
    memory: MemoryStore,
    does: Mutex<Option<BoxFuture<'static, ()>>>,
}

#[async_trait]
impl Layer for Meanwhile {
    fn inner(&self) -> &dyn Store {
        &self.memory
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let does = match format!("{txn:?}").contains("Delete") {
            true => self.does.lock().unwrap().take(),
            false => None,
        };
        if let Some(does) = does {
            does.await;
        }
        self.memory.txn(txn).await
    }
}

#[tokio::test]
async fn the_history_of_what_its_user_destroys_meanwhile_stays() {
    let world = World::new(1, 0, &[]).await;
    let made = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    let (memory, keys) = (world.etcd.memory.clone(), &world.keys);
    // It failed yesterday.
    let key = keys.instance(made.instance);
    let mut record: Instance = decode(&world.under(&key)[0].value).unwrap();
    record.created_at = Timestamp::now() - STALE * 2;
    let failed = Txn::new().delete(keys.request(made.node, made.instance)).put(key, encode(&record));
    let revision = memory.txn(failed).await.unwrap().revision;
    world.placement.claims.lock().unwrap().clear();

    let cloud = world.cloud();
    let does = async move { _ = destroy(&cloud, made.instance).await.unwrap() };
    let store = Meanwhile { memory, does: Mutex::new(Some(does.boxed())) };
    let cloud = Cloud { store: Arc::new(store), ..world.cloud() };
    sweep(&cloud, record, revision).await.unwrap();
    assert_eq!(world.under(&keys.request(made.node, made.instance)).len(), 1, "it is to be destroyed");
    assert_eq!(world.under(&keys.actions(made.instance)).len(), 1, "which its history tells");
}

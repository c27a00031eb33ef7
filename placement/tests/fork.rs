//! etcd is put back while transactions are on their way: what a replica learned meanwhile is of a history that
//! is no more, and what arrives afterwards was decided before it.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use ec_placement_model::{Command, ConsumerWrite, ExpectedGeneration, Inventory, intern};
use ec_runtime::Host;
use ec_store::{Layer, MemoryStore, Store, StoreResult, Txn, TxnOutcome};
use placement::{
    store::{Keys, Limits, Replica},
    transfer::load,
};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const HOST: Uuid = Uuid::from_u128(0x1000);
const ELSEWHERE: Uuid = Uuid::from_u128(0x1001);

/// A way to the store on which transactions can be held up.
#[derive(Clone)]
struct Gate {
    inner: MemoryStore,
    open: watch::Sender<bool>,
}

impl Gate {
    fn new(inner: &MemoryStore) -> Self {
        Self { inner: inner.clone(), open: watch::Sender::new(true) }
    }
}

#[async_trait]
impl Layer for Gate {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        self.inner.txn(txn).await
    }
}

fn keys() -> Keys {
    Keys::new("/p")
}

fn replica(store: impl Store) -> Replica {
    Replica::start(Arc::new(store), keys(), Limits::default(), Host::default(), CancellationToken::new())
}

async fn host(replica: &Replica, uuid: Uuid, vcpu: i64) {
    let name = format!("h{}", uuid.as_u128());
    replica.write(Command::CreateProvider { uuid, name, parent: None }).await.unwrap();
    let inventory = Inventory { total: vcpu, ..Inventory::default() };
    replica.write(Command::AddInventory { provider: uuid, class: intern("VCPU"), inventory }).await.unwrap();
}

fn consumer(number: u128) -> Uuid {
    Uuid::from_u128(0x2000 + number)
}

fn claim(number: u128, host: Uuid, amount: i64) -> Command {
    Command::SetAllocations(vec![ConsumerWrite {
        uuid: consumer(number),
        generation: ExpectedGeneration::Any,
        owner: Some((intern("project"), intern("user"))),
        consumer_type: None,
        allocations: vec![(host, vec![(intern("VCPU"), amount)])],
    }])
}

/// What is used of a host, by what is stored.
async fn used(store: &MemoryStore, host: Uuid) -> i64 {
    let state = load(store, &keys()).await.unwrap().whole().unwrap();
    state.find(&host).map_or(0, |node| node.used("VCPU"))
}

/// A release by another replica is told while a write of ours is on its way; then etcd is put back behind the
/// release, and the write arrives there. It raises the clock above all that is known, without having known the
/// release. What is decided next must not give the room away that was never freed.
#[tokio::test(start_paused = true)]
async fn a_write_that_arrives_in_a_restored_etcd_does_not_vouch_for_what_was_learned_meanwhile() {
    for (silent, others) in [(false, 0), (true, 0), (false, 40), (true, 40)] {
        let store = MemoryStore::new();
        let gate = Gate::new(&store);
        let (ours, other) = (replica(gate.clone()), replica(store.clone()));
        host(&ours, HOST, 8).await;
        host(&ours, ELSEWHERE, 8).await;
        // Whoever frees it has said before that it is on this store.
        other.write(claim(1, HOST, 8)).await.unwrap();
        ours.write(claim(9, ELSEWHERE, 1)).await.unwrap();
        ours.fresh().await.unwrap();
        gate.open.send_replace(false);
        let late = tokio::spawn({
            let ours = ours.clone();
            async move { ours.write(claim(2, ELSEWHERE, 1)).await }
        });
        // Time is paused: it passes when nobody can go on, and then the write is at the gate.
        sleep(Duration::from_millis(10)).await;
        let backup = store.faults().backup();
        other.write(Command::DeleteAllocations(consumer(1))).await.unwrap();
        ours.fresh().await.unwrap();
        assert_eq!(ours.peek(|state| state.find(&HOST).unwrap().used("VCPU")), 0);
        if silent {
            store.faults().freeze_watches();
        }
        store.faults().restore(&backup);
        for _ in 0..others {
            store.txn(Txn::new().put("/elsewhere", "")).await.unwrap();
        }
        let next = tokio::spawn({
            let ours = ours.clone();
            async move { ours.write(claim(3, HOST, 8)).await }
        });
        gate.open.send_replace(true);
        late.await.unwrap().ok();
        let answer = next.await.unwrap();
        assert_eq!(used(&store, HOST).await, 8, "silent {silent}, {others} others: {answer:?}");
        assert!(answer.is_err(), "silent {silent}, {others} others: {answer:?}");
    }
}

/// In the etcd that was put back another replica writes the same record at the very revision at which it was written
/// in the history that is lost. Its revision says nothing then; the epoch does.
#[tokio::test(start_paused = true)]
async fn the_same_revision_of_a_record_in_another_history_is_not_the_same_record() {
    let store = MemoryStore::new();
    let stale = replica(store.clone());
    host(&stale, HOST, 8).await;
    stale.write(claim(1, HOST, 4)).await.unwrap();
    let backup = store.faults().backup();
    stale.write(Command::DeleteAllocations(consumer(1))).await.unwrap();
    stale.fresh().await.unwrap();
    let generation = format!("/p/generations/{HOST}");
    let (lost, _) = store.get(&generation).await.unwrap();
    store.faults().freeze_watches();
    store.faults().restore(&backup);
    let other = replica(store.clone());
    other.write(claim(2, HOST, 4)).await.unwrap();
    let (found, _) = store.get(&generation).await.unwrap();
    assert_eq!(found.unwrap().mod_revision, lost.unwrap().mod_revision, "else this shows nothing");
    // It knows of none used. In etcd there are 8 of 8.
    assert!(stale.write(claim(3, HOST, 8)).await.is_err());
    assert_eq!(used(&store, HOST).await, 8);
}

//! Records of placement that somebody spoilt, deleted or wrote by hand: what stands on them is refused with the key,
//! everything else goes on, and it can be mended.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{sync::Arc, time::Duration};

use ec_placement_model::{Command, ConsumerWrite, ExpectedGeneration, Inventory, ModelError, intern};
use ec_runtime::Host;
use ec_store::{MemoryStore, Store, Txn};
use placement::store::{Keys, Limits, Replica, WriteError};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

fn host(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn create(number: u128) -> Command {
    Command::CreateProvider { uuid: host(number), name: format!("h{number}"), parent: None }
}

fn claim(consumer: u128, number: u128) -> Command {
    Command::SetAllocations(vec![ConsumerWrite {
        uuid: Uuid::from_u128(0x2000 + consumer),
        generation: ExpectedGeneration::Any,
        owner: Some((intern("project"), intern("user"))),
        consumer_type: None,
        allocations: vec![(host(number), vec![(intern("VCPU"), 1)])],
    }])
}

fn replica(store: &MemoryStore) -> Replica {
    let (limits, stop) = (Limits::default(), CancellationToken::new());
    Replica::start(Arc::new(store.clone()), Keys::new("/p"), limits, Host::default(), stop)
}

/// A replica of hosts with these numbers and room for something.
async fn hosts(store: &MemoryStore, numbers: &[u128]) -> Replica {
    let replica = replica(store);
    for number in numbers {
        replica.write(create(*number)).await.unwrap();
        let (class, inventory) = (intern("VCPU"), Inventory { total: 4, ..Inventory::default() });
        replica.write(Command::AddInventory { provider: host(*number), class, inventory }).await.unwrap();
    }
    replica
}

async fn by_hand(store: &MemoryStore, replica: &Replica, txn: Txn) {
    store.txn(txn).await.unwrap();
    replica.fresh().await.unwrap();
}

fn generation(number: u128) -> String {
    format!("/p/generations/{}", host(number))
}

fn record(number: u128) -> String {
    format!("/p/providers/{}", host(number))
}

#[tokio::test(start_paused = true)]
async fn a_claim_on_what_cannot_be_read_takes_no_other_with_it() {
    for spoilt in [generation(1), record(1)] {
        let store = MemoryStore::new();
        let replica = hosts(&store, &[1, 2]).await;
        by_hand(&store, &replica, Txn::new().put(spoilt.clone(), "x")).await;
        let (began, conflicts) = (Instant::now(), replica.metrics().conflicts.get());
        // They meet in one batch.
        let (refused, done) = tokio::join!(replica.write(claim(1, 1)), replica.write(claim(2, 2)));
        let named = matches!(&refused, Err(WriteError::Refused(ModelError::Unreadable(why))) if why.contains(&spoilt));
        assert!(named, "{refused:?}");
        assert!(done.is_ok(), "{done:?}");
        assert!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
        assert_eq!(replica.metrics().conflicts.get(), conflicts, "nobody else was there");
    }
}

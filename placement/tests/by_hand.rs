//! Records of placement that somebody spoilt, deleted or wrote by hand: what stands on them is refused with the key,
//! everything else goes on, and it can be mended.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{sync::Arc, time::Duration};

use ec_placement_model::{
    Command, ConsumerWrite, ExpectedGeneration, Inventory, ModelError,
    check::check,
    intern,
    search::{BUDGET, Group, Options, ProviderFilter, Query, providers, search},
};
use ec_runtime::Host;
use ec_store::{MemoryStore, Store, Txn};
use placement::{
    store::{Keys, Limits, Replica, WriteError},
    transfer::load,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

fn host(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn create(number: u128) -> Command {
    Command::CreateProvider { uuid: host(number), name: format!("h{number}"), parent: None }
}

fn claim(consumer: u128, number: u128, amount: i64) -> Command {
    Command::SetAllocations(vec![ConsumerWrite {
        uuid: Uuid::from_u128(0x2000 + consumer),
        generation: ExpectedGeneration::Any,
        owner: Some((intern("project"), intern("user"))),
        consumer_type: None,
        allocations: vec![(host(number), vec![(intern("VCPU"), amount)])],
    }])
}

fn replica(store: &MemoryStore) -> Replica {
    let (limits, stop) = (Limits::default(), CancellationToken::new());
    Replica::start(Arc::new(store.clone()), Keys::new("/p"), limits, Host::default(), stop)
}

fn inventory(number: u128) -> Command {
    let (class, inventory) = (intern("VCPU"), Inventory { total: 4, ..Inventory::default() });
    Command::AddInventory { provider: host(number), class, inventory }
}

/// A replica of hosts with these numbers and room for something.
async fn hosts(store: &MemoryStore, numbers: &[u128]) -> Replica {
    let replica = replica(store);
    for number in numbers {
        replica.write(create(*number)).await.unwrap();
        replica.write(inventory(*number)).await.unwrap();
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

/// What does not fit of what is stored.
async fn findings(store: &MemoryStore) -> Vec<String> {
    check(&load(store, &Keys::new("/p")).await.unwrap().state)
}

#[tokio::test(start_paused = true)]
async fn a_claim_on_what_cannot_be_read_takes_no_other_with_it() {
    for spoilt in [generation(1), record(1)] {
        let store = MemoryStore::new();
        let replica = hosts(&store, &[1, 2]).await;
        by_hand(&store, &replica, Txn::new().put(spoilt.clone(), "x")).await;
        let (began, conflicts) = (Instant::now(), replica.metrics().conflicts.get());
        // They meet in one batch.
        let (refused, done) = tokio::join!(replica.write(claim(1, 1, 1)), replica.write(claim(2, 2, 1)));
        let named = matches!(&refused, Err(WriteError::Refused(ModelError::Unreadable(why))) if why.contains(&spoilt));
        assert!(named, "{refused:?}");
        assert!(done.is_ok(), "{done:?}");
        assert!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
        assert_eq!(replica.metrics().conflicts.get(), conflicts, "nobody else was there");
    }
}

/// Who is offered for one VCPU, and who is listed.
fn offered(replica: &Replica) -> (Vec<Uuid>, Vec<Uuid>) {
    let group = Group { resources: vec![(intern("VCPU"), 1)], ..Group::default() };
    let query = Query { groups: vec![group], ..Query::default() };
    replica.peek(|state| {
        let listed = providers(state, &ProviderFilter::default(), BUDGET).unwrap();
        (
            search(state, &query, Options::default(), BUDGET).unwrap().providers,
            listed.into_iter().map(|slot| state.node(slot).uuid).collect(),
        )
    })
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_is_offered_to_nobody_until_it_is_mended() {
    for spoilt in [generation(1), record(1)] {
        for nested in [false, true] {
            let store = MemoryStore::new();
            let replica = hosts(&store, &[1, 2]).await;
            if nested {
                // Then several may serve it together.
                let child =
                    Command::CreateProvider { uuid: host(3), name: "c".into(), parent: Some(host(2)) };
                replica.write(child).await.unwrap();
            }
            let whole = store.content(&spoilt).pairs[0].value.clone();
            let known = offered(&replica);
            assert!(known.0.contains(&host(1)) && known.1.contains(&host(1)), "{known:?}");
            by_hand(&store, &replica, Txn::new().put(spoilt.clone(), "x")).await;
            let (candidates, listed) = offered(&replica);
            assert!(candidates.contains(&host(2)) && listed.contains(&host(2)), "{candidates:?}, {listed:?}");
            assert!(!candidates.contains(&host(1)), "{spoilt} of {candidates:?}");
            assert!(!listed.contains(&host(1)), "{spoilt} of {listed:?}");
            by_hand(&store, &replica, Txn::new().put(spoilt.clone(), whole)).await;
            assert_eq!(offered(&replica), known);
        }
    }
}

/// Its record was deleted, with its name or without: its agent makes it anew, and what is used of it still counts.
#[tokio::test(start_paused = true)]
async fn a_provider_of_which_something_is_left_is_made_anew() {
    for name_is_left in [true, false] {
        let store = MemoryStore::new();
        let replica = hosts(&store, &[1]).await;
        replica.write(claim(1, 1, 3)).await.unwrap();
        let mut txn = Txn::new().delete(record(1));
        if !name_is_left {
            txn = txn.delete("/p/names/h1");
        }
        by_hand(&store, &replica, txn).await;
        let found = findings(&store).await;
        assert!(
            found.iter().any(|line| line.contains("generation") && line.contains("no provider")),
            "{found:?}"
        );
        let (made, has, fits, over) = tokio::join!(
            replica.write(create(1)),
            replica.write(inventory(1)),
            replica.write(claim(2, 1, 1)),
            replica.write(claim(3, 1, 1)),
        );
        assert!(made.is_ok(), "{made:?}");
        assert!(has.is_ok() && fits.is_ok(), "{has:?}, {fits:?}");
        assert!(matches!(over, Err(WriteError::Refused(ModelError::CapacityExceeded { .. }))), "{over:?}");
        assert_eq!(findings(&store).await, Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_provider_goes_where_it_is_made_and_deleted_at_once() {
    let store = MemoryStore::new();
    let replica = hosts(&store, &[1]).await;
    by_hand(&store, &replica, Txn::new().delete(record(1))).await;
    let (made, deleted) =
        tokio::join!(replica.write(create(1)), replica.write(Command::DeleteProvider(host(1))));
    assert!(made.is_ok() && deleted.is_ok(), "{made:?}, {deleted:?}");
    assert_eq!(findings(&store).await, Vec::<String>::new());
    replica.write(create(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_name_whose_provider_is_not_there_is_free() {
    let created = Command::CreateProvider { uuid: host(9), name: "h1".into(), parent: None };
    let renamed = Command::UpdateProvider { uuid: host(2), name: "h1".into(), parent: None, may_move: false };
    for command in [created, renamed] {
        let store = MemoryStore::new();
        let replica = hosts(&store, &[1, 2]).await;
        let taken = replica.write(command.clone()).await;
        assert!(matches!(taken, Err(WriteError::Refused(ModelError::ProviderExists(_)))), "{taken:?}");
        // Nobody knows what a provider is called that cannot be read.
        let whole = store.content(&record(1)).pairs[0].value.clone();
        by_hand(&store, &replica, Txn::new().put(record(1), "x")).await;
        let unknown = replica.write(command.clone()).await;
        assert!(matches!(unknown, Err(WriteError::Refused(ModelError::Unreadable(_)))), "{unknown:?}");
        by_hand(&store, &replica, Txn::new().put(record(1), whole)).await;
        assert_eq!(replica.write(command.clone()).await, taken);
        by_hand(&store, &replica, Txn::new().delete(record(1)).delete(generation(1))).await;
        replica.write(command).await.unwrap();
        assert_eq!(findings(&store).await, Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn a_provider_without_a_generation_is_deleted_whole() {
    let store = MemoryStore::new();
    let replica = hosts(&store, &[1]).await;
    by_hand(&store, &replica, Txn::new().delete(generation(1))).await;
    replica.write(Command::DeleteProvider(host(1))).await.unwrap();
    let keys: Vec<String> = store.content("/p/").pairs.into_iter().map(|pair| pair.key).collect();
    assert!(!keys.iter().any(|key| key.contains(&host(1).to_string()) || key.contains("names/")), "{keys:?}");
}

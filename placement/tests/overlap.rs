//! Transactions that are under way together, on a store some way off, told step by step.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use ec_placement_model::{Command, ConsumerWrite, ExpectedGeneration, Inventory, intern};
use ec_runtime::Host;
use ec_store::{Compare, Layer, MemoryStore, Op, Store, StoreError, StoreResult, Txn, TxnOutcome};
use placement::{
    store::{Keys, Limits, Model, Replica, WriteError},
    transfer::load,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How long a transaction is under way.
const WAY: Duration = Duration::from_millis(20);

fn keys() -> Keys {
    Keys::new("/p")
}

fn host(number: u128) -> Uuid {
    Uuid::from_u128(0x1000 + number)
}

fn consumer(number: u128) -> Uuid {
    Uuid::from_u128(0x2000 + number)
}

/// One VCPU of one host.
fn claim(number: u128, host: Uuid) -> Command {
    Command::SetAllocations(vec![ConsumerWrite {
        uuid: consumer(number),
        generation: ExpectedGeneration::Any,
        owner: Some((intern("project"), intern("user"))),
        consumer_type: None,
        allocations: vec![(host, vec![(intern("VCPU"), 1)])],
    }])
}

/// What becomes of the transaction that has a record.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fate {
    /// It arrives, and its answer is lost.
    LosesItsAnswer(String),
    /// Another writer changes this key before it arrives.
    IsTooLate(String),
}

struct Seen {
    /// How long transactions are under way.
    way: Duration,
    /// What each of those under way stands on or writes.
    under_way: Vec<(u64, BTreeSet<String>)>,
    sent: u64,
    most: usize,
    /// Where two that were under way together met.
    met: Vec<String>,
    fate: Option<Fate>,
}

/// A store to which transactions take their time. It notes which are under way together.
#[derive(Clone)]
struct Slow {
    inner: MemoryStore,
    seen: Arc<Mutex<Seen>>,
}

impl Slow {
    fn new(inner: &MemoryStore) -> Self {
        let seen = Seen { way: WAY, under_way: Vec::new(), sent: 0, most: 0, met: Vec::new(), fate: None };
        Self { inner: inner.clone(), seen: Arc::new(Mutex::new(seen)) }
    }

    fn fated(&self, fate: Fate) {
        self.seen.lock().unwrap().fate = Some(fate);
    }

    /// How many transactions were under way at a time, at most.
    fn most(&self) -> usize {
        self.seen.lock().unwrap().most
    }

    fn met(&self) -> Vec<String> {
        self.seen.lock().unwrap().met.clone()
    }
}

/// What a transaction stands on, or writes, beside what all of them do.
fn records(txn: &Txn) -> BTreeSet<String> {
    let compared = txn.when.iter().map(Compare::key);
    let written = txn.then.iter().map(Op::key);
    let own = |key: &&str| *key != keys().prefix().clock() && *key != keys().prefix().epoch();
    compared.chain(written).filter(own).map(str::to_owned).collect()
}

#[async_trait]
impl Layer for Slow {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let records = records(&txn);
        let (number, way) = {
            let mut seen = self.seen.lock().unwrap();
            let met: Vec<String> =
                seen.under_way.iter().flat_map(|(_, other)| other.intersection(&records).cloned()).collect();
            seen.met.extend(met);
            seen.sent += 1;
            let number = seen.sent;
            seen.under_way.push((number, records.clone()));
            seen.most = seen.most.max(seen.under_way.len());
            (number, seen.way)
        };
        sleep(way / 2).await;
        let fate = {
            let mut seen = self.seen.lock().unwrap();
            seen.fate.take_if(|fate| match fate {
                Fate::LosesItsAnswer(key) | Fate::IsTooLate(key) => records.contains(key),
            })
        };
        if let Some(Fate::IsTooLate(key)) = &fate {
            self.inner.txn(Txn::new().put(key.clone(), "7")).await.unwrap();
        }
        let outcome = self.inner.txn(txn).await;
        sleep(way / 2).await;
        self.seen.lock().unwrap().under_way.retain(|(own, _)| *own != number);
        match fate {
            Some(Fate::LosesItsAnswer(_)) => Err(StoreError::Unknown("the answer was lost".into())),
            _ => outcome,
        }
    }
}

struct Cloud {
    store: MemoryStore,
    slow: Slow,
    replica: Replica,
}

impl Cloud {
    /// With so many hosts of as many VCPU each.
    async fn new(hosts: u128, vcpu: i64) -> Self {
        let store = MemoryStore::new();
        // Made by another, so that nothing of it is under way.
        let maker = replica(store.clone());
        for uuid in (0..hosts).map(host) {
            let name = format!("h{}", uuid.as_u128());
            maker.write(Command::CreateProvider { uuid, name, parent: None }).await.unwrap();
            let inventory = Inventory { total: vcpu, ..Inventory::default() };
            let class = intern("VCPU");
            maker.write(Command::AddInventory { provider: uuid, class, inventory }).await.unwrap();
        }
        let slow = Slow::new(&store);
        let replica = replica(slow.clone());
        replica.ready().await.unwrap();
        Self { store, slow, replica }
    }

    /// Sends claims at once, by the numbers of consumer and host; answers how many were done, and how the others
    /// were not.
    async fn claim(&self, claims: impl Iterator<Item = (u128, u128)>) -> (usize, Vec<WriteError>) {
        let mut under_way = JoinSet::new();
        for (number, at) in claims {
            let replica = self.replica.clone();
            under_way.spawn(async move { replica.write(claim(number, host(at))).await });
        }
        let answers = under_way.join_all().await;
        let failed: Vec<WriteError> = answers.iter().filter_map(|answer| answer.clone().err()).collect();
        (answers.len() - failed.len(), failed)
    }

    /// What is used of all hosts, by what is stored.
    async fn used(&self) -> i64 {
        let state = load(&self.store, &keys()).await.unwrap().whole().unwrap();
        state.providers().map(|(_, node)| node.used("VCPU")).sum()
    }
}

fn replica(store: impl Store) -> Replica {
    let (keys, stop) = (keys(), CancellationToken::new());
    Replica::start(Arc::new(store), keys, Limits::default(), Host::default(), stop)
}

fn each_at(hosts: u128, count: u128) -> impl Iterator<Item = (u128, u128)> {
    (0..count).map(move |number| (number, number % hosts))
}

#[tokio::test(start_paused = true)]
async fn what_many_want_of_many_is_under_way_together_and_about_different_records() {
    let cloud = Cloud::new(200, 10).await;
    let began = Instant::now();
    assert_eq!(cloud.claim(each_at(200, 248)).await, (248, Vec::new()));
    // Four transactions' worth; some hosts are wanted twice.
    assert!(began.elapsed() < WAY * 3, "{:?}", began.elapsed());
    assert!(cloud.slow.most() > 1);
    assert_eq!(cloud.slow.met(), Vec::<String>::new());
    assert_eq!((cloud.replica.metrics().conflicts.get(), cloud.used().await), (0, 248));
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fill_a_transaction_shares_the_next() {
    let cloud = Cloud::new(200, 10).await;
    let later = async {
        sleep(WAY / 4).await;
        cloud.claim((100..140).map(|number| (number, number))).await
    };
    let (first, later) = tokio::join!(cloud.claim(each_at(200, 60)), later);
    assert_eq!((first, later), ((60, Vec::new()), (40, Vec::new())));
    assert_eq!(cloud.slow.most(), 1);
}

/// Two of three want the same one.
#[tokio::test(start_paused = true)]
async fn what_all_want_is_never_under_way_twice() {
    let cloud = Cloud::new(200, 1000).await;
    let claims = (0..600).map(|number| (number, if number % 3 == 0 { 1 + number / 3 % 199 } else { 0 }));
    assert_eq!(cloud.claim(claims).await, (600, Vec::new()));
    assert!(cloud.slow.most() > 1);
    assert_eq!(cloud.slow.met(), Vec::<String>::new());
    assert_eq!((cloud.replica.metrics().conflicts.get(), cloud.used().await), (0, 600));
}

/// Claims of everything for a second, all the time as many as four transactions take; and one of a host of which
/// there are always some under way.
#[tokio::test(start_paused = true)]
async fn whoever_waits_for_what_is_under_way_is_not_overtaken_for_ever() {
    let cloud = Cloud::new(30, 1_000_000).await;
    let (stop, mut clients) = (CancellationToken::new(), JoinSet::new());
    for client in 0..250_u128 {
        let (replica, stop) = (cloud.replica.clone(), stop.clone());
        clients.spawn(async move {
            let mut turn = 0;
            while !stop.is_cancelled() {
                // A third of all is of one host.
                let at = if client % 3 == 0 { 0 } else { (client + turn) % 30 };
                replica.write(claim(client, host(at))).await.unwrap();
                turn += 1;
            }
        });
    }
    let mut slowest = Duration::ZERO;
    for number in 0..4 {
        sleep(WAY).await;
        let began = Instant::now();
        cloud.replica.write(claim(9000 + number, host(0))).await.unwrap();
        slowest = slowest.max(began.elapsed());
    }
    stop.cancel();
    clients.join_all().await;
    // 250 are before it, of which sixty and more go at a time.
    assert!(slowest < WAY * 12, "{slowest:?}");
    assert_eq!(cloud.slow.met(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn one_that_meets_others_leaves_those_beside_it() {
    let cloud = Cloud::new(248, 10).await;
    // Another writer is before the second of them.
    cloud.slow.fated(Fate::IsTooLate(format!("/p/generations/{}", host(100))));
    assert_eq!(cloud.claim(each_at(248, 248)).await, (248, Vec::new()));
    assert!(cloud.slow.most() > 1);
    assert_eq!((cloud.replica.metrics().conflicts.get(), cloud.used().await), (1, 248));
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_of_one_is_found_and_leaves_those_beside_it() {
    for lost in [0, 100, 200] {
        let cloud = Cloud::new(248, 10).await;
        cloud.slow.fated(Fate::LosesItsAnswer(format!("/p/consumers/{}", consumer(lost))));
        assert_eq!(cloud.claim(each_at(248, 248)).await, (248, Vec::new()), "{lost}");
        assert!(cloud.slow.most() > 1);
        // Had it been written again, its consumers would be of a later generation.
        let state = load(&cloud.store, &keys()).await.unwrap().whole().unwrap();
        assert!(state.consumers().all(|(_, stored)| stored.record.generation == 1), "{lost}");
        assert_eq!(state.consumer_count(), 248, "{lost}");
        cloud.replica.fresh().await.unwrap();
        assert_eq!(cloud.replica.peek(|state| state.consumer_count()), 248, "{lost}");
    }
}

/// etcd is put back to a moment ago while two transactions are on their way to it, and whoever gave back what they
/// take is there again.
#[tokio::test(start_paused = true)]
async fn an_etcd_that_is_put_back_meanwhile_gives_nothing_twice() {
    for after in [5, 9, 11] {
        let cloud = Cloud::new(130, 1).await;
        assert_eq!(cloud.claim((0..130).map(|number| (1000 + number, number))).await.0, 130);
        let backup = cloud.store.faults().backup();
        for number in 0..130 {
            cloud.replica.write(Command::DeleteAllocations(consumer(1000 + number))).await.unwrap();
        }
        let put_back = async {
            sleep(Duration::from_millis(after)).await;
            cloud.store.faults().restore(&backup);
        };
        let (_, ()) = tokio::join!(cloud.claim(each_at(130, 130)), put_back);
        assert!(cloud.slow.most() > 1);
        let state = load(&cloud.store, &keys()).await.unwrap().whole().unwrap();
        for (_, node) in state.providers() {
            assert_eq!(node.used("VCPU"), 1, "{after}: {}", node.uuid);
        }
        cloud.replica.fresh().await.ok();
        cloud.replica.write(claim(1, host(0))).await.unwrap_err();
        cloud.replica.write(Command::DeleteAllocations(consumer(1000))).await.unwrap();
        cloud.replica.write(claim(1, host(0))).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn etcd_far_away_lets_few_overlap_too() {
    let cloud = Cloud::new(10, 10).await;
    let mut under_way = JoinSet::new();
    cloud.slow.seen.lock().unwrap().way = WAY * 10;
    let began = Instant::now();
    for number in 0..4 {
        let replica = cloud.replica.clone();
        under_way.spawn(async move { replica.write(claim(number, host(number))).await.unwrap() });
        sleep(WAY * 2).await;
    }
    under_way.join_all().await;
    assert!(cloud.slow.most() > 1);
    assert!(began.elapsed() < WAY * 18, "{:?}", began.elapsed());
}

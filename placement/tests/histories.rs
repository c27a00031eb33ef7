//! Histories that once lost capacity, writes or time, each in memory and told step by step.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ec_placement_model::{Command, ConsumerWrite, ExpectedGeneration, Inventory, ModelError, intern};
use ec_runtime::Host;
use ec_store::{
    KeyValue, Layer, Listing, MemoryStore, Revision, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch,
    WatchBatch,
};
use placement::{
    store::{Keys, Limits, Replica, WriteError},
    transfer::load,
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const HOST: Uuid = Uuid::from_u128(0x1000);

fn keys() -> Keys {
    Keys::new("/p")
}

fn replica_with(store: impl Store, limits: Limits) -> Replica {
    Replica::start(Arc::new(store), keys(), limits, Host::default(), CancellationToken::new())
}

fn replica(store: &MemoryStore) -> Replica {
    replica_with(store.clone(), Limits::default())
}

async fn host(replica: &Replica, uuid: Uuid, vcpu: i64) {
    let name = format!("h{}", uuid.as_u128());
    replica.write(Command::CreateProvider { uuid, name, parent: None }).await.unwrap();
    let inventory = Inventory { total: vcpu, ..Inventory::default() };
    let class = intern("VCPU");
    replica.write(Command::AddInventory { provider: uuid, class, inventory }).await.unwrap();
}

fn consumer(number: u128) -> Uuid {
    Uuid::from_u128(0x2000 + number)
}

fn claim_of(number: u128, hosts: &[Uuid], amount: i64) -> ConsumerWrite {
    let allocations = hosts.iter().map(|host| (*host, vec![(intern("VCPU"), amount)])).collect();
    ConsumerWrite {
        uuid: consumer(number),
        generation: ExpectedGeneration::Any,
        owner: Some((intern("project"), intern("user"))),
        consumer_type: None,
        allocations,
    }
}

fn claim(number: u128, amount: i64) -> Command {
    Command::SetAllocations(vec![claim_of(number, &[HOST], amount)])
}

/// What is used of the host, by what is stored.
async fn used(store: &MemoryStore) -> i64 {
    let state = load(store, &keys()).await.unwrap().whole().unwrap();
    state.find(&HOST).map_or(0, |node| node.used("VCPU"))
}

/// Something else in the same etcd: statuses of agents, leases.
async fn others_write(store: &MemoryStore, times: usize) {
    for _ in 0..times {
        store.txn(Txn::new().put("/elsewhere", "")).await.unwrap();
    }
}

async fn until_it_is_ready(replica: &Replica) {
    let end = Instant::now() + Duration::from_secs(5);
    while let Err(why) = replica.ready().await {
        assert!(Instant::now() < end, "not ready: {why}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_did_not_see_etcd_go_back_claims_nothing_twice() {
    // Whether the watch tells of its end or not, and whether the revision was overtaken or not.
    for (silent, others) in [(false, 0), (true, 0), (false, 40), (true, 40)] {
        let store = MemoryStore::new();
        let replica = replica(&store);
        host(&replica, HOST, 8).await;
        replica.write(claim(1, 4)).await.unwrap();
        let backup = store.faults().backup();
        replica.write(Command::DeleteAllocations(consumer(1))).await.unwrap();
        replica.fresh().await.unwrap();
        if silent {
            store.faults().freeze_watches();
        }
        store.faults().restore(&backup);
        others_write(&store, others).await;
        // It knows of none used. In etcd there are 4 of 8.
        let answer = replica.write(claim(2, 8)).await;
        assert!(answer.is_err(), "silent {silent}, {others} others: {answer:?}");
        assert_eq!(used(&store).await, 4, "silent {silent}, {others} others");
        // Soon it knows, and writes, too.
        let end = Instant::now() + Duration::from_secs(25);
        while replica.write(claim(2, 4)).await.is_err() {
            assert!(Instant::now() < end, "silent {silent}, {others} others: no write any more");
            sleep(Duration::from_millis(100)).await;
        }
        let answer = replica.write(claim(3, 1)).await;
        let full = matches!(answer, Err(WriteError::Refused(ModelError::CapacityExceeded { .. })));
        assert!(full, "{answer:?}");
        assert_eq!(used(&store).await, 8);
        until_it_is_ready(&replica).await;
    }
}

#[tokio::test(start_paused = true)]
async fn another_replica_that_writes_first_does_not_make_an_old_view_pass() {
    let store = MemoryStore::new();
    let stale = replica(&store);
    host(&stale, HOST, 8).await;
    stale.write(claim(1, 4)).await.unwrap();
    let backup = store.faults().backup();
    stale.write(Command::DeleteAllocations(consumer(1))).await.unwrap();
    stale.fresh().await.unwrap();
    // Its connection is gone and says nothing.
    store.faults().freeze_watches();
    store.faults().restore(&backup);
    // A new one writes elsewhere: the clock is beyond all that the old one knows.
    let other = replica(&store);
    for number in 0..30 {
        let name = intern(&format!("CUSTOM_{number}"));
        other.write(Command::EnsureTrait(name)).await.unwrap();
    }
    assert!(stale.write(claim(2, 8)).await.is_err());
    assert_eq!(used(&store).await, 4);
    assert!(stale.fresh().await.is_err() || stale.peek(|state| state.find(&HOST).unwrap().used("VCPU")) == 4);
    until_it_is_ready(&stale).await;
    stale.write(claim(2, 4)).await.unwrap();
    assert_eq!(used(&store).await, 8);
}

#[tokio::test(start_paused = true)]
async fn replicas_that_had_written_write_again_after_etcd_went_back_or_was_emptied() {
    for empty in [false, true] {
        let store = MemoryStore::new();
        let replicas = [replica(&store), replica(&store)];
        host(&replicas[0], HOST, 8).await;
        let backup = store.faults().backup();
        for number in 0..20 {
            replicas[0].write(claim(1, 1 + number % 4)).await.unwrap();
        }
        if empty {
            store.faults().wipe();
        } else {
            store.faults().restore(&backup);
        }
        let began = Instant::now();
        for replica in &replicas {
            until_it_is_ready(replica).await;
            replica.write(Command::EnsureTrait(intern("CUSTOM_AGAIN"))).await.unwrap();
        }
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        let found = replicas[1].write(claim(1, 1)).await;
        assert_eq!(found.is_err(), empty, "{found:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_that_no_watch_told_of_is_missed_at_the_next() {
    let store = MemoryStore::new();
    let (reader, writer) = (replica(&store), replica(&store));
    host(&writer, HOST, 8).await;
    reader.fresh().await.unwrap();
    store.faults().lose_events(1);
    writer.write(claim(1, 3)).await.unwrap();
    writer.write(Command::EnsureTrait(intern("CUSTOM_NEXT"))).await.unwrap();
    let end = Instant::now() + Duration::from_secs(5);
    while reader.fresh().await.is_err() {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(reader.peek(|state| state.find(&HOST).unwrap().used("VCPU")), 3);
    until_it_is_ready(&writer).await;
    writer.write(claim(2, 3)).await.unwrap();
}

/// Sends all commands at once; answers how many were done.
async fn all_at_once(replica: &Replica, commands: Vec<Command>) -> (usize, Vec<WriteError>) {
    let mut under_way = tokio::task::JoinSet::new();
    for command in commands {
        let replica = replica.clone();
        under_way.spawn(async move { replica.write(command).await });
    }
    let answers = under_way.join_all().await;
    let failed: Vec<WriteError> = answers.iter().filter_map(|answer| answer.clone().err()).collect();
    (answers.len() - failed.len(), failed)
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_into_a_transaction_takes_nothing_with_it() {
    let store = MemoryStore::new();
    let replica = replica(&store);
    let hosts: Vec<Uuid> = (0..100).map(|number| Uuid::from_u128(0x1000 + number)).collect();
    for uuid in &hosts {
        host(&replica, *uuid, 1000).await;
    }
    // Three records for each claim: the 43rd makes 129 conditions.
    let pairs = |number: u128| {
        let at = usize::try_from(number).unwrap() % 50;
        Command::SetAllocations(vec![claim_of(number, &[hosts[at * 2], hosts[at * 2 + 1]], 1)])
    };
    let (done, failed) = all_at_once(&replica, (0..50).map(pairs).collect()).await;
    assert_eq!((done, failed), (50, Vec::new()));
    // One shared, one of its own.
    let shared = |number: u128| {
        let own = hosts[1 + usize::try_from(number).unwrap() % 90];
        Command::SetAllocations(vec![claim_of(100 + number, &[hosts[0], own], 1)])
    };
    let (done, failed) = all_at_once(&replica, (0..80).map(shared).collect()).await;
    assert_eq!((done, failed), (80, Vec::new()));
    // Beside those that are too large for any transaction.
    let large = |first: u128| {
        Command::SetAllocations((0..150).map(|more| claim_of(first + more, &[HOST], 1)).collect())
    };
    let mut mixed: Vec<Command> = Vec::new();
    for number in 0..60 {
        mixed.push(claim(1000 + number, 1));
        if number % 20 == 3 {
            mixed.push(large(5000 + 1000 * number));
        }
    }
    let (done, failed) = all_at_once(&replica, mixed).await;
    assert_eq!(done, 60);
    assert!(failed.iter().all(|error| matches!(error, WriteError::TooBig { .. })), "{failed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_etcd_refuses_is_halved() {
    // Told a limit that etcd does not have.
    let (store, limits) = (MemoryStore::new(), Limits { operations: 10_000 });
    let replica = replica_with(store.clone(), limits);
    host(&replica, HOST, 1000).await;
    let (done, failed) = all_at_once(&replica, (0..400).map(|number| claim(number, 1)).collect()).await;
    assert_eq!((done, failed), (400, Vec::new()));
    // Only what is too large by itself is refused.
    let large = Command::SetAllocations((0..200).map(|more| claim_of(1000 + more, &[HOST], 1)).collect());
    let (done, failed) = all_at_once(&replica, vec![claim(900, 1), large, claim(901, 1)]).await;
    assert_eq!((done, failed.len()), (2, 1), "{failed:?}");
    assert!(matches!(failed[0], WriteError::NotTaken(_)), "coming again will not help: {failed:?}");
    assert_eq!(used(&store).await, 402);
}

#[tokio::test(start_paused = true)]
async fn one_consumer_twice_in_a_command_is_refused() {
    let store = MemoryStore::new();
    let replica = replica(&store);
    host(&replica, HOST, 8).await;
    replica.write(claim(1, 4)).await.unwrap();
    replica.write(claim(2, 4)).await.unwrap();
    let twice = vec![claim_of(1, &[HOST], 1), claim_of(1, &[HOST], 7)];
    for command in [
        Command::SetAllocations(twice.clone()),
        Command::Reshape { inventories: Vec::new(), consumers: twice },
    ] {
        let answer = replica.write(command).await;
        assert_eq!(answer, Err(WriteError::Refused(ModelError::ConsumerTwice(consumer(1)))));
    }
    assert_eq!(used(&store).await, 8);
}

/// A store some way off: everything takes its time, there and back.
#[derive(Clone)]
struct Far {
    inner: MemoryStore,
    way: Duration,
    /// Panics at the next transaction.
    breaks: Arc<AtomicBool>,
    /// Answers of transactions are lost from now on.
    loses: Arc<AtomicBool>,
}

impl Far {
    fn new(inner: &MemoryStore, micros: u64) -> Self {
        let way = Duration::from_micros(micros);
        Self { inner: inner.clone(), way, breaks: Arc::default(), loses: Arc::default() }
    }

    async fn there_and_back<T>(&self, work: impl Future<Output = T>) -> T {
        sleep(self.way).await;
        let done = work.await;
        sleep(self.way).await;
        done
    }
}

#[async_trait]
impl Layer for Far {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        self.there_and_back(self.inner.get(key)).await
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.there_and_back(self.inner.get_at(key, revision)).await
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.there_and_back(self.inner.list(prefix)).await
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        assert!(!self.breaks.load(Ordering::Relaxed), "a fault in the program");
        let outcome = self.there_and_back(self.inner.txn(txn)).await;
        if self.loses.load(Ordering::Relaxed) {
            return Err(StoreError::Unknown("the answer was lost".into()));
        }
        outcome
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        let inner = self.there_and_back(self.inner.watch(prefix, from)).await?;
        let (sender, events) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(forward(inner, sender));
        Ok(Box::new(FarWatch { events, way: self.way }))
    }
}

type Told = (Instant, StoreResult<WatchBatch>);

async fn forward(mut watch: Box<dyn Watch>, to: tokio::sync::mpsc::UnboundedSender<Told>) {
    loop {
        let told = tokio::select! {
            told = watch.next() => told,
            () = to.closed() => return,
        };
        let over = told.is_err();
        if to.send((Instant::now(), told)).is_err() || over {
            return;
        }
    }
}

struct FarWatch {
    events: tokio::sync::mpsc::UnboundedReceiver<Told>,
    way: Duration,
}

#[async_trait]
impl Watch for FarWatch {
    async fn next(&mut self) -> StoreResult<WatchBatch> {
        match self.events.recv().await {
            Some((at, told)) => {
                tokio::time::sleep_until(at + self.way).await;
                told
            }
            None => Err(StoreError::Unknown("over".into())),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_far_replica_gets_its_turn_beside_a_near_one() {
    let store = MemoryStore::new();
    let near = replica_with(Far::new(&store, 200), Limits::default());
    let far = replica_with(Far::new(&store, 10_000), Limits::default());
    host(&near, HOST, 1_000_000).await;
    let stop = CancellationToken::new();
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..4_u128 {
        let (near, stop) = (near.clone(), stop.clone());
        clients.spawn(async move {
            let mut done = 0_usize;
            while !stop.is_cancelled() {
                near.write(claim(client, 1)).await.unwrap();
                done += 1;
            }
            done
        });
    }
    sleep(Duration::from_secs(1)).await;
    let mut slowest = Duration::ZERO;
    for number in 0..20 {
        let began = Instant::now();
        far.write(claim(1000 + number, 1)).await.unwrap();
        slowest = slowest.max(began.elapsed());
    }
    let took = Instant::now();
    stop.cancel();
    let done: usize = clients.join_all().await.into_iter().sum();
    assert!(slowest < Duration::from_secs(2), "the slowest took {slowest:?}");
    assert!(done > 1000, "the near one did only {done}, {took:?}");
    assert!(far.metrics().turns.get() > 0, "without a turn this shows nothing");
}

#[tokio::test(start_paused = true)]
async fn contention_is_called_that_and_counted() {
    let store = MemoryStore::new();
    let replica = replica_with(Far::new(&store, 1_000), Limits::default());
    host(&replica, HOST, 1000).await;
    // Somebody who knows of no turns changes the provider all the time.
    let (rude, stop) = (store.clone(), CancellationToken::new());
    let stopped = stop.clone();
    let key = format!("/p/generations/{HOST}");
    tokio::spawn(async move {
        while !stopped.is_cancelled() {
            rude.txn(Txn::new().put(key.clone(), "2")).await.unwrap();
            sleep(Duration::from_micros(300)).await;
        }
    });
    let error = replica.write(claim(1, 1)).await.unwrap_err().to_string();
    assert!(error.contains("contention") && error.contains("nothing was done"), "{error}");
    assert_eq!(replica.metrics().contention.get(), 1);
    stop.cancel();
    until_it_is_ready(&replica).await;
    replica.write(claim(1, 1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_was_lost_is_told_as_not_known() {
    let store = MemoryStore::new();
    let far = Far::new(&store, 100);
    let replica = replica_with(far.clone(), Limits::default());
    host(&replica, HOST, 8).await;
    far.loses.store(true, Ordering::Relaxed);
    // With the watch gone, too, it cannot be looked up.
    store.faults().freeze_watches();
    let error = replica.write(claim(1, 1)).await.unwrap_err().to_string();
    assert!(error.contains("not known whether"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_task_that_dies_is_told_and_nothing_is_ready_any_more() {
    let store = MemoryStore::new();
    let far = Far::new(&store, 100);
    let replica = replica_with(far.clone(), Limits::default());
    host(&replica, HOST, 8).await;
    until_it_is_ready(&replica).await;
    far.breaks.store(true, Ordering::Relaxed);
    assert!(replica.write(claim(1, 1)).await.is_err());
    let told = replica.failed().await;
    assert!(told.contains("writing to etcd panicked: a fault in the program"), "{told}");
    assert!(replica.ready().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn ready_means_that_writes_work() {
    let store = MemoryStore::new();
    let replica = replica(&store);
    until_it_is_ready(&replica).await;
    // Reads work, writes do not: etcd is full.
    sleep(Duration::from_secs(60)).await;
    store.faults().fail_writes(Some(StoreError::Full("database space exceeded".into())));
    let why = replica.ready().await.unwrap_err().to_string();
    assert!(why.contains("space exceeded"), "{why}");
    replica.fresh().await.unwrap();
    store.faults().fail_writes(None);
    replica.ready().await.unwrap();
    // Asked often, it does not write each time.
    let before = store.revision();
    for _ in 0..100 {
        replica.ready().await.unwrap();
    }
    assert_eq!(store.revision(), before);
}

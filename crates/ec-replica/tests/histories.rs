//! A model that is not placement's, on the same view, barrier and committer: random histories of two replicas that write
//! and one reader that only reads, on a store that breaks in every way it can.
//!
//! Of no project is ever taken more than its limit. Who was told that something is taken, or given back, finds it so
//! through every other; what was refused is not there, and of what was told as not known either is. An etcd that was put
//! back is noticed, also where transactions to the one before are on their way. In the end all know the same, which is
//! what is stored. `SEED=n` runs one history.
#![expect(clippy::unwrap_used, reason = "what tests share")]

mod late;
mod quota;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ec_replica::{Limits, Model, Reader, Replica, WriteError};
use ec_runtime::Host;
use ec_store::{MemoryStore, Store, StoreError};
use late::{LATEST, Late};
use quota::{Command, Key, Quota, Refusal, State};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

const HISTORIES: u64 = 30;
const ROUNDS: usize = 10;
const PROJECTS: usize = 3;
const TAKERS: usize = 12;

fn project(number: usize) -> Arc<str> {
    format!("p{number}").into()
}

/// What a store's content stands for.
fn stored(store: &MemoryStore) -> State {
    let (model, mut state) = (Quota::new(), State::default());
    for pair in store.content(model.prefix().as_str()).pairs {
        if model.prefix().common(&pair.key).is_none() {
            Quota::apply(&mut state, model.read(&pair).into_changes().into_iter().flatten());
        }
    }
    state
}

struct World {
    store: MemoryStore,
    late: Late,
    replicas: [Replica<Quota>; 2],
    reader: Reader<Quota>,
    /// How often the content was replaced.
    era: AtomicU64,
}

impl World {
    fn new(seed: u64) -> Self {
        let store = MemoryStore::new();
        let late = Late::new(&store, seed, |store| {
            let state = stored(store);
            (0..PROJECTS).find_map(|number| {
                let (taken, limit) = (state.taken(&project(number)), state.get(&Key::Limit(project(number))));
                (taken > limit.unwrap_or(0)).then(|| format!("{taken} of {limit:?} are taken of {number}"))
            })
        });
        let door: Arc<dyn Store> = Arc::new(late.clone());
        let (model, host, stop) = (Quota::new(), Host::default(), CancellationToken::new());
        let limits = Limits { operations: 24 };
        let replica = || Replica::start(Arc::clone(&door), model.clone(), limits, host.clone(), stop.clone());
        let replicas = [replica(), replica()];
        let reader = Reader::start(door, model, stop);
        Self { store, late, replicas, reader, era: AtomicU64::new(0) }
    }

    fn break_something(&self, dice: &mut StdRng) {
        let faults = self.store.faults();
        match dice.random_range(0..7) {
            0 => faults.lose_answers(dice.random_range(1..3)),
            1 => faults.fail_next(dice.random_range(1..4), StoreError::Unknown("on request".into())),
            2 => faults.break_watches(),
            3 => faults.restart(),
            4 => faults.lose_events(1),
            5 => {
                faults.set_reachable(false);
                tokio::spawn(async move {
                    sleep(Duration::from_millis(300)).await;
                    faults.set_reachable(true);
                });
            }
            _ => {
                let (store, revision) = (self.store.clone(), self.store.revision());
                tokio::spawn(async move { store.compact(revision).await });
            }
        }
    }

    /// What was acknowledged is seen through all that can be asked, if the store is the same all the while.
    async fn is_seen(&self, key: &Key, number: Option<i64>, era: u64) {
        let others = [&*self.replicas[0], &*self.replicas[1], &self.reader];
        for (at, other) in others.into_iter().enumerate() {
            if other.fresh().await.is_ok() {
                let seen = other.peek(|state| state.get(key));
                let same = self.era.load(Ordering::Relaxed) == era;
                assert!(!same || seen == number, "{key:?} is {seen:?} and not {number:?} at {at}");
            }
        }
    }
}

/// One of those who take and give back. It knows what of its own may be stored.
struct Taker {
    dice: StdRng,
    name: Arc<str>,
    possible: HashMap<usize, Vec<Option<i64>>>,
    /// Of which content it knows that.
    era: u64,
}

impl Taker {
    /// Takes something, or gives it back, and looks whether that is so.
    async fn act(&mut self, world: &World) {
        let number = self.dice.random_range(0..PROJECTS);
        let amount = self.dice.random_bool(0.7).then(|| self.dice.random_range(1..6));
        let command = match amount {
            Some(amount) => Command::Take(project(number), Arc::clone(&self.name), amount),
            None => Command::Give(project(number), Arc::clone(&self.name)),
        };
        let (key, era) = (self.key(number), world.era.load(Ordering::Relaxed));
        let answer = world.replicas[self.dice.random_range(0..2)].write(command).await;
        let possible = self.possible.entry(number).or_insert_with(|| vec![None]);
        match answer {
            Ok(_) => {
                *possible = vec![amount];
                world.is_seen(&key, amount, era).await;
            }
            Err(WriteError::Refused(Refusal::NothingTaken)) => {
                let replaced = world.era.load(Ordering::Relaxed) != self.era;
                assert!(replaced || possible.contains(&None), "{key:?} may be {possible:?}");
            }
            Err(WriteError::Refused(Refusal::Over(taken, limit))) => assert!(taken > limit),
            Err(error) => {
                assert!(matches!(error, WriteError::Unavailable(_)), "{error}");
                possible.push(amount);
            }
        }
    }

    fn key(&self, number: usize) -> Key {
        Key::Take(project(number), Arc::clone(&self.name))
    }

    /// Holds what is stored to what was answered. Where the content was replaced meanwhile, that counts from now on.
    fn compare(&mut self, state: &State, era: u64) {
        let replaced = self.era != era;
        self.era = era;
        for number in 0..PROJECTS {
            let (there, key) = (state.get(&self.key(number)), self.key(number));
            let possible = self.possible.entry(number).or_insert_with(|| vec![None]);
            assert!(replaced || possible.contains(&there), "{key:?} is {there:?} and not {possible:?}");
            *possible = vec![there];
        }
    }
}

async fn limit(world: &World, number: usize, limit: i64) {
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(error) = world.replicas[0].write(Command::Limit(project(number), limit)).await {
        assert!(Instant::now() < end, "{error}");
    }
}

async fn history(seed: u64) {
    let mut dice = StdRng::seed_from_u64(seed);
    let world = Arc::new(World::new(seed));
    for number in 0..PROJECTS {
        limit(&world, number, dice.random_range(5..30)).await;
    }
    let mut backup = world.store.faults().backup();
    let taker = |number: usize| Taker {
        dice: StdRng::seed_from_u64(seed * 1000 + number as u64),
        name: format!("t{number}").into(),
        possible: HashMap::new(),
        era: 0,
    };
    let mut takers: Vec<Taker> = (0..TAKERS).map(taker).collect();
    for _ in 0..ROUNDS {
        world.late.set_stormy(dice.random_bool(0.7));
        let mut under_way = JoinSet::new();
        for mut taker in takers.drain(..) {
            let world = Arc::clone(&world);
            under_way.spawn(async move {
                for _ in 0..4 {
                    taker.act(&world).await;
                }
                taker
            });
        }
        for _ in 0..dice.random_range(0..3) {
            sleep(Duration::from_millis(dice.random_range(1..60))).await;
            world.break_something(&mut dice);
        }
        if dice.random_bool(0.3) {
            sleep(Duration::from_millis(dice.random_range(1..60))).await;
            if dice.random_bool(0.5) {
                world.store.faults().freeze_watches();
            }
            world.era.fetch_add(1, Ordering::Relaxed);
            world.store.faults().restore(&backup);
        } else if dice.random_bool(0.3) {
            backup = world.store.faults().backup();
        }
        takers = under_way.join_all().await;
        world.late.set_stormy(false);
        sleep(LATEST).await;
        let state = stored(&world.store);
        let era = world.era.load(Ordering::Relaxed);
        takers.iter_mut().for_each(|taker| taker.compare(&state, era));
        assert_eq!(world.late.findings(), Vec::<String>::new());
    }
    let end = Instant::now() + Duration::from_secs(60);
    for replica in &world.replicas {
        while let Err(why) = replica.ready().await {
            assert!(Instant::now() < end, "not ready: {why}");
            sleep(Duration::from_millis(100)).await;
        }
    }
    limit(&world, 0, 1000).await;
    let known = [&*world.replicas[0], &*world.replicas[1], &world.reader];
    for (at, reader) in known.into_iter().enumerate() {
        while let Err(why) = reader.fresh().await {
            assert!(Instant::now() < end, "{at} is not up to date: {why}");
        }
        assert_eq!(*reader.copy(), stored(&world.store), "{at}");
    }
    let conflicts: u64 = world.replicas.iter().map(|replica| replica.metrics().conflicts.get()).sum();
    assert!(conflicts > 0, "the replicas never met: this shows nothing");
}

#[test]
fn a_quota_holds_whatever_breaks() {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => {
            let seed = seed.parse().unwrap();
            seed..seed + 1
        }
        Err(_) => 0..HISTORIES,
    };
    for seed in seeds {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(history(seed))));
        assert!(told.is_ok(), "SEED={seed}");
    }
}

/// A record that cannot be read is reported, and the others are what they are.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_costs_what_stands_on_it() {
    let world = World::new(0);
    limit(&world, 0, 10).await;
    limit(&world, 1, 10).await;
    world.store.txn(ec_store::Txn::new().put("/q/limits/p1", "ten")).await.unwrap();
    world.store.txn(ec_store::Txn::new().put("/q/elsewhere", "")).await.unwrap();
    let take = |number| Command::Take(project(number), "a".into(), 3);
    world.replicas[1].write(take(0)).await.unwrap();
    let refused = world.replicas[1].write(take(1)).await;
    assert_eq!(refused, Err(WriteError::Refused(Refusal::Over(3, 0))));
    limit(&world, 1, 10).await;
    world.replicas[1].write(take(1)).await.unwrap();
    world.replicas[1].write(Command::Give(project(2), "a".into())).await.unwrap_err();
}

/// What stands on a record of which the state knows no revision never passes. Those that it shares a batch with do.
#[tokio::test(start_paused = true)]
async fn what_never_passes_takes_nothing_with_it() {
    let world = World::new(0);
    for number in 0..PROJECTS {
        limit(&world, number, 10).await;
    }
    let replica = &world.replicas[1];
    replica.fresh().await.unwrap();
    world.store.txn(ec_store::Txn::new().put("/q/limits/hidden", quota::HIDDEN)).await.unwrap();
    replica.fresh().await.unwrap();
    let began = Instant::now();
    let take = async |number| {
        replica.write(Command::Take(project(number), "a".into(), 3)).await.unwrap();
        began.elapsed()
    };
    // They meet in one batch.
    let never = replica.write(Command::Limit("hidden".into(), 10));
    let (first, never, second) = tokio::join!(take(0), never, take(1));
    let told = matches!(&never, Err(WriteError::Unavailable(why)) if why.0.contains("nothing was done"));
    assert!(told, "{never:?}");
    assert!(first.max(second) < Duration::from_secs(1), "they took {first:?} and {second:?}");
}

#[tokio::test(start_paused = true)]
async fn an_epoch_that_somebody_put_by_hand_keeps_nobody_from_writing() {
    let store = MemoryStore::new();
    let replica = replica_of(&store);
    replica.write(Command::Limit(project(0), 10)).await.unwrap();
    store.txn(ec_store::Txn::new().put("/q/epoch", vec![b'x'; 5 << 18])).await.unwrap();
    replica.write(Command::Take(project(0), "a".into(), 3)).await.unwrap();
    assert_eq!(stored(&store).taken("p0"), 3);
}

fn replica_of(store: &MemoryStore) -> Replica<Quota> {
    let limits = Limits { operations: 24 };
    let door = Arc::new(store.clone());
    Replica::start(door, Quota::new(), limits, Host::default(), CancellationToken::new())
}

/// etcd is put back, and what another replica writes then has the revision that was known of what was lost.
#[tokio::test(start_paused = true)]
async fn a_revision_of_another_history_does_not_pass() {
    let store = MemoryStore::new();
    let replica = || replica_of(&store);
    let take = |taker: &str| Command::Take(project(0), taker.into(), 8);
    let stale = replica();
    stale.write(Command::Limit(project(0), 10)).await.unwrap();
    let backup = store.faults().backup();
    stale.write(Command::Limit(project(0), 10)).await.unwrap();
    stale.fresh().await.unwrap();
    // It does not hear of any of this.
    store.faults().freeze_watches();
    let known = store.revision();
    store.faults().restore(&backup);
    replica().write(take("a")).await.unwrap();
    assert_eq!(store.revision(), known, "else this shows nothing");
    stale.write(take("b")).await.unwrap_err();
    assert_eq!(stored(&store).taken("p0"), 8);
    // Soon it knows.
    let end = Instant::now() + Duration::from_secs(30);
    while let Err(why) = stale.ready().await {
        assert!(Instant::now() < end, "{why}");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(stale.write(take("b")).await, Err(WriteError::Refused(Refusal::Over(16, 10))));
    assert_eq!(*stale.copy(), stored(&store));
}

/// etcd is put back twice, and another replica writes after each at the same revision.
#[tokio::test(start_paused = true)]
async fn one_of_two_histories_behind_a_backup_does_not_pass_for_the_other() {
    let store = MemoryStore::new();
    let replica = || replica_of(&store);
    let take = |taker: &str, amount| Command::Take(project(0), taker.into(), amount);
    replica().write(Command::Limit(project(0), 10)).await.unwrap();
    let backup = store.faults().backup();
    replica().write(take("a", 4)).await.unwrap();
    let stale = replica();
    stale.fresh().await.unwrap();
    let known = store.revision();
    store.faults().freeze_watches();
    store.faults().restore(&backup);
    replica().write(take("c", 8)).await.unwrap();
    assert_eq!(store.revision(), known, "else this shows nothing");
    stale.write(take("b", 4)).await.unwrap_err();
    assert_eq!(stored(&store).taken("p0"), 8);
}

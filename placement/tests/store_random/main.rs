//! Random histories of several replicas on one store that breaks in every way it can, against a model.
//!
//! After every transaction what is stored fits together and nothing is over capacity; at the end every write
//! that was acknowledged is there exactly once, every refused one is not, one of unknown outcome is there
//! wholly or not at all, and all replicas know the same, their indexes included. `SEED=n` runs one history,
//! `SEEDS=n` so many.
#![expect(clippy::unwrap_used, reason = "what tests share")]

mod audit;
mod portrait;
mod shaky;

use std::{collections::HashMap, sync::Arc};

use audit::decode;
use ec_placement_model::{
    Amounts, Command, ConsumerWrite, ExpectedGeneration, Inventory, Name, State, intern,
};
use ec_runtime::Host;
use ec_store::{Backup, MemoryStore, Store, StoreError, Txn};
use placement::{
    store::{Keys, Limits, Replica, WriteError},
    transfer::{Snapshot, import},
};
use portrait::{differences, portrait};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use shaky::{LATEST, OnTheirWay, Shaky};
use tokio::time::{Duration, sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const PROVIDERS: u128 = 4;
const CONSUMERS: u128 = 10;
const STEPS: usize = 60;

/// What a consumer may be: its allocations and its generation.
type Possible = Option<(Vec<(Uuid, Amounts)>, i64)>;

struct History {
    dice: StdRng,
    store: MemoryStore,
    /// What replicas have of the store.
    shaky: Shaky,
    keys: Keys,
    replicas: Vec<(Replica, CancellationToken)>,
    /// Every state that a consumer may be in, by what was answered so far.
    possible: HashMap<Uuid, Vec<Possible>>,
    /// What writes of unknown outcome would make of consumers that are not there, until they cannot be under way.
    late: HashMap<Uuid, Vec<Possible>>,
    unknown: usize,
    acknowledged: usize,
    /// What the store held some time ago.
    backup: Option<Backup>,
    restored: usize,
}

fn host(number: u128) -> Uuid {
    Uuid::from_u128(0x1000 + number)
}

fn vcpu() -> Name {
    intern("VCPU")
}

/// What becomes of a consumer by a write.
fn after(before: &Possible, allocations: &[(Uuid, Amounts)]) -> Possible {
    let generation = before.as_ref().map_or(0, |(_, generation)| *generation);
    (!allocations.is_empty()).then(|| (allocations.to_vec(), generation + 1))
}

impl History {
    fn new(seed: u64) -> Self {
        let (store, keys) = (MemoryStore::new(), Keys::new("/p"));
        Self {
            dice: StdRng::seed_from_u64(seed),
            shaky: Shaky::new(store.clone(), keys.clone(), seed),
            store,
            keys,
            replicas: Vec::new(),
            possible: HashMap::new(),
            late: HashMap::new(),
            unknown: 0,
            acknowledged: 0,
            backup: None,
            restored: 0,
        }
    }

    /// What a consumer may be by now: what it was last known to be, or, where that is nothing, what a write made it
    /// of which it is not known whether it happened: it may come late.
    fn possible(&self, consumer: &Uuid) -> Vec<Possible> {
        let mut states = self.possible.get(consumer).cloned().unwrap_or_else(|| vec![None]);
        if states.contains(&None) {
            states.extend(self.late.get(consumer).into_iter().flatten().cloned());
        }
        states
    }

    fn start_replica(&mut self) {
        let store: Arc<dyn Store> = Arc::new(self.shaky.clone());
        let stop = CancellationToken::new();
        let limits = Limits { operations: self.dice.random_range(16..64) };
        let replica = Replica::start(store, self.keys.clone(), limits, Host::default(), stop.clone());
        self.replicas.push((replica, stop));
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.dice.random_ratio(percent, 100)
    }

    fn some_host(&mut self) -> Uuid {
        host(self.dice.random_range(0..PROVIDERS))
    }

    fn break_something(&mut self) {
        let faults = self.store.faults();
        match self.dice.random_range(0..8) {
            0 => faults.lose_answers(self.dice.random_range(1..3)),
            1 => faults.fail_next(self.dice.random_range(1..4), StoreError::Unknown("on request".into())),
            2 => faults.break_watches(),
            3 => faults.restart(),
            4 if self.replicas.len() > 1 => {
                let at = self.dice.random_range(0..self.replicas.len());
                let (_, stop) = self.replicas.swap_remove(at);
                stop.cancel();
            }
            5 if self.replicas.len() < 3 => self.start_replica(),
            6 => {
                faults.set_reachable(false);
                let faults = faults.clone();
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

    fn claim(&mut self, consumer: Uuid) -> ConsumerWrite {
        let mut allocations: Vec<(Uuid, Amounts)> = Vec::new();
        for _ in 0..self.dice.random_range(0..3) {
            let provider = self.some_host();
            if allocations.iter().all(|(own, _)| *own != provider) {
                allocations.push((provider, vec![(vcpu(), self.dice.random_range(1..5))]));
            }
        }
        let known = self.possible(&consumer);
        let generation = match known.as_slice() {
            [one] if self.dice.random_bool(0.6) => {
                ExpectedGeneration::Exactly(one.as_ref().map(|(_, generation)| *generation))
            }
            _ => ExpectedGeneration::Any,
        };
        let owner = Some((intern("project"), intern("user")));
        ConsumerWrite { uuid: consumer, generation, owner, consumer_type: None, allocations }
    }

    /// Changes that the model does not follow: that they fit together is looked at in what is stored.
    fn other(&mut self) -> Command {
        let (provider, class) = (self.some_host(), intern("CUSTOM_C"));
        match self.dice.random_range(0..9) {
            0 => Command::CreateProvider {
                uuid: provider,
                name: format!("h{}", provider.as_u128()),
                parent: None,
            },
            1 => Command::DeleteProvider(provider),
            2 => {
                let parent = if self.chance(30) { None } else { Some(self.some_host()) };
                // Which may be of no characters.
                let name = if self.chance(20) { String::new() } else { format!("h{}", provider.as_u128()) };
                Command::UpdateProvider { uuid: provider, name, parent: Some(parent), may_move: true }
            }
            3 => Command::EnsureTrait(intern("CUSTOM_T")),
            4 => Command::DeleteTrait(intern("CUSTOM_T")),
            5 => Command::SetTraits { provider, generation: None, traits: vec![intern("CUSTOM_T")] },
            6 => Command::EnsureClass(class),
            7 => Command::DeleteClass(class),
            _ => Command::AddInventory {
                provider,
                class,
                inventory: Inventory { total: 5, ..Inventory::default() },
            },
        }
    }

    /// An older content takes the place of the present one. What was written since is lost, and that is no
    /// fault; but nobody may go on as if it were there. Others write at once, so that the revisions that the
    /// replicas know are soon overtaken.
    async fn restore(&mut self) {
        let Some(backup) = self.backup.take() else { return };
        self.put_back(&backup, OnTheirWay::AreLost).await;
        self.late.clear();
        self.take_as_it_is();
    }

    async fn put_back(&mut self, backup: &Backup, on_their_way: OnTheirWay) {
        let faults = self.store.faults();
        if self.chance(30) {
            faults.freeze_watches();
        }
        faults.restore(backup);
        self.shaky.replaced(on_their_way);
        self.restored += 1;
        for _ in 0..self.dice.random_range(0..120) {
            self.store.txn(Txn::new().put("/others", "")).await.ok();
        }
    }

    /// What is stored is what there is, whatever was answered.
    fn take_as_it_is(&mut self) {
        let state = self.stored();
        for uuid in (0..CONSUMERS).map(|number| Uuid::from_u128(0x2000 + number)) {
            self.possible.insert(uuid, vec![possible(&state, &uuid)]);
        }
    }

    /// etcd is put back to a moment ago while commands are under way, more come, and what was on its way arrives.
    /// Nobody can say what is there afterwards; but after every transaction it fits together, and nobody was given
    /// what there was not.
    async fn fork(&mut self) {
        self.shaky.set_slow(true);
        let mut under_way = tokio::task::JoinSet::new();
        let mut backup = self.store.faults().backup();
        let at = self.dice.random_range(10..40);
        for number in 0..50 {
            if number == at {
                self.put_back(&backup, OnTheirWay::Arrive).await;
            } else if number < at && self.chance(30) {
                backup = self.store.faults().backup();
            }
            let replica = self.replicas[self.dice.random_range(0..self.replicas.len())].0.clone();
            let consumer = Uuid::from_u128(0x2000 + self.dice.random_range(0..CONSUMERS));
            let command = match self.dice.random_range(0..100) {
                0..5 => self.other(),
                5..50 => Command::DeleteAllocations(consumer),
                // Large ones: what is freed is soon taken.
                _ => {
                    let mut claim = self.claim(consumer);
                    claim.generation = ExpectedGeneration::Any;
                    claim.allocations =
                        vec![(self.some_host(), vec![(vcpu(), self.dice.random_range(5..12))])];
                    Command::SetAllocations(vec![claim])
                }
            };
            under_way.spawn(async move { replica.write(command).await });
            sleep(Duration::from_millis(self.dice.random_range(0..15))).await;
        }
        while under_way.join_next().await.is_some() {}
        self.shaky.set_slow(false);
        // What is late may be later than that.
        sleep(LATEST).await;
        self.late.clear();
        self.take_as_it_is();
    }

    /// Some commands at once, each through some replica.
    async fn step(&mut self) {
        let mut under_way = tokio::task::JoinSet::new();
        let mut busy: Vec<Uuid> = Vec::new();
        for _ in 0..self.dice.random_range(1..8) {
            let at = self.dice.random_range(0..self.replicas.len());
            let replica = self.replicas[at].0.clone();
            if self.chance(25) {
                let command = self.other();
                under_way.spawn(async move { (None, replica.write(command).await) });
                continue;
            }
            let consumer = Uuid::from_u128(0x2000 + self.dice.random_range(0..CONSUMERS));
            if busy.contains(&consumer) {
                continue;
            }
            busy.push(consumer);
            let (command, allocations) = if self.chance(20) {
                (Command::DeleteAllocations(consumer), Vec::new())
            } else {
                let write = self.claim(consumer);
                let allocations = write.allocations.clone();
                (Command::SetAllocations(vec![write]), allocations)
            };
            under_way.spawn(async move { (Some((consumer, allocations)), replica.write(command).await) });
        }
        if self.chance(35) {
            self.break_something();
        }
        while let Some(done) = under_way.join_next().await {
            let (Some((consumer, allocations)), outcome) = done.unwrap() else { continue };
            let mut states = self.possible(&consumer);
            let changed: Vec<Possible> = states.iter().map(|state| after(state, &allocations)).collect();
            match outcome {
                Ok(_) => {
                    states = changed;
                    self.acknowledged += 1;
                }
                Err(
                    WriteError::Refused(_)
                    | WriteError::TooBig { .. }
                    | WriteError::TooLarge { .. }
                    | WriteError::NotTaken(_),
                ) => {}
                Err(WriteError::Unavailable(_)) => {
                    states.extend(changed);
                    self.late.entry(consumer).or_default().push(after(&None, &allocations));
                    self.unknown += 1;
                }
            }
            states.dedup();
            self.possible.insert(consumer, states);
        }
    }

    fn stored(&self) -> State {
        decode(&self.store, &self.keys)
    }

    /// Compares what is stored with what may be.
    fn look(&self, seed: u64) {
        assert_eq!(self.shaky.findings(), Vec::<String>::new(), "seed {seed}");
        let state = self.stored();
        for uuid in self.possible.keys() {
            let (states, found) = (self.possible(uuid), possible(&state, uuid));
            assert!(
                states.contains(&found),
                "seed {seed}: consumer {uuid} is {found:?}, and may be {states:?}"
            );
        }
    }

    /// Waits until nothing is under way and all is well, so that what was unknown is known.
    async fn settle(&mut self, seed: u64) {
        self.shaky.set_stormy(false);
        let faults = self.store.faults();
        faults.fail_next(0, StoreError::Unknown(String::new()));
        faults.lose_answers(0);
        faults.set_reachable(true);
        sleep(LATEST).await;
        self.look(seed);
        self.late.clear();
        self.take_as_it_is();
    }

    /// Whatever is there is exported, and imported elsewhere.
    async fn can_be_moved(&self, seed: u64) {
        let (exported, other) = (Snapshot::of(&self.stored()), MemoryStore::new());
        import(&other, &self.keys, &exported, 40, 0).await.unwrap();
        let imported = Snapshot::of(&decode(&other, &self.keys));
        assert_eq!(exported.differences(&imported), Vec::<String>::new(), "seed {seed}");
    }

    async fn replicas_agree(&self, seed: u64) {
        for (replica, _) in &self.replicas {
            let mut tries = 0;
            while let Err(error) = replica.fresh().await {
                tries += 1;
                assert!(tries < 100, "seed {seed}: a replica does not come back: {error}");
                sleep(Duration::from_millis(200)).await;
            }
            let known = replica.peek(portrait);
            assert_eq!(differences(&portrait(&self.stored()), &known), Vec::<String>::new(), "seed {seed}");
        }
    }
}

/// What a consumer is in a state.
fn possible(state: &State, uuid: &Uuid) -> Possible {
    state.consumer(uuid).map(|stored| (stored.record.allocations.clone(), stored.record.generation))
}

async fn history(seed: u64) -> (usize, usize, usize) {
    let mut history = History::new(seed);
    for _ in 0..2 {
        history.start_replica();
    }
    let first = history.replicas[0].0.clone();
    for number in 0..PROVIDERS {
        let uuid = host(number);
        let name = format!("h{}", uuid.as_u128());
        first.write(Command::CreateProvider { uuid, name, parent: None }).await.unwrap();
        let inventory = Inventory { total: 12, ..Inventory::default() };
        first.write(Command::AddInventory { provider: uuid, class: vcpu(), inventory }).await.unwrap();
    }
    for step in 0..STEPS {
        if history.chance(10) {
            history.restore().await;
        } else if history.backup.is_none() && history.chance(20) {
            history.backup = Some(history.store.faults().backup());
        }
        history.shaky.set_stormy(true);
        if history.chance(5) {
            history.fork().await;
        }
        history.step().await;
        history.look(seed);
        if step % 10 == 9 {
            history.settle(seed).await;
            history.replicas_agree(seed).await;
            history.can_be_moved(seed).await;
        }
    }
    for (_, stop) in &history.replicas {
        stop.cancel();
    }
    (history.acknowledged, history.unknown, history.restored)
}

#[test]
fn whatever_breaks_acknowledged_writes_are_there_once_and_nothing_is_over_capacity() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SEEDS").unwrap_or(100),
    };
    let (mut acknowledged, mut unknown, mut restored) = (0, 0, 0);
    for seed in seeds.clone() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let (more, more_unknown, more_restored) = runtime.block_on(history(seed));
        acknowledged += more;
        unknown += more_unknown;
        restored += more_restored;
    }
    println!(
        "{} histories: {acknowledged} writes acknowledged, {unknown} of unknown outcome, {restored} restores",
        seeds.end - seeds.start
    );
    assert!(acknowledged > 20 * usize::try_from(seeds.end - seeds.start).unwrap(), "{acknowledged}");
}

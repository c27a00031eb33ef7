//! What all parts of a history share: the store, the dice, the log, the referee, what goes wrong now.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use ec_model::{ImageId, InstanceId, Keyspace, NodeId};
use ec_runtime::{Host, Machine, Work};
use ec_store::MemoryStore;
use futures::future::BoxFuture;
use jiff::Timestamp;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{Instant, sleep},
};
use uuid::Uuid;

use crate::{
    controller::Controllers,
    history::Cluster,
    life::Life,
    log::Log,
    node::{CLONES, Computer},
    referee::Referee,
    replica::Replicas,
    snag::Snag,
};

/// Where eplacement keeps its records.
pub(crate) const PLACEMENT: &str = "/ecompute/placement";

/// The way there, or back, where nothing is left to chance.
const CALM: Duration = Duration::from_millis(2);

/// What a command left counts as that after so long.
const STALE: Duration = Duration::from_secs(600);

/// When every history begins.
const EPOCH: i64 = 1_800_000_000;

/// Who does something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    /// The agent of a node, and which start of it.
    Agent(NodeId, u32),
    /// Somebody with a command line.
    User(u32),
    /// A replica of eplacement.
    Replica(usize),
    /// A controller.
    Controller(usize),
    /// The simulation itself.
    Nemesis,
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(node, start) if *start >= CLONES => write!(f, "n{}'", node.uuid().as_u128()),
            Self::Agent(node, _) => write!(f, "n{}", node.uuid().as_u128()),
            Self::User(number) => write!(f, "u{number}"),
            Self::Replica(number) => write!(f, "p{}", number + 1),
            Self::Controller(number) => write!(f, "c{}", number + 1),
            Self::Nemesis => f.write_str("!"),
        }
    }
}

/// How often what goes wrong, in percent of calls.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Storm {
    /// Writes to etcd that never arrive, arrive and are answered by nobody, arrive much later.
    pub(crate) etcd: u32,
    /// The same of requests to placement.
    pub(crate) placement: u32,
    /// Calls of the hypervisor that fail for now, or come back when nobody waits any more.
    pub(crate) hypervisor: u32,
    /// Calls that the hypervisor refuses for good.
    pub(crate) refusals: u32,
    /// Calls of all kinds that take seconds.
    pub(crate) slow: u32,
}

pub(crate) struct World {
    pub(crate) store: MemoryStore,
    pub(crate) keys: Keyspace,
    pub(crate) computers: Vec<Arc<Computer>>,
    /// One of each, which is not to be.
    pub(crate) clones: Vec<Arc<Computer>>,
    pub(crate) replicas: Replicas,
    pub(crate) controllers: Controllers,
    begun: Instant,
    dice: Mutex<StdRng>,
    /// How many marks were drawn: they take nothing from the dice, so that who marks more has the same history.
    marks: AtomicU64,
    log: Mutex<Log>,
    storm: Mutex<Storm>,
    referee: Mutex<Referee>,
    /// Who does not reach etcd, until when.
    cut: Mutex<BTreeMap<String, Instant>>,
    /// Counted up when etcd is replaced: what was on its way then is gone.
    era: AtomicU64,
    /// Watches were silenced, which nobody notices.
    silenced: AtomicBool,
    /// How often the watches were silenced of whom alone.
    deafened: Mutex<BTreeMap<String, u64>>,
    /// On how many storages the nodes have their disks.
    storages: usize,
    /// They have little memory to give out.
    tight: bool,
    /// Their agents' records are garbled now and then.
    garbled: bool,
    /// Their agents are killed when they have just done something.
    sudden: bool,
    /// Nothing is left to chance: every call takes as long, and what goes wrong was said before.
    calm: bool,
    /// Single calls that are to go wrong.
    pub(crate) snags: Mutex<Vec<Snag>>,
    /// The images whose bytes lie in the store.
    objects: Mutex<BTreeSet<ImageId>>,
    /// How much farther from etcd some are.
    far: Mutex<BTreeMap<String, Duration>>,
    /// By how many seconds everybody's clock is wrong.
    clock: AtomicI64,
    /// Who hears at once what becomes of instances.
    listener: Mutex<Option<UnboundedSender<InstanceId>>>,
    /// Commands that sleep, and since when.
    sleepers: Mutex<BTreeMap<Actor, (Life, Instant)>>,
    pub(crate) failed: tokio_util::sync::CancellationToken,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(cluster: &Cluster, [computers, clones]: [Vec<Arc<Computer>>; 2]) -> Self {
        let Cluster { seed, calm, replicas, controllers, storages, tight, garbled, sudden, .. } = *cluster;
        let names: BTreeMap<Uuid, String> = computers
            .iter()
            .map(|computer| (computer.node.uuid(), Actor::Agent(computer.node, 0).to_string()))
            .collect();
        let directory =
            computers.first().and_then(|computer| computer.directory.parent()).map(Path::to_owned);
        Self {
            store: MemoryStore::new(),
            keys: Keyspace::default(),
            computers,
            clones,
            replicas: Replicas::new(replicas),
            controllers: Controllers::new(controllers),
            begun: Instant::now(),
            dice: Mutex::new(StdRng::seed_from_u64(seed)),
            marks: AtomicU64::new(0),
            log: Mutex::new(Log::new(names, directory)),
            storm: Mutex::default(),
            referee: Mutex::new(Referee::new()),
            cut: Mutex::default(),
            era: AtomicU64::new(0),
            silenced: AtomicBool::new(false),
            deafened: Mutex::default(),
            storages,
            tight,
            garbled,
            sudden,
            calm,
            snags: Mutex::default(),
            objects: Mutex::default(),
            far: Mutex::default(),
            clock: AtomicI64::new(0),
            listener: Mutex::default(),
            sleepers: Mutex::default(),
            failed: tokio_util::sync::CancellationToken::new(),
        }
    }

    /// Whether nodes have their disks on the same storage.
    pub(crate) fn shares_storage(&self) -> bool {
        self.storages > 0
    }

    /// Whether nodes have little memory to give out.
    pub(crate) fn is_tight(&self) -> bool {
        self.tight
    }

    /// Whether agents are killed when they have just done something.
    pub(crate) fn is_sudden(&self) -> bool {
        self.sudden
    }

    /// Whether agents' records are garbled now and then.
    pub(crate) fn is_garbled(&self) -> bool {
        self.garbled
    }

    /// From now on it is heard now and then that something was just done to an instance.
    pub(crate) fn listen(&self) -> UnboundedReceiver<InstanceId> {
        let (listener, heard) = unbounded_channel();
        *lock(&self.listener) = Some(listener);
        heard
    }

    /// Something was just done to an instance, or told of it.
    pub(crate) fn happened_to(&self, instance: InstanceId) {
        let listener = lock(&self.listener).clone();
        if let Some(listener) = listener.filter(|_| self.chance(7)) {
            listener.send(instance).ok();
        }
    }

    /// Whether nothing is left to chance.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm
    }

    /// One of a hundred, so often.
    pub(crate) fn chance(&self, percent: u32) -> bool {
        percent > 0 && !self.calm && lock(&self.dice).random_range(0..100) < percent
    }

    pub(crate) fn pick(&self, range: std::ops::Range<u64>) -> u64 {
        lock(&self.dice).random_range(range)
    }

    /// One of them, where there is any.
    pub(crate) fn one_of<'a, T>(&self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.index(all.len())) }
    }

    /// One of a list that is never empty.
    pub(crate) fn among<T: Copy, const N: usize>(&self, all: &[T; N]) -> T {
        const { assert!(N > 0) };
        all[self.index(N)]
    }

    /// A number below this.
    pub(crate) fn index(&self, count: usize) -> usize {
        usize::try_from(self.pick(0..count as u64)).unwrap_or(0)
    }

    pub(crate) fn any(&self) -> u128 {
        let mut dice = lock(&self.dice);
        (u128::from(dice.next_u64()) << 64) | u128::from(dice.next_u64())
    }

    pub(crate) fn millis(&self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.pick(range))
    }

    pub(crate) fn storm(&self) -> Storm {
        *lock(&self.storm)
    }

    pub(crate) fn change_storm(&self, change: impl FnOnce(&mut Storm)) {
        change(&mut lock(&self.storm));
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// The time of day.
    pub(crate) fn now(&self) -> Timestamp {
        let clock = EPOCH + self.clock.load(Ordering::Relaxed);
        Timestamp::from_second(clock).unwrap_or_default() + self.elapsed()
    }

    pub(crate) fn log(&self, who: Actor, what: impl AsRef<str>) {
        lock(&self.log).line(self.elapsed(), &who.to_string(), what.as_ref());
    }

    pub(crate) fn named(&self, text: &str) -> String {
        lock(&self.log).named(text)
    }

    /// Has the referee look, and ends the history at the first thing that must not be.
    pub(crate) fn judge<T>(&self, look: impl FnOnce(&mut Referee, &Self) -> T) -> T {
        let mut referee = lock(&self.referee);
        let before = referee.findings().len();
        let seen = look(&mut referee, self);
        let new: Vec<String> = referee.findings()[before..].to_vec();
        drop(referee);
        for finding in new {
            self.log(Actor::Nemesis, format!("VIOLATION: {finding}"));
            self.failed.cancel();
        }
        seen
    }

    /// The way there, or back.
    pub(crate) async fn way(&self) {
        if self.calm {
            return sleep(CALM).await;
        }
        let slow = self.storm().slow;
        let time = if self.chance(slow) {
            self.millis(200..5000)
        } else if self.chance(30) {
            self.millis(1..40)
        } else {
            return;
        };
        sleep(time).await;
    }

    pub(crate) fn era(&self) -> u64 {
        self.era.load(Ordering::Relaxed)
    }

    pub(crate) fn silence_watches(&self) {
        self.silenced.store(true, Ordering::Relaxed);
        self.store.faults().freeze_watches();
    }

    /// The watches that somebody has tell nothing more.
    pub(crate) fn deafen(&self, who: Actor) {
        self.silenced.store(true, Ordering::Relaxed);
        *lock(&self.deafened).entry(who.to_string()).or_default() += 1;
    }

    /// How often the watches were silenced that somebody had.
    pub(crate) fn deafened(&self, who: Actor) -> u64 {
        lock(&self.deafened).get(&who.to_string()).copied().unwrap_or_default()
    }

    pub(crate) fn has_silent_watches(&self) -> bool {
        self.silenced.load(Ordering::Relaxed)
    }

    pub(crate) fn next_era(&self) {
        self.era.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn cut(&self, who: Actor, time: Duration) {
        lock(&self.cut).insert(who.to_string(), Instant::now() + time);
    }

    pub(crate) fn is_cut(&self, who: Actor) -> bool {
        lock(&self.cut).get(&who.to_string()).is_some_and(|until| Instant::now() < *until)
    }

    pub(crate) fn mend_cuts(&self) {
        lock(&self.cut).clear();
    }

    /// A command sleeps for so long; or shorter, where it is woken.
    pub(crate) async fn have_sleep(&self, who: Actor, life: &Life, time: Duration) {
        life.sleep();
        lock(&self.sleepers).insert(who, (life.clone(), Instant::now()));
        sleep(time).await;
        lock(&self.sleepers).remove(&who);
        life.wake();
    }

    /// Wakes who began with an instance and has slept since, for so long that what it began counts as left over; whether
    /// it was. Somebody is about to take that away.
    pub(crate) fn wake_maker(&self, instance: InstanceId) -> bool {
        let maker = self.judge(|referee, _| referee.maker(instance));
        let slept = |(_, since): &(Life, Instant)| since.elapsed() >= STALE;
        let sleeper = maker.and_then(|maker| lock(&self.sleepers).get(&maker).cloned().filter(slept));
        let Some((life, _)) = sleeper.filter(|_| self.chance(50)) else { return false };
        life.wake();
        true
    }

    pub(crate) fn objects(&self) -> BTreeSet<ImageId> {
        lock(&self.objects).clone()
    }

    pub(crate) fn store_object(&self, image: ImageId) {
        lock(&self.objects).insert(image);
    }

    pub(crate) fn drop_object(&self, image: ImageId) {
        lock(&self.objects).remove(&image);
    }

    /// From now on etcd is so much farther from somebody, each way.
    pub(crate) fn move_away(&self, who: Actor, by: Duration) {
        lock(&self.far).insert(who.to_string(), by);
    }

    /// How much farther from etcd somebody is than others.
    pub(crate) fn distance(&self, who: Actor) -> Option<Duration> {
        lock(&self.far).get(&who.to_string()).copied()
    }

    /// Everybody's clock is set forward, or back.
    pub(crate) fn step_clock(&self, seconds: i64) {
        self.clock.fetch_add(seconds, Ordering::Relaxed);
    }

    /// The machine that a program of this life runs on.
    pub(crate) fn machine(self: &Arc<Self>, life: &Life) -> Host {
        Host::simulated(Arc::new(Simulated { world: Arc::clone(self), life: life.clone() }))
    }
}

/// Simulated time and the world's dice; what blocks is done in line, on the one thread that there is.
struct Simulated {
    world: Arc<World>,
    life: Life,
}

impl Machine for Simulated {
    fn now(&self) -> Timestamp {
        self.world.now()
    }

    fn random(&self) -> u128 {
        self.world.any()
    }

    fn mark(&self) -> u128 {
        u128::from(self.world.marks.fetch_add(1, Ordering::Relaxed))
    }

    fn work(&self, work: Work) -> BoxFuture<'static, ()> {
        let life = self.life.clone();
        Box::pin(async move {
            life.gate().await;
            work();
        })
    }
}

//! A computer with its hypervisor and its files, and the agents that run on it, one after the other.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use ec_hypervisor::SimulatedHypervisor;
use ec_model::{InstanceId, NodeId, Trouble};
use ecompute::{agent, config::Settings};
use serde_json::Value;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    door::Door,
    hands::Hands,
    life::Life,
    replica::ADMIN,
    way::Way,
    world::{Actor, World},
};

/// Processors that each computer gives to guests.
pub(crate) const PROCESSORS: u64 = 4;

/// From this start on they are agents of a clone.
pub(crate) const CLONES: u32 = 1000;

/// What a disk may have in the place of a record after a crash.
const GARBAGE: &[u8] = &[0; 16];

/// As an init system restarts it.
const RESTART: Duration = Duration::from_secs(5);

/// What outlives its agents.
pub(crate) struct Computer {
    pub(crate) node: NodeId,
    pub(crate) hypervisor: SimulatedHypervisor,
    pub(crate) directory: PathBuf,
    /// Which of the storages that nodes share its disks lie on, if any.
    storage: Option<usize>,
    /// Counted up when it is started anew: what its hypervisor was at then is not done.
    era: AtomicU64,
    starts: AtomicU32,
    /// What was counted before its first.
    first: u32,
    /// Nobody starts an agent here for now.
    kept_down: AtomicBool,
    /// Its agent has no rights.
    revoked: AtomicBool,
    /// What its agents find that it is in.
    pub(crate) troubles: watch::Sender<Vec<Trouble>>,
    /// Of those who let it in again, one does so at a time.
    pub(crate) letting_in: tokio::sync::Mutex<()>,
    /// Its agent's records that cannot be read for now, as they were.
    garbled: Mutex<BTreeMap<InstanceId, Vec<u8>>>,
    /// The agent of now.
    agent: Mutex<Option<Running>>,
}

#[derive(Clone)]
struct Running {
    number: u32,
    life: Life,
    stop: CancellationToken,
}

impl Computer {
    /// The computer of a number from 1 on, with its files and an image below `directory`.
    pub(crate) fn new(number: usize, directory: &Path, storage: Option<usize>, tight: bool) -> Result<Self> {
        Self::called(number, directory, &format!("n{number}"), 0, storage, tight)
    }

    /// Another computer that was made from the same image, and takes itself for the same node.
    pub(crate) fn clone_of(
        number: usize,
        directory: &Path,
        storage: Option<usize>,
        tight: bool,
    ) -> Result<Self> {
        Self::called(number, directory, &format!("n{number}-clone"), CLONES, storage, tight)
    }

    fn called(
        number: usize,
        directory: &Path,
        name: &str,
        starts: u32,
        storage: Option<usize>,
        tight: bool,
    ) -> Result<Self> {
        let node = NodeId::new(Uuid::from_u128(number as u128));
        let directory = directory.join(name);
        fs::create_dir_all(&directory)?;
        let processors = std::thread::available_parallelism()?.get() as u64;
        // Two of however many there are, each given out twice; or the one there is, four times.
        let (kept, ratio) = if processors > 1 { (processors - 2, 2.0) } else { (0, 4.0) };
        // Of everything else there is more than anybody asks for; or of memory what there is.
        let of_memory = if tight { 1.0 } else { 1000.0 };
        let images = directory.parent().unwrap_or(Path::new("/")).join("images");
        let shared = match (storage, directory.parent()) {
            (Some(storage), Some(parent)) => {
                let name = ["pool", "annex"][storage];
                // It is mounted: of what is not an agent says nothing, and does not begin.
                fs::create_dir_all(parent.join(name))?;
                format!("shared_storage: {{name: {name}, path: {}}}\n", parent.join(name).display())
            }
            _ => String::new(),
        };
        fs::write(
            directory.join("compute.yaml"),
            format!(
                "uuid: {node}\nname: n{number}\nplacement: {{endpoint: \"http://placement\"}}\nstate_dir: {}\n\
                 allocation_ratio: {{VCPU: {ratio:?}, MEMORY_MB: {of_memory:?}, DISK_GB: 1000.0}}\n\
                 reserved: {{VCPU: {kept}, MEMORY_MB: 0, DISK_GB: 0}}\nimages: {{local: [{}], max_gb: 1}}\n\
                 address_timeout: 60\naudit_grace: 60\n{shared}",
                directory.join("state").display(),
                images.display(),
            ),
        )?;
        let hypervisor = SimulatedHypervisor::new(node);
        hypervisor.set_address_delay(Duration::from_secs(3));
        Ok(Self {
            node,
            hypervisor,
            directory,
            storage,
            era: AtomicU64::new(0),
            starts: AtomicU32::new(starts),
            first: starts,
            kept_down: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            troubles: watch::Sender::default(),
            letting_in: tokio::sync::Mutex::default(),
            garbled: Mutex::default(),
            agent: Mutex::default(),
        })
    }

    /// What its agents show to placement, also where it is a clone: it may change this node's provider alone. On storage that
    /// nodes share only an operator could let those in (`eschedule storage join`), so that they may change all.
    pub(crate) fn token(&self) -> String {
        self.storage.map_or_else(|| format!("token of {}", self.node), |_| ADMIN.to_owned())
    }

    pub(crate) fn shares_storage_with(&self, other: &Self) -> bool {
        self.storage.is_some() && self.storage == other.storage
    }

    pub(crate) fn first_start(&self) -> u32 {
        self.first
    }

    pub(crate) fn era(&self) -> u64 {
        self.era.load(Ordering::Relaxed)
    }

    fn running(&self) -> Option<Running> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn is_up(&self) -> bool {
        self.running().is_some()
    }

    /// Adds a line to its configuration, which its next agent reads.
    pub(crate) fn configure(&self, line: &str) -> std::io::Result<()> {
        let path = self.directory.join("compute.yaml");
        let text = fs::read_to_string(&path)?;
        fs::write(path, format!("{text}{line}\n"))
    }

    /// The agent's next start, on what is here.
    pub(crate) fn start(self: &Arc<Self>, world: &Arc<World>) {
        if self.kept_down.load(Ordering::Relaxed) || self.revoked.load(Ordering::Relaxed) {
            return;
        }
        let number = self.starts.fetch_add(1, Ordering::Relaxed) + 1;
        let (life, stop) = (Life::new(), CancellationToken::new());
        let actor = Actor::Agent(self.node, number);
        world.log(actor, format!("agent starts for the {}. time", number - self.first));
        let running = Running { number, life: life.clone(), stop: stop.clone() };
        *self.agent.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        let (computer, world) = (Arc::clone(self), Arc::clone(world));
        tokio::spawn(async move {
            let ended = tokio::select! {
                biased;
                () = life.over() => None,
                ended = computer.run(&world, actor, &life, &stop) => Some(ended),
            };
            computer.forget(number);
            world.judge(|referee, _| referee.agent_ended(computer.node));
            // Whoever opens the images next is another process.
            fs::remove_file(computer.directory.join("state/images/lock")).ok();
            let Some(ended) = ended else { return };
            // Of an agent that has ended nothing goes on.
            life.end();
            match ended {
                Ok(()) => world.log(actor, "agent ended as it was asked to"),
                Err(error) => world.log(actor, format!("agent ended: {error:#}")),
            }
            sleep(RESTART).await;
            if !computer.is_up() && computer.starts.load(Ordering::Relaxed) == number {
                computer.start(&world);
            }
        });
    }

    async fn run(
        self: &Arc<Self>,
        world: &Arc<World>,
        actor: Actor,
        life: &Life,
        stop: &CancellationToken,
    ) -> Result<()> {
        let (settings, _) = Settings::load(Some(&self.directory.join("compute.yaml")))?;
        let door = Door { world: Arc::clone(world), actor, life: life.clone(), request_id: None };
        let hands = Hands { world: Arc::clone(world), computer: Arc::clone(self), actor, life: life.clone() };
        let placement = Way::client(world, actor, &self.token(), life)?;
        let machine = world.machine(life);
        let parts =
            agent::assemble(settings, self.node, Arc::new(door), Arc::new(hands), placement, machine).await?;
        // Nobody comes there: what is played is how its tickets come to be.
        parts.url.set("http://127.0.0.1:18090".to_owned()).ok();
        let mut troubles = self.troubles.subscribe();
        parts.troubles.send_replace(troubles.borrow_and_update().clone());
        let told = Arc::clone(&parts);
        let tell = async {
            while troubles.changed().await.is_ok() {
                told.troubles.send_replace(troubles.borrow_and_update().clone());
            }
            std::future::pending().await
        };
        tokio::select! {
            biased;
            ended = agent::run_with(parts, stop.clone()) => ended,
            never = tell => never,
        }
    }

    fn forget(&self, number: u32) {
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        if agent.as_ref().is_some_and(|agent| agent.number == number) {
            *agent = None;
        }
    }

    /// As `kill -9`. Whether there was one.
    pub(crate) fn kill(&self) -> bool {
        let Some(running) = self.running() else { return false };
        self.forget(running.number);
        running.life.end();
        true
    }

    /// The life of the agent that runs.
    pub(crate) fn life(&self) -> Option<Life> {
        self.running().map(|running| running.life)
    }

    /// Kills it, and has nobody start another until the same is said with `false`.
    pub(crate) fn keep_down(&self, down: bool) {
        self.kept_down.store(down, Ordering::Relaxed);
        if down {
            self.kill();
        }
    }

    /// Its agent, which has no rights any more, ends, and none starts until the same is said with `false`. Whether it was
    /// otherwise.
    pub(crate) fn revoke(&self, revoked: bool) -> bool {
        let was = self.revoked.swap(revoked, Ordering::Relaxed);
        if revoked {
            self.kill();
        }
        was != revoked
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed)
    }

    /// As an operator ends it, who starts it again.
    pub(crate) fn stop(&self) -> bool {
        let Some(running) = self.running() else { return false };
        running.stop.cancel();
        true
    }

    /// As if somebody pulled the plug: the agent is gone, and no guest runs any more.
    pub(crate) fn crash(&self) {
        self.kill();
        self.era.fetch_add(1, Ordering::Relaxed);
        self.hypervisor.restart_host();
    }

    fn record(&self, instance: InstanceId) -> PathBuf {
        self.directory.join(format!("state/instances/{instance}.json"))
    }

    /// Takes the agent's own record of an instance away.
    pub(crate) fn lose_record(&self, instance: InstanceId) {
        self.garbled.lock().unwrap_or_else(PoisonError::into_inner).remove(&instance);
        fs::remove_file(self.record(instance)).ok();
    }

    /// Has nobody read the agent's own record of an instance, of which a start was begun, for now. Whether there was such a one.
    pub(crate) fn garble_record(&self, instance: InstanceId) -> bool {
        let mut garbled = self.garbled.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.record(instance);
        let Some(record) = fs::read(&path).ok().filter(|record| is_of_started(record)) else { return false };
        let done = fs::write(&path, GARBAGE).is_ok();
        if done {
            garbled.insert(instance, record);
        }
        done
    }

    /// What was garbled is as it was, but for what was deleted or written anew since, which is told.
    pub(crate) fn mend_records(&self) -> Vec<InstanceId> {
        let garbled = std::mem::take(&mut *self.garbled.lock().unwrap_or_else(PoisonError::into_inner));
        let mut touched = Vec::new();
        for (instance, record) in garbled {
            let path = self.record(instance);
            match fs::read(&path).is_ok_and(|now| now == GARBAGE) {
                true => _ = fs::write(&path, record).ok(),
                false => touched.push(instance),
            }
        }
        touched
    }

    /// The agent's own records, by instance: whether a start was begun.
    pub(crate) fn records(&self) -> Result<BTreeMap<String, bool>> {
        let directory = self.directory.join("state/instances");
        let Ok(entries) = fs::read_dir(&directory) else { return Ok(BTreeMap::new()) };
        let mut records = BTreeMap::new();
        for entry in entries {
            let path = entry.context("failed to list records")?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let Some(instance) = name.strip_suffix(".json") else { continue };
            // Of a damaged one nobody can tell, so it may have been.
            let record: Option<Value> = serde_json::from_slice(&fs::read(&path)?).ok();
            records.insert(instance.to_owned(), record.is_none_or(|record| record["started"] == true));
        }
        Ok(records)
    }
}

/// Whether a record says that a start was begun.
fn is_of_started(record: &[u8]) -> bool {
    serde_json::from_slice::<Value>(record).is_ok_and(|record| record["started"] == true)
}

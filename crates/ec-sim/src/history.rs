//! One history: a cluster is built, used and harmed, healed, and looked at.

use std::{fs, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use ec_hypervisor::{DomainSpec, Hypervisor};
use ec_model::{BaseImage, Desired, DiskFormat, InstanceId, Request, encode};
use tokio::{task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    catalog,
    heal::converge,
    life::Life,
    mend::heal,
    nemesis::{rage, selection},
    node::Computer,
    referee::offered_by,
    replica::ADMIN,
    scenario::{Scenario, Stage},
    user,
    way::Way,
    world::{Actor, World},
};

/// Who does not wait for anything.
const HASTY: u32 = 31;

/// How a history ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// What must not be, and was; nothing where all is well.
    pub findings: Vec<String>,
    /// Transactions that were applied.
    pub transactions: u64,
    /// Instances of which a user was told that they are placed.
    pub acknowledged: usize,
}

/// Runs the history of a seed, with its log on standard output. To be called once in a process.
///
/// # Errors
/// The simulation itself does not work here: a file, say, cannot be written.
pub fn run(seed: u64) -> Result<Ended> {
    let drawn = |from: u64, below: u64| usize::try_from(seed / from % below).unwrap_or_default();
    let (nodes, replicas, users, controllers) =
        (1 + drawn(1, 4), 1 + drawn(4, 2), 1 + drawn(8, 4), drawn(32, 3));
    let title = format!(
        "seed {seed}: {nodes} nodes, {replicas} replicas of eplacement, {controllers} controllers, {users} users"
    );
    // Of nodes that are several: by other digits of the seed than those, so that histories stay what they were.
    let (storages, told) = match seed % 7 {
        3 if nodes > 1 => (1, ", on shared storage"),
        5 if nodes > 2 => (2, ", on two shared storages"),
        _ => (0, ""),
    };
    // Elsewhere memory never runs out.
    let (tight, memory) = if seed % 11 == 6 { (true, ", with little memory") } else { (false, "") };
    let (garbled, records) =
        if seed % 5 == 2 { (true, ", and records that are garbled") } else { (false, "") };
    let (keepers, seen_to) = if seed % 9 == 4 { (21..24, ", and a catalogue") } else { (0..0, "") };
    let (sudden, deaths) =
        if seed % 3 == 2 { (true, ", and agents that are killed in the midst of it") } else { (false, "") };
    // By a divisor that decides nothing else.
    let (hasty, haste) = match seed % 13 {
        5 | 8 => (true, ", and somebody who wishes something of what is at something"),
        _ => (false, ""),
    };
    let title = format!("{title}{told}{memory}{seen_to}{records}{deaths}{haste}");
    let cluster =
        Cluster { seed, calm: false, nodes, replicas, controllers, storages, tight, garbled, sudden, title };
    history(cluster, async |world| {
        live(&world, u32::try_from(users).unwrap_or(1), keepers, hasty).await;
    })
}

/// Plays a scenario, with its log on standard output. To be called once in a process.
///
/// # Errors
/// As [`run`].
pub fn play(scenario: &Scenario) -> Result<Ended> {
    let title = format!("{}: {}", scenario.name, scenario.story);
    let Scenario { nodes, replicas, controllers, storages, .. } = *scenario;
    let cluster = Cluster {
        seed: 1,
        calm: true,
        nodes,
        replicas,
        controllers,
        storages,
        tight: false,
        garbled: false,
        sudden: false,
        title,
    };
    history(cluster, async |world| {
        begin(&world).await;
        (scenario.play)(Stage::new(&world)).await;
        if !world.failed.is_cancelled() {
            heal(&world).await;
            converge(&world).await;
        }
    })
}

/// What a history is played on.
pub(crate) struct Cluster {
    pub(crate) seed: u64,
    /// Nothing is left to chance.
    pub(crate) calm: bool,
    pub(crate) nodes: usize,
    pub(crate) replicas: usize,
    pub(crate) controllers: usize,
    /// On how many storages the nodes have their disks, by turns; each on one of its own where there is none.
    pub(crate) storages: usize,
    /// Their memory is given out once, and others have most of it.
    pub(crate) tight: bool,
    /// Their agents' records are garbled now and then.
    pub(crate) garbled: bool,
    /// Their agents are killed when they have just done something.
    pub(crate) sudden: bool,
    pub(crate) title: String,
}

fn history(cluster: Cluster, happens: impl AsyncFnOnce(Arc<World>)) -> Result<Ended> {
    ec_runtime::install_tls_provider();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .context("failed to start a runtime")?;
    tokio::task::LocalSet::new().block_on(&runtime, in_world(cluster, happens))
}

async fn in_world(cluster: Cluster, happens: impl AsyncFnOnce(Arc<World>)) -> Result<Ended> {
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let directory = directory.context("failed to make a directory for the computers")?;
    let images = directory.path().join("images");
    fs::create_dir_all(&images)?;
    fs::write(images.join("tiny.img"), disk())?;
    let storage = |number: usize| (number - 1).checked_rem(cluster.storages);
    let make = |make: fn(usize, &Path, Option<usize>, bool) -> Result<Computer>| {
        let made = (1..=cluster.nodes)
            .map(|it| Ok(Arc::new(make(it, directory.path(), storage(it), cluster.tight)?)));
        made.collect::<Result<Vec<_>>>()
    };
    let computers = [make(Computer::new)?, make(Computer::clone_of)?];
    for (number, computer) in computers[0].iter().enumerate() {
        for other in computers[0][..number].iter().filter(|other| computer.shares_storage_with(other)) {
            computer.hypervisor.share_storage(&other.hypervisor);
        }
    }
    let world = Arc::new(World::new(&cluster, computers));
    world.log(Actor::Nemesis, cluster.title);
    let failed = world.failed.clone();
    // What was found ends the history there and then.
    failed.run_until_cancelled(happens(Arc::clone(&world))).await;
    Ok(world.judge(|referee, _| Ended {
        findings: referee.findings().iter().map(|finding| world.named(finding)).collect(),
        transactions: referee.transactions,
        acknowledged: referee.instances().filter(|(_, known)| known.acknowledged.is_some()).count(),
    }))
}

/// A raw disk with a boot sector.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; 4096];
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}

/// Everybody is started, and comes up.
async fn begin(world: &Arc<World>) {
    for number in 0..world.replicas.count() {
        world.replicas.start(world, number);
    }
    if !world.is_calm() {
        seal(world).await;
    }
    for computer in &world.computers {
        computer.start(world);
    }
    for number in 0..world.controllers.count() {
        world.controllers.start(world, number);
    }
    tokio::spawn(watch_nodes(Arc::clone(world)));
    sleep(Duration::from_secs(10)).await;
    if !world.is_calm() {
        claim_for_others(world).await;
    }
}

async fn live(world: &Arc<World>, users: u32, keepers: std::ops::Range<u32>, hasty: bool) {
    begin(world).await;
    let done = CancellationToken::new();
    let mut people = JoinSet::new();
    for number in 1..=users {
        people.spawn_local(user::live(Arc::clone(world), number, done.clone()));
    }
    for number in keepers.clone() {
        people.spawn_local(user::keep_catalog(Arc::clone(world), number, done.clone()));
    }
    if hasty {
        people.spawn_local(user::interrupt(Arc::clone(world), HASTY, world.listen(), done.clone()));
    }
    let ills = selection(world);
    world.log(Actor::Nemesis, format!("{ills:?}"));
    let nemesis = tokio::task::spawn_local(rage(Arc::clone(world), ills, done.clone()));
    sleep(world.millis(90_000..240_000)).await;
    if world.chance(10) {
        // Long enough that what is left over by then counts as that, in the midst of everything.
        sleep(world.millis(400_000..700_000)).await;
    }
    done.cancel();
    nemesis.await.ok();
    heal(world).await;
    while people.join_next().await.is_some() {}
    converge(world).await;
    if !keepers.is_empty() && !world.failed.is_cancelled() {
        catalog::clear(world, Actor::User(0)).await;
    }
}

/// On each node there is a request that nobody can read, and a status, and the guests of both.
async fn seal(world: &Arc<World>) {
    for computer in &world.computers {
        let [asked_for, told_of, other] = [(); 3].map(|()| InstanceId::new(Uuid::from_u128(world.any())));
        let newer = |instance| {
            format!("{{\"version\":99,\"instance\":\"{instance}\",\"desired\":\"hibernated\"}}").into_bytes()
        };
        // Or what is not what its key says, or says what nobody knows yet.
        let request = if world.chance(50) { newer(asked_for) } else { encode(&request_of(world, other)) };
        let status = if world.chance(50) { newer(told_of) } else { hibernated(world, computer, told_of) };
        seal_one(world, computer, world.keys.request(computer.node, asked_for), asked_for, request).await;
        seal_one(world, computer, world.keys.status(computer.node, told_of), told_of, status).await;
    }
}

const MEMORY: &str = "MEMORY_MB";

/// So much memory of a node with little is left to others: for fewer guests than there are processors for.
const LITTLE_MB: u64 = 384;

/// Somebody else uses placement, too, and takes a little of each node; or all but a little.
async fn claim_for_others(world: &Arc<World>) {
    let Ok(placement) = Way::client(world, Actor::Nemesis, ADMIN, &Life::new()) else { return };
    for computer in &world.computers {
        let consumer = InstanceId::new(Uuid::from_u128(world.any()));
        #[expect(clippy::cast_possible_truncation, reason = "memory is far below 2^52 MB")]
        let offered = offered_by(world, computer.node, MEMORY) as u64;
        let takes = if world.is_tight() { offered.saturating_sub(LITTLE_MB).max(1) } else { 1 };
        let amounts = [(computer.node, [(MEMORY.to_owned(), takes)].into())].into();
        if placement.claim_exact(consumer, &amounts, "others", "others").await.is_ok() {
            world.judge(|referee, world| referee.seal_claim(world, consumer));
        }
    }
}

fn request_of(world: &World, instance: InstanceId) -> Request {
    Request {
        instance,
        epoch: 1,
        generation: 1,
        desired: Desired::Active,
        power: ec_model::PowerWish::default(),
        restart: ec_model::Restart::No,
        rebuild: None,
        rescue: None,
        kind: ec_model::Workload::Machine,
        volumes: Vec::new(),
        resize: None,
        handover: None,
        name: None,
        project: "default".to_owned(),
        user: "default".to_owned(),
        spec: None,
        access: None,
        request_id: None,
        created_at: world.now(),
    }
}

/// A status of this format, with a state that only a newer release knows.
fn hibernated(world: &World, computer: &Computer, instance: InstanceId) -> Vec<u8> {
    let (node, now) = (computer.node, world.now());
    let status = serde_json::json!({
        "version": 1, "instance": instance, "node": node, "state": "HIBERNATED", "since": now, "updated_at": now,
    });
    status.to_string().into_bytes()
}

async fn seal_one(world: &World, computer: &Computer, key: String, instance: InstanceId, value: Vec<u8>) {
    let put = ec_store::Txn::new().put(key.clone(), value.clone());
    ec_store::Store::txn(&world.store, put).await.ok();
    let base = BaseImage {
        path: "/images/of/the/future".into(),
        format: DiskFormat::Qcow2,
        virtual_size: 1 << 20,
        digest: "0".repeat(64),
    };
    computer.hypervisor.create_overlay(instance, &base, None).await.ok();
    let spec = DomainSpec { instance, title: "sealed".into(), vcpus: 1, memory_mb: 1, volumes: Vec::new() };
    computer.hypervisor.define(&spec).await.ok();
    world.judge(|referee, _| referee.seal(key, value, instance));
}

/// Has the referee see who is alive, second by second.
async fn watch_nodes(world: Arc<World>) {
    loop {
        world.judge(|referee, world| referee.look_at_nodes(world));
        sleep(Duration::from_secs(1)).await;
    }
}

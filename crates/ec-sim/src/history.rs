//! One history: a cluster is built, used and harmed, healed, and looked at.

use std::{fs, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use ec_hypervisor::{DomainSpec, Hypervisor};
use ec_model::{BaseImage, DiskFormat, InstanceId};
use tokio::{task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    heal::converge,
    nemesis::{heal, rage, selection},
    node::Computer,
    scenario::{Scenario, Stage},
    user,
    world::{Actor, World},
};

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
    let (nodes, replicas, users) = (1 + seed % 4, 1 + seed / 4 % 2, 1 + seed / 8 % 4);
    let title = format!("seed {seed}: {nodes} nodes, {replicas} replicas of eplacement, {users} users");
    history(Cluster { seed, calm: false, nodes, twins: 0, replicas, title }, async |world| {
        live(&world, u32::try_from(users).unwrap_or(1)).await;
    })
}

/// Plays a scenario, with its log on standard output. To be called once in a process.
///
/// # Errors
/// As [`run`].
pub fn play(scenario: &Scenario) -> Result<Ended> {
    let title = format!("{}: {}", scenario.name, scenario.story);
    let Scenario { nodes, twins, replicas, .. } = *scenario;
    history(Cluster { seed: 1, calm: true, nodes, twins, replicas, title }, async |world| {
        begin(&world).await;
        (scenario.play)(Stage::new(&world)).await;
        if !world.failed.is_cancelled() {
            heal(&world).await;
            converge(&world).await;
        }
    })
}

struct Cluster {
    seed: u64,
    calm: bool,
    nodes: u64,
    twins: u64,
    replicas: u64,
    title: String,
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
    let memory = std::path::Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let directory = directory.context("failed to make a directory for the computers")?;
    let images = directory.path().join("images");
    fs::create_dir_all(&images)?;
    fs::write(images.join("tiny.img"), disk())?;
    let Cluster { seed, calm, nodes, twins, replicas, title } = cluster;
    let computers = (1..=u128::from(nodes)).map(|number| Computer::new(number, directory.path()));
    let twins = (1..=u128::from(twins)).map(|number| Computer::twin(number, directory.path()));
    let computers: Result<Vec<_>> = computers.chain(twins).map(|computer| computer.map(Arc::new)).collect();
    let world = Arc::new(World::new(seed, calm, computers?, usize::try_from(replicas)?));
    world.log(Actor::Nemesis, title);
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
    for computer in world.computers.iter().filter(|computer| !computer.is_twin()) {
        computer.start(world);
    }
    sleep(Duration::from_secs(10)).await;
}

async fn live(world: &Arc<World>, users: u32) {
    begin(world).await;
    let done = CancellationToken::new();
    let mut people = JoinSet::new();
    for number in 1..=users {
        people.spawn_local(user::live(Arc::clone(world), number, done.clone()));
    }
    let ills = selection(world);
    world.log(Actor::Nemesis, format!("{ills:?}"));
    let nemesis = tokio::spawn(rage(Arc::clone(world), ills, done.clone()));
    sleep(world.millis(90_000..240_000)).await;
    done.cancel();
    nemesis.await.ok();
    heal(world).await;
    while people.join_next().await.is_some() {}
    converge(world).await;
}

/// On each node there is a request that a newer release wrote, and its guest.
async fn seal(world: &Arc<World>) {
    for computer in world.computers.iter().filter(|computer| !computer.is_twin()) {
        let instance = InstanceId::new(Uuid::from_u128(world.any()));
        let key = world.keys.request(computer.node, instance);
        let value = format!("{{\"version\":99,\"instance\":\"{instance}\",\"desired\":\"hibernated\"}}");
        let put = ec_store::Txn::new().put(key.clone(), value.clone());
        ec_store::Store::txn(&world.store, put).await.ok();
        let base = BaseImage {
            path: "/images/of/the/future".into(),
            format: DiskFormat::Qcow2,
            virtual_size: 1 << 20,
            digest: "0".repeat(64),
        };
        computer.hypervisor.create_overlay(instance, &base, None).await.ok();
        let spec = DomainSpec { instance, title: "sealed".into(), vcpus: 1, memory_mb: 1 };
        computer.hypervisor.define(&spec).await.ok();
        world.judge(|referee, _| referee.seal(key, value.into_bytes(), instance));
    }
}

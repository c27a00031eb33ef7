//! `eschedule` from the start of its process to `NOTIFIED TARGET`, against the round trips it needs, among few
//! nodes and among thousands.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{
    Alive, Assigned, Attachment, Desired, ImageRef, Instance, InstanceId, NodeId, Request, ResourceQuery,
    Spec, Workload, encode,
};
use ec_store::{Store, Txn};
use ec_tests::{
    TINY,
    control::{Control, all_of, notified},
};
use etcd_client::{Compare, CompareOp, TxnOp};
use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;

use crate::{
    bare::{ask, claim_of},
    stats::{Figure, Goal, Samples},
};

const ROUNDS: usize = 40;
/// Not counted: the servers' own caches fill, and the program's pages are read.
const WARM_UP: usize = 3;
/// As many nodes as a demonstration has, and as a large cloud.
const FEW: usize = 5;
const MANY: usize = 5_000;
/// As many instances as a large cloud has.
const INSTANCES: usize = 10_000;
/// Whoever waits for an answer waits at most so long without noticing it.
const GOAL_MS: f64 = 15.0;
/// 15 MiB.
const GOAL_MB: f64 = 15.7;
/// Well under a second, for a look that people take.
const GOAL_NODES_MS: f64 = 500.0;
/// The same.
const GOAL_LIST_MS: f64 = 500.0;

/// Measures on nodes that nobody serves, so that nothing is built beside.
pub(crate) async fn measure() -> Result<Vec<Figure>> {
    let cloud = Control::start().await?;
    grow(&cloud, 0..FEW).await?;
    let (few, bare) = rounds(&cloud).await?;
    let few_memory = memory(&cloud).await?;
    grow(&cloud, FEW..MANY).await?;
    let (many, bare_many) = rounds(&cloud).await?;
    let many_memory = memory(&cloud).await?;
    let mut start = Samples::default();
    let mut nodes = Samples::default();
    for round in 0..WARM_UP + ROUNDS {
        let (starting, looking) = tokio::task::block_in_place(|| {
            Ok::<_, anyhow::Error>((whole(&cloud, &["--version"])?, whole(&cloud, &["nodes"])?))
        })?;
        if round >= WARM_UP {
            start.push_time(starting);
            nodes.push_time(looking);
        }
    }
    let instances = people(&cloud).await?;
    let (mut list, mut page) = (Samples::default(), Samples::default());
    for round in 0..WARM_UP + ROUNDS / 4 {
        let (all, some) = tokio::task::block_in_place(|| {
            let selected = ["list", "--label", "role=web", "--state", "ACTIVE", "--limit", "100"];
            Ok::<_, anyhow::Error>((whole(&cloud, &["list"])?, whole(&cloud, &selected)?))
        })?;
        if round >= WARM_UP {
            list.push_time(all);
            page.push_time(some);
        }
    }
    disks(&cloud, &instances).await?;
    let mut volumes = Samples::default();
    for round in 0..WARM_UP + ROUNDS / 4 {
        let time = tokio::task::block_in_place(|| whole(&cloud, &["volume", "list"]))?;
        if round >= WARM_UP {
            volumes.push_time(time);
        }
    }
    let what = "its two placement and three etcd requests on fresh connections, the first two at once";
    let figure = |name, unit, ours, goals| Figure { name, unit, ours, bare: None, goals };
    Ok(vec![
        Figure {
            name: "eschedule among 5 nodes: process start → NOTIFIED TARGET",
            unit: "ms",
            ours: few,
            bare: Some((what, bare)),
            goals: vec![Goal::AtMost(GOAL_MS), Goal::Ratio(2.0)],
        },
        Figure {
            name: "eschedule among 5,000 nodes: process start → NOTIFIED TARGET",
            unit: "ms",
            ours: many,
            bare: Some((what, bare_many)),
            // Ours looks for the nodes of all sixteen candidates, the bare one for that of the first.
            goals: vec![Goal::AtMost(GOAL_MS)],
        },
        figure("  of it the process alone (eschedule --version)", "ms", start, vec![]),
        figure("eschedule among 5 nodes: resident at most", "MB", few_memory, vec![Goal::AtMost(GOAL_MB)]),
        figure(
            "eschedule among 5,000 nodes: resident at most",
            "MB",
            many_memory,
            vec![Goal::AtMost(GOAL_MB)],
        ),
        figure("eschedule nodes, of 5,000", "ms", nodes, vec![Goal::Under(GOAL_NODES_MS)]),
        figure("eschedule list, of 10,000 instances", "ms", list, vec![Goal::AtMost(GOAL_LIST_MS)]),
        figure("  a page of it, by state and label", "ms", page, vec![Goal::AtMost(GOAL_LIST_MS)]),
        figure(
            "eschedule volume list, of 10,000 that as many instances have",
            "ms",
            volumes,
            vec![Goal::AtMost(GOAL_LIST_MS)],
        ),
    ])
}

/// Nodes with room for everything, which say that they live.
async fn grow(cloud: &Control, numbers: std::ops::Range<usize>) -> Result<()> {
    let inventory = ["VCPU", "MEMORY_MB", "DISK_GB"].map(|class| (class.to_owned(), all_of(1 << 20))).into();
    let nodes: Vec<(NodeId, String)> = futures::stream::iter(numbers)
        .map(async |number| {
            let (node, name) = (NodeId::new(uuid::Uuid::new_v4()), format!("node{number:05}"));
            cloud.placement.ensure_provider(node, &name).await?;
            cloud.placement.set_inventory(node, &inventory).await?;
            Ok::<_, anyhow::Error>((node, name))
        })
        .buffer_unordered(16)
        .try_collect()
        .await?;
    for chunk in nodes.chunks(100) {
        let txn = chunk.iter().fold(Txn::new(), |txn, (node, name)| {
            let record = Alive {
                node: *node,
                name: name.clone(),
                agent: env!("CARGO_PKG_VERSION").to_owned(),
                formats: Alive::formats_of_this_release(),
                virt_type: "simulated".to_owned(),
                machine: String::new(),
                host: String::new(),
                url: None,
                storage: None,
                started_at: Timestamp::now(),
            };
            txn.put(cloud.keys.alive(*node), encode(&record))
        });
        cloud.store.txn(txn).await?;
    }
    Ok(())
}

/// Ours and the bare one by turns.
async fn rounds(cloud: &Control) -> Result<(Samples, Samples)> {
    let (mut ours, mut bare) = (Samples::default(), Samples::default());
    for round in 0..WARM_UP + ROUNDS {
        let (bare_time, node, instance) = bare_round(cloud).await?;
        clean(cloud, node, instance).await?;
        let (time, node, instance) = tokio::task::block_in_place(|| {
            let begun = Instant::now();
            let (mut child, node, instance) = scheduling(cloud, &[TINY])?;
            let time = begun.elapsed();
            ensure!(child.wait()?.success(), "eschedule failed");
            Ok((time, node, instance))
        })?;
        clean(cloud, node, instance).await?;
        if round >= WARM_UP {
            ours.push_time(time);
            bare.push_time(bare_time);
        }
    }
    Ok((ours, bare))
}

/// Instances that run, as control tools and agents write them, ten on a node; their records.
async fn people(cloud: &Control) -> Result<Vec<Instance>> {
    let spec = spec()?;
    let nodes: Vec<NodeId> = (0..INSTANCES / 10).map(|_| NodeId::new(uuid::Uuid::new_v4())).collect();
    let mut people = Vec::new();
    for (number, node) in nodes.iter().enumerate() {
        let mut txn = Txn::new();
        for _ in 0..10 {
            let instance = InstanceId::new(uuid::Uuid::new_v4());
            let role = if number % 10 == 0 { "web" } else { "other" };
            let record = Instance {
                name: Some(format!("guest{}", &instance.to_string()[..8])),
                labels: [("role".to_owned(), role.to_owned())].into(),
                ..record_of(instance, &spec, Some(*node))
            };
            txn = active(cloud, *node, &record, txn);
            people.push(record);
        }
        cloud.store.txn(txn).await?;
    }
    Ok(people)
}

/// A volume for each of them, which has it.
async fn disks(cloud: &Control, people: &[Instance]) -> Result<()> {
    let query = ResourceQuery::parse("resources=DISK_GB:1")?;
    let spec = Spec {
        query: query.text().to_owned(),
        resources: query.total(),
        image: ImageRef::default(),
        ..spec()?
    };
    for machines in people.chunks(10) {
        let mut txn = Txn::new();
        for machine in machines {
            let node = machine.node().context("it is placed")?;
            let volume = InstanceId::new(uuid::Uuid::new_v4());
            let record = Instance {
                name: Some(format!("disk{}", &volume.to_string()[..8])),
                kind: Workload::Volume,
                attached: Some(machine.instance),
                ..record_of(volume, &spec, Some(node))
            };
            let volumes = vec![Attachment { volume, device: "vdb".to_owned() }];
            txn = active(cloud, node, &record, txn);
            txn = active(cloud, node, &Instance { volumes, ..machine.clone() }, txn);
        }
        cloud.store.txn(txn).await?;
    }
    Ok(())
}

/// Adds all that is kept of one that runs, or is there.
fn active(cloud: &Control, node: NodeId, record: &Instance, txn: Txn) -> Txn {
    let (keys, instance) = (&cloud.keys, record.instance);
    let mut status = serde_json::json!({
        "version": 1, "instance": instance, "node": node, "epoch": 1, "observed_generation": 1,
        "power_generation": 1, "state": "ACTIVE", "name": record.name, "kind": record.kind,
        "volumes": record.volumes, "since": Timestamp::now(), "updated_at": Timestamp::now(),
    });
    if record.kind.is_machine() {
        status["ip"] = "192.168.122.17".into();
        status["addresses"] = serde_json::json!([
            {"ip": "192.168.122.17", "mac": instance.mac(0), "nic": 0, "source": "lease"},
        ]);
        status["started_at"] = serde_json::json!(Timestamp::now());
    }
    txn.put(keys.instance(instance), encode(record))
        .put(keys.request(node, instance), encode(&request_of(record)))
        .put(keys.status(node, instance), status.to_string())
}

/// The most that was resident until the line was printed.
async fn memory(cloud: &Control) -> Result<Samples> {
    let mut samples = Samples::default();
    for _ in 0..WARM_UP {
        // It waits on, so that it can be looked at.
        let (mut child, node, instance) =
            tokio::task::block_in_place(|| scheduling(cloud, &["--wait", TINY]))?;
        let status = fs::read_to_string(format!("/proc/{}/status", child.id()))?;
        child.kill()?;
        child.wait()?;
        clean(cloud, node, instance).await?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        samples.push(kib * 1024.0 / 1e6);
    }
    Ok(samples)
}

/// Nothing stays of a round, so that the last finds what the first found.
async fn clean(cloud: &Control, node: NodeId, instance: InstanceId) -> Result<()> {
    cloud.placement.release(instance).await?;
    let keys = &cloud.keys;
    let txn = Txn::new().delete(keys.request(node, instance)).delete(keys.instance(instance));
    cloud.store.txn(txn).await?;
    Ok(())
}

/// Runs the program until its line; its own bounds on every request bound the wait.
fn scheduling(cloud: &Control, arguments: &[&str]) -> Result<(Child, NodeId, InstanceId)> {
    let mut command = cloud.command(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context("failed to start eschedule")?;
    let stdout = child.stdout.take().context("eschedule has no output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    let (node, instance) = notified(&line)?;
    Ok((child, node, instance))
}

/// A whole run whose output nobody needs.
fn whole(cloud: &Control, arguments: &[&str]) -> Result<Duration> {
    let mut command = cloud.command(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let begun = Instant::now();
    let status = command.status().context("failed to start eschedule")?;
    ensure!(status.success(), "eschedule {arguments:?} ended with {status}");
    Ok(begun.elapsed())
}

async fn bare_round(cloud: &Control) -> Result<(Duration, NodeId, InstanceId)> {
    let (keys, instance) = (&cloud.keys, InstanceId::new(uuid::Uuid::new_v4()));
    let spec = spec()?;
    let entry = |node: Option<NodeId>| encode(&record_of(instance, &spec, node));
    let endpoint = cloud.etcd.endpoint();
    let host = cloud.placement_server.endpoint().trim_start_matches("http://").to_owned();
    let path = format!("/allocation_candidates?{TINY}&limit=16");
    let index = keys.instance(instance);

    let begun = Instant::now();
    let intent = async {
        let mut etcd = etcd_client::Client::connect([endpoint], None).await?.kv_client();
        let txn = etcd_client::Txn::new()
            .when([Compare::create_revision(index.clone(), CompareOp::Equal, 0)])
            .and_then([TxnOp::put(index.clone(), entry(None), None)]);
        ensure!(etcd.txn(txn).await?.succeeded(), "etcd refused the intent");
        Ok(etcd)
    };
    let (etcd, candidates) = tokio::join!(intent, ask(&host, "GET", &path, None));
    let (mut etcd, candidates) = (etcd?, candidates?);
    let request = &candidates["allocation_requests"][0];
    let node = request["allocations"].as_object().and_then(|of| of.keys().next()).context("no candidate")?;
    let node: NodeId = node.parse()?;
    ensure!(etcd.get(keys.alive(node), None).await?.count() == 1, "the node is not there");
    ask(&host, "PUT", &format!("/allocations/{instance}"), Some(&claim_of(request))).await?;
    let key = keys.request(node, instance);
    let txn = etcd_client::Txn::new()
        .when([
            Compare::create_revision(keys.alive(node), CompareOp::Greater, 0),
            Compare::create_revision(key.clone(), CompareOp::Equal, 0),
        ])
        .and_then([
            TxnOp::put(key, encode(&request_of(&record_of(instance, &spec, Some(node)))), None),
            TxnOp::put(index, entry(Some(node)), None),
        ]);
    ensure!(etcd.txn(txn).await?.succeeded(), "etcd refused the request's transaction");
    Ok((begun.elapsed(), node, instance))
}

fn spec() -> Result<Spec> {
    Ok(Spec {
        query: TINY.to_owned(),
        resources: ResourceQuery::parse(TINY)?.total(),
        image: ImageRef::at("file:///nowhere"),
        keys: Vec::new(),
        metadata: std::collections::BTreeMap::new(),
        user_data_bytes: None,
        token_required: false,
        snapshot: false,
    })
}

fn record_of(instance: InstanceId, spec: &Spec, node: Option<NodeId>) -> Instance {
    Instance {
        instance,
        project: "default".to_owned(),
        user: "default".to_owned(),
        name: None,
        spec: spec.clone(),
        power: ec_model::PowerWish::default(),
        restart: ec_model::Restart::No,
        group: None,
        before: None,
        kind: Workload::Machine,
        volumes: Vec::new(),
        attached: None,
        made_of: None,
        locked: None,
        request_id: None,
        labels: std::collections::BTreeMap::new(),
        assigned: node.map(|node| Assigned { node, epoch: 1 }),
        generation: 1,
        created_at: Timestamp::now(),
    }
}

fn request_of(record: &Instance) -> Request {
    Request {
        instance: record.instance,
        epoch: 1,
        generation: 1,
        desired: Desired::Active,
        power: ec_model::PowerWish::default(),
        restart: ec_model::Restart::No,
        rebuild: None,
        rescue: None,
        kind: record.kind,
        volumes: record.volumes.clone(),
        resize: None,
        handover: None,
        name: None,
        spec: Some(record.spec.clone()),
        project: "default".to_owned(),
        user: "default".to_owned(),
        access: None,
        request_id: None,
        created_at: Timestamp::now(),
    }
}

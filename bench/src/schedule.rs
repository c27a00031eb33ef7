//! `eschedule` from the start of its process to `NOTIFIED TARGET`, against the round trips it needs.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{IndexEntry, InstanceId, NodeId, NodeRecord, RECORD_VERSION, encode};
use ec_placement_client::Inventory;
use ec_store::{Store, Txn};
use ec_tests::{Stack, TINY};
use etcd_client::{Compare, CompareOp, GetOptions, TxnOp};
use jiff::Timestamp;

use crate::{
    bare::{ask, claim_of},
    orders::Orders,
    stats::{Figure, Goal, Samples},
};

const ROUNDS: usize = 40;
/// Not counted: the servers' own caches fill, and the program's pages are read.
const WARM_UP: usize = 3;

/// Measures on a node that nobody serves, so that nothing is built beside.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let node = NodeId::new(uuid::Uuid::new_v4());
    let orders = Orders::new(stack, node, &[("VCPU", 1), ("MEMORY_MB", 128), ("DISK_GB", 1)]).await?;
    pretend_to_live(&orders).await?;
    let (mut bare, mut ours, mut start) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..WARM_UP + ROUNDS {
        let (time, instance) = bare_round(&orders).await?;
        clean(&orders, instance).await?;
        let (time_of_ours, instance) = tokio::task::block_in_place(|| run(&orders))?;
        clean(&orders, instance).await?;
        let time_of_start = tokio::task::block_in_place(|| only_start(stack))?;
        if round >= WARM_UP {
            bare.push_time(time);
            ours.push_time(time_of_ours);
            start.push_time(time_of_start);
        }
    }
    ask(&orders.placement, "DELETE", &format!("/resource_providers/{node}"), None).await?;
    stack.store.txn(Txn::new().delete(orders.keys.node(node))).await?;
    Ok(vec![
        Figure {
            name: "eschedule: process start → NOTIFIED TARGET",
            unit: "ms",
            ours,
            bare: Some((
                "its two placement and two etcd requests on fresh connections, the first two at once",
                bare,
            )),
            goals: vec![Goal::Ratio(2.0)],
        },
        Figure {
            name: "  of it the process alone (eschedule --version)",
            unit: "ms",
            ours: start,
            bare: None,
            goals: vec![],
        },
    ])
}

/// A provider with room for everything and the key of a living node.
async fn pretend_to_live(orders: &Orders<'_>) -> Result<()> {
    let (node, placement) = (orders.node, &orders.stack.placement);
    placement.ensure_provider(node, &node.to_string()).await?;
    let plenty = Inventory {
        total: 1 << 20,
        reserved: 0,
        min_unit: 1,
        max_unit: 1 << 20,
        step_size: 1,
        allocation_ratio: 1.0,
    };
    let inventory = orders.resources.keys().map(|class| (class.clone(), plenty.clone())).collect();
    placement.set_inventory(node, &inventory).await?;
    let record = NodeRecord {
        version: RECORD_VERSION,
        node,
        name: node.to_string(),
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        virt_type: "simulated".to_owned(),
        machine: String::new(),
        host: String::new(),
        started_at: Timestamp::now(),
    };
    orders.put(orders.keys.node(node), encode(&record)).await
}

/// Nothing stays of a round, so that the last finds what the first found.
async fn clean(orders: &Orders<'_>, instance: InstanceId) -> Result<()> {
    orders.stack.placement.release(instance).await?;
    let keys = &orders.keys;
    let txn = Txn::new().delete(keys.request(orders.node, instance)).delete(keys.instance(instance));
    orders.stack.store.txn(txn).await?;
    Ok(())
}

/// Runs the program; its own bounds on every request bound the wait for its line.
fn run(orders: &Orders<'_>) -> Result<(Duration, InstanceId)> {
    let mut command = orders.stack.command("eschedule");
    command.arg(TINY).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut line = String::new();
    let begun = Instant::now();
    let mut child = command.spawn().context("failed to start eschedule")?;
    let stdout = child.stdout.take().context("eschedule has no output")?;
    BufReader::new(stdout).read_line(&mut line)?;
    let time = begun.elapsed();
    let status = child.wait()?;
    let wanted = format!("NOTIFIED TARGET, {}, OF INSTANCE ", orders.node);
    let instance = line.trim_end().strip_prefix(&wanted);
    let instance = instance.with_context(|| format!("eschedule ended with {status} and said `{line}`"))?;
    Ok((time, instance.parse()?))
}

/// A process that only starts, to tell what of the time no code of `schedule` can change.
fn only_start(stack: &Stack) -> Result<Duration> {
    let mut command = stack.command("eschedule");
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null());
    let begun = Instant::now();
    let status = command.status().context("failed to start eschedule")?;
    ensure!(status.success(), "eschedule --version ended with {status}");
    Ok(begun.elapsed())
}

async fn bare_round(orders: &Orders<'_>) -> Result<(Duration, InstanceId)> {
    let (node, keys, instance) = (orders.node, &orders.keys, Orders::instance());
    let index = encode(&IndexEntry {
        version: RECORD_VERSION,
        node: Some(node),
        name: None,
        project: "default".into(),
        created_at: jiff::Timestamp::now(),
    });
    let request = orders.request(instance, ec_model::Desired::Active);
    let endpoint = orders.stack.etcd.endpoint();
    let path = format!("/allocation_candidates?{TINY}");

    let begun = Instant::now();
    let nodes = async {
        let mut etcd = etcd_client::Client::connect([endpoint], None).await?.kv_client();
        let answer = etcd.get(keys.nodes(), Some(GetOptions::new().with_prefix())).await?;
        ensure!(answer.count() == 1, "{} nodes live where one was made", answer.count());
        Ok(etcd)
    };
    let (etcd, candidates) = tokio::join!(nodes, ask(&orders.placement, "GET", &path, None));
    let (mut etcd, candidates) = (etcd?, candidates?);
    let claim = claim_of(&candidates["allocation_requests"][0]);
    ask(&orders.placement, "PUT", &format!("/allocations/{instance}"), Some(&claim)).await?;
    let key = keys.request(node, instance);
    let txn = etcd_client::Txn::new()
        .when([
            Compare::create_revision(keys.node(node), CompareOp::Greater, 0),
            Compare::create_revision(key.clone(), CompareOp::Equal, 0),
        ])
        .and_then([TxnOp::put(key, request, None), TxnOp::put(keys.instance(instance), index, None)]);
    ensure!(etcd.txn(txn).await?.succeeded(), "etcd refused the request's transaction");
    Ok((begun.elapsed(), instance))
}

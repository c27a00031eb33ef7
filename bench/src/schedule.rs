//! `eschedule` from the start of its process to `NOTIFIED TARGET`, beside the same requests by bare clients.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, Keyspace, NodeId, NodeRecord, RECORD_VERSION, encode};
use ec_placement_client::Inventory;
use ec_store::{Store, Txn};
use ec_tests::{Stack, TINY};
use etcd_client::{Compare, CompareOp, GetOptions, TxnOp};
use serde_json::json;

use crate::figures::{Comparison, Goal, Rounds};

const GOAL: Goal = Goal { ratio: 2.0, ms: None };
/// Not measured: caches fill, the placement's interpreter warms up.
const WARM_UP: usize = 3;

/// Measures. The node is there by its records only, so that nothing is built meanwhile.
pub(crate) async fn measure(stack: &Stack, rounds: usize) -> Result<Comparison> {
    stand_in(stack).await?;
    let mut measured = Rounds::default();
    for round in 0..rounds + WARM_UP {
        let (instance, ours) = tokio::task::block_in_place(|| ours(stack))?;
        clean_up(stack, instance).await?;
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let begin = Instant::now();
        bare(stack, instance).await?;
        let bare = begin.elapsed();
        clean_up(stack, instance).await?;
        if round >= WARM_UP {
            measured.ours.push(ours);
            measured.bare.push(bare);
        }
    }
    let keys = Keyspace::default();
    stack.store.txn(Txn::new().delete(keys.node(stack.node))).await?;
    Ok(measured.compare("eschedule: process start to NOTIFIED", GOAL))
}

/// A provider with room, and the key of an agent that lives.
async fn stand_in(stack: &Stack) -> Result<()> {
    stack.placement.ensure_provider(stack.node, &stack.node.to_string()).await?;
    let inventory = |total| Inventory {
        total,
        reserved: 0,
        min_unit: 1,
        max_unit: total,
        step_size: 1,
        allocation_ratio: 1.0,
    };
    let inventories = [("VCPU", 64), ("MEMORY_MB", 65_536), ("DISK_GB", 1000)];
    let inventories =
        inventories.into_iter().map(|(class, total)| (class.to_owned(), inventory(total))).collect();
    stack.placement.set_inventory(stack.node, &inventories).await?;
    let record = NodeRecord {
        version: RECORD_VERSION,
        node: stack.node,
        name: stack.node.to_string(),
        agent: "bench".to_owned(),
        virt_type: "qemu".to_owned(),
        started_at: jiff::Timestamp::now(),
    };
    let key = Keyspace::default().node(stack.node);
    stack.store.txn(Txn::new().put(key, encode(&record))).await?;
    Ok(())
}

fn ours(stack: &Stack) -> Result<(InstanceId, Duration)> {
    let begin = Instant::now();
    let mut child =
        stack.command("eschedule").arg(TINY).stdout(Stdio::piped()).spawn().context("eschedule")?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
    let elapsed = begin.elapsed();
    ensure!(child.wait()?.success() && line.starts_with("NOTIFIED TARGET"), "unexpected answer: {line}");
    let instance = line.trim_end().rsplit(' ').next().context("no instance")?.parse()?;
    Ok((instance, elapsed))
}

/// What cannot be left out: who is alive, who has room, the claim, the request; over new connections, as
/// any new process has them.
async fn bare(stack: &Stack, instance: InstanceId) -> Result<()> {
    let keys = Keyspace::default();
    let endpoint = stack.placement_server.endpoint();
    let http = reqwest::Client::builder().tls_certs_only([]).build()?;
    let request = |method, path: &str| {
        http.request(method, format!("{endpoint}/{path}"))
            .header("X-Auth-Token", "admin")
            .header("OpenStack-API-Version", "placement 1.39")
    };
    let alive = async {
        let mut etcd = etcd_client::Client::connect([stack.etcd.endpoint()], None).await?;
        let nodes = etcd.get(keys.nodes(), Some(GetOptions::new().with_prefix())).await?;
        ensure!(nodes.kvs().len() == 1, "one node is alive");
        Ok(etcd)
    };
    let room = async {
        let answer = request(reqwest::Method::GET, &format!("allocation_candidates?{TINY}")).send().await?;
        Ok(answer.error_for_status()?.json::<serde_json::Value>().await?)
    };
    let (mut etcd, candidates) = tokio::try_join!(alive, room)?;
    let chosen = &candidates["allocation_requests"][0];
    let claim = json!({
        "allocations": chosen["allocations"], "mappings": chosen["mappings"], "consumer_generation": null,
        "project_id": "bench", "user_id": "bench", "consumer_type": "INSTANCE",
    });
    let answer =
        request(reqwest::Method::PUT, &format!("allocations/{instance}")).json(&claim).send().await?;
    answer.error_for_status()?;
    let (key, value) = (keys.request(stack.node, instance), vec![b' '; 400]);
    let txn = etcd_client::Txn::new()
        .when([
            Compare::create_revision(keys.node(stack.node), CompareOp::Greater, 0),
            Compare::create_revision(key.as_str(), CompareOp::Equal, 0),
        ])
        .and_then([TxnOp::put(key.as_str(), value, None), TxnOp::put(keys.instance(instance), "{}", None)]);
    ensure!(etcd.txn(txn).await?.succeeded(), "the request was not written");
    Ok(())
}

async fn clean_up(stack: &Stack, instance: InstanceId) -> Result<()> {
    stack.placement.release(instance).await?;
    let keys = Keyspace::default();
    let txn = Txn::new().delete(keys.request(stack.node, instance)).delete(keys.instance(instance));
    stack.store.txn(txn).await?;
    Ok(())
}

/// Another node's uuid, for what the agent under test must not see.
pub(crate) fn nobody() -> NodeId {
    NodeId::new(uuid::Uuid::new_v4())
}

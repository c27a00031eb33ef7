//! Bare etcd: what all of it stands on.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use etcd_client::{Client, Compare, CompareOp, Txn, TxnOp};
use tokio::task::JoinSet;

/// Single-key compare-and-swap transactions a second, each client on a key of its own.
pub(super) async fn compare_and_swap(endpoint: &str, clients: usize, time: Duration) -> Result<f64> {
    let mut connections = Vec::new();
    for _ in 0..clients.min(4) {
        connections.push(Client::connect([endpoint], None).await?);
    }
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for number in 0..clients {
        let mut client = connections[number % connections.len()].kv_client();
        tasks.spawn(async move {
            let key = format!("/bench/cas/{number}");
            let put = client.put(key.as_str(), "0", None).await?;
            let mut revision = put.header().context("no header")?.revision();
            let mut done = 0_u64;
            while begin.elapsed() < time {
                let txn = Txn::new()
                    .when([Compare::mod_revision(key.as_str(), CompareOp::Equal, revision)])
                    .and_then([TxnOp::put(
                        key.as_str(),
                        "a value of some fifty bytes, as short as a record is",
                        None,
                    )]);
                let answer = client.txn(txn).await?;
                anyhow::ensure!(answer.succeeded(), "nobody else writes there");
                revision = answer.header().context("no header")?.revision();
                done += 1;
            }
            Ok(done)
        });
    }
    let mut done = 0;
    while let Some(ended) = tasks.join_next().await {
        done += ended??;
    }
    Ok(done as f64 / begin.elapsed().as_secs_f64())
}

/// How many keys it has.
pub(super) async fn count(endpoint: &str) -> Result<u64> {
    let mut client = Client::connect([endpoint], None).await?;
    let options = etcd_client::GetOptions::new().with_all_keys().with_count_only();
    Ok(client.get("", Some(options)).await?.count().try_into()?)
}

/// Puts so many keys of the length of a record, each alone: many large transactions would leave an old etcd slower
/// than it is.
pub(super) async fn fill(endpoint: &str, keys: u64) -> Result<()> {
    const CLIENTS: usize = 256;
    let client = Client::connect([endpoint], None).await?;
    let mut tasks = JoinSet::new();
    for first in (0..keys).take(CLIENTS) {
        let mut client = client.kv_client();
        tasks.spawn(async move {
            let value = "r".repeat(200);
            for number in (first..keys).step_by(CLIENTS) {
                client.put(format!("/bench/held/{number}"), value.as_str(), None).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// Bytes of etcd's database once history is compacted away and the file is made small again.
pub(super) async fn compacted_size(endpoint: &str) -> Result<i64> {
    let mut client = Client::connect([endpoint], None).await?;
    let answer = client.get("/", None).await?;
    let revision = answer.header().context("no header")?.revision();
    client.compact(revision, Some(etcd_client::CompactionOptions::new().with_physical())).await?;
    client.defragment().await?;
    size(endpoint).await
}

/// Bytes of etcd's database file.
pub(super) async fn size(endpoint: &str) -> Result<i64> {
    let mut client = Client::connect([endpoint], None).await?;
    Ok(client.status().await?.db_size())
}

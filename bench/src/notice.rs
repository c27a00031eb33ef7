//! From a request's put to the agent's first act, beside a bare watch of the same etcd.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use async_trait::async_trait;
use ec_model::{Desired, ImageRef, InstanceId, Keyspace, RECORD_VERSION, Request, Resources, encode};
use ec_store::{EtcdStore, LeaseId, Listing, Op, Revision, Store, StoreResult, Txn, TxnOutcome, Watch};
use ec_tests::Stack;
use etcd_client::WatchOptions;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    figures::{Comparison, Goal, Rounds},
    schedule::nobody,
    simulated,
};

const GOAL: Goal = Goal { ratio: 2.0, ms: Some(5.0) };
const WARM_UP: usize = 5;
const PATIENCE: Duration = Duration::from_secs(20);

/// Measures. The first act is the write of PREPARING; its moment is when the agent sends it.
pub(crate) async fn measure(stack: &Stack, rounds: usize) -> Result<Comparison> {
    let (acts, mut first_act) = mpsc::unbounded_channel();
    let shutdown = CancellationToken::new();
    let agent = {
        let (config, shutdown) = (stack.directory().join("compute.yaml"), shutdown.clone());
        tokio::spawn(
            async move { simulated::run(&config, shutdown, |store| Arc::new(Spy { store, acts })).await },
        )
    };
    stack
        .until("the agent is alive", async || {
            Ok(stack.store.get(&Keyspace::default().node(stack.node)).await?.0.is_some())
        })
        .await?;
    let mut measured = Rounds::default();
    let keys = Keyspace::default();
    let mut etcd = etcd_client::Client::connect([stack.etcd.endpoint()], None).await?;
    let other = keys.requests(nobody());
    let mut watch = etcd.watch(other.as_str(), Some(WatchOptions::new().with_prefix())).await?;
    for round in 0..rounds + WARM_UP {
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let (request, status) = (keys.request(stack.node, instance), keys.status(stack.node, instance));
        let begin = Instant::now();
        etcd.put(request.as_str(), encode(&wish(instance)), None).await?;
        let ours = loop {
            let (key, at) = tokio::time::timeout(PATIENCE, first_act.recv()).await?.context("no act")?;
            if key == status {
                break at.duration_since(begin);
            }
        };
        // It has no claim, so the agent gives it up and deletes the request.
        stack
            .until("the request is done with", async || Ok(stack.store.get(&request).await?.0.is_none()))
            .await?;

        let begin = Instant::now();
        etcd.put(format!("{other}{instance}"), encode(&wish(instance)), None).await?;
        tokio::time::timeout(PATIENCE, watch.message()).await??.context("the watch ended")?;
        let bare = begin.elapsed();
        if round >= WARM_UP {
            measured.ours.push(ours);
            measured.bare.push(bare);
        }
    }
    shutdown.cancel();
    agent.await??;
    Ok(measured.compare("agent: put to first act", GOAL))
}

fn wish(instance: InstanceId) -> Request {
    Request {
        version: RECORD_VERSION,
        instance,
        desired: Desired::Active,
        name: None,
        resources: Resources::new(),
        image: Some(ImageRef { url: "file:///nonexistent".to_owned(), sha256: None }),
        keys: Vec::new(),
        user_data: None,
        project: "bench".to_owned(),
        user: "bench".to_owned(),
        created_at: jiff::Timestamp::now(),
    }
}

/// The store, telling of each put when it is sent.
struct Spy {
    store: EtcdStore,
    acts: mpsc::UnboundedSender<(String, Instant)>,
}

#[async_trait]
impl Store for Spy {
    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let now = Instant::now();
        for op in &txn.then {
            if let Op::Put { key, .. } = op {
                self.acts.send((key.clone(), now)).ok();
            }
        }
        self.store.txn(txn).await
    }

    async fn get(&self, key: &str) -> StoreResult<(Option<ec_store::KeyValue>, Revision)> {
        self.store.get(key).await
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.store.list(prefix).await
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.store.watch(prefix, from).await
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        self.store.grant(ttl).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.store.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.store.revoke(lease).await
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        self.store.compact(revision).await
    }
}

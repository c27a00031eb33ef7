//! Hosts that will never come back: `eschedule node forget`, on a real etcd and a real placement.

use std::{
    collections::BTreeMap,
    process::Output,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use ec_cloud::Cloud;
use ec_model::{InstanceId, Node, NodeId, Outcomes, SharedStorage, State, Status, decode, encode};
use ec_placement_client::{Answer, PlacementClient, PlacementConfig, Request, Transport};
use ec_store::{EtcdStore, KeyValue, Layer, Store, StoreResult, Txn, TxnOutcome};
use ec_tests::{PlacementServer, Stack, TINY, control::Control};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::Notify;

const PLENTY: &[(&str, u64)] = &[("VCPU", 64), ("MEMORY_MB", 1 << 16), ("DISK_GB", 100)];

/// A host with two guests, of which one has a volume, and what agents keep of such; and with a claim of a killed command.
struct Host {
    name: String,
    node: NodeId,
    web: InstanceId,
    data: InstanceId,
    leaked: InstanceId,
}

async fn host(control: &Control, name: &str) -> Result<Host> {
    let node = control.node(name, true, PLENTY).await?;
    let (keys, at) = (&control.keys, node.to_string());
    let record = Node {
        node,
        name: name.to_owned(),
        created_at: Timestamp::now(),
        troubles: Vec::new(),
        revoked: false,
    };
    control.put(keys.node(node), encode(&record)).await?;
    let file = control.directory().join("user-data");
    std::fs::write(&file, "#!/bin/sh\n")?;
    let file = file.display().to_string();
    let [web_name, db_name, data_name] = ["web", "db", "data"].map(|what| format!("{name}-{what}"));
    let (_, web) = control.schedule(&[TINY, "--name", &web_name, "--node", &at, "--user-data", &file])?;
    let (_, db) = control.schedule(&[TINY, "--name", &db_name, "--node", &at])?;
    for guest in [web, db] {
        control.status(node, guest, State::Active, Some("10.0.0.1")).await?;
        // Of one nobody can read what came of it.
        let outcomes = Outcomes { instance: guest, node, outcomes: Vec::new() };
        let outcomes = if guest == web { encode(&outcomes) } else { b"{}".to_vec() };
        control.put(keys.outcomes(node, guest), std::str::from_utf8(&outcomes)?).await?;
    }
    let made = control.done(&["volume", "create", &data_name, "--size", "1", "--node", &at, "-o", "json"])?;
    let data: InstanceId =
        serde_json::from_str::<Value>(&made)?["volume"].as_str().context("a uuid")?.parse()?;
    control.status(node, data, State::Active, None).await?;
    control.done(&["volume", "attach", &data_name, &web_name])?;
    let told = control.get(&keys.status(node, web)).await?.context("it told")?;
    let mut told: Status = decode(&told.value)?;
    let wish = control.request(node, web).await?.context("it is asked for")?;
    (told.volumes, told.observed_generation) = (wish.volumes, wish.generation);
    control.put(keys.status(node, web), encode(&told)).await?;
    let leaked = InstanceId::new(uuid::Uuid::new_v4());
    let claimed = [(node, [("VCPU".to_owned(), 1)].into())].into();
    control.placement.claim_exact(leaked, &claimed, "default", "default").await?;
    Ok(Host { name: name.to_owned(), node, web, data, leaked })
}

impl Host {
    async fn dies(&self, control: &Control) -> Result<()> {
        control.delete(control.keys.alive(self.node)).await
    }

    /// Its users end all that they had there; also the volume of a guest that has it for ever.
    fn ends(&self, control: &Control) -> Result<()> {
        control.done(&["destroy", &format!("{}-web", self.name), &format!("{}-db", self.name)])?;
        control.done(&["volume", "delete", &format!("{}-data", self.name)]).map(drop)
    }

    fn forget(&self, control: &Control) -> Result<Output> {
        control.eschedule(&["node", "forget", &self.name])
    }

    /// It is refused with this in one line, and nothing is changed.
    async fn refused(&self, control: &Control, wanted: &[&str]) -> Result<()> {
        let before = all(control).await?;
        let output = self.forget(control)?;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1) && said.lines().count() == 1, "{said}");
        ensure!(wanted.iter().all(|wanted| said.contains(wanted)), "{wanted:?}: {said}");
        ensure!(all(control).await? == before, "something was changed: {said}");
        Ok(())
    }

    /// Nothing is left of it anywhere, but this, and for a day what came of its instances.
    async fn is_gone(&self, control: &Control, but: &[String]) -> Result<()> {
        let node = self.node.to_string();
        let outcomes = control.keys.all_outcomes(self.node);
        let pairs = control.store.list("/ecompute/").await?.pairs;
        let stays = |pair: &KeyValue| !(pair.key.starts_with(&outcomes) && pair.lease.is_some());
        let left = pairs.into_iter().filter(|pair| pair.key.contains(&node) && stays(pair));
        let left: Vec<_> = left.map(|pair| pair.key).collect();
        ensure!(left == but, "{left:?}");
        ensure!(control.placement.provider(self.node).await?.is_none());
        for claimant in [self.web, self.data, self.leaked] {
            ensure!(control.placement.allocations(claimant).await?.is_none(), "{claimant}");
        }
        let told = control.done(&["events", &self.web.to_string(), "-o", "json"])?;
        let told: Vec<Value> = serde_json::from_str(&told)?;
        let deleted = told.iter().find(|event| event["verb"] == "delete").context("it was asked for")?;
        ensure!(deleted["outcome"] == "done", "{deleted}");
        for command in ["nodes", "doctor", "list"] {
            let shown = String::from_utf8(control.eschedule(&[command])?.stdout)?;
            ensure!(!shown.contains(&self.name) && !shown.contains(&node), "{command}: {shown}");
        }
        Ok(())
    }
}

/// All keys of the cloud and of its placement, and when they were written.
async fn all(control: &Control) -> Result<BTreeMap<String, i64>> {
    let pairs = control.store.list("/ecompute/").await?.pairs;
    Ok(pairs.into_iter().map(|pair| (pair.key, pair.mod_revision)).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_which_anything_is_wanted_is_not_forgotten() -> Result<()> {
    let control = Control::start().await?;
    let lost = host(&control, "h1").await?;
    let (keys, node) = (&control.keys, lost.node);
    lost.refused(&control, &["cannot forget node", "its agent is alive"]).await?;
    control.put(keys.agent(node), "").await?;
    lost.dies(&control).await?;
    lost.refused(&control, &["its agent is alive"]).await?;
    control.delete(keys.agent(node)).await?;
    let ends = "`eschedule destroy`, and then `eschedule volume delete`, ends that";
    lost.refused(&control, &["2 instances and 1 volume (", "h1-web", "h1-db", "h1-data", ends]).await?;

    // A record without a request is wanted, and so is what is told of without both.
    lost.ends(&control)?;
    let request = control.get(&keys.request(node, lost.web)).await?.context("it is there")?;
    control.delete(keys.request(node, lost.web)).await?;
    control.status(node, lost.web, State::Unclaimed, None).await?;
    lost.refused(&control, &["it told of 1 instance", "`eschedule destroy` asks", "eschedule heal"]).await?;
    control.put(keys.request(node, lost.web), "{").await?;
    lost.refused(&control, &[&lost.web.to_string(), "cannot be read", "not touched"]).await?;
    control.put(keys.request(node, lost.web), request.value).await?;
    let record = control.get(&keys.node(node)).await?.context("it is there")?;
    control.put(keys.node(node), "{").await?;
    let by_uuid = control.eschedule(&["node", "forget", &node.to_string()])?;
    let said = String::from_utf8(by_uuid.stderr)?;
    ensure!(by_uuid.status.code() == Some(1) && said.contains("cannot be read"), "{said}");
    control.put(keys.node(node), record.value).await?;

    // Of one that etcd does not know nothing is taken away in placement either.
    let stranger = control.node("stranger", false, PLENTY).await?;
    for word in [&stranger.to_string(), "stranger", "nobody"] {
        let unknown = control.eschedule(&["node", "forget", word])?;
        let said = String::from_utf8(unknown.stderr)?;
        ensure!(unknown.status.code() == Some(1) && said.lines().count() == 1, "{said}");
    }
    ensure!(control.placement.provider(stranger).await?.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_its_users_ended_is_concluded_and_nothing_is_left_of_the_node() -> Result<()> {
    let control = Control::start().await?;
    let (lost, kept) = (host(&control, "h1").await?, host(&control, "h2").await?);
    let (keys, node) = (&control.keys, lost.node);
    lost.dies(&control).await?;
    // The doctor says how it is mended, and that is so.
    let doctor = String::from_utf8(control.eschedule(&["doctor"])?.stdout)?;
    ensure!(doctor.contains("h1") && doctor.contains("eschedule node forget"), "{doctor}");
    lost.ends(&control)?;
    // What agents keep beside, and what failed before it ever ran.
    for key in [keys.held(node, lost.web), keys.held_user_data(node, lost.web)] {
        control.put(key, "{}").await?;
    }
    control.put(keys.member("default", "gone", node, lost.web), "").await?;
    let failed = InstanceId::new(uuid::Uuid::new_v4());
    control.status(node, failed, State::Error, None).await?;
    lost.refused(&control, &["it told of 1 instance"]).await?;
    let status = control.get(&keys.status(node, failed)).await?.context("it is there")?;
    let lease = control.store.grant(Duration::from_secs(3600)).await?;
    control.store.txn(Txn::new().put_leased(status.key, status.value, lease)).await?;

    let others = control.count(&format!("requests/{}", kept.node)).await?;
    let id = "req-00000000-0000-4000-8000-000000000009";
    let told = control.done(&["--request-id", id, "node", "forget", "h1", "-o", "json"])?;
    let wanted = json!({"deleted": "h1", "state": "DELETED", "request_id": id});
    assert_eq!(serde_json::from_str::<Value>(&told)?, wanted);
    lost.is_gone(&control, &[]).await?;
    // All of the other stays, and its name, which nobody bears any more, is nobody's.
    assert_eq!(control.count(&format!("requests/{}", kept.node)).await?, others);
    ensure!(control.placement.allocations(kept.web).await?.is_some());
    assert_eq!(lost.forget(&control)?.status.code(), Some(1), "there is none of that name");

    // Several at once: one that is refused keeps no other from it.
    let third = host(&control, "h3").await?;
    third.dies(&control).await?;
    third.ends(&control)?;
    let output = control.eschedule(&["node", "forget", "h2", "h3", "-o", "name"])?;
    assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b"h3\n"[..]), "{output:?}");
    third.is_gone(&control, &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_node_is_forgotten_but_for_its_mark() -> Result<()> {
    let control = Control::start().await?;
    let lost = host(&control, "h1").await?;
    let key = control.keys.node(lost.node);
    let mut record: Node = decode(&control.get(&key).await?.context("it is there")?.value)?;
    record.revoked = true;
    control.put(&key, encode(&record)).await?;
    lost.dies(&control).await?;
    lost.ends(&control)?;
    for _ in 0..2 {
        let output = lost.forget(&control)?;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.status.success() && said.contains("stays marked as revoked"), "{said}");
        lost.is_gone(&control, std::slice::from_ref(&key)).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_that_are_somebodys_keep_the_provider_and_shared_storage_stays() -> Result<()> {
    let control = Control::start().await?;
    let lost = host(&control, "h1").await?;
    let storage = SharedStorage::named("pool");
    control.placement.join_shared(&storage, lost.node).await?;
    // There its volume lies, and nothing of that is claimed of the node.
    let inventory = [("DISK_GB".to_owned(), ec_tests::control::all_of(9))].into();
    control.placement.set_inventory(storage.provider, &inventory).await?;
    let claimed = [(storage.provider, [("DISK_GB".to_owned(), 1)].into())].into();
    control.placement.release(lost.data).await?;
    control.placement.claim_exact(lost.data, &claimed, "default", "default").await?;
    lost.dies(&control).await?;
    lost.ends(&control)?;
    // A command is about to place something, as far as anybody can tell.
    let record = ec_tests::control::unplaced(lost.leaked, None, "default", Timestamp::now());
    control.put(control.keys.instance(lost.leaked), encode(&record)).await?;
    let output = lost.forget(&control)?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && said.contains(&lost.leaked.to_string()), "{said}");
    ensure!(said.contains("storage `pool`") && said.contains(&format!("directory {}", lost.node)), "{said}");
    ensure!(control.placement.allocations(lost.leaked).await?.is_some(), "it is not ours to take away");
    control.delete(control.keys.instance(lost.leaked)).await?;
    ensure!(lost.forget(&control)?.status.success(), "by its name still");
    lost.is_gone(&control, &[]).await?;
    // Whatever somebody wrote of it.
    let record =
        json!({"version": 1, "node": storage.provider, "name": "pool", "created_at": Timestamp::now()});
    for (wanted, value) in
        [("which may be anybody's", None), ("no node, but storage", Some(record.to_string()))]
    {
        if let Some(value) = value {
            control.put(control.keys.node(storage.provider), value).await?;
        }
        let refused = control.eschedule(&["node", "forget", &storage.provider.to_string()])?;
        let said = String::from_utf8(refused.stderr)?;
        ensure!(refused.status.code() == Some(1) && said.contains(wanted), "{said}");
    }
    ensure!(control.placement.provider(storage.provider).await?.is_some());
    Ok(())
}

/// Whoever is behind it is killed at one step.
#[derive(Clone)]
struct Killed {
    steps: Arc<AtomicUsize>,
    at: usize,
    done: bool,
    is: Arc<Notify>,
}

impl Killed {
    /// Does a step, unless it is that before, or after, which nobody goes on.
    async fn step<T>(&self, act: impl Future<Output = T>) -> T {
        let is_last = self.steps.fetch_add(1, Ordering::SeqCst) == self.at;
        if is_last && !self.done {
            self.is.notify_one();
            return std::future::pending().await;
        }
        let outcome = act.await;
        if is_last {
            self.is.notify_one();
            return std::future::pending().await;
        }
        outcome
    }
}

struct Etcd(EtcdStore, Killed);

#[async_trait]
impl Layer for Etcd {
    fn inner(&self) -> &dyn Store {
        &self.0
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        self.1.step(self.0.txn(txn)).await
    }
}

struct Way(Arc<dyn Transport>, Killed);

#[async_trait]
impl Transport for Way {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        // What only looks leaves nothing.
        match request.method.as_str() {
            "GET" => self.0.exchange(request).await,
            _ => self.1.step(self.0.exchange(request)).await,
        }
    }
}

/// Its user of the library.
fn cloud(control: &Control, store: impl Store, placement: PlacementClient) -> Cloud {
    Cloud {
        store: Arc::new(store),
        placement: Arc::new(placement),
        keys: control.keys.clone(),
        project: "default".to_owned(),
        user: "default".to_owned(),
        host: ec_runtime::Host::default(),
        request_id: None,
        notice: |_| (),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_and_said_again_it_goes_on() -> Result<()> {
    let control = Control::start().await?;
    let mut came_to_its_end = false;
    for at in 0.. {
        for done in [false, true] {
            let lost = host(&control, &format!("h{at}{done}")).await?;
            lost.dies(&control).await?;
            lost.ends(&control)?;
            let killed = Killed { steps: Arc::default(), at, done, is: Arc::default() };
            let placement = control.placement.clone().through(|way| Arc::new(Way(way, killed.clone())));
            let cloud = cloud(&control, Etcd(control.store.clone(), killed.clone()), placement);
            let ended = tokio::select! {
                forgotten = ec_cloud::forget(&cloud, lost.node) => { forgotten?; true }
                () = killed.is.notified() => false,
            };
            came_to_its_end = ended;
            if !ended {
                let again = lost.forget(&control)?;
                // Where all was done nothing bears its name any more.
                let is_last = control.get(&control.keys.node(lost.node)).await?.is_none();
                ensure!(again.status.success() || is_last, "at {at}, {done}: {again:?}");
            }
            lost.is_gone(&control, &[]).await.with_context(|| format!("at {at}, {done}"))?;
        }
        if came_to_its_end {
            ensure!(at >= 8, "it has more steps than {at}");
            return Ok(());
        }
    }
    unreachable!("it comes to its end")
}

/// An etcd in which a node's agent comes at the moment of the first transaction that anybody writes.
struct Comes(EtcdStore, Mutex<Option<Txn>>);

#[async_trait]
impl Layer for Comes {
    fn inner(&self) -> &dyn Store {
        &self.0
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let comes = self.1.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(comes) = comes {
            self.0.txn(comes).await?;
        }
        self.0.txn(txn).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_comes_meanwhile_finds_what_it_is_to_do() -> Result<()> {
    let control = Control::start().await?;
    let lost = host(&control, "h1").await?;
    lost.dies(&control).await?;
    lost.ends(&control)?;
    let (keys, node) = (&control.keys, lost.node);
    for sign in [keys.agent(node), keys.alive(node)] {
        let comes = Comes(control.store.clone(), Mutex::new(Some(Txn::new().put(sign.clone(), ""))));
        let refused = ec_cloud::forget(&cloud(&control, comes, control.placement.clone()), node).await;
        let why = refused.err().context("it is alive")?.to_string();
        ensure!(why.contains("its agent is alive"), "{why}");
        for key in [keys.request(node, lost.web), keys.status(node, lost.web), keys.node(node)] {
            ensure!(control.get(&key).await?.is_some(), "{key}");
        }
        ensure!(control.placement.provider(node).await?.is_some());
        control.delete(sign).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn openstacks_placement_gives_claims_and_provider_back_too() -> Result<()> {
    let mut control = Control::start().await?;
    let directory = tempfile::tempdir()?;
    control.placement_server = PlacementServer::start_openstack(directory.path(), "")?;
    control.placement_server.until_it_answers().await?;
    let endpoint = control.placement_server.endpoint();
    control.placement = PlacementClient::new(&PlacementConfig { endpoint, ..PlacementConfig::default() })?;
    control.configure("")?;
    let lost = host(&control, "h1").await?;
    lost.dies(&control).await?;
    lost.ends(&control)?;
    ensure!(lost.forget(&control)?.status.success());
    lost.is_gone(&control, &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_comes_back_all_the_same_runs_its_guests_on_unclaimed() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let web = stack.schedule(&["--name", "web"])?;
    stack.until_state(web, State::Active).await?;
    let before = stack.libvirt.connection().lookup_domain_by_uuid(web.uuid())?.id();
    stack.kill_agent()?;
    let keys = ec_model::Keyspace::default();
    stack
        .until("its agent is given up", async || {
            let left = [keys.alive(stack.node), keys.agent(stack.node)];
            Ok(stack.store.get(&left[0]).await?.0.is_none() && stack.store.get(&left[1]).await?.0.is_none())
        })
        .await?;
    let node = stack.node.to_string();
    for arguments in [&["destroy", "web"][..], &["node", "forget", &node]] {
        let output = stack.eschedule(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
    }
    ensure!(stack.placement.allocations(web).await?.is_none());
    stack.start_agent("").await?;
    stack.until_state(web, State::Unclaimed).await?;
    stack
        .until("it is counted again", async || Ok(stack.placement.allocations(web).await?.is_some()))
        .await?;
    assert_eq!(stack.libvirt.connection().lookup_domain_by_uuid(web.uuid())?.id(), before, "it ran on");
    let destroyed = stack.eschedule(&["destroy", "--wait", &web.to_string()])?;
    ensure!(destroyed.status.success(), "{destroyed:?}");
    stack.until_exactly(&[]).await
}

//! Three replicas on a cluster of three etcd members, while all of them are killed in turn.

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ec_tests::program;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

const PROVIDERS: usize = 12;
const ROOM: i64 = 10;
const CLIENTS: u64 = 12;
const DURATION: Duration = Duration::from_secs(40);

/// A program that is killed and started again.
struct Process {
    command: Box<dyn Fn() -> Command + Send + Sync>,
    child: Option<Child>,
}

impl Process {
    fn start(command: impl Fn() -> Command + Send + Sync + 'static) -> Result<Self> {
        let mut process = Self { command: Box::new(command), child: None };
        process.go_on()?;
        Ok(process)
    }

    fn go_on(&mut self) -> Result<()> {
        self.child = Some((self.command)().stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        Ok(())
    }

    /// SIGKILL.
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_ports(count: usize) -> Result<Vec<u16>> {
    // All at once, so that they differ.
    let listeners: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}

/// The whole of it.
struct World {
    members: Vec<Process>,
    clients: Vec<u16>,
    replicas: Vec<Process>,
    urls: Vec<String>,
    _directory: TempDir,
}

impl World {
    fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let ports = free_ports(9)?;
        let (clients, peers, served) = (ports[..3].to_vec(), ports[3..6].to_vec(), ports[6..].to_vec());
        let cluster: Vec<String> =
            peers.iter().enumerate().map(|(at, port)| format!("m{at}=http://127.0.0.1:{port}")).collect();
        let cluster = cluster.join(",");
        let mut members = Vec::new();
        for at in 0..3 {
            let data = directory.path().join(format!("m{at}"));
            let (client, peer) =
                (format!("http://127.0.0.1:{}", clients[at]), format!("http://127.0.0.1:{}", peers[at]));
            let cluster = cluster.clone();
            members.push(Process::start(move || {
                let mut command = Command::new("etcd");
                command.arg("--name").arg(format!("m{at}")).arg("--data-dir").arg(&data);
                command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
                command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
                command.args([
                    "--initial-cluster",
                    &cluster,
                    "--heartbeat-interval",
                    "50",
                    "--election-timeout",
                    "500",
                ]);
                command
            })?);
        }
        let etcd: Vec<String> = clients.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
        let etcd = etcd.join(",");
        let mut replicas = Vec::new();
        for port in &served {
            let (listen, etcd) = (format!("127.0.0.1:{port}"), etcd.clone());
            replicas.push(Process::start(move || {
                let mut command = Command::new(program("eplacement"));
                command.args(["--listen", &listen, "--etcd", &etcd]);
                command
            })?);
        }
        let urls = served.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
        Ok(Self { members, clients, replicas, urls, _directory: directory })
    }

    /// The member that leads, by its own word.
    async fn leader(&self, http: &Client) -> Option<usize> {
        for (at, port) in self.clients.iter().enumerate() {
            let answer = http.get(format!("http://127.0.0.1:{port}/metrics")).send().await.ok()?;
            if answer.text().await.ok()?.contains("\netcd_server_is_leader 1") {
                return Some(at);
            }
        }
        None
    }
}

/// Sends to one of the replicas. `None`: no answer, or one that says that it is not known.
struct Api {
    http: Client,
    urls: Vec<String>,
}

impl Api {
    async fn send(
        &self,
        at: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Option<(u16, Value)> {
        let mut request = self
            .http
            .request(method, format!("{}{path}", self.urls[at % self.urls.len()]))
            .header("X-Auth-Token", "admin")
            .header("OpenStack-API-Version", "placement 1.39");
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = request.send().await.ok()?;
        let status = answer.status().as_u16();
        if status == 503 {
            assert!(answer.headers().contains_key("retry-after"), "a 503 says when to come again");
            return None;
        }
        let text = answer.text().await.ok()?;
        Some((status, serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    /// Sends to one replica after the other until one has done it. What was done without an answer is a
    /// conflict the next time.
    async fn until_done(&self, method: Method, path: &str, body: &Value) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(60);
        for at in 0.. {
            match self.send(at, method.clone(), path, Some(body)).await {
                Some((200 | 409, _)) => return Ok(()),
                Some((status, answer)) => bail!("{method} {path}: {status} {answer}"),
                None => ensure!(Instant::now() < end, "{method} {path}: no replica answers"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Asks one replica after the other until one answers.
    async fn get(&self, from: usize, path: &str) -> Result<(u16, Value)> {
        let end = Instant::now() + Duration::from_secs(60);
        let mut at = from;
        while Instant::now() < end {
            if let Some(answer) = self.send(at, Method::GET, path, None).await {
                return Ok(answer);
            }
            at += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bail!("no replica answers {path}")
    }
}

/// What a consumer uses, by provider; empty: it is not there.
type Use = BTreeMap<String, i64>;

fn read_use(document: &Value) -> Use {
    let entries = document["allocations"].as_object().into_iter().flatten();
    entries
        .map(|(provider, one)| (provider.clone(), one["resources"]["VCPU"].as_i64().unwrap_or(0)))
        .collect()
}

/// What clients know at the end: for each consumer, all that it may be.
type Known = Arc<Mutex<BTreeMap<String, Vec<Use>>>>;

#[derive(Default)]
struct Counts {
    acknowledged: AtomicU64,
    refused: AtomicU64,
    unknown: AtomicU64,
}

async fn client(
    seed: u64,
    api: Arc<Api>,
    known: Known,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
) -> Result<()> {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut mine: Vec<(String, Use, i64)> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let at = dice.random_range(0..3_usize);
        let old = (mine.len() > 8 || (!mine.is_empty() && dice.random_bool(0.5)))
            .then(|| mine.swap_remove(dice.random_range(0..mine.len())));
        let (consumer, before, generation) =
            old.unwrap_or_else(|| (Uuid::from_u128(dice.random()).to_string(), Use::new(), 0));
        // A new place, or a larger or smaller share of where it is, or nothing any more.
        let after: Use = match dice.random_range(0..4) {
            0 if !before.is_empty() => Use::new(),
            1 if !before.is_empty() => {
                before.keys().map(|own| (own.clone(), dice.random_range(1..4))).collect()
            }
            _ => {
                let path = "/allocation_candidates?resources=VCPU:1&limit=8";
                let (status, answer) = api.get(at, path).await?;
                ensure!(status == 200, "{answer}");
                let candidates = answer["allocation_requests"].as_array().context("no candidates")?;
                let Some(chosen) = candidates.choose(&mut dice) else {
                    if !before.is_empty() {
                        mine.push((consumer, before, generation));
                    }
                    continue;
                };
                read_use(chosen)
            }
        };
        let path = format!("/allocations/{consumer}");
        let answer = if after.is_empty() {
            api.send(at, Method::DELETE, &path, None).await
        } else {
            let allocations: BTreeMap<&String, Value> =
                after.iter().map(|(own, amount)| (own, json!({"resources": {"VCPU": amount}}))).collect();
            let body = json!({
                "allocations": allocations, "project_id": "p", "user_id": "u", "consumer_type": "INSTANCE",
                "consumer_generation": (generation > 0).then_some(generation),
            });
            api.send(at, Method::PUT, &path, Some(&body)).await
        };
        match answer {
            Some((204, _)) => {
                counts.acknowledged.fetch_add(1, Ordering::Relaxed);
                // Through another replica.
                let (status, answer) = api.get(at + 1, &path).await?;
                ensure!(status == 200, "{answer}");
                ensure!(read_use(&answer) == after, "{consumer} should use {after:?}: {answer}");
                let counted = answer["consumer_generation"].as_i64();
                ensure!(
                    after.is_empty() || counted == Some(generation + 1),
                    "{consumer}, after {generation}: {answer}"
                );
                if !after.is_empty() {
                    mine.push((consumer, after, generation + 1));
                }
            }
            Some((409, _)) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                if !before.is_empty() {
                    mine.push((consumer, before, generation));
                }
            }
            Some((status, answer)) => bail!("{status}: {answer}"),
            None => {
                // It may still happen; nobody touches it any more.
                counts.unknown.fetch_add(1, Ordering::Relaxed);
                known.lock().unwrap_or_else(PoisonError::into_inner).insert(consumer, vec![before, after]);
            }
        }
    }
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    known.extend(mine.into_iter().map(|(consumer, used, _)| (consumer, vec![used])));
    Ok(())
}

async fn watch_capacity(api: Arc<Api>, providers: Vec<String>, stop: Arc<AtomicBool>) -> Result<u64> {
    let (mut looks, mut at) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        for provider in &providers {
            at += 1;
            let (status, answer) = api.get(at, &format!("/resource_providers/{provider}/usages")).await?;
            ensure!(status == 200, "{answer}");
            let used = answer["usages"]["VCPU"].as_i64().context("no usage")?;
            ensure!((0..=ROOM).contains(&used), "{used} of {ROOM} are used at {provider}");
            looks += 1;
        }
    }
    Ok(looks)
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_killed_no_acknowledged_claim_is_lost_and_none_is_over_capacity() -> Result<()> {
    ec_runtime::install_tls_provider();
    let mut world = World::start()?;
    let http = Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?;
    let api = Arc::new(Api { http: http.clone(), urls: world.urls.clone() });
    let mut providers = Vec::new();
    for number in 0..PROVIDERS {
        let uuid = Uuid::new_v4().to_string();
        let body = json!({"name": format!("host-{number}"), "uuid": uuid});
        api.until_done(Method::POST, "/resource_providers", &body).await?;
        let body = json!({"resource_provider_generation": 0, "inventories": {"VCPU": {"total": ROOM}}});
        api.until_done(Method::PUT, &format!("/resource_providers/{uuid}/inventories"), &body).await?;
        providers.push(uuid);
    }
    let (known, counts, stop) =
        (Known::default(), Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
    let mut clients = tokio::task::JoinSet::new();
    for seed in 0..CLIENTS {
        let (api, known) = (Arc::clone(&api), Arc::clone(&known));
        clients.spawn(client(seed, api, known, Arc::clone(&counts), Arc::clone(&stop)));
    }
    let watcher = tokio::spawn(watch_capacity(Arc::clone(&api), providers.clone(), Arc::clone(&stop)));

    let (end, mut kills) = (Instant::now() + DURATION, [0, 0]);
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let replica = kills[1] % world.replicas.len();
        world.replicas[replica].kill();
        kills[1] += 1;
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.replicas[replica].go_on()?;
        if let Some(leader) = world.leader(&http).await {
            world.members[leader].kill();
            kills[0] += 1;
            tokio::time::sleep(Duration::from_secs(2)).await;
            world.members[leader].go_on()?;
        }
        if let Some(ended) = clients.try_join_next() {
            ended?.context("a client ended early")?;
        }
        ensure!(!watcher.is_finished(), "the watcher ended early");
    }
    stop.store(true, Ordering::Relaxed);
    for ended in clients.join_all().await {
        ended?;
    }
    let looks = watcher.await??;
    // What was unknown has happened by now, or never will.
    tokio::time::sleep(Duration::from_secs(12)).await;

    let known = known.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut sums: BTreeMap<&str, i64> = BTreeMap::new();
    let mut consumers = 0;
    let mut finals = Vec::new();
    for (at, (consumer, states)) in known.iter().enumerate() {
        let (status, answer) = api.get(at, &format!("/allocations/{consumer}")).await?;
        ensure!(status == 200, "{answer}");
        let found = read_use(&answer);
        ensure!(states.contains(&found), "{consumer} uses {found:?}, and should one of {states:?}");
        consumers += usize::from(!found.is_empty());
        finals.push(found);
    }
    for (provider, amount) in finals.iter().flatten() {
        *sums.entry(provider.as_str()).or_default() += amount;
    }
    let mut held = 0;
    for (at, provider) in providers.iter().enumerate() {
        let (_, answer) = api.get(at, &format!("/resource_providers/{provider}/usages")).await?;
        let sum = sums.get(provider.as_str()).copied().unwrap_or(0);
        ensure!(answer["usages"]["VCPU"] == sum, "{provider}: {answer}, and {sum} were acknowledged");
        let (_, answer) = api.get(at, &format!("/resource_providers/{provider}/allocations")).await?;
        held += answer["allocations"].as_object().map_or(0, serde_json::Map::len);
    }
    ensure!(held == consumers, "{held} allocations are held, and {consumers} known");
    let etcd = format!("http://127.0.0.1:{}", world.clients[0]);
    let output = Command::new(program("eplacement")).args(["check", "--etcd", &etcd]).output()?;
    ensure!(output.status.success(), "{output:?}");
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{} writes acknowledged, {} refused, {} of unknown outcome; {} leaders and {} replicas killed; usages looked \
         at {looks} times; {consumers} consumers at the end",
        count(&counts.acknowledged),
        count(&counts.refused),
        count(&counts.unknown),
        kills[0],
        kills[1]
    );
    ensure!(count(&counts.acknowledged) > 100, "too little happened");
    Ok(())
}

#[test]
fn a_cloud_is_exported_imported_and_checked_by_the_command_line() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let ports = free_ports(2)?;
    let (client, peer) = (format!("http://127.0.0.1:{}", ports[0]), format!("http://127.0.0.1:{}", ports[1]));
    let data = directory.path().join("etcd");
    let url = client.clone();
    let _etcd = Process::start(move || {
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(&data);
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        command
    })?;
    let tool = |arguments: &[&str]| -> Result<(Option<i32>, String)> {
        let output = Command::new(program("eplacement"))
            .args(arguments)
            .args(["--etcd", &client])
            .current_dir(directory.path())
            .output()?;
        let text = [output.stdout, output.stderr].concat();
        Ok((output.status.code(), String::from_utf8(text)?))
    };
    let end = Instant::now() + Duration::from_secs(30);
    while tool(&["check"])?.0 != Some(0) {
        ensure!(Instant::now() < end, "no etcd: {:?}", tool(&["check"])?);
    }
    let document = json!({
        "version": 1, "traits": ["CUSTOM_T"], "resource_classes": [],
        "providers": {"11111111-1111-4111-8111-111111111111": {
            "version": 1, "generation": 4, "name": "host", "inventories": {"VCPU": {"total": 4}},
            "traits": ["CUSTOM_T"], "created_at": 1, "updated_at": 1,
        }},
        "consumers": {"22222222-2222-4222-8222-222222222222": {
            "version": 1, "generation": 2, "project": "p", "user": "u", "created_at": 1,
            "allocations": {"11111111-1111-4111-8111-111111111111": {"VCPU": 2}},
        }},
    });
    fs::write(directory.path().join("cloud.json"), document.to_string())?;
    let imported = tool(&["import", "cloud.json"])?;
    ensure!(imported.0 == Some(0) && imported.1.contains("1 providers and 1 consumers"), "{imported:?}");
    ensure!(tool(&["export", "again.json"])?.0 == Some(0));
    let again: Value = serde_json::from_str(&fs::read_to_string(directory.path().join("again.json"))?)?;
    ensure!(again == document, "{again}");
    ensure!(tool(&["check"])?.1.contains("fit together"));
    // Said once more there is nothing to do; another cloud finds no place there.
    let second = tool(&["import", "cloud.json"])?;
    ensure!(second.0 == Some(0) && second.1.contains("both sides are the same"), "{second:?}");
    let mut other = document;
    other["consumers"] = json!({});
    fs::write(directory.path().join("other.json"), other.to_string())?;
    let other = tool(&["import", "other.json"])?;
    ensure!(other.0 == Some(1) && other.1.contains("empty place"), "{other:?}");
    // What cannot be served is refused before it is there.
    let host = "11111111-1111-4111-8111-111111111111";
    let mut broken = again.clone();
    broken["providers"][host]["parent"] = json!(host);
    fs::write(directory.path().join("broken.json"), broken.to_string())?;
    let refused = tool(&["import", "broken.json", "--prefix", "/broken"])?;
    ensure!(refused.0 == Some(2) && refused.1.contains("is in a loop"), "{refused:?}");
    let nothing = tool(&["check", "--prefix", "/broken"])?;
    ensure!(nothing.0 == Some(0) && nothing.1.contains("0 providers and 0 consumers"), "{nothing:?}");
    // What does not fit is told, when it is taken and where somebody deleted something.
    let mut loose = again;
    loose["providers"] = json!({});
    fs::write(directory.path().join("loose.json"), loose.to_string())?;
    let taken = tool(&["import", "loose.json", "--prefix", "/loose"])?;
    ensure!(taken.0 == Some(0) && taken.1.contains("warning: consumer"), "{taken:?}");
    let key = "/ecompute/placement/providers/11111111-1111-4111-8111-111111111111";
    let deleted = Command::new("etcdctl").args(["--endpoints", &client, "del", key]).output()?;
    ensure!(deleted.stdout.starts_with(b"1"), "{deleted:?}");
    let checked = tool(&["check"])?;
    ensure!(checked.0 == Some(1) && checked.1.contains("which is not there"), "{checked:?}");
    fs::write(directory.path().join("no.json"), "{\"version\": 1, \"unknown\": 2}")?;
    let refused = tool(&["import", "no.json", "--prefix", "/no"])?;
    ensure!(refused.0 == Some(2) && refused.1.lines().count() == 1, "{refused:?}");
    Ok(())
}

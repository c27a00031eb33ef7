//! A real Prometheus with the shipped rules beside a real cluster: each fault fires its alert, which names what is wrong
//! and goes when it is mended; rules and dashboard name nothing that no program shows.

mod files;

use std::{
    collections::BTreeSet,
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ec_model::State;
use ec_store::{Store, Txn};
use ec_tests::{Stack, program};
pub(crate) use files::example_on_one_host;
use files::{charted, manual, names, promtool, shipped};
use reqwest::Client;
use serde_json::Value;

/// Far longer than an alert takes here: a node's lease is 15 s, and a fault is seen within seconds.
const A_WHILE: Duration = Duration::from_secs(90);
/// What is shown only where there are certificates, and by hosts that look after themselves.
const NOT_HERE: [&str; 3] = [
    "ecompute_certificate_not_after_timestamp_seconds",
    "econtroller_certificate_not_after_timestamp_seconds",
    "eplacement_certificate_not_after_timestamp_seconds",
];

/// A program that ends with the test.
struct Running(Child);

impl Running {
    fn start(mut command: Command, log: &Path) -> Result<Self> {
        let log = fs::File::options().create(true).append(true).open(log)?;
        let child = command.stdout(log.try_clone()?).stderr(log).stdin(Stdio::null()).spawn();
        Ok(Self(child.with_context(|| format!("{command:?}"))?))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// An address that was free a moment ago.
fn free() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

/// A cluster, and who looks at it.
struct Watched {
    stack: Stack,
    /// By job, where each is scraped.
    agent: String,
    controller: String,
    metadata: String,
    prometheus: String,
    _watcher: Running,
    http: Client,
}

impl Watched {
    async fn start() -> Result<(Self, Running, Running)> {
        let agent = free()?;
        let mut stack = Stack::start_with(&format!("listen: {agent}")).await?;
        stack.start_agent("").await?;
        let (controller, metadata, prometheus) = (free()?, free()?, free()?);
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\nrule_files: [rules.yml]\n\
             scrape_configs:\n{}{}{}{}{}",
            job("ecompute", &agent, 1),
            job("econtroller", &controller, 1),
            job("mdserver", &metadata, 1),
            job("etcd", &stack.etcd.endpoint(), 1),
            // It looks for two seconds whether etcd is there.
            job("eplacement", &stack.placement_server.endpoint(), 4),
        );
        fs::write(stack.file("prometheus.yml"), config)?;
        fs::write(stack.file("rules.yml"), hurried(&fs::read_to_string(shipped("alerts.yml"))?))?;
        let mut watcher = Command::new("prometheus");
        watcher
            .arg(format!("--config.file={}", stack.file("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", stack.file("series").display()))
            .arg(format!("--web.listen-address={prometheus}"));
        let watcher = Running::start(watcher, &stack.file("prometheus.log"))
            .context("scripts/install-deps.sh test brings prometheus")?;
        let http = Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?;
        let watched = Self { stack, agent, controller, metadata, prometheus, _watcher: watcher, http };
        let (controller, metadata) = (watched.start_controller()?, watched.start_metadata()?);
        Ok((watched, controller, metadata))
    }

    fn start_controller(&self) -> Result<Running> {
        let file = self.stack.file("controller.yaml");
        let (etcd, placement) = (self.stack.etcd.endpoint(), self.stack.placement_server.endpoint());
        let listen = &self.controller;
        let text = format!(
            "etcd: {{endpoints: [\"{etcd}\"]}}\nplacement: {{endpoint: \"{placement}\"}}\nlisten: {listen}\n"
        );
        fs::write(&file, text)?;
        let mut command = Command::new(program("econtroller"));
        command.arg("--config").arg(file);
        Running::start(command, &self.stack.file("econtroller.log"))
    }

    fn start_metadata(&self) -> Result<Running> {
        let mut command = Command::new(program("mdserver"));
        command.args(["--bridge", self.stack.libvirt.bridge(), "--state-dir"]).arg(self.stack.file("state"));
        command.env("MDSERVER_LISTEN", &self.metadata);
        Running::start(command, &self.stack.file("mdserver.log"))
    }

    async fn ask(&self, path: &str, query: &[(&str, &str)]) -> Result<Value> {
        let url = format!("http://{}/api/v1/{path}", self.prometheus);
        let answer: Value = self.http.get(url).query(query).send().await?.json().await?;
        ensure!(answer["status"] == "success", "{path} {query:?}: {answer}");
        Ok(answer["data"].clone())
    }

    /// The labels of the alerts that fire.
    async fn alerts(&self) -> Result<Vec<Value>> {
        let data = self.ask("alerts", &[]).await?;
        let alerts = data["alerts"].as_array().context("no alerts")?;
        Ok(alerts
            .iter()
            .filter(|alert| alert["state"] == "firing")
            .map(|alert| alert["labels"].clone())
            .collect())
    }

    async fn until(&self, what: &str, reached: impl Fn(&[Value]) -> bool) -> Result<()> {
        let begun = Instant::now();
        loop {
            let outcome = self.alerts().await;
            if outcome.as_ref().is_ok_and(|alerts| reached(alerts)) {
                return Ok(());
            }
            if begun.elapsed() > A_WHILE {
                let logs = ["econtroller.log", "mdserver.log", "prometheus.log"]
                    .map(|name| fs::read_to_string(self.stack.file(name)).unwrap_or_default());
                bail!("not within {} s: {what}: {outcome:?}\n{}", A_WHILE.as_secs(), logs.join("\n"));
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Waits until these fire, each with its labels.
    async fn until_firing(&self, wanted: &[(&str, &[(&str, &str)])]) -> Result<()> {
        self.until(&format!("{wanted:?} fire"), |alerts| {
            wanted.iter().all(|(name, labels)| {
                let is = |alert: &&Value| {
                    alert["alertname"] == *name && labels.iter().all(|(label, value)| alert[*label] == *value)
                };
                alerts.iter().any(|alert| is(&alert))
            })
        })
        .await
    }

    async fn until_quiet(&self) -> Result<()> {
        self.until("all is quiet", <[Value]>::is_empty).await
    }
}

fn job(name: &str, target: &str, seconds: u32) -> String {
    let target = target.trim_start_matches("http://");
    format!(
        "- {{job_name: {name}, scrape_interval: {seconds}s, scrape_timeout: {seconds}s, static_configs: [{{targets: \
         [\"{target}\"]}}]}}\n"
    )
}

/// The rules, without their patience.
fn hurried(rules: &str) -> String {
    let lines = rules.lines().map(|line| match line.trim_start().starts_with("for: ") {
        true => "        for: 1s".to_owned(),
        false => line.replace("[5m]", "[15s]").replace("[15m]", "[15s]"),
    });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_fires_its_alert_which_goes_when_it_is_mended() -> Result<()> {
    let (mut watched, controller, metadata) = Watched::start().await?;
    let (agent, at_controller) = (watched.agent.clone(), watched.controller.clone());
    let at_metadata = watched.metadata.clone();
    watched.until_quiet().await?;
    for job in ["ecompute", "econtroller", "mdserver", "etcd", "eplacement"] {
        let query = format!("up{{job=\"{job}\"}} == 1");
        for _ in 0..60 {
            if watched.ask("query", &[("query", &query)]).await?["result"][0].is_object() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let up = watched.ask("query", &[("query", &query)]).await?;
        ensure!(up["result"][0].is_object(), "{job} is not scraped");
    }

    // What the programs show is well formed, and it is all that rules and dashboard need.
    let mut shown = BTreeSet::new();
    let manual = fs::read_to_string(manual())?;
    for url in [
        format!("http://{agent}/metrics"),
        format!("http://{at_controller}/metrics"),
        format!("http://{at_metadata}/metrics"),
        format!("{}/metrics", watched.stack.placement_server.endpoint()),
    ] {
        let text = watched.http.get(&url).send().await?.text().await?;
        promtool(&["check", "metrics"], &text).with_context(|| format!("{url}\n{text}"))?;
        ec_serve::metrics::parse(&text).map_err(anyhow::Error::msg)?;
        let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        for (name, _) in families {
            ensure!(manual.contains(&format!("`{name}`")), "docs/monitoring.md does not tell of {name}");
        }
    }
    let all = watched.ask("label/__name__/values", &[]).await?;
    shown.extend(all.as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)));
    shown.extend(NOT_HERE.map(str::to_owned));
    let groups = watched.ask("rules", &[]).await?;
    let rules = groups["groups"].as_array().into_iter().flatten();
    let rules = rules.flat_map(|group| group["rules"].as_array().into_iter().flatten());
    let rules: Vec<_> = rules.filter_map(|rule| rule["query"].as_str().map(str::to_owned)).collect();
    ensure!(rules.len() > 20, "{groups}");
    for expression in rules.into_iter().chain(charted()?) {
        let missing: Vec<_> = names(&expression).difference(&shown).cloned().collect();
        ensure!(missing.is_empty(), "no program shows {missing:?}, which is in: {expression}");
        let asked = expression.replace("$__rate_interval", "15s").replace("$node", ".*");
        watched.ask("query", &[("query", &asked)]).await?;
    }

    // The agent. Its node is missed when its lease has run out.
    watched.stack.kill_agent()?;
    let there = [("instance", agent.as_str())];
    watched.until_firing(&[("AgentDown", &there), ("NodeMissing", &[])]).await?;
    watched.stack.start_agent("").await?;
    watched.until_quiet().await?;

    // Controller and metadata server; nothing else misses them.
    drop(controller);
    watched.until_firing(&[("ControllerDown", &[])]).await?;
    drop(metadata);
    watched.until_firing(&[("MetadataServerDown", &[("instance", &at_metadata)])]).await?;
    ensure!(watched.alerts().await?.len() == 2, "{:?}", watched.alerts().await?);
    let (_controller, _metadata) = (watched.start_controller()?, watched.start_metadata()?);
    watched.until_quiet().await?;

    // Placement.
    watched.stack.placement_server.end();
    let without = [("instance", agent.as_str()), ("part", "placement")];
    let blind = [("instance", at_controller.as_str()), ("part", "nodes")];
    watched
        .until_firing(&[
            ("PlacementDown", &[]),
            ("PlacementReplicaDown", &[]),
            ("AgentPartDown", &without),
            ("ControllerFails", &blind),
        ])
        .await?;
    watched.stack.placement_server.go_on()?;
    watched.until_quiet().await?;

    // etcd, and with it placement, which answers and cannot serve.
    watched.stack.etcd.stop().await?;
    watched
        .until_firing(&[
            ("EtcdDown", &[]),
            ("PlacementNotReady", &[]),
            ("AgentPartDown", &[("part", "etcd")]),
            ("AgentPartDown", &[("part", "lease")]),
            ("CallsFail", &[("job", "ecompute"), ("service", "etcd")]),
            ("CallsFail", &[("job", "econtroller"), ("service", "etcd")]),
        ])
        .await?;
    ensure!(watched.alerts().await?.iter().all(|alert| alert["alertname"] != "PlacementDown"));
    watched.stack.etcd.restart().await?;
    watched.until_quiet().await?;

    // A record of placement that somebody damaged.
    let key = format!("/ecompute/placement/consumers/{}", uuid::Uuid::new_v4());
    watched.stack.store.txn(Txn::new().put(&key, "garbage")).await?;
    watched.until_firing(&[("PlacementUnreadableRecords", &[])]).await?;
    watched.stack.store.txn(Txn::new().delete(&key)).await?;
    watched.until_quiet().await?;

    // A build that cannot be.
    let missing = format!("file://{}", watched.stack.file("nothing.qcow2").display());
    let instance = watched.stack.schedule(&[&missing])?;
    watched.stack.until_state(instance, State::Error).await?;
    watched.until_firing(&[("BuildsFail", &there), ("InstancesInError", &there)]).await?;
    let destroyed = watched.stack.eschedule(&["destroy", "--wait", &instance.to_string()])?;
    ensure!(destroyed.status.success(), "{destroyed:?}");
    watched.until_quiet().await?;

    // This host is no guest.
    for _ in 0..60 {
        let answer = watched.http.get("http://169.254.169.254/latest/meta-data/").send().await?;
        ensure!(answer.status() == 404, "{answer:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    watched.until_firing(&[("MetadataStrangers", &there)]).await?;
    watched.until_quiet().await
}

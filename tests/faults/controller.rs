//! What nobody else is there to do: nodes whose agents are gone, and what killed tools left on them.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use ec_model::{InstanceId, Node, NodeId, Workload, encode};
use ec_store::testing::certificates;
use ec_tests::{
    TINY,
    control::{Control, unplaced},
    program,
};
use jiff::{SignedDuration, Timestamp};
use reqwest::{Certificate, Client, Identity};

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];
/// Longer than the controller's patience with a node, and a few of its looks.
const A_WHILE: Duration = Duration::from_secs(90);

/// Ends with the test.
struct Controller(Child);

impl Controller {
    fn start(control: &Control) -> Result<Self> {
        Ok(Self(Self::command(control, "listen: 127.0.0.1:0")?.spawn()?))
    }

    /// With this line in its configuration, too.
    fn command(control: &Control, more: &str) -> Result<Command> {
        let file = control.directory().join("controller.yaml");
        let (etcd, placement) = (control.etcd.endpoint(), control.placement_server.endpoint());
        let text =
            format!("etcd: {{endpoints: [\"{etcd}\"]}}\nplacement: {{endpoint: \"{placement}\"}}\n{more}\n");
        fs::write(&file, text)?;
        let mut command = Command::new(program("econtroller"));
        command.arg("--config").arg(file).stdin(Stdio::null());
        Ok(command)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

async fn until(what: &str, mut reached: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !reached().await? {
        ensure!(begun.elapsed() < A_WHILE, "not within {} s: {what}", A_WHILE.as_secs());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// A node that once had an agent, which is alive or not.
async fn node(control: &Control, name: &str, alive: bool) -> Result<NodeId> {
    let node = control.node(name, alive, PLENTY).await?;
    let (name, created_at) = (name.to_owned(), Timestamp::now());
    let record = Node { node, name, created_at, troubles: Vec::new(), revoked: false };
    control.put(control.keys.node(node), encode(&record)).await?;
    Ok(node)
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_without_their_agents_are_offered_to_nobody_until_they_are_back() -> Result<()> {
    let control = Control::start().await?;
    let dead = node(&control, "dead", false).await?;
    let living = node(&control, "living", true).await?;
    // One that an operator disabled is the operator's.
    let disabled = node(&control, "disabled", true).await?;
    let ours = ["COMPUTE_STATUS_DISABLED".to_owned()].into();
    control.placement.set_traits(disabled, &ours, |_| false).await?;
    let marked = async || control.placement.marked_down().await;
    assert!(marked().await?.is_empty(), "nobody has ever marked one");

    let first = Controller::start(&control)?;
    let second = Controller::start(&control)?;
    until("the dead one is marked", async || Ok(marked().await? == [dead].into())).await?;
    for _ in 0..3 {
        assert_eq!(control.schedule(&[&format!("{TINY}&limit=1")])?.0, living);
    }
    // It is back, and one of the two was killed.
    drop(first);
    control.come_alive(dead, "dead").await?;
    until("the mark is taken away", async || Ok(marked().await?.is_empty())).await?;
    control.delete(control.keys.alive(living)).await?;
    assert_eq!(control.schedule(&[TINY])?.0, dead, "and neither the operator's nor the one that died now");
    until("the other is marked", async || Ok(marked().await? == [living].into())).await?;
    drop(second);
    control.delete(control.keys.alive(dead)).await?;
    let refused = control.eschedule(&[TINY])?;
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8(refused.stderr)?;
    ensure!(error.contains("on disabled: it has the forbidden trait COMPUTE_STATUS_DISABLED"), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_killed_commands_left_is_taken_away_on_dead_nodes_too_and_nothing_else_is() -> Result<()> {
    let control = Control::start().await?;
    let node = node(&control, "host", true).await?;
    let (_, kept) = control.schedule(&["--name", "kept", TINY])?;
    control.delete(control.keys.alive(node)).await?;
    let claimed = [(node, [("VCPU".to_owned(), 1)].into())].into();
    let mut left = Vec::new();
    for (number, minutes) in [11, 9].into_iter().enumerate() {
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        control.placement.claim_exact(instance, &claimed, "default", "default").await?;
        let created_at = Timestamp::now() - SignedDuration::from_mins(minutes);
        let name = format!("left{number}");
        let record = unplaced(instance, Some(&name), "default", created_at);
        control.put(control.keys.instance(instance), encode(&record)).await?;
        control.put(control.keys.name(Workload::Machine, "default", &name, instance), "").await?;
        left.push(instance);
    }
    let garbage = control.keys.instance(InstanceId::new(uuid::Uuid::new_v4()));
    control.put(&garbage, "{\"version\":9}").await?;

    let _controller = Controller::start(&control)?;
    until("the old one is gone", async || Ok(control.record(left[0]).await?.is_none())).await?;
    let claims = control.placement.provider_allocations(node).await?;
    let mut holders: Vec<_> = claims.into_keys().collect();
    let mut wanted = vec![kept, left[1]];
    holders.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(holders, wanted, "the young one may still be at work");
    assert_eq!(control.count("names/").await?, 2);
    assert!(control.request(node, kept).await?.is_some() && control.record(kept).await?.is_some());
    assert!(control.get(&garbage).await?.is_some(), "what cannot be read is not touched");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn its_port_tells_how_it_fares_and_where_it_is_taken_a_second_one_does_not_start() -> Result<()> {
    let mut control = Control::start().await?;
    certificates(control.directory())?;
    let file = |name: &str| control.directory().join(name);
    let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let (cert, key, ca) = (file("server.pem"), file("server.key"), file("ca.pem"));
    let (cert, key, ca) = (cert.display(), key.display(), ca.display());
    let more = format!("listen: {address}\ntls: {{certificate: {cert}, key: {key}, client_ca: {ca}}}");
    let _first = Controller(Controller::command(&control, &more)?.spawn()?);

    let trust = || Ok::<_, anyhow::Error>(Certificate::from_pem(&fs::read(file("ca.pem"))?)?);
    let builder = || Ok::<_, anyhow::Error>(Client::builder().no_proxy().tls_certs_only([trust()?]));
    let shows = |name: &str| {
        let pem = ["pem", "key"].map(|ending| fs::read(file(&format!("{name}.{ending}"))));
        let [certificate, key] = pem;
        anyhow::Ok(builder()?.identity(Identity::from_pem(&[certificate?, key?].concat())?).build()?)
    };
    let (known, node, stranger) = (shows("client")?, shows("node")?, builder()?.build()?);
    let ask = async |path: &str| {
        let answer = known.get(format!("https://{address}{path}")).send().await?;
        anyhow::Ok((answer.status().as_u16(), answer.text().await?))
    };
    until("it is ready", async || Ok(ask("/readyz").await.is_ok_and(|(status, _)| status == 200))).await?;
    ensure!(stranger.get(format!("https://{address}/metrics")).send().await.is_err(), "a stranger reads");
    let (status, text) = ask("/metrics").await?;
    let numbers = ec_serve::metrics::parse(&text).map_err(anyhow::Error::msg)?;
    ensure!(status == 200 && numbers["econtroller_part_up{part=\"etcd\"}"] == 1.0, "{text}");
    for (path, wanted) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 403)] {
        let status = node.get(format!("https://{address}{path}")).send().await?.status();
        ensure!(status == wanted, "a node is answered {status} for {path}");
    }

    let refused = Controller::command(&control, &more)?.output()?;
    let said = String::from_utf8(refused.stderr)?;
    assert_eq!(refused.status.code(), Some(1), "{said}");
    let wanted =
        format!("econtroller: cannot listen at {address}: another controller or another program does");
    ensure!(said.lines().any(|line| line.starts_with(&wanted)) && said.contains("`listen`"), "{said}");

    control.etcd.stop().await?;
    until("it misses etcd", async || {
        let (status, text) = ask("/readyz").await?;
        let ready: serde_json::Value = serde_json::from_str(&text)?;
        Ok(status == 503 && ready["parts"]["etcd"]["ok"] == false && ready["parts"]["nodes"]["ok"] == false)
    })
    .await?;
    assert_eq!(ask("/healthz").await?, (200, "ok\n".to_owned()));
    let (_, text) = ask("/metrics").await?;
    let numbers = ec_serve::metrics::parse(&text).map_err(anyhow::Error::msg)?;
    ensure!(numbers["econtroller_call_failures_total{service=\"etcd\"}"] >= 1.0, "{text}");
    ensure!(numbers["econtroller_looks_total{look=\"nodes\",outcome=\"failed\"}"] >= 1.0, "{text}");
    Ok(())
}

//! The agent's own port: what it tells while all is well, and while what it stands on is away.

use std::{collections::BTreeMap, fs, process::Output};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State};
use ec_tests::{Stack, program};
use serde_json::Value;

async fn json(stack: &Stack, path: &str) -> Result<(u16, Value)> {
    let (status, text) = stack.ask_agent(path).await?;
    Ok((status, serde_json::from_str(&text).with_context(|| text)?))
}

async fn metrics(stack: &Stack) -> Result<BTreeMap<String, f64>> {
    ec_serve::metrics::parse(&stack.ask_agent("/metrics").await?.1).map_err(anyhow::Error::msg)
}

/// What the view tells of the one instance that there is.
async fn seen(stack: &Stack, instance: InstanceId) -> Result<Value> {
    let (status, view) = json(stack, "/view").await?;
    ensure!(status == 200 && view["node"] == stack.node.to_string(), "{view}");
    let (first, all) = (&view["instances"][0], view["instances"].as_array().map(Vec::len));
    ensure!(all == Some(1) && first["instance"] == instance.to_string(), "{view}");
    Ok(first.clone())
}

async fn until_ready(stack: &Stack, status: u16, missing: &[&str]) -> Result<()> {
    stack
        .until(&format!("ready is {status}, without {missing:?}"), async || {
            let (told, ready) = json(stack, "/readyz").await?;
            let down = |part: &&&str| ready["parts"][**part]["ok"] == false;
            ensure!(told == status && missing.iter().all(|part| down(&part)), "{told} {ready}");
            Ok(true)
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn it_tells_of_a_guest_of_what_is_away_and_of_no_secret() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    until_ready(&stack, 200, &[]).await?;
    let (data, key) = (stack.directory().join("user-data"), stack.key_pair()?);
    fs::write(&data, "#!/bin/sh\necho s3cret\n")?;
    let (data, public) = (data.display().to_string(), format!("{key}.pub"));
    let instance = stack.schedule(&["--user-data", &data, "--key", &public])?;
    let ip = stack.until_state(instance, State::Active).await?.ip.context("no address")?;

    let before = seen(&stack, instance).await?;
    ensure!(before["observed"]["power"] == "running" && before["observed"]["disk"] == true, "{before}");
    ensure!(before["status"]["ip"] == ip.to_string(), "{before}");
    ensure!(before["status"]["state"] == "ACTIVE" && before["request"]["desired"] == "active", "{before}");
    let numbers = metrics(&stack).await?;
    assert_eq!(numbers["ecompute_instances{state=\"ACTIVE\"}"], 1.0);
    let builds = "ecompute_job_duration_seconds_count{kind=\"build\",outcome=\"done\"}";
    ensure!(numbers[builds] >= 1.0, "{numbers:?}");
    ensure!(numbers["ecompute_call_duration_seconds_count{service=\"placement\"}"] > 1.0, "{numbers:?}");
    // One that is busy with something else may be left out.
    stack
        .until("what the guest has used is told", async || {
            let (status, used) = json(&stack, "/usage").await?;
            let guest = &used["instances"][instance.to_string()];
            let some = |what: &str| guest[what].as_u64().is_some_and(|number| number > 0);
            ensure!(status == 200 && used["load1"].is_number() && used["at"].is_string(), "{status} {used}");
            Ok(["cpu_ns", "disk_bytes", "net_bytes"].into_iter().all(some))
        })
        .await?;
    let public = fs::read_to_string(public)?;
    let public = public.split(' ').nth(1).context("no key")?;
    for path in ["/view", "/readyz", "/metrics"] {
        let (_, text) = stack.ask_agent(path).await?;
        ensure!(!text.contains("s3cret") && !text.contains(public), "{path}: {text}");
        ensure!(path == "/view" || !text.contains(&instance.to_string()), "{path}: {text}");
    }

    stack.etcd.stop().await?;
    // The lease is held until nobody can have renewed it.
    until_ready(&stack, 503, &["etcd", "lease"]).await?;
    assert_eq!(stack.ask_agent("/healthz").await?, (200, "ok\n".to_owned()));
    let during = seen(&stack, instance).await?;
    assert_eq!((&during["status"], &during["observed"]), (&before["status"], &before["observed"]));
    let numbers = metrics(&stack).await?;
    assert_eq!(numbers["ecompute_part_up{part=\"etcd\"}"], 0.0);
    ensure!(numbers["ecompute_call_failures_total{service=\"etcd\"}"] >= 1.0, "{numbers:?}");
    assert_eq!(numbers["ecompute_instances{state=\"ACTIVE\"}"], 1.0);
    stack.etcd.restart().await?;
    until_ready(&stack, 200, &[]).await?;

    stack.libvirt.kill_daemon();
    until_ready(&stack, 503, &["libvirt"]).await?;
    assert_eq!(stack.ask_agent("/healthz").await?.0, 200);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn where_its_port_is_taken_an_agent_does_not_start_and_the_first_one_is_not_disturbed() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let address = stack.agent_port().context("no port")?;
    let run = |state: &str, arguments: &[&str]| -> Result<Output> {
        let text = fs::read_to_string(stack.directory().join("compute.yaml"))?;
        let text = text.replace("listen: 127.0.0.1:0", &format!("listen: {address}"));
        let file = stack.directory().join("second.yaml");
        fs::write(&file, text.replace("/state\n", &format!("/{state}\n")))?;
        let mut second = std::process::Command::new(program("ecompute"));
        Ok(second.arg("--config").arg(file).args(arguments).output()?)
    };
    let refused = run("other", &[])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = String::from_utf8(refused.stderr)?;
    let told: Vec<_> = said.lines().filter(|line| line.starts_with("ecompute: ")).collect();
    ensure!(told.len() == 1 && told[0].contains(&format!("cannot listen at {address}")), "{said}");

    let port = |output: Output| -> Result<String> {
        let text = String::from_utf8(output.stdout)?;
        Ok(text.lines().find(|line| line.starts_with("port ")).context("no line of the port")?.to_owned())
    };
    let line = port(run("other", &["--check"])?)?;
    ensure!(line.contains("FAILED") && line.contains("choose another `listen`"), "{line}");
    let line = port(run("state", &["--check"])?)?;
    ensure!(line.contains(" ok ") && line.contains("by this node's agent"), "{line}");
    assert_eq!(stack.ask_agent("/healthz").await?.0, 200);
    Ok(())
}

//! etcd, placement, libvirtd and the agent come and go; nothing that was asked for is lost.

use std::time::Duration;

use anyhow::{Context, Result};
use ec_model::State;
use ec_tests::Stack;
use nix::sys::signal::Signal;

#[tokio::test(flavor = "multi_thread")]
async fn guests_outlive_agent_etcd_and_libvirtd_and_nothing_asked_meanwhile_is_lost() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let first = stack.schedule(&[])?;
    stack.until_state(first, State::Active).await?;

    stack.etcd.kill();
    stack.etcd.restart().await?;
    let second = stack.schedule(&[])?;
    stack.until_state(second, State::Active).await?;

    stack.libvirt.kill_daemon();
    let third = stack.schedule(&[])?;
    stack.libvirt.start_daemon();
    stack.until_state(third, State::Active).await?;

    assert_eq!(stack.end_agent()?, Some(0));
    let locked = stack.placement.inventory(stack.node).await?;
    assert_eq!(locked["VCPU"].reserved, locked["VCPU"].total);
    let nodes = stack.eschedule(&["-o", "json", "nodes"])?;
    let nodes: serde_json::Value = serde_json::from_slice(&nodes.stdout)?;
    assert_eq!(
        (&nodes[0]["alive"], &nodes[0]["instances"]),
        (&false.into(), &3.into()),
        "the lease is revoked"
    );
    stack.start_agent("").await?;
    let free = stack.placement.inventory(stack.node).await?;
    assert_eq!(free["VCPU"].reserved, 0);
    stack.until_exactly(&[first, second, third]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placement_that_is_away_holds_builds_and_destroys_up_and_loses_none() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let first = stack.schedule(&[])?;
    stack.until_state(first, State::Active).await?;
    stack.signal_agent(Signal::SIGSTOP)?;
    let second = stack.schedule(&[])?;
    assert!(stack.eschedule(&["destroy", &first.to_string()])?.status.success());
    stack.placement_server.end();
    stack.signal_agent(Signal::SIGCONT)?;
    stack
        .until("both wait for placement", async || {
            let log = stack.log();
            Ok(log.contains("failed to ask for its allocation") && log.contains("did not work for now"))
        })
        .await?;
    for (instance, about) in [(first, "destroyed it"), (second, "asking placement what it holds")] {
        stack
            .until("each is told as waiting, and what for", async || {
                let output = stack.eschedule(&["-o", "json", "show", &instance.to_string()])?;
                let shown = String::from_utf8_lossy(&output.stdout).into_owned();
                Ok(shown.contains("trying again") && shown.contains(about))
            })
            .await?;
    }
    let output = stack.eschedule(&[ec_tests::TINY])?;
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    stack.placement_server.go_on()?;
    stack.until_state(second, State::Active).await?;
    stack.until_exactly(&[second]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_etcd_guests_go_on_and_ask_for_their_metadata() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let key = stack.key_pair()?;
    let instance = stack.schedule(&["--name", "lone", "--key", &format!("{key}.pub")])?;
    let ip = stack.until_state(instance, State::Active).await?.ip.context("no address")?;
    stack.ssh(&key, "root", ip, "true").await?;
    stack.etcd.kill();
    let asked = "wget -q -O - http://169.254.169.254/latest/meta-data/hostname";
    assert_eq!(stack.ssh(&key, "root", ip, asked).await?, "lone");
    // Nor does it need one to begin.
    stack.kill_agent()?;
    stack.begin_agent("")?;
    let answers = async || Ok(stack.ssh(&key, "root", ip, asked).await.is_ok_and(|name| name == "lone"));
    stack.until("they have it of an agent that was started anew", answers).await?;
    let output = stack.eschedule(&["list"])?;
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    stack.etcd.restart().await?;
    stack.until_exactly(&[instance]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_an_agent_at_once() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("before-define=1*sleep(1000)").await?;
    let instance = stack.schedule(&[])?;
    stack.until_reached("before-define").await?;
    // The agent will wait for an answer that does not come.
    stack.libvirt.pause_daemon();
    stack.signal_agent(Signal::SIGTERM)?;
    stack
        .until("the first signal is noticed", async || Ok(stack.log().contains("locked the inventory")))
        .await?;
    let begin = std::time::Instant::now();
    let code = stack.end_agent()?;
    assert!(code.is_none_or(|code| code != 0) && begin.elapsed() < Duration::from_secs(2), "{code:?}");
    stack.libvirt.resume_daemon();
    stack.start_agent("").await?;
    stack.until_state(instance, State::Active).await?;
    stack.until_exactly(&[instance]).await
}

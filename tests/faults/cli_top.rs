//! The live view, on a terminal of its own: what is seen there, what keys do, and that it is as before afterwards.

use anyhow::{Context, Result, ensure};
use ec_model::{Desired, State};
use ec_tests::{TINY, Terminal, control::Control};
use nix::sys::signal::Signal;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];
#[tokio::test(flavor = "multi_thread")]
async fn instances_are_seen_filtered_and_destroyed_on_a_terminal_that_is_given_back() -> Result<()> {
    let mut control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, web) = control.schedule(&["--name", "web", TINY])?;
    let (_, db) = control.schedule(&["--name", "db", TINY])?;
    control.status(node, web, State::Active, Some("10.0.0.7")).await?;
    control.status(node, db, State::Error, None).await?;

    let mut top = Terminal::start(&control.command(&["top", "--interval", "1"]))?;
    top.until("all is seen", |seen| {
        ["nodes 1/1 alive", "host", "web", "10.0.0.7", "db", "ERROR"].iter().all(|word| seen.contains(word))
    })?;
    top.types("/we")?;
    top.until("it is filtered", |seen| seen.contains("/we_") && !seen.contains("ERROR  "))?;
    top.types("\r")?;
    top.until_seen("filter: we")?;
    top.types("\r")?;
    top.until_seen(&format!("Instance {web}"))?;
    top.types("q")?;
    top.until_seen("filter: we")?;
    // Not confirmed, and then confirmed.
    let question = format!("destroy web ({web})");
    top.types("d")?;
    top.until_seen(&question)?;
    top.types("n")?;
    top.until_seen("destroy: not done")?;
    ensure!(control.request(node, web).await?.is_some_and(|request| request.desired == Desired::Active));
    top.types("d")?;
    top.until_seen(&question)?;
    top.types("y")?;
    top.until_seen("web: DESTROYING")?;
    ensure!(control.request(node, web).await?.is_some_and(|request| request.desired == Desired::Destroyed));
    for key in [control.keys.request(node, web), control.keys.status(node, web)] {
        control.delete(key).await?;
    }
    top.until("it is gone", |seen| !seen.contains("10.0.0.7"))?;
    // What is refused is told, and nothing else changes.
    control.done(&["lock", "db"])?;
    top.types("/\u{1b}")?;
    top.until_seen("ERROR")?;
    top.types("Sy")?;
    top.until_seen("cannot stop")?;
    // etcd goes and comes.
    control.etcd.kill();
    top.until("its absence is told", |seen| seen.contains("not live: ") && seen.contains("db  "))?;
    control.etcd.restart().await?;
    control.status(node, db, State::Active, Some("10.0.0.8")).await?;
    top.until("it is back", |seen| seen.contains("10.0.0.8") && !seen.contains("not live: "))?;
    top.types("q")?;
    top.ends(0)?;

    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let mut top = Terminal::start(&control.command(&["top", "--state", "active"]))?;
        top.until_seen("10.0.0.8")?;
        top.signal(signal)?;
        top.ends(130)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_while_something_is_asked_for_may_stop_waiting_for_that() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, web) = control.schedule(&["--name", "web", TINY])?;
    control.status(node, web, State::Active, Some("10.0.0.7")).await?;
    let mut top = Terminal::start(&control.command(&["top"]))?;
    top.until_seen("10.0.0.7")?;
    control.etcd.freeze()?;
    top.types("Sy")?;
    top.until_seen("asking for it")?;
    top.types("q")?;
    top.until_seen("waiting for what comes of")?;
    // Ctrl-C, on a terminal that is as before.
    top.types("\u{3}")?;
    top.ends(130)?;
    control.etcd.thaw()?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_of_lines_alone_is_refused_and_of_one_that_is_too_large_a_part_is_drawn() -> Result<()> {
    let control = Control::start().await?;
    control.node("host", true, PLENTY).await?;
    let mut dumb = control.command(&["top"]);
    dumb.env("TERM", "dumb");
    let mut top = Terminal::start(&dumb)?;
    top.until_seen("this one prints lines alone")?;
    top.ends(2)?;
    let mut top = Terminal::of_size(&control.command(&["top"]), u16::MAX, u16::MAX)?;
    top.until_seen("nodes 1/1 alive")?;
    top.types("q")?;
    top.ends(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_terminal_or_for_scripts_the_live_view_says_what_serves_them() -> Result<()> {
    let control = Control::start().await?;
    for arguments in [&["top"][..], &["top", "-o", "json"]] {
        let output = control.eschedule(arguments)?;
        let said = String::from_utf8(output.stderr).context("no text")?;
        assert_eq!(
            (output.status.code(), output.stdout.len(), said.lines().count()),
            (Some(2), 0, 1),
            "{said}"
        );
        ensure!(said.contains("eschedule watch -o json") && said.contains("list -o json"), "{said}");
    }
    Ok(())
}

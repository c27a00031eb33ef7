//! Destroys in the middle of a build, and what dies while a guest is started.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, ensure};
use ec_model::State;
use ec_tests::{Stack, TINY};

/// Each step of a build.
const POINTS: [&str; 7] = [
    "before-announce",
    "before-disk",
    "before-overlay",
    "before-define",
    "before-start",
    "before-note-start",
    "before-addresses",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_destroy_that_comes_during_a_build_wins_at_every_step() -> Result<()> {
    let mut stack = Stack::start().await?;
    for build in POINTS {
        // Long enough to ask for the destroy meanwhile.
        stack.start_agent(&format!("{build}=1*sleep(1500)")).await?;
        let instance = stack.schedule(&[])?;
        stack.until_reached(build).await?;
        let destroy = stack.eschedule(&["destroy", "--wait", &instance.to_string()])?;
        assert!(destroy.status.success(), "{build}: {destroy:?}");
        stack.until_exactly(&[]).await?;
        assert!(stack.status(instance).await?.is_none(), "{build}");
        stack.kill_agent()?;
    }
    Ok(())
}

/// libvirtd killed while it starts a guest takes it along; nobody wrote down that it came up.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_ended_before_its_start_was_noted_is_started_again() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("before-note-start=pause").await?;
    let instance = stack.schedule(&[])?;
    stack.until_reached("before-note-start").await?;
    stack.kill_agent()?;
    let end = |stack: &Stack| {
        stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?.destroy().map_err(Error::from)
    };
    end(&stack)?;
    stack.start_agent("").await?;
    stack.until_state(instance, State::Active).await?;
    // From here on it is its own affair, or somebody's wish.
    end(&stack)?;
    let status = stack.until_state(instance, State::Stopped).await?;
    ensure!(status.reason.as_deref() == Some("somebody ended it"), "{status:?}");
    stack.until_exactly(&[instance]).await
}

/// What a job left behind that could not be looked at is not what was there before it.
#[tokio::test(flavor = "multi_thread")]
async fn while_libvirtd_is_away_nothing_untrue_is_told_of_a_guest_that_was_being_built() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("before-start=1*sleep(2000)").await?;
    let instance = stack.schedule(&[])?;
    stack.until_reached("before-start").await?;
    stack.libvirt.kill_daemon();
    stack.until("the start fails", async || Ok(stack.log().contains("did not work for now"))).await?;
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        let status = stack.status(instance).await?.context("no status")?;
        ensure!(status.state == State::Starting, "{status:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stack.libvirt.start_daemon();
    stack.until_state(instance, State::Active).await?;
    ensure!(!stack.log().contains("its disk is gone"), "{}", stack.log());
    stack.until_exactly(&[instance]).await
}

/// libvirtd answers, and cannot reach what it needs for a start. Then it can, and the guest's base is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_never_started_ends_in_its_error_whatever_came_before() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    stack.libvirt.kill_virtlogd();
    let instance = stack.schedule(&[])?;
    stack
        .until("it says what it waits for", async || {
            let status = stack.status(instance).await?.context("no status")?;
            ensure!(status.state == State::Starting || status.state == State::Preparing, "{status:?}");
            Ok(status.reason.is_some_and(|reason| reason.contains("virtlogd")))
        })
        .await?;
    let bases = stack.directory().join("state/images/base");
    for base in fs::read_dir(&bases)? {
        fs::remove_file(base?.path())?;
    }
    stack.libvirt.start_virtlogd();
    let status = stack.until_state(instance, State::Error).await?;
    ensure!(status.reason.as_ref().is_some_and(|reason| reason.contains("backing file")), "{status:?}");
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_while_it_cleans_up_after_a_failure_leaves_the_reason_and_no_claim() -> Result<()> {
    let mut stack = Stack::start().await?;
    for point in ["before-release", "before-end-in-error"] {
        stack.start_agent(&format!("{point}=pause")).await?;
        let instance = stack.schedule_as(TINY, &["file:///nonexistent.qcow2"])?;
        stack.until_reached(point).await?;
        stack.kill_agent()?;
        stack.start_agent("").await?;
        stack.until_exactly(&[]).await?;
        let status = stack.until_state(instance, State::Error).await?;
        assert!(status.reason.unwrap_or_default().contains("/nonexistent.qcow2"));
        stack.kill_agent()?;
    }
    Ok(())
}

//! Scheduling while it is killed, interrupted, raced and lied to: no claim that nobody knows of, no name twice.

use std::{
    process::{Child, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{Instance, InstanceId, NodeId, Workload, encode};
use ec_tests::{
    TINY,
    control::{Control, all_of, notified, unplaced},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn spawn(control: &Control, arguments: &[&str]) -> Result<Child> {
    Ok(control.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

fn signal(child: &Child, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(i32::try_from(child.id())?), signal)?)
}

/// The moment of a round, out of 60 that spread over a whole run of the command and a little more. The run is measured
/// anew each time around: how long it takes is the machine's and its other work's matter.
struct Moments {
    whole: Duration,
}

impl Moments {
    fn new() -> Self {
        Self { whole: Duration::ZERO }
    }

    fn of(&mut self, control: &Control, round: u32) -> Result<Duration> {
        if round.is_multiple_of(20) {
            let begun = Instant::now();
            control.done(&["--name", &format!("whole{round}"), TINY])?;
            self.whole = begun.elapsed();
        }
        Ok(self.whole * (round % 60) / 45)
    }
}

/// Every claim has a request, or a record by which its node knows that it may give it back; every request has its
/// claim and its record. Answers how many are requested.
async fn looked_over(control: &Control, node: NodeId) -> Result<usize> {
    let claims = control.placement.provider_allocations(node).await?;
    let mut requested = 0;
    for instance in claims.keys() {
        let record = control.record(*instance).await?;
        ensure!(record.is_some(), "the claim of {instance} is known to nobody");
        if control.request(node, *instance).await?.is_some() {
            ensure!(
                record.is_some_and(|record| record.node() == Some(node)),
                "{instance} is requested without a record"
            );
            requested += 1;
        }
    }
    ensure!(control.count("requests/").await? == requested, "a request without a claim");
    Ok(requested)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_killed_at_any_moment_leaves_no_claim_that_nobody_knows_of() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let mut moments = Moments::new();
    let mut killed = 0;
    for round in 0..120 {
        let moment = moments.of(&control, round)?;
        let mut child = spawn(&control, &["--name", &format!("n{round}"), TINY])?;
        tokio::time::sleep(moment).await;
        killed += usize::from(child.try_wait()?.is_none());
        child.kill()?;
        child.wait()?;
    }
    ensure!(killed > 20, "only {killed} were killed at work");
    looked_over(&control, node).await?;
    // Ten minutes later `list` takes the rest away.
    for key in control.store_keys("instances/").await? {
        let instance: InstanceId = key.rsplit('/').next().unwrap_or_default().parse()?;
        let entry = control.record(instance).await?.context("an index goes away by itself")?;
        if entry.assigned.is_none() {
            let old = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(11);
            control.put(key, encode(&Instance { created_at: old, ..entry })).await?;
        }
    }
    control.done(&["list"])?;
    let requested = looked_over(&control, node).await?;
    assert_eq!(control.placement.provider_allocations(node).await?.len(), requested);
    assert_eq!(control.count("instances/").await?, requested);
    assert_eq!(control.count("names/").await?, requested);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_command_takes_back_or_finishes_and_says_which() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let mut moments = Moments::new();
    let (mut taken_back, mut finished) = (0, 0);
    for round in 0..120 {
        let moment = moments.of(&control, round)?;
        let child = spawn(&control, &["--name", &format!("n{round}"), TINY])?;
        tokio::time::sleep(moment).await;
        signal(&child, Signal::SIGINT)?;
        let Output { status, stdout, stderr } = child.wait_with_output()?;
        let (stdout, stderr) = (String::from_utf8(stdout)?, String::from_utf8(stderr)?);
        match status.code() {
            Some(0) => {
                notified(&stdout)?;
                finished += 1;
            }
            Some(130) if stderr.contains("nothing was requested") => {
                ensure!(stdout.is_empty(), "{stdout}");
                taken_back += 1;
            }
            Some(130) => {
                let (_, instance) = notified(&stdout)?;
                ensure!(stderr.contains(&instance.to_string()) && stderr.contains("goes on"), "{stderr}");
                finished += 1;
            }
            // Before the program listened for signals.
            None => ensure!(stdout.is_empty(), "{stdout}"),
            other => anyhow::bail!("{other:?}: {stdout}{stderr}"),
        }
    }
    ensure!(taken_back > 0 && finished > 0, "{taken_back} taken back, {finished} finished");
    // And the whole ones that were measured.
    finished += 6;
    assert_eq!(looked_over(&control, node).await?, finished);
    assert_eq!(control.placement.provider_allocations(node).await?.len(), finished);
    assert_eq!(control.count("instances/").await?, finished, "nothing else is left");
    assert_eq!(control.count("names/").await?, finished);
    Ok(())
}

/// There is no agent: what is waited for never comes.
#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_wait_any_more_is_told_what_goes_on() -> Result<()> {
    let control = Control::start().await?;
    control.node("host", true, PLENTY).await?;
    let (_, first) = control.schedule(&["--name", "one", TINY])?;
    let (_, second) = control.schedule(&["--name", "two", TINY])?;
    let child = spawn(&control, &["destroy", "--wait", "one", "two"])?;
    let deadline = Instant::now() + Duration::from_secs(30);
    // Both are asked before anything is waited for.
    while control.record(first).await?.is_some() || control.record(second).await?.is_some() {
        ensure!(Instant::now() < deadline, "nothing was asked for");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    signal(&child, Signal::SIGINT)?;
    let Output { status, stdout, stderr } = child.wait_with_output()?;
    let (stdout, stderr) = (String::from_utf8(stdout)?, String::from_utf8(stderr)?);
    assert_eq!((status.code(), stdout.as_str()), (Some(130), ""), "{stderr}");
    for one in [first, second] {
        ensure!(stderr.contains(&format!("interrupted: what was asked of {one} goes on")), "{stderr}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_borne_by_one_until_it_is_destroyed() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let children: Vec<_> =
        (0..6).map(|_| spawn(&control, &["--name", "web", TINY])).collect::<Result<_>>()?;
    let mut won = Vec::new();
    for child in children {
        let output = child.wait_with_output()?;
        let error = String::from_utf8(output.stderr)?;
        match output.status.code() {
            Some(0) => won.push(notified(&String::from_utf8(output.stdout)?)?.1),
            Some(1) => ensure!(error.contains("`web` is taken") && error.lines().count() == 1, "{error}"),
            other => anyhow::bail!("{other:?}: {error}"),
        }
    }
    ensure!(won.len() == 1, "{won:?} bear the name");
    assert_eq!(control.placement.provider_allocations(node).await?.len(), 1);
    // The same in other letters; in another project it is another one's.
    let refused = control.eschedule(&["--name", "WEB", TINY])?;
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8(refused.stderr)?.contains(&won[0].to_string()));
    control.configure("project: other")?;
    control.schedule(&["--name", "web", TINY])?;
    control.configure("")?;
    assert!(control.done(&["show", "Web"])?.contains(&won[0].to_string()));
    control.done(&["destroy", "web"])?;
    // Free at once, although the agent has not done it yet.
    control.schedule(&["--name", "web", TINY])?;
    // One without a name is found by what it is called where instances are listed.
    let (_, unnamed) = control.schedule(&[TINY])?;
    let called = format!("vm-{}", unnamed.to_string().split('-').next().unwrap_or_default());
    assert!(control.done(&["show", &called])?.contains(&unnamed.to_string()));
    control.done(&["destroy", &called])?;
    let nobody = control.eschedule(&["show", "vm-00000000"])?;
    assert_eq!(nobody.status.code(), Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_killed_command_is_taken_over_after_ten_minutes_with_its_claim() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let left = InstanceId::new(uuid::Uuid::new_v4());
    control
        .placement
        .claim_exact(left, &[(node, [("VCPU".to_owned(), 1)].into())].into(), "default", "default")
        .await?;
    for (minutes, code) in [(9, 1), (11, 0)] {
        let created_at = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(minutes);
        let record = unplaced(left, Some("web"), "default", created_at);
        control.put(control.keys.instance(left), encode(&record)).await?;
        control.put(control.keys.name(Workload::Machine, "default", "web", left), "").await?;
        let output = control.eschedule(&["--name", "web", TINY])?;
        assert_eq!(output.status.code(), Some(code), "{minutes} minutes: {output:?}");
    }
    let claims = control.placement.provider_allocations(node).await?;
    assert!(claims.len() == 1 && !claims.contains_key(&left), "{claims:?}");
    assert!(control.record(left).await?.is_none());
    // One that nobody wanted by name is destroyed by hand, when it is old enough.
    let text = |output: Output| String::from_utf8_lossy(&output.stderr).into_owned();
    for (minutes, wanted) in [(1, "is being placed since"), (11, "")] {
        let created_at = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(minutes);
        let record = unplaced(left, None, "default", created_at);
        control.put(control.keys.instance(left), encode(&record)).await?;
        assert!(text(control.eschedule(&["destroy", &left.to_string()])?).contains(wanted));
    }
    assert!(control.record(left).await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_nodes_neither_fill_a_limit_nor_hide_a_living_one() -> Result<()> {
    let control = Control::start().await?;
    for n in 0..40 {
        control.node(&format!("dead{n:02}"), false, PLENTY).await?;
    }
    let living = control.node("living", true, PLENTY).await?;
    for query in [TINY.to_owned(), format!("{TINY}&limit=1")] {
        assert_eq!(control.schedule(&[&query])?.0, living);
    }
    control.delete(control.keys.alive(living)).await?;
    let output = control.eschedule(&[TINY])?;
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b"NO ALLOCATIONS LEFT\n"[..]));
    let error = String::from_utf8(output.stderr)?;
    assert!(error.contains("not alive: ") && error.lines().count() == 1, "{error}");
    assert_eq!(control.count("instances/").await?, 2, "nothing stays of what was not placed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_stands_in_the_way_is_told_by_name_and_amount() -> Result<()> {
    let control = Control::start().await?;
    let reason = |control: &Control, query: &str| -> Result<String> {
        let output = control.eschedule(&[query])?;
        assert_eq!(
            (output.status.code(), output.stdout.as_slice()),
            (Some(1), &b"NO ALLOCATIONS LEFT\n"[..])
        );
        let error = String::from_utf8(output.stderr)?;
        assert_eq!(error.lines().count(), 1, "{error}");
        Ok(error)
    };
    assert!(reason(&control, TINY)?.contains("no node is there"));
    let small = control.node("small", true, &[("VCPU", 4), ("MEMORY_MB", 1024), ("DISK_GB", 10)]).await?;
    let locked = control.node("shut", true, PLENTY).await?;
    control.placement.lock(locked).await?;
    control.node("gone", false, &[("VCPU", 2), ("MEMORY_MB", 1024), ("DISK_GB", 10)]).await?;
    let told = reason(&control, "resources=VCPU:7,MEMORY_MB:2048,DISK_GB:1")?;
    for wanted in [
        "on small: MEMORY_MB is short by 1024 (1024 of 1024 free), VCPU is short by 3 (4 of 4 free)",
        "locked (all reserved): shut",
        "not alive: gone",
    ] {
        assert!(told.contains(wanted), "wanted `{wanted}`: {told}");
    }
    // A trait that exists and that nobody alive has.
    control.placement.set_traits(small, &["CUSTOM_GOLD".to_owned()].into(), |_| true).await?;
    control.placement.set_traits(small, &std::collections::BTreeSet::new(), |_| true).await?;
    let told = reason(&control, &format!("{TINY}&required=CUSTOM_GOLD"))?;
    assert!(told.contains("no node has the trait CUSTOM_GOLD"), "{told}");
    // Enough in all, and not for one.
    let mut inventory = control.placement.inventory(small).await?;
    inventory.insert("VCPU".into(), ec_placement_client::Inventory { max_unit: 2, ..all_of(4) });
    control.placement.set_inventory(small, &inventory).await?;
    let told = reason(&control, "resources=VCPU:3,MEMORY_MB:128,DISK_GB:1")?;
    assert!(told.contains("VCPU:3 is more than the 2 that one instance may take"), "{told}");

    let output = control.eschedule(&["-o", "json", "resources=VCPU:7,MEMORY_MB:128,DISK_GB:1"])?;
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(json["reasons"]["nearest"][0]["short"]["VCPU"]["free"], 4, "{json}");
    assert_eq!(json["reasons"]["locked"][0], "shut");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_gives_no_claim_back_of_a_guest_whose_keys_were_deleted_by_hand() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, instance) = control.schedule(&["--name", "web", TINY])?;
    let entry = control.record(instance).await?.context("no index")?;
    let old = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(11);
    control.put(control.keys.instance(instance), encode(&Instance { created_at: old, ..entry })).await?;
    control.delete(control.keys.request(node, instance)).await?;
    let list = control.done(&["list"])?;
    ensure!(list.contains(&instance.to_string()) && list.contains("UNKNOWN"), "{list}");
    assert_eq!(control.eschedule(&["--name", "web", TINY])?.status.code(), Some(1));
    assert!(control.placement.provider_allocations(node).await?.contains_key(&instance));
    // When its node has given it back, what is left goes.
    control.placement.release(instance).await?;
    control.done(&["list"])?;
    assert!(control.record(instance).await?.is_none());
    Ok(())
}

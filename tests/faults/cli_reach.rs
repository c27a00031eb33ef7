//! Reaching guests at the command line, where none is there: who would log in, and that it can be interrupted.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, NodeId, State};
use ec_tests::control::Control;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];
const DEBIAN: &str = "https://images.example/debian-12-generic-amd64.qcow2";
const ROOM: &str = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1";
const DISKLESS: &str = "resources=VCPU:1,MEMORY_MB:128";

async fn runs(control: &Control, node: NodeId, arguments: &[&str]) -> Result<InstanceId> {
    let (_, instance) = control.schedule(&[&["run"], arguments].concat())?;
    control.status(node, instance, State::Active, Some("10.0.0.7")).await?;
    set(control, control.keys.status(node, instance), "started_at", "1970-01-01T00:00:00Z").await?;
    Ok(instance)
}

async fn set(control: &Control, key: String, field: &str, value: &str) -> Result<()> {
    let mut record: Value = serde_json::from_slice(&control.get(&key).await?.context("it is there")?.value)?;
    record[field] = value.into();
    control.put(key, record.to_string()).await
}

async fn has_volume(control: &Control, node: NodeId, arguments: &[&str]) -> Result<InstanceId> {
    let made = control.done(&[&["volume", "create"], arguments, &["-o", "json"]].concat())?;
    let made: Value = serde_json::from_str(&made)?;
    let volume = made["volume"].as_str().context("its uuid")?.parse()?;
    control.status(node, volume, State::Active, None).await?;
    Ok(volume)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_logs_in_is_whom_the_image_has_that_the_disk_comes_from() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    // Tells how it is called.
    let ssh = control.directory().join("ssh");
    fs::write(&ssh, "#!/bin/sh\necho \"$@\"\n")?;
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755))?;
    let path = std::env::join_paths(
        std::iter::once(control.directory().to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    )?;
    let logs_in = |instance: &str| -> Result<(String, String)> {
        let output = control.command(&["ssh", instance]).env("PATH", &path).output()?;
        let told = String::from_utf8(output.stdout)?;
        let mut words = told.split(' ').skip_while(|word| *word != "-l");
        let user = words
            .nth(1)
            .with_context(|| format!("{told}: {:?}", String::from_utf8_lossy(&output.stderr)))?
            .to_owned();
        Ok((user, String::from_utf8(output.stderr)?))
    };
    let debian = ("debian".to_owned(), String::new());

    let web = runs(&control, node, &["web", "--query", ROOM, "--image", DEBIAN]).await?;
    assert_eq!(logs_in("web")?, debian);
    runs(&control, node, &["copy", "--query", ROOM, "--image", "instance:web"]).await?;
    assert_eq!(logs_in("copy")?, debian);
    has_volume(&control, node, &["disk", "--size", "1", "--image", DEBIAN]).await?;
    has_volume(&control, node, &["again", "--image", "volume:disk"]).await?;
    has_volume(&control, node, &["empty", "--size", "1"]).await?;
    for (name, volume) in [("boots", "disk"), ("copied", "again"), ("own", "empty")] {
        runs(&control, node, &[name, "--query", DISKLESS, "--boot-volume", volume]).await?;
    }
    assert_eq!(logs_in("boots")?, debian);
    assert_eq!(logs_in("copied")?, debian);
    runs(&control, node, &["third", "--query", ROOM, "--image", "instance:copied"]).await?;
    assert_eq!(logs_in("third")?, debian);

    // What nothing tells of is guessed, which is told.
    control.done(&["destroy", "web"])?;
    for key in [control.keys.request(node, web), control.keys.status(node, web)] {
        control.delete(key).await?;
    }
    control.placement.release(web).await?;
    // A copy tells it itself.
    assert_eq!(logs_in("copy")?, debian);
    let (user, said) = logs_in("own")?;
    assert_eq!(user, "root");
    ensure!(said.contains("root logs in"), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_screen_that_does_not_come_is_waited_for_no_longer_than_somebody_wants() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    runs(&control, node, &["web", "--query", ROOM, "--image", DEBIAN]).await?;
    // An agent that gives no ticket.
    set(&control, control.keys.alive(node), "url", "http://127.0.0.1:1").await?;
    let mut vnc = control.command(&["vnc", "web"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let instance = serde_json::from_str::<Value>(&control.done(&["show", "web", "-o", "json"])?)?;
    let instance = instance["instance"].as_str().context("its uuid")?.parse()?;
    let mut asked = false;
    for _ in 0..100 {
        asked = control.request(node, instance).await?.is_some_and(|request| request.access.is_some());
        if asked {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure!(asked, "no ticket was asked for");
    kill(Pid::from_raw(vnc.id().try_into()?), Signal::SIGINT)?;
    let begun = Instant::now();
    let status = vnc.wait()?;
    ensure!(begun.elapsed() < Duration::from_secs(2), "it went on");
    ensure!(status.signal() == Some(Signal::SIGINT as i32) || status.code() == Some(130), "{status:?}");
    Ok(())
}

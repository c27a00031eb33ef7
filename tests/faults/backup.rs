//! A cluster's memory as a file, and back: with guests, while its agent and eplacement go on running.

use std::{fs, process::Command};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State};
use ec_tests::{Stack, program};
use serde_json::Value;

fn done(stack: &Stack, arguments: &[&str]) -> Result<String> {
    let output = stack.eschedule(arguments)?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

async fn guest(stack: &Stack, name: &str) -> Result<InstanceId> {
    let instance = stack.schedule(&["--name", name])?;
    stack.until_state(instance, State::Active).await?;
    Ok(instance)
}

fn run_of(stack: &Stack, instance: InstanceId) -> Result<Option<u32>> {
    Ok(stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?.id())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_backed_up_and_restored_and_its_newer_guests_healed() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let older = guest(&stack, "older").await?;
    let doomed = guest(&stack, "doomed").await?;
    let of = |name: &str| stack.directory().join(name).to_string_lossy().into_owned();
    // There is no authority there: etcd is asked as schedule.yaml says.
    let (file, data, elsewhere) = (of("cluster.tar"), of("restored"), of("nowhere"));
    let place = ["--directory", elsewhere.as_str()];
    let made: Value = serde_json::from_str(&done(
        &stack,
        &[&["cluster", "backup", file.as_str(), "-o", "json"], &place[..]].concat(),
    )?)?;
    assert_eq!(made["prefix"], "/ecompute");
    assert!(made["bytes"].as_u64().context("bytes")? > 10_000, "{made}");
    assert_eq!((&made["placement"]["providers"], &made["placement"]["consumers"]), (&1.into(), &2.into()));
    // What placement knows is in it as a document, which goes into any empty place.
    let unpacked = Command::new("tar").args(["-C", &of(""), "-xf", &file, "placement.json"]).status()?;
    ensure!(unpacked.success());
    let etcd = stack.etcd.endpoint();
    let moved = |arguments: &[&str]| -> Result<String> {
        let elsewhere = ["--etcd", &etcd, "--prefix", "/elsewhere"];
        let output = Command::new(program("eplacement")).args(arguments).args(elsewhere).output()?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let document = of("placement.json");
    moved(&["import", &document])?;
    let [before, after]: [Value; 2] =
        [serde_json::from_str(&fs::read_to_string(&document)?)?, serde_json::from_str(&moved(&["export"])?)?];
    assert_eq!(before["consumers"].as_object().map(|all| all.contains_key(&older.to_string())), Some(true));
    assert_eq!(
        before["providers"][stack.node.to_string()]["inventories"],
        after["providers"][stack.node.to_string()]["inventories"]
    );
    assert_eq!(before["consumers"], after["consumers"]);
    assert_eq!(
        stack.eschedule(&[&["cluster", "backup", &file], &place[..]].concat())?.status.code(),
        Some(2)
    );
    done(&stack, &["cluster", "backup", &file, "--verify"])?;
    // One bit, in the midst of the database.
    let mut torn = fs::read(&file)?;
    let middle = torn.len() / 2;
    torn[middle] ^= 1;
    let damaged = of("damaged.tar");
    fs::write(&damaged, torn)?;
    for arguments in [
        vec!["cluster", "backup", damaged.as_str(), "--verify"],
        vec!["cluster", "restore", damaged.as_str(), "--data-dir", data.as_str()],
    ] {
        let refused = stack.eschedule(&arguments)?;
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(String::from_utf8(refused.stderr)?.contains("not a whole backup"));
    }
    assert!(!std::path::Path::new(&data).exists());

    let newer = guest(&stack, "newer").await?;
    done(&stack, &["set", "newer", "--label", "role=new"])?;
    done(&stack, &["destroy", "--wait", "doomed"])?;
    let runs = (run_of(&stack, older)?, run_of(&stack, newer)?);
    let member = stack.etcd.member();
    let restore = ["cluster", "restore", &file, "--data-dir", &data, "--"];
    let told =
        done(&stack, &restore.into_iter().chain(member.iter().map(String::as_str)).collect::<Vec<_>>())?;
    assert!(told.contains("eplacement check") && told.contains("eschedule heal"), "{told}");
    let again = stack.eschedule(&["cluster", "restore", &file, "--data-dir", &data])?;
    assert_eq!(again.status.code(), Some(2), "{again:?}");
    assert!(!std::path::Path::new(&format!("{data}.restoring")).exists(), "it held secrets");
    stack.etcd.wipe()?;
    fs::rename(&data, stack.etcd.data())?;
    stack.etcd.restart().await?;

    stack.until_state(newer, State::Unclaimed).await?;
    done(&stack, &["heal", "--yes"])?;
    stack.until_state(newer, State::Active).await?;
    stack.until_state(older, State::Active).await?;
    stack
        .until("the destroyed one does not come back", async || Ok(stack.status(doomed).await?.is_none()))
        .await?;
    assert_eq!((run_of(&stack, older)?, run_of(&stack, newer)?), runs, "they ran on");
    let list = done(&stack, &["list", "--label", "role=new", "-o", "name"])?;
    assert_eq!(list.trim(), "newer");
    stack
        .until("each guest is counted", async || {
            let mut held: Vec<_> =
                stack.placement.provider_allocations(stack.node).await?.into_keys().collect();
            held.sort_unstable();
            let mut here = [older, newer];
            here.sort_unstable();
            Ok(held == here)
        })
        .await?;
    done(&stack, &["destroy", "--wait", "older", "newer"])?;
    stack.until_exactly(&[]).await
}

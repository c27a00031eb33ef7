//! Who is a node, and who is not.

use std::{
    fs::File,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use ec_model::{Keyspace, State};
use ec_store::Store;
use ec_tests::Stack;
use serde_json::{Value, json};

/// A second agent with the same uuid and a state directory of its own, as on a cloned machine.
fn clone_of(stack: &Stack) -> Result<Child> {
    let config = std::fs::read_to_string(stack.directory().join("compute.yaml"))?;
    let (state, other) = (stack.directory().join("state"), stack.directory().join("other"));
    let config = config
        .replace(&state.display().to_string(), &other.display().to_string())
        .replace(&format!("name: {}", stack.node), "name: the-clone");
    let path = stack.directory().join("clone.yaml");
    std::fs::write(&path, config)?;
    std::process::Command::new(ec_tests::program("ecompute"))
        .arg("--config")
        .arg(path)
        .stdout(Stdio::null())
        .stderr(File::create(stack.directory().join("clone.log"))?)
        .spawn()
        .context("failed to start the clone")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_of_a_node_is_refused_loudly_and_the_first_is_not_disturbed() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = stack.schedule(&[])?;
    stack.until_state(instance, State::Active).await?;
    let node_key = Keyspace::default().alive(stack.node);
    let before = stack.store.get(&node_key).await?.0.context("no node key")?;

    let mut clone = clone_of(&stack)?;
    let deadline = Instant::now() + Duration::from_secs(90);
    let code = loop {
        if let Some(status) = clone.try_wait()? {
            break status.code();
        }
        if Instant::now() > deadline {
            clone.kill()?;
            clone.wait()?;
            bail!("the clone goes on: {}", std::fs::read_to_string(stack.directory().join("clone.log"))?);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let log = std::fs::read_to_string(stack.directory().join("clone.log"))?;
    let host = nix::unistd::gethostname()?.to_string_lossy().into_owned();
    assert_eq!(code, Some(2), "nobody is to start it again: {log}");
    assert!(log.contains(&stack.node.to_string()) && log.contains(&format!("on host {host}")), "{log}");
    assert!(log.contains("other/uuid"), "it says what to do: {log}");

    let after = stack.store.get(&node_key).await?.0.context("no node key")?;
    assert_eq!(after.mod_revision, before.mod_revision, "nobody put the node's key again");
    let inventory = stack.placement.inventory(stack.node).await?;
    assert_eq!(inventory["VCPU"].reserved, 0, "the end of the clone locks nothing");
    let nodes = stack.eschedule(&["-o", "json", "nodes"])?;
    assert!(!String::from_utf8(nodes.stdout)?.contains("the-clone"));
    stack.until_exactly(&[instance]).await?;
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

/// The one node, as programs are told of it.
fn node(stack: &Stack) -> Result<Value> {
    let nodes = stack.eschedule(&["-o", "json", "nodes"])?.stdout;
    Ok(serde_json::from_slice::<Value>(&nodes)?[0].take())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_disk_is_full_tells_so_and_takes_nothing_new_until_there_is_room() -> Result<()> {
    let mut stack = Stack::start_small("images: {max_gb: 1}", 1100).await?;
    stack.start_agent("").await?;
    let instance = stack.schedule(&[])?;
    stack.until_state(instance, State::Active).await?;
    assert_eq!(node(&stack)?["troubles"], json!([]));

    let filler = stack.directory().join("state/filler");
    std::fs::write(&filler, [])?;
    let room = nix::sys::statvfs::statvfs(&filler)?;
    let left = room.blocks_available() * room.fragment_size();
    std::fs::write(&filler, vec![0; usize::try_from(left - (2 << 20))?])?;
    stack
        .until("its trouble is told, and placement offers nothing", async || {
            let node = node(&stack)?;
            Ok(node["troubles"][0]["kind"] == "disk" && node["locked"] == true)
        })
        .await?;
    let refused = stack.eschedule(&[ec_tests::TINY])?;
    let said = String::from_utf8(refused.stderr)?;
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("locked"), "{said}");
    let told = stack.eschedule(&["nodes"])?;
    let told = String::from_utf8(told.stdout)?;
    assert!(told.contains("MiB are left on the file system of"), "{told}");
    let metrics = stack.ask_agent("/metrics").await?.1;
    assert!(metrics.contains("ecompute_host_trouble{kind=\"disk\"} 1"), "{metrics}");
    assert!(metrics.contains("ecompute_host_trouble{kind=\"clock\"} 0"), "{metrics}");
    let check = String::from_utf8(stack.command("ecompute").arg("--check").output()?.stdout)?;
    assert!(check.lines().any(|line| line.starts_with("host") && line.contains("WARNING")), "{check}");

    // Whoever is started anew in that trouble is in it from the beginning.
    stack.kill_agent()?;
    stack.start_agent("").await?;
    assert_eq!(node(&stack)?["locked"], true);
    assert_eq!(stack.until_state(instance, State::Active).await?.state, State::Active);

    std::fs::remove_file(&filler)?;
    stack
        .until("it is as before", async || {
            let node = node(&stack)?;
            Ok(node["troubles"] == json!([]) && node["locked"] == false)
        })
        .await?;
    // The disk has room for one.
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    let second = stack.schedule(&[])?;
    stack.until_state(second, State::Active).await?;
    assert!(stack.eschedule(&["destroy", "--wait", &second.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

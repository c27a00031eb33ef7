//! etcd with authentication on, and each part with a user that may do what it must and no more.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, Keyspace, NodeId, State, Workload};
use ec_store::{EtcdConfig, EtcdStore, Store, StoreError, Txn};
use ec_tests::{EtcdUsers, Stack, TINY};

/// Runs the script that operators run; answers what it said.
fn roles(users: &EtcdUsers, arguments: &[&str], password: &str) -> Result<String> {
    let output = run(users, "/ecompute", arguments, password)?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

fn run(users: &EtcdUsers, prefix: &str, arguments: &[&str], password: &str) -> Result<Output> {
    let mut script = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/etcd-roles.sh"))
        .args(arguments)
        .env("PREFIX", prefix)
        .env("ETCDCTL_ENDPOINTS", &users.endpoint)
        .env("ETCDCTL_USER", format!("root:{}", users.root_password))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    writeln!(script.stdin.take().context("no input")?, "{password}")?;
    Ok(script.wait_with_output()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cloud_works_with_a_user_for_each_part_and_a_node_writes_nothing_of_anothers() -> Result<()> {
    let mut stack = Stack::start_with_users(|users, node| {
        roles(users, &["node", &node.to_string(), "agent"], "agent-secret")?;
        roles(users, &["control", "control"], "control-secret")?;
        roles(users, &["placement", "placement"], "placement-secret")?;
        // Again: nothing but the password changes.
        roles(users, &["control", "control"], "control-secret")?;
        // Another cloud's users would have this one's rights.
        for part in ["control", "placement"] {
            let other = run(users, "/ecompute2", &[part, "theirs"], "their-secret")?;
            let said = String::from_utf8(other.stderr)?;
            ensure!(other.status.code() == Some(1) && said.contains("not below /ecompute2"), "{said}");
        }
        Ok(())
    })
    .await?;
    stack.start_agent("").await?;
    let data = stack.directory().join("user-data");
    std::fs::write(&data, "#!/bin/sh\ntrue\n")?;
    let instance = stack.schedule(&["--name", "kept", "--user-data", &data.display().to_string()])?;
    stack.until_state(instance, State::Active).await?;
    stack.until_exactly(&[instance]).await?;
    for command in [&["list"][..], &["nodes"], &["show", "kept"], &["kept"]] {
        let output = stack.eschedule(command)?;
        ensure!(output.status.success(), "{command:?}: {output:?}");
    }
    let made = stack.eschedule(&["flavor", "create", "small", TINY])?;
    ensure!(made.status.success(), "{made:?}");
    // A failed build, a claim that nobody requested, a node's restart.
    let failed = stack.eschedule(&["--wait", TINY, "file:///nonexistent.qcow2"])?;
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    stack.kill_agent()?;
    stack.start_agent("").await?;
    let check = stack.command("ecompute").arg("--check").output()?;
    let text = String::from_utf8(check.stdout)?;
    ensure!(!text.contains("permission denied"), "{text}");

    let agent = EtcdStore::connect(EtcdConfig {
        endpoints: vec![stack.etcd.endpoint()],
        user: Some("agent".into()),
        password: Some("agent-secret".into()),
        ..EtcdConfig::default()
    })
    .await?;
    let (keys, other) = (Keyspace::default(), NodeId::new(uuid::Uuid::new_v4()));
    let someone = InstanceId::new(uuid::Uuid::new_v4());
    let own = keys.status(stack.node, someone);
    agent.txn(Txn::new().put(&own, "{}")).await.context("its own status is its own")?;
    agent.txn(Txn::new().delete(&own)).await?;
    for key in [
        keys.agent(other),
        keys.node(other),
        keys.alive(other),
        keys.request(other, someone),
        keys.user_data(other, someone),
        keys.status(other, someone),
        keys.held(other, someone),
        keys.held_user_data(other, someone),
        keys.instance(someone),
        keys.name(Workload::Machine, "default", "kept", someone),
        keys.flavor("small"),
        keys.keypair("default", "me"),
        format!("/ecompute/placement/consumers/{instance}"),
        "/ecompute/placement/clock".to_owned(),
        "/elsewhere".to_owned(),
    ] {
        let denied = |outcome: Result<_, StoreError>| {
            let error = outcome.err().map(|error| error.to_string()).unwrap_or_default();
            error.contains("permission denied")
        };
        ensure!(denied(agent.txn(Txn::new().put(&key, "{}")).await), "{key} was written");
        ensure!(denied(agent.txn(Txn::new().delete(&key)).await), "{key} was deleted");
    }
    for key in [
        keys.user_data(other, someone),
        keys.request(other, someone),
        keys.status(other, someone),
        keys.held(other, someone),
        keys.held_user_data(other, someone),
    ] {
        ensure!(agent.get(&key).await.is_err(), "{key} was read");
    }

    // Its node tells what it holds, and a control tool reads that.
    stack.store.txn(Txn::new().delete(keys.request(stack.node, instance))).await?;
    stack.until_state(instance, State::Unclaimed).await?;
    let healed = stack.eschedule(&["heal", "--yes"])?;
    ensure!(healed.status.success(), "{healed:?}");
    stack.until_state(instance, State::Active).await?;

    let destroyed = stack.eschedule(&["destroy", "--wait", "kept"])?;
    ensure!(destroyed.status.success(), "{destroyed:?}");
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_in_making_roles_are_told_and_change_nothing() -> Result<()> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/etcd-roles.sh");
    for arguments in [&[][..], &["everything"], &["node"], &["node", "host1"], &["control"]] {
        let output = Command::new(script).args(arguments).stdin(Stdio::null()).output()?;
        let error = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    // Of which etcd would get another password than was meant. Nothing is asked before that is told.
    let nobody = EtcdUsers { endpoint: "127.0.0.1:1".into(), root_password: "secret".into() };
    for password in ["correct horse", "tab\there", " first", "carried\r"] {
        let output = run(&nobody, "/ecompute", &["control"], password)?;
        let error = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(2), "{password:?}: {error}");
        ensure!(error.contains("white space") && error.lines().count() == 1, "{error}");
        ensure!(!error.contains(password.trim()), "a password is told: {error}");
    }
    Ok(())
}

//! `ecompute --check` and `eschedule doctor` of what only another look shows: taken names, two clusters, rights that are missing.

use std::{
    fs,
    net::TcpListener,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Output},
};

use anyhow::{Result, ensure};
use ec_model::State;
use ec_tests::{Stack, control::Control, program};
use serde_json::Value;

const SMALL: &[(&str, u64)] = &[("VCPU", 4), ("MEMORY_MB", 1024), ("DISK_GB", 10)];
/// Debian's nobody and nogroup.
const NOBODY: u32 = 65_534;

fn configured(control: &Control, etcd: &str, more: &str) -> Result<()> {
    let text = format!(
        "etcd: {{endpoints: [\"{etcd}\"]}}\nplacement: {{endpoint: \"{}\"}}\nlibvirt: {{uri: \"qemu+unix:///system?socket=/nowhere\"}}\n{more}\n",
        control.placement_server.endpoint(),
    );
    Ok(fs::write(control.directory().join("compute.yaml"), text)?)
}

fn check(control: &Control) -> Command {
    let mut command = Command::new(program("ecompute"));
    command.arg("--check").arg("--config").arg(control.directory().join("compute.yaml"));
    command
}

fn line(output: &Output, what: &str) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find(|line| line.starts_with(what)).unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_name_and_two_clusters_are_told() -> Result<()> {
    let control = Control::start().await?;
    let state = format!("state_dir: {}", control.directory().join("state").display());
    configured(&control, &control.etcd.endpoint(), &format!("name: me\n{state}"))?;
    let output = check(&control).output()?;
    ensure!(line(&output, "cluster").contains(" ok "), "{output:?}");
    // A proxy would be given the token.
    let output = check(&control).env("http_proxy", "http://127.0.0.1:1").env_remove("no_proxy").output()?;
    ensure!(line(&output, "placement").contains(" ok "), "{output:?}");
    let owner = control.node("me", true, SMALL).await?;
    let output = check(&control).output()?;
    let told = line(&output, "cluster");
    ensure!(told.contains("FAILED") && told.contains(&owner.to_string()) && told.contains("`me`"), "{told}");

    configured(&control, &control.etcd.endpoint(), &format!("name: other\n{state}"))?;
    ensure!(line(&check(&control).output()?, "cluster").contains(" ok "), "one cluster");
    // The distribution's own etcd beside ours: empty.
    let other = Control::start().await?;
    configured(&control, &other.etcd.endpoint(), &format!("name: other\n{state}"))?;
    let told = line(&check(&control).output()?, "cluster");
    ensure!(told.contains("WARNING") && told.contains("two clusters"), "{told}");
    // Also where the node itself is one of those that placement knows.
    let mine = control.node("mine", true, SMALL).await?;
    configured(&control, &other.etcd.endpoint(), &format!("name: mine\nuuid: {mine}\n{state}"))?;
    let told = line(&check(&control).output()?, "cluster");
    ensure!(told.contains("WARNING") && told.contains("two clusters"), "{told}");
    configured(&control, &control.etcd.endpoint(), &format!("name: mine\nuuid: {mine}\n{state}"))?;
    ensure!(line(&check(&control).output()?, "cluster").contains(" ok "), "where it is alive");
    configured(&control, &other.etcd.endpoint(), &format!("name: other\n{state}"))?;
    // And one with nodes of its own.
    other.node("theirs", true, SMALL).await?;
    let output = check(&control).output()?;
    let told = line(&output, "cluster");
    ensure!(told.contains("FAILED") && told.contains("two clusters"), "{told}");
    assert_eq!(output.status.code(), Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_the_port_of_metadata_is_told() -> Result<()> {
    let control = Control::start().await?;
    configured(&control, &control.etcd.endpoint(), "name: me")?;
    let told = || anyhow::Ok(line(&check(&control).output()?, "metadata"));
    ensure!(told()?.ends_with("169.254.169.254:80 is free"), "{}", told()?);
    let web = TcpListener::bind("0.0.0.0:80")?;
    let told_of = told()?;
    ensure!(told_of.contains("FAILED") && told_of.contains("ss -ltnp sport = :80"), "{told_of}");
    drop(web);
    ensure!(told()?.contains(" ok "), "{}", told()?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_may_not_is_told_what_to_become() -> Result<()> {
    let control = Control::start().await?;
    // Where everybody passes: the directories of a build may be root's alone.
    let public = tempfile::Builder::new().prefix("ec-check-").tempdir()?;
    fs::set_permissions(public.path(), fs::Permissions::from_mode(0o755))?;
    let (binary, config) = (public.path().join("ecompute"), public.path().join("compute.yaml"));
    fs::copy(program("ecompute"), &binary)?;
    configured(&control, &control.etcd.endpoint(), "state_dir: /var/lib/no-such-directory/ecompute")?;
    fs::copy(control.directory().join("compute.yaml"), &config)?;
    let as_nobody = || {
        let mut command = Command::new(&binary);
        command.arg("--check").arg("--config").arg(&config).uid(NOBODY).gid(NOBODY);
        command
    };
    let output = as_nobody().current_dir("/").output()?;
    for what in ["libvirt", "network"] {
        let told = line(&output, what);
        ensure!(told.contains("FAILED") && told.contains("run as root or in group libvirt"), "{told}");
    }
    let told = line(&output, "disk");
    ensure!(told.contains("FAILED") && told.contains("/var/lib cannot be written to"), "{told}");
    let output = check(&control).output()?;
    ensure!(line(&output, "libvirt").contains("start libvirtd"), "{output:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_of_3_4_and_secrets_for_all_are_told_and_fail_nothing() -> Result<()> {
    let control = Control::start().await?;
    configured(&control, &control.etcd.endpoint(), "name: me")?;
    let file = control.directory().join("compute.yaml");
    let text = fs::read_to_string(&file)?.replace("placement: {", "placement: {token: s3cret, ");
    fs::write(&file, text)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644))?;
    let text = String::from_utf8(check(&control).output()?.stdout)?;
    let warned = |word: &str| text.lines().any(|line| line.contains("WARNING") && line.contains(word));
    ensure!(warned("chmod o-r"), "{text}");
    assert_eq!(warned("etcd is 3.4"), control.etcd.version().starts_with("3.4."), "{text}");
    Ok(())
}

/// From the command line's place, with the parts going one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_what_is_not_there_and_says_how_to_mend_it() -> Result<()> {
    let mut stack = Stack::start().await?;
    let findings = |stack: &Stack| -> Result<(Option<i32>, Vec<Value>)> {
        let output = stack.eschedule(&["-o", "json", "doctor"])?;
        Ok((output.status.code(), serde_json::from_slice(&output.stdout)?))
    };
    let failed = |findings: &[Value], part: &str| {
        findings.iter().any(|it| it["part"] == part && it["level"] == "failed" && it["mend"].is_string())
    };
    let (code, found) = findings(&stack)?;
    ensure!(code == Some(1) && failed(&found, "nodes"), "nobody is there yet: {found:?}");

    stack.start_agent("").await?;
    stack.until("all is well", async || Ok(findings(&stack)?.0 == Some(0))).await?;
    let (_, found) = findings(&stack)?;
    let node = format!("node {}", stack.node);
    ensure!(found.iter().any(|it| it["part"] == node.as_str() && it["level"] == "ok"), "{found:?}");
    let lines = String::from_utf8(stack.eschedule(&["doctor"])?.stdout)?;
    ensure!(lines.lines().all(|line| line.contains(" ok ") || line.contains(" WARNING ")), "{lines}");

    // A guest whose node is dead.
    let instance = stack.schedule(&[])?;
    stack.until_state(instance, State::Active).await?;
    stack.kill_agent()?;
    stack
        .until("its node is missed", async || {
            let (code, found) = findings(&stack)?;
            Ok(code == Some(1) && failed(&found, &node))
        })
        .await?;
    stack.start_agent("").await?;
    stack.until("all is well again", async || Ok(findings(&stack)?.0 == Some(0))).await?;
    ensure!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    ensure!(stack.end_agent()? == Some(0));

    // Placement alone: what etcd knows is told all the same.
    stack.placement_server.end();
    let (code, found) = findings(&stack)?;
    ensure!(code == Some(3) && failed(&found, "placement"), "{found:?}");
    ensure!(found.iter().any(|it| it["part"] == "instances" && it["level"] == "ok"), "{found:?}");

    stack.etcd.kill();
    let (code, found) = findings(&stack)?;
    ensure!(code == Some(3) && failed(&found, "etcd"), "{found:?}");
    Ok(())
}

//! The command line and the configuration: what is printed, and how it ends.

use std::{fs, process::Output};

use anyhow::Result;
use ec_model::State;
use ec_tests::{Stack, TINY};

/// One line on standard error, that code, and nothing changed.
fn refused(output: &Output, code: i32, wanted: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    for word in wanted {
        assert!(error.contains(word), "wanted `{word}`: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_in_one_line_with_its_code() -> Result<()> {
    let mut stack = Stack::start().await?;
    let before = stack.eschedule(&[TINY])?;
    assert_eq!(before.stdout, b"NO ALLOCATIONS LEFT\n", "no node is there");
    stack.start_agent("").await?;

    let full = stack.eschedule(&["resources=VCPU:1000,MEMORY_MB:128"])?;
    assert_eq!(full.stdout, b"NO ALLOCATIONS LEFT\n");
    refused(&full, 1, &["VCPU", &stack.node.to_string()]);
    let missing = stack.eschedule(&["resources=VCPU:1,MEMORY_MB:128&required=CUSTOM_GOLD"])?;
    // Placement does not know the trait at all.
    assert!(matches!(missing.status.code(), Some(1 | 2)), "{missing:?}");

    let big = stack.directory().join("big");
    fs::write(&big, vec![0; 64 * 1024 + 1])?;
    refused(&stack.eschedule(&["--user-data", &big.display().to_string(), TINY])?, 2, &["65537", "65536"]);
    refused(&stack.eschedule(&["resources=VCPU:one"])?, 2, &["VCPU"]);
    refused(&stack.eschedule(&["resources=VCPU:1"])?, 2, &["MEMORY_MB"]);
    refused(&stack.eschedule(&["nosuch"])?, 1, &["nosuch"]);
    refused(&stack.eschedule(&["destroy", "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab"])?, 1, &["no instance"]);
    refused(&stack.eschedule(&[TINY, "ftp://host/image"])?, 2, &["ftp://host/image", "https://"]);
    refused(&stack.eschedule(&["--name", "a b", TINY])?, 2, &["a b"]);
    assert_eq!(stack.eschedule(&["--nosuch"])?.status.code(), Some(2));
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_is_wrong_is_refused_with_its_line_and_the_right_key() -> Result<()> {
    let stack = Stack::start().await?;
    let directory = tempfile::tempdir()?;
    for (name, program, text, wanted) in [
        ("compute.yaml", "ecompute", "etcd:\n  hots: localhost\n", ["compute.yaml", "2", "hots", "`host`"]),
        ("compute.yaml", "ecompute", "workers: many\n", ["compute.yaml", "1", "workers", "many"]),
        ("compute.yaml", "ecompute", "bridge: [a]\n", ["compute.yaml:1:9", "bridge", "string", ""]),
        ("compute.yaml", "ecompute", "etcd: {host: x\n", ["compute.yaml:", "", "", ""]),
        ("schedule.yaml", "eschedule", "plcement: {}\n", ["schedule.yaml", "1", "plcement", "`placement`"]),
    ] {
        fs::write(directory.path().join(name), text)?;
        let mut command = std::process::Command::new(stack.command(program).get_program());
        let output = command.args(["list"].iter().filter(|_| program == "eschedule"));
        refused(&output.current_dir(&directory).output()?, 2, &wanted);
    }
    let nobody = tempfile::NamedTempFile::new()?;
    fs::write(&nobody, "etcd: {port: 1, timeout: 1}\nplacement: {endpoint: \"http://127.0.0.1:1\"}\n")?;
    for arguments in [&["list"][..], &["nodes"], &[TINY], &["destroy", "web"]] {
        let mut command = std::process::Command::new(stack.command("eschedule").get_program());
        refused(
            &command.arg("--config").arg(nobody.path()).args(arguments).output()?,
            3,
            &["not reachable", ":1"],
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_tells_of_each_part_whether_it_is_there_and_how_to_mend_it() -> Result<()> {
    let mut stack = Stack::start().await?;
    let output = stack.command("ecompute").arg("--check").output()?;
    let text = String::from_utf8(output.stdout)?;
    assert!(output.status.success(), "{text}");
    for part in ["configuration", "etcd", "placement", "libvirt", "network", "guests", "metadata", "disk"] {
        assert!(text.lines().any(|line| line.starts_with(part) && line.contains(" ok ")), "{part}: {text}");
    }
    stack.placement_server.end();
    stack.libvirt.kill_daemon();
    stack.etcd.kill();
    let output = stack.command("ecompute").arg("--check").output()?;
    let text = String::from_utf8(output.stdout)?;
    assert_eq!(output.status.code(), Some(3), "{text}");
    for part in ["etcd", "placement", "libvirt", "network"] {
        assert!(text.lines().any(|line| line.starts_with(part) && line.contains("FAILED")), "{part}: {text}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_another_node_has_is_a_clear_error_and_a_restart_is_none() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    stack.end_agent()?;
    let config = fs::read_to_string(stack.directory().join("compute.yaml"))?;
    let (old, other) = (stack.node.to_string(), uuid::Uuid::new_v4().to_string());
    let config = config.replace(&format!("uuid: {old}"), &format!("uuid: {other}"));
    let path = stack.directory().join("other.yaml");
    fs::write(&path, config)?;
    let mut command = std::process::Command::new(stack.command("ecompute").get_program());
    let output = command.arg("--config").arg(&path).env("RUST_LOG", "off").output()?;
    refused(&output, 1, &[&old, "name"]);
    stack.start_agent("").await
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_get_json_and_people_get_completions_and_manual_pages() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let output = stack.eschedule(&["-o", "json", "--wait", "--name", "web", TINY])?;
    assert!(output.status.success(), "{output:?}");
    let scheduled: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let instance = scheduled["instance"].as_str().unwrap_or_default().to_owned();
    assert_eq!(scheduled["node"], stack.node.to_string());
    let ip = scheduled["ip"].as_str().unwrap_or_default().to_owned();
    assert!(ip.parse::<std::net::IpAddr>().is_ok(), "{scheduled}");

    let list: serde_json::Value = serde_json::from_slice(&stack.eschedule(&["-o", "json", "list"])?.stdout)?;
    assert_eq!(list[0]["instance"], instance);
    assert_eq!(list[0]["state"], State::Active.to_string());
    let show: serde_json::Value =
        serde_json::from_slice(&stack.eschedule(&["show", "web", "-o", "json"])?.stdout)?;
    assert_eq!((&show["ip"], &show["name"]), (&ip.clone().into(), &"web".into()));
    let nodes: serde_json::Value =
        serde_json::from_slice(&stack.eschedule(&["nodes", "-o", "json"])?.stdout)?;
    assert_eq!(nodes[0]["used"]["VCPU"], 1);
    for (command, word) in [(&["list"][..], "ACTIVE"), (&["show", "web"], ip.as_str()), (&["nodes"], "VCPU")]
    {
        let text = String::from_utf8(stack.eschedule(command)?.stdout)?;
        assert!(text.contains(word), "{command:?}: {text}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let output = stack.eschedule(&["completions", shell])?;
        assert!(output.status.success() && output.stdout.len() > 100, "{shell}");
    }
    let pages = stack.directory().join("man");
    assert!(stack.eschedule(&["man", &pages.display().to_string()])?.status.success());
    assert!(fs::read_to_string(pages.join("eschedule.1"))?.contains("resources=VCPU"));
    assert!(pages.join("eschedule-destroy.1").exists());
    Ok(())
}

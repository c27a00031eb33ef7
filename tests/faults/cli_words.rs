//! What the command line says of instances and nodes that are not as they should be, and where it says it.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_model::{Desired, InstanceId, State};
use ec_placement_client::Inventory;
use ec_tests::{
    TINY,
    control::{Control, all_of, notified},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json_of(control: &Control, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&control.done(&[&["-o", "json"], arguments].concat())?)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_cannot_be_read_is_shown_and_left_alone() -> Result<()> {
    let control = Control::start().await?;
    control.node("host", true, PLENTY).await?;
    let (node, instance) = control.schedule(&["--name", "web", TINY])?;
    let key = control.keys.request(node, instance);
    let good = control.get(&key).await?.context("no request")?.value;
    let newer = String::from_utf8(good.clone())?.replace("\"version\":1", "\"version\":9");
    let desired = newer.replace("\"version\":9", "\"version\":1").replace("\"active\"", "\"migrated\"");
    for value in [newer.as_str(), desired.as_str(), "garbage", ""] {
        control.put(key.clone(), value).await?;
        let before = control.get(&key).await?;
        let output = control.eschedule(&["destroy", "web"])?;
        assert_eq!(output.status.code(), Some(1), "{value}");
        let text = error(&output);
        ensure!(
            text.lines().count() == 1 && text.contains(&key) && text.contains("cannot be read"),
            "{text}"
        );
        assert_eq!(control.get(&key).await?, before, "it was touched");
        assert!(control.record(instance).await?.is_some());
        let list = json_of(&control, &["list"])?;
        assert_eq!(list[0]["state"], "UNKNOWN");
        assert!(
            list[0]["reason"].as_str().is_some_and(|why| why.contains("request cannot be read")),
            "{list}"
        );
    }
    // What speaks of another instance than its key is not believed either.
    let good = String::from_utf8(good)?;
    let lie = good.replace(&instance.to_string(), &uuid::Uuid::new_v4().to_string());
    control.put(key.clone(), lie.as_str()).await?;
    let output = control.eschedule(&["destroy", "web"])?;
    ensure!(output.status.code() == Some(1) && error(&output).contains("its key another"), "{output:?}");
    assert_eq!(control.get(&key).await?.context("it was deleted")?.value, lie.as_bytes());
    control.put(key.clone(), good.as_str()).await?;
    control.status(node, instance, State::Active, Some("10.0.0.9")).await?;
    assert_eq!(control.done(&["web"])?, "10.0.0.9\n");
    let status_key = control.keys.status(node, instance);
    let status = String::from_utf8(control.get(&status_key).await?.context("no status")?.value)?;
    for own in [instance.to_string(), node.to_string()] {
        control.put(status_key.clone(), status.replace(&own, &uuid::Uuid::new_v4().to_string())).await?;
        let output = control.eschedule(&["web"])?;
        ensure!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert_eq!(json_of(&control, &["list"])?[0]["state"], "UNKNOWN");
    }
    control.delete(status_key).await?;
    control.put(key.clone(), "garbage").await?;
    // A status alone that nobody can read is shown, too.
    let other = InstanceId::new(uuid::Uuid::new_v4());
    control.put(control.keys.status(node, other), "garbage").await?;
    let text = control.done(&["list"])?;
    ensure!(text.lines().any(|line| line.contains(&other.to_string()) && line.contains("UNKNOWN")), "{text}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_dead_nodes_are_marked_and_their_destroy_says_when_it_happens() -> Result<()> {
    let control = Control::start().await?;
    control.node("host", true, PLENTY).await?;
    let (node, instance) = control.schedule(&["--name", "web", TINY])?;
    control.status(node, instance, State::Active, Some("10.0.0.7")).await?;
    assert_eq!(json_of(&control, &["list"])?[0]["node_alive"], true);
    control.delete(control.keys.alive(node)).await?;
    assert_eq!(json_of(&control, &["list"])?[0]["node_alive"], false);
    assert!(control.done(&["list"])?.contains("its node is not alive"));
    let nodes = json_of(&control, &["nodes"])?;
    assert_eq!((&nodes[0]["alive"], &nodes[0]["instances"]), (&json!(false), &json!(1)), "{nodes}");
    assert_eq!(nodes[0]["name"], "host", "placement has it");
    assert!(control.done(&["nodes"])?.contains("not alive, holds 1 instance"));
    assert_eq!(control.done(&["web"])?, "10.0.0.7\n");

    let output = control.eschedule(&["destroy", "web"])?;
    assert!(output.status.success(), "{output:?}");
    assert!(error(&output).contains(&format!("node {node} is not alive")), "{output:?}");
    let (request, index) = (control.request(node, instance).await?, control.record(instance).await?);
    assert!(request.is_some_and(|request| request.desired == Desired::Destroyed) && index.is_none());
    assert_eq!(control.count("names/").await?, 0, "the name is free with the wish");

    let begun = std::time::Instant::now();
    let output = control.eschedule(&["destroy", "--wait", "--timeout", "2", &instance.to_string()])?;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        begun.elapsed() > Duration::from_secs(2) && error(&output).contains("is not alive"),
        "{output:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_heal_would_leave_ends_a_look_with_1_as_well() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    assert!(control.eschedule(&["heal", "--dry-run"])?.status.success(), "there is nothing");
    let forgotten = InstanceId::new(uuid::Uuid::new_v4());
    control.status(node, forgotten, State::Unclaimed, None).await?;
    for how in ["--dry-run", "--yes"] {
        let output = control.eschedule(&["heal", how, "-o", "json"])?;
        let found: Value = serde_json::from_slice(&output.stdout)?;
        assert_eq!(
            (&found[0]["instance"], &found[0]["outcome"]),
            (&json!(forgotten), &json!("left")),
            "{how}"
        );
        ensure!(output.status.code() == Some(1) && error(&output).contains("left as they are"), "{output:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_without_index_is_found_by_its_claim_and_among_the_keys() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    // A part of the host: the claim alone would lead to a uuid that no agent serves.
    let part = uuid::Uuid::new_v4();
    let http = reqwest::Client::new();
    let url = format!("{}/resource_providers", control.placement_server.endpoint());
    let answer = http
        .post(&url)
        .header("X-Auth-Token", "admin")
        .header("OpenStack-API-Version", "placement 1.39")
        .header("Content-Type", "application/json")
        .body(json!({"name": "part", "uuid": part, "parent_provider_uuid": node}).to_string())
        .send()
        .await?;
    ensure!(answer.status().is_success(), "{answer:?}");
    let part = ec_model::NodeId::new(part);
    let inventory: std::collections::BTreeMap<String, Inventory> = [("VCPU".to_owned(), all_of(4))].into();
    control.placement.set_inventory(part, &inventory).await?;
    let nested = InstanceId::new(uuid::Uuid::new_v4());
    control
        .placement
        .claim_exact(nested, &[(part, [("VCPU".to_owned(), 1)].into())].into(), "p", "u")
        .await?;
    control.done(&["destroy", &nested.to_string()])?;
    assert!(control.request(node, nested).await?.is_some(), "the wish goes to the host");

    // No claim at all: it failed, and only its status is left.
    let failed = InstanceId::new(uuid::Uuid::new_v4());
    control.status(node, failed, State::Error, None).await?;
    control.done(&["show", &failed.to_string()])?;
    control.done(&["destroy", &failed.to_string()])?;
    assert!(control.request(node, failed).await?.is_some());
    // A guest that nobody asks for since etcd was restored.
    let unclaimed = InstanceId::new(uuid::Uuid::new_v4());
    control.status(node, unclaimed, State::Unclaimed, Some("10.0.0.9")).await?;
    let list = control.done(&["list"])?;
    ensure!(
        list.lines().any(|line| line.contains(&unclaimed.to_string()) && line.contains("UNCLAIMED")),
        "{list}"
    );
    control.done(&["destroy", &unclaimed.to_string()])?;
    assert!(control.request(node, unclaimed).await?.is_some());

    // A claim, and nothing else: etcd was emptied, and no agent has looked yet.
    let silent = InstanceId::new(uuid::Uuid::new_v4());
    control
        .placement
        .claim_exact(silent, &[(node, [("VCPU".to_owned(), 1)].into())].into(), "p", "u")
        .await?;
    let show = control.done(&["show", &silent.to_string()])?;
    ensure!(show.contains("UNKNOWN") && show.contains("no agent tells of it"), "{show}");
    control.done(&["destroy", &silent.to_string()])?;
    assert!(control.request(node, silent).await?.is_some());

    let missing = control.eschedule(&["destroy", &uuid::Uuid::new_v4().to_string()])?;
    assert_eq!(missing.status.code(), Some(1));
    assert!(error(&missing).contains("there is no instance"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_shown_although_placement_does_not_know_one_of_them() -> Result<()> {
    let control = Control::start().await?;
    let good = control.node("good", true, PLENTY).await?;
    let full = control.node("full", true, &[("VCPU", 2), ("MEMORY_MB", 128), ("DISK_GB", 9)]).await?;
    let amounts = [(full, [("VCPU".to_owned(), 1), ("MEMORY_MB".to_owned(), 128)].into())].into();
    control.placement.claim_exact(InstanceId::new(uuid::Uuid::new_v4()), &amounts, "p", "u").await?;
    let stranger = ec_model::NodeId::new(uuid::Uuid::new_v4());
    control.come_alive(stranger, "stranger").await?;
    let nodes = json_of(&control, &["nodes"])?;
    let nodes: Vec<_> = nodes.as_array().context("no list")?.iter().collect();
    assert_eq!(nodes.len(), 3, "{nodes:?}");
    assert_eq!((&nodes[0]["name"], &nodes[0]["used"]["MEMORY_MB"]), (&json!("full"), &json!(128)));
    assert_eq!((&nodes[1]["node"], &nodes[1]["capacity"]["VCPU"]), (&json!(good), &json!(1000)));
    assert_eq!((&nodes[2]["node"], &nodes[2]["note"]), (&json!(stranger), &json!("unknown to placement")));
    assert!(control.done(&["nodes"])?.contains("unknown to placement"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_ends_for_what_will_not_come_and_goes_on_for_a_pause() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let wait = |control: &Control| -> Result<std::process::Child> {
        let mut command = control.command(&["--wait", "--timeout", "60", TINY]);
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    };
    let requested = async |known: usize| -> Result<Vec<InstanceId>> {
        for _ in 0..200 {
            let keys = control.store_keys(&format!("requests/{node}/")).await?;
            if keys.len() > known {
                return keys
                    .iter()
                    .map(|key| Ok(key.rsplit('/').next().unwrap_or_default().parse()?))
                    .collect();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::bail!("nothing was requested")
    };
    let child = wait(&control)?;
    let stopped = requested(0).await?[0];
    control.status(node, stopped, State::Stopped, None).await?;
    let output = child.wait_with_output()?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(error(&output).contains("is STOPPED"), "{output:?}");
    control.delete(control.keys.request(node, stopped)).await?;

    // Destroyed before its first status.
    let child = wait(&control)?;
    let gone = requested(0).await?[0];
    control.done(&["destroy", &gone.to_string()])?;
    control.delete(control.keys.request(node, gone)).await?;
    let begun = std::time::Instant::now();
    let output = child.wait_with_output()?;
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited on");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(error(&output).contains("was destroyed"), "{output:?}");

    // What its node said last is said, on the way and where the time runs out.
    let mut command = control.command(&["--wait", "--timeout", "5", TINY]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let late = requested(0).await?[0];
    control.status(node, late, State::Starting, None).await?;
    let key = control.keys.status(node, late);
    let mut status: Value = serde_json::from_slice(&control.get(&key).await?.context("no status")?.value)?;
    status["reason"] = "no log daemon; trying again".into();
    control.put(key, status.to_string()).await?;
    let output = child.wait_with_output()?;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(error(&output).contains("starting: no log daemon; trying again\n"), "{output:?}");
    assert!(
        error(&output).contains("not done after 5 s")
            && error(&output).contains("far it is: no log daemon; trying again (req-"),
        "{output:?}"
    );
    control.delete(control.keys.request(node, late)).await?;

    let child = wait(&control)?;
    let paused = requested(0).await?[0];
    control.status(node, paused, State::Paused, None).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    control.status(node, paused, State::Active, Some("10.0.0.8")).await?;
    let output = child.wait_with_output()?;
    assert!(output.status.success(), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stdout).ends_with("10.0.0.8\n") && error(&output).contains("paused")
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn output_that_nobody_reads_or_that_finds_no_room_is_no_panic() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, instance) = control.schedule(&["--name", "web", TINY])?;
    control.status(node, instance, State::Active, Some("10.0.0.7")).await?;
    let web = instance.to_string();
    for arguments in [
        &["list"][..],
        &["nodes"],
        &["-o", "json", "list"],
        &["-o", "json", "nodes"],
        &["show", "web"],
        &["-o", "json", "show", "web"],
        &[web.as_str()],
        &["completions", "bash"],
        &["--help"],
        &["run", "--help"],
        &["--version"],
        &["resources=VCPU:100000,MEMORY_MB:1"],
        &["-o", "json", "resources=VCPU:100000,MEMORY_MB:1"],
    ] {
        let full =
            control.command(arguments).stdout(File::options().write(true).open("/dev/full")?).output()?;
        let text = error(&full);
        assert_eq!(full.status.code(), Some(1), "{arguments:?}: {text}");
        ensure!(
            text.lines().count() == 1 && text.contains("No space left on device"),
            "{arguments:?}: {text}"
        );

        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let closed = control.command(arguments).stdout(writer).output()?;
        assert_eq!((closed.status.code(), error(&closed).as_str()), (Some(141), ""), "{arguments:?}");
    }
    // What was made is told on the other stream.
    for arguments in [&[TINY][..], &["-o", "json", TINY], &["--wait", TINY]] {
        let full =
            control.command(arguments).stdout(File::options().write(true).open("/dev/full")?).output()?;
        assert_eq!(full.status.code(), Some(1));
        let text = error(&full);
        ensure!(text.lines().count() == 1 && text.contains("is requested on"), "{text}");
        let made = text.split("instance ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        assert!(control.request(node, made.parse()?).await?.is_some(), "{text}");
    }
    // With nobody to tell there is still no panic.
    let output =
        control.command(&["nosuch"]).stderr(File::options().write(true).open("/dev/full")?).output()?;
    assert_eq!(output.status.code(), Some(1));
    for program in ["ecompute", "econtroller", "eplacement", "mdserver"] {
        for asked in ["--help", "--version"] {
            let full = std::process::Command::new(ec_tests::program(program))
                .arg(asked)
                .stdout(File::options().write(true).open("/dev/full")?)
                .output()?;
            assert_eq!(full.status.code(), Some(1), "{program} {asked}: {full:?}");
            assert!(error(&full).contains("No space left on device"), "{program} {asked}: {full:?}");
        }
    }
    let check = std::process::Command::new(ec_tests::program("ecompute"))
        .arg("--check")
        .current_dir(control.directory())
        .stdout(File::options().write(true).open("/dev/full")?)
        .output()?;
    assert_eq!(check.status.code(), Some(1), "{check:?}");
    assert!(error(&check).contains("No space left on device"), "{check:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sites_defaults_serve_where_the_command_line_says_nothing() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let key = |name: &str| {
        format!("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPPDZ0RoaDTsdTuMBMHFLPz5VvQGVcTQWqXkTfpZzYJ {name}")
    };
    fs::write(control.directory().join("site.pub"), key("site"))?;
    fs::write(control.directory().join("mine.pub"), key("mine"))?;
    fs::write(control.directory().join("data"), b"\0site\xff")?;
    // Seen from the file, wherever the command runs.
    control
        .configure("defaults: {keys: [site.pub], user_data: data, name_prefix: vm-, require_token: true}")?;
    let (_, instance) = control.schedule(&[TINY])?;
    let request = control.request(node, instance).await?.context("no request")?;
    let name = format!("vm-{}", &instance.to_string()[..8]);
    let spec = request.spec.context("no spec")?;
    assert_eq!((request.name.as_deref(), spec.keys), (Some(name.as_str()), vec![key("site")]));
    assert!(spec.token_required && spec.user_data_bytes == Some(6));
    let data = control.get(&control.keys.user_data(node, instance)).await?.context("no user-data")?;
    assert_eq!(data.value, b"\0site\xff");
    assert!(control.done(&["show", &name])?.contains(&instance.to_string()));

    let mine = control.directory().join("mine.pub").display().to_string();
    let (_, instance) = control.schedule(&["--name", "web", "--key", &mine, TINY])?;
    let request = control.request(node, instance).await?.context("no request")?;
    assert_eq!(request.name.as_deref(), Some("web"));
    assert_eq!(request.spec.context("no spec")?.keys, [key("mine")]);

    control.configure("defaults: {name_prefix: \"a b\"}")?;
    let output = control.eschedule(&[TINY])?;
    assert!(output.status.code() == Some(2) && error(&output).contains("defaults.name_prefix"), "{output:?}");
    control.configure("")?;
    let (_, instance) = control.schedule(&["--require-token", TINY])?;
    let request = control.request(node, instance).await?.context("no request")?;
    assert!(request.name.is_none() && request.spec.context("no spec")?.token_required);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_variable_names_no_configuration_and_lines_stay_apart() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let output = std::process::Command::new(ec_tests::program("eschedule"))
        .arg("list")
        .env("ESCHEDULE_CONFIG", "")
        .current_dir(control.directory())
        .output()?;
    assert!(output.status.success(), "{output:?}");
    // Both streams in one file, as in a log: the lines do not run into each other.
    let log = control.directory().join("log");
    let file = File::create(&log)?;
    let mut child = control.command(&["--wait", TINY]).stdout(file.try_clone()?).stderr(file).spawn()?;
    for _ in 0..200 {
        if let Some(key) = control.store_keys(&format!("requests/{node}/")).await?.first() {
            let instance = key.rsplit('/').next().unwrap_or_default().parse()?;
            control.status(node, instance, State::Active, Some("10.0.0.7")).await?;
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(child.wait()?.success());
    let text = fs::read_to_string(log)?;
    notified(&text)?;
    assert!(text.ends_with("IP 10.0.0.7\n10.0.0.7\n") && !text.contains("\n\n"), "{text}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_guests_and_callers_say_neither_moves_a_terminal_nor_overflows() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, instance) = control.schedule(&["--name", "web", TINY])?;
    control.status(node, instance, State::Error, None).await?;
    let key = control.keys.status(node, instance);
    let mut status: Value = serde_json::from_slice(&control.get(&key).await?.context("no status")?.value)?;
    status["reason"] = "bad\u{1b}[2J\nimage".into();
    status["doing"] = "wai\u{1b}[2Jting".into();
    status["console"] = "login:\u{1b}]0;owned\u{7}\nroot".into();
    control.put(key, status.to_string()).await?;
    let list = control.done(&["list"])?;
    ensure!(list.lines().count() == 2 && !list.contains('\u{1b}'), "{list:?}");
    let show = control.done(&["show", "web"])?;
    ensure!(show.ends_with("owned \nroot\n") && !show.contains(['\u{1b}', '\u{7}']), "{show:?}");
    for timeout in ["18446744073709551615", "-1", "x", "99999999999"] {
        let output = control.eschedule(&["--wait", "--timeout", timeout, "web"])?;
        assert_eq!(output.status.code(), Some(2), "{timeout}: {output:?}");
    }
    assert_eq!(control.eschedule(&[""])?.status.code(), Some(2), "nothing is no name");
    let output = control.eschedule(&["--config", "/dev/zero", "list"])?;
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // Files without an end.
    for (option, file) in [("--user-data", "/dev/zero"), ("--key", "/dev/zero"), ("--key", "/dev/urandom")] {
        let output = control.eschedule(&[option, file, TINY])?;
        assert_eq!((output.status.code(), error(&output).lines().count()), (Some(2), 1), "{option} {file}");
    }
    let twice = control.eschedule(&["resources=VCPU:1&resources=MEMORY_MB:128"])?;
    assert!(twice.status.code() == Some(2) && error(&twice).contains("stands twice"), "{twice:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_be_meant_otherwise_is_refused() -> Result<()> {
    let control = Control::start().await?;
    control.node("host", true, PLENTY).await?;
    let (_, instance) = control.schedule(&["--name", "web", TINY])?;
    let begins = &instance.to_string()[..7];
    let before = control.get(&control.keys.instance(instance)).await?;
    for (arguments, code, wanted) in [
        (&["destroy", begins][..], 1, "give 8 characters of that or more"),
        (&["rebuild", begins], 1, "what it wrote would be lost"),
        (&["run", "WEB", "--query", TINY, "--dry-run"], 1, "the name `WEB` is taken"),
        (
            &["set", "web", "--label", "a=1", "--label", "a=2"],
            2,
            "--label a is given twice: as `1` and as `2`",
        ),
        (&["run", "db", "--query", TINY, "--meta", "a=1", "--meta", "a=2"], 2, "--meta a is given twice"),
        (&["list", "--limit", "0"], 2, "0 is not in 1.."),
        (
            &["--request-id", "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab", "node", "list"],
            2,
            "goes with none of",
        ),
        (&["stop", "web", "--grace", "-1"], 2, "-1 is not in 0..=86400"),
        (&["resize", "web", "--confirm"], 1, "there is no resize of it"),
        (&["resize", "web", "--revert"], 1, "there is no resize of it"),
        // It would say how long for what is not waited for.
        (&["destroy", "web", "--timeout", "5"], 2, "--wait"),
        (&["--timeout", "5", "web"], 2, "--wait"),
        // Any word is taken for an instance's.
        (&["destory", "web"], 2, "did you mean `destroy`?"),
        (&["lsit"], 1, "did you mean `list`?"),
        (&["stpo", "--label", "a=b"], 2, "did you mean `stop`?"),
        (&["vlume", "list"], 2, "did you mean `volume`?"),
        (&["front", "list"], 2, "see `eschedule --help`"),
    ] {
        let output = control.eschedule(arguments)?;
        assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{arguments:?}: {output:?}");
        ensure!(error(&output).contains(wanted), "{arguments:?}: {}", error(&output));
    }
    assert_eq!(control.get(&control.keys.instance(instance)).await?, before, "it was touched");
    let help = control.done(&["--help"])?;
    ensure!(help.contains("[IMAGE_URL]\n       eschedule <COMMAND>\n"), "no line that is refused: {help}");
    let long = format!("a={}", "x".repeat(100_000));
    let output = control.eschedule(&["set", "web", "--label", &long])?;
    ensure!(output.status.code() == Some(2) && output.stderr.len() < 1000, "{}", error(&output));
    ensure!(!error(&output).contains("--config <FILE>"), "{}", error(&output));
    assert_eq!(control.done(&["rename", "web", "shop", "-o", "name"])?, "shop\n");
    assert_eq!(control.done(&["show", begins, "-o", "name"])?, "shop\n");
    assert_eq!(control.done(&["destroy", "shop", "-o", "name"])?, "shop\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_of_several_is_told_while_others_are_waited_for() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    for name in ["web", "db"] {
        let (_, instance) = control.schedule(&["--name", name, TINY])?;
        control.status(node, instance, State::Active, Some("10.0.0.7")).await?;
    }
    let mut stops = control.command(&["stop", "--wait", "--timeout", "60", "web", "none", "db"]);
    let mut stops = stops.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(stops.stderr.take().context("its stderr")?).lines();
    let mut until = |wanted: &str| -> Result<()> {
        let told = lines.by_ref().map_while(std::io::Result::ok).any(|line| line.contains(wanted));
        ensure!(told, "it ended without `{wanted}`");
        Ok(())
    };
    until("no instance of project")?;
    until("db: stopping")?;
    ensure!(stops.try_wait()?.is_none(), "it waits");
    kill(Pid::from_raw(stops.id().try_into()?), Signal::SIGINT)?;
    for _ in 0..2 {
        until("interrupted: what was asked of")?;
    }
    assert_eq!(stops.wait()?.code(), Some(130), "whatever failed before");
    Ok(())
}

//! Flavors, keypairs and images that have names, and instances that are made with them.

use std::{fs, process::Output};

use anyhow::{Context, Result, ensure};
use ec_model::{Flavor, decode};
use ec_tests::{
    TINY,
    control::{Control, notified},
};
use serde_json::Value;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn key(comment: &str) -> String {
    format!("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPPDZ0RoaDTsdTuMBMHFLPz5VvQGVcTQWqXkTfpZzYJ {comment}")
}

/// It is refused in one line with that code, and prints nothing.
fn refused(control: &Control, arguments: &[&str], code: i32, wanted: &str) -> Result<()> {
    let output = control.eschedule(arguments)?;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{arguments:?}: {output:?}");
    let text = error(&output);
    ensure!(text.contains(wanted), "{arguments:?}: {text}");
    ensure!(code == 2 || text.lines().count() == 1, "{text}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn flavors_are_made_shown_and_deleted_and_a_taken_name_is_refused() -> Result<()> {
    let control = Control::start().await?;
    assert_eq!(control.done(&["flavor", "list"])?, "FLAVOR  QUERY  CREATED\n");
    assert_eq!(control.done(&["flavor", "list", "-o", "name"])?, "");
    control.done(&["flavor", "create", "Small", TINY])?;
    control.done(&["flavor", "create", "big", "resources=VCPU:8,MEMORY_MB:8192&required=HW_X"])?;
    let before = control.get(&control.keys.flavor("small")).await?.context("no flavor")?;
    let record: Flavor = decode(&before.value)?;
    assert_eq!((record.name.as_str(), record.query.as_str()), ("Small", TINY));
    refused(&control, &["flavor", "create", "small", TINY], 1, "there is a flavor `Small` already")?;
    assert_eq!(control.get(&control.keys.flavor("small")).await?, Some(before));
    assert_eq!(control.done(&["flavor", "list", "-o", "name"])?, "big\nSmall\n");
    let show = control.done(&["flavor", "show", "SMALL"])?;
    ensure!(show.starts_with("flavor   Small\nquery    resources="), "{show}");
    let show: Value = serde_json::from_str(&control.done(&["flavor", "show", "SMALL", "-o", "json"])?)?;
    assert_eq!((&show["name"], &show["query"]), (&"Small".into(), &TINY.into()));
    for (arguments, code, wanted) in [
        (&["create", "a/b", TINY][..], 2, "wanted 1 to 63"),
        (&["create", "x", "VCPU:1"], 2, "key=value"),
        (&["create", "x", "resources=VCPU:1"], 2, "MEMORY_MB"),
        (&["show", "none"], 1, "there is no flavor `none`"),
        (&["delete", "none"], 1, "there is no flavor `none`"),
    ] {
        refused(&control, &[&["flavor"], arguments].concat(), code, wanted)?;
    }
    // One of a later release is told, hides no other, and is not used.
    control.put(control.keys.flavor("later"), r#"{"version":9}"#).await?;
    let output = control.eschedule(&["flavor", "list", "-o", "name"])?;
    assert_eq!(output.stdout, b"big\nSmall\n");
    ensure!(error(&output).contains("version 9"), "{output:?}");
    refused(&control, &["flavor", "show", "later"], 1, "cannot be read")?;
    let some = control.eschedule(&["flavor", "delete", "none", "small", "big", "SMALL"])?;
    assert_eq!(
        (some.status.code(), &some.stdout[..]),
        (Some(1), &b"DELETED FLAVOR small\nDELETED FLAVOR big\n"[..])
    );
    ensure!(error(&some).contains("there is no flavor `none`"), "{some:?}");
    assert!(control.get(&control.keys.flavor("small")).await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn keypairs_are_a_projects_own() -> Result<()> {
    let control = Control::start().await?;
    let file = control.directory().join("me.pub");
    fs::write(&file, format!("# mine\n{}\n{}\n", key("me@here"), key("me@there")))?;
    let path = file.display().to_string();
    let added = control.done(&["keypair", "add", "me", &path])?;
    ensure!(added.contains(" me@here\n") && added.contains(" me@there\n"), "{added}");
    let list = control.done(&["keypair", "list"])?;
    ensure!(list.contains("ssh-ed25519 me@here, ssh-ed25519 me@there") && !list.contains("AAAA"), "{list}");
    refused(&control, &["keypair", "add", "ME", &path], 1, "there is a keypair `me` already")?;
    refused(&control, &["keypair", "add", "x", "/nowhere"], 2, "cannot be read")?;
    refused(&control, &["keypair", "delete", "x"], 1, "there is no keypair `x`")?;
    refused(&control, &["keypair", "show", "x"], 1, "there is no keypair `x`")?;
    ensure!(control.done(&["keypair", "show", "ME"])?.contains("\nkey      ssh-ed25519 AAAA"));
    let list: Value = serde_json::from_str(&control.done(&["keypair", "list", "-o", "json"])?)?;
    assert_eq!((&list[0]["keys"][1], &list[0]["project"]), (&key("me@there").into(), &"default".into()));
    control.configure("project: other")?;
    assert_eq!(control.done(&["keypair", "list", "-o", "name"])?, "");
    control.done(&["keypair", "add", "me", &path])?;
    control.done(&["keypair", "add", "you", &path])?;
    let gone: Value =
        serde_json::from_str(&control.done(&["keypair", "delete", "me", "you", "-o", "json"])?)?;
    assert_eq!((&gone[0]["deleted"], &gone[1]["deleted"]), (&"me".into(), &"you".into()), "{gone}");
    ensure!(gone[0]["request_id"].is_string() && gone[0]["request_id"] == gone[1]["request_id"], "{gone}");
    control.configure("")?;
    assert_eq!(control.done(&["keypair", "list", "-o", "name"])?, "me\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_made_with_names_and_keeps_what_they_stood_for() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    control.configure("images: {debian: \"https://host/debian.qcow2\"}")?;
    let file = control.directory().join("file.pub");
    fs::write(&file, key("file"))?;
    let path = file.display().to_string();
    control.done(&["keypair", "add", "me", &path])?;
    fs::write(&file, key("other"))?;
    control.done(&["flavor", "create", "small", TINY])?;
    let line = control.done(&[
        "run",
        "web",
        "--flavor",
        "SMALL",
        "--image",
        "debian",
        "--key",
        "me",
        "--key",
        &path,
        "--label",
        "role=web",
        "--restart",
        "always",
    ])?;
    let (_, web) = notified(&line)?;
    control.done(&["flavor", "delete", "small"])?;
    control.done(&["keypair", "delete", "me"])?;
    let record = control.record(web).await?.context("no record")?;
    assert_eq!((record.name.as_deref(), record.restart), (Some("web"), ec_model::Restart::Always));
    assert_eq!(record.labels, [("role".to_owned(), "web".to_owned())].into());
    assert_eq!(record.spec.query, TINY);
    assert_eq!(record.spec.image.url, "https://host/debian.qcow2");
    assert_eq!(record.spec.keys, [key("file"), key("other")]);
    // The classic grammar knows the names of images and keypairs, too, and a query may stand in a flavor's place.
    let (_, classic) = control.schedule(&[TINY, "debian"])?;
    assert_eq!(
        control.record(classic).await?.context("no record")?.spec.image.url,
        "https://host/debian.qcow2"
    );
    let (_, db) = notified(&control.done(&["run", "db", "--query", TINY])?)?;
    assert_eq!(control.record(db).await?.context("no record")?.spec.image.url, "file:///nowhere");

    refused(&control, &["run", "web", "--query", TINY], 1, &web.to_string())?;
    refused(&control, &["run", "x", "--flavor", "small"], 1, "there is no flavor `small`")?;
    refused(&control, &["run", "x", "--query", TINY, "--key", "me"], 2, "has no keypair of that name")?;
    refused(&control, &["run", "x", "--query", TINY, "--image", "arch"], 1, "there is no image `arch`")?;
    refused(&control, &["run", "a b", "--query", TINY], 2, "a b")?;
    refused(&control, &["run", "x", "--query", "resources=VCPU:1"], 2, "MEMORY_MB")?;
    refused(&control, &["run", "x"], 2, "--flavor")?;
    control.configure("images: {debian: \"ftp://host\"}")?;
    refused(&control, &["list"], 2, "images.debian")?;
    control.configure("images: {\"a/b\": \"https://host/x\"}")?;
    refused(&control, &["list"], 2, "images: `a/b`")?;
    assert_eq!(control.placement.provider_allocations(node).await?.len(), 3, "only what was made holds room");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_chosen_by_name_and_a_dry_run_only_says_which() -> Result<()> {
    let control = Control::start().await?;
    let small: &[(&str, u64)] = &[("VCPU", 2), ("MEMORY_MB", 1024), ("DISK_GB", 10)];
    let mut nodes = Vec::new();
    for name in ["one", "two", "three"] {
        nodes.push(control.node(name, true, small).await?);
    }
    for (name, node) in ["one", "two", "three"].into_iter().zip(&nodes) {
        let dry = control.done(&["run", name, "--query", TINY, "--node", name, "--dry-run"])?;
        ensure!(dry.starts_with(&format!("WOULD GO TO {node} ({name})\n")), "{dry}");
        ensure!(dry.contains("VCPU 1 of 2 free (2 in all)") && dry.contains("no other"), "{dry}");
        let (at, instance) = notified(&control.done(&["run", name, "--query", TINY, "--node", name])?)?;
        assert_eq!(at, *node);
        let spec = control.record(instance).await?.context("no record")?.spec;
        assert_eq!(spec.query, TINY, "where it is placed again is open");
    }
    let before = control.count("").await?;
    let dry: Value = serde_json::from_str(&control.done(&["--dry-run", "-o", "json", TINY])?)?;
    assert_eq!((&dry["others"], &dry["resources"]["VCPU"]["free"]), (&2.into(), &1.into()), "{dry}");
    assert_eq!(control.count("").await?, before, "nothing was written");
    // By its uuid, where it is full, and where it is not at all.
    let two = nodes[1].to_string();
    assert_eq!(control.schedule(&["--node", &two, TINY])?.0, nodes[1]);
    let full = control.eschedule(&["--node", "two", TINY])?;
    assert_eq!((full.status.code(), full.stdout.as_slice()), (Some(1), &b"NO ALLOCATIONS LEFT\n"[..]));
    let why = error(&full);
    ensure!(why.contains("on two: VCPU is short by 1") && !why.contains("on one"), "{why}");
    refused(&control, &["--node", "nowhere", TINY], 1, "no node is named `nowhere`")?;
    refused(&control, &["--node", "one", &format!("{TINY}&in_tree={two}")], 2, "in_tree")?;
    let same = control.eschedule(&["--node", "two", &format!("{TINY}&in_tree={two}")])?;
    assert_eq!(same.status.code(), Some(1), "it is full, and that is all");
    // Said where it says nothing, it is not passed over.
    refused(&control, &["--dry-run", "destroy", "one"], 2, "--dry-run")?;
    assert!(control.done(&["list", "--state", "DESTROYING", "-o", "name"])?.is_empty());
    // A node that is not alive is said to be passed over.
    control.delete(control.keys.alive(nodes[0])).await?;
    control.delete(control.keys.alive(nodes[2])).await?;
    let none = control.eschedule(&["--dry-run", TINY])?;
    assert_eq!((none.status.code(), none.stdout.as_slice()), (Some(1), &b"NO ALLOCATIONS LEFT\n"[..]));
    ensure!(error(&none).contains("not alive: "), "{none:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strategy_says_which_node_comes_first() -> Result<()> {
    let control = Control::start().await?;
    let mut nodes = Vec::new();
    for (name, vcpu) in [("small", 16), ("middle", 24), ("large", 64)] {
        nodes.push(
            control.node(name, true, &[("VCPU", vcpu), ("MEMORY_MB", 1 << 16), ("DISK_GB", 100)]).await?,
        );
    }
    let two = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1";
    let to = |strategy: &str, more: &[&str]| -> Result<ec_model::NodeId> {
        Ok(control.schedule(&[&["--strategy", strategy, two], more].concat())?.0)
    };
    // 2 of 16 are more than 2 of 24. No two are ever as full as each other: which of those is first nobody says.
    assert_eq!(to("pack", &[])?, nodes[0]);
    assert_eq!(to("pack", &[])?, nodes[0]);
    for _ in 0..2 {
        assert_eq!(to("spread", &[])?, nodes[2]);
    }
    // 6 of 64 are more than 2 of 24.
    assert_eq!(to("spread", &[])?, nodes[1]);
    // Round and round, wherever the last one went.
    let mut sorted = nodes.clone();
    sorted.sort_unstable();
    let mut last = nodes[1];
    for _ in 0..4 {
        let next = to("round-robin", &[])?;
        let place = sorted.iter().position(|node| *node == last).context("no such node")?;
        assert_eq!(next, sorted[(place + 1) % 3]);
        last = next;
    }
    // The configuration's counts where the command line says nothing; what is said before is what is done.
    control.configure("strategy: sticky")?;
    let first = control.done(&["run", "web", "--query", two, "--dry-run", "-o", "name"])?;
    let (home, _) = notified(&control.done(&["run", "web", "--query", two])?)?;
    control.done(&["rename", "web", "other"])?;
    let (again, _) = notified(&control.done(&["run", "WEB", "--query", two, "--strategy", "sticky"])?)?;
    assert_eq!(home, again, "letters' case makes no other name");
    let name =
        ["small", "middle", "large"][nodes.iter().position(|node| *node == home).context("no such node")?];
    assert_eq!(first.trim(), name);
    assert!(nodes.contains(&to("random", &[])?));
    refused(&control, &["--strategy", "best", two], 2, "round-robin")?;
    refused(&control, &["--strategy", "pack", "destroy", "other"], 2, "--strategy")?;
    control.configure("strategy: best")?;
    refused(&control, &["list"], 2, "strategy")?;
    Ok(())
}

/// Where a shell finds the command line.
fn path(control: &Control) -> Result<std::ffi::OsString> {
    let eschedule = control.command(&[]);
    let directory = std::path::Path::new(eschedule.get_program()).parent().context("no directory")?;
    Ok(std::env::join_paths(
        std::iter::once(directory.to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    )?)
}

/// What a real bash offers for a word, of a line.
fn offered(control: &Control, line: &[&str]) -> Result<Vec<String>> {
    let script =
        "source <(eschedule completions bash); COMP_WORDS=(eschedule \"$@\"); COMP_CWORD=$#; COMP_TYPE=9
        _clap_complete_eschedule eschedule \"${@: -1}\" x; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = std::process::Command::new("bash");
    bash.env("ESCHEDULE_CONFIG", control.directory().join("schedule.yaml"));
    let output = bash.arg("-c").arg(script).arg("bash").args(line).env("PATH", path(control)?).output()?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?.lines().map(|word| word.trim_end().to_owned()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_completes_what_the_cluster_has_by_name() -> Result<()> {
    let mut control = Control::start().await?;
    let node = control.node("host-a", true, PLENTY).await?;
    control.schedule(&["--name", "web-1", TINY])?;
    control.schedule(&["--name", "web-2", TINY])?;
    let (_, db) = control.schedule(&["--name", "db", TINY])?;
    control.done(&["flavor", "create", "small", TINY])?;
    control.configure("images: {debian: \"http://host/debian.qcow2\"}")?;
    assert_eq!(offered(&control, &["show", "we"])?, ["web-1", "web-2"]);
    assert_eq!(offered(&control, &["stop", "web-1", "d"])?, ["db"]);
    let uuid = db.to_string();
    assert_eq!(offered(&control, &["destroy", &uuid[..6]])?, [uuid]);
    assert_eq!(offered(&control, &["run", "x", "--flavor", "s"])?, ["small"]);
    assert_eq!(offered(&control, &["run", "x", "--image", ""])?, ["debian"]);
    assert_eq!(offered(&control, &["list", "--node", "ho"])?, ["host-a"]);
    // Nobody forgets one that is alive.
    let gone = ec_model::NodeId::new(uuid::Uuid::new_v4());
    let record = serde_json::json!({"version": 1, "node": gone, "name": "host-gone", "created_at": "2026-01-01T00:00:00Z"});
    control.put(control.keys.node(gone), record.to_string()).await?;
    assert_eq!(offered(&control, &["node", "forget", "ho"])?, ["host-gone"]);
    control.delete(control.keys.node(gone)).await?;
    // Volumes and snapshots, each where it is meant; disks where they can be copied; an image behind an instance.
    let data: Value =
        serde_json::from_str(&control.done(&["volume", "create", "data", "--size", "1", "-o", "json"])?)?;
    let data = data["volume"].as_str().context("no volume")?.parse()?;
    control.status(node, data, ec_model::State::Active, None).await?;
    control.done(&["volume", "snapshot", "data", "date"])?;
    assert_eq!(offered(&control, &["volume", "show", "da"])?, ["data", "date"]);
    assert_eq!(offered(&control, &["snapshot", "show", "da"])?, ["date"]);
    assert_eq!(offered(&control, &["run", "x", "--image", "volume:dat"])?, ["volume:data", "volume:date"]);
    assert_eq!(offered(&control, &["volume", "restore", "data", "volume:date"])?, ["volume:date"]);
    assert_eq!(offered(&control, &["image", "add", "x", "instance:d"])?, ["instance:db"]);
    assert_eq!(offered(&control, &["rebuild", "web-1", "d"])?, ["debian", "db"]);
    // A name that is more than a word is not offered, and of a record that cannot be read nothing is told.
    control.node("host-$(id)", true, PLENTY).await?;
    control.put(control.keys.flavor("smaller"), "{}").await?;
    assert_eq!(offered(&control, &["list", "--node", "ho"])?, ["host-a"]);
    assert_eq!(offered(&control, &["run", "x", "--flavor", "s"])?, ["small"]);
    assert!(offered(&control, &["lis"])?.contains(&"list".to_owned()));
    // Who types is not made to wait for an etcd that is away, and is told nothing.
    control.etcd.kill();
    assert_eq!(offered(&control, &["show", "we"])?, [""]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_completes_words_that_it_takes_apart() -> Result<()> {
    let control = Control::start().await?;
    control.node("host-a", true, PLENTY).await?;
    control.schedule(&["--name", "web-1", TINY])?;
    control.done(&["image", "add", "debian:12", "https://images.example/debian.qcow2"])?;
    let (path, config) = (path(&control)?, control.directory().join("schedule.yaml"));
    let set = |name: &str, value: &str| format!("{name}={value}");
    let mut bash = std::process::Command::new("env");
    bash.args([
        set("PATH", path.to_str().context("a path")?),
        set("ESCHEDULE_CONFIG", config.to_str().context("a path")?),
        set("INPUTRC", "/dev/null"),
    ]);
    // Words are taken apart by who reads the line, and what is offered put in its place there.
    let mut bash = ec_tests::Terminal::start(bash.args(["bash", "--norc", "-i"]))?;
    bash.types("source <(eschedule completions bash); PS1='$((6 * 7)): '\r")?;
    bash.until_seen("42: ")?;
    for (typed, completed) in [
        ("show we", "show web-1 "),
        ("ssh root@we", "ssh root@web-1 "),
        ("ssh root@", "ssh root@web-1 "),
        ("run x --image debian:1", "run x --image debian:12 "),
        ("run x --image deb", "run x --image debian:12 "),
        ("run x --image=deb", "run x --image=debian:12 "),
        ("run x --label a=b:c --image=debian:", "run x --label a=b:c --image=debian:12 "),
        ("ssh 'root@we", "ssh 'root@web-1' "),
    ] {
        bash.types(&format!("eschedule {typed}\t!"))?;
        bash.until_seen(&format!("eschedule {completed}!"))?;
        // Leaves the line out.
        bash.types("\u{15}")?;
    }
    // What stands behind the cursor stays.
    bash.types("eschedule ssh root@we uptime\u{1b}b\u{2}\t!")?;
    bash.until_seen("eschedule ssh root@web-1! uptime")
}

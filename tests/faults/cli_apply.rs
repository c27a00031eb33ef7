//! `apply`: a file is made so, the same again does nothing, and what is another's is left alone.

use std::{
    fs,
    io::Write,
    process::{Child, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use ec_model::{
    Desired, Held, Instance, InstanceId, Intent, NodeId, Request, State, Workload, decode, encode,
};
use ec_store::{Store, Txn};
use ec_tests::{TINY, control::Control, program};
use serde_json::Value;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Writes the stack's file; its path.
pub(crate) fn file(control: &Control, text: &str) -> Result<String> {
    let path = control.directory().join("shop.yaml");
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}

/// What was done: each as `what name`, and what standard error said.
pub(crate) fn applied(
    control: &Control,
    path: &str,
    more: &[&str],
    code: i32,
) -> Result<(Vec<String>, String)> {
    let output = control.eschedule(&[&["apply", "-f", path, "-o", "json"], more].concat())?;
    ensure!(output.status.code() == Some(code), "{output:?}");
    let done: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let word = |one: &Value, field: &str| one[field].as_str().unwrap_or_default().to_owned();
    let done = done.iter().map(|one| format!("{} {}", word(one, "what"), word(one, "name"))).collect();
    Ok((done, error(&output)))
}

/// The instance that is called so, once there is one, and where it is.
async fn placed(control: &Control, name: &str) -> Result<(NodeId, InstanceId)> {
    for _ in 0..1200 {
        for key in control.store_keys("instances/").await? {
            let pair = control.get(&key).await?.context("it is there")?;
            let record: Instance = decode(&pair.value)?;
            if let Some(node) = record.node().filter(|_| record.name.as_deref() == Some(name)) {
                return Ok((node, record.instance));
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("nothing that is called {name} was placed within a minute")
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_hears_that_all_is_there_or_what_became_of_it_and_that_what_goes_is_gone() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let text = format!("stack: shop\ninstances:\n  db: {{query: '{TINY}'}}\n  web: {{query: '{TINY}'}}\n");
    let path = file(&control, &text)?;
    let waits = |more: &[&str]| {
        let arguments = [&["apply", "-f", &path, "--wait", "-o", "json"], more].concat();
        control.command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let child = waits(&["--timeout", "120"])?;
    let (db, web) = (placed(&control, "db").await?, placed(&control, "web").await?);
    control.status(db.0, db.1, State::Error, None).await?;
    control.status(web.0, web.1, State::Active, Some("10.0.0.1")).await?;
    let output = child.wait_with_output()?;
    ensure!(output.status.code() == Some(1) && error(&output).contains("eschedule: db: "), "{output:?}");
    let done: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let notes: Vec<bool> =
        done.iter().map(|one| one["note"].as_str().is_some_and(|note| note.contains("ERROR"))).collect();
    assert_eq!(notes, [true, false], "{done:?}");
    // All is there: nothing is waited for.
    control.status(db.0, db.1, State::Active, Some("10.0.0.2")).await?;
    let again = waits(&[])?.wait_with_output()?;
    ensure!(again.status.success(), "{again:?}");
    // What was asked for before, without a wait, is waited for.
    let text = format!("{text}  cache: {{query: '{TINY}'}}\n");
    control.done(&["apply", "-f", &file(&control, &text)?])?;
    let cache = placed(&control, "cache").await?;
    let late = waits(&["--timeout", "1"])?.wait_with_output()?;
    ensure!(late.status.code() == Some(1) && error(&late).contains("cache: not done after 1 s"), "{late:?}");
    let again = waits(&["--timeout", "120"])?;
    control.status(cache.0, cache.1, State::Active, Some("10.0.0.3")).await?;
    let again = again.wait_with_output()?;
    ensure!(again.status.success(), "{again:?}");
    // What is asked for and does not come is told in time.
    file(&control, &format!("stack: shop\ninstances:\n  web: {{query: '{TINY}'}}\n"))?;
    let late = waits(&["--prune", "--timeout", "1"])?.wait_with_output()?;
    ensure!(late.status.code() == Some(1) && error(&late).contains("db: "), "{late:?}");
    let gone = waits(&["--prune", "--timeout", "120"])?;
    for (node, instance) in [db, cache] {
        control.delete(control.keys.request(node, instance)).await?;
    }
    let gone = gone.wait_with_output()?;
    ensure!(gone.status.success(), "{gone:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_is_waited_for_although_something_else_could_not_be() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let large = "resources=VCPU:9000,MEMORY_MB:1";
    let text = format!("stack: shop\ninstances:\n  big: {{query: '{large}'}}\n  web: {{query: '{TINY}'}}\n");
    let path = file(&control, &text)?;
    let mut command = control.command(&["apply", "-f", &path, "--wait", "--timeout", "120", "-o", "json"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (node, web) = placed(&control, "web").await?;
    // It would have ended by now.
    tokio::time::sleep(Duration::from_secs(1)).await;
    control.status(node, web, State::Error, None).await?;
    let output = child.wait_with_output()?;
    let told = error(&output);
    ensure!(output.status.code() == Some(1) && told.contains("eschedule: big: no allocations"), "{output:?}");
    ensure!(told.contains("eschedule: web: ") && told.contains("in ERROR"), "{told}");
    let done: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    ensure!(done.iter().all(|one| one["note"].is_string()), "{done:?}");
    Ok(())
}

/// The stack is refused with that code and one line that has these words.
pub(crate) fn refused(control: &Control, text: &str, code: i32, wanted: &str) -> Result<()> {
    let output = control.eschedule(&["apply", "-f", &file(control, text)?])?;
    assert_eq!(output.status.code(), Some(code), "{text}: {output:?}");
    let told = error(&output);
    let failure: Vec<&str> = told.lines().filter(|line| line.starts_with("eschedule: ")).collect();
    ensure!(failure.len() == 1 && failure[0].contains(wanted), "{text}: {told}");
    Ok(())
}

pub(crate) fn nothing() -> Vec<String> {
    Vec::new()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_made_so_and_the_same_again_does_nothing() -> Result<()> {
    let control = Control::start().await?;
    for name in ["a", "b"] {
        control.node(name, true, PLENTY).await?;
    }
    control.done(&["flavor", "create", "small", TINY])?;
    control.done(&["run", "other", "--flavor", "small"])?;
    let data = control.directory().join("data");
    fs::write(&data, "#!/bin/sh\n")?;
    let text = "stack: shop\ngroups:\n  front: {policy: anti-affinity}\ninstances:\n  db: {flavor: small, user_data: data, labels: {role: db}, metadata: {k: v}}\n  web: {count: 2, flavor: small, group: front}\n";
    let path = file(&control, text)?;
    let all = ["group front", "run db", "run web-1", "run web-2"].map(str::to_owned).to_vec();
    let (shown, told) = applied(&control, &path, &["--diff"], 1)?;
    assert_eq!(shown, all);
    ensure!(told.lines().count() == 4 && told.starts_with("+ front: anti-affinity\n+ db: "), "{told}");
    assert_eq!((control.count("instances/").await?, control.count("groups/").await?), (1, 0), "only shown");
    assert_eq!(applied(&control, &path, &[], 0)?.0, all);
    assert_eq!((control.count("requests/").await?, control.count("members/").await?), (4, 2));
    for more in [&[][..], &["--prune"], &["--diff", "--prune"]] {
        assert_eq!(applied(&control, &path, more, 0)?, (nothing(), String::new()), "{more:?}");
    }
    // What may be changed is, what may not is told, and what the file says no more goes where that is wished.
    // As long as before.
    fs::write(&data, "#!/bin/su\n")?;
    let text = "stack: shop\ninstances:\n  db: {flavor: small, image: \"file:///new\", user_data: data, labels: {tier: back}, restart: always}\n  web: {count: 1, flavor: small, group: front}\n";
    let path = file(&control, text)?;
    // A script notices that not all is as the file says.
    let (done, told) = applied(&control, &path, &[], 1)?;
    assert_eq!(done, ["set db", "stands db", "stands db", "keep web-2"]);
    ensure!(
        told.contains("= web-2: the file does not name it, and it stays; `--prune` destroys it"),
        "{told}"
    );
    ensure!(
        told.ends_with("eschedule: what stands behind a `!` is not as the file says, and is left to you\n"),
        "{told}"
    );
    let change = "~ db: unset --label role, set --label tier=back, unset --meta k, set --restart always";
    ensure!(told.contains(change) && told.contains("! db: its image is file:///nowhere"), "{told}");
    ensure!(told.contains("! db: its user-data is not what the file says"), "{told}");
    fs::write(&data, "#!/bin/sh\n")?;
    assert_eq!(applied(&control, &path, &["--prune"], 1)?.0, ["stands db", "destroy web-2"]);
    assert_eq!(applied(&control, &path, &["--prune"], 1)?.0, ["stands db"]);
    let names = control.done(&["list", "--label", "stack=shop", "-o", "name"])?;
    ensure!(names.contains("db\n") && names.contains("web-1"), "{names}");
    ensure!(control.done(&["list", "-o", "name"])?.contains("other"), "it was never of the stack");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_node_has_and_etcd_lost_is_not_made_once_more() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let text = format!("stack: shop\ninstances:\n  web: {{query: \"{TINY}\"}}\n");
    applied(&control, &file(&control, &text)?, &[], 0)?;
    let (node, instance) = placed(&control, "web").await?;
    // As its agent holds it, once an older etcd was put back.
    let keys = &control.keys;
    let request = control.store.get(&keys.request(node, instance)).await?.0.context("it is asked for")?;
    let intent = Intent::of(&request.value, None)?;
    let (rebuilt, rescued, resized, resources) = Default::default();
    let held = Held { instance, node, intent, rebuilt, rescued, resized, resources, user_data_bytes: None };
    let lost = [
        keys.instance(instance),
        keys.request(node, instance),
        keys.name(Workload::Machine, "default", "web", instance),
    ];
    let txn = lost.into_iter().fold(Txn::new(), Txn::delete);
    control.store.txn(txn.put(keys.held(node, instance), encode(&held))).await?;
    refused(&control, &text, 1, "`eschedule heal` brings it back")?;
    refused(&control, &text.replace("web:", "WEB:"), 1, &format!("`eschedule destroy {instance}` ends it"))?;
    assert_eq!(control.count("instances/").await?, 0);
    // Another is made beside it, and one of the name where its user has ended that.
    applied(&control, &file(&control, &text.replace("web:", "db:"))?, &[], 0)?;
    let mut ended: Request = decode(&request.value)?;
    ended.desired = Desired::Destroyed;
    let ended = Held { intent: Intent::of(&encode(&ended), None)?, ..held };
    control.store.txn(Txn::new().put(keys.held(node, instance), encode(&ended))).await?;
    applied(&control, &file(&control, &text)?, &[], 0)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_demands_a_session_token_of_a_guest_that_is_made_by_it() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let text = |entry: &str| format!("stack: shop\ninstances:\n  db: {{query: '{TINY}'{entry}}}\n");
    let path = file(&control, &text(", require_token: true"))?;
    assert_eq!(applied(&control, &path, &[], 0)?.0, ["run db"]);
    let (_, db) = placed(&control, "db").await?;
    assert!(control.record(db).await?.context("no record")?.spec.token_required);
    assert_eq!(applied(&control, &path, &[], 0)?.0, nothing());
    let path = file(&control, &text(""))?;
    assert_eq!(applied(&control, &path, &[], 0)?.0, nothing(), "the file does not say that it is not");
    let other = text(", require_token: true").replace("db:", "web:");
    control.done(&["run", "web", "--query", TINY, "--label", "stack=shop"])?;
    let (done, told) = applied(&control, &file(&control, &other)?, &[], 1)?;
    assert_eq!(done, ["stands web", "keep db"]);
    ensure!(told.contains("! web: its demand for a session token is not what the file says"), "{told}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_the_stack_goes_by_prune_when_the_file_names_it_no_more_and_others_stay() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    control.done(&["flavor", "create", "small", TINY])?;
    control.done(&["group", "create", "own", "--policy", "affinity"])?;
    let with = "stack: shop\ngroups:\n  Front: {policy: affinity}\n  own: {policy: affinity}\ninstances:\n  web: {flavor: small, group: front}\n";
    let path = file(&control, with)?;
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, ["group Front", "run web"]);
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, nothing());
    // Named by an instance it is needed, and without the wish nothing goes.
    let path = file(&control, "stack: shop\ninstances:\n  web: {flavor: small, group: front}\n")?;
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, nothing());
    let path = file(&control, "stack: shop\ninstances: {}\n")?;
    assert_eq!(applied(&control, &path, &[], 0)?.0, ["keep web"]);
    assert_eq!(applied(&control, &path, &["--diff"], 0)?.0, ["keep web"], "it may stay so");
    // Somebody else's member keeps it.
    control.done(&["run", "guest", "--flavor", "small", "--group", "front"])?;
    assert_eq!(applied(&control, &path, &["--diff", "--prune"], 1)?.0, ["destroy web", "keep Front"]);
    let (done, told) = applied(&control, &path, &["--prune"], 0)?;
    assert_eq!(done, ["destroy web", "keep Front"]);
    ensure!(told.contains("= Front: it has 1 members that stay"), "{told}");
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, ["keep Front"], "it may stay so");
    assert_eq!(applied(&control, &path, &["--diff", "--prune"], 0)?.0, ["keep Front"]);
    control.done(&["destroy", "guest"])?;
    assert_eq!(applied(&control, &path, &["--diff", "--prune"], 1)?.0, ["delete Front"]);
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, ["delete Front"]);
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, nothing());
    assert_eq!(control.done(&["group", "list", "-o", "name"])?, "own\n", "it was made by itself");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_changed_keeps_nothing_else_from_going_but_what_cannot_be_made_does() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    control.done(&["flavor", "create", "small", TINY])?;
    control.done(&["flavor", "create", "huge", "resources=VCPU:4000,MEMORY_MB:256"])?;
    let stack = |rest: &str| format!("stack: shop\ninstances:\n  web: {{flavor: small{rest}\n");
    let with = stack("}\n  old: {flavor: small}\n  older: {flavor: small}");
    let path = file(&control, &with)?;
    assert_eq!(applied(&control, &path, &[], 0)?.0, ["run old", "run older", "run web"]);
    control.done(&["lock", "web", "older"])?;
    let all = control.done(&["list", "-o", "name"])?;
    let (_, told) =
        applied(&control, &file(&control, &stack("}\n  more: {flavor: huge}"))?, &["--prune"], 1)?;
    ensure!(told.contains("more: no allocations left") && !told.contains("locked"), "{told}");
    assert_eq!(control.done(&["list", "-o", "name"])?, all, "nothing is there in their place");
    let path = file(&control, &stack(", labels: {role: front}}"))?;
    let (_, told) = applied(&control, &path, &["--prune"], 1)?;
    ensure!(told.contains("web") && told.contains("locked"), "{told}");
    let left = control.done(&["list", "-o", "name"])?;
    ensure!(!left.lines().any(|name| name == "old"), "{left}");
    ensure!(left.lines().any(|name| name == "older"), "{left}");
    control.done(&["unlock", "web", "older"])?;
    assert_eq!(applied(&control, &path, &["--prune"], 0)?.0, ["set web", "destroy older"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_told_in_a_line_and_change_nothing() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    control.done(&["run", "web", "--query", TINY])?;
    control.done(&["group", "create", "front", "--policy", "affinity"])?;
    let key = control.directory().join("me.pub");
    fs::write(&key, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPPDZ0RoaDTsdTuMBMHFLPz5VvQGVcTQWqXkTfpZzYJ me\n")?;
    control.done(&["keypair", "add", "me", &key.display().to_string()])?;
    control.done(&["flavor", "create", "strange", &format!("{TINY}&required=CUSTOM_NO")])?;
    let entry = format!("{{query: \"{TINY}\"}}");
    for (text, code, wanted) in [
        (
            "stack: s\ninstances:\n  x: {flavour: small}\n".to_owned(),
            2,
            "shop.yaml:3:7: instances.x: unknown",
        ),
        (
            "stack: s\ninstances:\n  x: {flavor: none}\n".to_owned(),
            1,
            "shop.yaml:3:15: instances.x.flavor: there is no flavor `none`",
        ),
        (
            "stack: s\ninstances:\n  x: {query: \"resources=VCPU:1\"}\n".to_owned(),
            2,
            "shop.yaml:3:14: instances.x.query: ",
        ),
        (
            format!("stack: s\ninstances:\n  new: {entry}\n  web: {entry}\n"),
            1,
            "shop.yaml:4:8: instances.web: `web` is ",
        ),
        (
            "stack: s\ngroups:\n  front: {policy: anti-affinity}\n".to_owned(),
            1,
            "shop.yaml:3:19: groups.front.policy: there is one with affinity",
        ),
        (
            format!("stack: s\ninstances:\n  new: {{group: none, query: \"{TINY}\"}}\n"),
            1,
            "shop.yaml:3:16: instances.new.group: there is no group `none`",
        ),
        (
            format!("stack: s\ninstances:\n  new: {{image: none, query: \"{TINY}\"}}\n"),
            1,
            "shop.yaml:3:16: instances.new.image: there is no image `none`",
        ),
        (
            format!("stack: s\ninstances:\n  new: {{sha256: ab, query: \"{TINY}\"}}\n"),
            2,
            "shop.yaml:3:17: instances.new.sha256: `ab`: wanted 64 hexadecimal digits",
        ),
        (
            format!("stack: s\ninstances:\n  new:\n    keys: [me, none]\n    query: \"{TINY}\"\n"),
            2,
            "shop.yaml:4:16: instances.new.keys[1]: the file ",
        ),
        (
            format!("stack: s\ninstances:\n  new:\n    user_data: none\n    query: \"{TINY}\"\n"),
            2,
            "shop.yaml:4:16: instances.new.user_data: the file ",
        ),
        // What only placement knows.
        (
            format!(
                "stack: s\ngroups: {{g: {{policy: affinity}}}}\ninstances:\n  a: {entry}\n  b: {{query: \"{TINY},CUSTOM_NO:1\"}}\n"
            ),
            2,
            "shop.yaml:5:14: instances.b.query: placement refuses the query",
        ),
        (
            format!("stack: s\ninstances:\n  a: {entry}\n  b: {{flavor: strange}}\n"),
            2,
            "shop.yaml:4:15: instances.b.flavor: placement refuses the query",
        ),
    ] {
        refused(&control, &text, code, wanted)?;
        assert_eq!((control.count("instances/").await?, control.count("groups/").await?), (1, 1), "{text}");
    }
    Ok(())
}

/// Another who applies another revision of the file has asked for it, and places it while this one waits for its name.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_made_meanwhile_is_looked_at_as_what_was_there_before() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let text = |size: u32, role: &str, query: &str| {
        format!(
            "stack: shop\nvolumes:\n  data: {{size: {size}, labels: {{role: {role}}}}}\ninstances:\n  db: {{query: '{query}', labels: {{role: {role}}}}}\n"
        )
    };
    control.done(&["apply", "-f", &file(&control, &text(1, "old", TINY))?])?;
    let mut records = Vec::new();
    for pair in control.store.list(&control.keys.instances()).await?.pairs {
        let record: Instance = decode(&pair.value)?;
        let begun = Instance { assigned: None, ..record.clone() };
        control.put(pair.key.clone(), encode(&begun)).await?;
        records.push((pair.key, record));
    }
    assert_eq!(records.len(), 2);
    let larger = TINY.replace("VCPU:1", "VCPU:2");
    assert_ne!(larger, TINY);
    let path = file(&control, &text(2, "new", &larger))?;
    let arguments = ["apply", "-f", &path, "-o", "json"];
    let second = control.command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // It waits for each up to ten seconds.
    tokio::time::sleep(Duration::from_secs(3)).await;
    for (key, record) in records {
        control.put(key, encode(&record)).await?;
    }
    let output = second.wait_with_output()?;
    ensure!(output.status.code() == Some(1), "what it leaves to you is told: {output:?}");
    let done: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let told = |what: &str, name: &str| {
        done.iter()
            .find(|one| one["what"] == what && one["name"] == name)
            .with_context(|| format!("{what}: {done:?}"))
    };
    for (what, name) in [("run", "db"), ("create", "data")] {
        ensure!(told(what, name)?["request_id"].is_null(), "it was not this command: {done:?}");
    }
    for (what, name) in [("set", "db"), ("set", "data"), ("extend", "data")] {
        ensure!(told(what, name)?["request_id"].is_string(), "{done:?}");
    }
    ensure!(told("stands", "db")?["node"].is_string(), "{done:?}");
    ensure!(error(&output).contains("! db: "), "{output:?}");
    let (_, db) = placed(&control, "db").await?;
    assert_eq!(control.record(db).await?.context("no record")?.labels["role"], "new");
    Ok(())
}

/// Has a record be as something else than `apply` left it.
async fn leave(control: &Control, name: &str, change: impl Fn(&mut Instance)) -> Result<()> {
    for pair in control.store.list(&control.keys.instances()).await?.pairs {
        let mut record: Instance = decode(&pair.value)?;
        if record.name.as_deref() == Some(name) {
            change(&mut record);
            control.put(pair.key, encode(&record)).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_file_comes_to_rest_whatever_its_words_mean_by_now() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let add = |digest: &str| {
        let url = "https://images.example/debian.qcow2";
        control.done(&["image", "add", "debian", url, "--sha256", &digest.repeat(64)])
    };
    add("a")?;
    let says = |image: &str| {
        let all = format!("stack: shop\ninstances:\n  web: {{query: \"{TINY}\"{image}}}\n");
        file(&control, &format!("{all}volumes:\n  root: {{size: 1, image: debian}}\n"))
    };
    let path = says(", image: debian")?;
    assert_eq!(applied(&control, &path, &[], 0)?.0, ["run web", "create root"]);
    assert_eq!(applied(&control, &path, &["--diff"], 0)?, (nothing(), String::new()));
    // A point release.
    control.done(&["image", "delete", "debian"])?;
    add("b")?;
    let (done, told) = applied(&control, &path, &["--diff"], 0)?;
    assert_eq!(done, ["keep web"], "of a volume it matters once");
    let images = "= web: its image is https://images.example/debian.qcow2 (digest aaaaaaaaaaaa…): ";
    ensure!(told.starts_with(images) && told.contains("bbbbbbbbbbbb…), and what it wrote is lost"), "{told}");
    assert_eq!(applied(&control, &path, &[], 0)?.0, ["keep web"]);
    // Who restores its disk from a snapshot, and who grew it and reverted the rest.
    leave(&control, "web", |record| {
        record.spec.image = ec_model::ImageRef::at("volume:7d3c1f0a-2b4e-4c55-9a7e-0123456789ab");
        record.spec.query = format!("{TINY},DISK_GB:9").replace("DISK_GB:1,", "");
    })
    .await?;
    let (done, told) = applied(&control, &path, &[], 0)?;
    assert_eq!(done, ["keep web", "keep web"]);
    ensure!(told.contains("= web: its disk has 9 GB") && !told.contains('!'), "{told}");
    // Another word is a wish, which is told until it is so.
    leave(&control, "web", |record| record.spec.image = ec_model::ImageRef::at("https://images.example/1"))
        .await?;
    let (done, told) = applied(&control, &says(", image: \"https://images.example/2\"")?, &[], 1)?;
    assert_eq!(done, ["stands web", "keep web"]);
    ensure!(told.contains("! web: its image is https://images.example/1: `eschedule rebuild web --image https://images.example/2`"), "{told}");
    // What a volume was made of may be gone.
    control.done(&["image", "delete", "debian"])?;
    assert_eq!(applied(&control, &says("")?, &[], 0)?.0, ["keep web", "keep web"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_from_standard_input_is_read_once_and_files_lie_beside_the_file() -> Result<()> {
    let control = Control::start().await?;
    control.node("a", true, PLENTY).await?;
    let public = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPPDZ0RoaDTsdTuMBMHFLPz5VvQGVcTQWqXkTfpZzYJ me\n";
    let piped = |arguments: &[&str], text: &str| -> Result<Output> {
        let mut command = control.command(arguments);
        // Where no file is that could be meant.
        command.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        child.stdin.take().context("no pipe")?.write_all(text.as_bytes())?;
        Ok(child.wait_with_output()?)
    };
    let done = |arguments: &[&str], text: &str| -> Result<String> {
        let output = piped(arguments, text)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    ensure!(done(&["keypair", "add", "me", "-"], public)?.contains("AAAAC3NzaC1lZDI1NTE5"));
    done(&["run", "one", "--query", TINY, "--user-data", "-"], "#!/bin/sh\n")?;
    done(&["run", "two", "--query", TINY, "--key", "-"], public)?;
    let shown =
        control.done(&["show", "one", "-o", "json"])? + &control.done(&["show", "two", "-o", "json"])?;
    ensure!(shown.contains("\"user_data_bytes\": 10") && shown.contains("AAAAC3NzaC1lZDI1NTE5"), "{shown}");
    let output = piped(&["run", "x", "--query", TINY, "--user-data", "-", "--key", "-"], public)?;
    ensure!(output.status.code() == Some(2) && error(&output).contains("read once"), "{output:?}");

    // Beside the file, wherever whoever applies is.
    fs::create_dir(control.directory().join("keys"))?;
    for name in ["me.pub", "keys/me.pub", "-"] {
        fs::write(control.directory().join(name), public)?;
    }
    let says = |stack: &str, more: &str| {
        format!("stack: {stack}\ninstances:\n  {stack}: {{query: \"{TINY}\"{more}}}\n")
    };
    let path = file(&control, &says("shop", ", keys: [me.pub, keys/me.pub, me], user_data: \"-\""))?;
    done(&["apply", "-f", &path], "")?;
    assert_eq!(done(&["apply", "-f", &path, "--diff", "-o", "name"], "")?, "");
    ensure!(
        control
            .done(&["show", "shop", "-o", "json"])?
            .contains(&format!("\"user_data_bytes\": {}", public.len()))
    );

    let told = error(&piped(&["apply", "-f", "-"], &says("piped", ", keys: [me.pub]"))?);
    let wanted = ": instances.piped.keys[0]: the file me.pub cannot be read";
    ensure!(told.contains("eschedule: standard input:3:") && told.contains(wanted), "{told}");
    done(&["apply", "-f", "-"], &says("piped", ""))?;
    assert_eq!(done(&["apply", "-f", "-", "--diff", "-o", "name"], &says("piped", ""))?, "");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_is_printed_wherever_one_is() -> Result<()> {
    let nowhere = std::process::Command::new(program("eschedule"))
        .args(["--config", "/nowhere.yaml", "apply", "--schema"])
        .output()?;
    let schema: Value = serde_json::from_slice(&nowhere.stdout)?;
    assert_eq!(schema["title"], "A stack of etcd-compute");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_killed_at_any_moment_and_applies_again_has_what_the_file_says() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("a", true, PLENTY).await?;
    for (round, after) in (0..8).zip([5, 20, 40, 60, 80, 100, 150, 250]) {
        let text = format!("stack: s{round}\ninstances:\n  w{round}: {{count: 4, query: \"{TINY}\"}}\n");
        let path = file(&control, &text)?;
        let mut killed = control.command(&["apply", "-f", &path]).spawn()?;
        tokio::time::sleep(Duration::from_millis(after)).await;
        killed.kill()?;
        killed.wait()?;
        // One that was being placed may be at it for all that anybody knows; the others are there.
        let output = control.eschedule(&["apply", "-f", &path])?;
        let failed = error(&output).matches("is not placed: a command began with it").count();
        ensure!(output.status.success() == (failed == 0) && failed <= 1, "{output:?}");
        let label = format!("stack=s{round}");
        let there: Value = serde_json::from_str(&control.done(&["list", "--label", &label, "-o", "json"])?)?;
        let all = there["instances"].as_array().or(there.as_array()).context("a list")?;
        let placed = all.iter().filter(|one| !one["node"].is_null()).count();
        ensure!(placed == 4 - failed, "what was told to be done is placed: {round}: {there}");
    }
    let claims = control.placement.provider_allocations(node).await?.len();
    ensure!(claims >= control.count("requests/").await?, "each that is requested is claimed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_applied_three_times_at_once_is_made_once_and_nobody_is_refused() -> Result<()> {
    let control = Control::start().await?;
    for name in ["a", "b", "c", "d"] {
        control.node(name, true, PLENTY).await?;
    }
    control.done(&["flavor", "create", "small", TINY])?;
    for round in 1..=5 {
        let text = format!(
            "stack: s{round}\ngroups:\n  g{round}: {{policy: anti-affinity}}\ninstances:\n  web{round}: {{count: 4, flavor: small, group: g{round}}}\n"
        );
        let path = file(&control, &text)?;
        let spawn = || control.command(&["apply", "-f", &path]).stderr(Stdio::piped()).spawn();
        let children: Vec<Child> = (0..3).map(|_| spawn()).collect::<Result<_, _>>()?;
        for child in children {
            let output = child.wait_with_output()?;
            ensure!(output.status.success(), "round {round}: {}", error(&output));
        }
        assert_eq!((control.count("instances/").await?, control.count("groups/").await?), (4 * round, round));
        assert_eq!(
            (control.count("requests/").await?, control.count("members/").await?),
            (4 * round, 4 * round)
        );
    }
    Ok(())
}

//! What the command line shows, in which form, of which instances, and to whom it does things by their labels.

use std::process::{Command, Output};

use anyhow::{Result, ensure};
use ec_model::{InstanceId, NodeId, Power, State};
use ec_tests::{TINY, control::Control};
use serde_json::{Value, json};

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json_of(control: &Control, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&control.done(&[&["-o", "json"], arguments].concat())?)?)
}

/// The names that are printed, in one line.
fn names(control: &Control, arguments: &[&str]) -> Result<String> {
    let text = control.done(&[arguments, &["-o", "name"]].concat())?;
    Ok(text.lines().collect::<Vec<_>>().join(" "))
}

/// The names of a list as tables have them, whosever they are, in one line.
fn listed(control: &Control, arguments: &[&str]) -> Result<String> {
    let list = json_of(control, &[&["list"], arguments].concat())?;
    let names = list.as_array().into_iter().flatten().filter_map(|view| view["name"].as_str());
    Ok(names.collect::<Vec<_>>().join(" "))
}

/// Three instances of two projects: `web` and `db` of one, with labels, and `shop`.
async fn three(control: &Control) -> Result<(NodeId, [InstanceId; 3])> {
    let node = control.node("host", true, PLENTY).await?;
    let (_, web) =
        control.schedule(&["--name", "web", "--label", "role=web", "--label", "tier=front", TINY])?;
    let (_, db) = control.schedule(&["--name", "db", "--label", "role=db", TINY])?;
    control.configure("project: other")?;
    let (_, shop) = control.schedule(&["--name", "shop", "--label", "role=web", TINY])?;
    control.configure("")?;
    control.status(node, web, State::Active, Some("10.0.0.7")).await?;
    control.status(node, db, State::Error, None).await?;
    Ok((node, [web, db, shop]))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_result_is_told_in_each_form() -> Result<()> {
    let control = Control::start().await?;
    let (node, [web, ..]) = three(&control).await?;
    let json = json_of(&control, &["list", "--sort", "name"])?;
    let yaml = control.done(&["list", "--sort", "name", "-o", "yaml"])?;
    ensure!(yaml.starts_with("- instance: ") && yaml.contains("  name: shop\n"), "{yaml}");
    assert_eq!(json[2]["labels"], serde_json::json!({"role": "web", "tier": "front"}));
    assert_eq!((&json[1]["project"], &json[2]["ip"]), (&"other".into(), &"10.0.0.7".into()));
    // One form had another name.
    assert_eq!(control.done(&["list", "-o", "text"])?, control.done(&["list"])?);
    for (arguments, wanted) in [
        (&["list", "--project", "default", "--sort", "name"][..], "db web"),
        (&["show", "web"], "web"),
        (&["nodes"], "host"),
        (&["web"], "web"),
        (&["stop", "web", "db"], "web db"),
        (&["stop", &web.to_string()], "web"),
    ] {
        assert_eq!(names(&control, arguments)?, wanted, "{arguments:?}");
    }
    let made = control.done(&["-o", "name", "--name", "mail", TINY])?;
    assert_eq!(made, "mail\n");
    let made: InstanceId = control.done(&["-o", "name", TINY])?.trim().parse()?;
    assert!(control.request(node, made).await?.is_some(), "one without a name is told by its uuid");
    let yaml = control.done(&["-o", "yaml", TINY])?;
    ensure!(yaml.contains("state: SCHEDULED\n") && yaml.contains("ip: null\n"), "{yaml}");
    // A destroyed one is told by the name that it had.
    assert_eq!(names(&control, &["destroy", "mail"])?, "mail");
    let refused = control.eschedule(&["-o", "name", "resources=VCPU:9999,MEMORY_MB:1"])?;
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0), "{refused:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_printed_for_scripts_means_what_it_stands_for_and_nothing_else() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    control.node("twin", false, PLENTY).await?;
    let (_, own) = control.schedule(&["--name", "web", TINY])?;
    control.configure("project: other")?;
    let (_, others) = control.schedule(&["--name", "web", TINY])?;
    control.done(&["volume", "create", "data", "--size", "1"])?;
    control.configure("")?;
    control.status(node, own, State::Active, Some("10.0.0.7")).await?;
    control.status(node, others, State::Error, None).await?;
    // Another project's has the same name, which means one's own.
    assert_eq!(names(&control, &["list", "--state", "ERROR"])?, others.to_string());
    assert_eq!(names(&control, &["show", &others.to_string()])?, others.to_string());
    assert_eq!(names(&control, &["lock", &others.to_string()])?, others.to_string());
    control.done(&["unlock", &others.to_string()])?;
    let volume = names(&control, &["volume", "list"])?;
    ensure!(volume.parse::<InstanceId>().is_ok(), "{volume}");
    assert_eq!(names(&control, &["volume", "show", &volume])?, volume);
    control.done(&["volume", "create", "data", "--size", "1"])?;
    ensure!(names(&control, &["volume", "list"])?.split(' ').any(|name| name == "data"));
    // A name is free with the wish to destroy, and then another's; one that etcd lost bears none.
    assert_eq!(names(&control, &["destroy", "web"])?, "web");
    let (_, again) = control.schedule(&["--name", "WEB", TINY])?;
    assert_eq!(names(&control, &["list", "--state", "DESTROYING"])?, own.to_string());
    assert_eq!(names(&control, &["list", "--project", "default", "--state", "SCHEDULED"])?, "WEB");
    control.delete(control.keys.instance(again)).await?;
    for key in control.store_keys("names/default/").await? {
        control.delete(key).await?;
    }
    assert_eq!(names(&control, &["list", "--state", "SCHEDULED"])?, again.to_string());
    // Of nodes, too.
    assert_eq!(names(&control, &["nodes"])?, "host");
    let twin = NodeId::new(uuid::Uuid::new_v4());
    control.come_alive(twin, "host").await?;
    let mut both = [node.to_string(), twin.to_string()];
    both.sort();
    let nodes = names(&control, &["nodes"])?;
    let mut told: Vec<&str> = nodes.split(' ').collect();
    told.sort_unstable();
    assert_eq!(told, both);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn uuids_are_understood_by_their_beginnings_whatever_is_left_of_what_they_mean() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, own) = control.schedule(&["--name", "web", TINY])?;
    control.done(&["destroy", "web"])?;
    assert!(control.record(own).await?.is_none());
    let unclaimed = InstanceId::new(uuid::Uuid::new_v4());
    control.status(node, unclaimed, State::Unclaimed, Some("10.0.0.9")).await?;
    for instance in [own, unclaimed] {
        let begins = &instance.to_string().to_uppercase()[..9];
        assert_eq!(json_of(&control, &["show", begins])?["instance"], instance.to_string());
    }
    control.done(&["destroy", &unclaimed.to_string()[..8]])?;
    // What begins alike is not meant, whichever of the two was asked for.
    let like: InstanceId = format!("{}{}", &own.to_string()[..24], "0123456789ab").parse()?;
    control.status(node, like, State::Unclaimed, None).await?;
    let output = control.eschedule(&["show", &own.to_string()[..8]])?;
    ensure!(output.status.code() == Some(2) && error(&output).contains("several instances"), "{output:?}");
    for begins in [&node.to_string()[..4], &node.to_string().to_uppercase()[..13]] {
        assert_eq!(listed(&control, &["--node", begins, "--state", "DESTROYING"])?, "web");
    }
    // Where no query can be, none is spoken of.
    for (arguments, speaks) in [(&["stop", "nobody"][..], false), (&["nobody"], true)] {
        let text = error(&control.eschedule(arguments)?);
        ensure!(text.contains("is named `nobody`, ") && text.contains("no uuid is or begins so"), "{text}");
        assert_eq!(text.contains("resources query"), speaks, "{text}");
    }
    // What was destroyed is told of by its uuid.
    let text = error(&control.eschedule(&["events", "web"])?);
    ensure!(text.contains("one that was destroyed is told of for a day, by its uuid"), "{text}");
    assert!(control.done(&["events", &own.to_string()])?.contains("delete"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn several_are_shown_and_acted_upon_together() -> Result<()> {
    let control = Control::start().await?;
    let (node, [web, db, _]) = three(&control).await?;
    let both = json_of(&control, &["show", "web", "db"])?;
    assert_eq!((&both[0]["instance"], &both[1]["instance"]), (&json!(web), &json!(db)));
    ensure!(both[0]["record"]["name"] == "web" && both[1]["status"]["state"] == "ERROR", "{both}");
    assert_eq!(json_of(&control, &["show", "web"])?["instance"], json!(web));
    assert_eq!(json_of(&control, &["show", "--label", "role=db"])?[0]["instance"], json!(db));
    let text = control.done(&["show", "web", "db"])?;
    assert_eq!(text.matches("\n\ninstance ").count(), 1, "{text}");
    let some = control.eschedule(&["show", "nobody", "db", "-o", "json"])?;
    let told: Value = serde_json::from_slice(&some.stdout)?;
    ensure!(some.status.code() == Some(1) && told[0]["asked"] == "nobody", "{some:?}");
    ensure!(told[0]["error"].is_string() && told[1]["name"] == "db", "{told}");

    control.status(node, db, State::Active, Some("10.0.0.8")).await?;
    let rescued = json_of(&control, &["rescue", "web", "db", "--image", "file:///mend"])?;
    ensure!(rescued[0]["state"] == "RESCUING" && rescued[1]["state"] == "RESCUING", "{rescued}");
    control.done(&["unrescue", "web", "db"])?;
    let rebuilt = json_of(&control, &["rebuild", "--image", "file:///new", "web", "db"])?;
    ensure!(rebuilt[0]["state"] == "REBUILDING" && rebuilt[1]["state"] == "REBUILDING", "{rebuilt}");
    let refused = |arguments: &[&str], code, wanted: &str| -> Result<()> {
        let output = control.eschedule(arguments)?;
        let text = error(&output);
        ensure!(output.status.code() == Some(code) && text.contains(wanted), "{arguments:?}: {output:?}");
        Ok(())
    };
    let image = async |instance| {
        let record = control.record(instance).await?;
        Ok::<_, anyhow::Error>(record.map(|record| record.spec.image.url).unwrap_or_default())
    };
    let rebuilt = json_of(&control, &["rebuild", "--image", "file:///newer", "--label", "role=web"])?;
    assert_eq!(
        (rebuilt.as_array().map(Vec::len), &rebuilt[0]["instance"]),
        (Some(1), &json!(web)),
        "{rebuilt}"
    );
    assert_eq!((image(web).await?, image(db).await?), ("file:///newer".into(), "file:///new".into()));
    // Without an image each has that which its disk is of.
    let both = json_of(&control, &["rebuild", "--label", "role"])?;
    assert_eq!(both.as_array().map(Vec::len), Some(2), "{both}");
    assert_eq!((image(web).await?, image(db).await?), ("file:///nowhere".into(), "file:///nowhere".into()));
    let before = control.request(node, web).await?;
    refused(&["rebuild", "--label", "role=none", "--image", "file:///x"], 1, "nothing was done")?;
    refused(&["rebuild", "web", "--label", "role"], 2, "cannot be used with")?;
    refused(&["rebuild"], 2, "required")?;
    refused(&["rebuild", "web", "db"], 2, "`db` is an instance and no image")?;
    refused(&["rebuild", "web", "db", "x"], 2, "say `--image IMAGE`")?;
    refused(&["rebuild", "web", "--sha256", &"0".repeat(64)], 2, "goes with an image")?;
    refused(&["resize", "web"], 2, "wanted how large")?;
    refused(&["resize", TINY], 2, "wanted who")?;
    refused(&["resize", "web", "--label", "role", "--flavor", "x"], 2, "cannot be used with")?;
    refused(&["resize", "web", "--label", "role", TINY], 2, "cannot be used with")?;
    refused(&["resize", "web", TINY, "--confirm"], 2, "is a query")?;
    refused(&["resize", "web", "--flavor", "x", "--revert"], 2, "cannot be used with")?;
    refused(&["resize", "--confirm", "web", "db"], 1, "there is no resize of it")?;
    refused(&["resize", "--revert", "--label", "role"], 1, "there is no resize of it")?;
    assert_eq!(control.request(node, web).await?, before);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn several_are_given_another_size_and_each_the_disk_that_it_can_have() -> Result<()> {
    const DISKLESS: &str = "resources=VCPU:1,MEMORY_MB:128";
    let control = Control::start().await?;
    let (node, [web, db, _]) = three(&control).await?;
    control.status(node, db, State::Active, Some("10.0.0.8")).await?;
    let root = json_of(&control, &["volume", "create", "root", "--size", "1", "--image", "file:///old"])?;
    let root: InstanceId = serde_json::from_value(root["volume"].clone())?;
    control.status(node, root, State::Active, None).await?;
    let boots = ["run", "boots", "--query", DISKLESS, "--boot-volume", "root", "--label", "role=boots"];
    let boots: InstanceId = serde_json::from_value(json_of(&control, &boots)?["instance"].clone())?;
    control.status(node, boots, State::Active, Some("10.0.0.9")).await?;
    let query = async |instance| {
        Ok::<_, anyhow::Error>(control.record(instance).await?.map(|it| it.spec.query).unwrap_or_default())
    };

    let more = "resources=VCPU:1,MEMORY_MB:256,DISK_GB:1";
    let resized = json_of(&control, &["resize", "web", "db", more])?;
    ensure!(resized[0]["state"] == "RESIZING" && resized[1]["state"] == "RESIZING", "{resized}");
    assert_eq!((query(web).await?, query(db).await?), (more.into(), more.into()));

    for instance in ["web", "db"] {
        control.done(&["destroy", instance])?;
    }
    let (_, old) = control.schedule(&["--name", "old", "--label", "tier=a", TINY])?;
    control.status(node, old, State::Active, None).await?;
    control.done(&["set", "boots", "--label", "tier=b"])?;
    control.done(&["flavor", "create", "large", "resources=VCPU:2,MEMORY_MB:512,DISK_GB:2"])?;
    let resized = json_of(&control, &["resize", "--label", "tier", "--flavor", "large"])?;
    assert_eq!(resized.as_array().map(Vec::len), Some(2), "{resized}");
    assert_eq!(query(old).await?, "resources=VCPU:2,MEMORY_MB:512,DISK_GB:2");
    assert_eq!(query(boots).await?, "resources=VCPU:2,MEMORY_MB:512");
    // Each answers for itself.
    let some = control.eschedule(&["resize", "nobody", "boots", DISKLESS, "-o", "json"])?;
    let told: Value = serde_json::from_slice(&some.stdout)?;
    ensure!(some.status.code() == Some(1) && told[0]["asked"] == "nobody", "{some:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_set_waits_for_who_acts_by_it_and_is_told_where_nobody_does() -> Result<()> {
    let control = Control::start().await?;
    let (node, [web, ..]) = three(&control).await?;
    let waits = control.eschedule(&["set", "web", "--meta", "a=b", "--wait", "--timeout", "1"])?;
    ensure!(waits.status.code() == Some(1) && error(&waits).contains("not done after 1 s"), "{waits:?}");
    let arguments = ["set", "web", "--meta", "a=b", "--wait", "--timeout", "1", "-o", "json"];
    let waits: Value = serde_json::from_slice(&control.eschedule(&arguments)?.stdout)?;
    assert_eq!((&waits["node"], &waits["node_alive"]), (&node.to_string().into(), &true.into()), "{waits}");
    let generation = control.request(node, web).await?.map_or(0, |request| request.generation);
    let key = control.keys.status(node, web);
    let mut status: Value =
        serde_json::from_slice(&control.get(&key).await?.map(|pair| pair.value).unwrap_or_default())?;
    status["observed_generation"] = (generation + 1).into();
    control.put(key, status.to_string()).await?;
    let set = control.done(&["unset", "web", "--meta", "a", "--wait", "--timeout", "20"])?;
    assert_eq!(set, format!("ACTIVE INSTANCE {web} ON {node}\n"));
    control.delete(control.keys.alive(node)).await?;
    for (arguments, tells) in [
        (&["set", "web", "--meta", "a=b"][..], true),
        (&["set", "web", "--restart", "always"], true),
        (&["set", "web", "--label", "a=b"], false),
    ] {
        let output = control.eschedule(arguments)?;
        assert!(output.status.success(), "{output:?}");
        assert_eq!(error(&output).contains("is not alive"), tells, "{arguments:?}: {output:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ssh_is_run_as_its_users_expect_and_remembers_each_disks_key() -> Result<()> {
    let control = Control::start().await?;
    let (node, [web, ..]) = three(&control).await?;
    let key = control.keys.status(node, web);
    let text = control.get(&key).await?.map(|pair| pair.value).unwrap_or_default();
    let started: Value = serde_json::from_slice(&text)?;
    let own = tempfile::tempdir()?;
    let program = own.path().join("ssh");
    std::fs::write(&program, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n")?;
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let ssh = async |came: Value, arguments: &[&str]| -> Result<Vec<String>> {
        let mut status = started.clone();
        status["started_at"] = "2026-01-01T00:00:00Z".into();
        for (field, value) in came.as_object().into_iter().flatten() {
            status[field] = value.clone();
        }
        control.put(key.clone(), status.to_string()).await?;
        let mut command = control.command(&[&["ssh"], arguments].concat());
        command.env("PATH", format!("{}:/usr/bin:/bin", own.path().display())).env("HOME", own.path());
        let output = command.output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
    };
    let plain = ssh(json!({}), &["web"]).await?;
    assert_eq!(plain[1], format!("HostKeyAlias={web}"));
    assert_eq!(plain[4..], ["-l", "root", "10.0.0.7"]);
    for (arguments, rest) in [
        (&["me@web", "uptime", "-p"][..], &["-l", "me", "10.0.0.7", "--", "uptime", "-p"][..]),
        (&["web", "--user", "me", "--", "ls", "-l"], &["-l", "me", "10.0.0.7", "--", "ls", "-l"]),
        (
            &["-l", "me", "web", "ls", "-o", "json", "--help"],
            &["-l", "me", "10.0.0.7", "--", "ls", "-o", "json", "--help"],
        ),
    ] {
        assert_eq!(ssh(json!({}), arguments).await?[4..], *rest, "{arguments:?}");
    }
    let rebuilt = json!({"wished_at": "2026-01-01T00:00:01Z"});
    let told = ssh(json!({"rebuilt": rebuilt}), &["web"]).await?;
    assert_eq!(told[1], format!("HostKeyAlias={web}-rebuilt-1767225601000"));
    let told = ssh(json!({"rebuilt": rebuilt, "rescued": rebuilt, "state": "RESCUED"}), &["web"]).await?;
    assert_eq!(told[1], format!("HostKeyAlias={web}-rescue-1767225601000"));
    for (arguments, wanted) in
        [(&["ssh", "me@web", "--user", "you"][..], "two users"), (&["ssh", "@web"], "wanted who logs in")]
    {
        let output = control.eschedule(arguments)?;
        ensure!(output.status.code() == Some(2) && error(&output).contains(wanted), "{output:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_is_narrowed_ordered_and_paged() -> Result<()> {
    let control = Control::start().await?;
    let (node, [web, db, shop]) = three(&control).await?;
    let node = node.to_string();
    for (arguments, wanted) in [
        (&["--sort", "name"][..], "db shop web"),
        (&["--sort", "created"], "web db shop"),
        (&["--sort", "ip"], "db shop web"),
        (&["--state", "active"], "web"),
        (&["--state", "ERROR,SCHEDULED", "--sort", "state"], "db shop"),
        (&["--label", "role=web", "--sort", "name"], "shop web"),
        (&["--label", "role", "--label", "tier=front"], "web"),
        (&["--label", "role=x"], ""),
        (&["--project", "other"], "shop"),
        (&["--project", "default", "--sort", "created"], "web db"),
        (&["--node", "host", "--sort", "created"], "web db shop"),
        (&["--node", &node, "--state", "ERROR"], "db"),
    ] {
        assert_eq!(listed(&control, arguments)?, wanted, "{arguments:?}");
    }
    // Pages, by what each says of the next.
    let first = control.eschedule(&["list", "--sort", "name", "--limit", "2", "-o", "name"])?;
    assert_eq!(String::from_utf8(first.stdout.clone())?, format!("db\n{shop}\n"));
    let told = error(&first);
    ensure!(told.lines().count() == 1 && told.contains("1 more follow: `--after "), "{told}");
    let after = told.split("--after ").nth(1).and_then(|rest| rest.split('`').next()).unwrap_or_default();
    let rest =
        control.eschedule(&["list", "--sort", "name", "--after", after, "--limit", "2", "-o", "name"])?;
    assert_eq!((rest.stdout.as_slice(), error(&rest).as_str()), (&b"web\n"[..], ""));
    assert_eq!(listed(&control, &["--sort", "name", "--after", "db"])?, "shop web");
    for (arguments, code, wanted) in [
        (&["--after", "nobody"][..], 1, "nobody"),
        (&["--after", &uuid::Uuid::new_v4().to_string()], 1, "not in the list any more"),
        (&["--node", "nowhere"], 1, "no node is named `nowhere`"),
        (&["--state", "dead"], 2, "ACTIVE"),
        (&["--limit", "0"], 2, "0"),
        (&["--label", "a b"], 2, "wanted a key"),
        (&["--sort", "colour"], 2, "colour"),
    ] {
        let output = control.eschedule(&[&["list"], arguments].concat())?;
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        ensure!(error(&output).contains(wanted) && output.stdout.is_empty(), "{arguments:?}: {output:?}");
    }
    // What cannot be read hides no other and has no labels.
    control.put(control.keys.instance(web), "garbage").await?;
    assert_eq!(names(&control, &["list", "--label", "role", "--project", "default"])?, "db");
    control.put(control.keys.request(node.parse()?, db), "garbage").await?;
    assert_eq!(json_of(&control, &["list", "--state", "unknown"])?[0]["instance"], db.to_string());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_by_label_is_done_to_the_projects_own_and_to_nobody_where_nothing_has_it() -> Result<()>
{
    let control = Control::start().await?;
    let (node, [web, db, shop]) = three(&control).await?;
    control.status(node, db, State::Active, Some("10.0.0.8")).await?;
    control.status(node, shop, State::Active, Some("10.0.0.9")).await?;
    let power = async |instance| {
        Ok::<_, anyhow::Error>(control.request(node, instance).await?.map(|request| request.power.power))
    };
    let output = control.done(&["stop", "--label", "role=web"])?;
    assert_eq!(output, format!("STOPPING INSTANCE {web} ON {node}\n"));
    assert_eq!(power(web).await?, Some(Power::Stopped));
    assert_eq!(power(db).await?, Some(Power::Running));
    assert_eq!(power(shop).await?, Some(Power::Running), "another project's is not meant");
    let acted = json_of(&control, &["lock", "--label", "role"])?;
    assert_eq!(acted.as_array().map(Vec::len), Some(2), "{acted}");
    control.done(&["unlock", "--label", "role"])?;
    for arguments in
        [&["stop", "--label", "role=mail"][..], &["destroy", "--label", "role=web", "--label", "tier=x"]]
    {
        let output = control.eschedule(arguments)?;
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
        let text = error(&output);
        ensure!(text.lines().count() == 1 && text.contains("nothing was done"), "{text}");
    }
    for arguments in [&["stop"][..], &["stop", "web", "--label", "role"], &["stop", "--label", "=x"]] {
        assert_eq!(control.eschedule(arguments)?.status.code(), Some(2), "{arguments:?}");
    }
    // Where a label is what is set, another word selects.
    control.done(&["set", "--select", "role=db", "--label", "role=web"])?;
    assert_eq!(
        control.eschedule(&["set", "db", "--select", "role", "--label", "a=b"])?.status.code(),
        Some(2)
    );
    assert_eq!(control.eschedule(&["set", "--label", "a=b"])?.status.code(), Some(2));
    assert_eq!(control.eschedule(&["set", "--select", "role=db", "--label", "a=b"])?.status.code(), Some(1));
    control.done(&["set", "--select", "role=web", "--label", "a=b"])?;
    assert_eq!(listed(&control, &["--label", "a=b", "--sort", "name"])?, "db web");
    control.done(&["unset", "--select", "a=b", "--label", "a"])?;
    assert_eq!(listed(&control, &["--label", "a"])?, "");
    assert_eq!(names(&control, &["destroy", "--label", "role=web"])?.split(' ').count(), 2);
    assert_eq!(listed(&control, &["--state", "DESTROYING", "--sort", "name"])?, "db web");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_failed_has_its_entry_among_what_was_done() -> Result<()> {
    let control = Control::start().await?;
    let (_, [web, db, _]) = three(&control).await?;
    let acted = |arguments: &[&str]| {
        let output = control.eschedule(&[arguments, &["-o", "json"]].concat())?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        Ok::<Value, anyhow::Error>(serde_json::from_slice(&output.stdout)?)
    };
    control.done(&["lock", "db", "--reason", "mine"])?;
    let all = acted(&["stop", "web", "nobody", "db"])?;
    assert_eq!(all.as_array().map(Vec::len), Some(3), "{all}");
    assert_eq!((&all[0]["instance"], &all[0]["state"]), (&json!(web), &json!("STOPPING")));
    ensure!(all[0].get("error").is_none() && all[0].get("asked").is_none(), "{all}");
    assert_eq!((&all[1]["asked"], &all[1]["instance"]), (&json!("nobody"), &Value::Null));
    ensure!(all[1]["error"].as_str().is_some_and(|why| why.contains("nobody")), "{all}");
    assert_eq!(
        (&all[2]["asked"], &all[2]["instance"], &all[2]["state"]),
        (&json!("db"), &json!(db), &Value::Null)
    );
    ensure!(all[2]["error"].as_str().is_some_and(|why| why.contains("locked (mine)")), "{all}");
    // One that was named is no list, and the names of what was done are no others.
    let one = acted(&["destroy", "db"])?;
    ensure!(one["error"].as_str().is_some_and(|why| why.contains("locked")), "{one}");
    let output = control.eschedule(&["lock", "nobody", "web", "-o", "name"])?;
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b"web\n"[..]));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_gets_what_fits_it_with_colours_and_a_file_gets_everything() -> Result<()> {
    let control = Control::start().await?;
    let (node, [_, db, _]) = three(&control).await?;
    let key = control.keys.status(node, db);
    let value = control.get(&key).await?.map(|pair| pair.value).unwrap_or_default();
    let mut status: Value = serde_json::from_slice(&value)?;
    status["reason"] = "word ".repeat(60).into();
    control.put(key, status.to_string()).await?;
    // util-linux' script gives the command a terminal.
    let on_terminal = |columns: usize, more: &str| -> Result<String> {
        let program = control.command(&[]).get_program().to_string_lossy().into_owned();
        let config = control.directory().join("schedule.yaml");
        let line =
            format!("stty cols {columns} rows 40; {more} {program} --config {} list", config.display());
        let output = Command::new("script").args(["-qec", &line, "/dev/null"]).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let coloured = on_terminal(120, "")?;
    ensure!(
        coloured.contains("\u{1b}[38;5;9mERROR") && coloured.contains("\u{1b}[38;5;10mACTIVE"),
        "{coloured:?}"
    );
    for none in ["NO_COLOR=1", "NO_COLOR=yes"] {
        let text = on_terminal(120, none)?;
        ensure!(!text.contains('\u{1b}'), "{text:?}");
        assert_eq!(text.lines().count(), 4, "{text}");
        ensure!(text.lines().all(|line| line.chars().count() <= 120) && text.contains('…'), "{text}");
        ensure!(text.contains(&db.to_string()[..8]), "what instances are told apart by is there: {text}");
    }
    for columns in [60, 40, 20] {
        let text = on_terminal(columns, "NO_COLOR=1")?;
        assert_eq!(text.lines().count(), 4, "{text}");
        ensure!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
        ensure!(text.contains(&db.to_string()[..8]) && text.contains("shop"), "{text}");
    }
    let text = control.done(&["list"])?;
    ensure!(text.contains(&"word ".repeat(59)) && !text.contains(['…', '\u{1b}']), "{text}");
    Ok(())
}

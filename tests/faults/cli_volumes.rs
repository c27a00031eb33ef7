//! Volumes at the command line: what is refused, and who gets a volume that many want.

use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use ec_model::{Attachment, InstanceId, NodeId, State};
use ec_tests::{TINY, control::Control};
use serde_json::Value;

const SOME: &[(&str, u64)] = &[("VCPU", 64), ("MEMORY_MB", 1 << 16), ("DISK_GB", 20)];

const DIGEST: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

fn json(control: &Control, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&control.done(&[&["volume"], arguments, &["-o", "json"]].concat())?)?)
}

fn id(view: &Value) -> Result<InstanceId> {
    Ok(view["volume"].as_str().context("it has a uuid")?.parse()?)
}

/// It is refused with that code, and says this.
fn refused(control: &Control, arguments: &[&str], code: i32, wanted: &str) -> Result<()> {
    let output = control.eschedule(&[&["volume"], arguments].concat())?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(code) && text.contains(wanted), "{arguments:?}: {output:?}");
    ensure!(!text.contains("panicked"), "{text}");
    Ok(())
}

async fn made(control: &Control, node: NodeId, arguments: &[&str]) -> Result<InstanceId> {
    let volume = id(&json(control, &[&["create"], arguments].concat())?)?;
    control.status(node, volume, State::Active, None).await?;
    Ok(volume)
}

async fn runs(control: &Control, node: NodeId, name: &str) -> Result<InstanceId> {
    let (_, instance) = control.schedule(&[TINY, "--name", name, "--node", &node.to_string()])?;
    control.status(node, instance, State::Active, Some("10.0.0.1")).await?;
    Ok(instance)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_and_changes_nothing() -> Result<()> {
    let control = Control::start().await?;
    let [here, there] = [control.node("h1", true, SOME).await?, control.node("h2", true, SOME).await?];
    let data = made(&control, here, &["data", "--size", "5", "--node", "h1"]).await?;
    let (web, far) = (runs(&control, here, "web").await?, runs(&control, there, "far").await?);
    let held = control.placement.allocations(data).await?.context("it is claimed")?;
    assert_eq!(held.total().get("DISK_GB"), Some(&5));

    for (arguments, code, wanted) in [
        (&["create", "x", "--size", "0"][..], 2, "too few"),
        (&["create", "x", "--size", "-1"], 2, "invalid value"),
        (&["create", "x", "--size", "5G"], 2, "invalid value"),
        (&["create", "x"], 2, "--size"),
        (&["create", "a b", "--size", "1"], 2, "cannot be a volume's name"),
        (&["create", "Data", "--size", "1"], 1, "the name `Data` is taken"),
        (&["create", "x", "--size", "21"], 1, "short by"),
        (&["create", "x", "--size", "99999999999"], 1, "no allocations left"),
        (&["create", "x", "--size", "1", "--image", "none-such"], 1, "there is no image `none-such`"),
        (&["create", "x", "--size", "1", "--node", "h9"], 1, "no node is named"),
        (&["create", "x", "--size", "1", "--for", "none"], 1, "no instance of project"),
        (&["create", "x", "--copy-of", "data", "--size", "4"], 2, "which has 5"),
        (&["create", "x", "--copy-of", "data", "--node", "h2"], 1, "is copied there only"),
        (&["create", "x", "--copy-of", "web"], 1, "no volume of project"),
        (&["create", "x", "--copy-of", ""], 2, "a value is required"),
        (&["create", "x", "--image", "volume:"], 2, "names nothing"),
        (&["create", "x", "--image", "volume:web"], 1, "no volume of project"),
        (&["create", "x", "--image", "instance:data"], 1, "no instance of project"),
        (&["create", "x", "--image", "instance:web", "--node", "h2"], 1, "is copied there only"),
        (&["create", "x", "--image", "instance:web", "--size", "0"], 2, "too few"),
        (&["create", "x", "--copy-of", "data", "--image", "file:///x"], 2, "cannot be used with"),
        (&["create", "x", "--size", "1", "--sha256", DIGEST], 2, "required arguments"),
        (
            &["create", "x", "--size", "1", "--image", "file:///x", "--sha256", "ab"],
            2,
            "`ab` is not a SHA-256",
        ),
        (&["create", "x", "--image", "volume:data", "--sha256", DIGEST], 2, "--sha256 goes with an image"),
        (&["restore", "data", "volume:data", "--sha256", DIGEST], 2, "--sha256 goes with an image"),
        (&["restore", "data", "file:///x", "--sha256", "ab"], 2, "`ab` is not a SHA-256"),
        (&["show", "web"], 1, "no volume of project"),
        (&["show", &web.to_string()], 1, "is an instance and no volume"),
        (&["attach", "data", "none"], 1, "no instance of project"),
        (&["attach", "data", "far"], 1, "lies on the storage of node"),
        (&["attach", "data", &data.to_string()], 1, "is a volume"),
        (&["attach", "data", "web", "--device", "sda"], 1, "no device that a volume can be"),
        (&["attach", &web.to_string(), "web"], 1, "no volume"),
        (&["restore", "data", "data"], 1, "or a disk to copy (volume:NAME"),
        (&["restore", "data", "volume:data"], 1, "it is what it would be made of"),
        (&["extend", "data", "4"], 1, "never shrinks"),
        (&["extend", "data", "30"], 1, "short by"),
        (&["delete", &data.to_string()[..4]], 1, "would be lost"),
        (&["restore", &data.to_string()[..7], "volume:none"], 1, "would be lost"),
        (&["delete", "none"], 1, "no volume of project"),
    ] {
        refused(&control, arguments, code, wanted)?;
    }
    let on_h2 =
        ["run", "x", "--query", "resources=VCPU:1,MEMORY_MB:128", "--image", "volume:data", "--node", "h2"];
    for (arguments, code, wanted) in [
        (&on_h2[..], 1, "is copied there only"),
        (&["rebuild", "far", "volume:data"], 1, "is copied there only"),
        (&["rebuild", "web", "volume:none"], 1, "no volume of project"),
        (&["rescue", "web", "--image", "volume:data"], 1, "name one with `--image`"),
        // Its uuid may be all that somebody has of a volume.
        (&["explain", &data.to_string()], 1, "`eschedule volume show"),
        (&[&data.to_string()], 1, "`eschedule volume show"),
        (&["list", "--after", &data.to_string()], 1, "`eschedule volume show"),
        (&["set", &data.to_string(), "--meta", "a=b"], 1, "it is a volume"),
        (&["snapshot", "create", &data.to_string(), "x"], 1, "`eschedule volume snapshot`"),
        (&[TINY, "volume:data"], 2, "which has 5"),
    ] {
        let output = control.eschedule(arguments)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code) && text.contains(wanted), "{arguments:?}: {output:?}");
    }
    let shown = control.done(&["show", &data.to_string()])?;
    ensure!(shown.starts_with("volume "), "it is shown as what it is: {shown}");
    assert_eq!(control.count("volume-names/").await?, 1);
    assert_eq!(control.count("instances/").await?, 3);
    let held = control.placement.allocations(data).await?.context("it is claimed")?;
    assert_eq!(held.total().get("DISK_GB"), Some(&5));
    assert!(control.eschedule(&["volume", "extend", "data", "5"])?.status.success(), "it has that");
    assert!(
        control.eschedule(&["volume", "extend", "data", "--size", "5"])?.status.success(),
        "as people type it"
    );
    refused(&control, &["extend", "data"], 2, "<GB>")?;
    refused(&control, &["extend", "data", "5", "--size", "6"], 2, "cannot be used with")?;
    assert!(control.eschedule(&["volume", "detach", "data"])?.status.success(), "nobody has it");
    assert_eq!(control.record(far).await?.context("it is there")?.generation, 1);

    // A copy that nobody said the size of has no room where it has to lie: it is told of which size.
    made(&control, here, &["fill", "--size", "12", "--node", "h1"]).await?;
    refused(&control, &["clone", "data", "copy"], 1, "short by")?;
    // Named twice it is deleted once.
    assert_eq!(control.done(&["volume", "delete", "fill", "fill"])?, "DELETING VOLUME fill\n");

    // What has to have a digest is asked for with it, and so is what it is made anew of.
    let of = ["--image", "https://images.example/x.qcow2", "--sha256", &DIGEST.to_uppercase()];
    let whole = made(&control, there, &[&["whole", "--size", "1", "--node", "h2"], &of[..]].concat()).await?;
    let demanded =
        async |volume| anyhow::Ok(control.record(volume).await?.context("a record")?.spec.image.sha256);
    assert_eq!(demanded(whole).await?.as_deref(), Some(DIGEST));
    let other = "b".repeat(64);
    json(&control, &["restore", "whole", "https://images.example/y.qcow2", "--sha256", &other])?;
    assert_eq!(demanded(whole).await?, Some(other));

    // A name is one volume's, and an instance may have it, too.
    runs(&control, here, "data").await?;
    control.done(&["rename", &data.to_string(), "old"])?;
    assert_eq!(json(&control, &["rename", "old", "kept"])?["name"], "kept");
    assert_eq!(json(&control, &["show", "kept"])?["name"], "kept");
    let set = json(&control, &["set", "kept", "--label", "a=b", "--label", "c=d"])?;
    assert_eq!(set["labels"], serde_json::json!({"a": "b", "c": "d"}));
    let set = json(&control, &["set", "kept", "--unset", "a"])?;
    assert_eq!(set["labels"], serde_json::json!({"c": "d"}));
    refused(&control, &["set", "kept"], 2, "--label")?;
    refused(&control, &["set", "kept", "--label", "a=b", "--unset", "a"], 2, "both set and taken off")?;
    refused(&control, &["rename", "kept", "a b"], 2, "cannot be a volume's name")?;
    refused(&control, &["set", &web.to_string(), "--label", "a=b"], 1, "is an instance and no volume")?;
    // It is taken from who is named, or from nobody.
    control.done(&["volume", "attach", "kept", "web"])?;
    refused(&control, &["detach", "kept", "far"], 1, "nobody asked for it to be taken from there")?;
    control.done(&["volume", "detach", "kept", "web"])?;
    refused(&control, &["show", "data"], 1, "no volume of project")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_copied_of_an_instance_is_told_among_what_was_done_to_it() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("h1", true, SOME).await?;
    let web = runs(&control, node, "web").await?;
    let snap = ["snapshot", "create", "web", "before", "-o", "json"];
    let snap: Value = serde_json::from_str(&control.done(&snap)?)?;
    control.done(&["volume", "create", "copy", "--image", "instance:web"])?;
    control.done(&["run", "web2", "--query", TINY, "--image", "instance:web"])?;
    // Of a copy of a copy its first owner is not told.
    control.status(node, id(&snap)?, State::Active, None).await?;
    control.done(&["volume", "clone", "before", "again"])?;
    let told: Value = serde_json::from_str(&control.done(&["events", "web", "-o", "json"])?)?;
    let copies = told.as_array().into_iter().flatten().filter(|it| it["verb"] == "createImage");
    let copies: Vec<_> = copies.map(|it| (it["detail"].as_str(), it["outcome"].as_str())).collect();
    let done = |detail| (Some(detail), Some("done"));
    let wanted = ["snapshot before", "volume copy", "instance web2"].map(done);
    assert_eq!(copies, wanted, "{told}");
    assert_eq!(told[1]["request_id"], snap["request_id"], "{told}");
    // It goes with what else was done to it.
    control.done(&["destroy", "web"])?;
    let kept = control.get(&control.keys.actions(web)).await?.context("for a day")?;
    ensure!(kept.lease.is_some(), "it goes by itself");
    Ok(())
}

/// It is counted, however it is asked for, looked at before, or compared with a file.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_without_a_size_is_claimed_as_large_as_what_it_copies() -> Result<()> {
    const ROOM: &str = "resources=VCPU:1,MEMORY_MB:128";
    let control = Control::start().await?;
    let node = control.node("h1", true, SOME).await?;
    let data = made(&control, node, &["data", "--size", "5"]).await?;
    let asks = ["run", "web", "--query", ROOM, "--image", "volume:data"];
    let told = |arguments: &[&str]| -> Result<Value> {
        Ok(serde_json::from_str(&control.done(&[arguments, &["-o", "json"]].concat())?)?)
    };
    let preview = told(&[&asks[..], &["--dry-run"]].concat())?;
    assert_eq!(preview["resources"]["DISK_GB"]["wanted"], 5, "{preview}");
    let web: InstanceId = told(&asks)?["instance"].as_str().context("it has a uuid")?.parse()?;
    control.status(node, web, State::Active, None).await?;
    let held = control.placement.allocations(web).await?.context("it is claimed")?;
    assert_eq!(held.total().get("DISK_GB"), Some(&5));
    let more = told(&["explain", "web"])?;
    assert_eq!(more["resources"]["DISK_GB"]["wanted"], 5, "{more}");
    control.done(&["set", "web", "--label", "stack=shop"])?;
    let file = control.directory().join("shop.yaml");
    let entry = |name: &str| format!("  {name}: {{query: \"{ROOM}\", image: \"volume:data\"}}\n");
    std::fs::write(&file, format!("stack: shop\ninstances:\n{}", entry("web")))?;
    let file = file.display().to_string();
    control.done(&["apply", "-f", &file, "--diff"])?;
    // Nor does a disk become a copy of which nothing is claimed.
    let (_, plain) = control.schedule(&[ROOM, "--name", "plain"])?;
    control.status(node, plain, State::Active, Some("10.0.0.1")).await?;
    let output = control.eschedule(&["rebuild", "plain", "volume:data"])?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(text.contains(&format!("`eschedule resize {plain}` gives it DISK_GB:5 first")), "{text}");
    let output = control.eschedule(&["run", "x", "--query", ROOM, "--image", "instance:plain"])?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(2) && text.contains("no record tells how large instance"), "{text}");
    let held = control.placement.allocations(data).await?.context("it is claimed")?;
    assert_eq!(held.total().get("DISK_GB"), Some(&5));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_a_volume_stays_as_it_was_made_and_is_what_it_is_restored_from() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("h1", true, SOME).await?;
    let data = made(&control, node, &["data", "--size", "2"]).await?;
    runs(&control, node, "web").await?;
    let snap = id(&json(&control, &["snapshot", "data", "before"])?)?;
    control.status(node, snap, State::Active, None).await?;
    let shown: Value = serde_json::from_str(&control.done(&["snapshot", "show", "before", "-o", "json"])?)?;
    assert_eq!((&shown["snapshot"], &shown["size_gb"]), (&true.into(), &2.into()), "{shown}");
    assert_eq!(shown["copy_of"], data.to_string());
    assert_eq!(control.done(&["snapshot", "list", "-o", "name"])?, "before\n");
    for arguments in
        [&["attach", "before", "web"][..], &["extend", "before", "3"], &["restore", "before", "volume:data"]]
    {
        refused(&control, arguments, 1, "it is a snapshot")?;
    }
    let boots = ["run", "x", "--query", "resources=VCPU:1,MEMORY_MB:128", "--boot-volume", "before"];
    let output = control.eschedule(&boots)?;
    ensure!(String::from_utf8_lossy(&output.stderr).contains("it is a snapshot"), "{output:?}");
    // A clone is a volume as others.
    let copy = id(&json(&control, &["clone", "data", "copy"])?)?;
    control.status(node, copy, State::Active, None).await?;
    control.done(&["volume", "attach", "copy", "web"])?;
    for (arguments, those) in [
        (&["volume", "list", "--status", "in-use"][..], "copy\n"),
        (&["volume", "list", "--status", "in-use,available", "--node", "h1"], "before\ncopy\ndata\n"),
        (&["volume", "list", "--status", "changing"], ""),
        (&["volume", "list", "--instance", "web"], "copy\n"),
        (&["volume", "list", "--project", "other"], ""),
        (&["volume", "list", "--label", "a=b"], ""),
        (&["snapshot", "list", "--status", "error"], ""),
    ] {
        assert_eq!(control.done(&[arguments, &["-o", "name"]].concat())?, those, "{arguments:?}");
    }
    refused(&control, &["list", "--status", "gone"], 2, "[possible values: creating, available")?;
    refused(&control, &["list", "--node", "h9"], 1, "no node is named `h9`")?;
    let none = control.eschedule(&["snapshot", "restore", "copy"])?;
    ensure!(String::from_utf8_lossy(&none.stderr).contains("and no snapshot"), "{none:?}");

    let before = control.request(node, data).await?.context("it is asked for")?.rebuild;
    let output = control.eschedule(&["snapshot", "restore", "before", "--timeout", "1"])?;
    ensure!(String::from_utf8_lossy(&output.stderr).contains("not done after 1 s"), "{output:?}");
    let request = control.request(node, data).await?.context("it is asked for")?;
    ensure!(request.rebuild != before, "it is to be made anew");
    let image = request.spec.context("it has one")?.image;
    assert_eq!(image.copied().map(|of| of.disk), Some(snap));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_goes_where_the_volumes_lie_that_it_is_to_have() -> Result<()> {
    let control = Control::start().await?;
    let [here, there] = [control.node("h1", true, SOME).await?, control.node("h2", true, SOME).await?];
    let mut volumes = Vec::new();
    for (name, node, id) in [("a", "h2", there), ("b", "h2", there), ("far", "h1", here)] {
        volumes.push(made(&control, id, &[name, "--size", "1", "--node", node]).await?);
    }
    let run = |arguments: &[&str]| {
        let query = ["run", "db", "--query", TINY];
        control.eschedule(&[&query, arguments].concat())
    };
    for (arguments, code, wanted) in [
        (&["--volume", "none"][..], 1, "no volume of project"),
        (&["--volume", "a", "--volume", "a"], 2, "named twice"),
        (&["--volume", "a", "--volume", "far"], 1, "share no storage"),
        (&["--volume", "a", "--node", "h1"], 1, "share no storage"),
    ] {
        let output = run(arguments)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code) && text.contains(wanted), "{arguments:?}: {output:?}");
    }
    assert_eq!(control.count("instances/").await?, 3);
    let dry = run(&["--volume", "a", "--dry-run"])?;
    let told = String::from_utf8_lossy(&dry.stdout).into_owned();
    ensure!(dry.status.success() && told.contains(&there.to_string()), "{dry:?}");

    let made = run(&["--volume", "a", "--volume", "b", "-o", "json"])?;
    ensure!(made.status.success(), "{made:?}");
    let made: Value = serde_json::from_slice(&made.stdout)?;
    assert_eq!(made["node"], there.to_string());
    let instance: InstanceId = made["instance"].as_str().context("it has a uuid")?.parse()?;
    let has = |volume: InstanceId, device: &str| Attachment { volume, device: device.to_owned() };
    let wanted = [has(volumes[0], "vdb"), has(volumes[1], "vdc")];
    assert_eq!(control.record(instance).await?.context("it is there")?.volumes, wanted);
    assert_eq!(control.request(there, instance).await?.context("it is asked for")?.volumes, wanted);
    // Another cannot have one of them, and nothing is claimed for it.
    let output = control.eschedule(&["run", "other", "--query", TINY, "--volume", "b"])?;
    ensure!(String::from_utf8_lossy(&output.stderr).contains("has volume"), "{output:?}");
    assert_eq!(control.count("instances/").await?, 4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_who_want_a_volume_one_has_it_and_nobody_deletes_it_meanwhile() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("h1", true, SOME).await?;
    let data = made(&control, node, &["data", "--size", "1"]).await?;
    let mut machines = Vec::new();
    for number in 0..6 {
        machines.push(runs(&control, node, &format!("web{number}")).await?);
    }
    let asks =
        |arguments: &[&str]| control.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut asked = Vec::new();
    for machine in &machines {
        asked.push(asks(&["volume", "attach", "data", &machine.to_string()])?);
    }
    asked.push(asks(&["volume", "delete", "data"])?);
    let outputs =
        asked.into_iter().map(|child| child.wait_with_output()).collect::<Result<Vec<Output>, _>>()?;
    let (deleted, attached) = outputs.split_last().context("all were asked")?;
    let won = attached.iter().filter(|output| output.status.success()).count();
    assert_eq!(won + usize::from(deleted.status.success()), 1, "{outputs:?}");

    let mut have = 0;
    for machine in &machines {
        let record = control.record(*machine).await?.context("it is there")?;
        let request = control.request(node, *machine).await?.context("it is asked for")?;
        assert_eq!(record.volumes, request.volumes);
        assert_eq!(record.generation, request.generation);
        if !record.volumes.is_empty() {
            assert_eq!(record.volumes, [Attachment { volume: data, device: "vdb".to_owned() }]);
            let volume = control.record(data).await?.context("it is there")?;
            assert_eq!(volume.attached, Some(*machine));
            have += 1;
        }
    }
    assert_eq!(have, won);
    if won == 1 {
        // Until its agent tells, nobody else gets it, and it is not deleted.
        let holder = json(&control, &["show", "data"])?["instance"].clone();
        control.done(&["volume", "detach", "data"])?;
        let other = machines.iter().find(|machine| machine.to_string() != holder).context("there are six")?;
        refused(
            &control,
            &["attach", "data", &other.to_string()],
            1,
            "`eschedule volume detach` takes it away first",
        )?;
        refused(&control, &["delete", "data"], 1, "has volume")?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn several_are_deleted_at_the_same_time_and_told_in_one_document() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("h1", true, SOME).await?;
    for name in ["a", "b", "c"] {
        made(&control, node, &[name, "--size", "1"]).await?;
    }
    let told = |output: Output| -> Result<(Option<i32>, Value)> {
        Ok((output.status.code(), serde_json::from_slice(&output.stdout)?))
    };
    let (code, all) = told(control.eschedule(&["volume", "delete", "a", "none", "b", "-o", "json"])?)?;
    assert_eq!((code, all.as_array().map(Vec::len)), (Some(1), Some(3)), "{all}");
    assert_eq!((&all[0]["deleted"], &all[0]["state"]), (&"a".into(), &"DELETING".into()));
    assert_eq!((&all[1]["deleted"], &all[1]["asked"]), (&Value::Null, &"none".into()));
    ensure!(all[1]["error"].as_str().is_some_and(|why| why.contains("no volume of project")), "{all}");
    assert_eq!(all[2]["deleted"], "b");
    let one = json(&control, &["delete", "c"])?;
    assert_eq!((&one["deleted"], &one["state"]), (&"c".into(), &"DELETING".into()));

    // The last is asked though the first takes long.
    let (d, e) = (
        made(&control, node, &["d", "--size", "1"]).await?,
        made(&control, node, &["e", "--size", "1"]).await?,
    );
    let mut waits =
        control.command(&["volume", "delete", "d", "e", "--wait", "--timeout", "20", "-o", "json"]);
    let waits = waits.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut is_asked = false;
    for _ in 0..100 {
        let request = control.request(node, e).await?;
        is_asked = request.is_some_and(|request| request.desired == ec_model::Desired::Destroyed);
        if is_asked {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    ensure!(is_asked, "nobody asked for the second");
    for volume in [e, d] {
        control.delete(control.keys.request(node, volume)).await?;
        control.delete(control.keys.status(node, volume)).await?;
    }
    let (code, all) = told(waits.wait_with_output()?)?;
    assert_eq!(code, Some(0), "{all}");
    let state = |one: &Value| (one["deleted"].clone(), one["state"].clone());
    let gone = |name: &str| (Value::from(name), Value::from("DELETED"));
    assert_eq!((state(&all[0]), state(&all[1])), (gone("d"), gone("e")), "{all}");
    ensure!(all[0]["request_id"].as_str().is_some_and(|id| id.starts_with("req-")), "{all}");

    control.done(&["image", "add", "one", "https://images.example/x.qcow2"])?;
    let (code, all) = told(control.eschedule(&["image", "delete", "none", "one", "-o", "json"])?)?;
    assert_eq!((code, &all[0]["asked"], state(&all[1])), (Some(1), &"none".into(), gone("one")), "{all}");

    // By label, each what it is.
    for name in ["f", "g"] {
        made(&control, node, &[name, "--size", "1", "--label", "role=old"]).await?;
    }
    let kept = id(&json(&control, &["snapshot", "f", "kept", "--label", "role=old"])?)?;
    control.status(node, kept, State::Active, None).await?;
    let (code, all) = told(control.eschedule(&["volume", "delete", "--label", "role=old", "-o", "json"])?)?;
    assert_eq!((code, all.as_array().map(Vec::len)), (Some(0), Some(2)), "{all}");
    let (code, all) = told(control.eschedule(&["snapshot", "delete", "--label", "role", "-o", "json"])?)?;
    assert_eq!(
        (code, &all[0]["deleted"], all.as_array().map(Vec::len)),
        (Some(0), &kept.to_string().into(), Some(1))
    );
    refused(
        &control,
        &["delete", "--label", "role=old"],
        1,
        "no volume of project `default` has the label role=old",
    )?;
    refused(&control, &["delete", "f", "--label", "role=old"], 2, "cannot be used with")?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_done_to_volumes_is_told_of_them_and_of_instances_once_it_is_so() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("h1", true, SOME).await?;
    let volume = made(&control, node, &["data", "--size", "1"]).await?;
    let web = runs(&control, node, "web").await?;
    let events = |of: &str| -> Result<Vec<Value>> {
        Ok(serde_json::from_str(&control.done(&["events", of, "-o", "json"])?)?)
    };
    let attached = json(&control, &["attach", "data", "web"])?;
    ensure!(attached["request_id"].as_str().is_some_and(|id| id.starts_with("req-")), "{attached}");
    let last = |of: Vec<Value>| of.last().map(|it| (it["verb"].clone(), it["outcome"].clone()));
    let is = |outcome: &str| Some((Value::from("attach_volume"), Value::from(outcome)));
    assert_eq!(last(events("web")?), is("pending"));
    let key = control.keys.status(node, web);
    let told = async |failed: Option<&str>| -> Result<()> {
        let pair = control.get(&key).await?.context("no status")?;
        let mut status: Value = serde_json::from_slice(&pair.value)?;
        status["observed_generation"] = control.record(web).await?.context("no record")?.generation.into();
        status["volumes"] = serde_json::json!([{"volume": volume, "device": "vdb"}]);
        status["volumes_failed"] = serde_json::json!(failed);
        control.put(key.clone(), status.to_string()).await?;
        Ok(())
    };
    told(Some("its disk is gone")).await?;
    assert_eq!(last(events("web")?), is("failed"));
    ensure!(control.done(&["events", "web"])?.contains("its disk is gone"));
    told(None).await?;
    assert_eq!(last(events("web")?), is("done"));
    // Of a volume, too, by its name.
    control.done(&["volume", "set", "data", "--label", "a=b"])?;
    let of_volume = events("data")?;
    assert_eq!(last(of_volume), Some(("set".into(), "done".into())));
    assert_eq!(control.eschedule(&["events", "none"])?.status.code(), Some(1));
    Ok(())
}

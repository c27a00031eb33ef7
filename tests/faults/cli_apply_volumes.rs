//! `apply` and volumes: they are made beside who is to have them, move, grow, and go by their own wish alone.

use std::{
    collections::HashSet,
    process::{Child, Output, Stdio},
    time::Duration,
};

use anyhow::{Result, ensure};
use ec_model::{Desired, Instance, Keyspace, Request, Status, decode, encode};
use ec_placement_client::PlacementClient;
use ec_store::{EtcdStore, Store, Txn};
use ec_tests::control::Control;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::cli_apply::{self, file, nothing, refused};

const ROOMY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];
const SMALL: &str = "resources=VCPU:1,MEMORY_MB:64,DISK_GB:1";

/// Agents of all nodes that do at once what is asked of them, until it is dropped.
struct Agents(JoinHandle<Result<()>>);

impl Agents {
    fn of(control: &Control) -> Self {
        let (store, placement, keys) =
            (control.store.clone(), control.placement.clone(), control.keys.clone());
        Self(tokio::spawn(async move {
            loop {
                act(&store, &placement, &keys).await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }))
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn act(store: &EtcdStore, placement: &PlacementClient, keys: &Keyspace) -> Result<()> {
    for pair in store.list(&keys.all_requests()).await?.pairs {
        let (node, instance) = keys.parse_request(&pair.key)?;
        let request: Request = decode(&pair.value)?;
        let key = keys.status(node, instance);
        if request.desired == Desired::Destroyed {
            placement.release(instance).await?;
            store.txn(Txn::new().delete(pair.key).delete(key)).await?;
            continue;
        }
        let told: Option<Status> = store.get(&key).await?.0.map(|pair| decode(&pair.value)).transpose()?;
        if told.is_some_and(|told| told.observed_generation >= request.generation) {
            continue;
        }
        // Through the record, so that the test notices where its form changes.
        let status = json!({
            "version": 1, "instance": instance, "node": node, "epoch": request.epoch, "state": "ACTIVE",
            "kind": request.kind, "observed_generation": request.generation, "volumes": request.volumes,
            "since": Timestamp::now(), "updated_at": Timestamp::now(),
        });
        let status: Status = decode(status.to_string().as_bytes())?;
        store.txn(Txn::new().put(key, encode(&status))).await?;
    }
    Ok(())
}

/// What was done: each as `what name`, and what standard error said.
fn applied(control: &Control, text: &str, more: &[&str], code: i32) -> Result<(Vec<String>, String)> {
    cli_apply::applied(control, &file(control, text)?, more, code)
}

/// What is told of a volume.
fn volume(control: &Control, name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&control.done(&["volume", "show", name, "-o", "json"])?)?)
}

/// Which instance has it, by its uuid; null where none has.
fn holder(control: &Control, name: &str) -> Result<Value> {
    Ok(volume(control, name)?["instance"].clone())
}

fn instance(control: &Control, name: &str) -> Result<Value> {
    let shown: Value = serde_json::from_str(&control.done(&["show", name, "-o", "json"])?)?;
    Ok(shown["instance"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_made_beside_their_instances_and_given_to_them_and_the_same_again_does_nothing()
-> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    // What is too small for both is passed over, though the instance alone would fit.
    control.node("tight", true, &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 30)]).await?;
    control.node("wide", true, ROOMY).await?;
    let text = format!(
        "stack: shop\nvolumes:\n  data: {{size: 40, labels: {{tier: back}}}}\n  logs: {{size: 2, count: 2}}\n  spare: {{size: 1}}\n\
         instances:\n  db: {{query: \"{SMALL}\", volumes: [data]}}\n  web: {{count: 2, query: \"{SMALL}\", volumes: [logs]}}\n"
    );
    let all = [
        "run db",
        "run web-1",
        "run web-2",
        "create data",
        "create logs-1",
        "create logs-2",
        "create spare",
        "attach data",
        "attach logs-1",
        "attach logs-2",
    ];
    let (shown, told) = applied(&control, &text, &["--diff"], 1)?;
    assert_eq!(shown, all);
    ensure!(
        told.contains("\n+ volume data: 40 GiB\n")
            && told.contains("\n~ volume logs-2: attach it to web-2\n"),
        "{told}"
    );
    assert_eq!(control.count("instances/").await?, 0, "only shown");
    assert_eq!(applied(&control, &text, &[], 0)?.0, all);
    for (name, of) in [("data", "db"), ("logs-1", "web-1"), ("logs-2", "web-2")] {
        let view = volume(&control, name)?;
        assert_eq!((&view["instance"], &view["labels"]["stack"]), (&instance(&control, of)?, &"shop".into()));
    }
    assert_eq!(holder(&control, "spare")?, Value::Null);
    for more in [&[][..], &["--prune", "--prune-volumes"], &["--diff"]] {
        assert_eq!(applied(&control, &text, more, 0)?, (nothing(), String::new()), "{more:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn they_grow_and_move_and_go_by_their_own_wish_alone() -> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    for name in ["a", "b", "c"] {
        control.node(name, true, ROOMY).await?;
    }
    let stack = |volumes: &str, db: &str, more: &str| {
        format!(
            "stack: shop\nvolumes: {{{volumes}}}\ninstances:\n  db: {{query: \"{SMALL}\", volumes: [{db}]}}\n{more}"
        )
    };
    applied(&control, &stack("data: {size: 2}", "data", ""), &[], 0)?;
    let data = volume(&control, "data")?;
    let larger = stack("data: {size: 3, labels: {k: v}}", "data", "");
    let (done, told) = applied(&control, &larger, &[], 0)?;
    assert_eq!(done, ["set data", "extend data"]);
    ensure!(
        told.contains("~ volume data: set --label k=v\n~ volume data: extend it from 2 to 3 GiB\n"),
        "{told}"
    );
    assert_eq!(volume(&control, "data")?["size_gb"], 3);
    assert_eq!(applied(&control, &larger, &[], 0)?.0, nothing());

    // Nothing is taken for one that cannot be made.
    let huge = "  db2: {query: \"resources=VCPU:100000,MEMORY_MB:64,DISK_GB:1\", volumes: [data]}\n";
    let (_, told) = applied(&control, &stack("data: {size: 3, labels: {k: v}}", "", huge), &[], 1)?;
    ensure!(told.contains("no allocations left"), "{told}");
    assert_eq!(holder(&control, "data")?, instance(&control, "db")?);
    assert_eq!(applied(&control, &larger, &[], 0)?.0, nothing());

    // A new one gets it, and so goes where it lies, of three nodes.
    let two = format!("  db2: {{query: \"{SMALL}\", volumes: [data]}}\n");
    let moved = stack("data: {size: 3, labels: {k: v}}", "", &two);
    assert_eq!(applied(&control, &moved, &[], 0)?.0, ["run db2", "detach data", "attach data"]);
    assert_eq!(holder(&control, "data")?, instance(&control, "db2")?);
    assert_eq!(applied(&control, &moved, &["--prune"], 0)?.0, nothing());

    // An instance that goes leaves its volume to the next; what no file names stays, and says so.
    let next = format!(
        "stack: shop\nvolumes: {{data: {{size: 3, labels: {{k: v}}}}}}\ninstances:\n  db3: {{query: \"{SMALL}\", volumes: [data]}}\n"
    );
    let mut done = applied(&control, &next, &["--prune"], 0)?.0;
    // Of two that go, uuids say which first.
    done[1..3].sort();
    assert_eq!(done, ["run db3", "destroy db", "destroy db2", "attach data"]);
    assert_eq!(holder(&control, "data")?, instance(&control, "db3")?);
    let none = "stack: shop\n";
    assert_eq!(applied(&control, none, &["--diff"], 0)?.0, ["keep db3", "keep data"]);
    let (done, told) = applied(&control, none, &["--prune"], 0)?;
    assert_eq!(done, ["destroy db3", "keep data"]);
    ensure!(told.contains("= volume data: the file does not name it, and it stays"), "{told}");
    assert_eq!(applied(&control, none, &["--prune", "--diff"], 0)?.0, ["keep data"], "nothing to be done");
    assert_eq!(volume(&control, "data")?["volume"], data["volume"], "it is the same still");
    assert_eq!(applied(&control, none, &["--prune-volumes", "--diff"], 1)?.0, ["delete-volume data"]);
    assert_eq!(applied(&control, none, &["--prune-volumes"], 0)?.0, ["delete-volume data"]);
    assert_eq!(control.count("instances/").await?, 0);

    // Both at once: its instance's end is waited for.
    applied(&control, &stack("data: {size: 2}", "data", ""), &[], 0)?;
    let gone = applied(&control, none, &["--prune", "--prune-volumes"], 0)?.0;
    assert_eq!(gone, ["destroy db", "delete-volume data"]);
    assert_eq!(control.count("instances/").await?, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_stays_with_its_volumes_and_that_is_told_while_something_of_the_file_cannot_be_made()
-> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    control.node("tight", true, &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 9)]).await?;
    let stack = |volumes: &str, holder: &str| {
        format!(
            "stack: shop\nvolumes: {{logs: {{size: 1}}{volumes}}}\ninstances:\n  {holder}: {{query: \"{SMALL}\", volumes: [logs]}}\n"
        )
    };
    applied(&control, &stack("", "web"), &[], 0)?;
    let had = holder(&control, "logs")?;
    let other = stack(", extra: {size: 7}", "db");
    let (_, told) = applied(&control, &other, &["--prune"], 1)?;
    for line in [
        "\n- web\n",
        "\n= web: something before it failed: it is left\n",
        "\n= volume logs: volume `logs` was not taken from who has it\n",
        "extra: no allocations left",
    ] {
        ensure!(told.contains(line), "{line:?} is not in {told}");
    }
    ensure!(!told.contains("eschedule volume detach"), "{told}");
    assert_eq!(holder(&control, "logs")?, had);
    let done = applied(&control, &stack(", extra: {size: 6}", "db"), &["--prune"], 0)?.0;
    assert_eq!(done, ["create extra", "destroy web", "attach logs"]);
    assert_eq!(holder(&control, "logs")?, instance(&control, "db")?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_lies_where_its_source_does_and_what_is_gone_since_is_not_missed() -> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    for name in ["a", "b", "c"] {
        control.node(name, true, ROOMY).await?;
    }
    for round in 0..3 {
        let (golden, copy) = (format!("golden{round}"), format!("copy{round}"));
        let flavor = format!("f{round}");
        control.done(&["flavor", "create", &flavor, &SMALL.replace("DISK_GB:1", "DISK_GB:2")])?;
        control.done(&["volume", "create", &golden, "--size", "2", "--wait"])?;
        let text = format!(
            "stack: s{round}\nvolumes:\n  {copy}: {{image: \"volume:{golden}\"}}\ninstances:\n  db{round}: {{query: \"{SMALL}\", volumes: [{copy}]}}\n  \
             web{round}: {{flavor: f{round}, image: \"volume:{golden}\"}}\n"
        );
        applied(&control, &text, &[], 0)?;
        let (source, made) = (volume(&control, &golden)?, volume(&control, &copy)?);
        assert_eq!((&made["node"], &made["copy_of"]), (&source["node"], &source["volume"]));
        assert_eq!((&made["size_gb"], &made["status"]), (&2.into(), &"in-use".into()));
        control.done(&["volume", "delete", &golden, "--wait"])?;
        control.done(&["flavor", "delete", &flavor])?;
        let (done, told) = applied(&control, &text, &[], 0)?;
        assert_eq!(done, [format!("keep web{round}")], "a volume is told nothing of");
        ensure!(told.contains("it stays what it was made of"), "{told}");
    }
    Ok(())
}

/// There has to be room for both where one of them says nothing of its disk, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_no_said_size_and_a_volume_are_made_together_or_not_at_all() -> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    control.node("a", true, &[("VCPU", 64), ("MEMORY_MB", 1 << 16), ("DISK_GB", 15)]).await?;
    control.done(&["volume", "create", "data", "--size", "5", "--wait"])?;
    let room = "resources=VCPU:1,MEMORY_MB:64";
    for (size, code) in [(6, 1), (5, 0)] {
        let text = format!(
            "stack: s\nvolumes: {{more: {{size: {size}}}}}\ninstances:\n  db: {{query: \"{room}\", image: \"volume:data\", volumes: [more]}}\n"
        );
        let (_, told) = applied(&control, &text, &[], code)?;
        let made = if code == 0 { 3 } else { 1 };
        assert_eq!(control.count("instances/").await?, made, "{told}");
        if code == 0 {
            assert_eq!(applied(&control, &text, &[], 0)?.0, nothing());
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_with_volumes_are_told_in_a_line_and_change_nothing() -> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    for name in ["a", "b"] {
        control.node(name, true, ROOMY).await?;
    }
    control
        .done(&["volume", "create", "data", "--size", "5", "--label", "stack=s", "--node", "a", "--wait"])?;
    control
        .done(&["volume", "create", "far", "--size", "5", "--label", "stack=s", "--node", "b", "--wait"])?;
    control.done(&["volume", "create", "own", "--size", "5", "--wait"])?;
    let digest = "b".repeat(64);
    let roomy = ["roomy", "https://images.example/x.qcow2", "--min-disk", "2", "--sha256", &digest];
    control.done(&[&["image", "add"], &roomy[..]].concat())?;
    for (text, code, wanted) in [
        (
            "stack: s\nvolumes:\n  data: {size: 4}\n".to_owned(),
            1,
            "shop.yaml:3:16: volumes.data.size: it has 5 GB, and never shrinks",
        ),
        (
            "stack: s\nvolumes:\n  own: {size: 5}\n".to_owned(),
            1,
            "shop.yaml:3:8: volumes.own: `own` is volume ",
        ),
        (
            "stack: s\nvolumes:\n  new: {size: 5, image: none}\n".to_owned(),
            1,
            "shop.yaml:3:25: volumes.new.image: there is no image `none`",
        ),
        (
            format!("stack: s\nvolumes:\n  new: {{size: 5, image: roomy, sha256: {}}}\n", "a".repeat(64)),
            2,
            "shop.yaml:3:40: volumes.new.sha256: the digest demands aaaa",
        ),
        (
            "stack: s\nvolumes:\n  new: {image: \"volume:none\"}\n".to_owned(),
            1,
            "shop.yaml:3:16: volumes.new.image: no volume of project `default` is named `none`",
        ),
        (
            format!(
                "stack: s\nvolumes: {{data: {{size: 5}}, far: {{size: 5}}}}\ninstances:\n  db: {{query: \"{SMALL}\", volumes: [data, far]}}\n"
            ),
            1,
            "instances.db.volumes: `far` lies on node ",
        ),
        (
            format!(
                "stack: s\nvolumes: {{new: {{size: 1}}, small: {{size: 4, image: \"volume:own\"}}}}\ninstances:\n  db: {{query: \"{SMALL}\", volumes: [new]}}\n"
            ),
            2,
            "volumes.small.image: 4 GB are too few for a copy of volume ",
        ),
        (
            "stack: s\nvolumes:\n  new: {size: 5}\n  tiny: {size: 1, image: roomy}\n".to_owned(),
            2,
            "shop.yaml:4:26: volumes.tiny.image: image `roomy` needs DISK_GB:2, and DISK_GB:1 is asked for",
        ),
        (
            format!(
                "stack: s\nvolumes: {{new: {{size: 5}}}}\ninstances:\n  db: {{query: \"{SMALL}\", image: \"volume:own\"}}\n"
            ),
            2,
            "instances.db.image: 1 GB are too few for a copy of volume ",
        ),
        (
            format!("stack: s\ninstances:\n  db: {{query: \"{SMALL}\", volumes: [data]}}\n"),
            2,
            "instances.db.volumes[0]: the file has no volume `data`",
        ),
    ] {
        refused(&control, &text, code, wanted)?;
        assert_eq!(control.count("instances/").await?, 3, "{text}");
    }
    // What another's instance has is left to whoever applies, and so is what lies elsewhere.
    control.done(&["run", "other", "--query", SMALL, "--node", "a"])?;
    control.done(&["volume", "attach", "data", "other", "--wait"])?;
    let text = format!(
        "stack: s\nvolumes: {{data: {{size: 5}}}}\ninstances:\n  db: {{query: \"{SMALL}\", volumes: [data]}}\n"
    );
    let (done, told) = applied(&control, &text, &[], 1)?;
    assert_eq!(done, ["run db", "stands data", "keep far"]);
    ensure!(told.contains("! volume data: `other`, which is not of this stack, has it"), "{told}");
    assert_eq!(holder(&control, "data")?, instance(&control, "other")?);
    let text = format!(
        "stack: s\nvolumes: {{far: {{size: 5}}}}\ninstances:\n  db: {{query: \"{SMALL}\", volumes: [far]}}\n"
    );
    let (done, told) = applied(&control, &text, &["--prune-volumes"], 1)?;
    assert_eq!(done, ["stands far", "stands data"]);
    ensure!(told.contains("! volume far: it lies on node "), "{told}");
    Ok(())
}

/// Lets ten minutes pass for what has no node yet.
async fn age_the_unplaced(control: &Control) -> Result<()> {
    for pair in control.store.list(&control.keys.instances()).await?.pairs {
        let mut record: Instance = decode(&pair.value)?;
        if record.node().is_none() {
            record.created_at -= SignedDuration::from_mins(10);
            control.put(pair.key, encode(&record)).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_killed_at_any_moment_and_applies_again_has_the_volumes_once() -> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    let node = control.node("a", true, ROOMY).await?;
    for (round, after) in [30, 90, 160, 250].into_iter().enumerate() {
        let text = format!(
            "stack: s{round}\nvolumes:\n  d{round}: {{size: 1, count: 3}}\ninstances:\n  w{round}: {{count: 3, query: \"{SMALL}\", volumes: [d{round}]}}\n"
        );
        let path = file(&control, &text)?;
        let mut killed = control.command(&["apply", "-f", &path]).spawn()?;
        // No state to wait for: it is killed at whatever it does then.
        tokio::time::sleep(Duration::from_millis(after)).await;
        killed.kill()?;
        killed.wait()?;
        // What was being placed may be at it for all that anybody knows, for ten minutes; a slow machine leaves more of it.
        let output = control.eschedule(&["apply", "-f", &path])?;
        if !output.status.success() {
            let told = String::from_utf8_lossy(&output.stderr);
            ensure!(told.contains("is not placed: a command began with it"), "{told}");
            age_the_unplaced(&control).await?;
            applied(&control, &text, &[], 0)?;
        }
        for number in 1..=3 {
            let (disk, machine) = (format!("d{round}-{number}"), format!("w{round}-{number}"));
            assert_eq!(holder(&control, &disk)?, instance(&control, &machine)?);
        }
        assert_eq!(applied(&control, &text, &["--prune", "--prune-volumes"], 0)?.0, nothing());
    }
    let pairs = control.store.list(&control.keys.instances()).await?.pairs;
    let records = pairs.iter().map(|pair| decode(&pair.value)).collect::<Result<Vec<Instance>, _>>()?;
    let names: HashSet<_> =
        records.iter().map(|record| (record.name.clone(), record.kind.is_machine())).collect();
    assert_eq!(records.len(), names.len(), "each is there once, by its name");
    let claims = control.placement.provider_allocations(node).await?.len();
    ensure!(claims >= control.count("requests/").await?, "each that is requested is claimed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_applied_three_times_at_once_makes_its_volumes_once() -> Result<()> {
    let control = Control::start().await?;
    let _agents = Agents::of(&control);
    for name in ["a", "b", "c"] {
        control.node(name, true, ROOMY).await?;
    }
    for round in 1..=4 {
        let text = format!(
            "stack: s{round}\nvolumes:\n  d{round}: {{size: 1, count: 3}}\ninstances:\n  w{round}: {{count: 3, query: \"{SMALL}\", volumes: [d{round}]}}\n"
        );
        let path = file(&control, &text)?;
        let spawn = || control.command(&["apply", "-f", &path]).stderr(Stdio::piped()).spawn();
        let children: Vec<Child> = (0..3).map(|_| spawn()).collect::<Result<_, _>>()?;
        for child in children {
            let output: Output = child.wait_with_output()?;
            ensure!(output.status.success(), "round {round}: {}", String::from_utf8_lossy(&output.stderr));
        }
        for number in 1..=3 {
            let (disk, machine) = (format!("d{round}-{number}"), format!("w{round}-{number}"));
            assert_eq!(holder(&control, &disk)?, instance(&control, &machine)?, "round {round}");
        }
        assert_eq!(control.count("instances/").await?, 6 * round);
    }
    Ok(())
}

//! Storage that two agents share: one provider of its own counts it, and each node has its own directory there.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, NodeId, Resources, SharedStorage, State};
use ec_placement_client::SHARES;
use ec_store::{Store, Txn};
use ec_tests::{Release, SecondAgent, Stack};
use serde_json::Value;
use uuid::Uuid;

const POOL: &str = "pool";
/// The second agent alone has this trait.
const SECOND: &str = "CUSTOM_SECOND";
const GUEST: &str = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1";
/// With one processor the tiny guest has no interrupt for a disk that comes later.
const TWO: &str = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1";

/// A directory that two nodes have, at a place of its own each.
struct Shared {
    directory: tempfile::TempDir,
    /// Where the second node has it.
    other: PathBuf,
}

impl Shared {
    /// Both have the same directory, or, where `EC_TEST_SHARED` names two mounts of one file system, each its own mount.
    fn new() -> Result<Self> {
        let builder = || tempfile::Builder::new();
        let Some(mounts) = std::env::var_os("EC_TEST_SHARED").map(PathBuf::from) else {
            let directory = builder().prefix("ec-shared-").tempdir()?;
            let other = directory.path().to_owned();
            return Ok(Self { directory, other });
        };
        let directory = builder().tempdir_in(mounts.join("first"))?;
        let other = mounts.join("other").join(directory.path().file_name().context("no name")?);
        Ok(Self { directory, other })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A node's own directory, as it sees it.
    fn of(&self, node: NodeId, second: NodeId) -> PathBuf {
        let place = if node == second { &*self.other } else { self.path() };
        place.join(node.to_string())
    }
}

/// A stack whose agent, and a second one, have their guests' disks in the same directory.
async fn two(shared: &Shared) -> Result<(Stack, SecondAgent)> {
    let at = |place: &Path| format!("shared_storage: {{name: {POOL}, path: {}}}", place.display());
    let first = at(shared.path());
    let mut stack = Stack::start_with(&first).await?;
    stack.start_agent("").await?;
    let second = SecondAgent::start(&stack, Release::This, |config| {
        format!("{}traits: [{SECOND}]\n", config.replace(&first, &at(&shared.other)))
    })?;
    stack
        .until("both nodes are registered", async || {
            let shown = stack.eschedule(&["nodes", "-o", "json"])?;
            let nodes: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
            let ready = nodes.as_array().into_iter().flatten();
            Ok(ready.filter(|node| node["capacity"]["VCPU"].as_u64() > Some(0)).count() == 2)
        })
        .await?;
    Ok((stack, second))
}

fn done(stack: &Stack, arguments: &[&str]) -> Result<String> {
    let output = stack.eschedule(arguments)?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn shown(stack: &Stack, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&done(stack, &[arguments, &["-o", "json"]].concat())?)?)
}

/// The uuid that is shown.
fn uuid(stack: &Stack, what: &[&str], key: &str) -> Result<InstanceId> {
    Ok(shown(stack, what)?[key].as_str().context("no uuid")?.parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disks_of_two_nodes_are_claimed_of_the_storage_that_they_share() -> Result<()> {
    let place = Shared::new()?;
    let (mut stack, second) = two(&place).await?;
    let storage = SharedStorage::named(POOL);
    let placement = &stack.placement;
    ensure!(placement.traits(storage.provider).await?.contains(SHARES));
    for node in [stack.node, second.node] {
        assert_eq!(placement.shared_by(node).await?, std::slice::from_ref(&storage));
        let classes: Vec<String> = placement.inventory(node).await?.into_keys().collect();
        assert_eq!(classes, ["MEMORY_MB", "VCPU"], "its disk is not its own");
    }
    assert_eq!(placement.inventory(storage.provider).await?.into_keys().collect::<Vec<_>>(), ["DISK_GB"]);
    // One that has it not mounted, and comes for the first time, is told so, and is none of them.
    let unmounted = tempfile::Builder::new().prefix("ec-unmounted-").tempdir()?;
    let third = SecondAgent::start(&stack, Release::This, |config| {
        let path = |place: &Path| format!("path: {}}}", place.display());
        config.replace(&path(place.path()), &path(unmounted.path())).replace("/state2\n", "/state3\n")
    })?;
    stack.until("it is refused", async || Ok(third.log().contains("mount that there first"))).await?;
    ensure!(std::fs::read_dir(unmounted.path())?.next().is_none(), "nothing is written there");
    assert_eq!(placement.shared_by(third.node).await.unwrap_or_default(), []);
    // So is one of them whose host was installed anew.
    let config = std::fs::read_to_string(stack.directory().join("compute.yaml"))?;
    let path = |place: &Path| format!("path: {}}}", place.display());
    let config = config.replace(&path(place.path()), &path(unmounted.path()));
    let anew = stack.directory().join("anew.yaml");
    std::fs::write(&anew, config.replace("/state\n", "/state4\n"))?;
    let mut agent = tokio::process::Command::new(ec_tests::program("ecompute"));
    let ended = agent.arg("--config").arg(&anew).kill_on_drop(true).output();
    let ended = tokio::time::timeout(Duration::from_secs(60), ended).await??;
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    ensure!(told.contains("mount that there first") && told.contains(&stack.node.to_string()), "{told}");
    ensure!(std::fs::read_dir(unmounted.path())?.next().is_none(), "nothing is written there");
    // All note the same mark, whoever made it.
    let noted = ["state/shared-storage", "state2/shared-storage"].map(|of| stack.directory().join(of));
    let [mark, first, other] =
        [place.path().join("etcd-compute.storage"), noted[0].clone(), noted[1].clone()]
            .map(|file| std::fs::read_to_string(file).unwrap_or_default());
    ensure!(mark.starts_with("pool ") && mark == first && mark == other, "{mark} {first} {other}");

    let nodes = shown(&stack, &["nodes"])?;
    for node in nodes.as_array().context("no nodes")? {
        ensure!(node["storage"] == POOL && node["capacity"]["DISK_GB"].as_u64() > Some(0), "{node}");
    }

    let refused = stack.eschedule(&["storage", "join", "other", &stack.node.to_string()])?;
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && told.contains("has its disks on storage `pool`"), "{told}");
    ensure!(shown(&stack, &["storage", "list"])?.as_array().map(Vec::len) == Some(1));

    // Guests anywhere, on a node by its trait, and on one that is named.
    done(&stack, &["run", "first", "--query", GUEST, "--node", &stack.node.to_string(), "--wait"])?;
    done(&stack, &["run", "other", "--query", &format!("{GUEST}&required={SECOND}"), "--wait"])?;
    let (first, other) =
        (uuid(&stack, &["show", "first"], "instance")?, uuid(&stack, &["show", "other"], "instance")?);
    let placement = stack.placement.clone();
    let is_claimed = async |instance: InstanceId, node: Option<NodeId>| -> Result<()> {
        let held = placement.allocations(instance).await?.context("no claim")?.allocations;
        let disk: Resources = [("DISK_GB".to_owned(), 1)].into();
        assert_eq!(held.get(&storage.provider), Some(&disk));
        let nodes: Vec<NodeId> = held.into_keys().filter(|provider| *provider != storage.provider).collect();
        assert_eq!(nodes, node.into_iter().collect::<Vec<_>>());
        Ok(())
    };
    is_claimed(first, Some(stack.node)).await?;
    is_claimed(other, Some(second.node)).await?;
    let disk = |node: NodeId, of: InstanceId| place.of(node, second.node).join(format!("{of}.qcow2"));
    ensure!(disk(stack.node, first).is_file() && disk(second.node, other).is_file());

    // Volumes are of the storage alone, and lie with one of its nodes.
    let to_second = second.node.to_string();
    done(&stack, &["volume", "create", "data", "--size", "1", "--node", &to_second, "--wait"])?;
    for number in 0..4 {
        done(&stack, &["volume", "create", &format!("any{number}"), "--size", "1", "--wait"])?;
    }
    let data = uuid(&stack, &["volume", "show", "data"], "volume")?;
    is_claimed(data, None).await?;
    ensure!(disk(second.node, data).is_file());
    done(&stack, &["volume", "attach", "data", "other", "--wait"])?;
    done(&stack, &["volume", "extend", "data", "2", "--wait"])?;
    assert_eq!(stack.placement.usages(storage.provider).await?["DISK_GB"], 1 + 1 + 2 + 4);

    // What does not fit says what is short, of which there is something on both.
    let output = stack.eschedule(&["volume", "create", "huge", "--size", "900000"])?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && told.contains("DISK_GB"), "{told}");

    // An agent that is killed finds its own again, and nothing of the other's; a claim that somebody deleted comes back where
    // it was. Meanwhile nothing is copied there, and who asks is told why.
    done(&stack, &["volume", "create", "near", "--size", "1", "--node", &stack.node.to_string(), "--wait"])?;
    stack.kill_agent()?;
    let name = shown(&stack, &["nodes"])?
        .as_array()
        .and_then(|nodes| nodes.iter().find(|node| node["node"] == stack.node.to_string())?["name"].as_str())
        .context("no name")?
        .to_owned();
    stack
        .until("its death is known", async || {
            Ok(stack.store.get(&ec_model::Keyspace::default().alive(stack.node)).await?.0.is_none())
        })
        .await?;
    let output = stack.eschedule(&["volume", "clone", "near", "copy"])?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && told.contains(&format!("not alive: {name}")), "{told}");
    stack.placement.release(first).await?;
    stack.start_agent("").await?;
    stack.until_state(first, State::Active).await?;
    stack
        .until("the claim is back", async || Ok(stack.placement.allocations(first).await?.is_some()))
        .await?;
    is_claimed(first, Some(stack.node)).await?;
    done(&stack, &["volume", "delete", "near", "--wait"])?;
    let listed = shown(&stack, &["list"])?;
    assert_eq!(listed.as_array().map(Vec::len), Some(2), "{listed}");

    // Volumes of a stack come to the instance that is to have them.
    let here = stack.node.to_string();
    for (name, node) in [("near", &here), ("far", &to_second)] {
        let create =
            ["volume", "create", name, "--size", "1", "--node", node, "--label", "stack=shop", "--wait"];
        done(&stack, &create)?;
    }
    let file = stack.directory().join("shop.yaml");
    let text = format!(
        "stack: shop\nvolumes: {{near: {{size: 1}}, far: {{size: 1}}}}\ninstances:\n  db: {{query: \"{GUEST}\", volumes: [near, far]}}\n"
    );
    std::fs::write(&file, text)?;
    let file = file.display().to_string();
    done(&stack, &["apply", "-f", &file])?;
    let db = shown(&stack, &["show", "db"])?;
    for name in ["near", "far"] {
        let shown = shown(&stack, &["volume", "show", name])?;
        assert_eq!((&shown["node"], &shown["instance"]), (&db["node"], &db["instance"]), "{shown}");
    }
    done(&stack, &["destroy", "db", "--wait"])?;
    done(&stack, &["volume", "delete", "near", "far", "--wait"])?;

    // What lies on storage that is not mounted is not taken for gone, though nobody asks for it.
    done(&stack, &["volume", "create", "held", "--size", "1", "--node", &here, "--wait"])?;
    let held = uuid(&stack, &["volume", "show", "held"], "volume")?;
    let request = ec_model::Keyspace::default().request(stack.node, held);
    stack.store.txn(Txn::new().delete(request)).await?;
    let is_unclaimed = async || {
        let status = stack.status_at(stack.node, held).await?;
        Ok(status.is_some_and(|status| status.state == State::Unclaimed))
    };
    stack.until("nobody asks for it", is_unclaimed).await?;
    let (mounted, away) = (place.of(stack.node, second.node), place.path().join("away"));
    std::fs::rename(&mounted, &away)?;
    stack.until("its agent misses the storage", async || Ok(stack.log().contains("where disks are"))).await?;
    // A look that saw nothing would have it swept at once: some more are waited for.
    let failures = async || -> Result<f64> {
        let numbers =
            ec_serve::metrics::parse(&stack.ask_agent("/metrics").await?.1).map_err(anyhow::Error::msg)?;
        Ok(numbers["ecompute_call_failures_total{service=\"libvirt\"}"])
    };
    let before = failures().await?;
    stack.until("it has looked again", async || Ok(failures().await? >= before + 3.0)).await?;
    std::fs::rename(&away, &mounted)?;
    is_claimed(held, None).await?;
    ensure!(is_unclaimed().await?, "it is told of as it was");
    let healed = shown(&stack, &["heal", "--yes"])?;
    ensure!(healed[0]["outcome"] == "healed", "{healed}");
    stack
        .until("it is there again", async || {
            Ok(shown(&stack, &["volume", "show", "held"])?["status"] == "available")
        })
        .await?;
    done(&stack, &["volume", "delete", "held", "--wait"])?;

    done(&stack, &["destroy", "first", "other", "--wait"])?;
    for name in ["data", "any0", "any1", "any2", "any3"] {
        done(&stack, &["volume", "delete", name, "--wait"])?;
    }
    assert_eq!(stack.placement.usages(storage.provider).await?["DISK_GB"], 0);
    for node in [stack.node, second.node] {
        let left: Vec<_> = std::fs::read_dir(place.of(node, second.node))?.collect();
        ensure!(left.is_empty(), "{left:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_goes_to_the_node_of_who_is_to_have_it_whoever_is_killed() -> Result<()> {
    let place = Shared::new()?;
    let (mut stack, second) = two(&place).await?;
    let storage = SharedStorage::named(POOL);
    let (here, there) = (stack.node, second.node);
    let key = stack.key_pair()?;
    for (name, node) in [("first", here), ("other", there)] {
        let public = format!("{key}.pub");
        let run = ["run", name, "--query", TWO, "--node", &node.to_string(), "--key", &public, "--wait"];
        done(&stack, &run)?;
    }
    done(&stack, &["volume", "create", "data", "--size", "1", "--node", &here.to_string(), "--wait"])?;
    let data = uuid(&stack, &["volume", "show", "data"], "volume")?;
    let file = |node: NodeId| place.of(node, second.node).join(format!("{data}.qcow2"));
    let of_guest = async |stack: &Stack, name: &str, command: &str| -> Result<String> {
        let shown = shown(stack, &["show", name])?;
        let ip = shown["ip"].as_str().context("no address")?.parse()?;
        stack.ssh(&key, "root", ip, command).await
    };
    // The tiny guest names no disks: it is the one that comes after its own, a moment after it was given.
    let device =
        "D=/dev/vdb; for i in $(seq 50); do [ -b $D ] && break; sleep 0.2; done; [ -b $D ] || exit 1;";
    done(&stack, &["volume", "attach", "data", "first", "--wait"])?;
    of_guest(&stack, "first", &format!("{device} echo written > $D; sync")).await?;
    let refused = stack.eschedule(&["volume", "move", "data", &there.to_string()])?;
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && told.contains("has volume"), "{told}");
    done(&stack, &["volume", "detach", "data", "--wait"])?;

    done(&stack, &["volume", "attach", "data", "other", "--wait"])?;
    ensure!(!file(here).exists() && file(there).is_file());
    assert_eq!(of_guest(&stack, "other", &format!("{device} head -c 7 $D")).await?, "written");
    let shown_data = shown(&stack, &["volume", "show", "data"])?;
    assert_eq!((&shown_data["node"], &shown_data["status"]), (&there.to_string().into(), &"in-use".into()));
    assert_eq!(stack.placement.usages(storage.provider).await?["DISK_GB"], 3, "claimed once, as before");
    done(&stack, &["volume", "detach", "data", "--wait"])?;

    // Killed at each step of receiving it.
    for point in ["before-announce", "before-receive"] {
        stack.kill_agent()?;
        stack.start_agent(&format!("{point}=pause")).await?;
        done(&stack, &["volume", "move", "data", &here.to_string()])?;
        stack.until_reached(point).await?;
        stack.kill_agent()?;
        stack.start_agent("").await?;
        done(&stack, &["volume", "move", "data", &here.to_string(), "--wait"])?;
        ensure!(file(here).is_file() && !file(there).exists(), "{point}");
        done(&stack, &["volume", "move", "data", &there.to_string(), "--wait"])?;
    }
    done(&stack, &["volume", "move", "data", &here.to_string(), "--wait"])?;
    // And of handing it over.
    for point in ["before-hand-over", "before-forget"] {
        stack.kill_agent()?;
        stack.start_agent(&format!("{point}=pause")).await?;
        done(&stack, &["volume", "move", "data", &there.to_string()])?;
        stack.until_reached(point).await?;
        stack.kill_agent()?;
        stack.start_agent("").await?;
        stack
            .until("the other node has it", async || {
                Ok(shown(&stack, &["volume", "show", "data"])?["status"] == "available")
            })
            .await?;
        ensure!(!file(here).exists() && file(there).is_file(), "{point}");
        ensure!(
            stack.request_at(here, data).await?.is_none() && stack.status_at(here, data).await?.is_none()
        );
        done(&stack, &["volume", "move", "data", &here.to_string(), "--wait"])?;
    }
    // It lies with the other node, which knows nothing of it: as when it was handed over just before an older etcd was put back. To
    // a name that this mount knows already for the same file, a rename does nothing.
    stack.kill_agent()?;
    let moved = format!("{data}.{}.moved.qcow2", Uuid::new_v4());
    std::fs::rename(file(here), place.path().join(there.to_string()).join(moved))?;
    stack.start_agent("").await?;
    stack
        .until("both nodes tell of it", async || {
            let listed = shown(&stack, &["volume", "list"])?;
            let all = listed.as_array().into_iter().flatten();
            let mut told: Vec<_> = all.filter_map(|volume| volume["status"].as_str()).collect();
            told.sort_unstable();
            Ok(told == ["error", "unclaimed"])
        })
        .await?;
    let healed = shown(&stack, &["heal", "--yes"])?;
    ensure!(healed[0]["outcome"] == "healed", "{healed}");
    stack
        .until("it is where it is asked for", async || {
            Ok(shown(&stack, &["volume", "show", "data"])?["status"] == "available")
        })
        .await?;
    ensure!(file(here).is_file() && !file(there).exists());
    assert_eq!(
        shown(&stack, &["volume", "list"])?.as_array().map(Vec::len),
        Some(1),
        "nothing of it is left there"
    );

    // Destroyed on its way: what comes goes.
    stack.kill_agent()?;
    stack.start_agent("before-hand-over=pause").await?;
    done(&stack, &["volume", "move", "data", &there.to_string()])?;
    stack.until_reached("before-hand-over").await?;
    done(&stack, &["volume", "delete", "data"])?;
    stack.kill_agent()?;
    stack.start_agent("").await?;
    stack
        .until("nothing of it is left", async || {
            Ok(!file(here).exists() && !file(there).exists() && stack.request_at(here, data).await?.is_none())
        })
        .await?;
    assert_eq!(stack.placement.usages(storage.provider).await?["DISK_GB"], 2);
    Ok(())
}

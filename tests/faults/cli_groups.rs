//! Groups: where their members go, however many commands place them at once, and what is refused.

use std::{
    collections::BTreeSet,
    process::{Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use ec_model::{Group, InstanceId, NodeId, Policy, decode};
use ec_tests::{
    TINY,
    control::{Control, notified},
};
use serde_json::Value;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(control: &Control, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&control.done(&[arguments, &["-o", "json"]].concat())?)?)
}

/// It is refused in one line with that code.
fn refused(control: &Control, arguments: &[&str], code: i32, wanted: &str) -> Result<()> {
    let output = control.eschedule(arguments)?;
    ensure!(output.status.code() == Some(code), "{arguments:?}: {output:?}");
    let text = error(&output);
    ensure!(text.contains(wanted), "{arguments:?}: {text}");
    ensure!(code == 2 || text.lines().count() == 1, "{text}");
    Ok(())
}

async fn nodes(control: &Control, count: usize) -> Result<Vec<NodeId>> {
    let mut nodes = Vec::new();
    for number in 0..count {
        nodes.push(control.node(&format!("host{number}"), true, PLENTY).await?);
    }
    Ok(nodes)
}

/// Instances with their nodes.
type Placed = Vec<(NodeId, InstanceId)>;

/// So many commands at the same moment; who was placed where, and what the others were told.
fn race(control: &Control, group: &str, count: usize) -> Result<(Placed, Vec<String>)> {
    let children: Vec<_> = (0..count)
        .map(|number| {
            let name = format!("{group}{number}");
            let mut command = control.command(&["run", &name, "--query", TINY, "--group", group]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
        })
        .collect::<Result<_, _>>()?;
    let (mut placed, mut told) = (Vec::new(), Vec::new());
    for child in children {
        let output = child.wait_with_output()?;
        match output.status.code() {
            Some(0) => placed.push(notified(&String::from_utf8(output.stdout)?)?),
            Some(1) => told.push(error(&output)),
            _ => anyhow::bail!("{output:?}"),
        }
    }
    Ok((placed, told))
}

/// What is claimed, requested, recorded and a member is what was placed.
async fn nothing_else(control: &Control, nodes: &[NodeId], placed: &[(NodeId, InstanceId)]) -> Result<()> {
    let mut claimed = BTreeSet::new();
    for node in nodes {
        claimed.extend(control.placement.provider_allocations(*node).await?.into_keys());
    }
    assert_eq!(claimed, placed.iter().map(|(_, instance)| *instance).collect());
    for prefix in ["requests/", "instances/", "names/", "members/"] {
        assert_eq!(control.count(prefix).await?, placed.len(), "{prefix}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_twenty_that_race_for_a_group_over_five_nodes_five_are_placed_apart() -> Result<()> {
    let control = Control::start().await?;
    let nodes = nodes(&control, 5).await?;
    control.done(&["group", "create", "apart", "--policy", "anti-affinity"])?;
    let (placed, told) = race(&control, "apart", 20)?;
    assert_eq!((placed.len(), told.len()), (5, 15), "{told:?}");
    assert_eq!(
        placed.iter().map(|(node, _)| *node).collect::<BTreeSet<_>>(),
        nodes.iter().copied().collect()
    );
    for text in &told {
        ensure!(text.contains("the group `apart` (anti-affinity) leaves no node"), "{text}");
        ensure!(text.lines().count() == 1 && text.contains("each of the 5 that have room"), "{text}");
    }
    nothing_else(&control, &nodes, &placed).await?;
    // Who is destroyed makes room for one.
    control.done(&["destroy", &placed[0].1.to_string()])?;
    let (next, _) = race(&control, "apart", 3)?;
    assert_eq!(next.iter().map(|(node, _)| *node).collect::<Vec<_>>(), [placed[0].0]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_race_for_a_group_with_affinity_are_on_one_node_or_refused() -> Result<()> {
    let control = Control::start().await?;
    let mut nodes = Vec::new();
    for number in 0..3 {
        // Room for four.
        let inventory = [("VCPU", 4), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];
        nodes.push(control.node(&format!("host{number}"), true, &inventory).await?);
    }
    control.configure("strategy: random")?;
    control.done(&["group", "create", "together", "--policy", "affinity"])?;
    let (placed, told) = race(&control, "together", 8)?;
    assert_eq!(placed.iter().map(|(node, _)| *node).collect::<BTreeSet<_>>().len(), 1, "{placed:?}");
    assert_eq!(placed.len(), 4, "{told:?}");
    for text in &told {
        ensure!(text.contains("the group `together` (affinity) leaves no node"), "{text}");
    }
    nothing_else(&control, &nodes, &placed).await
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_made_shown_and_told_of_and_deleted_when_they_are_empty() -> Result<()> {
    let control = Control::start().await?;
    let nodes = nodes(&control, 2).await?;
    assert_eq!(control.done(&["group", "list"])?, "GROUP  POLICY  MEMBERS  CREATED\n");
    control.done(&["group", "create", "Web", "--policy", "soft-anti-affinity"])?;
    let record = control.get(&control.keys.group("default", "web")).await?.context("no group")?;
    let record: Group = decode(&record.value)?;
    assert_eq!((record.name.as_str(), record.policy), ("Web", Policy::SoftAntiAffinity));
    refused(&control, &["group", "create", "web", "--policy", "affinity"], 1, "a group `Web` already")?;
    refused(&control, &["group", "create", "x"], 2, "--policy")?;
    refused(&control, &["group", "create", "x", "--policy", "apart"], 2, "anti-affinity")?;
    refused(&control, &["group", "create", "a/b", "--policy", "affinity"], 2, "wanted 1 to 63")?;
    refused(&control, &["group", "show", "none"], 1, "there is no group `none`")?;
    refused(&control, &["group", "delete", "none"], 1, "there is no group `none`")?;
    refused(&control, &["run", "x", "--query", TINY, "--group", "none"], 1, "there is no group `none`")?;
    refused(&control, &["--group", "web", "list"], 2, "--group")?;
    assert_eq!(control.count("instances/").await?, 0);
    // By both grammars, one on each node.
    let (first, one) = notified(&control.done(&["run", "one", "--query", TINY, "--group", "web"])?)?;
    let preview = json(&control, &["--dry-run", "--group", "web", TINY])?;
    assert_ne!(preview["node"], first.to_string(), "the other comes first");
    let (second, _) = control.schedule(&["--group", "WEB", TINY])?;
    assert_eq!(BTreeSet::from([first, second]), nodes.iter().copied().collect());
    let shown = json(&control, &["group", "show", "web"])?;
    assert_eq!(
        (&shown["policy"], shown["members"].as_array().map(Vec::len)),
        (&"soft-anti-affinity".into(), Some(2))
    );
    ensure!(control.done(&["group", "show", "web"])?.contains(&format!("{one} on {first}")));
    let listed = json(&control, &["group", "list"])?;
    assert_eq!(listed[0]["members"].as_array().map(Vec::len), Some(2));
    assert_eq!(json(&control, &["list"])?[0]["group"], "Web");
    let all = json(&control, &["show", "one"])?;
    assert_eq!((&all["group"], &all["record"]["group"]), (&"Web".into(), &"Web".into()));
    refused(&control, &["group", "delete", "web"], 1, "the group `web` has 2 members")?;
    for view in json(&control, &["list"])?.as_array().into_iter().flatten() {
        control.done(&["destroy", view["instance"].as_str().unwrap_or_default()])?;
    }
    control.done(&["group", "create", "db", "--policy", "affinity"])?;
    assert_eq!(control.done(&["group", "delete", "web", "db"])?, "DELETED GROUP web\nDELETED GROUP db\n");
    assert_eq!((control.count("groups/").await?, control.count("members/").await?), (0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_leaves_no_node_is_told_of_and_one_that_cannot_be_read_is_left_alone() -> Result<()> {
    let control = Control::start().await?;
    control.node("host", true, PLENTY).await?;
    control.done(&["group", "create", "apart", "--policy", "anti-affinity"])?;
    control.done(&["run", "one", "--query", TINY, "--group", "apart"])?;
    let arguments = ["run", "two", "--query", TINY, "--group", "apart"];
    for more in [&[][..], &["--dry-run"]] {
        let output = control.eschedule(&[&arguments[..], more, &["-o", "json"]].concat())?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let told: Value = serde_json::from_slice(&output.stdout)?;
        let group = serde_json::json!({"name": "apart", "policy": "anti-affinity", "nodes": 1});
        assert_eq!((&told["error"], &told["reasons"]["group"]), (&"no allocations left".into(), &group));
    }
    refused(
        &control,
        &arguments,
        1,
        "no allocations left: the group `apart` (anti-affinity) leaves no node",
    )?;
    assert_eq!(control.count("instances/").await?, 1);
    let later = r#"{"version":1,"name":"later","project":"default","policy":"of-later","created_at":"1970-01-01T00:00:00Z"}"#;
    control.put(control.keys.group("default", "later"), later).await?;
    refused(
        &control,
        &["run", "x", "--query", TINY, "--group", "later"],
        1,
        "groups/default/later cannot be read",
    )?;
    assert_eq!(control.done(&["group", "list", "-o", "name"])?, "apart\n");
    assert_eq!(control.count("instances/").await?, 1);
    Ok(())
}

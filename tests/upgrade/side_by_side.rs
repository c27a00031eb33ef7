//! Hosts are upgraded one after the other: an agent and a replica of placement of either release at the same time.

use std::{fs, process::Command};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, Keyspace, State};
use ec_store::Store;
use ec_tests::{PlacementServer, Release, SecondAgent, Stack, TINY};

/// The node of the previous release, with a placement of that release; ended when dropped.
struct Old {
    agent: SecondAgent,
    placement: PlacementServer,
}

impl Old {
    async fn start(stack: &Stack) -> Result<Self> {
        let mut placement = PlacementServer::start(stack.directory(), &stack.etcd.endpoint())?;
        placement.end();
        placement.release = Release::Previous;
        placement.go_on()?;
        placement.until_it_answers().await?;
        let (theirs, own) = (stack.placement_server.endpoint(), placement.endpoint());
        let agent = SecondAgent::start(stack, Release::Previous, |config| config.replace(&theirs, &own))?;
        Ok(Self { agent, placement })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_and_replicas_of_two_releases_are_one_cluster_for_either_command_line() -> Result<()> {
    Release::both_are_there()?;
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let old = Old::start(&stack).await?;
    let keys = Keyspace::default();
    stack
        .until("both nodes are there", async || {
            Ok(stack.store.keys(&keys.all_alive()).await?.len() == 2
                && stack.placement.inventory(old.agent.node).await.is_ok())
        })
        .await?;
    // The previous release's command line speaks with its own replica.
    let config = fs::read_to_string(stack.file("schedule.yaml"))?
        .replace(&stack.placement_server.endpoint(), &old.placement.endpoint());
    fs::write(stack.file("old-schedule.yaml"), config)?;
    let done = |release: Release, arguments: &[&str]| -> Result<String> {
        let file = if release == Release::This { "schedule.yaml" } else { "old-schedule.yaml" };
        let mut command = Command::new(release.program("eschedule"));
        let output = command.arg("--config").arg(stack.file(file)).args(arguments).output()?;
        let log = old.agent.log();
        ensure!(output.status.success(), "{release:?}, {arguments:?}: {output:?}\n{}\n{log}", stack.log());
        Ok(String::from_utf8(output.stdout)?)
    };

    // Each command line, on each node.
    let mut made = Vec::new();
    for release in Release::ALL {
        for node in [old.agent.node, stack.node] {
            let name = format!("guest-{}", made.len());
            let at = node.to_string();
            let told = done(release, &["--wait", "--name", &name, "--node", &at, TINY])?;
            let line = told.lines().next().unwrap_or_default();
            let instance = line.strip_prefix(&format!("NOTIFIED TARGET, {node}, OF INSTANCE "));
            let instance: InstanceId = instance.with_context(|| format!("it said {told}"))?.parse()?;
            let found = stack.status_at(node, instance).await?.map(|status| status.state);
            ensure!(found == Some(State::Active), "{name} is {found:?}");
            made.push((node, instance, name));
        }
    }
    for release in Release::ALL {
        let nodes: serde_json::Value = serde_json::from_str(&done(release, &["-o", "json", "nodes"])?)?;
        let alive = nodes.as_array().into_iter().flatten().filter(|node| node["alive"] == true).count();
        ensure!(alive == 2, "{release:?} tells {nodes}");
        let list: serde_json::Value = serde_json::from_str(&done(release, &["-o", "json", "list"])?)?;
        let active = list.as_array().into_iter().flatten().filter(|it| it["state"] == "ACTIVE").count();
        ensure!(active == made.len(), "{release:?} lists {list}");
    }
    // Who asks the one replica learns of what was claimed at the other.
    for (node, instance, name) in &made {
        for port in [&stack.placement_server, &old.placement] {
            let answer = reqwest::Client::builder().no_proxy().build()?;
            let url = format!("{}/allocations/{instance}", port.endpoint());
            let answer = answer.get(url).header("X-Auth-Token", "admin").send().await?.text().await?;
            ensure!(answer.contains(&node.to_string()), "{name} has no claim: {answer}");
        }
    }
    // Each ends what the other made.
    for (number, (node, instance, name)) in made.iter().enumerate() {
        let release = if number < 2 { Release::This } else { Release::Previous };
        done(release, &["stop", "--grace", "0", "--wait", name])?;
        done(release.other(), &["start", "--wait", name])?;
        done(release, &["destroy", "--wait", name])?;
        ensure!(stack.status_at(*node, *instance).await?.is_none(), "{name} has a status");
    }
    stack.until_exactly(&[]).await?;
    let left = stack.placement.provider_allocations(old.agent.node).await?;
    ensure!(left.is_empty(), "claims are left: {left:?}");
    Ok(())
}

//! Resident memory of agents.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use ec_model::{Desired, InstanceId, NodeId};
use ec_tests::Stack;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    bare::PATIENCE,
    orders::Orders,
    simulated::configure,
    stats::{Figure, Goal, Samples},
};

/// As many as the goal is about.
const INSTANCES: usize = 1000;
/// Requests that arrive at once; more would measure the wait for placement.
const BATCH: usize = 100;
/// The memory is looked at so often, over some seconds: a single look may meet a peak.
const LOOKS: usize = 10;
const BETWEEN: Duration = Duration::from_millis(500);
/// Longer than the agent's period of looking at everything, 30 s: what that brings into memory counts.
const PERIOD: Duration = Duration::from_secs(40);

/// The real agent of the stack, which must run and have no instances yet, after a whole period of idling:
/// just after its start it has less in memory than it goes on with.
pub(crate) async fn idle(stack: &Stack) -> Result<Vec<Figure>> {
    tokio::time::sleep(PERIOD).await;
    let agent = watch(agent_of(stack)?).await?;
    let bare = watch_bare(stack).await?;
    let what = "a process that holds one libvirt connection open and does nothing else";
    Ok(vec![
        Figure {
            bare: Some((what, bare.resident)),
            ..figure("ecompute, idle: resident", agent.resident, vec![Goal::AtMost(20.0)])
        },
        Figure {
            bare: Some((what, bare.own)),
            ..figure("  of it its own (not code of files)", agent.own, vec![])
        },
    ])
}

/// The real agent again, after what it has built and destroyed meanwhile.
pub(crate) async fn used(stack: &Stack) -> Result<Vec<Figure>> {
    let agent = watch(agent_of(stack)?).await?;
    Ok(vec![figure("ecompute, after the builds above", agent.resident, vec![])])
}

fn agent_of(stack: &Stack) -> Result<i32> {
    Ok(i32::try_from(stack.agent_pid().context("no agent runs")?)?)
}

/// What libvirt's own libraries take in any process that uses them.
async fn watch_bare(stack: &Stack) -> Result<Looks> {
    // Cargo puts it beside this program.
    let child = Command::new(std::env::current_exe()?.with_file_name("idle-libvirt"))
        .arg(stack.libvirt.uri())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("failed to start idle-libvirt")?;
    let mut process = Process(child);
    let mut line = String::new();
    let stdout = process.0.stdout.take().context("idle-libvirt has no output")?;
    tokio::task::block_in_place(|| BufReader::new(stdout).read_line(&mut line))?;
    ensure!(line == "connected\n", "idle-libvirt has no connection: {:?}", process.0.try_wait()?);
    watch(process.pid()?).await
}

/// An agent of its own process with simulated guests: with none, and with a thousand.
pub(crate) async fn simulated(stack: &Stack) -> Result<Vec<Figure>> {
    let node = NodeId::new(uuid::Uuid::new_v4());
    let orders = Orders::new(stack, node, &[("VCPU", 1), ("MEMORY_MB", 1)]).await?;
    let directory = tempfile::tempdir()?;
    let config =
        configure(directory.path(), node, &stack.etcd.endpoint(), &stack.placement_server.endpoint())?;
    let child = Command::new(std::env::current_exe()?)
        .args(["agent-simulated".as_ref(), config.as_os_str()])
        .stdin(Stdio::null())
        .spawn()
        .context("failed to start the simulated agent")?;
    let mut agent = Process(child);
    orders.until_alive().await?;
    let pid = agent.pid()?;
    let none = watch(pid).await?;
    let instances: Vec<InstanceId> = (0..INSTANCES).map(|_| Orders::instance()).collect();
    for (number, batch) in instances.chunks(BATCH).enumerate() {
        orders.claim(batch).await?;
        for instance in batch {
            orders.order(*instance, Desired::Active).await?;
        }
        orders.until_active(number * BATCH + batch.len()).await?;
    }
    let thousand = watch(pid).await?;
    agent.end().await?;
    Ok(vec![
        figure("agent with no simulated instance: resident", none.resident, vec![]),
        figure("  of it its own", none.own, vec![]),
        figure("agent with 1,000 simulated instances: resident", thousand.resident, vec![]),
        figure("  of it its own", thousand.own, vec![]),
    ])
}

/// Killed when dropped.
struct Process(Child);

impl Process {
    fn pid(&self) -> Result<i32> {
        Ok(i32::try_from(self.0.id())?)
    }

    /// Asks it to end in good order, and waits until it has.
    async fn end(&mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid()?), Signal::SIGTERM)?;
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            match self.0.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("the simulated agent ended with {status}"),
                None if tokio::time::Instant::now() > deadline => bail!("the simulated agent does not end"),
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // After an end in good order there is nothing left to kill.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn figure(name: &'static str, ours: Samples, goals: Vec<Goal>) -> Figure {
    Figure { name, unit: "MB", ours, bare: None, goals }
}

/// A process's memory over some seconds, in millions of bytes.
#[derive(Default)]
struct Looks {
    /// All that is mapped and in memory, code and shared libraries included.
    resident: Samples,
    /// What is in no file: heap, stacks, written data.
    own: Samples,
}

async fn watch(pid: i32) -> Result<Looks> {
    let mut looks = Looks::default();
    for _ in 0..LOOKS {
        tokio::time::sleep(BETWEEN).await;
        let path = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&path).with_context(|| format!("failed to read {path}"))?;
        looks.resident.push(megabytes(&text, "VmRSS:")?);
        looks.own.push(megabytes(&text, "RssAnon:")?);
    }
    Ok(looks)
}

fn megabytes(status: &str, key: &str) -> Result<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let kib: Option<f64> = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    Ok(kib.with_context(|| format!("no {key} in a process's status"))? * 1024.0 / 1e6)
}

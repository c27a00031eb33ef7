//! Resident memory of the agent: idle with the real libvirt, and with many simulated instances.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use ec_model::{Desired, ImageRef, InstanceId, Keyspace, RECORD_VERSION, Request, Resources, State, encode};
use ec_store::{Store, Txn};
use ec_tests::{Stack, tiny_image};
use serde_json::json;

use crate::figures::Memory;

const IDLE_GOAL_MIB: f64 = 20.0;
/// What the agent does at its start settles in this time.
const SETTLE: Duration = Duration::from_secs(10);
/// Consumers in one request to placement.
const CLAIMS: usize = 100;

/// The shipped agent, with nothing to do.
pub(crate) async fn idle(stack: &mut Stack) -> Result<Memory> {
    stack.start_agent("").await?;
    tokio::time::sleep(SETTLE).await;
    let mib = resident_mib(stack.agent_pid().context("no agent")?)?;
    stack.end_agent()?;
    Ok(Memory { what: "idle agent", mib, goal_mib: Some(IDLE_GOAL_MIB) })
}

/// The agent as a process of its own, with this many instances up on a simulated hypervisor.
pub(crate) async fn loaded(stack: &Stack, instances: usize) -> Result<Memory> {
    let config = stack.directory().join("compute.yaml");
    let agent = Agent(
        Command::new(std::env::current_exe()?)
            .args(["agent", &config.display().to_string()])
            .stdout(Stdio::null())
            .env("RUST_LOG", "warn")
            .spawn()?,
    );
    let keys = Keyspace::default();
    stack
        .until("the agent is alive", async || Ok(stack.store.get(&keys.node(stack.node)).await?.0.is_some()))
        .await?;
    let ids: Vec<_> = (0..instances).map(|_| InstanceId::new(uuid::Uuid::new_v4())).collect();
    for some in ids.chunks(CLAIMS) {
        claim(stack, some).await?;
        for instance in some {
            let request = keys.request(stack.node, *instance);
            stack.store.txn(Txn::new().put(request, encode(&wish(*instance)))).await?;
        }
        stack
            .until("these are up", async || {
                let listing = stack.store.list(&keys.statuses(stack.node)).await?;
                let up = listing.pairs.iter().filter(|pair| {
                    ec_model::decode::<ec_model::Status>(&pair.value)
                        .is_ok_and(|status| status.state == State::Active)
                });
                let done = ids.iter().position(|id| Some(id) == some.last()).unwrap_or(0) + 1;
                Ok(up.count() == done)
            })
            .await?;
    }
    tokio::time::sleep(SETTLE).await;
    let mib = resident_mib(agent.0.id())?;
    Ok(Memory { what: "agent with 1,000 simulated instances", mib, goal_mib: None })
}

/// Ended when dropped, also after a failure.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

async fn claim(stack: &Stack, instances: &[InstanceId]) -> Result<()> {
    let claims: serde_json::Map<_, _> = instances
        .iter()
        .map(|instance| {
            let resources = json!({ "resources": { "VCPU": 1, "MEMORY_MB": 8 } });
            let allocations = serde_json::Map::from_iter([(stack.node.to_string(), resources)]);
            let claim = json!({
                "allocations": allocations, "consumer_generation": null, "project_id": "bench",
                "user_id": "bench", "consumer_type": "INSTANCE",
            });
            (instance.to_string(), claim)
        })
        .collect();
    reqwest::Client::builder()
        .tls_certs_only([])
        .build()?
        .post(format!("{}/allocations", stack.placement_server.endpoint()))
        .header("X-Auth-Token", "admin")
        .header("OpenStack-API-Version", "placement 1.39")
        .json(&claims)
        .send()
        .await?
        .error_for_status()?;
    Ok(())
}

fn wish(instance: InstanceId) -> Request {
    Request {
        version: RECORD_VERSION,
        instance,
        desired: Desired::Active,
        name: None,
        resources: Resources::new(),
        image: Some(ImageRef { url: format!("file://{}", tiny_image().display()), sha256: None }),
        keys: Vec::new(),
        user_data: None,
        project: "bench".to_owned(),
        user: "bench".to_owned(),
        created_at: jiff::Timestamp::now(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "kilobytes are far below what a double counts")]
fn resident_mib(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/status");
    let text = fs::read_to_string(Path::new(&path))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib as f64 / 1024.0)
}

//! Two agents on one host, each with its own state, guests and libvirt network or the same one.

use std::{
    fs,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_guard::ports::tap_name;
use ec_model::{InstanceId, Keyspace, NodeId, State, Status, decode};
use ec_store::Store;
use ec_tests::{Stack, TINY};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// The second agent; killed on drop.
struct Second {
    agent: Child,
    node: NodeId,
}

impl Drop for Second {
    fn drop(&mut self) {
        self.agent.kill().ok();
        self.agent.wait().ok();
    }
}

impl Second {
    fn start(stack: &Stack) -> Result<Self> {
        let node = NodeId::new(uuid::Uuid::new_v4());
        let directory = stack.directory();
        let first = fs::read_to_string(directory.join("compute.yaml"))?;
        let config =
            first.replace(&stack.node.to_string(), &node.to_string()).replace("/state\n", "/state2\n")
                + "traits: [CUSTOM_SECOND]\n";
        ensure!(config.contains("/state2"), "{config}");
        fs::write(directory.join("second.yaml"), config)?;
        let mut command = std::process::Command::new(ec_tests::program("ecompute"));
        command.arg("--config").arg(directory.join("second.yaml"));
        let log = fs::File::create(directory.join("second.log"))?;
        Ok(Self { agent: command.stdout(Stdio::null()).stderr(log).spawn()?, node })
    }

    /// Schedules a guest on it, and waits for its address.
    async fn guest(&self, stack: &Stack, public: &str) -> Result<(InstanceId, std::net::IpAddr)> {
        let mut told = String::new();
        stack
            .until("the second agent takes a guest", async || {
                let query = format!("{TINY}&required=CUSTOM_SECOND");
                let output = stack.eschedule(&["--name", "second", "--key", public, &query])?;
                Ok(output.status.success().then(|| String::from_utf8(output.stdout)).transpose()?.is_some())
            })
            .await?;
        let requests = stack.store.list(&Keyspace::default().requests(self.node)).await?.pairs;
        for pair in &requests {
            told = pair.key.rsplit('/').next().unwrap_or_default().to_owned();
        }
        let instance: InstanceId = told.parse()?;
        let status = async || -> Result<Option<Status>> {
            let key = Keyspace::default().status(self.node, instance);
            Ok(stack.store.get(&key).await?.0.map(|pair| decode(&pair.value)).transpose()?)
        };
        stack
            .until("the second agent's guest is up", async || {
                Ok(status().await?.is_some_and(|status| status.state == State::Active))
            })
            .await?;
        Ok((instance, status().await?.and_then(|status| status.ip).context("no address")?))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn both_give_their_guests_metadata_and_neither_takes_the_others_rules_away() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let key = stack.key_pair()?;
    let public = format!("{key}.pub");
    let first = stack.schedule(&["--name", "first", "--key", &public])?;
    let first_ip = stack.until_state(first, State::Active).await?.ip.context("no address")?;
    let second = Second::start(&stack)?;
    let (instance, second_ip) = second.guest(&stack, &public).await?;

    let names = async || -> Result<[String; 2]> {
        let ask = "timeout 5 wget -q -O - http://169.254.169.254/latest/meta-data/local-hostname || true";
        Ok([stack.ssh(&key, "root", first_ip, ask).await?, stack.ssh(&key, "root", second_ip, ask).await?])
    };
    assert_eq!(names().await?, ["first", "second"]);
    let taps = [first, instance].map(|instance| tap_name(instance.mac(0)));
    let held = || -> Result<bool> {
        let output =
            std::process::Command::new("nft").args(["list", "set", "bridge", "ecompute", "taps"]).output()?;
        let text = String::from_utf8(output.stdout)?;
        Ok(taps.iter().all(|tap| text.contains(tap)))
    };
    assert!(held()?);

    // The one that answers is killed: the other takes over, for the guests of both.
    let pid = stack.agent_pid().context("no agent")?;
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    stack.until("the other one answers both", async || Ok(names().await? == ["first", "second"])).await?;
    // It has looked after the rules by then, and left those of the dead one's guest.
    tokio::time::sleep(Duration::from_secs(35)).await;
    assert!(held()?);
    assert_eq!(names().await?, ["first", "second"]);
    Ok(())
}

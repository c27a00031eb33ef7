//! Two agents on one host, each with its own state, guests and libvirt network or the same one.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, Result};
use ec_guard::ports::tap_name;
use ec_model::{InstanceId, Keyspace, State};
use ec_store::Store;
use ec_tests::{Release, SecondAgent, Stack, TINY};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// The second agent alone has this trait.
const SECOND: &str = "CUSTOM_SECOND";

/// Schedules a guest on the second agent's node, and waits for its address.
async fn guest_at(stack: &Stack, second: &SecondAgent, public: &str) -> Result<(InstanceId, IpAddr)> {
    let query = format!("{TINY}&required={SECOND}");
    stack
        .until("the second agent takes a guest", async || {
            Ok(stack.eschedule(&["--name", "second", "--key", public, &query])?.status.success())
        })
        .await?;
    let keys = Keyspace::default();
    let requests = stack.store.keys(&keys.requests(second.node)).await?;
    let (_, instance) = keys.parse_request(requests.first().context("no request")?)?;
    stack
        .until("the second agent's guest is up", async || {
            let status = stack.status_at(second.node, instance).await?;
            Ok(status.is_some_and(|status| status.state == State::Active))
        })
        .await?;
    let status = stack.status_at(second.node, instance).await?.context("no status")?;
    Ok((instance, status.ip.context("no address")?))
}

#[tokio::test(flavor = "multi_thread")]
async fn both_give_their_guests_metadata_and_neither_takes_the_others_rules_away() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let key = stack.key_pair()?;
    let public = format!("{key}.pub");
    let first = stack.schedule(&["--name", "first", "--key", &public])?;
    let first_ip = stack.until_state(first, State::Active).await?.ip.context("no address")?;
    let of_its_own = |config| format!("{config}traits: [{SECOND}]\n");
    let second = SecondAgent::start(&stack, Release::This, of_its_own)?;
    let (instance, second_ip) = guest_at(&stack, &second, &public).await?;

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

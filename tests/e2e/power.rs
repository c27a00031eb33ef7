//! What users wish of a guest's power, on real guests: what it keeps, and what begins anew.

use anyhow::{Context, Result};
use ec_model::{InstanceId, State};
use ec_tests::{Stack, TINY};
use nix::sys::signal::Signal;

/// A guest that somebody can log in to, with a file that it wrote.
pub(crate) struct Guest {
    pub(crate) stack: Stack,
    key: String,
    pub(crate) instance: InstanceId,
}

impl Guest {
    pub(crate) async fn up(more: &[&str]) -> Result<Self> {
        Self::up_as(TINY, more).await
    }

    pub(crate) async fn up_as(query: &str, more: &[&str]) -> Result<Self> {
        let mut stack = Stack::start().await?;
        stack.start_agent("").await?;
        Self::up_on(stack, query, more).await
    }

    /// The same where an agent is already.
    pub(crate) async fn up_on(stack: Stack, query: &str, more: &[&str]) -> Result<Self> {
        let key = stack.key_pair()?;
        let public = format!("{key}.pub");
        let arguments = [&["--wait", "--name", "web", "--key", &public], more].concat();
        let instance = stack.schedule_as(query, &arguments)?;
        let guest = Self { stack, key, instance };
        // Behind all that its image has.
        guest.run("echo precious | dd of=/dev/vda bs=1M seek=500 conv=fsync").await?;
        Ok(guest)
    }

    /// One that is there already, by its name and the public key that it was given.
    pub(crate) fn of(stack: Stack, public: &str, name: &str) -> Result<Self> {
        let shown = stack.eschedule(&["show", name, "-o", "json"])?;
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout)?;
        let instance = shown["instance"].as_str().context("it has a uuid")?.parse()?;
        Ok(Self { stack, key: public.trim_end_matches(".pub").to_owned(), instance })
    }

    /// The private key that lets in; the public one has `.pub` behind it.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) async fn run(&self, command: &str) -> Result<String> {
        self.stack.ssh_to(&self.key, "root", self.instance, command).await
    }

    /// What it wrote to its disk.
    pub(crate) async fn kept(&self) -> Result<String> {
        self.run("dd if=/dev/vda bs=1M skip=500 count=1 | head -n 1").await
    }

    /// Which boot of its kernel this is.
    pub(crate) async fn boot(&self) -> Result<String> {
        self.run("cat /proc/sys/kernel/random/boot_id").await
    }

    pub(crate) fn asks(&self, arguments: &[&str]) -> Result<String> {
        let output = self.stack.eschedule(arguments)?;
        anyhow::ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// What was done to it: verb, outcome, state and detail of each, `-` for what is not told.
    pub(crate) fn events(&self) -> Result<Vec<String>> {
        let text = self.asks(&["events", &self.instance.to_string(), "-o", "json"])?;
        let told: Vec<serde_json::Value> = serde_json::from_str(&text)?;
        let word = |it: &serde_json::Value, key: &str| it[key].as_str().unwrap_or("-").to_owned();
        let line = |it| ["verb", "outcome", "state", "detail"].map(|key| word(it, key)).join(" ");
        Ok(told.iter().map(line).collect())
    }

    /// Waits until its restart policy has started it so often in a row.
    async fn is_started_again(&self, times: u32) -> Result<()> {
        let is_up = async || {
            let status = self.stack.status(self.instance).await?.context("it is told")?;
            Ok(status.restarts == times && status.state == State::Active)
        };
        self.stack.until("the guest is started again", is_up).await
    }

    /// How libvirt has it: running, paused, shut off.
    fn is_active(&self) -> Result<bool> {
        let domain = self.stack.libvirt.connection().lookup_domain_by_name(&self.instance.to_string())?;
        Ok(domain.is_active()?)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_stopped_started_and_rebooted_and_keeps_what_it_wrote() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    let first = guest.boot().await?;
    assert_eq!(
        guest.asks(&["stop", "--wait", "web"])?,
        format!("STOPPED INSTANCE {} ON {}\n", guest.instance, guest.stack.node)
    );
    assert!(!guest.is_active()?);
    let status = guest.stack.status(guest.instance).await?.context("it is told")?;
    assert_eq!((status.state, status.reason), (State::Stopped, None), "it heard, and ended by itself");
    let refused = guest.stack.eschedule(&["pause", "web"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let already = guest.asks(&["stop", "web"])?;
    assert!(already.starts_with("NOTHING TO DO"), "{already}");

    guest.asks(&["start", "--wait", "web"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    let second = guest.boot().await?;
    assert_ne!(second, first);
    guest.asks(&["reboot", "--wait", "web"])?;
    let third = guest.boot().await?;
    assert_ne!(third, second);
    guest.asks(&["reboot", "--hard", "--wait", "web"])?;
    assert_ne!(guest.boot().await?, third);
    assert_eq!(guest.kept().await?.trim(), "precious");
    assert_eq!(
        guest.events()?,
        [
            "create done ACTIVE -",
            "stop done STOPPED grace 60 s",
            "start done ACTIVE -",
            "reboot done ACTIVE grace 60 s",
            "reboot done ACTIVE hard"
        ]
    );
    guest.stack.until_exactly(&[guest.instance]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_goes_on_where_it_was_paused_or_suspended_also_after_libvirt_was_started_anew() -> Result<()>
{
    let mut guest = Guest::up(&[]).await?;
    let boot = guest.boot().await?;
    guest.asks(&["pause", "--wait", "web"])?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    guest.stack.until_state(guest.instance, State::Paused).await?;
    guest.asks(&["unpause", "--wait", "web"])?;
    assert_eq!(guest.boot().await?, boot);

    guest.asks(&["suspend", "--wait", "web"])?;
    assert!(!guest.is_active()?);
    guest.stack.libvirt.kill_daemon();
    guest.stack.libvirt.start_daemon();
    guest.stack.until_state(guest.instance, State::Suspended).await?;
    let refused = guest.stack.eschedule(&["start", "web"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    guest.asks(&["resume", "--wait", "web"])?;
    assert_eq!(guest.boot().await?, boot, "its memory was kept");

    guest.asks(&["suspend", "--wait", "web"])?;
    guest.asks(&["reboot", "--hard", "--wait", "web"])?;
    assert_ne!(guest.boot().await?, boot, "its memory is gone");
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.asks(&["destroy", "--wait", "web"])?;
    assert_eq!(guest.events()?.last().map(String::as_str), Some("delete done - -"));
    guest.stack.until_exactly(&[]).await
}

/// The host loses its power: who ran runs again, who was stopped or suspended is that still.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_power_cut_guests_are_as_they_were_wanted_with_what_they_wrote() -> Result<()> {
    let mut guest = Guest::up(&[]).await?;
    let (boot, web) = (guest.boot().await?, guest.instance);
    let stopped = guest.stack.schedule(&["--wait", "--name", "db"])?;
    let suspended = guest.stack.schedule(&["--wait", "--name", "mail"])?;
    guest.asks(&["stop", "--grace", "0", "--wait", "db"])?;
    guest.asks(&["suspend", "--wait", "mail"])?;

    guest.stack.kill_agent()?;
    guest.stack.libvirt.cut_power();
    guest.stack.libvirt.power_on();
    guest.stack.start_agent("").await?;
    // Its process is gone; its status says ACTIVE until its agent has looked.
    guest
        .stack
        .until("the guest that ran runs again", async || {
            Ok(guest.stack.libvirt.guest_process(web).is_some() && guest.is_active()?)
        })
        .await?;
    guest.stack.until_state(web, State::Active).await?;
    assert_ne!(guest.boot().await?, boot);
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.stack.until_state(stopped, State::Stopped).await?;
    guest.stack.until_state(suspended, State::Suspended).await?;
    assert_eq!(guest.stack.libvirt.guest_process(stopped), None);
    guest.asks(&["resume", "--wait", "mail"])?;
    guest.stack.until_exactly(&[web, stopped, suspended]).await
}

/// Its hypervisor's process is killed, as by the kernel when memory runs out; then its own kernel panics, and would boot anew by itself
/// after five seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_process_is_killed_or_whose_kernel_panics_is_started_again_by_its_policy() -> Result<()>
{
    let guest = Guest::up(&["--restart", "on-failure", "--label", "role=web"]).await?;
    let boot = guest.boot().await?;
    let pid = guest.stack.libvirt.guest_process(guest.instance).context("it runs")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL)?;
    guest.is_started_again(1).await?;
    let second = guest.boot().await?;
    assert_ne!(second, boot);
    assert_eq!(guest.kept().await?.trim(), "precious");
    let events = guest.events()?;
    assert_eq!(events.first().map(String::as_str), Some("create done ACTIVE -"));
    // Where its agent saw it ended before it started it again, that stands between.
    assert!(events[1..].contains(&"- - ACTIVE restart 1".to_owned()), "{events:?}");

    // Behind what logs in, which hears no end of it.
    guest.run("(sleep 1; echo c >/proc/sysrq-trigger) </dev/null >/dev/null 2>&1 &").await?;
    guest.is_started_again(2).await?;
    assert_ne!(guest.boot().await?, second);
    assert_eq!(guest.kept().await?.trim(), "precious");
    let events = guest.events()?;
    assert!(events.contains(&"- - ACTIVE restart 2".to_owned()), "{events:?}");
    let told = guest.asks(&["events", "web"])?;
    assert!(told.contains("crashed (a kernel panic)"), "{told}");
    Ok(())
}

/// Has the guest's process stand still, as one does whose disk is on storage that is gone.
fn stands_still(guest: &Guest) -> Result<()> {
    let pid = guest.stack.libvirt.guest_process(guest.instance).context("it runs")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGSTOP)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_stands_still_is_ended_when_its_grace_is_over_and_keeps_what_it_wrote() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    stands_still(&guest)?;
    guest.asks(&["stop", "--grace", "20", "--wait", "web"])?;
    let status = guest.stack.status(guest.instance).await?.context("it is told")?;
    assert_eq!(status.state, State::Stopped);
    guest.asks(&["start", "--wait", "web"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_guest_that_stands_still_lets_its_user_end_it_and_goes_on_then() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    guest.asks(&["volume", "create", "data", "--size", "1", "--for", "web", "--wait"])?;
    guest.asks(&["volume", "attach", "data", "web", "--wait"])?;
    stands_still(&guest)?;
    guest.asks(&["volume", "detach", "data"])?;
    let is_at_it =
        async || Ok(guest.stack.status(guest.instance).await?.is_some_and(|is| is.volumes_changing));
    guest.stack.until("its agent is at it", is_at_it).await?;
    guest.asks(&["pause", "web"])?;
    // So that the call hangs, of which nothing tells, here as below: who ends it waits for libvirt to end it, and for no such call.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    guest.asks(&["stop", "--grace", "0", "--wait", "--timeout", "25", "web"])?;
    guest.asks(&["start", "--wait", "web"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    stands_still(&guest)?;
    guest.asks(&["resize", "web", "resources=VCPU:2,MEMORY_MB:192,DISK_GB:2"])?;
    tokio::time::sleep(std::time::Duration::from_secs(10)).await;
    guest.asks(&["reboot", "--hard", "--wait", "web"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    assert_eq!(guest.run("grep -c ^processor /proc/cpuinfo").await?.trim(), "2");
    Ok(())
}

//! virsh and virt-install at the same guests as our verbs, at random: nothing of ours breaks, nothing of theirs is undone
//! without a word.

use std::{
    process::{Command, Output},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State, Status};
use ec_tests::{Stack, tiny_image};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Rounds of one thing each; a longer run by hand says `ROUNDS`, and another `SEED`.
const ROUNDS: u32 = 24;
const SEED: u64 = 2_229_567_890_719_830_677;
const OURS: [&str; 2] = ["one", "two"];
const FOREIGN: &str = "foreign";

/// What users ask of us. Refused is as good as done.
const ASKED: [&[&str]; 10] = [
    &["start"],
    &["stop", "--grace", "2"],
    &["stop", "--grace", "0"],
    &["reboot", "--hard"],
    &["pause"],
    &["unpause"],
    &["suspend"],
    &["resume"],
    &["rescue"],
    &["unrescue"],
];

/// What an operator does on the host, of a domain. Failed is as good as done.
const DONE: [&[&str]; 15] = [
    &["start"],
    &["destroy"],
    &["shutdown"],
    &["reset"],
    &["reboot"],
    &["suspend"],
    &["resume"],
    &["managedsave"],
    &["undefine"],
    &["undefine", "--managed-save"],
    &["setmem", "--live", "--size", "100M"],
    &["attach-disk", "--source", "DISK", "--target", "vdz", "--live"],
    &["detach-disk", "--target", "vdz", "--live"],
    &["snapshot-create-as", "--name", "theirs"],
    &["snapshot-delete", "--snapshotname", "theirs"],
];

struct Cloud {
    stack: Stack,
    key: String,
    guests: [InstanceId; 2],
}

impl Cloud {
    async fn up() -> Result<Self> {
        let mut stack = Stack::start().await?;
        stack.start_agent("").await?;
        let key = stack.key_pair()?;
        let public = format!("{key}.pub");
        let [one, two] = OURS.map(|name| stack.schedule(&["--wait", "--name", name, "--key", &public]));
        let cloud = Self { stack, key, guests: [one?, two?] };
        for (guest, name) in cloud.guests.into_iter().zip(OURS) {
            cloud.run(guest, &format!("echo {name} | dd of=/dev/vda bs=1M seek=500 conv=fsync")).await?;
        }
        cloud.stack.until_exactly(&sorted(cloud.guests)).await?;
        Ok(cloud)
    }

    async fn run(&self, guest: InstanceId, command: &str) -> Result<String> {
        self.stack.ssh_to(&self.key, "root", guest, command).await
    }

    /// A guest of somebody else's, on the same libvirt.
    fn add_foreigner(&self) -> Result<()> {
        let disk = self.stack.directory().join("foreign.qcow2");
        std::fs::copy(tiny_image(), &disk)?;
        let network = format!("network={}", self.stack.libvirt.network());
        let disk = format!("path={},format=qcow2", disk.display());
        let made = Command::new("virt-install")
            .args(["--connect", self.stack.libvirt.uri(), "--name", FOREIGN, "--virt-type", "qemu"])
            .args(["--memory", "128", "--vcpus", "1", "--import", "--disk", &disk, "--network", &network])
            .args(["--osinfo", "detect=off,require=off", "--graphics", "none", "--noautoconsole"])
            .output()
            .context("virt-install")?;
        ensure!(made.status.success(), "virt-install: {made:?}");
        Ok(())
    }

    fn virsh(&self, arguments: &[&str]) -> Result<Output> {
        Command::new("virsh")
            .args(["-q", "-c", self.stack.libvirt.uri()])
            .args(arguments)
            .output()
            .context("virsh")
    }

    /// What libvirt answers of a domain.
    fn virsh_says(&self, arguments: &[&str]) -> Result<String> {
        let output = self.virsh(arguments)?;
        ensure!(output.status.success(), "virsh {arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// How others' guest is defined, that it runs, and since which start.
    fn foreigner(&self) -> Result<[String; 3]> {
        Ok([
            self.virsh_says(&["dumpxml", "--inactive", FOREIGN])?,
            self.virsh_says(&["domstate", FOREIGN])?,
            self.virsh_says(&["domid", FOREIGN])?,
        ])
    }

    /// What is changed of how it is defined stays over the next start; but its size is what is claimed, and that is told.
    fn keeps_what_is_changed(&self, guest: InstanceId, disk: &str) -> Result<()> {
        let name = guest.to_string();
        let defined = || self.virsh_says(&["dumpxml", "--inactive", &name]);
        let memory = |document: &str| {
            let line = document.lines().find(|line| line.contains("<memory ")).map(str::trim);
            line.map(str::to_owned).context("it has memory")
        };
        let claimed = memory(&defined()?)?;
        self.virsh_says(&["attach-disk", &name, "--source", disk, "--target", "vdy", "--config"])?;
        self.virsh_says(&["setmaxmem", &name, "--size", "300M", "--config"])?;
        ensure!(memory(&defined()?)? != claimed, "it is defined with more");
        for verb in [&["stop", "--grace", "0"][..], &["start"]] {
            let asked = self.stack.eschedule(&[verb, &["--wait", &name]].concat())?;
            ensure!(asked.status.success(), "{verb:?}: {asked:?}\n{}", self.stack.log());
        }
        let document = defined()?;
        ensure!(document.contains("dev='vdy'"), "their disk is gone: {document}");
        ensure!(memory(&document)? == claimed, "it has more than is claimed: {document}");
        ensure!(self.stack.log().contains("and 300 MiB of memory, and has"), "{}", self.stack.log());
        Ok(())
    }

    /// Somebody calls its domain otherwise: what becomes of it is seen at once all the same, and it is rescued. That memory which was
    /// saved is gone is told before it boots anew.
    async fn is_called_otherwise(&self, guest: InstanceId) -> Result<()> {
        let name = guest.to_string();
        let asks = |verb: &[&str]| -> Result<()> {
            let asked = self.stack.eschedule(&[verb, &["--wait", &name]].concat())?;
            ensure!(asked.status.success(), "{verb:?}: {asked:?}\n{}", self.stack.log());
            Ok(())
        };
        asks(&["stop", "--grace", "0"])?;
        self.virsh_says(&["domrename", &name, "another"])?;
        asks(&["start"])?;
        let ended = Instant::now();
        self.virsh_says(&["destroy", &name])?;
        self.stack.until_state(guest, State::Stopped).await?;
        // All is looked at twice a minute, whatever libvirt tells.
        ensure!(ended.elapsed() < Duration::from_secs(15), "nobody heard of it");
        asks(&["rescue"])?;
        asks(&["unrescue"])?;
        asks(&["suspend"])?;
        self.virsh_says(&["managedsave-remove", &name])?;
        asks(&["resume"])?;
        let events = self.stack.eschedule(&["events", &name])?;
        let events = String::from_utf8(events.stdout)?;
        ensure!(events.contains("its saved memory is gone"), "{events}\n{}", self.stack.log());
        asks(&["stop", "--grace", "0"])?;
        self.virsh_says(&["domrename", &name, &name])?;
        asks(&["start"])
    }

    /// What libvirt says of it and what is told agree. What is only under way never agrees.
    async fn agrees(&self, guest: InstanceId) -> Result<Status> {
        let status = self.stack.status(guest).await?.context("nothing is told of it")?;
        let said = self.virsh_says(&["domstate", &guest.to_string()])?;
        let saved = self.virsh_says(&["dominfo", &guest.to_string()])?.contains("Managed save:   yes");
        let said = said.trim();
        let agrees = match status.state {
            State::Active | State::Rescued => said == "running",
            State::Paused => said == "paused",
            State::Stopped => said == "shut off" && !saved,
            State::Suspended => said == "shut off" && saved,
            _ => false,
        };
        ensure!(agrees, "it is {said}, saved: {saved}, and told: {status:?}");
        Ok(status)
    }

    /// Whatever became of it, its user has it running again from its own disk by verbs alone.
    async fn bring_back(&self, guest: InstanceId) -> Result<()> {
        let name = guest.to_string();
        let deadline = Instant::now() + Duration::from_secs(240);
        loop {
            self.stack.until("told is what is", async || Ok(self.agrees(guest).await.is_ok())).await?;
            let status = self.agrees(guest).await;
            let Ok(status) = status else { continue };
            let verb: &[&str] = match status.state {
                _ if status.is_rescued() => &["unrescue"],
                State::Active => return Ok(()),
                State::Paused => &["unpause"],
                State::Suspended => &["resume"],
                _ => &["start"],
            };
            let asked = self.stack.eschedule(&[verb, &["--wait", &name]].concat())?;
            ensure!(Instant::now() < deadline, "{verb:?}: {asked:?}\n{}", self.stack.log());
        }
    }
}

fn sorted(mut guests: [InstanceId; 2]) -> [InstanceId; 2] {
    guests.sort_unstable();
    guests
}

fn number(name: &str) -> Result<Option<u64>> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse())
        .transpose()
        .with_context(|| format!("{name} is a number"))
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_others_do_to_guests_is_told_and_costs_nobody_a_disk() -> Result<()> {
    let seed = number("SEED")?.unwrap_or(SEED);
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let cloud = Cloud::up().await?;
    cloud.add_foreigner()?;
    let foreigner = cloud.foreigner()?;
    assert_eq!(foreigner[1].trim(), "running");
    let theirs = cloud.stack.directory().join("theirs.raw");
    std::fs::File::create(&theirs)?.set_len(1 << 20)?;
    let theirs = theirs.display().to_string();
    for round in 0..number("ROUNDS")?.map_or(ROUNDS, |rounds| u32::try_from(rounds).unwrap_or(u32::MAX)) {
        let guest = cloud.guests[random.random_range(0..2)].to_string();
        if random.random_bool(0.5) {
            let verb = ASKED[random.random_range(0..ASKED.len())];
            let asked = cloud.stack.eschedule(&[verb, &[&guest]].concat())?;
            println!("round {round}: eschedule {verb:?} {guest}: {:?}", asked.status.code());
            let said = String::from_utf8_lossy(&asked.stderr);
            ensure!(matches!(asked.status.code(), Some(0 | 1)) && !said.contains("panic"), "{asked:?}");
        } else {
            let verb = DONE[random.random_range(0..DONE.len())].iter();
            let verb: Vec<&str> = verb.map(|word| if *word == "DISK" { &theirs } else { *word }).collect();
            let done = cloud.virsh(&[&[verb[0], "--domain", &guest], &verb[1..]].concat())?;
            println!("round {round}: virsh {verb:?} {guest}: {:?}", done.status.code());
        }
        // No state is waited for: whatever is under way is disturbed.
        tokio::time::sleep(Duration::from_millis(random.random_range(0..3000))).await;
    }
    for guest in cloud.guests {
        cloud.stack.until("told is what is", async || Ok(cloud.agrees(guest).await.is_ok())).await?;
        let status = cloud.agrees(guest).await;
        println!("{guest}: {:?}", status.map(|status| (status.state, status.reason)));
        cloud.bring_back(guest).await?;
    }
    for (guest, name) in cloud.guests.into_iter().zip(OURS) {
        let kept = cloud.run(guest, "dd if=/dev/vda bs=1M skip=500 count=1 | head -n 1").await?;
        assert_eq!(kept.trim(), name, "what it wrote");
    }
    cloud.keeps_what_is_changed(cloud.guests[0], &theirs)?;
    cloud.is_called_otherwise(cloud.guests[1]).await?;
    assert_eq!(cloud.foreigner()?, foreigner, "others' guest is as they made it, and was not started anew");
    for arguments in [["destroy", FOREIGN], ["undefine", FOREIGN]] {
        ensure!(cloud.virsh(&arguments)?.status.success(), "{arguments:?}");
    }
    cloud.stack.until_exactly(&sorted(cloud.guests)).await?;
    for guest in cloud.guests {
        ensure!(cloud.stack.eschedule(&["destroy", "--wait", &guest.to_string()])?.status.success());
    }
    cloud.stack.until_exactly(&[]).await?;
    ensure!(cloud.stack.directory().join("foreign.qcow2").exists(), "others' disk is theirs");
    Ok(())
}

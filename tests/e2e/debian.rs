//! A stock Debian through every verb: what it wrote stays, its disk is whole, and cloud-init sees what it should.

use std::{
    fs,
    net::IpAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ec_model::{InstanceId, State};
use ec_tests::{Stack, debian_image};

const SMALL: &str = "resources=VCPU:1,MEMORY_MB:768,DISK_GB:3";
const LARGE: &str = "resources=VCPU:2,MEMORY_MB:1536,DISK_GB:4";
/// Emulated, it takes its time to end.
const GRACE: [&str; 2] = ["--grace", "240"];
/// For one boot of it beside other tests.
const PATIENCE: Duration = Duration::from_secs(900);
/// Where its root file system begins.
const PARTITION: u32 = 1 << 20;

struct Debian {
    stack: Stack,
    key: String,
    user: &'static str,
    instance: InstanceId,
    ip: IpAddr,
    /// Of what it wrote.
    sum: String,
    began: Instant,
}

impl Debian {
    async fn up() -> Result<Self> {
        let mut stack = Stack::start().await?;
        stack.start_agent("").await?;
        let began = Instant::now();
        let key = stack.key_pair()?;
        let config = stack.directory().join("cloud-config");
        fs::write(&config, "#cloud-config\nruncmd:\n- echo once >>/etc/first-boots\n")?;
        let (config, public) = (config.display().to_string(), format!("{key}.pub"));
        let image = format!("file://{}", debian_image("")?.display());
        let instance =
            stack.schedule_as(SMALL, &["--name", "web", "--key", &public, "--user-data", &config, &image])?;
        let ip = loop {
            match stack.status(instance).await? {
                Some(status) if status.state == State::Active => {
                    break status.ip.context("it has no address")?;
                }
                status => ensure!(began.elapsed() < PATIENCE, "it is {status:?}\n{}", stack.log()),
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        let user =
            if fs::read_to_string("/etc/os-release")?.contains("ID=ubuntu") { "ubuntu" } else { "debian" };
        let mut guest = Self { stack, key, user, instance, ip, sum: String::new(), began };
        guest.finds_itself("web").await?;
        let write =
            "sudo dd if=/dev/urandom of=/precious bs=1M count=8 conv=fsync status=none; sha256sum </precious";
        guest.sum = guest.run(write).await?;
        Ok(guest)
    }

    async fn run(&self, command: &str) -> Result<String> {
        self.stack.ssh_to(&self.key, self.user, self.instance, command).await
    }

    #[expect(clippy::print_stdout, reason = "where the time of a boot goes")]
    fn asks(&self, arguments: &[&str]) -> Result<String> {
        let output = self.stack.eschedule(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.stack.log());
        println!("{:>4} s: {}", self.began.elapsed().as_secs(), arguments.join(" "));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn refuses(&self, arguments: &[&str], why: &str) -> Result<()> {
        let output = self.stack.eschedule(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && said.contains(why), "{arguments:?}: {output:?}");
        Ok(())
    }

    /// Waits until cloud-init is through with this boot. Its own `status --wait` would take the processor that it needs.
    #[expect(clippy::print_stdout, reason = "where the time of a boot goes")]
    async fn is_set_up(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // Nor would it have that of a login each second.
        let wait =
            "for _ in $(seq 90); do [ -e /run/cloud-init/result.json ] && echo yes && break; sleep 2; done";
        while self.run(wait).await? != "yes" {
            ensure!(Instant::now() < deadline, "cloud-init has not ended within {} s", PATIENCE.as_secs());
        }
        println!("{:>4} s: it is up", self.began.elapsed().as_secs());
        Ok(())
    }

    /// cloud-init was there once, and had from us what this instance is.
    async fn finds_itself(&self, name: &str) -> Result<()> {
        self.is_set_up().await?;
        let told = self
            .run(
                "cloud-init query v1.platform; cloud-init query v1.instance_id; hostname; cat /etc/first-boots; \
                 ls /var/lib/cloud/instances",
            )
            .await?;
        let instance = self.instance.to_string();
        let lines: Vec<&str> = told.lines().map(str::trim).collect();
        assert_eq!(
            lines,
            ["openstack", &instance, name, "once", &instance],
            "platform, id, name, runs, instances"
        );
        let status = self.stack.status(self.instance).await?.context("it is told")?;
        assert_eq!(status.ip, Some(self.ip), "its address is its own");
        Ok(())
    }

    /// Which boot of its kernel this is.
    async fn boot(&self) -> Result<String> {
        self.run("cat /proc/sys/kernel/random/boot_id").await
    }

    /// It runs, has what it wrote, and its disk is whole: looked at while it is halted, after it wrote all that it had.
    async fn is_well(&self) -> Result<()> {
        self.has_its_data().await?;
        self.asks(&["pause", "--wait", "web"])?;
        self.disk_is_whole(&["-U"])?;
        self.asks(&["unpause", "--wait", "web"])?;
        Ok(())
    }

    async fn has_its_data(&self) -> Result<()> {
        let sum = self
            .run("sync; echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null; sha256sum </precious")
            .await?;
        assert_eq!(sum, self.sum, "what it wrote");
        Ok(())
    }

    fn disk_is_whole(&self, flags: &[&str]) -> Result<()> {
        let disk = self.stack.directory().join(format!("state/disks/{}.qcow2", self.instance));
        let output = Command::new("qemu-img").arg("check").args(flags).arg(disk).output()?;
        // Leaks, too, are told by the exit code.
        ensure!(output.status.success(), "qemu-img check: {output:?}");
        Ok(())
    }

    /// Processors, its disk and its root file system in GiB, and memory in GiB.
    async fn sees(&self) -> Result<[u64; 4]> {
        let told = self
            .run(
                "nproc; cat /sys/block/vda/size; df -BM --output=size / | tail -1 | tr -dc 0-9; echo; \
                 free -m | awk '/^Mem/ {print $2}'",
            )
            .await?;
        let numbers: Vec<u64> = told.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [processors, sectors, root, memory] = numbers[..] else { bail!("{told}") };
        // Each is a little less inside than it is outside.
        Ok([processors, sectors >> 21, root.div_ceil(1024), memory.div_ceil(1024)])
    }

    async fn is_told(&self, key: &str) -> Result<String> {
        self.run(&format!(
            "curl -sf http://169.254.169.254/latest/meta-data/tags/instance/{key} || echo none"
        ))
        .await
    }
}

/// The same image with another label on its root file system, by which it finds that: beside its like it would not know
/// which of both it is.
fn rescue_image(to: &Path) -> Result<String> {
    let raw = to.join("rescue.raw");
    let file_system = format!("{}?offset={PARTITION}", raw.display());
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
        ensure!(output.status.success(), "{program} {arguments:?}: {output:?}");
        anyhow::Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let image = debian_image("")?.display().to_string();
    run("qemu-img", &["convert", "-O", "raw", &image, &raw.display().to_string()])?;
    run("tune2fs", &["-L", "rescue", &file_system])?;
    for name in ["/boot/grub/grub.cfg", "/etc/fstab"] {
        let text = run("debugfs", &["-R", &format!("cat {name}"), &file_system])?;
        ensure!(text.contains("rootfs"), "{name}: {text}");
        let changed = to.join("changed");
        fs::write(&changed, text.replace("rootfs", "rescue"))?;
        run("debugfs", &["-w", "-R", &format!("rm {name}"), &file_system])?;
        run("debugfs", &["-w", "-R", &format!("write {} {name}", changed.display()), &file_system])?;
    }
    Ok(format!("file://{}", raw.display()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stock_debian_goes_through_every_verb() -> Result<()> {
    let guest = Debian::up().await?;
    let name = guest.instance.to_string();
    let first = guest.boot().await?;
    let fingerprint = guest.run("cat /etc/ssh/ssh_host_ed25519_key.pub").await?;
    // What needs no boot: halted and let go on, saved and let go on, locked, and told other things.
    guest.is_well().await?;
    guest.asks(&["suspend", "--wait", "web"])?;
    guest.disk_is_whole(&[])?;
    guest.asks(&["resume", "--wait", "web"])?;
    guest.asks(&["lock", "web"])?;
    guest.refuses(&["stop", "web"], "locked")?;
    guest.asks(&["unlock", "web"])?;
    guest.asks(&["set", "web", "--meta", "role=the db"])?;
    guest.stack.until("it is told", async || Ok(guest.is_told("role").await? == "the db")).await?;
    guest.asks(&["unset", "web", "--meta", "role"])?;
    guest.stack.until("it is told no more", async || Ok(guest.is_told("role").await? == "none")).await?;
    guest.asks(&["rename", "web", "front"])?;
    guest.asks(&["rename", "front", "web"])?;
    guest.is_well().await?;
    assert_eq!(guest.boot().await?, first, "its memory was kept all along");

    guest.asks(&[&["reboot", "--wait", "web"], &GRACE[..]].concat())?;
    assert_ne!(guest.boot().await?, first);
    guest.is_well().await?;

    // Another size while it is stopped, taken back, and wished again.
    assert_eq!(guest.sees().await?[..3], [1, 3, 3], "processors, disk, root file system");
    guest.asks(&[&["stop", "--wait", "web"], &GRACE[..]].concat())?;
    guest.disk_is_whole(&[])?;
    guest.asks(&["resize", "--wait", "web", LARGE])?;
    guest.disk_is_whole(&[])?;
    guest.asks(&["resize", "--revert", "--wait", "web"])?;
    guest.asks(&["resize", "--wait", "web", LARGE])?;
    guest.asks(&["resize", "--confirm", "web"])?;
    guest.disk_is_whole(&[])?;

    // Ended hard while it boots, and again: from another disk it is the same instance for the first time, with its own
    // disk beside.
    let image = rescue_image(guest.stack.directory())?;
    guest.asks(&["start", "--wait", "web"])?;
    guest.asks(&["reboot", "--hard", "--wait", "web"])?;
    guest.asks(&["rescue", "--wait", "web", "--image", &image])?;
    guest.finds_itself("web").await?;
    let sum = guest
        .run("sudo mount -o ro /dev/vdb1 /mnt && sha256sum </mnt/precious && sudo umount /mnt && sync")
        .await?;
    assert_eq!(sum, guest.sum, "its own disk is the second");
    guest.disk_is_whole(&["-U"])?;
    guest.asks(&["unrescue", "--wait", "web"])?;
    guest.finds_itself("web").await?;
    guest.is_well().await?;
    assert_eq!(guest.sees().await?, [2, 4, 4, 2], "its size is what it was resized to");
    assert_eq!(guest.run("cat /etc/ssh/ssh_host_ed25519_key.pub").await?, fingerprint);

    // All anew but what it is.
    guest.asks(&["rebuild", "--wait", "web"])?;
    guest.finds_itself("web").await?;
    assert_eq!(guest.run("ls /precious 2>/dev/null || echo gone").await?, "gone");
    assert_ne!(guest.run("cat /etc/ssh/ssh_host_ed25519_key.pub").await?, fingerprint);
    assert_eq!(guest.sees().await?, [2, 4, 4, 2]);
    guest.asks(&["pause", "--wait", "web"])?;
    guest.disk_is_whole(&["-U"])?;
    guest.stack.until_exactly(&[guest.instance]).await?;
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly(&[]).await?;
    let events: Vec<serde_json::Value> =
        serde_json::from_str(&guest.asks(&["events", &name, "-o", "json"])?)?;
    for event in &events {
        assert!(event["outcome"].is_null() || event["outcome"] == "done", "{event}");
    }
    Ok(())
}

/// Runs a program to its end; what it said.
fn told_by(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
    ensure!(output.status.success(), "{program} {arguments:?}: {output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stock_debian_is_brought_to_rest_for_a_snapshot_by_its_agent_and_goes_on() -> Result<()> {
    let guest = Debian::up().await?;
    let boot = guest.boot().await?;
    // It writes on and on, each time until that is on its disk.
    let writes =
        "i=0; while :; do i=$((i+1)); echo $i | sudo tee /var/count >/dev/null; sudo sync /var/count; done";
    guest.run(&format!("nohup sh -c '{writes}' >/dev/null 2>&1 & echo writes")).await?;
    let agent = "until [ \"$(systemctl is-active qemu-guest-agent)\" = active ]; do sleep 2; done";
    guest.run(agent).await?;
    guest.asks(&["snapshot", "create", "web", "snap", "--wait"])?;
    // Its file system needs no recovery, as one does that was cut off.
    let snap: serde_json::Value =
        serde_json::from_str(&guest.asks(&["snapshot", "show", "snap", "-o", "json"])?)?;
    let disks = guest.stack.directory().join("state/disks");
    let disk = disks.join(format!("{}.qcow2", snap["volume"].as_str().context("it has a uuid")?));
    let raw = guest.stack.directory().join("snap.raw").display().to_string();
    told_by("qemu-img", &["convert", "-O", "raw", &disk.display().to_string(), &raw])?;
    let told = told_by("dumpe2fs", &["-h", &format!("{raw}?offset={PARTITION}")])?;
    ensure!(!told.contains("needs_recovery") && told.contains("clean"), "it was not at rest: {told}");
    told_by("e2fsck", &["-fn", &format!("{raw}?offset={PARTITION}")])?;
    // And it goes on, as itself.
    assert_eq!(guest.boot().await?, boot);
    let count = guest.run("cat /var/count").await?;
    guest
        .stack
        .until("it goes on to write", async || Ok(guest.run("cat /var/count").await? != count))
        .await?;
    let told = guest.run("sudo journalctl -b -u qemu-guest-agent").await?;
    ensure!(told.contains("guest-fsfreeze"), "its agent was not asked: {told}");
    // One that hangs is asked for nothing, so that nobody has to wait until it lets its guest go on; and that is told.
    guest.run("sudo pkill -STOP -x qemu-ga").await?;
    let begun = Instant::now();
    guest.asks(&["snapshot", "create", "web", "hung", "--wait"])?;
    ensure!(begun.elapsed() < Duration::from_secs(300), "it was waited for: {:?}", begun.elapsed());
    ensure!(guest.stack.log().contains("did not bring its file systems to rest"), "{}", guest.stack.log());
    guest.run("sudo pkill -CONT -x qemu-ga").await?;
    guest.asks(&["snapshot", "delete", "hung", "--wait"])?;
    // An agent that is longer at that than anybody waits for it: the guest is let go on all the same, before it is told that all is done.
    let slow = "printf '#!/bin/sh\\n[ $1 = thaw ] || sleep 30\\n' | sudo tee /usr/local/bin/slow >/dev/null; \
        sudo chmod 755 /usr/local/bin/slow; sudo mkdir -p /etc/systemd/system/qemu-guest-agent.service.d; \
        printf '[Service]\\nExecStart=\\nExecStart=/usr/sbin/qemu-ga --fsfreeze-hook=/usr/local/bin/slow\\n' | \
        sudo tee /etc/systemd/system/qemu-guest-agent.service.d/slow.conf >/dev/null; \
        sudo systemctl daemon-reload; sudo systemctl restart qemu-guest-agent";
    guest.run(slow).await?;
    guest.run(agent).await?;
    guest.asks(&["snapshot", "create", "web", "slow", "--wait"])?;
    let count = guest.run("cat /var/count").await?;
    guest
        .stack
        .until("it goes on to write again", async || Ok(guest.run("cat /var/count").await? != count))
        .await?;
    guest.asks(&["snapshot", "delete", "slow", "--wait"])?;
    // Back to that, and well.
    guest.run("sudo rm /precious; sync").await?;
    guest.asks(&["snapshot", "restore", "snap", "--grace", "240"])?;
    guest.is_set_up().await?;
    guest.has_its_data().await?;
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.asks(&["snapshot", "delete", "snap", "--wait"])?;
    guest.stack.until_exactly(&[]).await
}

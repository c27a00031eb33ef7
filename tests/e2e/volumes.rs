//! Volumes of real guests: what was written on them, whoever comes and goes.

use std::{fs, process::Command, slice::from_ref};

use anyhow::{Context, Result, ensure};
use ec_model::{Instance, InstanceId, Keyspace, Size, decode};
use ec_store::Store;
use serde_json::Value;

use crate::power::Guest;

/// The tiny guest with one processor is told not to look for what ACPI says of PCI, and so hears of no new disk.
pub(crate) const TWO: &str = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1";

/// A guest's system hears of a disk a moment after it is there.
pub(crate) const UNTIL_THERE: &str = "there() { for i in $(seq 600); do head -c 1 /dev/$1 >/dev/null 2>&1 && return; sleep 0.1; done; }; there";

impl Guest {
    /// What a command about volumes answers.
    pub(crate) fn volume(&self, arguments: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.asks(&[&["volume"], arguments, &["-o", "json"]].concat())?)?)
    }

    /// The same about snapshots.
    fn snapshot(&self, arguments: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.asks(&[&["snapshot"], arguments, &["-o", "json"]].concat())?)?)
    }

    fn refused(&self, arguments: &[&str], why: &str) -> Result<()> {
        let output = self.stack.eschedule(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && said.contains(why), "{arguments:?}: {output:?}");
        ensure!(said.lines().count() == 1, "one line: {said}");
        Ok(())
    }

    /// A volume that it has as `vdb`, with something on it, and the digest of that.
    pub(crate) async fn with_data(&self) -> Result<(InstanceId, String)> {
        let data = id(&self.volume(&["create", "data", "--size", "1", "--for", "web", "--wait"])?)?;
        self.volume(&["attach", "data", "web", "--wait"])?;
        self.run(&format!("{UNTIL_THERE} vdb; dd if=/dev/urandom of=/dev/vdb bs=1M count=4 conv=fsync"))
            .await?;
        Ok((data, self.digest("vdb").await?))
    }

    /// The digest of the first four MiB of a disk, as the guest reads it.
    pub(crate) async fn digest(&self, device: &str) -> Result<String> {
        let read = format!("dd if=/dev/{device} bs=1M count=4 2>/dev/null | sha256sum");
        let said = self.run(&format!("{UNTIL_THERE} {device}; {read}")).await?;
        Ok(said.split_whitespace().next().unwrap_or_default().to_owned())
    }
}

pub(crate) fn id(view: &Value) -> Result<InstanceId> {
    Ok(view["volume"].as_str().context("it has a uuid")?.parse()?)
}

/// `qemu-img check` finds nothing.
pub(crate) fn is_whole(guest: &Guest, volume: InstanceId) -> Result<()> {
    let file = guest.stack.directory().join(format!("state/disks/{volume}.qcow2"));
    let checked = Command::new("qemu-img").args(["check", "-q"]).arg(&file).output()?;
    ensure!(checked.status.success(), "{checked:?}");
    Ok(())
}

/// Somebody writes over a disk, and something is asked of it for which its size must be known: that is refused once, and not time after
/// time.
fn cannot_be_measured(guest: &Guest, disk: InstanceId, asked: &[&str]) -> Result<()> {
    let file = guest.stack.directory().join(format!("state/disks/{disk}.qcow2"));
    std::fs::write(file, [7; 300_000])?;
    let output = guest.stack.eschedule(asked)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_told = said.contains("is as large as it was before that") && said.contains("no qcow2 image");
    ensure!(output.status.code() == Some(1) && is_told, "{asked:?}: {output:?}");
    let log = guest.stack.log();
    let given_up = log
        .lines()
        .filter(|line| line.contains(&disk.to_string()) && line.contains("cannot have its new size"));
    ensure!(given_up.count() <= 2, "{log}");
    Ok(())
}

async fn claimed(guest: &Guest, volume: InstanceId) -> Result<u64> {
    let held = guest.stack.placement.allocations(volume).await?.context("it has a claim")?;
    Ok(Size::of(&held.total()).disk_gb)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_on_a_volume_outlives_the_guest_and_the_agent() -> Result<()> {
    let mut guest = Guest::up_as(TWO, &[]).await?;
    let made = guest.volume(&["create", "data", "--size", "1", "--for", "web", "--wait"])?;
    let data = id(&made)?;
    assert_eq!((&made["status"], &made["size_gb"]), (&"available".into(), &1.into()), "{made}");
    assert_eq!(claimed(&guest, data).await?, 1);
    guest.stack.until_exactly_with(&[guest.instance], &[data]).await?;
    guest.refused(&["volume", "create", "DATA", "--size", "1"], "is taken")?;
    assert!(!guest.asks(&["list"])?.contains(&data.to_string()), "it is no instance");
    guest.refused(&["stop", &data.to_string()], "it is a volume")?;
    guest.refused(&["volume", "attach", "web", "web"], "no volume of project")?;

    // While it runs; its guest finds it by its serial number.
    let attached = guest.volume(&["attach", "data", "web", "--wait"])?;
    assert_eq!((&attached["status"], &attached["device"]), (&"in-use".into(), &"vdb".into()), "{attached}");
    let serial = guest.run(&format!("{UNTIL_THERE} vdb; cat /sys/block/vdb/serial")).await?;
    assert_eq!(serial, data.to_string()[..20]);
    guest.run("dd if=/dev/urandom of=/dev/vdb bs=1M count=4 conv=fsync 2>/dev/null").await?;
    let written = guest.digest("vdb").await?;
    guest.refused(&["volume", "delete", "data"], "has volume")?;
    guest.refused(&["destroy", &data.to_string()], "it is a volume")?;
    guest.refused(&["rebuild", &data.to_string(), "file:///no.qcow2"], "it is a volume")?;
    guest.refused(&["volume", "delete", "data"], "has volume")?;

    // It grows under the guest, and never shrinks.
    guest.volume(&["extend", "data", "2", "--wait"])?;
    // A guest that let go of a disk has none of that name: libvirt told that it is gone, and the guest is asked.
    assert_eq!(guest.run("cat /sys/block/vdb/size").await?, (2_u64 << 21).to_string());
    assert_eq!(claimed(&guest, data).await?, 2);
    guest.refused(&["volume", "extend", "data", "1"], "never shrinks")?;

    // The guest ends and is started again, its domain is defined anew, its agent dies: it has it still.
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    guest.asks(&["resize", "--wait", "web", "resources=VCPU:2,MEMORY_MB:160,DISK_GB:1"])?;
    guest.asks(&["resize", "--confirm", "web"])?;
    assert_eq!(guest.digest("vdb").await?, written);
    guest.stack.until_exactly_with(&[guest.instance], &[data]).await?;

    // It stays when the guest goes, without a word of it.
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly_with(&[], &[data]).await?;
    assert_eq!(guest.volume(&["show", "data"])?["status"], "available");
    is_whole(&guest, data)?;
    let copy = guest.volume(&["create", "copy", "--copy-of", "data", "--wait"])?;
    assert_eq!(copy["size_gb"], 2);
    let copy = id(&copy)?;
    is_whole(&guest, copy)?;

    // Another has both, and lets go of one while it runs.
    let public = format!("{}.pub", guest.key());
    guest.instance = guest.stack.schedule_as(TWO, &["--wait", "--name", "db", "--key", &public])?;
    guest.run("true").await?;
    guest.volume(&["attach", "data", "db", "--wait"])?;
    guest.volume(&["attach", "copy", "db", "--device", "vdf", "--wait"])?;
    assert_eq!(guest.digest("vdb").await?, written);
    assert_eq!(guest.digest("vdc").await?, written);
    let detached = guest.volume(&["detach", "data", "--wait"])?;
    assert_eq!(detached["status"], "available", "{detached}");
    assert_eq!(guest.run("cat /sys/block/vdb/size 2>/dev/null || echo none").await?, "none");
    assert_eq!(guest.digest("vdc").await?, written);
    guest.asks(&["volume", "delete", "data", "--wait"])?;
    guest.stack.until_exactly_with(&[guest.instance], &[copy]).await?;
    guest.asks(&["stop", "--grace", "0", "--wait", "db"])?;
    guest.volume(&["detach", "copy", "--wait"])?;
    cannot_be_measured(&guest, copy, &["volume", "extend", "copy", "3", "--wait"])?;
    let larger = "resources=VCPU:2,MEMORY_MB:160,DISK_GB:2";
    cannot_be_measured(&guest, guest.instance, &["resize", "--wait", "db", larger])?;
    guest.asks(&["resize", "--revert", "--wait", "db"])?;
    guest.asks(&["volume", "delete", &copy.to_string(), "--wait"])?;
    guest.asks(&["destroy", "--wait", "db"])?;
    guest.stack.until_exactly(&[]).await
}

/// Counts on its own disk for ever: what is read of the second place is never more than one behind the first, at whatever
/// moment the disk is looked at.
const COUNT: &str = "(trap '' HUP; n=1000; while :; do for at in 600 700; do echo $n | dd of=/dev/vda bs=1M seek=$at conv=fsync; \
    done; n=$((n+1)); done) </dev/null >/dev/null 2>&1 & echo counts";

/// What a disk has of both.
async fn counted(guest: &Guest, device: &str) -> Result<[i64; 2]> {
    let mut counts = [0; 2];
    for (count, at) in counts.iter_mut().zip([600, 700]) {
        let read = format!("dd if=/dev/{device} bs=1M skip={at} count=1 2>/dev/null | head -n 1");
        let read = guest.run(&format!("{UNTIL_THERE} {device}; {read}")).await?;
        *count = read.trim().parse().with_context(|| format!("no number at {at} of {device}: {read}"))?;
    }
    Ok(counts)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_copied_under_its_guest_and_restored_and_booted_from() -> Result<()> {
    let mut guest = Guest::up_as(TWO, &[]).await?;
    let (data, written) = guest.with_data().await?;
    let boot = guest.boot().await?;
    guest.run(COUNT).await?;
    guest.stack.until("it counts", async || Ok(counted(&guest, "vda").await.is_ok())).await?;

    // Copies are of one moment, though the guest goes on writing.
    let copy = id(&guest.volume(&["create", "copy", "--copy-of", "data", "--wait"])?)?;
    let snap = guest.volume(&["create", "snap", "--image", "instance:web", "--wait"])?;
    assert_eq!(
        (&snap["size_gb"], &snap["copy_of"]),
        (&1.into(), &guest.instance.to_string().into()),
        "{snap}"
    );
    let snap = id(&snap)?;
    for whole in [copy, snap] {
        is_whole(&guest, whole)?;
        assert_eq!(claimed(&guest, whole).await?, 1);
    }
    guest.stack.until_exactly_with(&[guest.instance], &[data, copy, snap]).await?;
    guest.volume(&["attach", "copy", "web", "--wait"])?;
    guest.volume(&["attach", "snap", "web", "--wait"])?;
    assert_eq!(guest.digest("vdc").await?, written);
    let [first, second] = counted(&guest, "vdd").await?;
    assert!((0..=1).contains(&(first - second)), "{first}, {second}");
    let [now, _] = counted(&guest, "vda").await?;
    assert!(now > first, "it goes on: {now}, {first}");
    assert_eq!(guest.boot().await?, boot, "it was not started anew");
    guest.volume(&["detach", "snap", "--wait"])?;

    // Killed while libvirt copies, its next agent begins again.
    guest.stack.kill_agent()?;
    guest.stack.start_agent("before-create-volume=pause").await?;
    let third = id(&guest.volume(&["create", "third", "--image", "instance:web"])?)?;
    guest.stack.until_reached("before-create-volume").await?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    guest.stack.until_state(third, ec_model::State::Active).await?;
    is_whole(&guest, third)?;
    guest.asks(&["volume", "delete", "third", "--wait"])?;

    // Deleted before it is whole, it leaves nothing, and libvirt is at nothing.
    guest.run("dd if=/dev/urandom of=/dev/vdb bs=1M seek=8 count=128 conv=fsync").await?;
    for pause in [0, 100, 250] {
        let short = id(&guest.volume(&["create", "short", "--copy-of", "data"])?)?;
        // No state to wait for: it is deleted at whatever the agent is then.
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
        guest.asks(&["volume", "delete", &short.to_string(), "--wait"])?;
        guest.stack.until_exactly_with(&[guest.instance], &[data, copy, snap]).await?;
    }
    let last = id(&guest.volume(&["create", "last", "--copy-of", "data", "--wait"])?)?;
    is_whole(&guest, last)?;
    guest.asks(&["volume", "delete", "last", "--wait"])?;
    assert_eq!(guest.boot().await?, boot);

    // Restored: as it was at that moment.
    guest.run("echo spoilt | dd of=/dev/vda bs=1M seek=500 conv=fsync").await?;
    guest.refused(&["rescue", "web", "--image", "volume:snap"], "name one with `--image`")?;
    guest.asks(&["rebuild", "--wait", "web", "volume:snap"])?;
    assert_eq!(guest.kept().await?, "precious");
    assert_eq!(counted(&guest, "vda").await?, [first, second]);
    assert_eq!(guest.digest("vdb").await?, written, "its volumes stay");
    guest.stack.until_exactly_with(&[guest.instance], &[data, copy, snap]).await?;

    // Another boots from it, and stands on its own.
    let small = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:0";
    ensure!(!guest.stack.eschedule(&[small, "--image", "volume:snap"])?.status.success());
    let public = format!("{}.pub", guest.key());
    let first_one = guest.instance;
    let booting = ["volume:snap", "--wait", "--name", "db", "--key", &public];
    guest.instance = guest.stack.schedule_as(TWO, &booting)?;
    assert_eq!(guest.kept().await?, "precious");
    guest.volume(&["detach", "copy", "--wait"])?;
    guest.asks(&["volume", "delete", "snap", "copy", "--wait"])?;
    guest.asks(&["reboot", "--hard", "--wait", "db"])?;
    assert_eq!(guest.kept().await?, "precious");
    guest.refused(&["rebuild", "db"], "there is no")?;
    guest.stack.until_exactly_with(&[first_one, guest.instance], &[data]).await?;
    guest.asks(&["destroy", "--wait", "db", "web"])?;
    guest.asks(&["volume", "delete", "data", "--wait"])?;
    guest.stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_made_of_a_disk_under_its_guest_and_killed_in_the_middle_leaves_nothing() -> Result<()> {
    let mut guest = Guest::up_as(TWO, &[]).await?;
    let store = guest.stack.directory().join("store");
    let file = guest.stack.directory().join("schedule.yaml");
    let config = fs::read_to_string(&file)?;
    fs::write(&file, format!("{config}image_store: {{url: \"file://{}\"}}\n", store.display()))?;
    let boot = guest.boot().await?;

    let made: Value =
        serde_json::from_str(&guest.asks(&["image", "add", "golden", "instance:web", "-o", "json"])?)?;
    assert_eq!((&made["status"], &made["disk_format"]), (&"active".into(), &"qcow2".into()), "{made}");
    assert_eq!(made["virtual_size"], 1 << 30, "{made}");
    let stored = store.join(made["id"].as_str().context("it has a uuid")?);
    assert_eq!(made["size"], fs::metadata(&stored)?.len());
    let checked = Command::new("qemu-img").args(["check", "-q"]).arg(&stored).output()?;
    ensure!(checked.status.success(), "{checked:?}");
    assert_eq!(guest.boot().await?, boot, "it goes on");
    // The copy that was made for it has gone, or goes.
    guest.stack.until_exactly(&[guest.instance]).await?;

    // Of a volume that a guest has, and of what cannot be.
    let data = id(&guest.volume(&["create", "data", "--size", "1", "--for", "web", "--wait"])?)?;
    guest.volume(&["attach", "data", "web", "--wait"])?;
    guest
        .run(&format!("{UNTIL_THERE} vdb; dd if=/dev/urandom of=/dev/vdb bs=1M count=64 conv=fsync"))
        .await?;
    let written = guest.digest("vdb").await?;
    guest.refused(&["image", "add", "golden", "volume:data"], "there is an image `golden` already")?;
    guest.refused(&["image", "add", "other", "volume:no"], "no volume of project")?;
    let zeros = "0".repeat(64);
    let output = guest.stack.eschedule(&["image", "add", "other", "volume:data", "--sha256", &zeros])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1) && said.contains("and --sha256 demands"), "{said}");
    guest.stack.until_exactly_with(&[guest.instance], &[data]).await?;
    assert_eq!(fs::read_dir(&store)?.count(), 1);
    guest.asks(&["image", "add", "filled", "volume:data"])?;
    let output = guest.stack.eschedule(&["image", "add", "alone", "instance:web"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success() && said.contains(&format!("on its volumes ({data})")), "{said}");
    guest.asks(&["image", "delete", "alone"])?;
    let filled =
        id(&guest
            .volume(&["create", "filled", "--size", "2", "--image", "filled", "--for", "web", "--wait"])?)?;
    guest.volume(&["attach", "filled", "web", "--wait"])?;
    assert_eq!(guest.digest("vdc").await?, written);

    // Killed in the middle: who lists images takes away what is left once the image is no longer on its way.
    guest.stack.kill_agent()?;
    guest.stack.start_agent("before-create-volume=pause").await?;
    let mut adding =
        guest.stack.command("eschedule").args(["image", "add", "short", "volume:data"]).spawn()?;
    guest.stack.until_reached("before-create-volume").await?;
    adding.kill()?;
    adding.wait()?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    assert_eq!(guest.asks(&["image", "list", "-o", "name"])?, "filled\ngolden\nshort\n", "it may be at it");
    let copies = || -> Result<usize> {
        let all: Vec<Value> = serde_json::from_str(&guest.asks(&["volume", "list", "-o", "json"])?)?;
        Ok(all.iter().filter(|it| it["name"].as_str().is_some_and(|name| name.starts_with("image-"))).count())
    };
    assert_eq!(copies()?, 1);
    guest.asks(&["image", "delete", "short"])?;
    guest.stack.until_exactly_with(&[guest.instance], &[data, filled]).await?;

    // Another boots from the image, on whatever node, and stands on its own.
    guest.asks(&["destroy", "--wait", "web"])?;
    let public = format!("{}.pub", guest.key());
    let booting = ["golden", "--wait", "--name", "db", "--key", &public];
    guest.instance = guest.stack.schedule_as(TWO, &booting)?;
    assert_eq!(guest.kept().await?, "precious");
    guest.asks(&["destroy", "--wait", "db"])?;
    guest.asks(&["volume", "delete", "data", "filled", "--wait"])?;
    guest.asks(&["image", "delete", "golden"])?;
    guest.asks(&["image", "delete", "filled"])?;
    assert_eq!(fs::read_dir(&store)?.count(), 0);
    guest.stack.until_exactly(&[]).await
}

/// Counts on both disks in turn, for ever: at whatever moment both are looked at, the first is never more than one ahead.
const COUNT_BOTH: &str = "(trap '' HUP; n=1000; while :; do for disk in vda vdb; do \
    echo $n | dd of=/dev/$disk bs=1M seek=600 conv=fsync; done; n=$((n+1)); done) </dev/null >/dev/null 2>&1 & echo counts";

/// What lies beside disks in the pool: copies in snapshots, and parts of copies.
fn beside(guest: &Guest) -> Result<Vec<String>> {
    let names = fs::read_dir(guest.stack.directory().join("state/disks"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.split('.').count() > 2).collect();
    names.sort_unstable();
    Ok(names)
}

/// What a disk has of that.
async fn count_of(guest: &Guest, device: &str) -> Result<i64> {
    let read = format!("dd if=/dev/{device} bs=1M skip=600 count=1 2>/dev/null | head -n 1");
    Ok(guest.run(&format!("{UNTIL_THERE} {device}; {read}")).await?.trim().parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn all_disks_of_a_guest_are_kept_as_they_are_at_one_moment_and_come_back() -> Result<()> {
    let mut guest = Guest::up_as(TWO, &[]).await?;
    let (data, written) = guest.with_data().await?;
    let boot = guest.boot().await?;
    guest.run(COUNT_BOTH).await?;
    guest.stack.until("it counts", async || Ok(count_of(&guest, "vdb").await.is_ok())).await?;

    // Killed while libvirt copies, its next agent begins again.
    guest.stack.kill_agent()?;
    guest.stack.start_agent("before-create-volume=pause").await?;
    let snap = id(&guest.snapshot(&["create", "web", "snap"])?)?;
    guest.stack.until_reached("before-create-volume").await?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    guest.stack.until_state(snap, ec_model::State::Active).await?;
    let shown = guest.snapshot(&["show", "snap"])?;
    assert_eq!((&shown["size_gb"], &shown["snapshot"]), (&2.into(), &true.into()), "{shown}");
    assert_eq!(shown["beside"][0], data.to_string(), "{shown}");
    assert_eq!(claimed(&guest, snap).await?, 2);
    is_whole(&guest, snap)?;
    let kept = format!("{snap}.{data}.copy.qcow2");
    guest.stack.until_exactly_with(&[guest.instance], &[data, snap]).await?;
    assert_eq!(beside(&guest)?, from_ref(&kept));
    assert_eq!(guest.boot().await?, boot, "it was not started anew");

    // Its disks are of one moment, and nothing changes them any more.
    guest.refused(&["volume", "attach", "snap", "web"], "it is a snapshot")?;
    guest.refused(&["volume", "extend", "snap", "3"], "it is a snapshot")?;
    guest.refused(&["snapshot", "delete", "data"], "is a volume, and no snapshot")?;
    guest.refused(&["volume", "restore", "data", "volume:snap/data"], "is not stopped")?;
    id(&guest.volume(&["create", "first", "--size", "1", "--image", "volume:snap", "--wait"])?)?;
    id(&guest.volume(&["create", "second", "--size", "1", "--image", "volume:snap/data", "--wait"])?)?;
    guest.volume(&["attach", "first", "web", "--wait"])?;
    guest.volume(&["attach", "second", "web", "--wait"])?;
    let (one, other) = (count_of(&guest, "vdc").await?, count_of(&guest, "vdd").await?);
    ensure!((0..=1).contains(&(one - other)), "{one}, {other}");
    assert_eq!(guest.digest("vdd").await?, written);
    for volume in ["first", "second"] {
        guest.volume(&["detach", volume, "--wait"])?;
    }
    guest.asks(&["volume", "delete", "first", "second", "--wait"])?;

    // Two at once wait for each other.
    let both =
        [id(&guest.snapshot(&["create", "web", "one"])?)?, id(&guest.snapshot(&["create", "web", "two"])?)?];
    for snapshot in both {
        guest.stack.until_state(snapshot, ec_model::State::Active).await?;
    }
    guest.asks(&["snapshot", "delete", "one", "two", "--wait"])?;

    // All of it comes back, under a guest that runs.
    guest.run("echo spoilt | dd of=/dev/vda bs=1M seek=500 conv=fsync; dd if=/dev/zero of=/dev/vdb bs=1M count=4 conv=fsync").await?;
    ensure!(guest.digest("vdb").await? != written);
    // Broken off, it is locked, and its snapshot is; the next one goes on, and knows that it ran.
    let restore = ["snapshot", "restore", "snap", "--grace", "1"];
    guest.stack.kill_agent()?;
    guest.stack.start_agent("before-note-rebuild=pause").await?;
    let mut broken_off = guest.stack.command("eschedule").args(restore).spawn()?;
    guest.stack.until_reached("before-note-rebuild").await?;
    broken_off.kill()?;
    broken_off.wait()?;
    guest.refused(&["start", "web"], "snapshot snap is being restored")?;
    guest.refused(&["snapshot", "delete", "snap"], "is being restored from it")?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    // Somebody else's lock stays, and what is behind it.
    guest.asks(&["lock", "web", "--reason", "forensics"])?;
    guest.refused(&restore, "it is locked (forensics)")?;
    guest.asks(&["unlock", "web"])?;
    guest.asks(&restore)?;
    assert_eq!(guest.kept().await?, "precious");
    assert_eq!(guest.digest("vdb").await?, written);
    assert_eq!((count_of(&guest, "vda").await?, count_of(&guest, "vdb").await?), (one, other));
    guest.stack.until_exactly_with(&[guest.instance], &[data, snap]).await?;
    assert_eq!(beside(&guest)?, from_ref(&kept));

    // One that cannot be stopped stays as it is, and nothing stays locked for it. Nor is a volume made anew under a guest whose
    // memory is saved, whichever way that is asked for.
    guest.asks(&["suspend", "--wait", "web"])?;
    guest.refused(&restore, "suspended")?;
    let volume = data.to_string();
    guest.refused(&["volume", "restore", &volume, "volume:snap/data"], "has it, and is not stopped")?;
    guest.refused(&["rebuild", &volume, "volume:snap/data", "--wait"], "it is a volume")?;
    guest.asks(&["resume", "--wait", "web"])?;
    let record = guest.stack.store.get(&Keyspace::default().instance(snap)).await?.0.context("no record")?;
    assert_eq!(decode::<Instance>(&record.value)?.locked, None);

    // Of one that is down, too, and once the instance has the volume no more.
    guest.asks(&["stop", "--grace", "0", "--wait", "web"])?;
    let cold = id(&guest.snapshot(&["create", "web", "cold", "--wait"])?)?;
    let cold_beside = format!("{cold}.{data}.copy.qcow2");
    guest.stack.until_exactly_with(&[guest.instance], &[data, snap, cold]).await?;
    let mut both = [kept.clone(), cold_beside];
    both.sort_unstable();
    assert_eq!(beside(&guest)?, both);
    guest.asks(&["snapshot", "delete", "cold", "--wait"])?;
    guest.volume(&["detach", "data", "--wait"])?;
    guest.volume(&["restore", "data", "volume:snap/data", "--wait"])?;
    guest.asks(&["snapshot", "restore", "snap"])?;
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly_with(&[], &[data, snap]).await?;
    assert_eq!(beside(&guest)?, from_ref(&kept));
    guest.asks(&["snapshot", "delete", "snap", "--wait"])?;
    // Others' tools see what there is.
    let virsh = |arguments: &[&str]| -> Result<String> {
        let uri = guest.stack.libvirt.uri();
        let output = Command::new("virsh").args(["-q", "-c", uri]).args(arguments).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let mut listed = String::new();
    for pool in virsh(&["pool-list", "--name"])?.split_whitespace() {
        listed += &virsh(&["vol-list", pool])?;
    }
    ensure!(listed.contains(&data.to_string()) && !listed.contains(&snap.to_string()), "{listed}");
    guest.asks(&["volume", "delete", "data", "--wait"])?;
    guest.stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_file_says_of_volumes_guests_have_and_the_next_guest_reads_what_the_last_wrote() -> Result<()>
{
    let mut guest = Guest::up_as(TWO, &[]).await?;
    let first = guest.instance;
    let public = format!("{}.pub", guest.key());
    let path = guest.stack.directory().join("shop.yaml");
    let file = path.display().to_string();
    let says = |size: u32, name: &str| {
        let instance = format!("{{query: \"{TWO}\", keys: [\"{public}\"], volumes: [data, logs]}}");
        format!(
            "stack: shop\nvolumes: {{data: {{size: {size}}}, logs: {{size: 1}}}}\ninstances:\n  {name}: {instance}\n"
        )
    };
    let instance = |guest: &Guest, name: &str| -> Result<InstanceId> {
        let shown: Value = serde_json::from_str(&guest.asks(&["show", name, "-o", "json"])?)?;
        Ok(shown["instance"].as_str().context("it has a uuid")?.parse()?)
    };
    std::fs::write(&path, says(1, "db"))?;
    guest.asks(&["apply", "-f", &file])?;
    assert_eq!(guest.asks(&["apply", "-f", &file, "--diff", "-o", "name"])?, "");
    guest.instance = instance(&guest, "db")?;
    guest.stack.until_state(guest.instance, ec_model::State::Active).await?;
    let data = id(&guest.volume(&["show", "data"])?)?;
    let logs = id(&guest.volume(&["show", "logs"])?)?;
    let serials =
        format!("{UNTIL_THERE} vdb; {UNTIL_THERE} vdc; cat /sys/block/vdb/serial /sys/block/vdc/serial");
    let found = guest.run(&serials).await?;
    assert_eq!(
        found.split_whitespace().collect::<String>(),
        [data, logs].map(|it| it.to_string()[..20].to_owned()).concat()
    );
    guest.run("dd if=/dev/urandom of=/dev/vdb bs=1M count=4 conv=fsync 2>/dev/null").await?;
    let written = guest.digest("vdb").await?;
    guest.stack.until_exactly_with(&[first, guest.instance], &[data, logs]).await?;

    // Another takes its place; whoever applies is killed on the way, and applies again.
    std::fs::write(&path, says(2, "db2"))?;
    for pause in [0, 300] {
        let mut killed = guest.stack.command("eschedule").args(["apply", "-f", &file, "--prune"]).spawn()?;
        // The name of one that is being placed is held for ten minutes.
        guest.stack.until("db2 is placed", async || Ok(instance(&guest, "db2").is_ok())).await?;
        // From there on there is no state to wait for: it is killed at whatever it does then.
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
        killed.kill()?;
        killed.wait()?;
    }
    guest.asks(&["apply", "-f", &file, "--prune"])?;
    assert_eq!(guest.asks(&["apply", "-f", &file, "--diff", "--prune", "-o", "name"])?, "");
    guest.instance = instance(&guest, "db2")?;
    guest.stack.until_state(guest.instance, ec_model::State::Active).await?;
    assert_eq!(guest.digest("vdb").await?, written);
    // Whoever applies does not wait for that.
    let larger = (2_u64 << 21).to_string();
    guest
        .stack
        .until("it is larger", async || Ok(guest.run("cat /sys/block/vdb/size").await? == larger))
        .await?;
    guest.stack.until_exactly_with(&[first, guest.instance], &[data, logs]).await?;

    // What the file says no more goes, and its volumes stay until that is wished.
    std::fs::write(&path, "stack: shop\n")?;
    guest.asks(&["apply", "-f", &file, "--prune"])?;
    guest.stack.until_exactly_with(&[first], &[data, logs]).await?;
    assert_eq!(guest.volume(&["show", "data"])?["status"], "available");
    guest.asks(&["apply", "-f", &file, "--prune-volumes"])?;
    guest.asks(&["destroy", "--wait", &first.to_string()])?;
    guest.stack.until_exactly(&[]).await
}

/// A copy of what nobody is up with is libvirt's work, which goes on when the agent is killed that asked for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_restored_whenever_its_agent_is_killed_while_it_is_copied() -> Result<()> {
    let mut guest = Guest::up_as(TWO, &[]).await?;
    let data = id(&guest.volume(&["create", "data", "--size", "1", "--for", "web", "--wait"])?)?;
    let disks = guest.stack.directory().join("state/disks");
    let (disk, random) = (disks.join(format!("{data}.qcow2")), guest.stack.directory().join("random.raw"));
    let write = || -> Result<()> {
        let mut from = std::io::Read::take(fs::File::open("/dev/urandom")?, 500 << 20);
        std::io::copy(&mut from, &mut fs::File::create(&random)?)?;
        // Into the file that is there, which libvirt and the node know.
        let written = Command::new("qemu-img")
            .args(["convert", "-n", "-f", "raw", "-O", "qcow2"])
            .args([&random, &disk])
            .output()?;
        ensure!(written.status.success(), "{written:?}");
        Ok(())
    };
    write()?;
    guest.volume(&["snapshot", "data", "snap", "--wait"])?;
    let snapshot = id(&guest.volume(&["show", "snap"])?)?;
    let kept = disks.join(format!("{snapshot}.qcow2"));
    for mebibytes in [1, 150, 400] {
        write()?;
        let mut restoring = guest
            .stack
            .command("eschedule")
            .args(["volume", "restore", "data", "volume:snap", "--wait"])
            .spawn()?;
        let is_begun = |name: &str| name.starts_with(&data.to_string()) && name.ends_with(".part.qcow2");
        guest
            .stack
            .until("a part of the copy is made", async || {
                let parts = fs::read_dir(&disks)?.filter_map(|entry| {
                    let entry = entry.ok()?;
                    is_begun(entry.file_name().to_str()?).then(|| entry.metadata().map(|of| of.len()).ok())?
                });
                Ok(parts.max().is_some_and(|length| length >= mebibytes << 20))
            })
            .await?;
        guest.stack.kill_agent()?;
        guest.stack.start_agent("").await?;
        ensure!(restoring.wait()?.success(), "it is restored");
        let compared = Command::new("qemu-img").arg("compare").args([&kept, &disk]).output()?;
        ensure!(compared.status.success(), "after {mebibytes} MiB: {compared:?}");
        guest.stack.until("nothing lies beside", async || Ok(beside(&guest)?.is_empty())).await?;
    }
    guest.asks(&["volume", "delete", "data", "snap", "--wait"])?;
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly(&[]).await
}

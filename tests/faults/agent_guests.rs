//! What happens to guests and their disks behind the agent's back. Only a user's destroy deletes a disk that a
//! guest ever wrote.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, Keyspace, State};
use ec_store::{Store, Txn};
use ec_tests::Stack;

fn disk(stack: &Stack, instance: InstanceId) -> PathBuf {
    stack.directory().join(format!("state/disks/{instance}.qcow2"))
}

/// Which file it is: one that was made anew is another.
fn identity(stack: &Stack, instance: InstanceId) -> Result<u64> {
    Ok(fs::metadata(disk(stack, instance)).context("the disk is gone")?.ino())
}

/// A guest that is up, on a stack whose agent runs.
async fn guest(stack: &Stack) -> Result<InstanceId> {
    let instance = stack.schedule(&[])?;
    stack.until_state(instance, State::Active).await?;
    Ok(instance)
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_that_libvirt_forgot_are_defined_again_and_keep_disk_and_claim() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let guests = [guest(&stack).await?, guest(&stack).await?];
    let disks = [identity(&stack, guests[0])?, identity(&stack, guests[1])?];
    // As on a host that was installed anew, with the disks on their own file system: all at once.
    stack.kill_agent()?;
    for instance in guests {
        let domain = stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?;
        domain.destroy()?;
        domain.undefine()?;
    }
    stack.start_agent("").await?;
    for instance in guests {
        let status = stack.until_state(instance, State::Stopped).await?;
        let reason = status.reason.unwrap_or_default();
        assert!(reason.contains("defined again"), "{reason}\n{}", stack.log());
    }
    stack.until_exactly(&sorted(guests)).await?;
    assert_eq!([identity(&stack, guests[0])?, identity(&stack, guests[1])?], disks);

    // What it was defined as boots from what the guest wrote.
    stack.libvirt.connection().lookup_domain_by_uuid(guests[0].uuid())?.create()?;
    stack.until_state(guests[0], State::Active).await?;
    for instance in guests {
        assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    }
    stack.until_exactly(&[]).await
}

fn sorted(mut instances: [InstanceId; 2]) -> [InstanceId; 2] {
    instances.sort_unstable();
    instances
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_guest_that_was_undefined_is_defined_again_and_survives_its_power_off() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = guest(&stack).await?;
    let before = identity(&stack, instance)?;
    let lookup = || stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid());
    lookup()?.undefine()?;
    stack.until("it is there for good again", async || Ok(lookup()?.is_persistent()?)).await?;
    assert!(lookup()?.is_active()?, "without a blink");
    let name = instance.to_string();
    let events = || anyhow::Ok(String::from_utf8(stack.eschedule(&["events", &name])?.stdout)?);
    stack.until("it is told", async || Ok(events()?.contains("somebody undefined it while it ran"))).await?;
    // With its end at any moment of that: it is told, and what somebody ended stays so.
    for milliseconds in [0, 2, 5, 10, 20, 40, 80] {
        lookup()?.undefine()?;
        let ended = lookup()?;
        // Not waited for anything: its end is to fall at another moment of what the agent does each time.
        tokio::time::sleep(std::time::Duration::from_millis(milliseconds)).await;
        ended.destroy()?;
        let status = stack.until_state(instance, State::Stopped).await?;
        let reason = status.reason.unwrap_or_default();
        let is_told = ["somebody ended it", "defined again"].iter().any(|word| reason.contains(word));
        assert!(is_told, "after {milliseconds} ms: {reason}\n{}", stack.log());
        stack.until("it is defined", async || Ok(lookup().is_ok())).await?;
        assert!(!lookup()?.is_active()?, "after {milliseconds} ms\n{}", stack.log());
        assert!(stack.eschedule(&["start", "--wait", &name])?.status.success());
    }

    // And once more, with its end before anybody could look.
    stack.signal_agent(nix::sys::signal::Signal::SIGSTOP)?;
    lookup()?.undefine()?;
    lookup()?.destroy()?;
    stack.signal_agent(nix::sys::signal::Signal::SIGCONT)?;
    stack.until_state(instance, State::Stopped).await?;
    assert_eq!(identity(&stack, instance)?, before);
    stack.until_exactly(&[instance]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_never_has_an_address_is_told_and_left_running() -> Result<()> {
    let mut stack = Stack::start_with("address_timeout: 3").await?;
    stack.start_agent("before-start=1*sleep(1000)").await?;
    let instance = stack.schedule(&[])?;
    stack.until_reached("before-start").await?;
    // A guest that stands still asks nobody for an address, and neither does one of another network's.
    let lookup = || stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid());
    stack.until("it runs", async || Ok(lookup()?.is_active()?)).await?;
    stack
        .until("its status says what is missing", async || {
            let status = stack.status(instance).await?.context("no status")?;
            Ok(status.state == State::Starting && status.reason.unwrap_or_default().contains("no address"))
        })
        .await?;
    assert!(lookup()?.is_active()?);
    // It boots on, and is up when it is up.
    stack.until_state(instance, State::Active).await?;
    assert_eq!(stack.status(instance).await?.context("no status")?.reason, None);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_guest_is_told_as_paused_and_a_crashed_one_as_stopped() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = guest(&stack).await?;
    let domain = stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?;
    domain.suspend()?;
    let status = stack.until_state(instance, State::Paused).await?;
    assert!(status.reason.unwrap_or_default().contains("`eschedule unpause` lets it go on"));
    // It is not for the agent to resume it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(stack.status(instance).await?.context("no status")?.state, State::Paused);
    assert!(stack.eschedule(&["unpause", "--wait", &instance.to_string()])?.status.success());
    stack.until_state(instance, State::Active).await?;
    let process = stack.libvirt.guest_process(instance).context("no process")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(process), nix::sys::signal::Signal::SIGKILL)?;
    let status = stack.until_state(instance, State::Stopped).await?;
    assert!(status.reason.unwrap_or_default().contains("crashed"));
    stack.until_exactly(&[instance]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_on_a_full_disk_is_paused_says_so_and_goes_on_by_itself() -> Result<()> {
    let mut stack = Stack::start_small("images: {max_gb: 1}", 1100).await?;
    let state = stack.directory().join("state");
    stack.start_agent("").await?;
    let key = stack.key_pair()?;
    let instance = stack.schedule(&["--key", &format!("{key}.pub")])?;
    let ip = stack.until_state(instance, State::Active).await?.ip.context("no address")?;
    stack.ssh(&key, "root", ip, "true").await?;
    let ballast = state.join("ballast");
    let free = nix::sys::statvfs::statvfs(&state)?;
    let free = free.blocks_available() * free.fragment_size();
    let made =
        Command::new("fallocate").arg("-l").arg((free - (20 << 20)).to_string()).arg(&ballast).status()?;
    ensure!(made.success());
    let writing = tokio::spawn({
        let (key, ip) = (key.clone(), ip);
        async move {
            tokio::process::Command::new("ssh")
                .args(["-n", "-i", &key, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"])
                .args(["-o", "UserKnownHostsFile=/dev/null", "-o", "ServerAliveInterval=0"])
                .arg(format!("root@{ip}"))
                .arg("dd if=/dev/zero bs=1M count=60 seek=500 of=/dev/vda conv=fsync && echo written")
                .kill_on_drop(true)
                .output()
                .await
        }
    });
    let status = stack.until_state(instance, State::Paused).await?;
    let reason = status.reason.unwrap_or_default();
    assert!(reason.contains("no space on the host's disk"), "{reason}");
    fs::remove_file(&ballast)?;
    stack.until_state(instance, State::Active).await?;
    let written = tokio::time::timeout(Duration::from_secs(120), writing).await???;
    assert!(String::from_utf8_lossy(&written.stdout).contains("written"), "{written:?}");
    // Where nothing at all can be written any more, what is asked of it is done all the same.
    let mut filler = fs::File::create(&ballast)?;
    while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}
    for verb in [&["stop", "--grace", "0"][..], &["set", "--meta", "a=b"], &["destroy"]] {
        let done = stack.eschedule(&[verb, &["--wait", &instance.to_string()]].concat())?;
        assert!(done.status.success(), "{verb:?}: {done:?}");
    }
    stack.kill_agent()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_disk_or_record_is_noticed_and_nothing_else_is_taken_away() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = guest(&stack).await?;
    let record = stack.directory().join(format!("state/instances/{instance}.json"));
    fs::remove_file(&record)?;
    stack.until("its record is there again", async || Ok(record.exists())).await?;
    assert_eq!(stack.status(instance).await?.context("no status")?.state, State::Active);

    fs::remove_file(disk(&stack, instance))?;
    let status = stack.until_state(instance, State::Error).await?;
    assert!(status.reason.unwrap_or_default().contains("disk file was deleted"));
    let domain = stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?;
    assert!(domain.is_active()?, "the guest has it open, and runs on");
    assert_eq!(stack.placement.provider_allocations(stack.node).await?.len(), 1);
    domain.destroy()?;
    stack
        .until("it says that the disk is gone", async || {
            let status = stack.status(instance).await?.context("no status")?;
            Ok(status.state == State::Error && status.reason.unwrap_or_default().contains("disk is gone"))
        })
        .await?;
    assert_eq!(
        stack.placement.provider_allocations(stack.node).await?.len(),
        1,
        "kept until it is destroyed"
    );
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

/// As where `images/` is in no backup, or not mounted.
#[tokio::test(flavor = "multi_thread")]
async fn the_image_that_a_disk_stands_on_is_fetched_again_for_its_next_start() -> Result<()> {
    let mut stack = Stack::start().await?;
    let image = stack.directory().join("image.qcow2");
    fs::copy(ec_tests::tiny_image(), &image)?;
    stack.start_agent("").await?;
    let name = format!("file://{}", image.display());
    let instance = stack.schedule(&[&name])?;
    stack.until_state(instance, State::Active).await?;
    let named = instance.to_string();
    let lose = async |stack: &mut Stack| {
        assert!(stack.eschedule(&["stop", "--wait", "--grace", "0", &named])?.status.success());
        stack.kill_agent()?;
        fs::remove_dir_all(stack.directory().join("state/images"))?;
        stack.start_agent("").await
    };
    lose(&mut stack).await?;
    assert!(stack.eschedule(&["start", "--wait", &named])?.status.success(), "{}", stack.log());
    // Where another lies at that URL by now, what is missing is told, and the guest kept.
    lose(&mut stack).await?;
    let mut other = fs::read(&image)?;
    other.extend([0; 512]);
    fs::write(&image, other)?;
    assert!(!stack.eschedule(&["start", "--wait", &named])?.status.success());
    let reason = stack.status(instance).await?.context("no status")?.reason.unwrap_or_default();
    for part in ["state/images/base/", "gives another image by now: put that file there again"] {
        ensure!(reason.contains(part), "{reason}\n{}", stack.log());
    }
    fs::copy(ec_tests::tiny_image(), &image)?;
    assert!(stack.eschedule(&["start", "--wait", &named])?.status.success(), "{}", stack.log());
    Ok(())
}

/// A new guest's volumes are older than itself, and a rescued one has none but what it boots from, and its rescue disk.
#[tokio::test(flavor = "multi_thread")]
async fn images_are_fetched_again_for_who_is_started_with_them() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    // Each with a digest of its own.
    let images = ["root", "data", "mend"].map(|name| stack.directory().join(format!("{name}.qcow2")));
    for (image, more) in images.iter().zip([0, 512, 1024]) {
        let mut content = fs::read(ec_tests::tiny_image())?;
        content.resize(content.len() + more, 0);
        fs::write(image, content)?;
    }
    let [root, data, mend] = images.each_ref().map(|image| format!("file://{}", image.display()));
    let make = |stack: &Stack, name: &str, image: &str| {
        let made = stack.eschedule(&["volume", "create", name, "--size", "1", "--image", image, "--wait"])?;
        ensure!(made.status.success(), "{made:?}");
        anyhow::Ok(())
    };
    make(&stack, "root", &root)?;
    let cache = stack.directory().join("state/images");
    stack.kill_agent()?;
    fs::remove_dir_all(&cache)?;
    let away = images[0].with_extension("away");
    fs::rename(&images[0], &away)?;
    stack.start_agent("").await?;
    // What cannot be had again is told, and a guest that never ran leaves nothing.
    let boot = |stack: &Stack| {
        let query = "resources=VCPU:1,MEMORY_MB:128";
        stack.schedule_as(query, &["--name", "web", "--boot-volume", "root"])
    };
    let failed = boot(&stack)?;
    let told = stack.until_state(failed, State::Error).await?.reason.unwrap_or_default();
    ensure!(told.contains("is gone from the image cache"), "{told}");
    stack.until("it is swept", async || Ok(stack.request_at(stack.node, failed).await?.is_none())).await?;
    ensure!(stack.eschedule(&["destroy", "--wait", "web"])?.status.success());
    fs::rename(&away, &images[0])?;
    let instance = boot(&stack)?;
    stack.until_state(instance, State::Active).await?;

    make(&stack, "data", &data)?;
    let attached = stack.eschedule(&["volume", "attach", "data", "web", "--wait"])?;
    ensure!(attached.status.success(), "{attached:?}");
    stack.kill_agent()?;
    stack.start_agent("before-start-rescue=pause").await?;
    ensure!(stack.eschedule(&["rescue", "web", "--image", &mend])?.status.success());
    stack.until_reached("before-start-rescue").await?;
    stack.kill_agent()?;
    fs::remove_dir_all(&cache)?;
    fs::remove_file(&images[1])?;
    stack.start_agent("").await?;
    stack.until_state(instance, State::Rescued).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_domain_that_a_late_call_brings_after_its_destroy_goes_too() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("before-define=pause").await?;
    let instance = stack.schedule(&[])?;
    stack.until_reached("before-define").await?;
    stack.kill_agent()?;
    stack.start_agent("").await?;
    stack.until_state(instance, State::Active).await?;
    let xml = stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?.xml_desc(0)?;
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await?;
    // What a define does that was under way in libvirtd when its agent was killed.
    stack.libvirt.connection().define_domain_xml(&xml)?;
    stack.until_exactly(&[]).await?;
    // Also where only the next agent can notice.
    stack.kill_agent()?;
    stack.libvirt.connection().define_domain_xml(&xml)?;
    stack.start_agent("").await?;
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destroy_while_a_define_hangs_in_libvirtd_leaves_nothing() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("before-define=1*sleep(2000)").await?;
    let instance = stack.schedule(&[])?;
    stack.until_reached("before-define").await?;
    stack.libvirt.pause_daemon();
    // The define is sent to a daemon that does not answer, and then nobody waits for it any more.
    tokio::time::sleep(Duration::from_secs(4)).await;
    stack.kill_agent()?;
    let destroyed = stack.eschedule(&["destroy", &instance.to_string()])?;
    assert!(destroyed.status.success(), "{destroyed:?}");
    stack.libvirt.resume_daemon();
    stack.start_agent("").await?;
    stack.until_exactly(&[]).await?;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(5) {
        ensure!(stack.libvirt.connection().list_all_domains(0)?.is_empty(), "it came back");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// Longer than libvirt's keepalive has patience: its client crashed agents whose calls shared connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_stands_still_takes_no_agent_along_and_what_is_destroyed_meanwhile_goes() -> Result<()>
{
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instances = (0..4).map(|_| stack.schedule(&[])).collect::<Result<Vec<_>>>()?;
    // No state is waited for: wherever each of them is by then, calls are under way.
    tokio::time::sleep(Duration::from_secs(2)).await;
    stack.libvirt.pause_daemon();
    for instance in instances {
        let destroyed = stack.eschedule(&["destroy", &instance.to_string()])?;
        ensure!(destroyed.status.success(), "{destroyed:?}");
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    stack.libvirt.resume_daemon();
    stack.until_exactly(&[]).await?;
    ensure!(stack.end_agent()? == Some(0), "{}", stack.log());
    Ok(())
}

/// Of a volume that nobody asks for an agent that saw none of the disks would drop the record and the claim.
#[tokio::test(flavor = "multi_thread")]
async fn disks_that_are_not_mounted_when_the_agent_starts_are_not_taken_for_gone() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let created = stack.eschedule(&["volume", "create", "held", "--size", "1", "--wait"])?;
    ensure!(created.status.success(), "{created:?}");
    let shown = stack.eschedule(&["volume", "show", "held", "-o", "json"])?;
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout)?;
    let held: InstanceId = shown["volume"].as_str().context("no volume")?.parse()?;
    stack.store.txn(Txn::new().delete(Keyspace::default().request(stack.node, held))).await?;
    stack.until_state(held, State::Unclaimed).await?;

    stack.kill_agent()?;
    let (disks, away) = (stack.directory().join("state/disks"), stack.directory().join("away"));
    fs::rename(&disks, &away)?;
    fs::create_dir(&disks)?;
    for arguments in [&[][..], &["--check"]] {
        let mut agent = tokio::process::Command::from(stack.command("ecompute"));
        let ended = agent.args(arguments).kill_on_drop(true).output();
        let ended = tokio::time::timeout(Duration::from_secs(60), ended).await??;
        let told =
            [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        ensure!(ended.status.code() == Some(1), "{told}");
        ensure!(told.contains("is not where this node's guests have their disks"), "{told}");
    }
    ensure!(fs::read_dir(&disks)?.next().is_none(), "nothing is written there");

    fs::remove_dir(&disks)?;
    fs::rename(&away, &disks)?;
    stack.start_agent("").await?;
    stack.until_state(held, State::Unclaimed).await?;
    ensure!(stack.placement.allocations(held).await?.is_some(), "its claim is gone");
    let healed = stack.eschedule(&["heal", "--yes"])?;
    ensure!(healed.status.success(), "{healed:?}");
    let deleted = stack.eschedule(&["volume", "delete", "held", "--wait"])?;
    ensure!(deleted.status.success(), "{deleted:?}");
    stack.until_exactly(&[]).await
}

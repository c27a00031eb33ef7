//! What is done to volumes of a running guest, from the start of the command to libvirt's word that it is so, against the bare
//! calls on a guest of the same kind; and copies of a disk while its guest writes it, with the longest pause that the guest
//! made between two writes meanwhile. By turns.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ec_libvirt::testing::{begin_backup, is_backed_up};
use ec_model::InstanceId;
use ec_tests::Stack;
use virt::{domain::Domain, sys};

use crate::{
    bare::PATIENCE,
    build::Pattern,
    orders::Orders,
    stats::{Figure, Goal, Samples},
    verbs::{asked, settled, virsh},
};

/// The tiny guest with one processor hears of no disk that comes or goes.
const QUERY: &str = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1";
const ROUNDS: usize = 6;
/// How exactly the moment is seen; the same for both sides.
const POLL: Duration = Duration::from_millis(2);
const GIB: u64 = 1 << 30;
const DEVICE: &str = "vdb";
/// What is written on the volume that is copied, in MiB.
const WRITTEN: u32 = 256;
/// So long without a copy, for a pause that there is anyway.
const REST: Duration = Duration::from_secs(2);
/// What nobody may notice.
const PAUSE_MS: f64 = 10.0;

/// Measures with the stack's agent, which must run.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let key = stack.key_pair()?;
    let guest = stack.schedule_as(QUERY, &["--wait", "--key", &format!("{key}.pub")])?;
    stack.ssh_to(&key, "root", guest, "true").await?;
    let mut figures = tokio::task::block_in_place(|| given_and_extended(stack, guest))?;
    figures.extend(copied(stack, guest, &key).await?);
    tokio::task::block_in_place(|| asked(stack, &["destroy", "--wait", "@"], guest, 0))?;
    Ok(figures)
}

/// A running domain, as somebody looks at it on a connection of their own.
fn domain_of(stack: &Stack, instance: InstanceId) -> Result<Domain> {
    Ok(stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?)
}

/// How large the guest's disk of that name is, in bytes; none where it has none.
///
/// Whether it has one its document tells: what is told of a disk alone was seen to outlive that.
fn size_of(domain: &Domain, device: &str) -> Option<u64> {
    let document = domain.xml_desc(0).ok()?;
    let is_there = document.contains(&format!("<target dev='{device}'"));
    is_there.then(|| domain.block_info(device, 0).ok().map(|told| told.capacity)).flatten()
}

/// The time from before it is asked for until libvirt says so of the guest's disk of that name.
fn measured(
    stack: &Stack,
    instance: InstanceId,
    device: &str,
    is_so: fn(Option<u64>) -> bool,
    ask: impl FnOnce() -> Result<()>,
) -> Result<Duration> {
    let (domain, device) = (domain_of(stack, instance)?, device.to_owned());
    let seen: JoinHandle<Result<Instant>> =
        thread::Builder::new().name("look".to_owned()).spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            while Instant::now() < deadline {
                if is_so(size_of(&domain, &device)) {
                    return Ok(Instant::now());
                }
                thread::sleep(POLL);
            }
            bail!("the disk is not as it was to be")
        })?;
    let begun = Instant::now();
    ask()?;
    Ok(seen.join().map_err(|_| anyhow!("the look panicked"))?? - begun)
}

fn figure(name: &'static str, bare: &'static str) -> Figure {
    let bare = Some((bare, Samples::default()));
    Figure { name, unit: "ms", ours: Samples::default(), bare, goals: vec![Goal::Ratio(1.1)] }
}

fn push_bare(figure: &mut Figure, time: Duration) {
    if let Some((_, samples)) = &mut figure.bare {
        samples.push_time(time);
    }
}

fn given_and_extended(stack: &Stack, guest: InstanceId) -> Result<Vec<Figure>> {
    let pattern = Pattern::of(stack, guest)?;
    let twins = [Orders::instance(), Orders::instance()];
    let domains = [pattern.make(twins[0])?, pattern.make(twins[1])?];
    let mut attach = figure("volume attach", "attach-device of the same XML");
    let mut extend = figure("volume extend, while a guest has it", "blockresize");
    let by_virsh = |name| Figure { bare: None, goals: Vec::new(), ..figure(name, "") };
    let (mut virsh_attach, mut virsh_extend) =
        (by_virsh("  by virsh attach-device"), by_virsh("  by virsh blockresize"));
    let mut left = Vec::new();
    // The twins keep their disks, and get each as another device.
    for (round, device) in ('b'..'z').map(|letter| format!("vd{letter}")).take(ROUNDS).enumerate() {
        let name = format!("v{round}");
        asked(stack, &["volume", "create", &name, "--size", "1", "--for", "@", "--wait"], guest, 0)?;
        let volume = volume_named(stack, &name)?;
        let disks = [Orders::instance(), Orders::instance()];
        for disk in &disks {
            pattern.make_empty(&format!("{disk}.bare"), GIB)?;
        }
        let all = [guest, twins[0], twins[1]];
        settled(stack, &all)?;
        let time = measured(
            stack,
            guest,
            DEVICE,
            |size| size.is_some(),
            || asked(stack, &["volume", "attach", &name, "@"], guest, 0),
        )?;
        attach.ours.push_time(time);
        // As it is kept, where only what the product says of it stands.
        until(|| Ok(second_of(&domain_of(stack, guest)?).is_ok()))?;
        let document = second_of(&domain_of(stack, guest)?)?;
        let [bare, by_hand] = disks.map(|disk| of_another(&document, volume, disk, &device));
        settled(stack, &all)?;
        let flags = sys::VIR_DOMAIN_AFFECT_LIVE | sys::VIR_DOMAIN_AFFECT_CONFIG;
        let time = measured(
            stack,
            twins[0],
            &device,
            |size| size.is_some(),
            || Ok(domains[0].attach_device_flags(&bare, flags)?),
        )?;
        push_bare(&mut attach, time);
        let file = stack.file("disk.xml");
        fs::write(&file, &by_hand)?;
        settled(stack, &all)?;
        let words = format!("attach-device @ {} --live --config", file.display());
        let time =
            measured(stack, twins[1], &device, |size| size.is_some(), || virsh(stack, &words, twins[1]))?;
        virsh_attach.ours.push_time(time);

        let is_larger = |size: Option<u64>| size.is_some_and(|size| size > GIB);
        settled(stack, &all)?;
        let time = measured(stack, guest, DEVICE, is_larger, || {
            asked(stack, &["volume", "extend", &name, "2"], guest, 0)
        })?;
        extend.ours.push_time(time);
        settled(stack, &all)?;
        let time = measured(stack, twins[0], &device, is_larger, || {
            Ok(domains[0].block_resize(&device, 2 * GIB, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)?)
        })?;
        push_bare(&mut extend, time);
        settled(stack, &all)?;
        let time = measured(stack, twins[1], &device, is_larger, || {
            virsh(stack, &format!("blockresize @ {device} 2G"), twins[1])
        })?;
        virsh_extend.ours.push_time(time);

        asked(stack, &["volume", "detach", &name, "--wait"], guest, 0)?;
        asked(stack, &["volume", "delete", &name, "--wait"], guest, 0)?;
        left.extend(disks);
    }
    for twin in twins {
        pattern.remove(stack, twin)?;
    }
    for disk in left {
        pattern.delete_disk(&format!("{disk}.bare"))?;
    }
    Ok(vec![attach, virsh_attach, extend, virsh_extend])
}

fn until(reached: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !reached()? {
        ensure!(Instant::now() < deadline, "it does not come to its end");
        thread::sleep(POLL);
    }
    Ok(())
}

fn volume_named(stack: &Stack, name: &str) -> Result<InstanceId> {
    let output = stack.eschedule(&["volume", "show", name, "-o", "json"])?;
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    Ok(shown["volume"].as_str().context("it has a uuid")?.parse()?)
}

/// The document of a domain's second disk, without the place that libvirt found for it.
fn second_of(domain: &Domain) -> Result<String> {
    let document = domain.xml_desc(sys::VIR_DOMAIN_XML_INACTIVE)?;
    let disks = document.split("<disk ").skip(1).filter_map(|rest| rest.split_once("</disk>"));
    let mut disks = disks.map(|(disk, _)| disk).filter(|disk| disk.contains(&format!("dev='{DEVICE}'")));
    let disk = disks.next().context("it has no second disk")?;
    let lines = disk.lines().filter(|line| !line.trim_start().starts_with("<address "));
    Ok(format!("<disk {}</disk>", lines.collect::<Vec<_>>().join("\n")))
}

/// The same of another disk, as that device.
fn of_another(document: &str, volume: InstanceId, other: InstanceId, device: &str) -> String {
    let file = document.replace(&format!("{volume}.qcow2"), &format!("{other}.bare"));
    let named = file.replace(&format!("dev='{DEVICE}'"), &format!("dev='{device}'"));
    named.replace(&volume.to_string(), &other.to_string())
}

/// Tells when the guest has written once more, as long as it is there.
struct Writer {
    ssh: Child,
    written: Arc<Mutex<Vec<Instant>>>,
}

impl Writer {
    /// Begins. The shell opens the disk for each write and closes it, which waits until the disk has it.
    async fn begin(stack: &Stack, guest: InstanceId, key: &str) -> Result<Self> {
        let ip = stack.status(guest).await?.and_then(|status| status.ip).context("it has no address")?;
        let mut ssh = Command::new("ssh")
            .args(["-n", "-i", key, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"])
            .args(["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", &format!("root@{ip}")])
            .arg(format!("while echo x > /dev/{DEVICE}; do echo; done"))
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(ssh.stdout.take().context("ssh has no output")?).lines();
        let written = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&written);
        thread::spawn(move || {
            for _ in lines.map_while(Result::ok) {
                told.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
            }
        });
        Ok(Self { ssh, written })
    }

    /// The longest time between two writes, of those from one moment to another.
    fn pause(&self, from: Instant, to: Instant) -> Result<Duration> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let within: Vec<Instant> = written.iter().copied().filter(|at| (from..=to).contains(at)).collect();
        let gaps = within.windows(2).map(|two| two[1] - two[0]);
        gaps.max().context("the guest wrote nothing")
    }

    fn end(mut self) -> Result<()> {
        self.ssh.kill()?;
        self.ssh.wait()?;
        Ok(())
    }
}

async fn copied(stack: &Stack, guest: InstanceId, key: &str) -> Result<Vec<Figure>> {
    let asks = |arguments: &[&str]| tokio::task::block_in_place(|| asked(stack, arguments, guest, 0));
    asks(&["volume", "create", "data", "--size", "1", "--for", "@", "--wait"])?;
    asks(&["volume", "attach", "data", "@", "--wait"])?;
    let fill = format!(
        "until [ -e /sys/block/{DEVICE}/size ]; do sleep 0.1; done; dd if=/dev/urandom of=/dev/{DEVICE} bs=1M count={WRITTEN} conv=fsync 2>/dev/null"
    );
    stack.ssh_to(key, "root", guest, &fill).await?;
    let pattern = Pattern::of(stack, guest)?;
    let writer = Writer::begin(stack, guest, key).await?;
    let mut copy = figure(
        "volume create --copy-of --wait, of 256 MiB that a guest writes",
        "vol-create, backup-begin and the wait for its end",
    );
    let mut pause = Figure {
        goals: vec![Goal::Above(PAUSE_MS)],
        ..figure("  the guest's longest pause between two writes", "the same during libvirt's backup")
    };
    let mut rest =
        Figure { bare: None, goals: Vec::new(), ..figure("  the same while nothing is copied", "") };
    for round in 0..ROUNDS {
        tokio::time::sleep(REST).await;
        let end = Instant::now();
        rest.ours.push_time(writer.pause(end - REST, end)?);

        let name = format!("c{round}");
        let begun = Instant::now();
        asks(&["volume", "create", &name, "--copy-of", "data", "--wait"])?;
        let end = Instant::now();
        copy.ours.push_time(end - begun);
        pause.ours.push_time(writer.pause(begun, end)?);
        asks(&["volume", "delete", &name, "--wait"])?;

        tokio::time::sleep(REST).await;
        let (begun, end) = tokio::task::block_in_place(|| {
            let domain = domain_of(stack, guest)?;
            let begun = Instant::now();
            let file = pattern.make_empty("by-hand.bare", GIB)?;
            let document = format!(
                "<domainbackup mode='push'><disks><disk name='{DEVICE}' backup='yes' type='file'>\
                 <driver type='qcow2'/><target file='{file}'/></disk></disks></domainbackup>"
            );
            begin_backup(&domain, &document)?;
            until(|| Ok(!is_backed_up(&domain)?))?;
            let end = Instant::now();
            pattern.delete_disk("by-hand.bare")?;
            Ok::<_, anyhow::Error>((begun, end))
        })?;
        push_bare(&mut copy, end - begun);
        let longest = writer.pause(begun, end)?;
        push_bare(&mut pause, longest);
    }
    writer.end()?;
    asks(&["volume", "detach", "data", "--wait"])?;
    asks(&["volume", "delete", "data", "--wait"])?;
    Ok(vec![copy, pause, rest])
}

//! Data itself: a guest writes records that say what they are, on its disk and on a volume, all along, while that volume is given, taken,
//! grown, copied, snapshotted and restored, and whoever takes part is killed at random. Not one record that the guest was told to be on
//! its disk is lost or older than it was, no other is damaged, and each copy is of one moment.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use ec_model::{InstanceId, State};
use ec_tests::Stack;
use nix::{sys::signal::Signal, unistd::Pid};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::Value;

use crate::power::Guest;

/// The tiny guest with one processor hears of no disk that comes or goes.
const TWO: &str = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1";
/// So many records lie on a disk, where none of the image is: the newest takes the place of the oldest.
const SLOTS: u32 = 32;
/// Of so many lines of 16 bytes, each of which is its number.
const LINES: usize = 4096;
const RECORD: usize = LINES * 16;
/// A guest that is ended may have written so many of which nobody heard; their numbers are left out.
const UNHEARD: u32 = 16;
/// Where the first lies, in records: 600 MiB.
const FROM: u64 = 9600;
/// Unless `ROUNDS` says how many things are done one after the other.
const ROUNDS: u32 = 40;
/// How large the volume becomes, in GiB.
const LARGEST: u32 = 6;

/// A disk of the guest: its own, or the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    Own,
    Data,
}

/// What lies in the place of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    Whole(u32),
    /// Not all of it.
    Torn,
}

impl Slot {
    fn of(bytes: &[u8]) -> Self {
        if bytes.iter().all(|byte| *byte == 0) {
            return Self::Empty;
        }
        let number = std::str::from_utf8(&bytes[..15]).ok().and_then(|text| text.trim().parse().ok());
        let whole = |number: u32| format!("{number:>15}\n").repeat(LINES).as_bytes() == bytes;
        number.filter(|number| whole(*number)).map_or(Self::Torn, Self::Whole)
    }

    fn whole(&self) -> Option<u32> {
        if let Self::Whole(number) = self { Some(*number) } else { None }
    }
}

/// The newest record that is there.
fn newest_of(slots: &[Slot]) -> u32 {
    slots.iter().filter_map(Slot::whole).max().unwrap_or(0)
}

/// The records of a disk, in the order in which it was heard from the guest that they are there.
#[derive(Clone, Debug, Default)]
struct Written {
    heard: Vec<u32>,
    /// With which numbers the guest began to write: what it wrote last before, nobody heard of, where it was ended.
    begun: Vec<u32>,
}

impl Written {
    fn newest(&self) -> u32 {
        self.heard.last().copied().unwrap_or(0)
    }

    /// Whether the guest may have written it as it was ended: it lies behind all that was heard of before the next began.
    fn may_be_unheard(&self, number: u32) -> bool {
        self.begun.iter().filter(|first| **first > number).min().is_some_and(|first| {
            self.heard.iter().filter(|heard| *heard < first).max().is_none_or(|last| *last < number)
        })
    }

    /// Looks whether a disk has these and no older ones, as far as to the newest that is on it, which it answers: not older than `least`.
    /// Of those behind the last that was heard of nobody knows which are there, and of one what.
    fn is_on(&self, slots: &[Slot], least: u32) -> Result<u32> {
        let last = self.newest();
        let newest = newest_of(slots);
        ensure!(newest >= least, "the newest is {newest}, and {least} was there before: {slots:?}");
        let mut torn = 0;
        for (place, slot) in (0..).zip(slots) {
            let of_place = self.heard.iter().filter(|number| *number % SLOTS == place && **number <= newest);
            let heard = of_place.max().copied();
            match *slot {
                Slot::Empty => ensure!(heard.is_none(), "{heard:?} is not there: {slots:?}"),
                Slot::Whole(number) if number % SLOTS != place => {
                    bail!("{number} lies at {place}: {slots:?}")
                }
                Slot::Whole(number) if heard == Some(number) || number > last => {}
                Slot::Whole(number)
                    if heard.is_none_or(|heard| heard < number) && self.may_be_unheard(number) => {}
                Slot::Whole(number) => bail!("{number} is there and not {heard:?}: {slots:?}"),
                // The one that is being written at this moment.
                Slot::Torn => torn += 1,
            }
        }
        ensure!(torn <= 1, "{torn} are damaged: {slots:?}");
        Ok(newest)
    }

    /// The same, and these are what is there from now on.
    fn learn(&mut self, slots: &[Slot], least: u32) -> Result<u32> {
        let newest = self.is_on(slots, least)?;
        let last = self.newest();
        let mut more: Vec<u32> =
            slots.iter().filter_map(Slot::whole).filter(|number| *number > last).collect();
        more.sort_unstable();
        self.heard.extend(more);
        self.heard.retain(|number| *number <= newest);
        // A torn one is none that was heard of: what was there before it is gone with it.
        for (place, slot) in (0..).zip(slots) {
            if *slot == Slot::Torn {
                self.heard.retain(|number| number % SLOTS != place);
            }
        }
        Ok(newest)
    }
}

/// Writes on the guest as long as that is up, or until it is told to end.
struct Writer {
    ssh: Child,
    heard: JoinHandle<()>,
    written: Arc<Mutex<[Written; 2]>>,
}

impl Writer {
    async fn begin(guest: &Guest, data: InstanceId, first: u32, written: [Written; 2]) -> Result<Self> {
        // It is there, and answers.
        guest.run("rm -f /run/end").await?;
        let status = guest.stack.status(guest.instance).await?;
        let ip = status.and_then(|status| status.ip).context("it has no address")?;
        let serial = &data.to_string()[..20];
        // Where a disk goes at this moment, `dd` makes a file of that name, which is not heard of, and would be in the disk's place later.
        let script = format!(
            "n={first}; while [ ! -e /run/end ]; do d=; for s in /sys/block/vd*; do \
             serial=; read -r serial <$s/serial; if [ \"$serial\" = {serial} ]; then d=${{s##*/}}; fi; done 2>/dev/null; \
             for to in own:vda data:$d; do at=/dev/${{to#*:}}; [ -b $at ] || continue; \
             yes \"$(printf %15d $n)\" 2>/dev/null | dd of=$at bs=64k count=1 iflag=fullblock seek=$(({FROM} + n % {SLOTS})) \
             conv=notrunc,fsync 2>/dev/null && if [ -b $at ]; then echo ${{to%:*}} $n; else rm $at; fi; done; n=$((n + 1)); done"
        );
        let mut ssh = Command::new("ssh")
            .args(["-n", "-i", guest.key(), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"])
            .args(["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"])
            .args([
                "-o",
                "ServerAliveInterval=2",
                "-o",
                "ServerAliveCountMax=5",
                &format!("root@{ip}"),
                &script,
            ])
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(ssh.stdout.take().context("ssh has no output")?).lines();
        let written = Arc::new(Mutex::new(written));
        let told = Arc::clone(&written);
        let heard = thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let Some((disk, number)) = line.split_once(' ') else { continue };
                let Ok(number) = number.parse() else { continue };
                let mut written = told.lock().unwrap_or_else(PoisonError::into_inner);
                written[usize::from(disk == "data")].heard.push(number);
            }
        });
        Ok(Self { ssh, heard, written })
    }

    fn written(&self, disk: Disk) -> Written {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)[disk as usize].clone()
    }

    /// Waits until it has ended; all that was heard of.
    fn end(mut self) -> Result<[Written; 2]> {
        self.ssh.wait()?;
        self.heard.join().map_err(|_| anyhow::anyhow!("who listens panicked"))?;
        Ok(self.written.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

struct Trial {
    guest: Guest,
    data: InstanceId,
    size: u32,
    random: StdRng,
    writer: Option<Writer>,
    written: [Written; 2],
    /// A snapshot of the volume, and what it has.
    kept: Option<(InstanceId, Written)>,
    done: Vec<String>,
}

impl Trial {
    fn stack(&self) -> &Stack {
        &self.guest.stack
    }

    #[expect(clippy::print_stdout, reason = "what a run of minutes is at")]
    fn note(&mut self, what: impl Into<String>) {
        let what = what.into();
        println!("{what}");
        self.done.push(what);
    }

    fn slots(&self, file: &str) -> Result<Vec<Slot>> {
        let disk = self.stack().directory().join("state/disks").join(file);
        let piece = self.stack().directory().join("piece");
        let [from, to] =
            [("if", &disk), ("of", &piece)].map(|(name, path)| format!("{name}={}", path.display()));
        let [skip, count] = [("skip", FROM), ("count", FROM + u64::from(SLOTS))]
            .map(|(name, records)| format!("{name}={records}"));
        let output = Command::new("qemu-img")
            .args(["dd", "-U", "-f", "qcow2", "-O", "raw", "bs=64k", &skip, &count, &from, &to])
            .output()?;
        ensure!(output.status.success(), "qemu-img dd: {output:?}");
        Ok(fs::read(&piece)?.chunks(RECORD).map(Slot::of).collect())
    }

    fn is_sound(&self, file: &str) -> Result<()> {
        let disk = self.stack().directory().join("state/disks").join(file);
        let checked = Command::new("qemu-img").args(["check", "-q"]).arg(&disk).output()?;
        ensure!(checked.status.success(), "{checked:?}");
        Ok(())
    }

    async fn writes(&mut self) -> Result<()> {
        let first = self.written.iter().map(Written::newest).max().unwrap_or(0).max(self.highest()) + UNHEARD;
        self.written.iter_mut().for_each(|written| written.begun.push(first));
        self.writer = Some(Writer::begin(&self.guest, self.data, first, self.written.clone()).await?);
        // A guest's system hears of a disk a moment after it is there.
        self.until_heard(first, first).await
    }

    /// Waits until the guest has heard that these are on its own disk and on the volume, or newer ones.
    async fn until_heard(&self, own: u32, data: u32) -> Result<()> {
        let has = |disk, number| self.heard(disk).newest() >= number;
        self.stack()
            .until("what is written is heard of", async || Ok(has(Disk::Own, own) && has(Disk::Data, data)))
            .await
    }

    /// The highest number that was ever written: a volume that is restored has lower ones.
    fn highest(&self) -> u32 {
        self.kept.as_ref().map_or(0, |(_, written)| written.newest())
    }

    /// Has the writer end, where it has not with its guest.
    async fn rests(&mut self, is_up: bool) -> Result<()> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        if is_up {
            self.guest.run("touch /run/end").await?;
        }
        self.written = tokio::task::block_in_place(|| writer.end())?;
        Ok(())
    }

    /// All that was heard of is on a disk that nobody writes.
    fn has(&mut self, disk: Disk) -> Result<()> {
        let file = match disk {
            Disk::Own => format!("{}.qcow2", self.guest.instance),
            Disk::Data => format!("{}.qcow2", self.data),
        };
        let slots = self.slots(&file)?;
        let written = &mut self.written[disk as usize];
        let least = written.newest();
        written.learn(&slots, least).with_context(|| format!("{disk:?}"))?;
        Ok(())
    }

    fn heard(&self, disk: Disk) -> Written {
        self.writer.as_ref().map_or_else(|| self.written[disk as usize].clone(), |it| it.written(disk))
    }

    fn view(&self, volume: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.guest.asks(&["volume", "show", volume, "-o", "json"])?)?)
    }

    async fn until_volume(&self, volume: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<()> {
        self.stack().until(&format!("{volume} {what}"), async || Ok(is_so(&self.view(volume)?))).await
    }

    /// Whoever takes part is killed, at whatever they are; not libvirtd where a guest may be starting, which can hang for ever on that.
    async fn harm(&mut self, starts: bool) -> Result<()> {
        tokio::time::sleep(Duration::from_millis(self.random.random_range(0..1500))).await;
        match self.random.random_range(0..10) {
            0..4 => {
                let times = self.random.random_range(1..3);
                self.note(format!("  kill -9 of the agent, {times} time(s)"));
                for _ in 0..times {
                    self.guest.stack.kill_agent()?;
                    self.guest.stack.start_agent("").await?;
                    tokio::time::sleep(Duration::from_millis(self.random.random_range(0..500))).await;
                }
            }
            4..6 => {
                self.note("  kill -9 of etcd");
                self.guest.stack.etcd.kill();
                self.guest.stack.etcd.restart().await?;
            }
            6..8 if !starts => {
                self.note("  kill -9 of libvirtd");
                self.guest.stack.libvirt.kill_daemon();
                self.guest.stack.libvirt.start_daemon();
            }
            _ => {}
        }
        Ok(())
    }

    async fn grows(&mut self) -> Result<()> {
        if self.size == LARGEST {
            return Ok(());
        }
        self.size += 1;
        let size = self.size;
        self.note(format!("extend to {size}"));
        self.guest.asks(&["volume", "extend", "data", &size.to_string()])?;
        self.harm(false).await?;
        self.until_volume("data", "is larger", |view| view["size_gb"] == size && view["doing"].is_null())
            .await?;
        let file = self.stack().directory().join(format!("state/disks/{}.qcow2", self.data));
        let output = Command::new("qemu-img").args(["info", "-U", "--output=json"]).arg(&file).output()?;
        let info: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(info["virtual-size"] == u64::from(size) << 30, "it is as large as is told: {info}");
        Ok(())
    }

    /// A copy of one moment, of the volume or of both disks, while they are written.
    async fn is_copied(&mut self) -> Result<()> {
        let (before, own) = (self.heard(Disk::Data).newest(), self.heard(Disk::Own).newest());
        let what = ["clone", "volume snapshot", "snapshot"][self.random.random_range(0..3)];
        self.note(what);
        match what {
            "clone" => self.guest.asks(&["volume", "clone", "data", "copy"])?,
            "volume snapshot" => self.guest.asks(&["volume", "snapshot", "data", "copy"])?,
            _ => self.guest.asks(&["snapshot", "create", "web", "copy"])?,
        };
        self.harm(false).await?;
        self.until_volume("copy", "is there", |view| {
            view["status"] == "available" && view["doing"].is_null()
        })
        .await?;
        let copy: InstanceId = self.view("copy")?["volume"].as_str().context("it has a uuid")?.parse()?;
        let of_data = match what {
            "snapshot" => format!("{copy}.{}.copy.qcow2", self.data),
            _ => format!("{copy}.qcow2"),
        };
        self.is_sound(&of_data)?;
        let slots = self.slots(&of_data)?;
        // What was being written at that moment.
        self.until_heard(0, newest_of(&slots)).await?;
        let heard = self.heard(Disk::Data);
        let newest = heard.is_on(&slots, before).with_context(|| format!("the {what}"))?;
        if what == "snapshot" {
            let file = format!("{copy}.qcow2");
            self.is_sound(&file)?;
            let slots = self.slots(&file)?;
            self.until_heard(newest_of(&slots), 0).await?;
            let of_own = self.heard(Disk::Own).is_on(&slots, own).context("its own disk's copy")?;
            ensure!(of_own == newest || of_own == newest + 1, "of one moment: {of_own} and {newest}");
        }
        if what == "volume snapshot" && self.random.random_bool(0.5) {
            if self.kept.take().is_some() {
                self.guest.asks(&["snapshot", "delete", "kept", "--wait"])?;
            }
            let mut written = heard;
            written.heard.retain(|number| *number <= newest);
            written.learn(&slots, newest)?;
            self.guest.asks(&["volume", "rename", "copy", "kept"])?;
            self.kept = Some((copy, written));
            return Ok(());
        }
        let noun = if what == "clone" { "volume" } else { "snapshot" };
        self.guest.asks(&[noun, "delete", "copy"])?;
        self.harm(false).await?;
        self.stack()
            .until("the copy is gone", async || {
                let shown = self.stack().eschedule(&["volume", "show", &copy.to_string()])?;
                Ok(shown.status.code() == Some(1) && String::from_utf8_lossy(&shown.stderr).contains("no "))
            })
            .await
    }

    /// Taken from the guest while that writes it; perhaps restored; and given back.
    async fn comes_and_goes(&mut self) -> Result<()> {
        self.note("detach");
        self.guest.asks(&["volume", "detach", "data"])?;
        self.harm(false).await?;
        self.until_volume("data", "is free", |view| view["status"] == "available" && view["doing"].is_null())
            .await?;
        self.rests(true).await?;
        self.has(Disk::Data)?;
        self.is_sound(&format!("{}.qcow2", self.data))?;
        if let Some((_, written)) = self.kept.clone()
            && self.random.random_bool(0.6)
        {
            self.note("restore");
            // Waited for by its own time: how it stands says nothing of that.
            let mut restore = self.stack().command("eschedule");
            let restore = restore.args(["snapshot", "restore", "kept"]).stderr(Stdio::piped());
            let restore = restore.stdout(Stdio::null()).spawn()?;
            self.harm(false).await?;
            let output = tokio::task::block_in_place(|| restore.wait_with_output())?;
            if !output.status.success() {
                // Killed beside it, etcd may not have answered: said again, it is so.
                self.note(format!("  told: {}", String::from_utf8_lossy(&output.stderr).trim()));
                self.guest.asks(&["snapshot", "restore", "kept"])?;
            }
            self.written[Disk::Data as usize] = written;
            self.has(Disk::Data).context("restored")?;
            self.is_sound(&format!("{}.qcow2", self.data))?;
        }
        self.note("attach");
        self.guest.asks(&["volume", "attach", "data", "web"])?;
        self.harm(false).await?;
        self.is_given().await?;
        self.writes().await
    }

    /// Said again, it is waited for. A libvirtd that is killed in the midst of it may leave a guest with a disk of which it does not
    /// know, and that guest has to let go of it first.
    async fn is_given(&mut self) -> Result<()> {
        let waits = ["volume", "attach", "data", "web", "--wait", "--timeout", "60"];
        let output = self.stack().eschedule(&waits)?;
        if output.status.success() {
            return Ok(());
        }
        let shown = self.guest.asks(&["show", "web"])?;
        ensure!(shown.contains("libvirt does not know that it has it"), "{output:?}: {shown}");
        self.note("  the guest has it, and libvirt does not know");
        self.guest.asks(&["reboot", "--hard", "web", "--wait"])?;
        self.guest.asks(&waits).map(drop)
    }

    /// Its guest is ended, asked or not, and started again.
    async fn starts_anew(&mut self) -> Result<()> {
        match self.random.random_range(0..3) {
            0 => {
                self.note("reboot --hard");
                self.guest.asks(&["reboot", "--hard", "web"])?;
                self.harm(true).await?;
            }
            1 => {
                self.note("kill -9 of QEMU");
                let pid = self.stack().libvirt.guest_process(self.guest.instance).context("it runs")?;
                nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL)?;
                self.harm(true).await?;
                self.stack().until_state(self.guest.instance, State::Stopped).await?;
                self.rests(false).await?;
                self.has(Disk::Own)?;
                self.has(Disk::Data)?;
                self.guest.asks(&["start", "web"])?;
                self.harm(true).await?;
            }
            _ => {
                self.note("stop");
                self.guest.asks(&["stop", "web", "--grace", "20"])?;
                self.harm(true).await?;
                self.stack().until_state(self.guest.instance, State::Stopped).await?;
                self.rests(false).await?;
                for (disk, file) in [(Disk::Own, self.guest.instance), (Disk::Data, self.data)] {
                    self.has(disk)?;
                    self.is_sound(&format!("{file}.qcow2"))?;
                }
                self.guest.asks(&["start", "web"])?;
                self.harm(true).await?;
            }
        }
        self.rests(false).await?;
        self.stack().until_state(self.guest.instance, State::Active).await?;
        self.writes().await
    }

    async fn round(&mut self) -> Result<()> {
        match self.random.random_range(0..10) {
            0..2 => self.grows().await?,
            2..6 => self.is_copied().await?,
            6..9 => self.comes_and_goes().await?,
            _ => self.starts_anew().await?,
        }
        let kept = self.kept.as_ref().map(|(snapshot, _)| *snapshot);
        let volumes: Vec<InstanceId> = kept.into_iter().chain([self.data]).collect();
        self.stack().until_exactly_with(&[self.guest.instance], &volumes).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_killed_no_byte_of_what_a_guest_writes_is_wrong() -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>()).transpose();
    let seed = number("SEED")?.unwrap_or_else(rand::random);
    println!("SEED={seed}");
    let guest = Guest::up_as(TWO, &[]).await?;
    guest.asks(&["volume", "create", "data", "--size", "1", "--for", "web", "--wait"])?;
    guest.asks(&["volume", "attach", "data", "web", "--wait"])?;
    let shown: Value = serde_json::from_str(&guest.asks(&["volume", "show", "data", "-o", "json"])?)?;
    let data = shown["volume"].as_str().context("it has a uuid")?.parse()?;
    let mut trial = Trial {
        guest,
        data,
        size: 1,
        random: StdRng::seed_from_u64(seed),
        writer: None,
        written: Default::default(),
        kept: None,
        done: Vec::new(),
    };
    trial.writes().await?;
    for round in 0..number("ROUNDS")?.unwrap_or(u64::from(ROUNDS)) {
        let outcome = trial.round().await;
        outcome.with_context(|| format!("SEED={seed}, round {round}: {:#?}", trial.done))?;
    }
    trial.guest.asks(&["stop", "web", "--wait", "--grace", "20"])?;
    trial.rests(false).await?;
    for disk in [Disk::Own, Disk::Data] {
        trial.has(disk)?;
        ensure!(trial.written[disk as usize].newest() > 0, "something was written");
    }
    trial.guest.asks(&["destroy", "web", "--wait"])?;
    for volume in trial.kept.iter().map(|_| "kept").chain(["data"]) {
        trial.guest.asks(&["volume", "delete", volume, "--wait"])?;
    }
    trial.stack().until_exactly(&[]).await
}

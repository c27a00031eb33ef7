//! What is done to a running guest, from the start of the command to libvirt's word that it is so, against the bare libvirt
//! calls that it needs on a guest of the same kind, by turns.

use std::{
    process::Command,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ec_model::InstanceId;
use ec_tests::Stack;
use virt::{
    domain::{Domain, DomainState},
    enumutil::Enum,
    error::ErrorNumber,
    sys,
};

use crate::{
    bare::PATIENCE,
    build::Pattern,
    orders::Orders,
    stats::{Figure, Goal, Samples},
};

const ROUNDS: usize = 8;
/// How exactly the moment is seen; the same for both sides.
const POLL: Duration = Duration::from_millis(2);
/// Before each verb both guests use less than [`IDLE`] in such a time, so that what was done before does not weigh on it, and
/// both have as much memory to be saved.
const SETTLE: Duration = Duration::from_millis(300);
/// Of processor time: one that boots takes nearly all that there is.
const IDLE: Duration = Duration::from_millis(40);
/// So often a bare guest is asked to end; agents ask more rarely.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// A domain's disk.
const DISK: &str = "vda";
const GIB: u64 = 1 << 30;

/// A guest made by libvirt's calls alone.
struct Twin<'a> {
    pattern: &'a Pattern,
    instance: InstanceId,
    domain: Domain,
    /// The document of the domain that rescues it.
    rescue: String,
    /// What its disk is to have, in bytes.
    bytes: u64,
}

impl Twin<'_> {
    fn disk(&self, what: &str) -> String {
        format!("{}{what}.qcow2", self.instance)
    }

    /// Ends it by its power button, pressed as often as it takes: one that was booting did not hear.
    fn end(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut again = Instant::now();
        while self.domain.is_active()? {
            ensure!(Instant::now() < deadline, "it did not end");
            if Instant::now() >= again {
                // It may have ended just now.
                self.domain.shutdown().ok();
                again = Instant::now() + ASK_AGAIN;
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

/// How libvirt has a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    is_running: bool,
    is_paused: bool,
    /// Of its process: another one, another number.
    id: Option<u32>,
    /// What its disk has, in bytes, where it runs.
    bytes: u64,
    /// Its memory, in KiB.
    memory: u64,
}

impl Seen {
    /// None where there is no such domain.
    fn of(stack: &Stack, instance: InstanceId) -> Result<Option<Self>> {
        Look::new(stack, instance).look()
    }
}

/// Looks at one guest on a connection of its own.
struct Look {
    connect: virt::connect::Connect,
    instance: InstanceId,
}

impl Look {
    fn new(stack: &Stack, instance: InstanceId) -> Self {
        Self { connect: stack.libvirt.connection(), instance }
    }

    fn look(&self) -> Result<Option<Seen>> {
        let seen = || -> Result<Seen, virt::error::Error> {
            let domain = self.connect.lookup_domain_by_uuid(self.instance.uuid())?;
            let state = domain.state()?.0;
            let is = |wanted: DomainState| matches!(state, Enum::Known(state) if state == wanted);
            let is_running = is(DomainState::Running);
            let bytes = if is_running { domain.block_info(DISK, 0)?.capacity } else { 0 };
            let (is_paused, id, memory) = (is(DomainState::Paused), domain.id(), domain.info()?.max_mem);
            Ok(Seen { is_running, is_paused, id, bytes, memory })
        };
        match seen() {
            Ok(seen) => Ok(Some(seen)),
            Err(error) if matches!(error.code(), Enum::Known(ErrorNumber::NoDomain)) => Ok(None),
            // It ended between two questions.
            Err(error) if matches!(error.code(), Enum::Known(ErrorNumber::OperationInvalid)) => {
                Ok(Some(Seen { is_running: false, is_paused: false, id: None, bytes: 0, memory: 0 }))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The moment at which it is so.
    fn when(self, verb: &'static Verb, before: Option<Seen>) -> Result<JoinHandle<Result<Instant>>> {
        let look = thread::Builder::new().name("look".to_owned()).spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            while Instant::now() < deadline {
                if (verb.is_done)(before, self.look()?) {
                    return Ok(Instant::now());
                }
                thread::sleep(POLL);
            }
            bail!("{}: not done", verb.name)
        })?;
        Ok(look)
    }
}

struct Verb {
    name: &'static str,
    /// `@` stands for the guest, and `#` for how many GiB its disk is to have, or MiB its memory.
    arguments: &'static [&'static str],
    /// What is to be said besides when it is done; not measured.
    after: &'static [&'static str],
    calls: &'static str,
    call: fn(&mut Twin<'_>) -> Result<()>,
    /// Where the calls are so short that a process beside them weighs: the command of virsh that does the same, as `@` for the
    /// guest, and the name of the figure that sets ours beside it.
    virsh: Option<(&'static str, &'static str)>,
    is_done: fn(Option<Seen>, Option<Seen>) -> bool,
}

fn runs(_: Option<Seen>, seen: Option<Seen>) -> bool {
    seen.is_some_and(|seen| seen.is_running)
}

fn is_off(_: Option<Seen>, seen: Option<Seen>) -> bool {
    seen.is_some_and(|seen| seen.id.is_none())
}

/// Another process than before.
fn runs_anew(before: Option<Seen>, seen: Option<Seen>) -> bool {
    seen.is_some_and(|seen| seen.is_running && Some(seen.id) != before.map(|before| before.id))
}

const VERBS: [Verb; 11] = [
    Verb {
        name: "pause",
        arguments: &["pause", "--wait", "@"],
        after: &[],
        calls: "suspend",
        call: |twin| Ok(twin.domain.suspend()?),
        virsh: Some(("suspend @", "  beside virsh suspend")),
        is_done: |_, seen| seen.is_some_and(|seen| seen.is_paused),
    },
    Verb {
        name: "unpause",
        arguments: &["unpause", "--wait", "@"],
        after: &[],
        calls: "resume",
        call: |twin| Ok(twin.domain.resume()?),
        virsh: Some(("resume @", "  beside virsh resume")),
        is_done: runs,
    },
    Verb {
        name: "suspend",
        arguments: &["suspend", "--wait", "@"],
        after: &[],
        calls: "managedsave",
        call: |twin| Ok(twin.domain.managed_save(0)?),
        virsh: None,
        is_done: is_off,
    },
    Verb {
        name: "resume",
        arguments: &["resume", "--wait", "@"],
        after: &[],
        calls: "start of what was saved",
        call: |twin| Ok(twin.domain.create()?),
        virsh: None,
        is_done: runs,
    },
    Verb {
        name: "stop --grace 0",
        arguments: &["stop", "--grace", "0", "--wait", "@"],
        after: &[],
        calls: "destroy",
        call: |twin| Ok(twin.domain.destroy()?),
        virsh: None,
        is_done: is_off,
    },
    Verb {
        name: "start",
        arguments: &["start", "--wait", "@"],
        after: &[],
        calls: "start",
        call: |twin| Ok(twin.domain.create()?),
        virsh: None,
        is_done: runs,
    },
    Verb {
        name: "reboot --hard",
        arguments: &["reboot", "--hard", "--wait", "@"],
        after: &[],
        calls: "destroy and start",
        call: |twin| {
            twin.domain.destroy()?;
            Ok(twin.domain.create()?)
        },
        virsh: None,
        is_done: runs_anew,
    },
    Verb {
        name: "resize of the disk",
        arguments: &["resize", "--wait", "@", "resources=VCPU:1,MEMORY_MB:128,DISK_GB:#"],
        after: &["resize", "--confirm", "@"],
        calls: "blockresize",
        call: |twin| Ok(twin.domain.block_resize(DISK, twin.bytes, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)?),
        virsh: Some(("blockresize @ vda 2G", "  beside virsh blockresize")),
        is_done: |before, seen| {
            let bytes = |seen: Option<Seen>| seen.map_or(0, |seen| seen.bytes);
            bytes(seen) > bytes(before)
        },
    },
    Verb {
        name: "rescue",
        arguments: &["rescue", "--wait", "@"],
        after: &[],
        calls: "vol-create, shutdown until it is off, and create of the same XML",
        // Asked to end by both, since only then its disk is as its system leaves it.
        call: |twin| {
            twin.pattern.make_disk(twin.instance, &twin.disk(".rescue"))?;
            twin.end()?;
            twin.pattern.create(&twin.rescue)
        },
        virsh: None,
        is_done: runs_anew,
    },
    Verb {
        name: "unrescue",
        arguments: &["unrescue", "--wait", "@"],
        after: &[],
        calls: "destroy, start and vol-delete",
        call: |twin| {
            twin.domain.destroy()?;
            twin.domain.create()?;
            twin.pattern.delete_disk(&twin.disk(".rescue"))
        },
        virsh: None,
        is_done: runs_anew,
    },
    Verb {
        name: "rebuild",
        arguments: &["rebuild", "--wait", "@"],
        after: &[],
        calls: "destroy, vol-delete, vol-create and start",
        call: |twin| {
            twin.domain.destroy()?;
            twin.pattern.delete_disk(&twin.disk(""))?;
            twin.pattern.make_disk(twin.instance, &twin.disk(""))?;
            Ok(twin.domain.create()?)
        },
        virsh: None,
        is_done: runs_anew,
    },
];

const DESTROY: Verb = Verb {
    name: "destroy",
    arguments: &["destroy", "--wait", "@"],
    after: &[],
    calls: "destroy, vol-delete and undefine",
    call: |twin| {
        twin.domain.destroy()?;
        twin.pattern.delete_disk(&twin.disk(""))?;
        Ok(twin.domain.undefine()?)
    },
    virsh: None,
    is_done: |_, seen| seen.is_none(),
};

/// What libvirt can add memory to was started with so much.
const LARGE: &str = "resources=VCPU:1,MEMORY_MB:1024,DISK_GB:1";
/// What is added, as a bench of memory; virsh is told it by a file, `%`.
const BLOCK: &str =
    "<memory model='dimm'><target><size unit='MiB'>128</size><node>0</node></target></memory>";

const GROW: Verb = Verb {
    name: "resize of the memory, live",
    arguments: &["resize", "--wait", "@", "resources=VCPU:1,MEMORY_MB:#,DISK_GB:1"],
    after: &["resize", "--confirm", "--wait", "@"],
    calls: "attach-device of 128 MiB, for good",
    call: |twin| {
        let flags = sys::VIR_DOMAIN_AFFECT_LIVE | sys::VIR_DOMAIN_AFFECT_CONFIG;
        Ok(twin.domain.attach_device_flags(BLOCK, flags).map(drop)?)
    },
    virsh: Some(("attach-device @ % --live --config", "  beside virsh attach-device")),
    is_done: |before, seen| {
        let memory = |seen: Option<Seen>| seen.map_or(0, |seen| seen.memory);
        memory(seen) > memory(before)
    },
};

/// Gives guests that run memory, a block each round.
fn grow(stack: &Stack) -> Result<[Figure; 2]> {
    let (words, name) = GROW.virsh.context("virsh has it")?;
    let (mut by_us, mut by_virsh) = (figure(&GROW), virsh_figure(name));
    let block = stack.directory().join("block.xml");
    std::fs::write(&block, BLOCK)?;
    let words = words.replace('%', &block.display().to_string());
    let instance = stack.schedule_as(LARGE, &["--wait"])?;
    let pattern = Pattern::of(stack, instance)?;
    let (other, third) = (Orders::instance(), Orders::instance());
    let mut twin = Twin {
        pattern: &pattern,
        instance: other,
        domain: pattern.make(other)?,
        rescue: String::new(),
        bytes: 0,
    };
    pattern.make(third)?;
    let guests = [instance, other, third];
    for megabytes in (1152..).step_by(128).take(ROUNDS) {
        settled(stack, &guests)?;
        let ask = || asked(stack, GROW.arguments, instance, megabytes);
        by_us.ours.push_time(measured(stack, &GROW, instance, ask)?);
        asked(stack, GROW.after, instance, megabytes)?;
        settled(stack, &guests)?;
        let time = measured(stack, &GROW, other, || (GROW.call)(&mut twin))?;
        if let Some((_, bare)) = &mut by_us.bare {
            bare.push_time(time);
        }
        settled(stack, &guests)?;
        let time = measured(stack, &GROW, third, || virsh(stack, &words, third))?;
        if let Some((_, bare)) = &mut by_virsh.bare {
            bare.push_time(time);
        }
    }
    by_virsh.ours = by_us.ours.clone();
    asked(stack, &["destroy", "--wait", "@"], instance, 0)?;
    for guest in [other, third] {
        pattern.remove(stack, guest)?;
    }
    Ok([by_us, by_virsh])
}

/// Measures with the stack's agent, which must run.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let first = stack.schedule(&["--wait"])?;
    tokio::task::block_in_place(|| {
        let pattern = Pattern::of(stack, first)?;
        let mut figures: Vec<Figure> = VERBS.iter().chain([&DESTROY]).map(figure).collect();
        let mut by_virsh: Vec<Figure> =
            VERBS.iter().filter_map(|verb| verb.virsh).map(|(_, name)| virsh_figure(name)).collect();
        asked(stack, &["rescue", "--wait", "@"], first, 0)?;
        let rescue = stack.libvirt.connection().lookup_domain_by_uuid(first.uuid())?.xml_desc(0)?;
        asked(stack, &["unrescue", "--wait", "@"], first, 0)?;
        asked(stack, &["destroy", "--wait", "@"], first, 0)?;
        for _ in 0..ROUNDS {
            let instance = stack.schedule(&["--wait"])?;
            let other = Orders::instance();
            let mut twin = Twin {
                pattern: &pattern,
                instance: other,
                domain: pattern.make(other)?,
                rescue: pattern.renamed(&rescue, other),
                bytes: 2 * GIB,
            };
            let third = Orders::instance();
            let by_hand = pattern.make(third)?;
            let mut hands = by_virsh.iter_mut();
            for (verb, figure) in VERBS.iter().chain([&DESTROY]).zip(&mut figures) {
                settled(stack, &[instance, other, third])?;
                let time = measured(stack, verb, instance, || asked(stack, verb.arguments, instance, 2))?;
                figure.ours.push_time(time);
                if !verb.after.is_empty() {
                    asked(stack, verb.after, instance, 2)?;
                }
                settled(stack, &[instance, other])?;
                let time = measured(stack, verb, other, || (verb.call)(&mut twin))?;
                if let Some((_, bare)) = &mut figure.bare {
                    bare.push_time(time);
                }
                if let Some((words, _)) = verb.virsh {
                    settled(stack, &[other, third])?;
                    let time = measured(stack, verb, third, || virsh(stack, words, third))?;
                    let hand = hands.next().context("a figure for each command of virsh")?;
                    hand.ours = figure.ours.clone();
                    if let Some((_, bare)) = &mut hand.bare {
                        bare.push_time(time);
                    }
                }
            }
            by_hand.destroy()?;
            pattern.delete_disk(&format!("{third}.qcow2"))?;
            by_hand.undefine()?;
        }
        figures.extend(by_virsh);
        figures.extend(grow(stack)?);
        Ok(figures)
    })
}

fn figure(verb: &'static Verb) -> Figure {
    let (ours, bare) = (Samples::default(), Some((verb.calls, Samples::default())));
    Figure { name: verb.name, unit: "ms", ours, bare, goals: vec![Goal::Ratio(1.15), Goal::Above(100.0)] }
}

/// The same of ours beside another process.
fn virsh_figure(name: &'static str) -> Figure {
    let bare = Some(("the process of virsh that makes the call", Samples::default()));
    Figure { name, unit: "ms", ours: Samples::default(), bare, goals: Vec::new() }
}

/// Waits until none of the guests has more to do than to wait.
pub(crate) fn settled(stack: &Stack, guests: &[InstanceId]) -> Result<()> {
    let connect = stack.libvirt.connection();
    // One that is not there uses nothing.
    let used = || -> u64 {
        let domains = guests.iter().filter_map(|guest| connect.lookup_domain_by_uuid(guest.uuid()).ok());
        domains.filter_map(|domain| Some(domain.info().ok()?.cpu_time)).sum()
    };
    let deadline = Instant::now() + PATIENCE;
    let mut before = used();
    while Instant::now() < deadline {
        thread::sleep(SETTLE);
        let now = used();
        if Duration::from_nanos(now.saturating_sub(before)) < IDLE {
            return Ok(());
        }
        before = now;
    }
    bail!("a guest has something to do still")
}

/// The time from before it is asked for until libvirt says that it is so.
fn measured(
    stack: &Stack,
    verb: &'static Verb,
    instance: InstanceId,
    ask: impl FnOnce() -> Result<()>,
) -> Result<Duration> {
    let before = Seen::of(stack, instance)?;
    let seen = Look::new(stack, instance).when(verb, before)?;
    let begun = Instant::now();
    ask().context(verb.name)?;
    Ok(seen.join().map_err(|_| anyhow!("the look panicked"))?? - begun)
}

pub(crate) fn asked(stack: &Stack, arguments: &[&str], instance: InstanceId, size: u64) -> Result<()> {
    let arguments: Vec<String> = arguments
        .iter()
        .map(|word| word.replace('@', &instance.to_string()).replace('#', &size.to_string()))
        .collect();
    let output = stack.eschedule(&arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

pub(crate) fn virsh(stack: &Stack, words: &str, instance: InstanceId) -> Result<()> {
    let output = Command::new("virsh")
        .args(["-q", "-c", stack.libvirt.uri()])
        .args(words.replace('@', &instance.to_string()).split_whitespace())
        .output()
        .context("virsh")?;
    ensure!(output.status.success(), "virsh {words}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

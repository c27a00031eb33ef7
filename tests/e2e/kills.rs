//! kill -9 of the agent before each step of each verb, on real guests.
//!
//! Which steps a verb has is found by doing it once unharmed: they are named by the agent's log. Then it is asked for
//! again for each of them, and the agent killed where it comes there: as often in a row as `KILLS` says. Where it says
//! nothing, once, and only at the steps that make the verb.

use std::{collections::BTreeSet, fs, process::Command, time::Instant};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State};
use ec_tests::Stack;

use crate::{power::Guest, resize::claimed};

/// A verb, and what it finds.
struct Verb {
    /// What is asked for.
    ask: &'static [&'static str],
    /// As `events` calls it.
    event: &'static str,
    /// What is done before each time, so that it can be asked for.
    ready: &'static [&'static [&'static str]],
    /// How it stands afterwards.
    state: State,
    /// The steps that make it.
    steps: &'static [&'static str],
}

const UP: &[&str] = &["start", "--wait", "web"];
const LARGE: &str = "resources=VCPU:2,MEMORY_MB:160,DISK_GB:1";
/// From the one to the other it grows while it runs.
const ROOMY: [&str; 2] =
    ["resources=VCPU:1,MEMORY_MB:1024,DISK_GB:1", "resources=VCPU:1,MEMORY_MB:1152,DISK_GB:1"];
const CONFIRM: &[&str] = &["resize", "--confirm", "web"];
const REVERT: &[&str] = &["resize", "--revert", "--wait", "web"];

/// Kills of the agent, each of which is followed by its start.
pub(crate) struct Kills {
    /// At each step; where it is not said, at the most telling ones.
    each: Option<u32>,
    done: u32,
    began: Instant,
}

impl Kills {
    pub(crate) fn new() -> Result<Self> {
        let each = std::env::var("KILLS")
            .ok()
            .map(|kills| kills.parse())
            .transpose()
            .context("KILLS is a number")?;
        Ok(Self { each, done: 0, began: Instant::now() })
    }

    pub(crate) fn at_each(&self) -> u32 {
        self.each.unwrap_or(1)
    }

    /// Those of the steps that it comes to at which it is killed.
    pub(crate) fn chosen(&self, come_to: &BTreeSet<String>, telling: &[&str]) -> Result<BTreeSet<String>> {
        let telling: BTreeSet<String> = telling.iter().map(|step| (*step).to_owned()).collect();
        ensure!(telling.is_subset(come_to), "wanted {telling:?}, it comes to {come_to:?}");
        Ok(if self.each.is_some() { come_to.clone() } else { telling })
    }

    /// Kills the agent where it comes to a step, as often in a row as is left, unless what it is at is done before. An agent
    /// that is not harmed any more is left.
    pub(crate) async fn harm(
        &mut self,
        stack: &mut Stack,
        step: &str,
        left: &mut u32,
        is_done: impl AsyncFn(&Stack) -> Result<bool>,
    ) -> Result<()> {
        let marker = format!("failpoint point=\"{step}\"");
        while *left > 0 {
            stack
                .until(&format!("it comes to {step}, or is done"), async || {
                    Ok(stack.log().contains(&marker) || is_done(stack).await.unwrap_or(false))
                })
                .await?;
            if !stack.log().contains(&marker) {
                return anew(stack, "").await;
            }
            *left -= 1;
            self.done += 1;
            anew(stack, &armed(step, *left)).await?;
        }
        Ok(())
    }

    #[expect(clippy::print_stdout, reason = "the figures of a run by hand")]
    pub(crate) fn tell(&self, what: &str, steps: &BTreeSet<String>) {
        println!("{:>4} s, {:>4} kills: {what}: {steps:?}", self.began.elapsed().as_secs(), self.done);
    }
}

/// What an agent is started with that is to be killed at a step.
pub(crate) fn armed(step: &str, left: u32) -> String {
    if left > 0 { format!("{step}=pause") } else { String::new() }
}

pub(crate) async fn anew(stack: &mut Stack, failpoints: &str) -> Result<()> {
    stack.kill_agent()?;
    stack.start_agent(failpoints).await
}

/// When this was asked for the last time, and what came of it.
fn last(stack: &Stack, instance: InstanceId, verb: &str) -> Result<Option<(String, String)>> {
    let output = stack.eschedule(&["events", &instance.to_string(), "-o", "json"])?;
    ensure!(output.status.success(), "{output:?}");
    let told: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
    let word = |it: &serde_json::Value, key: &str| it[key].as_str().unwrap_or("-").to_owned();
    let last = told.iter().rfind(|event| event["verb"] == verb);
    Ok(last.map(|event| (word(event, "at"), word(event, "outcome"))))
}

/// Whether its node keeps what the guest is to be told.
fn is_told(stack: &Stack, instance: InstanceId) -> Result<bool> {
    let record = stack.directory().join(format!("state/instances/{instance}.json"));
    Ok(fs::read_to_string(record)?.contains("the db"))
}

/// Whether what was asked for after `before` is done.
async fn is_done(stack: &Stack, instance: InstanceId, verb: &Verb, before: Option<&str>) -> Result<bool> {
    if verb.event == "set" {
        return is_told(stack, instance);
    }
    let Some((at, outcome)) = last(stack, instance, verb.event)? else { return Ok(false) };
    ensure!(Some(at.as_str()) != before, "nothing is told of it");
    let state = stack.status(instance).await?.map(|status| status.state);
    ensure!(outcome == "done" && state == Some(verb.state), "it is {outcome}, {state:?}");
    Ok(true)
}

struct Trial {
    guest: Guest,
    kills: Kills,
    /// Of what the guest wrote, looked for on its disk.
    sum: String,
}

impl Trial {
    async fn begin() -> Result<Self> {
        let guest = Guest::up(&[]).await?;
        let mut trial = Self { guest, kills: Kills::new()?, sum: String::new() };
        trial.write().await?;
        Ok(trial)
    }

    /// The guest writes something that it had not before.
    async fn write(&mut self) -> Result<()> {
        let command = "dd if=/dev/urandom of=/dev/vda bs=1M seek=500 count=8 conv=fsync";
        self.guest.run(command).await?;
        self.sum = self.on_disk()?;
        Ok(())
    }

    /// What lies on its disk there, whether it runs or not.
    fn on_disk(&self) -> Result<String> {
        let directory = self.guest.stack.directory();
        let disk = directory.join(format!("state/disks/{}.qcow2", self.guest.instance));
        let piece = directory.join("piece");
        let [from, to] =
            [("if", &disk), ("of", &piece)].map(|(name, path)| format!("{name}={}", path.display()));
        let arguments =
            ["dd", "-U", "-f", "qcow2", "-O", "raw", "bs=1M", "skip=500", "count=508", &from, &to];
        let output = Command::new("qemu-img").args(arguments).output()?;
        ensure!(output.status.success(), "qemu-img dd: {output:?}");
        let output = Command::new("sha256sum").arg(&piece).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// One that boots still does not hear that it is asked to end, and is waited for until its time is over.
    async fn hears(&self) -> Result<()> {
        let status = self.guest.stack.status(self.guest.instance).await?;
        if status.is_some_and(|status| status.state == State::Active) {
            self.guest.run("true").await?;
        }
        Ok(())
    }

    /// Makes it ready for the verb; answers when that was asked for before.
    async fn prepare(&mut self, verb: &Verb) -> Result<Option<String>> {
        for ready in verb.ready {
            self.hears().await?;
            self.guest.asks(ready)?;
        }
        self.hears().await?;
        let (stack, instance) = (&self.guest.stack, self.guest.instance);
        if verb.event == "set" {
            stack.until("it is told no more", async || Ok(!is_told(stack, instance)?)).await?;
        }
        ensure!(self.on_disk()? == self.sum, "{}: what it wrote is lost before", verb.event);
        Ok(last(&self.guest.stack, instance, verb.event)?.map(|(at, _)| at))
    }

    /// Done once, with nothing lost, doubled or left.
    async fn settle(&mut self, verb: &Verb, before: Option<&str>, step: &str) -> Result<()> {
        let (stack, instance) = (&self.guest.stack, self.guest.instance);
        let what = format!("{} is done ({step})", verb.ask.join(" "));
        stack.until(&what, async || is_done(stack, instance, verb, before).await).await?;
        let kept = self.on_disk()? == self.sum;
        ensure!(kept == (verb.event != "rebuild"), "{what}: what it wrote is there: {kept}");
        stack.until_exactly(&[instance]).await?;
        let disks = fs::read_dir(stack.directory().join("state/disks"))?.flatten();
        let disks = disks.filter(|file| file.path().extension().is_some_and(|of| of == "qcow2")).count();
        let wanted = if verb.state == State::Rescued { 2 } else { 1 };
        ensure!(disks == wanted, "{what}: there are {disks} disks");
        if let "resize" | "revertResize" = verb.event {
            let vcpus = if verb.ask.contains(&LARGE) { 2 } else { 1 };
            if verb.event == "revertResize" {
                // What was claimed for it is given back once somebody waited for that.
                self.guest.asks(REVERT)?;
            }
            ensure!(claimed(&self.guest).await?.vcpus == vcpus, "{what}: another size is claimed");
            let domain = stack.libvirt.connection().lookup_domain_by_name(&instance.to_string())?;
            ensure!(u64::from(domain.info()?.nr_virt_cpu) == vcpus, "{what}: it has another size");
        }
        if verb.event == "rebuild" {
            // This stays: it is not made anew twice for one wish.
            self.write().await?;
        }
        Ok(())
    }

    async fn run(&mut self, verb: &Verb) -> Result<()> {
        anew(&mut self.guest.stack, "").await?;
        let before = self.prepare(verb).await?;
        let heard = self.guest.stack.log().len();
        self.guest.asks(verb.ask)?;
        self.settle(verb, before.as_deref(), "unharmed").await?;
        let asked = verb.ask.join(" ");
        let steps = points(&self.guest.stack.log()[heard..]);
        let steps = self.kills.chosen(&steps, verb.steps).with_context(|| asked.clone())?;
        for step in &steps {
            self.kill_at(verb, step).await.with_context(|| format!("{asked}, {step}"))?;
        }
        self.kills.tell(&asked, &steps);
        Ok(())
    }

    async fn kill_at(&mut self, verb: &Verb, step: &str) -> Result<()> {
        let mut left = self.kills.at_each();
        // Some are not come to each time, as where an address is found in the one job or in the next.
        for _ in 0..=self.kills.at_each() {
            let before = self.prepare(verb).await?;
            anew(&mut self.guest.stack, &armed(step, left)).await?;
            self.guest.asks(verb.ask)?;
            let instance = self.guest.instance;
            let is_done = async |stack: &Stack| is_done(stack, instance, verb, before.as_deref()).await;
            self.kills.harm(&mut self.guest.stack, step, &mut left, is_done).await?;
            self.settle(verb, before.as_deref(), step).await?;
            if left == 0 {
                break;
            }
        }
        ensure!(
            left < self.kills.at_each() || !verb.steps.contains(&step),
            "the agent did not come there again"
        );
        Ok(())
    }
}

/// The steps that a log tells of.
pub(crate) fn points(log: &str) -> BTreeSet<String> {
    let named = |line: &str| Some(line.split_once("failpoint point=\"")?.1.split_once('"')?.0.to_owned());
    log.lines().filter_map(named).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_a_stop_a_start_and_both_reboots() -> Result<()> {
    let mut trial = Trial::begin().await?;
    for verb in [
        Verb {
            ask: &["stop", "--grace", "2", "web"],
            event: "stop",
            ready: &[UP],
            state: State::Stopped,
            steps: &["before-shut-down", "before-note-power"],
        },
        Verb {
            ask: &["start", "web"],
            event: "start",
            ready: &[&["stop", "--grace", "0", "--wait", "web"]],
            state: State::Active,
            steps: &["before-start", "before-note-start"],
        },
        Verb {
            ask: &["reboot", "--grace", "2", "web"],
            event: "reboot",
            ready: &[UP],
            state: State::Active,
            steps: &["before-announce", "before-shut-down", "before-start"],
        },
        Verb {
            ask: &["reboot", "--hard", "web"],
            event: "reboot",
            ready: &[UP],
            state: State::Active,
            steps: &["before-power-off", "before-start"],
        },
    ] {
        trial.run(&verb).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_what_keeps_its_memory() -> Result<()> {
    let mut trial = Trial::begin().await?;
    let boot = trial.guest.boot().await?;
    for verb in [
        Verb {
            ask: &["pause", "web"],
            event: "pause",
            ready: &[&["unpause", "--wait", "web"]],
            state: State::Paused,
            steps: &["before-pause", "before-note-power"],
        },
        Verb {
            ask: &["unpause", "web"],
            event: "unpause",
            ready: &[&["pause", "--wait", "web"]],
            state: State::Active,
            steps: &["before-resume"],
        },
        Verb {
            ask: &["suspend", "web"],
            event: "suspend",
            ready: &[&["resume", "--wait", "web"]],
            state: State::Suspended,
            steps: &["before-save", "before-note-power"],
        },
        Verb {
            ask: &["resume", "web"],
            event: "resume",
            ready: &[&["suspend", "--wait", "web"]],
            state: State::Active,
            steps: &["before-start", "before-note-start"],
        },
        Verb {
            ask: &["set", "web", "--meta", "role=the db"],
            event: "set",
            ready: &[&["unset", "web", "--meta", "role"]],
            state: State::Active,
            steps: &["before-keep-intent"],
        },
    ] {
        trial.run(&verb).await?;
    }
    assert_eq!(trial.guest.boot().await?, boot, "its memory was kept all along");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_a_rebuild() -> Result<()> {
    let mut trial = Trial::begin().await?;
    trial
        .run(&Verb {
            ask: &["rebuild", "web"],
            event: "rebuild",
            ready: &[],
            state: State::Active,
            steps: &[
                "before-prepare-rebuild",
                "before-power-off",
                "before-replace-disk",
                "before-note-rebuild",
            ],
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_a_rescue_and_its_end() -> Result<()> {
    let mut trial = Trial::begin().await?;
    for verb in [
        Verb {
            ask: &["rescue", "web"],
            event: "rescue",
            ready: &[&["unrescue", "--wait", "web"]],
            state: State::Rescued,
            steps: &[
                "before-prepare-rescue",
                "before-shut-down",
                "before-enter-rescue",
                "before-start-rescue",
                "before-note-rescue",
            ],
        },
        Verb {
            ask: &["unrescue", "web"],
            event: "unrescue",
            ready: &[&["rescue", "--wait", "web"]],
            state: State::Active,
            steps: &["before-power-off", "before-leave-rescue", "before-note-rescue", "before-start"],
        },
    ] {
        trial.run(&verb).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_a_resize_and_of_taking_it_back() -> Result<()> {
    let mut trial = Trial::begin().await?;
    let resize: &[&str] = &["resize", "web", LARGE];
    let (back, revert): (&[&str], _) = (&["resize", "--revert", "web"], "revertResize");
    let enlarged: &[&[&str]] = &[REVERT, &["resize", "--wait", "web", LARGE]];
    trial.guest.asks(&["resize", "--wait", "web", LARGE])?;
    // One that runs is stopped for it and boots, which takes minutes of each kill.
    let state = State::Active;
    let steps: &[&str] = &["before-note-size"];
    trial.run(&Verb { ask: resize, event: "resize", ready: &[REVERT], state, steps }).await?;
    trial.run(&Verb { ask: back, event: revert, ready: enlarged, state, steps: &[] }).await?;
    trial.guest.asks(&["stop", "--grace", "0", "--wait", "web"])?;
    let steps = &["before-cover", "before-redefine", "before-note-size", "before-note-resize"];
    let state = State::Stopped;
    trial.run(&Verb { ask: resize, event: "resize", ready: &[REVERT], state, steps }).await?;
    let steps = &["before-redefine", "before-note-resize"];
    trial.run(&Verb { ask: back, event: revert, ready: enlarged, state, steps }).await?;
    // More memory it gets as it runs.
    for arguments in [REVERT, &["start", "--wait", "web"], &["resize", "--wait", "web", ROOMY[0]], CONFIRM] {
        trial.guest.asks(arguments)?;
    }
    let grow: &[&str] = &["resize", "web", ROOMY[1]];
    trial.guest.asks(&["resize", "--wait", "web", ROOMY[1]])?;
    let (state, steps) = (State::Active, &["before-grow-guest", "before-note-size"]);
    trial.run(&Verb { ask: grow, event: "resize", ready: &[REVERT], state, steps }).await?;
    for arguments in [REVERT, &["stop", "--grace", "0", "--wait", "web"]] {
        trial.guest.asks(arguments)?;
    }
    // What is claimed is as large as it is, when nothing is left to be taken back.
    for (arguments, vcpus) in [(REVERT, 1), (&["resize", "--wait", "web", LARGE], 2), (CONFIRM, 2)] {
        trial.guest.asks(arguments)?;
        assert_eq!(claimed(&trial.guest).await?.vcpus, vcpus, "{arguments:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_a_build_and_of_its_end() -> Result<()> {
    let mut stack = Stack::start().await?;
    let mut kills = Kills::new()?;
    stack.start_agent("").await?;
    let is_up = async |stack: &Stack, instance| {
        Ok(stack.status(instance).await?.is_some_and(|status| status.state == State::Active))
    };
    let is_gone = async |stack: &Stack, instance| {
        Ok(last(stack, instance, "delete")?.is_some_and(|(_, outcome)| outcome == "done"))
    };
    let instance = stack.schedule(&["--wait"])?;
    let builds = points(&stack.log());
    let heard = stack.log().len();
    stack.eschedule(&["destroy", "--wait", &instance.to_string()])?;
    let ends = points(&stack.log()[heard..]);
    let builds = kills.chosen(
        &builds,
        &["before-disk", "before-overlay", "before-define", "before-start", "before-note-start"],
    )?;
    let ends = kills.chosen(
        &ends,
        &["before-bury", "before-remove-domain", "before-drop-record", "before-release", "before-drop-keys"],
    )?;
    // Of the longer list each has a step of the shorter one, over and over.
    let pairs = builds.len().max(ends.len());
    for (build, end) in builds.iter().cycle().zip(ends.iter().cycle()).take(pairs) {
        let (mut to_build, mut to_end) = (kills.at_each(), kills.at_each());
        while to_build > 0 || to_end > 0 {
            anew(&mut stack, &armed(build, to_build)).await?;
            let instance = stack.schedule(&[])?;
            let had = (to_build, to_end);
            kills.harm(&mut stack, build, &mut to_build, async |stack| is_up(stack, instance).await).await?;
            stack.until(&format!("it is up ({build})"), async || is_up(&stack, instance).await).await?;
            stack.until_exactly(&[instance]).await?;
            anew(&mut stack, &armed(end, to_end)).await?;
            ensure!(stack.eschedule(&["destroy", &instance.to_string()])?.status.success());
            kills.harm(&mut stack, end, &mut to_end, async |stack| is_gone(stack, instance).await).await?;
            stack.until(&format!("it is gone ({end})"), async || is_gone(&stack, instance).await).await?;
            stack.until_exactly(&[]).await?;
            if had == (to_build, to_end) {
                // Not come to each time.
                break;
            }
        }
    }
    kills.tell("create", &builds);
    kills.tell("destroy", &ends);
    Ok(())
}

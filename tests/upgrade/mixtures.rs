//! One program after the other is changed for that of the other release, upwards and downwards, until each mixture was there; guests
//! run throughout, and in each mixture the main job is done.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, Keyspace, State};
use ec_store::{Store, testing::send};
use ec_tests::{Release, Stack};
use nix::sys::signal::Signal;
use serde_json::Value;

/// What is changed: the first with every second step, each other half as often as the one before.
const PROGRAMS: [&str; 4] = ["ecompute", "eplacement", "econtroller", "eschedule"];

#[tokio::test(flavor = "multi_thread")]
async fn in_every_mixture_of_two_releases_the_main_job_is_done_under_guests_that_run_on() -> Result<()> {
    let mut cloud = Cloud::start().await?;
    cloud.main_job().await?;
    // A Gray code: each step changes one program, and comes to a mixture that was not there.
    for step in 1..1_u32 << PROGRAMS.len() {
        cloud.change(PROGRAMS[step.trailing_zeros() as usize]).await?;
        cloud.main_job().await?;
    }
    // As an upgrade ends.
    for name in PROGRAMS {
        if cloud.release(name) == Release::Previous {
            cloud.change(name).await?;
        }
    }
    cloud.main_job().await?;
    cloud.end().await
}

struct Cloud {
    stack: Stack,
    controller: Controller,
    key: String,
    /// The guest that runs from the first mixture to the last.
    throughout: Guest,
    /// Those of the last steps by age: the youngest runs, the one before is stopped, the oldest runs again.
    others: Vec<InstanceId>,
    /// How many were made.
    made: u32,
    begun: Instant,
}

/// A guest, and by what it is known that it is the same boot.
struct Guest {
    instance: InstanceId,
    process: Option<i32>,
    boot: String,
}

/// What a guest tells of itself and of what it is told.
const TELL: &str = "cat /proc/sys/kernel/random/boot_id; wget -q -O - http://169.254.169.254/latest/user-data; \
                    wget -q -O - http://169.254.169.254/latest/meta-data/local-hostname";

impl Cloud {
    /// All of the previous release.
    async fn start() -> Result<Self> {
        Release::both_are_there()?;
        let mut stack = Stack::start().await?;
        stack.placement_server.end();
        stack.placement_server.release = Release::Previous;
        stack.placement_server.go_on()?;
        stack.placement_server.until_it_answers().await?;
        stack.agent_release = Release::Previous;
        stack.tool_release = Release::Previous;
        stack.start_agent("").await?;
        let controller = Controller::start(&stack, Release::Previous)?;
        let key = stack.key_pair()?;
        let data = stack.directory().join("user-data");
        fs::write(&data, "as it was given\n")?;
        let (public, data) = (format!("{key}.pub"), data.display().to_string());
        let arguments = ["--wait", "--name", "throughout", "--key", &public, "--user-data", &data];
        let instance = stack.schedule(&arguments)?;
        let process = stack.libvirt.guest_process(instance);
        ensure!(process.is_some(), "no process");
        let boot = stack.ssh_to(&key, "root", instance, TELL).await?;
        ensure!(boot.ends_with("as it was given\nthroughout"), "{boot}");
        let throughout = Guest { instance, process, boot };
        Ok(Self { stack, controller, key, throughout, others: Vec::new(), made: 0, begun: Instant::now() })
    }

    fn release(&self, name: &str) -> Release {
        match name {
            "ecompute" => self.stack.agent_release,
            "eplacement" => self.stack.placement_server.release,
            "econtroller" => self.controller.release,
            _ => self.stack.tool_release,
        }
    }

    /// Ends a program as its service does, and starts the other release's. What was stopped is wished to run again just
    /// before: the wish and its fulfilment are of two mixtures.
    async fn change(&mut self, name: &str) -> Result<()> {
        if let Some(stopped) = self.stopped() {
            self.asks(&["start", &stopped.to_string()])?;
        }
        let next = self.release(name).other();
        match name {
            "ecompute" => {
                let code = self.stack.end_agent()?;
                ensure!(code == Some(0), "the agent ended with {code:?}: {}", self.stack.log());
                self.stack.agent_release = next;
                self.stack.start_agent("").await?;
            }
            "eplacement" => {
                self.stack.placement_server.end();
                self.stack.placement_server.release = next;
                self.stack.placement_server.go_on()?;
                self.stack.placement_server.until_it_answers().await?;
            }
            "econtroller" => {
                self.controller.end()?;
                self.controller = Controller::start(&self.stack, next)?;
            }
            _ => self.stack.tool_release = next,
        }
        Ok(())
    }

    /// The one that was stopped in the mixture before.
    fn stopped(&self) -> Option<InstanceId> {
        self.others.iter().rev().nth(1).copied()
    }

    /// A guest is built, one stopped, one started again, one destroyed; and what runs on, runs on.
    #[expect(clippy::print_stderr, reason = "what a run of minutes is at")]
    async fn main_job(&mut self) -> Result<()> {
        let mixture: Vec<_> = PROGRAMS.iter().map(|name| (*name, self.release(name))).collect();
        eprintln!("{} s: {mixture:?}", self.begun.elapsed().as_secs());
        self.job().await.with_context(|| format!("with {mixture:?}"))
    }

    async fn job(&mut self) -> Result<()> {
        self.runs_on().await?;
        self.made += 1;
        let (name, public) = (format!("guest-{}", self.made), format!("{}.pub", self.key));
        let built = self.stack.schedule(&["--wait", "--name", &name, "--key", &public])?;
        let status = self.stack.until_state(built, State::Active).await?;
        ensure!(status.ip.is_some(), "it has no address: {status:?}");
        if let Some(started) = self.stopped() {
            self.stack.until_state(started, State::Active).await?;
        }
        if let Some(youngest) = self.others.last() {
            self.asks(&["stop", "--grace", "0", "--wait", &youngest.to_string()])?;
            self.stack.until_state(*youngest, State::Stopped).await?;
        }
        self.others.push(built);
        if self.others.len() > 3 {
            let oldest = self.others.remove(0);
            self.asks(&["destroy", "--wait", &oldest.to_string()])?;
        }
        self.runs_on().await?;
        let there = [&[self.throughout.instance], &self.others[..]].concat();
        self.stack.until_exactly(&there).await?;
        self.both_tell(&there)?;
        self.all_fits()
    }

    /// The guest of the first mixture is the same process, and its kernel has not booted since.
    async fn runs_on(&self) -> Result<()> {
        let Guest { instance, process, boot } = &self.throughout;
        ensure!(self.stack.libvirt.guest_process(*instance) == *process, "it is another process");
        let now = self.stack.ssh_to(&self.key, "root", *instance, TELL).await?;
        ensure!(now == *boot, "it told {boot}, and now {now}");
        Ok(())
    }

    /// The command lines of both releases tell the same of all instances.
    fn both_tell(&self, there: &[InstanceId]) -> Result<()> {
        let mut told = Vec::new();
        for release in Release::ALL {
            let list = self.told_by(release, &["-o", "json", "list"])?;
            let all = list.as_array().with_context(|| format!("no list: {list}"))?;
            ensure!(all.len() == there.len(), "{release:?} lists {list}, wanted {there:?}");
            let shown = self.told_by(release, &["-o", "json", "show", "throughout"])?;
            ensure!(shown["state"] == "ACTIVE" && shown["ip"].is_string(), "{release:?} shows {shown}");
            let nodes = self.told_by(release, &["-o", "json", "nodes"])?;
            ensure!(nodes[0]["alive"] == true, "{release:?} tells {nodes}");
            let fields =
                |it: &Value| ["instance", "name", "node", "state", "ip"].map(|field| it[field].clone());
            let mut lines: Vec<String> = all.iter().map(|it| format!("{:?}", fields(it))).collect();
            lines.sort();
            told.push(lines);
        }
        ensure!(told[0] == told[1], "they tell of instances otherwise: {told:?}");
        Ok(())
    }

    fn told_by(&self, release: Release, arguments: &[&str]) -> Result<Value> {
        let mut command = Command::new(release.program("eschedule"));
        command.arg("--config").arg(self.stack.file("schedule.yaml")).args(arguments);
        let output = command.stdin(Stdio::null()).output()?;
        ensure!(output.status.success(), "{release:?}, {arguments:?}: {output:?}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// What lies in placement fits together for either release.
    fn all_fits(&self) -> Result<()> {
        for release in Release::ALL {
            let mut command = Command::new(release.program("eplacement"));
            let output = command.args(["check", "--etcd", &self.stack.etcd.endpoint()]).output()?;
            ensure!(output.status.success(), "{release:?}: {output:?}");
        }
        Ok(())
    }

    fn asks(&self, arguments: &[&str]) -> Result<()> {
        let output = self.stack.eschedule(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.stack.log());
        Ok(())
    }

    /// All is destroyed, and nothing is left of it.
    async fn end(mut self) -> Result<()> {
        for instance in [&[self.throughout.instance], &self.others[..]].concat() {
            self.asks(&["destroy", "--wait", &instance.to_string()])?;
        }
        self.stack.until_exactly(&[]).await?;
        self.all_fits()?;
        let root = Keyspace::DEFAULT_ROOT;
        for tree in
            ["instances", "names", "requests", "userdata", "status", "held", "held-userdata", "members"]
        {
            let keys = self.stack.store.keys(&format!("{root}/{tree}/")).await?;
            ensure!(keys.is_empty(), "left are {keys:?}");
        }
        self.controller.end()
    }
}

/// Ended when dropped.
struct Controller {
    child: Child,
    release: Release,
}

impl Controller {
    fn start(stack: &Stack, release: Release) -> Result<Self> {
        let file = stack.file("controller.yaml");
        let (etcd, placement) = (stack.etcd.endpoint(), stack.placement_server.endpoint());
        fs::write(
            &file,
            format!("etcd: {{endpoints: [\"{etcd}\"]}}\nplacement: {{endpoint: \"{placement}\"}}\n"),
        )?;
        let log = fs::File::options().create(true).append(true).open(stack.file("econtroller.log"))?;
        let mut command = Command::new(release.program("econtroller"));
        command.arg("--config").arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(Self { child: command.spawn()?, release })
    }

    /// It still runs, and ends well.
    fn end(&mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "the controller of {:?} has ended: {ended:?}", self.release);
        send(i32::try_from(self.child.id())?, Signal::SIGTERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the controller of {:?} ended with {status}", self.release);
        Ok(())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

//! What each program tells a service manager that asks by NOTIFY_SOCKET.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_tests::{Stack, program, replica::Replica};
use nix::sys::signal::Signal;

/// Twice as long as between two signs of life, and then some.
const PATIENCE: Duration = Duration::from_secs(30);

struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    fn listen(directory: &Path) -> Result<Self> {
        let path = directory.join("notify");
        let socket = UnixDatagram::bind(&path)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { socket, path })
    }

    fn variable(&self) -> String {
        format!("NOTIFY_SOCKET={}", self.path.display())
    }

    /// The next message is this one.
    fn hears(&self, wanted: &str) -> Result<()> {
        let told = self.next()?;
        ensure!(told == wanted, "{told} and not {wanted}");
        Ok(())
    }

    /// This comes, after signs of life only.
    fn hears_at_last(&self, wanted: &str) -> Result<()> {
        loop {
            match self.next()? {
                told if told == wanted => return Ok(()),
                told => ensure!(told == "WATCHDOG=1", "{told} before {wanted}"),
            }
        }
    }

    fn next(&self) -> Result<String> {
        let mut message = [0; 256];
        let length = self.socket.recv(&mut message).context("nothing is told")?;
        Ok(String::from_utf8_lossy(&message[..length]).trim().to_owned())
    }
}

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::test]
async fn eplacement_serves_lives_and_ends_also_while_etcd_is_away() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let manager = Manager::listen(directory.path())?;
    // Nobody listens there.
    let mut replica = Replica::spawn(&["env", &manager.variable()], "http://127.0.0.1:9", &[])?;
    manager.hears("READY=1")?;
    manager.hears("WATCHDOG=1")?;
    manager.hears("WATCHDOG=1")?;
    replica.signal(Signal::SIGTERM)?;
    manager.hears_at_last("STOPPING=1")?;
    ensure!(replica.ended().await?.success(), "{}", replica.log());
    Ok(())
}

#[tokio::test]
async fn econtroller_tells_of_each_look_also_of_one_that_finds_nobody() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let manager = Manager::listen(directory.path())?;
    let file = directory.path().join("controller.yaml");
    fs::write(
        &file,
        "etcd: {endpoints: [\"http://127.0.0.1:9\"]}\nplacement: {endpoint: \"http://127.0.0.1:9\"}\n",
    )?;
    let mut command = Command::new(program("econtroller"));
    command.arg("--config").arg(file).env("NOTIFY_SOCKET", &manager.path).stdin(Stdio::null());
    let controller = Running(command.spawn()?);
    manager.hears("READY=1")?;
    manager.hears("WATCHDOG=1")?;
    manager.hears("WATCHDOG=1")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(controller.0.id())?), Signal::SIGTERM)?;
    manager.hears_at_last("STOPPING=1")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_is_ready_lives_while_etcd_is_away_and_is_silent_when_it_stands() -> Result<()> {
    let mut stack = Stack::start().await?;
    let manager = Manager::listen(stack.directory())?;
    stack.agent_env.push(("NOTIFY_SOCKET", manager.path.display().to_string()));
    stack.start_agent("").await?;
    manager.hears("READY=1")?;
    manager.hears("WATCHDOG=1")?;
    stack.etcd.kill();
    manager.hears("WATCHDOG=1")?;
    manager.hears("WATCHDOG=1")?;
    stack.signal_agent(Signal::SIGSTOP)?;
    manager.socket.set_read_timeout(Some(Duration::from_secs(12)))?;
    let last = (0..3).map(|_| manager.next()).find(Result::is_err);
    stack.signal_agent(Signal::SIGCONT)?;
    ensure!(last.is_some(), "an agent that stands still tells that it lives");
    stack.etcd.restart().await?;
    manager.socket.set_read_timeout(Some(PATIENCE))?;
    manager.hears("WATCHDOG=1")?;
    stack.end_agent()?;
    manager.hears_at_last("STOPPING=1")
}

//! The live view, on a terminal of its own: what is seen there, what keys do, and that it is as before afterwards.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ec_model::{Desired, State};
use ec_tests::{TINY, control::Control};
use nix::{
    pty::{OpenptyResult, Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{Termios, tcgetattr},
    },
    unistd::Pid,
};

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];
const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal with a program on it.
struct Terminal {
    child: Child,
    slave: File,
    before: Termios,
    keys: File,
    printed: Receiver<Vec<u8>>,
    screen: vt100::Parser,
}

impl Terminal {
    fn start(control: &Control, arguments: &[&str]) -> Result<Self> {
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None)?;
        let (slave, before) = (File::from(slave.try_clone()?), tcgetattr(&slave)?);
        let top = control.command(arguments);
        // util-linux' setsid makes it the terminal that the program has, and not the one of whoever runs the tests.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(top.get_program()).args(top.get_args()).env_remove("NO_COLOR");
        let end = || slave.try_clone().map(Stdio::from);
        let child = command.stdin(end()?).stdout(end()?).stderr(end()?).spawn()?;
        let (keys, mut master) = (File::from(master.try_clone()?), File::from(master));
        let (print, printed) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = master.read(&mut piece) {
                if print.send(piece[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        let screen = vt100::Parser::new(24, 80, 0);
        Ok(Self { child, slave, before, keys, printed, screen })
    }

    fn types(&mut self, keys: &str) -> Result<()> {
        Ok(self.keys.write_all(keys.as_bytes())?)
    }

    /// Waits until the screen is so.
    fn until(&mut self, what: &str, reached: impl Fn(&str) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = self.screen.screen().contents();
            if reached(&seen) {
                return Ok(());
            }
            let Ok(piece) = self.printed.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            else {
                bail!("{what}:\n{seen}")
            };
            self.screen.process(&piece);
        }
    }

    fn until_seen(&mut self, text: &str) -> Result<()> {
        self.until(text, |seen| seen.contains(text))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().try_into()?), signal)?)
    }

    /// Waits for the end, which leaves the terminal as it was before.
    fn ends(mut self, code: i32) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            // What is printed is taken meanwhile: it would wait for that.
            if let Ok(piece) = self.printed.recv_timeout(Duration::from_millis(20)) {
                self.screen.process(&piece);
            }
            ensure!(Instant::now() < deadline, "it goes on:\n{}", self.screen.screen().contents());
        };
        while let Ok(piece) = self.printed.recv_timeout(Duration::from_millis(100)) {
            self.screen.process(&piece);
        }
        let screen = self.screen.screen();
        assert_eq!(status.code(), Some(code), "{}", screen.contents());
        assert_eq!(tcgetattr(&self.slave)?, self.before);
        ensure!(!screen.alternate_screen() && !screen.hide_cursor(), "the screen is as before");
        Ok(())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_are_seen_filtered_and_destroyed_on_a_terminal_that_is_given_back() -> Result<()> {
    let mut control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, web) = control.schedule(&["--name", "web", TINY])?;
    let (_, db) = control.schedule(&["--name", "db", TINY])?;
    control.status(node, web, State::Active, Some("10.0.0.7")).await?;
    control.status(node, db, State::Error, None).await?;

    let mut top = Terminal::start(&control, &["top", "--interval", "1"])?;
    top.until("all is seen", |seen| {
        ["nodes 1/1 alive", "host", "web", "10.0.0.7", "db", "ERROR"].iter().all(|word| seen.contains(word))
    })?;
    top.types("/we")?;
    top.until("it is filtered", |seen| seen.contains("/we_") && !seen.contains("ERROR  "))?;
    top.types("\r")?;
    top.until_seen("filter: we")?;
    top.types("\r")?;
    top.until_seen(&format!("Instance {web}"))?;
    top.types("q")?;
    top.until_seen("filter: we")?;
    // Not confirmed, and then confirmed.
    let question = format!("destroy web ({web})");
    top.types("d")?;
    top.until_seen(&question)?;
    top.types("n")?;
    top.until_seen("destroy: not done")?;
    ensure!(control.request(node, web).await?.is_some_and(|request| request.desired == Desired::Active));
    top.types("d")?;
    top.until_seen(&question)?;
    top.types("y")?;
    top.until_seen("web: DESTROYING")?;
    ensure!(control.request(node, web).await?.is_some_and(|request| request.desired == Desired::Destroyed));
    for key in [control.keys.request(node, web), control.keys.status(node, web)] {
        control.delete(key).await?;
    }
    top.until("it is gone", |seen| !seen.contains("10.0.0.7"))?;
    // What is refused is told, and nothing else changes.
    control.done(&["lock", "db"])?;
    top.types("/\u{1b}")?;
    top.until_seen("ERROR")?;
    top.types("Sy")?;
    top.until_seen("cannot stop")?;
    // etcd goes and comes.
    control.etcd.kill();
    top.until("its absence is told", |seen| seen.contains("not live: ") && seen.contains("db  "))?;
    control.etcd.restart().await?;
    control.status(node, db, State::Active, Some("10.0.0.8")).await?;
    top.until("it is back", |seen| seen.contains("10.0.0.8") && !seen.contains("not live: "))?;
    top.types("q")?;
    top.ends(0)?;

    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let mut top = Terminal::start(&control, &["top", "--state", "active"])?;
        top.until_seen("10.0.0.8")?;
        top.signal(signal)?;
        top.ends(130)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_terminal_or_for_scripts_the_live_view_says_what_serves_them() -> Result<()> {
    let control = Control::start().await?;
    for arguments in [&["top"][..], &["top", "-o", "json"]] {
        let output = control.eschedule(arguments)?;
        let said = String::from_utf8(output.stderr).context("no text")?;
        assert_eq!(
            (output.status.code(), output.stdout.len(), said.lines().count()),
            (Some(2), 0, 1),
            "{said}"
        );
        ensure!(said.contains("eschedule watch -o json") && said.contains("list -o json"), "{said}");
    }
    Ok(())
}

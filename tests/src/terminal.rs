//! A terminal with a program on it: what stands on its screen, and keys.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use nix::{
    pty::{OpenptyResult, Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{Termios, tcgetattr},
    },
    unistd::Pid,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal with a program on it.
pub struct Terminal {
    child: Child,
    slave: File,
    before: Termios,
    keys: File,
    printed: Receiver<Vec<u8>>,
    screen: vt100::Parser,
}

impl Terminal {
    /// Starts the program there, 24 lines of 80 columns.
    pub fn start(program: &Command) -> Result<Self> {
        Self::of_size(program, 24, 80)
    }

    /// Starts the program on one that says it has so many lines and columns. A thousand of each are looked at.
    pub fn of_size(program: &Command, lines: u16, columns: u16) -> Result<Self> {
        let size = Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None)?;
        let (slave, before) = (File::from(slave.try_clone()?), tcgetattr(&slave)?);
        // util-linux' setsid makes it the terminal that the program has, and not the one of whoever runs the tests.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program.get_program()).args(program.get_args()).env_remove("NO_COLOR");
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
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
        let screen = vt100::Parser::new(lines.min(1000), columns.min(1000), 0);
        Ok(Self { child, slave, before, keys, printed, screen })
    }

    /// Presses these keys.
    pub fn types(&mut self, keys: &str) -> Result<()> {
        Ok(self.keys.write_all(keys.as_bytes())?)
    }

    /// Waits until the screen is so.
    pub fn until(&mut self, what: &str, reached: impl Fn(&str) -> bool) -> Result<()> {
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

    /// Waits until this stands on it.
    pub fn until_seen(&mut self, text: &str) -> Result<()> {
        self.until(text, |seen| seen.contains(text))
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().try_into()?), signal)?)
    }

    /// Waits for the end, which leaves the terminal as it was before.
    pub fn ends(mut self, code: i32) -> Result<()> {
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
        // What it printed last may still be on its way.
        let patience = |screen: &vt100::Screen| match screen.alternate_screen() || screen.hide_cursor() {
            true => deadline.saturating_duration_since(Instant::now()),
            false => Duration::from_millis(100),
        };
        while let Ok(piece) = self.printed.recv_timeout(patience(self.screen.screen())) {
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

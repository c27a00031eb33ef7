//! The terminal that somebody types on.

use std::io::{self, IsTerminal, Read};

use bytes::Bytes;
use ec_runtime::exit::Failure;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

/// Ctrl-], as of telnet and `virsh console`.
pub(super) const DETACH: u8 = 0x1d;
/// Bytes that are read at a time, and pieces that wait.
const PIECE: usize = 4096;
const PIECES: usize = 4;

/// A terminal that passes on every key as it is; as it was before when this is dropped.
pub(super) struct Raw(Option<Termios>);

impl Raw {
    /// Makes standard input so, where it is a terminal.
    pub(super) fn enter() -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("failed to set up the terminal: {error}"));
        if !io::stdin().is_terminal() {
            return Ok(Self(None));
        }
        let before = tcgetattr(io::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw).map_err(failed)?;
        Ok(Self(Some(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            tcsetattr(io::stdin(), SetArg::TCSADRAIN, before).ok();
        }
    }
}

/// What comes on standard input, to its end. A thread of its own reads it, which nobody waits for at the end.
pub(super) fn typed() -> mpsc::Receiver<Bytes> {
    let (keys, typed) = mpsc::channel(PIECES);
    std::thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        loop {
            match io::stdin().lock().read(&mut piece) {
                Ok(0) => return,
                Ok(count) => {
                    if keys.blocking_send(Bytes::copy_from_slice(&piece[..count])).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    typed
}

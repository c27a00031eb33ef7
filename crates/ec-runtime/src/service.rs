//! What a service manager is told that asks for it by `NOTIFY_SOCKET` (sd_notify(3)): that the program serves, that its
//! loop turns, that it ends. Where nobody asks, nothing happens.

use std::{
    convert::Infallible,
    env,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sd_notify::NotifyState;

/// How often [`vouch`] asks. The units' WatchdogSec= is a multiple of it.
const PERIOD: Duration = Duration::from_secs(5);

/// Whether it was said that the program serves, or is too late for that.
static READY: AtomicBool = AtomicBool::new(false);

/// The main loop has turned: the first time that is READY=1, and WATCHDOG=1 each time.
pub fn turned() {
    if !READY.swap(true, Ordering::Relaxed) {
        tell(&[NotifyState::Ready]);
    }
    tell(&[NotifyState::Watchdog]);
}

/// The program was asked to end: STOPPING=1.
pub(crate) fn ending() {
    READY.store(true, Ordering::Relaxed);
    tell(&[NotifyState::Stopping]);
}

/// For a loop that only turns when something comes: asks time and again whether it would, and tells so.
pub async fn vouch(turns: impl AsyncFn() -> bool) -> Infallible {
    if env::var_os("NOTIFY_SOCKET").is_none() {
        return std::future::pending().await;
    }
    loop {
        if turns().await {
            turned();
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Whoever does not hear it acts as if it was not said, which is for them to tell.
fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager cannot be told anything");
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixDatagram, process::Command};

    use super::*;

    /// In a process of its own: the variable is the whole process's.
    #[test]
    fn it_is_told_once_that_the_program_serves_and_each_time_that_its_loop_turns() {
        if env::var_os("NOTIFY_SOCKET").is_some() {
            turned();
            turned();
            ending();
            turned();
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let own = "service::tests::it_is_told_once_that_the_program_serves_and_each_time_that_its_loop_turns";
        let ended = Command::new(env::current_exe().unwrap())
            .args(["--exact", own])
            .env("NOTIFY_SOCKET", &path)
            .status()
            .unwrap();
        assert!(ended.success());
        socket.set_nonblocking(true).unwrap();
        let mut told = Vec::new();
        let mut message = [0; 64];
        while let Ok(length) = socket.recv(&mut message) {
            told.push(String::from_utf8_lossy(&message[..length]).trim().to_owned());
        }
        assert_eq!(told, ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1", "WATCHDOG=1"]);
    }
}

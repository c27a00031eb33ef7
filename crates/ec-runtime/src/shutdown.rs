//! Ending on a signal: the first asks, the second insists.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::service;

/// The exit code after a second signal, as a shell reports a program ended by SIGINT.
const INTERRUPTED: i32 = 130;

/// A token that is cancelled by the first SIGINT or SIGTERM, or by SIGHUP, where a terminal is closed or a line is lost, unless whoever
/// started the process (`nohup`) has it ignore that. A second one ends the process at once.
pub fn shutdown_on_signals() -> io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup =
        if is_ignored(SignalKind::hangup()) { None } else { Some(signal(SignalKind::hangup())?) };
    let cancel = token.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                // A shell that ends says it once more: it is no second word.
                Some(()) = async { hangup.as_mut()?.recv().await }, if first => {}
            }
            if first {
                tracing::info!("asked to end; a second signal ends at once");
                service::ending();
                cancel.cancel();
            }
        }
        std::process::exit(INTERRUPTED);
    });
    Ok(token)
}

/// Whether the process was told by its parent to ignore a signal.
fn is_ignored(kind: SignalKind) -> bool {
    ignores(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), kind)
}

/// The same, as the kernel shows it (proc(5), `SigIgn`).
fn ignores(status: &str, kind: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (kind.as_raw_value() - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::signal::{Signal, raise};
    use tokio::time::{sleep, timeout};

    use super::*;

    #[tokio::test]
    async fn a_terminal_that_is_closed_asks_to_end_however_often_it_is_said() {
        let asked = shutdown_on_signals().unwrap();
        if is_ignored(SignalKind::hangup()) {
            // Whoever runs this has it so (`nohup`), and nothing may come of it.
            raise(Signal::SIGHUP).unwrap();
            return;
        }
        for _ in 0..2 {
            raise(Signal::SIGHUP).unwrap();
            timeout(Duration::from_secs(20), asked.cancelled()).await.unwrap();
            // Time for what would end the process.
            sleep(Duration::from_millis(50)).await;
        }
    }

    #[test]
    fn what_is_ignored_is_told() {
        let status = "Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(ignores(status, SignalKind::hangup()) && ignores(status, SignalKind::pipe()));
        assert!(!ignores(status, SignalKind::interrupt()) && !ignores("", SignalKind::hangup()));
    }
}

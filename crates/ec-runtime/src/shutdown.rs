//! Ending on a signal: the first asks, the second insists.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::service;

/// The exit code after a second signal, as a shell reports a program ended by SIGINT.
const INTERRUPTED: i32 = 130;

/// A token that is cancelled by the first SIGINT or SIGTERM. A second one ends the process at once.
pub fn shutdown_on_signals() -> io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let cancel = token.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
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

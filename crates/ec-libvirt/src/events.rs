//! libvirt's event loop: one thread for the process, whatever the number of connections.
//!
//! It must run before the first connection is opened, or callbacks do not work on it.

use std::{sync::OnceLock, thread, time::Duration};

/// Pause after an error of the loop, so that a lasting one does not burn a processor.
const PAUSE: Duration = Duration::from_millis(200);

/// Starts the event loop where it does not run yet, and silences libvirt's own printing of errors.
pub(crate) fn start_loop() -> Result<(), String> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            virt::error::clear_error_callback();
            virt::event::event_register_default_impl().map_err(|error| error.message().to_owned())?;
            let spawned = thread::Builder::new().name("libvirt-events".into()).spawn(|| {
                loop {
                    if let Err(error) = virt::event::event_run_default_impl() {
                        tracing::warn!(error = error.message(), "libvirt's event loop stumbled");
                        thread::sleep(PAUSE);
                    }
                }
            });
            spawned.map(drop).map_err(|error| error.to_string())
        })
        .clone()
}

//! What every binary needs at its edges: reading its configuration, logging, shutting down on signals,
//! and turning errors into one line and an exit code.

pub mod config;
mod endpoint;
pub mod exit;
mod files;
mod host;
mod logging;
pub mod memory;
mod planted;
mod renewed;
pub mod service;
mod shutdown;
mod tasks;
mod trouble;

pub use endpoint::{beyond_loopback, is_loopback, without_user};
pub use files::raise_file_limit;
pub use host::{BrokenOff, Host, Machine, Work};
pub use logging::{LogFormat, init_logging};
pub use planted::{left_out_here, planted};
pub use renewed::{Files, Look, Renewed};
pub use shutdown::shutdown_on_signals;
pub use tasks::{Tasks, abort_on_panic};
pub use trouble::may_pass;

/// Installs the one TLS provider of the process; to be called first in every `main`.
pub fn install_tls_provider() {
    // Err means that it is installed already, which is what we want.
    rustls::crypto::ring::default_provider().install_default().ok();
}

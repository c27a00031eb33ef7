//! `econtroller`: does for a whole cluster what must be done when no tool and no agent is there to do it.
//!
//! It decides anew from what is there at each look, keeps nothing but how long nodes have been missing, and whatever
//! it does is done by compare-and-swap: any number of them may run, none must, and each may be killed at any moment.

mod config;

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{Parser, ValueEnum};
use config::Settings;
use ec_runtime::{LogFormat, exit::Failure, init_logging, install_tls_provider, shutdown_on_signals};
use econtroller::tend;

/// Looks after a whole etcd-compute cluster.
///
/// Marks nodes in placement whose agents are gone (COMPUTE_STATUS_DISABLED), so that nothing is offered of them, and
/// takes the mark away when they are back. Takes away what killed commands left: records, names and claims that nobody
/// asks for. Everything works without it, too; any number of them may run at once.
#[derive(Parser)]
#[command(
    version,
    after_help = "Signals: SIGINT or SIGTERM end it; nothing is left half done.\n\
                  Logging: to standard error; RUST_LOG decides which lines there are.\n\
                  Exit codes: 0 ended as asked, 1 failed, 2 wrong usage or configuration"
)]
struct Cli {
    /// Configuration file [default: ./controller.yaml, then /etc/ecompute/controller.yaml, then defaults]
    #[arg(long, value_name = "FILE", env = "ECONTROLLER_CONFIG")]
    config: Option<OsString>,

    /// How log lines look
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    log_format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let format = match cli.log_format {
        Format::Text => LogFormat::Text,
        Format::Json => LogFormat::Json,
    };
    init_logging(format, "info");
    install_tls_provider();
    ec_runtime::abort_on_panic();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("econtroller"),
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    // An empty variable is as good as none.
    let named = cli.config.as_deref().filter(|file| !file.is_empty());
    let settings = Settings::load(named.map(Path::new))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("failed to start: {error}")))?;
    runtime.block_on(async {
        let shutdown = shutdown_on_signals()
            .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
        for warning in &settings.warnings {
            tracing::warn!("{warning}");
        }
        let cloud = settings.connect().await?;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "looking after the cluster");
        tend(&cloud, &shutdown).await;
        tracing::info!("ended");
        Ok(())
    })
}

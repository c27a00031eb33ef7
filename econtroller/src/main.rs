//! `econtroller`: does for a whole cluster what must be done when no tool and no agent is there to do it.
//!
//! It decides anew from what is there at each look, keeps nothing but how long nodes have been missing, and whatever
//! it does is done by compare-and-swap: any number of them may run, none must, and each may be killed at any moment.

mod config;

use std::{ffi::OsString, path::Path, process::ExitCode, sync::Arc};

use clap::Parser;
use config::Settings;
use ec_runtime::{
    Host, LogFormat,
    exit::{Failure, arguments},
    init_logging, install_tls_provider, shutdown_on_signals,
};
use ec_serve::{port::Readings, tell_endings};
use econtroller::{Tally, tend};
use tokio_util::sync::CancellationToken;

/// Looks after a whole etcd-compute cluster.
///
/// Marks nodes in placement whose agents are gone (COMPUTE_STATUS_DISABLED), so that nothing is offered of them, and
/// takes the mark away when they are back. Takes away what killed commands left: records, names and claims that nobody
/// asks for, and volumes that were copies for images. Everything works without it, too; any number of them may run at once; on one host, each with a `listen` of
/// its own.
#[derive(Parser)]
#[command(
    version,
    after_help = "Its own port (`listen`): GET /healthz (alive), /readyz (etcd and placement answer,\n                  \
                  and its last looks at nodes, instances and claims went well), /metrics (Prometheus).\n\
                  Signals: SIGINT or SIGTERM end it; nothing is left half done.\n\
                  Logging: to standard error; RUST_LOG decides which lines there are.\n\
                  Exit codes: 0 ended as asked, 1 failed, 2 wrong usage or configuration"
)]
struct Cli {
    /// Configuration file [default: ./controller.yaml, then /etc/ecompute/controller.yaml, then defaults]
    #[arg(long, value_name = "FILE", env = "ECONTROLLER_CONFIG")]
    config: Option<OsString>,

    /// How log lines look; RUST_LOG decides which there are
    #[arg(long, value_name = "FORMAT", default_value = "text", env = "LOG_FORMAT")]
    log_format: LogFormat,
}

fn main() -> ExitCode {
    let cli: Cli = match arguments("econtroller") {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    init_logging(cli.log_format, "info");
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
        for warning in settings.warnings.iter().chain(&settings.open_door().await) {
            tracing::warn!("{warning}");
        }
        tokio::spawn(tell_endings(settings.certificates.clone()));
        let port = settings.open().await?;
        let host = Host::default();
        let tally = Arc::new(Tally::new(&host, settings.certificates.clone()));
        let cloud = settings.connect(&tally, host).await?;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "looking after the cluster");
        let (desk, closed) = (Readings(Arc::clone(&tally)), CancellationToken::new());
        let served = port.map(|port| tokio::spawn(port.serve(desk, "health and metrics", closed.clone())));
        tend(&cloud, &tally, &shutdown).await;
        closed.cancel();
        if let Some(served) = served {
            served.await.map_err(|error| Failure::failed(format!("the port broke: {error}")))?;
        }
        tracing::info!("ended");
        Ok(())
    })
}

//! `econtroller`: does for a whole cluster what must be done when no tool and no agent is there to do it.
//!
//! It decides anew from what is there at each look, keeps nothing but how long nodes have been missing, and whatever
//! it does is done by compare-and-swap: any number of them may run, none must, and each may be killed at any moment.

mod config;

use std::{ffi::OsString, path::Path, process::ExitCode, time::Duration};

use clap::{Parser, ValueEnum};
use config::Settings;
use ec_cloud::{Cloud, CloudError, tend_instances, tend_nodes};
use ec_plan::fleet::{Fleet, Move};
use ec_runtime::{LogFormat, exit::Failure, init_logging, install_tls_provider, shutdown_on_signals};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Between two looks at the nodes.
const NODES_PERIOD: Duration = Duration::from_secs(5);
/// A node whose agent was missing for so long is down. Twice the lease of its key: an agent that is restarted, and an
/// etcd that elects a leader, are back before.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at what killed commands left, which is touched when it is ten minutes old.
const INSTANCES_PERIOD: Duration = Duration::from_secs(60);

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
        for warning in &settings.exposed {
            tracing::warn!("{warning}");
        }
        let cloud = settings.connect().await?;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "looking after the cluster");
        tend(&cloud, &shutdown).await;
        tracing::info!("ended");
        Ok(())
    })
}

async fn tend(cloud: &Cloud, shutdown: &CancellationToken) {
    let begun = Instant::now();
    let mut fleet = Fleet::new(PATIENCE, NODES_PERIOD * 2);
    let mut instances_due = begun;
    let mut trouble = Trouble::default();
    loop {
        // A look that is broken off in its midst leaves nothing half done: each of its writes is whole.
        let look = async {
            let outcome = tend_nodes(cloud, &mut fleet, begun.elapsed()).await.map(|moves| {
                for done in moves {
                    match done {
                        Move::MarkDown(node) => {
                            tracing::warn!(%node, "its agent is gone: nothing is placed there any more")
                        }
                        Move::MarkUp(node) => {
                            tracing::info!(%node, "its agent is back: instances may be placed there again")
                        }
                    }
                }
            });
            trouble.tell(outcome);
            if Instant::now() >= instances_due {
                instances_due = Instant::now() + INSTANCES_PERIOD;
                let outcome = tend_instances(cloud).await.map(|swept| {
                    for instance in swept {
                        tracing::info!(%instance, "took away what was left of it");
                    }
                });
                trouble.tell(outcome);
            }
            tokio::time::sleep(NODES_PERIOD).await;
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = look => {}
        }
    }
}

/// Says once that something does not work, and once that it does again.
#[derive(Default)]
struct Trouble(bool);

impl Trouble {
    fn tell(&mut self, outcome: Result<(), CloudError>) {
        match (&outcome, self.0) {
            (Err(error), false) => tracing::warn!(%error, "failed to look after the cluster; trying on"),
            (Ok(()), true) => tracing::info!("etcd and placement answer again"),
            _ => {}
        }
        self.0 = outcome.is_err();
    }
}

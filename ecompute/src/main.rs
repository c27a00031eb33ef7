//! `ecompute`: parses its command line, runs the agent, maps the end to an exit code.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand};
use ec_runtime::{
    LogFormat,
    exit::{Failure, arguments, print},
    init_logging, install_tls_provider, shutdown_on_signals,
};
use ec_serve::tell_endings;
use ecompute::{
    agent,
    check::{check, mixed, warnings},
    config::{STATE_DIR, Settings},
    join::{self, join},
    port::Port,
};

/// What still works when the agent has ended gets so long.
const ENDS_IN: Duration = Duration::from_secs(5);

/// The agent of etcd-compute: one per host.
///
/// Registers this host's capacity with placement, watches its requests in etcd, and builds and destroys
/// virtual machines through libvirt. SIGINT or SIGTERM lock the inventory and end the agent; guests go on
/// running and are adopted by the next start.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Exit codes: 0 ended as asked, 1 failed, 2 wrong usage or configuration, or another agent is this node, 3 etcd or placement not reachable (--check)"
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    /// Configuration file [default: ./compute.yaml, then /etc/ecompute/compute.yaml, then defaults]
    #[arg(long, value_name = "FILE", env = "ECOMPUTE_CONFIG")]
    config: Option<OsString>,

    /// Check the configuration and everything it names, tell what is wrong and how to mend it, and end
    #[arg(long)]
    check: bool,

    /// How log lines look; RUST_LOG decides which there are
    #[arg(long, value_name = "FORMAT", default_value = "text", env = "LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Make this host a node of a cluster, by a bundle that `eschedule node add` made
    ///
    /// Writes certificates, token and compute.yaml. With the bundle of a node that this host is already, certificates and
    /// token are put in the place of the old ones.
    Join {
        /// The bundle; a secret: delete it afterwards
        bundle: PathBuf,
        /// Where the agent's configuration lies
        #[arg(long, value_name = "DIR", default_value = join::DIRECTORY)]
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli: Cli = match arguments("ecompute") {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    // A check answers on standard output; what it meets on the way would only repeat it.
    init_logging(cli.log_format, if cli.check { "off" } else { "info" });
    install_tls_provider();
    ec_runtime::abort_on_panic();
    ec_runtime::raise_file_limit();
    #[cfg(feature = "failpoints")]
    let _scenario = fail::FailScenario::setup();
    match run(&cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report("ecompute"),
    }
}

fn run(cli: &Cli) -> Result<u8, Failure> {
    if let Some(Command::Join { bundle, directory }) = &cli.command {
        let joined = join(bundle, directory, Path::new(STATE_DIR))?;
        let mut lines: Vec<_> =
            joined.written.iter().map(|path| format!("wrote {}", path.display())).collect();
        lines.extend(joined.told);
        lines.push("next: `ecompute --check`, and start ecompute anew; delete the bundle".into());
        print(&lines.join("\n"))?;
        return Ok(0);
    }
    // An empty variable is as good as none.
    let named = cli.config.as_deref().filter(|file| !file.is_empty());
    let (settings, file) = Settings::load(named.map(Path::new))?;
    // The agent waits far more than it works: two threads keep its memory small.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("failed to start: {error}")))?;
    let ended = runtime.block_on(async {
        if cli.check {
            return check(&settings, file).await;
        }
        // Beside the start: where etcd is away, nothing waits for this.
        let known = settings.clone();
        tokio::spawn(async move {
            for warning in warnings(&known, file.as_deref()).await.into_iter().chain(mixed(&known).await) {
                tracing::warn!("{warning}");
            }
            match tell_endings(known.certificates().map(Path::to_owned).collect()).await {}
        });
        let shutdown = shutdown_on_signals()
            .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
        let port = Port::open(&settings).await?;
        agent::run(settings, port, shutdown).await.map_err(|error| agent::failure(&error))?;
        Ok(0)
    });
    // A thread that waits for storage whose server is away waits for longer than anybody.
    runtime.shutdown_timeout(ENDS_IN);
    ended
}

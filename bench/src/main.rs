//! `make bench`: starts real parts, measures what we promise beside the bare calls, prints medians and
//! ratios. A missed goal is printed; only what is broken ends with an error.

mod boot;
mod figures;
mod memory;
mod notice;
mod schedule;
mod simulated;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};
use ec_runtime::{LogFormat, init_logging, install_tls_provider};
use ec_tests::Stack;
use tokio_util::sync::CancellationToken;

/// Measures etcd-compute beside the bare calls it cannot do without. Needs root and release builds.
#[derive(Parser)]
struct Cli {
    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// The agent on a simulated hypervisor, for its memory to be measured
    #[command(hide = true)]
    Agent {
        /// Its configuration
        config: PathBuf,
    },
}

/// So that a thousand instances fit, whatever the machine.
const ROOM: &str = "reserved: {}\nimages: {max_gb: 5}";

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<()> {
    let cli = Cli::parse();
    init_logging(LogFormat::Text, "off");
    install_tls_provider();
    if let Some(Command::Agent { config }) = cli.command {
        return simulated::run(&config, CancellationToken::new(), |store| std::sync::Arc::new(store)).await;
    }
    let progress = |what: &str| eprintln!("measuring {what}");
    let mut comparisons = Vec::new();
    let mut stack = Stack::start_with(ROOM).await?;
    progress("eschedule");
    comparisons.push(schedule::measure(&stack, 30).await?);
    progress("how soon the agent acts");
    comparisons.push(notice::measure(&stack, 100).await?);
    progress("guests");
    comparisons.push(boot::measure(&mut stack, 7).await?);
    progress("memory");
    let mut memories = vec![memory::idle(&mut stack).await?];
    memories.push(memory::loaded(&stack, 1000).await?);
    figures::print(&comparisons, &memories, cli.json);
    Ok(())
}

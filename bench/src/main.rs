//! `make bench`: the product beside the bare parts it stands on, in one run, on real parts.
//!
//! Both sides of a comparison take turns, so that whatever else the machine does meets both. A goal that
//! is missed is printed and no failure; anything that does not work is one.

#![expect(clippy::print_stderr, reason = "what it is at")]

mod bare;
mod build;
mod burst;
mod echo;
mod images;
mod memory;
mod orders;
mod placement;
mod react;
mod reboot;
mod report;
mod schedule;
mod simulated;
mod stats;
mod strategies;
mod verbs;
mod volumes;

use std::{io::Write, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use ec_runtime::{LogFormat, init_logging, install_tls_provider};
use ec_tests::Stack;

use crate::stats::Figure;

/// Measures etcd-compute beside the bare parts, and says which goals are met.
#[derive(Parser)]
struct Cli {
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Measure eplacement beside OpenStack Placement and bare etcd
    Placement {
        /// Small clouds and short runs
        #[arg(long)]
        quick: bool,
    },
    /// Measure eplacement alone on an etcd that is near, and on one that is some way off
    Far,
    /// Measure the command line alone, among few nodes and among thousands
    Schedule,
    /// Measure many builds at once alone
    Burst,
    /// Measure a guest's console alone
    Echo,
    /// Measure how each strategy fills simulated nodes alone
    Strategies,
    /// Measure a host that comes up again alone
    Reboot,
    /// Measure what is done to a running guest alone
    Verbs,
    /// Measure what is done to volumes alone
    Volumes,
    /// Measure how often an image is downloaded alone
    Images,
    /// Be an agent with simulated guests: how this program starts itself to see the agent's memory
    #[command(hide = true)]
    AgentSimulated { config: PathBuf },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    init_logging(LogFormat::Text, "error");
    install_tls_provider();
    let outcome = match &cli.command {
        Some(Command::AgentSimulated { config }) => simulated::process(config),
        Some(Command::Placement { quick }) => {
            on_runtime(placement::measure(*quick)).and_then(|rows| compare(&rows, cli.json))
        }
        Some(Command::Far) => on_runtime(placement::far::measure()).and_then(|rows| compare(&rows, cli.json)),
        Some(Command::Schedule) => {
            on_runtime(schedule::measure()).and_then(|figures| report(&figures, cli.json))
        }
        Some(Command::Burst) => on_runtime(with_agent(async |stack| burst::measure(stack).await))
            .and_then(|figures| report(&figures, cli.json)),
        Some(Command::Echo) => on_runtime(with_agent(async |stack| echo::measure(stack).await))
            .and_then(|figures| report(&figures, cli.json)),
        Some(Command::Strategies) => report(&strategies::measure(), cli.json),
        Some(Command::Reboot) => on_runtime(with_agent(async |stack| reboot::measure(stack).await))
            .and_then(|figures| report(&figures, cli.json)),
        Some(Command::Verbs) => on_runtime(with_agent(async |stack| verbs::measure(stack).await))
            .and_then(|figures| report(&figures, cli.json)),
        Some(Command::Volumes) => on_runtime(with_agent(async |stack| volumes::measure(stack).await))
            .and_then(|figures| report(&figures, cli.json)),
        Some(Command::Images) => on_runtime(with_agent(async |stack| images::measure(stack).await))
            .and_then(|figures| report(&figures, cli.json)),
        None => {
            let mut figures = Vec::new();
            let measured = on_runtime(measure(&mut figures));
            // What was measured is told, too, where something behind it does not work.
            report(&figures, cli.json).and(measured)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn report(figures: &[Figure], json: bool) -> Result<()> {
    print(if json { format!("{:#}\n", report::document(figures)) } else { report::table(figures) })
}

fn compare(rows: &[placement::Row], json: bool) -> Result<()> {
    print(if json { format!("{:#}\n", placement::document(rows)) } else { placement::table(rows) })
}

fn on_runtime<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("failed to start a runtime")?
        .block_on(work)
}

fn print(text: String) -> Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("failed to print the result")
}

/// Measures with an agent that runs.
async fn with_agent(measure: impl AsyncFnOnce(&mut Stack) -> Result<Vec<Figure>>) -> Result<Vec<Figure>> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let figures = measure(&mut stack).await?;
    stack.end_agent()?;
    Ok(figures)
}

async fn measure(figures: &mut Vec<Figure>) -> Result<()> {
    eprintln!("measuring eschedule");
    figures.extend(schedule::measure().await?);
    eprintln!("filling simulated nodes by each strategy");
    figures.extend(strategies::measure());
    eprintln!("starting etcd, placement and libvirtd");
    let mut stack = Stack::start().await?;
    eprintln!("measuring how soon an agent acts");
    figures.extend(react::measure(&stack).await?);
    stack.start_agent("").await?;
    eprintln!("measuring idle memory");
    let idle = memory::idle(&stack).await?;
    eprintln!("measuring builds");
    figures.extend(build::measure(&stack).await?);
    eprintln!("measuring many builds at once");
    figures.extend(burst::measure(&stack).await?);
    eprintln!("measuring what is done to a running guest");
    figures.extend(verbs::measure(&stack).await?);
    eprintln!("measuring volumes");
    figures.extend(volumes::measure(&stack).await?);
    eprintln!("measuring downloads of an image");
    figures.extend(images::measure(&stack).await?);
    eprintln!("measuring a console");
    figures.extend(echo::measure(&stack).await?);
    eprintln!("measuring memory");
    figures.extend(idle);
    figures.extend(memory::used(&stack).await?);
    eprintln!("measuring a host that comes up again");
    figures.extend(reboot::measure(&mut stack).await?);
    stack.end_agent()?;
    figures.extend(memory::simulated(&stack).await?);
    Ok(())
}

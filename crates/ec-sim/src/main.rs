//! `ec-sim`: the history of one seed, with its log; or of many, each in a process of its own.
#![expect(clippy::print_stdout, reason = "the log of a history is what this program is for")]

use std::{
    io::Write,
    process::{Command, ExitCode},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use ec_sim::{Ended, play, run, scenarios, tell};
use nix::sys::resource::{UsageWho, getrusage};

/// What is played makes and drops many small things.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The cluster in one process under simulated time: one seed, one history.
#[derive(Debug, Parser)]
struct Arguments {
    /// The seed, or the first and the one behind the last: 17, 0..300
    #[arg(required_unless_present_any = ["scenario", "scenarios"])]
    seeds: Option<String>,
    /// Plays the scenario of this name in place of a seed's history
    #[arg(long, conflicts_with = "seeds")]
    scenario: Option<String>,
    /// Lists the scenarios
    #[arg(long, conflicts_with_all = ["seeds", "scenario"])]
    scenarios: bool,
    /// Ends at the first history that fails
    #[arg(long)]
    first: bool,
    /// So many processes at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    if arguments.scenarios {
        for scenario in scenarios() {
            println!("{}\n    {}", scenario.name, scenario.story);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(name) = arguments.scenario {
        let scenario = scenarios().find(|scenario| scenario.name == name);
        let scenario =
            scenario.with_context(|| format!("no scenario is named `{name}`; --scenarios lists them"))?;
        return one(|| play(scenario));
    }
    let seed = |text: &str| text.trim().parse::<u64>().with_context(|| format!("`{text}` is no seed"));
    let seeds = arguments.seeds.unwrap_or_default();
    match seeds.split_once("..") {
        None => {
            let seed = seed(&seeds)?;
            let ended = one(|| run(seed))?;
            if ended == ExitCode::SUCCESS {
                println!("1 history, that of seed {seed}; 0..{seed} plays so many");
            }
            Ok(ended)
        }
        Some((first, end)) => many(seed(first)?..seed(end)?, arguments.jobs, arguments.first),
    }
}

/// A history takes a second of a processor. One that takes so much turns round and round at one moment of its time.
const LONGEST: i64 = 90;

fn one(history: impl FnOnce() -> Result<Ended>) -> Result<ExitCode> {
    if let Ok(filter) = std::env::var("RUST_LOG") {
        tell(&filter).map_err(anyhow::Error::msg)?;
    }
    std::panic::set_hook(Box::new(|panic| {
        println!("PANIC: {panic}");
        std::process::exit(2);
    }));
    std::thread::spawn(|| {
        // Whoever has little of a processor is waited for.
        while getrusage(UsageWho::RUSAGE_SELF).is_ok_and(|usage| usage.user_time().tv_sec() < LONGEST) {
            std::thread::sleep(Duration::from_secs(1));
        }
        println!("VIOLATION: the history does not end");
        std::process::exit(1);
    });
    let ended = history()?;
    for finding in &ended.findings {
        println!("VIOLATION: {finding}");
    }
    println!("{} instances acknowledged, {} transactions", ended.acknowledged, ended.transactions);
    std::io::stdout().flush()?;
    Ok(if ended.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Runs each seed in a process; tells of the first that fails, whole.
fn many(seeds: std::ops::Range<u64>, jobs: usize, first: bool) -> Result<ExitCode> {
    let program = std::env::current_exe()?;
    let (next, failed) = (AtomicU64::new(seeds.start), Mutex::new(Vec::<(u64, String)>::new()));
    let lock = || failed.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1))
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= seeds.end || (first && !lock().is_empty()) {
                            return Ok(());
                        }
                        let output = Command::new(&program).arg(seed.to_string()).output()?;
                        if !output.status.success() {
                            let mut log = String::from_utf8_lossy(&output.stdout).into_owned();
                            log.push_str(&String::from_utf8_lossy(&output.stderr));
                            lock().push((seed, log));
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            match worker.join() {
                Ok(ended) => ended?,
                Err(_) => bail!("a thread that runs histories panicked"),
            }
        }
        Ok(())
    })?;
    let mut failed = lock();
    failed.sort_unstable();
    let count = seeds.end.saturating_sub(seeds.start);
    if let Some((seed, log)) = failed.first() {
        println!("{log}");
        let all: Vec<String> = failed.iter().map(|(seed, _)| seed.to_string()).collect();
        if first {
            println!("one history of {} fails", seed - seeds.start + 1);
        } else {
            println!("{} of {count} histories fail: {}", failed.len(), all.join(" "));
        }
        println!("the first again: cargo run -p ec-sim -- {seed}");
        return Ok(ExitCode::from(1));
    }
    println!("{count} histories, nothing that must not be");
    Ok(ExitCode::SUCCESS)
}

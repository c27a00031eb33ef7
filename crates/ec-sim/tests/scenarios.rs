//! Every scenario, in a process of its own, with the log that is kept of it.
//!
//! `BLESS=1 cargo test -p ec-sim --test scenarios` writes the logs anew: what a change does to them is for its reviewer.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

fn kept() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios").into()
}

fn names() -> BTreeSet<String> {
    ec_sim::scenarios().map(|scenario| scenario.name.to_owned()).collect()
}

/// Its lines. What one program does at one moment has no order: the many claims of one transaction, say, lie in it as
/// their map has them, which is another in another build.
fn told(log: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = log.lines().collect();
    let moment = |line: &str| line.split_whitespace().take(2).map(str::to_owned).collect::<Vec<_>>();
    lines.chunk_by_mut(|a, b| moment(a) == moment(b)).for_each(<[&str]>::sort_unstable);
    lines
}

/// Plays one; why it is not as it should be.
fn played(name: &str, bless: bool) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ec-sim"));
    let output =
        command.args(["--scenario", name]).env_remove("RUST_LOG").env_remove("PLANTED").output().unwrap();
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Err(format!("{name} fails:\n{log}{}", String::from_utf8_lossy(&output.stderr)));
    }
    let file = kept().join(name).join("log");
    if bless {
        fs::create_dir_all(kept().join(name)).unwrap();
        fs::write(&file, &log).unwrap();
    }
    let kept = fs::read_to_string(&file).unwrap_or_default();
    let (log, kept) = (told(&log), told(&kept));
    let Some(line) = (0..).zip(log.iter().zip(&kept)).find(|(_, (is, was))| is != was) else {
        let (is, was) = (log.len(), kept.len());
        return if is == was { Ok(()) } else { Err(format!("{name}: {is} lines, kept are {was}")) };
    };
    let (number, (is, was)) = line;
    Err(format!("{name}: line {} was\n  {was}\nand is\n  {is}", number + 1))
}

/// The directories that there are.
fn logs() -> BTreeSet<String> {
    fs::read_dir(kept()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn every_scenario_ends_well_and_has_the_log_that_is_kept_of_it() {
    let bless = std::env::var_os("BLESS").is_some();
    let names = names();
    assert_eq!(ec_sim::scenarios().count(), names.len(), "no name twice");
    if bless {
        for old in logs().difference(&names) {
            fs::remove_dir_all(kept().join(old)).unwrap();
        }
    }
    let list: Vec<&String> = names.iter().collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while let Some(name) = list.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = played(name, bless) {
                        failed.lock().unwrap().push(why);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), list.len(), failed.join("\n"));
    assert_eq!(logs(), names, "a log without a scenario, or the other way round");
}

//! Histories of many seeds, each in a process of its own.
//!
//! `SEEDS=0..2000 cargo test -p ec-sim` runs others; `cargo run -p ec-sim -- 17` one, with its log.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::process::{Command, Output};

/// What fits into a few minutes on two processors also without optimization; `make sim` runs thousands.
const SEEDS: &str = "0..120";

/// Histories that a bug spoiled once. What a seed does changes with the code, so they are no more than a reminder
/// that is cheap to keep.
const ONCE: [u64; 3] = [0, 11, 57];

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ec-sim")).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn whatever_breaks_nothing_acknowledged_is_lost_and_nothing_is_left_over() {
    let seeds = std::env::var("SEEDS").unwrap_or_else(|_| SEEDS.to_owned());
    let output = sim(&[&seeds]);
    assert!(output.status.success(), "{}", text(&output));
    println!("{}", text(&output));
}

/// Whoever listens to the programs hears the same history.
#[test]
fn what_programs_say_changes_nothing() {
    let seed = "17";
    let silent = sim(&[seed]);
    let told =
        Command::new(env!("CARGO_BIN_EXE_ec-sim")).arg(seed).env("RUST_LOG", "trace").output().unwrap();
    assert!(told.stderr.len() > 1000, "{}", text(&told));
    assert!(told.stdout == silent.stdout, "another history\n{}", text(&told));
}

#[test]
fn a_seed_has_one_history() {
    for seed in ONCE {
        let [first, second] = [(); 2].map(|()| sim(&[&seed.to_string()]));
        assert_eq!(text(&first), text(&second), "seed {seed}");
        assert!(first.status.success(), "{}", text(&first));
        assert!(first.stdout.len() > 1000, "{}", text(&first));
    }
}

//! The simulation finds classic mistakes: each is planted where it could have been made, behind a feature that no
//! shipped binary has. `cargo test -p ec-sim --features planted`
#![cfg(feature = "planted")]

use std::process::Command;

/// Some history among these shows each.
const SEEDS: &str = "0..300";

/// What is left out, or done too early, or believed.
const MISTAKES: [&str; 29] = [
    // Control.
    "request-without-index",
    "request-not-fenced",
    "name-unchecked",
    "name-kept",
    "claim-kept",
    "sweep-the-young",
    "sweep-asked-for",
    "wish-not-compared",
    "group-not-compared",
    "wishes-healed",
    "volume-deleted-in-use",
    "volume-not-compared",
    "lock-ignored",
    "size-not-claimed",
    // The agent.
    "unfenced",
    "older-wish-told",
    "not-buried",
    "record-kept",
    "domain-kept",
    "claim-not-released",
    "audit-at-once",
    "silent-watch-believed",
    "sign-believed",
    "request-of-another",
    "nothing-held",
    "not-ended",
    "rescue-disk-kept",
    // eplacement.
    "race-not-compared",
    "epoch-not-compared",
];

#[test]
fn each_planted_mistake_is_found() {
    let mut unseen = Vec::new();
    for mistake in MISTAKES {
        let output = Command::new(env!("CARGO_BIN_EXE_ec-sim"))
            .args([SEEDS, "--first"])
            .env("PLANTED", mistake)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found = text.lines().find(|line| line.starts_with("VIOLATION"));
        let after = text.lines().find(|line| line.starts_with("one history of"));
        println!("{mistake}: {}: {}", after.unwrap_or("not found"), found.unwrap_or_default());
        if output.status.success() {
            unseen.push(mistake);
        }
    }
    assert_eq!(unseen, Vec::<&str>::new(), "the simulation is blind to these");
}

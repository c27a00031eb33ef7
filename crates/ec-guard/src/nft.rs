//! The `nft` program.

use std::{
    io::{self, Write},
    process::{Command, Stdio},
    thread,
};

use crate::GuardError;

/// Runs it with these arguments, gives it a script to read, and answers what it prints. A script is done
/// whole or not at all.
pub(crate) fn run(arguments: &[&str], script: &str) -> Result<String, GuardError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => GuardError::NoProgram,
        io::ErrorKind::PermissionDenied => GuardError::NotPermitted,
        _ => GuardError::Refused(error.to_string()),
    };
    let mut child = Command::new("nft")
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // Written aside, so that a full pipe on one side never waits for the other. What could not be written
    // shows in what the program says.
    let stdin = child.stdin.take();
    let script = script.to_owned();
    let write = move || stdin.map(|mut stdin| stdin.write_all(script.as_bytes()));
    // Where there is no thread for it, the program has nothing to read, and ends.
    let writer = thread::Builder::new().spawn(write);
    let output = child.wait_with_output().map_err(failed)?;
    let _ = writer.map_err(failed)?.join();
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(refusal(&text))
}

/// The first line says what, after the place in the script, which says nothing to anybody.
fn refusal(stderr: &str) -> GuardError {
    let line = stderr.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nft failed");
    if line.contains("Operation not permitted") || line.contains("you must be root") {
        return GuardError::NotPermitted;
    }
    GuardError::Refused(line.split_once("Error: ").map_or(line, |(_, what)| what).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_in_its_own_words_without_the_place() {
        let told =
            "/dev/stdin:4:1-12: Error: Could not process rule: No such file or directory\nadd element x\n^^^";
        assert_eq!(
            refusal(told),
            GuardError::Refused("Could not process rule: No such file or directory".into())
        );
        let told = "/dev/stdin:1:1-2: Error: Could not process rule: Operation not permitted";
        assert_eq!(refusal(told), GuardError::NotPermitted);
    }
}

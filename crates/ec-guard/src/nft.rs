//! The `nft` program.

use std::{
    io::{self, Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use crate::GuardError;

/// It takes some milliseconds, with thousands of elements a second. Guests wait for it, and so do others for whoever runs it.
const ENDS_IN: Duration = Duration::from_secs(10);

/// Why it did not do what it was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// In its own words: another try may do.
    Refused(String),
    /// As is to be told: a try more would only take as long again.
    Told(GuardError),
}

impl From<Failed> for GuardError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Refused(why) => Self::Refused(why),
            Failed::Told(error) => error,
        }
    }
}

/// Runs it with these arguments, gives it a script to read, and answers what it prints. A script is done
/// whole or not at all.
pub(crate) fn run(arguments: &[&str], script: &str) -> Result<String, Failed> {
    run_within(Command::new("nft").args(arguments), script, ENDS_IN)
}

fn run_within(program: &mut Command, script: &str, limit: Duration) -> Result<String, Failed> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failed::Told(GuardError::NoProgram),
        io::ErrorKind::PermissionDenied => Failed::Told(GuardError::NotPermitted),
        _ => Failed::Refused(error.to_string()),
    };
    let mut child = program
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let script = script.to_owned();
    let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (done, ends) = mpsc::channel();
    // Each aside, so that a full pipe never waits for another, and none for longer than the program gets. What could not be written
    // shows in what the program says.
    let write = move || pipes.0.map(|mut stdin| stdin.write_all(script.as_bytes()));
    let told = thread::Builder::new().spawn(move || all_of(pipes.2));
    let talk = move || {
        // Where there is no thread for it, the program has nothing to read, and ends.
        drop(thread::Builder::new().spawn(write));
        done.send(all_of(pipes.1)).ok();
    };
    let begun = told.and_then(|told| thread::Builder::new().spawn(talk).map(|_| told));
    let printed = begun.map_err(failed).and_then(|told| match ends.recv_timeout(limit) {
        Ok(printed) => Ok((printed, told)),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            Err(Failed::Told(GuardError::Silent(limit)))
        }
    });
    let (printed, told) = match printed {
        Ok(both) => both,
        Err(error) => {
            kill(child);
            return Err(error);
        }
    };
    let status = child.wait().map_err(failed)?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&printed).into_owned());
    }
    Err(refusal(&String::from_utf8_lossy(&told.join().unwrap_or_default())))
}

fn all_of(pipe: Option<impl Read>) -> Vec<u8> {
    let mut all = Vec::new();
    if let Some(mut pipe) = pipe {
        // What comes before it breaks counts.
        pipe.read_to_end(&mut all).ok();
    }
    all
}

/// One that the kernel holds up does not even end when it is killed: nobody waits for that.
fn kill(mut child: Child) {
    child.kill().ok();
    drop(thread::Builder::new().spawn(move || child.wait()));
}

/// The first line says what, after the place in the script, which says nothing to anybody.
fn refusal(stderr: &str) -> Failed {
    let line = stderr.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nft failed");
    if line.contains("Operation not permitted") || line.contains("you must be root") {
        return Failed::Told(GuardError::NotPermitted);
    }
    Failed::Refused(line.split_once("Error: ").map_or(line, |(_, what)| what).to_owned())
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
            Failed::Refused("Could not process rule: No such file or directory".into())
        );
        let told = "/dev/stdin:1:1-2: Error: Could not process rule: Operation not permitted";
        assert_eq!(refusal(told), Failed::Told(GuardError::NotPermitted));
    }

    #[test]
    fn one_that_does_not_end_is_killed_and_what_the_others_say_is_heard() {
        let sh = |script: &str, limit| run_within(Command::new("sh").args(["-c", script]), "in", limit);
        let long = Duration::from_secs(60);
        assert_eq!(sh("cat; echo out", long), Ok("inout\n".to_owned()));
        assert_eq!(sh("echo 'x: Error: no' >&2; exit 1", long), Err(Failed::Refused("no".into())));
        let begun = std::time::Instant::now();
        let limit = Duration::from_secs(1);
        assert_eq!(sh("exec sleep 20", limit), Err(Failed::Told(GuardError::Silent(limit))));
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}

//! Exit codes, the same for every binary, the one line that goes with them, and printing that may fail.

use std::{
    error::Error,
    io::{self, Write},
    process::ExitCode,
};

/// Refused or failed: no capacity, not found, an instance in ERROR.
pub const FAILED: u8 = 1;
/// Wrong usage or configuration (clap's own code for usage, too).
pub const USAGE: u8 = 2;
/// etcd or placement is not reachable.
pub const UNREACHABLE: u8 = 3;
/// Interrupted by a signal, as a shell reports SIGINT.
pub const INTERRUPTED: u8 = 130;
/// Nobody reads what is printed any more, as a shell reports SIGPIPE.
pub const NOBODY_READS: u8 = 141;

/// An error that has found its exit code: what `main` prints in one line.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The process's exit code.
    pub code: u8,
    /// The whole message, in one line, without a full stop.
    pub message: String,
}

impl Failure {
    /// Refused or failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { code: FAILED, message: message.into() }
    }

    /// Wrong usage or configuration.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, message: message.into() }
    }

    /// The code for `ExitCode`, after [`Self::tell`].
    pub fn report(self, program: &str) -> ExitCode {
        self.tell(program);
        ExitCode::from(self.code)
    }

    /// Prints the line to standard error; where there is nothing to say, nothing is.
    pub fn tell(&self, program: &str) {
        if !self.message.is_empty() {
            tell(&format!("{program}: {}", one_line(&self.message)));
        }
    }
}

/// Writes lines to standard output, at once. A reader who has gone is no error that anybody wants to read of:
/// the message is empty then.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let mut lines = text.as_bytes().to_vec();
    if !lines.ends_with(b"\n") {
        lines.push(b'\n');
    }
    written(stdout.write_all(&lines).and_then(|()| stdout.flush()))
}

/// What came of writing to standard output, for whoever does so in a way of their own; see [`print()`].
pub fn written(outcome: io::Result<()>) -> Result<(), Failure> {
    match outcome {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(Failure { code: NOBODY_READS, message: String::new() })
        }
        Err(error) => Err(Failure::failed(format!("failed to write to standard output: {error}"))),
    }
}

/// What was typed; where that cannot be, or was a question, how the process ends after its answer.
///
/// # Errors
/// The exit code; all is told.
pub fn arguments<C: clap::Parser>(program: &str) -> Result<C, ExitCode> {
    C::try_parse().map_err(|error| answered(program, &error))
}

/// Tells what is wrong with what was typed, or what was asked for.
pub fn answered(program: &str, error: &clap::Error) -> ExitCode {
    let told = error.print().and_then(|()| io::stdout().flush());
    match written(told) {
        // Where nobody reads what is wrong, there is nobody to tell so.
        Err(failure) if !error.use_stderr() => failure.report(program),
        _ => u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from),
    }
}

/// Writes a line to standard error, in one piece, so that nothing of another program comes between it and its
/// end. Where that is not possible there is nobody to tell. It is one line, and does nothing to a terminal, whoever worded it.
pub fn tell(line: &str) {
    io::stderr().lock().write_all(format!("{}\n", without_controls(line)).as_bytes()).ok();
}

fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

impl From<crate::config::ConfigError> for Failure {
    fn from(error: crate::config::ConfigError) -> Self {
        Self::usage(chain(&error))
    }
}

/// An error and its causes, joined by colons. Our errors never repeat their source in their own text.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&said(cause));
        source = cause.source();
    }
    text
}

/// What one cause says. Where it is a system without certificates of authorities, which whoever speaks HTTPS finds first,
/// it says what to do as well.
pub fn said(cause: &(dyn Error + 'static)) -> String {
    match cause.downcast_ref() {
        Some(rustls::Error::General(text)) if text.starts_with("No CA certificates") => {
            "this machine has no certificates of authorities: install its package ca-certificates, or name a file of them \
             in SSL_CERT_FILE"
                .to_owned()
        }
        _ => cause.to_string(),
    }
}

/// Line breaks and control characters become spaces: an error is one line, whoever worded it.
fn one_line(text: &str) -> String {
    without_controls(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_server_says_becomes_one_line() {
        assert_eq!(one_line("a\n  b\r\n\u{1b}[31mc"), "a b [31mc");
    }
}

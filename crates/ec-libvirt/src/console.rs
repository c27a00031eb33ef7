//! The guest's console log: the end of it as text, and its removal.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use ec_model::InstanceId;

use crate::error::CallError;

/// Where virtlogd writes an instance's console; it moves full files to `….log.0`, `….log.1` and so on.
pub(crate) fn path(directory: &Path, instance: InstanceId) -> PathBuf {
    directory.join(format!("{instance}.log"))
}

fn rotated(log: &Path, number: u32) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

/// The end of the log, at most `max_bytes`, as printable text.
pub(crate) fn tail(log: &Path, max_bytes: usize) -> Result<String, CallError> {
    let failed = |error| CallError::io("read", log, &error);
    let mut bytes = file_end(log, max_bytes).map_err(failed)?;
    if bytes.len() < max_bytes {
        // Just rotated: what came before is in the newest old file.
        let mut before = file_end(&rotated(log, 0), max_bytes - bytes.len()).map_err(failed)?;
        before.append(&mut bytes);
        bytes = before;
    }
    let text = printable(&String::from_utf8_lossy(&bytes));
    let mut start = text.len().saturating_sub(max_bytes);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    Ok(text[start..].to_owned())
}

fn file_end(path: &Path, max_bytes: usize) -> io::Result<Vec<u8>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let max = u64::try_from(max_bytes).unwrap_or(u64::MAX);
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(max)))?;
    let mut bytes = Vec::new();
    // The guest may write meanwhile: the bound holds all the same.
    file.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Removes the log and its rotated files; what is not there is not an error.
pub(crate) fn remove(log: &Path) -> Result<(), CallError> {
    let gone = |path: &Path| match std::fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(CallError::io("remove", path, &error)),
    };
    gone(log)?;
    // virtlogd numbers without gaps.
    for number in 0.. {
        if !gone(&rotated(log, number))? {
            break;
        }
    }
    Ok(())
}

/// Only what a terminal would show: no escape sequences, no control characters but line ends and tabs.
fn printable(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => match chars.next() {
                // Control sequence: parameters, then one final character from @ to ~.
                Some('[') => {
                    chars.find(|c| ('@'..='~').contains(c));
                }
                // Operating system command: until BEL, or ESC \.
                Some(']') => {
                    while let Some(c) = chars.next() {
                        if c == '\u{7}' || (c == '\u{1b}' && chars.next_if_eq(&'\\').is_some()) {
                            break;
                        }
                    }
                }
                // Choice of a character set: one more character.
                Some('(' | ')' | '*' | '+') => {
                    chars.next();
                }
                _ => {}
            },
            '\n' | '\t' => kept.push(c),
            c if c.is_control() => {}
            c => kept.push(c),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let log = path(directory.path(), "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap());
        (directory, log)
    }

    #[test]
    fn only_what_a_terminal_shows_is_left() {
        let raw = "\u{1b}[2J\u{1b}[01;01Hboot\r\n\u{1b}]0;title\u{7}a\u{1b}(Bb\tc\0\u{8}\u{9b}ä\u{1b}";
        assert_eq!(printable(raw), "boot\nab\tcä");
    }

    #[test]
    fn the_end_is_read_across_a_rotation_and_is_bounded() {
        let (_directory, log) = log();
        assert_eq!(tail(&log, 10).unwrap(), "", "no log yet");
        std::fs::write(rotated(&log, 0), "old lines\n").unwrap();
        std::fs::write(&log, b"n\xffw").unwrap();
        assert_eq!(tail(&log, 9).unwrap().chars().last(), Some('w'));
        assert!(tail(&log, 9).unwrap().starts_with("nes\n"));
        for max in 0..12 {
            assert!(tail(&log, max).unwrap().len() <= max);
        }
    }

    #[test]
    fn removing_takes_rotated_files_along_and_can_be_done_again() {
        let (directory, log) = log();
        for path in [log.clone(), rotated(&log, 0), rotated(&log, 1)] {
            std::fs::write(path, "x").unwrap();
        }
        remove(&log).unwrap();
        remove(&log).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

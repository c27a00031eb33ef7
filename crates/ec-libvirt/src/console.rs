//! The guest's console log: the end of it as text, what is added to it, and its removal.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use ec_hypervisor::{HypervisorError, Printed};
use ec_model::InstanceId;
use tokio::sync::mpsc;

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

/// So often a log is looked at to which nothing was added.
const PERIOD: Duration = Duration::from_millis(250);
/// Bytes that are read at a time.
const PIECE: u64 = 64 << 10;
/// Pieces that wait for their reader.
const PIECES: usize = 4;

/// The log from at most `max_bytes` before its end on, an empty piece, and what is added to it, until it is removed.
pub(crate) fn follow(log: PathBuf, max_bytes: usize) -> Printed {
    let (pieces, output) = mpsc::channel(PIECES);
    let mut follower = Follower::new(log, max_bytes);
    tokio::spawn(async move {
        let mut caught_up = false;
        loop {
            // A local file: the runtime's own threads will do.
            let step = tokio::task::spawn_blocking(move || {
                let step = follower.step();
                (follower, step)
            });
            let Ok((back, step)) = step.await else { return };
            follower = back;
            match step {
                Ok(Step::Piece(piece)) => {
                    follower.before = follower.before.saturating_sub(piece.len() as u64);
                    if pieces.send(Ok(piece)).await.is_err() {
                        return;
                    }
                    // A guest that writes faster than its reader takes it would never let this catch up with it.
                    let is_all = follower.before == 0 && !std::mem::replace(&mut caught_up, true);
                    if is_all && pieces.send(Ok(Bytes::new())).await.is_err() {
                        return;
                    }
                }
                Ok(Step::Nothing) => {
                    if !std::mem::replace(&mut caught_up, true)
                        && pieces.send(Ok(Bytes::new())).await.is_err()
                    {
                        return;
                    }
                    tokio::select! {
                        () = pieces.closed() => return,
                        () = tokio::time::sleep(PERIOD) => {}
                    }
                }
                Ok(Step::Gone) => return,
                Err(error) => {
                    let what = format!("read {}", follower.log.display());
                    let failed = HypervisorError::Failed { what, detail: error.to_string() };
                    drop(pieces.send(Err(failed)).await);
                    return;
                }
            }
        }
    });
    output
}

/// What a look at a log found.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Piece(Bytes),
    Nothing,
    Gone,
}

struct Follower {
    log: PathBuf,
    /// So much of what is there already.
    max_bytes: usize,
    open: Option<File>,
    was_there: bool,
    /// Bytes of what was there when it was opened that are not read yet.
    before: u64,
    /// The last look found no log; when it is full, there is none for a moment.
    missing: bool,
}

impl Follower {
    const fn new(log: PathBuf, max_bytes: usize) -> Self {
        Self { log, max_bytes, open: None, was_there: false, before: 0, missing: false }
    }

    fn step(&mut self) -> io::Result<Step> {
        // Looked at before reading: to what has another name by then nothing is added any more.
        let current = match fs::metadata(&self.log) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            other => Some(other?.ino()),
        };
        if let Some(mut file) = self.open.take() {
            let mut bytes = Vec::new();
            file.by_ref().take(PIECE).read_to_end(&mut bytes)?;
            if !bytes.is_empty() {
                self.open = Some(file);
                return Ok(Step::Piece(bytes.into()));
            }
            let own = file.metadata()?.ino();
            if current == Some(own) {
                self.open = Some(file);
                return Ok(Step::Nothing);
            }
            match after(&self.log, own)? {
                After::Next(next) => {
                    self.open = Some(next);
                    return self.step();
                }
                After::Lost(oldest) => {
                    self.open = Some(oldest);
                    return Ok(Step::Piece(Bytes::from_static(GAP)));
                }
                After::Nothing if current.is_some() => {
                    self.open = Some(file);
                    return Ok(Step::Nothing);
                }
                // The one that is written comes in a moment, or none does any more.
                After::Nothing => {}
            }
        }
        let Some(_) = current else {
            let gone = self.was_there && std::mem::replace(&mut self.missing, true);
            return Ok(if gone { Step::Gone } else { Step::Nothing });
        };
        let mut file = match File::open(&self.log) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Step::Nothing),
            other => other?,
        };
        if !self.was_there {
            let max = u64::try_from(self.max_bytes).unwrap_or(u64::MAX);
            let written = file.metadata()?;
            self.before = written.len().min(max);
            file.seek(SeekFrom::Start(written.len() - self.before))?;
            // Just rotated: what came before is in the newest old file.
            let rotated = if self.before < max { opened(&rotated(&self.log, 0))? } else { None };
            if let Some((mut old, is)) = rotated.filter(|(_, is)| is.ino() != written.ino()) {
                let of_old = is.len().min(max - self.before);
                old.seek(SeekFrom::Start(is.len() - of_old))?;
                self.before += of_old;
                file = old;
            }
        }
        (self.open, self.was_there, self.missing) = (Some(file), true, false);
        self.step()
    }
}

/// What is told where the guest printed more than is kept while nobody took it.
const GAP: &[u8] = b"\n[what was printed here is kept no more]\n";

/// What comes after a file of a log.
enum After {
    /// The next one.
    Next(File),
    /// It is removed by now, and this is the oldest one that there is.
    Lost(File),
    /// Nothing is there, or files are moved just now.
    Nothing,
}

/// What comes after the file with this inode, which has another name than the log by now.
fn after(log: &Path, own: u64) -> io::Result<After> {
    let look = || -> io::Result<(PathBuf, bool)> {
        let mut newer = log.to_owned();
        for number in 0.. {
            let old = rotated(log, number);
            match fs::metadata(&old) {
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                other if other.as_ref().is_ok_and(|is| is.ino() == own) => return Ok((newer, true)),
                other => other.map(|_| newer = old)?,
            }
        }
        Ok((newer, false))
    };
    let (path, is_there) = look()?;
    let Some((file, is)) = opened(&path)? else { return Ok(After::Nothing) };
    // By that name it may be another one by now.
    if is.ino() == own || look()? != (path, is_there) {
        return Ok(After::Nothing);
    }
    Ok(if is_there { After::Next(file) } else { After::Lost(file) })
}

fn opened(path: &Path) -> io::Result<Option<(File, fs::Metadata)>> {
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => {
            let file = other?;
            let is = file.metadata()?;
            Ok(Some((file, is)))
        }
    }
}

/// Removes the log and its rotated files; what is not there is not an error.
pub(crate) fn remove(log: &Path) -> Result<(), CallError> {
    remove_file(log)?;
    let Some(directory) = log.parent() else { return Ok(()) };
    let failed = |error| CallError::io("list", directory, &error);
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    // All that are there, and not those up to the first that is missing: a removal that was broken off has left a gap.
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if is_rotated(&path, log) {
            remove_file(&path)?;
        }
    }
    Ok(())
}

fn remove_file(path: &Path) -> Result<(), CallError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CallError::io("remove", path, &error)),
        _ => Ok(()),
    }
}

/// Whether it is a full file of this log, which has its name and a number.
fn is_rotated(path: &Path, log: &Path) -> bool {
    let is_number = |end: &OsStr| {
        let end = end.as_encoded_bytes();
        !end.is_empty() && end.iter().all(u8::is_ascii_digit)
    };
    path.file_stem() == log.file_name() && path.extension().is_some_and(is_number)
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
    fn a_log_is_followed_across_a_rotation_until_it_is_removed() {
        let (_directory, log) = log();
        let mut follower = Follower::new(log.clone(), 4);
        let mut step = || follower.step().unwrap();
        let piece = |text: &'static str| Step::Piece(Bytes::from_static(text.as_bytes()));
        assert_eq!((step(), step(), step()), (Step::Nothing, Step::Nothing, Step::Nothing), "not yet");
        std::fs::write(&log, "old lines\n").unwrap();
        assert_eq!((step(), step()), (piece("nes\n"), Step::Nothing));
        let add = |text: &str| {
            use std::io::Write;
            let mut file = File::options().append(true).create(true).open(&log).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        add("more");
        assert_eq!((step(), step()), (piece("more"), Step::Nothing));
        add("last");
        std::fs::rename(&log, rotated(&log, 0)).unwrap();
        assert_eq!((step(), step()), (piece("last"), Step::Nothing), "full, and no other one yet");
        add("first");
        assert_eq!((step(), step()), (piece("first"), Step::Nothing));
        add("end");
        remove(&log).unwrap();
        assert_eq!((step(), step(), step()), (piece("end"), Step::Nothing, Step::Gone));
    }

    #[tokio::test]
    async fn that_a_log_cannot_be_read_is_told_and_is_not_its_end() {
        let (_directory, log) = log();
        fs::create_dir(&log).unwrap();
        let mut printed = follow(log.clone(), 10);
        let error = printed.recv().await.unwrap().unwrap_err().to_string();
        assert!(error.contains(&log.display().to_string()), "{error}");
        assert!(printed.recv().await.is_none());
    }

    #[test]
    fn files_that_were_moved_meanwhile_are_read_one_after_the_other_and_what_is_lost_is_told() {
        let (_directory, log) = log();
        let rotate = || {
            for number in (0..2).rev() {
                fs::rename(rotated(&log, number), rotated(&log, number + 1)).ok();
            }
            fs::rename(&log, rotated(&log, 0)).unwrap();
        };
        let write = |text: &str| fs::write(&log, text).unwrap();
        let new = || Follower::new(log.clone(), 6);
        let read = |follower: &mut Follower| {
            let mut read = String::new();
            while let Step::Piece(piece) = follower.step().unwrap() {
                read.push_str(&String::from_utf8_lossy(&piece));
            }
            read
        };
        write("zeroth");
        rotate();
        write("longer than that");
        assert_eq!(read(&mut new()), "n that", "what is written is enough");
        write("first");
        rotate();
        write("2nd");
        let mut follower = new();
        assert_eq!(read(&mut follower), "rst2nd", "across a rotation from the beginning");
        rotate();
        write("third");
        rotate();
        write("4th");
        assert_eq!(read(&mut follower), "third4th", "of two rotations nothing is left out");
        for text in ["5", "6", "7", "8"] {
            rotate();
            write(text);
        }
        assert_eq!(read(&mut follower), format!("{}5678", String::from_utf8_lossy(GAP)));
        remove(&log).unwrap();
        assert_eq!((follower.step().unwrap(), follower.step().unwrap()), (Step::Nothing, Step::Gone));
    }

    #[tokio::test]
    async fn what_was_there_comes_to_its_end_also_where_the_guest_writes_faster_than_it_is_read() {
        let (_directory, log) = log();
        let lines = |count: usize| "0123456789abcdef".repeat(count);
        std::fs::write(&log, lines(16 << 10)).unwrap();
        let mut pieces = follow(log.clone(), 200 << 10);
        let mut read = 0;
        loop {
            let piece = pieces.recv().await.unwrap();
            let piece = piece.unwrap();
            if piece.is_empty() {
                break;
            }
            read += piece.len();
            assert!(read < 1 << 20, "it never ends");
            // As much more as was read, before that is taken.
            use std::io::Write;
            let mut file = File::options().append(true).open(&log).unwrap();
            file.write_all(lines(8 << 10).as_bytes()).unwrap();
        }
        assert!((200 << 10..(200 << 10) + (64 << 10)).contains(&read), "{read}");
        assert!(!pieces.recv().await.unwrap().unwrap().is_empty(), "and what was added follows");
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
        // One that was broken off took the first ones.
        let theirs = ["x.log.1", "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab.log.old"];
        let left = [rotated(&log, 1), rotated(&log, 10)];
        for path in theirs.map(|name| directory.path().join(name)).into_iter().chain(left) {
            std::fs::write(path, "x").unwrap();
        }
        remove(&log).unwrap();
        assert!(theirs.iter().all(|name| directory.path().join(name).exists()));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), theirs.len());
        remove(&directory.path().join("none/x.log")).unwrap();
    }
}

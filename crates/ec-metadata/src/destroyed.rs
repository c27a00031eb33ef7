//! Which instances were destroyed on this node: a file with a line for each, beside the records.
//!
//! What is written there outlives a crash, an older etcd that is put back, and a clock that is wrong for a while.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use ec_model::InstanceId;

use crate::{
    records::{RecordFileError, TEMPORARY, failed, sync},
    spare::Spare,
};

/// The file: of each the time in seconds since 1970.
const NAME: &str = "destroyed";

/// What a line ends with where the instance was placed here anew since.
const BACK: &str = "back";

/// How long it is remembered: far longer than any call of ours can be under way in the hypervisor, or a backup of etcd be brought back.
const REMEMBERED: Duration = Duration::from_secs(30 * 24 * 3600);

/// How often what is older is dropped.
const SWEPT: Duration = Duration::from_secs(24 * 3600);

/// And of so many at most, should a clock have been ahead for long.
const MOST: usize = 100_000;

/// A clock that says less was not set: there was no such program in 2024.
const CLOCKS_ARE_SET: u64 = 1_735_689_600;

/// Room for lines where the disk is full: a destroy is what makes room, and it begins with a line.
const SPARE: &str = "spare";

/// The file; clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct DestroyedFile {
    directory: PathBuf,
    spare: Spare,
    /// When old lines were last dropped. Held while a line is written: there is one at a time.
    swept: Arc<Mutex<Option<Instant>>>,
}

impl DestroyedFile {
    pub(crate) fn in_directory(directory: &Path) -> Self {
        let spare = Spare::new(directory, SPARE);
        Self { directory: directory.to_owned(), spare, swept: Arc::default() }
    }

    fn path(&self) -> PathBuf {
        self.directory.join(NAME)
    }

    /// See [`RecordDir::buried`](crate::RecordDir::buried).
    pub(crate) fn all(&self) -> Result<Vec<Destroyed>, RecordFileError> {
        Ok(Destroyed::all_of(&self.text()?))
    }

    /// Notes one as of now.
    pub(crate) fn note(&self, instance: InstanceId, epoch: Option<u64>) -> Result<(), RecordFileError> {
        self.write(&Destroyed { instance, when: now(), epoch }.to_string())
    }

    /// Takes that back.
    pub(crate) fn take_back(&self, instance: InstanceId) -> Result<(), RecordFileError> {
        if !self.all()?.iter().any(|destroyed| destroyed.instance == instance) {
            return Ok(());
        }
        self.write(&format!("{instance} {} {BACK}\n", now()))
    }

    /// Drops what was destroyed long ago, so that the file does not grow for ever, and a line that was cut short, so that none is
    /// written behind it.
    pub(crate) fn sweep(&self) -> Result<(), RecordFileError> {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        self.drop_old()?;
        self.spare.keep();
        *swept = Some(Instant::now());
        Ok(())
    }

    fn text(&self) -> Result<String, RecordFileError> {
        let path = self.path();
        match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            // A byte that a disk has changed spoils its own line at most.
            bytes => {
                bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).map_err(failed("read", &path))
            }
        }
    }

    fn write(&self, lines: &str) -> Result<(), RecordFileError> {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.path();
        let is_new = !path.exists();
        self.spare.write(|| append(&path, lines))?.map_err(failed("write", &path))?;
        if is_new {
            sync(&self.directory)?;
        }
        // The line is there: whatever fails from here on is tried again with the next.
        if swept.is_none_or(|at| at.elapsed() >= SWEPT) {
            match self.drop_old() {
                Ok(()) => *swept = Some(Instant::now()),
                Err(error) => {
                    tracing::debug!(error = %error.source, "failed to drop what was destroyed long ago")
                }
            }
        }
        self.spare.keep();
        Ok(())
    }

    fn drop_old(&self) -> Result<(), RecordFileError> {
        let text = self.text()?;
        let all = Destroyed::all_of(&text);
        let kept = remembered(&all, now());
        if kept == all && (text.is_empty() || text.ends_with('\n')) {
            return Ok(());
        }
        let new = self.directory.join(format!("{TEMPORARY}{NAME}"));
        let lines: String = kept.iter().map(ToString::to_string).collect();
        // Empty after a power cut, it would have what was destroyed come back with an older etcd.
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(lines.as_bytes())?;
            file.sync_all()
        });
        written.map_err(failed("write", &new))?;
        fs::rename(&new, self.path()).map_err(failed("rename", &new))?;
        sync(&self.directory)
    }
}

/// That an instance was destroyed here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destroyed {
    pub(crate) instance: InstanceId,
    /// In seconds since 1970.
    when: u64,
    /// As of which placement, where that is known.
    pub(crate) epoch: Option<u64>,
}

impl Destroyed {
    /// What a file says, line by line and the oldest first; what is no such line says nothing. Of one whose time cannot be read that
    /// is the time of those before it, or of now: an instance is not forgotten for that.
    fn all_of(text: &str) -> Vec<Self> {
        let mut all = BTreeMap::<InstanceId, Self>::new();
        let mut latest = 0;
        for line in text.lines() {
            let mut words = line.split(' ');
            let (Some(instance), Some(when)) = (words.next(), words.next()) else { continue };
            let Ok(instance) = instance.parse() else { continue };
            // Lines are in the order of what they tell, whatever the clock was set to meanwhile.
            let when = when.parse::<u64>();
            latest = latest.max(*when.as_ref().unwrap_or(&0));
            let noted = Self { instance, when: latest, epoch: None };
            // Behind a time that cannot be read, that of the next line may come.
            match words.next().filter(|word| when.is_ok() || *word == BACK) {
                None => _ = all.insert(instance, noted),
                Some(BACK) => _ = all.remove(&instance),
                Some(epoch) => {
                    if let Ok(epoch) = epoch.parse() {
                        // The line before told the same, if it can be read.
                        all.entry(instance).or_insert(noted).epoch = Some(epoch);
                    }
                }
            }
        }
        let mut all: Vec<_> = all.into_values().collect();
        all.sort_by_key(|destroyed| destroyed.when);
        all
    }
}

/// The placement has a line of its own, which releases that know nothing of it pass over.
impl std::fmt::Display for Destroyed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { instance, when, epoch } = self;
        writeln!(f, "{instance} {when}")?;
        epoch.map_or(Ok(()), |epoch| writeln!(f, "{instance} {when} {epoch}"))
    }
}

/// Those that are not too old. A clock that is far ahead makes none so, neither now nor when one was noted: age counts from the newest, if
/// that is earlier, and what lies between two neighbours counts for nothing where it is longer than anything is remembered. That may have been
/// a quiet time as well, and then the earlier is kept for longer. What was noted by a clock that was not set is as old as now.
fn remembered(all: &[Destroyed], now: u64) -> Vec<Destroyed> {
    let newest_of_all = &all[all.len().saturating_sub(MOST)..];
    let (mut age, mut later) = (0, None);
    let mut kept = Vec::new();
    for destroyed in newest_of_all.iter().rev() {
        if destroyed.when < CLOCKS_ARE_SET {
            kept.push(Destroyed { when: now, ..*destroyed });
            continue;
        }
        let when = destroyed.when.min(now);
        let between = later.replace(when).map_or(0, |later: u64| later - when);
        if between <= REMEMBERED.as_secs() {
            age += between;
        }
        if age <= REMEMBERED.as_secs() {
            kept.push(*destroyed);
        }
    }
    kept.reverse();
    kept
}

fn append(path: &Path, lines: &str) -> io::Result<()> {
    let mut file = File::options().read(true).append(true).create(true).mode(0o600).open(path)?;
    drop_half_line(&file)?;
    file.write_all(lines.as_bytes())?;
    file.sync_all()
}

/// Cuts off what a full disk left of the last line: what comes next would be read as its end.
fn drop_half_line(mut file: &File) -> io::Result<()> {
    let (length, mut last) = (file.metadata()?.len(), [b'\n']);
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    if last == [b'\n'] {
        return Ok(());
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    file.set_len(whole as u64)
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::RecordDir;

    const DAY: u64 = 24 * 3600;
    const NOW: u64 = 1_800_000_000;

    fn id(number: u128) -> InstanceId {
        format!("00000000-0000-4000-8000-{number:012x}").parse().unwrap()
    }

    fn buried(records: &RecordDir) -> BTreeMap<InstanceId, Option<u64>> {
        records.buried().unwrap().into_iter().collect()
    }

    #[test]
    fn what_was_destroyed_is_remembered_for_a_while_and_no_line_is_believed_by_half() {
        let dir = tempfile::tempdir().unwrap();
        let records = RecordDir::open(dir.path()).unwrap();
        assert_eq!(buried(&records), BTreeMap::new());
        records.bury(id(1), None).unwrap();
        records.bury(id(2), Some(7)).unwrap();
        let path = dir.path().join(NAME);
        let text = fs::read_to_string(&path).unwrap();
        // A crash cut the last line short, and one is of long ago.
        let [long_ago, between] = [31, 15].map(|days| now() - days * DAY);
        let old = format!("{} {long_ago}\n{} {between}\n", id(3), id(7));
        fs::write(&path, format!("{old}{text}{}", &id(4).to_string()[..20])).unwrap();
        let of_now = [(id(1), None), (id(2), Some(7)), (id(7), None)];
        assert_eq!(buried(&records), of_now.into_iter().chain([(id(3), None)]).collect());
        let records = RecordDir::open(dir.path()).unwrap();
        assert_eq!(buried(&records), of_now.into());
        records.unbury(id(7)).unwrap();
        // Half a line is not continued by the next one.
        fs::write(&path, fs::read_to_string(&path).unwrap() + &id(4).to_string()[..20]).unwrap();
        let records = RecordDir::open(dir.path()).unwrap();
        records.bury(id(5), Some(2)).unwrap();
        // What was placed here anew is none of them, unless it is destroyed once more.
        for _ in 0..2 {
            records.unbury(id(2)).unwrap();
        }
        assert_eq!(buried(&records), [(id(1), None), (id(5), Some(2))].into());
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 6);
        records.bury(id(2), Some(9)).unwrap();
        assert_eq!(buried(&records), [(id(1), None), (id(2), Some(9)), (id(5), Some(2))].into());
        // Nor where a full disk cut it short under who writes.
        fs::write(&path, fs::read_to_string(&path).unwrap() + &id(4).to_string()[..20]).unwrap();
        records.bury(id(6), Some(3)).unwrap();
        assert_eq!(buried(&records).remove(&id(6)), Some(Some(3)));
        assert!(records.list().unwrap().is_empty());
    }

    #[test]
    fn a_clock_that_is_wrong_makes_nobody_forget_what_was_destroyed() {
        let of = |lines: &[(u128, u64)]| {
            let text: String =
                lines.iter().map(|(number, when)| format!("{} {when}\n", id(*number))).collect();
            Destroyed::all_of(&text)
        };
        let kept = |lines: &[(u128, u64)], now: u64| {
            let kept = remembered(&of(lines), now);
            kept.into_iter().map(|kept| (kept.instance, kept.when)).collect::<Vec<_>>()
        };
        let [before, between, lately] = [40, 20, 1].map(|days| NOW - days * DAY);
        let all = [(1, before), (2, between), (3, lately)];
        assert_eq!(kept(&all, NOW), [(id(2), between), (id(3), lately)]);
        assert_eq!(kept(&[(2, lately)], NOW + 900 * DAY), [(id(2), lately)], "it is far ahead for now");
        assert_eq!(kept(&[(2, lately), (3, 70)], NOW), [(id(2), lately), (id(3), lately)], "it was not set");
        assert_eq!(kept(&[(3, 70)], NOW), [(id(3), NOW)], "nor ever before");
        let ahead = NOW + 900 * DAY;
        let after_it = kept(&[(1, before), (2, between), (4, ahead), (3, lately)], NOW);
        assert_eq!(
            after_it,
            [(id(2), between), (id(3), ahead), (id(4), ahead)],
            "nobody knows when that was"
        );
        // Looked at while the clock is ahead yet, where one was noted by it, and again once it is not.
        let under_it = [(1, before), (2, between), (3, lately), (4, ahead)];
        for now in [ahead, ahead + 2 * DAY, NOW, NOW + 2 * DAY] {
            let kept = kept(&under_it, now).into_iter().map(|(instance, _)| instance).collect::<Vec<_>>();
            assert_eq!(kept, [id(2), id(3), id(4)], "{now}");
        }
        // What came after it grows old all the same.
        let later = [(3, lately), (4, ahead), (5, ahead + 20 * DAY), (6, ahead + 31 * DAY)];
        let later =
            kept(&later, ahead + 31 * DAY).into_iter().map(|(instance, _)| instance).collect::<Vec<_>>();
        assert_eq!(later, [id(5), id(6)]);
        let many: Vec<_> = (0..MOST as u128 + 1).map(|number| (number, ahead)).collect();
        assert_eq!(kept(&many, NOW).len(), MOST);
    }

    #[test]
    fn a_byte_that_a_disk_has_changed_spoils_its_own_line_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let records = RecordDir::open(dir.path()).unwrap();
        for number in 1..=4 {
            records.bury(id(number), Some(7)).unwrap();
        }
        let path = dir.path().join(NAME);
        let text = fs::read(&path).unwrap();
        let mut lines: Vec<Vec<u8>> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        // In a time, in a placement, in whom a line is of, and in a time without which the next line is all that is left.
        for (line, byte) in [(0, 40), (3, 48), (4, 8), (6, 40), (6, 8)] {
            lines[line][byte] = 0xff;
        }
        fs::write(&path, lines.join(&b'\n')).unwrap();
        let known = [(id(1), Some(7)), (id(2), None), (id(3), Some(7)), (id(4), Some(7))].into();
        assert_eq!(buried(&records), known);
        let records = RecordDir::open(dir.path()).unwrap();
        assert_eq!(buried(&records), known, "nor is one dropped at the next start");
        // And where a line's end is spoilt.
        let text = format!("{} {NOW}\u{fffd}{} {NOW}\n", id(5), id(6));
        fs::write(&path, text).unwrap();
        assert_eq!(buried(&RecordDir::open(dir.path()).unwrap()), [(id(5), None)].into());
    }

    #[test]
    fn what_grew_old_is_dropped_while_others_are_noted() {
        let dir = tempfile::tempdir().unwrap();
        let file = DestroyedFile::in_directory(dir.path());
        let [long_ago, between] = [31, 15].map(|days| now() - days * DAY);
        let old = format!("{} {long_ago}\n{} {between}\n", id(1), id(9));
        fs::write(file.path(), &old).unwrap();
        file.note(id(2), None).unwrap();
        let all = || file.all().unwrap().into_iter().map(|destroyed| destroyed.instance).collect::<Vec<_>>();
        assert_eq!(all(), [id(9), id(2)], "nobody has looked before");
        fs::write(file.path(), &old).unwrap();
        file.note(id(3), None).unwrap();
        assert_eq!(all(), [id(1), id(9), id(3)], "that was a moment ago");
        *file.swept.lock().unwrap() = None;
        file.note(id(4), None).unwrap();
        assert_eq!(all(), [id(9), id(3), id(4)]);
    }
}

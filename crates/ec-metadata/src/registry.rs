//! The metadata servers of one host and their records.
//!
//! 169.254.169.254 is one address, and whoever holds its port answers for all guests of the host: of two
//! agents, each with its own records and perhaps its own bridge, both must be known to both. Each leaves a
//! link to its records where the others look:
//!
//! ```text
//! /run/ecompute/metadata/<network namespace>/<bridge>.<digest of the path> ──▶ <state_dir>/instances
//! ```
//!
//! A link stays when its server ends, as its guests do, and goes when the records are gone.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, symlink},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use ec_model::MacAddr;
use sha2::{Digest, Sha256};

use crate::{InstanceRecord, RecordDir, RecordFileError, records::failed};

/// Where servers of this host find each other.
pub(crate) const DIRECTORY: &str = "/run/ecompute/metadata";

/// Records that are there answer in less. Each agent's lie on its own file system, of which one may not answer at all: guests of all
/// agents of the host would wait for it.
const ANSWERS_IN: Duration = Duration::from_secs(2);

/// The records of one agent of this host. They are asked one question at a time: each that is not answered holds a thread.
#[derive(Debug, Clone)]
pub struct Source {
    records: RecordDir,
    /// When the question was asked that is under way.
    asked: Arc<(Mutex<Option<Instant>>, Condvar)>,
}

impl Source {
    /// Records that are to be asked.
    pub fn new(records: RecordDir) -> Self {
        Self { records, asked: Arc::default() }
    }

    /// How many instances and volumes have a record; blocks for some seconds at most.
    ///
    /// # Errors
    /// They cannot be listed, or do not answer.
    pub fn count(&self) -> Result<usize, RecordFileError> {
        self.ask(RecordDir::count)
    }

    /// What they answer to that; an error where they do not, at once where somebody waits for them in vain already.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&RecordDir) -> Result<T, RecordFileError> + Send + 'static,
    ) -> Result<T, RecordFileError> {
        let failed = |source| failed("read", self.records.directory())(source);
        let (asked, answered) = &*self.asked;
        let mut under_way = asked.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(since) = *under_way {
            let left = ANSWERS_IN.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
            let waited = answered.wait_timeout(under_way, left);
            under_way = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *under_way = Some(Instant::now());
        drop(under_way);
        let (done, answer) = mpsc::channel();
        let (records, over) = (self.records.clone(), Over(Arc::clone(&self.asked)));
        let begun = thread::Builder::new().spawn(move || {
            let said = question(&records);
            drop(over);
            done.send(said).ok();
        });
        begun.map_err(failed)?;
        answer.recv_timeout(ANSWERS_IN).unwrap_or_else(|_| Err(failed(io::ErrorKind::TimedOut.into())))
    }
}

/// The question is not under way any more once this is dropped, however it ended.
struct Over(Arc<(Mutex<Option<Instant>>, Condvar)>);

impl Drop for Over {
    fn drop(&mut self) {
        let (asked, answered) = &*self.0;
        *asked.lock().unwrap_or_else(PoisonError::into_inner) = None;
        answered.notify_one();
    }
}

/// The records of this server, and those of all others of this host.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    bridge: String,
    own: Source,
    /// Where there is no such place, there are no others.
    place: Option<PathBuf>,
    readers: Arc<Mutex<HashMap<PathBuf, Source>>>,
}

impl Sources {
    pub(crate) fn new(bridge: String, own: RecordDir, root: &Path) -> Self {
        // Two hosts in namespaces of one machine have one /run.
        let place = fs::metadata("/proc/self/ns/net").ok().map(|space| root.join(space.ino().to_string()));
        Self { bridge, own: Source::new(own), place, readers: Arc::default() }
    }

    /// Leaves the link for the others, where it is not there.
    pub(crate) fn register(&self) -> io::Result<()> {
        let Some(place) = &self.place else { return Ok(()) };
        let records = std::path::absolute(self.own.records.directory())?;
        let digest: String = Sha256::digest(records.as_os_str().as_encoded_bytes())
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let link = place.join(format!("{}.{digest}", self.bridge));
        if link.is_symlink() {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(place)?;
        for entry in fs::read_dir(place)?.flatten() {
            let Ok(path) = fs::read_link(entry.path()) else { continue };
            // Records that do not answer may be there.
            if let Ok(false) =
                Source::new(RecordDir::reader(&path)).ask(|records| Ok(records.directory().exists()))
            {
                fs::remove_file(entry.path()).or_else(ignore_absence)?;
            }
        }
        symlink(records, link).or_else(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(error),
        })
    }

    /// All records, those of this server first.
    fn all(&self) -> impl Iterator<Item = Source> {
        std::iter::once(self.own.clone()).chain(self.others().into_iter().map(|(_, other)| other))
    }

    /// Bridges and records of the others.
    fn others(&self) -> Vec<(String, Source)> {
        let entries = self.place.as_ref().and_then(|place| fs::read_dir(place).ok());
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut others, mut found) = (Vec::new(), HashMap::new());
        for entry in entries.into_iter().flatten().flatten() {
            let (Ok(path), Ok(name)) = (fs::read_link(entry.path()), entry.file_name().into_string()) else {
                continue;
            };
            let Some((bridge, _)) = name.rsplit_once('.') else { continue };
            let known = found.get(&path).cloned().or_else(|| readers.remove(&path));
            let reader = known.unwrap_or_else(|| Source::new(RecordDir::reader(&path)));
            if path != self.own.records.directory() || bridge != self.bridge {
                others.push((bridge.to_owned(), reader.clone()));
            }
            found.insert(path, reader);
        }
        *readers = found;
        others
    }

    pub(crate) fn bridges(&self) -> Vec<String> {
        let mut bridges: Vec<String> = std::iter::once(self.bridge.clone())
            .chain(self.others().into_iter().map(|(bridge, _)| bridge))
            .collect();
        bridges.dedup();
        bridges
    }

    /// The record of the guest with this hardware address.
    pub(crate) fn find_by_mac(&self, mac: MacAddr) -> Result<Option<InstanceRecord>, RecordFileError> {
        let mut passed_over = None;
        for source in self.all() {
            let answer = source.ask(move |records| records.find_by_mac(mac));
            if let Some(record) = or_passed_over(answer, &mut passed_over) {
                return Ok(Some(record));
            }
        }
        passed_over.map_or(Ok(None), Err)
    }

    /// The hardware addresses of all guests whose ports give this mark: one, as good as always.
    pub(crate) fn macs_of_mark(&self, mark: u32) -> Result<Vec<MacAddr>, RecordFileError> {
        let (mut macs, mut passed_over) = (Vec::new(), None);
        // Also where there is one of our own: two guests with one mark are told apart only where both are known.
        for source in self.all() {
            let answer = source.ask(move |records| records.macs_of_mark(mark));
            macs.extend(or_passed_over(answer, &mut passed_over));
        }
        if macs.is_empty()
            && let Some(error) = passed_over
        {
            return Err(error);
        }
        macs.sort_unstable();
        macs.dedup();
        Ok(macs)
    }
}

/// What records answer. Those that cannot be read take nothing away from the guests that are found elsewhere.
fn or_passed_over<T: Default>(
    answer: Result<T, RecordFileError>,
    passed_over: &mut Option<RecordFileError>,
) -> T {
    answer.unwrap_or_else(|error| {
        tracing::debug!(%error, cause = %error.source, "passed over the records of an agent of this host");
        *passed_over = Some(error);
        T::default()
    })
}

fn ignore_absence(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use ec_guard::ports::mark_of;
    use ec_model::InstanceId;

    use std::fs::File;

    use super::*;
    use crate::RECORD_VERSION;

    fn record(number: u32) -> InstanceRecord {
        let instance: InstanceId = format!("7d3c1f0a-2b4e-4c55-9a7e-{number:012}").parse().unwrap();
        InstanceRecord {
            version: RECORD_VERSION,
            instance,
            name: format!("guest-{number}"),
            macs: vec![instance.mac(0)],
            base_digest: None,
            next_base_digest: None,
            next_wished_at: None,
            next_is_whole: false,
            rescue_base_digest: None,
            rebuilt: None,
            rescued: None,
            resized: None,
            resources_before: None,
            growing: None,
            intent: None,
            metadata: std::collections::BTreeMap::new(),
            keys: vec![],
            user_data: None,
            token_required: false,
            project: String::new(),
            resources: ec_model::Resources::new(),
            started: false,
            created_at: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    /// Makes a record there for which whoever reads it waits until somebody writes.
    fn hangs_in(records: &Path) -> PathBuf {
        let hangs = records.join(format!("{}.json", record(3).instance));
        assert!(std::process::Command::new("mkfifo").arg(&hangs).status().unwrap().success());
        hangs
    }

    /// Whoever reads it goes on.
    fn go_on(hangs: &Path) {
        drop(File::options().read(true).write(true).open(hangs).unwrap());
    }

    #[test]
    fn servers_find_each_others_records_also_of_one_that_has_ended() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("run");
        let open = |name: &str| RecordDir::open(root.path().join(name)).unwrap();
        let (one, two, gone) = (open("one"), open("two"), open("gone"));
        one.put(&record(1)).unwrap();
        two.put(&record(2)).unwrap();
        let ended = Sources::new("br2".into(), two.clone(), &place);
        ended.register().unwrap();
        ended.register().unwrap();
        drop(ended);
        let lost = Sources::new("br9".into(), gone, &place);
        lost.register().unwrap();
        fs::remove_dir_all(root.path().join("gone")).unwrap();
        let sources = Sources::new("br1".into(), one, &place);
        let mac = |number| record(number).macs[0];
        assert_eq!(sources.find_by_mac(mac(2)).unwrap(), Some(record(2)), "before it is known itself");
        assert_eq!(sources.own.count().unwrap(), 1);
        sources.register().unwrap();
        assert_eq!(sources.bridges(), ["br1", "br2"], "the lost one is swept");
        for number in [1, 2] {
            assert_eq!(sources.find_by_mac(mac(number)).unwrap(), Some(record(number)));
            assert_eq!(sources.macs_of_mark(mark_of(mac(number))).unwrap(), [mac(number)]);
        }
        assert_eq!(sources.find_by_mac(mac(3)).unwrap(), None);
        two.put(&record(3)).unwrap();
        assert_eq!(sources.find_by_mac(mac(3)).unwrap(), Some(record(3)), "changes are seen");
    }

    #[test]
    fn records_of_another_that_cannot_be_read_take_nothing_away_from_those_that_can() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("run");
        let open = |name: &str| RecordDir::open(root.path().join(name)).unwrap();
        let (own, broken) = (open("own"), open("broken"));
        own.put(&record(1)).unwrap();
        Sources::new("br1".into(), broken, &place).register().unwrap();
        fs::remove_dir_all(root.path().join("broken")).unwrap();
        // No directory: it is there, and cannot be listed.
        fs::write(root.path().join("broken"), "").unwrap();
        let sources = Sources::new("br1".into(), own, &place);
        let mac = |number| record(number).macs[0];
        assert_eq!(sources.find_by_mac(mac(1)).unwrap(), Some(record(1)));
        assert_eq!(sources.macs_of_mark(mark_of(mac(1))).unwrap(), [mac(1)]);
        // It may be one of those.
        assert!(sources.find_by_mac(mac(2)).is_err());
        assert!(sources.macs_of_mark(mark_of(mac(2))).is_err());
    }

    #[test]
    fn without_a_place_to_meet_a_server_has_its_own_records() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        let records = RecordDir::open(root.path().join("one")).unwrap();
        records.put(&record(1)).unwrap();
        let sources = Sources::new("br1".into(), records, &root.path().join("file/run"));
        assert!(sources.register().is_err());
        assert_eq!(sources.find_by_mac(record(1).macs[0]).unwrap(), Some(record(1)));
    }

    #[test]
    fn records_of_another_that_do_not_answer_are_waited_for_once() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("run");
        let open = |name: &str| RecordDir::open(root.path().join(name)).unwrap();
        let (own, silent) = (open("own"), open("silent"));
        own.put(&record(1)).unwrap();
        silent.put(&record(2)).unwrap();
        let hangs = hangs_in(&root.path().join("silent"));
        Sources::new("br1".into(), silent, &place).register().unwrap();
        let sources = Sources::new("br1".into(), own, &place);
        let mac = |number| record(number).macs[0];
        let (told, done) = mpsc::channel();
        let asking = thread::spawn(move || {
            let found = [(); 5].map(|()| sources.macs_of_mark(mark_of(mac(1))).ok());
            told.send((found, sources.find_by_mac(mac(2)).is_err())).ok();
        });
        let found = done.recv_timeout(ANSWERS_IN * 3);
        go_on(&hangs);
        assert_eq!(found.unwrap(), ([(); 5].map(|()| Some(vec![mac(1)])), true));
        asking.join().unwrap();
    }

    #[test]
    fn own_records_that_do_not_answer_take_nothing_away_from_guests_of_others() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("run");
        let open = |name: &str| RecordDir::open(root.path().join(name)).unwrap();
        let (own, other) = (open("own"), open("other"));
        other.put(&record(2)).unwrap();
        let hangs = hangs_in(&root.path().join("own"));
        Sources::new("br2".into(), other, &place).register().unwrap();
        let sources = Sources::new("br1".into(), own, &place);
        let mac = |number| record(number).macs[0];
        let (told, done) = mpsc::channel();
        let asking = thread::spawn(move || {
            let found = (sources.macs_of_mark(mark_of(mac(2))).ok(), sources.find_by_mac(mac(2)).ok());
            told.send((found, sources.find_by_mac(mac(1)).is_err())).ok();
        });
        let found = done.recv_timeout(ANSWERS_IN * 3);
        go_on(&hangs);
        assert_eq!(found.unwrap(), ((Some(vec![mac(2)]), Some(Some(record(2)))), true));
        asking.join().unwrap();
    }
}

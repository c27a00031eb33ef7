//! One file for each instance: `<directory>/<uuid>.json`, mode 0600 in a directory of mode 0700, because
//! user-data holds secrets.
//!
//! The agent writes them, each by renaming a whole file into place; any number of servers read them. A
//! file that cannot be read is passed over with a warning: one damaged record must not take the metadata
//! of all other guests away. All calls block for about as long as a small file takes.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, DirBuilder, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use ec_guard::ports::mark_of;
use ec_model::{Blob, InstanceId, Intent, MacAddr, Rebuilt, Rescued, Resized, Resources};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{destroyed::DestroyedFile, spare::Spare};

/// Far more than the most user-data there can be, with its keys, and what etcd takes of records.
const FILE_MAX: u64 = 8 << 20;

/// A file that could not be read is tried again after so long.
const READ_AGAIN: Duration = Duration::from_secs(10);
/// A directory can change twice within one tick of the clock that stamps it. Until it has been quiet for
/// so long, its stamp proves nothing.
const QUIET: Duration = Duration::from_secs(1);

pub(crate) const TEMPORARY: &str = ".new-";

/// Room for one record where the disk is full: guests are paused then, and what is asked of them is noted before it is done.
const SPARE: &str = "spare-record";

/// The version written into every record of a node's own.
pub const RECORD_VERSION: u32 = 1;

/// What a guest may learn about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// See [`RECORD_VERSION`].
    pub version: u32,
    /// The instance.
    pub instance: InstanceId,
    /// Its hostname.
    pub name: String,
    /// The hardware addresses of its interfaces, the first first. A guest fails to configure its network
    /// where one is named here that it does not have.
    pub macs: Vec<MacAddr>,
    /// SHA-256 of the image it was made from, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_digest: Option<String>,
    /// The same of an image that its disk may be made from anew at this moment: both are in use then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_base_digest: Option<String>,
    /// The wish for which its disk is being made anew at this moment: what is made for an older one is not put in its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_wished_at: Option<Timestamp>,
    /// Whether that disk is whole and comes now: where it is not beside the old one any more, it is in its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub next_is_whole: bool,
    /// The same of its rescue disk, from before that is made until after it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescue_base_digest: Option<String>,
    /// The last wish for a new disk that came to its end here, and how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuilt: Option<Rebuilt>,
    /// What came of the last wish to boot from another disk, for as long as that is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescued: Option<Rescued>,
    /// The last wish for another size that came to its end here, and how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resized: Option<Resized>,
    /// Public keys in OpenSSH's form.
    #[serde(default)]
    pub keys: Vec<String>,
    /// What its user wants it to be told, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// User-data, byte for byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<Blob>,
    /// Whether every question needs a session token (IMDSv2), so that nothing which merely passes on a
    /// request inside the guest can read its metadata.
    #[serde(default)]
    pub token_required: bool,
    /// The project that it is accounted to.
    #[serde(default)]
    pub project: String,
    /// What it was given, by resource class: what its domain is defined from again should libvirt lose it.
    #[serde(default)]
    pub resources: Resources,
    /// What it was given before, until it was seen to run with what it has now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources_before: Option<Resources>,
    /// What it is being given: it may have that already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growing: Option<Resources>,
    /// What is wanted of it, as it was when it was acted upon last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intent: Option<Intent>,
    /// Whether a start was begun: from then on a guest may have written its disk.
    #[serde(default)]
    pub started: bool,
    /// When it was asked for.
    pub created_at: Timestamp,
}

/// The record files cannot be worked on.
#[derive(Debug, thiserror::Error)]
#[error("failed to {doing} {path}", path = .path.display())]
pub struct RecordFileError {
    doing: &'static str,
    path: PathBuf,
    #[source]
    pub(crate) source: io::Error,
}

/// The directory of the records. Clones share what they have learnt.
#[derive(Debug, Clone)]
pub struct RecordDir {
    directory: PathBuf,
    index: Arc<Mutex<Index>>,
    destroyed: DestroyedFile,
    spare: Spare,
}

/// Which instance has which hardware address; the records themselves stay on the disk.
#[derive(Debug, Default)]
struct Index {
    directory: Option<Stamp>,
    files: HashMap<InstanceId, (Stamp, Vec<MacAddr>)>,
    by_mac: HashMap<MacAddr, InstanceId>,
    /// When a file that could not be read is tried again, whatever is as it was.
    again: Option<Instant>,
}

/// A file or directory at one moment: another one under the same name differs in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Stamp {
    modified: (i64, i64),
    size: u64,
    inode: u64,
}

impl Stamp {
    fn of(meta: &Metadata) -> Self {
        Self { modified: (meta.mtime(), meta.mtime_nsec()), size: meta.len(), inode: meta.ino() }
    }
}

impl RecordDir {
    /// The directory for the one who writes: made where there is none, rid of what a crash left.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, RecordFileError> {
        let directory = directory.into();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(failed("create", &directory))?;
        for entry in fs::read_dir(&directory).map_err(failed("list", &directory))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                fs::remove_file(entry.path()).map_err(failed("remove", &entry.path()))?;
            }
        }
        let records = Self::reader(directory);
        records.destroyed.sweep()?;
        records.spare.keep();
        Ok(records)
    }

    /// The directory for one who only reads; it need not be there yet.
    pub fn reader(directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        let destroyed = DestroyedFile::in_directory(&directory);
        let spare = Spare::new(&directory, SPARE);
        Self { directory, index: Arc::default(), destroyed, spare }
    }

    /// Where the records lie.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    fn path(&self, instance: InstanceId) -> PathBuf {
        self.directory.join(format!("{instance}.json"))
    }

    /// Writes a record, in place of the one before. When this returns it outlives a crash.
    pub fn put(&self, record: &InstanceRecord) -> Result<(), RecordFileError> {
        let path = self.path(record.instance);
        let new = self.directory.join(format!("{TEMPORARY}{}", record.instance));
        // Strings and numbers only: serde_json cannot fail on it.
        let json = serde_json::to_vec(record).unwrap_or_default();
        let write = || {
            // Left by an attempt that failed half-way; its mode may be anything.
            if let Err(error) = fs::remove_file(&new)
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
            file.write_all(&json)?;
            file.sync_all()
        };
        self.spare.write(write)?.map_err(failed("write", &new))?;
        fs::rename(&new, &path).map_err(failed("rename", &new))?;
        // The one before made room.
        self.spare.keep();
        self.sync()
    }

    /// The record of an instance, where there is one that can be read.
    pub fn get(&self, instance: InstanceId) -> Result<Option<InstanceRecord>, RecordFileError> {
        read(&self.path(instance), instance)
    }

    /// Whether there is a record of an instance, be it readable or not.
    pub fn has(&self, instance: InstanceId) -> Result<bool, RecordFileError> {
        let path = self.path(instance);
        path.try_exists().map_err(failed("look for", &path))
    }

    /// Removes the record of an instance; none being there is fine.
    pub fn remove(&self, instance: InstanceId) -> Result<(), RecordFileError> {
        if remove(&self.path(instance))? {
            self.sync()?;
        }
        Ok(())
    }

    /// How many instances and volumes have a record.
    pub fn count(&self) -> Result<usize, RecordFileError> {
        Ok(self.files()?.len())
    }

    /// Every instance that has a record, in no order; without the record where it cannot be read.
    pub fn list(&self) -> Result<Vec<(InstanceId, Option<InstanceRecord>)>, RecordFileError> {
        self.list_but(|_| false)
    }

    /// The same, without reading the records of those that are known.
    pub fn list_but(
        &self,
        is_known: impl Fn(InstanceId) -> bool,
    ) -> Result<Vec<(InstanceId, Option<InstanceRecord>)>, RecordFileError> {
        let files = self.files()?.into_iter();
        let read = |instance, path: &Path| match is_known(instance) {
            true => None,
            false => read_if_it_can_be(path, instance).unwrap_or_default(),
        };
        Ok(files.map(|(instance, path)| (instance, read(instance, &path))).collect())
    }

    /// Notes that the instance was destroyed here as of that placement, where that is known. When this returns it outlives a
    /// crash.
    pub fn bury(&self, instance: InstanceId, epoch: Option<u64>) -> Result<(), RecordFileError> {
        self.destroyed.note(instance, epoch)
    }

    /// Takes that back: it is placed here anew.
    pub fn unbury(&self, instance: InstanceId) -> Result<(), RecordFileError> {
        self.destroyed.take_back(instance)
    }

    /// The instances that were destroyed here, each with the placement as of which. A line that a crash cut short is of a
    /// destroy that was not begun.
    pub fn buried(&self) -> Result<HashMap<InstanceId, Option<u64>>, RecordFileError> {
        let all = self.destroyed.all()?;
        Ok(all.into_iter().map(|destroyed| (destroyed.instance, destroyed.epoch)).collect())
    }

    /// The record of the instance that has this hardware address. With nothing changed since the last
    /// call this costs a look at the directory and the reading of one file.
    pub fn find_by_mac(&self, mac: MacAddr) -> Result<Option<InstanceRecord>, RecordFileError> {
        let found = {
            let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
            self.refresh(&mut index)?;
            index.by_mac.get(&mac).copied()
        };
        match found {
            Some(instance) => self.get(instance),
            None => Ok(None),
        }
    }

    /// The hardware addresses of records whose port gives this mark.
    pub(crate) fn macs_of_mark(&self, mark: u32) -> Result<Vec<MacAddr>, RecordFileError> {
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut index)?;
        Ok(index.by_mac.keys().copied().filter(|mac| mark_of(*mac) == mark).collect())
    }

    fn refresh(&self, index: &mut Index) -> Result<(), RecordFileError> {
        let meta = match fs::metadata(&self.directory) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *index = Index::default();
                return Ok(());
            }
            Err(error) => return Err(failed("look at", &self.directory)(error)),
        };
        let stamp = Stamp::of(&meta);
        if index.directory == Some(stamp) && index.again.is_none_or(|again| Instant::now() < again) {
            return Ok(());
        }
        let mut known = std::mem::take(&mut index.files);
        index.again = None;
        for (instance, path) in self.files()? {
            let Ok(stamp) = fs::metadata(&path).map(|meta| Stamp::of(&meta)) else { continue };
            let (stamp, macs) = match known.remove(&instance) {
                Some((seen, macs)) if seen == stamp => (stamp, macs),
                before => match read_if_it_can_be(&path, instance) {
                    Some(record) => (stamp, record.map(|record| record.macs).unwrap_or_default()),
                    // Its guest is told of an error, as far as its addresses are known, and no stranger.
                    None => {
                        index.again = Some(Instant::now() + READ_AGAIN);
                        (Stamp::default(), before.map(|(_, macs)| macs).unwrap_or_default())
                    }
                },
            };
            index.files.insert(instance, (stamp, macs));
        }
        index.by_mac =
            index.files.iter().flat_map(|(id, (_, macs))| macs.iter().map(|mac| (*mac, *id))).collect();
        let quiet = meta
            .modified()
            .ok()
            .and_then(|modified| SystemTime::now().duration_since(modified).ok())
            .is_some_and(|since| since > QUIET);
        index.directory = quiet.then_some(stamp);
        Ok(())
    }

    fn files(&self) -> Result<Vec<(InstanceId, PathBuf)>, RecordFileError> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("list", &self.directory)(error)),
        };
        instances(entries.map(|entry| entry.map(|entry| entry.path())))
            .map_err(failed("list", &self.directory))
    }

    fn sync(&self) -> Result<(), RecordFileError> {
        sync(&self.directory)
    }
}

/// The instances of these files. A directory that is read in part says nothing of those that are missing.
fn instances(files: impl Iterator<Item = io::Result<PathBuf>>) -> io::Result<Vec<(InstanceId, PathBuf)>> {
    let instance = |path: &Path| {
        let stem = path.file_name()?.to_str()?.strip_suffix(".json")?;
        let instance: InstanceId = stem.parse().ok()?;
        (instance.to_string() == stem).then_some(instance)
    };
    files.filter_map(|path| path.map(|path| Some((instance(&path)?, path))).transpose()).collect()
}

/// Has the names in a directory outlive a crash.
pub(crate) fn sync(directory: &Path) -> Result<(), RecordFileError> {
    File::open(directory).and_then(|opened| opened.sync_all()).map_err(failed("sync", directory))
}

/// Whether there was something to remove.
pub(crate) fn remove(path: &Path) -> Result<bool, RecordFileError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("remove", path)(error)),
    }
}

/// The record, where there is one that is not damaged; nothing at all where the file cannot be read: it takes nothing away from the others.
fn read_if_it_can_be(path: &Path, instance: InstanceId) -> Option<Option<InstanceRecord>> {
    read(path, instance)
        .inspect_err(|failed| {
            let (path, error) = (failed.path.display(), &failed.source);
            tracing::warn!(%path, %error, "passed over an instance record that cannot be read");
        })
        .ok()
}

fn read(path: &Path, instance: InstanceId) -> Result<Option<InstanceRecord>, RecordFileError> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path)(error)),
    }
    match parse(&bytes, instance) {
        Ok(record) => Ok(Some(record)),
        Err(error) => {
            tracing::warn!(path = %path.display(), error, "passed over a damaged instance record");
            Ok(None)
        }
    }
}

fn parse(bytes: &[u8], instance: InstanceId) -> Result<InstanceRecord, String> {
    if bytes.len() as u64 > FILE_MAX {
        return Err(format!("it is longer than {FILE_MAX} bytes"));
    }
    // The reader's own message would quote the file.
    let record: InstanceRecord = serde_json::from_slice(bytes)
        .map_err(|error| format!("it is not a record, at line {} column {}", error.line(), error.column()))?;
    if record.version > RECORD_VERSION {
        return Err(format!("it has version {}, this program reads up to {RECORD_VERSION}", record.version));
    }
    if record.instance != instance {
        return Err(format!("it is of instance {}", record.instance));
    }
    Ok(record)
}

pub(crate) fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RecordFileError {
    let path = path.to_owned();
    move |source| RecordFileError { doing, path, source }
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;

//! What each URL gave last, and how to ask its origin whether that still holds; and what it gave before, as long as the cache has
//! that: disks stand on it, and whoever demands its digest wants no other.
//!
//! An entry that cannot be read is as good as none: the image is fetched again.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use ec_model::input::is_sha256;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use url::Url;

use crate::{
    ImageError,
    shelf::{PRIVATE, make_directory},
};

/// Links that are signed anew each time would fill the index, one entry each.
const ENTRIES_MAX: usize = 1024;

/// The same disk packed anew each time would fill an entry: one base has then any number of digests.
const EARLIER_MAX: usize = 64;

const VERSION: u32 = 1;

pub(crate) struct Index {
    directory: PathBuf,
    tmp: PathBuf,
    /// Held while an entry is read and written anew: what another brings meanwhile from the same URL is not lost.
    writing: Mutex<()>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    version: u32,
    /// For people who look into the directory; without secrets.
    pub(crate) url: String,
    /// The base that the URL gave.
    pub(crate) digest: String,
    /// Its size as a file, in bytes.
    pub(crate) size: u64,
    pub(crate) validators: Validators,
    /// The SHA-256 of what was published, where the base was packed in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    /// The SHA-512 of what was published, where somebody demanded one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha512: Option<String>,
    /// When the origin was last asked.
    pub(crate) checked_at: Timestamp,
    /// What the URL gave before, the last of it first; each without any of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    earlier: Vec<Entry>,
}

/// What tells whether the content of a URL is still the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Validators {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_modified: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<FileStamp>,
}

/// A local file at one moment: what has another was written since, or was put in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    modified_seconds: i64,
    modified_nanoseconds: i64,
    /// Whoever writes may set the time of that back, as `rsync` and `cp -p` do, and not this one. An entry of an older release has
    /// none.
    #[serde(default)]
    changed_seconds: i64,
    #[serde(default)]
    changed_nanoseconds: i64,
    size: u64,
    inode: u64,
}

impl FileStamp {
    /// Of what the system says of it.
    pub fn of(meta: &Metadata) -> Self {
        Self {
            modified_seconds: meta.mtime(),
            modified_nanoseconds: meta.mtime_nsec(),
            changed_seconds: meta.ctime(),
            changed_nanoseconds: meta.ctime_nsec(),
            size: meta.len(),
            inode: meta.ino(),
        }
    }
}

impl Entry {
    pub(crate) fn new(url: String, digest: String, size: u64, validators: Validators) -> Self {
        let (sha256, sha512, earlier) = (None, None, Vec::new());
        let checked_at = Timestamp::now();
        Self { version: VERSION, url, digest, size, validators, sha256, sha512, checked_at, earlier }
    }

    /// The same, of bytes with these digests.
    pub(crate) fn published(mut self, sha256: String, sha512: Option<String>) -> Self {
        self.sha256 = (sha256 != self.digest).then_some(sha256);
        self.sha512 = sha512;
        self
    }

    /// Whether what was published is known to have the digests that are demanded.
    pub(crate) fn has(&self, sha256: Option<&str>, sha512: Option<&str>) -> bool {
        let published = self.sha256.as_deref().unwrap_or(&self.digest);
        sha256.is_none_or(|demanded| demanded == published)
            && sha512.is_none_or(|demanded| self.sha512.as_deref() == Some(demanded))
    }

    /// Whether it is of the file that has this stamp now.
    pub(crate) fn is_of(&self, now: FileStamp) -> bool {
        match self.validators.file {
            // Of an older release. All images at once would be read again after an upgrade, and each need room beside what the cache
            // has of it: one that did not change since it was read is the same.
            Some(was) if (was.changed_seconds, was.changed_nanoseconds) == (0, 0) => {
                let FileStamp { changed_seconds, changed_nanoseconds, .. } = now;
                let changed = i32::try_from(changed_nanoseconds)
                    .ok()
                    .and_then(|nanoseconds| Timestamp::new(changed_seconds, nanoseconds).ok());
                was == FileStamp { changed_seconds: 0, changed_nanoseconds: 0, ..now }
                    && changed.is_some_and(|changed| changed < self.checked_at)
            }
            was => was == Some(now),
        }
    }

    /// What the URL gave, the last of it first.
    pub(crate) fn given(mut self) -> Vec<Self> {
        let earlier = std::mem::take(&mut self.earlier);
        std::iter::once(self).chain(earlier).collect()
    }

    /// The same as the last that its URL gave, which gave that before.
    fn after(&self, before: Option<Self>) -> Self {
        // Of the same bytes this one may know a digest more.
        let is_other = |was: &Self| {
            (&was.digest, &was.sha256) != (&self.digest, &self.sha256)
                || was.sha512.is_some() && was.sha512 != self.sha512
        };
        let earlier = before.into_iter().flat_map(Self::given).filter(is_other).take(EARLIER_MAX).collect();
        Self { earlier, ..self.clone() }
    }
}

impl Index {
    pub(crate) fn open(directory: &Path) -> Result<Self, ImageError> {
        let writing = Mutex::default();
        let index = Self { directory: directory.join("index"), tmp: directory.join("tmp"), writing };
        make_directory(&index.directory, PRIVATE)?;
        Ok(index)
    }

    fn path(&self, url: &Url) -> PathBuf {
        self.directory.join(format!("{}.json", hex(&Sha256::digest(url.as_str().as_bytes()))))
    }

    pub(crate) fn get(&self, url: &Url) -> Option<Entry> {
        read(&self.path(url))
    }

    /// Remembers what the URL gave, beside what it gave before. A crash loses the entry or keeps the one before.
    pub(crate) fn put(&self, url: &Url, entry: &Entry) -> Result<(), ImageError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.path(url);
        self.write(&path, &entry.after(read(&path)))
    }

    fn write(&self, path: &Path, entry: &Entry) -> Result<(), ImageError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let tmp = self.tmp.join(format!("{}-{number}.json", std::process::id()));
        // Numbers and strings only: serde_json cannot fail on it.
        fs::write(&tmp, serde_json::to_vec(entry).unwrap_or_default())
            .map_err(ImageError::cache("write", &tmp))
            .and_then(|()| fs::rename(&tmp, path).map_err(ImageError::cache("rename", &tmp)))
            // Its name is used once: on a full disk one would be left each time.
            .inspect_err(|_| drop(fs::remove_file(&tmp)))
    }

    /// Drops what was of bases that are gone, and the oldest entries where there are too many.
    pub(crate) fn prune(&self, has: impl Fn(&Entry) -> bool) -> Result<(), ImageError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let list = fs::read_dir(&self.directory).map_err(ImageError::cache("list", &self.directory))?;
        let mut kept = Vec::new();
        let mut dropped = Vec::new();
        for path in list.flatten().map(|file| file.path()) {
            let Some(mut entry) = read(&path) else {
                dropped.push(path);
                continue;
            };
            let count = entry.earlier.len();
            entry.earlier.retain(&has);
            // The last stays before those, also where it is gone itself: none of them is the last.
            if entry.earlier.is_empty() && !has(&entry) {
                dropped.push(path);
                continue;
            }
            // What is gone is known by nobody, whatever an entry says.
            if entry.earlier.len() < count
                && let Err(error) = self.write(&path, &entry)
            {
                tracing::debug!(%error, path = %path.display(), "what is gone stays in the index");
            }
            kept.push((entry.checked_at, path));
        }
        kept.sort();
        let surplus = kept.len().saturating_sub(ENTRIES_MAX);
        dropped.extend(kept.drain(..surplus).map(|(_, path)| path));
        for path in dropped {
            // Two at once may prune the same entry; what matters is that it is gone.
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return Err(ImageError::cache("remove", &path)(error));
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Option<Entry> {
    let mut entry: Entry = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    // The digest becomes a file name.
    let is_good = |entry: &Entry| entry.version == VERSION && is_sha256(&entry.digest);
    entry.earlier.retain(is_good);
    is_good(&entry).then_some(entry)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_bases_that_are_gone_are_dropped_and_damaged_ones_count_as_none() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let index = Index::open(dir.path()).unwrap();
        let url = |n: usize| Url::parse(&format!("http://host/{n}")).unwrap();
        for n in 0..4 {
            let validators = Validators { etag: Some(format!("\"{n}\"")), ..Validators::default() };
            let entry = Entry::new(url(n).to_string(), n.to_string().repeat(64), 512, validators);
            index.put(&url(n), &entry).unwrap();
            assert_eq!(index.get(&url(n)), Some(entry));
        }
        fs::write(index.path(&url(1)), "{").unwrap();
        fs::write(index.path(&url(2)), r#"{"version":1,"digest":"../../etc/shadow"}"#).unwrap();
        assert_eq!(index.get(&url(1)), None);
        assert_eq!(index.get(&url(2)), None);
        index.prune(|entry| entry.digest.starts_with('3')).unwrap();
        assert_eq!(fs::read_dir(&index.directory).unwrap().count(), 1);
        assert!(index.get(&url(3)).is_some());
    }

    #[test]
    fn what_a_url_gave_before_is_known_as_long_as_its_base_is_there() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let index = Index::open(dir.path()).unwrap();
        let url = Url::parse("http://host/debian").unwrap();
        let of = |letter: &str| Entry::new(url.to_string(), letter.repeat(64), 1, Validators::default());
        let digests = || -> Vec<String> {
            let given = index.get(&url).map(Entry::given).unwrap_or_default();
            given.iter().map(|entry| entry.digest[..1].to_owned()).collect()
        };
        // As a release wrote it that knew of the last alone, and of no other time of a file.
        let old = format!(
            r#"{{"version":1,"url":"","digest":"{}","size":1,"validators":{{"file":{{"modified_seconds":1,"modified_nanoseconds":0,"size":1,"inode":1}}}},"checked_at":"2026-01-01T00:00:00Z"}}"#,
            "a".repeat(64)
        );
        fs::write(index.path(&url), old).unwrap();
        for letter in ["b", "c"] {
            index.put(&url, &of(letter)).unwrap();
        }
        assert_eq!(digests(), ["c", "b", "a"]);
        // The first again, of which a digest more is known now.
        let sha512 = Some("0".repeat(128));
        index.put(&url, &of("a").published("a".repeat(64), sha512.clone())).unwrap();
        assert_eq!(digests(), ["a", "c", "b"]);
        index.put(&url, &of("a")).unwrap();
        assert_eq!(digests(), ["a", "a", "c", "b"], "what it was known by is not forgotten");
        assert!(index.get(&url).unwrap().given()[1].has(None, sha512.as_deref()));
        index.prune(|entry| !entry.digest.starts_with('c')).unwrap();
        assert_eq!(digests(), ["a", "a", "b"]);
        index.prune(|entry| entry.digest.starts_with('b')).unwrap();
        assert_eq!(digests(), ["a", "b"], "the last is no other for being gone");
        fs::write(index.path(&url), fs::read_to_string(index.path(&url)).unwrap().replace("bbbb", "../b"))
            .unwrap();
        assert_eq!(digests(), ["a"]);
        index.prune(|_| false).unwrap();
        assert_eq!(fs::read_dir(&index.directory).unwrap().count(), 0);
        // One disk, packed anew each time.
        for number in 0..EARLIER_MAX + 3 {
            index.put(&url, &of("a").published(format!("{number:064}"), None)).unwrap();
        }
        assert_eq!(digests().len(), EARLIER_MAX + 1);
    }

    #[test]
    fn what_cannot_be_remembered_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let index = Index::open(dir.path()).unwrap();
        let url = Url::parse("http://host/disk").unwrap();
        fs::create_dir(index.path(&url)).unwrap();
        let entry = Entry::new(url.to_string(), "a".repeat(64), 1, Validators::default());
        index.put(&url, &entry).unwrap_err();
        assert_eq!(fs::read_dir(&index.tmp).unwrap().count(), 0);
    }

    #[test]
    fn who_fetch_the_same_at_once_do_not_take_each_others_entries_away() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let index = Index::open(dir.path()).unwrap();
        let url = Url::parse("http://host/same").unwrap();
        let entry = Entry::new(url.to_string(), "a".repeat(64), 1, Validators::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|_| index.put(&url, &entry).unwrap()));
            }
        });
        assert_eq!(index.get(&url), Some(entry));
        assert_eq!(fs::read_dir(&index.tmp).unwrap().count(), 0);
    }

    #[test]
    fn the_index_does_not_grow_without_bound() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let index = Index::open(dir.path()).unwrap();
        for n in 0..ENTRIES_MAX + 3 {
            let url = Url::parse(&format!("http://host/?sig={n}")).unwrap();
            index.put(&url, &Entry::new(String::new(), "a".repeat(64), 1, Validators::default())).unwrap();
        }
        index.prune(|_| true).unwrap();
        assert_eq!(fs::read_dir(&index.directory).unwrap().count(), ENTRIES_MAX);
    }
}

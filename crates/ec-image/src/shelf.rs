//! The files of the cache: bases under their digests, what is pinned, and room for what comes.
//!
//! Everything here blocks and is called from blocking threads only; the exceptions are dropping a [`Pin`] or a
//! [`Reservation`], which take the ledger's lock for a moment. That is never held over a call to the file system, which may
//! not answer: whoever changes what is there, or measures it, has `files` for it.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, Permissions},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use ec_model::{BaseImage, DiskFormat, input::is_sha256};

use crate::{
    HEADER_LEN, ImageError, inspect,
    space::{Space, space},
};

/// Room for content of unknown length is taken in steps of so many bytes, as long as there is plenty;
/// and in the smaller ones when something has to go for it.
const STEP: u64 = 64 << 20;
const SMALL_STEP: u64 = 1 << 20;

pub(crate) type InUse = Box<dyn Fn() -> HashSet<String> + Send + Sync>;

pub(crate) struct Shelf {
    base: PathBuf,
    tmp: PathBuf,
    max_bytes: u64,
    in_use: InUse,
    /// What its file system has left.
    space: fn(&Path) -> io::Result<Space>,
    /// Held through a whole eviction, so that there is one at a time.
    evicting: Mutex<()>,
    /// Held while a base gets its place or is taken from it, and while they are measured: a download is either among them then, or
    /// still has its reservation. Taken before the ledger, and never while the caller is asked or a big file removed.
    files: Mutex<()>,
    ledger: Mutex<Ledger>,
    /// Locked as long as this lives: another cache on the same directory would know nothing of these pins.
    _lock: File,
}

#[derive(Default)]
struct Ledger {
    pins: HashMap<String, usize>,
    /// While an eviction runs: every base that was pinned at any moment since it began. The caller's
    /// answer about overlays may be older than an overlay whose base was pinned meanwhile.
    touched: Option<HashSet<String>>,
    /// The base that an eviction is taking away at this moment: nobody finds it any more.
    leaving: Option<String>,
    /// Bytes of the cache promised to downloads under way.
    reserved: u64,
    /// Bytes of the disk that they may write before they look again.
    to_write: u64,
    temporary: u64,
}

/// A base in the cache that cannot be evicted while this lives.
#[derive(Clone)]
pub(crate) struct Landed {
    pub(crate) base: BaseImage,
    pub(crate) pin: Arc<Pin>,
}

impl Shelf {
    /// Makes the directories and removes what a crash left behind.
    pub(crate) fn open(directory: &Path, max_bytes: u64, in_use: InUse) -> Result<Self, ImageError> {
        let (base, tmp) = (directory.join("base"), directory.join("tmp"));
        if !directory.is_dir() {
            make_directory(directory, PASSABLE)?;
        }
        let lock = lock(directory)?;
        make_directory(&base, PASSABLE)?;
        make_directory(&tmp, PRIVATE)?;
        for entry in fs::read_dir(&tmp).map_err(ImageError::cache("list", &tmp))?.flatten() {
            let path = entry.path();
            fs::remove_file(&path).map_err(ImageError::cache("remove", &path))?;
        }
        let (evicting, files, ledger) = Default::default();
        Ok(Self { base, tmp, max_bytes, in_use, space, evicting, files, ledger, _lock: lock })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // The ledger is whole between any two of its changes, so a panic elsewhere does not spoil it.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn files(&self) -> MutexGuard<'_, ()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, digest: &str, format: DiskFormat) -> PathBuf {
        self.base.join(format!("{digest}.{}", format.name()))
    }

    /// The base with this digest, where the cache has it whole; pinned and marked as used now.
    pub(crate) fn find(self: &Arc<Self>, digest: &str) -> Option<Landed> {
        // Before the look: what is pinned stays, if it is there.
        let pin = self.pin(digest)?;
        let (path, format) = [DiskFormat::Qcow2, DiskFormat::Raw]
            .map(|format| (self.path(digest, format), format))
            .into_iter()
            .find(|(path, _)| path.is_file())?;
        let virtual_size = match virtual_size(&path, format) {
            Ok(size) => size,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a base image in the cache is damaged");
                return None;
            }
        };
        touch(&path);
        Some(Landed { base: BaseImage { path, format, virtual_size, digest: digest.to_owned() }, pin })
    }

    /// Whether the base with this digest is there and has this size.
    pub(crate) fn has(&self, digest: &str, size: u64) -> bool {
        [DiskFormat::Qcow2, DiskFormat::Raw].into_iter().any(|format| {
            fs::metadata(self.path(digest, format)).is_ok_and(|meta| meta.is_file() && meta.len() == size)
        })
    }

    /// Keeps what is under this digest from being evicted, unless that is under way.
    fn pin(self: &Arc<Self>, digest: &str) -> Option<Arc<Pin>> {
        let mut ledger = self.ledger();
        if ledger.leaving.as_deref() == Some(digest) {
            return None;
        }
        *ledger.pins.entry(digest.to_owned()).or_default() += 1;
        if let Some(touched) = &mut ledger.touched {
            touched.insert(digest.to_owned());
        }
        Some(Arc::new(Pin { shelf: Arc::clone(self), digest: digest.to_owned() }))
    }

    /// Whether nobody can find or pin it any more from now on, because nobody has since the eviction began.
    fn leaves(&self, digest: &str) -> bool {
        let mut ledger = self.ledger();
        if ledger.touched.as_ref().is_some_and(|touched| touched.contains(digest)) {
            return false;
        }
        ledger.leaving = Some(digest.to_owned());
        true
    }

    /// A number that no other file of this process in `tmp` has.
    fn number(&self) -> u64 {
        let mut ledger = self.ledger();
        ledger.temporary += 1;
        ledger.temporary
    }

    /// A new file to write to, which is removed when it is dropped.
    pub(crate) fn temporary(&self) -> Result<Temporary, ImageError> {
        let path = self.tmp.join(format!("{}-{}.part", std::process::id(), self.number()));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(ImageError::cache("create", &path))?;
        Ok(Temporary { file, path, placed: false })
    }

    /// Gives a whole and checked file its place.
    pub(crate) fn place(
        self: &Arc<Self>,
        mut temporary: Temporary,
        base: BaseImage,
    ) -> Result<Landed, ImageError> {
        let failed = |doing| ImageError::cache(doing, &temporary.path);
        let size = temporary.file.metadata().map_err(failed("look at"))?.len();
        temporary.file.set_permissions(Permissions::from_mode(0o444)).map_err(failed("protect"))?;
        temporary.file.sync_all().map_err(failed("sync"))?;

        let path = self.path(&base.digest, base.format);
        let pin = {
            let _files = self.files();
            // None is leaving: whoever evicts has the files.
            let pin = self.pin(&base.digest).ok_or(ImageError::Interrupted)?;
            // What is there already has the same content, and overlays may lie on it: it stays. One of
            // another size, or that `find` would refuse, is a damaged one; it is put right under a new inode.
            let is_there = fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == size);
            if !is_there || virtual_size(&path, base.format).is_err() {
                fs::rename(&temporary.path, &path).map_err(failed("rename"))?;
                temporary.placed = true;
            }
            pin
        };
        File::open(&self.base)
            .and_then(|dir| dir.sync_all())
            .map_err(ImageError::cache("sync", &self.base))?;
        touch(&path);
        Ok(Landed { base: BaseImage { path, ..base }, pin })
    }

    /// A promise of room that has no bytes yet.
    pub(crate) fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { shelf: Arc::clone(self), bytes: 0, to_write: 0 }
    }

    fn space(&self) -> Result<Space, ImageError> {
        (self.space)(&self.tmp).map_err(ImageError::cache("measure the file system of", &self.tmp))
    }

    /// Whether there is room for that beside these bases and what is promised.
    fn admit(&self, ledger: &Ledger, need: Need, bases: u64, space: Space) -> Result<(), ImageError> {
        match need {
            Need::Cache(wanted) => {
                let (held, max_bytes) = (bases.saturating_add(ledger.reserved), self.max_bytes);
                if held.saturating_add(wanted) > max_bytes {
                    return Err(ImageError::CacheFull { wanted, held, max_bytes });
                }
                Ok(())
            }
            Need::Disk(more) => {
                let full = |source| ImageError::DiskFull { path: self.tmp.clone(), source: Arc::new(source) };
                space.admit(ledger.to_write.saturating_add(more)).map_err(full)
            }
        }
    }

    fn bases(&self) -> Result<Vec<Base>, ImageError> {
        let entries = fs::read_dir(&self.base).map_err(ImageError::cache("list", &self.base))?;
        Ok(entries
            .flatten()
            .filter_map(|entry| {
                let meta = entry.metadata().ok().filter(fs::Metadata::is_file)?;
                let path = entry.path();
                let digest = path.file_stem()?.to_str().filter(|stem| is_sha256(stem))?.to_owned();
                let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                Some(Base { digest, path, size: meta.len(), on_disk: meta.blocks() * 512, used })
            })
            .collect())
    }

    /// Removes what was used longest ago until there is room for that.
    fn evict(&self, need: Need) -> Result<(), ImageError> {
        let _one_at_a_time = self.evicting.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut ledger = self.ledger();
            ledger.touched = Some(ledger.pins.keys().cloned().collect());
        }
        let in_use = (self.in_use)();
        let files = self.files();
        let (mut bases, mut space) = (self.bases()?, self.space()?);
        bases.sort_by_key(|base| base.used);

        let mut total = bases.iter().map(|base| base.size).sum::<u64>();
        let (mut doomed, mut failed) = (Vec::new(), None);
        for base in bases {
            if self.admit(&self.ledger(), need, total, space).is_ok() {
                break;
            }
            if in_use.contains(&base.digest) || !self.leaves(&base.digest) {
                continue;
            }
            // Out of everyone's sight at once; giving its blocks back can take longer.
            let away = self.tmp.join(format!("{}-{}.evicted", std::process::id(), self.number()));
            let moved = fs::rename(&base.path, &away);
            self.ledger().leaving = None;
            match moved {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    // What is out of sight already is counted by nobody any more, and has to go all the same.
                    failed = Some(ImageError::cache("evict", &base.path)(error));
                    break;
                }
            }
            tracing::info!(digest = base.digest, bytes = base.size, "evicted a base image");
            total -= base.size;
            space.free += base.on_disk;
            doomed.push(away);
        }
        self.ledger().touched = None;
        drop(files);
        for path in doomed {
            if let Err(error) = fs::remove_file(&path) {
                failed.get_or_insert(ImageError::cache("remove", &path)(error));
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        self.admit(&self.ledger(), need, total, space)
    }
}

/// What room is wanted for: the whole of an image in the cache, or what comes next of it on a file system that guests write to, too. How
/// much of an image is written nobody knows before: what of it is empty is left out.
#[derive(Clone, Copy)]
enum Need {
    Cache(u64),
    Disk(u64),
}

struct Base {
    digest: String,
    path: PathBuf,
    size: u64,
    /// What of it takes room.
    on_disk: u64,
    used: SystemTime,
}

/// Keeps a base from being evicted.
pub(crate) struct Pin {
    shelf: Arc<Shelf>,
    digest: String,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut ledger = self.shelf.ledger();
        if let Some(count) = ledger.pins.get_mut(&self.digest) {
            *count -= 1;
            if *count == 0 {
                ledger.pins.remove(&self.digest);
            }
        }
    }
}

/// Room in the cache, promised to a download until this is dropped.
pub(crate) struct Reservation {
    shelf: Arc<Shelf>,
    bytes: u64,
    to_write: u64,
}

impl Reservation {
    /// Makes sure that `total` bytes of the cache are promised, `exactly` or with some to spare for what follows.
    pub(crate) fn cover(&mut self, total: u64, exactly: bool) -> Result<(), ImageError> {
        if total <= self.bytes {
            return Ok(());
        }
        let max_bytes = self.shelf.max_bytes;
        if total > max_bytes {
            return Err(ImageError::TooBig { size: total, max_bytes });
        }
        let least = total - self.bytes;
        let spare = |step: u64| if exactly { least } else { (least + step).min(max_bytes - self.bytes) };
        self.find([spare(STEP), spare(SMALL_STEP), least], Need::Cache)
    }

    /// Makes sure that so many bytes, which were promised, may be written. Looks at the disk again after each step of what really is:
    /// guests write meanwhile.
    pub(crate) fn write(&mut self, bytes: u64) -> Result<(), ImageError> {
        if bytes <= self.to_write {
            return Ok(());
        }
        let least = bytes - self.to_write;
        self.find([STEP.max(least), SMALL_STEP.max(least), least], Need::Disk)
    }

    /// So many bytes have been written, and are no longer free.
    pub(crate) fn wrote(&mut self, bytes: u64) {
        self.shelf.ledger().to_write -= bytes;
        self.to_write -= bytes;
    }

    /// Takes as much of these as there is room for, the most first; what is in the way of the others goes.
    fn find(&mut self, [plenty, some, least]: [u64; 3], need: fn(u64) -> Need) -> Result<(), ImageError> {
        if self.take(need(plenty))? || self.take(need(some))? || self.take(need(least))? {
            return Ok(());
        }
        match self.shelf.evict(need(some)) {
            Ok(()) if self.take(need(some))? => return Ok(()),
            Ok(()) | Err(ImageError::CacheFull { .. } | ImageError::DiskFull { .. }) => {}
            Err(error) => return Err(error),
        }
        if self.take(need(least))? {
            return Ok(());
        }
        self.shelf.evict(need(least))?;
        // Another download, or a guest, may have been quicker to take what was evicted.
        self.try_take(need(least))
    }

    /// Whether there was room for so much more.
    fn take(&mut self, need: Need) -> Result<bool, ImageError> {
        match self.try_take(need) {
            Err(ImageError::CacheFull { .. } | ImageError::DiskFull { .. }) => Ok(false),
            taken => taken.map(|()| true),
        }
    }

    fn try_take(&mut self, need: Need) -> Result<(), ImageError> {
        let _files = self.shelf.files();
        let bases = match need {
            Need::Cache(_) => self.shelf.bases()?.iter().map(|base| base.size).sum(),
            // What is written is held against the disk alone, and often.
            Need::Disk(_) => 0,
        };
        let space = self.shelf.space()?;
        let mut ledger = self.shelf.ledger();
        self.shelf.admit(&ledger, need, bases, space)?;
        match need {
            Need::Cache(more) => {
                ledger.reserved += more;
                self.bytes += more;
            }
            Need::Disk(more) => {
                ledger.to_write += more;
                self.to_write += more;
            }
        }
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut ledger = self.shelf.ledger();
        ledger.reserved -= self.bytes;
        ledger.to_write -= self.to_write;
    }
}

/// A file of a download under way; removed on drop unless it got its place.
pub(crate) struct Temporary {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    placed: bool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.placed
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "failed to remove a temporary file");
        }
    }
}

/// QEMU runs as another user and must be able to reach the bases, whatever the umask is. It knows their names,
/// which are digests; nobody else needs to learn them.
pub(crate) const PASSABLE: u32 = 0o711;
/// Nobody but this program has business there.
pub(crate) const PRIVATE: u32 = 0o700;

pub(crate) fn make_directory(path: &Path, mode: u32) -> Result<(), ImageError> {
    fs::create_dir_all(path).map_err(ImageError::cache("create", path))?;
    fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(ImageError::cache("set the mode of", path))
}

fn lock(directory: &Path) -> Result<File, ImageError> {
    let path = directory.join("lock");
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(ImageError::cache("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(ImageError::InUse { directory: directory.to_owned() }),
        Err(fs::TryLockError::Error(error)) => Err(ImageError::cache("lock", &path)(error)),
    }
}

/// Only the order of evictions hangs on it, so a failure is no reason to fail.
fn touch(path: &Path) {
    if let Err(error) = File::open(path).and_then(|file| file.set_modified(SystemTime::now())) {
        tracing::debug!(path = %path.display(), %error, "failed to mark a base image as used");
    }
}

fn virtual_size(path: &Path, format: DiskFormat) -> Result<u64, String> {
    let text = |error: io::Error| error.to_string();
    let file = File::open(path).map_err(text)?;
    let size = file.metadata().map_err(text)?.len();
    let mut header = Vec::new();
    file.take(HEADER_LEN as u64).read_to_end(&mut header).map_err(text)?;
    let inspected = inspect(&header, Some(size)).map_err(|refusal| refusal.to_string())?;
    if inspected.format != format {
        return Err(format!("it is {}, its name says {}", inspected.format.name(), format.name()));
    }
    Ok(inspected.virtual_size.unwrap_or(size))
}

#[cfg(test)]
#[path = "shelf_tests.rs"]
mod tests;

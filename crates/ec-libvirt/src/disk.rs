//! The pool of disks: what lies there, and what that says.

mod changes;
mod defined;
mod image;
mod layers;
mod names;

use std::{
    collections::HashMap,
    fs::{File, metadata},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::{Duration, SystemTime},
};

use ec_hypervisor::FirstDirectory;
use ec_model::InstanceId;
use tokio::time::Instant;

pub(crate) use image::{is_locked, is_written, keep_from_writing};
pub(crate) use names::{moved_name, volume_name};

use crate::{
    error::CallError,
    lane::locked,
    xml::{self, DiskFile},
};
use image::capacity_in;
use names::{copy, copy_name, moved, name_of, part, part_name, rescue_name, successor_name};

/// The pool by its name in libvirt and its directory on this host.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    name: String,
    pub(crate) path: PathBuf,
    /// Files came or went, and libvirt has not heard of them: what an agent before this one could not tell it nobody knows.
    is_stale: Arc<AtomicBool>,
    /// The directory that was made ready.
    first: Arc<FirstDirectory>,
    /// When parts of copies that broke off were first found, for which guests may stand still.
    found: Arc<Mutex<HashMap<PathBuf, Instant>>>,
}

/// What lies in a pool.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// Whose disks.
    pub(crate) volumes: Vec<InstanceId>,
    /// For whom there is a disk that is to replace theirs, or a part of a copy.
    pub(crate) successors: Vec<InstanceId>,
    /// Of which disks a snapshot has copies beside its first.
    pub(crate) copies: HashMap<InstanceId, Vec<InstanceId>>,
    /// The volumes without a disk that another node has handed over.
    pub(crate) handed_over: Vec<InstanceId>,
}

/// With less than this many bytes left a guest that goes on would soon be paused again.
const ROOM_TO_GO_ON: u64 = 64 << 20;

/// Copies leave no more than this many bytes free.
const KEPT_MOST: u64 = 1 << 30;

/// What a guest's disk is called in its domain.
pub(crate) const DISK: &str = "vda";

impl Pool {
    pub(crate) fn new(name: &str, path: &Path) -> Self {
        let is_stale = Arc::new(AtomicBool::new(true));
        let (name, path) = (name.to_owned(), path.to_owned());
        Self { name, path, is_stale, first: Arc::default(), found: Arc::default() }
    }

    /// Makes the directory, the first time; from then on it is missed where it is gone, and no other one is taken for it.
    pub(crate) fn make_ready(&self, make: impl FnOnce() -> Result<(), CallError>) -> Result<(), CallError> {
        if !self.first.is_known() {
            make()?;
            self.first.remember(&self.path).map_err(|error| self.missing(&error))?;
        }
        self.there()
    }

    /// An error where the directory is not there that disks are looked for in: of what lies on a file system that is not mounted
    /// nothing is known, least of all that it is gone.
    pub(crate) fn there(&self) -> Result<(), CallError> {
        match self.first.another(&self.path).map_err(|error| self.missing(&error))? {
            Some(why) => Err(CallError::NotNow(why)),
            None => Ok(()),
        }
    }

    fn missing(&self, error: &io::Error) -> CallError {
        CallError::NotNow(format!("could not look into {}, where disks are: {error}", self.path.display()))
    }

    /// Whether a file of the pool is there. Why that cannot be told the directory knows first: what fails of all that lies in it is of no
    /// disk.
    fn has(&self, path: &Path) -> Result<bool, CallError> {
        match is_there(path) {
            Ok(true) => Ok(true),
            other => self.there().and(other),
        }
    }

    /// Where the instance's overlay lies.
    pub(crate) fn volume_path(&self, instance: InstanceId) -> PathBuf {
        self.path.join(volume_name(instance))
    }

    /// Where its rescue disk lies.
    pub(crate) fn rescue_path(&self, instance: InstanceId) -> PathBuf {
        self.path.join(rescue_name(instance))
    }

    /// Where the disk lies that is to replace its own.
    pub(crate) fn successor_path(&self, instance: InstanceId) -> PathBuf {
        self.path.join(successor_name(instance))
    }

    /// Whose disk a file is, by its place and name.
    pub(crate) fn owner(&self, file: &str) -> Option<InstanceId> {
        let name = Path::new(file).strip_prefix(&self.path).ok()?.to_str()?;
        names::volume(name)
    }

    /// Whether a file lies in the pool and begins with the instance's name.
    pub(crate) fn is_named_by(&self, file: &Path, instance: InstanceId) -> bool {
        file.parent() == Some(&self.path) && name_of(file).starts_with(&format!("{instance}."))
    }

    /// What a domain has as disks by one of its documents.
    pub(crate) fn disks_of(&self, document: &str) -> Result<Vec<DiskFile>, CallError> {
        let place = |pool: &str, volume: &str| match pool == self.name {
            true => self.path.join(volume).display().to_string(),
            false => format!("{pool}/{volume}"),
        };
        xml::disk_files(document, place).map_err(CallError::Refused)
    }

    /// Whether the instance's volume is there. Asks the directory, not libvirt: it is what libvirt would
    /// find after a refresh, at none of the cost, and shows half-made files that libvirt does not know.
    /// A directory that cannot be looked into says nothing, least of all that the disk is gone.
    pub(crate) fn has_volume(&self, instance: InstanceId) -> Result<bool, CallError> {
        self.has(&self.volume_path(instance))
    }

    /// Whether the file system below the disks has room for a guest to go on.
    pub(crate) fn has_room(&self) -> bool {
        nix::sys::statvfs::statvfs(&self.path)
            .is_ok_and(|stat| stat.blocks_available() * stat.fragment_size() >= ROOM_TO_GO_ON)
    }

    /// So many bytes a copy may take: what is free of the file system but for a twentieth of that, or 1 GiB, whichever is less, to which
    /// guests' disks may grow. Without that all guests of the host would stand still, first of all the one that is copied.
    pub(crate) fn room_for_copies(&self) -> Result<u64, CallError> {
        let stat = nix::sys::statvfs::statvfs(&self.path)
            .map_err(|error| CallError::io("measure the file system of", &self.path, &error.into()))?;
        let kept = (stat.blocks() * stat.fragment_size() / 20).min(KEPT_MOST);
        Ok((stat.blocks_available() * stat.fragment_size()).saturating_sub(kept))
    }

    /// The capacity of the instance's volume in bytes; nothing where there is none. Its file tells, since libvirt hears of one that
    /// came by another's hand only when it makes no other disk, which may take it hours.
    pub(crate) fn capacity(&self, instance: InstanceId) -> Result<Option<u64>, CallError> {
        self.capacity_at(&self.volume_path(instance))
    }

    /// The same of a disk in the pool by its path.
    pub(crate) fn capacity_at(&self, path: &Path) -> Result<Option<u64>, CallError> {
        match capacity_in(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => self.has(path).map(|_| None),
            Err(error) => Err(CallError::io("measure", path, &error)),
            Ok(capacity) => Ok(Some(capacity)),
        }
    }

    /// Whether there is a disk that is to replace the instance's own, or what was begun of a copy for it; and the disks of which a
    /// snapshot has copies beside its first.
    pub(crate) fn beside(&self, instance: InstanceId) -> Result<(bool, Vec<InstanceId>), CallError> {
        let files = self.files_of(instance)?;
        let copies: Vec<_> = files.iter().filter_map(|file| Some(copy(name_of(file))?.1)).collect();
        let begun = self.has(&self.successor_path(instance))?
            || files.iter().any(|file| part(name_of(file)).is_some());
        Ok((begun || (!self.has_volume(instance)? && !copies.is_empty()), copies))
    }

    /// Whether there is one that can be put in its disk's place.
    pub(crate) fn has_whole_successor(&self, instance: InstanceId) -> Result<bool, CallError> {
        self.has(&self.successor_path(instance))
    }

    /// What lies in it, by names alone.
    pub(crate) fn contents(&self) -> Result<Contents, CallError> {
        let failed = |error| CallError::io("list the pool's directory", &self.path, &error);
        self.there()?;
        let entries = std::fs::read_dir(&self.path).map_err(|error| self.missing(&error))?;
        let Contents { mut volumes, mut successors, mut copies, mut handed_over } = Contents::default();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            // Nor is it looked where a link leads: that may not be mounted. Who looks for one alone is told, and the others are seen.
            volumes.extend(names::volume(name));
            handed_over.extend(moved(name));
            successors.extend(names::successor(name).or_else(|| Some(part(name)?.0)));
            if let Some((snapshot, disk)) = copy(name) {
                copies.entry(snapshot).or_default().push(disk);
            }
        }
        // Of what was put in its place but for the first, and so is not whole.
        successors.extend(
            copies.extract_if(|snapshot, _| !volumes.contains(snapshot)).map(|(snapshot, _)| snapshot),
        );
        handed_over.retain(|volume| !volumes.contains(volume));
        Ok(Contents { volumes, successors, copies, handed_over })
    }

    /// An error where a domain on the volume would write below a snapshot, which would ruin what that holds. Not asked where a domain
    /// has the volume: what a `virsh blockcommit` brought back leaves its file behind, which is no snapshot any more. What helps depends on
    /// whether it is that, which times tell as far as no clock was set in between.
    pub(crate) fn refuse_snapshots(&self, instance: InstanceId) -> Result<(), CallError> {
        self.refuse_handed_over(instance)?;
        let volume = self.volume_path(instance);
        let Some((last, last_written)) = self.last_layer(instance)? else { return Ok(()) };
        let (layer, place) = (last.display(), volume.display());
        let left_behind = "if it was left behind when a snapshot was brought back (`virsh blockcommit`), remove it and never commit it, \
             since it holds what the guest has written over";
        // Clocks are set, and only people know whether it was brought back: nothing but an age in its favour tells of a commit at all.
        Err(CallError::Refused(if is_after(written(&volume)?, Some(last_written)) {
            format!(
                "{layer} stands on {place}, which was written after it by this host's clock: {left_behind}; \
                 otherwise define the domain by hand"
            )
        } else {
            format!(
                "{layer} stands on {place}, and was written last by this host's clock: {left_behind}; otherwise bring it back there \
                 (`qemu-img commit -b {place} {layer}`) and remove it then, or define the domain by hand"
            )
        }))
    }

    /// The same of what a domain has, which is not up: made while it was up from another disk, a snapshot is in no definition that is
    /// kept. What a `virsh blockcommit` left behind was closed when that brought the last of it back.
    pub(crate) fn refuse_newer_snapshots(&self, instance: InstanceId) -> Result<(), CallError> {
        let Some((_, last_written)) = self.last_layer(instance)? else { return Ok(()) };
        if is_after(Some(last_written), written(&self.volume_path(instance))?) {
            self.refuse_snapshots(instance)
        } else {
            Ok(())
        }
    }

    /// What was written last of what stands on the instance's disk, and when.
    fn last_layer(&self, instance: InstanceId) -> Result<Option<(PathBuf, SystemTime)>, CallError> {
        let unreadable = |file: &Path, error: io::Error| Err(CallError::io("look into", file, &error));
        let mut last = None;
        for layer in self.layers_of(instance, &[self.volume_path(instance)], unreadable)? {
            let at = written(&layer)?.map(|at| (layer, at));
            last = last.into_iter().chain(at).max_by_key(|(_, at)| *at);
        }
        Ok(last)
    }

    /// An error where another node has handed over what is not in its place.
    pub(crate) fn refuse_handed_over(&self, volume: InstanceId) -> Result<(), CallError> {
        self.handed_over(volume)?.first().map_or(Ok(()), |come| Err(second_disk(come)))
    }

    /// Whether what a file does not hold itself is read from the instance's disk, be it by way of others.
    pub(crate) fn is_layer_on(&self, file: &Path, instance: InstanceId) -> Result<bool, CallError> {
        let depth = layers::depth_on(file, &[self.volume_path(instance)]);
        Ok(depth.map_err(|error| CallError::io("look into", file, &error))?.is_some())
    }

    /// What lies beside the instance's disk under its name, is called as nothing of ours and stands on one of `below`: each before
    /// what it stands on.
    fn layers_of(
        &self,
        instance: InstanceId,
        below: &[PathBuf],
        unreadable: impl Fn(&Path, io::Error) -> Result<(), CallError>,
    ) -> Result<Vec<PathBuf>, CallError> {
        let mut layers = Vec::new();
        for file in self.files_of(instance)? {
            // Of a link that leads nowhere nobody knows what it stands on.
            if names::is_ours(name_of(&file)) || !is_there(&file)? {
                continue;
            }
            match layers::depth_on(&file, below) {
                Ok(depth) => layers.extend(depth.map(|depth| (depth, file))),
                Err(error) => unreadable(&file, error)?,
            }
        }
        layers.sort_by_key(|(depth, _)| std::cmp::Reverse(*depth));
        Ok(layers.into_iter().map(|(_, file)| file).collect())
    }

    /// Where a copy for the volume lies until it is whole, which is made of a disk that this domain has; of several that are
    /// copied at once, but for the first, with the disk in its name.
    pub(crate) fn part_path(
        &self,
        volume: InstanceId,
        from: InstanceId,
        disk: Option<InstanceId>,
    ) -> PathBuf {
        self.path.join(part_name(volume, from, disk))
    }

    /// Where a snapshot's copy of this disk lies, but for its first.
    pub(crate) fn copy_path(&self, snapshot: InstanceId, disk: InstanceId) -> PathBuf {
        self.path.join(copy_name(snapshot, disk))
    }

    /// What was begun of copies for the volume, and of whose disks.
    pub(crate) fn parts_of(&self, volume: InstanceId) -> Result<Vec<(PathBuf, InstanceId)>, CallError> {
        let from = |path: &Path| Some(part(name_of(path))?.1);
        let files = self.files_of(volume)?.into_iter();
        Ok(files.filter_map(|path| from(&path).map(|from| (path, from))).collect())
    }

    /// Where the volume's disk lies that another node has handed over.
    pub(crate) fn handed_over(&self, volume: InstanceId) -> Result<Vec<PathBuf>, CallError> {
        let mut files = self.files_of(volume)?;
        files.retain(|file| moved(name_of(file)).is_some());
        Ok(files)
    }

    fn copies_of(&self, snapshot: InstanceId) -> Result<Vec<PathBuf>, CallError> {
        let mut files = self.files_of(snapshot)?;
        files.retain(|file| copy(name_of(file)).is_some());
        Ok(files)
    }

    /// How long ago this agent found what was begun of a copy, of which nothing else is known: when it was written the clock of another
    /// host tells, where that has the disks, and that of this one may have been set since.
    pub(crate) fn found_for(&self, part: &Path) -> Duration {
        locked(&self.found).entry(part.to_owned()).or_insert_with(Instant::now).elapsed()
    }

    /// As long as the file is open, no guest is started that writes this disk; nothing where there is none.
    pub(crate) fn keep_from_writing(&self, instance: InstanceId) -> Result<Option<File>, CallError> {
        let path = self.volume_path(instance);
        match keep_from_writing(&path) {
            Ok(kept) => Ok(Some(kept)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            // Never that somebody writes it: these locks and QEMU's do not exclude each other.
            Err(error) => Err(CallError::io("keep guests from writing", &path, &error)),
        }
    }

    /// Every file that begins with the instance's name: what is ours, what an external snapshot put beside it, and what somebody else did.
    fn files_of(&self, instance: InstanceId) -> Result<Vec<PathBuf>, CallError> {
        let failed = |error| CallError::io("list the pool's directory", &self.path, &error);
        self.there()?;
        let entries = std::fs::read_dir(&self.path).map_err(|error| self.missing(&error))?;
        let mut found = Vec::new();
        for entry in entries {
            found.push(entry.map_err(failed)?.path());
        }
        found.retain(|path| self.is_named_by(path, instance));
        Ok(found)
    }
}

/// Whether what a disk does not hold itself is read from another file. Its head tells: what libvirt knows may be of one that had its
/// name before.
pub(crate) fn stands_on_another(disk: &File, path: &Path) -> Result<bool, CallError> {
    image::stands_on_another(disk).map_err(|error| CallError::io("look into", path, &error))
}

/// Whether there is a disk. Of a link that leads nowhere nobody knows.
fn is_there(path: &Path) -> Result<bool, CallError> {
    match path.try_exists() {
        Ok(false) if path.is_symlink() => Err(leads_nowhere(path)),
        there => there.map_err(|error| CallError::io("look for the disk", path, &error)),
    }
}

/// What to say of a link to a file system that is not mounted, which looks like one whose disk is gone.
fn leads_nowhere(link: &Path) -> CallError {
    let link = link.display();
    CallError::NotNow(format!("{link} leads to what is not there: mount it, or remove the link"))
}

/// What to say of a disk that another node handed over to where one lies. Neither is given up for that: people can tell which it is.
pub(crate) fn second_disk(come: &Path) -> CallError {
    let come = come.display();
    CallError::NotNow(format!("{come} was handed over by another node, and another disk lies in its place"))
}

/// Has the names in a directory outlive a power cut.
pub(crate) fn keep_names(directory: &Path) -> Result<(), CallError> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| CallError::io("write", directory, &error))
}

/// What was brought back and what is left of it are written last at nearly the same time.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);

/// When a file was written last; nothing of one that is not there.
fn written(path: &Path) -> Result<Option<SystemTime>, CallError> {
    match metadata(path).and_then(|found| found.modified()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        written => {
            written.map(Some).map_err(|error| CallError::io("look when it was written, at", path, &error))
        }
    }
}

/// Whether a file was written after another beyond doubt, as far as the clock was right.
fn is_after(one: Option<SystemTime>, other: Option<SystemTime>) -> bool {
    let since = one.zip(other).and_then(|(one, other)| one.duration_since(other).ok());
    since.is_some_and(|since| since > CLOSED_WITHIN)
}

/// The first directory above `path` that others than its owner's group may not pass.
pub(crate) fn impassable_ancestor(path: &Path) -> Option<&Path> {
    use std::os::unix::fs::PermissionsExt;
    path.ancestors().skip(1).filter(|ancestor| !ancestor.as_os_str().is_empty()).find(|ancestor| {
        std::fs::metadata(ancestor).is_ok_and(|metadata| metadata.permissions().mode() & 0o001 == 0)
    })
}

#[cfg(test)]
mod tests;

//! Overlays in the pool.

mod image;
mod layers;
mod names;

use std::{
    collections::HashMap,
    fs::{File, metadata},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use ec_hypervisor::FirstDirectory;
use ec_model::{BaseImage, InstanceId};
use nix::sys::statvfs::FsFlags;
use tokio::time::Instant;
use virt::{
    connect::Connect, domain::Domain, error::ErrorNumber, storage_pool::StoragePool, storage_vol::StorageVol,
    sys,
};

pub(crate) use image::{is_locked, is_written, keep_from_writing};
pub(crate) use names::{moved_name, volume_name};

use crate::{
    error::{CallError, absent, has_code, is_connection_error, said},
    lane::locked,
    xml::{self, DiskFile, VolumeXml},
};
use image::{capacity_in, holds_data_alone};
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

/// What a disk takes before anything is written on it, generously.
const ROOM_FOR_A_DISK: u64 = 1 << 20;

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

    /// Whether a file of the pool is there.
    fn has(&self, path: &Path) -> Result<bool, CallError> {
        if is_there(path)? {
            return Ok(true);
        }
        self.there().map(|()| false)
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
    /// has the volume: what a `virsh blockcommit` brought back leaves its file behind, which is no snapshot any more.
    pub(crate) fn refuse_snapshots(&self, instance: InstanceId) -> Result<(), CallError> {
        self.refuse_handed_over(instance)?;
        let volume = self.volume_path(instance);
        let Some(last) = self.last_layer(instance)? else { return Ok(()) };
        let (layer, place) = (last.display(), volume.display());
        // What was left behind may hold older words for what the guest wrote anew since.
        Err(CallError::Refused(if written(&volume) > written(&last) {
            format!(
                "{layer} stands on {place}, which was written after it: if it was left behind when a snapshot was brought back \
                 (`virsh blockcommit`), remove it; otherwise define the domain by hand"
            )
        } else {
            format!(
                "{layer} holds what the guest wrote last, and {place} is only its backing file: bring it back there \
                 (`qemu-img commit -b {place} {layer}`) and remove {layer}, or define the domain by hand"
            )
        }))
    }

    /// The same of what a domain has, which is not up: made while it was up from another disk, a snapshot is in no definition that is
    /// kept. What a `virsh blockcommit` left behind was closed when that brought the last of it back.
    pub(crate) fn refuse_newer_snapshots(&self, instance: InstanceId) -> Result<(), CallError> {
        let place = written(&self.volume_path(instance));
        let last = self.last_layer(instance)?.and_then(|last| written(&last));
        let since = last.zip(place).and_then(|(last, place)| last.duration_since(place).ok());
        if since.is_some_and(|since| since > CLOSED_WITHIN) {
            self.refuse_snapshots(instance)
        } else {
            Ok(())
        }
    }

    /// What was written last of what stands on the instance's disk.
    fn last_layer(&self, instance: InstanceId) -> Result<Option<PathBuf>, CallError> {
        let unreadable = |file: &Path, error: io::Error| Err(CallError::io("look into", file, &error));
        let layers = self.layers_of(instance, &[self.volume_path(instance)], unreadable)?;
        Ok(layers.into_iter().max_by_key(|layer| written(layer)))
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

    fn open(&self, connect: &Connect) -> Result<StoragePool, CallError> {
        let pool = connect.lookup_storage_pool_by_name(&self.name)?;
        // After a restart of libvirtd, where somebody has switched its autostart off.
        if !pool.is_active()?
            && let Err(error) = pool.create(0)
            // Another call may have been faster.
            && !pool.is_active()?
        {
            let why = format!("the storage pool `{}` does not start: {}", self.name, error.message());
            return Err(CallError::NotNow(why));
        }
        if self.is_stale.swap(false, Ordering::Relaxed) {
            self.tell(&pool)?;
        }
        Ok(pool)
    }

    /// Has libvirt hear of files that came or went by other hands; later, where it cannot now: what is done is done, and who
    /// looks for a disk looks at the directory.
    fn tell(&self, pool: &StoragePool) -> Result<(), CallError> {
        let told = refresh(pool);
        if told.is_err() {
            self.is_stale.store(true, Ordering::Relaxed);
        }
        match told {
            Err(CallError::NotNow(_)) => Ok(()),
            told => told,
        }
    }

    /// Makes the overlay where it is not there as wanted. `in_use` tells whether a guest runs on it.
    pub(crate) fn create_overlay(
        &self,
        connect: &Connect,
        instance: InstanceId,
        base: &BaseImage,
        capacity: Option<u64>,
        in_use: bool,
    ) -> Result<(), CallError> {
        let wanted = overlay(&volume_name(instance), base, capacity)?;
        let pool = self.open(connect)?;
        let existing = self.find(&pool, &volume_name(instance))?;
        if let Some(volume) = &existing {
            // What cannot be read is not whole.
            let found = volume.xml_desc(0).ok().and_then(|text| xml::read::<VolumeXml>(&text).ok());
            if found.as_ref() == Some(&wanted) && self.has_volume(instance)? {
                return Ok(());
            }
        }
        if in_use {
            return Err(CallError::Refused("the guest runs on another overlay than the one wanted".into()));
        }
        self.remove(Some(&pool), instance)?;
        self.make(&pool, &wanted, None)
    }

    /// Makes a volume where it is not there as wanted. One that is there stays, and is grown where it is smaller: another node may have
    /// handed it over, with what a guest wrote. Only what stands on another image is made anew, which no node hands over.
    pub(crate) fn create_volume(
        &self,
        connect: &Connect,
        volume: InstanceId,
        base: Option<&BaseImage>,
        capacity: u64,
    ) -> Result<(), CallError> {
        let name = volume_name(volume);
        let wanted = match base {
            Some(base) => overlay(&name, base, Some(capacity))?,
            None => VolumeXml::alone(&name, capacity),
        };
        let path = self.volume_path(volume);
        // For now: what fails for good is swept, and the disk with it.
        let kept = |why: &str| CallError::NotNow(format!("{} {why}: it is not made anew", path.display()));
        let holds_data = self.has_volume(volume)?
            && holds_data_alone(&path).map_err(|error| kept(&format!("cannot be read ({error})")))?;
        let pool = self.open(connect)?;
        let existing = self.find(&pool, &name)?;
        let told = existing.as_ref().and_then(|volume| volume.xml_desc(0).ok());
        if told.and_then(|text| xml::read::<VolumeXml>(&text).ok()).is_some_and(|has| has.stands_as(&wanted))
        {
            return self.grow(connect, volume, capacity, None);
        }
        // A call that was held up finds what was handed over meanwhile, and libvirt may fail to tell what that is.
        if holds_data {
            return Err(kept("holds what was written on it, and stands on no image"));
        }
        delete(&pool, &name)?;
        remove_file(&path)?;
        self.make(&pool, &wanted, None)
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

    /// A disk in the pool by its path.
    pub(crate) fn at(&self, connect: &Connect, path: &Path) -> Result<Option<StorageVol>, CallError> {
        let name = name_of(path);
        self.find(&self.open(connect)?, name)
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

    /// Makes a disk at this path in the pool, empty or as a copy.
    pub(crate) fn create(
        &self,
        connect: &Connect,
        path: &Path,
        document: impl FnOnce(&str) -> VolumeXml,
        copy_of: Option<&StorageVol>,
    ) -> Result<(), CallError> {
        self.make(&self.open(connect)?, &document(name_of(path)), copy_of)
    }

    /// Makes a disk, empty or as a copy. libvirt passes on what its tools fail of by a code that says no more, and nothing is wrong
    /// with a disk for which this host has no room.
    fn make(
        &self,
        pool: &StoragePool,
        disk: &VolumeXml,
        copy_of: Option<&StorageVol>,
    ) -> Result<(), CallError> {
        make(pool, disk, copy_of).map_err(|failed| match (failed, self.takes_none()) {
            (CallError::Libvirt(error), Some(why)) if !is_connection_error(&error) => CallError::NotNow(
                format!("the file system of {} {why}: {}", self.path.display(), said(&error)),
            ),
            (failed, _) => failed,
        })
    }

    /// Why no disk whatever can be made on the file system below.
    fn takes_none(&self) -> Option<&'static str> {
        let stat = nix::sys::statvfs::statvfs(&self.path).ok()?;
        let left = stat.blocks_available() * stat.fragment_size();
        // Some have no number of inodes (btrfs), or none of blocks (a FUSE that does not tell).
        let has_no_inode = stat.files() > 0 && stat.files_available() == 0;
        [
            (stat.flags().contains(FsFlags::ST_RDONLY), "is read-only"),
            (stat.blocks() > 0 && left < ROOM_FOR_A_DISK, "is full"),
            (has_no_inode, "has no inode left"),
        ]
        .into_iter()
        .find_map(|(is_so, why)| is_so.then_some(why))
    }

    /// Deletes what was begun of a copy.
    pub(crate) fn drop_part(&self, connect: &Connect, part: &Path) -> Result<(), CallError> {
        self.drop_beside(connect, name_of(part))?;
        locked(&self.found).remove(part);
        Ok(())
    }

    /// How long ago this agent found what was begun of a copy, of which nothing else is known: when it was written the clock of another
    /// host tells, where that has the disks, and that of this one may have been set since.
    pub(crate) fn found_for(&self, part: &Path) -> Duration {
        locked(&self.found).entry(part.to_owned()).or_insert_with(Instant::now).elapsed()
    }

    /// The instance's disk as libvirt knows it.
    pub(crate) fn known(
        &self,
        connect: &Connect,
        instance: InstanceId,
    ) -> Result<Option<StorageVol>, CallError> {
        self.find(&self.open(connect)?, &volume_name(instance))
    }

    /// Puts a disk that is whole in the place of another, or of none, in one step, which lasts; just before it does what cannot be
    /// taken back, since all that may be refused was looked at.
    pub(crate) fn put_in_place(
        &self,
        connect: &Connect,
        from: &Path,
        to: &Path,
        before: impl FnOnce() -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        let failed = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => {
                CallError::Refused(format!("there is no {} to put in place", from.display()))
            }
            _ => CallError::io("put in place", from, &error),
        };
        let old = self.behind(to)?;
        File::open(from).and_then(|file| file.sync_all()).map_err(failed)?;
        before()?;
        std::fs::rename(from, to).map_err(failed)?;
        // It is there from here on, whatever else fails: nobody is to hear that the other one was kept.
        let gone = old.map_or(Ok(()), |old| remove_file(&old));
        let told = gone.and_then(|()| keep_names(&self.path)).and_then(|()| self.tell(&self.open(connect)?));
        told.map_err(|error| match error {
            CallError::Libvirt(error) => CallError::NotNow(error.message().to_owned()),
            CallError::Refused(why) | CallError::NotNow(why) => CallError::NotNow(why),
        })
    }

    /// Has libvirt hear of what came into the directory, or was taken out of it; when the pool is used next, where it cannot now.
    pub(crate) fn has_changed(&self, connect: &Connect) {
        self.is_stale.store(true, Ordering::Relaxed);
        if let Err(error) = self.open(connect) {
            tracing::debug!(?error, pool = self.name, "libvirt hears later of what lies there");
        }
    }

    /// Makes an overlay beside the instance's own, anew where there is one.
    pub(crate) fn create_successor(
        &self,
        connect: &Connect,
        instance: InstanceId,
        base: &BaseImage,
        capacity: Option<u64>,
    ) -> Result<(), CallError> {
        self.create_beside(connect, &successor_name(instance), base, capacity)?;
        // It lasts before anybody notes that it is whole: that one which is whole is not there any more is taken for that it came in the
        // other's place.
        let path = self.successor_path(instance);
        let synced = File::open(&path).and_then(|file| file.sync_all());
        synced.map_err(|error| CallError::io("write", &path, &error))?;
        keep_names(&self.path)
    }

    /// Makes the overlay that the instance is booted from in the place of its own, anew where there is one.
    pub(crate) fn create_rescue(
        &self,
        connect: &Connect,
        instance: InstanceId,
        base: &BaseImage,
    ) -> Result<(), CallError> {
        self.create_beside(connect, &rescue_name(instance), base, None)
    }

    fn create_beside(
        &self,
        connect: &Connect,
        name: &str,
        base: &BaseImage,
        capacity: Option<u64>,
    ) -> Result<(), CallError> {
        let wanted = overlay(name, base, capacity)?;
        let pool = self.open(connect)?;
        self.drop_beside(connect, name)?;
        self.make(&pool, &wanted, None)
    }

    /// Puts the overlay beside the instance's own in its place, in one step: there is always one of them.
    pub(crate) fn replace_overlay(
        &self,
        connect: &Connect,
        instance: InstanceId,
        before: impl FnOnce() -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        self.put_in_place(connect, &self.successor_path(instance), &self.volume_path(instance), before)
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

    /// Makes the instance's volume as large as this, by the guest that is up and has it as that device where there is one. What is so large
    /// already is left.
    pub(crate) fn grow(
        &self,
        connect: &Connect,
        instance: InstanceId,
        capacity: u64,
        running: Option<(&Domain, &str)>,
    ) -> Result<(), CallError> {
        let none = || CallError::Refused("there is no disk to grow".into());
        if self.capacity(instance)?.ok_or_else(none)? >= capacity {
            return Ok(());
        }
        match running {
            Some((domain, device)) => {
                Ok(domain.block_resize(device, capacity, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)?)
            }
            // Not while it is copied.
            None => {
                let volume = self.known(connect, instance)?.ok_or_else(none)?;
                busy_by(volume.resize(capacity, 0), &[ErrorNumber::OperationInvalid])
            }
        }
    }

    /// Deletes the overlay beside the instance's own, and copies that are not whole; what is not there is not an error.
    pub(crate) fn drop_successor(&self, connect: &Connect, instance: InstanceId) -> Result<(), CallError> {
        if !self.has_volume(instance)? {
            self.copies_of(instance)?.iter().try_for_each(|file| self.drop_part(connect, file))?;
        }
        self.drop_beside(connect, &successor_name(instance))
    }

    /// Deletes the overlay that the instance is booted from in the place of its own; what is not there is not an error.
    pub(crate) fn drop_rescue(&self, connect: &Connect, instance: InstanceId) -> Result<(), CallError> {
        self.drop_beside(connect, &rescue_name(instance))
    }

    fn drop_beside(&self, connect: &Connect, name: &str) -> Result<(), CallError> {
        delete(&self.open(connect)?, name)?;
        remove_file(&self.path.join(name))
    }

    /// The volume as libvirt knows it. A file that it does not know (its daemon ended while making it)
    /// is made known by a refresh, which is the only time one is needed.
    fn find(&self, pool: &StoragePool, name: &str) -> Result<Option<StorageVol>, CallError> {
        let found = look_up(pool, name)?;
        if found.is_some() || !is_there(&self.path.join(name))? {
            return Ok(found);
        }
        refresh(pool)?;
        look_up(pool, name)
    }

    /// Deletes the volume; what is not there is not an error.
    pub(crate) fn delete_volume(&self, connect: &Connect, instance: InstanceId) -> Result<(), CallError> {
        self.remove(self.active(connect)?.as_ref(), instance)
    }

    /// Deletes files of the pool.
    pub(crate) fn delete_files(&self, connect: &Connect, files: &[PathBuf]) -> Result<(), CallError> {
        if files.is_empty() { Ok(()) } else { self.remove_files(self.active(connect)?.as_ref(), files) }
    }

    /// As libvirt knows it, where it is not ended.
    fn active(&self, connect: &Connect) -> Result<Option<StoragePool>, CallError> {
        let pool = absent(connect.lookup_storage_pool_by_name(&self.name), ErrorNumber::NoStoragePool)?;
        Ok(match pool {
            Some(pool) if pool.is_active()? => Some(pool),
            _ => None,
        })
    }

    /// What is ours by its name, and what stands on that, which is nothing without it: whatever else somebody laid beside it is theirs.
    fn remove(&self, pool: Option<&StoragePool>, instance: InstanceId) -> Result<(), CallError> {
        let mut own = self.files_of(instance)?;
        own.retain(|file| names::is_ours(name_of(file)));
        // Also where that is gone already.
        let gone = [self.volume_path(instance), self.rescue_path(instance), self.successor_path(instance)];
        let below: Vec<_> = own.iter().cloned().chain(gone).collect();
        // First, and the last of them before the others: what is left by a call that is broken off is known by what it stands on.
        let mut files = self.layers_of(instance, &below, |file, error| {
            tracing::warn!(file = %file.display(), %error, "it lies beside the disk, cannot be read and is left");
            Ok(())
        })?;
        files.extend(own);
        self.remove_files(pool, &files)?;
        // Of its disk libvirt may know also where the file is gone.
        pool.map_or(Ok(()), |pool| delete(pool, &volume_name(instance)))
    }

    /// By libvirt what that knows of them; by hand whatever is left.
    fn remove_files(&self, pool: Option<&StoragePool>, files: &[PathBuf]) -> Result<(), CallError> {
        // Nothing is deleted where one of them leads to what is not mounted.
        let mut linked = Vec::new();
        for link in files {
            linked.extend(self.behind(link)?.map(|disk| [disk, link.clone()]));
        }
        // At once: a link without its disk would hold up the next try.
        linked.iter().flatten().try_for_each(|path| remove_file(path))?;
        for file in files {
            if let Some(pool) = pool {
                delete(pool, name_of(file))?;
            }
            remove_file(file)?;
        }
        Ok(())
    }

    /// The disk that a link in the pool leads to, since somebody has it elsewhere. None where it is no link, or leads to what lies in the
    /// pool itself, which is another's. An error where it leads nowhere.
    fn behind(&self, path: &Path) -> Result<Option<PathBuf>, CallError> {
        if !path.is_symlink() {
            return Ok(None);
        }
        let followed = |path: &Path| match path.canonicalize() {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(leads_nowhere(path)),
            leads => leads.map_err(|error| CallError::io("follow", path, &error)),
        };
        let (disk, pool) = (followed(path)?, followed(&self.path)?);
        Ok(Some(disk).filter(|disk| disk.is_file() && disk.parent() != Some(&pool)))
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

/// Has libvirt look into its pool's directory, which it does not while it makes any disk there: by `qemu-img`, or a copy. Nor where
/// somebody ended the pool.
fn refresh(pool: &StoragePool) -> Result<(), CallError> {
    busy_by(pool.refresh(0), &[ErrorNumber::InternalError, ErrorNumber::OperationInvalid])
}

/// The volume of that name as libvirt knows it, which tells of none of a pool that somebody ended.
fn look_up(pool: &StoragePool, name: &str) -> Result<Option<StorageVol>, CallError> {
    let known = absent(pool.lookup_storage_vol_by_name(name), ErrorNumber::NoStorageVolume);
    busy_by(known, &[ErrorNumber::OperationInvalid])
}

/// Makes a disk, empty or as a copy; not where somebody ended the pool, or what is copied is still being made.
fn make(pool: &StoragePool, disk: &VolumeXml, copy_of: Option<&StorageVol>) -> Result<(), CallError> {
    let document = xml::write(disk).map_err(CallError::Refused)?;
    let made = match copy_of {
        Some(of) => StorageVol::create_xml_from(pool, &document, of, 0),
        None => StorageVol::create_xml(pool, &document, 0),
    };
    busy_by(made, &[ErrorNumber::OperationInvalid]).map(drop)
}

/// Deletes a disk of that name, which libvirt does not while it still makes it; what it does not know is not an error.
fn delete(pool: &StoragePool, name: &str) -> Result<(), CallError> {
    let Some(volume) = look_up(pool, name)? else { return Ok(()) };
    busy_by(absent(volume.delete(0), ErrorNumber::NoStorageVolume), &[ErrorNumber::OperationInvalid])
        .map(drop)
}

/// That libvirt is at something else, which it says by codes that say no more, and by a text in its daemon's own language.
fn busy_by<T>(answer: Result<T, virt::error::Error>, codes: &[ErrorNumber]) -> Result<T, CallError> {
    answer.map_err(|error| match codes.iter().any(|code| has_code(&error, *code)) {
        true => CallError::NotNow(error.message().to_owned()),
        false => error.into(),
    })
}

/// An overlay of that name, as libvirt is told of it.
fn overlay(name: &str, base: &BaseImage, capacity: Option<u64>) -> Result<VolumeXml, CallError> {
    let capacity = capacity.unwrap_or(base.virtual_size);
    if capacity < base.virtual_size {
        return Err(CallError::Refused(format!(
            "the disk is to have {capacity} bytes, but the image {} has {} already; give it at least that",
            base.path.display(),
            base.virtual_size
        )));
    }
    // libvirt hands qemu-img whole KiB, rounded up, and reports what came of it: an image of an odd
    // number of sectors would never be found as wanted.
    VolumeXml::overlay(name, base, capacity.next_multiple_of(1024)).map_err(CallError::Refused)
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

/// When a file was written last, where that can be told.
fn written(path: &Path) -> Option<SystemTime> {
    metadata(path).and_then(|found| found.modified()).ok()
}

/// What is not there is not an error.
fn remove_file(path: &Path) -> Result<(), CallError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CallError::io("remove", path, &error)),
        _ => Ok(()),
    }
}

/// The first directory above `path` that others than its owner's group may not pass.
pub(crate) fn impassable_ancestor(path: &Path) -> Option<&Path> {
    use std::os::unix::fs::PermissionsExt;
    path.ancestors().skip(1).filter(|ancestor| !ancestor.as_os_str().is_empty()).find(|ancestor| {
        std::fs::metadata(ancestor).is_ok_and(|metadata| metadata.permissions().mode() & 0o001 == 0)
    })
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        io::{BufRead, BufReader},
        os::unix::fs::PermissionsExt,
        process::{Command, Stdio},
    };

    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_disk_that_fails_for_want_of_inodes_or_room_is_waited_for_and_another_failure_is_not() {
        virt::error::clear_error_callback();
        let directory = tempfile::tempdir().unwrap();
        let connect = Connect::open(Some("test:///default")).unwrap();
        let fails_at = |path: &Path| {
            let pool = Pool::new("default-pool", path);
            let make = || pool.create(&connect, Path::new("x"), |name| VolumeXml::alone(name, 1 << 20), None);
            // Whatever libvirt refuses: here the second disk of one name.
            make().and_then(|()| make()).unwrap_err()
        };
        let failed = fails_at(directory.path());
        assert!(matches!(failed, CallError::Libvirt(_)), "{failed:?}");
        for (options, why) in
            [("nr_inodes=1", "has no inode left"), ("size=4k", "is full"), ("ro", "is read-only")]
        {
            let script = "mount -t tmpfs -o \"$1\" tmpfs \"$2\" && echo ready && read end";
            let mut other = Command::new("unshare")
                .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", options])
                .arg(directory.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("unshare of util-linux");
            let mut line = String::new();
            BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let seen = format!("/proc/{}/root{}", other.id(), directory.path().display());
            let failed = fails_at(seen.as_ref());
            drop(other.stdin.take());
            other.wait().unwrap();
            assert_eq!(line, "ready\n", "no namespace of mounts");
            let CallError::NotNow(told) = failed else { panic!("{failed:?}") };
            assert!(told.contains(why), "{told}");
        }
    }

    #[test]
    fn only_files_named_by_an_instance_are_volumes() {
        let directory = tempfile::tempdir().unwrap();
        let pool = Pool::new("p", directory.path());
        let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let other: InstanceId = "8d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let fourth: InstanceId = "ad3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let fifth: InstanceId = "bd3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let third: InstanceId = "9d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        for name in [
            volume_name(instance),
            rescue_name(instance),
            successor_name(other),
            part_name(third, instance, None),
            part_name(third, instance, Some(other)),
            format!("{third}.x.part.qcow2"),
            format!("{third}.{instance}.x.part.qcow2"),
            // Of a snapshot whose first disk is there, and of one that is not whole.
            copy_name(instance, other),
            copy_name(fourth, other),
            // Of one that was handed over, and is not in its place yet.
            moved_name(fifth, Uuid::from_u128(1)),
            format!("{third}.x.moved.qcow2"),
            "x.qcow2".into(),
            "x.new.qcow2".into(),
            "7D3C1F0A-2B4E-4C55-9A7E-0123456789AC.qcow2".into(),
        ] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        let Contents { volumes, mut successors, copies, handed_over } = pool.contents().unwrap();
        successors.sort_unstable();
        successors.dedup();
        assert_eq!((volumes, handed_over), (vec![instance], vec![fifth]));
        assert_eq!(
            (copies, pool.beside(instance).unwrap().1),
            (HashMap::from([(instance, vec![other])]), vec![other])
        );
        assert_eq!(successors, [other, third, fourth]);
        assert!(pool.beside(fourth).unwrap().0);
        assert!(pool.beside(other).unwrap().0 && !pool.beside(instance).unwrap().0);
        assert!(pool.beside(third).unwrap().0);
        let mut parts = pool.parts_of(third).unwrap();
        parts.sort_unstable();
        let both = [None, Some(other)].map(|disk| (pool.part_path(third, instance, disk), instance));
        assert_eq!(parts.iter().collect::<BTreeSet<_>>(), both.iter().collect());
        pool.refuse_snapshots(instance).expect("copies are no layers");
        pool.refuse_snapshots(third).expect("it is nobody's part, and stands on nothing");
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        assert_eq!(pool.owner(&path(&volume_name(instance))), Some(instance));
        for file in [path("x.qcow2"), path(&rescue_name(instance)), format!("/{}", volume_name(instance))] {
            assert_eq!(pool.owner(&file), None, "{file}");
        }
        assert!(pool.has_volume(instance).unwrap());
    }

    #[test]
    fn of_a_directory_that_is_gone_or_another_nothing_is_known_and_nothing_in_it_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("disks");
        let pool = Pool::new("p", &place);
        let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let make = || {
            std::fs::create_dir(&place).unwrap();
            Ok(())
        };
        pool.make_ready(make).unwrap();
        std::fs::write(pool.volume_path(instance), "").unwrap();
        pool.make_ready(|| panic!("it was made twice")).unwrap();
        assert_eq!(pool.contents().unwrap().volumes, [instance]);
        // Not mounted: nothing is there, or what lies below.
        let mounted = directory.path().join("elsewhere");
        std::fs::rename(&place, &mounted).unwrap();
        for _ in 0..2 {
            let not_now = |error| matches!(error, CallError::NotNow(_));
            assert!(not_now(pool.contents().unwrap_err()));
            assert!(not_now(pool.has_volume(instance).unwrap_err()));
            assert!(not_now(pool.beside(instance).unwrap_err()));
            assert!(not_now(pool.has_whole_successor(instance).unwrap_err()));
            assert!(not_now(pool.remove(None, instance).unwrap_err()));
            assert!(not_now(pool.make_ready(|| panic!("it is not made anew")).unwrap_err()));
            std::fs::create_dir_all(&place).unwrap();
        }
        std::fs::remove_dir(&place).unwrap();
        std::fs::rename(&mounted, &place).unwrap();
        assert_eq!(pool.contents().unwrap().volumes, [instance]);
        pool.remove(None, instance).unwrap();
        assert!(!pool.has_volume(instance).unwrap());
    }

    #[test]
    fn a_link_that_cannot_be_followed_is_not_taken_for_gone_and_hides_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("disks");
        std::fs::create_dir(&place).unwrap();
        let pool = Pool::new("p", &place);
        let [loops, away, other] = ["7d", "8d", "9d"].map(|start| -> InstanceId {
            format!("{start}3c1f0a-2b4e-4c55-9a7e-0123456789ab").parse().unwrap()
        });
        let (link, mounted) = (pool.volume_path(away), directory.path().join("mounted"));
        std::os::unix::fs::symlink(pool.volume_path(loops), pool.volume_path(loops)).unwrap();
        std::os::unix::fs::symlink(mounted.join("disk"), &link).unwrap();
        std::fs::write(pool.volume_path(other), "").unwrap();
        let mut volumes = pool.contents().unwrap().volumes;
        volumes.sort_unstable();
        assert_eq!(volumes, [loops, away, other]);
        pool.has_volume(loops).expect_err("nobody knows");
        let layer = place.join(format!("{away}.snapshot"));
        overlay_on(&layer, &link);
        let says = |error| match error {
            CallError::NotNow(why) => assert!(why.contains("mount it, or remove the link"), "{why}"),
            other => panic!("{other:?}"),
        };
        says(pool.has_volume(away).unwrap_err());
        says(pool.capacity(away).unwrap_err());
        says(pool.remove(None, away).unwrap_err());
        assert!(link.is_symlink() && layer.exists());
        std::fs::create_dir(&mounted).unwrap();
        std::fs::write(mounted.join("disk"), "").unwrap();
        assert!(pool.has_volume(away).unwrap());
        pool.remove(None, away).unwrap();
        assert!(!link.is_symlink() && !mounted.join("disk").exists() && !layer.exists());
    }

    fn qemu_img(arguments: &[&str]) {
        let output = std::process::Command::new("qemu-img").args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    /// Whether the backing file is there or not.
    fn overlay_on(path: &Path, backing: &Path) {
        let [path, backing] = [path, backing].map(|path| path.to_str().unwrap());
        qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2", path, "8M"]);
    }

    fn names_in(directory: &Path) -> BTreeSet<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn what_a_snapshot_put_beside_a_disk_goes_with_it_and_nothing_of_others() {
        let directory = tempfile::tempdir().unwrap();
        let (pool, at) = (Pool::new("p", directory.path()), |name: &str| directory.path().join(name));
        let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let second: InstanceId = "8d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let [image, other] = ["image".to_owned(), volume_name(second)];
        let theirs = ["backup.qcow2", "mine.qcow2", "qcow2.bak", "raw", "on-backup"]
            .map(|end| format!("{instance}.{end}"));
        for on_image in [&volume_name(instance), &rescue_name(instance), &other, &theirs[0]] {
            overlay_on(&at(on_image), &at(&image));
        }
        // A chain, by words of all kinds, and what a guest wrote that was up from its rescue disk.
        let layer = |end: &str| at(&format!("{instance}.{end}"));
        overlay_on(&layer("s1"), &pool.volume_path(instance));
        overlay_on(&layer("s2"), Path::new(&format!("{instance}.s1")));
        let words = format!(
            r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{}"}}}}"#,
            pool.volume_path(instance).display()
        );
        overlay_on(&layer("s3.qcow2"), Path::new(&words));
        overlay_on(&layer("rescue.s1"), &pool.rescue_path(instance));
        let own = [
            successor_name(instance),
            part_name(instance, second, None),
            part_name(instance, second, Some(second)),
            copy_name(instance, second),
            moved_name(instance, Uuid::from_u128(1)),
        ];
        for name in own.iter().chain(&theirs[1..4]) {
            std::fs::write(at(name), "").unwrap();
        }
        overlay_on(&at(&theirs[4]), &at(&theirs[0]));
        std::fs::create_dir(layer("directory")).unwrap();
        let pipe = layer("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink(&other, layer("link")).unwrap();
        let mut left: BTreeSet<String> = theirs.into_iter().chain([other]).collect();
        left.extend(["directory", "pipe", "link"].map(|end| format!("{instance}.{end}")));
        pool.remove(None, instance).unwrap();
        assert_eq!(names_in(directory.path()), left);
        // One that was broken off took the disk first.
        overlay_on(&layer("s1"), &pool.volume_path(instance));
        pool.remove(None, instance).unwrap();
        assert_eq!(names_in(directory.path()), left);
    }

    #[test]
    fn nothing_is_defined_below_a_snapshot_and_what_is_none_is_in_nobodys_way() {
        let directory = tempfile::tempdir().unwrap();
        let (pool, at) = (Pool::new("p", directory.path()), |name: &str| directory.path().join(name));
        let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let (image, disk) = (at("image"), pool.volume_path(instance));
        let layer = |end: &str| at(&format!("{instance}.{end}"));
        let write = |path: &Path, what: &str| {
            let command = format!("write -P {what} 1M 64k");
            let output =
                std::process::Command::new("qemu-io").args(["-c", &command]).arg(path).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        };
        qemu_img(&["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "8M"]);
        write(&image, "1");
        overlay_on(&disk, &image);
        write(&disk, "2");
        let of_image = std::fs::read(&image).unwrap();
        // Of another, copies, and what is no image at all.
        overlay_on(&at("7d3c1f0a-2b4e-4c55-9a7e-0123456789ac.snapshot"), &disk);
        std::fs::copy(&disk, layer("backup.qcow2")).unwrap();
        std::fs::write(layer("qcow2.bak"), "").unwrap();
        std::fs::write(layer("mine.qcow2"), vec![0; 4096]).unwrap();
        pool.refuse_snapshots(instance).unwrap();

        overlay_on(&layer("s1"), &disk);
        overlay_on(&layer("s2"), &layer("s1"));
        write(&layer("s2"), "3");
        let refused = || match pool.refuse_snapshots(instance) {
            Err(CallError::Refused(why)) => why,
            other => panic!("it was not refused: {other:?}"),
        };
        let why = refused();
        assert!(why.starts_with(layer("s2").to_str().unwrap()), "{why}");
        // What it says helps, and writes nothing into what others stand on.
        let command: Vec<_> = why.split('`').nth(1).unwrap().split(' ').collect();
        let ["qemu-img", rest @ ..] = command.as_slice() else { panic!("{why}") };
        qemu_img(&[&["commit", "-q"], &rest[1..]].concat());
        assert_eq!(std::fs::read(&image).unwrap(), of_image);
        let output = std::process::Command::new("qemu-io")
            .args(["-c", "read -P 3 1M 64k"])
            .arg(&disk)
            .output()
            .unwrap();
        assert!(
            output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed"),
            "{output:?}"
        );
        std::fs::remove_file(layer("s2")).unwrap();
        // What is older than what it stands on is never to be written over that.
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(10);
        File::options().write(true).open(&disk).unwrap().set_modified(later).unwrap();
        let why = refused();
        assert!(why.contains("remove it") && !why.contains("commit -b"), "{why}");
        std::fs::remove_file(layer("s1")).unwrap();
        pool.refuse_snapshots(instance).unwrap();
    }

    #[test]
    fn the_directory_that_stops_qemu_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let (open, closed) = (directory.path().join("open"), directory.path().join("open/closed"));
        std::fs::create_dir_all(&closed).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(directory.path(), 0o711);
        mode(&open, 0o755);
        mode(&closed, 0o750);
        assert_eq!(impassable_ancestor(&closed.join("x.qcow2")), Some(closed.as_path()));
        assert_eq!(impassable_ancestor(&open.join("x.qcow2")), None);
    }
}

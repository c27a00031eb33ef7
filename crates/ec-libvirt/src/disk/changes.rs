//! What is done in the pool: disks made, put in place, grown and deleted.

use std::{
    fs::File,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use ec_model::{BaseImage, InstanceId};
use nix::sys::statvfs::FsFlags;
use virt::{
    connect::Connect, domain::Domain, error::ErrorNumber, storage_pool::StoragePool, storage_vol::StorageVol,
    sys,
};

use super::{
    Pool,
    image::holds_data_alone,
    is_there, keep_names, leads_nowhere,
    names::{self, name_of, rescue_name, successor_name, volume_name},
};
use crate::{
    error::{CallError, absent, has_code, is_connection_error, said},
    lane::locked,
    xml::{self, VolumeXml},
};

/// What a disk takes before anything is written on it, generously.
const ROOM_FOR_A_DISK: u64 = 1 << 20;

impl Pool {
    fn open(&self, connect: &Connect) -> Result<StoragePool, CallError> {
        let pool = match self.defined(connect)? {
            Some(pool) => pool,
            // Somebody undefined it. Not while its directory is not mounted, which would be made.
            None => self.there().and_then(|()| self.define(connect)).map_err(CallError::for_now)?,
        };
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
            return self.grow_what_is_there(connect, volume, capacity);
        }
        // A call that was held up finds what was handed over meanwhile, and libvirt may fail to tell what that is.
        if holds_data {
            return Err(kept("holds what was written on it, and stands on no image"));
        }
        delete(&pool, &name)?;
        remove_file(&path)?;
        self.make(&pool, &wanted, None)
    }

    /// A disk in the pool by its path.
    pub(crate) fn at(&self, connect: &Connect, path: &Path) -> Result<Option<StorageVol>, CallError> {
        let name = name_of(path);
        self.find(&self.open(connect)?, name)
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
        make(pool, disk, copy_of).map_err(|failed| self.unless_none_is_taken(failed))
    }

    /// Why a disk could not be made or grown: for now, where the file system takes none.
    fn unless_none_is_taken(&self, failed: CallError) -> CallError {
        match (failed, self.takes_none()) {
            (CallError::Libvirt(error), Some(why)) if !is_connection_error(&error) => CallError::NotNow(
                format!("the file system of {} {why}: {}", self.path.display(), said(&error)),
            ),
            (failed, _) => failed,
        }
    }

    /// Why no disk whatever can be made on the file system below.
    pub(super) fn takes_none(&self) -> Option<&'static str> {
        let Ok(stat) = nix::sys::statvfs::statvfs(&self.path) else { return Some("does not answer") };
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
        told.map_err(CallError::for_now)
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

    /// Makes the overlay that the instance is booted from in the place of its own, anew where there is one; an error, and nothing is left,
    /// where it is not wanted before that or after it.
    pub(crate) fn create_rescue(
        &self,
        connect: &Connect,
        instance: InstanceId,
        base: &BaseImage,
        is_wanted: impl Fn() -> Result<bool, CallError>,
    ) -> Result<(), CallError> {
        let unless_unwanted = || match is_wanted()? {
            true => Ok(()),
            false => Err(CallError::Refused("it has no disk of its own".into())),
        };
        unless_unwanted()?;
        self.create_beside(connect, &rescue_name(instance), base, None)?;
        // Once more: an instance that went while it was made took what there was.
        unless_unwanted().inspect_err(|error| {
            if let CallError::Refused(_) = error
                && let Err(error) = self.drop_rescue(connect, instance)
            {
                tracing::warn!(%instance, ?error, "a rescue disk of what is gone is left");
            }
        })
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
        let grown = match running {
            Some((domain, device)) => domain
                .block_resize(device, capacity, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)
                .map_err(CallError::Libvirt),
            // Not while it is copied.
            None => {
                let volume = self.known(connect, instance)?.ok_or_else(none)?;
                busy_by(volume.resize(capacity, 0), &[ErrorNumber::OperationInvalid])
            }
        };
        grown.map_err(|failed| self.unless_none_is_taken(failed))
    }

    /// The same of a volume that is there where it is to be made. Whatever keeps it from growing, it is so for now: what fails for good is
    /// swept, and the disk with it.
    pub(crate) fn grow_what_is_there(
        &self,
        connect: &Connect,
        volume: InstanceId,
        capacity: u64,
    ) -> Result<(), CallError> {
        self.grow(connect, volume, capacity, None).map_err(CallError::for_now)
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
        Ok(match self.defined(connect)? {
            Some(pool) if pool.is_active()? => Some(pool),
            _ => None,
        })
    }

    /// What is ours by its name, and what stands on that, which is nothing without it: whatever else somebody laid beside it is theirs.
    pub(super) fn remove(&self, pool: Option<&StoragePool>, instance: InstanceId) -> Result<(), CallError> {
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
        // Come since they were listed, from a call that met its disk still; one that ends later looks for that once more.
        let rescue = self.rescue_path(instance);
        if is_there(&rescue)? {
            self.remove_files(pool, &[rescue])?;
        }
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
pub(super) fn busy_by<T>(
    answer: Result<T, virt::error::Error>,
    codes: &[ErrorNumber],
) -> Result<T, CallError> {
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

/// What is not there is not an error.
pub(super) fn remove_file(path: &Path) -> Result<(), CallError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CallError::io("remove", path, &error)),
        _ => Ok(()),
    }
}

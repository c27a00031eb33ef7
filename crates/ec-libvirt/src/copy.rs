//! Copies of disks, whether a guest writes them meanwhile or not.
//!
//! ```text
//!   nobody is up with it: copied by qemu-img, which keeps guests from starting on it ──────────┐
//!   a guest is up with it: empty copy ─▶ frozen ─▶ backup begun ─▶ thawed ─▶ looked after ─────┤
//!                                                                                              ▼
//!                                                         as large as wanted ─▶ in its place, under its name
//! ```
//!
//! A backup is of one moment, and the guest goes on. Until a copy is whole it bears a name that is nobody's disk, with the
//! domain in it that is copied from: whoever finds it after a crash lets that guest go on and ends what was begun.

use std::path::{Path, PathBuf};

use ec_model::{InstanceId, NodeId};
use virt::{connect::Connect, domain::Domain, error::ErrorNumber};

use crate::{
    disk::{self, Pool},
    domain::{self, Found},
    error::{CallError, absent},
    sys, volumes,
    xml::{self, BackupXml, VolumeXml},
};

/// What is to be copied, and for whom.
#[derive(Debug, Clone)]
pub(crate) struct Copy {
    /// Whose disk, or for whom.
    pub(crate) owner: InstanceId,
    /// What is copied.
    pub(crate) of: InstanceId,
    /// In bytes, or where `None` that of what is copied.
    pub(crate) capacity: Option<u64>,
    /// Where it lies when it is whole.
    pub(crate) place: PathBuf,
}

/// A backup that libvirt is at.
#[derive(Debug, Clone)]
pub(crate) struct Copying {
    from: InstanceId,
    part: PathBuf,
}

/// Makes the copy where no guest is up with what is copied, and begins to where one is.
pub(crate) fn begin(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    copy: &Copy,
) -> Result<Option<Copying>, CallError> {
    let Copy { owner, of, .. } = *copy;
    give_up(connect, node, pool, owner)?;
    pool.refuse_snapshots(of)?;
    let Some(source) = pool.known(connect, of)? else {
        return Err(CallError::Refused(format!("there is no disk of {of} to copy")));
    };
    let has = source.info()?.capacity;
    let capacity = copy.capacity.unwrap_or(has);
    if capacity < has {
        return Err(CallError::Refused(format!(
            "it is to have {capacity} bytes, but what it is a copy of has {has}; give it at least that"
        )));
    }
    let Some((domain, from, device)) = user(connect, node, pool, of)? else {
        let part = pool.part_path(owner, of);
        pool.create(connect, &part, |name| VolumeXml::alone(name, capacity), Some(&source))?;
        end(connect, pool, copy, &part)?;
        return Ok(None);
    };
    if sys::backup(&domain)?.is_some() {
        return Err(CallError::NotNow(format!("a disk of {from} is being copied already")));
    }
    let part = pool.part_path(owner, from);
    pool.create(connect, &part, |name| VolumeXml::alone(name, has), None)?;
    let document = xml::utf8(&part).and_then(|part| xml::write(&BackupXml::new(&device, part)));
    let document = document.map_err(CallError::Refused)?;
    // A guest without an agent is copied as if its power had failed. One whose agent did not answer in time may be frozen
    // all the same.
    let frozen = sys::freeze(&domain);
    let begun = sys::begin_backup(&domain, &document);
    let thawed = sys::thaw(&domain);
    if frozen.is_ok() {
        thawed?;
    }
    match begun {
        Ok(()) => Ok(Some(Copying { from, part })),
        // What nobody is up with is copied otherwise.
        Err(_) if !domain.is_active()? => Err(ended(from)),
        Err(error) => Err(error.into()),
    }
}

/// Whether it came to its end, and is in its place.
pub(crate) fn is_done(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    copy: &Copy,
    Copying { from, part }: &Copying,
) -> Result<bool, CallError> {
    let Found::Ours(domain) = domain::find(connect, node, *from)? else { return Err(ended(*from)) };
    if is_backup_to(&domain, part)? {
        return Ok(false);
    }
    if !domain.is_active()? {
        return Err(ended(*from));
    }
    if !sys::last_backup_completed(&domain)? {
        let why =
            "libvirt broke it off: its host's disk is full, say, or somebody ended it (`virsh domjobabort`)";
        return Err(CallError::Refused(why.to_owned()));
    }
    // It is told of before QEMU has let go of the file.
    if disk::is_locked(part).map_err(|error| CallError::io("look at", part, &error))? {
        return Ok(false);
    }
    end(connect, pool, copy, part)?;
    Ok(true)
}

/// Ends what was begun of a copy for this one, and deletes it.
pub(crate) fn give_up(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    owner: InstanceId,
) -> Result<(), CallError> {
    for (part, from) in pool.parts_of(owner)? {
        if let Some(domain) = domain::up(connect, node, from)? {
            // Whether it was frozen nobody knows any more; one that was not, or has no agent, is none the worse.
            let _ = sys::thaw(&domain);
            if is_backup_to(&domain, &part)? {
                sys::abort_job(&domain)?;
            }
        }
        pool.drop_part(connect, &part)?;
    }
    Ok(())
}

fn ended(from: InstanceId) -> CallError {
    CallError::NotNow(format!("{from} ended before its disk was copied"))
}

fn is_backup_to(domain: &Domain, part: &Path) -> Result<bool, CallError> {
    if !domain.is_active()? {
        return Ok(false);
    }
    Ok(sys::backup(domain)?.is_some_and(|document| part.to_str().is_some_and(|part| document.contains(part))))
}

/// The domain that is up with this disk, its own or a volume, whose it is, and as which device.
fn user(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    of: InstanceId,
) -> Result<Option<(Domain, InstanceId, String)>, CallError> {
    if let Some(domain) = domain::up(connect, node, of)? {
        let device = volumes::device_of(&domain, pool, of)?.ok_or_else(|| {
            CallError::Refused(format!("{of} is up, and not from the disk that is to be copied"))
        })?;
        return Ok(Some((domain, of, device)));
    }
    let user = volumes::user_of(connect, pool, of)?;
    Ok(user.and_then(|user| user.device.map(|device| (user.domain, user.instance, device))))
}

/// Puts a whole copy in its place.
fn end(connect: &Connect, pool: &Pool, copy: &Copy, part: &Path) -> Result<(), CallError> {
    let made = connect.lookup_storage_vol_by_path(xml::utf8(part).map_err(CallError::Refused)?);
    let made = absent(made, ErrorNumber::NoStorageVolume)?;
    let made = made.ok_or_else(|| CallError::NotNow("the copy was taken away meanwhile".to_owned()))?;
    if let Some(capacity) = copy.capacity
        && made.info()?.capacity < capacity
    {
        made.resize(capacity, 0)?;
    }
    pool.put_in_place(connect, part, &copy.place)
}

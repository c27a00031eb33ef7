//! A volume's disk that becomes another node's, on storage that both have.
//!
//! ```text
//!  old node:  VOLUME.qcow2 ──rename──▶ NODE/VOLUME.<random>.moved.qcow2, in the new node's directory
//!  new node:  VOLUME.<random>.moved.qcow2 ──rename──▶ VOLUME.qcow2
//! ```
//!
//! A network's file system tells each host for a while what names it has seen, and not those that there are (the attributes that NFS
//! caches, for a minute by default). So each node makes and takes away names of its own directory alone, which its host knows, and gives others
//! what nobody has ever looked for. A disk has one name at each moment; no look at another node's directory decides over it.

use std::{
    fs::{File, Metadata, metadata, rename},
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::Path,
};

use ec_model::{InstanceId, NodeId};
use uuid::Uuid;
use virt::connect::Connect;

use crate::{
    disk::{Pool, keep_names, moved_name, second_disk, stands_on_another, volume_name},
    error::CallError,
    volumes,
};

/// Moves the disk into the directory of the other node, which lies beside this one's.
pub(crate) fn hand_over(
    connect: &Connect,
    pool: &Pool,
    volume: InstanceId,
    node: NodeId,
) -> Result<(), CallError> {
    volumes::refuse_used(connect, pool, volume)?;
    let Some(beside) = pool.path.parent() else {
        return Err(CallError::Refused(format!("{} lies beside nothing", pool.path.display())));
    };
    let there = beside.join(node.to_string());
    take_in(connect, pool, volume)?;
    let from = pool.volume_path(volume);
    if let Some(own) = look(&from)? {
        if from.is_symlink() {
            return Err(CallError::Refused(format!(
                "{} is a link, and where it leads lies with this node",
                from.display()
            )));
        }
        volumes::refuse_astray(connect, pool, volume)?;
        let disk = File::open(&from).map_err(|error| CallError::io("read", &from, &error))?;
        if stands_on_another(&disk, &from)? {
            return Err(CallError::Refused("it stands on an image, which lies with this node".to_owned()));
        }
        // The same file may be what was there when it came from there.
        let other = there.join(volume_name(volume));
        if look(&other)?.is_some_and(|other| !is_same(&own, &other)) {
            return Err(CallError::Refused(format!("another disk lies at {}", other.display())));
        }
        let to = there.join(moved_name(volume, Uuid::new_v4()));
        let moved = disk.sync_all().and_then(|()| rename(&from, &to));
        moved.map_err(|error| CallError::io("hand over to", &to, &error))?;
    }
    // The new name lasts before anybody is told that the old one is gone.
    keep_names(&there)?;
    keep_names(&pool.path)?;
    pool.has_changed(connect);
    Ok(())
}

/// Puts a disk in its place that another node has handed over, where one has; whether the volume is there then.
pub(crate) fn take_in(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<bool, CallError> {
    let own = pool.volume_path(volume);
    for come in pool.handed_over(volume)? {
        if pool.has_volume(volume)? {
            return Err(second_disk(&come));
        }
        match rename(&come, &own) {
            // By another look at the same time.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            moved => moved.map_err(|error| CallError::io("put in place", &come, &error))?,
        }
        keep_names(&pool.path)?;
        pool.has_changed(connect);
    }
    pool.has_volume(volume)
}

/// Before a volume is made: an error where another node has a disk of this name on storage that this one shares with it, since whatever etcd
/// says, there is one of a volume. What was handed over is taken in after that look, and so is not missed between both; whether the volume is
/// here then.
pub(crate) fn refuse_second(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<bool, CallError> {
    let Some(beside) = pool.path.parent() else { return pool.has_volume(volume) };
    let failed = |error| CallError::io("list", beside, &error);
    for entry in std::fs::read_dir(beside).map_err(failed)? {
        let directory = entry.map_err(failed)?.path();
        let node = directory.file_name().and_then(|name| name.to_str()?.parse::<NodeId>().ok());
        let Some(node) = node.filter(|_| directory != pool.path) else { continue };
        let there = Pool::new("", &directory);
        if there.has_volume(volume)? || !there.handed_over(volume)?.is_empty() {
            return Err(CallError::NotNow(format!(
                "node {node} has its disk, which is not made once more: `eschedule heal` brings it back"
            )));
        }
    }
    take_in(connect, pool, volume)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn look(path: &Path) -> Result<Option<Metadata>, CallError> {
    match metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CallError::io("look at", path, &error)),
    }
}

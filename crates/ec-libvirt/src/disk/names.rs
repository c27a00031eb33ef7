//! What files of the pool are called, and whose they are by that.

use std::path::Path;

use ec_model::InstanceId;
use uuid::Uuid;

/// Of a disk.
const SUFFIX: &str = ".qcow2";

/// Of the overlay that is to replace the instance's own. No uuid ends so: it is taken for nobody's disk.
const SUCCESSOR_SUFFIX: &str = ".new.qcow2";

/// Of the overlay that an instance is booted from in the place of its own.
const RESCUE_SUFFIX: &str = ".rescue.qcow2";

/// Of a copy that is not whole.
const PART_SUFFIX: &str = ".part.qcow2";

/// Of the copies that a snapshot of several disks has beside its first.
const COPY_SUFFIX: &str = ".copy.qcow2";

/// Of a volume's disk that another node has handed over, until it is put in its place.
const MOVED_SUFFIX: &str = ".moved.qcow2";

/// What a file in the pool is called; nothing that would be ours where that is not UTF-8.
pub(super) fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// For whom a copy is begun that bears this name, and whose disk it is of.
pub(super) fn part(name: &str) -> Option<(InstanceId, InstanceId)> {
    let (owner, from) = name.strip_suffix(PART_SUFFIX)?.split_once('.')?;
    let (from, disk) = from.split_once('.').map_or((from, None), |(from, disk)| (from, Some(disk)));
    if disk.is_some_and(|disk| disk.parse::<InstanceId>().is_err()) {
        return None;
    }
    Some((owner.parse().ok()?, from.parse().ok()?))
}

/// The snapshot of whose copies one bears this name, and the disk that it is of.
pub(super) fn copy(name: &str) -> Option<(InstanceId, InstanceId)> {
    let (snapshot, disk) = name.strip_suffix(COPY_SUFFIX)?.split_once('.')?;
    Some((snapshot.parse().ok()?, disk.parse().ok()?))
}

/// The volume that was handed over by this name.
pub(super) fn moved(name: &str) -> Option<InstanceId> {
    let (volume, once) = name.strip_suffix(MOVED_SUFFIX)?.split_once('.')?;
    once.parse::<Uuid>().ok().and(volume.parse().ok())
}

/// The instance whose disk bears this name.
pub(super) fn volume(name: &str) -> Option<InstanceId> {
    named(name, SUFFIX, volume_name)
}

/// The instance whose disk is to be replaced by the one that bears this name.
pub(super) fn successor(name: &str) -> Option<InstanceId> {
    named(name, SUCCESSOR_SUFFIX, successor_name)
}

/// Whether a file bears a name that only an agent gives.
pub(super) fn is_ours(name: &str) -> bool {
    [volume(name), successor(name), named(name, RESCUE_SUFFIX, rescue_name), moved(name)]
        .iter()
        .any(Option::is_some)
        || part(name).is_some()
        || copy(name).is_some()
}

/// The instance whose file of this kind has that name.
fn named(name: &str, suffix: &str, of: fn(InstanceId) -> String) -> Option<InstanceId> {
    name.strip_suffix(suffix)?.parse().ok().filter(|id| name == of(*id))
}

pub(crate) fn volume_name(instance: InstanceId) -> String {
    format!("{instance}{SUFFIX}")
}

pub(super) fn successor_name(instance: InstanceId) -> String {
    format!("{instance}{SUCCESSOR_SUFFIX}")
}

pub(super) fn rescue_name(instance: InstanceId) -> String {
    format!("{instance}{RESCUE_SUFFIX}")
}

/// Of what is begun for a volume of a disk that this domain has; of several that are copied at once, but for the first, with the
/// disk in its name.
pub(super) fn part_name(volume: InstanceId, from: InstanceId, disk: Option<InstanceId>) -> String {
    let disk = disk.map(|disk| format!(".{disk}")).unwrap_or_default();
    format!("{volume}.{from}{disk}{PART_SUFFIX}")
}

/// Of a snapshot's copy of this disk.
pub(super) fn copy_name(snapshot: InstanceId, disk: InstanceId) -> String {
    format!("{snapshot}.{disk}{COPY_SUFFIX}")
}

/// A name for the disk in another node's directory that nobody has ever used.
pub(crate) fn moved_name(volume: InstanceId, once: Uuid) -> String {
    format!("{volume}.{once}{MOVED_SUFFIX}")
}

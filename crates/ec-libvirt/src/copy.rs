//! Copies of disks, whether a guest writes them meanwhile or not.
//!
//! ```text
//!   nobody is up with them: copied by qemu-img, while guests are kept from starting on them ─────┐
//!   a guest is up with them: empty copies ─▶ frozen ─▶ backup begun ─▶ thawed ─▶ looked after ───┤
//!                                                                                                ▼
//!                                  as large as wanted ─▶ in their places, under their names, the first one last
//! ```
//!
//! A backup is of one moment, and the guest goes on; its agent freezes it for that, where one answers. Until a copy is whole it bears a
//! name that is nobody's disk, with the domain in it that is copied from: whoever finds it after a crash lets that guest go on and ends
//! what was begun. Of several disks the first is in its place once all are.

use std::{
    collections::HashSet,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ec_model::{CopyOf, InstanceId, NodeId};
use virt::{
    connect::Connect,
    domain::Domain,
    error::{Error, ErrorNumber},
};

use crate::{
    disk::{self, Pool},
    domain::{self, Found, LOST_BACKUP},
    error::{CallError, absent, has_code},
    lane::locked,
    sys::{self, LastBackup},
    volumes,
    xml::{self, BackupXml, VolumeXml},
};

/// What is to be copied, and for whom.
#[derive(Debug, Clone)]
pub(crate) struct Copy {
    /// Whose disk, or for whom.
    pub(crate) owner: InstanceId,
    /// What is copied.
    pub(crate) of: CopyOf,
    /// In bytes, or where `None` that of what is copied. Of several disks the most that they may have together.
    pub(crate) capacity: Option<u64>,
    /// Where it lies when it is whole; of several the first.
    pub(crate) place: PathBuf,
}

/// So long an agent that does not answer is asked to let its guest's file systems go on.
const TRIES_TO_THAW: Duration = Duration::from_mins(10);

/// Why a copy is not made, or not to its end.
const NO_ROOM: &str = "the file system of the disks has no room for it beside what guests' disks may grow to";

/// A backup that libvirt is at.
#[derive(Debug, Clone)]
pub(crate) struct Copying {
    from: InstanceId,
    /// Which run of it: libvirt's number of the domain.
    run: Option<u32>,
    parts: Vec<Part>,
    /// Its guest's file systems were brought to rest.
    is_frozen: bool,
    /// They may be so still: its agent did not let them go on.
    owes: Arc<AtomicBool>,
    begun: Instant,
    /// What came of a backup libvirt tells until the next one begins: nobody begins another before that was heard. Nor while its
    /// guest may stand still for this one: to let it go on would undo that its file systems are at rest for the other.
    _turn: Arc<Turn>,
}

impl Copying {
    /// The guest whose disks are copied.
    pub(crate) fn from(&self) -> InstanceId {
        self.from
    }
}

/// The guests whose disks this agent has libvirt copy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turns(Arc<Mutex<HashSet<InstanceId>>>);

/// That it is one of them, until nobody asks any more what came of it.
#[derive(Debug)]
struct Turn {
    of: InstanceId,
    turns: Turns,
}

impl Turns {
    fn take(&self, of: InstanceId) -> Option<Arc<Turn>> {
        locked(&self.0).insert(of).then(|| Arc::new(Turn { of, turns: self.clone() }))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        locked(&self.turns.0).remove(&self.of);
    }
}

/// A copy that is not whole, and where it will lie.
#[derive(Debug, Clone)]
struct Part {
    file: PathBuf,
    place: PathBuf,
}

/// A disk to be copied.
struct Original {
    /// Whose.
    disk: InstanceId,
    path: PathBuf,
    /// In bytes.
    capacity: u64,
    /// Where the copy will lie.
    place: PathBuf,
    /// As whose, and as which device a guest that is up has it.
    user: Option<(Domain, InstanceId, String)>,
}

impl Original {
    /// Its copy until that is whole: for whom, of whose disks, and the how manyth of them.
    fn part(&self, pool: &Pool, owner: InstanceId, from: InstanceId, number: usize) -> Part {
        let file = pool.part_path(owner, from, (number > 0).then_some(self.disk));
        Part { file, place: self.place.clone() }
    }
}

/// Makes the copy where no guest is up with what is copied, and begins to where one is.
pub(crate) fn begin(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    copy: &Copy,
    turns: &Turns,
) -> Result<Option<Copying>, CallError> {
    give_up(connect, node, pool, copy.owner)?;
    let originals = originals(connect, node, pool, copy)?;
    let has = originals.iter().map(|original| original.capacity).fold(0, u64::saturating_add);
    if let Some(capacity) = copy.capacity.filter(|capacity| *capacity < has) {
        return Err(CallError::Refused(format!(
            "it is to have {capacity} bytes, but what it is a copy of has {has}; give it at least that"
        )));
    }
    // What it is made of may have more than its own file has.
    let takes = |original: &Original| original.path.metadata().map_or(0, |file| file.blocks() * 512);
    if pool.room_for_copies()? < originals.iter().map(takes).fold(0, u64::saturating_add) {
        return Err(CallError::Refused(format!("it is not begun: {NO_ROOM}")));
    }
    let mut users = originals.iter().map(|original| original.user.as_ref().map(|(_, from, _)| *from));
    let user = users.next().flatten();
    if let Some(place) = users.position(|other| other != user) {
        return Err(CallError::Refused(format!(
            "they cannot be copied at one moment: volume {} is not with the guest that has the first",
            originals[place + 1].disk
        )));
    }
    match originals.first().and_then(|first| first.user.as_ref()) {
        None => cold(connect, node, pool, copy, &originals).map(|()| None),
        Some((domain, from, _)) => {
            let turn = turns.take(*from).ok_or_else(|| busy(*from))?;
            live(connect, pool, copy.owner, &originals, (domain, *from), turn).map(Some)
        }
    }
}

/// What is to be copied, as it is.
fn originals(connect: &Connect, node: NodeId, pool: &Pool, copy: &Copy) -> Result<Vec<Original>, CallError> {
    let CopyOf { disk, held, ref beside, .. } = copy.of;
    for disk in std::iter::once(&disk).chain(beside) {
        volumes::refuse_astray(connect, pool, *disk)?;
    }
    let original = |disk, path: PathBuf, place: PathBuf, user| {
        // libvirt reads a size out of whatever lies there, and cannot look for what it does not know while it copies another.
        let capacity = pool.capacity_at(&path)?.ok_or_else(|| nothing_of(disk))?;
        Ok(Original { disk, path, capacity, place, user })
    };
    let first = match held {
        // Those are in no guest.
        Some(held) => original(disk, pool.copy_path(disk, held), copy.place.clone(), None),
        None => original(disk, pool.volume_path(disk), copy.place.clone(), user(connect, node, pool, disk)?),
    };
    let others = beside.iter().map(|volume| {
        let place = pool.copy_path(copy.owner, *volume);
        original(*volume, pool.volume_path(*volume), place, user(connect, node, pool, *volume)?)
    });
    std::iter::once(first).chain(others).collect()
}

fn nothing_of(disk: InstanceId) -> CallError {
    CallError::Refused(format!("there is no disk of {disk} to copy"))
}

/// Copies what nobody is up with.
fn cold(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    copy: &Copy,
    originals: &[Original],
) -> Result<(), CallError> {
    let volume =
        |Original { disk, path, .. }: &Original| pool.at(connect, path)?.ok_or_else(|| nothing_of(*disk));
    let volumes = originals.iter().map(volume).collect::<Result<Vec<_>, _>>()?;
    // What copies one keeps guests from starting on that; between two of them this does.
    let mut kept = Vec::new();
    if let [_, _, ..] = originals {
        for original in originals {
            let path = pool.volume_path(original.disk);
            let locked = disk::keep_from_writing(&path);
            kept.push(locked.map_err(|error| CallError::io("keep guests from writing", &path, &error))?);
        }
        for Original { disk, .. } in originals {
            if let Some((_, from, _)) = user(connect, node, pool, *disk)? {
                return Err(CallError::NotNow(format!("{from} was started before its disks were copied")));
            }
        }
    }
    let mut parts = Vec::new();
    for (number, (original, volume)) in originals.iter().zip(&volumes).enumerate() {
        let part = original.part(pool, copy.owner, original.disk, number);
        // Of a single one it grows before it is copied: that costs nothing.
        let capacity = copy.capacity.filter(|_| originals.len() == 1).unwrap_or(original.capacity);
        let made = pool.create(connect, &part.file, |name| VolumeXml::alone(name, capacity), Some(volume));
        match (made, user(connect, node, pool, original.disk)?) {
            // It was started before anything kept it from that.
            (Err(_), Some((_, from, _))) => {
                return Err(CallError::NotNow(format!("{from} was started before its disk was copied")));
            }
            (made, _) => made?,
        }
        parts.push(part);
    }
    end(connect, pool, copy, &parts)
}

/// Has libvirt begin to copy what a guest is up with.
fn live(
    connect: &Connect,
    pool: &Pool,
    owner: InstanceId,
    originals: &[Original],
    (domain, from): (&Domain, InstanceId),
    turn: Arc<Turn>,
) -> Result<Copying, CallError> {
    if sys::backup(domain)?.is_some() {
        return Err(busy(from));
    }
    if sys::has_lost_backup(domain) {
        return Err(CallError::NotNow(LOST_BACKUP.to_owned()));
    }
    let mut parts = Vec::new();
    for (number, original) in originals.iter().enumerate() {
        let part = original.part(pool, owner, from, number);
        pool.create(connect, &part.file, |name| VolumeXml::alone(name, original.capacity), None)?;
        parts.push(part);
    }
    let mut disks = Vec::new();
    for (original, part) in originals.iter().zip(&parts) {
        let device = original.user.as_ref().map_or("", |(_, _, device)| device);
        disks.push((device, xml::utf8(&part.file).map_err(CallError::Refused)?));
    }
    let document = xml::write(&BackupXml::new(disks)).map_err(CallError::Refused)?;
    let asked = Instant::now();
    let rest = bring_to_rest(domain);
    let is_frozen = matches!(rest, Rest::Frozen);
    let begun = sys::begin_backup(domain, &document);
    // What is left of it where this does not begin has it tried again.
    let owes = rest.may_be_frozen() && owes_thaw(domain, is_frozen);
    match begun {
        Ok(()) => {
            if let Rest::Refused { why, .. } = rest {
                tracing::warn!(
                    instance = %from,
                    why = why.message(),
                    "its agent did not bring its file systems to rest: its disks are copied as if its power failed"
                );
            }
            Ok(Copying {
                from,
                run: domain.id(),
                parts,
                is_frozen,
                owes: Arc::new(AtomicBool::new(owes)),
                begun: asked,
                _turn: turn,
            })
        }
        // What nobody is up with is copied otherwise.
        Err(_) if !domain.is_active()? => Err(ended(from)),
        Err(error) => {
            for Original { disk, user, .. } in originals {
                let device = user.as_ref().map_or("", |(_, _, device)| device);
                if !volumes::is_up_with(domain, pool, *disk, device)? {
                    return Err(CallError::NotNow(format!("the disks of {from} were changed meanwhile")));
                }
            }
            Err(error.into())
        }
    }
}

/// How far a backup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// libvirt is at it.
    UnderWay,
    /// It is over, but its guest may stand still for it, which its agent is asked again and again to end.
    Over,
    /// It came to its end, and is in its place.
    Done,
}

/// Looks how far it is, and puts it in its place at its end.
pub(crate) fn look_after(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    copy: &Copy,
    Copying { from, run, parts, is_frozen, owes, begun, .. }: &Copying,
) -> Result<Progress, CallError> {
    let Found::Ours(domain) = domain::find(connect, node, *from)? else { return Err(ended(*from)) };
    // It was ended and started again since the last look.
    if domain.is_active()? && domain.id() != *run {
        return Err(ended(*from));
    }
    if owes.load(Ordering::Relaxed) {
        owes.store(owes_thaw(&domain, *is_frozen), Ordering::Relaxed);
    }
    let first = parts.first().map(|part| part.file.as_path()).unwrap_or(Path::new(""));
    if is_backup_to(&domain, first)? {
        // One that has come to its end meanwhile is not broken off.
        if pool.room_for_copies()? == 0 && sys::abort_job(&domain).is_ok() {
            return Err(CallError::Refused(format!("it was broken off: {NO_ROOM}")));
        }
        return Ok(Progress::UnderWay);
    }
    // It is told of as ended before QEMU has let go of the files.
    for Part { file, .. } in parts {
        if disk::is_locked(file).map_err(|error| CallError::io("look at", file, &error))? {
            return Ok(Progress::UnderWay);
        }
    }
    if !domain.is_active()? {
        return Err(ended(*from));
    }
    // Nobody is told that it is done while its guest may stand still for it; and whoever finds its parts after a crash lets that
    // go on.
    if owes.load(Ordering::Relaxed) && begun.elapsed() < TRIES_TO_THAW {
        return Ok(Progress::Over);
    }
    match sys::last_backup(&domain)? {
        LastBackup::Completed => end(connect, pool, copy, parts).map(|()| Progress::Done),
        LastBackup::Failed => Err(CallError::Refused(
            "libvirt broke it off: its host's disk is full, say, or somebody ended it (`virsh domjobabort`)"
                .to_owned(),
        )),
        // It may be whole, or not: it is begun once more.
        LastBackup::Unknown => {
            Err(CallError::NotNow(format!("libvirt does not tell what became of the copy from {from}")))
        }
    }
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
            let owes = owes_thaw(&domain, false);
            if is_backup_to(&domain, &part)?
                && let Err(error) = sys::abort_job(&domain)
                && is_backup_to(&domain, &part)?
            {
                // A libvirtd that was started anew knows of the backup before it knows of the job.
                return Err(CallError::NotNow(format!("its last copy cannot be ended: {}", error.message())));
            }
            if owes && is_to_be_thawed(pool, &part) {
                return Err(CallError::NotNow(format!(
                    "the agent in {from} does not answer, and may hold its file systems at rest for the last copy"
                )));
            }
        }
        pool.drop_part(connect, &part)?;
    }
    Ok(())
}

/// What became of a guest's file systems that were to come to rest.
enum Rest {
    Frozen,
    /// It has no agent, and is copied as if its power had failed.
    NoAgent,
    Refused {
        why: Error,
        /// Its agent did not answer in time, and may do it yet.
        was_sent: bool,
    },
}

impl Rest {
    fn may_be_frozen(&self) -> bool {
        matches!(self, Self::Frozen | Self::Refused { was_sent: true, .. })
    }
}

/// Has the guest's agent bring its file systems to rest. One that hangs is not asked for that: it would do it whenever it goes on, and its
/// guest would have to be watched until then.
fn bring_to_rest(domain: &Domain) -> Rest {
    let asked = Instant::now();
    match sys::ping(domain) {
        Err(why) if was_waited_for(asked) => return Rest::Refused { why, was_sent: false },
        Err(why) if is_without_agent(&why) => return Rest::NoAgent,
        // Whatever else it says is an answer.
        Ok(()) | Err(_) => {}
    }
    let asked = Instant::now();
    match sys::freeze(domain) {
        Ok(()) => Rest::Frozen,
        Err(why) => Rest::Refused { why, was_sent: was_waited_for(asked) },
    }
}

/// Whether libvirt has no agent to ask: there is none, it is not connected, or the guest is paused.
fn is_without_agent(error: &Error) -> bool {
    [ErrorNumber::AgentUnresponsive, ErrorNumber::ArgumentUnsupported, ErrorNumber::OperationInvalid]
        .into_iter()
        .any(|code| has_code(error, code))
}

/// Whether an agent was waited for in vain since then: what it was asked for it may do yet. Where there is none, that is told at once.
fn was_waited_for(asked: Instant) -> bool {
    asked.elapsed() > Duration::from_secs(1)
}

/// Lets the guest's file systems go on; whether that has to be tried again: where they are at rest for certain, whatever it came to.
fn owes_thaw(domain: &Domain, is_frozen: bool) -> bool {
    let asked = Instant::now();
    sys::thaw(domain).is_err() && (is_frozen || was_waited_for(asked))
}

/// Whether an agent that does not answer is asked on to let its guest go on, which may stand still for this part.
fn is_to_be_thawed(pool: &Pool, part: &Path) -> bool {
    pool.found_for(part) < TRIES_TO_THAW
}

fn busy(from: InstanceId) -> CallError {
    CallError::NotNow(format!("a disk of {from} is being copied already"))
}

fn ended(from: InstanceId) -> CallError {
    CallError::NotNow(format!("{from} ended before its disk was copied"))
}

fn is_backup_to(domain: &Domain, part: &Path) -> Result<bool, CallError> {
    if !domain.is_active()? {
        return Ok(false);
    }
    let Some(document) = sys::backup(domain)? else { return Ok(false) };
    let files = xml::backup_files(&document).map_err(CallError::Refused)?;
    Ok(files.iter().any(|file| Path::new(file) == part))
}

/// The domain that is up with this disk, its own or a volume, whose it is, and as which device; an error for now where that is
/// none of this node's.
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
    let Some(user) = volumes::user_of(connect, pool, of)? else { return Ok(None) };
    let Some(device) = user.device.clone() else { return Ok(None) };
    user.refuse_foreign(node)?;
    Ok(Some((user.domain, user.instance, device)))
}

/// Puts copies that are whole in their places; the first last, which is there once all are.
fn end(connect: &Connect, pool: &Pool, copy: &Copy, parts: &[Part]) -> Result<(), CallError> {
    for Part { file, .. } in parts {
        let made = connect.lookup_storage_vol_by_path(xml::utf8(file).map_err(CallError::Refused)?);
        let made = absent(made, ErrorNumber::NoStorageVolume)?;
        let made = made.ok_or_else(|| CallError::NotNow("the copy was taken away meanwhile".to_owned()))?;
        if let (Some(capacity), [_]) = (copy.capacity, parts)
            && made.info()?.capacity < capacity
        {
            made.resize(capacity, 0)?;
        }
    }
    parts.iter().rev().try_for_each(|Part { file, place }| pool.put_in_place(connect, file, place, || Ok(())))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_may_stand_still_for_a_part_is_asked_to_go_on_whatever_time_the_part_is_of() {
        let directory = tempfile::tempdir().unwrap();
        let pool = Pool::new("p", directory.path());
        let [owner, from] = [1, 2].map(|number| InstanceId::new(uuid::Uuid::from_u128(number)));
        let part = pool.part_path(owner, from, None);
        let file = std::fs::File::create(&part).unwrap();
        // By a host whose clock is behind, and before this one's was set.
        for written in [SystemTime::now() - 2 * TRIES_TO_THAW, SystemTime::now() + 2 * TRIES_TO_THAW] {
            file.set_modified(written).unwrap();
            assert!(is_to_be_thawed(&pool, &part));
        }
        tokio::time::advance(TRIES_TO_THAW - Duration::from_secs(1)).await;
        assert!(is_to_be_thawed(&pool, &part));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!is_to_be_thawed(&pool, &part), "it does not answer");
        assert!(is_to_be_thawed(&pool, &pool.part_path(from, owner, None)), "another's");
    }
}

//! The volumes that domains have.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use ec_hypervisor::DomainSpec;
use ec_model::{Attachment, BEING_COPIED, InstanceId, NodeId, Observed};
use virt::{connect::Connect, domain::Domain, error::ErrorNumber, sys};

use crate::{
    disk::{self, Pool},
    domain::{self, Found, Whose, ours},
    error::{CallError, absent, has_code, unless_locked},
    process,
    sys::backup,
    xml::{self, DiskFile, DiskXml, VolumeFile},
};

/// A guest lets go of a disk by itself, and is waited for so long; one whose system is not up yet does not hear at all.
const PATIENCE: Duration = Duration::from_secs(5);

/// So long one after the other is asked for: libvirt waits by itself for each, unless that was asked for before.
const ASKING: Duration = Duration::from_secs(15);

/// Between two looks whether it has.
const PAUSE: Duration = Duration::from_millis(20);

/// Which of a domain's documents.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// That of the guest that is up.
    Up,
    /// That of the next start.
    Next,
}

impl Which {
    /// How libvirt is told to read it, and to change it.
    fn flags(self) -> (u32, u32) {
        match self {
            Self::Up => (0, sys::VIR_DOMAIN_AFFECT_LIVE),
            Self::Next => (sys::VIR_DOMAIN_XML_INACTIVE, sys::VIR_DOMAIN_AFFECT_CONFIG),
        }
    }

    /// Those that there are of a domain.
    fn of(domain: &Domain) -> Result<Vec<Self>, virt::error::Error> {
        let is_up = domain.is_active()?.then_some(Self::Up);
        let is_for_good = domain.is_persistent()?.then_some(Self::Next);
        Ok(is_up.into_iter().chain(is_for_good).collect())
    }
}

/// A disk of an instance that a domain has.
struct Has {
    attachment: Attachment,
    /// Where it lies, which somebody may have changed.
    file: String,
}

impl Has {
    /// An error where another file is in the place of the volume's: what a guest wrote last would be left where nobody looks for it.
    fn refuse_astray(&self, pool: &Pool, which: Which) -> Result<(), CallError> {
        let volume = self.attachment.volume;
        if pool.owner(&self.file) == Some(volume) {
            return Ok(());
        }
        Err(moved_to(&self.file, pool, volume, which == Which::Up))
    }
}

/// The disks of instances that a domain has in one of its documents, its own among them. A volume's has its uuid as its serial number,
/// wherever somebody moved it.
fn disks(domain: &Domain, pool: &Pool, which: Which) -> Result<Vec<Has>, CallError> {
    has_of(&domain.xml_desc(which.flags().0)?, pool)
}

fn has_of(document: &str, pool: &Pool) -> Result<Vec<Has>, CallError> {
    let owned =
        pool.disks_of(document)?.into_iter().filter_map(|DiskFile { file, device, serial, .. }| {
            let volume = pool.owner(&file).or_else(|| serial?.parse().ok())?;
            Some(Has { attachment: Attachment { volume, device }, file })
        });
    Ok(owned.collect())
}

/// The volumes that a domain has in one of its documents, and where they lie.
fn files_in(domain: &Domain, pool: &Pool, instance: InstanceId, which: Which) -> Result<Vec<Has>, CallError> {
    let mut volumes = disks(domain, pool, which)?;
    volumes.retain(|has| has.attachment.volume != instance);
    Ok(volumes)
}

fn volumes_in(
    domain: &Domain,
    pool: &Pool,
    instance: InstanceId,
    which: Which,
) -> Result<Vec<Attachment>, CallError> {
    let files = files_in(domain, pool, instance, which)?;
    Ok(files.into_iter().map(|has| has.attachment).collect())
}

/// An error where a domain has another file in the place of this disk, which is what it was before somebody moved it or made a snapshot.
pub(crate) fn refuse_astray(connect: &Connect, pool: &Pool, disk: InstanceId) -> Result<(), CallError> {
    let own = absent(connect.lookup_domain_by_uuid(disk.uuid()), ErrorNumber::NoDomain)?;
    let Some(domain) = own else {
        // A volume, which any may have.
        return refuse_moved(&uses(connect, pool, disk)?, pool, disk);
    };
    let looked = own_astray(&domain, pool, disk).and_then(|astray| Ok((astray, domain.is_active()?)));
    let (astray, is_up) = match looked {
        // It may go at any moment, and has nothing then.
        Err(CallError::Libvirt(error)) => match absent(Err(error), ErrorNumber::NoDomain)? {
            Some(looked) => looked,
            None => return pool.refuse_snapshots(disk),
        },
        looked => looked?,
    };
    match astray {
        None if is_up => Ok(()),
        None => pool.refuse_newer_snapshots(disk),
        Some(Astray::In(file)) => Err(moved_to(&file, pool, disk, is_up)),
        Some(Astray::Nowhere) => {
            // Nor is it attached below one.
            pool.refuse_snapshots(disk)?;
            Err(CallError::Refused(format!(
                "its domain has neither {} nor another disk in the place of that: attach it again, or take that file away",
                pool.volume_path(disk).display()
            )))
        }
    }
}

/// An error where a guest would be started on a file in a disk's place on which a snapshot stands that was written since. One that was
/// made while the guest was up from its rescue disk is in no definition that is kept, and is lost with the first byte written below it. Not
/// asked of what is up, nor of saved memory, which goes on with the files that it had.
pub(crate) fn refuse_stale(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    instance: InstanceId,
) -> Result<(), CallError> {
    let Some(domain) = to_be_booted(connect, node, instance)? else { return Ok(()) };
    let disks = disks(&domain, pool, Which::Next)?;
    // What the definition has elsewhere is what its guest wrote last.
    let mut in_place = disks.iter().filter(|has| pool.owner(&has.file) == Some(has.attachment.volume));
    in_place.try_for_each(|has| pool.refuse_newer_snapshots(has.attachment.volume))
}

/// The same where it is started from its rescue disk, with this one in its place as the second, wherever the definition has it.
pub(crate) fn refuse_stale_second(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    spec: &DomainSpec,
) -> Result<(), CallError> {
    if to_be_booted(connect, node, spec.instance)?.is_none() {
        return Ok(());
    }
    let second = spec.root().unwrap_or(spec.instance);
    refuse_astray(connect, pool, second)?;
    pool.refuse_newer_snapshots(second)
}

/// The domain, where a start boots it: it is down, and has no saved memory.
fn to_be_booted(connect: &Connect, node: NodeId, instance: InstanceId) -> Result<Option<Domain>, CallError> {
    let domain = ours(connect, node, instance)?;
    Ok(if domain.is_active()? || domain::is_saved(&domain)? { None } else { Some(domain) })
}

/// The same of a volume, by all that have it. Which file of it was written last only these know.
fn refuse_moved(uses: &[Use], pool: &Pool, volume: InstanceId) -> Result<(), CallError> {
    if uses.is_empty() {
        return pool.refuse_snapshots(volume);
    }
    pool.refuse_handed_over(volume)?;
    uses.iter().try_for_each(|one| one.has.refuse_astray(pool, one.which))
}

fn moved_to(file: &str, pool: &Pool, disk: InstanceId, is_up: bool) -> CallError {
    let place = pool.volume_path(disk);
    let place = place.display();
    let path = Path::new(file);
    // A guest that is up writes its file also where nobody finds that any more.
    if !is_up && path.is_absolute() && path.try_exists().is_ok_and(|is_there| !is_there) {
        return CallError::Refused(format!(
            "its domain has {file}, which is not there, and not {place}: bring that file back, or, where all that it held is in {place} by now, \
             have the domain name this instead, without a `<backingStore>` (`virsh edit`)"
        ));
    }
    // Of what is none, a commit writes into the image which others stand on, too.
    let how = match pool.is_layer_on(path, disk) {
        Ok(true) => "`virsh blockcommit --shallow --active --pivot`",
        Ok(false) | Err(_) => "`virsh blockcopy --reuse-external --format qcow2 --pivot`",
    };
    CallError::Refused(format!(
        "its domain has {file}, where the guest writes, and not {place}, which somebody left behind: bring it back there while the guest is up \
         ({how}), or define the domain by hand"
    ))
}

/// Where a domain has its own disk, which is not in its place.
#[derive(Debug, PartialEq, Eq)]
enum Astray {
    In(String),
    /// It has none, and the file in its place is none that its guest writes.
    Nowhere,
}

/// What a domain has in the place of its own disk.
fn own_astray(domain: &Domain, pool: &Pool, instance: InstanceId) -> Result<Option<Astray>, CallError> {
    let mut documents = Vec::new();
    for which in Which::of(domain)? {
        documents.push(domain.xml_desc(which.flags().0)?);
    }
    astray_in(&documents, pool, instance)
}

/// What goes with the domain, since only that tells whose it is: a file beside its disk that it has in the place of that. What lies
/// elsewhere stays there.
pub(crate) fn own_beside(
    domain: &Domain,
    pool: &Pool,
    instance: InstanceId,
) -> Result<Vec<PathBuf>, CallError> {
    let look = || -> Result<Vec<PathBuf>, CallError> {
        let mut files = Vec::new();
        for which in Which::of(domain)? {
            if let Some(Astray::In(file)) = astray_in(&[domain.xml_desc(which.flags().0)?], pool, instance)? {
                files.push(PathBuf::from(file));
            }
        }
        Ok(files)
    };
    let mut files = match look() {
        Err(CallError::Libvirt(error)) => absent(Err(error), ErrorNumber::NoDomain)?.unwrap_or_default(),
        files => files?,
    };
    files.retain(|file| pool.is_named_by(file, instance));
    files.dedup();
    Ok(files)
}

/// An error where a domain has another file in the place of a volume's: once the domain is gone nobody knows of that file, and who is
/// given the volume next would have what it was before. What stands on it beside it is found then, too.
pub(crate) fn refuse_to_forget(domain: &Domain, pool: &Pool, instance: InstanceId) -> Result<(), CallError> {
    let look = || -> Result<(), CallError> {
        for which in Which::of(domain)? {
            for has in files_in(domain, pool, instance, which)? {
                let (volume, file) = (has.attachment.volume, Path::new(&has.file));
                let is_in_place = pool.owner(&has.file) == Some(volume);
                if !(is_in_place || pool.is_named_by(file, volume) && pool.is_layer_on(file, volume)?) {
                    has.refuse_astray(pool, which)?;
                }
            }
        }
        Ok(())
    };
    match look() {
        // It went at this moment.
        Err(CallError::Libvirt(error)) if has_code(&error, ErrorNumber::NoDomain) => Ok(()),
        looked => looked,
    }
}

/// The same, by the domain's documents. Whatever somebody made of it (a file elsewhere, a block device, on another bus), it is no volume,
/// which has a serial number, and no rescue disk; and it comes before others that somebody gave the domain beside it.
fn astray_in(documents: &[String], pool: &Pool, instance: InstanceId) -> Result<Option<Astray>, CallError> {
    let [place, rescue] = [pool.volume_path(instance), pool.rescue_path(instance)];
    for document in documents {
        let of_others = has_of(document, pool)?.into_iter().map(|has| has.attachment);
        // Up from its rescue disk it has that beside it.
        if of_others.filter(|has| has.volume != instance).any(|has| has.is_root()) {
            return Ok(None);
        }
    }
    for document in documents {
        let files = pool.disks_of(document)?;
        if files.iter().any(|has| Path::new(&has.file) == place) {
            continue;
        }
        let is_own = |has: &DiskFile| {
            has.is_disk
                && has.serial.is_none()
                && Path::new(&has.file) != rescue
                && pool.owner(&has.file).is_none()
        };
        if let Some(other) = files.into_iter().find(is_own) {
            return Ok(Some(Astray::In(other.file)));
        }
        if pool.has_volume(instance)? {
            return Ok(Some(Astray::Nowhere));
        }
    }
    Ok(None)
}

/// As which device the guest that is up has this disk.
pub(crate) fn device_of(domain: &Domain, pool: &Pool, disk: InstanceId) -> Result<Option<String>, CallError> {
    let has = disks(domain, pool, Which::Up)?.into_iter().find(|has| has.attachment.volume == disk);
    Ok(has.map(|has| has.attachment.device))
}

/// Whether the domain is up still, and has this disk as that device.
pub(crate) fn is_up_with(
    domain: &Domain,
    pool: &Pool,
    disk: InstanceId,
    device: &str,
) -> Result<bool, CallError> {
    let is_up = absent(domain.is_active(), ErrorNumber::NoDomain)?.unwrap_or_default();
    Ok(is_up && device_of(domain, pool, disk)?.as_deref() == Some(device))
}

/// The volumes of a domain, as [`Observed::volumes`] has them. Memory that was saved goes on with what its guest had.
/// Of one that is up from its rescue disk, which has none, or whose memory is saved, only the definition counts.
pub(crate) fn fingerprint(
    domain: &Domain,
    pool: &Pool,
    instance: InstanceId,
    is_rescued: bool,
) -> Result<u64, CallError> {
    let mut fingerprints = Vec::new();
    let documents = Which::of(domain)?;
    for which in documents.iter().filter(|which| !(is_rescued && **which == Which::Up)) {
        fingerprints.push(Attachment::fingerprint(&volumes_in(domain, pool, instance, *which)?));
    }
    if !(is_rescued || documents.contains(&Which::Up))
        && let Some(saved) = saved_with(domain, pool)?
    {
        let saved = saved.into_iter().map(|has| has.attachment).filter(|has| has.volume != instance);
        fingerprints.push(Attachment::fingerprint(&saved.collect::<Vec<_>>()));
    }
    Ok(match fingerprints.as_slice() {
        [] => 0,
        [first, others @ ..] if others.iter().all(|other| other == first) => *first,
        _ => Observed::OTHER_VOLUMES,
    })
}

/// The volumes that a domain has in any of its documents, that of its saved memory among them.
pub(crate) fn all_of(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    instance: InstanceId,
) -> Result<Vec<Attachment>, CallError> {
    let Found::Ours(domain) = domain::find(connect, node, instance)? else { return Ok(Vec::new()) };
    let mut all = BTreeSet::new();
    let documents = Which::of(&domain)?;
    for which in &documents {
        all.extend(volumes_in(&domain, pool, instance, *which)?);
    }
    if !documents.contains(&Which::Up) {
        let saved = saved_with(&domain, pool)?.into_iter().flatten().map(|has| has.attachment);
        all.extend(saved.filter(|has| has.volume != instance));
    }
    Ok(all.into_iter().collect())
}

/// A domain that has this volume, whosever it is, and the device as which its guest has it, where that is up.
pub(crate) struct User {
    pub(crate) domain: Domain,
    pub(crate) instance: InstanceId,
    pub(crate) device: Option<String>,
}

impl User {
    /// An error for now where the domain is none of this node's: its guest is not ours to freeze, or to have grow.
    pub(crate) fn refuse_foreign(&self, node: NodeId) -> Result<(), CallError> {
        match domain::whose(&self.domain, node)? {
            Whose::Foreign => Err(CallError::NotNow(format!(
                "the domain {} is up with it, and is not this node's: end it, or take the disk from it",
                self.instance
            ))),
            Whose::Ours(_) | Whose::Nobodys => Ok(()),
        }
    }
}

/// One document in which a domain has a volume.
struct Use {
    domain: Domain,
    instance: InstanceId,
    which: Which,
    has: Has,
}

/// All documents in which domains have this volume.
fn uses(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<Vec<Use>, CallError> {
    let mut uses = Vec::new();
    for domain in connect.list_all_domains(0)? {
        let instance = InstanceId::new(domain.uuid()?);
        if instance == volume {
            continue;
        }
        // It may go at any moment, and has nothing then.
        let Some(documents) = absent(Which::of(&domain), ErrorNumber::NoDomain)? else { continue };
        let is_up = documents.contains(&Which::Up);
        for which in documents {
            let has = match disks(&domain, pool, which) {
                Err(CallError::Libvirt(error)) => {
                    absent(Err(error), ErrorNumber::NoDomain)?.unwrap_or_default()
                }
                has => has?,
            };
            let has = has.into_iter().find(|has| has.attachment.volume == volume);
            uses.extend(has.map(|has| Use { domain: domain.clone(), instance, which, has }));
        }
        // None has saved memory while it is up.
        let saved = if is_up { None } else { saved_with(&domain, pool)? };
        let has = saved.into_iter().flatten().find(|has| has.attachment.volume == volume);
        uses.extend(has.map(|has| Use { domain, instance, which: Which::Next, has }));
    }
    Ok(uses)
}

/// The disks of instances that the guest has whose memory is saved with the domain, whatever its next start would have; none where there
/// is no such memory.
fn saved_with(domain: &Domain, pool: &Pool) -> Result<Option<Vec<Has>>, CallError> {
    let document = absent(domain::saved_document(domain), ErrorNumber::NoDomain)?.flatten();
    document.map(|document| has_of(&document, pool)).transpose()
}

/// One whose guest is up with it, where there is any.
fn foremost(mut uses: Vec<Use>) -> Option<User> {
    uses.sort_by_key(|one| one.which == Which::Next);
    let Use { domain, instance, which, has } = uses.into_iter().next()?;
    let device = (which == Which::Up).then_some(has.attachment.device);
    Some(User { domain, instance, device })
}

/// Looks whether a domain has this volume: one whose guest is up with it, where there is any.
pub(crate) fn user_of(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<Option<User>, CallError> {
    Ok(foremost(uses(connect, pool, volume)?))
}

/// An error where a domain has this volume.
pub(crate) fn refuse_used(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<(), CallError> {
    match user_of(connect, pool, volume)? {
        Some(user) => Err(CallError::NotNow(format!("the domain {} has it", user.instance))),
        None => refuse_written(pool, volume),
    }
}

/// An error for now where somebody writes a disk that no domain here has: its guest runs on another host, by a node that was cloned.
pub(crate) fn refuse_written(pool: &Pool, volume: InstanceId) -> Result<(), CallError> {
    let path = pool.volume_path(volume);
    match disk::is_written(&path) {
        Ok(false) => Ok(()),
        Ok(true) => {
            let path = path.display();
            Err(CallError::NotNow(match process::guest_with(&pool.volume_path(volume)) {
                Some(guest) => format!(
                    "{path} is written by the guest {guest}, and libvirt does not know that it has it, since its daemon ended while it gave it: \
                     `eschedule reboot --hard {guest}` has the guest let go of it"
                ),
                None => format!(
                    "{path} is written by somebody, and libvirt knows no domain here that has it: either a guest has it that was being given \
                     it when libvirt's daemon ended (`eschedule reboot --hard` of the instance that was to have it has the guest let go of it), \
                     or this node is on another host, too"
                ),
            }))
        }
        Err(error) => Err(CallError::io("look at", &path, &error)),
    }
}

/// Whether a domain boots from a volume, unless it is up from its rescue disk and defined no more; one that went does not.
pub(crate) fn has_root(domain: &Domain, pool: &Pool, instance: InstanceId) -> Result<bool, CallError> {
    let look = || {
        for which in Which::of(domain)? {
            if Attachment::root_of(&volumes_in(domain, pool, instance, which)?).is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    };
    match look() {
        Err(CallError::Libvirt(error)) => Ok(absent(Err(error), ErrorNumber::NoDomain)?.unwrap_or_default()),
        has => has,
    }
}

/// An error where a domain cannot boot from the volume that it is to boot from.
pub(crate) fn refuse_root(connect: &Connect, pool: &Pool, spec: &DomainSpec) -> Result<(), CallError> {
    let Some(root) = spec.root() else { return Ok(()) };
    refuse_unusable(connect, pool, spec.instance, root)
}

/// An error where the domain boots from another disk than this says: a guest that is up would find another one at its next start.
pub(crate) fn refuse_other(domain: &Domain, pool: &Pool, spec: &DomainSpec) -> Result<(), CallError> {
    let boots_from = spec.root().unwrap_or(spec.instance);
    for which in Which::of(domain)? {
        let disks = disks(domain, pool, which)?;
        // A rescue disk is nobody's.
        if disks.iter().any(|has| has.attachment.is_root() && has.attachment.volume != boots_from) {
            return Err(CallError::Refused("the domain boots from another disk, and stays so".into()));
        }
    }
    Ok(())
}

/// The volumes that a domain has and keeps when the rest of it is defined anew, that which it boots from among them; an error
/// where it boots from another disk. Nothing where it went meanwhile.
pub(crate) fn kept(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    spec: &DomainSpec,
) -> Result<Option<Vec<Attachment>>, CallError> {
    let Found::Ours(domain) = domain::find(connect, node, spec.instance)? else { return Ok(None) };
    let has = || {
        refuse_other(&domain, pool, spec)?;
        // Of a guest that somebody undefined there is no next start.
        let which = Which::of(&domain)?.pop().unwrap_or(Which::Next);
        volumes_in(&domain, pool, spec.instance, which)
    };
    match has() {
        // A guest that is up may end at any moment.
        Err(CallError::Libvirt(error)) => Ok(absent(Err(error), ErrorNumber::NoDomain)?),
        has => has.map(Some),
    }
}

/// An error where a volume's disk is not there, or is another domain's.
fn refuse_unusable(
    connect: &Connect,
    pool: &Pool,
    instance: InstanceId,
    volume: InstanceId,
) -> Result<(), CallError> {
    why_unusable(connect, pool, instance, volume)?.map_or(Ok(()), Err)
}

/// Whether a volume's disk is there, and no other domain's.
pub(crate) fn is_usable(
    connect: &Connect,
    pool: &Pool,
    instance: InstanceId,
    volume: InstanceId,
) -> Result<bool, CallError> {
    Ok(why_unusable(connect, pool, instance, volume)?.is_none())
}

/// Why a volume is not for this domain; an error where that cannot be looked at.
fn why_unusable(
    connect: &Connect,
    pool: &Pool,
    instance: InstanceId,
    volume: InstanceId,
) -> Result<Option<CallError>, CallError> {
    if !pool.has_volume(volume)? {
        return Ok(Some(CallError::Refused(format!("the disk of volume {volume} is not there"))));
    }
    let uses = uses(connect, pool, volume)?;
    if let Err(error) = refuse_moved(&uses, pool, volume) {
        return Ok(Some(error));
    }
    let other = foremost(uses).filter(|user| user.instance != instance);
    Ok(other.map(|user| CallError::Refused(format!("the domain {} has volume {volume}", user.instance))))
}

/// What came of a domain's start: one of whose disks is being copied waits for that, or was at that moment.
pub(crate) fn started(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    instance: InstanceId,
    started: Result<(), CallError>,
) -> Result<(), CallError> {
    let Err(CallError::Libvirt(error)) = started else { return started };
    let Found::Ours(domain) = domain::find(connect, node, instance)? else { return Err(error.into()) };
    for has in disks(&domain, pool, Which::Next)? {
        refuse_copied(connect, pool, has.attachment.volume)?;
    }
    Err(unless_locked(error))
}

/// An error for now where somebody who is no guest keeps a disk from being written: it is being copied.
fn refuse_copied(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<(), CallError> {
    let path = pool.volume_path(volume);
    let is_locked = disk::is_locked(&path).map_err(|error| CallError::io("look at", &path, &error))?;
    if is_locked && user_of(connect, pool, volume)?.is_none_or(|user| user.device.is_none()) {
        refuse_written(pool, volume)?;
        return Err(CallError::NotNow(format!("the disk of {volume} {BEING_COPIED}")));
    }
    Ok(())
}

/// A volume as a domain is told of it.
pub(crate) fn file(pool: &Pool, attachment: &Attachment) -> Result<VolumeFile, String> {
    Ok(VolumeFile {
        file: xml::utf8(&pool.volume_path(attachment.volume))?.to_owned(),
        device: attachment.device.clone(),
        serial: attachment.volume.to_string(),
    })
}

/// Gives the domain these volumes, and no others. One that is in trouble keeps no other from being given or taken: an error tells of
/// the first.
pub(crate) fn set(
    connect: &Connect,
    node: NodeId,
    pool: &Pool,
    instance: InstanceId,
    wanted: &[Attachment],
) -> Result<(), CallError> {
    let domain = ours(connect, node, instance)?;
    if domain::is_saved(&domain)? {
        return Err(CallError::Refused(
            "the guest's memory is saved, and goes on with the volumes that it had: `eschedule resume` lets it"
                .into(),
        ));
    }
    let mut documents = Vec::new();
    for which in Which::of(&domain)? {
        let files = files_in(&domain, pool, instance, which)?;
        let has: Vec<Attachment> = files.iter().map(|has| has.attachment.clone()).collect();
        if Attachment::root_of(&has) != Attachment::root_of(wanted) {
            return Err(CallError::Refused("the disk that it boots from is not changed".into()));
        }
        documents.push((which, files, has));
    }
    let (mut trouble, begun) = (Vec::new(), Instant::now());
    for (which, files, has) in documents {
        let goes = files.into_iter().filter(|has| !wanted.contains(&has.attachment)).collect();
        let (kept, why): (Vec<_>, Vec<_>) =
            take(&domain, pool, instance, which, goes, begun)?.into_iter().unzip();
        trouble.extend(why);
        for missing in wanted.iter().filter(|wanted| !has.contains(wanted)) {
            // Of that is told already.
            let is_in_the_way =
                |kept: &Attachment| kept.device == missing.device || kept.volume == missing.volume;
            if begun.elapsed() > ASKING {
                let why = format!("there is trouble with others, and {} comes the next time", missing.device);
                trouble.push(CallError::Refused(why));
            } else if !kept.iter().any(is_in_the_way) {
                trouble.extend(give(connect, &domain, pool, instance, which, missing).err());
            }
        }
    }
    trouble.into_iter().next().map_or(Ok(()), Err)
}

/// A volume in the words by which a domain is given it, or has it taken.
fn document(pool: &Pool, attachment: &Attachment) -> Result<String, CallError> {
    file(pool, attachment).and_then(|file| xml::write(&DiskXml::of(&file))).map_err(CallError::Refused)
}

/// Takes these volumes from the domain; those that it keeps, and why.
fn take(
    domain: &Domain,
    pool: &Pool,
    instance: InstanceId,
    which: Which,
    goes: Vec<Has>,
    begun: Instant,
) -> Result<Vec<(Attachment, CallError)>, CallError> {
    let (mut kept, mut asked) = (Vec::new(), Vec::new());
    // QEMU takes none away under a copy, which may end while that is waited for.
    let is_copied =
        !goes.is_empty() && which == Which::Up && backup(domain).is_ok_and(|backup| backup.is_some());
    for goes in goes {
        let in_place = goes.refuse_astray(pool, which);
        let volume = goes.attachment;
        match in_place {
            Err(why) => kept.push((volume, why)),
            Ok(()) if begun.elapsed() > ASKING => {
                let why = format!("the guest keeps others, and is asked for {} the next time", volume.device);
                kept.push((volume, CallError::Refused(why)));
            }
            Ok(()) => {
                let document = document(pool, &volume)?;
                asked.push((volume, domain.detach_device_flags(&document, which.flags().1)));
            }
        }
    }
    // Asked before, it may be at it; what counts is whether it is gone.
    let asked_all = Instant::now();
    loop {
        let has = volumes_in(domain, pool, instance, which)?;
        asked.retain(|(volume, _)| has.contains(volume));
        if asked.is_empty() || which == Which::Next || asked_all.elapsed() > PATIENCE {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    kept.extend(asked.into_iter().map(|(volume, detached)| {
        if is_copied {
            let why = format!("{} {BEING_COPIED}, and is taken from the guest after that", volume.device);
            return (volume, CallError::NotNow(why));
        }
        let why = detached.err().map(|error| format!(": {}", error.message())).unwrap_or_default();
        let why = format!("the guest does not let go of {}{why}", volume.device);
        (volume, CallError::Refused(why))
    }));
    Ok(kept)
}

/// Gives the domain a volume that it does not have.
fn give(
    connect: &Connect,
    domain: &Domain,
    pool: &Pool,
    instance: InstanceId,
    which: Which,
    missing: &Attachment,
) -> Result<(), CallError> {
    refuse_unusable(connect, pool, instance, missing.volume)?;
    let Err(error) = domain.attach_device_flags(&document(pool, missing)?, which.flags().1) else {
        return Ok(());
    };
    refuse_copied(connect, pool, missing.volume)?;
    Err(unless_locked(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(start: &str) -> InstanceId {
        format!("{start}3c1f0a-2b4e-4c55-9a7e-0123456789ab").parse().unwrap()
    }

    /// A domain with these disks: source, device and serial number.
    fn domain(disks: &[(&str, &str, Option<InstanceId>)]) -> String {
        let disk = |(source, device, serial): &(&str, &str, Option<InstanceId>)| {
            let serial = serial.map(|serial| format!("<serial>{serial}</serial>")).unwrap_or_default();
            format!("<disk device='disk'><source {source}/><target dev='{device}'/>{serial}</disk>")
        };
        format!("<domain><devices>{}</devices></domain>", disks.iter().map(disk).collect::<String>())
    }

    #[test]
    fn a_disk_that_lies_elsewhere_is_found_whatever_it_is_and_is_called() {
        let directory = tempfile::tempdir().unwrap();
        let pool = Pool::new("p", directory.path());
        let [instance, volume] = ["7d", "8d"].map(id);
        std::fs::write(pool.volume_path(instance), "").unwrap();
        let file = |path: &Path| format!("file='{}'", path.display());
        let own = file(&pool.volume_path(instance));
        let (rescue, beside) = (file(&pool.rescue_path(instance)), file(&pool.volume_path(volume)));
        let in_pool = format!("pool='p' volume='{}'", disk::volume_name(instance));
        let of = |documents: &[&[(&str, &str, Option<InstanceId>)]]| {
            let documents: Vec<_> = documents.iter().map(|disks| domain(disks)).collect();
            astray_in(&documents, &pool, instance).unwrap()
        };
        let moved = |to: &str| Some(Astray::In(to.to_owned()));
        let (other, of_volume) = (("dev='/dev/b'", "sdb", None), (beside.as_str(), "vdb", Some(volume)));
        for is_there in [
            [(own.as_str(), "vda", None), of_volume, other],
            [(&in_pool, "sda", None), of_volume, other],
            [(&rescue, "vda", None), (&own, "vdb", None), other],
        ] {
            assert_eq!(of(&[&is_there]), None, "{is_there:?}");
        }
        for device in ["vda", "sda"] {
            for (source, path) in [("file='/x/y'", "/x/y"), ("dev='/dev/x'", "/dev/x")] {
                assert_eq!(of(&[&[of_volume, (source, device, None), other]]), moved(path));
                assert_eq!(of(&[&[(&rescue, "vda", None), (source, "vdb", None)]]), moved(path));
            }
            let there: &[_] = &[(own.as_str(), "vda", None)];
            assert_eq!(of(&[there, &[("name='p/x' protocol='rbd'", device, None)]]), moved("rbd:p/x"));
        }
        assert_eq!(of(&[&[of_volume]]), Some(Astray::Nowhere), "somebody took it from its domain");
        assert_eq!(of(&[&[(&rescue, "vda", None)]]), Some(Astray::Nowhere));
        // One that boots from a volume has none of its own, also while it is up from its rescue disk.
        let root = ("dev='/dev/v'", "vda", Some(volume));
        assert_eq!(of(&[&[root, other]]), None);
        assert_eq!(
            of(&[&[(&rescue, "vda", None), ("dev='/dev/v'", "vdb", Some(volume)), other], &[root]]),
            None
        );
        // What nobody left behind is nobody's to lose.
        std::fs::remove_file(pool.volume_path(instance)).unwrap();
        assert_eq!(of(&[&[of_volume]]), None);
        assert_eq!(of(&[&[("file='/x/y'", "sda", None)]]), moved("/x/y"));
    }
}

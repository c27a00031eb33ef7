//! Volumes: made, given to machines and taken from them, extended and deleted.
//!
//! ```text
//!   create ──▶ as an instance: intent, claim, request          extend ──▶ act: claim, then the wish
//!   attach ──▶ one transaction on the records and requests of both, judged by ec_plan::volumes
//!   detach ──▶ the machine's record and request ──▶ its agent tells ──▶ let_go: the volume's record
//!   delete ──▶ refused while a machine has it ──▶ destroy
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use ec_model::{
    ActionVerb, Attachment, CopyOf, Desired, Doc, Extent, ImageRef, Instance, InstanceId, NodeId, Power,
    Request, RequestId, ResourceQuery, State, Status, Workload, decode,
    input::{LABELS_MAX, LabelSelector, is_hostname},
};
use ec_plan::{
    status::is_lost,
    verbs::Verb,
    volumes::{self, Attach, NOT_HANDED_OVER, Sides},
};
use ec_runtime::planted;
use ec_store::{Compare, KeyValue, Revision, StoreError, Txn};
use jiff::Timestamp;
use serde::Serialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    Acted, Ask, Cloud, CloudError, CloudResult, Guest, Naming, NoRoom, Scheduled, Wanted,
    act::{act_as, docs, let_in, understood},
    destroy::{Chosen, Doomed, destroy_as},
    heal::known_to_have,
    history::{Asked, Unheard, note},
    image::{self, image_of_copy},
    lookup::{Found, Known, Read, View, find, find_placed, list_of, resolve_as},
    moving::{Giver, giver},
    schedule,
    source::{Source, kind_of},
    wait::Awaited,
};

/// Another writer changed one of both in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

const DISK: &str = "DISK_GB";

/// Which of four records tells that a machine lets go is not known before.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A volume that is to be made.
#[derive(Debug, Clone, Default)]
pub struct NewVolume {
    /// What it shall be called within the project.
    pub name: Option<String>,
    /// How large, in GiB; as large as what it is a copy of where that is left out.
    pub size_gb: Option<u64>,
    /// What it is made of; nothing where there is none.
    pub image: Option<ImageRef>,
    /// The only node that may be.
    pub node: Option<NodeId>,
    /// What its user tells it apart by.
    pub labels: BTreeMap<String, String>,
    /// Whether it is a snapshot, and stays as it is made.
    pub snapshot: bool,
}

/// What people and scripts see of a volume.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VolumeView {
    /// Which.
    pub volume: InstanceId,
    /// What it is called.
    pub name: Option<String>,
    /// One of [`STATUSES`](Self::STATUSES).
    pub status: String,
    /// How large it is, or shall be, in GiB.
    pub size_gb: Option<u64>,
    /// The node on whose storage it lies.
    pub node: Option<NodeId>,
    /// Whether that node's agent is alive.
    pub node_alive: bool,
    /// The machine that has it, or is about to.
    pub instance: Option<InstanceId>,
    /// What that machine's domain calls it.
    pub device: Option<String>,
    /// The image that it was made of.
    pub image: Option<String>,
    /// The volume, or the instance, of whose disk it was made a copy.
    pub copy_of: Option<InstanceId>,
    /// Which of both that is.
    #[serde(skip)]
    pub copy_of_kind: Option<Workload>,
    /// Whether it is a snapshot of that, and stays as it was made.
    pub snapshot: bool,
    /// The volumes that were copied at the same moment as the disk of that instance, and lie beside it.
    pub beside: Vec<InstanceId>,
    /// The project that it is accounted to, where that is told.
    pub project: Option<String>,
    /// What its user tells it apart by.
    pub labels: BTreeMap<String, String>,
    /// When it was asked for, where that is told.
    pub created_at: Option<Timestamp>,
    /// Why it is so.
    pub reason: Option<String>,
    /// What its agent is about with it, or waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
    /// Why nothing is done to it; left out where it is not locked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locked: Option<String>,
    /// The id of the command that wrote what is wanted of it last; left out where an older release did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
}

impl VolumeView {
    /// What a volume's status may be; `changing` where it grows, or is made anew.
    pub const STATUSES: [&str; 8] =
        ["creating", "available", "in-use", "changing", "deleting", "error", "unclaimed", "unknown"];
}

/// What became of a wish that a machine has a volume, or has it no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// The machine.
    pub instance: InstanceId,
    /// What its domain calls the volume.
    pub device: String,
    /// Of the machine's agent.
    pub acted: Acted,
}

/// The uuid that the text is, of a volume that bears the name, or whose uuid begins so.
///
/// # Errors
/// [`CloudError::NotFound`] where there is none, [`CloudError::Invalid`] where there are several.
pub async fn resolve_volume(cloud: &Cloud, text: &str) -> CloudResult<InstanceId> {
    resolve_as(cloud, Workload::Volume, text).await
}

/// Claims room for a volume and requests it there; the inner error says what stood in the way.
///
/// # Errors
/// It cannot be as it was asked for, or something failed: then nothing stays.
pub async fn create_volume(
    cloud: &Cloud,
    new: &NewVolume,
    stop: &CancellationToken,
) -> CloudResult<Result<Scheduled, NoRoom>> {
    if let Some(name) = &new.name {
        nameable(name)?;
    }
    make_volume(cloud, new, stop).await
}

/// That a volume of a user's can be called so.
///
/// # Errors
/// [`CloudError::Invalid`] with what is wrong.
pub fn nameable(name: &str) -> CloudResult<()> {
    let why = if !is_hostname(name) {
        "wanted letters, digits and hyphens, at most 63 in each part, and not a uuid"
    } else if image_of_copy(name).is_some() {
        "a copy that an image is made from is called so, and goes with that"
    } else {
        return Ok(());
    };
    Err(CloudError::Invalid(format!("`{name}` cannot be a volume's name: {why}")))
}

/// Makes one, whatever it is called.
pub(crate) async fn make_volume(
    cloud: &Cloud,
    new: &NewVolume,
    stop: &CancellationToken,
) -> CloudResult<Result<Scheduled, NoRoom>> {
    let image = new.image.clone().unwrap_or_default();
    if new.labels.len() > LABELS_MAX {
        return Err(CloudError::Invalid(format!("{} labels are more than {LABELS_MAX}", new.labels.len())));
    }
    let query = room_of(cloud, new).await?;
    image::fits(cloud, &image, &query.total()).await?;
    let ask = Ask::of_volume(&query, new.node)?;
    let guest = Guest {
        kind: Workload::Volume,
        naming: new.name.clone().map_or(Naming::None, Naming::Name),
        image,
        labels: new.labels.clone(),
        snapshot: new.snapshot,
        ..Guest::default()
    };
    schedule(cloud, &Wanted::new(ask, &guest)?, stop).await
}

/// What room a volume takes that is to be made.
///
/// # Errors
/// Nothing tells how large it shall be.
pub async fn room_of(cloud: &Cloud, new: &NewVolume) -> CloudResult<ResourceQuery> {
    let image = new.image.clone().unwrap_or_default();
    let (size_gb, none) = match new.size_gb {
        Some(size_gb) => (size_gb, "0 GB are too few: a volume has at least 1"),
        None => match Source::of(cloud, &image).await? {
            Some(of) => (
                of.gigabytes,
                "no record tells how large what it is to be a copy of is: say with `--size` how large it shall be",
            ),
            None => (0, "say with `--size` how large it shall be, in GiB"),
        },
    };
    if size_gb == 0 {
        return Err(CloudError::Invalid(none.to_owned()));
    }
    gigabytes(size_gb)
}

/// The one node on which such a volume can be made, where it is a copy of what lies there.
///
/// # Errors
/// What it is to be made of is not there, or is for what is larger.
pub async fn node_of_copy(cloud: &Cloud, new: &NewVolume) -> CloudResult<Option<NodeId>> {
    let Some(image) = &new.image else { return Ok(None) };
    if image.copied().is_some() {
        let query = room_of(cloud, new).await?;
        return Ok(Ask::of_volume(&query, new.node)?.beside(cloud, image).await?.node);
    }
    if let Some(size_gb) = new.size_gb {
        image::fits(cloud, image, &gigabytes(size_gb)?.total()).await?;
    }
    Ok(None)
}

fn gigabytes(size_gb: u64) -> CloudResult<ResourceQuery> {
    ResourceQuery::parse(&format!("resources={DISK}:{size_gb}"))
        .map_err(|error| CloudError::Invalid(error.to_string()))
}

/// Has a volume be as large as this. It grows at once, also under the guest that has it, and never shrinks.
///
/// # Errors
/// There is no such room where it lies: [`CloudError::Refused`], with nothing changed.
pub async fn extend_volume(cloud: &Cloud, volume: InstanceId, size_gb: u64) -> CloudResult<Acted> {
    known_volume(cloud, volume).await?;
    let query = gigabytes(size_gb)?;
    let extent = Extent { query: query.text().to_owned(), resources: query.total() };
    act_as(cloud, Workload::Volume, volume, &Verb::Resize(extent), Chosen::uuid()).await
}

/// Has a volume be made anew as this copy, or of this image: what was written on it goes.
///
/// # Errors
/// A machine that has it is not down, or what it is to be made of is not there: [`CloudError::Refused`], with nothing changed.
pub async fn restore_volume(cloud: &Cloud, volume: InstanceId, of: &ImageRef) -> CloudResult<Acted> {
    known_volume(cloud, volume).await?;
    if of.copied().is_some_and(|of| of.disk == volume && of.held.is_none()) {
        let why = "it is what it would be made of";
        return Err(CloudError::Refused(format!("cannot restore volume {volume}: {why}")));
    }
    act_as(cloud, Workload::Volume, volume, &Verb::Rebuild(Some(of.clone())), Chosen::uuid()).await
}

/// The same of one that a machine has which is locked for this reason, by who locked it for that.
///
/// # Errors
/// As [`restore_volume`], and where that machine is not locked so.
pub(crate) async fn remake_volume(
    cloud: &Cloud,
    volume: InstanceId,
    reason: String,
    of: &ImageRef,
) -> CloudResult<Acted> {
    known_volume(cloud, volume).await?;
    act_as(cloud, Workload::Volume, volume, &Verb::Remake(reason, of.clone()), Chosen::uuid()).await
}

/// An error where a machine has this volume, and this is not done to what is its: it is locked, or what it holds in its memory is of
/// the disk that there is, or of its size. Its node looks once more when it comes to it. Of one that has it, what is to be demanded
/// lest somebody locks it meanwhile.
pub(crate) async fn refuse_held(cloud: &Cloud, disk: &Known, verb: &Verb) -> CloudResult<Option<Compare>> {
    let volume = disk.instance;
    let Some(holder) = disk.record.as_ref().and_then(|record| record.attached) else { return Ok(None) };
    if lost_by(cloud, holder, volume).await?.is_some() {
        return Ok(None);
    }
    let machine = find_placed(cloud, holder).await?;
    let word = verb.name_of(Workload::Volume);
    let refused = |why: String| CloudError::Refused(format!("cannot {word} volume {volume}: {why}"));
    if let Some(record) = &machine.record {
        let reason = match verb {
            Verb::Remake(reason, _) => Some(reason.as_str()),
            _ => None,
        };
        volumes::open(record, reason).map_err(refused)?;
    }
    let status = machine.status.record();
    let is_suspended = status.is_some_and(|status| status.state == State::Suspended)
        || machine.request.record().is_some_and(|request| request.power.power == Power::Suspended);
    // Its memory goes on with a disk of the size that it knew.
    if matches!(verb, Verb::Resize(_)) && is_suspended {
        return Err(refused(format!(
            "instance {holder} has it, and is suspended: `eschedule resume {holder}` lets it go on"
        )));
    }
    let is_down = status.is_some_and(|status| status.state == State::Stopped || is_lost(status));
    if !matches!(verb, Verb::Resize(_)) && !is_down {
        let why = match machine.is_doomed() {
            true => "is being destroyed: it has it until its end".to_owned(),
            false => format!("is not stopped: `eschedule stop {holder}`"),
        };
        return Err(refused(format!("instance {holder} has it, and {why}")));
    }
    Ok(Some(as_read(cloud.keys.instance(holder), machine.record_revision())))
}

/// That a key is as it was read.
fn as_read(key: String, revision: Revision) -> Compare {
    match revision {
        0 => Compare::Absent(key),
        revision => Compare::Unchanged(key, revision),
    }
}

/// What a snapshot of an instance is made of.
///
/// # Errors
/// There is no such instance, or its volumes are being changed or cannot be had: [`CloudError::Refused`].
pub async fn snapshot_of(cloud: &Cloud, instance: InstanceId) -> CloudResult<ImageRef> {
    let machine = find_placed(cloud, instance).await?;
    if kind_of(&machine) == Some(Workload::Volume) {
        return Err(CloudError::Refused(format!(
            "{instance} is a volume, and no instance: `eschedule volume snapshot` makes one of a volume"
        )));
    }
    let beside = machine.record.as_ref().map(|record| record.volumes.clone()).unwrap_or_default();
    // Those that it is to have, and those that its agent tells of.
    let set = |volumes: &[Attachment]| volumes.iter().map(|has| has.volume).collect::<HashSet<_>>();
    let status = machine.status.record();
    if status.is_some_and(|status| status.volumes_changing || set(&status.volumes) != set(&beside)) {
        return Err(CloudError::Refused(format!(
            "the volumes of instance {instance} are being changed; ask again when that is done"
        )));
    }
    // It may have all that are told then, and what it has not is copied at no moment with the rest.
    if let Some(why) = status.and_then(|status| status.volumes_failed.as_ref()) {
        return Err(CloudError::Refused(format!(
            "instance {instance} may not have all of its volumes yet: {why}; ask again when it has, or detach what it cannot have"
        )));
    }
    // It is its rescue disk that its guest has first then.
    if !beside.is_empty() && status.is_some_and(Status::is_rescued) {
        return Err(CloudError::Refused(format!(
            "instance {instance} boots from its rescue disk, and its disks are not copied at one moment then: `eschedule unrescue {instance}` first"
        )));
    }
    // The one that it boots from is its disk.
    let beside = beside.into_iter().filter(|has| !has.is_root()).map(|has| has.volume).collect();
    Ok(ImageRef::copy_of(&CopyOf { beside, ..CopyOf::disk(Workload::Machine, instance) }))
}

/// Has a machine have a volume. That it has it already is no error.
///
/// # Errors
/// Another has it, or it cannot be as both stand: [`CloudError::Refused`], with nothing changed.
pub async fn attach(
    cloud: &Cloud,
    volume: InstanceId,
    instance: InstanceId,
    device: Option<&str>,
) -> CloudResult<Attached> {
    let mut unheard = Unheard::default();
    let attached = attach_heard(cloud, volume, instance, device, &mut unheard).await;
    attached.map_err(|error| unheard.doubt(error))
}

/// The same; with what of it was not heard of.
async fn attach_heard(
    cloud: &Cloud,
    volume: InstanceId,
    instance: InstanceId,
    device: Option<&str>,
    unheard: &mut Unheard<Attached>,
) -> CloudResult<Attached> {
    let refused = |why: String| {
        CloudError::Refused(format!("cannot attach volume {volume} to instance {instance}: {why}"))
    };
    for _ in 0..TRIES {
        // Somebody may have taken it back since.
        if let Some(attached) = unheard.written(cloud).await? {
            return Ok(attached.clone());
        }
        let disk = known_volume(cloud, volume).await?;
        let machine = find_placed(cloud, instance).await?;
        let ((mut disk_record, mut disk_order), (mut record, mut order)) = (docs(&disk)?, docs(&machine)?);
        if record.record.kind != Workload::Machine {
            return Err(refused(format!("{instance} is a {}", record.record.kind.word())));
        }
        let sides =
            |record: &Doc<Instance>, order: &Doc<Request>| (record.record.clone(), order.record.clone());
        let (of_disk, of_machine) = (sides(&disk_record, &disk_order), sides(&record, &order));
        let judged = volumes::attach(
            Sides { record: &of_disk.0, request: &of_disk.1, status: disk.status.record() },
            Sides { record: &of_machine.0, request: &of_machine.1, status: machine.status.record() },
            device,
        );
        let attachment = match judged.map_err(refused)? {
            Attach::Do(attachment) => {
                nobodys(&disk_record.record).map_err(refused)?;
                attachment
            }
            Attach::Already(has) => {
                let is_told = |status: &Status| !status.volumes_changing && status.volumes.contains(&has);
                if !machine.status.record().is_some_and(is_told) {
                    return Ok(asked_for(&machine, &order.record, (volume, true), has.device));
                }
                let already = Some(format!("it has volume {volume} already, as {}", has.device));
                return Ok(of_machine_acted(&machine, has.device, already));
            }
        };
        let mut txn = Txn::new();
        if let Some(holder) = disk_record.record.attached.filter(|holder| *holder != instance) {
            match lost_by(cloud, holder, volume).await? {
                Some(compares) => txn = compares.into_iter().fold(txn, Txn::when),
                None => {
                    let way = way_off(cloud, holder, volume).await;
                    return Err(refused(format!("instance {holder} has it: {way}")));
                }
            }
        }
        let generation = record.record.generation.max(order.record.generation).saturating_add(1);
        record.record.volumes.push(attachment.clone());
        wish(cloud, &mut record, &mut order, generation);
        let txn = taken(cloud, &disk, &mut disk_record, &mut disk_order, instance, txn);
        let txn = written(cloud, &machine, &record, &order, txn);
        understood(cloud, &machine, &order.record, "volumes").await?;
        let txn = let_in(cloud, &machine, "attach a volume to", false, txn).await?;
        let asked = asked(cloud, &machine, ActionVerb::AttachVolume, &attachment, generation);
        let mark = asked.mark();
        let txn = note(cloud, asked, txn, None).await?;
        let attached = asked_for(&machine, &order.record, (volume, true), attachment.device);
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(attached),
            Ok(_) => {}
            Err(StoreError::Unknown(_)) => unheard.note(mark, attached),
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("{volume} or {instance} keeps changing; try again")))
}

/// Why a volume is given to no machine: it goes with what it was made for, whatever a guest has written on it.
fn nobodys(disk: &Instance) -> Result<(), String> {
    match disk.name.as_deref().and_then(image_of_copy) {
        Some(image) => Err(format!("it is a copy that the image {image} is made from, and goes with that")),
        None => Ok(()),
    }
}

/// The node where a volume lies, from which a new instance can boot.
///
/// # Errors
/// None can: [`CloudError::Refused`].
pub(crate) async fn bootable(cloud: &Cloud, volume: InstanceId) -> CloudResult<NodeId> {
    let disk = known_volume(cloud, volume).await?;
    free_for(cloud, &disk, None, true).await?;
    Ok(disk.node)
}

/// Adds to the transaction that requests a machine on this node that it has the guest's volumes, as nobody else has them: the one
/// that it boots from, and those of the others that lie there. Which they are.
///
/// # Errors
/// It cannot have them, or what it boots from lies elsewhere by now: [`CloudError::Refused`].
pub(crate) async fn given(
    cloud: &Cloud,
    guest: &Guest,
    instance: InstanceId,
    node: NodeId,
    mut txn: Txn,
) -> CloudResult<(Vec<Attachment>, Txn)> {
    let mut given = Vec::new();
    let all = guest.boot.iter().map(|volume| (*volume, true));
    for (volume, boots) in all.chain(guest.volumes.iter().map(|volume| (*volume, false))) {
        let disk = known_volume(cloud, volume).await?;
        let attachment = match boots {
            true if disk.node == node => Attachment::root(volume),
            true => {
                return Err(CloudError::Refused(format!(
                    "volume {volume} went to node {} at this moment; ask again",
                    disk.node
                )));
            }
            // It comes there once the machine is requested.
            false if disk.node != node => continue,
            false => {
                let free = Attachment::free_device(&given).filter(|_| given.len() < Attachment::MOST);
                let too_many = || format!("an instance has {} volumes at most", Attachment::MOST);
                Attachment { volume, device: free.ok_or_else(|| CloudError::Refused(too_many()))? }
            }
        };
        let compares = free_for(cloud, &disk, Some(instance), boots).await?;
        let (mut record, mut order) = docs(&disk)?;
        txn = compares.into_iter().fold(txn, Txn::when);
        txn = taken(cloud, &disk, &mut record, &mut order, instance, txn);
        given.push(attachment);
    }
    Ok((given, txn))
}

/// What is to be demanded that a new machine gets a volume, perhaps to boot from it, or why it does not.
async fn free_for(
    cloud: &Cloud,
    disk: &Known,
    wanted: Option<InstanceId>,
    boots: bool,
) -> CloudResult<Vec<Compare>> {
    let volume = disk.instance;
    let what = if boots { "boot from" } else { "have" };
    let refused = |why: String| CloudError::Refused(format!("cannot {what} volume {volume}: {why}"));
    let (record, order) = docs(disk)?;
    let sides = Sides { record: &record.record, request: &order.record, status: disk.status.record() };
    volumes::given(sides, &cloud.project).map_err(refused)?;
    nobodys(&record.record).map_err(refused)?;
    let Some(holder) = record.record.attached.filter(|holder| Some(*holder) != wanted) else {
        return Ok(Vec::new());
    };
    match lost_by(cloud, holder, volume).await? {
        Some(compares) => Ok(compares),
        None => {
            let way = way_off(cloud, holder, volume).await;
            Err(refused(format!("instance {holder} has it: {way}")))
        }
    }
}

/// Adds to a transaction by which a machine is asked for again that it is to have these volumes: its guest has them, and
/// may since have been forgotten by an older etcd, which would give them to others. Or why that cannot be.
pub(crate) async fn kept_by(
    cloud: &Cloud,
    instance: InstanceId,
    volumes: &[Attachment],
    mut txn: Txn,
) -> CloudResult<Result<Txn, String>> {
    for Attachment { volume, .. } in volumes {
        let disk = match find(cloud, *volume).await {
            Ok(Found::Placed(disk)) => disk,
            // Who brings that back looks who is to have it.
            Err(CloudError::NotFound(_)) => {
                txn = txn.when(Compare::Absent(cloud.keys.instance(*volume)));
                continue;
            }
            Ok(Found::Unplaced(..)) => {
                return Ok(Err(format!("volume {volume}, which it has, is placed anew at this moment")));
            }
            Err(error) => return Err(error),
        };
        let key = cloud.keys.instance(*volume);
        let wanted = match &disk.request {
            Read::Here(request, _) if request.desired == Desired::Destroyed => {
                return Ok(Err(format!("volume {volume}, which it has, is being deleted")));
            }
            Read::Unreadable(why) => {
                return Ok(Err(format!(
                    "the request of volume {volume}, which it has, cannot be read: {why}"
                )));
            }
            Read::Here(..) => true,
            Read::Absent => false,
        };
        let Some(mut record) = disk.record_doc()? else {
            txn = txn.when(Compare::Absent(key));
            continue;
        };
        if let Some(holder) = record.record.attached.filter(|holder| *holder != instance) {
            match lost_by(cloud, holder, *volume).await? {
                Some(compares) => txn = compares.into_iter().fold(txn, Txn::when),
                None => {
                    let machine = find(cloud, holder).await?;
                    let boots = match &machine {
                        Found::Placed(machine) => machine.record.as_ref(),
                        Found::Unplaced(record, _) => Some(&**record),
                    };
                    let root = boots.and_then(|record| Attachment::root_of(&record.volumes));
                    let mend = match root == Some(*volume) {
                        true => format!("boots from it, and has it until `eschedule destroy {holder}`"),
                        false => format!(
                            "is to have it: `eschedule volume detach {volume}` takes it from there first"
                        ),
                    };
                    return Ok(Err(format!("it has volume {volume}, and by now instance {holder} {mend}")));
                }
            }
        }
        if wanted {
            let (mut record, mut order) = docs(&disk)?;
            txn = taken(cloud, &disk, &mut record, &mut order, instance, txn);
        } else {
            txn = txn
                .when(Compare::Unchanged(key.clone(), disk.record_revision()))
                .when(Compare::Absent(cloud.keys.request(disk.node, *volume)));
            if record.record.attached.replace(instance) != Some(instance) {
                txn = txn.put(key, record.encode());
            }
        }
    }
    Ok(Ok(txn))
}

/// Adds to a transaction by which a volume is asked for again that the machine has it which is to have it, where there is one.
pub(crate) async fn kept_for(cloud: &Cloud, record: &mut Instance, mut txn: Txn) -> CloudResult<Txn> {
    if let Some((machine, pair)) = holder_of(cloud, record.instance).await? {
        record.attached = Some(machine);
        txn = txn.when(Compare::Unchanged(pair.key, pair.mod_revision));
    }
    Ok(txn)
}

/// The machine that is to have a volume, by its record, whatever that of the volume says.
async fn holder_of(cloud: &Cloud, volume: InstanceId) -> CloudResult<Option<(InstanceId, KeyValue)>> {
    let pairs = cloud.store.list(&cloud.keys.instances()).await?.pairs;
    Ok(pairs.into_iter().find_map(|pair| {
        let machine = decode::<Instance>(&pair.value).ok()?;
        machine.volumes.iter().any(|has| has.volume == volume).then_some((machine.instance, pair))
    }))
}

/// Has the machine that has a volume have it no more; none where nobody has it.
///
/// # Errors
/// It cannot be as the machine stands, or another has it than `from`: [`CloudError::Refused`], with nothing changed.
pub async fn detach(
    cloud: &Cloud,
    volume: InstanceId,
    from: Option<InstanceId>,
) -> CloudResult<Option<Attached>> {
    let mut unheard = Unheard::default();
    let detached = detach_heard(cloud, volume, from, &mut unheard).await;
    detached.map_err(|error| unheard.doubt(error))
}

/// The same; with what of it was not heard of.
async fn detach_heard(
    cloud: &Cloud,
    volume: InstanceId,
    mut from: Option<InstanceId>,
    unheard: &mut Unheard<Attached>,
) -> CloudResult<Option<Attached>> {
    for _ in 0..TRIES {
        // Somebody may have given it to another since.
        if let Some(detached) = unheard.written(cloud).await? {
            return Ok(Some(detached.clone()));
        }
        let disk = known_volume(cloud, volume).await?;
        let Some(of_disk) = &disk.record else { return docs(&disk).map(|_| None) };
        let Some(instance) = of_disk.attached else { return Ok(None) };
        if *from.get_or_insert(instance) != instance {
            return Err(CloudError::Refused(format!(
                "instance {instance} has volume {volume} by now, and nobody asked for it to be taken from there"
            )));
        }
        let machine = match find(cloud, instance).await {
            Ok(Found::Placed(machine)) if machine.record.is_some() || machine.is_asked_for() => machine,
            Err(CloudError::NotFound(_)) | Ok(_) => {
                return match lost_by(cloud, instance, volume).await? {
                    Some(_) => Ok(None),
                    None => Err(CloudError::Refused(format!(
                        "instance {instance} has volume {volume} until its end, which is on its way"
                    ))),
                };
            }
            Err(error) => return Err(error),
        };
        let (mut record, mut order) = docs(&machine)?;
        let has = record.record.volumes.iter().find(|has| has.volume == volume).cloned();
        let Some(has) = has else {
            // Its agent may have yet to do it, or to tell.
            if lost_by(cloud, instance, volume).await?.is_some() {
                return Ok(None);
            }
            let device = holds(&machine, volume).unwrap_or_default();
            return Ok(Some(asked_for(&machine, &order.record, (volume, false), device)));
        };
        let sides = Sides { record: &record.record, request: &order.record, status: machine.status.record() };
        let judged = volumes::detach(of_disk, sides, &has);
        judged.map_err(|why| {
            CloudError::Refused(format!("cannot detach volume {volume} from instance {instance}: {why}"))
        })?;
        let generation = record.record.generation.max(order.record.generation).saturating_add(1);
        record.record.volumes.retain(|has| has.volume != volume);
        wish(cloud, &mut record, &mut order, generation);
        // Nobody locks it meanwhile.
        let txn = Txn::new().when(as_read(cloud.keys.instance(volume), disk.record_revision()));
        let txn = written(cloud, &machine, &record, &order, txn);
        let txn = let_in(cloud, &machine, "detach a volume from", false, txn).await?;
        let asked = asked(cloud, &machine, ActionVerb::DetachVolume, &has, generation);
        let mark = asked.mark();
        let txn = note(cloud, asked, txn, None).await?;
        let detached = asked_for(&machine, &order.record, (volume, false), has.device);
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(Some(detached)),
            Ok(_) => {}
            Err(StoreError::Unknown(_)) => unheard.note(mark, detached),
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("{volume} or the instance that has it keeps changing; try again")))
}

/// Writes into a volume's record that nobody has it, where its machine has it no more. It need not be: whoever wants the
/// volume looks for himself.
///
/// # Errors
/// etcd does not answer.
pub async fn let_go(cloud: &Cloud, volume: InstanceId) -> CloudResult<()> {
    let disk = known_volume(cloud, volume).await?;
    let Some(holder) = disk.record.as_ref().and_then(|record| record.attached) else { return Ok(()) };
    let Some(compares) = lost_by(cloud, holder, volume).await? else { return Ok(()) };
    let (mut record, _) = docs(&disk)?;
    record.record.attached = None;
    let key = cloud.keys.instance(volume);
    let txn = Txn::new()
        .when(Compare::Unchanged(key.clone(), disk.record_revision()))
        .when(Compare::Unchanged(cloud.keys.request(disk.node, volume), disk.request_revision()));
    let txn = compares.into_iter().fold(txn, Txn::when).put(key, record.encode());
    // Where it does not hold, somebody else is at it.
    cloud.store.txn(txn).await?;
    Ok(())
}

/// Waits until no machine has a volume, other than one that is to have it.
///
/// # Errors
/// One is to have it by what is wanted now: [`CloudError::Refused`]; the time ran out.
pub async fn until_free(
    cloud: &Cloud,
    volume: InstanceId,
    wanted: Option<InstanceId>,
    timeout: Duration,
) -> CloudResult<()> {
    let deadline = Instant::now() + timeout;
    loop {
        let disk = known_volume(cloud, volume).await?;
        let holder = disk.record.as_ref().and_then(|record| record.attached);
        let Some(holder) = holder.filter(|holder| Some(*holder) != wanted) else { return Ok(()) };
        if lost_by(cloud, holder, volume).await?.is_some() {
            return Ok(());
        }
        let failed = match find(cloud, holder).await {
            Ok(Found::Placed(machine)) => {
                let has = |record: &Instance| record.volumes.iter().any(|has| has.volume == volume);
                if machine.record.as_ref().is_some_and(has) {
                    let way = way_off(cloud, holder, volume).await;
                    return Err(CloudError::Refused(format!("instance {holder} has it: {way}")));
                }
                machine.status.record().and_then(|status| status.volumes_failed.clone())
            }
            Ok(Found::Unplaced(..)) | Err(CloudError::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
        if Instant::now() >= deadline {
            let why = failed.map(|why| format!(": {why}")).unwrap_or_default();
            return Err(CloudError::TimedOut(format!(
                "instance {holder} has volume {volume} still, after {} s{why}",
                timeout.as_secs()
            )));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Asks for a volume's end, with all that was written on it.
///
/// # Errors
/// A machine has it: [`CloudError::Refused`], with nothing changed.
pub async fn delete_volume(cloud: &Cloud, volume: InstanceId) -> CloudResult<Doomed> {
    delete_chosen(cloud, volume, Chosen::uuid()).await
}

/// The same of one that was selected by its labels: it is spared where somebody has changed them since.
///
/// # Errors
/// As [`delete_volume`]; [`CloudError::Refused`] where a selector does not take it any more.
pub async fn delete_selected_volume(
    cloud: &Cloud,
    volume: InstanceId,
    selectors: &[LabelSelector],
) -> CloudResult<Doomed> {
    delete_chosen(cloud, volume, Chosen::By { labels: selectors, name: None }).await
}

/// The same of one that was selected by its labels and called so, or nothing: it is spared where somebody has changed that since.
///
/// # Errors
/// As [`delete_volume`]; [`CloudError::Refused`] where it is otherwise.
pub async fn delete_called_volume(
    cloud: &Cloud,
    volume: InstanceId,
    name: &str,
    selectors: &[LabelSelector],
) -> CloudResult<Doomed> {
    delete_chosen(cloud, volume, Chosen::By { labels: selectors, name: Some(name) }).await
}

/// The same, however it was chosen.
pub(crate) async fn delete_chosen(
    cloud: &Cloud,
    volume: InstanceId,
    chosen: Chosen<'_>,
) -> CloudResult<Doomed> {
    let kind = match find(cloud, volume).await.map_err(|error| no_volume(error, volume))? {
        Found::Placed(known) => kind_of(&known),
        // What a command left that was killed goes as well.
        Found::Unplaced(record, _) => Some(record.kind),
    };
    if kind != Some(Workload::Volume) {
        return Err(not_a_volume(volume));
    }
    destroy_as(cloud, Workload::Volume, volume, chosen).await
}

/// The machine that a volume was given to last, by its record; of one that etcd lost only machines tell.
async fn given_to(
    cloud: &Cloud,
    volume: InstanceId,
    record: Option<&Instance>,
) -> CloudResult<Option<InstanceId>> {
    match record {
        Some(record) => Ok(record.attached),
        None => Ok(holder_of(cloud, volume).await?.map(|(holder, _)| holder)),
    }
}

/// An error where a machine has this volume.
pub(crate) async fn refuse_attached(cloud: &Cloud, disk: &Known) -> CloudResult<()> {
    match holder_now(cloud, disk).await? {
        Some(holder) => Err(had(cloud, holder, disk.instance).await),
        None => Ok(()),
    }
}

/// An error where a machine has this volume that would miss it. One whose user has ended it, and whose agent is not there to do that,
/// has it for as long, which may be for ever: both go by the time that agent is back.
pub(crate) async fn refuse_missed(cloud: &Cloud, disk: &Known) -> CloudResult<()> {
    let Some(holder) = holder_now(cloud, disk).await? else { return Ok(()) };
    if let Ok(Found::Placed(machine)) = find(cloud, holder).await
        && machine.is_doomed()
        && !machine.node_alive
    {
        return Ok(());
    }
    Err(had(cloud, holder, disk.instance).await)
}

/// That a machine has a volume, and how it comes to have it no more.
async fn had(cloud: &Cloud, holder: InstanceId, volume: InstanceId) -> CloudError {
    let way = way_off(cloud, holder, volume).await;
    CloudError::Refused(format!("instance {holder} has volume {volume}: {way}"))
}

/// The machine that has this volume.
async fn holder_now(cloud: &Cloud, disk: &Known) -> CloudResult<Option<InstanceId>> {
    let volume = disk.instance;
    let holder = match given_to(cloud, volume, disk.record.as_ref()).await? {
        // Of a machine that etcd lost, too, only its node tells.
        None if disk.record.is_none() => known_to_have(cloud, disk.node, volume).await?,
        holder => holder,
    };
    let Some(holder) = holder else { return Ok(None) };
    // What only the machine tells of is no old word.
    if disk.record.is_some() && lost_by(cloud, holder, volume).await?.is_some() {
        return Ok(None);
    }
    Ok(Some(holder))
}

/// How a machine that has a volume comes to have it no more.
async fn way_off(cloud: &Cloud, holder: InstanceId, volume: InstanceId) -> &'static str {
    let device = match find(cloud, holder).await {
        Ok(Found::Placed(machine)) if machine.is_doomed() => {
            return "it is being destroyed, and has it until its end";
        }
        Ok(Found::Placed(machine)) if machine.record.is_none() && !machine.is_asked_for() => {
            return "etcd has forgotten that; `eschedule heal` brings back what it lost, or `eschedule destroy` ends the instance first";
        }
        // Its record has it still, by which it can be asked for again.
        Ok(Found::Placed(machine)) if machine.has_failed() => {
            return "it failed before it ever ran, and `eschedule destroy` of it lets go of the volume";
        }
        Ok(Found::Placed(machine)) => holds(&machine, volume),
        _ => None,
    };
    match device {
        Some(device) if device == Attachment::ROOT => "it boots from it, and has it until it is destroyed",
        _ => "`eschedule volume detach` takes it away first",
    }
}

/// A volume, and all that is known of it.
///
/// # Errors
/// There is no such volume.
pub async fn volume(cloud: &Cloud, volume: InstanceId) -> CloudResult<VolumeView> {
    let found = find(cloud, volume).await.map_err(|error| no_volume(error, volume))?;
    let mut view = View::found(&found);
    if view.kind != Workload::Volume {
        return Err(not_a_volume(volume));
    }
    let record = match found {
        Found::Placed(known) => {
            view.reason = not_handed_over(cloud, &known).await?.or(view.reason);
            known.record_as_made()
        }
        Found::Unplaced(record, _) => Some(*record),
    };
    let mut holder = None;
    if let Some(attached) = given_to(cloud, volume, record.as_ref()).await? {
        holder = match find(cloud, attached).await {
            Ok(Found::Placed(machine)) => holds(&machine, volume).map(|device| (attached, device)),
            Ok(Found::Unplaced(..)) | Err(CloudError::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
    }
    Ok(told(view, record.as_ref(), holder))
}

/// Why a volume is not there yet that is waited for on another node, as the node tells that had it; none where it is not waited for.
async fn not_handed_over(cloud: &Cloud, known: &Known) -> CloudResult<Option<String>> {
    let waits = known.status.record().filter(|status| {
        [&status.reason, &status.doing].into_iter().flatten().any(|told| told.starts_with(NOT_HANDED_OVER))
    });
    let (Some(waits), Some(giver)) = (waits, giver(cloud, known).await?) else { return Ok(None) };
    let volume = known.instance;
    Ok(match giver {
        Giver::Has { node, alive: false, .. } => {
            Some(format!("node {node} has yet to hand it over, and is not alive"))
        }
        Giver::Has { node, .. } => {
            let told = cloud.store.get(&cloud.keys.status(node, volume)).await?.0;
            let doing = told.and_then(|pair| decode::<Status>(&pair.value).ok()?.doing);
            doing.map(|doing| format!("node {node} has yet to hand it over: {doing}"))
        }
        // At first it may be on its way.
        Giver::HasNot { .. } if waits.state != State::Error => None,
        Giver::HasNot { node } => Some(format!(
            "node {node} has let go of it, and its disk has not come: where it is in neither node's directory it was gone before, and `eschedule volume delete {volume}` takes away what is left"
        )),
    })
}

/// Every volume of every node, by node and name.
///
/// # Errors
/// etcd does not answer.
pub async fn volumes(cloud: &Cloud) -> CloudResult<Vec<VolumeView>> {
    let (views, machines) = list_of(cloud, Workload::Volume).await?;
    let mut holders: HashMap<InstanceId, Vec<(InstanceId, String)>> = HashMap::new();
    for (machine, it) in machines {
        for Attachment { volume, device } in it.volumes {
            holders.entry(volume).or_default().push((machine, device));
        }
    }
    let told_of_one = |mut view: View| {
        let (record, holders) = (view.record.take(), holders.get(&view.instance));
        // Its record names the one that has it; of one that etcd lost only machines tell.
        let is_it = |machine| record.as_ref().is_none_or(|record| record.attached == Some(machine));
        let holder = holders.and_then(|all| all.iter().find(|(machine, _)| is_it(*machine))).cloned();
        told(view, record.as_deref(), holder)
    };
    Ok(views.into_iter().map(told_of_one).collect())
}

pub(crate) fn told(
    view: View,
    record: Option<&Instance>,
    holder: Option<(InstanceId, String)>,
) -> VolumeView {
    // Of one that is there its agent does nothing else that it would tell. That it has yet to hear of another name, say, changes no disk;
    // and of a wish that does the state tells.
    let is_changing = view.status.as_ref().is_some_and(|status| status.doing.is_some());
    let status = match State::named(&view.state) {
        Some(State::Active | State::Rebuilding | State::Resizing) if holder.is_some() => "in-use",
        Some(State::Rebuilding | State::Resizing) => "changing",
        Some(State::Active) if is_changing => "changing",
        Some(State::Active) => "available",
        Some(State::Scheduled | State::Preparing) => "creating",
        Some(State::Destroying) => "deleting",
        Some(State::Unclaimed) => "unclaimed",
        Some(State::Error) => "error",
        _ => "unknown",
    };
    let (instance, device) = holder.unzip();
    let made_of = record.map(|record| &record.spec.image).filter(|image| !image.is_none());
    let copied = made_of.and_then(ImageRef::copied);
    let image = made_of.filter(|_| copied.is_none());
    VolumeView {
        volume: view.instance,
        name: view.name,
        status: status.to_owned(),
        size_gb: view.resources.get(DISK).copied(),
        node: view.node,
        node_alive: view.node_alive,
        instance,
        device,
        image: image.map(|image| image.name.clone().unwrap_or_else(|| image.told().to_owned())),
        copy_of: copied.as_ref().map(|copied| copied.disk),
        copy_of_kind: copied.as_ref().map(|copied| copied.kind),
        snapshot: record.is_some_and(|record| record.spec.is_snapshot()),
        beside: copied.map(|copied| copied.beside).unwrap_or_default(),
        project: view.project,
        labels: view.labels,
        created_at: view.created_at,
        reason: view.reason,
        doing: view.doing,
        locked: record.and_then(|record| record.locked.clone()),
        request_id: view.request_id.or_else(|| record.and_then(|record| record.request_id)),
    }
}

fn of_machine_acted(machine: &Known, device: String, already: Option<String>) -> Attached {
    let acted = Acted { node: machine.node, node_alive: machine.node_alive, awaited: None, already };
    Attached { instance: machine.instance, device, acted }
}

/// As it stands in the machine's history.
fn asked(cloud: &Cloud, machine: &Known, verb: ActionVerb, has: &Attachment, generation: u64) -> Asked {
    let detail = Some(format!("volume {} as {}", has.volume, has.device));
    let asked = Asked::new(machine.instance, machine.node, verb, cloud.host.now(), generation);
    Asked { detail, volume: Some(has.volume), ..asked }
}

/// What is to be waited for, once it is asked of a machine that it has a volume, or has it no more.
fn asked_for(
    machine: &Known,
    order: &Request,
    (volume, has): (InstanceId, bool),
    device: String,
) -> Attached {
    let mut attached = of_machine_acted(machine, device, None);
    attached.acted.awaited = Some(Awaited::Volume { generation: order.generation, volume, has });
    attached
}

/// Adds to a transaction that a machine has this volume. Its request is written, too: whoever wishes the volume's end at this
/// moment compares that.
fn taken(
    cloud: &Cloud,
    disk: &Known,
    record: &mut Doc<Instance>,
    order: &mut Doc<Request>,
    instance: InstanceId,
    txn: Txn,
) -> Txn {
    let generation = record.record.generation.max(order.record.generation).saturating_add(1);
    record.record.attached = Some(instance);
    (record.record.generation, order.record.generation) = (generation, generation);
    (record.record.request_id, order.record.request_id) = (cloud.request_id, cloud.request_id);
    written(cloud, disk, record, order, txn)
}

/// Has a machine's request wish the volumes of its record.
fn wish(cloud: &Cloud, record: &mut Doc<Instance>, order: &mut Doc<Request>, generation: u64) {
    order.record.volumes.clone_from(&record.record.volumes);
    (record.record.generation, order.record.generation) = (generation, generation);
    (record.record.request_id, order.record.request_id) = (cloud.request_id, cloud.request_id);
}

/// Adds both records of one to a transaction that demands that they are as they were read.
fn written(cloud: &Cloud, known: &Known, record: &Doc<Instance>, order: &Doc<Request>, txn: Txn) -> Txn {
    let (record_key, order_key) =
        (cloud.keys.instance(known.instance), cloud.keys.request(known.node, known.instance));
    let of_volume = record.record.kind == Workload::Volume;
    let txn = match of_volume && planted("volume-not-compared") {
        true => txn,
        false => txn
            .when(Compare::Unchanged(record_key.clone(), known.record_revision()))
            .when(Compare::Unchanged(order_key.clone(), known.request_revision())),
    };
    txn.put(record_key, record.encode()).put(order_key, order.encode())
}

/// As which device a machine has a volume, or may have it.
fn holds(machine: &Known, volume: InstanceId) -> Option<String> {
    let (request, status) = (machine.request.record(), machine.status.record());
    volumes::held(volume, machine.record.as_ref(), request, status).map(|has| has.device.clone())
}

/// That the machine which had a volume has it no more, as demands on what was read of it; none where it has it still, or nobody
/// can tell.
async fn lost_by(cloud: &Cloud, holder: InstanceId, volume: InstanceId) -> CloudResult<Option<Vec<Compare>>> {
    let record_key = cloud.keys.instance(holder);
    let machine = match find(cloud, holder).await {
        // Its uuid is never used again.
        Err(CloudError::NotFound(_)) => return Ok(Some(vec![Compare::Absent(record_key)])),
        Ok(Found::Unplaced(_, revision)) => return Ok(Some(vec![Compare::Unchanged(record_key, revision)])),
        Ok(Found::Placed(machine)) => machine,
        Err(error) => return Err(error),
    };
    let (request, status) = (&machine.request, &machine.status);
    let is_told = match (request.record(), status.record()) {
        // What its agent has not heard of yet it may have.
        (Some(request), Some(status)) => status.observed_generation >= request.generation,
        (Some(_), None) => false,
        (None, _) => matches!(request, Read::Absent),
    };
    let is_readable = !matches!(status, Read::Unreadable(_));
    if holds(&machine, volume).is_some() || !is_told || !is_readable {
        return Ok(None);
    }
    Ok(Some(vec![
        as_read(record_key, machine.record_revision()),
        as_read(cloud.keys.request(machine.node, holder), machine.request_revision()),
    ]))
}

pub(crate) async fn known_volume(cloud: &Cloud, volume: InstanceId) -> CloudResult<Known> {
    let known = find_placed(cloud, volume).await.map_err(|error| no_volume(error, volume))?;
    if kind_of(&known) == Some(Workload::Volume) { Ok(known) } else { Err(not_a_volume(volume)) }
}

fn no_volume(error: CloudError, volume: InstanceId) -> CloudError {
    match error {
        CloudError::NotFound(_) => {
            CloudError::NotFound(format!("there is no volume {volume}; `eschedule volume list` shows all"))
        }
        error => error,
    }
}

fn not_a_volume(volume: InstanceId) -> CloudError {
    CloudError::Refused(format!("{volume} is an instance and no volume"))
}

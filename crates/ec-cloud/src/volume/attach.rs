//! A volume is given to a machine, or taken from it: one transaction on the records and requests of both, judged by
//! [`ec_plan::volumes`].

use ec_model::{
    ActionVerb, Attachment, Desired, Doc, Instance, InstanceId, NodeId, Request, Status, Workload,
};
use ec_plan::volumes::{self, Attach, Sides};
use ec_runtime::planted;
use ec_store::{Compare, StoreError, Txn};

use super::{
    holder::{as_read, had, holder_of, holds, lost_by, way_off},
    known_volume,
};
use crate::{
    Acted, Cloud, CloudError, CloudResult, Guest,
    act::{docs, let_in, understood},
    heal::{Had, had_there},
    history::{Asked, Unheard, note},
    image::image_of_copy,
    lookup::{Found, Known, Read, find, find_placed},
    wait::Awaited,
};

/// Another writer changed one of both in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

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
                Some(compares) => txn = txn.when_all(compares),
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
        txn = txn.when_all(compares);
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
                Some(compares) => txn = txn.when_all(compares),
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

/// Adds to a transaction by which a volume is asked for again that the machine has it which is to have it, where there is one; and
/// that another, which had it by the record of `before`, has it no more. Or why that cannot be.
pub(crate) async fn kept_for(
    cloud: &Cloud,
    record: &mut Instance,
    before: Option<&Instance>,
    mut txn: Txn,
) -> CloudResult<Result<Txn, String>> {
    let former = before.and_then(|before| before.attached);
    if let Some((machine, pair)) = holder_of(cloud, record.instance, former).await? {
        record.attached = Some(machine);
        txn = txn.when(Compare::Unchanged(pair.key, pair.mod_revision));
    } else if record.attached.is_none()
        && let Some(node) = record.node()
    {
        // One that was to be taken from a guest, which has it still, is that guest's until it let go of it.
        match had_there(cloud, node, record.instance).await? {
            Had::By(guest) => record.attached = Some(guest),
            Had::ByNobody(still) => txn = txn.when(still),
        }
    }
    // That may be brought back at this moment, with the volume, which is its own by its record.
    if let Some(former) = former.filter(|former| record.attached.is_some_and(|has| has != *former)) {
        match lost_by(cloud, former, record.instance).await? {
            Some(compares) => txn = txn.when_all(compares),
            None => {
                let volume = record.instance;
                return Ok(Err(format!(
                    "instance {former} has it: `eschedule heal {former}` brings that back, `eschedule volume detach {volume}` takes it from there"
                )));
            }
        }
    }
    Ok(Ok(txn))
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
                    None => Err(had(cloud, instance, volume).await),
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

//! Volumes that move from one node to another, on storage that both share.
//!
//! ```text
//!  one transaction: the record's node is the new one, whose request says whom it has the volume from;
//!                   the request of the old one says whom it hands it over to
//!  old node:        disk handed over ──▶ its request and status gone
//!  new node:        disk received ──▶ told as there
//! ```

use ec_model::{ActionVerb, Assigned, Attachment, Handover, InstanceId, NodeId, Record, Workload};
use ec_plan::volumes::{self, Sides};
use ec_store::{Compare, KeyValue, StoreError, Txn};

use crate::{
    Cloud, CloudError, CloudResult, Scheduled,
    act::{docs, let_in},
    history::{Asked, Unheard, note},
    lookup::{Known, find_placed},
    schedule::not_understood,
    source::kind_of,
    storage::{is_one, storage_of},
    volume::{known_volume, refuse_attached},
};

/// Another writer changed it in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// Where a machine is that is to have a volume as that device, where that lies with another node of the same storage; none where it
/// need not, or cannot, move.
///
/// # Errors
/// There is no such volume, or no such machine; [`CloudError::Refused`]: the machine would not take it.
pub async fn node_to_come_to(
    cloud: &Cloud,
    volume: InstanceId,
    machine: InstanceId,
    device: Option<&str>,
) -> CloudResult<Option<NodeId>> {
    let (disk, machine) = (known_volume(cloud, volume).await?, find_placed(cloud, machine).await?);
    if disk.node == machine.node || kind_of(&machine) == Some(Workload::Volume) {
        return Ok(None);
    }
    let refused = |why: String| {
        CloudError::Refused(format!("cannot attach volume {volume} to instance {}: {why}", machine.instance))
    };
    let (from, to) = (storage_of(cloud, disk.node).await?, storage_of(cloud, machine.node).await?);
    // What storage a node has is told by its agent.
    if !disk.node_alive && to.is_some() {
        return Err(refused(format!(
            "node {} has it, and is not alive to hand it over; once its agent is there again, ask again",
            disk.node
        )));
    }
    if !is_one(from.as_ref(), to.as_ref()) {
        return Ok(None);
    }
    // It stays where it is when it came for nothing.
    let (record, order) = docs(&disk)?;
    let sides = Sides { record: &record.record, request: &order.record, status: disk.status.record() };
    volumes::givable(sides).map_err(refused)?;
    let (record, order) = docs(&machine)?;
    let sides = Sides { record: &record.record, request: &order.record, status: machine.status.record() };
    volumes::taken_as(sides, device).map_err(refused)?;
    Ok(Some(machine.node))
}

/// That a machine would be given a volume, as it stands; how many it has is not looked at.
///
/// # Errors
/// There is no such machine; [`CloudError::Refused`]: it would not.
pub async fn takes_volumes(cloud: &Cloud, machine: InstanceId) -> CloudResult<()> {
    let known = find_placed(cloud, machine).await?;
    let (record, order) = docs(&known)?;
    let sides = Sides { record: &record.record, request: &order.record, status: known.status.record() };
    let refused = |why: String| CloudError::Refused(format!("instance {machine} is given no volume: {why}"));
    volumes::taking(sides).map_err(refused)
}

/// The node where an instance is to be placed that is to have these volumes: that of the first, or this one; none where it is all the
/// same.
///
/// # Errors
/// There is no such volume; [`CloudError::Refused`]: another has it, or they cannot all come to one node.
pub async fn node_with(
    cloud: &Cloud,
    volumes: &[InstanceId],
    wanted: Option<NodeId>,
) -> CloudResult<Option<NodeId>> {
    let mut node = wanted;
    if volumes.len() > Attachment::MOST {
        return Err(CloudError::Refused(format!("an instance has {} volumes at most", Attachment::MOST)));
    }
    for volume in volumes {
        let disk = known_volume(cloud, *volume).await?;
        refuse_attached(cloud, &disk).await?;
        let (record, order) = docs(&disk)?;
        let sides = Sides { record: &record.record, request: &order.record, status: disk.status.record() };
        let refused =
            |why: String| CloudError::Refused(format!("no instance can have volume {volume} now: {why}"));
        volumes::given(sides, &cloud.project).map_err(refused)?;
        let here = *node.get_or_insert(disk.node);
        if here == disk.node {
            continue;
        }
        let (from, to) = (storage_of(cloud, disk.node).await?, storage_of(cloud, here).await?);
        if !is_one(from.as_ref(), to.as_ref()) {
            return Err(refused(format!(
                "it lies with node {}, and does not come to {here}: they share no storage, or one of them is not alive",
                disk.node
            )));
        }
        volumes::movable(sides).map_err(refused)?;
    }
    Ok(node)
}

/// The node that had a volume which came, or is to come, from another.
pub(crate) enum Giver {
    /// It has yet to hand it over, by this request of its own.
    Has { node: NodeId, alive: bool, order: KeyValue },
    /// It has let go of it: nothing is asked of it about the volume.
    HasNot { node: NodeId },
}

/// Who is to hand a volume over, or did; none of one that never moved.
pub(crate) async fn giver(cloud: &Cloud, known: &Known) -> CloudResult<Option<Giver>> {
    let handover = known.request.record().and_then(|request| request.handover);
    let Some(Handover::From(node)) = handover else { return Ok(None) };
    let (key, alive) = (cloud.keys.request(node, known.instance), cloud.keys.alive(node));
    let ((order, _), (alive, _)) = tokio::try_join!(cloud.store.get(&key), cloud.store.get(&alive))?;
    Ok(Some(match order {
        Some(order) => Giver::Has { node, alive: alive.is_some(), order },
        None => Giver::HasNot { node },
    }))
}

/// The epoch of a placement that takes the place of another. It goes on from the time of day, so that an etcd that was put back gives none
/// that it gave before: a node knows by the epoch whether what is asked for is what was destroyed there.
pub(crate) fn next_epoch(cloud: &Cloud, before: u64) -> u64 {
    let now = u64::try_from(cloud.host.now().as_second()).unwrap_or_default();
    before.saturating_add(1).max(now)
}

/// Has a volume be with another node. That it is there already is no error.
///
/// # Errors
/// It cannot be as it stands: [`CloudError::Refused`], with nothing changed.
pub async fn move_volume(cloud: &Cloud, volume: InstanceId, node: NodeId) -> CloudResult<Scheduled> {
    let mut unheard = Unheard::default();
    let moved = move_heard(cloud, volume, node, &mut unheard).await;
    moved.map_err(|error| unheard.doubt(error))
}

/// The same; with what of it was not heard of.
async fn move_heard(
    cloud: &Cloud,
    volume: InstanceId,
    node: NodeId,
    unheard: &mut Unheard<Scheduled>,
) -> CloudResult<Scheduled> {
    let refused =
        |why: String| CloudError::Refused(format!("cannot move volume {volume} to node {node}: {why}"));
    for _ in 0..TRIES {
        // Somebody may have had it go on from there since.
        if let Some(moved) = unheard.written(cloud).await? {
            return Ok(*moved);
        }
        let disk = known_volume(cloud, volume).await?;
        if disk.node == node {
            return Ok(Scheduled { instance: volume, node });
        }
        refuse_attached(cloud, &disk).await?;
        let (mut record, mut order) = docs(&disk)?;
        let sides = Sides { record: &record.record, request: &order.record, status: disk.status.record() };
        volumes::movable(sides).map_err(refused)?;
        let image = volumes::made_of(sides).clone();
        let no_storage = |which: NodeId| {
            refused(format!("node {which} is not alive, or has its disks on no storage that is shared"))
        };
        let (old_sign, from) = storage_of(cloud, disk.node).await?.ok_or_else(|| no_storage(disk.node))?;
        let (sign, to) = storage_of(cloud, node).await?.ok_or_else(|| no_storage(node))?;
        if from != to {
            return Err(refused(format!(
                "it lies on storage `{}`, and that node has `{}`",
                from.name, to.name
            )));
        }
        let (told_key, held_key) = (cloud.keys.status(node, volume), cloud.keys.held(node, volume));
        if cloud.store.get(&told_key).await?.0.is_some() || cloud.store.get(&held_key).await?.0.is_some() {
            return Err(refused(
                "that node tells of it, too: it has yet to let go of it, so ask again in a moment; or has one from before etcd was put back, of which `eschedule heal` tells".to_owned(),
            ));
        }
        let generation = record.record.generation.max(order.record.generation).saturating_add(1);
        let before = record.record.assigned.map_or(order.record.epoch, |assigned| assigned.epoch);
        let epoch = next_epoch(cloud, before);
        // What was wished of it before has come to its end. That it is not made anew again, whatever an older etcd wishes, is to be known
        // where it comes to, so that wish goes along. A size that it could not be given is tried there once more, and claimed first: what
        // was claimed for it here may have been given back.
        let resized = disk.status.record().and_then(|status| status.resized.as_ref());
        let was_refused = resized.is_some_and(|was| was.failed.is_some());
        let mut come = order.clone();
        let wish = &mut come.record;
        (wish.epoch, wish.generation, wish.handover) = (epoch, generation, Some(Handover::From(disk.node)));
        wish.resize = wish.resize.filter(|_| was_refused);
        (wish.access, wish.request_id) = (None, cloud.request_id);
        // Nobody knows any more of a wish that failed.
        if let Some(spec) = &mut wish.spec {
            spec.image.clone_from(&image);
        }
        record.record.spec.image = image;
        order.record.handover = Some(Handover::To(node));
        (order.record.generation, order.record.request_id) = (generation, cloud.request_id);
        record.record.assigned = Some(Assigned { node, epoch });
        (record.record.generation, record.record.request_id) = (generation, cloud.request_id);
        record.record.attached = None;
        for (which, sign) in [(disk.node, &old_sign), (node, &sign)] {
            if let Some(why) = not_understood(which, &sign.value, come.record.format()) {
                return Err(refused(why));
            }
        }
        let keys = &cloud.keys;
        let (record_key, from_key, to_key) =
            (keys.instance(volume), keys.request(disk.node, volume), keys.request(node, volume));
        let txn = Txn::new()
            .when(Compare::Unchanged(record_key.clone(), disk.record_revision()))
            .when(Compare::Unchanged(from_key.clone(), disk.request_revision()))
            .when(Compare::Absent(to_key.clone()))
            .when(Compare::Absent(told_key))
            .when(Compare::Absent(held_key))
            .when(Compare::Unchanged(old_sign.key, old_sign.mod_revision))
            .when(Compare::Unchanged(sign.key, sign.mod_revision))
            .put(record_key, record.encode())
            .put(from_key, order.encode())
            .put(to_key, come.encode());
        let txn = let_in(cloud, &disk, "move", false, txn).await?;
        let detail = Some(format!("from node {} to node {node}", disk.node));
        let (verb, at) = (ActionVerb::Migrate, cloud.host.now());
        let asked = Asked { detail, ..Asked::new(volume, node, verb, at, generation) };
        let mark = asked.mark();
        let txn = note(cloud, asked, txn, None).await?;
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(Scheduled { instance: volume, node }),
            Ok(_) => {}
            Err(StoreError::Unknown(_)) => unheard.note(mark, Scheduled { instance: volume, node }),
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("{volume} keeps changing; try again")))
}

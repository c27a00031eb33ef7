//! Which machine has a volume, what that keeps others from, and when it has it no more.

use std::time::Duration;

use ec_model::{Attachment, Instance, InstanceId, Power, PowerWish, State, Workload, decode};
use ec_plan::{status::is_lost, verbs::Verb, volumes};
use ec_store::{Compare, KeyValue, Revision, Txn};
use tokio::time::Instant;

use super::known_volume;
use crate::{
    Cloud, CloudError, CloudResult,
    act::docs,
    heal::{Had, had_there},
    lookup::{Found, Known, Read, find, find_placed},
    view::OtherTold,
};

/// Which of four records tells that a machine lets go is not known before.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// An error where a machine has this volume, and this is not done to what is its: it is locked, or what it holds in its memory is of
/// the disk that there is, or of its size. Its node looks once more when it comes to it. Of one that has it, what is to be demanded
/// lest somebody locks it meanwhile.
pub(crate) async fn refuse_held(cloud: &Cloud, disk: &Known, verb: &Verb) -> CloudResult<Option<Compare>> {
    let volume = disk.instance;
    let Some(holder) = disk.record.as_ref().and_then(|record| record.attached) else { return Ok(None) };
    if lost_by(cloud, holder, volume).await?.is_some() {
        return Ok(None);
    }
    let machine = match find_placed(cloud, holder).await {
        // It has come to its end since.
        Err(CloudError::NotFound(_)) => return Ok(None),
        machine => machine?,
    };
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
    // What was wished and done is over where the guest is up again, or has ended, and nobody wished that.
    let is_pending = |wish: &PowerWish| {
        wish.power == Power::Suspended
            && status.is_none_or(|status| status.power_generation < wish.generation)
    };
    let is_suspended = status.is_some_and(|status| status.state == State::Suspended)
        || machine.request.record().is_some_and(|request| is_pending(&request.power));
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
            false if machine.record.is_none() && !machine.is_asked_for() => FORGOTTEN.to_owned(),
            false => format!("is not stopped: `eschedule stop {holder}`"),
        };
        return Err(refused(format!("instance {holder} has it, and {why}")));
    }
    Ok(Some(as_read(cloud.keys.instance(holder), machine.record_revision())))
}

/// That a key is as it was read.
pub(super) fn as_read(key: String, revision: Revision) -> Compare {
    match revision {
        0 => Compare::Absent(key),
        revision => Compare::Unchanged(key, revision),
    }
}

/// The machine that is to have a volume, by its record, whatever that of the volume says; where there are several, this one.
pub(super) async fn holder_of(
    cloud: &Cloud,
    volume: InstanceId,
    rather: Option<InstanceId>,
) -> CloudResult<Option<(InstanceId, KeyValue)>> {
    let pairs = cloud.store.list(&cloud.keys.instances()).await?.pairs;
    let has = |pair: KeyValue| {
        let machine = decode::<Instance>(&pair.value).ok()?;
        machine.volumes.iter().any(|has| has.volume == volume).then_some((machine.instance, pair))
    };
    Ok(pairs.into_iter().filter_map(has).min_by_key(|(machine, _)| Some(*machine) != rather))
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
    let txn = txn.when_all(compares).put(key, record.encode());
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

/// Who has a volume, or is about to, and what is under way between the two.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) instance: InstanceId,
    pub(crate) device: String,
    /// What its agent has yet to do.
    pub(crate) doing: Option<&'static str>,
    /// Why it cannot.
    pub(crate) reason: Option<String>,
}

impl Holder {
    /// A machine that has this, as it is to have `wanted`, where it is asked for, and as its agent tells of its volumes.
    pub(super) fn of(
        instance: InstanceId,
        has: &Attachment,
        wanted: Option<&[Attachment]>,
        told: &OtherTold,
    ) -> Self {
        let is_in = |all: &[Attachment]| all.iter().any(|other| other.volume == has.volume);
        let doing = match (wanted.map(is_in), is_in(&told.volumes)) {
            (Some(true), false) => Some("being attached"),
            (Some(false), _) => Some("being detached"),
            // All that it may have is told then, whichever of them it is about.
            (Some(true), true) if told.volumes_changing => {
                Some("the volumes of its instance are being changed")
            }
            _ => None,
        };
        let failed = told.volumes_failed.as_ref().filter(|_| wanted.is_some());
        let reason =
            failed.map(|why| format!("the volumes of its instance are not as they are to be: {why}"));
        Self { instance, device: has.device.clone(), doing, reason }
    }
}

/// The same of a machine that is known, where it has the volume, or may have it.
pub(super) fn held_by(machine: &Known, volume: InstanceId) -> Option<Holder> {
    let (record, request, status) =
        (machine.record.as_ref(), machine.request.record(), machine.status.record());
    let has = volumes::held(volume, record, request, status)?;
    // Of one that is to be destroyed the record is gone already.
    let wanted = request.map(|request| record.map_or(&request.volumes, |record| &record.volumes).as_slice());
    let told = status.map(|status| OtherTold {
        volumes: status.volumes.clone(),
        volumes_changing: status.volumes_changing,
        volumes_failed: status.volumes_failed.clone(),
    });
    Some(Holder::of(machine.instance, has, wanted, &told.unwrap_or_default()))
}

/// The machine that a volume was given to last, by its record; of one that etcd lost only machines tell.
pub(super) async fn given_to(
    cloud: &Cloud,
    volume: InstanceId,
    record: Option<&Instance>,
) -> CloudResult<Option<InstanceId>> {
    match record {
        Some(record) => Ok(record.attached),
        None => Ok(holder_of(cloud, volume, None).await?.map(|(holder, _)| holder)),
    }
}

/// An error where a machine has this volume.
pub(crate) async fn refuse_attached(cloud: &Cloud, disk: &Known) -> CloudResult<()> {
    match had_by(cloud, disk).await?.0 {
        Some(holder) if lost_since(cloud, disk, holder).await?.is_none() => {
            Err(had(cloud, holder, disk.instance).await)
        }
        _ => Ok(()),
    }
}

/// An error where a machine has this volume that would miss it; else what that stands on, of an older etcd, too, that comes meanwhile. One
/// whose user has ended it, and whose agent is not there to do that, has it for as long, which may be for ever: both go by the time that
/// agent is back.
pub(crate) async fn refuse_missed(cloud: &Cloud, disk: &Known) -> CloudResult<Vec<Compare>> {
    let (holder, stands_on) = had_by(cloud, disk).await?;
    let Some(holder) = holder else { return Ok(stands_on) };
    if let Some(compares) = lost_since(cloud, disk, holder).await? {
        return Ok(compares);
    }
    if let Ok(Found::Placed(machine)) = find(cloud, holder).await
        && machine.is_doomed()
        && !machine.node_alive
    {
        let key = cloud.keys.request(machine.node, holder);
        return Ok(vec![as_read(key, machine.request_revision())]);
    }
    Err(had(cloud, holder, disk.instance).await)
}

/// That a machine has a volume, and how it comes to have it no more.
pub(super) async fn had(cloud: &Cloud, holder: InstanceId, volume: InstanceId) -> CloudError {
    let way = way_off(cloud, holder, volume).await;
    CloudError::Refused(format!("instance {holder} has volume {volume}: {way}"))
}

/// The machine that has this volume, by the last that is known of it; and on what it stands that there is none.
async fn had_by(cloud: &Cloud, disk: &Known) -> CloudResult<(Option<InstanceId>, Vec<Compare>)> {
    Ok(match given_to(cloud, disk.instance, disk.record.as_ref()).await? {
        // Of a machine that etcd lost, too, only its node tells.
        None if !is_recorded(disk) => match had_there(cloud, disk.node, disk.instance).await? {
            Had::By(guest) => (Some(guest), Vec::new()),
            Had::ByNobody(still) => (None, vec![still]),
        },
        holder => (holder, Vec::new()),
    })
}

/// What it stands on that this machine, which had the volume last, has it no more; none where it has. What only the machine tells of is
/// no old word.
async fn lost_since(cloud: &Cloud, disk: &Known, holder: InstanceId) -> CloudResult<Option<Vec<Compare>>> {
    if is_recorded(disk) { lost_by(cloud, holder, disk.instance).await } else { Ok(None) }
}

/// Whether its record is of since it was placed: one of before tells of nobody who was given it.
fn is_recorded(disk: &Known) -> bool {
    disk.record.as_ref().is_some_and(|record| record.assigned.is_some())
}

/// What is told of a machine that runs, and of which etcd has neither record nor request.
const FORGOTTEN: &str = "etcd has forgotten that; `eschedule heal` brings back what it lost, or `eschedule destroy` ends the instance first";

/// How a machine that has a volume comes to have it no more.
pub(super) async fn way_off(cloud: &Cloud, holder: InstanceId, volume: InstanceId) -> &'static str {
    let device = match find(cloud, holder).await {
        Ok(Found::Placed(machine)) if machine.is_doomed() => {
            return "it is being destroyed, and has it until its end";
        }
        Ok(Found::Placed(machine)) if machine.record.is_none() && !machine.is_asked_for() => {
            return FORGOTTEN;
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

/// As which device a machine has a volume, or may have it.
pub(super) fn holds(machine: &Known, volume: InstanceId) -> Option<String> {
    let (request, status) = (machine.request.record(), machine.status.record());
    volumes::held(volume, machine.record.as_ref(), request, status).map(|has| has.device.clone())
}

/// That the machine which had a volume has it no more, as demands on what was read of it; none where it has it still, or nobody
/// can tell.
pub(super) async fn lost_by(
    cloud: &Cloud,
    holder: InstanceId,
    volume: InstanceId,
) -> CloudResult<Option<Vec<Compare>>> {
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

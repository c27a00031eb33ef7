//! Which machine may have which volume, decided before anything is written.
//!
//! A volume lies on the storage of one node, and one machine has it at a time. Its record names the machine that has it, or
//! had it last; what that machine's records and its agent say tells which of the two.

use ec_model::{
    Attachment, Desired, ImageRef, Instance, InstanceId, Rebuild, Request, State, Status, Workload,
};

use crate::{
    status::is_lost,
    verbs::{Situation, is_built, is_to_be_made_anew, locked},
};

/// How an agent begins to tell that it waits for a volume which another node is to hand over; that one tells why it does not.
pub const NOT_HANDED_OVER: &str = "the node that has it has not handed it over yet";

/// What control knows of a volume, or of a machine.
#[derive(Debug, Clone, Copy)]
pub struct Sides<'a> {
    /// What is wanted of it.
    pub record: &'a Instance,
    /// What its node shall do about it.
    pub request: &'a Request,
    /// What its agent tells.
    pub status: Option<&'a Status>,
}

/// What is to be done that a machine has a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attach {
    /// It has it, or is about to.
    Already(Attachment),
    /// This is to be written into its records.
    Do(Attachment),
}

/// As what a machine has a volume, or may have it: it is wanted so, or its agent tells so, who tells of no less than there is.
pub fn held<'a>(
    volume: InstanceId,
    record: Option<&'a Instance>,
    request: Option<&'a Request>,
    status: Option<&'a Status>,
) -> Option<&'a Attachment> {
    let [record, request, status] = [
        record.map(|record| &record.volumes),
        request.map(|request| &request.volumes),
        status.map(|status| &status.volumes),
    ];
    [record, request, status].into_iter().flatten().flatten().find(|has| has.volume == volume)
}

/// What is to be done that a machine has a volume, as that device where one is named.
///
/// # Errors
/// Why it cannot.
pub fn attach(volume: Sides<'_>, machine: Sides<'_>, device: Option<&str>) -> Result<Attach, String> {
    let wanted = volume.record.instance;
    if let Some(has) = machine.record.volumes.iter().find(|has| has.volume == wanted) {
        return match device.filter(|device| *device != has.device) {
            Some(_) => Err(format!("the instance has it as {} already: detach it first", has.device)),
            None => Ok(Attach::Already(has.clone())),
        };
    }
    givable(volume)?;
    if volume.record.project != machine.record.project {
        return Err(format!(
            "the volume is of project `{}`, and the instance of `{}`",
            volume.record.project, machine.record.project
        ));
    }
    changeable(machine, "the instance")?;
    let here = |sides: Sides<'_>| sides.record.assigned.map(|assigned| assigned.node);
    if here(volume) != here(machine) {
        let node = here(volume).map_or_else(|| "no node yet".to_owned(), |node| format!("node {node}"));
        return Err(format!("the volume lies on the storage of {node}, where the instance is not"));
    }
    there(volume.status)?;
    // One that its guest has all the same stays where that has it.
    let had = machine.status.and_then(|told| told.volumes.iter().find(|has| has.volume == wanted));
    let is_free = |device: &&str| machine.record.volumes.iter().all(|has| has.device != *device);
    let device = device.or_else(|| had.map(|has| &*has.device).filter(is_free));
    Ok(Attach::Do(Attachment { volume: wanted, device: taken_as(machine, device)? }))
}

/// Why a machine is given no volume, whatever it has, as it stands.
///
/// # Errors
/// That.
pub fn taking(machine: Sides<'_>) -> Result<(), String> {
    changeable(machine, "the instance")?;
    settled(machine)
}

/// As which device a machine takes one more volume.
///
/// # Errors
/// Why it takes none, or not as that one.
pub fn taken_as(machine: Sides<'_>, device: Option<&str>) -> Result<String, String> {
    taking(machine)?;
    if machine.record.volumes.len() >= Attachment::MOST {
        return Err(format!("the instance has {} volumes, and may have no more", Attachment::MOST));
    }
    let free = match device {
        Some(device) if !Attachment::is_device(device) => {
            return Err(format!("`{device}` is no device that a volume can be: wanted vdb to vdz"));
        }
        Some(device) if machine.record.volumes.iter().any(|has| has.device == device) => {
            return Err(format!("the instance has another volume as {device}"));
        }
        Some(device) => Some(device.to_owned()),
        None => Attachment::free_device(&machine.record.volumes),
    };
    free.ok_or_else(|| "the instance has no device left".to_owned())
}

/// Why no new machine of that project gets a volume, on its node.
///
/// # Errors
/// That.
pub fn given(volume: Sides<'_>, project: &str) -> Result<(), String> {
    givable(volume)?;
    if volume.record.project != project {
        return Err(format!("the volume is of project `{}`", volume.record.project));
    }
    there(volume.status)
}

/// Why a volume is given to nobody, as it was made and is asked for now.
///
/// # Errors
/// That.
pub fn givable(volume: Sides<'_>) -> Result<(), String> {
    if volume.record.spec.is_snapshot() {
        return Err("it is a snapshot, and stays as it was made: make volumes of what is in it".to_owned());
    }
    if is_to_be_made_anew(volume.request, volume.status) {
        return Err("the volume is being made anew; ask again when that is done".to_owned());
    }
    changeable(volume, "the volume")
}

/// Why there may be nothing to copy of what this is told of.
///
/// # Errors
/// That.
pub fn copied(kind: Workload, status: Option<&Status>) -> Result<(), String> {
    match kind {
        Workload::Volume => there(status),
        Workload::Machine if status.is_some_and(is_built) => Ok(()),
        Workload::Machine => Err("it never ran yet, and there may be no disk of it".to_owned()),
    }
}

/// Why a volume of which this is told cannot be given to a machine, nor copied.
///
/// # Errors
/// That.
pub fn there(status: Option<&Status>) -> Result<(), String> {
    match status.map(|status| (status.state, status.reason.as_deref())) {
        Some((State::Active, _)) => Ok(()),
        Some((state, reason)) => {
            let why = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            Err(format!("the volume is {state}{why}"))
        }
        None => Err(
            "nothing is told of the volume: it is about to be made, or its status cannot be read; `eschedule volume show` says which"
                .to_owned(),
        ),
    }
}

/// Why a volume of which this is told cannot be made anew. One whose disk is gone can: that is what copies of it are for.
///
/// # Errors
/// That.
pub fn renewable(status: Option<&Status>) -> Result<(), String> {
    if status.is_some_and(is_lost) { Ok(()) } else { there(status) }
}

/// Why a volume of this machine is not changed, by who holds its lock for that reason, or by anybody: who locked the machine means its
/// disks, too.
///
/// # Errors
/// That.
pub fn open(machine: &Instance, held: Option<&str>) -> Result<(), String> {
    let instance = machine.instance;
    match (machine.locked.as_deref(), held) {
        (None, None) => Ok(()),
        (Some(reason), Some(held)) if reason == held => Ok(()),
        (None, Some(_)) => Err(format!("somebody else unlocked instance {instance} meanwhile, which has it")),
        (Some(reason), _) => Err(format!("instance {instance} has it: {}", locked(instance, reason))),
    }
}

/// Why this volume of a machine cannot be taken from it now.
///
/// # Errors
/// That.
pub fn detach(volume: &Instance, machine: Sides<'_>, has: &Attachment) -> Result<(), String> {
    if has.is_root() {
        return Err("it boots from that, and has it until it is destroyed".to_owned());
    }
    unlocked(volume, "the volume")?;
    changeable(machine, "the instance")?;
    settled(machine)
}

/// Why a volume cannot be another node's, which has the same storage.
///
/// # Errors
/// That.
pub fn movable(volume: Sides<'_>) -> Result<(), String> {
    changeable(volume, "the volume")?;
    there(volume.status)?;
    lies_alone(made_of(volume))?;
    if is_to_be_made_anew(volume.request, volume.status) {
        return Err("the volume is being made anew; ask again when that is done".to_owned());
    }
    let resized = volume.status.and_then(|status| status.resized.as_ref()).map(|was| was.wished_at);
    let is_sized = resized >= volume.request.resize.map(|wish| wish.wished_at);
    let is_settled = is_sized
        && volume.status.is_some_and(|status| {
            status.observed_generation >= volume.request.generation && status.doing.is_none()
        });
    match is_settled {
        true => Ok(()),
        false => Err("the volume is being changed; ask again when that is done".to_owned()),
    }
}

/// What a disk was made of: that which was wished last, unless it is not carried out, or failed.
pub fn made_of(disk: Sides<'_>) -> &ImageRef {
    let came = disk.status.and_then(|status| status.rebuilt.as_ref());
    Rebuild::disk(disk.request.rebuild.as_ref(), &disk.record.spec.image, came)
}

/// Why the disk of a volume that is made of this cannot lie with another node, which has the same storage.
///
/// # Errors
/// That.
pub fn lies_alone(image: &ImageRef) -> Result<(), String> {
    if image.is_of_several() {
        return Err("it is a snapshot of several disks: make volumes of what is in it".to_owned());
    }
    match image.is_none() || image.copied().is_some() {
        true => Ok(()),
        false => Err(
            "it stands on an image, which lies with its node: `eschedule volume clone` makes one that stands on none"
                .to_owned(),
        ),
    }
}

fn changeable(sides: Sides<'_>, what: &str) -> Result<(), String> {
    if sides.request.desired == Desired::Destroyed {
        return Err(format!("{what} is being destroyed"));
    }
    unlocked(sides.record, what)
}

fn unlocked(record: &Instance, what: &str) -> Result<(), String> {
    match &record.locked {
        Some(reason) => Err(format!("{what} cannot be changed: {}", locked(record.instance, reason))),
        None => Ok(()),
    }
}

/// Memory that was saved goes on with the volumes that there were; and who boots from a rescue disk has none.
fn settled(machine: Sides<'_>) -> Result<(), String> {
    use Situation as S;
    let situation = Situation::of(machine.record, machine.request, machine.status);
    let hint = match situation {
        S::Suspending | S::Suspended => "`eschedule resume` lets it go on",
        S::Rescuing | S::Rescued | S::RescuedOff => "`eschedule unrescue` boots it from its own disk again",
        S::Unrescuing | S::Rebuilding | S::Resizing => "ask again when that is done",
        S::Building
        | S::Running
        | S::Stopping
        | S::Stopped
        | S::Rebooting
        | S::Paused
        | S::Resized
        | S::Error => {
            return Ok(());
        }
    };
    Err(format!("the instance is {situation}; {hint}"))
}

#[cfg(test)]
mod tests;

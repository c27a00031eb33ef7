//! Volumes: made, given to machines and taken from them, extended and deleted.
//!
//! ```text
//!   create ──▶ as an instance: intent, claim, request          extend ──▶ act: claim, then the wish
//!   attach ──▶ one transaction on the records and requests of both, judged by ec_plan::volumes
//!   detach ──▶ the machine's record and request ──▶ its agent tells ──▶ let_go: the volume's record
//!   delete ──▶ refused while a machine has it ──▶ destroy
//! ```

mod attach;
mod holder;
mod view;

pub use attach::{Attached, attach, detach};
pub(crate) use attach::{bootable, given, kept_by, kept_for};
pub use holder::{let_go, until_free};
pub(crate) use holder::{refuse_attached, refuse_held, refuse_missed};
pub use view::{VolumeView, volume, volumes};
#[cfg(test)]
pub(crate) use {holder::Holder, view::told};

use std::collections::{BTreeMap, HashSet};

use ec_model::{
    Attachment, CopyOf, Extent, ImageRef, InstanceId, NodeId, ResourceQuery, Status, Workload,
    input::{HOSTNAME, LABELS_MAX, LabelSelector, is_hostname},
};
use ec_plan::verbs::Verb;
use tokio_util::sync::CancellationToken;

use crate::{
    Acted, Ask, Cloud, CloudError, CloudResult, Guest, Naming, NoRoom, Scheduled, Wanted,
    act::act_as,
    destroy::{Chosen, Doomed, destroy_as},
    image::{self, image_of_copy},
    lookup::{Found, Known, find, find_placed, resolve_as},
    schedule,
    source::{Source, kind_of},
};

const DISK: &str = "DISK_GB";

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
        &*format!("wanted {HOSTNAME}")
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

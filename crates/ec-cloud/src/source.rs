//! Disks that others are made copies of: only the node makes a copy that has what is copied.

use std::borrow::Cow;

use ec_model::{
    ActionVerb, Attachment, CopyOf, ImageRef, Instance, InstanceId, NodeId, ResourceQuery, Workload, decode,
};
use ec_plan::{
    sizes::{missed, of_disk},
    volumes,
};
use ec_store::{Compare, Txn};

use crate::{
    Cloud, CloudError, CloudResult,
    history::{Asked, note},
    image::told_of_copy,
    lookup::{Known, find_placed},
};

const DISK: &str = "DISK_GB";

/// A disk that is to be copied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    disk: InstanceId,
    kind: Workload,
    /// The node that has it.
    pub(crate) node: NodeId,
    /// How large it is as far as its record tells: 0 where it is as large as its image.
    pub(crate) gigabytes: u64,
}

/// Whether a disk is made, and can be copied from here on.
///
/// # Errors
/// There is no such thing, or etcd does not answer.
pub async fn is_made(cloud: &Cloud, disk: InstanceId) -> CloudResult<bool> {
    let known = find_placed(cloud, disk).await?;
    Ok(volumes::copied(kind_of(&known).unwrap_or_default(), known.status.record()).is_ok())
}

/// Adds to the transaction by which a copy of a machine's disk is requested that it was copied, to the history of that machine: which
/// has to be as it was read, lest something is added where its end was wished meanwhile.
///
/// # Errors
/// etcd does not answer.
pub(crate) async fn note_copy(cloud: &Cloud, copy: &Instance, txn: Txn) -> CloudResult<Txn> {
    let Some(CopyOf { kind: Workload::Machine, disk, .. }) = copy.spec.image.copied() else {
        return Ok(txn);
    };
    let key = cloud.keys.instance(disk);
    let Some(pair) = cloud.store.get(&key).await?.0 else { return Ok(txn) };
    // What cannot be read, or is nowhere, has no history to add to.
    let Ok(record) = decode::<Instance>(&pair.value) else { return Ok(txn) };
    let Some(node) = record.node() else { return Ok(txn) };
    let detail = Some(told_of_copy(cloud, copy).await);
    let asked = Asked {
        detail,
        at_once: true,
        ..Asked::new(disk, node, ActionVerb::CreateImage, cloud.host.now(), record.generation)
    };
    note(cloud, asked, txn.when(Compare::Unchanged(key, pair.mod_revision)), None).await
}

/// So many copies of copies are followed: two may be copies of each other.
const COPIES: usize = 16;

/// What a disk is made of first that this is the image of, as far as records tell: of a copy what the copied disk is made of.
///
/// # Errors
/// etcd does not answer, or something of that cannot be read.
pub async fn made_of(cloud: &Cloud, image: &ImageRef) -> CloudResult<Option<ImageRef>> {
    let mut image = Some(image.clone()).filter(|image| !image.is_none());
    for _ in 0..COPIES {
        let Some(CopyOf { disk, held, .. }) = image.as_ref().and_then(ImageRef::copied) else {
            return Ok(image);
        };
        image = match find_if_any(cloud, held.unwrap_or(disk)).await? {
            Some(known) => image_of(cloud, &known).await?,
            None => None,
        };
    }
    Ok(None)
}

/// The same where it is a copy, for its record: nothing hangs on it.
pub(crate) async fn origin(cloud: &Cloud, image: &ImageRef) -> Option<ImageRef> {
    image.copied()?;
    made_of(cloud, image).await.ok().flatten()
}

/// What is told to be the image of its disk, or of the volume that it boots from; of a copy, where that is told, of what was copied.
///
/// # Errors
/// As [`made_of`].
pub async fn image_of(cloud: &Cloud, known: &Known) -> CloudResult<Option<ImageRef>> {
    let root = known.record.as_ref().and_then(|record| Attachment::root_of(&record.volumes));
    let root = match root {
        Some(root) => match find_if_any(cloud, root).await? {
            None => return Ok(None),
            root => root,
        },
        None => None,
    };
    let known = root.as_ref().unwrap_or(known);
    if let Some(image) = known.record.as_ref().and_then(|record| record.image()) {
        return Ok(Some(image.clone()));
    }
    let wanted = known.record.as_ref().map(|record| &record.spec);
    let spec = wanted.or_else(|| known.request.record()?.spec.as_ref());
    Ok(spec.map(|spec| spec.image.clone()).filter(|image| !image.is_none()))
}

/// What room something takes that is made from this image: a copy is a whole disk, so where the query asks for none, as much as what is
/// copied.
///
/// # Errors
/// There is nothing to copy, it is larger than what is asked for, or nothing tells how large it is.
pub async fn room_from<'a>(
    cloud: &Cloud,
    query: &'a ResourceQuery,
    image: &ImageRef,
) -> CloudResult<Cow<'a, ResourceQuery>> {
    let room = Source::of(cloud, image).await?.map(|source| source.room(query)).transpose()?;
    Ok(room.flatten().map_or(Cow::Borrowed(query), Cow::Owned))
}

/// One that may be gone.
///
/// # Errors
/// As [`made_of`].
pub async fn find_if_any(cloud: &Cloud, instance: InstanceId) -> CloudResult<Option<Known>> {
    match find_placed(cloud, instance).await {
        Err(CloudError::NotFound(_)) => Ok(None),
        found => found.map(Some),
    }
}

impl Source {
    /// What an image is a copy of; nothing where it is none.
    ///
    /// # Errors
    /// There is no such disk on any node.
    pub(crate) async fn of(cloud: &Cloud, image: &ImageRef) -> CloudResult<Option<Self>> {
        let Some(CopyOf { disk, held, beside, .. }) = image.copied() else { return Ok(None) };
        let known = find_placed(cloud, disk).await.map_err(|error| match error {
            CloudError::NotFound(_) => CloudError::NotFound(format!(
                "it cannot be a copy of {disk}, of which there is nothing (any more): name another image"
            )),
            error => error,
        })?;
        let kind = kind_of(&known).unwrap_or_default();
        // Its node would find nothing to copy, and give the copy up.
        let is_there = |known: &Known| {
            let why = volumes::copied(kind_of(known).unwrap_or_default(), known.status.record());
            let disk = known.instance;
            why.map_err(|why| CloudError::Refused(format!("cannot make a copy of {disk}: {why}")))
        };
        is_there(&known)?;
        let root = known.record.as_ref().and_then(|record| Attachment::root_of(&record.volumes));
        let mut gigabytes = match root {
            Some(root) => gigabytes_of(cloud, &find_placed(cloud, root).await?).await?,
            None => gigabytes_of(cloud, &known).await?,
        };
        let of = known.record.as_ref().and_then(|record| record.spec.image.copied());
        let holds = of.map(|of| of.beside).unwrap_or_default();
        if let Some(held) = held.filter(|held| !holds.contains(held)) {
            return Err(CloudError::NotFound(format!("volume {disk} has no copy of {held} in it")));
        }
        // How large each disk of several is no record tells.
        if !holds.is_empty() {
            gigabytes = 0;
        }
        for volume in beside {
            let volume = find_placed(cloud, volume).await?;
            is_there(&volume)?;
            let volume = gigabytes_of(cloud, &volume).await?;
            // Nothing where one of them is as large as its image.
            gigabytes = if gigabytes == 0 { 0 } else { gigabytes.saturating_add(volume) };
        }
        Ok(Some(Self { disk, kind, node: known.node, gigabytes }))
    }

    /// An error where a copy of so many GiB would be too small.
    pub(crate) fn fits(&self, gigabytes: u64) -> CloudResult<()> {
        if gigabytes >= self.gigabytes {
            return Ok(());
        }
        let (has, kind) = (self.gigabytes, self.kind.word());
        Err(CloudError::Invalid(format!(
            "{gigabytes} GB are too few for a copy of {kind} {}, which has {has}",
            self.disk
        )))
    }

    /// The query with the disk of a copy, where it asks for none: that is a whole one, which stands on no image.
    ///
    /// # Errors
    /// A copy of the size that it asks for would be too small, or nothing tells of which it would be.
    pub(crate) fn room(&self, query: &ResourceQuery) -> CloudResult<Option<ResourceQuery>> {
        if let Some(gigabytes) = query.total().get(DISK) {
            return self.fits(*gigabytes).map(|()| None);
        }
        if self.gigabytes == 0 {
            return Err(CloudError::Invalid(format!(
                "no record tells how large {} {} is, and a copy of it is claimed in full: add how large it shall be to the query, for example `{DISK}:5`",
                self.kind.word(),
                self.disk
            )));
        }
        query.with(DISK, self.gigabytes).map(Some).map_err(|error| CloudError::Invalid(error.to_string()))
    }

    /// An error where so many GiB that are claimed for a disk are too few to make it anew as a copy.
    pub(crate) fn fits_claim(&self, instance: InstanceId, claimed: u64) -> CloudResult<()> {
        if claimed > 0 {
            return self.fits(claimed);
        }
        let gigabytes = if self.gigabytes == 0 { String::new() } else { format!(":{}", self.gigabytes) };
        Err(CloudError::Refused(format!(
            "the disk of {instance} is as large as its image, with nothing claimed for it, and a copy is claimed in full: `eschedule resize {instance}` gives it {DISK}{gigabytes} first"
        )))
    }

    /// An error where a copy is to be made on another node.
    pub(crate) fn is_on(&self, node: NodeId) -> CloudResult<()> {
        if node == self.node {
            return Ok(());
        }
        Err(CloudError::Refused(format!(
            "{} {} lies on the storage of node {}, and is copied there only",
            self.kind.word(),
            self.disk,
            self.node
        )))
    }
}

/// How large its disk is, as far as its record tells: one of before it grew, where etcd was put back, and its node claims what there is.
/// Of one that could not have its last size its node tells.
async fn gigabytes_of(cloud: &Cloud, known: &Known) -> CloudResult<u64> {
    let missed = known.request.record().and_then(|request| missed(request, known.status.record()));
    if let Some(has) = missed.map(|was| of_disk(&was.resources)).filter(|has| *has > 0) {
        return Ok(has);
    }
    let recorded = recorded_of(known);
    // What is claimed beside a size that is neither confirmed nor reverted may be more than it is.
    let is_settled = known.record.as_ref().is_none_or(|record| record.before.is_none());
    if recorded == 0 || !is_settled {
        return Ok(recorded);
    }
    let held = cloud.placement.allocations(known.instance).await?;
    let amounts = held.iter().flat_map(|held| held.allocations.values());
    let claimed: u64 = amounts.filter_map(|amounts| amounts.get(DISK)).sum();
    Ok(recorded.max(claimed))
}

/// How large its disk is as its record has it; 0 where that is as large as its image.
fn recorded_of(known: &Known) -> u64 {
    let record = known.record.as_ref().map(|record| &record.spec);
    let spec = record.or_else(|| known.request.record().and_then(|request| request.spec.as_ref()));
    spec.and_then(|spec| spec.resources.get(DISK).copied()).unwrap_or(0)
}

/// What kind of workload it is, where anything tells.
pub(crate) fn kind_of(known: &Known) -> Option<Workload> {
    let kind = known.record.as_ref().map(|record| record.kind);
    let kind = kind.or_else(|| known.request.record().map(|request| request.kind));
    kind.or_else(|| known.status.record().map(|status| status.kind))
}

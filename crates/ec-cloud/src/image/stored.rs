//! Images as they lie in etcd: found by uuid or name, written with their names, taken away step by step.

use ec_model::{Doc, Image, ImageId, ImageStatus};
use ec_store::{Compare, Revision, StoreError, Txn};

use crate::{
    Cloud, CloudError, CloudResult,
    catalog::missing,
    lookup::{MENDS, is_beginning},
    trust_clock,
};

/// A record as it was read.
pub(super) struct Stored {
    pub(super) doc: Doc<Image>,
    pub(super) revision: Revision,
}

pub(super) fn owned(cloud: &Cloud, image: &Image) -> CloudResult<()> {
    if image.project == cloud.project {
        return Ok(());
    }
    Err(CloudError::Refused(format!(
        "the image {} is of project `{}`, and only that may change it",
        image.id, image.project
    )))
}

pub(super) fn taken(name: &str) -> CloudError {
    CloudError::Refused(format!(
        "there is an image `{name}` already: `eschedule image delete {name}` takes it away"
    ))
}

/// Sees to it that the name is free, where who bears it is only left over. `ahead`: see [`tend_images`](super::tend_images).
pub(super) async fn free(
    cloud: &Cloud,
    name: &str,
    ahead: &impl AsyncFn() -> Option<i64>,
    is_whole: &impl AsyncFn(&Image) -> CloudResult<bool>,
    remove: &impl AsyncFn(&Image) -> CloudResult<()>,
) -> CloudResult<()> {
    let names = cloud.keys.image_names(&cloud.project, name);
    drop_alone(cloud, cloud.store.keys(&names).await?).await?;
    for stored in bearers(cloud, &names).await? {
        let image = &stored.doc.record;
        if !image.is_left_over(cloud.host.now()) {
            let name = &image.name;
            return Err(match image.status {
                ImageStatus::Saving => CloudError::Refused(format!(
                    "there is an image `{name}` whose bytes are on their way, or its command was killed less than ten minutes ago: `eschedule image delete {name}` takes it away"
                )),
                _ => taken(name),
            });
        }
        trust_clock(ahead().await)?;
        drop_left_over(cloud, stored, is_whole, remove).await?;
    }
    Ok(())
}

/// Takes away an image that nobody is at any more. Not where all of its bytes are there: whoever sent them may have ended it well, in an
/// etcd that had more than this one has.
pub(super) async fn drop_left_over(
    cloud: &Cloud,
    stored: Stored,
    is_whole: &impl AsyncFn(&Image) -> CloudResult<bool>,
    remove: &impl AsyncFn(&Image) -> CloudResult<()>,
) -> CloudResult<bool> {
    let image = &stored.doc.record;
    if image.stored && image.status == ImageStatus::Saving && is_whole(image).await? {
        return Err(CloudError::Refused(format!(
            "the image `{}` is {}, and nobody is at it, but all of its bytes lie at {}: etcd was put back, or its command was killed at its end. `eschedule image add` takes them from there under another name; `eschedule image delete {}` takes both away",
            image.name,
            image.status.name(),
            image.url,
            image.id
        )));
    }
    take_away(cloud, stored, true, remove).await
}

/// Takes names away whose images are not there: both are written and deleted together, so somebody took the record away by hand.
pub(super) async fn drop_alone(cloud: &Cloud, names: Vec<String>) -> CloudResult<()> {
    for name in names {
        let Ok(image) = cloud.keys.parse_image(&name) else { continue };
        let key = cloud.keys.image(image);
        if cloud.store.get(&key).await?.0.is_none() {
            cloud.store.txn(Txn::new().when(Compare::Absent(key)).delete(name)).await?;
        }
    }
    Ok(())
}

pub(super) async fn found(cloud: &Cloud, text: &str) -> CloudResult<Stored> {
    if let Ok(id) = text.parse::<ImageId>() {
        let stored = read(cloud, id).await?.filter(|it| it.doc.record.is_seen_by(&cloud.project));
        return stored.ok_or_else(|| missing::<Image>(text));
    }
    let own = bearers(cloud, &cloud.keys.image_names(&cloud.project, text)).await?.pop();
    if let Some(own) = own {
        return Ok(own);
    }
    let mut public = bearers(cloud, &cloud.keys.public_images(text)).await?;
    if public.len() > 1 {
        let ids: Vec<_> = public.iter().map(|it| it.doc.record.id.to_string()).collect();
        return Err(CloudError::Refused(format!(
            "several projects have a public image `{text}`: name it by its uuid ({})",
            ids.join(", ")
        )));
    }
    match public.pop() {
        Some(public) => Ok(public),
        None => beginning_so(cloud, text).await,
    }
}

/// The image whose uuid begins so, as no other's does that the project sees.
async fn beginning_so(cloud: &Cloud, text: &str) -> CloudResult<Stored> {
    let beginning = text.to_ascii_lowercase();
    if !is_beginning(&beginning) {
        return Err(missing::<Image>(text));
    }
    let keys = cloud.store.keys(&format!("{}{beginning}", cloud.keys.images())).await?;
    let mut found = Vec::new();
    for id in keys.iter().filter_map(|key| cloud.keys.parse_image(key).ok()) {
        let stored = read(cloud, id).await?;
        found.extend(stored.filter(|it| it.doc.record.is_seen_by(&cloud.project)));
    }
    match found.len() {
        0 | 1 => found.pop().ok_or_else(|| missing::<Image>(text)),
        _ => Err(CloudError::Invalid(format!(
            "several images begin with `{text}`: give the whole uuid, `eschedule image list` shows them"
        ))),
    }
}

/// The images whose names are below a key.
pub(super) async fn bearers(cloud: &Cloud, names: &str) -> CloudResult<Vec<Stored>> {
    let mut bearers = Vec::new();
    for key in cloud.store.keys(names).await? {
        let id = cloud.keys.parse_image(&key).map_err(|error| CloudError::Unreadable(error.to_string()))?;
        // Name and record go together: where there is none by now, its end came in between.
        bearers.extend(read(cloud, id).await?);
    }
    Ok(bearers)
}

pub(super) async fn read(cloud: &Cloud, id: ImageId) -> CloudResult<Option<Stored>> {
    let key = cloud.keys.image(id);
    let Some(pair) = cloud.store.get(&key).await?.0 else { return Ok(None) };
    let doc = Doc::<Image>::decode(&pair.value).map_err(|error| {
        CloudError::Unreadable(format!("key {key} cannot be read: {error}; nothing was changed: {MENDS}"))
    })?;
    Ok(Some(Stored { doc, revision: pair.mod_revision }))
}

/// By what keys an image is to be found by its name, and is not: somebody deleted them.
pub(super) async fn lost_names(cloud: &Cloud, image: &Image) -> CloudResult<Vec<String>> {
    let mut lost = Vec::new();
    for name in cloud.keys.names_of_image(image) {
        if cloud.store.get(&name).await?.0.is_none() {
            lost.push(name);
        }
    }
    Ok(lost)
}

/// Writes the image anew, with its names, where it still is as it was read, and nobody bears a name that is new.
pub(super) async fn write(cloud: &Cloud, before: &Stored, after: Image) -> CloudResult<Option<Stored>> {
    write_again(cloud, before, after, &[]).await
}

/// The same; of its names these, whose keys were lost, are written again, unless another bears them by now.
pub(super) async fn write_again(
    cloud: &Cloud,
    before: &Stored,
    after: Image,
    lost: &[String],
) -> CloudResult<Option<Stored>> {
    let (mut old, new) = (cloud.keys.names_of_image(&before.doc.record), cloud.keys.names_of_image(&after));
    old.retain(|name| !lost.contains(name));
    let key = cloud.keys.image(after.id);
    let mut doc = before.doc.clone();
    doc.record = after;
    let value = doc.encode();
    let mut txn =
        Txn::new().when(Compare::Unchanged(key.clone(), before.revision)).put(key.clone(), value.clone());
    let own = cloud.keys.image_names(&doc.record.project, &doc.record.name);
    for name in new.iter().filter(|name| !old.contains(name)) {
        if name.starts_with(&own) {
            if lost.contains(name) && !cloud.store.keys(&own).await?.is_empty() {
                continue;
            }
            txn = txn.when(Compare::NoneUnder(own.clone()));
        }
        txn = txn.put(name.clone(), "");
    }
    for name in old.into_iter().filter(|name| !new.contains(name)) {
        txn = txn.delete(name);
    }
    match cloud.store.txn(txn).await {
        Ok(outcome) if outcome.succeeded => {
            Ok(Some(Stored { doc: decoded(doc), revision: outcome.revision }))
        }
        Ok(_) => Ok(None),
        // Its time of change makes it known again.
        Err(error @ StoreError::Unknown(_)) => match cloud.store.get(&key).await?.0 {
            Some(pair) if pair.value == value => {
                Ok(Some(Stored { doc: decoded(doc), revision: pair.mod_revision }))
            }
            _ => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

/// As it would be read now.
fn decoded(doc: Doc<Image>) -> Doc<Image> {
    Doc::decode(&doc.encode()).unwrap_or(doc)
}

/// Marks an image as going, takes its bytes away, then the record; whoever comes after one that was killed goes on with it. Where
/// bytes `may_come` late, since somebody else may be sending them or the store may be about to have them whole, the record stays until
/// that cannot be: they are found by it.
/// Answers whether it is gone; not where somebody else has changed it since it was read.
pub(super) async fn take_away(
    cloud: &Cloud,
    stored: Stored,
    may_come: bool,
    remove: &impl AsyncFn(&Image) -> CloudResult<()>,
) -> CloudResult<bool> {
    let stored = if stored.doc.record.status == ImageStatus::PendingDelete {
        stored
    } else {
        let going = Image { status: ImageStatus::PendingDelete, ..stored.doc.record.clone() };
        match write(cloud, &stored, going).await? {
            Some(stored) => stored,
            None => return Ok(false),
        }
    };
    if stored.doc.record.stored {
        remove(&stored.doc.record).await?;
    }
    if may_come && stored.doc.record.may_be_sent(cloud.host.now()) {
        return Ok(true);
    }
    let key = cloud.keys.image(stored.doc.record.id);
    // In an etcd that was put back it may be none that is going, with names that would stay.
    let unchanged = Compare::Unchanged(key.clone(), stored.revision);
    let gone = cloud.store.txn(Txn::new().when(unchanged).delete(key.clone())).await?.succeeded;
    Ok(gone || cloud.store.get(&key).await?.0.is_none())
}

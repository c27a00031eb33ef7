//! The catalogue of images.
//!
//! ```text
//!   images/<image>                              the record
//!   image-names/<project>/<name>/<image>        that it is called so in its project, of one image at most
//!   public-images/<name>/<image>                that it is called so, and everybody may use it
//! ```
//!
//! Names are written and taken away in the transaction that makes, changes or ends the record. Bytes in our image store are
//! the caller's to move ([`Upload`]) and to take away (the closure of [`delete_image`]); they are called by the record's uuid, which is
//! written before there are any and deleted after the last are gone. So whatever is in the store has a record that says how it
//! stands, and whoever comes across one that nobody is at any more takes both away ([`tend_images`]). Not where all bytes are there: in
//! an etcd that was put back an image is on its way that was whole long since.

mod copied;
mod stored;

use std::collections::{BTreeMap, BTreeSet, HashSet};

pub use copied::{copy_for_image, drop_copy, tend_copies};
pub(crate) use copied::{delete_copy, image_of_copy, left_over, told_of_copy};
use ec_model::{Doc, Image, ImageId, ImageRef, ImageStatus, Resources, Visibility, encode};
use ec_store::{Compare, StoreError, Txn};
use stored::{
    Stored, bearers, drop_alone, drop_left_over, found, free, lost_names, owned, read, take_away, taken,
    write, write_again,
};

use tokio::time::Instant;

use crate::{
    Cloud, CloudError, CloudResult, Kind, Tended,
    intent::{PAUSE, RESOLVE_TIME},
    made_of, trust_clock,
};

/// Another writer changed the image in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// So many characters of a uuid are no chance, where a mistake costs an image's bytes.
const CERTAIN: usize = 8;

/// What users say of a new image.
#[derive(Debug, Clone, Default)]
pub struct NewImage {
    /// What it is called.
    pub name: String,
    /// Who else may use it.
    pub visibility: Visibility,
    /// Whether it can be deleted only once this is taken back.
    pub protected: bool,
    /// The least `DISK_GB` of what is made from it.
    pub min_disk: u64,
    /// The least `MEMORY_MB` of what is made from it.
    pub min_ram: u64,
    /// What else is said of it.
    pub properties: BTreeMap<String, String>,
}

/// Where a new image's bytes are.
#[derive(Debug, Clone)]
pub enum Bytes {
    /// At this URL, with the digests that they must have.
    At(ImageRef),
    /// In the image store of this URL, once they have come.
    Sent {
        /// What the URLs of all objects begin with; the image's uuid follows.
        store: String,
    },
}

/// What users change of an image; nothing where it stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageChange {
    /// What it is called.
    pub name: Option<String>,
    /// Who else may use it.
    pub visibility: Option<Visibility>,
    /// Whether it is protected.
    pub protected: Option<bool>,
    /// The least `DISK_GB`.
    pub min_disk: Option<u64>,
    /// The least `MEMORY_MB`.
    pub min_ram: Option<u64>,
    /// Properties, each with its value or with none where it is to be taken away.
    pub properties: BTreeMap<String, Option<String>>,
}

/// What was found of bytes while they were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// How many there are.
    pub size: u64,
    /// Their SHA-256, in hex.
    pub sha256: String,
    /// Their SHA-512, where that was demanded.
    pub sha512: Option<String>,
    /// How they are packed, if they are.
    pub compression: Option<&'static str>,
    /// What disk is in them.
    pub disk_format: &'static str,
    /// The size of that disk, in bytes.
    pub virtual_size: u64,
}

/// An image whose bytes are on their way. What users say of it meanwhile stays; who lost it, since somebody took it away, has to
/// take away what was sent.
pub struct Upload {
    stored: Stored,
    /// The store was asked to make one of all that came, and may do so after its answer is waited for no more.
    is_last: bool,
}

/// All images that the project may use, by name; but for one that was deleted, of which bytes may come late.
pub async fn images(cloud: &Cloud) -> CloudResult<Vec<Image>> {
    let all: Vec<Image> = crate::catalog::all(cloud, &cloud.keys.images()).await?;
    let now = cloud.host.now();
    let is_there = |image: &Image| image.status != ImageStatus::PendingDelete || image.is_left_over(now);
    let mut seen: Vec<Image> =
        all.into_iter().filter(|image| image.is_seen_by(&cloud.project) && is_there(image)).collect();
    seen.sort_by_key(|image| (image.name.to_ascii_lowercase(), image.project != cloud.project, image.id));
    Ok(seen)
}

/// All images whose bytes lie in an image store, whosever they are: also one that is being deleted, since they may lie there still.
pub async fn stored_images(cloud: &Cloud) -> CloudResult<Vec<Image>> {
    let all: Vec<Image> = crate::catalog::all(cloud, &cloud.keys.images()).await?;
    // They are counted when all of them came.
    Ok(all.into_iter().filter(|image| image.stored && image.size.is_some()).collect())
}

/// Those of these images of which etcd has no record, though a store has bytes of them: it was put back, and nobody finds them any more. A
/// record is written before bytes are sent and goes after them, so the store is to be listed before this is asked.
///
/// # Errors
/// etcd does not answer.
pub async fn unrecorded_images(
    cloud: &Cloud,
    mut there: BTreeSet<ImageId>,
) -> CloudResult<BTreeSet<ImageId>> {
    // Also where a record cannot be read.
    for key in cloud.store.keys(&cloud.keys.images()).await? {
        if let Ok(image) = cloud.keys.parse_image(&key) {
            there.remove(&image);
        }
    }
    Ok(there)
}

/// Those of the project's images whose records say that they have names, and whose keys somebody deleted: nobody finds them by these.
///
/// # Errors
/// etcd does not answer.
pub async fn unnamed_images(cloud: &Cloud) -> CloudResult<Vec<Image>> {
    let all: Vec<Image> = crate::catalog::all(cloud, &cloud.keys.images()).await?;
    // Read later: each is written with its record, and goes with it.
    let prefixes = [cloud.keys.all_image_names(), cloud.keys.all_public_images()];
    let (names, public) = tokio::try_join!(cloud.store.keys(&prefixes[0]), cloud.store.keys(&prefixes[1]))?;
    let there: HashSet<String> = names.into_iter().chain(public).collect();
    let is_whole = |image: &Image| cloud.keys.names_of_image(image).iter().all(|name| there.contains(name));
    let mut unnamed = Vec::new();
    for image in all.into_iter().filter(|image| image.project == cloud.project && !is_whole(image)) {
        // It may have been renamed or deleted since.
        let now = read(cloud, image.id).await?.map(|stored| stored.doc.record);
        if let Some(now) = now
            && !lost_names(cloud, &now).await?.is_empty()
        {
            unnamed.push(now);
        }
    }
    Ok(unnamed)
}

/// The image of that uuid or name: the project's own before one that everybody may use.
///
/// # Errors
/// [`CloudError::NotFound`] where the project may use none; [`CloudError::Refused`] where others have several of that name.
pub async fn image(cloud: &Cloud, text: &str) -> CloudResult<Image> {
    Ok(found(cloud, text).await?.doc.record)
}

/// What an instance of this size is made from, by the uuid or the name of an image; none where there is no such image.
///
/// # Errors
/// [`CloudError::Invalid`] where none of this size can be made from it.
pub async fn image_for(cloud: &Cloud, text: &str, size: &Resources) -> CloudResult<Option<ImageRef>> {
    let image = match image(cloud, text).await {
        Ok(image) => image,
        Err(CloudError::NotFound(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let usable = image.usable(size);
    usable.map(Some).map_err(|why| CloudError::Invalid(format!("image `{text}` {why}")))
}

/// The least `DISK_GB` and `MEMORY_MB` of what is made from the image that a disk was made of first: what is on that needs it wherever it
/// is copied to. Of one that is not there any more nobody knows that.
///
/// # Errors
/// etcd does not answer, or something of that cannot be read.
pub async fn least_of_origin(cloud: &Cloud, of: &ImageRef) -> CloudResult<(u64, u64)> {
    let Some(id) = made_of(cloud, of).await?.and_then(|image| image.id) else { return Ok((0, 0)) };
    let origin = read(cloud, id).await?.map(|stored| stored.doc.record);
    Ok(origin.map_or((0, 0), |image| (image.min_disk, image.min_ram)))
}

/// An error where an image of the catalogue is for more than this. One that is not there any more says nothing.
pub(crate) async fn fits(cloud: &Cloud, image: &ImageRef, size: &Resources) -> CloudResult<()> {
    let Some(id) = image.id else { return Ok(()) };
    let Some(stored) = stored::read(cloud, id).await? else { return Ok(()) };
    let image = stored.doc.record;
    image.fits(size).map_err(|why| CloudError::Invalid(format!("image `{}` {why}", image.name)))
}

/// Makes an image; one whose bytes are to be sent is not to be used before they are there. What is left over of another of that name is
/// taken away, as by [`tend_images`].
///
/// # Errors
/// [`CloudError::Refused`] where the project has one of that name, or one that seems to be left over where this host's clock is not to be
/// trusted.
pub async fn add_image(
    cloud: &Cloud,
    new: &NewImage,
    bytes: Bytes,
    ahead: impl AsyncFn() -> Option<i64>,
    is_whole: impl AsyncFn(&Image) -> CloudResult<bool>,
    remove: impl AsyncFn(&Image) -> CloudResult<()>,
) -> CloudResult<Upload> {
    let id = ImageId::new(cloud.host.uuid());
    let (at, stored) = match bytes {
        Bytes::At(at) => (at, false),
        Bytes::Sent { store } => (ImageRef::at(format!("{}/{id}", store.trim_end_matches('/'))), true),
    };
    let now = cloud.host.now();
    let record = Image {
        id,
        name: new.name.clone(),
        project: cloud.project.clone(),
        visibility: new.visibility,
        status: if stored { ImageStatus::Saving } else { ImageStatus::Active },
        protected: new.protected,
        url: at.url,
        stored,
        upload: None,
        sha256: at.sha256,
        sha512: at.sha512,
        size: None,
        compression: None,
        disk_format: None,
        virtual_size: None,
        min_disk: new.min_disk,
        min_ram: new.min_ram,
        properties: new.properties.clone(),
        created_at: now,
        updated_at: now,
    };
    let key = cloud.keys.image(id);
    for _ in 0..TRIES {
        let txn = Txn::new()
            .when(Compare::Absent(key.clone()))
            .when(Compare::NoneUnder(cloud.keys.image_names(&cloud.project, &new.name)))
            .put(key.clone(), encode(&record));
        let txn = cloud.keys.names_of_image(&record).into_iter().fold(txn, |txn, name| txn.put(name, ""));
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => {
                let stored = Stored { doc: Doc::new(record), revision: outcome.revision };
                return Ok(Upload { stored, is_last: false });
            }
            Ok(_) => free(cloud, &new.name, &ahead, &is_whole, &remove).await?,
            Err(error @ StoreError::Unknown(_)) => match read(cloud, id).await? {
                Some(stored) if stored.doc.record.status != ImageStatus::PendingDelete => {
                    return Ok(Upload { stored, is_last: false });
                }
                // Or somebody has deleted it since.
                Some(_) | None => return Err(error.into()),
            },
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!(
        "the name `{}` is taken and given back again and again; try again",
        new.name
    )))
}

/// Changes what users say of an image of the project.
///
/// # Errors
/// [`CloudError::Refused`] where it is another project's, or the name is taken.
pub async fn change_image(cloud: &Cloud, text: &str, change: &ImageChange) -> CloudResult<Image> {
    // By its uuid from now on: its name may be what is changed.
    let mut stored = found(cloud, text).await?;
    for _ in 0..TRIES {
        let before = &stored.doc.record;
        owned(cloud, before)?;
        let id = before.id;
        if before.status == ImageStatus::PendingDelete {
            return Err(CloudError::Refused(format!("the image {id} is being deleted")));
        }
        let mut after = before.clone();
        change.make(&mut after)?;
        let lost = lost_names(cloud, before).await?;
        if after == *before && lost.is_empty() {
            return Ok(after);
        }
        let own = cloud.keys.image_names(&cloud.project, &after.name);
        let is_given = change.name.is_some() && (after.name != before.name || !lost.is_empty());
        if is_given && bearers(cloud, &own).await?.iter().any(|other| other.doc.record.id != id) {
            return Err(taken(&after.name));
        }
        after.updated_at = cloud.host.now();
        if let Some(written) = write_again(cloud, &stored, after.clone(), &lost).await? {
            return Ok(written.doc.record);
        }
        stored = found(cloud, &id.to_string()).await?;
    }
    Err(CloudError::Busy(format!("the image `{text}` keeps changing; try again")))
}

/// Deletes an image of the project; `remove` takes its bytes away. What was made from it stays as it is.
///
/// # Errors
/// [`CloudError::Refused`] where it is protected, or another project's.
pub async fn delete_image(
    cloud: &Cloud,
    text: &str,
    remove: impl AsyncFn(&Image) -> CloudResult<()>,
) -> CloudResult<Image> {
    let mut stored = found(cloud, text).await?;
    let Image { id, name, .. } = &stored.doc.record;
    // A name that none bears any more may well be the beginning of another's uuid.
    if text.len() < CERTAIN && !name.eq_ignore_ascii_case(text) {
        return Err(CloudError::NotFound(format!(
            "no image is named `{text}`; {id} begins so, and its bytes may be lost: give {CERTAIN} characters of that or more"
        )));
    }
    for _ in 0..TRIES {
        owned(cloud, &stored.doc.record)?;
        let image = stored.doc.record.clone();
        if image.protected {
            return Err(CloudError::Refused(format!(
                "the image `{text}` is protected: `eschedule image set {text} --unprotected` lets it be deleted"
            )));
        }
        if take_away(cloud, stored, true, &remove).await? {
            return Ok(image);
        }
        stored = found(cloud, &image.id.to_string()).await?;
    }
    Err(CloudError::Busy(format!("the image `{text}` keeps changing; try again")))
}

/// Takes away what killed commands left of images, whosever they are; `remove` takes their bytes away. Answers of which. One all of
/// whose bytes are there, which `is_whole` tells, stays and is told as what failed. So do all where this host's clock is not to be trusted:
/// `ahead` is asked by how many seconds placement's is ahead, where something seems to be left.
pub async fn tend_images(
    cloud: &Cloud,
    ahead: impl AsyncFn() -> Option<i64>,
    is_whole: impl AsyncFn(&Image) -> CloudResult<bool>,
    remove: impl AsyncFn(&Image) -> CloudResult<()>,
) -> CloudResult<Tended<Image>> {
    let now = cloud.host.now();
    let (mut tended, mut is_asked) = (Tended::new(), false);
    // Names before the records: what has none then never gets one.
    let mut names = cloud.store.keys(&cloud.keys.all_image_names()).await?;
    names.extend(cloud.store.keys(&cloud.keys.all_public_images()).await?);
    let records = cloud.store.list(&cloud.keys.images()).await?.pairs;
    let images: HashSet<&str> = records.iter().map(|pair| pair.key.as_str()).collect();
    names.retain(|name| {
        cloud.keys.parse_image(name).is_ok_and(|image| !images.contains(cloud.keys.image(image).as_str()))
    });
    drop_alone(cloud, names).await?;
    for pair in records {
        // One that cannot be read is told by who lists them, and is nobody's to take away.
        let Ok(doc) = Doc::<Image>::decode(&pair.value) else { continue };
        let image = doc.record.clone();
        if image.is_left_over(now) {
            if !std::mem::replace(&mut is_asked, true)
                && let Err(error) = trust_clock(ahead().await)
            {
                tended.note(Err(error));
                break;
            }
            let taken =
                drop_left_over(cloud, Stored { doc, revision: pair.mod_revision }, &is_whole, &remove);
            tended.note(taken.await.map(|is| is.then_some(image)));
        }
    }
    Ok(tended)
}

/// Who cannot say that they are at it gives up so long before others may take it away.
const NEAR: jiff::SignedDuration = jiff::SignedDuration::from_mins(2);

impl Upload {
    /// The image as it was written last.
    pub fn image(&self) -> &Image {
        &self.stored.doc.record
    }

    /// Says that somebody is at it, and by what the store knows what came so far.
    ///
    /// # Errors
    /// [`CloudError::Busy`] where somebody else has taken it away; etcd does not answer.
    pub async fn go_on(&mut self, cloud: &Cloud, upload: Option<String>) -> CloudResult<()> {
        self.write(cloud, |image| image.upload.clone_from(&upload)).await
    }

    /// The same for the last time: from here on all may be in the store, also when who sent it has given up.
    ///
    /// # Errors
    /// As [`Self::go_on`].
    pub async fn complete(&mut self, cloud: &Cloud, upload: Option<String>) -> CloudResult<()> {
        self.is_last = true;
        self.go_on(cloud, upload).await
    }

    /// The same while it goes on: an etcd that does not answer is no reason to give up until others may soon take it for left over.
    ///
    /// # Errors
    /// As [`Self::go_on`].
    pub async fn still_at_it(&mut self, cloud: &Cloud, upload: Option<String>) -> CloudResult<()> {
        match self.go_on(cloud, upload).await {
            Err(error) if error.kind() == Kind::Unreachable => {
                let soon = cloud.host.now() + NEAR;
                if self.image().is_left_over(soon) { Err(error) } else { Ok(()) }
            }
            said => said,
        }
    }

    /// All bytes are there: it can be used.
    ///
    /// # Errors
    /// As [`Self::go_on`].
    pub async fn finish(&mut self, cloud: &Cloud, facts: Facts) -> CloudResult<Image> {
        let facts = &facts;
        self.write(cloud, |image| {
            *image = Image {
                status: ImageStatus::Active,
                upload: None,
                sha256: Some(facts.sha256.clone()),
                sha512: facts.sha512.clone(),
                size: Some(facts.size),
                compression: facts.compression.map(str::to_owned),
                disk_format: Some(facts.disk_format.to_owned()),
                virtual_size: Some(facts.virtual_size),
                ..image.clone()
            };
        })
        .await?;
        Ok(self.image().clone())
    }

    /// It is not to be: takes away what came, and the record; but where all may yet come, that stays until it cannot any more, so that
    /// it is found.
    ///
    /// # Errors
    /// What is left goes later, by whoever comes across it.
    pub async fn give_up(
        self,
        cloud: &Cloud,
        remove: impl AsyncFn(&Image) -> CloudResult<()>,
    ) -> CloudResult<()> {
        let image = self.image().clone();
        let mut stored = self.stored;
        for _ in 0..TRIES {
            if take_away(cloud, stored, self.is_last, &remove).await? {
                return Ok(());
            }
            // Somebody else was quicker, and may have been so before the last bytes came.
            stored = match read(cloud, image.id).await? {
                Some(stored) if stored.doc.record.status == ImageStatus::Active => return Ok(()),
                // Its users said something else of it meanwhile.
                Some(stored) => stored,
                None => return remove(&image).await,
            };
        }
        Err(CloudError::Busy(format!("the image {} keeps changing; it goes later", image.id)))
    }

    /// Writes what is said of its bytes; what users say of it meanwhile stays.
    async fn write(&mut self, cloud: &Cloud, change: impl Fn(&mut Image)) -> CloudResult<()> {
        let (begun, mut changed) = (Instant::now(), 0);
        loop {
            let mut after = self.image().clone();
            after.updated_at = cloud.host.now();
            change(&mut after);
            match self.write_once(cloud, after).await {
                Ok(true) => return Ok(()),
                Ok(false) if changed < TRIES => changed += 1,
                Ok(false) => {
                    let id = self.image().id;
                    return Err(CloudError::Busy(format!("the image {id} keeps changing; try again")));
                }
                Err(error) if error.kind() == Kind::Unreachable && begun.elapsed() < RESOLVE_TIME => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether it is written; if not, it is known as somebody else has changed it.
    async fn write_once(&mut self, cloud: &Cloud, after: Image) -> CloudResult<bool> {
        let (id, is_last) = (after.id, after.status == ImageStatus::Active);
        if let Some(stored) = write(cloud, &self.stored, after).await? {
            self.stored = stored;
            return Ok(true);
        }
        match read(cloud, id).await? {
            // By an earlier try, whose answer was lost: nobody else says so.
            Some(newer) if is_last && newer.doc.record.status == ImageStatus::Active => {
                self.stored = newer;
                Ok(true)
            }
            Some(newer) if newer.doc.record.status == ImageStatus::Saving => {
                self.stored = newer;
                Ok(false)
            }
            _ => Err(CloudError::Busy(format!(
                "somebody else took the image {id} away while its bytes were being sent; add it again"
            ))),
        }
    }
}

impl ImageChange {
    fn make(&self, image: &mut Image) -> CloudResult<()> {
        let Self { name, visibility, protected, min_disk, min_ram, properties } = self.clone();
        image.name = name.unwrap_or_else(|| image.name.clone());
        image.visibility = visibility.unwrap_or(image.visibility);
        image.protected = protected.unwrap_or(image.protected);
        image.min_disk = min_disk.unwrap_or(image.min_disk);
        image.min_ram = min_ram.unwrap_or(image.min_ram);
        for (key, value) in properties {
            match value {
                Some(value) => image.properties.insert(key, value),
                None => image.properties.remove(&key),
            };
        }
        bounded(&image.properties)
    }
}

impl NewImage {
    /// Whether an image can be so.
    ///
    /// # Errors
    /// [`CloudError::Invalid`] with what is wrong.
    pub fn check(&self) -> CloudResult<()> {
        bounded(&self.properties)
    }
}

fn bounded(properties: &BTreeMap<String, String>) -> CloudResult<()> {
    let (count, most) = (properties.len(), ec_model::input::PROPERTIES_MAX);
    if count > most {
        return Err(CloudError::Invalid(format!("{count} properties are more than {most}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! Images made of disks: a volume is made for it, a copy of one moment, whose file becomes the image's bytes.
//!
//! The volume bears the image's uuid in its name, and goes before the image can be used. So one whose image nobody sends any
//! more is what a killed command left.

use ec_model::{ImageId, ImageRef, ImageStatus, Workload};
use tokio_util::sync::CancellationToken;

use super::stored::read;
use crate::{
    Cloud, CloudError, CloudResult, NewVolume, NoRoom, Scheduled, create_volume, delete_volume,
    resolve_volume,
};

/// What such a volume's name begins with.
const BEGINNING: &str = "image-";

fn name(image: ImageId) -> String {
    format!("{BEGINNING}{image}")
}

/// Has the node of a disk make a copy of it for this image; the inner error says what stood in the way.
///
/// # Errors
/// As [`create_volume`].
pub async fn copy_for_image(
    cloud: &Cloud,
    image: ImageId,
    of: &ImageRef,
    stop: &CancellationToken,
) -> CloudResult<Result<Scheduled, NoRoom>> {
    let new = NewVolume { name: Some(name(image)), image: Some(of.clone()), ..NewVolume::default() };
    create_volume(cloud, &new, stop).await
}

/// Deletes the copy that was made for this image, where there is one.
///
/// # Errors
/// It stays, until [`tend_copies`] comes across it.
pub async fn drop_copy(cloud: &Cloud, image: ImageId) -> CloudResult<()> {
    match resolve_volume(cloud, &name(image)).await {
        Ok(volume) => delete_volume(cloud, volume).await.map(drop),
        Err(CloudError::NotFound(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes the project's copies for images that nobody sends any more. Answers for which. Those of images that are being sent stay.
pub async fn tend_copies(cloud: &Cloud) -> CloudResult<Vec<ImageId>> {
    let mut gone = Vec::new();
    for key in
        cloud.store.keys(&cloud.keys.names_beginning(Workload::Volume, &cloud.project, BEGINNING)).await?
    {
        let named = cloud.keys.parse_name(&key);
        let image = named.as_deref().and_then(|named| named.strip_prefix(BEGINNING)?.parse::<ImageId>().ok());
        let Some(image) = image else { continue };
        let is_sent = |stored: super::Stored| stored.doc.record.status == ImageStatus::Saving;
        if read(cloud, image).await?.is_some_and(is_sent) {
            continue;
        }
        drop_copy(cloud, image).await?;
        gone.push(image);
    }
    Ok(gone)
}

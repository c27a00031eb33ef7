//! Images made of disks: a volume is made for it, a copy of one moment, whose file becomes the image's bytes.
//!
//! The volume bears the image's uuid in its name, and goes before the image can be used. So one whose image nobody sends any
//! more is what a killed command left.

use ec_model::{ImageId, ImageRef, ImageStatus, Instance, InstanceId, Workload};
use tokio_util::sync::CancellationToken;

use super::stored::read;
use crate::{
    Cloud, CloudError, CloudResult, Doomed, NewVolume, NoRoom, Scheduled,
    destroy::Chosen,
    resolve_volume, trust_clock,
    volume::{delete_chosen, make_volume},
};

/// What such a volume's name begins with.
const BEGINNING: &str = "image-";

fn name(image: ImageId) -> String {
    format!("{BEGINNING}{image}")
}

/// Has the node of a disk make a copy of it for this image, of so many GiB where that is said; the inner error says what stood in the way.
///
/// # Errors
/// As [`create_volume`].
pub async fn copy_for_image(
    cloud: &Cloud,
    image: ImageId,
    of: &ImageRef,
    size_gb: Option<u64>,
    stop: &CancellationToken,
) -> CloudResult<Result<Scheduled, NoRoom>> {
    let new = NewVolume { name: Some(name(image)), size_gb, image: Some(of.clone()), ..NewVolume::default() };
    make_volume(cloud, &new, stop).await
}

/// The image for which a volume of this name is a copy; nothing of any other name.
pub(crate) fn image_of_copy(name: &str) -> Option<ImageId> {
    let (beginning, image) = name.split_at_checked(BEGINNING.len())?;
    image.parse().ok().filter(|_| beginning.eq_ignore_ascii_case(BEGINNING))
}

/// What a copy is, in words: the image for which it is made, or what it stays, with its name.
pub(crate) async fn told_of_copy(cloud: &Cloud, copy: &Instance) -> String {
    let name = copy.name.clone().unwrap_or_else(|| copy.instance.to_string());
    let kind = match image_of_copy(&name) {
        Some(image) => {
            let stored = read(cloud, image).await.ok().flatten();
            return format!("image {}", stored.map_or(image.to_string(), |stored| stored.doc.record.name));
        }
        None if copy.kind.is_machine() => "instance",
        None if copy.spec.is_snapshot() => "snapshot",
        None => "volume",
    };
    format!("{kind} {name}")
}

/// Deletes the copy that was made for this image, where there is one.
///
/// # Errors
/// It stays, until [`tend_copies`] comes across it.
pub async fn drop_copy(cloud: &Cloud, image: ImageId) -> CloudResult<()> {
    match resolve_volume(cloud, &name(image)).await {
        Ok(volume) => delete_copy(cloud, image, volume).await.map(drop),
        Err(CloudError::NotFound(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes a copy that was made for this image.
///
/// # Errors
/// As [`crate::delete_volume`]; [`CloudError::Refused`] where it is called otherwise by now, and so is somebody's.
pub(crate) async fn delete_copy(cloud: &Cloud, image: ImageId, copy: InstanceId) -> CloudResult<Doomed> {
    delete_chosen(cloud, copy, Chosen::CopyFor(image)).await
}

/// Deletes the project's copies for images that nobody sends any more. Answers for which. Those of images that are being sent stay. `ahead`: see
/// [`tend_images`](super::tend_images).
///
/// # Errors
/// etcd does not answer, or one cannot be deleted; what was done stays done. This host's clock is not to be trusted.
pub async fn tend_copies(cloud: &Cloud, ahead: impl AsyncFn() -> Option<i64>) -> CloudResult<Vec<ImageId>> {
    let names =
        cloud.store.keys(&cloud.keys.names_beginning(Workload::Volume, &cloud.project, BEGINNING)).await?;
    let left = left_over(cloud, &names).await?;
    if !left.is_empty() {
        trust_clock(ahead().await)?;
    }
    for (image, copy) in &left {
        delete_copy(cloud, *image, *copy).await?;
    }
    Ok(left.into_iter().map(|(image, _)| image).collect())
}

/// The copies among the volumes that bear these names whose images nobody sends any more.
pub(crate) async fn left_over(cloud: &Cloud, names: &[String]) -> CloudResult<Vec<(ImageId, InstanceId)>> {
    let mut left = Vec::new();
    for key in names {
        let image = cloud.keys.parse_name(key).and_then(|name| image_of_copy(&name));
        let (Some(image), Some(copy)) = (image, cloud.keys.parse_bearer(key)) else { continue };
        let is_sent = match read(cloud, image).await {
            Ok(stored) => stored.is_some_and(|stored| {
                let image = stored.doc.record;
                match image.status {
                    ImageStatus::Saving => !image.is_left_over(cloud.host.now()),
                    ImageStatus::Active | ImageStatus::PendingDelete => false,
                    ImageStatus::Unknown => true,
                }
            }),
            // Nobody can tell, as of what a later release says of one.
            Err(CloudError::Unreadable(_)) => true,
            Err(error) => return Err(error),
        };
        if !is_sent {
            left.push((image, copy));
        }
    }
    Ok(left)
}

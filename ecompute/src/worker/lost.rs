//! The images that disks stand on, fetched again where the cache has lost them: with its file system, or since no backup had it.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use ec_model::{Attachment, ImageRef, InstanceId, Request};
use serde::Deserialize;
use tokio::sync::watch;

use super::{Stop, Worker};
use crate::storage::ANSWERS_IN;

impl Worker {
    /// Has the cache have again what the disks stand on that the guest is to be started with.
    pub(super) async fn bring_back_images(&mut self) -> Result<(), Stop> {
        // Without a request nothing is started for good, and nobody knows which volumes it has.
        let Some(request) = self.job.request.clone() else { return Ok(()) };
        let own = Attachment::root_of(&request.volumes).is_none().then_some(self.job.instance);
        let all: Vec<InstanceId> =
            own.into_iter().chain(request.volumes.iter().map(|has| has.volume)).collect();
        let settings = &self.parts.settings;
        let (disks, bases) = (settings.disks(self.parts.node), settings.images.join("base"));
        let look = move || {
            let lost = |disk| Some((disk, lost_under(&disks.join(format!("{disk}.qcow2")), &bases)?));
            all.into_iter().filter_map(lost).collect::<Vec<_>>()
        };
        // What does not answer, or cannot be read, the start itself tells of.
        let looked = tokio::time::timeout(ANSWERS_IN, self.parts.host.blocking(look));
        let looked = tokio::select! {
            looked = looked => looked,
            () = self.cancel.cancelled() => return Err(Stop::Abandoned),
        };
        for (disk, lost) in looked.ok().and_then(Result::ok).unwrap_or_default() {
            self.bring_back(disk, &lost).await?;
        }
        Ok(())
    }

    /// Fetches the image of a disk again, which must be the very same.
    async fn bring_back(&mut self, disk: InstanceId, lost: &Path) -> Result<(), Stop> {
        let what = format!("disk {disk} stands on {}, which is gone from the image cache", lost.display());
        let hint = "put that file there again";
        let record = self.records(move |records| records.get(disk)).await?;
        let made_of = record.and_then(|record| Request::deserialize(&record.intent?.request).ok()?.spec);
        let image =
            made_of.map(|spec| spec.image).filter(|image| !image.is_none() && image.copied().is_none());
        let Some(image) = image else {
            return Err(Stop::Failed(format!("{what}, and no URL of it is known: {hint}")));
        };
        let url = image.told();
        self.tell_delay(&format!("{what}, and fetched again from {url}")).await;
        match self.fetch_again(&image).await {
            Ok(path) if path == lost => Ok(()),
            Ok(_) => Err(Stop::Failed(format!("{what}, and {url} gives another image by now: {hint}"))),
            Err(Stop::Failed(why)) => Err(Stop::Failed(format!("{what}: {why}: {hint}"))),
            Err(Stop::RetryBounded(why)) => Err(Stop::RetryBounded(format!("{what}: {why}"))),
            Err(other) => Err(other),
        }
    }

    /// Where it lies then. It stays as long as a disk stands on it.
    async fn fetch_again(&mut self, image: &ImageRef) -> Result<PathBuf, Stop> {
        // How far it is is told of disks that are made.
        let fetched = self.parts.images.fetch(image, None, watch::Sender::default());
        let image = tokio::select! {
            biased;
            fetched = fetched => fetched?,
            () = self.cancel.cancelled() => return Err(Stop::Abandoned),
        };
        let path = image.base.path.clone();
        self.standing_on = Some(image);
        Ok(path)
    }
}

/// The file of the cache that this disk stands on, where it is not there.
fn lost_under(disk: &Path, bases: &Path) -> Option<PathBuf> {
    let base = PathBuf::from(ec_image::stands_on(&mut File::open(disk).ok()?).ok()??);
    (base.parent() == Some(bases) && matches!(base.try_exists(), Ok(false))).then_some(base)
}

//! The images that disks stand on, fetched again where the cache has lost them: with its file system, or since no backup had it.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use ec_metadata::InstanceRecord;
use ec_model::{Attachment, ImageRef, InstanceId, Rebuild, Request};
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
        let Some(image) = record.as_ref().and_then(made_of) else {
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

/// What can be fetched again of what a disk was made from: not what it is only wished to be made of.
fn made_of(record: &InstanceRecord) -> Option<ImageRef> {
    let request = Request::deserialize(&record.intent.as_ref()?.request).ok()?;
    let wanted = request.spec?.image;
    let image = Rebuild::disk(request.rebuild.as_ref(), &wanted, record.rebuilt.as_ref());
    (!image.is_none() && image.copied().is_none()).then(|| image.clone())
}

/// The file of the cache that this disk stands on, where it is not there.
fn lost_under(disk: &Path, bases: &Path) -> Option<PathBuf> {
    let base = PathBuf::from(ec_image::stands_on(&mut File::open(disk).ok()?).ok()??);
    (base.parent() == Some(bases) && matches!(base.try_exists(), Ok(false))).then_some(base)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_is_fetched_again_is_what_the_disk_was_made_from() {
        let instance = "00000000-0000-4000-8000-000000000001";
        let at = |second: u8| format!("2026-01-01T00:00:{second:02}Z");
        let record = |kind: &str, image: Value, rebuild: Value, rebuilt: Value| -> InstanceRecord {
            let request = json!({
                "instance": instance, "kind": kind, "epoch": 1, "generation": 1, "desired": "active",
                "rebuild": rebuild, "spec": {"query": "", "image": image}, "created_at": at(0),
            });
            let record = json!({
                "version": 1, "instance": instance, "name": "x", "macs": [], "created_at": at(0),
                "intent": {"request": request}, "rebuilt": rebuilt,
            });
            serde_json::from_value(record).unwrap()
        };
        let image = |name: &str| json!({"url": format!("https://host/{name}")});
        let wish = || json!({"wished_at": at(2), "before": image("old")});
        let came = |second, failed: Option<&str>| json!({"wished_at": at(second), "failed": failed});
        for kind in ["machine", "volume"] {
            for (rebuild, rebuilt, expected) in [
                (Value::Null, Value::Null, "new"),
                (wish(), Value::Null, "old"),
                (wish(), came(1, None), "old"),
                (wish(), came(2, Some("no such image")), "old"),
                (wish(), came(2, None), "new"),
            ] {
                let of = made_of(&record(kind, image("new"), rebuild.clone(), rebuilt.clone()));
                assert_eq!(
                    of.map(|of| of.url),
                    Some(format!("https://host/{expected}")),
                    "{rebuild}, {rebuilt}"
                );
            }
        }
        assert_eq!(made_of(&record("volume", json!({"url": ""}), Value::Null, Value::Null)), None);
    }
}

//! The images that disks stand on, fetched again where the cache has lost them: with its file system, or since no backup had it.

use std::{
    fmt,
    fs::File,
    path::{Path, PathBuf},
};

use ec_metadata::InstanceRecord;
use ec_model::{Attachment, ImageRef, InstanceId, Rebuild, Request};
use serde::Deserialize;
use tokio::sync::watch;

use super::{Stop, Worker};
use crate::storage::ANSWERS_IN;

/// A disk that a guest is started with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    /// An instance's own, or that of a volume.
    Of(InstanceId),
    /// The one that an instance is rescued with.
    Rescue(InstanceId),
}

impl Disk {
    /// Its file.
    fn file(self) -> String {
        match self {
            Self::Of(owner) => format!("{owner}.qcow2"),
            Self::Rescue(instance) => format!("{instance}.rescue.qcow2"),
        }
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Of(owner) => write!(f, "disk {owner}"),
            Self::Rescue(instance) => write!(f, "the rescue disk of {instance}"),
        }
    }
}

/// Which disks may stand on an image that is lost. A rescued guest has what it boots from otherwise as its second disk, and no volume
/// besides. The image of a new one's own disk was fetched just now; volumes are older than that.
fn started_with(request: &Request, is_new: bool, is_rescued: bool) -> Vec<Disk> {
    let (own, root) = (request.instance, Attachment::root_of(&request.volumes));
    if is_rescued {
        return vec![Disk::Of(root.unwrap_or(own)), Disk::Rescue(own)];
    }
    let own = (root.is_none() && !is_new).then_some(own);
    own.into_iter().chain(request.volumes.iter().map(|has| has.volume)).map(Disk::Of).collect()
}

impl Worker {
    /// Has the cache have again what the disks stand on that the guest is to be started with.
    pub(super) async fn bring_back_images(&mut self, is_rescued: bool) -> Result<(), Stop> {
        // Without a request nothing is started for good, and nobody knows which volumes it has.
        let Some(request) = self.job.request.clone() else { return Ok(()) };
        let all = started_with(&request, self.first_start, is_rescued);
        if all.is_empty() {
            return Ok(());
        }
        let settings = &self.parts.settings;
        let (disks, bases) = (settings.disks(self.parts.node), settings.images.join("base"));
        let look = move || {
            let lost = |disk: Disk| Some((disk, lost_under(&disks.join(disk.file()), &bases)?));
            all.into_iter().filter_map(lost).collect::<Vec<_>>()
        };
        // What does not answer, or cannot be read, the start itself tells of.
        let looked = tokio::time::timeout(ANSWERS_IN, self.parts.host.blocking(look));
        let looked = tokio::select! {
            looked = looked => looked,
            () = self.cancel.cancelled() => return Err(Stop::Abandoned),
        };
        for (disk, lost) in looked.ok().and_then(Result::ok).unwrap_or_default() {
            self.bring_back(disk, &request, &lost).await?;
        }
        Ok(())
    }

    /// Fetches the image of a disk again, which must be the very same.
    async fn bring_back(&mut self, disk: Disk, request: &Request, lost: &Path) -> Result<(), Stop> {
        let what = format!("{disk} stands on {}, which is gone from the image cache", lost.display());
        let hint = "put that file there again";
        let image = match disk {
            Disk::Of(owner) => {
                let record = self.records(move |records| records.get(owner)).await?;
                record.as_ref().and_then(made_of)
            }
            // It is left before one of another wish is made.
            Disk::Rescue(_) => request.rescue.as_ref().map(|wish| wish.image.clone()),
        };
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
    fn what_is_looked_at_is_what_the_guest_is_started_with() {
        let id = |number: u128| InstanceId::new(uuid::Uuid::from_u128(number));
        let request = |volumes: Value| -> Request {
            let request = json!({
                "version": 1, "instance": id(1), "epoch": 1, "generation": 1, "desired": "active",
                "volumes": volumes, "created_at": "2026-01-01T00:00:00Z",
            });
            serde_json::from_value(request).unwrap()
        };
        let (data, root) =
            (json!({"volume": id(2), "device": "vdb"}), json!({"volume": id(3), "device": "vda"}));
        let own = request(json!([data]));
        let volume = request(json!([root, data]));
        let [one, two, three] = [1, 2, 3].map(|number| Disk::Of(id(number)));
        assert_eq!(started_with(&own, false, false), [one, two]);
        assert_eq!(started_with(&own, true, false), [two], "its own was made just now");
        assert_eq!(started_with(&request(json!([])), true, false), []);
        for is_new in [false, true] {
            assert_eq!(started_with(&volume, is_new, false), [three, two]);
            assert_eq!(started_with(&own, is_new, true), [one, Disk::Rescue(id(1))]);
            assert_eq!(started_with(&volume, is_new, true), [three, Disk::Rescue(id(1))]);
        }
    }

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

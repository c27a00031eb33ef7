//! Copies of disks that images are made from: what they are called, and which of them nobody needs any more.

use ec_model::{CopyOf, Image, ImageId, ImageStatus, Workload};

use super::*;
use crate::{
    Bytes, NewImage, NewVolume, add_image, copy_for_image, create_volume, tend_copies, tend_instances,
};

impl World {
    /// A volume that is there, by its node's word.
    pub(super) async fn volume(&self, name: &str) -> InstanceId {
        let new = NewVolume { name: Some(name.to_owned()), size_gb: Some(2), ..NewVolume::default() };
        let made = create_volume(&self.cloud(), &new, &self.stop).await.unwrap().unwrap();
        self.active(made, "volume").await;
        made.instance
    }

    /// Has its node say that it is there.
    pub(super) async fn active(&self, made: Scheduled, kind: &str) {
        let status = serde_json::json!({
            "version": 1, "instance": made.instance, "node": made.node, "epoch": 1, "state": "ACTIVE",
            "kind": kind, "since": Timestamp::now(), "updated_at": Timestamp::now(),
        });
        let key = self.keys.status(made.node, made.instance);
        self.etcd.memory.txn(Txn::new().put(key, status.to_string())).await.unwrap();
    }

    /// An image that stands so, whose command said something of it last so many minutes ago.
    async fn image(&self, status: ImageStatus, minutes: i64) -> ImageId {
        let new = NewImage { name: format!("of{minutes}"), ..NewImage::default() };
        let sent = Bytes::Sent { store: "file:///store/".to_owned() };
        let cloud = self.cloud();
        let upload = add_image(&cloud, &new, sent, async |_: &Image| Ok(false), async |_: &Image| Ok(()));
        let upload = upload.await.unwrap();
        let image = Image {
            status,
            updated_at: Timestamp::now() - SignedDuration::from_mins(minutes),
            ..upload.image().clone()
        };
        let txn = match status {
            ImageStatus::Unknown => Txn::new().delete(self.keys.image(image.id)),
            _ => Txn::new().put(self.keys.image(image.id), encode(&image)),
        };
        self.etcd.memory.txn(txn).await.unwrap();
        image.id
    }
}

#[tokio::test]
async fn a_copy_for_an_image_goes_when_nobody_sends_that_any_more_and_nothing_else_is_called_so() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let data = world.volume("data").await;
    let of = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, data));
    let mut copies = Vec::new();
    for (status, minutes) in [
        (ImageStatus::Saving, 1),
        (ImageStatus::Saving, 11),
        (ImageStatus::Active, 2),
        (ImageStatus::PendingDelete, 3),
        // Its record is gone.
        (ImageStatus::Unknown, 4),
    ] {
        let image = world.image(status, minutes).await;
        let copy = copy_for_image(&cloud, image, &of, None, &world.stop).await.unwrap().unwrap().instance;
        for name in [format!("image-{image}"), format!("IMAGE-{image}")] {
            let new = NewVolume { name: Some(name), size_gb: Some(2), ..NewVolume::default() };
            let error = create_volume(&cloud, &new, &world.stop).await.unwrap_err();
            assert!(
                matches!(&error, CloudError::Invalid(_)) && error.to_string().contains("is called so"),
                "{error}"
            );
        }
        copies.push(copy);
    }
    world.volume("image-of-something").await;
    // What cannot be read is left, with all that hangs on it, and ends nobody's look.
    let unreadable = world.image(ImageStatus::Saving, 20).await;
    copy_for_image(&cloud, unreadable, &of, None, &world.stop).await.unwrap().unwrap();
    world.etcd.memory.txn(Txn::new().put(world.keys.image(unreadable), "{}")).await.unwrap();
    // Nor is what a later release says of one understood.
    let later = world.image(ImageStatus::Saving, 21).await;
    copy_for_image(&cloud, later, &of, None, &world.stop).await.unwrap().unwrap();
    let key = world.keys.image(later);
    let saving = String::from_utf8(world.under(&key)[0].value.clone()).unwrap();
    let text = saving.replace("\"saving\"", "\"queued\"");
    assert_eq!(decode::<Image>(text.as_bytes()).unwrap().status, ImageStatus::Unknown);
    world.etcd.memory.txn(Txn::new().put(key, text)).await.unwrap();
    let mut others = world.cloud();
    others.project = "others".into();
    assert_eq!(tend_copies(&others).await.unwrap(), []);
    let gone: Vec<_> =
        tend_instances(&others).await.unwrap().done.into_iter().map(|gone| gone.instance).collect();
    assert_eq!(gone.iter().collect::<BTreeSet<_>>(), copies[1..].iter().collect());
    assert_eq!(tend_instances(&others).await.unwrap().done, [], "each is told once");
    assert_eq!(tend_copies(&cloud).await.unwrap(), []);
    let wished = |pair: KeyValue| decode::<Request>(&pair.value).unwrap();
    let requests = world.under(&world.keys.all_requests()).into_iter().map(wished);
    let doomed: BTreeSet<_> = requests
        .filter(|request| request.desired == ec_model::Desired::Destroyed)
        .map(|request| request.instance)
        .collect();
    assert_eq!(doomed, gone.into_iter().collect());
}

#[tokio::test]
async fn a_copy_that_somebody_calls_otherwise_meanwhile_is_somebodys() {
    use crate::{
        Kind, Verb, act,
        image::{delete_copy, left_over},
    };

    let world = World::new(1, 0, &[]).await.roomy(2);
    let cloud = world.cloud();
    let data = world.volume("data").await;
    let of = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, data));
    let image = world.image(ImageStatus::Saving, 11).await;
    let copy = copy_for_image(&cloud, image, &of, None, &world.stop).await.unwrap().unwrap();
    world.active(copy, "volume").await;
    let copy = copy.instance;
    let names = cloud.store.keys(&world.keys.all_names(Workload::Volume)).await.unwrap();
    assert_eq!(left_over(&cloud, &names).await.unwrap(), [(image, copy)]);
    act(&cloud, copy, &Verb::Rename("mine".to_owned())).await.unwrap();
    let error = delete_copy(&cloud, image, copy).await.unwrap_err();
    assert!(error.kind() == Kind::Refused && error.to_string().contains("not called"), "{error}");
    // Where its record is gone, its request tells.
    let record = world.under(&world.keys.instance(copy)).remove(0);
    world.etcd.memory.txn(Txn::new().delete(record.key.clone())).await.unwrap();
    delete_copy(&cloud, image, copy).await.unwrap_err();
    world.etcd.memory.txn(Txn::new().put(record.key, record.value)).await.unwrap();
    assert_eq!(crate::resolve_volume(&cloud, "mine").await.unwrap(), copy, "it is there still");
}

#[tokio::test]
async fn what_is_on_a_volume_is_lost_by_words_for_volumes_alone() {
    use crate::{CloudError, Verb, act, delete_volume, destroy};

    let world = World::new(1, 0, &[]).await;
    let data = world.volume("data").await;
    let cloud = world.cloud();
    let image = ImageRef::at("file:///tiny");
    let size = ec_model::Resources::from([("DISK_GB".to_owned(), 9)]);
    let extent = ec_model::Extent { query: "resources=DISK_GB:9".to_owned(), resources: size };
    let errors = [
        destroy(&cloud, data).await.unwrap_err(),
        act(&cloud, data, &Verb::Rebuild(Some(image))).await.unwrap_err(),
        act(&cloud, data, &Verb::Resize(extent)).await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, CloudError::Refused(why) if why.contains("it is a volume")), "{error}");
    }
    delete_volume(&cloud, data).await.unwrap();
}

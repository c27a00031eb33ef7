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
        let upload = add_image(
            &cloud,
            &new,
            sent,
            async || None,
            async |_: &Image| Ok(false),
            async |_: &Image| Ok(()),
        );
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
    assert_eq!(tend_copies(&others, async || None).await.unwrap(), []);
    let gone: Vec<_> =
        tend_instances(&others).await.unwrap().done.into_iter().map(|gone| gone.instance).collect();
    assert_eq!(gone.iter().collect::<BTreeSet<_>>(), copies[1..].iter().collect());
    assert_eq!(tend_instances(&others).await.unwrap().done, [], "each is told once");
    assert_eq!(tend_copies(&cloud, async || None).await.unwrap(), []);
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

#[tokio::test(start_paused = true)]
async fn what_a_command_left_of_a_volume_goes_when_it_is_deleted_and_what_it_left_of_others_does_not() {
    use crate::{CloudError, Doomed, delete_volume};

    let world = World::new(2, 0, &[]).await;
    let cloud = world.cloud();
    let data = world.volume("data").await;
    let web = world.schedule(QUERY, Some("web")).await.unwrap().unwrap().instance;
    let (requests, statuses) =
        (world.under(&world.keys.all_requests()), world.under(&world.keys.all_statuses()));
    for pair in requests.into_iter().chain(statuses) {
        world.etcd.memory.txn(Txn::new().delete(pair.key)).await.unwrap();
    }
    let leave = async |instance, minutes: i64| {
        let key = world.keys.instance(instance);
        let record: Instance = decode(&world.under(&key)[0].value).unwrap();
        let created_at = Timestamp::now() - SignedDuration::from_mins(minutes);
        let record = Instance { assigned: None, created_at, ..record };
        world.etcd.memory.txn(Txn::new().put(key, encode(&record))).await.unwrap();
    };
    leave(data, 1).await;
    let young = delete_volume(&cloud, data).await.unwrap_err();
    let text = young.to_string();
    assert!(
        matches!(young, CloudError::Busy(_)) && text.starts_with(&format!("volume {data} is being placed")),
        "{text}"
    );
    assert!(text.contains("delete it again"), "{text}");
    leave(data, 11).await;
    leave(web, 11).await;
    assert!(matches!(delete_volume(&cloud, web).await, Err(CloudError::Refused(_))), "it is an instance");
    assert_eq!(world.under(&world.keys.instance(web)).len(), 1);
    assert!(matches!(delete_volume(&cloud, data).await.unwrap(), Doomed::Already));
    assert!(world.under(&world.keys.instance(data)).is_empty() && world.claims() == [web]);
    assert!(matches!(delete_volume(&cloud, data).await, Err(CloudError::NotFound(_))));
}

#[tokio::test]
async fn a_volume_changes_only_where_its_disk_does_and_tells_to_its_end_which_command_asked_for_that() {
    use crate::{Verb, act, delete_volume, restore_volume, volumes};

    let world = World::new(1, 0, &[]).await.roomy(9);
    let [named, anew, copied] = [world.volume("a").await, world.volume("b").await, world.volume("c").await];
    let mut cloud = world.cloud();
    act(&cloud, named, &Verb::Rename("d".to_owned())).await.unwrap();
    restore_volume(&cloud, anew, &ImageRef::at("file:///x")).await.unwrap();
    // Its agent is about something with it.
    let pair = world.under(&world.keys.status(node(0), copied)).remove(0);
    let mut status: ec_model::Status = decode(&pair.value).unwrap();
    status.doing = Some("copying".to_owned());
    status.observed_generation = 9;
    world.etcd.memory.txn(Txn::new().put(pair.key, encode(&status))).await.unwrap();
    let told = async |cloud: &Cloud, volume| {
        let shown = crate::volume(cloud, volume).await.unwrap();
        let listed = volumes(cloud).await.unwrap().into_iter().find(|view| view.volume == volume).unwrap();
        assert_eq!((&shown.status, shown.request_id), (&listed.status, listed.request_id));
        assert_eq!(shown.doing, listed.doing);
        (shown.status, shown.doing.is_some(), shown.request_id)
    };
    for (volume, status, is_doing) in
        [(named, "available", true), (anew, "changing", true), (copied, "changing", true)]
    {
        assert_eq!(told(&cloud, volume).await, (status.to_owned(), is_doing, Some(REQUEST)), "{volume}");
    }
    let another = "req-00000000-0000-0000-0000-000000000001".parse().unwrap();
    cloud.request_id = Some(another);
    delete_volume(&cloud, named).await.unwrap();
    assert_eq!(told(&cloud, named).await, ("deleting".to_owned(), true, Some(another)));
    let machines = crate::list(&cloud).await.unwrap();
    assert!(machines.iter().all(|view| view.request_id.is_none() && view.status.is_none()));
}

#[tokio::test]
async fn a_claim_of_shared_storage_is_given_back_and_told_apart_from_what_was_never_placed() {
    use crate::{Doomed, destroy};

    let world = World::new(1, 0, &[]).await;
    let left = InstanceId::new(uuid::Uuid::from_u128(9));
    // Of no host: all that it holds may be of storage.
    world.placement.claims.lock().unwrap().insert(left, node(0));
    assert!(matches!(destroy(&world.cloud(), left).await.unwrap(), Doomed::Released));
    assert!(world.claims().is_empty());
}

#[tokio::test]
async fn an_image_of_a_disk_needs_what_the_image_did_that_it_was_made_of_first() {
    use crate::least_of_origin;

    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let id = world.image(ImageStatus::Active, 1).await;
    let key = world.keys.image(id);
    let image: Image = decode(&world.under(&key)[0].value).unwrap();
    let image = Image { min_disk: 3, min_ram: 512, ..image };
    world.etcd.memory.txn(Txn::new().put(key.clone(), encode(&image))).await.unwrap();
    let of_image = ImageRef { id: Some(id), ..ImageRef::at("file:///x") };
    let guest = Guest { image: of_image, ..guest(Some("web")) };
    let query = ResourceQuery::parse("resources=VCPU:1,MEMORY_MB:512,DISK_GB:5").unwrap();
    let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
    let web = schedule(&cloud, &wanted, &world.stop).await.unwrap().unwrap();
    world.active(web, "machine").await;
    let copy_of = |kind, disk| ImageRef::copy_of(&CopyOf::disk(kind, disk));
    let of_web = copy_of(Workload::Machine, web.instance);
    let new = NewVolume { name: Some("copy".into()), image: Some(of_web.clone()), ..NewVolume::default() };
    let copy = create_volume(&cloud, &new, &world.stop).await.unwrap().unwrap();
    world.active(copy, "volume").await;
    let of_copy = copy_of(Workload::Volume, copy.instance);
    let of_empty = copy_of(Workload::Volume, world.volume("data").await);
    for (of, least) in [(&of_web, (3, 512)), (&of_copy, (3, 512)), (&of_empty, (0, 0))] {
        assert_eq!(least_of_origin(&cloud, of).await.unwrap(), least, "{of:?}");
    }
    world.etcd.memory.txn(Txn::new().delete(key)).await.unwrap();
    assert_eq!(least_of_origin(&cloud, &of_web).await.unwrap(), (0, 0), "nobody knows that any more");
}

#[tokio::test]
async fn a_copy_is_claimed_in_full_where_nobody_says_how_large_it_shall_be() {
    use crate::{Verb, act};

    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, data) = (world.cloud(), world.volume("data").await);
    let place = async |name: &str, query: &str, image: &ImageRef| {
        let guest = Guest { image: image.clone(), ..guest(Some(name)) };
        let query = ResourceQuery::parse(query).unwrap();
        let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
        let made = schedule(&cloud, &wanted, &world.stop).await?.unwrap();
        world.active(made, "machine").await;
        let record = world.under(&world.keys.instance(made.instance)).remove(0);
        let spec = decode::<Instance>(&record.value).unwrap().spec;
        Ok::<_, CloudError>((made.instance, spec.query, spec.resources.get("DISK_GB").copied()))
    };
    let (of, image) = (ImageRef::copy_of(&CopyOf::disk(Workload::Volume, data)), ImageRef::at("file:///x"));
    let (_, query, claimed) = place("copy", QUERY, &of).await.unwrap();
    assert_eq!((query, claimed), (format!("{QUERY},DISK_GB:2"), Some(2)));
    let (_, _, claimed) = place("larger", &format!("{QUERY},DISK_GB:3"), &of).await.unwrap();
    assert_eq!(claimed, Some(3));
    let asked = ResourceQuery::parse(QUERY).unwrap();
    let ask = Ask::new(&asked).unwrap().beside(&cloud, &of).await.unwrap();
    assert!(ask.asked.total().contains_key("DISK_GB"), "that is what is looked for, too");
    // Of an image it is as large as that, and nothing tells how large a copy of it would be.
    let (plain, _, claimed) = place("plain", QUERY, &image).await.unwrap();
    assert_eq!(claimed, None);
    let unknown = ImageRef::copy_of(&CopyOf::disk(Workload::Machine, plain));
    let error = place("unknown", QUERY, &unknown).await.unwrap_err().to_string();
    assert!(error.contains("no record tells how large"), "{error}");
    place("known", &format!("{QUERY},DISK_GB:1"), &unknown).await.unwrap();
    // Nor is one made anew as a copy that nobody counts.
    let error = act(&cloud, plain, &Verb::Rebuild(Some(of.clone()))).await.unwrap_err().to_string();
    assert!(error.contains(&format!("`eschedule resize {plain}` gives it DISK_GB:2 first")), "{error}");
    let (sized, ..) = place("sized", &format!("{QUERY},DISK_GB:2"), &image).await.unwrap();
    act(&cloud, sized, &Verb::Rebuild(Some(of))).await.unwrap();
}

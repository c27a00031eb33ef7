//! Names, rights, and what is left of images when a command is killed at any step: nothing, once somebody came across it.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use ec_placement_client::{PlacementClient, PlacementSection};
use ec_runtime::{Host, Machine};
use ec_store::{Layer, MemoryStore, Store, StoreResult, TxnOutcome};
use jiff::Timestamp;

use super::*;

/// A machine whose clock is set by hand.
struct Clock(AtomicI64);

impl Machine for Clock {
    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0.load(Ordering::Relaxed)).unwrap()
    }

    fn random(&self) -> u128 {
        uuid::Uuid::new_v4().as_u128()
    }

    fn work(&self, work: ec_runtime::Work) -> futures::future::BoxFuture<'static, ()> {
        work();
        Box::pin(std::future::ready(()))
    }
}

/// A store in memory, and bytes beside it. Whoever does more than so many steps is killed by it.
#[derive(Clone)]
struct World {
    memory: MemoryStore,
    objects: Arc<Mutex<BTreeSet<ImageId>>>,
    clock: Arc<Clock>,
    left: Arc<AtomicUsize>,
    /// Whether the last step is done before who did it is killed.
    done: bool,
    lose: bool,
    /// For so many writes etcd does not answer.
    away: Arc<AtomicUsize>,
    /// By so many seconds placement's clock is ahead.
    ahead: Option<i64>,
}

async fn killed<T>() -> T {
    std::future::pending().await
}

impl World {
    fn new() -> Self {
        Self {
            memory: MemoryStore::new(),
            objects: Arc::default(),
            clock: Arc::new(Clock(AtomicI64::new(1_000_000))),
            left: Arc::new(AtomicUsize::new(usize::MAX)),
            done: false,
            lose: false,
            away: Arc::default(),
            ahead: None,
        }
    }

    fn cloud(&self, project: &str) -> Cloud {
        ec_runtime::install_tls_provider();
        let nowhere = PlacementSection::default().settings().unwrap();
        Cloud {
            host: Host::simulated(self.clock.clone()),
            store: Arc::new(self.clone()),
            placement: Arc::new(PlacementClient::new(&nowhere).unwrap()),
            keys: ec_model::Keyspace::new("/r"),
            project: project.to_owned(),
            user: "u".to_owned(),
            request_id: None,
            notice: |_| (),
        }
    }

    /// Whether the next step is the one before or after which who does it is killed.
    fn is_last(&self) -> bool {
        self.left.fetch_sub(1, Ordering::Relaxed) == 1
    }

    async fn remove(&self, image: &Image) -> CloudResult<()> {
        let last = self.is_last();
        if last && !self.done {
            return killed().await;
        }
        self.objects.lock().unwrap().remove(&image.id);
        if last { killed().await } else { Ok(()) }
    }

    async fn send(&self, image: &Image) {
        let last = self.is_last();
        if last && !self.done {
            return killed().await;
        }
        self.objects.lock().unwrap().insert(image.id);
        if last {
            killed().await
        }
    }

    fn is_whole(&self, image: &Image) -> bool {
        self.objects.lock().unwrap().contains(&image.id)
    }

    fn keys(&self) -> Vec<String> {
        self.memory.content("/r/").pairs.into_iter().map(|pair| pair.key).collect()
    }

    async fn add(&self, cloud: &Cloud, new: &NewImage, bytes: Bytes) -> CloudResult<Upload> {
        let is_whole = async |image: &Image| Ok(self.is_whole(image));
        add_image(
            cloud,
            new,
            bytes,
            async || self.ahead,
            is_whole,
            async |image: &Image| self.remove(image).await,
        )
        .await
    }

    async fn delete(&self, cloud: &Cloud, name: &str) -> CloudResult<Image> {
        delete_image(cloud, name, async |image: &Image| self.remove(image).await).await
    }

    async fn tend(&self, cloud: &Cloud) -> Vec<Image> {
        let is_whole = async |image: &Image| Ok(self.is_whole(image));
        let remove = async |image: &Image| self.remove(image).await;
        tend_images(cloud, async || None, is_whole, remove).await.unwrap().done
    }
}

#[async_trait]
impl Layer for World {
    fn inner(&self) -> &dyn Store {
        &self.memory
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let away = self.away.load(Ordering::Relaxed);
        if away > 0 {
            self.away.store(away - 1, Ordering::Relaxed);
            return Err(StoreError::Unreachable { endpoints: "memory".into(), detail: "as told".into() });
        }
        let last = self.is_last();
        if last && !self.done {
            return killed().await;
        }
        let outcome = self.memory.txn(txn).await?;
        match (last, self.lose) {
            (true, true) => Err(StoreError::Unknown("as told".into())),
            (true, false) => killed().await,
            _ => Ok(outcome),
        }
    }
}

fn new(name: &str, visibility: Visibility) -> NewImage {
    NewImage { name: name.to_owned(), visibility, ..NewImage::default() }
}

fn at(url: &str) -> Bytes {
    Bytes::At(ImageRef::at(url))
}

fn sent() -> Bytes {
    Bytes::Sent { store: "file:///store/".to_owned() }
}

fn facts() -> Facts {
    Facts {
        size: 9,
        sha256: "a".repeat(64),
        sha512: None,
        compression: None,
        disk_format: "raw",
        virtual_size: 512,
    }
}

#[tokio::test]
async fn a_name_is_one_image_within_a_project_and_a_public_one_of_others_comes_after() {
    let world = World::new();
    let (ours, theirs) = (world.cloud("ours"), world.cloud("theirs"));
    let public = world.add(&theirs, &new("Debian", Visibility::Public), at("https://theirs")).await.unwrap();
    world.add(&theirs, &new("secret", Visibility::Private), at("https://secret")).await.unwrap();
    let of = async |cloud: &Cloud, text: &str| image(cloud, text).await.map(|image| image.url);
    assert_eq!(of(&ours, "debian").await.unwrap(), "https://theirs");
    for hidden in ["secret".to_owned(), image(&theirs, "secret").await.unwrap().id.to_string()] {
        assert!(matches!(image(&ours, &hidden).await, Err(CloudError::NotFound(_))), "{hidden}");
    }
    world.add(&ours, &new("debian", Visibility::Private), at("https://ours")).await.unwrap();
    assert_eq!(of(&ours, "DEBIAN").await.unwrap(), "https://ours");
    assert_eq!(of(&ours, &public.image().id.to_string()).await.unwrap(), "https://theirs");
    let error =
        world.add(&ours, &new("DEBIAN", Visibility::Private), at("https://x")).await.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("there is an image `debian` already"), "{error}");
    let urls: Vec<_> = images(&ours).await.unwrap().into_iter().map(|image| image.url).collect();
    assert_eq!(urls, ["https://ours", "https://theirs"]);

    let more = world.cloud("more");
    world.add(&more, &new("debian", Visibility::Public), at("https://more")).await.unwrap();
    let error = image(&world.cloud("nobody"), "debian").await.unwrap_err().to_string();
    assert!(error.contains("several projects") && error.contains(&public.image().id.to_string()), "{error}");
}

#[tokio::test]
async fn what_is_changed_is_found_by_its_new_name_only_and_seen_by_whom_it_says() {
    let world = World::new();
    let (ours, theirs) = (world.cloud("ours"), world.cloud("theirs"));
    world.add(&ours, &new("a", Visibility::Private), at("https://a")).await.unwrap();
    world.add(&ours, &new("b", Visibility::Private), at("https://b")).await.unwrap();
    let taken = ImageChange { name: Some("B".into()), ..ImageChange::default() };
    let error = change_image(&ours, "a", &taken).await.unwrap_err().to_string();
    assert!(error.contains("there is an image `B` already"), "{error}");
    let change = ImageChange {
        name: Some("c".into()),
        visibility: Some(Visibility::Public),
        protected: Some(true),
        properties: [("os".to_owned(), Some("x".to_owned()))].into(),
        ..ImageChange::default()
    };
    world.clock.0.fetch_add(5, Ordering::Relaxed);
    let changed = change_image(&ours, "a", &change).await.unwrap();
    assert_eq!((changed.properties["os"].as_str(), changed.protected), ("x", true));
    assert_eq!(changed.updated_at.as_second() - changed.created_at.as_second(), 5);
    assert!(matches!(image(&ours, "a").await, Err(CloudError::NotFound(_))));
    assert_eq!(image(&theirs, "c").await.unwrap().url, "https://a");
    // Another case of letters is no other name; and others may not change it.
    let other = ImageChange { name: Some("C".into()), ..ImageChange::default() };
    assert_eq!(change_image(&ours, "c", &other).await.unwrap().name, "C");
    let error = change_image(&theirs, "c", &other).await.unwrap_err().to_string();
    assert!(error.contains("is of project `ours`"), "{error}");
    let error = world.delete(&theirs, "c").await.unwrap_err().to_string();
    assert!(error.contains("is of project `ours`"), "{error}");
    let error = world.delete(&ours, "c").await.unwrap_err().to_string();
    assert!(error.contains("is protected: `eschedule image set c --unprotected`"), "{error}");
    let back = ImageChange {
        visibility: Some(Visibility::Private),
        protected: Some(false),
        properties: [("os".to_owned(), None)].into(),
        ..ImageChange::default()
    };
    assert!(change_image(&ours, "c", &back).await.unwrap().properties.is_empty());
    assert!(matches!(image(&theirs, "c").await, Err(CloudError::NotFound(_))));
    for name in ["c", "b"] {
        world.delete(&ours, name).await.unwrap();
    }
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test]
async fn a_name_whose_key_is_lost_is_told_and_written_again_unless_another_bears_it() {
    let world = World::new();
    let (ours, theirs) = (world.cloud("ours"), world.cloud("theirs"));
    let id = world.add(&ours, &new("a", Visibility::Public), at("https://a")).await.unwrap().image().id;
    assert!(unnamed_images(&ours).await.unwrap().is_empty());
    let names = ours.keys.names_of_image(&image(&ours, "a").await.unwrap());
    assert_eq!(names.len(), 2);
    for name in &names {
        world.memory.txn(Txn::new().delete(name.clone())).await.unwrap();
        let unnamed = unnamed_images(&ours).await.unwrap();
        assert_eq!(unnamed.iter().map(|image| image.id).collect::<Vec<_>>(), [id]);
        assert!(unnamed_images(&theirs).await.unwrap().is_empty(), "it is nobody else's to mend");
        let named = ImageChange { name: Some("a".into()), ..ImageChange::default() };
        change_image(&ours, &id.to_string(), &named).await.unwrap();
        assert!(unnamed_images(&ours).await.unwrap().is_empty());
        assert_eq!(image(&theirs, "a").await.unwrap().id, id);
    }
    for name in &names {
        world.memory.txn(Txn::new().delete(name.clone())).await.unwrap();
    }
    let other = world.add(&ours, &new("a", Visibility::Private), at("https://b")).await.unwrap().image().id;
    assert_ne!(other, id);
    let named = ImageChange { name: Some("A".into()), ..ImageChange::default() };
    let error = change_image(&ours, &id.to_string(), &named).await.unwrap_err().to_string();
    assert!(error.contains("there is an image `A` already"), "{error}");
    // What else is changed of it is, and it is found by everybody again.
    let protected = ImageChange { protected: Some(true), ..ImageChange::default() };
    assert!(change_image(&ours, &id.to_string(), &protected).await.unwrap().protected);
    assert_eq!(image(&ours, "a").await.unwrap().id, other);
    assert_eq!(image(&theirs, "a").await.unwrap().id, id);
    let named = ImageChange { name: Some("b".into()), ..ImageChange::default() };
    change_image(&ours, &id.to_string(), &named).await.unwrap();
    assert!(unnamed_images(&ours).await.unwrap().is_empty());
    assert_eq!(image(&ours, "b").await.unwrap().id, id);
}

#[tokio::test]
async fn an_image_is_used_once_its_bytes_are_there() {
    let world = World::new();
    let cloud = world.cloud("p");
    let size = Resources::from([("DISK_GB".to_owned(), 1)]);
    assert_eq!(image_for(&cloud, "web", &size).await.unwrap(), None);
    let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    let id = upload.image().id;
    assert_eq!(upload.image().url, format!("file:///store/{id}"));
    let error = image_for(&cloud, "web", &size).await.unwrap_err();
    assert!(matches!(&error, CloudError::Invalid(why) if why.contains("`web` is saving")), "{error}");
    upload.go_on(&cloud, Some("parts".into())).await.unwrap();
    assert_eq!(image(&cloud, "web").await.unwrap().upload.as_deref(), Some("parts"));
    let image = upload.finish(&cloud, facts()).await.unwrap();
    assert_eq!((image.upload, image.size), (None, Some(9)));
    let used = image_for(&cloud, "web", &size).await.unwrap().unwrap();
    assert_eq!((used.sha256, used.id), (Some("a".repeat(64)), Some(id)));
    let change = ImageChange { min_disk: Some(2), ..ImageChange::default() };
    change_image(&cloud, "web", &change).await.unwrap();
    let error = image_for(&cloud, "web", &size).await.unwrap_err().to_string();
    assert!(error.contains("image `web` needs DISK_GB:2"), "{error}");
}

#[tokio::test]
async fn what_was_taken_away_while_it_was_sent_is_not_brought_back() {
    let world = World::new();
    let cloud = world.cloud("p");
    let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    world.send(&upload.image().clone()).await;
    world.delete(&cloud, "web").await.unwrap();
    assert!(matches!(upload.go_on(&cloud, None).await, Err(CloudError::Busy(_))));
    // The last bytes arrive after all.
    world.send(&upload.image().clone()).await;
    upload.give_up(&cloud, async |image: &Image| world.remove(image).await).await.unwrap();
    assert!(world.objects.lock().unwrap().is_empty());
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test]
async fn bytes_that_come_after_their_image_was_deleted_are_found_though_who_sent_them_was_killed() {
    let world = World::new();
    let cloud = world.cloud("p");
    let upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    world.delete(&cloud, "web").await.unwrap();
    assert!(images(&cloud).await.unwrap().is_empty(), "it is deleted for all that anybody sees");
    let next = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    world.send(&upload.image().clone()).await;
    drop(upload);
    assert!(world.tend(&cloud).await.is_empty(), "it may still be sent");
    world.delete(&cloud, &next.image().id.to_string()).await.unwrap();
    world.clock.0.fetch_add(600, Ordering::Relaxed);
    world.tend(&cloud).await;
    assert!(world.objects.lock().unwrap().is_empty());
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test]
async fn bytes_that_a_store_makes_whole_after_their_sender_gave_up_are_found() {
    let world = World::new();
    let cloud = world.cloud("p");
    for is_last in [true, false] {
        let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
        let image = upload.image().clone();
        if is_last {
            upload.complete(&cloud, Some("parts".into())).await.unwrap();
        }
        upload.give_up(&cloud, async |image: &Image| world.remove(image).await).await.unwrap();
        assert!(images(&cloud).await.unwrap().is_empty(), "there is none for all that anybody sees");
        assert_eq!(world.keys().len(), usize::from(is_last));
        if is_last {
            world.send(&image).await;
            world.clock.0.fetch_add(600, Ordering::Relaxed);
            world.tend(&cloud).await;
        }
        assert!(world.objects.lock().unwrap().is_empty());
        assert_eq!(world.keys(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn bytes_are_in_the_store_until_an_images_end_and_not_before_all_came() {
    let world = World::new();
    let cloud = world.cloud("p");
    let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    assert!(stored_images(&cloud).await.unwrap().is_empty());
    upload.finish(&cloud, facts()).await.unwrap();
    let kept = delete_image(&cloud, "web", async |_: &Image| {
        assert_eq!(stored_images(&cloud).await?.len(), 1, "the last one is looked for, too");
        Err(CloudError::Busy("the store is not mounted".into()))
    });
    kept.await.unwrap_err();
    assert_eq!(stored_images(&cloud).await.unwrap().len(), 1);
    world.tend(&cloud).await;
    assert!(stored_images(&cloud).await.unwrap().is_empty());
    // What is left of one whose bytes never came.
    world.add(&cloud, &new("half", Visibility::Private), sent()).await.unwrap();
    let half = delete_image(&cloud, "half", async |_: &Image| Err(CloudError::Busy("x".into())));
    half.await.unwrap_err();
    assert!(stored_images(&cloud).await.unwrap().is_empty());
}

/// Adds, sends, says that it goes on, and finishes.
async fn whole(world: &World, cloud: &Cloud) -> CloudResult<Image> {
    let mut upload = world.add(cloud, &new("web", Visibility::Public), sent()).await?;
    world.send(&upload.image().clone()).await;
    upload.go_on(cloud, None).await?;
    upload.finish(cloud, facts()).await
}

/// Begins one and gives it up, or makes one and deletes it.
async fn nothing(world: &World, cloud: &Cloud, whole_first: bool) -> CloudResult<()> {
    if whole_first {
        whole(world, cloud).await?;
        return world.delete(cloud, "web").await.map(drop);
    }
    let upload = world.add(cloud, &new("web", Visibility::Public), sent()).await?;
    world.send(&upload.image().clone()).await;
    upload.give_up(cloud, async |image: &Image| world.remove(image).await).await
}

#[tokio::test(start_paused = true)]
async fn whoever_is_killed_at_any_step_leaves_nothing_that_is_not_found_and_taken_away() {
    let mut outcomes = BTreeSet::new();
    for kind in 0..3 {
        for (step, done) in (1..12).flat_map(|step| [(step, false), (step, true)]) {
            let world = World { done, ..World::new() };
            world.left.store(step, Ordering::Relaxed);
            let cloud = world.cloud("p");
            let work = async {
                match kind {
                    0 => whole(&world, &cloud).await.map(drop),
                    kind => nothing(&world, &cloud, kind == 1).await,
                }
            };
            let ended = tokio::time::timeout(std::time::Duration::from_secs(1), work).await;
            world.left.store(usize::MAX, Ordering::Relaxed);
            let what = format!("{kind}, killed at step {step}, {done}");
            if ended.is_ok() {
                outcomes.insert((kind, "ended"));
                continue;
            }
            // Before it is old, nobody takes away what may be under way.
            let saving = images(&cloud).await.unwrap().iter().any(|it| it.status == ImageStatus::Saving);
            let early = world.tend(&cloud).await;
            assert!(!saving || early.is_empty(), "{what}");
            world.clock.0.fetch_add(601, Ordering::Relaxed);
            world.tend(&cloud).await;
            let mut there = images(&cloud).await.unwrap();
            if there.iter().any(|it| it.status == ImageStatus::Saving) {
                assert!(world.is_whole(&there[0]), "{what}");
                outcomes.insert((kind, "whole, and not told so"));
                world.delete(&cloud, "web").await.unwrap();
                there.clear();
            }
            let objects = world.objects.lock().unwrap().clone();
            if let [image] = &there[..] {
                assert_eq!(image.status, ImageStatus::Active, "{what}");
                assert_eq!(objects, [image.id].into(), "{what}");
                assert_eq!(world.keys().len(), 3, "{what}: {:?}", world.keys());
                outcomes.insert((kind, "whole"));
            } else {
                assert_eq!((there.len(), objects.len()), (0, 0), "{what}");
                assert_eq!(world.keys(), Vec::<String>::new(), "{what}");
                outcomes.insert((kind, "nothing"));
            }
            // And the name is to be had again, at the latest now.
            if there.is_empty() {
                whole(&world, &cloud).await.unwrap();
            }
        }
    }
    assert_eq!(outcomes.len(), 11, "{outcomes:?}");
}

#[tokio::test]
async fn a_left_over_gives_its_name_to_whoever_wants_it_and_one_under_way_does_not() {
    let mut world = World::new();
    let cloud = world.cloud("p");
    world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    let error = whole(&world, &cloud).await.unwrap_err().to_string();
    assert!(error.contains("bytes are on their way"), "{error}");
    world.clock.0.fetch_add(600, Ordering::Relaxed);
    // By a clock that is wrong somebody may be at it yet.
    world.ahead = Some(-600);
    let error = whole(&world, &cloud).await.unwrap_err().to_string();
    assert!(error.contains("clock is 600 s ahead of that of placement's host"), "{error}");
    world.ahead = None;
    let image = whole(&world, &cloud).await.unwrap();
    assert_eq!(*world.objects.lock().unwrap(), [image.id].into());
}

#[tokio::test]
async fn an_image_that_an_older_etcd_has_on_its_way_keeps_the_bytes_that_came_since() {
    let world = World::new();
    let cloud = world.cloud("p");
    let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    let before = world.memory.content("/r/").pairs;
    world.send(upload.image()).await;
    let id = upload.finish(&cloud, facts()).await.unwrap().id;
    let put_back = before.into_iter().fold(Txn::new(), |txn, pair| txn.put(pair.key, pair.value));
    world.memory.txn(put_back).await.unwrap();
    world.clock.0.fetch_add(601, Ordering::Relaxed);
    let is_whole = async |image: &Image| Ok(world.is_whole(image));
    let remove = async |image: &Image| world.remove(image).await;
    // By a clock that is wrong somebody may be at it yet.
    let tended = tend_images(&cloud, async || Some(-601), is_whole, remove).await.unwrap();
    let why = tended.failed.unwrap().to_string();
    assert!(
        why.contains("clock is 601 s ahead of that of placement's host") && tended.done.is_empty(),
        "{why}"
    );
    let tended = tend_images(&cloud, async || None, is_whole, remove).await;
    let tended = tended.unwrap();
    let why = tended.failed.unwrap().to_string();
    assert!(tended.done.is_empty() && why.contains(&format!("lie at file:///store/{id}")), "{why}");
    let error = whole(&world, &cloud).await.unwrap_err().to_string();
    assert_eq!(error, why, "nor does its name go to another");
    assert_eq!(*world.objects.lock().unwrap(), [id].into());
    world.delete(&cloud, "web").await.unwrap();
    assert_eq!((world.keys().len(), world.objects.lock().unwrap().len()), (0, 0));
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_was_done() {
    for step in 1..=4 {
        let world = World { done: true, lose: true, ..World::new() };
        let cloud = world.cloud("p");
        world.left.store(step, Ordering::Relaxed);
        if step == 2 {
            // The second step sends bytes.
            continue;
        }
        let image = whole(&world, &cloud).await.unwrap();
        assert_eq!(image.status, ImageStatus::Active, "step {step}");
        assert_eq!(world.keys().len(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn an_etcd_that_is_away_for_a_while_costs_nothing_of_what_was_sent() {
    let world = World::new();
    let cloud = world.cloud("p");
    let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
    let away = |writes| world.away.store(writes, Ordering::Relaxed);
    away(3);
    upload.go_on(&cloud, None).await.unwrap();
    away(usize::MAX);
    upload.still_at_it(&cloud, None).await.unwrap();
    assert_eq!(upload.go_on(&cloud, None).await.unwrap_err().kind(), Kind::Unreachable);
    world.clock.0.fetch_add(479, Ordering::Relaxed);
    upload.still_at_it(&cloud, None).await.unwrap();
    world.clock.0.fetch_add(1, Ordering::Relaxed);
    upload.still_at_it(&cloud, None).await.expect_err("others may soon take it for left over");
    away(3);
    assert_eq!(upload.finish(&cloud, facts()).await.unwrap().status, ImageStatus::Active);
}

#[tokio::test]
async fn bytes_that_cannot_be_taken_away_keep_their_record() {
    let world = World::new();
    let cloud = world.cloud("p");
    whole(&world, &cloud).await.unwrap();
    let refused = async |_: &Image| Err(CloudError::Refused("the store is away".into()));
    delete_image(&cloud, "web", refused).await.unwrap_err();
    assert!(matches!(image(&cloud, "web").await, Err(CloudError::NotFound(_))), "its name is free");
    let left = images(&cloud).await.unwrap();
    assert_eq!(left[0].status, ImageStatus::PendingDelete);
    let change = ImageChange { protected: Some(true), ..ImageChange::default() };
    let error = change_image(&cloud, &left[0].id.to_string(), &change).await.unwrap_err().to_string();
    assert!(error.contains("is being deleted"), "{error}");
    assert_eq!(world.tend(&cloud).await.len(), 1);
    assert_eq!((world.keys().len(), world.objects.lock().unwrap().len()), (0, 0));
}

#[tokio::test]
async fn more_properties_than_an_image_may_have_are_refused() {
    let world = World::new();
    let cloud = world.cloud("p");
    let many =
        |count: usize| (0..count).map(|n| (format!("k{n}"), String::new())).collect::<BTreeMap<_, _>>();
    let with = |count| NewImage { properties: many(count), ..new("web", Visibility::Private) };
    assert!(with(128).check().is_ok() && with(129).check().is_err());
    world.add(&cloud, &with(128), at("https://x")).await.unwrap();
    let more = ImageChange {
        properties: [("one".to_owned(), Some("more".to_owned()))].into(),
        ..ImageChange::default()
    };
    assert!(matches!(change_image(&cloud, "web", &more).await, Err(CloudError::Invalid(_))));
}

#[tokio::test]
async fn what_users_say_of_an_image_that_is_being_sent_is_said_of_it_and_ends_nothing() {
    let world = World::new();
    let cloud = world.cloud("p");
    let set = |min_disk| ImageChange { min_disk: Some(min_disk), ..ImageChange::default() };
    for gives_up in [false, true] {
        let mut upload = world.add(&cloud, &new("web", Visibility::Private), sent()).await.unwrap();
        let id = upload.image().id;
        world.send(upload.image()).await;
        change_image(&cloud, "web", &set(3)).await.unwrap();
        upload.go_on(&cloud, Some("part".to_owned())).await.unwrap();
        change_image(&cloud, "web", &set(4)).await.unwrap();
        if gives_up {
            upload.give_up(&cloud, async |image: &Image| world.remove(image).await).await.unwrap();
        } else {
            let image = upload.finish(&cloud, facts()).await.unwrap();
            assert_eq!((image.min_disk, image.status, image.upload), (4, ImageStatus::Active, None));
            world.delete(&cloud, &id.to_string()).await.unwrap();
        }
        assert_eq!((world.keys().len(), world.objects.lock().unwrap().len()), (0, 0), "{gives_up}");
    }
}

#[tokio::test]
async fn a_name_whose_record_is_gone_holds_up_nobody() {
    let world = World::new();
    let cloud = world.cloud("p");
    let lose = async |name: &str| {
        let image = world.add(&cloud, &new(name, Visibility::Public), at("https://x")).await.unwrap();
        let key = cloud.keys.image(image.image().id);
        world.memory.txn(Txn::new().delete(key)).await.unwrap();
    };
    lose("web").await;
    world.add(&cloud, &new("web", Visibility::Private), at("https://y")).await.unwrap();
    world.delete(&cloud, "web").await.unwrap();
    lose("db").await;
    assert_eq!(world.tend(&world.cloud("other")).await, []);
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test]
async fn an_image_that_an_older_etcd_has_again_goes_with_its_names() {
    let world = World::new();
    let cloud = world.cloud("p");
    let image = world.add(&cloud, &new("web", Visibility::Public), at("https://x")).await.unwrap();
    let mut upload = world.add(&cloud, &new("db", Visibility::Public), sent()).await.unwrap();
    world.send(upload.image()).await;
    upload.finish(&cloud, facts()).await.unwrap();
    let before = world.memory.content("/r/").pairs;
    let put_back = async |_: &Image| {
        let keys = before.iter().fold(Txn::new(), |txn, pair| txn.put(pair.key.clone(), pair.value.clone()));
        world.memory.txn(keys).await.unwrap();
        Ok(())
    };
    let once = AtomicUsize::new(0);
    let first_only = async |image: &Image| match once.fetch_add(1, Ordering::Relaxed) {
        0 => put_back(image).await,
        _ => world.remove(image).await,
    };
    delete_image(&cloud, "db", first_only).await.unwrap();
    assert_eq!(world.keys().len(), 3, "{:?}", world.keys());
    world.delete(&cloud, &image.image().id.to_string()).await.unwrap();
    assert_eq!(world.keys(), Vec::<String>::new());
}

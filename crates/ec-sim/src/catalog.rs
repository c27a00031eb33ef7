//! What people do with the catalogue: images, whose bytes lie in a store of their own, flavors and keypairs.

use std::{sync::Arc, time::Duration};

use ec_cloud::{
    Bytes, Cloud, CloudError, CloudResult, Facts, ImageChange, NewImage, add_image, add_keypair,
    change_image, create_flavor, delete_flavor, delete_image, delete_keypair, flavor, image, images, keypair,
    tend_images,
};
use ec_model::{Image, ImageId, ImageRef, Record, ResourceQuery, Visibility, decode, encode};
use tokio::time::sleep;

use crate::{
    acts,
    life::Life,
    user::cloud,
    world::{Actor, World},
};

/// Names that users of one project quarrel about, and those of two of what everybody may use.
const NAMES: [&str; 3] = ["debian", "alpine", "Debian"];

const PROJECTS: [&str; 2] = ["default", "other"];

/// So long after it was begun, what nobody brings to its end counts as left over.
const STALE: Duration = Duration::from_mins(10);

/// What somebody does next.
#[derive(Debug, Clone)]
pub(crate) enum Deed {
    /// Bytes come in so many parts, or are elsewhere.
    Add {
        name: &'static str,
        parts: Option<u64>,
        public: bool,
        protected: bool,
    },
    Change {
        image: String,
        change: ImageChange,
    },
    Delete(String),
    /// Somebody takes an image's record away by hand, and leaves its names.
    Lose(String),
    List,
    CreateFlavor(&'static str),
    DeleteFlavor(&'static str),
    AddKeypair(&'static str),
    DeleteKeypair(&'static str),
}

/// Something that somebody may do with the catalogue as it is, and in which project.
pub(crate) fn any(world: &World) -> (Deed, &'static str) {
    let name = a_name(world);
    let deed = match world.pick(0..20) {
        0..6 => Deed::Add {
            name,
            parts: world.chance(70).then(|| world.pick(0..4)),
            public: world.chance(30),
            protected: world.chance(20),
        },
        6..10 => Deed::Change { image: some_image(world, name), change: a_change(world) },
        10..13 => Deed::Delete(some_image(world, name)),
        13 if world.chance(30) => Deed::Lose(some_image(world, name)),
        13 => Deed::List,
        14 | 15 => Deed::CreateFlavor(name),
        16 => Deed::DeleteFlavor(name),
        17 | 18 => Deed::AddKeypair(name),
        _ => Deed::DeleteKeypair(name),
    };
    (deed, PROJECTS[usize::from(world.chance(30))])
}

fn a_name(world: &World) -> &'static str {
    world.among(&NAMES)
}

/// By its name, or by the uuid of one that there is.
fn some_image(world: &World, name: &str) -> String {
    let keys = world.store.content(&world.keys.images()).pairs;
    let ids: Vec<_> = keys.iter().filter_map(|pair| world.keys.parse_image(&pair.key).ok()).collect();
    if ids.is_empty() || world.chance(40) {
        return name.to_owned();
    }
    world.one_of(&ids).map_or_else(|| name.to_owned(), ToString::to_string)
}

fn a_change(world: &World) -> ImageChange {
    let mut change = ImageChange::default();
    match world.pick(0..6) {
        0 | 1 => change.name = Some(a_name(world).to_owned()),
        2 => change.protected = Some(world.chance(30)),
        3 => {
            let visibility = if world.chance(50) { Visibility::Public } else { Visibility::Private };
            change.visibility = Some(visibility);
        }
        4 => change.min_disk = Some(world.pick(0..5)),
        _ => change.min_ram = Some(world.pick(0..512)),
    }
    change
}

pub(crate) async fn perform(world: &Arc<World>, actor: Actor, cloud: &Cloud, deed: Deed) {
    let remove = async |image: &Image| remove(world, cloud, image.id).await;
    let is_whole = async |image: &Image| Ok(world.objects().contains(&image.id));
    let told = match deed {
        Deed::Add { name, parts, public, protected } => {
            let visibility = if public { Visibility::Public } else { Visibility::Private };
            let new = NewImage { name: name.to_owned(), visibility, protected, ..NewImage::default() };
            world.log(actor, format!("adds the image {name}"));
            world.judge(|referee, _| referee.changes_images(actor, None));
            add(world, cloud, &new, parts).await
        }
        Deed::Change { image, change } => {
            world.log(actor, format!("changes the image {image}: {change:?}"));
            world.judge(|referee, _| referee.changes_images(actor, Some(change.clone())));
            change_image(cloud, &image, &change).await
        }
        Deed::Delete(text) => {
            world.log(actor, format!("deletes the image {text}"));
            world.judge(|referee, _| referee.changes_images(actor, None));
            let deleted = delete_image(cloud, &text, remove).await;
            if let Ok(image) = &deleted {
                world.judge(|referee, world| referee.image_deleted(world, image.id));
            }
            deleted
        }
        Deed::Lose(text) => {
            if let Ok(image) = text.parse() {
                world.judge(|referee, _| referee.image_lost(image));
                acts::delete_key(world, &world.keys.image(image)).await;
            }
            return;
        }
        Deed::List => {
            world.log(actor, "lists images");
            world.judge(|referee, _| referee.changes_images(actor, None));
            if let Ok(gone) = tend_images(cloud, async || None, is_whole, remove).await {
                for image in gone.done {
                    world.log(actor, format!("took away what was left of the image {}", image.name));
                }
            }
            let seen = images(cloud).await;
            world.log(
                actor,
                format!("sees {}", seen.map_or_else(|error| error.to_string(), |all| all.len().to_string())),
            );
            return;
        }
        Deed::CreateFlavor(name) => return make_flavor(world, actor, cloud, name).await,
        Deed::DeleteFlavor(name) => {
            let key = world.keys.flavor(name);
            return gone(world, actor, ("flavor", name), &key, delete_flavor(cloud, name)).await;
        }
        Deed::AddKeypair(name) => return make_keypair(world, actor, cloud, name).await,
        Deed::DeleteKeypair(name) => {
            let key = world.keys.keypair(&cloud.project, name);
            return gone(world, actor, ("keypair", name), &key, delete_keypair(cloud, name)).await;
        }
    };
    let told = told
        .map_or_else(|error| error.to_string(), |image| format!("image {}: {:?}", image.id, image.status));
    world.log(actor, format!("is told: {told}"));
}

/// Makes an image, as the command line does: it sends the bytes, part by part, and takes away what came where it cannot go on.
async fn add(world: &Arc<World>, cloud: &Cloud, new: &NewImage, parts: Option<u64>) -> CloudResult<Image> {
    let remove = async |image: &Image| remove(world, cloud, image.id).await;
    let is_whole = async |image: &Image| Ok(world.objects().contains(&image.id));
    let Some(parts) = parts else {
        let at = Bytes::At(ImageRef::at("https://images.example/debian.qcow2"));
        let added = add_image(cloud, new, at, async || None, is_whole, remove).await?.image().clone();
        world.judge(|referee, world| referee.image_acknowledged(world, added.id));
        return Ok(added);
    };
    let sent = Bytes::Sent { store: "file:///store".to_owned() };
    let mut upload = add_image(cloud, new, sent, async || None, is_whole, remove).await?;
    let id = upload.image().id;
    let sent = async {
        for part in 0..parts {
            world.way().await;
            upload.go_on(cloud, Some(format!("part-{part}"))).await?;
        }
        upload.complete(cloud, Some("all".to_owned())).await?;
        _ = cloud.host.blocking(|| ()).await;
        if world.chance(world.storm().etcd) {
            let (world, late) = (Arc::clone(world), world.millis(1..60_000));
            tokio::spawn(async move {
                sleep(late).await;
                world.store_object(id);
            });
            return Err(CloudError::Refused("the image store does not answer".to_owned()));
        }
        world.store_object(id);
        let facts = Facts {
            size: 512,
            sha256: "0".repeat(64),
            sha512: None,
            compression: None,
            disk_format: "raw",
            virtual_size: 512,
        };
        upload.finish(cloud, facts).await
    };
    let sent = sent.await;
    match sent {
        Ok(image) => {
            world.judge(|referee, world| referee.image_acknowledged(world, image.id));
            Ok(image)
        }
        Err(error) => {
            upload.give_up(cloud, remove).await.ok();
            Err(error)
        }
    }
}

/// Takes an image's bytes out of the store.
async fn remove(world: &Arc<World>, cloud: &Cloud, image: ImageId) -> CloudResult<()> {
    _ = cloud.host.blocking(|| ()).await;
    world.way().await;
    if world.chance(world.storm().etcd) {
        return Err(CloudError::Refused("the image store does not answer".to_owned()));
    }
    _ = cloud.host.blocking(|| ()).await;
    world.drop_object(image);
    world.judge(|referee, world| referee.look_at_removed(world, image));
    Ok(())
}

async fn make_flavor(world: &Arc<World>, actor: Actor, cloud: &Cloud, name: &'static str) {
    let Ok(query) = ResourceQuery::parse("resources=VCPU:1,MEMORY_MB:128,DISK_GB:1") else { return };
    let told = match create_flavor(cloud, name, &query).await {
        Ok(made) => {
            made_so(world, &world.keys.flavor(name), &made);
            flavor(cloud, &made.name).await.map(|_| ())
        }
        Err(error) => Err(error),
    };
    world.log(actor, format!("creates the flavor {name}: {}", in_words(told)));
}

async fn make_keypair(world: &Arc<World>, actor: Actor, cloud: &Cloud, name: &'static str) {
    let told = match add_keypair(cloud, name, vec!["ssh-ed25519 AAAA".to_owned()]).await {
        Ok(made) => {
            made_so(world, &world.keys.keypair(&cloud.project, name), &made);
            keypair(cloud, &made.name).await.map(|_| ())
        }
        Err(error) => Err(error),
    };
    world.log(actor, format!("adds the keypair {name}: {}", in_words(told)));
}

/// A user was told that this record was made.
pub(crate) fn made_so<R: Record>(world: &World, key: &str, record: &R) {
    world.judge(|referee, _| referee.told_made(key, &encode(record)));
}

/// What a user is told who has what lies under this key deleted.
pub(crate) async fn deleted<T>(
    world: &World,
    key: &str,
    deletion: impl Future<Output = CloudResult<T>>,
) -> CloudResult<T> {
    let mut ends = 0;
    world.judge(|referee, _| ends = referee.ends_of(key));
    let told = deletion.await?;
    world.judge(|referee, _| referee.told_gone(key, ends));
    Ok(told)
}

async fn gone(
    world: &World,
    actor: Actor,
    (what, name): (&str, &str),
    key: &str,
    deletion: impl Future<Output = CloudResult<()>>,
) {
    let told = deleted(world, key, deletion).await;
    world.log(actor, format!("deletes the {what} {name}: {}", in_words(told)));
}

fn in_words(told: CloudResult<()>) -> String {
    told.map_or_else(|error| error.to_string(), |()| "it is done".to_owned())
}

/// In the end all that was told to be there is there, can be had by its uuid, and goes; and nothing is left.
pub(crate) async fn clear(world: &Arc<World>, somebody: Actor) {
    // Until what killed commands left counts as that.
    sleep(STALE + Duration::from_secs(1)).await;
    world.judge(|referee, world| referee.look_at_images(world));
    clear_once(world, somebody).await;
    if !world.store.content(&world.keys.images()).pairs.is_empty() {
        // Bytes of what was on its way may come late.
        sleep(STALE + Duration::from_secs(1)).await;
        clear_once(world, somebody).await;
    }
    world.judge(|referee, world| referee.look_at_empty_catalog(world));
}

async fn clear_once(world: &Arc<World>, somebody: Actor) {
    for project in PROJECTS {
        let Ok(mut cloud) = cloud(world, somebody, &Life::new()) else { return };
        project.clone_into(&mut cloud.project);
        let remove = async |image: &Image| remove(world, &cloud, image.id).await;
        let is_whole = async |image: &Image| Ok(world.objects().contains(&image.id));
        world.judge(|referee, _| referee.changes_images(somebody, None));
        if let Err(error) = tend_images(&cloud, async || None, is_whole, remove).await {
            world.judge(|referee, _| referee.found(format!("what is left of images stays: {error}")));
        }
        let records = world.store.content(&world.keys.images()).pairs;
        for record in records.iter().filter_map(|pair| decode::<Image>(&pair.value).ok()) {
            if record.project != project {
                continue;
            }
            let text = record.id.to_string();
            let free = ImageChange { protected: Some(false), ..ImageChange::default() };
            world.judge(|referee, _| referee.changes_images(somebody, Some(free.clone())));
            let gone = async {
                image(&cloud, &text).await?;
                change_image(&cloud, &text, &free).await?;
                delete_image(&cloud, &text, remove).await
            };
            if let Err(error) = gone.await {
                world.judge(|referee, _| {
                    referee.found(format!("the image {text} cannot be deleted: {error}"))
                });
            }
        }
    }
}

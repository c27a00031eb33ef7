//! What a stack's file says of each instance, checked, with what its words stand for.

use std::collections::BTreeMap;

use ec_cloud::{Ask, Begun, CloudError, Difference, Guest, STACK, Wished};
use ec_model::{ImageRef, Instance, OF_INSTANCE, OF_VOLUME, ResourceQuery, Resources};
use ec_runtime::exit::{FAILED, Failure, USAGE};

use super::making::DISK;
use crate::{
    cli::{Given, Traits},
    config::Session,
    image::known,
    run,
    spec::{self, Mistake, Part},
    stack::{InstanceEntry, Place, Source, Stack},
};

/// One instance of the file, checked.
pub(super) struct Entry {
    pub(super) query: ResourceQuery,
    pub(super) guest: Guest,
    pub(super) place: run::Place,
    /// The key that says what room it takes.
    pub(super) says_room: &'static str,
    /// What it keeps, since the file's words for that stand for nothing that it could have.
    pub(super) kept: Vec<Difference>,
}

/// What the file says of an instance, with what its names stand for. Of one that is there they may stand for nothing any more, or for
/// what it could not be made of: a flavor or a keypair that was deleted, a disk that it is a copy of and that is gone, an image whose
/// bytes are on their way. It is what it was made of then.
pub(super) async fn entry(
    session: &Session,
    stack: &Stack,
    source: &Source,
    place: &Place<'_>,
    (name, has): (&str, Option<&Instance>),
    says: &InstanceEntry,
    queries: &mut BTreeMap<String, String>,
) -> Result<Entry, Failure> {
    let says_room = if says.flavor.is_some() { "flavor" } else { "query" };
    let room = place.clone().key(says_room);
    let query = room_of(session, says, has, queries).await.map_err(|failure| source.wrong(&room, failure))?;
    if says.boot.is_some() && query.total().contains_key(DISK) {
        let why = "an instance that boots from a volume has no disk of its own: leave DISK_GB out";
        return Err(source.wrong(&room, Failure::usage(why)));
    }
    let mut labels: Vec<(String, String)> =
        says.labels.iter().map(|(key, value)| (key.0.clone(), value.0.clone())).collect();
    labels.push((STACK.to_owned(), stack.stack.0.clone()));
    let given = Given {
        user_data: says.user_data.clone(),
        key: says.keys.clone(),
        sha256: says.sha256.as_ref().map(|digest| digest.0.clone()),
        boot_volume: None,
        beside: Some(source.directory()),
        boots: says.boot.is_some(),
        keeps_keys: None,
        require_token: says.require_token,
        traits: Traits {
            label: labels,
            meta: says.metadata.iter().map(|(key, value)| (key.0.clone(), value.0.clone())).collect(),
            restart: says.restart,
        },
    };
    let read = guest_of(session, (name, has), says, given, &query.total()).await;
    let (guest, kept) =
        read.map_err(|Mistake { part, failure }| source.wrong(&part_at(place, part), failure))?;
    let place = run::Place::within(says.group.as_ref().map(|group| group.0.clone()));
    Ok(Entry { query, guest, place, says_room, kept })
}

/// The guest that the file says; what one that is there keeps in the place of that, each once.
async fn guest_of(
    session: &Session,
    (name, has): (&str, Option<&Instance>),
    says: &InstanceEntry,
    mut given: Given,
    size: &Resources,
) -> Result<(Guest, Vec<Difference>), Mistake> {
    let (mut said, mut was, mut kept) = (says.image.as_deref(), None, Vec::new());
    loop {
        let read = spec::read(session, Some(name), &spec::IN_FILE, &given, said, size).await;
        let (Mistake { part, failure }, has) = match (read, has) {
            (Ok(guest), _) => return Ok((Guest { image: was.unwrap_or(guest.image), ..guest }, kept)),
            (Err(mistake), Some(has))
                if matches!(mistake.failure.code, FAILED | USAGE) || mistake.part == Part::Published =>
            {
                (mistake, has)
            }
            (Err(mistake), _) => return Err(mistake),
        };
        let stays = match (part, made_of(has, says)) {
            (Part::Key(_), _) => {
                given.keeps_keys = Some(has.spec.keys.clone());
                "it keeps the keys that it was made with"
            }
            (Part::Image | Part::Published, Some(image)) => {
                (given.boots, said, was) = (true, None, Some(image.clone()));
                "it stays what it was made of"
            }
            _ => return Err(Mistake { part, failure }),
        };
        let why = format!("{}: {stays}", failure.message);
        kept.push(Difference::Keep(has.instance, name.to_owned(), why));
    }
}

/// What an instance was made of, where that is what the file says by its words.
fn made_of<'a>(has: &'a Instance, says: &InstanceEntry) -> Option<&'a ImageRef> {
    let (image, said) = (&has.spec.image, says.image.as_deref()?);
    let is_copy = [OF_INSTANCE, OF_VOLUME].iter().any(|of| said.starts_with(of));
    let whole = known(said).map(|known| known.name);
    let is_it = |name: &String| name.eq_ignore_ascii_case(said) || whole == Some(name.as_str());
    let is_called = || image.name.as_ref().is_some_and(is_it);
    (if is_copy { image.copied().is_some() } else { is_called() }).then_some(image)
}

/// What room the file says that each takes.
async fn room_of(
    session: &Session,
    says: &InstanceEntry,
    has: Option<&Instance>,
    queries: &mut BTreeMap<String, String>,
) -> Result<ResourceQuery, Failure> {
    let text = match (&says.flavor, &says.query) {
        (Some(flavor), _) => {
            if !queries.contains_key(&flavor.0) {
                match (ec_cloud::flavor(&session.cloud, &flavor.0).await, has) {
                    (Ok(flavor_is), _) => _ = queries.insert(flavor.0.clone(), flavor_is.query),
                    (Err(CloudError::NotFound(_)), Some(has)) => {
                        return ResourceQuery::parse(&has.spec.query)
                            .map_err(|error| Failure::usage(error.to_string()));
                    }
                    (Err(error), _) => return Err(error.into()),
                }
            }
            queries[&flavor.0].clone()
        }
        (None, query) => query.as_ref().map(|query| query.0.clone()).unwrap_or_default(),
    };
    let query = ResourceQuery::parse(&text).map_err(|error| Failure::usage(error.to_string()))?;
    Ask::new(&query)?;
    match says.boot.is_some() && says.flavor.is_some() {
        true => query.without(DISK).map_err(|error| Failure::usage(error.to_string())),
        false => Ok(query),
    }
}

/// Where in an entry that stands.
fn part_at<'a>(entry: &Place<'a>, part: Part) -> Place<'a> {
    let entry = entry.clone();
    match part {
        Part::Key(number) => entry.key("keys").item(number),
        Part::Keys => entry.key("keys"),
        Part::UserData => entry.key("user_data"),
        Part::Image | Part::Published => entry.key("image"),
        Part::Boot => entry.key("boot"),
        Part::Sha256 => entry.key("sha256"),
        Part::Whole => entry,
    }
}

/// The same as what is compared with what there is.
pub(super) fn wish(
    session: &Session,
    name: &str,
    says: &InstanceEntry,
    Entry { query, guest, .. }: &Entry,
) -> Wished {
    let usual = &session.settings.defaults;
    Wished {
        name: name.to_owned(),
        query: query.text().to_owned(),
        image: guest.image.clone(),
        said: says.image.clone(),
        boots: says.boot.is_some(),
        group: says.group.as_ref().map(|group| group.0.clone()),
        labels: guest.labels.clone(),
        metadata: guest.metadata.clone(),
        restart: guest.restart,
        // Where there are no defaults, nothing is what the file says.
        keys: Begun { with: guest.keys.clone(), said: !says.keys.is_empty() || usual.keys.is_empty() },
        user_data: Begun {
            with: guest.user_data.clone(),
            said: says.user_data.is_some() || usual.user_data.is_none(),
        },
        require_token: says.require_token,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ec_cloud::{Bytes, NewImage, add_image};
    use ec_model::Image;

    use super::*;

    const FILE: &str = "\
stack: shop
instances:
  web: {query: 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1', image: debian, keys: [me]}
";

    fn web() -> Instance {
        let uuid = uuid::Uuid::from_u128(7);
        let text = format!(
            r#"{{"version":1,"instance":"{uuid}","name":"web","generation":1,"spec":{{"query":"resources=VCPU:1",
            "image":{{"url":"http://x/y","name":"Debian"}},"keys":["ssh-ed25519 AAAA me"]}},
            "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        ec_model::decode(text.as_bytes()).unwrap()
    }

    #[tokio::test]
    async fn one_that_is_there_needs_neither_its_image_nor_its_keypair_any_more() {
        let (session, directory, has) = (Session::in_memory().await, tempfile::tempdir().unwrap(), web());
        let file = directory.path().join("shop.yaml");
        fs::write(&file, FILE).unwrap();
        let (stack, source) = Stack::read(&file).unwrap();
        // Its bytes are on their way.
        let new = NewImage { name: "debian".to_owned(), ..NewImage::default() };
        let sent = Bytes::Sent { store: "file:///x".to_owned() };
        let added = add_image(
            &session.cloud,
            &new,
            sent,
            async || None,
            async |_: &Image| Ok(true),
            async |_: &Image| Ok(()),
        );
        added.await.map(drop).unwrap();
        let (name, of, says) = stack.named().next().unwrap();
        let place = Place::of(&["instances", of]);
        let mut queries = BTreeMap::new();
        let read = entry(&session, &stack, &source, &place, (&name, Some(&has)), says, &mut queries).await;
        let read = read.unwrap();
        assert_eq!((&read.guest.image, &read.guest.keys), (&has.spec.image, &has.spec.keys));
        let whys: Vec<&str> = (read.kept.iter())
            .map(|kept| match kept {
                Difference::Keep(instance, name, why) if (*instance, &**name) == (has.instance, "web") => why,
                kept => panic!("{kept:?}"),
            })
            .map(String::as_str)
            .collect();
        assert!(
            whys[0].ends_with("has no keypair of that name: it keeps the keys that it was made with"),
            "{whys:?}"
        );
        assert!(whys[1].ends_with("still on their way: it stays what it was made of"), "{whys:?}");
        assert_eq!(whys.len(), 2);
        let refused = entry(&session, &stack, &source, &place, (&name, None), says, &mut queries).await;
        let refused = refused.map(drop).unwrap_err();
        assert!(refused.code == USAGE && refused.message.contains("instances.web.keys[0]"), "{refused:?}");
    }
}

//! Rules for the catalogue: a name means one image, whose bytes are there while it can be used; who changes one thing of it
//! changes nothing else; and nothing is left.

use std::collections::BTreeSet;

use ec_cloud::ImageChange;
use ec_model::{Image, ImageId, ImageStatus, decode};
use ec_store::{Compare, KeyValue, Op, Txn};
use jiff::Timestamp;

use super::Referee;
use crate::{
    door::content,
    world::{Actor, World},
};

/// All that lay under a key, and how often it was deleted.
#[derive(Debug, Default)]
pub(super) struct Lives {
    values: BTreeSet<Vec<u8>>,
    ends: u64,
}

impl Referee {
    /// How often what lay under this key was deleted by now.
    pub(crate) fn ends_of(&self, key: &str) -> u64 {
        self.lives.get(key).map_or(0, |lives| lives.ends)
    }

    /// A user was told that this was made.
    pub(crate) fn told_made(&mut self, key: &str, value: &[u8]) {
        if !self.lives.get(key).is_some_and(|lives| lives.values.contains(value)) {
            self.found(format!("{key} was told to be made, and never was"));
        }
    }

    /// A user was told that it is gone, who asked for that when so often it had been deleted.
    pub(crate) fn told_gone(&mut self, key: &str, ends: u64) {
        if self.ends_of(key) == ends {
            self.found(format!("{key} was told to be gone, and nobody deleted it"));
        }
    }

    pub(super) fn look_at_life(&mut self, world: &World, key: &str, new: Option<&[u8]>) {
        let keys = &world.keys;
        if ![keys.flavors(), keys.all_keypairs(), keys.all_groups()]
            .iter()
            .any(|under| key.starts_with(under))
        {
            return;
        }
        let lives = self.lives.entry(key.to_owned()).or_default();
        match new {
            Some(value) => _ = lives.values.insert(value.to_owned()),
            None => lives.ends += 1,
        }
    }

    /// What somebody is about to change of images from now on; with nothing, none of what users say of them.
    pub(crate) fn changes_images(&mut self, actor: Actor, change: Option<ImageChange>) {
        self.image_changes.entry(actor).or_default().push(change.unwrap_or_default());
    }

    /// A user was told that it can be used.
    pub(crate) fn image_acknowledged(&mut self, world: &World, image: ImageId) {
        self.images.insert(image);
        self.look_at_known(world, image);
    }

    /// Somebody takes its record away by hand.
    pub(crate) fn image_lost(&mut self, image: ImageId) {
        self.images_lost.insert(image);
    }

    /// A user was told that it is gone.
    pub(crate) fn image_deleted(&mut self, world: &World, image: ImageId) {
        self.images.remove(&image);
        let record = content(world, &world.keys.image(image));
        let record = record.and_then(|pair| decode::<Image>(&pair.value).ok());
        // The record of one whose bytes were on their way waits for those that come late.
        let is_there = |image: &Image| {
            image.status != ImageStatus::PendingDelete || !image.stored || image.size.is_some()
        };
        if record.is_some_and(|image| is_there(&image)) && !self.restored {
            self.found(format!("the image {image} was told to be gone, and is there"));
        }
    }

    /// Somebody took its bytes away.
    pub(crate) fn look_at_removed(&mut self, world: &World, image: ImageId) {
        let record = record(world, image);
        if !self.restored && record.is_some_and(|image| image.status == ImageStatus::Active) {
            self.found(format!("the bytes of the image {image} were taken away, which can be used"));
        }
    }

    /// What was told to be there is there.
    pub(crate) fn look_at_images(&mut self, world: &World) {
        for image in self.images.clone() {
            self.look_at_known(world, image);
        }
    }

    fn look_at_known(&mut self, world: &World, image: ImageId) {
        let usable = record(world, image).is_some_and(|image| image.status == ImageStatus::Active);
        // Another may have deleted it, whose word is not here yet, or was killed.
        let is_asked_away = self.images_asked_away.contains(&image) || self.images_lost.contains(&image);
        if !usable && !self.restored && !is_asked_away {
            self.found(format!("the image {image} was told to be there, and is not"));
        }
    }

    /// Nothing of images is left: neither records nor names, nor bytes but those of which an older etcd knows nothing.
    pub(crate) fn look_at_empty_catalog(&mut self, world: &World) {
        let keys = &world.keys;
        let left = [keys.images(), keys.all_image_names(), keys.all_public_images()];
        let left = left.iter().flat_map(|under| world.store.content(under).pairs).map(|pair| pair.key);
        let mut left: Vec<String> = left.collect();
        if !self.restored {
            let known = world.objects().into_iter().filter(|image| !self.images_lost.contains(image));
            left.extend(known.map(|image| format!("the bytes of {image}")));
        }
        if !left.is_empty() {
            self.found(format!("of images there are left: {}", left.join(", ")));
        }
    }

    pub(super) fn look_at_image(
        &mut self,
        world: &World,
        (actor, late): (Actor, bool),
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        if !key.starts_with(&world.keys.images()) {
            return;
        }
        let Ok(id) = world.keys.parse_image(key) else { return };
        let before = old.and_then(|old| decode::<Image>(&old.value).ok());
        let after = new.and_then(|new| decode::<Image>(new).ok());
        self.look_at_names(world, id, after.as_ref());
        let is_there = world.objects().contains(&id);
        let wrong = match (&before, &after) {
            (Some(before), None) if before.status != ImageStatus::PendingDelete => {
                Some("it was not said before that it goes")
            }
            (Some(before), None) if before.stored && is_there && !self.restored => {
                Some("and its bytes are there still")
            }
            (_, Some(after))
                if after.status == ImageStatus::Active && after.stored && !is_there && !self.restored =>
            {
                Some("and its bytes are not there")
            }
            (Some(before), Some(after)) => self.changed((actor, late), before, after),
            _ => None,
        };
        if let Some(image) = after.filter(|image| image.status == ImageStatus::PendingDelete) {
            self.images_asked_away.insert(image.id);
        }
        if let Some(why) = wrong {
            self.found(format!("{actor} wrote {key}, {why}"));
        }
    }

    /// What is wrong with a change of a record, by what its writer is about to do.
    fn changed(&self, (actor, late): (Actor, bool), before: &Image, after: &Image) -> Option<&'static str> {
        if before.status == ImageStatus::PendingDelete {
            return Some("which is about to go");
        }
        let going = after.status == ImageStatus::PendingDelete;
        if going && before.protected && before.status == ImageStatus::Active {
            return Some("which is protected");
        }
        // What its bytes are is said by who sends them, and what users say of it by whoever is about to.
        let said = |image: &Image| Image {
            status: ImageStatus::Active,
            upload: None,
            sha256: None,
            sha512: None,
            size: None,
            compression: None,
            disk_format: None,
            virtual_size: None,
            updated_at: Timestamp::default(),
            ..image.clone()
        };
        let is_about = |change: &ImageChange| {
            let ImageChange { name, visibility, protected, min_disk, min_ram, .. } = change.clone();
            let expected = Image {
                name: name.unwrap_or(before.name.clone()),
                visibility: visibility.unwrap_or(before.visibility),
                protected: protected.unwrap_or(before.protected),
                min_disk: min_disk.unwrap_or(before.min_disk),
                min_ram: min_ram.unwrap_or(before.min_ram),
                ..before.clone()
            };
            said(&expected) == said(after)
        };
        // What comes late is of one of the commands before.
        let changes = self.image_changes.get(&actor).map(Vec::as_slice).unwrap_or_default();
        let changes = &changes[if late { 0 } else { changes.len().saturating_sub(1) }..];
        if said(after) != said(before) && !changes.iter().any(is_about) {
            return Some("and changed of it what it was not about to");
        }
        let is_sent = |image: &Image| (image.sha256.clone(), image.size, image.upload.clone());
        if before.status == ImageStatus::Active && (going || is_sent(before) != is_sent(after)) {
            let is_changed = is_sent(before) != is_sent(after);
            return is_changed.then_some("and its bytes are another's, though it could be used");
        }
        None
    }

    /// An image is found by its own names and by no others, and a project has one of a name at most.
    fn look_at_names(&mut self, world: &World, image: ImageId, record: Option<&Image>) {
        let keys = &world.keys;
        let wanted = record.map(|record| keys.names_of_image(record)).unwrap_or_default();
        let all = [keys.all_image_names(), keys.all_public_images()];
        let all = all.iter().flat_map(|under| world.store.content(under).pairs);
        let bears: Vec<String> = all
            .map(|pair| pair.key)
            .filter(|key| keys.parse_image(key).is_ok_and(|bearer| bearer == image))
            .collect();
        let mut sorted = wanted.clone();
        sorted.sort();
        if bears != sorted {
            self.found(format!("the image {image} bears {bears:?}, and should bear {sorted:?}"));
        }
        if let Some(record) = record.filter(|record| record.status.has_name()) {
            let bearers = world.store.content(&keys.image_names(&record.project, &record.name)).pairs.len();
            if bearers != 1 {
                self.found(format!("{bearers} images of {} are called {}", record.project, record.name));
            }
        }
    }
}

fn record(world: &World, image: ImageId) -> Option<Image> {
    decode(&content(world, &world.keys.image(image))?.value).ok()
}

/// What a write of the catalogue stands on: a record as it was read, a name that nobody of the project bears; and what is to go
/// is there.
pub(super) fn of_catalog(world: &World, txn: &Txn, op: &Op) -> Vec<String> {
    let (keys, key) = (&world.keys, op.key());
    let is_any = |under: &[String]| under.iter().any(|under| key.starts_with(under));
    let is_record = is_any(&[keys.images(), keys.flavors(), keys.all_keypairs()]);
    match op {
        Op::Put { .. } if is_record => vec![key.to_owned()],
        Op::Put { .. } if is_any(&[keys.all_image_names()]) => {
            let name = key.rsplit_once('/').map_or(key, |(name, _)| name);
            let is_free = |compare: &Compare| matches!(compare, Compare::NoneUnder(under) if *under == format!("{name}/"));
            if txn.when.iter().any(is_free) { Vec::new() } else { vec![format!("{name}/")] }
        }
        // Of a name alone its image is not there.
        Op::Delete(_) if is_any(&[keys.all_image_names(), keys.all_public_images()]) => {
            let record = keys.parse_image(key).map(|image| keys.image(image)).ok();
            record.filter(|record| !txn.then.iter().any(|op| op.key() == record)).into_iter().collect()
        }
        Op::Delete(_) if is_record => {
            let is_there = |compare: &Compare| matches!(compare, Compare::Present(own) if own == key);
            if txn.when.iter().any(is_there) { Vec::new() } else { vec![key.to_owned()] }
        }
        _ => Vec::new(),
    }
}

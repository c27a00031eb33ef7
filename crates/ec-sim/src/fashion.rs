//! What people are about. Each has something that they do most, so that in some histories it is done again and again, to the
//! same instance, before what was done before has come to its end; and some are in a hurry.

use std::{collections::BTreeMap, time::Duration};

use ec_cloud::{Change, Verb};
use ec_model::{CopyOf, Extent, ImageRef, Workload};

use crate::{
    user::{a_name, image},
    volumes::some_volume,
    world::World,
};

/// What somebody does most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Theme {
    All,
    Power,
    Disks,
    Sizes,
}

/// How somebody uses the cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fashion {
    theme: Theme,
    hurries: bool,
}

impl Fashion {
    pub(crate) fn any(world: &World) -> Self {
        let theme = match world.pick(0..10) {
            0..4 => Theme::All,
            4 | 5 => Theme::Power,
            6 | 7 => Theme::Disks,
            _ => Theme::Sizes,
        };
        Self { theme, hurries: world.chance(20) }
    }

    /// Between what is done and what is done next.
    pub(crate) fn pause(self, world: &World) -> Duration {
        if self.hurries { world.millis(20..3000) } else { world.millis(200..8000) }
    }

    /// Whether something is asked of an instance that is there, whatever else could be done.
    pub(crate) fn acts(self, world: &World) -> bool {
        world.chance(match self.theme {
            Theme::All => 0,
            _ if self.hurries => 50,
            _ => 30,
        })
    }

    /// Some wish for its power, its disks, its size or what is told of it.
    pub(crate) fn verb(self, world: &World) -> Verb {
        match (self.theme, world.pick(0..10)) {
            (Theme::Power, 0..8) => of_power(world),
            (Theme::Disks, 0..7) => of_disks(world),
            (Theme::Sizes, 0..7) => of_size(world),
            _ => match world.pick(0..19) {
                0..8 => of_power(world),
                8..11 => of_disks(world),
                11..16 => of_size(world),
                16 => Verb::Rename(a_name(world).to_owned()),
                17 => {
                    let metadata = [("seen".to_owned(), Some(world.pick(0..9).to_string()))].into();
                    Verb::Set(Change { metadata, labels: BTreeMap::new(), restart: None })
                }
                // What is locked is in everybody's way till somebody unlocks it.
                _ if world.chance(30) => Verb::Lock(String::new()),
                _ => Verb::Unlock,
            },
        }
    }
}

fn of_power(world: &World) -> Verb {
    let grace = if world.chance(50) { 0 } else { 20 };
    match world.pick(0..8) {
        0..2 => Verb::Start,
        2..4 => Verb::Stop(grace),
        4 => Verb::Reboot(grace),
        5 => Verb::Pause,
        6 => Verb::Unpause,
        _ if world.chance(50) => Verb::Suspend,
        _ => Verb::Resume,
    }
}

fn of_disks(world: &World) -> Verb {
    match world.pick(0..6) {
        0..2 => Verb::Rebuild(some_image(world)),
        2..4 => Verb::Rescue(world.chance(10).then(|| an_image(world))),
        _ => Verb::Unrescue,
    }
}

fn of_size(world: &World) -> Verb {
    match world.pick(0..8) {
        // What boots from a volume has no disk of its own.
        0..5 => resize(world.pick(1..4), if world.chance(20) { 0 } else { world.pick(1..3) }),
        5 | 6 => Verb::Confirm,
        _ => Verb::Revert,
    }
}

pub(crate) fn an_image(world: &World) -> ImageRef {
    ImageRef::at(format!("file://{}", image(world).display()))
}

/// Most often the one that it has; or another disk.
fn some_image(world: &World) -> Option<ImageRef> {
    match world.pick(0..10) {
        0 => Some(an_image(world)),
        1 => Some(ImageRef::copy_of(&CopyOf::disk(Workload::Volume, some_volume(world)?))),
        _ => None,
    }
}

/// A wish for so many processors, and a disk of so many GB, or none.
pub(crate) fn resize(vcpus: u64, disk_gb: u64) -> Verb {
    let mut resources = vec![("VCPU", vcpus), ("MEMORY_MB", 128), ("DISK_GB", disk_gb)];
    resources.retain(|(_, amount)| *amount > 0);
    let query: Vec<String> = resources.iter().map(|(class, amount)| format!("{class}:{amount}")).collect();
    Verb::Resize(Extent {
        query: format!("resources={}", query.join(",")),
        resources: resources.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect(),
    })
}

//! What people do in the end, when nothing goes wrong any more: they bring what was begun to its end.

use std::{sync::Arc, time::Duration};

use ec_cloud::{Cloud, Verb};
use ec_model::{Desired, Instance, InstanceId, Request, State, Status, Workload, decode};

use crate::{
    door::content,
    life::Life,
    user::{cloud, mend, wish},
    world::{Actor, World},
};

const SOMEBODY: Actor = Actor::User(0);

/// One wish takes the time that a guest takes to end and to start.
const PATIENCE: Duration = Duration::from_secs(300);

/// What is locked is unlocked, what is rescued boots from its own disk, a size is confirmed or reverted, and then all is
/// started that does not run.
pub(crate) async fn bring_to_an_end(world: &Arc<World>) {
    let Ok(cloud) = cloud(world, SOMEBODY, &Life::new()) else { return };
    world.log(Actor::Nemesis, "what was begun comes to its end");
    let pairs = world.store.content(&world.keys.instances()).pairs;
    let placed = pairs.iter().filter_map(|pair| decode::<Instance>(&pair.value).ok());
    for instance in placed.map(|record| record.instance) {
        end_one(world, &cloud, instance).await;
        if world.failed.is_cancelled() {
            return;
        }
    }
}

/// Brings back what etcd lacks; and a volume to where it is asked for that an older etcd has elsewhere, on storage that nodes share.
pub(crate) async fn bring_home(world: &Arc<World>) {
    let Ok(cloud) = cloud(world, SOMEBODY, &Life::new()) else { return };
    mend(world, SOMEBODY, &cloud).await.ok();
}

/// One thing after the other, each waited for.
async fn end_one(world: &Arc<World>, cloud: &Cloud, instance: InstanceId) {
    let reverts = world.chance(60);
    let mut before: Option<Verb> = None;
    while let Some(verb) = left_to_do(world, instance, reverts) {
        // It cannot be, say for want of its disk.
        if before.as_ref() == Some(&verb)
            || wish(world, SOMEBODY, cloud, instance, &verb, Some(PATIENCE)).await.is_err()
        {
            return;
        }
        before = Some(verb);
    }
}

fn left_to_do(world: &World, instance: InstanceId, reverts: bool) -> Option<Verb> {
    let keys = &world.keys;
    let record: Instance = decode(&content(world, &keys.instance(instance))?.value).ok()?;
    let node = record.node()?;
    let request: Request = decode(&content(world, &keys.request(node, instance))?.value).ok()?;
    let status: Status = decode(&content(world, &keys.status(node, instance))?.value).ok()?;
    if record.locked.is_some() {
        return Some(Verb::Unlock);
    }
    if request.desired != Desired::Active || record.kind == Workload::Volume {
        return None;
    }
    match status.state {
        State::Suspended => Some(Verb::Resume),
        State::Paused => Some(Verb::Unpause),
        _ if request.rescue.is_some() => Some(Verb::Unrescue),
        _ if record.before.is_some() => Some(if reverts { Verb::Revert } else { Verb::Confirm }),
        State::Stopped => Some(Verb::Start),
        _ => None,
    }
}

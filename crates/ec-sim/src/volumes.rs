//! What people do with volumes: each way is a use-case of control, told in the log, and noted by the referee before it may
//! arrive.

use std::{cell::Cell, sync::Arc, time::Duration};

use ec_cloud::{
    Attached, Awaited, Cloud, CloudError, NewVolume, NoRoom, Restoring, Scheduled, attach, copy_for_image,
    create_volume, delete_volume, detach, extend_volume, find_placed, let_go, move_volume, node_to_come_to,
    restore_snapshot, restore_volume, snapshot_of, until_active, until_done, volumes,
};
use ec_model::{CopyOf, ImageId, ImageRef, InstanceId, NodeId, ResourceQuery, Status, decode};
use ec_plan::verbs::Verb;
use tokio_util::sync::CancellationToken;

use crate::{
    door::content,
    referee::{
        denied::Rooms,
        restored_of,
        said::{Asking, answered_of},
    },
    user::{acknowledged, await_active, image, someone, told},
    world::{Actor, World},
};

/// Names that users of one project quarrel about.
const NAMES: [&str; 3] = ["data", "logs", "home"];

/// So long somebody waits for what was asked for.
const PATIENCE: Duration = Duration::from_secs(120);

/// What somebody does next.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Deed {
    Create(Order),
    Attach {
        volume: InstanceId,
        instance: InstanceId,
        wait: bool,
    },
    Detach {
        volume: InstanceId,
        wait: bool,
    },
    /// To another node, which can have it where it has the same storage.
    Move {
        volume: InstanceId,
        node: NodeId,
        wait: bool,
    },
    Extend {
        volume: InstanceId,
        size_gb: u64,
    },
    Delete(InstanceId),
    /// All disks of an instance, at one moment; and then the instance is made as it was.
    Snapshot {
        instance: InstanceId,
        restore: bool,
    },
    /// Made anew as a copy of another, or of the copy of it that the other has.
    Restore {
        volume: InstanceId,
        of: InstanceId,
        held: bool,
    },
    List,
}

/// A volume that somebody asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) name: Option<&'static str>,
    pub(crate) size_gb: u64,
    pub(crate) of_image: bool,
    pub(crate) copy_of: Option<InstanceId>,
    /// On the node of this instance.
    pub(crate) near: Option<InstanceId>,
    /// And given to it, once it is there.
    pub(crate) attach: bool,
}

impl Order {
    /// An empty one of 1 GiB.
    pub(crate) const SMALL: Self =
        Self { name: None, size_gb: 1, of_image: false, copy_of: None, near: None, attach: false };
}

/// Something that somebody may do with volumes as they are.
pub(crate) fn any(world: &World) -> Option<Deed> {
    let wait = world.chance(40);
    if world.shares_storage() && world.chance(25) {
        let node = world.one_of(&world.computers)?.node;
        return Some(Deed::Move { volume: some_volume(world)?, node, wait });
    }
    Some(match world.pick(0..20) {
        0..4 => {
            let copy_of = if world.chance(20) { some_volume(world) } else { None };
            // A copy is made where the other lies, whatever its user says.
            let near =
                world.chance(if copy_of.is_none() { 70 } else { 15 }).then(|| someone(world)).flatten();
            let name = world.among(&NAMES);
            Deed::Create(Order {
                name: world.chance(60).then_some(name),
                size_gb: world.pick(1..3),
                of_image: copy_of.is_none() && world.chance(30),
                copy_of,
                near,
                attach: world.chance(60),
            })
        }
        4..9 => Deed::Attach { volume: some_volume(world)?, instance: someone(world)?, wait },
        9..12 => Deed::Detach { volume: some_volume(world)?, wait },
        12 => Deed::Extend { volume: some_volume(world)?, size_gb: world.pick(1..5) },
        13 | 14 => Deed::Delete(some_volume(world)?),
        15 | 16 => Deed::Snapshot { instance: someone(world)?, restore: world.chance(40) },
        17 | 18 => {
            Deed::Restore { volume: some_volume(world)?, of: some_volume(world)?, held: world.chance(50) }
        }
        _ => Deed::List,
    })
}

/// One of the volumes that were acknowledged and that nobody has wished away; or now and then one that somebody has.
pub(crate) fn some_volume(world: &World) -> Option<InstanceId> {
    let again = world.chance(10);
    let all: Vec<InstanceId> = world.judge(|referee, _| {
        let known = referee.instances().filter(|(_, known)| known.is_volume && known.acknowledged.is_some());
        known.filter(|(_, known)| known.wished_away == again).map(|(volume, _)| volume).collect()
    });
    world.one_of(&all).copied()
}

pub(crate) async fn perform(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    deed: Deed,
    stop: &CancellationToken,
) {
    match deed {
        Deed::Create(order) => {
            let Ok(made) = make(world, actor, cloud, order, stop).await else { return };
            if let Some(instance) = order.near.filter(|_| order.attach)
                && await_active(world, actor, cloud, made, PATIENCE).await
            {
                _ = give(world, actor, cloud, made.instance, instance, true).await;
            }
        }
        Deed::Attach { volume, instance, wait } => {
            _ = give(world, actor, cloud, volume, instance, wait).await;
        }
        Deed::Detach { volume, wait } => _ = take(world, actor, cloud, volume, None, wait).await,
        Deed::Move { volume, node, wait } => _ = go(world, actor, cloud, volume, node, wait).await,
        Deed::Extend { volume, size_gb } => _ = extend(world, actor, cloud, volume, size_gb).await,
        Deed::Delete(volume) => _ = delete(world, actor, cloud, volume).await,
        Deed::Snapshot { instance, restore } => {
            let Ok(made) = snapshot(world, actor, cloud, instance, stop).await else { return };
            if restore && await_active(world, actor, cloud, made, PATIENCE).await {
                _ = restore_all(world, actor, cloud, made.instance, stop).await;
            }
        }
        Deed::Restore { volume, of, held } => {
            let of = CopyOf { held: held.then_some(volume), ..CopyOf::disk(ec_model::Workload::Volume, of) };
            _ = restore(world, actor, cloud, volume, &ImageRef::copy_of(&of)).await;
        }
        Deed::List => match volumes(cloud).await {
            Ok(all) => world.log(actor, format!("lists {} volumes", all.len())),
            Err(error) => world.log(actor, format!("lists volumes, and is told: {error}")),
        },
    }
}

/// Asks for a volume; where it is.
pub(crate) async fn make(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    order: Order,
    stop: &CancellationToken,
) -> Result<Scheduled, String> {
    let of = order.copy_of.map(|of| format!(", a copy of {of}")).unwrap_or_default();
    world.log(actor, format!("create volume {}{of}", order.name.unwrap_or("without a name")));
    let stood = Rooms::of(world);
    let made = async {
        let node = match order.near {
            Some(instance) => Some(find_placed(cloud, instance).await?.node),
            None => None,
        };
        let of_image = || order.of_image.then(|| ImageRef::at(format!("file://{}", image(world).display())));
        let image = order
            .copy_of
            .map(|of| ImageRef::copy_of(&CopyOf::disk(ec_model::Workload::Volume, of)))
            .or_else(of_image);
        let new = NewVolume {
            name: order.name.map(str::to_owned),
            size_gb: order.copy_of.is_none().then_some(order.size_gb),
            image,
            node,
            ..NewVolume::default()
        };
        create_volume(cloud, &new, stop).await
    };
    let made = made.await;
    if matches!(made, Ok(Err(_)))
        && order.near.is_none()
        && order.copy_of.is_none()
        && let Ok(query) = ResourceQuery::parse(&format!("resources=DISK_GB:{}", order.size_gb))
    {
        world.judge(|referee, world| referee.denied(world, actor, &stood, &query, None));
    }
    answered(world, actor, made)
}

/// Asks for a snapshot of an instance; where it is.
pub(crate) async fn snapshot(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    instance: InstanceId,
    stop: &CancellationToken,
) -> Result<Scheduled, String> {
    world.log(actor, format!("snapshot {instance}"));
    let tells = || {
        let node = world.judge(|referee, _| referee.known(instance).acknowledged)?;
        let pair = content(world, &world.keys.status(node, instance))?;
        Some((pair.mod_revision, decode::<Status>(&pair.value).ok()?))
    };
    let made = async {
        let before = tells();
        let image = snapshot_of(cloud, instance).await?;
        if let (Some((_, status)), Some(of)) =
            (before.filter(|before| Some(before) == tells().as_ref()), image.copied())
        {
            world.judge(|referee, _| referee.snapshot_asked(&status, &of));
        }
        let new = NewVolume { image: Some(image), snapshot: true, ..NewVolume::default() };
        create_volume(cloud, &new, stop).await
    };
    answered(world, actor, made.await)
}

/// Asks for a copy from which an image is to be made; where it is.
pub(crate) async fn copy_for(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    image: ImageId,
    of: &ImageRef,
    stop: &CancellationToken,
) -> Result<Scheduled, String> {
    world.log(actor, format!("copy for the image {image}"));
    answered(world, actor, copy_for_image(cloud, image, of, None, stop).await)
}

/// Asks that a volume be made anew.
pub(crate) async fn restore(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    volume: InstanceId,
    image: &ImageRef,
) -> Result<(), String> {
    world.log(actor, format!("restore {volume} as a copy of {}", image.url));
    let verb = Verb::Rebuild(Some(image.clone()));
    world.judge(|referee, _| referee.wished(volume, &verb));
    let asking = Asking::by(world, actor);
    let acted = restore_volume(cloud, volume, image).await;
    if image.copied().is_none_or(|of| content(world, &world.keys.instance(of.disk)).is_some()) {
        answered_of(world, actor, volume, &acted);
    }
    asking.answered(world, "restore", acted.as_ref().map(|acted| acted.already.is_none()));
    let acted = told(world, actor, acted)?;
    if let Some(Awaited::Rebuild(wished_at)) = acted.awaited {
        world.judge(|referee, _| referee.rebuild_acknowledged(volume, wished_at));
    }
    Ok(())
}

/// Restores an instance from a snapshot, with all its volumes; said again where that is broken off.
pub(crate) async fn restore_all(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    snapshot: InstanceId,
    stop: &CancellationToken,
) -> Result<(), String> {
    let machine = world.judge(|referee, world| referee.before_restore(world, snapshot));
    let own = Cell::new(0);
    let told_of = |what: Restoring<'_>| match what {
        Restoring::Asks(of, verb) => {
            own.update(|own| own + u32::from(machine.is_some_and(|machine| machine.instance == of)));
            world.log(actor, format!("{} {of}", verb.name()));
            world.judge(|referee, world| {
                referee.wished(of, verb);
                referee.see(world, of);
            });
        }
        Restoring::Asked(of, acted) => {
            if let Some(awaited) = acted.awaited {
                acknowledged(world, of, awaited);
            }
        }
        Restoring::Left { volume, .. } => world.log(actor, format!("is told: {volume} stays as it is")),
        Restoring::Step(_) | Restoring::Ended => {}
    };
    world.log(actor, format!("restore snapshot {snapshot}"));
    let before = restored_of(world, snapshot);
    let restored = restore_snapshot(cloud, snapshot, 5, PATIENCE, stop, told_of).await;
    told(world, actor, restored)?;
    world.log(actor, format!("is told: {snapshot} is restored"));
    let mut copies = restored_of(world, snapshot);
    // What it was given since is as it was.
    copies.retain(|disk, _| before.contains_key(disk));
    world.judge(|referee, world| {
        referee.told_restored(&copies);
        if let Some(machine) = machine {
            referee.after_restore(world, machine, own.get());
        }
    });
    Ok(())
}

/// What was answered to who asked for a volume.
fn answered(
    world: &Arc<World>,
    actor: Actor,
    made: Result<Result<Scheduled, NoRoom>, CloudError>,
) -> Result<Scheduled, String> {
    match told(world, actor, made)? {
        Ok(placed) => {
            world.log(actor, format!("is told: {} is on {}", placed.instance, placed.node));
            world.judge(|referee, world| referee.acknowledged(world, placed.instance, placed.node));
            Ok(placed)
        }
        Err(_) => {
            world.log(actor, "is told: no room");
            Err("no room".to_owned())
        }
    }
}

/// Gives a volume to a machine, and waits until it has it.
pub(crate) async fn give(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    volume: InstanceId,
    instance: InstanceId,
    wait: bool,
) -> Result<(), String> {
    world.log(actor, format!("attach {volume} to {instance}"));
    if world.shares_storage()
        && let Some(node) = told(world, actor, node_to_come_to(cloud, volume, instance, None).await)?
    {
        go(world, actor, cloud, volume, node, true).await?;
    }
    let asking = Asking::by(world, actor);
    let attached = attach(cloud, volume, instance, None).await;
    // What it is to have already is waited for as if it were asked for now; so with what it is to have no more.
    asking.answered(world, "attach", attached.as_ref().map(|_| false));
    let attached = told(world, actor, attached)?;
    follow(world, actor, cloud, &attached, wait).await
}

/// Has a volume be with another node, and waits until it is.
pub(crate) async fn go(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    volume: InstanceId,
    node: NodeId,
    wait: bool,
) -> Result<(), String> {
    world.log(actor, format!("move {volume} to {node}"));
    world.judge(|referee, _| referee.moves(volume));
    let asking = Asking::by(world, actor);
    let moved = move_volume(cloud, volume, node).await;
    asking.answered(world, "move", moved.as_ref().map(|_| false));
    let moved = told(world, actor, moved)?;
    world.log(actor, "is told: it goes there");
    if wait {
        told(world, actor, until_active(cloud, moved.node, volume, PATIENCE, |_| {}).await)?;
        world.log(actor, format!("waited for {volume}: it is there"));
    }
    Ok(())
}

/// Takes a volume from whoever has it, or from this machine alone, and waits until that has let go of it.
pub(crate) async fn take(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    volume: InstanceId,
    from: Option<InstanceId>,
    wait: bool,
) -> Result<(), String> {
    world.log(actor, format!("detach {volume}"));
    let asking = Asking::by(world, actor);
    let detached = detach(cloud, volume, from).await;
    asking.answered(world, "detach", detached.as_ref().map(|_| false));
    match told(world, actor, detached)? {
        Some(detached) => follow(world, actor, cloud, &detached, wait).await?,
        None => world.log(actor, "is told: nobody has it"),
    }
    if wait {
        told(world, actor, let_go(cloud, volume).await)?;
    }
    Ok(())
}

async fn follow(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    attached: &Attached,
    wait: bool,
) -> Result<(), String> {
    let Attached { instance, acted, .. } = attached;
    world.log(actor, format!("is told: {}", acted.already.as_deref().unwrap_or("it is written")));
    let Some(awaited) = acted.awaited else { return Ok(()) };
    if let ec_cloud::Awaited::Volume { generation, .. } = awaited {
        world.judge(|referee, _| referee.volumes_acknowledged(*instance, generation));
    }
    if !wait {
        return Ok(());
    }
    let came = until_done(cloud, acted.node, *instance, awaited, PATIENCE, |_| {}).await;
    told(world, actor, came)?;
    world.log(actor, format!("waited for {instance}: it has what it is to have"));
    Ok(())
}

/// Has a volume grow.
pub(crate) async fn extend(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    volume: InstanceId,
    size_gb: u64,
) -> Result<(), String> {
    world.log(actor, format!("extend {volume} to {size_gb} GB"));
    // From here on it may arrive.
    world.judge(|referee, _| referee.extended(volume));
    let asking = Asking::by(world, actor);
    let acted = extend_volume(cloud, volume, size_gb).await;
    answered_of(world, actor, volume, &acted);
    asking.answered(world, "extend", acted.as_ref().map(|acted| acted.already.is_none()));
    let acted = told(world, actor, acted)?;
    world.log(actor, format!("is told: {}", acted.already.as_deref().unwrap_or("it is written")));
    if let Some(ec_cloud::Awaited::Resize(wished_at)) = acted.awaited {
        world.judge(|referee, _| referee.resize_acknowledged(volume, wished_at));
    }
    Ok(())
}

/// Asks for a volume's end.
pub(crate) async fn delete(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    volume: InstanceId,
) -> Result<(), String> {
    world.log(actor, format!("delete {volume}"));
    // From here on it may arrive.
    world.judge(|referee, _| referee.wished_away(volume));
    let asking = Asking::by(world, actor);
    let gone = delete_volume(cloud, volume).await;
    asking.ended(world, "delete", &gone);
    if let Err(CloudError::Refused(_)) = &gone {
        world.judge(|referee, _| referee.spared(volume));
    }
    told(world, actor, gone)?;
    world.log(actor, format!("is told: {volume} goes"));
    world.judge(|referee, _| referee.doomed(volume));
    Ok(())
}

//! People with command lines: each does one thing after the other, is interrupted now and then, and sometimes killed.

use std::{sync::Arc, time::Duration};

use ec_cloud::{Cloud, Guest, Naming, Wanted, destroy, list, schedule, until_active};
use ec_model::{Blob, ImageRef, InstanceId, ResourceQuery};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    door::Door,
    life::Life,
    way::Way,
    world::{Actor, World},
};

/// Names that users of one project quarrel about.
const NAMES: [&str; 4] = ["web", "db", "mail", "cache"];

/// A command line of a life.
pub(crate) fn cloud(world: &Arc<World>, actor: Actor, life: &Life) -> anyhow::Result<Cloud> {
    let door = Door { world: Arc::clone(world), actor, life: life.clone() };
    Ok(Cloud {
        store: Arc::new(door),
        placement: Arc::new(Way::client(world, actor, life)?),
        host: world.machine(life),
        keys: world.keys.clone(),
        project: "default".to_owned(),
        user: "default".to_owned(),
        notice: |_| {},
    })
}

/// What somebody does next.
enum Deed {
    Schedule { name: Option<&'static str>, data: bool, wait: bool },
    Destroy(InstanceId),
    List,
}

/// Uses the cluster until `done`.
pub(crate) async fn live(world: Arc<World>, number: u32, done: CancellationToken) {
    while !done.is_cancelled() {
        sleep(world.millis(200..8000)).await;
        let deed = match world.pick(0..10) {
            0..5 => Deed::Schedule {
                name: world.chance(60).then(|| NAMES[usize::try_from(world.pick(0..4)).unwrap_or(0)]),
                data: world.chance(20),
                wait: world.chance(30),
            },
            5..8 => match someone(&world) {
                Some(instance) => Deed::Destroy(instance),
                None => continue,
            },
            _ => Deed::List,
        };
        command(&world, Actor::User(number), deed, true).await;
    }
}

/// Schedules an instance, waits for it, looks at it and destroys it.
pub(crate) async fn one_life(world: &Arc<World>) {
    let actor = Actor::User(1);
    command(world, actor, Deed::Schedule { name: Some("web"), data: true, wait: true }, false).await;
    command(world, actor, Deed::List, false).await;
    if let Some(instance) = someone(world) {
        command(world, actor, Deed::Destroy(instance), false).await;
    }
    sleep(Duration::from_secs(5)).await;
}

/// One of the instances that were acknowledged and that nobody has wished away.
fn someone(world: &World) -> Option<InstanceId> {
    let all: Vec<InstanceId> = world.judge(|referee, _| {
        let wanted = |known: &crate::referee::Known| known.acknowledged.is_some() && !known.wished_away;
        referee.instances().filter(|(_, known)| wanted(known)).map(|(instance, _)| instance).collect()
    });
    // Whoever changes their mind does it soon, most often.
    let count = all.len() as u64;
    let newest = all.iter().max_by_key(|instance| world.judge(|referee, _| referee.known(**instance).number));
    if world.chance(40) {
        return newest.copied();
    }
    (count > 0).then(|| all[usize::try_from(world.pick(0..count)).unwrap_or(0)])
}

/// One command from its begin to its end, or to somebody's `kill -9` or Ctrl-C.
async fn command(world: &Arc<World>, actor: Actor, deed: Deed, harmed: bool) {
    let (life, stop) = (Life::new(), CancellationToken::new());
    let killed = harmed && world.chance(12);
    let interrupted = harmed && world.chance(8);
    let sleeps = harmed && world.chance(6);
    let run = tokio::task::spawn_local(perform(Arc::clone(world), actor, deed, life.clone(), stop.clone()));
    let mut run = std::pin::pin!(run);
    if killed || interrupted || sleeps {
        let after = world.millis(1..400);
        tokio::select! {
            biased;
            _ = &mut run => return,
            () = sleep(after) => {}
        }
        if killed {
            life.end();
            run.abort();
            world.log(actor, "is killed");
            return;
        }
        if interrupted {
            world.log(actor, "is interrupted");
            stop.cancel();
        }
        if sleeps {
            // As after Ctrl-Z, or on a laptop: most for a moment, some for longer than anything counts as new.
            let time =
                if world.chance(25) { world.millis(550_000..700_000) } else { world.millis(500..60_000) };
            world.log(actor, format!("sleeps for {time:?}"));
            life.sleep();
            sleep(time).await;
            life.wake();
        }
    }
    if run.await.is_err_and(|error| error.is_panic()) {
        world.judge(|referee, _| referee.found(format!("a command of {actor} panicked")));
    }
}

async fn perform(world: Arc<World>, actor: Actor, deed: Deed, life: Life, stop: CancellationToken) {
    let Ok(cloud) = cloud(&world, actor, &life) else { return };
    match deed {
        Deed::Schedule { name, data, wait } => {
            let guest = Guest {
                naming: name.map_or(Naming::None, |name| Naming::Name(name.to_owned())),
                user_data: data.then(|| Blob(b"#!/bin/sh\n".to_vec())),
                keys: Vec::new(),
                image: ImageRef { url: format!("file://{}", image(&world).display()), sha256: None },
                token_required: false,
            };
            world.log(actor, format!("schedule {}", name.unwrap_or("without a name")));
            let query = match ResourceQuery::parse("resources=VCPU:1,MEMORY_MB:128,DISK_GB:1") {
                Ok(query) => query,
                Err(error) => return world.log(actor, error.to_string()),
            };
            let wanted = match Wanted::new(&query, &guest) {
                Ok(wanted) => wanted,
                Err(error) => return world.log(actor, error.to_string()),
            };
            match schedule(&cloud, &wanted, &stop).await {
                Ok(Ok(placed)) => {
                    world.log(actor, format!("is told: {} is on {}", placed.instance, placed.node));
                    world.judge(|referee, world| {
                        referee.acknowledged(world, placed.instance, placed.node);
                    });
                    if wait {
                        let patience = Duration::from_secs(120);
                        let came = until_active(&cloud, placed.node, placed.instance, patience, |_| {}).await;
                        let came = came.map_or_else(|error| error.to_string(), |_| "ACTIVE".to_owned());
                        world.log(actor, format!("waited for {}: {came}", placed.instance));
                    }
                }
                Ok(Err(_)) => world.log(actor, "is told: no room"),
                Err(error) => world.log(actor, format!("is told: {error}")),
            }
        }
        Deed::Destroy(instance) => {
            world.log(actor, format!("destroy {instance}"));
            // From here on it may arrive.
            world.judge(|referee, _| referee.wished_away(instance));
            match destroy(&cloud, instance).await {
                Ok(_) => {
                    world.log(actor, format!("is told: {instance} goes"));
                    world.judge(|referee, _| referee.doomed(instance));
                }
                Err(error) => world.log(actor, format!("is told: {error}")),
            }
        }
        Deed::List => match list(&cloud).await {
            Ok(views) => world.log(actor, format!("lists {} instances", views.len())),
            Err(error) => world.log(actor, format!("lists, and is told: {error}")),
        },
    }
}

/// The tiny image, made once for all computers.
pub(crate) fn image(world: &World) -> std::path::PathBuf {
    let directory = world.computers.first().and_then(|computer| computer.directory.parent());
    directory.unwrap_or(std::path::Path::new("/")).join("images/tiny.img")
}

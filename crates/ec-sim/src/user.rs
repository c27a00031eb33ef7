//! People with command lines: each does one thing after the other, is interrupted now and then, and sometimes killed.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use ec_cloud::{
    Ask, Awaited, Cloud, CloudError, CloudResult, Doomed, Guest, Joining, Naming, Scheduled, Verb, View,
    Wanted, act, create_group, delete_group, destroy, destroy_called, heal, list, schedule, until_active,
    until_done,
};
use ec_model::{AccessKind, Blob, ImageRef, InstanceId, Policy, RequestId, ResourceQuery, Restart, State};
use tokio::{sync::mpsc::UnboundedReceiver, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    catalog,
    door::Door,
    fashion::{Fashion, an_image},
    life::Life,
    referee::{
        denied::Rooms,
        said::{Asking, Standing, moment},
    },
    replica::ADMIN,
    volumes,
    way::Way,
    world::{Actor, World},
};

/// Names that users of one project quarrel about.
const NAMES: [&str; 4] = ["web", "db", "mail", "cache"];

/// What somebody does in another window is told as this many more's.
const WINDOW: u32 = 10;

/// Groups that users of one project have, or have again.
const GROUPS: [(&str, Policy); 4] = [
    ("apart", Policy::AntiAffinity),
    ("together", Policy::Affinity),
    ("rather-apart", Policy::SoftAntiAffinity),
    ("rather-together", Policy::SoftAffinity),
];

/// A command line of a life.
pub(crate) fn cloud(world: &Arc<World>, actor: Actor, life: &Life) -> anyhow::Result<Cloud> {
    let host = world.machine(life);
    let request_id = matches!(actor, Actor::User(_)).then(|| RequestId::new(host.mark()));
    let door = Door { world: Arc::clone(world), actor, life: life.clone(), request_id };
    Ok(Cloud {
        store: Arc::new(door),
        placement: Arc::new(Way::client(world, actor, ADMIN, life)?.on_behalf(request_id)),
        host,
        keys: world.keys.clone(),
        project: "default".to_owned(),
        user: "default".to_owned(),
        request_id,
        notice: |_| {},
    })
}

/// What somebody does next.
enum Deed {
    Schedule {
        name: Option<&'static str>,
        data: bool,
        wait: bool,
        group: Option<(&'static str, Policy)>,
        boot: Option<InstanceId>,
    },
    DeleteGroup(&'static str),
    Destroy(InstanceId),
    Act {
        instance: InstanceId,
        verb: Verb,
        wait: bool,
    },
    /// Of one whose request nobody can read.
    DestroySealed(InstanceId),
    LookAt(InstanceId, AccessKind),
    Volume(volumes::Deed),
    Catalog(catalog::Deed, &'static str),
    /// Brings back what nodes hold.
    Heal,
    List,
}

/// Uses the cluster until `done`.
pub(crate) async fn live(world: Arc<World>, number: u32, done: CancellationToken) {
    let fashion = Fashion::any(&world);
    let mut last = None;
    while !done.is_cancelled() {
        sleep(fashion.pause(&world)).await;
        let Some(deed) = next(&world, fashion, last) else { continue };
        if let Deed::Act { instance, .. } = &deed {
            last = Some(*instance);
        }
        // From another window, at the same time.
        let beside = match &deed {
            Deed::Act { instance, .. } | Deed::Destroy(instance) if world.chance(10) => {
                let same = match &deed {
                    Deed::Act { verb, .. } if world.chance(40) => Some(verb.clone()),
                    _ => None,
                };
                let (instance, verb) = (*instance, same.unwrap_or_else(|| fashion.verb(&world)));
                Some(Deed::Act { instance, verb, wait: false })
            }
            _ => None,
        };
        let (one, other) = (Actor::User(number), Actor::User(number + WINDOW));
        match beside {
            Some(beside) => _ = tokio::join!(command(&world, one, deed), command(&world, other, beside)),
            None => command(&world, one, deed).await,
        }
    }
}

/// Somebody who wishes something of an instance in the moment in which something was done to it, until `done`: what its agent is
/// about to note or to tell is of an older wish then.
pub(crate) async fn interrupt(
    world: Arc<World>,
    number: u32,
    mut heard: UnboundedReceiver<InstanceId>,
    done: CancellationToken,
) {
    let fashion = Fashion::any(&world);
    while let Some(Some(instance)) = done.run_until_cancelled(heard.recv()).await {
        sleep(world.millis(0..60)).await;
        let deed = match world.pick(0..12) {
            0 => Deed::Destroy(instance),
            _ => Deed::Act { instance, verb: fashion.verb(&world), wait: false },
        };
        command(&world, Actor::User(number), deed).await;
        // What was heard meanwhile is old.
        while heard.try_recv().is_ok() {}
    }
}

/// Sees to the catalogue until `done`.
pub(crate) async fn keep_catalog(world: Arc<World>, number: u32, done: CancellationToken) {
    while !done.is_cancelled() {
        sleep(world.millis(50..4000)).await;
        let (deed, project) = catalog::any(&world);
        command(&world, Actor::User(number), Deed::Catalog(deed, project)).await;
    }
}

/// What somebody does next, who asked something of an instance last; nothing where there is nothing to do it to.
fn next(world: &World, fashion: Fashion, last: Option<InstanceId>) -> Option<Deed> {
    // Somebody else may destroy it before.
    let is_held = !world.store.content(&world.keys.every_held()).pairs.is_empty();
    let act = || {
        let again = last.filter(|_| world.chance(40));
        let instance = match again {
            Some(last) => last,
            None if world.chance(3) => volumes::some_volume(world)?,
            None => someone(world)?,
        };
        Some(Deed::Act { instance, verb: fashion.verb(world), wait: world.chance(30) })
    };
    Some(match world.pick(0..19) {
        _ if is_held && world.chance(15) => Deed::Heal,
        _ if fashion.acts(world) => act()?,
        14.. => Deed::Volume(volumes::any(world)?),
        10..14 => act()?,
        0..5 => Deed::Schedule {
            name: world.chance(60).then(|| a_name(world)),
            data: world.chance(20),
            wait: world.chance(30),
            group: world.chance(30).then(|| a_group(world)),
            boot: if world.chance(25) { volumes::some_volume(world) } else { None },
        },
        8 if world.chance(20) => Deed::DeleteGroup(a_group(world).0),
        5..8 if world.chance(3) => {
            let sealed = world.judge(|referee, world| referee.sealed_requests(world));
            Deed::DestroySealed(*sealed.first()?)
        }
        5..8 => Deed::Destroy(someone(world)?),
        9 if world.chance(60) => Deed::LookAt(someone(world)?, a_kind(world)),
        _ => Deed::List,
    })
}

pub(crate) fn a_name(world: &World) -> &'static str {
    world.among(&NAMES)
}

fn a_group(world: &World) -> (&'static str, Policy) {
    world.among(&GROUPS)
}

/// Most often that what ends stays so.
fn a_policy(world: &World) -> Restart {
    // Where agents are killed in the midst of it, guests crash more often, too.
    let most = if world.is_sudden() { 6 } else { 2 };
    match world.pick(0..10) {
        9 => Restart::Always,
        pick if pick < most => Restart::OnFailure,
        _ => Restart::No,
    }
}

fn a_kind(world: &World) -> AccessKind {
    world.among(&[AccessKind::Console, AccessKind::Log, AccessKind::Vnc])
}

/// One of the instances that were acknowledged and that nobody has wished away; or now and then one that somebody has.
pub(crate) fn someone(world: &World) -> Option<InstanceId> {
    let again = world.chance(15);
    let all: Vec<InstanceId> = world.judge(|referee, _| {
        let wanted = |known: &crate::referee::Known| known.is_placed_machine() && known.wished_away == again;
        referee.instances().filter(|(_, known)| wanted(known)).map(|(instance, _)| instance).collect()
    });
    // Whoever changes their mind does it soon, most often.
    let newest = all.iter().max_by_key(|instance| world.judge(|referee, _| referee.known(**instance).number));
    if world.chance(40) {
        return newest.copied();
    }
    world.one_of(&all).copied()
}

/// One command from its begin to its end, or to somebody's `kill -9` or Ctrl-C.
async fn command(world: &Arc<World>, actor: Actor, deed: Deed) {
    let (life, stop) = (Life::new(), CancellationToken::new());
    let killed = world.chance(12);
    let interrupted = world.chance(8);
    let sleeps = world.chance(6);
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
                if world.chance(25) { world.millis(550_000..900_000) } else { world.millis(500..60_000) };
            world.log(actor, format!("sleeps for {time:?}"));
            world.have_sleep(actor, &life, time).await;
        }
    }
    if run.await.is_err_and(|error| error.is_panic()) {
        world.judge(|referee, _| referee.found(format!("a command of {actor} panicked")));
    }
}

async fn perform(world: Arc<World>, actor: Actor, deed: Deed, life: Life, stop: CancellationToken) {
    let Ok(cloud) = cloud(&world, actor, &life) else { return };
    match deed {
        Deed::Schedule { name, data, wait, group, boot } => {
            let query = match (world.chance(25), boot) {
                (true, None) => "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1",
                (false, None) => "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1",
                (true, Some(_)) => "resources=VCPU:2,MEMORY_MB:128",
                (false, Some(_)) => "resources=VCPU:1,MEMORY_MB:128",
            };
            if let Some((group, policy)) = group {
                // There it is, most often.
                _ = have_group(&world, actor, &cloud, group, policy).await;
            }
            let group = group.map(|(name, _)| name);
            let restart = a_policy(&world);
            let order = Order { name, data, query, restart, group, boot };
            let Ok(placed) = place(&world, actor, &cloud, order, &stop).await else {
                return;
            };
            if wait {
                await_active(&world, actor, &cloud, placed, Duration::from_secs(120)).await;
            }
        }
        Deed::DeleteGroup(name) => _ = end_group(&world, actor, &cloud, name).await,
        Deed::Destroy(instance) => _ = doom(&world, actor, &cloud, instance).await,
        Deed::Act { instance, verb, wait } => {
            let patience = wait.then_some(Duration::from_secs(120));
            _ = wish(&world, actor, &cloud, instance, &verb, patience).await;
        }
        Deed::DestroySealed(instance) => {
            let told = destroy(&cloud, instance).await;
            world.log(
                actor,
                format!("destroy {instance}: {}", if told.is_ok() { "it goes" } else { "refused" }),
            );
        }
        Deed::LookAt(instance, kind) => _ = look_at(&world, actor, &cloud, instance, kind).await,
        Deed::Catalog(deed, project) => {
            let cloud = Cloud { project: project.to_owned(), ..cloud };
            catalog::perform(&world, actor, &cloud, deed).await;
        }
        Deed::Volume(deed) => volumes::perform(&world, actor, &cloud, deed, &stop).await,
        Deed::Heal => _ = mend(&world, actor, &cloud).await,
        Deed::List => _ = look(&world, actor, &cloud).await,
    }
}

/// What somebody asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) name: Option<&'static str>,
    pub(crate) data: bool,
    pub(crate) query: &'static str,
    pub(crate) restart: Restart,
    pub(crate) group: Option<&'static str>,
    /// The volume to boot from.
    pub(crate) boot: Option<InstanceId>,
}

/// Makes a group; what was told where that cannot be.
pub(crate) async fn have_group(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    name: &str,
    policy: Policy,
) -> Result<(), String> {
    let key = cloud.keys.group(&cloud.project, name);
    let made = create_group(cloud, name, policy, None).await;
    let made = made.map(|made| catalog::made_so(world, &key, &made.group)).map_err(|error| error.to_string());
    let told = made.as_ref().map_or_else(String::as_str, |()| "it is there");
    world.log(actor, format!("makes the group {name}: {told}"));
    made
}

/// Deletes a group; what was told where that cannot be.
pub(crate) async fn end_group(world: &World, actor: Actor, cloud: &Cloud, name: &str) -> Result<(), String> {
    let key = cloud.keys.group(&cloud.project, name);
    let gone = catalog::deleted(world, &key, delete_group(cloud, name)).await;
    let gone = gone.map_err(|error| error.to_string());
    let told = gone.as_ref().map_or_else(String::as_str, |()| "it is gone");
    world.log(actor, format!("deletes the group {name}: {told}"));
    gone
}

/// Asks for an instance; where it is, or what was told instead.
pub(crate) async fn place(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    order: Order,
    stop: &CancellationToken,
) -> Result<Scheduled, String> {
    let Order { name, data, query, restart, group, boot } = order;
    let guest = Guest {
        kind: ec_model::Workload::Machine,
        naming: match name {
            Some(name) => Naming::Name(name.to_owned()),
            None if world.chance(15) => Naming::Prefix("web-".to_owned()),
            None => Naming::None,
        },
        user_data: data.then(|| Blob(b"#!/bin/sh\n".to_vec())),
        keys: Vec::new(),
        image: if boot.is_some() { ImageRef::default() } else { an_image(world) },
        boot,
        volumes: Vec::new(),
        token_required: false,
        snapshot: false,
        labels: BTreeMap::new(),
        metadata: BTreeMap::new(),
        restart,
    };
    let within = group.map(|group| format!(" in the group {group}")).unwrap_or_default();
    let on = boot.map(|volume| format!(" on volume {volume}")).unwrap_or_default();
    world.log(actor, format!("schedule {}{within}{on}", name.unwrap_or("without a name")));
    let told = async {
        let query = ResourceQuery::parse(query).map_err(|error| error.to_string())?;
        let mut ask = Ask::new(&query).map_err(|error| error.to_string())?;
        if let Some(group) = group {
            ask = ask.within(Joining::new(cloud, group).await.map_err(|error| error.to_string())?);
        }
        let wanted = Wanted::new(ask, &guest).map_err(|error| error.to_string())?;
        let stood = Rooms::of(world);
        let told = schedule(cloud, &wanted, stop).await;
        // Where what it boots from lies is no question of room.
        if matches!(told, Ok(Err(_))) && boot.is_none() {
            world.judge(|referee, world| referee.denied(world, actor, &stood, &query, group));
        }
        match told {
            Ok(Ok(placed)) => Ok(placed),
            Ok(Err(none)) if !none.left_out.is_empty() => Err("no room that the group leaves".to_owned()),
            Ok(Err(_)) => Err("no room".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    };
    let told = told.await;
    match &told {
        Ok(placed) => {
            world.log(actor, format!("is told: {} is on {}", placed.instance, placed.node));
            world.judge(|referee, world| referee.acknowledged(world, placed.instance, placed.node));
        }
        Err(why) => world.log(actor, format!("is told: {why}")),
    }
    told
}

/// Waits until an instance is ACTIVE, or cannot be; whether it is.
pub(crate) async fn await_active(
    world: &World,
    actor: Actor,
    cloud: &Cloud,
    placed: Scheduled,
    patience: Duration,
) -> bool {
    let came = until_active(cloud, placed.node, placed.instance, patience, |_| {}).await;
    let is_active = came.is_ok();
    let came = came.map_or_else(|error| error.to_string(), |_| "ACTIVE".to_owned());
    world.log(actor, format!("waited for {}: {came}", placed.instance));
    is_active
}

/// Asks for the end of an instance; what was told where that cannot be.
pub(crate) async fn doom(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    instance: InstanceId,
) -> Result<(), String> {
    world.log(actor, format!("destroy {instance}"));
    // From here on it may arrive.
    world.judge(|referee, _| referee.wished_away(instance));
    let asking = Asking::by(world, actor);
    let told = destroy(cloud, instance).await;
    asking.ended(world, "destroy", &told);
    doomed(world, actor, instance, told)
}

/// The same of what was called so when somebody looked.
pub(crate) async fn doom_called(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    instance: InstanceId,
    name: &str,
) -> Result<(), String> {
    world.log(actor, format!("destroy {instance}, called {name}"));
    world.judge(|referee, _| referee.wished_away(instance));
    doomed(world, actor, instance, destroy_called(cloud, instance, name, &[]).await)
}

fn doomed(
    world: &World,
    actor: Actor,
    instance: InstanceId,
    told: CloudResult<Doomed>,
) -> Result<(), String> {
    match told {
        Ok(_) => {
            world.log(actor, format!("is told: {instance} goes"));
            world.judge(|referee, _| referee.doomed(instance));
            Ok(())
        }
        Err(error) => {
            if matches!(error, CloudError::Refused(_)) {
                world.judge(|referee, _| referee.spared(instance));
            }
            world.log(actor, format!("is told: {error}"));
            Err(error.to_string())
        }
    }
}

/// Brings back what nodes hold and etcd lacks; how many, or what was told instead.
pub(crate) async fn mend(world: &Arc<World>, actor: Actor, cloud: &Cloud) -> Result<usize, String> {
    world.log(actor, "heal");
    let tended = heal(cloud, &[], false).await;
    let done = tended.and_then(|tended| tended.failed.map_or(Ok(tended.done), Err));
    let done = done.map_err(|error| error.to_string());
    match &done {
        Ok(all) => {
            for healed in all {
                let notes = healed.notes.join("; ");
                world.log(actor, format!("is told: {} is {:?} {notes}", healed.instance, healed.outcome));
            }
        }
        Err(why) => world.log(actor, format!("is told: {why}")),
    }
    done.map(|all| all.iter().filter(|healed| healed.outcome == ec_cloud::Outcome::Healed).count())
}

/// Asks something of an instance, and waits so long until it is so; how it is then, or what was told instead.
pub(crate) async fn wish(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    instance: InstanceId,
    verb: &Verb,
    patience: Option<Duration>,
) -> Result<Option<State>, String> {
    world.log(actor, format!("{} {instance}", verb.name()));
    // From here on it may arrive.
    world.judge(|referee, world| {
        referee.wished(instance, verb);
        referee.see(world, instance);
    });
    let since = world.elapsed();
    let stood = Standing::of(world, instance);
    let done = async {
        let asking = Asking::by(world, actor);
        let acted = act(cloud, instance, verb).await;
        asking.answered(world, verb.name(), acted.as_ref().map(|acted| acted.already.is_none()));
        world.judge(|referee, world| {
            referee.acted(world, (actor, verb), instance, stood.as_ref(), &acted);
        });
        let acted = acted?;
        world.log(actor, format!("is told: {}", acted.already.as_deref().unwrap_or("it is written")));
        // What is set holds at once; when its node acts by it, nobody here asks.
        let to_be_done = acted.awaited.filter(|awaited| !matches!(awaited, Awaited::Heard(_)));
        let Some(awaited) = to_be_done else { return Ok(None) };
        acknowledged(world, instance, awaited);
        let Some(patience) = patience else { return Ok(None) };
        let came = until_done(cloud, acted.node, instance, awaited, patience, |_| {}).await?;
        world.log(actor, format!("waited for {instance}: {}", came.state));
        if let Awaited::Power { generation, .. } = awaited {
            let wish = (verb, generation, since);
            world.judge(|referee, world| referee.power_answered(world, instance, wish, &came));
        }
        Ok(Some(came.state))
    };
    told(world, actor, done.await)
}

/// That something was asked for, and is to be waited for.
pub(crate) fn acknowledged(world: &World, instance: InstanceId, awaited: Awaited) {
    world.judge(|referee, _| match awaited {
        Awaited::Power { generation, .. } => referee.power_acknowledged(instance, generation),
        Awaited::Rebuild(wished_at) => referee.rebuild_acknowledged(instance, wished_at),
        Awaited::Resize(wished_at) => referee.resize_acknowledged(instance, wished_at),
        // That the last of them holds is seen in the end.
        Awaited::Rescue { .. } | Awaited::Unrescue(_) | Awaited::Heard(_) | Awaited::Volume { .. } => {}
    });
}

/// What was told, in the log and for who asked.
pub(crate) fn told<T>(world: &World, actor: Actor, done: Result<T, CloudError>) -> Result<T, String> {
    done.map_err(|error| {
        world.log(actor, format!("is told: {error}"));
        error.to_string()
    })
}

/// Looks at a guest's console, log or screen; the word that lets in, or what was told instead.
pub(crate) async fn look_at(
    world: &Arc<World>,
    actor: Actor,
    cloud: &Cloud,
    instance: InstanceId,
    kind: AccessKind,
) -> Result<String, String> {
    world.log(actor, format!("look at the {kind} of {instance}"));
    match ec_cloud::look_at(cloud, instance, kind).await {
        Ok(door) => {
            world.log(actor, format!("has a ticket for {instance} from {}", door.node));
            Ok(door.ticket.0)
        }
        Err(error) => {
            world.log(actor, format!("is told: {error}"));
            Err(error.to_string())
        }
    }
}

/// Lists all instances.
pub(crate) async fn look(world: &Arc<World>, actor: Actor, cloud: &Cloud) -> Result<Vec<View>, String> {
    let stood = moment(world);
    let listed = list(cloud).await.map_err(|error| error.to_string());
    match &listed {
        Ok(views) => {
            world.judge(|referee, world| referee.listed(world, actor, stood, views));
            world.log(actor, format!("lists {} instances", views.len()));
        }
        Err(error) => world.log(actor, format!("lists, and is told: {error}")),
    }
    listed
}

/// The tiny image, made once for all computers.
pub(crate) fn image(world: &World) -> std::path::PathBuf {
    let directory = world.computers.first().and_then(|computer| computer.directory.parent());
    directory.unwrap_or(std::path::Path::new("/")).join("images/tiny.img")
}

//! What can be done to a cluster: by the nemesis, who rolls dice for it, and by a scenario, which knows when.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{End, Hypervisor, Pause};
use ec_model::{Desired, Instance, InstanceId, Request, RunState, Trouble, TroubleKind, decode};
use ec_store::{Backup, Store, Txn};
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    door::content,
    life::Life,
    node::{Computer, PROCESSORS},
    referee::observed,
    replica::ADMIN,
    way::Way,
    world::{Actor, World},
};

pub(crate) fn say(world: &World, what: impl AsRef<str>) {
    world.log(Actor::Nemesis, what);
}

/// Who an agent of the computer is, in the log.
pub(crate) fn name(computer: &Computer) -> Actor {
    Actor::Agent(computer.node, computer.first_start())
}

/// As `kill -9`. Whether there was one.
pub(crate) fn kill_agent(world: &World, computer: &Computer) -> bool {
    let killed = computer.kill();
    if killed {
        say(world, format!("kills the agent of {}", name(computer)));
    }
    killed
}

/// As somebody does who has a copy of them. What nobody could read meanwhile was touched by nobody.
pub(crate) fn mend_records(world: &World, computer: &Computer) {
    for instance in computer.mend_records() {
        world.judge(|referee, _| referee.record_touched(instance));
    }
}

/// Somebody else who uses placement takes all processors of a computer that are free, for so long.
pub(crate) async fn take_room(world: &Arc<World>, computer: &Computer, time: Duration) {
    let Ok(placement) = Way::client(world, Actor::Nemesis, ADMIN, &Life::new()) else { return };
    let (consumer, node) = (InstanceId::new(Uuid::from_u128(world.any())), computer.node);
    let mut taken = PROCESSORS;
    while taken > 0 {
        let amounts = [(node, [("VCPU".to_owned(), taken)].into())].into();
        if placement.claim_exact(consumer, &amounts, "others", "others").await.is_ok() {
            break;
        }
        taken -= 1;
    }
    say(world, format!("others take {taken} processors of {} for {time:?}", name(computer)));
    // Whether or not they were told: what is lost on its way may arrive.
    tokio::spawn(async move {
        sleep(time).await;
        while placement.release(consumer).await.is_err() {
            sleep(Duration::from_secs(1)).await;
        }
    });
}

/// As an operator ends it, who starts it again.
pub(crate) fn stop_agent(world: &World, computer: &Computer) {
    if computer.stop() {
        say(world, format!("asks the agent of {} to end", name(computer)));
    }
}

/// As if somebody pulled the plug.
pub(crate) async fn crash_host(world: &World, computer: &Computer) {
    say(world, format!("pulls the plug of {}", name(computer)));
    for guest in guests(world, computer).await {
        world.judge(|referee, _| referee.disturbed(guest));
    }
    computer.crash();
}

/// Its disk fills up, or has room again, as its agent finds when it looks.
pub(crate) fn trouble(world: &World, computer: &Computer, is_full: bool) {
    let why = || "hardly anything is left of its disk".to_owned();
    let trouble = is_full.then(|| Trouble { kind: TroubleKind::Disk, since: world.now(), why: why() });
    let what = if is_full { "fills the disk" } else { "makes room on the disk" };
    say(world, format!("{what} of the host of {}", name(computer)));
    computer.troubles.send_replace(trouble.into_iter().collect());
}

/// As `kill -9`. Whether it was running.
pub(crate) fn kill_replica(world: &World, number: usize) -> bool {
    let killed = world.replicas.kill(number);
    if killed {
        say(world, format!("kills {}", Actor::Replica(number)));
    }
    killed
}

pub(crate) fn break_watches(world: &World) {
    say(world, "breaks all watches");
    world.store.faults().break_watches();
}

pub(crate) fn silence_watches(world: &World) {
    say(world, "silences all watches");
    world.silence_watches();
}

/// Those of one agent alone: what others hear of at once it hears of when it looks by itself.
pub(crate) fn deafen(world: &World, computer: &Computer) {
    say(world, format!("silences the watches of {}", name(computer)));
    world.deafen(name(computer));
}

/// History is gone up to now, and every watch has to begin anew.
pub(crate) async fn compact(world: &World) {
    say(world, "has etcd compacted");
    world.store.compact(world.store.revision()).await.ok();
    world.store.faults().break_watches();
}

pub(crate) fn restart_store(world: &World) {
    say(world, "restarts etcd");
    world.store.faults().restart();
}

pub(crate) fn back_up(world: &World) -> Backup {
    say(world, "backs etcd up");
    world.store.faults().backup()
}

/// What is on its way to etcd at this moment does not reach the other one.
pub(crate) fn restore(world: &World, backup: &Backup) {
    say(world, "puts etcd back to its backup");
    world.next_era();
    world.store.faults().restore(backup);
    world.judge(|referee, world| referee.replaced(world));
}

pub(crate) fn undefine(world: &World, computer: &Computer, guest: InstanceId) {
    say(world, format!("undefines {guest} on {}", name(computer)));
    world.judge(|referee, _| referee.disturbed(guest));
    computer.hypervisor.undefine(guest);
}

pub(crate) fn delete_disk(world: &World, computer: &Computer, guest: InstanceId) {
    say(world, format!("deletes the disk of {guest} on {}", name(computer)));
    world.judge(|referee, _| referee.disturbed(guest));
    disturb_holders(world, computer, guest);
    computer.hypervisor.delete_volume(guest);
}

/// What becomes of a volume becomes of those that have it, or are to have it, too.
pub(crate) fn disturb_holders(world: &World, computer: &Computer, volume: InstanceId) {
    let record = content(world, &world.keys.instance(volume));
    let is_to = record.and_then(|pair| decode::<Instance>(&pair.value).ok()?.attached);
    let volumes = computer.hypervisor.volumes().into_iter();
    let have = volumes.filter(|(_, volumes)| volumes.iter().flatten().any(|has| has.volume == volume));
    for instance in have.map(|(instance, _)| instance).chain(is_to) {
        world.judge(|referee, _| referee.disturbed(instance));
    }
}

/// The volumes that a machine is to have, by its record.
pub(crate) fn volumes_of(world: &World, machine: InstanceId) -> Vec<InstanceId> {
    let record = content(world, &world.keys.instance(machine));
    let record = record.and_then(|pair| decode::<Instance>(&pair.value).ok());
    record.into_iter().flat_map(|record| record.volumes).map(|has| has.volume).collect()
}

/// As somebody with etcdctl does it; its status goes with it, or stays. Not a wish to destroy: with its record gone, too,
/// nobody can tell any more whose the claim is.
pub(crate) async fn delete_request(world: &World, computer: &Computer, guest: InstanceId, with_status: bool) {
    let (keys, node) = (&world.keys, computer.node);
    let request = keys.request(node, guest);
    let wish = content(world, &request).and_then(|pair| decode::<Request>(&pair.value).ok());
    if wish.is_none_or(|wish| wish.desired == Desired::Destroyed) {
        return;
    }
    world.judge(|referee, _| referee.request_lost(guest));
    delete_key(world, &request).await;
    delete_key(world, &keys.user_data(node, guest)).await;
    if with_status {
        world.judge(|referee, _| referee.status_lost(guest));
        delete_key(world, &keys.status(node, guest)).await;
    }
}

/// The record of an instance alone, of which its node is asked for: of one that never ran, and lost its request while its agent was
/// away, nobody could tell any more whose the claim is.
pub(crate) async fn delete_instance(world: &World, guest: InstanceId) {
    let requests = world.store.content(&world.keys.all_requests()).pairs;
    let mut asked_for = requests.iter().filter_map(|pair| world.keys.parse_request(&pair.key).ok());
    if !asked_for.any(|(_, instance)| instance == guest) {
        return;
    }
    world.judge(|referee, _| referee.request_lost(guest));
    delete_key(world, &world.keys.instance(guest)).await;
}

pub(crate) async fn delete_key(world: &World, key: &str) {
    say(world, format!("deletes the key {key}"));
    world.store.txn(Txn::new().delete(key)).await.ok();
}

pub(crate) fn end_guest(world: &World, computer: &Computer, guest: InstanceId, why: End) {
    let how = match why {
        End::ByGuest => "powers itself off",
        End::ByHand => "is ended by somebody's virsh destroy",
        End::Crashed => "crashes",
        _ => "ends",
    };
    say(world, format!("the guest {guest} on {} {how}", name(computer)));
    world.judge(|referee, world| {
        referee.disturbed(guest);
        referee.ends(world, computer, guest, why);
    });
    computer.hypervisor.end_guest_by(guest, why);
}

/// As somebody with virsh, who has not asked: what runs is saved or suspended, what does not is started.
pub(crate) async fn handle(world: &World, computer: &Computer, guest: InstanceId) {
    let hypervisor = &computer.hypervisor;
    let Some(domain) = observed(computer, guest).and_then(|guest| guest.domain) else { return };
    world.judge(|referee, _| referee.handled(guest));
    let (what, done) = match domain {
        RunState::Running if world.chance(70) => ("saves", hypervisor.save(guest).await),
        RunState::Running => {
            hypervisor.pause_guest(guest, Pause::ByHand);
            ("suspends", Ok(()))
        }
        RunState::Paused(_) => ("resumes", hypervisor.resume(guest).await),
        // Its memory goes with that.
        RunState::Saved if world.chance(30) => {
            hypervisor.forget_memory(guest);
            ("forgets the memory of", Ok(()))
        }
        RunState::Saved | RunState::Ended(_) => ("starts", hypervisor.start(guest).await),
        // No guest of it ever ran.
        RunState::NotStarted => return,
    };
    if done.is_ok() {
        say(world, format!("somebody {what} {guest} on {}", name(computer)));
    }
}

pub(crate) fn pause_guest(world: &World, computer: &Computer, guest: InstanceId, why: Pause) {
    // What does not run cannot be halted; of what is halted the reason may change.
    let domain = observed(computer, guest).and_then(|guest| guest.domain);
    if !matches!(domain, Some(RunState::Running | RunState::Paused(_))) {
        return;
    }
    let how = match why {
        Pause::Storage { room: false } => ", for its disk is full",
        Pause::Storage { room: true } => ", for its disk was full, and has room again",
        _ => "",
    };
    say(world, format!("the guest {guest} on {} is paused{how}", name(computer)));
    world.judge(|referee, _| referee.disturbed(guest));
    computer.hypervisor.pause_guest(guest, why);
}

/// The instances that a computer has, in order.
pub(crate) async fn guests(world: &World, computer: &Computer) -> Vec<InstanceId> {
    let Ok(listed) = computer.hypervisor.list().await else { return Vec::new() };
    let sealed = world.judge(|referee, _| referee.sealed_guests().clone());
    let mut guests: Vec<InstanceId> = listed.into_keys().filter(|guest| !sealed.contains(guest)).collect();
    guests.sort_unstable();
    guests
}

//! What goes wrong. Each history has its own selection of ills, so that some are rich in one and without another.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{Hypervisor, Pause};
use ec_model::InstanceId;
use ec_store::{Backup, Store};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    node::Computer,
    world::{Actor, Storm, World},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ill {
    KillAgent,
    StopAgent,
    KillReplica,
    StoreStorm,
    PlacementStorm,
    HypervisorStorm,
    Refusals,
    Slowness,
    BreakWatches,
    SilenceWatches,
    Compact,
    StoreAway,
    StoreRestart,
    Cut,
    Restore,
    LoseDomain,
    LoseDisk,
    EndGuest,
    PauseGuest,
    CrashHost,
}

const ALL: [Ill; 20] = [
    Ill::KillAgent,
    Ill::StopAgent,
    Ill::KillReplica,
    Ill::StoreStorm,
    Ill::PlacementStorm,
    Ill::HypervisorStorm,
    Ill::Refusals,
    Ill::Slowness,
    Ill::BreakWatches,
    Ill::SilenceWatches,
    Ill::Compact,
    Ill::StoreAway,
    Ill::StoreRestart,
    Ill::Cut,
    Ill::Restore,
    Ill::LoseDomain,
    Ill::LoseDisk,
    Ill::EndGuest,
    Ill::PauseGuest,
    Ill::CrashHost,
];

/// The ills of a history: about a third of all, of those that have few consequences more often.
pub(crate) fn selection(world: &World) -> Vec<Ill> {
    let often = |ill: Ill| match ill {
        // After a restore the referee can say little, so most histories go without.
        Ill::Restore => 12,
        Ill::LoseDisk | Ill::LoseDomain | Ill::Refusals | Ill::EndGuest | Ill::PauseGuest => 15,
        Ill::KillAgent | Ill::StoreStorm => 60,
        _ => 35,
    };
    ALL.into_iter().filter(|ill| world.chance(often(*ill))).collect()
}

/// Does harm until `done`.
pub(crate) async fn rage(world: Arc<World>, ills: Vec<Ill>, done: CancellationToken) {
    let mut backup: Option<Backup> = None;
    while !done.is_cancelled() {
        sleep(world.millis(500..12_000)).await;
        if done.is_cancelled() || ills.is_empty() {
            continue;
        }
        let ill = ills[usize::try_from(world.pick(0..ills.len() as u64)).unwrap_or(0)];
        harm(&world, ill, &mut backup).await;
    }
}

fn say(world: &World, what: impl AsRef<str>) {
    world.log(Actor::Nemesis, what);
}

async fn harm(world: &Arc<World>, ill: Ill, backup: &mut Option<Backup>) {
    let faults = world.store.faults();
    let computer = Arc::clone(any_computer(world));
    let name = Actor::Agent(computer.node, 0);
    match ill {
        Ill::KillAgent => {
            if computer.kill() {
                say(world, format!("kills the agent of {name}"));
                start_later(world, &computer);
            }
        }
        Ill::StopAgent => {
            if computer.stop() {
                say(world, format!("asks the agent of {name} to end"));
            }
        }
        Ill::CrashHost => {
            say(world, format!("pulls the plug of {name}"));
            disturb_all(world, &computer).await;
            computer.crash();
            start_later(world, &computer);
        }
        Ill::KillReplica => {
            let number = usize::try_from(world.pick(0..world.replicas.count() as u64)).unwrap_or(0);
            if world.replicas.kill(number) {
                say(world, format!("kills {}", Actor::Replica(number)));
                let (world, after) = (Arc::clone(world), world.millis(500..20_000));
                tokio::spawn(async move {
                    sleep(after).await;
                    if !world.replicas.is_up(number) {
                        world.replicas.start(&world, number);
                    }
                });
            }
        }
        Ill::StoreStorm => storm(world, |storm, much| storm.etcd = much, "the way to etcd is bad").await,
        Ill::PlacementStorm => {
            storm(world, |storm, much| storm.placement = much, "the way to placement is bad").await;
        }
        Ill::HypervisorStorm => {
            storm(world, |storm, much| storm.hypervisor = much, "the hypervisors are troubled").await;
        }
        Ill::Refusals => storm(world, |storm, _| storm.refusals = 10, "the hypervisors refuse").await,
        Ill::Slowness => storm(world, |storm, much| storm.slow = much, "everything is slow").await,
        Ill::BreakWatches => {
            say(world, "breaks all watches");
            faults.break_watches();
        }
        Ill::SilenceWatches => {
            say(world, "silences all watches");
            faults.freeze_watches();
        }
        Ill::Compact => {
            say(world, "has etcd compacted");
            world.store.compact(world.store.revision()).await.ok();
            faults.break_watches();
        }
        Ill::StoreAway => {
            let time = world.millis(1000..40_000);
            say(world, format!("takes etcd away for {time:?}"));
            faults.set_reachable(false);
            sleep(time).await;
            faults.set_reachable(true);
            say(world, "gives etcd back");
        }
        Ill::StoreRestart => {
            say(world, "restarts etcd");
            faults.restart();
        }
        Ill::Cut => {
            let time = world.millis(1000..40_000);
            let who = if world.chance(30) {
                Actor::Replica(usize::try_from(world.pick(0..world.replicas.count() as u64)).unwrap_or(0))
            } else {
                name
            };
            say(world, format!("cuts {who} off from etcd for {time:?}"));
            world.cut(who, time);
        }
        Ill::Restore => match backup.take() {
            None => {
                say(world, "backs etcd up");
                *backup = Some(faults.backup());
            }
            Some(older) => {
                say(world, "puts etcd back to its backup");
                world.next_era();
                faults.restore(&older);
                world.judge(|referee, world| referee.replaced(world));
            }
        },
        Ill::LoseDomain => {
            if let Some(guest) = any_guest(world, &computer).await {
                say(world, format!("undefines {guest} on {name}"));
                computer.hypervisor.undefine(guest);
            }
        }
        Ill::LoseDisk => {
            if let Some(guest) = any_guest(world, &computer).await {
                say(world, format!("deletes the disk of {guest} on {name}"));
                computer.hypervisor.delete_volume(guest);
            }
        }
        Ill::EndGuest => {
            if let Some(guest) = any_guest(world, &computer).await {
                say(world, format!("the guest {guest} on {name} powers itself off"));
                computer.hypervisor.end_guest(guest);
            }
        }
        Ill::PauseGuest => {
            if let Some(guest) = any_guest(world, &computer).await {
                say(world, format!("the guest {guest} on {name} is paused, for its disk is full"));
                computer.hypervisor.pause_guest(guest, Pause::Storage { room: false });
            }
        }
    }
}

async fn storm(world: &World, change: impl FnOnce(&mut Storm, u32), what: &str) {
    let much = u32::try_from(world.pick(3..30)).unwrap_or(3);
    let mut storm = Storm::default();
    change(&mut storm, much);
    let time = world.millis(3000..30_000);
    say(world, format!("{what} for {time:?}"));
    world.set_storm(storm);
    sleep(time).await;
    world.set_storm(Storm::default());
    say(world, "that is over");
}

fn any_computer(world: &World) -> &Arc<Computer> {
    &world.computers[usize::try_from(world.pick(0..world.computers.len() as u64)).unwrap_or(0)]
}

fn start_later(world: &Arc<World>, computer: &Arc<Computer>) {
    let (world, computer, after) = (Arc::clone(world), Arc::clone(computer), world.millis(300..30_000));
    tokio::spawn(async move {
        sleep(after).await;
        if !computer.is_up() {
            computer.start(&world);
        }
    });
}

/// The instances that a computer has, in order.
pub(crate) async fn guests(world: &World, computer: &Computer) -> Vec<InstanceId> {
    let Ok(listed) = computer.hypervisor.list().await else { return Vec::new() };
    let sealed = world.judge(|referee, _| referee.sealed_guests().clone());
    let mut guests: Vec<InstanceId> = listed.into_keys().filter(|guest| !sealed.contains(guest)).collect();
    guests.sort_unstable();
    guests
}

/// One of them, which is in for trouble.
async fn any_guest(world: &World, computer: &Computer) -> Option<InstanceId> {
    let guests = guests(world, computer).await;
    let count = guests.len() as u64;
    let guest = (count > 0).then(|| guests[usize::try_from(world.pick(0..count)).unwrap_or(0)])?;
    world.judge(|referee, _| referee.disturbed(guest));
    Some(guest)
}

async fn disturb_all(world: &World, computer: &Computer) {
    for guest in guests(world, computer).await {
        world.judge(|referee, _| referee.disturbed(guest));
    }
}

/// Everything is as it should be again, and everybody is up.
pub(crate) async fn heal(world: &Arc<World>) {
    say(world, "heals everything");
    world.set_storm(Storm::default());
    world.mend_cuts();
    world.store.faults().set_reachable(true);
    for number in 0..world.replicas.count() {
        if !world.replicas.is_up(number) {
            world.replicas.start(world, number);
        }
    }
    for computer in &world.computers {
        if !computer.is_up() {
            computer.start(world);
        }
    }
    // Calls that are late by the most come till then.
    sleep(Duration::from_secs(95)).await;
}

//! What goes wrong. Each history has its own selection of ills, so that some are rich in one and without another.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{End, Pause};
use ec_model::InstanceId;
use ec_store::Backup;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    acts::{self, say},
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

async fn harm(world: &Arc<World>, ill: Ill, backup: &mut Option<Backup>) {
    let faults = world.store.faults();
    let computer = Arc::clone(any_computer(world));
    let name = Actor::Agent(computer.node, 0);
    match ill {
        Ill::KillAgent => {
            if acts::kill_agent(world, &computer) {
                start_later(world, &computer);
            }
        }
        Ill::StopAgent => acts::stop_agent(world, &computer),
        Ill::CrashHost => {
            acts::crash_host(world, &computer).await;
            start_later(world, &computer);
        }
        Ill::KillReplica => {
            let number = usize::try_from(world.pick(0..world.replicas.count() as u64)).unwrap_or(0);
            if acts::kill_replica(world, number) {
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
        Ill::BreakWatches => acts::break_watches(world),
        Ill::SilenceWatches => acts::silence_watches(world),
        Ill::Compact => acts::compact(world).await,
        Ill::StoreAway => {
            let time = world.millis(1000..40_000);
            say(world, format!("takes etcd away for {time:?}"));
            faults.set_reachable(false);
            sleep(time).await;
            faults.set_reachable(true);
            say(world, "gives etcd back");
        }
        Ill::StoreRestart => acts::restart_store(world),
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
            None => *backup = Some(acts::back_up(world)),
            Some(older) => acts::restore(world, &older),
        },
        Ill::LoseDomain => {
            if let Some(guest) = any_guest(world, &computer).await {
                acts::undefine(world, &computer, guest);
            }
        }
        Ill::LoseDisk => {
            if let Some(guest) = any_guest(world, &computer).await {
                acts::delete_disk(world, &computer, guest);
            }
        }
        Ill::EndGuest => {
            if let Some(guest) = any_guest(world, &computer).await {
                acts::end_guest(world, &computer, guest, End::ByGuest);
            }
        }
        Ill::PauseGuest => {
            if let Some(guest) = any_guest(world, &computer).await {
                acts::pause_guest(world, &computer, guest, Pause::Storage { room: false });
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

/// One of the instances of a computer, which is in for trouble.
async fn any_guest(world: &World, computer: &Computer) -> Option<InstanceId> {
    let guests = acts::guests(world, computer).await;
    let count = guests.len() as u64;
    (count > 0).then(|| guests[usize::try_from(world.pick(0..count)).unwrap_or(0)])
}

/// Everything is as it should be again, and everybody is up.
pub(crate) async fn heal(world: &Arc<World>) {
    acts::mend(world);
    // Calls that are late by the most come till then.
    sleep(Duration::from_secs(95)).await;
}

//! What goes wrong. Each history has its own selection of ills, so that some are rich in one and without another.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{End, Pause, RunState};
use ec_model::{InstanceId, State, Status, decode};
use ec_store::{Backup, Store};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    acts::{self, say},
    life::Life,
    node::Computer,
    operator,
    replica::ADMIN,
    snag::Fate,
    way::Way,
    world::{Actor, Storm, World},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ill {
    KillAgent,
    StopAgent,
    KillReplica,
    KillController,
    StoreStorm,
    PlacementStorm,
    HypervisorStorm,
    Refusals,
    Slowness,
    BreakWatches,
    SilenceWatches,
    Deafen,
    Compact,
    StoreAway,
    StoreRestart,
    Cut,
    Sleep,
    Clone,
    Restore,
    LoseDomain,
    LoseDisk,
    LoseRecord,
    LoseStatus,
    LoseRequest,
    LoseSign,
    LoseClaim,
    EndGuest,
    PauseGuest,
    CrashHost,
    FillHost,
    StepClock,
    Hand,
    Revoke,
    Forget,
    GarbleRecord,
    KillAtCall,
}

const ALL: [Ill; 34] = [
    Ill::KillAgent,
    Ill::StopAgent,
    Ill::KillReplica,
    Ill::KillController,
    Ill::StoreStorm,
    Ill::PlacementStorm,
    Ill::HypervisorStorm,
    Ill::Refusals,
    Ill::Slowness,
    Ill::BreakWatches,
    Ill::SilenceWatches,
    Ill::Deafen,
    Ill::Compact,
    Ill::StoreAway,
    Ill::StoreRestart,
    Ill::Cut,
    Ill::Sleep,
    Ill::Clone,
    Ill::Restore,
    Ill::LoseDomain,
    Ill::LoseDisk,
    Ill::LoseRecord,
    Ill::LoseStatus,
    Ill::LoseRequest,
    Ill::LoseSign,
    Ill::LoseClaim,
    Ill::EndGuest,
    Ill::PauseGuest,
    Ill::CrashHost,
    Ill::FillHost,
    Ill::StepClock,
    Ill::Hand,
    Ill::Revoke,
    Ill::Forget,
];

/// The ills of a history: about a third of all, of those that have few consequences more often.
pub(crate) fn selection(world: &World) -> Vec<Ill> {
    let often = |ill: Ill| match ill {
        // After a restore the referee can say little, so most histories go without.
        Ill::Restore if world.shares_storage() => 35,
        Ill::Restore => 18,
        // Room may be sold twice till its node has noticed.
        Ill::LoseClaim | Ill::Forget => 8,
        Ill::StepClock => 10,
        Ill::LoseDisk
        | Ill::LoseDomain
        | Ill::LoseRecord
        | Ill::LoseStatus
        | Ill::LoseRequest
        | Ill::Refusals
        | Ill::EndGuest
        | Ill::PauseGuest
        | Ill::Hand
        | Ill::Revoke => 15,
        Ill::KillAgent | Ill::StoreStorm => 60,
        _ => 35,
    };
    // Where there is no memory to count a guest with, it waits for that, and the referee reckons with processors alone.
    let is_counted_anew = |ill: &Ill| matches!(ill, Ill::Restore | Ill::LoseClaim);
    let some = ALL.into_iter().filter(|ill| world.chance(often(*ill)));
    let some = some.filter(|ill| !(world.is_tight() && is_counted_anew(ill)));
    // In no other histories, so that those are what they were.
    let some = some.chain(world.is_garbled().then_some(Ill::GarbleRecord));
    let some = some.chain(world.is_sudden().then_some(Ill::EndGuest));
    // More than once, since it hits only who is at something.
    some.chain(std::iter::repeat_n(Ill::KillAtCall, if world.is_sudden() { 8 } else { 0 })).collect()
}

/// Does harm until `done`.
pub(crate) async fn rage(world: Arc<World>, ills: Vec<Ill>, done: CancellationToken) {
    let mut backup: Option<Backup> = None;
    while !done.is_cancelled() {
        sleep(world.millis(500..12_000)).await;
        if !done.is_cancelled()
            && let Some(ill) = world.one_of(&ills)
        {
            harm(&world, *ill, &mut backup).await;
        }
    }
}

async fn harm(world: &Arc<World>, ill: Ill, backup: &mut Option<Backup>) {
    let faults = world.store.faults();
    let computer = Arc::clone(any_computer(world));
    let name = Actor::Agent(computer.node, 0);
    let much = u32::try_from(world.pick(3..30)).unwrap_or(3);
    match ill {
        Ill::KillAgent => {
            if acts::kill_agent(world, &computer) {
                start_later(world, &computer);
            }
        }
        Ill::KillAtCall => kill_at_call(world, &computer),
        Ill::StopAgent => acts::stop_agent(world, &computer),
        Ill::CrashHost => {
            let computer = with_a_halted_guest(world).filter(|_| world.chance(50)).unwrap_or(computer);
            acts::crash_host(world, &computer).await;
            start_later(world, &computer);
        }
        Ill::FillHost => {
            acts::trouble(world, &computer, true);
            let (world, after) = (Arc::clone(world), world.millis(500..60_000));
            tokio::spawn(async move {
                sleep(after).await;
                acts::trouble(&world, &computer, false);
            });
        }
        Ill::StepClock => {
            let seconds = i64::try_from(world.pick(1..40)).unwrap_or(1);
            let (seconds, whither) = if world.chance(70) { (-seconds, "back") } else { (seconds, "forward") };
            say(world, format!("sets all clocks {whither} by {} s", seconds.abs()));
            world.step_clock(seconds);
        }
        Ill::KillController => {
            let number = any_number(world, world.controllers.count());
            if world.controllers.kill(number) {
                say(world, format!("kills {}", Actor::Controller(number)));
                let (world, after) = (Arc::clone(world), world.millis(500..20_000));
                tokio::task::spawn_local(async move {
                    sleep(after).await;
                    if !world.controllers.is_up(number) {
                        world.controllers.start(&world, number);
                    }
                });
            }
        }
        Ill::KillReplica => {
            let number = any_number(world, world.replicas.count());
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
        Ill::StoreStorm => storm(world, |storm| &mut storm.etcd, much, "the way to etcd is bad"),
        Ill::PlacementStorm => {
            storm(world, |storm| &mut storm.placement, much, "the way to placement is bad");
        }
        Ill::HypervisorStorm => {
            storm(world, |storm| &mut storm.hypervisor, much, "the hypervisors are troubled");
        }
        Ill::Refusals => storm(world, |storm| &mut storm.refusals, 10, "the hypervisors refuse"),
        Ill::Slowness => storm(world, |storm| &mut storm.slow, much, "everything is slow"),
        Ill::BreakWatches => acts::break_watches(world),
        Ill::SilenceWatches => acts::silence_watches(world),
        Ill::Deafen => acts::deafen(world, &computer),
        Ill::Compact => acts::compact(world).await,
        Ill::StoreAway => {
            let time = world.millis(1000..40_000);
            say(world, format!("takes etcd away for {time:?}"));
            faults.set_reachable(false);
            let world = Arc::clone(world);
            tokio::spawn(async move {
                sleep(time).await;
                world.store.faults().set_reachable(true);
                say(&world, "gives etcd back");
            });
        }
        Ill::StoreRestart => acts::restart_store(world),
        Ill::Cut => {
            let (who, _) = any_program(world, &computer);
            cut(world, who);
        }
        Ill::Sleep => {
            if let (who, Some(life)) = any_program(world, &computer) {
                put_to_sleep(world, who, life);
            }
        }
        Ill::Clone => {
            let clone = world.clones.iter().find(|clone| clone.node == computer.node).cloned();
            if let Some(clone) = clone.filter(|clone| !clone.is_up()) {
                say(world, format!("has a clone of {name} started"));
                clone.keep_down(false);
                clone.start(world);
                let after = world.millis(1000..50_000);
                tokio::spawn(async move {
                    sleep(after).await;
                    clone.keep_down(true);
                });
            }
        }
        Ill::Restore => match backup.take() {
            None => *backup = Some(acts::back_up(world)),
            Some(older) => {
                if world.chance(40) {
                    start_some_anew(world).await;
                }
                // Who does not see it happen comes back when the other history is as long as its own.
                match any_program(world, &computer) {
                    (who, _) if world.chance(40) => cut(world, who),
                    (who, Some(life)) if world.chance(40) => put_to_sleep(world, who, life),
                    _ => {}
                }
                acts::restore(world, &older);
                *backup = world.chance(30).then_some(older);
                // Who sees what an older etcd asks for deletes some of it by hand.
                while world.chance(50) {
                    sleep(world.millis(1..4000)).await;
                    let computer = Arc::clone(any_computer(world));
                    if let Some(guest) = any_guest(world, &computer).await {
                        acts::delete_request(world, &computer, guest, world.chance(50)).await;
                    }
                }
            }
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
        Ill::LoseRecord => {
            if let Some(guest) = any_guest(world, &computer).await {
                computer.lose_record(guest);
                world.judge(|referee, _| referee.record_lost(guest));
                if world.chance(50) {
                    say(world, format!("deletes the record of {guest} on {name}"));
                } else {
                    say(world, format!("deletes all that there is of {guest} on {name}"));
                    acts::disturb_holders(world, &computer, guest);
                    computer.hypervisor.undefine(guest);
                    computer.hypervisor.end_guest(guest);
                    computer.hypervisor.delete_volumes(guest);
                    world.judge(|referee, _| referee.vanished(guest));
                }
            }
        }
        Ill::LoseStatus => {
            if let Some(guest) = any_guest(world, &computer).await {
                say(world, format!("deletes the status of {guest} on {name}"));
                let key = world.keys.status(computer.node, guest);
                world.judge(|referee, _| referee.status_lost(guest));
                world.store.txn(ec_store::Txn::new().delete(key)).await.ok();
                if world.chance(20) {
                    say(world, format!("deletes the record of {guest} on {name}"));
                    computer.lose_record(guest);
                    world.judge(|referee, _| referee.record_lost(guest));
                }
            }
        }
        Ill::LoseRequest => {
            if let Some(guest) = any_guest(world, &computer).await {
                // With those of its volumes, now and then.
                for volume in acts::volumes_of(world, guest) {
                    if world.chance(40) {
                        acts::delete_request(world, &computer, volume, world.chance(50)).await;
                    }
                }
                match world.chance(30) {
                    true => acts::delete_instance(world, guest).await,
                    false => acts::delete_request(world, &computer, guest, world.chance(50)).await,
                }
            }
        }
        Ill::LoseSign => {
            let keys = &world.keys;
            let signs = [keys.agent(computer.node), keys.alive(computer.node), keys.node(computer.node)];
            acts::delete_key(world, world.among(&signs.each_ref().map(String::as_str))).await;
        }
        Ill::LoseClaim => {
            if let Some(guest) = any_guest(world, &computer).await
                && let Ok(placement) = Way::client(world, Actor::Nemesis, ADMIN, &Life::new())
            {
                say(world, format!("deletes the claim of {guest}"));
                world.judge(|referee, _| referee.claim_lost(guest));
                placement.release(guest).await.ok();
                match world.pick(0..6) {
                    0 => {
                        acts::crash_host(world, &computer).await;
                        start_later(world, &computer);
                    }
                    1 => end_somehow(world, &computer, guest),
                    2 | 3 => {
                        acts::take_room(world, &computer, world.millis(20_000..120_000)).await;
                        // It looks what is claimed when it begins.
                        start_anew(world, &computer);
                    }
                    _ => {}
                }
            }
        }
        Ill::EndGuest => {
            if let Some(guest) = any_guest(world, &computer).await {
                end_somehow(world, &computer, guest);
                if world.chance(if world.is_sudden() { 60 } else { 20 }) {
                    crash_on(world, &computer, guest);
                }
            }
        }
        Ill::GarbleRecord => {
            if let Some(guest) = any_guest(world, &computer).await
                && computer.garble_record(guest)
            {
                say(world, format!("garbles the record of {guest} on {name}"));
                world.judge(|referee, _| referee.record_garbled(guest));
                acts::disturb_holders(world, &computer, guest);
                let (world, after) = (Arc::clone(world), world.millis(5_000..120_000));
                tokio::spawn(async move {
                    sleep(after).await;
                    say(&world, format!("mends the records on {name}"));
                    acts::mend_records(&world, &computer);
                });
            }
        }
        Ill::Hand => {
            if let Some(guest) = any_guest(world, &computer).await {
                acts::handle(world, &computer, guest).await;
            }
        }
        Ill::Revoke => {
            operator::revoke(world, &computer).await;
            let (world, after) = (Arc::clone(world), world.millis(5_000..120_000));
            tokio::spawn(async move {
                sleep(after).await;
                operator::let_in(&world, &computer).await;
            });
        }
        Ill::Forget => {
            if world.computers.len() > 1 && acts::kill_agent(world, &computer) {
                let (forgets, gone) = (Arc::clone(world), Arc::clone(&computer));
                tokio::task::spawn_local(async move { operator::forget(&forgets, &gone).await });
                let (world, after) = (Arc::clone(world), world.millis(35_000..90_000));
                tokio::spawn(async move {
                    sleep(after).await;
                    if !computer.is_up() {
                        computer.start(&world);
                    }
                });
            }
        }
        Ill::PauseGuest => {
            if let Some(guest) = any_guest(world, &computer).await {
                acts::pause_guest(world, &computer, guest, Pause::Storage { room: false });
                if world.chance(60) {
                    let (world, computer, after) =
                        (Arc::clone(world), Arc::clone(&computer), world.millis(500..40_000));
                    tokio::spawn(async move {
                        sleep(after).await;
                        let seen = crate::referee::observed(&computer, guest).and_then(|seen| seen.domain);
                        if seen == Some(RunState::Paused(Pause::Storage { room: false })) {
                            say(&world, format!("there is room for {guest} again"));
                            computer.hypervisor.pause_guest(guest, Pause::Storage { room: true });
                        }
                    });
                }
            }
        }
    }
}

/// What an agent does seldom, and should not do twice.
const SELDOM: [&str; 12] = [
    "hypervisor CreateSuccessor",
    "hypervisor ReplaceOverlay",
    "hypervisor CreateRescue",
    "hypervisor DropRescue",
    "hypervisor Redefine",
    "hypervisor Grow",
    "hypervisor SetVolumes",
    "hypervisor HandOver",
    "hypervisor PowerOff",
    "hypervisor Save",
    "hypervisor Start",
    "hypervisor Destroy",
];

/// Kills an agent at one of the next things that it does: when it is done, and nothing is noted of it, or just before.
fn kill_at_call(world: &Arc<World>, computer: &Arc<Computer>) {
    let who = Actor::Agent(computer.node, 0).to_string();
    let fate = if world.chance(70) { Fate::KillsAfterwards } else { Fate::Kills };
    let call = match world.pick(0..10) {
        // Any call.
        0..2 => "",
        // Or one that makes something of a guest.
        2..4 => "hypervisor ",
        _ => world.among(&SELDOM),
    };
    let before = if SELDOM.contains(&call) { 0 } else { world.index(6) };
    if before > 0 {
        world.snag(who.clone(), call, Fate::Arrives, before);
    }
    world.snag(who, call, fate, 1);
    let (world, computer) = (Arc::clone(world), Arc::clone(computer));
    tokio::spawn(async move {
        for _ in 0..300 {
            sleep(Duration::from_secs(1)).await;
            if !computer.is_up() {
                return start_later(&world, &computer);
            }
        }
    });
}

/// A guest that crashes soon whenever it was started again, so many times.
fn crash_on(world: &Arc<World>, computer: &Arc<Computer>, guest: InstanceId) {
    let (world, computer, mut times) = (Arc::clone(world), Arc::clone(computer), world.pick(3..14));
    tokio::spawn(async move {
        for _ in 0..120 {
            sleep(world.millis(500..3000)).await;
            // Whoever starts it again would be at it then.
            if world.judge(|referee, _| referee.is_resting()) {
                return;
            }
            let runs = crate::referee::observed(&computer, guest).and_then(|seen| seen.domain);
            if runs == Some(RunState::Running) {
                acts::end_guest(&world, &computer, guest, End::Crashed);
                times -= 1;
            }
            if times == 0 {
                return;
            }
        }
    });
}

/// Something goes wrong more often for a while; other things may go wrong meanwhile.
fn storm(world: &Arc<World>, field: fn(&mut Storm) -> &mut u32, much: u32, what: &'static str) {
    let time = world.millis(3000..30_000);
    say(world, format!("{what} for {time:?}"));
    world.change_storm(|storm| *field(storm) = much);
    let world = Arc::clone(world);
    tokio::spawn(async move {
        sleep(time).await;
        world.change_storm(|storm| *field(storm) = 0);
    });
}

fn any_number(world: &World, count: usize) -> usize {
    if count < 2 { 0 } else { world.index(count) }
}

/// A program that goes on for long, and its life where it has one now: this computer's agent most often.
fn any_program(world: &World, computer: &Computer) -> (Actor, Option<Life>) {
    let (replicas, controllers) = (world.replicas.count(), world.controllers.count());
    match world.pick(0..10) {
        0..3 => {
            let number = any_number(world, replicas);
            (Actor::Replica(number), world.replicas.life(number))
        }
        3 if controllers > 0 => {
            let number = any_number(world, controllers);
            (Actor::Controller(number), world.controllers.life(number))
        }
        _ => (Actor::Agent(computer.node, 0), computer.life()),
    }
}

fn cut(world: &World, who: Actor) {
    let time = world.millis(1000..40_000);
    say(world, format!("cuts {who} off from etcd for {time:?}"));
    world.cut(who, time);
}

/// Nothing of it goes on for a while, and then all does, as if nothing had been.
fn put_to_sleep(world: &Arc<World>, who: Actor, life: Life) {
    let time = world.millis(1000..60_000);
    say(world, format!("puts {who} to sleep for {time:?}"));
    life.sleep();
    let world = Arc::clone(world);
    tokio::spawn(async move {
        sleep(time).await;
        life.wake();
        say(&world, format!("wakes {who}"));
    });
}

pub(crate) fn any_computer(world: &World) -> &Arc<Computer> {
    &world.computers[world.index(world.computers.len())]
}

/// A computer of which a guest is told to be halted.
fn with_a_halted_guest(world: &World) -> Option<Arc<Computer>> {
    let is_halted = |computer: &&Arc<Computer>| {
        let statuses = world.store.content(&world.keys.statuses(computer.node)).pairs;
        let mut told = statuses.iter().filter_map(|pair| decode::<Status>(&pair.value).ok());
        told.any(|status| status.state == State::Paused)
    };
    world.computers.iter().find(is_halted).cloned()
}

fn start_anew(world: &Arc<World>, computer: &Arc<Computer>) {
    if acts::kill_agent(world, computer) {
        computer.start(world);
    }
}

/// Some agents are started anew, and know what they find.
async fn start_some_anew(world: &Arc<World>) {
    for computer in &world.computers {
        if world.chance(60) {
            start_anew(world, computer);
        }
    }
    sleep(world.millis(3000..20_000)).await;
}

fn end_somehow(world: &Arc<World>, computer: &Arc<Computer>, guest: InstanceId) {
    let why = world.among(&[End::ByGuest, End::ByHand, End::Crashed]);
    acts::end_guest(world, computer, guest, why);
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
    let guest = *world.one_of(&guests)?;
    world.judge(|referee, _| referee.disturbed(guest));
    Some(guest)
}

//! Snapshots: of all disks of a guest at one moment, and the guest as it was then, whatever breaks meanwhile.

use std::time::Duration;

use ec_hypervisor::{Hypervisor, Operation};
use ec_model::{End, Instance, InstanceId, Restart, State, decode};
use ec_plan::verbs::Verb;

use super::{
    Scenario, Stage,
    power::with_policy,
    stage::Sight,
    volumes::{come, given, has, near},
};
use crate::snag::Fate;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "snapshot-before-an-attachment",
        "a hypervisor refuses an attachment once: until it is tried again a snapshot of the guest is refused, and then all of its disks are copied",
        |stage| Box::pin(before_attachment(stage)),
    ),
    Scenario::new(
        "snapshot-restored-with-kills",
        "the command that restores a snapshot is killed after each of its steps, and said again until it ends: the guest runs as before, and nothing stays locked",
        |stage| Box::pin(restored_with_kills(stage)),
    ),
    Scenario::new(
        "snapshot-restored-while-somebody-starts-the-guest",
        "a guest that is stopped is to be started while it is being restored, and after a restore that broke off: it is stopped for that, and runs in the end",
        |stage| Box::pin(restored_while_started(stage)),
    ),
    Scenario::new(
        "snapshot-restored-of-a-guest-that-ended",
        "a guest ends by itself, once for good, and once to be started again by its policy: nobody starts it while it is restored, and then it is as it was",
        |stage| Box::pin(restored_after_its_end(stage)),
    ),
    Scenario::new(
        "snapshots-restored-at-once",
        "two people restore a guest, each from another snapshot: one of them does, the other is told so, and nothing stays locked",
        |stage| Box::pin(restored_at_once(stage)),
    ),
    Scenario::new(
        "snapshot-of-a-rescued-guest",
        "a guest with a volume is rescued: a snapshot of all its disks is refused at once, and made when it runs from its own again",
        |stage| Box::pin(of_rescued(stage)),
    ),
];

async fn of_rescued(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Rescue(None)).await.is_ok(), "it is rescued").await;
    let refused = stage.user(1).snapshots(guest).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("rescue disk")), "it is told why not").await;
    let left = stage.user(1).list().await.map(|all| all.len());
    stage.demand(left == Ok(1), "nothing is left of it").await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    snapshot_of(&stage, guest).await;
}

async fn before_attachment(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    stage.snag("n1", "hypervisor SetVolumes i1", Fate::IsRefused(0));
    stage.demand(stage.user(1).attaches(volume, guest).await.is_err(), "it is told that it has it not").await;
    let refused = stage.user(1).snapshots(guest).await;
    stage.demand(refused.is_err(), "one moment of both cannot be had").await;
    stage.until(guest, "well", |is| is.is_well() && has(&stage, guest, volume)).await;
    snapshot_of(&stage, guest).await;
}

/// A guest with a volume, and a snapshot of both.
async fn guest_with_snapshot(stage: &Stage) -> (InstanceId, InstanceId) {
    let guest = stage.ready("web").await;
    let volume = near(stage, guest).await;
    given(stage, volume, guest).await;
    (guest, snapshot_of(stage, guest).await)
}

async fn snapshot_of(stage: &Stage, guest: InstanceId) -> InstanceId {
    let asked = stage.user(1).snapshots(guest).await;
    come(stage, asked).await
}

async fn unlocked(stage: &Stage, of: &[InstanceId]) {
    for instance in of {
        let record = stage.get(&stage.world.keys.instance(*instance));
        let record = record.and_then(|value| decode::<Instance>(&value).ok());
        stage.demand(record.is_some_and(|record| record.locked.is_none()), "it is not locked").await;
    }
}

async fn restored_with_kills(stage: Stage) {
    let (guest, copy) = guest_with_snapshot(&stage).await;
    let mut kills = 0;
    for steps in 1.. {
        // A call takes some of these: it is killed behind each of them.
        let time = Duration::from_millis(10) * steps;
        match tokio::time::timeout(time, stage.user(1).restores(copy)).await {
            Ok(Ok(())) => break,
            Ok(Err(why)) => stage.fail(why).await,
            Err(_) => kills += 1,
        }
        stage.pass(30).await;
    }
    stage.demand(kills > 20, "each step was the last of one").await;
    stage.until_well(guest).await;
    unlocked(&stage, &[guest, copy]).await;
}

async fn restored_at_once(stage: Stage) {
    let (guest, first) = guest_with_snapshot(&stage).await;
    let second = snapshot_of(&stage, guest).await;
    // Both find it running.
    let [one, other] = [stage.user(1), stage.user(2)];
    let (one, other) = tokio::join!(one.restores(first), other.restores(second));
    let told = [one, other].into_iter().filter_map(Result::err).collect::<Vec<_>>();
    stage.demand(told.len() == 1 && told[0].contains("being restored"), "one does, one is told").await;
    stage.until_well(guest).await;
    unlocked(&stage, &[guest, first, second]).await;
}

async fn restored_after_its_end(stage: Stage) {
    for (restart, runs) in [(Restart::No, false), (Restart::Always, true)] {
        let guest = with_policy(&stage, restart).await;
        let volume = near(&stage, guest).await;
        given(&stage, volume, guest).await;
        let copy = snapshot_of(&stage, guest).await;
        // Each time in a row its policy waits longer.
        for _ in 0..if runs { 4 } else { 1 } {
            stage.until_well(guest).await;
            stage.end_guest(1, guest, End::ByGuest);
            stage.until(guest, "stopped", |is| is.is(State::Stopped)).await;
        }
        let starts = || stage.node(1).hypervisor.calls(Operation::Start);
        let before = starts();
        stage.demand(stage.user(1).restores(copy).await.is_ok(), "it is restored").await;
        unlocked(&stage, &[guest, copy]).await;
        match runs {
            true => stage.until_well(guest).await,
            false => stage.stays(guest, 120, "stopped", |is| is.is(State::Stopped) && !is.runs()).await,
        }
        stage
            .demand(starts() == before + u64::from(runs), "it is started when all is restored, or not")
            .await;
        stage.destroyed(guest).await;
        stage.until_gone(guest).await;
        for disk in [copy, volume] {
            stage.demand(stage.user(1).deletes(disk).await.is_ok(), "it is deleted").await;
            stage.until_gone(disk).await;
        }
    }
}

async fn restored_while_started(stage: Stage) {
    let (guest, copy) = guest_with_snapshot(&stage).await;
    let stopped = |is: &Sight| is.is(State::Stopped);
    let stop = async || {
        stage.user(1).asks(guest, &Verb::Stop(0)).await;
        stage.until(guest, "stopped", stopped).await;
    };
    stop().await;
    // Its agent has not heard of it when the restore looks.
    stage.cut(stage.agent(1), 5);
    stage.user(2).asks(guest, &Verb::Start).await;
    stage.demand(stage.user(1).restores(copy).await.is_ok(), "it is restored").await;
    stage.until_well(guest).await;

    stop().await;
    // Killed with the guest locked; then somebody starts it on its host, and locked nobody stops it.
    stage.snag("u1", "put requests/n1/i2", Fate::Kills);
    stage.demand(stage.user(1).restores(copy).await.is_err(), "it is killed").await;
    stage.demand(stage.node(1).hypervisor.start(guest).await.is_ok(), "it starts").await;
    stage.until(guest, "up by hand", |is| is.is(State::Active)).await;
    stage.demand(stage.user(1).restores(copy).await.is_ok(), "it is restored").await;
    stage.until_well(guest).await;
    unlocked(&stage, &[guest, copy]).await;
}

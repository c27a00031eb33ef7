//! Snapshots: of all disks of a guest at one moment, and the guest as it was then, whatever breaks meanwhile.

use std::time::Duration;

use ec_hypervisor::{Hypervisor, HypervisorError, Operation};
use ec_model::{CopyOf, End, ImageRef, Instance, InstanceId, Restart, State, Workload, decode};
use ec_plan::{status::NOT_WHOLE, verbs::Verb};

use super::{
    Scenario, Stage,
    power::with_policy,
    stage::Sight,
    volumes::{come, given, has, near},
};
use crate::{
    acts::volumes_of, door::content, fashion::resize, referee::observed, snag::Fate, volumes::Order,
};

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
        "two people restore a guest, each from another snapshot, and then both from one: one of them does, the other is told so, and nothing stays locked",
        |stage| Box::pin(restored_at_once(stage)),
    ),
    Scenario::new(
        "snapshot-of-a-rescued-guest",
        "a guest with a volume is rescued: a snapshot of all its disks is refused at once, and made when it runs from its own again",
        |stage| Box::pin(of_rescued(stage)),
    ),
    Scenario::new(
        "snapshot-before-a-rebuild",
        "a guest is to have a new disk, and then to be destroyed, while a copy of its disk is being made: that is made first, whatever is killed meanwhile",
        |stage| Box::pin(before_rebuild(stage)),
    ),
    Scenario::new(
        "copy-before-a-delete",
        "a volume is to be made anew, to go to another node, and then to be deleted, each while a copy of it is being made: that is made first",
        |stage| Box::pin(before_delete(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "guests-that-are-to-be-copies-of-each-other",
        "each of two guests is to have a copy of the other's disk as its own: who wished it first has it first, and neither waits for ever",
        |stage| Box::pin(of_each_other(stage)),
    ),
    Scenario::new(
        "destroy-behind-a-copy-that-fails",
        "a guest is to be destroyed while a copy of its disk is being made, which fails, or is deleted: it is destroyed",
        |stage| Box::pin(behind_failure(stage)),
    ),
    Scenario::new(
        "snapshot-restored-of-what-was-lost",
        "somebody deletes the disks of a guest and of its volume, once under the guest and once when it is stopped: both are restored, and it runs again, or does \
         not",
        |stage| Box::pin(restored_of_lost(stage)),
    ),
    Scenario::new(
        "snapshot-lost-while-restored",
        "a snapshot of a guest and its volume is restored before its node notices that it is gone: it is told so, and what unlocks and starts the guest",
        |stage| Box::pin(lost_while_restored(stage, true)),
    ),
    Scenario::new(
        "snapshot-that-loses-a-disk-while-restored",
        "the same where only its copy of the volume is gone",
        |stage| Box::pin(lost_while_restored(stage, false)),
    ),
    Scenario::new(
        "snapshot-not-restored",
        "a guest is resized and not confirmed, or is stopped and rescued, or somebody locked its volume: its restore is refused with nothing changed, and done when that is over; and \
         one of a snapshot that lost one of its disks",
        |stage| Box::pin(not_restored(stage)),
    ),
];

/// What takes so long that whatever comes next comes before its end.
const LONG: Duration = Duration::from_secs(60);

async fn asked_for(stage: &Stage, guest: InstanceId) -> InstanceId {
    match stage.user(1).snapshots(guest).await {
        Ok(copy) => copy,
        Err(why) => stage.fail(format!("it was not asked for: {why}")).await,
    }
}

async fn before_rebuild(stage: Stage) {
    let guest = stage.ready("web").await;
    let hypervisor = &stage.node(1).hypervisor;
    let replaced = || hypervisor.effects(Operation::ReplaceOverlay, guest);
    hypervisor.set_latency(Operation::CreateVolume, LONG);
    hypervisor.set_latency(Operation::CreateSuccessor, Duration::from_secs(5));
    let copy = asked_for(&stage, guest).await;
    stage.pass(5).await;
    stage.user(2).asks(guest, &Verb::Rebuild(None)).await;
    stage.until(guest, "told to wait", |is| is.is(State::Rebuilding) && is.says("is made before")).await;
    stage.kill(1);
    stage.start(1);
    stage.until(copy, "there", |is| is.is(State::Active) && is.volume).await;
    stage.demand(replaced() == 0, "the disk is the one that was copied").await;
    stage.until(guest, "well with a new disk", |is| is.is_well() && replaced() == 1).await;
    let copy = asked_for(&stage, guest).await;
    stage.pass(5).await;
    stage.destroyed(guest).await;
    stage.until(guest, "told to wait", |is| is.is(State::Destroying) && is.says("is made before")).await;
    stage.kill(1);
    stage.start(1);
    stage.until(copy, "there", |is| is.is(State::Active) && is.volume).await;
    stage.until_gone(guest).await;
}

async fn before_delete(stage: Stage) {
    let volume = near_nobody(&stage).await;
    let at = |number: usize| observed(stage.node(number), volume).is_some_and(|seen| seen.volume);
    let here = if at(1) { 1 } else { 2 };
    let other = stage.node(3 - here).node;
    let older = copied(&stage, volume).await;
    stage.until(older, "there", |is| is.is(State::Active)).await;
    for node in [1, 2] {
        stage.node(node).hypervisor.set_latency(Operation::CreateVolume, LONG);
    }
    let replaced = || {
        let of = |node: usize| stage.node(node).hypervisor.effects(Operation::ReplaceOverlay, volume);
        of(1) + of(2)
    };
    let copy = copied(&stage, volume).await;
    stage.pass(5).await;
    let of = CopyOf::disk(Workload::Volume, older);
    stage.demand(stage.user(2).remakes(volume, &of).await.is_ok(), "it is to be made anew").await;
    stage.until(copy, "there", |is| is.is(State::Active) && is.volume).await;
    stage.demand(replaced() == 0, "the disk is the one that was copied").await;
    stage.until(volume, "made anew", |is| is.is(State::Active) && replaced() == 1).await;
    stage.pass(10).await;
    let copy = copied(&stage, volume).await;
    stage.pass(5).await;
    stage.demand(stage.user(2).moves(volume, other).await.is_ok(), "it goes to the other node").await;
    stage.demand(stage.sight(copy).is(State::Active), "the copy was made before").await;
    // What came from another node is made anew as any.
    let copy = copied(&stage, volume).await;
    stage.until(copy, "there", |is| is.is(State::Active) && is.volume).await;
    for node in [1, 2] {
        stage.node(node).hypervisor.set_latency(Operation::CreateSuccessor, LONG);
    }
    let of = CopyOf::disk(Workload::Volume, copy);
    stage.demand(stage.user(2).remakes(volume, &of).await.is_ok(), "it is to be made anew").await;
    stage.pass(5).await;
    stage.demand(stage.user(2).deletes(copy).await.is_ok(), "what it is to be a copy of is deleted").await;
    stage.until(volume, "made anew", |is| is.is(State::Active) && replaced() == 2).await;
    stage.until_gone(copy).await;
    let copy = copied(&stage, volume).await;
    stage.pass(5).await;
    stage.demand(stage.user(2).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until(copy, "there", |is| is.is(State::Active) && is.volume).await;
    stage.until_gone(volume).await;
}

async fn near_nobody(stage: &Stage) -> InstanceId {
    let asked = stage.user(1).makes_volume(Order::SMALL).await;
    come(stage, asked).await
}

async fn copied(stage: &Stage, volume: InstanceId) -> InstanceId {
    match stage.user(1).makes_volume(Order { copy_of: Some(volume), ..Order::SMALL }).await {
        Ok(copy) => copy,
        Err(why) => stage.fail(format!("it was not asked for: {why}")).await,
    }
}

async fn of_each_other(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_latency(Operation::CreateSuccessor, LONG);
    let (user, other) = (stage.user(1), stage.user(2));
    let of = |guest| Verb::Rebuild(Some(ImageRef::copy_of(&CopyOf::disk(Workload::Machine, guest))));
    let verbs = [of(guests[1]), of(guests[0])];
    tokio::join!(user.asks(guests[0], &verbs[0]), other.asks(guests[1], &verbs[1]));
    for guest in guests {
        let replaced = || hypervisor.effects(Operation::ReplaceOverlay, guest);
        stage.until(guest, "well with a new disk", |is| is.is_well() && replaced() == 1).await;
    }
}

async fn behind_failure(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_latency(Operation::CreateVolume, LONG);
    let copies = [asked_for(&stage, guests[0]).await, asked_for(&stage, guests[1]).await];
    stage.pass(5).await;
    for guest in guests {
        stage.destroyed(guest).await;
        stage.until(guest, "told to wait", |is| is.says("is made before")).await;
    }
    stage.demand(stage.user(1).deletes(copies[0]).await.is_ok(), "the copy is deleted").await;
    stage.until_gone(guests[0]).await;
    stage.demand(stage.sight(guests[1]).runs(), "the other is there yet").await;
    hypervisor.fail_next(
        Operation::CreateVolume,
        HypervisorError::Failed { what: "copy it".into(), detail: "refused on request".into() },
    );
    stage.kill(1);
    stage.start(1);
    stage.until_gone(guests[1]).await;
}

async fn restored_of_lost(stage: Stage) {
    let (guest, copy) = guest_with_snapshot(&stage).await;
    let volume = volumes_of(&stage.world, guest)[0];
    let is_there = |is: &Sight| is.is(State::Active) && is.volume;
    for (runs, is_undefined) in [(true, true), (true, false), (false, false)] {
        if !runs {
            stage.demand(stage.user(1).wish(guest, &Verb::Stop(0)).await.is_ok(), "it is stopped").await;
        }
        if is_undefined {
            stage.kill(1);
            stage.end_guest(1, guest, End::Unknown);
            stage.undefine(1, guest);
        }
        for disk in [guest, volume] {
            stage.delete_disk(1, disk);
            stage.start(1);
            stage.until(disk, "an ERROR", |is| is.is(State::Error) && !is.volume).await;
        }
        let alone = stage.user(1).remakes(volume, &CopyOf::disk(Workload::Volume, copy)).await;
        let is_up = runs && !is_undefined;
        stage.demand(alone.is_ok() != is_up, "the volume alone is made anew while nobody is up").await;
        stage.demand(stage.user(1).restores(copy).await.is_ok(), "all is restored").await;
        stage.until(volume, "there", is_there).await;
        match runs {
            true => stage.until_well(guest).await,
            false => stage.until(guest, "stopped", |is| is.is(State::Stopped) && is.is_kept()).await,
        }
        unlocked(&stage, &[guest, copy]).await;
    }
    stage.stays(guest, 60, "stopped", |is| is.is(State::Stopped)).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Start).await.is_ok(), "it is started").await;
    stage.until_well(guest).await;
    stage.demand(has(&stage, guest, volume), "with its volume").await;
}

async fn lost_while_restored(stage: Stage, loses_all: bool) {
    let (guest, copy) = guest_with_snapshot(&stage).await;
    if loses_all {
        stage.delete_disk(1, copy);
    } else {
        stage.say("somebody deletes the copy of the volume that lies beside the snapshot");
        stage.node(1).hypervisor.delete_copy(copy, volumes_of(&stage.world, guest)[0]);
    }
    for helps in ["again", "unlock"] {
        let told = stage.user(1).restores(copy).await.err();
        stage.demand(told.is_some_and(|told| told.contains(helps)), "it is told what helps").await;
        stage.until(copy, "told to be lost", |is| is.is(State::Error) || is.says(NOT_WHOLE)).await;
    }
    stage.until(guest, "stopped", |is| is.is(State::Stopped)).await;
    for of in [guest, copy] {
        stage.demand(stage.user(1).wish(of, &Verb::Unlock).await.is_ok(), "it is unlocked").await;
    }
    stage.demand(stage.user(1).wish(guest, &Verb::Start).await.is_ok(), "it is started").await;
    stage.until_well(guest).await;
}

async fn not_restored(stage: Stage) {
    let (guest, copy) = guest_with_snapshot(&stage).await;
    let volume = volumes_of(&stage.world, guest)[0];
    let is_refused = async |why: &str| {
        let wished = || {
            [guest, volume].map(|of| stage.sight(of).request.as_ref().map(|request| request.rebuild.clone()))
        };
        let before = wished();
        let refused = stage.user(1).restores(copy).await.err();
        stage.demand(refused.is_some_and(|told| told.contains(why)), "it is told why not").await;
        stage.demand(wished() == before, "nothing is made anew").await;
    };
    let done = async |of, verb| {
        stage.demand(stage.user(1).wish(of, &verb).await.is_ok(), "it is done").await;
    };
    done(volume, Verb::Lock("mine".into())).await;
    is_refused("it is locked (mine)").await;
    unlocked(&stage, &[guest, copy]).await;
    stage.until_well(guest).await;
    done(volume, Verb::Unlock).await;

    done(guest, Verb::Stop(0)).await;
    done(guest, resize(2, 1)).await;
    is_refused("resized and not confirmed").await;
    done(guest, Verb::Confirm).await;

    // As when its guest powers itself off.
    done(guest, Verb::Rescue(None)).await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "stopped", |is| is.is(State::Stopped)).await;
    is_refused("it is rescued").await;
    done(guest, Verb::Unrescue).await;
    unlocked(&stage, &[guest, copy, volume]).await;
    let image = || {
        let record = content(&stage.world, &stage.world.keys.instance(guest));
        record.and_then(|pair| decode::<Instance>(&pair.value).ok()?.image().cloned())
    };
    let was = image();
    for _ in 0..2 {
        stage.demand(stage.user(1).restores(copy).await.is_ok(), "it is restored").await;
        stage.demand(was.is_some() && image() == was, "what it was made of is known").await;
    }
    unlocked(&stage, &[guest, copy, volume]).await;

    stage.say("somebody deletes the copy of the volume that lies beside the snapshot");
    stage.node(1).hypervisor.delete_copy(copy, volume);
    stage.until(copy, "told not to be whole", |is| is.is(State::Active) && is.says(NOT_WHOLE)).await;
    is_refused(NOT_WHOLE).await;
    unlocked(&stage, &[guest, copy, volume]).await;
    done(guest, Verb::Start).await;
    stage.until_well(guest).await;
    done(guest, Verb::Rebuild(Some(ImageRef::copy_of(&CopyOf::disk(Workload::Volume, copy))))).await;
    stage.until_well(guest).await;
}

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
    // Said once more it would cost what was written since.
    let [one, other] = [stage.user(1), stage.user(2)];
    let (one, other) = tokio::join!(one.restores(first), async {
        stage.pass(1).await;
        other.restores(first).await
    });
    let told = [one, other].into_iter().filter_map(Result::err).collect::<Vec<_>>();
    stage
        .demand(
            told.len() < 2 && told.iter().all(|told| told.contains("may have come to its end")),
            "one does",
        )
        .await;
    stage.until_well(guest).await;
    unlocked(&stage, &[guest, first]).await;
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

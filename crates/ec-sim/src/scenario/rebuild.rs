//! Guests that get a new disk, and disks that must not be made anew.

use std::time::Duration;

use ec_cloud::Verb;
use ec_hypervisor::{HypervisorError, Operation};
use ec_model::{CopyOf, ImageRef, InstanceId, State, Workload};

use super::{Scenario, Stage, stage::Sight};
use crate::{snag::Fate, volumes::Order};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "rebuild",
        "a user rebuilds a guest: it runs until its new disk is there, and is well with that; then one that is stopped, which stays so",
        |stage| Box::pin(rebuild(stage)),
    ),
    Scenario::new(
        "rebuild-with-kills",
        "the agent is killed in the midst of a rebuild, before and after each of its steps: it is done once for each wish",
        |stage| Box::pin(kills(stage)),
    ),
    Scenario::new(
        "rebuild-without-an-image",
        "a user rebuilds a guest from an image that there is not: the guest runs on with its old disk, and that is told",
        |stage| Box::pin(no_image(stage)),
    ),
    Scenario::new(
        "rebuild-in-an-older-etcd",
        "etcd is put back to before a rebuild was told, twice: a disk that the guest wrote since is not made anew again",
        |stage| Box::pin(older_etcd(stage)),
    ),
    Scenario::new(
        "rebuild-with-a-lost-record",
        "somebody deletes the node's record of a guest that was rebuilt, and then the status, too: its disk is not made anew again",
        |stage| Box::pin(lost_record(stage)),
    ),
    Scenario::new(
        "rebuild-behind-a-clock-that-went-back",
        "a user rebuilds a guest, all clocks go back by an hour, and the user rebuilds it again: it has another disk",
        |stage| Box::pin(clock_back(stage)),
    ),
    Scenario::new(
        "rebuild-of-a-lost-disk",
        "somebody deletes a guest's disk: a rebuild gives it another, and it is well",
        |stage| Box::pin(lost_disk(stage)),
    ),
    Scenario::new(
        "rebuild-on-a-host-that-lost-everything",
        "a host loses domain, disk and record of a guest, as one that is installed anew: a rebuild gives it a disk, and it is well",
        |stage| Box::pin(lost_everything(stage)),
    ),
    Scenario::new(
        "rebuild-of-another-copy",
        "the agent is killed when it has copied a volume for a rebuild, and another volume is wished then: the guest has a copy of that",
        |stage| Box::pin(another_copy(stage)),
    ),
    Scenario::new(
        "rebuild-wished-again-by-an-older-etcd",
        "the agent is killed when the new disk of a stopped guest is made, etcd put back to before that was wished, so that it goes, and then to one in \
         which it is wished: it is made again",
        |stage| Box::pin(wished_again(stage)),
    ),
    Scenario::new(
        "rebuild-after-a-record-was-mended",
        "somebody damages the node's record of a guest, and mends it before a rebuild: the guest has its new disk",
        |stage| Box::pin(mended(stage)),
    ),
    Scenario::new(
        "rebuild-unheard-of-and-overtaken",
        "nobody hears that a rebuild was written, and somebody else wishes another meanwhile: that is made, and the first is told that nobody knows",
        |stage| Box::pin(overtaken(stage)),
    ),
    Scenario::new(
        "rebuild-that-fails-when-another-is-wished",
        "a volume cannot be copied for a rebuild, and another is wished before that is known: the guest has a copy of that, and nothing is told to have failed",
        |stage| Box::pin(fails_late(stage)),
    ),
    Scenario::new(
        "rebuild-made-late",
        "a guest is destroyed while its new disk is made, which comes to its end after that: the disk goes, too",
        |stage| Box::pin(made_late(stage)),
    ),
];

fn replaced(stage: &Stage, guest: InstanceId) -> u64 {
    stage.node(1).hypervisor.effects(Operation::ReplaceOverlay, guest)
}

async fn rebuilt(stage: &Stage, guest: InstanceId) {
    let done = stage.user(1).wish(guest, &Verb::Rebuild(None)).await;
    stage.demand(done.is_ok(), "it is rebuilt").await;
}

async fn rebuild(stage: Stage) {
    let guest = stage.ready("web").await;
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    stage.demand(replaced(&stage, guest) == 1, "it has a new disk").await;
    let stopped = stage.user(1).wish(guest, &Verb::Stop(0)).await;
    stage.demand(stopped == Ok(Some(State::Stopped)), "it is stopped").await;
    rebuilt(&stage, guest).await;
    let kept = |is: &Sight| is.is(State::Stopped) && !is.runs() && is.is_kept();
    stage.until(guest, "STOPPED again", kept).await;
    stage.stays(guest, 60, "STOPPED", kept).await;
    stage.demand(replaced(&stage, guest) == 2, "it has another").await;
}

async fn kills(stage: Stage) {
    let guest = stage.ready("web").await;
    let size =
        async || ec_hypervisor::Hypervisor::size(&stage.node(1).hypervisor, guest).await.ok().flatten();
    let before = size().await;
    for call in [
        "put status/n1/i1 REBUILDING",
        "hypervisor CreateSuccessor",
        "hypervisor PowerOff",
        "hypervisor ReplaceOverlay",
        "put status/n1/i1 STARTING",
        "hypervisor Start",
    ] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            stage.snag("n1", call, fate);
            let user = stage.user(1);
            let (done, ()) = tokio::join!(user.wish(guest, &Verb::Rebuild(None)), async {
                stage.until_down(1).await;
                stage.pass(20).await;
                stage.start(1);
            });
            stage.demand(done.is_ok(), "it is rebuilt").await;
            stage.until_well(guest).await;
        }
    }
    stage.demand(before.is_some() && size().await == before, "its disk is as large as it was").await;
    stage.demand(replaced(&stage, guest) == 12, "each wish had one new disk").await;
}

async fn no_image(stage: Stage) {
    let guest = stage.ready("web").await;
    let none = ImageRef::at("file:///nonexistent.qcow2");
    let refused = stage.user(1).wish(guest, &Verb::Rebuild(Some(none))).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("has its old disk still")), "it is told why").await;
    stage.until_well(guest).await;
    stage.stays(guest, 120, "well", Sight::is_well).await;
    stage.demand(replaced(&stage, guest) == 0, "it has the disk that it had").await;
}

async fn older_etcd(stage: Stage) {
    let guest = stage.ready("web").await;
    let first = stage.back_up();
    stage.snag("n1", "hypervisor CreateSuccessor", Fate::Kills);
    let user = stage.user(1);
    let (_, wished) = tokio::join!(user.wish(guest, &Verb::Rebuild(None)), async {
        stage.until_down(1).await;
        let wished = stage.back_up();
        stage.start(1);
        wished
    });
    stage.until_well(guest).await;
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    let before = replaced(&stage, guest);
    for backup in [&wished, &first, &wished] {
        stage.restore(backup);
        stage.pass(60).await;
        stage.until_well(guest).await;
    }
    stage.demand(replaced(&stage, guest) == before, "nothing is made anew").await;
}

async fn lost_record(stage: Stage) {
    let guest = stage.ready("web").await;
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    stage.expects_trouble(guest);
    for with_status in [false, true] {
        stage.forget(guest, with_status).await;
        stage.until_well(guest).await;
        stage.stays(guest, 120, "well", Sight::is_well).await;
        stage.demand(replaced(&stage, guest) == 1, "nothing is made anew").await;
    }
}

async fn clock_back(stage: Stage) {
    let guest = stage.ready("web").await;
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    stage.say("all clocks jump back by an hour");
    stage.world.step_clock(-3600);
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    stage.demand(replaced(&stage, guest) == 2, "it has another").await;
}

async fn lost_disk(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.end_guest(1, guest, ec_hypervisor::End::ByGuest);
    stage.delete_disk(1, guest);
    stage.until(guest, "an ERROR", |is| is.is(State::Error)).await;
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
}

async fn lost_everything(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.end_guest(1, guest, ec_hypervisor::End::Unknown);
    stage.undefine(1, guest);
    stage.delete_disk(1, guest);
    stage.node(1).lose_record(guest);
    stage.start(1);
    stage.until(guest, "an ERROR", |is| is.is(State::Error)).await;
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    stage.demand(replaced(&stage, guest) == 1, "it has a new disk").await;
}

async fn wished_again(stage: Stage) {
    let guest = stage.ready("web").await;
    let stopped = stage.user(1).wish(guest, &Verb::Stop(0)).await;
    stage.demand(stopped == Ok(Some(State::Stopped)), "it is stopped").await;
    let before = stage.back_up();
    stage.snag("n1", "hypervisor ReplaceOverlay", Fate::Kills);
    stage.user(1).asks(guest, &Verb::Rebuild(None)).await;
    stage.until_down(1).await;
    let wished = stage.back_up();
    stage.restore(&before);
    stage.start(1);
    let kept = |is: &Sight| is.is(State::Stopped) && is.is_kept();
    stage.until(guest, "without a disk to come", |is| kept(is) && !is.successor).await;
    stage.demand(replaced(&stage, guest) == 0, "it has the disk that it had").await;
    stage.restore(&wished);
    stage.pass(60).await;
    stage.until(guest, "STOPPED", kept).await;
    stage.demand(replaced(&stage, guest) == 1, "it has a new disk").await;
}

async fn mended(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.expects_trouble(guest);
    stage.say("damages the record of i1 on n1");
    stage.demand(stage.node(1).garble_record(guest), "the record is damaged").await;
    stage.until(guest, "told to be without a record", |is| is.says("cannot be read")).await;
    stage.say("mends it");
    stage.node(1).mend_records();
    rebuilt(&stage, guest).await;
    stage.until_well(guest).await;
    stage.demand(replaced(&stage, guest) == 1, "it has a new disk").await;
}

/// Two volumes beside a guest, to be copied.
async fn two_to_copy(stage: &Stage, guest: InstanceId) -> [CopyOf; 2] {
    let mut copies = [guest; 2];
    for copy in &mut copies {
        let order = Order { near: Some(guest), ..Order::SMALL };
        match stage.user(1).makes_volume(order).await {
            Ok(volume) => *copy = volume,
            Err(_) => stage.fail("no volume was made").await,
        }
        stage.until(*copy, "there", |is| is.is(State::Active) && is.volume).await;
    }
    copies.map(|volume| CopyOf::disk(Workload::Volume, volume))
}

fn wishes_of(copies: &[CopyOf; 2]) -> [Verb; 2] {
    [0, 1].map(|number| Verb::Rebuild(Some(ImageRef::copy_of(&copies[number]))))
}

async fn is_copy(stage: &Stage, guest: InstanceId, of: &CopyOf) {
    let origin = stage.node(1).hypervisor.origin(guest);
    stage.demand(origin == Some(of.to_string()), "it has a copy of the one that was wished last").await;
}

async fn overtaken(stage: Stage) {
    let guest = stage.ready("web").await;
    let copies = two_to_copy(&stage, guest).await;
    let [first, second] = wishes_of(&copies);
    stage.snag("u1", "put requests/n1/i1 Active", Fate::LosesItsAnswer);
    let (one, other) = (stage.user(1), stage.user(2));
    let (told, done) = tokio::join!(one.wish(guest, &first), async {
        stage.pass(1).await;
        other.wish(guest, &second).await
    });
    stage.demand(told.is_err() && done.is_ok(), "the last is done, of the first nobody knows").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
    is_copy(&stage, guest, &copies[1]).await;
}

async fn fails_late(stage: Stage) {
    let guest = stage.ready("web").await;
    let copies = two_to_copy(&stage, guest).await;
    let [first, second] = wishes_of(&copies);
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_latency(Operation::CreateSuccessor, Duration::from_secs(5));
    let refusal = HypervisorError::Failed { what: "copy it".into(), detail: "refused on request".into() };
    hypervisor.fail_next(Operation::CreateSuccessor, refusal);
    let (one, other) = (stage.user(1), stage.user(2));
    let (told, done) = tokio::join!(one.wish(guest, &first), async {
        stage.pass(2).await;
        other.wish(guest, &second).await
    });
    hypervisor.set_latency(Operation::CreateSuccessor, Duration::ZERO);
    stage.demand(told.is_err() && done.is_ok(), "the last is done").await;
    stage.until_well(guest).await;
    is_copy(&stage, guest, &copies[1]).await;
}

async fn another_copy(stage: Stage) {
    let guest = stage.ready("web").await;
    let copies = two_to_copy(&stage, guest).await;
    let [first, second] = wishes_of(&copies);
    stage.snag("n1", "hypervisor CreateSuccessor", Fate::KillsAfterwards);
    let (user, next) = (stage.user(1), stage.user(2));
    let (_, second, ()) = tokio::join!(
        user.wish(guest, &first),
        async {
            stage.until_down(1).await;
            next.wish(guest, &second).await
        },
        async {
            stage.until_down(1).await;
            stage.pass(20).await;
            stage.start(1);
        }
    );
    stage.demand(second.is_ok(), "it is rebuilt").await;
    stage.until_well(guest).await;
    is_copy(&stage, guest, &copies[1]).await;
}

async fn made_late(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("n1", "hypervisor CreateSuccessor", Fate::IsLate(Duration::from_secs(60)));
    let user = stage.user(1);
    let (rebuilt, destroyed) = tokio::join!(user.wish(guest, &Verb::Rebuild(None)), async {
        stage.pass(5).await;
        user.destroy(guest).await
    });
    stage.demand(rebuilt.is_err() && destroyed.is_ok(), "it goes before it is rebuilt").await;
    stage.until(guest, "gone", Sight::is_gone).await;
    stage.kill(1);
    stage.until(guest, "a disk that is to take the place of nothing", |is| is.successor).await;
    stage.start(1);
    stage.until(guest, "gone again", Sight::is_gone).await;
}

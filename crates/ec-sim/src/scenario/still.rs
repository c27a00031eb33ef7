//! Guests that stand still, as on storage that is gone: of the calls about them none comes back but the one that ends them.

use std::time::Duration;

use ec_cloud::Verb;
use ec_model::{InstanceId, State};

use super::{
    Scenario, Stage,
    resize::{does, is},
    stage::Sight,
    volumes::{given, has, near},
};
use crate::{fashion::resize as to, snag::Fate};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "stop-of-a-guest-that-stands-still",
        "a guest stands still, and nobody comes as far as to ask it to end: it is stopped, and rebooted, when its grace is over",
        |stage| Box::pin(power(stage)),
    ),
    Scenario::new(
        "rescue-of-a-guest-that-stands-still",
        "a guest that stands still is rescued, and unrescued before it was ended for that: it comes up from its own disk",
        |stage| Box::pin(rescue(stage)),
    ),
    Scenario::new(
        "resize-of-a-guest-that-stands-still",
        "a guest that stands still is to be smaller, and is ended when its grace is over; to be larger, and is waited for until its user has it end at once",
        |stage| Box::pin(resize(stage)),
    ),
    Scenario::new(
        "detach-of-a-guest-that-stands-still",
        "a volume is to be taken from a guest that stands still: what nobody hears is told, and its user may have it end at once",
        |stage| Box::pin(detach(stage)),
    ),
    Scenario::new(
        "suspend-of-a-guest-that-stands-still",
        "the memory of a guest is saved without end, on a node that does one thing at a time: another is destroyed at once",
        |stage| Box::pin(suspend(stage)),
    ),
];

/// From now on, until the snags are cleared.
fn stands_still(stage: &Stage) {
    for call in [
        "hypervisor Grow i1",
        "hypervisor Pause i1",
        "hypervisor Save i1",
        "hypervisor SetVolumes i1",
        "hypervisor ShutDown i1",
    ] {
        stage.world.snag("n1", call, Fate::IsLate(Duration::from_secs(3 * 3600)), 1000);
    }
    stage.say("i1 stands still");
}

fn goes_on(stage: &Stage) {
    stage.world.clear_snags();
    stage.say("i1 goes on");
}

async fn comes_to(stage: &Stage, guest: InstanceId, verb: &Verb, state: State) {
    let done = stage.user(1).wish(guest, verb).await;
    stage.demand(done == Ok(Some(state)), &format!("{} comes to {state}", verb.name())).await;
}

async fn power(stage: Stage) {
    let guest = stage.ready("web").await;
    stands_still(&stage);
    comes_to(&stage, guest, &Verb::Stop(60), State::Stopped).await;
    let told = |is: &Sight| is.says("did not end by itself in 60 s") && is.is_kept();
    stage.until(guest, "STOPPED with the reason", told).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Start).await.is_ok(), "it is started").await;
    stage.until_well(guest).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Reboot(60)).await.is_ok(), "it is rebooted").await;
    stage.until_well(guest).await;
    goes_on(&stage);
}

async fn rescue(stage: Stage) {
    let guest = stage.ready("web").await;
    stands_still(&stage);
    comes_to(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    stage.until_well(guest).await;
    stage.user(1).asks(guest, &Verb::Rescue(None)).await;
    stage.until(guest, "being rescued", |is| is.is(State::Rescuing) && is.rescue_disk).await;
    stage.pass(40).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is taken back").await;
    stage.until_well(guest).await;
    goes_on(&stage);
}

async fn resize(stage: Stage) {
    let guest = stage.ready("web").await;
    does(&stage, guest, &to(2, 1)).await;
    does(&stage, guest, &Verb::Confirm).await;
    stands_still(&stage);
    does(&stage, guest, &to(1, 1)).await;
    does(&stage, guest, &Verb::Confirm).await;
    stage.until_well(guest).await;
    is(&stage, guest, (1, 1), (1, 1)).await;
    for verb in [Verb::Reboot(0), Verb::Stop(0)] {
        stage.user(1).asks(guest, &to(2, 1)).await;
        stage.pass(200).await;
        stage.demand(stage.user(1).wish(guest, &verb).await.is_ok(), "it is ended at once").await;
        stage.pass(20).await;
        is(&stage, guest, (2, 1), (2, 1)).await;
        if verb == Verb::Reboot(0) {
            stage.until_well(guest).await;
            does(&stage, guest, &Verb::Revert).await;
            stage.until_well(guest).await;
        }
    }
    stage.until(guest, "STOPPED", |is| is.is(State::Stopped) && is.is_kept()).await;
    goes_on(&stage);
}

async fn detach(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stands_still(&stage);
    let (user, other) = (stage.user(1), stage.user(2));
    let (detached, ended) = tokio::join!(user.detaches(volume), async {
        stage.pass(10).await;
        let begun = tokio::time::Instant::now();
        (other.wish(guest, &Verb::Stop(0)).await, begun.elapsed())
    });
    stage.demand(detached.is_err(), "it is told that the guest has it").await;
    stage.demand(ended.0 == Ok(Some(State::Stopped)), "it is ended").await;
    stage.demand(ended.1 < Duration::from_secs(60), "in time").await;
    stage.until(guest, "without it", |is| is.is(State::Stopped) && !has(&stage, guest, volume)).await;
    goes_on(&stage);
}

async fn suspend(stage: Stage) {
    let [guest, other] = [stage.ready("web").await, stage.ready("db").await];
    stage.kill(1);
    stage.demand(stage.node(1).configure("workers: 1").is_ok(), "it does one thing at a time").await;
    stage.start(1);
    stage.pass(20).await;
    stands_still(&stage);
    stage.user(1).asks(guest, &Verb::Suspend).await;
    stage.pass(5).await;
    let begun = tokio::time::Instant::now();
    stage.destroyed(other).await;
    stage.until_gone(other).await;
    stage.demand(begun.elapsed() < Duration::from_secs(20), "it is gone at once").await;
    goes_on(&stage);
}

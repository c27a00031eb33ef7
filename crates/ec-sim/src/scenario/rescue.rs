//! Guests that are booted from a rescue disk, so that their own can be mended, and from their own again.

use ec_cloud::Verb;
use ec_hypervisor::{End, Operation};
use ec_model::{ImageRef, InstanceId, State};

use super::{Scenario, Stage, stage::Sight};
use crate::snag::Fate;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "rescue",
        "a user rescues a guest, whose host is started anew meanwhile, and unrescues it: it is well with its own disk; then one that is stopped, which is stopped again in the end",
        |stage| Box::pin(rescue(stage)),
    ),
    Scenario::new(
        "rescue-with-kills",
        "the agent is killed in the midst of a rescue, before and after each of its steps: the guest runs from its rescue disk each time",
        |stage| Box::pin(kills(stage)),
    ),
    Scenario::new(
        "unrescue-with-kills",
        "the agent is killed in the midst of an unrescue, before and after each of its steps: the guest runs from its own disk each time",
        |stage| Box::pin(unrescue_kills(stage)),
    ),
    Scenario::new(
        "rescue-without-an-image",
        "a user rescues a guest with an image that there is not: the guest runs on, and that is told; so does one that is stopped stay so",
        |stage| Box::pin(no_image(stage)),
    ),
    Scenario::new(
        "rescue-taken-back",
        "a user unrescues a guest whose rescue disk is being made: it runs on from its own",
        |stage| Box::pin(taken_back(stage)),
    ),
    Scenario::new(
        "rescue-of-a-deaf-guest",
        "a guest does not hear that it is to end for its rescue disk: it is ended when its grace is over; and where the rescue is taken back after it was asked, too,          and started from its own disk again",
        |stage| Box::pin(deaf(stage)),
    ),
    Scenario::new(
        "rescue-taken-back-without-an-agent",
        "an agent is killed after it asked a guest to end for its rescue disk, and the rescue is taken back before the next one is there: the guest ends later, and is \
         started again from its own disk",
        |stage| Box::pin(taken_back_without_an_agent(stage)),
    ),
    Scenario::new(
        "rescue-in-an-older-etcd",
        "etcd is put back to before a rescue, then to one in which it is wanted: the guest runs from the disk that is wanted each time, and its own is kept",
        |stage| Box::pin(older_etcd(stage)),
    ),
    Scenario::new(
        "rescue-with-a-lost-record",
        "somebody deletes the node's record of a rescued guest, and then the status, too: it stays rescued, and is unrescued as others are",
        |stage| Box::pin(lost_record(stage)),
    ),
    Scenario::new(
        "rescue-and-a-hand-on-the-host",
        "somebody ends a rescued guest and starts it from its own disk by hand: it is rescued again, since that is wanted",
        |stage| Box::pin(by_hand(stage)),
    ),
    Scenario::new(
        "rescue-of-a-guest-that-powers-itself-off",
        "a rescued guest powers itself off, and is started, then rebooted hard: it runs from its rescue disk each time, the agent being killed meanwhile",
        |stage| Box::pin(powers_off(stage)),
    ),
];

fn is_rescued(is: &Sight) -> bool {
    is.is(State::Rescued) && is.runs() && is.guest.rescued && is.rescue_disk && is.is_kept()
}

fn is_own(is: &Sight) -> bool {
    is.is_well() && !is.guest.rescued && !is.rescue_disk
}

async fn until_rescued(stage: &Stage, guest: InstanceId) {
    stage.until(guest, "rescued", is_rescued).await;
}

async fn until_own(stage: &Stage, guest: InstanceId) {
    stage.until(guest, "well with its own disk", is_own).await;
}

async fn wished(stage: &Stage, guest: InstanceId, verb: &Verb, state: State) {
    let done = stage.user(1).wish(guest, verb).await;
    stage.demand(done == Ok(Some(state)), &format!("{} comes to {state}", verb.name())).await;
}

async fn rescue(stage: Stage) {
    let guest = stage.ready("web").await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    until_rescued(&stage, guest).await;
    let refused = stage.user(1).wish(guest, &Verb::Stop(0)).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("eschedule unrescue")), "a stop is refused").await;
    stage.crash(1).await;
    stage.pass(30).await;
    stage.start(1);
    until_rescued(&stage, guest).await;
    stage.stays(guest, 60, "rescued", is_rescued).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    until_own(&stage, guest).await;
    stage.stays(guest, 60, "well with its own disk", is_own).await;

    wished(&stage, guest, &Verb::Stop(0), State::Stopped).await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    until_rescued(&stage, guest).await;
    wished(&stage, guest, &Verb::Unrescue, State::Stopped).await;
    let kept = |is: &Sight| is.is(State::Stopped) && !is.runs() && is.is_kept() && !is.rescue_disk;
    stage.stays(guest, 60, "STOPPED", kept).await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn with_kills(stage: &Stage, guest: InstanceId, call: &'static str, fate: Fate, verb: &Verb) {
    stage.snag("n1", call, fate);
    let user = stage.user(1);
    let (done, ()) = tokio::join!(user.wish(guest, verb), async {
        stage.until_down(1).await;
        stage.pass(20).await;
        stage.start(1);
    });
    stage.demand(done.is_ok(), &format!("{} is done", verb.name())).await;
}

async fn kills(stage: Stage) {
    let guest = stage.ready("web").await;
    for call in [
        "put status/n1/i1 RESCUING",
        "hypervisor CreateRescue",
        "hypervisor ShutDown",
        "put status/n1/i1 STARTING",
        "hypervisor StartRescue",
        "put status/n1/i1 RESCUED",
    ] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            with_kills(&stage, guest, call, fate, &Verb::Rescue(None)).await;
            until_rescued(&stage, guest).await;
            stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
            until_own(&stage, guest).await;
        }
    }
}

async fn deaf(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say("guests of n1 do not hear");
    stage.node(1).hypervisor.set_deaf(true);
    let ended = || stage.node(1).hypervisor.effects(Operation::PowerOff, guest);
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    until_rescued(&stage, guest).await;
    stage.demand(ended() == 1, "it was ended").await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    until_own(&stage, guest).await;
    stage.say("another user takes the next rescue back while the guest is asked to end");
    let (one, other) = (stage.user(1), stage.user(2));
    let (_, taken_back) = tokio::join!(one.wish(guest, &Verb::Rescue(None)), async {
        stage.until(guest, "being rescued", |is| is.is(State::Rescuing) && is.rescue_disk).await;
        stage.pass(20).await;
        other.wish(guest, &Verb::Unrescue).await
    });
    stage.demand(taken_back.is_ok(), "it is taken back").await;
    until_own(&stage, guest).await;
    stage.demand(ended() == 3, "it was ended, and started again").await;
    stage.stays(guest, 120, "well with its own disk", is_own).await;
    stage.node(1).hypervisor.set_deaf(false);
}

async fn taken_back_without_an_agent(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say("guests of n1 take long to end");
    stage.node(1).hypervisor.set_deaf(true);
    let (one, other) = (stage.user(1), stage.user(2));
    let (_, (taken_back, ())) = tokio::join!(one.wish(guest, &Verb::Rescue(None)), async {
        let asked = || stage.node(1).hypervisor.calls(Operation::ShutDown) > 0;
        stage.until(guest, "asked to end", |_| asked()).await;
        stage.kill(1);
        tokio::join!(other.wish(guest, &Verb::Unrescue), async {
            stage.pass(5).await;
            stage.start(1);
            stage.pass(20).await;
            stage.end_guest(1, guest, End::ByGuest);
            stage.node(1).hypervisor.set_deaf(false);
        })
    });
    stage.demand(taken_back.is_ok(), "it is taken back").await;
    until_own(&stage, guest).await;
    stage.stays(guest, 120, "well with its own disk", is_own).await;
}

async fn unrescue_kills(stage: Stage) {
    let guest = stage.ready("web").await;
    for call in [
        "put status/n1/i1 UNRESCUING",
        "hypervisor PowerOff",
        "hypervisor DropRescue",
        "put status/n1/i1 STARTING",
        "hypervisor Start ",
        "put status/n1/i1 ACTIVE",
    ] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
            until_rescued(&stage, guest).await;
            with_kills(&stage, guest, call, fate, &Verb::Unrescue).await;
            until_own(&stage, guest).await;
        }
    }
}

async fn no_image(stage: Stage) {
    let guest = stage.ready("web").await;
    let none = ImageRef::at("file:///nonexistent.qcow2");
    let verb = Verb::Rescue(Some(none));
    let refused = stage.user(1).wish(guest, &verb).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("its own disk still")), "it is told why").await;
    until_own(&stage, guest).await;
    stage.stays(guest, 120, "well with its own disk", is_own).await;
    let ended = stage.node(1).hypervisor.effects(Operation::PowerOff, guest);
    stage.demand(ended == 0, "it ran on").await;
    wished(&stage, guest, &Verb::Stop(0), State::Stopped).await;
    let refused = stage.user(1).wish(guest, &verb).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("its own disk still")), "it is told why").await;
    let kept = |is: &Sight| is.is(State::Stopped) && !is.runs() && is.is_kept() && !is.rescue_disk;
    stage.until(guest, "STOPPED", kept).await;
    stage.stays(guest, 60, "STOPPED", kept).await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
}

async fn taken_back(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("n1", "hypervisor CreateRescue", Fate::KillsAfterwards);
    let user = stage.user(1);
    let (waited, done) = tokio::join!(user.wish(guest, &Verb::Rescue(None)), async {
        stage.until_down(1).await;
        let user = stage.user(2);
        let (done, ()) = tokio::join!(user.wish(guest, &Verb::Unrescue), async {
            stage.pass(5).await;
            stage.start(1);
        });
        done
    });
    stage.demand(done.is_ok(), "it is taken back").await;
    let heard = waited.is_err_and(|why| why.contains("its own disk again"));
    stage.demand(heard, "who waited for it is told").await;
    until_own(&stage, guest).await;
    let ended = stage.node(1).hypervisor.effects(Operation::PowerOff, guest);
    stage.demand(ended == 0, "it ran on").await;
}

async fn older_etcd(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    let rescued = stage.back_up();
    stage.restore(&before);
    stage.pass(60).await;
    until_own(&stage, guest).await;
    stage.restore(&rescued);
    stage.pass(60).await;
    until_rescued(&stage, guest).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    until_own(&stage, guest).await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    // Another wish for the same: it is rescued anew.
    stage.restore(&rescued);
    stage.pass(60).await;
    until_rescued(&stage, guest).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    until_own(&stage, guest).await;
}

async fn lost_record(stage: Stage) {
    let guest = stage.ready("web").await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    stage.expects_trouble(guest);
    for with_status in [false, true] {
        stage.forget(guest, with_status).await;
        stage.pass(60).await;
        until_rescued(&stage, guest).await;
    }
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    until_own(&stage, guest).await;
}

async fn by_hand(stage: Stage) {
    let guest = stage.ready("web").await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    stage.expects_trouble(guest);
    stage.kill(1);
    stage.end_guest(1, guest, ec_hypervisor::End::ByHand);
    stage.say("somebody starts i1 on n1");
    let begun = ec_hypervisor::Hypervisor::start(&stage.node(1).hypervisor, guest).await;
    stage.demand(begun.is_ok(), "it is started").await;
    stage.start(1);
    stage.pass(60).await;
    until_rescued(&stage, guest).await;
}

async fn powers_off(stage: Stage) {
    let guest = stage.ready("web").await;
    wished(&stage, guest, &Verb::Stop(0), State::Stopped).await;
    wished(&stage, guest, &Verb::Rescue(None), State::Rescued).await;
    for verb in [Verb::Start, Verb::Reboot(0)] {
        stage.end_guest(1, guest, End::ByGuest);
        stage.until(guest, "STOPPED", |is| is.is(State::Stopped) && !is.runs() && is.rescue_disk).await;
        wished(&stage, guest, &verb, State::Rescued).await;
        until_rescued(&stage, guest).await;
    }
    for fate in [Fate::Kills, Fate::KillsAfterwards] {
        stage.end_guest(1, guest, End::ByGuest);
        stage.until(guest, "STOPPED", |is| is.is(State::Stopped) && !is.runs()).await;
        with_kills(&stage, guest, "hypervisor StartRescue", fate, &Verb::Reboot(0)).await;
        until_rescued(&stage, guest).await;
    }
    // Whoever starts it wants it to run.
    stage.demand(stage.user(1).wish(guest, &Verb::Unrescue).await.is_ok(), "it is unrescued").await;
    until_own(&stage, guest).await;
}

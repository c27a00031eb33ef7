//! etcd is lost, put back to an older backup, away, full; its watches lie.

use std::time::Duration;

use ec_model::{Pause, State};
use ec_store::StoreError;
use tokio::time::sleep;

use super::{Scenario, Stage, stage::Sight};
use crate::{acts, catalog::Deed, world::Actor};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "etcd-back-behind-a-release",
        "etcd is put back to a time when two guests were there that their users destroyed since, and is ahead of what the \
         replica knew before it looks again: the two are not built again, and no room is sold twice",
        |stage| Box::pin(behind_a_release(stage)),
    ),
    Scenario::new(
        "etcd-back-behind-an-image",
        "etcd is put back to a time when an image was being sent, which is whole by now: its bytes are left, also when it counts as left over",
        |stage| Box::pin(behind_an_image(stage)),
    ),
    Scenario::new(
        "etcd-back-before-a-guest",
        "etcd is put back to a time before a guest: it runs on, is told of as UNCLAIMED, is counted again, and a destroy \
         ends it",
        |stage| Box::pin(before_a_guest(stage)),
    ),
    Scenario::new(
        "etcd-back-on-a-full-node",
        "etcd is put back to a time before the last guest of a full node, and somebody asks for one more two seconds later: \
         the guest is counted by then, and its room is not sold again",
        |stage| Box::pin(on_a_full_node(stage)),
    ),
    Scenario::new(
        "etcd-back-behind-a-wish",
        "etcd is put back to a time before a destroy that no agent had seen: the wish is lost with it, the guest runs on \
         as it is asked for, and a second destroy ends it",
        |stage| Box::pin(behind_a_wish(stage)),
    ),
    Scenario::new(
        "etcd-back-behind-a-request",
        "etcd is put back to the moment between a guest's claim and its request: neither a controller, nor who lists all or wants its name, \
         takes it for what a killed command left; it is healed, and another time destroyed",
        |stage| Box::pin(behind_a_request(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "etcd-back-to-a-history-alone",
        "etcd is put back to a time when of a guest, destroyed since, nothing was recorded but its claim and what came of \
         it: the claim is given back, and the history ends by itself",
        |stage| Box::pin(only_its_history(stage)),
    ),
    Scenario::new(
        "etcd-back-during-a-build",
        "etcd is put back to a time when a guest was STARTING, which is ACTIVE by now: it is neither started again nor \
         given up, and is ACTIVE again",
        |stage| Box::pin(during_a_build(stage)),
    ),
    Scenario::new(
        "etcd-back-twice",
        "etcd is put back to the same backup twice, with guests built in between: each of them runs on and is counted",
        |stage| Box::pin(twice(stage)),
    ),
    Scenario::new(
        "etcd-back-and-writes-go-on",
        "etcd is put back, and somebody asks for a guest in the next second: the replica that wrote what is lost knows it, \
         and writes again within seconds",
        |stage| Box::pin(writes_go_on(stage)),
    ),
    Scenario::new(
        "etcd-emptied-on-a-full-node",
        "etcd loses everything while four guests take all of a node, and somebody asks for a fifth at once: the guests \
         run on, and their room is not sold again",
        |stage| Box::pin(emptied(stage)),
    ),
    Scenario::new(
        "etcd-emptied-while-the-agent-was-away",
        "etcd loses everything while a node's agent is down: the next agent finds the guest, wipes nothing, and counts it",
        |stage| Box::pin(emptied_while_away(stage)),
    ),
    Scenario::new(
        "etcd-away-while-a-guest-starts",
        "etcd is away for ten minutes from the moment on when a guest was started: nobody gives it up for its address, and \
         it is ACTIVE when etcd is back",
        |stage| Box::pin(away(stage)),
    ),
    Scenario::new(
        "etcd-full",
        "etcd has no space for five minutes: guests run on, requests are refused with the reason and leave nothing, and \
         afterwards all goes on by itself",
        |stage| Box::pin(full(stage)),
    ),
    Scenario::new(
        "watch-silent",
        "all watches go silent without breaking, and somebody asks for a guest: it is built as soon as the prefix is listed \
         anew, and its claim is not taken for a left-over meanwhile",
        |stage| Box::pin(silent(stage)),
    ),
    Scenario::new(
        "watch-skips-an-event",
        "the watch swallows the events of a request and of its claim: the replica notices by the count of clock, and the \
         guest is built when the agent lists anew",
        |stage| Box::pin(skips(stage)),
    ),
    Scenario::new(
        "watch-compacted",
        "an agent is cut off from etcd, a destroy arrives, and history is compacted before it is back: it lists anew and \
         destroys the guest",
        |stage| Box::pin(compacted(stage)),
    ),
    Scenario::new(
        "agent-cut-off",
        "an agent is cut off from etcd for two minutes: it counts as dead, nothing new comes to it, its guest runs on, and \
         it is itself again when it is back",
        |stage| Box::pin(cut_off(stage)),
    ),
];

async fn behind_a_release(stage: Stage) {
    let guests =
        [stage.ready("a").await, stage.ready("b").await, stage.ready("c").await, stage.ready("d").await];
    let backup = stage.back_up();
    for guest in &guests[..2] {
        stage.destroyed(*guest).await;
        stage.until_gone(*guest).await;
    }
    // Neither replica nor agent see it come.
    stage.cut(Actor::Replica(0), 10);
    stage.cut(stage.agent(1), 60);
    let known = stage.world.store.revision();
    stage.restore(&backup);
    stage.say("others write until etcd is ahead of what was known");
    while stage.world.store.revision() <= known {
        ec_store::Store::txn(&stage.world.store, ec_store::Txn::new().put("/others", "x")).await.ok();
    }
    stage.pass(11).await;
    for name in ["e", "f", "g"] {
        let told = stage.user(1).schedule(name).await;
        stage.demand(told.is_err(), "nothing is placed while the room is taken, as etcd has it").await;
    }
    for guest in &guests[..2] {
        // Where it was is told by a record of the command line's, which goes when one comes across it.
        stage
            .until(*guest, "gone from its node", |is| {
                !(is.claim || is.domain.is_some() || is.volume || is.record) && is.asked_for.is_none()
            })
            .await;
    }
    stage.pass(600).await;
    stage.user(1).list().await.ok();
    for guest in &guests[..2] {
        stage.until_gone(*guest).await;
    }
    for guest in &guests[2..] {
        stage.until_well(*guest).await;
    }
    let later = stage.ready("h").await;
    stage.until_well(later).await;
}

async fn behind_an_image(stage: Stage) {
    let begun = || !stage.world.store.content(&stage.world.keys.images()).pairs.is_empty();
    let sent = Deed::Add { name: "debian", parts: Some(3), public: false, protected: false };
    let user = stage.user(1);
    let ((), before) = tokio::join!(user.catalogs(sent), async {
        while !begun() {
            sleep(Duration::from_millis(1)).await;
        }
        stage.back_up()
    });
    stage.demand(stage.world.objects().len() == 1, "its bytes are in the store").await;
    stage.restore(&before);
    stage.pass(700).await;
    stage.user(2).catalogs(Deed::List).await;
    stage.demand(stage.world.objects().len() == 1 && begun(), "and are so still").await;
}

async fn before_a_guest(stage: Stage) {
    let before = stage.ready("before").await;
    let backup = stage.back_up();
    let after = stage.ready("after").await;
    stage.restore(&backup);
    stage
        .until(after, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept())
        .await;
    stage.until_well(before).await;
    stage.stays(after, 900, "as it is", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept()).await;
    stage.destroyed(after).await;
    stage.until_gone(after).await;
}

async fn on_a_full_node(stage: Stage) {
    for name in ["a", "b", "c"] {
        stage.ready(name).await;
    }
    let backup = stage.back_up();
    let last = stage.ready("d").await;
    stage.restore(&backup);
    stage.pass(2).await;
    let told = stage.user(1).schedule("e").await;
    stage.demand(told.is_err(), "its room is not sold again").await;
    stage
        .until(last, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept())
        .await;
}

async fn behind_a_wish(stage: Stage) {
    let guest = stage.ready("web").await;
    let backup = stage.back_up();
    stage.kill(1);
    stage.destroyed(guest).await;
    stage.pass(60).await;
    stage.restore(&backup);
    stage.start(1);
    stage.pass(60).await;
    stage.until_well(guest).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn behind_a_request(stage: Stage) {
    let (user, keys) = (stage.user(1), &stage.world.keys);
    let is_claimed = || {
        let recorded = stage.world.store.content(&keys.instances()).pairs;
        recorded.iter().filter_map(|pair| keys.parse_instance(&pair.key).ok()).any(|it| stage.sight(it).claim)
    };
    let (placed, before) = tokio::join!(user.schedule("web"), async {
        while !is_claimed() {
            sleep(Duration::from_millis(1)).await;
        }
        stage.back_up()
    });
    let Ok(placed) = placed else { return stage.fail("web was not placed").await };
    let guest = placed.instance;
    stage.until_well(guest).await;
    stage.pass(700).await;
    let counted = |is: &Sight| is.is(State::Unclaimed) && is.runs() && is.is_kept();
    for is_healed in [true, false] {
        stage.restore(&before);
        stage.until(guest, "UNCLAIMED and counted", counted).await;
        stage.stays(guest, 180, "as it is", counted).await;
        stage.user(2).list().await.ok();
        let taken = stage.user(2).schedule("web").await.err();
        stage.demand(taken.is_some_and(|why| why.contains("`eschedule heal`")), "its name is its own").await;
        stage.stays(guest, 60, "as it is", counted).await;
        if is_healed {
            stage.demand(user.heals().await == Ok(1), "it is brought back").await;
            stage.until_well(guest).await;
        } else {
            stage.destroyed(guest).await;
            stage.until_gone(guest).await;
        }
    }
}

async fn only_its_history(stage: Stage) {
    let before = stage.back_up();
    let guest = stage.ready("web").await;
    stage.restore(&before);
    stage
        .until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept())
        .await;
    stage.say("somebody deletes its status by hand");
    stage.delete(&stage.world.keys.status(stage.node(1).node, guest)).await;
    let backup = stage.back_up();
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.restore(&backup);
    stage.until_gone(guest).await;
    stage.pass(3600).await;
    let history = stage.world.keys.outcomes(stage.node(1).node, guest);
    let kept = stage.world.store.content(&history).pairs.into_iter().any(|pair| pair.lease.is_none());
    stage.demand(!kept, "its history hangs on a lease").await;
}

async fn during_a_build(stage: Stage) {
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being started", |is| is.is(State::Starting) && is.runs()).await;
    let backup = stage.back_up();
    stage.until_well(placed.instance).await;
    stage.pass(600).await;
    stage.restore(&backup);
    stage.until(placed.instance, "told of anew", |is| is.is(State::Starting)).await;
    stage.until_well(placed.instance).await;
    let starts = stage.node(1).hypervisor.effects(ec_hypervisor::Operation::Start, placed.instance);
    stage.demand(starts == 1, "it was started once").await;
}

async fn twice(stage: Stage) {
    let backup = stage.back_up();
    let first = stage.ready("first").await;
    stage.restore(&backup);
    let counted = |is: &Sight| is.is(State::Unclaimed) && is.runs() && is.is_kept();
    stage.until(first, "UNCLAIMED and counted", counted).await;
    let second = stage.ready("second").await;
    stage.restore(&backup);
    stage.until(first, "UNCLAIMED and counted", counted).await;
    stage.until(second, "UNCLAIMED and counted", counted).await;
}

async fn writes_go_on(stage: Stage) {
    let backup = stage.back_up();
    let lost = stage.ready("lost").await;
    stage.restore(&backup);
    stage.user(1).schedule("early").await.ok();
    stage.pass(5).await;
    let begun = stage.world.elapsed();
    stage.placed("web").await;
    let took = stage.world.elapsed().saturating_sub(begun);
    stage.demand(took < std::time::Duration::from_secs(1), "it is placed at once").await;
    stage
        .until(lost, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept())
        .await;
}

async fn emptied(stage: Stage) {
    let guests =
        [stage.ready("a").await, stage.ready("b").await, stage.ready("c").await, stage.ready("d").await];
    stage.empty_etcd();
    for name in ["e", "f", "g"] {
        let told = stage.user(1).schedule(name).await;
        stage.demand(told.is_err(), "nothing is placed where four guests run").await;
        stage.pass(20).await;
    }
    for guest in guests {
        stage
            .until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept())
            .await;
    }
    stage.destroyed(guests[0]).await;
    stage.until_gone(guests[0]).await;
    // The audit that unlocks what was reserved for it may still be to come.
    stage.pass(60).await;
    stage.ready("h").await;
}

async fn emptied_while_away(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.pass(60).await;
    stage.empty_etcd();
    stage.pass(60).await;
    stage.start(1);
    stage
        .until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.runs() && is.is_kept())
        .await;
}

async fn away(stage: Stage) {
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.etcd_away(600).await;
    stage.until_well(placed.instance).await;
}

async fn full(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say("etcd has no space any more");
    let full = StoreError::Full("mvcc: database space exceeded".to_owned());
    stage.world.store.faults().fail_writes(Some(full));
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err_and(|why| why.contains("space exceeded")), "the reason is told").await;
    let told = stage.user(1).destroy(guest).await;
    stage.demand(told.is_err_and(|why| why.contains("space exceeded")), "the reason is told").await;
    stage.stays(guest, 150, "well", Sight::is_well).await;
    // Its host's disk may be the same that etcd has none on.
    stage.pause_guest(1, guest, Pause::Storage { room: true });
    stage.pass(5).await;
    stage.demand(stage.sight(guest).is_well(), "it is let go on").await;
    stage.stays(guest, 145, "well", Sight::is_well).await;
    stage.say("etcd has space again");
    stage.world.store.faults().fail_writes(None);
    stage.pass(60).await;
    stage.ready("db").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn silent(stage: Stage) {
    acts::silence_watches(&stage.world);
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
}

async fn skips(stage: Stage) {
    stage.say("the next six changes give no events");
    stage.world.store.faults().lose_events(6);
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
    stage.ready("db").await;
}

async fn compacted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.cut(stage.agent(1), 60);
    stage.pass(20).await;
    stage.destroyed(guest).await;
    acts::compact(&stage.world).await;
    stage.stays(guest, 30, "there", |is| is.runs() && is.is_kept()).await;
    stage.until_gone(guest).await;
}

async fn cut_off(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.cut(stage.agent(1), 120);
    stage.pass(30).await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err(), "nothing is placed on a node that counts as dead").await;
    stage.stays(guest, 120, "there", |is| is.runs() && is.is_kept()).await;
    stage.ready("db").await;
    stage.until_well(guest).await;
}

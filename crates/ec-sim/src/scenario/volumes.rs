//! Volumes: given, taken, extended, copied and deleted, whatever breaks meanwhile.

use std::time::Duration;

use ec_hypervisor::{End, Operation};
use ec_model::{
    CopyOf, Instance, InstanceId, Pause, Request, RunState, State, Status, Workload, decode, encode,
};
use ec_plan::{sizes::missed, verbs::Verb};
use ec_store::Backup;
use reqwest::Method;

use super::{Scenario, Stage, stage::Sight};
use crate::{
    acts,
    fashion::resize,
    referee::{claimed, observed},
    snag::Fate,
    volumes::Order,
};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "volume",
        "a volume is made, given to a guest, extended under it, outlives it, is copied, given to the next one and taken from it, and deleted",
        |stage| Box::pin(one_life(stage)),
    ),
    Scenario::new(
        "volume-whose-node-is-away",
        "a volume is locked, unlocked and deleted while its agent is away, which reads more than the first format of requests: all of it is written, and done when it is back",
        |stage| Box::pin(node_away(stage)),
    ),
    Scenario::new(
        "volume-attached-with-kills",
        "the agent is killed before and after each step of an attachment, and of what takes it back: the guest has what it is to have",
        |stage| Box::pin(attached_with_kills(stage)),
    ),
    Scenario::new(
        "volume-made-with-kills",
        "the agent is killed before and after each step in which a volume is made: it is made once, and is there",
        |stage| Box::pin(made_with_kills(stage)),
    ),
    Scenario::new(
        "volume-raced-for",
        "two people give one volume to two guests at the same moment: one of them has it, and the other is told so",
        |stage| Box::pin(raced_for(stage)),
    ),
    Scenario::new(
        "volume-not-let-go-of",
        "a hypervisor does not take a volume from its guest for a while: till it has, nobody else is given it",
        |stage| Box::pin(not_let_go(stage)),
    ),
    Scenario::new(
        "volume-taken-before-a-first-start",
        "a guest is defined with a volume, its first start is put off, and the volume is taken from it, once also while its agent is away: told so, \
         it is neither in its definition nor with the guest that comes up",
        |stage| Box::pin(taken_before_a_start(stage)),
    ),
    Scenario::new(
        "volume-not-let-go-of-and-suspended",
        "a volume is taken from a guest that does not let go of it, and is suspended: it is told to have it, which nobody else is given, until it has gone on and \
         let go",
        |stage| Box::pin(not_let_go_and_suspended(stage)),
    ),
    Scenario::new(
        "volume-not-let-go-of-and-rescued",
        "one of two volumes is taken from a guest that does not let go of it, which somebody pauses before it is rescued: it is ended, and who wants the volume has it",
        |stage| Box::pin(not_let_go_and_rescued(stage)),
    ),
    Scenario::new(
        "volume-kept-by-a-guest-of-which-an-older-etcd-knows-none",
        "an etcd is put back to before a guest was given its volume, and another is to have it: the first keeps it until it is stopped",
        |stage| Box::pin(kept_unknown(stage)),
    ),
    Scenario::new(
        "volume-deleted-while-detaching",
        "a volume is deleted before its guest has let go of it: that is refused, and done once it has",
        |stage| Box::pin(deleted_while_detaching(stage)),
    ),
    Scenario::new(
        "volume-and-a-full-host",
        "a host's disk is nearly full: what is there is attached and detached all the same, and a new volume goes to another host",
        |stage| Box::pin(full_host(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "volume-moved-with-kills",
        "on shared storage a volume goes to the node of the guest that is to have it, and either agent is killed before and after each step: it is at one of them, once",
        |stage| Box::pin(moved_with_kills(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-deleted-on-its-way",
        "on shared storage a volume is deleted whose node died before it handed it over to another: what it holds stays held, and that node destroys it",
        |stage| Box::pin(deleted_on_its_way(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-made-anew-and-moved",
        "on shared storage a volume is made anew of another, which is refused while its guest runs, and then goes to another node and back: it is not made anew again, also where an older etcd wishes that",
        |stage| Box::pin(made_anew_and_moved(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-moved-while-it-grows",
        "on shared storage a volume is to go to another node while it is made larger: that is refused till it is",
        |stage| Box::pin(moved_while_growing(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-made-anew-moved-and-healed",
        "on shared storage a volume of an image is made anew as a copy and goes to another node, then an older etcd knows of neither: it is brought back \
         where that has it",
        |stage| Box::pin(made_anew_moved_and_healed(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-known-to-two-nodes",
        "on shared storage an older etcd has a volume where it was before, then etcd loses everything: of two nodes that knew it the one that has it brings it \
         back",
        |stage| Box::pin(known_to_two(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-healed-before-its-guest-is-told-of",
        "on shared storage an older etcd has a volume where it was before a guest of the other node was given it, whose node tells of the guest while somebody heals: \
         the volume does not go where the etcd has it",
        |stage| Box::pin(told_of_late(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-taken-along-and-healed",
        "on shared storage an older etcd has a volume where it was before a guest of the other node was given it, and knows nothing of the guest: both are \
         brought back where they are",
        |stage| Box::pin(taken_along(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-taken-along-and-sent-elsewhere",
        "the same, and before anybody looks a third node is asked for the volume; its node is about to tell of it anew, and once it has, the volume is brought \
         back where it is, by a placement that is newer than any",
        |stage| Box::pin(sent_elsewhere(stage)),
    )
    .on_nodes(3)
    .on_shared_storage(),
    Scenario::new(
        "volume-made-with-more-claimed",
        "a command that extends a volume is killed behind its claim, before the volume is made: it is made as large as is asked for",
        |stage| Box::pin(made_with_more_claimed(stage)),
    ),
    Scenario::new(
        "volume-and-a-closed-host",
        "on shared storage new volumes go neither to a host whose disk is nearly full nor to one that an operator disabled",
        |stage| Box::pin(closed_host(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-deleted-where-it-is-not",
        "on shared storage an older etcd has a volume where it was before, and there it is deleted; healed from where it is, it comes back to that node whole",
        |stage| Box::pin(deleted_where_it_is_not(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-deleted-and-its-way-there-back",
        "on shared storage a volume was deleted on the node that it went to, and etcd is put back to a time when it was on its way there: it stays deleted",
        |stage| Box::pin(way_back(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-moved-while-its-node-tells-of-it",
        "on shared storage an older etcd has a volume where it was before, and it is to go where it is, which that node tells before it is written: it is \
         healed, and does not go there a second time",
        |stage| Box::pin(told_meanwhile(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-moved-to-where-it-was-deleted",
        "on shared storage etcd is put back to when a volume was being made that has been deleted on another node since; made again it goes to that node, and is there",
        |stage| Box::pin(to_its_grave(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-come-where-it-was-to-be-made",
        "on shared storage etcd is put back to when a volume was being made that is on another node since; healed it comes back, and its request is \
         lost before its node has read that: its disk is kept there",
        |stage| Box::pin(come_where_it_was_to_be_made(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-handed-to-who-does-not-hear",
        "a volume goes back to a node where it was deleted once, and whose watches tell nothing: its disk waits there until the node reads that it is asked for",
        |stage| Box::pin(handed_to_who_does_not_hear(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-in-an-older-etcd",
        "etcd is put back to before an attachment: the guest that runs keeps the volume, is told to, and is given it again, with which nothing is done to it",
        |stage| Box::pin(older_etcd(stage)),
    ),
    Scenario::new(
        "volume-grown-since-a-backup",
        "etcd, and placement with it, is put back to before a volume was made larger: its node claims all of what the disk takes, and a copy is as large",
        |stage| Box::pin(grown_since_backup(stage)),
    ),
    Scenario::new(
        "volume-grown-since-a-backup-on-shared-storage",
        "the same of a volume that is claimed of storage which nodes share",
        |stage| Box::pin(grown_since_backup(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-and-a-suspended-guest",
        "the guest that has a volume is suspended, and would not be told that it grew: that is refused till it goes on",
        |stage| Box::pin(under_suspended(stage)),
    ),
    Scenario::new(
        "volume-and-a-suspend-that-is-over",
        "somebody starts the suspended guest that has a volume by hand, or it ends before it is suspended: its volume grows again",
        |stage| Box::pin(suspend_is_over(stage)),
    ),
    Scenario::new(
        "volume-healed",
        "etcd loses everything, and somebody heals: guest and volume are asked for as before, and the guest has had it all the time",
        |stage| Box::pin(healed(stage)),
    ),
    Scenario::new(
        "volume-grown-and-healed",
        "an agent is killed when it made a volume larger and did not note that yet, and somebody deletes its keys: a heal brings it \
         back as large as it was to be, and all of it stays claimed",
        |stage| Box::pin(grown_and_healed(stage)),
    ),
    Scenario::new(
        "volume-given-away-before-a-heal",
        "an older etcd knows a volume and not the guest that has it; it is given to another, which does not get it, and the first is \
         not brought back till that is taken back",
        |stage| Box::pin(given_away(stage)),
    ),
    Scenario::new(
        "volume-lost-is-not-deleted-under-a-guest",
        "somebody deletes a volume's request and record by hand: it is UNCLAIMED, and its deletion is refused while a guest is to have it",
        |stage| Box::pin(lost_volume(stage)),
    ),
    Scenario::new(
        "volume-and-its-record-gone",
        "somebody deletes a volume's disk and its node's record of it: that is an ERROR which is kept till its user deletes it",
        |stage| Box::pin(all_gone(stage)),
    ),
    Scenario::new(
        "volume-booted-from",
        "a guest boots from a volume, which is neither taken from it nor deleted, outlives it, and the next one boots from it",
        |stage| Box::pin(booted_from(stage)),
    ),
    Scenario::new(
        "volume-booted-from-with-kills",
        "the agent is killed before and after each step in which a guest is built on a volume: it comes up, and has that",
        |stage| Box::pin(booted_with_kills(stage)),
    ),
    Scenario::new(
        "volume-booted-from-by-one",
        "two people boot from one volume at the same moment: one of them does, and the other is told so, with nothing left",
        |stage| Box::pin(booted_by_one(stage)),
    ),
    Scenario::new(
        "volume-booted-from-and-healed",
        "etcd loses everything, and the domain of one goes, too: both guests are UNCLAIMED, and are brought back with the volumes that they boot from",
        |stage| Box::pin(booted_and_healed(stage)),
    ),
    Scenario::new(
        "volume-booted-from-and-gone",
        "the disk of a volume is deleted from which a guest boots: both are an ERROR that is kept, till they are destroyed",
        |stage| Box::pin(booted_and_gone(stage)),
    ),
    Scenario::new(
        "volume-of-what-is-locked",
        "a guest is locked, and then its volume, at last while somebody takes it away: it is neither extended nor made anew nor taken away, till it is unlocked",
        |stage| Box::pin(of_locked(stage)),
    ),
    Scenario::new(
        "volume-that-could-not-grow",
        "a hypervisor refuses to make a volume larger: a controller gives back what was claimed for that, or who asks for what it has; asked for again it is claimed and grows",
        |stage| Box::pin(could_not_grow(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "volume-gone-and-with-another-node",
        "on shared storage an older etcd has a volume where it was before, and there it is to be made anew: it is not, while another node has its disk, and is once \
         that is healed",
        |stage| Box::pin(gone_and_elsewhere(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
];

async fn of_locked(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    given(&stage, volume, guest).await;
    let lock = || Verb::Lock("mine".into());
    let done = async |of, verb| {
        stage.demand(stage.user(1).wish(of, &verb).await.is_ok(), "it is done").await;
    };
    let refused = async |told: Result<(), String>| {
        stage.demand(told.is_err_and(|why| why.contains("it is locked (mine)")), "it is refused").await;
    };
    let copied = CopyOf::disk(Workload::Volume, copy);
    done(guest, Verb::Stop(0)).await;
    for locked in [guest, volume] {
        done(locked, lock()).await;
        refused(stage.user(1).extends(volume, 3).await).await;
        refused(stage.user(1).remakes(volume, &copied).await).await;
        refused(stage.user(1).detaches(volume).await).await;
        done(locked, Verb::Unlock).await;
    }
    // Locked while that is on its way.
    stage.snag("u1", "put requests/n1/i1", Fate::IsLate(Duration::from_secs(5)));
    let (taker, other) = (stage.user(1), stage.user(2));
    let (done_late, ()) = tokio::join!(taker.detaches(volume), async {
        stage.pass(2).await;
        other.asks(volume, &lock()).await;
    });
    refused(done_late).await;
    stage.stays(volume, 60, "as it was", |is| there(is) && is.disk_bytes == 1 << 30).await;
    done(volume, Verb::Unlock).await;
    done(guest, Verb::Start).await;
    stage.demand(has(&stage, guest, volume), "the guest has it").await;
    taken(&stage, volume, guest).await;
}

async fn could_not_grow(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let fails = async || {
        stage.snag("n1", "hypervisor GrowDisk", Fate::IsRefused(0));
        stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
        let failed = |is: &Sight| {
            let missed = is.request.as_ref().and_then(|request| missed(request, is.status.as_ref()));
            there(is) && is.disk_bytes == 1 << 30 && missed.is_some()
        };
        stage.until(volume, "told not to be larger", failed).await;
        stage.demand(claimed(&stage.world, volume, "DISK_GB") == 3, "it may be tried again").await;
    };
    let gives_back = async || {
        for _ in 0..300 {
            if claimed(&stage.world, volume, "DISK_GB") == 1 {
                break;
            }
            stage.pass(1).await;
        }
        stage.demand(claimed(&stage.world, volume, "DISK_GB") == 1, "what it has is claimed").await;
    };
    fails().await;
    gives_back().await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    stage.demand(stage.sight(copy).disk_bytes == 1 << 30, "a copy is as large as it is").await;
    fails().await;
    stage.demand(stage.user(1).extends(volume, 1).await.is_ok(), "it is to stay so").await;
    let is_told = |is: &Sight| {
        let request = is.request.as_ref();
        there(is) && request.is_some_and(|request| missed(request, is.status.as_ref()).is_none())
    };
    stage.until(volume, "told to be as is wished", is_told).await;
    gives_back().await;
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 3 << 30).await;
    stage.pass(300).await;
    stage.demand(claimed(&stage.world, volume, "DISK_GB") == 3, "all that it has is claimed").await;
}

async fn gone_and_elsewhere(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let here = 3 - other_than_of(&stage, volume);
    let is_at = |number: usize| observed(stage.node(number), volume).is_some_and(|seen| seen.volume);
    let (other, user) = (stage.node(3 - here).node, stage.user(1));
    let before = stage.back_up();
    // Its node keeps a record of it.
    stage.snag(["n1", "n2"][here - 1], "hypervisor HandOver", Fate::KillsAfterwards);
    stage.demand(user.moves(volume, other).await.is_ok() && is_at(3 - here), "it goes there").await;
    stage.kill(3 - here);
    stage.restore(&before);
    stage.start(here);
    stage.until(volume, "in ERROR", |is| is.is(State::Error)).await;
    // Nobody tells yet who has it.
    let copied = CopyOf::disk(Workload::Volume, copy);
    stage.demand(user.remakes(volume, &copied).await.is_ok(), "it is wished").await;
    let is_told = |is: &Sight| {
        let rebuilt = is.status.as_ref().and_then(|status| status.rebuilt.as_ref());
        rebuilt.is_some_and(|rebuilt| rebuilt.failed.is_some())
    };
    stage.until(volume, "told not to be made anew", is_told).await;
    stage.start(3 - here);
    stage.pass(60).await;
    let refused = user.remakes(volume, &copied).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("has its disk")), "it is refused").await;
    stage.demand(is_at(3 - here) && !is_at(here), "its disk is there once").await;
    stage.demand(user.heals().await == Ok(1), "it comes to where it is asked for").await;
    stage.until(volume, "there", there).await;
    stage.demand(is_at(here), "where that is").await;
}

/// A guest that boots from it, and runs.
async fn boots(stage: &Stage, name: &'static str, volume: InstanceId) -> InstanceId {
    match stage.user(1).boots(name, volume).await {
        Ok(placed) if stage.user(1).waits_for(placed).await => placed.instance,
        Ok(_) => stage.fail(format!("{name} does not come up")).await,
        Err(why) => stage.fail(format!("{name} was not placed: {why}")).await,
    }
}

async fn booted_from(stage: Stage) {
    let volume = made(&stage, Order { of_image: true, ..Order::SMALL }).await;
    let guest = boots(&stage, "web", volume).await;
    stage.until_well(guest).await;
    stage.demand(has(&stage, guest, volume), "it runs from the volume").await;
    let bytes = stage.sight(guest).size.map(|size| size.disk_bytes);
    stage.demand(bytes == Some(0), "it has no disk of its own").await;
    stage.demand(stage.user(1).detaches(volume).await.is_err(), "it is not taken from it").await;
    stage.demand(stage.user(1).deletes(volume).await.is_err(), "it is not deleted").await;
    for verb in [Verb::Rebuild(None), resize(1, 2)] {
        let refused = stage.user(1).wish(guest, &verb).await.err();
        stage.demand(refused.is_some_and(|why| why.contains("boots from a volume")), "it is refused").await;
    }
    for verb in [Verb::Stop(20), Verb::Start, resize(2, 0), Verb::Confirm] {
        stage.demand(stage.user(1).wish(guest, &verb).await.is_ok(), "it is done as to others").await;
    }
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it grows").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 3 << 30).await;
    let other = near(&stage, guest).await;
    given(&stage, other, guest).await;
    taken(&stage, other, guest).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.until(volume, "there still", |is| there(is) && is.disk_bytes == 3 << 30).await;
    let next = boots(&stage, "db", volume).await;
    stage.until_well(next).await;
}

async fn booted_with_kills(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    for call in ["hypervisor Define", "hypervisor Start", "put status/n1/"] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            stage.snag("n1", call, fate);
            let user = stage.user(1);
            let (placed, ()) = tokio::join!(user.boots("web", volume), async {
                stage.until_down(1).await;
                stage.pass(20).await;
                stage.start(1);
            });
            let Ok(placed) = placed else { return stage.fail("it was not placed").await };
            stage.until_well(placed.instance).await;
            stage.demand(has(&stage, placed.instance, volume), "it runs from the volume").await;
            stage.destroyed(placed.instance).await;
            stage.until_gone(placed.instance).await;
            stage.until(volume, "there", there).await;
        }
    }
}

async fn booted_by_one(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let users = [stage.user(1), stage.user(2)];
    let done = tokio::join!(users[0].boots("web", volume), users[1].boots("db", volume));
    stage.demand(done.0.is_ok() != done.1.is_ok(), "one boots from it").await;
    let (placed, told) = match done {
        (Ok(placed), Err(told)) | (Err(told), Ok(placed)) => (placed, told),
        _ => return,
    };
    stage.demand(told.contains("has it"), "the other is told who").await;
    stage.until_well(placed.instance).await;
    let left = stage.user(1).list().await.map(|all| all.len());
    stage.demand(left == Ok(1), "of the other nothing is left").await;
}

async fn booted_and_healed(stage: Stage) {
    let volumes = [made(&stage, Order::SMALL).await, made(&stage, Order::SMALL).await];
    let web = boots(&stage, "web", volumes[0]).await;
    let db = boots(&stage, "db", volumes[1]).await;
    stage.demand(stage.user(1).wish(db, &Verb::Stop(20)).await.is_ok(), "one is stopped").await;
    stage.empty_etcd();
    stage.undefine(1, db);
    for lost in [web, db, volumes[0], volumes[1]] {
        stage.until(lost, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.claim).await;
    }
    stage.demand(stage.user(1).heals().await == Ok(4), "all are brought back").await;
    stage.until_well(web).await;
    stage.demand(has(&stage, web, volumes[0]), "the guest ran on").await;
    stage.until(db, "defined again", |is| is.domain.is_some() && is.is(State::Stopped)).await;
    stage.demand(stage.user(1).wish(db, &Verb::Start).await.is_ok(), "the other is started").await;
    stage.demand(has(&stage, db, volumes[1]), "from its volume").await;
    stage.demand(stage.user(1).deletes(volumes[1]).await.is_err(), "which everybody knows").await;
}

async fn booted_and_gone(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let guest = boots(&stage, "web", volume).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Stop(20)).await.is_ok(), "it is stopped").await;
    stage.delete_disk(1, volume);
    let kept = |is: &Sight| is.is(State::Error) && is.claim && is.asked_for.is_some();
    for one in [guest, volume] {
        stage.until(one, "an ERROR", kept).await;
    }
    stage.stays(guest, 60, "an ERROR that is kept", kept).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.stays(volume, 60, "an ERROR that is kept", kept).await;
    stage.demand(stage.user(1).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
}

fn there(is: &Sight) -> bool {
    is.is(State::Active) && is.volume && is.claim && is.record
}

async fn made(stage: &Stage, order: Order) -> InstanceId {
    let asked = stage.user(1).makes_volume(order).await;
    come(stage, asked).await
}

/// A volume that was asked for, once it is there.
pub(super) async fn come(stage: &Stage, asked: Result<InstanceId, String>) -> InstanceId {
    match asked {
        Ok(volume) => {
            stage.until(volume, "there", there).await;
            volume
        }
        Err(why) => stage.fail(format!("it was not made: {why}")).await,
    }
}

pub(super) async fn near(stage: &Stage, guest: InstanceId) -> InstanceId {
    made(stage, Order { name: Some("data"), near: Some(guest), ..Order::SMALL }).await
}

pub(super) async fn given(stage: &Stage, volume: InstanceId, guest: InstanceId) {
    let given = stage.user(1).attaches(volume, guest).await;
    stage.demand(given.is_ok(), "it is given").await;
    stage.demand(has(stage, guest, volume), "the guest has it").await;
}

pub(super) async fn taken(stage: &Stage, volume: InstanceId, guest: InstanceId) {
    let taken = stage.user(1).detaches(volume).await;
    stage.demand(taken.is_ok() && !has(stage, guest, volume), "it is taken back").await;
}

/// Whether the guest that is up has it.
pub(super) fn has(stage: &Stage, guest: InstanceId, volume: InstanceId) -> bool {
    let nodes = stage.world.computers.iter();
    let mut domains = nodes.flat_map(|computer| computer.hypervisor.volumes());
    domains.any(|(instance, [_, up])| instance == guest && up.iter().any(|has| has.volume == volume))
}

async fn one_life(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    let is_larger = |is: &Sight| there(is) && is.disk_bytes == 3 << 30;
    stage.until(volume, "as large as is wished", is_larger).await;
    stage.demand(stage.user(1).deletes(volume).await.is_err(), "it is not deleted under its guest").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.until(volume, "there still", is_larger).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let next = stage.ready("db").await;
    given(&stage, volume, next).await;
    given(&stage, copy, next).await;
    taken(&stage, volume, next).await;
    stage.demand(stage.user(1).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
    stage.stays(copy, 60, "there", there).await;
}

async fn node_away(stage: Stage) {
    let volume = made(&stage, Order { name: Some("data"), ..Order::SMALL }).await;
    stage.kill(1);
    stage.pass(30).await;
    for (verb, is_locked) in [(Verb::Lock("kept".into()), true), (Verb::Unlock, false)] {
        stage.user(1).asks(volume, &verb).await;
        let record = stage.get(&stage.world.keys.instance(volume));
        let record = record.and_then(|value| decode::<Instance>(&value).ok());
        let is_written = record.is_some_and(|record| record.locked.is_some() == is_locked);
        stage.demand(is_written, "it is written").await;
    }
    let user = stage.user(1);
    let (deleted, ()) = tokio::join!(user.deletes(volume), async {
        stage.pass(20).await;
        stage.start(1);
    });
    stage.demand(deleted.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
}

async fn attached_with_kills(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    for call in ["put status/n1/i1 ACTIVE", "hypervisor SetVolumes"] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            for attaches in [true, false] {
                stage.snag("n1", call, fate);
                let user = stage.user(1);
                let (done, ()) = tokio::join!(
                    async {
                        match attaches {
                            true => user.attaches(volume, guest).await,
                            false => user.detaches(volume).await,
                        }
                    },
                    async {
                        stage.until_down(1).await;
                        stage.pass(20).await;
                        stage.start(1);
                    }
                );
                stage.demand(done.is_ok(), "it is done").await;
                stage
                    .demand(has(&stage, guest, volume) == attaches, "the guest has what it is to have")
                    .await;
                // Till its sign of life is there again.
                stage.pass(1).await;
            }
        }
    }
    stage.until_well(guest).await;
}

async fn made_with_kills(stage: Stage) {
    for (call, fate) in [
        ("put status/n1/i1 PREPARING", Fate::Kills),
        ("put status/n1/i2 PREPARING", Fate::KillsAfterwards),
        ("hypervisor CreateVolume", Fate::Kills),
        ("hypervisor CreateVolume", Fate::KillsAfterwards),
        ("put status/n1/i5 ACTIVE", Fate::Kills),
        ("put status/n1/i6 ACTIVE", Fate::KillsAfterwards),
    ] {
        stage.snag("n1", call, fate);
        let user = stage.user(1);
        let (volume, ()) = tokio::join!(user.makes_volume(Order::SMALL), async {
            stage.until_down(1).await;
            stage.pass(20).await;
            stage.start(1);
        });
        let Ok(volume) = volume else { return stage.fail("it was not placed").await };
        stage.until(volume, "there", there).await;
        let made = stage.node(1).hypervisor.effects(Operation::CreateVolume, volume);
        stage.demand(made == 1, "it was made once").await;
    }
}

async fn raced_for(stage: Stage) {
    let (web, db) = (stage.ready("web").await, stage.ready("db").await);
    let volume = near(&stage, web).await;
    let users = [stage.user(1), stage.user(2)];
    let done = tokio::join!(users[0].attaches(volume, web), users[1].attaches(volume, db));
    stage.demand(done.0.is_ok() != done.1.is_ok(), "one has it, and the other is told so").await;
    let told = done.0.err().or(done.1.err()).unwrap_or_default();
    stage.demand(told.contains("has it: `eschedule volume detach` takes it away first"), "and by whom").await;
    stage.demand(has(&stage, web, volume) != has(&stage, db, volume), "one guest has it").await;
}

async fn deleted_while_detaching(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stage.kill(1);
    let user = stage.user(1);
    let (taken, ()) = tokio::join!(user.detaches(volume), async {
        stage.pass(5).await;
        let refused = stage.user(2).deletes(volume).await.err();
        stage.demand(refused.is_some_and(|why| why.contains("has volume")), "it is not deleted yet").await;
        stage.start(1);
    });
    stage.demand(taken.is_ok() && !has(&stage, guest, volume), "it is taken").await;
    stage.demand(stage.user(2).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
    stage.until_well(guest).await;
}

async fn full_host(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    let here = if stage.sight(volume).host == Some(stage.node(1).node) { 1 } else { 2 };
    stage.trouble(here, true);
    stage.pass(60).await;
    given(&stage, volume, guest).await;
    for _ in 0..4 {
        let other = made(&stage, Order::SMALL).await;
        stage.demand(stage.sight(other).host != stage.sight(volume).host, "another lies elsewhere").await;
    }
    taken(&stage, volume, guest).await;
    stage.trouble(here, false);
}

async fn closed_host(stage: Stage) {
    let lies_with = async |volume: InstanceId, number: usize| {
        let is_there = stage.sight(volume).host == Some(stage.node(number).node);
        stage.demand(is_there, "it lies with the one that takes new work").await;
    };
    stage.trouble(1, true);
    stage.pass(5).await;
    for _ in 0..4 {
        lies_with(made(&stage, Order::SMALL).await, 2).await;
    }
    stage.trouble(1, false);
    stage.disable(2, true).await;
    stage.pass(5).await;
    for _ in 0..4 {
        lies_with(made(&stage, Order::SMALL).await, 1).await;
    }
    stage.trouble(1, true);
    stage.pass(5).await;
    let refused = stage.user(1).makes_volume(Order::SMALL).await;
    stage.demand(refused.is_err(), "nobody takes one").await;
    stage.trouble(1, false);
    stage.disable(2, false).await;
}

async fn moved_with_kills(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    let (first, second) = (stage.node(1).node, stage.node(2).node);
    let is_first = |stage: &Stage| observed(stage.node(1), volume).is_some_and(|seen| seen.volume);
    let user = stage.user(1);
    if !is_first(&stage) {
        user.moves(volume, first).await.ok();
    }
    // Whoever is killed: it goes to the second node and comes back.
    for (who, number, call) in [
        ("n1", 1, "hypervisor HandOver"),
        ("n1", 1, "delete requests/n1/i2"),
        ("n2", 2, "put status/n2/i2 PREPARING"),
        ("n2", 2, "put status/n2/i2 ACTIVE"),
    ] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            stage.snag(who, call, fate);
            let (there, ()) = tokio::join!(user.moves(volume, second), async {
                stage.until_down(number).await;
                stage.pass(20).await;
                stage.start(number);
            });
            stage.demand(there.is_ok() && !is_first(&stage), "it is there").await;
            stage.pass(20).await;
            let back = user.moves(volume, first).await;
            stage.demand(back.is_ok() && is_first(&stage), "and comes back").await;
        }
    }
    given(&stage, volume, guest).await;
    let other = if is_first(&stage) { second } else { first };
    stage.demand(user.moves(volume, other).await.is_err(), "what a guest has stays").await;
    stage.until_well(guest).await;
}

async fn deleted_on_its_way(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let to = other_than_of(&stage, volume);
    let from = 3 - to;
    let lies_there = || observed(stage.node(from), volume).is_some_and(|seen| seen.volume);
    let user = stage.user(1);
    stage.snag(["n1", "n2"][from - 1], "hypervisor HandOver", Fate::Kills);
    stage.demand(user.moves(volume, stage.node(to).node).await.is_err(), "it does not come").await;
    stage.demand(user.deletes(volume).await.is_ok(), "it is to go").await;
    stage.pass(60).await;
    let is = stage.sight(volume);
    stage.demand(lies_there() && is.claim, "its disk lies where it lay, and is counted").await;
    stage.start(from);
    stage.until_gone(volume).await;
    stage.demand(!lies_there(), "its disk goes").await;
}

/// A volume that was deleted on n1, of which an older etcd knew that it was there, and is brought back on n2, where it was.
async fn deleted_on_the_other(stage: &Stage) -> InstanceId {
    let volume = made(stage, Order::SMALL).await;
    let (first, second) = (stage.node(1).node, stage.node(2).node);
    let is_at = |number| observed(stage.node(number), volume).is_some_and(|seen| seen.volume);
    let user = stage.user(1);
    if !is_at(1) {
        stage.demand(user.moves(volume, first).await.is_ok(), "it is on n1").await;
    }
    let before = stage.back_up();
    stage.demand(user.moves(volume, second).await.is_ok() && is_at(2), "it is on n2").await;
    // Who has it cannot tell.
    stage.kill(2);
    stage.restore(&before);
    stage.until(volume, "missed", |is| is.is(State::Error)).await;
    stage.demand(user.deletes(volume).await.is_ok() && is_at(2), "it is deleted where it is not").await;
    stage.start(2);
    stage.until(volume, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.demand(user.heals().await == Ok(1), "it is brought back").await;
    stage.until(volume, "there", there).await;
    volume
}

async fn told_meanwhile(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let (user, other) = (stage.user(1), stage.node(other_than_of(&stage, volume)).node);
    let before = stage.back_up();
    stage.demand(user.moves(volume, other).await.is_ok(), "it goes to the other").await;
    stage.restore(&before);
    stage.snag("u1", "put requests/", Fate::IsLate(Duration::from_secs(5)));
    stage.demand(user.moves(volume, other).await.is_err(), "it does not go where it is").await;
    stage.pass(60).await;
    stage.demand(user.heals().await == Ok(1), "it is brought back").await;
    stage.until(volume, "there", there).await;
}

/// A volume, and a backup of etcd from when it was being made.
async fn backed_up_while_made(stage: &Stage) -> (InstanceId, Backup) {
    let slow = |by: u64| {
        for number in [1, 2] {
            stage.node(number).hypervisor.set_latency(Operation::CreateVolume, Duration::from_secs(by));
        }
    };
    slow(10);
    let asked = stage.user(1).makes_volume(Order::SMALL).await;
    stage.pass(2).await;
    let before = stage.back_up();
    slow(0);
    (come(stage, asked).await, before)
}

async fn come_where_it_was_to_be_made(stage: Stage) {
    let (volume, before) = backed_up_while_made(&stage).await;
    let there_again = other_than_of(&stage, volume);
    let (here, user) = (3 - there_again, stage.user(1));
    let is_here = || observed(stage.node(here), volume).is_some_and(|seen| seen.volume);
    let moved = user.moves(volume, stage.node(there_again).node).await;
    stage.demand(moved.is_ok() && !is_here(), "it goes to the other").await;
    stage.restore(&before);
    stage.until(volume, "not made once more", |is| is.is(State::Preparing)).await;
    stage.pass(60).await;
    stage.kill(here);
    stage.demand(user.heals().await == Ok(1), "it is to come back").await;
    stage.pass(30).await;
    stage.demand(is_here(), "its disk has come").await;
    stage.delete(&stage.world.keys.request(stage.node(here).node, volume)).await;
    stage.start(here);
    let is_kept = |is: &Sight| is.is(State::Unclaimed) && is.volume && is.claim;
    stage.until(volume, "UNCLAIMED and counted", is_kept).await;
    stage.stays(volume, 300, "UNCLAIMED and counted", is_kept).await;
    stage.demand(is_here(), "it lies where it came").await;
}

async fn to_its_grave(stage: Stage) {
    let user = stage.user(1);
    let (volume, before) = backed_up_while_made(&stage).await;
    let other = stage.node(other_than_of(&stage, volume)).node;
    stage.demand(user.moves(volume, other).await.is_ok(), "it goes to the other").await;
    stage.demand(user.deletes(volume).await.is_ok(), "it is to go").await;
    stage.until_gone(volume).await;
    stage.restore(&before);
    stage.pass(5).await;
    stage.until(volume, "there", there).await;
    let other = stage.node(other_than_of(&stage, volume)).node;
    stage.demand(user.moves(volume, other).await.is_ok(), "it goes to the other again").await;
    stage.stays(volume, 120, "there", there).await;
}

async fn handed_to_who_does_not_hear(stage: Stage) {
    let volume = deleted_on_the_other(&stage).await;
    let first = stage.node(1);
    acts::deafen(&stage.world, first);
    let is_there = || observed(first, volume).is_some_and(|seen| seen.volume);
    // Nobody waits so long.
    stage.demand(stage.user(1).moves(volume, first.node).await.is_err() && is_there(), "it lies on n1").await;
    stage.pass(200).await;
    stage.until(volume, "there", there).await;
    stage.demand(is_there(), "and does so still").await;
}

async fn not_let_go(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let volume = near(&stage, guests[0]).await;
    given(&stage, volume, guests[0]).await;
    stage.world.snag("n1", "hypervisor SetVolumes i1", Fate::IsRefused(0), 3);
    stage.demand(stage.user(1).detaches(volume).await.is_err(), "it is told that it has it still").await;
    let refused = stage.user(2).attaches(volume, guests[1]).await;
    stage.demand(refused.is_err_and(|why| why.contains("has it")), "the other is not given it").await;
    stage.until(guests[0], "without it", |is| is.is_well() && !has(&stage, guests[0], volume)).await;
    stage.pass(5).await;
    given(&stage, volume, guests[1]).await;
}

async fn not_let_go_and_suspended(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let volume = near(&stage, guests[0]).await;
    given(&stage, volume, guests[0]).await;
    let clings = |clings| stage.node(1).hypervisor.set_clinging(clings);
    clings(true);
    stage.demand(stage.user(1).detaches(volume).await.is_err(), "it is told that it has it still").await;
    stage.demand(stage.user(1).wish(guests[0], &Verb::Suspend).await.is_ok(), "it is suspended").await;
    let is_told = |is: &Sight| {
        let told = is.status.as_ref();
        told.is_some_and(|told| {
            told.volumes_failed.is_some() && told.volumes.iter().any(|has| has.volume == volume)
        })
    };
    stage.pass(10).await;
    stage.stays(guests[0], 60, "told to have it", is_told).await;
    stage.demand(stage.user(1).detaches(volume).await.is_err(), "so is who asks once more").await;
    for refused in [
        stage.user(2).attaches(volume, guests[1]).await,
        stage.user(2).deletes(volume).await,
        stage.user(2).extends(volume, 3).await,
    ] {
        stage.demand(refused.is_err(), "nothing else is done with it").await;
    }
    stage.demand(stage.user(1).wish(guests[0], &Verb::Resume).await.is_ok(), "it goes on").await;
    stage.demand(has(&stage, guests[0], volume), "with what it had").await;
    clings(false);
    stage.until(guests[0], "without it", |is| is.is_well() && !has(&stage, guests[0], volume)).await;
    stage.pass(5).await;
    given(&stage, volume, guests[1]).await;
}

async fn not_let_go_and_rescued(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let volume = near(&stage, guests[0]).await;
    let stays = made(&stage, Order { near: Some(guests[0]), ..Order::SMALL }).await;
    given(&stage, volume, guests[0]).await;
    given(&stage, stays, guests[0]).await;
    stage.node(1).hypervisor.set_clinging(true);
    stage.demand(stage.user(1).detaches(volume).await.is_err(), "it is told that it has it still").await;
    // One that is paused is ended, and booted from the other disk, at once.
    stage.kill(1);
    stage.user(1).asks(guests[0], &Verb::Rescue(None)).await;
    stage.pause_guest(1, guests[0], Pause::ByHand);
    stage.start(1);
    stage.until(guests[0], "rescued", |is| is.is(State::Rescued) && is.guest.rescued).await;
    stage.pass(5).await;
    stage.demand(stage.user(1).detaches(volume).await.is_ok(), "it is told that it has it no more").await;
    given(&stage, volume, guests[1]).await;
    stage.demand(stage.user(2).deletes(stays).await.is_err(), "the other is its own").await;
    stage.demand(stage.user(1).wish(guests[0], &Verb::Unrescue).await.is_ok(), "it is as it was").await;
    stage.until_well(guests[0]).await;
    let has_one = has(&stage, guests[0], stays) && !has(&stage, guests[0], volume);
    stage.demand(has_one, "but for that volume").await;
    stage.node(1).hypervisor.set_clinging(false);
}

async fn taken_before_a_start(stage: Stage) {
    let volume = made(&stage, Order { name: Some("data"), ..Order::SMALL }).await;
    for (name, is_killed) in [("web", false), ("db", true)] {
        stage.node(1).hypervisor.set_latency(Operation::CreateOverlay, Duration::from_secs(10));
        let guest = stage.placed(name).await.instance;
        stage.world.snag("n1", "hypervisor Start", Fate::IsLost, 6);
        if is_killed {
            stage.snag("n1", "hypervisor Define", Fate::KillsAfterwards);
        }
        let (giver, taker) = (stage.user(1), stage.user(2));
        // Whoever gives it is told so or that it is not to have it any more.
        let (_, ()) = tokio::join!(giver.attaches(volume, guest), async {
            stage.until(guest, "defined", |is| is.domain == Some(RunState::NotStarted)).await;
            stage.demand(is_defined_with(&stage, guest, volume), "it is defined with the volume").await;
            let (taken, ()) = tokio::join!(taker.detaches(volume), async {
                if is_killed {
                    stage.pass(5).await;
                    stage.start(1);
                }
            });
            stage.demand(taken.is_ok(), "it is taken from it").await;
            let is_free = stage.sight(guest).domain == Some(RunState::NotStarted)
                && !is_defined_with(&stage, guest, volume);
            stage.demand(is_free, "before the guest was ever started").await;
        });
        stage.until_well(guest).await;
        stage.demand(!has(&stage, guest, volume), "the guest has it not").await;
    }
    stage.demand(stage.user(1).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
}

/// Whether the next start of the guest has it.
fn is_defined_with(stage: &Stage, guest: InstanceId, volume: InstanceId) -> bool {
    let mut domains = stage.node(1).hypervisor.volumes().into_iter();
    domains
        .any(|(instance, [defined, _])| instance == guest && defined.iter().any(|has| has.volume == volume))
}

/// Whether a guest has a volume that it is not to have by this etcd, and that is told.
fn keeps(stage: &Stage, guest: InstanceId, volume: InstanceId) -> bool {
    let told = stage.sight(guest).status.clone();
    let is_told = told.is_some_and(|told| {
        told.volumes.iter().any(|has| has.volume == volume)
            && told.volumes_failed.is_some_and(|why| why.contains("it keeps"))
    });
    is_told && has(stage, guest, volume)
}

async fn kept_unknown(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let volume = near(&stage, guests[0]).await;
    stage.pass(5).await;
    let before = stage.back_up();
    given(&stage, volume, guests[0]).await;
    stage.restore(&before);
    stage.pass(120).await;
    stage.demand(keeps(&stage, guests[0], volume), "it keeps what it has, and that is told").await;
    let given = stage.user(1).attaches(volume, guests[1]).await.err();
    let is_told = given.is_some_and(|why| why.contains("has volume"));
    stage
        .demand(is_told && !has(&stage, guests[1], volume), "another does not get it, and is told why")
        .await;
    stage.demand(stage.user(1).wish(guests[0], &Verb::Stop(0)).await.is_ok(), "the first is stopped").await;
    stage
        .until(guests[0], "stopped without it", |is| is.is(State::Stopped) && !has(&stage, guests[0], volume))
        .await;
    stage.until(guests[1], "with it", |is| is.is_well() && has(&stage, guests[1], volume)).await;
}

/// The number of the node, of two, that a volume is not on.
fn other_than_of(stage: &Stage, volume: InstanceId) -> usize {
    if observed(stage.node(1), volume).is_some_and(|seen| seen.volume) { 2 } else { 1 }
}

async fn made_anew_and_moved(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let of = CopyOf::disk(Workload::Volume, copy);
    given(&stage, volume, guest).await;
    let user = stage.user(1);
    let refused = user.remakes(volume, &of).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("is not stopped")), "it is refused").await;
    taken(&stage, volume, guest).await;
    for node in [1, 2] {
        stage.node(node).hypervisor.set_latency(Operation::ReplaceOverlay, Duration::from_secs(5));
    }
    stage.demand(user.remakes(volume, &of).await.is_ok(), "it is made anew").await;
    let before = stage.back_up();
    let done = || -> u64 {
        let made = |node: usize| stage.node(node).hypervisor.effects(Operation::ReplaceOverlay, volume);
        made(1) + made(2)
    };
    stage.until(volume, "made anew", |is| there(is) && done() == 1).await;
    stage.pass(5).await;
    for way in ["it goes", "it comes back"] {
        let other = stage.node(other_than_of(&stage, volume)).node;
        stage.demand(user.moves(volume, other).await.is_ok(), way).await;
        stage.stays(volume, 120, "there", there).await;
    }
    stage.restore(&before);
    stage.stays(volume, 120, "there", there).await;
    stage.demand(done() == 1, "it was made anew once").await;
}

async fn made_anew_moved_and_healed(stage: Stage) {
    let volume = made(&stage, Order { of_image: true, ..Order::SMALL }).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let before = stage.back_up();
    let user = stage.user(1);
    let of = CopyOf::disk(Workload::Volume, copy);
    stage.demand(user.remakes(volume, &of).await.is_ok(), "it is made anew").await;
    let made = |node: usize| stage.node(node).hypervisor.effects(Operation::ReplaceOverlay, volume);
    stage.until(volume, "made anew", |is| there(is) && made(1) + made(2) == 1).await;
    let other = stage.node(other_than_of(&stage, volume)).node;
    stage.demand(user.moves(volume, other).await.is_ok(), "it goes to the other").await;
    stage.stays(volume, 60, "there", there).await;
    stage.restore(&before);
    stage.pass(60).await;
    stage.demand(user.heals().await == Ok(1), "it is brought back").await;
    stage.until(volume, "there", there).await;
    stage.stays(volume, 120, "there", there).await;
    stage.demand(made(1) + made(2) == 1, "it was made anew once").await;
}

async fn moved_while_growing(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let other = stage.node(other_than_of(&stage, volume)).node;
    for node in [1, 2] {
        stage.node(node).hypervisor.set_latency(Operation::GrowDisk, Duration::from_secs(5));
    }
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    let refused = stage.user(2).moves(volume, other).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("being changed")), "it does not go yet").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 3 << 30).await;
    stage.demand(stage.user(2).moves(volume, other).await.is_ok(), "it goes").await;
}

async fn known_to_two(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let other = stage.node(other_than_of(&stage, volume)).node;
    let before = stage.back_up();
    stage.demand(stage.user(1).moves(volume, other).await.is_ok(), "it goes to the other").await;
    stage.restore(&before);
    stage.pass(60).await;
    stage.empty_etcd();
    stage.pass(120).await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back once").await;
    stage.until(volume, "there", there).await;
    stage.demand(stage.user(1).heals().await == Ok(0), "nothing is left to bring back").await;
}

/// A volume, the guest that has it, and on which node that is; in an etcd in which it is on the other, and no guest.
async fn along_with_a_guest(stage: &Stage) -> (InstanceId, InstanceId, usize) {
    let volume = made(stage, Order::SMALL).await;
    let before = stage.back_up();
    let number = other_than_of(stage, volume);
    stage.disable(3 - number, true).await;
    let guest = stage.ready("web").await;
    stage.disable(3 - number, false).await;
    let is_moved = stage.user(1).moves(volume, stage.node(number).node).await.is_ok();
    stage.demand(is_moved, "it goes to the guest's").await;
    given(stage, volume, guest).await;
    stage.restore(&before);
    (volume, guest, number)
}

async fn told_of_late(stage: Stage) {
    stage.snag("n2", "put status/n2/i2 UNCLAIMED", Fate::IsLate(Duration::from_secs(1)));
    let (volume, guest, number) = along_with_a_guest(&stage).await;
    let (user, keys, here) = (stage.user(1), &stage.world.keys, stage.node(number).node);
    stage.pass(2).await;
    stage.demand(stage.get(&keys.held(here, volume)).is_some(), "its node tells of the volume").await;
    stage.demand(stage.get(&keys.held(here, guest)).is_none(), "nobody tells of the guest yet").await;
    stage.snag("u1", "put requests/n2/i1", Fate::IsLate(Duration::from_millis(1_800)));
    stage.demand(user.heals().await == Ok(1), "the volume is brought back").await;
    stage.until(guest, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.demand(user.heals().await == Ok(1), "so is the guest").await;
    stage.until(volume, "there", there).await;
    stage.until_well(guest).await;
    let is_here = observed(stage.node(number), volume).is_some_and(|seen| seen.volume);
    stage.demand(is_here, "it is where the guest is").await;
}

async fn taken_along(stage: Stage) {
    let user = stage.user(1);
    let (volume, guest, number) = along_with_a_guest(&stage).await;
    let is_here = || observed(stage.node(number), volume).is_some_and(|seen| seen.volume);
    stage.until(guest, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.pass(60).await;
    stage.demand(user.heals().await == Ok(2), "both are brought back").await;
    stage.until(volume, "there", there).await;
    stage.until_well(guest).await;
    stage.stays(volume, 120, "there", there).await;
    stage.demand(is_here(), "where the guest is").await;
    stage.demand(user.heals().await == Ok(0), "nothing is left to bring back").await;
}

async fn sent_elsewhere(stage: Stage) {
    let (user, keys) = (stage.user(1), &stage.world.keys);
    let volume = made(&stage, Order::SMALL).await;
    let has = |number: &usize, of| observed(stage.node(*number), of).is_some_and(|seen| seen.volume);
    let before = stage.back_up();
    let Some(first) = (1..=3).find(|number| has(number, volume)) else { return stage.fail("no disk").await };
    let [number, third] = [1, 2].map(|next| (first + next - 1) % 3 + 1);
    for is_disabled in [true, false] {
        for other in [first, third] {
            stage.disable(other, is_disabled).await;
        }
        if is_disabled {
            let guest = stage.ready("web").await;
            let is_moved = user.moves(volume, stage.node(number).node).await.is_ok();
            stage.demand(is_moved, "it goes to the guest's").await;
            given(&stage, volume, guest).await;
        }
    }
    stage.restore(&before);
    user.moves(volume, stage.node(third).node).await.ok();
    let here = stage.node(number).node;
    let told = || stage.get(&keys.status(here, volume)).and_then(|told| decode::<Status>(&told).ok());
    let Some(mut older) = told().filter(|told| told.state == State::Unclaimed) else {
        return stage.fail("its node does not tell that it has it").await;
    };
    older.epoch -= 1;
    stage.put(&keys.status(here, volume), encode(&older)).await;
    let is_guest_alone = user.heals().await == Ok(1);
    stage.demand(is_guest_alone, "it is not brought back before its node tells of it anew").await;
    stage.pass(120).await;
    stage.demand(user.heals().await == Ok(1), "it is brought back").await;
    stage.until(volume, "there", there).await;
    stage.demand(has(&number, volume), "where the guest is").await;
    let assigned = |key: &str| decode::<Instance>(&stage.get(key)?).ok()?.assigned;
    let asked =
        |number: usize| decode::<Request>(&stage.get(&keys.request(stage.node(number).node, volume))?).ok();
    let epoch = assigned(&keys.instance(volume)).map(|assigned| assigned.epoch);
    let others = [first, third].map(|number| asked(number).map(|asked| asked.epoch)).into_iter().flatten();
    stage.demand(epoch > others.max(), "by a placement that is newer than any").await;
}

async fn made_with_more_claimed(stage: Stage) {
    stage.snag("n1", "put status/n1/i1", Fate::Kills);
    let Ok(volume) = stage.user(1).makes_volume(Order::SMALL).await else {
        return stage.fail("it was not placed").await;
    };
    stage.until_down(1).await;
    stage.snag("u1", "put instances/", Fate::Kills);
    let told = stage.user(1).extends(volume, 3).await;
    stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
    stage.start(1);
    stage.until(volume, "there", |is| there(is) && is.disk_bytes == 1 << 30).await;
}

async fn way_back(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let number = other_than_of(&stage, volume);
    let other = stage.node(number).node;
    stage.snag(["n1", "n2"][number - 1], "put status/", Fate::Kills);
    let user = stage.user(1);
    let (done, before) = tokio::join!(user.moves(volume, other), async {
        stage.until_down(number).await;
        let before = stage.back_up();
        stage.start(number);
        before
    });
    stage.demand(done.is_ok(), "it goes there").await;
    stage.demand(user.deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
    stage.restore(&before);
    stage.pass(200).await;
    let is = stage.sight(volume);
    stage.demand(is.request.is_none() && is.status.is_none() && !is.claim, "it is deleted again").await;
}

async fn deleted_where_it_is_not(stage: Stage) {
    let volume = deleted_on_the_other(&stage).await;
    let is_at = |number| observed(stage.node(number), volume).is_some_and(|seen| seen.volume);
    let (first, user) = (stage.node(1).node, stage.user(1));
    let before = stage.back_up();
    stage.demand(user.moves(volume, first).await.is_ok() && is_at(1), "it goes back to n1").await;
    stage.stays(volume, 300, "there", there).await;
    // Who has it can tell.
    stage.restore(&before);
    stage.until(volume, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.pass(60).await;
    let refused = user.deletes(volume).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("has its disk")), "it is not deleted").await;
    stage.demand(user.heals().await == Ok(1), "it goes to where it is asked for").await;
    stage.until(volume, "there", there).await;
    stage.demand(is_at(2), "it is on n2").await;
}

async fn grown_since_backup(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let backup = stage.back_up();
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 3 << 30).await;
    stage.restore(&backup);
    stage.pass(300).await;
    let (_, held) = stage.placement(Method::GET, &format!("/allocations/{volume}"), None).await;
    let providers = held["allocations"].as_object().into_iter().flatten();
    let claimed: u64 = providers.filter_map(|(_, of)| of["resources"]["DISK_GB"].as_u64()).sum();
    stage.demand(claimed == 3, "all that its disk takes is claimed").await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    stage.demand(stage.sight(copy).disk_bytes == 3 << 30, "a copy has all of it").await;
}

async fn under_suspended(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Suspend).await.is_ok(), "its guest is suspended").await;
    let refused = stage.user(1).extends(volume, 3).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("is suspended")), "it does not grow").await;
    stage.stays(volume, 30, "as it was", |is| there(is) && is.disk_bytes == 1 << 30).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Resume).await.is_ok(), "its guest goes on").await;
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 3 << 30).await;
    stage.until_well(guest).await;
}

async fn suspend_is_over(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Suspend).await.is_ok(), "its guest is suspended").await;
    stage.say("somebody starts it with virsh");
    stage.expects_trouble(guest);
    ec_hypervisor::Hypervisor::start(&stage.node(1).hypervisor, guest).await.ok();
    stage.until_well(guest).await;
    stage.demand(stage.user(1).extends(volume, 2).await.is_ok(), "it is to grow").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 2 << 30).await;

    stage.kill(1);
    let (user, other) = (stage.user(1), stage.user(2));
    let (suspended, ()) = tokio::join!(user.wish(guest, &Verb::Suspend), async {
        stage.pass(20).await;
        let refused = other.extends(volume, 3).await.err();
        stage
            .demand(refused.is_some_and(|why| why.contains("is suspended")), "what is wished comes first")
            .await;
        stage.end_guest(1, guest, End::ByGuest);
        stage.start(1);
    });
    let told = suspended.is_err_and(|why| why.contains("it did not run any more"));
    stage.demand(told, "it has ended before").await;
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    stage.until(volume, "as large as is wished", |is| there(is) && is.disk_bytes == 3 << 30).await;
}

async fn older_etcd(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    let before = stage.back_up();
    given(&stage, volume, guest).await;
    let set = || stage.node(1).hypervisor.effects(Operation::SetVolumes, guest);
    let done = set();
    stage.restore(&before);
    stage.pass(120).await;
    stage.demand(keeps(&stage, guest, volume), "it keeps what it has, and that is told").await;
    stage.kill(1);
    stage.pass(60).await;
    stage.start(1);
    stage.pass(60).await;
    stage.demand(keeps(&stage, guest, volume), "also by an agent that was not there before").await;
    given(&stage, volume, guest).await;
    stage.until_well(guest).await;
    stage.demand(set() == done, "and nothing was done to it").await;
    taken(&stage, volume, guest).await;
}

async fn healed(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    let set = || stage.node(1).hypervisor.effects(Operation::SetVolumes, guest);
    let before = set();
    stage.empty_etcd();
    for lost in [guest, volume] {
        stage.until(lost, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.claim).await;
    }
    stage.demand(stage.user(1).heals().await == Ok(2), "both are brought back").await;
    stage.until_well(guest).await;
    stage.until(volume, "there", there).await;
    stage.demand(has(&stage, guest, volume) && set() == before, "the guest has it, and always had").await;
    stage.demand(stage.user(1).deletes(volume).await.is_err(), "everybody knows that it has it").await;
    taken(&stage, volume, guest).await;
}

async fn grown_and_healed(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    stage.snag("n1", "hypervisor GrowDisk", Fate::KillsAfterwards);
    stage.demand(stage.user(1).extends(volume, 3).await.is_ok(), "it is to grow").await;
    stage.until(volume, "larger", |is| is.disk_bytes == 3 << 30).await;
    stage.kill(1);
    stage.expects_trouble(volume);
    stage.world.judge(|referee, _| referee.request_lost(volume));
    let (keys, node) = (stage.world.keys.clone(), stage.node(1).node);
    stage.delete(&keys.request(node, volume)).await;
    stage.delete(&keys.instance(volume)).await;
    stage.start(1);
    stage.until(volume, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until(volume, "there", there).await;
    stage.pass(300).await;
    stage.demand(claimed(&stage.world, volume, "DISK_GB") == 3, "all that it has is claimed").await;
    stage.demand(stage.sight(volume).disk_bytes == 3 << 30, "it is as large as was wished").await;
}

async fn given_away(stage: Stage) {
    let db = stage.ready("db").await;
    let volume = near(&stage, db).await;
    let before = stage.back_up();
    let web = stage.ready("web").await;
    given(&stage, volume, web).await;
    stage.restore(&before);
    stage.until(web, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    let given = stage.user(1).attaches(volume, db).await;
    stage
        .demand(given.is_err() && !has(&stage, db, volume), "the other does not get it, and is told why")
        .await;
    stage.demand(stage.user(1).heals().await == Ok(0), "the first stays as it is").await;
    taken(&stage, volume, db).await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until_well(web).await;
    stage.demand(has(&stage, web, volume), "with its volume").await;
}

async fn lost_volume(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    stage.expects_trouble(volume);
    stage.world.judge(|referee, _| referee.request_lost(volume));
    let (keys, node) = (stage.world.keys.clone(), stage.node(1).node);
    stage.delete(&keys.request(node, volume)).await;
    stage.delete(&keys.instance(volume)).await;
    stage.until(volume, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    let refused = stage.user(1).deletes(volume).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("has volume")), "it is not deleted").await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until(volume, "there", there).await;
    taken(&stage, volume, guest).await;
}

async fn all_gone(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    stage.kill(1);
    stage.delete_disk(1, volume);
    stage.say("somebody deletes the record of i1 on n1");
    stage.node(1).lose_record(volume);
    stage.start(1);
    let kept = |is: &Sight| is.is(State::Error) && is.claim && is.asked_for.is_some();
    stage.until(volume, "an ERROR", kept).await;
    stage.stays(volume, 120, "an ERROR that is kept", kept).await;
}

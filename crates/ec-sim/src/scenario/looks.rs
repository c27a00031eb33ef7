//! Looks that few histories come to, each of which is all that keeps something from being lost, sold twice or waited for without end.

use std::time::Duration;

use ec_cloud::Verb;
use ec_hypervisor::{DomainSpec, End, Hypervisor, Operation};
use ec_model::{
    BaseImage, CopyOf, DiskFormat, ImageRef, Instance, InstanceId, Policy, Restart, State, Status, Workload,
    decode,
};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::{
    Scenario, Stage,
    groups::{group, place},
    operators::{change_claim, others_claim},
    power::with_policy,
    stage::Sight,
    volumes::{come, given, has},
};
use crate::{
    acts,
    catalog::Deed,
    fashion::resize as to,
    referee::{claimed, observed},
    snag::Fate,
    user::image,
    volumes::Order,
    world::PLACEMENT,
};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "volume-of-which-an-older-disk-is-put-back",
        "somebody puts an older disk of a volume back on the node that it came from, and etcd loses everything: the one that was there last is brought back",
        |stage| Box::pin(older_disk(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-recorded-with-a-node-that-is-away",
        "somebody deletes both requests of a volume whose node is away, and puts an older disk back on the other: that is not brought back in its place",
        |stage| Box::pin(recorded_elsewhere(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-made-of-an-image-and-asked-for-elsewhere",
        "a volume is made anew of an image where it went to, and an older etcd asks another node for it: it stays with its image",
        |stage| Box::pin(of_image_elsewhere(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-of-a-guest-of-which-nothing-can-be-read",
        "a volume is to be taken from a guest whose agent is away, whose status somebody deletes and damages, and then its request: nobody else is given it",
        |stage| Box::pin(held_unreadably(stage)),
    ),
    Scenario::new(
        "rest-of-a-volume-whose-disk-is-gone",
        "somebody deletes the disk of a volume beside which another lies: that is kept as the rest of it, with an older etcd, and with one that knows nothing",
        |stage| Box::pin(rest_of_volume(stage)),
    ),
    Scenario::new(
        "heal-of-a-rescued-guest",
        "etcd is emptied when an agent has heard that a guest is to be unrescued, and has not begun with it: it goes on from its rescue disk",
        |stage| Box::pin(rescued_and_healed(stage)),
    ),
    Scenario::new(
        "claim-garbage-and-its-history-gone",
        "somebody puts garbage in place of a claim, and etcd's history is gone when a replica is started anew: no room is sold until it can be read",
        |stage| Box::pin(use_unknown(stage)),
    ),
    Scenario::new(
        "nodes-token-and-a-claim-of-two-nodes",
        "with the token of one node somebody claims of another for a guest, and takes away what a guest there has: both are refused",
        |stage| Box::pin(token_of_one(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "copy-for-an-image-of-a-newer-release",
        "a copy is made for an image of which a newer release says something else: a controller leaves it, and nobody is given it",
        |stage| Box::pin(copy_of_newer(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "domain-defined-larger-by-hand",
        "somebody defines the domain of a guest that is stopped with more processors than are claimed: it is started with those that are",
        |stage| Box::pin(defined_larger(stage)),
    ),
    Scenario::new(
        "saved-with-more-than-it-is-to-have",
        "an agent is killed when it has given a guest more, etcd put back to before that, and the guest saved by hand: it goes on from its memory, and has what it \
         is to have in the end",
        |stage| Box::pin(saved_larger(stage)),
    ),
    Scenario::new(
        "snapshot-restored-while-its-disk-is-made-anew",
        "a restore of a guest that is stopped is broken off while its own disk is made anew, and said again: it is stopped in the end",
        |stage| Box::pin(restored_while_remade(stage)),
    ),
    Scenario::new(
        "rescue-and-rebuild-of-a-guest-whose-room-is-sold",
        "an operator deletes the claim of a guest on a full node, whose room is sold: it is not ended for a rescue or a new disk before it is counted",
        |stage| Box::pin(sold(stage)),
    ),
    Scenario::new(
        "rescue-and-resize-behind-a-resume",
        "a guest is to be resumed and rescued, and then to be resumed and to be larger, both before its agent hears of either: it goes on first, and then has that",
        |stage| Box::pin(behind_resume(stage)),
    ),
    Scenario::new(
        "restarts-without-end",
        "a guest powers itself off as soon as its policy has started it, again and again: the pauses before that end to grow",
        |stage| Box::pin(without_end(stage)),
    ),
    Scenario::new(
        "volume-to-be-made-anew-without-a-record",
        "somebody deletes a volume's disk and its node's record of it, and it is to be made anew: who wishes that is told that it cannot be",
        |stage| Box::pin(anew_without_record(stage)),
    ),
    Scenario::new(
        "volume-to-grow-whose-claim-is-elsewhere",
        "an operator moves the claim of a volume to another node, and it is to grow: who wishes that is told that it cannot",
        |stage| Box::pin(grows_elsewhere(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "resize-whose-claim-is-moved-when-it-has-grown",
        "the agent is killed when it has given a guest more, and an operator moves its claim to another node: it is well as long as it runs",
        |stage| Box::pin(grown_elsewhere(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "volumes-of-a-saved-guest-in-an-older-etcd",
        "etcd is put back to a time when a suspended guest had a volume: it is given that when it goes on, and not tried before",
        |stage| Box::pin(saved_without_volume(stage)),
    ),
    Scenario::new(
        "wish-for-what-nobody-can-tell-of",
        "somebody puts garbage in place of the status of a guest: it is neither stopped nor rebuilt, and may be renamed",
        |stage| Box::pin(untold(stage)),
    ),
    Scenario::new(
        "volume-of-which-nobody-knows-that-it-is-one",
        "somebody deletes all keys of a volume and its node's record of it: it passes for a guest's disk, and is not destroyed as that while a guest has it",
        |stage| Box::pin(kind_unknown(stage)),
    ),
    Scenario::new(
        "volume-forgotten-with-its-guest",
        "etcd loses everything, and somebody deletes a volume before its guest is brought back: that is refused, since the guest is to have it",
        |stage| Box::pin(forgotten_with_guest(stage)),
    ),
    Scenario::new(
        "nodes-token-and-an-aggregate",
        "an operator has two nodes be in one aggregate: what the one offers is not changed with the token of the other",
        |stage| Box::pin(aggregate(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "group-softly-apart-where-the-other-node-is-fuller",
        "two members of a group with soft anti-affinity are placed where one node has more room than the other: each is on one of its own",
        |stage| Box::pin(softly_apart(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "suspended-and-rebooted-without-room",
        "an operator deletes the claim of a suspended guest, whose room is sold, and it is to be rebooted hard: its memory is kept till it can be started",
        |stage| Box::pin(suspended_sold(stage)),
    ),
    Scenario::new(
        "placement-away-for-hours",
        "placement is away for hours while a guest is to be built: it is built within a minute when that is back",
        |stage| Box::pin(away_for_hours(stage)),
    ),
    Scenario::new(
        "resize-just-after-a-record-was-mended",
        "somebody mends the node's record of a guest, and another size is wished before its agent has looked: it is told to have that when it has",
        |stage| Box::pin(resized_after_mending(stage)),
    ),
    Scenario::new(
        "snapshot-restore-broken-off-and-refused",
        "a restore is broken off when it has stopped the guest, and somebody locks its volume: said again it is refused, with nothing locked or restored",
        |stage| Box::pin(broken_off(stage)),
    ),
    Scenario::new(
        "name-of-a-guest-whose-keys-are-gone",
        "an agent is killed, and somebody deletes request and status of its guest: a controller leaves its record and its name, and nobody else has that",
        |stage| Box::pin(name_stays(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "rescue-and-resize-behind-a-clock-that-went-back",
        "a guest is rescued and resized, all clocks go back by an hour, and both are done again: each is a wish of its own",
        |stage| Box::pin(clock_back(stage)),
    ),
    Scenario::new(
        "heal-of-a-size-after-one-that-failed",
        "a resize fails that has made the disk larger, and etcd is emptied when an agent has heard of the next: the guest is brought back with the disk that it has",
        |stage| Box::pin(failed_and_healed(stage)),
    ),
    Scenario::new(
        "look-that-tells-late",
        "a hypervisor's answer to a look comes when a guest was built that the look knows nothing of: the guest is built once",
        |stage| Box::pin(late_look(stage)),
    ),
    Scenario::new(
        "volume-to-be-taken-from-who-had-it",
        "a volume is to be taken from the guest that had it when somebody looked, and another has it by now: it keeps it",
        |stage| Box::pin(taken_from_other(stage)),
    ),
    Scenario::new(
        "rebuild-in-an-older-etcd-behind-a-clock-that-went-back",
        "a guest is rebuilt, etcd put back to before that was wished, all clocks go back by an hour, and the guest is rebuilt again: it has another disk",
        |stage| Box::pin(rebuilt_before(stage)),
    ),
    Scenario::new(
        "volume-made-anew-that-comes-to-a-dead-agent",
        "a volume that was made anew goes to a node whose agent is killed before it comes: it is told to have been made anew, and is not again",
        |stage| Box::pin(comes_unseen(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "start-while-it-stops-in-its-own-time",
        "a guest that hears nothing for a while is to be stopped within minutes, and its user starts it meanwhile: it has those minutes all the same",
        |stage| Box::pin(own_time(stage)),
    ),
    Scenario::new(
        "copy-of-a-guest-whose-room-it-waits-for",
        "a guest is not counted, since its room was sold, and is to have a copy of another's disk as its own: when that is destroyed, it goes at once",
        |stage| Box::pin(copy_waits(stage)),
    ),
    Scenario::new(
        "heal-of-what-its-node-knows-better",
        "etcd is put back to before a guest was renamed and locked, and somebody deletes its request before its agent hears of that: it is brought back as its node \
         knew it last",
        |stage| Box::pin(known_better(stage)),
    ),
    Scenario::new(
        "claim-of-more-than-one-may-take",
        "somebody claims more of a node at once than one may take, and less than there is: that is refused, and so is what is no whole step",
        |stage| Box::pin(more_than_one_may(stage)),
    ),
    Scenario::new(
        "volume-of-one-guest-that-is-to-be-anothers",
        "an older etcd has a volume where it was, and there it is given to a guest while another has it: it is not brought back till that is taken back",
        |stage| Box::pin(anothers(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volumes-taken-along-and-healed-first",
        "on shared storage an older etcd has volumes where they were before a guest of the other node was given them, and knows nothing of the guest: whichever is \
         healed first, all are brought back where they are",
        |stage| Box::pin(taken_along(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
];

fn is_stopped(is: &Sight) -> bool {
    is.is(State::Stopped) && !is.runs() && is.is_kept()
}

fn is_there(is: &Sight) -> bool {
    is.is(State::Active) && is.volume && is.claim && is.record
}

async fn made(stage: &Stage, order: Order) -> InstanceId {
    let asked = stage.user(1).makes_volume(order).await;
    come(stage, asked).await
}

async fn done(stage: &Stage, guest: InstanceId, verb: &Verb) {
    let done = stage.user(1).wish(guest, verb).await;
    stage.demand(done.is_ok(), &format!("{} is done", verb.name())).await;
}

async fn refused(stage: &Stage, told: Result<(), String>, why: &str) {
    stage.demand(told.is_err_and(|told| told.contains(why)), &format!("it is refused: {why}")).await;
}

fn is_at(stage: &Stage, volume: InstanceId, node: usize) -> bool {
    observed(stage.node(node), volume).is_some_and(|seen| seen.volume)
}

async fn moved(stage: &Stage, volume: InstanceId, node: usize) {
    if !is_at(stage, volume, node) {
        let moved = stage.user(1).moves(volume, stage.node(node).node).await;
        stage.demand(moved.is_ok() && is_at(stage, volume, node), &format!("it goes to n{node}")).await;
    }
}

async fn until_unclaimed(stage: &Stage, instance: InstanceId) {
    stage.until(instance, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.pass(60).await;
}

async fn heals(stage: &Stage, count: usize) {
    stage.demand(stage.user(1).heals().await == Ok(count), &format!("{count} are brought back")).await;
}

/// A volume of n2 that n1 handed over, and whose record n1 has still: its agent is dead.
async fn handed_over(stage: &Stage) -> InstanceId {
    let volume = made(stage, Order::SMALL).await;
    moved(stage, volume, 1).await;
    stage.pass(10).await;
    stage.snag("n1", "hypervisor HandOver", Fate::KillsAfterwards);
    moved(stage, volume, 2).await;
    stage.pass(30).await;
    volume
}

/// As of a backup of its file.
async fn put_back(stage: &Stage, node: usize, instance: InstanceId) {
    let base = BaseImage {
        path: "/backup/data.qcow2".into(),
        format: DiskFormat::Qcow2,
        virtual_size: 1 << 30,
        digest: "backup".to_owned(),
    };
    stage.expects_trouble(instance);
    let is_back = stage.node(node).hypervisor.create_overlay(instance, &base, None).await.is_ok();
    stage.demand(is_back, &format!("an older disk is put back on n{node}")).await;
}

async fn older_disk(stage: Stage) {
    let volume = handed_over(&stage).await;
    stage.empty_etcd();
    until_unclaimed(&stage, volume).await;
    put_back(&stage, 1, volume).await;
    stage.start(1);
    stage.pass(120).await;
    heals(&stage, 1).await;
    let asked = |node| stage.get(&stage.world.keys.request(stage.node(node).node, volume)).is_some();
    stage.demand(asked(2) && !asked(1), "n2 is asked for it").await;
    stage.delete_disk(1, volume);
    stage.pass(120).await;
    stage.until(volume, "there", is_there).await;
}

async fn recorded_elsewhere(stage: Stage) {
    let volume = handed_over(&stage).await;
    stage.kill(2);
    for node in [1, 2] {
        acts::delete_request(&stage.world, stage.node(node), volume, true).await;
    }
    put_back(&stage, 1, volume).await;
    stage.start(1);
    until_unclaimed(&stage, volume).await;
    heals(&stage, 0).await;
    stage.delete_disk(1, volume);
    stage.start(2);
    stage.pass(120).await;
    heals(&stage, 1).await;
    stage.until(volume, "there", is_there).await;
    stage.demand(is_at(&stage, volume, 2), "where it was last").await;
}

async fn of_image_elsewhere(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    moved(&stage, volume, 1).await;
    stage.pass(10).await;
    let before = stage.back_up();
    moved(&stage, volume, 2).await;
    let of = ImageRef::at(format!("file://{}", image(&stage.world).display()));
    stage.demand(stage.user(1).remakes_of(volume, &of).await.is_ok(), "it is made anew of an image").await;
    let made = || stage.node(2).hypervisor.effects(Operation::ReplaceOverlay, volume);
    stage.until(volume, "made anew", |is| is_there(is) && made() == 1).await;
    stage.pass(10).await;
    let after = stage.back_up();
    stage.restore(&before);
    stage.pass(120).await;
    heals(&stage, 0).await;
    stage.demand(is_at(&stage, volume, 2), "it is where its image is").await;
    stage.restore(&after);
    stage.pass(120).await;
    stage.until(volume, "there", is_there).await;
}

/// One that is on this node, of two.
async fn ready_on(stage: &Stage, name: &'static str, node: usize) -> InstanceId {
    stage.disable(3 - node, true).await;
    let guest = stage.ready(name).await;
    stage.disable(3 - node, false).await;
    guest
}

async fn held_unreadably(stage: Stage) {
    let (web, db) = (stage.ready("web").await, stage.ready("db").await);
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, web).await;
    stage.kill(1);
    stage.demand(stage.user(1).detaches(volume).await.is_err(), "nobody takes it yet").await;
    let told = stage.world.keys.status(stage.node(1).node, web);
    stage.world.judge(|referee, _| referee.status_lost(web));
    stage.delete(&told).await;
    refused(&stage, stage.user(2).attaches(volume, db).await, "has it").await;
    acts::delete_request(&stage.world, stage.node(1), web, false).await;
    stage.put(&told, "garbage").await;
    refused(&stage, stage.user(2).attaches(volume, db).await, "has it").await;
    stage.start(1);
    stage.pass(60).await;
    stage.demand(has(&stage, web, volume) && !has(&stage, db, volume), "one guest has it").await;
    stage.delete(&told).await;
    until_unclaimed(&stage, web).await;
    heals(&stage, 1).await;
    stage.until_well(web).await;
}

async fn rest_of_volume(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let rest = || stage.node(1).hypervisor.has_successor(volume);
    let before = stage.back_up();
    stage.snag("n1", "hypervisor CreateSuccessor", Fate::KillsAfterwards);
    let of = CopyOf::disk(Workload::Volume, copy);
    stage.user(1).remakes(volume, &of).await.ok();
    stage.until_down(1).await;
    stage.delete_disk(1, volume);
    stage.restore(&before);
    stage.start(1);
    let gone = |is: &Sight| is.is(State::Error) && is.says("its disk is gone") && is.claim;
    stage.until(volume, "in ERROR", gone).await;
    stage.stays(volume, 120, "in ERROR", gone).await;
    stage.demand(rest(), "the other is kept").await;
    stage.empty_etcd();
    until_unclaimed(&stage, volume).await;
    stage.stays(volume, 120, "UNCLAIMED", |is| is.is(State::Unclaimed) && is.claim).await;
    stage.demand(rest(), "and is so still").await;
    heals(&stage, 2).await;
    stage.until(volume, "in ERROR", gone).await;
    stage.demand(rest(), "also when it is brought back").await;
}

async fn rescued_and_healed(stage: Stage) {
    let guest = stage.ready("web").await;
    done(&stage, guest, &Verb::Rescue(None)).await;
    let rescued =
        |is: &Sight| is.is(State::Rescued) && is.runs() && is.guest.rescued && is.rescue_disk && is.is_kept();
    stage.until(guest, "rescued", rescued).await;
    stage.snag("n1", "put status/n1/i1 UNRESCUING", Fate::Kills);
    stage.user(1).asks(guest, &Verb::Unrescue).await;
    stage.until_down(1).await;
    stage.empty_etcd();
    stage.start(1);
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.is_kept()).await;
    let starts = || stage.node(1).hypervisor.effects(Operation::StartRescue, guest);
    let before = starts();
    heals(&stage, 1).await;
    stage.until(guest, "rescued", rescued).await;
    stage.stays(guest, 120, "rescued", rescued).await;
    stage.demand(starts() == before, "it ran on").await;
    done(&stage, guest, &Verb::Unrescue).await;
    stage.until(guest, "well with its own disk", |is| is.is_well() && !is.guest.rescued).await;
}

async fn use_unknown(stage: Stage) {
    let mut guests = Vec::new();
    for name in ["a", "b", "c", "d"] {
        guests.push(stage.ready(name).await);
    }
    let key = format!("{PLACEMENT}/consumers/{}", guests[0]);
    let whole = stage.get(&key).unwrap_or_default();
    stage.put(&key, "garbage").await;
    acts::compact(&stage.world).await;
    stage.kill_replica(1);
    stage.start_replica(1);
    stage.pass(10).await;
    stage.demand(stage.user(1).schedule("e").await.is_err(), "its room is not offered").await;
    let claim = json!({
        "allocations": {(stage.node(1).node.to_string()): {"resources": {"VCPU": 1}}}, "project_id": "p", "user_id": "u",
        "consumer_generation": null, "consumer_type": "OTHERS",
    });
    let path = "/allocations/00000000-0000-0000-0000-00000000f00d";
    let (status, _) = stage.placement(Method::PUT, path, Some(claim)).await;
    stage.demand(status == 503, "nor sold to who asks for it").await;
    stage.stays(guests[0], 60, "running", |is| is.is(State::Active) && is.runs()).await;
    stage.put(&key, whole).await;
    stage.pass(10).await;
    stage.demand(stage.user(1).schedule("g").await.is_err(), "there is no room").await;
    for guest in guests {
        stage.until_well(guest).await;
    }
}

async fn token_of_one(stage: Stage) {
    let placed = stage.placed("web").await;
    let guest = placed.instance;
    stage.until_well(guest).await;
    let at = if placed.node == stage.node(1).node { 1 } else { 2 };
    let path = format!("/allocations/{guest}");
    let (_, whole) = stage.placement(Method::GET, &path, None).await;
    let other = stage.node(3 - at).node.to_string();
    let mut both = whole.clone();
    both["allocations"][&other] = json!({"resources": {"VCPU": 1}});
    let mut theirs = whole.clone();
    theirs["allocations"] = json!({other: {"resources": {"VCPU": 1}}});
    let mut nothing = whole.clone();
    nothing["allocations"] = json!({});
    for (whose, mut wanted) in [(at, both), (3 - at, theirs), (3 - at, nothing)] {
        for of in wanted["allocations"].as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            of.as_object_mut().map(|of| of.remove("generation"));
        }
        let token = stage.node(whose).token();
        let (status, _) = stage.ask_placement(&token, Method::PUT, &path, Some(wanted)).await;
        stage.demand(status == 403, "it is refused").await;
    }
    let (_, now) = stage.placement(Method::GET, &path, None).await;
    stage.demand(now["allocations"] == whole["allocations"], "its claim is as it was").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn copy_of_newer(stage: Stage) {
    let (guest, volume) = (stage.ready("web").await, made(&stage, Order::SMALL).await);
    let user = stage.user(1);
    stage.world.snag("u1", "put images/", Fate::Arrives, 3);
    stage.snag("u1", "put images/", Fate::Kills);
    let sent = Deed::Add { name: "debian", parts: Some(40), public: false, protected: false };
    let killed = timeout(Duration::from_secs(60), user.catalogs(sent)).await.is_err();
    let images = stage.world.store.content(&stage.world.keys.images()).pairs;
    let Some(pair) = images.first().filter(|_| killed) else {
        return stage.fail("it is on its way").await;
    };
    let Ok(image) = stage.world.keys.parse_image(&pair.key) else { return };
    let of = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, volume));
    let asked = stage.user(2).copies_for(image, &of).await;
    let copy = come(&stage, asked).await;
    refused(&stage, stage.user(2).attaches(copy, guest).await, "goes with that").await;
    let whole = stage.get(&pair.key).unwrap_or_default();
    let mut newer: Value = serde_json::from_slice(&whole).unwrap_or_default();
    newer["status"] = json!("importing");
    stage.put(&pair.key, newer.to_string()).await;
    stage.stays(copy, 1500, "there", is_there).await;
    stage.put(&pair.key, whole).await;
    stage.demand(stage.user(2).deletes(copy).await.is_ok(), "it is deleted").await;
    stage.until_gone(copy).await;
    stage.user(2).catalogs(Deed::Delete("debian".to_owned())).await;
}

async fn defined_larger(stage: Stage) {
    let guest = stage.ready("web").await;
    done(&stage, guest, &Verb::Stop(0)).await;
    let hypervisor = &stage.node(1).hypervisor;
    let Ok(Some(size)) = hypervisor.size(guest).await else { return stage.fail("it has a size").await };
    let larger = DomainSpec {
        instance: guest,
        title: "web".to_owned(),
        volumes: Vec::new(),
        vcpus: size.vcpus + 2,
        memory_mb: size.memory_mb,
    };
    stage.demand(hypervisor.redefine(&larger).await.is_ok(), "somebody defines it larger").await;
    done(&stage, guest, &Verb::Start).await;
    stage.until_well(guest).await;
    let is = hypervisor.size(guest).await.ok().flatten().map(|is| is.vcpus);
    stage.demand(is == Some(size.vcpus), "it has what is claimed for it").await;
}

async fn saved_larger(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    stage.snag("n1", "hypervisor Grow ", Fate::KillsAfterwards);
    stage.user(1).asks(guest, &to(2, 1)).await;
    stage.until_down(1).await;
    stage.restore(&before);
    stage.world.judge(|referee, _| referee.handled(guest));
    let hypervisor = &stage.node(1).hypervisor;
    stage.demand(hypervisor.save(guest).await.is_ok(), "somebody saves it").await;
    stage.start(1);
    stage.until(guest, "SUSPENDED", |is| is.is(State::Suspended)).await;
    done(&stage, guest, &Verb::Resume).await;
    stage.pass(200).await;
    stage.until_well(guest).await;
    stage.demand(hypervisor.effects(Operation::DropMemory, guest) == 0, "its memory was kept").await;
    let is = hypervisor.size(guest).await.ok().flatten().map(|is| is.vcpus);
    stage.demand(is == Some(1) && claimed(&stage.world, guest, "VCPU") == 1, "it has what it had").await;
}

async fn restored_while_remade(stage: Stage) {
    let guest = stage.ready("web").await;
    let asked = stage.user(1).snapshots(guest).await;
    let copy = come(&stage, asked).await;
    done(&stage, guest, &Verb::Stop(0)).await;
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_latency(Operation::CreateSuccessor, Duration::from_secs(30));
    let user = stage.user(1);
    let broken_off = timeout(Duration::from_secs(10), user.restores(copy)).await;
    stage.demand(broken_off.is_err() && stage.sight(guest).is(State::Rebuilding), "it is broken off").await;
    stage.demand(stage.user(2).restores(copy).await.is_ok(), "it is restored").await;
    hypervisor.set_latency(Operation::CreateSuccessor, Duration::ZERO);
    stage.until(guest, "STOPPED", is_stopped).await;
    stage.stays(guest, 60, "STOPPED", is_stopped).await;
    done(&stage, guest, &Verb::Start).await;
}

async fn sold(stage: Stage) {
    let mut guests = Vec::new();
    for name in ["a", "b", "c", "d"] {
        guests.push(stage.ready(name).await);
    }
    let guest = guests[0];
    stage.world.judge(|referee, world| referee.replaced(world));
    stage.placement(Method::DELETE, &format!("/allocations/{guest}"), None).await;
    stage.ready("e").await;
    let runs = |is: &Sight| is.is(State::Active) && is.runs() && !is.guest.rescued;
    stage.stays(guest, 60, "running", runs).await;
    stage.user(1).asks(guest, &Verb::Rescue(None)).await;
    stage.stays(guest, 120, "running", |is| is.runs() && !is.guest.rescued).await;
    stage.user(1).asks(guest, &Verb::Unrescue).await;
    stage.pass(60).await;
    stage.user(1).asks(guest, &Verb::Rebuild(None)).await;
    stage.stays(guest, 120, "running", Sight::runs).await;
    stage.destroyed(guests[1]).await;
    stage.until_gone(guests[1]).await;
    stage.until_well(guest).await;
}

async fn behind_resume(stage: Stage) {
    let guest = stage.ready("web").await;
    for rescues in [true, false] {
        done(&stage, guest, &Verb::Suspend).await;
        stage.kill(1);
        stage.user(1).asks(guest, &Verb::Resume).await;
        let next = if rescues { Verb::Rescue(None) } else { to(2, 1) };
        stage.user(1).asks(guest, &next).await;
        stage.start(1);
        if rescues {
            stage.until(guest, "rescued", |is| is.is(State::Rescued) && is.guest.rescued).await;
            done(&stage, guest, &Verb::Unrescue).await;
        } else {
            stage.pass(120).await;
            let size = stage.node(1).hypervisor.size(guest).await.ok().flatten();
            stage.demand(size.is_some_and(|is| is.vcpus == 2), "it is larger").await;
        }
        stage.until_well(guest).await;
    }
    let forgotten = stage.node(1).hypervisor.effects(Operation::DropMemory, guest);
    stage.demand(forgotten == 0, "its memory was not lost").await;
}

async fn without_end(stage: Stage) {
    let guest = with_policy(&stage, Restart::Always).await;
    for _ in 0..12 {
        stage.end_guest(1, guest, End::ByGuest);
        stage.until(guest, "started again later", |is| is.says("it is started again in")).await;
        // Not longer than a few minutes.
        stage.until_well(guest).await;
    }
}

async fn anew_without_record(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    stage.kill(1);
    stage.delete_disk(1, volume);
    stage.say(format!("somebody deletes the record of {volume} on n1"));
    stage.world.judge(|referee, _| referee.record_lost(volume));
    stage.node(1).lose_record(volume);
    stage.start(1);
    let gone = |is: &Sight| is.is(State::Error) && is.claim && is.asked_for.is_some();
    stage.until(volume, "in ERROR", gone).await;
    refused(&stage, stage.user(1).attaches(volume, guest).await, "its disk is gone").await;
    let of = CopyOf::disk(Workload::Volume, copy);
    stage.demand(stage.user(1).remakes(volume, &of).await.is_ok(), "it is to be made anew").await;
    let is_told = |is: &Sight| {
        let rebuilt = is.status.as_ref().and_then(|status| status.rebuilt.as_ref());
        gone(is) && rebuilt.is_some_and(|rebuilt| rebuilt.failed.is_some())
    };
    stage.until(volume, "told not to be made anew", is_told).await;
}

fn resize_failed(status: Option<&Status>) -> bool {
    let resized = status.and_then(|status| status.resized.as_ref());
    resized.is_some_and(|resized| resized.failed.is_some())
}

/// An operator moves a claim from this node to the other one, of two.
async fn claim_moves(stage: &Stage, instance: InstanceId, from: usize) {
    let [here, there] = [from, 3 - from].map(|node| stage.node(node).node.to_string());
    change_claim(stage, instance, |claim| *claim = json!({there: claim[here].clone()})).await;
}

async fn grows_elsewhere(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let here = if is_at(&stage, volume, 1) { 1 } else { 2 };
    stage.expects_trouble(volume);
    claim_moves(&stage, volume, here).await;
    stage.user(1).extends(volume, 3).await.ok();
    let is_told = |is: &Sight| is.is(State::Active) && resize_failed(is.status.as_ref());
    stage.until(volume, "told not to be larger", is_told).await;
    stage.demand(stage.sight(volume).disk_bytes == 1 << 30, "it is as large as it was").await;
    claim_moves(&stage, volume, 3 - here).await;
    stage.until(volume, "there", is_there).await;
}

async fn grown_elsewhere(stage: Stage) {
    let guest = ready_on(&stage, "web", 1).await;
    stage.snag("n1", "hypervisor Grow ", Fate::KillsAfterwards);
    stage.user(1).asks(guest, &to(2, 1)).await;
    stage.until_down(1).await;
    stage.expects_trouble(guest);
    claim_moves(&stage, guest, 1).await;
    stage.start(1);
    stage.pass(5).await;
    stage.stays(guest, 120, "running", |is| is.is(State::Active) && is.runs()).await;
    stage.until_well(guest).await;
}

async fn saved_without_volume(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, guest).await;
    done(&stage, guest, &Verb::Suspend).await;
    stage.pass(10).await;
    let before = stage.back_up();
    done(&stage, guest, &Verb::Resume).await;
    stage.demand(stage.user(1).detaches(volume).await.is_ok(), "it is taken").await;
    done(&stage, guest, &Verb::Suspend).await;
    stage.restore(&before);
    stage.pass(60).await;
    let tries = || stage.node(1).hypervisor.calls_of(Operation::SetVolumes, guest);
    let tried = tries();
    stage.stays(guest, 120, "SUSPENDED", |is| is.is(State::Suspended)).await;
    stage.demand(tries() == tried, "it is not tried again").await;
    done(&stage, guest, &Verb::Resume).await;
    stage.until(guest, "well with its volume", |is| is.is_well() && has(&stage, guest, volume)).await;
}

async fn untold(stage: Stage) {
    let guest = stage.ready("web").await;
    let told = stage.world.keys.status(stage.node(1).node, guest);
    stage.put(&told, "garbage").await;
    for verb in [Verb::Stop(0), Verb::Rebuild(None), Verb::Reboot(0)] {
        refused(&stage, stage.user(1).wish(guest, &verb).await.map(drop), "cannot be read").await;
    }
    stage.user(1).asks(guest, &Verb::Rename("db".to_owned())).await;
    stage.stays(guest, 60, "running", Sight::runs).await;
    stage.world.judge(|referee, _| referee.status_lost(guest));
    stage.delete(&told).await;
    stage.until_well(guest).await;
}

async fn kind_unknown(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, guest).await;
    stage.kill(1);
    stage.expects_trouble(volume);
    acts::delete_request(&stage.world, stage.node(1), volume, true).await;
    stage.delete(&stage.world.keys.instance(volume)).await;
    stage.say(format!("somebody deletes the record of {volume} on n1"));
    stage.world.judge(|referee, _| referee.record_lost(volume));
    stage.node(1).lose_record(volume);
    stage.start(1);
    until_unclaimed(&stage, volume).await;
    refused(&stage, stage.user(1).destroy(volume).await, "has volume").await;
    stage.stays(volume, 60, "there", |is| is.volume && is.claim).await;
    stage.demand(has(&stage, guest, volume), "its guest has it").await;
    stage.demand(stage.user(1).wish(guest, &Verb::Stop(0)).await.is_ok(), "its guest is stopped").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.destroyed(volume).await;
}

async fn forgotten_with_guest(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, guest).await;
    stage.empty_etcd();
    until_unclaimed(&stage, guest).await;
    until_unclaimed(&stage, volume).await;
    refused(&stage, stage.user(1).deletes(volume).await, "has volume").await;
    heals(&stage, 2).await;
    stage.until_well(guest).await;
    stage.until(volume, "there", is_there).await;
    stage.demand(has(&stage, guest, volume), "its guest has it").await;
}

async fn aggregate(stage: Stage) {
    let node = |number: usize| stage.node(number).node;
    for number in [1, 2] {
        let path = format!("/resource_providers/{}/aggregates", node(number));
        let (_, mut own) = stage.placement(Method::GET, &path, None).await;
        own["aggregates"] = json!(["00000000-0000-0000-0000-0000000000aa"]);
        let (status, _) = stage.placement(Method::PUT, &path, Some(own)).await;
        stage.demand(status == 200, "it is in the aggregate").await;
    }
    let path = format!("/resource_providers/{}/inventories/VCPU", node(2));
    let (_, mut offered) = stage.placement(Method::GET, &path, None).await;
    offered["reserved"] = json!(1);
    let token = stage.node(1).token();
    let (status, _) = stage.ask_placement(&token, Method::PUT, &path, Some(offered)).await;
    stage.demand(status == 403, "it is refused").await;
    stage.ready("web").await;
}

async fn softly_apart(stage: Stage) {
    let claim = others_claim(&stage, 0, 2).await;
    group(&stage, Policy::SoftAntiAffinity).await;
    let (Ok(one), Ok(other)) = (place(&stage, 1, "a").await, place(&stage, 2, "b").await) else {
        return stage.fail("they are not placed").await;
    };
    stage.demand(one.node != other.node, "each is on a node of its own").await;
    stage.until_well(other.instance).await;
    stage.placement(Method::DELETE, &claim, None).await;
}

async fn suspended_sold(stage: Stage) {
    let mut guests = Vec::new();
    for name in ["a", "b", "c", "d"] {
        guests.push(stage.ready(name).await);
    }
    let guest = guests[0];
    done(&stage, guest, &Verb::Suspend).await;
    stage.world.judge(|referee, world| referee.replaced(world));
    stage.placement(Method::DELETE, &format!("/allocations/{guest}"), None).await;
    stage.ready("e").await;
    stage.pass(60).await;
    stage.user(1).asks(guest, &Verb::Reboot(0)).await;
    let forgotten = || stage.node(1).hypervisor.effects(Operation::DropMemory, guest);
    stage.pass(120).await;
    stage.demand(forgotten() == 0, "its memory is kept").await;
    stage.destroyed(guests[1]).await;
    stage.until_gone(guests[1]).await;
    stage.until_well(guest).await;
    stage.demand(forgotten() == 1, "it boots anew").await;
}

async fn away_for_hours(stage: Stage) {
    stage.snag("n1", "put status/n1/i1 PREPARING", Fate::Kills);
    let guest = stage.placed("web").await.instance;
    stage.until_down(1).await;
    stage.kill_replica(1);
    stage.start(1);
    stage.pass(3 * 3600).await;
    stage.start_replica(1);
    stage.pass(60).await;
    stage.demand(stage.sight(guest).is_well(), "it is well").await;
}

async fn resized_after_mending(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say(format!("damages the record of {guest} on n1"));
    stage.demand(stage.node(1).garble_record(guest), "the record is damaged").await;
    stage.world.judge(|referee, _| referee.record_garbled(guest));
    stage.until(guest, "told to be without a record", |is| is.says("cannot be read")).await;
    stage.say("mends it");
    acts::mend_records(&stage.world, stage.node(1));
    done(&stage, guest, &to(2, 1)).await;
    let is = stage.node(1).hypervisor.size(guest).await.ok().flatten().map(|is| is.vcpus);
    stage.demand(is == Some(2), "it has its new size").await;
    stage.until_well(guest).await;
}

async fn broken_off(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, guest).await;
    let asked = stage.user(1).snapshots(guest).await;
    let copy = come(&stage, asked).await;
    stage.snag("u1", "put instances/i1", Fate::Arrives);
    stage.snag("u1", "put instances/i1", Fate::Kills);
    stage.demand(stage.user(1).restores(copy).await.is_err(), "it is broken off").await;
    stage.until(guest, "STOPPED", is_stopped).await;
    let user = stage.user(2);
    stage.demand(user.wish(volume, &Verb::Lock("mine".into())).await.is_ok(), "its volume is locked").await;
    refused(&stage, user.restores(copy).await, "it is locked (mine)").await;
    let record = stage.get(&stage.world.keys.instance(guest));
    let record = record.and_then(|value| decode::<Instance>(&value).ok());
    stage.demand(record.is_some_and(|record| record.locked.is_none()), "the guest is not locked").await;
    let replaced = stage.node(1).hypervisor.calls(Operation::ReplaceOverlay);
    stage.demand(replaced == 0, "nothing is restored").await;
    stage.demand(user.wish(volume, &Verb::Unlock).await.is_ok(), "its volume is unlocked").await;
    stage.demand(user.restores(copy).await.is_ok(), "it is restored").await;
    stage.until_well(guest).await;
}

async fn name_stays(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    let (keys, node) = (&stage.world.keys, stage.node(1).node);
    for key in [keys.request(node, guest), keys.status(node, guest)] {
        stage.delete(&key).await;
    }
    stage.pass(1000).await;
    let record = stage.get(&stage.world.keys.instance(guest));
    stage.demand(record.is_some(), "its record is there").await;
    refused(&stage, stage.user(2).schedule("web").await.map(drop), "taken").await;
    stage.start(1);
    until_unclaimed(&stage, guest).await;
    heals(&stage, 1).await;
    stage.until_well(guest).await;
}

async fn clock_back(stage: Stage) {
    let guest = stage.ready("web").await;
    for vcpus in [2, 1] {
        done(&stage, guest, &to(vcpus, 1)).await;
        stage.until_well(guest).await;
        let is = stage.node(1).hypervisor.size(guest).await.ok().flatten().map(|is| is.vcpus);
        stage.demand(is == Some(vcpus), "it has its new size").await;
        done(&stage, guest, &Verb::Confirm).await;
        done(&stage, guest, &Verb::Rescue(None)).await;
        stage.until(guest, "rescued", |is| is.is(State::Rescued) && is.guest.rescued).await;
        done(&stage, guest, &Verb::Unrescue).await;
        stage.until_well(guest).await;
        if vcpus == 2 {
            stage.say("sets all clocks back by an hour");
            stage.world.step_clock(-3600);
        }
    }
}

async fn failed_and_healed(stage: Stage) {
    let guest = stage.ready("web").await;
    for call in ["hypervisor Grow ", "hypervisor Redefine"] {
        stage.snag("n1", call, Fate::IsRefused(0));
    }
    stage.demand(stage.user(1).wish(guest, &to(2, 2)).await.is_err(), "it fails").await;
    stage.until_well(guest).await;
    stage.demand(stage.sight(guest).disk_bytes == 2 << 30, "its disk is larger").await;
    stage.snag("n1", "hypervisor Grow ", Fate::Kills);
    stage.user(1).asks(guest, &to(2, 2)).await;
    stage.until_down(1).await;
    stage.empty_etcd();
    stage.start(1);
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.is_kept()).await;
    heals(&stage, 1).await;
    stage.until_well(guest).await;
    let record = stage.get(&stage.world.keys.instance(guest));
    let record = record.and_then(|value| decode::<Instance>(&value).ok());
    let disk = record.and_then(|record| record.spec.resources.get("DISK_GB").copied());
    stage.demand(disk == Some(2), "it is recorded with the disk that it has").await;
    stage.pass(300).await;
    stage.demand(claimed(&stage.world, guest, "DISK_GB") == 2, "which stays claimed").await;
}

async fn late_look(stage: Stage) {
    let hypervisor = &stage.node(1).hypervisor;
    let looks = || hypervisor.calls(Operation::List);
    for name in ["web", "db"] {
        stage.pass(5).await;
        let before = looks();
        stage.snag("n1", "asks its hypervisor to list", Fate::IsLate(Duration::from_secs(5)));
        while looks() == before {
            sleep(Duration::from_millis(1)).await;
        }
        let guest = stage.ready(name).await;
        stage.stays(guest, 10, "well", Sight::is_well).await;
        for what in [Operation::CreateOverlay, Operation::Define, Operation::Start] {
            stage.demand(hypervisor.calls_of(what, guest) == 1, "each step was done once").await;
        }
    }
}

async fn taken_from_other(stage: Stage) {
    let (web, db) = (stage.ready("web").await, stage.ready("db").await);
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, web).await;
    let user = stage.user(1);
    stage.demand(user.detaches_from(volume, web).await.is_ok(), "it is taken").await;
    given(&stage, volume, db).await;
    refused(&stage, user.detaches_from(volume, web).await, "has volume").await;
    stage.demand(has(&stage, db, volume), "the other has it").await;
}

async fn rebuilt_before(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    let replaced = || stage.node(1).hypervisor.effects(Operation::ReplaceOverlay, guest);
    done(&stage, guest, &Verb::Rebuild(None)).await;
    stage.until_well(guest).await;
    stage.restore(&before);
    let is_told = |is: &Sight| is.status.as_ref().is_some_and(|status| status.rebuilt.is_some());
    stage
        .until(guest, "told to have another disk, which nobody wishes", |is| is.is_well() && is_told(is))
        .await;
    stage.demand(replaced() == 1, "it has another disk").await;
    stage.say("sets all clocks back by an hour");
    stage.world.step_clock(-3600);
    done(&stage, guest, &Verb::Rebuild(None)).await;
    stage.demand(replaced() == 2, "it has one more").await;
    stage.until_well(guest).await;
}

async fn comes_unseen(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    moved(&stage, volume, 1).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let of = CopyOf::disk(Workload::Volume, copy);
    stage.demand(stage.user(1).remakes(volume, &of).await.is_ok(), "it is to be made anew").await;
    let replaced = || -> u64 {
        let of = |node: usize| stage.node(node).hypervisor.effects(Operation::ReplaceOverlay, volume);
        of(1) + of(2)
    };
    stage.until(volume, "made anew", |is| is_there(is) && replaced() == 1).await;
    stage.pass(5).await;
    stage.snag("n2", "put status/n2/i1 PREPARING", Fate::KillsAfterwards);
    let user = stage.user(1);
    let (gone, ()) = tokio::join!(user.moves(volume, stage.node(2).node), async {
        stage.until_down(2).await;
        stage.pass(20).await;
        stage.start(2);
    });
    stage.demand(gone.is_ok() && is_at(&stage, volume, 2), "it goes there").await;
    let rebuilt = |is: &Sight| is.status.as_ref().and_then(|status| status.rebuilt.clone());
    let is_told = |is: &Sight| is_there(is) && rebuilt(is).is_some_and(|rebuilt| rebuilt.failed.is_none());
    stage.until(volume, "told to have been made anew", is_told).await;
    stage.stays(volume, 120, "told so", is_told).await;
    stage.demand(replaced() == 1, "it was made anew once").await;
}

async fn own_time(stage: Stage) {
    let guest = stage.ready("web").await;
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_deaf(true);
    stage.user(1).asks(guest, &Verb::Stop(300)).await;
    stage.pass(5).await;
    stage.user(1).asks(guest, &Verb::Start).await;
    stage.pass(120).await;
    stage.demand(hypervisor.effects(Operation::PowerOff, guest) == 0, "it is not ended yet").await;
    hypervisor.set_deaf(false);
    stage.pass(30).await;
    stage.until_well(guest).await;
    stage.demand(hypervisor.effects(Operation::PowerOff, guest) == 0, "it ended by itself").await;
    stage.demand(hypervisor.effects(Operation::Start, guest) == 2, "it was started again").await;
}

async fn copy_waits(stage: Stage) {
    let mut guests = Vec::new();
    for name in ["a", "b", "c", "d"] {
        guests.push(stage.ready(name).await);
    }
    stage.world.judge(|referee, world| referee.replaced(world));
    stage.placement(Method::DELETE, &format!("/allocations/{}", guests[0]), None).await;
    stage.ready("e").await;
    stage.pass(60).await;
    let of = ImageRef::copy_of(&CopyOf::disk(Workload::Machine, guests[1]));
    stage.user(1).asks(guests[0], &Verb::Rebuild(Some(of))).await;
    stage.pass(30).await;
    stage.destroyed(guests[1]).await;
    stage.until_gone(guests[1]).await;
    stage.until_well(guests[0]).await;
}

async fn known_better(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    done(&stage, guest, &Verb::Rename("db".to_owned())).await;
    done(&stage, guest, &Verb::Lock("mine".to_owned())).await;
    stage.pass(10).await;
    stage.kill(1);
    stage.restore(&before);
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    stage.start(1);
    until_unclaimed(&stage, guest).await;
    heals(&stage, 1).await;
    stage.until_well(guest).await;
    let record = stage.get(&stage.world.keys.instance(guest));
    let record = record.and_then(|value| decode::<Instance>(&value).ok());
    let is_known = |is: &Instance| is.name.as_deref() == Some("db") && is.locked.as_deref() == Some("mine");
    stage.demand(record.as_ref().is_some_and(is_known), "it is called as it was last, and locked").await;
    done(&stage, guest, &Verb::Unlock).await;
}

async fn more_than_one_may(stage: Stage) {
    let node = stage.node(1).node;
    let path = format!("/resource_providers/{node}/inventories/VCPU");
    let (_, mut inventory) = stage.placement(Method::GET, &path, None).await;
    let (most, before) = (inventory["max_unit"].as_u64().unwrap_or_default(), inventory["step_size"].clone());
    inventory["step_size"] = json!(2);
    stage.placement(Method::PUT, &path, Some(inventory)).await;
    for (vcpus, answer) in [(most + 1, 409), (1, 409), (2, 204)] {
        let claim = json!({
            "allocations": {(node.to_string()): {"resources": {"VCPU": vcpus}}}, "project_id": "p", "user_id": "u",
            "consumer_generation": null, "consumer_type": "OTHERS",
        });
        let path = "/allocations/00000000-0000-0000-0000-00000000f00d";
        let (status, _) = stage.placement(Method::PUT, path, Some(claim)).await;
        stage.demand(status == answer, &format!("{vcpus} are answered with {answer}")).await;
        if status == 204 {
            stage.placement(Method::DELETE, path, None).await;
        }
    }
    let (_, mut inventory) = stage.placement(Method::GET, &path, None).await;
    inventory["step_size"] = before;
    stage.placement(Method::PUT, &path, Some(inventory)).await;
    stage.ready("web").await;
}

async fn anothers(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    moved(&stage, volume, 1).await;
    let db = ready_on(&stage, "db", 1).await;
    stage.pass(10).await;
    let before = stage.back_up();
    let web = ready_on(&stage, "web", 2).await;
    moved(&stage, volume, 2).await;
    given(&stage, volume, web).await;
    stage.pass(10).await;
    stage.kill(1);
    stage.restore(&before);
    // Nobody tells that n1 has it no more.
    stage.demand(stage.user(2).attaches(volume, db).await.is_err(), "it is not given for now").await;
    stage.start(1);
    until_unclaimed(&stage, web).await;
    stage.pass(60).await;
    heals(&stage, 0).await;
    stage.demand(stage.user(2).detaches(volume).await.is_ok(), "it is to be the other's no more").await;
    heals(&stage, 2).await;
    stage.until_well(web).await;
    stage.until(volume, "there", is_there).await;
    stage.demand(has(&stage, web, volume), "its guest has it").await;
}

async fn taken_along(stage: Stage) {
    let mut volumes = Vec::new();
    for _ in 0..4 {
        let volume = made(&stage, Order::SMALL).await;
        moved(&stage, volume, 1).await;
        volumes.push(volume);
    }
    stage.pass(10).await;
    let before = stage.back_up();
    let guest = ready_on(&stage, "web", 2).await;
    for volume in &volumes {
        moved(&stage, *volume, 2).await;
        given(&stage, *volume, guest).await;
    }
    stage.restore(&before);
    until_unclaimed(&stage, guest).await;
    heals(&stage, volumes.len() + 1).await;
    stage.until_well(guest).await;
    stage.pass(120).await;
    for volume in volumes {
        stage.until(volume, "there", is_there).await;
        let is_so = is_at(&stage, volume, 2) && has(&stage, guest, volume);
        stage.demand(is_so, "it is where its guest is, which has it").await;
    }
}

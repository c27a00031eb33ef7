//! Somebody has what etcd lost brought back from the nodes.

use std::time::Duration;

use ec_cloud::{Change, Verb};
use ec_hypervisor::{Hypervisor, Operation};
use ec_model::{
    BaseImage, DiskFormat, End, Held, Instance, InstanceId, Policy, Restart, State, Workload, decode, encode,
};

use super::{Scenario, Stage, people::SMALL, stage::Sight};
use crate::{acts, door::content, referee::observed, snag::Fate, user::Order};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "heal-after-etcd-was-emptied",
        "etcd loses everything, and somebody heals: a guest that runs, with a name, user-data, a label and a lock, and one that \
         was stopped are asked for as before and as they are, a second heal finds nothing, and both can be used on",
        |stage| Box::pin(emptied(stage)),
    ),
    Scenario::new(
        "heal-behind-a-backup",
        "etcd is put back to a time before two guests; one was destroyed since, and the other's name is another's by now: \
         only the latter comes back, without a name and outside of its group, which is gone",
        |stage| Box::pin(behind_a_backup(stage)),
    ),
    Scenario::new(
        "heal-of-a-request-that-somebody-deleted",
        "somebody deletes a guest's request by hand: a heal writes it again, with a lock that came after its node heard of it",
        |stage| Box::pin(deleted(stage)),
    ),
    Scenario::new(
        "heal-of-a-member-whose-record-went-first",
        "a member of a group is stopped while its agent is down, and somebody deletes its record before that heard, and its request after: \
         a heal finds its place in the group, and with its end that goes",
        |stage| Box::pin(lost_by_and_by(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "heal-of-a-member-whose-group-cannot-be-read",
        "somebody deletes the record of a member of a group that a later release wrote: it is left, with its place in the group, until that can be read",
        |stage| Box::pin(group_of_a_later_release(stage)),
    ),
    Scenario::new(
        "heal-of-a-lost-name-and-a-lost-place",
        "somebody deletes the keys of a guest's name and of its place in a group: a heal writes both again, and a second one finds \
         nothing; where the name is another's by then, it has none",
        |stage| Box::pin(unfound(stage)),
    ),
    Scenario::new(
        "heal-of-what-was-not-heard",
        "a guest's node is down while its user stops it, and somebody deletes the request before it heard: a heal brings back what it had heard",
        |stage| Box::pin(not_heard(stage)),
    ),
    Scenario::new(
        "unlock-of-what-was-lost",
        "somebody deletes the request of a guest that is locked, and it is not healed: it is destroyed as soon as it is unlocked",
        |stage| Box::pin(locked_and_lost(stage)),
    ),
    Scenario::new(
        "heal-twice-at-once",
        "two people heal at the same moment, and one is killed after each of its writes: each guest is brought back once",
        |stage| Box::pin(twice(stage)),
    ),
    Scenario::new(
        "heal-does-not-go-on",
        "etcd is emptied while one guest is to have a new disk, one another size, and one is to be stopped: none of it is begun \
         by a heal",
        |stage| Box::pin(not_gone_on(stage)),
    ),
    Scenario::new(
        "heal-of-a-backup-in-which-it-was-lost",
        "etcd is put back to a time when a guest was UNCLAIMED, which was healed and renamed since: its node tells what it knew \
         last, and that is brought back",
        |stage| Box::pin(lost_twice(stage)),
    ),
    Scenario::new(
        "heal-of-what-two-nodes-hold",
        "somebody copies what a node holds of a lost guest to the key of another node: nobody knows whose it is, and it is brought back once the other \
         says that it has nothing of it",
        |stage| Box::pin(held_by_two(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "heal-without-all-of-its-user-data",
        "somebody cuts short the user-data that a node holds of a lost guest: it is brought back, and given none rather than a part of it",
        |stage| Box::pin(cut_short(stage)),
    ),
    Scenario::new(
        "disk-brought-back-while-its-claim-goes",
        "somebody takes the domain and the disk of a guest away that nobody asks for any more, and brings a disk back when its node \
         is about to give back what is claimed for it: it stays counted",
        |stage| Box::pin(brought_back(stage)),
    ),
];

fn unclaimed(is: &Sight) -> bool {
    is.is(State::Unclaimed) && is.is_kept()
}

async fn until_unclaimed(stage: &Stage, guests: &[InstanceId]) {
    for guest in guests {
        stage.until(*guest, "UNCLAIMED and counted", unclaimed).await;
    }
}

/// Nothing is started, ended or made anew of it.
fn acts_upon(stage: &Stage, guest: InstanceId) -> u64 {
    let hypervisor = &stage.node(1).hypervisor;
    [Operation::Start, Operation::PowerOff, Operation::ShutDown, Operation::CreateOverlay, Operation::Define]
        .into_iter()
        .map(|what| hypervisor.effects(what, guest))
        .sum()
}

fn record(stage: &Stage, guest: InstanceId) -> Option<Instance> {
    let pair = content(&stage.world, &stage.world.keys.instance(guest))?;
    decode(&pair.value).ok()
}

async fn healed(stage: &Stage, count: usize) {
    let done = stage.user(1).heals().await;
    stage.demand(done == Ok(count), &format!("{count} are brought back")).await;
}

async fn emptied(stage: Stage) {
    let order = Order {
        name: Some("web"),
        data: true,
        query: SMALL,
        restart: Restart::Always,
        group: None,
        boot: None,
    };
    let Ok(placed) = stage.user(1).order(order).await else { return stage.fail("web was not placed").await };
    let (web, db) = (placed.instance, stage.ready("db").await);
    stage.until_well(web).await;
    let labels = [("role".to_owned(), Some("front".to_owned()))].into();
    for (guest, verb) in [
        (web, Verb::Set(Change { labels, ..Change::default() })),
        (web, Verb::Lock("mine".to_owned())),
        (db, Verb::Stop(0)),
    ] {
        stage.demand(stage.user(1).wish(guest, &verb).await.is_ok(), "it is done").await;
    }
    stage.pass(5).await;
    let before = [web, db].map(|guest| acts_upon(&stage, guest));
    let data = stage.world.keys.user_data(stage.node(1).node, web);
    let was = (record(&stage, web), content(&stage.world, &data).map(|pair| pair.value));
    stage.empty_etcd();
    until_unclaimed(&stage, &[web, db]).await;
    healed(&stage, 2).await;
    stage.until_well(web).await;
    stage.until(db, "STOPPED", |is| is.is(State::Stopped) && !is.runs() && is.is_kept()).await;
    let (Some(old), Some(new)) = (was.0, record(&stage, web)) else { return stage.fail("no record").await };
    // As it was, but for what a heal changes: its wish is done already, and the command that wishes it is another.
    let (power, request_id) = (new.power.clone(), new.request_id);
    let same = Instance { generation: new.generation, power, request_id, ..old.clone() } == new
        && request_id.is_some()
        && request_id != old.request_id;
    stage.demand(same && new.locked.is_some() && !new.labels.is_empty(), "its record is as it was").await;
    let is = content(&stage.world, &data).map(|pair| pair.value);
    stage.demand(is.is_some() && is == was.1, "so is its user-data").await;
    healed(&stage, 0).await;
    stage.pass(120).await;
    stage.demand([web, db].map(|guest| acts_upon(&stage, guest)) == before, "nothing was done to them").await;
    stage.demand(stage.user(1).schedule("web").await.is_err(), "its name is its own").await;
    stage.demand(stage.user(1).wish(db, &Verb::Start).await.is_ok(), "it starts").await;
    stage.until_well(db).await;
    stage.demand(stage.user(1).wish(web, &Verb::Unlock).await.is_ok(), "it is unlocked").await;
}

async fn held_by_two(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.empty_etcd();
    until_unclaimed(&stage, &[guest]).await;
    let number = 1 + usize::from(observed(stage.node(1), guest).is_none_or(|seen| seen.domain.is_none()));
    let [here, other] = [number, 3 - number].map(|number| stage.node(number).node);
    let keys = &stage.world.keys;
    let held = stage.get(&keys.held(here, guest)).and_then(|held| decode::<Held>(&held).ok());
    let Some(mut held) = held else { return stage.fail("nothing is held").await };
    // An older one, by the same placement.
    (held.node, held.intent.request["generation"]) = (other, 0.into());
    stage.put(&keys.held(other, guest), encode(&held)).await;
    healed(&stage, 0).await;
    stage.delete(&keys.held(other, guest)).await;
    healed(&stage, 1).await;
    stage.until_well(guest).await;
}

async fn cut_short(stage: Stage) {
    let order =
        Order { name: Some("web"), data: true, query: SMALL, restart: Restart::No, group: None, boot: None };
    let Ok(placed) = stage.user(1).order(order).await else { return stage.fail("web was not placed").await };
    let guest = placed.instance;
    stage.until_well(guest).await;
    stage.empty_etcd();
    until_unclaimed(&stage, &[guest]).await;
    let (keys, node) = (&stage.world.keys, stage.node(1).node);
    let held = keys.held_user_data(node, guest);
    let Some(mut data) = stage.get(&held) else { return stage.fail("no user-data is held").await };
    data.pop();
    // Its agent would put it right at once.
    stage.cut(stage.agent(1), 5);
    stage.put(&held, data).await;
    healed(&stage, 1).await;
    stage.until_well(guest).await;
    stage.demand(stage.get(&keys.user_data(node, guest)).is_none(), "it has no user-data").await;
}

async fn behind_a_backup(stage: Stage) {
    let backup = stage.back_up();
    let web = member(&stage).await;
    let doomed = stage.ready("doomed").await;
    stage.destroyed(doomed).await;
    stage.until_gone(doomed).await;
    stage.restore(&backup);
    until_unclaimed(&stage, &[web]).await;
    let other = stage.ready("web").await;
    healed(&stage, 1).await;
    stage.until_well(web).await;
    stage.until_well(other).await;
    stage.stays(doomed, 60, "gone", Sight::is_gone).await;
    let is = record(&stage, web).is_some_and(|record| record.name.is_none() && record.group.is_none());
    stage.demand(is, "it has no name and no group").await;
    let renamed = stage.user(1).wish(web, &Verb::Rename("web2".to_owned())).await;
    stage.demand(renamed.is_ok(), "it is given another name").await;
}

async fn deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.cut(stage.agent(1), 60);
    stage.user(1).wish(guest, &Verb::Lock("mine".to_owned())).await.ok();
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    stage.pass(70).await;
    until_unclaimed(&stage, &[guest]).await;
    let before = acts_upon(&stage, guest);
    healed(&stage, 1).await;
    stage.until_well(guest).await;
    stage.demand(acts_upon(&stage, guest) == before, "nothing was done to it").await;
    let is = record(&stage, guest).is_some_and(|record| record.locked.is_some());
    stage.demand(is, "it is locked").await;
    stage.user(1).wish(guest, &Verb::Unlock).await.ok();
}

/// A guest that is the only member of a group.
async fn member(stage: &Stage) -> InstanceId {
    stage.user(1).makes_group("apart", Policy::AntiAffinity).await.ok();
    let order = Order {
        name: Some("web"),
        data: false,
        query: SMALL,
        restart: Restart::No,
        group: Some("apart"),
        boot: None,
    };
    let Ok(placed) = stage.user(1).order(order).await else { return stage.fail("web was not placed").await };
    stage.until_well(placed.instance).await;
    placed.instance
}

async fn group_of_a_later_release(stage: Stage) {
    let guest = member(&stage).await;
    let keys = &stage.world.keys;
    let content = |prefix: &str| stage.world.store.content(prefix).pairs;
    let Some(group) = content(&keys.all_groups()).pop() else { return stage.fail("there is no group").await };
    stage.put(&group.key, r#"{"version":9}"#).await;
    stage.delete(&keys.instance(guest)).await;
    healed(&stage, 0).await;
    stage.demand(content(&keys.all_members()).len() == 1, "its place in the group stays").await;
    stage.put(&group.key, group.value).await;
    healed(&stage, 1).await;
    let is = record(&stage, guest).is_some_and(|record| record.group.as_deref() == Some("apart"));
    stage.demand(is, "it is a member as before").await;
    stage.until_well(guest).await;
}

async fn unfound(stage: Stage) {
    let (guest, node) = (member(&stage).await, stage.node(1).node);
    let keys = &stage.world.keys;
    let name = keys.name(Workload::Machine, "default", "web", guest);
    let place = keys.member("default", "apart", node, guest);
    for key in [&name, &place] {
        stage.delete(key).await;
    }
    healed(&stage, 1).await;
    let is = stage.get(&name).is_some() && stage.get(&place).is_some();
    stage.demand(is, "both keys are there again").await;
    healed(&stage, 0).await;
    stage.delete(&name).await;
    let other = stage.ready("web").await;
    healed(&stage, 1).await;
    let is = record(&stage, guest).is_some_and(|record| record.name.is_none() && record.group.is_some());
    stage.demand(is, "it has no name, and its place").await;
    stage.until_well(guest).await;
    stage.until_well(other).await;
}

async fn lost_by_and_by(stage: Stage) {
    let guest = member(&stage).await;
    stage.kill(1);
    stage.user(1).wish(guest, &Verb::Stop(0)).await.ok();
    stage.delete(&stage.world.keys.instance(guest)).await;
    stage.start(1);
    stage.until(guest, "STOPPED", |is| is.is(State::Stopped)).await;
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    until_unclaimed(&stage, &[guest]).await;
    // Whoever tidies up leaves it its place.
    stage.pass(130).await;
    healed(&stage, 1).await;
    let is = record(&stage, guest).is_some_and(|record| record.group.as_deref() == Some("apart"));
    stage.demand(is, "it is a member as before").await;
    stage.until(guest, "STOPPED", |is| is.is(State::Stopped) && is.is_kept()).await;
}

async fn not_heard(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.user(1).asks(guest, &Verb::Stop(0)).await;
    stage.user(1).asks(guest, &crate::fashion::resize(2, 1)).await;
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    stage.start(1);
    until_unclaimed(&stage, &[guest]).await;
    let before = acts_upon(&stage, guest);
    healed(&stage, 1).await;
    stage.until_well(guest).await;
    stage.stays(guest, 120, "well", Sight::is_well).await;
    stage.demand(acts_upon(&stage, guest) == before, "nothing was done to it").await;
    let is = record(&stage, guest).and_then(|record| record.spec.resources.get("VCPU").copied());
    stage.demand(is == Some(1), "it is recorded as large as it is").await;
}

async fn locked_and_lost(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.user(1).wish(guest, &Verb::Lock("mine".to_owned())).await.ok();
    stage.until_well(guest).await;
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    until_unclaimed(&stage, &[guest]).await;
    stage
        .demand(stage.user(1).destroy(guest).await.is_err(), "it is not destroyed, since it is locked")
        .await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unlock).await.is_ok(), "it is unlocked").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn twice(stage: Stage) {
    let guests = [stage.ready("a").await, stage.ready("b").await, stage.ready("c").await];
    for round in 0..2 {
        stage.empty_etcd();
        until_unclaimed(&stage, &guests).await;
        let (one, other) = (stage.user(1), stage.user(2));
        if round == 1 {
            stage.snag("u1", "put requests/n1/i2 Active", Fate::KillsAfterwards);
            stage.snag("u2", "put requests/n1/i1 Active", Fate::KillsAfterwards);
        }
        let (done, too) = tokio::join!(one.heals(), other.heals());
        let count = done.unwrap_or_default() + too.unwrap_or_default();
        stage.demand(count == 3 || round == 1, "each is brought back by one of them").await;
        stage.user(3).heals().await.ok();
        for guest in guests {
            stage.until_well(guest).await;
        }
    }
    stage
        .demand(guests.iter().all(|guest| acts_upon(&stage, *guest) == 3), "they were built, and no more")
        .await;
}

async fn not_gone_on(stage: Stage) {
    let guests = [stage.ready("disk").await, stage.ready("size").await, stage.ready("power").await];
    let [disk, size, power] = guests;
    let before = guests.map(|guest| acts_upon(&stage, guest));
    // It hears of them, and is killed before it does any of it.
    stage.snag("n1", "put status/n1/i1 REBUILDING", Fate::Kills);
    let user = stage.user(1);
    tokio::join!(async { drop(user.wish(disk, &Verb::Rebuild(None)).await) }, async {
        stage.until_down(1).await;
        stage.user(2).asks(size, &crate::fashion::resize(2, 1)).await;
        stage.user(2).asks(power, &Verb::Stop(0)).await;
        // The next knows of the first only, as its record says.
        stage.empty_etcd();
        stage.start(1);
        until_unclaimed(&stage, &guests).await;
        healed(&stage, 3).await;
    });
    for guest in guests {
        stage.until_well(guest).await;
        stage.stays(guest, 60, "well", Sight::is_well).await;
    }
    stage.demand(guests.map(|guest| acts_upon(&stage, guest)) == before, "nothing was done to them").await;
}

async fn lost_twice(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.empty_etcd();
    until_unclaimed(&stage, &[guest]).await;
    let backup = stage.back_up();
    healed(&stage, 1).await;
    stage.until_well(guest).await;
    stage.user(1).wish(guest, &Verb::Rename("db".to_owned())).await.ok();
    stage.pass(5).await;
    stage.restore(&backup);
    stage.pass(60).await;
    until_unclaimed(&stage, &[guest]).await;
    healed(&stage, 1).await;
    stage.until_well(guest).await;
    let named = record(&stage, guest).and_then(|record| record.name);
    stage.demand(named.as_deref() == Some("db"), "it is called as it was last").await;
}

async fn brought_back(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.empty_etcd();
    until_unclaimed(&stage, &[guest]).await;
    stage.expects_trouble(guest);
    let hypervisor = &stage.node(1).hypervisor;
    // Each look at it takes so long.
    hypervisor.set_latency(Operation::Observe, Duration::from_secs(20));
    stage.end_guest(1, guest, End::ByHand);
    stage.undefine(1, guest);
    stage.delete_disk(1, guest);
    stage.until(guest, "out of its node's records", |is| !is.record).await;
    // By now it looks what is left of it, and before it gives back what is claimed once more.
    let looks = hypervisor.calls_of(Operation::Observe, guest);
    while hypervisor.calls_of(Operation::Observe, guest) == looks {
        stage.pass(1).await;
    }
    let base = BaseImage {
        path: "/backup/web.qcow2".into(),
        format: DiskFormat::Qcow2,
        virtual_size: 1 << 30,
        digest: "backup".to_owned(),
    };
    let is_back = hypervisor.create_overlay(guest, &base, None).await.is_ok();
    stage.demand(is_back && stage.sight(guest).claim, "its disk is back, and it is counted").await;
    stage.stays(guest, 60, "counted", |is| is.claim).await;
    hypervisor.set_latency(Operation::Observe, Duration::ZERO);
    stage
        .until(guest, "a disk that nobody asks for", |is| {
            is.is(State::Unclaimed) && is.says("a disk of this node") && is.claim && is.volume
        })
        .await;
}

//! What becomes of command lines that are killed, interrupted, unheard, or that meet each other.

use ec_cloud::{Change, Verb};
use ec_model::{Instance, Restart, State, decode};
use std::time::Duration;

use futures::future::join_all;

use super::{Scenario, Stage, people::SMALL, stage::Sight, volumes};
use crate::{snag::Fate, user::Order, world::PLACEMENT};

const KILLED: &str = "a command that schedules is killed at this step: what it leaves is given back, and its name can be had \
                      again after ten minutes";
const PLACED: &str =
    "a command that schedules is killed when its request was written: the guest is built all the same";
const UNHEARD: &str = "a command that schedules does not hear what became of this write: what it tells is true, and nothing \
                       is left that it does not tell of";

macro_rules! killed {
    ($name:literal, $call:literal, $fate:expr) => {
        Scenario::new($name, KILLED, |stage| Box::pin(killed(stage, $call, $fate)))
    };
}

macro_rules! unheard {
    ($name:literal, $call:literal, $fate:expr) => {
        Scenario::new($name, UNHEARD, |stage| Box::pin(unheard(stage, $call, $fate)))
    };
}

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "one-life",
        "somebody schedules a guest, waits for it, lists it and destroys it, and nothing goes wrong",
        |stage| Box::pin(one_life(stage)),
    ),
    killed!("schedule-killed-before-the-intent", "put instances/", Fate::Kills),
    killed!("schedule-killed-after-the-intent", "put instances/", Fate::KillsAfterwards),
    killed!("schedule-killed-before-the-claim", "PUT /allocations/", Fate::Kills),
    killed!("schedule-killed-after-the-claim", "PUT /allocations/", Fate::KillsAfterwards),
    killed!("schedule-killed-before-the-request", "put requests/", Fate::Kills),
    Scenario::new("schedule-killed-after-the-request", PLACED, |stage| Box::pin(killed_after_request(stage))),
    unheard!("schedule-unheard-of-the-intent", "put instances/", Fate::LosesItsAnswer),
    unheard!("schedule-intent-lost", "put instances/", Fate::IsLost),
    unheard!("schedule-intent-late", "put instances/", Fate::IsLate(Duration::from_secs(15))),
    unheard!("schedule-unheard-of-the-claim", "PUT /allocations/", Fate::LosesItsAnswer),
    unheard!("schedule-claim-lost", "PUT /allocations/", Fate::IsLost),
    unheard!("schedule-claim-late", "PUT /allocations/", Fate::IsLate(Duration::from_secs(45))),
    unheard!("schedule-fills-etcd-with-the-intent", "put instances/", Fate::IsDenied),
    unheard!("schedule-fills-etcd-with-the-request", "put requests/", Fate::IsDenied),
    unheard!("schedule-unheard-of-the-request", "put requests/", Fate::LosesItsAnswer),
    unheard!("schedule-request-lost", "put requests/", Fate::IsLost),
    unheard!("schedule-request-late", "put requests/", Fate::IsLate(Duration::from_secs(15))),
    Scenario::new(
        "schedule-unheard-of-a-request-that-was-given-up",
        "nobody hears that a request was written, and its node has given it up when its command looks: it is told where, and the status tells why",
        |stage| Box::pin(given_up(stage)),
    ),
    Scenario::new(
        "wishes-unheard-and-overtaken",
        "nobody hears that a volume was taken back, a guest unlocked, and a label set, before somebody else gives the volume to another guest, locks the \
         first, and sets the label to something else: it stays as they have it, and each command tells that it did what it was to do",
        |stage| Box::pin(overtaken(stage)),
    ),
    Scenario::new(
        "schedule-interrupted",
        "a command is interrupted while its claim is under way: the claim is given back before it ends",
        |stage| Box::pin(interrupted(stage)),
    ),
    Scenario::new(
        "schedule-for-a-node-that-dies",
        "the agent dies between a claim and its request: the request is not written, and the claim is given back",
        |stage| Box::pin(dies_between(stage)),
    ),
    Scenario::new(
        "schedule-twice",
        "a command is killed when its request was written, and its user sends it again: the second is told that the name is \
         taken, and there is one guest",
        |stage| Box::pin(twice(stage)),
    ),
    Scenario::new(
        "two-users-one-name",
        "two users ask for the same name at the same moment: one has it, the other is told by whom it is taken",
        |stage| Box::pin(one_name(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "user-data-lost",
        "the user-data of a guest is deleted by hand before it was built: it is refused with the reason, not built without",
        |stage| Box::pin(user_data(stage)),
    ),
    Scenario::new(
        "destroy-unheard",
        "a destroy is written and its answer lost: it finds out, and is told as done",
        |stage| Box::pin(destroy_unheard(stage, Fate::LosesItsAnswer)),
    ),
    Scenario::new(
        "destroy-late",
        "a destroy arrives a quarter of a minute late, when it was written again: it is done once",
        |stage| Box::pin(destroy_unheard(stage, Fate::IsLate(Duration::from_secs(15)))),
    ),
    Scenario::new(
        "destroy-twice-at-once",
        "two users destroy the same guest at the same moment: both are told that it goes, and it goes",
        |stage| Box::pin(destroy_twice(stage)),
    ),
    Scenario::new(
        "destroy-on-a-dead-node",
        "a guest is destroyed while its node is dead, and its name is had by another: when the node is back the first goes, \
         the other stays",
        |stage| Box::pin(dead_node(stage)),
    )
    .on_nodes(2),
];

/// Claims that there are.
fn claims(stage: &Stage) -> usize {
    stage.world.store.content(&format!("{PLACEMENT}/consumers/")).pairs.len()
}

async fn one_life(stage: Stage) {
    let user = stage.user(1);
    match user
        .order(Order {
            name: Some("web"),
            data: true,
            query: SMALL,
            restart: Restart::No,
            group: None,
            boot: None,
        })
        .await
    {
        Ok(placed) => {
            stage.demand(user.waits_for(placed).await, "it comes up").await;
            user.list().await.ok();
            stage.destroyed(placed.instance).await;
            stage.until_gone(placed.instance).await;
        }
        Err(why) => stage.fail(why).await,
    }
}

async fn killed(stage: Stage, call: &'static str, fate: Fate) {
    stage.snag("u1", call, fate);
    let told = stage.user(1).schedule("web").await;
    stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
    // Longer than the audit's grace, and than it takes for a look.
    stage.pass(120).await;
    stage.demand(claims(&stage) == 0, "nothing stays claimed").await;
    stage.pass(600).await;
    stage.ready("web").await;
}

async fn killed_after_request(stage: Stage) {
    stage.snag("u1", "put requests/", Fate::KillsAfterwards);
    stage.user(1).schedule("web").await.ok();
    stage.pass(30).await;
    let views = stage.user(2).list().await.unwrap_or_default();
    let built = views.iter().find(|view| view.name.as_deref() == Some("web"));
    match built {
        Some(view) => stage.until_well(view.instance).await,
        None => stage.fail("nobody knows of it").await,
    }
}

async fn unheard(stage: Stage, call: &'static str, fate: Fate) {
    stage.snag("u1", call, fate);
    let told = stage.user(1).schedule("web").await;
    stage.pass(180).await;
    match told {
        Ok(placed) => stage.until_well(placed.instance).await,
        Err(_) => {
            let asked = stage.world.store.content("/ecompute/requests/").pairs.len();
            stage
                .demand(asked == 0 && claims(&stage) == 0, "nothing is requested, and nothing claimed")
                .await;
            stage.pass(600).await;
            stage.ready("web").await;
        }
    }
}

async fn given_up(stage: Stage) {
    stage.snag("u1", "put requests/", Fate::LosesItsAnswer);
    stage.snag("n1", "hypervisor Define", Fate::IsRefused(0));
    let Ok(placed) = stage.user(1).schedule("web").await else {
        return stage.fail("it was not placed").await;
    };
    let told = |is: &Sight| is.is(State::Error) && is.says("refused on request") && is.index && !is.claim;
    stage.until(placed.instance, "in ERROR", told).await;
    stage.destroyed(placed.instance).await;
    stage.until_gone(placed.instance).await;
}

async fn overtaken(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    let volume = volumes::near(&stage, guests[0]).await;
    volumes::given(&stage, volume, guests[0]).await;
    let (first, second) = (stage.user(1), stage.user(2));
    let unheard = || stage.snag("u1", "put requests/n1/i1", Fate::LosesItsAnswer);
    unheard();
    let (taken, given) = tokio::join!(first.detaches(volume), async {
        stage.pass(1).await;
        second.attaches(volume, guests[1]).await
    });
    stage
        .demand(taken.is_ok() && given.is_ok(), "the volume is taken from one guest, and given to the other")
        .await;
    let set = |value: &str| {
        let labels = [("role".to_owned(), Some(value.to_owned()))].into();
        Verb::Set(Change { labels, ..Change::default() })
    };
    for [verb, later] in [[set("front"), set("back")], [Verb::Unlock, Verb::Lock("theirs".into())]] {
        if verb == Verb::Unlock {
            let is_locked = first.wish(guests[0], &Verb::Lock("mine".into())).await.is_ok();
            stage.demand(is_locked, "it is locked").await;
        }
        unheard();
        let (done, done_later) = tokio::join!(first.wish(guests[0], &verb), async {
            stage.pass(1).await;
            second.wish(guests[0], &later).await
        });
        stage.demand(done.is_ok() && done_later.is_ok(), "one does it, and then the other").await;
    }
    let record =
        stage.get(&stage.world.keys.instance(guests[0])).and_then(|record| decode::<Instance>(&record).ok());
    let is_theirs = record.is_some_and(|record| {
        record.locked.as_deref() == Some("theirs")
            && record.labels.get("role").is_some_and(|role| role == "back")
    });
    stage.demand(is_theirs, "lock and label are those of who came later").await;
    stage.pass(60).await;
    stage.demand(volumes::has(&stage, guests[1], volume), "the other guest has the volume").await;
    stage.demand(second.wish(guests[0], &Verb::Unlock).await.is_ok(), "it is unlocked").await;
}

async fn interrupted(stage: Stage) {
    let user = stage.user(1);
    stage.world.move_away(crate::world::Actor::Replica(0), Duration::from_millis(500));
    let interrupt = async {
        stage.pass(1).await;
        stage.say("u1 is interrupted");
        user.stop.cancel();
    };
    let (told, ()) = tokio::join!(user.schedule("web"), interrupt);
    stage.demand(told.is_err_and(|why| why.contains("interrupted")), "it is told").await;
    let left = stage.world.store.content("/ecompute/instances/").pairs.len();
    stage.demand(left == 0 && claims(&stage) == 0, "nothing is left").await;
}

async fn dies_between(stage: Stage) {
    stage.world.move_away(crate::world::Actor::User(1), Duration::from_secs(10));
    let dies = async {
        stage.pass(11).await;
        stage.kill(1);
    };
    let user = stage.user(1);
    let (told, ()) = tokio::join!(user.schedule("web"), dies);
    stage.demand(told.is_err(), "it is told").await;
    stage.demand(claims(&stage) == 0, "the claim is given back").await;
}

async fn twice(stage: Stage) {
    stage.snag("u1", "put requests/", Fate::KillsAfterwards);
    stage.user(1).schedule("web").await.ok();
    let told = stage.user(1).schedule("web").await;
    stage.demand(told.is_err_and(|why| why.contains("is taken")), "it is told that the name is taken").await;
    stage.pass(30).await;
    stage.demand(claims(&stage) == 1, "there is one guest").await;
}

async fn one_name(stage: Stage) {
    let users = [1, 2].map(|number| {
        let stage = stage.clone();
        async move { stage.user(number).schedule("web").await }
    });
    let told = join_all(users).await;
    let placed: Vec<_> = told.iter().flatten().collect();
    stage.demand(placed.len() == 1, "one has it").await;
    let refused = told.iter().any(|told| told.as_ref().is_err_and(|why| why.contains("is taken")));
    stage.demand(refused, "the other is told").await;
    for placed in placed {
        stage.until_well(placed.instance).await;
    }
}

async fn user_data(stage: Stage) {
    stage.kill(1);
    let Ok(placed) = stage
        .user(1)
        .order(Order {
            name: Some("web"),
            data: true,
            query: SMALL,
            restart: Restart::No,
            group: None,
            boot: None,
        })
        .await
    else {
        return stage.fail("it is not placed").await;
    };
    stage.expects_trouble(placed.instance);
    stage.delete(&stage.world.keys.user_data(placed.node, placed.instance)).await;
    stage.start(1);
    let told = |is: &super::stage::Sight| {
        is.is(ec_model::State::Error) && is.says("user-data") && !is.volume && !is.claim
    };
    stage.until(placed.instance, "in ERROR and not built", told).await;
}

async fn destroy_unheard(stage: Stage, fate: Fate) {
    let guest = stage.ready("web").await;
    stage.snag("u1", "put requests/", fate);
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.ready("web").await;
    stage.pass(30).await;
}

async fn destroy_twice(stage: Stage) {
    let guest = stage.ready("web").await;
    let (first, second) = (stage.user(1), stage.user(2));
    let (first, second) = tokio::join!(first.destroy(guest), second.destroy(guest));
    stage.demand(first.is_ok() && second.is_ok(), "both are told that it goes").await;
    stage.until_gone(guest).await;
}

async fn dead_node(stage: Stage) {
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
    let node = if placed.node == stage.node(1).node { 1 } else { 2 };
    stage.kill(node);
    stage.pass(60).await;
    stage.destroyed(placed.instance).await;
    let other = stage.ready("web").await;
    stage.pass(600).await;
    stage.start(node);
    stage.until_gone(placed.instance).await;
    stage.until_well(other).await;
}

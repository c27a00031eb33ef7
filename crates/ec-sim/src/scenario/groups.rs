//! What becomes of groups while many place members at once, are killed, and etcd is put back.

use std::collections::BTreeSet;

use ec_cloud::Scheduled;
use ec_model::{Policy, Restart};
use futures::future::join_all;

use super::{Scenario, Stage, people::SMALL};
use crate::{snag::Fate, user::Order, world::PLACEMENT};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "group-apart-raced-for",
        "six users place members of a group with anti-affinity at the same moment, on three nodes: one is placed on each, the \
         others are told that the group leaves no node, and nothing stays claimed of theirs",
        |stage| Box::pin(apart(stage)),
    )
    .on_nodes(3)
    .with_replicas(2),
    Scenario::new(
        "group-together-raced-for",
        "six users place members of a group with affinity at the same moment, on three nodes with room for four each: four are \
         placed on one node, and no others",
        |stage| Box::pin(together(stage)),
    )
    .on_nodes(3)
    .with_replicas(2),
    Scenario::new(
        "group-softly-apart",
        "five members of a group with soft anti-affinity are placed on two nodes one after the other: none is refused, and \
         the nodes have two and three",
        |stage| Box::pin(softly(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "group-with-killed-callers",
        "whoever places a member is killed before or after its request is written: only the latter has a place, and the \
         group can be deleted when that is destroyed",
        |stage| Box::pin(killed(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "group-unheard-of-a-place",
        "the answer to a member's request is lost: it is found out that it has its place",
        |stage| Box::pin(unheard(stage, Fate::LosesItsAnswer)),
    ),
    Scenario::new(
        "group-place-lost",
        "a member's request is lost on its way: its place is another's then",
        |stage| Box::pin(unheard(stage, Fate::IsLost)),
    ),
    Scenario::new(
        "group-on-a-dead-node",
        "a member is destroyed while its node is dead: its place is free at once, on a living node, and on its own when \
         that is back",
        |stage| Box::pin(dead(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "group-in-an-older-etcd",
        "etcd is put back to before members were placed: their guests run on and are no members any more, others are placed \
         as the policy says, and destroying all leaves nothing",
        |stage| Box::pin(older(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "group-with-a-place-left-over",
        "a member's key is left over without its record, as an older release leaves it that destroys: the place is free for \
         who asks next, and a controller takes it away where nobody does",
        |stage| Box::pin(left_over(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "group-deleted-at-once",
        "a group is deleted while a member is being placed: either it has the member and stays, or it is gone and the member \
         is refused",
        |stage| Box::pin(deleted(stage)),
    ),
];

const MEMBERS: &str = "/ecompute/members/";

pub(super) async fn place(stage: &Stage, number: u32, name: &'static str) -> Result<Scheduled, String> {
    let group = Some("g");
    let order =
        Order { name: Some(name), data: false, query: SMALL, restart: Restart::No, group, boot: None };
    stage.user(number).order(order).await
}

pub(super) async fn group(stage: &Stage, policy: Policy) {
    if let Err(why) = stage.user(1).makes_group("g", policy).await {
        stage.fail::<()>(format!("no group: {why}")).await;
    }
}

fn count(stage: &Stage, prefix: &str) -> usize {
    stage.world.store.content(prefix).pairs.len()
}

/// Six users at once.
async fn six(stage: &Stage) -> (Vec<Scheduled>, Vec<String>) {
    let names = ["a", "b", "c", "d", "e", "f"];
    let told = join_all((1..).zip(names).map(|(number, name)| place(stage, number, name))).await;
    let (placed, refused): (Vec<_>, Vec<_>) = told.into_iter().partition(Result::is_ok);
    (placed.into_iter().flatten().collect(), refused.into_iter().filter_map(Result::err).collect())
}

fn nodes(placed: &[Scheduled]) -> usize {
    placed.iter().map(|placed| placed.node).collect::<BTreeSet<_>>().len()
}

async fn apart(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    let (placed, refused) = six(&stage).await;
    stage.demand(placed.len() == 3 && nodes(&placed) == 3, "there is one on each node").await;
    stage.demand(refused.iter().all(|why| why.contains("the group leaves")), "the others are told").await;
    let claims = count(&stage, &format!("{PLACEMENT}/consumers/"));
    stage.demand(claims == 3 && count(&stage, MEMBERS) == 3, "nothing else is claimed").await;
    stage.destroyed(placed[0].instance).await;
    let next = place(&stage, 1, "g").await;
    let is_there = next.as_ref().is_ok_and(|next| next.node == placed[0].node);
    stage.demand(is_there, "a place that is free again is had").await;
}

async fn together(stage: Stage) {
    group(&stage, Policy::Affinity).await;
    let (placed, refused) = six(&stage).await;
    stage.demand(placed.len() == 4 && nodes(&placed) == 1, "there are four on one node").await;
    stage.demand(refused.iter().all(|why| why.contains("the group leaves")), "the others are told").await;
    let claims = count(&stage, &format!("{PLACEMENT}/consumers/"));
    stage.demand(claims == 4 && count(&stage, MEMBERS) == 4, "nothing else is claimed").await;
    for placed in &placed {
        stage.destroyed(placed.instance).await;
    }
    stage.demand(place(&stage, 1, "g").await.is_ok(), "an empty group begins anew").await;
}

async fn softly(stage: Stage) {
    group(&stage, Policy::SoftAntiAffinity).await;
    let mut placed = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        match place(&stage, 1, name).await {
            Ok(there) => placed.push(there),
            Err(why) => return stage.fail(why).await,
        }
    }
    let first = placed.iter().filter(|there| there.node == stage.node(1).node).count();
    stage.demand([2, 3].contains(&first), "they are two and three").await;
}

async fn killed(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    for fate in [Fate::Kills, Fate::KillsAfterwards] {
        stage.snag("u1", "put requests/", fate);
        let told = place(&stage, 1, "a").await;
        stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
        let has_place = fate == Fate::KillsAfterwards;
        stage.demand(count(&stage, MEMBERS) == usize::from(has_place), "it has its place, or none").await;
        stage.pass(900).await;
    }
    stage.demand(place(&stage, 2, "b").await.is_err(), "the place is taken").await;
    let refused = stage.user(1).deletes_group("g").await;
    stage.demand(refused.is_err_and(|why| why.contains("has 1 members")), "the group stays").await;
    let Some(view) = stage.user(1).list().await.unwrap_or_default().pop() else {
        return stage.fail("nobody knows of the member").await;
    };
    stage.demand(view.group.as_deref() == Some("g"), "its group is told").await;
    stage.destroyed(view.instance).await;
    stage.until_gone(view.instance).await;
    stage.demand(stage.user(1).deletes_group("g").await.is_ok(), "the group goes").await;
    let told = place(&stage, 1, "a").await;
    stage.demand(told.is_err_and(|why| why.contains("there is no group `g`")), "it is gone").await;
}

async fn unheard(stage: Stage, fate: Fate) {
    group(&stage, Policy::AntiAffinity).await;
    stage.snag("u1", "put requests/", fate);
    let told = place(&stage, 1, "a").await;
    let is_done = fate == Fate::LosesItsAnswer;
    stage.demand(told.is_ok() == is_done, "it is told as it is").await;
    stage.demand(count(&stage, MEMBERS) == usize::from(is_done), "and so is its place").await;
    stage.demand(place(&stage, 2, "b").await.is_ok() != is_done, "which another has, or not").await;
}

async fn dead(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    let Ok(first) = place(&stage, 1, "a").await else { return stage.fail("it is not placed").await };
    stage.until_well(first.instance).await;
    let node = if first.node == stage.node(1).node { 1 } else { 2 };
    stage.kill(node);
    stage.pass(60).await;
    stage.destroyed(first.instance).await;
    let second = place(&stage, 1, "b").await;
    stage.demand(second.is_ok_and(|second| second.node != first.node), "the living node has it").await;
    stage.demand(place(&stage, 1, "c").await.is_err(), "the dead one does not").await;
    stage.start(node);
    stage.until_gone(first.instance).await;
    let third = place(&stage, 1, "c").await;
    stage.demand(third.is_ok_and(|third| third.node == first.node), "the one that is back has it").await;
}

async fn older(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    let backup = stage.back_up();
    for name in ["a", "b"] {
        match place(&stage, 1, name).await {
            Ok(placed) => stage.until_well(placed.instance).await,
            Err(why) => return stage.fail(why).await,
        }
    }
    stage.demand(place(&stage, 1, "c").await.is_err(), "there is no third").await;
    stage.restore(&backup);
    stage.pass(120).await;
    stage.demand(count(&stage, MEMBERS) == 0, "nothing is known of members").await;
    let (first, second) = (place(&stage, 1, "c").await, place(&stage, 1, "d").await);
    let apart = first.is_ok_and(|first| second.is_ok_and(|second| first.node != second.node));
    stage.demand(apart, "two more are apart").await;
    stage.demand(place(&stage, 1, "e").await.is_err(), "there is no third again").await;
}

async fn left_over(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    for seconds in [0, 120] {
        let Ok(placed) = place(&stage, 1, "a").await else { return stage.fail("it is not placed").await };
        stage.until_well(placed.instance).await;
        let member = stage.world.keys.member("default", "g", placed.node, placed.instance);
        stage.destroyed(placed.instance).await;
        stage.until_gone(placed.instance).await;
        stage.demand(stage.get(&member).is_none(), "its place is gone").await;
        stage.put(&member, "").await;
        stage.pass(seconds).await;
        let left = usize::from(seconds == 0);
        stage.demand(count(&stage, MEMBERS) == left, "nobody, or a controller, took it away").await;
    }
    stage.demand(place(&stage, 1, "b").await.is_ok(), "the place can be had").await;
}

async fn deleted(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    let user = stage.user(2);
    let (placed, gone) = tokio::join!(place(&stage, 1, "a"), user.deletes_group("g"));
    stage.demand(placed.is_ok() != gone.is_ok(), "one of both").await;
    stage.demand(count(&stage, MEMBERS) == usize::from(placed.is_ok()), "and as it was told").await;
    let claims = count(&stage, &format!("{PLACEMENT}/consumers/"));
    stage.demand(claims == usize::from(placed.is_ok()), "nothing is left claimed").await;
}

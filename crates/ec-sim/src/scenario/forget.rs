//! A node is forgotten that will not come back, as far as anybody knows.

use std::time::Duration;

use ec_model::{InstanceId, State};
use reqwest::Method;

use super::{Scenario, Stage, stage::Sight};
use crate::snag::Fate;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "node-forgotten",
        "the host of a guest is gone, its user ends the guest, and the node is forgotten: nothing of both is left, and when the host comes back all \
         the same the guest is UNCLAIMED, and ended when that is asked for once more",
        |stage| Box::pin(forgotten(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "node-forgotten-whose-guest-is-wanted",
        "the host of a guest is gone that is wanted still: the node is not forgotten, with nothing changed",
        |stage| Box::pin(wanted(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "node-forgotten-by-who-is-killed",
        "who forgets a node is killed before the claim is given back, after that, and before the node's record goes: who says it again goes on from there",
        |stage| Box::pin(killed(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "node-forgotten-that-comes-back-at-that-moment",
        "the host comes back while its node is being forgotten, and what was to be deleted arrives late: its agent ends the guest itself, and the node stays",
        |stage| Box::pin(came_back(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "node-forgotten-with-what-failed-there",
        "two guests could not be built, and their node is forgotten before the statuses are gone that tell so: these go with it, once the user has ended \
         the one, and of the other somebody has deleted record and history",
        |stage| Box::pin(with_a_failure(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "node-forgotten-whose-guest-its-agent-was-ending",
        "an agent is killed when it has told the end of its guest, and when it has taken the request away: what is left of either goes with the node",
        |stage| Box::pin(half_ended(stage)),
    )
    .on_nodes(2),
];

/// A guest that its user has ended, on the first node, whose agent is gone.
async fn ended(stage: &Stage) -> InstanceId {
    let placed = stage.placed("web").await;
    stage.demand(placed.node == stage.node(1).node, "it is on the first node").await;
    stage.demand(stage.user(1).waits_for(placed).await, "it comes up").await;
    stage.kill(1);
    stage.pass(60).await;
    stage.destroyed(placed.instance).await;
    placed.instance
}

/// Nothing speaks of the first node any more, nor of the guest.
async fn is_forgotten(stage: &Stage, guest: InstanceId) {
    let (keys, node) = (&stage.world.keys, stage.node(1).node);
    let left = [keys.node(node), keys.request(node, guest), keys.status(node, guest), keys.instance(guest)];
    stage.demand(left.iter().all(|key| stage.get(key).is_none()), "no key speaks of them").await;
    let (status, _) = stage.placement(Method::GET, &format!("/resource_providers/{node}"), None).await;
    stage.demand(status == 404, "nor does placement").await;
}

/// The host comes back all the same: what it has without a request is kept until somebody asks for its end.
async fn comes_back(stage: &Stage, guest: InstanceId) {
    stage.world.judge(|referee, _| referee.request_lost(guest));
    stage.start(1);
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.claim && is.volume).await;
    stage
        .demand(stage.user(2).heals().await == Ok(0), "it is not brought back, since its user ended it")
        .await;
    stage.stays(guest, 300, "kept", |is| is.volume && is.domain.is_some()).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn forgotten(stage: Stage) {
    let guest = ended(&stage).await;
    let told = stage.user(2).forgets(stage.node(1).node).await;
    stage.demand(told.is_ok(), "it is forgotten").await;
    is_forgotten(&stage, guest).await;
    comes_back(&stage, guest).await;
}

async fn wanted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.pass(60).await;
    let node = stage.node(1).node;
    for _ in 0..2 {
        let told = stage.user(2).forgets(node).await;
        stage.demand(told.is_err_and(|why| why.contains("destroy")), "it is refused, and told why").await;
    }
    stage.demand(stage.get(&stage.world.keys.request(node, guest)).is_some(), "it is asked for still").await;
    stage.start(1);
    stage.until_well(guest).await;
}

async fn killed(stage: Stage) {
    let guest = ended(&stage).await;
    let node = stage.node(1).node;
    for (call, fate) in [
        ("DELETE /allocations", Fate::Kills),
        ("DELETE /allocations", Fate::KillsAfterwards),
        ("delete requests/n1", Fate::KillsAfterwards),
        ("delete nodes/n1", Fate::Kills),
        ("delete nodes/n1", Fate::LosesItsAnswer),
    ] {
        stage.snag("u2", call, fate);
        stage.user(2).forgets(node).await.ok();
    }
    // It may be gone by the last.
    stage.user(2).forgets(node).await.ok();
    is_forgotten(&stage, guest).await;
    comes_back(&stage, guest).await;
}

async fn came_back(stage: Stage) {
    let guest = ended(&stage).await;
    let node = stage.node(1).node;
    stage.snag("u2", "delete requests/n1", Fate::IsLate(Duration::from_secs(15)));
    let operator = stage.user(2);
    let (told, ()) = tokio::join!(operator.forgets(node), async {
        stage.pass(1).await;
        stage.start(1);
    });
    stage.demand(told.is_err(), "it is alive by then").await;
    stage.until_gone(guest).await;
    stage.pass(30).await;
    let is_known = stage.get(&stage.world.keys.node(node)).is_some();
    stage.demand(is_known && stage.node(1).is_up(), "the node is there").await;
    let other = stage.ready("db").await;
    stage.destroyed(other).await;
}

async fn with_a_failure(stage: Stage) {
    let mut guests = Vec::new();
    for name in ["web", "db"] {
        stage.snag("n1", "hypervisor Define", Fate::IsRefused(0));
        let placed = stage.placed(name).await;
        stage.demand(placed.node == stage.node(1).node, "it is on the first node").await;
        let is_given_up = |is: &Sight| is.is(State::Error) && !is.claim;
        stage.until(placed.instance, "told to have failed, and given up", is_given_up).await;
        guests.push(placed.instance);
    }
    let (keys, node) = (&stage.world.keys, stage.node(1).node);
    stage
        .demand(
            guests.iter().all(|guest| stage.get(&keys.request(node, *guest)).is_none()),
            "nobody asks for them",
        )
        .await;
    stage.kill(1);
    stage.pass(60).await;
    let told = stage.user(2).forgets(node).await;
    stage.demand(told.is_err(), "its user has not ended the guest").await;
    stage.destroyed(guests[0]).await;
    // Of the other the status alone is left.
    for key in [keys.instance(guests[1]), keys.actions(guests[1])] {
        stage.delete(&key).await;
    }
    let told = stage.user(2).forgets(node).await;
    stage.demand(told.is_ok(), "it is forgotten").await;
    for guest in guests {
        is_forgotten(&stage, guest).await;
    }
    stage.start(1);
    for name in ["web", "db"] {
        let other = stage.ready(name).await;
        stage.destroyed(other).await;
    }
}

async fn half_ended(stage: Stage) {
    for (name, call) in [("web", "put status/n1"), ("db", "delete requests/n1")] {
        let placed = stage.placed(name).await;
        stage.demand(placed.node == stage.node(1).node, "it is on the first node").await;
        stage.demand(stage.user(1).waits_for(placed).await, "it comes up").await;
        stage.snag("n1", call, Fate::KillsAfterwards);
        stage.destroyed(placed.instance).await;
        stage.until_down(1).await;
        stage.pass(60).await;
        let told = stage.user(2).forgets(stage.node(1).node).await;
        stage.demand(told.is_ok(), "it is forgotten").await;
        is_forgotten(&stage, placed.instance).await;
        stage.world.judge(|referee, _| referee.request_lost(placed.instance));
        stage.start(1);
        stage.pass(120).await;
        if !stage.sight(placed.instance).is_gone() {
            stage.destroyed(placed.instance).await;
        }
        stage.until_gone(placed.instance).await;
    }
}

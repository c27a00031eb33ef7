//! What operators do by hand with placement.

use ec_cloud::Verb;
use ec_model::{InstanceId, NodeId};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Scenario, Stage, stage::Sight};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "claim-deleted-by-hand",
        "an operator deletes the claim of a running guest: its node claims it again",
        |stage| Box::pin(deleted(stage)),
    ),
    Scenario::new(
        "claim-deleted-and-room-sold",
        "an operator deletes the claim of a guest on a full node, and the room is sold before its node has claimed it again: \
         as much is kept free for it, it is not ended for a reboot, and it is counted and rebooted when there is room",
        |stage| Box::pin(sold(stage)),
    ),
    Scenario::new(
        "claim-changed-by-hand",
        "an operator takes the disk out of the claim of a running guest: it is left as it is, and so is the claim",
        |stage| Box::pin(halved(stage)),
    ),
    Scenario::new(
        "claim-moved-by-hand",
        "an operator moves the claim of a running guest to another node: it runs on, nothing is built there, and its own \
         node claims it again when the other has given it back",
        |stage| Box::pin(moved(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "claim-moved-of-a-stopped-guest",
        "an operator moves the claim of a stopped guest to another node, and its user starts it: it is not started where nothing is claimed for it, \
         and is when the other has given it back",
        |stage| Box::pin(moved_while_stopped(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "inventory-taken-away-under-a-guest",
        "an operator takes the processors out of a node's inventory, which a guest has claimed: that is refused",
        |stage| Box::pin(in_use(stage)),
    ),
    Scenario::new(
        "claim-split-by-hand",
        "an operator moves the disk of a running guest's claim to another node: it runs on, neither gives the claim back \
         while it does, and a destroy gives back all of it",
        |stage| Box::pin(split(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "claim-moved-before-the-build",
        "an operator moves a claim to another node before its guest was built: it is refused with the reason, and built \
         nowhere",
        |stage| Box::pin(moved_early(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "claims-of-others",
        "others have a claim on a node that no request of ours speaks of: it is left alone, and counts",
        |stage| Box::pin(others(stage)),
    ),
    Scenario::new(
        "provider-renamed",
        "an operator renames a node in placement: the node goes on working",
        |stage| Box::pin(renamed(stage)),
    ),
    Scenario::new(
        "provider-deleted",
        "an operator deletes a node in placement: it is registered anew, with all that it has",
        |stage| Box::pin(provider_deleted(stage)),
    ),
    Scenario::new(
        "provider-locked",
        "an operator locks a node in placement by reserving all of it: nothing new comes there, its guest runs on, and the \
         lock is the operator's to take away",
        |stage| Box::pin(locked(stage)),
    ),
    Scenario::new(
        "provider-disabled",
        "an operator marks a node as disabled: nothing new comes there until the mark is taken away",
        |stage| Box::pin(disabled(stage)),
    ),
];

fn allocations(instance: InstanceId) -> String {
    format!("/allocations/{instance}")
}

/// Changes where a guest's claim is, and what of.
pub(super) async fn change_claim(stage: &Stage, instance: InstanceId, change: impl FnOnce(&mut Value)) {
    stage.world.judge(|referee, world| referee.replaced(world));
    let (_, mut claim) = stage.placement(Method::GET, &allocations(instance), None).await;
    for provider in claim["allocations"].as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
        if let Some(provider) = provider.as_object_mut() {
            provider.remove("generation");
        }
    }
    change(&mut claim["allocations"]);
    let (status, _) = stage.placement(Method::PUT, &allocations(instance), Some(claim)).await;
    stage.demand(status == 204, "the claim is changed").await;
}

fn holds(stage: &Stage, instance: InstanceId, node: NodeId) -> Option<u64> {
    let key = format!("{}/consumers/{instance}", crate::world::PLACEMENT);
    let claim: Value = serde_json::from_slice(&stage.get(&key)?).ok()?;
    claim["allocations"][node.to_string()]["VCPU"].as_u64()
}

async fn deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.world.judge(|referee, world| referee.replaced(world));
    let (status, _) = stage.placement(Method::DELETE, &allocations(guest), None).await;
    stage.demand(status == 204, "the claim is deleted").await;
    stage.until_well(guest).await;
}

async fn sold(stage: Stage) {
    let guests =
        [stage.ready("a").await, stage.ready("b").await, stage.ready("c").await, stage.ready("d").await];
    stage.world.judge(|referee, world| referee.replaced(world));
    stage.placement(Method::DELETE, &allocations(guests[0]), None).await;
    let other = stage.ready("e").await;
    let runs = |is: &Sight| is.is(ec_model::State::Active) && is.runs();
    stage.stays(guests[0], 300, "running", runs).await;
    // Ended for that, it would stay so.
    stage.user(1).asks(guests[0], &Verb::Reboot(0)).await;
    stage.stays(guests[0], 60, "running", runs).await;
    stage.destroyed(guests[1]).await;
    stage.until_gone(guests[1]).await;
    stage.until_well(guests[0]).await;
    stage.until_well(other).await;
    let told = stage.user(1).schedule("f").await;
    stage.demand(told.is_err(), "the node is full").await;
}

async fn halved(stage: Stage) {
    let guest = stage.ready("web").await;
    let node = stage.node(1).node;
    change_claim(&stage, guest, |claim| *claim = json!({(node.to_string()): {"resources": {"VCPU": 1}}}))
        .await;
    stage.stays(guest, 300, "well", Sight::is_well).await;
    stage.demand(holds(&stage, guest, node) == Some(1), "the claim is as the operator left it").await;
}

async fn moved(stage: Stage) {
    let placed = stage.placed("web").await;
    let guest = placed.instance;
    stage.until_well(guest).await;
    let other = if placed.node == stage.node(1).node { stage.node(2).node } else { stage.node(1).node };
    change_claim(&stage, guest, |claim| {
        let amounts = claim[placed.node.to_string()].clone();
        *claim = json!({(other.to_string()): amounts});
    })
    .await;
    stage.stays(guest, 900, "running", |is| is.is(ec_model::State::Active) && is.runs()).await;
    stage.until_well(guest).await;
    let (here, there) = (holds(&stage, guest, placed.node), holds(&stage, guest, other));
    stage.demand(here.is_some() && there.is_none(), "all of the claim is on its own node").await;
}

async fn moved_while_stopped(stage: Stage) {
    let placed = stage.placed("web").await;
    let guest = placed.instance;
    stage.until_well(guest).await;
    let user = stage.user(1);
    stage.demand(user.wish(guest, &Verb::Stop(0)).await.is_ok(), "it is stopped").await;
    let other = if placed.node == stage.node(1).node { stage.node(2).node } else { stage.node(1).node };
    change_claim(&stage, guest, |claim| {
        let amounts = claim[placed.node.to_string()].clone();
        *claim = json!({(other.to_string()): amounts});
    })
    .await;
    // So that its node has looked.
    stage.pass(60).await;
    user.asks(guest, &Verb::Start).await;
    stage.stays(guest, 10, "down", |is| !is.runs()).await;
    stage.until_well(guest).await;
}

async fn in_use(stage: Stage) {
    let guest = stage.ready("web").await;
    let path = format!("/resource_providers/{}/inventories", stage.node(1).node);
    let (_, mut inventories) = stage.placement(Method::GET, &path, None).await;
    if let Some(all) = inventories["inventories"].as_object_mut() {
        all.remove("VCPU");
    }
    let (status, _) = stage.placement(Method::PUT, &path, Some(inventories)).await;
    stage.demand(status == 409, "it is refused").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn split(stage: Stage) {
    let placed = stage.placed("web").await;
    let guest = placed.instance;
    stage.until_well(guest).await;
    let other = if placed.node == stage.node(1).node { stage.node(2).node } else { stage.node(1).node };
    change_claim(&stage, guest, |claim| {
        *claim = json!({
            (placed.node.to_string()): {"resources": {"VCPU": 1, "MEMORY_MB": 128}},
            (other.to_string()): {"resources": {"DISK_GB": 1}},
        });
    })
    .await;
    stage.stays(guest, 900, "well", |is| is.is_well()).await;
    stage.demand(holds(&stage, guest, placed.node) == Some(1), "its processor is counted where it is").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn moved_early(stage: Stage) {
    for node in [1, 2] {
        stage.kill(node);
    }
    let placed = stage.placed("web").await;
    let other = if placed.node == stage.node(1).node { stage.node(2).node } else { stage.node(1).node };
    stage.expects_trouble(placed.instance);
    change_claim(&stage, placed.instance, |claim| {
        let amounts = claim[placed.node.to_string()].clone();
        *claim = json!({(other.to_string()): amounts});
    })
    .await;
    for node in [1, 2] {
        stage.start(node);
    }
    let told =
        |is: &Sight| is.is(ec_model::State::Error) && is.says("on other resource providers") && !is.volume;
    stage.until(placed.instance, "in ERROR and not built", told).await;
    stage.placement(Method::DELETE, &allocations(placed.instance), None).await;
}

fn stranger(number: u8) -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(0xf00d + u128::from(number)))
}

/// So many processors of the first node are claimed by a stranger of this number; where that claim lies.
pub(super) async fn others_claim(stage: &Stage, number: u8, vcpus: u64) -> String {
    let node = stage.node(1).node;
    let claim = json!({
        "allocations": {(node.to_string()): {"resources": {"VCPU": vcpus}}}, "project_id": "p", "user_id": "u",
        "consumer_generation": null, "consumer_type": "OTHERS",
    });
    let path = allocations(stranger(number));
    let (status, _) = stage.placement(Method::PUT, &path, Some(claim)).await;
    stage.demand(status == 204, "others have a claim").await;
    path
}

async fn others(stage: Stage) {
    let node = stage.node(1).node;
    let claim = others_claim(&stage, 0, 1).await;
    for name in ["a", "b", "c"] {
        stage.ready(name).await;
    }
    let told = stage.user(1).schedule("d").await;
    stage.demand(told.is_err(), "it counts").await;
    stage.pass(1800).await;
    stage.demand(holds(&stage, stranger(0), node) == Some(1), "it is left alone").await;
    stage.placement(Method::DELETE, &claim, None).await;
    stage.ready("d").await;
}

async fn renamed(stage: Stage) {
    let guest = stage.ready("web").await;
    let path = format!("/resource_providers/{}", stage.node(1).node);
    let (status, _) = stage.placement(Method::PUT, &path, Some(json!({"name": "another"}))).await;
    stage.demand(status == 200, "it is renamed").await;
    stage.pass(120).await;
    stage.kill(1);
    stage.start(1);
    stage.pass(30).await;
    stage.until_well(guest).await;
    stage.ready("db").await;
}

async fn provider_deleted(stage: Stage) {
    let path = format!("/resource_providers/{}", stage.node(1).node);
    let guest = stage.ready("web").await;
    let (status, _) = stage.placement(Method::DELETE, &path, None).await;
    stage.demand(status == 409, "one with claims is not deleted").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    let (status, _) = stage.placement(Method::DELETE, &path, None).await;
    stage.demand(status == 204, "it is deleted").await;
    stage.pass(65).await;
    stage.ready("web").await;
}

async fn locked(stage: Stage) {
    let guest = stage.ready("web").await;
    let path = format!("/resource_providers/{}/inventories/VCPU", stage.node(1).node);
    let (_, mut inventory) = stage.placement(Method::GET, &path, None).await;
    let before = inventory["reserved"].clone();
    inventory["reserved"] = inventory["total"].clone();
    stage.placement(Method::PUT, &path, Some(inventory)).await;
    for _ in 0..3 {
        let told = stage.user(1).schedule("db").await;
        stage.demand(told.is_err(), "nothing new comes there").await;
        stage.pass(60).await;
    }
    stage.until_well(guest).await;
    let (_, mut inventory) = stage.placement(Method::GET, &path, None).await;
    inventory["reserved"] = before;
    stage.placement(Method::PUT, &path, Some(inventory)).await;
    stage.ready("db").await;
}

async fn disabled(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.disable(1, true).await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err(), "nothing new comes there").await;
    stage.pass(120).await;
    stage.until_well(guest).await;
    stage.disable(1, false).await;
    stage.ready("db").await;
}

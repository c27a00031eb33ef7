//! Records in etcd that somebody wrote, changed or deleted by hand, or that a newer release wrote.

use ec_cloud::Verb;
use ec_model::{Desired, InstanceId, State};
use serde_json::{Value, json};

use super::{
    Scenario, Stage,
    stage::Sight,
    volumes::{given, near, taken},
};
use crate::world::PLACEMENT;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "request-copied-to-another-node",
        "somebody copies a request under another node's prefix: nothing is built there, which is told, and the guest goes on",
        |stage| Box::pin(copied(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "request-deleted-by-hand",
        "somebody deletes the request of a guest: it runs on, is told of as UNCLAIMED, and a destroy ends it",
        |stage| Box::pin(request_deleted(stage)),
    ),
    Scenario::new(
        "request-put-back-of-what-was-destroyed",
        "somebody puts the request of a destroyed guest back by hand, whose node's agent was started anew since: it knows that it was destroyed, and takes \
         it away",
        |stage| Box::pin(put_back(stage)),
    ),
    Scenario::new(
        "request-garbage",
        "somebody puts garbage in place of a request: nothing of the guest is touched, a destroy says why it is refused, and \
         when it is mended all goes on",
        |stage| Box::pin(unreadable(stage, b"garbage".to_vec())),
    ),
    Scenario::new(
        "request-of-a-newer-release",
        "a newer release writes a request that this one cannot read: nothing of the guest is touched until it is its own again",
        |stage| Box::pin(unreadable(stage, b"{\"version\":99,\"desired\":\"hibernated\"}".to_vec())),
    ),
    Scenario::new(
        "request-of-another-instance",
        "somebody puts one guest's request under another's key: neither is touched for it",
        |stage| Box::pin(swapped(stage)),
    ),
    Scenario::new(
        "status-garbage",
        "somebody puts garbage in place of a status: the guest is left as it is, and when it is deleted it is told anew",
        |stage| Box::pin(status_garbage(stage, "garbage")),
    ),
    Scenario::new(
        "status-of-a-newer-release",
        "a newer release writes a status that this one cannot read: the guest is left as it is, and when it is deleted it is \
         told anew",
        |stage| Box::pin(status_garbage(stage, "{\"version\":99,\"state\":\"HIBERNATED\"}")),
    ),
    Scenario::new(
        "instance-garbage",
        "somebody puts garbage in place of the record that says where a guest is: it runs on, a destroy says why it is \
         refused, its name stays taken, and when it is mended all goes on",
        |stage| Box::pin(index_garbage(stage)),
    ),
    Scenario::new(
        "sign-of-life-garbage",
        "somebody puts garbage in place of a node's sign of life: nothing is placed there until its agent has put it again",
        |stage| Box::pin(alive_garbage(stage)),
    ),
    Scenario::new(
        "status-deleted-by-hand",
        "somebody deletes the status of a guest: it is told anew, and nothing is started again",
        |stage| Box::pin(status_deleted(stage)),
    ),
    Scenario::new(
        "instance-of-another-placement",
        "somebody puts the record of an instance by hand that speaks of another placement than its request: nothing is asked of it till it is mended",
        |stage| Box::pin(index_of_other(stage)),
    ),
    Scenario::new(
        "instance-deleted-by-hand",
        "somebody deletes the record that says where a guest is: it goes on, is listed, and can be destroyed",
        |stage| Box::pin(index_deleted(stage)),
    ),
    Scenario::new(
        "instance-deleted-by-hand-and-healed",
        "somebody deletes the records of a guest and of its volume: nothing can be asked of them, which is told with what helps, and a heal makes \
         both of their requests, while the guest runs on",
        |stage| Box::pin(index_healed(stage)),
    ),
    Scenario::new(
        "node-keys-deleted-by-hand",
        "somebody deletes a node's signs of life: its agent puts them again, and it takes instances as before",
        |stage| Box::pin(node_deleted(stage)),
    ),
    Scenario::new(
        "keys-of-strangers",
        "keys that are none of ours lie under our prefixes: everything goes on, and they are left alone",
        |stage| Box::pin(strangers(stage)),
    ),
    Scenario::new(
        "claim-garbage",
        "somebody puts garbage in place of a claim in placement: the guest runs on and its room is not sold, by a replica that is started anew \
         either; when the claim is deleted it is made again",
        |stage| Box::pin(claim_garbage(stage)),
    ),
    Scenario::new(
        "provider-garbage",
        "somebody puts garbage in place of a provider: nothing is placed there, guests run on, and it is as before when it \
         is mended, without a restart",
        |stage| Box::pin(provider_garbage(stage)),
    ),
    Scenario::new(
        "generation-garbage",
        "somebody puts garbage in place of a provider's generation: what is placed goes to the other node, and here again \
         when it is mended",
        |stage| Box::pin(generation_garbage(stage)),
    )
    .on_nodes(2),
];

fn request(stage: &Stage, node: usize, instance: InstanceId) -> String {
    stage.world.keys.request(stage.node(node).node, instance)
}

fn status(stage: &Stage, instance: InstanceId) -> String {
    stage.world.keys.status(stage.node(1).node, instance)
}

async fn copied(stage: Stage) {
    let placed = stage.placed("web").await;
    let guest = placed.instance;
    stage.until_well(guest).await;
    let (here, there) = if placed.node == stage.node(1).node { (1, 2) } else { (2, 1) };
    stage.expects_trouble(guest);
    let copy = stage.get(&request(&stage, here, guest)).unwrap_or_default();
    stage.put(&request(&stage, there, guest), copy).await;
    stage.pass(30).await;
    let hypervisor = &stage.node(there).hypervisor;
    let built = hypervisor.effects(ec_hypervisor::Operation::CreateOverlay, guest);
    stage.demand(built == 0, "nothing is built there").await;
    stage.demand(stage.get(&request(&stage, there, guest)).is_none(), "the copy is refused").await;
    let told = stage.get(&stage.world.keys.status(stage.node(there).node, guest)).unwrap_or_default();
    let told = String::from_utf8_lossy(&told).into_owned();
    stage.demand(told.contains("on other resource providers"), "why it is refused is told").await;
    stage.delete(&stage.world.keys.status(stage.node(there).node, guest)).await;
    stage.stays(guest, 120, "well", Sight::is_well).await;
}

async fn request_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.delete(&request(&stage, 1, guest)).await;
    let kept = |is: &Sight| is.is(State::Unclaimed) && is.runs() && is.is_kept();
    stage.until(guest, "UNCLAIMED and kept", kept).await;
    stage.stays(guest, 900, "UNCLAIMED and kept", kept).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn put_back(stage: Stage) {
    let guest = stage.ready("web").await;
    let whole = stage.get(&request(&stage, 1, guest)).unwrap_or_default();
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.kill(1);
    stage.start(1);
    stage.pass(60).await;
    stage.put(&request(&stage, 1, guest), whole).await;
    stage.pass(5).await;
    stage.until_gone(guest).await;
}

async fn unreadable(stage: Stage, value: Vec<u8>) {
    let guest = stage.ready("web").await;
    let whole = stage.get(&request(&stage, 1, guest)).unwrap_or_default();
    stage.put(&request(&stage, 1, guest), value).await;
    let untouched = |is: &Sight| is.runs() && is.is_kept();
    stage.stays(guest, 120, "untouched", untouched).await;
    stage.kill(1);
    stage.start(1);
    stage.stays(guest, 120, "untouched", untouched).await;
    let told = stage.user(1).destroy(guest).await;
    stage
        .demand(told.is_err_and(|why| why.contains("cannot be read")), "a destroy is refused with the reason")
        .await;
    let views = stage.user(1).list().await.unwrap_or_default();
    let shown = views.iter().any(|view| view.instance == guest && view.state == "UNKNOWN");
    stage.demand(shown, "it is listed as UNKNOWN").await;
    stage.stays(guest, 60, "untouched", untouched).await;
    stage.put(&request(&stage, 1, guest), whole).await;
    stage.until_well(guest).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn swapped(stage: Stage) {
    let (web, db) = (stage.ready("web").await, stage.ready("db").await);
    stage.expects_trouble(web);
    let own = stage.get(&request(&stage, 1, web)).unwrap_or_default();
    let other = stage.get(&request(&stage, 1, db)).unwrap_or_default();
    stage.put(&request(&stage, 1, web), other).await;
    stage.stays(web, 120, "untouched", |is| is.runs() && is.is_kept()).await;
    let told = stage.user(1).destroy(web).await;
    stage
        .demand(
            told.is_err_and(|why| why.contains("its key another")),
            "a destroy is refused with the reason",
        )
        .await;
    stage.until_well(db).await;
    stage.put(&request(&stage, 1, web), own).await;
    stage.until_well(web).await;
}

async fn status_garbage(stage: Stage, value: &'static str) {
    let guest = stage.ready("web").await;
    stage.put(&status(&stage, guest), value).await;
    stage.stays(guest, 120, "untouched", |is| is.status.is_none() && is.runs() && is.is_kept()).await;
    stage.delete(&status(&stage, guest)).await;
    stage.until_well(guest).await;
}

async fn status_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.delete(&status(&stage, guest)).await;
    stage.until_well(guest).await;
    let starts = stage.node(1).hypervisor.effects(ec_hypervisor::Operation::Start, guest);
    stage.demand(starts == 1, "it was started once").await;
}

async fn index_of_other(stage: Stage) {
    let guest = stage.ready("web").await;
    let key = stage.world.keys.instance(guest);
    let whole = stage.get(&key).unwrap_or_default();
    let mut other: Value = serde_json::from_slice(&whole).unwrap_or_default();
    other["assigned"]["epoch"] = json!(7);
    stage.put(&key, other.to_string()).await;
    let refused = stage.user(1).wish(guest, &Verb::Stop(0)).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("is being moved")), "it is refused").await;
    stage.put(&key, whole).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Stop(0)).await.is_ok(), "it is stopped").await;
}

async fn index_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.delete(&stage.world.keys.instance(guest)).await;
    let whole = |is: &Sight| is.is(State::Active) && is.runs() && is.is_kept();
    stage.stays(guest, 300, "well", whole).await;
    let views = stage.user(1).list().await.unwrap_or_default();
    stage
        .demand(views.iter().any(|view| view.instance == guest && view.state == "ACTIVE"), "it is listed")
        .await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn index_healed(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = near(&stage, guest).await;
    given(&stage, volume, guest).await;
    let records = [guest, volume].map(|it| stage.world.keys.instance(it));
    let before = records.clone().map(|key| content(&stage, &key));
    for key in &records {
        stage.delete(key).await;
    }
    let refused = stage.user(1).wish(guest, &Verb::Stop(0)).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("`eschedule heal`")), "what helps is told").await;
    stage.demand(stage.user(1).heals().await == Ok(2), "both are brought back").await;
    stage.until_well(guest).await;
    let after = records.map(|key| content(&stage, &key));
    stage.demand(before == after, "as they were, but for their generations").await;
    let starts = stage.node(1).hypervisor.effects(ec_hypervisor::Operation::Start, guest);
    stage.demand(starts == 1, "it was started once").await;
    stage.demand(stage.user(1).wish(guest, &Verb::Stop(0)).await.is_ok(), "it is stopped").await;
    taken(&stage, volume, guest).await;
}

/// A record, but for what counts changes of it.
fn content(stage: &Stage, key: &str) -> Value {
    let mut record: Value = serde_json::from_slice(&stage.get(key).unwrap_or_default()).unwrap_or_default();
    for counts in ["generation", "request_id", "power"] {
        record.as_object_mut().map(|fields| fields.remove(counts));
    }
    record
}

async fn index_garbage(stage: Stage) {
    let guest = stage.ready("web").await;
    let key = stage.world.keys.instance(guest);
    let whole = stage.get(&key).unwrap_or_default();
    stage.put(&key, "garbage").await;
    stage.stays(guest, 120, "well", Sight::is_well).await;
    let told = stage.user(1).destroy(guest).await;
    stage
        .demand(told.is_err_and(|why| why.contains("cannot be read")), "a destroy is refused with the reason")
        .await;
    let told = stage.user(2).schedule("web").await;
    stage.demand(told.is_err_and(|why| why.contains("taken")), "its name stays taken").await;
    stage.user(1).list().await.ok();
    stage.put(&key, whole).await;
    stage.until_well(guest).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn alive_garbage(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.put(&stage.world.keys.alive(stage.node(1).node), "garbage").await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err(), "nothing is placed there").await;
    stage.pass(10).await;
    stage.ready("db").await;
    stage.until_well(guest).await;
}

async fn node_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    let (keys, node) = (&stage.world.keys, stage.node(1).node);
    for key in [keys.agent(node), keys.alive(node), keys.node(node)] {
        stage.delete(&key).await;
        stage.pass(70).await;
        stage.demand(stage.get(&key).is_some(), "its agent puts it again").await;
    }
    stage.ready("db").await;
    stage.until_well(guest).await;
}

async fn strangers(stage: Stage) {
    let node = stage.node(1).node;
    let keys = [
        format!("/ecompute/requests/{node}/not-a-uuid"),
        format!("/ecompute/requests/{node}/00000000-0000-0000-0000-00000000000A"),
        format!("/ecompute/status/{node}/not-a-uuid"),
        "/ecompute/instances/not-a-uuid".to_owned(),
        "/ecompute/nodes/not-a-uuid".to_owned(),
        "/ecompute/alive/not-a-uuid".to_owned(),
        "/ecompute/elsewhere".to_owned(),
        format!("{PLACEMENT}/providers/not-a-uuid"),
        format!("{PLACEMENT}/consumers/not-a-uuid"),
        format!("{PLACEMENT}/elsewhere"),
    ];
    for key in &keys {
        stage.put(key, "x").await;
    }
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.kill_replica(1);
    stage.start_replica(1);
    stage.start(1);
    stage.stays(guest, 120, "there", |is| is.runs() && is.is_kept()).await;
    stage.ready("db").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    let left = keys.iter().all(|key| stage.get(key).is_some_and(|value| value == b"x"));
    stage.demand(left, "they are as they were").await;
}

async fn claim_garbage(stage: Stage) {
    let guests =
        [stage.ready("a").await, stage.ready("b").await, stage.ready("c").await, stage.ready("d").await];
    let key = format!("{PLACEMENT}/consumers/{}", guests[0]);
    stage.put(&key, "garbage").await;
    stage.stays(guests[0], 120, "running", |is| is.is(State::Active) && is.runs()).await;
    let told = stage.user(1).schedule("e").await;
    stage.demand(told.is_err(), "its room is not sold").await;
    // What it was is known by etcd's history alone.
    stage.kill_replica(1);
    stage.start_replica(1);
    stage.pass(10).await;
    let told = stage.user(1).schedule("e").await;
    stage.demand(told.is_err(), "it is not sold by who reads all anew").await;
    stage.delete(&key).await;
    stage.until(guests[0], "counted again", |is| is.is_well() && is.asked_for == Some(Desired::Active)).await;
}

async fn provider_garbage(stage: Stage) {
    let guest = stage.ready("web").await;
    let key = format!("{PLACEMENT}/providers/{}", stage.node(1).node);
    let whole = stage.get(&key).unwrap_or_default();
    stage.put(&key, "garbage").await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err(), "nothing is placed there").await;
    stage.stays(guest, 120, "there", |is| is.runs() && is.is_kept()).await;
    stage.put(&key, whole).await;
    stage.ready("db").await;
    stage.until_well(guest).await;
}

async fn generation_garbage(stage: Stage) {
    let placed = stage.placed("web").await;
    let guest = placed.instance;
    stage.until_well(guest).await;
    // The one with the most left, which would be the first that is tried.
    let spoilt = [1, 2].map(|number| stage.node(number).node).into_iter().find(|node| *node != placed.node);
    let Some(spoilt) = spoilt else { return };
    let key = format!("{PLACEMENT}/generations/{spoilt}");
    let whole = stage.get(&key).unwrap_or_default();
    stage.put(&key, "garbage").await;
    for name in ["a", "b", "c"] {
        let told = stage.user(1).schedule(name).await;
        stage.demand(told.is_ok_and(|there| there.node == placed.node), "the other node takes it").await;
    }
    stage.demand(stage.user(1).schedule("d").await.is_err(), "nothing is placed there").await;
    stage.put(&key, whole).await;
    stage.demand(stage.placed("d").await.node == spoilt, "it is as before").await;
    stage.until_well(guest).await;
}

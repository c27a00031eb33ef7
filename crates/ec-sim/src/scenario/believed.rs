//! What lies under our keys and is not to be believed, since it speaks of somebody else; and what is not yet to be
//! taken away.

use ec_model::{InstanceId, State};
use serde_json::{Value, json};

use super::{Scenario, Stage, stage::Sight};
use crate::{snag::Fate, world::PLACEMENT};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "sign-of-life-of-another-node",
        "a node's sign of life names another node: nothing is placed there until its agent has put it again",
        |stage| Box::pin(alive_says(stage, "node", json!("00000000-0000-0000-0000-0000000000aa"))),
    ),
    Scenario::new(
        "sign-of-life-of-an-agent-that-reads-nothing-of-ours",
        "a node's sign of life says that its agent does not read our requests: nothing is placed there until it does",
        |stage| Box::pin(alive_says(stage, "formats", json!({}))),
    ),
    Scenario::new(
        "instance-of-another",
        "the record that says where a guest is names another guest: a destroy says why it is refused, and nothing is touched",
        |stage| Box::pin(instance_of_another(stage)),
    ),
    Scenario::new(
        "status-of-another-node",
        "a status names another node: it is not shown as the guest's, and told anew",
        |stage| Box::pin(status_says(stage, "node", json!("00000000-0000-0000-0000-0000000000aa"))),
    ),
    Scenario::new(
        "status-of-another-life",
        "a status is of another placement of the guest: it is not shown as this one's, and told anew",
        |stage| Box::pin(status_says(stage, "epoch", json!(7))),
    ),
    Scenario::new(
        "destroy-of-what-is-being-placed",
        "somebody destroys what another's command is placing: that is refused while it is young; when that is old, what it \
         left goes",
        |stage| Box::pin(being_placed(stage)),
    ),
];

/// The record under a key, with one field otherwise.
async fn changed(stage: &Stage, key: &str, field: &str, value: Value) {
    let mut record: Value =
        stage.get(key).and_then(|value| serde_json::from_slice(&value).ok()).unwrap_or_default();
    record[field] = value;
    stage.put(key, record.to_string()).await;
}

async fn alive_says(stage: Stage, field: &'static str, value: Value) {
    let guest = stage.ready("web").await;
    changed(&stage, &stage.world.keys.alive(stage.node(1).node), field, value).await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err(), "nothing is placed there").await;
    stage.pass(10).await;
    stage.ready("db").await;
    stage.until_well(guest).await;
}

async fn instance_of_another(stage: Stage) {
    let (web, db) = (stage.ready("web").await, stage.ready("db").await);
    let key = stage.world.keys.instance(web);
    let whole = stage.get(&key).unwrap_or_default();
    changed(&stage, &key, "instance", json!(db)).await;
    let told = stage.user(1).destroy(web).await;
    stage.demand(told.is_err_and(|why| why.contains("cannot be read")), "a destroy is refused").await;
    stage.stays(web, 120, "well", Sight::is_well).await;
    stage.put(&key, whole).await;
    stage.until_well(db).await;
}

async fn status_says(stage: Stage, field: &'static str, value: Value) {
    let guest = stage.ready("web").await;
    let key = stage.world.keys.status(stage.node(1).node, guest);
    let shown = async |guest: InstanceId| {
        let views = stage.user(1).list().await.unwrap_or_default();
        views.into_iter().find(|view| view.instance == guest).map(|view| view.state)
    };
    // What its agent would tell anew is not told meanwhile.
    stage.kill(1);
    let whole = stage.get(&key).unwrap_or_default();
    changed(&stage, &key, field, value).await;
    let state = shown(guest).await;
    stage
        .demand(state.is_some_and(|state| state != State::Active.to_string()), "it is not shown as that")
        .await;
    stage.put(&key, whole).await;
    stage.demand(shown(guest).await == Some(State::Active.to_string()), "its own is").await;
    stage.start(1);
    stage.until_well(guest).await;
}

async fn being_placed(stage: Stage) {
    stage.snag("u1", "PUT /allocations/", Fate::KillsAfterwards);
    let killed = stage.user(1).schedule("web").await;
    stage.demand(killed.is_err(), "its command is killed").await;
    let records = stage.world.store.content(&stage.world.keys.instances()).pairs;
    let found = records.first().and_then(|pair| stage.world.keys.parse_instance(&pair.key).ok());
    let Some(left) = found else { return stage.fail("its record is there").await };
    stage.pass(300).await;
    let young = stage.user(2).destroy(left).await;
    stage
        .demand(young.is_err_and(|why| why.contains("is being placed since")), "a command may be at it")
        .await;
    stage.pass(400).await;
    stage.demand(stage.user(2).destroy(left).await.is_ok(), "nobody is at it any more").await;
    let claims = stage.world.store.content(&format!("{PLACEMENT}/consumers/")).pairs.len();
    stage.demand(claims == 0, "its claim is gone").await;
}

//! What a controller does when neither an agent nor a tool is there to do it.

use std::time::Duration;

use ec_model::State;
use tokio::time::sleep;

use super::{Scenario, Stage};
use crate::{
    acts::say,
    referee::marked,
    snag::Fate,
    world::{Actor, PLACEMENT},
};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "node-dead",
        "the agent of a node is killed: a controller marks the node, all that is new goes to the other, and the mark goes \
         when the agent is back",
        |stage| Box::pin(dead(stage)),
    )
    .on_nodes(2)
    .with_controllers(1),
    Scenario::new(
        "node-dead-and-controller-too",
        "one of two controllers is killed, and an agent after it: the other marks the node",
        |stage| Box::pin(both_dead(stage)),
    )
    .on_nodes(2)
    .with_controllers(2),
    Scenario::new(
        "node-dead-whose-provider-is-garbage",
        "nothing can be written of a dead node's provider, since somebody damaged its record: other nodes are marked, and lose their marks, all the same",
        |stage| Box::pin(dead_beside_garbage(stage)),
    )
    .on_nodes(3)
    .with_controllers(1),
    Scenario::new(
        "agent-restarted-under-a-controller",
        "an agent is away for twenty seconds: no controller marks its node",
        |stage| Box::pin(restarted(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "agent-killed-when-a-controller-sees-again",
        "a controller has no etcd for ten minutes, before which and in whose last seconds an agent is away: what nobody saw does not count, and its \
         node is not marked",
        |stage| Box::pin(blind(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "keys-deleted-of-a-guest-without-its-agent",
        "an agent is killed, and somebody deletes request and status of its guest by hand: a controller takes the claim away from nobody, for the guest \
         may be there",
        |stage| Box::pin(keys_deleted(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "command-asleep-until-it-counts-as-left-over",
        "a command sleeps before its claim till it counts as left over, and would be killed right behind that: it does not claim any more",
        |stage| Box::pin(slept(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "command-and-node-killed",
        "a command is killed between its claim and its request, and so is the agent of every node: a controller takes claim, \
         record and name away when they count as left over",
        |stage| Box::pin(left_over(stage)),
    )
    .with_controllers(1),
];

fn is_marked(stage: &Stage, node: usize) -> bool {
    marked(&stage.world, stage.node(node).node) == Some(true)
}

async fn dead_beside_garbage(stage: Stage) {
    let key = format!("{PLACEMENT}/providers/{}", stage.node(1).node);
    let whole = stage.get(&key).unwrap_or_default();
    stage.kill(2);
    stage.pass(60).await;
    stage.demand(is_marked(&stage, 2), "the second is marked").await;
    stage.put(&key, "garbage").await;
    stage.kill(1);
    stage.kill(3);
    stage.pass(60).await;
    stage.demand(is_marked(&stage, 3), "the third is marked").await;
    stage.start(2);
    stage.start(3);
    stage.pass(30).await;
    stage.demand(!is_marked(&stage, 2) && !is_marked(&stage, 3), "both marks are gone").await;
    stage.put(&key, whole).await;
    stage.pass(60).await;
    stage.demand(is_marked(&stage, 1), "the first is marked once that can be").await;
    stage.start(1);
    stage.pass(30).await;
}

async fn dead(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(2);
    stage.pass(60).await;
    stage.demand(is_marked(&stage, 2) && !is_marked(&stage, 1), "the node is marked, and it alone").await;
    for name in ["db", "mail"] {
        let placed = stage.placed(name).await;
        stage.demand(placed.node == stage.node(1).node, "the living one has it").await;
    }
    stage.start(2);
    stage.pass(30).await;
    stage.demand(!is_marked(&stage, 2), "the mark is gone").await;
    stage.until_well(guest).await;
}

async fn both_dead(stage: Stage) {
    if stage.world.controllers.kill(0) {
        say(&stage.world, format!("kills {}", Actor::Controller(0)));
    }
    stage.kill(1);
    stage.pass(60).await;
    stage.demand(is_marked(&stage, 1), "the node is marked").await;
}

async fn restarted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    for _ in 0..20 {
        stage.pass(1).await;
        if is_marked(&stage, 1) {
            stage.fail::<()>("the node is marked").await;
        }
    }
    stage.start(1);
    stage.pass(60).await;
    stage.demand(!is_marked(&stage, 1), "it was not marked").await;
    stage.until_well(guest).await;
}

async fn blind(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.pass(20).await;
    stage.cut(Actor::Controller(0), 600);
    stage.start(1);
    stage.pass(590).await;
    stage.kill(1);
    stage.pass(30).await;
    stage.demand(!is_marked(&stage, 1), "it is not marked").await;
    stage.start(1);
    stage.until_well(guest).await;
}

async fn keys_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    let (keys, node) = (&stage.world.keys, stage.node(1).node);
    for key in [keys.request(node, guest), keys.status(node, guest)] {
        stage.delete(&key).await;
    }
    stage.stays(guest, 1000, "counted", |is| is.claim).await;
    stage.start(1);
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.is_kept()).await;
    stage.stays(guest, 300, "counted", |is| is.claim).await;
}

async fn slept(stage: Stage) {
    let user = stage.user(1);
    let begun = || !stage.world.store.content(&stage.world.keys.instances()).pairs.is_empty();
    let (told, ()) = tokio::join!(user.schedule("web"), async {
        while !begun() {
            sleep(Duration::from_millis(1)).await;
        }
        stage.say("u1 sleeps");
        stage.snag("u1", "PUT /allocations", Fate::KillsAfterwards);
        user.sleeps(Duration::from_secs(1000)).await;
    });
    stage.demand(told.is_err_and(|why| why.contains("this took minutes")), "it gives up").await;
    stage.world.clear_snags();
    let consumers = stage.world.store.content(&format!("{PLACEMENT}/consumers/")).pairs;
    stage.demand(consumers.is_empty(), "nothing is claimed").await;
    stage.ready("web").await;
}

async fn left_over(stage: Stage) {
    stage.snag("u1", "put requests/", Fate::Kills);
    let told = stage.user(1).schedule("web").await;
    stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
    stage.kill(1);
    let left = |stage: &Stage| {
        let count = |prefix: &str| stage.world.store.content(prefix).pairs.len();
        let keys = &stage.world.keys;
        count(&keys.instances()) + count("/ecompute/names/") + count(&format!("{PLACEMENT}/consumers/"))
    };
    stage.pass(300).await;
    stage.demand(left(&stage) == 3, "what may still be somebody's is left alone").await;
    stage.pass(600).await;
    stage.demand(left(&stage) == 0, "nothing is left, though no agent is there").await;
}

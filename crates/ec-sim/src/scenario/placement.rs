//! Placement is away, refuses, loses its answers; several of its replicas, far and near.

use std::time::Duration;

use futures::future::join_all;
use reqwest::Method;
use serde_json::{Map, Value, json};

use super::{Scenario, Stage, stage::Sight};
use crate::{
    referee::observed,
    replica::ADMIN,
    snag::Fate,
    world::{Actor, PLACEMENT},
};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "batch-with-one-that-does-not-fit",
        "among ordinary claims somebody writes for hundreds of consumers at once, which is more than a transaction holds: \
         that one is refused, and no other with it",
        |stage| Box::pin(poisoned(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "claims-that-arrive-while-etcd-stalls",
        "a hundred and fifty claims, each on two providers, arrive at once while etcd takes its time: more than one transaction holds, and \
         each is given",
        |stage| Box::pin(stalled(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "consumer-in-two-spellings",
        "a document writes for one consumer in two spellings of its uuid: it is refused, and nothing is counted twice",
        |stage| Box::pin(spellings(stage)),
    ),
    Scenario::new(
        "nodes-token-and-what-is-not-its-own",
        "with the token of one node somebody changes what another offers, and the claim of a guest there: that is refused, and of its own node it may be done",
        |stage| Box::pin(not_its_own(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "turn-left-behind",
        "a replica is killed after it asked the others for a turn: they wait for a second at most, again and again, and go on",
        |stage| Box::pin(turn(stage)),
    ),
    Scenario::new(
        "import-broken-off",
        "an import of placement's records broke off: nothing is served from half of them, guests run on, and all goes on when \
         it is taken away",
        |stage| Box::pin(import(stage)),
    ),
    Scenario::new(
        "replicas-far-and-near",
        "one of two replicas is a hundred times farther from etcd than the other, and both are asked for the same node at \
         once: each claim is answered in time, and no room is sold twice",
        |stage| Box::pin(far(stage)),
    )
    .with_replicas(2)
    .on_nodes(3),
    Scenario::new(
        "more-claims-than-room",
        "twelve users ask at once for the eight places of two nodes: eight are placed, four are told that there is no room",
        |stage| Box::pin(crowd(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "replica-cut-off",
        "one of two replicas is cut off from etcd: it answers nothing that is old, and the other goes on",
        |stage| Box::pin(cut(stage)),
    )
    .with_replicas(2),
    Scenario::new(
        "replica-killed-in-a-claim",
        "a replica is killed when it has written a claim, before it answers: the user is told so, and nothing stays claimed",
        |stage| Box::pin(killed_in_a_claim(stage)),
    )
    .with_replicas(2),
    Scenario::new(
        "replica-unheard-by-etcd",
        "a replica does not hear whether its claim was written: it finds out, and the claim is given once",
        |stage| Box::pin(unheard(stage, Fate::LosesItsAnswer)),
    ),
    Scenario::new(
        "replica-unheard-and-lost",
        "a replica's claim is lost on its way to etcd: it finds out, and tries again",
        |stage| Box::pin(unheard(stage, Fate::IsLost)),
    ),
    Scenario::new(
        "replica-written-late",
        "a replica's claim arrives in etcd ten seconds late, when it was decided again: the room is sold once",
        |stage| Box::pin(unheard(stage, Fate::IsLate(Duration::from_secs(10)))),
    ),
    Scenario::new(
        "placement-away",
        "placement is away for ten minutes while guests are built, run and are destroyed: each waits, and comes to what was \
         asked for",
        |stage| Box::pin(away(stage)),
    ),
    Scenario::new(
        "claim-asked-for-twice",
        "a balancer asks for a claim once more whose first answer was lost, and the user is told that somebody was quicker, which was this \
         claim: another is tried, and the first one is given back",
        |stage| Box::pin(repeated(stage)),
    ),
    Scenario::new(
        "placement-conflicts-without-end",
        "placement answers each claim with 409: the user is told that there is no room, and nothing stays",
        |stage| Box::pin(refused(stage, 409)),
    ),
    Scenario::new(
        "placement-fails-without-end",
        "placement answers each claim with 500: the user is told so, and nothing stays",
        |stage| Box::pin(refused(stage, 500)),
    ),
    Scenario::new(
        "placement-fails-an-agent",
        "placement answers an agent's questions and releases with 503 for a while: it tries on, and nothing fails for it",
        |stage| Box::pin(fails_agent(stage)),
    ),
];

async fn poisoned(stage: Stage) {
    let node = stage.node(1).node;
    let mut document = Map::new();
    for number in 0..300u128 {
        document.insert(uuid::Uuid::from_u128(0xf000 + number).to_string(), little(&[node]));
    }
    let users = ["a", "b", "c", "d"].map(|name| {
        let stage = stage.clone();
        async move { stage.user(1).schedule(name).await }
    });
    let (large, placed) = tokio::join!(
        stage.placement(Method::POST, "/allocations", Some(Value::Object(document))),
        join_all(users)
    );
    stage.demand(large.0 == 400, "what does not fit is refused with 400").await;
    for placed in placed {
        match placed {
            Ok(placed) => stage.until_well(placed.instance).await,
            Err(why) => stage.fail(format!("an ordinary claim was refused with it: {why}")).await,
        }
    }
}

/// A claim of others for as little as can be.
fn little(nodes: &[ec_model::NodeId]) -> Value {
    let amounts = json!({"resources": {"MEMORY_MB": 1}});
    let allocations: Map<String, Value> =
        nodes.iter().map(|node| (node.to_string(), amounts.clone())).collect();
    json!({
        "allocations": allocations, "project_id": "p", "user_id": "u", "consumer_generation": null, "consumer_type": "OTHERS",
    })
}

async fn stalled(stage: Stage) {
    let nodes = [stage.node(1).node, stage.node(2).node];
    stage.world.move_away(Actor::Replica(0), Duration::from_millis(750));
    let paths: Vec<String> = (0..150u128)
        .map(|number| format!("/allocations/{}", uuid::Uuid::from_u128(0xf000 + number)))
        .collect();
    let claims = paths.iter().map(|path| stage.ask_placement(ADMIN, Method::PUT, path, Some(little(&nodes))));
    let given = join_all(claims).await.iter().filter(|answer| answer.0 == 204).count();
    stage.demand(given == 150, "each is given").await;
    let releases = paths.iter().map(|path| stage.ask_placement(ADMIN, Method::DELETE, path, None));
    let released = join_all(releases).await.iter().filter(|answer| answer.0 == 204).count();
    stage.demand(released == 150, "each is given back").await;
}

async fn spellings(stage: Stage) {
    let node = stage.node(1).node;
    let small = "abcdefab-cdef-abcd-efab-cdefabcdefab";
    let document = json!({(small): little(&[node]), (small.to_uppercase()): little(&[node])});
    let (status, _) = stage.placement(Method::POST, "/allocations", Some(document)).await;
    stage.demand(status == 400, "it is refused").await;
    let claims = stage.world.store.content(&format!("{PLACEMENT}/consumers/")).pairs.len();
    stage.demand(claims == 0, "nothing is counted").await;
}

async fn not_its_own(stage: Stage) {
    let guest = stage.ready("web").await;
    let at = if observed(stage.node(1), guest).is_some() { 1 } else { 2 };
    let inventory = format!("/resource_providers/{}/inventories/VCPU", stage.node(at).node);
    let claim = format!("/allocations/{guest}");
    let (_, offered) = stage.placement(Method::GET, &inventory, None).await;
    let other = stage.node(3 - at).token();
    for (method, path, body) in [
        (Method::PUT, &inventory, Some(offered.clone())),
        (Method::DELETE, &inventory, None),
        (Method::DELETE, &claim, None),
    ] {
        let (status, _) = stage.ask_placement(&other, method, path, body).await;
        stage.demand(status == 403, "it is refused").await;
    }
    let provider = format!("/resource_providers/{}", stage.node(at).node);
    let traits = format!("{provider}/traits");
    let (_, mut disabled) = stage.placement(Method::GET, &traits, None).await;
    disabled["traits"] = json!(["COMPUTE_STATUS_DISABLED"]);
    for (method, path, body) in [
        (Method::PUT, &traits, Some(disabled)),
        (Method::DELETE, &traits, None),
        (Method::PUT, &provider, Some(json!({"name": "mine"}))),
        (Method::DELETE, &provider, None),
    ] {
        let (status, _) = stage.ask_placement(&other, method, path, body).await;
        stage.demand(status == 403, "it is refused, too").await;
    }
    let own = stage.node(at).token();
    let (status, _) = stage.ask_placement(&own, Method::PUT, &inventory, Some(offered)).await;
    stage.demand(status == 200, "its own may be changed").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn turn(stage: Stage) {
    stage.put(&format!("{PLACEMENT}/turn"), "a replica that is dead").await;
    let begun = stage.world.elapsed();
    let guest = stage.ready("web").await;
    let took = stage.world.elapsed().saturating_sub(begun);
    stage.demand(took < Duration::from_secs(8), "it takes little longer").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.delete(&format!("{PLACEMENT}/turn")).await;
}

async fn import(stage: Stage) {
    let guest = stage.ready("web").await;
    let import = json!({"version": 1, "id": "i", "begun_at": "2027-01-15T08:00:00Z"});
    stage.put(&format!("{PLACEMENT}/import"), import.to_string()).await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err_and(|why| why.contains("import")), "nothing is served, and why is told").await;
    stage.stays(guest, 120, "running", |is| is.is(ec_model::State::Active) && is.runs()).await;
    stage.delete(&format!("{PLACEMENT}/import")).await;
    stage.pass(5).await;
    stage.ready("db").await;
    stage.until_well(guest).await;
}

async fn far(stage: Stage) {
    stage.say("p2 is 200 ms farther from etcd");
    stage.world.move_away(Actor::Replica(1), Duration::from_millis(200));
    let users = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| {
        let stage = stage.clone();
        async move { stage.user(1).schedule(name).await }
    });
    let begun = stage.world.elapsed();
    for placed in join_all(users).await {
        match placed {
            Ok(placed) => stage.until_well(placed.instance).await,
            Err(why) => stage.fail(format!("somebody was refused: {why}")).await,
        }
    }
    let took = stage.world.elapsed().saturating_sub(begun);
    stage.demand(took < Duration::from_secs(30), "nobody starves").await;
}

async fn crowd(stage: Stage) {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let users = names.map(|name| {
        let stage = stage.clone();
        async move { stage.user(1).schedule(name).await }
    });
    let told = join_all(users).await;
    let placed: Vec<_> = told.iter().flatten().collect();
    stage.demand(placed.len() == 8, "eight are placed").await;
    let refused = told.iter().filter(|told| matches!(told, Err(why) if why == "no room")).count();
    stage.demand(refused == 4, "four are told that there is no room").await;
    for placed in placed {
        stage.until_well(placed.instance).await;
    }
}

async fn cut(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.cut(Actor::Replica(1), 120);
    for name in ["a", "b", "c", "d", "e", "f"] {
        // Refused by one, or placed by the other.
        stage.user(1).schedule(name).await.ok();
        stage.pass(5).await;
    }
    stage.until_well(guest).await;
}

async fn killed_in_a_claim(stage: Stage) {
    for replica in ["p1", "p2"] {
        stage.snag(replica, "claim ", Fate::KillsAfterwards);
    }
    let told = stage.user(1).schedule("web").await;
    stage.demand(told.is_err(), "it is told").await;
    stage.pass(30).await;
    stage.world.clear_snags();
    for number in [1, 2] {
        if !stage.world.replicas.is_up(number - 1) {
            stage.start_replica(number);
        }
    }
    stage.pass(120).await;
    let left = stage.world.store.content(&format!("{}/consumers/", PLACEMENT)).pairs.len();
    stage.demand(left == 0, "nothing stays claimed").await;
    stage.ready("web").await;
}

async fn unheard(stage: Stage, fate: Fate) {
    stage.snag("p1", "claim ", fate);
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
    stage.pass(30).await;
    let claims = stage.world.store.content(&format!("{}/consumers/", PLACEMENT)).pairs.len();
    stage.demand(claims == 1, "there is one claim").await;
}

async fn repeated(stage: Stage) {
    stage.snag("u1", "PUT /allocations", Fate::IsRepeated);
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
    let claims = stage.world.store.content(&format!("{PLACEMENT}/consumers/")).pairs.len();
    stage.demand(claims == 1, "there is one claim").await;
}

async fn away(stage: Stage) {
    let gone = stage.ready("gone").await;
    let stays = stage.ready("stays").await;
    let placed = stage.placed("web").await;
    stage.kill_replica(1);
    stage.destroyed(gone).await;
    stage.stays(stays, 600, "running", |is| is.is(ec_model::State::Active) && is.runs()).await;
    let told = stage.user(1).schedule("db").await;
    stage.demand(told.is_err(), "it is told that placement is away").await;
    stage.start_replica(1);
    stage.until_gone(gone).await;
    stage.until_well(placed.instance).await;
    stage.until(stays, "well", Sight::is_well).await;
    stage.ready("db").await;
}

async fn refused(stage: Stage, status: u16) {
    stage.world.snag("u1", "PUT /allocations", Fate::IsRefused(status), usize::MAX);
    let told = stage.user(1).schedule("web").await;
    stage.demand(told.is_err(), "it is told").await;
    stage.world.clear_snags();
    stage.ready("web").await;
    // By its record the node knows whose a claim is that was made all the same; that is no more than a left-over then.
    stage.pass(660).await;
    let listed = stage.user(1).list().await.map_or(0, |views| views.len());
    stage.demand(listed == 1, "nothing stays").await;
}

async fn fails_agent(stage: Stage) {
    stage.world.snag("n1", "GET /allocations/i1", Fate::IsRefused(503), 5);
    stage.world.snag("n1", "DELETE /allocations/i1", Fate::IsRefused(503), 5);
    let guest = stage.ready("web").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

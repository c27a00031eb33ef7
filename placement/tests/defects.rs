//! Where OpenStack Placement 16 is wrong, and what is right.
mod support;

use std::collections::BTreeSet;

use ec_store::MemoryStore;
use serde_json::{Value, json};
use support::{Server, claim, open, uuid};

#[tokio::test]
async fn amounts_of_one_class_in_two_groups_are_not_added_up_where_they_are_served_apart() {
    let server = Server::start().await;
    server.provider(1, None, &[], &[], &[]).await;
    let (a, b) = (
        server.provider(2, Some(1), &[("VCPU", 4)], &[], &[]).await,
        server.provider(3, Some(1), &[("VCPU", 4)], &[], &[]).await,
    );
    let mut answers = Vec::new();
    for policy in ["", "&group_policy=none", "&group_policy=isolate"] {
        let (status, answer) =
            server.get(&format!("/allocation_candidates?resources=VCPU:1&resources_A=VCPU:1{policy}")).await;
        assert_eq!(status, 200, "{answer}");
        let candidates: BTreeSet<String> = answer["allocation_requests"]
            .as_array()
            .unwrap()
            .iter()
            .map(|request| request["allocations"].to_string())
            .collect();
        answers.push(candidates);
    }
    let one = |first: i64, second: i64| {
        let mut allocations = serde_json::Map::new();
        for (provider, amount) in [(&a, first), (&b, second)] {
            if amount > 0 {
                allocations.insert(provider.clone(), json!({"resources": {"VCPU": amount}}));
            }
        }
        Value::Object(allocations).to_string()
    };
    let wanted = BTreeSet::from([one(1, 1), one(2, 0), one(0, 2)]);
    assert_eq!(answers, [wanted.clone(), wanted.clone(), wanted]);
}

#[tokio::test]
async fn a_sharing_provider_inside_another_tree_serves_without_that_tree_being_a_candidate() {
    let server = Server::start().await;
    server.provider(1, None, &[], &[], &[]).await;
    let shared = server.provider(2, Some(1), &[("DISK_GB", 100)], &["MISC_SHARES_VIA_AGGREGATE"], &[9]).await;
    let host = server.provider(3, None, &[("VCPU", 4)], &[], &[9]).await;
    let (status, answer) = server.get("/allocation_candidates?resources=VCPU:1,DISK_GB:10").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        answer["allocation_requests"],
        json!([{
            "allocations": {&shared: {"resources": {"DISK_GB": 10}}, &host: {"resources": {"VCPU": 1}}},
            "mappings": {"": [&shared, &host]},
        }])
    );
    let shown: BTreeSet<&String> = answer["provider_summaries"].as_object().unwrap().keys().collect();
    assert_eq!(shown, BTreeSet::from([&uuid(1), &shared, &host]), "of both trees");
}

#[tokio::test]
async fn a_refused_write_leaves_no_consumer_behind() {
    let server = Server::start().await;
    let host = server.provider(1, None, &[("VCPU", 4)], &[], &[]).await;
    let path = format!("/allocations/{}", uuid(50));
    assert_eq!(server.put(&path, claim(&uuid(404), "VCPU", 1)).await.0, 400, "no such provider");
    assert_eq!(server.put(&path, claim(&host, "CUSTOM_NO", 1)).await.0, 400, "no such class");
    assert_eq!(server.put(&path, claim(&host, "VCPU", 5)).await.0, 409, "too much");
    assert_eq!(server.put(&path, claim(&host, "DISK_GB", 5)).await.0, 409, "none of it there");
    let both = json!({uuid(50): claim(&host, "VCPU", 1), uuid(51): claim(&uuid(404), "VCPU", 1)});
    assert_eq!(server.post("/allocations", both).await.0, 400);
    // The consumer is as new as before.
    assert_eq!(server.put(&path, claim(&host, "VCPU", 4)).await.0, 204);
    assert_eq!(server.get(&path).await.1["consumer_generation"], 1);
}

#[tokio::test]
async fn emptying_what_is_not_there_makes_nothing() {
    let server = Server::start().await;
    let host = server.provider(1, None, &[("VCPU", 4)], &[], &[]).await;
    let path = format!("/allocations/{}", uuid(50));
    let mut nothing = claim(&host, "VCPU", 1);
    nothing["allocations"] = json!({});
    for _ in 0..2 {
        assert_eq!(server.put(&path, nothing.clone()).await.0, 204);
    }
    assert_eq!(server.put(&path, claim(&host, "VCPU", 1)).await.0, 204);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_claim_at_once_from_three_replicas_get_exactly_what_there_is() {
    let store = MemoryStore::new();
    let mut servers = Vec::new();
    for _ in 0..3 {
        servers.push(Server::start_on(&store, open()).await);
    }
    let host = servers[0].provider(1, None, &[("VCPU", 10)], &[], &[]).await;
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..8_u128 {
        let server = &servers[usize::try_from(client).unwrap() % 3];
        let (url, http, host) = (server.url.clone(), server.client.clone(), host.clone());
        clients.spawn(async move {
            let mut granted = 0;
            for number in 0..4 {
                let answer = http
                    .put(format!("{url}/allocations/{}", uuid(1000 + client * 10 + number)))
                    .header("X-Auth-Token", "admin")
                    .header("OpenStack-API-Version", "placement latest")
                    .json(&claim(&host, "VCPU", 1))
                    .send()
                    .await
                    .unwrap();
                match answer.status().as_u16() {
                    204 => granted += 1,
                    409 => {}
                    other => unreachable!("{other}"),
                }
            }
            granted
        });
    }
    let granted: i32 = clients.join_all().await.into_iter().sum();
    assert_eq!(granted, 10);
    for server in &servers {
        let (_, usages) = server.get(&format!("/resource_providers/{host}/usages")).await;
        assert_eq!(usages["usages"], json!({"VCPU": 10}));
    }
}

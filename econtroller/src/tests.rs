//! When what is looked at.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ec_model::{InstanceId, Keyspace, Node, NodeId, encode};
use ec_placement_client::{Answer, PlacementClient, PlacementConfig, Request, Transport};
use ec_runtime::Host;
use ec_serve::port::Tells;
use ec_store::{MemoryStore, Store, Txn};
use serde_json::json;

use super::*;

/// A placement that has every node, says soon what it has, and takes an hour to say who shares storage.
#[derive(Default)]
struct Slow {
    marked: AtomicBool,
}

#[async_trait]
impl Transport for Slow {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        if request.url.query().is_some_and(|query| query.contains("SHARES")) {
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
        let is_marked = self.marked.fetch_or(
            request.method == "PUT" && request.url.path().starts_with("/resource_providers/"),
            Ordering::Relaxed,
        );
        let traits = match request.url.path() {
            // Whatever is asked about, somebody has it.
            "/traits" => json!(["COMPUTE_STATUS_DISABLED", "CUSTOM_ECOMPUTE_NODE_DOWN"]),
            _ if is_marked => json!(["COMPUTE_STATUS_DISABLED"]),
            _ => json!([]),
        };
        let document = json!({"traits": traits, "resource_provider_generation": 1, "resource_providers": []});
        Ok(Answer { status: reqwest::StatusCode::OK, body: document.to_string().into_bytes(), ahead: None })
    }
}

fn cloud(store: Arc<MemoryStore>, placement: PlacementClient, keys: Keyspace, host: &Host) -> Cloud {
    Cloud {
        store,
        placement: Arc::new(placement),
        keys,
        project: "default".into(),
        user: "default".into(),
        host: host.clone(),
        request_id: None,
        notice: |_| {},
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_dies_is_marked_in_time_where_placement_takes_long_over_claims() {
    ec_runtime::install_tls_provider();
    let (store, keys) = (Arc::new(MemoryStore::new()), Keyspace::default());
    let node = NodeId::new(uuid::Uuid::from_u128(1));
    let created_at = jiff::Timestamp::UNIX_EPOCH;
    let record = Node { node, name: "dead".into(), created_at, troubles: Vec::new(), revoked: false };
    store.txn(Txn::new().put(keys.node(node), encode(&record))).await.unwrap();
    let slow = Arc::new(Slow::default());
    let placement = PlacementClient::new(&PlacementConfig::default()).unwrap().over(slow.clone());
    let host = Host::default();
    let cloud = cloud(store, placement, keys, &host);
    let (tally, shutdown) = (Tally::new(&host, Vec::new()), CancellationToken::new());
    let observed = async {
        tokio::time::sleep(PATIENCE + NODES_PERIOD * 2).await;
        assert!(slow.marked.load(Ordering::Relaxed), "it is marked");
        // Longer than whoever looks at its health waits for a turn.
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(tally.health(), Ok("ok"));
        shutdown.cancel();
    };
    let ((), ()) = tokio::join!(tend(&cloud, &tally, &shutdown), observed);
}

#[tokio::test(start_paused = true)]
async fn trouble_is_told_when_it_is_another_and_not_for_its_numbers() {
    let mut trouble = Trouble::of("claims");
    assert!(trouble.is_news("etcd is not reachable: no answer within 5s"));
    assert!(!trouble.is_news("placement refused"), "so soon");
    tokio::time::advance(TOLD_EVERY).await;
    assert!(!trouble.is_news("etcd is not reachable: no answer within 7s"));
    assert!(trouble.is_news("placement refused"));
    tokio::time::advance(TOLD_EVERY).await;
    assert!(trouble.is_news("etcd is not reachable: no answer within 5s"));
    // What goes well meanwhile ends it.
    trouble.tell(Ok(()));
    assert!(trouble.is_news("etcd is not reachable: no answer within 5s"));
}

/// A placement that has nothing, and a clock.
struct Clock(AtomicI64);

#[async_trait]
impl Transport for Clock {
    async fn exchange(&self, _: Request) -> Result<Answer, String> {
        let document = json!({"versions": [{"max_version": "1.39"}], "traits": [], "resource_providers": []});
        let ahead = Some(self.0.load(Ordering::Relaxed));
        Ok(Answer { status: reqwest::StatusCode::OK, body: document.to_string().into_bytes(), ahead })
    }
}

#[tokio::test(start_paused = true)]
async fn by_a_clock_that_is_wrong_nothing_is_taken_for_left_and_that_is_told() {
    ec_runtime::install_tls_provider();
    let clock = Arc::new(Clock(AtomicI64::new(-660)));
    let placement = PlacementClient::new(&PlacementConfig::default()).unwrap().over(clock.clone());
    let host = Host::default();
    let (store, keys) = (Arc::new(MemoryStore::new()), Keyspace::default());
    // A name whose record is gone goes at any look.
    let name =
        keys.name(ec_model::Workload::Machine, "default", "web", InstanceId::new(uuid::Uuid::from_u128(1)));
    store.txn(Txn::new().put(name, "")).await.unwrap();
    let cloud = cloud(store.clone(), placement.clone(), keys.clone(), &host);
    let (tally, shutdown) = (Tally::new(&host, Vec::new()), CancellationToken::new());
    tally.compare_clocks(placement);
    let has_name = || !store.content(&keys.all_names(ec_model::Workload::Machine)).pairs.is_empty();
    let observed = async {
        tokio::time::sleep(INSTANCES_PERIOD * 2).await;
        let (is_ready, told) = tally.readiness().unwrap();
        assert!(!is_ready && told.contains("660 s ahead of that of placement's host"), "{told}");
        assert!(has_name());
        clock.0.store(1, Ordering::Relaxed);
        tokio::time::sleep(INSTANCES_PERIOD * 2).await;
        assert!(!has_name());
        assert!(!tally.readiness().unwrap().1.contains("ahead"));
        shutdown.cancel();
    };
    let ((), ()) = tokio::join!(tend(&cloud, &tally, &shutdown), observed);
}

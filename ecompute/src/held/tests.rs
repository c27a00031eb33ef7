use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use ec_placement_client::{Answer, Request, Transport};
use ec_store::{Store, Txn};
use reqwest::StatusCode;
use serde_json::{Value, json};

use super::*;
use crate::{alone::assembled, look::audit, parts::Parts, register::reserve_uncounted};

const ON_NODE: u128 = 1;
const ON_OTHER_NODE: u128 = 2;
const VOLUME: u128 = 3;
const VOLUME_OF_ANOTHER: u128 = 4;
const UNREADABLE: u128 = 5;
const UNCOUNTED: u128 = 6;
const BELOW_NODE: u128 = 7;

fn id(number: u128) -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(number))
}

fn node(number: u128) -> NodeId {
    NodeId::new(uuid::Uuid::from_u128(number))
}

/// A storage of two nodes and what of it is claimed. Knows what it was asked.
#[derive(Default)]
struct Shared {
    storage: Mutex<Option<NodeId>>,
    asked: Mutex<Vec<String>>,
}

impl Shared {
    fn held(&self, consumer: u128) -> Value {
        let storage = self.storage.lock().unwrap().unwrap().to_string();
        let disk = json!({"resources": {"DISK_GB": 5}});
        let runs = json!({"resources": {"VCPU": 2}});
        match consumer {
            ON_NODE => json!({node(9).to_string(): runs, storage: disk}),
            ON_OTHER_NODE => json!({node(8).to_string(): runs, storage: disk}),
            BELOW_NODE => json!({node(91).to_string(): runs, storage: disk}),
            VOLUME | VOLUME_OF_ANOTHER | UNREADABLE => json!({storage: disk}),
            _ => json!({}),
        }
    }
}

#[async_trait]
impl Transport for Shared {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        let path = request.url.path().trim_matches('/').to_owned();
        self.asked.lock().unwrap().push(path.clone());
        let (mut status, storage) = (StatusCode::OK, self.storage.lock().unwrap().unwrap());
        let body = match path.split('/').collect::<Vec<_>>()[..] {
            ["allocations", consumer] if consumer == id(UNREADABLE).to_string() => {
                status = StatusCode::SERVICE_UNAVAILABLE;
                json!({})
            }
            ["allocations", consumer] => {
                let consumer = consumer.parse::<uuid::Uuid>().unwrap().as_u128();
                json!({"allocations": self.held(consumer), "consumer_generation": 1})
            }
            ["resource_providers", provider, "allocations"] if provider == node(9).to_string() => {
                json!({"allocations": {id(ON_NODE).to_string(): {"resources": {"VCPU": 2}}}})
            }
            ["resource_providers", provider] if provider == storage.to_string() => {
                json!({"uuid": provider, "name": "storage:nfs", "generation": 1})
            }
            _ => panic!("{path}: what other nodes hold is not asked for"),
        };
        Ok(Answer { status, body: body.to_string().into(), ahead: None })
    }
}

async fn agent(state: &Path) -> (Arc<Parts>, Arc<Shared>) {
    let configuration = format!(
        "name: n\nstate_dir: {0}/state\nshared_storage: {{name: nfs, path: {0}/nfs}}\n",
        state.display()
    );
    let shared = Arc::new(Shared::default());
    let (parts, store) = assembled(&configuration, shared.clone()).await;
    *shared.storage.lock().unwrap() = parts.settings.shared.as_ref().map(|shared| shared.storage.provider);
    // Of each it is known otherwise.
    let statuses =
        Txn::new().put(parts.status_key(id(ON_OTHER_NODE)), "").put(parts.request_key(id(UNREADABLE)), "");
    store.txn(statuses).await.unwrap();
    for (number, resources) in [
        (ON_NODE, json!({"VCPU": 2, "DISK_GB": 5})),
        (VOLUME, json!({"DISK_GB": 5})),
        (UNCOUNTED, json!({"VCPU": 1, "DISK_GB": 5})),
        (BELOW_NODE, json!({"VCPU": 2, "DISK_GB": 5})),
    ] {
        let record = json!({
            "version": 1, "instance": id(number), "name": "x", "macs": [], "started": true,
            "resources": resources, "created_at": "2026-01-01T00:00:00Z",
        });
        parts.records.put(&serde_json::from_value(record).unwrap()).unwrap();
    }
    (parts, shared)
}

fn amounts(amounts: &[(&str, u64)]) -> Resources {
    amounts.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect()
}

#[tokio::test]
async fn of_storage_that_nodes_share_a_node_asks_for_what_it_knows() {
    let state = tempfile::tempdir().unwrap();
    let (parts, shared) = agent(state.path()).await;
    let held = audit(&parts).await.unwrap().unwrap();
    let (unreadable, told): (BTreeMap<_, _>, BTreeMap<_, _>) =
        held.into_iter().partition(|(_, of)| of.is_err());
    assert_eq!(unreadable.into_keys().collect::<Vec<_>>(), [id(UNREADABLE)], "the others are told");
    let disk = amounts(&[("DISK_GB", 5)]);
    let here = [
        (id(ON_NODE), Ok(amounts(&[("VCPU", 2), ("DISK_GB", 5)]))),
        (id(ON_OTHER_NODE), Ok(disk.clone())),
        (id(VOLUME), Ok(disk.clone())),
        (id(BELOW_NODE), Ok(disk)),
    ];
    assert_eq!(told, here.into());
    let asked = std::mem::take(&mut *shared.asked.lock().unwrap());
    assert_eq!(asked.len(), 2 + 6, "{asked:?}");
}

#[tokio::test]
async fn room_is_reserved_for_a_guest_that_neither_its_node_nor_the_storage_counts() {
    let state = tempfile::tempdir().unwrap();
    let (parts, shared) = agent(state.path()).await;
    reserve_uncounted(&parts).await.unwrap();
    let uncounted = parts.uncounted.borrow().clone();
    assert_eq!(uncounted, [(id(UNCOUNTED), amounts(&[("VCPU", 1), ("DISK_GB", 5)]))].into());
    let asked = std::mem::take(&mut *shared.asked.lock().unwrap());
    assert_eq!(asked.len(), 1 + 2, "of volumes nothing is reserved: {asked:?}");
}

#[tokio::test]
async fn where_nobody_is_told_of_the_whole_audit_failed() {
    let state = tempfile::tempdir().unwrap();
    let (parts, _) = agent(state.path()).await;
    let one = [id(UNREADABLE)];
    assert!(held_by(&parts.placement, one.into()).await.is_err());
    assert!(held_by(&parts.placement, [id(UNREADABLE), id(VOLUME)].into()).await.unwrap()[&one[0]].is_err());
    assert!(held_by(&parts.placement, BTreeSet::new()).await.unwrap().is_empty());
}

//! eplacement with records in etcd that it cannot read, that are of a newer release, or not its own.

use std::time::Duration;

use anyhow::{Result, ensure};
use ec_store::{EtcdConfig, EtcdStore, Store, Txn, testing::EtcdServer};
use ec_tests::replica::{Replica, claim};
use reqwest::Method;
use serde_json::{Value, json};

const HOST: &str = "11111111-1111-4111-8111-111111111111";
const SICK: &str = "22222222-2222-4222-8222-222222222222";
const FIRST: &str = "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa";
const SECOND: &str = "bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb";
const ROOT: &str = "/ecompute/placement";

async fn store(etcd: &EtcdServer) -> Result<EtcdStore> {
    let config = EtcdConfig { endpoints: vec![etcd.endpoint()], ..EtcdConfig::default() };
    Ok(EtcdStore::connect(config).await?)
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_costs_what_depends_on_it_and_nothing_once_it_is_gone() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let store = store(&etcd).await?;
    let old = Replica::start(&etcd.endpoint()).await?;
    old.provider(HOST, 8).await?;
    old.provider(SICK, 8).await?;
    ensure!(old.claim(FIRST, &[SICK], 4).await?.0 == 204);
    let sick = format!("{ROOT}/providers/{SICK}");
    let sound = store.get(&sick).await?.0.map(|pair| pair.value).unwrap_or_default();
    let consumer = format!("{ROOT}/consumers/{FIRST}");
    let held = store.get(&consumer).await?.0.map(|pair| pair.value).unwrap_or_default();
    let newer = String::from_utf8(held.clone())?.replace("\"version\":1", "\"version\":2");
    let strangers = [
        format!("{ROOT}/providers/not-a-uuid"),
        format!("{ROOT}/consumers/{}", FIRST.to_uppercase()),
        format!("{ROOT}/traits/not custom"),
        format!("{ROOT}/whatever"),
    ];
    let mut txn = Txn::new().put(sick.clone(), "garbage").put(consumer.clone(), newer);
    for key in &strangers {
        txn = txn.put(key.clone(), "x");
    }
    store.txn(txn).await?;
    settle().await;
    let new = Replica::start(&etcd.endpoint()).await?;
    for replica in [&old, &new] {
        replica.until_ready().await?;
        // What has nothing to do with it.
        ensure!(replica.used(HOST).await? == 0);
        ensure!(replica.claim(SECOND, &[HOST], 3).await?.0 == 204);
        replica.release(SECOND).await?;
        let (status, listed) = replica.get("/resource_providers").await?;
        ensure!(status == 200 && listed.to_string().contains(HOST), "{listed}");
        // What has.
        for (answer, key) in [
            (replica.get(&format!("/resource_providers/{SICK}")).await?, &sick),
            (replica.get(&format!("/allocations/{FIRST}")).await?, &consumer),
            (replica.claim(SECOND, &[SICK], 1).await?, &sick),
            (replica.send(Method::DELETE, &format!("/allocations/{FIRST}"), None).await?, &consumer),
        ] {
            ensure!(answer.0 == 503 && answer.1.to_string().contains(key.as_str()), "{answer:?}");
        }
        let (_, metrics) = replica.get("/metrics").await?;
        ensure!(metrics.to_string().contains("eplacement_unreadable_records 2"), "{metrics}");
        ensure!(replica.log().contains("not ours"), "{}", replica.log());
    }
    // Mended, and taken away.
    let mut txn = Txn::new().put(sick, sound).put(consumer, held);
    for key in &strangers {
        txn = txn.delete(key.clone());
    }
    store.txn(txn).await?;
    settle().await;
    for replica in [&old, &new] {
        ensure!(replica.used(SICK).await? == 4);
        ensure!(replica.claim(SECOND, &[SICK], 4).await?.0 == 204);
        replica.release(SECOND).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_that_goes_again_costs_nothing_any_more() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let store = store(&etcd).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    for kind in ["providers", "generations", "consumers"] {
        let key = format!("{ROOT}/{kind}/{SICK}");
        store.txn(Txn::new().put(key.clone(), "{")).await?;
        settle().await;
        ensure!(replica.get("/readyz").await?.0 == 200);
        ensure!(replica.claim(FIRST, &[HOST], 2).await?.0 == 204);
        replica.release(FIRST).await?;
        store.txn(Txn::new().delete(key)).await?;
        settle().await;
        let (status, answer) = replica.get(&format!("/resource_providers/{SICK}")).await?;
        ensure!(status == 404, "{answer}");
        ensure!(replica.get(&format!("/allocations/{SICK}")).await?.0 == 200);
        // Its uuid is free.
        replica.provider(SICK, 1).await?;
        let gone = replica.send(Method::DELETE, &format!("/resource_providers/{SICK}"), None).await?;
        ensure!(gone.0 == 204, "{gone:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_of_a_newer_release_survive_being_written_again() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let store = store(&etcd).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    ensure!(replica.claim(FIRST, &[HOST], 2).await?.0 == 204);
    let keys = [format!("{ROOT}/providers/{HOST}"), format!("{ROOT}/consumers/{FIRST}")];
    for key in &keys {
        let value = store.get(key).await?.0.map(|pair| pair.value).unwrap_or_default();
        let mut record: Value = serde_json::from_slice(&value)?;
        record["color"] = json!({"of": ["a", "newer", "release"]});
        if record["inventories"].is_object() {
            record["inventories"]["VCPU"]["pinned"] = json!(3);
        }
        store.txn(Txn::new().put(key.clone(), record.to_string())).await?;
    }
    settle().await;
    // Both records are written again.
    let generation = replica.get(&format!("/resource_providers/{HOST}")).await?.1["generation"].clone();
    let body = json!({"resource_provider_generation": generation, "traits": ["HW_CPU_X86_AVX"]});
    let path = format!("/resource_providers/{HOST}/traits");
    let written = replica.send(Method::PUT, &path, Some(&body)).await?;
    ensure!(written.0 == 200, "{written:?}");
    let path = format!("/allocations/{FIRST}");
    ensure!(replica.send(Method::PUT, &path, Some(&claim(&[HOST], 3, Some(1)))).await?.0 == 204);
    for (key, new) in keys.iter().zip(["HW_CPU_X86_AVX", "\"VCPU\":3"]) {
        let value = store.get(key).await?.0.map(|pair| pair.value).unwrap_or_default();
        let text = String::from_utf8(value)?;
        ensure!(text.contains("newer") && text.contains(new), "{text}");
        ensure!(!text.contains("inventories") || text.contains("\"pinned\":3"), "{text}");
    }
    Ok(())
}

/// A replica that was there when a record became unreadable, and one that was not, count and answer the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_replica_knows_of_unreadable_records_what_an_old_one_does() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let store = store(&etcd).await?;
    let old = Replica::start(&etcd.endpoint()).await?;
    old.provider(HOST, 8).await?;
    for path in ["/traits/CUSTOM_SICK", "/resource_classes/CUSTOM_SICK"] {
        ensure!(old.send(Method::PUT, path, None).await?.0 == 201);
    }
    ensure!(old.claim(FIRST, &[HOST], 6).await?.0 == 204);
    let consumer = format!("{ROOT}/consumers/{FIRST}");
    let held = store.get(&consumer).await?.0.map(|pair| pair.value).unwrap_or_default();
    let mut mistyped: Value = serde_json::from_slice(&held)?;
    (mistyped["generation"], mistyped["project"]) = (json!("seven"), json!(5));
    let mut txn = Txn::new();
    for kind in ["traits", "classes"] {
        txn = txn.put(format!("{ROOT}/{kind}/CUSTOM_SICK"), "garbage");
    }
    store.txn(txn).await?;
    for record in [mistyped.to_string(), r#"{"version":1,"allocations":7}"#.to_owned(), "garbage".to_owned()]
    {
        store.txn(Txn::new().put(consumer.clone(), record)).await?;
        settle().await;
        let new = Replica::start(&etcd.endpoint()).await?;
        new.until_ready().await?;
        for replica in [&old, &new] {
            ensure!(replica.used(HOST).await? == 6);
            let over = replica.claim(SECOND, &[HOST], 3).await?;
            ensure!(over.0 == 409, "{over:?}");
            ensure!(replica.claim(SECOND, &[HOST], 2).await?.0 == 204);
            replica.release(SECOND).await?;
            for path in ["/traits/CUSTOM_SICK", "/resource_classes/CUSTOM_SICK"] {
                for method in [Method::GET, Method::PUT, Method::DELETE] {
                    let answer = replica.send(method, path, None).await?;
                    ensure!(answer.0 == 503 && answer.1.to_string().contains("CUSTOM_SICK"), "{answer:?}");
                }
            }
        }
    }
    // What it was is forgotten: who was there knows it, and nobody else gives room away.
    let revision = store.get(&consumer).await?.1;
    store.compact(revision).await?;
    let new = Replica::start(&etcd.endpoint()).await?;
    new.until_ready().await?;
    ensure!(old.claim(SECOND, &[HOST], 3).await?.0 == 409);
    let refused = new.claim(SECOND, &[HOST], 1).await?;
    ensure!(refused.0 == 503 && refused.1.to_string().contains(&consumer), "{refused:?}");
    for path in
        [format!("/resource_providers/{HOST}/usages"), "/allocation_candidates?resources=VCPU:1".into()]
    {
        ensure!(old.get(&path).await?.0 == 200 && new.get(&path).await?.0 == 503, "{path}");
    }
    store.txn(Txn::new().put(consumer, held)).await?;
    settle().await;
    ensure!(new.claim(SECOND, &[HOST], 2).await?.0 == 204);
    Ok(())
}

/// Records that anybody may have written by hand, and that the API would never have let pass.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_cannot_be_are_not_believed() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let store = store(&etcd).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    replica.provider(SICK, 8).await?;
    ensure!(replica.claim(FIRST, &[HOST], 6).await?.0 == 204);
    let key = format!("{ROOT}/consumers/{FIRST}");
    let held = store.get(&key).await?.0.map(|pair| pair.value).unwrap_or_default();
    for amount in [i64::MAX, i64::MIN, -1, 0, 1 << 31] {
        let mut record: Value = serde_json::from_slice(&held)?;
        record["allocations"][HOST]["VCPU"] = json!(amount);
        store.txn(Txn::new().put(key.clone(), record.to_string())).await?;
        settle().await;
        let fresh = Replica::start(&etcd.endpoint()).await?;
        fresh.until_ready().await?;
        for replica in [&replica, &fresh] {
            ensure!(replica.used(HOST).await? == 6, "{amount}: what it was last known to use");
            let claimed = replica.claim(SECOND, &[HOST], 3).await?;
            ensure!(claimed.0 == 409, "{amount}: {claimed:?}");
        }
        ensure!(replica.get(&format!("/allocations/{FIRST}")).await?.0 == 503, "{amount}");
    }
    store.txn(Txn::new().put(key, held)).await?;
    let sick = format!("{ROOT}/providers/{SICK}");
    let sound = store.get(&sick).await?.0.map(|pair| pair.value).unwrap_or_default();
    for (field, value) in [("step_size", 0), ("total", -1), ("reserved", i64::MAX), ("min_unit", 0)] {
        let mut record: Value = serde_json::from_slice(&sound)?;
        record["inventories"]["VCPU"][field] = json!(value);
        store.txn(Txn::new().put(sick.clone(), record.to_string())).await?;
        settle().await;
        let claimed = replica.claim(SECOND, &[SICK], 1).await?;
        ensure!(claimed.0 == 503 && claimed.1.to_string().contains(field), "{field}: {claimed:?}");
        ensure!(replica.used(HOST).await? == 6);
    }
    let generation = format!("{ROOT}/generations/{SICK}");
    store.txn(Txn::new().put(sick, sound).put(generation.clone(), i64::MAX.to_string())).await?;
    settle().await;
    let claimed = replica.claim(SECOND, &[SICK], 1).await?;
    ensure!(claimed.0 == 503 && claimed.1.to_string().contains("generation"), "{claimed:?}");
    Ok(())
}

//! Leases.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Scene, bounded, brief};
use crate::{LeaseId, StoreError, StoreResult, Txn};

/// etcd grants nothing shorter than this with its default election timeout.
const TTL: Duration = Duration::from_secs(2);

fn assert_lost<T: std::fmt::Debug>(result: StoreResult<T>, lease: LeaseId) {
    assert!(matches!(result, Err(StoreError::LeaseLost(lost)) if lost == lease), "{result:?}");
}

pub(super) async fn an_expired_lease_takes_its_keys_along(scene: Scene) {
    let begin = Instant::now();
    let lease = scene.store.grant(TTL).await.unwrap();
    let leased = Txn::new().put_leased(scene.key("a"), "1", lease).put_leased(scene.key("b"), "1", lease);
    let revision = scene.commit(leased.put(scene.key("c"), "1")).await;
    let (pair, _) = scene.store.get(&scene.key("a")).await.unwrap();
    assert_eq!(pair.unwrap().lease, Some(lease));

    let mut watch = scene.watch(revision + 1).await;
    let (events, _) = scene.events(&mut *watch, 2).await;
    let mut gone: Vec<_> = events.iter().map(|event| brief(&scene.prefix, event)).collect();
    gone.sort();
    assert_eq!(gone, ["a-", "b-"]);
    assert!(begin.elapsed() >= TTL, "it ended after {:?}", begin.elapsed());
    assert!(scene.value("c").await.is_some());
    assert_lost(scene.store.keep_alive(lease).await, lease);
}

pub(super) async fn a_lease_kept_alive_stays(scene: Scene) {
    let lease = scene.store.grant(TTL).await.unwrap();
    scene.commit(Txn::new().put_leased(scene.key("a"), "1", lease)).await;
    let end = Instant::now() + TTL * 3;
    while Instant::now() < end {
        let left = bounded(scene.store.keep_alive(lease)).await.unwrap();
        assert!(left >= TTL, "{left:?} granted");
        // Not waiting for anything: time passing is what is tested.
        sleep(TTL / 4).await;
    }
    assert!(scene.value("a").await.is_some());
    scene.gone("a").await;
}

pub(super) async fn a_revoked_lease_takes_its_keys_along(scene: Scene) {
    let lease = scene.store.grant(TTL * 30).await.unwrap();
    let revision = scene.commit(Txn::new().put_leased(scene.key("a"), "1", lease)).await;
    bounded(scene.store.keep_alive(lease)).await.unwrap();
    bounded(scene.store.revoke(lease)).await.unwrap();
    assert_eq!(scene.value("a").await, None);
    let mut watch = scene.watch(revision + 1).await;
    assert_eq!(brief(&scene.prefix, &scene.events(&mut *watch, 1).await.0[0]), "a-");
    bounded(scene.store.revoke(lease)).await.unwrap();
}

pub(super) async fn a_key_written_without_its_lease_outlives_it(scene: Scene) {
    let lease = scene.store.grant(TTL * 30).await.unwrap();
    scene.commit(Txn::new().put_leased(scene.key("a"), "1", lease)).await;
    scene.put("a", "2").await;
    scene.store.revoke(lease).await.unwrap();
    assert_eq!(scene.value("a").await.unwrap(), b"2");
}

pub(super) async fn a_key_has_one_lease_of_its_own(scene: Scene) {
    let key = scene.key("a");
    let lease = scene.store.grant_for(&key, TTL).await.unwrap();
    assert_eq!(lease, LeaseId::of_key(&key));
    assert_ne!(lease, LeaseId::of_key(&scene.key("b")));
    // Asked for again and again, it is renewed. On a machine that is busy with more it may end in between, and is renewed once more.
    loop {
        assert_eq!(bounded(scene.store.grant_for(&key, TTL)).await.unwrap(), lease);
        scene.commit(Txn::new().put_leased(&key, "1", lease)).await;
        let (end, mut longest) = (Instant::now() + TTL * 3, Duration::ZERO);
        while Instant::now() < end {
            let asked = Instant::now();
            assert_eq!(bounded(scene.store.grant_for(&key, TTL)).await.unwrap(), lease);
            sleep(TTL / 4).await;
            longest = longest.max(asked.elapsed());
        }
        if longest < TTL / 2 {
            break;
        }
    }
    assert!(scene.value("a").await.is_some());
    scene.gone("a").await;
    // It comes back after its end, by itself or not.
    assert_eq!(scene.store.grant_for(&key, TTL * 30).await.unwrap(), lease);
    scene.commit(Txn::new().put_leased(&key, "2", lease)).await;
    scene.store.revoke(lease).await.unwrap();
    assert_eq!(scene.value("a").await, None);
    assert_eq!(scene.store.grant_for(&key, TTL).await.unwrap(), lease);
    scene.store.revoke(lease).await.unwrap();
}

pub(super) async fn a_lease_that_is_gone_is_reported_as_lost(scene: Scene) {
    let lease = scene.store.grant(TTL * 30).await.unwrap();
    scene.store.revoke(lease).await.unwrap();
    assert_lost(bounded(scene.store.keep_alive(lease)).await, lease);
    let write = Txn::new().put(scene.key("a"), "1").put_leased(scene.key("b"), "1", lease);
    assert_lost(scene.txn(write).await, lease);
    assert_eq!(scene.value("a").await, None, "the rest of the transaction must not have happened");
}

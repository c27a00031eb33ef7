//! Watches.

use std::time::Duration;

use tokio::time::timeout;

use super::{Scene, bounded, brief};
use crate::{StoreError, Txn};

/// etcd sends 1000 revisions at a time when a watch catches up.
const MANY: usize = 2_500;

pub(super) async fn events_of_a_transaction_come_in_one_batch(scene: Scene) {
    let before = scene.put("old", "0").await;
    let mut watch = scene.watch(before + 1).await;
    let revision = scene
        .commit(Txn::new().put(scene.key("b"), "1").delete(scene.key("old")).put(scene.key("a"), "2"))
        .await;
    let batch = loop {
        let batch = bounded(watch.next()).await.unwrap();
        if !batch.events.is_empty() {
            break batch;
        }
    };
    let events: Vec<_> = batch.events.iter().map(|event| brief(&scene.prefix, event)).collect();
    assert_eq!(events, ["b=1", "old-", "a=2"], "in the order of the transaction");
    assert!(batch.events.iter().all(|event| event.revision() == revision));
    assert_eq!(batch.resume_from, revision + 1);
}

pub(super) async fn a_watch_from_an_old_revision_sees_everything_once(scene: Scene) {
    let first = scene.put("a", "1").await;
    scene.put("a", "2").await;
    // Between ours, somebody else's: it is not ours to see, but it has a revision.
    scene.commit(Txn::new().put(format!("{}0", scene.prefix.trim_end_matches('/')), "")).await;
    scene.commit(Txn::new().delete(scene.key("a"))).await;
    let mut watch = scene.watch(first).await;
    let last = scene.put("a", "3").await;
    let (events, resume_from) = scene.events(&mut *watch, 4).await;
    let brief: Vec<_> = events.iter().map(|event| brief(&scene.prefix, event)).collect();
    assert_eq!(brief, ["a=1", "a=2", "a-", "a=3"]);
    assert_eq!(resume_from, last + 1);
}

pub(super) async fn a_long_catch_up_is_complete_and_can_be_resumed_anywhere(scene: Scene) {
    let first = scene.put("key", "0").await;
    for value in 1..MANY {
        scene.put("key", &value.to_string()).await;
    }
    let mut seen = Vec::new();
    let mut from = first;
    while seen.len() < MANY {
        // A new watch for every batch: what was told must not come again, what was not must come.
        let mut watch = scene.watch(from).await;
        let batch = bounded(watch.next()).await.unwrap();
        assert!(batch.resume_from >= from);
        from = batch.resume_from;
        seen.extend(batch.events.iter().map(|event| brief(&scene.prefix, event)));
    }
    let all: Vec<_> = (0..MANY).map(|value| format!("key={value}")).collect();
    assert!(seen == all, "of {MANY} events {} came, or in another order", seen.len());
}

pub(super) async fn deletions_are_events(scene: Scene) {
    let before = scene.commit(Txn::new().put(scene.key("a"), "1").put(scene.key("b"), "1")).await;
    let mut watch = scene.watch(before + 1).await;
    let revision = scene.commit(Txn::new().delete(scene.key("a"))).await;
    let (events, _) = scene.events(&mut *watch, 1).await;
    assert_eq!((brief(&scene.prefix, &events[0]).as_str(), events[0].revision()), ("a-", revision));
}

pub(super) async fn a_watch_from_the_future_waits_for_it(scene: Scene) {
    let now = scene.put("a", "1").await;
    let mut watch = scene.watch(now + 2).await;
    scene.put("a", "2").await;
    scene.put("a", "3").await;
    let (events, _) = scene.events(&mut *watch, 1).await;
    assert_eq!(brief(&scene.prefix, &events[0]), "a=3");
}

pub(super) async fn a_watch_from_compacted_history_says_so(scene: Scene) {
    let old = scene.put("a", "1").await;
    scene.put("a", "2").await;
    let now = scene.put("a", "3").await;
    scene.store.compact(now).await.unwrap();
    scene.store.compact(now).await.unwrap();
    scene.store.compact(old).await.unwrap();
    assert!(scene.store.compact(now + 1000).await.is_err(), "the future cannot be compacted");

    let mut watch = scene.watch(old).await;
    match bounded(watch.next()).await {
        Err(StoreError::Compacted { wanted, first }) => assert_eq!((wanted, first), (old, now)),
        other => panic!("wanted a compaction, got {other:?}"),
    }
    let listing = scene.store.list(&scene.prefix).await.unwrap();
    assert_eq!(listing.pairs[0].value, b"3");
    let mut watch = scene.watch(listing.revision + 1).await;
    scene.put("a", "4").await;
    assert_eq!(brief(&scene.prefix, &scene.events(&mut *watch, 1).await.0[0]), "a=4");
}

pub(super) async fn compaction_does_not_disturb_a_watch_that_runs(scene: Scene) {
    let first = scene.put("a", "1").await;
    let mut watch = scene.watch(first).await;
    assert_eq!(brief(&scene.prefix, &scene.events(&mut *watch, 1).await.0[0]), "a=1");
    let quiet = timeout(Duration::from_millis(200), watch.next()).await;
    assert!(quiet.is_err(), "nothing has happened, and the watch said {quiet:?}");
    scene.put("a", "2").await;
    let now = scene.put("a", "3").await;
    scene.store.compact(now).await.unwrap();
    scene.put("a", "4").await;
    let (events, _) = scene.events(&mut *watch, 3).await;
    let events: Vec<_> = events.iter().map(|event| brief(&scene.prefix, event)).collect();
    assert_eq!(events, ["a=2", "a=3", "a=4"]);
}

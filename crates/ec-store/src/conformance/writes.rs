//! Transactions.

use super::{Scene, assert_refused};
use crate::{Compare, Txn};

pub(super) async fn a_key_is_created_once(scene: Scene) {
    let create = |value: &str| Txn::new().when(Compare::Absent(scene.key("a"))).put(scene.key("a"), value);
    let first = scene.txn(create("1")).await.unwrap();
    let second = scene.txn(create("2")).await.unwrap();
    assert!(first.succeeded && !second.succeeded);
    assert_eq!(first.revision, second.revision, "a failed transaction has no revision of its own");

    let (pair, revision) = scene.store.get(&scene.key("a")).await.unwrap();
    let pair = pair.unwrap();
    assert_eq!((pair.value.as_slice(), pair.create_revision), (b"1".as_slice(), first.revision));
    assert_eq!((pair.mod_revision, pair.lease, revision), (first.revision, None, first.revision));
    assert_eq!(scene.value("b").await, None);
}

pub(super) async fn a_changed_key_is_not_overwritten(scene: Scene) {
    let seen = scene.put("a", "1").await;
    let swap =
        |value: &str| Txn::new().when(Compare::Unchanged(scene.key("a"), seen)).put(scene.key("a"), value);
    assert!(scene.txn(swap("2")).await.unwrap().succeeded);
    assert!(!scene.txn(swap("3")).await.unwrap().succeeded);
    assert_eq!(scene.value("a").await.unwrap(), b"2");

    let (pair, _) = scene.store.get(&scene.key("a")).await.unwrap();
    let pair = pair.unwrap();
    assert!(pair.create_revision == seen && pair.mod_revision > seen);
    // A key that is not there was last changed at revision 0.
    let absent = Txn::new().when(Compare::Unchanged(scene.key("b"), 0)).put(scene.key("b"), "");
    assert!(scene.txn(absent).await.unwrap().succeeded);
}

pub(super) async fn what_lies_under_a_key_is_compared_byte_by_byte(scene: Scene) {
    let value = [0, 255, b'a'];
    scene.commit(Txn::new().put(scene.key("a"), value)).await;
    let holds = |key: &str, value: &[u8]| {
        Txn::new().when(Compare::Holds(scene.key(key), value.to_vec())).put(scene.key("b"), "")
    };
    assert!(scene.txn(holds("a", &value)).await.unwrap().succeeded);
    // Written again, it is still that.
    scene.commit(Txn::new().put(scene.key("a"), value)).await;
    assert!(scene.txn(holds("a", &value)).await.unwrap().succeeded);
    for (key, other) in [("a", &value[..2]), ("a", b""), ("none", &value), ("none", b"")] {
        assert!(!scene.txn(holds(key, other)).await.unwrap().succeeded, "{key} {other:?}");
    }
}

pub(super) async fn a_prefix_is_taken_once(scene: Scene) {
    let take = |name: &str| {
        Txn::new().when(Compare::NoneUnder(scene.key("web/"))).put(scene.key(format!("web/{name}")), "")
    };
    // Neighbours in key order do not count: what ends before the prefix does, and what begins after it.
    scene.put("web", "").await;
    scene.put("web0", "").await;
    assert!(scene.txn(take("1")).await.unwrap().succeeded);
    assert!(!scene.txn(take("1")).await.unwrap().succeeded);
    assert!(!scene.txn(take("2")).await.unwrap().succeeded);
    scene.commit(Txn::new().delete(scene.key("web/1"))).await;
    assert!(scene.txn(take("2")).await.unwrap().succeeded);
}

pub(super) async fn a_transaction_happens_as_a_whole_or_not_at_all(scene: Scene) {
    scene.put("a", "1").await;
    let change = |present: &str| {
        Txn::new()
            .when(Compare::Present(scene.key("a")))
            .when(Compare::Present(scene.key(present)))
            .put(scene.key("b"), "2")
            .delete(scene.key("a"))
    };
    assert!(!scene.txn(change("missing")).await.unwrap().succeeded);
    assert_eq!((scene.value("a").await.is_some(), scene.value("b").await.is_some()), (true, false));
    assert!(scene.txn(change("a")).await.unwrap().succeeded);
    assert_eq!((scene.value("a").await.is_some(), scene.value("b").await.is_some()), (false, true));
}

pub(super) async fn a_transaction_that_changes_nothing_has_no_revision(scene: Scene) {
    let before = scene.put("a", "1").await;
    assert_eq!(scene.commit(Txn::new().delete(scene.key("missing"))).await, before);
    assert_eq!(scene.commit(Txn::new().when(Compare::Present(scene.key("a")))).await, before);
    assert_eq!(scene.put("a", "1").await, before + 1, "the same value again is a change");
}

pub(super) async fn what_etcd_refuses_is_refused(scene: Scene) {
    let twice = Txn::new().put(scene.key("a"), "1").put(scene.key("a"), "2");
    assert_refused(scene.txn(twice).await, "duplicate key");
    let both = Txn::new().put(scene.key("a"), "1").delete(scene.key("a"));
    assert_refused(scene.txn(both).await, "duplicate key");
    let many = (0..200).fold(Txn::new(), |txn, i| txn.put(scene.key(i), ""));
    assert_refused(scene.txn(many).await, "too many operations");
    let many = (0..129).fold(Txn::new(), |txn, i| txn.when(Compare::Absent(scene.key(i))));
    assert_refused(scene.txn(many.put(scene.key("a"), "")).await, "too many operations");
    // Exactly so many of both are let through.
    let (when, then) = (0..128, 0..128);
    let most = when.fold(Txn::new(), |txn, i| txn.when(Compare::Absent(scene.key(format!("most/{i}")))));
    let most = then.fold(most, |txn, i| txn.put(scene.key(format!("most/{i}")), ""));
    assert!(scene.txn(most).await.unwrap().succeeded);
    assert_refused(scene.txn(Txn::new().put(scene.key("a"), vec![0; 1800 * 1024])).await, "large");
    // The keys of conditions count, too.
    let long = "x".repeat(18 * 1024);
    let long = (0..100).fold(Txn::new(), |txn, i| txn.when(Compare::Absent(scene.key(format!("{i}{long}")))));
    assert_refused(scene.txn(long.put(scene.key("a"), "")).await, "large");
    assert_eq!(scene.value("a").await, None);
}

pub(super) async fn values_may_be_any_bytes(scene: Scene) {
    let value: Vec<u8> = (0..=255).cycle().take(64 * 1024 + 1).collect();
    scene.commit(Txn::new().put(scene.key("binary"), value.clone()).put(scene.key("empty"), "")).await;
    assert!(scene.value("binary").await.unwrap() == value, "64 KiB and a byte came back different");
    assert_eq!(scene.value("empty").await.unwrap(), b"");
}

pub(super) async fn what_was_written_under_a_prefix_since_is_seen(scene: Scene) {
    let under = scene.key("under/");
    let since =
        |revision| Txn::new().when(Compare::NoneSince(under.clone(), revision)).put(scene.key("b"), "");
    let begun = scene.put("beside", "1").await;
    assert!(scene.txn(since(begun)).await.unwrap().succeeded, "there is none");
    let first = scene.put("under/a", "1").await;
    assert!(!scene.txn(since(begun)).await.unwrap().succeeded);
    assert!(scene.txn(since(first)).await.unwrap().succeeded);
    scene.put("under/b", "1").await;
    assert!(!scene.txn(since(first)).await.unwrap().succeeded, "one of them is newer");
    scene.commit(Txn::new().delete(scene.key("under/b"))).await;
    assert!(scene.txn(since(first)).await.unwrap().succeeded);
}

pub(super) async fn a_store_that_went_back_is_not_written(scene: Scene) {
    let seen = scene.put("a", "1").await;
    let from = |revision| {
        Txn::new()
            .when(Compare::NotBefore(scene.key("a"), revision))
            .put(scene.key("b"), revision.to_string())
    };
    assert!(scene.txn(from(seen)).await.unwrap().succeeded);
    assert!(!scene.txn(from(seen + 1)).await.unwrap().succeeded);
    let later = scene.put("a", "2").await;
    assert!(scene.txn(from(seen + 1)).await.unwrap().succeeded);
    assert!(!scene.txn(from(later + 1)).await.unwrap().succeeded);
    let absent = Txn::new().when(Compare::NotBefore(scene.key("none"), 1)).put(scene.key("b"), "");
    assert!(!scene.txn(absent).await.unwrap().succeeded, "what is not there was never written");
}

//! Listings.

use super::{Scene, bounded};
use crate::{StoreError, Txn};

/// More than a page of any implementation, and not a multiple of one.
const MANY: usize = 1_337;

pub(super) async fn a_listing_holds_its_prefix_and_nothing_else(scene: Scene) {
    let outside = format!("{}0", scene.prefix.trim_end_matches('/'));
    scene.commit(Txn::new().put(outside, "beside it")).await;
    let empty = bounded(scene.store.list(&scene.prefix)).await.unwrap();
    assert!(empty.pairs.is_empty() && empty.revision > 0);

    for name in ["b", "a", "a/x", "ä", "~"] {
        scene.put(name, name).await;
    }
    let last = scene.put("b", "again").await;
    let listing = bounded(scene.store.list(&scene.prefix)).await.unwrap();
    let names: Vec<_> =
        listing.pairs.iter().map(|pair| pair.key.strip_prefix(&scene.prefix).unwrap()).collect();
    assert_eq!(names, ["a", "a/x", "b", "~", "ä"], "in order of bytes");
    assert_eq!(listing.revision, last);
    assert_eq!(listing.pairs[2].mod_revision, last);
}

pub(super) async fn keys_are_those_of_the_listing(scene: Scene) {
    let names: Vec<_> = (0..MANY).map(|i| format!("{i:05}")).collect();
    for chunk in names.chunks(100) {
        scene.commit(chunk.iter().fold(Txn::new(), |txn, name| txn.put(scene.key(name), "x"))).await;
    }
    let listing = bounded(scene.store.list(&scene.prefix)).await.unwrap();
    let keys = bounded(scene.store.keys(&scene.prefix)).await.unwrap();
    assert!(keys.len() == MANY && keys.iter().eq(listing.pairs.iter().map(|pair| &pair.key)));
}

pub(super) async fn a_listing_is_of_one_revision_however_long(scene: Scene) {
    let names: Vec<_> = (0..MANY).map(|i| format!("{i:05}")).collect();
    // Every transaction rewrites the first and the last key alike; were the pages of a listing of
    // different revisions, the two would differ sooner or later.
    let mark =
        |value: &str| Txn::new().put(scene.key(&names[0]), value).put(scene.key(&names[MANY - 1]), value);
    for chunk in names[1..MANY - 1].chunks(100) {
        scene.commit(chunk.iter().fold(Txn::new(), |txn, name| txn.put(scene.key(name), "x"))).await;
    }
    scene.commit(mark("start")).await;
    let writes = async {
        for round in 0..100 {
            scene.commit(mark(&round.to_string())).await;
        }
    };
    let lists = async {
        for _ in 0..20 {
            let listing = bounded(scene.store.list(&scene.prefix)).await.unwrap();
            assert_eq!(listing.pairs.len(), MANY);
            let (first, last) = (&listing.pairs[0], &listing.pairs[MANY - 1]);
            assert_eq!(first.value, last.value);
            assert!(first.mod_revision == last.mod_revision && last.mod_revision <= listing.revision);
            assert!(listing.pairs.is_sorted_by(|a, b| a.key < b.key), "a key came twice or out of order");
        }
    };
    tokio::join!(writes, lists);
}

pub(super) async fn a_key_is_told_as_it_was(scene: Scene) {
    let key = scene.key("a");
    let first = scene.put("a", "1").await;
    scene.put("other", "").await;
    let second = scene.put("a", "2").await;
    let gone = scene.commit(Txn::new().delete(key.clone())).await;
    let again = scene.put("a", "3").await;
    let at = async |revision| {
        let pair = bounded(scene.store.get_at(&key, revision)).await.unwrap();
        pair.map(|pair| (pair.value, pair.mod_revision, pair.version))
    };
    assert_eq!(at(first - 1).await, None);
    assert_eq!(at(first).await, Some((b"1".to_vec(), first, 1)));
    assert_eq!(at(second - 1).await, Some((b"1".to_vec(), first, 1)));
    assert_eq!(at(second).await, Some((b"2".to_vec(), second, 2)));
    assert_eq!(at(gone).await, None);
    assert_eq!(at(again).await, Some((b"3".to_vec(), again, 1)), "its versions begin anew");
    let (_, now) = bounded(scene.store.get(&key)).await.unwrap();
    let future = bounded(scene.store.get_at(&key, now + 100)).await;
    assert!(matches!(future, Err(StoreError::Compacted { .. })), "{future:?}");
    bounded(scene.store.compact(second)).await.unwrap();
    let past = bounded(scene.store.get_at(&key, first)).await;
    assert!(matches!(past, Err(StoreError::Compacted { .. })), "{past:?}");
    assert_eq!(at(second).await, Some((b"2".to_vec(), second, 2)));
}

pub(super) async fn the_server_tells_of_itself(scene: Scene) {
    let revision = scene.put("a", "1").await;
    let server = bounded(scene.store.server()).await.unwrap();
    assert!(server.revision >= revision && server.version.starts_with("3."), "{server:?}");
    assert!(server.cluster != 0 && server.member != 0 && server.term != 0, "{server:?}");
}

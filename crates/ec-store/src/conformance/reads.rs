//! Listings.

use super::{Scene, bounded};
use crate::Txn;

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

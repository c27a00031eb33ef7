//! The follower against a real etcd that is killed, restarted, compacted and wiped under it.

mod support;

use std::time::Duration;

use ec_store::{FollowOptions, Store, Txn, follow, testing::EtcdServer};
use support::{OPTIONS, View, binaries, connect, pairs, put};

#[tokio::test]
async fn a_follower_misses_nothing_while_etcd_is_killed_and_restarted() {
    for binary in binaries() {
        let mut server = EtcdServer::start(Some(&binary)).await.unwrap();
        let store = connect(&[server.endpoint()]).await;
        put(&*store, "/f/before", "0").await;
        let mut changes = follow(store.clone(), "/f/".into(), OPTIONS);
        let mut view = View::default();
        view.until_key(&mut changes, "/f/before", "0").await;

        for round in 0..3 {
            let first = format!("/f/{round}/a");
            put(&*store, &first, "1").await;
            view.until_key(&mut changes, &first, "1").await;
            // Written after the last look of the follower, and before the server dies.
            put(&*store, &format!("/f/{round}/b"), "2").await;
            server.kill();
            server.restart().await.unwrap();
            // Probably before the follower has come back.
            store.txn(Txn::new().delete(first)).await.unwrap();
            put(&*store, &format!("/f/{round}/c"), "3").await;
            view.until_key(&mut changes, &format!("/f/{round}/c"), "3").await;
        }

        let wanted: Vec<_> = (0..3)
            .flat_map(|n| {
                [format!("/f/{n}/a=1"), format!("/f/{n}/b=2"), format!("/f/{n}/a-"), format!("/f/{n}/c=3")]
            })
            .collect();
        assert_eq!(view.events, wanted, "every event once and in order");
        assert_eq!(view.resets, 1, "resumed, not listed again");
        assert_eq!(view.outages, 3, "one word per outage");
    }
}

#[tokio::test]
async fn a_follower_lists_again_when_history_was_compacted_during_an_outage() {
    for binary in binaries() {
        let mut server = EtcdServer::start(Some(&binary)).await.unwrap();
        let store = connect(&[server.endpoint()]).await;
        for key in ["/f/stays", "/f/goes"] {
            put(&*store, key, "1").await;
        }
        let mut changes = follow(store.clone(), "/f/".into(), OPTIONS);
        let mut view = View::default();
        view.until_key(&mut changes, "/f/goes", "1").await;

        // A second connection does the damage while the follower's is cut.
        server.stop().await.unwrap();
        view.until(&mut changes, |view| view.outages == 1).await;
        server.restart().await.unwrap();
        let other = connect(&[server.endpoint()]).await;
        other.txn(Txn::new().delete("/f/goes")).await.unwrap();
        let now = put(&*other, "/f/new", "1").await;
        other.compact(now).await.unwrap();

        view.until_key(&mut changes, "/f/new", "1").await;
        assert_eq!(view.pairs, pairs(&store.list("/f/").await.unwrap()));
        put(&*store, "/f/new", "2").await;
        view.until_key(&mut changes, "/f/new", "2").await;
    }
}

#[tokio::test]
async fn a_follower_notices_that_etcd_lost_its_data() {
    for binary in binaries() {
        let mut server = EtcdServer::start(Some(&binary)).await.unwrap();
        let store = connect(&[server.endpoint()]).await;
        for n in 0..50 {
            put(&*store, "/f/old", &n.to_string()).await;
        }
        let mut changes = follow(store.clone(), "/f/".into(), OPTIONS);
        let mut view = View::default();
        view.until_key(&mut changes, "/f/old", "49").await;
        server.wipe().unwrap();
        server.restart().await.unwrap();
        view.until(&mut changes, |view| view.pairs.is_empty()).await;
        put(&*store, "/f/new", "1").await;
        view.until_key(&mut changes, "/f/new", "1").await;
        assert_eq!(view.resets, 2);
    }
}

#[tokio::test]
async fn changes_too_many_for_one_message_come_as_a_listing() {
    let mut server = EtcdServer::start(None).await.unwrap();
    let store = connect(&[server.endpoint()]).await;
    put(&*store, "/f/a", "1").await;
    let mut changes = follow(store.clone(), "/f/".into(), OPTIONS);
    let mut view = View::default();
    view.until_key(&mut changes, "/f/a", "1").await;
    // 75 MiB in keys that are then too large both for one page and for one batch of a catch-up; they
    // are written while the follower waits, because nobody takes its changes.
    server.stop().await.unwrap();
    view.until(&mut changes, |view| view.outages == 1).await;
    server.restart().await.unwrap();
    let big = "x".repeat(1 << 20);
    for n in 0..75 {
        put(&*store, &format!("/f/big/{n}"), &big).await;
    }
    put(&*store, "/f/last", "1").await;
    view.until_key(&mut changes, "/f/last", "1").await;
    assert_eq!(view.pairs.len(), 77);
    assert_eq!(view.pairs, pairs(&store.list("/f/").await.unwrap()));
    let from = 2;
    let mut watch = store.watch("/f/", from).await.unwrap();
    let error = watch.next().await.unwrap_err();
    assert!(matches!(error, ec_store::StoreError::Compacted { .. }), "{error}");
}

#[tokio::test]
async fn a_follower_notices_a_restored_etcd_whose_revision_overtook_it() {
    for binary in binaries() {
        for overtake in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let backup = directory.path().join("backup");
            let mut server = EtcdServer::start(Some(&binary)).await.unwrap();
            let store = connect(&[server.endpoint()]).await;
            put(&*store, "/f/kept", "1").await;
            put(&*store, "/f/goes", "1").await;
            server.snapshot(&backup).unwrap();
            // The resync is far away, and the wait after a failure long: as an agent's may be.
            let options = FollowOptions { backoff_min: Duration::from_secs(2), ..OPTIONS };
            let mut changes = follow(store.clone(), "/f/".into(), options);
            let mut view = View::default();
            view.until_key(&mut changes, "/f/goes", "1").await;
            store.txn(Txn::new().delete("/f/goes")).await.unwrap();
            let last = put(&*store, "/f/lost", "1").await;
            view.until_key(&mut changes, "/f/lost", "1").await;

            server.restore(&backup).unwrap();
            server.restart().await.unwrap();
            let other = connect(&[server.endpoint()]).await;
            put(&*other, "/f/new", "1").await;
            while overtake && put(&*other, "/others", "1").await <= last + 5 {}

            let wanted = pairs(&other.list("/f/").await.unwrap());
            assert!(wanted.contains_key("/f/goes") && !wanted.contains_key("/f/lost"));
            view.until(&mut changes, |view| view.pairs == wanted).await;
            put(&*other, "/f/new", "2").await;
            view.until_key(&mut changes, "/f/new", "2").await;
        }
    }
}

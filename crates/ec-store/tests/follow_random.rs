//! Whatever goes wrong, a follower's view becomes the store's content. Seeded, under paused time.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests are no tests to clippy")]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use ec_store::{
    Change, FollowOptions, Layer, Listing, MemoryStore, Revision, Store, StoreError, StoreResult, Txn, Watch,
    follow, follow_on_demand,
};
use proptest::prelude::*;
use support::{OPTIONS, PATIENCE, View, pairs, put};
use tokio::{
    runtime::Builder,
    time::{Instant, sleep, timeout, timeout_at},
};

#[derive(Debug, Clone)]
enum Step {
    Put(u8, u8),
    Elsewhere,
    Delete(u8),
    PutLeased(u8),
    Fail(usize),
    LoseAnswers(usize),
    BreakWatches,
    Unreachable(u64),
    Restart,
    Compact,
    Backup,
    Restore,
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u8..6, any::<u8>()).prop_map(|(key, value)| Step::Put(key, value)),
        4 => (0u8..6).prop_map(Step::Delete),
        4 => Just(Step::Elsewhere),
        1 => (0u8..6).prop_map(Step::PutLeased),
        1 => (1usize..4).prop_map(Step::Fail),
        1 => (1usize..3).prop_map(Step::LoseAnswers),
        2 => Just(Step::BreakWatches),
        1 => (0u64..3000).prop_map(Step::Unreachable),
        1 => Just(Step::Restart),
        2 => Just(Step::Compact),
        1 => Just(Step::Backup),
        2 => Just(Step::Restore),
        6 => (0u64..400).prop_map(Step::Wait),
    ]
}

async fn perform(store: &MemoryStore, steps: &[Step]) {
    let faults = store.faults();
    let mut backup = faults.backup();
    for (number, step) in steps.iter().enumerate() {
        match step {
            // No value is written twice, as no record is: two histories are not told apart by one that is.
            Step::Put(key, value) => {
                let value = format!("{value} {number}");
                _ = store.txn(Txn::new().put(format!("/f/{key}"), value)).await;
            }
            // Others write beside the prefix.
            Step::Elsewhere => _ = store.txn(Txn::new().put("/other", "")).await,
            Step::Delete(key) => _ = store.txn(Txn::new().delete(format!("/f/{key}"))).await,
            Step::PutLeased(key) => {
                if let Ok(lease) = store.grant(Duration::from_secs(1)).await {
                    let value = format!("leased {number}");
                    _ = store.txn(Txn::new().put_leased(format!("/f/{key}"), value, lease)).await;
                }
            }
            Step::Fail(count) => faults.fail_next(*count, StoreError::Unknown("on request".into())),
            Step::LoseAnswers(count) => faults.lose_answers(*count),
            Step::BreakWatches => faults.break_watches(),
            Step::Unreachable(ms) => {
                faults.set_reachable(false);
                sleep(Duration::from_millis(*ms)).await;
                faults.set_reachable(true);
            }
            Step::Restart => faults.restart(),
            Step::Compact => _ = store.compact(store.revision()).await,
            Step::Backup => backup = faults.backup(),
            // The follower need not have the time to look: what follows may overtake its revision.
            Step::Restore => faults.restore(&backup),
            Step::Wait(ms) => sleep(Duration::from_millis(*ms)).await,
        }
    }
}

/// Lets `steps` happen to a store while it is followed, and then a quiet time; answers the view and
/// the store.
fn run(steps: &[Step], options: FollowOptions) -> (View, MemoryStore) {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let store = MemoryStore::new();
        let troubled = store.clone();
        let mut changes = follow(Arc::new(store.clone()), "/f/".into(), options);
        let mut view = View::default();
        let mut trouble = std::pin::pin!(perform(&troubled, steps));
        loop {
            tokio::select! {
                change = changes.recv() => view.apply(change.expect("the follower ended")),
                () = &mut trouble => break,
            }
        }
        // Longer than any lease, backoff or outage above; the time is virtual.
        let quiet = Instant::now() + Duration::from_secs(30);
        while let Ok(change) = timeout_at(quiet, changes.recv()).await {
            view.apply(change.expect("the follower ended"));
        }
        (view, store)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        // Prints the steps that failed; a case worth keeping becomes a test of its own.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_view_becomes_the_content_whatever_happens(steps in prop::collection::vec(step(), 0..60)) {
        let (view, store) = run(&steps, OPTIONS);
        prop_assert_eq!(&view.pairs, &pairs(&store.content("/f/")));
        prop_assert!(view.outages <= steps.len() && view.resets >= 1);
    }
}

#[tokio::test(start_paused = true)]
async fn lost_events_are_made_good_by_the_next_resync_however_often_watches_break() {
    let options = FollowOptions { resync: Duration::from_secs(30), ..OPTIONS };
    for breaks_every in [options.resync * 10, options.resync / 3] {
        let store = MemoryStore::new();
        put(&store, "/f/first", "1").await;
        let mut changes = follow(Arc::new(store.clone()), "/f/".into(), options);
        let mut view = View::default();
        view.until(&mut changes, |view| view.resets == 1).await;
        store.faults().lose_events(1);
        let begin = Instant::now();
        store.txn(Txn::new().put("/f/a", "1")).await.unwrap();
        let faults = store.faults();
        let breaking = tokio::spawn(async move {
            loop {
                sleep(breaks_every).await;
                faults.break_watches();
            }
        });
        view.until_key(&mut changes, "/f/a", "1").await;
        breaking.abort();
        assert!(view.events.is_empty() && view.resets == 2);
        assert!(begin.elapsed() <= options.resync + Duration::from_secs(1), "{:?}", begin.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn one_outage_is_told_once_however_long_it_lasts() {
    let store = MemoryStore::new();
    store.faults().set_reachable(false);
    let mut changes = follow(Arc::new(store.clone()), "/f/".into(), FollowOptions::default());
    let mut view = View::default();
    view.until(&mut changes, |view| view.outages == 1).await;
    sleep(Duration::from_secs(600)).await;
    assert!(changes.try_recv().is_err(), "nothing more to say");
    store.faults().set_reachable(true);
    let begin = Instant::now();
    view.until(&mut changes, |view| view.resets == 1).await;
    assert!(begin.elapsed() <= FollowOptions::default().backoff_max);
    // Each is told to be over, also where the watch goes on with nothing to tell.
    put(&store, "/f/a", "1").await;
    view.until_key(&mut changes, "/f/a", "1").await;
    for outages in 2..=3 {
        store.faults().set_reachable(false);
        view.until(&mut changes, |view| view.outages == outages).await;
        store.faults().set_reachable(true);
        let over = timeout(PATIENCE, changes.recv()).await.unwrap();
        assert!(matches!(&over, Some(Change::Events(batch)) if batch.events.is_empty()), "{over:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_away_and_refuses_is_told_once_more() {
    let store = MemoryStore::new();
    store.faults().set_reachable(false);
    let mut changes = follow(Arc::new(store.clone()), "/f/".into(), FollowOptions::default());
    let mut told = async || timeout(PATIENCE, changes.recv()).await.unwrap().unwrap();
    assert!(matches!(told().await, Change::Lost(error) if error.is_transient()));
    store.faults().fail_next(usize::MAX, StoreError::Refused("permission denied".into()));
    store.faults().set_reachable(true);
    assert!(matches!(told().await, Change::Lost(StoreError::Refused(_))));
    // Not again, whatever it says in the end.
    store.faults().set_reachable(false);
    sleep(Duration::from_secs(60)).await;
    store.faults().fail_next(0, StoreError::Refused(String::new()));
    store.faults().set_reachable(true);
    assert!(matches!(told().await, Change::Reset(_)));
}

/// A store that is listed, and of which each watch is refused, as of a history that is gone.
struct Unwatched(MemoryStore, AtomicUsize);

#[async_trait::async_trait]
impl Layer for Unwatched {
    fn inner(&self) -> &dyn Store {
        &self.0
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.list(prefix).await
    }

    async fn watch(&self, _: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        Err(StoreError::Compacted { wanted: from, first: from + 1 })
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_lets_nobody_watch_is_listed_more_and_more_seldom() {
    let store = Arc::new(Unwatched(MemoryStore::new(), AtomicUsize::new(0)));
    let options = FollowOptions::default();
    let mut changes = follow(Arc::clone(&store) as Arc<dyn Store>, "/f/".into(), options);
    let reader = tokio::spawn(async move { while changes.recv().await.is_some() {} });
    sleep(Duration::from_secs(100)).await;
    let listed = store.1.load(Ordering::Relaxed);
    assert!((10..100).contains(&listed), "{listed}");
    reader.abort();
}

/// A store was put back and has come as far as it was, by transactions that wrote the same to the same keys, and to others something
/// else: all that tells one history from the other is the clock.
#[tokio::test(start_paused = true)]
async fn another_history_is_known_by_the_clock() {
    let write =
        |clock: &str, other: &str| Txn::new().put(other, "1").put("/f/clock", clock).put("/f/same", "1");
    let store = MemoryStore::new();
    put(&store, "/f/first", "1").await;
    let backup = store.faults().backup();
    let clock = Some("/f/clock".to_owned());
    let (mut changes, _relist) =
        follow_on_demand(Arc::new(store.clone()), "/f/".into(), clock, FollowOptions::default());
    let mut view = View::default();
    let listed = store.txn(write("a", "/f/one")).await.unwrap();
    view.until_key(&mut changes, "/f/one", "1").await;
    store.faults().restore(&backup);
    assert_eq!(store.txn(write("b", "/f/two")).await.unwrap(), listed, "at the same revision");
    put(&store, "/f/last", "1").await;
    view.until_key(&mut changes, "/f/last", "1").await;
    assert_eq!(view.pairs, pairs(&store.list("/f/").await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn a_follower_ends_with_its_receiver() {
    let store = Arc::new(MemoryStore::new());
    let changes = follow(store.clone(), "/f/".into(), OPTIONS);
    drop(changes);
    let wait = async {
        while Arc::strong_count(&store) > 1 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, wait).await.expect("the follower still holds the store");
}

#[tokio::test(start_paused = true)]
async fn a_receiver_that_takes_nothing_holds_the_follower_up_and_loses_nothing() {
    let store = MemoryStore::new();
    let mut changes = follow(Arc::new(store.clone()), "/f/".into(), OPTIONS);
    let mut view = View::default();
    view.until(&mut changes, |view| view.resets == 1).await;
    for n in 0..2_000 {
        store.txn(Txn::new().put("/f/a", n.to_string())).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert!(changes.len() < 2_000, "the queue is bounded");
    view.until_key(&mut changes, "/f/a", "1999").await;
    assert_eq!(view.events.len(), 2_000);
}

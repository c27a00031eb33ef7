//! What the tests share: a view built from a follower's changes, and waiting with a bound.
#![allow(dead_code, reason = "every test program uses its part of this")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests are no tests to clippy"
)]
#![allow(clippy::print_stdout, reason = "what a test ran against is worth saying")]

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use ec_store::{
    Change, EtcdConfig, EtcdStore, Event, FollowOptions, Listing, Store, Txn, testing::EtcdServer,
};
use tokio::{sync::mpsc, time::timeout};

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Short waits, and no resync that could hide a lost event.
pub(crate) const OPTIONS: FollowOptions = FollowOptions {
    resync: Duration::from_secs(100_000),
    backoff_min: Duration::from_millis(20),
    backoff_max: Duration::from_millis(200),
};

pub(crate) async fn connect(endpoints: &[String]) -> Arc<EtcdStore> {
    connect_within(endpoints, Duration::from_secs(2)).await
}

pub(crate) async fn connect_within(endpoints: &[String], timeout: Duration) -> Arc<EtcdStore> {
    let config = EtcdConfig { endpoints: endpoints.to_vec(), timeout, ..EtcdConfig::default() };
    Arc::new(EtcdStore::connect(config).await.unwrap())
}

/// The etcds to test with, said aloud.
pub(crate) fn binaries() -> Vec<PathBuf> {
    let binaries = EtcdServer::binaries();
    println!("etcd binaries: {binaries:?}");
    binaries
}

/// Writes a key, again and again until the store answers; a put may be done twice without harm.
pub(crate) async fn put(store: &dyn Store, key: &str, value: &str) -> i64 {
    let write = async {
        loop {
            match store.txn(Txn::new().put(key, value)).await {
                Ok(outcome) => return outcome.revision,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, write).await.expect("the store did not come back")
}

/// What a receiver believes lies under the prefix.
#[derive(Default)]
pub(crate) struct View {
    pub(crate) pairs: BTreeMap<String, (Vec<u8>, i64)>,
    pub(crate) revision: i64,
    pub(crate) resets: usize,
    pub(crate) outages: usize,
    /// Every event, as `KEY=VALUE` or `KEY-`.
    pub(crate) events: Vec<String>,
}

impl View {
    pub(crate) fn apply(&mut self, change: Change) {
        match change {
            Change::Reset(listing) => {
                self.resets += 1;
                self.revision = listing.revision;
                self.pairs = pairs(&listing);
            }
            Change::Events(batch) => {
                for event in batch.events {
                    self.event(event);
                }
            }
            Change::Lost(error) => {
                assert!(error.is_transient(), "{error}");
                self.outages += 1;
            }
        }
    }

    fn event(&mut self, event: Event) {
        assert!(event.revision() >= self.revision, "{event:?} came after revision {}", self.revision);
        self.revision = event.revision();
        match event {
            Event::Put(pair) => {
                self.events.push(format!("{}={}", pair.key, String::from_utf8_lossy(&pair.value)));
                self.pairs.insert(pair.key, (pair.value, pair.mod_revision));
            }
            Event::Delete { key, .. } => {
                self.events.push(format!("{key}-"));
                self.pairs.remove(&key);
            }
        }
    }

    /// Applies changes until the view is as wanted.
    pub(crate) async fn until(
        &mut self,
        changes: &mut mpsc::Receiver<Change>,
        wanted: impl Fn(&Self) -> bool,
    ) {
        let wait = async {
            while !wanted(self) {
                let change = changes.recv().await.expect("the follower ended");
                self.apply(change);
            }
        };
        if timeout(PATIENCE, wait).await.is_err() {
            panic!("not as wanted: {:?}, {} resets", self.pairs.keys(), self.resets);
        }
    }

    pub(crate) async fn until_key(&mut self, changes: &mut mpsc::Receiver<Change>, key: &str, value: &str) {
        self.until(changes, |view| view.pairs.get(key).is_some_and(|pair| pair.0 == value.as_bytes())).await;
    }
}

pub(crate) fn pairs(listing: &Listing) -> BTreeMap<String, (Vec<u8>, i64)> {
    listing.pairs.iter().map(|pair| (pair.key.clone(), (pair.value.clone(), pair.mod_revision))).collect()
}

//! What every [`Store`] must do, as one suite that runs against any of them.
//!
//! [`suite`] panics at the first promise broken. It compacts and fills the store it is given, so give it
//! one of its own. All waiting is for something to happen, within [`PATIENCE`].
#![expect(clippy::panic, clippy::unwrap_used, reason = "this is a test")]

mod leases;
mod reads;
mod watches;
mod writes;

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{Event, Revision, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch};

/// How long one thing may take to happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// One case's part of the store.
struct Scene {
    store: Arc<dyn Store>,
    prefix: String,
}

/// Runs every case against `store`, each under its own prefix below `root`.
///
/// # Panics
/// When the store breaks a promise; the message says which.
pub async fn suite(store: Arc<dyn Store>, root: &str) {
    macro_rules! cases {
        ($($module:ident :: $case:ident),* $(,)?) => {$(
            println!("  {}", stringify!($case));
            let prefix = format!("{root}/{}/", stringify!($case));
            Box::pin($module::$case(Scene { store: Arc::clone(&store), prefix })).await;
        )*};
    }
    cases! {
        writes::a_key_is_created_once,
        writes::a_changed_key_is_not_overwritten,
        writes::what_lies_under_a_key_is_compared_byte_by_byte,
        writes::a_prefix_is_taken_once,
        writes::a_transaction_happens_as_a_whole_or_not_at_all,
        writes::a_transaction_that_changes_nothing_has_no_revision,
        writes::what_etcd_refuses_is_refused,
        writes::values_may_be_any_bytes,
        writes::what_was_written_under_a_prefix_since_is_seen,
        writes::a_store_that_went_back_is_not_written,
        reads::a_listing_holds_its_prefix_and_nothing_else,
        reads::a_listing_is_of_one_revision_however_long,
        reads::keys_are_those_of_the_listing,
        reads::a_key_is_told_as_it_was,
        reads::the_server_tells_of_itself,
        watches::events_of_a_transaction_come_in_one_batch,
        watches::a_watch_from_an_old_revision_sees_everything_once,
        watches::a_long_catch_up_is_complete_and_can_be_resumed_anywhere,
        watches::deletions_are_events,
        watches::a_watch_from_the_future_waits_for_it,
        watches::a_watch_from_compacted_history_says_so,
        watches::compaction_does_not_disturb_a_watch_that_runs,
        leases::an_expired_lease_takes_its_keys_along,
        leases::a_lease_kept_alive_stays,
        leases::a_revoked_lease_takes_its_keys_along,
        leases::a_key_written_without_its_lease_outlives_it,
        leases::a_key_has_one_lease_of_its_own,
        leases::a_lease_that_is_gone_is_reported_as_lost,
    }
}

impl Scene {
    fn key(&self, name: impl std::fmt::Display) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A transaction that must go through; answers its revision.
    async fn commit(&self, txn: Txn) -> Revision {
        let outcome = self.txn(txn).await.unwrap();
        assert!(outcome.succeeded, "a condition did not hold");
        outcome.revision
    }

    async fn put(&self, name: impl std::fmt::Display, value: &str) -> Revision {
        self.commit(Txn::new().put(self.key(name), value)).await
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        bounded(self.store.txn(txn)).await
    }

    async fn value(&self, name: impl std::fmt::Display) -> Option<Vec<u8>> {
        let (pair, _) = bounded(self.store.get(&self.key(name))).await.unwrap();
        pair.map(|pair| pair.value)
    }

    async fn watch(&self, from: Revision) -> Box<dyn Watch> {
        bounded(self.store.watch(&self.prefix, from)).await.unwrap()
    }

    /// Events until there are `count`, in as many batches as it takes, and where to resume.
    async fn events(&self, watch: &mut dyn Watch, count: usize) -> (Vec<Event>, Revision) {
        let mut events = Vec::new();
        let mut resume_from = 0;
        while events.len() < count {
            let batch = bounded(watch.next()).await.unwrap();
            events.extend(batch.events);
            resume_from = batch.resume_from;
        }
        (events, resume_from)
    }

    /// Waits until a key is gone from the store.
    async fn gone(&self, name: &str) {
        let (_, revision) = bounded(self.store.get(&self.key(name))).await.unwrap();
        let mut watch = self.watch(revision + 1).await;
        while self.value(name).await.is_some() {
            bounded(watch.next()).await.unwrap();
        }
    }
}

/// `KEY=VALUE` for a write, `KEY-` for a deletion.
fn brief(prefix: &str, event: &Event) -> String {
    let name =
        event.key().strip_prefix(prefix).unwrap_or_else(|| panic!("{} is not under {prefix}", event.key()));
    match event {
        Event::Put(pair) => format!("{name}={}", String::from_utf8_lossy(&pair.value)),
        Event::Delete { .. } => format!("{name}-"),
    }
}

fn assert_refused<T: std::fmt::Debug>(result: StoreResult<T>, word: &str) {
    match result {
        Err(StoreError::Refused(text)) if text.contains(word) => {}
        other => panic!("wanted a refusal that says `{word}`, got {other:?}"),
    }
}

async fn bounded<F: Future>(future: F) -> F::Output {
    timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("nothing happened within {PATIENCE:?}"))
}

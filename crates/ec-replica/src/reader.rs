//! A state that is read here, whoever writes it.

use std::{sync::Arc, time::Duration};

use ec_runtime::Tasks;
use ec_store::{FollowOptions, Revision, Store};
use tokio_util::sync::CancellationToken;

use crate::{
    Metrics, Model,
    barrier::Barrier,
    history::History,
    view::{self, View},
};

/// So long a request waits for etcd before it is told to come again.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Everything is read anew so often, in case an event was lost, for those who can afford it.
const RESYNC: Duration = Duration::from_secs(24 * 3600);

/// The state cannot be read or written now; nothing was done, or it is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

pub(crate) fn ended() -> Unavailable {
    Unavailable("the server is ending".into())
}

/// The state in memory, as of a revision of etcd. Clones are the same one.
#[derive(Clone)]
pub struct Reader<M: Model> {
    view: Arc<View<M>>,
    barrier: Barrier,
    metrics: Arc<Metrics>,
    tasks: Tasks,
}

impl<M: Model> Reader<M> {
    /// Begins to follow what lies under the model's prefix, until `stop`.
    pub fn start(store: Arc<dyn Store>, model: M, stop: CancellationToken) -> Self {
        let options = FollowOptions { resync: RESYNC, ..FollowOptions::default() };
        let (prefix, clock) = (model.prefix().as_str().to_owned(), model.prefix().clock());
        let (changes, relist) =
            ec_store::follow_on_demand(Arc::clone(&store), prefix, Some(clock.clone()), options);
        let (tasks, metrics) = (Tasks::new(stop.clone()), Arc::<Metrics>::default());
        let history = Arc::new(History::new(relist, M::IMPORTING, Arc::clone(&metrics)));
        let view = Arc::new(View::new(model, Arc::clone(&history), Arc::clone(&metrics)));
        let (barrier, asking) = Barrier::new(Arc::clone(&store), clock, history, stop.clone());
        tasks.spawn("reading how far etcd is", asking);
        tasks.spawn("following etcd", view::follow(Arc::clone(&view), store, changes, stop));
        Self { view, barrier, metrics, tasks }
    }

    /// Waits until one of its tasks has ended though nobody asked for that; answers which, and how. It tells nothing
    /// new any more then.
    pub async fn failed(&self) -> String {
        self.tasks.failed().await
    }

    /// Reads the state as it is at some moment after this call, or later.
    ///
    /// # Errors
    /// Where etcd does not say how far the state is, or the view does not get there in time.
    pub async fn fresh(&self) -> Result<(), Unavailable> {
        self.barrier.pass(PATIENCE).await
    }

    /// Reads the state as far as it is known here, which may be behind. Briefly: what comes by the watch waits
    /// meanwhile, and then everybody.
    pub fn peek<T>(&self, look: impl FnOnce(&M::State) -> T) -> T {
        self.view.look(look)
    }

    /// The state as far as it is known here, to look at for long. Who asks while it is the same shares one.
    pub fn copy(&self) -> Arc<M::State> {
        self.view.copy()
    }

    /// How far the state is.
    pub fn revision(&self) -> Revision {
        self.view.history().revision()
    }

    /// How many revisions of the state are known of and not in memory.
    pub fn lag(&self) -> i64 {
        self.barrier.lag()
    }

    /// What was counted so far.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(crate) fn view(&self) -> &Arc<View<M>> {
        &self.view
    }

    pub(crate) fn barrier(&self) -> &Barrier {
        &self.barrier
    }

    /// Its tasks, for those beside them that must not end either.
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }
}

#[cfg(test)]
mod tests {
    use ec_store::Txn;

    use super::*;
    use crate::{history::tests::SlowToList, quota::Quota};

    #[tokio::test(start_paused = true)]
    async fn a_listing_that_takes_long_is_not_doubted_while_it_is_read() {
        let store = SlowToList::new(PATIENCE + Duration::from_secs(5));
        let model = Quota::new();
        let clock = model.prefix().clock();
        let reader = Reader::start(store.clone(), model, CancellationToken::new());
        // At the first start, and where what was missed meanwhile cannot be told any more.
        for listings in 1..=2 {
            let newest = store.0.txn(Txn::new().put(&clock, format!("t{listings}"))).await.unwrap().revision;
            if listings == 2 {
                store.0.txn(Txn::new().put("/other", "")).await.unwrap();
                store.0.compact(newest + 1).await.unwrap();
                store.0.faults().break_watches();
            }
            reader.fresh().await.unwrap_err();
            tokio::time::sleep(PATIENCE).await;
            reader.fresh().await.unwrap();
            assert_eq!(store.listings(), listings);
        }
    }
}

//! How a read comes to see everything that was written before it: it asks etcd how far the state is, and
//! waits until the view is there. Requests that wait at the same time share one question.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use ec_store::{Revision, Store};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Unavailable, view::View};

/// Requests that may wait for the question; beyond them, the next wait to be let in.
const QUEUE: usize = 4096;

type Answer = Result<Revision, Unavailable>;

/// See the module. Clones ask together.
#[derive(Clone)]
pub(super) struct Barrier {
    questions: mpsc::Sender<oneshot::Sender<Answer>>,
    view: Arc<View>,
    /// What etcd said last.
    known: Arc<AtomicI64>,
}

impl Barrier {
    pub(super) fn start(
        store: Arc<dyn Store>,
        clock: String,
        view: Arc<View>,
        stop: CancellationToken,
    ) -> Self {
        let (questions, queue) = mpsc::channel(QUEUE);
        let asked = ask(store, clock, Arc::clone(&view), queue);
        tokio::spawn(async move { stop.run_until_cancelled(asked).await });
        Self { questions, view, known: Arc::default() }
    }

    /// Revisions that are known to be in etcd and not in the view.
    pub(super) fn lag(&self) -> i64 {
        (self.known.load(Ordering::Relaxed) - self.view.revision()).max(0)
    }

    /// Returns when the view has everything that was written before this call.
    pub(super) async fn pass(&self, patience: Duration) -> Result<(), Unavailable> {
        let ended = || Unavailable("the server is ending".into());
        let asked = async {
            let (answer, answered) = oneshot::channel();
            self.questions.send(answer).await.map_err(|_| ended())?;
            answered.await.map_err(|_| ended())?
        };
        let revision = tokio::time::timeout(patience, asked)
            .await
            .map_err(|_| Unavailable("etcd does not answer".into()))??;
        self.known.store(revision, Ordering::Relaxed);
        self.view.reach(revision, patience).await
    }
}

async fn ask(
    store: Arc<dyn Store>,
    clock: String,
    view: Arc<View>,
    mut queue: mpsc::Receiver<oneshot::Sender<Answer>>,
) {
    let mut waiting = Vec::new();
    while queue.recv_many(&mut waiting, QUEUE).await > 0 {
        let seen = view.revision();
        // The clock's own revision, not that of all of etcd: others write there, too, and of that we see
        // nothing.
        let answer = match store.get(&clock).await {
            // Emptied, or restored from a backup: what is in memory is of another etcd.
            Ok((_, revision)) if revision < seen => Err(Unavailable(format!(
                "etcd went back from revision {seen} to {revision}; reading it anew"
            ))),
            Ok((pair, _)) => Ok(pair.map_or(0, |pair| pair.mod_revision)),
            Err(error) => Err(Unavailable(error.to_string())),
        };
        for question in waiting.drain(..) {
            // Whoever has gone does not wait for an answer.
            question.send(answer.clone()).ok();
        }
    }
}

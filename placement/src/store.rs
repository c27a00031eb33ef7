//! The state in etcd: every replica holds all of it in memory, from a watch, and writes by transactions that
//! compare every record they stand on.
//!
//! ```text
//!             ┌──────────── watch ─────────────┐
//!             ▼                                │
//!   read ──▶ View ◀── wait for revision ── Barrier ──▶ etcd
//!             ▲                                          ▲
//!             └── decide ── Committer ── one transaction ┘ ◀── commands
//! ```
//!
//! There is no leader: replicas meet in etcd's transactions only.

mod barrier;
mod commit;
mod keys;
mod view;

use std::{sync::Arc, time::Duration};

use ec_store::Store;
use tokio_util::sync::CancellationToken;

use self::{
    barrier::Barrier,
    commit::{Committer, Pending},
};
pub use self::{
    commit::{Limits, WriteError},
    keys::{Keys, Put},
    view::View,
};
use crate::{
    metrics::Metrics,
    model::{Command, ModelError, Outcome, State},
};

/// So long a request waits for etcd before it is told to come again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who is not up to date within this time is not ready.
const READY: Duration = Duration::from_secs(2);

/// The state cannot be read or written now; nothing was done, or it is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// The state, as one replica serves it. Clones are the same replica.
#[derive(Clone)]
pub struct Replica {
    view: Arc<View>,
    barrier: Barrier,
    commands: tokio::sync::mpsc::Sender<Pending>,
}

impl Replica {
    /// Begins to follow what lies under the prefix, until `stop`.
    pub fn start(
        store: Arc<dyn Store>,
        keys: Keys,
        limits: Limits,
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) -> Self {
        let view = Arc::new(View::new(Arc::clone(&metrics)));
        let barrier = Barrier::start(Arc::clone(&store), keys.clock(), Arc::clone(&view), stop.clone());
        tokio::spawn(view::follow(Arc::clone(&view), Arc::clone(&store), keys.clone(), stop.clone()));
        let (commands, queue) = tokio::sync::mpsc::channel(commit::QUEUE);
        let committer = Committer::new(store, keys, limits, Arc::clone(&view), barrier.clone(), metrics);
        tokio::spawn(committer.run(queue, stop));
        Self { view, barrier, commands }
    }

    /// Reads the state as it is at some moment after this call, or later.
    ///
    /// # Errors
    /// Where etcd does not say how far the state is, or the view does not get there in time.
    pub async fn fresh(&self) -> Result<(), Unavailable> {
        self.barrier.pass(PATIENCE).await
    }

    /// Reads the state as far as it is known here, which may be behind.
    pub fn peek<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.view.state())
    }

    /// Carries a command out. The answer stands on what is in etcd, refusals too.
    ///
    /// # Errors
    /// Refused, or not possible now.
    pub async fn write(&self, command: Command) -> Result<Outcome, WriteError> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let ended = || WriteError::Unavailable(Unavailable("the server is ending".into()));
        let pending = Pending::new(command, answer, PATIENCE);
        self.commands.send(pending).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }

    /// Whether the state can be read as it is now.
    pub async fn is_ready(&self) -> bool {
        self.barrier.pass(READY).await.is_ok()
    }

    /// How many revisions of etcd are known of and not in memory.
    pub fn lag(&self) -> i64 {
        self.barrier.lag()
    }

    /// What is in memory.
    pub fn view(&self) -> &View {
        &self.view
    }
}

impl From<ModelError> for WriteError {
    fn from(error: ModelError) -> Self {
        Self::Refused(error)
    }
}

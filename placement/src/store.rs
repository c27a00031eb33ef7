//! The state in etcd: every replica holds all of it in memory, from a watch, and writes by transactions that
//! compare every record they stand on.
//!
//! ```text
//!             ┌─────────────────── watch ──────────────────┐
//!             ▼                                            │
//!   read ──▶ View ──▶ History ◀── how far is it? ── Barrier ──▶ etcd
//!             ▲                                                  ▲
//!             └── decide ── Committer ── one transaction ────────┘ ◀── commands
//! ```
//!
//! `View` holds the state; `History` how far it is, and whether it is to be believed; it knows nothing of what the
//! state holds, and the barrier knows nothing but it.
//!
//! There is no leader: replicas meet in etcd's transactions only.

mod barrier;
mod commit;
mod history;
mod keys;
mod recall;
mod view;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ec_placement_model::{Command, ModelError, Outcome, State};
use ec_runtime::{Host, Tasks};
use ec_store::{FollowOptions, Store};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::{
    barrier::Barrier,
    commit::{Committer, Pending},
    history::History,
};
pub use self::{
    commit::{Limits, WriteError},
    keys::{Keys, Put, Reading, Stand},
    view::View,
};
use crate::metrics::Metrics;

/// So long a request waits for etcd before it is told to come again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who is not up to date within this time is not ready.
const READY: Duration = Duration::from_secs(2);

/// A write that worked within this time tells that writes work; else one is tried.
const PROVEN: Duration = Duration::from_secs(30);

/// Everything is read anew so often, in case an event was lost, for those who can afford it.
const RESYNC: Duration = Duration::from_secs(24 * 3600);

/// What is told of a place with a part of a cloud, where an import is not complete.
pub const IMPORTING: &str =
    "an import is under way, or broke off; then finish it with the same `eplacement import`";

/// The state cannot be read or written now; nothing was done, or it is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

fn ended() -> Unavailable {
    Unavailable("the server is ending".into())
}

/// How writes went.
#[derive(Debug, Default)]
struct Health(Mutex<Option<(Instant, Result<(), String>)>>);

impl Health {
    fn note(&self, outcome: Result<(), String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), outcome));
    }

    /// Whether a write worked lately, and none failed since.
    fn is_proven(&self) -> bool {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*last, Some((at, Ok(()))) if at.elapsed() < PROVEN)
    }
}

/// The state, as one replica serves it. Clones are the same replica.
#[derive(Clone)]
pub struct Replica {
    view: Arc<View>,
    barrier: Barrier,
    commands: tokio::sync::mpsc::Sender<Pending>,
    health: Arc<Health>,
    host: Host,
    tasks: Tasks,
}

impl Replica {
    /// Begins to follow what lies under the prefix, until `stop`.
    pub fn start(
        store: Arc<dyn Store>,
        keys: Keys,
        limits: Limits,
        metrics: Arc<Metrics>,
        host: Host,
        stop: CancellationToken,
    ) -> Self {
        let options = FollowOptions { resync: RESYNC, ..FollowOptions::default() };
        let (changes, relist) =
            ec_store::follow_on_demand(Arc::clone(&store), keys.prefix().to_owned(), options);
        let tasks = Tasks::new(stop.clone());
        let history = Arc::new(History::new(Arc::clone(&metrics), relist));
        let view = Arc::new(View::new(Arc::clone(&history), Arc::clone(&metrics)));
        let (barrier, asking) = Barrier::new(Arc::clone(&store), keys.clock(), history, stop.clone());
        tasks.spawn("reading how far etcd is", asking);
        let following =
            view::follow(Arc::clone(&view), Arc::clone(&store), changes, keys.clone(), stop.clone());
        tasks.spawn("following etcd", following);
        let (commands, queue) = tokio::sync::mpsc::channel(commit::QUEUE);
        let committer =
            Committer::new(store, keys, limits, Arc::clone(&view), barrier.clone(), metrics, host.clone());
        let health = committer.health();
        tasks.spawn("writing to etcd", committer.run(queue, stop));
        Self { view, barrier, commands, health, host, tasks }
    }

    /// Waits until one of the tasks of this replica has ended though nobody asked for that; answers which, and
    /// how. It serves nothing any more then.
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

    /// Reads the state as far as it is known here, which may be behind. Briefly: see [`View::look`].
    pub fn peek<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        self.view.look(look)
    }

    /// The state as far as it is known here, to look at for long.
    pub fn copy(&self) -> Arc<State> {
        self.view.copy()
    }

    /// Carries a command out. The answer stands on what is in etcd, refusals too.
    ///
    /// # Errors
    /// Refused, or not possible now.
    pub async fn write(&self, command: Command) -> Result<Outcome, WriteError> {
        self.send(Some(command), PATIENCE).await
    }

    async fn send(&self, command: Option<Command>, patience: Duration) -> Result<Outcome, WriteError> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let ended = || WriteError::Unavailable(ended());
        let pending = Pending::new(command, answer, patience);
        self.commands.send(pending).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }

    /// Whether the state can be read as it is now, and written.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn ready(&self) -> Result<(), Unavailable> {
        if self.tasks.has_failed() {
            return Err(Unavailable("a part of the server has ended".into()));
        }
        self.barrier.pass(READY).await?;
        if self.health.is_proven() {
            return Ok(());
        }
        let wrote = tokio::time::timeout(READY, self.send(None, READY)).await;
        match wrote {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Unavailable(error.to_string())),
            Err(_) => Err(Unavailable("etcd does not take writes in time".into())),
        }
    }

    /// How many revisions of etcd are known of and not in memory.
    pub fn lag(&self) -> i64 {
        self.barrier.lag()
    }

    /// The machine that it runs on.
    pub fn host(&self) -> &Host {
        &self.host
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

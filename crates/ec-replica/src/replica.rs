//! A state that is read and written here, and by as many others as there are.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ec_runtime::Host;
use ec_store::Store;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    Commands, Limits, Reader, Unavailable, WriteError,
    commit::{self, AnswerOf, Committer, Pending},
    ended,
    reader::PATIENCE,
};

/// Who is not up to date within this time is not ready.
const READY: Duration = Duration::from_secs(2);

/// A write that worked within this time tells that writes work; else one is tried.
const PROVEN: Duration = Duration::from_secs(30);

/// How writes went.
#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<Option<(Instant, Result<(), String>)>>);

impl Health {
    pub(crate) fn note(&self, outcome: Result<(), String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), outcome));
    }

    /// Whether a write worked lately, and none failed since.
    fn is_proven(&self) -> bool {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*last, Some((at, Ok(()))) if at.elapsed() < PROVEN)
    }
}

/// A [`Reader`] that writes, too. Clones are the same replica.
#[derive(Clone)]
pub struct Replica<M: Commands> {
    reader: Reader<M>,
    commands: mpsc::Sender<Pending<M>>,
    health: Arc<Health>,
    host: Host,
}

impl<M: Commands> Replica<M> {
    /// Begins to follow what lies under the model's prefix, and to write there, until `stop`.
    pub fn start(
        store: Arc<dyn Store>,
        model: M,
        limits: Limits,
        host: Host,
        stop: CancellationToken,
    ) -> Self {
        let reader = Reader::start(Arc::clone(&store), model, stop.clone());
        let (commands, queue) = mpsc::channel(commit::QUEUE);
        let committer = Committer::new(store, limits, &reader, host.clone());
        let health = committer.health();
        reader.tasks().spawn("writing to etcd", committer.run(queue, stop));
        Self { reader, commands, health, host }
    }

    /// Carries a command out. The answer stands on what is in etcd, refusals too.
    ///
    /// # Errors
    /// Refused, or not possible now.
    pub async fn write(&self, command: M::Command) -> AnswerOf<M> {
        self.send(Some(command), PATIENCE).await
    }

    async fn send(&self, command: Option<M::Command>, patience: Duration) -> AnswerOf<M> {
        let (answer, answered) = oneshot::channel();
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
        if self.reader.tasks().has_failed() {
            return Err(Unavailable("a part of the server has ended".into()));
        }
        self.reader.barrier().pass(READY).await?;
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

    /// The machine that it runs on.
    pub fn host(&self) -> &Host {
        &self.host
    }
}

impl<M: Commands> Deref for Replica<M> {
    type Target = Reader<M>;

    fn deref(&self) -> &Reader<M> {
        &self.reader
    }
}

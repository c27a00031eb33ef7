//! What a program takes from the machine that it runs on, beside its services: the time of day, chance, and threads
//! for what blocks. A value that is handed in, so that a simulation can hand in its own.

use std::{fmt, sync::Arc};

use futures::future::BoxFuture;
use jiff::Timestamp;
use uuid::Uuid;

/// Work that blocks.
pub type Work = Box<dyn FnOnce() + Send>;

/// A machine, real or simulated.
pub trait Machine: Send + Sync + 'static {
    /// The time of day.
    fn now(&self) -> Timestamp;

    /// A number that nobody can foresee.
    fn random(&self) -> u128;

    /// A number that only marks something for whoever reads of it: whatever it is, nothing is done otherwise.
    fn mark(&self) -> u128 {
        self.random()
    }

    /// The program's start is over: what only that needed may go.
    fn started(&self) {}

    /// Does work that blocks where it keeps nobody else from theirs.
    fn work(&self, work: Work) -> BoxFuture<'static, ()>;
}

/// The machine that a program runs on. Clones are the same machine.
#[derive(Clone)]
pub struct Host(Arc<dyn Machine>);

impl Default for Host {
    fn default() -> Self {
        Self(Arc::new(Real))
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Host")
    }
}

/// Work that blocks has panicked, or was not begun because the program ends.
#[derive(Debug, thiserror::Error)]
#[error("work on a thread of its own broke off")]
pub struct BrokenOff;

impl Host {
    /// Another machine than the real one.
    pub fn simulated(machine: Arc<dyn Machine>) -> Self {
        Self(machine)
    }

    /// The time of day.
    pub fn now(&self) -> Timestamp {
        self.0.now()
    }

    /// A new uuid, of version 4.
    pub fn uuid(&self) -> Uuid {
        uuid::Builder::from_random_bytes(self.0.random().to_ne_bytes()).into_uuid()
    }

    /// A new uuid for something that nothing depends on, as the id of a request.
    pub fn mark(&self) -> Uuid {
        uuid::Builder::from_random_bytes(self.0.mark().to_ne_bytes()).into_uuid()
    }

    /// The program's start is over: what only that needed may go.
    pub fn started(&self) {
        self.0.started();
    }

    /// Does work that blocks on a thread where it keeps nobody else from theirs. Once begun it goes on to its end,
    /// whoever waits for it.
    ///
    /// # Errors
    /// It panicked, or was not begun.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, BrokenOff> {
        let (done, outcome) = tokio::sync::oneshot::channel();
        // What is logged there is about what it is done for.
        let span = tracing::Span::current();
        let work = move || {
            // Whoever has gone does not wait for it.
            done.send(span.in_scope(work)).ok();
        };
        self.0.work(Box::new(work)).await;
        outcome.await.map_err(|_| BrokenOff)
    }
}

struct Real;

impl Machine for Real {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    fn random(&self) -> u128 {
        Uuid::new_v4().as_u128()
    }

    fn started(&self) {
        if let Err(error) = crate::memory::forget_code() {
            tracing::debug!(%error, "code that only the start needed stays resident");
        }
    }

    fn work(&self, work: Work) -> BoxFuture<'static, ()> {
        let begun = tokio::task::spawn_blocking(work);
        // A panic shows in what is missing.
        Box::pin(async move { _ = begun.await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_panics_is_an_error_and_other_work_has_its_outcome() {
        let host = Host::default();
        assert_eq!(host.blocking(|| 1 + 1).await.unwrap(), 2);
        let nothing: Vec<u8> = Vec::new();
        assert!(host.blocking(move || std::hint::black_box(nothing)[std::hint::black_box(1)]).await.is_err());
        assert_ne!(host.uuid(), host.uuid());
        assert_ne!(host.mark(), host.mark());
        assert_eq!((host.uuid().get_version_num(), host.mark().get_version_num()), (4, 4));
    }
}

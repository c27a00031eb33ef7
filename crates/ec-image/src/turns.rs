//! Whose turn it is to bring an image: so many at once, in the order in which they asked.

use std::sync::atomic::{AtomicUsize, Ordering};

use ec_model::Progress;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use crate::{ImageError, flight::State};

pub(crate) struct Turns {
    at_once: usize,
    free: Semaphore,
    waiting: AtomicUsize,
}

impl Turns {
    pub(crate) fn new(at_once: usize) -> Self {
        Self { at_once, free: Semaphore::new(at_once), waiting: AtomicUsize::new(0) }
    }

    /// A turn, where one is free; those that are given back go to those who wait.
    pub(crate) fn at_once(&self) -> Option<SemaphorePermit<'_>> {
        self.free.try_acquire().ok()
    }

    /// Waits for a turn, which lasts until what is given back is dropped. That it waits it tells as its progress.
    pub(crate) async fn take(&self, state: &watch::Sender<State>) -> Result<SemaphorePermit<'_>, ImageError> {
        if let Some(turn) = self.at_once() {
            return Ok(turn);
        }
        let _waits = Waits::new(&self.waiting);
        state.send_modify(|state| {
            let (done, total) = state.progress.take().map_or((0, None), |was| (was.done, was.total));
            let step = format!("image waits for one of {} turns", self.at_once);
            state.progress = Some(Progress { step, done, total });
        });
        self.free.acquire().await.map_err(|_| ImageError::Interrupted)
    }

    /// Whether somebody waits for one.
    pub(crate) fn are_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// One that waits, until it has its turn or lets go.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

//! Whose turn it is to bring an image: so many at once, in the order in which they asked.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::ImageError;

pub(crate) struct Turns {
    free: Semaphore,
    waiting: AtomicUsize,
}

impl Turns {
    pub(crate) fn new(at_once: usize) -> Self {
        Self { free: Semaphore::new(at_once), waiting: AtomicUsize::new(0) }
    }

    /// Waits for a turn, which lasts until what is given back is dropped.
    pub(crate) async fn take(&self) -> Result<SemaphorePermit<'_>, ImageError> {
        let _waits = Waits::new(&self.waiting);
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

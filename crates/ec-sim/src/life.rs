//! Whether a program still lives.

use std::sync::Arc;

use tokio::sync::watch;

/// The life of one start of a program. Clones are the same life.
#[derive(Clone)]
pub(crate) struct Life(Arc<watch::Sender<bool>>);

impl Life {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(true)))
    }

    /// From now on no call of this program comes back.
    pub(crate) fn end(&self) {
        self.0.send_replace(false);
    }

    pub(crate) fn is_over(&self) -> bool {
        !*self.0.borrow()
    }

    /// Goes on at once while the program lives, and never where it does not.
    pub(crate) async fn gate(&self) {
        if self.is_over() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for its end.
    pub(crate) async fn over(&self) {
        let mut told = self.0.subscribe();
        // The sender lives in `self`.
        _ = told.wait_for(|lives| !lives).await;
    }
}

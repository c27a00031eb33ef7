//! Whether a program still lives, and whether it is let run.

use std::sync::Arc;

use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    /// As after SIGSTOP, or on a machine that is suspended.
    Sleeps,
    Over,
}

/// The life of one start of a program. Clones are the same life.
#[derive(Clone)]
pub(crate) struct Life(Arc<watch::Sender<State>>);

impl Life {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(State::Runs)))
    }

    /// From now on no call of this program comes back.
    pub(crate) fn end(&self) {
        self.0.send_replace(State::Over);
    }

    /// Until it is woken nothing of this program goes on.
    pub(crate) fn sleep(&self) {
        self.0.send_if_modified(|state| {
            *state == State::Runs && std::mem::replace(state, State::Sleeps) == State::Runs
        });
    }

    pub(crate) fn wake(&self) {
        self.0.send_if_modified(|state| {
            *state == State::Sleeps && std::mem::replace(state, State::Runs) == State::Sleeps
        });
    }

    /// Goes on at once while the program runs, when it is woken, and never where it is over.
    pub(crate) async fn gate(&self) {
        if *self.0.borrow() != State::Runs {
            // The sender lives in `self`, and whatever is over stays so.
            _ = self.0.subscribe().wait_for(|state| *state == State::Runs).await;
        }
    }

    /// Waits for its end.
    pub(crate) async fn over(&self) {
        _ = self.0.subscribe().wait_for(|state| *state == State::Over).await;
    }
}

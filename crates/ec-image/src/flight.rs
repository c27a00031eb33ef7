//! One download for everyone who asks at the same time.
//!
//! Each asker holds the flight; some seconds after the last one let go it is cancelled: who lets go because something else was wished
//! of its instance meanwhile asks again at once. A flight that has ended is never joined: who asks then has the origin asked again.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use ec_model::{ImageRef, Progress};
use tokio::{runtime::Handle, sync::watch, time::sleep};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{ImageError, shelf::Landed};

/// So long a flight goes on that nobody holds.
const LINGERS: Duration = Duration::from_secs(3);

/// What a flight tells those who hold it.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) progress: Option<Progress>,
    /// The size of the disk in the image, as soon as its header has come.
    pub(crate) virtual_size: Option<u64>,
    /// So many bytes of the disk are there, where nobody knows its size before its end.
    pub(crate) at_least: u64,
    pub(crate) outcome: Option<Result<Landed, ImageError>>,
}

struct Flight {
    state: watch::Receiver<State>,
    _cancel: DropGuard,
}

/// Somebody's hold of a flight. Whoever is dropped while they wait may come again.
pub(crate) struct Held {
    flight: Arc<Flight>,
    /// What came of it was told.
    has_ended: bool,
}

impl Held {
    /// What is told of it.
    pub(crate) fn state(&self) -> watch::Receiver<State> {
        self.flight.state.clone()
    }

    /// Lets go for good.
    pub(crate) fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let (false, Ok(runtime)) = (self.has_ended, Handle::try_current()) {
            let flight = Arc::clone(&self.flight);
            runtime.spawn(async move {
                sleep(LINGERS).await;
                drop(flight);
            });
        }
    }
}

/// The URL and the digests demanded, as they were asked for.
pub(crate) type Key = (String, Option<String>, Option<String>);

pub(crate) fn key(image: &ImageRef) -> Key {
    (image.url.clone(), image.sha256.clone(), image.sha512.clone())
}

#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<Key, Weak<Flight>>>);

impl Flights {
    /// Joins the flight for this key, or starts one that `work` carries out.
    pub(crate) fn join<F>(self: &Arc<Self>, key: Key, work: impl FnOnce(watch::Sender<State>) -> F) -> Held
    where
        F: Future<Output = Result<Landed, ImageError>> + Send + 'static,
    {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = flights.get(&key).and_then(Weak::upgrade) {
            // With the sender gone and no outcome, its task has panicked.
            let in_the_air = flight.state.has_changed().is_ok() && flight.state.borrow().outcome.is_none();
            if in_the_air {
                return Held { flight, has_ended: false };
            }
        }
        let (sender, receiver) = watch::channel(State::default());
        let cancelled = CancellationToken::new();
        let flight = Arc::new(Flight { state: receiver, _cancel: cancelled.clone().drop_guard() });
        flights.insert(key.clone(), Arc::downgrade(&flight));
        drop(flights);

        let work = work(sender.clone());
        let (all, own) = (Arc::clone(self), Arc::downgrade(&flight));
        tokio::spawn(async move {
            let outcome = tokio::select! {
                biased;
                outcome = work => outcome,
                // Dropping the work at any point is safe: its thread cleans up after itself.
                () = cancelled.cancelled() => Err(ImageError::Interrupted),
            };
            all.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extract_if(|_, flight| flight.ptr_eq(&own))
                .for_each(drop);
            sender.send_modify(|state| state.outcome = Some(outcome));
        });
        Held { flight, has_ended: false }
    }
}

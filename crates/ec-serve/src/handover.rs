//! Connections that go on as something else than HTTP, as their requests asked (`Upgrade`) and were answered (101).
//!
//! They keep their place, and count as being answered, until whoever has them lets them go.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use hyper::{
    Request,
    upgrade::{OnUpgrade, Upgraded},
};
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

use crate::Activity;

/// The bytes of a connection.
pub type Io = TokioIo<Upgraded>;

type Taker = Box<dyn FnOnce(Io, CancellationToken) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send>;

/// Who goes on with a connection. Every request carries its connection's among its extensions.
#[derive(Clone, Default)]
pub(crate) struct Handover(Arc<Mutex<Option<(OnUpgrade, Taker)>>>);

impl fmt::Debug for Handover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handover")
    }
}

/// Has the connection of a request go on with `taker` once the request is answered with 101; answered otherwise, it
/// stays as it is. The token is cancelled when the listener stops: the taker is to end soon then.
pub fn hand_over<B, F>(
    request: &mut Request<B>,
    taker: impl FnOnce(Io, CancellationToken) -> F + Send + 'static,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let upgrade = hyper::upgrade::on(&mut *request);
    if let Some(Handover(slot)) = request.extensions().get() {
        let taker: Taker = Box::new(move |io, stop| Box::pin(taker(io, stop)));
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some((upgrade, taker));
    }
}

impl Handover {
    /// Goes on with the connection, where somebody wants to, until they let it go.
    pub(crate) async fn finish(&self, activity: &Activity, stop: CancellationToken) {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((upgrade, taker)) = taken else { return };
        match upgrade.await {
            Ok(io) => {
                activity.set_answering(true);
                taker(TokioIo::new(io), stop).await;
            }
            Err(error) => tracing::debug!(%error, "a connection did not go on"),
        }
    }
}

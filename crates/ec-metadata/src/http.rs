//! Connections, every one of them bounded: guests are strangers, and a thousand of them share this.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    extract::{Request, State},
    http::{Response, StatusCode},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use nix::sys::socket::{getsockopt, sockopt};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{Caller, MetadataService, Origin, caller::by_mark};

const CONNECTIONS_MAX: usize = 256;
/// So that one guest cannot take all connections from the others, whatever addresses it asks from.
/// Strangers share one such part.
const CONNECTIONS_PER_GUEST: usize = 8;
/// From the first byte of a request, or from the end of the one before, to the end of its head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// A guest that reads slowly is cut off too.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// The least that hyper takes; a request of ours has a few hundred bytes.
const HEAD_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;
/// What is being answered when the server ends may take so long.
const DRAIN: Duration = Duration::from_secs(2);
/// Accepting fails when the process is out of files; it is tried again after so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Tells by the bridges' tables who has an address. May block.
pub(crate) type ByPort = dyn Fn(IpAddr) -> io::Result<Origin> + Send + Sync;

/// Accepts and answers until `stop`, then ends what is under way. Gives the listener back open: closing
/// it is the moment when another server may take over.
pub(crate) async fn run(
    listener: TcpListener,
    service: MetadataService,
    by_port: Arc<ByPort>,
    stop: CancellationToken,
) -> TcpListener {
    let router = Router::new().fallback(answer).with_state(service);
    let guests = Arc::new(Guests::default());
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let caller = identify(&stream, peer, &by_port).await;
                let Some(place) = guests.admit(caller.origin) else {
                    tracing::debug!(%peer, "too many connections");
                    continue;
                };
                let (router, stop) = (router.clone().layer(Extension(caller)), stop.clone());
                connections.spawn(async move {
                    connection(stream, router, stop).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "failed to accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    // Whoever is cut off here asks again.
    timeout(DRAIN, connections.wait()).await.ok();
    listener
}

/// Who made the connection, found once: what the guest does later on changes nothing.
async fn identify(stream: &TcpStream, peer: SocketAddr, by_port: &Arc<ByPort>) -> Caller {
    let address = peer.ip();
    let origin = match by_mark(getsockopt(stream, sockopt::Mark).ok()) {
        Some(origin) => origin,
        None => {
            let by_port = Arc::clone(by_port);
            let found = tokio::task::spawn_blocking(move || by_port(address)).await;
            found.map_err(io::Error::other).flatten().unwrap_or_else(|error| {
                tracing::warn!(%peer, %error, "failed to look up who asks");
                Origin::Stranger
            })
        }
    };
    Caller { address, origin }
}

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) {
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        // Who says that nothing more will come still waits for the answer.
        .half_close(true)
        .max_buf_size(HEAD_MAX)
        .max_headers(HEADERS_MAX);
    let mut served = pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    let outcome = tokio::select! {
        outcome = timeout(CONNECTION_TIMEOUT, served.as_mut()) => outcome,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            timeout(DRAIN, served).await
        }
    };
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(error, "a connection broke"),
        Err(_) => tracing::debug!("a connection took too long"),
    }
}

async fn answer(
    State(service): State<MetadataService>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response<Body> {
    // The body is never read: no request of ours has one.
    let request = request.map(drop);
    let answered = tokio::task::spawn_blocking(move || service.answer(&caller, &request)).await;
    match answered {
        Ok(response) => response.map(Body::from),
        Err(error) => {
            tracing::error!(%error, "answering a request failed");
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            response
        }
    }
}

/// Open connections by guest.
#[derive(Default)]
struct Guests(Mutex<HashMap<Origin, usize>>);

struct Place {
    guests: Arc<Guests>,
    guest: Origin,
}

impl Guests {
    fn admit(self: &Arc<Self>, guest: Origin) -> Option<Place> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = open.values().sum();
        let own = open.get(&guest).copied().unwrap_or_default();
        if all >= CONNECTIONS_MAX || own >= CONNECTIONS_PER_GUEST {
            return None;
        }
        open.insert(guest, own + 1);
        Some(Place { guests: Arc::clone(self), guest })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.guests.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = open.get_mut(&self.guest) {
            *own -= 1;
            if *own == 0 {
                open.remove(&self.guest);
            }
        }
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;

//! Connections, every one of them bounded: guests are strangers, and a thousand of them share this.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use ec_serve::{Bounds, Serves, Transport};
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use nix::sys::socket::{getsockopt, sockopt};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;

use crate::{Caller, MetadataService, Origin, caller::by_mark};

const CONNECTIONS_MAX: usize = 256;
/// So that one guest cannot take all connections from the others, whatever addresses it asks from.
/// Strangers share one such part.
const CONNECTIONS_PER_GUEST: usize = 8;
/// From the first byte of a request, or from the end of the one before, to the end of its head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// A guest that reads slowly is cut off too.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// More than a guest asks at its start; who goes on has to ask for a place again.
const QUESTIONS_MAX: usize = 64;
/// Nobody else is let in meanwhile: a program that never tells who asks is not waited for.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Records on a file system that does not answer are waited for so long, and asked anew by a guest that has patience.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// So many threads may wait for such records: the program that this is part of has need of the others.
const ANSWERS_MAX: usize = 64;
/// The least that hyper takes; a request of ours has a few hundred bytes.
const HEAD_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;
/// What is being answered when the server ends may take so long.
const DRAIN: Duration = Duration::from_secs(2);

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
    let bounds = Bounds {
        connections: CONNECTIONS_MAX,
        share: CONNECTIONS_PER_GUEST,
        first_head: HEAD_TIMEOUT,
        head: HEAD_TIMEOUT,
        head_bytes: HEAD_MAX,
        headers: Some(HEADERS_MAX),
        connection: CONNECTION_TIMEOUT,
        questions: Some(QUESTIONS_MAX),
        stalled: CONNECTION_TIMEOUT,
        // Who says that nothing more will come still waits for the answer.
        half_close: true,
    };
    let door = Arc::new(Door { service, by_port, places: Arc::new(Semaphore::new(ANSWERS_MAX)) });
    ec_serve::serve(&listener, Transport::Plain, bounds, door, stop).await.finish(DRAIN).await;
    listener
}

/// The service, and who knows the guests.
struct Door {
    service: MetadataService,
    by_port: Arc<ByPort>,
    places: Arc<Semaphore>,
}

impl Serves for Door {
    type Share = Origin;
    type Caller = Caller;

    /// Who made the connection, found once: what the guest does later on changes nothing.
    async fn meet(&self, stream: &TcpStream, peer: SocketAddr) -> (Origin, Caller) {
        let address = peer.ip();
        let origin = match by_mark(getsockopt(stream, sockopt::Mark).ok()) {
            Some(origin) => origin,
            None => {
                let by_port = Arc::clone(&self.by_port);
                let looked_up = tokio::task::spawn_blocking(move || by_port(address));
                let found = tokio::time::timeout(LOOKUP_TIMEOUT, looked_up).await.map_err(io::Error::from);
                let found = found.and_then(|found| found.map_err(io::Error::other)).flatten();
                found.unwrap_or_else(|error| {
                    tracing::warn!(%peer, %error, "failed to look up who asks");
                    Origin::Stranger
                })
            }
        };
        (origin, Caller { address, origin })
    }

    async fn answer(&self, caller: Caller, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let service = self.service.clone();
        // The body is never read: no request of ours has one.
        let request = request.map(drop);
        let answered = async {
            // Never closed. It goes when the thread is free again, and not when nobody waits for it any more.
            let place = Arc::clone(&self.places).acquire_owned().await;
            let answer = move || {
                let _place = place;
                service.answer(&caller, &request)
            };
            tokio::task::spawn_blocking(answer).await
        };
        let nothing = |status| {
            let mut response = Response::new(Full::default());
            *response.status_mut() = status;
            response
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, answered).await {
            Ok(Ok(response)) => response.map(Full::from),
            Ok(Err(error)) => {
                tracing::error!(%error, "answering a request failed");
                nothing(StatusCode::INTERNAL_SERVER_ERROR)
            }
            Err(_) => {
                tracing::warn!(peer = %caller.address, "this host's records of guests do not answer");
                nothing(StatusCode::SERVICE_UNAVAILABLE)
            }
        }
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;

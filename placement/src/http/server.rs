//! Connections to the API.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use ec_serve::{Bounds, Serves, Tls, Transport};
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::Api;

/// Connections at a time, however many files there may be.
const MOST: usize = 4096;
/// Files that are not for connections: etcd, logs, what the runtime needs.
const RESERVE: usize = 64;
/// What is being answered when the server ends may take so long: longer than a request waits for etcd.
const DRAIN: Duration = Duration::from_secs(12);

/// Where and how connections are taken.
pub struct ServerConfig {
    /// Bound already.
    pub listener: TcpListener,
    /// With TLS where it is there.
    pub tls: Option<Tls>,
    /// So many files may the process have open.
    pub files: usize,
}

fn bounds(files: usize) -> Bounds {
    let connections = files.saturating_sub(RESERVE).clamp(1, MOST);
    Bounds {
        connections,
        // The rest is for the others.
        share: (connections / 2).max(1),
        first_head: Duration::from_secs(10),
        head: Duration::from_secs(60),
        // A query of some thousand groups fits: 64 KiB are as much as hyper takes for a path.
        head_bytes: 80 << 10,
        headers: None,
        connection: Duration::MAX,
        questions: None,
        stalled: Duration::from_secs(20),
        half_close: false,
    }
}

impl Serves for Api {
    type Share = std::net::IpAddr;
    type Caller = ();

    async fn meet(&self, _: &TcpStream, peer: SocketAddr) -> (Self::Share, ()) {
        (peer.ip().to_canonical(), ())
    }

    async fn answer(&self, (): (), request: Request<Incoming>) -> Response<Full<Bytes>> {
        self.respond(request).await
    }
}

/// Answers until `stop`, then ends when what is under way has been answered.
pub async fn serve(config: ServerConfig, api: Arc<Api>, stop: CancellationToken) {
    let ServerConfig { listener, tls, files } = config;
    let transport = tls.map_or(Transport::Plain, Transport::Tls);
    let under_way = ec_serve::serve(&listener, transport, bounds(files), api, stop).await;
    // Whoever comes now asks another replica at once.
    drop(listener);
    under_way.finish(DRAIN).await;
}

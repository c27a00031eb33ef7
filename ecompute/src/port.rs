//! The agent's own port: for reading and for streams, and never for orders.
//!
//! | path | |
//! | --- | --- |
//! | `/healthz` | whether the agent's loop turns |
//! | `/readyz` | whether all that the agent stands on is as it must be, part by part |
//! | `/metrics` | numbers, for Prometheus |
//! | `/view` | what the agent knows of itself and its instances |
//! | `/usage` | the host's load, and what guests have used since they were started |
//! | `/streams/<ticket>` | a guest's console or log, for whoever has a ticket |
//!
//! All but the streams and what guests use, which libvirt knows, is answered from memory, so that it is answered also while
//! etcd, placement or libvirt are not.

mod answer;
mod numbers;
mod streams;
#[cfg(test)]
mod tests;
mod usage;
mod view;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ec_plan::engine::Engine;
use ec_serve::{Bounds, Serves, TlsSection, Transport};
use http_body_util::Full;
use hyper::{Method, Request, Response, body::Incoming};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

pub(crate) use streams::Streams;
pub(crate) use usage::Recent;

use crate::{config::Settings, parts::Parts};

/// A loop that does not answer for so long does not turn: nothing in it waits.
const LOOP_PATIENCE: Duration = Duration::from_secs(5);
/// What is being answered when the agent ends may take so long: longer than its loop is waited for.
const DRAIN: Duration = Duration::from_secs(6);

const BOUNDS: Bounds = Bounds {
    connections: 64,
    share: 32,
    first_head: Duration::from_secs(10),
    head: Duration::from_secs(60),
    head_bytes: 16 << 10,
    headers: Some(64),
    connection: Duration::MAX,
    stalled: Duration::from_secs(20),
    half_close: false,
};

/// A question to the agent's loop, which answers it between two events.
pub(crate) type Inquiry = Box<dyn FnOnce(&Engine) + Send>;

/// What came of a question to the agent's loop.
#[derive(Debug, PartialEq, Eq)]
enum Asked<T> {
    /// The agent starts or ends: its loop has not begun, or has ended.
    NoLoop,
    /// It does not turn.
    Silent,
    Answered(T),
}

/// Why the agent cannot have its port.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// Its certificates are not as they must be.
    #[error("tls: {0}")]
    Tls(#[from] ec_serve::TlsError),
    /// It cannot be opened.
    #[error(
        "cannot listen at {address}: {source}; choose another `listen` in compute.yaml, or `listen: null` for none"
    )]
    Refused {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Somebody has it.
    #[error(
        "cannot listen at {address}: another agent or another program does; choose another `listen` in compute.yaml, or \
         `listen: null` for none"
    )]
    Taken {
        /// Where.
        address: SocketAddr,
    },
}

/// A port that is open, and not served yet.
pub struct Port {
    listener: TcpListener,
    transport: Transport,
}

impl Port {
    /// Opens the port that the configuration names; nothing where it names none.
    pub async fn open(settings: &Settings) -> Result<Option<Self>, PortError> {
        let Some(address) = settings.listen else { return Ok(None) };
        let tls = settings.tls.as_ref().map(TlsSection::open).transpose()?;
        let listener = TcpListener::bind(address).await.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => PortError::Taken { address },
            _ => PortError::Refused { address, source },
        })?;
        let transport = tls.map_or(Transport::Plain, Transport::Tls);
        Ok(Some(Self { listener, transport }))
    }

    /// Where others reach it.
    pub(crate) fn url(&self, settings: &Settings) -> io::Result<String> {
        let address = self.listener.local_addr()?;
        let host = match &settings.advertise {
            Some(host) => host.clone(),
            None if address.ip().is_unspecified() => crate::config::hostname(),
            None => address.ip().to_string(),
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        Ok(format!("{scheme}://{host}:{}", address.port()))
    }

    /// Answers until `stop`.
    pub(crate) async fn serve(self, parts: Arc<Parts>, stop: CancellationToken) {
        let address =
            self.listener.local_addr().map_or_else(|error| error.to_string(), |own| own.to_string());
        let tls = matches!(self.transport, Transport::Tls(_));
        tracing::info!(listen = address, tls, "serving health, metrics and this agent's view");
        let under_way =
            ec_serve::serve(&self.listener, self.transport, BOUNDS, Arc::new(Desk(parts)), stop).await;
        drop(self.listener);
        under_way.finish(DRAIN).await;
    }
}

/// Answers whoever comes.
struct Desk(Arc<Parts>);

impl Serves for Desk {
    type Share = IpAddr;
    type Caller = ();

    async fn meet(&self, _: &TcpStream, peer: SocketAddr) -> (IpAddr, ()) {
        (peer.ip().to_canonical(), ())
    }

    async fn answer(&self, (): (), request: Request<Incoming>) -> Response<Full<Bytes>> {
        let ticket = request.uri().path().strip_prefix("/streams/").map(str::to_owned);
        if let (Some(ticket), &Method::GET) = (ticket, request.method()) {
            return streams::open(&self.0, request, &ticket).await;
        }
        answer::answer(&self.0, request.method(), request.uri().path()).await
    }
}

/// Whether the agent's loop turns, as far as there is one yet: it may wait for libvirt or etcd for as long as these need, and
/// starting the agent anew would not help.
pub(crate) async fn turns(parts: &Parts) -> bool {
    ask(parts, |_| ()).await != Asked::Silent
}

/// Has the agent's loop answer a question about what it knows.
async fn ask<T: Send + 'static>(
    parts: &Parts,
    question: impl FnOnce(&Engine) -> T + Send + 'static,
) -> Asked<T> {
    let Some(inquiries) = parts.inquiries.get() else { return Asked::NoLoop };
    let (answer, answered) = oneshot::channel();
    // Who asked may have gone meanwhile.
    let inquiry: Inquiry = Box::new(move |engine| drop(answer.send(question(engine))));
    let turn = async {
        inquiries.send(inquiry).await.ok()?;
        answered.await.ok()
    };
    match timeout(LOOP_PATIENCE, turn).await {
        Ok(Some(answer)) => Asked::Answered(answer),
        Ok(None) => Asked::NoLoop,
        Err(_) => Asked::Silent,
    }
}

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
//! With TLS and an authority of readers, the certificate that was shown tells who asks. What is a node's is that node's: another
//! node, and who serves and has nothing to ask here, hears of health and readiness only, with a ticket, too.
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
pub use ec_serve::port::PortError;
use ec_serve::{Serves, port, refusal};
use http_body_util::Full;
use hyper::{Method, Request, Response, body::Incoming};
use tokio::{net::TcpStream, sync::oneshot, time::timeout};
use tokio_util::sync::CancellationToken;

pub(crate) use streams::Streams;
pub(crate) use usage::Recent;

use crate::{config::Settings, parts::Parts};

/// A loop that does not answer for so long does not turn: nothing in it waits.
const LOOP_PATIENCE: Duration = Duration::from_secs(5);
/// What would be right where the port cannot be had.
const REMEDY: &str = "choose another `listen` in compute.yaml, or `listen: null` for none";

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

/// The agent's port, open, and not served yet.
pub struct Port(port::Port);

impl Port {
    /// Opens the port that the configuration names; nothing where it names none.
    pub async fn open(settings: &Settings) -> Result<Option<Self>, PortError> {
        let Some(address) = settings.listen else { return Ok(None) };
        let open = port::Port::open(address, "agent", REMEDY).await?;
        Ok(Some(Self(open.behind(settings.tls.as_ref())?)))
    }

    /// Where others reach it.
    pub(crate) fn url(&self, settings: &Settings) -> io::Result<String> {
        let address = self.0.address()?;
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
        self.0.serve(Desk(parts), "health, metrics and this agent's view", stop).await;
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
        if let Some(refused) = refusal(&request, Some(self.0.node)) {
            return refused;
        }
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

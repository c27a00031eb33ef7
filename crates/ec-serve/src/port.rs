//! A program's own port, for operators: reading, answered from memory, and never orders.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

#[cfg(feature = "tls")]
use crate::TlsSection;
use crate::{Bounds, Serves, Transport, metrics, serve};

/// What is being answered when the program ends may take so long.
const DRAIN: Duration = Duration::from_secs(6);

const BOUNDS: Bounds = Bounds {
    connections: 64,
    share: 32,
    first_head: Duration::from_secs(10),
    head: Duration::from_secs(60),
    head_bytes: 16 << 10,
    headers: Some(64),
    connection: Duration::MAX,
    questions: None,
    // Who passes an image on to a store far away takes nothing while 16 MiB are on their way there.
    stalled: Duration::from_secs(60),
    half_close: false,
};

/// Why a program cannot have its port.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// Its certificates are not as they must be.
    #[error("tls: {0}")]
    Tls(String),
    /// It cannot be opened.
    #[error("cannot listen at {address}: {source}; {remedy}")]
    Refused {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
        /// What would be right.
        remedy: &'static str,
    },
    /// Somebody has it.
    #[error("cannot listen at {address}: another {who} or another program does; {remedy}")]
    Taken {
        /// Where.
        address: SocketAddr,
        /// What such a program is called.
        who: &'static str,
        /// What would be right.
        remedy: &'static str,
    },
}

/// What is worth starting again for: an address comes, another program goes. Certificates are as somebody configured them.
#[cfg(feature = "tls")]
impl From<PortError> for ec_runtime::exit::Failure {
    fn from(error: PortError) -> Self {
        match error {
            PortError::Tls(_) => Self::usage(error.to_string()),
            PortError::Refused { .. } | PortError::Taken { .. } => Self::failed(error.to_string()),
        }
    }
}

/// A port that is open, and not served yet.
pub struct Port {
    listener: TcpListener,
    transport: Transport,
}

impl Port {
    /// Opens it for `who`; where that cannot be, `remedy` tells how it is chosen.
    ///
    /// # Errors
    /// Somebody else has it, or it is no address of this host.
    pub async fn open(
        address: SocketAddr,
        who: &'static str,
        remedy: &'static str,
    ) -> Result<Self, PortError> {
        let listener = TcpListener::bind(address).await.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => PortError::Taken { address, who, remedy },
            _ => PortError::Refused { address, source, remedy },
        })?;
        Ok(Self { listener, transport: Transport::Plain })
    }

    /// The same, behind TLS where there is such a section.
    ///
    /// # Errors
    /// A file of it cannot be used.
    #[cfg(feature = "tls")]
    pub fn behind(self, tls: Option<&TlsSection>) -> Result<Self, PortError> {
        let tls = tls.map(TlsSection::open).transpose();
        let tls = tls.map_err(|error| PortError::Tls(error.to_string()))?;
        Ok(Self { transport: tls.map_or(Transport::Plain, Transport::Tls), ..self })
    }

    /// Where it is.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Has `service` answer until `stop`; `what` it serves is told in the log.
    pub async fn serve<S: Serves>(self, service: S, what: &str, stop: CancellationToken) {
        let address = self.address().map_or_else(|error| error.to_string(), |own| own.to_string());
        #[cfg(feature = "tls")]
        let tls = matches!(self.transport, Transport::Tls(_));
        #[cfg(not(feature = "tls"))]
        let tls = false;
        tracing::info!(listen = address, tls, "serving {what}");
        let under_way = serve(&self.listener, self.transport, BOUNDS, Arc::new(service), stop).await;
        drop(self.listener);
        under_way.finish(DRAIN).await;
    }
}

/// Where a program's own port is, as it stands in a configuration.
#[cfg(feature = "tls")]
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Listen {
    /// Nothing is said.
    #[default]
    Usual,
    /// `null`: there is none.
    Nowhere,
    /// There.
    At(String),
}

#[cfg(feature = "tls")]
impl<'de> serde::Deserialize<'de> for Listen {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Nowhere, Self::At))
    }
}

#[cfg(feature = "tls")]
impl Listen {
    /// The address, which is `usual` where nothing is said.
    ///
    /// # Errors
    /// It is none; what would be one.
    pub fn address(&self, usual: &str) -> Result<Option<SocketAddr>, String> {
        let text = match self {
            Self::Nowhere => return Ok(None),
            Self::Usual => usual,
            Self::At(text) => text,
        };
        text.parse().map(Some).map_err(|_| {
            format!(
                "listen `{text}` is no address with a port: wanted for example {usual}, or null for no port"
            )
        })
    }
}

/// What it means where others may reach `listen`, and with it `what`, without a certificate.
#[cfg(feature = "tls")]
pub fn open_to_others(listen: Option<SocketAddr>, tls: Option<&TlsSection>, what: &str) -> Option<String> {
    let listen = listen.filter(|listen| !listen.ip().to_canonical().is_loopback())?;
    let asks = tls.is_some_and(|tls| tls.client_ca.is_some());
    (!asks).then(|| format!("whoever reaches {listen} may read {what}: give it `tls` with `client_ca`"))
}

/// What a program without anything else to show tells of itself.
pub trait Tells: Send + Sync + 'static {
    /// Whether its loop turns; what to say of that.
    fn health(&self) -> Result<&'static str, &'static str>;

    /// Whether all is as it must be, as JSON; none where there is no such question.
    fn readiness(&self) -> Option<(bool, String)> {
        None
    }

    /// The numbers, asked on a thread of their own: may block for as long as a directory takes, if not for ever.
    fn numbers(&self) -> String;
}

/// Answers whoever comes to such a program's port.
pub struct Readings<T>(pub Arc<T>);

impl<T: Tells> Serves for Readings<T> {
    type Share = IpAddr;
    type Caller = ();

    async fn meet(&self, _: &TcpStream, peer: SocketAddr) -> (IpAddr, ()) {
        (peer.ip().to_canonical(), ())
    }

    async fn answer(&self, (): (), request: Request<Incoming>) -> Response<Full<Bytes>> {
        #[cfg(feature = "tls")]
        if let Some(refused) = crate::refusal(&request, None) {
            return refused;
        }
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let told = Self(Arc::clone(&self.0));
        // What else the program does goes on: some have one thread for all of it.
        let answer = tokio::task::spawn_blocking(move || told.reading(&method, &path)).await;
        answer.unwrap_or_else(|error| {
            text(StatusCode::INTERNAL_SERVER_ERROR, format!("the answer broke off: {error}"))
        })
    }
}

impl<T: Tells> Readings<T> {
    fn reading(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        let readiness = (path == "/readyz").then(|| self.0.readiness()).flatten();
        match (path, readiness) {
            _ if !is_reading(method) => not_reading(self.offer()),
            ("/healthz", _) => match self.0.health() {
                Ok(line) => text(StatusCode::OK, line),
                Err(line) => text(StatusCode::SERVICE_UNAVAILABLE, line),
            },
            (_, Some((true, document))) => json(StatusCode::OK, document),
            (_, Some((false, document))) => json(StatusCode::SERVICE_UNAVAILABLE, document),
            ("/metrics", _) => numbers(self.0.numbers()),
            _ => text(StatusCode::NOT_FOUND, format!("there is nothing here: {}", self.offer())),
        }
    }

    fn offer(&self) -> &'static str {
        match self.0.readiness() {
            Some(_) => "there are /healthz, /readyz and /metrics",
            None => "there are /healthz and /metrics",
        }
    }
}

/// Whether that changes nothing. Of the answer to a HEAD hyper sends all but the body.
pub fn is_reading(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// The answer to what would change something.
pub fn not_reading(offer: &str) -> Response<Full<Bytes>> {
    let line = format!("only GET and HEAD: this port is for reading; {offer}");
    let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, line);
    refusal.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
    refusal
}

/// A document.
pub fn json(status: StatusCode, document: impl std::fmt::Display) -> Response<Full<Bytes>> {
    typed(status, "application/json", format!("{document}\n"))
}

/// A line.
pub fn text(status: StatusCode, line: impl Into<String>) -> Response<Full<Bytes>> {
    typed(status, "text/plain; charset=utf-8", line.into() + "\n")
}

/// What [`metrics::Exposition`] wrote.
pub fn numbers(text: String) -> Response<Full<Bytes>> {
    typed(StatusCode::OK, metrics::CONTENT_TYPE, text)
}

fn typed(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    struct Told(bool);

    impl Tells for Told {
        fn health(&self) -> Result<&'static str, &'static str> {
            if self.0 { Ok("ok") } else { Err("it stands") }
        }

        fn readiness(&self) -> Option<(bool, String)> {
            Some((self.0, "{}".to_owned()))
        }

        fn numbers(&self) -> String {
            String::new()
        }
    }

    struct Plain;

    impl Tells for Plain {
        fn health(&self) -> Result<&'static str, &'static str> {
            Ok("ok")
        }

        fn numbers(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn each_path_has_its_answer_and_nothing_takes_orders() {
        for well in [true, false] {
            let port = Readings(Arc::new(Told(well)));
            let status = |method: Method, path: &str| port.reading(&method, path).status().as_u16();
            let expected = if well { 200 } else { 503 };
            assert_eq!(status(Method::GET, "/healthz"), expected);
            assert_eq!(status(Method::GET, "/readyz"), expected);
            assert_eq!(status(Method::GET, "/metrics"), 200);
            assert_eq!(status(Method::GET, "/"), 404);
            for path in ["/healthz", "/readyz", "/metrics", "/"] {
                assert_eq!(status(Method::POST, path), 405, "{path}");
            }
        }
        let port = Readings(Arc::new(Plain));
        assert_eq!(port.reading(&Method::GET, "/readyz").status(), StatusCode::NOT_FOUND);
        assert_eq!(port.reading(&Method::GET, "/metrics").status(), StatusCode::OK);
    }

    /// Whose numbers come once somebody lets go of what holds them up.
    struct Slow(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

    impl Tells for Slow {
        fn health(&self) -> Result<&'static str, &'static str> {
            Ok("ok")
        }

        fn numbers(&self) -> String {
            self.0.lock().unwrap().recv_timeout(Duration::from_secs(60)).ok();
            "late 1\n".to_owned()
        }
    }

    #[tokio::test]
    async fn numbers_that_take_long_hold_up_nothing_else() {
        let port = Port::open("127.0.0.1:0".parse().unwrap(), "program", "choose another").await.unwrap();
        let address = port.address().unwrap();
        let (go_on, held) = std::sync::mpsc::channel();
        let stop = CancellationToken::new();
        let desk = Readings(Arc::new(Slow(std::sync::Mutex::new(held))));
        let served = tokio::spawn(port.serve(desk, "numbers", stop.clone()));
        let ask = async |path: &str| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let begun = std::time::Instant::now();
        let (numbers, ()) = tokio::join!(ask("/metrics"), async {
            // The numbers are asked for first.
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(ask("/healthz").await.ends_with("ok\n"));
            go_on.send(()).unwrap();
        });
        assert!(numbers.ends_with("late 1\n"), "{numbers}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        stop.cancel();
        served.await.unwrap();
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_told_with_what_would_be_right() {
        let first = Port::open("127.0.0.1:0".parse().unwrap(), "program", "choose another").await.unwrap();
        let address = first.address().unwrap();
        let error = Port::open(address, "program", "choose another").await.err().unwrap().to_string();
        let wanted =
            format!("cannot listen at {address}: another program or another program does; choose another");
        assert_eq!(error, wanted);
        let nowhere = Port::open("192.0.2.1:1".parse().unwrap(), "program", "choose another").await;
        assert!(matches!(nowhere, Err(PortError::Refused { .. })));
    }
}

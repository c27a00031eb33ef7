//! One listener for all who serve: bounded in connections, in their shares, in sizes and in times.
//!
//! ```text
//!   accept ──▶ who is it, and on whose share? ──▶ a place, or room made by one that says nothing ──▶ (TLS)
//!          ──▶ head in time ──▶ answer ──▶ taken in time ──▶ the next request, or the end
//!                                  └──▶ 101: no HTTP any more, see [`hand_over`]
//! ```
//!
//! What is asked and answered is the business of whoever [`Serves`].

#[cfg(feature = "tls")]
mod endings;
mod guests;
mod handover;
pub mod port;
mod queue;
#[cfg(feature = "tls")]
mod readers;
pub mod tickets;
#[cfg(feature = "tls")]
mod tls;

use std::{
    convert::Infallible,
    future::Future,
    hash::Hash,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Request, Response,
    body::Incoming,
    header::{CONNECTION, HeaderValue},
    http::Extensions,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What it serves of itself.
pub use ec_metrics as metrics;
#[cfg(feature = "tls")]
pub use endings::tell_endings;
pub use guests::Activity;
use guests::{Guests, Place, Watched};
use handover::Handover;
pub use handover::{Io, hand_over};
use queue::Queue;
#[cfg(feature = "tls")]
pub use readers::refusal;
#[cfg(feature = "tls")]
pub use tls::{Shown, Tls, TlsError, TlsSection};

/// Accepting fails when the process is out of files; it is tried again after so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A handshake may take so long.
#[cfg(feature = "tls")]
const HANDSHAKE: Duration = Duration::from_secs(10);

/// What is asked of strangers.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// Connections at a time.
    pub connections: usize,
    /// Of these, for one share.
    pub share: usize,
    /// From the beginning of a connection to the end of its first head.
    pub first_head: Duration,
    /// From the first byte of a request, or from the end of the one before, to the end of its head.
    pub head: Duration,
    /// The bytes of a head.
    pub head_bytes: usize,
    /// The lines of a head; none: as many as fit.
    pub headers: Option<usize>,
    /// The whole connection; [`Duration::MAX`] for as long as it is used.
    pub connection: Duration,
    /// The questions of a connection, whose place others get then; none: as many as come.
    pub questions: Option<usize>,
    /// A peer may take nothing of an answer for so long.
    pub stalled: Duration,
    /// Whether who closes its half after a question still gets the answer.
    pub half_close: bool,
}

/// How bytes come and go.
#[derive(Clone)]
pub enum Transport {
    /// As they are.
    Plain,
    /// Through TLS.
    #[cfg(feature = "tls")]
    Tls(Tls),
}

/// What is behind a listener.
pub trait Serves: Send + Sync + 'static {
    /// What connections are counted by.
    type Share: Eq + Hash + Clone + Send + Sync + 'static;
    /// What is known of who made a connection.
    type Caller: Clone + Send + Sync + 'static;

    /// Looks at a connection once, at its beginning.
    fn meet(
        &self,
        stream: &TcpStream,
        peer: SocketAddr,
    ) -> impl Future<Output = (Self::Share, Self::Caller)> + Send;

    /// Answers a request.
    fn answer(
        &self,
        caller: Self::Caller,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<Full<Bytes>>> + Send;
}

/// Connections that were begun and not ended.
#[must_use = "what is being answered is cut off otherwise"]
pub struct UnderWay(TaskTracker);

impl UnderWay {
    /// Waits until what is under way has been answered, for so long.
    pub async fn finish(self, patience: Duration) {
        self.0.close();
        // Whoever is cut off here asks again.
        timeout(patience, self.0.wait()).await.ok();
    }
}

/// A connection, with what a task for it needs.
struct Connection<S: Serves> {
    service: Arc<S>,
    caller: S::Caller,
    bounds: Arc<Bounds>,
    place: Place<S::Share>,
    stop: CancellationToken,
}

/// Takes connections and answers them until `stop`. What is being answered then is finished by the caller of this.
pub async fn serve<S: Serves>(
    listener: &TcpListener,
    transport: Transport,
    bounds: Bounds,
    service: Arc<S>,
    stop: CancellationToken,
) -> UnderWay {
    let under_way = UnderWay(TaskTracker::new());
    let guests = Guests::<S::Share>::new(bounds.connections, bounds.share);
    let bounds = Arc::new(bounds);
    let mut queue = Queue::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return under_way,
            accepted = listener.accept() => Some(accepted),
            () = queue.turn(&guests) => None,
        };
        match accepted {
            Some(Ok((stream, peer))) => {
                let (share, caller) = service.meet(&stream, peer).await;
                queue.join(share, (stream, caller));
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "failed to accept a connection");
                queue.shed();
                guests.shed();
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            None => {}
        }
        for (place, (stream, caller)) in queue.admitted(&guests) {
            let connection = Connection {
                service: Arc::clone(&service),
                caller,
                bounds: Arc::clone(&bounds),
                place,
                stop: stop.clone(),
            };
            under_way.0.spawn(connection.begin(stream, transport.clone()));
        }
    }
}

impl<S: Serves> Connection<S> {
    async fn begin(self, stream: TcpStream, transport: Transport) {
        // Answers are small, and clients wait for them.
        stream.set_nodelay(true).ok();
        let (close, bounds) = (self.place.close.clone(), Arc::clone(&self.bounds));
        let stream = Watched::new(stream, Arc::clone(&self.place.activity), bounds.stalled);
        let served = async {
            match transport {
                Transport::Plain => self.requests(stream, Extensions::new()).await,
                #[cfg(feature = "tls")]
                Transport::Tls(tls) => match timeout(HANDSHAKE, tls.now().accept(stream)).await {
                    Ok(Ok(stream)) => {
                        let mut known = Extensions::new();
                        Shown::at(&stream).map(|shown| known.insert(shown));
                        self.requests(stream, known).await;
                    }
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                },
            }
        };
        tokio::select! {
            served = timeout(bounds.connection, served) => {
                if served.is_err() {
                    tracing::debug!("a connection took too long");
                }
            }
            () = close.cancelled() => tracing::debug!("a connection made room for another"),
        }
    }

    /// `known` is what its requests carry beside what is asked.
    async fn requests(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, known: Extensions) {
        let Self { service, caller, bounds, place, stop } = self;
        let asked = CancellationToken::new();
        let (first, activity) = (asked.clone(), Arc::clone(&place.activity));
        let handover = Handover::default();
        let in_requests = handover.clone();
        let (most, so_far) = (bounds.questions, AtomicUsize::new(0));
        let answers = service_fn(move |mut request: Request<Incoming>| {
            first.cancel();
            activity.set_asked(true);
            request.extensions_mut().insert(Arc::clone(&activity));
            request.extensions_mut().insert(in_requests.clone());
            request.extensions_mut().extend(known.clone());
            let is_last = most.is_some_and(|most| so_far.fetch_add(1, Ordering::Relaxed) + 1 >= most);
            let (service, caller, activity) = (Arc::clone(&service), caller.clone(), Arc::clone(&activity));
            async move {
                let mut answer = service.answer(caller, request).await;
                if is_last {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                activity.set_asked(false);
                Ok::<_, Infallible>(answer)
            }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(bounds.head)
            .half_close(bounds.half_close)
            .max_buf_size(bounds.head_bytes);
        if let Some(headers) = bounds.headers {
            http.max_headers(headers);
        }
        let mut served = pin!(http.serve_connection(TokioIo::new(stream), answers).with_upgrades());
        let silence = async {
            // Where nothing is asked in time.
            if timeout(bounds.first_head, asked.cancelled()).await.is_ok() {
                std::future::pending::<()>().await;
            }
        };
        let outcome = tokio::select! {
            outcome = served.as_mut() => outcome,
            () = stop.cancelled() => {
                served.as_mut().graceful_shutdown();
                served.await
            }
            () = silence => return,
        };
        match outcome {
            Ok(()) => handover.finish(&place.activity, stop).await,
            Err(error) => tracing::debug!(%error, "a connection broke"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// More than whoever is asked writes at once.
    const LONG: usize = 1000;

    struct Answers;

    impl Serves for Answers {
        type Share = u8;
        type Caller = ();

        async fn meet(&self, _: &TcpStream, _: SocketAddr) -> (u8, ()) {
            (0, ())
        }

        async fn answer(&self, (): (), _: Request<Incoming>) -> Response<Full<Bytes>> {
            Response::new(Full::new(Bytes::from(vec![b'x'; LONG])))
        }
    }

    fn bounds() -> Bounds {
        Bounds {
            connections: 0,
            share: 0,
            first_head: Duration::from_secs(9),
            head: Duration::from_secs(9),
            head_bytes: 16 << 10,
            headers: None,
            connection: Duration::MAX,
            questions: None,
            stalled: Duration::from_secs(9),
            half_close: false,
        }
    }

    /// A connection of that share, of which a question was asked and the answer has begun.
    async fn asked(guests: &Guests<u8>, share: u8) -> DuplexStream {
        let mut far = connected(guests, share);
        far.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        far.read_exact(&mut [0; 17]).await.unwrap();
        far
    }

    fn connected(guests: &Guests<u8>, share: u8) -> DuplexStream {
        let place = guests.admit(share).unwrap();
        let (near, far) = duplex(64);
        let bounds = bounds();
        let (close, stream) =
            (place.close.clone(), Watched::new(near, Arc::clone(&place.activity), bounds.stalled));
        let (service, bounds) = (Arc::new(Answers), Arc::new(bounds));
        let connection = Connection { service, caller: (), bounds, place, stop: CancellationToken::new() };
        tokio::spawn(async move {
            tokio::select! {
                () = connection.requests(stream, Extensions::new()) => {}
                () = close.cancelled() => {}
            }
        });
        far
    }

    /// What is still sent on it, up to the end of the answer or of the connection.
    async fn rest(far: &mut DuplexStream) -> usize {
        let mut bytes = Vec::new();
        while bytes.iter().filter(|byte| **byte == b'x').count() < LONG {
            if far.read_buf(&mut bytes).await.unwrap() == 0 {
                break;
            }
        }
        bytes.iter().filter(|byte| **byte == b'x').count()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_being_written_is_not_cut_while_another_connection_could_go() {
        let guests = Guests::new(2, 2);
        let mut oldest = asked(&guests, 1).await;
        let mut idle = asked(&guests, 1).await;
        assert_eq!(rest(&mut idle).await, LONG);
        let mut late = asked(&guests, 2).await;
        assert_eq!(rest(&mut oldest).await, LONG);
        assert_eq!(rest(&mut late).await, LONG);
        assert_eq!(idle.read(&mut [0]).await.unwrap(), 0, "it was answered, and made room");
    }

    /// As one that makes connections without end and says nothing, beside whoever looks after a program.
    #[tokio::test]
    async fn those_that_say_nothing_do_not_keep_out_one_of_their_share_that_asks() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let bounds = Bounds { connections: 16, share: 8, ..bounds() };
        let ended = stop.clone();
        let served =
            tokio::spawn(
                async move { serve(&listener, Transport::Plain, bounds, Arc::new(Answers), stop).await },
            );
        let silent = tokio::spawn(async move {
            let mut silent = Vec::new();
            loop {
                silent.push(TcpStream::connect(address).await.unwrap());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        for _ in 0..5 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut told = Vec::new();
            timeout(Duration::from_secs(4), stream.read_to_end(&mut told)).await.unwrap().unwrap();
            assert!(told.len() > LONG, "{}", told.len());
        }
        silent.abort();
        ended.cancel();
        served.await.unwrap().finish(Duration::ZERO).await;
    }

    /// Of its many questions at once on one connection none of the bounds would hold.
    #[tokio::test(start_paused = true)]
    async fn http_2_is_not_spoken() {
        let mut far = connected(&Guests::new(1, 1), 1);
        far.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut told = Vec::new();
        far.read_to_end(&mut told).await.unwrap();
        let told = String::from_utf8_lossy(&told);
        assert!(told.is_empty() || told.starts_with("HTTP/1.1 4"), "{told}");
    }
}

//! A guest's console, its log and its screen, and the file of a volume, over WebSockets (RFC 6455) in binary messages: `GET /streams/<ticket>`.
//!
//! ```text
//!   a wish in the request ──▶ the engine ──▶ a ticket, in the status ──▶ whoever wished it brings it here, once
//! ```
//!
//! Of a log, an empty message stands between what was there and what comes; of a disk, the first message is how many bytes
//! it has, in eight with the highest first. The closing message says why it ends, with the code 1011 where it broke, and with
//! 1008 where the guest takes nothing. A ping is answered once the hypervisor has taken for the guest all that came before it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use ec_hypervisor::{Console, HypervisorError, HypervisorResult, Printed, Typed};
use ec_model::{Access, AccessKind, AccessWish, InstanceId, RequestId, Ticket};
use ec_runtime::Host;
use ec_serve::{
    hand_over,
    port::text,
    tickets::{LIFE, Tickets},
};
use futures::{
    FutureExt, SinkExt, StreamExt,
    future::{Fuse, FusedFuture},
    stream::{BoxStream, poll_fn},
};
use http_body_util::Full;
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::UnixStream,
    sync::{Semaphore, mpsc},
    time::{Instant, MissedTickBehavior, error::Elapsed, interval, timeout},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        self, Message,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
    },
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{about::about, parts::Parts};

/// Streams at a time: fewer than one peer may have connections, so that the rest is answered beside them.
const STREAMS: usize = 16;
/// Of a log, so much of what is there already.
const LOG_BYTES: usize = 1 << 20;
/// Bytes of a screen that are read at a time, and pieces that wait in each direction.
const PIECE_BYTES: usize = 32 << 10;
const PIECES: usize = 4;
/// The most that is typed at a time.
const MESSAGE_BYTES: usize = 64 << 10;
/// Of that, so much is handed to the guest at a time.
const HANDED_BYTES: usize = 256;
/// What a peer has not taken yet, of a piece of a disk and of answers to its pings; of these the newest counts.
const UNSENT_BYTES: usize = 1 << 20;
/// A peer is asked so often whether it is there, and has gone when nothing was heard of it for so long.
const PING: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(90);
/// So long the hypervisor may take to open one: more than a call of its takes at most, so that it says itself what it is busy
/// with, and less than those who ask wait for an answer.
const OPENING: Duration = Duration::from_secs(40);
/// A peer that is told of the end gets so long to take it.
const CLOSING: Duration = Duration::from_secs(2);

/// What a ticket is for.
#[derive(Debug, Clone, Copy)]
struct Pass {
    instance: InstanceId,
    kind: AccessKind,
    request_id: Option<RequestId>,
}

/// Who may look at guests, and how many do.
pub(crate) struct Streams {
    tickets: Mutex<Tickets<Pass>>,
    places: Arc<Semaphore>,
}

impl Default for Streams {
    fn default() -> Self {
        Self { tickets: Mutex::default(), places: Arc::new(Semaphore::new(STREAMS)) }
    }
}

impl Streams {
    /// Answers a wish to look at an instance.
    pub(crate) fn admit(&self, instance: InstanceId, wish: AccessWish, host: &Host) -> Access {
        let AccessWish { kind, generation, request_id } = wish;
        let ticket = match kind {
            AccessKind::Unknown => {
                Err("its node's agent is of an older release, and cannot show that".to_owned())
            }
            AccessKind::Console | AccessKind::Log | AccessKind::Vnc | AccessKind::Disk => {
                let word = host.uuid().simple().to_string();
                let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
                let issued = tickets.issue(word.clone(), Pass { instance, kind, request_id }, Instant::now());
                issued.map(|()| word).map_err(|error| error.to_string())
            }
        };
        let (ticket, reason) = match ticket {
            Ok(word) => (Some(Ticket(word)), None),
            Err(why) => (None, Some(why)),
        };
        Access { kind, generation, ticket, reason, expires_at: host.now() + LIFE }
    }

    fn take(&self, word: &str) -> Option<Pass> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner).take(word, Instant::now())
    }
}

/// Opens what the ticket is for, and has the connection go on with it.
pub(super) async fn open(
    parts: &Arc<Parts>,
    mut request: Request<Incoming>,
    word: &str,
) -> Response<Full<Bytes>> {
    let Some(accept) = handshake(request.headers()) else {
        let mut refusal = text(StatusCode::UPGRADE_REQUIRED, "this is a stream: ask for a WebSocket");
        refusal.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        return refusal;
    };
    let Ok(place) = Arc::clone(&parts.streams.places).try_acquire_owned() else {
        return text(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{STREAMS} consoles and logs are open at this node, which is as many as may be"),
        );
    };
    let Some(Pass { instance, kind, request_id }) = parts.streams.take(word) else {
        let why = format!("no such ticket is out: each is good once, and for {} s", LIFE.as_secs());
        return text(StatusCode::NOT_FOUND, why);
    };
    let hypervisor = &parts.hypervisor;
    let opened = in_time(instance, kind, async {
        match kind {
            AccessKind::Log => hypervisor.follow_console(instance, LOG_BYTES).await.map(Ends::reading),
            AccessKind::Vnc => hypervisor.open_graphics(instance).await.map(Ends::watching),
            AccessKind::Disk => hypervisor.read_disk(instance).await.map(Ends::copying),
            AccessKind::Console | AccessKind::Unknown => {
                hypervisor.open_console(instance).await.map(Ends::typing)
            }
        }
    });
    let ends = match opened.await {
        Ok(ends) => ends,
        Err(error) => return text(StatusCode::CONFLICT, ec_runtime::exit::chain(&error)),
    };
    let span = about(instance, parts.node, request_id);
    span.in_scope(|| tracing::info!(%kind, "somebody looks at it"));
    hand_over(&mut request, move |io, stop| {
        let look = async move {
            let _place = place;
            if let Err(error) = pass(io, ends, stop).await {
                tracing::debug!(%kind, %error, "a stream broke");
            }
            tracing::info!(%kind, "nobody looks at it any more");
        };
        look.instrument(span)
    });
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    for (name, value) in [
        (header::CONNECTION, HeaderValue::from_static("Upgrade")),
        (header::UPGRADE, HeaderValue::from_static("websocket")),
        (header::SEC_WEBSOCKET_ACCEPT, accept),
    ] {
        response.headers_mut().insert(name, value);
    }
    response
}

/// What was opened, of a hypervisor that has done it in time: what it waits for on the way may take a call's time each.
async fn in_time<T>(
    instance: InstanceId,
    kind: AccessKind,
    opened: impl Future<Output = HypervisorResult<T>>,
) -> HypervisorResult<T> {
    timeout(OPENING, opened).await.unwrap_or_else(|_| {
        let what = format!("what the hypervisor was asked for, the {kind} of {instance},");
        Err(HypervisorError::TimedOut { what, seconds: OPENING.as_secs() })
    })
}

/// What a WebSocket's handshake is to be answered with, where this is one.
fn handshake(headers: &HeaderMap) -> Option<HeaderValue> {
    let says = |name, wanted: &str| {
        let value = headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        value.split(',').any(|word| word.trim().eq_ignore_ascii_case(wanted))
    };
    let asked = says(header::CONNECTION, "upgrade")
        && says(header::UPGRADE, "websocket")
        && says(header::SEC_WEBSOCKET_VERSION, "13");
    let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|_| asked)?;
    HeaderValue::from_str(&derive_accept_key(key.as_bytes())).ok()
}

/// The guest's end of a stream.
struct Ends {
    output: BoxStream<'static, HypervisorResult<Bytes>>,
    /// Where what is typed goes; nowhere for a log.
    input: Option<mpsc::Sender<Typed>>,
    /// What it means that there is no more of it.
    end: &'static str,
    /// And that it broke.
    broken: &'static str,
}

const TAKES_NOTHING: &str = "the guest takes nothing of what is typed";
const GUEST_ENDED: &str = "the guest has ended";
/// A reason has no more than 123 bytes; the agent's log has the hypervisor's own words.
const CONSOLE_BROKE: &str =
    "the console was taken away, or the hypervisor's connection broke; the guest may run on";
const LOG_BROKE: &str = "its log cannot be read";

/// What comes of a channel.
fn stream<T: Send + 'static>(mut pieces: mpsc::Receiver<T>) -> BoxStream<'static, T> {
    poll_fn(move |context| pieces.poll_recv(context)).boxed()
}

impl Ends {
    fn typing(console: Console) -> Self {
        Self {
            output: stream(console.output),
            input: Some(console.input),
            end: GUEST_ENDED,
            broken: CONSOLE_BROKE,
        }
    }

    /// Each direction of the screen's socket is a task of its own, which ends with the other end of its channel.
    fn watching(screen: UnixStream) -> Self {
        let (mut from_guest, mut to_guest) = screen.into_split();
        let (shown, output) = mpsc::channel(PIECES);
        let (input, mut done) = mpsc::channel::<Typed>(PIECES);
        tokio::spawn(async move {
            let mut piece = BytesMut::new();
            loop {
                piece.reserve(PIECE_BYTES);
                let read = tokio::select! {
                    () = shown.closed() => return,
                    read = from_guest.read_buf(&mut piece) => read,
                };
                if !matches!(read, Ok(1..)) || shown.send(piece.split().freeze()).await.is_err() {
                    return;
                }
            }
        });
        tokio::spawn(async move {
            while let Some(Typed { bytes, handed }) = done.recv().await {
                if to_guest.write_all(&bytes).await.is_err() {
                    return;
                }
                handed.send(()).ok();
            }
        });
        let output = stream(output).map(Ok).boxed();
        Self { output, input: Some(input), end: GUEST_ENDED, broken: CONSOLE_BROKE }
    }

    fn reading(output: Printed) -> Self {
        Self { output: stream(output), input: None, end: GUEST_ENDED, broken: LOG_BROKE }
    }

    fn copying(output: mpsc::Receiver<Bytes>) -> Self {
        let end = "that was all of the disk, or it cannot be read";
        Self { output: stream(output).map(Ok).boxed(), input: None, end, broken: end }
    }
}

/// Hands the guest what was typed. So little at a time that one which reads slowly is none that reads nothing.
async fn hand(input: mpsc::Sender<Typed>, mut typed: Bytes) -> Result<(), Elapsed> {
    while !typed.is_empty() {
        let (piece, handed) = Typed::new(typed.split_to(typed.len().min(HANDED_BYTES)));
        let given = async {
            if input.send(piece).await.is_err() || handed.await.is_err() {
                // The guest has ended, or its stream broke: which of both comes by its output.
                std::future::pending::<()>().await;
            }
        };
        timeout(SILENCE, given).await?;
    }
    Ok(())
}

/// Passes bytes on in both directions, until the guest, whoever looks at it, or the agent ends.
async fn pass(
    io: impl AsyncRead + AsyncWrite + Unpin,
    mut ends: Ends,
    stop: CancellationToken,
) -> tungstenite::Result<()> {
    let config = WebSocketConfig::default()
        .max_message_size(Some(MESSAGE_BYTES))
        .max_frame_size(Some(MESSAGE_BYTES))
        .max_write_buffer_size(UNSENT_BYTES);
    let mut socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
    let mut ping = interval(PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut heard = Instant::now();
    // Until the guest has been handed what was typed nothing more is read, which holds up who types, and hides that
    // somebody has gone.
    let mut handing = Fuse::terminated();
    let (code, reason) = loop {
        tokio::select! {
            () = stop.cancelled() => break (CloseCode::Away, "the node's agent ends"),
            piece = ends.output.next() => match piece {
                Some(Ok(bytes)) => socket.send(Message::Binary(bytes)).await?,
                Some(Err(error)) => {
                    tracing::warn!(error = ec_runtime::exit::chain(&error), "{}", ends.broken);
                    break (CloseCode::Error, ends.broken);
                }
                None => break (CloseCode::Normal, ends.end),
            },
            handed = &mut handing => match handed {
                Ok(()) => heard = Instant::now(),
                Err(_) => break (CloseCode::Policy, TAKES_NOTHING),
            },
            message = socket.next(), if handing.is_terminated() => {
                heard = Instant::now();
                match (message.transpose()?, &ends.input) {
                    (None | Some(Message::Close(_)), _) => return Ok(()),
                    (Some(Message::Binary(bytes)), Some(input)) => {
                        handing = hand(input.clone(), bytes).boxed().fuse();
                    }
                    (Some(Message::Text(text)), Some(input)) => {
                        handing = hand(input.clone(), text.into()).boxed().fuse();
                    }
                    _ => {}
                }
            }
            _ = ping.tick() => {
                if handing.is_terminated() && heard.elapsed() > SILENCE {
                    break (CloseCode::Away, "nothing was heard for too long");
                }
                socket.send(Message::Ping(Bytes::new())).await?;
            }
        }
    };
    let frame = CloseFrame { code, reason: reason.into() };
    let end = async {
        socket.close(Some(frame)).await?;
        // Until the peer has answered, so that it has what came before.
        while socket.next().await.transpose()?.is_some() {}
        Ok(())
    };
    timeout(CLOSING, end).await.unwrap_or(Ok(()))
}

#[cfg(test)]
mod tests;

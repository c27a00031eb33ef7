//! Streams over real sockets, of guests of a simulated hypervisor.

use ec_hypervisor::{Hypervisor, SimulatedHypervisor, conformance::build};
use ec_model::{BaseImage, DiskFormat};
use tokio::net::TcpStream;
use tokio_tungstenite::client_async;

use super::*;
use crate::port::{
    Port,
    tests::{Node, node_on, settings},
};

type Socket = WebSocketStream<TcpStream>;

/// An agent's port, with guests behind it.
struct Served {
    node: Node,
    hypervisor: SimulatedHypervisor,
    address: String,
    stop: CancellationToken,
    ended: tokio::task::JoinHandle<()>,
}

async fn served() -> Served {
    let (node, hypervisor) = node_on().await;
    let wanted = settings(&node.parts.settings.state_dir, "listen: 127.0.0.1:0\n");
    let port = Port::open(&wanted).await.unwrap().unwrap();
    let address = port.0.address().unwrap().to_string();
    let stop = CancellationToken::new();
    let ended = tokio::spawn(port.serve(Arc::clone(&node.parts), stop.clone()));
    Served { node, hypervisor, address, stop, ended }
}

impl Served {
    async fn guest(&self, number: u128) -> InstanceId {
        let instance = InstanceId::new(uuid::Uuid::from_u128(number));
        let base = BaseImage {
            path: "/images/base.qcow2".into(),
            format: DiskFormat::Qcow2,
            virtual_size: 1 << 30,
            digest: "00".repeat(32),
        };
        build(&self.hypervisor, &base, instance).await;
        instance
    }

    fn ticket(&self, instance: InstanceId, kind: AccessKind) -> String {
        let parts = &self.node.parts;
        let access =
            parts.streams.admit(instance, AccessWish { kind, generation: 1, request_id: None }, &parts.host);
        access.ticket.unwrap().0
    }

    /// Goes in, or is told a status and why not.
    async fn enter(&self, ticket: &str) -> Result<Socket, (u16, String)> {
        let stream = TcpStream::connect(&self.address).await.unwrap();
        match client_async(format!("ws://{}/streams/{ticket}", self.address), stream).await {
            Ok((socket, _)) => Ok(socket),
            Err(tungstenite::Error::Http(answer)) => {
                let body = answer.body().clone().unwrap_or_default();
                Err((answer.status().as_u16(), String::from_utf8(body).unwrap()))
            }
            Err(error) => panic!("{error}"),
        }
    }

    async fn look(&self, instance: InstanceId, kind: AccessKind) -> Result<Socket, (u16, String)> {
        self.enter(&self.ticket(instance, kind)).await
    }
}

/// The next that is no ping.
async fn heard(socket: &mut Socket) -> Message {
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Ping(_) => {}
            message => return message,
        }
    }
}

fn says(text: &'static str) -> Message {
    Message::Binary(Bytes::from_static(text.as_bytes()))
}

/// Why it was closed.
async fn reason(socket: &mut Socket) -> String {
    match heard(socket).await {
        Message::Close(Some(frame)) => frame.reason.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_console_is_typed_on_by_one_at_a_time_and_ends_with_its_guest() {
    let served = served().await;
    let guest = served.guest(1).await;
    let ticket = served.ticket(guest, AccessKind::Console);
    let mut console = served.enter(&ticket).await.unwrap();
    console.send(says("ls\r")).await.unwrap();
    assert_eq!(heard(&mut console).await, says("ls\r"));
    console.send(Message::Text("date".into())).await.unwrap();
    assert_eq!(heard(&mut console).await, says("date"));
    assert_eq!(served.enter(&ticket).await.unwrap_err().0, 404, "once");
    assert_eq!(served.enter("").await.unwrap_err().0, 404);
    let (status, why) = served.look(guest, AccessKind::Console).await.unwrap_err();
    assert!(status == 409 && why.contains("somebody else"), "{why}");
    console.send(says("left\r")).await.unwrap();
    console.close(None).await.unwrap();
    let mut again = loop {
        // Closing takes its moment.
        if let Ok(again) = served.look(guest, AccessKind::Console).await {
            break again;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let printed = served.hypervisor.console_tail(guest, 100).await.unwrap();
    assert!(printed.ends_with("left\r"), "{printed:?}: typed just before its end");
    served.hypervisor.power_off(guest).await.unwrap();
    assert_eq!(reason(&mut again).await, "the guest has ended");
    let (status, why) = served.look(guest, AccessKind::Console).await.unwrap_err();
    assert!(status == 409 && why.contains("does not run"), "{why}");
}

#[tokio::test]
async fn a_log_says_where_it_goes_on_and_takes_nothing_and_all_ends_with_the_agent() {
    let served = served().await;
    let guest = served.guest(1).await;
    served.hypervisor.set_console(guest, "booted\n");
    let mut log = served.look(guest, AccessKind::Log).await.unwrap();
    assert_eq!((heard(&mut log).await, heard(&mut log).await), (says("booted\n"), says("")));
    log.send(says("nobody hears")).await.unwrap();
    let mut console = served.look(guest, AccessKind::Console).await.unwrap();
    console.send(says("ls\n")).await.unwrap();
    assert_eq!(heard(&mut console).await, says("ls\n"));
    assert_eq!(heard(&mut log).await, says("ls\n"));
    served.stop.cancel();
    for stream in [&mut log, &mut console] {
        assert_eq!(reason(stream).await, "the node's agent ends");
    }
    drop((log, console));
    served.ended.await.unwrap();
}

/// Whether all that was sent from this port has been read at its other end (Linux's `Documentation/networking/proc_net_tcp.rst`).
fn is_read(port: u16) -> bool {
    let port = format!(":{port:04X}");
    let all = std::fs::read_to_string("/proc/net/tcp").unwrap();
    all.lines().all(|line| {
        let mut words = line.split_whitespace().skip(1);
        let [from, to, _, queues] = [(); 4].map(|()| words.next().unwrap_or_default());
        let (unsent, unread) = queues.split_once(':').unwrap_or_default();
        let is_empty = |queue: &str| queue.bytes().all(|digit| digit == b'0');
        (is_empty(unsent) || !from.ends_with(&port)) && (is_empty(unread) || !to.ends_with(&port))
    })
}

#[tokio::test]
async fn who_asks_without_end_and_takes_no_answer_is_kept_little_for() {
    let served = served().await;
    let guest = served.guest(1).await;
    let mut log = served.look(guest, AccessKind::Log).await.unwrap();
    let (piece, pings) = (Bytes::from(vec![7; 125]), 200_000);
    for _ in 0..pings {
        log.feed(Message::Ping(piece.clone())).await.unwrap();
    }
    log.flush().await.unwrap();
    // What comes once all was read was kept for it, by the agent and by the kernel.
    let own = log.get_ref().local_addr().unwrap().port();
    timeout(Duration::from_secs(60), async {
        while !is_read(own) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    let mut answers = 0;
    while let Ok(Some(Ok(message))) = timeout(Duration::from_secs(1), log.next()).await {
        answers += usize::from(matches!(message, Message::Pong(_)));
    }
    assert!((1..pings * 2 / 3).contains(&answers), "{answers} of {pings}");
}

#[tokio::test]
async fn a_screen_speaks_and_is_spoken_to_and_is_let_go_with_its_viewer() {
    let served = served().await;
    let guest = served.guest(1).await;
    let mut screen = served.look(guest, AccessKind::Vnc).await.unwrap();
    assert_eq!(heard(&mut screen).await, says("RFB 003.008\n"));
    screen.send(says("RFB 003.008\n")).await.unwrap();
    assert_eq!(heard(&mut screen).await, says("RFB 003.008\n"));
    screen.close(None).await.unwrap();
    while served.node.parts.streams.places.available_permits() < STREAMS {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    served.hypervisor.power_off(guest).await.unwrap();
    let (status, why) = served.look(guest, AccessKind::Vnc).await.unwrap_err();
    assert!(status == 409 && why.contains("does not run"), "{why}");
}

#[tokio::test]
async fn no_more_streams_are_open_than_may_be_and_who_is_refused_may_come_again() {
    let served = served().await;
    let guest = served.guest(1).await;
    let mut open = Vec::new();
    for _ in 0..STREAMS {
        open.push(served.look(guest, AccessKind::Log).await.unwrap());
    }
    let ticket = served.ticket(guest, AccessKind::Log);
    let (status, why) = served.enter(&ticket).await.unwrap_err();
    assert!(status == 503 && why.contains("16"), "{why}");
    drop(open.pop());
    while served.enter(&ticket).await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let parts = &served.node.parts;
    let unknown = AccessWish { kind: AccessKind::Unknown, generation: 3, request_id: None };
    let access = parts.streams.admit(guest, unknown, &parts.host);
    assert!(access.generation == 3 && access.ticket.is_none() && access.reason.is_some(), "{access:?}");
}

/// The client's end of a stream whose guest's end is given.
async fn passed(ends: Ends) -> (WebSocketStream<tokio::io::DuplexStream>, tokio::task::JoinHandle<()>) {
    let (near, far) = tokio::io::duplex(64);
    let passing = tokio::spawn(async move { pass(near, ends, CancellationToken::new()).await.unwrap_or(()) });
    (WebSocketStream::from_raw_socket(far, Role::Client, None).await, passing)
}

/// With which code, and why, it was closed.
async fn closed(socket: &mut WebSocketStream<tokio::io::DuplexStream>) -> (CloseCode, String) {
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Close(Some(frame)) => return (frame.code, frame.reason.to_string()),
            Message::Ping(_) | Message::Binary(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn who_types_what_a_guest_does_not_take_is_let_go_and_so_is_who_has_gone_meanwhile() {
    let (_print, output) = mpsc::channel(1);
    let (input, _typed) = mpsc::channel(1);
    let (mut socket, passing) = passed(Ends::typing(Console { output, input })).await;
    let begun = Instant::now();
    for _ in 0..2 {
        socket.send(says("ls\r")).await.unwrap();
    }
    assert_eq!(closed(&mut socket).await, (CloseCode::Policy, TAKES_NOTHING.to_owned()));
    assert!((SILENCE..SILENCE + PING).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    drop(socket);
    passing.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_ping_is_answered_once_the_guest_has_all_before_it_however_slowly_it_reads() {
    let (_print, output) = mpsc::channel(1);
    let (input, mut typed) = mpsc::channel(1);
    let (mut socket, passing) = passed(Ends::typing(Console { output, input })).await;
    let begun = Instant::now();
    let slow = Duration::from_secs(60);
    let text = Bytes::from(vec![b'x'; 2 * HANDED_BYTES + 1]);
    let wanted = text.clone();
    let guest = tokio::spawn(async move {
        let mut read = Vec::new();
        while read.len() < wanted.len() {
            let Typed { bytes, handed } = typed.recv().await.unwrap();
            tokio::time::sleep(slow).await;
            read.extend_from_slice(&bytes);
            handed.send(()).unwrap();
        }
        assert_eq!(read, wanted);
        typed
    });
    socket.send(Message::Binary(text)).await.unwrap();
    socket.send(Message::Ping(Bytes::new())).await.unwrap();
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Pong(_) => break,
            Message::Ping(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!((3 * slow..4 * slow).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    let typed = guest.await.unwrap();
    drop((socket, typed));
    passing.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_a_stream_that_broke_never_took_is_not_told_as_taken() {
    let (print, output) = mpsc::channel(1);
    let (input, typed) = mpsc::channel(1);
    let (mut socket, passing) = passed(Ends::typing(Console { output, input })).await;
    drop(typed);
    socket.send(says("ls\r")).await.unwrap();
    socket.send(Message::Ping(Bytes::new())).await.unwrap();
    let breaks = tokio::spawn(async move {
        // It is looked first whether the guest has ended.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let gone = HypervisorError::Unreachable { uri: "test:".to_owned(), detail: "no word".to_owned() };
        print.send(Err(gone)).await.unwrap();
    });
    // A pong would be another message than it waits for.
    assert_eq!(closed(&mut socket).await, (CloseCode::Error, CONSOLE_BROKE.to_owned()));
    breaks.await.unwrap();
    drop(socket);
    passing.await.unwrap();
}

#[tokio::test]
async fn a_hypervisor_in_trouble_is_not_told_as_the_end_of_a_guest() {
    for (code, broke) in [(CloseCode::Error, true), (CloseCode::Normal, false)] {
        let (print, output) = mpsc::channel(2);
        let (input, _typed) = mpsc::channel(1);
        print.send(Ok(Bytes::from_static(b"last words"))).await.unwrap();
        if broke {
            let gone = HypervisorError::Unreachable { uri: "test:".to_owned(), detail: "no word".to_owned() };
            print.send(Err(gone)).await.unwrap();
        }
        drop(print);
        let (mut socket, passing) = passed(Ends::typing(Console { output, input })).await;
        let reason = if broke { CONSOLE_BROKE } else { GUEST_ENDED };
        assert_eq!(closed(&mut socket).await, (code, reason.to_owned()));
        drop(socket);
        passing.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_hypervisor_that_opens_nothing_is_told_before_who_asked_has_gone() {
    let (guest, begun) = (InstanceId::new(uuid::Uuid::from_u128(1)), Instant::now());
    // It waits for a lane, for its connection and for libvirt, 35 s each.
    let waits = async {
        tokio::time::sleep(Duration::from_secs(105)).await;
        Ok(())
    };
    let told = in_time(guest, AccessKind::Vnc, waits).await.unwrap_err().to_string();
    assert!(told.contains("the screen of") && told.contains("within 40 s"), "{told}");
    assert!(begun.elapsed() < Duration::from_secs(45), "commands wait no longer");
    let own = HypervisorError::TimedOut { what: "the call".to_owned(), seconds: 35 };
    let says = async {
        tokio::time::sleep(Duration::from_secs(35)).await;
        Err::<(), _>(own)
    };
    let told = in_time(guest, AccessKind::Vnc, says).await.unwrap_err().to_string();
    assert!(told.starts_with("the call "), "{told}: in its own words");
}

#[test]
fn only_a_whole_handshake_of_a_websocket_is_one() {
    let whole = [
        ("connection", "keep-alive, Upgrade"),
        ("upgrade", "WebSocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    };
    // The example of RFC 6455.
    assert_eq!(handshake(&headers(&whole)).unwrap(), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    for left_out in 0..whole.len() {
        let mut pairs = whole.to_vec();
        pairs.remove(left_out);
        assert_eq!(handshake(&headers(&pairs)), None, "{left_out}");
    }
}

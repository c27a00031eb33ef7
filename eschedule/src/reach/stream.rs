//! A stream from a node's agent: with a ticket, over a WebSocket.

use std::{
    future::poll_fn,
    path::Path,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use ec_cloud::{Door, look_at};
use ec_model::{AccessKind, InstanceId};
use ec_runtime::exit::{Failure, UNREACHABLE};
use ec_store::EtcdTls;
use futures::{SinkExt, StreamExt};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{
        self, Message,
        http::StatusCode,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use crate::config::Session;

/// An agent that was started anew knows nothing of a ticket: so often another is asked for.
const TRIES: usize = 3;
/// An agent says each half minute that it is there: after so long of nothing it is not.
const SILENT: Duration = Duration::from_secs(90);
/// So long it may take to reach the agent.
const PATIENCE: Duration = Duration::from_secs(10);
/// And to have its answer: it waits for libvirt for 40 s, and tells what that is busy with.
const ANSWER: Duration = Duration::from_secs(45);
/// An agent that is told of the end gets so long to hear it.
const CLOSING: Duration = Duration::from_secs(1);

/// A connection, as it is or through TLS.
trait Way: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Way for T {}

/// A stream, open.
pub(crate) struct Stream {
    socket: WebSocketStream<Box<dyn Way>>,
    /// Whether something is typed that has not gone out yet.
    sending: bool,
    question: Question,
}

/// Whether the guest has been handed all that was typed, which the answer to a ping tells: the agent reads on only then.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Question {
    /// Nobody wants to know.
    None,
    /// Somebody does, once it has gone out.
    Due,
    /// It was asked.
    Asked,
    /// It has.
    Taken,
}

/// What comes.
pub(crate) enum Piece {
    /// This; of a log, nothing at the end of what was there before; nothing, too, where all that was typed is gone.
    Bytes(Bytes),
    /// The end, and why.
    End(String),
}

/// Why a stream cannot be had.
enum Closed {
    /// No such ticket is out any more.
    Stale,
    /// For this reason.
    For(Failure),
}

impl Stream {
    /// Asks for a ticket, and goes in with it.
    pub(crate) async fn open(
        session: &Session,
        instance: InstanceId,
        kind: AccessKind,
    ) -> Result<Self, Failure> {
        for _ in 0..TRIES {
            let door = look_at(&session.cloud, instance, kind).await;
            let door = door.map_err(|error| session.failed(error))?;
            match enter(session.settings.etcd.tls.as_ref(), &door).await {
                Ok(socket) => return Ok(Self::of(socket)),
                Err(Closed::Stale) => {}
                Err(Closed::For(failure)) => return Err(failure),
            }
        }
        Err(Failure::failed(format!(
            "its node's agent knows nothing of the tickets that it gave for {instance}; is it being started again and again?"
        )))
    }

    fn of(socket: WebSocketStream<Box<dyn Way>>) -> Self {
        Self { socket, sending: false, question: Question::None }
    }

    /// What comes next.
    pub(crate) async fn next(&mut self) -> Result<Piece, Failure> {
        self.next_while(&mut BytesMut::new()).await
    }

    /// What comes next, while what is `typed` goes out, however long its guest takes to read that. Dropped before, nothing of either
    /// is lost.
    pub(super) async fn next_while(&mut self, typed: &mut BytesMut) -> Result<Piece, Failure> {
        loop {
            let next = poll_fn(|context| self.poll(context, typed));
            match timeout(SILENT, next).await.map_err(|_| silent())?.map_err(broke)? {
                Some(Message::Binary(bytes)) => return Ok(Piece::Bytes(bytes)),
                Some(Message::Close(Some(frame))) => return end(frame),
                Some(Message::Close(None)) | None => {
                    return Ok(Piece::End("the node's agent closed the stream".to_owned()));
                }
                Some(Message::Pong(_)) if self.question == Question::Asked => {
                    self.question = Question::Taken;
                    return Ok(Piece::Bytes(Bytes::new()));
                }
                // Pings are answered below this.
                Some(_) => {}
            }
        }
    }

    fn poll(
        &mut self,
        context: &mut Context<'_>,
        typed: &mut BytesMut,
    ) -> Poll<tungstenite::Result<Option<Message>>> {
        let asks = typed.is_empty() && self.question == Question::Due;
        if (asks || !typed.is_empty()) && self.socket.poll_ready_unpin(context)?.is_ready() {
            let message = if asks {
                self.question = Question::Asked;
                Message::Ping(Bytes::new())
            } else {
                Message::Binary(typed.split().freeze())
            };
            self.socket.start_send_unpin(message)?;
            self.sending = true;
        }
        if self.sending && self.socket.poll_flush_unpin(context)?.is_ready() {
            self.sending = false;
            return Poll::Ready(Ok(Some(Message::Binary(Bytes::new()))));
        }
        self.socket.poll_next_unpin(context).map(Option::transpose)
    }

    /// Whether something is typed that has not gone out yet.
    pub(super) fn is_sending(&self) -> bool {
        self.sending
    }

    /// Asks to be told when the guest has been handed all that is typed.
    pub(super) fn ask_what_is_taken(&mut self) {
        self.question = Question::Due;
    }

    /// Whether the guest has been handed that.
    pub(super) fn is_taken(&self) -> bool {
        self.question == Question::Taken
    }

    /// Types this.
    pub(super) async fn send(&mut self, bytes: Bytes) -> Result<(), Failure> {
        self.socket.send(Message::Binary(bytes)).await.map_err(broke)
    }

    /// The end, after this is typed as far as the guest reads that.
    pub(super) async fn close_after(&mut self, typed: BytesMut) {
        if !typed.is_empty() {
            timeout(CLOSING, self.send(typed.freeze())).await.ok();
        }
        self.close().await;
    }

    /// Tells the agent that nobody looks any more. It finds out by itself, too.
    pub(super) async fn close(&mut self) {
        let end = async {
            self.socket.close(None).await?;
            // A connection that is let go with something unread takes along what its other end has not read.
            while self.socket.next().await.transpose()?.is_some() {}
            Ok::<_, tungstenite::Error>(())
        };
        timeout(CLOSING, end).await.ok();
    }
}

/// An agent tells by its code whether that is the end, or it goes on elsewhere and only the stream is over.
fn end(frame: CloseFrame) -> Result<Piece, Failure> {
    let reason = frame.reason.to_string();
    match frame.code {
        CloseCode::Error => Err(Failure { code: UNREACHABLE, message: reason }),
        CloseCode::Policy => Err(Failure::failed(reason)),
        _ => Ok(Piece::End(reason)),
    }
}

/// A stream that was open has broken.
fn broke(error: tungstenite::Error) -> Failure {
    Failure { code: UNREACHABLE, message: format!("the stream from the node's agent broke: {error}") }
}

fn silent() -> Failure {
    let message = format!(
        "the node's agent has said nothing for {} s: its host is gone, or the way there",
        SILENT.as_secs()
    );
    Failure { code: UNREACHABLE, message }
}

fn unreachable(door: &Door, why: &str) -> Failure {
    let Door { url, node, .. } = door;
    let message = format!(
        "cannot reach the agent of node {node} at {url}: {why}; `listen` and `advertise` in its compute.yaml say where others reach it"
    );
    Failure { code: UNREACHABLE, message }
}

/// Brings the ticket; what is trusted of etcd is trusted of agents.
async fn enter(tls: Option<&EtcdTls>, door: &Door) -> Result<WebSocketStream<Box<dyn Way>>, Closed> {
    let failed = |why: String| Closed::For(unreachable(door, &why));
    let (secure, authority) = match door.url.split_once("://") {
        Some(("http", authority)) => (false, authority),
        Some(("https", authority)) => (true, authority),
        _ => return Err(failed("this is no URL of ours".to_owned())),
    };
    let late = |_| failed(format!("no connection in {} s", PATIENCE.as_secs()));
    let way = timeout(PATIENCE, connect(tls, door, secure, authority)).await.map_err(late)??;
    ask(door, authority, way).await
}

async fn connect(
    tls: Option<&EtcdTls>,
    door: &Door,
    secure: bool,
    authority: &str,
) -> Result<Box<dyn Way>, Closed> {
    let failed = |why: String| Closed::For(unreachable(door, &why));
    let connection = TcpStream::connect(authority).await.map_err(|error| failed(error.to_string()))?;
    // Single keys are to go at once.
    connection.set_nodelay(true).ok();
    Ok(if secure {
        let tls = tls.ok_or_else(|| {
            failed("it speaks TLS, and schedule.yaml names no authority to trust: `etcd.ca_cert`".to_owned())
        })?;
        let config = trust(tls).map_err(|why| Closed::For(Failure::usage(why)))?;
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_matches(['[', ']']);
        let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(error.to_string()))?;
        let connector = TlsConnector::from(Arc::new(config));
        Box::new(connector.connect(name, connection).await.map_err(|error| failed(error.to_string()))?)
    } else {
        Box::new(connection)
    })
}

/// Brings the ticket, by whatever way.
async fn ask(
    door: &Door,
    authority: &str,
    way: Box<dyn Way>,
) -> Result<WebSocketStream<Box<dyn Way>>, Closed> {
    let failed = |why: String| Closed::For(unreachable(door, &why));
    let request = format!("ws://{authority}/streams/{}", door.ticket.0);
    let Ok(answer) = timeout(ANSWER, client_async(request, way)).await else {
        let Door { url, node, .. } = door;
        let message = format!(
            "the agent of node {node} at {url} takes the connection, and does not open the stream in {} s",
            ANSWER.as_secs()
        );
        return Err(Closed::For(Failure { code: UNREACHABLE, message }));
    };
    match answer {
        Ok((socket, _)) => Ok(socket),
        Err(tungstenite::Error::Http(answer)) if answer.status() == StatusCode::NOT_FOUND => {
            Err(Closed::Stale)
        }
        Err(tungstenite::Error::Http(answer)) => {
            let body = answer.body().as_deref().map(String::from_utf8_lossy).unwrap_or_default();
            let why = if body.is_empty() { answer.status().to_string() } else { body.trim().to_owned() };
            Err(Closed::For(Failure::failed(why)))
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// The same certificate is shown to agents as to etcd, too.
pub(crate) fn trust(tls: &EtcdTls) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&tls.ca_cert)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", tls.ca_cert.display()))?;
    }
    let builder = ClientConfig::builder().with_root_certificates(roots);
    let Some((certificate, key_file)) = &tls.client else { return Ok(builder.with_no_client_auth()) };
    let unusable = |error: String| format!("cannot use {}: {error}", key_file.display());
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(|error| unusable(error.to_string()))?;
    builder
        .with_client_auth_cert(certificates(certificate)?, key)
        .map_err(|error| unusable(error.to_string()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    read.map_err(|error| format!("cannot read certificates from {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, process::Command};

    use ec_model::{NodeId, Ticket};
    use ec_serve::TlsSection;
    use tokio::{io::AsyncWriteExt, net::TcpListener};
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::{
        super::{Ending, QUIET, converse, print_log},
        *,
    };

    /// Certificates of two authorities.
    fn certificates() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let openssl = |arguments: &str| {
            let mut command = Command::new("openssl");
            let output = command.args(arguments.split_whitespace()).current_dir(directory.path()).output();
            let output = output.unwrap();
            assert!(output.status.success(), "openssl {arguments}: {output:?}");
        };
        for ca in ["ca", "other"] {
            openssl(&format!(
                "req -x509 -newkey ed25519 -nodes -days 1 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem"
            ));
        }
        std::fs::write(directory.path().join("san"), "subjectAltName = IP:127.0.0.1").unwrap();
        for name in ["agent", "me"] {
            openssl(&format!(
                "req -new -newkey ed25519 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
            ));
            openssl(&format!(
                "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile san -out {name}.pem"
            ));
        }
        directory
    }

    /// An agent's port, of which only the handshakes are played; where it is.
    async fn agent(tls: TlsSection) -> Door {
        let (port, acceptor) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), tls.open().unwrap().now());
        let url = format!("https://{}", port.local_addr().unwrap());
        tokio::spawn(async move {
            loop {
                let (connection, _) = port.accept().await.unwrap();
                // Who is not let in ends here.
                let Ok(secure) = acceptor.accept(connection).await else { continue };
                let Ok(mut socket) = tokio_tungstenite::accept_async(secure).await else { continue };
                socket.send(Message::Binary("well".into())).await.ok();
            }
        });
        Door { node: NodeId::new(uuid::Uuid::nil()), url, ticket: Ticket("t".to_owned()) }
    }

    #[tokio::test]
    async fn an_agent_with_tls_is_believed_by_the_authority_of_etcd_and_shown_the_same_certificate() {
        ec_runtime::install_tls_provider();
        let directory = certificates();
        let file = |name: &str| -> PathBuf { directory.path().join(name) };
        let section = TlsSection {
            certificate: file("agent.pem"),
            key: file("agent.key"),
            client_ca: Some(file("ca.pem")),
        };
        let door = agent(section).await;
        let own = || Some((file("me.pem"), file("me.key")));
        let tls = EtcdTls { ca_cert: file("ca.pem"), client: own() };
        let mut stream = Stream::of(enter(Some(&tls), &door).await.ok().unwrap());
        let Piece::Bytes(said) = stream.next().await.unwrap() else { panic!("it is closed") };
        assert_eq!(said, "well");

        let refused = async |tls: Option<EtcdTls>| match enter(tls.as_ref(), &door).await {
            Err(Closed::For(failure)) => failure.message,
            Err(Closed::Stale) => panic!("the ticket was not looked at"),
            Ok(_) => panic!("it was let in"),
        };
        let why = refused(None).await;
        assert!(why.contains("etcd.ca_cert") && why.contains(&door.url), "{why}");
        let why = refused(Some(EtcdTls { ca_cert: file("other.pem"), client: own() })).await;
        assert!(why.contains("certificate") && why.contains(&door.url), "{why}");
        // With TLS 1.3 it is told after the handshake.
        refused(Some(EtcdTls { ca_cert: file("ca.pem"), client: None })).await;
        let why = refused(Some(EtcdTls { ca_cert: file("nowhere.pem"), client: None })).await;
        assert!(why.contains("nowhere.pem"), "{why}");
    }

    #[test]
    fn a_stream_that_breaks_is_no_end_of_a_guest() {
        let told = |code| end(CloseFrame { code, reason: "why".into() });
        assert!(matches!(told(CloseCode::Normal), Ok(Piece::End(why)) if why == "why"));
        assert!(matches!(told(CloseCode::Away), Ok(Piece::End(why)) if why == "why"));
        let broke = told(CloseCode::Error).err().unwrap();
        assert_eq!((broke.code, broke.message.as_str()), (UNREACHABLE, "why"));
    }

    #[tokio::test]
    async fn of_a_log_that_breaks_what_came_of_it_is_printed() {
        for follow in [false, true] {
            let (here, there) = tokio::io::duplex(1024);
            let way: Box<dyn Way> = Box::new(here);
            let mut stream = Stream::of(WebSocketStream::from_raw_socket(way, Role::Client, None).await);
            let mut agent = WebSocketStream::from_raw_socket(there, Role::Server, None).await;
            agent.send(Message::Binary("booting\nlast words\n".into())).await.unwrap();
            let frame = CloseFrame { code: CloseCode::Error, reason: "it cannot be read".into() };
            agent.close(Some(frame)).await.unwrap();
            let mut read = String::new();
            let out = |bytes: &[u8]| {
                read.push_str(&String::from_utf8_lossy(bytes));
                Ok(())
            };
            let broke = print_log(&mut stream, follow, Some(1), out).await.err().unwrap();
            assert_eq!((broke.code, broke.message.as_str()), (UNREACHABLE, "it cannot be read"));
            assert_eq!(read, "last words\n");
        }
    }

    /// What is told where an agent answers that after so long.
    async fn told_after(wait: Duration, answer: &'static str) -> Failure {
        let (here, mut there) = tokio::io::duplex(4096);
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            there.write_all(answer.as_bytes()).await.ok();
            std::future::pending::<()>().await;
        });
        let url = "http://192.0.2.1:1".to_owned();
        let door = Door { node: NodeId::new(uuid::Uuid::nil()), url, ticket: Ticket("t".to_owned()) };
        match ask(&door, "192.0.2.1:1", Box::new(here)).await {
            Err(Closed::For(failure)) => failure,
            Err(Closed::Stale) => panic!("the ticket was not looked at"),
            Ok(_) => panic!("it was let in"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_waits_for_its_hypervisor_tells_that_itself() {
        let answer = "HTTP/1.1 409 Conflict\r\ncontent-length: 17\r\n\r\nlibvirtd is stuck";
        let told = told_after(Duration::from_secs(36), answer).await;
        assert_eq!((told.code, told.message.as_str()), (1, "libvirtd is stuck"));
        let told = told_after(Duration::from_secs(3600), answer).await;
        assert!(
            told.code == UNREACHABLE && told.message.contains("takes the connection"),
            "{}",
            told.message
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_piped_is_waited_for_until_the_guest_has_been_handed_it() {
        let (here, there) = tokio::io::duplex(1024);
        let way: Box<dyn Way> = Box::new(here);
        let mut stream = Stream::of(WebSocketStream::from_raw_socket(way, Role::Client, None).await);
        let mut agent = WebSocketStream::from_raw_socket(there, Role::Server, None).await;
        let (keys, typed) = tokio::sync::mpsc::channel(1);
        keys.send(Bytes::from_static(b"date\r")).await.unwrap();
        drop(keys);
        let busy = Duration::from_secs(30);
        let handing = tokio::spawn(async move {
            assert_eq!(agent.next().await.unwrap().unwrap().into_data(), "date\r");
            // The guest takes nothing for so long, and nothing is read on.
            tokio::time::sleep(busy).await;
            while let Some(Ok(_)) = agent.next().await {}
        });
        let (begun, mut ending) = (tokio::time::Instant::now(), Ending::new().unwrap());
        let end = converse(&mut stream, typed, false, &mut ending).await.unwrap();
        assert!(end.is_none() && begun.elapsed() >= busy + QUIET, "{:?}", begun.elapsed());
        handing.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_guest_does_not_read_keeps_nobody_from_hearing_it_or_from_leaving() {
        let (here, there) = tokio::io::duplex(64);
        let way: Box<dyn Way> = Box::new(here);
        let mut stream = Stream::of(WebSocketStream::from_raw_socket(way, Role::Client, None).await);
        let mut guest = WebSocketStream::from_raw_socket(there, Role::Server, None).await;
        let mut typed = BytesMut::from(&[b'x'; 1000][..]);
        let short = Duration::from_secs(1);
        assert!(timeout(short, stream.next_while(&mut typed)).await.is_err() && stream.is_sending());
        guest.send(Message::Binary("well".into())).await.unwrap();
        let Piece::Bytes(said) = stream.next_while(&mut typed).await.unwrap() else { panic!("it is closed") };
        assert_eq!(said, "well");
        let (read, gone) = tokio::join!(guest.next(), stream.next_while(&mut typed));
        assert_eq!(read.unwrap().unwrap().into_data().len(), 1000, "all of it, and once");
        assert!(matches!(gone, Ok(Piece::Bytes(nothing)) if nothing.is_empty()) && !stream.is_sending());
    }
}

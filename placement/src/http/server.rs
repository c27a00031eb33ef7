//! Connections: bounded, with TLS where there is a certificate.

use std::{fs::File, io::BufReader, path::Path, sync::Arc, time::Duration};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Api,
    guests::{Guests, Place, Watched},
};

/// From the first byte of a request, or from the end of the one before, to the end of its head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// From the beginning of a connection to the end of its first head.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A handshake may take so long.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// What is being answered when the server ends may take so long: longer than a request waits for etcd.
const DRAIN: Duration = Duration::from_secs(12);
/// Accepting fails when the process is out of files; it is tried again after so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The head of a request; a query of some thousand groups fits.
const HEAD_MAX: usize = 256 << 10;

/// Where and how connections are taken.
pub struct ServerConfig {
    /// Bound already.
    pub listener: TcpListener,
    /// With TLS where it is there.
    pub tls: Option<TlsAcceptor>,
    /// So many files may the process have open.
    pub files: usize,
}

/// Reads a certificate chain, its key, and the authorities of clients where those must show a certificate.
///
/// # Errors
/// The file, and what is wrong with it.
pub fn tls_acceptor(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> Result<TlsAcceptor, String> {
    let chain = certificates(certificate)?;
    let key = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("cannot read a private key from {}: {error}", key.display()))?;
    let builder = rustls::ServerConfig::builder();
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
                .build()
                .map_err(|error| format!("{}: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder
        .with_single_cert(chain, key)
        .map_err(|error| format!("certificate {} and its key do not fit: {error}", certificate.display()))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let file = File::open(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(BufReader::new(file)).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("there is no certificate in {}", path.display())),
        Err(error) => Err(format!("cannot read certificates from {}: {error}", path.display())),
    }
}

/// Answers until `stop`, then ends when what is under way has been answered.
pub async fn serve(config: ServerConfig, api: Arc<Api>, stop: CancellationToken) {
    let ServerConfig { listener, tls, files } = config;
    let connections = TaskTracker::new();
    let guests = Guests::new(files);
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Some(place) = guests.admit(peer.ip()) else {
                    tracing::debug!(%peer, "no place for one more connection");
                    continue;
                };
                let (api, tls, stop) = (Arc::clone(&api), tls.clone(), stop.clone());
                connections.spawn(begin(stream, tls, api, place, stop));
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                guests.shed();
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // Whoever comes now asks another replica at once.
    drop(listener);
    connections.close();
    // Whoever is cut off here does, too.
    timeout(DRAIN, connections.wait()).await.ok();
}

async fn begin(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    api: Arc<Api>,
    place: Place,
    stop: CancellationToken,
) {
    // Answers are small, and clients wait for them.
    stream.set_nodelay(true).ok();
    let close = place.close.clone();
    let stream = Watched::new(stream, Arc::clone(&place.activity));
    let served = async {
        let Some(tls) = tls else { return connection(stream, api, &place, stop).await };
        match timeout(HANDSHAKE, tls.accept(stream)).await {
            Ok(Ok(stream)) => connection(stream, api, &place, stop).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        }
    };
    tokio::select! {
        () = served => {}
        () = close.cancelled() => tracing::debug!("a connection made room for another"),
    }
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    api: Arc<Api>,
    place: &Place,
    stop: CancellationToken,
) {
    let asked = CancellationToken::new();
    let (first, activity) = (asked.clone(), Arc::clone(&place.activity));
    let service = service_fn(move |mut request: hyper::Request<_>| {
        first.cancel();
        activity.set_answering(true);
        request.extensions_mut().insert(Arc::clone(&activity));
        let (api, activity) = (Arc::clone(&api), Arc::clone(&activity));
        async move {
            let answer = api.answer(request).await;
            activity.set_answering(false);
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HEAD_MAX);
    let served = builder.serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let outcome = tokio::select! {
        outcome = served.as_mut() => outcome,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
        () = silence(&asked) => return,
    };
    if let Err(error) = outcome {
        tracing::debug!(error, "a connection broke");
    }
}

/// Ends where nothing is asked in time.
async fn silence(asked: &CancellationToken) {
    if timeout(FIRST_HEAD_TIMEOUT, asked.cancelled()).await.is_ok() {
        std::future::pending::<()>().await;
    }
}

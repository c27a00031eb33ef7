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
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Api;

/// Connections at a time; further ones wait to be accepted.
const CONNECTIONS_MAX: usize = 4096;
/// From the first byte of a request, or from the end of the one before, to the end of its head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// A handshake may take so long.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// What is being answered when the server ends may take so long.
const DRAIN: Duration = Duration::from_secs(3);
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

/// Answers until `stop`, then ends what is under way.
pub async fn serve(config: ServerConfig, api: Arc<Api>, stop: CancellationToken) {
    let connections = TaskTracker::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await;
                (place, config.listener.accept().await)
            } => accepted,
        };
        match accepted {
            (Ok(place), Ok((stream, _))) => {
                let (api, tls, stop) = (Arc::clone(&api), config.tls.clone(), stop.clone());
                connections.spawn(async move {
                    begin(stream, tls, api, stop).await;
                    drop(place);
                });
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            (Err(_), _) => break,
        }
    }
    connections.close();
    // Whoever is cut off here asks another replica.
    timeout(DRAIN, connections.wait()).await.ok();
}

async fn begin(stream: TcpStream, tls: Option<TlsAcceptor>, api: Arc<Api>, stop: CancellationToken) {
    // Answers are small, and clients wait for them.
    stream.set_nodelay(true).ok();
    let Some(tls) = tls else { return connection(stream, api, stop).await };
    match timeout(HANDSHAKE, tls.accept(stream)).await {
        Ok(Ok(stream)) => connection(stream, api, stop).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    api: Arc<Api>,
    stop: CancellationToken,
) {
    let service = service_fn(move |request| {
        let api = Arc::clone(&api);
        async move { Ok::<_, std::convert::Infallible>(api.answer(request).await) }
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
    };
    if let Err(error) = outcome {
        tracing::debug!(error, "a connection broke");
    }
}

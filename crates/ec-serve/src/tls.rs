//! TLS, where there is a certificate.

use std::{
    fs::File,
    io::BufReader,
    path::{Path, PathBuf},
    sync::Arc,
};

use ec_runtime::Renewed;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use serde::Deserialize;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// The files of TLS, all PEM, as they stand in a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsSection {
    /// The server's certificate, with those that it needs to be believed.
    pub certificate: PathBuf,
    /// The certificate's key.
    pub key: PathBuf,
    /// The authority of clients' certificates; they must show one then.
    pub client_ca: Option<PathBuf>,
}

/// What of the files cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

/// Takes connections by the files as they are at that moment.
#[derive(Clone)]
pub struct Tls(Arc<Renewed<TlsAcceptor, TlsError>>);

impl Tls {
    /// For one connection.
    pub fn now(&self) -> TlsAcceptor {
        self.0.now()
    }
}

/// The certificate that the other side showed, and proved to have the key of. Requests carry it among their extensions,
/// where `client_ca` asks for one.
#[derive(Debug, Clone)]
pub struct Shown(Arc<CertificateDer<'static>>);

impl Shown {
    pub(crate) fn at<S>(stream: &TlsStream<S>) -> Option<Self> {
        let first = stream.get_ref().1.peer_certificates()?.first()?;
        Some(Self(Arc::new(first.clone().into_owned())))
    }

    /// The names of whose it is.
    pub(crate) fn common_names(&self) -> Vec<String> {
        ec_pki::common_names(&self.0)
    }
}

impl TlsSection {
    /// Reads the files, and again when they are written anew.
    ///
    /// # Errors
    /// The file, and what is wrong with it.
    pub fn open(&self) -> Result<Tls, TlsError> {
        let section = self.clone();
        let files = [Some(&self.certificate), Some(&self.key), self.client_ca.as_ref()];
        let renewed = Renewed::new(files.into_iter().flatten().cloned(), move || section.acceptor())?;
        Ok(Tls(Arc::new(renewed)))
    }

    /// The certificates that these settings name.
    pub fn certificates(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(self.certificate.as_path()).chain(self.client_ca.as_deref())
    }

    fn acceptor(&self) -> Result<TlsAcceptor, TlsError> {
        let chain = certificates(&self.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| {
            TlsError(format!("cannot read a private key from {}: {error}", self.key.display()))
        })?;
        let builder = rustls::ServerConfig::builder();
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path)? {
                    roots
                        .add(certificate)
                        .map_err(|error| TlsError(format!("{}: {error}", path.display())))?;
                }
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
                    .build()
                    .map_err(|error| TlsError(format!("{}: {error}", path.display())))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| {
            TlsError(format!("certificate {} and its key do not fit: {error}", self.certificate.display()))
        })?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file =
        File::open(path).map_err(|error| TlsError(format!("cannot read {}: {error}", path.display())))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(BufReader::new(file)).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(TlsError(format!("there is no certificate in {}", path.display()))),
        Err(error) => Err(TlsError(format!("cannot read certificates from {}: {error}", path.display()))),
    }
}

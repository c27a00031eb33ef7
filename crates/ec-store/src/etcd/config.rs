//! The settings of a connection, checked before anything is sent.

use std::{
    fmt,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use ec_runtime::{beyond_loopback, is_loopback, without_user};
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::net::{TcpStream, lookup_host};

use crate::{StoreError, StoreResult};

/// etcd answers pings that come more often than every 5 s by closing the connection.
const PING_EVERY: Duration = Duration::from_secs(10);
/// With [`PING_EVERY`], a peer that froze is noticed within 15 s by whoever waits for something: a watch, above all.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// A host that swallows packets must not use up a request's whole time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// What C libraries (glibc, musl) say of a name that nobody has. It is told by words alone: a resolver that does not answer is of the same kind.
const NO_SUCH_HOST: [&str; 3] =
    ["Name or service not known", "No address associated with hostname", "Name does not resolve"];

/// How to reach etcd.
#[derive(Clone)]
pub struct EtcdConfig {
    /// `host:port`, or URLs (`http://host:port`, `https://host:port`).
    pub endpoints: Vec<String>,
    /// Who to authenticate as, where etcd wants that.
    pub user: Option<String>,
    /// The user's password.
    pub password: Option<String>,
    /// TLS, where etcd speaks it; `https://` endpoints need it.
    pub tls: Option<EtcdTls>,
    /// How long one request to one endpoint may take.
    pub timeout: Duration,
    /// The keys that user-data is sealed with: see [`crate::Sealed`].
    pub user_data_key: Option<PathBuf>,
}

/// The files of a TLS connection, all PEM.
#[derive(Debug, Clone)]
pub struct EtcdTls {
    /// The authority that signed etcd's certificate.
    pub ca_cert: PathBuf,
    /// Our own certificate and its key, where etcd demands one.
    pub client: Option<(PathBuf, PathBuf)>,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            endpoints: vec!["127.0.0.1:2379".into()],
            user: None,
            password: None,
            tls: None,
            timeout: Duration::from_secs(5),
            user_data_key: None,
        }
    }
}

// By hand, because the password must not reach a log.
impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("endpoints", &self.endpoints.iter().map(|one| without_user(one)).collect::<Vec<_>>())
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "(hidden)"))
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .field("user_data_key", &self.user_data_key)
            .finish()
    }
}

impl EtcdConfig {
    /// Whether whoever wrote these settings down wrote down a secret.
    pub fn holds_secret(&self) -> bool {
        self.password.is_some()
    }

    /// The files with secrets in them that these settings name.
    pub fn secret_files(&self) -> impl Iterator<Item = &Path> {
        let own = self.tls.iter().filter_map(|tls| tls.client.as_ref()).map(|(_, key)| key.as_path());
        own.chain(self.user_data_key.as_deref())
    }

    /// The certificates that these settings name.
    pub fn certificates(&self) -> impl Iterator<Item = &Path> {
        self.tls.iter().flat_map(|tls| {
            let own = tls.client.as_ref().map(|(certificate, _)| certificate.as_path());
            std::iter::once(tls.ca_cert.as_path()).chain(own)
        })
    }

    /// What these settings say in vain: a user in an endpoint.
    pub fn unused(&self) -> Option<String> {
        let endpoint = self.endpoints.iter().find(|endpoint| without_user(endpoint) != **endpoint)?;
        Some(format!(
            "the user in the etcd endpoint of {} is not used: name it in `etcd.user`, and its password in `etcd.password`",
            without_user(endpoint)
        ))
    }

    /// What an etcd means that lets everybody in who reaches it; nothing where it does not, or only this machine
    /// reaches it. One that is spoken to by loopback is looked for at this machine's other addresses, too.
    pub async fn open_door(&self) -> Option<String> {
        if self.user.is_some() || self.tls.as_ref().is_some_and(|tls| tls.client.is_some()) {
            return None;
        }
        let mut far = Vec::new();
        for endpoint in &self.endpoints {
            if !is_loopback(endpoint) {
                far.push(without_user(endpoint));
            }
            far.extend(beyond_loopback(endpoint).await.iter().map(ToString::to_string));
        }
        (!far.is_empty()).then(|| {
            format!(
                "etcd at {} lets in whoever reaches it, and who writes there is root on every node: give it users or client certificates, see docs/security.md",
                far.join(", ")
            )
        })
    }

    /// Whether it is certain that nobody listens at any endpoint: connections are refused there, or nobody has that name. Who is slow,
    /// or cannot be reached at the moment, may be there all the same.
    pub async fn is_nobody(&self) -> bool {
        for endpoint in &self.endpoints {
            let Ok(url) = self.url(endpoint.trim()) else { return false };
            let authority = url.split_once("://").map_or(url.as_str(), |(_, authority)| authority);
            let addresses = match lookup_host(authority).await {
                Ok(addresses) => addresses,
                Err(error) if NO_SUCH_HOST.iter().any(|words| error.to_string().contains(words)) => continue,
                Err(_) => return false,
            };
            for address in addresses {
                let answer = tokio::time::timeout(self.timeout, TcpStream::connect(address)).await;
                let nobody = answer.is_ok_and(|connected| {
                    connected.is_err_and(|error| match error.kind() {
                        ErrorKind::ConnectionRefused => true,
                        // A machine without IPv6 has no `::1`, whatever its list of hosts says.
                        ErrorKind::AddrNotAvailable => address.ip().is_loopback(),
                        _ => false,
                    })
                });
                if !nobody {
                    return false;
                }
            }
        }
        true
    }

    /// User and password must be given together or not at all.
    pub(super) fn check_credentials(&self) -> StoreResult<()> {
        match (&self.user, &self.password) {
            (Some(_), Some(_)) | (None, None) => Ok(()),
            (Some(user), None) => {
                Err(StoreError::Invalid(format!("etcd user `{user}` is given without a password")))
            }
            (None, Some(_)) => Err(StoreError::Invalid("an etcd password is given without a user".into())),
        }
    }

    /// Every endpoint as a URL, with its port checked.
    pub(super) fn urls(&self) -> StoreResult<Vec<String>> {
        if self.endpoints.is_empty() {
            return Err(StoreError::Invalid("no etcd endpoint is given".into()));
        }
        self.endpoints.iter().map(|endpoint| self.url(endpoint.trim())).collect()
    }

    fn url(&self, endpoint: &str) -> StoreResult<String> {
        let told = without_user(endpoint);
        let invalid = |why: &str| StoreError::Invalid(format!("etcd endpoint `{told}` {why}"));
        let (scheme, rest) = endpoint.split_once("://").map_or((None, endpoint), |(s, r)| (Some(s), r));
        match (scheme, &self.tls) {
            (Some("http"), Some(_)) => {
                return Err(invalid("is http:// while TLS files are given; wanted https://"));
            }
            (Some("https"), None) => return Err(invalid("is https:// but no CA certificate is given")),
            (None | Some("http" | "https"), _) => {}
            (Some(_), _) => return Err(invalid("is neither http:// nor https://")),
        }
        // Nobody uses a user there, which `unused` tells.
        let authority = rest.rsplit_once('@').map_or(rest, |(_, host)| host).trim_end_matches('/');
        let port = authority.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
        if port.and_then(|port| port.parse::<u16>().ok()).is_none_or(|port| port == 0) {
            return Err(invalid("is not of the form `host:port`"));
        }
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        Ok(format!("{scheme}://{authority}"))
    }

    /// What the client library is told. Without credentials, because with them it would connect at once.
    pub(super) async fn options(&self, require_leader: bool) -> StoreResult<ConnectOptions> {
        let connect_timeout = CONNECT_TIMEOUT.min(self.timeout * 3 / 4);
        let options = ConnectOptions::new()
            .with_connect_timeout(connect_timeout)
            .with_keep_alive(PING_EVERY, PING_TIMEOUT)
            // Nor more than two pings while nothing is under way: it closes such a connection, and what is just being sent is lost.
            .with_keep_alive_while_idle(false)
            .with_require_leader(require_leader)
            .with_auto_token_refresh(true);
        Ok(match &self.tls {
            Some(tls) => options.with_tls(tls.options().await?),
            None => options,
        })
    }
}

impl EtcdTls {
    async fn options(&self) -> StoreResult<TlsOptions> {
        let ca = read_certificates(&self.ca_cert, "CA certificate").await?;
        let options = TlsOptions::new().ca_certificate(Certificate::from_pem(ca));
        let Some((certificate, key)) = &self.client else { return Ok(options) };
        let certificate = read_certificates(certificate, "client certificate").await?;
        let key_pem = read(key, "client key").await?;
        PrivateKeyDer::from_pem_slice(&key_pem).map_err(|error| {
            StoreError::Invalid(format!("etcd client key {} is not usable: {error}", key.display()))
        })?;
        Ok(options.identity(Identity::from_pem(certificate, key_pem)))
    }
}

async fn read(path: &Path, what: &str) -> StoreResult<Vec<u8>> {
    tokio::fs::read(path).await.map_err(|error| {
        StoreError::Invalid(format!("failed to read the etcd {what} {}: {error}", path.display()))
    })
}

/// Reads a file and sees to it that it holds a certificate: an empty trust store is accepted silently
/// by the layers below, and then refuses every server.
async fn read_certificates(path: &Path, what: &str) -> StoreResult<Vec<u8>> {
    let pem = read(path, what).await?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certificates {
        Ok(found) if !found.is_empty() => Ok(pem),
        Ok(_) => Err(StoreError::Invalid(format!("etcd {what} {} holds no certificate", path.display()))),
        Err(error) => {
            Err(StoreError::Invalid(format!("etcd {what} {} is not usable: {error}", path.display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(endpoint: &str) -> EtcdConfig {
        EtcdConfig { endpoints: vec![endpoint.into()], ..EtcdConfig::default() }
    }

    #[test]
    fn endpoints_may_be_bare_or_urls() {
        for (given, url) in [
            ("10.0.0.1:2379", "http://10.0.0.1:2379"),
            ("http://etcd.example:2379/", "http://etcd.example:2379"),
            (" [::1]:2379", "http://[::1]:2379"),
        ] {
            assert_eq!(config(given).urls().unwrap(), [url]);
        }
    }

    #[test]
    fn an_endpoint_that_cannot_work_is_refused_by_name() {
        for (given, why) in [
            ("etcd.example", "form `host:port`"),
            ("etcd.example:0", "form `host:port`"),
            (":2379", "form `host:port`"),
            ("ftp://a:1", "neither http"),
            ("https://a:1", "no CA certificate"),
        ] {
            let error = config(given).urls().unwrap_err().to_string();
            assert!(error.contains(given) && error.contains(why), "{error}");
        }
        assert!(EtcdConfig { endpoints: vec![], ..EtcdConfig::default() }.urls().is_err());
    }

    #[test]
    fn a_password_in_an_endpoint_is_not_used_and_not_told() {
        assert_eq!(config("http://a:1").unused(), None);
        for given in ["http://root:hunter2@a:1", "root:hunter2@a:1"] {
            assert_eq!(config(given).urls().unwrap(), ["http://a:1"]);
            let told = config(given).unused().unwrap();
            assert!(told.contains("of a:1 is") || told.contains("of http://a:1 is"), "{told}");
            assert!(told.contains("etcd.user") && !told.contains("hunter2"), "{told}");
        }
        let error = config("http://root:hunter2@a").urls().unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn debug_hides_the_password() {
        let config =
            EtcdConfig { user: Some("u".into()), password: Some("hunter2".into()), ..EtcdConfig::default() };
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[tokio::test]
    async fn missing_and_useless_certificate_files_are_named() {
        let tls = |ca: &Path| EtcdConfig {
            tls: Some(EtcdTls { ca_cert: ca.into(), client: None }),
            ..EtcdConfig::default()
        };
        let error = tls(Path::new("/nowhere/ca.pem")).options(false).await.unwrap_err().to_string();
        assert!(error.contains("/nowhere/ca.pem") && error.contains("No such file"), "{error}");

        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no pem at all").unwrap();
        let error = tls(file.path()).options(false).await.unwrap_err().to_string();
        assert!(error.contains("holds no certificate"), "{error}");
    }

    #[tokio::test]
    async fn only_where_nobody_listens_is_nobody() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        // It takes connections and says nothing.
        assert!(!config(&format!("127.0.0.1:{port}")).is_nobody().await);
        assert!(!config(&format!("http://localhost:{port}/")).is_nobody().await);
        drop(listener);
        assert!(config(&format!("127.0.0.1:{port}")).is_nobody().await);
        assert!(config(&format!("http://localhost:{port}/")).is_nobody().await);
        assert!(!config("ftp://127.0.0.1:1").is_nobody().await, "nobody was looked for");
    }

    #[tokio::test]
    async fn only_an_etcd_that_others_reach_and_nobody_guards_is_told() {
        let etcd =
            |endpoint: &str| EtcdConfig { endpoints: vec![endpoint.to_owned()], ..EtcdConfig::default() };
        assert_eq!(etcd("[::1]:1").open_door().await, None);
        assert!(etcd("10.0.0.1:2379").open_door().await.is_some_and(|line| line.contains("10.0.0.1:2379")));
        let guarded = EtcdConfig { user: Some("u".into()), ..etcd("etcd1:2379") };
        assert_eq!(guarded.open_door().await, None);
    }
}

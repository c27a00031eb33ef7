//! One exchange with the server: where it is, who we are, and in which version we speak.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use ec_model::RequestId;
use ec_runtime::{Renewed, is_loopback, without_user};
use reqwest::{Certificate, Identity, Method, StatusCode, Url, header};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::{
    Answer, Conflict, PlacementError, PlacementResult, Transport,
    transport::{Http, Request, chain},
};

/// The newest version that we know, of major 1. Every conversation begins with it.
pub(crate) const NEWEST: u32 = 39;
/// The oldest that can do what must be done: a claim for a consumer that must not exist (1.28, OpenStack Rocky).
pub(crate) const OLDEST: u32 = 28;
/// A server may be replaced by a newer one, or be several of which some are newer: after so long the newest version is tried again.
const TRIED_AGAIN: Duration = Duration::from_secs(600);
/// From here on a claim says which provider serves which group.
const MAPPINGS: u32 = 34;
/// From here on a claim says what kind of consumer it is for.
const CONSUMER_TYPE: u32 = 38;

/// Where placement is and how to be let in.
#[derive(Clone)]
pub struct PlacementConfig {
    /// Base URL.
    pub endpoint: String,
    /// Sent as `X-Auth-Token`.
    pub token: String,
    /// Where the token stands instead of in `token`. Read for every request, so that it may change.
    pub token_file: Option<PathBuf>,
    /// The authority that signed the server's certificate (PEM); none: the system's own.
    pub ca_cert: Option<PathBuf>,
    /// Our own certificate and its key (PEM), where the server demands one.
    pub client_cert: Option<(PathBuf, PathBuf)>,
    /// For one request, from begin to end.
    pub timeout: Duration,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self {
            endpoint: "http://localhost:8080".to_owned(),
            // What OpenStack Placement's noauth2 strategy takes for an administrator.
            token: "admin".to_owned(),
            token_file: None,
            ca_cert: None,
            client_cert: None,
            // A busy placement on SQLite takes seconds for a claim.
            timeout: Duration::from_secs(30),
        }
    }
}

impl PlacementConfig {
    /// Whether whoever wrote these settings down wrote down a secret. The default token is none: it only says
    /// that nobody is asked for one.
    pub fn holds_secret(&self) -> bool {
        let in_endpoint = without_user(&self.endpoint) != self.endpoint;
        in_endpoint || self.token_file.is_none() && self.token != Self::default().token
    }

    /// The files with secrets in them that these settings name.
    pub fn secret_files(&self) -> impl Iterator<Item = &Path> {
        let key = self.client_cert.as_ref().map(|(_, key)| key.as_path());
        self.token_file.as_deref().into_iter().chain(key)
    }

    /// The certificates that these settings name.
    pub fn certificates(&self) -> impl Iterator<Item = &Path> {
        let own = self.client_cert.as_ref().map(|(certificate, _)| certificate);
        self.ca_cert.iter().chain(own).map(PathBuf::as_path)
    }

    fn invalid(&self, why: &str) -> PlacementError {
        let endpoint = without_user(&self.endpoint);
        PlacementError::Invalid(format!("placement.endpoint `{endpoint}` is not usable: {why}"))
    }

    /// What a placement means that believes everybody who reaches it; nothing where it does not, or only this
    /// machine reaches it.
    pub fn open_door(&self) -> Option<String> {
        let asks = self.token_file.is_some() || self.client_cert.is_some() || self.holds_secret();
        (!asks && !is_loopback(&self.endpoint)).then(|| {
            format!(
                "placement at {} lets in whoever says `admin`: give it tokens, see docs/security.md",
                without_user(&self.endpoint)
            )
        })
    }
}

// By hand, because the token must not reach a log.
impl std::fmt::Debug for PlacementConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlacementConfig")
            .field("endpoint", &without_user(&self.endpoint))
            .field("token_file", &self.token_file)
            .field("ca_cert", &self.ca_cert)
            .field("client_cert", &self.client_cert)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// Who connects, with the certificates as they are now.
fn client(config: &PlacementConfig, plain: bool) -> PlacementResult<reqwest::Client> {
    let mut builder = reqwest::Client::builder()
        .timeout(config.timeout)
        .connect_timeout(config.timeout.min(Duration::from_secs(3)))
        // Whoever is behind a redirect would be given the token, and be believed. So would a proxy that the environment names.
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("etcd-compute/", env!("CARGO_PKG_VERSION")));
    if plain {
        // Loading the system's certificates costs milliseconds that a plain connection never needs.
        builder = builder.tls_certs_only([]);
    } else if let Some(path) = &config.ca_cert {
        builder = builder.tls_certs_only(authorities(path)?);
    }
    if let Some((certificate, key)) = &config.client_cert {
        builder = builder.identity(identity(certificate, key)?);
    }
    builder.build().map_err(|error| config.invalid(&chain(&error)))
}

/// A server, and what was learned of it. Clones share that.
#[derive(Clone)]
pub(crate) struct Wire {
    transport: Arc<dyn Transport>,
    base: Url,
    /// The same for messages.
    pub(crate) told: String,
    token: Arc<Token>,
    /// The version that the server speaks, as far as we know.
    version: Arc<AtomicU32>,
    /// Since when that is not the newest.
    older_since: Arc<Mutex<Option<Instant>>>,
    /// So many seconds its clock is ahead of ours, as far as we know.
    ahead: Arc<Mutex<Option<i64>>>,
    /// On whose behalf we ask.
    request_id: Option<RequestId>,
}

impl Wire {
    pub(crate) fn new(config: &PlacementConfig) -> PlacementResult<Self> {
        let mut base = Url::parse(&config.endpoint).map_err(|error| config.invalid(&error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") || base.host().is_none() {
            return Err(config.invalid("wanted for example http://localhost:8080"));
        }
        // Url::join replaces the last segment unless the path ends with a slash.
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        let plain = base.scheme() == "http";
        if plain && (config.ca_cert.is_some() || config.client_cert.is_some()) {
            return Err(config.invalid("certificates are given, and http:// uses none; wanted https://"));
        }
        let key = config.client_cert.as_ref().map(|(_, key)| key.clone());
        let files: Vec<_> = config.certificates().map(Path::to_owned).chain(key).collect();
        let of = config.clone();
        let http = Renewed::new(files, move || client(&of, plain))?;
        let token = Arc::new(Token::new(config)?);
        Ok(Self {
            transport: Arc::new(Http(http)),
            told: without_user(base.as_str()),
            base,
            token,
            version: Arc::new(AtomicU32::new(NEWEST)),
            older_since: Arc::default(),
            ahead: Arc::default(),
            request_id: None,
        })
    }

    /// The same conversation by another way than a connection of its own.
    pub(crate) fn over(self, transport: Arc<dyn Transport>) -> Self {
        Self { transport, ..self }
    }

    /// The same server by a way that goes through something else first.
    pub(crate) fn through(self, wrap: impl FnOnce(Arc<dyn Transport>) -> Arc<dyn Transport>) -> Self {
        let transport = wrap(Arc::clone(&self.transport));
        self.over(transport)
    }

    /// The same conversation on behalf of a request, which the server is told.
    pub(crate) fn on_behalf(self, request_id: Option<RequestId>) -> Self {
        Self { request_id, ..self }
    }

    /// The minor version of 1 that is spoken, as far as is known.
    pub(crate) fn version(&self) -> u32 {
        self.version.load(Ordering::Relaxed)
    }

    /// So many seconds the server's clock is ahead of ours, as its last answers tell.
    pub(crate) fn ahead(&self) -> Option<i64> {
        *self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(impl AsRef<str>, impl AsRef<str>)],
    ) -> PlacementResult<T> {
        let mut url = self.url(path)?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let answer = self.exchange(path, Method::GET, url, None).await?;
        self.parse(&answer)
    }

    /// A write. Of its body the server gets what its version knows.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> PlacementResult<Vec<u8>> {
        let url = self.url(path)?;
        self.exchange(path, method, url, body).await
    }

    pub(crate) fn parse<T: DeserializeOwned>(&self, body: &[u8]) -> PlacementResult<T> {
        serde_json::from_slice(body).map_err(|error| {
            PlacementError::Refused(format!(
                "{} answers something that is not the Placement API: {error}",
                self.told
            ))
        })
    }

    fn url(&self, path: &str) -> PlacementResult<Url> {
        self.base
            .join(path)
            .map_err(|error| PlacementError::Invalid(format!("`{path}` is not a path: {error}")))
    }

    /// Asks in the version that is known, and again in the server's own where it does not speak that.
    async fn exchange(
        &self,
        path: &str,
        method: Method,
        url: Url,
        body: Option<&serde_json::Value>,
    ) -> PlacementResult<Vec<u8>> {
        let version = self.spoken();
        let Answer { status, body: answer, .. } = self.ask(&method, &url, body, version).await?;
        if status != StatusCode::NOT_ACCEPTABLE {
            return self.judge(path, &method, status, answer);
        }
        let theirs = self.negotiated(&answer)?;
        let Answer { status, body: answer, .. } = self.ask(&method, &url, body, theirs).await?;
        self.judge(path, &method, status, answer)
    }

    /// The version to speak now.
    fn spoken(&self) -> u32 {
        let mut older_since = self.older_since.lock().unwrap_or_else(PoisonError::into_inner);
        if older_since.take_if(|since| since.elapsed() >= TRIED_AGAIN).is_some() {
            self.version.store(NEWEST, Ordering::Relaxed);
        }
        self.version()
    }

    async fn ask(
        &self,
        method: &Method,
        url: &Url,
        body: Option<&serde_json::Value>,
        version: u32,
    ) -> PlacementResult<Answer> {
        let mut headers = header::HeaderMap::new();
        headers.insert("x-auth-token", self.token.now());
        let spoken = header::HeaderValue::from_str(&format!("placement 1.{version}"));
        headers.insert("openstack-api-version", spoken.map_err(|error| self.unreachable(chain(&error)))?);
        headers.insert(header::ACCEPT, header::HeaderValue::from_static("application/json"));
        if let Some(id) = self.request_id
            && let Ok(id) = header::HeaderValue::from_str(&id.to_string())
        {
            headers.insert("x-openstack-request-id", id);
        }
        let body = body.map(|body| as_of(version, body));
        let request = Request { method: method.clone(), url: url.clone(), headers, body };
        let answer = self.transport.exchange(request).await.map_err(|why| self.unreachable(why))?;
        if let Some(ahead) = answer.ahead {
            *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = Some(ahead);
        }
        Ok(answer)
    }

    /// The newest version that both speak, from the answer of a server that is older than the one we spoke.
    fn negotiated(&self, body: &[u8]) -> PlacementResult<u32> {
        let speaks = speaks(body).ok_or_else(|| {
            PlacementError::Refused(format!(
                "{} does not speak version 1.{} of the Placement API, and does not say which it does",
                self.told,
                self.version()
            ))
        })?;
        if speaks < OLDEST {
            return Err(PlacementError::TooOld { endpoint: self.told.clone(), speaks, oldest: OLDEST });
        }
        let version = speaks.min(NEWEST);
        tracing::debug!(version = format!("1.{version}"), "placement is older than we are");
        self.version.store(version, Ordering::Relaxed);
        *self.older_since.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(version)
    }

    fn judge(
        &self,
        path: &str,
        method: &Method,
        status: StatusCode,
        body: Vec<u8>,
    ) -> PlacementResult<Vec<u8>> {
        if status.is_success() {
            // Whatever else stands in the way may answer anything with 200, and nothing would be claimed.
            let is_claim = path.starts_with("allocations") || path == RESHAPER;
            if is_claim && *method != Method::GET && status != StatusCode::NO_CONTENT {
                return Err(PlacementError::Refused(format!(
                    "{} answers a claim with HTTP {status}, which is not the Placement API",
                    self.told
                )));
            }
            return Ok(body);
        }
        let told = detail(&body);
        // Nor is whatever else stands in the way believed that something is gone: a claim that it knows nothing of would be held for ever.
        if status == StatusCode::NOT_FOUND && told.is_none() {
            return Err(self.unreachable(format!(
                "HTTP {status}, not in the words of the Placement API: is `placement.endpoint` the API's own URL?"
            )));
        }
        let detail = told.unwrap_or_else(|| match status.is_redirection() {
            true => format!(
                "HTTP {status}, and no redirect is followed: is `placement.endpoint` the API's own URL?"
            ),
            false => format!("HTTP {status}"),
        });
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => PlacementError::Denied {
                endpoint: self.told.clone(),
                status: status.as_u16(),
                setting: self.token.setting(),
            },
            StatusCode::NOT_FOUND => {
                PlacementError::NotFound(path.replacen("resource_providers/", "resource provider ", 1))
            }
            StatusCode::CONFLICT => {
                // All else says what has changed, or what changes at this moment.
                let does_not_fit = code(&body).is_some_and(|code| code == UNDEFINED);
                PlacementError::Conflict(Conflict { why: detail, does_not_fit })
            }
            status if status.is_server_error() => self.unreachable(format!("HTTP {status}: {detail}")),
            _ if self.version() < NEWEST => PlacementError::Refused(format!(
                "{detail} (it speaks version 1.{} of the API, the newest is 1.{NEWEST})",
                self.version()
            )),
            _ => PlacementError::Refused(detail),
        })
    }

    fn unreachable(&self, detail: String) -> PlacementError {
        PlacementError::Unreachable { endpoint: self.told.clone(), detail }
    }
}

/// Who we are.
enum Token {
    /// It stands in the configuration.
    Text(header::HeaderValue),
    /// It stands in a file; with what was read last, for the moment at which somebody writes it anew.
    File(PathBuf, Mutex<header::HeaderValue>),
}

impl Token {
    fn new(config: &PlacementConfig) -> PlacementResult<Self> {
        match &config.token_file {
            None => Ok(Self::Text(token_value(&config.token, "placement.token")?)),
            Some(path) => Ok(Self::File(path.clone(), Mutex::new(read_token(path)?))),
        }
    }

    fn now(&self) -> header::HeaderValue {
        match self {
            Self::Text(value) => value.clone(),
            Self::File(path, last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                match read_token(path) {
                    Ok(value) => *last = value,
                    Err(error) => tracing::warn!(%error, "the token read last is used"),
                }
                last.clone()
            }
        }
    }

    /// Where to look when the server refuses it.
    fn setting(&self) -> String {
        match self {
            Self::Text(_) => "placement.token".to_owned(),
            Self::File(path, _) => format!("placement.token_file {}", path.display()),
        }
    }
}

fn read_token(path: &Path) -> PlacementResult<header::HeaderValue> {
    let what = format!("placement.token_file {}", path.display());
    let text = fs::read_to_string(path)
        .map_err(|error| PlacementError::Invalid(format!("{what} cannot be read: {error}")))?;
    match text.trim() {
        "" => Err(PlacementError::Invalid(format!("{what} is empty"))),
        token => token_value(token, &what),
    }
}

fn token_value(text: &str, what: &str) -> PlacementResult<header::HeaderValue> {
    let mut value = header::HeaderValue::from_str(text)
        .map_err(|_| PlacementError::Invalid(format!("{what} has characters that no header may have")))?;
    value.set_sensitive(true);
    Ok(value)
}

fn read_pem(path: &Path, key: &str) -> PlacementResult<Vec<u8>> {
    fs::read(path).map_err(|error| {
        PlacementError::Invalid(format!("placement.{key} {} cannot be read: {error}", path.display()))
    })
}

fn authorities(path: &Path) -> PlacementResult<Vec<Certificate>> {
    let wrong = |why: &str| {
        PlacementError::Invalid(format!("placement.ca_cert {} is not usable: {why}", path.display()))
    };
    let found =
        Certificate::from_pem_bundle(&read_pem(path, "ca_cert")?).map_err(|error| wrong(&chain(&error)))?;
    // With none the connection would refuse every server and not say why.
    if found.is_empty() { Err(wrong("it holds no certificate")) } else { Ok(found) }
}

fn identity(certificate: &Path, key: &Path) -> PlacementResult<Identity> {
    let mut pem = read_pem(certificate, "cert_cert")?;
    pem.push(b'\n');
    pem.extend(read_pem(key, "cert_key")?);
    Identity::from_pem(&pem).map_err(|error| {
        PlacementError::Invalid(format!(
            "placement.cert_cert {} and cert_key {} are not usable: {}",
            certificate.display(),
            key.display(),
            chain(&error)
        ))
    })
}

/// The code of errors that have none of their own; of claims, of those for which there is no room.
const UNDEFINED: &str = "placement.undefined_code";

/// Where inventories and claims are changed in one write.
pub(crate) const RESHAPER: &str = "reshaper";

/// The body without what a version does not know yet, which it would refuse.
fn as_of(version: u32, body: &serde_json::Value) -> serde_json::Value {
    let mut body = body.clone();
    if let Some(fields) = body.as_object_mut() {
        if version < MAPPINGS {
            fields.remove("mappings");
        }
        if version < CONSUMER_TYPE {
            fields.remove("consumer_type");
            // Of several consumers each says its own.
            let of_many = fields.get_mut("allocations").and_then(|many| many.as_object_mut());
            for one in of_many.into_iter().flat_map(|many| many.values_mut()) {
                one.as_object_mut().map(|fields| fields.remove("consumer_type"));
            }
        }
    }
    body
}

/// The newest minor version of 1, from the error document of a version that is not spoken.
fn speaks(body: &[u8]) -> Option<u32> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    body["errors"][0]["max_version"].as_str()?.strip_prefix("1.")?.parse().ok()
}

/// The `code` of the API's error document.
fn code(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(body["errors"][0]["code"].as_str()?.to_owned())
}

/// The `detail` of the API's error document, in one line and without webob's preamble.
fn detail(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    let text = body["errors"][0]["detail"].as_str()?;
    let text = text.rsplit("\n\n").find(|part| !part.trim().is_empty()).unwrap_or(text);
    Some(text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(500).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_detail_of_an_error_is_one_line_without_preamble() {
        let body = br#"{"errors":[{"status":400,"title":"Bad Request","detail":"The server could not comply with the request since it is either malformed or otherwise incorrect.\n\n No such trait(s): NOPE.  ","request_id":"x"}]}"#;
        assert_eq!(detail(body).unwrap(), "No such trait(s): NOPE.");
        assert_eq!(detail(b"<html>"), None);
    }

    /// Keeps what it was asked, and answers nothing to it.
    #[derive(Default)]
    struct Heard(Mutex<Vec<header::HeaderMap>>);

    #[async_trait::async_trait]
    impl Transport for Heard {
        async fn exchange(&self, request: Request) -> Result<Answer, String> {
            self.0.lock().unwrap().push(request.headers);
            Ok(Answer { status: StatusCode::NO_CONTENT, body: Vec::new(), ahead: None })
        }
    }

    #[tokio::test]
    async fn whoever_asks_on_behalf_of_a_request_names_it_and_nobody_else_does() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let heard = Arc::new(Heard::default());
        let own =
            Wire::new(&PlacementConfig::default()).unwrap().over(Arc::clone(&heard) as Arc<dyn Transport>);
        let id: RequestId = "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        for wire in [own.clone(), own.clone().on_behalf(Some(id)), own] {
            wire.send(Method::DELETE, "allocations/x", None).await.unwrap();
        }
        let heard = heard.0.lock().unwrap();
        let named = |headers: &header::HeaderMap| {
            headers.get("x-openstack-request-id").map(|id| id.to_str().unwrap().to_owned())
        };
        assert_eq!(heard.iter().map(named).collect::<Vec<_>>(), [None, Some(id.to_string()), None]);
    }

    /// Knows of nothing, in these words.
    struct KnowsNothing(&'static str);

    #[async_trait::async_trait]
    impl Transport for KnowsNothing {
        async fn exchange(&self, _: Request) -> Result<Answer, String> {
            Ok(Answer { status: StatusCode::NOT_FOUND, body: self.0.into(), ahead: None })
        }
    }

    #[tokio::test]
    async fn only_placement_itself_is_believed_that_there_is_no_such_thing() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let own = Wire::new(&PlacementConfig::default()).unwrap();
        for (body, is_believed) in [
            // OpenStack's own, and eplacement's.
            (
                r#"{"errors":[{"status":404,"detail":"The resource could not be found.\n\n No such.  "}]}"#,
                true,
            ),
            (r#"{"errors":[{"status":404,"detail":"The resource could not be found."}]}"#, true),
            // A proxy's.
            ("<html><head><title>404 Not Found</title></head></html>", false),
            (r#"{"message":"no Route matched with those values"}"#, false),
            ("", false),
        ] {
            let wire = own.clone().over(Arc::new(KnowsNothing(body)));
            let error = wire.send(Method::DELETE, "allocations/x", None).await.unwrap_err();
            assert_eq!(matches!(error, PlacementError::NotFound(_)), is_believed, "{body}: {error}");
            assert_eq!(error.is_transient(), !is_believed, "{body}: {error}");
        }
    }

    /// Refuses with 409, in these words.
    struct Refuses(&'static str);

    #[async_trait::async_trait]
    impl Transport for Refuses {
        async fn exchange(&self, _: Request) -> Result<Answer, String> {
            Ok(Answer { status: StatusCode::CONFLICT, body: self.0.into(), ahead: None })
        }
    }

    #[tokio::test]
    async fn what_does_not_fit_is_told_from_what_has_changed() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let own = Wire::new(&PlacementConfig::default()).unwrap();
        for (body, does_not_fit) in [
            // OpenStack's own, and eplacement's.
            (
                r#"{"errors":[{"status":409,"code":"placement.undefined_code","detail":"There was a conflict when trying to complete your request.\n\n Unable to allocate inventory: Unable to create allocation for 'VCPU' on resource provider 'x'. The requested amount would exceed the capacity.  "}]}"#,
                true,
            ),
            (
                r#"{"errors":[{"status":409,"code":"placement.concurrent_update","detail":"consumer generation conflict - expected 1 but got None"}]}"#,
                false,
            ),
            (r#"{"errors":[{"status":409,"detail":"whatever"}]}"#, false),
            ("<html>", false),
        ] {
            let wire = own.clone().over(Arc::new(Refuses(body)));
            let error = wire.send(Method::PUT, "allocations/x", None).await.unwrap_err();
            let PlacementError::Conflict(conflict) = error else { panic!("{body}: {error}") };
            assert_eq!(conflict.does_not_fit, does_not_fit, "{body}");
        }
    }

    /// Speaks up to this version.
    struct Speaks(AtomicU32);

    #[async_trait::async_trait]
    impl Transport for Speaks {
        async fn exchange(&self, request: Request) -> Result<Answer, String> {
            let newest = self.0.load(Ordering::Relaxed);
            let asked = request.headers["openstack-api-version"].to_str().unwrap().to_owned();
            let is_spoken = asked.strip_prefix("placement 1.").unwrap().parse::<u32>().unwrap() <= newest;
            let status = if is_spoken { StatusCode::NO_CONTENT } else { StatusCode::NOT_ACCEPTABLE };
            let body = json!({"errors": [{"max_version": format!("1.{newest}")}]}).to_string().into_bytes();
            Ok(Answer { status, body, ahead: None })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_has_become_newer_is_spoken_to_as_such_after_a_while() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let server = Arc::new(Speaks(AtomicU32::new(31)));
        let wire =
            Wire::new(&PlacementConfig::default()).unwrap().over(Arc::clone(&server) as Arc<dyn Transport>);
        let spoken = async || {
            wire.send(Method::DELETE, "allocations/x", None).await.unwrap();
            wire.version()
        };
        assert_eq!(spoken().await, 31);
        tokio::time::advance(TRIED_AGAIN).await;
        assert_eq!(spoken().await, 31, "it is as it was");
        server.0.store(NEWEST, Ordering::Relaxed);
        assert_eq!(spoken().await, 31, "it is not asked each time");
        tokio::time::advance(TRIED_AGAIN).await;
        assert_eq!(spoken().await, NEWEST);
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_its_key() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let wrong = |config: PlacementConfig| match Wire::new(&config) {
            Err(PlacementError::Invalid(why)) => why,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("{config:?} was taken"),
        };
        for endpoint in ["", "localhost:8080", "ftp://x", "http://"] {
            wrong(PlacementConfig { endpoint: endpoint.into(), ..PlacementConfig::default() });
        }
        let why =
            wrong(PlacementConfig { endpoint: "ftp://u:hunter2@x".into(), ..PlacementConfig::default() });
        assert!(why.contains("`ftp://x`"), "{why}");
        let https = || PlacementConfig { endpoint: "https://p".into(), ..PlacementConfig::default() };
        let nowhere = PathBuf::from("/nowhere/x.pem");
        let why = wrong(PlacementConfig { ca_cert: Some(nowhere.clone()), ..https() });
        assert!(why.contains("placement.ca_cert /nowhere/x.pem cannot be read"), "{why}");
        let empty = std::env::current_exe().unwrap().with_file_name("no-certificate.pem");
        fs::write(&empty, "nothing").unwrap();
        let why = wrong(PlacementConfig { ca_cert: Some(empty.clone()), ..https() });
        assert!(why.contains("holds no certificate"), "{why}");
        let why = wrong(PlacementConfig { client_cert: Some((empty.clone(), empty.clone())), ..https() });
        assert!(why.contains("cert_key"), "{why}");
        let why = wrong(PlacementConfig { token_file: Some(nowhere.clone()), ..https() });
        assert!(why.contains("placement.token_file /nowhere/x.pem cannot be read"), "{why}");
        let why = wrong(PlacementConfig { ca_cert: Some(nowhere), ..PlacementConfig::default() });
        assert!(why.contains("wanted https://"), "{why}");
    }

    #[test]
    fn a_body_is_sent_without_what_its_reader_does_not_know() {
        let body = json!({"mappings": {}, "consumer_type": "INSTANCE", "project_id": "p"});
        assert_eq!(as_of(39, &body), body);
        assert_eq!(as_of(37, &body), json!({"mappings": {}, "project_id": "p"}));
        assert_eq!(as_of(28, &body), json!({"project_id": "p"}));
        let many = json!({"allocations": {"c": {"consumer_type": "INSTANCE", "user_id": "u"}}});
        assert_eq!(as_of(38, &many), many);
        assert_eq!(as_of(37, &many), json!({"allocations": {"c": {"user_id": "u"}}}));
    }
}

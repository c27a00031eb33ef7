//! From a request to its answer: who asks, may they, what do they get.

use std::{fmt::Display, net::IpAddr, sync::Arc, time::Instant};

use hyper::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use jiff::Timestamp;
use serde_json::Value;

use crate::{Account, Caller, InstanceRecord, account::Outcome, ec2, openstack, token::Tokens};

/// Whoever passes requests on says so here; it must not be given a token for its user.
const FORWARDED: &str = "x-forwarded-for";
const TOKEN: &str = "x-aws-ec2-metadata-token";
const TOKEN_TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";
const TTL_MAX: i64 = 21_600;

/// What is found at a path.
pub(crate) enum Content {
    Text(String),
    Json(Value),
    Bytes(Vec<u8>),
}

type Lookup = dyn Fn(&Caller) -> Result<Option<InstanceRecord>, String> + Send + Sync;

/// Answers requests. Clones are the same service.
#[derive(Clone)]
pub struct MetadataService {
    inner: Arc<Inner>,
    account: Arc<Account>,
}

struct Inner {
    lookup: Box<Lookup>,
    tokens: Tokens,
}

impl MetadataService {
    /// A service that learns from `lookup` which instance asks. It may block.
    pub fn new<E: Display>(
        lookup: impl Fn(&Caller) -> Result<Option<InstanceRecord>, E> + Send + Sync + 'static,
    ) -> Self {
        let lookup = move |caller: &Caller| lookup(caller).map_err(|error| error.to_string());
        let inner = Inner { lookup: Box::new(lookup), tokens: Tokens::new() };
        Self { inner: Arc::new(inner), account: Arc::default() }
    }

    /// The same service, which counts there what it was asked.
    #[must_use]
    pub fn counting(self, account: Arc<Account>) -> Self {
        Self { account, ..self }
    }

    /// The answer to a request of `caller`. Blocks as the lookup does.
    pub fn answer<B>(&self, caller: &Caller, request: &Request<B>) -> Response<Vec<u8>> {
        let began = Instant::now();
        let (outcome, response) = self.judge(caller, request);
        self.account.asked(outcome, began.elapsed());
        response
    }

    fn judge<B>(&self, caller: &Caller, request: &Request<B>) -> (Outcome, Response<Vec<u8>>) {
        let peer = caller.address;
        let record = match (self.inner.lookup)(caller) {
            Ok(Some(record)) => record,
            Ok(None) => {
                tracing::debug!(%peer, "a stranger asks");
                return (Outcome::Stranger, status(StatusCode::NOT_FOUND));
            }
            Err(error) => {
                tracing::warn!(%peer, error, "failed to look up who asks");
                return (Outcome::Failed, status(StatusCode::INTERNAL_SERVER_ERROR));
            }
        };
        let response = self.answer_instance(&record, peer, request);
        tracing::debug!(
            instance = %record.instance, method = %request.method(), path = request.uri().path(),
            status = response.status().as_u16(), "answered"
        );
        (Outcome::of_known(response.status()), response)
    }

    fn answer_instance<B>(
        &self,
        record: &InstanceRecord,
        peer: IpAddr,
        request: &Request<B>,
    ) -> Response<Vec<u8>> {
        // Guests write paths with slashes doubled and at the end; names have none in them.
        let path: Vec<&str> = request.uri().path().split('/').filter(|part| !part.is_empty()).collect();
        let now = Timestamp::now().as_second();
        if path == ["latest", "api", "token"] {
            return match *request.method() {
                Method::PUT => self.issue(record, request.headers(), now),
                _ => not_allowed("PUT"),
            };
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return not_allowed("GET, HEAD");
        }
        let let_in = match request.headers().get(TOKEN) {
            Some(token) => self.inner.tokens.holds(record.instance, token.as_bytes(), now),
            None => !record.token_required,
        };
        if !let_in {
            return status(StatusCode::UNAUTHORIZED);
        }
        let found = match path.as_slice() {
            ["openstack", rest @ ..] => openstack::find(record, rest),
            path => ec2::find(record, peer.to_canonical(), path),
        };
        match found {
            Some(Content::Text(text)) => with_type("text/plain", text.into_bytes()),
            Some(Content::Json(json)) => with_type("application/json", json.to_string().into_bytes()),
            Some(Content::Bytes(bytes)) => with_type("application/octet-stream", bytes),
            None => status(StatusCode::NOT_FOUND),
        }
    }

    fn issue(&self, record: &InstanceRecord, headers: &HeaderMap, now: i64) -> Response<Vec<u8>> {
        if headers.contains_key(FORWARDED) {
            return status(StatusCode::FORBIDDEN);
        }
        let ttl = headers
            .get(TOKEN_TTL)
            .and_then(|value| value.to_str().ok()?.parse::<i64>().ok())
            .filter(|ttl| (1..=TTL_MAX).contains(ttl));
        let Some(ttl) = ttl else { return status(StatusCode::BAD_REQUEST) };
        let token = self.inner.tokens.issue(record.instance, now + ttl);
        let mut response = with_type("text/plain", token.into_bytes());
        response.headers_mut().insert(TOKEN_TTL, ttl.into());
        response
    }
}

fn with_type(kind: &'static str, body: Vec<u8>) -> Response<Vec<u8>> {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn status(status: StatusCode) -> Response<Vec<u8>> {
    let reason = status.canonical_reason().unwrap_or_default();
    let mut response = with_type("text/plain", format!("{} {reason}\n", status.as_u16()).into_bytes());
    *response.status_mut() = status;
    response
}

fn not_allowed(allowed: &'static str) -> Response<Vec<u8>> {
    let mut response = status(StatusCode::METHOD_NOT_ALLOWED);
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

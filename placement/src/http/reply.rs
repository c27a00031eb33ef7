//! Answers as they go over the wire.

use bytes::Bytes;
use ec_placement_model::Seconds;
use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};
use serde_json::json;
use uuid::Uuid;

use super::{accept, error::ApiError};

const API_VERSION: HeaderName = HeaderName::from_static("openstack-api-version");
/// Of a proxy where TLS ends: how its client came.
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-openstack-request-id");

/// When a client that was told to come again should.
const RETRY_AFTER: &str = "1";

/// What a handler answers.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) status: u16,
    /// JSON.
    pub(super) body: Option<Vec<u8>>,
    /// A path.
    pub(super) location: Option<String>,
    /// Sent where the client knows it (1.15).
    pub(super) last_modified: Option<Seconds>,
    /// The word not to cache, for the same clients.
    pub(super) no_cache: bool,
}

impl Reply {
    /// 200 with a document that was last changed then.
    pub(super) fn json(document: &serde_json::Value, last_modified: Seconds) -> Self {
        Self::raw(document.to_string().into_bytes(), last_modified)
    }

    /// 200 with a document that has been written already.
    pub(super) fn raw(body: Vec<u8>, last_modified: Seconds) -> Self {
        Self { status: 200, body: Some(body), ..Self::default() }.dated(last_modified)
    }

    /// With a date, and the word not to cache.
    pub(super) fn dated(self, last_modified: Seconds) -> Self {
        Self { last_modified: Some(last_modified), no_cache: true, ..self }
    }

    /// No more than a status.
    pub(super) fn empty(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(super) fn status(self, status: u16) -> Self {
        Self { status, ..self }
    }

    pub(super) fn location(self, path: String) -> Self {
        Self { location: Some(path), ..self }
    }
}

/// Seconds since 1970, now.
pub(super) fn now() -> Seconds {
    jiff::Timestamp::now().as_second()
}

/// An answer that has nothing to do with the API.
pub(super) fn text(status: u16, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text.to_owned())));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let content_type = HeaderValue::from_static(ec_serve::metrics::CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

/// What of a request its answer needs.
pub(super) struct Frame {
    id: String,
    base: String,
    accept: String,
    method: String,
    content_type: String,
    /// The microversion, once it is known.
    pub(super) minor: Option<u32>,
    /// Whose allocations were to be changed, where that is an instance.
    pub(super) instance: Option<Uuid>,
}

impl Frame {
    pub(super) fn new(parts: &Parts, id: String, scheme: &str) -> Self {
        // Said in several lines, it is one list.
        let text = |name: HeaderName| {
            let lines = parts.headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
            lines.collect::<Vec<_>>().join(",")
        };
        // Where TLS ends before it comes to us. Whoever claims that falsely misleads nobody else.
        let scheme = match text(FORWARDED_PROTO).as_str() {
            "https" => "https",
            _ => scheme,
        };
        let host = match parts.headers.get(header::HOST).and_then(|host| host.to_str().ok()) {
            Some(host) => host,
            None => parts.uri.authority().map_or("localhost", |authority| authority.as_str()),
        };
        Self {
            id,
            base: format!("{scheme}://{host}"),
            accept: text(header::ACCEPT),
            method: parts.method.to_string(),
            content_type: text(header::CONTENT_TYPE),
            minor: None,
            instance: None,
        }
    }

    /// What the client takes.
    pub(super) fn accept(&self) -> &str {
        &self.accept
    }

    pub(super) fn reply(&self, reply: Reply) -> Response<Full<Bytes>> {
        let has_body = reply.body.is_some();
        let mut response = self.response(reply.status, reply.body.unwrap_or_default());
        let headers = response.headers_mut();
        if has_body {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(path) = reply.location
            && let Ok(location) = HeaderValue::try_from(format!("{}{path}", self.base))
        {
            headers.insert(header::LOCATION, location);
        }
        if self.minor >= Some(15) && reply.no_cache {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        }
        if let Some(seconds) = reply.last_modified
            && self.minor >= Some(15)
            && let Ok(date) = HeaderValue::try_from(http_date(seconds))
        {
            headers.insert(header::LAST_MODIFIED, date);
        }
        response
    }

    pub(super) fn error(&self, error: &ApiError) -> Response<Full<Bytes>> {
        // What a client sent comes back in errors; markup in it goes.
        let detail = strip_tags(&error.detail.replace('\n', " ").replace('\r', ""));
        let explanation = error.explanation(&self.method, &self.content_type, &self.accept);
        let text = format!("{explanation}\n\n {detail}  ");
        let title = error.title();
        let (content_type, body) = match accept::for_errors(&self.accept) {
            accept::ErrorForm::Json => ("application/json", self.document(error, &text).to_string()),
            accept::ErrorForm::Html => {
                let (status, text) = (error.status, escape(&text));
                let body = format!(
                    "<html>\n <head>\n  <title>{status} {title}</title>\n </head>\n <body>\n  <h1>{status} {title}</h1>\n  \
                     {text}\n </body>\n</html>"
                );
                ("text/html; charset=UTF-8", body)
            }
            accept::ErrorForm::Plain => {
                ("text/plain; charset=UTF-8", format!("{} {title}\n\n{text}", error.status))
            }
        };
        let mut response = self.response(error.status, body.into_bytes());
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(methods) = error.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        if error.status == 503 {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        if error.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("X-Auth-Token"));
        }
        response
    }

    fn document(&self, error: &ApiError, text: &str) -> serde_json::Value {
        let mut document = json!({
            "status": error.status,
            "title": error.title(),
            "detail": text,
            "request_id": self.id,
        });
        if self.minor >= Some(23) {
            document["code"] = error.code.into();
        }
        if error.status == 406 && self.minor.is_none() {
            document["min_version"] = super::version::text(0).into();
            document["max_version"] = super::version::text(super::version::NEWEST).into();
        }
        json!({ "errors": [document] })
    }

    fn response(&self, status: u16, body: Vec<u8>) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        if let Ok(id) = HeaderValue::try_from(&self.id) {
            headers.insert(REQUEST_ID, id);
        }
        if let Some(minor) = self.minor
            && let Ok(version) = HeaderValue::try_from(format!("placement {}", super::version::text(minor)))
        {
            headers.insert(API_VERSION, version);
            headers.insert(header::VARY, HeaderValue::from_static("openstack-api-version"));
        }
        response
    }
}

/// A date as HTTP writes it (RFC 9110, 5.6.7).
fn http_date(seconds: Seconds) -> String {
    jiff::Timestamp::from_second(seconds)
        .unwrap_or_default()
        .strftime("%a, %d %b %Y %H:%M:%S GMT")
        .to_string()
}

/// Takes out what looks like a tag.
fn strip_tags(text: &str) -> String {
    let mut rest = text;
    let mut clean = String::with_capacity(text.len());
    while let Some(open) = rest.find('<') {
        let Some(close) = rest[open..].find('>') else { break };
        clean.push_str(&rest[..open]);
        rest = &rest[open + close + 1..];
    }
    clean.push_str(rest);
    clean
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_go_and_lone_brackets_stay() {
        assert_eq!(strip_tags("a <b>bold</b> c"), "a bold c");
        assert_eq!(strip_tags("1 < 2"), "1 < 2");
    }

    #[test]
    fn dates_are_those_of_http() {
        assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
    }
}

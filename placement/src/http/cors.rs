//! Which web pages of other origins may use the API (the Fetch standard's CORS protocol).

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Response, StatusCode,
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};
use serde::Deserialize;

/// Headers that need no permission.
const SIMPLE: [&str; 8] = [
    "accept",
    "accept-language",
    "content-type",
    "cache-control",
    "content-language",
    "expires",
    "last-modified",
    "pragma",
];

/// See the module. Nobody, unless origins are named.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cors {
    /// Origins, as `https://host:port`; `*` for all.
    pub allowed_origins: Vec<String>,
    /// Whether their pages may send credentials.
    pub allow_credentials: bool,
    /// Headers of answers that they may see.
    pub expose_headers: Vec<String>,
    /// Seconds that a permission holds.
    pub max_age: u32,
    /// Methods that they may use.
    pub allow_methods: Vec<String>,
    /// Headers that they may send.
    pub allow_headers: Vec<String>,
}

impl Default for Cors {
    fn default() -> Self {
        let list = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        Self {
            allowed_origins: Vec::new(),
            allow_credentials: true,
            expose_headers: list(&["X-Auth-Token", "X-Openstack-Request-Id", "OpenStack-API-Version"]),
            max_age: 3600,
            allow_methods: list(&["GET", "PUT", "POST", "DELETE", "OPTIONS"]),
            allow_headers: list(&["X-Auth-Token", "X-Openstack-Request-Id", "OpenStack-API-Version"]),
        }
    }
}

impl Cors {
    /// Whether any page may act for whoever looks at it.
    pub fn lets_everybody_in_with_credentials(&self) -> bool {
        self.allow_credentials && self.allowed_origins.iter().any(|own| own == "*")
    }

    /// The first of the methods that is none.
    pub fn wrong_method(&self) -> Option<&str> {
        self.allow_methods.iter().map(String::as_str).find(|method| method.parse::<Method>().is_err())
    }

    /// Adds what a page needs to be let at the answer; answers preflights that the API does not know.
    pub(super) fn decorate(&self, parts: &Parts, response: &mut Response<Full<Bytes>>) {
        if self.allowed_origins.is_empty() {
            return;
        }
        let header = |name: HeaderName| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let origin = header(header::ORIGIN);
        if parts.method == Method::OPTIONS {
            if matches!(
                response.status(),
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::UNAUTHORIZED
            ) {
                *response.status_mut() = StatusCode::OK;
                *response.body_mut() = Full::default();
                for name in [header::CONTENT_TYPE, header::ALLOW, header::WWW_AUTHENTICATE] {
                    response.headers_mut().remove(name);
                }
            }
            let Some(origin) = origin.filter(|origin| self.allows(origin)) else { return };
            let Some(method) = header(header::ACCESS_CONTROL_REQUEST_METHOD) else { return };
            if !self.allow_methods.iter().any(|own| own == method) {
                return;
            }
            let wanted = header(header::ACCESS_CONTROL_REQUEST_HEADERS).unwrap_or("");
            let wanted: Vec<&str> =
                wanted.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
            let permitted = |name: &&str| {
                SIMPLE.iter().any(|own| own.eq_ignore_ascii_case(name))
                    || self.allow_headers.iter().any(|own| own.eq_ignore_ascii_case(name))
            };
            if !wanted.iter().all(permitted) {
                return;
            }
            self.let_in(origin, response);
            insert(response, header::ACCESS_CONTROL_MAX_AGE, &self.max_age.to_string());
            insert(response, header::ACCESS_CONTROL_ALLOW_METHODS, method);
            if !wanted.is_empty() {
                insert(response, header::ACCESS_CONTROL_ALLOW_HEADERS, &wanted.join(","));
            }
        } else if let Some(origin) = origin.filter(|origin| self.allows(origin)) {
            self.let_in(origin, response);
            if !self.expose_headers.is_empty() {
                insert(response, header::ACCESS_CONTROL_EXPOSE_HEADERS, &self.expose_headers.join(","));
            }
        }
    }

    fn allows(&self, origin: &str) -> bool {
        self.allowed_origins.iter().any(|own| own == "*" || own.trim_end_matches('/') == origin)
    }

    fn let_in(&self, origin: &str, response: &mut Response<Full<Bytes>>) {
        insert(response, header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().append(header::VARY, HeaderValue::from_static("Origin"));
        if self.allow_credentials {
            insert(response, header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true");
        }
    }
}

fn insert(response: &mut Response<Full<Bytes>>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::try_from(value) {
        response.headers_mut().insert(name, value);
    }
}

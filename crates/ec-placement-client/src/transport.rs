//! How a request gets to the server and its answer back: nothing of the Placement API is known here.

use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use ec_runtime::Renewed;
use reqwest::{
    Method, StatusCode, Url,
    header::{self, HeaderMap},
};

use crate::PlacementError;

/// One request.
#[derive(Debug, Clone)]
pub struct Request {
    /// What to do.
    pub method: Method,
    /// To what, with the query.
    pub url: Url,
    /// Who asks, and in which version.
    pub headers: HeaderMap,
    /// Sent as JSON.
    pub body: Option<serde_json::Value>,
}

/// What came back.
#[derive(Debug, Clone)]
pub struct Answer {
    /// How it went.
    pub status: StatusCode,
    /// The document, whole.
    pub body: Vec<u8>,
    /// So many seconds the server's clock is ahead of ours, where that could be told: an answer that took long tells nothing.
    pub ahead: Option<i64>,
}

/// One request in, one answer out.
#[async_trait]
pub trait Transport: Send + Sync {
    /// Carries a request there and the answer back.
    ///
    /// # Errors
    /// Why there is no answer, in words for people. What became of the request is not known.
    async fn exchange(&self, request: Request) -> Result<Answer, String>;
}

/// What rustls says where TLS is spoken to who does not speak it.
const NO_TLS: &str = "corrupt message of type InvalidContentType";

/// An answer that came so soon tells what time it is at the server: its `Date` has whole seconds.
const SOON: Duration = Duration::from_secs(2);

/// How far ahead of `now` the server's clock is, by its `Date` (RFC 9110, section 6.6.1).
fn ahead(headers: &HeaderMap, now: SystemTime) -> Option<i64> {
    let there = httpdate::parse_http_date(headers.get(header::DATE)?.to_str().ok()?).ok()?;
    let seconds = |of: Result<Duration, _>| of.ok().and_then(|of: Duration| i64::try_from(of.as_secs()).ok());
    seconds(there.duration_since(now)).or_else(|| seconds(now.duration_since(there)).map(|behind| -behind))
}

/// Connections of our own.
pub(crate) struct Http(pub(crate) Renewed<reqwest::Client, PlacementError>);

#[async_trait]
impl Transport for Http {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        let Request { method, url, headers, body } = request;
        let mut builder = self.0.now().request(method, url).headers(headers);
        if let Some(body) = &body {
            builder = builder.json(body);
        }
        let broken = |error: reqwest::Error| {
            let said = chain(&error.without_url());
            match said.contains(NO_TLS) {
                true => format!("it speaks plain HTTP, or something else than TLS ({said})"),
                false => said,
            }
        };
        let asked = Instant::now();
        let answer = builder.send().await.map_err(broken)?;
        let ahead = (asked.elapsed() < SOON).then(|| ahead(answer.headers(), SystemTime::now())).flatten();
        let status = answer.status();
        Ok(Answer { status, body: answer.bytes().await.map_err(broken)?.to_vec(), ahead })
    }
}

/// An error with its causes: the transport's own text alone says only that something failed.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = ec_runtime::exit::said(cause);
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    #[test]
    fn a_date_tells_how_far_the_servers_clock_is_from_ours() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let told = |date: Option<&'static str>| {
            let headers = date.map(|date| (header::DATE, HeaderValue::from_static(date)));
            ahead(&headers.into_iter().collect(), now)
        };
        for (date, wanted) in [
            (Some("Sun, 06 Nov 1994 08:49:37 GMT"), Some(0)),
            (Some("Sun, 06 Nov 1994 08:50:37 GMT"), Some(60)),
            (Some("Sun, 06 Nov 1994 08:48:37 GMT"), Some(-60)),
            (Some("yesterday"), None),
            (None, None),
        ] {
            assert_eq!(told(date), wanted, "{date:?}");
        }
    }
}

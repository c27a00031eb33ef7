//! How a request gets to the server and its answer back: nothing of the Placement API is known here.

use async_trait::async_trait;
use ec_runtime::Renewed;
use reqwest::{Method, StatusCode, Url, header::HeaderMap};

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
        let broken = |error: reqwest::Error| chain(&error.without_url());
        let answer = builder.send().await.map_err(broken)?;
        let status = answer.status();
        Ok(Answer { status, body: answer.bytes().await.map_err(broken)?.to_vec() })
    }
}

/// An error with its causes: the transport's own text alone says only that something failed.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

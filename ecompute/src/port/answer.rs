//! Which answer a question gets.

use bytes::Bytes;
use ec_serve::metrics;
use http_body_util::Full;
use hyper::{
    Method, Response, StatusCode,
    header::{self, HeaderValue},
};
use serde_json::{Value, json};

use super::{Asked, ask, numbers, usage, view};
use crate::parts::Parts;

/// What is on offer.
const OFFER: &str = "there are /healthz, /readyz, /metrics, /view and /usage";

pub(super) async fn answer(parts: &Parts, method: &Method, path: &str) -> Response<Full<Bytes>> {
    if method != Method::GET {
        let mut refusal =
            text(StatusCode::METHOD_NOT_ALLOWED, format!("only GET: this port is for reading; {OFFER}"));
        refusal.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        return refusal;
    }
    match path {
        "/healthz" => health(ask(parts, |_| ()).await),
        "/readyz" => ready(parts),
        "/metrics" => {
            let counts = ask(parts, numbers::count).await;
            let text = numbers::write(parts, &counts);
            typed(StatusCode::OK, metrics::CONTENT_TYPE, text)
        }
        "/view" => {
            let instances = ask(parts, view::instances).await;
            json(StatusCode::OK, &view::view(parts, instances))
        }
        "/usage" => match usage::usage(parts).await {
            Ok(document) => json(StatusCode::OK, &document),
            Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, why),
        },
        _ => text(StatusCode::NOT_FOUND, format!("there is nothing here: {OFFER}")),
    }
}

fn health(asked: Asked<()>) -> Response<Full<Bytes>> {
    match asked {
        Asked::Answered(()) => text(StatusCode::OK, "ok"),
        // It may wait for libvirt or etcd for as long as these need: starting it anew would not help.
        Asked::NoLoop => text(StatusCode::OK, "starting or ending"),
        Asked::Silent => text(StatusCode::SERVICE_UNAVAILABLE, "the agent's loop does not turn"),
    }
}

fn ready(parts: &Parts) -> Response<Full<Bytes>> {
    let standings = parts.standings();
    let ready = standings.iter().all(|(_, standing)| standing.ok);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &json!({ "ready": ready, "parts": view::parts(&standings) }))
}

fn json(status: StatusCode, document: &Value) -> Response<Full<Bytes>> {
    typed(status, "application/json", format!("{document}\n"))
}

pub(super) fn text(status: StatusCode, line: impl Into<String>) -> Response<Full<Bytes>> {
    typed(status, "text/plain; charset=utf-8", line.into() + "\n")
}

fn typed(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

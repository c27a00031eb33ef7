//! Which answer a question gets.

use std::sync::Arc;

use bytes::Bytes;
use ec_serve::port::{is_reading, json, not_reading, text};
use http_body_util::Full;
use hyper::{Method, Response, StatusCode};

use super::{Asked, ask, numbers, usage, view};
use crate::parts::Parts;

/// What is on offer.
const OFFER: &str = "there are /healthz, /readyz, /metrics, /view and /usage";

pub(super) async fn answer(parts: &Arc<Parts>, method: &Method, path: &str) -> Response<Full<Bytes>> {
    if !is_reading(method) {
        return not_reading(OFFER);
    }
    match path {
        "/healthz" => health(ask(parts, |_| ()).await),
        "/readyz" => ready(parts),
        "/metrics" => {
            let counts = ask(parts, numbers::count).await;
            ec_serve::port::numbers(numbers::write(parts, &counts))
        }
        "/view" => {
            let instances = ask(parts, view::instances).await;
            json(StatusCode::OK, view::view(parts, instances))
        }
        "/usage" => match usage::usage(parts).await {
            Ok(document) => json(StatusCode::OK, document),
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
    let (ready, document) = ec_calls::readiness(&parts.standings());
    json(if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, document)
}

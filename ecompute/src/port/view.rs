//! What the agent knows, as JSON. Nothing of what users give to their guests is in it: no keys, no user-data, no console.

use ec_model::RunState;
use ec_plan::engine::{Engine, Requested, Sight};
use serde_json::{Value, json};

use super::Asked;
use crate::parts::Parts;

/// The whole view.
pub(super) fn view(parts: &Parts, instances: Asked<Vec<Value>>) -> Value {
    let (turns, instances) = match instances {
        Asked::Answered(instances) => ("turns", Some(instances)),
        Asked::NoLoop => ("none", None),
        Asked::Silent => ("silent", None),
    };
    json!({
        "node": parts.node,
        "name": parts.settings.name,
        "agent": env!("CARGO_PKG_VERSION"),
        "parts": ec_calls::parts(&parts.standings()),
        "loop": turns,
        "instances": instances,
    })
}

/// Every instance and volume that the agent knows of.
pub(super) fn instances(engine: &Engine) -> Vec<Value> {
    engine.sights().map(|sight| instance(&sight)).collect()
}

fn instance(sight: &Sight<'_>) -> Value {
    let request = sight.request.map(|Requested { record, .. }| match record {
        Ok(request) => json!({
            "desired": request.desired,
            "epoch": request.epoch,
            "generation": request.generation,
        }),
        Err(why) => json!({ "unreadable": why }),
    });
    let status = sight.status.map(|status| {
        json!({
            "state": status.state,
            "reason": status.reason,
            "since": status.since,
            "epoch": status.epoch,
            "observed_generation": status.observed_generation,
            "ip": status.ip,
        })
    });
    json!({
        "instance": sight.instance,
        "kind": sight.kind,
        "request": request,
        "status": status,
        "observed": {
            "power": sight.observed.domain.map(power),
            "disk": sight.observed.volume,
        },
        "doing": sight.why,
        "busy": sight.busy,
        "failures": sight.failures,
    })
}

fn power(state: RunState) -> &'static str {
    match state {
        RunState::Running => "running",
        RunState::Paused(_) => "paused",
        RunState::NotStarted => "off",
        RunState::Ended(_) => "ended",
        RunState::Saved => "saved",
    }
}

//! The bare side: requests to placement and etcd with nothing of ours around them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, NodeId, Resources};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// Bound of every single request.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Sends one request to placement over a connection of its own, as the server wants it anyway: it closes
/// after each answer. `host` is `address:port`; an answer without a body is `null`.
pub(crate) async fn ask(host: &str, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    timeout(PATIENCE, exchange(host, method, path, body))
        .await
        .with_context(|| format!("{method} {path}: no answer within {} s", PATIENCE.as_secs()))?
}

async fn exchange(host: &str, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nX-Auth-Token: admin\r\n\
         OpenStack-API-Version: placement 1.39\r\nAccept: application/json\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(host).await.with_context(|| format!("failed to reach {host}"))?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").context("an answer without a head")?;
    let (head, body) = (String::from_utf8_lossy(&answer[..end]), &answer[end + 4..]);
    let status = head.split(' ').nth(1).unwrap_or_default();
    ensure!(status.starts_with('2'), "{method} {path}: {head}\n{}", String::from_utf8_lossy(body));
    if body.is_empty() {
        return Ok(Value::Null);
    }
    // A chunked body would fail here, too.
    serde_json::from_slice(body).with_context(|| format!("{method} {path}: the answer is not JSON"))
}

/// The body that claims an allocation request of placement for a consumer that is not there yet.
pub(crate) fn claim_of(request: &Value) -> Value {
    json!({
        "allocations": request["allocations"], "mappings": request["mappings"], "project_id": "default",
        "user_id": "default", "consumer_generation": null, "consumer_type": "INSTANCE",
    })
}

/// Claims the same resources of one node for every instance, in one request.
pub(crate) async fn claim_all(
    host: &str,
    node: NodeId,
    instances: &[InstanceId],
    resources: &Resources,
) -> Result<()> {
    let allocations = json!({ node.to_string(): { "resources": resources } });
    let claims: serde_json::Map<_, _> = instances
        .iter()
        .map(|instance| {
            let request = json!({ "allocations": allocations, "mappings": { "": [node] } });
            (instance.to_string(), claim_of(&request))
        })
        .collect();
    ask(host, "POST", "/allocations", Some(&Value::Object(claims))).await.map(drop)
}

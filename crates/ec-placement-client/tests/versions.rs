//! Servers that are older than we are, and tokens that change, against a server in this process.
#![expect(clippy::unwrap_used, reason = "this is a test")]

use std::sync::{Arc, Mutex};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use ec_model::{InstanceId, NodeId};
use ec_placement_client::{PlacementClient, PlacementConfig, PlacementError};
use serde_json::{Value, json};

/// A request: version, token, method and path, body.
type Heard = (String, String, String, Value);

/// A server of this version, and what it was asked.
#[derive(Clone)]
struct Server {
    newest: u32,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl Server {
    async fn start(newest: u32) -> (Self, String) {
        rustls::crypto::ring::default_provider().install_default().ok();
        let server = Self { newest, heard: Arc::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(answer).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        (server, endpoint)
    }

    fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut self.heard.lock().unwrap())
    }
}

async fn answer(State(server): State<Server>, headers: HeaderMap, request: Request) -> Response {
    let header = |name: &str| headers.get(name).unwrap().to_str().unwrap().to_owned();
    let version = header("OpenStack-API-Version");
    let line = format!("{} {}", request.method(), request.uri());
    let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let minor: u32 = version.strip_prefix("placement 1.").unwrap().parse().unwrap();
    server.heard.lock().unwrap().push((version, header("X-Auth-Token"), line.clone(), body));
    if minor > server.newest {
        // As OpenStack's json_error_formatter words it.
        let error = json!({"status": 406, "title": "Not Acceptable", "detail": "Unacceptable version header",
            "max_version": format!("1.{}", server.newest), "min_version": "1.0"});
        return (StatusCode::NOT_ACCEPTABLE, json!({"errors": [error]}).to_string()).into_response();
    }
    if line.contains("same_subtree") {
        let error = json!({"errors": [{"status": 400, "detail": "'same_subtree' was unexpected"}]});
        return (StatusCode::BAD_REQUEST, error.to_string()).into_response();
    }
    if line.starts_with("GET /resource_providers?in_tree=") {
        let provider = |uuid: &str| json!({"uuid": uuid, "name": "n", "generation": 0});
        let tree = [provider("7d3c1f0a-2b4e-4c55-9a7e-000000000001"), provider(NODE)];
        return json!({"resource_providers": tree}).to_string().into_response();
    }
    if line.starts_with("GET /allocations/") {
        let held = json!({"allocations": {NODE: {"generation": 1, "resources": {"VCPU": 1}}},
            "project_id": "p", "user_id": "u", "consumer_type": "INSTANCE", "consumer_generation": 1});
        return held.to_string().into_response();
    }
    if line.starts_with("GET /") {
        return json!({"allocation_requests": []}).to_string().into_response();
    }
    StatusCode::NO_CONTENT.into_response()
}

const NODE: &str = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

fn client(endpoint: String) -> PlacementClient {
    PlacementClient::new(&PlacementConfig { endpoint, ..PlacementConfig::default() }).unwrap()
}

#[tokio::test]
async fn an_older_server_is_spoken_to_in_its_newest_version_from_its_first_answer_on() {
    let (server, endpoint) = Server::start(31).await;
    let (client, node, instance) =
        (client(endpoint), NODE.parse::<NodeId>().unwrap(), InstanceId::new(uuid::Uuid::nil()));
    let amounts = [(node, [("VCPU".to_owned(), 1)].into())].into();
    client.claim_exact(instance, &amounts, "p", "u").await.unwrap();
    let heard = server.heard();
    let versions: Vec<_> = heard.iter().map(|(version, ..)| version.as_str()).collect();
    assert_eq!(versions, ["placement 1.39", "placement 1.31"]);
    assert_eq!(heard[0].3["consumer_type"], "INSTANCE");
    assert_eq!(
        heard[1].3,
        json!({"allocations": {NODE: {"resources": {"VCPU": 1}}}, "project_id": "p", "user_id": "u", "consumer_generation": null})
    );
    // Of a clone, too: what one has learned all know.
    assert_eq!(client.clone().tree(node).await.unwrap().len(), 2);
    let heard = server.heard();
    assert_eq!(heard.len(), 1);
    assert_eq!(heard[0].0, "placement 1.31");

    let query = ec_model::ResourceQuery::parse("resources_A=VCPU:1&same_subtree=_A").unwrap();
    let error = client.candidates(&query, None).await.unwrap_err().to_string();
    assert!(error.contains("'same_subtree' was unexpected (it speaks version 1.31"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_too_old_is_told_so() {
    let (_server, endpoint) = Server::start(20).await;
    let error = client(endpoint).tree(NODE.parse().unwrap()).await.unwrap_err();
    assert!(matches!(error, PlacementError::TooOld { speaks: 20, .. }), "{error}");
    assert!(error.to_string().contains("1.20") && error.to_string().contains("1.28"), "{error}");
}

#[tokio::test]
async fn a_token_file_is_read_again_when_it_changes_and_may_be_away_for_a_moment() {
    let (server, endpoint) = Server::start(39).await;
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("token");
    std::fs::write(&file, "one\n").unwrap();
    let config = PlacementConfig { endpoint, token_file: Some(file.clone()), ..PlacementConfig::default() };
    let client = PlacementClient::new(&config).unwrap();
    let mut tokens = Vec::new();
    for text in [None, Some("two"), None] {
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None if tokens.is_empty() => {}
            None => std::fs::remove_file(&file).unwrap(),
        }
        client.allocations(InstanceId::new(uuid::Uuid::nil())).await.unwrap();
        tokens.push(server.heard()[0].1.clone());
    }
    assert_eq!(tokens, ["one", "two", "two"]);
}

#[tokio::test]
async fn what_a_consumer_holds_tells_its_type_and_whose_it_is() {
    let (_server, endpoint) = Server::start(39).await;
    let held = client(endpoint).allocations(InstanceId::new(uuid::Uuid::nil())).await.unwrap().unwrap();
    assert_eq!(held.consumer_type.as_deref(), Some(ec_placement_client::CONSUMER_TYPE));
    assert_eq!((held.project.as_deref(), held.user.as_deref()), (Some("p"), Some("u")));
}

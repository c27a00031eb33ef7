//! The API on a store in memory, over real HTTP.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::sync::Arc;

use ec_placement_model::search::Options;
use ec_runtime::Host;
use ec_store::{MemoryStore, Store};
use placement::{
    http::{Api, ApiConfig, Auth, Cors, Policy, ServerConfig, serve},
    store::{Keys, Limits, Replica},
};
use reqwest::{Client, Method};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The configuration that most tests want.
pub(crate) fn open() -> ApiConfig {
    ApiConfig {
        auth: Auth::NoAuth,
        policy: Policy::Legacy,
        cors: Cors::default(),
        randomize: false,
        search: Options::default(),
        certificates: Vec::new(),
    }
}

/// A replica that serves.
pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) client: Client,
    stop: CancellationToken,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_on(&MemoryStore::new(), open()).await
    }

    /// One more replica on a store.
    pub(crate) async fn start_on(store: &MemoryStore, config: ApiConfig) -> Self {
        ec_runtime::install_tls_provider();
        let store: Arc<dyn Store> = Arc::new(store.clone());
        let stop = CancellationToken::new();
        let replica =
            Replica::start(store, Keys::new("/p"), Limits::default(), Host::default(), stop.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let api = Arc::new(Api::new(replica, config, false));
        tokio::spawn(serve(ServerConfig { listener, tls: None, files: 1024 }, api, stop.clone()));
        Self { url, client: Client::builder().no_proxy().build().unwrap(), stop }
    }

    /// Sends a request as an administrator, of the newest microversion; answers status and document.
    pub(crate) async fn send(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let mut request = self
            .client
            .request(method, format!("{}{path}", self.url))
            .header("X-Auth-Token", "admin")
            .header("OpenStack-API-Version", "placement latest");
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        (status, if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() })
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        self.send(Method::GET, path, None).await
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> (u16, Value) {
        self.send(Method::PUT, path, Some(body)).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send(Method::POST, path, Some(body)).await
    }

    /// Makes a provider with inventory, traits and aggregates.
    pub(crate) async fn provider(
        &self,
        number: u128,
        parent: Option<u128>,
        inventories: &[(&str, i64)],
        traits: &[&str],
        aggregates: &[u128],
    ) -> String {
        let id = uuid(number);
        let parent = parent.map(uuid);
        let document =
            serde_json::json!({"name": format!("p{number}"), "uuid": id, "parent_provider_uuid": parent});
        assert_eq!(self.post("/resource_providers", document).await.0, 200);
        let inventories: serde_json::Map<String, Value> = inventories
            .iter()
            .map(|(class, total)| ((*class).to_owned(), serde_json::json!({ "total": total })))
            .collect();
        let path = format!("/resource_providers/{id}");
        let document = serde_json::json!({"resource_provider_generation": 0, "inventories": inventories});
        assert_eq!(self.put(&format!("{path}/inventories"), document).await.0, 200);
        let document = serde_json::json!({"resource_provider_generation": 1, "traits": traits});
        let (status, answer) = self.put(&format!("{path}/traits"), document).await;
        assert_eq!(status, 200, "{answer}");
        let generation = answer["resource_provider_generation"].clone();
        let aggregates: Vec<String> = aggregates.iter().map(|number| uuid(*number)).collect();
        let document =
            serde_json::json!({"resource_provider_generation": generation, "aggregates": aggregates});
        assert_eq!(self.put(&format!("{path}/aggregates"), document).await.0, 200);
        id
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A uuid that is easy to tell.
pub(crate) fn uuid(number: u128) -> String {
    uuid::Uuid::from_u128(number).to_string()
}

/// A claim of a new consumer.
pub(crate) fn claim(provider: &str, class: &str, amount: i64) -> Value {
    serde_json::json!({
        "allocations": {provider: {"resources": {class: amount}}},
        "project_id": "project", "user_id": "user", "consumer_generation": null, "consumer_type": "INSTANCE",
    })
}

//! Each answer, of an agent on a store in memory and a simulated hypervisor.

use std::{collections::BTreeMap, path::Path};

use async_trait::async_trait;
use ec_hypervisor::{Operation, SimulatedHypervisor};
use ec_model::{Desired, ImageRef, InstanceId, NodeId, Request, Resources, Spec, encode};
use ec_placement_client::{Answer, PlacementClient, Transport};
use ec_runtime::{Host, config::parse};
use ec_store::{MemoryStore, Store, Txn};
use http_body_util::BodyExt;
use hyper::{Method, StatusCode};
use jiff::Timestamp;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
    time::sleep,
};

use super::*;
use crate::agent;

/// What no answer may hold.
const SECRET: &str = "s3cret";

/// A placement that is away.
struct Away;

#[async_trait]
impl Transport for Away {
    async fn exchange(&self, _: ec_placement_client::Request) -> Result<Answer, String> {
        Err("nobody is there".to_owned())
    }
}

/// An agent that has not begun.
pub(super) struct Node {
    store: MemoryStore,
    pub(super) parts: Arc<Parts>,
    _state: TempDir,
}

pub(super) fn settings(state: &Path, more: &str) -> Settings {
    let text = format!("name: n\nstate_dir: {}\n{more}", state.display());
    Settings::check(&parse(&text, Path::new("compute.yaml")).unwrap()).unwrap()
}

async fn node() -> Node {
    node_on().await.0
}

/// With the hypervisor behind it.
pub(super) async fn node_on() -> (Node, SimulatedHypervisor) {
    ec_runtime::install_tls_provider();
    let state = tempfile::tempdir().unwrap();
    let settings = settings(state.path(), "");
    let node = NodeId::new(uuid::Uuid::from_u128(9));
    let (store, hypervisor) = (MemoryStore::new(), SimulatedHypervisor::new(node));
    let placement = PlacementClient::new(&settings.placement).unwrap().over(Arc::new(Away));
    let (behind, host) = (Arc::new(store.clone()), Host::default());
    let under = Arc::new(hypervisor.clone());
    let parts = agent::assemble(settings, node, behind, under, placement, host).await.unwrap();
    (Node { store, parts, _state: state }, hypervisor)
}

impl Node {
    async fn ask(&self, method: &Method, path: &str) -> (StatusCode, String) {
        let answer = answer::answer(&self.parts, method, path).await;
        let status = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn get(&self, path: &str) -> (StatusCode, String) {
        self.ask(&Method::GET, path).await
    }

    async fn json(&self, path: &str) -> (StatusCode, Value) {
        let (status, text) = self.get(path).await;
        (status, serde_json::from_str(&text).unwrap())
    }

    async fn metrics(&self) -> BTreeMap<String, f64> {
        ec_serve::metrics::parse(&self.get("/metrics").await.1).unwrap()
    }

    /// Has the agent begin.
    fn begin(&self) {
        tokio::spawn(agent::run_with(Arc::clone(&self.parts), CancellationToken::new()));
    }

    async fn until(&self, what: &str, reached: impl AsyncFn() -> bool) {
        for _ in 0..600 {
            if reached().await {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
        panic!("{what}: {:?} {:?}", self.get("/readyz").await, self.get("/view").await);
    }
}

fn which(parts: &Value, ok: bool) -> Vec<&str> {
    let parts = parts.as_object().unwrap();
    parts.iter().filter(|(_, part)| part["ok"] == ok).map(|(name, _)| name.as_str()).collect()
}

#[tokio::test]
async fn an_agent_that_waits_is_healthy_and_not_ready_and_says_so_part_by_part() {
    let node = node().await;
    assert_eq!(node.get("/healthz").await, (StatusCode::OK, "starting or ending\n".to_owned()));
    let (status, ready) = node.json("/readyz").await;
    assert_eq!((status, &ready["ready"]), (StatusCode::SERVICE_UNAVAILABLE, &Value::Bool(false)));
    let all = ["etcd", "lease", "libvirt", "placement", "registration"];
    assert_eq!(which(&ready["parts"], false), all);
    assert_eq!(ready["parts"]["etcd"]["why"], "not known yet");
    let (_, view) = node.json("/view").await;
    assert_eq!((&view["loop"], &view["instances"]), (&Value::from("none"), &Value::Null));
    let numbers = node.metrics().await;
    assert_eq!(numbers["ecompute_part_up{part=\"etcd\"}"], 0.0);
    assert!(!numbers.contains_key("ecompute_instances_troubled"), "nobody knows: {numbers:?}");
}

#[tokio::test]
async fn what_is_not_there_and_what_is_no_reading_is_refused_in_one_line() {
    let node = node().await;
    for (method, path, wanted) in [
        (Method::GET, "/", StatusCode::NOT_FOUND),
        (Method::GET, "/view/", StatusCode::NOT_FOUND),
        (Method::GET, "/healthz/../view", StatusCode::NOT_FOUND),
        (Method::POST, "/view", StatusCode::METHOD_NOT_ALLOWED),
        (Method::PUT, "/healthz", StatusCode::METHOD_NOT_ALLOWED),
        (Method::DELETE, "/nothing", StatusCode::METHOD_NOT_ALLOWED),
    ] {
        let (status, text) = node.ask(&method, path).await;
        assert_eq!(status, wanted, "{method} {path}");
        assert!(text.lines().count() == 1 && text.contains("/readyz"), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_loop_that_does_not_turn_is_told_and_the_rest_is_answered_all_the_same() {
    let node = node().await;
    let (ask, _nobody_listens) = mpsc::channel(1);
    assert!(node.parts.inquiries.set(ask).is_ok());
    for _ in 0..3 {
        let (status, text) = node.get("/healthz").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
        assert_eq!(text, "the agent's loop does not turn\n");
    }
    assert_eq!(node.json("/view").await.1["loop"], "silent");
    assert!(node.metrics().await.contains_key(concat!(
        "ecompute_build_info{version=\"",
        env!("CARGO_PKG_VERSION"),
        "\"}"
    )));
}

#[tokio::test]
async fn the_view_tells_each_instance_and_no_secret_also_while_etcd_is_away() {
    let node = node().await;
    let instance = InstanceId::new(uuid::Uuid::from_u128(1));
    let request = Request {
        instance,
        epoch: 1,
        generation: 3,
        desired: Desired::Active,
        power: ec_model::PowerWish::default(),
        restart: ec_model::Restart::No,
        rebuild: None,
        rescue: None,
        kind: ec_model::Workload::Machine,
        volumes: Vec::new(),
        resize: None,
        handover: None,
        name: Some("web".to_owned()),
        project: "p".to_owned(),
        user: "u".to_owned(),
        spec: Some(Spec {
            query: "resources=VCPU:1".to_owned(),
            resources: Resources::from([("VCPU".to_owned(), 1)]),
            image: ImageRef::at(format!("https://user:{SECRET}@images/x?{SECRET}")),
            keys: vec![format!("ssh-ed25519 {SECRET}")],
            metadata: std::collections::BTreeMap::new(),
            user_data_bytes: None,
            token_required: false,
            snapshot: false,
        }),
        access: None,
        request_id: None,
        created_at: Timestamp::UNIX_EPOCH,
    };
    let keys = &node.parts.settings.keys;
    let put = Txn::new().put(keys.request(node.parts.node, instance), encode(&request));
    node.store.txn(put.put(keys.user_data(node.parts.node, instance), SECRET)).await.unwrap();
    node.begin();
    node.until("it is told", async || {
        let (_, view) = node.json("/view").await;
        view["instances"][0]["status"]["state"] == "PREPARING" && view["instances"][0]["failures"] != 0
    })
    .await;
    assert_eq!(node.get("/healthz").await, (StatusCode::OK, "ok\n".to_owned()));
    let (status, ready) = node.json("/readyz").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(which(&ready["parts"], true), ["etcd", "lease", "libvirt"]);
    assert_eq!(ready["parts"]["placement"]["why"], "nobody is there");
    let registration = ready["parts"]["registration"]["why"].as_str().unwrap();
    assert!(registration.contains("placement is not reachable"), "{registration}");

    let numbers = node.metrics().await;
    assert_eq!(numbers["ecompute_instances{state=\"PREPARING\"}"], 1.0);
    assert_eq!(numbers["ecompute_instances{state=\"ACTIVE\"}"], 0.0);
    assert_eq!(numbers["ecompute_instances_troubled"], 1.0);
    assert_eq!(numbers["ecompute_volumes{state=\"PREPARING\"}"], 0.0, "it is none");
    assert_eq!(numbers["ecompute_volumes_troubled"], 0.0);
    assert_eq!(numbers["ecompute_part_up{part=\"lease\"}"], 1.0);
    assert!(numbers["ecompute_part_last_up_timestamp_seconds{part=\"lease\"}"] > 1e9);
    assert!(!numbers.contains_key("ecompute_part_last_up_timestamp_seconds{part=\"placement\"}"));
    assert!(numbers["ecompute_call_failures_total{service=\"placement\"}"] >= 1.0);
    assert!(numbers["ecompute_call_duration_seconds_count{service=\"libvirt\"}"] >= 2.0);
    assert!(numbers["ecompute_job_duration_seconds_count{kind=\"tell\",outcome=\"done\"}"] >= 1.0);
    assert!(numbers.keys().all(|name| !name.contains(&instance.to_string())), "{numbers:?}");

    node.store.faults().set_reachable(false);
    node.until("etcd is missed", async || node.json("/readyz").await.1["parts"]["etcd"]["ok"] == false).await;
    let (_, view) = node.json("/view").await;
    let seen = &view["instances"][0];
    assert_eq!((&seen["instance"], &seen["kind"]), (&instance.to_string().into(), &"machine".into()));
    assert_eq!((&seen["request"]["desired"], &seen["request"]["generation"]), (&"active".into(), &3.into()));
    assert_eq!((&seen["observed"]["power"], &seen["observed"]["disk"]), (&Value::Null, &false.into()));
    assert!(seen["doing"].as_str().is_some_and(|doing| !doing.is_empty()), "{view}");
    for path in ["/view", "/readyz", "/metrics"] {
        assert!(!node.get(path).await.1.contains(SECRET), "{path}");
    }
}

#[tokio::test]
async fn over_a_socket_it_answers_and_bounds_what_it_takes_and_a_second_one_is_refused() {
    let node = node().await;
    let wanted = settings(node.parts.settings.state_dir.as_path(), "listen: 127.0.0.1:0\n");
    let port = Port::open(&wanted).await.unwrap().unwrap();
    let address = port.0.address().unwrap();
    let stop = CancellationToken::new();
    let served = tokio::spawn(port.serve(Arc::clone(&node.parts), stop.clone()));

    let answer = async |question: String| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(question.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let get =
        |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n");
    let healthy = answer(get("/healthz", "")).await;
    assert!(healthy.starts_with("HTTP/1.1 200") && healthy.ends_with("ending\n"), "{healthy}");
    let big = answer(get("/view", &format!("X-Big: {}\r\n", "x".repeat(20 << 10)))).await;
    assert!(big.starts_with("HTTP/1.1 431"), "{big}");
    let many = answer(get("/view", &"X: y\r\n".repeat(100))).await;
    assert!(many.starts_with("HTTP/1.1 431"), "{many}");
    assert!(answer("nonsense\r\n\r\n".to_owned()).await.starts_with("HTTP/1.1 400"));

    let taken = settings(node.parts.settings.state_dir.as_path(), &format!("listen: {address}\n"));
    let refused = Port::open(&taken).await.err().unwrap().to_string();
    assert!(refused.contains(&address.to_string()) && refused.contains("listen: null"), "{refused}");
    let closed = settings(node.parts.settings.state_dir.as_path(), "listen: null\n");
    assert!(Port::open(&closed).await.unwrap().is_none());
    let tls = "listen: 127.0.0.1:0\ntls: {certificate: /nowhere.pem, key: /nowhere.key}\n";
    let broken = Port::open(&settings(node.parts.settings.state_dir.as_path(), tls)).await.err().unwrap();
    assert!(broken.to_string().contains("/nowhere.pem"), "{broken}");

    stop.cancel();
    served.await.unwrap();
    assert!(Port::open(&taken).await.is_ok(), "it is free again");
}

#[tokio::test]
async fn what_guests_use_is_told_where_the_loop_turns_and_libvirt_answers() {
    let node = node().await;
    let (status, why) = node.get("/usage").await;
    assert_eq!((status, why.as_str()), (StatusCode::SERVICE_UNAVAILABLE, "the agent starts or ends\n"));
    node.begin();
    node.until("it is told", async || node.get("/usage").await.0 == StatusCode::OK).await;
    let (_, told) = node.json("/usage").await;
    assert_eq!((&told["instances"], told["load1"].is_number()), (&serde_json::json!({}), true), "{told}");
}

#[tokio::test]
async fn while_libvirt_hangs_all_who_ask_what_guests_use_are_told_so_soon_and_by_one_call() {
    let (node, hypervisor) = node_on().await;
    node.begin();
    node.until("it is told", async || node.get("/usage").await.0 == StatusCode::OK).await;
    // Till then what was told is told on.
    sleep(Duration::from_secs(1)).await;
    hypervisor.hang(Operation::Usage);
    let (before, begun) = (hypervisor.calls(Operation::Usage), std::time::Instant::now());
    let answers = futures::future::join_all((0..40).map(|_| node.get("/usage"))).await;
    for (status, why) in answers {
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(why, "libvirt has not answered in 3 s\n");
    }
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    let again = std::time::Instant::now();
    assert_eq!(node.get("/usage").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        again.elapsed() < Duration::from_secs(1),
        "it hangs still, which is known: {:?}",
        again.elapsed()
    );
    assert_eq!(hypervisor.calls(Operation::Usage), before + 1);
    hypervisor.release(Operation::Usage);
    node.until("it is told again", async || node.get("/usage").await.0 == StatusCode::OK).await;
    // That took long, and is told for as long: the next call would take as long again.
    hypervisor.hang(Operation::Usage);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(node.get("/usage").await.0, StatusCode::OK);
    assert_eq!(hypervisor.calls(Operation::Usage), before + 1);
}

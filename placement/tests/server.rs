//! The server itself: tokens, TLS, metrics, signs of life, moving a cloud.

mod support;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use ec_model::token_digest;
use ec_runtime::Host;
use ec_serve::TlsSection;
use ec_store::{MemoryStore, Store, StoreError, Txn, testing::certificates};
use placement::{
    config::Config,
    http::{Api, ApiConfig, Auth, ServerConfig, Token, Tokens, serve},
    live,
    store::{Keys, Limits, Replica},
    transfer::{self, Snapshot, TransferError},
};
use reqwest::Method;
use serde_json::json;
use support::{Server, claim, open, uuid};
use tokio_util::sync::CancellationToken;

fn token(secret: &str, role: &str, project: Option<&str>) -> Token {
    Token {
        sha256: token_digest(secret),
        name: role.into(),
        roles: vec![role.into()],
        project: project.map(Into::into),
        provider: None,
    }
}

#[tokio::test]
async fn a_token_lets_in_with_its_role_and_its_project_and_nothing_else_does() {
    let tokens = Tokens::new(vec![
        token("the-token-of-an-admin", "admin", None),
        token("the-token-of-a-reader", "reader", Some("mine")),
    ])
    .unwrap();
    let config = ApiConfig { auth: Auth::Tokens(tokens), ..open() };
    let server = Server::start_on(&MemoryStore::new(), config).await;
    let status = async |path: &str, token: Option<&str>| {
        let mut request = server.client.get(format!("{}{path}", server.url)).header("X-Roles", "admin");
        if let Some(token) = token {
            request = request.header("X-Auth-Token", token);
        }
        let request = request.header("OpenStack-API-Version", "placement latest");
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(status("/", None).await, 200);
    assert_eq!(status("/traits", None).await, 401);
    assert_eq!(status("/traits", Some("admin")).await, 401);
    assert_eq!(status("/traits", Some("the-token-of-an-admin")).await, 200);
    assert_eq!(status("/traits", Some("the-token-of-a-reader")).await, 403);
    assert_eq!(status("/usages?project_id=mine", Some("the-token-of-a-reader")).await, 200);
    assert_eq!(status("/usages?project_id=theirs", Some("the-token-of-a-reader")).await, 403);
}

#[tokio::test]
async fn a_member_claims_for_its_own_project_and_sees_nothing_of_others() {
    let tokens = [
        token("the-token-of-an-admin", "admin", None),
        token("the-token-of-mine", "member", Some("mine")),
        token("the-token-of-theirs", "member", Some("theirs")),
    ];
    let config = ApiConfig { auth: Auth::Tokens(Tokens::new(tokens.to_vec()).unwrap()), ..open() };
    let server = Server::start_on(&MemoryStore::new(), config).await;
    let ask = async |who: &str, method: Method, path: &str, body: serde_json::Value| {
        let request = server.client.request(method, format!("{}{path}", server.url)).json(&body);
        let request = request.header("X-Auth-Token", format!("the-token-of-{who}"));
        let answer = request.header("OpenStack-API-Version", "placement latest").send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json::<serde_json::Value>().await.unwrap_or_default())
    };
    let provider = json!({"uuid": uuid(1), "name": "h1"});
    assert_eq!(ask("mine", Method::POST, "/resource_providers", provider.clone()).await.0, 403);
    assert_eq!(ask("an-admin", Method::POST, "/resource_providers", provider).await.0, 200);
    let inventories = format!("/resource_providers/{}/inventories", uuid(1));
    let offers = json!({"resource_provider_generation": 0, "inventories": {"VCPU": {"total": 8}}});
    assert_eq!(ask("mine", Method::PUT, &inventories, offers.clone()).await.0, 403);
    assert_eq!(ask("an-admin", Method::PUT, &inventories, offers).await.0, 200);

    let claim = |project: &str, generation: Option<i64>| {
        json!({"allocations": {uuid(1): {"resources": {"VCPU": 1}}}, "project_id": project, "user_id": "u",
            "consumer_generation": generation, "consumer_type": "INSTANCE"})
    };
    let consumer = format!("/allocations/{}", uuid(100));
    assert_eq!(ask("mine", Method::PUT, &consumer, claim("theirs", None)).await.0, 403);
    assert_eq!(ask("mine", Method::PUT, &consumer, claim("mine", None)).await.0, 204);
    let candidates = ask("mine", Method::GET, "/allocation_candidates?resources=VCPU:1", json!(null)).await;
    assert_eq!((candidates.0, candidates.1["allocation_requests"].as_array().map(Vec::len)), (200, Some(1)));
    let (_, seen) = ask("mine", Method::GET, &consumer, json!(null)).await;
    assert_eq!(seen["project_id"], "mine");

    let (_, hidden) = ask("theirs", Method::GET, &consumer, json!(null)).await;
    assert_eq!(hidden, json!({"allocations": {}}));
    let of_provider = format!("/resource_providers/{}/allocations", uuid(1));
    assert_eq!(ask("theirs", Method::GET, &of_provider, json!(null)).await.0, 403);
    assert_eq!(ask("theirs", Method::PUT, &consumer, claim("theirs", Some(1))).await.0, 403);
    assert_eq!(ask("theirs", Method::DELETE, &consumer, json!(null)).await.0, 403);
    for (who, status) in [("mine", 200), ("theirs", 403)] {
        assert_eq!(ask(who, Method::GET, "/usages?project_id=mine", json!(null)).await.0, status);
    }
    assert_eq!(ask("mine", Method::DELETE, &consumer, json!(null)).await.0, 204);
}

#[tokio::test]
async fn tokens_in_the_store_let_in_as_long_as_they_are_there_and_change_one_provider_only() {
    let store = MemoryStore::new();
    let tokens = Tokens::new(vec![]).unwrap();
    let server = Server::start_on(&store, ApiConfig { auth: Auth::Tokens(tokens.clone()), ..open() }).await;
    let ask = async |method: Method, path: &str, token: &str, body: serde_json::Value| {
        let request = server.client.request(method, format!("{}{path}", server.url)).json(&body);
        let request = request.header("X-Auth-Token", token);
        let answer = request.header("OpenStack-API-Version", "placement latest").send().await.unwrap();
        answer.status().as_u16()
    };
    let look = async |token: &str| ask(Method::GET, "/traits", token, json!(null)).await;
    assert_eq!(look("the-token-of-a-node").await, 401);
    tokio::spawn(tokens.keep(Arc::new(store.clone()), "/p-tokens/".into()));
    let key = |token: &str| format!("/p-tokens/{}", token_digest(token));
    let write = async |token: &str, owner: &str| {
        store.txn(Txn::new().put(key(token), owner.as_bytes().to_vec())).await.unwrap();
    };
    let until = async |token: &str, status: u16| {
        for _ in 0..500 {
            if look(token).await == status {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{token} is never answered {status}");
    };
    until("the-token-of-a-node", 401).await;
    write("the-token-of-a-node", &json!({"version": 1, "name": "h", "provider": uuid(1)}).to_string()).await;
    write("the-token-of-control", r#"{"version": 1, "name": "control"}"#).await;
    until("the-token-of-a-node", 200).await;
    until("the-token-of-control", 200).await;

    let create = async |token: &str, number: u128| {
        let body = json!({"uuid": uuid(number), "name": format!("h{number}")});
        ask(Method::POST, "/resource_providers", token, body).await
    };
    assert_eq!(create("the-token-of-a-node", 2).await, 403);
    assert_eq!(create("the-token-of-a-node", 1).await, 200);
    assert_eq!(create("the-token-of-control", 2).await, 200);

    // Another release's, or garbage, lets nobody in; nor does one that is gone.
    write("the-token-of-a-node", r#"{"version": 2}"#).await;
    until("the-token-of-a-node", 401).await;
    store.txn(Txn::new().delete(key("the-token-of-control"))).await.unwrap();
    until("the-token-of-control", 401).await;
}

#[tokio::test]
async fn a_server_that_may_not_read_tokens_is_not_ready_and_says_why_to_whom_it_does_not_know() {
    let of_tokens = MemoryStore::new();
    of_tokens.faults().fail_next(usize::MAX, StoreError::Refused("permission denied".into()));
    // With one that is listed it would go on for those, until it has seen another in etcd.
    let tokens = Tokens::new(vec![]).unwrap();
    let config = ApiConfig { auth: Auth::Tokens(tokens.clone()), ..open() };
    let server = Server::start_on(&MemoryStore::new(), config).await;
    let ask = async |path: &str, token: &str| {
        let request = server.client.get(format!("{}{path}", server.url)).header("X-Auth-Token", token);
        let answer = request.header("OpenStack-API-Version", "placement latest").send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    assert_eq!(ask("/readyz", "").await.0, 200);
    tokio::spawn(tokens.keep(Arc::new(of_tokens.clone()), "/p-tokens/".into()));
    let until = async |status: u16| {
        for _ in 0..500 {
            let (is, text) = ask("/readyz", "").await;
            if is == status && !text.contains("yet") {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it is never {status}");
    };
    let why = "tokens that lie in etcd cannot be read: etcd refused: permission denied";
    assert_eq!(until(503).await, format!("not ready: {why}\n"));
    assert!(ask("/metrics", "").await.1.contains("\neplacement_ready 0\n"));
    let (status, text) = ask("/traits", "the-token-of-a-node").await;
    assert!(status == 503 && text.contains(why), "{text}");
    of_tokens.faults().fail_next(0, StoreError::Refused(String::new()));
    assert_eq!(until(200).await, "ok\n");
    assert_eq!(ask("/traits", "the-token-of-a-node").await.0, 401);
}

#[test]
fn what_cannot_serve_is_refused_with_what_would() {
    let wrong = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        config.settings().unwrap_err()
    };
    assert!(Config::default().settings().is_ok());
    assert!(wrong(|config| config.listen = Some("0.0.0.0:8080".into())).contains("--allow-remote-noauth"));
    assert!(wrong(|config| config.listen = Some("here".into())).contains("127.0.0.1:8080"));
    assert!(wrong(|config| config.prefix = Some("/".into())).contains("/ecompute/placement"));
    assert!(wrong(|config| config.max_txn_ops = Some(1)).contains("max-txn-ops"));
    let bad = Tokens::new(vec![Token {
        sha256: "x".into(),
        name: "n".into(),
        roles: vec![],
        project: None,
        provider: None,
    }]);
    assert!(bad.unwrap_err().contains("64 hexadecimal digits"));
    let bad = Tokens::new(vec![token("x", "king", None)]);
    assert!(bad.unwrap_err().contains("roles are admin, service, member and reader"));
    let bad = Tokens::new(vec![token("x", "member", None)]);
    assert!(bad.unwrap_err().contains("a member is one of a project"));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_tls_clients_must_show_the_certificate_that_is_wanted() {
    ec_runtime::install_tls_provider();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    certificates(directory.path()).unwrap();
    let section = |certificate: &str, client_ca: Option<&str>| TlsSection {
        certificate: path(certificate),
        key: path("server.key"),
        client_ca: client_ca.map(path),
    };
    let refused = |certificate: &str| section(certificate, None).open().err().unwrap().to_string();
    assert!(refused("none.pem").contains("none.pem"));
    assert!(refused("server.key").contains("no certificate"));
    let tls = section("server.pem", Some("ca.pem")).open().unwrap();
    let stop = CancellationToken::new();
    let store = Arc::new(MemoryStore::new());
    let replica = Replica::start(store, Keys::new("/p"), Limits::default(), Host::default(), stop.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = format!("https://{}", listener.local_addr().unwrap());
    let url = format!("{at}/resource_providers");
    let api = Arc::new(Api::new(replica, open(), true));
    tokio::spawn(serve(ServerConfig { listener, tls: Some(tls), files: 1024 }, api, stop.clone()));
    let root = reqwest::Certificate::from_pem(&std::fs::read(path("ca.pem")).unwrap()).unwrap();
    let client = || reqwest::Client::builder().no_proxy().tls_certs_only([root.clone()]);
    assert!(client().build().unwrap().get(&url).send().await.is_err(), "no certificate");
    let shows = |name: &str| {
        let mut pem = std::fs::read(path(&format!("{name}.pem"))).unwrap();
        pem.extend(std::fs::read(path(&format!("{name}.key"))).unwrap());
        client().identity(reqwest::Identity::from_pem(&pem).unwrap()).build().unwrap()
    };
    let (known, node) = (shows("client"), shows("node"));
    let post = known.post(&url).header("X-Auth-Token", "admin").json(&json!({"name": "n"}));
    let answer = post.send().await.unwrap();
    assert_eq!(answer.status(), 201);
    let location = answer.headers()["location"].to_str().unwrap();
    assert!(location.starts_with("https://127.0.0.1:"), "{location}");
    // A node asks of the API what its token lets it, and reads no numbers.
    let status = async |client: &reqwest::Client, path: &str| {
        let asked = client.get(format!("{at}{path}")).header("X-Auth-Token", "admin");
        asked.send().await.unwrap().status().as_u16()
    };
    for (path, of_node) in
        [("/healthz", 200), ("/readyz", 200), ("/resource_providers", 200), ("/metrics", 403)]
    {
        assert_eq!((status(&known, path).await, status(&node, path).await), (200, of_node), "{path}");
    }
    stop.cancel();
}

#[tokio::test]
async fn metrics_and_signs_of_life_need_no_token() {
    let server = Server::start().await;
    server.provider(1, None, &[("VCPU", 4)], &[], &[]).await;
    let text = async |path: &str| {
        let answer = server.client.get(format!("{}{path}", server.url)).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        answer.text().await.unwrap()
    };
    assert_eq!(text("/healthz").await, "ok\n");
    assert_eq!(text("/readyz").await, "ok\n");
    let metrics = text("/metrics").await;
    for line in [
        "eplacement_requests_total{route=\"/resource_providers\",method=\"POST\",status=\"200\"} 1",
        "eplacement_request_duration_seconds_count{route=\"/resource_providers\",method=\"POST\"} 1",
        "eplacement_batch_commands_count",
        "eplacement_transaction_conflicts_total 0",
        "eplacement_revision_lag 0",
        "eplacement_providers 1",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    ec_serve::metrics::parse(&metrics).unwrap();
}

#[tokio::test]
async fn two_replicas_started_on_nothing_at_the_same_moment_agree() {
    let store = MemoryStore::new();
    let (a, b) = tokio::join!(Server::start_on(&store, open()), Server::start_on(&store, open()));
    let path = "/resource_classes/CUSTOM_X";
    let (first, second) = tokio::join!(a.put(path, json!(null)), b.put(path, json!(null)));
    let mut made = [first.0, second.0];
    made.sort_unstable();
    assert_eq!(made, [201, 204], "one of them made it");
    for path in ["/traits", "/resource_classes"] {
        assert_eq!(a.get(path).await, b.get(path).await, "{path}");
    }
}

#[tokio::test]
async fn with_etcd_away_requests_are_told_to_come_again_and_later_answered_rightly() {
    let store = MemoryStore::new();
    let server = Server::start_on(&store, open()).await;
    let host = server.provider(1, None, &[("VCPU", 4)], &[], &[]).await;
    let path = format!("/resource_providers/{host}");
    store.faults().set_reachable(false);
    for request in [
        server.client.get(format!("{}{path}", server.url)),
        server.client.get(format!("{}/readyz", server.url)),
    ] {
        let answer = request.header("X-Auth-Token", "admin").send().await.unwrap();
        assert_eq!(answer.status(), 503);
    }
    let answer =
        server.client.get(format!("{}{path}", server.url)).header("X-Auth-Token", "admin").send().await;
    assert_eq!(answer.unwrap().headers()["retry-after"], "1");
    assert_eq!(server.client.get(format!("{}/healthz", server.url)).send().await.unwrap().status(), 200);
    store.faults().set_reachable(true);
    let mut tries = 0;
    while server.get(&path).await.0 == 503 {
        tries += 1;
        assert!(tries < 100);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(server.get(&path).await.0, 200);
}

#[tokio::test]
async fn an_etcd_restored_from_a_backup_is_read_anew_and_nothing_old_is_told() {
    let store = MemoryStore::new();
    let server = Server::start_on(&store, open()).await;
    let first = server.provider(1, None, &[("VCPU", 4)], &[], &[]).await;
    let backup = store.faults().backup();
    let second = server.provider(2, None, &[("VCPU", 4)], &[], &[]).await;
    store.faults().restore(&backup);
    let mut tries = 0;
    loop {
        match server.get(&format!("/resource_providers/{second}")).await.0 {
            404 => break,
            503 => tokio::time::sleep(Duration::from_millis(50)).await,
            other => unreachable!("{other}: what is not stored any more is not there"),
        }
        tries += 1;
        assert!(tries < 200);
    }
    assert_eq!(server.get(&format!("/resource_providers/{first}")).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cloud_moves_by_document_and_live_and_both_sides_are_the_same() {
    let source = MemoryStore::new();
    let server = Server::start_on(&source, open()).await;
    server.put("/traits/CUSTOM_T", json!(null)).await;
    server.put("/resource_classes/CUSTOM_R", json!(null)).await;
    let host = server.provider(1, None, &[("VCPU", 8), ("CUSTOM_R", 5)], &["CUSTOM_T"], &[9]).await;
    server.provider(2, Some(1), &[("DISK_GB", 100)], &["MISC_SHARES_VIA_AGGREGATE"], &[9]).await;
    for number in 0..5 {
        assert_eq!(
            server.put(&format!("/allocations/{}", uuid(100 + number)), claim(&host, "VCPU", 1)).await.0,
            204
        );
    }
    let keys = Keys::new("/p");
    let snapshot = Snapshot::of(&transfer::load(&source, &keys).await.unwrap().whole().unwrap());
    assert_eq!((snapshot.providers.len(), snapshot.consumers.len()), (2, 5));

    let live = live::fetch(reqwest::Client::new(), &server.url, "admin", 0).await.unwrap();
    assert_eq!(snapshot.differences(&live), Vec::<String>::new());

    let text = serde_json::to_string(&live).unwrap();
    let read: Snapshot = serde_json::from_str(&text).unwrap();
    let target = MemoryStore::new();
    transfer::import(&target, &keys, &read, 16, 7).await.unwrap();
    let moved = Server::start_on(&target, open()).await;
    for path in [
        format!("/resource_providers/{host}/usages"),
        format!("/allocations/{}", uuid(101)),
        "/resource_providers".into(),
    ] {
        assert_eq!(moved.get(&path).await, server.get(&path).await, "{path}");
    }
    let other = Snapshot { consumers: BTreeMap::new(), ..read };
    let again = transfer::import(&target, &keys, &other, 16, 7).await.unwrap_err();
    assert!(matches!(again, TransferError::NotEmpty(..)), "{again}");
}

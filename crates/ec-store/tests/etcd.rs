//! The store on etcd when etcd is gone, frozen, one of several, locked or speaking TLS.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests are no tests to clippy"
)]

mod support;

use std::{path::PathBuf, process::Command, sync::Arc, time::Duration};

use ec_store::{
    EtcdConfig, EtcdStore, EtcdTls, Grant, LeaseId, Store, StoreError, StoreResult, Txn, Users,
    testing::{EtcdServer, ServerTls, certificates},
};
use etcd_client::{AlarmAction, AlarmType};
use support::{PATIENCE, binaries, connect, connect_within, put};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

/// A port that nobody listens on.
fn dead_endpoint() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

fn assert_unreachable<T: std::fmt::Debug>(result: StoreResult<T>) -> String {
    match result {
        Err(error @ StoreError::Unreachable { .. }) => error.to_string(),
        other => panic!("wanted it unreachable, got {other:?}"),
    }
}

#[tokio::test]
async fn a_dead_etcd_is_reported_at_once_by_every_operation() {
    let dead = dead_endpoint();
    let store = connect(std::slice::from_ref(&dead)).await;
    let begin = Instant::now();
    let text = assert_unreachable(store.get("/a").await);
    assert!(text.contains(&dead) && text.contains("refused"), "{text}");
    println!("one request: {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_unreachable(store.list("/").await);
    assert_unreachable(store.txn(Txn::new().put("/a", "1")).await);
    assert_unreachable(store.watch("/", 1).await.map(drop));
    assert_unreachable(store.grant(Duration::from_secs(5)).await);
    assert_unreachable(store.keep_alive(LeaseId(1)).await);
    assert_unreachable(store.revoke(LeaseId(1)).await);
    assert_unreachable(store.compact(1).await);
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn with_one_of_two_endpoints_dead_no_request_fails() {
    let server = EtcdServer::start(None).await.unwrap();
    // Each begins with one of them by chance.
    for _ in 0..8 {
        let store = connect(&[dead_endpoint(), server.endpoint()]).await;
        for n in 0..60 {
            let outcome = store.txn(Txn::new().put("/a", n.to_string())).await.unwrap();
            assert!(outcome.succeeded);
            store.get("/a").await.unwrap();
        }
        let mut watch = store.watch("/a", 2).await.unwrap();
        assert!(!watch.next().await.unwrap().events.is_empty());
    }
}

#[tokio::test]
async fn a_member_that_is_cut_off_gives_no_copy_of_what_it_has() {
    let server = EtcdServer::start(None).await.unwrap();
    let store = connect(&[server.endpoint()]).await;
    assert!(store.snapshot().await.unwrap().next().await.unwrap().is_some());
    // A second member that never comes: one of two is no majority.
    let mut client = etcd_client::Client::connect([server.endpoint()], None).await.unwrap();
    client.member_add(["http://127.0.0.1:1"], None).await.unwrap();
    let begin = Instant::now();
    while client.status().await.unwrap().leader() != 0 {
        assert!(begin.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let text = assert_unreachable(store.snapshot().await.map(drop));
    assert!(text.contains("has no leader"), "{text}");
}

#[tokio::test]
async fn requests_move_to_the_other_endpoint_when_one_freezes() {
    // Two servers of different clusters: which one answers can then be seen.
    let (a, b) = (EtcdServer::start(None).await.unwrap(), EtcdServer::start(None).await.unwrap());
    let (only_a, only_b) = (connect(&[a.endpoint()]).await, connect(&[b.endpoint()]).await);
    put(&*only_a, "/who", "a").await;
    put(&*only_b, "/who", "b").await;
    let store = connect(&[a.endpoint(), b.endpoint()]).await;
    let who = async || store.get("/who").await.unwrap().0.unwrap().value;
    let first = who().await;
    let (frozen, other) = if first == b"a" { (&a, "b") } else { (&b, "a") };

    frozen.freeze().unwrap();
    let begin = Instant::now();
    assert_eq!(who().await, other.as_bytes());
    println!("moved after {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    let begin = Instant::now();
    assert_eq!(who().await, other.as_bytes());
    assert!(begin.elapsed() < Duration::from_secs(1), "it stays with the one that works");
    frozen.thaw().unwrap();
}

#[tokio::test]
async fn a_write_without_an_answer_is_unknown_and_a_read_is_unreachable() {
    let server = EtcdServer::start(None).await.unwrap();
    let store = connect(&[server.endpoint()]).await;
    put(&*store, "/a", "1").await;
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();
    store.keep_alive(lease).await.unwrap();

    server.freeze().unwrap();
    let begin = Instant::now();
    let error = store.txn(Txn::new().put("/a", "2")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unknown(_)), "{error}");
    let error = store.get("/a").await.unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("a write before this was not answered either"), "{error}");
    assert_unreachable(store.keep_alive(lease).await);
    println!("a write, a read and a renewal gave up after {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());

    server.thaw().unwrap();
    put(&*store, "/a", "3").await;
    store.keep_alive(lease).await.unwrap();
    // It was heard of since.
    server.freeze().unwrap();
    let error = store.get("/a").await.unwrap_err().to_string();
    assert!(!error.contains("a write before this"), "{error}");
    server.thaw().unwrap();
}

#[tokio::test]
async fn a_lease_and_its_renewal_survive_a_restart_of_etcd() {
    for binary in binaries() {
        let mut server = EtcdServer::start(Some(&binary)).await.unwrap();
        let store = connect(&[server.endpoint()]).await;
        let lease = store.grant(Duration::from_secs(10)).await.unwrap();
        store.txn(Txn::new().put_leased("/a", "1", lease)).await.unwrap();
        for _ in 0..2 {
            store.keep_alive(lease).await.unwrap();
            server.kill();
            assert_unreachable(store.keep_alive(lease).await);
            server.restart().await.unwrap();
            store.keep_alive(lease).await.unwrap();
        }
        assert!(store.get("/a").await.unwrap().0.is_some());
    }
}

#[tokio::test]
async fn a_member_that_freezes_costs_no_lease_however_long_requests_may_take() {
    let (a, b) = (EtcdServer::start(None).await.unwrap(), EtcdServer::start(None).await.unwrap());
    let store = connect_within(&[a.endpoint(), b.endpoint()], PATIENCE).await;
    let ttl = Duration::from_secs(9);
    // The lease of a key is the same in every etcd.
    let lease = connect(&[b.endpoint()]).await.grant_for("/a", ttl).await.unwrap();
    assert_eq!(store.grant_for("/a", ttl).await.unwrap(), lease);
    store.keep_alive(lease).await.unwrap();
    a.freeze().unwrap();
    timeout(ttl / 2, store.keep_alive(lease)).await.expect("it is not renewed in time").unwrap();
    a.thaw().unwrap();
}

#[tokio::test]
async fn a_watch_ends_with_an_error_when_etcd_dies_and_stays_ended() {
    let mut server = EtcdServer::start(None).await.unwrap();
    let store = connect(&[server.endpoint()]).await;
    let mut watch = store.watch("/", 1).await.unwrap();
    server.kill();
    for _ in 0..3 {
        let end = timeout(Duration::from_secs(5), watch.next()).await.expect("the watch is silent");
        assert_unreachable(end);
    }
}

#[tokio::test]
async fn a_listing_larger_than_one_message_comes_in_smaller_pages() {
    let server = EtcdServer::start(None).await.unwrap();
    // 64 MiB in one answer, which is then given up: on a busy machine that takes seconds.
    let store = connect_within(&[server.endpoint()], PATIENCE).await;
    let value = vec![7; 1 << 20];
    for n in 0..80 {
        store.txn(Txn::new().put(format!("/big/{n:02}"), value.clone())).await.unwrap();
    }
    let listing = store.list("/big/").await.unwrap();
    assert_eq!(listing.pairs.len(), 80);
    assert!(listing.pairs.iter().all(|pair| pair.value == value));
}

fn etcdctl(server: &EtcdServer, args: &[&str]) -> String {
    let output = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .arg(format!("--endpoints={}", server.endpoint()))
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "etcdctl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn an_etcd_without_space_says_so_and_what_helps() {
    for binary in binaries() {
        let server = EtcdServer::start(Some(&binary)).await.unwrap();
        let store = connect(&[server.endpoint()]).await;
        assert_eq!(store.server().await.unwrap().trouble(), None);
        let mut raw = etcd_client::Client::connect([server.endpoint()], None).await.unwrap();
        let mut alarm = async |action| raw.alarm(action, AlarmType::Nospace, None).await.unwrap();
        alarm(AlarmAction::Activate).await;
        let (trouble, mend) = store.server().await.unwrap().trouble().unwrap();
        assert!(trouble.contains("no space left") && mend.contains("alarm disarm"), "{trouble}: {mend}");
        let full = store.txn(Txn::new().put("/a", "1")).await.unwrap_err();
        assert!(matches!(full, StoreError::Full(_)) && full.to_string().contains(mend), "{full}");
        let refused = store.grant(Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(&refused, StoreError::Refused(why) if why.contains(mend)), "{refused}");
        alarm(AlarmAction::Deactivate).await;
        assert_eq!(store.server().await.unwrap().trouble(), None);
        put(&*store, "/a", "1").await;
    }
}

#[tokio::test]
async fn users_see_what_their_roles_let_them_see() {
    let mut server = EtcdServer::start(None).await.unwrap();
    for args in [
        &["user", "add", "root:rootpw"][..],
        &["user", "add", "agent:agentpw"],
        &["role", "add", "agent"],
        &["role", "grant-permission", "agent", "readwrite", "/own/", "--prefix=true"],
        &["user", "grant-role", "root", "root"],
        &["user", "grant-role", "agent", "agent"],
        &["auth", "enable"],
    ] {
        // etcd has the role of root made by the time it is granted only in later releases.
        if args == ["user", "grant-role", "root", "root"] {
            etcdctl(&server, &["role", "add", "root"]);
        }
        etcdctl(&server, args);
    }
    let login = async |user: &str, password: &str| {
        let config = EtcdConfig {
            endpoints: vec![server.endpoint()],
            user: Some(user.into()),
            password: Some(password.into()),
            ..EtcdConfig::default()
        };
        EtcdStore::connect(config).await.unwrap()
    };
    let store = login("agent", "agentpw").await;
    store.txn(Txn::new().put("/own/a", "1")).await.unwrap();
    let mut watch = store.watch("/own/", 1).await.unwrap();
    assert!(!watch.next().await.unwrap().events.is_empty());

    let is_denied = |error: StoreError| assert!(matches!(&error, StoreError::Refused(_)), "{error}");
    is_denied(store.txn(Txn::new().put("/other/a", "1")).await.unwrap_err());
    is_denied(store.list("/").await.unwrap_err());
    is_denied(store.watch("/other/", 1).await.map(drop).unwrap_err());
    let wrong = login("agent", "guess").await.get("/own/a").await.unwrap_err();
    assert!(!wrong.to_string().contains("guess"));
    is_denied(wrong);
    let nobody = connect(&[server.endpoint()]).await;
    is_denied(nobody.get("/own/a").await.unwrap_err());

    // Tokens are forgotten by a restart, and outdated by any change of users.
    server.restart().await.unwrap();
    put(&store, "/own/a", "2").await;
    etcdctl(&server, &["--user=root:rootpw", "user", "add", "third:pw"]);
    store.txn(Txn::new().put("/own/a", "3")).await.unwrap();
    etcdctl(&server, &["--user=root:rootpw", "user", "add", "fourth:pw"]);
    let mut watch = store.watch("/own/", 1).await.unwrap();
    assert!(!watch.next().await.unwrap().events.is_empty());
    let lease = store.grant(Duration::from_secs(30)).await.unwrap();
    store.keep_alive(lease).await.unwrap();
}

/// Who finds that something is not there, and is told that it is when he makes it: another was quicker, or an earlier try of his own.
#[tokio::test]
async fn what_another_makes_of_users_meanwhile_is_made() {
    async fn at_once<R>(op: impl Fn(Arc<EtcdStore>) -> R, store: &Arc<EtcdStore>)
    where
        R: Future<Output = StoreResult<()>> + Send + 'static,
    {
        let all: JoinSet<_> = (0..8).map(|_| op(Arc::clone(store))).collect();
        for done in all.join_all().await {
            done.unwrap();
        }
    }
    let server = EtcdServer::start(None).await.unwrap();
    let store = connect(&[server.endpoint()]).await;
    let right = |key: &str| Grant { key: key.into(), tree: true, write: false };
    for _ in 0..5 {
        at_once(|store| async move { store.ensure_user("u", "u").await }, &store).await;
        store.ensure_role("u", &[right("/a/"), right("/b/")]).await.unwrap();
        at_once(move |store| async move { store.ensure_role("u", &[right("/a/")]).await }, &store).await;
        at_once(|store| async move { store.drop_user("u").await }, &store).await;
    }
}

/// With each change of users or roles etcd refuses what it has looked at and not done yet, whoever asked for it.
#[tokio::test(flavor = "multi_thread")]
async fn who_writes_while_roles_are_changed_is_not_refused() {
    let directory = tempfile::tempdir().unwrap();
    certificates(directory.path()).unwrap();
    let file = |name: &str| directory.path().join(name);
    for binary in binaries() {
        let tls =
            ServerTls { cert: file("server.pem"), key: file("server.key"), client_ca: Some(file("ca.pem")) };
        let server = EtcdServer::start_tls(Some(&binary), tls).await.unwrap();
        // As whom a certificate names, so that nothing is slowed down by passwords.
        let tls = EtcdTls { ca_cert: file("ca.pem"), client: Some((file("client.pem"), file("client.key"))) };
        let config =
            EtcdConfig { endpoints: vec![server.endpoint()], tls: Some(tls), ..EtcdConfig::default() };
        let store = Arc::new(EtcdStore::connect(config).await.unwrap());
        for user in ["root", "client"] {
            store.ensure_user(user, "root").await.unwrap();
        }
        store.enable_auth().await.unwrap();
        let ends = Instant::now() + Duration::from_secs(3);
        let writers: JoinSet<usize> = (0..8)
            .map(|number| {
                let store = Arc::clone(&store);
                async move {
                    let mut written = 0;
                    while Instant::now() < ends {
                        store.txn(Txn::new().put(format!("/{number}"), "x")).await.unwrap();
                        written += 1;
                    }
                    written
                }
            })
            .collect();
        let changers: JoinSet<usize> = (0..4)
            .map(|number| {
                let (store, role) = (Arc::clone(&store), format!("role-{number}"));
                async move {
                    let mut changed = 0;
                    while Instant::now() < ends {
                        let right = Grant { key: format!("/{changed}/"), tree: true, write: true };
                        store.ensure_role(&role, &[right]).await.unwrap();
                        changed += 1;
                    }
                    changed
                }
            })
            .collect();
        let (written, changed) = tokio::join!(writers.join_all(), changers.join_all());
        println!("{written:?} writes beside {changed:?} changes");
        assert!(written.iter().chain(&changed).all(|done| *done > 0), "{written:?} {changed:?}");
    }
}

#[tokio::test]
async fn a_role_that_is_as_it_should_be_is_not_changed() {
    let newest = binaries().pop().unwrap();
    let server = EtcdServer::start(Some(&newest)).await.unwrap();
    let store = connect(&[server.endpoint()]).await;
    let right = |key: &str, tree, write| Grant { key: key.into(), tree, write };
    // Before 3.5 there is no such question.
    let changes = || {
        let url = format!("{}/v3/auth/status", server.endpoint());
        let told = Command::new("curl").args(["-s", "-d", "{}", &url]).output().unwrap().stdout;
        let told = String::from_utf8(told).unwrap();
        told.split_once("\"authRevision\":\"")?.1.split_once('"')?.0.parse::<u64>().ok()
    };
    let rights = [right("/one", false, true), right("/tree/", true, true), right("/read/", true, false)];
    store.ensure_role("r", &rights).await.unwrap();
    store.ensure_user("u", "r").await.unwrap();
    let before = changes();
    store.ensure_role("r", &rights).await.unwrap();
    store.ensure_user("u", "r").await.unwrap();
    assert_eq!(changes(), before);
    // One that it lacks, one that was less, one that is too many.
    let others = [right("/one", false, true), right("/read/", true, true), right("/new/", true, false)];
    store.ensure_role("r", &others).await.unwrap();
    assert_eq!(changes().map(|now| now - 3), before);
    let told = etcdctl(&server, &["role", "get", "r"]);
    let (read, write) = told.split_once("KV Write:").unwrap();
    assert!(read.contains("/new/") && !read.contains("/tree/"), "{told}");
    assert!(write.contains("/read/") && !write.contains("/new/"), "{told}");
}

#[tokio::test]
async fn tls_works_with_the_right_certificates_and_says_what_is_wrong_otherwise() {
    let (directory, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for directory in [&directory, &others] {
        certificates(directory.path()).unwrap();
    }
    let file = |name: &str| directory.path().join(name);
    let tls =
        ServerTls { cert: file("server.pem"), key: file("server.key"), client_ca: Some(file("ca.pem")) };
    let server = EtcdServer::start_tls(None, tls).await.unwrap();
    let store = async |ca: PathBuf, client: bool| {
        let client = client.then(|| (file("client.pem"), file("client.key")));
        let config = EtcdConfig {
            // Without a scheme, as most people write it.
            endpoints: vec![server.endpoint().trim_start_matches("https://").into()],
            tls: Some(EtcdTls { ca_cert: ca, client }),
            timeout: Duration::from_secs(2),
            ..EtcdConfig::default()
        };
        EtcdStore::connect(config).await
    };
    let good = store(file("ca.pem"), true).await.unwrap();
    good.txn(Txn::new().put("/a", "1")).await.unwrap();
    let mut watch = good.watch("/", 1).await.unwrap();
    assert!(!watch.next().await.unwrap().events.is_empty());

    let text = assert_unreachable(
        store(others.path().join("ca.pem"), true).await.unwrap().txn(Txn::new().put("/a", "2")).await,
    );
    assert!(text.contains("UnknownIssuer"), "{text}");
    // In TLS 1.3 the client is done before the server looks at its certificate, so what it notices is
    // sometimes the alert, and sometimes only that the connection is closed.
    let text = assert_unreachable(store(file("ca.pem"), false).await.unwrap().get("/a").await);
    println!("without a client certificate: {text}");
    let plain = connect(&[server.endpoint().replace("https", "http")]).await;
    println!("without TLS: {}", assert_unreachable(plain.get("/a").await));
    let error = store(file("missing.pem"), true).await.unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("missing.pem")), "{error}");
}

/// The authority itself is another afterwards, so that only who took the new files gets in.
#[tokio::test]
async fn certificates_that_are_written_anew_are_used_without_a_restart() {
    let (directory, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for directory in [&directory, &others] {
        certificates(directory.path()).unwrap();
    }
    let file = |name: &str| directory.path().join(name);
    let tls =
        ServerTls { cert: file("server.pem"), key: file("server.key"), client_ca: Some(file("ca.pem")) };
    let mut server = EtcdServer::start_tls(None, tls).await.unwrap();
    let config = EtcdConfig {
        endpoints: vec![server.endpoint()],
        tls: Some(EtcdTls {
            ca_cert: file("ca.pem"),
            client: Some((file("client.pem"), file("client.key"))),
        }),
        timeout: Duration::from_secs(2),
        ..EtcdConfig::default()
    };
    let store = EtcdStore::connect(config).await.unwrap();
    put(&store, "/a", "1").await;
    for name in ["ca.pem", "server.key", "server.pem", "client.key", "client.pem"] {
        std::fs::copy(others.path().join(name), file(name)).unwrap();
        // Half of them written: nobody uses a key without its certificate. Where that took so long that the files are looked at, the
        // new authority does not know the etcd that is there.
        if let Err(error) = store.get("/a").await {
            assert!(error.is_transient(), "{error}");
        }
    }
    server.restart().await.unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while let Err(error) = store.txn(Txn::new().put("/a", "2")).await {
        assert!(error.is_transient() && std::time::Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let mut watch = store.watch("/", 1).await.unwrap();
    assert!(!watch.next().await.unwrap().events.is_empty());
}

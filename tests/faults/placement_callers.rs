//! eplacement under callers that say one thing twice, say nothing, ask for too much, or come when it ends.

use std::{
    os::unix::fs::PermissionsExt,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_store::testing::EtcdServer;
use ec_tests::{
    program,
    replica::{Replica, claim},
};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const HOST: &str = "11111111-1111-4111-8111-111111111111";
const FIRST: &str = "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa";
const SECOND: &str = "bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb";

fn uuid(number: usize) -> String {
    format!("00000000-0000-4000-8000-{number:012x}")
}

#[tokio::test(flavor = "multi_thread")]
async fn one_consumer_in_two_spellings_gets_nothing_twice() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    for consumer in [FIRST, SECOND] {
        ensure!(replica.claim(consumer, &[HOST], 4).await?.0 == 204);
    }
    let upper = FIRST.to_uppercase();
    let generation = Some(1);
    let both: Value =
        [(upper.as_str(), claim(&[HOST], 1, generation)), (FIRST, claim(&[HOST], 7, generation))]
            .into_iter()
            .map(|(name, one)| (name.to_owned(), one))
            .collect::<serde_json::Map<_, _>>()
            .into();
    let answer = replica.send(Method::POST, "/allocations", Some(&both)).await?;
    ensure!(answer.0 == 400 && answer.1.to_string().contains("twice"), "{answer:?}");
    let inventories = json!({HOST: {
        "resource_provider_generation": replica.get(&format!("/resource_providers/{HOST}")).await?.1["generation"],
        "inventories": {"VCPU": {"total": 8}},
    }});
    let reshape = json!({"inventories": inventories, "allocations": both});
    let answer = replica.send(Method::POST, "/reshaper", Some(&reshape)).await?;
    ensure!(answer.0 == 400, "{answer:?}");
    ensure!(replica.used(HOST).await? == 8);
    let (_, consumer) = replica.get(&format!("/allocations/{FIRST}")).await?;
    ensure!(consumer["consumer_generation"] == 1, "{consumer}");
    // However it is spelled, it is one.
    let path = format!("/allocations/{upper}");
    let again = replica.send(Method::PUT, &path, Some(&claim(&[HOST], 3, generation))).await?;
    ensure!(again.0 == 204, "{again:?}");
    ensure!(replica.get(&path).await?.1["consumer_generation"] == 2);
    ensure!(replica.send(Method::DELETE, &path, None).await?.0 == 204);
    ensure!(replica.used(HOST).await? == 4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn more_used_than_there_is_is_told_by_check() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    ensure!(replica.claim(FIRST, &[HOST], 6).await?.0 == 204);
    let generation = replica.get(&format!("/resource_providers/{HOST}")).await?.1["generation"].clone();
    let smaller = json!({"resource_provider_generation": generation, "inventories": {"VCPU": {"total": 5}}});
    let path = format!("/resource_providers/{HOST}/inventories");
    ensure!(replica.send(Method::PUT, &path, Some(&smaller)).await?.0 == 200);
    let check = Command::new(program("eplacement")).args(["check", "--etcd", &etcd.endpoint()]).output()?;
    let told = String::from_utf8_lossy(&check.stdout).into_owned();
    ensure!(told.contains("6 of 5 VCPU are used, more than there is") && told.contains(HOST), "{told}");
    Ok(())
}

/// A request on a connection of its own; answers its status line, within this time.
async fn ask(port: u16, path: &str, within: Duration) -> Result<String> {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let head =
            format!("GET {path} HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer.lines().next().unwrap_or_default().to_owned())
    };
    tokio::time::timeout(within, asked)
        .await
        .with_context(|| format!("{path} was not answered in {within:?}"))?
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_keep_nobody_out() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    // As services are started, and with no more to be had.
    let replica = Replica::spawn(&["prlimit", "--nofile=1024:1024"], &etcd.endpoint(), &[])?;
    replica.until_ready().await?;
    let mut silent = Vec::new();
    for _ in 0..1100 {
        silent.push(TcpStream::connect(("127.0.0.1", replica.port())).await?);
    }
    for _ in 0..20 {
        for path in ["/healthz", "/readyz", "/resource_providers"] {
            let status = ask(replica.port(), path, Duration::from_secs(2)).await?;
            ensure!(status.contains("200"), "{path}: {status}\n{}", replica.log());
        }
    }
    ensure!(!replica.log().contains("Too many open files"), "{}", replica.log());
    // Those that say nothing are let go soon.
    tokio::time::sleep(Duration::from_secs(12)).await;
    let mut byte = [0; 1];
    for mut stream in silent {
        let ended = tokio::time::timeout(Duration::from_millis(200), stream.read(&mut byte)).await;
        ensure!(matches!(ended, Ok(Ok(0) | Err(_))), "a silent connection is still open");
    }
    Ok(())
}

/// The same with requests whose bodies never come to their end.
#[tokio::test(flavor = "multi_thread")]
async fn half_sent_bodies_keep_nobody_out() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let replica = Replica::spawn(&["prlimit", "--nofile=1024:1024"], &etcd.endpoint(), &[])?;
    replica.until_ready().await?;
    let mut halves = Vec::new();
    for _ in 0..1100 {
        // Not before the server takes connections again: there is a place for each that is half a second old.
        let mut stream = TcpStream::connect(("127.0.0.1", replica.port())).await?;
        let head = "POST /resource_providers HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\n\
                    Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n{";
        // One for which there is no place is ended at once.
        stream.write_all(head.as_bytes()).await.ok();
        halves.push(stream);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..20 {
        for path in ["/healthz", "/readyz", "/resource_providers"] {
            let status = ask(replica.port(), path, Duration::from_secs(2)).await?;
            ensure!(status.contains("200"), "{path}: {status}\n{}", replica.log());
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn long_searches_make_nobody_wait() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 1).await?;
    for number in 0..60 {
        let child = uuid(number);
        let body = json!({"name": child, "uuid": child, "parent_provider_uuid": HOST});
        ensure!(replica.send(Method::POST, "/resource_providers", Some(&body)).await?.0 == 200);
        let body = json!({"resource_provider_generation": 0, "inventories": {"DISK_GB": {"total": 4}}});
        let path = format!("/resource_providers/{child}/inventories");
        ensure!(replica.send(Method::PUT, &path, Some(&body)).await?.0 == 200);
    }
    // Six groups that must lie below one another, over siblings: every combination is looked at.
    let groups: String = (0..6).map(|group| format!("&resources_G{group}=DISK_GB:1")).collect();
    let same: Vec<String> = (0..6).map(|group| format!("_G{group}")).collect();
    let path = format!(
        "/allocation_candidates?limit=1&group_policy=isolate{groups}&same_subtree={}",
        same.join(",")
    );
    let mut searches = tokio::task::JoinSet::new();
    let begun = Instant::now();
    for _ in 0..6 {
        let (port, path) = (replica.port(), path.clone());
        searches.spawn(async move {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
            let head = format!(
                "GET {path} HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\nOpenStack-API-Version: placement 1.39\r\n\
                 Connection: close\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            anyhow::Ok(answer)
        });
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (mut slowest, mut times) = (Duration::ZERO, 0);
    while searches.try_join_next().is_none() {
        for path in ["/healthz", "/resource_providers?name=nobody"] {
            let began = Instant::now();
            ensure!(ask(replica.port(), path, Duration::from_secs(5)).await?.contains("200"));
            slowest = slowest.max(began.elapsed());
        }
        // Writes go through, too: the watch is not held up.
        ensure!(replica.claim(&uuid(1000 + times), &[HOST], 1).await?.0 < 500);
        times += 1;
    }
    let searched = begun.elapsed();
    println!("{times} times, the slowest answer took {slowest:?}, the first search {searched:?}");
    ensure!(times > 3, "the searches were too quick to show anything");
    // Who waits for a search waits for as long as that.
    ensure!(slowest < searched / 4, "{slowest:?} of {searched:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trait_asked_for_two_thousand_times_is_read_two_thousand_times() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    let path = |times: usize| {
        let traits = "&required=HW_CPU_X86_AVX".repeat(times);
        format!("/allocation_candidates?resources=VCPU:1{traits}")
    };
    let time = async |times: usize| {
        let began = Instant::now();
        let answer = replica.get(&path(times)).await?;
        ensure!(answer.0 == 200, "{answer:?}");
        anyhow::Ok(began.elapsed())
    };
    time(10).await?;
    let (few, many) = (time(500).await?, time(2000).await?);
    println!("500: {few:?}, 2000: {many:?}");
    // By pairs it would be sixteen times as long.
    ensure!(many < few * 10 + Duration::from_millis(100), "{few:?}, {many:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_being_answered_when_it_is_told_to_end_is_answered() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let mut replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 100).await?;
    // Twelve claims are under way while etcd does not answer.
    etcd.freeze()?;
    let mut under_way = tokio::task::JoinSet::new();
    let client = reqwest::Client::builder().no_proxy().build()?;
    for number in 0..12 {
        let url = format!("{}/allocations/{}", replica.url(), uuid(number));
        let request = client.put(url).header("X-Auth-Token", "admin");
        let request = request.header("OpenStack-API-Version", "placement 1.39");
        let request = request.json(&claim(&[HOST], 1, None));
        under_way.spawn(async move { anyhow::Ok(request.send().await?.status().as_u16()) });
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    replica.signal(Signal::SIGTERM)?;
    tokio::time::sleep(Duration::from_millis(700)).await;
    etcd.thaw()?;
    for answer in under_way.join_all().await {
        ensure!(matches!(answer, Ok(204)), "{answer:?}\n{}", replica.log());
    }
    let status = replica.ended().await?;
    ensure!(status.code() == Some(0), "{status}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_of_many_records_do_not_poison_each_other() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 10_000).await?;
    let hosts: Vec<String> = (0..20).map(uuid).collect();
    for host in &hosts {
        replica.provider(host, 10_000).await?;
    }
    let client = reqwest::Client::builder().no_proxy().build()?;
    let put = |path: String, body: Value, method: Method| {
        let request = client.request(method, format!("{}{path}", replica.url()));
        let request = request.header("X-Auth-Token", "admin");
        let request = request.header("OpenStack-API-Version", "placement 1.39").json(&body);
        async move { anyhow::Ok(request.send().await?.status().as_u16()) }
    };
    // Three records each, and each time more than fit into one transaction, gathered while etcd stalls.
    for round in 0..3 {
        etcd.freeze()?;
        let mut under_way = tokio::task::JoinSet::new();
        for number in 0..80 {
            let own = &hosts[number % 20];
            let path = format!("/allocations/{}", uuid(1000 + 100 * round + number));
            under_way.spawn(put(path, claim(&[HOST, own], 1, None), Method::PUT));
        }
        // And some that do not fit into any.
        for number in 0..3 {
            let many: serde_json::Map<String, Value> = (0..150)
                .map(|more| (uuid(100_000 + 1000 * number + more), claim(&[HOST], 1, None)))
                .collect();
            under_way.spawn(put("/allocations".into(), many.into(), Method::POST));
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        etcd.thaw()?;
        let mut answers: Vec<u16> = under_way.join_all().await.into_iter().collect::<Result<_>>()?;
        answers.sort_unstable();
        let done = answers.iter().filter(|status| **status == 204).count();
        let refused = answers.iter().filter(|status| **status == 400).count();
        ensure!((done, refused) == (80, 3), "{answers:?}\n{}", replica.log());
    }
    ensure!(replica.used(HOST).await? == 240);
    Ok(())
}

#[test]
fn doors_that_nobody_means_to_open_stay_shut() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let start = |config: &str| -> Result<String> {
        let file = directory.path().join("eplacement.yaml");
        std::fs::write(&file, config)?;
        let output = Command::new(program("eplacement")).arg("--config").arg(&file).output()?;
        ensure!(output.status.code() == Some(2), "{output:?}");
        let text = String::from_utf8(output.stderr)?;
        ensure!(text.lines().count() == 1, "{text}");
        Ok(text)
    };
    let text = start("cors: {allowed_origins: [\"*\"]}\n")?;
    ensure!(text.contains("allow_credentials"), "{text}");
    // The shipped example, with its tokens uncommented.
    let shipped = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../eplacement.yaml"))?;
    let mut open = shipped.replace("#auth: noauth", "auth: tokens");
    for line in ["#tokens:", "#  - sha256:", "#    name:", "#    roles:", "#    project:"] {
        ensure!(open.contains(line), "{line}");
        open = open.replace(line, &line[1..]);
    }
    let text = start(&open)?;
    ensure!(text.contains("example"), "{text}");
    Ok(())
}

#[test]
fn doors_that_are_open_all_the_same_are_told_at_the_start() -> Result<()> {
    let directory = tempfile::tempdir()?;
    // It cannot listen there, and so ends right after.
    let told = |more: &str, mode: u32| -> Result<String> {
        let file = directory.path().join("eplacement.yaml");
        std::fs::write(&file, format!("listen: 192.0.2.1:1\nallow_remote_noauth: true\n{more}"))?;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode))?;
        let output = Command::new(program("eplacement")).arg("--config").arg(&file).output()?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        Ok(String::from_utf8(output.stderr)?)
    };
    let text = told("etcd: {endpoints: [\"192.0.2.2:1\"]}\n", 0o644)?;
    ensure!(text.contains("etcd at 192.0.2.2:1 lets in whoever reaches it"), "{text}");
    ensure!(text.contains("whoever reaches 192.0.2.1:1 is believed"), "{text}");
    ensure!(!text.contains("holds a secret"), "{text}");
    let secret = "etcd: {user: a, password: b}\n";
    ensure!(told(secret, 0o644)?.contains("eplacement.yaml holds a secret"));
    ensure!(!told(secret, 0o640)?.contains("holds a secret"));
    // The same of whoever is its client.
    let file = directory.path().join("controller.yaml");
    let away = "listen: 192.0.2.1:1\netcd: {endpoints: [\"192.0.2.2:1\"]}\nplacement: {endpoint: \"http://192.0.2.3:1\"}\n";
    std::fs::write(&file, away)?;
    let output = Command::new(program("econtroller")).arg("--config").arg(&file).output()?;
    let text = String::from_utf8(output.stderr)?;
    ensure!(text.contains("etcd at 192.0.2.2:1 lets in whoever reaches it"), "{text}");
    ensure!(text.contains("placement at http://192.0.2.3:1 lets in whoever says `admin`"), "{text}");
    Ok(())
}

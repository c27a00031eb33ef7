//! eplacement while its etcd is restored from an older backup, emptied, or replaced by another.

use std::{
    process::{Command, Output},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use ec_store::{EtcdConfig, EtcdStore, Store, Txn, testing::EtcdServer};
use ec_tests::{program, replica::Replica};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::json;
use tempfile::TempDir;

const HOST: &str = "11111111-1111-4111-8111-111111111111";
const OTHER: &str = "22222222-2222-4222-8222-222222222222";
const FIRST: &str = "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa";
const SECOND: &str = "bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb";

/// After what happened to etcd, all must be well again so soon.
const SOON: Duration = Duration::from_secs(15);

async fn store(etcd: &EtcdServer) -> Result<EtcdStore> {
    let config = EtcdConfig { endpoints: vec![etcd.endpoint()], ..EtcdConfig::default() };
    Ok(EtcdStore::connect(config).await?)
}

/// Agents and others who write beside us.
async fn others_write(etcd: &EtcdServer, times: usize) -> Result<()> {
    let store = store(etcd).await?;
    for _ in 0..times {
        store.txn(Txn::new().put("/elsewhere", "")).await?;
    }
    Ok(())
}

fn check(etcd: &EtcdServer) -> Result<Output> {
    Ok(Command::new(program("eplacement")).args(["check", "--etcd", &etcd.endpoint()]).output()?)
}

/// Claims until it is answered otherwise than with 503; a 503 must say why, and change nothing.
async fn until_told(replica: &Replica, consumer: &str, vcpu: i64) -> Result<(u16, Duration)> {
    let began = Instant::now();
    loop {
        let body = ec_tests::replica::claim(&[HOST], vcpu, None);
        let path = format!("/allocations/{consumer}");
        let (status, answer) = replica.send(Method::PUT, &path, Some(&body)).await?;
        if status != 503 {
            return Ok((status, began.elapsed()));
        }
        ensure!(began.elapsed() < SOON, "still 503: {answer}\n{}", replica.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A backup with 4 of 8 used, of an etcd in which nothing is any more.
async fn released_since(etcd: &EtcdServer, replica: &Replica, directory: &TempDir) -> Result<()> {
    replica.provider(HOST, 8).await?;
    ensure!(replica.claim(FIRST, &[HOST], 4).await?.0 == 204);
    etcd.snapshot(&directory.path().join("backup"))?;
    replica.release(FIRST).await?;
    ensure!(replica.used(HOST).await? == 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_asleep_while_the_revision_was_overtaken_claims_nothing_twice() -> Result<()> {
    for binary in EtcdServer::binaries() {
        let directory = tempfile::tempdir()?;
        let mut etcd = EtcdServer::start(Some(&binary)).await?;
        let replica = Replica::start(&etcd.endpoint()).await?;
        released_since(&etcd, &replica, &directory).await?;
        replica.signal(Signal::SIGSTOP)?;
        etcd.restore(&directory.path().join("backup"))?;
        etcd.restart().await?;
        others_write(&etcd, 40).await?;
        replica.signal(Signal::SIGCONT)?;
        // At once, with what it knows from before.
        let (status, took) = until_told(&replica, SECOND, 8).await?;
        ensure!(status == 409, "{status}: 4 of 8 are used\n{}", replica.log());
        ensure!(replica.used(HOST).await? == 4);
        let (status, _) = until_told(&replica, SECOND, 4).await?;
        ensure!(status == 204, "{status}");
        replica.until_ready().await?;
        let checked = check(&etcd)?;
        ensure!(checked.status.success() && checked.stdout.is_empty(), "{checked:?}");
        println!("etcd {}: told after {took:?}", etcd.version());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_had_written_write_again_soon_after_a_restore() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut etcd = EtcdServer::start(None).await?;
    let replicas = [Replica::start(&etcd.endpoint()).await?, Replica::start(&etcd.endpoint()).await?];
    released_since(&etcd, &replicas[0], &directory).await?;
    for number in 0..20 {
        let replica = &replicas[number % 2];
        let path = format!("/traits/CUSTOM_{number}");
        ensure!(replica.send(Method::PUT, &path, None).await?.0 == 201);
    }
    etcd.restore(&directory.path().join("backup"))?;
    etcd.restart().await?;
    let began = Instant::now();
    for (number, replica) in replicas.iter().enumerate() {
        replica.until_ready().await?;
        // Ready means that writes work, at once.
        let path = format!("/traits/CUSTOM_NEW_{number}");
        let written = replica.send(Method::PUT, &path, None).await?;
        ensure!(written.0 == 201, "{written:?}\n{}", replica.log());
        ensure!(replica.used(HOST).await? == 4);
        ensure!(replica.get("/traits/CUSTOM_3").await?.0 == 404, "what is not in the backup is not there");
    }
    ensure!(began.elapsed() < SOON, "{:?}", began.elapsed());
    ensure!(check(&etcd)?.status.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_bumps_the_revision_works_as_the_manual_says() -> Result<()> {
    // The tool of the distribution may be too old for it.
    for binary in EtcdServer::binaries().into_iter().skip(1) {
        let directory = tempfile::tempdir()?;
        let mut etcd = EtcdServer::start(Some(&binary)).await?;
        let replica = Replica::start(&etcd.endpoint()).await?;
        released_since(&etcd, &replica, &directory).await?;
        let bump = ["--bump-revision", "1000000000", "--mark-compacted"];
        etcd.restore_with(&directory.path().join("backup"), &bump)?;
        etcd.restart().await?;
        let (status, _) = until_told(&replica, SECOND, 8).await?;
        ensure!(status == 409, "{status}\n{}", replica.log());
        replica.until_ready().await?;
        ensure!(replica.used(HOST).await? == 4);
        ensure!(until_told(&replica, SECOND, 4).await?.0 == 204);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_go_on_with_an_etcd_that_was_emptied() -> Result<()> {
    let mut etcd = EtcdServer::start(None).await?;
    let replicas = [Replica::start(&etcd.endpoint()).await?, Replica::start(&etcd.endpoint()).await?];
    replicas[0].provider(HOST, 8).await?;
    etcd.wipe()?;
    etcd.restart().await?;
    let began = Instant::now();
    for replica in &replicas {
        replica.until_ready().await?;
        ensure!(replica.get(&format!("/resource_providers/{HOST}")).await?.0 == 404);
    }
    replicas[1].provider(OTHER, 8).await?;
    ensure!(replicas[0].used(OTHER).await? == 0);
    ensure!(began.elapsed() < SOON, "{:?}", began.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_slept_wakes_up_on_another_cluster() -> Result<()> {
    let mut etcd = EtcdServer::start(None).await?;
    let sleeper = Replica::start(&etcd.endpoint()).await?;
    sleeper.provider(HOST, 8).await?;
    sleeper.signal(Signal::SIGSTOP)?;
    etcd.wipe()?;
    etcd.restart().await?;
    // Another cloud, whose revision is far beyond what the sleeper knows.
    let other = Replica::start(&etcd.endpoint()).await?;
    other.provider(OTHER, 8).await?;
    for number in 0..30 {
        ensure!(other.send(Method::PUT, &format!("/traits/CUSTOM_{number}"), None).await?.0 == 201);
    }
    sleeper.signal(Signal::SIGCONT)?;
    let began = Instant::now();
    let (status, _) = until_told(&sleeper, FIRST, 8).await?;
    ensure!(status == 400, "{status}: there is no such provider");
    sleeper.until_ready().await?;
    ensure!(sleeper.used(OTHER).await? == 0);
    let body = json!({"name": "n", "uuid": HOST});
    ensure!(sleeper.send(Method::POST, "/resource_providers", Some(&body)).await?.0 == 200);
    ensure!(other.get(&format!("/resource_providers/{HOST}")).await?.0 == 200);
    ensure!(began.elapsed() < SOON, "{:?}", began.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn while_etcd_is_away_it_is_told_and_afterwards_all_works() -> Result<()> {
    let mut etcd = EtcdServer::start(None).await?;
    let replica = Replica::start(&etcd.endpoint()).await?;
    replica.provider(HOST, 8).await?;
    etcd.stop().await?;
    for path in ["/resource_providers", "/readyz"] {
        let (status, answer) = replica.get(path).await?;
        ensure!(status == 503 && answer.to_string().contains("etcd"), "{path}: {status} {answer}");
    }
    ensure!(replica.get("/healthz").await?.0 == 200);
    etcd.restart().await?;
    let began = Instant::now();
    replica.until_ready().await?;
    ensure!(until_told(&replica, FIRST, 8).await?.0 == 204);
    ensure!(began.elapsed() < SOON, "{:?}", began.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_etcd_is_told_at_the_start() -> Result<()> {
    for binary in EtcdServer::binaries() {
        let etcd = EtcdServer::start(Some(&binary)).await?;
        let replica = Replica::start(&etcd.endpoint()).await?;
        let old = etcd.version().starts_with("3.4.");
        tokio::time::sleep(Duration::from_millis(500)).await;
        ensure!(replica.log().contains("3.5 or newer is recommended") == old, "{}", replica.log());
    }
    Ok(())
}

//! A replica that is farther from etcd than another one, on the same provider.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use ec_store::testing::EtcdServer;
use ec_tests::replica::{Replica, claim};
use reqwest::Method;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

const HOST: &str = "11111111-1111-4111-8111-111111111111";
/// There, and back again.
const WAY: Duration = Duration::from_millis(5);

/// Passes bytes on after their way.
async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin + Send + 'static) {
    let (sender, mut under_way) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let arriving = async move {
        while let Some((at, bytes)) = under_way.recv().await {
            tokio::time::sleep_until((at + WAY).into()).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
        to.shutdown().await.ok();
    };
    let arriving = tokio::spawn(arriving);
    let mut buffer = vec![0; 64 << 10];
    while let Ok(size @ 1..) = from.read(&mut buffer).await {
        if sender.send((Instant::now(), buffer[..size].to_vec())).is_err() {
            break;
        }
    }
    drop(sender);
    arriving.await.ok();
}

/// A way to etcd that takes its time; answers where it begins.
async fn relay(to: &str) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let to = to.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(&to).await else { continue };
            near.set_nodelay(true).ok();
            far.set_nodelay(true).ok();
            let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
            tokio::spawn(pass(near_read, far_write));
            tokio::spawn(pass(far_read, near_write));
        }
    });
    Ok(format!("http://{address}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_far_replica_gets_its_turn_on_a_busy_provider() -> Result<()> {
    let etcd = EtcdServer::start(None).await?;
    let near = Arc::new(Replica::start(&etcd.endpoint()).await?);
    let far = Replica::start(&relay(&etcd.endpoint()).await?).await?;
    near.provider(HOST, 1_000_000).await?;
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..4 {
        let (near, stop, done) = (Arc::clone(&near), Arc::clone(&stop), Arc::clone(&done));
        clients.spawn(async move {
            let path = format!("/allocations/00000000-0000-4000-8000-{client:012x}");
            let mut generation = None;
            while !stop.load(Ordering::Relaxed) {
                let answer = near.send(Method::PUT, &path, Some(&claim(&[HOST], 1, generation))).await?;
                ensure!(answer.0 == 204, "{answer:?}");
                generation = Some(generation.unwrap_or(0) + 1);
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
    }
    let (mut slowest, mut times) = (Duration::ZERO, 0);
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        let path = format!("/allocations/00000000-0000-4000-9000-{times:012x}");
        let began = Instant::now();
        let answer = far.send(Method::PUT, &path, Some(&claim(&[HOST], 1, None))).await?;
        ensure!(answer.0 == 204, "{answer:?} after {:?}", began.elapsed());
        slowest = slowest.max(began.elapsed());
        times += 1;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients.join_all().await {
        client?;
    }
    let done = done.load(Ordering::Relaxed);
    println!("far: {times} claims, the slowest {slowest:?}; near: {done} claims in 10 s");
    ensure!(slowest < Duration::from_secs(3), "{slowest:?}");
    ensure!(done > 500, "the near one did {done}");
    let (_, metrics) = far.get("/metrics").await?;
    ensure!(metrics.to_string().contains("eplacement_contention_total 0"), "{metrics}");
    Ok(())
}

//! eplacement on an etcd that is near, and on one that is some way off: what it costs to wait for it.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_store::testing::EtcdServer;
use ec_tests::PlacementServer;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use super::{
    Row, host,
    load::{self, Work},
};

/// One way.
const WAYS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(5), Duration::from_millis(25)];
const CLIENTS: [usize; 4] = [8, 32, 64, 256];
const PROVIDERS: u64 = 1_000;
const TIME: Duration = Duration::from_secs(3);

/// Measures everything.
pub(crate) async fn measure() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for way in WAYS {
        eprintln!("etcd {} ms away", way.as_millis());
        let directory = tempfile::tempdir()?;
        let etcd = EtcdServer::start(None).await?;
        let endpoint = if way.is_zero() { etcd.endpoint() } else { behind(&etcd.endpoint(), way).await? };
        let server = PlacementServer::start(directory.path(), &endpoint)?;
        server.until_it_answers().await?;
        load::register(&host(&server), PROVIDERS).await?;
        let mut claimed = 0;
        for clients in CLIENTS {
            let before = processor(&server)?;
            let put = load::run(&host(&server), Work::Put, clients, TIME).await?;
            let took = processor(&server)? - before;
            claimed += put.done;
            let name = format!("etcd {} ms away, {clients} clients: the PUT alone", way.as_millis());
            rows.push(Row::new(name.clone(), "/s", put.rate));
            rows.push(Row::new(format!("{name}, median"), "ms", put.median));
            let each = took.as_secs_f64() * 1000.0 / put.done as f64;
            rows.push(Row::new(format!("{name}, eplacement's processor"), "ms", each));
        }
        let sum = load::audit(&host(&server)).await?;
        ensure!(
            u64::try_from(sum)? == claimed,
            "{claimed} claims were acknowledged, and {sum} VCPU are used"
        );
    }
    Ok(rows)
}

/// Processor time that our server has used.
fn processor(server: &PlacementServer) -> Result<Duration> {
    let pid = server.pid().context("it does not run")?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // After the name, which ends with a parenthesis: user and system are the 12th and 13th.
    let (_, fields) = stat.rsplit_once(") ").context("no name")?;
    let mut ticks = 0;
    for field in fields.split(' ').skip(11).take(2) {
        ticks += field.parse::<u64>()?;
    }
    // The kernel tells hundredths of a second, whatever it counts itself.
    Ok(Duration::from_millis(ticks * 10))
}

/// A way to a server on which everything takes so long, there and back. Answers its endpoint.
async fn behind(endpoint: &str, way: Duration) -> Result<String> {
    let server: SocketAddr = endpoint.trim_start_matches("http://").parse()?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(server).await?;
            near.set_nodelay(true)?;
            far.set_nodelay(true)?;
            let (near, far) = (near.into_split(), far.into_split());
            tokio::spawn(carry(near.0, far.1, way));
            tokio::spawn(carry(far.0, near.1, way));
        }
        anyhow::Ok(())
    });
    Ok(format!("http://{address}"))
}

/// As wide as may be: what comes later does not wait for what came before.
async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin + Send + 'static,
    way: Duration,
) -> Result<()> {
    let (sender, mut receiver) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((at, bytes)) = receiver.recv().await {
            tokio::time::sleep_until((at + way).into()).await;
            to.write_all(&bytes).await?;
        }
        anyhow::Ok(())
    });
    loop {
        let mut bytes = Vec::with_capacity(64 << 10);
        if from.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
        sender.send((Instant::now(), bytes))?;
    }
}

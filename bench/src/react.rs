//! How soon an agent acts on a put: against a bare etcd watch.
//!
//! The agent runs in this process, so that one clock serves; its store tells each write before it is sent.
//! It asks nobody anything before the writes that are waited for here.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ec_model::{Desired, InstanceId, NodeId, State, Status, decode};
use ec_tests::Stack;
use etcd_client::{WatchOptions, WatchStream};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::{
    bare::PATIENCE,
    orders::Orders,
    simulated::{AgentThread, Noted, configure},
    stats::{Figure, Goal, Samples},
};

const ROUNDS: usize = 40;
/// Not counted: the image is taken into the cache, and every path is gone once.
const WARM_UP: usize = 3;
/// Before each measured put, so that what placement and etcd still write does not weigh on it.
const SETTLE: Duration = Duration::from_millis(50);
/// Where the bare watch looks; no agent does.
const BARE_PREFIX: &str = "/bench/";

/// Measures with an agent that builds for real, on simulated guests.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let node = NodeId::new(uuid::Uuid::new_v4());
    let orders = Orders::new(stack, node, &[("VCPU", 1), ("MEMORY_MB", 1)]).await?;
    let directory = tempfile::tempdir()?;
    let config =
        configure(directory.path(), node, &stack.etcd.endpoint(), &stack.placement_server.endpoint())?;
    let (noted, mut writes) = mpsc::channel(1024);
    let agent = AgentThread::start(config, noted)?;
    let outcome = async {
        orders.until_alive().await?;
        rounds(&orders, &mut writes).await
    };
    let outcome = outcome.await;
    agent.end()?;
    outcome
}

async fn rounds(orders: &Orders<'_>, writes: &mut mpsc::Receiver<Noted>) -> Result<Vec<Figure>> {
    let mut watch = BareWatch::open(orders).await?;
    let (mut build, mut end) = (Pair::default(), Pair::default());
    for round in 0..WARM_UP + ROUNDS {
        let instance = Orders::instance();
        orders.claim(&[instance]).await?;
        let bare_build = watch.put_and_see(orders, instance).await?;
        let ours_build = act(orders, writes, instance, Desired::Active, State::Preparing).await?;
        orders.until_active(1).await?;
        let bare_end = watch.put_and_see(orders, instance).await?;
        let ours_end = act(orders, writes, instance, Desired::Destroyed, State::Destroying).await?;
        orders.until_gone(instance).await?;
        if round >= WARM_UP {
            build.push(ours_build, bare_build);
            end.push(ours_end, bare_end);
        }
    }
    let figure = |name, pair: Pair| Figure {
        name,
        unit: "ms",
        ours: pair.ours,
        bare: Some(("a put of the same value, until a bare watch has its event", pair.bare)),
        goals: vec![Goal::Ratio(2.0), Goal::Under(5.0)],
    };
    Ok(vec![
        figure("agent: put of a request → writes PREPARING", build),
        figure("agent: put of a destroy → writes DESTROYING", end),
    ])
}

/// Both sides of a comparison.
#[derive(Default)]
struct Pair {
    ours: Samples,
    bare: Samples,
}

impl Pair {
    fn push(&mut self, ours: Duration, bare: Duration) {
        self.ours.push_time(ours);
        self.bare.push_time(bare);
    }
}

/// The time from before the put of a request until the agent is about to write this state.
async fn act(
    orders: &Orders<'_>,
    writes: &mut mpsc::Receiver<Noted>,
    instance: InstanceId,
    desired: Desired,
    state: State,
) -> Result<Duration> {
    let key = orders.keys.status(orders.node, instance);
    sleep(SETTLE).await;
    let begun = Instant::now();
    orders.order(instance, desired).await?;
    let wait = async {
        while let Some(noted) = writes.recv().await {
            if noted.key == key && decode::<Status>(&noted.value)?.state == state {
                return Ok(noted.at - begun);
            }
        }
        bail!("the agent ended")
    };
    timeout(PATIENCE, wait).await.with_context(|| format!("{instance} did not become {state}"))?
}

/// A watch with nothing of ours around it.
struct BareWatch {
    stream: WatchStream,
}

impl BareWatch {
    async fn open(orders: &Orders<'_>) -> Result<Self> {
        let client = etcd_client::Client::connect([orders.stack.etcd.endpoint()], None).await?;
        let options = WatchOptions::new().with_prefix();
        let mut stream = client.watch_client().watch(BARE_PREFIX, Some(options)).await?;
        let created = stream.message().await?.is_some_and(|answer| answer.created());
        anyhow::ensure!(created, "etcd did not accept the bare watch");
        Ok(Self { stream })
    }

    /// Puts what a request would be; answers the time until its event arrived.
    async fn put_and_see(&mut self, orders: &Orders<'_>, instance: InstanceId) -> Result<Duration> {
        sleep(SETTLE).await;
        let begun = Instant::now();
        let value = orders.request(instance, Desired::Active);
        let event = async {
            let answer = timeout(PATIENCE, self.stream.message()).await??;
            let at = Instant::now();
            let events = answer.context("the bare watch ended")?.events().len();
            anyhow::ensure!(events == 1, "{events} events where one was put");
            Ok(at)
        };
        // The event may well be here before the put's own answer.
        let (put, at) = tokio::join!(orders.put(format!("{BARE_PREFIX}{instance}"), value), event);
        put?;
        Ok(at? - begun)
    }
}

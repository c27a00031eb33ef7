//! Many requests at once, against the same calls given to libvirt by ten threads.

use std::{
    collections::HashSet,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use ec_model::{Desired, InstanceId};
use ec_tests::Stack;
use virt::{storage_vol::StorageVol, sys};

use crate::{
    build::Pattern,
    orders::Orders,
    stats::{Figure, Goal, Samples},
};

/// So many at once, with the name of the figure and how often it is measured.
const BURSTS: [(usize, &str, usize); 2] = [
    (10, "agent: ten requests at once → all domains run", 9),
    (30, "agent: thirty requests at once → all domains run", 3),
];
/// What a user's own program would do.
const THREADS: usize = 10;
const POLL: Duration = Duration::from_millis(20);
/// Thirty emulated guests that boot on two processors slow down the start of the last.
const PATIENCE: Duration = Duration::from_secs(240);
/// What the taking down before leaves to be done.
const SETTLE: Duration = Duration::from_secs(2);

/// Measures with the stack's agent, which must run and have the image in its cache.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let resources = [("VCPU", 1), ("MEMORY_MB", 128), ("DISK_GB", 1)];
    let orders = Orders::new(stack, stack.node, &resources).await?;
    let first = Orders::instance();
    orders.claim(&[first]).await?;
    orders.order(first, Desired::Active).await?;
    orders.until_active(1).await?;
    let pattern = tokio::task::block_in_place(|| Pattern::of(stack, first))?;
    orders.order(first, Desired::Destroyed).await?;
    orders.until_gone(first).await?;
    let mut figures = Vec::new();
    for (count, name, rounds) in BURSTS {
        let (mut ours, mut bare) = (Samples::default(), Samples::default());
        for _ in 0..rounds {
            bare.push_time(tokio::task::block_in_place(|| bare_burst(stack, &pattern, count))?);
            ours.push_time(burst(stack, &orders, count).await?);
        }
        figures.push(Figure {
            name,
            unit: "ms",
            ours,
            bare: Some(("the same XML given to libvirt by ten threads", bare)),
            goals: vec![Goal::Ratio(1.1)],
        });
    }
    Ok(figures)
}

async fn burst(stack: &Stack, orders: &Orders<'_>, count: usize) -> Result<Duration> {
    let instances: Vec<_> = (0..count).map(|_| Orders::instance()).collect();
    orders.claim(&instances).await?;
    tokio::time::sleep(SETTLE).await;
    let begun = Instant::now();
    let look = Look::begin(stack, &instances);
    for instance in &instances {
        orders.order(*instance, Desired::Active).await?;
    }
    let took = tokio::task::block_in_place(|| look.all_run(stack))? - begun;
    for instance in &instances {
        orders.order(*instance, Desired::Destroyed).await?;
    }
    for instance in &instances {
        orders.until_gone(*instance).await?;
    }
    Ok(took)
}

fn bare_burst(stack: &Stack, pattern: &Pattern, count: usize) -> Result<Duration> {
    let instances: Vec<_> = (0..count).map(|_| Orders::instance()).collect();
    let queue = Mutex::new(instances.clone());
    thread::sleep(SETTLE);
    let begun = Instant::now();
    let look = Look::begin(stack, &instances);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS.min(count))
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    let connect = stack.libvirt.connection();
                    let pool = connect.lookup_storage_pool_by_name(&pattern.pool_name()?)?;
                    loop {
                        let next = queue.lock().map_err(|_| anyhow!("a thread panicked"))?.pop();
                        let Some(instance) = next else { return Ok(()) };
                        let (volume, domain) = pattern.documents(instance);
                        StorageVol::create_xml(&pool, &volume, 0)?;
                        connect.define_domain_xml(&domain)?.create()?;
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    let took = look.all_run(stack)? - begun;
    for instance in instances {
        pattern.remove(stack, instance)?;
    }
    Ok(took)
}

/// A look at libvirt from the beginning, which costs ours and the bare calls the same.
pub(crate) struct Look(thread::JoinHandle<Result<Result<Instant, HashSet<InstanceId>>>>);

impl Look {
    pub(crate) fn begin(stack: &Stack, instances: &[InstanceId]) -> Self {
        let connect = stack.libvirt.connection();
        let mut missing: HashSet<_> = instances.iter().copied().collect();
        Self(thread::spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            while Instant::now() < deadline {
                for domain in connect.list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_RUNNING)? {
                    missing
                        .remove(&domain.name()?.parse::<InstanceId>().context("a domain of another name")?);
                }
                if missing.is_empty() {
                    return Ok(Ok(Instant::now()));
                }
                thread::sleep(POLL);
            }
            Ok(Err(missing))
        }))
    }

    /// The moment at which all of them ran.
    pub(crate) fn all_run(self, stack: &Stack) -> Result<Instant> {
        self.0.join().map_err(|_| anyhow!("the look panicked"))??.map_err(|missing| {
            let log = stack.log();
            let troubles: Vec<_> = log.lines().filter(|line| line.contains(" WARN ")).collect();
            let last = troubles[troubles.len().saturating_sub(10)..].join("\n");
            anyhow!("{missing:?} do not run; the agent said:\n{last}")
        })
    }
}

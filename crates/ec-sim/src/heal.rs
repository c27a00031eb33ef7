//! What must come to be when nothing goes wrong any more: everybody converges in bounded time, and nothing is left over.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use ec_cloud::{CloudError, destroy, list};
use ec_model::{Desired, InstanceId, Request, State, Status, decode};
use tokio::time::{Instant, sleep};

use crate::{
    acts::guests,
    life::Life,
    referee::{Known, observed},
    user::cloud,
    world::{Actor, PLACEMENT, World},
};

/// Beyond a follower's resync, ten minutes after which left-overs count as such, and an audit's grace.
const BOUND: Duration = Duration::from_secs(30 * 60);
const PERIOD: Duration = Duration::from_secs(10);

/// Everything that there is of an instance, wherever it lies.
pub(crate) struct Traces {
    pub(crate) request: Option<Request>,
    pub(crate) status: Option<Status>,
    pub(crate) claim: bool,
    pub(crate) index: bool,
    pub(crate) domain: bool,
    pub(crate) volume: bool,
    pub(crate) record: bool,
}

impl Traces {
    pub(crate) fn of(world: &World, instance: InstanceId) -> Self {
        let keys = &world.keys;
        let get = |key: String| crate::door::content(world, &key);
        let nodes = || world.computers.iter().map(|computer| computer.node);
        let request = nodes().find_map(|node| get(keys.request(node, instance)));
        let status = nodes().find_map(|node| get(keys.status(node, instance)));
        let seen: Vec<_> =
            world.computers.iter().filter_map(|computer| observed(computer, instance)).collect();
        let recorded = |computer: &crate::node::Computer| {
            computer.records().is_ok_and(|records| records.contains(&instance.to_string()))
        };
        Self {
            request: request.and_then(|pair| decode(&pair.value).ok()),
            status: status.and_then(|pair| decode(&pair.value).ok()),
            claim: get(format!("{PLACEMENT}/consumers/{instance}")).is_some(),
            index: get(keys.instance(instance)).is_some(),
            domain: seen.iter().any(|seen| seen.domain.is_some()),
            volume: seen.iter().any(|seen| seen.volume),
            record: world.computers.iter().any(|computer| recorded(computer)),
        }
    }

    pub(crate) fn is_anything(&self) -> bool {
        self.request.is_some()
            || self.status.is_some()
            || self.claim
            || self.index
            || self.domain
            || self.volume
            || self.record
    }

    pub(crate) fn told(&self) -> String {
        let mut told: Vec<String> = Vec::new();
        told.extend(self.request.as_ref().map(|request| format!("request {:?}", request.desired)));
        told.extend(self.status.as_ref().map(|status| {
            format!("status {} {}", status.state, status.reason.as_deref().unwrap_or_default())
        }));
        for (is, name) in [
            (self.claim, "claim"),
            (self.index, "index"),
            (self.domain, "domain"),
            (self.volume, "volume"),
            (self.record, "record"),
        ] {
            told.extend(is.then(|| name.to_owned()));
        }
        if told.is_empty() { "nothing".to_owned() } else { told.join(", ") }
    }
}

/// Every instance of which there is anything, or was.
async fn everything(world: &World) -> BTreeSet<InstanceId> {
    let mut all: BTreeSet<InstanceId> =
        world.judge(|referee, _| referee.instances().map(|(instance, _)| instance).collect());
    for prefix in ["/ecompute/requests/", "/ecompute/status/", "/ecompute/instances/", "/ecompute/names/"] {
        all.extend(last_parts(world, prefix));
    }
    all.extend(last_parts(world, &format!("{PLACEMENT}/consumers/")));
    for computer in &world.computers {
        all.extend(guests(world, computer).await);
        let records = computer.records().unwrap_or_default();
        all.extend(records.iter().filter_map(|name| name.parse::<InstanceId>().ok()));
    }
    let sealed = world.judge(|referee, _| referee.sealed_guests().clone());
    all.retain(|instance| !sealed.contains(instance));
    all
}

fn last_parts(world: &World, prefix: &str) -> Vec<InstanceId> {
    let pairs = world.store.content(prefix).pairs;
    pairs.iter().filter_map(|pair| pair.key.rsplit('/').next()?.parse().ok()).collect()
}

/// Waits until everybody has come to rest, then until nothing is left after everything was destroyed.
pub(crate) async fn converge(world: &Arc<World>) {
    let begun = Instant::now();
    world.log(Actor::Nemesis, "everything shall come to what is asked for");
    until(world, begun, "did not come to rest", || async { unrest(world).await }).await;
    if world.failed.is_cancelled() {
        return;
    }
    world.log(Actor::Nemesis, "everything shall be destroyed");
    let begun = Instant::now();
    until(world, begun, "is left over", || async {
        destroy_all(world).await;
        left(world).await
    })
    .await;
}

/// Looks until there is nothing to complain of, or the time is over.
async fn until<F, C>(world: &Arc<World>, begun: Instant, what: &str, mut complaints: F)
where
    F: FnMut() -> C,
    C: Future<Output = Vec<String>>,
{
    loop {
        let found = complaints().await;
        if world.failed.is_cancelled() {
            return;
        }
        if found.is_empty() {
            world.log(Actor::Nemesis, format!("so it is after {} s", begun.elapsed().as_secs()));
            return;
        }
        if begun.elapsed() > BOUND {
            let found = found.join("; ");
            world.judge(|referee, _| {
                referee.found(format!("{what} in {} s: {found}", BOUND.as_secs()));
            });
            return;
        }
        sleep(PERIOD).await;
    }
}

/// What is not as it is asked for.
async fn unrest(world: &Arc<World>) -> Vec<String> {
    // What a killed command left goes when somebody comes across it.
    let Ok(cloud) = cloud(world, Actor::User(0), &Life::new()) else { return vec!["no command line".into()] };
    if let Err(error) = list(&cloud).await {
        return vec![format!("list: {error}")];
    }
    let mut found = Vec::new();
    for computer in &world.computers {
        if crate::door::content(world, &world.keys.node(computer.node)).is_none() {
            found.push(format!("node {} is not alive", computer.node));
        }
    }
    for instance in everything(world).await {
        let traces = Traces::of(world, instance);
        let (known, restored) = world.judge(|referee, _| (referee.known(instance), referee.restored));
        let Known { acknowledged, wished_away, doomed, wrote, disturbed, .. } = known;
        let state = traces.status.as_ref().map(|status| status.state);
        let asked_for = traces.request.as_ref().map(|request| request.desired);
        let whole = traces.claim && traces.index && traces.domain && traces.volume && traces.record;
        let well = match (asked_for, state) {
            _ if doomed && !restored => !traces.is_anything(),
            (Some(Desired::Active), Some(State::Active)) => whole,
            (Some(Desired::Active), Some(State::Stopped | State::Paused | State::Error)) => {
                (disturbed || restored) && (traces.claim || !wrote)
            }
            // Kept by its node, and counted. A disk alone that a call brought back late, after etcd had forgotten its
            // instance, may be anybody's, and nobody can tell how large it is: that stays until it is destroyed.
            (None, Some(State::Unclaimed)) => {
                restored && (traces.claim || !(wrote || traces.domain || traces.record))
            }
            // It never ran: its name stays until somebody destroys it, and that is all.
            (None, Some(State::Error)) => {
                !wrote && !traces.claim && !traces.domain && !traces.volume && !traces.record
            }
            (None, None) => {
                let lost = acknowledged.is_some() && !wished_away && !restored;
                !traces.is_anything() && !lost
            }
            _ => false,
        };
        if !well {
            found.push(format!("{instance}: {}", traces.told()));
        }
    }
    found
}

async fn destroy_all(world: &Arc<World>) {
    let Ok(cloud) = cloud(world, Actor::User(0), &Life::new()) else { return };
    for instance in everything(world).await {
        let traces = Traces::of(world, instance);
        let goes = traces.request.as_ref().is_some_and(|request| request.desired == Desired::Destroyed);
        if !traces.is_anything() || goes {
            continue;
        }
        world.judge(|referee, _| referee.wished_away(instance));
        match destroy(&cloud, instance).await {
            Ok(_) => world.log(Actor::User(0), format!("destroy {instance}: it goes")),
            // It is as good as gone.
            Err(CloudError::NotFound(_)) => {}
            Err(error) => world.log(Actor::User(0), format!("destroy {instance}: {error}")),
        }
    }
}

/// What is left though everything was destroyed.
async fn left(world: &Arc<World>) -> Vec<String> {
    let mut found = Vec::new();
    for instance in everything(world).await {
        let traces = Traces::of(world, instance);
        if traces.is_anything() {
            found.push(format!("{instance}: {}", traces.told()));
        }
    }
    for prefix in ["/ecompute/names/", "/ecompute/userdata/"] {
        found.extend(world.store.content(prefix).pairs.into_iter().map(|pair| pair.key));
    }
    found
}

//! What must come to be when nothing goes wrong any more: everybody converges in bounded time, and nothing is left over.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use ec_cloud::{CloudError, destroy, list};
use ec_model::{Desired, InstanceId, NodeId, Request, State, Status, decode};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{
    life::Life,
    nemesis::guests,
    node::PROCESSORS,
    referee::{Known, marked, observed},
    user::cloud,
    world::{Actor, PLACEMENT, World},
};

/// Beyond a follower's resync, ten minutes after which left-overs count as such, and an audit's grace.
const BOUND: Duration = Duration::from_secs(30 * 60);
/// What somebody asks for is come to much sooner: beyond a row of failures, and a look that fails.
const SOON: Duration = Duration::from_secs(4 * 60);
/// But for a watch that says nothing any more: a follower lists anew after so long.
const RESYNC: Duration = Duration::from_secs(300);
const PERIOD: Duration = Duration::from_secs(10);

/// What is wrong, and how long it may be.
type Complaint = (Duration, String);

/// Everything that there is of an instance, wherever it lies.
struct Traces {
    request: Option<Request>,
    status: Option<Status>,
    claim: bool,
    index: bool,
    domain: bool,
    volume: bool,
    record: bool,
    /// Where there is anything of its guest.
    host: Option<NodeId>,
}

/// The agents' own records, by node.
type Records = BTreeMap<NodeId, BTreeSet<String>>;

fn records(world: &World) -> Records {
    let of = |computer: &Arc<crate::node::Computer>| {
        (computer.node, computer.records().unwrap_or_default().into_iter().collect())
    };
    world.computers.iter().map(of).collect()
}

impl Traces {
    fn of(world: &World, records: &Records, instance: InstanceId) -> Self {
        let keys = &world.keys;
        let get = |key: String| crate::door::content(world, &key);
        let nodes = || world.computers.iter().map(|computer| computer.node);
        let request = nodes().find_map(|node| get(keys.request(node, instance)));
        let status = nodes().find_map(|node| get(keys.status(node, instance)));
        let seen: Vec<_> =
            world.computers.iter().filter_map(|computer| observed(computer, instance)).collect();
        let name = instance.to_string();
        let recorded = |computer: &crate::node::Computer| {
            records.get(&computer.node).is_some_and(|records| records.contains(&name))
        };
        let here = |computer: &crate::node::Computer| {
            recorded(computer) || observed(computer, instance).is_some_and(|seen| seen.domain.is_some())
        };
        Self {
            request: request.and_then(|pair| decode(&pair.value).ok()),
            status: status.and_then(|pair| decode(&pair.value).ok()),
            claim: get(format!("{PLACEMENT}/consumers/{instance}")).is_some(),
            index: get(keys.instance(instance)).is_some(),
            domain: seen.iter().any(|seen| seen.domain.is_some()),
            volume: seen.iter().any(|seen| seen.volume),
            record: world.computers.iter().any(|computer| recorded(computer)),
            host: world.computers.iter().find(|computer| here(computer)).map(|computer| computer.node),
        }
    }

    fn is_anything(&self) -> bool {
        self.request.is_some()
            || self.status.is_some()
            || self.claim
            || self.index
            || self.domain
            || self.volume
            || self.record
    }

    fn is_only_claim(&self) -> bool {
        let Self { request, status, claim, index, domain, volume, record, host: _ } = self;
        *claim && !(request.is_some() || status.is_some() || *index || *domain || *volume || *record)
    }

    fn told(&self) -> String {
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
async fn everything(world: &World, records: &Records) -> BTreeSet<InstanceId> {
    let mut all: BTreeSet<InstanceId> =
        world.judge(|referee, _| referee.instances().map(|(instance, _)| instance).collect());
    for prefix in ["/ecompute/requests/", "/ecompute/status/", "/ecompute/instances/", "/ecompute/names/"] {
        all.extend(last_parts(world, prefix));
    }
    all.extend(last_parts(world, &format!("{PLACEMENT}/consumers/")));
    for computer in &world.computers {
        all.extend(guests(world, computer).await);
    }
    all.extend(records.values().flatten().filter_map(|name| name.parse::<InstanceId>().ok()));
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
    C: Future<Output = Vec<Complaint>>,
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
        let late: Vec<String> =
            found.into_iter().filter(|(bound, _)| begun.elapsed() > *bound).map(|(_, what)| what).collect();
        if !late.is_empty() {
            let (seconds, late) = (begun.elapsed().as_secs(), late.join("; "));
            world.judge(|referee, _| referee.found(format!("{what} in {seconds} s: {late}")));
            return;
        }
        sleep(PERIOD).await;
    }
}

/// Whether placement has no room to count a guest, and its node keeps as much free as all take there that are not
/// counted. What is reserved is given out several times, so that it comes in steps.
fn is_kept_free(world: &World, traces: &Traces) -> bool {
    let Some(node) = traces.host else { return false };
    let record = crate::door::content(world, &format!("{PLACEMENT}/providers/{node}"));
    let Some(record) = record.and_then(|pair| serde_json::from_slice::<Value>(&pair.value).ok()) else {
        return false;
    };
    let inventory = &record["inventories"]["VCPU"];
    let number = |field: &str| inventory[field].as_f64().unwrap_or(0.0);
    let ratio = number("allocation_ratio").max(1.0);
    let mut used = 0.0;
    let mut counted = BTreeSet::new();
    for pair in world.store.content(&format!("{PLACEMENT}/consumers/")).pairs {
        let Ok(consumer) = serde_json::from_slice::<Value>(&pair.value) else { continue };
        if let Some(amounts) = consumer["allocations"].get(node.to_string()) {
            used += amounts["VCPU"].as_f64().unwrap_or(0.0);
            counted.extend(pair.key.rsplit('/').next().map(str::to_owned));
        }
    }
    let here = world.computers.iter().find(|computer| computer.node == node);
    let records = here.and_then(|computer| computer.records().ok()).unwrap_or_default();
    let uncounted = records.iter().filter(|name| !counted.contains(*name)).count() as f64;
    let all = PROCESSORS as f64;
    let offered = (number("total") - number("reserved")) * ratio;
    let without_it = all - ((uncounted - 1.0) / ratio).ceil() * ratio;
    offered <= (all - uncounted).max(0.0) && used + 1.0 > without_it
}

/// What a replica of eplacement knows otherwise than etcd has it.
async fn astray(world: &World) -> Vec<Complaint> {
    let mut found = Vec::new();
    for (number, replica) in world.replicas.running() {
        let actor = Actor::Replica(number);
        if let Err(why) = replica.fresh().await {
            found.push((SOON, format!("{actor} does not know how far etcd is: {why}")));
            continue;
        }
        let pairs = world.store.content(&format!("{PLACEMENT}/consumers/")).pairs;
        let stored: BTreeSet<(String, i64)> = pairs
            .iter()
            .filter_map(|pair| Some((pair.key.rsplit('/').next()?.to_owned(), pair.mod_revision)))
            .collect();
        let known: BTreeSet<(String, i64)> = replica.peek(|state| {
            state.consumers().map(|(uuid, stored)| (uuid.to_string(), stored.revision)).collect()
        });
        found.extend(stored.symmetric_difference(&known).map(|(consumer, revision)| {
            (SOON, format!("{actor} knows otherwise of the claim of {consumer} at revision {revision}"))
        }));
    }
    found
}

/// What is not as it is asked for.
async fn unrest(world: &Arc<World>) -> Vec<Complaint> {
    // What a killed command left goes when somebody comes across it.
    let Ok(cloud) = cloud(world, Actor::User(0), &Life::new()) else {
        return vec![(SOON, "no command line".into())];
    };
    if let Err(error) = list(&cloud).await {
        return vec![(SOON, format!("list: {error}"))];
    }
    let soon = SOON + if world.has_silent_watches() { RESYNC } else { Duration::ZERO };
    let mut found = Vec::new();
    for computer in &world.computers {
        if crate::door::content(world, &world.keys.node(computer.node)).is_none() {
            found.push((SOON, format!("node {} is not alive", computer.node)));
        }
        if marked(world, computer.node) == Some(true) {
            found.push((SOON, format!("node {} is marked as down", computer.node)));
        }
    }
    found.extend(astray(world).await);
    let records = records(world);
    for instance in everything(world, &records).await {
        let traces = Traces::of(world, &records, instance);
        let (known, restored) = world.judge(|referee, _| (referee.known(instance), referee.restored));
        let Known { acknowledged, wished_away, doomed, wrote, disturbed, lost, .. } = known;
        let state = traces.status.as_ref().map(|status| status.state);
        let asked_for = traces.request.as_ref().map(|request| request.desired);
        let counted = traces.claim || (restored && is_kept_free(world, &traces));
        let whole = counted && traces.index && traces.domain && traces.volume && traces.record;
        let well = match (asked_for, state) {
            _ if doomed && !restored => !traces.is_anything(),
            (Some(Desired::Active), Some(State::Active)) => whole,
            (Some(Desired::Active), Some(State::Stopped | State::Paused | State::Error)) => {
                (disturbed || restored) && (counted || !wrote)
            }
            // Kept by its node, and counted. A disk alone that a call brought back late, after etcd had forgotten its
            // instance, may be anybody's, and nobody can tell how large it is: that stays until it is destroyed.
            (None, Some(State::Unclaimed)) => {
                restored && (counted || !(wrote || traces.domain || traces.record))
            }
            // It never ran: its name stays until somebody destroys it, and that is all.
            (None, Some(State::Error)) => {
                !wrote && !traces.claim && !traces.domain && !traces.volume && !traces.record
            }
            (None, None) => {
                let missed = acknowledged.is_some() && !wished_away && !restored;
                // Claimed after its record had gone with the newer etcd: nobody can tell whose that is.
                let nobodys = lost && traces.is_only_claim();
                (!traces.is_anything() || nobodys) && !missed
            }
            _ => false,
        };
        if !well {
            let bound = if traces.request.is_some() { soon } else { BOUND };
            found.push((bound, format!("{instance}: {}", traces.told())));
        }
    }
    found
}

async fn destroy_all(world: &Arc<World>) {
    let Ok(cloud) = cloud(world, Actor::User(0), &Life::new()) else { return };
    let records = records(world);
    for instance in everything(world, &records).await {
        let traces = Traces::of(world, &records, instance);
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
async fn left(world: &Arc<World>) -> Vec<Complaint> {
    let mut found = Vec::new();
    let records = records(world);
    for instance in everything(world, &records).await {
        let traces = Traces::of(world, &records, instance);
        if traces.is_anything() {
            found.push((BOUND, format!("{instance}: {}", traces.told())));
        }
    }
    for prefix in ["/ecompute/names/", "/ecompute/userdata/"] {
        found.extend(world.store.content(prefix).pairs.into_iter().map(|pair| (BOUND, pair.key)));
    }
    found
}

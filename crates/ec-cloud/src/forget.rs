//! Forgetting a node that will never come back: concluding what its agent would have, of what its users have ended.
//!
//! ```text
//!   look:     what etcd tells of each instance there ──▶ ec_plan::forget::judge ──▶ refused, and nothing is changed
//!   each:     its claim, where nobody else speaks of it ──▶ one transaction: request, status and all beside them
//!   then:     left places in groups ──▶ the provider, with claims of which nobody speaks ──▶ the node's record
//! ```
//!
//! Whoever is killed between finds what is left, and goes on: the record, by which the node has a name, goes last. Each transaction
//! demands that the node's agent is not there, and that the request is as it was read. Should the host come back all the same, its
//! agent ends nothing: what it has without a request is UNCLAIMED.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use ec_model::{InstanceId, Node, NodeId, Request, Status, Workload, decode};
use ec_placement_client::{CONSUMER_TYPE, PlacementError, SHARES};
use ec_plan::{
    forget::{Elsewhere, Left, Told, Verdict, judge, kind_of},
    lack::some,
};
use ec_store::{Compare, KeyValue, Revision, StoreError, Txn};
use futures::StreamExt;
use tokio::time::Instant;

use crate::{
    Cloud, CloudError, CloudResult,
    intent::{drop_alone, wanted},
    lookup::{CONCURRENCY, MENDS, Read, below, read},
    nodes::{counted, nodes},
    select::named_nodes,
};

/// Others may be at it at the same time; so often is enough for anybody.
const TRIES: usize = 5;

/// What takes longer is told of so often.
const PROGRESS: Duration = Duration::from_secs(1);

/// The node that is meant: of one name those that are gone come first, since nobody else is forgotten. One of which there is no record
/// has the name that placement knows it by.
///
/// # Errors
/// No node is called so, or several are.
pub async fn node_to_forget(cloud: &Cloud, text: &str) -> CloudResult<NodeId> {
    if let Ok(node) = text.parse() {
        return Ok(node);
    }
    match named_nodes(cloud).await?.gone_first(text) {
        Err(CloudError::NotFound(why)) => {
            let all = nodes(cloud).await?;
            let mut called = all.iter().filter(|view| view.name == text).map(|view| view.node);
            match (called.next(), called.next()) {
                (Some(node), None) => Ok(node),
                _ => Err(CloudError::NotFound(why)),
            }
        }
        named => named,
    }
}

/// Forgets a node, of which nothing is wanted any more. Doing it again goes on where it ended.
///
/// # Errors
/// [`CloudError::Refused`], with nothing changed, where its agent is alive, or something there is wanted still;
/// [`CloudError::NotFound`] where nothing is known of it.
pub async fn forget(cloud: &Cloud, node: NodeId) -> CloudResult<()> {
    for _ in 0..TRIES {
        let seen = Seen::look(cloud, node).await?;
        seen.refuse(cloud).await?;
        if conclude(cloud, &seen).await? && drop_node(cloud, &seen).await? {
            return Ok(());
        }
    }
    Err(CloudError::Busy(format!("what there is of node {node} keeps changing; try again")))
}

/// Another node's order about an instance of this one.
struct Other {
    node: NodeId,
    alive: bool,
    request: Read<Request>,
}

/// What etcd tells of an instance there.
struct There {
    request: Read<Request>,
    status: Read<Status>,
    status_revision: Revision,
    passes: bool,
    /// Whether its record says that it is there, or cannot be read.
    recorded: bool,
    /// Whether anything speaks of it elsewhere: what it has claimed is claimed for that.
    is_elsewhere: bool,
    others: Vec<Other>,
}

/// What etcd tells of a node.
struct Seen {
    node: NodeId,
    name: String,
    /// What lives of it: its own word for that.
    alive: bool,
    /// Its record, where there is one.
    record: Option<(KeyValue, Result<Node, String>)>,
    instances: BTreeMap<InstanceId, There>,
    /// Places in groups there.
    members: Vec<(String, InstanceId)>,
}

impl Seen {
    async fn look(cloud: &Cloud, node: NodeId) -> CloudResult<Self> {
        let (keys, store) = (&cloud.keys, &cloud.store);
        let agent = store.get(&keys.agent(node)).await.map_err(|error| beyond_rights(error.into()))?.0;
        let sign = store.get(&keys.alive(node)).await?.0;
        let record = store.get(&keys.node(node)).await?.0.map(|pair| {
            let read = decode::<Node>(&pair.value).map_err(|error| error.to_string());
            (pair, read)
        });
        let prefixes = (keys.requests(node), keys.statuses(node), keys.instances(), keys.all_members());
        let (requests, statuses, records, members) = tokio::try_join!(
            store.list(&prefixes.0),
            store.list(&prefixes.1),
            store.list(&prefixes.2),
            store.keys(&prefixes.3)
        )?;
        let mut of_it: BTreeSet<InstanceId> = BTreeSet::new();
        for prefix in [
            keys.all_user_data(node),
            keys.all_outcomes(node),
            keys.all_held(node),
            keys.all_held_user_data(node),
        ] {
            of_it.extend(below(cloud, &prefix, &prefix).await?);
        }
        let requests = by_instance(&requests.pairs, |key| keys.parse_request(key).ok());
        let statuses = by_instance(&statuses.pairs, |key| keys.parse_status(key).ok());
        of_it.extend(requests.keys().chain(statuses.keys()).copied());
        // Where the record is: none where it says of none, or cannot be read.
        let mut placed: HashMap<InstanceId, Option<NodeId>> = HashMap::new();
        for pair in &records.pairs {
            let Ok(instance) = keys.parse_instance(&pair.key) else { continue };
            let at = wanted(instance, &pair.value).map(|record| record.node());
            if at == Ok(Some(node)) {
                of_it.insert(instance);
            }
            let unreadable = at.is_err() && of_it.contains(&instance);
            placed.insert(instance, if unreadable { Some(node) } else { at.ok().flatten() });
        }
        let mut others = others(cloud, node, &of_it).await?;
        let told_elsewhere: BTreeSet<InstanceId> = store
            .keys(&keys.all_statuses())
            .await?
            .iter()
            .filter_map(|key| keys.parse_status(key).ok().filter(|(at, _)| *at != node))
            .map(|(_, instance)| instance)
            .collect();
        let instances = of_it
            .into_iter()
            .map(|instance| {
                let status = statuses.get(&instance).copied();
                let recorded_at = placed.get(&instance);
                let others = others.remove(&instance).unwrap_or_default();
                let there = There {
                    request: read(requests.get(&instance).copied(), node, instance),
                    status: read(status, node, instance),
                    status_revision: status.map_or(0, |pair| pair.mod_revision),
                    passes: status.is_some_and(|pair| pair.lease.is_some()),
                    recorded: recorded_at == Some(&Some(node)),
                    is_elsewhere: recorded_at.is_some()
                        || !others.is_empty()
                        || told_elsewhere.contains(&instance),
                    others,
                };
                (instance, there)
            })
            .collect();
        let members = members
            .into_iter()
            .filter_map(|key| {
                let (at, instance) = keys.parse_member(&key).ok()?;
                (at == node).then_some((key, instance))
            })
            .collect();
        let name = match &record {
            Some((_, Ok(record))) => record.name.clone(),
            _ => node.to_string(),
        };
        Ok(Self { node, name, alive: agent.is_some() || sign.is_some(), record, instances, members })
    }

    fn is_revoked(&self) -> bool {
        matches!(&self.record, Some((_, Ok(record))) if record.revoked)
    }

    fn refused(&self, why: &str) -> CloudError {
        let called = match self.name == self.node.to_string() {
            true => self.name.clone(),
            false => format!("{} ({})", self.name, self.node),
        };
        CloudError::Refused(format!("cannot forget node {called}: {why}"))
    }

    /// An error where something of it is wanted, or nothing is known of it.
    async fn refuse(&self, cloud: &Cloud) -> CloudResult<()> {
        if self.alive {
            return Err(self.refused(
                "its agent is alive; only a node that will never come back is forgotten, and one that shall not is revoked first (`eschedule node revoke`)",
            ));
        }
        if let Some((pair, Err(why))) = &self.record {
            return Err(self.refused(&format!("its record {} cannot be read: {why}; {MENDS}", pair.key)));
        }
        if let Some(why) = in_the_way(&self.instances) {
            return Err(self.refused(&why));
        }
        let is_told_of = self.record.is_some() || !self.instances.is_empty() || !self.members.is_empty();
        // A provider of which etcd tells nothing may be anybody's; but a controller marks none but nodes.
        if !is_told_of && !cloud.placement.marked_down().await?.contains(&self.node) {
            return Err(CloudError::NotFound(format!(
                "there is nothing of a node {}; `eschedule nodes` shows all",
                self.node
            )));
        }
        match cloud.placement.traits(self.node).await {
            Ok(traits) if traits.contains(SHARES) => {
                Err(self.refused("it is no node, but storage that nodes share"))
            }
            Ok(_) | Err(PlacementError::NotFound(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What every transaction demands: that no agent is the node.
    fn demand_gone(&self, cloud: &Cloud) -> Txn {
        let keys = &cloud.keys;
        Txn::new().when(Compare::Absent(keys.alive(self.node))).when(Compare::Absent(keys.agent(self.node)))
    }
}

/// Who may not even read what only agents write may do nothing of this.
fn beyond_rights(error: CloudError) -> CloudError {
    match error {
        CloudError::Store(StoreError::Refused(_)) => error.and(
            "what only a node's agent writes is taken away by the administrator alone: in a cluster that `eschedule cluster init` made, say this on \
             the host with its /etc/ecompute; else name etcd's root as `etcd.user` in a schedule.yaml of your own",
        ),
        error => error,
    }
}

fn by_instance(
    pairs: &[KeyValue],
    parse: impl Fn(&str) -> Option<(NodeId, InstanceId)>,
) -> HashMap<InstanceId, &KeyValue> {
    pairs.iter().filter_map(|pair| Some((parse(&pair.key)?.1, pair))).collect()
}

/// What other nodes are asked about these instances.
async fn others(
    cloud: &Cloud,
    node: NodeId,
    of_it: &BTreeSet<InstanceId>,
) -> CloudResult<BTreeMap<InstanceId, Vec<Other>>> {
    let mut found: BTreeMap<InstanceId, Vec<Other>> = BTreeMap::new();
    for key in cloud.store.keys(&cloud.keys.all_requests()).await? {
        let parsed = cloud.keys.parse_request(&key).ok();
        let Some((at, instance)) = parsed.filter(|(at, instance)| *at != node && of_it.contains(instance))
        else {
            continue;
        };
        let pair = cloud.store.get(&key).await?.0;
        let alive = cloud.store.get(&cloud.keys.alive(at)).await?.0.is_some();
        if pair.is_some() {
            let request = read(pair.as_ref(), at, instance);
            found.entry(instance).or_default().push(Other { node: at, alive, request });
        }
    }
    Ok(found)
}

fn told<R: ec_model::Record>(of: &Read<R>) -> Told<'_, R> {
    match of {
        Read::Absent => Told::Nothing,
        Read::Here(record, _) => Told::Here(record),
        Read::Unreadable(_) => Told::Unreadable,
    }
}

impl There {
    fn judged(&self) -> (Verdict, Workload) {
        let elsewhere: Vec<_> = self
            .others
            .iter()
            .map(|other| Elsewhere { node: other.node, alive: other.alive, request: told(&other.request) })
            .collect();
        let left = Left {
            request: told(&self.request),
            status: told(&self.status),
            passes: self.passes,
            recorded: self.recorded,
            elsewhere: &elsewhere,
        };
        (judge(&left), kind_of(&left))
    }

    fn name(&self) -> Option<&String> {
        let asked = self.request.record().and_then(|request| request.name.as_ref());
        asked.or_else(|| self.status.record().and_then(|status| status.name.as_ref()))
    }
}

/// In one line what of all this keeps the node from being forgotten, and what is to be done about it.
fn in_the_way(instances: &BTreeMap<InstanceId, There>) -> Option<String> {
    let (mut wanted, mut unasked) = (Group::default(), Group::default());
    let (mut unreadable, mut moving) = (Vec::new(), Vec::new());
    for (instance, there) in instances {
        let (verdict, kind) = there.judged();
        match verdict {
            Verdict::Goes => {}
            Verdict::Wanted => wanted.add(*instance, there, kind),
            Verdict::Unasked => unasked.add(*instance, there, kind),
            Verdict::Unreadable => unreadable.push(instance.to_string()),
            Verdict::Moving(other) => moving.push(format!("{instance} (node {other})")),
        }
    }
    let mut why = Vec::new();
    if let Some(which) = wanted.told() {
        why.push(format!(
            "{which} are to be there; {} ends them, and what they wrote is lost with the host",
            wanted.ended_by()
        ));
    }
    if let Some(which) = unasked.told() {
        why.push(format!(
            "it told of {which}, of which nobody asks for anything; {} asks for their end, `eschedule heal` brings back what can be",
            unasked.ended_by()
        ));
    }
    if !unreadable.is_empty() {
        why.push(format!(
            "what is asked or told of {} cannot be read, and is not touched; {MENDS}",
            some(&unreadable)
        ));
    }
    if !moving.is_empty() {
        why.push(format!(
            "another node has yet to come to its end with what was on its way between them: {}",
            some(&moving)
        ));
    }
    (!why.is_empty()).then(|| why.join("; "))
}

/// Those of which one thing is to be said.
#[derive(Default)]
struct Group {
    counts: [usize; 2],
    names: Vec<String>,
}

impl Group {
    fn add(&mut self, instance: InstanceId, there: &There, kind: Workload) {
        self.counts[usize::from(!kind.is_machine())] += 1;
        self.names.push(there.name().cloned().unwrap_or_else(|| instance.to_string()));
    }

    fn told(&self) -> Option<String> {
        let [instances, volumes] = self.counts;
        (!self.names.is_empty()).then(|| format!("{} ({})", counted(instances, volumes), some(&self.names)))
    }

    fn ended_by(&self) -> &'static str {
        match self.counts {
            [_, 0] => "`eschedule destroy`",
            [0, _] => "`eschedule volume delete`",
            _ => "`eschedule destroy`, and then `eschedule volume delete`,",
        }
    }
}

/// Concludes what is left of each instance. Whether all of it stood as it was read.
async fn conclude(cloud: &Cloud, seen: &Seen) -> CloudResult<bool> {
    let (mut told, mut done) = (Instant::now(), 0);
    let mut ends = futures::stream::iter(&seen.instances)
        .map(|(instance, there)| conclude_one(cloud, seen, *instance, there))
        .buffer_unordered(CONCURRENCY)
        .boxed();
    while let Some(concluded) = ends.next().await {
        if !concluded? {
            return Ok(false);
        }
        done += 1;
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            (cloud.notice)(&format!("node {}: {done} of {} ended", seen.name, seen.instances.len()));
        }
    }
    for (key, instance) in &seen.members {
        drop_alone(cloud, key.clone(), *instance).await?;
    }
    Ok(true)
}

/// First what it has claimed: by the request, or what else lies there, whoever says this again finds it.
async fn conclude_one(cloud: &Cloud, seen: &Seen, instance: InstanceId, there: &There) -> CloudResult<bool> {
    if !there.is_elsewhere {
        cloud.placement.release(instance).await?;
    }
    let (keys, node) = (&cloud.keys, seen.node);
    let (request, status) = (keys.request(node, instance), keys.status(node, instance));
    let txn = match there.request {
        Read::Here(_, revision) => {
            seen.demand_gone(cloud).when(Compare::Unchanged(request.clone(), revision))
        }
        // Then its status alone told that it may go. Of one that went by itself meanwhile nothing is otherwise.
        Read::Absent | Read::Unreadable(_) => {
            let txn = seen.demand_gone(cloud).when(Compare::Absent(request.clone()));
            match there.status_revision {
                0 => txn.when(Compare::Absent(status.clone())),
                revision => txn.when(Compare::Unchanged(status.clone(), revision)),
            }
        }
    };
    let gone = [
        request,
        status,
        keys.user_data(node, instance),
        keys.outcomes(node, instance),
        keys.held(node, instance),
        keys.held_user_data(node, instance),
    ];
    let txn = gone.into_iter().fold(txn, Txn::delete);
    Ok(cloud.store.txn(txn).await.map_err(|error| beyond_rights(error.into()))?.succeeded)
}

/// Takes away what is left of the node itself. Whether it stood as it was read.
async fn drop_node(cloud: &Cloud, seen: &Seen) -> CloudResult<bool> {
    tell_of_storage(cloud, seen).await?;
    let still = cloud.store.txn(seen.demand_gone(cloud)).await?;
    if !still.succeeded {
        return Ok(false);
    }
    drop_provider(cloud, seen).await?;
    let Some((pair, _)) = &seen.record else { return Ok(true) };
    if seen.is_revoked() {
        (cloud.notice)(&format!(
            "node {} stays marked as revoked, so that nothing is ever written for it: {} is that mark",
            seen.name, pair.key
        ));
        return Ok(true);
    }
    let stands = Compare::Unchanged(pair.key.clone(), pair.mod_revision);
    let txn = seen.demand_gone(cloud).when(stands).delete(pair.key.clone());
    Ok(cloud.store.txn(txn).await.map_err(|error| beyond_rights(error.into()))?.succeeded)
}

/// Before the provider goes, which alone tells that the node was one of those that share it.
async fn tell_of_storage(cloud: &Cloud, seen: &Seen) -> CloudResult<()> {
    for storage in cloud.placement.shared_storages().await? {
        let aggregate = storage.aggregate().to_string();
        if cloud.placement.is_where(seen.node, "member_of", &aggregate).await? {
            (cloud.notice)(&format!(
                "what is left of the disks of node {} on storage `{}` lies there in the directory {}: delete that on a host that has it",
                seen.name, storage.name, seen.node
            ));
        }
    }
    Ok(())
}

/// Takes the provider away, with claims on it that killed commands left: nobody speaks of them any more.
async fn drop_provider(cloud: &Cloud, seen: &Seen) -> CloudResult<()> {
    let mut why = String::new();
    for _ in 0..TRIES {
        match cloud.placement.delete_provider(seen.node).await {
            Ok(()) => return Ok(()),
            Err(PlacementError::Conflict(conflict)) => why = conflict.why,
            Err(error) => return Err(error.into()),
        }
        let holders = match cloud.placement.provider_allocations(seen.node).await {
            Err(PlacementError::NotFound(_)) => return Ok(()),
            holders => holders?,
        };
        let holders: BTreeSet<InstanceId> = holders.into_keys().collect();
        let spoken_of = spoken_of(cloud).await?;
        let mut kept = Vec::new();
        for holder in holders {
            let held = cloud.placement.allocations(holder).await?;
            let is_ours = held.is_none_or(|held| held.consumer_type.is_none_or(|kind| kind == CONSUMER_TYPE));
            match is_ours && !spoken_of.contains(&holder) {
                true => cloud.placement.release(holder).await?,
                false => kept.push(holder.to_string()),
            }
        }
        if !kept.is_empty() {
            return Err(seen.refused(&format!(
                "placement has claims on it that are not its own instances': of {}; what a killed command left goes ten minutes later, \
                 else whoever claimed it gives it back; then say this again",
                some(&kept)
            )));
        }
    }
    Err(seen.refused(&format!("placement keeps its provider: {why}")))
}

/// All instances that anything in etcd speaks of.
async fn spoken_of(cloud: &Cloud) -> CloudResult<BTreeSet<InstanceId>> {
    let keys = &cloud.keys;
    let prefixes = (keys.instances(), keys.all_requests(), keys.all_statuses());
    let (records, requests, statuses) = tokio::try_join!(
        cloud.store.keys(&prefixes.0),
        cloud.store.keys(&prefixes.1),
        cloud.store.keys(&prefixes.2)
    )?;
    let records = records.iter().filter_map(|key| keys.parse_instance(key).ok());
    let requests = requests.iter().filter_map(|key| Some(keys.parse_request(key).ok()?.1));
    let statuses = statuses.iter().filter_map(|key| Some(keys.parse_status(key).ok()?.1));
    Ok(records.chain(requests).chain(statuses).collect())
}

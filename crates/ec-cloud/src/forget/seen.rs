//! What etcd tells of a node that is to be forgotten, and why that is refused.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_model::{InstanceId, Node, NodeId, Request, Status, Workload, decode};
use ec_placement_client::{PlacementError, SHARES};
use ec_plan::{
    forget::{Elsewhere, Left, Told, Verdict, judge, kind_of},
    lack::some,
};
use ec_store::{Compare, KeyValue, Revision, StoreError, Txn};

use crate::{
    Cloud, CloudError, CloudResult,
    intent::wanted,
    lookup::{MENDS, Read, below, read},
    nodes::counted,
};

/// Another node's order about an instance of this one.
struct Other {
    node: NodeId,
    alive: bool,
    request: Read<Request>,
    status: Read<Status>,
}

/// What etcd tells of an instance there.
pub(super) struct There {
    pub(super) request: Read<Request>,
    pub(super) status: Read<Status>,
    pub(super) status_revision: Revision,
    passes: bool,
    /// Whether its record says that it is there, or cannot be read.
    recorded: bool,
    /// Whether anything speaks of it elsewhere: what it has claimed is claimed for that.
    pub(super) is_elsewhere: bool,
    others: Vec<Other>,
}

/// What etcd tells of a node.
pub(super) struct Seen {
    pub(super) node: NodeId,
    pub(super) name: String,
    /// What lives of it: its own word for that.
    alive: bool,
    /// Its record, where there is one.
    pub(super) record: Option<(KeyValue, Result<Node, String>)>,
    pub(super) instances: BTreeMap<InstanceId, There>,
    /// Places in groups there.
    pub(super) members: Vec<(String, InstanceId)>,
}

impl Seen {
    pub(super) async fn look(cloud: &Cloud, node: NodeId) -> CloudResult<Self> {
        let (keys, store) = (&cloud.keys, &cloud.store);
        let agent = store.get(&keys.agent(node)).await.map_err(|error| beyond_rights(error.into()))?.0;
        let sign = store.get(&keys.alive(node)).await?.0;
        let record = store.get(&keys.node(node)).await?.0.map(|pair| {
            let read = decode::<Node>(&pair.value).map_err(|error| error.to_string());
            (pair, read)
        });
        // Before the records: what is placed here meanwhile is found by its own.
        let mut of_it: BTreeSet<InstanceId> = BTreeSet::new();
        for prefix in [keys.all_user_data(node), keys.all_held(node), keys.all_held_user_data(node)] {
            of_it.extend(below(cloud, &prefix, &prefix).await?);
        }
        let outcomes = keys.all_outcomes(node);
        for pair in store.list(&outcomes).await?.pairs.iter().filter(|pair| pair.lease.is_none()) {
            of_it.extend(
                pair.key.strip_prefix(&outcomes).and_then(|instance| instance.parse::<InstanceId>().ok()),
            );
        }
        let prefixes = (keys.requests(node), keys.statuses(node), keys.instances(), keys.all_members());
        let (requests, statuses, records, members) = tokio::try_join!(
            store.list(&prefixes.0),
            store.list(&prefixes.1),
            store.list(&prefixes.2),
            store.keys(&prefixes.3)
        )?;
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

    pub(super) fn is_revoked(&self) -> bool {
        matches!(&self.record, Some((_, Ok(record))) if record.revoked)
    }

    pub(super) fn refused(&self, why: &str) -> CloudError {
        let called = match self.name == self.node.to_string() {
            true => self.name.clone(),
            false => format!("{} ({})", self.name, self.node),
        };
        CloudError::Refused(format!("cannot forget node {called}: {why}"))
    }

    /// An error where something of it is wanted, or nothing is known of it.
    pub(super) async fn refuse(&self, cloud: &Cloud) -> CloudResult<()> {
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
            let left = match cloud.placement.provider(self.node).await? {
                Some(provider) => format!(
                    "; placement has `{}` by that uuid, which may be anybody's, and is deleted there",
                    provider.name
                ),
                None => String::new(),
            };
            return Err(CloudError::NotFound(format!(
                "etcd knows nothing of a node {}; `eschedule nodes` shows all{left}",
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
    pub(super) fn demand_gone(&self, cloud: &Cloud) -> Txn {
        let keys = &cloud.keys;
        Txn::new().when(Compare::Absent(keys.alive(self.node))).when(Compare::Absent(keys.agent(self.node)))
    }
}

/// Who may not even read what only agents write may do nothing of this.
pub(super) fn beyond_rights(error: CloudError) -> CloudError {
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
        let status = cloud.store.get(&cloud.keys.status(at, instance)).await?.0;
        if pair.is_some() {
            let request = read(pair.as_ref(), at, instance);
            let status = read(status.as_ref(), at, instance);
            found.entry(instance).or_default().push(Other { node: at, alive, request, status });
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
            .map(|other| Elsewhere {
                node: other.node,
                alive: other.alive,
                request: told(&other.request),
                status: told(&other.status),
            })
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
            "{which} shall be there still: {} ends that, and what was written there is lost with the host",
            wanted.ended_by()
        ));
    }
    if let Some(which) = unasked.told() {
        why.push(format!(
            "it told of {which}, of which nobody asks for anything: {} asks for the end, and `eschedule heal` brings back what can be",
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

//! Finding instances, and what is known of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use ec_model::{
    Alive, Assigned, Desired, Doc, Instance, InstanceId, Keyspace, NodeId, Record, Request, State, Status,
    Workload, decode,
};
use ec_plan::volumes::{Sides, made_of};
use ec_store::{KeyValue, Revision, StoreResult};

use crate::{
    Cloud, CloudError, CloudResult,
    intent::{wanted, young_for},
};

/// So many questions at once.
pub(crate) const CONCURRENCY: usize = 16;

/// What helps where a key of an instance cannot be read.
pub(crate) const MENDS: &str = "use the release that wrote it, or mend the key with etcdctl";

/// What lies under a key.
#[derive(Debug, Clone)]
pub enum Read<R> {
    /// Nothing.
    Absent,
    /// This, written at that revision.
    Here(R, Revision),
    /// A newer release wrote it, or it is damaged. Nobody touches it.
    Unreadable(String),
}

/// A record that says itself whose it is.
pub(crate) trait Owned: Record {
    /// The instance that it names, and the node, where it names one.
    fn names(&self) -> (InstanceId, Option<NodeId>);
}

impl Owned for Request {
    fn names(&self) -> (InstanceId, Option<NodeId>) {
        (self.instance, None)
    }
}

impl Owned for Status {
    fn names(&self) -> (InstanceId, Option<NodeId>) {
        (self.instance, Some(self.node))
    }
}

/// What lies under the key of this instance on this node. A record that speaks of another is as good as damaged.
pub(crate) fn read<R: Owned>(pair: Option<&KeyValue>, node: NodeId, instance: InstanceId) -> Read<R> {
    let Some(pair) = pair else { return Read::Absent };
    let record = match decode::<R>(&pair.value) {
        Ok(record) => record,
        Err(error) => return Read::Unreadable(error.to_string()),
    };
    match record.names() {
        (named, _) if named != instance => {
            Read::Unreadable(format!("it names instance {named}, its key another"))
        }
        (_, Some(named)) if named != node => {
            Read::Unreadable(format!("it names node {named}, its key another"))
        }
        _ => Read::Here(record, pair.mod_revision),
    }
}

impl<R: Record> Read<R> {
    /// What can be read.
    pub fn record(&self) -> Option<&R> {
        match self {
            Self::Here(record, _) => Some(record),
            Self::Absent | Self::Unreadable(_) => None,
        }
    }

    pub(crate) fn unreadable(&self) -> Option<&str> {
        match self {
            Self::Unreadable(why) => Some(why),
            Self::Absent | Self::Here(..) => None,
        }
    }

    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// An instance and all that etcd knows of it.
pub struct Known {
    /// Which.
    pub instance: InstanceId,
    /// What is wanted of it, where that is told.
    pub record: Option<Instance>,
    record_pair: Option<KeyValue>,
    /// What its node shall do about it.
    pub request: Read<Request>,
    request_value: Vec<u8>,
    /// How it is.
    pub status: Read<Status>,
    /// Where it is.
    pub node: NodeId,
    /// Whether that node's agent is alive.
    pub node_alive: bool,
    /// The revision that wrote its sign of life; 0 where there is none.
    alive_revision: Revision,
    /// Where its port is, where it tells.
    pub node_url: Option<String>,
}

/// The record of a volume, with what its disk was made of in the place of what was wished last and failed.
pub(crate) fn as_made(mut record: Instance, request: &Read<Request>, status: &Read<Status>) -> Instance {
    if record.kind == Workload::Volume
        && let Some(request) = request.record()
    {
        let sides = Sides { record: &record, request, status: status.record() };
        record.spec.image = made_of(sides).clone();
    }
    record
}

/// Whether a node tells that what was placed there so failed before it ever ran.
pub(crate) fn never_ran(status: &Status, assigned: Assigned) -> bool {
    status.state == State::Error && status.started_at.is_none() && status.epoch == assigned.epoch
}

impl Known {
    /// The record of a volume, with what its disk was made of; none where there is no record.
    pub(crate) fn record_as_made(&self) -> Option<Instance> {
        self.record.clone().map(|record| as_made(record, &self.request, &self.status))
    }

    /// Whether its request says that it is to be there.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.request.record().is_some_and(|request| request.desired == Desired::Active)
    }

    /// Whether its request says that it is to go.
    pub(crate) fn is_doomed(&self) -> bool {
        self.request.record().is_some_and(|request| request.desired == Desired::Destroyed)
    }

    /// Whether it failed before it ever ran, and was given up.
    pub(crate) fn has_failed(&self) -> bool {
        let assigned = self.record.as_ref().and_then(|record| record.assigned);
        let (Some(assigned), Some(status)) = (assigned, self.status.record()) else { return false };
        matches!(self.request, Read::Absent) && never_ran(status, assigned)
    }

    /// The record, to be changed; none where there is none.
    pub(crate) fn record_doc(&self) -> CloudResult<Option<Doc<Instance>>> {
        Ok(self.record_pair.as_ref().map(|pair| Doc::decode(&pair.value)).transpose()?)
    }

    /// The revision that wrote the record; 0 where there is none.
    pub(crate) fn record_revision(&self) -> Revision {
        self.record_pair.as_ref().map_or(0, |pair| pair.mod_revision)
    }

    /// The revision that wrote its node's sign of life; 0 where there is none.
    pub(crate) fn alive_revision(&self) -> Revision {
        self.alive_revision
    }

    /// The revision that wrote the request; 0 where there is none that can be read.
    pub(crate) fn request_revision(&self) -> Revision {
        match self.request {
            Read::Here(_, revision) => revision,
            Read::Absent | Read::Unreadable(_) => 0,
        }
    }

    /// The request, to be changed.
    pub(crate) fn request_doc(&self) -> CloudResult<Doc<Request>> {
        Ok(Doc::decode(&self.request_value)?)
    }
}

/// What is found under a uuid.
pub enum Found {
    /// It is placed.
    Placed(Box<Known>),
    /// It was asked for, and no request was written yet: a command is at it, or was killed.
    Unplaced(Box<Instance>, Revision),
}

/// The uuid that the text is, that bears the name, or that begins so as no other does: of a machine.
pub async fn resolve(cloud: &Cloud, text: &str) -> CloudResult<InstanceId> {
    resolve_as(cloud, Workload::Machine, text).await
}

/// The one of the project that bears this name: whatever the text may be besides, it is no uuid and no beginning of one.
pub async fn resolve_name(cloud: &Cloud, kind: Workload, name: &str) -> CloudResult<InstanceId> {
    let bearers = bearers(cloud, kind, name).await?;
    only_one(bearers, kind, name, || {
        format!("no {} of project `{}` is named `{name}`", kind.word(), cloud.project)
    })
}

async fn bearers(cloud: &Cloud, kind: Workload, name: &str) -> CloudResult<Vec<InstanceId>> {
    let names = cloud.keys.names(kind, &cloud.project, name);
    below(cloud, &names, &names).await
}

/// The same of any kind of workload.
pub(crate) async fn resolve_as(cloud: &Cloud, kind: Workload, text: &str) -> CloudResult<InstanceId> {
    if let Ok(instance) = text.parse() {
        return Ok(instance);
    }
    let mut bearers = bearers(cloud, kind, text).await?;
    // Without a name it is called by the first part of its uuid.
    if bearers.is_empty()
        && kind.is_machine()
        && let Some(part) = text.strip_prefix("vm-").filter(|part| is_first_part(part))
    {
        let instances = cloud.keys.instances();
        bearers = below(cloud, &format!("{instances}{part}-"), &instances).await?;
    }
    let beginning = text.to_ascii_lowercase();
    if bearers.is_empty() && is_beginning(&beginning) {
        bearers = beginning_so(cloud, &beginning).await?;
    }
    only_one(bearers, kind, text, || {
        format!(
            "no {} of project `{}` is named `{text}`, and no uuid is or begins so; `{}` shows all",
            kind.word(),
            cloud.project,
            shows(kind)
        )
    })
}

/// The command that lists them.
fn shows(kind: Workload) -> &'static str {
    match kind {
        Workload::Machine => "eschedule list",
        Workload::Volume => "eschedule volume list",
    }
}

fn only_one(
    bearers: Vec<InstanceId>,
    kind: Workload,
    text: &str,
    nobody: impl FnOnce() -> String,
) -> CloudResult<InstanceId> {
    match bearers[..] {
        [instance] => Ok(instance),
        [] => Err(CloudError::NotFound(nobody())),
        _ => Err(CloudError::Invalid(format!(
            "several {}s are called `{text}`: give the whole uuid, `{}` shows them",
            kind.word(),
            shows(kind)
        ))),
    }
}

/// By which names, in small letters, those of that kind in the project can be asked for: a name that several bear means none of them.
pub async fn bearing(cloud: &Cloud, kind: Workload) -> CloudResult<HashMap<InstanceId, String>> {
    let keys = cloud.store.keys(&cloud.keys.names_beginning(kind, &cloud.project, "")).await?;
    let mut bearers: HashMap<String, Vec<InstanceId>> = HashMap::new();
    for key in &keys {
        if let (Some(name), Some(instance)) = (cloud.keys.parse_name(key), cloud.keys.parse_bearer(key)) {
            bearers.entry(name).or_default().push(instance);
        }
    }
    Ok(bearers
        .into_iter()
        .filter_map(|(name, of)| if let [one] = of[..] { Some((one, name)) } else { None })
        .collect())
}

/// What those of that kind in the project are called that begins so; where a uuid may, uuids of any project, too.
pub async fn called_beginning(cloud: &Cloud, kind: Workload, beginning: &str) -> CloudResult<Vec<String>> {
    let keys = cloud.store.keys(&cloud.keys.names_beginning(kind, &cloud.project, beginning)).await?;
    let mut called: Vec<String> = keys.iter().filter_map(|key| cloud.keys.parse_name(key)).collect();
    let beginning = beginning.to_ascii_lowercase();
    if is_beginning(&beginning) {
        let found = beginning_so(cloud, &beginning).await?;
        called.extend(found.iter().map(ToString::to_string));
    }
    Ok(called)
}

/// The instances whose keys begin with this, and end with them behind that.
pub(crate) async fn below(cloud: &Cloud, beginning: &str, behind: &str) -> CloudResult<Vec<InstanceId>> {
    let keys = cloud.store.keys(beginning).await?;
    Ok(keys.iter().filter_map(|key| key.strip_prefix(behind)?.parse().ok()).collect())
}

/// All whose uuids begin so and of which anything is told: what is being destroyed, and what etcd lost, has no record.
async fn beginning_so(cloud: &Cloud, beginning: &str) -> CloudResult<Vec<InstanceId>> {
    let keys = &cloud.keys;
    let (instances, requests, statuses) = (keys.instances(), keys.all_requests(), keys.all_statuses());
    let recorded = format!("{instances}{beginning}");
    let (recorded, requests, statuses) = tokio::try_join!(
        cloud.store.keys(&recorded),
        cloud.store.keys(&requests),
        cloud.store.keys(&statuses)
    )?;
    let recorded = recorded.iter().filter_map(|key| keys.parse_instance(key).ok());
    let asked = requests.iter().filter_map(|key| Some(keys.parse_request(key).ok()?.1));
    let told = statuses.iter().filter_map(|key| Some(keys.parse_status(key).ok()?.1));
    let begins = |instance: &InstanceId| instance.to_string().starts_with(beginning);
    let all: BTreeSet<InstanceId> = recorded.chain(asked).chain(told).filter(begins).collect();
    Ok(all.into_iter().collect())
}

/// Whether this is the first part of a uuid, as we write them.
fn is_first_part(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a uuid may begin so, as we write them. Less than four characters say too little: somebody mistyped a name.
pub(crate) fn is_beginning(text: &str) -> bool {
    (4..36).contains(&text.len())
        && text.bytes().enumerate().all(|(place, byte)| match place {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        })
}

/// Everything that etcd knows of the instance. Where it has no record, it is looked for with placement, and last
/// among all keys; there, too, where the record says of no node, and no command is at it any more: an etcd that was put back to the
/// moment before its request knows no more of a guest that is there.
pub async fn find(cloud: &Cloud, instance: InstanceId) -> CloudResult<Found> {
    let Some(pair) = cloud.store.get(&cloud.keys.instance(instance)).await?.0 else {
        return Ok(Found::Placed(Box::new(without_record(cloud, instance).await?)));
    };
    let record = wanted(instance, &pair.value).map_err(|why| {
        CloudError::Unreadable(format!(
            "key {} cannot be read: {why}; nothing was changed: {MENDS}",
            pair.key
        ))
    })?;
    let node = match record.node() {
        None if young_for(cloud, &record).is_none() => somewhere(cloud, instance).await?,
        node => node,
    };
    match node {
        Some(node) => {
            let known = look(cloud, instance, node, Some(record)).await?;
            Ok(Found::Placed(Box::new(Known { record_pair: Some(pair), ..known })))
        }
        None => Ok(Found::Unplaced(Box::new(record), pair.mod_revision)),
    }
}

/// With which command its end is asked for.
pub(crate) fn verb_of_end(kind: Workload) -> &'static str {
    match kind {
        Workload::Machine => "destroy",
        Workload::Volume => "volume delete",
    }
}

/// An instance that is placed; else an error that says how it stands.
pub async fn find_placed(cloud: &Cloud, instance: InstanceId) -> CloudResult<Known> {
    match find(cloud, instance).await? {
        Found::Placed(known) => Ok(*known),
        Found::Unplaced(record, _) => {
            let left = young_for(cloud, &record).unwrap_or_default();
            let what = match record.kind {
                Workload::Machine => "instance",
                Workload::Volume => "volume",
            };
            let verb = verb_of_end(record.kind);
            Err(CloudError::Busy(format!(
                "{what} {instance} is not placed: a command began with it at {} and has not finished; if that was killed, its name is free in {} s, and `eschedule {verb} {instance}` then takes away what it left",
                record.created_at,
                left.as_secs()
            )))
        }
    }
}

/// A status, unless it is of another placement of the instance than this, which is over.
pub(crate) fn of_epoch(status: Read<Status>, epoch: Option<u64>) -> Read<Status> {
    match (epoch, status.record()) {
        (Some(epoch), Some(told)) if ![0, epoch].contains(&told.epoch) => Read::Absent,
        _ => status,
    }
}

/// Reads what lies at known places, at once.
pub(crate) async fn look(
    cloud: &Cloud,
    instance: InstanceId,
    node: NodeId,
    record: Option<Instance>,
) -> StoreResult<Known> {
    let keys = &cloud.keys;
    let (request, status, alive) =
        (keys.request(node, instance), keys.status(node, instance), keys.alive(node));
    let ((request, _), (status, _), (alive, _)) =
        tokio::try_join!(cloud.store.get(&request), cloud.store.get(&status), cloud.store.get(&alive))?;
    let epoch = record.as_ref().and_then(|record| record.assigned).map(|assigned| assigned.epoch);
    let status = of_epoch(read(status.as_ref(), node, instance), epoch);
    Ok(Known {
        instance,
        record,
        record_pair: None,
        request: read(request.as_ref(), node, instance),
        request_value: request.map(|pair| pair.value).unwrap_or_default(),
        status,
        node,
        node_alive: alive.is_some(),
        alive_revision: alive.as_ref().map_or(0, |pair| pair.mod_revision),
        node_url: alive.and_then(|pair| decode::<Alive>(&pair.value).ok()?.url),
    })
}

async fn without_record(cloud: &Cloud, instance: InstanceId) -> CloudResult<Known> {
    let claim = claimed(cloud, instance).await;
    if let Ok(Claimed::Of(node)) = claim {
        let known = look(cloud, instance, node, None).await?;
        if !(known.request.is_absent() && known.status.is_absent()) {
            return Ok(known);
        }
    }
    // An operator moved the claim, or it was given up with an ERROR, or placement does not answer.
    if let Some(node) = somewhere(cloud, instance).await? {
        return Ok(look(cloud, instance, node, None).await?);
    }
    match claim? {
        // A guest that nobody has written of yet.
        Claimed::Of(node) => Ok(look(cloud, instance, node, None).await?),
        Claimed::Nothing | Claimed::OfStorage => {
            Err(CloudError::NotFound(format!("there is no instance {instance}; `eschedule list` shows all")))
        }
    }
}

/// What an instance holds in placement by a claim of our making.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    Nothing,
    /// Some of this host, which is the root of the tree.
    Of(NodeId),
    /// Some of storage that hosts share, and nothing of a host, which could give it back.
    OfStorage,
}

pub(crate) async fn claimed(cloud: &Cloud, instance: InstanceId) -> CloudResult<Claimed> {
    let Some(held) = cloud.placement.allocations(instance).await? else { return Ok(Claimed::Nothing) };
    if held.consumer_type.is_some_and(|kind| kind != ec_placement_client::CONSUMER_TYPE) {
        return Ok(Claimed::Nothing);
    }
    let mut is_of_storage = true;
    for provider in held.allocations.into_keys() {
        match cloud.placement.provider(provider).await? {
            Some(host) if host.storage().is_none() => return Ok(Claimed::Of(host.root())),
            provider => is_of_storage &= provider.is_some(),
        }
    }
    Ok(if is_of_storage { Claimed::OfStorage } else { Claimed::Nothing })
}

/// The node under which any key speaks of the instance.
pub(crate) async fn somewhere(cloud: &Cloud, instance: InstanceId) -> CloudResult<Option<NodeId>> {
    let keys = &cloud.keys;
    let (statuses, requests) = (keys.all_statuses(), keys.all_requests());
    let (statuses, requests) = tokio::try_join!(cloud.store.keys(&statuses), cloud.store.keys(&requests))?;
    let statuses = statuses.iter().filter_map(|key| keys.parse_status(key).ok());
    let requests = requests.iter().filter_map(|key| keys.parse_request(key).ok());
    Ok(statuses.chain(requests).find(|(_, of)| *of == instance).map(|(node, _)| node))
}

/// The nodes that keys of this kind speak of.
pub(crate) fn nodes_of(
    keys: &[String],
    parse: impl Fn(&str) -> Option<(NodeId, InstanceId)>,
) -> BTreeMap<NodeId, HashSet<InstanceId>> {
    let mut found: BTreeMap<NodeId, HashSet<InstanceId>> = BTreeMap::new();
    for (node, instance) in keys.iter().filter_map(|key| parse(key)) {
        found.entry(node).or_default().insert(instance);
    }
    found
}

/// As [`nodes_of`], of requests and statuses together.
pub(crate) fn holders(
    keys: &Keyspace,
    requests: &[String],
    statuses: &[String],
) -> BTreeMap<NodeId, HashSet<InstanceId>> {
    let mut found = nodes_of(requests, |key| keys.parse_request(key).ok());
    for (node, instances) in nodes_of(statuses, |key| keys.parse_status(key).ok()) {
        found.entry(node).or_default().extend(instances);
    }
    found
}

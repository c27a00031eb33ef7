//! Finding instances, and telling what is known of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use ec_model::{
    Alive, Assigned, Attachment, Blob, Desired, Doc, Handover, Instance, InstanceId, Keyspace, NodeId,
    Record, Request, RequestId, Resized, Resources, State, Status, Workload, decode, decode_part,
};
use ec_plan::{
    sizes::{missed, of_disk},
    stack::Standing,
    verbs::shown,
    volumes::{Sides, made_of},
};
use ec_store::{KeyValue, Revision, StoreError, StoreResult};
use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    Cloud, CloudError, CloudResult,
    heal::RECORD_LOST,
    intent::{sweep, wanted, young_for},
    select::{SortBy, sort},
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

    fn unreadable(&self) -> Option<&str> {
        match self {
            Self::Unreadable(why) => Some(why),
            Self::Absent | Self::Here(..) => None,
        }
    }

    fn is_absent(&self) -> bool {
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
fn as_made(mut record: Instance, request: &Read<Request>, status: &Read<Status>) -> Instance {
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
/// among all keys.
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
    match record.node() {
        Some(node) => {
            let known = look(cloud, instance, node, Some(record)).await?;
            Ok(Found::Placed(Box::new(Known { record_pair: Some(pair), ..known })))
        }
        None => Ok(Found::Unplaced(Box::new(record), pair.mod_revision)),
    }
}

/// An instance that is placed; else an error that says how it stands.
pub async fn find_placed(cloud: &Cloud, instance: InstanceId) -> CloudResult<Known> {
    match find(cloud, instance).await? {
        Found::Placed(known) => Ok(*known),
        Found::Unplaced(record, _) => {
            let left = young_for(cloud, &record).unwrap_or_default();
            let (what, verb) = match record.kind {
                Workload::Machine => ("instance", "destroy"),
                Workload::Volume => ("volume", "volume delete"),
            };
            Err(CloudError::Busy(format!(
                "{what} {instance} is not placed: a command began with it at {} and has not finished; if that was killed, its name is free in {} s, and `eschedule {verb} {instance}` then takes away what it left",
                record.created_at,
                left.as_secs()
            )))
        }
    }
}

/// A status, unless it is of another placement of the instance than this, which is over.
fn of_epoch(status: Read<Status>, epoch: Option<u64>) -> Read<Status> {
    match (epoch, status.record()) {
        (Some(epoch), Some(told)) if ![0, epoch].contains(&told.epoch) => Read::Absent,
        _ => status,
    }
}

/// Reads what lies at known places, at once.
async fn look(
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
async fn somewhere(cloud: &Cloud, instance: InstanceId) -> CloudResult<Option<NodeId>> {
    let keys = &cloud.keys;
    let (statuses, requests) = (keys.all_statuses(), keys.all_requests());
    let (statuses, requests) = tokio::try_join!(cloud.store.keys(&statuses), cloud.store.keys(&requests))?;
    let statuses = statuses.iter().filter_map(|key| keys.parse_status(key).ok());
    let requests = requests.iter().filter_map(|key| keys.parse_request(key).ok());
    Ok(statuses.chain(requests).find(|(_, of)| *of == instance).map(|(node, _)| node))
}

/// What people and scripts see of an instance.
#[derive(Debug, Clone, Serialize)]
pub struct View {
    /// Which.
    pub instance: InstanceId,
    /// What kind of workload it is.
    #[serde(skip)]
    pub kind: Workload,
    /// What it is called.
    pub name: Option<String>,
    /// Where it is; none where it is not placed yet.
    pub node: Option<NodeId>,
    /// Whether that node's agent is alive.
    pub node_alive: bool,
    /// A [`State`], or UNKNOWN.
    pub state: String,
    /// Its first address.
    pub ip: Option<std::net::IpAddr>,
    /// The project that it is accounted to, where that is told.
    pub project: Option<String>,
    /// What its user tells it apart by.
    pub labels: BTreeMap<String, String>,
    /// The group that it is a member of.
    pub group: Option<String>,
    /// When it was asked for, where that is told.
    pub created_at: Option<Timestamp>,
    /// Why it is in this state.
    pub reason: Option<String>,
    /// What it takes, by class, where that is told.
    #[serde(skip)]
    pub resources: Resources,
    /// Since when it has been in this state, where its agent tells that.
    #[serde(skip)]
    pub since: Option<Timestamp>,
    /// What its agent is about with it, or waits for, while it is on its way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
    /// The id of the command that wrote what is wanted last, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    /// What is wanted of it, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<Box<Instance>>,
    /// The whole request, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<Box<Request>>,
    /// The whole status, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Box<Status>>,
}

/// What no [`State`] is for: a record that cannot be read, or none at all.
const UNKNOWN: &str = "UNKNOWN";

impl View {
    /// All of what was found.
    pub fn found(found: &Found) -> Self {
        match found {
            Found::Placed(known) => Self::of(known),
            Found::Unplaced(record, _) => Self { request_id: record.request_id, ..Self::unplaced(record) },
        }
    }

    /// All of it.
    pub fn of(known: &Known) -> Self {
        let mut view =
            Self::brief(known.instance, known.node, known.node_alive, &known.request, &known.status);
        view = match &known.record {
            Some(record) => view.with(record).wished(record, &known.request, &known.status),
            None if known.is_asked_for() => view.recordless(),
            None => view,
        };
        view.request_id = asked_by(known.request.record(), known.record.as_ref());
        view.record = known.record.clone().map(Box::new);
        view.request = known.request.record().cloned().map(Box::new);
        view.status = known.status.record().cloned().map(Box::new);
        view
    }

    /// What is seen of an instance whose keys lie under this node.
    pub(crate) fn brief(
        instance: InstanceId,
        node: NodeId,
        node_alive: bool,
        wish: &Read<Request>,
        is: &Read<Status>,
    ) -> Self {
        let (request, status) = (wish.record(), is.record());
        let unknown = match (wish.unreadable(), is.unreadable()) {
            (Some(why), _) => Some(format!("its request cannot be read: {why}")),
            (None, Some(why)) => Some(format!("its status cannot be read: {why}")),
            (None, None) if wish.is_absent() && is.is_absent() => Some(
                "nobody asks for it and no agent tells of it: it failed long ago, its keys were deleted, or it was destroyed after this state of etcd was saved; to destroy it takes away what is left"
                    .to_owned(),
            ),
            (None, None) => None,
        };
        let state = match (request, status) {
            _ if unknown.is_some() => UNKNOWN.to_owned(),
            (Some(Request { desired: Desired::Destroyed, .. }), _) => State::Destroying.to_string(),
            (_, Some(status)) => status.state.to_string(),
            (_, None) => State::Scheduled.to_string(),
        };
        let kind = request.map(|request| request.kind).or(status.map(|status| status.kind));
        let since = status.filter(|status| status.state.to_string() == state).map(|status| status.since);
        Self {
            instance,
            kind: kind.unwrap_or_default(),
            name: request.and_then(|r| r.name.clone()).or_else(|| status.and_then(|s| s.name.clone())),
            node: Some(node),
            node_alive,
            state,
            ip: status.and_then(|status| status.ip),
            project: request.map(|request| request.project.clone()),
            labels: BTreeMap::new(),
            group: None,
            created_at: request.map(|request| request.created_at),
            reason: unknown.or_else(|| status.and_then(|status| status.reason.clone())),
            doing: doing(request, is),
            resources: request.and_then(|r| Some(r.spec.as_ref()?.resources.clone())).unwrap_or_default(),
            since,
            request_id: None,
            record: None,
            request: None,
            status: None,
        }
    }

    /// The same, with what the record tells beside.
    pub(crate) fn with(self, record: &Instance) -> Self {
        Self {
            kind: record.kind,
            name: self.name.or_else(|| record.name.clone()),
            project: Some(record.project.clone()),
            labels: record.labels.clone(),
            group: record.group.clone(),
            created_at: Some(record.created_at),
            resources: record.spec.resources.clone(),
            ..self
        }
    }

    /// The same of one that is asked for, and has no record.
    fn recordless(self) -> Self {
        Self { reason: self.reason.or_else(|| Some(RECORD_LOST.to_owned())), ..self }
    }

    /// The same of a volume that could not grow.
    fn no_larger(self, record: &Instance, was: &Resized) -> Self {
        let asked = of_disk(&record.spec.resources);
        let why = was.failed.as_deref().unwrap_or_default();
        let reason = self.reason.unwrap_or_else(|| {
            format!("it could not grow to {asked} GB: {why}; `eschedule volume extend` tries it again")
        });
        let mut resources = self.resources;
        resources.extend(was.resources.clone());
        Self { resources, reason: Some(reason), ..self }
    }

    /// The same, with what its user wished of it: what is under way, or a new size that is to be confirmed or reverted.
    pub(crate) fn wished(self, record: &Instance, request: &Read<Request>, status: &Read<Status>) -> Self {
        let (Some(request), Some(status)) = (request.record(), status.record()) else { return self };
        if let (Workload::Volume, Some(was)) = (record.kind, missed(request, Some(status))) {
            return self.no_larger(record, was);
        }
        if self.state != status.state.to_string() {
            return self;
        }
        let state = shown(record, request, status);
        let how = match (state, status.state) {
            (State::VerifyResize, State::Active) => Some("it has its new size"),
            (State::VerifyResize, _) => Some("it has its new size, and does not run"),
            _ => None,
        };
        let reason = self.reason.or_else(|| {
            let how = how?;
            Some(format!(
                "{how}: `eschedule resize --confirm` keeps it, `eschedule resize --revert` goes back"
            ))
        });
        // Of a machine that is told where it is looked at alone.
        let rebuilt = status.rebuilt.as_ref().filter(|_| record.kind == Workload::Volume);
        let not_anew = rebuilt
            .filter(|was| request.rebuild.as_ref().is_some_and(|wish| wish.wished_at == was.wished_at))
            .and_then(|was| was.failed.as_ref())
            .map(|why| format!("it could not be made anew, and has its old disk: {why}"));
        let reason = reason.or(not_anew);
        Self { state: state.to_string(), reason, ..self }
    }

    /// One that has no node.
    pub fn unplaced(record: &Instance) -> Self {
        let view = Self {
            instance: record.instance,
            kind: record.kind,
            name: record.name.clone(),
            node: None,
            node_alive: false,
            state: State::Scheduled.to_string(),
            ip: None,
            project: None,
            labels: BTreeMap::new(),
            group: None,
            created_at: None,
            reason: Some(format!("being placed since {}", record.created_at)),
            doing: None,
            resources: Resources::new(),
            since: None,
            request_id: None,
            record: None,
            request: None,
            status: None,
        };
        view.with(record)
    }

    /// The same, of one whose record cannot be read: it may well run, and nothing can be asked of it.
    pub(crate) fn without_record(self, why: &str) -> Self {
        Self { state: UNKNOWN.to_owned(), reason: Some(not_wanted(why)), ..self }
    }

    /// One of which there is nothing but a record that cannot be read.
    pub(crate) fn unreadable(instance: InstanceId, why: &str) -> Self {
        Self {
            instance,
            kind: Workload::Machine,
            name: None,
            node: None,
            node_alive: false,
            state: UNKNOWN.to_owned(),
            ip: None,
            project: None,
            labels: BTreeMap::new(),
            group: None,
            created_at: None,
            reason: Some(not_wanted(why)),
            doing: None,
            resources: Resources::new(),
            since: None,
            request_id: None,
            record: None,
            request: None,
            status: None,
        }
    }
}

/// The id of the command that wrote what is wanted last. The wish to destroy is in the request alone; after a failure that is gone.
fn asked_by(request: Option<&Request>, record: Option<&Instance>) -> Option<RequestId> {
    match (request, record) {
        (Some(request), _) => request.request_id,
        (None, record) => record.and_then(|record| record.request_id),
    }
}

/// Of a record that cannot be read.
fn not_wanted(why: &str) -> String {
    format!("what is wanted of it cannot be read: {why}")
}

/// What an agent said that it is about; or that it has not said anything of the newest wish yet.
fn doing(request: Option<&Request>, status: &Read<Status>) -> Option<String> {
    // Nobody knows what one says that cannot be read.
    if status.unreadable().is_some() {
        return None;
    }
    let status = status.record();
    let told = status.map(|status| (status.epoch, status.observed_generation));
    match request {
        Some(request) if told.is_none_or(|told| told < (request.epoch, request.generation)) => {
            let waits = "its agent has yet to take up what is asked for";
            let why = status
                .and_then(|status| status.doing.as_deref())
                .filter(|doing| doing.ends_with(ec_plan::status::AGAIN));
            Some(why.map_or_else(
                || waits.to_owned(),
                |why| format!("what is asked for is yet to be done: {why}"),
            ))
        }
        _ => status.and_then(|status| status.doing.clone()),
    }
}

/// Every instance of every node, by node and name; volumes are none of them.
pub async fn list(cloud: &Cloud) -> CloudResult<Vec<View>> {
    let (views, _) = list_of(cloud, Workload::Machine).await?;
    let brief = |view| View { request_id: None, record: None, request: None, status: None, ..view };
    Ok(views.into_iter().map(brief).collect())
}

/// What is read of the record of one that is of another kind.
#[derive(Deserialize)]
pub(crate) struct Other {
    #[serde(default)]
    kind: Workload,
    /// The volumes that it is to have; and then those that its agent tells it has still.
    #[serde(default)]
    pub(crate) volumes: Vec<Attachment>,
}

/// And of its status.
#[derive(Deserialize)]
struct OtherTold {
    #[serde(default)]
    volumes: Vec<Attachment>,
}

/// Of this kind, with their records, and volumes with what their agents tell; and what there is of other kinds.
pub(crate) async fn list_of(
    cloud: &Cloud,
    kind: Workload,
) -> CloudResult<(Vec<View>, BTreeMap<InstanceId, Other>)> {
    let keys = &cloud.keys;
    let prefixes = (keys.all_requests(), keys.all_statuses(), keys.all_alive(), keys.instances());
    let (requests, statuses, nodes, records) = tokio::try_join!(
        cloud.store.list(&prefixes.0),
        cloud.store.list(&prefixes.1),
        cloud.store.keys(&prefixes.2),
        cloud.store.list(&prefixes.3)
    )?;
    let alive: HashSet<NodeId> = nodes.iter().filter_map(|key| keys.parse_alive(key).ok()).collect();
    let (mut recorded, mut others) = (BTreeMap::new(), BTreeMap::new());
    for pair in &records.pairs {
        let Ok(instance) = keys.parse_instance(&pair.key) else { continue };
        match decode_part::<Instance, Other>(&pair.value) {
            Ok(other) if other.kind != kind => drop(others.insert(instance, other)),
            _ => drop(recorded.insert(instance, pair)),
        }
    }
    // By where they lie. What is known to be of another kind is not read any further.
    let mut both: BTreeMap<(NodeId, InstanceId), [Option<&KeyValue>; 2]> = BTreeMap::new();
    let mut listed: HashSet<InstanceId> = HashSet::new();
    let asked = requests.pairs.iter().map(|pair| (0, pair, keys.parse_request(&pair.key)));
    let told = statuses.pairs.iter().map(|pair| (1, pair, keys.parse_status(&pair.key)));
    for (which, pair, lies) in asked.chain(told) {
        let Ok(lies) = lies else { continue };
        listed.insert(lies.1);
        match others.get_mut(&lies.1) {
            None => both.entry(lies).or_default()[which] = Some(pair),
            // Only machines have volumes.
            Some(other) if which == 1 && other.kind.is_machine() => {
                let told = decode_part::<Status, OtherTold>(&pair.value);
                other.volumes.extend(told.map(|told| told.volumes).unwrap_or_default());
            }
            Some(_) => {}
        }
    }
    // Of every kind: what a killed command left is taken away whoever looks.
    let alone = recorded.keys().chain(others.keys()).copied().filter(|instance| !listed.contains(instance));
    let alone: Vec<Option<View>> = futures::stream::iter(alone)
        .map(|instance| record_only(cloud, instance))
        .buffer_unordered(CONCURRENCY)
        .try_collect()
        .await?;
    let placed = both.iter().filter_map(|(&(node, instance), &[request, status])| {
        let request: Read<Request> = read(request, node, instance);
        let status = of_epoch(read(status, node, instance), request.record().map(|request| request.epoch));
        let record = recorded.get(&instance).map(|pair| wanted(instance, &pair.value));
        // Of one that is on its way to another node its record says which of the two counts.
        let named = record.as_ref().and_then(|record| record.as_ref().ok()?.node());
        let leaves = request.record().is_some_and(|it| matches!(it.handover, Some(Handover::To(_))));
        if leaves && named.is_some_and(|named| named != node && both.contains_key(&(named, instance))) {
            return None;
        }
        let view = View::brief(instance, node, alive.contains(&node), &request, &status);
        let of_record = record.as_ref().and_then(|record| record.as_ref().ok());
        let view = View { request_id: asked_by(request.record(), of_record), ..view };
        let view = match record {
            Some(Ok(record)) => {
                let view = view.with(&record).wished(&record, &request, &status);
                View { record: Some(Box::new(as_made(record, &request, &status))), ..view }
            }
            Some(Err(why)) => view.without_record(&why),
            None => view,
        };
        // Those of machines are many and large, and nobody looks at them here.
        let told = status.record().filter(|_| kind == Workload::Volume).cloned();
        Some(View { status: told.map(Box::new), ..view })
    });
    let of_kind = |view: &View| view.kind == kind;
    let mut views: Vec<View> = placed.chain(alone.into_iter().flatten()).filter(of_kind).collect();
    sort(&mut views, SortBy::Node);
    Ok((views, others))
}

/// The project's records, in the order of their keys. One that cannot be read is told, and hides no other.
async fn records(cloud: &Cloud) -> CloudResult<Vec<Instance>> {
    let mut records = Vec::new();
    for pair in cloud.store.list(&cloud.keys.instances()).await?.pairs {
        let Ok(instance) = cloud.keys.parse_instance(&pair.key) else { continue };
        match wanted(instance, &pair.value) {
            Ok(record) if record.project == cloud.project => records.push(record),
            Ok(_) => {}
            Err(why) => (cloud.notice)(&format!("key {} cannot be read: {why}", pair.key)),
        }
    }
    Ok(records)
}

/// The project's instances and its volumes, those of the stack with all that a file may say of them, and what is wrong with them.
pub async fn standing(cloud: &Cloud, stack: &str) -> CloudResult<(Vec<Standing>, Vec<Standing>)> {
    let standing = records(cloud).await?.into_iter().map(async |record| {
        match record.node().filter(|_| Standing::is_of(&record, stack)) {
            Some(node) => standing_on(cloud, record, node).await,
            None => Ok(Standing::of_record(record)),
        }
    });
    let standing: Vec<_> = futures::stream::iter(standing).buffered(CONCURRENCY).try_collect().await?;
    Ok(standing.into_iter().partition(|standing| standing.record.kind.is_machine()))
}

async fn standing_on(cloud: &Cloud, record: Instance, node: NodeId) -> CloudResult<Standing> {
    let known = look(cloud, record.instance, node, Some(record.clone())).await?;
    let user_data = match record.spec.user_data_bytes {
        Some(_) => match cloud.store.get(&cloud.keys.user_data(node, record.instance)).await {
            // It is sealed, and damaged or of a key that is not here: that of one node is no trouble of the others' instances.
            Err(StoreError::Invalid(why)) => Err(why),
            told => Ok(told?.0),
        },
        None => Ok(None),
    };
    let closed = user_data.as_ref().err().cloned();
    let user_data = user_data.ok().flatten().map(|pair| Blob(pair.value));
    let unreadable = known.request.unreadable().or(known.status.unreadable());
    if let Some(why) = unreadable.map(ToString::to_string).or(closed) {
        let ails = Some(format!("not all of it can be read: {why}"));
        return Ok(Standing { user_data, ails, ..Standing::of_record(record) });
    }
    Ok(Standing::of_stack(record, user_data, known.request.record(), known.status.record()))
}

/// An instance of which only the record was listed: one that is being placed now, or what is left of one, which is
/// taken away.
async fn record_only(cloud: &Cloud, instance: InstanceId) -> CloudResult<Option<View>> {
    let Some(pair) = cloud.store.get(&cloud.keys.instance(instance)).await?.0 else { return Ok(None) };
    let record = match wanted(instance, &pair.value) {
        Ok(record) => record,
        Err(why) => return Ok(Some(View::unreadable(instance, &why))),
    };
    let view = match record.node() {
        Some(node) => {
            let known = look(cloud, instance, node, Some(record.clone())).await?;
            let view = View::of(&known);
            // Placed since the others were listed.
            if !(known.request.is_absent() && known.status.is_absent()) {
                return Ok(Some(view));
            }
            view
        }
        None => View { record: Some(Box::new(record.clone())), ..View::unplaced(&record) },
    };
    // Whoever may only read, or has no placement at hand, is shown what there is.
    match sweep(cloud, record, pair.mod_revision).await {
        Ok(true) => Ok(None),
        Ok(false) | Err(_) => Ok(Some(view)),
    }
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

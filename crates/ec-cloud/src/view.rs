//! Instances as people and scripts see them, and how all of a kind are listed.

use std::collections::{BTreeMap, HashSet};

use ec_model::{
    Attachment, Blob, Desired, Handover, Instance, InstanceId, NodeId, Request, RequestId, Resized,
    Resources, State, Status, Workload, decode_part,
};
use ec_plan::{
    sizes::{missed, of_disk},
    stack::Standing,
    status::is_started_again,
    verbs::{RESCUED_OFF, shown},
};
use ec_store::{KeyValue, StoreError};
use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    Cloud, CloudResult,
    heal::RECORD_LOST,
    intent::{sweep, wanted},
    lookup::{CONCURRENCY, Found, Known, Read, as_made, look, of_epoch, read},
    select::{SortBy, sort},
};

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
    /// Whether its agent tells why it has not the volumes that it is to have.
    #[serde(skip)]
    pub volumes_failed: bool,
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
            volumes_failed: status.is_some_and(|status| status.volumes_failed.is_some()),
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
            let at = second(was.wished_at);
            format!("it could not grow to {asked} GB as asked for at {at}: {why}; `eschedule volume extend` tries it again")
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
        // Nothing else of a list says from which disk a start would boot it.
        let is_off = state == State::Stopped && request.rescue.is_some() && status.is_rescued();
        let told = self.reason.map(|why| match is_off && !is_started_again(Some(&why)) {
            true => format!("{why}; it is rescued: {RESCUED_OFF}"),
            false => why,
        });
        let reason = told.or_else(|| {
            let how = how?;
            Some(format!(
                "{how}: `eschedule resize --confirm` keeps it, `eschedule resize --revert` goes back"
            ))
        });
        // Of a machine that is told where it is looked at alone.
        let rebuilt = status.rebuilt.as_ref().filter(|_| record.kind == Workload::Volume);
        let not_anew = rebuilt
            .filter(|was| request.rebuild.as_ref().is_some_and(|wish| wish.wished_at == was.wished_at))
            .and_then(|was| Some((second(was.wished_at), was.failed.as_ref()?)))
            .map(|(at, why)| {
                format!("it could not be made anew as asked for at {at}, and has its old disk: {why}; `eschedule volume restore` tries it again")
            });
        let not_resized = missed(request, Some(status)).map(|was| not_resized(record, was));
        let reason = reason.or(not_anew).or(not_resized);
        Self { state: state.to_string(), reason, ..self }
    }

    /// One that has no node.
    pub fn unplaced(record: &Instance) -> Self {
        let why = format!("being placed since {}", record.created_at);
        let view = Self {
            kind: record.kind,
            name: record.name.clone(),
            ..Self::nowhere(record.instance, State::Scheduled.to_string(), why)
        };
        view.with(record)
    }

    /// The same, of one whose record cannot be read: it may well run, and nothing can be asked of it.
    pub(crate) fn without_record(self, why: &str) -> Self {
        Self { state: UNKNOWN.to_owned(), reason: Some(not_wanted(why)), ..self }
    }

    /// One of which there is nothing but a record that cannot be read.
    pub(crate) fn unreadable(instance: InstanceId, why: &str) -> Self {
        Self::nowhere(instance, UNKNOWN.to_owned(), not_wanted(why))
    }

    /// A machine that no node has, of which nothing else is known.
    fn nowhere(instance: InstanceId, state: String, why: String) -> Self {
        Self {
            instance,
            kind: Workload::Machine,
            name: None,
            node: None,
            node_alive: false,
            state,
            ip: None,
            project: None,
            labels: BTreeMap::new(),
            group: None,
            created_at: None,
            reason: Some(why),
            doing: None,
            resources: Resources::new(),
            since: None,
            volumes_failed: false,
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

/// Of a machine that could not be given another size, for which it goes on holding a claim; or its old one again.
fn not_resized(record: &Instance, was: &Resized) -> String {
    let why = was.failed.as_deref().unwrap_or_default();
    let way = match &record.before {
        Some(_) => "gives back what was claimed for more",
        None => "tries it again",
    };
    format!("a resize failed, it is as large as it was before that: {why}; `eschedule resize --revert` {way}")
}

/// A time for people, in UTC.
fn second(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
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
    /// The volumes that it is to have.
    #[serde(default)]
    pub(crate) volumes: Vec<Attachment>,
    /// What its agent tells of those that it has.
    #[serde(skip)]
    pub(crate) told: OtherTold,
    /// Whether there is a request of it.
    #[serde(skip)]
    pub(crate) is_asked_for: bool,
}

/// And of its status.
#[derive(Default, Deserialize)]
pub(crate) struct OtherTold {
    #[serde(default)]
    pub(crate) volumes: Vec<Attachment>,
    #[serde(default)]
    pub(crate) volumes_changing: bool,
    #[serde(default)]
    pub(crate) volumes_failed: Option<String>,
}

impl OtherTold {
    /// Takes in what a status tells; one that cannot be read tells nothing.
    fn hear(&mut self, pair: &KeyValue) {
        let Ok(told) = decode_part::<Status, Self>(&pair.value) else { return };
        self.volumes.extend(told.volumes);
        self.volumes_changing |= told.volumes_changing;
        self.volumes_failed = told.volumes_failed.or(self.volumes_failed.take());
    }
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
            Some(other) if which == 0 => other.is_asked_for = true,
            Some(other) if other.kind.is_machine() => other.told.hear(pair),
            Some(_) => {}
        }
    }
    // Of one that is about to be destroyed the record is gone already, and of one that etcd lost the request, too.
    for (&(_, instance), &[request, status]) in &both {
        if recorded.contains_key(&instance) {
            continue;
        }
        let other = match (request, status) {
            (Some(pair), _) => decode_part::<Request, Other>(&pair.value),
            (None, Some(pair)) => decode_part::<Status, Other>(&pair.value),
            (None, None) => continue,
        };
        let Some(mut other) = other.ok().filter(|it| it.kind.is_machine() && it.kind != kind) else {
            continue;
        };
        if let Some(pair) = status {
            other.told.hear(pair);
        }
        others.insert(instance, Other { is_asked_for: request.is_some(), ..other });
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

//! Bringing back what etcd lost of instances and their nodes hold.
//!
//! ```text
//!   held/<node>/<instance>     by its agent, with the status UNCLAIMED      read here, never written
//!      │ ec_plan::heal::brought: what is to be written, or why not
//!      ▼
//!   request, record, name, user-data, membership                           one transaction, which compares all of it
//! ```
//!
//! Where the record alone is gone, it is made of the request; where the keys of its name or its membership alone are, they are
//! written again.
//!
//! Whatever changed since it was read makes the transaction fail, and all is looked at anew. So a second heal beside this
//! one, or the agent itself, does no harm; and where there is a request, there is nothing to do.

mod keys;

use std::collections::{BTreeMap, HashSet};

use ec_model::{
    ActionVerb, Actions, Assigned, Desired, Doc, Edition, Handover, Held, ImageRef, Instance, InstanceId,
    NodeId, Rebuild, Rebuilt, Record, Request, RequestId, State, Status, Workload, decode,
};
use ec_plan::{
    heal::{Brought, brought, made_of_request},
    volumes::lies_alone,
};
use ec_runtime::planted;
use ec_store::{Compare, KeyValue, StoreError, Txn};
use serde::Serialize;

use crate::{
    Cloud, CloudError, CloudResult, Joining, Kind,
    group::{Place, place_of},
    history::{Asked, note},
    intent::{free, name_is_free},
    lookup::{is_beginning, verb_of_end},
    moving::next_epoch,
    schedule::not_understood,
    storage::storage_of,
    tend::Tended,
    volume::{kept_by, kept_for},
};

/// Others may be at it at the same time; so often is enough for anybody.
const TRIES: usize = 5;

/// What is told of one whose request is there, and whose record is not.
pub(crate) const RECORD_LOST: &str =
    "etcd lacks its record, so nothing can be asked of it: `eschedule heal` writes it anew";

/// What comes of an instance that its node holds and etcd lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It can be brought back.
    Lost,
    /// It is asked for again.
    Healed,
    /// It stays as it is.
    Left,
}

/// An instance that its node holds and etcd lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Healed {
    /// Which.
    pub instance: InstanceId,
    /// Its name, where it has one, as it will be or was.
    pub name: Option<String>,
    /// Its project, where that is known.
    pub project: Option<String>,
    /// Who holds it.
    pub node: NodeId,
    /// What comes of it.
    pub outcome: Outcome,
    /// The id of the command that brought it back.
    pub request_id: Option<RequestId>,
    /// What is otherwise than it was; or why it stays as it is.
    pub notes: Vec<String>,
}

impl Healed {
    /// One that stays as it is.
    fn left(node: NodeId, instance: InstanceId, of: Option<&Request>, why: impl Into<String>) -> Self {
        let (name, project) = (of.and_then(|of| of.name.clone()), of.map(|of| of.project.clone()));
        Self {
            instance,
            name,
            project,
            node,
            outcome: Outcome::Left,
            request_id: None,
            notes: vec![why.into()],
        }
    }

    fn brought(node: NodeId, record: &Instance, notes: Vec<String>) -> Self {
        let Instance { instance, name, project, request_id, .. } = record.clone();
        Self { instance, name, project: Some(project), node, outcome: Outcome::Healed, request_id, notes }
    }
}

/// Those that are called so: by their names within the project, where any is; else by the uuid, or the beginning of that.
fn called(all: &[Healed], project: &str, word: &str) -> HashSet<InstanceId> {
    let is_of_project = |lost: &&Healed| lost.project.as_deref().is_none_or(|of| of == project);
    let is_named = |lost: &&Healed| lost.name.as_ref().is_some_and(|name| name.eq_ignore_ascii_case(word));
    let of = |lost: &Healed| lost.instance;
    let named: HashSet<_> = all.iter().filter(is_of_project).filter(is_named).map(of).collect();
    if !named.is_empty() {
        return named;
    }
    let word = word.to_ascii_lowercase();
    let begins = |uuid: String| uuid == word || is_beginning(&word) && uuid.starts_with(&word);
    all.iter().map(of).filter(|instance| begins(instance.to_string())).collect()
}

/// Brings back what nodes hold that etcd lacks: all of it, or of these names and uuids (or their beginnings); or only
/// looks what that would be. One that cannot be brought back is left, with why; where etcd or placement does not answer any more,
/// that is what failed, and what was brought back before stays.
///
/// # Errors
/// One that was named is not held by anybody, or several are, or etcd does not answer: nothing is done.
pub async fn heal(cloud: &Cloud, only: &[String], looks: bool) -> CloudResult<Tended<Healed>> {
    let all = lost(cloud).await?;
    let mut chosen = HashSet::new();
    for word in only {
        let called = called(&all, &cloud.project, word);
        match called.len() {
            1 => chosen.extend(called),
            0 => {
                return Err(CloudError::NotFound(format!(
                    "no node holds an instance `{word}` that etcd lacks; `eschedule heal --dry-run` lists what they hold"
                )));
            }
            many => {
                return Err(CloudError::Invalid(format!(
                    "`{word}` is the name or the beginning of the uuid of {many} instances; name one by its uuid"
                )));
            }
        }
    }
    let mut tended = Tended::new();
    for lost in all.into_iter().filter(|lost| only.is_empty() || chosen.contains(&lost.instance)) {
        let brought = match lost.outcome {
            Outcome::Left => Ok(Some(lost)),
            _ => match bring(cloud, lost.node, lost.instance, looks).await {
                Err(error) if error.kind() != Kind::Unreachable => {
                    let notes = vec![error.to_string()];
                    Ok(Some(Healed { outcome: Outcome::Left, request_id: None, notes, ..lost }))
                }
                brought => brought,
            },
        };
        if !tended.note(brought) {
            break;
        }
    }
    Ok(tended)
}

/// What a node holds of the project that etcd lacks, and nobody ended: it is there, and would be made once more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldNamed {
    /// What it is.
    pub kind: Workload,
    /// Its name.
    pub name: String,
    /// Which.
    pub instance: InstanceId,
    /// Who holds it.
    pub node: NodeId,
}

impl HeldNamed {
    /// What helps.
    pub fn way(&self) -> String {
        let Self { instance, node, .. } = self;
        format!(
            "node {node} has {} {instance} of that name, of which etcd has lost what is wanted: `eschedule heal` brings it back, \
             `eschedule {} {instance}` ends it",
            self.kind.word(),
            verb_of_end(self.kind),
        )
    }
}

/// Those that nodes hold, of the project, by their names.
///
/// # Errors
/// etcd does not answer.
pub async fn held_named(cloud: &Cloud) -> CloudResult<Vec<HeldNamed>> {
    let keys = &cloud.keys;
    let held = cloud.store.list(&keys.every_held()).await?.pairs;
    let named = held.iter().filter_map(|pair| {
        let (node, instance) = keys.parse_held(&pair.key).ok()?;
        let (_, asked) = read(pair, node, instance).ok()?;
        let is_wanted = asked.desired == Desired::Active && asked.project == cloud.project;
        Some(HeldNamed { kind: asked.kind, name: asked.name.filter(|_| is_wanted)?, instance, node })
    });
    Ok(named.collect())
}

/// Those of which only the record is gone.
///
/// # Errors
/// etcd does not answer.
pub async fn unrecorded(cloud: &Cloud) -> CloudResult<Vec<Healed>> {
    let requests = cloud.store.keys(&cloud.keys.all_requests()).await?;
    let all = without_record(cloud, &requests).await?;
    Ok(all.into_iter().filter(|lost| lost.outcome == Outcome::Lost).collect())
}

/// Those whose names, or whose places in groups, somebody deleted.
///
/// # Errors
/// etcd does not answer.
pub async fn unfound(cloud: &Cloud) -> CloudResult<Vec<Healed>> {
    let requests = cloud.store.keys(&cloud.keys.all_requests()).await?;
    keys::keyless(cloud, &requests).await
}

/// What is asked for by these keys and has no record.
async fn without_record(cloud: &Cloud, requests: &[String]) -> CloudResult<Vec<Healed>> {
    let keys = &cloud.keys;
    // Read last: each is written with its request, or before.
    let records = cloud.store.keys(&keys.instances()).await?;
    let recorded: HashSet<InstanceId> =
        records.iter().filter_map(|key| keys.parse_instance(key).ok()).collect();
    let mut asked: BTreeMap<InstanceId, Vec<NodeId>> = BTreeMap::new();
    for (node, instance) in requests.iter().filter_map(|key| keys.parse_request(key).ok()) {
        if !recorded.contains(&instance) {
            asked.entry(instance).or_default().push(node);
        }
    }
    let mut all = Vec::new();
    for (instance, nodes) in asked {
        let Some(node) = nodes.last().copied() else { continue };
        let Some(pair) = cloud.store.get(&keys.request(node, instance)).await?.0 else { continue };
        let request = decode::<Request>(&pair.value).ok().filter(|it| it.instance == instance);
        let Some(request) = request.filter(|request| request.desired == Desired::Active) else { continue };
        let left = |why| Healed::left(node, instance, Some(&request), why);
        all.push(match nodes.len() {
            1 => Healed { outcome: Outcome::Lost, ..left(RECORD_LOST) },
            _ => left(
                "it is asked for on several nodes, and only its record, which is gone, said which counts",
            ),
        });
    }
    Ok(all)
}

/// All that nodes hold and nobody asks for, by node.
async fn lost(cloud: &Cloud) -> CloudResult<Vec<Healed>> {
    let keys = &cloud.keys;
    let prefixes = (keys.every_held(), keys.all_statuses(), keys.all_requests());
    let (held, statuses, requests) = tokio::try_join!(
        cloud.store.list(&prefixes.0),
        cloud.store.list(&prefixes.1),
        cloud.store.keys(&prefixes.2)
    )?;
    let asked: BTreeMap<InstanceId, NodeId> = requests
        .iter()
        .filter_map(|key| keys.parse_request(key).ok())
        .map(|(node, instance)| (instance, node))
        .collect();
    let mut all: BTreeMap<(NodeId, InstanceId), Healed> = BTreeMap::new();
    let mut editions: BTreeMap<InstanceId, Vec<(Edition, NodeId)>> = BTreeMap::new();
    for pair in &statuses.pairs {
        let Ok((node, instance)) = keys.parse_status(&pair.key) else { continue };
        let Some(status) = decode::<Status>(&pair.value).ok().filter(|it| it.state == State::Unclaimed)
        else {
            continue;
        };
        let why = "its node kept no copy of what was asked for: its agent was of an older release then, or its record is gone";
        let left = Healed::left(node, instance, None, why);
        match asked.get(&instance) {
            None => _ = all.insert((node, instance), left),
            // Where it is asked for all is known of it, also whether it is a volume.
            Some(at) if *at != node => {
                let name = status.name.clone();
                all.insert((node, instance), Healed { outcome: Outcome::Lost, name, notes: vec![], ..left });
            }
            Some(_) => {}
        }
    }
    let unrecorded = without_record(cloud, &requests).await?.into_iter();
    let unfound = keys::keyless(cloud, &requests).await?;
    all.extend(unrecorded.chain(unfound).map(|lost| ((lost.node, lost.instance), lost)));
    for pair in &held.pairs {
        let Ok((node, instance)) = keys.parse_held(&pair.key) else { continue };
        let healed = match (asked.get(&instance), read(pair, node, instance)) {
            // It is there, and its agent will have seen that soon.
            (Some(at), _) if *at == node => continue,
            // On storage that both share it can go there, which is looked into when it comes to that.
            (Some(_), Ok((_, request))) if request.kind == Workload::Volume => {
                Healed { outcome: Outcome::Lost, ..Healed::left(node, instance, Some(&request), "") }
            }
            (Some(at), read) => {
                let of = read.ok().map(|(_, request)| request);
                Healed::left(node, instance, of.as_ref(), format!("it is asked for on node {at}"))
            }
            (None, Err(why)) => Healed::left(node, instance, None, why),
            (None, Ok((_, request))) => {
                editions.entry(instance).or_default().push((Edition::of(&request), node));
                Healed { outcome: Outcome::Lost, ..Healed::left(node, instance, Some(&request), "") }
            }
        };
        all.insert((node, instance), healed);
    }
    for (instance, mut editions) in editions {
        editions.sort_unstable();
        let Some((newest, at)) = editions.pop() else { continue };
        let doubtful = editions.last().is_some_and(|(edition, _)| edition.epoch == newest.epoch);
        let older = editions.into_iter().map(|(_, node)| node);
        for node in older.chain(doubtful.then_some(at)) {
            if let Some(lost) = all.get_mut(&(node, instance)) {
                lost.outcome = Outcome::Left;
                lost.notes = vec!["another node holds it, too, by a placement that is not older".to_owned()];
            }
        }
    }
    Ok(all.into_values().collect())
}

/// What a node holds, and the request in it.
fn read(pair: &KeyValue, node: NodeId, instance: InstanceId) -> Result<(Held, Request), String> {
    let held: Held = decode(&pair.value).map_err(|error| error.to_string())?;
    if (held.node, held.instance) != (node, instance) {
        return Err("what its node holds speaks of another instance".to_owned());
    }
    let request = held.intent.request().map_err(|error| error.to_string())?;
    Ok((held, request.record))
}

/// Brings one back; nothing where there is nothing to do any more.
async fn bring(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    looks: bool,
) -> CloudResult<Option<Healed>> {
    let mut unheard = None;
    for _ in 0..TRIES {
        let planned = match plan(cloud, node, instance, looks).await {
            // Others are brought back all the same.
            Err(CloudError::Unreadable(why)) => {
                let why = format!("what etcd has of it cannot be read: {why}");
                return Ok(Some(Healed::left(node, instance, None, why)));
            }
            planned => planned?,
        };
        let (healed, txn) = match planned {
            Planned::Nothing => return Ok(unheard),
            Planned::Left(left) => return Ok(Some(left)),
            Planned::Bring(healed, txn) => (healed, txn),
        };
        if looks {
            return Ok(Some(Healed { outcome: Outcome::Lost, request_id: None, ..healed }));
        }
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(Some(healed)),
            Ok(_) => {}
            // Asked for by now, it was this one or another of the same kind.
            Err(StoreError::Unknown(_)) => unheard = Some(healed),
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("{instance} keeps changing; try again")))
}

const NOT_ALIVE: &str = "its node is not alive; when that is back, heal again";

/// Why one stays as it is that its user ended.
fn ended(kind: Workload) -> String {
    let verb = verb_of_end(kind);
    format!(
        "its user destroyed it, and its node has it still: `eschedule {verb}` with its uuid ends it there"
    )
}

/// What is to be done about one.
enum Planned {
    /// It is asked for, or is not held any more.
    Nothing,
    Left(Healed),
    /// That comes of it by this transaction.
    Bring(Healed, Txn),
}

async fn plan(cloud: &Cloud, node: NodeId, instance: InstanceId, looks: bool) -> CloudResult<Planned> {
    let (keys, store) = (&cloud.keys, &cloud.store);
    let [held_key, request_key, record_key, status_key, alive_key, history_key] = [
        keys.held(node, instance),
        keys.request(node, instance),
        keys.instance(instance),
        keys.status(node, instance),
        keys.alive(node),
        keys.actions(instance),
    ];
    let (held, request, recorded, status, alive, history) = tokio::try_join!(
        store.get(&held_key),
        store.get(&request_key),
        store.get(&record_key),
        store.get(&status_key),
        store.get(&alive_key),
        store.get(&history_key)
    )?;
    if let Some(request) = request.0 {
        return match recorded.0 {
            Some(record) => keys::plan(cloud, node, [&request, &record], alive.0, looks).await,
            None => plan_unrecorded(cloud, node, instance, &request, alive.0, looks).await,
        };
    }
    let Some(held_pair) = held.0 else {
        let (Some(recorded), Some(status)) = (&recorded.0, &status.0) else { return Ok(Planned::Nothing) };
        return plan_unheld(cloud, node, [recorded, status]).await;
    };
    let (held, asked) = match read(&held_pair, node, instance) {
        Ok(read) => read,
        Err(why) => return Ok(Planned::Left(Healed::left(node, instance, None, why))),
    };
    let left = |why: String| Ok(Planned::Left(Healed::left(node, instance, Some(&asked), why)));
    let Some(alive) = alive.0 else { return left(NOT_ALIVE.to_owned()) };
    if recorded.0.is_none() && tells_of_its_end(history.0.as_ref(), node) {
        return left(ended(asked.kind));
    }
    let (before, record_stands) = match &recorded.0 {
        None => (None, Compare::Absent(record_key.clone())),
        Some(pair) => match Doc::<Instance>::decode(&pair.value) {
            Ok(doc) => (Some(doc), Compare::Unchanged(record_key.clone(), pair.mod_revision)),
            Err(error) => return left(format!("its key {record_key} cannot be read: {error}")),
        },
    };
    let (status, status_revision) = match &status.0 {
        Some(pair) => (decode::<Status>(&pair.value).ok(), pair.mod_revision),
        None => (None, 0),
    };
    let elsewhere = before.as_ref().and_then(|before| before.record.node()).filter(|at| *at != node);
    if let (Some(to), Some(recorded), Workload::Volume) = (elsewhere, &recorded.0, asked.kind)
        && let Some(there) = store.get(&keys.request(to, instance)).await?.0
    {
        let mut order = held.intent.request()?;
        let told = status.filter(|status| status.state == State::Unclaimed);
        let edition =
            |status: &Status| Edition { epoch: status.epoch, generation: status.observed_generation };
        let Some(told) = told.filter(|status| edition(status) == Edition::of(&asked)) else {
            return left("its node is about to tell of it anew".to_owned());
        };
        // What is wished of its power means nothing, and is carried out.
        (order.record.power.generation, order.record.power.anew) = (told.power_generation, false);
        let demands = [
            Compare::Unchanged(held_key, held_pair.mod_revision),
            Compare::Unchanged(status_key, status_revision),
        ];
        let nodes = [node, to];
        return to_go(cloud, demands, order, [recorded, &there], nodes, told.rebuilt.as_ref()).await;
    }
    let mut brought = match brought(&held, status.as_ref(), before.as_ref()) {
        Ok(brought) => brought,
        Err(why) => return left(why),
    };
    if planted("wishes-healed") {
        let Request { power, rebuild, rescue, resize, .. } = asked.clone();
        let order = &mut brought.request.record;
        (order.power, order.rebuild, order.rescue, order.resize) = (power, rebuild, rescue, resize);
    }
    if let Some(why) = not_understood(node, &alive.value, brought.request.record.format()) {
        return left(why);
    }
    let txn = Txn::new()
        .when(Compare::Absent(request_key.clone()))
        .when(record_stands)
        .when(Compare::Unchanged(held_key, held_pair.mod_revision))
        .when(Compare::Unchanged(status_key, status_revision))
        .when(Compare::Unchanged(alive_key, alive.mod_revision));
    let txn = with_user_data(cloud, &held, &mut brought, txn).await?;
    // Names and groups are those of its project.
    let of_project = Cloud { project: brought.record.record.project.clone(), ..cloud.clone() };
    let before = before.map(|doc| doc.record);
    let txn = with_name(&of_project, before.as_ref(), &mut brought, looks, txn).await?;
    let txn = with_group(&of_project, node, before.as_ref(), &mut brought, txn).await?;
    let txn = match with_volumes(&of_project, &mut brought, before.as_ref(), txn).await? {
        Ok(txn) => txn,
        Err(why) => return left(why),
    };
    written(cloud, node, brought, request_key, txn).await
}

/// Whether the last that was done to it is that this node was asked for its end, of which it did not hear: it was forgotten, and came
/// back. What was ended on another ended there, and is here by an older word.
fn tells_of_its_end(history: Option<&KeyValue>, node: NodeId) -> bool {
    let actions = history.and_then(|pair| decode::<Actions>(&pair.value).ok());
    let last = actions.and_then(|all| all.actions.into_iter().next_back());
    last.is_some_and(|last| last.verb == ActionVerb::Delete && last.node == node)
}

/// What is to be done about one of which the record alone is gone, and this is asked.
async fn plan_unrecorded(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    pair: &KeyValue,
    alive: Option<KeyValue>,
    looks: bool,
) -> CloudResult<Planned> {
    let asked = Doc::<Request>::decode(&pair.value)?;
    let of = asked.record.clone();
    let left = |why: String| Ok(Planned::Left(Healed::left(node, instance, Some(&of), why)));
    // Its record went with the wish to destroy; or somebody copied another's request.
    if of.desired != Desired::Active || of.instance != instance {
        return Ok(Planned::Nothing);
    }
    let Some(alive) = alive else { return left(NOT_ALIVE.to_owned()) };
    if let Some(why) = not_understood(node, &alive.value, of.format()) {
        return left(why);
    }
    let of_project = Cloud { project: of.project.clone(), ..cloud.clone() };
    let txn = Txn::new()
        .when(Compare::Unchanged(pair.key.clone(), pair.mod_revision))
        .when(Compare::Absent(cloud.keys.instance(instance)))
        .when(Compare::Unchanged(alive.key, alive.mod_revision));
    // Its place in a group stayed when its record went.
    let (group, txn) = match place_of(&of_project, node, instance).await? {
        Place::In(key, group) => (Some(group), txn.when(Compare::Present(key))),
        Place::Gone(key, still) => (None, txn.when(still).delete(key)),
        Place::None => (None, txn),
    };
    let mut brought = made_of_request(asked, node, group);
    let txn = with_name(&of_project, None, &mut brought, looks, txn).await?;
    let txn = match with_volumes(&of_project, &mut brought, None, txn).await? {
        Ok(txn) => txn,
        Err(why) => return left(why),
    };
    written(cloud, node, brought, pair.key.clone(), txn).await
}

/// Adds that its volumes stay its own; or the machine's that it is given to.
async fn with_volumes(
    cloud: &Cloud,
    brought: &mut Brought,
    before: Option<&Instance>,
    txn: Txn,
) -> CloudResult<Result<Txn, String>> {
    let record = &mut brought.record.record;
    match record.kind {
        Workload::Volume => kept_for(cloud, record, before, txn).await,
        Workload::Machine => kept_by(cloud, record.instance, &record.volumes, txn).await,
    }
}

/// Adds request and record, and a line of its history.
async fn written(
    cloud: &Cloud,
    node: NodeId,
    mut brought: Brought,
    request_key: String,
    txn: Txn,
) -> CloudResult<Planned> {
    let Instance { instance, generation, .. } = brought.record.record;
    let asked = Asked::new(instance, node, ActionVerb::Heal, cloud.host.now(), generation);
    let txn = note(cloud, asked, txn, None).await?;
    brought.request.record.request_id = cloud.request_id;
    brought.record.record.request_id = cloud.request_id;
    let txn = txn
        .put(request_key, brought.request.encode())
        .put(cloud.keys.instance(instance), brought.record.encode());
    let healed = Healed::brought(node, &brought.record.record, brought.notes);
    Ok(Planned::Bring(healed, txn))
}

/// What is to be done about a volume that `node` tells of and knows nothing else of: it came there when the etcd that said so was
/// about to be put back. Nothing, where that is not so.
async fn plan_unheld(cloud: &Cloud, node: NodeId, [recorded, told]: [&KeyValue; 2]) -> CloudResult<Planned> {
    let keys = &cloud.keys;
    let record = Doc::<Instance>::decode(&recorded.value)?.record;
    let status: Status = decode(&told.value)?;
    let is_such = record.kind == Workload::Volume && status.state == State::Unclaimed;
    let Some(to) = record.node().filter(|to| is_such && *to != node) else { return Ok(Planned::Nothing) };
    let Some(there) = cloud.store.get(&keys.request(to, record.instance)).await?.0 else {
        return Ok(Planned::Nothing);
    };
    let mut order = Doc::<Request>::decode(&there.value)?;
    (order.record.power.generation, order.record.power.anew) = (status.power_generation, false);
    let demands = [
        Compare::Absent(keys.held(node, record.instance)),
        Compare::Unchanged(told.key.clone(), told.mod_revision),
    ];
    to_go(cloud, demands, order, [recorded, &there], [node, to], status.rebuilt.as_ref()).await
}

/// What is to be done about a volume that `node` has and another is asked for, by its record: where both have their disks on the
/// same storage, it goes there; or where a guest of `node` has it, it is asked for where it is.
async fn to_go(
    cloud: &Cloud,
    demands: [Compare; 2],
    mut order: Doc<Request>,
    [recorded, asked]: [&KeyValue; 2],
    [node, to]: [NodeId; 2],
    came: Option<&Rebuilt>,
) -> CloudResult<Planned> {
    let (keys, instance) = (&cloud.keys, order.record.instance);
    let left = |order: &Doc<Request>, why: String| {
        Ok(Planned::Left(Healed::left(node, instance, Some(&order.record), why)))
    };
    let from_key = keys.request(node, instance);
    let (from, there) = tokio::try_join!(storage_of(cloud, node), storage_of(cloud, to))?;
    let (Some((sign, own)), Some((other_sign, other))) = (from, there) else {
        return left(&order, format!("it is asked for on node {to}"));
    };
    if own != other {
        return left(&order, format!("it is asked for on node {to}, which has other storage"));
    }
    // What was handed over was what is asked for by then; its last wish another node carried out, which alone tells what came of it.
    let is_handed_over = came.is_none() && matches!(order.record.handover, Some(Handover::From(_)));
    let wish = order.record.rebuild.as_ref().filter(|_| !is_handed_over);
    let made_of = order.record.spec.as_ref().map(|spec| Rebuild::disk(wish, &spec.image, came).clone());
    if let Some(Err(why)) = made_of.as_ref().map(lies_alone) {
        return left(&order, format!("it is asked for on node {to}, and cannot go there: {why}"));
    }
    let mut record = Doc::<Instance>::decode(&recorded.value)?;
    let mut come = Doc::<Request>::decode(&asked.value)?;
    if come.record.desired != Desired::Active {
        return left(&order, "its user destroyed it".to_owned());
    }
    let generations = [record.record.generation, come.record.generation, order.record.generation];
    let generation = generations.into_iter().max().unwrap_or_default().saturating_add(1);
    // Of a guest that etcd lost with it, only what its node holds for it tells that.
    let still = match (had_there(cloud, node, instance).await?, record.record.attached) {
        (Had::ByNobody(still), _) => Some(still),
        (Had::By(guest), Some(holder)) if guest != holder => {
            return left(
                &order,
                format!(
                    "guest {guest} of this node has it, and by now instance {holder} is to have it: `eschedule volume detach {instance}` takes it from there first"
                ),
            );
        }
        (Had::By(_), _) => None,
    };
    let told = if still.is_some() {
        // It goes as it is: what of its wishes nobody tells to be carried out would cost what is on it.
        let done = came.map(|came| came.wished_at);
        order.record.rebuild.take_if(|wish| Some(wish.wished_at) > done);
        (come.record.handover, order.record.handover) = (Some(Handover::From(node)), Some(Handover::To(to)));
        format!("it goes to node {to}, where it is asked for")
    } else {
        let before = record.record.assigned.map_or(0, |at| at.epoch).max(come.record.epoch);
        order.record.epoch = order.record.epoch.max(next_epoch(cloud, before));
        stay(&mut record.record, &mut order.record, &mut come.record, [node, to], made_of);
        format!("it is asked for here, where a guest has it, and on node {to} no more")
    };
    for (of, request_id) in [
        (&mut record.record.generation, &mut record.record.request_id),
        (&mut come.record.generation, &mut come.record.request_id),
        (&mut order.record.generation, &mut order.record.request_id),
    ] {
        (*of, *request_id) = (generation, cloud.request_id);
    }
    for (which, sign) in [(node, &sign), (to, &other_sign)] {
        if let Some(why) = not_understood(which, &sign.value, come.record.format()) {
            return left(&order, why);
        }
    }
    let healed = Healed::brought(node, &record.record, vec![told]);
    let unchanged = |pair: &KeyValue| Compare::Unchanged(pair.key.clone(), pair.mod_revision);
    let txn = Txn::new()
        .when_all([recorded, asked].map(unchanged))
        .when_all([&sign, &other_sign].map(unchanged))
        .when_all(demands);
    // Its node may tell of a guest that has it at any moment.
    let txn = still.into_iter().fold(txn, Txn::when);
    // It stays the machine's that is to have it, as that is now.
    let txn = match record.record.attached.map(|holder| keys.instance(holder)) {
        Some(key) => {
            let revision = cloud.store.get(&key).await?.0.map(|pair| pair.mod_revision);
            txn.when(
                revision.map_or(Compare::Absent(key.clone()), |revision| Compare::Unchanged(key, revision)),
            )
        }
        None => txn,
    };
    let txn = txn
        .when(Compare::Absent(from_key.clone()))
        .put(from_key, order.encode())
        .put(asked.key.clone(), come.encode())
        .put(recorded.key.clone(), record.encode());
    let detail = Some(format!("from node {node} to node {to}"));
    let heals = Asked { detail, ..Asked::new(instance, to, ActionVerb::Heal, cloud.host.now(), generation) };
    Ok(Planned::Bring(healed, note(cloud, heals, txn, None).await?))
}

/// Has a volume be asked for on `node`, which has it, and no more on `to`: what was wished of it came to its end where it is, and the
/// other hands over what it has not.
fn stay(
    record: &mut Instance,
    order: &mut Request,
    come: &mut Request,
    [node, to]: [NodeId; 2],
    made_of: Option<ImageRef>,
) {
    if let (Some(spec), Some(image)) = (&mut order.spec, made_of) {
        spec.image = image;
        record.spec.clone_from(spec);
    }
    (order.rebuild, order.resize, order.access) = (None, None, None);
    (order.handover, come.handover) = (Some(Handover::From(to)), Some(Handover::To(node)));
    record.assigned = Some(Assigned { node, epoch: order.epoch });
}

/// The guest that has a volume, as `node` tells of it.
async fn had_by(cloud: &Cloud, node: NodeId, volume: InstanceId) -> CloudResult<Option<InstanceId>> {
    let pairs = cloud.store.list(&cloud.keys.statuses(node)).await?.pairs;
    let has = |status: &Status| status.volumes.iter().any(|has| has.volume == volume);
    let mut statuses = pairs.iter().filter_map(|pair| decode::<Status>(&pair.value).ok());
    Ok(statuses.find(has).map(|status| status.instance))
}

/// Who is to have a volume, by the words of its node.
pub(crate) enum Had {
    By(InstanceId),
    /// No guest that its node tells of, while this holds.
    ByNobody(Compare),
}

/// The guest that is to have a volume, as `node` tells of it, or holds for its user what etcd lost.
pub(crate) async fn had_there(cloud: &Cloud, node: NodeId, volume: InstanceId) -> CloudResult<Had> {
    if let Some(guest) = had_by(cloud, node, volume).await? {
        return Ok(Had::By(guest));
    }
    // A guest that is told of since is held since.
    let all_held = cloud.keys.all_held(node);
    let listing = cloud.store.list(&all_held).await?;
    let mut held = listing.pairs.iter().filter_map(|pair| {
        let (_, instance) = cloud.keys.parse_held(&pair.key).ok()?;
        read(pair, node, instance).ok()
    });
    let has = |(_, asked): &(Held, Request)| asked.volumes.iter().any(|has| has.volume == volume);
    Ok(match held.find(has) {
        Some((held, _)) => Had::By(held.instance),
        None => Had::ByNobody(Compare::NoneSince(all_held, listing.revision)),
    })
}

async fn with_user_data(cloud: &Cloud, held: &Held, brought: &mut Brought, txn: Txn) -> CloudResult<Txn> {
    let Some(bytes) = held.user_data_bytes else { return Ok(txn) };
    let key = cloud.keys.held_user_data(held.node, held.instance);
    let data = cloud.store.get(&key).await?.0.filter(|pair| pair.value.len() as u64 == bytes);
    let Some(data) = data else {
        brought.without_user_data();
        return Ok(txn);
    };
    let txn = txn.when(Compare::Unchanged(key, data.mod_revision));
    Ok(txn.put(cloud.keys.user_data(held.node, held.instance), data.value))
}

async fn with_name(
    cloud: &Cloud,
    before: Option<&Instance>,
    brought: &mut Brought,
    looks: bool,
    mut txn: Txn,
) -> CloudResult<Txn> {
    let (keys, instance) = (&cloud.keys, brought.record.record.instance);
    let key_of = |record: &Instance| {
        record.name.as_ref().map(|name| keys.name(record.kind, &record.project, name, instance))
    };
    let old = before.and_then(key_of);
    if let Some(name) = brought.record.record.name.clone() {
        let kind = brought.record.record.kind;
        let key = keys.name(kind, &cloud.project, &name, instance);
        if cloud.store.get(&key).await?.0.is_some() {
            // Its own, which is there still; whoever tidies up may be about to take it away.
            txn = txn.when(Compare::Present(key));
        } else {
            let is_free = match looks {
                true => name_is_free(cloud, kind, &name).await,
                false => free(cloud, kind, &name).await,
            };
            match is_free {
                Ok(()) => {
                    txn = txn.when(Compare::NoneUnder(keys.names(kind, &cloud.project, &name))).put(key, "");
                }
                Err(CloudError::Taken { by, .. }) => brought.without_name(&by),
                Err(error) => return Err(error),
            }
        }
    }
    let new = key_of(&brought.record.record);
    Ok(match old.filter(|old| new.as_ref() != Some(old)) {
        Some(old) => txn.delete(old),
        None => txn,
    })
}

async fn with_group(
    cloud: &Cloud,
    node: NodeId,
    before: Option<&Instance>,
    brought: &mut Brought,
    mut txn: Txn,
) -> CloudResult<Txn> {
    let of = &brought.record.record;
    if brought.may_be_in_a_group() && of.kind == Workload::Machine {
        // Its place in a group stayed when its record went.
        match place_of(cloud, node, of.instance).await? {
            Place::In(_, group) => brought.in_group(group),
            Place::Gone(key, still) => txn = txn.when(still).delete(key),
            Place::None => {}
        }
    }
    let old = before.and_then(|before| cloud.keys.membership(before));
    let member = cloud.keys.membership(&brought.record.record);
    let is_member = match &member {
        Some(key) => cloud.store.get(key).await?.0.is_some(),
        None => false,
    };
    if let Some(key) = member.clone().filter(|_| is_member) {
        txn = txn.when(Compare::Present(key));
    }
    if let (Some(name), Some(member), false) = (brought.record.record.group.clone(), member, is_member) {
        match Joining::new(cloud, &name).await {
            Ok(group) => {
                let peers = group.peers(cloud).await?;
                match brought.record.record.node().filter(|node| peers.allow(*node)) {
                    Some(node) => txn = group.demand(cloud, &peers, node, false, txn).put(member, ""),
                    None => brought.without_group("its policy leaves out this node, as its members are now"),
                }
            }
            Err(CloudError::NotFound(_)) => brought.without_group("there is none of that name now"),
            Err(error) => return Err(error),
        }
    }
    let new = cloud.keys.membership(&brought.record.record);
    Ok(match old.filter(|old| new.as_ref() != Some(old)) {
        Some(old) => txn.delete(old),
        None => txn,
    })
}

//! Finding instances and nodes, and telling what is known of them.

use std::collections::HashMap;

use ec_model::{
    Desired, IndexEntry, InstanceId, Keyspace, NodeId, NodeRecord, Request, Resources, State, Status, decode,
};
use ec_runtime::exit::Failure;
use ec_store::{KeyValue, Revision, Store};
use futures::{StreamExt, TryStreamExt};
use serde::Serialize;

use crate::config::Session;

/// So many questions to placement at once.
const CONCURRENCY: usize = 16;

/// An instance and all that etcd knows of it.
pub(crate) struct Known {
    pub(crate) instance: InstanceId,
    pub(crate) node: NodeId,
    pub(crate) request: Option<(Request, Revision)>,
    pub(crate) status: Option<Status>,
}

/// The uuid that the text is, or that bears the name.
pub(crate) async fn resolve(session: &Session, text: &str) -> Result<InstanceId, Failure> {
    if let Ok(instance) = text.parse() {
        return Ok(instance);
    }
    let keys = &session.settings.keys;
    let listing = session.store.list(&keys.instances()).await?;
    let mut named = listing.pairs.iter().filter_map(|pair| {
        let entry: IndexEntry = decode(&pair.value).ok()?;
        (entry.name.as_deref() == Some(text)).then(|| keys.parse_instance(&pair.key).ok())?
    });
    match (named.next(), named.next()) {
        (Some(instance), None) => Ok(instance),
        (None, _) => Err(Failure::failed(format!(
            "no instance is named `{text}`, and it is neither a uuid nor a resources query; `eschedule list` shows all"
        ))),
        (Some(_), Some(_)) => Err(Failure::failed(format!(
            "several instances are named `{text}`: give the uuid, `eschedule list` shows them"
        ))),
    }
}

/// Everything that etcd knows of the instance; placement is asked where etcd has no index of it.
pub(crate) async fn find(session: &Session, instance: InstanceId) -> Result<Known, Failure> {
    let keys = &session.settings.keys;
    let (index, _) = session.store.get(&keys.instance(instance)).await?;
    let index: Option<IndexEntry> = index.and_then(|pair| decode(&pair.value).ok());
    let node = match index.and_then(|index| index.node) {
        Some(node) => node,
        None => held_on(session, instance).await?,
    };
    let (request_key, status_key) = (keys.request(node, instance), keys.status(node, instance));
    let (request, status) = tokio::join!(session.store.get(&request_key), session.store.get(&status_key));
    let ((request, _), (status, _)) = (request?, status?);
    let request = request.and_then(|pair| Some((decode(&pair.value).ok()?, pair.mod_revision)));
    let status = status.and_then(|pair| decode(&pair.value).ok());
    Ok(Known { instance, node, request, status })
}

async fn held_on(session: &Session, instance: InstanceId) -> Result<NodeId, Failure> {
    let held = session.placement.allocations(instance).await?;
    held.and_then(|held| held.allocations.into_keys().next()).ok_or_else(|| {
        Failure::failed(format!("there is no instance {instance}; `eschedule list` shows all"))
    })
}

/// What people and scripts see of an instance.
#[derive(Debug, Serialize)]
pub(crate) struct View {
    pub(crate) instance: InstanceId,
    pub(crate) name: Option<String>,
    pub(crate) node: NodeId,
    pub(crate) state: State,
    pub(crate) ip: Option<std::net::IpAddr>,
    pub(crate) reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request: Option<Request>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<Status>,
}

impl View {
    pub(crate) fn of(known: &Known) -> Self {
        let mut view = Self::brief(
            known.instance,
            known.node,
            known.request.as_ref().map(|(r, _)| r),
            known.status.as_ref(),
        );
        view.request = known.request.as_ref().map(|(request, _)| request.clone());
        view.status = known.status.clone();
        view
    }

    fn brief(instance: InstanceId, node: NodeId, request: Option<&Request>, status: Option<&Status>) -> Self {
        let state = match (request, status) {
            (Some(Request { desired: Desired::Destroyed, .. }), _) => State::Destroying,
            (_, Some(status)) => status.state,
            (_, None) => State::Scheduled,
        };
        Self {
            instance,
            name: request.and_then(|r| r.name.clone()).or_else(|| status.and_then(|s| s.name.clone())),
            node,
            state,
            ip: status.and_then(|status| status.ip),
            reason: status.and_then(|status| status.reason.clone()),
            request: None,
            status: None,
        }
    }
}

/// Every instance of every node, by node and name.
pub(crate) async fn list(session: &Session) -> Result<Vec<View>, Failure> {
    let keys = &session.settings.keys;
    let (requests, statuses) = (keys.all_requests(), keys.all_statuses());
    let (requests, statuses) =
        tokio::try_join!(session.store.list(&requests), session.store.list(&statuses))?;
    let statuses = by_instance::<Status>(&statuses.pairs, keys, Keyspace::parse_status);
    let requests = by_instance::<Request>(&requests.pairs, keys, Keyspace::parse_request);
    let mut ids: Vec<_> = requests.keys().chain(statuses.keys()).copied().collect();
    ids.sort_unstable();
    ids.dedup();
    let mut views: Vec<_> = ids
        .into_iter()
        .map(|id @ (node, instance)| View::brief(instance, node, requests.get(&id), statuses.get(&id)))
        .collect();
    views.sort_by(|a, b| (a.node, &a.name, a.instance).cmp(&(b.node, &b.name, b.instance)));
    Ok(views)
}

fn by_instance<R: ec_model::Record>(
    pairs: &[KeyValue],
    keys: &Keyspace,
    parse: impl Fn(&Keyspace, &str) -> Result<(NodeId, InstanceId), ec_model::KeyError>,
) -> HashMap<(NodeId, InstanceId), R> {
    pairs.iter().filter_map(|pair| Some((parse(keys, &pair.key).ok()?, decode(&pair.value).ok()?))).collect()
}

/// A living node and what it has left.
#[derive(Debug, Serialize)]
pub(crate) struct NodeView {
    pub(crate) node: NodeId,
    pub(crate) name: String,
    pub(crate) agent: String,
    pub(crate) virt_type: String,
    pub(crate) started_at: jiff::Timestamp,
    /// What is allocated, by class.
    pub(crate) used: Resources,
    /// What may be allocated in all: (total - reserved) × ratio, by class.
    pub(crate) capacity: Resources,
}

/// The nodes whose agents are alive.
pub(crate) async fn nodes(session: &Session) -> Result<Vec<NodeView>, Failure> {
    let listing = session.store.list(&session.settings.keys.nodes()).await?;
    let records = listing.pairs.iter().filter_map(|pair| decode::<NodeRecord>(&pair.value).ok());
    let mut nodes: Vec<NodeView> = futures::stream::iter(records)
        .map(async |record| {
            let (inventory, used) = tokio::try_join!(
                session.placement.inventory(record.node),
                session.placement.usages(record.node)
            )?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "placement itself truncates the product to an integer"
            )]
            let capacity = inventory
                .into_iter()
                .map(|(class, i)| {
                    (class, (i.total.saturating_sub(i.reserved) as f64 * i.allocation_ratio) as u64)
                })
                .collect();
            Ok::<_, Failure>(NodeView {
                node: record.node,
                name: record.name,
                agent: record.agent,
                virt_type: record.virt_type,
                started_at: record.started_at,
                used,
                capacity,
            })
        })
        .buffer_unordered(CONCURRENCY)
        .try_collect()
        .await?;
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(nodes)
}

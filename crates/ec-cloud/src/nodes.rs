//! The nodes: who is alive, and what is taken of what they have.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_model::{Alive, Node, NodeId, ResourceQuery, Resources, Trouble, decode};
use ec_placement_client::{DISABLED, Inventory, Placement, PlacementError, Summary};
use ec_plan::lack::is_locked;
use futures::StreamExt;
use serde::Serialize;

use crate::{
    Cloud, CloudError, CloudResult, Kinds,
    lookup::{CONCURRENCY, holders},
};

/// Every node that can take anything answers to this, so that one question shows nearly all of them.
const ANYTHING: &str = "resources=MEMORY_MB:1";

/// A node and what it has left.
#[derive(Debug, Clone, Serialize)]
pub struct NodeView {
    /// Which.
    pub node: NodeId,
    /// What people call it.
    pub name: String,
    /// Whether its agent is alive.
    pub alive: bool,
    /// The release of its agent.
    pub agent: Option<String>,
    /// How it virtualizes: kvm or qemu.
    pub virt_type: Option<String>,
    /// Whether its agent takes no new instance.
    pub locked: bool,
    /// Whether placement offers nothing of it: a controller or an operator said so.
    pub disabled: bool,
    /// Whether its rights were taken away.
    pub revoked: bool,
    /// When its agent was started.
    pub started_at: Option<jiff::Timestamp>,
    /// Where its agent's port is reached; none where it has none, or is not alive.
    pub url: Option<String>,
    /// The storage that it shares with others, where its guests' disks lie there.
    pub storage: Option<String>,
    /// How many instances etcd speaks of there.
    pub instances: usize,
    /// How many volumes.
    pub volumes: usize,
    /// What is allocated, by class.
    pub used: Resources,
    /// What may be allocated in all: (total - reserved) × ratio, by class.
    pub capacity: Resources,
    /// What of its host keeps new work away.
    pub troubles: Vec<Trouble>,
    /// What is not as it should be.
    pub note: Option<String>,
}

/// What placement knows of one node.
enum Room {
    Known {
        used: Resources,
        capacity: Resources,
        disabled: bool,
    },
    Unknown,
    /// It does not tell of this one, for that reason.
    Untold(String),
}

impl Room {
    /// With what it shares with others.
    fn with(mut self, shared: &Self) -> Self {
        if let (Self::Known { used, capacity, .. }, Self::Known { used: of_all, capacity: all, .. }) =
            (&mut self, shared)
        {
            used.extend(of_all.clone());
            capacity.extend(all.clone());
        }
        self
    }
}

/// All nodes; of those that are let in no more, the ones that hold instances.
pub async fn nodes(cloud: &Cloud) -> CloudResult<Vec<NodeView>> {
    nodes_again(cloud, &mut Kinds::default()).await
}

/// The same for whoever asks again and again, and keeps what was learnt of instances.
pub async fn nodes_again(cloud: &Cloud, kinds: &mut Kinds) -> CloudResult<Vec<NodeView>> {
    let keys = &cloud.keys;
    let prefixes = (keys.all_alive(), keys.all_requests(), keys.all_statuses(), keys.nodes());
    let query = ResourceQuery::parse(ANYTHING).map_err(|error| CloudError::Invalid(error.to_string()))?;
    let etcd = async {
        let listed = async {
            Ok(tokio::try_join!(
                cloud.store.list(&prefixes.0),
                cloud.store.keys(&prefixes.1),
                cloud.store.keys(&prefixes.2),
                cloud.store.list(&prefixes.3)
            )?)
        };
        tokio::try_join!(listed, kinds.volumes(cloud))
    };
    let placement = async { Ok::<_, CloudError>(cloud.placement.candidates(&query, None).await?) };
    let (((alive, requests, statuses, known), volumes), found) = tokio::try_join!(etcd, placement)?;
    let mut records: BTreeMap<NodeId, Result<Alive, String>> = BTreeMap::new();
    for pair in &alive.pairs {
        if let Ok(node) = keys.parse_alive(&pair.key) {
            records.insert(node, decode(&pair.value).map_err(|error| error.to_string()));
        }
    }
    let mut troubles: HashMap<NodeId, Vec<Trouble>> = HashMap::new();
    let mut revoked: BTreeSet<NodeId> = BTreeSet::new();
    let mut missed: BTreeSet<NodeId> = BTreeSet::new();
    for pair in &known.pairs {
        let Ok(node) = keys.parse_node(&pair.key) else { continue };
        match decode::<Node>(&pair.value) {
            Ok(record) if record.revoked => _ = revoked.insert(node),
            Ok(record) => {
                missed.insert(node);
                troubles.insert(node, record.troubles);
            }
            // What cannot be read is no trouble of its host.
            Err(_) => _ = missed.insert(node),
        }
    }
    let shared: BTreeSet<NodeId> =
        records.values().flatten().filter_map(|record| Some(record.storage.as_ref()?.provider)).collect();
    let mut storages: HashMap<NodeId, Room> = HashMap::new();
    for storage in shared {
        storages.insert(storage, singly(&*cloud.placement, storage).await);
    }
    let held = holders(keys, &requests, &statuses);
    let all: BTreeSet<NodeId> = records.keys().chain(held.keys()).copied().chain(missed).collect();
    let rooms: HashMap<NodeId, (Room, Option<String>)> = futures::stream::iter(all)
        .map(async |node| {
            // Of a dead one etcd does not have the name.
            let name = match records.get(&node) {
                Some(Ok(_)) => None,
                // What keeps it from being told is told with its room.
                _ => cloud.placement.provider(node).await.ok().flatten().map(|provider| provider.name),
            };
            let room = match found.summaries.get(&node) {
                Some(summary) => of_summary(summary),
                None => singly(&*cloud.placement, node).await,
            };
            (node, (room, name))
        })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    let mut nodes: Vec<NodeView> = rooms
        .into_iter()
        .map(|(node, (room, name))| {
            let counts = held.get(&node).map_or([0; 2], |held| {
                let stored = held.intersection(&volumes).count();
                [held.len() - stored, stored]
            });
            let troubles = troubles.remove(&node).unwrap_or_default();
            let record = records.get(&node);
            let storage = record.and_then(|record| record.as_ref().ok()?.storage.as_ref());
            let room = match storage.and_then(|storage| storages.get(&storage.provider)) {
                Some(shared) => room.with(shared),
                None => room,
            };
            view(node, record, counts, room, name, troubles, revoked.contains(&node))
        })
        .collect();
    nodes.sort_by(|a, b| (&a.name, a.node).cmp(&(&b.name, b.node)));
    Ok(nodes)
}

fn view(
    node: NodeId,
    record: Option<&Result<Alive, String>>,
    [instances, volumes]: [usize; 2],
    room: Room,
    name: Option<String>,
    troubles: Vec<Trouble>,
    revoked: bool,
) -> NodeView {
    let mut notes = Vec::new();
    if revoked {
        notes.push("revoked: it is let in no more".to_owned());
    }
    match record {
        None => notes.push(format!("not alive, holds {}", counted(instances, volumes))),
        Some(Err(why)) => notes.push(format!("its record cannot be read: {why}")),
        Some(Ok(_)) => {}
    }
    let (used, capacity, locked, disabled) = match room {
        Room::Known { used, capacity, disabled } => {
            let locked = record.is_some() && is_locked(&capacity);
            (used, capacity, locked, disabled)
        }
        Room::Unknown => {
            notes.push("unknown to placement".to_owned());
            (Resources::new(), Resources::new(), false, false)
        }
        Room::Untold(why) => {
            notes.push(format!("placement does not tell of it: {why}"));
            (Resources::new(), Resources::new(), false, false)
        }
    };
    // Of a dead one they are old.
    let troubles = if record.is_some() { troubles } else { Vec::new() };
    notes.extend(troubles.iter().map(|trouble| format!("{}: {}", trouble.kind, trouble.why)));
    if locked {
        notes.push("locked: all of it is reserved".to_owned());
    }
    if disabled {
        notes.push("disabled: placement offers nothing of it".to_owned());
    }
    let known = record.and_then(|record| record.as_ref().ok());
    NodeView {
        node,
        name: known.map(|known| known.name.clone()).or(name).unwrap_or_else(|| "-".to_owned()),
        alive: record.is_some(),
        agent: known.map(|known| known.agent.clone()),
        virt_type: known.map(|known| known.virt_type.clone()),
        locked,
        disabled,
        revoked,
        started_at: known.map(|known| known.started_at),
        url: known.and_then(|known| known.url.clone()),
        storage: known.and_then(|known| Some(known.storage.as_ref()?.name.clone())),
        instances,
        volumes,
        used,
        capacity,
        troubles,
        note: (!notes.is_empty()).then(|| notes.join("; ")),
    }
}

pub(crate) fn counted(instances: usize, volumes: usize) -> String {
    let of = |count: usize, word: &str| match count {
        1 => format!("1 {word}"),
        count => format!("{count} {word}s"),
    };
    match (instances, volumes) {
        (instances, 0) => of(instances, "instance"),
        (0, volumes) => of(volumes, "volume"),
        (instances, volumes) => format!("{} and {}", of(instances, "instance"), of(volumes, "volume")),
    }
}

fn of_summary(summary: &Summary) -> Room {
    let amounts = |pick: fn(&ec_placement_client::Amount) -> u64| {
        summary.resources.iter().map(|(class, amount)| (class.clone(), pick(amount))).collect()
    };
    Room::Known {
        used: amounts(|amount| amount.used),
        capacity: amounts(|amount| amount.capacity),
        disabled: summary.traits.contains(DISABLED),
    }
}

/// Asks for one node that no summary showed: it is full, or locked, or not there, or its record cannot be read.
async fn singly(placement: &dyn Placement, node: NodeId) -> Room {
    match tokio::try_join!(placement.inventory(node), placement.usages(node), placement.traits(node)) {
        Ok((inventory, used, traits)) => {
            let capacity = inventory.iter().map(|(class, of)| (class.clone(), capacity(of))).collect();
            Room::Known { used, capacity, disabled: traits.contains(DISABLED) }
        }
        Err(PlacementError::NotFound(_)) => Room::Unknown,
        Err(error) => Room::Untold(error.to_string()),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "placement itself truncates the product to an integer"
)]
pub(crate) fn capacity(inventory: &Inventory) -> u64 {
    (inventory.total.saturating_sub(inventory.reserved) as f64 * inventory.allocation_ratio) as u64
}

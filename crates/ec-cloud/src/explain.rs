//! Why there was no room: asks placement and etcd once more, and has it judged.

use std::collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry};

use ec_model::{Alive, NodeId, ResourceQuery, decode};
use ec_placement_client::{DISABLED, Inventory, PlacementError, PlacementResult, SHARES, Summary};
use ec_plan::lack::{Amount, Bar, Demands, Host, Reasons, judge, lack_of};
use futures::StreamExt;

use crate::{Ask, Cloud, CloudError, CloudResult, lookup::CONCURRENCY, nodes::capacity, schedule::NoRoom};

/// Of so many nodes that lack nothing in sum it is asked what one claim may take.
const TOLD: usize = 3;
/// So many nodes that are not alive are told by name.
const LISTED: usize = 20;
/// So many nodes that no summary shows are asked singly: they are full or locked, or have
/// nothing of the classes themselves.
const ASKED: usize = 64;

/// Looks into placement and etcd once more, for the reason.
pub async fn explain(cloud: &Cloud, ask: &Ask<'_>, seen: &NoRoom) -> CloudResult<Reasons> {
    let mut demands = Demands::of(&ask.query);
    demands.forbidden.insert(DISABLED.to_owned());
    let nodes = cloud.keys.all_alive();
    let listing = cloud.store.list(&nodes).await?;
    // Of others nobody asked.
    let is_asked = |node: &NodeId| ask.node.is_none_or(|only| only == *node);
    let mut alive: BTreeMap<NodeId, String> = BTreeMap::new();
    let mut storages: HashMap<NodeId, NodeId> = HashMap::new();
    for pair in &listing.pairs {
        let Some(node) = cloud.keys.parse_alive(&pair.key).ok().filter(is_asked) else { continue };
        let record = decode::<Alive>(&pair.value).ok();
        storages.extend(record.as_ref().and_then(|record| Some((node, record.storage.as_ref()?.provider))));
        alive.insert(node, record.map_or_else(|| node.to_string(), |record| record.name));
    }
    let mut summaries: HashMap<NodeId, Summary> = HashMap::new();
    for class in demands.total.keys() {
        let query = ResourceQuery::parse(&format!("resources={class}:1"))
            .map_err(|error| CloudError::Invalid(error.to_string()))?;
        summaries.extend(cloud.placement.candidates(&query, None).await?.summaries);
    }
    let mut wanted_traits = demands.required.clone();
    wanted_traits.extend(demands.any.iter().flatten().cloned());
    let somebody_has = cloud.placement.associated_traits(&wanted_traits).await?;

    let (mut hosts, mut shared): (HashMap<NodeId, Host>, HashMap<NodeId, Host>) = Default::default();
    for (provider, summary) in summaries {
        let hosts = if summary.traits.contains(SHARES) { &mut shared } else { &mut hosts };
        let host = hosts.entry(summary.root_provider_uuid.unwrap_or(provider)).or_default();
        for (class, amount) in summary.resources {
            let sum = host.amounts.entry(class).or_default();
            sum.capacity = sum.capacity.saturating_add(amount.capacity);
            sum.used = sum.used.saturating_add(amount.used);
        }
        host.traits.extend(summary.traits);
    }
    let unseen: Vec<NodeId> =
        alive.keys().copied().filter(|node| !hosts.contains_key(node)).take(ASKED).collect();
    let mut full = futures::stream::iter(unseen)
        .map(async |node| (node, singly(cloud, node).await))
        .buffer_unordered(CONCURRENCY)
        .boxed();
    let mut untold: BTreeMap<NodeId, String> = BTreeMap::new();
    while let Some((node, host)) = full.next().await {
        match host {
            Ok(host) => _ = hosts.insert(node, host),
            Err(error) => _ = untold.insert(node, error.to_string()),
        }
    }
    for (node, storage) in storages {
        if let Entry::Vacant(unseen) = shared.entry(storage) {
            match singly(cloud, storage).await {
                Ok(of) => _ = unseen.insert(of),
                Err(error) => {
                    hosts.remove(&node);
                    untold.insert(node, format!("its storage {storage}: {error}"));
                }
            }
        }
        if let (Some(host), Some(of)) = (hosts.get_mut(&node), shared.get(&storage)) {
            host.amounts.extend(of.amounts.clone());
        }
    }
    // Of what storage has no summary tells whose agents are there.
    let registered = cloud.store.keys(&cloud.keys.nodes()).await?;
    let registered = registered.iter().filter_map(|key| cloud.keys.parse_node(key).ok());
    let gone: Vec<NodeId> = registered.filter(|node| !alive.contains_key(node) && is_asked(node)).collect();
    hosts.retain(|node, _| is_asked(node));
    let mut not_alive: BTreeSet<NodeId> = seen.not_alive.iter().copied().collect();
    not_alive.extend(hosts.keys().filter(|node| !alive.contains_key(node)));
    not_alive.extend(gone);
    hosts.retain(|node, _| alive.contains_key(node));
    for (node, host) in &mut hosts {
        host.name = alive.get(node).cloned().unwrap_or_default();
    }
    let mut reasons = judge(&demands, &hosts, &somebody_has);
    reasons.living = alive.len();
    let called = |node: &NodeId| alive.get(node).cloned().unwrap_or_else(|| node.to_string());
    reasons.untold = untold.iter().map(|(node, why)| format!("{}: {why}", called(node))).collect();
    reasons.no_such_node = ask.node.filter(|node| !alive.contains_key(node) && !not_alive.contains(node));
    if let Some(group) = ask.group.as_ref().filter(|_| !seen.left_out.is_empty()) {
        let (name, policy) = (group.group.name.clone(), group.group.policy);
        reasons.group = Some(Bar { name, policy, nodes: seen.left_out.len() });
        reasons.nearest.retain(|lack| !seen.left_out.contains(&lack.node));
    }
    // What lacks nothing in sum may be too much for one claim.
    for lack in reasons.nearest.iter_mut().filter(|lack| lack.is_nothing()).take(TOLD) {
        if let (Ok(inventory), Some(host)) =
            (cloud.placement.inventory(lack.node).await, hosts.get_mut(&lack.node))
        {
            host.at_once = inventory.iter().map(|(class, of)| (class.clone(), of.max_unit)).collect();
            *lack = lack_of(lack.node, host, &demands);
        }
    }
    reasons.taken_by_others = seen.lost_races;
    reasons.not_alive = futures::stream::iter(not_alive.into_iter().take(LISTED))
        .map(async |node| {
            let provider = cloud.placement.provider(node).await.ok().flatten();
            provider.map_or_else(|| node.to_string(), |provider| provider.name)
        })
        .buffered(CONCURRENCY)
        .collect()
        .await;
    Ok(reasons)
}

/// One that no summary shows; empty where placement does not know it.
async fn singly(cloud: &Cloud, node: NodeId) -> PlacementResult<Host> {
    let placement = &cloud.placement;
    let told = tokio::try_join!(placement.inventory(node), placement.usages(node), placement.traits(node));
    let (inventory, used, traits) = match told {
        Err(PlacementError::NotFound(_)) => return Ok(Host::default()),
        told => told?,
    };
    let amount = |class: &String, of: &Inventory| Amount {
        capacity: capacity(of),
        used: used.get(class).copied().unwrap_or(0),
    };
    Ok(Host {
        amounts: inventory.iter().map(|(class, of)| (class.clone(), amount(class, of))).collect(),
        traits,
        ..Host::default()
    })
}

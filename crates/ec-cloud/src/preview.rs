//! Where an instance would go, and why: the first steps of scheduling, which only look.

use std::collections::{BTreeMap, btree_map::Entry};

use ec_model::{Alive, NodeId, decode};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{
    Ask, Cloud, CloudResult, Member,
    group::placeless,
    schedule::{NoRoom, look},
};

/// Where an instance would go at this moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Preview {
    /// The node that would be tried first.
    pub node: NodeId,
    /// What people call it.
    pub name: String,
    /// What the instance would take of what that node has, by class.
    pub resources: BTreeMap<String, Share>,
    /// How many others could be tried next, as far as was looked.
    pub others: usize,
    /// Nodes that have room and whose agents are not alive, as far as was looked.
    pub not_alive: Vec<NodeId>,
}

/// What would be taken of a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    /// So much.
    pub wanted: u64,
    /// Of what is left.
    pub free: u64,
    /// Of all that there is.
    pub capacity: u64,
}

/// Looks where an instance would go; the inner error says what stands in the way. Nothing is written.
pub async fn preview(cloud: &Cloud, ask: &Ask<'_>) -> CloudResult<Result<Preview, NoRoom>> {
    let mut seen = NoRoom::default();
    let ask = &ask.clone().on_storage(cloud).await?;
    let order = ask.order(cloud).await?;
    for limit in ask.limits().iter().copied() {
        let mut looked = look(cloud, ask, limit, &CancellationToken::new()).await?;
        let mut choice = ask.choose(&looked, &order);
        // Whoever asked in earnest would take away what is left of members that have no place any more.
        if let (Some(group), Some(peers), true) = (&ask.group, &mut looked.peers, choice.tries.is_empty())
            && !choice.left_out.is_empty()
        {
            for Member { node, instance } in placeless(cloud, &group.group.name).await? {
                if let Entry::Occupied(mut there) = peers.on.entry(node) {
                    there.get_mut().remove(&instance);
                    if there.get().is_empty() {
                        there.remove();
                    }
                }
            }
            choice = ask.choose(&looked, &order);
        }
        let found = looked.found;
        let Some(first) = choice.tries.first() else {
            seen.not_alive.extend(choice.not_alive);
            seen.left_out = choice.left_out;
            if limit.is_none_or(|limit| found.candidates.len() < limit) {
                break;
            }
            continue;
        };
        let node = first.node;
        let mut resources: BTreeMap<String, Share> = BTreeMap::new();
        for (class, wanted) in ask.query.total() {
            let taken = &found.candidates[first.offer].allocations;
            let is_its = |provider: NodeId| {
                found.root(provider) == node || (found.shares(provider) && taken.contains_key(&provider))
            };
            let of_node = found.summaries.iter().filter(|(provider, _)| is_its(**provider));
            let amounts = of_node.filter_map(|(_, summary)| summary.resources.get(&class));
            let share = amounts.fold(Share { wanted, ..Share::default() }, |share, amount| Share {
                free: share.free.saturating_add(amount.capacity.saturating_sub(amount.used)),
                capacity: share.capacity.saturating_add(amount.capacity),
                ..share
            });
            resources.insert(class, share);
        }
        let sign = cloud.store.get(&cloud.keys.alive(node)).await?.0;
        let name = sign.and_then(|sign| decode::<Alive>(&sign.value).ok()).map(|alive| alive.name);
        return Ok(Ok(Preview {
            node,
            name: name.unwrap_or_else(|| node.to_string()),
            resources,
            others: choice.tries.len() - 1,
            not_alive: choice.not_alive.into_iter().collect(),
        }));
    }
    Ok(Err(seen))
}

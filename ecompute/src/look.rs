//! Looking at everything there is: what etcd, the hypervisor and the node's own records have, and what the
//! world makes of it.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ec_model::{InstanceId, NodeId, Observed, Resources, decode};
use ec_placement_client::{ConsumerAllocations, PlacementError};
use ec_plan::{RecordFacts, Wanted};
use ec_store::StoreError;
use tokio::time::Instant;

use crate::{
    parts::Parts,
    world::{Held, StatusEntry, World},
};

/// What a look saw.
#[derive(Debug)]
pub(crate) struct Seen {
    statuses: HashMap<InstanceId, StatusEntry>,
    observed: HashMap<InstanceId, Observed>,
    records: HashMap<InstanceId, RecordFacts>,
    buried: HashSet<InstanceId>,
}

/// Asks all three. Nothing is taken from a look of which a part failed.
pub(crate) async fn look_at_all(parts: &Parts) -> Result<Seen, String> {
    let statuses = parts
        .store
        .list(&parts.settings.keys.statuses(parts.node))
        .await
        .map_err(|error: StoreError| error.to_string())?
        .pairs
        .into_iter()
        .filter_map(|pair| {
            let (_, instance) = parts.settings.keys.parse_status(&pair.key).ok()?;
            Some((
                instance,
                match decode(&pair.value) {
                    Ok(status) => StatusEntry::Known(Box::new(status)),
                    Err(error) => {
                        tracing::debug!(%instance, %error, "its status cannot be read");
                        StatusEntry::Unreadable
                    }
                },
            ))
        })
        .collect();
    let observed = parts.hypervisor.list().await.map_err(|error| error.to_string())?;
    let records = Arc::clone(&parts.records);
    let listed = parts.host.blocking(move || Ok((records.list()?, records.buried()?)));
    let (records, buried) = listed
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error: ec_metadata::RecordFileError| ec_runtime::exit::chain(&error))?;
    let records = records
        .into_iter()
        .map(|(instance, record)| {
            let facts = record
                .map_or(RecordFacts::Unreadable, |record| RecordFacts::Kept { started: record.started });
            (instance, facts)
        })
        .collect();
    Ok(Seen { statuses, observed, records, buried })
}

/// What an instance holds in placement, from this node's point of view. Asks for the node's tree only where the
/// allocation names other providers.
pub(crate) async fn ask_placement(parts: &Parts, instance: InstanceId) -> Result<Held, PlacementError> {
    let Some(held) = parts.placement.allocations(instance).await? else { return Ok(Held::Nothing) };
    let mut tree = [parts.node].into();
    if held.allocations.keys().any(|provider| *provider != parts.node) {
        tree = parts.placement.tree(parts.node).await?;
    }
    Ok(amounts_here(&held, |provider| tree.contains(provider))
        .map_or(Held::Elsewhere, |amounts| Held::Here { amounts, since: Instant::now() }))
}

/// What a guest may take here: processors and memory that this node's own providers gave it, and all else (a disk
/// on shared storage, say) from wherever it is. Nothing where this node gave nothing.
fn amounts_here(held: &ConsumerAllocations, ours: impl Fn(&NodeId) -> bool) -> Option<Resources> {
    let mut amounts = Resources::new();
    let mut here = false;
    for (provider, resources) in &held.allocations {
        here |= ours(provider);
        for (class, amount) in resources {
            if ours(provider) || !["VCPU", "MEMORY_MB"].contains(&class.as_str()) {
                let sum = amounts.entry(class.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
        }
    }
    here.then_some(amounts)
}

impl World {
    /// Takes what a look saw; instances that our own work changed since it began keep what they have.
    pub(crate) fn take_look(&mut self, begun: u64, mut seen: Seen) {
        let listed = seen.observed.keys().chain(seen.statuses.keys()).chain(seen.records.keys());
        // What was destroyed is known before its request comes back with an older etcd: nothing is decided of that
        // without.
        let listed: Vec<_> = listed.chain(&seen.buried).copied().collect();
        for instance in listed {
            if self.get(instance).is_none() {
                self.touch(instance).touched = 0;
            }
        }
        for (instance, entry) in self.iter_mut() {
            // What changed after the look began is not what the look saw.
            if entry.touched >= begun || entry.running.is_some() {
                continue;
            }
            entry.observe(seen.observed.remove(&instance).unwrap_or_default());
            entry.status = seen.statuses.remove(&instance).unwrap_or_default();
            entry.record = seen.records.remove(&instance).unwrap_or_default();
            entry.buried = seen.buried.contains(&instance);
        }
    }

    /// Allocations of this node that nobody here knows of, and those that are gone. Answers the guests that are
    /// here and not among them: they may hold parts of the node's tree only, or nothing any more.
    pub(crate) fn take_audit(
        &mut self,
        begun: u64,
        held: &HashMap<InstanceId, Resources>,
    ) -> Vec<InstanceId> {
        for instance in held.keys() {
            if self.get(*instance).is_none() {
                self.touch(*instance).touched = 0;
            }
        }
        let mut missing = Vec::new();
        for (instance, entry) in self.iter_mut() {
            if entry.touched >= begun || entry.running.is_some() {
                continue;
            }
            let since = match entry.allocation {
                Some(Held::Here { since, .. }) => since,
                _ => Instant::now(),
            };
            let is_here = entry.observed() != Observed::default();
            match held.get(&instance) {
                // Before a build the consumer itself is asked: it may hold parts on other providers too.
                Some(amounts) if is_here || entry.wanted() == Wanted::Nothing => {
                    entry.allocation = Some(Held::Here { amounts: amounts.clone(), since });
                }
                Some(_) => {}
                None if is_here => missing.push(instance),
                None if entry.wanted() == Wanted::Nothing => {
                    (entry.allocation, entry.asked_for) = (Some(Held::Nothing), None);
                }
                None => {}
            }
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_on_another_node_is_no_room_here() {
        let [here, there, shared] = [1u128, 2, 3].map(|n| NodeId::new(uuid::Uuid::from_u128(n)));
        let of = |pairs: &[(&str, u64)]| -> Resources {
            pairs.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect()
        };
        let held = |allocations: Vec<(NodeId, Resources)>| ConsumerAllocations {
            allocations: allocations.into_iter().collect(),
            ..ConsumerAllocations::default()
        };
        let ours = |provider: &NodeId| *provider == here;
        let elsewhere = held(vec![(there, of(&[("VCPU", 4), ("MEMORY_MB", 512)]))]);
        assert_eq!(amounts_here(&elsewhere, ours), None);
        let half = held(vec![(there, of(&[("VCPU", 4)])), (here, of(&[("MEMORY_MB", 512)]))]);
        assert_eq!(
            amounts_here(&half, ours),
            Some(of(&[("MEMORY_MB", 512)])),
            "its processors are not ours to give"
        );
        let sharing = held(vec![(here, of(&[("VCPU", 1)])), (shared, of(&[("DISK_GB", 7)]))]);
        assert_eq!(amounts_here(&sharing, ours), Some(of(&[("VCPU", 1), ("DISK_GB", 7)])));
    }
}

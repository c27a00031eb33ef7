//! Looking at everything there is: what etcd, the hypervisor and the node's own records have, and what the
//! world makes of it.

use std::{collections::HashMap, sync::Arc};

use ec_model::{InstanceId, Observed, Resources, Status, decode};
use ec_plan::Wanted;
use ec_store::StoreError;
use jiff::Timestamp;

use crate::{
    parts::Parts,
    world::{Held, World},
};

/// What a look saw.
#[derive(Debug)]
pub(crate) struct Seen {
    statuses: HashMap<InstanceId, Status>,
    observed: HashMap<InstanceId, Observed>,
    records: Vec<InstanceId>,
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
            match decode::<Status>(&pair.value) {
                Ok(status) => Some((instance, status)),
                // Written by something else: it will be written anew.
                Err(error) => {
                    tracing::warn!(%instance, %error, "its status cannot be read");
                    None
                }
            }
        })
        .collect();
    let observed = parts.hypervisor.list().await.map_err(|error| error.to_string())?;
    let records = Arc::clone(&parts.records);
    let records = tokio::task::spawn_blocking(move || records.list())
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error| ec_runtime::exit::chain(&error))?
        .into_iter()
        .map(|record| record.instance)
        .collect();
    Ok(Seen { statuses, observed, records })
}

impl World {
    /// Takes what a look saw; instances that our own work changed since it began keep what they have.
    pub(crate) fn take_look(&mut self, begun: u64, mut seen: Seen) {
        let listed: Vec<_> =
            seen.observed.keys().chain(seen.statuses.keys()).chain(&seen.records).copied().collect();
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
            entry.observed = seen.observed.remove(&instance).unwrap_or_default();
            entry.status = seen.statuses.remove(&instance);
            entry.record = seen.records.contains(&instance);
        }
    }

    /// Allocations of this node that nobody here knows of, and those that are gone.
    pub(crate) fn take_audit(&mut self, begun: u64, held: &HashMap<InstanceId, Resources>, now: Timestamp) {
        for instance in held.keys() {
            if self.get(*instance).is_none() {
                self.touch(*instance).touched = 0;
            }
        }
        for (instance, entry) in self.iter_mut() {
            if entry.touched >= begun || entry.running.is_some() {
                continue;
            }
            let since = entry
                .allocation
                .as_ref()
                .filter(|known| known.amounts.is_some())
                .map_or(now, |known| known.since);
            let amounts = held.get(&instance).cloned();
            if amounts.is_none() && entry.observed.domain.is_some() {
                tracing::warn!(%instance, "its domain is here, but placement holds no allocation for it");
            }
            // Before a build the consumer itself is asked: it may hold parts on other providers too.
            if entry.wanted() == Wanted::Nothing {
                entry.allocation = Some(Held { amounts, since });
            }
        }
    }
}

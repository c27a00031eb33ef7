//! Reading what there is: what etcd, the hypervisor, the node's own records and placement have. What it means is
//! for [`ec_plan::engine`] to say.

use std::{collections::BTreeSet, sync::Arc};

use ec_model::{InstanceId, Intent, NodeId, Request, RequestId, Resources, Size, State, Status, decode};
use ec_placement_client::{ConsumerAllocations, PlacementError};
use ec_plan::{
    RecordFacts, RescuedFacts, SizeFacts,
    engine::{Audit, Event, Held, Requested, Seen, StatusEntry, Whose},
    fingerprint,
};
use ec_runtime::planted;
use ec_store::{Change, Event as Changed, KeyValue, StoreError};

use crate::{held::held_by, parts::Parts};

/// What a change under this node's prefix tells of its requests. A key that is not one of a request is left alone.
pub(crate) fn changed(parts: &Parts, change: Change) -> Event {
    match change {
        Change::Reset(listing) => {
            Event::Listed(listing.pairs.iter().filter_map(|pair| requested(parts, pair)).collect())
        }
        Change::Events(batch) => {
            let changes = batch.events.iter().filter_map(|event| match event {
                Changed::Put(pair) => requested(parts, pair).map(|(whose, request)| (whose, Some(request))),
                Changed::Delete { key, .. } => whose(parts, key).map(|whose| (whose, None)),
            });
            Event::Changed(changes.collect())
        }
        Change::Lost(error) => Event::WatchLost(error.to_string()),
    }
}

/// The instance that a key under this node's prefix asks for.
fn whose(parts: &Parts, key: &str) -> Option<InstanceId> {
    match parts.settings.keys.parse_request(key) {
        Ok((owner, instance)) => (owner == parts.node).then_some(instance),
        Err(error) => {
            tracing::warn!(%error, "a key under this node's prefix is not a request; left alone");
            None
        }
    }
}

/// A request as it was read: whose it is by its key, and what it says.
fn requested(parts: &Parts, pair: &KeyValue) -> Option<(InstanceId, Requested)> {
    let instance = whose(parts, &pair.key)?;
    let record = decode::<Request>(&pair.value).map_err(|error| error.to_string()).and_then(|request| {
        if request.instance == instance || planted("request-of-another") {
            Ok(Arc::new(request))
        } else {
            Err(format!("it names instance {}, its key another", request.instance))
        }
    });
    Some((instance, Requested { record, revision: pair.mod_revision }))
}

/// A status as it lies in etcd.
pub(crate) fn status_entry(pair: &KeyValue) -> StatusEntry {
    match decode::<Status>(&pair.value) {
        // Whatever a later release means by it, it is not for this one to change.
        Ok(status) if status.state == State::Unknown => StatusEntry::Unreadable,
        Ok(status) => StatusEntry::Known(Box::new(status), pair.mod_revision),
        Err(error) => {
            tracing::debug!(key = pair.key, %error, "its status cannot be read");
            StatusEntry::Unreadable
        }
    }
}

/// Asks all three. Nothing is taken from a look of which a part failed.
pub(crate) async fn look_at_all(parts: &Parts) -> Result<Seen, String> {
    let keys = &parts.settings.keys;
    let prefixes = (keys.statuses(parts.node), keys.all_held(parts.node));
    let (listed, held) = tokio::try_join!(parts.store.list(&prefixes.0), parts.store.keys(&prefixes.1))
        .map_err(|error| error.to_string())?;
    let statuses = listed.pairs.iter().filter_map(|pair| {
        let (_, instance) = keys.parse_status(&pair.key).ok()?;
        Some((instance, status_entry(pair)))
    });
    let observed = parts.hypervisor.list().await.map_err(|error| error.to_string())?;
    let records = Arc::clone(&parts.records);
    let listed = parts.host.blocking(move || Ok((records.list()?, records.buried()?)));
    let (records, buried) = listed
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error: ec_metadata::RecordFileError| ec_runtime::exit::chain(&error))?;
    let facts = |record: Option<ec_metadata::InstanceRecord>| {
        record.map_or(RecordFacts::Unreadable, |record| record_facts(&record))
    };
    Ok(Seen {
        statuses: statuses.collect(),
        observed: observed.into_iter().collect(),
        records: records.into_iter().map(|(instance, record)| (instance, facts(record))).collect(),
        buried: buried.into_iter().collect(),
        held: held.iter().filter_map(|key| Some(keys.parse_held(key).ok()?.1)).collect(),
    })
}

/// What decisions need of a node's own record.
pub(crate) fn record_facts(record: &ec_metadata::InstanceRecord) -> RecordFacts {
    let rebuilt = record.rebuilt.as_ref().map(|rebuilt| rebuilt.wished_at);
    let rescued = record.rescued.as_ref().map(RescuedFacts::of);
    let resized = record.resized.as_ref();
    let size = SizeFacts {
        is: Size::of(&record.resources),
        wished_at: resized.map(|resized| resized.wished_at),
        failed: resized.is_some_and(|resized| resized.failed.is_some()),
        unproven: record.resources_before.is_some(),
        growing: record.growing.as_ref().map(Size::of),
    };
    let metadata = fingerprint(&record.metadata);
    let intent = record.intent.as_ref().and_then(Intent::edition);
    let root = record.intent.as_ref().and_then(Intent::root);
    RecordFacts::Kept {
        started: record.started,
        rebuilt,
        rescued,
        metadata,
        intent,
        root,
        size,
        rescue_begun: record.rescue_base_digest.is_some(),
    }
}

/// What an instance holds in placement, from this node's point of view. Asks for the node's tree only where the
/// allocation names other providers.
pub(crate) async fn ask_placement(
    parts: &Parts,
    instance: InstanceId,
    request_id: Option<RequestId>,
) -> Result<Held, PlacementError> {
    let placement = parts.placement.on_behalf(request_id);
    let Some(held) = placement.allocations(instance).await? else { return Ok(Held::Nothing) };
    // What of the storage that it shares with others is claimed for an instance of its own, is claimed here.
    let mut tree: BTreeSet<NodeId> = [parts.node, parts.settings.disk_provider(parts.node)].into();
    if held.allocations.keys().any(|provider| !tree.contains(provider)) {
        tree.extend(placement.tree(parts.node).await?);
    }
    if amounts_here(&held, |provider| tree.contains(provider)).is_none() {
        // One whose record cannot be read is left out of every list, and only who asks for it itself is told: that is no elsewhere.
        for provider in
            held.allocations.keys().filter(|provider| !tree.contains(provider)).collect::<Vec<_>>()
        {
            let found = placement.provider(*provider).await?;
            if found.is_some_and(|provider| provider.root() == parts.node) {
                tree.insert(*provider);
            }
        }
    }
    Ok(amounts_here(&held, |provider| tree.contains(provider)).map_or(Held::Elsewhere, Held::Here))
}

/// Whose an allocation is of which no request is known here. What the watch has not told is no reason to give it back,
/// so the request itself is asked for, too.
pub(crate) async fn ask_whose(parts: &Parts, instance: InstanceId) -> Result<Whose, StoreError> {
    if parts.store.get(&parts.settings.keys.instance(instance)).await?.0.is_none() {
        return Ok(Whose::Nobodys);
    }
    if planted("silent-watch-believed") {
        return Ok(Whose::AskedFor);
    }
    let (request, _) = parts.store.get(&parts.request_key(instance)).await?;
    Ok(if request.is_some() { Whose::Requested } else { Whose::AskedFor })
}

/// Every allocation on this node, where placement knows the node; with what of the storage that it shares is of this node's.
pub(crate) async fn audit(parts: &Parts) -> Result<Option<Audit>, String> {
    let on_node = match parts.placement.provider_allocations(parts.node).await {
        Ok(on_node) => on_node,
        Err(PlacementError::NotFound(_)) => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let Some(shared) = &parts.settings.shared else {
        return Ok(Some(on_node.into_iter().map(|(instance, amounts)| (instance, Ok(amounts))).collect()));
    };
    let storage = shared.storage.provider;
    if parts.placement.provider(storage).await.map_err(|error| error.to_string())?.is_none() {
        return Ok(None);
    }
    let known = known_here(parts).await?;
    let asked = on_node.into_keys().chain(known.iter().copied()).collect();
    let answers = held_by(&parts.placement, asked).await.map_err(|error| error.to_string())?;
    // An allocation of shared storage names no node: whose it is, is known here. A machine's names this node, too, and both come by one
    // answer, so that what is claimed or given back meanwhile is whole or not there.
    let here = answers.into_iter().filter_map(|(instance, held)| {
        let mut held = match held {
            Ok(held) => held,
            Err(error) => return Some((instance, Err(error.to_string()))),
        };
        let (of_node, of_storage) = (held.remove(&parts.node), held.remove(&storage));
        (of_node.is_some() || of_storage.is_some() && known.contains(&instance))
            .then(|| (instance, Ok([of_node, of_storage].into_iter().flatten().flatten().collect())))
    });
    Ok(Some(here.collect()))
}

/// What this node is asked for, has told of, or has a record of.
async fn known_here(parts: &Parts) -> Result<BTreeSet<InstanceId>, String> {
    let keys = &parts.settings.keys;
    let prefixes = (keys.requests(parts.node), keys.statuses(parts.node));
    let (requests, statuses) = tokio::try_join!(parts.store.keys(&prefixes.0), parts.store.keys(&prefixes.1))
        .map_err(|error| error.to_string())?;
    let requests = requests.iter().filter_map(|key| Some(keys.parse_request(key).ok()?.1));
    let statuses = statuses.iter().filter_map(|key| Some(keys.parse_status(key).ok()?.1));
    let mut known: BTreeSet<InstanceId> = requests.chain(statuses).collect();
    let records = Arc::clone(&parts.records);
    let listed = parts.host.blocking(move || records.list()).await.map_err(|error| error.to_string())?;
    known.extend(listed.map_err(|error| error.to_string())?.into_iter().map(|(instance, _)| instance));
    Ok(known)
}

/// What a guest may take here: processors and memory that this node's own providers gave it, and all else (a disk
/// on shared storage, say) from wherever it is. Nothing where this node gave nothing, or only what goes with a guest
/// whose processors and memory are elsewhere.
fn amounts_here(held: &ConsumerAllocations, ours: impl Fn(&NodeId) -> bool) -> Option<Resources> {
    let mut amounts = Resources::new();
    let (mut here, mut runs_here, mut runs_elsewhere) = (false, false, false);
    for (provider, resources) in &held.allocations {
        here |= ours(provider);
        for (class, amount) in resources {
            let runs = ["VCPU", "MEMORY_MB"].contains(&class.as_str());
            runs_here |= runs && ours(provider);
            runs_elsewhere |= runs && !ours(provider);
            if ours(provider) || !runs {
                let sum = amounts.entry(class.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
        }
    }
    (here && (runs_here || !runs_elsewhere)).then_some(amounts)
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
        let disk = held(vec![(there, of(&[("VCPU", 1)])), (here, of(&[("DISK_GB", 7)]))]);
        assert_eq!(
            amounts_here(&disk, ours),
            None,
            "all of it is given back together, and the guest is there"
        );
        let disk_alone = held(vec![(here, of(&[("DISK_GB", 7)]))]);
        assert_eq!(amounts_here(&disk_alone, ours), Some(of(&[("DISK_GB", 7)])));
    }
}

//! Forgetting a node that will never come back: concluding what its agent would have, of what its users have ended.
//!
//! ```text
//!   look:     what etcd tells of each instance there ──▶ ec_plan::forget::judge ──▶ refused, and nothing is changed
//!   each:     its claim, where nobody else speaks of it ──▶ one transaction: request, status and all beside them
//!   then:     left places in groups ──▶ the provider, with claims of which nobody speaks ──▶ the node's record
//! ```
//!
//! Whoever is killed between finds what is left, and goes on: the record, by which the node has a name, goes last. Each transaction
//! demands that the node's agent is not there, and that the request is as it was read. Should the host come back all the same, its
//! agent ends nothing: what it has without a request is UNCLAIMED.

mod seen;

use std::{collections::BTreeSet, time::Duration};

use ec_model::{InstanceId, NodeId, Outcomes, decode, encode};
use ec_placement_client::{CONSUMER_TYPE, PlacementError};
use ec_plan::{
    history::{RETENTION, ended},
    lack::some,
};
use ec_store::{Compare, Txn};
use futures::StreamExt;
use tokio::time::Instant;

use self::seen::{Seen, There, beyond_rights};
use crate::{
    Cloud, CloudError, CloudResult,
    intent::drop_alone,
    lookup::{CONCURRENCY, Read},
    nodes::nodes,
    select::named_nodes,
};

/// Others may be at it at the same time; so often is enough for anybody.
const TRIES: usize = 5;

/// What takes longer is told of so often.
const PROGRESS: Duration = Duration::from_secs(1);

/// The node that is meant: of one name those that are gone come first, since nobody else is forgotten. One of which there is no record
/// has the name that placement knows it by.
///
/// # Errors
/// No node is called so, or several are.
pub async fn node_to_forget(cloud: &Cloud, text: &str) -> CloudResult<NodeId> {
    if let Ok(node) = text.parse() {
        return Ok(node);
    }
    match named_nodes(cloud).await?.gone_first(text) {
        Err(CloudError::NotFound(why)) => {
            let all = nodes(cloud).await?;
            let mut called = all.iter().filter(|view| view.name == text).map(|view| view.node);
            match (called.next(), called.next()) {
                (Some(node), None) => Ok(node),
                _ => Err(CloudError::NotFound(why)),
            }
        }
        named => named,
    }
}

/// Forgets a node, of which nothing is wanted any more. Doing it again goes on where it ended.
///
/// # Errors
/// [`CloudError::Refused`], with nothing changed, where its agent is alive, or something there is wanted still;
/// [`CloudError::NotFound`] where nothing is known of it.
pub async fn forget(cloud: &Cloud, node: NodeId) -> CloudResult<()> {
    for _ in 0..TRIES {
        let seen = Seen::look(cloud, node).await?;
        seen.refuse(cloud).await?;
        if conclude(cloud, &seen).await? && drop_node(cloud, &seen).await? {
            return Ok(());
        }
    }
    Err(CloudError::Busy(format!("what there is of node {node} keeps changing; try again")))
}

/// Concludes what is left of each instance. Whether all of it stood as it was read.
async fn conclude(cloud: &Cloud, seen: &Seen) -> CloudResult<bool> {
    let (mut told, mut done) = (Instant::now(), 0);
    let mut ends = futures::stream::iter(&seen.instances)
        .map(|(instance, there)| conclude_one(cloud, seen, *instance, there))
        .buffer_unordered(CONCURRENCY)
        .boxed();
    while let Some(concluded) = ends.next().await {
        if !concluded? {
            return Ok(false);
        }
        done += 1;
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            (cloud.notice)(&format!("node {}: {done} of {} ended", seen.name, seen.instances.len()));
        }
    }
    for (key, instance) in &seen.members {
        drop_alone(cloud, key.clone(), *instance).await?;
    }
    Ok(true)
}

/// First what it has claimed: by the request, or what else lies there, whoever says this again finds it.
async fn conclude_one(cloud: &Cloud, seen: &Seen, instance: InstanceId, there: &There) -> CloudResult<bool> {
    let (keys, node) = (&cloud.keys, seen.node);
    let (request, status) = (keys.request(node, instance), keys.status(node, instance));
    let txn = match there.request {
        Read::Here(_, revision) => {
            seen.demand_gone(cloud).when(Compare::Unchanged(request.clone(), revision))
        }
        // Then its status alone told that it may go. Of one that went by itself meanwhile nothing is otherwise.
        Read::Absent | Read::Unreadable(_) => {
            let txn = seen.demand_gone(cloud).when(Compare::Absent(request.clone()));
            match there.status_revision {
                0 => txn.when(Compare::Absent(status.clone())),
                revision => txn.when(Compare::Unchanged(status.clone(), revision)),
            }
        }
    };
    // All may be otherwise since it was looked at, which takes its time: what an agent ends by now has its room until then.
    if !cloud.store.txn(txn.clone()).await?.succeeded {
        return Ok(false);
    }
    if !there.is_elsewhere {
        cloud.placement.release(instance).await?;
    }
    let gone = [
        request,
        status,
        keys.user_data(node, instance),
        keys.held(node, instance),
        keys.held_user_data(node, instance),
    ];
    let txn = with_end(cloud, seen, instance, there, gone.into_iter().fold(txn, Txn::delete)).await?;
    Ok(cloud.store.txn(txn).await.map_err(|error| beyond_rights(error.into()))?.succeeded)
}

/// What came of it stays for a day, with its end, as its agent would have left it; what cannot be read as it is.
async fn with_end(
    cloud: &Cloud,
    seen: &Seen,
    instance: InstanceId,
    there: &There,
    txn: Txn,
) -> CloudResult<Txn> {
    let key = cloud.keys.outcomes(seen.node, instance);
    let Some(pair) = cloud.store.get(&key).await?.0.filter(|pair| pair.lease.is_none()) else {
        return Ok(txn);
    };
    let outcomes = match decode::<Outcomes>(&pair.value) {
        Ok(mut outcomes) => {
            outcomes.push(ended(there.status.record(), cloud.host.now()));
            encode(&outcomes)
        }
        Err(_) => pair.value,
    };
    let lease = cloud.store.grant_for(&key, RETENTION).await.map_err(|error| beyond_rights(error.into()))?;
    Ok(txn.put_leased(key, outcomes, lease))
}

/// Takes away what is left of the node itself. Whether it stood as it was read.
async fn drop_node(cloud: &Cloud, seen: &Seen) -> CloudResult<bool> {
    tell_of_storage(cloud, seen).await?;
    let still = cloud.store.txn(seen.demand_gone(cloud)).await?;
    if !still.succeeded {
        return Ok(false);
    }
    drop_provider(cloud, seen).await?;
    let Some((pair, _)) = &seen.record else { return Ok(true) };
    if seen.is_revoked() {
        (cloud.notice)(&format!(
            "node {} stays marked as revoked, so that nothing is ever written for it: {} is that mark",
            seen.name, pair.key
        ));
        return Ok(true);
    }
    let stands = Compare::Unchanged(pair.key.clone(), pair.mod_revision);
    let txn = seen.demand_gone(cloud).when(stands).delete(pair.key.clone());
    Ok(cloud.store.txn(txn).await.map_err(|error| beyond_rights(error.into()))?.succeeded)
}

/// Before the provider goes, which alone tells that the node was one of those that share it.
async fn tell_of_storage(cloud: &Cloud, seen: &Seen) -> CloudResult<()> {
    for storage in cloud.placement.shared_storages().await? {
        let aggregate = storage.aggregate().to_string();
        if cloud.placement.is_where(seen.node, "member_of", &aggregate).await? {
            (cloud.notice)(&format!(
                "what is left of the disks of node {} on storage `{}` lies there in the directory {}: delete that on a host that has it",
                seen.name, storage.name, seen.node
            ));
        }
    }
    Ok(())
}

/// Takes the provider away, with claims on it that killed commands left: nobody speaks of them any more.
async fn drop_provider(cloud: &Cloud, seen: &Seen) -> CloudResult<()> {
    let mut why = String::new();
    for _ in 0..TRIES {
        match cloud.placement.delete_provider(seen.node).await {
            Ok(()) => return Ok(()),
            Err(PlacementError::Conflict(conflict)) => why = conflict.why,
            Err(error) => return Err(error.into()),
        }
        let holders = match cloud.placement.provider_allocations(seen.node).await {
            Err(PlacementError::NotFound(_)) => return Ok(()),
            holders => holders?,
        };
        let holders: BTreeSet<InstanceId> = holders.into_keys().collect();
        let spoken_of = spoken_of(cloud).await?;
        let mut kept = Vec::new();
        for holder in holders {
            // Of what another program claims, or of which nobody says what it is, nobody here gives anything back; nor what is held elsewhere.
            let is_left = match cloud.placement.allocations(holder).await? {
                Some(held) => {
                    let is_ours = held.consumer_type.as_deref() == Some(CONSUMER_TYPE);
                    is_ours && held.allocations.keys().all(|provider| *provider == seen.node)
                }
                None => true,
            };
            match is_left && !spoken_of.contains(&holder) {
                true => cloud.placement.release(holder).await?,
                false => kept.push(holder.to_string()),
            }
        }
        if !kept.is_empty() {
            return Err(seen.refused(&format!(
                "placement has claims on it that are not its own instances': of {}; what a killed command left goes ten minutes later, \
                 else whoever claimed it gives it back; then say this again",
                some(&kept)
            )));
        }
    }
    Err(seen.refused(&format!("placement keeps its provider: {why}")))
}

/// All instances that anything in etcd speaks of.
async fn spoken_of(cloud: &Cloud) -> CloudResult<BTreeSet<InstanceId>> {
    let keys = &cloud.keys;
    let prefixes = (keys.instances(), keys.all_requests(), keys.all_statuses());
    let (records, requests, statuses) = tokio::try_join!(
        cloud.store.keys(&prefixes.0),
        cloud.store.keys(&prefixes.1),
        cloud.store.keys(&prefixes.2)
    )?;
    let records = records.iter().filter_map(|key| keys.parse_instance(key).ok());
    let requests = requests.iter().filter_map(|key| Some(keys.parse_request(key).ok()?.1));
    let statuses = statuses.iter().filter_map(|key| Some(keys.parse_status(key).ok()?.1));
    Ok(records.chain(requests).chain(statuses).collect())
}

//! What must be done for a cluster when no tool and no agent is there to do it. Everything here is decided anew from
//! what is there and done by compare-and-swap, so any number may do it at once.

use std::{collections::HashSet, time::Duration};

use ec_model::InstanceId;
use ec_plan::fleet::{Fleet, Move, Seen};
use futures::{StreamExt, TryStreamExt};

use crate::{
    Cloud, CloudResult,
    intent::{sweep, wanted},
    lookup::CONCURRENCY,
};

/// Looks at all nodes, and marks in placement those that are down, or are back. Answers what was done.
///
/// # Errors
/// etcd or placement does not answer; what was done stays done.
pub async fn tend_nodes(cloud: &Cloud, fleet: &mut Fleet, now: Duration) -> CloudResult<Vec<Move>> {
    let prefixes = (cloud.keys.nodes(), cloud.keys.all_alive());
    let (known, alive) = tokio::try_join!(cloud.store.keys(&prefixes.0), cloud.store.keys(&prefixes.1))?;
    let seen = Seen {
        known: known.iter().filter_map(|key| cloud.keys.parse_node(key).ok()).collect(),
        alive: alive.iter().filter_map(|key| cloud.keys.parse_alive(key).ok()).collect(),
        marked: cloud.placement.marked_down().await?,
    };
    let mut done = Vec::new();
    for next in fleet.look(&seen, now) {
        let changed = match next {
            Move::MarkDown(node) => cloud.placement.mark_down(node, true).await?,
            Move::MarkUp(node) => cloud.placement.mark_down(node, false).await?,
        };
        if changed {
            done.push(next);
        }
    }
    Ok(done)
}

/// Takes away what killed commands and instances that failed long ago left: records that nobody asks for and no
/// agent tells of, their names, and claims that were never requested. Answers whose.
///
/// # Errors
/// etcd or placement does not answer; what was done stays done.
pub async fn tend_instances(cloud: &Cloud) -> CloudResult<Vec<InstanceId>> {
    let keys = &cloud.keys;
    let prefixes = (keys.all_requests(), keys.all_statuses(), keys.instances());
    let (requests, statuses, records) = tokio::try_join!(
        cloud.store.keys(&prefixes.0),
        cloud.store.keys(&prefixes.1),
        cloud.store.keys(&prefixes.2)
    )?;
    let requests = requests.iter().filter_map(|key| keys.parse_request(key).ok());
    let statuses = statuses.iter().filter_map(|key| keys.parse_status(key).ok());
    let spoken_of: HashSet<InstanceId> = requests.chain(statuses).map(|(_, instance)| instance).collect();
    let alone = records.iter().filter_map(|key| keys.parse_instance(key).ok());
    let swept: Vec<Option<InstanceId>> =
        futures::stream::iter(alone.filter(|instance| !spoken_of.contains(instance)))
            .map(async |instance| {
                let Some(pair) = cloud.store.get(&keys.instance(instance)).await?.0 else { return Ok(None) };
                // What cannot be read is touched by nobody; `list` shows it.
                let Ok(record) = wanted(instance, &pair.value) else { return Ok(None) };
                sweep(cloud, record, pair.mod_revision).await.map(|swept| swept.then_some(instance))
            })
            .buffer_unordered(CONCURRENCY)
            .try_collect()
            .await?;
    Ok(swept.into_iter().flatten().collect())
}

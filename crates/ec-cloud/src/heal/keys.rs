//! Names and places in groups of instances whose records say that they have them, and whose keys somebody deleted: nobody finds
//! such a name, and who places others does not see such a member.

use std::collections::HashSet;

use ec_model::{Desired, Doc, Instance, InstanceId, NodeId, Record, Request, Workload};
use ec_plan::heal::Brought;
use ec_store::{Compare, KeyValue, Txn};

use super::{Healed, NOT_ALIVE, Outcome, Planned, with_group, with_name, written};
use crate::{Cloud, CloudResult, schedule::not_understood};

/// What a record says that it has, in words, and the key by which others know.
fn borne(cloud: &Cloud, record: &Instance) -> Vec<(String, String)> {
    let keys = &cloud.keys;
    let named = record.name.as_ref().map(|name| {
        (format!("its name `{name}`"), keys.name(record.kind, &record.project, name, record.instance))
    });
    let placed = record.group.as_ref().zip(keys.membership(record));
    let placed = placed.map(|(group, key)| (format!("its place in the group `{group}`"), key));
    named.into_iter().chain(placed).collect()
}

fn etcd_lacks(lost: &[String]) -> String {
    format!("etcd lacks {}", lost.join(" and "))
}

/// Those that are asked for by these keys of requests, and have such a record.
pub(super) async fn keyless(cloud: &Cloud, requests: &[String]) -> CloudResult<Vec<Healed>> {
    let keys = &cloud.keys;
    let requested: HashSet<(NodeId, InstanceId)> =
        requests.iter().filter_map(|key| keys.parse_request(key).ok()).collect();
    let records = cloud.store.list(&keys.instances()).await?.pairs;
    // Read later: each is written with its record, or before.
    let prefixes = [Workload::Machine, Workload::Volume].map(|kind| keys.all_names(kind));
    let members = keys.all_members();
    let (names, volumes, members) = tokio::try_join!(
        cloud.store.keys(&prefixes[0]),
        cloud.store.keys(&prefixes[1]),
        cloud.store.keys(&members)
    )?;
    let there: HashSet<String> = names.into_iter().chain(volumes).chain(members).collect();
    let mut all = Vec::new();
    for pair in records {
        let Ok(Doc::<Instance> { record, .. }) = Doc::decode(&pair.value) else { continue };
        let Some(node) = record.node().filter(|node| requested.contains(&(*node, record.instance))) else {
            continue;
        };
        let lost = borne(cloud, &record).into_iter().filter(|(_, key)| !there.contains(key));
        let lost: Vec<String> = lost.map(|(what, _)| what).collect();
        if lost.is_empty() {
            continue;
        }
        // It may have been renamed or destroyed since.
        let now = cloud.store.get(&pair.key).await?.0;
        if now.is_none_or(|now| now.mod_revision != pair.mod_revision) {
            continue;
        }
        let Instance { instance, name, project, .. } = record;
        let left = Healed::left(node, instance, None, etcd_lacks(&lost));
        all.push(Healed { name, project: Some(project), outcome: Outcome::Lost, ..left });
    }
    Ok(all)
}

/// What is to be done about one that is asked for and has a record. Nothing, where all its keys are there.
pub(super) async fn plan(
    cloud: &Cloud,
    node: NodeId,
    [asked, recorded]: [&KeyValue; 2],
    alive: Option<KeyValue>,
    looks: bool,
) -> CloudResult<Planned> {
    let (mut request, mut doc) =
        (Doc::<Request>::decode(&asked.value)?, Doc::<Instance>::decode(&recorded.value)?);
    let before = doc.record.clone();
    let mut lost = Vec::new();
    for (what, key) in borne(cloud, &before) {
        if cloud.store.get(&key).await?.0.is_none() {
            lost.push(what);
        }
    }
    let of = request.record.clone();
    let is_placed = before.assigned.is_some_and(|at| (at.node, at.epoch) == (node, of.epoch));
    if lost.is_empty() || of.desired != Desired::Active || !is_placed || of.instance != before.instance {
        return Ok(Planned::Nothing);
    }
    let left = |why: String| Ok(Planned::Left(Healed::left(node, before.instance, Some(&of), why)));
    let Some(alive) = alive else { return left(NOT_ALIVE.to_owned()) };
    if let Some(why) = not_understood(node, &alive.value, of.format()) {
        return left(why);
    }
    let generation = before.generation.max(of.generation).saturating_add(1);
    (doc.record.generation, request.record.generation) = (generation, generation);
    let mut brought = Brought { record: doc, request, notes: Vec::new() };
    let txn = Txn::new()
        .when(Compare::Unchanged(asked.key.clone(), asked.mod_revision))
        .when(Compare::Unchanged(recorded.key.clone(), recorded.mod_revision))
        .when(Compare::Unchanged(alive.key, alive.mod_revision));
    // Names and groups are those of its project.
    let of_project = Cloud { project: before.project.clone(), ..cloud.clone() };
    let txn = with_name(&of_project, Some(&before), &mut brought, looks, txn).await?;
    let txn = with_group(&of_project, node, Some(&before), &mut brought, txn).await?;
    if looks {
        brought.notes.push(etcd_lacks(&lost));
    }
    written(cloud, node, brought, asked.key.clone(), txn).await
}

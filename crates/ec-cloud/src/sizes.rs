//! Room for another size: claimed before it is wished, and given back when nobody can want it any more.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_model::{
    Extent, Instance, InstanceId, NodeId, ResourceQuery, Resources, Status, Workload, decode, greater,
};
use ec_placement_client::{ConsumerAllocations, PlacementError};
use ec_plan::{
    fleet::Surplus,
    lack::{Amount, Demands, Host, Lack, Reasons, lack_of},
    sizes::{Allocations, more, needed, placed, total},
};
use ec_store::{Compare, Txn};
use futures::{StreamExt, future::try_join_all};

use crate::{
    Cloud, CloudError, CloudResult,
    intent::wanted,
    lookup::{CONCURRENCY, Found, Known, Read, find},
    nodes::capacity,
    tend::{Cleared, Tended},
};

/// Another writer changed the claim in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// Claims the greater of what an instance has and what it is to have, of each class. What is claimed already stays, and is claimed
/// once more: whoever is about to give it back finds that somebody wants it. Who asks calls that by this `word`.
///
/// # Errors
/// There is no such room where it is, or that is not such a place: [`CloudError::Refused`], with nothing claimed.
pub(crate) async fn claim(cloud: &Cloud, known: &Known, extent: &Extent, word: &str) -> CloudResult<()> {
    let instance = known.instance;
    let refused = |why: String| CloudError::Refused(format!("cannot {word} {instance}: {why}"));
    for _ in 0..TRIES {
        let Some(held) = cloud.placement.allocations(instance).await? else {
            return Err(refused("placement holds no allocation for it".to_owned()));
        };
        let wanted = greater(&total(&held.allocations), &extent.resources);
        let allocations = placed(&held.allocations, &wanted).map_err(refused)?;
        let query =
            ResourceQuery::parse(&extent.query).map_err(|error| CloudError::Invalid(error.to_string()))?;
        if let Some(demand) = left_out(cloud, known.node, &held, &query).await? {
            return Err(refused(format!(
                "its node is none of those that the query wants by `{demand}`, and it is not moved"
            )));
        }
        if let Some(lack) = lacking(cloud, known.node, &held, &wanted, &query).await? {
            let reasons = Reasons { nearest: vec![lack], living: 1, ..Reasons::default() };
            return Err(refused(format!(
                "its node cannot give it that, and it is not moved: {}",
                reasons.text()
            )));
        }
        match cloud.placement.reallocate(instance, &held, &allocations).await {
            Ok(()) => return Ok(()),
            // By who changed it, or took the room: that is seen then.
            Err(PlacementError::Conflict(_)) => {}
            Err(error) => return Err(error.into()),
        }
        if allocations == held.allocations {
            // Or there is less by now than was given out, of which what it has stays its own.
            let now = cloud.placement.allocations(instance).await?;
            if now.is_some_and(|now| now.generation == held.generation) {
                return Ok(());
            }
        }
    }
    Err(CloudError::Busy(format!("the allocation of {instance} keeps changing; try again")))
}

/// What the query wants of where it is, by an aggregate or a tree, and its node is not: what a group of it wants may be so of any of its
/// providers.
async fn left_out(
    cloud: &Cloud,
    node: NodeId,
    held: &ConsumerAllocations,
    query: &ResourceQuery,
) -> CloudResult<Option<String>> {
    for (key, value) in query.pairs() {
        let Some(demand) = ["member_of", "in_tree"].into_iter().find(|demand| key.starts_with(demand)) else {
            continue;
        };
        let of_group = held.allocations.keys().filter(|_| key != demand);
        let asked = std::iter::once(&node).chain(of_group);
        let is_so = asked.map(|provider| cloud.placement.is_where(*provider, demand, value));
        if !try_join_all(is_so).await?.contains(&true) {
            return Ok(Some(format!("{key}={value}")));
        }
    }
    Ok(None)
}

/// What its providers lack of what an instance is to have, or of what the query demands beside.
async fn lacking(
    cloud: &Cloud,
    node: NodeId,
    held: &ConsumerAllocations,
    wanted: &Resources,
    query: &ResourceQuery,
) -> CloudResult<Option<Lack>> {
    let rooms = held.allocations.keys().map(async |provider| {
        tokio::try_join!(cloud.placement.inventory(*provider), cloud.placement.usages(*provider))
    });
    let providers: BTreeSet<NodeId> = held.allocations.keys().copied().chain([node]).collect();
    let traits = providers.into_iter().map(async |provider| {
        let traits = cloud.placement.traits(provider).await?;
        Ok::<_, PlacementError>((provider, traits))
    });
    let (provider, traits, rooms) =
        tokio::try_join!(cloud.placement.provider(node), try_join_all(traits), try_join_all(rooms))?;
    let demands = Demands::of(query);
    // What one of several groups must not have may be of another's provider.
    let counts = |provider: NodeId, name: &String| provider == node || !demands.forbidden.contains(name);
    let traits = traits
        .into_iter()
        .flat_map(|(provider, traits)| traits.into_iter().filter(move |name| counts(provider, name)));
    let traits = traits.collect();
    let name = provider.map_or_else(|| node.to_string(), |provider| provider.name);
    let mut host = Host { name, traits, ..Host::default() };
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    for (inventory, used) in rooms {
        for (class, of) in inventory {
            let sum = host.amounts.entry(class.clone()).or_default();
            sum.capacity = sum.capacity.saturating_add(capacity(&of));
            sum.used = sum.used.saturating_add(used.get(&class).copied().unwrap_or(0));
            most.insert(class, of.max_unit);
        }
    }
    let has = total(&held.allocations);
    let grows = more(&has, wanted);
    let lack = lack_of(node, &host, &Demands { total: grows.clone(), ..demands });
    if !lack.is_nothing() {
        return Ok(Some(lack));
    }
    // Beside what is free there is what one instance may have in all.
    let roomy = |class: &String| (class.clone(), Amount { capacity: u64::MAX, used: 0 });
    let all = Host { amounts: wanted.keys().map(roomy).collect(), at_once: most, ..host };
    let grown = wanted.iter().filter(|(class, _)| grows.contains_key(*class));
    let in_all = grown.map(|(class, amount)| (class.clone(), *amount)).collect();
    let lack = lack_of(node, &all, &Demands { total: in_all, ..Demands::default() });
    Ok(Some(lack).filter(|lack| !lack.is_nothing()))
}

/// Gives back what an instance has claimed and does not need, where its agent has told all that it was asked for. What
/// it was of, where there was anything.
///
/// The record is written anew before: a command that claimed more and slept cannot write its wish any more.
///
/// # Errors
/// etcd or placement does not answer.
pub async fn settle(cloud: &Cloud, instance: InstanceId) -> CloudResult<Option<Cleared>> {
    for _ in 0..TRIES {
        let Some(held) = cloud.placement.allocations(instance).await? else { return Ok(None) };
        let known = match find(cloud, instance).await {
            Ok(Found::Placed(known)) => known,
            Ok(Found::Unplaced(..)) | Err(CloudError::NotFound(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(allocations) = settled(&known, &held) else { return Ok(None) };
        let Some(record) = known.record_doc()? else { return Ok(None) };
        let request_id = cloud.request_id.or(record.record.request_id);
        let (keys, node) = (&cloud.keys, known.node);
        let (record_key, status_key) = (keys.instance(instance), keys.status(node, instance));
        let told = match &known.status {
            Read::Here(_, revision) => Compare::Unchanged(status_key, *revision),
            Read::Absent | Read::Unreadable(_) => Compare::Absent(status_key),
        };
        let fence = Txn::new()
            .when(Compare::Unchanged(record_key.clone(), known.record_revision()))
            .when(Compare::Unchanged(keys.request(node, instance), known.request_revision()))
            .when(told)
            .put(record_key, record.encode());
        if !cloud.store.txn(fence).await?.succeeded {
            continue;
        }
        let placement = cloud.placement.on_behalf(request_id);
        match placement.reallocate(instance, &held, &allocations).await {
            Ok(()) => return Ok(Some(Cleared { instance, request_id })),
            Err(PlacementError::Conflict(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("the allocation of {instance} keeps changing; try again")))
}

/// What an instance is to hold, where that is less than it does; nothing where nobody can tell.
fn settled(known: &Known, held: &ConsumerAllocations) -> Option<Allocations> {
    let (record, request) = (known.record.as_ref()?, known.request.record()?);
    let is_placed = record.assigned.is_some_and(|assigned| assigned.epoch == request.epoch);
    if !is_placed || matches!(known.status, Read::Unreadable(_)) {
        return None;
    }
    let needed = needed(record, request, known.status.record())?;
    let has = total(&held.allocations);
    let less = has.iter().map(|(class, amount)| {
        let needed = needed.get(class).copied().unwrap_or(0);
        (class.clone(), needed.min(*amount))
    });
    let allocations = placed(&held.allocations, &less.collect()).ok()?;
    (allocations != held.allocations).then_some(allocations)
}

/// How large the volumes are that could not grow, as their nodes tell: what they were asked for says nothing of them.
async fn not_grown(cloud: &Cloud) -> CloudResult<HashMap<InstanceId, Resources>> {
    let pairs = cloud.store.list(&cloud.keys.all_statuses()).await?.pairs;
    let told = pairs.iter().filter_map(|pair| {
        let status = decode::<Status>(&pair.value).ok()?;
        let was = status.resized.filter(|was| status.kind == Workload::Volume && was.failed.is_some())?;
        Some((status.instance, was.resources))
    });
    Ok(told.collect())
}

/// Looks for claims that are greater than what their instances were asked for, or are where that could not be, and gives back what
/// nobody needs of those that are so for long. Answers whose.
///
/// # Errors
/// etcd or placement does not answer, and nothing was done.
pub async fn tend_claims(
    cloud: &Cloud,
    surplus: &mut Surplus,
    now: std::time::Duration,
) -> CloudResult<Tended<Cleared>> {
    let pairs = cloud.store.list(&cloud.keys.instances()).await?.pairs;
    let mut records: Vec<(NodeId, Instance)> = Vec::new();
    for pair in &pairs {
        let read = cloud.keys.parse_instance(&pair.key).ok().and_then(|own| wanted(own, &pair.value).ok());
        records.extend(read.and_then(|record| Some((record.node()?, record))));
    }
    // Disks on storage that nodes share are claimed of that.
    let storages = cloud.placement.shared_storages().await?.into_iter().map(|storage| storage.provider);
    let providers: BTreeSet<NodeId> = records.iter().map(|(node, _)| *node).chain(storages).collect();
    let mut of_each = futures::stream::iter(providers)
        .map(async |provider| match cloud.placement.provider_allocations(provider).await {
            Err(PlacementError::NotFound(_)) => Ok(HashMap::new()),
            held => held,
        })
        .buffer_unordered(CONCURRENCY)
        .boxed();
    let mut tended = Tended::new();
    let mut held: HashMap<InstanceId, Resources> = HashMap::new();
    while let Some(of_one) = of_each.next().await {
        // What is not seen of one that is held of several looks smaller than it is, which gives nothing back.
        let of_one: HashMap<InstanceId, Resources> = match of_one {
            Ok(of_one) => of_one,
            Err(error) => match tended.note(Err(error.into())) {
                true => continue,
                false => return Ok(tended),
            },
        };
        for (instance, amounts) in of_one {
            let held = held.entry(instance).or_default();
            for (class, amount) in amounts {
                let sum = held.entry(class).or_default();
                *sum = sum.saturating_add(amount);
            }
        }
    }
    let missed = match records.iter().any(|(_, record)| record.kind == Workload::Volume) {
        true => not_grown(cloud).await?,
        false => HashMap::new(),
    };
    let greater = records.into_iter().filter_map(|(_, Instance { instance, spec, .. })| {
        let held = held.remove(&instance)?;
        let asked = missed.get(&instance).unwrap_or(&spec.resources);
        (!more(asked, &held).is_empty()).then_some((instance, held))
    });
    for instance in surplus.look(greater.collect(), now) {
        if !tended.note(settle(cloud, instance).await) {
            break;
        }
    }
    Ok(tended)
}

//! The node's resource provider in placement: what it has to give, and what it can.

mod reserved;
mod stood;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ec_model::{Doc, InstanceId, Node, NodeId, Resources, Trouble, encode};
use ec_placement_client::{Inventory, PlacementError};
use ec_store::{Compare, Txn};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    held::held_by,
    inventory::{self, Measured},
    parts::Parts,
    storage,
};
pub(crate) use reserved::Reserved;
pub(crate) use stood::Stood;

const DISK: &str = "DISK_GB";

/// What was measured, or why it could not be; and whether the storage of guests' disks was there.
pub(crate) type Capacity = (Result<Measured, String>, bool);

/// How often an agent makes sure that placement still knows its node, and as it is.
const PERIOD: Duration = Duration::from_secs(60);
/// How often it makes sure of what only its own start or an etcd that was put back changes: traits, and whose storage it shares.
const WHOLLY: Duration = Duration::from_secs(600);
/// After so long every replica of placement knows a token: it lists all of them more often.
const HEARD_OF: Duration = Duration::from_secs(20);
/// Between two tries to reach what is not there yet.
pub(crate) const RETRY: Duration = Duration::from_secs(2);

/// Registers, and keeps the registration true until asked to end: a placement that was wiped or restored is told
/// anew, and so is what guests take that it could not count. Fails only where placement refuses for good.
pub(crate) async fn keep_registered(parts: &Parts, stop: CancellationToken) -> Result<(), PlacementError> {
    // What comes from now on is told again.
    let signals = (parts.uncounted.subscribe(), parts.troubles.subscribe());
    let mut told = false;
    let begun = Instant::now();
    // A file system that has never answered is waited for, whatever comes.
    let as_the_node = async || {
        let measured = measure(parts).await?;
        parts.presence.wait().await;
        register(parts, measured).await
    };
    while let Some(registered) = stop.run_until_cancelled(as_the_node()).await {
        let error = match registered {
            Ok(true) => break,
            Ok(false) => continue,
            Err(error) => error,
        };
        // A replica hears of a new token when it hears of it.
        let is_new =
            matches!(error, PlacementError::Denied { status: 401, .. }) && begun.elapsed() < HEARD_OF;
        if !error.is_transient() && !is_new {
            return Err(error);
        }
        parts.registration.down(&error);
        if !told {
            tracing::warn!(%error, "waiting for placement");
            told = true;
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    if stop.is_cancelled() {
        return Ok(());
    }
    parts.registration.up();
    remember(parts).await;
    parts.presence.show();
    // The start is over, and what comes now needs little of its code.
    parts.host.started();
    keep_true(parts, signals, stop).await;
    Ok(())
}

/// What guests take that placement does not count, and what of the host keeps new work away, as they change.
type Signals = (watch::Receiver<BTreeMap<InstanceId, Resources>>, watch::Receiver<Vec<Trouble>>);

/// Keeps what placement was told of the node true, until asked to end.
async fn keep_true(parts: &Parts, (mut uncounted, mut troubles): Signals, stop: CancellationToken) {
    let mut held = parts.presence.subscribe();
    let mut lease = held.borrow_and_update().map(|hold| hold.lease);
    let (mut failed, mut anew) = (false, false);
    let mut introduced = Instant::now();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(if failed { RETRY } else { PERIOD }) => {}
            // The senders live in the parts.
            _ = uncounted.changed() => {}
            _ = troubles.changed() => {}
            _ = held.changed() => {}
        }
        // Another lease may mean that etcd, and placement in it, was emptied or put back.
        if let Some(hold) = *held.borrow()
            && lease.replace(hold.lease) != Some(hold.lease)
        {
            anew = true;
        }
        remember(parts).await;
        // Another agent may be the node by now, with other guests on another host: nothing of this one is to be told as that. An etcd
        // that is merely away changes nothing of who it is.
        if parts.presence.fence().is_none() {
            continue;
        }
        let refreshed = async {
            // Of a placement that does not know the node at all this tells.
            reserve_uncounted(parts).await?;
            // A lease that came back with an older etcd tells nothing.
            if anew || introduced.elapsed() >= WHOLLY {
                introduce(parts).await?;
                set_traits(parts).await?;
                introduced = Instant::now();
            }
            bring_up_to_date(parts, anew).await
        };
        let refreshed = refreshed.await;
        let refreshed = match refreshed {
            Err(PlacementError::NotFound(_)) => match measure(parts).await {
                Ok(measured) => match register(parts, measured).await {
                    Ok(false) => continue,
                    registered => registered.map(drop),
                },
                Err(error) => Err(error),
            },
            other => other,
        };
        match &refreshed {
            Ok(()) => parts.registration.up(),
            Err(error) => parts.registration.down(error),
        }
        if let Err(error) = &refreshed
            && !failed
        {
            tracing::warn!(%error, "failed to tell placement of this node; trying on");
        }
        failed = refreshed.is_err();
        anew &= failed;
    }
}

/// Writes down that there is this node, what it is called, and what trouble its host is in: so much stays known when it is dead.
async fn remember(parts: &Parts) {
    // Who is not the node says nothing of it.
    let Some(fence) = parts.presence.fence() else { return };
    let (key, name) = (parts.settings.keys.node(parts.node), &parts.settings.name);
    let troubles = parts.troubles.borrow().clone();
    let written = async {
        let txn = match parts.store.get(&key).await.map_err(|error| error.to_string())?.0 {
            None => {
                let created_at = parts.host.now();
                let (node, name) = (parts.node, name.clone());
                let node = Node { node, name, created_at, troubles, revoked: false };
                Txn::new().when(Compare::Absent(key.clone())).put(key, encode(&node))
            }
            Some(pair) => {
                let mut doc = Doc::<Node>::decode(&pair.value).map_err(|error| error.to_string())?;
                if doc.record.name == *name && doc.record.troubles == troubles {
                    return Ok(());
                }
                doc.record.name.clone_from(name);
                doc.record.troubles = troubles;
                Txn::new().when(Compare::Unchanged(key.clone(), pair.mod_revision)).put(key, doc.encode())
            }
        };
        // Where somebody was quicker, the next time tells.
        parts.store.txn(txn.when(fence)).await.map(drop).map_err(|error| error.to_string())
    };
    if let Err(error) = written.await {
        tracing::warn!(error, "failed to write this node's record; trying on");
    }
}

/// Sets provider, inventory and traits anew. What was locked by the last end is unlocked by this. Answers whether it was done: not
/// while this agent is not the node, which may have ended while it measured, or waited for its turn to tell.
async fn register(parts: &Parts, (measured, is_there): (Measured, bool)) -> Result<bool, PlacementError> {
    if parts.presence.fence().is_none() {
        return Ok(false);
    }
    introduce(parts).await?;
    reserve_uncounted(parts).await?;
    let mut offers = offered(parts, &measured);
    if !is_there {
        offers.remove(DISK);
    }
    if !tell(parts, &offers).await? {
        return Ok(false);
    }
    let traits = set_traits(parts).await?;
    let (node, name) = (parts.node, &parts.settings.name);
    tracing::info!(%node, name, measured = %serde_json::json!(measured), traits, "registered with placement");
    parts.registered.send_replace(());
    Ok(true)
}

/// Has placement know the node's provider, and whose storage it shares. What is known already is not written.
async fn introduce(parts: &Parts) -> Result<(), PlacementError> {
    parts.placement.ensure_provider(parts.node, &parts.settings.name).await?;
    storage::join(parts).await
}

/// Has placement know what the node can; how many traits that are.
async fn set_traits(parts: &Parts) -> Result<usize, PlacementError> {
    let mut traits: BTreeSet<String> = parts.settings.traits.clone();
    // Not a Linux on x86, or no /proc: then there are no such traits.
    traits.extend(
        std::fs::read_to_string("/proc/cpuinfo").map(|text| inventory::cpu_traits(&text)).unwrap_or_default(),
    );
    parts.placement.set_traits(parts.node, &traits, inventory::is_measured_trait).await?;
    Ok(traits.len())
}

/// What this host has, and whether its storage is there: what lies where that was is not what it is. What does not answer, or
/// cannot be read, is as it was before.
async fn measure(parts: &Parts) -> Result<(Measured, bool), PlacementError> {
    let (measured, is_there) = loop {
        match ask(parts).await {
            Ok(answer) => break answer,
            // Of storage of its own nobody else says anything: all of that is reserved, as it is in trouble.
            Err(Some((before, _))) => break (before, parts.settings.shared.is_none()),
            // Nothing is known of it yet.
            Err(None) => {}
        }
    };
    let mut before = parts.measured.lock().unwrap_or_else(PoisonError::into_inner);
    match (measured, *before) {
        (Ok(measured), _) => {
            *before = Some(measured);
            Ok((measured, is_there))
        }
        (Err(why), Some(before)) => {
            tracing::warn!("{why}; it is told as it was before");
            Ok((before, is_there))
        }
        // What its guests are asked does not wait for that, and that a disk is there is nothing that anybody could tell.
        (Err(why), None) => {
            tracing::warn!("{why}; placement is told of no disk until it can be measured");
            inventory::but_disk().map(|measured| (measured, false)).map_err(PlacementError::Invalid)
        }
    }
}

async fn ask(parts: &Parts) -> Result<Capacity, Option<Capacity>> {
    let settings = parts.settings.clone();
    let look = move || {
        let gone = || storage::check(&settings).err().map(|why| ec_runtime::exit::chain(&why));
        // Before and after: it may go, or come, in between.
        let (was_gone, measured) = (gone(), inventory::measure(&settings));
        match was_gone.or_else(gone) {
            // What lies in the place of its own disks has another size, and of those nobody else says anything.
            Some(why) if settings.shared.is_none() => (Err(why), true),
            gone => (measured, gone.is_none()),
        }
    };
    parts.capacity.ask(&parts.host, look).await
}

/// Has the room of guests reserved that are here and that placement does not count here, before it is offered: one by
/// one they are claimed again, but for those that somebody has counted elsewhere.
pub(crate) async fn reserve_uncounted(parts: &Parts) -> Result<(), PlacementError> {
    let on_node = parts.placement.provider_allocations(parts.node).await?;
    let (records, counted) =
        (Arc::clone(&parts.records), on_node.into_keys().collect::<HashSet<InstanceId>>());
    let listed = parts.host.blocking(move || {
        records.list_but(|instance| counted.contains(&instance)).map(|records| (records, counted))
    });
    let (here, mut counted) = match listed.await {
        Ok(Ok((records, counted))) => (records.into_iter().collect::<HashMap<_, _>>(), counted),
        other => {
            let error = match other {
                Ok(outcome) => outcome.err().map(|error| error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            tracing::warn!(
                error,
                "the node's records cannot be read, so nothing is reserved for their guests"
            );
            return Ok(());
        }
    };
    // Of storage that is shared nothing is reserved, so of what takes of that alone there is nothing to ask.
    let takes_here = |class: &String| parts.settings.shared.is_none() || class != DISK;
    let missed = here.iter().filter_map(|(instance, record)| Some((*instance, record.as_ref()?)));
    let missed = missed.filter(|(_, record)| record.started && record.resources.keys().any(takes_here));
    let mut missed: BTreeMap<_, _> =
        missed.map(|(instance, record)| (instance, record.resources.clone())).collect();
    if let Some(shared) = &parts.settings.shared {
        let counts = [parts.node, shared.storage.provider];
        for (instance, held) in held_by(&parts.placement, missed.keys().copied().collect()).await? {
            let held = held?;
            if counts.iter().any(|provider| held.contains_key(provider)) {
                counted.insert(instance);
                missed.remove(&instance);
            }
        }
    }
    parts.uncounted.send_if_modified(|uncounted| {
        let before = uncounted.len();
        // Of one whose record cannot be read nobody knows better.
        uncounted.retain(|instance, _| here.contains_key(instance) && !counted.contains(instance));
        let mut is_news = uncounted.len() != before;
        for (instance, resources) in missed {
            uncounted.entry(instance).or_insert_with(|| {
                tracing::warn!(%instance, "placement does not count it on this node; as much is reserved");
                is_news = true;
                resources
            });
        }
        is_news
    });
    Ok(())
}

/// Brings the inventory up to date: see [`is_to_tell`].
pub(crate) async fn refresh(parts: &Parts) -> Result<(), PlacementError> {
    bring_up_to_date(parts, false).await
}

/// The same; `anew` where placement may have been put back to another time.
async fn bring_up_to_date(parts: &Parts, anew: bool) -> Result<(), PlacementError> {
    // First, since it may take long, as the wait for its turn may; another may be the node by then.
    let measured = measure(parts).await?;
    let mut stood = parts.telling.lock().await;
    if parts.presence.fence().is_none() {
        return Ok(());
    }
    tell_changes(parts, &mut stood, measured, anew).await
}

/// By who tells alone.
async fn tell_changes(
    parts: &Parts,
    stood: &mut Stood,
    (measured, is_there): (Measured, bool),
    anew: bool,
) -> Result<(), PlacementError> {
    let (mut current, generation) = parts.placement.counted_inventory(parts.node).await?;
    // Noted for good: it may be what is wanted now, and not later.
    for (class, inventory) in stood.come_back(generation, &current) {
        reserved(parts).begin(class, inventory);
    }
    let mut told = reserved(parts).clone();
    let stands = Stood::now(generation, &current, &told);
    let is_shared = parts.settings.shared.is_some();
    if let Some(shared) = &parts.settings.shared {
        // From before its disks lay there: a placement that was put back offers that once more.
        if current.remove(DISK).is_some_and(|disk| disk.reserved < disk.total) {
            let left = drop_own_disk(parts).await?;
            parts.placement.set_inventory(parts.node, &left).await?;
        }
        current.extend(parts.placement.inventory(shared.storage.provider).await?);
    }
    let mut wanted = offered(parts, &measured);
    if !is_there {
        wanted.remove(DISK);
    }
    if is_shared
        && let (Some(current), Some(disk)) = (current.get(DISK), wanted.get(DISK))
        && !reserves_otherwise(DISK, disk, current)
    {
        // Another node of the same storage was quicker to say it, and may be gone when it is to be taken back.
        reserved(parts).stands(DISK, current);
        told.stands(DISK, current);
    }
    let news = News { offers: wanted, told, is_disk_shared: is_shared && !anew };
    let (wanted, is_others) = news.over(&current);
    if wanted.is_empty() {
        reserved(parts).settle(&current);
        *stood = stands;
        return Ok(());
    }
    tracing::info!(amounts = %serde_json::json!(wanted), "what this node has to give has changed");
    // Once more of what stands there when it is written.
    let outcome = tell_over(parts, &wanted, |current| news.over(current).0).await;
    if is_others {
        // Nor later, as if it were this agent's own.
        reserved(parts).forget(DISK, &news.told);
    }
    // Where it failed, what came back is still to be told.
    let generation = outcome?;
    *stood = stands;
    stood.counted(generation);
    Ok(())
}

/// What a node offers, to be told where placement has it otherwise.
struct News {
    offers: BTreeMap<String, Inventory>,
    /// What of them this agent may have reserved.
    told: Reserved,
    /// Others reserve of the disk, too.
    is_disk_shared: bool,
}

impl News {
    /// What of it is to be told where this stands; and whether what is reserved of the disk is others'.
    fn over(&self, current: &BTreeMap<String, Inventory>) -> (BTreeMap<String, Inventory>, bool) {
        let mut wanted = self.offers.clone();
        // What others reserve there is not taken back by who tells that it became smaller.
        let mut is_others = false;
        if self.is_disk_shared
            && let (Some(current), Some(disk)) = (current.get(DISK), wanted.get_mut(DISK))
            && !self.told.is_own(DISK, current)
            && disk.reserved < current.reserved
        {
            disk.reserved = current.reserved.min(disk.total);
            is_others = true;
        }
        wanted.retain(|class, inventory| {
            let is_shared = self.is_disk_shared && class == DISK;
            current.get(class).is_none_or(|current| {
                let is_own = self.told.is_own(class, current);
                is_to_tell(class, inventory, current, is_own, is_shared)
            })
        });
        (wanted, is_others)
    }
}

/// Whether a class is to be told anew: where another amount is reserved, or it is not what the agent registers at its start, as in a
/// placement that was put back to an older time. What an operator locked stays; `is_own`: the agent has reserved what is. What is
/// others' too, each node of a storage would say otherwise where they are not configured alike: there more is reserved than stands
/// there, and only of one's own less; and it is told where the storage became smaller, since what is not there is not to be given out.
fn is_to_tell(class: &str, wanted: &Inventory, current: &Inventory, is_own: bool, is_others: bool) -> bool {
    // Where guests that are not counted take all that there is, this agent has reserved all of it itself.
    if is_all(current) && !is_own {
        return false;
    }
    if is_others {
        let is_less = wanted.total + slack(class, wanted) < current.total;
        let reserves = reserves_otherwise(class, wanted, current);
        return is_less || reserves && (wanted.reserved > current.reserved || is_own);
    }
    reserves_otherwise(class, wanted, current) || is_of_another_kind(class, wanted, current)
}

/// Whether what is reserved is out by more than the disk's breathing: whether there is any of it is told to the last GiB.
fn reserves_otherwise(class: &str, wanted: &Inventory, current: &Inventory) -> bool {
    let slack = u64::from(class == DISK && !is_all(wanted) && !is_all(current));
    current.reserved.abs_diff(wanted.reserved) > slack
}

/// Whether anything but what is reserved differs. How large a file system or a memory is wobbles with some; processors are counted.
fn is_of_another_kind(class: &str, wanted: &Inventory, current: &Inventory) -> bool {
    let slack = slack(class, wanted);
    let differs = |of: fn(&Inventory) -> u64| of(wanted).abs_diff(of(current)) > slack;
    let rest = |of: &Inventory| (of.min_unit, of.step_size, of.allocation_ratio);
    differs(|of| of.total) || differs(|of| of.max_unit) || rest(wanted) != rest(current)
}

fn slack(class: &str, of: &Inventory) -> u64 {
    if class == "VCPU" { 0 } else { (of.total / 100).max(1) }
}

fn is_all(of: &Inventory) -> bool {
    of.reserved >= of.total
}

/// What the node has to give now: of a host in trouble no processor, so that no instance is placed there, and nothing of a disk
/// of its own, so that no volume is. Of storage that is shared others have to give, too.
fn offered(parts: &Parts, measured: &Measured) -> BTreeMap<String, Inventory> {
    let mut offered = inventory::inventory(measured, &parts.settings, &uncounted(parts, None));
    if !parts.troubles.borrow().is_empty() {
        let disk = parts.settings.shared.is_none().then_some(DISK);
        for class in ["VCPU"].into_iter().chain(disk) {
            if let Some(of_class) = offered.get_mut(class) {
                of_class.reserved = of_class.total;
            }
        }
    }
    offered
}

/// Sets these classes, and remembers what of them this agent has reserved. Of storage that is shared the disk is no node's own.
/// Answers whether it was done, as [`register`].
async fn tell(parts: &Parts, inventory: &BTreeMap<String, Inventory>) -> Result<bool, PlacementError> {
    let mut stood = parts.telling.lock().await;
    if parts.presence.fence().is_none() {
        return Ok(false);
    }
    stood.counted(tell_over(parts, inventory, |_| inventory.clone()).await?);
    Ok(true)
}

/// The same of what is chosen of them over what stands there, by who tells alone. Answers what the node's changes are counted up to then.
async fn tell_over(
    parts: &Parts,
    inventory: &BTreeMap<String, Inventory>,
    choose: impl Fn(&BTreeMap<String, Inventory>) -> BTreeMap<String, Inventory>,
) -> Result<u64, PlacementError> {
    // Before: a write whose answer is lost may have been done, and is not to pass for an operator's. Nor is what stands there where it
    // was not.
    inventory.iter().for_each(|(class, inventory)| reserved(parts).begin(class, inventory));
    let counted = write_over(parts, inventory, choose).await?;
    inventory.iter().for_each(|(class, inventory)| reserved(parts).stands(class, inventory));
    Ok(counted)
}

async fn write_over(
    parts: &Parts,
    inventory: &BTreeMap<String, Inventory>,
    choose: impl Fn(&BTreeMap<String, Inventory>) -> BTreeMap<String, Inventory>,
) -> Result<u64, PlacementError> {
    let placement = &parts.placement;
    let over = |current: &BTreeMap<String, Inventory>, is_its: fn(&str) -> bool| {
        let chosen = choose(current).into_iter().filter(|(class, _)| is_its(class));
        current.clone().into_iter().chain(chosen).collect::<BTreeMap<_, _>>()
    };
    let Some(shared) = &parts.settings.shared else {
        return placement.change_inventory(parts.node, |current| over(current, |_| true)).await;
    };
    let mut left = BTreeMap::new();
    if inventory.contains_key(DISK) {
        left = drop_own_disk(parts).await?;
        let of_disk = |current: &BTreeMap<_, _>| over(current, |class| class == DISK);
        placement.change_inventory(shared.storage.provider, of_disk).await?;
    }
    let own = |current: &BTreeMap<_, _>| {
        let own = over(current, |class| class != DISK);
        own.into_iter().chain(left.clone()).collect()
    };
    placement.change_inventory(parts.node, own).await
}

/// Has the node itself offer no disk any more, since its guests' disks lie on storage that it shares; what is to be told of it all the
/// same, where guests have their disks where this node's lay before: that nothing more is offered there.
async fn drop_own_disk(parts: &Parts) -> Result<BTreeMap<String, Inventory>, PlacementError> {
    let (placement, node) = (&parts.placement, parts.node);
    match placement.drop_inventory(node, DISK).await {
        Err(PlacementError::Conflict(_)) => {
            let before = placement.inventory(node).await?.remove(DISK);
            let locked = |before: Inventory| Inventory { reserved: before.total, ..before };
            Ok(before.map(|before| (DISK.to_owned(), locked(before))).into_iter().collect())
        }
        dropped => dropped.map(|()| BTreeMap::new()),
    }
}

fn reserved(parts: &Parts) -> MutexGuard<'_, Reserved> {
    parts.reserved.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Claims for a guest what is kept free for it. That it is no more kept free and that it is claimed is one write: nobody else is given the
/// room in between. Answers nothing while this agent is not the node, and does nothing then.
pub(crate) async fn claim_kept(
    parts: &Parts,
    instance: InstanceId,
    allocations: &BTreeMap<NodeId, Resources>,
    owner: (&str, &str),
) -> Option<Result<(), PlacementError>> {
    let (measured, _) = match measure(parts).await {
        Ok(measured) => measured,
        Err(error) => return Some(Err(error)),
    };
    let _telling = parts.telling.lock().await;
    // Of its guests another agent may know better by now.
    parts.presence.fence()?;
    let kept = |but: Option<InstanceId>| {
        let uncounted = uncounted(parts, but);
        let of_class = |(class, inventory): (String, Inventory)| (class, inventory.reserved);
        let inventory = inventory::inventory(&measured, &parts.settings, &uncounted);
        inventory.into_iter().map(of_class).collect::<BTreeMap<_, _>>()
    };
    let (with, without) = (kept(None), kept(Some(instance)));
    let before = reserved(parts).clone();
    let written: Mutex<BTreeMap<String, Inventory>> = Mutex::default();
    let change = |current: &BTreeMap<String, Inventory>| {
        let mut wanted = current.clone();
        let mut changed = BTreeMap::new();
        for (class, inventory) in &mut wanted {
            let of = |kept: &BTreeMap<String, u64>| kept.get(class).copied().unwrap_or(0);
            // What an operator locked stays so, and is not noted for this agent's own.
            if inventory.reserved < inventory.total || before.is_own(class, inventory) {
                let less = inventory.reserved.saturating_sub(of(&with) - of(&without));
                inventory.reserved = less.max(of(&without)).min(inventory.reserved);
                reserved(parts).begin(class, inventory);
                changed.insert(class.clone(), inventory.clone());
            }
        }
        *written.lock().unwrap_or_else(PoisonError::into_inner) = changed;
        wanted
    };
    let claimed = parts.placement.claim_reserved(instance, allocations, owner, parts.node, change).await;
    if claimed.is_ok() {
        let written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
        written.iter().for_each(|(class, inventory)| reserved(parts).stands(class, inventory));
    }
    Some(claimed)
}

/// What guests take that are here and not counted, by class, but for one. Of storage that is shared each node would have its own opinion.
fn uncounted(parts: &Parts, but: Option<InstanceId>) -> Resources {
    let mut sum = Resources::new();
    for (_, amounts) in parts.uncounted.borrow().iter().filter(|(instance, _)| Some(**instance) != but) {
        for (class, amount) in amounts {
            *sum.entry(class.clone()).or_default() += amount;
        }
    }
    if parts.settings.shared.is_some() {
        sum.remove(DISK);
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use async_trait::async_trait;
    use ec_hypervisor::SimulatedHypervisor;
    use ec_placement_client::{Answer, PlacementClient, Request, Transport};
    use ec_runtime::{Host, config::parse};
    use ec_store::MemoryStore;
    use reqwest::{Method, StatusCode};
    use serde_json::json;

    use super::*;
    use crate::{agent::assemble, alone::Alone, config::Settings};

    #[tokio::test(start_paused = true)]
    async fn who_is_not_the_node_tells_placement_nothing_of_it() {
        let state = tempfile::tempdir().unwrap();
        let alone = Alone::new(state.path()).await;
        let parts = Arc::clone(&alone.parts);
        let (running, stop) = (Arc::clone(&parts), CancellationToken::new());
        let (first, kept) = (CancellationToken::new(), stop.clone());
        tokio::spawn(async move { keep_registered(&running, kept).await });
        let signals = (parts.uncounted.subscribe(), parts.troubles.subscribe());
        let (running, kept) = (Arc::clone(&parts), stop.clone());
        tokio::spawn(async move { keep_true(&running, signals, kept).await });
        let asks = async || {
            let before = alone.asked();
            tokio::time::sleep(PERIOD * 3).await;
            alone.asked() - before
        };
        assert_eq!(asks().await, 0, "it is not known yet whether it is the node");
        let keeper = alone.be_the_node(first.clone());
        assert!(asks().await > 0);
        alone.store.faults().set_reachable(false);
        assert!(asks().await > 0, "it is the node, whatever etcd is");
        alone.store.faults().set_reachable(true);
        asks().await;
        // It is the node when it begins, and not any more when its turn comes.
        let telling = parts.telling.lock().await;
        let (claims, tells, registers) = (Arc::clone(&parts), Arc::clone(&parts), Arc::clone(&parts));
        let claimed = tokio::spawn(async move {
            let (guest, room) = (InstanceId::new(uuid::Uuid::from_u128(1)), BTreeMap::new());
            claim_kept(&claims, guest, &room, ("p", "u")).await
        });
        let told = tokio::spawn(async move { tell(&tells, &BTreeMap::new()).await });
        let refreshed = tokio::spawn(async move { refresh(&registers).await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        first.cancel();
        keeper.await.unwrap();
        assert!(parts.presence.fence().is_none());
        assert_eq!(asks().await, 0, "another may be the node");
        let before = alone.asked();
        drop(telling);
        assert!(claimed.await.unwrap().is_none());
        assert!(!told.await.unwrap().unwrap());
        refreshed.await.unwrap().unwrap();
        // Nor where it is found out while the host is measured.
        assert!(!register(&parts, measure(&parts).await.unwrap()).await.unwrap());
        assert_eq!(alone.asked(), before);
        stop.cancel();
    }

    const THERE: Inventory = Inventory {
        total: 500,
        reserved: 40,
        min_unit: 1,
        max_unit: 500,
        step_size: 1,
        allocation_ratio: 1.0,
    };

    #[test]
    fn what_a_placement_that_was_put_back_has_otherwise_is_told_anew_and_what_wobbles_is_not() {
        let is_told =
            |class, current: Inventory| is_to_tell(class, &THERE, &current, current.reserved == 40, false);
        assert!(!is_told(DISK, THERE));
        assert!(!is_told(DISK, Inventory { reserved: 41, total: 495, max_unit: 495, ..THERE }));
        for current in [
            Inventory { reserved: 42, ..THERE },
            Inventory { total: 400, ..THERE },
            Inventory { max_unit: 400, ..THERE },
            Inventory { min_unit: 2, ..THERE },
            Inventory { step_size: 2, ..THERE },
            Inventory { allocation_ratio: 2.0, ..THERE },
        ] {
            assert!(is_told(DISK, current.clone()), "{current:?}");
        }
        assert!(is_told("VCPU", Inventory { total: 499, ..THERE }));
    }

    /// A generation at which nothing is written.
    const FROZEN: u64 = 50;

    /// A provider's inventory; an operator locks it just before something is written for the first time.
    struct Locked(Mutex<(u64, BTreeMap<String, Inventory>)>);

    #[async_trait]
    impl Transport for Locked {
        async fn exchange(&self, request: Request) -> Result<Answer, String> {
            let mut own = self.0.lock().unwrap();
            if own.0 == 0 && request.method == Method::PUT {
                own.0 = 1;
                own.1.values_mut().for_each(|of| of.reserved = of.total);
            }
            let mut status = StatusCode::OK;
            if let Some(body) = request.body {
                match own.0 != FROZEN && body["resource_provider_generation"] == own.0 {
                    true => *own = (own.0 + 1, serde_json::from_value(body["inventories"].clone()).unwrap()),
                    false => status = StatusCode::CONFLICT,
                }
            }
            let body = json!({"resource_provider_generation": own.0, "inventories": own.1});
            Ok(Answer { status, body: body.to_string().into(), ahead: None })
        }
    }

    /// An agent beside that provider.
    async fn beside(state: &Path, locked: &Arc<Locked>) -> Arc<Parts> {
        ec_runtime::install_tls_provider();
        let text = format!("name: n\nstate_dir: {}\n", state.display());
        let settings = Settings::check(&parse(&text, Path::new("compute.yaml")).unwrap()).unwrap();
        let node = NodeId::new(uuid::Uuid::from_u128(9));
        let placement = PlacementClient::new(&settings.placement).unwrap().over(Arc::clone(locked) as _);
        let (store, hypervisor) = (Arc::new(MemoryStore::new()), Arc::new(SimulatedHypervisor::new(node)));
        assemble(settings, node, store, hypervisor, placement, Host::default()).await.unwrap()
    }

    /// An agent that has looked once beside a provider that has nothing yet.
    async fn looked(state: &Path) -> (Arc<Locked>, Arc<Parts>) {
        let locked = Arc::new(Locked(Mutex::new((40, BTreeMap::new()))));
        let parts = beside(state, &locked).await;
        look(&parts).await;
        (locked, parts)
    }

    /// Its host is in trouble.
    fn trouble(parts: &Parts) {
        let (kind, since, why) = (ec_model::TroubleKind::Disk, parts.host.now(), "full".to_owned());
        parts.troubles.send_replace(vec![Trouble { kind, since, why }]);
    }

    async fn look(parts: &Parts) {
        let measured = measure(parts).await.unwrap();
        tell_changes(parts, &mut *parts.telling.lock().await, measured, false).await.unwrap();
    }

    #[tokio::test]
    async fn a_lock_that_comes_while_it_is_measured_or_written_stays() {
        let state = tempfile::tempdir().unwrap();
        let there = Inventory { total: 1, reserved: 0, max_unit: 1, ..THERE };
        let locked = Arc::new(Locked(Mutex::new((0, [("VCPU".to_owned(), there.clone())].into()))));
        let parts = beside(state.path(), &locked).await;
        // As this agent has told it, on a host with fewer processors.
        let told = BTreeMap::from([("VCPU".to_owned(), there.clone())]);
        told.iter().for_each(|(class, inventory)| reserved(&parts).stands(class, inventory));
        look(&parts).await;
        let all = locked.0.lock().unwrap().1.clone();
        assert_eq!(all["VCPU"], Inventory { reserved: 1, ..there }, "an operator's");
        assert!(all["MEMORY_MB"].total > 0, "of what nobody locked all is told");
        assert!(!reserved(&parts).is_own("VCPU", &all["VCPU"]), "the lock does not pass for its own");
        assert!(reserved(&parts).is_own("VCPU", &told["VCPU"]));
    }

    #[tokio::test]
    async fn what_a_placement_that_was_put_back_has_locked_is_an_operators_where_it_was_before() {
        let state = tempfile::tempdir().unwrap();
        let (locked, parts) = looked(state.path()).await;
        let unlocked = locked.0.lock().unwrap().clone();
        let stands = |class: &str| {
            let stands = &locked.0.lock().unwrap().1[class];
            (stands.reserved, stands.total)
        };
        let own = stands("VCPU");
        // As an agent leaves it at its end, on a host with more processors, and one in trouble.
        let mut ended = (7, unlocked.1.clone());
        for (class, of) in ended.1.iter_mut().filter(|(class, _)| *class != "MEMORY_MB") {
            of.total += u64::from(class == "VCPU");
            of.reserved = of.total;
        }
        locked.0.lock().unwrap().clone_from(&ended);
        look(&parts).await;
        assert_eq!(stands("VCPU"), own, "with its total");
        assert!(stands(DISK).0 < stands(DISK).1);
        // By an operator, while the agent may have been cut off and have a new lease.
        let mut of_an_operator = locked.0.lock().unwrap().clone();
        of_an_operator.0 += 30;
        let vcpu = of_an_operator.1.get_mut("VCPU").unwrap();
        vcpu.reserved = vcpu.total;
        locked.0.lock().unwrap().clone_from(&of_an_operator);
        let all = own.1;
        look(&parts).await;
        assert_eq!(stands("VCPU"), (all, all));
        locked.0.lock().unwrap().clone_from(&ended);
        look(&parts).await;
        assert_eq!(stands("VCPU"), (all + 1, all + 1), "it was locked before");
        assert!(stands(DISK).0 < stands(DISK).1);
        // Who takes it away does so for good.
        let generation = locked.0.lock().unwrap().0;
        *locked.0.lock().unwrap() = (generation + 1, unlocked.1);
        look(&parts).await;
        *locked.0.lock().unwrap() = ended;
        look(&parts).await;
        assert_eq!(stands("VCPU"), own);
    }

    #[tokio::test]
    async fn a_lock_that_came_back_while_it_was_wanted_is_taken_back_later() {
        let state = tempfile::tempdir().unwrap();
        let (locked, parts) = looked(state.path()).await;
        let open = locked.0.lock().unwrap().1.clone();
        // Put back to when its host was in trouble, as it is now.
        let mut ended = (7, open.clone());
        ended.1.values_mut().for_each(|of| of.reserved = of.total);
        locked.0.lock().unwrap().clone_from(&ended);
        trouble(&parts);
        look(&parts).await;
        parts.troubles.send_replace(Vec::new());
        look(&parts).await;
        let vcpu = locked.0.lock().unwrap().1["VCPU"].reserved;
        assert_eq!(vcpu, open["VCPU"].reserved);
    }

    #[tokio::test]
    async fn what_the_agent_locked_is_its_own_although_it_could_not_unlock_it_at_once() {
        let state = tempfile::tempdir().unwrap();
        let (locked, parts) = looked(state.path()).await;
        let open = locked.0.lock().unwrap().1.clone();
        trouble(&parts);
        look(&parts).await;
        let all = locked.0.lock().unwrap().1["VCPU"].clone();
        assert_eq!(all.reserved, all.total);
        parts.troubles.send_replace(Vec::new());
        // Placement takes nothing for a while.
        locked.0.lock().unwrap().0 = FROZEN;
        let measured = measure(&parts).await.unwrap();
        let told = tell_changes(&parts, &mut *parts.telling.lock().await, measured, false).await;
        assert!(told.is_err());
        locked.0.lock().unwrap().0 = 60;
        look(&parts).await;
        assert_eq!(locked.0.lock().unwrap().1["VCPU"].reserved, open["VCPU"].reserved);
    }

    #[test]
    fn what_an_operator_locked_stays_and_what_the_agent_did_does_not() {
        let locked = Inventory { total: 400, reserved: 400, ..THERE };
        assert!(!is_to_tell("VCPU", &THERE, &locked, false, false));
        assert!(is_to_tell("VCPU", &THERE, &locked, true, false));
    }

    #[test]
    fn of_what_others_reserve_too_a_node_takes_back_only_its_own() {
        let is_told =
            |current: Inventory, told| is_to_tell(DISK, &THERE, &current, current.reserved == told, true);
        assert!(is_told(Inventory { reserved: 10, ..THERE }, 40));
        assert!(!is_told(Inventory { reserved: 90, ..THERE }, 40));
        assert!(is_told(Inventory { reserved: 90, ..THERE }, 90));
        assert!(!is_told(Inventory { allocation_ratio: 2.0, ..THERE }, 40), "both would say it in turns");
        assert!(!is_told(Inventory { total: 400, ..THERE }, 40), "who restarts tells that it grew");
        assert!(!is_told(Inventory { total: 505, ..THERE }, 40), "it wobbles");
        assert!(is_told(Inventory { total: 600, ..THERE }, 40), "it is not there any more");
    }
}

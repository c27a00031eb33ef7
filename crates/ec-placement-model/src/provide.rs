//! Providers, what they have, and the names of that.

use std::sync::Arc;

use uuid::Uuid;

use super::{
    command::Outcome,
    draft::{Draft, Key, Record},
    error::ModelError,
    names::{class_order, is_custom, is_standard_class, is_standard_trait},
    records::{Inventories, Inventory, Name, NamedRecord, Provider, Seconds},
};

type Refusable<T> = Result<T, ModelError>;

fn provider(draft: &mut Draft<'_>, uuid: Uuid) -> Refusable<(Arc<Provider>, i64)> {
    draft.provider(uuid).ok_or(ModelError::ProviderNotFound(uuid))
}

pub(super) fn expect_generation(draft: &mut Draft<'_>, uuid: Uuid, given: Option<i64>) -> Refusable<()> {
    let (_, actual) = provider(draft, uuid)?;
    match given {
        Some(given) if given != actual => {
            Err(ModelError::ProviderGeneration { provider: uuid, actual, given })
        }
        _ => Ok(()),
    }
}

/// The provider as it is in the draft.
pub(super) fn shown(draft: &mut Draft<'_>, uuid: Uuid) -> Refusable<Outcome> {
    let (record, generation) = provider(draft, uuid)?;
    let root = ancestors(draft, uuid).last().copied().unwrap_or(uuid);
    Ok(Outcome::Provider { uuid, provider: record, generation, root })
}

/// Those above a provider, from its parent to the top.
fn ancestors(draft: &mut Draft<'_>, uuid: Uuid) -> Vec<Uuid> {
    let mut found = Vec::new();
    let mut at = uuid;
    while let Some(above) = draft.provider(at).and_then(|(record, _)| record.parent) {
        // A loop is only possible in records that were tampered with.
        if found.contains(&above) {
            break;
        }
        found.push(above);
        at = above;
    }
    found
}

fn bears(draft: &mut Draft<'_>, uuid: Uuid, name: &str) -> bool {
    draft.provider(uuid).is_some_and(|(provider, _)| *provider.name == *name)
}

/// Whether a name's key is that of a provider which bears it. One that somebody left behind is nobody's.
fn is_held(draft: &mut Draft<'_>, name: &str) -> bool {
    draft.named(name).is_some_and(|owner| bears(draft, owner, name))
}

/// Whether a provider has a name, also where the name's key was lost. Whoever came to a name within the draft has its key.
fn is_taken(draft: &mut Draft<'_>, name: &str) -> bool {
    let base = draft.base();
    is_held(draft, name) || base.bearers(name).any(|node| bears(draft, node.uuid, name))
}

/// Gives a name up, where its key is the provider's own and not that of another who bears the name, too.
fn give_up_name(draft: &mut Draft<'_>, uuid: Uuid, name: &Name) {
    if draft.named(name) == Some(uuid) {
        draft.put(Key::ProviderName(Arc::clone(name)), None);
    }
}

fn put(draft: &mut Draft<'_>, uuid: Uuid, record: Provider, generation: i64) {
    draft.put(Key::Provider(uuid), Some(Record::Provider(Arc::new(record), generation)));
}

pub(super) fn create(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    name: &str,
    parent: Option<Uuid>,
    now: Seconds,
) -> Refusable<Outcome> {
    let refused = |reason| ModelError::Tree { action: "create", reason };
    if name.is_empty() {
        return Err(refused("name is required"));
    }
    if let Some(parent) = parent {
        if parent == uuid {
            return Err(refused(
                "parent provider UUID cannot be same as UUID. Please set parent provider UUID to None if there is no \
                 parent.",
            ));
        }
        if draft.provider(parent).is_none() {
            return Err(ModelError::no_parent());
        }
    }
    let mut taken = Vec::new();
    if draft.provider(uuid).is_some() {
        taken.push(format!("uuid: {uuid}"));
    }
    if is_taken(draft, name) {
        taken.push(format!("name: {name}"));
    }
    if !taken.is_empty() {
        return Err(ModelError::ProviderExists(taken.join(", ")));
    }
    put(draft, uuid, Provider::new(name, parent, now), 0);
    draft.put(Key::ProviderName(name.into()), Some(Record::ProviderName(uuid)));
    if let Some(parent) = parent {
        // It must not be deleted at this moment.
        draft.touch(Key::Provider(parent));
    }
    shown(draft, uuid)
}

pub(super) fn update(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    name: &str,
    parent: Option<Option<Uuid>>,
    may_move: bool,
    now: Seconds,
) -> Refusable<Outcome> {
    let refused = |reason| ModelError::Tree { action: "update", reason };
    let (before, generation) = provider(draft, uuid)?;
    let mut after = Provider { updated_at: now, ..(*before).clone() };
    match parent {
        Some(Some(parent)) => {
            if draft.provider(parent).is_none() {
                return Err(ModelError::no_parent());
            }
            if before.parent.is_some_and(|old| old != parent) && !may_move {
                return Err(refused("re-parenting a provider is not currently allowed."));
            }
            if parent == uuid || ancestors(draft, parent).contains(&uuid) {
                return Err(refused("creating loop in the provider tree is not allowed."));
            }
            after.parent = Some(parent);
            draft.touch(Key::Provider(parent));
        }
        Some(None) => {
            if before.parent.is_some() && !may_move {
                return Err(refused("un-parenting a provider is not currently allowed."));
            }
            after.parent = None;
        }
        None => {}
    }
    if *name != *before.name {
        if is_taken(draft, name) {
            return Err(ModelError::ProviderExists(name.to_owned()));
        }
        give_up_name(draft, uuid, &before.name);
        draft.put(Key::ProviderName(name.into()), Some(Record::ProviderName(uuid)));
        after.name = name.into();
    } else if !is_held(draft, name) {
        draft.put(Key::ProviderName(name.into()), Some(Record::ProviderName(uuid)));
    }
    put(draft, uuid, after, generation);
    shown(draft, uuid)
}

pub(super) fn delete(draft: &mut Draft<'_>, uuid: Uuid) -> Refusable<Outcome> {
    let (record, _) = provider(draft, uuid)?;
    if draft.has_children(uuid) {
        return Err(ModelError::ProviderHasChildren);
    }
    if draft.is_used(uuid) {
        return Err(ModelError::ProviderInUse);
    }
    draft.need_all_providers();
    draft.need_all_use();
    draft.put(Key::Provider(uuid), None);
    give_up_name(draft, uuid, &record.name);
    Ok(Outcome::Done)
}

/// Replaces all inventories and counts the generation up.
pub(super) fn set_inventories(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    mut inventories: Inventories,
    now: Seconds,
) -> Refusable<()> {
    let (before, generation) = provider(draft, uuid)?;
    for (class, _) in &inventories {
        if before.inventory(class).is_none() {
            take_up_class(draft, class)?;
        }
    }
    let mut gone: Vec<&str> = before
        .inventories
        .iter()
        .filter(|(class, _)| inventories.iter().all(|(own, _)| own != class) && draft.used(uuid, class) != 0)
        .map(|(class, _)| &**class)
        .collect();
    if !gone.is_empty() {
        gone.sort_by_key(|class| class_order(class));
        return Err(ModelError::InventoryInUse { classes: gone.join(", "), provider: uuid });
    }
    if before.inventories.iter().any(|(class, _)| inventories.iter().all(|(own, _)| own != class)) {
        draft.need_all_use();
    }
    inventories.sort_by(|a, b| a.0.cmp(&b.0));
    put(draft, uuid, Provider { inventories, updated_at: now, ..(*before).clone() }, generation + 1);
    Ok(())
}

/// The class must be there, and stay until the write.
fn take_up_class(draft: &mut Draft<'_>, class: &Name) -> Refusable<()> {
    if !draft.has_class(class) {
        return Err(ModelError::ClassNotFound(class.to_string()));
    }
    if !is_standard_class(class) {
        draft.touch(Key::Class(Arc::clone(class)));
    }
    Ok(())
}

pub(super) fn add_inventory(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    class: &Name,
    inventory: &Inventory,
    now: Seconds,
) -> Refusable<Outcome> {
    let (before, _) = provider(draft, uuid)?;
    take_up_class(draft, class)?;
    if before.inventory(class).is_some() {
        return Err(ModelError::InventoryExists);
    }
    let mut inventories = before.inventories.clone();
    inventories.push((Arc::clone(class), inventory.clone()));
    set_inventories(draft, uuid, inventories, now)?;
    shown(draft, uuid)
}

pub(super) fn update_inventory(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    generation: i64,
    class: &Name,
    inventory: &Inventory,
    now: Seconds,
) -> Refusable<Outcome> {
    expect_generation(draft, uuid, Some(generation))?;
    let (before, _) = provider(draft, uuid)?;
    let mut inventories = before.inventories.clone();
    match inventories.iter_mut().find(|(own, _)| own == class) {
        Some((_, own)) => *own = inventory.clone(),
        None if draft.has_class(class) => return Err(ModelError::InventoryNotFound(class.to_string())),
        None => return Err(ModelError::ClassNotFound(class.to_string())),
    }
    set_inventories(draft, uuid, inventories, now)?;
    shown(draft, uuid)
}

pub(super) fn delete_inventory(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    class: &Name,
    now: Seconds,
) -> Refusable<Outcome> {
    let (before, _) = provider(draft, uuid)?;
    if before.inventory(class).is_none() {
        return Err(if draft.has_class(class) {
            ModelError::InventoryNotFound(class.to_string())
        } else {
            ModelError::ClassNotFound(class.to_string())
        });
    }
    let left = before.inventories.iter().filter(|(own, _)| own != class).cloned().collect();
    set_inventories(draft, uuid, left, now)?;
    Ok(Outcome::Done)
}

pub(super) fn set_aggregates(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    generation: Option<i64>,
    aggregates: &[Uuid],
    now: Seconds,
) -> Refusable<Outcome> {
    expect_generation(draft, uuid, generation)?;
    let (before, counted) = provider(draft, uuid)?;
    let mut aggregates = aggregates.to_vec();
    aggregates.sort_unstable();
    aggregates.dedup();
    let after = Provider { aggregates, updated_at: now, ..(*before).clone() };
    put(draft, uuid, after, counted + i64::from(generation.is_some()));
    shown(draft, uuid)
}

pub(super) fn set_traits(
    draft: &mut Draft<'_>,
    uuid: Uuid,
    generation: Option<i64>,
    traits: &[Name],
    now: Seconds,
) -> Refusable<Outcome> {
    expect_generation(draft, uuid, generation)?;
    let (before, counted) = provider(draft, uuid)?;
    let mut traits = traits.to_vec();
    traits.sort_unstable();
    traits.dedup();
    // What it has is there, and stays while it has it: a transaction has no room for a look at each.
    let new = traits.iter().filter(|name| !before.has_trait(name));
    let unknown: Vec<&str> = new.filter(|name| !draft.has_trait(name)).map(|name| &**name).collect();
    if !unknown.is_empty() {
        return Err(ModelError::TraitsNotFound(unknown.join(", ")));
    }
    if traits != before.traits {
        for name in traits.iter().filter(|name| !is_standard_trait(name) && !before.has_trait(name)) {
            // It must not be deleted at this moment.
            draft.touch(Key::Trait(Arc::clone(name)));
        }
        put(draft, uuid, Provider { traits, updated_at: now, ..(*before).clone() }, counted + 1);
    }
    shown(draft, uuid)
}

pub(super) fn ensure_trait(draft: &mut Draft<'_>, name: &Name, now: Seconds) -> Refusable<Outcome> {
    if let Some(Record::Trait(record)) = draft.get(Key::Trait(Arc::clone(name))) {
        return Ok(Outcome::Ensured { created: false, created_at: record.created_at });
    }
    draft.put(Key::Trait(Arc::clone(name)), Some(Record::Trait(NamedRecord::new(now))));
    Ok(Outcome::Ensured { created: true, created_at: now })
}

pub(super) fn delete_trait(draft: &mut Draft<'_>, name: &Name) -> Refusable<Outcome> {
    if !draft.has_trait(name) {
        return Err(ModelError::TraitNotFound(name.to_string()));
    }
    if !is_custom(name) {
        return Err(ModelError::TraitIsStandard(name.to_string()));
    }
    if draft.trait_is_used(name) {
        return Err(ModelError::TraitInUse(name.to_string()));
    }
    draft.need_all_providers();
    draft.put(Key::Trait(Arc::clone(name)), None);
    Ok(Outcome::Done)
}

pub(super) fn create_class(draft: &mut Draft<'_>, name: &Name, now: Seconds) -> Refusable<Outcome> {
    match ensure_class(draft, name, now)? {
        Outcome::Ensured { created: false, .. } => Err(ModelError::ClassExists(name.to_string())),
        made => Ok(made),
    }
}

pub(super) fn ensure_class(draft: &mut Draft<'_>, name: &Name, now: Seconds) -> Refusable<Outcome> {
    if is_standard_class(name) {
        return Ok(Outcome::Ensured { created: false, created_at: 0 });
    }
    if let Some(Record::Class(record)) = draft.get(Key::Class(Arc::clone(name))) {
        return Ok(Outcome::Ensured { created: false, created_at: record.created_at });
    }
    draft.put(Key::Class(Arc::clone(name)), Some(Record::Class(NamedRecord::new(now))));
    Ok(Outcome::Ensured { created: true, created_at: now })
}

pub(super) fn delete_class(draft: &mut Draft<'_>, name: &Name) -> Refusable<Outcome> {
    if !draft.has_class(name) {
        return Err(ModelError::ClassNotFound(name.to_string()));
    }
    if !is_custom(name) {
        return Err(ModelError::ClassIsStandard(name.to_string()));
    }
    if draft.class_is_used(name) {
        return Err(ModelError::ClassInUse(name.to_string()));
    }
    draft.need_all_providers();
    draft.put(Key::Class(Arc::clone(name)), None);
    Ok(Outcome::Done)
}

/// Records hold names, so every one that holds this name is written again.
pub(super) fn rename_class(
    draft: &mut Draft<'_>,
    from: &Name,
    to: &Name,
    now: Seconds,
) -> Refusable<Outcome> {
    if !draft.has_class(from) {
        return Err(ModelError::ClassNotFound(from.to_string()));
    }
    if !is_custom(from) {
        return Err(ModelError::ClassKeepsName(from.to_string()));
    }
    if from == to {
        return Ok(Outcome::Done);
    }
    if draft.has_class(to) {
        return Err(ModelError::ClassExists(to.to_string()));
    }
    draft.need_all_providers();
    draft.need_all_use();
    let renamed = |name: &Name| if name == from { Arc::clone(to) } else { Arc::clone(name) };
    let (providers, consumers) = draft.holders_of(from);
    for uuid in providers {
        let (before, generation) = provider(draft, uuid)?;
        let mut inventories: Vec<_> =
            before.inventories.iter().map(|(class, inventory)| (renamed(class), inventory.clone())).collect();
        inventories.sort_by(|a, b| a.0.cmp(&b.0));
        put(draft, uuid, Provider { inventories, updated_at: now, ..(*before).clone() }, generation);
    }
    for uuid in consumers {
        let Some(before) = draft.consumer(uuid) else { continue };
        let mut after = (*before).clone();
        for (_, amounts) in &mut after.allocations {
            for (class, _) in amounts.iter_mut() {
                *class = renamed(class);
            }
            amounts.sort_by(|a, b| a.0.cmp(&b.0));
        }
        draft.put(Key::Consumer(uuid), Some(Record::Consumer(Arc::new(after))));
    }
    draft.put(Key::Class(Arc::clone(from)), None);
    draft.put(Key::Class(Arc::clone(to)), Some(Record::Class(NamedRecord::new(now))));
    Ok(Outcome::Done)
}

//! What somebody may change who may not change everything: an agent, whose credentials lie on its host, or who speaks for one
//! project.

use uuid::Uuid;

use super::{
    SHARING,
    allocate::ConsumerWrite,
    command::{Command, Scope},
    draft::Draft,
    error::ModelError,
    records::Name,
};

/// Refuses what concerns more than `own`.
pub(super) fn check(draft: &mut Draft<'_>, own: &Scope, command: &Command) -> Result<(), ModelError> {
    let allowed = match own {
        Scope::Provider(provider) => of_provider(draft, *provider, command),
        Scope::Project(project) => of_project(draft, project, command),
    };
    if allowed { Ok(()) } else { Err(ModelError::NotYours(own.clone())) }
}

/// Of consumers of the project, and of those that are to be, what they use may be changed, and nothing else.
fn of_project(draft: &mut Draft<'_>, own: &Name, command: &Command) -> bool {
    let mut is_ours = |consumer: Uuid| draft.consumer(consumer).map(|there| there.project == *own);
    match command {
        Command::SetAllocations(consumers) => consumers.iter().all(|write| {
            // Of whom no owner is said is nobody's then: that is only taken of one that goes.
            let ours = is_ours(write.uuid);
            let stays = match &write.owner {
                Some((project, _)) => project == own,
                None => write.allocations.is_empty() && ours.is_some(),
            };
            stays && ours != Some(false)
        }),
        Command::DeleteAllocations(consumer) => is_ours(*consumer) != Some(false),
        _ => false,
    }
}

/// Of the provider and what is used of it.
///
/// Its inventories, traits and name may be changed, but not its place: neither its parent, which it cannot leave either, nor its
/// aggregates, by which it would offer, or be offered, what is another's; and it cannot begin to share with those it has. A consumer may be changed that uses `own` or that nobody has; what it
/// uses of others beside may become less, and no more.
///
/// What shares with it, by an aggregate that only others may change (storage that its host has mounted), is its own as far as
/// inventories go and what is used of that alone.
fn of_provider(draft: &mut Draft<'_>, own: Uuid, command: &Command) -> bool {
    match command {
        Command::CreateProvider { uuid, parent: None, .. }
        | Command::UpdateProvider { uuid, parent: None, .. }
        | Command::DeleteProvider(uuid) => *uuid == own,
        Command::UpdateProvider { uuid, parent: Some(None), .. } => {
            *uuid == own && draft.provider(own).is_none_or(|(there, _)| there.parent.is_none())
        }
        Command::AddInventory { provider, .. }
        | Command::UpdateInventory { provider, .. }
        | Command::SetInventories { provider, .. }
        | Command::DeleteInventory { provider, .. } => is_own(draft, own, *provider),
        Command::SetTraits { provider, traits, .. } => {
            *provider == own && (!traits.iter().any(|name| **name == *SHARING) || shares(draft, own))
        }
        // A name that everybody may use, and that changes nothing of anybody.
        Command::EnsureTrait(_) => true,
        Command::SetAllocations(consumers) => consumers.iter().all(|write| may_set(draft, own, write)),
        Command::Reshape { inventories, consumers } => {
            inventories.iter().all(|(provider, ..)| is_own(draft, own, *provider))
                && consumers.iter().all(|write| may_set(draft, own, write))
        }
        Command::DeleteAllocations(consumer) => is_here(draft, own, *consumer),
        Command::CreateProvider { .. }
        | Command::UpdateProvider { .. }
        | Command::SetAggregates { .. }
        | Command::DeleteTrait(_)
        | Command::CreateClass(_)
        | Command::EnsureClass(_)
        | Command::RenameClass { .. }
        | Command::DeleteClass(_)
        | Command::Within { .. } => false,
    }
}

/// Whether the provider shares what it has with those of its aggregates.
fn shares(draft: &mut Draft<'_>, provider: Uuid) -> bool {
    draft.provider(provider).is_some_and(|(there, _)| there.has_trait(SHARING))
}

/// Whether the provider is `own`, or shares with it.
fn is_own(draft: &mut Draft<'_>, own: Uuid, provider: Uuid) -> bool {
    if provider == own {
        return true;
    }
    let (Some((provider, _)), Some((own, _))) = (draft.provider(provider), draft.provider(own)) else {
        return false;
    };
    let is_shared = |aggregate: &Uuid| own.aggregates.contains(aggregate);
    provider.has_trait(SHARING) && provider.aggregates.iter().any(is_shared)
}

/// Whether the consumer uses `own`, or only what shares with it, or nothing that is known of.
fn is_here(draft: &mut Draft<'_>, own: Uuid, consumer: Uuid) -> bool {
    let Some(there) = draft.consumer(consumer) else { return true };
    let mut providers = there.allocations.iter().map(|(provider, _)| *provider);
    providers.clone().any(|provider| provider == own)
        || providers.all(|provider| is_own(draft, own, provider))
}

fn may_set(draft: &mut Draft<'_>, own: Uuid, write: &ConsumerWrite) -> bool {
    let there = draft.consumer(write.uuid);
    let had = |provider: &Uuid, class: &Name| {
        let amounts = there.iter().flat_map(|consumer| &consumer.allocations);
        amount(amounts.filter(|(of, _)| of == provider).flat_map(|(_, amounts)| amounts), class)
    };
    is_here(draft, own, write.uuid)
        && write.allocations.iter().all(|(provider, amounts)| {
            is_own(draft, own, *provider)
                || amounts.iter().all(|(class, amount)| *amount <= had(provider, class))
        })
}

fn amount<'a>(mut amounts: impl Iterator<Item = &'a (Name, i64)>, class: &Name) -> i64 {
    amounts.find(|(of, _)| of == class).map_or(0, |(_, amount)| *amount)
}

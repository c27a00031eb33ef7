//! What somebody may change who speaks for one provider only: an agent, whose credentials lie on its host.

use uuid::Uuid;

use super::{allocate::ConsumerWrite, command::Command, draft::Draft, error::ModelError, records::Name};

/// Refuses what concerns more than the provider `own` and what is used of it.
///
/// Its inventories, traits and name may be changed, but not its place: neither its parent nor its aggregates, by which it
/// would offer, or be offered, what is another's. A consumer may be changed that uses `own` or that nobody has; what it
/// uses of others beside (shared storage) may become less, and no more.
pub(super) fn check(draft: &mut Draft<'_>, own: Uuid, command: &Command) -> Result<(), ModelError> {
    let allowed = match command {
        Command::CreateProvider { uuid, parent: None, .. }
        | Command::UpdateProvider { uuid, parent: None | Some(None), .. }
        | Command::DeleteProvider(uuid) => *uuid == own,
        Command::AddInventory { provider, .. }
        | Command::UpdateInventory { provider, .. }
        | Command::SetInventories { provider, .. }
        | Command::DeleteInventory { provider, .. }
        | Command::SetTraits { provider, .. } => *provider == own,
        // A name that everybody may use, and that changes nothing of anybody.
        Command::EnsureTrait(_) => true,
        Command::SetAllocations(consumers) => consumers.iter().all(|write| may_set(draft, own, write)),
        Command::DeleteAllocations(consumer) => is_here(draft, own, *consumer),
        Command::CreateProvider { .. }
        | Command::UpdateProvider { .. }
        | Command::SetAggregates { .. }
        | Command::DeleteTrait(_)
        | Command::CreateClass(_)
        | Command::EnsureClass(_)
        | Command::RenameClass { .. }
        | Command::DeleteClass(_)
        | Command::Reshape { .. }
        | Command::Within { .. } => false,
    };
    if allowed { Ok(()) } else { Err(ModelError::NotYours(own)) }
}

/// Whether the consumer uses `own`, or nothing that is known of.
fn is_here(draft: &mut Draft<'_>, own: Uuid, consumer: Uuid) -> bool {
    draft
        .consumer(consumer)
        .is_none_or(|there| there.allocations.iter().any(|(provider, _)| *provider == own))
}

fn may_set(draft: &mut Draft<'_>, own: Uuid, write: &ConsumerWrite) -> bool {
    let there = draft.consumer(write.uuid);
    let had = |provider: &Uuid, class: &Name| {
        let amounts = there.iter().flat_map(|consumer| &consumer.allocations);
        amount(amounts.filter(|(of, _)| of == provider).flat_map(|(_, amounts)| amounts), class)
    };
    is_here(draft, own, write.uuid)
        && write
            .allocations
            .iter()
            .filter(|(provider, _)| *provider != own)
            .all(|(provider, amounts)| amounts.iter().all(|(class, amount)| *amount <= had(provider, class)))
}

fn amount<'a>(mut amounts: impl Iterator<Item = &'a (Name, i64)>, class: &Name) -> i64 {
    amounts.find(|(of, _)| of == class).map_or(0, |(_, amount)| *amount)
}

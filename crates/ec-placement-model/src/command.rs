//! Everything that may be done, and what comes of it.

use std::{fmt, sync::Arc};

use uuid::Uuid;

use super::{
    allocate::{self, ConsumerWrite},
    draft::Draft,
    error::ModelError,
    provide,
    records::{Inventories, Inventory, Name, Provider, Seconds},
    within,
};

/// A change that somebody asks for.
#[derive(Debug, Clone)]
pub enum Command {
    /// A new provider.
    CreateProvider {
        /// Its uuid.
        uuid: Uuid,
        /// Its name.
        name: String,
        /// The provider above it.
        parent: Option<Uuid>,
    },
    /// Another name or place for a provider.
    UpdateProvider {
        /// Which.
        uuid: Uuid,
        /// Its name from now on.
        name: String,
        /// The provider above it from now on; none: as it is.
        parent: Option<Option<Uuid>>,
        /// Whether it may leave the parent that it has (microversion 1.37).
        may_move: bool,
    },
    /// A provider goes.
    DeleteProvider(Uuid),
    /// Inventory of one more class.
    AddInventory {
        /// Whose.
        provider: Uuid,
        /// Of what.
        class: Name,
        /// The inventory.
        inventory: Inventory,
    },
    /// Other inventory of one class.
    UpdateInventory {
        /// Whose.
        provider: Uuid,
        /// The generation that the client saw.
        generation: i64,
        /// Of what.
        class: Name,
        /// The inventory.
        inventory: Inventory,
    },
    /// These inventories and no others.
    SetInventories {
        /// Whose.
        provider: Uuid,
        /// The generation that the client saw; none: whichever.
        generation: Option<i64>,
        /// By class.
        inventories: Inventories,
    },
    /// Inventory of one class goes.
    DeleteInventory {
        /// Whose.
        provider: Uuid,
        /// Of what.
        class: Name,
    },
    /// These aggregates and no others.
    SetAggregates {
        /// Whose.
        provider: Uuid,
        /// The generation that the client saw; none: whichever, and it is not counted up (below 1.19).
        generation: Option<i64>,
        /// The aggregates.
        aggregates: Vec<Uuid>,
    },
    /// These traits and no others.
    SetTraits {
        /// Whose.
        provider: Uuid,
        /// The generation that the client saw; none: whichever.
        generation: Option<i64>,
        /// The traits.
        traits: Vec<Name>,
    },
    /// A trait is to be there.
    EnsureTrait(Name),
    /// A trait goes.
    DeleteTrait(Name),
    /// A new resource class.
    CreateClass(Name),
    /// A resource class is to be there.
    EnsureClass(Name),
    /// Another name for a resource class (before 1.7).
    RenameClass {
        /// As it is called now.
        from: Name,
        /// As it is to be called.
        to: Name,
    },
    /// A resource class goes.
    DeleteClass(Name),
    /// These allocations and no others, for each of these consumers.
    SetAllocations(Vec<ConsumerWrite>),
    /// A consumer goes, with all its allocations.
    DeleteAllocations(Uuid),
    /// Inventories and allocations move together.
    Reshape {
        /// Provider, the generation that the client saw, and all its inventories.
        inventories: Vec<(Uuid, i64, Inventories)>,
        /// The allocations of these consumers.
        consumers: Vec<ConsumerWrite>,
    },
    /// What is asked for by somebody who may not change everything.
    Within {
        /// What they may change.
        own: Scope,
        /// What is asked for.
        command: Box<Command>,
    },
}

/// What somebody may change who may not change everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// One provider, and what is used of it.
    Provider(Uuid),
    /// What consumers of one project use.
    Project(Name),
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Provider(uuid) => write!(f, "resource provider {uuid}, and what is used of it,"),
            Self::Project(name) => write!(f, "what consumers of project {name} use"),
        }
    }
}

/// What came of a command.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Outcome {
    /// It was done.
    #[default]
    Done,
    /// It is there; made now, or there before.
    Ensured {
        /// Whether it was made now.
        created: bool,
        /// When it was made.
        created_at: Seconds,
    },
    /// The provider as it is now.
    Provider {
        /// Its uuid.
        uuid: Uuid,
        /// Its record.
        provider: Arc<Provider>,
        /// Its generation.
        generation: i64,
        /// The top of its tree.
        root: Uuid,
    },
}

/// Carries a command out on a draft. Refused, it leaves the draft as it was.
///
/// # Errors
/// Why it is refused.
pub fn decide(draft: &mut Draft<'_>, command: &Command, now: Seconds) -> Result<Outcome, ModelError> {
    let before = draft.savepoint();
    draft.take_trouble();
    let result = dispatch(draft, command, now);
    // Whatever was decided: it stands on a record of which nothing is known, its revision neither. So no comparison of
    // it would hold, and those that are written together with it would never be.
    if let Some(why) = draft.take_trouble() {
        draft.forget(before);
        return Err(ModelError::Unreadable(why));
    }
    if result.is_err() {
        draft.roll_back(before);
    }
    result
}

fn dispatch(draft: &mut Draft<'_>, command: &Command, now: Seconds) -> Result<Outcome, ModelError> {
    match command {
        Command::CreateProvider { uuid, name, parent } => provide::create(draft, *uuid, name, *parent, now),
        Command::UpdateProvider { uuid, name, parent, may_move } => {
            provide::update(draft, *uuid, name, *parent, *may_move, now)
        }
        Command::DeleteProvider(uuid) => provide::delete(draft, *uuid),
        Command::AddInventory { provider, class, inventory } => {
            provide::add_inventory(draft, *provider, class, inventory, now)
        }
        Command::UpdateInventory { provider, generation, class, inventory } => {
            provide::update_inventory(draft, *provider, *generation, class, inventory, now)
        }
        Command::SetInventories { provider, generation, inventories } => {
            provide::expect_generation(draft, *provider, *generation)?;
            provide::set_inventories(draft, *provider, inventories.clone(), now)?;
            provide::shown(draft, *provider)
        }
        Command::DeleteInventory { provider, class } => {
            provide::delete_inventory(draft, *provider, class, now)
        }
        Command::SetAggregates { provider, generation, aggregates } => {
            provide::set_aggregates(draft, *provider, *generation, aggregates, now)
        }
        Command::SetTraits { provider, generation, traits } => {
            provide::set_traits(draft, *provider, *generation, traits, now)
        }
        Command::EnsureTrait(name) => provide::ensure_trait(draft, name, now),
        Command::DeleteTrait(name) => provide::delete_trait(draft, name),
        Command::CreateClass(name) => provide::create_class(draft, name, now),
        Command::EnsureClass(name) => provide::ensure_class(draft, name, now),
        Command::RenameClass { from, to } => provide::rename_class(draft, from, to, now),
        Command::DeleteClass(name) => provide::delete_class(draft, name),
        Command::SetAllocations(consumers) => {
            allocate::set(draft, consumers, now)?;
            Ok(Outcome::Done)
        }
        Command::DeleteAllocations(consumer) => allocate::delete(draft, *consumer),
        Command::Reshape { inventories, consumers } => {
            for (provider, generation, _) in inventories {
                provide::expect_generation(draft, *provider, Some(*generation))?;
            }
            // What moves must fit at both ends: for the time being there is everything of before and after.
            for (provider, _, after) in inventories.iter().filter(|(_, _, after)| !after.is_empty()) {
                let (record, _) = draft.provider(*provider).ok_or(ModelError::ProviderNotFound(*provider))?;
                let mut both = after.clone();
                both.extend(
                    record
                        .inventories
                        .iter()
                        .filter(|(class, _)| after.iter().all(|(own, _)| own != class))
                        .cloned(),
                );
                provide::set_inventories(draft, *provider, both, now)?;
            }
            allocate::set(draft, consumers, now)?;
            for (provider, _, after) in inventories {
                provide::set_inventories(draft, *provider, after.clone(), now)?;
            }
            Ok(Outcome::Done)
        }
        Command::Within { own, command } => {
            within::check(draft, own, command)?;
            dispatch(draft, command, now)
        }
    }
}

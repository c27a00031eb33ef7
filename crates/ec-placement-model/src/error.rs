//! Why a command is refused. The texts are upstream's, as far as clients and their tests look at them.

use uuid::Uuid;

use crate::command::Scope;

/// Why a command is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// No such provider.
    #[error("No resource provider with uuid {0} found")]
    ProviderNotFound(Uuid),
    /// Allocations name a provider that is not there.
    #[error("Allocation for resource provider '{0}' that does not exist.")]
    AllocationProviderNotFound(Uuid),
    /// One consumer is to have two sets of allocations at once.
    #[error("Consumer {0} is in the request more than once.")]
    ConsumerTwice(Uuid),
    /// The command concerns a record that cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// No such resource class.
    #[error("No such resource class {0}.")]
    ClassNotFound(String),
    /// No such traits.
    #[error("No such trait(s): {0}.")]
    TraitNotFound(String),
    /// Traits that a provider is to have are not there.
    #[error("No such trait {0}")]
    TraitsNotFound(String),
    /// The provider has no inventory of the class, to change or to delete.
    #[error("No inventory of class {0} found")]
    InventoryNotFound(String),
    /// There is such an inventory already.
    #[error("Another thread concurrently updated the data. Please retry your update")]
    InventoryExists,
    /// A provider's generation is another.
    #[error(
        "resource provider generation conflict for provider {provider}: actual: {actual}, given: {given}"
    )]
    ProviderGeneration {
        /// Whose.
        provider: Uuid,
        /// What it is.
        actual: i64,
        /// What the command said.
        given: i64,
    },
    /// A consumer's generation is another.
    #[error("consumer generation conflict - expected {expected} but got {given}")]
    ConsumerGeneration {
        /// What it is; `null` where there is no such consumer.
        expected: String,
        /// What the command said.
        given: String,
    },
    /// Inventory that is used cannot go.
    #[error("Inventory for '{classes}' on resource provider '{provider}' in use.")]
    InventoryInUse {
        /// Which.
        classes: String,
        /// Whose.
        provider: Uuid,
    },
    /// There is nothing to allocate there.
    #[error("Inventory for '{classes}' on resource provider '{providers}' invalid.")]
    NoInventory {
        /// Of what.
        classes: String,
        /// Where.
        providers: String,
    },
    /// There is not enough left.
    #[error(
        "Unable to create allocation for '{class}' on resource provider '{provider}'. \
         The requested amount would exceed the capacity."
    )]
    CapacityExceeded {
        /// Of what.
        class: String,
        /// Where.
        provider: Uuid,
    },
    /// An amount is not one that the inventory allows.
    #[error(
        "Unable to create allocation for '{class}' on resource provider '{provider}'. \
         The requested amount would violate inventory constraints."
    )]
    ConstraintsViolated {
        /// Of what.
        class: String,
        /// Where.
        provider: Uuid,
    },
    /// Nobody has such allocations.
    #[error("No allocations for consumer '{0}'")]
    ConsumerNotFound(Uuid),
    /// A name or uuid that another provider has.
    #[error("Conflicting resource provider {0} already exists.")]
    ProviderExists(String),
    /// What a provider's place in its tree cannot be.
    #[error("Object action {action} failed because: {reason}")]
    Tree {
        /// What was tried.
        action: &'static str,
        /// Why it cannot be.
        reason: &'static str,
    },
    /// A provider with allocations cannot go.
    #[error("Resource provider has allocations.")]
    ProviderInUse,
    /// A provider with children cannot go.
    #[error("It has child resource providers.")]
    ProviderHasChildren,
    /// A standard trait cannot go.
    #[error("Cannot delete standard trait {0}.")]
    TraitIsStandard(String),
    /// A trait that a provider has cannot go.
    #[error("The trait {0} is in use by a resource provider.")]
    TraitInUse(String),
    /// A standard class cannot go.
    #[error("Cannot delete standard resource class {0}.")]
    ClassIsStandard(String),
    /// A standard class keeps its name.
    #[error("Cannot update standard resource class {0}")]
    ClassKeepsName(String),
    /// A class with inventory cannot go.
    #[error("Cannot delete resource class {0}. Class is in use in inventory.")]
    ClassInUse(String),
    /// There is such a class already.
    #[error("Resource class {0} already exists.")]
    ClassExists(String),
    /// It concerns more than whoever asks may change.
    #[error("Only {0} may be changed with this token.")]
    NotYours(Scope),
}

impl ModelError {
    /// There is no provider under which one is to be put. So it is told of an update, too, as upstream does.
    pub fn no_parent() -> Self {
        Self::Tree { action: "create", reason: "parent provider UUID does not exist." }
    }
}

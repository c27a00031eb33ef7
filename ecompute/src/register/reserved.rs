//! What of each class this agent has reserved, from which what an operator reserved is told.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_client::Inventory;

/// The amounts that may stand in placement by this agent's hand, by class: what was written last, and what was to be written since where
/// nobody knows whether it was. A write that failed leaves what stood before, which is its own still.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reserved(BTreeMap<String, BTreeSet<u64>>);

impl Reserved {
    /// This is about to be written, and may be, whatever is answered.
    pub(super) fn begin(&mut self, class: &str, inventory: &Inventory) {
        self.0.entry(class.to_owned()).or_default().insert(inventory.reserved);
    }

    /// This is what stands there.
    pub(super) fn stands(&mut self, class: &str, inventory: &Inventory) {
        self.0.insert(class.to_owned(), BTreeSet::from([inventory.reserved]));
    }

    /// Whether this agent may have reserved that.
    pub(super) fn is_own(&self, class: &str, inventory: &Inventory) -> bool {
        self.0.get(class).is_some_and(|amounts| amounts.contains(&inventory.reserved))
    }

    /// Of a class it is as it was there.
    pub(super) fn forget(&mut self, class: &str, before: &Self) {
        self.0.remove(class);
        self.0.extend(before.0.get(class).map(|amounts| (class.to_owned(), amounts.clone())));
    }
}

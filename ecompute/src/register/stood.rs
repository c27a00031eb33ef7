//! How the node stood in placement when this agent looked last, by which a placement that was put back is told.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_client::Inventory;

use super::{Reserved, is_all};

/// How the node stood when it was looked at, or told of, last.
#[derive(Debug, Default)]
pub(crate) struct Stood {
    /// What its provider's changes were counted up to, at least.
    generation: u64,
    /// The classes that an operator had locked.
    locked: BTreeSet<String>,
}

impl Stood {
    /// The classes that are locked, and were not before placement was put back: as this agent itself, or one before it, left them in
    /// the time to which that was, at its end or in trouble. Nobody else would unlock them. Nothing counts changes down but such a
    /// placement; a lease that is new tells less, since an operator may lock a node whose agent was cut off for a while.
    pub(super) fn come_back<'a>(
        &'a self,
        generation: u64,
        current: &'a BTreeMap<String, Inventory>,
    ) -> impl Iterator<Item = (&'a String, &'a Inventory)> {
        let was_put_back = generation < self.generation;
        let is_back = move |class: &str, stands: &Inventory| is_all(stands) && !self.locked.contains(class);
        current.iter().filter(move |(class, stands)| was_put_back && is_back(class, stands))
    }

    /// How it stands now. `told` is what this agent may have reserved: other locks are operators'.
    pub(super) fn now(generation: u64, current: &BTreeMap<String, Inventory>, told: &Reserved) -> Self {
        let is_others =
            |(class, stands): &(&String, &Inventory)| is_all(stands) && !told.is_own(class, stands);
        let locked = current.iter().filter(is_others).map(|(class, _)| class.clone()).collect();
        Self { generation, locked }
    }

    /// It was told, which is counted.
    pub(super) fn counted(&mut self, generation: u64) {
        self.generation = generation;
    }
}

//! What of each class this agent has reserved, from which what an operator reserved is told.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_placement_client::Inventory;
use tokio::time::Instant;

/// After so long nothing arrives any more of which nobody heard.
const DOUBT: Duration = Duration::from_secs(120);

/// The amounts that may stand in placement by this agent's hand, by class: what was written last, and what was to be written since where
/// nobody knows whether it was. A write that failed leaves what stood before, which is its own still.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reserved {
    amounts: BTreeMap<String, BTreeSet<u64>>,
    /// When something was to be written last.
    begun: Option<Instant>,
}

impl Reserved {
    /// This is about to be written, and may be, whatever is answered.
    pub(super) fn begin(&mut self, class: &str, inventory: &Inventory) {
        self.amounts.entry(class.to_owned()).or_default().insert(inventory.reserved);
        self.begun = Some(Instant::now());
    }

    /// This is what stands there.
    pub(super) fn stands(&mut self, class: &str, inventory: &Inventory) {
        self.amounts.insert(class.to_owned(), BTreeSet::from([inventory.reserved]));
    }

    /// Whether this agent may have reserved that.
    pub(super) fn is_own(&self, class: &str, inventory: &Inventory) -> bool {
        self.amounts.get(class).is_some_and(|amounts| amounts.contains(&inventory.reserved))
    }

    /// Of a class it is as it was there.
    pub(super) fn forget(&mut self, class: &str, before: &Self) {
        self.amounts.remove(class);
        self.amounts.extend(before.amounts.get(class).map(|amounts| (class.to_owned(), amounts.clone())));
    }

    /// This stands there and is as it is to be: once nothing is on its way any more, no other amount is its own.
    pub(super) fn settle(&mut self, current: &BTreeMap<String, Inventory>) {
        if self.begun.is_none_or(|begun| begun.elapsed() <= DOUBT) {
            return;
        }
        for (class, inventory) in current {
            if self.is_own(class, inventory) {
                self.stands(class, inventory);
            }
        }
        self.begun = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_to_be_written_is_its_own_until_what_stands_there_settles_that() {
        let of = |reserved| Inventory {
            total: 2,
            reserved,
            min_unit: 1,
            max_unit: 2,
            step_size: 1,
            allocation_ratio: 1.0,
        };
        let mut told = Reserved::default();
        told.stands("VCPU", &of(2));
        told.begin("VCPU", &of(0));
        let is_own = |told: &Reserved| [0, 1, 2].map(|reserved| told.is_own("VCPU", &of(reserved)));
        let stands = BTreeMap::from([("VCPU".to_owned(), of(0))]);
        told.settle(&stands);
        assert_eq!(is_own(&told), [true, false, true], "it may be on its way still");
        tokio::time::sleep(DOUBT * 2).await;
        told.settle(&BTreeMap::from([("VCPU".to_owned(), of(1))]));
        assert_eq!(is_own(&told), [true, false, true], "somebody else's tells nothing");
        told.begin("VCPU", &of(0));
        tokio::time::sleep(DOUBT * 2).await;
        told.settle(&stands);
        assert_eq!(is_own(&told), [true, false, false], "a lock is an operator's from now on");
    }
}

//! Looks at what is stored: whether it fits together, and whether anything came to be used beyond capacity.

use std::collections::HashMap;

use ec_placement_model::{Name, State, check::check};
use ec_store::MemoryStore;
use placement::store::{Keys, Model};
use uuid::Uuid;

/// The state that a store's content stands for, read without the store's faults.
pub(crate) fn decode(store: &MemoryStore, keys: &Keys) -> State {
    let mut state = State::default();
    for pair in store.content(keys.prefix().as_str()).pairs {
        if keys.prefix().common(&pair.key).is_none() {
            let Some(changes) = keys.read(&pair).into_changes() else {
                unreachable!("{} is not ours", pair.key)
            };
            state.apply(changes);
        }
    }
    state
}

/// By provider and class.
type Amounts = HashMap<(Uuid, Name), i64>;

/// What was seen so far.
#[derive(Default)]
pub(crate) struct Audit {
    used: Amounts,
    findings: Vec<String>,
}

impl Audit {
    /// Begins with this content, whatever it is.
    pub(crate) fn of(store: &MemoryStore, keys: &Keys) -> Self {
        let mut audit = Self::default();
        audit.look(store, keys);
        audit.findings.clear();
        audit
    }

    pub(crate) fn findings(&self) -> &[String] {
        &self.findings
    }

    pub(crate) fn found(&mut self, finding: String) {
        self.findings.push(finding);
    }

    /// Looks at the content after one transaction more.
    pub(crate) fn look(&mut self, store: &MemoryStore, keys: &Keys) {
        let state = decode(store, keys);
        self.findings.extend(check(&state));
        let before = std::mem::take(&mut self.used);
        for (_, node) in state.providers() {
            for (class, inventory) in &node.provider.as_ref().unwrap().inventories {
                let key = (node.uuid, class.clone());
                let (used, capacity) = (node.used(class), inventory.capacity());
                // An inventory may be made smaller under its users; they may not be given more then.
                if used > capacity && used > before.get(&key).copied().unwrap_or(0) {
                    self.findings.push(format!("{used} of {capacity} {class} are used at {}", node.uuid));
                }
                self.used.insert(key, used);
            }
        }
    }
}

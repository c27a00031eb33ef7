//! Addresses: whose are looked for, and which of those found are written when.

use std::collections::BTreeMap;

use ec_model::{Address, InstanceId, State};

use super::{Command, Engine, Known, Now, Setup, Work};
use crate::{Wanted, status::merge};

/// Whose addresses are looked for. Both in the order of their ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// Guests that have none yet, or not yet one for each interface: looked for all the time.
    pub waiting: Vec<InstanceId>,
    /// Guests that have theirs, which may change: looked for now and then.
    pub known: Vec<InstanceId>,
}

/// What a search found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Those among the looked at that had no address yet, or not all of them.
    pub waiting: Vec<InstanceId>,
    /// The addresses, by instance.
    pub addresses: BTreeMap<InstanceId, Vec<Address>>,
}

impl Engine {
    /// Tells whose addresses are to be looked for, where that has changed.
    pub(super) fn search_for(&mut self) {
        let mut search = Search::default();
        for (instance, known) in &self.known {
            match waits(known, &self.setup, self.now) {
                Some(true) => search.waiting.push(*instance),
                Some(false) => search.known.push(*instance),
                None => {}
            }
        }
        if self.search != search {
            self.search = search.clone();
            self.commands.push(Command::Search(search));
        }
    }

    pub(super) fn found(&mut self, found: Found) {
        for instance in found.waiting {
            let Some(known) = self.known.get_mut(&instance) else { continue };
            let in_vain = known.status.known().is_some_and(|status| status.ip.is_none())
                && found.addresses.get(&instance).is_none_or(Vec::is_empty);
            if in_vain && known.searched_in_vain(self.setup.limits.address, self.now) {
                self.consider(instance);
                self.search_again = true;
            }
        }
        for (instance, addresses) in found.addresses {
            let news = self.known.get(&instance).and_then(|known| to_write(known, addresses));
            if let Some(addresses) = news {
                self.begin(instance, Work::Addresses(addresses), "its addresses are known".into());
            }
        }
    }
}

/// Whether a guest's addresses are waited for, or only kept up to date; nothing where neither is.
fn waits(known: &Known, setup: &Setup, now: Now) -> Option<bool> {
    let status = known.status.known()?;
    if !known.runs() || !(known.wanted() == Wanted::Active || status.state == State::Unclaimed) {
        return None;
    }
    let limit = setup.limits.address;
    // Nobody may ever ask for an address on the second interface's network: not waited for endlessly.
    let fresh =
        status.started_at.is_some_and(|started| now.stamp.duration_since(started).unsigned_abs() < limit);
    let complete = (0..setup.nics).all(|nic| status.addresses.iter().any(|address| address.nic == nic));
    // Who was looked for in vain long enough is looked for on, but not all the time.
    Some((status.ip.is_none() && known.searched() < limit) || (fresh && !complete))
}

/// The addresses to write of a guest of which these were found; nothing where there is nothing new, or where it is
/// not one that is up.
fn to_write(known: &Known, found: Vec<Address>) -> Option<Vec<Address>> {
    let status = known.status.known().filter(|_| !found.is_empty())?;
    let is_up = match status.state {
        State::Starting | State::Active => known.wanted() == Wanted::Active && status.started_at.is_some(),
        State::Unclaimed => known.wanted() == Wanted::Nothing,
        _ => false,
    };
    let merged = merge(&status.addresses, found);
    let news = status.ip.is_none() || merged != status.addresses;
    let certain = known.runs() && !known.is_unseen() && known.busy.is_none();
    (is_up && certain && news).then_some(merged)
}

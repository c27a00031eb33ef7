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
        // What is not asked for may be, by a request that is not listed yet.
        if !self.listed {
            return;
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
        State::Starting | State::Active | State::Rescued => {
            // That it was started for the last wish is told first: whoever sees it up before starts it once more.
            known.wanted() == Wanted::Active && status.started_at.is_some() && !known.power().pending
        }
        State::Unclaimed => known.wanted() == Wanted::Nothing,
        _ => false,
    };
    let merged = merge(&status.addresses, found);
    let news = status.ip.is_none() || merged != status.addresses;
    let certain = known.runs() && !known.is_unseen() && known.busy.is_none();
    (is_up && certain && news).then_some(merged)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use ec_model::{AddressSource, Desired, NodeId, Observed, PowerWish, Request, RunState, Status};
    use jiff::Timestamp;

    use super::*;
    use crate::{
        Limits,
        engine::{
            Change, Requested, StatusEntry,
            known::Busy,
            tests::{one, requested},
        },
        status::{Order, Subject, announced, started},
    };

    const LIMIT: Duration = Duration::from_secs(300);

    fn address(nic: u8, ip: &str) -> Address {
        Address { ip: ip.parse().unwrap(), mac: one().mac(nic), nic, source: AddressSource::Lease }
    }

    fn at(seconds: i64) -> Now {
        let stamp = Timestamp::from_second(seconds).unwrap();
        Now { since_start: Duration::from_secs(seconds.unsigned_abs()), stamp }
    }

    fn setup(nics: u8) -> Setup {
        Setup { limits: Limits { address: LIMIT, grace: Duration::ZERO }, nics }
    }

    /// A guest that was started at 0 and has these addresses.
    fn guest(state: State, desired: Option<Desired>, addresses: &[Address]) -> Known {
        let subject = Subject {
            instance: one(),
            node: NodeId::new(uuid::Uuid::from_u128(9)),
            name: None,
            kept: None,
            order: Some(Order {
                kind: ec_model::Workload::Machine,
                epoch: 1,
                generation: 1,
                power_generation: 1,
                runs: true,
            }),
            why: String::new(),
        };
        let begun = started(&subject, None, Timestamp::UNIX_EPOCH);
        let status = announced(&subject, Some(&begun), state, None, Timestamp::UNIX_EPOCH);
        let ip = addresses.first().map(|address| address.ip);
        let status = Status { ip, addresses: addresses.to_vec(), ..status };
        let mut known = Known::default();
        known.request = desired.map(requested);
        known.status = StatusEntry::Known(Box::new(status), 1);
        known.observe(
            Observed { domain: Some(RunState::Running), volume: true, ..Observed::default() },
            at(0),
        );
        known
    }

    #[test]
    fn addresses_are_looked_for_of_guests_that_run_and_are_wanted_or_unclaimed() {
        let has = [address(0, "192.0.2.1")];
        let (active, destroyed) = (Some(Desired::Active), Some(Desired::Destroyed));
        let cases = [
            (State::Starting, active, &[][..], Some(true)),
            (State::Active, active, &has[..], Some(false)),
            (State::Unclaimed, None, &[], Some(true)),
            (State::Unclaimed, None, &has, Some(false)),
            (State::Active, None, &has, None),
            (State::Active, destroyed, &has, None),
            (State::Starting, destroyed, &[], None),
        ];
        for (state, desired, addresses, expected) in cases {
            let known = guest(state, desired, addresses);
            assert_eq!(waits(&known, &setup(1), at(1)), expected, "{state:?} {desired:?}");
            let mut ended = guest(state, desired, addresses);
            ended.observe(Observed::default(), at(0));
            assert_eq!(waits(&ended, &setup(1), at(1)), None, "{state:?} {desired:?}");
        }
        assert_eq!(waits(&Known::default(), &setup(1), at(1)), None);
    }

    #[test]
    fn a_first_address_is_waited_for_by_time_looked_and_others_by_time_since_the_start() {
        let first = [address(0, "192.0.2.1")];
        let waits_for = |addresses: &[Address], searched: i64, now: i64| {
            let mut known = guest(State::Active, Some(Desired::Active), addresses);
            for second in 0..=searched {
                known.searched_in_vain(LIMIT, at(second));
            }
            waits(&known, &setup(2), at(now)).unwrap()
        };
        assert!(waits_for(&first, 0, 299), "the second interface's");
        assert!(!waits_for(&first, 0, 300) && !waits_for(&first, 0, 1000), "not endlessly");
        let both = [first[0].clone(), address(1, "198.51.100.1")];
        assert!(!waits_for(&both, 0, 1));
        assert!(waits_for(&[], 299, 1000), "the first, however long ago it was started");
        assert!(!waits_for(&[], 300, 1000) && !waits_for(&[], 301, 1000));
        assert!(waits_for(&[], 300, 299), "it has not been up for so long");
    }

    #[test]
    fn what_is_found_is_written_of_guests_that_are_up_where_it_is_news_and_nobody_else_is_at_it() {
        let has = [address(0, "192.0.2.1")];
        let other = || vec![address(0, "192.0.2.2")];
        let (active, destroyed) = (Some(Desired::Active), Some(Desired::Destroyed));
        let cases = [
            (State::Starting, active, &[][..], other(), true),
            (State::Active, active, &has[..], other(), true),
            (State::Active, active, &has, has.to_vec(), false),
            (State::Starting, active, &[], vec![], false),
            (State::Unclaimed, None, &[], other(), true),
            (State::Unclaimed, active, &[], other(), false),
            (State::Starting, None, &[], other(), false),
            (State::Active, destroyed, &has, other(), false),
            (State::Error, active, &[], other(), false),
        ];
        for (state, desired, addresses, found, written) in cases {
            let known = guest(state, desired, addresses);
            let expected = written.then(|| found.clone());
            assert_eq!(to_write(&known, found), expected, "{state:?} {desired:?} {addresses:?}");
        }
        let starting = || guest(State::Starting, active, &[]);
        let mut unseen = starting();
        unseen.learn(Change::Observed(Err("blind".to_owned())), at(0));
        let mut ended = starting();
        ended.observe(Observed::default(), at(0));
        let mut busy = starting();
        busy.busy = Some(Busy::Asking);
        let mut unstarted = starting();
        if let StatusEntry::Known(status, _) = &mut unstarted.status {
            status.started_at = None;
        }
        // It was started for a wish of which that is not told yet.
        let mut unnoted = starting();
        let request = unnoted.readable().unwrap().clone();
        let power = PowerWish { generation: 2, ..PowerWish::default() };
        let record = Ok(Arc::new(Request { power, ..request }));
        unnoted.request = Some(Requested { record, revision: 1 });
        for known in [unseen, ended, busy, unstarted, unnoted, Known::default()] {
            assert_eq!(to_write(&known, other()), None, "{known:?}");
        }
        // One that was told before the address was, say by a release before this one.
        let mut told = guest(State::Active, active, &has);
        if let StatusEntry::Known(status, _) = &mut told.status {
            status.ip = None;
        }
        assert_eq!(to_write(&told, has.to_vec()), Some(has.to_vec()));
    }
}

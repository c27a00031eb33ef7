//! Who uses what: the writes that must never go over capacity.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use uuid::Uuid;

use super::{
    command::Outcome,
    draft::{Draft, Key, Record},
    error::ModelError,
    names::is_standard_class,
    records::{Amounts, Consumer, Name, Provider, Seconds, intern},
};

/// Project and user of consumers written by clients that do not say them (before 1.8).
const UNKNOWN_OWNER: &str = "00000000-0000-0000-0000-000000000000";

/// What the client knows of a consumer's generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedGeneration {
    /// Nothing (before 1.28).
    Any,
    /// This one; `None`: there must be no such consumer.
    Exactly(Option<i64>),
}

/// All that one consumer is to use.
#[derive(Debug, Clone)]
pub struct ConsumerWrite {
    /// Which consumer.
    pub uuid: Uuid,
    /// What the client knows of it.
    pub generation: ExpectedGeneration,
    /// Whose it is: project and user.
    pub owner: Option<(Name, Name)>,
    /// What kind it is; none where the client knows no kinds (before 1.38).
    pub consumer_type: Option<Name>,
    /// By provider; empty: nothing any more.
    pub allocations: Vec<(Uuid, Amounts)>,
}

/// One amount that a consumer is to have. 0 where it is to have no more.
struct Wanted {
    provider: Uuid,
    class: Name,
    amount: i64,
}

pub(super) fn set(draft: &mut Draft<'_>, writes: &[ConsumerWrite], now: Seconds) -> Result<(), ModelError> {
    let mut consumers = BTreeSet::new();
    for write in writes {
        // Its old use would be given free twice, and the new one counted once.
        if !consumers.insert(write.uuid) {
            return Err(ModelError::ConsumerTwice(write.uuid));
        }
        expect_generation(draft, write)?;
    }
    let mut records: BTreeMap<Uuid, (Arc<Provider>, i64)> = BTreeMap::new();
    let mut wanted = Vec::new();
    // What is used of what they want, before, and without what these consumers use now.
    let mut previous: BTreeMap<(Uuid, Name), i64> = BTreeMap::new();
    let mut others: BTreeMap<(Uuid, Name), i64> = BTreeMap::new();
    for write in writes {
        let old = draft.consumer(write.uuid);
        let old = old.as_ref().map_or(&[][..], |consumer| consumer.allocations.as_slice());
        let (new, keep) =
            if write.allocations.is_empty() { (old, 0) } else { (write.allocations.as_slice(), 1) };
        for (uuid, amounts) in new {
            let record = draft.provider(*uuid).ok_or(ModelError::AllocationProviderNotFound(*uuid))?;
            records.insert(*uuid, record);
            for (class, amount) in amounts {
                wanted.push(Wanted { provider: *uuid, class: Arc::clone(class), amount: amount * keep });
            }
        }
    }
    if wanted.iter().any(|one| one.amount > 0) {
        draft.need_all_use();
    }
    for one in &wanted {
        let known = is_standard_class(&one.class)
            || records.get(&one.provider).is_some_and(|(record, _)| record.inventory(&one.class).is_some());
        if !known && !draft.has_class(&one.class) {
            return Err(ModelError::ClassNotFound(one.class.to_string()));
        }
        let used = draft.used(one.provider, &one.class);
        previous.insert((one.provider, Arc::clone(&one.class)), used);
        others.insert((one.provider, Arc::clone(&one.class)), used);
    }
    for write in writes {
        for (uuid, amounts) in draft.consumer(write.uuid).iter().flat_map(|consumer| &consumer.allocations) {
            for (class, amount) in amounts {
                if let Some(used) = others.get_mut(&(*uuid, Arc::clone(class))) {
                    *used -= amount;
                }
            }
        }
    }
    check_capacity(&records, &wanted, &previous, &others)?;
    for (uuid, (record, generation)) in records {
        draft.put(Key::Provider(uuid), Some(Record::Provider(record, generation + 1)));
    }
    for write in writes {
        put_consumer(draft, write, now);
    }
    Ok(())
}

fn expect_generation(draft: &mut Draft<'_>, write: &ConsumerWrite) -> Result<(), ModelError> {
    let ExpectedGeneration::Exactly(given) = write.generation else { return Ok(()) };
    let actual = draft.consumer(write.uuid).map(|consumer| consumer.generation);
    if given == actual {
        return Ok(());
    }
    // As upstream words it: what is there in Python's words, what is not there in JSON's.
    let number =
        |value: Option<i64>, none: &str| value.map_or_else(|| none.to_owned(), |value| value.to_string());
    Err(ModelError::ConsumerGeneration { expected: number(actual, "null"), given: number(given, "None") })
}

fn check_capacity(
    records: &BTreeMap<Uuid, (Arc<Provider>, i64)>,
    wanted: &[Wanted],
    previous: &BTreeMap<(Uuid, Name), i64>,
    others: &BTreeMap<(Uuid, Name), i64>,
) -> Result<(), ModelError> {
    let mut classes: Vec<&str> = wanted.iter().map(|one| &*one.class).collect();
    classes.sort_unstable();
    classes.dedup();
    let without: Vec<String> = records
        .iter()
        .filter(|(_, (record, _))| classes.iter().all(|class| record.inventory(class).is_none()))
        .map(|(uuid, _)| uuid.to_string())
        .collect();
    if !without.is_empty() {
        return Err(ModelError::NoInventory { classes: classes.join(", "), providers: without.join(", ") });
    }
    let mut sums: BTreeMap<(Uuid, &Name), i64> = BTreeMap::new();
    for one in wanted.iter().filter(|one| one.amount > 0) {
        let sum = sums.entry((one.provider, &one.class)).or_default();
        *sum = sum.saturating_add(one.amount);
        let inventory = records.get(&one.provider).and_then(|(record, _)| record.inventory(&one.class));
        let Some(inventory) = inventory else {
            return Err(ModelError::NoInventory {
                classes: one.class.to_string(),
                providers: one.provider.to_string(),
            });
        };
        if !inventory.admits(one.amount) {
            return Err(ModelError::ConstraintsViolated {
                class: one.class.to_string(),
                provider: one.provider,
            });
        }
        let key = (one.provider, Arc::clone(&one.class));
        let used = others.get(&key).copied().unwrap_or(0).saturating_add(*sum);
        // Who uses too much already may go on with less.
        if used > inventory.capacity() && used > previous.get(&key).copied().unwrap_or(0) {
            return Err(ModelError::CapacityExceeded {
                class: one.class.to_string(),
                provider: one.provider,
            });
        }
    }
    Ok(())
}

fn put_consumer(draft: &mut Draft<'_>, write: &ConsumerWrite, now: Seconds) {
    let before = draft.consumer(write.uuid);
    if write.allocations.is_empty() {
        if before.is_some() {
            draft.put(Key::Consumer(write.uuid), None);
        }
        return;
    }
    let (project, user) =
        write.owner.clone().unwrap_or_else(|| (intern(UNKNOWN_OWNER), intern(UNKNOWN_OWNER)));
    let consumer_type = write.consumer_type.clone().or_else(|| before.as_ref()?.consumer_type.clone());
    let mut after = Consumer::new(project, user, consumer_type, now);
    after.generation = before.map_or(0, |before| before.generation) + 1;
    after.allocations = write.allocations.clone();
    for (_, amounts) in &mut after.allocations {
        amounts.sort_by(|a, b| a.0.cmp(&b.0));
    }
    draft.put(Key::Consumer(write.uuid), Some(Record::Consumer(Arc::new(after))));
}

pub(super) fn delete(draft: &mut Draft<'_>, uuid: Uuid) -> Result<Outcome, ModelError> {
    if draft.consumer(uuid).is_none() {
        return Err(ModelError::ConsumerNotFound(uuid));
    }
    draft.put(Key::Consumer(uuid), None);
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Change, Command, Inventory, State, Stored, command::decide};

    const CAPACITY: i64 = 8;
    const HOSTS: u128 = 3;

    fn host(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    /// Consumer, and what it wants of each host.
    type Wish = (u128, Vec<(u128, i64)>);

    fn wish() -> impl Strategy<Value = Wish> {
        (100..104_u128, prop::collection::vec((0..HOSTS, 1..8_i64), 0..3))
    }

    fn write((consumer, wanted): &Wish) -> ConsumerWrite {
        let mut allocations: Vec<(Uuid, Amounts)> = Vec::new();
        for (number, amount) in wanted {
            allocations.retain(|(own, _)| *own != host(*number));
            allocations.push((host(*number), vec![(intern("VCPU"), *amount)]));
        }
        ConsumerWrite {
            uuid: Uuid::from_u128(*consumer),
            generation: ExpectedGeneration::Any,
            owner: None,
            consumer_type: None,
            allocations,
        }
    }

    fn empty() -> State {
        let mut state = State::default();
        for number in 0..HOSTS {
            let mut provider = Provider::new(&format!("h{number}"), None, 0);
            let inventory = Inventory { total: CAPACITY, ..Inventory::default() };
            provider.inventories = vec![(intern("VCPU"), inventory)];
            state.apply([
                Change::Provider(host(number), Some(Arc::new(provider))),
                Change::Generation(host(number), Some(Stored { record: 0, revision: 1 })),
            ]);
        }
        state
    }

    proptest! {
        /// Documents in which consumers stand once or several times, one after the other: nothing is ever used
        /// beyond capacity, whatever the order, and whoever stands twice gets nothing.
        #[test]
        fn nothing_is_over_capacity_however_often_a_consumer_is_named(
            documents in prop::collection::vec(prop::collection::vec(wish(), 1..5), 1..12),
        ) {
            let state = empty();
            let mut draft = Draft::new(&state);
            for document in &documents {
                let writes: Vec<ConsumerWrite> = document.iter().map(write).collect();
                let distinct: BTreeSet<Uuid> = writes.iter().map(|write| write.uuid).collect();
                let twice = distinct.len() < writes.len();
                let outcome = decide(&mut draft, &Command::SetAllocations(writes), 0);
                prop_assert_eq!(matches!(outcome, Err(ModelError::ConsumerTwice(_))), twice);
                for number in 0..HOSTS {
                    let used = draft.used(host(number), &intern("VCPU"));
                    prop_assert!((0..=CAPACITY).contains(&used), "{} of {}", used, CAPACITY);
                }
            }
        }
    }
}

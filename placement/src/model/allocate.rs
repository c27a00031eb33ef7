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

//! A state with changes on top that are not written yet: what commands are decided on, one after the other,
//! until they go to the store together.
//!
//! It remembers which records were looked at. The write holds only if none of them has changed meanwhile,
//! so a decision made here is as good as one made at the moment of the write.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use uuid::Uuid;

use super::{
    left::left_behind,
    names::{is_standard_class, is_standard_trait},
    records::{Consumer, Name, NamedRecord, Provider, intern},
    state::{Change, State, Stored},
};

/// What a record is of. A provider's record and generation are one here.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A provider with its generation.
    Provider(Uuid),
    /// A consumer.
    Consumer(Uuid),
    /// Whose name it is.
    ProviderName(Name),
    /// A trait that a user made.
    Trait(Name),
    /// A resource class that a user made.
    Class(Name),
}

/// Which of the records of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The only one; of a provider its own.
    Record,
    /// A provider's generation.
    Generation,
}

/// The record of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// A provider with its generation.
    Provider(Arc<Provider>, i64),
    /// A consumer.
    Consumer(Arc<Consumer>),
    /// Whose name it is.
    ProviderName(Uuid),
    /// A trait that a user made.
    Trait(NamedRecord),
    /// A resource class that a user made.
    Class(NamedRecord),
}

impl Record {
    /// Whether it has inventory of a class, or uses some.
    fn holds(&self, class: &Name) -> bool {
        match self {
            Self::Provider(provider, _) => provider.inventory(class).is_some(),
            Self::Consumer(consumer) => {
                consumer.allocations.iter().flat_map(|(_, amounts)| amounts).any(|(own, _)| own == class)
            }
            _ => false,
        }
    }
}

/// See the module.
pub struct Draft<'a> {
    base: &'a State,
    written: HashMap<Key, Option<Record>>,
    /// Every record looked at or written, with its revision in the base; 0: it was not there.
    seen: BTreeMap<Key, i64>,
    /// What each write replaced, to take it back.
    undo: Vec<(Key, Option<Option<Record>>)>,
    /// The keys of `seen` in their order, to forget them.
    looks: Vec<Key>,
    /// Why a record cannot be read that was looked at since the last [`Draft::take_trouble`].
    trouble: Option<String>,
    // What the changes add to the indexes of the base.
    used: HashMap<(Uuid, Name), i64>,
    children: HashMap<Uuid, i64>,
    trait_users: HashMap<Name, i64>,
    class_users: HashMap<Name, i64>,
}

/// A place to go back to.
#[derive(Debug, Clone, Copy)]
pub struct Savepoint {
    writes: usize,
    looks: usize,
}

impl<'a> Draft<'a> {
    /// No changes yet.
    pub fn new(base: &'a State) -> Self {
        Self {
            base,
            written: HashMap::new(),
            seen: BTreeMap::new(),
            undo: Vec::new(),
            looks: Vec::new(),
            trouble: None,
            used: HashMap::new(),
            children: HashMap::new(),
            trait_users: HashMap::new(),
            class_users: HashMap::new(),
        }
    }

    /// What it stands on.
    pub fn base(&self) -> &'a State {
        self.base
    }

    /// Every record that decisions stand on, with its revision in the base; 0: it must not be there.
    pub fn seen(&self) -> &BTreeMap<Key, i64> {
        &self.seen
    }

    /// The records that were looked at since, and by no earlier decision.
    pub fn seen_since(&self, savepoint: Savepoint) -> impl Iterator<Item = &Key> {
        self.looks.iter().skip(savepoint.looks)
    }

    /// Every change, in no order.
    pub fn changes(&self) -> impl ExactSizeIterator<Item = (&Key, &Option<Record>)> {
        self.written.iter()
    }

    /// What the changes are once they are written, at whichever revision [`Change::written_at`] is told.
    pub fn written(&self) -> Vec<Change> {
        fn stored<T>(record: T) -> Option<Stored<T>> {
            Some(Stored { record, revision: 0 })
        }
        let mut written = Vec::with_capacity(self.written.len());
        for (key, record) in &self.written {
            match (key, record) {
                (Key::Provider(uuid), Some(Record::Provider(provider, generation))) => {
                    if !self.is_base_record(uuid, provider) {
                        written.push(Change::Provider(*uuid, Some(Arc::clone(provider))));
                    }
                    written.push(Change::Generation(*uuid, stored(*generation)));
                }
                (Key::Provider(uuid), _) => {
                    written.extend([Change::Provider(*uuid, None), Change::Generation(*uuid, None)]);
                }
                (Key::Consumer(uuid), record) => written.push(Change::Consumer(
                    *uuid,
                    match record {
                        Some(Record::Consumer(consumer)) => stored(Arc::clone(consumer)),
                        _ => None,
                    },
                )),
                (Key::ProviderName(name), record) => written.push(Change::ProviderName(
                    Arc::clone(name),
                    match record {
                        Some(Record::ProviderName(uuid)) => stored(*uuid),
                        _ => None,
                    },
                )),
                (Key::Trait(name), record) => written.push(Change::Trait(
                    Arc::clone(name),
                    match record {
                        Some(Record::Trait(record)) => stored(record.clone()),
                        _ => None,
                    },
                )),
                (Key::Class(name), record) => written.push(Change::Class(
                    Arc::clone(name),
                    match record {
                        Some(Record::Class(record)) => stored(record.clone()),
                        _ => None,
                    },
                )),
            }
            // It is written back with the record.
            if record.is_some()
                && let Some(extra) = self.base.shared_extra(key)
            {
                written.push(Change::Extra(key.clone(), extra));
            }
        }
        written
    }

    /// Whether a provider's record is still that of the base.
    pub fn is_base_record(&self, uuid: &Uuid, record: &Arc<Provider>) -> bool {
        let base = self.base.find(uuid).and_then(|node| node.provider.as_ref());
        base.is_some_and(|base| Arc::ptr_eq(base, record))
    }

    /// Whether anything of a key is in the base.
    pub fn is_in_base(&self, key: &Key) -> bool {
        // A provider may be there without its generation, and that without the provider.
        self.base_record(key).is_some() || self.base_revision(key) != 0
    }

    /// Here, to come back to.
    pub fn savepoint(&self) -> Savepoint {
        Savepoint { writes: self.undo.len(), looks: self.looks.len() }
    }

    /// Why a record cannot be read that was looked at since this was last asked.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    /// Takes back every change since, and forgets what was looked at since: as if nothing had been.
    pub fn forget(&mut self, to: Savepoint) {
        self.roll_back(to);
        for key in self.looks.drain(to.looks.min(self.looks.len())..) {
            self.seen.remove(&key);
        }
    }

    /// Takes back every change since. What was looked at stays: the refusal stands on it.
    pub fn roll_back(&mut self, to: Savepoint) {
        while self.undo.len() > to.writes {
            if let Some((key, before)) = self.undo.pop() {
                let now = self.record(&key);
                let then = match &before {
                    Some(written) => written.clone(),
                    None => self.base_record(&key),
                };
                self.count(now.as_ref(), -1);
                self.count(then.as_ref(), 1);
                match before {
                    Some(written) => self.written.insert(key, written),
                    None => self.written.remove(&key),
                };
            }
        }
    }

    /// A provider and its generation.
    pub fn provider(&mut self, uuid: Uuid) -> Option<(Arc<Provider>, i64)> {
        match self.get(Key::Provider(uuid))? {
            Record::Provider(provider, generation) => Some((provider, generation)),
            _ => None,
        }
    }

    /// A consumer.
    pub fn consumer(&mut self, uuid: Uuid) -> Option<Arc<Consumer>> {
        match self.get(Key::Consumer(uuid))? {
            Record::Consumer(consumer) => Some(consumer),
            _ => None,
        }
    }

    /// Whose name it is.
    pub fn named(&mut self, name: &str) -> Option<Uuid> {
        match self.get(Key::ProviderName(name.into()))? {
            Record::ProviderName(uuid) => Some(uuid),
            _ => None,
        }
    }

    /// Whether there is such a trait.
    pub fn has_trait(&mut self, name: &str) -> bool {
        is_standard_trait(name) || self.get(Key::Trait(intern(name))).is_some()
    }

    /// Whether there is such a resource class.
    pub fn has_class(&mut self, name: &str) -> bool {
        is_standard_class(name) || self.get(Key::Class(intern(name))).is_some()
    }

    /// Somebody is to get more: that stands on all use being known.
    pub fn need_all_use(&mut self) {
        if let Some(why) = self.base.use_unknown() {
            self.trouble = Some(why);
        }
    }

    /// Something is to go that any provider may have: that stands on all of them being known.
    pub fn need_all_providers(&mut self) {
        if let Some(why) = self.base.provider_unknown() {
            self.trouble = Some(why.to_owned());
        }
    }

    /// What is used of a provider's class.
    pub fn used(&self, provider: Uuid, class: &Name) -> i64 {
        let base = self.base.known_of(&provider).map_or(0, |node| node.used(class));
        base + self.used.get(&(provider, Arc::clone(class))).copied().unwrap_or(0)
    }

    /// Whether anything is used of a provider.
    pub fn is_used(&self, provider: Uuid) -> bool {
        let mut amounts: HashMap<&Name, i64> = HashMap::new();
        if let Some(node) = self.base.known_of(&provider) {
            amounts.extend(node.usages().iter().map(|(class, used)| (class, *used)));
        }
        for ((of, class), more) in &self.used {
            if *of == provider {
                *amounts.entry(class).or_default() += more;
            }
        }
        amounts.values().any(|used| *used != 0)
    }

    /// Whether a provider has children.
    pub fn has_children(&self, provider: Uuid) -> bool {
        let base = self.base.known_of(&provider).map_or(0, |node| node.children.len());
        let more = self.children.get(&provider).copied().unwrap_or(0);
        i64::try_from(base).unwrap_or(i64::MAX) + more > 0
    }

    /// Whether any provider has a trait.
    pub fn trait_is_used(&self, name: &Name) -> bool {
        let base = self.base.with_trait(name).len();
        let more = self.trait_users.get(name).copied().unwrap_or(0);
        i64::try_from(base).unwrap_or(i64::MAX) + more > 0
    }

    /// Whether any provider has inventory of a class.
    pub fn class_is_used(&self, name: &Name) -> bool {
        let base = self.base.with_class(name).len();
        let more = self.class_users.get(name).copied().unwrap_or(0);
        i64::try_from(base).unwrap_or(i64::MAX) + more > 0
    }

    /// The providers and consumers whose records hold a resource class.
    pub fn holders_of(&self, class: &Name) -> (Vec<Uuid>, Vec<Uuid>) {
        let mut providers: BTreeSet<Uuid> = BTreeSet::new();
        let mut consumers: BTreeSet<Uuid> = BTreeSet::new();
        for (_, slot) in self.base.with_class(class) {
            let node = self.base.node(*slot);
            providers.insert(node.uuid);
            consumers.extend(&node.consumers);
        }
        for key in self.written.keys() {
            match key {
                Key::Provider(uuid) => drop(providers.insert(*uuid)),
                Key::Consumer(uuid) => drop(consumers.insert(*uuid)),
                _ => {}
            }
        }
        let holds = |key| self.record(&key).is_some_and(|record| record.holds(class));
        let is_troubled = |uuid| self.base.trouble_with(&Key::Consumer(uuid)).is_some();
        (
            providers.into_iter().filter(|uuid| holds(Key::Provider(*uuid))).collect(),
            // One that cannot be read may hold it by now.
            consumers.into_iter().filter(|uuid| holds(Key::Consumer(*uuid)) || is_troubled(*uuid)).collect(),
        )
    }

    /// Looks a record up, and remembers that it was looked at.
    pub fn get(&mut self, key: Key) -> Option<Record> {
        self.see(&key);
        self.record(&key)
    }

    /// Writes a record; `None` deletes it. What it counted at until now, and does not any more, is written, too, as
    /// it is: a decision that stands on there being less of it must not hold where this write never was.
    pub fn put(&mut self, key: Key, record: Option<Record>) {
        self.see(&key);
        let before = self.record(&key);
        self.count(before.as_ref(), -1);
        self.count(record.as_ref(), 1);
        let left = left_behind(before.as_ref(), record.as_ref());
        let replaced = self.written.insert(key.clone(), record);
        self.undo.push((key, replaced));
        for key in left {
            // Where it is not there or cannot be read, nothing is decided on it.
            if self.record(&key).is_some() && self.base.trouble_with(&key).is_none() {
                self.touch(key);
            }
        }
    }

    /// Writes a record as it is, so that whoever decides on it at the same moment has to decide again.
    pub fn touch(&mut self, key: Key) {
        if let Some(record) = self.get(key.clone()) {
            self.put(key, Some(record));
        }
    }

    fn see(&mut self, key: &Key) {
        if !self.seen.contains_key(key) {
            self.seen.insert(key.clone(), self.base_revision(key));
            self.looks.push(key.clone());
        }
        if let Some(why) = self.base.trouble_with(key) {
            self.trouble = Some(why.to_owned());
        }
    }

    fn record(&self, key: &Key) -> Option<Record> {
        match self.written.get(key) {
            Some(written) => written.clone(),
            None => self.base_record(key),
        }
    }

    fn base_record(&self, key: &Key) -> Option<Record> {
        let base = self.base;
        match key {
            Key::Provider(uuid) => base.find(uuid).and_then(|node| {
                let generation = node.generation.as_ref().map_or(0, |stored| stored.record);
                Some(Record::Provider(Arc::clone(node.provider.as_ref()?), generation))
            }),
            Key::Consumer(uuid) => {
                base.consumer(uuid).map(|stored| Record::Consumer(Arc::clone(&stored.record)))
            }
            Key::ProviderName(name) => {
                base.provider_name(name).map(|stored| Record::ProviderName(stored.record))
            }
            Key::Trait(name) => {
                base.custom_traits().get(name).map(|stored| Record::Trait(stored.record.clone()))
            }
            Key::Class(name) => {
                base.custom_classes().get(name).map(|stored| Record::Class(stored.record.clone()))
            }
        }
    }

    fn base_revision(&self, key: &Key) -> i64 {
        let base = self.base;
        match key {
            // A generation may be left of one that is not there: it is written over, by who makes it anew.
            Key::Provider(uuid) => {
                let node = base.known_of(uuid);
                node.and_then(|node| node.generation.as_ref()).map_or(0, |stored| stored.revision)
            }
            Key::Consumer(uuid) => base.consumer(uuid).map_or(0, |stored| stored.revision),
            Key::ProviderName(name) => base.provider_name(name).map_or(0, |stored| stored.revision),
            Key::Trait(name) => base.custom_traits().get(name).map_or(0, |stored| stored.revision),
            Key::Class(name) => base.custom_classes().get(name).map_or(0, |stored| stored.revision),
        }
    }

    /// Adds a record to what the changes add to the indexes, or takes it out.
    fn count(&mut self, record: Option<&Record>, sign: i64) {
        match record {
            Some(Record::Consumer(consumer)) => {
                for (provider, amounts) in &consumer.allocations {
                    for (class, amount) in amounts {
                        *self.used.entry((*provider, Arc::clone(class))).or_default() += sign * amount;
                    }
                }
            }
            Some(Record::Provider(provider, _)) => {
                if let Some(parent) = provider.parent {
                    *self.children.entry(parent).or_default() += sign;
                }
                for name in &provider.traits {
                    *self.trait_users.entry(Arc::clone(name)).or_default() += sign;
                }
                for (class, _) in &provider.inventories {
                    *self.class_users.entry(Arc::clone(class)).or_default() += sign;
                }
            }
            _ => {}
        }
    }
}

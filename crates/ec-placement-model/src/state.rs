//! Every record, in memory, with the indexes that make looking quick.
//!
//! Records may arrive in any order: a consumer before its provider, a child before its parent. So a
//! [`Node`] stands for a provider from the first mention of its uuid on, and goes with the last.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use uuid::Uuid;

use super::{
    SHARING,
    draft::{Key, Part},
    extra::Extra,
    records::{Amounts, Consumer, Name, NamedRecord, Provider},
};

/// The place of a provider in the state. Good only until the state changes.
pub type Slot = u32;

/// A record and the revision of the store that last changed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored<T> {
    /// The record.
    pub record: T,
    /// Its revision.
    pub revision: i64,
}

/// One record as it is from now on; `None`: it is gone.
#[derive(Debug, Clone)]
pub enum Change {
    /// A provider.
    Provider(Uuid, Option<Arc<Provider>>),
    /// A provider's generation.
    Generation(Uuid, Option<Stored<i64>>),
    /// A consumer.
    Consumer(Uuid, Option<Stored<Arc<Consumer>>>),
    /// Which provider has a name.
    ProviderName(Name, Option<Stored<Uuid>>),
    /// A trait that a user made.
    Trait(Name, Option<Stored<NamedRecord>>),
    /// A resource class that a user made.
    Class(Name, Option<Stored<NamedRecord>>),
    /// What the record of a key, told of right before, holds that this release does not know.
    Extra(Key, Arc<Extra>),
    /// What a consumer uses whose record cannot be read is not known, and may be anything.
    UseUnknown(Uuid),
    /// A record that cannot be read. What was known of it last may be as old as it wants.
    Unreadable {
        /// What it is of.
        key: Key,
        /// Which part of that.
        part: Part,
        /// Why.
        why: String,
    },
}

impl Change {
    /// What it is of.
    pub fn key(&self) -> Key {
        match self {
            Self::Provider(uuid, _) | Self::Generation(uuid, _) => Key::Provider(*uuid),
            Self::Consumer(uuid, _) | Self::UseUnknown(uuid) => Key::Consumer(*uuid),
            Self::ProviderName(name, _) => Key::ProviderName(Arc::clone(name)),
            Self::Trait(name, _) => Key::Trait(Arc::clone(name)),
            Self::Class(name, _) => Key::Class(Arc::clone(name)),
            Self::Extra(key, _) | Self::Unreadable { key, .. } => key.clone(),
        }
    }

    /// The same, written at this revision.
    pub fn written_at(mut self, at: i64) -> Self {
        match &mut self {
            Self::Generation(_, Some(Stored { revision, .. }))
            | Self::Consumer(_, Some(Stored { revision, .. }))
            | Self::ProviderName(_, Some(Stored { revision, .. }))
            | Self::Trait(_, Some(Stored { revision, .. }))
            | Self::Class(_, Some(Stored { revision, .. })) => *revision = at,
            _ => {}
        }
        self
    }
}

/// What is known of one provider.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its uuid.
    pub uuid: Uuid,
    /// Its record; none while only others speak of it.
    pub provider: Option<Arc<Provider>>,
    /// Its generation, with the revision that stands for the whole provider.
    pub generation: Option<Stored<i64>>,
    /// The top of its tree; itself where it has no parent.
    pub root: Slot,
    /// The provider above it.
    pub parent: Option<Slot>,
    /// Those below it.
    pub children: Vec<Slot>,
    /// What is used of it, by class.
    used: Amounts,
    /// By whom.
    pub consumers: BTreeSet<Uuid>,
}

impl Node {
    /// What is used of a class.
    pub fn used(&self, class: &str) -> i64 {
        self.used.iter().find(|(name, _)| **name == *class).map_or(0, |(_, used)| *used)
    }

    /// What is used, by class; only where it is more than nothing.
    pub fn usages(&self) -> &[(Name, i64)] {
        &self.used
    }

    fn is_empty(&self) -> bool {
        self.provider.is_none()
            && self.generation.is_none()
            && self.children.is_empty()
            && self.consumers.is_empty()
            && self.used.is_empty()
    }
}

/// Providers of a class, those with the most left of it first.
type ByFree = BTreeSet<(Reverse<i64>, Slot)>;

/// All there is.
#[derive(Debug, Clone, Default)]
pub struct State {
    nodes: Vec<Option<Node>>,
    unused: Vec<Slot>,
    by_uuid: HashMap<Uuid, Slot>,
    /// Of the nodes, those that are providers.
    provider_count: usize,
    names: HashMap<Name, Stored<Uuid>>,
    /// As their own records have it.
    by_name: HashMap<Name, BTreeSet<Slot>>,
    traits: BTreeMap<Name, Stored<NamedRecord>>,
    classes: BTreeMap<Name, Stored<NamedRecord>>,
    consumers: HashMap<Uuid, Stored<Arc<Consumer>>>,
    by_project: HashMap<Name, HashSet<Uuid>>,
    by_class: HashMap<Name, ByFree>,
    by_trait: HashMap<Name, BTreeSet<Slot>>,
    by_aggregate: HashMap<Uuid, BTreeSet<Slot>>,
    /// Of those in an aggregate, the ones that share.
    sharing_by_aggregate: HashMap<Uuid, BTreeSet<Slot>>,
    /// Providers that have a parent.
    nested: usize,
    /// Of few records.
    extras: HashMap<Key, Arc<Extra>>,
    /// Of hardly any.
    unreadable: BTreeMap<(Key, Part), String>,
    /// Of those, the consumers that may use anything.
    use_unknown: BTreeSet<Uuid>,
}

static NOBODY: BTreeSet<Slot> = BTreeSet::new();
static NO_CONSUMERS: std::sync::LazyLock<HashSet<Uuid>> = std::sync::LazyLock::new(HashSet::new);
static NONE_FREE: ByFree = BTreeSet::new();

impl State {
    /// A provider's node, where there is such a provider.
    pub fn find(&self, uuid: &Uuid) -> Option<&Node> {
        self.slot_of(uuid).map(|slot| self.node(slot))
    }

    /// What is known of a provider, also where there is none: who uses it, and a generation that is left of it.
    pub fn known_of(&self, uuid: &Uuid) -> Option<&Node> {
        self.by_uuid.get(uuid).map(|slot| self.node(*slot))
    }

    /// The providers of which there is a generation and nothing else.
    pub fn left_generations(&self) -> impl Iterator<Item = Uuid> {
        let left = |node: &&Node| node.provider.is_none() && node.generation.is_some();
        self.nodes.iter().flatten().filter(left).map(|node| node.uuid)
    }

    /// A provider's slot, where there is such a provider.
    pub fn slot_of(&self, uuid: &Uuid) -> Option<Slot> {
        let slot = *self.by_uuid.get(uuid)?;
        self.node(slot).provider.as_ref().map(|_| slot)
    }

    /// The node in a slot that this state gave out.
    ///
    /// # Panics
    /// Where the slot is another state's, or the state has changed since.
    #[expect(clippy::expect_used, reason = "slots are given out for nodes only")]
    pub fn node(&self, slot: Slot) -> &Node {
        self.nodes[slot as usize].as_ref().expect("a slot in use")
    }

    #[expect(clippy::expect_used, reason = "slots are given out for nodes only")]
    fn node_mut(&mut self, slot: Slot) -> &mut Node {
        self.nodes[slot as usize].as_mut().expect("a slot in use")
    }

    /// Every provider's node.
    pub fn providers(&self) -> impl Iterator<Item = (Slot, &Node)> {
        self.nodes.iter().enumerate().filter_map(|(slot, node)| {
            let node = node.as_ref()?;
            node.provider.as_ref()?;
            Some((Slot::try_from(slot).ok()?, node))
        })
    }

    /// How many providers there are.
    pub fn provider_count(&self) -> usize {
        self.provider_count
    }

    /// How many are spoken of, whether there is such a provider or not: no way up a tree is longer.
    pub fn node_count(&self) -> usize {
        self.by_uuid.len()
    }

    /// A consumer.
    pub fn consumer(&self, uuid: &Uuid) -> Option<&Stored<Arc<Consumer>>> {
        self.consumers.get(uuid)
    }

    /// Every consumer.
    pub fn consumers(&self) -> impl Iterator<Item = (&Uuid, &Stored<Arc<Consumer>>)> {
        self.consumers.iter()
    }

    /// How many consumers there are.
    pub fn consumer_count(&self) -> usize {
        self.consumers.len()
    }

    /// The consumers of a project.
    pub fn consumers_of(&self, project: &str) -> impl Iterator<Item = &Consumer> {
        let uuids = self.by_project.get(project).unwrap_or(&NO_CONSUMERS);
        uuids.iter().filter_map(|uuid| self.consumers.get(uuid)).map(|stored| &*stored.record)
    }

    /// Whose name this is.
    pub fn provider_name(&self, name: &str) -> Option<&Stored<Uuid>> {
        self.names.get(name)
    }

    /// The providers whose records bear a name: one, where nobody wrote or deleted keys by hand.
    pub fn bearers(&self, name: &str) -> impl Iterator<Item = &Node> {
        self.by_name.get(name).unwrap_or(&NOBODY).iter().map(|slot| self.node(*slot))
    }

    /// Every name and whose it is.
    pub fn provider_names(&self) -> impl Iterator<Item = (&Name, &Stored<Uuid>)> {
        self.names.iter()
    }

    /// The traits that users made, in order of name.
    pub fn custom_traits(&self) -> &BTreeMap<Name, Stored<NamedRecord>> {
        &self.traits
    }

    /// The resource classes that users made, in order of name.
    pub fn custom_classes(&self) -> &BTreeMap<Name, Stored<NamedRecord>> {
        &self.classes
    }

    /// Providers with inventory of a class, those with the most left of it first.
    pub fn with_class(&self, class: &str) -> &ByFree {
        self.by_class.get(class).unwrap_or(&NONE_FREE)
    }

    /// Providers with a trait.
    pub fn with_trait(&self, name: &str) -> &BTreeSet<Slot> {
        self.by_trait.get(name).unwrap_or(&NOBODY)
    }

    /// Providers in an aggregate.
    pub fn in_aggregate(&self, aggregate: &Uuid) -> &BTreeSet<Slot> {
        self.by_aggregate.get(aggregate).unwrap_or(&NOBODY)
    }

    /// Providers whose inventory serves everyone in an aggregate.
    pub fn sharing_in(&self, aggregate: &Uuid) -> &BTreeSet<Slot> {
        self.sharing_by_aggregate.get(aggregate).unwrap_or(&NOBODY)
    }

    /// Providers whose inventory serves every provider of their aggregates.
    pub fn sharing(&self) -> &BTreeSet<Slot> {
        self.with_trait(SHARING)
    }

    /// Whether any provider has a parent.
    pub fn has_trees(&self) -> bool {
        self.nested > 0
    }

    /// What a stored record holds that this release does not know.
    pub fn extra(&self, key: &Key) -> Option<&Extra> {
        self.extras.get(key).map(|extra| &**extra)
    }

    pub(crate) fn shared_extra(&self, key: &Key) -> Option<Arc<Extra>> {
        self.extras.get(key).cloned()
    }

    /// Why a key's record cannot be read, where it cannot.
    pub fn trouble_with(&self, key: &Key) -> Option<&str> {
        if self.unreadable.is_empty() {
            return None;
        }
        [Part::Record, Part::Generation]
            .into_iter()
            .find_map(|part| self.unreadable.get(&(key.clone(), part)))
            .map(String::as_str)
    }

    /// Why nobody knows what is left anywhere, where that is so: a consumer's record cannot be read, and what
    /// it was is forgotten.
    pub fn use_unknown(&self) -> Option<String> {
        let why = self.trouble_with(&Key::Consumer(*self.use_unknown.first()?))?;
        Some(format!("{why}; it may use anything, and what it was is compacted"))
    }

    /// Why nobody knows what every provider has, and below which it is, where that is so: a provider's record cannot be read.
    pub fn provider_unknown(&self) -> Option<&str> {
        let is_provider = |(key, part): &(Key, Part)| matches!((key, part), (Key::Provider(_), Part::Record));
        self.unreadable.iter().find(|(of, _)| is_provider(of)).map(|(_, why)| why.as_str())
    }

    /// Every record that cannot be read, and why.
    pub fn unreadable(&self) -> impl ExactSizeIterator<Item = &str> {
        self.unreadable.values().map(String::as_str)
    }

    /// A provider and all those below it, itself first.
    pub fn subtree(&self, top: Slot) -> Vec<Slot> {
        let mut found = vec![top];
        let mut next = 0;
        while let Some(&slot) = found.get(next) {
            next += 1;
            let children = &self.node(slot).children;
            // Only stored records that were tampered with have loops; they must not hang us. Each has one parent, so no
            // loop is below the top that does not lead through it.
            found.extend(children.iter().filter(|child| **child != top));
        }
        found
    }

    /// Applies changes, all of some revisions of the store.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            match change {
                Change::Provider(uuid, record) => {
                    self.renew(Key::Provider(uuid), Part::Record);
                    self.set_provider(uuid, record);
                }
                Change::Generation(uuid, stored) => {
                    self.renew(Key::Provider(uuid), Part::Generation);
                    let slot = self.slot_for(uuid);
                    self.node_mut(slot).generation = stored;
                    self.release(slot);
                }
                Change::Consumer(uuid, stored) => {
                    self.renew(Key::Consumer(uuid), Part::Record);
                    self.set_consumer(uuid, stored);
                }
                Change::ProviderName(name, stored) => {
                    self.renew(Key::ProviderName(Arc::clone(&name)), Part::Record);
                    set(&mut self.names, name, stored);
                }
                Change::Trait(name, stored) => {
                    self.renew(Key::Trait(Arc::clone(&name)), Part::Record);
                    set_ordered(&mut self.traits, name, stored);
                }
                Change::Class(name, stored) => {
                    self.renew(Key::Class(Arc::clone(&name)), Part::Record);
                    set_ordered(&mut self.classes, name, stored);
                }
                Change::UseUnknown(uuid) => drop(self.use_unknown.insert(uuid)),
                Change::Extra(key, extra) => drop(self.extras.insert(key, extra)),
                Change::Unreadable { key, part, why } => {
                    // Nobody is to be placed there. Consumers keep what they were last known to use, so
                    // that nobody else gets it.
                    if let (Key::Provider(uuid), Part::Record) = (&key, part) {
                        self.set_provider(*uuid, None);
                    }
                    self.unreadable.insert((key, part), why);
                }
            }
        }
    }

    /// A record is told of anew: nothing that was beside it holds any more.
    fn renew(&mut self, key: Key, part: Part) {
        if self.unreadable.is_empty() && self.extras.is_empty() {
            return;
        }
        if part == Part::Record {
            self.extras.remove(&key);
        }
        if let Key::Consumer(uuid) = &key {
            self.use_unknown.remove(uuid);
        }
        self.unreadable.remove(&(key, part));
    }

    fn slot_for(&mut self, uuid: Uuid) -> Slot {
        if let Some(slot) = self.by_uuid.get(&uuid) {
            return *slot;
        }
        let slot = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            Slot::try_from(self.nodes.len() - 1).unwrap_or(Slot::MAX)
        });
        self.nodes[slot as usize] = Some(Node {
            uuid,
            provider: None,
            generation: None,
            root: slot,
            parent: None,
            children: Vec::new(),
            used: Vec::new(),
            consumers: BTreeSet::new(),
        });
        self.by_uuid.insert(uuid, slot);
        slot
    }

    fn release(&mut self, slot: Slot) {
        if self.node(slot).is_empty()
            && let Some(node) = self.nodes[slot as usize].take()
        {
            self.by_uuid.remove(&node.uuid);
            self.unused.push(slot);
        }
    }

    fn set_provider(&mut self, uuid: Uuid, record: Option<Arc<Provider>>) {
        let slot = self.slot_for(uuid);
        let old = self.node(slot).provider.clone();
        if let Some(old) = &old {
            self.provider_count -= 1;
            remove(&mut self.by_name, &old.name, &slot);
            for (class, inventory) in &old.inventories {
                let free = inventory.capacity().saturating_sub(self.node(slot).used(class));
                remove(&mut self.by_class, class, &(Reverse(free), slot));
            }
            for name in &old.traits {
                remove(&mut self.by_trait, name, &slot);
            }
            for aggregate in &old.aggregates {
                remove(&mut self.by_aggregate, aggregate, &slot);
                remove(&mut self.sharing_by_aggregate, aggregate, &slot);
            }
        }
        if let Some(new) = &record {
            self.provider_count += 1;
            self.by_name.entry(Arc::clone(&new.name)).or_default().insert(slot);
            for (class, inventory) in &new.inventories {
                let free = inventory.capacity().saturating_sub(self.node(slot).used(class));
                self.by_class.entry(Arc::clone(class)).or_default().insert((Reverse(free), slot));
            }
            for name in &new.traits {
                self.by_trait.entry(Arc::clone(name)).or_default().insert(slot);
            }
            for aggregate in &new.aggregates {
                self.by_aggregate.entry(*aggregate).or_default().insert(slot);
                if new.has_trait(SHARING) {
                    self.sharing_by_aggregate.entry(*aggregate).or_default().insert(slot);
                }
            }
        }
        let parent = record.as_ref().and_then(|new| new.parent);
        if parent != old.and_then(|old| old.parent) {
            self.set_parent(slot, parent);
        }
        self.node_mut(slot).provider = record;
        self.release(slot);
    }

    fn set_parent(&mut self, slot: Slot, parent: Option<Uuid>) {
        if let Some(old) = self.node_mut(slot).parent.take() {
            self.nested -= 1;
            self.node_mut(old).children.retain(|child| *child != slot);
            self.release(old);
        }
        let parent = parent.map(|uuid| self.slot_for(uuid));
        if let Some(parent) = parent {
            self.nested += 1;
            self.node_mut(parent).children.push(slot);
        }
        self.node_mut(slot).parent = parent;
        let mut root = slot;
        for _ in 0..self.nodes.len() {
            let Some(above) = self.node(root).parent else { break };
            root = above;
        }
        for below in self.subtree(slot) {
            self.node_mut(below).root = root;
        }
    }

    fn set_consumer(&mut self, uuid: Uuid, stored: Option<Stored<Arc<Consumer>>>) {
        let old = match &stored {
            Some(stored) => self.consumers.insert(uuid, stored.clone()),
            None => self.consumers.remove(&uuid),
        };
        if let Some(old) = &old {
            for (provider, amounts) in &old.record.allocations {
                let slot = self.slot_for(*provider);
                for (class, amount) in amounts {
                    self.use_more(slot, class, -amount);
                }
                self.node_mut(slot).consumers.remove(&uuid);
            }
        }
        if let Some(new) = &stored {
            for (provider, amounts) in &new.record.allocations {
                let slot = self.slot_for(*provider);
                for (class, amount) in amounts {
                    self.use_more(slot, class, *amount);
                }
                self.node_mut(slot).consumers.insert(uuid);
            }
        }
        let (before, after) = (old.map(|old| old.record), stored.map(|new| new.record));
        if let Some(before) = &before {
            for (provider, _) in &before.allocations {
                if let Some(slot) = self.by_uuid.get(provider) {
                    self.release(*slot);
                }
            }
            if after.as_ref().is_none_or(|after| after.project != before.project) {
                remove_hashed(&mut self.by_project, &before.project, &uuid);
            }
        }
        if let Some(after) = after {
            self.by_project.entry(Arc::clone(&after.project)).or_default().insert(uuid);
        }
    }

    fn use_more(&mut self, slot: Slot, class: &Name, amount: i64) {
        let node = self.node_mut(slot);
        let capacity =
            node.provider.as_ref().and_then(|record| record.inventory(class)).map(|i| i.capacity());
        let at = node.used.iter().position(|(name, _)| name == class);
        let before = at.map_or(0, |at| node.used[at].1);
        let after = before + amount;
        match at {
            Some(at) if after == 0 => {
                node.used.swap_remove(at);
            }
            Some(at) => node.used[at].1 = after,
            None => node.used.push((Arc::clone(class), after)),
        }
        if let (Some(capacity), Some(index)) = (capacity, self.by_class.get_mut(class)) {
            index.remove(&(Reverse(capacity.saturating_sub(before)), slot));
            index.insert((Reverse(capacity.saturating_sub(after)), slot));
        }
    }
}

fn set<V>(map: &mut HashMap<Name, V>, name: Name, value: Option<V>) {
    match value {
        Some(value) => map.insert(name, value),
        None => map.remove(&name),
    };
}

fn set_ordered<V>(map: &mut BTreeMap<Name, V>, name: Name, value: Option<V>) {
    match value {
        Some(value) => map.insert(name, value),
        None => map.remove(&name),
    };
}

/// Takes one out of a set, and the set away with its last.
fn remove<K: std::hash::Hash + Eq, V: Ord>(index: &mut HashMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(values) = index.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            index.remove(key);
        }
    }
}

fn remove_hashed(index: &mut HashMap<Name, HashSet<Uuid>>, key: &Name, value: &Uuid) {
    if let Some(values) = index.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            index.remove(key);
        }
    }
}

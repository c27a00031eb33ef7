//! A state after any history of records, against one that counts everything anew from the records that are left.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ec_placement_model::{
    Change, Consumer, Extra, Inventory, Key, Name, NamedRecord, Part, Provider, SHARING, State, Stored,
    intern,
};
use proptest::prelude::*;
use serde_json::json;
use uuid::Uuid;

use crate::support::{CLASSES, PROJECTS, Portrait, TRAITS, aggregate, id, names, portrait, state_of, stored};

/// The records, as they would lie in a store.
#[derive(Debug, Default)]
struct Books {
    providers: BTreeMap<Uuid, Arc<Provider>>,
    generations: BTreeMap<Uuid, Stored<i64>>,
    consumers: BTreeMap<Uuid, Stored<Arc<Consumer>>>,
    names: BTreeMap<Name, Stored<Uuid>>,
    traits: BTreeMap<Name, Stored<NamedRecord>>,
    classes: BTreeMap<Name, Stored<NamedRecord>>,
    extras: BTreeMap<Key, Arc<Extra>>,
    unreadable: BTreeMap<(Key, Part), String>,
    unknown: BTreeSet<Uuid>,
}

fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    };
}

impl Books {
    fn write(&mut self, change: Change) {
        let key = change.key();
        match &change {
            Change::Extra(..) | Change::UseUnknown(_) | Change::Unreadable { .. } => {}
            Change::Generation(..) => drop(self.unreadable.remove(&(key, Part::Generation))),
            _ => {
                self.unreadable.remove(&(key.clone(), Part::Record));
                if let Key::Consumer(uuid) = key {
                    self.unknown.remove(&uuid);
                }
                self.extras.remove(&key);
            }
        }
        match change {
            Change::Provider(uuid, record) => set(&mut self.providers, uuid, record),
            Change::Generation(uuid, stored) => set(&mut self.generations, uuid, stored),
            Change::Consumer(uuid, stored) => set(&mut self.consumers, uuid, stored),
            Change::ProviderName(name, stored) => set(&mut self.names, name, stored),
            Change::Trait(name, stored) => set(&mut self.traits, name, stored),
            Change::Class(name, stored) => set(&mut self.classes, name, stored),
            Change::Extra(key, extra) => drop(self.extras.insert(key, extra)),
            Change::UseUnknown(uuid) => drop(self.unknown.insert(uuid)),
            Change::Unreadable { key, part, why } => {
                if let (Key::Provider(uuid), Part::Record) = (&key, part) {
                    self.providers.remove(uuid);
                }
                self.unreadable.insert((key, part), why);
            }
        }
    }

    fn parent(&self, uuid: &Uuid) -> Option<Uuid> {
        self.providers.get(uuid)?.parent
    }

    /// Itself, the provider above it, and so on to the top.
    fn way_up(&self, uuid: Uuid) -> Vec<Uuid> {
        std::iter::successors(Some(uuid), |at| self.parent(at)).collect()
    }

    fn used(&self, uuid: &Uuid) -> BTreeMap<&Name, i64> {
        let mut used = BTreeMap::new();
        let all = self.consumers.values().flat_map(|stored| &stored.record.allocations);
        for (class, amount) in all.filter(|(own, _)| own == uuid).flat_map(|(_, amounts)| amounts) {
            *used.entry(class).or_default() += amount;
        }
        used
    }

    fn holding(&self, which: impl Fn(&Provider) -> bool) -> BTreeSet<Uuid> {
        self.providers.iter().filter(|(_, record)| which(record)).map(|(uuid, _)| *uuid).collect()
    }

    fn portrait(&self) -> Portrait {
        let mut told = Portrait::new();
        for (uuid, record) in &self.providers {
            let bearers = self.holding(|other| other.name == record.name);
            told.insert(format!("bear {}", record.name), format!("{bearers:?}"));
            let children = self.holding(|other| other.parent == Some(*uuid));
            let below: BTreeSet<Uuid> =
                self.providers.keys().filter(|other| self.way_up(**other).contains(uuid)).copied().collect();
            let top = self.way_up(*uuid).last().copied().unwrap_or(*uuid);
            let users: BTreeSet<Uuid> = self
                .consumers
                .iter()
                .filter(|(_, stored)| stored.record.allocations.iter().any(|(own, _)| own == uuid))
                .map(|(consumer, _)| *consumer)
                .collect();
            let place = (top, record.parent, children, below);
            let generation = self.generations.get(uuid);
            told.insert(
                format!("provider {uuid}"),
                format!("{:?}", (Some(record), generation, place, self.used(uuid), users)),
            );
        }
        told.extend(self.names.iter().map(|(name, owner)| (format!("name {name}"), format!("{owner:?}"))));
        told.extend(
            self.consumers.iter().map(|(uuid, one)| (format!("consumer {uuid}"), format!("{one:?}"))),
        );
        told.insert("traits".into(), format!("{:?}", self.traits));
        told.insert("classes".into(), format!("{:?}", self.classes));
        let users = self.consumers.values().flat_map(|stored| &stored.record.allocations);
        let mut spoken_of: BTreeSet<Uuid> =
            self.providers.keys().chain(self.generations.keys()).copied().collect();
        spoken_of.extend(self.providers.values().filter_map(|record| record.parent));
        spoken_of.extend(users.map(|(uuid, _)| *uuid));
        let counts = [self.providers.len(), spoken_of.len(), self.consumers.len()];
        told.insert("counts".into(), format!("{counts:?}"));
        told.insert(
            "trees".into(),
            self.providers.values().any(|record| record.parent.is_some()).to_string(),
        );
        for class in CLASSES {
            let free: BTreeSet<(i64, Uuid)> = self
                .providers
                .iter()
                .filter_map(|(uuid, record)| {
                    let used = self.used(uuid).get(&intern(class)).copied().unwrap_or(0);
                    Some((record.inventory(class)?.capacity() - used, *uuid))
                })
                .collect();
            told.insert(format!("with {class}"), format!("{free:?}"));
        }
        for name in TRAITS {
            told.insert(
                format!("with {name}"),
                format!("{:?}", self.holding(|record| record.has_trait(name))),
            );
        }
        let shares = |record: &Provider| record.has_trait(SHARING);
        told.insert("sharing".into(), format!("{:?}", self.holding(shares)));
        for aggregate in [1, 2].map(aggregate) {
            let members = self.holding(|record| record.in_aggregate(&aggregate));
            let sharing = self.holding(|record| record.in_aggregate(&aggregate) && shares(record));
            told.insert(format!("in {aggregate}"), format!("{members:?}"));
            told.insert(format!("sharing in {aggregate}"), format!("{sharing:?}"));
        }
        for project in PROJECTS {
            let all = self.consumers.values().map(|stored| &*stored.record);
            let own: BTreeSet<String> =
                all.filter(|one| &*one.project == project).map(|one| format!("{one:?}")).collect();
            told.insert(format!("of {project}"), format!("{own:?}"));
        }
        told
    }
}

fn some_of(names: &'static [&str]) -> impl Strategy<Value = Vec<Name>> {
    prop::sample::subsequence(names, 0..=names.len()).prop_map(|chosen| {
        let mut chosen: Vec<Name> = chosen.into_iter().map(intern).collect();
        chosen.sort_unstable();
        chosen
    })
}

/// Of providers 0 to 4, each below one of a smaller number or below 9, of which there is no record.
fn provider() -> impl Strategy<Value = (Uuid, Arc<Provider>)> {
    let parent = prop_oneof![Just(None), (0..4_u128).prop_map(Some), Just(Some(9))];
    let inventory = (0..20_i64, 0..3_i64).prop_map(|(total, reserved)| Inventory {
        total,
        reserved,
        ..Inventory::default()
    });
    let inventories = (some_of(&CLASSES), prop::collection::vec(inventory, 3));
    let aggregates = prop::sample::subsequence(vec![1_u128, 2], 0..=2);
    (0..5_u128, parent, inventories, some_of(&TRAITS), aggregates).prop_map(
        |(number, parent, (classes, inventories), traits, aggregates)| {
            let parent = parent.filter(|parent| *parent == 9 || *parent < number).map(id);
            let mut record = Provider::new(&format!("h{number}"), parent, 0);
            record.inventories = classes.into_iter().zip(inventories).collect();
            record.traits = traits;
            record.aggregates = aggregates.into_iter().map(aggregate).collect();
            (id(number), Arc::new(record))
        },
    )
}

fn consumer() -> impl Strategy<Value = (Uuid, Arc<Consumer>)> {
    let amounts = prop::collection::btree_map(prop::sample::select(&CLASSES[..]), 1..9_i64, 1..3);
    let allocations = prop::collection::btree_map(0..6_u128, amounts, 0..3);
    (100..104_u128, prop::sample::select(&PROJECTS[..]), allocations).prop_map(
        |(number, project, allocations)| {
            let mut record = Consumer::new(intern(project), intern("u"), None, 0);
            record.allocations = allocations
                .into_iter()
                .map(|(number, of)| {
                    (id(number), of.into_iter().map(|(class, n)| (intern(class), n)).collect())
                })
                .collect();
            (id(number), Arc::new(record))
        },
    )
}

fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        (0..5_u128).prop_map(|number| Key::Provider(id(number))),
        (100..104_u128).prop_map(|number| Key::Consumer(id(number))),
        Just(Key::ProviderName(intern("h1"))),
        Just(Key::Trait(intern("CUSTOM_T"))),
        Just(Key::Class(intern("CUSTOM_C"))),
    ]
}

/// Changes of one revision.
fn changes() -> impl Strategy<Value = Vec<Change>> {
    let revision = 1..50_i64;
    let made = || any::<Option<i64>>().prop_map(|at| at.and_then(|at| stored(NamedRecord::new(at))));
    let extra = || {
        prop::option::of((0..9_i32).prop_map(|n| Arc::new(Extra::between(&json!({"new": n}), &json!({})))))
    };
    prop_oneof![
        4 => (provider(), extra()).prop_map(|((uuid, record), extra)| {
            let extra = extra.map(|extra| Change::Extra(Key::Provider(uuid), extra));
            std::iter::once(Change::Provider(uuid, Some(record))).chain(extra).collect()
        }),
        2 => (0..5_u128).prop_map(|number| vec![Change::Provider(id(number), None)]),
        2 => (0..6_u128, prop::option::of((0..9_i64, revision)))
            .prop_map(|(number, generation)| {
                let stored = generation.map(|(record, revision)| Stored { record, revision });
                vec![Change::Generation(id(number), stored)]
            }),
        4 => (consumer(), extra()).prop_map(|((uuid, record), extra)| {
            let extra = extra.map(|extra| Change::Extra(Key::Consumer(uuid), extra));
            std::iter::once(Change::Consumer(uuid, stored(record))).chain(extra).collect()
        }),
        2 => (100..104_u128).prop_map(|number| vec![Change::Consumer(id(number), None)]),
        1 => (0..3_u128, prop::option::of(0..3_u128)).prop_map(|(name, owner)| {
            vec![Change::ProviderName(intern(&format!("h{name}")), owner.and_then(|owner| stored(id(owner))))]
        }),
        1 => made().prop_map(|stored| vec![Change::Trait(intern("CUSTOM_T"), stored)]),
        1 => made().prop_map(|stored| vec![Change::Class(intern("CUSTOM_C"), stored)]),
        1 => (key(), any::<bool>()).prop_map(|(key, generation)| {
            let of_generation = generation && matches!(key, Key::Provider(_));
            let part = if of_generation { Part::Generation } else { Part::Record };
            let why = format!("{key:?} is spoilt");
            let unknown = match &key {
                Key::Consumer(uuid) if generation => Some(Change::UseUnknown(*uuid)),
                _ => None,
            };
            unknown.into_iter().chain([Change::Unreadable { key, part, why }]).collect()
        }),
    ]
}

fn all_keys() -> Vec<Key> {
    let named =
        [Key::ProviderName(intern("h1")), Key::Trait(intern("CUSTOM_T")), Key::Class(intern("CUSTOM_C"))];
    let providers = (0..6).map(|number| Key::Provider(id(number)));
    providers.chain((100..104).map(|number| Key::Consumer(id(number)))).chain(named).collect()
}

proptest! {
    #[test]
    fn indexes_are_what_is_counted_anew_from_the_records(history in prop::collection::vec(changes(), 0..40)) {
        let (mut state, mut books) = (State::default(), Books::default());
        for changes in history {
            state.apply(changes.clone());
            changes.into_iter().for_each(|change| books.write(change));
            prop_assert_eq!(portrait(&state), books.portrait());
            for key in all_keys() {
                prop_assert_eq!(state.extra(&key), books.extras.get(&key).map(|extra| &**extra), "{:?}", key);
                let of = |part| books.unreadable.get(&(key.clone(), part)).map(String::as_str);
                prop_assert_eq!(state.trouble_with(&key), of(Part::Record).or(of(Part::Generation)), "{:?}", key);
            }
            let unreadable: Vec<&str> = books.unreadable.values().map(String::as_str).collect();
            prop_assert_eq!(state.unreadable().collect::<Vec<_>>(), unreadable);
            let unknown = state.use_unknown();
            prop_assert_eq!(unknown.is_some(), !books.unknown.is_empty(), "{:?}", unknown);
            let told = unknown.is_none_or(|why| why.contains("is spoilt; it may use anything"));
            prop_assert!(told, "with its reason");
        }
    }
}

#[test]
fn a_loop_in_records_that_were_tampered_with_hangs_nobody() {
    let below = |own: u128, parent: u128| {
        Change::Provider(id(own), Some(Arc::new(Provider::new(&format!("h{own}"), Some(id(parent)), 0))))
    };
    let mut state = state_of([below(1, 2), below(2, 3), below(3, 1), below(4, 3)]);
    for number in 1..=4 {
        let slot = state.slot_of(&id(number)).expect("it is there");
        assert!(state.subtree(slot).contains(&slot));
    }
    state.apply([below(5, 5)]);
    let own = state.slot_of(&id(5)).expect("it is there");
    assert_eq!(state.subtree(own), [own]);
}

#[test]
fn a_change_says_what_it_is_of_and_takes_its_revision() {
    let changes = [
        (Change::Provider(id(1), None), Key::Provider(id(1))),
        (Change::Generation(id(1), stored(3)), Key::Provider(id(1))),
        (Change::Consumer(id(2), None), Key::Consumer(id(2))),
        (Change::UseUnknown(id(2)), Key::Consumer(id(2))),
        (Change::ProviderName(intern("n"), stored(id(1))), Key::ProviderName(intern("n"))),
        (Change::Trait(intern("CUSTOM_T"), None), Key::Trait(intern("CUSTOM_T"))),
        (Change::Class(intern("CUSTOM_C"), None), Key::Class(intern("CUSTOM_C"))),
        (Change::Extra(Key::Consumer(id(2)), Arc::default()), Key::Consumer(id(2))),
        (
            Change::Unreadable { key: Key::Consumer(id(2)), part: Part::Record, why: String::new() },
            Key::Consumer(id(2)),
        ),
    ];
    for (change, key) in changes {
        assert_eq!(change.key(), key, "{change:?}");
    }
    let user = Consumer::new(intern("p"), intern("u"), None, 0);
    let named = || stored(NamedRecord::new(0));
    let state = state_of(
        [
            Change::Generation(id(1), stored(3)),
            Change::Provider(id(1), Some(Arc::new(Provider::new("n", None, 0)))),
            Change::Consumer(id(2), stored(Arc::new(user))),
            Change::ProviderName(intern("n"), stored(id(1))),
            Change::Trait(names(&TRAITS)[0].clone(), named()),
            Change::Class(intern("CUSTOM_C"), named()),
        ]
        .map(|change| change.written_at(99)),
    );
    let revisions = [
        state.find(&id(1)).and_then(|node| node.generation.as_ref()).map(|stored| stored.revision),
        state.consumer(&id(2)).map(|stored| stored.revision),
        state.provider_name("n").map(|stored| stored.revision),
        state.custom_traits().values().next().map(|stored| stored.revision),
        state.custom_classes().values().next().map(|stored| stored.revision),
    ];
    assert_eq!(revisions, [Some(99); 5]);
}

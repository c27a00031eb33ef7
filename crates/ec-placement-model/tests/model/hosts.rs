//! Hosts as plain data, and every way in which they can serve a query, found by trying all.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ec_placement_model::{
    Change, Consumer, Name, Provider, SHARING, State, intern,
    search::{Candidates, Group, Query},
};
use uuid::Uuid;

use crate::support::{id, state_of, stored};

/// A host: its record, and what is used of it.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) record: Provider,
    pub(crate) used: Vec<(Name, i64)>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Hosts(pub(crate) BTreeMap<Uuid, Host>);

/// One candidate: what is taken of whom, and who serves each group.
pub(crate) type Way = (BTreeMap<(Uuid, Name), i64>, Vec<BTreeSet<Uuid>>);

/// Who serves each resource of a group; one host where it has none.
type Picks = Vec<Uuid>;

/// Every way to take one of each list.
fn product<T: Clone>(lists: &[Vec<T>]) -> Vec<Vec<T>> {
    lists.iter().fold(vec![Vec::new()], |ways, list| {
        let with = |way: &Vec<T>, one: &T| way.iter().cloned().chain([one.clone()]).collect();
        ways.iter().flat_map(|way| list.iter().map(move |one| with(way, one))).collect()
    })
}

impl Hosts {
    pub(crate) fn state(&self) -> State {
        let mut changes = Vec::new();
        for (number, (uuid, host)) in (0..).zip(&self.0) {
            changes.push(Change::Provider(*uuid, Some(Arc::new(host.record.clone()))));
            changes.push(Change::Generation(*uuid, stored(0)));
            changes.push(Change::ProviderName(Arc::clone(&host.record.name), stored(*uuid)));
            if !host.used.is_empty() {
                let mut consumer = Consumer::new(intern("p"), intern("u"), None, 0);
                consumer.allocations = vec![(*uuid, host.used.clone())];
                changes.push(Change::Consumer(id(1000 + number), stored(Arc::new(consumer))));
            }
        }
        let made = || stored(ec_placement_model::NamedRecord::new(0));
        changes.push(Change::Trait(intern("CUSTOM_T"), made()));
        changes.push(Change::Class(intern("CUSTOM_C"), made()));
        state_of(changes)
    }

    fn record(&self, uuid: &Uuid) -> Option<&Provider> {
        self.0.get(uuid).map(|host| &host.record)
    }

    /// Itself and those above it, as far as anybody knows them, and the first whom nobody does.
    fn way_up(&self, uuid: Uuid) -> Vec<Uuid> {
        std::iter::successors(Some(uuid), |at| self.record(at)?.parent).collect()
    }

    pub(crate) fn root(&self, uuid: Uuid) -> Uuid {
        self.way_up(uuid).last().copied().unwrap_or(uuid)
    }

    pub(crate) fn tree(&self, root: Uuid) -> Vec<Uuid> {
        self.0.keys().copied().filter(|uuid| self.root(*uuid) == root).collect()
    }

    pub(crate) fn has_trees(&self) -> bool {
        self.0.values().any(|host| host.record.parent.is_some())
    }

    fn used(&self, uuid: &Uuid, class: &str) -> i64 {
        let used = self.0.get(uuid).and_then(|host| host.used.iter().find(|(own, _)| **own == *class));
        used.map_or(0, |(_, amount)| *amount)
    }

    /// Whether so much more can be used, whatever one claim may take.
    fn holds(&self, uuid: &Uuid, class: &str, amount: i64) -> bool {
        let inventory = self.record(uuid).and_then(|record| record.inventory(class));
        inventory
            .is_some_and(|own| amount <= own.max_unit && self.used(uuid, class) + amount <= own.capacity())
    }

    pub(crate) fn has_room(&self, uuid: &Uuid, class: &str, amount: i64) -> bool {
        let inventory = self.record(uuid).and_then(|record| record.inventory(class));
        inventory.is_some_and(|own| amount >= own.min_unit && amount % own.step_size == 0)
            && self.holds(uuid, class, amount)
    }

    fn has_any(&self, uuid: &Uuid, traits: &[Name]) -> bool {
        self.record(uuid).is_some_and(|record| traits.iter().any(|name| record.traits.contains(name)))
    }

    fn is_in_any(&self, uuid: &Uuid, aggregates: &[Uuid]) -> bool {
        self.record(uuid).is_some_and(|record| aggregates.iter().any(|one| record.aggregates.contains(one)))
    }

    pub(crate) fn is_member(&self, uuid: &Uuid, lists: &[Vec<Uuid>]) -> bool {
        lists.iter().all(|any| self.is_in_any(uuid, any))
    }

    pub(crate) fn allows(&self, uuid: &Uuid, required: &[Vec<Name>], forbidden: &[Name]) -> bool {
        required.iter().all(|any| self.has_any(uuid, any)) && !self.has_any(uuid, forbidden)
    }

    /// The roots at which a candidate may hang.
    fn anchors(&self, query: &Query) -> Vec<Uuid> {
        let required: Vec<Vec<Name>> =
            query.root_required.iter().map(|name| vec![Arc::clone(name)]).collect();
        let roots = self.0.keys().filter(|uuid| self.root(**uuid) == **uuid);
        roots.filter(|uuid| self.allows(uuid, &required, &query.root_forbidden)).copied().collect()
    }

    /// Those elsewhere who share with somebody in a tree.
    fn sharing_with(&self, tree: &[Uuid]) -> Vec<Uuid> {
        let aggregates: Vec<Uuid> = tree
            .iter()
            .filter_map(|uuid| self.record(uuid))
            .flat_map(|record| record.aggregates.clone())
            .collect();
        let shares =
            |uuid: &Uuid| self.has_any(uuid, &[intern(SHARING)]) && self.is_in_any(uuid, &aggregates);
        self.0.keys().filter(|uuid| shares(uuid) && !tree.contains(uuid)).copied().collect()
    }

    /// Every way to serve one group at an anchor.
    pub(crate) fn ways(&self, group: &Group, anchor: Uuid) -> Vec<Picks> {
        let tree = self.tree(anchor);
        let shared = self.sharing_with(&tree);
        let in_tree = group.in_tree.map(|of| of.filter(|of| self.0.contains_key(of)).map(|of| self.root(of)));
        if in_tree == Some(None) {
            return Vec::new();
        }
        let in_tree = in_tree.flatten();
        let here = |uuid: &Uuid| in_tree.is_none_or(|root| self.root(*uuid) == root);
        let out = |uuid: &Uuid| self.is_in_any(uuid, &group.forbidden_aggregates);
        if !group.suffix.is_empty() {
            let says_nothing =
                group.resources.is_empty() && group.required.is_empty() && group.member_of.is_empty();
            let one = |uuid: &Uuid| {
                !says_nothing
                    && (group.resources.is_empty() || here(uuid))
                    && group.resources.iter().all(|(class, amount)| self.has_room(uuid, class, *amount))
                    && self.allows(uuid, &group.required, &group.forbidden)
                    && self.is_member(uuid, &group.member_of)
                    && !out(uuid)
            };
            let serving = tree.iter().chain(&shared).filter(|uuid| one(uuid));
            return serving.map(|uuid| vec![*uuid; group.resources.len().max(1)]).collect();
        }
        if out(&anchor) {
            return Vec::new();
        }
        let all: Vec<Uuid> =
            if in_tree.is_some() { tree.clone() } else { tree.iter().chain(&shared).copied().collect() };
        let is_member = |uuid: &Uuid| {
            let by_anchor = tree.contains(uuid) && self.is_member(&anchor, &group.member_of);
            by_anchor || self.is_member(uuid, &group.member_of)
        };
        let may = |uuid: &Uuid| {
            here(uuid) && is_member(uuid) && !out(uuid) && !self.has_any(uuid, &group.forbidden)
        };
        let choices: Vec<Vec<Uuid>> = group
            .resources
            .iter()
            .map(|(class, amount)| {
                all.iter().copied().filter(|uuid| may(uuid) && self.has_room(uuid, class, *amount)).collect()
            })
            .collect();
        let together =
            |picks: &Picks| group.required.iter().all(|any| picks.iter().any(|uuid| self.has_any(uuid, any)));
        product(&choices).into_iter().filter(together).collect()
    }

    /// Whether a group can be served at all.
    pub(crate) fn serves(&self, group: &Group, query: &Query) -> bool {
        self.anchors(query).into_iter().any(|anchor| !self.ways(group, anchor).is_empty())
    }

    fn fits(&self, query: &Query, chosen: &[Picks]) -> bool {
        let own: Vec<Uuid> = query
            .groups
            .iter()
            .zip(chosen)
            .filter(|(group, _)| !group.suffix.is_empty())
            .map(|(_, picks)| picks[0])
            .collect();
        let apart = own.iter().collect::<BTreeSet<_>>().len() == own.len();
        let taken = taken(query, chosen);
        let enough = taken.iter().all(|((uuid, class), amount)| self.holds(uuid, class, *amount));
        let below_one = query.same_subtrees.iter().all(|groups| {
            let members: BTreeSet<Uuid> = groups.iter().flat_map(|index| chosen[*index].clone()).collect();
            members.is_empty()
                || members.iter().any(|top| members.iter().all(|member| self.way_up(*member).contains(top)))
        });
        let used: BTreeSet<Uuid> = taken.keys().map(|(uuid, _)| *uuid).collect();
        let roots: BTreeSet<Uuid> = used.iter().map(|uuid| self.root(*uuid)).collect();
        let shape = query.nested_aware || roots.len() == used.len();
        (!query.isolate || apart) && enough && below_one && shape
    }

    /// Every candidate.
    pub(crate) fn candidates(&self, query: &Query) -> BTreeSet<Way> {
        let mut found = BTreeSet::new();
        for anchor in self.anchors(query) {
            let ways: Vec<Vec<Picks>> = query.groups.iter().map(|group| self.ways(group, anchor)).collect();
            for chosen in product(&ways).into_iter().filter(|chosen| self.fits(query, chosen)) {
                let mappings = chosen.iter().map(|picks| picks.iter().copied().collect()).collect();
                found.insert((taken(query, &chosen), mappings));
            }
        }
        found
    }
}

fn taken(query: &Query, chosen: &[Picks]) -> BTreeMap<(Uuid, Name), i64> {
    let mut taken = BTreeMap::new();
    for (group, picks) in query.groups.iter().zip(chosen) {
        for ((class, amount), uuid) in group.resources.iter().zip(picks) {
            *taken.entry((*uuid, Arc::clone(class))).or_default() += amount;
        }
    }
    taken
}

/// What a search found, each candidate once and each amount in one place.
pub(crate) fn found(candidates: &Candidates) -> Vec<Way> {
    let uuid = |index: &u32| candidates.providers[*index as usize];
    let way = |candidate: &ec_placement_model::search::Candidate| {
        let taken: BTreeMap<(Uuid, Name), i64> = candidate
            .allocations
            .iter()
            .map(|(index, class, amount)| ((uuid(index), Arc::clone(class)), *amount))
            .collect();
        assert_eq!(taken.len(), candidate.allocations.len(), "one sum for each: {candidate:?}");
        let mappings = candidate.mappings.iter().map(|of| {
            let set: BTreeSet<Uuid> = of.iter().map(uuid).collect();
            assert_eq!(set.len(), of.len(), "each once: {candidate:?}");
            set
        });
        (taken, mappings.collect())
    };
    candidates.candidates.iter().map(way).collect()
}

//! The search, against trying everything.

use std::collections::BTreeSet;

use ec_placement_model::{
    Inventory, Name, Provider, Slot, intern,
    search::{BUDGET, Group, Options, ProviderFilter, Query, SearchError, providers, search},
};
use proptest::prelude::*;
use uuid::Uuid;

use crate::{
    hosts::{Host, Hosts, Way, found},
    support::{aggregate, id, some},
};

const CLASSES: [&str; 3] = ["VCPU", "DISK_GB", "CUSTOM_C"];

fn inventory() -> impl Strategy<Value = Inventory> {
    let ordinary = (0..7_i64).prop_map(|total| Inventory { total, ..Inventory::default() });
    let odd = (2..9_i64, 0..3_i64, 1..3_i64, 2..4_i64, 1..3_i64).prop_map(
        |(total, reserved, min_unit, max_unit, step_size)| Inventory {
            total,
            reserved,
            min_unit,
            max_unit,
            step_size,
            ..Inventory::default()
        },
    );
    prop_oneof![3 => ordinary, 1 => odd]
}

fn traits_and_aggregates(shares: f64) -> impl Strategy<Value = (Vec<Name>, Vec<Uuid>)> {
    let odds = (
        any::<bool>(),
        any::<bool>(),
        prop::bool::weighted(shares),
        any::<bool>(),
        prop::bool::weighted(0.3),
    );
    odds.prop_map(|(ours, avx, shares, first, second)| {
        let traits = [("CUSTOM_T", ours), ("HW_CPU_X86_AVX", avx), ("MISC_SHARES_VIA_AGGREGATE", shares)];
        let aggregates = [(aggregate(1), first), (aggregate(2), second)];
        (
            traits.into_iter().filter(|(_, has)| *has).map(|(name, _)| intern(name)).collect(),
            aggregates.into_iter().filter(|(_, is_in)| *is_in).map(|(uuid, _)| uuid).collect(),
        )
    })
}

/// Up to six hosts; nested or not, sharing or not. Below 9 are those whose parent nobody knows.
fn hosts() -> impl Strategy<Value = Hosts> {
    (any::<bool>(), prop_oneof![Just(0.0), Just(0.25)]).prop_flat_map(|(nested, shares)| {
        let parent = prop_oneof![4 => Just(None), 6 => (0..5_u128).prop_map(Some), 1 => Just(Some(9))];
        let amounts =
            prop::collection::btree_map(prop::sample::select(&CLASSES[..]), (inventory(), 0..3_i64), 0..4);
        let host = (parent, amounts, traits_and_aggregates(shares));
        prop::collection::vec(host, 1..7).prop_map(move |all| {
            let hosts = (0..).zip(all).map(|(number, (parent, amounts, (traits, aggregates)))| {
                let parent = parent.filter(|parent| nested && (*parent == 9 || *parent < number)).map(id);
                let mut record = Provider::new(&format!("h{number}"), parent, 0);
                (record.traits, record.aggregates) = (traits, aggregates);
                let mut used = Vec::new();
                for (class, (inventory, amount)) in amounts {
                    if amount > 0 {
                        used.push((intern(class), amount));
                    }
                    record.inventories.push((intern(class), inventory));
                }
                record.inventories.sort_by(|a, b| a.0.cmp(&b.0));
                (id(number), Host { record, used })
            });
            Hosts(hosts.collect())
        })
    })
}

fn trait_name() -> impl Strategy<Value = Name> {
    prop::sample::select(&["CUSTOM_T", "HW_CPU_X86_AVX"][..]).prop_map(intern)
}

fn seldom<T: std::fmt::Debug + Clone>(one: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<T>> {
    prop::option::weighted(0.25, one).prop_map(|one| one.into_iter().collect())
}

fn aggregates() -> impl Strategy<Value = Vec<Uuid>> {
    prop::collection::vec((1..3_u128).prop_map(aggregate), 1..3)
}

fn group() -> impl Strategy<Value = Group> {
    let resources = prop::collection::btree_map(prop::sample::select(&CLASSES[..]), 1..4_i64, 0..3);
    let in_tree = prop::option::weighted(0.15, prop::option::weighted(0.9, (0..8_u128).prop_map(id)));
    (
        resources,
        seldom(prop::collection::vec(trait_name(), 1..3)),
        seldom(trait_name()),
        seldom(aggregates()),
        seldom((1..3_u128).prop_map(aggregate)),
        in_tree,
    )
        .prop_map(|(resources, required, forbidden, member_of, forbidden_aggregates, in_tree)| Group {
            suffix: String::new(),
            resources: resources.into_iter().map(|(class, amount)| (intern(class), amount)).collect(),
            required,
            forbidden,
            member_of,
            forbidden_aggregates,
            in_tree,
        })
}

/// A query as the API lets it through: the group without a suffix asks for something, and there are others.
fn query() -> impl Strategy<Value = Query> {
    let groups = (any::<bool>(), prop::collection::vec(group(), 1..4)).prop_map(|(plain, mut groups)| {
        for (group, suffix) in groups.iter_mut().zip(["_A", "_B", "_C"]) {
            group.suffix = suffix.to_owned();
        }
        if plain && !groups[0].resources.is_empty() {
            groups[0].suffix.clear();
        }
        groups
    });
    let subtree = prop::collection::btree_set(0..3_usize, 2..4);
    let roots = (seldom(trait_name()), seldom(trait_name()));
    (groups, any::<bool>(), roots, seldom(subtree), prop::bool::weighted(0.8)).prop_map(
        |(groups, isolate, (root_required, root_forbidden), subtrees, nested_aware)| {
            let known = |of: BTreeSet<usize>| of.into_iter().filter(|index| *index < groups.len()).collect();
            let same_subtrees = subtrees.into_iter().map(known).collect();
            Query { limit: None, isolate, root_required, root_forbidden, same_subtrees, nested_aware, groups }
        },
    )
}

fn distinct(ways: &[Way]) -> BTreeSet<Way> {
    ways.iter().cloned().collect()
}

/// The summaries that go with these candidates: uuid, top, record, uses.
fn summaries(hosts: &Hosts, query: &Query, ways: &BTreeSet<Way>) -> BTreeSet<(Uuid, Uuid, String, Vec<i64>)> {
    let taken: BTreeSet<Uuid> =
        ways.iter().flat_map(|(taken, _)| taken.keys().map(|(uuid, _)| *uuid)).collect();
    let trees = query.nested_aware || !hosts.has_trees();
    let shown: BTreeSet<Uuid> =
        if trees { taken.iter().flat_map(|uuid| hosts.tree(hosts.root(*uuid))).collect() } else { taken };
    shown
        .into_iter()
        .map(|uuid| {
            let host = &hosts.0[&uuid];
            let used =
                |class: &Name| host.used.iter().find(|(own, _)| own == class).map_or(0, |(_, used)| *used);
            let used = host.record.inventories.iter().map(|(class, _)| used(class)).collect();
            (uuid, hosts.root(uuid), format!("{:?}", host.record), used)
        })
        .collect()
}

/// A tree whose parts all have some of each class.
fn wide(parts: u128) -> Hosts {
    let part = |number: u128| {
        let mut record = Provider::new(&format!("h{number}"), (number > 0).then(|| id(0)), 0);
        record.inventories = CLASSES.map(|class| (intern(class), some(8))).to_vec();
        record.inventories.sort_by(|a, b| a.0.cmp(&b.0));
        (id(number), Host { record, used: Vec::new() })
    };
    Hosts((0..parts).map(part).collect())
}

#[test]
fn a_search_that_ends_at_an_unknown_name_has_its_budget_too() {
    let state = wide(20).state();
    let all = Group {
        resources: CLASSES.map(|class| (intern(class), 1)).to_vec(),
        // Known, and nobody has it: every combination is looked at.
        required: vec![vec![intern("HW_CPU_X86_AVX2")]],
        ..Group::default()
    };
    let unknown =
        Group { suffix: "_Z".into(), resources: vec![(intern("CUSTOM_NO"), 1)], ..Group::default() };
    let query = Query { groups: vec![all, unknown], nested_aware: true, ..Query::default() };
    let searched =
        |budget| search(&state, &query, Options::default(), budget).map(|found| found.candidates.len());
    assert_eq!(searched(BUDGET), Ok(0));
    assert_eq!(searched(10_000), Err(SearchError::TooWide));
}

#[test]
fn one_combination_that_serves_a_group_is_enough_whatever_comes_after_it() {
    let mut hosts = wide(2);
    let root = hosts.0.get_mut(&id(0)).expect("the root is one of them");
    root.record.traits = vec![intern("HW_CPU_X86_AVX2")];
    let served = Group {
        resources: vec![(intern("VCPU"), 1)],
        required: vec![vec![intern("HW_CPU_X86_AVX2")]],
        ..Group::default()
    };
    let unknown =
        Group { suffix: "_Z".into(), resources: vec![(intern("CUSTOM_NO"), 1)], ..Group::default() };
    let query = Query { groups: vec![served, unknown], nested_aware: true, ..Query::default() };
    let error = search(&hosts.state(), &query, Options::default(), BUDGET).expect_err("a name is not known");
    assert_eq!(error, SearchError::UnknownClass("CUSTOM_NO".into()));
}

#[test]
fn what_must_lie_together_costs_a_step_for_each_group_that_says_so() {
    let state = wide(20).state();
    let named = |suffix: &str| Group {
        suffix: suffix.into(),
        resources: vec![(intern("VCPU"), 1)],
        ..Group::default()
    };
    let query = |repeated: usize| Query {
        groups: vec![named("_A"), named("_B")],
        // In which one may be named as often as one likes.
        same_subtrees: vec![[0, 1].repeat(repeated)],
        nested_aware: true,
        ..Query::default()
    };
    let searched =
        |query| search(&state, &query, Options::default(), 20_000).map(|found| found.candidates.len());
    assert_eq!(searched(query(1)), Ok(58));
    // Where none of those named asks for anything, nothing is wanted.
    assert_eq!(searched(Query { same_subtrees: vec![Vec::new()], ..query(1) }), Ok(20 * 20));
    assert_eq!(searched(query(100)), Err(SearchError::TooWide));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn every_candidate_is_found_and_nothing_else_with_what_belongs_to_it(hosts in hosts(), query in query()) {
        let answer = search(&hosts.state(), &query, Options::default(), BUDGET).expect("all names are known");
        let (ways, expected) = (found(&answer), hosts.candidates(&query));
        prop_assert_eq!(ways.len(), distinct(&ways).len(), "each once");
        prop_assert_eq!(distinct(&ways), expected.clone());
        let told: BTreeSet<_> = answer
            .summaries
            .iter()
            .map(|one| (one.uuid, one.root, format!("{:?}", one.provider), one.used.clone()))
            .collect();
        prop_assert_eq!(told.len(), answer.summaries.len());
        prop_assert_eq!(told, summaries(&hosts, &query, &expected));
    }

    #[test]
    fn a_limit_is_kept_and_made_full_in_whichever_order(
        hosts in hosts(),
        query in query(),
        limit in prop::option::of(1..6_usize),
        most in prop::option::of(1..6_usize),
        breadth_first: bool,
        randomize in prop::option::of(any::<u64>()),
    ) {
        let all = hosts.candidates(&query);
        let query = Query { limit, ..query };
        let options = Options { randomize, max_candidates: most, breadth_first };
        let state = hosts.state();
        let ways = found(&search(&state, &query, options, BUDGET).expect("all names are known"));
        let expected = all.len().min(limit.unwrap_or(usize::MAX)).min(most.unwrap_or(usize::MAX));
        prop_assert_eq!(ways.len(), expected);
        prop_assert_eq!(distinct(&ways).len(), expected, "each once");
        prop_assert!(distinct(&ways).is_subset(&all));
        let again = found(&search(&state, &query, options, BUDGET).expect("as before"));
        prop_assert_eq!(ways, again, "one seed has one answer");
    }

    /// What comes first in the query counts: a group that nobody serves, or a name that nobody knows.
    #[test]
    fn a_name_that_nobody_knows_is_told_unless_a_group_before_it_has_no_match(hosts in hosts(), query in query()) {
        let unknown = Group { suffix: "_Z".into(), resources: vec![(intern("CUSTOM_NO"), 1)], ..Group::default() };
        let served = query.groups.iter().all(|group| hosts.serves(group, &query));
        let mut wider = query.clone();
        wider.groups.push(unknown.clone());
        let answer = search(&hosts.state(), &wider, Options::default(), BUDGET);
        match answer {
            Err(error) => {
                prop_assert_eq!(error, SearchError::UnknownClass("CUSTOM_NO".into()));
                prop_assert!(served);
            }
            Ok(none) => prop_assert!(!served && none.candidates.is_empty()),
        }
    }

    #[test]
    fn a_list_has_the_providers_that_its_filter_names(hosts in hosts(), group in group(), one in 0..8_u128, by in 0..4) {
        let filter = ProviderFilter {
            name: (by == 1).then(|| format!("h{one}")),
            uuid: (by == 2).then(|| Some(id(one))),
            in_tree: group.in_tree,
            required: group.required,
            forbidden: group.forbidden,
            member_of: group.member_of,
            forbidden_aggregates: group.forbidden_aggregates,
            resources: group.resources,
        };
        let state = hosts.state();
        let slots: Vec<Slot> = providers(&state, &filter, BUDGET).expect("all names are known");
        let told: BTreeSet<Uuid> = slots.iter().map(|slot| state.node(*slot).uuid).collect();
        prop_assert_eq!(told.len(), slots.len());
        let in_tree = |uuid: Uuid| {
            filter.in_tree.is_none_or(|of| {
                of.is_some_and(|of| hosts.0.contains_key(&of) && hosts.root(of) == hosts.root(uuid))
            })
        };
        let wanted = |(uuid, host): (&Uuid, &Host)| {
            filter.name.as_ref().is_none_or(|name| **name == *host.record.name)
                && filter.uuid.is_none_or(|own| own == Some(*uuid))
                && in_tree(*uuid)
                && hosts.allows(uuid, &filter.required, &filter.forbidden)
                && hosts.is_member(uuid, &filter.member_of)
                && !filter.forbidden_aggregates.iter().any(|one| host.record.aggregates.contains(one))
                && filter.resources.iter().all(|(class, amount)| hosts.has_room(uuid, class, *amount))
        };
        let expected: BTreeSet<Uuid> = hosts.0.iter().filter(|one| wanted(*one)).map(|(uuid, _)| *uuid).collect();
        prop_assert_eq!(told, expected);
    }
}

//! The search, against trying everything.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_model::{
    Inventory, Name, Provider, Slot, State, intern,
    search::{BUDGET, Group, Options, ProviderFilter, Query, SearchError, providers, search},
};
use proptest::prelude::*;
use uuid::Uuid;

use crate::{
    hosts::{Host, Hosts, Way, found},
    support::{aggregate, id},
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
    let in_tree = prop::option::weighted(0.15, (0..8_u128).prop_map(id));
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
            uuid: (by == 2).then(|| id(one)),
            in_tree: group.in_tree,
            required: group.required,
            forbidden: group.forbidden,
            member_of: group.member_of,
            forbidden_aggregates: group.forbidden_aggregates,
            resources: group.resources,
        };
        let state = hosts.state();
        let slots: Vec<Slot> = providers(&state, &filter).expect("all names are known");
        let told: BTreeSet<Uuid> = slots.iter().map(|slot| state.node(*slot).uuid).collect();
        prop_assert_eq!(told.len(), slots.len());
        let in_tree = |uuid: Uuid| {
            filter.in_tree.is_none_or(|of| hosts.0.contains_key(&of) && hosts.root(of) == hosts.root(uuid))
        };
        let wanted = |(uuid, host): (&Uuid, &Host)| {
            filter.name.as_ref().is_none_or(|name| **name == *host.record.name)
                && filter.uuid.is_none_or(|own| own == *uuid)
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

/// A host with eight of everything.
fn host(number: u128, parent: Option<u128>, change: impl FnOnce(&mut Provider)) -> (Uuid, Host) {
    let mut record = Provider::new(&format!("h{number}"), parent.map(id), 0);
    record.inventories = ["DISK_GB", "VCPU"]
        .map(|class| (intern(class), Inventory { total: 8, ..Inventory::default() }))
        .into();
    change(&mut record);
    (id(number), Host { record, used: Vec::new() })
}

fn all(hosts: impl IntoIterator<Item = (Uuid, Host)>) -> Hosts {
    Hosts(hosts.into_iter().collect::<BTreeMap<_, _>>())
}

fn asks(suffix: &str, resources: &[(&str, i64)]) -> Group {
    Group {
        suffix: suffix.to_owned(),
        resources: resources.iter().map(|(class, amount)| (intern(class), *amount)).collect(),
        ..Group::default()
    }
}

fn of(groups: Vec<Group>) -> Query {
    Query { groups, nested_aware: true, ..Query::default() }
}

#[test]
fn names_that_nobody_knows_are_told_in_the_order_in_which_they_are_looked_at() {
    let hosts = all([host(1, None, |_| {})]).state();
    let cpu = || asks("", &[("VCPU", 1)]);
    let no_trait = || vec![intern("CUSTOM_NO")];
    let nobody = vec![vec![aggregate(1)]];
    let unknown_trait = Some(SearchError::UnknownTrait("CUSTOM_NO".into()));
    let unknown_class = Some(SearchError::UnknownClass("CUSTOM_NO".into()));
    let cases = [
        (Query { root_required: no_trait(), ..of(vec![cpu()]) }, &unknown_trait),
        (Query { root_forbidden: no_trait(), ..of(vec![cpu()]) }, &unknown_trait),
        (of(vec![Group { required: vec![no_trait()], ..cpu() }]), &unknown_trait),
        (of(vec![Group { forbidden: no_trait(), ..cpu() }]), &unknown_trait),
        (of(vec![asks("", &[("VCPU", 1), ("CUSTOM_NO", 1)])]), &unknown_class),
        (of(vec![Group { required: vec![no_trait()], ..asks("", &[("CUSTOM_NO", 1)]) }]), &unknown_class),
        // Who is in no aggregate is found out before traits are looked at, and after classes.
        (of(vec![Group { required: vec![no_trait()], member_of: nobody.clone(), ..cpu() }]), &None),
        (of(vec![Group { member_of: nobody, ..asks("", &[("CUSTOM_NO", 1)]) }]), &unknown_class),
        // Roots that nobody is come first of all.
        (Query { root_required: vec![intern("CUSTOM_T")], ..of(vec![asks("", &[("CUSTOM_NO", 1)])]) }, &None),
        (of(vec![Group { in_tree: Some(id(9)), ..cpu() }]), &None),
    ];
    for (query, expected) in cases {
        let answer = search(&hosts, &query, Options::default(), BUDGET);
        assert_eq!(answer.as_ref().err(), expected.as_ref(), "{query:?}");
        assert!(answer.is_err() || answer.is_ok_and(|none| none.candidates.is_empty()), "{query:?}");
    }
    let filters = [
        (ProviderFilter { required: vec![no_trait()], ..ProviderFilter::default() }, &unknown_trait),
        (ProviderFilter { forbidden: no_trait(), ..ProviderFilter::default() }, &unknown_trait),
        (
            ProviderFilter { resources: vec![(intern("CUSTOM_NO"), 1)], ..ProviderFilter::default() },
            &unknown_class,
        ),
        (
            ProviderFilter { in_tree: Some(id(9)), required: vec![no_trait()], ..ProviderFilter::default() },
            &None,
        ),
        (
            ProviderFilter {
                required: vec![vec![intern("CUSTOM_T")]],
                forbidden: no_trait(),
                ..ProviderFilter::default()
            },
            &None,
        ),
        (
            ProviderFilter {
                member_of: vec![vec![aggregate(1)]],
                resources: vec![(intern("CUSTOM_NO"), 1)],
                ..ProviderFilter::default()
            },
            &None,
        ),
    ];
    let nobody = State::default();
    let answer = search(&nobody, &of(vec![asks("", &[("CUSTOM_NO", 1)])]), Options::default(), BUDGET);
    assert_eq!(answer.err(), unknown_class, "although there is nobody at all");
    for (filter, expected) in filters {
        assert_eq!(providers(&hosts, &filter).err(), *expected, "{filter:?}");
    }
}

#[test]
fn trees_are_emptied_one_after_the_other_or_each_in_turn() {
    let children = (1..4_u128).flat_map(|root| {
        let bare = host(root, None, |record| record.inventories.clear());
        [bare, host(root * 10, Some(root), |_| {}), host(root * 10 + 1, Some(root), |_| {})]
    });
    let hosts = all(children);
    let state = hosts.state();
    let roots = |breadth_first, limit| -> Vec<Uuid> {
        let query = Query { limit, ..of(vec![asks("", &[("VCPU", 1)])]) };
        let options = Options { breadth_first, ..Options::default() };
        let ways = found(&search(&state, &query, options, BUDGET).expect("all names are known"));
        ways.iter().flat_map(|(taken, _)| taken.keys()).map(|(uuid, _)| hosts.root(*uuid)).collect()
    };
    let deep = roots(false, None);
    assert!(deep.chunks(2).all(|pair| pair[0] == pair[1]) && deep.len() == 6, "{deep:?}");
    let broad = roots(true, None);
    assert_eq!(broad[..3].iter().collect::<BTreeSet<_>>().len(), 3, "{broad:?}");
    assert_eq!(broad[..3], broad[3..]);
    assert_eq!(roots(true, Some(4)), broad[..4]);
}

#[test]
fn whom_a_seed_chooses_is_anybody() {
    let state = all((0..6).map(|number| host(number, None, |_| {}))).state();
    let query = Query { limit: Some(1), ..of(vec![asks("", &[("VCPU", 1)])]) };
    let chosen: BTreeSet<Way> = (0..40)
        .flat_map(|seed| {
            let options = Options { randomize: Some(seed), ..Options::default() };
            found(&search(&state, &query, options, BUDGET).expect("all names are known"))
        })
        .collect();
    assert_eq!(chosen.len(), 6);
    let order = |seed| {
        let options = Options { randomize: Some(seed), ..Options::default() };
        found(&search(&state, &Query { limit: None, ..query.clone() }, options, BUDGET).expect("as above"))
    };
    assert!((0..10).any(|seed| order(seed) != order(10)), "an order of its own");
}

/// The steps that a search takes: with one less it is refused.
fn cost(state: &State, query: &Query) -> u64 {
    let is_enough = |budget: &u64| search(state, query, Options::default(), *budget).is_ok();
    let (mut refused, mut enough) = (0, 1 << 20);
    assert!(is_enough(&enough) && !is_enough(&refused));
    while enough - refused > 1 {
        let middle = u64::midpoint(refused, enough);
        if is_enough(&middle) { enough = middle } else { refused = middle }
    }
    enough
}

#[test]
fn what_is_looked_at_and_what_is_kept_is_counted_and_bounded() {
    let one = all([host(1, None, |_| {})]).state();
    // An anchor and its one provider; one way; one choice; a candidate of one amount and one group, and what it weighs.
    assert_eq!(cost(&one, &of(vec![asks("", &[("VCPU", 1)])])), (1 + 1) + 1 + 1 + (1 + 1 + 8));
    // The second choice looks through what the first took.
    let two = of(vec![asks("_A", &[("VCPU", 1)]), asks("_B", &[("VCPU", 1)])]);
    assert_eq!(cost(&one, &two), (1 + 1) + (1 + 1) + (1 + 2) + (2 + 2 + 8));
    let bare = |record: &mut Provider| record.inventories.clear();
    let tree = all([host(1, None, bare), host(2, Some(1), |_| {}), host(3, Some(1), |_| {})]).state();
    // Four ways to pick two out of two, each kept, chosen and told.
    let both = of(vec![asks("", &[("VCPU", 1), ("DISK_GB", 1)])]);
    assert_eq!(cost(&tree, &both), (1 + 3) + 4 * (2 + 8) + 4 + 4 + 4 * (2 + 1 + 8));
    let shared = all([
        host(1, None, |record| record.aggregates = vec![aggregate(1)]),
        host(2, None, |record| {
            record.inventories.clear();
            (record.aggregates, record.traits) =
                (vec![aggregate(1)], vec![intern("MISC_SHARES_VIA_AGGREGATE")]);
        }),
    ])
    .state();
    assert_eq!(cost(&shared, &of(vec![asks("_A", &[("VCPU", 1)])])), (1 + 1 + 1) + 1 + 1 + (1 + 1 + 8));
    let refused = search(&tree, &both, Options::default(), 50).err();
    assert_eq!(refused, Some(SearchError::TooWide));
}

/// What is asked of one host in a thousand is found there, by whichever index has few; nobody else is looked at.
#[test]
fn a_search_goes_by_the_index_that_has_the_fewest() {
    let rare = |number: u128, record: &mut Provider| {
        if number % 2 == 0 {
            record.traits = vec![intern("HW_CPU_X86_AVX")];
        }
        if number == 70 {
            (record.traits, record.aggregates) = (vec![intern("CUSTOM_T")], vec![aggregate(1)]);
            record.inventories[0].1.total = 100;
        }
    };
    let state = all((0..200).map(|number| host(number, None, |record| rare(number, record)))).state();
    let one = (1 + 1) + 1 + 1 + (1 + 1 + 8);
    let cpu = || asks("", &[("VCPU", 1)]);
    assert_eq!(cost(&state, &of(vec![cpu()])), 200 * one);
    assert_eq!(cost(&state, &Query { limit: Some(3), ..of(vec![cpu()]) }), 3 * one);
    assert_eq!(cost(&state, &of(vec![Group { required: vec![vec![intern("CUSTOM_T")]], ..cpu() }])), one);
    assert_eq!(cost(&state, &of(vec![Group { member_of: vec![vec![aggregate(1)]], ..cpu() }])), one);
    let half = Group { required: vec![vec![intern("HW_CPU_X86_AVX")]], ..cpu() };
    assert_eq!(cost(&state, &of(vec![half])), 99 * one);
    // By the room that is left, of both classes and of both groups.
    assert_eq!(cost(&state, &of(vec![asks("", &[("VCPU", 1), ("DISK_GB", 90)])])), one + 1);
    let groups = || [asks("_A", &[("VCPU", 1)]), asks("_B", &[("DISK_GB", 90)])];
    let both = (1 + 1) + (1 + 1) + (1 + 2) + (2 + 2 + 8);
    assert_eq!(cost(&state, &of(groups().into())), both);
    assert_eq!(cost(&state, &of(groups().into_iter().rev().collect())), both);
}

/// One provider that shares with a hundred hosts is reached from a hundred anchors; two hosts are fewer.
#[test]
fn who_shares_with_many_is_no_short_way() {
    let members = (0..100).map(|number| {
        host(number, None, |record| {
            record.aggregates = vec![aggregate(1)];
            record.inventories.retain(|(class, _)| **class == *"VCPU");
            record.inventories[0].1.total = if number < 2 { 100 } else { 8 };
        })
    });
    let sharing = host(200, None, |record| {
        (record.aggregates, record.traits) = (vec![aggregate(1)], vec![intern("MISC_SHARES_VIA_AGGREGATE")]);
        record.inventories.retain(|(class, _)| **class == *"DISK_GB");
    });
    let state = all(members.chain([sharing])).state();
    let query = of(vec![asks("_A", &[("DISK_GB", 1)]), asks("_B", &[("VCPU", 90)])]);
    let one = (1 + 1 + 1) + (1 + 1) + (1 + 2) + (2 + 2 + 8);
    assert_eq!(cost(&state, &query), 2 * one);
}

#[test]
fn groups_are_held_against_each_other() {
    let only = |class: &'static str| {
        move |record: &mut Provider| record.inventories.retain(|(own, _)| **own == *class)
    };
    let hosts = all([
        host(1, None, |record| record.inventories.clear()),
        host(2, Some(1), only("VCPU")),
        host(3, Some(1), only("DISK_GB")),
    ]);
    let state = hosts.state();
    let number = |query: &Query| {
        let answer = search(&state, query, Options::default(), BUDGET).expect("all names are known");
        assert_eq!(distinct(&found(&answer)), hosts.candidates(query));
        answer.candidates.len()
    };
    let apart = || vec![asks("_A", &[("VCPU", 1)]), asks("_B", &[("DISK_GB", 1)])];
    assert_eq!(number(&of(apart())), 1);
    assert_eq!(
        number(&Query { same_subtrees: vec![vec![0, 1]], ..of(apart()) }),
        0,
        "neither is above the other"
    );
    assert_eq!(number(&Query { same_subtrees: vec![vec![0]], ..of(apart()) }), 1);
    let old = |groups| Query { nested_aware: false, ..of(groups) };
    assert_eq!(number(&old(apart())), 0, "two of one tree");
    let twice = || vec![asks("_A", &[("VCPU", 2)]), asks("_B", &[("VCPU", 3)])];
    assert_eq!(number(&old(twice())), 1, "one of one tree");
    assert_eq!(number(&Query { isolate: true, ..of(twice()) }), 0);
    let answer = search(&state, &of(twice()), Options::default(), BUDGET).expect("all names are known");
    assert_eq!(found(&answer)[0].0, [((id(2), intern("VCPU")), 5)].into(), "what both take");
    let most = vec![asks("_A", &[("VCPU", 4)]), asks("_B", &[("VCPU", 4)])];
    assert_eq!(number(&of(most)), 1);
    assert_eq!(
        number(&of(vec![asks("_A", &[("VCPU", 4)]), asks("_B", &[("VCPU", 5)])])),
        0,
        "more than there is"
    );
}

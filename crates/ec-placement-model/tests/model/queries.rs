//! Searches told one by one: names that nobody knows, orders, and what is looked at.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_model::{
    Inventory, Provider, State, intern,
    search::{BUDGET, Group, Options, ProviderFilter, Query, SearchError, providers, search},
};
use uuid::Uuid;

use crate::{
    hosts::{Host, Hosts, Way, found},
    support::{aggregate, id},
};

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
        (of(vec![Group { in_tree: Some(Some(id(9))), ..cpu() }]), &None),
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
            ProviderFilter {
                in_tree: Some(Some(id(9))),
                required: vec![no_trait()],
                ..ProviderFilter::default()
            },
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
        assert_eq!(providers(&hosts, &filter, BUDGET).err(), *expected, "{filter:?}");
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
    assert_eq!(roots(false, Some(3)), deep[..3]);
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

/// What so many names cost each provider that is held against them: the first handful is looked for in what it takes anyway.
fn beyond(names: u64) -> u64 {
    names - 16
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
        if number.is_multiple_of(2) {
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
    // Whether anybody is in it at all was looked at before.
    assert_eq!(cost(&state, &of(vec![Group { member_of: vec![vec![aggregate(1)]], ..cpu() }])), 1 + one);
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
    let one = (1 + 2) + (1 + 1) + (1 + 2) + (2 + 2 + 8);
    assert_eq!(cost(&state, &query), 2 * one);
}

/// Prices are of the work: what is asked every day is done at once in a cloud of as many hosts as it ever was.
#[test]
fn an_ordinary_query_costs_no_more_for_its_names() {
    let one = all([host(1, None, |record| {
        record.traits = vec![intern("HW_CPU_X86_AVX")];
        record.inventories[0].1.total = 100;
    })])
    .state();
    let classes = || asks("", &[("VCPU", 1), ("DISK_GB", 1)]);
    let named = Group {
        required: vec![vec![intern("HW_CPU_X86_AVX")]],
        forbidden: vec![intern("HW_CPU_X86_AVX2")],
        ..classes()
    };
    assert_eq!(cost(&one, &of(vec![named])), cost(&one, &of(vec![classes()])));
    // Who is only passed by has a price, too, however few names rule it out.
    let passed =
        all([host(1, None, |record| record.traits = vec![intern("HW_CPU_X86_AVX")]), host(2, None, |_| {})]);
    let roots = Query { root_required: vec![intern("HW_CPU_X86_AVX")], ..of(vec![classes()]) };
    assert!(cost(&passed.state(), &roots) > cost(&one, &roots));
    // A step for each beyond the handful, in whichever groups these are.
    let groups =
        |number: u32| of((0..number).map(|group| asks(&format!("_{group}"), &[("VCPU", 1)])).collect());
    let next = |number| cost(&one, &groups(number)) - cost(&one, &groups(number - 1));
    assert_eq!((next(16) - next(15), next(17) - next(16), next(18) - next(17)), (0, 1, 0));
}

/// As many lists as there is room for in a query. None of them is gone through unless that is counted.
#[test]
fn what_lists_make_a_search_look_at_is_counted() {
    let in_one = |number: u128| {
        host(number, None, |record| {
            (record.aggregates, record.traits) = (vec![aggregate(1)], vec![intern("HW_CPU_X86_AVX")]);
        })
    };
    let (hosts, lists) = (50, 100);
    let flat = all((0..50).map(in_one));
    let nested = all((0..50).map(in_one).chain([host(60, Some(0), |_| {})]));
    let cpu = || asks("", &[("VCPU", 1)]);
    let unknown = || asks("_Z", &[("CUSTOM_NO", 1)]);
    // All of them are in the first of each list, and in none of the last list of all, in which are as many others.
    let others = (100..200).map(|number| host(number, None, |record| record.aggregates = vec![aggregate(9)]));
    let apart = all((0..50).map(in_one).chain(others)).state();
    let wanted = |last: u128| {
        let lists = (0..100).map(|number| vec![aggregate(1), aggregate(100 + number)]);
        Group { member_of: lists.chain([vec![aggregate(last)]]).collect(), ..cpu() }
    };
    let refused = |state: &State, query: &Query, budget: u64| {
        search(state, query, Options::default(), budget).err() == Some(SearchError::TooWide)
    };
    let nobody = search(&flat.state(), &of(vec![wanted(8)]), Options::default(), 0);
    assert!(
        nobody.is_ok_and(|none| none.candidates.is_empty()),
        "nobody is in the last, so nobody is looked at"
    );
    assert_eq!(
        cost(&apart, &of(vec![wanted(9)])),
        hosts * (1 + beyond(2 * lists + 1)),
        "each of the fewer once"
    );
    // A name that nobody knows, before which each anchor is asked whether it serves the first.
    let query = of(vec![Group { forbidden: vec![intern("HW_CPU_X86_AVX"); 100], ..cpu() }, unknown()]);
    assert!(refused(&flat.state(), &query, hosts * beyond(lists)) && !refused(&flat.state(), &query, BUDGET));
    for state in [flat.state(), nested.state()] {
        // Where nobody can serve that, none is.
        let query = of(vec![wanted(8), unknown()]);
        assert!(!refused(&state, &query, 0), "nobody is looked at");
        let query = of(vec![wanted(1)]);
        assert!(refused(&state, &query, hosts * beyond(2 * lists)) && !refused(&state, &query, BUDGET));
        let all_of = vec![intern("HW_CPU_X86_AVX"); 100];
        let any_of = vec![all_of.clone()];
        let none_of = vec![intern("HW_CPU_X86_AVX2"); 100];
        let queries = [
            of(vec![Group { required: any_of, ..cpu() }]),
            of(vec![Group { required: all_of.iter().map(|name| vec![name.clone()]).collect(), ..cpu() }]),
            of(vec![Group { forbidden: none_of.clone(), ..cpu() }]),
            of(vec![Group { forbidden_aggregates: (100..200).map(aggregate).collect(), ..cpu() }]),
            Query { root_required: all_of.clone(), ..of(vec![cpu()]) },
            Query { root_forbidden: none_of, ..of(vec![cpu()]) },
            // Of which there is none: all are looked at for that.
            Query { root_forbidden: all_of, ..of(vec![cpu()]) },
        ];
        for query in queries {
            assert!(refused(&state, &query, hosts * beyond(lists) - 1), "{query:?}");
            assert!(!refused(&state, &query, BUDGET), "{query:?}");
        }
    }
}

/// Traits that are met together are looked for in every combination.
#[test]
fn every_combination_is_held_against_each_name() {
    let bare = |record: &mut Provider| record.inventories.clear();
    let tree = all([host(1, None, bare), host(2, Some(1), |_| {}), host(3, Some(1), |_| {})]).state();
    let both = |required: usize| {
        let required = vec![vec![intern("HW_CPU_X86_AVX2"); required]];
        of(vec![Group { required, ..asks("", &[("VCPU", 1), ("DISK_GB", 1)]) }])
    };
    // Two classes, and four combinations of two providers each.
    assert_eq!(cost(&tree, &both(100)), (1 + 3 * (1 + beyond(2 + 100))) + 4 * 2 * (1 + beyond(100)));
}

#[test]
fn a_list_has_its_budget_too() {
    let hosts = all((0..50).map(|number| {
        host(number, None, |record| {
            (record.aggregates, record.traits) = (vec![aggregate(1)], vec![intern("HW_CPU_X86_AVX")]);
        })
    }));
    let state = hosts.state();
    let listed = |filter: &ProviderFilter, budget| providers(&state, filter, budget).map(|found| found.len());
    let all_of_them = ProviderFilter::default();
    assert_eq!((listed(&all_of_them, 50), listed(&all_of_them, 49)), (Ok(50), Err(SearchError::TooWide)));
    let avx = |number| vec![intern("HW_CPU_X86_AVX"); number];
    let filters = [
        ProviderFilter { required: vec![avx(100)], ..ProviderFilter::default() },
        ProviderFilter { forbidden: vec![intern("HW_CPU_X86_AVX2"); 100], ..ProviderFilter::default() },
        ProviderFilter { member_of: vec![vec![aggregate(1)]; 100], ..ProviderFilter::default() },
        ProviderFilter {
            forbidden_aggregates: (100..200).map(aggregate).collect(),
            ..ProviderFilter::default()
        },
    ];
    for filter in filters {
        assert_eq!(listed(&filter, 50 * beyond(100)), Err(SearchError::TooWide), "{filter:?}");
        assert_eq!(listed(&filter, BUDGET), Ok(50), "{filter:?}");
    }
    // The last is what nobody has, or is in: that is known without looking at anybody.
    let avx_and = ProviderFilter {
        required: vec![avx(1), vec![intern("HW_CPU_X86_AVX2")]],
        ..ProviderFilter::default()
    };
    let in_both = ProviderFilter {
        member_of: vec![vec![aggregate(1)], vec![aggregate(2)]],
        ..ProviderFilter::default()
    };
    assert_eq!((listed(&avx_and, 0), listed(&in_both, 0)), (Ok(0), Ok(0)));
    // Where each is somebody's, who has the rarer one is looked at once.
    let either = all((0..50).map(|number| {
        host(number, None, |record| {
            let name = if number < 20 { "HW_CPU_X86_AVX2" } else { "HW_CPU_X86_AVX" };
            record.traits = vec![intern(name)];
        })
    }));
    let both = |budget| providers(&either.state(), &avx_and, budget).map(|found| found.len());
    assert_eq!((both(20), both(19)), (Ok(0), Err(SearchError::TooWide)));
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
        assert_eq!(found(&answer).into_iter().collect::<BTreeSet<Way>>(), hosts.candidates(query));
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
    let own = asks("", &[("VCPU", 8)]);
    assert_eq!(number(&of(vec![own, asks("_B", &[("DISK_GB", 8)])])), 1, "another class of another host");
    let bare = host(1, None, |record| record.inventories.clear());
    let two = all([bare, host(2, Some(1), |_| {}), host(3, Some(1), |_| {})]);
    let all_of_both = of(vec![asks("_A", &[("VCPU", 8)]), asks("_B", &[("VCPU", 8)])]);
    let answer = search(&two.state(), &all_of_both, Options::default(), BUDGET).expect("all names are known");
    assert_eq!(answer.candidates.len(), 2, "each has its own");
    let isolated = Query { isolate: true, ..all_of_both };
    let answer = search(&two.state(), &isolated, Options::default(), BUDGET).expect("all names are known");
    assert_eq!(answer.candidates.len(), 2, "they are two already");
    let root = Group { required: vec![vec![intern("CUSTOM_T")]], ..asks("_R", &[]) };
    let below = Query { same_subtrees: vec![vec![0, 1]], ..of(vec![root, asks("_A", &[("VCPU", 1)])]) };
    let marked = host(1, None, |record| record.traits = vec![intern("CUSTOM_T")]);
    let answer = search(&all([marked, host(2, Some(1), |_| {})]).state(), &below, Options::default(), BUDGET);
    assert_eq!(answer.map(|found| found.candidates.len()), Ok(2), "the root itself, and who is below it");
}

#[test]
fn a_list_is_of_one_name_one_uuid_or_one_tree() {
    let hosts = all([host(1, None, |_| {}), host(2, Some(1), |_| {}), host(3, None, |_| {})]);
    let state = hosts.state();
    let listed = |filter: ProviderFilter| {
        let slots = providers(&state, &filter, BUDGET).expect("all names are known");
        slots.into_iter().map(|slot| state.node(slot).uuid.as_u128()).collect::<BTreeSet<u128>>()
    };
    let in_tree = |number| ProviderFilter { in_tree: Some(Some(id(number))), ..ProviderFilter::default() };
    assert_eq!(listed(ProviderFilter::default()), [1, 2, 3].into());
    assert_eq!(listed(in_tree(2)), [1, 2].into());
    assert_eq!(listed(in_tree(3)), [3].into());
    assert_eq!(listed(ProviderFilter { name: Some("h2".into()), ..in_tree(1) }), [2].into());
    assert_eq!(listed(ProviderFilter { uuid: Some(Some(id(2))), ..in_tree(1) }), [2].into());
    let nobody = Some(None);
    assert_eq!(listed(ProviderFilter { uuid: nobody, ..ProviderFilter::default() }), [].into());
    assert_eq!(listed(ProviderFilter { in_tree: nobody, ..ProviderFilter::default() }), [].into());
    for other in [1, 2] {
        assert_eq!(listed(ProviderFilter { name: Some(format!("h{other}")), ..in_tree(3) }), [].into());
        assert_eq!(listed(ProviderFilter { uuid: Some(Some(id(other))), ..in_tree(3) }), [].into());
        let both = ProviderFilter {
            name: Some("h3".into()),
            uuid: Some(Some(id(other))),
            ..ProviderFilter::default()
        };
        assert_eq!(listed(both), [].into());
    }
}

/// 1 above 2, which has processors, and 3, which has disks; 4 shares its disks with both by the first aggregate.
#[test]
fn a_group_without_a_suffix_is_served_by_a_tree_and_by_who_shares_with_it() {
    let of_class = |class: &'static str| {
        move |record: &mut Provider| record.inventories.retain(|(own, _)| **own == *class)
    };
    let hosts = |change: &dyn Fn(u128, &mut Provider)| {
        let made = |number: u128, parent, class| {
            host(number, parent, |record| {
                of_class(class)(record);
                change(number, record);
            })
        };
        let sharing = host(4, None, |record| {
            of_class("DISK_GB")(record);
            (record.aggregates, record.traits) =
                (vec![aggregate(1)], vec![intern("MISC_SHARES_VIA_AGGREGATE")]);
            change(4, record);
        });
        all([made(1, None, "none"), made(2, Some(1), "VCPU"), made(3, Some(1), "DISK_GB"), sharing])
    };
    // Who serves the disk; nobody where there is no candidate.
    let disks = |hosts: &Hosts, group: Group| {
        let query =
            of(vec![Group { resources: asks("", &[("DISK_GB", 1), ("VCPU", 1)]).resources, ..group }]);
        let answer = search(&hosts.state(), &query, Options::default(), BUDGET).expect("all names are known");
        let ways: BTreeSet<Way> = found(&answer).into_iter().collect();
        assert_eq!(ways, hosts.candidates(&query));
        let disk = |way: Way| {
            way.0.into_keys().find(|(_, class)| **class == *"DISK_GB").map(|(uuid, _)| uuid.as_u128())
        };
        ways.into_iter().filter_map(disk).collect::<Vec<u128>>()
    };
    let alone = hosts(&|_, _| {});
    assert_eq!(disks(&alone, Group::default()), [3], "nobody of the tree is in an aggregate");
    let with = |own: u128, number: u128| {
        hosts(&move |at, record| {
            if at == own {
                record.aggregates = vec![aggregate(number)];
            }
        })
    };
    let shared = with(2, 1);
    let member_of = |number| Group { member_of: vec![vec![aggregate(number)]], ..Group::default() };
    let not_of = |number| Group { forbidden_aggregates: vec![aggregate(number)], ..Group::default() };
    assert_eq!(disks(&shared, Group::default()), [3, 4]);
    assert_eq!(disks(&shared, Group { in_tree: Some(Some(id(3))), ..Group::default() }), [3]);
    assert_eq!(disks(&shared, Group { in_tree: Some(Some(id(4))), ..Group::default() }), []);
    assert_eq!(disks(&shared, member_of(1)), [4], "3 is in none, nor is its root");
    assert_eq!(disks(&shared, not_of(1)), [], "2 is in it");
    assert_eq!(disks(&with(1, 1), member_of(1)), [3, 4], "the root is in it, so all of its tree are");
    assert_eq!(disks(&with(1, 2), member_of(2)), [3]);
    assert_eq!(disks(&with(1, 2), not_of(2)), [], "the root is in it");
    assert_eq!(disks(&with(3, 1), not_of(1)), [], "3 is in it, and 4");
    let fast = |own: u128| {
        hosts(&move |at, record| {
            if at == 2 {
                record.aggregates = vec![aggregate(1)];
            }
            if at == own {
                record.traits.insert(0, intern("CUSTOM_T"));
            }
        })
    };
    let required = || Group { required: vec![vec![intern("CUSTOM_T")]], ..Group::default() };
    let forbidden = || Group { forbidden: vec![intern("CUSTOM_T")], ..Group::default() };
    assert_eq!((disks(&fast(2), required()), disks(&fast(2), forbidden())), (vec![3, 4], vec![]));
    assert_eq!((disks(&fast(3), required()), disks(&fast(3), forbidden())), (vec![3], vec![4]));
    assert_eq!((disks(&fast(4), required()), disks(&fast(4), forbidden())), (vec![4], vec![3]));
    assert_eq!((disks(&fast(1), required()), disks(&fast(1), forbidden())), (vec![], vec![3, 4]));
}

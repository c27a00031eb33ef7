//! A draft, against writing each of its changes at once.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_model::{
    Change, Command, Consumer, Draft, Extra, Key, ModelError, Part, Provider, Record, State, decide, intern,
};
use proptest::prelude::*;
use serde_json::json;
use uuid::Uuid;

use crate::support::{
    CLASSES, REVISION, TRAITS, after, aggregate, claim, id, names, portrait, some, stored, tried,
};

/// Any command, on few things, so that they meet.
fn command() -> impl Strategy<Value = Command> {
    let host = || (1..5_u128).prop_map(id);
    let name = || (1..5_u128).prop_map(|number| format!("h{number}"));
    let class = || prop::sample::select(&CLASSES[..]).prop_map(intern);
    let owned = || prop::sample::select(&["CUSTOM_C", "CUSTOM_D"][..]).prop_map(intern);
    let generation = || prop::option::weighted(0.2, 0..6_i64);
    let amounts = || prop::collection::btree_map(class(), (1..9_i64).prop_map(some), 0..3);
    let wanted = || {
        let of = prop::collection::btree_map(prop::sample::select(&CLASSES[..]), 1..5_i64, 1..3);
        let allocations = prop::collection::btree_map(1..5_u128, of, 0..3);
        (100..103_u128, allocations).prop_map(|(consumer, allocations)| {
            let of: Vec<(u128, Vec<_>)> =
                allocations.into_iter().map(|(host, of)| (host, of.into_iter().collect())).collect();
            let of: Vec<_> = of.iter().map(|(host, of)| (*host, of.as_slice())).collect();
            claim(consumer, &of)
        })
    };
    prop_oneof![
        3 => (host(), name(), prop::option::of(host()))
            .prop_map(|(uuid, name, parent)| Command::CreateProvider { uuid, name, parent }),
        1 => (host(), name(), prop::option::of(prop::option::of(host())), any::<bool>()).prop_map(
            |(uuid, name, parent, may_move)| Command::UpdateProvider { uuid, name, parent, may_move }
        ),
        1 => host().prop_map(Command::DeleteProvider),
        3 => (host(), class(), 1..9_i64).prop_map(|(provider, class, total)| Command::AddInventory {
            provider,
            class,
            inventory: some(total),
        }),
        1 => (host(), 0..6_i64, class(), 1..9_i64).prop_map(|(provider, generation, class, total)| {
            Command::UpdateInventory { provider, generation, class, inventory: some(total) }
        }),
        1 => (host(), generation(), amounts()).prop_map(|(provider, generation, amounts)| {
            Command::SetInventories { provider, generation, inventories: amounts.into_iter().collect() }
        }),
        1 => (host(), class()).prop_map(|(provider, class)| Command::DeleteInventory { provider, class }),
        1 => (host(), generation(), 1..3_u128).prop_map(|(provider, generation, number)| {
            Command::SetAggregates { provider, generation, aggregates: vec![aggregate(number)] }
        }),
        3 => (host(), generation(), prop::sample::subsequence(&TRAITS[..], 0..=2)).prop_map(
            |(provider, generation, traits)| Command::SetTraits { provider, generation, traits: names(&traits) }
        ),
        2 => Just(Command::EnsureTrait(intern("CUSTOM_T"))),
        1 => Just(Command::DeleteTrait(intern("CUSTOM_T"))),
        2 => owned().prop_map(Command::EnsureClass),
        1 => (owned(), owned()).prop_map(|(from, to)| Command::RenameClass { from, to }),
        1 => owned().prop_map(Command::DeleteClass),
        6 => prop::collection::vec(wanted(), 1..3).prop_map(Command::SetAllocations),
        1 => (100..103_u128).prop_map(|number| Command::DeleteAllocations(id(number))),
        1 => (host(), 0..6_i64, amounts(), wanted()).prop_map(|(provider, generation, amounts, wanted)| {
            let inventories = vec![(provider, generation, amounts.into_iter().collect())];
            Command::Reshape { inventories, consumers: vec![wanted] }
        }),
    ]
}

/// All that a draft would write, in order.
fn changes(draft: &Draft<'_>) -> BTreeMap<Key, Option<Record>> {
    draft.changes().map(|(key, record)| (key.clone(), record.clone())).collect()
}

fn written(base: &State, draft: &Draft<'_>) -> State {
    let mut state = base.clone();
    state.apply(draft.written().into_iter().map(|change| change.written_at(REVISION)));
    state
}

/// What commands ask a draft, of everything that they may speak of, answered by the state that it becomes.
fn agrees(draft: &mut Draft<'_>, state: &State) -> Result<(), TestCaseError> {
    for host in (1..5).map(id) {
        let node = state.find(&host);
        for class in names(&CLASSES) {
            let used = node.map_or(0, |node| node.used(&class));
            prop_assert_eq!(draft.used(host, &class), used);
        }
        prop_assert_eq!(draft.is_used(host), node.is_some_and(|node| !node.usages().is_empty()));
        prop_assert_eq!(draft.has_children(host), node.is_some_and(|node| !node.children.is_empty()));
        let found = node.and_then(|node| Some((node.provider.clone()?, node.generation.clone()?.record)));
        prop_assert_eq!(draft.provider(host), found);
    }
    for name in names(&TRAITS) {
        prop_assert_eq!(draft.trait_is_used(&name), !state.with_trait(&name).is_empty());
    }
    for class in names(&CLASSES) {
        prop_assert_eq!(draft.class_is_used(&class), !state.with_class(&class).is_empty());
        let (providers, consumers) = draft.holders_of(&class);
        let mut expected: Vec<Uuid> =
            state.with_class(&class).iter().map(|(_, slot)| state.node(*slot).uuid).collect();
        expected.sort_unstable();
        prop_assert_eq!(providers, expected);
        let uses = |of: &Consumer| {
            of.allocations.iter().flat_map(|(_, amounts)| amounts).any(|(own, _)| *own == class)
        };
        let mut expected: Vec<Uuid> =
            state.consumers().filter(|(_, stored)| uses(&stored.record)).map(|(uuid, _)| *uuid).collect();
        expected.sort_unstable();
        prop_assert_eq!(consumers, expected);
    }
    Ok(())
}

proptest! {
    /// Whatever was decided before and lies in the draft only, or in the base: each command has the outcome that it
    /// has where everything before it is written, and so has what lies in the draft at the end.
    #[test]
    fn a_draft_decides_as_the_state_that_it_becomes(
        earlier in prop::collection::vec(command(), 0..30),
        later in prop::collection::vec((command(), any::<bool>()), 0..20),
    ) {
        let base = earlier.iter().fold(State::default(), |state, command| tried(&state, command, 1).1);
        let mut whole = base.clone();
        let mut draft = Draft::new(&base);
        for (command, twice) in later {
            let (expected, next) = tried(&whole, &command, 2);
            let before = (changes(&draft), draft.seen().clone());
            if twice {
                let here = draft.savepoint();
                prop_assert_eq!(&decide(&mut draft, &command, 2), &expected);
                draft.forget(here);
                prop_assert_eq!(&(changes(&draft), draft.seen().clone()), &before, "as if nothing had been");
            }
            let here = draft.savepoint();
            prop_assert_eq!(&decide(&mut draft, &command, 2), &expected, "{:?}", command);
            let new: BTreeSet<&Key> = draft.seen().keys().filter(|key| !before.1.contains_key(key)).collect();
            prop_assert_eq!(draft.seen_since(here).collect::<BTreeSet<_>>(), new, "{:?}", command);
            if expected.is_err() {
                prop_assert_eq!(&changes(&draft), &before.0, "a refusal changes nothing: {:?}", command);
            }
            prop_assert!(draft.changes().all(|(key, _)| draft.seen().contains_key(key)));
            whole = next;
            prop_assert_eq!(portrait(&written(&base, &draft)), portrait(&whole), "{:?}", command);
            agrees(&mut draft, &whole)?;
        }
    }

    /// Whatever one command changes: another that looked at none of it is decided the same after it, and writes
    /// the same. So two that stand on nothing in common may be decided on one state and written in any order.
    #[test]
    fn what_was_not_looked_at_makes_no_decision_another(
        earlier in prop::collection::vec(command(), 0..30),
        one in command(),
        others in prop::collection::vec(command(), 1..6),
    ) {
        let base = earlier.iter().fold(State::default(), |state, command| tried(&state, command, 1).1);
        let mut draft = Draft::new(&base);
        let outcome = decide(&mut draft, &one, 2);
        for other in others {
            let mut beside = Draft::new(&base);
            decide(&mut beside, &other, 2).ok();
            if beside.changes().any(|(key, _)| draft.seen().contains_key(key)) {
                continue;
            }
            let after = written(&base, &beside);
            let mut later = Draft::new(&after);
            prop_assert_eq!(&decide(&mut later, &one, 2), &outcome, "{:?} after {:?}", one, other);
            prop_assert_eq!(changes(&later), changes(&draft), "{:?} after {:?}", one, other);
            prop_assert_eq!(later.seen(), draft.seen(), "{:?} after {:?}", one, other);
        }
    }
}

fn host() -> State {
    let create = Command::CreateProvider { uuid: id(1), name: "h1".into(), parent: None };
    let inventory = Command::AddInventory { provider: id(1), class: intern("VCPU"), inventory: some(8) };
    after(&State::default(), &[create, inventory])
}

#[test]
fn what_was_looked_at_is_held_to_the_revision_that_was_seen() {
    let mut state = host();
    state.apply([
        Change::Generation(id(1), stored(3)).written_at(40),
        Change::Trait(intern("CUSTOM_T"), stored(ec_placement_model::NamedRecord::new(0))).written_at(41),
        Change::Class(intern("CUSTOM_C"), stored(ec_placement_model::NamedRecord::new(0))).written_at(42),
        Change::ProviderName(intern("h1"), stored(id(1))).written_at(43),
    ]);
    let state = after(&state, &[Command::SetAllocations(vec![claim(100, &[(1, &[("VCPU", 1)])])])]);
    let mut draft = Draft::new(&state);
    assert!(draft.seen().is_empty());
    assert_eq!(draft.provider(id(1)).map(|(_, generation)| generation), Some(4));
    assert!(draft.consumer(id(100)).is_some() && draft.consumer(id(101)).is_none());
    assert_eq!((draft.named("h1"), draft.named("h2")), (Some(id(1)), None));
    assert!(draft.has_trait("CUSTOM_T") && draft.has_class("CUSTOM_C"));
    assert!(
        draft.has_trait("HW_CPU_X86_AVX") && draft.has_class("VCPU"),
        "what is standard stands on no record"
    );
    assert!(!draft.has_trait("CUSTOM_NO") && !draft.has_class("CUSTOM_NO"));
    let seen: Vec<(Key, i64)> = draft.seen().iter().map(|(key, revision)| (key.clone(), *revision)).collect();
    let name = |name| Key::ProviderName(intern(name));
    let expected = [
        (Key::Provider(id(1)), REVISION),
        (Key::Consumer(id(100)), REVISION),
        (Key::Consumer(id(101)), 0),
        (name("h1"), 43),
        (name("h2"), 0),
        (Key::Trait(intern("CUSTOM_NO")), 0),
        (Key::Trait(intern("CUSTOM_T")), 41),
        (Key::Class(intern("CUSTOM_C")), 42),
        (Key::Class(intern("CUSTOM_NO")), 0),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn a_decision_that_stands_on_what_cannot_be_read_is_refused_with_the_reason_and_the_next_is_not() {
    let mut state = host();
    state.apply([Change::Unreadable {
        key: Key::Consumer(id(100)),
        part: Part::Record,
        why: "spoilt".into(),
    }]);
    let mut draft = Draft::new(&state);
    let refused = Err(ModelError::Unreadable("spoilt".into()));
    let claim = |consumer| Command::SetAllocations(vec![claim(consumer, &[(1, &[("VCPU", 1)])])]);
    assert_eq!(decide(&mut draft, &claim(100), 0), refused);
    assert!(changes(&draft).is_empty());
    assert!(decide(&mut draft, &claim(101), 0).is_ok());
}

#[test]
fn while_nobody_knows_what_is_used_less_may_be_used_and_not_more() {
    let claims = |amount| vec![claim(101, &[(1, &[("VCPU", amount)])])];
    let mut state = after(&host(), &[Command::SetAllocations(claims(4))]);
    state.apply([
        Change::UseUnknown(id(100)),
        Change::Unreadable { key: Key::Consumer(id(100)), part: Part::Record, why: "spoilt".into() },
    ]);
    for refused in [claims(5), claims(3)] {
        let outcome = tried(&state, &Command::SetAllocations(refused), 0).0;
        assert!(matches!(outcome, Err(ModelError::Unreadable(_))), "{outcome:?}");
    }
    for release in [Command::SetAllocations(vec![claim(101, &[])]), Command::DeleteAllocations(id(101))] {
        let (outcome, after) = tried(&state, &release, 0);
        assert!(outcome.is_ok() && after.consumer(&id(101)).is_none(), "{outcome:?}");
    }
}

#[test]
fn nothing_goes_that_a_provider_may_have_which_cannot_be_read_nor_what_may_be_in_use() {
    let class = || intern("CUSTOM_C");
    let inventories = |classes: &[&str]| Command::SetInventories {
        provider: id(1),
        generation: None,
        inventories: classes.iter().map(|class| (intern(class), some(8))).collect(),
    };
    let made = [
        Command::EnsureTrait(intern("CUSTOM_T")),
        Command::EnsureClass(class()),
        inventories(&["VCPU", "MEMORY_MB", "DISK_GB"]),
    ];
    let state = after(&host(), &made);
    let unread = |change: Change| {
        let mut state = state.clone();
        state.apply([Change::UseUnknown(id(100)), change]);
        state
    };
    let spoilt = |key| unread(Change::Unreadable { key, part: Part::Record, why: "spoilt".into() });
    let provider = spoilt(Key::Provider(id(9)));
    let consumer = spoilt(Key::Consumer(id(100)));
    // What a count of changes says is nothing of what there is.
    let generation = unread(Change::Unreadable {
        key: Key::Provider(id(9)),
        part: Part::Generation,
        why: "spoilt".into(),
    });
    for (command, of_providers, of_use) in [
        (Command::DeleteProvider(id(1)), true, true),
        (Command::DeleteTrait(intern("CUSTOM_T")), true, false),
        (Command::DeleteClass(class()), true, false),
        (Command::RenameClass { from: class(), to: intern("CUSTOM_D") }, true, true),
        (inventories(&["VCPU"]), false, true),
        (Command::DeleteInventory { provider: id(1), class: intern("VCPU") }, false, true),
        (inventories(&["VCPU", "MEMORY_MB"]), false, true),
        (inventories(&["VCPU", "MEMORY_MB", "DISK_GB", "SRIOV_NET_VF"]), false, false),
    ] {
        for (state, is_refused) in
            [(&state, false), (&generation, false), (&provider, of_providers), (&consumer, of_use)]
        {
            let outcome = tried(state, &command, 0).0;
            let refused = matches!(&outcome, Err(ModelError::Unreadable(why)) if why.starts_with("spoilt"));
            assert!(refused == is_refused && refused != outcome.is_ok(), "{command:?}: {outcome:?}");
        }
    }
}

#[test]
fn what_this_release_does_not_know_is_written_back_with_its_record_and_goes_with_it() {
    let extra = Extra::between(&json!({"color": "red"}), &json!({}));
    let mut state = host();
    state.apply([Change::Extra(Key::Provider(id(1)), extra.clone().into())]);
    let traits = Command::SetTraits { provider: id(1), generation: None, traits: names(&["HW_CPU_X86_AVX"]) };
    let changed = after(&state, &[traits]);
    assert_eq!(changed.extra(&Key::Provider(id(1))), Some(&extra));
    let gone = after(&state, &[Command::DeleteProvider(id(1))]);
    assert_eq!(gone.extra(&Key::Provider(id(1))), None);
}

#[test]
fn only_a_provider_that_changed_is_written_beside_its_generation() {
    let state = host();
    let mut draft = Draft::new(&state);
    let claim = Command::SetAllocations(vec![claim(100, &[(1, &[("VCPU", 1)])])]);
    assert!(decide(&mut draft, &claim, 0).is_ok());
    let base = draft.provider(id(1)).map(|(record, _)| record);
    assert!(base.as_ref().is_some_and(|record| draft.is_base_record(&id(1), record)));
    assert!(!draft.is_base_record(&id(1), &Provider::new("h1", None, 0).into()));
    let of_provider =
        |draft: &Draft<'_>| draft.written().iter().any(|change| matches!(change, Change::Provider(..)));
    assert!(!of_provider(&draft), "its generation alone");
    let update = Command::UpdateProvider { uuid: id(1), name: "other".into(), parent: None, may_move: false };
    assert!(decide(&mut draft, &update, 0).is_ok());
    assert!(of_provider(&draft));
    assert!(std::ptr::eq(draft.base(), &state));
}

#[test]
fn half_of_a_provider_that_somebody_left_is_there_too() {
    let key = Key::Provider(id(1));
    let record = Change::Provider(id(1), Some(Provider::new("h1", None, 0).into()));
    for (left, is_there) in
        [(vec![record], true), (vec![Change::Generation(id(1), stored(3))], true), (vec![], false)]
    {
        let mut state = State::default();
        state.apply(left);
        assert_eq!(Draft::new(&state).is_in_base(&key), is_there);
    }
}

#[test]
fn what_lies_in_a_draft_counts_and_what_it_took_away_does_not() {
    let create = |number: u128, parent: Option<u128>| Command::CreateProvider {
        uuid: id(number),
        name: format!("h{number}"),
        parent: parent.map(id),
    };
    let traits = |of: &[&str]| Command::SetTraits { provider: id(2), generation: None, traits: names(of) };
    let class = intern("CUSTOM_C");
    let inventory = Command::AddInventory { provider: id(2), class: class.clone(), inventory: some(8) };
    let take = Command::SetAllocations(vec![claim(100, &[(2, &[("CUSTOM_C", 3)])])]);
    let make = [create(2, Some(1)), traits(&["CUSTOM_T"]), inventory, take];
    let unmake = [Command::DeleteAllocations(id(100)), traits(&[]), Command::DeleteProvider(id(2))];
    let names = [Command::EnsureTrait(intern("CUSTOM_T")), Command::EnsureClass(class.clone())];
    let before = after(&host(), &names);
    let made = after(&before, &make);
    let told = |draft: &Draft<'_>| {
        let used = (draft.used(id(2), &class), draft.is_used(id(2)));
        let counted = (draft.trait_is_used(&intern("CUSTOM_T")), draft.class_is_used(&class));
        (used, draft.has_children(id(1)), counted, draft.holders_of(&class))
    };
    let everything = ((3, true), true, (true, true), (vec![id(2)], vec![id(100)]));
    let nothing = ((0, false), false, (false, false), (vec![], vec![]));
    let (mut first, mut second) = (Draft::new(&before), Draft::new(&made));
    assert_eq!((told(&first), told(&second)), (nothing.clone(), everything.clone()));
    for command in &make {
        assert!(decide(&mut first, command, 0).is_ok(), "{command:?}");
    }
    assert_eq!(told(&first), everything);
    for command in &unmake {
        assert!(decide(&mut second, command, 0).is_ok(), "{command:?}");
    }
    assert_eq!(told(&second), nothing);
}

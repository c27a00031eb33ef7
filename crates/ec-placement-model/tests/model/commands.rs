//! What each command on providers and names is answered, and what it leaves.

use std::sync::Arc;

use ec_placement_model::{
    Change, Command, Draft, Key, ModelError, Name, Outcome, Provider, State, decide, intern,
};
use uuid::Uuid;

use crate::support::{after, aggregate, claim, id, names, portrait, some, stored, tried};

/// 1 above 2 above 3, and 4 alone; 2 has processors and a thing of ours, of which 100 uses some; 3 has the trait.
fn world() -> State {
    let create = |number: u128, parent: Option<u128>| Command::CreateProvider {
        uuid: id(number),
        name: format!("h{number}"),
        parent: parent.map(id),
    };
    let amounts = ["CUSTOM_C", "DISK_GB", "VCPU"].map(|class| (intern(class), some(8)));
    let commands = [
        create(1, None),
        create(2, Some(1)),
        create(3, Some(2)),
        create(4, None),
        Command::EnsureClass(intern("CUSTOM_C")),
        Command::EnsureClass(intern("CUSTOM_IDLE")),
        Command::EnsureTrait(intern("CUSTOM_T")),
        Command::EnsureTrait(intern("CUSTOM_IDLE")),
        Command::SetInventories { provider: id(2), generation: Some(0), inventories: amounts.into() },
        Command::SetTraits { provider: id(3), generation: None, traits: names(&["CUSTOM_T"]) },
        Command::SetAllocations(vec![claim(100, &[(2, &[("VCPU", 2), ("CUSTOM_C", 1), ("DISK_GB", 1)])])]),
    ];
    after(&State::default(), &commands)
}

fn record(state: &State, number: u128) -> Provider {
    let node = state.find(&id(number));
    let record = node.and_then(|node| node.provider.as_deref());
    record.cloned().unwrap_or_else(|| panic!("{number} is there"))
}

fn counted(state: &State, number: u128) -> Option<i64> {
    Some(state.find(&id(number))?.generation.as_ref()?.record)
}

/// What is answered to a client that is shown the provider, and the state after it.
fn shows(state: &State, command: Command, root: u128) -> (Provider, i64, State) {
    let (outcome, after) = tried(state, &command, 50);
    let Ok(Outcome::Provider { uuid, provider, generation, root: top }) = outcome else {
        panic!("{command:?}: {outcome:?}")
    };
    assert_eq!(top, id(root), "{command:?}");
    let node = after.find(&uuid).unwrap_or_else(|| panic!("{command:?}"));
    assert_eq!(node.provider.as_ref(), Some(&provider), "what is shown is what is written");
    assert_eq!(node.generation.as_ref().map(|stored| stored.record), Some(generation));
    ((*provider).clone(), generation, after)
}

/// The records that a command writes.
fn writes(state: &State, command: &Command) -> Vec<Key> {
    let mut draft = Draft::new(state);
    let outcome = decide(&mut draft, command, 50);
    assert!(outcome.is_ok(), "{command:?}: {outcome:?}");
    let mut keys: Vec<Key> = draft.changes().map(|(key, _)| key.clone()).collect();
    keys.sort_unstable();
    keys
}

fn create(number: u128, name: &str, parent: Option<u128>) -> Command {
    Command::CreateProvider { uuid: id(number), name: name.into(), parent: parent.map(id) }
}

fn update(number: u128, name: &str, parent: Option<Option<u128>>, may_move: bool) -> Command {
    let parent = parent.map(|parent| parent.map(id));
    Command::UpdateProvider { uuid: id(number), name: name.into(), parent, may_move }
}

fn add(number: u128, class: &str) -> Command {
    Command::AddInventory { provider: id(number), class: intern(class), inventory: some(5) }
}

fn inventory(number: u128, generation: i64, class: &str) -> Command {
    Command::UpdateInventory { provider: id(number), generation, class: intern(class), inventory: some(5) }
}

fn inventories(number: u128, generation: Option<i64>, classes: &[&str]) -> Command {
    let inventories = classes.iter().map(|class| (intern(class), some(5))).collect();
    Command::SetInventories { provider: id(number), generation, inventories }
}

fn drop_inventory(number: u128, class: &str) -> Command {
    Command::DeleteInventory { provider: id(number), class: intern(class) }
}

fn aggregates(number: u128, generation: Option<i64>, of: &[u128]) -> Command {
    let aggregates = of.iter().copied().map(aggregate).collect();
    Command::SetAggregates { provider: id(number), generation, aggregates }
}

fn traits(number: u128, generation: Option<i64>, of: &[&str]) -> Command {
    Command::SetTraits { provider: id(number), generation, traits: names(of) }
}

fn rename(from: &str, to: &str) -> Command {
    Command::RenameClass { from: intern(from), to: intern(to) }
}

#[test]
fn what_is_refused_is_refused_with_the_reason_and_leaves_all_as_it_was() {
    let state = world();
    let name = intern;
    let cases = [
        (create(9, "", None), "Object action create failed because: name is required"),
        (create(9, "h9", Some(9)), "parent provider UUID cannot be same as UUID"),
        (
            create(9, "h9", Some(8)),
            "Object action create failed because: parent provider UUID does not exist.",
        ),
        (create(1, "h9", None), &*format!("Conflicting resource provider uuid: {} already exists.", id(1))),
        (create(9, "h1", None), "Conflicting resource provider name: h1 already exists."),
        (create(1, "h2", None), &*format!("uuid: {}, name: h2 already", id(1))),
        (update(9, "h9", None, true), "No resource provider with uuid"),
        (update(4, "h4", Some(Some(9)), true), "create failed because: parent provider UUID does not exist."),
        (update(2, "h2", Some(Some(4)), false), "re-parenting a provider is not currently allowed."),
        (update(2, "h2", Some(None), false), "un-parenting a provider is not currently allowed."),
        (update(1, "h1", Some(Some(1)), true), "creating loop in the provider tree is not allowed."),
        (update(1, "h1", Some(Some(3)), false), "creating loop in the provider tree is not allowed."),
        (update(1, "h2", None, false), "Conflicting resource provider h2 already exists."),
        (Command::DeleteProvider(id(9)), "No resource provider with uuid"),
        (Command::DeleteProvider(id(1)), "It has child resource providers."),
        (add(9, "VCPU"), "No resource provider with uuid"),
        (add(4, "CUSTOM_NO"), "No such resource class CUSTOM_NO."),
        (add(2, "VCPU"), "Another thread concurrently updated the data. Please retry your update"),
        (inventory(9, 0, "VCPU"), "No resource provider with uuid"),
        (inventory(2, 1, "VCPU"), &*format!("for provider {}: actual: 2, given: 1", id(2))),
        (inventory(4, 0, "VCPU"), "No inventory of class VCPU found"),
        (inventory(4, 0, "CUSTOM_NO"), "No such resource class CUSTOM_NO."),
        (inventories(2, Some(3), &["VCPU"]), "actual: 2, given: 3"),
        (inventories(4, Some(0), &["VCPU", "CUSTOM_NO"]), "No such resource class CUSTOM_NO."),
        (inventories(9, None, &[]), "No resource provider with uuid"),
        // Standard classes first, in their own order.
        (
            inventories(2, Some(2), &[]),
            &*format!("Inventory for 'VCPU, DISK_GB, CUSTOM_C' on resource provider '{}'", id(2)),
        ),
        (inventories(2, None, &["VCPU"]), "Inventory for 'DISK_GB, CUSTOM_C' on"),
        (drop_inventory(9, "VCPU"), "No resource provider with uuid"),
        (drop_inventory(2, "VCPU"), "Inventory for 'VCPU' on"),
        (drop_inventory(4, "VCPU"), "No inventory of class VCPU found"),
        (drop_inventory(4, "CUSTOM_NO"), "No such resource class CUSTOM_NO."),
        (aggregates(2, Some(9), &[1]), "actual: 2, given: 9"),
        (aggregates(9, None, &[1]), "No resource provider with uuid"),
        (traits(2, Some(9), &[]), "actual: 2, given: 9"),
        (
            traits(2, None, &["CUSTOM_NO", "CUSTOM_T", "CUSTOM_NEITHER"]),
            "No such trait CUSTOM_NEITHER, CUSTOM_NO",
        ),
        (Command::DeleteTrait(name("CUSTOM_NO")), "No such trait(s): CUSTOM_NO."),
        (Command::DeleteTrait(name("HW_CPU_X86_AVX")), "Cannot delete standard trait HW_CPU_X86_AVX."),
        (Command::DeleteTrait(name("CUSTOM_T")), "The trait CUSTOM_T is in use by a resource provider."),
        (Command::CreateClass(name("CUSTOM_C")), "Resource class CUSTOM_C already exists."),
        (Command::CreateClass(name("VCPU")), "Resource class VCPU already exists."),
        (Command::DeleteClass(name("CUSTOM_NO")), "No such resource class CUSTOM_NO."),
        (Command::DeleteClass(name("VCPU")), "Cannot delete standard resource class VCPU."),
        (Command::DeleteClass(name("CUSTOM_C")), "Cannot delete resource class CUSTOM_C."),
        (rename("CUSTOM_NO", "CUSTOM_B"), "No such resource class CUSTOM_NO."),
        (rename("VCPU", "CUSTOM_B"), "Cannot update standard resource class VCPU"),
        (rename("CUSTOM_C", "VCPU"), "Resource class VCPU already exists."),
        (rename("CUSTOM_C", "CUSTOM_IDLE"), "Resource class CUSTOM_IDLE already exists."),
    ];
    for (command, wanted) in cases {
        let (outcome, after) = tried(&state, &command, 50);
        let told = outcome.as_ref().map_or_else(ToString::to_string, |outcome| format!("{outcome:?}"));
        assert!(outcome.is_err() && told.contains(wanted), "{command:?}: wanted `{wanted}`: {told}");
        assert_eq!(portrait(&after), portrait(&state), "{command:?}");
    }
    let mut leaf = after(&state, &[Command::DeleteProvider(id(3))]);
    assert_eq!(tried(&leaf, &Command::DeleteProvider(id(2)), 0).0, Err(ModelError::ProviderInUse));
    leaf = after(&leaf, &[Command::DeleteAllocations(id(100)), Command::DeleteProvider(id(2))]);
    assert!(leaf.find(&id(2)).is_none() && leaf.provider_name("h2").is_none());
}

/// Somebody deleted it by hand, or a release before this one took it away with a provider that had the name, too.
#[test]
fn a_name_whose_key_was_lost_is_still_taken_and_comes_back() {
    let mut state = world();
    state.apply([Change::ProviderName(intern("h4"), None)]);
    let refused = |command| tried(&state, &command, 50).0.map(drop).unwrap_err().to_string();
    assert!(refused(create(9, "h4", None)).contains("name: h4 already exists"));
    assert!(refused(update(1, "h4", None, false)).contains("h4 already exists"));
    let (.., mended) = shows(&state, update(4, "h4", None, false), 4);
    assert_eq!(mended.provider_name("h4"), stored(id(4)).as_ref());
    assert!(!writes(&mended, &update(4, "h4", None, false)).contains(&Key::ProviderName(intern("h4"))));
    // One that is given up is free, and whoever takes it within the same transaction has it.
    let renamed = after(&state, &[update(4, "other", None, false), create(9, "h4", None)]);
    assert_eq!(renamed.provider_name("h4"), stored(id(9)).as_ref());
    let mut draft = Draft::new(&state);
    for (command, made) in [
        (create(9, "h4", None), false),
        (update(4, "other", None, false), true),
        (create(9, "h4", None), true),
        (create(10, "h4", None), false),
        (Command::DeleteProvider(id(9)), true),
        (create(10, "h4", None), true),
    ] {
        assert_eq!(decide(&mut draft, &command, 50).is_ok(), made, "{command:?}");
    }
}

/// Two of one name, as they were let in where the key was lost: the key is the second's.
#[test]
fn who_goes_or_gets_another_name_leaves_the_key_of_another_with_its_name() {
    let mut state = world();
    let first = Change::Provider(id(9), Some(Arc::new(Provider::new("h4", None, 0))));
    state.apply([first, Change::Generation(id(9), stored(0))]);
    for command in
        [update(9, "h4", None, false), update(9, "h9", None, false), Command::DeleteProvider(id(9))]
    {
        assert_eq!(after(&state, &[command]).provider_name("h4"), stored(id(4)).as_ref());
    }
    for command in [update(4, "h5", None, false), Command::DeleteProvider(id(4))] {
        let left = after(&state, &[command]);
        assert_eq!(left.provider_name("h4"), None);
        assert!(tried(&left, &create(10, "h4", None), 50).0.is_err(), "9 bears it");
    }
}

#[test]
fn a_new_provider_is_empty_and_in_the_tree_of_its_parent_which_is_held() {
    let state = world();
    let (made, generation, after) = shows(&state, create(9, "h9", Some(3)), 1);
    assert_eq!((made, generation), (Provider::new("h9", Some(id(3)), 50), 0));
    assert_eq!(after.provider_name("h9"), stored(id(9)).as_ref());
    let written = writes(&state, &create(9, "h9", Some(3)));
    assert_eq!(written, [Key::Provider(id(3)), Key::Provider(id(9)), Key::ProviderName(intern("h9"))]);
    shows(&state, create(9, "h9", None), 9);
}

#[test]
fn a_provider_moves_where_it_may_and_takes_those_below_it_along() {
    let state = world();
    let (moved, generation, after) = shows(&state, update(2, "h2", Some(Some(4)), true), 4);
    assert_eq!((moved.parent, moved.updated_at, generation), (Some(id(4)), 50, 2));
    let root = after.find(&id(3)).map(|node| after.node(node.root).uuid);
    assert_eq!(root, Some(id(4)));
    let touched = writes(&state, &update(2, "h2", Some(Some(4)), true));
    assert_eq!(touched, [1, 2, 4].map(|number| Key::Provider(id(number))), "old parent and new");
    let (moved, ..) = shows(&state, update(2, "h2", Some(None), true), 2);
    assert_eq!(moved.parent, None);
    // No move: none had to be allowed.
    for (command, root) in [
        (update(2, "h2", Some(Some(1)), false), 1),
        (update(2, "h2", None, false), 1),
        (update(1, "h1", Some(None), false), 1),
        (update(4, "h4", Some(Some(3)), false), 1),
    ] {
        shows(&state, command, root);
    }
}

#[test]
fn a_name_that_is_given_up_is_free() {
    let state = world();
    let (renamed, _, after) = shows(&state, update(1, "other", None, false), 1);
    assert_eq!((&*renamed.name, renamed.updated_at), ("other", 50));
    assert_eq!((after.provider_name("h1"), after.provider_name("other")), (None, stored(id(1)).as_ref()));
    let same = writes(&state, &update(1, "h1", None, false));
    assert_eq!(same, [Key::Provider(id(1))], "its name is its own already");
}

fn classes(provider: &Provider) -> Vec<(&str, i64)> {
    provider.inventories.iter().map(|(class, inventory)| (&**class, inventory.total)).collect()
}

#[test]
fn inventories_are_sorted_and_each_change_of_them_is_counted() {
    let state = world();
    let (host, generation, _) = shows(&state, inventories(4, None, &["VCPU", "CUSTOM_C", "MEMORY_MB"]), 4);
    assert_eq!((classes(&host), generation), (vec![("CUSTOM_C", 5), ("MEMORY_MB", 5), ("VCPU", 5)], 1));
    assert_eq!(host.updated_at, 50);
    let (host, generation, _) = shows(&state, add(2, "MEMORY_MB"), 1);
    let all = vec![("CUSTOM_C", 8), ("DISK_GB", 8), ("MEMORY_MB", 5), ("VCPU", 8)];
    assert_eq!((classes(&host), generation, host.updated_at), (all, 3, 50));
    let (host, generation, _) = shows(&state, inventory(2, 2, "DISK_GB"), 1);
    assert_eq!((classes(&host), generation), (vec![("CUSTOM_C", 8), ("DISK_GB", 5), ("VCPU", 8)], 3));
    let free = after(&state, &[Command::DeleteAllocations(id(100))]);
    let (outcome, without) = tried(&free, &drop_inventory(2, "DISK_GB"), 50);
    assert_eq!(outcome, Ok(Outcome::Done));
    assert_eq!(classes(&record(&without, 2)), [("CUSTOM_C", 8), ("VCPU", 8)]);
    assert_eq!((counted(&free, 2), counted(&without, 2)), (Some(2), Some(3)));
}

#[test]
fn a_class_or_trait_of_ours_that_is_taken_up_is_held_and_one_that_is_there_already_is_not() {
    let state = world();
    let class = Key::Class(intern("CUSTOM_C"));
    let host = |number| Key::Provider(id(number));
    assert_eq!(writes(&state, &inventories(4, None, &["CUSTOM_C", "VCPU"])), [host(4), class]);
    assert_eq!(writes(&state, &inventories(2, None, &["CUSTOM_C", "DISK_GB", "VCPU"])), [host(2)]);
    let custom = Key::Trait(intern("CUSTOM_T"));
    assert_eq!(writes(&state, &traits(4, None, &["CUSTOM_T", "HW_CPU_X86_AVX"])), [host(4), custom]);
    assert_eq!(writes(&state, &traits(3, None, &["CUSTOM_T", "HW_CPU_X86_AVX"])), [host(3)]);
    assert_eq!(writes(&state, &traits(3, None, &["CUSTOM_T"])), [], "as it was");
}

#[test]
fn traits_that_a_provider_has_are_not_looked_at_so_that_it_may_have_any_number() {
    let state = world();
    let mut draft = Draft::new(&state);
    decide(&mut draft, &traits(3, None, &["CUSTOM_T", "HW_CPU_X86_AVX"]), 50).expect("both are known");
    let looked_at: Vec<&Key> = draft.seen().keys().collect();
    let [root, above, own] = [1, 2, 3].map(|number| Key::Provider(id(number)));
    assert_eq!(looked_at, [&root, &above, &own]);
}

#[test]
fn aggregates_and_traits_are_sorted_each_once_and_counted_where_they_change() {
    let state = world();
    let (host, generation, _) = shows(&state, aggregates(2, Some(2), &[2, 1, 2]), 1);
    assert_eq!((host.aggregates, host.updated_at, generation), (vec![aggregate(1), aggregate(2)], 50, 3));
    let (_, generation, _) = shows(&state, aggregates(2, None, &[2]), 1);
    assert_eq!(generation, 2, "below 1.19 nobody counts");
    let (host, generation, _) =
        shows(&state, traits(2, Some(2), &["HW_CPU_X86_AVX", "CUSTOM_T", "CUSTOM_T"]), 1);
    let both: Vec<Name> = names(&["CUSTOM_T", "HW_CPU_X86_AVX"]);
    assert_eq!((host.traits, host.updated_at, generation), (both, 50, 3));
    let (host, generation, _) = shows(&state, traits(3, None, &["CUSTOM_T"]), 1);
    assert_eq!((host.updated_at, generation), (0, 1), "as it was");
}

#[test]
fn names_are_made_once_and_go_when_nobody_has_them() {
    let state = world();
    let made = |created, created_at| Ok(Outcome::Ensured { created, created_at });
    let cases = [
        (Command::EnsureTrait(intern("CUSTOM_T")), made(false, 0)),
        (Command::EnsureTrait(intern("CUSTOM_NEW")), made(true, 50)),
        (Command::EnsureClass(intern("CUSTOM_C")), made(false, 0)),
        (Command::EnsureClass(intern("CUSTOM_NEW")), made(true, 50)),
        (Command::EnsureClass(intern("VCPU")), made(false, 0)),
        (Command::CreateClass(intern("CUSTOM_NEW")), made(true, 50)),
        (Command::DeleteTrait(intern("CUSTOM_IDLE")), Ok(Outcome::Done)),
        (Command::DeleteClass(intern("CUSTOM_IDLE")), Ok(Outcome::Done)),
        (rename("CUSTOM_C", "CUSTOM_C"), Ok(Outcome::Done)),
    ];
    for (command, expected) in cases {
        let (outcome, after) = tried(&state, &command, 50);
        assert_eq!(outcome, expected, "{command:?}");
        let there = |name: &str| {
            (after.custom_traits().contains_key(name), after.custom_classes().contains_key(name))
        };
        let expected = match &command {
            Command::EnsureTrait(name) => (&**name, (true, false)),
            Command::EnsureClass(name) | Command::CreateClass(name) => (&**name, (false, &**name != "VCPU")),
            Command::DeleteTrait(name) => (&**name, (false, true)),
            Command::DeleteClass(name) => (&**name, (true, false)),
            _ => ("CUSTOM_C", (false, true)),
        };
        assert_eq!(there(expected.0), expected.1, "{command:?}");
    }
    assert_eq!(writes(&state, &rename("CUSTOM_C", "CUSTOM_C")), []);
}

#[test]
fn a_class_that_is_renamed_is_renamed_in_every_record_that_holds_it() {
    let state = world();
    let (outcome, after) = tried(&state, &rename("CUSTOM_C", "WIDGET"), 50);
    assert_eq!(outcome, Ok(Outcome::Done));
    let host = record(&after, 2);
    assert_eq!(classes(&host), [("DISK_GB", 8), ("VCPU", 8), ("WIDGET", 8)], "sorted anew");
    assert_eq!((host.updated_at, counted(&after, 2)), (50, counted(&state, 2)));
    let uses: Vec<(Uuid, Vec<(Name, i64)>)> =
        after.consumer(&id(100)).map(|stored| stored.record.allocations.clone()).unwrap_or_default();
    let amounts = [("DISK_GB", 1), ("VCPU", 2), ("WIDGET", 1)].map(|(class, amount)| (intern(class), amount));
    assert_eq!(uses, [(id(2), amounts.to_vec())]);
    let own: Vec<(&str, i64)> =
        after.custom_classes().iter().map(|(name, stored)| (&**name, stored.record.created_at)).collect();
    assert_eq!(own, [("CUSTOM_IDLE", 0), ("WIDGET", 50)]);
}

//! Who may use what: claims at the edges of what there is, and what they leave.

use ec_placement_model::{
    Command, ConsumerWrite, Draft, ExpectedGeneration, Inventories, Inventory, Key, Outcome, State, decide,
    intern,
};

use crate::support::{after, claim, id, names, portrait, some, tried};

/// 1 has eight processors and disk in pieces of 10 up to 40, 2 has eight processors and four of ours, 3 has nothing.
fn world() -> State {
    let create =
        |number: u128| Command::CreateProvider { uuid: id(number), name: format!("h{number}"), parent: None };
    let disk = Inventory { min_unit: 10, max_unit: 40, step_size: 10, ..some(100) };
    let set = |number: u128, of: Vec<(&str, Inventory)>| Command::SetInventories {
        provider: id(number),
        generation: None,
        inventories: of.into_iter().map(|(class, inventory)| (intern(class), inventory)).collect(),
    };
    let commands = [
        create(1),
        create(2),
        create(3),
        Command::EnsureClass(intern("CUSTOM_C")),
        set(1, vec![("DISK_GB", disk), ("VCPU", some(8))]),
        set(2, vec![("CUSTOM_C", some(4)), ("VCPU", some(8))]),
    ];
    after(&State::default(), &commands)
}

fn set(writes: &[ConsumerWrite]) -> Command {
    Command::SetAllocations(writes.to_vec())
}

fn used(state: &State, host: u128, class: &str) -> i64 {
    state.find(&id(host)).map_or(0, |node| node.used(class))
}

fn generation(state: &State, number: u128) -> Option<i64> {
    Some(state.find(&id(number))?.generation.as_ref()?.record)
}

fn exactly(write: ConsumerWrite, generation: Option<i64>) -> ConsumerWrite {
    ConsumerWrite { generation: ExpectedGeneration::Exactly(generation), ..write }
}

#[test]
fn a_claim_is_refused_at_the_edge_of_what_there_is_with_the_reason() {
    // 100 uses six of the eight of host 1.
    let state = after(&world(), &[set(&[claim(100, &[(1, &[("VCPU", 6)])])])]);
    let exceeds = "The requested amount would exceed the capacity.";
    let violates = "The requested amount would violate inventory constraints.";
    let cases: &[(&[ConsumerWrite], Option<&str>)] = &[
        (&[claim(101, &[(1, &[("VCPU", 2)])])], None),
        (&[claim(101, &[(1, &[("VCPU", 3)])])], Some(exceeds)),
        (&[claim(100, &[(1, &[("VCPU", 8)])])], None),
        (&[claim(100, &[(1, &[("VCPU", 9)])])], Some(exceeds)),
        // What goes together is counted together.
        (&[claim(101, &[(1, &[("VCPU", 1)])]), claim(102, &[(1, &[("VCPU", 1)])])], None),
        (&[claim(101, &[(1, &[("VCPU", 1)])]), claim(102, &[(1, &[("VCPU", 2)])])], Some(exceeds)),
        (&[claim(100, &[]), claim(101, &[(1, &[("VCPU", 8)])])], None),
        (&[claim(100, &[(2, &[("VCPU", 6)])]), claim(101, &[(1, &[("VCPU", 8)])])], None),
        (&[claim(101, &[(2, &[("VCPU", 8)])]), claim(102, &[(1, &[("VCPU", 2)])])], None),
        (&[claim(101, &[(1, &[("DISK_GB", 10)])])], None),
        (&[claim(101, &[(1, &[("DISK_GB", 40)])])], None),
        (&[claim(101, &[(1, &[("DISK_GB", 5)])])], Some(violates)),
        (&[claim(101, &[(1, &[("DISK_GB", 50)])])], Some(violates)),
        (&[claim(101, &[(1, &[("DISK_GB", 15)])])], Some(violates)),
        (&[claim(101, &[(9, &[("VCPU", 1)])])], Some("that does not exist.")),
        (&[claim(101, &[(1, &[("CUSTOM_NO", 1)])])], Some("No such resource class CUSTOM_NO.")),
        (
            &[claim(101, &[(1, &[("VCPU", 1), ("CUSTOM_C", 1)])])],
            Some("Inventory for 'CUSTOM_C' on resource provider"),
        ),
        (
            &[claim(101, &[(3, &[("VCPU", 1), ("MEMORY_MB", 1)])])],
            Some("Inventory for 'MEMORY_MB, VCPU' on resource provider"),
        ),
        (&[claim(100, &[]), claim(100, &[(1, &[("VCPU", 1)])])], Some("is in the request more than once.")),
        (&[exactly(claim(100, &[]), None)], Some("expected 1 but got None")),
        (&[exactly(claim(100, &[]), Some(2))], Some("expected 1 but got 2")),
        (&[exactly(claim(101, &[(1, &[("VCPU", 1)])]), Some(1))], Some("expected null but got 1")),
        (&[exactly(claim(100, &[]), Some(1)), exactly(claim(101, &[(1, &[("VCPU", 8)])]), None)], None),
    ];
    for (writes, wanted) in cases {
        let (outcome, after) = tried(&state, &set(writes), 0);
        let told = outcome.as_ref().map_or_else(ToString::to_string, |_| String::new());
        assert!(
            wanted.map_or(outcome.is_ok(), |wanted| told.contains(wanted)),
            "{writes:?}: {wanted:?}: {outcome:?}"
        );
        assert_eq!(outcome.is_err(), portrait(&after) == portrait(&state), "{writes:?}");
    }
    let gone = tried(&state, &Command::DeleteAllocations(id(101)), 0).0;
    assert_eq!(
        gone.map_err(|error| error.to_string()),
        Err(format!("No allocations for consumer '{}'", id(101)))
    );
}

#[test]
fn who_uses_more_than_there_is_may_go_on_with_as_much_or_less() {
    let smaller = Command::SetInventories {
        provider: id(1),
        generation: None,
        inventories: vec![(intern("VCPU"), some(4))],
    };
    let both = [claim(100, &[(1, &[("VCPU", 6)])]), claim(101, &[(1, &[("VCPU", 2)])])];
    let state = after(&world(), &[set(&both), smaller]);
    for (amount, may) in [(5, true), (6, true), (7, false)] {
        let outcome = tried(&state, &set(&[claim(100, &[(1, &[("VCPU", amount)])])]), 0).0;
        assert_eq!(outcome.is_ok(), may, "{amount}: {outcome:?}");
    }
    let more = tried(&state, &set(&[claim(102, &[(1, &[("VCPU", 1)])])]), 0).0;
    assert!(more.is_err(), "{more:?}");
}

#[test]
fn a_claim_is_written_whole_and_counted_at_both_ends() {
    let before = world();
    let mut first = claim(100, &[(2, &[("VCPU", 3), ("CUSTOM_C", 1)]), (1, &[("VCPU", 1)])]);
    first.consumer_type = Some(intern("INSTANCE"));
    let (outcome, state) = tried(&before, &set(&[first]), 30);
    assert_eq!(outcome, Ok(Outcome::Done));
    let consumer = state.consumer(&id(100)).map(|stored| stored.record.clone()).expect("it is there");
    assert_eq!((consumer.generation, consumer.created_at), (1, 30));
    assert_eq!(
        (&*consumer.project, &*consumer.user, consumer.consumer_type.as_deref()),
        ("p", "u", Some("INSTANCE"))
    );
    let amounts = vec![(intern("CUSTOM_C"), 1), (intern("VCPU"), 3)];
    assert_eq!(consumer.allocations[0], (id(2), amounts), "sorted by class");
    assert_eq!(
        [1, 2].map(|host| generation(&state, host)),
        [1, 2].map(|host| generation(&before, host).map(|n| n + 1))
    );
    assert_eq!(generation(&state, 3), generation(&before, 3));

    // By a client that knows neither owners nor kinds.
    let later = ConsumerWrite { owner: None, ..claim(100, &[(1, &[("VCPU", 2)])]) };
    let moved = after(&state, &[set(&[later])]);
    let consumer = moved.consumer(&id(100)).map(|stored| stored.record.clone()).expect("it is there");
    let nobody = "00000000-0000-0000-0000-000000000000";
    assert_eq!((consumer.generation, &*consumer.project, &*consumer.user), (2, nobody, nobody));
    assert_eq!(consumer.consumer_type.as_deref(), Some("INSTANCE"), "what it was");
    assert_eq!((used(&moved, 1, "VCPU"), used(&moved, 2, "VCPU"), used(&moved, 2, "CUSTOM_C")), (2, 0, 0));

    let released = after(&moved, &[set(&[claim(100, &[])])]);
    assert!(released.consumer(&id(100)).is_none());
    assert_eq!(used(&released, 1, "VCPU"), 0);
    assert_eq!(generation(&released, 1), generation(&moved, 1).map(|n| n + 1));
    let nothing = tried(&released, &set(&[claim(100, &[])]), 0);
    assert_eq!((nothing.0, portrait(&nothing.1)), (Ok(Outcome::Done), portrait(&released)), "it had nothing");
}

#[test]
fn a_claim_of_a_class_of_ours_stands_on_the_inventory_and_not_on_the_name() {
    let state = world();
    let seen = |write: ConsumerWrite| {
        let mut draft = Draft::new(&state);
        let _ = decide(&mut draft, &set(&[write]), 0);
        draft.seen().contains_key(&Key::Class(intern("CUSTOM_C")))
    };
    assert!(!seen(claim(100, &[(2, &[("CUSTOM_C", 1)])])));
    assert!(seen(claim(100, &[(1, &[("CUSTOM_C", 1)])])), "refused, because of what the name is");
}

#[test]
fn a_reshape_moves_inventory_and_what_is_used_of_it_at_once() {
    let state = after(&world(), &[set(&[claim(100, &[(1, &[("VCPU", 6), ("DISK_GB", 20)])])])]);
    let of = |classes: &[(&str, i64)]| -> Inventories {
        classes.iter().map(|(class, total)| (intern(class), some(*total))).collect()
    };
    let now = [1, 2, 3].map(|host| generation(&state, host).unwrap_or(-1));
    let reshape = |first: i64, left: &[(&str, i64)], new: &[(&str, i64)], claims: Vec<ConsumerWrite>| {
        Command::Reshape {
            inventories: vec![(id(1), first, of(left)), (id(3), now[2], of(new))],
            consumers: claims,
        }
    };
    let moved = || vec![claim(100, &[(1, &[("DISK_GB", 20)]), (3, &[("VCPU", 6)])])];
    let all = reshape(now[0], &[("DISK_GB", 100)], &[("VCPU", 8)], moved());
    let (outcome, after) = tried(&state, &all, 0);
    assert_eq!(outcome, Ok(Outcome::Done));
    assert_eq!((used(&after, 1, "VCPU"), used(&after, 1, "DISK_GB"), used(&after, 3, "VCPU")), (0, 20, 6));
    let classes = |host| {
        let node = after.find(&id(host)).and_then(|node| node.provider.clone()).expect("it is there");
        node.inventories.iter().map(|(class, _)| class.clone()).collect::<Vec<_>>()
    };
    assert_eq!((classes(1), classes(3)), (names(&["DISK_GB"]), names(&["VCPU"])));
    let refused = [
        (reshape(now[0] + 1, &[("DISK_GB", 100)], &[("VCPU", 8)], moved()), "generation conflict"),
        (reshape(now[0], &[("DISK_GB", 100)], &[("VCPU", 5)], moved()), "exceed the capacity"),
        (reshape(now[0], &[("DISK_GB", 100)], &[("VCPU", 8)], vec![]), "Inventory for 'VCPU' on"),
        (reshape(now[0], &[], &[("VCPU", 8)], moved()), "Inventory for 'DISK_GB' on"),
    ];
    for (command, wanted) in refused {
        let (outcome, after) = tried(&state, &command, 0);
        let told = outcome.map_or_else(|error| error.to_string(), |outcome| format!("{outcome:?}"));
        assert!(told.contains(wanted), "{command:?}: wanted `{wanted}`: {told}");
        assert_eq!(portrait(&after), portrait(&state), "{command:?}");
    }
    // All of it goes: what was there holds until the claims are moved.
    let emptied = reshape(
        now[0],
        &[],
        &[("VCPU", 8), ("DISK_GB", 100)],
        vec![claim(100, &[(3, &[("VCPU", 6), ("DISK_GB", 20)])])],
    );
    let (outcome, after) = tried(&state, &emptied, 0);
    assert_eq!((outcome, used(&after, 3, "VCPU")), (Ok(Outcome::Done), 6));
}

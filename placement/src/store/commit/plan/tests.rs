use std::sync::Arc;

use ec_placement_model::{
    Command, ConsumerWrite, ExpectedGeneration, Inventory, Provider, State, Stored, intern,
};
use ec_store::Compare;
use tokio::{sync::oneshot, time::Duration};
use uuid::Uuid;

use super::*;

const HOSTS: u128 = 40;

fn host(number: u128) -> Uuid {
    Uuid::from_u128(0x1000 + number)
}

/// Hosts of eight VCPU.
fn state() -> State {
    let mut state = State::default();
    for number in 0..HOSTS {
        let mut provider = Provider::new(&format!("h{number}"), None, 0);
        provider.inventories = vec![(intern("VCPU"), Inventory { total: 8, ..Inventory::default() })];
        state.apply([
            Change::Provider(host(number), Some(Arc::new(provider))),
            Change::Generation(host(number), Some(Stored { record: 0, revision: 5 })),
        ]);
    }
    state
}

fn pending(command: Command) -> Pending {
    Pending::new(Some(command), oneshot::channel().0, Duration::from_secs(1))
}

/// Of one consumer, at these hosts.
fn claim(consumer: u128, hosts: &[u128], amount: i64) -> Pending {
    pending(Command::SetAllocations(vec![ConsumerWrite {
        uuid: Uuid::from_u128(0x2000 + consumer),
        generation: ExpectedGeneration::Any,
        owner: None,
        consumer_type: None,
        allocations: hosts.iter().map(|at| (host(*at), vec![(intern("VCPU"), amount)])).collect(),
    }]))
}

fn chosen(limit: usize, commands: &[Pending], under_way: &[Key]) -> Choice {
    let (state, limits) = (state(), Limits { operations: limit });
    choose_on(&mut Draft::new(&state), limits, commands.iter(), |key| under_way.contains(key), 0)
}

#[tokio::test]
async fn what_stands_on_what_is_under_way_is_passed_over_and_so_is_who_would_overtake_it() {
    let commands = [
        claim(1, &[1, 2], 1),
        claim(2, &[3], 1),
        // Waits for the first.
        claim(3, &[2, 4], 1),
        // Waits for that one.
        claim(4, &[4], 1),
        claim(5, &[5], 1),
        // Of a name that is not there yet, and that somebody is about to make.
        pending(Command::EnsureTrait(intern("CUSTOM_T"))),
        claim(6, &[3], 1),
    ];
    let under_way = [Key::Provider(host(1)), Key::Trait(intern("CUSTOM_T"))];
    let choice = chosen(128, &commands, &under_way);
    assert_eq!(choice.taken, [false, true, false, false, true, false, true]);
    assert!(!choice.full);
}

#[tokio::test]
async fn a_choice_ends_where_the_next_would_not_fit() {
    let commands: Vec<Pending> = (0..HOSTS).map(|number| claim(number, &[number], 1)).collect();
    // Two records each, and what every transaction has.
    let choice = chosen(23, &commands, &[Key::Provider(host(3))]);
    let mut expected = vec![true; 11];
    expected[3] = false;
    assert_eq!(choice, Choice { taken: expected, full: true });
}

/// What this replica wrote is known, and what others wrote before it is not.
#[tokio::test]
async fn a_refusal_on_what_was_so_at_no_moment_is_put_to_etcd() {
    let (state, keys) = (state(), Keys::new("/p"));
    let plan = |whole, amount| {
        let stance = Stance { stand: Stand { clock: 9, epoch: 0, listing: 1 }, whole };
        let commands = [claim(1, &[1], amount)];
        let draft = &mut Draft::new(&state);
        plan_on(draft, stance, &keys, Limits::default(), commands.iter(), "t-1".into(), 0).0
    };
    assert!(plan(true, 9).needs_fresh && plan(true, 9).txn.is_none());
    let asked = plan(false, 9);
    let txn = asked.txn.unwrap();
    assert!(asked.needs_fresh && asked.answers[0].is_err());
    assert!(txn.when.contains(&Compare::Unchanged(format!("/p/generations/{}", host(1)), 5)), "{txn:?}");
    assert_eq!(txn.then.len(), 1, "the clock alone");
    assert!(!plan(false, 1).needs_fresh);
}

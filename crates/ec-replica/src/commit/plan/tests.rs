use std::sync::Arc;

use ec_store::Compare;
use tokio::{sync::oneshot, time::Duration};

use super::*;
use crate::quota::{Change, Command, Key, Quota, State};

const PROJECTS: u32 = 40;
const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn project(number: u32) -> Arc<str> {
    format!("p{number}").into()
}

/// Projects of which eight may be taken.
fn state() -> State {
    let mut state = State::default();
    let stored = Some((8, 5));
    Quota::apply(&mut state, (0..PROJECTS).map(|at| Change { key: Key::Limit(project(at)), stored }));
    state
}

fn pending(command: Command) -> Pending<Quota> {
    Pending::new(Some(command), oneshot::channel().0, Duration::from_secs(1))
}

fn take(taker: &str, of: u32, amount: i64) -> Pending<Quota> {
    pending(Command::Take(project(of), taker.into(), amount))
}

fn chosen(limit: usize, commands: &[Pending<Quota>], under_way: &[Key]) -> Choice {
    let (state, limits) = (state(), Limits { operations: limit });
    let is_under_way = |key: &Key| under_way.contains(key);
    choose_on(&mut Quota::draft(&state), limits, commands.iter(), is_under_way, NOW)
}

#[tokio::test]
async fn what_stands_on_what_is_under_way_is_passed_over_and_so_is_who_would_overtake_it() {
    let commands = [
        take("a", 1, 1),
        take("a", 3, 1),
        // Waits for the first.
        pending(Command::Give(project(1), "b".into())),
        pending(Command::Limit(project(5), 9)),
        // Of a project that is not there yet, and that somebody is about to make.
        take("a", PROJECTS, 1),
        // Waits for that one.
        pending(Command::Limit(project(PROJECTS), 9)),
        take("b", 3, 1),
    ];
    let under_way = [Key::Take(project(1), "a".into()), Key::Limit(project(PROJECTS))];
    let choice = chosen(128, &commands, &under_way);
    assert_eq!(choice.taken, [false, true, false, true, false, false, true]);
    assert!(!choice.full);
}

#[tokio::test]
async fn a_choice_ends_where_the_next_would_not_fit() {
    let commands: Vec<_> = (0..PROJECTS).map(|number| take("a", number, 1)).collect();
    // Two records each, and what every transaction has.
    let choice = chosen(23, &commands, &[Key::Limit(project(3))]);
    let mut expected = vec![true; 11];
    expected[3] = false;
    assert_eq!(choice, Choice { taken: expected, full: true });
}

/// What this replica wrote is known, and what others wrote before it is not.
#[tokio::test]
async fn a_refusal_on_what_was_so_at_no_moment_is_put_to_etcd() {
    let (state, model) = (state(), Quota::new());
    let plan = |whole, amount| {
        let stance = Stance { stand: Stand { clock: 9, epoch: None, listing: 1 }, whole };
        let commands = [take("a", 1, amount)];
        let draft = &mut Quota::draft(&state);
        plan_on(&model, draft, stance, Limits::default(), commands.iter(), "t-1".into(), NOW).0
    };
    assert!(plan(true, 9).needs_fresh && plan(true, 9).txn.is_none());
    let asked = plan(false, 9);
    let txn = asked.txn.unwrap();
    assert!(asked.needs_fresh && asked.answers[0].is_err());
    assert!(txn.when.contains(&Compare::Unchanged("/q/limits/p1".into(), 5)), "{txn:?}");
    assert_eq!(txn.then.len(), 1, "the clock alone");
    assert!(!plan(false, 1).needs_fresh);
}

//! What fails again and again, and how long it is left between two tries.

use ec_model::{End, Handover};

use super::*;

/// Ends job after job, each as `end` has it, for so long; how many there were.
fn jobs_in(told: &mut Told, first: Vec<Command>, time: Duration, end: &dyn Fn(&Job) -> Report) -> usize {
    let (mut jobs, mut commands) = (0, first);
    let until = told.now.since_start + time;
    loop {
        while let Some(job) = commands.iter().find_map(|command| match command {
            Command::Begin(job) => Some(job.clone()),
            _ => None,
        }) {
            jobs += 1;
            assert!(jobs < 1_000, "without a pause: {job:?}");
            commands = told.on(Event::Ended(end(&job)));
        }
        if told.engine.next_due().is_none_or(|due| due > until) {
            return jobs;
        }
        // Nothing that is looked at tells anything new.
        commands = told.wait().1;
    }
}

fn done(change: Change) -> Report {
    Report { instance: one(), done: vec![change], outcome: Outcome::Done }
}

fn failed() -> Report {
    Report { instance: one(), done: vec![], outcome: Outcome::Failed("no".to_owned()) }
}

/// A status of which the wish for power has no number, as one has that was brought back.
fn unnumbered(state: State) -> StatusEntry {
    let mut entry = says(state, None);
    if let StatusEntry::Known(status, _) = &mut entry {
        (status.power_generation, status.started_at) = (0, Some(Timestamp::UNIX_EPOCH));
    }
    entry
}

#[test]
fn what_fails_for_good_between_jobs_that_are_done_is_tried_later_each_time() {
    let here = Observed { domain: Some(RunState::NotStarted), ..HERE };
    let seen = Seen {
        statuses: [(one(), unnumbered(State::Active))].into(),
        observed: [(one(), here)].into(),
        records: [(one(), kept(true))].into(),
        ..Seen::default()
    };
    let (mut told, _) = Told::looked(seen, Desired::Active);
    let mut healed = asks(|request| request.power.generation = 0);
    healed.revision = 2;
    told.on(Event::Changed(vec![(one(), Some(healed))]));
    let commands = told.ended(vec![], Outcome::Abandoned);
    assert_eq!(begun(&commands), None, "{commands:?}");
    // Its start fails whenever it is tried; that it is to be tried is told once.
    let end = |job: &Job| match &job.work {
        Work::Effects(effects) if matches!(effects[..], [Effect::Reopen(_)]) => {
            done(Change::Status(unnumbered(State::Starting)))
        }
        Work::Fail(_) => done(Change::Status(unnumbered(State::Error))),
        _ => failed(),
    };
    let commands = told.on(Event::Allocation(one(), Ok(Held::Here(Resources::new()))));
    let jobs = jobs_in(&mut told, commands, Duration::from_secs(3600), &end);
    assert!((200..300).contains(&jobs), "two of each try, which come to be half a minute apart: {jobs}");
}

#[test]
fn a_volume_that_cannot_be_seen_to_have_come_is_looked_for_after_pauses() {
    let seen = Seen { statuses: [(one(), says(State::Preparing, None))].into(), ..Seen::default() };
    let (mut told, _) = Told::looked(seen, Desired::Active);
    let from = NodeId::new(uuid::Uuid::from_u128(8));
    let mut wish = asks(|request| {
        (request.kind, request.handover) = (Workload::Volume, Some(Handover::From(from)));
    });
    wish.revision = 2;
    told.on(Event::Changed(vec![(one(), Some(wish))]));
    let commands = told.on(Event::Allocation(one(), Ok(Held::Here(Resources::new()))));
    let end = |job: &Job| match &job.work {
        Work::Effects(effects) => match &effects[..] {
            [Effect::Announce(state, _)] => done(Change::Status(says(*state, None))),
            _ => failed(),
        },
        Work::Fail(why) => done(Change::Status(says(State::Error, Some(why)))),
        Work::Delayed(_) | Work::Addresses(_) => failed(),
    };
    let jobs = jobs_in(&mut told, commands, Duration::from_secs(3600), &end);
    assert!((200..300).contains(&jobs), "{jobs}");
}

#[test]
fn what_was_at_rest_since_it_failed_is_tried_again_soon() {
    let mut told = waiting();
    let mut runs = unnumbered(State::Starting);
    if let StatusEntry::Known(status, _) = &mut runs {
        status.power_generation = 1;
    }
    let crashed = Observed { domain: Some(RunState::Ended(End::Crashed)), ..HERE };
    for _ in 0..3 {
        let commands = told.on(Event::Hint(one()));
        let [Command::Observe(_, seen)] = commands[..] else { panic!("{commands:?}") };
        let commands = told.on(Event::Observed(one(), seen, Ok(crashed)));
        assert!(begun(&commands).is_some(), "{commands:?}");
        told.ended(vec![], Outcome::Retry("etcd is away".to_owned()));
        assert_eq!(told.wait().0, RETRY_FIRST);
        let stopped = Change::Status(says(State::Stopped, Some("the guest crashed")));
        told.ended(vec![stopped, Change::Observed(Ok(crashed))], Outcome::Done);
        // Somebody started it again, and it was well.
        let commands = told.on(Event::Hint(one()));
        let [Command::Observe(_, seen)] = commands[..] else { panic!("{commands:?}") };
        told.on(Event::Observed(one(), seen, Ok(HERE)));
        told.ended(vec![Change::Status(runs.clone())], Outcome::Done);
    }
}

#[test]
fn placement_that_says_the_same_once_more_ends_no_pause_and_news_does() {
    let mut told = Told::building();
    for _ in 0..3 {
        told.ended(vec![], Outcome::Retry("no".to_owned()));
        while begun(&told.wait().1).is_none() {}
    }
    told.ended(vec![], Outcome::Retry("no".to_owned()));
    let held = |resources| Event::Allocation(one(), Ok(Held::Here(resources)));
    assert_eq!(begun(&told.on(held(Resources::new()))), None, "as an audit hears it");
    assert!(begun(&told.on(held([("VCPU".to_owned(), 1)].into()))).is_some());
}

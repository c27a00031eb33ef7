//! Machines that boot from volumes, which are workloads of their own.

use ec_model::{Attachment, Workload};

use super::*;
use crate::RecordFacts;

const VOLUME: InstanceId = InstanceId::new(uuid::Uuid::from_u128(7));

/// One that looked, and knows that a machine is to boot from a volume that is being made.
fn waiting() -> Told {
    let machine = asks(|request| request.volumes = vec![Attachment::root(VOLUME)]);
    let volume = asks(|request| (request.instance, request.kind) = (VOLUME, Workload::Volume));
    let seen = Seen {
        statuses: [one(), VOLUME].map(|it| (it, says(State::Preparing, None))).into(),
        ..Seen::default()
    };
    let now = Now { since_start: Duration::ZERO, stamp: Timestamp::UNIX_EPOCH };
    let mut told = Told { engine: Engine::new(SETUP, now), now };
    let [Command::LookAtAll(begun)] = told.on(Event::Due)[..] else { panic!() };
    told.on(Event::Listed(vec![(one(), machine), (VOLUME, volume)]));
    told.on(Event::Looked(begun, Ok(seen)));
    for instance in [one(), VOLUME] {
        told.on(Event::Allocation(instance, Ok(Held::Here(Resources::new()))));
    }
    told
}

fn first(told: &mut Told, event: Event) -> Option<Effect> {
    begun(&told.on(event)).and_then(|effects| effects.first().cloned())
}

#[test]
fn a_machine_is_built_when_the_volume_that_it_boots_from_is_made() {
    let mut told = waiting();
    assert!(told.engine.why(one()).unwrap().contains("is not there yet"), "{:?}", told.engine.why(one()));
    let reason = Some("the volume that it is to boot from is not there yet");
    let said = vec![Change::Status(says(State::Preparing, reason))];
    assert_eq!(begun(&told.ended(said, Outcome::Done)), None, "it waits");
    let volume = Observed { volume: true, ..Observed::default() };
    let done = vec![
        Change::Observed(Ok(volume)),
        Change::Record(kept(true)),
        Change::Status(says(State::Active, None)),
    ];
    let made = Event::Ended(Report { instance: VOLUME, done, outcome: Outcome::Done });
    assert_eq!(first(&mut told, made), Some(Effect::PrepareDisk));
}

#[test]
fn a_disk_that_is_there_and_is_being_made_is_not_booted_from() {
    let mut told = waiting();
    told.ended(vec![], Outcome::Done);
    let volume = Observed { volume: true, ..Observed::default() };
    let done = vec![Change::Observed(Ok(volume)), Change::Record(kept(false))];
    let failed = Outcome::Retry("later".to_owned());
    let half = Event::Ended(Report { instance: VOLUME, done, outcome: failed });
    assert_ne!(first(&mut told, half), Some(Effect::PrepareDisk));
}

#[test]
fn nothing_is_booted_from_a_disk_that_could_not_be_looked_at_since_it_was_made() {
    let mut told = waiting();
    let reason = Some("the volume that it is to boot from is not there yet");
    told.ended(vec![Change::Status(says(State::Preparing, reason))], Outcome::Done);
    let volume = Observed { volume: true, ..Observed::default() };
    let done = vec![
        Change::Observed(Ok(volume)),
        Change::Record(kept(true)),
        Change::Status(says(State::Active, None)),
        Change::Observed(Err("gone away".to_owned())),
    ];
    let made = Event::Ended(Report { instance: VOLUME, done, outcome: Outcome::Done });
    assert_ne!(first(&mut told, made), Some(Effect::PrepareDisk));
}

#[test]
fn a_record_tells_what_its_machine_boots_from() {
    let RecordFacts::Kept { started, rebuilt, metadata, intent, rescued, size, .. } = kept(true) else {
        panic!()
    };
    let record = RecordFacts::Kept {
        started,
        rebuilt,
        metadata,
        intent,
        root: Some(VOLUME),
        rescued,
        size,
        rescue_begun: false,
    };
    assert_eq!((record.root(), kept(true).root(), RecordFacts::Absent.root()), (Some(VOLUME), None, None));
}

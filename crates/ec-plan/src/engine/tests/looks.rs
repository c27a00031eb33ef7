//! What is believed of looks and audits, what is forgotten, and what is tried when.

use ec_model::{End, Handover, Workload};

use super::*;

const OTHER: InstanceId = InstanceId::new(uuid::Uuid::from_u128(2));

fn audit(commands: &[Command]) -> Begun {
    let begun = commands.iter().find_map(|command| match command {
        Command::Audit(begun) => Some(*begun),
        _ => None,
    });
    begun.unwrap_or_else(|| panic!("{commands:?}"))
}

fn observation(commands: &[Command]) -> Begun {
    let [Command::Observe(_, begun)] = commands[..] else { panic!("{commands:?}") };
    begun
}

/// An engine with a guest that is to run, has not been built, and whose question to placement was not answered.
fn unanswered() -> (Told, Begun) {
    let seen = Seen { statuses: [(one(), says(State::Preparing, None))].into(), ..Seen::default() };
    let (mut told, commands) = Told::looked(seen, Desired::Active);
    told.on(Event::Audited(audit(&commands), Ok(None)));
    let failed = told.on(Event::Allocation(one(), Err("placement is away".to_owned())));
    assert!(matches!(&failed[..], [Command::Tell(tell), Command::Begin(_)] if tell.warning), "{failed:?}");
    told.ended(vec![], Outcome::Done);
    let begun = audit(&told.on(Event::Registered));
    (told, begun)
}

#[test]
fn before_a_build_placement_is_asked_for_the_whole_claim_whatever_an_audit_says() {
    for held in [vec![(one(), Ok(Resources::new()))], vec![]] {
        let (mut told, begun) = unanswered();
        told.on(Event::Audited(begun, Ok(Some(held.into_iter().collect()))));
        let (pause, commands) = told.wait();
        assert_eq!((pause, commands), (RETRY_FIRST, vec![Command::AskPlacement(one())]));
    }
}

#[test]
fn a_guest_that_is_here_and_in_no_audit_is_asked_for_and_one_that_is_in_it_is_not() {
    let other = Observed { domain: Some(RunState::Ended(End::ByGuest)), ..HERE };
    // Its disk is gone, and it is kept.
    let gone = InstanceId::new(uuid::Uuid::from_u128(3));
    let seen = Seen {
        observed: [(one(), HERE), (OTHER, other)].into(),
        records: [one(), OTHER, gone]
            .map(|one| {
                (
                    one,
                    crate::RecordFacts::Kept {
                        started: true,
                        rebuilt: None,
                        metadata: 0,
                        root: None,
                        intent: super::KEPT,
                        rescued: None,
                        size: crate::SizeFacts::default(),
                        rescue_begun: false,
                    },
                )
            })
            .into(),
        statuses: [one(), OTHER].map(|one| (one, says(State::Unclaimed, Some("no request")))).into(),
        ..Seen::default()
    };
    let (mut told, commands) = Told::looked(seen, Desired::Active);
    told.on(Event::Audited(audit(&commands), Ok(None)));
    told.on(Event::Changed(vec![(gone, Some(requested_of(gone)))]));
    let is_told = "its disk is gone; the rest is kept until it is destroyed";
    let done = vec![Change::Status(says(State::Error, Some(is_told)))];
    told.on(Event::Ended(Report { instance: gone, done, outcome: Outcome::Done }));
    told.on(Event::Changed(vec![(one(), None)]));
    for instance in [one(), OTHER] {
        told.on(Event::Allocation(instance, Ok(Held::Nothing)));
        told.on(Event::Ended(Report { instance, done: vec![], outcome: Outcome::Retry("later".to_owned()) }));
    }
    let begun = audit(&told.on(Event::Registered));
    let commands = told.on(Event::Audited(begun, Ok(Some([(OTHER, Ok(Resources::new()))].into()))));
    let counted = Command::Counted([OTHER].into());
    assert!(commands.contains(&counted) && commands.contains(&Command::AskPlacement(one())), "{commands:?}");
    assert!(!commands.contains(&Command::AskPlacement(OTHER)), "{commands:?}");
    assert!(commands.contains(&Command::AskPlacement(gone)), "{commands:?}");
}

#[test]
fn one_that_an_audit_was_not_told_of_is_left_as_it_was_and_all_others_are_not() {
    let seen = Seen { observed: [(one(), HERE), (OTHER, HERE)].into(), ..Seen::default() };
    let (mut told, commands) = Told::looked(seen, Desired::Active);
    let begun = audit(&commands);
    for instance in [one(), OTHER] {
        told.on(Event::Allocation(instance, Ok(Held::Nothing)));
        told.on(Event::Ended(Report { instance, done: vec![], outcome: Outcome::Retry("later".to_owned()) }));
    }
    told.on(Event::Audited(begun, Ok(None)));
    let begun = audit(&told.on(Event::Registered));
    let held: Audit = [(OTHER, Err("its record cannot be read".to_owned()))].into();
    let commands = told.on(Event::Audited(begun, Ok(Some(held))));
    assert!(commands.contains(&Command::AskPlacement(one())), "{commands:?}");
    assert!(!commands.contains(&Command::AskPlacement(OTHER)), "{commands:?}");
    assert!(commands.contains(&Command::Counted(BTreeSet::new())), "{commands:?}");
    assert_eq!(warnings(&commands), 1);
    told.pass(AUDIT_RETRY);
    audit(&told.on(Event::Due));
}

#[test]
fn a_claim_of_nobody_that_is_gone_at_the_next_audit_is_forgotten() {
    let (mut told, commands) = Told::looked(Seen::default(), Desired::Destroyed);
    told.on(Event::Audited(audit(&commands), Ok(Some([(OTHER, Ok(Resources::new()))].into()))));
    assert!(told.engine.why(OTHER).is_some_and(|why| why.contains("may still come")));
    let begun = audit(&told.on(Event::Registered));
    let commands = told.on(Event::Audited(begun, Ok(Some(BTreeMap::new()))));
    assert_eq!(commands, [Command::Counted(BTreeSet::new())]);
    assert_eq!(told.engine.why(OTHER), None);
}

#[test]
fn what_is_gone_with_all_that_was_of_it_is_forgotten() {
    let seen = Seen { statuses: [(OTHER, says(State::Error, Some("no image")))].into(), ..Seen::default() };
    let (mut told, _) = Told::looked(seen, Desired::Active);
    assert!(told.engine.why(OTHER).is_some(), "its status is there to read");
    let [Command::LookAtAll(begun)] = told.on(Event::HintAll)[..] else { panic!() };
    told.on(Event::Looked(begun, Ok(Seen::default())));
    assert_eq!(told.engine.why(OTHER), None);
}

#[test]
fn what_a_user_destroyed_here_is_known_until_a_look_says_otherwise() {
    let buried = Seen { buried: [(OTHER, Some(9))].into(), ..Seen::default() };
    let (mut told, _) = Told::looked(buried, Desired::Active);
    let request = || Event::Changed(vec![(OTHER, Some(requested_of(OTHER)))]);
    let commands = told.on(request());
    let last = begun(&commands).and_then(|effects| effects.last());
    assert_eq!(last, Some(&Effect::DropKeys), "with an older etcd it came back: {commands:?}");
    let done = vec![Change::RequestDropped, Change::Status(StatusEntry::Absent)];
    told.on(Event::Ended(Report { instance: OTHER, done, outcome: Outcome::Done }));
    let [Command::LookAtAll(look)] = told.on(Event::HintAll)[..] else { panic!() };
    told.on(Event::Looked(look, Ok(Seen::default())));
    assert_eq!(told.engine.why(OTHER), None, "the node forgot it, and so is it here");
    let commands = told.on(request());
    assert_eq!(begun(&commands), Some(&vec![Effect::Announce(State::Preparing, None)]));
}

#[test]
fn what_is_gone_is_kept_in_mind_until_no_audit_can_tell_of_it_as_it_was() {
    let seen = Seen { statuses: [(OTHER, says(State::Preparing, None))].into(), ..Seen::default() };
    let (mut told, commands) = Told::looked(seen, Desired::Active);
    let before = audit(&commands);
    told.pass(Duration::from_secs(1));
    let done = vec![Change::Buried(Some(9)), Change::Status(StatusEntry::Absent)];
    told.on(Event::Ended(Report { instance: OTHER, done, outcome: Outcome::Done }));
    let look = |told: &mut Told| {
        told.pass(Duration::from_secs(1));
        let [Command::LookAtAll(look)] = told.on(Event::HintAll)[..] else { panic!() };
        let seen = Seen { buried: [(OTHER, Some(9))].into(), ..Seen::default() };
        told.on(Event::Looked(look, Ok(seen)));
        told.engine.known.contains_key(&OTHER)
    };
    assert!(look(&mut told), "an audit is under way that began before it was gone");
    let commands = told.on(Event::Audited(before, Ok(Some([(OTHER, Ok(Resources::new()))].into()))));
    assert!(!commands.contains(&Command::AskPlacement(OTHER)), "it held that before: {commands:?}");
    assert!(!look(&mut told), "nobody can tell of it now");
}

#[test]
fn a_volume_that_was_destroyed_here_and_is_placed_here_since_comes_from_its_node() {
    let from = Some(Handover::From(NodeId::new(uuid::Uuid::from_u128(9))));
    for (destroyed, handover, comes) in
        [(Some(2), from, true), (Some(3), from, false), (None, from, false), (Some(2), None, false)]
    {
        let buried = Seen { buried: [(OTHER, destroyed)].into(), ..Seen::default() };
        let (mut told, _) = Told::looked(buried, Desired::Active);
        let Requested { record, revision } = requested_of(OTHER);
        let of = |record: Arc<Request>| Request {
            kind: Workload::Volume,
            epoch: 3,
            handover,
            ..(*record).clone()
        };
        let request = Requested { record: record.map(|record| Arc::new(of(record))), revision };
        let commands = told.on(Event::Changed(vec![(OTHER, Some(request))]));
        let first = begun(&commands).and_then(|effects| effects.first());
        let state = if comes { State::Preparing } else { State::Destroying };
        assert_eq!(first, Some(&Effect::Announce(state, None)), "{destroyed:?} {handover:?}");
        // Once that is taken back, it stays whatever is asked for.
        let preparing = says(State::Preparing, None);
        let done = vec![Change::Unburied, Change::Status(preparing)];
        told.on(Event::Ended(Report { instance: OTHER, done, outcome: Outcome::Done }));
        told.on(Event::Changed(vec![(OTHER, Some(requested_of(OTHER)))]));
        let why = told.engine.why(OTHER).unwrap_or_default().to_owned();
        assert!(!why.contains("destroyed"), "{why}");
    }
}

#[test]
fn what_is_held_of_nothing_is_given_up_once() {
    let seen = Seen { held: [OTHER].into(), ..Seen::default() };
    let (mut told, commands) = Told::looked(seen, Desired::Active);
    let drops = |commands: &[Command]| {
        commands.iter().any(|command| {
            matches!(command, Command::Begin(job) if job.instance == OTHER
                && matches!(&job.work, Work::Effects(effects) if effects.ends_with(&[Effect::Release, Effect::DropKeys])))
        })
    };
    assert!(drops(&commands), "{commands:?}");
    let done = vec![Change::RequestDropped, Change::Status(StatusEntry::Absent)];
    let commands = told.on(Event::Ended(Report { instance: OTHER, done, outcome: Outcome::Done }));
    assert!(!drops(&commands) && told.engine.why(OTHER).is_none(), "{commands:?}");
}

#[test]
fn a_newer_wish_that_was_heard_of_before_the_end_of_work_on_an_older_one_is_not_dropped_with_it() {
    let mut told = Told::building();
    let destroyed = Requested { revision: 7, ..requested(Desired::Destroyed) };
    told.on(Event::Changed(vec![(one(), None)]));
    told.on(Event::Changed(vec![(one(), Some(destroyed))]));
    let commands =
        told.ended(vec![Change::RequestDropped, Change::Status(StatusEntry::Absent)], Outcome::Done);
    let last = begun(&commands).and_then(|effects| effects.last());
    assert_eq!(last, Some(&Effect::DropKeys), "it is destroyed: {commands:?}");
}

#[test]
fn whose_an_allocation_is_is_asked_again_after_each_listing() {
    let (mut told, _) = Told::looked(Seen::default(), Desired::Active);
    let [Command::LookAtAll(look)] = told.on(Event::HintAll)[..] else { panic!() };
    told.on(Event::Looked(look, Ok(Seen::default())));
    let asks = |commands: &[Command]| commands.contains(&Command::AskWhose(OTHER));
    told.on(Event::Allocation(OTHER, Ok(Held::Here(Resources::new()))));
    told.now.since_start += Duration::from_secs(61);
    let commands = told.on(Event::Due);
    assert!(asks(&commands), "{commands:?}");
    let commands = told.on(Event::Whose(OTHER, Ok(Whose::Nobodys)));
    assert!(!asks(&commands), "{commands:?}");
    let commands = told.on(Event::Listed(vec![(one(), requested(Desired::Active))]));
    assert!(asks(&commands), "with an etcd that was put back it may be ours: {commands:?}");
}

#[test]
fn what_a_later_listing_brings_waits_for_a_look_that_began_after_it_at_what_was_told_of_it() {
    let (mut told, _) = Told::looked(Seen::default(), Desired::Active);
    told.on(Event::Changed(vec![(one(), None)]));
    told.on(Event::Allocation(one(), Ok(Held::Nothing)));
    let [Command::LookAtAll(before)] = told.on(Event::HintAll)[..] else { panic!() };
    let commands = told.on(Event::Listed(vec![(one(), requested(Desired::Active))]));
    assert_eq!(told.engine.why(one()), Some("waiting to see what there is of it"), "{commands:?}");
    // Not by one that began before etcd was put back.
    let commands = told.on(Event::Looked(before, Ok(Seen::default())));
    assert_eq!((begun(&commands), commands.contains(&Command::AskPlacement(one()))), (None, false));
    let (pause, commands) = told.wait();
    let [Command::LookAtAll(look)] = commands[..] else { panic!("{commands:?}") };
    assert_eq!(pause, LOOK_SOON);
    let was_there = Seen { statuses: [(one(), says(State::Active, None))].into(), ..Seen::default() };
    told.on(Event::Looked(look, Ok(was_there)));
    assert_eq!(told.engine.why(one()), Some("its disk is gone; the rest is kept until it is destroyed"));
    // Listed again, it is known.
    let commands = told.on(Event::Listed(vec![(one(), requested(Desired::Active))]));
    assert_ne!(told.engine.why(one()), Some("waiting to see what there is of it"), "{commands:?}");
}

#[test]
fn a_volume_that_was_waited_for_is_looked_for_once_more_when_nobody_asks_for_it_any_longer() {
    let Requested { record, revision } = requested(Desired::Active);
    let from = Some(Handover::From(NodeId::new(uuid::Uuid::from_u128(9))));
    let volume = Request { kind: Workload::Volume, handover: from, ..(*record.unwrap()).clone() };
    let volume = Requested { record: Ok(Arc::new(volume)), revision };
    for gone in [Event::Changed(vec![(one(), None)]), Event::Listed(vec![])] {
        let (mut told, _) = Told::looked(Seen::default(), Desired::Destroyed);
        told.ended(vec![Change::RequestDropped, Change::Status(StatusEntry::Absent)], Outcome::Done);
        told.on(Event::Allocation(one(), Ok(Held::Here(Resources::new()))));
        let commands = told.on(Event::Changed(vec![(one(), Some(volume.clone()))]));
        assert_eq!(begun(&commands), Some(&vec![Effect::Announce(State::Preparing, None)]));
        told.ended(vec![Change::Status(says(State::Preparing, None))], Outcome::Retry("not yet".to_owned()));
        let commands = told.on(gone);
        let look = commands.iter().find_map(|command| match command {
            Command::LookAtAll(look) => Some(*look),
            _ => None,
        });
        let (pause, commands) = told.wait();
        assert_eq!((pause, begun(&commands)), (RETRY_FIRST, None), "its claim may be that of what came");
        assert_eq!(told.engine.why(one()), Some("waiting to see what there is of it"));
        let came = Observed { volume: true, ..Observed::default() };
        let statuses = [(one(), says(State::Preparing, None))].into();
        let seen = Seen { observed: [(one(), came)].into(), statuses, ..Seen::default() };
        let commands = told.on(Event::Looked(look.expect("it is looked for"), Ok(seen)));
        let said = begun(&commands).map(|effects| &effects[0]);
        assert!(matches!(said, Some(Effect::Announce(State::Unclaimed, _))), "{commands:?}");
    }
}

fn requested_of(instance: InstanceId) -> Requested {
    let Requested { record, revision } = requested(Desired::Active);
    let record = record.map(|record| Arc::new(Request { instance, ..(*record).clone() }));
    Requested { record, revision }
}

#[test]
fn an_observation_that_began_before_our_own_work_says_nothing_about_it() {
    let mut told = waiting();
    let before = observation(&told.on(Event::Hint(one())));
    assert!(matches!(&told.on(found(Some("192.0.2.1")))[..], [Command::Begin(_)]));
    told.ended(vec![], Outcome::Done);
    let gone = Observed { domain: Some(RunState::Ended(End::ByGuest)), ..HERE };
    let after = observation(&told.on(Event::Observed(one(), before, Ok(gone))));
    let commands = told.on(Event::Observed(one(), after, Ok(gone)));
    let told = begun(&commands).and_then(|effects| effects.first());
    assert!(matches!(told, Some(Effect::Announce(State::Stopped, Some(_)))), "{commands:?}");
}

#[test]
fn a_stranger_of_whom_the_hypervisor_has_something_is_looked_at() {
    let (mut told, _) = Told::looked(Seen::default(), Desired::Active);
    let hint = observation(&told.on(Event::Hint(OTHER)));
    let foreign = Observed { foreign: true, ..Observed::default() };
    for nothing in [Observed::default(), foreign] {
        assert_eq!(told.on(Event::Observed(OTHER, hint, Ok(nothing))), []);
    }
    let commands = told.on(Event::Observed(OTHER, hint, Ok(HERE)));
    assert!(matches!(commands[..], [Command::LookAtAll(_)]), "{commands:?}");
    // Of one that is known nothing new is learnt from an old observation.
    let mut told = Told::building();
    assert_eq!(told.on(Event::Observed(one(), hint, Ok(HERE))), []);
}

#[test]
fn after_it_was_let_go_on_a_guest_is_looked_at_since_it_may_be_paused_again() {
    let mut told = waiting();
    assert!(matches!(&told.on(found(Some("192.0.2.1")))[..], [Command::Begin(_)]));
    let commands = told.ended(vec![Change::Resumed], Outcome::Done);
    observation(&commands);
}

#[test]
fn work_that_stood_on_what_has_changed_is_tried_again_and_work_that_was_asked_to_stop_goes_on_at_once() {
    let mut told = Told::building();
    assert_eq!(begun(&told.ended(vec![], Outcome::Abandoned)), None);
    assert_eq!(told.engine.why(one()), Some("what it stood on has changed; trying again"));
    let (pause, commands) = told.wait();
    assert_eq!((pause, begun(&commands).is_some()), (RETRY_FIRST, true));
}

#[test]
fn what_stopped_work_for_now_is_told_and_what_is_there_is_looked_at() {
    let mut told = Told::building();
    let commands = told.ended(vec![], Outcome::Retry("etcd is away".to_owned()));
    let [Command::Tell(tell), Command::Observe(..)] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!(
        (&*tell.what, tell.why.as_deref()),
        ("did not work for now; trying again", Some("etcd is away"))
    );
    assert_eq!((tell.warning, tell.instance), (true, Some(one())));
}

#[test]
fn a_guest_that_ran_and_failed_is_kept_and_tried_again_when_its_time_comes() {
    let mut told = waiting();
    assert!(matches!(&told.on(found(Some("192.0.2.1")))[..], [Command::Begin(_)]));
    let commands = told.ended(vec![], Outcome::Failed("broken".to_owned()));
    let [Command::Begin(job)] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!((&job.work, told.engine.why(one())), (&Work::Fail("broken".to_owned()), Some("broken")));
    let commands = told.ended(vec![Change::Status(says(State::Error, Some("broken")))], Outcome::Done);
    assert!(!commands.iter().any(|command| matches!(command, Command::Begin(_))), "not yet: {commands:?}");
    let (pause, commands) = told.wait();
    assert_eq!((pause, begun(&commands)), (RETRY_FIRST, Some(&vec![Effect::NoteStart])));
}

#[test]
fn only_a_guest_without_an_address_of_which_none_was_found_was_looked_for_in_vain() {
    let searched = |told: &Told| told.engine.known[&one()].searched();
    let mut told = waiting();
    for _ in 0..3 {
        told.on(found(None));
        told.pass(Duration::from_secs(1));
    }
    assert_eq!(searched(&told), Duration::from_secs(2));
    assert!(matches!(&told.on(found(Some("192.0.2.1")))[..], [Command::Begin(_)]));
    // It was found, and is being written.
    told.on(found(Some("192.0.2.1")));
    assert_eq!(searched(&told), Duration::from_secs(2));
    let StatusEntry::Known(mut status, _) = told.engine.known[&one()].status.clone() else { panic!() };
    status.ip = Some([192, 0, 2, 1].into());
    told.ended(vec![Change::Status(StatusEntry::Known(status, 1))], Outcome::Done);
    told.on(found(None));
    assert_eq!(searched(&told), Duration::from_secs(2), "another interface's may be missing yet");
}

#[test]
fn what_a_guest_holds_is_asked_for_anew_when_its_request_is_gone_from_a_listing() {
    let mut told = waiting();
    told.on(Event::Allocation(one(), Ok(Held::Here(Resources::new()))));
    let commands = told.on(Event::Listed(vec![]));
    assert!(commands.contains(&Command::AskPlacement(one())), "etcd may have been put back: {commands:?}");
}

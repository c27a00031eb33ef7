//! The engine, one event at a time.

mod boots;
mod copies;
mod looks;
mod pauses;
mod sights;
mod sizes;

use std::sync::Arc;

use ec_model::{
    AccessKind, AccessWish, AddressSource, Desired, NodeId, Observed, PowerWish, Request, Resources, Restart,
    RunState, State, Workload,
};
use jiff::Timestamp;

use super::*;
use crate::{machine::Effect, status};

const SETUP: Setup =
    Setup { limits: Limits { address: Duration::from_secs(300), grace: Duration::from_secs(60) }, nics: 1 };
const HERE: Observed = Observed {
    domain: Some(RunState::Running),
    volume: true,
    successor: false,
    transient: false,
    rescued: false,
    volumes: 0,
    copies: 0,
    foreign: false,
};

pub(super) fn one() -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(1))
}

/// That the node's record keeps a copy of [`requested`].
const KEPT: Option<ec_model::Edition> = Some(ec_model::Edition { epoch: 1, generation: 1 });

pub(super) fn requested(desired: Desired) -> Requested {
    let request = Request {
        instance: one(),
        epoch: 1,
        generation: 1,
        desired,
        power: PowerWish::default(),
        restart: Restart::No,
        rebuild: None,
        rescue: None,
        kind: ec_model::Workload::Machine,
        volumes: Vec::new(),
        resize: None,
        handover: None,
        name: None,
        spec: None,
        project: String::new(),
        user: String::new(),
        access: None,
        request_id: Some(ec_model::RequestId::new(uuid::Uuid::from_u128(5))),
        created_at: Timestamp::UNIX_EPOCH,
    };
    Requested { record: Ok(Arc::new(request)), revision: 1 }
}

/// The record of an instance that is here, which a guest may have written or not.
fn kept(started: bool) -> crate::RecordFacts {
    crate::RecordFacts::Kept {
        started,
        rebuilt: None,
        metadata: 0,
        intent: KEPT,
        root: None,
        rescued: None,
        size: crate::SizeFacts::default(),
        rescue_begun: false,
    }
}

/// The request with this changed.
fn asks(change: impl FnOnce(&mut Request)) -> Requested {
    let Requested { record, revision } = requested(Desired::Active);
    let mut request = (*record.unwrap()).clone();
    change(&mut request);
    Requested { record: Ok(Arc::new(request)), revision }
}

fn says(state: State, reason: Option<&str>) -> StatusEntry {
    let subject = status::Subject {
        instance: one(),
        node: NodeId::new(uuid::Uuid::from_u128(9)),
        name: None,
        kept: None,
        order: Some(status::Order {
            kind: ec_model::Workload::Machine,
            epoch: 1,
            generation: 1,
            power_generation: 1,
            runs: true,
        }),
        why: String::new(),
    };
    let reason = reason.map(str::to_owned);
    StatusEntry::Known(Box::new(status::announced(&subject, None, state, reason, Timestamp::UNIX_EPOCH)), 1)
}

/// An engine with its clock.
struct Told {
    engine: Engine,
    now: Now,
}

impl Told {
    /// That has looked and seen this, with this request.
    fn looked(seen: Seen, desired: Desired) -> (Self, Vec<Command>) {
        let now = Now { since_start: Duration::ZERO, stamp: Timestamp::UNIX_EPOCH };
        let mut told = Self { engine: Engine::new(SETUP, now), now };
        assert_eq!(told.engine.next_due(), Some(Duration::ZERO), "it is due at once");
        let [Command::LookAtAll(begun)] = told.on(Event::Due)[..] else { panic!() };
        assert_eq!(told.on(Event::Listed(vec![(one(), requested(desired))])), [], "nothing before the look");
        let commands = told.on(Event::Looked(begun, Ok(seen)));
        (told, commands)
    }

    /// That builds, and has come to its one long job.
    fn building() -> Self {
        let seen = Seen { statuses: [(one(), says(State::Preparing, None))].into(), ..Seen::default() };
        let (mut told, commands) = Self::looked(seen, Desired::Active);
        assert!(commands.contains(&Command::AskPlacement(one())), "{commands:?}");
        let held = Event::Allocation(one(), Ok(Held::Here(Resources::new())));
        assert_eq!(begun(&told.on(held)).map(|effects| effects[0].clone()), Some(Effect::PrepareDisk));
        told
    }

    fn on(&mut self, event: Event) -> Vec<Command> {
        let mut commands = self.engine.on(event, self.now);
        commands.retain(|command| !matches!(command, Command::Tell(tell) if !tell.warning));
        commands
    }

    fn ended(&mut self, done: Vec<Change>, outcome: Outcome) -> Vec<Command> {
        self.on(Event::Ended(Report { instance: one(), done, outcome }))
    }

    /// The clock goes on to what is due next; how long that was.
    fn wait(&mut self) -> (Duration, Vec<Command>) {
        let due = self.engine.next_due().unwrap();
        let pause = due - self.now.since_start;
        self.pass(pause);
        (pause, self.on(Event::Due))
    }

    fn pass(&mut self, pause: Duration) {
        self.now.since_start += pause;
        self.now.stamp += pause;
    }
}

/// The effects of the job that was begun.
fn begun(commands: &[Command]) -> Option<&Vec<Effect>> {
    commands.iter().find_map(|command| match command {
        Command::Begin(job) => match &job.work {
            Work::Effects(effects) => Some(effects),
            Work::Fail(_) | Work::Delayed(_) | Work::Addresses(_) => None,
        },
        _ => None,
    })
}

#[test]
fn the_newest_wish_wins_over_a_running_job_which_is_asked_to_stop_once() {
    let mut told = Told::building();
    let destroy = || Event::Changed(vec![(one(), Some(requested(Desired::Destroyed)))]);
    assert_eq!(told.on(destroy()), [Command::Cancel(one())]);
    assert_eq!(told.on(destroy()), [], "it was asked to");
    let commands = told.ended(vec![], Outcome::Abandoned);
    assert_eq!(begun(&commands).and_then(|effects| effects.last()), Some(&Effect::DropKeys), "at once");
}

#[test]
fn what_failed_for_an_older_wish_says_nothing_of_the_newest() {
    for outcome in [Outcome::Failed("no such file".to_owned()), Outcome::RetryBounded("away".to_owned())] {
        let mut told = Told::building();
        let Requested { record, .. } = requested(Desired::Active);
        let power = PowerWish { generation: 2, anew: true, ..PowerWish::default() };
        let record = Ok(Arc::new(Request { generation: 2, power, ..Request::clone(&record.unwrap()) }));
        told.on(Event::Changed(vec![(one(), Some(Requested { record, revision: 2 }))]));
        let commands = told.ended(vec![], outcome);
        let [Command::Observe(_, begun_look)] = commands[..] else { panic!("{commands:?}") };
        // Decided anew, and what is wished now is waited for as long as anything.
        let here = Observed { volume: true, ..Observed::default() };
        let commands = told.on(Event::Observed(one(), begun_look, Ok(here)));
        assert!(begun(&commands).is_some(), "{commands:?}");
        told.pass(IMAGE_PATIENCE);
        let commands = told.ended(vec![], Outcome::RetryBounded("away".to_owned()));
        assert!(!commands.iter().any(|command| matches!(command, Command::Begin(_))), "{commands:?}");
    }
}

#[test]
fn a_running_job_goes_on_for_who_looks_at_its_instance_and_not_for_who_wishes_more() {
    let mut told = Told::building();
    let asked = |revision, access: u64, generation| {
        let record = Request {
            access: Some(AccessWish { kind: AccessKind::Log, generation: access, request_id: None }),
            power: PowerWish { generation, ..PowerWish::default() },
            generation,
            ..Request::clone(&requested(Desired::Active).record.unwrap())
        };
        Requested { record: Ok(Arc::new(record)), revision }
    };
    let heard = |requested: &Requested| Event::Changed(vec![(one(), Some(requested.clone()))]);
    for (revision, access) in [(2, 1), (3, 2)] {
        let looked = asked(revision, access, 1);
        assert_eq!(told.on(heard(&looked)), [Command::TakeUp(one(), looked.clone())]);
        assert_eq!(told.on(heard(&looked)), [], "it was told to");
    }
    assert_eq!(told.on(heard(&asked(4, 3, 2))), [Command::Cancel(one())], "more is wished than to look");
    assert_eq!(told.on(heard(&asked(5, 4, 2))), [], "it ends, and all is decided anew");
}

#[test]
fn addresses_of_a_guest_without_a_request_are_not_told_before_requests_were_listed() {
    let now = Now { since_start: Duration::ZERO, stamp: Timestamp::UNIX_EPOCH };
    let mut told = Told { engine: Engine::new(SETUP, now), now };
    let [Command::LookAtAll(begun_look)] = told.on(Event::Due)[..] else { panic!() };
    let statuses = [(one(), says(State::Unclaimed, None))].into();
    let seen = Seen { statuses, observed: [(one(), HERE)].into(), ..Seen::default() };
    told.on(Event::Looked(begun_look, Ok(seen)));
    let address = ec_model::Address {
        ip: "10.0.0.7".parse().unwrap(),
        mac: one().mac(0),
        nic: 0,
        source: ec_model::AddressSource::Lease,
    };
    let found = Found { addresses: [(one(), vec![address])].into(), ..Found::default() };
    assert_eq!(told.on(Event::Found(found)), []);
}

#[test]
fn what_takes_long_goes_on_for_who_names_it_and_not_for_who_wishes_another_size() {
    let of = |generation, change: fn(&mut Request)| {
        let mut record = Request::clone(&requested(Desired::Active).record.unwrap());
        (record.kind, record.generation) = (Workload::Volume, generation);
        change(&mut record);
        Requested { record: Ok(Arc::new(record)), revision: i64::try_from(generation).unwrap() }
    };
    let first = of(1, |_| ());
    let labelled = of(2, |record| record.request_id = None);
    assert!(labelled.goes_on_from(&first) && !first.goes_on_from(&first), "the same again is nothing new");
    assert!(of(3, |record| record.name = Some("other".to_owned())).goes_on_from(&first));
    let larger = of(4, |record| record.resize = Some(ec_model::Resize { wished_at: Timestamp::UNIX_EPOCH }));
    assert!(!larger.goes_on_from(&first));
    assert!(!of(5, |record| record.epoch += 1).goes_on_from(&first), "placed anew");
    assert!(!of(6, |record| record.desired = Desired::Destroyed).goes_on_from(&first));
    let machine = |generation| of(generation, |record| record.kind = Workload::Machine);
    assert!(machine(2).goes_on_from(&machine(1)), "it was labelled, or locked");
    let power =
        of(3, |record| (record.kind, record.power.power) = (Workload::Machine, ec_model::Power::Stopped));
    assert!(!power.goes_on_from(&machine(1)));
}

#[test]
fn who_waits_for_an_answer_is_told_what_for_once_for_each_reason() {
    let seen = Seen { statuses: [(one(), says(State::Preparing, None))].into(), ..Seen::default() };
    let (mut told, commands) = Told::looked(seen, Desired::Active);
    assert!(commands.contains(&Command::AskPlacement(one())), "{commands:?}");
    let delayed = |commands: &[Command]| {
        commands.iter().find_map(|command| match command {
            Command::Begin(job) => match &job.work {
                Work::Delayed(why) => Some(why.clone()),
                _ => None,
            },
            _ => None,
        })
    };
    let away = || Event::Allocation(one(), Err("placement is away".to_owned()));
    assert_eq!(delayed(&told.on(away())).as_deref(), Some("placement is away"));
    let mut status = says(State::Preparing, None);
    if let StatusEntry::Known(status, _) = &mut status {
        status.reason = Some("placement is away; trying again".to_owned());
    }
    let commands = told.ended(vec![Change::Status(status)], Outcome::Done);
    assert_eq!(begun(&commands), None, "telling it is no success: {commands:?}");
    let (_, commands) = told.wait();
    assert!(commands.contains(&Command::AskPlacement(one())), "{commands:?}");
    assert_eq!(delayed(&told.on(away())), None, "it is told already");
}

#[test]
fn one_wish_told_again_leaves_its_job_alone() {
    let mut told = Told::building();
    assert_eq!(told.on(Event::Changed(vec![(one(), Some(requested(Desired::Active)))])), []);
    assert_eq!(told.on(Event::Hint(one())), [], "nothing is taken from a look before it has ended");
}

#[test]
fn after_a_lost_sight_nothing_but_a_destroy_is_begun_until_it_is_back() {
    let blind = || vec![Change::Observed(Err("libvirtd does not answer".to_owned()))];
    let mut told = Told::building();
    let begun_before = told.ended(blind(), Outcome::Done);
    assert_eq!(begun(&begun_before), None, "nobody knows what is there");
    let (pause, commands) = told.wait();
    assert_eq!(pause, LOOK_SOON);
    let Some(Command::LookAtAll(begun_look)) = commands.first() else { panic!("{commands:?}") };
    let observed = Observed { domain: Some(RunState::NotStarted), ..HERE };
    let seen = Seen {
        statuses: [(one(), says(State::Preparing, None))].into(),
        observed: [(one(), observed)].into(),
        ..Seen::default()
    };
    let commands = told.on(Event::Looked(*begun_look, Ok(seen)));
    assert!(begun(&commands).is_some(), "it is seen, and goes on: {commands:?}");

    let mut told = Told::building();
    told.ended(blind(), Outcome::Done);
    let commands = told.on(Event::Changed(vec![(one(), Some(requested(Desired::Destroyed)))]));
    assert!(begun(&commands).is_some_and(|effects| effects.contains(&Effect::RemoveDomain)), "{commands:?}");
}

#[test]
fn a_look_that_began_before_our_own_work_says_nothing_about_it() {
    let mut told = Told::building();
    told.pass(LOOK_PERIOD);
    let commands = told.on(Event::Due);
    let Some(Command::LookAtAll(old)) = commands.first() else { panic!("{commands:?}") };
    let done = vec![
        Change::Record(crate::RecordFacts::Kept {
            started: true,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: KEPT,
            rescued: None,
            size: crate::SizeFacts::default(),
            rescue_begun: false,
        }),
        Change::Status(says(State::Starting, None)),
        Change::Observed(Ok(HERE)),
    ];
    let noted = told.ended(done, Outcome::Done);
    assert_eq!(begun(&noted), Some(&vec![Effect::NoteStart]));
    told.ended(vec![], Outcome::Retry("etcd is away".to_owned()));
    // The look saw neither domain nor status; a build would begin anew.
    told.on(Event::Looked(*old, Ok(Seen::default())));
    told.pass(RETRY_FIRST);
    let commands = told.on(Event::Due);
    assert_eq!(begun(&commands), Some(&vec![Effect::NoteStart]));
}

#[test]
fn pauses_grow_between_tries_and_a_new_wish_does_not_wait() {
    let mut told = Told::building();
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let commands = told.ended(vec![], Outcome::Retry("no".to_owned()));
        assert_eq!(begun(&commands), None, "not at once");
        assert_eq!(told.engine.why(one()), Some("no; trying again"));
        let mut waited = Duration::ZERO;
        loop {
            let (pause, commands) = told.wait();
            waited += pause;
            if begun(&commands).is_some() {
                break;
            }
        }
        pauses.push(waited.as_millis());
    }
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]);
    told.ended(vec![], Outcome::Retry("no".to_owned()));
    let again = told.on(Event::Changed(vec![(one(), Some(requested(Desired::Active)))]));
    assert_eq!(begun(&again), None, "the same wish, told again");
    let newer = Requested { revision: 2, ..requested(Desired::Active) };
    assert!(begun(&told.on(Event::Changed(vec![(one(), Some(newer))]))).is_some());
}

#[test]
fn an_image_that_is_away_is_waited_for_for_a_while_and_then_the_build_fails() {
    let mut told = Told::building();
    let away = || Outcome::RetryBounded("no mirror".to_owned());
    loop {
        let commands = told.ended(vec![], away());
        if let Some(Command::Begin(job)) = commands.first() {
            assert_eq!(job.work, Work::Fail("no mirror".to_owned()));
            break;
        }
        assert!(told.now.since_start < IMAGE_PATIENCE, "not for ever");
        while begun(&told.wait().1).is_none() {}
    }
    assert!(told.now.since_start >= IMAGE_PATIENCE);
    // Told, and swept at once: it never ran.
    let error = Change::Status(says(State::Error, Some("no mirror")));
    let commands = told.ended(vec![error], Outcome::Done);
    assert_eq!(begun(&commands).and_then(|effects| effects.last()), Some(&Effect::EndInError));
}

/// An engine that knows of a guest that runs and has no address yet.
fn waiting() -> Told {
    let subject = status::Subject {
        instance: one(),
        node: NodeId::new(uuid::Uuid::from_u128(9)),
        name: None,
        kept: None,
        order: Some(status::Order {
            kind: ec_model::Workload::Machine,
            epoch: 1,
            generation: 1,
            power_generation: 1,
            runs: true,
        }),
        why: String::new(),
    };
    let started = status::started(&subject, None, Timestamp::UNIX_EPOCH);
    let seen = Seen {
        statuses: [(one(), StatusEntry::Known(Box::new(started), 1))].into(),
        observed: [(one(), HERE)].into(),
        records: [(
            one(),
            crate::RecordFacts::Kept {
                started: true,
                rebuilt: None,
                metadata: 0,
                root: None,
                intent: KEPT,
                rescued: None,
                size: crate::SizeFacts::default(),
                rescue_begun: false,
            },
        )]
        .into(),
        ..Seen::default()
    };
    let (told, commands) = Told::looked(seen, Desired::Active);
    let search = Search { waiting: vec![one()], known: vec![] };
    assert!(commands.contains(&Command::Search(search)), "{commands:?}");
    told
}

/// That is to have a new disk, and has come to the job that makes it.
fn rebuilding() -> Told {
    let mut told = waiting();
    let Requested { record, .. } = requested(Desired::Active);
    let rebuild = Some(ec_model::Rebuild { wished_at: Timestamp::UNIX_EPOCH, before: None });
    let wish =
        Requested { record: Ok(Arc::new(Request { rebuild, ..(*record.unwrap()).clone() })), revision: 2 };
    let commands = told.on(Event::Changed(vec![(one(), Some(wish))]));
    assert_eq!(
        begun(&commands).and_then(|effects| effects.last()),
        Some(&Effect::ReplaceDisk),
        "{commands:?}"
    );
    told
}

#[test]
fn a_disk_that_cannot_be_made_anew_is_given_up_and_its_guest_left_as_it_is() {
    let give_up = |why: &str| vec![Effect::GiveUpRebuild(why.to_owned())];
    let mut refused = rebuilding();
    let commands = refused.ended(vec![], Outcome::Failed("no image".to_owned()));
    assert_eq!(begun(&commands), Some(&give_up("no image")));

    let mut away = rebuilding();
    loop {
        let commands = away.ended(vec![], Outcome::RetryBounded("no mirror".to_owned()));
        if let Some(effects) = begun(&commands) {
            assert_eq!(effects, &give_up("no mirror"));
            break;
        }
        assert!(away.now.since_start < IMAGE_PATIENCE, "not for ever");
        while begun(&away.wait().1).is_none() {}
    }
    let noted = crate::RecordFacts::Kept {
        started: true,
        rebuilt: Some(Timestamp::UNIX_EPOCH),
        metadata: 0,
        root: None,
        intent: KEPT,
        rescued: None,
        size: crate::SizeFacts::default(),
        rescue_begun: false,
    };
    let commands = away.ended(vec![Change::Record(noted)], Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::NoteRebuild]));
}

#[test]
fn a_rescue_that_cannot_be_is_given_up_and_its_guest_left_as_it_is() {
    let mut told = waiting();
    let Requested { record, .. } = requested(Desired::Active);
    let image = ec_model::ImageRef::default();
    let rescue = Some(ec_model::Rescue { wished_at: Timestamp::UNIX_EPOCH, image });
    let wish =
        Requested { record: Ok(Arc::new(Request { rescue, ..(*record.unwrap()).clone() })), revision: 2 };
    let commands = told.on(Event::Changed(vec![(one(), Some(wish))]));
    assert_eq!(begun(&commands).and_then(|effects| effects.last()), Some(&Effect::ShutDown));
    let commands = told.ended(vec![], Outcome::Failed("no image".to_owned()));
    assert_eq!(begun(&commands), Some(&vec![Effect::GiveUpRescue("no image".to_owned())]));
    let failed = crate::RescuedFacts { wished_at: Timestamp::UNIX_EPOCH, failed: true };
    let noted = crate::RecordFacts::Kept {
        started: true,
        rebuilt: None,
        metadata: 0,
        root: None,
        intent: KEPT,
        rescued: Some(failed),
        size: crate::SizeFacts::default(),
        rescue_begun: false,
    };
    let commands = told.ended(vec![Change::Record(noted)], Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::NoteRescue]));
}

fn found(ip: Option<&str>) -> Event {
    let address = |ip: &str| ec_model::Address {
        ip: ip.parse().unwrap(),
        mac: one().mac(0),
        nic: 0,
        source: AddressSource::Lease,
    };
    Event::Found(Found {
        waiting: vec![one()],
        addresses: [(one(), ip.map(address).into_iter().collect())].into(),
    })
}

#[test]
fn an_address_is_written_once_and_only_of_a_guest_that_is_known_to_run() {
    let mut told = waiting();
    let commands = told.on(found(Some("192.0.2.1")));
    assert!(matches!(&commands[..], [Command::Begin(job)] if matches!(job.work, Work::Addresses(_))));
    assert_eq!(told.on(found(Some("192.0.2.2"))), [], "one job at a time");

    let mut told = waiting();
    let commands = told.on(Event::Hint(one()));
    let [Command::Observe(_, seen)] = commands[..] else { panic!("{commands:?}") };
    let ended = Observed { domain: Some(RunState::Ended(ec_model::End::ByGuest)), ..HERE };
    told.on(Event::Observed(one(), seen, Ok(ended)));
    // What is to be told of it waits for etcd, say.
    told.ended(vec![], Outcome::Retry("etcd is away".to_owned()));
    assert_eq!(told.on(found(Some("192.0.2.1"))), [], "a late answer of one that has ended");
}

#[test]
fn what_a_hint_tells_while_only_a_status_is_written_is_looked_at_when_it_is() {
    let mut told = waiting();
    told.on(found(Some("192.0.2.1")));
    assert_eq!(told.on(Event::Hint(one())), [], "nothing is taken from a look now");
    let commands = told.ended(vec![], Outcome::Done);
    let looks = |commands: &[Command]| commands.iter().any(|command| matches!(command, Command::Observe(..)));
    assert!(looks(&commands), "{commands:?}");
    told.on(found(Some("192.0.2.1")));
    let commands = told.ended(vec![], Outcome::Done);
    assert!(!looks(&commands), "once: {commands:?}");

    // A look that a job overtook is made again.
    let mut told = waiting();
    let commands = told.on(Event::Hint(one()));
    let [Command::Observe(_, seen)] = commands[..] else { panic!("{commands:?}") };
    told.on(found(Some("192.0.2.1")));
    assert_eq!(told.on(Event::Observed(one(), seen, Ok(HERE))), []);
    assert!(looks(&told.ended(vec![], Outcome::Done)));

    // And a job that looks for itself is not followed by another look.
    let mut told = waiting();
    told.on(found(Some("192.0.2.1")));
    told.on(Event::Hint(one()));
    assert!(!looks(&told.ended(vec![Change::Observed(Ok(HERE))], Outcome::Done)));
}

#[test]
fn a_guest_without_an_address_is_told_when_it_was_looked_for_long_enough_and_looked_for_on() {
    let mut told = waiting();
    let mut seconds = 0;
    let commands = loop {
        let commands = told.on(found(None));
        if !commands.is_empty() {
            break commands;
        }
        told.pass(Duration::from_secs(1));
        seconds += 1;
        assert!(seconds < 1000);
    };
    assert_eq!(seconds, 300);
    assert!(
        matches!(begun(&commands), Some(effects) if matches!(effects[..], [Effect::Announce(State::Starting, Some(_))]))
    );
}

#[test]
fn an_audit_that_fails_is_tried_again_and_one_at_a_time() {
    let (mut told, commands) = Told::looked(Seen::default(), Desired::Active);
    let audit = |commands: &[Command]| {
        commands.iter().find_map(|command| match command {
            Command::Audit(begun) => Some(*begun),
            _ => None,
        })
    };
    let first = audit(&commands).unwrap();
    assert_eq!(told.on(Event::Registered), [], "one is under way");
    let away = || Err("placement is away".to_owned());
    assert_eq!(warnings(&told.on(Event::Audited(first, away()))), 1);
    told.pass(AUDIT_RETRY);
    let second = audit(&told.on(Event::Due)).expect("tried again");
    assert_eq!(warnings(&told.on(Event::Audited(second, away()))), 0, "that is known");
    told.pass(AUDIT_RETRY);
    assert_eq!(audit(&told.on(Event::Due)), None, "ever more seldom");
    told.pass(AUDIT_RETRY);
    let third = audit(&told.on(Event::Due)).expect("tried again");
    told.on(Event::Audited(third, Ok(Some(BTreeMap::new()))));
    let fourth = audit(&told.on(Event::Registered)).expect("it is registered anew");
    assert_eq!(warnings(&told.on(Event::Audited(fourth, away()))), 1, "it was well meanwhile");
    told.pass(AUDIT_RETRY);
    let fifth = audit(&told.on(Event::Due)).expect("tried again");
    told.on(Event::Audited(fifth, Ok(None)));
    assert!(audit(&told.on(Event::Registered)).is_some());
}

fn warnings(commands: &[Command]) -> usize {
    commands.iter().filter(|command| matches!(command, Command::Tell(tell) if tell.warning)).count()
}

#[test]
fn a_look_that_fails_is_tried_again_and_told_once() {
    let (mut told, _) = Told::looked(Seen::default(), Desired::Active);
    let mut look = |after: Duration, seen: Result<Seen, String>| {
        told.pass(after);
        let commands = told.on(Event::Due);
        let begun = commands.iter().find_map(|command| match command {
            Command::LookAtAll(begun) => Some(*begun),
            _ => None,
        });
        warnings(&told.on(Event::Looked(begun.expect("it is due"), seen)))
    };
    let away = || Err("libvirtd does not answer".to_owned());
    assert_eq!(look(LOOK_PERIOD, away()), 1);
    assert_eq!(look(LOOK_SOON, away()), 0, "that is known");
    assert_eq!(look(LOOK_SOON, Ok(Seen::default())), 0);
    assert_eq!(look(LOOK_PERIOD, away()), 1, "it was well meanwhile");
}

#[test]
fn at_the_end_of_the_agent_each_job_is_asked_to_stop() {
    let mut told = Told::building();
    assert_eq!(told.on(Event::Ending), [Command::Cancel(one())]);
    assert_eq!(told.engine.why(one()), Some("building it"));
}

#[test]
fn nothing_is_begun_before_the_requests_are_listed() {
    let now = Now { since_start: Duration::ZERO, stamp: Timestamp::UNIX_EPOCH };
    let mut told = Told { engine: Engine::new(SETUP, now), now };
    let [Command::LookAtAll(look)] = told.on(Event::Due)[..] else { panic!() };
    // What a build left that is to go on.
    let left = Observed { domain: Some(RunState::NotStarted), ..HERE };
    let seen = Seen {
        observed: [(one(), left)].into(),
        records: [(
            one(),
            crate::RecordFacts::Kept {
                started: false,
                rebuilt: None,
                metadata: 0,
                root: None,
                intent: KEPT,
                rescued: None,
                size: crate::SizeFacts::default(),
                rescue_begun: false,
            },
        )]
        .into(),
        ..Seen::default()
    };
    let commands = told.on(Event::Looked(look, Ok(seen)));
    assert!(!commands.iter().any(|command| matches!(command, Command::Begin(_))), "{commands:?}");
    let commands = told.on(Event::Listed(vec![(one(), requested(Desired::Active))]));
    assert!(commands.contains(&Command::AskPlacement(one())), "it goes on: {commands:?}");
}

#[test]
fn a_claim_without_a_request_is_looked_into_when_its_grace_is_over_and_not_at_the_next_look() {
    let (mut told, commands) = Told::looked(Seen::default(), Desired::Active);
    let Some(Command::Audit(audit)) = commands.iter().find(|command| matches!(command, Command::Audit(_)))
    else {
        panic!("{commands:?}")
    };
    let other = InstanceId::new(uuid::Uuid::from_u128(2));
    told.pass(Duration::from_secs(7));
    told.on(Event::Audited(*audit, Ok(Some([(other, Ok(Resources::new()))].into()))));
    let mut waited = Duration::ZERO;
    loop {
        let (pause, commands) = told.wait();
        waited += pause;
        if commands.contains(&Command::AskWhose(other)) {
            break;
        }
        assert!(waited < SETUP.limits.grace, "its time has come");
    }
    assert_eq!(waited, SETUP.limits.grace);
    assert!(
        told.on(Event::Whose(other, Ok(Whose::Nobodys)))
            .iter()
            .any(|command| matches!(command, Command::Tell(_)))
    );
    assert_eq!(begun(&told.on(Event::HintAll)), None, "it is left alone, and said once");
}

#[test]
fn it_knows_on_behalf_of_which_command_an_instance_is_as_it_is_wanted() {
    let (told, _) = Told::looked(Seen::default(), Desired::Active);
    let of = |number| InstanceId::new(uuid::Uuid::from_u128(number));
    let wanted = requested(Desired::Active).record.unwrap().request_id;
    assert!(wanted.is_some());
    assert_eq!([told.engine.request_id(one()), told.engine.request_id(of(2))], [wanted, None]);
}

//! Disks that are to be copied before they are otherwise.

use ec_model::{Attachment, CopyOf, Handover, ImageRef, Rebuild, Spec, Workload};

use super::*;

const COPY: InstanceId = InstanceId::new(uuid::Uuid::from_u128(7));
const OTHER: InstanceId = InstanceId::new(uuid::Uuid::from_u128(8));
const NODE: NodeId = NodeId::new(uuid::Uuid::from_u128(9));

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn rebuild(second: i64) -> Option<Rebuild> {
    Some(Rebuild { wished_at: at(second), before: None })
}

/// A volume that is to be a copy.
fn copy_of(of: &CopyOf, change: impl FnOnce(&mut Request)) -> Requested {
    let spec =
        format!(r#"{{"query":"resources=DISK_GB:1","image":{{"url":"{}"}}}}"#, ImageRef::copy_of(of).url);
    let spec: Spec = serde_json::from_str(&spec).unwrap();
    asks(|request| {
        (request.instance, request.kind, request.spec) = (COPY, Workload::Volume, Some(spec));
        change(request);
    })
}

fn disk() -> CopyOf {
    CopyOf::disk(Workload::Machine, one())
}

fn destroyed() -> Requested {
    asks(|request| request.desired = Desired::Destroyed)
}

/// What is seen of a disk that is there, beside whatever else.
fn seen(more: Seen) -> Seen {
    let Seen { mut statuses, mut observed, mut records, buried, held } = more;
    statuses.insert(one(), says(State::Active, None));
    observed.insert(one(), HERE);
    records.insert(one(), kept(true));
    Seen { statuses, observed, records, buried, held }
}

fn looked(requests: Vec<(InstanceId, Requested)>, more: Seen) -> (Told, Vec<Command>) {
    let now = Now { since_start: Duration::ZERO, stamp: Timestamp::UNIX_EPOCH };
    let mut told = Told { engine: Engine::new(SETUP, now), now };
    let [Command::LookAtAll(begun)] = told.on(Event::Due)[..] else { panic!() };
    told.on(Event::Listed(requests));
    let commands = told.on(Event::Looked(begun, Ok(seen(more))));
    (told, commands)
}

/// What the disk waits for, of which this is asked, and which that is to be a copy of.
fn waits_for(source: Requested, copy: Requested, more: Seen) -> Option<InstanceId> {
    let (told, _) = looked(vec![(one(), source), (COPY, copy)], more);
    told.engine.facts(one()).copied_by
}

fn status(state: State) -> Seen {
    Seen { statuses: [(COPY, says(state, None))].into(), ..Seen::default() }
}

/// A volume that is there.
fn there() -> Seen {
    let volume = Observed { volume: true, ..Observed::default() };
    Seen { observed: [(COPY, volume)].into(), records: [(COPY, kept(true))].into(), ..status(State::Active) }
}

#[test]
fn what_takes_a_disk_away_waits_for_its_copy_and_nothing_else_does() {
    let copy = || copy_of(&disk(), |_| ());
    let volume = |change: fn(&mut Request)| {
        asks(|request| {
            request.kind = Workload::Volume;
            change(request);
        })
    };
    assert_eq!(waits_for(destroyed(), copy(), Seen::default()), Some(COPY));
    assert_eq!(waits_for(asks(|request| request.rebuild = rebuild(5)), copy(), Seen::default()), Some(COPY));
    let goes = volume(|request| request.handover = Some(Handover::To(NODE)));
    assert_eq!(waits_for(goes, copy(), Seen::default()), Some(COPY));
    let comes = volume(|request| request.handover = Some(Handover::From(NODE)));
    assert_eq!(waits_for(comes, copy(), Seen::default()), None);
    assert_eq!(waits_for(asks(|_| ()), copy(), Seen::default()), None);
}

#[test]
fn a_copy_counts_until_it_is_made_or_given_up() {
    let of = |change: fn(&mut Request), more| waits_for(destroyed(), copy_of(&disk(), change), more);
    assert_eq!(of(|_| (), status(State::Preparing)), Some(COPY));
    assert_eq!(of(|_| (), status(State::Error)), None, "it was given up");
    let unreadable = [(COPY, StatusEntry::Unreadable)].into();
    assert_eq!(of(|_| (), Seen { statuses: unreadable, ..Seen::default() }), None, "nobody can tell");
    assert_eq!(of(|_| (), Seen { buried: [(COPY, Some(1))].into(), ..Seen::default() }), None);
    let whole = Observed { volume: true, ..Observed::default() };
    let begun = Seen { records: [(COPY, kept(false))].into(), ..status(State::Preparing) };
    assert_eq!(of(|_| (), Seen { records: begun.records.clone(), ..status(State::Preparing) }), Some(COPY));
    assert_eq!(of(|_| (), Seen { observed: [(COPY, whole)].into(), ..begun }), None, "it is whole");
    assert_eq!(of(|_| (), there()), None, "it is made");
    for handover in [Handover::From(NODE), Handover::To(NODE)] {
        let moves = copy_of(&disk(), |request| request.handover = Some(handover));
        assert_eq!(waits_for(destroyed(), moves, Seen::default()), None, "{handover:?}");
    }
    assert_eq!(of(|request| request.desired = Desired::Destroyed, Seen::default()), None);
}

#[test]
fn a_copy_is_of_all_disks_that_it_is_made_of() {
    let of = |of: &CopyOf| waits_for(destroyed(), copy_of(of, |_| ()), Seen::default());
    let other = CopyOf::disk(Workload::Machine, OTHER);
    assert_eq!(of(&other), None);
    assert_eq!(of(&CopyOf { beside: vec![one()], ..other.clone() }), Some(COPY));
    assert_eq!(of(&CopyOf { held: Some(OTHER), ..CopyOf::disk(Workload::Volume, one()) }), Some(COPY));
    // What a machine boots from is its disk.
    let machine = || {
        asks(|request| {
            (request.instance, request.volumes) = (OTHER, vec![Attachment::root(one())]);
        })
    };
    let with_machine = |of: &CopyOf| {
        let requests = vec![(one(), destroyed()), (COPY, copy_of(of, |_| ())), (OTHER, machine())];
        looked(requests, Seen::default()).0.engine.facts(one()).copied_by
    };
    assert_eq!(with_machine(&other), Some(COPY));
    assert_eq!(with_machine(&CopyOf { held: Some(COPY), ..CopyOf::disk(Workload::Volume, OTHER) }), None);
}

#[test]
fn of_two_that_are_to_be_copies_of_each_other_the_first_is_made_first() {
    let anew = |second| copy_of(&disk(), |request| request.rebuild = rebuild(second));
    let source = |second| asks(|request| request.rebuild = rebuild(second));
    assert_eq!(waits_for(source(5), anew(4), there()), Some(COPY));
    assert_eq!(waits_for(source(5), anew(5), there()), None, "uuids say which");
    assert_eq!(waits_for(source(5), anew(6), there()), None);
    // What goes is no copy any more, whatever was wished of it.
    let goes = asks(|request| (request.desired, request.rebuild) = (Desired::Destroyed, rebuild(5)));
    assert_eq!(waits_for(goes, anew(6), there()), Some(COPY));
    // Also of one that came from another node once.
    let came = copy_of(&disk(), |request| {
        (request.rebuild, request.handover) = (rebuild(4), Some(Handover::From(NODE)));
    });
    assert_eq!(waits_for(destroyed(), came, there()), Some(COPY));
}

#[test]
fn what_runs_and_finds_no_room_is_waited_for_by_nobody() {
    let guest = copy_of(&disk(), |request| (request.kind, request.rebuild) = (Workload::Machine, rebuild(4)));
    let runs = || Seen { observed: [(COPY, HERE)].into(), ..there() };
    let (mut told, _) = looked(vec![(one(), destroyed()), (COPY, guest)], runs());
    assert_eq!(told.engine.facts(one()).copied_by, Some(COPY));
    told.on(Event::Allocation(COPY, Ok(Held::Nothing)));
    assert_eq!(told.engine.facts(one()).copied_by, None);
}

#[test]
fn who_waits_for_a_copy_looks_again_and_a_volume_says_so_once() {
    let goes = asks(|request| {
        (request.kind, request.generation) = (Workload::Volume, 2);
        request.handover = Some(Handover::To(NODE));
    });
    let (mut told, commands) = looked(vec![(one(), goes), (COPY, copy_of(&disk(), |_| ()))], Seen::default());
    let delayed = |commands: &[Command]| {
        commands.iter().find_map(|command| match command {
            Command::Begin(job) if job.instance == one() => match &job.work {
                Work::Delayed(why) => Some(why.clone()),
                _ => None,
            },
            _ => None,
        })
    };
    let why = delayed(&commands).unwrap();
    assert!(why.starts_with(&format!("{COPY} is to be a copy of its disk")), "{why}");
    let mut status = says(State::Active, None);
    if let StatusEntry::Known(status, _) = &mut status {
        status.doing = Some(format!("{why}{}", status::AGAIN));
    }
    let commands = told.ended(vec![Change::Status(status)], Outcome::Done);
    assert_eq!(delayed(&commands), None, "it is told");
    assert_eq!(told.engine.next_due(), Some(told.now.since_start + COPY_PERIOD));
}

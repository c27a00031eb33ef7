//! Each aspect of an instance that is not as it shall be, and what is done about it first.

mod power;
mod rebuild;
mod rescue;
mod resize;
mod volumes;

use std::time::Duration;

use Effect::{
    Announce, Ascertain, Claim, Define, DropKeys, DropRecord, DropSuccessor, EndInError, Inquire, KeepRecord,
    MarkStarted, NoteStart, Persist, PrepareDisk, Release, RemoveDomain, Reopen, Resume, Start,
};
use ec_model::{Edition, End, Observed, Pause, Power, RunState, Size, State, Workload};
use ec_plan::{
    Allocation, Facts, KnownStatus, Limits, PowerFacts, RecordFacts, ResizeFacts, SizeFacts, StatusFacts,
    VolumesFacts, Wanted,
    machine::{Effect, Next, Problem, Question, Until, plan},
};

const LIMITS: Limits = Limits { address: Duration::from_secs(300), grace: Duration::from_secs(60) };
const HELD: Allocation = Allocation::Held { seen_for: Duration::ZERO };
const RUNS: Option<RunState> = Some(RunState::Running);
const NOT_STARTED: Option<RunState> = Some(RunState::NotStarted);
const NOTHING: Size = Size { vcpus: 0, memory_mb: 0, disk_gb: 0 };
const UNMEASURED: SizeFacts =
    SizeFacts { is: NOTHING, wished_at: None, failed: false, unproven: false, growing: None };
const KEPT: RecordFacts = RecordFacts::Kept {
    started: true,
    rebuilt: None,
    metadata: 0,
    root: None,
    intent: None,
    rescued: None,
    size: UNMEASURED,
    rescue_begun: false,
};

/// What comes next; where something is told, a part of it.
#[derive(Debug)]
enum Expect {
    Runs(&'static [Effect]),
    /// The state is told with such a reason, and then these are done.
    Tells(State, &'static str, &'static [Effect]),
    Asks(Question),
    Waits(Until),
    Fails(&'static str),
    Told,
    Settled,
}

use Expect::{Asks, Fails, Runs, Settled, Tells, Told, Waits};

/// Of a guest that is well besides.
const UNREAD: Expect = Tells(State::Active, "its node's record of it cannot be read", &[]);

fn holds(facts: &Facts, expected: &Expect) {
    let next = plan(facts, &LIMITS).next;
    let as_expected = match (expected, &next) {
        (Runs(wanted), Next::Run(effects)) => effects == wanted,
        (Tells(state, why, then), Next::Run(effects)) => {
            matches!(&effects[0], Announce(told, Some(reason)) if told == state && reason.contains(why))
                && effects[1..] == **then
        }
        (Asks(wanted), Next::Ask(question)) => question == wanted,
        (Waits(wanted), Next::Wait(until)) => until == wanted,
        (Fails(wanted), Next::Stuck(Problem::Failed(reason))) => reason.contains(wanted),
        (Told, Next::Stuck(Problem::Told)) | (Settled, Next::Settled) => true,
        _ => false,
    };
    assert!(as_expected, "wanted {expected:?}: {next:?} of {facts:?}");
}

fn all(cases: impl IntoIterator<Item = (Facts, Expect)>) {
    for (facts, expected) in cases {
        holds(&facts, &expected);
    }
}

fn status(state: State, reason: Option<&str>, has_address: bool, start_noted: bool) -> StatusFacts {
    StatusFacts::Known(KnownStatus {
        state,
        reason: reason.map(str::to_owned),
        epoch: 1,
        generation: 1,
        has_address,
        start_noted,
        restarts: 0,
    })
}

/// A guest that runs, is ACTIVE and has all that it should.
fn well() -> Facts {
    Facts {
        access: None,
        kind: Workload::Machine,
        wanted: Wanted::Active,
        generation: 1,
        edition: None,
        handover: None,
        power: PowerFacts::default(),
        rebuild: ec_plan::RebuildFacts::default(),
        rescue: ec_plan::RescueFacts::default(),
        resize: ResizeFacts::default(),
        volumes: VolumesFacts { told: Some(0), ..VolumesFacts::default() },
        metadata: 0,
        copies: 0,
        on_volume: false,
        copied_by: None,
        status: status(State::Active, None, true, true),
        observed: Observed { domain: RUNS, volume: true, ..Observed::default() },
        unseen: false,
        record: KEPT,
        buried: false,
        is_held: false,
        allocation: HELD,
        held: NOTHING,
        asked_for: None,
        searched: Duration::ZERO,
        resumed: None,
        asked_to_end: None,
        ran_for: Duration::ZERO,
        ended_for: Duration::ZERO,
    }
}

fn seen(domain: Option<RunState>, volume: bool, transient: bool) -> Facts {
    Facts { observed: Observed { domain, volume, transient, ..Observed::default() }, ..well() }
}

fn with(allocation: Allocation, facts: Facts) -> Facts {
    Facts { allocation, ..facts }
}

fn says(state: State, facts: Facts) -> Facts {
    Facts { status: status(state, None, false, true), ..facts }
}

/// Told once, in the words of the plan itself.
fn told(facts: Facts) -> Facts {
    let Next::Run(effects) = plan(&facts, &LIMITS).next else { panic!("nothing is told: {facts:?}") };
    let [Announce(state, reason)] = &effects[..] else { panic!("{effects:?}") };
    let restarts = match &facts.status {
        StatusFacts::Known(status) => status.restarts,
        StatusFacts::Absent | StatusFacts::Unreadable => 0,
    };
    let StatusFacts::Known(told) = status(*state, reason.as_deref(), false, true) else { panic!() };
    // What it was asked for is held with that.
    let is_held = *state == State::Unclaimed;
    Facts { status: StatusFacts::Known(KnownStatus { restarts, ..told }), is_held, ..facts }
}

#[test]
fn what_ran_is_kept_and_the_first_thing_that_is_wrong_with_it_is_made_good() {
    let paused = Some(RunState::Paused(Pause::ByHand));
    let ended = Some(RunState::Ended(End::ByGuest));
    let without = |record, facts: Facts| Facts { record, ..facts };
    let absent = |facts| without(RecordFacts::Absent, facts);
    let unreadable = |allocation| with(allocation, without(RecordFacts::Unreadable, seen(None, true, false)));
    let redefined = || Tells(State::Stopped, "its domain was gone from libvirt", &[Define]);
    let persisted = || Tells(State::Active, "somebody undefined it while it ran", &[Persist]);
    let nobody_knows = || Tells(State::Error, "neither placement nor this node knows how large it was", &[]);
    let under_it = "its disk file was deleted under the running guest";
    all([
        (well(), Settled),
        (absent(well()), Runs(&[KeepRecord])),
        (absent(seen(None, true, false)), Runs(&[KeepRecord])),
        (absent(seen(RUNS, false, false)), Runs(&[KeepRecord])),
        (without(RecordFacts::Unreadable, well()), UNREAD),
        (absent(seen(None, false, false)), Tells(State::Error, "its disk is gone", &[])),
        (seen(RUNS, true, true), persisted()),
        (seen(paused, true, true), persisted()),
        (seen(ended, true, true), Tells(State::Stopped, "powered itself off", &[])),
        (seen(None, true, false), redefined()),
        (with(Allocation::Absent, seen(None, true, false)), redefined()),
        (says(State::Error, seen(None, true, false)), Runs(&[Define])),
        (unreadable(HELD), redefined()),
        (unreadable(Allocation::Unknown), Asks(Question::Placement)),
        (unreadable(Allocation::Absent), nobody_knows()),
        (unreadable(Allocation::Elsewhere), nobody_knows()),
        (seen(RUNS, false, false), Tells(State::Error, under_it, &[])),
        (seen(paused, false, false), Tells(State::Error, under_it, &[])),
        (seen(ended, false, false), Tells(State::Error, "its disk is gone", &[])),
        (seen(NOT_STARTED, false, false), Tells(State::Error, "its disk is gone", &[])),
        (seen(None, false, false), Tells(State::Error, "its disk is gone", &[])),
        (told(seen(RUNS, false, false)), Told),
    ]);
}

#[test]
fn a_guest_whose_domain_lost_its_mark_is_not_told_to_be_without_a_disk() {
    let foreign =
        |facts: Facts| Facts { observed: Observed { foreign: true, ..Observed::default() }, ..facts };
    let reason = |facts: &Facts| match plan(facts, &LIMITS).next {
        Next::Run(effects) => match &effects[..] {
            [Announce(State::Error, Some(reason))] => reason.clone(),
            _ => panic!("{effects:?}"),
        },
        next => panic!("{next:?}"),
    };
    let why = reason(&foreign(well()));
    assert!(why.contains("virsh metadata INSTANCE") && !why.contains("destroyed"), "{why}");
    // Once it is marked again, it is left as it was.
    let why = reason(&foreign(says(State::Stopped, well())));
    assert!(why.contains("mark, and it was stopped, "), "{why}");
    let status = status(State::Error, Some(&why), false, true);
    holds(
        &Facts { status, ..seen(NOT_STARTED, true, false) },
        &Tells(State::Stopped, "perhaps since its host was started anew", &[]),
    );
    // Whatever else is wished, it is the same as where nothing is.
    let unrequested = |facts| Facts { wanted: Wanted::Nothing, ..facts };
    let nothing = Facts { observed: Observed::default(), ..well() };
    for of in [unrequested, |facts| Facts { wanted: Wanted::Destroyed, ..facts }] {
        assert_eq!(plan(&of(foreign(well())), &LIMITS).next, plan(&of(nothing.clone()), &LIMITS).next);
    }
}

#[test]
fn what_is_at_rest_and_forgotten_by_placement_is_counted_again() {
    let searching = || says(State::Starting, well());
    let at_rest = [well(), searching(), told(seen(RUNS, false, false))];
    for facts in at_rest {
        holds(&with(Allocation::Absent, facts), &Runs(&[Claim]));
    }
    holds(
        &with(Allocation::Absent, seen(RUNS, true, true)),
        &Tells(State::Active, "somebody undefined it while it ran", &[Persist]),
    );
    for allocation in [Allocation::Unknown, Allocation::Elsewhere] {
        holds(&with(allocation, well()), &Settled);
        holds(&with(allocation, searching()), &Waits(Until::Address));
    }
}

#[test]
fn a_guest_that_does_not_run_is_started_where_it_was_to_be_and_else_told() {
    let idle = || seen(NOT_STARTED, true, false);
    let finish = || Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart]);
    for state in [State::Scheduled, State::Preparing, State::Starting] {
        all([
            (says(state, idle()), finish()),
            (with(Allocation::Unknown, says(state, idle())), Asks(Question::Placement)),
            (with(Allocation::Absent, says(state, idle())), Runs(&[Claim])),
            (
                with(Allocation::Elsewhere, says(state, idle())),
                Tells(State::Stopped, "its allocation is on other resource providers", &[]),
            ),
        ]);
    }
    let because =
        |state, reason, noted| Facts { status: status(state, Some(reason), false, noted), ..idle() };
    let perhaps = || Tells(State::Stopped, "perhaps since its host was started anew", &[]);
    all([
        (because(State::Error, "no", false), Runs(&[MarkStarted, Start, NoteStart])),
        // Its disk was missed when it should have been started.
        (because(State::Error, "no", true), Runs(&[Reopen(0)])),
        (power::wanted(Power::Stopped, because(State::Error, "no", true)), perhaps()),
        (
            because(
                State::Error,
                "its disk is gone, and it was stopped; the rest is kept until it is destroyed",
                true,
            ),
            perhaps(),
        ),
        (says(State::Active, idle()), Runs(&[Reopen(0)])),
        (says(State::Paused, idle()), Runs(&[Reopen(0)])),
        (power::wanted(Power::Stopped, says(State::Active, idle())), perhaps()),
        (Facts { status: StatusFacts::Absent, ..idle() }, perhaps()),
        (says(State::Stopped, idle()), Told),
        (because(State::Stopped, "somebody ended it", true), Told),
    ]);
    let why = |facts: &Facts| plan(facts, &LIMITS).why.into_owned();
    assert_eq!(why(&because(State::Stopped, "somebody ended it", true)), "somebody ended it");
    assert_eq!(why(&says(State::Stopped, idle())), "it does not run, as its status says");
}

#[test]
fn a_guest_that_ended_or_is_held_is_told_with_the_reason() {
    let ended = |why, address| Facts {
        status: status(State::Active, None, address, true),
        ..seen(Some(RunState::Ended(why)), true, false)
    };
    let tells = |reason| Tells(State::Stopped, reason, &[]);
    for address in [true, false] {
        all([
            (ended(End::Crashed, address), tells("the guest crashed (a kernel panic)")),
            (ended(End::ByHypervisor, address), tells("libvirtd gave it up")),
            (ended(End::ByHand, address), tells("somebody ended it")),
        ]);
    }
    all([
        (ended(End::ByGuest, true), tells("powered itself off")),
        (ended(End::Unknown, true), tells("it ended")),
        (ended(End::ByGuest, false), tells("ended before it had an address")),
        (ended(End::Unknown, false), tells("ended before it had an address")),
        (says(State::Stopped, seen(Some(RunState::Ended(End::Crashed)), true, false)), Told),
    ]);
    let paused = |why| seen(Some(RunState::Paused(why)), true, false);
    let tells = |reason| Tells(State::Paused, reason, &[]);
    all([
        (paused(Pause::Storage { room: false }), tells("no space on the host's disk")),
        (paused(Pause::ByHand), tells("somebody suspended it")),
        (paused(Pause::Crashed), tells("the guest's system crashed")),
        (paused(Pause::Other), tells("its hypervisor holds it")),
        (told(paused(Pause::ByHand)), Told),
    ]);
}

#[test]
fn a_guest_that_runs_is_told_as_what_it_is_by_its_address() {
    let runs = |state, reason, address, noted, seconds| Facts {
        status: status(state, reason, address, noted),
        searched: Duration::from_secs(seconds),
        ..well()
    };
    let in_vain = || runs(State::Starting, None, false, true, 300);
    all([
        (runs(State::Starting, None, false, false, 0), Runs(&[NoteStart])),
        (Facts { status: StatusFacts::Absent, ..well() }, Runs(&[NoteStart])),
        (runs(State::Starting, None, true, true, 0), Runs(&[Announce(State::Active, None)])),
        (runs(State::Active, Some("paused"), true, true, 0), Runs(&[Announce(State::Active, None)])),
        (runs(State::Starting, None, false, true, 299), Waits(Until::Address)),
        (runs(State::Paused, None, false, true, 299), Runs(&[Announce(State::Starting, None)])),
        (in_vain(), Tells(State::Starting, "no address of it was seen in 300 s", &[])),
        (Facts { searched: Duration::from_secs(400), ..told(in_vain()) }, Waits(Until::Address)),
    ]);
    let why = plan(&Facts { searched: Duration::from_secs(400), ..told(in_vain()) }, &LIMITS).why;
    assert!(why.contains("no address of it was seen"), "{why}");
}

#[test]
fn what_never_ran_is_told_claimed_for_and_built_and_swept_where_it_failed() {
    let new = |state: Option<State>, allocation, domain, volume| Facts {
        status: state.map_or(StatusFacts::Absent, |state| status(state, None, false, false)),
        observed: Observed { domain, volume, ..Observed::default() },
        record: RecordFacts::Kept {
            started: false,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: UNMEASURED,
            rescue_begun: false,
        },
        allocation,
        ..well()
    };
    let preparing = Some(State::Preparing);
    let build =
        || Runs(&[PrepareDisk, Announce(State::Starting, None), Define, MarkStarted, Start, NoteStart]);
    let finish = || Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart]);
    all([
        (new(None, Allocation::Unknown, None, false), Runs(&[Announce(State::Preparing, None)])),
        (new(Some(State::Scheduled), HELD, None, true), Runs(&[Announce(State::Preparing, None)])),
        (new(preparing, Allocation::Unknown, None, false), Asks(Question::Placement)),
        (new(preparing, Allocation::Absent, None, false), Fails("placement holds no allocation for it")),
        (
            new(preparing, Allocation::Elsewhere, None, false),
            Fails("its allocation is on other resource providers"),
        ),
        (new(preparing, HELD, None, false), build()),
        (new(preparing, HELD, None, true), build()),
        (new(None, HELD, NOT_STARTED, true), finish()),
        (new(preparing, HELD, NOT_STARTED, true), finish()),
        (new(preparing, HELD, NOT_STARTED, false), Runs(&[RemoveDomain])),
        (new(None, Allocation::Unknown, NOT_STARTED, true), Asks(Question::Placement)),
        (new(Some(State::Error), HELD, None, true), Runs(&[RemoveDomain, DropRecord, Release, EndInError])),
    ]);
}

#[test]
fn a_guest_that_no_request_speaks_of_is_kept_and_counted_and_what_never_ran_is_swept() {
    let ended = Some(RunState::Ended(End::ByGuest));
    let left = |domain, volume, record| Facts {
        wanted: Wanted::Nothing,
        status: StatusFacts::Absent,
        record,
        observed: Observed { domain, volume, ..Observed::default() },
        ..well()
    };
    let transient = |record| Facts {
        observed: Observed { domain: RUNS, volume: true, transient: true, ..Observed::default() },
        ..left(RUNS, true, record)
    };
    let runs = || left(RUNS, true, KEPT);
    let (never, absent) = (
        RecordFacts::Kept {
            started: false,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: UNMEASURED,
            rescue_begun: false,
        },
        RecordFacts::Absent,
    );
    // Of this request it keeps a copy; the status that there is tells of the first of epoch 1.
    let keeps = |epoch, generation| RecordFacts::Kept {
        started: true,
        rebuilt: None,
        metadata: 0,
        root: None,
        intent: Some(Edition { epoch, generation }),
        rescued: None,
        size: UNMEASURED,
        rescue_begun: false,
    };
    let beside = |facts: Facts| Facts { observed: Observed { successor: true, ..facts.observed }, ..facts };
    let swept = || Runs(&[Inquire, RemoveDomain, DropRecord]);
    // Nothing was seen of it, which may be no more so.
    let gone = || Runs(&[Inquire, Ascertain, RemoveDomain, DropRecord]);
    let tells = |what| Tells(State::Unclaimed, what, &[]);
    let buried = |facts: Facts| Facts { buried: true, ..facts };
    all([
        (runs(), tells("that runs without a request")),
        (left(ended, true, KEPT), tells("that does not run and has no request")),
        (left(RUNS, false, KEPT), tells("that runs without a request")),
        (left(None, true, KEPT), tells("a disk of this node without a domain")),
        (transient(KEPT), Runs(&[Persist])),
        (transient(RecordFacts::Unreadable), Runs(&[Persist])),
        (transient(absent), tells("that runs without a request")),
        (with(Allocation::Unknown, runs()), Asks(Question::Placement)),
        (with(Allocation::Absent, runs()), tells("that runs without a request")),
        (with(Allocation::Absent, told(runs())), Runs(&[Claim])),
        (told(runs()), Told),
        (told(left(RUNS, true, keeps(1, 1))), Told),
        (told(left(RUNS, true, keeps(1, 2))), tells("that runs without a request")),
        (told(left(RUNS, true, keeps(2, 1))), tells("that runs without a request")),
        // Nobody could read what was wanted of it when that was told.
        (
            Facts { is_held: false, ..told(left(RUNS, true, keeps(1, 1))) },
            tells("that runs without a request"),
        ),
        (Facts { is_held: false, ..told(runs()) }, Told),
        (with(Allocation::Elsewhere, told(runs())), Told),
        (buried(runs()), Runs(&[Inquire, Release, RemoveDomain, DropRecord, DropKeys])),
        (left(NOT_STARTED, true, never), swept()),
        (left(NOT_STARTED, false, absent), swept()),
        (left(None, true, never), swept()),
        (left(None, false, KEPT), gone()),
        (left(None, false, never), gone()),
        (beside(left(None, false, never)), gone()),
        // The rest of a snapshot whose first disk is missed.
        (beside(left(None, false, KEPT)), tells("a disk of this node without a domain")),
        (beside(told(runs())), Told),
        (beside(left(None, false, absent)), Runs(&[Inquire, DropSuccessor])),
        (buried(beside(left(None, false, absent))), Runs(&[Inquire, DropSuccessor])),
    ]);
}

#[test]
fn of_what_is_gone_the_keys_go_too_and_errors_are_left_to_read() {
    let gone = |state: Option<State>, allocation| Facts {
        wanted: Wanted::Nothing,
        status: state.map_or(StatusFacts::Absent, |state| status(state, None, false, false)),
        observed: Observed::default(),
        record: RecordFacts::Absent,
        allocation,
        ..well()
    };
    let may_come = || Waits(Until::After(LIMITS.grace));
    all([
        (gone(None, Allocation::Absent), Settled),
        (gone(None, HELD), may_come()),
        (gone(Some(State::Error), Allocation::Absent), Settled),
        (gone(Some(State::Error), HELD), may_come()),
        (gone(Some(State::Unclaimed), HELD), Runs(&[Ascertain, Inquire, Release, DropKeys])),
        (gone(Some(State::Active), HELD), Runs(&[DropKeys])),
        (gone(Some(State::Destroying), Allocation::Elsewhere), Runs(&[DropKeys])),
    ]);
}

//! A user's wish to boot from another disk.

use Effect::{
    EnterRescue, GiveUpRescue, LeaveRescue, NotePower, NoteRescue, PowerOff, PrepareRescue, Reread, ShutDown,
    StartRescue,
};
use ec_plan::{Asked, RescueFacts, RescuedFacts};
use jiff::Timestamp;

use super::*;

const ENDED: Option<RunState> = Some(RunState::Ended(End::ByHand));
const SAVED: Option<RunState> = Some(RunState::Saved);

/// Which wish it was, and whether it failed.
type Was = Option<(u64, bool)>;

fn at(second: u64) -> Timestamp {
    Timestamp::UNIX_EPOCH + Duration::from_secs(second)
}

fn was(was: Was) -> Option<RescuedFacts> {
    was.map(|(second, failed)| RescuedFacts { wished_at: at(second), failed })
}

/// That is wished, this noted by the node and that told; it is up from its rescue disk where that is noted.
fn rescues(wished: Option<u64>, noted: Was, told: Was, state: State, domain: Option<RunState>) -> Facts {
    let is_up = matches!(domain, Some(RunState::Running | RunState::Paused(_)));
    let observed = Observed {
        domain,
        volume: true,
        successor: false,
        transient: false,
        rescued: is_up && matches!(noted, Some((_, false))),
        volumes: 0,
        copies: 0,
        foreign: false,
    };
    Facts {
        rescue: RescueFacts { wished: wished.map(at), told: was(told) },
        record: RecordFacts::Kept {
            started: true,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: was(noted),
            size: UNMEASURED,
            rescue_begun: false,
        },
        status: status(state, None, true, true),
        observed,
        ..well()
    }
}

/// It is started from the other disk.
fn otherwise(facts: Facts) -> Facts {
    Facts { observed: Observed { rescued: !facts.observed.rescued, ..facts.observed }, ..facts }
}

/// Of a guest that is asked to end, which is told before it is.
const ASKED: &str = "its guest is asked to end";

fn asks(first: &[Effect]) -> Expect {
    let asked = [Announce(State::Rescuing, Some(ASKED.to_owned())), ShutDown];
    Runs([first, &asked].concat().leak())
}

const DONE: Was = Some((1, false));
const FAILED: Was = Some((1, true));

#[test]
fn it_is_to_be_rescued_while_the_wish_is_not_noted_and_none_is_in_force() {
    let open = |wished, noted| rescues(wished, noted, None, State::Active, RUNS).is_to_be_rescued();
    assert!(open(Some(1), None) && open(Some(2), FAILED) && open(Some(1), Some((2, true))));
    for (wished, noted) in [(None, None), (None, FAILED), (Some(1), DONE), (Some(1), FAILED), (Some(2), DONE)]
    {
        assert!(!open(wished, noted), "{wished:?}, {noted:?}");
    }
    for record in [RecordFacts::Absent, RecordFacts::Unreadable] {
        assert!(!Facts { record, ..rescues(Some(1), None, None, State::Active, RUNS) }.is_to_be_rescued());
    }
}

#[test]
fn what_was_told_to_fail_while_nobody_could_read_the_record_stays_undone() {
    let told = |wished, noted, told| rescues(wished, noted, told, State::Active, RUNS);
    all([(told(Some(1), None, FAILED), Settled)]);
    assert!(!told(Some(1), None, FAILED).is_to_be_rescued());
    assert!(told(Some(2), None, FAILED).is_to_be_rescued(), "a newer wish is another");
    assert!(told(Some(1), None, DONE).is_to_be_rescued(), "an older etcd tells what it forgot");
    all([(told(None, None, FAILED), Runs(&[NoteRescue]))]);
}

#[test]
fn a_guest_runs_until_its_rescue_disk_is_there_and_is_ended_then() {
    let open = |state, domain| rescues(Some(1), None, None, state, domain);
    let paused = Some(RunState::Paused(Pause::ByHand));
    // By an agent of before.
    let was_asked = |mut facts: Facts| {
        let StatusFacts::Known(status) = &mut facts.status else { panic!() };
        status.reason = Some(ASKED.to_owned());
        facts
    };
    let asked = |first, last, facts| {
        let [first, last] = [first, last].map(Duration::from_secs);
        Facts { asked_to_end: Some(Asked { first, last }), ..was_asked(facts) }
    };
    let waits = |seconds| Waits(Until::After(Duration::from_secs(seconds)));
    all([
        (open(State::Active, RUNS), asks(&[Announce(State::Rescuing, None), PrepareRescue])),
        // It does not hear.
        (
            open(State::Paused, paused),
            Runs(&[Announce(State::Rescuing, None), PrepareRescue, PowerOff, EnterRescue]),
        ),
        (open(State::Rescuing, RUNS), asks(&[PrepareRescue])),
        (was_asked(open(State::Rescuing, RUNS)), Runs(&[ShutDown])),
        (asked(1, 1, open(State::Rescuing, RUNS)), waits(9)),
        (asked(20, 10, open(State::Rescuing, RUNS)), Runs(&[ShutDown])),
        (asked(60, 1, open(State::Rescuing, RUNS)), Runs(&[PowerOff])),
        // Taken back since it was asked, it ends all the same, and is started from its own disk.
        (asked(1, 1, rescues(None, None, None, State::Rescuing, RUNS)), Tells(State::Unrescuing, ASKED, &[])),
        (was_asked(rescues(None, None, None, State::Unrescuing, RUNS)), Runs(&[ShutDown])),
        (asked(1, 1, rescues(None, None, None, State::Unrescuing, RUNS)), waits(9)),
        (asked(60, 1, rescues(None, None, None, State::Unrescuing, RUNS)), Runs(&[PowerOff])),
        (open(State::Rescuing, ENDED), Runs(&[PrepareRescue, EnterRescue])),
        (
            open(State::Stopped, NOT_STARTED),
            Runs(&[Announce(State::Rescuing, None), PrepareRescue, EnterRescue]),
        ),
        // Its note was lost: its disk is not made anew under it.
        (otherwise(open(State::Rescuing, RUNS)), Runs(&[PowerOff])),
        // Once it is ended, placement has to have room to start it again.
        (with(Allocation::Absent, open(State::Active, RUNS)), Runs(&[Claim])),
        (with(Allocation::Absent, open(State::Rescuing, RUNS)), asks(&[PrepareRescue])),
    ]);
    let Next::Run(effects) = plan(&open(State::Suspended, SAVED), &LIMITS).next else { panic!() };
    assert!(
        matches!(&effects[..], [GiveUpRescue(why)] if why.contains("eschedule resume")),
        "memory of its own disk's guest must not meet what somebody changed on it: {effects:?}"
    );
}

#[test]
fn a_rescue_disk_that_was_begun_goes_where_nobody_wishes_one() {
    let facts = |wished, noted, told, state, domain| {
        let mut facts = rescues(wished, noted, told, state, domain);
        let RecordFacts::Kept { rescue_begun, .. } = &mut facts.record else { panic!() };
        *rescue_begun = true;
        facts
    };
    all([
        (facts(None, None, None, State::Active, RUNS), Runs(&[LeaveRescue])),
        (facts(None, None, None, State::Stopped, ENDED), Runs(&[LeaveRescue])),
        // Given up while nobody could read the record.
        (facts(Some(1), None, FAILED, State::Active, RUNS), Runs(&[LeaveRescue])),
        // It is wished, or was, and in force.
        (
            facts(Some(1), None, None, State::Active, RUNS),
            asks(&[Announce(State::Rescuing, None), PrepareRescue]),
        ),
        (facts(Some(1), DONE, DONE, State::Rescued, RUNS), Settled),
        (rescues(None, None, None, State::Active, RUNS), Settled),
    ]);
}

#[test]
fn once_that_is_noted_it_is_told_and_started_from_there_and_stays_so() {
    let noted = |told, state, domain| rescues(Some(1), DONE, told, state, domain);
    let pending = |facts: Facts| Facts { power: PowerFacts { pending: true, ..facts.power }, ..facts };
    let without_address = |facts: Facts, state| Facts { status: status(state, None, false, true), ..facts };
    all([
        (noted(None, State::Rescuing, ENDED), Runs(&[NoteRescue, Reopen(0)])),
        (noted(DONE, State::Rescuing, NOT_STARTED), Runs(&[Reopen(0)])),
        (
            pending(noted(DONE, State::Starting, ENDED)),
            Runs(&[Announce(State::Starting, None), MarkStarted, StartRescue, NoteStart]),
        ),
        (pending(noted(DONE, State::Error, ENDED)), Runs(&[MarkStarted, StartRescue, NoteStart])),
        // It powered itself off, and its user starts it again.
        (
            pending(noted(DONE, State::Stopped, ENDED)),
            Runs(&[Announce(State::Starting, None), MarkStarted, StartRescue, NoteStart]),
        ),
        (pending(noted(DONE, State::Rescued, RUNS)), Runs(&[NotePower(State::Rescued, None)])),
        (noted(DONE, State::Rescued, RUNS), Settled),
        (noted(DONE, State::Active, RUNS), Runs(&[Announce(State::Rescued, None)])),
        // It is not waited for an address to say so, but looked for one.
        (
            without_address(noted(DONE, State::Starting, RUNS), State::Starting),
            Runs(&[Announce(State::Rescued, None)]),
        ),
        (without_address(noted(DONE, State::Rescued, RUNS), State::Rescued), Waits(Until::Address)),
        // Its host was started anew.
        (noted(DONE, State::Rescued, NOT_STARTED), Runs(&[Reopen(0)])),
        (noted(DONE, State::Rescued, ENDED), Tells(State::Stopped, "somebody ended it", &[])),
        // Somebody started it from its own disk by hand.
        (otherwise(noted(DONE, State::Active, RUNS)), Runs(&[Announce(State::Rescuing, None), PowerOff])),
    ]);
}

#[test]
fn what_is_not_wanted_any_more_or_is_another_goes_and_then_it_boots_from_its_own_disk() {
    let gone = |told, state, domain| rescues(None, None, told, state, domain);
    let left = |wished, state, domain| rescues(wished, DONE, DONE, state, domain);
    const UP: Expect = Runs(&[Announce(State::Unrescuing, None), PowerOff, LeaveRescue]);
    let wanted = |power, facts: Facts| Facts { power: PowerFacts { wanted: power, ..facts.power }, ..facts };
    all([
        (left(None, State::Rescued, RUNS), UP),
        (left(Some(2), State::Rescued, RUNS), UP),
        (left(None, State::Unrescuing, ENDED), Runs(&[LeaveRescue])),
        (left(None, State::Stopped, ENDED), Runs(&[Announce(State::Unrescuing, None), LeaveRescue])),
        (left(None, State::Suspended, SAVED), Runs(&[Announce(State::Unrescuing, None), LeaveRescue])),
        (otherwise(left(None, State::Unrescuing, RUNS)), Runs(&[LeaveRescue])),
        (gone(DONE, State::Unrescuing, ENDED), Runs(&[NoteRescue, Reopen(0)])),
        (gone(None, State::Unrescuing, ENDED), Runs(&[Reopen(0)])),
        (
            wanted(Power::Stopped, gone(None, State::Unrescuing, ENDED)),
            Runs(&[Announce(State::Stopped, None)]),
        ),
        (gone(None, State::Unrescuing, RUNS), Runs(&[Announce(State::Active, None)])),
        (gone(None, State::Active, RUNS), Settled),
        // Nothing tells of it but that it is up from there: its disk goes, too.
        (
            otherwise(gone(None, State::Active, RUNS)),
            Runs(&[Announce(State::Unrescuing, None), PowerOff, LeaveRescue]),
        ),
        // Taken back before it was noted: what was begun goes, and the guest runs on.
        (gone(None, State::Rescuing, RUNS), Runs(&[Announce(State::Unrescuing, None), LeaveRescue])),
        (gone(None, State::Rescuing, ENDED), Runs(&[Announce(State::Unrescuing, None), LeaveRescue])),
    ]);
}

#[test]
fn a_wish_that_failed_is_told_once_and_the_guest_is_as_it_was() {
    let failed = |told, state, domain| rescues(Some(1), FAILED, told, state, domain);
    let wanted = |power, facts: Facts| Facts { power: PowerFacts { wanted: power, ..facts.power }, ..facts };
    all([
        (failed(None, State::Rescuing, RUNS), Runs(&[NoteRescue])),
        (failed(FAILED, State::Rescuing, RUNS), Runs(&[Announce(State::Active, None)])),
        (failed(FAILED, State::Active, RUNS), Settled),
        (
            wanted(Power::Stopped, failed(None, State::Rescuing, ENDED)),
            Runs(&[NoteRescue, Announce(State::Stopped, None)]),
        ),
        (rescues(None, FAILED, FAILED, State::Active, RUNS), Settled),
    ]);
}

#[test]
fn of_a_record_that_cannot_be_read_nothing_is_done_and_that_is_told_once() {
    let unread =
        |told| Facts { record: RecordFacts::Unreadable, ..rescues(Some(1), None, told, State::Active, RUNS) };
    all([(unread(None), Runs(&[Reread, NoteRescue])), (unread(FAILED), UNREAD)]);
    let absent = Facts { record: RecordFacts::Absent, ..unread(None) };
    all([(absent, Runs(&[KeepRecord]))]);
}

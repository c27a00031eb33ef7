//! A user's wish for a new disk, and for other metadata.

use Effect::{KeepIntent, NoteRebuild, PowerOff, PrepareRebuild, ReplaceDisk, Reread};
use ec_model::{Handover, InstanceId, NodeId};
use ec_plan::{RebuildFacts, fingerprint};
use jiff::Timestamp;

use super::*;

const ENDED: Option<RunState> = Some(RunState::Ended(End::ByHand));

fn at(second: Option<u64>) -> Option<Timestamp> {
    second.map(|second| Timestamp::UNIX_EPOCH + Duration::from_secs(second))
}

/// Such a disk was wished last, noted by the node as made or given up, and told.
fn rebuilds(
    wished: Option<u64>,
    noted: Option<u64>,
    told: Option<u64>,
    state: State,
    domain: Option<RunState>,
) -> Facts {
    Facts {
        rebuild: RebuildFacts { wished: at(wished), told: at(told) },
        record: RecordFacts::Kept {
            started: true,
            rebuilt: at(noted),
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: SizeFacts::default(),
            rescue_begun: false,
        },
        status: status(state, None, true, true),
        ..seen(domain, true, false)
    }
}

#[test]
fn a_disk_is_made_anew_while_the_last_wish_is_neither_noted_nor_told() {
    let open = |wished, noted, told| rebuilds(wished, noted, told, State::Active, RUNS).is_to_be_rebuilt();
    assert!(open(Some(1), None, None) && open(Some(2), Some(1), Some(1)) && open(Some(2), None, Some(1)));
    for (wished, noted, told) in [
        (None, None, None),
        (None, Some(1), None),
        (Some(1), Some(1), None),
        (Some(1), None, Some(1)),
        (Some(1), Some(2), None),
        (Some(1), None, Some(2)),
    ] {
        assert!(!open(wished, noted, told), "{wished:?}, {noted:?}, {told:?}");
    }
    for record in [RecordFacts::Absent, RecordFacts::Unreadable] {
        assert!(!Facts { record, ..rebuilds(Some(1), None, None, State::Active, RUNS) }.is_to_be_rebuilt());
    }
}

#[test]
fn a_guest_runs_until_its_new_disk_is_there_and_is_ended_then() {
    let open = |state, domain| rebuilds(Some(1), None, None, state, domain);
    let paused = Some(RunState::Paused(Pause::ByHand));
    const UP: Expect = Runs(&[PrepareRebuild, PowerOff, ReplaceDisk]);
    const TOLD_AND_UP: Expect =
        Runs(&[Announce(State::Rebuilding, None), PrepareRebuild, PowerOff, ReplaceDisk]);
    all([
        (open(State::Active, RUNS), TOLD_AND_UP),
        (open(State::Paused, paused), TOLD_AND_UP),
        (open(State::Rebuilding, RUNS), UP),
        (open(State::Rebuilding, ENDED), Runs(&[PrepareRebuild, ReplaceDisk])),
        (open(State::Rebuilding, Some(RunState::Saved)), Runs(&[PrepareRebuild, ReplaceDisk])),
        (
            Facts {
                observed: Observed { domain: ENDED, ..Observed::default() },
                ..open(State::Error, ENDED)
            },
            Runs(&[Announce(State::Rebuilding, None), PrepareRebuild, ReplaceDisk]),
        ),
        // Once it is ended, placement has to have room to start it again.
        (with(Allocation::Absent, open(State::Active, RUNS)), Runs(&[Claim])),
        (with(Allocation::Absent, open(State::Rebuilding, RUNS)), UP),
    ]);
}

#[test]
fn what_came_of_it_is_told_and_then_the_guest_is_as_it_is_wanted() {
    let ended = |told, state, domain| rebuilds(Some(1), Some(1), told, state, domain);
    let wanted = |power, facts: Facts| Facts { power: PowerFacts { wanted: power, ..facts.power }, ..facts };
    let done = |domain| ended(Some(1), State::Rebuilding, domain);
    let pending = |facts: Facts| Facts { power: PowerFacts { pending: true, ..facts.power }, ..facts };
    let beside = |facts: Facts| Facts { observed: Observed { successor: true, ..facts.observed }, ..facts };
    all([
        (ended(None, State::Rebuilding, ENDED), Runs(&[NoteRebuild, Reopen(0)])),
        (ended(None, State::Rebuilding, RUNS), Runs(&[NoteRebuild])),
        (ended(None, State::Active, RUNS), Runs(&[NoteRebuild])),
        (done(ENDED), Runs(&[Reopen(0)])),
        (done(NOT_STARTED), Runs(&[Reopen(0)])),
        // The image could not be had.
        (done(RUNS), Runs(&[Announce(State::Active, None)])),
        (ended(Some(1), State::Active, RUNS), Settled),
        // Of a wish that was left out, or by a call that came late: in nobody's way.
        (beside(ended(Some(1), State::Active, RUNS)), Runs(&[DropSuccessor])),
        (beside(done(ENDED)), Runs(&[Reopen(0)])),
        (pending(done(ENDED)), Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart])),
        (
            Facts { observed: Observed { domain: ENDED, ..Observed::default() }, ..done(ENDED) },
            Tells(State::Error, "its disk is gone", &[]),
        ),
        // With an older etcd: what the node knows is told, and nothing made.
        (rebuilds(Some(1), Some(2), Some(1), State::Active, RUNS), Runs(&[NoteRebuild])),
        (rebuilds(None, Some(2), None, State::Active, RUNS), Runs(&[NoteRebuild])),
        (rebuilds(Some(1), Some(1), Some(2), State::Active, RUNS), Settled),
    ]);
    for power in [Power::Stopped, Power::Paused, Power::Suspended] {
        all([(wanted(power, done(ENDED)), Runs(&[Announce(State::Stopped, None)]))]);
    }
}

#[test]
fn of_a_record_that_cannot_be_read_nothing_is_made_and_that_is_told_once() {
    let unread = |told| Facts {
        record: RecordFacts::Unreadable,
        ..rebuilds(Some(1), None, told, State::Active, RUNS)
    };
    all([(unread(None), Runs(&[Reread, NoteRebuild])), (unread(Some(1)), UNREAD)]);
    let absent = Facts { record: RecordFacts::Absent, ..unread(None) };
    all([(absent, Runs(&[KeepRecord]))]);
    // One that lost everything can be given another disk, when that is wished.
    let lost = |wished| Facts {
        record: RecordFacts::Absent,
        status: status(State::Error, None, true, true),
        observed: Observed { domain: None, volume: false, ..well().observed },
        ..rebuilds(wished, None, None, State::Error, None)
    };
    all([
        (lost(Some(1)), Runs(&[KeepRecord])),
        (lost(None), Tells(State::Error, "its disk is gone", &[])),
        (
            Facts { record: KEPT, ..lost(Some(1)) },
            Runs(&[Announce(State::Rebuilding, None), PrepareRebuild, ReplaceDisk]),
        ),
    ]);
}

#[test]
fn a_guest_is_told_other_metadata_when_it_is_wished_and_not_again() {
    let one = fingerprint(&[("a".to_owned(), "1".to_owned())].into());
    let other = fingerprint(&[("a".to_owned(), "2".to_owned())].into());
    assert_eq!(fingerprint(&std::collections::BTreeMap::new()), 0);
    assert!(one != other && one != 0 && one != 1);
    let tells = |noted, wished| Facts {
        metadata: wished,
        record: RecordFacts::Kept {
            started: true,
            rebuilt: None,
            metadata: noted,
            root: None,
            intent: None,
            rescued: None,
            size: SizeFacts::default(),
            rescue_begun: false,
        },
        ..well()
    };
    all([
        (tells(0, one), Runs(&[KeepIntent])),
        (tells(one, other), Runs(&[KeepIntent])),
        (tells(one, 0), Runs(&[KeepIntent])),
        (tells(one, one), Settled),
        (Facts { record: RecordFacts::Unreadable, ..tells(0, one) }, UNREAD),
    ]);
}

#[test]
fn a_disk_that_is_to_be_copied_stays_as_it_is_until_it_is() {
    let copy: InstanceId = "00000000-0000-0000-0000-000000000007".parse().unwrap();
    let waits = |facts: Facts| Facts { copied_by: Some(copy), ..facts };
    let told = |state| {
        let why = format!("{copy} is to be a copy of its disk, and is made before that is otherwise");
        status(state, Some(&why), true, true)
    };
    let wait = || Waits(Until::Copied);
    let open = || rebuilds(Some(1), None, None, State::Active, RUNS);
    let destroyed = || Facts { wanted: Wanted::Destroyed, ..well() };
    let volume = |facts| Facts { kind: Workload::Volume, ..facts };
    let node: NodeId = "00000000-0000-0000-0000-000000000008".parse().unwrap();
    all([
        (waits(open()), Tells(State::Rebuilding, "to be a copy of its disk", &[])),
        (waits(Facts { status: told(State::Rebuilding), ..open() }), wait()),
        // It waits no more.
        (
            Facts { status: told(State::Rebuilding), ..open() },
            Runs(&[Announce(State::Rebuilding, None), PrepareRebuild, PowerOff, ReplaceDisk]),
        ),
        (waits(destroyed()), Tells(State::Destroying, "to be a copy of its disk", &[])),
        (waits(Facts { status: told(State::Destroying), ..destroyed() }), wait()),
        (waits(volume(Facts { handover: Some(Handover::To(node)), ..well() })), wait()),
        (waits(volume(rebuilds(Some(1), None, None, State::Active, None))), wait()),
        // Nothing of it is otherwise: who is a copy of it does not matter.
        (waits(well()), Settled),
    ]);
}

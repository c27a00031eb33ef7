//! A user's wish for another size.

use Effect::{Cover, Grow, NoteResize, Reread, Resize, ShutDown};
use ec_plan::Asked;
use jiff::Timestamp;

use super::*;

const ENDED: Option<RunState> = Some(RunState::Ended(End::ByHand));
const SMALL: Size = Size { vcpus: 1, memory_mb: 128, disk_gb: 1 };
const LARGE: Size = Size { vcpus: 2, memory_mb: 256, disk_gb: 2 };

fn at(second: u64) -> Option<Timestamp> {
    Some(Timestamp::UNIX_EPOCH + Duration::from_secs(second))
}

/// That size was wished at second 1 of what is so large; its claim has room for it, and nothing was told.
fn wished(wanted: Size, is: Size, state: State, domain: Option<RunState>) -> Facts {
    Facts {
        resize: ResizeFacts { wanted, wished: at(1), ..ResizeFacts::default() },
        record: noted(SizeFacts { is, ..SizeFacts::default() }),
        held: LARGE,
        status: status(state, None, true, true),
        ..seen(domain, true, false)
    }
}

fn noted(size: SizeFacts) -> RecordFacts {
    RecordFacts::Kept {
        started: true,
        rebuilt: None,
        rescued: None,
        metadata: 0,
        root: None,
        intent: None,
        size,
        rescue_begun: false,
    }
}

fn told(second: u64, facts: Facts) -> Facts {
    Facts { resize: ResizeFacts { told: at(second), ..facts.resize }, ..facts }
}

/// A rescue is wished as well.
fn rescue(facts: Facts) -> Facts {
    Facts { rescue: ec_plan::RescueFacts { wished: at(2), told: None }, ..facts }
}

fn pending(facts: Facts) -> Facts {
    Facts { power: PowerFacts { pending: true, ..facts.power }, ..facts }
}

#[test]
fn a_size_is_to_be_had_while_it_is_another_and_nobody_found_that_it_cannot_be() {
    let facts =
        |wanted, size: SizeFacts| Facts { record: noted(size), ..wished(wanted, SMALL, State::Active, RUNS) };
    let is = |is| SizeFacts { is, ..SizeFacts::default() };
    assert_eq!(facts(LARGE, is(SMALL)).size_to_have(), Some(LARGE));
    assert_eq!(facts(LARGE, is(LARGE)).size_to_have(), None);
    let shrunk = Size { disk_gb: 2, ..SMALL };
    assert_eq!(facts(SMALL, is(LARGE)).size_to_have(), Some(shrunk), "a disk never shrinks");
    assert_eq!(facts(SMALL, is(shrunk)).size_to_have(), None);
    let failed = |second| SizeFacts { wished_at: at(second), failed: true, ..is(SMALL) };
    assert_eq!(facts(LARGE, failed(1)).size_to_have(), None, "given up");
    assert_eq!(facts(LARGE, failed(2)).size_to_have(), Some(LARGE), "that was another wish");
    // Nobody ever wished it another size.
    let never = |size| Facts {
        resize: ResizeFacts { wished: None, ..wished(LARGE, SMALL, State::Active, RUNS).resize },
        ..facts(LARGE, size)
    };
    assert_eq!(never(is(SMALL)).size_to_have(), None);
    let once = SizeFacts { wished_at: at(1), ..is(SMALL) };
    assert_eq!(never(once).size_to_have(), Some(LARGE), "with an older etcd");
    for unmeasured in [Size { vcpus: 0, ..LARGE }, Size { memory_mb: 0, ..LARGE }] {
        assert_eq!(facts(unmeasured, is(SMALL)).size_to_have(), None);
    }
    for record in [RecordFacts::Absent, RecordFacts::Unreadable] {
        assert_eq!(Facts { record, ..facts(LARGE, is(SMALL)) }.size_to_have(), None);
    }
}

#[test]
fn a_guest_that_runs_is_given_more_and_asked_to_end_where_it_cannot_be_or_is_to_have_less() {
    let paused = Some(RunState::Paused(ec_model::Pause::ByHand));
    let ends = || Runs(&[Announce(State::Resizing, None), ShutDown]);
    let growing = |wanted, growing, state, domain| {
        let size = SizeFacts { is: SMALL, growing: Some(growing), ..SizeFacts::default() };
        Facts { record: noted(size), ..wished(wanted, SMALL, state, domain) }
    };
    let (busier, roomier) = (Size { vcpus: 2, ..SMALL }, Size { memory_mb: 256, ..SMALL });
    let stopped = |grace, facts: Facts| {
        let (wanted, grace) = (Power::Stopped, Duration::from_secs(grace));
        Facts { power: PowerFacts { wanted, grace, ..pending(facts.clone()).power }, ..facts }
    };
    let hard = || Runs(&[Announce(State::Stopping, None), Effect::PowerOff]);
    let narrow = |facts: Facts| Facts { held: SMALL, ..facts };
    let never = |facts: Facts| Facts { resize: ResizeFacts { wished: None, ..facts.resize }, ..facts };
    all([
        (wished(LARGE, SMALL, State::Active, RUNS), Runs(&[Grow])),
        (wished(busier, SMALL, State::Starting, RUNS), Runs(&[Grow])),
        (wished(roomier, SMALL, State::Active, RUNS), Runs(&[Grow])),
        // It was found that it cannot be, before a crash or after.
        (wished(LARGE, SMALL, State::Resizing, RUNS), Runs(&[ShutDown])),
        (wished(LARGE, SMALL, State::Paused, paused), ends()),
        (wished(busier, roomier, State::Active, RUNS), ends()),
        (wished(roomier, busier, State::Active, RUNS), ends()),
        // Killed in the midst of it.
        (growing(LARGE, LARGE, State::Active, RUNS), Runs(&[Grow])),
        (growing(LARGE, busier, State::Active, RUNS), Runs(&[Grow])),
        (growing(LARGE, LARGE, State::Active, ENDED), Runs(&[Resize])),
        // There is no room for it by now: what it may have already goes first.
        (narrow(growing(LARGE, LARGE, State::Active, RUNS)), Runs(&[Cover])),
        (narrow(growing(LARGE, LARGE, State::Resizing, RUNS)), Runs(&[ShutDown])),
        (narrow(growing(LARGE, LARGE, State::Resizing, ENDED)), Runs(&[Cover])),
        (narrow(wished(LARGE, SMALL, State::Resizing, RUNS)), Runs(&[Cover])),
        // One that is not to be asked is ended before all that may wait for it.
        (stopped(0, wished(LARGE, SMALL, State::Active, RUNS)), hard()),
        (stopped(0, wished(LARGE, SMALL, State::Resizing, RUNS)), hard()),
        (stopped(60, wished(LARGE, SMALL, State::Active, RUNS)), Runs(&[Grow])),
        (stopped(0, wished(LARGE, SMALL, State::Active, ENDED)), Runs(&[Resize])),
        // With an older etcd it is not wanted any more, and may have it.
        (growing(SMALL, LARGE, State::Active, RUNS), ends()),
        (never(growing(SMALL, LARGE, State::Active, RUNS)), ends()),
        (never(growing(SMALL, LARGE, State::Resizing, ENDED)), Runs(&[Resize])),
    ]);
}

#[test]
fn a_guest_is_asked_to_end_for_what_it_cannot_have_while_it_runs_and_runs_on_for_a_larger_disk() {
    let asked = |first| Some(Asked { first: Duration::from_secs(first), last: Duration::ZERO });
    let ending = wished(LARGE, SMALL, State::Resizing, RUNS);
    let grown = Size { disk_gb: 2, ..SMALL };
    all([
        (Facts { asked_to_end: asked(59), ..ending.clone() }, Waits(Until::After(Duration::from_secs(1)))),
        (Facts { asked_to_end: asked(60), ..ending }, Runs(&[Effect::PowerOff])),
        (wished(LARGE, SMALL, State::Resizing, ENDED), Runs(&[Resize])),
        (wished(LARGE, SMALL, State::Stopped, ENDED), Runs(&[Resize])),
        (wished(LARGE, SMALL, State::Stopped, NOT_STARTED), Runs(&[Resize])),
        (wished(grown, SMALL, State::Active, RUNS), Runs(&[Resize])),
        // With the size that it is to have, a guest is started.
        (pending(wished(LARGE, SMALL, State::Stopped, ENDED)), Runs(&[Resize])),
    ]);
}

#[test]
fn a_size_that_cannot_be_had_as_it_stands_is_given_up_where_somebody_waits_for_it() {
    let with = |allocation, facts: Facts| Facts { allocation, ..facts };
    let without_disk = |domain| {
        let facts = wished(LARGE, SMALL, State::Error, domain);
        Facts { observed: Observed { volume: false, ..facts.observed }, ..facts }
    };
    let saved = |state| wished(LARGE, SMALL, state, Some(RunState::Saved));
    let suspends =
        |facts: Facts| Facts { power: PowerFacts { wanted: Power::Suspended, ..facts.power }, ..facts };
    for (facts, why) in [
        (saved(State::Resizing), "its memory"),
        (saved(State::Suspended), "its memory"),
        (pending(suspends(saved(State::Suspending))), "its memory"),
        (with(Allocation::Unknown, saved(State::Suspended)), "its memory"),
        (without_disk(ENDED), "its disk is gone"),
        (without_disk(None), "its disk is gone"),
        (with(Allocation::Elsewhere, wished(LARGE, SMALL, State::Active, RUNS)), "other resource providers"),
        (
            with(Allocation::Elsewhere, wished(LARGE, SMALL, State::Resizing, ENDED)),
            "other resource providers",
        ),
    ] {
        let ec_plan::machine::Next::Run(effects) = plan(&facts, &LIMITS).next else { panic!("{facts:?}") };
        assert!(
            matches!(effects.as_slice(), [Effect::GiveUpResize(reason)] if reason.contains(why)),
            "{why}: {effects:?}"
        );
        // Told already, or wished by nobody that etcd knows, it waits until it can be.
        let never = Facts { resize: ResizeFacts { wished: None, ..facts.resize }, ..facts.clone() };
        for waits in [told(1, facts), never] {
            let next = plan(&waits, &LIMITS).next;
            let gives_up = |effect: &Effect| matches!(effect, Effect::GiveUpResize(_));
            let is_given_up = matches!(&next, ec_plan::machine::Next::Run(all) if all.iter().any(gives_up));
            assert!(!is_given_up, "{next:?}");
        }
    }
    // No guest that is up is ended for it, which may have been given more already, or run without its disk.
    let size = SizeFacts { is: SMALL, growing: Some(LARGE), ..SizeFacts::default() };
    for state in [State::Active, State::Resizing] {
        let growing = Facts { record: noted(size), ..wished(LARGE, SMALL, state, RUNS) };
        for facts in [with(Allocation::Elsewhere, growing), without_disk(RUNS)] {
            let next = plan(&facts, &LIMITS).next;
            let ends = |effect: &Effect| matches!(effect, ShutDown | Effect::GiveUpResize(_));
            assert!(
                !matches!(&next, ec_plan::machine::Next::Run(effects) if effects.iter().any(ends)),
                "{next:?}"
            );
        }
    }
    // What was given up is told, whatever is left of it.
    let failed = SizeFacts { is: SMALL, failed: true, wished_at: at(1), ..SizeFacts::default() };
    let given_up = Facts { record: noted(failed), ..without_disk(None) };
    // With all that was of it the node lost its record, too.
    let nowhere = Facts { record: RecordFacts::Absent, ..without_disk(None) };
    let was = Some(ec_plan::RescuedFacts { wished_at: at(2).unwrap_or_default(), failed: false });
    let unrescued = ec_plan::RescueFacts { wished: None, told: was };
    all([
        (given_up, Runs(&[NoteResize])),
        (nowhere.clone(), Runs(&[Reread, NoteResize])),
        (rescue(told(1, nowhere.clone())), Runs(&[Reread, Effect::NoteRescue])),
        (Facts { rescue: unrescued, ..told(1, nowhere) }, Runs(&[Reread, Effect::NoteRescue])),
        (
            Facts {
                rescue: unrescued,
                record: RecordFacts::Unreadable,
                ..told(1, wished(SMALL, SMALL, State::Active, RUNS))
            },
            UNREAD,
        ),
        // It goes on from its memory first, where that is wished.
        (
            pending(saved(State::Suspended)),
            Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart]),
        ),
    ]);
}

#[test]
fn nothing_grows_that_is_not_claimed() {
    let facts = |allocation, held| Facts { allocation, held, ..wished(LARGE, SMALL, State::Active, RUNS) };
    all([
        (facts(HELD, SMALL), Runs(&[Cover])),
        (facts(HELD, Size { disk_gb: 1, ..LARGE }), Runs(&[Cover])),
        (facts(Allocation::Unknown, NOTHING), Asks(Question::Placement)),
        (facts(Allocation::Absent, NOTHING), Runs(&[Claim])),
    ]);
    // What is larger than an older etcd has it, and cannot be made smaller yet, is told of, or its claim would be taken for too large.
    let size = SizeFacts { is: LARGE, wished_at: at(1), ..SizeFacts::default() };
    let older = |facts: Facts| Facts {
        resize: ResizeFacts { wished: None, ..facts.resize },
        record: noted(size),
        held: SMALL,
        ..facts
    };
    let suspends =
        |facts: Facts| Facts { power: PowerFacts { wanted: Power::Suspended, ..facts.power }, ..facts };
    let saved = older(suspends(wished(SMALL, LARGE, State::Suspended, Some(RunState::Saved))));
    let goes_on = pending(older(wished(SMALL, LARGE, State::Suspended, Some(RunState::Saved))));
    all([
        (saved.clone(), Runs(&[NoteResize])),
        (told(1, saved), Runs(&[Cover])),
        (goes_on.clone(), Runs(&[NoteResize])),
        (told(1, goes_on), Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart])),
    ]);
    // At rest all of it is claimed, where somebody measured it.
    let size = SizeFacts { is: LARGE, wished_at: at(1), ..SizeFacts::default() };
    let rests =
        |held| Facts { held, record: noted(size), ..told(1, wished(LARGE, LARGE, State::Active, RUNS)) };
    let unmeasured = Facts {
        resize: ResizeFacts::default(),
        record: noted(SizeFacts { wished_at: None, ..size }),
        ..rests(SMALL)
    };
    let elsewhere = Facts { allocation: Allocation::Elsewhere, ..rests(SMALL) };
    let since = ec_plan::RescuedFacts { wished_at: at(2).unwrap_or_default(), failed: false };
    let rescued = |mut facts: Facts| {
        if let RecordFacts::Kept { rescued, .. } = &mut facts.record {
            *rescued = Some(since);
        }
        Facts {
            rescue: ec_plan::RescueFacts { wished: at(2), told: Some(since) },
            observed: Observed { rescued: true, ..facts.observed },
            status: status(State::Rescued, None, true, true),
            ..facts
        }
    };
    all([
        (rests(LARGE), Settled),
        (rests(SMALL), Runs(&[Cover])),
        (rescued(rests(LARGE)), Settled),
        (rescued(rests(SMALL)), Runs(&[Cover])),
        (unmeasured, Settled),
        (elsewhere, Settled),
    ]);
}

#[test]
fn what_came_of_it_is_told_when_it_runs_with_its_new_size_or_is_not_to_run() {
    let size = SizeFacts { is: LARGE, wished_at: at(1), unproven: true, ..SizeFacts::default() };
    let done = |state, domain| Facts { record: noted(size), ..wished(LARGE, LARGE, state, domain) };
    let proven = SizeFacts { unproven: false, ..size };
    let given_up = SizeFacts { is: SMALL, failed: true, ..proven };
    let stopped =
        |facts: Facts| Facts { power: PowerFacts { wanted: Power::Stopped, ..facts.power }, ..facts };
    all([
        (done(State::Resizing, ENDED), Runs(&[Reopen(0)])),
        (
            pending(done(State::Starting, ENDED)),
            Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart]),
        ),
        (done(State::Starting, RUNS), Runs(&[NoteResize])),
        (done(State::Stopped, ENDED), Runs(&[NoteResize])),
        (stopped(done(State::Resizing, ENDED)), Runs(&[NoteResize, Announce(State::Stopped, None)])),
        (told(1, done(State::Active, RUNS)), Runs(&[NoteResize])),
        (told(1, Facts { record: noted(proven), ..done(State::Active, RUNS) }), Settled),
        (told(1, Facts { record: noted(proven), ..done(State::Resizing, ENDED) }), Runs(&[Reopen(0)])),
        // It is so already.
        (wished(SMALL, SMALL, State::Active, RUNS), Runs(&[NoteResize])),
        (Facts { record: noted(given_up), ..done(State::Resizing, ENDED) }, Runs(&[NoteResize, Reopen(0)])),
        // It was asked to end for a size that is not wanted any more.
        (told(1, wished(SMALL, SMALL, State::Resizing, RUNS)), Runs(&[ShutDown])),
        (
            Facts { record: RecordFacts::Unreadable, ..wished(LARGE, SMALL, State::Active, RUNS) },
            Runs(&[Reread, NoteResize]),
        ),
    ]);
}

#[test]
fn what_failed_is_told_also_where_an_older_etcd_says_that_it_was_done() {
    let noted_as = |failed| SizeFacts { is: LARGE, wished_at: at(1), failed, ..SizeFacts::default() };
    let says = |told_failed, second, facts: Facts| Facts {
        resize: ResizeFacts { told: at(second), told_failed, ..facts.resize },
        ..facts
    };
    let failed = Facts { record: noted(noted_as(true)), ..wished(SMALL, LARGE, State::Active, RUNS) };
    let done = Facts { record: noted(noted_as(false)), ..wished(LARGE, LARGE, State::Active, RUNS) };
    all([
        (says(false, 1, failed.clone()), Runs(&[NoteResize])),
        (says(true, 1, failed.clone()), Settled),
        (says(true, 1, done.clone()), Runs(&[NoteResize])),
        (says(false, 1, done.clone()), Settled),
        // Of another wish it says nothing.
        (says(true, 2, done), Settled),
    ]);
    // It failed since the node could not read its record, which it can by now; whatever was wished before that.
    let read = |wished_at| Facts {
        record: noted(SizeFacts { is: SMALL, wished_at, ..SizeFacts::default() }),
        ..wished(SMALL, SMALL, State::Active, RUNS)
    };
    let unread = Facts { record: RecordFacts::Unreadable, ..read(None) };
    all([
        (says(true, 1, read(None)), Runs(&[NoteResize])),
        (says(true, 1, read(at(0))), Runs(&[NoteResize])),
        (says(false, 1, read(None)), Settled),
        (says(true, 2, read(None)), Settled),
        (says(true, 1, unread), UNREAD),
    ]);
    // Also while it is rescued, when nothing else is done about its size.
    let rescued = |mut facts: Facts| {
        let RecordFacts::Kept { rescued, .. } = &mut facts.record else { panic!() };
        let was = Some(ec_plan::RescuedFacts { wished_at: at(2).unwrap_or_default(), failed: false });
        *rescued = was;
        Facts {
            rescue: ec_plan::RescueFacts { wished: at(2), told: was },
            observed: Observed { rescued: true, ..facts.observed },
            status: status(State::Rescued, None, true, true),
            ..facts
        }
    };
    all([
        (rescued(says(false, 1, failed.clone())), Runs(&[NoteResize])),
        (rescued(says(true, 1, failed)), Settled),
    ]);
}

#[test]
fn a_size_goes_before_a_rescue_and_waits_while_it_is_rescued() {
    let next = |facts: &Facts| plan(facts, &LIMITS).next;
    let unproven = |state, domain| Facts {
        record: noted(SizeFacts { is: LARGE, wished_at: at(1), unproven: true, ..SizeFacts::default() }),
        ..wished(LARGE, LARGE, state, domain)
    };
    for first in [
        wished(LARGE, SMALL, State::Active, RUNS),
        wished(LARGE, SMALL, State::Resizing, ENDED),
        unproven(State::Starting, ENDED),
        unproven(State::Starting, RUNS),
        unproven(State::Resizing, ENDED),
        // Whether it starts with it is seen first.
        pending(unproven(State::Stopped, ENDED)),
    ] {
        assert!(rescue(first.clone()).is_to_be_rescued() && first.is_being_resized());
        assert_eq!(next(&rescue(first.clone())), next(&first), "{first:?}");
    }
    let stopped = Facts {
        power: PowerFacts { wanted: Power::Stopped, ..PowerFacts::default() },
        ..unproven(State::Stopped, ENDED)
    };
    assert_eq!(next(&rescue(stopped.clone())), next(&stopped), "it is not waited for a start");

    let rescued = |size, rescued| {
        let facts = rescue(wished(LARGE, SMALL, State::Rescued, RUNS));
        let was = ec_plan::RescuedFacts { wished_at: at(2).unwrap(), failed: false };
        Facts {
            rescue: ec_plan::RescueFacts { told: Some(was), ..facts.rescue },
            record: RecordFacts::Kept {
                started: true,
                rebuilt: None,
                rescued: Some(was),
                metadata: 0,
                root: None,
                intent: None,
                size: SizeFacts { is: size, ..SizeFacts::default() },
                rescue_begun: false,
            },
            observed: Observed { rescued, ..facts.observed },
            ..facts
        }
    };
    // What was over before is told again, where its status was lost.
    let over = |wished_at, unproven| {
        let mut facts = rescued(LARGE, true);
        if let RecordFacts::Kept { size, .. } = &mut facts.record {
            (size.wished_at, size.unproven) = (wished_at, unproven);
        }
        facts
    };
    let tells = |facts: &Facts| next(facts) == ec_plan::machine::Next::Run(vec![NoteResize]);
    assert!(tells(&over(at(1), false)) && tells(&over(at(2), false)));
    assert!(
        !tells(&over(at(0), false)) && !tells(&over(at(1), true)) && !tells(&told(1, over(at(1), false)))
    );
    for facts in [rescued(SMALL, true), rescued(SMALL, false)] {
        assert!(facts.size_to_have().is_none() && !facts.is_being_resized());
        assert_eq!(next(&facts), next(&rescued(LARGE, facts.observed.rescued)));
    }
    let lost =
        Facts { record: noted(SizeFacts { is: SMALL, ..SizeFacts::default() }), ..rescued(SMALL, true) };
    assert_eq!(lost.size_to_have(), None, "it runs from its rescue disk");
}

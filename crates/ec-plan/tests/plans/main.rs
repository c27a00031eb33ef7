//! What is planned for one guest: after starts that did not go as they should, and at the edges of what is allowed.
#![expect(clippy::panic, reason = "what tests share")]

mod aspects;

use std::time::Duration;

use ec_model::{AccessKind, AccessWish, End, Observed, Pause, RunState, State};
use ec_plan::{
    Allocation, Facts, KnownStatus, Limits, PowerFacts, RecordFacts, ResizeFacts, SizeFacts, StatusFacts,
    VolumesFacts, Wanted,
    machine::{Effect, Next, Plan, Problem, Question, RESUME_PERIOD, Until, plan, ran},
};

const LIMITS: Limits = Limits { address: Duration::from_secs(300), grace: Duration::from_secs(60) };

/// A guest that may have run, by its record.
fn facts(domain: RunState, state: State, start_noted: bool) -> Facts {
    Facts {
        wanted: Wanted::Active,
        status: StatusFacts::Known(KnownStatus {
            state,
            reason: (state == State::Error).then(|| "failed to start".to_owned()),
            epoch: 1,
            generation: 1,
            has_address: false,
            start_noted,
            restarts: 0,
        }),
        observed: Observed { domain: Some(domain), volume: true, ..Observed::default() },
        record: RecordFacts::Kept {
            started: true,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: SizeFacts::default(),
            rescue_begun: false,
        },
        ..unrequested(Allocation::Held { seen_for: Duration::ZERO }, None)
    }
}

fn unrequested(allocation: Allocation, asked_for: Option<bool>) -> Facts {
    Facts {
        kind: ec_model::Workload::Machine,
        wanted: Wanted::Nothing,
        generation: 0,
        edition: None,
        handover: None,
        power: PowerFacts::default(),
        rebuild: ec_plan::RebuildFacts::default(),
        rescue: ec_plan::RescueFacts::default(),
        resize: ResizeFacts::default(),
        // None, and that is told.
        volumes: VolumesFacts { told: Some(0), ..VolumesFacts::default() },
        metadata: 0,
        copies: 0,
        on_volume: false,
        copied_by: None,
        access: None,
        status: StatusFacts::Absent,
        observed: Observed::default(),
        unseen: false,
        record: RecordFacts::Absent,
        buried: false,
        is_held: false,
        allocation,
        held: ec_model::Size::default(),
        asked_for,
        searched: Duration::ZERO,
        resumed: None,
        asked_to_end: None,
        ran_for: Duration::ZERO,
        ended_for: Duration::ZERO,
    }
}

fn planned(facts: &Facts) -> Next {
    let Plan { next, why } = plan(facts, &LIMITS);
    assert!(!why.is_empty());
    next
}

fn starts(facts: &Facts) -> bool {
    matches!(planned(facts), Next::Run(effects) if effects.contains(&Effect::Start))
}

#[test]
fn a_guest_is_looked_at_before_anything_else_is_done_and_only_one_that_ran() {
    let wish = AccessWish { kind: AccessKind::Console, generation: 3, request_id: None };
    let admitted = Next::Run(vec![Effect::Admit(wish)]);
    let wished = |facts: Facts| planned(&Facts { access: Some(wish), ..facts });
    for domain in [RunState::Running, RunState::Paused(Pause::Crashed), RunState::Ended(End::ByGuest)] {
        for state in [State::Starting, State::Active, State::Stopping, State::Stopped, State::Error] {
            let ran = facts(domain, state, true);
            assert_eq!(wished(ran.clone()), admitted, "{domain:?} {state}");
            // Also where nothing else can be done about it.
            let gone = Observed { volume: false, ..ran.observed };
            assert_eq!(wished(Facts { observed: gone, ..ran.clone() }), admitted, "{domain:?} {state}");
            assert_ne!(wished(Facts { unseen: true, ..ran.clone() }), admitted, "it may be gone");
            assert_ne!(wished(Facts { wanted: Wanted::Destroyed, ..ran }), admitted, "it goes");
        }
    }
    let fresh =
        Facts { wanted: Wanted::Active, ..unrequested(Allocation::Held { seen_for: Duration::ZERO }, None) };
    assert_eq!(wished(fresh.clone()), planned(&fresh), "there is nothing to look at");
}

#[test]
fn a_start_that_nobody_saw_through_is_begun_again() {
    for why in [End::ByGuest, End::ByHand, End::Crashed, End::Unknown] {
        assert!(starts(&facts(RunState::Ended(why), State::Starting, false)), "{why:?}");
        assert!(!starts(&facts(RunState::Ended(why), State::Starting, true)), "it ran, and ended: {why:?}");
        assert!(!starts(&facts(RunState::Ended(why), State::Active, true)), "{why:?}");
    }
    // Nobody wished that one to end, and nobody had anything of it yet.
    assert!(starts(&facts(RunState::Ended(End::ByHypervisor), State::Starting, true)));
    assert!(!starts(&facts(RunState::Ended(End::ByHypervisor), State::Active, true)));
}

#[test]
fn a_start_that_failed_is_tried_again_and_its_reason_stands_until_it_works() {
    let failed = facts(RunState::NotStarted, State::Error, false);
    let again = Next::Run(vec![Effect::MarkStarted, Effect::Start, Effect::NoteStart]);
    assert_eq!(planned(&failed), again);
    // One that was seen to run is not started without being asked for.
    assert!(!starts(&facts(RunState::NotStarted, State::Error, true)));
}

#[test]
fn a_claim_whose_request_never_came_is_released_after_its_grace_and_not_before_and_nobody_elses_ever() {
    let held = |seconds| Allocation::Held { seen_for: Duration::from_secs(seconds) };
    let planned = |seconds, whose| planned(&unrequested(held(seconds), whose));
    assert_eq!(planned(20, Some(true)), Next::Wait(Until::After(Duration::from_secs(40))));
    assert_eq!(planned(60, None), Next::Ask(Question::Whose));
    assert_eq!(planned(60, Some(true)), Next::Run(vec![Effect::Ascertain, Effect::Inquire, Effect::Release]));
    assert!(matches!(planned(60, Some(false)), Next::Stuck(Problem::Report(_))));
    // Of one that was destroyed here nobody need be asked: etcd may have forgotten who asked for it.
    let buried = Facts { buried: true, ..unrequested(held(60), Some(false)) };
    assert_eq!(
        plan(&buried, &LIMITS).next,
        Next::Run(vec![Effect::Ascertain, Effect::Inquire, Effect::Release, Effect::DropKeys])
    );
}

#[test]
fn what_a_node_holds_of_a_guest_that_is_gone_with_its_status_goes_and_what_it_holds_of_one_that_is_here_stays()
 {
    let held = Facts { is_held: true, ..unrequested(Allocation::Absent, None) };
    assert_eq!(
        plan(&held, &LIMITS).next,
        Next::Run(vec![Effect::Ascertain, Effect::Inquire, Effect::Release, Effect::DropKeys])
    );
    assert_eq!(planned(&Facts { is_held: false, ..held.clone() }), Next::Settled);
    let wanted = Facts { wanted: Wanted::Active, ..held.clone() };
    assert!(
        !matches!(plan(&wanted, &LIMITS).next, Next::Run(effects) if effects.contains(&Effect::DropKeys))
    );
    let here = Facts { observed: facts(RunState::Running, State::Active, true).observed, ..held };
    let Next::Run(effects) = plan(&here, &LIMITS).next else { panic!("it is told") };
    assert!(matches!(effects[..], [Effect::Announce(State::Unclaimed, Some(_))]));
}

#[test]
fn destroying_wins_whatever_the_instance_is_doing_and_whether_it_can_be_seen_or_not() {
    for state in
        [State::Scheduled, State::Preparing, State::Starting, State::Active, State::Stopped, State::Error]
    {
        for domain in [RunState::NotStarted, RunState::Running, RunState::Ended(End::Crashed)] {
            for unseen in [false, true] {
                let facts = Facts { wanted: Wanted::Destroyed, unseen, ..facts(domain, state, true) };
                let Next::Run(effects) = planned(&facts) else { panic!("{facts:?}") };
                assert_eq!(effects.last(), Some(&Effect::DropKeys));
            }
        }
    }
}

#[test]
fn what_cannot_be_seen_is_not_judged() {
    for wanted in [Wanted::Active, Wanted::Nothing, Wanted::Unreadable] {
        let facts =
            Facts { wanted, unseen: true, ..facts(RunState::Ended(End::Crashed), State::Active, true) };
        assert_eq!(planned(&facts), Next::Wait(Until::Sight));
    }
}

#[test]
fn a_running_guest_without_an_address_is_told_and_left_running() {
    let facts = |searched| Facts {
        searched: Duration::from_secs(searched),
        ..facts(RunState::Running, State::Starting, true)
    };
    assert_eq!(planned(&facts(299)), Next::Wait(Until::Address));
    let Next::Run(effects) = planned(&facts(300)) else { panic!("it is told") };
    let [Effect::Announce(State::Starting, Some(reason))] = &effects[..] else { panic!("{effects:?}") };
    assert!(reason.contains("no address"), "{reason}");
}

#[test]
fn a_guest_that_runs_into_the_same_wall_is_let_go_on_after_a_pause() {
    let paused = |resumed: Option<u64>| Facts {
        resumed: resumed.map(Duration::from_secs),
        ..facts(RunState::Paused(Pause::Storage { room: true }), State::Active, true)
    };
    // Before that is told: an etcd that takes nothing holds no guest up.
    let resumes = |facts| {
        matches!(planned(&facts), Next::Run(effects) if matches!(
            &effects[..],
            [Effect::Resume, Effect::Announce(State::Paused, Some(why))] if why.contains("there is room again")
        ))
    };
    assert!(resumes(paused(None)));
    assert_eq!(planned(&paused(Some(4))), Next::Wait(Until::After(Duration::from_secs(6))));
    assert!(resumes(paused(Some(RESUME_PERIOD.as_secs()))));
}

#[test]
fn what_cannot_be_read_is_reported_and_left_and_what_was_destroyed_here_goes() {
    let runs = || facts(RunState::Running, State::Active, true);
    let unreadable = Facts { wanted: Wanted::Unreadable, ..runs() };
    assert!(matches!(planned(&unreadable), Next::Stuck(Problem::Report(what)) if what.contains("request")));
    for wanted in [Wanted::Active, Wanted::Nothing] {
        let unreadable = Facts { wanted, status: StatusFacts::Unreadable, ..runs() };
        assert!(
            matches!(planned(&unreadable), Next::Stuck(Problem::Report(what)) if what.contains("status"))
        );
    }
    let Next::Run(effects) = planned(&Facts { buried: true, ..runs() }) else { panic!("it goes") };
    assert_eq!(effects.last(), Some(&Effect::DropKeys));
}

#[test]
fn whatever_says_that_a_guest_ran_is_believed_and_nothing_else() {
    let nothing = || unrequested(Allocation::Unknown, None);
    let told = |state, start_noted| Facts {
        status: StatusFacts::Known(KnownStatus {
            state,
            reason: None,
            epoch: 1,
            generation: 1,
            has_address: false,
            start_noted,
            restarts: 0,
        }),
        ..nothing()
    };
    let seen =
        |domain, volume| Facts { observed: Observed { domain, volume, ..Observed::default() }, ..nothing() };
    let kept = |record| Facts { record, ..seen(None, true) };
    assert!(!ran(&nothing()));
    for state in [State::Active, State::Paused, State::Stopped, State::Unclaimed] {
        assert!(ran(&told(state, false)), "{state}");
    }
    for state in [State::Scheduled, State::Preparing, State::Starting, State::Destroying, State::Error] {
        assert!(!ran(&told(state, false)) && ran(&told(state, true)), "{state}");
    }
    assert!(
        ran(&kept(RecordFacts::Kept {
            started: true,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: SizeFacts::default(),
            rescue_begun: false
        })) && ran(&kept(RecordFacts::Unreadable))
    );
    assert!(
        !ran(&kept(RecordFacts::Kept {
            started: false,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: SizeFacts::default(),
            rescue_begun: false
        })),
        "the record says so"
    );
    assert!(ran(&kept(RecordFacts::Absent)), "a disk, and nobody can tell");
    let left = |domain| Facts {
        record: RecordFacts::Kept {
            started: false,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: SizeFacts::default(),
            rescue_begun: false,
        },
        ..seen(Some(domain), true)
    };
    for domain in [RunState::Running, RunState::Paused(Pause::ByHand), RunState::Ended(End::ByGuest)] {
        assert!(ran(&left(domain)), "{domain:?}");
    }
    assert!(!ran(&left(RunState::NotStarted)));
}

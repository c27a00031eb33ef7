//! What becomes of a guest whose start did not go as it should.

use std::time::Duration;

use ec_model::{End, Observed, RunState, State};
use ec_plan::{
    Allocation, Decision, Effect, Facts, KnownStatus, Limits, RecordFacts, StatusFacts, Wanted, decide,
};

const LIMITS: Limits = Limits { address: Duration::from_secs(300), grace: Duration::from_secs(60) };

/// A guest that may have run, by its record.
fn facts(domain: RunState, state: State, start_noted: bool) -> Facts {
    Facts {
        wanted: Wanted::Active,
        status: StatusFacts::Known(KnownStatus {
            state,
            reason: (state == State::Error).then(|| "failed to start".to_owned()),
            has_address: false,
            start_noted,
        }),
        observed: Observed { domain: Some(domain), volume: true, transient: false },
        record: RecordFacts::Kept { started: true },
        buried: false,
        allocation: Allocation::Held { seen_for: Duration::ZERO },
        asked_for: None,
        searched: Duration::ZERO,
    }
}

fn starts(facts: &Facts) -> bool {
    match decide(facts, &LIMITS) {
        Decision::Run(effects) => effects.contains(&Effect::Start),
        _ => false,
    }
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
    let again = Decision::Run(vec![Effect::MarkStarted, Effect::Start, Effect::NoteStart]);
    assert_eq!(decide(&failed, &LIMITS), again);
    // One that was seen to run is not started without being asked for.
    assert!(!starts(&facts(RunState::NotStarted, State::Error, true)));
}

//! A user's wish for power, and what follows where nobody wished the end.

use Effect::{DropMemory, NotePower, Pause as Halt, PowerOff, Save, ShutDown};
use ec_model::Restart;
use ec_plan::Asked;

use super::*;

const SAVED: Option<RunState> = Some(RunState::Saved);
const BY_HAND: Option<RunState> = Some(RunState::Paused(Pause::ByHand));

pub(super) fn wanted(power: Power, facts: Facts) -> Facts {
    Facts { power: PowerFacts { wanted: power, ..facts.power }, ..facts }
}

/// It is wanted so, since the generation after the one that is told.
fn wished(power: Power, state: State, domain: Option<RunState>) -> Facts {
    let grace = Duration::from_secs(60);
    Facts {
        power: PowerFacts { wanted: power, pending: true, generation: 2, grace, ..PowerFacts::default() },
        status: status(state, None, true, true),
        ..seen(domain, true, false)
    }
}

fn anew(facts: Facts) -> Facts {
    Facts { power: PowerFacts { anew: true, ..facts.power }, ..facts }
}

fn hard(facts: Facts) -> Facts {
    Facts { power: PowerFacts { grace: Duration::ZERO, ..facts.power }, ..facts }
}

fn asked(first: u64, last: u64, facts: Facts) -> Facts {
    let [first, last] = [first, last].map(Duration::from_secs);
    Facts { asked_to_end: Some(Asked { first, last }), ..facts }
}

/// Told since the wish is known.
fn since(facts: Facts) -> Facts {
    let StatusFacts::Known(status) = facts.status else { return facts };
    Facts { status: StatusFacts::Known(KnownStatus { generation: 2, ..status }), ..facts }
}

fn start() -> Expect {
    Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart])
}

#[test]
fn who_shall_run_is_started_let_go_on_or_noted() {
    let runs = |state, domain| wished(Power::Running, state, domain);
    let ended = Some(RunState::Ended(End::ByGuest));
    let fresh = |noted, state| Facts { status: status(state, None, false, noted), ..runs(state, RUNS) };
    all([
        (runs(State::Stopped, ended), start()),
        (runs(State::Stopped, NOT_STARTED), start()),
        (runs(State::Suspended, SAVED), start()),
        (runs(State::Suspended, NOT_STARTED), Tells(State::Stopped, "its saved memory is gone", &[])),
        (
            Facts { power: PowerFacts::default(), ..runs(State::Suspended, NOT_STARTED) },
            Tells(State::Stopped, "its saved memory is gone", &[]),
        ),
        (runs(State::Suspended, ended), Tells(State::Stopped, "its saved memory is gone", &[])),
        (
            Facts { power: PowerFacts::default(), ..runs(State::Suspended, ended) },
            Tells(State::Stopped, "its saved memory is gone", &[]),
        ),
        (runs(State::Rebooting, ended), start()),
        (with(Allocation::Unknown, runs(State::Stopped, ended)), Asks(Question::Placement)),
        (with(Allocation::Absent, runs(State::Stopped, ended)), Runs(&[Claim])),
        (
            with(Allocation::Elsewhere, runs(State::Error, ended)),
            Tells(State::Stopped, "its allocation is on other resource providers", &[]),
        ),
        (runs(State::Error, ended), Runs(&[MarkStarted, Start, NoteStart])),
        (
            Facts {
                observed: Observed { domain: ended, ..Observed::default() },
                ..runs(State::Stopped, ended)
            },
            Tells(State::Error, "its disk is gone", &[]),
        ),
        (runs(State::Active, RUNS), Runs(&[NotePower(State::Active, None)])),
        (runs(State::Paused, BY_HAND), Runs(&[Resume, NotePower(State::Active, None)])),
        (fresh(true, State::Paused), Runs(&[NotePower(State::Starting, None)])),
        (fresh(false, State::Paused), Runs(&[NoteStart])),
        (fresh(true, State::Starting), Runs(&[NoteStart])),
        (
            Facts { power: PowerFacts { pending: false, ..runs(State::Active, RUNS).power }, ..well() },
            Settled,
        ),
    ]);
}

#[test]
fn who_shall_not_run_is_asked_again_and_again_and_ended_when_its_time_is_over() {
    let up = |state| wished(Power::Stopped, state, RUNS);
    let stopping = || up(State::Stopping);
    let after = |seconds| Waits(Until::After(Duration::from_secs(seconds)));
    all([
        (up(State::Active), Runs(&[Announce(State::Stopping, None), ShutDown])),
        (wished(Power::Stopped, State::Paused, BY_HAND), Runs(&[Announce(State::Stopping, None), ShutDown])),
        (hard(up(State::Active)), Runs(&[Announce(State::Stopping, None), PowerOff])),
        (stopping(), Runs(&[ShutDown])),
        (hard(stopping()), Runs(&[PowerOff])),
        (hard(asked(1, 1, stopping())), Runs(&[PowerOff])),
        (asked(0, 0, stopping()), after(10)),
        (asked(13, 3, stopping()), after(7)),
        (asked(55, 3, stopping()), after(5)),
        (asked(20, 10, stopping()), Runs(&[ShutDown])),
        (asked(60, 1, stopping()), Runs(&[PowerOff])),
        (asked(1, 1, up(State::Rebooting)), Runs(&[Announce(State::Stopping, None)])),
    ]);
    let down = |state, end| wished(Power::Stopped, state, Some(RunState::Ended(end)));
    let noted = || Runs(&[NotePower(State::Stopped, None)]);
    all([
        (down(State::Stopping, End::ByGuest), noted()),
        (down(State::Active, End::ByHand), noted()),
        (hard(down(State::Stopping, End::ByHand)), noted()),
        (wished(Power::Stopped, State::Error, NOT_STARTED), noted()),
        // It was saved by a call that nobody waits for any more.
        (wished(Power::Stopped, State::Stopping, SAVED), start()),
        (hard(wished(Power::Stopped, State::Suspended, SAVED)), start()),
        (
            Facts {
                observed: Observed { domain: SAVED, ..Observed::default() },
                ..wished(Power::Stopped, State::Suspended, SAVED)
            },
            Tells(State::Error, "its disk is gone", &[]),
        ),
        // A guest can be ended without its disk, and then that is told.
        (
            Facts { observed: Observed { volume: false, ..up(State::Error).observed }, ..up(State::Error) },
            Runs(&[Announce(State::Stopping, None), ShutDown]),
        ),
    ]);
    let Next::Run(effects) = plan(&down(State::Stopping, End::ByHand), &LIMITS).next else { panic!() };
    let told = "it did not end by itself in 60 s and was ended".to_owned();
    assert_eq!(effects, [NotePower(State::Stopped, Some(told))]);
}

#[test]
fn a_reboot_ends_a_guest_once_and_starts_it() {
    let up = |state| anew(wished(Power::Running, state, RUNS));
    let ask = || Runs(&[Announce(State::Rebooting, None), ShutDown]);
    all([
        (up(State::Active), ask()),
        (hard(up(State::Active)), Runs(&[Announce(State::Rebooting, None), PowerOff])),
        // It has no address yet, and that was told before the wish.
        (up(State::Starting), ask()),
        // This is the start that follows.
        (since(up(State::Starting)), Runs(&[NoteStart])),
        (up(State::Rebooting), Runs(&[ShutDown])),
        (since(up(State::Active)), ask()),
        (Facts { status: StatusFacts::Absent, ..up(State::Active) }, ask()),
        // A stop was under way when its user changed their mind: what was asked to end will end.
        (wished(Power::Running, State::Stopping, RUNS), ask()),
        (wished(Power::Running, State::Rebooting, RUNS), Runs(&[ShutDown])),
        (anew(wished(Power::Running, State::Paused, BY_HAND)), ask()),
        (anew(wished(Power::Running, State::Rebooting, Some(RunState::Ended(End::ByHand)))), start()),
        (anew(wished(Power::Running, State::Stopped, NOT_STARTED)), start()),
        // It was ended, and that start failed: should the next one not be noted, it is not ended for that once more.
        (
            since(anew(wished(Power::Running, State::Error, NOT_STARTED))),
            Runs(&[Reopen(0), MarkStarted, Start, NoteStart]),
        ),
        (since(wished(Power::Running, State::Error, RUNS)), Runs(&[NotePower(State::Active, None)])),
        // It could not be ended.
        (since(up(State::Error)), ask()),
    ]);
}

#[test]
fn a_hard_reboot_deletes_saved_memory_where_it_can_be_started_afterwards() {
    let saved = |state| hard(anew(wished(Power::Running, state, SAVED)));
    let gone = Some(RunState::Ended(End::Unknown));
    all([
        (saved(State::Suspended), Runs(&[Announce(State::Rebooting, None), DropMemory])),
        // It did not come back from there.
        (saved(State::Error), Runs(&[Announce(State::Rebooting, None), DropMemory])),
        (saved(State::Rebooting), Runs(&[DropMemory])),
        (hard(anew(wished(Power::Running, State::Rebooting, gone))), start()),
        (with(Allocation::Unknown, saved(State::Suspended)), Asks(Question::Placement)),
        (with(Allocation::Absent, saved(State::Suspended)), Runs(&[Claim])),
        (
            with(Allocation::Elsewhere, saved(State::Rebooting)),
            Tells(State::Suspended, "its allocation is on other resource providers", &[]),
        ),
        (
            Facts { observed: Observed { domain: SAVED, ..Observed::default() }, ..saved(State::Suspended) },
            Tells(State::Error, "its disk is gone", &[]),
        ),
        // Saved in the midst of the start after that, by somebody's hand.
        (since(saved(State::Starting)), start()),
        // Resumed, or a reboot that gives it time, which was asked for before a call to save it came late.
        (hard(wished(Power::Running, State::Suspended, SAVED)), start()),
        (anew(wished(Power::Running, State::Rebooting, SAVED)), start()),
    ]);
}

#[test]
fn who_shall_be_halted_or_saved_is_and_who_does_not_run_is_stopped() {
    let pause = |state, domain| wished(Power::Paused, state, domain);
    let suspend = |state, domain| wished(Power::Suspended, state, domain);
    let ended = Some(RunState::Ended(End::ByGuest));
    all([
        (pause(State::Active, RUNS), Runs(&[Halt, NotePower(State::Paused, None)])),
        (pause(State::Paused, BY_HAND), Runs(&[NotePower(State::Paused, None)])),
        (pause(State::Suspended, SAVED), start()),
        (suspend(State::Active, RUNS), Runs(&[Announce(State::Suspending, None), Save])),
        (suspend(State::Paused, BY_HAND), Runs(&[Announce(State::Suspending, None), Save])),
        (suspend(State::Suspending, RUNS), Runs(&[Save])),
        (suspend(State::Suspending, SAVED), Runs(&[NotePower(State::Suspended, None)])),
    ]);
    for gone in [pause(State::Active, ended), suspend(State::Suspending, NOT_STARTED)] {
        let Next::Run(effects) = plan(&gone, &LIMITS).next else { panic!() };
        let told = "it did not run any more when it was to be halted".to_owned();
        assert_eq!(effects, [NotePower(State::Stopped, Some(told))]);
    }
}

#[test]
fn what_was_wished_is_told_and_what_others_did_since_then_too() {
    let done = |power, state, domain| wanted(power, says(state, seen(domain, true, false)));
    let storage = Some(RunState::Paused(Pause::Storage { room: true }));
    all([
        (done(Power::Paused, State::Paused, BY_HAND), Told),
        // Its user wants it halted: room that is there again changes nothing of that.
        (done(Power::Paused, State::Paused, storage), Told),
        (done(Power::Paused, State::Active, BY_HAND), Tells(State::Paused, "somebody suspended it", &[])),
        (done(Power::Suspended, State::Suspended, SAVED), Told),
        (
            done(Power::Running, State::Active, SAVED),
            Tells(State::Suspended, "somebody saved its memory", &[]),
        ),
        (done(Power::Stopped, State::Stopped, Some(RunState::Ended(End::ByGuest))), Told),
        (
            Facts {
                status: status(State::Stopped, None, true, true),
                ..done(Power::Stopped, State::Stopped, RUNS)
            },
            Runs(&[Announce(State::Active, None)]),
        ),
    ]);
}

#[test]
fn what_was_asked_for_is_told_to_be_taken_up_where_it_changes_nothing() {
    let asked = |facts: Facts| Facts { generation: 2, ..facts };
    let reason = "its user";
    let stopped = Facts {
        status: status(State::Stopped, Some(reason), true, true),
        ..seen(Some(RunState::Ended(End::ByGuest)), true, false)
    };
    let Next::Run(effects) = plan(&asked(stopped.clone()), &LIMITS).next else { panic!() };
    assert_eq!(effects, [Announce(State::Stopped, Some(reason.to_owned()))]);
    let no_disk = Facts { observed: Observed { volume: false, ..well().observed }, ..well() };
    let Next::Run(effects) = plan(&asked(told(no_disk.clone())), &LIMITS).next else { panic!() };
    assert!(matches!(&effects[..], [Announce(State::Error, Some(_))]), "whoever asked waits for that");
    all([
        (asked(well()), Runs(&[Announce(State::Active, None)])),
        (since(asked(well())), Settled),
        (asked(since(stopped)), Told),
        (asked(says(State::Starting, well())), Runs(&[Announce(State::Starting, None)])),
        // Of each request what is wrong is told once.
        (asked(since(told(no_disk))), Told),
        (with(Allocation::Absent, asked(well())), Runs(&[Claim])),
    ]);
}

/// One that ended, with such a policy.
fn down(restart: Restart, why: End, restarts: u32) -> Facts {
    let facts = seen(Some(RunState::Ended(why)), true, false);
    let StatusFacts::Known(status) = facts.status else { panic!() };
    Facts {
        power: PowerFacts { restart, ..facts.power },
        status: StatusFacts::Known(KnownStatus { restarts, ..status }),
        ..facts
    }
}

#[test]
fn a_policy_restarts_what_it_is_for_and_nothing_that_somebody_ended() {
    let again = || Tells(State::Stopped, "it is started again in 1 s", &[]);
    let left = |why| Tells(State::Stopped, why, &[]);
    for why in [End::Crashed, End::ByHypervisor, End::ByGuest, End::ByHand, End::Unknown] {
        let failed = matches!(why, End::Crashed | End::ByHypervisor);
        holds(&down(Restart::OnFailure, why, 0), &if failed { again() } else { left("") });
        holds(&down(Restart::Always, why, 0), &if why == End::ByHand { left("") } else { again() });
        holds(&wanted(Power::Stopped, down(Restart::Always, why, 0)), &left(""));
        for policy in [Restart::No, Restart::OnFailure, Restart::Always] {
            let Next::Run(effects) = plan(&down(policy, why, 0), &LIMITS).next else { panic!() };
            let [Announce(State::Stopped, Some(reason))] = &effects[..] else { panic!("{effects:?}") };
            let restarts =
                policy == Restart::Always && why != End::ByHand || policy == Restart::OnFailure && failed;
            assert_eq!(reason.contains("started again"), restarts, "{policy:?} {why:?}: {reason}");
        }
    }
}

#[test]
fn each_restart_in_a_row_waits_longer_and_those_after_failures_come_to_an_end() {
    let ended_for = |millis, facts| Facts { ended_for: Duration::from_millis(millis), ..facts };
    let waits = |millis| Waits(Until::After(Duration::from_millis(millis)));
    let crashed = |restarts| told(down(Restart::OnFailure, End::Crashed, restarts));
    all([
        (crashed(0), waits(1_000)),
        (ended_for(400, crashed(0)), waits(600)),
        (ended_for(1_000, crashed(0)), Runs(&[Reopen(1)])),
        (crashed(1), waits(2_000)),
        (ended_for(1_999, crashed(1)), waits(1)),
        (ended_for(16_000, crashed(4)), Runs(&[Reopen(5)])),
        (
            down(Restart::OnFailure, End::Crashed, 5),
            Tells(State::Stopped, "5 times in a row, and is left now", &[]),
        ),
        (ended_for(999_000, crashed(5)), Told),
        // It was well for long.
        (
            Facts {
                ran_for: Duration::from_secs(600),
                ..ended_for(
                    1_000,
                    told(Facts {
                        ran_for: Duration::from_secs(600),
                        ..down(Restart::OnFailure, End::Crashed, 5)
                    }),
                )
            },
            Runs(&[Reopen(1)]),
        ),
        (
            Facts { ran_for: Duration::from_secs(599), ..down(Restart::OnFailure, End::Crashed, 5) },
            Tells(State::Stopped, "is left now", &[]),
        ),
        (told(down(Restart::Always, End::Crashed, 50)), waits(300_000)),
        (ended_for(300_000, told(down(Restart::Always, End::Crashed, 50))), Runs(&[Reopen(51)])),
    ]);
}

#[test]
fn a_restart_that_was_told_is_made_also_where_its_hypervisor_was_started_anew_meanwhile() {
    let after = |facts: Facts| {
        let observed = Observed { domain: Some(RunState::NotStarted), ..facts.observed };
        plan(&Facts { observed, ..facts }, &LIMITS).next
    };
    let again = |restarts| Next::Run(vec![Reopen(restarts)]);
    assert_eq!(after(told(down(Restart::OnFailure, End::Crashed, 2))), again(3));
    assert_eq!(after(told(down(Restart::Always, End::ByGuest, 0))), again(1));
    // What was left stays as it is.
    for left in [told(down(Restart::OnFailure, End::Crashed, 5)), told(down(Restart::Always, End::ByHand, 0))]
    {
        assert!(!matches!(after(left), Next::Run(_)));
    }
    // Of one that is not wanted any more it is not told on that it comes.
    let facts = told(down(Restart::Always, End::Crashed, 0));
    let unwanted = Facts { power: PowerFacts { restart: Restart::No, ..facts.power }, ..facts.clone() };
    for left in [wanted(Power::Stopped, facts), unwanted] {
        let how = "the guest crashed (a kernel panic), or its process died";
        let crashed = Next::Run(vec![Announce(State::Stopped, Some(how.to_owned()))]);
        assert_eq!(after(left.clone()), crashed);
        assert_eq!(plan(&left, &LIMITS).next, crashed);
        assert!(!matches!(after(told(left)), Next::Run(_)));
    }
}

#[test]
fn a_guest_is_not_ended_for_a_start_that_placement_has_no_room_for() {
    let up = |state| anew(wished(Power::Running, state, RUNS));
    let uncounted = |facts| with(Allocation::Absent, facts);
    all([
        (uncounted(up(State::Active)), Runs(&[Claim])),
        (uncounted(hard(up(State::Active))), Runs(&[Claim])),
        // It was asked to end already.
        (uncounted(up(State::Rebooting)), Runs(&[ShutDown])),
        (
            uncounted(wished(Power::Running, State::Stopping, RUNS)),
            Runs(&[Announce(State::Rebooting, None), ShutDown]),
        ),
        // One that somebody halted does not run.
        (
            uncounted(anew(wished(Power::Running, State::Paused, BY_HAND))),
            Runs(&[Announce(State::Rebooting, None), ShutDown]),
        ),
        // That it is not to run again needs no room.
        (
            uncounted(hard(wished(Power::Stopped, State::Active, RUNS))),
            Runs(&[Announce(State::Stopping, None), PowerOff]),
        ),
    ]);
}

use super::*;
use crate::quota::{Refusal, Taken};

/// A machine, and its clock.
struct Bench {
    batch: Batch<Taken, Refusal>,
    now: Instant,
    attempts: usize,
}

fn compares(revision: i64) -> Vec<Compare> {
    vec![Compare::Unchanged("/p/generations/a".into(), revision)]
}

fn done(count: usize) -> Vec<Answer<Taken, Refusal>> {
    (0..count).map(|_| Ok(Taken(1))).collect()
}

fn lost() -> Event<Taken, Refusal> {
    Event::Answered(Err(StoreError::Unknown("the answer was lost".into())))
}

fn refused(why: &str) -> Event<Taken, Refusal> {
    Event::Answered(Err(StoreError::Refused(why.into())))
}

fn answered(succeeded: bool) -> Event<Taken, Refusal> {
    Event::Answered(Ok(TxnOutcome { succeeded, revision: 9 }))
}

impl Bench {
    fn new(size: usize) -> Self {
        let now = Instant::now();
        let batch = Batch::new(size, now + Duration::from_secs(10), now, Some(1));
        Self { batch, now, attempts: 0 }
    }

    fn step(&mut self, event: Event<Taken, Refusal>) -> Action<Taken, Refusal> {
        self.batch.step(event, self.now)
    }

    fn plan(&mut self, size: usize, revision: i64) -> Event<Taken, Refusal> {
        self.attempts += 1;
        let txn = Txn { when: compares(revision), ..Txn::new() }.put("/p/clock", "");
        let id = format!("t-{}", self.attempts);
        Event::Planned(Plan { id, answers: done(size), txn: Some(txn), needs_fresh: false })
    }

    /// From an action that asks for it to a transaction on its way.
    fn send(&mut self, mut action: Action<Taken, Refusal>, revision: i64) {
        loop {
            let event = match action {
                Action::Yield(_) => Event::Free(None),
                Action::Pause(pause) => {
                    self.now += pause;
                    Event::Performed
                }
                Action::Resist(_) => Event::Performed,
                Action::CatchUp(_) => Event::CaughtUp(Ok(Known { happened: None, listings: 1 })),
                Action::Plan(size) => self.plan(size, revision),
                Action::Send(_) => return,
                action => panic!("{action:?}"),
            };
            action = self.step(event);
        }
    }

    fn begin(&mut self, revision: i64) {
        let action = self.batch.begin(self.now);
        self.send(action, revision);
    }
}

fn why(action: &Action<Taken, Refusal>) -> String {
    match action {
        Action::Fail(failed) => failed.why.0.clone(),
        action => panic!("{action:?}"),
    }
}

#[test]
fn what_was_written_is_answered() {
    let mut bench = Bench::new(3);
    bench.begin(5);
    let action = bench.step(answered(true));
    assert!(matches!(action, Action::Answer { answers, written: true } if answers.len() == 3));
}

#[test]
fn a_lost_answer_is_looked_for_before_anything_is_tried_again() {
    let mut bench = Bench::new(1);
    bench.begin(5);
    let Action::Pause(pause) = bench.step(lost()) else { panic!() };
    assert_eq!(pause, PAUSE);
    assert!(matches!(bench.step(Event::Performed), Action::Yield(_)));
    assert!(matches!(bench.step(Event::Free(None)), Action::CatchUp(_)), "not decided again blindly");
    assert_eq!(bench.batch.doubtful().collect::<Vec<_>>(), ["t-1"]);
    // Not there yet: it is tried again, and that is lost, too. The first comes late.
    let action = bench.step(Event::CaughtUp(Ok(Known { happened: None, listings: 1 })));
    bench.send(action, 5);
    let action = bench.step(lost());
    assert!(matches!(action, Action::Pause(_)));
    bench.step(Event::Performed);
    bench.step(Event::Free(None));
    assert_eq!(bench.batch.doubtful().collect::<Vec<_>>(), ["t-1", "t-2"]);
    let action = bench.step(Event::CaughtUp(Ok(Known { happened: Some(0), listings: 1 })));
    assert!(matches!(action, Action::Answer { written: true, .. }));
}

#[test]
fn what_cannot_be_found_out_is_told_as_not_known() {
    let doubt = |size| {
        let mut bench = Bench::new(size);
        bench.begin(5);
        bench.step(lost());
        bench.step(Event::Performed);
        bench
    };
    let planned = |size, answers, txn| {
        let mut bench = doubt(size);
        bench.step(Event::Free(None));
        bench.step(Event::CaughtUp(Ok(Known { happened: None, listings: 1 })));
        bench.step(Event::Planned(Plan { id: "t-2".into(), answers, txn, needs_fresh: false }))
    };
    // The watch that would have told was interrupted.
    let mut bench = doubt(2);
    bench.step(Event::Free(None));
    let action = bench.step(Event::CaughtUp(Ok(Known { happened: None, listings: 2 })));
    assert!(why(&action).contains("not known whether"), "{action:?}");
    // A part of it cannot be carried out in its place.
    let action = planned(2, done(1), Some(Txn::new().put("/p/clock", "")));
    assert!(why(&action).contains("not known whether"), "{action:?}");
    // Nor is it refused for what it has become since it was sent: too much, or too large.
    let action = planned(1, vec![Err(WriteError::TooBig { operations: 129, limit: 128 })], None);
    assert!(why(&action).contains("not known whether"), "{action:?}");
    for size in [1, 2] {
        let action = planned(size, done(size), Some(Txn::new().put("/p/clock", vec![0; BYTES_MAX + 1])));
        assert!(why(&action).contains("not known whether"), "{action:?}");
    }
    // Nor halves of it.
    let mut bench = doubt(2);
    let action = bench.batch.begin(bench.now);
    bench.send(action, 5);
    let action = bench.step(refused("etcdserver: too many operations in txn request"));
    assert!(why(&action).contains("not known whether"), "{action:?}");
    // The time is over. An import that began meanwhile does not end the looking.
    let mut bench = doubt(2);
    let importing = Unavailable("an import".into());
    assert!(matches!(bench.step(Event::Free(Some(importing))), Action::CatchUp(_)));
    bench.step(Event::CaughtUp(Err(Unavailable("etcd is away".into()))));
    bench.now += Duration::from_secs(10);
    let action = bench.step(Event::Performed);
    assert!(why(&action).contains("not known whether") && why(&action).contains("away"), "{action:?}");
}

#[test]
fn whoever_was_certainly_not_written_is_told_so() {
    let mut bench = Bench::new(2);
    bench.begin(5);
    let unreachable = StoreError::Unreachable { endpoints: "e".into(), detail: "refused".into() };
    bench.step(Event::Answered(Err(unreachable)));
    bench.now += Duration::from_secs(10);
    let action = bench.step(Event::Performed);
    assert!(why(&action).contains("nothing was done"), "{action:?}");
    assert!(matches!(action, Action::Fail(Failed { who: Who::Late(2), contention: false, .. })));
}

#[test]
fn conflicts_that_cannot_be_make_the_view_read_anew_and_those_that_do_not_end_ask_for_a_turn() {
    let mut bench = Bench::new(1);
    bench.begin(5);
    // Decided before the view was up to date, then three times on the same.
    for _ in 0..3 {
        let action = bench.step(answered(false));
        bench.send(action, 5);
    }
    let Action::Resist(resistance) = bench.step(answered(false)) else { panic!() };
    assert_eq!(resistance, Resistance { distrust: true, ask_for_turn: false });
    bench.now += TURN_AFTER;
    bench.send(Action::Resist(resistance), 6);
    let Action::Resist(resistance) = bench.step(answered(false)) else { panic!() };
    assert_eq!(resistance, Resistance { distrust: false, ask_for_turn: true });
}

#[test]
fn what_can_never_pass_is_halved_down_to_it_and_then_read_anew_once() {
    let mut bench = Bench::new(4);
    bench.begin(5);
    let met = |bench: &mut Bench, times| {
        for _ in 0..times {
            let action = bench.step(answered(false));
            bench.send(action, 5);
        }
    };
    met(&mut bench, UNTOLD);
    assert_eq!(bench.batch.size(), 4);
    for size in [2, 1] {
        met(&mut bench, 1);
        assert_eq!(bench.batch.size(), size, "what it stands on was known, and met nobody");
    }
    let action = bench.step(answered(false));
    assert!(matches!(action, Action::Resist(Resistance { distrust: true, .. })), "{action:?}");
    bench.send(action, 5);
    met(&mut bench, UNTOLD - 1);
    let action = bench.step(answered(false));
    assert!(why(&action).contains("nothing was done"), "{action:?}");
    assert!(matches!(action, Action::Fail(Failed { who: Who::First(1), contention: false, .. })));
}

#[test]
fn who_meets_others_is_not_halved() {
    let mut bench = Bench::new(4);
    bench.begin(1);
    for revision in 2..20 {
        let action = bench.step(answered(false));
        bench.send(action, revision);
        assert_eq!(bench.batch.size(), 4);
    }
}

#[test]
fn what_is_in_doubt_is_not_halved_whatever_it_meets() {
    let mut bench = Bench::new(2);
    bench.begin(5);
    let action = bench.step(lost());
    bench.send(action, 5);
    for _ in 0..3 * UNTOLD {
        let action = bench.step(answered(false));
        bench.send(action, 5);
        assert_eq!(bench.batch.size(), 2);
    }
}

#[test]
fn what_etcd_does_not_take_is_halved_down_to_the_one_that_is_too_much() {
    let mut bench = Bench::new(4);
    bench.begin(5);
    for size in [2, 1] {
        let action = bench.step(refused("etcdserver: request is too large"));
        bench.send(action, 5);
        assert_eq!(bench.batch.size(), size);
    }
    let action = bench.step(refused("etcdserver: request is too large"));
    let Action::Answer { answers, written: false } = action else { panic!("{action:?}") };
    assert!(matches!(&*answers, [Err(WriteError::NotTaken(_))]), "{answers:?}");
}

#[test]
fn what_etcd_has_no_space_for_was_done_or_not_as_the_view_tells() {
    let full = || Event::Answered(Err(StoreError::Full("etcdserver: mvcc: database space exceeded".into())));
    for (happened, unknown) in [(true, false), (false, false), (false, true)] {
        let mut bench = Bench::new(4);
        bench.begin(5);
        if unknown {
            bench.step(Event::Answered(Err(StoreError::Unknown("away".into()))));
            let action = bench.step(Event::Performed);
            assert!(matches!(action, Action::Yield(_)), "{action:?}");
            assert!(matches!(bench.step(Event::Free(None)), Action::CatchUp(_)));
            let action = bench.step(Event::CaughtUp(Ok(Known { happened: None, listings: 1 })));
            bench.send(action, 5);
        }
        // It does not get better by halves, nor by another try.
        assert!(matches!(bench.step(full()), Action::Yield(_)));
        assert!(matches!(bench.step(Event::Free(None)), Action::CatchUp(_)));
        let last = bench.batch.doubtful().count() - 1;
        let known = Known { happened: happened.then_some(last), listings: 1 };
        match bench.step(Event::CaughtUp(Ok(known))) {
            Action::Answer { written: true, .. } => assert!(happened),
            Action::Fail(Failed { who: Who::First(4), why, .. }) => {
                assert!(!happened && why.0.contains("space exceeded"), "{why:?}");
                assert_eq!(why.0.contains("not known"), unknown, "{why:?}");
            }
            action => panic!("{action:?}"),
        }
    }
}

#[test]
fn a_refusal_stands_on_a_view_that_is_up_to_date() {
    let refusal = |bench: &mut Bench| {
        let answers = vec![Err(WriteError::Refused(Refusal::NoProject))];
        bench.step(Event::Planned(Plan { id: "t".into(), answers, txn: None, needs_fresh: true }))
    };
    let mut bench = Bench::new(1);
    bench.batch.begin(bench.now);
    assert!(matches!(bench.step(Event::Free(None)), Action::Plan(1)));
    assert!(matches!(refusal(&mut bench), Action::Yield(_)));
    assert!(matches!(bench.step(Event::Free(None)), Action::CatchUp(_)));
    bench.step(Event::CaughtUp(Ok(Known { happened: None, listings: 1 })));
    assert!(matches!(refusal(&mut bench), Action::Answer { written: false, .. }));
}

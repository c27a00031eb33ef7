use ec_model::{Assigned, CopyOf, Instance, InstanceId, NodeId, Rebuild, State};
use jiff::Timestamp;

use super::*;
use crate::status::STARTED_AGAIN;

/// One column for each verb, one line for each situation.
fn table() -> String {
    let verbs = [
        Verb::Start,
        Verb::Stop(60),
        Verb::Stop(0),
        Verb::Reboot(60),
        Verb::Reboot(0),
        Verb::Pause,
        Verb::Unpause,
        Verb::Suspend,
        Verb::Resume,
        Verb::Rebuild(None),
        Verb::Rescue(None),
        Verb::Unrescue,
        Verb::Resize(Extent { query: String::new(), resources: ec_model::Resources::new() }),
        Verb::Confirm,
        Verb::Revert,
    ];
    let mut lines = vec![
        format!("| it is | {} |", verbs.each_ref().map(|verb| format!("`{}`", verb.name())).join(" | ")),
        format!("| --- |{}", " --- |".repeat(verbs.len())),
    ];
    let mut line = |is: &str, judge: &dyn Fn(&Verb) -> Verdict| {
        let cells = verbs.each_ref().map(|verb| match judge(verb) {
            Verdict::Do(_) => "done",
            Verdict::Already(_) => "is so",
            Verdict::Refuse(_) => "refused",
        });
        lines.push(format!("| {is} | {} |", cells.join(" | ")));
    };
    for situation in Situation::ALL {
        line(&situation.to_string(), &|verb| in_situation(verb, situation));
    }
    // Whatever else it is.
    let (runs, locked) = (status(State::Active, 1, true), instance(Some("mine")));
    let request = request(wish(Power::Running, 1, false));
    let doomed = Request { desired: Desired::Destroyed, ..request.clone() };
    line("locked", &|verb| judge(verb, &locked, &request, Some(&runs)));
    line("being destroyed", &|verb| judge(verb, &instance(None), &doomed, Some(&runs)));
    lines.join("\n")
}

#[test]
fn the_table_is_the_one_that_is_written_down() {
    let written = include_str!("../../../../docs/lifecycle.md");
    assert!(written.contains(&table()), "docs/lifecycle.md shall have:\n{}", table());
}

fn request(power: PowerWish) -> Request {
    Request {
        instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
        epoch: 1,
        generation: power.generation,
        desired: Desired::Active,
        power,
        restart: ec_model::Restart::No,
        rebuild: None,
        rescue: None,
        kind: ec_model::Workload::Machine,
        volumes: Vec::new(),
        resize: None,
        handover: None,
        name: None,
        project: String::new(),
        user: String::new(),
        spec: None,
        access: None,
        request_id: None,
        created_at: Timestamp::UNIX_EPOCH,
    }
}

fn instance(locked: Option<&str>) -> Instance {
    let text = r#"{"version":1,"instance":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","generation":1,"created_at":"1970-01-01T00:00:00Z",
                   "spec":{"query":"resources=VCPU:1","image":{"url":"file:///x"}}}"#;
    let node = NodeId::new(uuid::Uuid::from_u128(1));
    Instance {
        assigned: Some(Assigned { node, epoch: 1 }),
        locked: locked.map(str::to_owned),
        ..ec_model::decode(text.as_bytes()).unwrap()
    }
}

fn status(state: State, power_generation: u64, started: bool) -> Status {
    let text = r#"{"version":1,"instance":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","node":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
                   "state":"ACTIVE","since":"1970-01-01T00:00:00Z","updated_at":"1970-01-01T00:00:00Z"}"#;
    Status {
        state,
        power_generation,
        started_at: started.then_some(Timestamp::UNIX_EPOCH),
        ..ec_model::decode(text.as_bytes()).unwrap()
    }
}

fn wish(power: Power, generation: u64, anew: bool) -> PowerWish {
    PowerWish { power, generation, anew, ..PowerWish::default() }
}

#[test]
fn an_instance_stands_where_its_agent_tells_until_a_wish_leads_elsewhere() {
    let of = |power, status: Option<Status>| Situation::of(&instance(None), &request(power), status.as_ref());
    let first = || wish(Power::Running, 1, false);
    assert_eq!(of(first(), None), Situation::Building);
    assert_eq!(of(wish(Power::Suspended, 2, false), None), Situation::Suspending, "it ran");
    for (state, done, started, situation) in [
        (State::Preparing, 0, false, Situation::Building),
        (State::Starting, 0, false, Situation::Building),
        (State::Starting, 1, true, Situation::Running),
        (State::Active, 1, true, Situation::Running),
        (State::Paused, 1, true, Situation::Paused),
        (State::Suspending, 1, true, Situation::Suspending),
        (State::Suspended, 1, true, Situation::Suspended),
        (State::Stopping, 1, true, Situation::Stopping),
        (State::Stopped, 1, true, Situation::Stopped),
        (State::Rebooting, 1, true, Situation::Rebooting),
        // No such wish is under way any more: it has come to its end just now.
        (State::Rebuilding, 1, true, Situation::Running),
        (State::Rescuing, 1, true, Situation::Running),
        (State::Resizing, 1, true, Situation::Running),
        // That it is told says that it ran, where the note of its start was lost.
        (State::Rebuilding, 1, false, Situation::Running),
        (State::Error, 1, true, Situation::Error),
        (State::Unknown, 1, true, Situation::Error),
    ] {
        assert_eq!(of(first(), Some(status(state, done, started))), situation, "{state}");
    }
    for (power, anew, situation) in [
        (Power::Running, false, Situation::Running),
        (Power::Running, true, Situation::Rebooting),
        (Power::Paused, false, Situation::Paused),
        (Power::Suspended, false, Situation::Suspending),
        (Power::Stopped, false, Situation::Stopping),
    ] {
        let told = |observed_generation| Status { observed_generation, ..status(State::Error, 1, true) };
        assert_eq!(of(wish(power, 2, anew), Some(told(1))), situation, "{power:?}, of which nothing is told");
        let failed = if power == Power::Running { Situation::Error } else { situation };
        assert_eq!(of(wish(power, 2, anew), Some(told(2))), failed, "{power:?}, which failed");
        let pending = status(State::Active, 1, true);
        assert_eq!(of(wish(power, 2, anew), Some(pending)), situation, "{power:?} is on its way");
        let ended = status(State::Rescuing, 2, true);
        let goes_on = if anew { Situation::Running } else { situation };
        assert_eq!(of(wish(power, 2, anew), Some(ended)), goes_on, "{power:?} after a rescue that failed");
        let done = status(State::Active, 2, true);
        assert_eq!(of(wish(power, 2, anew), Some(done)), Situation::Running, "{power:?} was carried out");
        // One that is started again by itself tells of no wish until it is up.
        let again = status(State::Starting, 0, true);
        let whither = if power == Power::Running { Situation::Running } else { situation };
        assert_eq!(of(wish(power, 2, anew), Some(again)), whither, "{power:?} while it is started again");
        // One that was never up is built first, whatever is wished.
        assert_eq!(of(wish(power, 2, anew), Some(status(State::Preparing, 0, false))), Situation::Building);
    }
}

#[test]
fn people_are_told_what_is_under_way_by_the_word_that_a_verb_is_refused_with() {
    let of = |power, status: Status| shown(&instance(None), &request(power), &status);
    for (power, anew, told) in [
        (Power::Running, false, State::Paused),
        (Power::Running, true, State::Rebooting),
        (Power::Paused, false, State::Paused),
        (Power::Suspended, false, State::Suspending),
        (Power::Stopped, false, State::Stopping),
    ] {
        // Wished, and not taken up; carried out; something is wrong; and it was never up.
        assert_eq!(of(wish(power, 2, anew), status(State::Paused, 1, true)), told, "{power:?}");
        assert_eq!(of(wish(power, 2, anew), status(State::Active, 2, true)), State::Active, "{power:?}");
        assert_eq!(of(wish(power, 2, anew), status(State::Error, 1, true)), State::Error, "{power:?}");
        assert_eq!(of(wish(power, 2, anew), status(State::Preparing, 0, false)), State::Preparing);
    }
    for (state, told) in [
        (State::Stopped, State::Starting),
        (State::Suspended, State::Starting),
        // It ends, or is saved, first.
        (State::Stopping, State::Stopping),
        (State::Suspending, State::Suspending),
    ] {
        assert_eq!(of(wish(Power::Running, 2, false), status(state, 1, true)), told, "{state} is started");
        assert_eq!(of(wish(Power::Running, 1, false), status(state, 1, true)), state, "{state} by itself");
    }
    let image = || ImageRef::at("x");
    let at = Timestamp::UNIX_EPOCH;
    let stopped = || status(State::Stopped, 1, true);
    let plain = || request(wish(Power::Running, 1, false));
    let rebuild = Request { rebuild: Some(ec_model::Rebuild { wished_at: at, before: None }), ..plain() };
    let rescue = Request { rescue: Some(ec_model::Rescue { wished_at: at, image: image() }), ..plain() };
    let is_rescued = |state| {
        let rescued = Some(ec_model::Rescued { wished_at: at, failed: None });
        Status { rescued, ..status(state, 1, true) }
    };
    for (request, status, told) in [
        (rebuild, stopped(), State::Rebuilding),
        (rescue.clone(), stopped(), State::Rescuing),
        (rescue.clone(), is_rescued(State::Starting), State::Rescuing),
        (rescue.clone(), is_rescued(State::Rescued), State::Rescued),
        // It powered itself off, and boots from its rescue disk all the same.
        (rescue.clone(), is_rescued(State::Stopped), State::Stopped),
        (plain(), is_rescued(State::Rescued), State::Unrescuing),
        (plain(), is_rescued(State::Stopped), State::Unrescuing),
        (Request { desired: Desired::Destroyed, ..rescue }, stopped(), State::Stopped),
    ] {
        assert_eq!(shown(&instance(None), &request, &status), told, "{request:?}");
    }
}

#[test]
fn who_asks_twice_is_not_told_that_it_is_so_before_its_agent_did_it() {
    let said = |verb: Verb, power, status: Status| {
        let verdict = judge(&verb, &instance(None), &request(wish(power, 2, false)), Some(&status));
        let Verdict::Already(why) = verdict else { panic!("{verb:?}: {verdict:?}") };
        why
    };
    let yet = "that is asked for already, and yet to be done";
    for (verb, power, was, is, so) in [
        (Verb::Start, Power::Running, State::Stopped, State::Active, "it is running already"),
        (Verb::Resume, Power::Running, State::Suspended, State::Active, "it is running already"),
        (Verb::Unpause, Power::Running, State::Paused, State::Active, "it is running already"),
        (Verb::Pause, Power::Paused, State::Active, State::Paused, "it is paused already"),
    ] {
        assert_eq!(said(verb.clone(), power, status(was, 1, true)), yet, "{verb:?}");
        assert_eq!(said(verb.clone(), power, status(is, 2, true)), so, "{verb:?}");
        // The wish that would have led elsewhere was taken back.
        assert_eq!(said(verb.clone(), power, status(is, 1, true)), so, "{verb:?}");
    }
    let starting = status(State::Starting, 1, true);
    assert_eq!(said(Verb::Start, Power::Running, starting), "it is running already");
}

#[test]
fn a_locked_instance_is_left_alone_and_one_that_goes_too() {
    let (mut request, status) = (request(PowerWish::default()), status(State::Active, 1, true));
    let judged =
        |verb: &Verb, request: &Request, locked| judge(verb, &instance(locked), request, Some(&status));
    let lock = Verb::Lock("backup".into());
    assert_eq!(judged(&lock, &request, None), Verdict::Do(Wish::Locked(Some("backup".into()))));
    // Said again with a reason, that is the reason; without one, the reason stays.
    for before in ["", "holidays"] {
        assert_eq!(judged(&lock, &request, Some(before)), Verdict::Do(Wish::Locked(Some("backup".into()))));
        assert!(matches!(judged(&Verb::Lock("".into()), &request, Some(before)), Verdict::Already(_)));
    }
    assert!(matches!(judged(&lock, &request, Some("backup")), Verdict::Already(_)));
    assert_eq!(judged(&Verb::Unlock, &request, Some("")), Verdict::Do(Wish::Locked(None)));
    assert!(matches!(judged(&Verb::Unlock, &request, None), Verdict::Already(_)));
    let Verdict::Refuse(why) = judged(&Verb::Stop(0), &request, Some("backup")) else { panic!() };
    let id = instance(None).instance;
    let unlocks = format!("`eschedule unlock {id}` lets things be done to it again");
    assert_eq!(why, format!("it is locked (backup); {unlocks}"));
    let Verdict::Refuse(why) = judged(&Verb::Stop(0), &request, Some("")) else { panic!() };
    assert_eq!(why, format!("it is locked; {unlocks}"));
    // Who holds it for something takes nobody's lock for theirs.
    let [hold, let_go] = [Verb::Hold("backup".into()), Verb::LetGo("backup".into())];
    assert_eq!(judged(&hold, &request, None), Verdict::Do(Wish::Locked(Some("backup".into()))));
    assert!(matches!(judged(&hold, &request, Some("backup")), Verdict::Already(_)));
    assert_eq!(judged(&let_go, &request, Some("backup")), Verdict::Do(Wish::Locked(None)));
    // Nobody starts it before its disk is made anew by who holds it for that.
    let image = ImageRef::at("http://h/i");
    let remake = Verb::Remake("backup".into(), image.clone());
    assert_eq!(judged(&remake, &request, Some("backup")), Verdict::Do(Wish::Rebuild(Some(image))));
    for (verb, before) in [
        (&hold, Some("")),
        (&hold, Some("mine")),
        (&let_go, Some("mine")),
        (&let_go, None),
        (&remake, Some("mine")),
        (&remake, None),
    ] {
        assert!(matches!(judged(verb, &request, before), Verdict::Refuse(_)), "{verb:?} {before:?}");
    }
    request.desired = Desired::Destroyed;
    for verb in [lock, Verb::Unlock, Verb::Start] {
        assert_eq!(judged(&verb, &request, None), Verdict::Refuse("it is being destroyed".into()));
    }
}

#[test]
fn an_instance_is_being_rebuilt_from_the_wish_until_what_came_of_it_is_told() {
    let at = |second| Timestamp::from_second(second).unwrap();
    let wished = |second: Option<i64>| Request {
        rebuild: second.map(|second| ec_model::Rebuild { wished_at: at(second), before: None }),
        ..request(PowerWish::default())
    };
    let told = |second: Option<i64>, started| Status {
        rebuilt: second.map(|second| ec_model::Rebuilt { wished_at: at(second), failed: None }),
        ..status(State::Active, 1, started)
    };
    for (wish, came, started, situation) in [
        (None, None, true, Situation::Running),
        (Some(1), None, true, Situation::Rebuilding),
        (Some(2), Some(1), true, Situation::Rebuilding),
        (Some(1), Some(1), true, Situation::Running),
        (Some(1), Some(2), true, Situation::Running),
        (None, Some(1), true, Situation::Running),
        // What never ran is built from the newest wish anyway.
        (Some(1), None, false, Situation::Building),
    ] {
        let told = told(came, started);
        let told = if started { told } else { Status { state: State::Starting, ..told } };
        let stands = Situation::of(&instance(None), &wished(wish), Some(&told));
        assert_eq!(stands, situation, "{wish:?}, {came:?}");
    }
    // It runs, whether its start is noted or not.
    let unnoted = Situation::of(&instance(None), &wished(Some(1)), Some(&told(None, false)));
    assert_eq!(unnoted, Situation::Rebuilding);
    let image = ImageRef::at("file:///x");
    let verdict = in_situation(&Verb::Rebuild(Some(image.clone())), Situation::Running);
    assert_eq!(verdict, Verdict::Do(Wish::Rebuild(Some(image))));
    assert_eq!(Verb::Rebuild(None).name(), "rebuild");
}

#[test]
fn an_instance_is_rescued_from_when_that_is_told_until_what_is_wished_is_otherwise() {
    let at = |second| Timestamp::from_second(second).unwrap();
    let image = |name: &str| ImageRef::at(format!("file:///{name}"));
    let wished = |second: Option<i64>| Request {
        rescue: second.map(|second| ec_model::Rescue { wished_at: at(second), image: image("x") }),
        ..request(PowerWish::default())
    };
    let told = |was: Option<(i64, bool)>, state, started| Status {
        rescued: was.map(|(second, failed)| ec_model::Rescued {
            wished_at: at(second),
            failed: failed.then(|| "no image".to_owned()),
        }),
        ..status(state, 1, started)
    };
    let (done, failed) = (Some((1, false)), Some((1, true)));
    for (wish, was, state, situation) in [
        (None, None, State::Active, Situation::Running),
        (Some(1), None, State::Active, Situation::Rescuing),
        (Some(1), None, State::Error, Situation::Rescuing),
        (Some(2), failed, State::Active, Situation::Rescuing),
        (Some(2), done, State::Rescued, Situation::Rescuing),
        (Some(1), done, State::Rescuing, Situation::Rescuing),
        (Some(1), done, State::Starting, Situation::Rescuing),
        (Some(1), done, State::Rescued, Situation::Rescued),
        (Some(1), done, State::Stopped, Situation::RescuedOff),
        (Some(1), done, State::Error, Situation::Rescued),
        (None, done, State::Rescued, Situation::Unrescuing),
        (None, None, State::Unrescuing, Situation::Unrescuing),
        (Some(1), failed, State::Active, Situation::Running),
        (None, failed, State::Stopped, Situation::Stopped),
    ] {
        let stands = Situation::of(&instance(None), &wished(wish), Some(&told(was, state, true)));
        assert_eq!(stands, situation, "{wish:?}, {was:?}, {state}");
    }
    let unbuilt =
        Situation::of(&instance(None), &wished(Some(1)), Some(&told(None, State::Preparing, false)));
    assert_eq!(unbuilt, Situation::Building);
    // Somebody took away what its agent told.
    assert_eq!(Situation::of(&instance(None), &wished(Some(1)), None), Situation::Rescuing);

    let rescued = told(done, State::Rescued, true);
    let before = Extent { query: String::new(), resources: ec_model::Resources::new() };
    let both = Instance { before: Some(before), ..instance(None) };
    for verb in [Verb::Confirm, Verb::Revert] {
        let Verdict::Refuse(why) = judge(&verb, &both, &wished(Some(1)), Some(&rescued)) else {
            panic!("{verb:?}")
        };
        assert!(why.contains("unrescue"), "{why}");
    }
    let judged = |verb: Verb| judge(&verb, &instance(None), &wished(Some(1)), Some(&rescued));
    for verb in [Verb::Rescue(None), Verb::Rescue(Some(image("x")))] {
        assert_eq!(judged(verb), Verdict::Already("it is rescued already".to_owned()));
    }
    let Verdict::Refuse(why) = judged(Verb::Rescue(Some(image("y")))) else { panic!() };
    assert!(why.contains("with another image; `eschedule unrescue`"), "{why}");
    let Verdict::Refuse(why) = judged(Verb::Stop(0)) else { panic!() };
    assert_eq!(why, "it is rescued; `eschedule unrescue` boots it from its own disk again");
    assert_eq!(judged(Verb::Unrescue), Verdict::Do(Wish::Unrescue));
    // It powered itself off.
    let off = told(done, State::Stopped, true);
    let judged = |verb: Verb, order: &Request| judge(&verb, &instance(None), order, Some(&off));
    let order = wished(Some(1));
    for (verb, anew) in [(Verb::Start, false), (Verb::Reboot(0), true)] {
        let Verdict::Do(Wish::Power(wish)) = judged(verb.clone(), &order) else { panic!("{verb:?}") };
        assert_eq!((wish.power, wish.anew), (Power::Running, anew), "{verb:?}");
        // Until it is up it is on its way.
        let order = Request { power: PowerWish { generation: 2, ..wish }, ..order.clone() };
        assert_eq!(Situation::of(&instance(None), &order, Some(&off)), Situation::Rescuing, "{verb:?}");
        assert_eq!(shown(&instance(None), &order, &off), State::Rescuing, "{verb:?}");
    }
    let stopped_before = Request { power: wish(Power::Stopped, 2, false), ..order.clone() };
    assert_eq!(Situation::of(&instance(None), &stopped_before, Some(&off)), Situation::RescuedOff);
    let Verdict::Refuse(why) = judged(Verb::Reboot(60), &order) else { panic!() };
    let starts = "`eschedule start` boots its rescue disk again, `eschedule unrescue` its own disk";
    assert_eq!(why, format!("it is rescued and not running; {starts}"));
    assert_eq!(
        judged(Verb::Stop(60), &order),
        Verdict::Already("it is rescued and not running already".to_owned())
    );
    let again = Status { reason: Some(format!("its guest ended{STARTED_AGAIN}5 s")), ..off.clone() };
    for (restart, told, is_refused) in [
        (Restart::Always, &again, true),
        (Restart::OnFailure, &again, true),
        // It was taken off since.
        (Restart::No, &again, false),
        // It ended as its policy has nothing against, or ended too often.
        (Restart::OnFailure, &off, false),
        (Restart::Always, &off, false),
    ] {
        let order = Request { restart, ..order.clone() };
        let verdict = judge(&Verb::Stop(60), &instance(None), &order, Some(told));
        match is_refused {
            true => assert!(matches!(&verdict, Verdict::Refuse(_)), "{restart:?}: {verdict:?}"),
            false => assert!(matches!(&verdict, Verdict::Already(_)), "{restart:?}: {verdict:?}"),
        }
    }
    let Verdict::Refuse(why) = judged(Verb::Rescue(Some(image("y"))), &order) else { panic!() };
    assert!(why.contains("with another image; `eschedule unrescue`"), "{why}");
    assert_eq!(judged(Verb::Unrescue, &order), Verdict::Do(Wish::Unrescue));
    let verdict = in_situation(&Verb::Rescue(Some(image("y"))), Situation::Stopped);
    assert_eq!(verdict, Verdict::Do(Wish::Rescue(Some(image("y")))));
}

#[test]
fn metadata_is_changed_as_labels_are_and_is_bounded_by_itself() {
    let request = request(PowerWish::default());
    let judged = |metadata: BTreeMap<String, Option<String>>, instance: &Instance| {
        judge(&Verb::Set(Change { metadata, ..Change::default() }), instance, &request, None)
    };
    let set =
        |count: usize| (0..count).map(|n| (n.to_string(), Some(String::new()))).collect::<BTreeMap<_, _>>();
    let mut web = instance(None);
    assert!(matches!(judged(set(METADATA_MAX), &web), Verdict::Do(Wish::Set(_))));
    let Verdict::Refuse(why) = judged(set(METADATA_MAX + 1), &web) else { panic!() };
    assert_eq!(why, "it would have 129 items of metadata, more than 128");
    let change = Change { metadata: set(2), ..Change::default() };
    change.make(&mut web);
    assert_eq!((web.spec.metadata.len(), web.labels.len()), (2, 0));
    assert!(matches!(judged(set(2), &web), Verdict::Already(_)));
    Change { metadata: [("0".to_owned(), None)].into(), ..Change::default() }.make(&mut web);
    assert_eq!(web.spec.metadata.keys().collect::<Vec<_>>(), ["1"]);
}

#[test]
fn what_is_done_is_what_was_asked_for() {
    let done = |verb: Verb, situation| match in_situation(&verb, situation) {
        Verdict::Do(Wish::Power(wish)) => (wish.power, wish.grace_seconds, wish.anew),
        other => panic!("{verb:?}: {other:?}"),
    };
    assert_eq!(done(Verb::Start, Situation::Stopped), (Power::Running, 60, false));
    assert_eq!(done(Verb::Stop(7), Situation::Running), (Power::Stopped, 7, false));
    assert_eq!(done(Verb::Stop(0), Situation::Paused), (Power::Stopped, 0, false));
    assert_eq!(done(Verb::Reboot(7), Situation::Running), (Power::Running, 7, true));
    assert_eq!(done(Verb::Reboot(0), Situation::Paused), (Power::Running, 0, true));
    assert_eq!(done(Verb::Reboot(0), Situation::Suspended), (Power::Running, 0, true));
    assert_eq!(done(Verb::Pause, Situation::Running), (Power::Paused, 60, false));
    assert_eq!(done(Verb::Unpause, Situation::Paused), (Power::Running, 60, false));
    assert_eq!(done(Verb::Suspend, Situation::Running), (Power::Suspended, 60, false));
    assert_eq!(done(Verb::Resume, Situation::Suspended), (Power::Running, 60, false));
    assert_eq!(done(Verb::Resume, Situation::Suspending), (Power::Running, 60, false));
}

#[test]
fn a_start_takes_a_stop_back_that_is_not_carried_out_yet() {
    let start = |power, status: Option<&Status>| {
        judge(&Verb::Start, &instance(None), &request(wish(power, 2, false)), status)
    };
    let is_done = |verdict: &Verdict| {
        matches!(verdict, Verdict::Do(Wish::Power(PowerWish { power: Power::Running, .. })))
    };
    for built in [None, Some(status(State::Preparing, 0, false)), Some(status(State::Starting, 0, true))] {
        let verdict = start(Power::Stopped, built.as_ref());
        assert!(is_done(&verdict), "{built:?}: {verdict:?}");
        let verdict = start(Power::Running, built.as_ref());
        assert!(matches!(verdict, Verdict::Already(_)), "{built:?}: {verdict:?}");
    }
}

#[test]
fn a_start_leaves_a_guest_the_time_to_end_that_it_was_told() {
    let stopping = status(State::Stopping, 1, true);
    for (told, has) in [(1800, 1800), (0, 60)] {
        let stop = PowerWish { grace_seconds: told, ..wish(Power::Stopped, 2, false) };
        let verdict = judge(&Verb::Start, &instance(None), &request(stop), Some(&stopping));
        let Verdict::Do(Wish::Power(wish)) = verdict else { panic!("{verdict:?}") };
        assert_eq!((wish.power, wish.grace_seconds), (Power::Running, has));
    }
    let stop = PowerWish { grace_seconds: 1800, ..wish(Power::Stopped, 2, false) };
    let stopped = status(State::Stopped, 2, true);
    let verdict = judge(&Verb::Start, &instance(None), &request(stop), Some(&stopped));
    assert!(matches!(&verdict, Verdict::Do(Wish::Power(wish)) if wish.grace_seconds == 60), "{verdict:?}");
}

#[test]
fn a_stop_of_what_ended_by_itself_is_wished_since_its_policy_would_start_it_again() {
    let stop = |power| {
        let stopped = status(State::Stopped, 2, true);
        judge(&Verb::Stop(7), &instance(None), &request(wish(power, 2, false)), Some(&stopped))
    };
    for power in [Power::Running, Power::Paused, Power::Suspended] {
        let Verdict::Do(Wish::Power(wish)) = stop(power) else { panic!("{power:?}") };
        assert_eq!((wish.power, wish.grace_seconds), (Power::Stopped, 7));
    }
    assert!(matches!(stop(Power::Stopped), Verdict::Already(_)));
}

#[test]
fn whoever_is_refused_is_told_what_helps() {
    let refused = |verb: Verb, situation| match in_situation(&verb, situation) {
        Verdict::Refuse(why) => why,
        other => panic!("{verb:?}: {other:?}"),
    };
    for (verb, situation, why) in [
        (Verb::Start, Situation::Paused, "it is paused; `eschedule unpause` lets it go on"),
        (Verb::Start, Situation::Suspended, "it is suspended; `eschedule resume` lets it go on"),
        (
            Verb::Stop(1),
            Situation::Paused,
            "it is paused; `eschedule unpause` lets it go on, `eschedule stop --grace 0` ends it as it is",
        ),
        (Verb::Reboot(1), Situation::Stopped, "it is stopped; `eschedule start` starts it"),
        (Verb::Reboot(1), Situation::Building, "it is being built; ask again when that is done"),
        (Verb::Pause, Situation::Stopped, "it is stopped; `eschedule start` starts it"),
        (Verb::Pause, Situation::Error, "it is in ERROR: `eschedule show` tells why"),
        (
            Verb::Stop(0),
            Situation::Suspending,
            "it is being suspended; ask again when that is done, or `eschedule resume` takes it back",
        ),
        (Verb::Rescue(None), Situation::Paused, "it is paused; `eschedule unpause` lets it go on"),
        (Verb::Rescue(None), Situation::Unrescuing, "it is being unrescued; ask again when that is done"),
        (Verb::Unrescue, Situation::Stopped, "it is stopped and boots from its own disk"),
        (
            Verb::Start,
            Situation::Rescuing,
            "it is being rescued; ask again when that is done, or `eschedule unrescue` takes it back",
        ),
    ] {
        assert_eq!(refused(verb, situation), why);
    }
}

#[test]
fn what_is_told_of_an_instance_is_changed_where_it_is_not_so_and_within_bounds() {
    let request = request(PowerWish::default());
    let judged = |verb: Verb, instance: &Instance| judge(&verb, instance, &request, None);
    let mut web = instance(None);
    (web.name, web.restart) = (Some("web".into()), Restart::Always);
    web.labels = [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())].into();
    assert!(matches!(judged(Verb::Rename("web".into()), &web), Verdict::Already(_)));
    assert_eq!(judged(Verb::Rename("db".into()), &web), Verdict::Do(Wish::Name("db".into())));

    let labels = |pairs: &[(&str, Option<&str>)]| {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
        Change { labels: pairs.collect(), ..Change::default() }
    };
    let same = [labels(&[("a", Some("1"))]), labels(&[("c", None)]), Change::default()];
    for change in same.into_iter().chain([Change { restart: Some(Restart::Always), ..Change::default() }]) {
        assert!(matches!(judged(Verb::Set(change.clone()), &web), Verdict::Already(_)), "{change:?}");
    }
    let change = Change { restart: Some(Restart::No), ..labels(&[("a", None), ("c", Some("3"))]) };
    assert_eq!(judged(Verb::Set(change.clone()), &web), Verdict::Do(Wish::Set(change.clone())));
    change.make(&mut web);
    let left: Vec<_> = web.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!((left.join(" ").as_str(), web.restart), ("b=2 c=3", Restart::No));

    for (more, fits) in [(LABELS_MAX - 2, true), (LABELS_MAX - 1, false)] {
        let many = (0..more).map(|number| (format!("x{number}"), Some(String::new()))).collect();
        let verdict = judged(Verb::Set(Change { labels: many, ..Change::default() }), &web);
        assert_eq!(matches!(verdict, Verdict::Do(_)), fits, "{more} more");
        assert!(fits || verdict == Verdict::Refuse("it would have 129 labels, more than 128".into()));
    }
}

#[test]
fn each_verb_is_called_as_it_is_typed() {
    let change = Change::default();
    for (verb, name) in [
        (Verb::Start, "start"),
        (Verb::Stop(0), "stop --grace 0"),
        (Verb::Stop(1), "stop"),
        (Verb::Reboot(0), "reboot --hard"),
        (Verb::Reboot(1), "reboot"),
        (Verb::Rescue(None), "rescue"),
        (Verb::Unrescue, "unrescue"),
        (Verb::Confirm, "resize --confirm"),
        (Verb::Revert, "resize --revert"),
        (Verb::Lock(String::new()), "lock"),
        (Verb::Unlock, "unlock"),
        (Verb::Rename(String::new()), "rename"),
        (Verb::Set(change), "set"),
    ] {
        assert_eq!(verb.name(), name);
    }
}

#[test]
fn each_verb_is_recorded_by_a_word_of_the_api_and_how_it_was_asked_for() {
    let image = ImageRef::at("http://h/i");
    let some = |text: &str| Some(text.to_owned());
    let words = |keys: &[(&str, Option<&str>)]| {
        keys.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect()
    };
    let change = Change {
        labels: words(&[("a", Some("1")), ("b", Some("2")), ("d", None)]),
        metadata: words(&[("c", Some("3")), ("e", None), ("f", None)]),
        restart: Some(Restart::OnFailure),
    };
    let told = "labels a b, without labels d, metadata c, without metadata e f, restart on-failure";
    let unset = Change { labels: words(&[("a", None)]), ..Change::default() };
    for (verb, recorded, detail) in [
        (Verb::Start, ActionVerb::Start, None),
        (Verb::Stop(5), ActionVerb::Stop, some("grace 5 s")),
        (Verb::Reboot(0), ActionVerb::Reboot, some("hard")),
        (Verb::Reboot(7), ActionVerb::Reboot, some("grace 7 s")),
        (Verb::Pause, ActionVerb::Pause, None),
        (Verb::Unpause, ActionVerb::Unpause, None),
        (Verb::Suspend, ActionVerb::Suspend, None),
        (Verb::Resume, ActionVerb::Resume, None),
        (Verb::Rebuild(None), ActionVerb::Rebuild, None),
        (Verb::Rebuild(Some(image)), ActionVerb::Rebuild, some("http://h/i")),
        (Verb::Rescue(None), ActionVerb::Rescue, None),
        (Verb::Unrescue, ActionVerb::Unrescue, None),
        (Verb::Lock(String::new()), ActionVerb::Lock, None),
        (Verb::Lock("mine".into()), ActionVerb::Lock, some("mine")),
        (Verb::Unlock, ActionVerb::Unlock, None),
        (Verb::Rename("db".into()), ActionVerb::Rename, some("db")),
        (Verb::Set(change), ActionVerb::Set, some(told)),
        (Verb::Set(unset), ActionVerb::Set, some("without labels a")),
    ] {
        assert_eq!(verb.recorded(), (recorded, detail));
    }
}

#[test]
fn of_a_volume_only_its_name_its_labels_its_lock_and_more_room_are_asked() {
    let extent = |gb: u64| ec_model::Extent {
        query: format!("resources=DISK_GB:{gb}"),
        resources: [("DISK_GB".to_owned(), gb)].into(),
    };
    let mut volume = instance(None);
    (volume.kind, volume.spec.resources) = (ec_model::Workload::Volume, extent(4).resources);
    let order = request(PowerWish::default());
    let told = status(State::Active, 0, false);
    let asked = |verb: &Verb| judge(verb, &volume, &order, Some(&told));
    assert_eq!(asked(&Verb::Resize(extent(9))), Verdict::Do(Wish::Resize(extent(9))));
    assert!(matches!(asked(&Verb::Resize(extent(4))), Verdict::Already(why) if why.contains("4 GB already")));
    assert!(matches!(asked(&Verb::Resize(extent(3))), Verdict::Refuse(why) if why.contains("never shrinks")));
    // What could not grow is to stay as it is: nobody is told of that wish any more.
    let failed = ec_model::Resized {
        wished_at: jiff::Timestamp::UNIX_EPOCH,
        failed: Some("no".to_owned()),
        resources: extent(3).resources,
    };
    let wished = Request { resize: Some(ec_model::Resize { wished_at: failed.wished_at }), ..order.clone() };
    let missed = Status { resized: Some(failed), ..told.clone() };
    let judged = judge(&Verb::Resize(extent(3)), &volume, &wished, Some(&missed));
    assert_eq!(judged, Verdict::Do(Wish::Resize(extent(3))));
    let mut more = extent(9);
    more.resources.insert("VCPU".into(), 1);
    assert!(matches!(asked(&Verb::Resize(more)), Verdict::Refuse(why) if why.contains("DISK_GB alone")));
    let words = |key: &str| [(key.to_owned(), Some("x".to_owned()))].into();
    let labelled = Change { labels: words("a"), ..Change::default() };
    assert_eq!(asked(&Verb::Set(labelled.clone())), Verdict::Do(Wish::Set(labelled.clone())));
    let no_guest = [
        Change { metadata: words("a"), ..labelled.clone() },
        Change { restart: Some(ec_model::Restart::Always), ..labelled },
    ];
    for change in no_guest {
        assert_eq!(asked(&Verb::Set(change)), Verdict::Refuse(IS_VOLUME.to_owned()));
    }
    // Made anew, as a copy or of an image, where it is there; and then nothing else, till that is told.
    let image = ImageRef::at("http://h/i");
    let anew = Verb::Rebuild(Some(image.clone()));
    assert_eq!(asked(&anew), Verdict::Do(Wish::Rebuild(Some(image))));
    let gone = status(State::Error, 0, false);
    assert!(
        matches!(judge(&anew, &volume, &order, Some(&gone)), Verdict::Refuse(why) if why.contains("ERROR"))
    );
    // But where its disk is what is missed, and by who holds the lock of the machine that has it.
    let lost = Status { reason: Some(format!("its disk is gone{}", crate::status::WITHOUT_DISK)), ..gone };
    assert!(matches!(judge(&anew, &volume, &order, Some(&lost)), Verdict::Do(Wish::Rebuild(_))));
    let remake = Verb::Remake("mine".into(), ImageRef::at("http://h/i"));
    assert_eq!(asked(&remake), asked(&anew));
    let locked = Instance { locked: Some("mine".to_owned()), ..volume.clone() };
    let refused = judge(&remake, &locked, &order, Some(&told));
    assert!(
        matches!(refused, Verdict::Refuse(why) if why.contains("it is locked")),
        "its own lock is another"
    );
    assert_eq!(remake.name_of(ec_model::Workload::Volume), "restore");
    // One that could not be extended is as large as it was, and asked for again.
    let [first, second] = [1, 2].map(|second| Timestamp::from_second(second).unwrap());
    let of = |wished_at, failed: Option<&str>| ec_model::Resized {
        wished_at,
        failed: failed.map(str::to_owned),
        resources: extent(2).resources,
    };
    let extended = |told: ec_model::Resized, gb| {
        let order = Request { resize: Some(ec_model::Resize { wished_at: second }), ..order.clone() };
        let told = Status { resized: Some(told), ..status(State::Active, 0, false) };
        judge(&Verb::Resize(extent(gb)), &volume, &order, Some(&told))
    };
    for gb in [3, 4, 5] {
        assert_eq!(extended(of(second, Some("why")), gb), Verdict::Do(Wish::Resize(extent(gb))));
    }
    assert!(matches!(extended(of(second, Some("why")), 1), Verdict::Refuse(why) if why.contains("has 2 GB")));
    assert!(matches!(extended(of(second, None), 4), Verdict::Already(_)));
    assert!(matches!(extended(of(first, Some("why")), 4), Verdict::Already(_)), "an older one failed");
    let wished = Rebuild { wished_at: Timestamp::UNIX_EPOCH, before: None };
    let pending = Request { rebuild: Some(wished), ..order.clone() };
    let meanwhile = judge(&Verb::Resize(extent(9)), &volume, &pending, Some(&told));
    assert!(matches!(meanwhile, Verdict::Refuse(why) if why.contains("being made anew")));
    let mut snapshot = volume.clone();
    let other = InstanceId::new(uuid::Uuid::from_u128(7));
    let several = CopyOf { beside: vec![other], ..CopyOf::disk(ec_model::Workload::Machine, other) };
    snapshot.spec.image = ImageRef::copy_of(&several);
    for verb in [anew, Verb::Resize(extent(9))] {
        let refused = judge(&verb, &snapshot, &order, Some(&told));
        assert!(matches!(refused, Verdict::Refuse(why) if why.contains("it is a snapshot")));
    }
    assert_eq!(asked(&Verb::Rename("data".into())), Verdict::Do(Wish::Name("data".into())));
    assert_eq!(asked(&Verb::Lock(String::new())), Verdict::Do(Wish::Locked(Some(String::new()))));
    for verb in
        [Verb::Start, Verb::Stop(0), Verb::Rebuild(None), Verb::Rescue(None), Verb::Confirm, Verb::Revert]
    {
        assert!(matches!(asked(&verb), Verdict::Refuse(why) if why.contains("it is a volume")), "{verb:?}");
    }
    volume.locked = Some("mine".to_owned());
    let locked = judge(&Verb::Resize(extent(9)), &volume, &order, Some(&told));
    assert!(matches!(locked, Verdict::Refuse(why) if why.contains("mine")));
}

#[test]
fn what_can_be_done_to_one_that_runs_is_judged_by_how_it_is_once_it_is_stopped() {
    let rebuild = Verb::Rebuild(Some(ImageRef::at("http://h/i")));
    let (order, runs) = (request(wish(Power::Running, 2, false)), status(State::Active, 2, true));
    let judged = |order: &Request, told: &Status| once_stopped(&rebuild, &instance(None), order, Some(told));
    let refused = |verdict: Verdict, hint: &str| match verdict {
        Verdict::Refuse(why) => assert!(why.contains(hint), "{why}"),
        other => panic!("{other:?}"),
    };
    for state in
        [State::Active, State::Starting, State::Paused, State::Stopped, State::Rebooting, State::Error]
    {
        let told = Status { state, ..runs.clone() };
        assert!(matches!(judged(&order, &told), Verdict::Do(Wish::Rebuild(_))), "{state}");
    }
    let at = Timestamp::UNIX_EPOCH;
    let rescue = Some(ec_model::Rescue { wished_at: at, image: ImageRef::at("x") });
    let rescued = Some(ec_model::Rescued { wished_at: at, failed: None });
    // It powered itself off, and boots from its rescue disk all the same.
    let off = Status { rescued, ..status(State::Stopped, 2, true) };
    refused(judged(&Request { rescue, ..order.clone() }, &off), "it is rescued");
    let extent = || Extent { query: String::new(), resources: ec_model::Resources::new() };
    let resized = ec_model::Resized { wished_at: at, failed: None, resources: extent().resources };
    let larger = Instance { before: Some(extent()), ..instance(None) };
    let resize = Request { resize: Some(ec_model::Resize { wished_at: at }), ..order.clone() };
    let told = Status { resized: Some(resized), ..runs };
    refused(once_stopped(&rebuild, &larger, &resize, Some(&told)), "resized and not confirmed");
    // Without its disk it is given one whatever its size.
    let reason = Some(format!("its disk is gone{}", crate::status::WITHOUT_DISK));
    let lost = Status { state: State::Error, reason, ..told };
    let verdict = once_stopped(&rebuild, &larger, &resize, Some(&lost));
    assert!(matches!(verdict, Verdict::Do(Wish::Rebuild(_))), "{verdict:?}");
    refused(once_stopped(&rebuild, &instance(Some("mine")), &order, Some(&off)), "it is locked (mine)");
}

#[test]
fn what_boots_from_a_volume_has_no_disk_that_is_made_anew_or_larger() {
    let mut booting = instance(None);
    booting.volumes = vec![ec_model::Attachment::root(booting.instance)];
    let (order, told) = (request(PowerWish::default()), status(State::Active, 1, true));
    let asked = |verb: &Verb| judge(verb, &booting, &order, Some(&told));
    let extent = |query: &str| {
        let query = ec_model::ResourceQuery::parse(query).unwrap();
        Extent { query: query.text().to_owned(), resources: query.total() }
    };
    let refused = |verb: Verb, hint: &str| match asked(&verb) {
        Verdict::Refuse(why) => assert!(why.contains(hint), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(Verb::Rebuild(None), "`eschedule volume restore` makes that anew");
    refused(Verb::Resize(extent("resources=VCPU:2,MEMORY_MB:2,DISK_GB:1")), "has no disk of its own");
    let larger = extent("resources=VCPU:2,MEMORY_MB:2");
    assert_eq!(asked(&Verb::Resize(larger.clone())), Verdict::Do(Wish::Resize(larger)));
    assert!(matches!(asked(&Verb::Stop(0)), Verdict::Do(_)));
}

#[test]
fn what_lost_its_disk_and_was_to_stop_has_ended_once_its_agent_knows_of_that() {
    let reason = Some(format!("its disk is gone{}", crate::status::WITHOUT_DISK));
    let lost = |observed_generation| Status {
        observed_generation,
        reason: reason.clone(),
        ..status(State::Error, 2, true)
    };
    let of = |power, told| Situation::of(&instance(None), &request(wish(power, 5, false)), Some(&told));
    for heard in [5, 6] {
        assert_eq!(of(Power::Stopped, lost(heard)), Situation::Error);
    }
    assert_eq!(of(Power::Stopped, lost(4)), Situation::Stopping);
    assert_eq!(of(Power::Paused, lost(5)), Situation::Paused);
    assert_eq!(of(Power::Stopped, Status { reason: None, ..lost(5) }), Situation::Stopping);
}

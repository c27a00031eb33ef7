//! Volumes, and the machines that have them.

use Effect::{
    Cover, DropRecord, Extend, HandOver, KeepIntent, NoteRebuild, NoteResize, NoteVolumes, PrepareRebuild,
    PrepareVolume, Receive, RemoveDomain, ReplaceDisk, Reread, SetVolumes,
};
use ec_model::{Edition, Handover};
use ec_plan::{RebuildFacts, status::NOT_WHOLE};
use jiff::Timestamp;

use super::*;

/// A machine that is to have these volumes, has those, and tells of these.
fn machine(wanted: u64, has: u64, told: Option<u64>, failed: Option<u64>, domain: Option<RunState>) -> Facts {
    let volumes = VolumesFacts { wanted, told, failed: failed.map(Duration::from_secs) };
    let facts = seen(domain, true, false);
    Facts { volumes, observed: Observed { volumes: has, ..facts.observed }, ..facts }
}

#[test]
fn a_machine_is_given_the_volumes_that_it_is_to_have_whether_it_runs_or_not() {
    let (down, saved) = (Some(RunState::Ended(End::ByHand)), Some(RunState::Saved));
    for domain in [RUNS, Some(RunState::Paused(Pause::ByHand)), Some(RunState::NotStarted), down] {
        all([
            (machine(7, 0, Some(0), None, domain), Runs(&[SetVolumes])),
            (machine(0, 7, Some(7), None, domain), Runs(&[SetVolumes])),
            (machine(7, Observed::OTHER_VOLUMES, Some(7), None, domain), Runs(&[SetVolumes])),
            (machine(7, 7, Some(0), None, domain), Runs(&[NoteVolumes])),
            (machine(7, 7, None, None, domain), Runs(&[NoteVolumes])),
            (machine(7, 0, None, Some(10), domain), Runs(&[SetVolumes])),
        ]);
    }
    all([
        (machine(7, 7, Some(7), None, RUNS), Settled),
        // Memory that was saved goes on with what it had, which is told once.
        (says(State::Suspended, machine(7, 0, Some(0), None, saved)), Runs(&[SetVolumes])),
        (says(State::Suspended, machine(7, 0, None, Some(3600), saved)), Told),
        (says(State::Suspended, machine(7, 7, Some(7), None, saved)), Told),
        (machine(0, 0, Some(0), None, RUNS), Settled),
    ]);
}

#[test]
fn before_a_first_start_a_definition_has_the_volumes_that_are_asked_for_now() {
    let first = |has, told, failed| {
        let facts = machine(0, has, told, failed, NOT_STARTED);
        let StatusFacts::Known(status) = facts.status else { panic!("it is known") };
        let status = KnownStatus { state: State::Starting, start_noted: false, ..status };
        let RecordFacts::Kept { rebuilt, metadata, root, intent, rescued, size, rescue_begun, .. } = KEPT
        else {
            panic!("it is kept")
        };
        let record = RecordFacts::Kept {
            started: false,
            rebuilt,
            metadata,
            root,
            intent,
            rescued,
            size,
            rescue_begun,
        };
        Facts { status: StatusFacts::Known(status), record, ..facts }
    };
    let starts = || Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart]);
    all([
        // Nothing is told of what is asked for now while it has more than that.
        (first(7, Some(0), None), Runs(&[SetVolumes])),
        (first(7, Some(7), None), Runs(&[SetVolumes])),
        (first(0, Some(7), None), Runs(&[NoteVolumes])),
        (first(0, Some(0), None), starts()),
        // It waits for none.
        (first(7, None, Some(9)), starts()),
        (first(7, None, Some(10)), Runs(&[SetVolumes])),
    ]);
}

#[test]
fn what_a_machine_cannot_have_holds_nothing_up() {
    let failed = |domain| machine(7, 0, None, Some(9), domain);
    holds(&failed(RUNS), &Settled);
    let stops = Facts {
        power: PowerFacts { wanted: ec_model::Power::Stopped, pending: true, ..PowerFacts::default() },
        ..failed(RUNS)
    };
    let Next::Run(effects) = plan(&stops, &LIMITS).next else { panic!("it is to be stopped") };
    assert!(!effects.contains(&SetVolumes), "{effects:?}");
    // One that is not to be asked is ended first, tried or not; one that is asked has its volumes meanwhile.
    for (grace, is_given) in [(0, false), (60, true)] {
        let power = PowerFacts { grace: Duration::from_secs(grace), ..stops.power };
        let untried = Facts { power, ..machine(7, 0, None, None, RUNS) };
        let Next::Run(effects) = plan(&untried, &LIMITS).next else { panic!("it is to be stopped") };
        assert_eq!(effects.contains(&SetVolumes), is_given, "{effects:?}");
    }
    // Told of meanwhile, the start after its end would seem to have begun.
    for domain in [RUNS, Some(RunState::Paused(Pause::ByHand)), Some(RunState::Ended(End::ByHand))] {
        let reboots = Facts {
            power: PowerFacts { pending: true, anew: true, ..PowerFacts::default() },
            ..machine(7, 0, Some(0), None, domain)
        };
        let Next::Run(effects) = plan(&reboots, &LIMITS).next else { panic!("it is to be rebooted") };
        let has_ended = domain == Some(RunState::Ended(End::ByHand));
        assert_eq!(effects.contains(&SetVolumes), has_ended, "{domain:?}: {effects:?}");
    }
    // Not of one that is not to end first, nor of one whose reboot is over.
    for (pending, anew) in [(true, false), (false, true)] {
        let power = PowerFacts { pending, anew, ..PowerFacts::default() };
        holds(&Facts { power, ..machine(7, 0, Some(0), None, RUNS) }, &Runs(&[SetVolumes]));
    }
}

#[test]
fn what_is_in_error_and_wished_otherwise_since_is_not_told_to_be_so_beside_its_volumes() {
    let ended = Some(RunState::Ended(End::ByHand));
    let wished = |wanted, told, has| {
        let power = PowerFacts { wanted, pending: true, generation: 5, ..PowerFacts::default() };
        let facts = says(State::Error, machine(7, has, Some(0), None, ended));
        let StatusFacts::Known(status) = facts.status else { panic!("it is known") };
        let status = StatusFacts::Known(KnownStatus { generation: told, ..status });
        Facts { power, status, ..facts }
    };
    all([
        (wished(Power::Running, 4, 0), Runs(&[Announce(State::Starting, None), SetVolumes])),
        (wished(Power::Running, 4, 7), Runs(&[Announce(State::Starting, None), NoteVolumes])),
        // That is what came of it.
        (wished(Power::Running, 5, 0), Runs(&[SetVolumes])),
        (wished(Power::Running, 5, 7), Runs(&[NoteVolumes])),
    ]);
    // Its memory goes first: told of meanwhile, the start after that would seem to have begun.
    let reboots = wished(Power::Running, 4, 0);
    let power = PowerFacts { anew: true, ..reboots.power };
    let observed = Observed { domain: Some(RunState::Saved), ..reboots.observed };
    let Next::Run(effects) = plan(&Facts { power, observed, ..reboots }, &LIMITS).next else {
        panic!("it is booted anew")
    };
    assert!(effects.contains(&Effect::DropMemory), "{effects:?}");
    let Next::Run(effects) = plan(&wished(Power::Stopped, 4, 0), &LIMITS).next else {
        panic!("it is stopped")
    };
    assert!(!effects.contains(&SetVolumes), "{effects:?}");
}

#[test]
fn a_machine_that_is_rescued_or_gone_is_given_no_volumes() {
    let rescued = |has, told| {
        let rescued = machine(7, has, told, None, RUNS);
        Facts { observed: Observed { rescued: true, ..rescued.observed }, ..rescued }
    };
    for facts in [rescued(0, Some(0)), rescued(7, Some(7))] {
        let Next::Run(effects) = plan(&facts, &LIMITS).next else { panic!("it is ended") };
        assert!(!effects.contains(&SetVolumes) && !effects.contains(&NoteVolumes), "{effects:?}");
    }
    // What it did not let go of went when it was ended, and is free.
    for told in [None, Some(0)] {
        holds(&rescued(7, told), &Runs(&[NoteVolumes]));
    }
    // Without its disk it is not defined again.
    let gone = machine(7, 0, Some(0), None, None);
    let gone = Facts { observed: Observed { volume: false, ..gone.observed }, ..gone };
    let next = plan(&gone, &LIMITS).next;
    assert!(!matches!(&next, Next::Run(effects) if effects.contains(&SetVolumes)), "{next:?}");
}

fn at(second: u64) -> Option<Timestamp> {
    Some(Timestamp::UNIX_EPOCH + Duration::from_secs(second))
}

/// A volume that was told to be there.
fn volume(size: SizeFacts, resize: ResizeFacts) -> Facts {
    let record = RecordFacts::Kept {
        started: true,
        rebuilt: None,
        metadata: 0,
        root: None,
        intent: None,
        rescued: None,
        size,
        rescue_begun: false,
    };
    Facts {
        kind: Workload::Volume,
        record,
        resize,
        held: disk(4),
        status: status(State::Active, None, false, false),
        ..seen(None, true, false)
    }
}

fn disk(disk_gb: u64) -> Size {
    Size { disk_gb, ..Size::default() }
}

fn there() -> Facts {
    volume(
        SizeFacts { is: disk(4), ..SizeFacts::default() },
        ResizeFacts { wanted: disk(4), ..ResizeFacts::default() },
    )
}

#[test]
fn of_a_snapshot_it_is_told_once_that_not_all_of_its_disks_are_there_and_once_that_they_are() {
    let snapshot = |copies: u64, reason: Option<&str>| {
        let is = there();
        let observed = Observed { copies, ..is.observed };
        Facts { copies: 7, observed, status: status(State::Active, reason, false, false), ..is }
    };
    let effects = |facts: &Facts| match plan(facts, &LIMITS).next {
        Next::Run(effects) => effects,
        Next::Settled => Vec::new(),
        other => panic!("{other:?}"),
    };
    let told = |reason: Option<&str>| vec![Announce(State::Active, reason.map(str::to_owned))];
    assert_eq!(effects(&snapshot(7, None)), []);
    assert_eq!(effects(&snapshot(0, None)), told(Some(NOT_WHOLE)));
    assert_eq!(effects(&snapshot(0, Some(NOT_WHOLE))), []);
    assert_eq!(effects(&snapshot(7, Some(NOT_WHOLE))), told(None));
}

#[test]
fn a_volume_is_made_marked_and_told_in_this_order() {
    let fresh = |facts: Facts| Facts { kind: Workload::Volume, ..facts };
    let none =
        Facts { record: RecordFacts::Absent, status: StatusFacts::Absent, ..fresh(seen(None, false, false)) };
    let preparing = |facts: Facts| Facts { status: status(State::Preparing, None, false, false), ..facts };
    const MAKE: &[Effect] = &[PrepareVolume, MarkStarted, Announce(State::Active, None)];
    let unmarked = RecordFacts::Kept {
        started: false,
        rebuilt: None,
        metadata: 0,
        root: None,
        intent: None,
        rescued: None,
        size: SizeFacts::default(),
        rescue_begun: false,
    };
    all([
        (none.clone(), Runs(&[Announce(State::Preparing, None)])),
        (preparing(with(Allocation::Unknown, none.clone())), Asks(Question::Placement)),
        (preparing(with(Allocation::Absent, none.clone())), Fails("no allocation")),
        (preparing(none.clone()), Runs(MAKE)),
        // Killed before it was marked: nobody wrote it, so it may be made anew.
        (preparing(Facts { record: unmarked, observed: there().observed, ..none.clone() }), Runs(MAKE)),
        // And after that.
        (preparing(there()), Runs(&[Announce(State::Active, None)])),
    ]);
    let failed = Facts { status: status(State::Error, Some("no such image"), false, false), ..none };
    let Next::Run(effects) = plan(&failed, &LIMITS).next else { panic!("it is swept") };
    assert!(effects.contains(&Effect::RemoveDomain) && effects.contains(&Effect::EndInError), "{effects:?}");
}

#[test]
fn what_a_guest_may_have_written_is_kept_and_told() {
    const GONE: &str = "its disk is gone; the rest is kept until it is destroyed";
    let gone = Facts { observed: Observed::default(), ..there() };
    let beside = |facts: Facts| Facts { observed: Observed { successor: true, ..facts.observed }, ..facts };
    all([
        (there(), Settled),
        (gone.clone(), Tells(State::Error, GONE, &[])),
        // What lies beside its place may be the rest of a snapshot of several disks.
        (beside(Facts { status: status(State::Error, Some(GONE), false, false), ..gone }), Told),
        (
            Facts { status: status(State::Error, Some("its disk is gone"), false, false), ..there() },
            Runs(&[Announce(State::Active, None)]),
        ),
        // Its record gone, too, and what is told of it an ERROR.
        (
            Facts {
                record: RecordFacts::Absent,
                observed: Observed::default(),
                status: status(State::Error, Some(GONE), false, true),
                ..there()
            },
            Told,
        ),
        (Facts { record: RecordFacts::Absent, ..there() }, Runs(&[KeepRecord])),
        (with(Allocation::Absent, there()), Runs(&[Claim])),
    ]);
}

#[test]
fn a_volume_whose_disk_is_gone_is_made_anew_where_that_is_wished_and_its_node_knows_it() {
    const GONE: &str = "its disk is gone; the rest is kept until it is destroyed";
    let lost = |rebuilt, told, record: fn(RecordFacts) -> RecordFacts| {
        let RecordFacts::Kept { started, metadata, root, intent, rescued, size, rescue_begun, .. } =
            there().record
        else {
            panic!("it has a record")
        };
        let kept =
            RecordFacts::Kept { started, rebuilt, metadata, root, intent, rescued, size, rescue_begun };
        Facts {
            record: record(kept),
            rebuild: RebuildFacts { wished: at(2), told },
            status: status(State::Error, Some(GONE), false, true),
            observed: Observed::default(),
            ..there()
        }
    };
    let kept = |rebuilt, told| lost(rebuilt, told, |kept| kept);
    let newer = Some(Edition { epoch: 1, generation: 9 });
    let beside = Observed { successor: true, ..Observed::default() };
    all([
        (kept(None, None), Runs(&[PrepareRebuild, ReplaceDisk])),
        (kept(at(1), at(1)), Runs(&[PrepareRebuild, ReplaceDisk])),
        // Killed between the two.
        (Facts { observed: beside, ..kept(None, None) }, Runs(&[PrepareRebuild, ReplaceDisk])),
        (Facts { edition: newer, ..kept(None, None) }, Runs(&[KeepIntent])),
        // It could not be, or was done and is gone once more: whoever waits is told before that there is none.
        (kept(at(2), at(1)), Runs(&[NoteRebuild])),
        (kept(at(2), at(2)), Told),
        (lost(None, None, |_| RecordFacts::Absent), Runs(&[Reread, NoteRebuild])),
        (lost(None, at(2), |_| RecordFacts::Absent), Told),
        (lost(None, None, |_| RecordFacts::Unreadable), Runs(&[Reread, NoteRebuild])),
        // And then that it is there again.
        (Facts { observed: there().observed, ..kept(at(2), at(1)) }, Runs(&[Announce(State::Active, None)])),
    ]);
}

#[test]
fn a_volume_grows_when_that_is_claimed_and_never_shrinks() {
    let is = |gb, wished_at, failed| SizeFacts { is: disk(gb), wished_at, failed, ..SizeFacts::default() };
    let wants = |gb, wished, told| ResizeFacts { wanted: disk(gb), wished, told, told_failed: false };
    let claimed = |gb, facts: Facts| Facts { held: disk(gb), ..facts };
    // That it could not be is what was told last.
    let failing = |facts| ResizeFacts { told_failed: true, ..facts };
    let grows = volume(is(4, None, false), wants(9, at(1), None));
    all([
        // Whatever was claimed when this node looked last.
        (claimed(9, grows.clone()), Runs(&[Cover, Extend])),
        (claimed(8, grows.clone()), Runs(&[Cover, Extend])),
        (with(Allocation::Unknown, grows.clone()), Asks(Question::Placement)),
        (with(Allocation::Absent, grows.clone()), Runs(&[Claim])),
        (volume(is(9, at(1), false), wants(9, at(1), None)), Runs(&[NoteResize])),
        // Whose status was lost is told to be there first.
        (
            Facts { status: StatusFacts::Absent, ..volume(is(9, at(1), false), wants(9, at(1), None)) },
            Runs(&[Announce(State::Active, None)]),
        ),
        (claimed(9, volume(is(9, at(1), false), wants(9, at(1), at(1)))), Settled),
        // Given up, and told; asked for again.
        (claimed(9, volume(is(4, at(1), true), failing(wants(9, at(1), at(1))))), Settled),
        (claimed(9, volume(is(4, at(1), true), wants(9, at(2), at(1)))), Runs(&[Cover, Extend])),
        // It grew since its node could read its record.
        (claimed(9, volume(is(9, at(1), false), failing(wants(9, at(1), at(1))))), Runs(&[NoteResize])),
        // With an older etcd.
        (claimed(9, volume(is(9, at(2), false), wants(4, at(1), at(2)))), Settled),
    ]);
    assert!(grows.is_being_resized() && !there().is_being_resized());
    // Where the node cannot read its record that is told, and then that nothing was done.
    let unread = Facts { record: RecordFacts::Unreadable, ..grows.clone() };
    let Next::Run(effects) = plan(&unread, &LIMITS).next else { panic!() };
    let [Announce(State::Active, Some(reason))] = effects.as_slice() else { panic!("{effects:?}") };
    let told = Facts { status: status(State::Active, Some(reason), false, false), ..unread };
    all([(told, Runs(&[Effect::Reread, NoteResize]))]);
    // And where somebody moved its allocation, that it cannot be.
    let Next::Run(effects) = plan(&with(Allocation::Elsewhere, grows.clone()), &LIMITS).next else {
        panic!()
    };
    assert!(
        matches!(effects.as_slice(), [Effect::GiveUpResize(why)] if why.contains("other")),
        "{effects:?}"
    );
    assert!(!Facts { observed: Observed::default(), ..grows }.is_being_resized(), "there is nothing to grow");
}

#[test]
fn a_volume_that_moves_is_handed_over_and_received_and_nothing_is_made_in_its_place() {
    let node = ec_model::NodeId::new(uuid::Uuid::from_u128(5));
    let to = |facts: Facts| Facts { handover: Some(Handover::To(node)), ..facts };
    let from = |facts: Facts| Facts { handover: Some(Handover::From(node)), ..facts };
    let gone = Facts { observed: Observed::default(), ..there() };
    let unknown = Facts {
        record: RecordFacts::Absent,
        status: StatusFacts::Absent,
        observed: Observed::default(),
        ..there()
    };
    let preparing = Facts { status: status(State::Preparing, None, false, false), ..unknown.clone() };
    let again = |kept: u64, asked: u64| {
        let at = |epoch: u64| Some(Edition { epoch, generation: 1 });
        let RecordFacts::Kept { started, rebuilt, metadata, root, rescued, size, rescue_begun, .. } =
            gone.record
        else {
            panic!("it has a record")
        };
        let intent = at(kept);
        let record =
            RecordFacts::Kept { started, rebuilt, metadata, root, rescued, size, rescue_begun, intent };
        from(Facts { record, edition: at(asked), ..gone.clone() })
    };
    all([
        (to(there()), Runs(&[HandOver])),
        // Killed after that, before its keys went.
        (to(gone.clone()), Runs(&[HandOver])),
        (to(Facts { record: RecordFacts::Absent, ..gone.clone() }), Runs(&[HandOver])),
        (from(unknown.clone()), Runs(&[Announce(State::Preparing, None)])),
        (from(preparing.clone()), Runs(&[Receive])),
        // Whatever placement says: somebody has written it.
        (from(with(Allocation::Absent, preparing.clone())), Runs(&[Receive])),
        // Received, and killed before its record was written.
        (from(Facts { observed: there().observed, ..preparing.clone() }), Runs(&[Receive])),
        // It came while nobody looked.
        (
            from(Facts { observed: there().observed, ..unknown.clone() }),
            Runs(&[Announce(State::Preparing, None)]),
        ),
        (from(Facts { record: RecordFacts::Absent, ..there() }), Runs(&[KeepRecord])),
        (from(there()), Settled),
        (
            from(gone.clone()),
            Tells(State::Error, "its disk is gone; the rest is kept until it is destroyed", &[]),
        ),
        // An older etcd had it here, and it comes from where it was.
        (again(1, 1), Tells(State::Error, "its disk is gone; the rest is kept until it is destroyed", &[])),
        (again(2, 1), Tells(State::Error, "its disk is gone; the rest is kept until it is destroyed", &[])),
        (again(1, 2), Runs(&[Announce(State::Preparing, None)])),
        (Facts { status: status(State::Error, None, false, false), ..again(1, 2) }, Runs(&[Receive])),
        (
            Facts { handover: None, ..again(1, 2) },
            Tells(State::Error, "its disk is gone; the rest is kept until it is destroyed", &[]),
        ),
        (Facts { observed: there().observed, ..again(1, 2) }, Runs(&[KeepIntent])),
    ]);
    let destroyed = Facts { wanted: Wanted::Destroyed, ..from(unknown) };
    let Next::Run(effects) = plan(&destroyed, &LIMITS).next else { panic!("it is swept") };
    assert!(effects.contains(&Effect::Bury), "what comes later goes, too: {effects:?}");
    // Where its disk is, its claim is given back.
    assert!(!effects.contains(&Effect::Release), "it may lie where it was still: {effects:?}");
    let gives_back = |facts: Facts| match plan(&Facts { wanted: Wanted::Destroyed, ..facts }, &LIMITS).next {
        Next::Run(effects) => effects.contains(&Effect::Release),
        other => panic!("{other:?}"),
    };
    assert!(gives_back(from(there())) && gives_back(there()) && gives_back(to(there())));
}

/// A machine that boots from a volume, which is there, or is not.
fn on_volume(facts: Facts, is_there: bool) -> Facts {
    Facts { on_volume: true, observed: Observed { volume: is_there, ..facts.observed }, ..facts }
}

#[test]
fn a_machine_is_built_on_the_volume_that_it_boots_from_once_that_is_there() {
    let new = |is_there: bool, domain: Option<RunState>, record: RecordFacts| {
        let facts = Facts {
            status: status(State::Preparing, None, false, false),
            observed: Observed { domain, ..Observed::default() },
            record,
            ..well()
        };
        on_volume(facts, is_there)
    };
    let unmarked = RecordFacts::Kept {
        started: false,
        rebuilt: None,
        metadata: 0,
        root: None,
        intent: None,
        rescued: None,
        size: UNMEASURED,
        rescue_begun: false,
    };
    let waits = || Tells(State::Preparing, "is to boot from is not there yet", &[]);
    let build =
        || Runs(&[PrepareDisk, Announce(State::Starting, None), Define, MarkStarted, Start, NoteStart]);
    let finish = || Runs(&[Announce(State::Starting, None), MarkStarted, Start, NoteStart]);
    let reason = "the volume that it is to boot from is not there yet";
    for record in [RecordFacts::Absent, unmarked] {
        let is_told = status(State::Preparing, Some(reason), false, false);
        all([
            (new(false, None, record), waits()),
            (Facts { status: is_told, ..new(false, None, record) }, Told),
            // Whose volume it may be: that it is there says nothing of this machine.
            (new(true, None, record), build()),
            (new(false, Some(RunState::NotStarted), record), waits()),
            (new(true, Some(RunState::NotStarted), record), finish()),
        ]);
    }
}

#[test]
fn what_boots_from_a_volume_is_kept_as_others_are_and_nothing_but_itself_is_swept() {
    let gone = "the disk of the volume that it boots from is gone";
    let down = || on_volume(seen(Some(RunState::Ended(End::ByHand)), true, false), false);
    all([
        (on_volume(well(), true), Settled),
        (on_volume(well(), false), Tells(State::Error, "was deleted under the running guest", &[])),
        (down(), Tells(State::Error, gone, &[])),
        (on_volume(seen(None, true, false), false), Tells(State::Error, gone, &[])),
        (
            on_volume(seen(None, true, false), true),
            Tells(State::Stopped, "its domain was gone from libvirt", &[Define]),
        ),
    ]);
    let unwanted = |domain, record| {
        let facts = Facts { wanted: Wanted::Nothing, status: StatusFacts::Absent, record, ..well() };
        on_volume(Facts { observed: Observed { domain, ..facts.observed }, ..facts }, true)
    };
    all([
        (unwanted(RUNS, KEPT), Tells(State::Unclaimed, "runs without a request", &[])),
        (unwanted(None, KEPT), Tells(State::Unclaimed, "whose disk is a volume", &[])),
        // It never ran: its volume is a workload of its own.
        (unwanted(None, RecordFacts::Absent), Runs(&[Inquire, RemoveDomain, DropRecord])),
    ]);
}

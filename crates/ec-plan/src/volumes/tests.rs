use ec_model::{Assigned, CopyOf, ImageRef, NodeId, Rebuild, Rebuilt, Workload, decode};
use serde_json::json;

use super::*;

const DISK: u128 = 1;
const MACHINE: u128 = 2;

fn id(number: u128) -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(number))
}

/// One of that kind on a node, and what its agent tells of it.
struct One {
    record: Instance,
    request: Request,
    status: Option<Status>,
}

impl One {
    fn new(number: u128, kind: Workload, state: State) -> Self {
        let (instance, node) = (id(number), NodeId::new(uuid::Uuid::from_u128(9)));
        let stamp = "1970-01-01T00:00:00Z";
        let kind = serde_json::to_value(kind).unwrap();
        let record = json!({
            "version": 2, "instance": instance, "kind": kind, "generation": 1, "created_at": stamp,
            "spec": {"query": "q"}, "assigned": {"node": node, "epoch": 1},
        });
        let request = json!({
            "version": 3, "instance": instance, "kind": kind, "epoch": 1, "generation": 1, "desired": "active",
            "created_at": stamp,
        });
        let status = json!({
            "version": 1, "instance": instance, "kind": kind, "node": node, "epoch": 1, "observed_generation": 1,
            "state": state, "since": stamp, "updated_at": stamp, "started_at": stamp,
        });
        let bytes = |value: serde_json::Value| value.to_string().into_bytes();
        Self {
            record: decode(&bytes(record)).unwrap(),
            request: decode(&bytes(request)).unwrap(),
            status: Some(decode(&bytes(status)).unwrap()),
        }
    }

    fn volume() -> Self {
        Self::new(DISK, Workload::Volume, State::Active)
    }

    fn machine(state: State) -> Self {
        Self::new(MACHINE, Workload::Machine, state)
    }

    fn sides(&self) -> Sides<'_> {
        Sides { record: &self.record, request: &self.request, status: self.status.as_ref() }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

fn has_as(volume: u128, device: &str) -> Attachment {
    Attachment { volume: id(volume), device: device.to_owned() }
}

fn attached(volume: &One, machine: &One, device: Option<&str>) -> Result<Attach, String> {
    attach(volume.sides(), machine.sides(), device)
}

fn taken(volume: &One, machine: &One, device: &str) -> Result<(), String> {
    detach(&volume.record, machine.sides(), &has_as(DISK, device))
}

#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, String>, why: &str) {
    let refusal = outcome.unwrap_err();
    assert!(refusal.contains(why), "{refusal}");
}

#[test]
fn a_machine_gets_a_volume_of_its_node_as_a_device_that_is_free() {
    for state in [State::Active, State::Stopped, State::Paused, State::Starting, State::Error] {
        let done = attached(&One::volume(), &One::machine(state), None);
        assert_eq!(done, Ok(Attach::Do(has_as(DISK, "vdb"))), "{state}");
    }
    let has = One::machine(State::Active).with(|one| one.record.volumes = vec![has_as(7, "vdb")]);
    assert_eq!(attached(&One::volume(), &has, None), Ok(Attach::Do(has_as(DISK, "vdc"))));
    assert_eq!(attached(&One::volume(), &has, Some("vdf")), Ok(Attach::Do(has_as(DISK, "vdf"))));
    refused(attached(&One::volume(), &has, Some("vdb")), "another volume as vdb");
    refused(attached(&One::volume(), &has, Some("sdb")), "`sdb` is no device");
    let full = has.with(|one| one.record.volumes = vec![has_as(7, "vdb"); Attachment::MOST]);
    refused(attached(&One::volume(), &full, None), "has 16 volumes");
}

#[test]
fn what_its_guest_has_all_the_same_is_given_again_as_what_that_has() {
    let told = |device: &str, has: Vec<Attachment>| {
        One::machine(State::Active).with(|one| {
            one.record.volumes = has;
            let told = one.status.as_mut().unwrap();
            told.volumes = vec![has_as(7, "vdx"), has_as(DISK, device)];
        })
    };
    let given = |machine: &One, device| attached(&One::volume(), machine, device).unwrap();
    assert_eq!(given(&told("vdk", vec![]), None), Attach::Do(has_as(DISK, "vdk")));
    assert_eq!(given(&told("vdk", vec![]), Some("vdb")), Attach::Do(has_as(DISK, "vdb")), "as is asked for");
    let anothers = told("vdk", vec![has_as(8, "vdk")]);
    assert_eq!(given(&anothers, None), Attach::Do(has_as(DISK, "vdb")), "another is to be that");
}

#[test]
fn asked_again_it_has_it_already() {
    let has = One::machine(State::Active).with(|one| one.record.volumes = vec![has_as(DISK, "vdd")]);
    for device in [None, Some("vdd")] {
        assert_eq!(attached(&One::volume(), &has, device), Ok(Attach::Already(has_as(DISK, "vdd"))));
    }
    refused(attached(&One::volume(), &has, Some("vdb")), "has it as vdd already");
}

#[test]
fn what_is_on_its_way_locked_or_elsewhere_is_refused_with_its_reason() {
    let (volume, machine) = (One::volume, || One::machine(State::Active));
    let locks = |one: &mut One| one.record.locked = Some("mine".to_owned());
    let ends = |one: &mut One| one.request.desired = Desired::Destroyed;
    let moves = |one: &mut One| {
        one.record.assigned = Some(Assigned { node: NodeId::new(uuid::Uuid::from_u128(8)), epoch: 1 });
    };
    refused(attached(&volume().with(locks), &machine(), None), "the volume cannot be changed");
    let several = |one: &mut One| {
        let copied = CopyOf { beside: vec![id(7)], ..CopyOf::disk(Workload::Machine, id(MACHINE)) };
        one.record.spec.image = ImageRef::copy_of(&copied);
    };
    refused(attached(&volume().with(several), &machine(), None), "it is a snapshot");
    let single = |one: &mut One| {
        one.record.spec.image = ImageRef::copy_of(&CopyOf::disk(Workload::Machine, id(MACHINE)));
    };
    assert!(
        attached(&volume().with(single), &machine(), None).is_ok(),
        "a copy of an instance's disk is a volume as others"
    );
    let snapshot = |one: &mut One| {
        single(one);
        one.record.spec.snapshot = true;
    };
    refused(attached(&volume().with(snapshot), &machine(), None), "it is a snapshot");
    let stamp = |second| jiff::Timestamp::from_second(second).unwrap();
    let anew = |told: Option<i64>| {
        move |one: &mut One| {
            one.request.rebuild = Some(Rebuild { wished_at: stamp(5), before: None });
            let rebuilt = told.map(|second| Rebuilt { wished_at: stamp(second), failed: None });
            one.status.as_mut().unwrap().rebuilt = rebuilt;
        }
    };
    for told in [None, Some(4)] {
        refused(attached(&volume().with(anew(told)), &machine(), None), "being made anew");
    }
    for told in [Some(5), Some(6)] {
        assert!(attached(&volume().with(anew(told)), &machine(), None).is_ok(), "{told:?}");
    }
    refused(attached(&volume(), &machine().with(locks), None), "the instance cannot be changed");
    refused(attached(&volume().with(ends), &machine(), None), "the volume is being destroyed");
    refused(attached(&volume(), &machine().with(ends), None), "the instance is being destroyed");
    refused(attached(&volume().with(moves), &machine(), None), "lies on the storage of node");
    refused(attached(&volume().with(|one| one.status = None), &machine(), None), "about to be made");
    let preparing = One::new(DISK, Workload::Volume, State::Preparing);
    refused(attached(&preparing, &machine(), None), "the volume is PREPARING");
    let suspends: fn(&mut One) = |one| one.request.power.power = ec_model::Power::Suspended;
    let rebuilds: fn(&mut One) = |one| {
        one.request.rebuild =
            Some(ec_model::Rebuild { wished_at: jiff::Timestamp::UNIX_EPOCH, before: None });
    };
    for (state, change, hint) in
        [(State::Suspended, suspends, "resume"), (State::Rebuilding, rebuilds, "ask again")]
    {
        let machine = One::machine(state).with(change);
        refused(attached(&volume(), &machine, None), hint);
        refused(taken(&volume(), &machine, "vdb"), hint);
    }
    assert_eq!(taken(&volume(), &machine(), "vdb"), Ok(()));
    refused(
        taken(&volume(), &machine().with(locks), "vdb"),
        "the instance cannot be changed: it is locked (mine)",
    );
    refused(
        taken(&volume().with(locks), &machine(), "vdb"),
        "the volume cannot be changed: it is locked (mine)",
    );
    refused(taken(&volume(), &machine(), "vda"), "it boots from that");
}

#[test]
fn a_volume_is_changed_while_its_machine_is_not_locked_but_by_who_locked_that() {
    let machine = |locked: Option<&str>| {
        One::machine(State::Stopped).with(|one| one.record.locked = locked.map(str::to_owned))
    };
    let judged = |locked, held| open(&machine(locked).record, held);
    assert_eq!(judged(None, None), Ok(()));
    assert_eq!(judged(Some("mine"), Some("mine")), Ok(()));
    for (locked, held) in [(Some("mine"), None), (Some(""), None), (Some("yours"), Some("mine"))] {
        refused(judged(locked, held), "has it: it is locked");
    }
    refused(judged(None, Some("mine")), "somebody else unlocked");
}

#[test]
fn what_is_there_is_made_anew_and_what_is_gone() {
    let of = |state, reason: Option<&str>| {
        let one = One::new(DISK, Workload::Volume, state);
        let status = one.status.map(|status| Status { reason: reason.map(str::to_owned), ..status });
        renewable(status.as_ref())
    };
    assert_eq!(of(State::Active, None), Ok(()));
    let gone = format!("its disk is gone{}", crate::status::WITHOUT_DISK);
    assert_eq!(of(State::Error, Some(&gone)), Ok(()));
    refused(of(State::Error, Some("no such image")), "the volume is ERROR: no such image");
    refused(of(State::Error, None), "the volume is ERROR");
    refused(of(State::Preparing, Some(&gone)), "the volume is PREPARING");
    refused(renewable(None), "about to be made");
}

#[test]
fn a_volume_is_given_within_its_project() {
    let of = |project: &'static str| move |one: &mut One| one.record.project = project.to_owned();
    let machine = One::machine(State::Active).with(of("p"));
    assert!(attached(&One::volume().with(of("p")), &machine, None).is_ok());
    refused(
        attached(&One::volume().with(of("q")), &machine, None),
        "of project `q`, and the instance of `p`",
    );
}

#[test]
fn a_new_machine_boots_from_a_volume_of_its_project_that_is_there() {
    let boots = |one: One| given(one.sides(), "p");
    let of_project =
        |change: fn(&mut One)| One::volume().with(|one| one.record.project = "p".to_owned()).with(change);
    assert_eq!(boots(of_project(|_| ())), Ok(()));
    refused(boots(of_project(|one| one.record.project = "q".to_owned())), "of project `q`");
    refused(boots(of_project(|one| one.record.locked = Some(String::new()))), "locked");
    refused(boots(of_project(|one| one.status = None)), "about to be made");
    refused(boots(of_project(|one| one.request.desired = Desired::Destroyed)), "being destroyed");
}

#[test]
fn a_machine_has_a_volume_while_anything_says_so() {
    let with = |record: bool, request: bool, status: bool| {
        let list = |says: bool| if says { vec![has_as(DISK, "vdb")] } else { vec![has_as(7, "vdc")] };
        let one = One::machine(State::Active).with(|one| {
            (one.record.volumes, one.request.volumes) = (list(record), list(request));
            if let Some(told) = &mut one.status {
                told.volumes = list(status);
            }
        });
        held(id(DISK), Some(&one.record), Some(&one.request), one.status.as_ref()).is_some()
    };
    assert!(with(true, false, false) && with(false, true, false) && with(false, false, true));
    assert!(!with(false, false, false));
    assert_eq!(held(id(DISK), None, None, None), None);
}

#[test]
fn what_ran_and_what_is_there_is_copied() {
    let of = |one: &One| copied(one.record.kind, one.status.as_ref());
    assert_eq!(of(&One::volume()), Ok(()));
    refused(of(&One::new(DISK, Workload::Volume, State::Preparing)), "the volume is PREPARING");
    let unstarted = |one: &mut One| one.status.as_mut().unwrap().started_at = None;
    for state in [State::Active, State::Stopped, State::Error, State::Starting] {
        assert_eq!(of(&One::machine(state)), Ok(()), "{state}");
    }
    assert_eq!(of(&One::machine(State::Active).with(unstarted)), Ok(()));
    for state in [State::Preparing, State::Starting, State::Error] {
        refused(of(&One::machine(state).with(unstarted)), "never ran yet");
    }
    refused(of(&One::machine(State::Active).with(|one| one.status = None)), "never ran yet");
}

#[test]
fn what_nobody_is_at_and_what_stands_on_no_image_moves() {
    assert_eq!(movable(One::volume().sides()), Ok(()));
    let made_of = |url: &str| {
        One::volume()
            .with(|one| one.record.spec.image = ImageRef { url: url.to_owned(), ..ImageRef::default() })
    };
    let copy = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, id(7)));
    assert_eq!(movable(made_of(&copy.url).sides()), Ok(()), "a copy stands on nothing");
    let several = CopyOf { beside: vec![id(8)], ..CopyOf::disk(Workload::Machine, id(7)) };
    for (one, why) in [
        (made_of("https://example.org/debian.qcow2"), "it stands on an image"),
        (made_of(&ImageRef::copy_of(&several).url), "a snapshot of several disks"),
        // A copy was wished in the place of what stands on one, and failed.
        (
            made_of(&copy.url).with(|one| {
                let before = Some(ImageRef::at("https://example.org/debian.qcow2"));
                let wished_at = jiff::Timestamp::UNIX_EPOCH;
                one.request.rebuild = Some(Rebuild { wished_at, before });
                let failed = Some("there is no room".to_owned());
                one.status.as_mut().unwrap().rebuilt = Some(Rebuilt { wished_at, failed });
            }),
            "it stands on an image",
        ),
        (One::volume().with(|one| one.request.generation = 2), "is being changed"),
        (
            One::volume().with(|one| one.status.as_mut().unwrap().doing = Some("growing it".into())),
            "is being changed",
        ),
        (One::volume().with(|one| one.status = None), "is about to be made"),
        (One::new(DISK, Workload::Volume, State::Error), "the volume is ERROR"),
        (One::volume().with(|one| one.request.desired = Desired::Destroyed), "is being destroyed"),
        (One::volume().with(|one| one.record.locked = Some("mine".into())), "cannot be changed"),
    ] {
        refused(movable(one.sides()), why);
    }
}

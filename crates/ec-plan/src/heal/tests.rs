use ec_model::{
    Extent, ImageRef, InstanceId, Intent, NodeId, Power, PowerWish, Rebuild, Rebuilt, Rescued, Resized, Spec,
    encode,
};
use jiff::Timestamp;

use super::*;

fn id() -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(1))
}

fn node(number: u128) -> NodeId {
    NodeId::new(uuid::Uuid::from_u128(number))
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn amounts(vcpus: u64) -> Resources {
    [("VCPU", vcpus), ("MEMORY_MB", 128), ("CUSTOM_X", 1)]
        .map(|(class, amount)| (class.to_owned(), amount))
        .into()
}

fn image(name: &str) -> ImageRef {
    ImageRef::at(format!("file:///{name}"))
}

/// As it was wanted on node 1, at its seventh change: stopped, labelled and locked.
fn record() -> Instance {
    Instance {
        project: "p".to_owned(),
        user: "u".to_owned(),
        name: Some("web".to_owned()),
        labels: [("a".to_owned(), "b".to_owned())].into(),
        locked: Some("why".to_owned()),
        spec: Spec {
            query: "resources=VCPU:1,MEMORY_MB:128,CUSTOM_X:1&required=T".to_owned(),
            resources: amounts(1),
            image: image("new"),
            keys: Vec::new(),
            metadata: std::collections::BTreeMap::new(),
            user_data_bytes: Some(3),
            token_required: false,
            snapshot: false,
        },
        power: PowerWish { power: Power::Stopped, generation: 5, grace_seconds: 9, anew: true },
        assigned: Some(Assigned { node: node(1), epoch: 2 }),
        generation: 7,
        ..of_request(&blank())
    }
}

fn blank() -> Request {
    Request {
        instance: id(),
        epoch: 2,
        generation: 7,
        desired: Desired::Active,
        power: PowerWish::default(),
        restart: ec_model::Restart::Always,
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
        created_at: at(0),
    }
}

#[test]
fn what_is_asked_for_and_has_no_record_is_asked_for_as_before() {
    let asked = Request { handover: Some(ec_model::Handover::To(node(2))), ..request() };
    let made = made_of_request(Doc::new(asked.clone()), node(1), None);
    let member = made_of_request(Doc::new(asked.clone()), node(1), Some("g".to_owned()));
    assert_eq!(member.record.record.group.as_deref(), Some("g"), "its place there stayed");
    assert_eq!(member.notes, ["its labels and whether it was locked are not known"]);
    let next = Request { generation: asked.generation + 1, ..asked };
    assert_eq!(made.request.record, next, "but for its generation");
    let known = Instance { labels: Default::default(), locked: None, generation: 8, ..record() };
    assert_eq!(made.record.record, Instance { restart: next.restart, ..known });
    assert_eq!(made.notes, ["its labels, its group and whether it was locked are not known"]);
}

fn request() -> Request {
    let of = record();
    let (name, project, user, power) = (of.name, of.project, of.user, of.power);
    Request { name, project, user, power, restart: of.restart, spec: Some(of.spec), ..blank() }
}

fn held(request: &Request, record: Option<&Instance>) -> Held {
    let record = record.map(encode);
    Held {
        instance: id(),
        node: node(1),
        intent: Intent::of(&encode(request), record.as_deref()).unwrap(),
        rebuilt: None,
        rescued: None,
        resized: None,
        resources: amounts(1),
        user_data_bytes: Some(3),
    }
}

fn unclaimed() -> Status {
    let text = serde_json::json!({
        "version": 1, "instance": id(), "node": node(1), "epoch": 2, "observed_generation": 7, "power_generation": 0,
        "state": "UNCLAIMED", "since": at(0), "updated_at": at(0),
    });
    ec_model::decode(text.to_string().as_bytes()).unwrap()
}

fn heal(held: &Held) -> Brought {
    brought(held, Some(&unclaimed()), None).unwrap()
}

#[test]
fn what_is_brought_back_by_its_request_alone_is_in_the_group_in_which_its_place_stayed() {
    assert!(!heal(&held(&request(), Some(&record()))).may_be_in_a_group());
    let mut healed = heal(&held(&request(), None));
    assert!(healed.may_be_in_a_group());
    assert_eq!(healed.notes, ["its labels, its group and whether it was locked are not known"]);
    healed.in_group("g".to_owned());
    assert_eq!(healed.record.record.group.as_deref(), Some("g"));
    assert_eq!(healed.notes, ["its labels and whether it was locked are not known"]);
}

#[test]
fn what_is_brought_back_is_what_was_wanted_and_nothing_is_left_to_be_done() {
    let healed = heal(&held(&request(), Some(&record())));
    let power = PowerWish { generation: 0, anew: false, ..record().power };
    let wanted = Instance { generation: 8, power: power.clone(), ..record() };
    assert_eq!(healed.record.record, wanted);
    assert_eq!(healed.request.record, Request { generation: 8, power, ..request() });
    assert_eq!(healed.notes, [""; 0]);
    // A wish for power that the status tells of was carried out.
    let told = Status { power_generation: 5, ..unclaimed() };
    let healed = brought(&held(&request(), Some(&record())), Some(&told), None).unwrap();
    assert_eq!(healed.request.record.power.generation, 5);
}

#[test]
fn what_its_node_does_not_tell_of_as_its_own_now_is_left() {
    let of = held(&request(), Some(&record()));
    let left = |status: Option<Status>, recorded: Option<Instance>| {
        brought(&of, status.as_ref(), recorded.map(Doc::new).as_ref()).map(|_| ())
    };
    for status in [
        None,
        Some(Status { state: State::Active, ..unclaimed() }),
        Some(Status { observed_generation: 6, ..unclaimed() }),
        Some(Status { epoch: 1, ..unclaimed() }),
    ] {
        assert!(left(status, None).is_err());
    }
    let on = |number, epoch| {
        let assigned = Some(Assigned { node: node(number), epoch });
        left(Some(unclaimed()), Some(Instance { assigned, ..record() }))
    };
    assert!(on(1, 3).is_err() && on(2, 2).is_err() && on(2, 3).is_err());
    assert!(on(1, 2).is_ok() && on(2, 1).is_ok());
    let gone = held(&Request { desired: Desired::Destroyed, ..request() }, None);
    assert!(brought(&gone, Some(&unclaimed()), None).is_err());
    let other = Instance { instance: InstanceId::new(uuid::Uuid::from_u128(9)), ..record() };
    assert!(brought(&held(&request(), Some(&other)), Some(&unclaimed()), None).is_err());
}

#[test]
fn of_two_records_the_newer_of_the_same_placement_counts() {
    let of = held(&request(), Some(&record()));
    let named = |generation, assigned| {
        let name = Some("other".to_owned());
        let recorded = Doc::new(Instance { name, generation, assigned, ..record() });
        let healed = brought(&of, Some(&unclaimed()), Some(&recorded)).unwrap();
        assert_eq!(healed.request.record.name, healed.record.record.name);
        assert_eq!(healed.record.record.assigned, record().assigned);
        (healed.record.record.name.unwrap(), healed.record.record.generation)
    };
    let here = record().assigned;
    assert_eq!(named(9, here), ("other".to_owned(), 10));
    assert_eq!(named(6, here), ("web".to_owned(), 8));
    assert_eq!(named(9, None), ("web".to_owned(), 10), "it was being placed when the backup was made");
    let unseen = heal(&held(&request(), None));
    assert_eq!((unseen.record.record.name.as_deref(), unseen.notes.len()), (Some("web"), 1));
    assert_eq!(unseen.record.record.locked, None);
}

#[test]
fn a_disk_that_was_not_made_anew_stays_and_one_that_was_is_known() {
    let wish = Rebuild { wished_at: at(5), before: Some(image("old")) };
    let asked = Request { rebuild: Some(wish.clone()), ..request() };
    let came = |second: Option<i64>| {
        let rebuilt = second.map(|second| Rebuilt { wished_at: at(second), failed: None });
        let healed = heal(&Held { rebuilt, ..held(&asked, Some(&record())) });
        assert_eq!(healed.request.record.spec.as_ref(), Some(&healed.record.record.spec));
        (healed.request.record.rebuild, healed.record.record.spec.image, healed.notes.len())
    };
    assert_eq!(came(None), (None, image("old"), 1));
    assert_eq!(came(Some(4)), (None, image("old"), 1));
    assert_eq!(came(Some(5)), (Some(wish), image("new"), 0));
}

#[test]
fn it_boots_on_from_the_disk_that_it_boots_from() {
    let wish = |second| Rescue { wished_at: at(second), image: image("rescue") };
    let came = |wished: Option<i64>, noted: Option<(i64, bool)>| {
        let asked = Request { rescue: wished.map(wish), ..request() };
        let rescued = noted.map(|(second, failed)| Rescued {
            wished_at: at(second),
            failed: failed.then(|| "no image".to_owned()),
        });
        let healed = heal(&Held { rescued, ..held(&asked, Some(&record())) });
        let rescue = healed.request.record.rescue.map(|rescue| rescue.wished_at.as_second());
        (rescue, healed.notes.len())
    };
    assert_eq!(came(None, None), (None, 0));
    assert_eq!(came(Some(5), Some((5, false))), (Some(5), 0));
    assert_eq!(came(Some(5), Some((5, true))), (Some(5), 0));
    assert_eq!(came(Some(5), None), (None, 1), "it was not begun");
    assert_eq!(came(None, Some((5, false))), (Some(5), 1), "it was to end");
    assert_eq!(came(Some(6), Some((5, false))), (Some(5), 1), "it was to begin anew");
    assert_eq!(came(None, Some((5, true))), (None, 0));
}

#[test]
fn it_stays_as_large_as_it_is() {
    let sized = |vcpus, before: Option<u64>| {
        let extent = |vcpus| Extent { query: format!("q{vcpus}"), resources: amounts(vcpus) };
        let spec = Spec { resources: amounts(vcpus), ..record().spec };
        Instance { spec, before: before.map(extent), ..record() }
    };
    let came = |record: Instance, wished: Option<i64>, noted: Option<i64>, is: u64| {
        let resize = wished.map(|second| Resize { wished_at: at(second) });
        let asked = Request { resize, spec: Some(record.spec.clone()), ..request() };
        let of = |second| Resized { wished_at: at(second), failed: None, resources: amounts(is) };
        let of = Held { resized: noted.map(of), resources: amounts(is), ..held(&asked, Some(&record)) };
        let healed = heal(&of);
        let spec = healed.record.record.spec;
        assert_eq!(Size::of(&spec.resources), Size::of(&amounts(is)));
        (healed.request.record.resize.map(|wish| wish.wished_at.as_second()), spec.query, healed.notes.len())
    };
    let asked = record().spec.query;
    assert_eq!(came(sized(1, None), None, None, 1), (None, asked.clone(), 0));
    assert_eq!(came(sized(2, Some(1)), Some(5), Some(5), 2), (Some(5), asked, 0));
    assert_eq!(came(sized(2, Some(1)), Some(5), None, 1), (None, "q1".to_owned(), 1));
    // It had been given another before, and was to be given a third, or to go back.
    let of_two = "resources=MEMORY_MB:128,CUSTOM_X:1,VCPU:2&required=T".to_owned();
    assert_eq!(came(sized(3, Some(1)), Some(6), Some(5), 2), (Some(5), of_two.clone(), 1));
    assert_eq!(came(sized(1, None), Some(6), Some(5), 2), (Some(5), of_two, 1));
    // Made as large as was claimed for a wish that its node never heard of.
    assert_eq!(
        came(sized(1, None), None, None, 2),
        (None, "resources=MEMORY_MB:128,CUSTOM_X:1,VCPU:2&required=T".to_owned(), 1)
    );
    // Each class in the group that asks for it.
    let mut grouped = sized(1, None);
    grouped.spec.query = "resources=MEMORY_MB:128&resources1=VCPU:1&required1=T".to_owned();
    let of_two = "resources=MEMORY_MB:128&resources1=VCPU:2&required1=T".to_owned();
    assert_eq!(came(grouped, Some(6), Some(5), 2), (Some(5), of_two, 1));
}

#[test]
fn a_volume_is_still_to_grow() {
    let spec = Spec { resources: amounts(2), ..record().spec };
    let before = Extent { query: "q1".to_owned(), resources: amounts(1) };
    let kind = Workload::Volume;
    let record = Instance { kind, spec: spec.clone(), before: Some(before), ..record() };
    let resize = Some(Resize { wished_at: at(5) });
    let asked = Request { kind, resize, spec: Some(spec.clone()), ..request() };
    let healed = heal(&Held { resources: amounts(1), ..held(&asked, Some(&record)) });
    assert_eq!((healed.record.record.spec, healed.request.record.resize), (spec, resize));
    assert_eq!((healed.record.record.before, healed.notes.len()), (record.before, 0));
}

#[test]
fn a_wish_that_its_node_never_heard_of_is_left_out_of_the_record_too() {
    let extent = |vcpus| Extent { query: format!("q{vcpus}"), resources: amounts(vcpus) };
    let wished = |vcpus, before: Option<u64>, image: ImageRef| {
        let Extent { query, resources } = extent(vcpus);
        let spec = Spec { query, resources, image, ..record().spec };
        Instance {
            spec,
            before: before.map(extent),
            generation: 8,
            labels: [("c".to_owned(), "d".to_owned())].into(),
            ..record()
        }
    };
    let came = |is: &Instance, asked: Request, recorded: Instance, resources: u64| {
        let asked = Request { spec: Some(is.spec.clone()), ..asked };
        let resized = asked.resize.map(|wish| Resized {
            wished_at: wish.wished_at,
            failed: None,
            resources: amounts(resources),
        });
        let of = Held { resized, resources: amounts(resources), ..held(&asked, Some(is)) };
        let healed = brought(&of, Some(&unclaimed()), Some(&Doc::new(recorded.clone()))).unwrap();
        let (record, request) = (healed.record.record, healed.request.record);
        assert_eq!(request.spec.as_ref(), Some(&record.spec));
        assert_eq!(record.labels, recorded.labels, "what is not done by its node is as it is recorded");
        let vcpus = record.spec.resources["VCPU"];
        (vcpus, record.before.map(|before| before.resources["VCPU"]), record.spec.image, healed.notes.len())
    };
    let (old, new) = (image("new"), image("newer"));
    // Nobody ever wished it another size, and the first who does is not heard of.
    assert_eq!(came(&record(), request(), wished(2, Some(1), old.clone()), 1), (1, None, old.clone(), 1));
    assert_eq!(came(&record(), request(), wished(1, None, new.clone()), 1), (1, None, old.clone(), 1));
    assert_eq!(came(&record(), request(), wished(2, Some(1), new), 1), (1, None, old.clone(), 2));
    // It has another size; what is not heard of is that it is to go back.
    let has = Instance { generation: 7, labels: record().labels, ..wished(2, Some(1), old.clone()) };
    let asked = Request { resize: Some(Resize { wished_at: at(5) }), ..request() };
    assert_eq!(came(&has, asked.clone(), wished(1, None, old.clone()), 2), (2, Some(1), old.clone(), 1));
    // Confirming is nothing that its node does.
    assert_eq!(came(&has, asked, wished(2, None, old.clone()), 2), (2, None, old, 0));
}

#[test]
fn what_cannot_be_had_any_more_is_left_out_and_told() {
    let mut healed = heal(&held(&request(), Some(&Instance { group: Some("g".to_owned()), ..record() })));
    healed.without_name("x");
    healed.without_group("it is gone");
    healed.without_user_data();
    let Brought { record, request, notes } = healed;
    assert_eq!((record.record.name, request.record.name, record.record.group), (None, None, None));
    assert_eq!(record.record.spec.user_data_bytes, None);
    assert_eq!(request.record.spec.unwrap().user_data_bytes, None);
    assert_eq!(notes.len(), 3);
    let other = Held { user_data_bytes: None, ..held(&self::request(), Some(&self::record())) };
    let healed = heal(&other);
    assert_eq!((healed.record.record.spec.user_data_bytes, healed.notes.len()), (None, 1));
}

#[test]
fn whoever_looked_at_it_is_not_answered_again() {
    let looked = Request {
        access: Some(AccessWish { kind: ec_model::AccessKind::Log, generation: 9, request_id: None }),
        ..request()
    };
    assert_eq!(heal(&held(&looked, None)).request.record.access, None);
    let answer = ec_model::Access {
        kind: ec_model::AccessKind::Vnc,
        generation: 4,
        ticket: None,
        reason: None,
        expires_at: at(0),
    };
    let told = Status { access: Some(answer), ..unclaimed() };
    let healed = brought(&held(&looked, None), Some(&told), None).unwrap();
    assert_eq!(
        healed.request.record.access,
        Some(AccessWish { kind: ec_model::AccessKind::Vnc, generation: 4, request_id: None })
    );
}

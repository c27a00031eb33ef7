use ec_model::{Resize, Resized, State, decode};
use jiff::Timestamp;
use serde_json::json;

use super::*;

const UUID: &str = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
const EPOCH: &str = "1970-01-01T00:00:00Z";

fn amounts(vcpus: u64, disk: u64) -> Resources {
    let all = [("VCPU", vcpus), ("MEMORY_MB", 128), ("DISK_GB", disk)];
    all.into_iter()
        .filter(|(_, amount)| *amount > 0)
        .map(|(class, amount)| (class.to_owned(), amount))
        .collect()
}

fn extent(vcpus: u64, disk: u64) -> Extent {
    Extent { query: format!("resources=VCPU:{vcpus},DISK_GB:{disk}"), resources: amounts(vcpus, disk) }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// It is to be so large, and was so before; that was wished at this second.
fn wished(is: Extent, before: Option<Extent>, second: Option<i64>) -> (Instance, Request) {
    let power = json!({"power": "running", "generation": 1});
    let record = json!({"version": 1, "instance": UUID, "generation": 1, "created_at": EPOCH, "power": power,
        "spec": {"query": is.query, "resources": is.resources, "image": {"url": "file:///x"}}});
    let request = json!({"version": 1, "instance": UUID, "epoch": 1, "generation": 1, "desired": "active",
        "created_at": EPOCH, "power": power});
    let instance: Instance = decode(record.to_string().as_bytes()).unwrap();
    let request: Request = decode(request.to_string().as_bytes()).unwrap();
    let resize = second.map(|second| Resize { wished_at: at(second) });
    (Instance { before, ..instance }, Request { resize, ..request })
}

fn status(state: State, told: Option<(i64, bool, Resources)>) -> Status {
    let text = json!({"version": 1, "instance": UUID, "node": UUID, "state": "ACTIVE", "since": EPOCH,
        "updated_at": EPOCH, "started_at": EPOCH, "power_generation": 1});
    let resized = told.map(|(second, failed, resources)| Resized {
        wished_at: at(second),
        failed: failed.then(|| "why".to_owned()),
        resources,
    });
    Status { state, resized, ..decode(text.to_string().as_bytes()).unwrap() }
}

#[test]
fn a_wish_for_a_size_is_under_way_until_it_is_told_and_then_until_it_is_confirmed_or_reverted() {
    let of = |before: Option<Extent>, wish, told| {
        let (instance, request) = wished(extent(2, 1), before, wish);
        resized(&instance, &request, &status(State::Active, told))
    };
    let (old, new) = (|| Some(extent(1, 1)), || amounts(2, 1));
    assert_eq!(of(None, None, None), None);
    assert_eq!(of(old(), Some(1), None), Some(Resizing::UnderWay));
    assert_eq!(of(None, Some(2), Some((1, false, new()))), Some(Resizing::UnderWay), "it is reverted");
    assert_eq!(of(old(), Some(1), Some((1, false, new()))), Some(Resizing::Done));
    assert_eq!(of(old(), Some(1), Some((1, true, new()))), Some(Resizing::Failed));
    assert_eq!(of(None, Some(1), Some((1, false, new()))), None);
}

#[test]
fn what_came_of_a_wish_is_awaited_until_that_wish_or_a_later_one_is_told_of() {
    for (wish, told, awaited) in [
        (None, None, false),
        (None, Some(1), false),
        (Some(2), None, true),
        (Some(2), Some(1), true),
        (Some(2), Some(2), false),
        (Some(2), Some(3), false),
    ] {
        let (_, request) = wished(extent(1, 2), None, wish);
        let status = status(State::Active, told.map(|second| (second, false, amounts(1, 2))));
        assert_eq!(under_way(&request, Some(&status)), awaited, "{wish:?} {told:?}");
    }
    assert!(under_way(&wished(extent(1, 2), None, Some(1)).1, None));
}

#[test]
fn people_are_told_to_verify_what_rests_with_its_new_size() {
    let told = |agents, done: bool| {
        let (instance, request) = wished(extent(2, 1), Some(extent(1, 1)), Some(1));
        crate::verbs::shown(&instance, &request, &status(agents, done.then(|| (1, false, amounts(2, 1)))))
    };
    for rests in [State::Active, State::Stopped] {
        assert_eq!((told(rests, true), told(rests, false)), (State::VerifyResize, State::Resizing));
    }
    assert_eq!(
        (told(State::Starting, true), told(State::Starting, false)),
        (State::Starting, State::Resizing)
    );
    assert_eq!((told(State::Error, true), told(State::Error, false)), (State::Error, State::Error));
}

#[test]
fn what_is_claimed_is_the_greater_until_nobody_can_want_it_any_more() {
    let needs = |is, before: Option<Extent>, wish, told| {
        let (instance, request) = wished(is, before, wish);
        needed(&instance, &request, Some(&status(State::Active, told)))
    };
    let old = || Some(extent(1, 2));
    assert_eq!(needs(extent(1, 2), None, None, None), Some(amounts(1, 2)));
    assert_eq!(needs(extent(2, 3), old(), Some(1), None), None, "it is on its way");
    for failed in [false, true] {
        let told = Some((1, failed, amounts(1, 3)));
        assert_eq!(needs(extent(2, 3), old(), Some(1), told), Some(amounts(2, 3)), "failed: {failed}");
    }
    let told = |resources| Some((1, false, resources));
    assert_eq!(needs(extent(2, 3), None, Some(1), told(amounts(2, 3))), Some(amounts(2, 3)), "confirmed");
    assert_eq!(needs(extent(1, 3), None, Some(1), told(amounts(1, 3))), Some(amounts(1, 3)), "reverted");
    assert_eq!(
        needs(extent(1, 1), None, Some(1), told(amounts(1, 3))),
        Some(amounts(1, 3)),
        "its disk stays"
    );
    let unread = Some((1, true, Resources::new()));
    assert_eq!(needs(extent(1, 2), None, Some(1), unread), None, "its node could not read how large it is");
    let (instance, request) = wished(extent(1, 2), None, Some(1));
    assert_eq!(needed(&instance, &request, None), None, "nobody tells of it");
    let (instance, request) = wished(extent(1, 2), None, None);
    assert_eq!(needed(&instance, &request, None), Some(amounts(1, 2)));
    assert_eq!(needed(&instance, &Request { desired: Desired::Destroyed, ..request }, None), None);
    let (unmeasured, request) = wished(Extent { resources: Resources::new(), ..extent(1, 1) }, None, None);
    assert_eq!(needed(&unmeasured, &request, None), None);
}

#[test]
fn of_a_volume_that_could_not_grow_nobody_needs_more_than_it_has() {
    let gigabytes = |gb| Resources::from([(DISK.to_owned(), gb)]);
    let larger = Extent { query: String::new(), resources: gigabytes(40) };
    let (mut volume, request) = wished(larger, None, Some(2));
    volume.kind = Workload::Volume;
    let needs = |told| needed(&volume, &request, Some(&status(State::Active, told)));
    assert_eq!(needs(Some((2, true, gigabytes(10)))), Some(gigabytes(10)));
    // It grew in part, or the call came to its end all the same.
    assert_eq!(needs(Some((2, true, gigabytes(25)))), Some(gigabytes(25)));
    assert_eq!(needs(Some((2, false, gigabytes(40)))), Some(gigabytes(40)));
    for under_way in [None, Some((1, true, gigabytes(10)))] {
        assert_eq!(needs(under_way), None, "it may be about to grow");
    }
    assert_eq!(needs(Some((2, true, Resources::new()))), None, "its node could not read how large it is");
}

#[test]
fn a_disk_never_shrinks_and_goes_on_as_large_as_it_was_grown() {
    let judged = |is: Extent, before: Option<Extent>, told, asked: Extent| {
        let (instance, request) = wished(is, before, Some(1));
        crate::verbs::judge(&Verb::Resize(asked), &instance, &request, Some(&status(State::Active, told)))
    };
    let plain = |asked| judged(extent(1, 2), None, Some((1, false, amounts(1, 2))), asked);
    assert!(matches!(plain(extent(1, 2)), Verdict::Already(_)));
    let (instance, request) = wished(extent(1, 2), None, Some(1));
    let paused = status(State::Paused, Some((1, false, amounts(1, 2))));
    let of_paused = crate::verbs::judge(&Verb::Resize(extent(1, 2)), &instance, &request, Some(&paused));
    assert!(
        matches!(of_paused, Verdict::Refuse(why) if why.contains("unpause")),
        "the table tells what helps"
    );
    // It could not go back to what it was before, and is larger than its record says.
    let larger = judged(extent(1, 2), None, Some((1, true, amounts(2, 2))), extent(1, 2));
    assert_eq!(larger, Verdict::Do(Wish::Resize(extent(1, 2))));
    assert_eq!(plain(extent(2, 2)), Verdict::Do(Wish::Resize(extent(2, 2))));
    assert_eq!(plain(extent(1, 3)), Verdict::Do(Wish::Resize(extent(1, 3))));
    let refused = |verdict| match verdict {
        Verdict::Refuse(why) => why,
        other => panic!("{other:?}"),
    };
    let why = refused(plain(extent(2, 1)));
    assert_eq!(
        why,
        "its disk has 2 GB, of which 1 are asked for, and a disk never shrinks: ask for DISK_GB:2 at least"
    );
    assert!(refused(plain(extent(2, 0))).contains("none is asked for"));
    // What failed may have grown its disk.
    let failed = |asked| judged(extent(3, 4), Some(extent(1, 1)), Some((1, true, amounts(1, 3))), asked);
    assert!(refused(failed(extent(2, 2))).contains("DISK_GB:3"));
    assert!(matches!(failed(extent(2, 3)), Verdict::Do(_)));
    assert!(matches!(failed(extent(3, 4)), Verdict::Do(_)), "the same again");

    let back = |told| {
        let (instance, _) = wished(extent(3, 4), Some(extent(1, 1)), Some(1));
        reverted(&instance, Some(&status(State::Active, Some((1, false, told)))))
    };
    assert_eq!(back(amounts(3, 1)), Some(extent(1, 1)));
    assert_eq!(back(amounts(3, 4)), Some(extent(1, 4)));
    let (instance, _) = wished(extent(1, 1), None, None);
    assert_eq!(reverted(&instance, None), None);
}

#[test]
fn a_resize_is_confirmed_when_it_is_done_and_reverted_also_where_it_failed() {
    let judged = |verb: &Verb, state, before: Option<Extent>, told| {
        let (instance, request) = wished(extent(2, 1), before, Some(1));
        crate::verbs::judge(verb, &instance, &request, Some(&status(state, told)))
    };
    let old = || Some(extent(1, 1));
    let told = |failed| Some((1, failed, amounts(2, 1)));
    for (verb, wish) in [(Verb::Confirm, Wish::Confirm), (Verb::Revert, Wish::Revert)] {
        assert_eq!(judged(&verb, State::Active, old(), told(false)), Verdict::Do(wish));
        assert!(matches!(judged(&verb, State::Active, old(), None), Verdict::Refuse(_)), "{verb:?}");
        assert!(matches!(judged(&verb, State::Active, None, told(false)), Verdict::Already(_)), "{verb:?}");
    }
    let (not_so, unseen) = ("has not its new size", "it is in ERROR; ask again when it is not");
    for (state, failed, reason) in
        [(State::Active, true, not_so), (State::Error, false, unseen), (State::Error, true, not_so)]
    {
        assert_eq!(judged(&Verb::Revert, state, old(), told(failed)), Verdict::Do(Wish::Revert));
        let Verdict::Refuse(why) = judged(&Verb::Confirm, state, old(), told(failed)) else { panic!() };
        assert!(why.contains(reason), "{why}");
    }
    let Verdict::Refuse(why) = judged(&Verb::Stop(0), State::Active, old(), told(false)) else { panic!() };
    assert!(why.contains("`eschedule resize --confirm`"), "{why}");
    assert!(matches!(judged(&Verb::Stop(0), State::Active, old(), told(true)), Verdict::Do(_)));
    // To go back failed, where what it was before is not kept any more.
    for state in [State::Active, State::Stopped, State::Error] {
        assert_eq!(judged(&Verb::Revert, state, None, told(true)), Verdict::Do(Wish::Revert), "{state}");
        assert!(matches!(judged(&Verb::Revert, state, None, told(false)), Verdict::Already(_)), "{state}");
        assert!(matches!(judged(&Verb::Confirm, state, None, told(true)), Verdict::Already(_)), "{state}");
    }
    let saved = judged(&Verb::Revert, State::Suspended, None, told(true));
    assert!(!matches!(saved, Verdict::Do(_)), "{saved:?}");
}

#[test]
fn more_is_taken_from_the_providers_that_it_is_taken_from() {
    let [root, disks] = [1u128, 2].map(|number| NodeId::new(uuid::Uuid::from_u128(number)));
    let of = |pairs: &[(&str, u64)]| -> Resources {
        pairs.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect()
    };
    let held: Allocations =
        [(root, of(&[("VCPU", 1), ("MEMORY_MB", 128)])), (disks, of(&[("DISK_GB", 1)]))].into();
    let wanted = of(&[("VCPU", 2), ("DISK_GB", 3), ("CUSTOM_X", 1)]);
    let larger: Allocations =
        [(root, of(&[("VCPU", 2), ("MEMORY_MB", 128), ("CUSTOM_X", 1)])), (disks, of(&[("DISK_GB", 3)]))]
            .into();
    assert_eq!(placed(&held, &wanted), Ok(larger.clone()));
    assert_eq!(placed(&larger, &of(&[("CUSTOM_X", 0), ("VCPU", 1), ("DISK_GB", 1)])), Ok(held.clone()));
    assert_eq!(total(&larger), of(&[("VCPU", 2), ("MEMORY_MB", 128), ("DISK_GB", 3), ("CUSTOM_X", 1)]));
    let split: Allocations = [(root, of(&[("VCPU", 1)])), (disks, of(&[("VCPU", 1)]))].into();
    assert_eq!(placed(&split, &of(&[("VCPU", 2)])), Ok(split.clone()), "as it is");
    assert!(placed(&split, &of(&[("VCPU", 3)])).is_err());
    assert!(placed(&Allocations::new(), &of(&[("VCPU", 3)])).is_err());
    assert_eq!(
        more(&of(&[("VCPU", 1), ("X", 2)]), &wanted),
        of(&[("VCPU", 1), ("DISK_GB", 3), ("CUSTOM_X", 1)])
    );
}

#[test]
fn only_classes_of_which_more_is_wanted_are_more() {
    let of = |amounts: &[(&str, u64)]| -> Resources {
        amounts.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect()
    };
    let held = of(&[("VCPU", 2), ("MEMORY_MB", 128), ("DISK_GB", 4)]);
    let wanted = of(&[("VCPU", 2), ("MEMORY_MB", 192), ("DISK_GB", 3), ("PGPU", 1)]);
    assert_eq!(more(&held, &wanted), of(&[("MEMORY_MB", 64), ("PGPU", 1)]));
}

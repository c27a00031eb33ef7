//! What is taken from somebody is what was meant when it was asked for: who changed it since has spared it.

use ec_model::{Doc, State, Status, input::LabelSelector};

use super::*;
use ec_plan::verbs::Change;

use crate::{
    CloudError, Verb, act, act_selected, attach, copy_for_image, delete_called_volume,
    delete_selected_volume, destroy_called, destroy_selected, detach, heal,
};

fn label(key: &str, value: Option<&str>) -> Verb {
    let labels = [(key.to_owned(), value.map(str::to_owned))].into();
    Verb::Set(Change { labels, ..Change::default() })
}

fn refused(outcome: Result<impl std::fmt::Debug, CloudError>, wanted: &str) {
    let error = outcome.unwrap_err();
    assert!(matches!(&error, CloudError::Refused(why) if why.contains(wanted)), "{error}");
}

impl World {
    /// A volume, and the machine that is to have it; both are there, by their nodes' words.
    async fn volume_of_a_machine(&self) -> (InstanceId, Scheduled) {
        let volume = self.volume("data").await;
        let made = self.schedule(QUERY, Some("web")).await.unwrap().unwrap();
        self.active(made, "machine").await;
        attach(&self.cloud(), volume, made.instance, None).await.unwrap();
        (volume, made)
    }
}

#[tokio::test]
async fn what_was_selected_by_a_label_and_has_it_no_more_is_spared() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let selectors = [LabelSelector { key: "role".to_owned(), value: Some("tmp".to_owned()) }];
    let machine = world.schedule(QUERY, Some("web")).await.unwrap().unwrap().instance;
    let volume = world.volume("data").await;
    for instance in [machine, volume] {
        act(&cloud, instance, &label("role", Some("keep"))).await.unwrap();
    }
    refused(destroy_selected(&cloud, machine, &selectors).await, "has not the label role=tmp any more");
    let gone = delete_called_volume(&cloud, volume, "data", &selectors).await;
    refused(gone, "has not the label role=tmp any more");
    let gone = delete_selected_volume(&cloud, volume, &selectors).await;
    refused(gone, "has not the label role=tmp any more");
    let lock = Verb::Lock("mine".to_owned());
    let locked = act_selected(&cloud, machine, &lock, &selectors).await;
    refused(locked, "has not the label role=tmp any more");
    for instance in [machine, volume] {
        act(&cloud, instance, &label("role", Some("tmp"))).await.unwrap();
    }
    act_selected(&cloud, machine, &lock, &selectors).await.unwrap();
    act(&cloud, machine, &Verb::Unlock).await.unwrap();
    destroy_selected(&cloud, machine, &selectors).await.unwrap();
    delete_called_volume(&cloud, volume, "DATA", &selectors).await.unwrap();
}

#[tokio::test]
async fn what_was_chosen_by_its_name_and_has_another_since_is_spared() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let machine = world.schedule(QUERY, Some("old")).await.unwrap().unwrap().instance;
    let volume = world.volume("spare").await;
    for (instance, name) in [(machine, "web"), (volume, "data")] {
        act(&cloud, instance, &Verb::Rename(name.to_owned())).await.unwrap();
    }
    refused(destroy_called(&cloud, machine, "old", &[]).await, "is not called `old`");
    refused(delete_called_volume(&cloud, volume, "spare", &[]).await, "is not called `spare`");
    destroy_called(&cloud, machine, "web", &[]).await.unwrap();
    delete_called_volume(&cloud, volume, "data", &[]).await.unwrap();
}

#[tokio::test]
async fn a_name_that_may_be_the_beginning_of_a_uuid_is_nobody_elses() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let machine = world.schedule(QUERY, Some("web")).await.unwrap().unwrap().instance;
    let beginning = &machine.to_string()[..8];
    assert_eq!(crate::resolve(&cloud, beginning).await.unwrap(), machine);
    let named = async |name: &str| crate::resolve_name(&cloud, ec_model::Workload::Machine, name).await;
    for text in [beginning, &machine.to_string()] {
        let error = named(text).await.unwrap_err();
        assert!(matches!(&error, CloudError::NotFound(why) if why.contains("is named")), "{error}");
    }
    assert_eq!(named("WEB").await.unwrap(), machine);
}

#[tokio::test]
async fn a_copy_that_goes_with_its_image_is_given_to_no_guest() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let of =
        ImageRef::copy_of(&ec_model::CopyOf::disk(ec_model::Workload::Volume, world.volume("data").await));
    let image = ec_model::ImageId::new(uuid::Uuid::from_u128(5));
    let copy = copy_for_image(&cloud, image, &of, None, &world.stop).await.unwrap().unwrap();
    let machine = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    for (made, kind) in [(copy, "volume"), (machine, "machine")] {
        world.active(made, kind).await;
    }
    refused(attach(&cloud, copy.instance, machine.instance, None).await, "and goes with that");
    let boots = Guest { boot: Some(copy.instance), image: ImageRef::default(), ..guest(Some("db")) };
    let query = ResourceQuery::parse(QUERY).unwrap();
    let wanted = Wanted::new(Ask::new(&query).unwrap(), &boots).unwrap();
    refused(schedule(&cloud, &wanted, &world.stop).await.map(|_| ()), "and goes with that");
}

#[tokio::test]
async fn what_is_made_with_volumes_has_all_of_them_or_is_not_made() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let [data, logs] = [world.volume("data").await, world.volume("logs").await];
    let query = ResourceQuery::parse(QUERY).unwrap();
    let made = async |name: &str, volumes: &[InstanceId]| {
        let guest = Guest { volumes: volumes.to_vec(), ..guest(Some(name)) };
        let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
        schedule(&cloud, &wanted, &world.stop).await.map(|placed| placed.unwrap())
    };
    let db = made("db", &[data]).await.unwrap();
    let left = || {
        let keys: Vec<_> = world.under("/").into_iter().map(|pair| (pair.key, pair.mod_revision)).collect();
        (keys, world.claims().len())
    };
    let before = left();
    refused(made("web", &[logs, data]).await, &format!("instance {} has it", db.instance));
    assert_eq!(left(), before, "nothing is left of it");

    let request: Request = decode(&world.under(&world.keys.request(db.node, db.instance))[0].value).unwrap();
    let record: Instance = decode(&world.under(&world.keys.instance(db.instance))[0].value).unwrap();
    let has = [ec_model::Attachment { volume: data, device: "vdb".to_owned() }];
    assert_eq!((&request.volumes[..], &record.volumes[..]), (&has[..], &has[..]));
    let disk: Instance = decode(&world.under(&world.keys.instance(data))[0].value).unwrap();
    assert_eq!(disk.attached, Some(db.instance));
    let again = attach(&cloud, data, db.instance, None).await.unwrap();
    assert_eq!(again.device, "vdb", "it is waited for as one that was attached");
}

#[tokio::test]
async fn a_volume_that_another_has_by_now_stays_there() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let volume = world.volume("data").await;
    let mut machines = Vec::new();
    for name in ["web", "db"] {
        let made = world.schedule(QUERY, Some(name)).await.unwrap().unwrap();
        world.active(made, "machine").await;
        machines.push(made.instance);
    }
    attach(&cloud, volume, machines[1], None).await.unwrap();
    let before = world.etcd.memory.content("/").pairs;
    refused(detach(&cloud, volume, Some(machines[0])).await, &format!("{} has volume", machines[1]));
    assert_eq!(world.etcd.memory.content("/").pairs, before);
    let detached = detach(&cloud, volume, Some(machines[1])).await.unwrap();
    assert_eq!(detached.map(|detached| detached.instance), Some(machines[1]));
}

#[tokio::test]
async fn a_volume_that_is_handed_over_is_listed_once_with_who_has_it() {
    let world = World::new(2, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let (volume, made) = world.volume_of_a_machine().await;
    let (here, other) = (made.node, node(1));
    assert_ne!(here, other);
    let leaving = &world.under(&world.keys.request(here, volume))[0].value;
    let leaving =
        Request { handover: Some(ec_model::Handover::To(here)), ..decode::<Request>(leaving).unwrap() };
    let put = Txn::new().put(world.keys.request(other, volume), encode(&leaving));
    world.etcd.memory.txn(put).await.unwrap();
    let listed = crate::volumes(&cloud).await.unwrap();
    let told: Vec<_> = listed.iter().map(|view| (view.node, view.instance)).collect();
    assert_eq!(told, [(Some(here), Some(made.instance))]);
    // Where the record is gone nobody can say which counts.
    world.etcd.memory.txn(Txn::new().delete(world.keys.instance(volume))).await.unwrap();
    let healed = heal(&cloud, &[], false).await.unwrap().done;
    assert!(healed.len() == 1 && healed[0].notes[0].contains("on several nodes"), "{healed:?}");
    let listed = crate::volumes(&cloud).await.unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|view| view.instance == Some(made.instance)), "{listed:?}");
}

#[tokio::test(start_paused = true)]
async fn records_that_are_gone_are_made_of_requests_and_say_who_has_what() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let (volume, made) = world.volume_of_a_machine().await;
    for lost in [made.instance, volume] {
        let key = world.keys.instance(lost);
        let record = || decode::<Instance>(&world.under(&key)[0].value).unwrap();
        let before = record();
        memory.txn(Txn::new().delete(key.clone())).await.unwrap();
        let why = act(&cloud, lost, &Verb::Lock(String::new())).await.unwrap_err().to_string();
        assert!(why.contains("`eschedule heal`"), "{why}");
        refused(detach(&cloud, volume, None).await, "`eschedule heal`");
        let told = crate::unrecorded(&cloud).await.unwrap();
        assert_eq!(told.iter().map(|lost| lost.instance).collect::<Vec<_>>(), [lost]);
        let all = memory.content("/").pairs;
        assert_eq!(heal(&cloud, &[], true).await.unwrap().done[0].outcome, crate::Outcome::Lost);
        assert_eq!(memory.content("/").pairs, all, "it only looks");
        assert_eq!(heal(&cloud, &[], false).await.unwrap().done[0].outcome, crate::Outcome::Healed);
        let (generation, request_id) = (before.generation + 1, record().request_id);
        assert_eq!(record(), Instance { generation, request_id, ..before });
        assert!(crate::unrecorded(&cloud).await.unwrap().is_empty());
    }
    // A wish to destroy takes the record along.
    destroy_selected(&cloud, made.instance, &[]).await.unwrap();
    assert!(crate::unrecorded(&cloud).await.unwrap().is_empty());
    assert!(heal(&cloud, &[], false).await.unwrap().done.is_empty());
    let why = crate::delete_volume(&cloud, volume).await.unwrap_err().to_string();
    assert!(why.contains("being destroyed, and has it until its end"), "{why}");
}

#[tokio::test]
async fn what_is_to_be_healed_is_named_as_elsewhere_and_told_as_far_as_etcd_let_it() {
    let mut world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let mut made = Vec::new();
    for name in ["a", "b"] {
        let one = world.schedule(QUERY, Some(name)).await.unwrap().unwrap();
        world.etcd.memory.txn(Txn::new().delete(world.keys.instance(one.instance))).await.unwrap();
        made.push(one.instance);
    }
    let looked = async |cloud: &Cloud, word: &str| heal(cloud, &[word.to_owned()], true).await;
    let uuid = made[1].to_string();
    assert_eq!(
        looked(&cloud, "A").await.unwrap().done[0].instance,
        made[0],
        "its name, and no uuid's beginning"
    );
    assert_eq!(looked(&cloud, &uuid[..20]).await.unwrap().done[0].instance, made[1]);
    assert!(matches!(looked(&cloud, &uuid[..3]).await, Err(CloudError::NotFound(_))));
    let elsewhere = Cloud { project: "other".into(), ..cloud };
    assert!(matches!(looked(&elsewhere, "a").await, Err(CloudError::NotFound(_))));
    let next = world.etcd.plan.step.load(Ordering::Relaxed) + 1;
    world.etcd.plan.faults.insert(next, Fault::Fails);
    let healed = heal(&world.cloud(), &[], false).await.unwrap();
    assert_eq!(healed.done.iter().map(|healed| healed.outcome).collect::<Vec<_>>(), [crate::Outcome::Healed]);
    assert_eq!(healed.failed.map(|error| error.kind()), Some(Kind::Unreachable));
}

#[tokio::test]
async fn a_list_of_outcomes_that_cannot_be_read_hides_no_other() {
    let world = World::new(1, 0, &[]).await;
    let made = world.schedule(QUERY, None).await.unwrap().unwrap();
    let key = world.keys.outcomes(made.node, made.instance);
    world.etcd.memory.txn(Txn::new().put(key, r#"{"version":99}"#)).await.unwrap();
    let told = crate::history(&world.cloud(), &made.instance.to_string()).await.unwrap();
    assert_eq!(told[0].outcome, Some(ec_plan::history::Fate::Unknown), "{told:?}");
}

#[tokio::test]
async fn a_node_has_its_instances_and_its_volumes_counted_apart() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    world.volume_of_a_machine().await;
    let nodes = crate::nodes(&world.cloud()).await.unwrap();
    assert_eq!((nodes[0].instances, nodes[0].volumes), (1, 1));
    world.etcd.memory.txn(Txn::new().delete(world.keys.alive(node(0)))).await.unwrap();
    let note = crate::nodes(&world.cloud()).await.unwrap().remove(0).note.unwrap();
    assert!(note.contains("holds 1 instance and 1 volume"), "{note}");
}

#[tokio::test]
async fn a_node_that_is_missed_is_shown_also_where_nothing_is_on_it_unless_it_was_revoked() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    for revoked in [false, true] {
        let gone = Node {
            node: node(7),
            name: "gone".to_owned(),
            created_at: Timestamp::UNIX_EPOCH,
            troubles: Vec::new(),
            revoked,
        };
        world.etcd.memory.txn(Txn::new().put(world.keys.node(node(7)), encode(&gone))).await.unwrap();
        let nodes = crate::nodes(&world.cloud()).await.unwrap();
        let shown: Vec<_> = nodes.iter().filter(|shown| !shown.alive).map(|shown| shown.node).collect();
        assert_eq!(shown, if revoked { vec![] } else { vec![node(7)] });
    }
}

#[tokio::test]
async fn of_a_node_that_is_asked_for_it_is_told_how_many_others_there_are() {
    let world = World::new(99, 0, &[]).await.roomy(0);
    let cloud = world.cloud();
    let query = ResourceQuery::parse(QUERY).unwrap();
    let why = async |on: Option<NodeId>| {
        let ask = Ask::new(&query).unwrap();
        let ask = on.map_or(ask.clone(), |node| ask.on(node).unwrap());
        crate::explain(&cloud, &ask, &NoRoom::default()).await.unwrap()
    };
    assert_eq!(why(None).await.living, 99, "also those that placement is not asked of");
    for n in [0, 50, 98] {
        let reasons = why(Some(node(n))).await;
        assert_eq!((reasons.living, &reasons.without_inventory[..]), (1, &[format!("n{n}")][..]));
    }
    assert_eq!(why(Some(node(100))).await.no_such_node, Some(node(100)));
    let silent = World { placement: Rooms { silent: true, ..world.placement.clone() }, ..world };
    let ask = Ask::new(&query).unwrap().on(node(7)).unwrap();
    let reasons = crate::explain(&silent.cloud(), &ask, &NoRoom::default()).await.unwrap();
    assert!(reasons.without_inventory.is_empty() && reasons.untold[0].starts_with("n7: "), "{reasons:?}");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_could_not_grow_is_told_as_large_as_it_is() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let volume = world.volume("data").await;
    let is = crate::volume(&cloud, volume).await.unwrap().size_gb.unwrap();
    let wished_at = Timestamp::now();
    let (asked, recorded) = (world.keys.request(node(0), volume), world.keys.instance(volume));
    let mut request: Request = decode(&world.under(&asked)[0].value).unwrap();
    let mut record: Instance = decode(&world.under(&recorded)[0].value).unwrap();
    record.spec.resources.insert("DISK_GB".to_owned(), is + 1);
    (request.resize, request.spec) = (Some(ec_model::Resize { wished_at }), Some(record.spec.clone()));
    memory.txn(Txn::new().put(asked, encode(&request)).put(recorded, encode(&record))).await.unwrap();
    let key = world.keys.status(node(0), volume);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let resized = ec_model::Resized {
        wished_at,
        failed: Some("no room".to_owned()),
        resources: [("DISK_GB".to_owned(), is)].into(),
    };
    let status = Status { resized: Some(resized), ..status };
    memory.txn(Txn::new().put(key, encode(&status))).await.unwrap();
    let view = crate::volume(&cloud, volume).await.unwrap();
    assert_eq!(view.size_gb, Some(is));
    let why = view.reason.clone().unwrap();
    assert!(why.contains("no room") && why.contains("`eschedule volume extend`"), "{why}");
    assert_eq!(crate::volumes(&cloud).await.unwrap(), [view]);
}

#[tokio::test]
async fn a_wish_after_one_by_a_clock_that_was_ahead_is_noted_with_when_it_was_asked_for() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let made = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    world.active(made, "machine").await;
    let asked = world.keys.request(node(0), made.instance);
    let mut request: Request = decode(&world.under(&asked)[0].value).unwrap();
    let (begun, wished_at) = (Timestamp::now(), Timestamp::now() + jiff::SignedDuration::from_hours(1));
    request.rebuild = Some(ec_model::Rebuild { wished_at, before: None });
    memory.txn(Txn::new().put(asked, encode(&request))).await.unwrap();
    act(&cloud, made.instance, &Verb::Rebuild(None)).await.unwrap();
    act(&cloud, made.instance, &Verb::Lock("mine".to_owned())).await.unwrap();
    let key = world.keys.actions(made.instance);
    let actions: ec_model::Actions = decode(&world.under(&key)[0].value).unwrap();
    let [_, rebuild, lock] = &actions.actions[..] else { panic!("{actions:?}") };
    assert!(rebuild.at > wished_at, "{rebuild:?}");
    assert!(rebuild.asked_at.is_some_and(|at| begun <= at && at <= Timestamp::now()), "{rebuild:?}");
    assert_eq!(lock.asked_at, None);
}

#[tokio::test]
async fn the_history_of_what_somebody_took_away_by_hand_goes_by_itself() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let memory = &world.etcd.memory;
    let made = [0, 1].map(async |_| world.schedule(QUERY, None).await.unwrap().unwrap());
    let [gone, stays] = futures::future::join_all(made).await.try_into().unwrap();
    let lost = Txn::new()
        .delete(world.keys.instance(gone.instance))
        .delete(world.keys.request(gone.node, gone.instance));
    memory.txn(lost).await.unwrap();
    let lease = |of: &Scheduled| world.under(&world.keys.actions(of.instance))[0].lease;
    assert_eq!([lease(&gone), lease(&stays)], [None, None]);
    crate::tend_instances(&world.cloud()).await.unwrap();
    assert_eq!([lease(&gone).is_some(), lease(&stays).is_some()], [true, false]);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_could_not_be_made_anew_is_told_so_until_it_is_asked_for_again() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let volume = world.volume("data").await;
    let (asked, told) = (world.keys.request(node(0), volume), world.keys.status(node(0), volume));
    let wished_at = Timestamp::now();
    let mut request: Request = decode(&world.under(&asked)[0].value).unwrap();
    let mut status: Status = decode(&world.under(&told)[0].value).unwrap();
    request.rebuild = Some(ec_model::Rebuild { wished_at, before: None });
    status.rebuilt = Some(ec_model::Rebuilt { wished_at, failed: Some("no such image".to_owned()) });
    memory.txn(Txn::new().put(asked.clone(), encode(&request)).put(told, encode(&status))).await.unwrap();
    let view = crate::volume(&cloud, volume).await.unwrap();
    assert!(view.reason.as_ref().unwrap().contains("has its old disk: no such image"), "{view:?}");
    assert_eq!(crate::volumes(&cloud).await.unwrap(), [view]);
    request.rebuild = Some(ec_model::Rebuild { wished_at: Timestamp::now(), before: None });
    memory.txn(Txn::new().put(asked, encode(&request))).await.unwrap();
    assert_eq!(crate::volume(&cloud, volume).await.unwrap().reason, None);
}

#[tokio::test]
async fn a_rescued_guest_that_powered_itself_off_is_told_to_be_rescued_and_can_be_started() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let made = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    world.active(made, "machine").await;
    let (asked, told) =
        (world.keys.request(made.node, made.instance), world.keys.status(made.node, made.instance));
    let mut request: Request = decode(&world.under(&asked)[0].value).unwrap();
    let mut status: Status = decode(&world.under(&told)[0].value).unwrap();
    let wished_at = Timestamp::now();
    request.rescue = Some(ec_model::Rescue { wished_at, image: request.spec.clone().unwrap().image });
    status.rescued = Some(ec_model::Rescued { wished_at, failed: None });
    (status.state, status.reason) = (State::Stopped, Some("the guest powered itself off".to_owned()));
    (status.started_at, status.power_generation) = (Some(wished_at), request.power.generation);
    memory.txn(Txn::new().put(asked.clone(), encode(&request)).put(told, encode(&status))).await.unwrap();
    let view = crate::View::found(&crate::find(&cloud, made.instance).await.unwrap());
    assert_eq!(view.state, "STOPPED");
    let why = view.reason.unwrap();
    assert!(
        why.starts_with(
            "the guest powered itself off; it is rescued: `eschedule start` boots its rescue disk"
        ),
        "{why}"
    );
    act(&cloud, made.instance, &Verb::Start).await.unwrap();
    let wished: Request = decode(&world.under(&asked)[0].value).unwrap();
    assert!(wished.power.generation > request.power.generation && wished.rescue == request.rescue);
    let view = crate::View::found(&crate::find(&cloud, made.instance).await.unwrap());
    assert_eq!(view.state, "RESCUING");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_its_machine_has_yet_to_let_go_of_is_told_and_listed_as_in_use() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let (volume, made) = world.volume_of_a_machine().await;
    let key = world.keys.status(made.node, made.instance);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let has =
        Status { volumes: vec![ec_model::Attachment { volume, device: "vdb".to_owned() }], ..status.clone() };
    memory.txn(Txn::new().put(key.clone(), encode(&has))).await.unwrap();
    detach(&cloud, volume, None).await.unwrap();
    for (status, instance) in [(has, Some(made.instance)), (status, None)] {
        memory.txn(Txn::new().put(key.clone(), encode(&status))).await.unwrap();
        let (one, listed) =
            (crate::volume(&cloud, volume).await.unwrap(), crate::volumes(&cloud).await.unwrap());
        assert_eq!((one.instance, &one.device), (instance, &instance.map(|_| "vdb".to_owned())));
        assert_eq!(listed, [one]);
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_could_not_be_resized_is_told_so_until_that_is_reverted() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let made = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    world.active(made, "machine").await;
    let keys = &world.keys;
    let (record, asked, told) = (
        keys.instance(made.instance),
        keys.request(made.node, made.instance),
        keys.status(made.node, made.instance),
    );
    let mut instance: Instance = decode(&world.under(&record)[0].value).unwrap();
    let mut request: Request = decode(&world.under(&asked)[0].value).unwrap();
    let mut status: Status = decode(&world.under(&told)[0].value).unwrap();
    let wished_at = Timestamp::now();
    request.resize = Some(ec_model::Resize { wished_at });
    let resources = instance.spec.resources.clone();
    let failed = Some("no such room".to_owned());
    status.resized = Some(ec_model::Resized { wished_at, failed, resources: resources.clone() });
    status.observed_generation = request.generation;
    let before = ec_model::Extent { query: QUERY.to_owned(), resources };
    let txn = Txn::new().put(asked.clone(), encode(&request)).put(told, encode(&status));
    memory.txn(txn).await.unwrap();
    for (before, reason) in [
        (
            Some(before),
            "a resize failed, it is as large as it was before that: no such room; `eschedule resize --revert` gives back what was claimed for more",
        ),
        (
            None,
            "a resize failed, it is as large as it was before that: no such room; `eschedule resize --revert` tries it again",
        ),
    ] {
        instance.before = before;
        memory.txn(Txn::new().put(record.clone(), encode(&instance))).await.unwrap();
        let [view] = crate::list(&cloud).await.unwrap().try_into().unwrap();
        assert_eq!((view.state.as_str(), view.reason.as_deref()), ("ACTIVE", Some(reason)));
    }
    // Asked for once more.
    request.resize = Some(ec_model::Resize { wished_at: wished_at + SignedDuration::from_secs(1) });
    memory.txn(Txn::new().put(asked, encode(&request))).await.unwrap();
    let [view] = crate::list(&cloud).await.unwrap().try_into().unwrap();
    assert_eq!((view.state.as_str(), view.reason), ("RESIZING", None));
}

#[tokio::test(start_paused = true)]
async fn a_volume_tells_that_it_is_being_attached_or_detached_and_why_that_fails() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let (volume, made) = world.volume_of_a_machine().await;
    let key = world.keys.status(made.node, made.instance);
    let none: Status = decode(&world.under(&key)[0].value).unwrap();
    let has =
        Status { volumes: vec![ec_model::Attachment { volume, device: "vdb".to_owned() }], ..none.clone() };
    let tries = Status { volumes_changing: true, ..has.clone() };
    let fails = Status { volumes_failed: Some("its guest keeps it".to_owned()), ..has.clone() };
    // Before its own agent has heard who has it, too.
    memory.txn(Txn::new().put(key.clone(), encode(&none))).await.unwrap();
    assert_eq!(crate::volume(&cloud, volume).await.unwrap().doing.as_deref(), Some("being attached"));
    let of_volume = world.keys.status(made.node, volume);
    let status: Status = decode(&world.under(&of_volume)[0].value).unwrap();
    let heard = Status { observed_generation: 99, ..status };
    memory.txn(Txn::new().put(of_volume, encode(&heard))).await.unwrap();
    let told = async |status: &Status| {
        memory.txn(Txn::new().put(key.clone(), encode(status))).await.unwrap();
        let one = crate::volume(&cloud, volume).await.unwrap();
        assert_eq!(crate::volumes(&cloud).await.unwrap(), std::slice::from_ref(&one));
        assert_eq!(one.instance, Some(made.instance));
        (one.status, one.doing, one.reason)
    };
    let in_use = |doing: Option<&str>, reason: Option<&str>| {
        ("in-use".to_owned(), doing.map(str::to_owned), reason.map(str::to_owned))
    };
    let why = Some("the volumes of its instance are not as they are to be: its guest keeps it");
    assert_eq!(told(&none).await, in_use(Some("being attached"), None));
    assert_eq!(told(&tries).await, in_use(Some("the volumes of its instance are being changed"), None));
    assert_eq!(told(&has).await, in_use(None, None));
    assert_eq!(told(&fails).await, in_use(None, why));
    detach(&cloud, volume, None).await.unwrap();
    assert_eq!(told(&tries).await, in_use(Some("being detached"), None));
    assert_eq!(told(&fails).await, in_use(Some("being detached"), why));
    // What its record alone says is not under way: nobody is asked for it.
    memory.txn(Txn::new().delete(world.keys.request(made.node, made.instance))).await.unwrap();
    assert_eq!(told(&has).await, in_use(None, None));
}

#[tokio::test(start_paused = true)]
async fn one_whose_request_is_lost_is_unlocked_once_whatever_is_heard_of_that() {
    for heard in [true, false] {
        let world = World::new(1, 0, &[]).await.roomy(9);
        let cloud = world.cloud();
        let machine = world.schedule(QUERY, Some("web")).await.unwrap().unwrap().instance;
        act(&cloud, machine, &Verb::Lock("mine".to_owned())).await.unwrap();
        let memory = &world.etcd.memory;
        memory.txn(Txn::new().delete(world.keys.request(node(0), machine))).await.unwrap();
        memory.faults().lose_answers(usize::from(!heard));
        assert_eq!(act(&cloud, machine, &Verb::Unlock).await.unwrap().already, None, "heard: {heard}");
        let again = act(&cloud, machine, &Verb::Unlock).await.unwrap();
        assert_eq!(again.already.as_deref(), Some("it is not locked"));
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_done_in_time_is_asked_after_by_the_word_of_its_kind() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, second) = (world.cloud(), std::time::Duration::from_secs(1));
    let (volume, made) = world.volume_of_a_machine().await;
    for (instance, show) in [(volume, "volume show"), (made.instance, "show")] {
        let wanted = format!("`eschedule {show} {instance}` shows how far");
        let status = world.keys.status(made.node, instance);
        let gone = crate::until_gone(&cloud, made.node, instance, second, |_| {}).await.unwrap_err();
        // Its node has not told anything of it yet.
        world.etcd.memory.txn(Txn::new().delete(status)).await.unwrap();
        let active = crate::until_active(&cloud, made.node, instance, second, |_| {}).await.unwrap_err();
        for error in [gone, active] {
            assert!(
                matches!(&error, CloudError::TimedOut(told) if told.contains(&wanted)),
                "{show}: {error}"
            );
        }
    }
}

#[tokio::test]
async fn said_again_what_is_on_its_way_is_waited_for() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let data = world.volume("disk").await;
    let key = world.keys.request(node(0), data);
    let mut request: Doc<Request> = Doc::decode(&world.under(&key)[0].value).unwrap();
    let wished_at = Timestamp::now();
    request.record.resize = Some(ec_model::Resize { wished_at });
    world.etcd.memory.txn(Txn::new().put(key, request.encode())).await.unwrap();
    let again = crate::extend_volume(&cloud, data, 2).await.unwrap();
    assert_eq!(again.already.as_deref(), Some("it is to have 2 GB already"));
    assert_eq!(again.awaited, Some(crate::Awaited::Resize(wished_at)));

    let (_, made) = world.volume_of_a_machine().await;
    let machine = made.instance;
    let metadata = [("role".to_owned(), Some("web".to_owned()))].into();
    let set = Verb::Set(Change { metadata, ..Change::default() });
    let first = act(&cloud, machine, &set).await.unwrap();
    let again = act(&cloud, machine, &set).await.unwrap();
    assert!(again.already.is_some() && first.awaited.is_some() && again.awaited == first.awaited);

    let key = world.keys.status(made.node, machine);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let (generation, heard) = (u64::MAX, Status { observed_generation: u64::MAX, ..status });
    for (state, is_awaited) in [(State::Starting, true), (State::Active, false)] {
        let told = Status { state, power_generation: generation, ..heard.clone() };
        world.etcd.memory.txn(Txn::new().put(key.clone(), encode(&told))).await.unwrap();
        for (verb, is_awaited) in [(Verb::Start, is_awaited), (set.clone(), false)] {
            let again = act(&cloud, machine, &verb).await.unwrap();
            assert!(again.already.is_some() && again.awaited.is_some() == is_awaited, "{state}: {again:?}");
        }
    }
}

#[tokio::test]
async fn what_a_later_release_wrote_of_what_was_done_before_stays_there() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (_, made) = world.volume_of_a_machine().await;
    let key = world.keys.actions(made.instance);
    let read = || serde_json::from_slice::<serde_json::Value>(&world.under(&key)[0].value).unwrap();
    let mut actions = read();
    actions["actions"][0]["later"] = 1.into();
    let written = serde_json::to_vec(&actions).unwrap();
    world.etcd.memory.txn(Txn::new().put(key.clone(), written)).await.unwrap();
    act(&world.cloud(), made.instance, &label("role", Some("web"))).await.unwrap();
    let now = read();
    let count = |actions: &serde_json::Value| actions["actions"].as_array().map(Vec::len);
    assert_eq!(count(&now), count(&actions).map(|count| count + 1), "{now}");
    assert_eq!(now["actions"][0], actions["actions"][0]);
}

#[tokio::test]
async fn what_a_later_release_wrote_of_a_volume_goes_along_to_another_node() {
    let world = World::new(2, 0, &[]).await.roomy(9);
    let data = world.volume("data").await;
    let is_there = |node| !world.under(&world.keys.request(node, data)).is_empty();
    let (from, to) = if is_there(node(0)) { (0, 1) } else { (1, 0) };
    let storage = Some(ec_model::SharedStorage::named("ceph"));
    for number in [from, to] {
        let sign = encode(&Alive { storage: storage.clone(), ..alive(number) });
        world.etcd.memory.txn(Txn::new().put(world.keys.alive(node(number)), sign)).await.unwrap();
    }
    let key = world.keys.status(node(from), data);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let heard = Status { observed_generation: u64::MAX, ..status };
    world.etcd.memory.txn(Txn::new().put(key, encode(&heard))).await.unwrap();
    let key = world.keys.request(node(from), data);
    let mut order: serde_json::Value = serde_json::from_slice(&world.under(&key)[0].value).unwrap();
    order["later"] = 1.into();
    let written = serde_json::to_vec(&order).unwrap();
    world.etcd.memory.txn(Txn::new().put(key, written)).await.unwrap();
    crate::move_volume(&world.cloud(), data, node(to)).await.unwrap();
    let come = world.under(&world.keys.request(node(to), data));
    let come: serde_json::Value = serde_json::from_slice(&come[0].value).unwrap();
    assert_eq!(come["later"], order["later"], "{come}");
}

#[tokio::test]
async fn of_a_volume_of_what_failed_before_it_ran_it_is_told_how_it_is_let_go_of() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let (volume, made) = world.volume_of_a_machine().await;
    let other = world.schedule(QUERY, Some("other")).await.unwrap().unwrap();
    refused(
        attach(&cloud, volume, other.instance, None).await,
        "`eschedule volume detach` takes it away first",
    );
    let key = world.keys.status(made.node, made.instance);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let failed = Status { state: State::Error, started_at: None, volumes: Vec::new(), ..status };
    let txn = Txn::new().put(key, encode(&failed)).delete(world.keys.request(made.node, made.instance));
    world.etcd.memory.txn(txn).await.unwrap();
    refused(attach(&cloud, volume, other.instance, None).await, "`eschedule destroy` of it lets go");
    destroy_selected(&cloud, made.instance, &[]).await.unwrap();
}

#[tokio::test]
async fn a_disk_that_a_guest_has_is_not_deleted_where_etcd_lost_both() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let (volume, made) = world.volume_of_a_machine().await;
    let memory = &world.etcd.memory;
    for (of, volumes) in [(volume, vec![]), (made.instance, vec![("vdb", volume)])] {
        let key = world.keys.status(made.node, of);
        let status: Status = decode(&world.under(&key)[0].value).unwrap();
        let volumes = volumes
            .into_iter()
            .map(|(device, volume)| ec_model::Attachment { volume, device: device.to_owned() });
        // Nor can its node tell what it is.
        let told = Status {
            state: State::Unclaimed,
            kind: ec_model::Workload::Machine,
            volumes: volumes.collect(),
            ..status
        };
        let (record, request) = (world.keys.instance(of), world.keys.request(made.node, of));
        memory.txn(Txn::new().put(key, encode(&told)).delete(record).delete(request)).await.unwrap();
    }
    refused(destroy_selected(&cloud, volume, &[]).await, "has volume");
    destroy_selected(&cloud, made.instance, &[]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_rescue_that_was_taken_back_before_its_node_heard_of_it_is_not_waited_for() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, minute) = (world.cloud(), std::time::Duration::from_secs(60));
    let (_, made) = world.volume_of_a_machine().await;
    let image = ImageRef::at("file:///rescue");
    let rescued = act(&cloud, made.instance, &Verb::Rescue(Some(image))).await.unwrap();
    act(&cloud, made.instance, &Verb::Unrescue).await.unwrap();
    let awaited = rescued.awaited.unwrap();
    let done = crate::until_done(&cloud, made.node, made.instance, awaited, minute, |_| {});
    let error = done.await.unwrap_err();
    assert!(
        matches!(&error, CloudError::Elsewhere(why) if why.contains("boot from its own disk again")),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn who_could_not_go_back_to_its_old_size_is_told_to_try_that_again() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, minute) = (world.cloud(), std::time::Duration::from_secs(60));
    let (_, made) = world.volume_of_a_machine().await;
    let (key, wished_at) = (world.keys.status(made.node, made.instance), Timestamp::UNIX_EPOCH);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let failed = ec_model::Resized { wished_at, failed: Some("no".to_owned()), resources: Resources::new() };
    let told = Status { resized: Some(failed), ..status };
    world.etcd.memory.txn(Txn::new().put(key, encode(&told))).await.unwrap();
    let key = world.keys.instance(made.instance);
    let record: Instance = decode(&world.under(&key)[0].value).unwrap();
    let size = ec_model::Extent { query: QUERY.to_owned(), resources: Resources::new() };
    for (before, helps) in [(Some(size), "gives back what was claimed for more"), (None, "tries it again")] {
        let record = Instance { before, ..record.clone() };
        world.etcd.memory.txn(Txn::new().put(key.clone(), encode(&record))).await.unwrap();
        let awaited = crate::Awaited::Resize(wished_at);
        let done = crate::until_done(&cloud, made.node, made.instance, awaited, minute, |_| {});
        let text = done.await.unwrap_err().to_string();
        assert!(text.contains("is as large as it was before that: no; `eschedule resize --revert"), "{text}");
        assert!(text.ends_with(helps), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn how_it_stands_is_looked_at_once_however_little_time_is_left() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (_, made) = world.volume_of_a_machine().await;
    let key = world.keys.status(made.node, made.instance);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let runs = Status { state: State::Active, ..status };
    world.etcd.memory.txn(Txn::new().put(key, encode(&runs))).await.unwrap();
    let no_time = std::time::Duration::ZERO;
    crate::until_active(&world.cloud(), made.node, made.instance, no_time, |_| {}).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_etcd_that_is_put_back_to_before_one_was_asked_for_is_no_sign_of_its_end() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    let backup = memory.faults().backup();
    let machine = world.schedule(QUERY, Some("web")).await.unwrap().unwrap().instance;
    destroy_selected(&cloud, machine, &[]).await.unwrap();
    let minute = std::time::Duration::from_secs(60);
    let gone = crate::until_gone(&cloud, node(0), machine, minute, |_| {});
    let put_back = async {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        memory.faults().restore(&backup);
    };
    let (gone, ()) = tokio::join!(gone, put_back);
    let error = gone.unwrap_err();
    assert!(matches!(&error, CloudError::Elsewhere(why) if why.contains("put back")), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_machine_is_about_to_go_is_told_and_listed_as_in_use() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let (volume, made) = world.volume_of_a_machine().await;
    crate::destroy(&cloud, made.instance).await.unwrap();
    let (one, listed) = (crate::volume(&cloud, volume).await.unwrap(), crate::volumes(&cloud).await.unwrap());
    assert_eq!((one.status.as_str(), one.instance), ("in-use", Some(made.instance)));
    assert_eq!(listed, [one]);
}

#[tokio::test(start_paused = true)]
async fn a_volume_of_a_guest_that_etcd_lost_is_told_and_listed_as_in_use_and_not_detached() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, keys) = (world.cloud(), &world.keys);
    let (volume, made) = world.volume_of_a_machine().await;
    let key = keys.status(made.node, made.instance);
    let status: Status = decode(&world.under(&key)[0].value).unwrap();
    let volumes = vec![ec_model::Attachment { volume, device: "vdb".to_owned() }];
    let told = Status { state: State::Unclaimed, volumes, ..status };
    let lost = Txn::new()
        .delete(keys.instance(made.instance))
        .delete(keys.request(made.node, made.instance))
        .put(key, encode(&told));
    world.etcd.memory.txn(lost).await.unwrap();
    let (one, listed) = (crate::volume(&cloud, volume).await.unwrap(), crate::volumes(&cloud).await.unwrap());
    assert_eq!((one.status.as_str(), one.instance), ("in-use", Some(made.instance)));
    assert_eq!(one.device.as_deref(), Some("vdb"));
    assert_eq!(listed, [one]);
    refused(detach(&cloud, volume, None).await, "etcd has forgotten that");
}

#[tokio::test(start_paused = true)]
async fn what_no_program_can_read_is_found_in_every_kind_and_project() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let (cloud, memory) = (world.cloud(), &world.etcd.memory);
    world.volume("data").await;
    assert_eq!(crate::unreadable(&cloud).await.unwrap(), []);
    let keys = &world.keys;
    let instance = InstanceId::new(uuid::Uuid::from_u128(7));
    let damaged = [
        keys.flavor("small"),
        keys.keypair("other", "me"),
        keys.group("other", "web"),
        keys.image(ec_model::ImageId::new(uuid::Uuid::from_u128(7))),
        keys.instance(instance),
        keys.request(node(0), instance),
        keys.status(node(0), instance),
    ];
    for (key, value) in damaged.iter().zip(["garbage", "", "{\"version\":99}", "[]", "x", "{}", "\"\""]) {
        memory.txn(Txn::new().put(key.clone(), value)).await.unwrap();
    }
    let mut found: Vec<_> =
        crate::unreadable(&cloud).await.unwrap().into_iter().map(|(key, _)| key).collect();
    found.sort();
    let mut damaged = damaged.to_vec();
    damaged.sort();
    assert_eq!(found, damaged);
}

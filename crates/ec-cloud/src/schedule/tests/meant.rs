//! What is taken from somebody is what was meant when it was asked for: who changed it since has spared it.

use ec_model::input::LabelSelector;

use super::*;
use ec_plan::verbs::Change;

use crate::{
    CloudError, Verb, act, attach, copy_for_image, delete_selected_volume, destroy_selected, detach,
};

fn label(key: &str, value: Option<&str>) -> Verb {
    let labels = [(key.to_owned(), value.map(str::to_owned))].into();
    Verb::Set(Change { labels, ..Change::default() })
}

fn refused(outcome: Result<impl std::fmt::Debug, CloudError>, wanted: &str) {
    let error = outcome.unwrap_err();
    assert!(matches!(&error, CloudError::Refused(why) if why.contains(wanted)), "{error}");
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
    refused(delete_selected_volume(&cloud, volume, &selectors).await, "has not the label role=tmp any more");
    for instance in [machine, volume] {
        act(&cloud, instance, &label("role", Some("tmp"))).await.unwrap();
    }
    destroy_selected(&cloud, machine, &selectors).await.unwrap();
    delete_selected_volume(&cloud, volume, &selectors).await.unwrap();
}

#[tokio::test]
async fn a_copy_that_goes_with_its_image_is_given_to_no_guest() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    let of =
        ImageRef::copy_of(&ec_model::CopyOf::disk(ec_model::Workload::Volume, world.volume("data").await));
    let image = ec_model::ImageId::new(uuid::Uuid::from_u128(5));
    let copy = copy_for_image(&cloud, image, &of, &world.stop).await.unwrap().unwrap();
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
    let volume = world.volume("data").await;
    let made = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    world.active(made, "machine").await;
    attach(&cloud, volume, made.instance, None).await.unwrap();
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
    let listed = crate::volumes(&cloud).await.unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|view| view.instance == Some(made.instance)), "{listed:?}");
}

//! Members of groups: where they are placed, what is refused, and who comes between.

use super::*;
use crate::{
    create_group, delete_group, delete_group_of, destroy, group, groups, lost_groups, tend_instances,
};

impl World {
    /// The same with room for more on each node.
    pub(super) fn roomy(mut self, room: usize) -> Self {
        self.placement.rooms.iter_mut().for_each(|(_, has)| *has = room);
        self
    }

    async fn member(&self, group: &str) -> Result<NodeId, NoRoom> {
        let placed = self.schedule_within(Some(group), QUERY, None).await.unwrap();
        placed.map(|placed| placed.node)
    }

    async fn members(&self, name: &str) -> Vec<NodeId> {
        group(&self.cloud(), name).await.unwrap().members.iter().map(|member| member.node).collect()
    }

    /// Has its node give it up in ERROR, before it ever ran or later; the request goes, or stays.
    async fn gives_up(&self, made: Scheduled, has_run: bool, request_stays: bool) {
        let now = Timestamp::now();
        let mut status = serde_json::json!({
            "version": 1, "instance": made.instance, "node": made.node, "epoch": 1, "state": "ERROR",
            "reason": "no image", "since": now, "updated_at": now,
        });
        if has_run {
            status["started_at"] = now.to_string().into();
        }
        let key = self.keys.status(made.node, made.instance);
        let mut txn = Txn::new().put(key, status.to_string());
        if !request_stays {
            txn = txn.delete(self.keys.request(made.node, made.instance));
            self.placement.claims.lock().unwrap().remove(&made.instance);
        }
        self.etcd.memory.txn(txn).await.unwrap();
    }

    /// Puts a member there by hand, without a record.
    async fn left_over(&self, group: &str, at: NodeId) {
        let key = self.keys.member("p", group, at, InstanceId::new(uuid::Uuid::new_v4()));
        self.etcd.memory.txn(Txn::new().put(key, "")).await.unwrap();
    }
}

#[tokio::test]
async fn members_go_where_the_policy_lets_them_and_nowhere_else() {
    let world = World::new(3, 0, &[]).await.roomy(99);
    for (policy, wanted, left_out) in [
        (Policy::AntiAffinity, &[0, 1, 2][..], 3),
        (Policy::Affinity, &[0, 0, 0, 0], 0),
        (Policy::SoftAntiAffinity, &[0, 1, 2, 0, 1], 0),
        (Policy::SoftAffinity, &[0, 0, 0], 0),
    ] {
        let name = policy.to_string();
        create_group(&world.cloud(), &name, policy, None).await.unwrap();
        for number in wanted {
            assert_eq!(world.member(&name).await, Ok(node(*number)), "{policy}");
        }
        if left_out > 0 {
            let none = world.member(&name).await.unwrap_err();
            assert_eq!((none.left_out.len(), none.lost_races), (left_out, 0), "{policy}");
        }
        let mut sorted: Vec<NodeId> = wanted.iter().map(|number| node(*number)).collect();
        sorted.sort_unstable();
        assert_eq!(world.members(&name).await, sorted, "{policy}");
    }
    assert_eq!(world.claims().len(), world.requested().len(), "who was refused claims nothing");
    let asked = Arc::new(AtomicUsize::new(0));
    let cloud = Cloud { store: Arc::new(Asked(world.etcd.clone(), asked.clone())), ..world.cloud() };
    let listed = groups(&cloud).await.unwrap();
    assert_eq!((listed.len(), asked.load(Ordering::SeqCst)), (4, 1), "for the members of all at once");
    for view in listed {
        assert!(!view.members.is_empty());
        assert_eq!(group(&cloud, &view.group.name).await.unwrap(), view);
    }
}

/// Counts how often it is asked for keys.
struct Asked(Etcd, Arc<AtomicUsize>);

#[async_trait]
impl Layer for Asked {
    fn inner(&self) -> &dyn Store {
        &self.0
    }

    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.inner().keys(prefix).await
    }
}

#[tokio::test]
async fn members_together_are_refused_where_their_node_is_full_and_soft_ones_go_elsewhere() {
    let world = World::new(2, 0, &[]).await;
    world.group("together", Policy::Affinity).await;
    world.group("rather", Policy::SoftAffinity).await;
    assert_eq!(world.member("together").await, Ok(node(0)));
    let none = world.member("together").await.unwrap_err();
    assert_eq!(none.left_out, [node(1)].into());
    assert_eq!(world.member("rather").await, Ok(node(1)));
    assert_eq!(
        world.member("rather").await.unwrap_err().left_out,
        BTreeSet::new(),
        "there is no room at all"
    );
}

#[tokio::test]
async fn soft_members_that_come_at_once_go_where_they_would_one_after_the_other() {
    for (policy, nodes, wanted) in [
        (Policy::SoftAntiAffinity, 3, &[8, 8, 8][..]),
        (Policy::SoftAntiAffinity, 24, &[1; 24]),
        (Policy::SoftAffinity, 3, &[24]),
    ] {
        let world = World::new(nodes, 0, &[]).await.roomy(99);
        world.group("rather", policy).await;
        let placed = futures::future::join_all((0..24).map(|_| world.member("rather"))).await;
        let mut on: BTreeMap<NodeId, usize> = BTreeMap::new();
        placed.into_iter().for_each(|node| *on.entry(node.unwrap()).or_default() += 1);
        assert_eq!(on.into_values().collect::<Vec<_>>(), wanted, "{policy}");
        assert_eq!(world.claims().len(), 24, "who was crowded out claims nothing");
    }
}

#[tokio::test]
async fn a_place_is_found_beyond_the_first_candidates() {
    let world = World::new(40, 0, &[]).await.roomy(2);
    world.group("together", Policy::Affinity).await;
    world.group("apart", Policy::AntiAffinity).await;
    for number in 0..40 {
        assert_eq!(world.member("apart").await, Ok(node(number)));
    }
    // Somebody began at the far end.
    let query = format!("{QUERY}&limit=1");
    let instance = world.schedule(&query, None).await.unwrap().unwrap().instance;
    let mut record: Instance = decode(&world.under(&world.keys.instance(instance))[0].value).unwrap();
    record.group = Some("together".to_owned());
    record.assigned = Some(Assigned { node: node(39), epoch: 1 });
    let key = world.keys.membership(&record).unwrap();
    let txn = Txn::new().put(key, "").put(world.keys.instance(instance), encode(&record));
    world.etcd.memory.txn(txn).await.unwrap();
    let joined = world.schedule_within(Some("together"), &query, None).await.unwrap().unwrap();
    assert_eq!(joined.node, node(39), "whom the group leaves out uses no limit up");
}

#[tokio::test]
async fn who_is_quicker_at_a_node_has_it_and_the_other_goes_on() {
    let world = World::new(2, 0, &[]).await.roomy(9);
    for (name, policy, wanted) in
        [("apart", Policy::AntiAffinity, Ok(node(1))), ("together", Policy::Affinity, Ok(node(1)))]
    {
        world.group(name, policy).await;
        let cloud = world.cloud();
        let query = ResourceQuery::parse(QUERY).unwrap();
        let ask = Ask::new(&query).unwrap().within(Joining::new(&cloud, name).await.unwrap());
        let peers = ask.group.as_ref().unwrap().peers(&cloud).await.unwrap();
        // Another comes in between: on the same node, or on the other.
        let at = if policy == Policy::AntiAffinity { node(0) } else { node(1) };
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let between = Txn::new()
            .put(world.keys.member("p", name, at, instance), "")
            .put(world.keys.request(at, instance), "x");
        world.etcd.memory.txn(between).await.unwrap();
        let refused =
            ask.group.as_ref().unwrap().demand(&cloud, &peers, node(0), true, Txn::new()).put("k", "v");
        assert!(!world.etcd.memory.txn(refused).await.unwrap().succeeded, "{policy}");
        assert_eq!(world.member(name).await, wanted, "{policy}");
    }
}

#[tokio::test]
async fn a_group_that_has_members_and_whose_key_is_lost_is_told() {
    let world = World::new(2, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    for name in ["Apart", "empty"] {
        create_group(&cloud, name, Policy::AntiAffinity, None).await.unwrap();
    }
    world.member("Apart").await.unwrap();
    assert!(lost_groups(&cloud).await.unwrap().is_empty());
    for name in ["apart", "empty"] {
        let lost = Txn::new().delete(world.keys.group(&cloud.project, name));
        world.etcd.memory.txn(lost).await.unwrap();
    }
    assert_eq!(lost_groups(&cloud).await.unwrap().into_iter().collect::<Vec<_>>(), ["Apart"]);
    create_group(&cloud, "apart", Policy::AntiAffinity, None).await.unwrap();
    assert!(lost_groups(&cloud).await.unwrap().is_empty());
    assert_eq!(world.members("apart").await.len(), 1);
}

#[tokio::test]
async fn a_place_that_nobody_has_any_more_is_free() {
    let world = World::new(2, 0, &[]).await;
    world.group("apart", Policy::AntiAffinity).await;
    world.left_over("apart", node(0)).await;
    world.left_over("apart", node(1)).await;
    let taken = world.schedule_within(Some("apart"), QUERY, Some("web")).await.unwrap().unwrap();
    assert_eq!(taken.node, node(0), "when nothing else was left, what is left over was looked at");
    assert_eq!(world.members("apart").await, [node(0)]);
    destroy(&world.cloud(), taken.instance).await.unwrap();
    assert_eq!(world.members("apart").await, []);
    world.left_over("apart", node(1)).await;
    assert_eq!(tend_instances(&world.cloud()).await.unwrap().done.len(), 1);
    assert_eq!(world.members("apart").await, []);
}

#[tokio::test]
async fn a_place_goes_with_what_is_destroyed_though_its_record_is_gone() {
    let world = World::new(1, 0, &[]).await;
    world.group("apart", Policy::AntiAffinity).await;
    let placed = world.schedule_within(Some("apart"), QUERY, None).await.unwrap().unwrap();
    let lost = Txn::new().delete(world.keys.instance(placed.instance));
    world.etcd.memory.txn(lost).await.unwrap();
    assert_eq!(world.members("apart").await, [node(0)], "its node is asked for it");
    destroy(&world.cloud(), placed.instance).await.unwrap();
    assert_eq!(world.members("apart").await, []);
}

#[tokio::test]
async fn a_place_that_nobody_has_any_more_is_told_as_free() {
    let world = World::new(1, 0, &[]).await;
    world.group("apart", Policy::AntiAffinity).await;
    world.left_over("apart", node(0)).await;
    let query = ResourceQuery::parse(QUERY).unwrap();
    let ask =
        || async { Ask::new(&query).unwrap().within(Joining::new(&world.cloud(), "apart").await.unwrap()) };
    let preview = crate::preview(&world.cloud(), &ask().await).await.unwrap();
    assert_eq!(preview.map(|preview| preview.node), Ok(node(0)));
    assert_eq!(world.members("apart").await, [node(0)], "it only looks");
    world.schedule_within(Some("apart"), QUERY, None).await.unwrap().unwrap();
    assert!(crate::preview(&world.cloud(), &ask().await).await.unwrap().is_err(), "somebody has it");
}

#[tokio::test]
async fn one_whose_record_alone_is_gone_keeps_its_name_and_its_place() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    let cloud = world.cloud();
    world.group("Apart", Policy::AntiAffinity).await;
    let made = world.schedule_within(Some("Apart"), QUERY, Some("web")).await.unwrap().unwrap();
    let key = world.keys.instance(made.instance);
    world.etcd.memory.txn(Txn::new().delete(key.clone())).await.unwrap();
    assert_eq!(tend_instances(&cloud).await.unwrap().done, []);
    let taken = world.schedule(QUERY, Some("web")).await.unwrap_err().to_string();
    assert!(taken.contains("`eschedule heal` writes it anew"), "{taken}");
    assert_eq!(world.member("apart").await.map_err(|none| none.left_out), Err([node(0)].into()));
    assert_eq!(crate::heal(&cloud, &[], false).await.unwrap().done.len(), 1);
    let record: Instance = decode(&world.under(&key)[0].value).unwrap();
    assert_eq!((record.name.as_deref(), record.group.as_deref()), (Some("web"), Some("Apart")));
    destroy(&cloud, made.instance).await.unwrap();
    assert_eq!(world.members("apart").await, []);
    world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
}

#[tokio::test]
async fn what_failed_before_it_ever_ran_has_no_place_and_keeps_its_name() {
    for (has_run, request_stays) in [(false, false), (true, false), (false, true)] {
        let world = World::new(1, 0, &[]).await.roomy(9);
        let cloud = world.cloud();
        let has_place = has_run || request_stays;
        for policy in [Policy::AntiAffinity, Policy::SoftAntiAffinity] {
            let (group, name) = (policy.to_string(), format!("web-{policy}"));
            world.group(&group, policy).await;
            let made = world.schedule_within(Some(&group), QUERY, Some(&name)).await.unwrap().unwrap();
            world.gives_up(made, has_run, request_stays).await;
            let taken = world.schedule_within(Some(&group), QUERY, Some(&name)).await.unwrap_err();
            let told = taken.to_string();
            assert_eq!(
                told.contains(&format!("in ERROR and never ran: `eschedule destroy {}`", made.instance)),
                !has_place,
                "{told}"
            );
            // A soft group refuses nobody, so that a controller is who takes the place away.
            if policy.is_soft() {
                let done = tend_instances(&cloud).await.unwrap().done;
                assert_eq!(done.len(), usize::from(!has_place), "{done:?}");
                assert_eq!(world.members(&group).await.len(), usize::from(has_place));
            } else if has_place {
                assert!(world.member(&group).await.is_err(), "{has_run} {request_stays}");
            } else {
                assert_eq!(world.member(&group).await, Ok(node(0)));
                assert_eq!(world.members(&group).await, [node(0)]);
                // Its record tells of it still, and goes by a wish of its user.
                destroy(&cloud, made.instance).await.unwrap();
                assert_eq!(world.members(&group).await, [node(0)]);
            }
        }
    }
}

#[tokio::test]
async fn a_place_is_not_taken_from_one_that_is_brought_back_at_that_moment() {
    let world = World::new(1, 0, &[]).await.roomy(9);
    world.group("apart", Policy::AntiAffinity).await;
    let made = world.schedule_within(Some("apart"), QUERY, None).await.unwrap().unwrap();
    let request = world.under(&world.keys.request(made.node, made.instance)).remove(0);
    let pair = world.under(&world.keys.instance(made.instance)).remove(0);
    let record: Instance = decode(&pair.value).unwrap();
    world.gives_up(made, false, false).await;
    let still = crate::intent::failed(&world.cloud(), &record).await.unwrap().unwrap();
    let back = Txn::new().put(request.key, request.value);
    world.etcd.memory.txn(back).await.unwrap();
    let late = still.into_iter().fold(Txn::new(), Txn::when).put("k", "v");
    assert!(!world.etcd.memory.txn(late).await.unwrap().succeeded);
    assert_eq!(crate::intent::failed(&world.cloud(), &record).await.unwrap(), None);
}

#[tokio::test]
async fn a_group_is_made_once_and_deleted_when_it_has_no_members() {
    let world = World::new(2, 0, &[]).await;
    let cloud = world.cloud();
    let made = create_group(&cloud, "Apart", Policy::AntiAffinity, None).await.unwrap();
    let error = create_group(&cloud, "apart", Policy::Affinity, None).await.unwrap_err();
    assert!(error.kind() == Kind::Refused && error.to_string().contains("`Apart` already"), "{error}");
    assert_eq!(group(&cloud, "APART").await.unwrap(), made);
    let placed = world.schedule_within(Some("apart"), QUERY, None).await.unwrap().unwrap();
    let error = delete_group(&cloud, "apart").await.unwrap_err();
    assert!(error.kind() == Kind::Refused && error.to_string().contains("has 1 members"), "{error}");
    destroy(&cloud, placed.instance).await.unwrap();
    world.left_over("apart", node(0)).await;
    delete_group(&cloud, "apart").await.unwrap();
    for error in [
        delete_group(&cloud, "apart").await.unwrap_err(),
        group(&cloud, "apart").await.unwrap_err(),
        world.schedule_within(Some("apart"), QUERY, None).await.unwrap_err(),
    ] {
        assert!(matches!(error, CloudError::NotFound(_)), "{error}");
    }
    assert!(world.under("/ecompute/members/").is_empty());
}

#[tokio::test]
async fn a_group_that_somebody_else_has_made_since_is_not_deleted_with_a_stack() {
    let world = World::new(1, 0, &[]).await;
    let cloud = world.cloud();
    for stack in [None, Some("other")] {
        let made = create_group(&cloud, "front", Policy::Affinity, stack).await.unwrap();
        let error = delete_group_of(&cloud, "front", "shop").await.unwrap_err();
        assert!(error.kind() == Kind::Refused && error.to_string().contains("not of the stack"), "{error}");
        assert_eq!(group(&cloud, "front").await.unwrap(), made);
        delete_group(&cloud, "front").await.unwrap();
    }
    create_group(&cloud, "front", Policy::Affinity, Some("shop")).await.unwrap();
    delete_group_of(&cloud, "Front", "shop").await.unwrap();
    assert!(matches!(group(&cloud, "front").await.unwrap_err(), CloudError::NotFound(_)));
}

#[tokio::test]
async fn who_joins_a_group_that_is_deleted_meanwhile_is_refused_and_claims_nothing() {
    let world = World::new(2, 0, &[]).await;
    world.group("apart", Policy::AntiAffinity).await;
    let (cloud, query) = (world.cloud(), ResourceQuery::parse(QUERY).unwrap());
    let joining = Joining::new(&cloud, "apart").await.unwrap();
    let guest = Guest {
        kind: ec_model::Workload::Machine,
        naming: Naming::Name("web".to_owned()),
        user_data: None,
        keys: Vec::new(),
        image: ImageRef::at("file:///x"),
        boot: None,
        volumes: Vec::new(),
        token_required: false,
        snapshot: false,
        labels: BTreeMap::new(),
        metadata: BTreeMap::new(),
        restart: ec_model::Restart::No,
    };
    delete_group(&cloud, "apart").await.unwrap();
    world.group("apart", Policy::Affinity).await;
    let wanted = Wanted::new(Ask::new(&query).unwrap().within(joining), &guest).unwrap();
    let error = schedule(&cloud, &wanted, &world.stop).await.unwrap_err();
    assert!(error.kind() == Kind::Refused && error.to_string().contains("was deleted while"), "{error}");
    assert!(world.claims().is_empty() && world.under("/ecompute/instances").is_empty());
}

#[tokio::test]
async fn what_cannot_be_read_is_deleted_by_nobody() {
    use crate::{add_keypair, create_flavor, delete_flavor, delete_keypair};

    let world = World::new(1, 0, &[]).await;
    let (cloud, keys) = (world.cloud(), &world.keys);
    let query = ResourceQuery::parse(QUERY).unwrap();
    create_flavor(&cloud, "small", &query).await.unwrap();
    add_keypair(&cloud, "me", Vec::new()).await.unwrap();
    create_group(&cloud, "apart", Policy::AntiAffinity, None).await.unwrap();
    let delete = async || {
        let flavor = delete_flavor(&cloud, "small").await;
        [flavor, delete_keypair(&cloud, "me").await, delete_group(&cloud, "apart").await]
    };
    let all = [keys.flavor("small"), keys.keypair("p", "me"), keys.group("p", "apart")];
    let whole: Vec<_> = all.iter().map(|key| world.under(key).remove(0)).collect();
    for unreadable in ["{", r#"{"version": 99}"#] {
        let txn = all.iter().fold(Txn::new(), |txn, key| txn.put(key.clone(), unreadable));
        world.etcd.memory.txn(txn).await.unwrap();
        for (deleted, key) in delete().await.into_iter().zip(&all) {
            let error = deleted.unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("nothing was changed: use the release"), "{error}");
            assert_eq!(world.under(key)[0].value, unreadable.as_bytes());
        }
    }
    let txn = whole.into_iter().fold(Txn::new(), |txn, pair| txn.put(pair.key, pair.value));
    world.etcd.memory.txn(txn).await.unwrap();
    assert!(delete().await.into_iter().all(|deleted| deleted.is_ok()));
    assert!(delete().await.into_iter().all(|deleted| matches!(deleted, Err(CloudError::NotFound(_)))));
}

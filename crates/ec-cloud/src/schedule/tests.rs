//! Every step of scheduling fails, loses its answer, or is the last one before the process dies: what is left is
//! nothing, or a request with its claim, or something that a record leads to.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ec_model::{Group, ImageRef, Keyspace, Policy, ResourceQuery, Resources, Spec, decode};
use ec_placement_client::{
    Conflict, ConsumerAllocations, Inventory, Placement, PlacementResult, Provider, Summary,
};
use ec_store::{Layer, MemoryStore, Store, StoreResult, TxnOutcome};
use jiff::{SignedDuration, Timestamp};

use super::*;
use crate::{Guest, Joining, Kind, Naming, intent::sweep};

/// What happens at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It fails before anything is done.
    Fails,
    /// It is done, and nobody hears of it.
    AnswerLost,
    /// It is done, and told as what there was no space for.
    Full,
    /// The process dies before it.
    KilledBefore,
    /// The process dies after it was done.
    KilledAfter,
    /// It fails, and is done after the command has ended.
    DoneLater,
    /// SIGINT arrives while it is done.
    Interrupted,
    /// A claim is done and asked for once more by something in between, and refused then, for it is there.
    Repeated,
    /// Agents have put their signs of life anew before it.
    SignsAnew,
}

/// Steps are counted over store and placement together.
#[derive(Clone, Default)]
struct Plan {
    step: Arc<AtomicUsize>,
    faults: HashMap<usize, Fault>,
    stop: CancellationToken,
}

impl Plan {
    fn coming(&self) -> Option<Fault> {
        self.faults.get(&self.step.load(Ordering::Relaxed)).copied()
    }

    fn next(&self) -> Option<Fault> {
        let fault = self.coming();
        self.step.fetch_add(1, Ordering::Relaxed);
        if fault == Some(Fault::Interrupted) {
            self.stop.cancel();
        }
        fault
    }
}

async fn killed<T>() -> T {
    std::future::pending().await
}

/// A store in memory with a plan.
#[derive(Clone)]
struct Etcd {
    memory: MemoryStore,
    plan: Plan,
    later: Arc<Mutex<Vec<Txn>>>,
    /// Nodes give up at once what was requested without an answer.
    gives_up: bool,
}

#[async_trait]
impl Layer for Etcd {
    fn inner(&self) -> &dyn Store {
        &self.memory
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        // Others come between.
        tokio::task::yield_now().await;
        match self.plan.next() {
            Some(Fault::Fails) => {
                Err(StoreError::Unreachable { endpoints: "memory".into(), detail: "as told".into() })
            }
            Some(Fault::AnswerLost) => {
                self.memory.txn(txn).await?;
                for request in self.memory.content(&Keyspace::default().all_requests()).pairs {
                    if self.gives_up {
                        self.memory.txn(Txn::new().delete(request.key)).await?;
                    }
                }
                Err(StoreError::Unknown("as told".into()))
            }
            Some(Fault::Full) => {
                self.memory.txn(txn).await?;
                Err(StoreError::Full("as told".into()))
            }
            Some(Fault::DoneLater) => {
                self.later.lock().unwrap().push(txn);
                Err(StoreError::Unknown("as told".into()))
            }
            Some(Fault::KilledBefore) => killed().await,
            Some(Fault::KilledAfter) => {
                self.memory.txn(txn).await?;
                killed().await
            }
            Some(Fault::SignsAnew) => {
                for sign in self.memory.content(&Keyspace::default().all_alive()).pairs {
                    self.memory.txn(Txn::new().put(sign.key, sign.value)).await?;
                }
                self.memory.txn(txn).await
            }
            Some(Fault::Interrupted | Fault::Repeated) | None => self.memory.txn(txn).await,
        }
    }
}

/// A placement whose nodes have room for some consumers each.
#[derive(Clone)]
struct Rooms {
    rooms: Vec<(NodeId, usize)>,
    claims: Arc<Mutex<HashMap<InstanceId, NodeId>>>,
    plan: Plan,
    later: Arc<Mutex<Vec<(InstanceId, NodeId)>>>,
    /// Somebody else is quicker so often.
    rivals: Arc<AtomicUsize>,
    /// It does not tell of single nodes.
    silent: bool,
    /// So many seconds its clock is ahead.
    ahead: Option<i64>,
}

impl Rooms {
    fn lost() -> PlacementError {
        PlacementError::Unreachable { endpoint: "memory".into(), detail: "as told".into() }
    }

    async fn step<T>(&self, act: impl FnOnce() -> PlacementResult<T>) -> PlacementResult<T> {
        match self.plan.next() {
            Some(Fault::Fails | Fault::DoneLater) => Err(Self::lost()),
            Some(Fault::AnswerLost | Fault::Full) => act().and_then(|_| Err(Self::lost())),
            Some(Fault::KilledBefore) => killed().await,
            Some(Fault::KilledAfter) => {
                act()?;
                killed().await
            }
            Some(Fault::Interrupted | Fault::Repeated | Fault::SignsAnew) | None => act(),
        }
    }
}

#[async_trait]
impl Placement for Rooms {
    fn on_behalf(&self, _: Option<ec_model::RequestId>) -> Arc<dyn Placement> {
        Arc::new(self.clone())
    }

    async fn compare_clocks(&self) -> Option<i64> {
        self.ahead
    }

    async fn candidates(&self, _: &ResourceQuery, limit: Option<usize>) -> PlacementResult<Candidates> {
        let claims = self.claims.lock().unwrap().clone();
        let found = self
            .rooms
            .iter()
            .filter(|(node, room)| claims.values().filter(|claimed| *claimed == node).count() < *room);
        let candidates: Vec<_> = found
            .take(limit.unwrap_or(usize::MAX))
            .map(|(node, _)| Candidate {
                allocations: [(*node, BTreeMap::from([("VCPU".to_owned(), 1)]))].into(),
                mappings: BTreeMap::new(),
            })
            .collect();
        let summaries = candidates
            .iter()
            .flat_map(|candidate| candidate.allocations.keys().map(|node| (*node, Summary::default())))
            .collect();
        Ok(Candidates { candidates, summaries })
    }

    async fn claim(&self, claim: &Claim<'_>) -> PlacementResult<()> {
        let node = *claim.candidate.allocations.keys().next().unwrap();
        if self.plan.coming() == Some(Fault::DoneLater) {
            self.later.lock().unwrap().push((claim.instance, node));
        }
        let is_repeated = self.plan.coming() == Some(Fault::Repeated);
        self.step(|| {
            if self.rivals.load(Ordering::Relaxed) > 0 {
                self.rivals.fetch_sub(1, Ordering::Relaxed);
                let why = "as told".to_owned();
                return Err(PlacementError::Conflict(Conflict { why, does_not_fit: true }));
            }
            self.claims.lock().unwrap().insert(claim.instance, node);
            match is_repeated {
                true => Err(PlacementError::Conflict("it is there".to_owned().into())),
                false => Ok(()),
            }
        })
        .await
    }

    async fn allocations(&self, instance: InstanceId) -> PlacementResult<Option<ConsumerAllocations>> {
        let claims = self.claims.lock().unwrap();
        Ok(claims.get(&instance).map(|_| ConsumerAllocations::default()))
    }

    async fn reallocate(
        &self,
        _: InstanceId,
        _: &ConsumerAllocations,
        _: &BTreeMap<NodeId, Resources>,
    ) -> PlacementResult<()> {
        Ok(())
    }

    async fn provider_allocations(&self, _: NodeId) -> PlacementResult<HashMap<InstanceId, Resources>> {
        Ok(HashMap::new())
    }

    async fn traits(&self, _: NodeId) -> PlacementResult<BTreeSet<String>> {
        Ok(BTreeSet::new())
    }

    async fn is_where(&self, _: NodeId, _: &str, _: &str) -> PlacementResult<bool> {
        Ok(true)
    }

    async fn provider(&self, _: NodeId) -> PlacementResult<Option<Provider>> {
        Ok(None)
    }

    async fn inventory(&self, _: NodeId) -> PlacementResult<BTreeMap<String, Inventory>> {
        if self.silent { Err(Self::lost()) } else { Ok(BTreeMap::new()) }
    }

    async fn usages(&self, _: NodeId) -> PlacementResult<Resources> {
        Ok(Resources::new())
    }

    async fn associated_traits(&self, _: &BTreeSet<String>) -> PlacementResult<BTreeSet<String>> {
        Ok(BTreeSet::new())
    }

    async fn marked_down(&self) -> PlacementResult<BTreeSet<NodeId>> {
        Ok(BTreeSet::new())
    }

    async fn disabled(&self) -> PlacementResult<BTreeSet<NodeId>> {
        Ok(BTreeSet::new())
    }

    async fn delete_provider(&self, _: NodeId) -> PlacementResult<()> {
        Ok(())
    }

    async fn mark_down(&self, _: NodeId, _: bool) -> PlacementResult<bool> {
        Ok(false)
    }

    async fn shared_storages(&self) -> PlacementResult<Vec<ec_model::SharedStorage>> {
        Ok(Vec::new())
    }

    async fn join_shared(&self, _: &ec_model::SharedStorage, _: NodeId) -> PlacementResult<()> {
        Ok(())
    }

    async fn leave_shared(&self, _: &ec_model::SharedStorage, _: NodeId) -> PlacementResult<()> {
        Ok(())
    }

    async fn release(&self, instance: InstanceId) -> PlacementResult<()> {
        self.step(|| {
            self.claims.lock().unwrap().remove(&instance);
            Ok(())
        })
        .await
    }
}

struct World {
    etcd: Etcd,
    placement: Rooms,
    keys: Keyspace,
    stop: CancellationToken,
}

fn alive(n: u128) -> Alive {
    Alive {
        node: node(n),
        name: format!("n{n}"),
        agent: "test".into(),
        formats: Alive::formats_of_this_release(),
        virt_type: "qemu".into(),
        machine: String::new(),
        host: String::new(),
        url: None,
        storage: None,
        started_at: jiff::Timestamp::UNIX_EPOCH,
    }
}

fn node(n: u128) -> NodeId {
    NodeId::new(uuid::Uuid::from_u128(n))
}

fn guest(name: Option<&str>) -> Guest {
    Guest {
        kind: ec_model::Workload::Machine,
        naming: name.map_or(Naming::None, |name| Naming::Name(name.to_owned())),
        user_data: Some(ec_model::Blob(b"secret".to_vec())),
        keys: Vec::new(),
        image: ImageRef::at("file:///x"),
        boot: None,
        volumes: Vec::new(),
        token_required: true,
        snapshot: false,
        labels: std::collections::BTreeMap::new(),
        metadata: std::collections::BTreeMap::new(),
        restart: ec_model::Restart::No,
    }
}

impl World {
    /// Nodes with room for one each, the first `dead` of them without an agent.
    async fn new(nodes: u128, dead: u128, faults: &[(usize, Fault)]) -> Self {
        let plan = Plan { faults: faults.iter().copied().collect(), ..Plan::default() };
        let stop = plan.stop.clone();
        let memory = MemoryStore::new();
        let keys = Keyspace::default();
        for n in dead..nodes {
            memory.txn(Txn::new().put(keys.alive(node(n)), encode(&alive(n)))).await.unwrap();
        }
        Self {
            etcd: Etcd { memory, plan: plan.clone(), later: Arc::default(), gives_up: false },
            placement: Rooms {
                rooms: (0..nodes).map(|n| (node(n), 1)).collect(),
                claims: Arc::default(),
                plan,
                later: Arc::default(),
                rivals: Arc::default(),
                silent: false,
                ahead: None,
            },
            keys,
            stop,
        }
    }

    fn cloud(&self) -> Cloud {
        Cloud {
            host: ec_runtime::Host::default(),
            store: Arc::new(self.etcd.clone()),
            placement: Arc::new(self.placement.clone()),
            keys: self.keys.clone(),
            project: "p".into(),
            user: "u".into(),
            notice: |_| (),
            request_id: Some(REQUEST),
        }
    }

    async fn schedule(&self, query: &str, name: Option<&str>) -> CloudResult<Result<Scheduled, NoRoom>> {
        self.schedule_within(None, query, name).await
    }

    async fn schedule_within(
        &self,
        group: Option<&str>,
        query: &str,
        name: Option<&str>,
    ) -> CloudResult<Result<Scheduled, NoRoom>> {
        let guest = guest(name);
        let query = ResourceQuery::parse(query).map_err(|error| CloudError::Invalid(error.to_string()))?;
        let mut ask = Ask::new(&query)?;
        if let Some(group) = group {
            ask = ask.within(Joining::new(&self.cloud(), group).await?);
        }
        let wanted = Wanted::new(ask, &guest)?;
        schedule(&self.cloud(), &wanted, &self.stop).await
    }

    /// Makes a group, by no step that counts.
    async fn group(&self, name: &str, policy: Policy) {
        let (name, project) = (name.to_owned(), "p".to_owned());
        let key = self.keys.group(&project, &name);
        let group = Group { name, project, policy, stack: None, created_at: Timestamp::UNIX_EPOCH };
        self.etcd.memory.txn(Txn::new().put(key, encode(&group))).await.unwrap();
    }

    fn claims(&self) -> Vec<InstanceId> {
        self.placement.claims.lock().unwrap().keys().copied().collect()
    }

    fn under(&self, prefix: &str) -> Vec<KeyValue> {
        self.etcd.memory.content(prefix).pairs
    }

    /// What was sent and had not arrived arrives.
    async fn late_arrivals(&self) {
        let txns = std::mem::take(&mut *self.etcd.later.lock().unwrap());
        for txn in txns {
            self.etcd.memory.txn(txn).await.unwrap();
        }
        let claims = std::mem::take(&mut *self.placement.later.lock().unwrap());
        self.placement.claims.lock().unwrap().extend(claims);
    }

    /// The instances that are requested; of each the claim, the user-data and a record that leads to it are there.
    fn requested(&self) -> Vec<InstanceId> {
        let requests = self.under(&self.keys.all_requests());
        let requests: Vec<_> =
            requests.iter().map(|pair| self.keys.parse_request(&pair.key).unwrap()).collect();
        for (node, instance) in &requests {
            assert_eq!(self.placement.claims.lock().unwrap().get(instance), Some(node), "claimed there");
            assert_eq!(self.under(&self.keys.user_data(*node, *instance)).len(), 1);
            let record: Instance = decode(&self.under(&self.keys.instance(*instance))[0].value).unwrap();
            assert_eq!(record.assigned, Some(Assigned { node: *node, epoch: 1 }));
        }
        requests.into_iter().map(|(_, instance)| instance).collect()
    }

    /// Every claim is of a request, or a record leads to it, so that its node gives it back.
    fn every_claim_is_known(&self, what: &str) {
        for instance in self.claims() {
            assert_eq!(
                self.under(&self.keys.instance(instance)).len(),
                1,
                "{what}: nobody knows of the claim {instance}"
            );
        }
    }

    /// Ten minutes later somebody comes across what is left.
    async fn swept(&self) {
        // Nothing more goes wrong.
        self.etcd.plan.step.store(usize::MAX / 2, Ordering::Relaxed);
        for pair in self.under(&self.keys.instances()) {
            let instance = self.keys.parse_instance(&pair.key).unwrap();
            let mut record: Instance = decode(&pair.value).unwrap();
            assert_eq!(record.instance, instance);
            record.created_at = Timestamp::now() - STALE;
            let aged = Txn::new().put(pair.key.clone(), encode(&record));
            let revision = self.etcd.memory.txn(aged).await.unwrap().revision;
            sweep(&self.cloud(), record, revision).await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_only_another_clock_has_left_over_is_left_to_the_command_that_may_be_at_it() {
    use crate::{destroy, name_is_free};

    for ahead in [-660, 660] {
        let mut world = World::new(2, 0, &[]).await;
        let memory = world.etcd.memory.clone();
        world.group("shop", Policy::AntiAffinity).await;
        let Ok(Ok(left)) = world.schedule_within(Some("shop"), QUERY, Some("web")).await else {
            panic!("there is room")
        };
        // By this host's clock its command began long ago, and has not claimed anything yet.
        let key = world.keys.instance(left.instance);
        let mut record: Instance = decode(&world.under(&key)[0].value).unwrap();
        (record.assigned, record.created_at) = (None, Timestamp::now() - STALE * 2);
        let request = world.keys.request(left.node, left.instance);
        memory.txn(Txn::new().delete(request).put(key.clone(), encode(&record))).await.unwrap();
        world.placement.claims.lock().unwrap().clear();
        world.placement.ahead = Some(ahead);

        let before = memory.content("/");
        let cloud = world.cloud();
        let refused = [
            world.schedule(QUERY, Some("web")).await.map(drop).unwrap_err(),
            name_is_free(&cloud, ec_model::Workload::Machine, "web").await.unwrap_err(),
            destroy(&cloud, left.instance).await.map(drop).unwrap_err(),
            crate::group::tidy(&cloud, "shop").await.map(drop).unwrap_err(),
        ];
        for why in refused {
            let (kind, why) = (why.kind(), why.to_string());
            assert!(kind == Kind::Refused && why.contains("`timedatectl` on both"), "{why}");
            assert!(why.contains(&left.instance.to_string()) && why.contains("660 s"), "{why}");
        }
        assert!(crate::group::placeless(&cloud, "shop").await.unwrap().is_empty());
        assert_eq!(memory.content("/").pairs, before.pairs, "all of it stays");
        // A command that was killed: clocks agree, or nobody tells.
        for ahead in [Some(60), None] {
            world.placement.ahead = ahead;
            name_is_free(&world.cloud(), ec_model::Workload::Machine, "web").await.unwrap();
        }
        let Ok(Ok(_)) = world.schedule(QUERY, Some("web")).await else { panic!("the name is free") };
        assert!(world.under(&key).is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn for_a_node_that_was_revoked_nothing_is_written_that_was_not_there() {
    use crate::{Doomed, Verb, act, destroy};

    let world = World::new(1, 0, &[]).await;
    let Ok(made) = world.schedule(QUERY, Some("web")).await.unwrap() else { panic!("there is room") };
    let (cloud, memory, keys) = (world.cloud(), &world.etcd.memory, &world.keys);
    let put = async |name: &str, revoked: bool| {
        let created_at = Timestamp::UNIX_EPOCH;
        let record = ec_model::Node {
            node: node(0),
            name: name.to_owned(),
            created_at,
            troubles: Vec::new(),
            revoked,
        };
        memory.txn(Txn::new().put(keys.node(node(0)), encode(&record))).await.unwrap();
    };
    let request = || world.under(&keys.request(node(0), made.instance)).remove(0);
    let rename = |name: &str| Verb::Rename(name.to_owned());
    act(&cloud, made.instance, &Verb::Lock("mine".to_owned())).await.unwrap();
    act(&cloud, made.instance, &Verb::Unlock).await.unwrap();
    // One that is dead finds what was wished when it comes back.
    put("n0", false).await;
    memory.txn(Txn::new().delete(keys.alive(node(0)))).await.unwrap();
    act(&cloud, made.instance, &rename("later")).await.unwrap();
    act(&cloud, made.instance, &Verb::Lock("mine".to_owned())).await.unwrap();

    put("n0", true).await;
    act(&cloud, made.instance, &Verb::Unlock).await.unwrap();
    let before = request();
    for verb in [rename("last"), Verb::Lock(String::new())] {
        let refused = act(&cloud, made.instance, &verb).await.unwrap_err();
        assert!(matches!(refused, CloudError::Refused(_)), "{refused}");
        assert!(refused.to_string().contains("n0 (00000000") && refused.to_string().contains("revoked"));
    }
    assert_eq!(request(), before);
    // Nor where the node damaged what says so.
    memory.txn(Txn::new().put(keys.node(node(0)), "{")).await.unwrap();
    let refused = act(&cloud, made.instance, &rename("last")).await.unwrap_err();
    assert!(refused.to_string().contains("cannot be read"), "{refused}");
    put("n0", true).await;
    let doomed = destroy(&cloud, made.instance).await.unwrap();
    assert!(matches!(doomed, Doomed::By { alive: false, .. }));
    assert!(matches!(world.schedule(QUERY, None).await, Ok(Err(_))), "nothing is placed there");
}

#[tokio::test(start_paused = true)]
async fn damaged_user_data_of_one_is_told_and_hides_nothing_else_of_a_stack() {
    use crate::{STACK, standing};

    let world = World::new(2, 0, &[]).await;
    let sealed =
        ec_store::Sealed::new(Arc::new(world.etcd.clone()), None, vec![world.keys.every_user_data()]);
    let cloud = Cloud { store: Arc::new(sealed.unwrap()), ..world.cloud() };
    let query = ResourceQuery::parse(QUERY).unwrap();
    let mut made = Vec::new();
    for name in ["web", "db"] {
        let guest = Guest { labels: [(STACK.to_owned(), "shop".to_owned())].into(), ..guest(Some(name)) };
        let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
        made.push(schedule(&cloud, &wanted, &world.stop).await.unwrap().ok().unwrap());
    }
    let key = world.keys.user_data(made[0].node, made[0].instance);
    world.etcd.memory.txn(Txn::new().put(key, &b"\0sealed1damaged"[..])).await.unwrap();
    let (instances, _) = standing(&cloud, "shop").await.unwrap();
    assert_eq!(instances.len(), 2);
    for one in instances {
        let ails = one.ails.as_ref().is_some_and(|why| why.contains("cannot be opened"));
        assert_eq!(ails, one.record.instance == made[0].instance, "{one:?}");
    }
}

mod copies;
mod groups;
mod meant;
mod swept;

const REQUEST: ec_model::RequestId = ec_model::RequestId::new(uuid::Uuid::from_u128(7));

const QUERY: &str = "resources=VCPU:1,MEMORY_MB:1";

/// More steps than any of these schedules takes.
const STEPS: usize = 12;

const FAULTS: [Fault; 8] = [
    Fault::Fails,
    Fault::AnswerLost,
    Fault::Full,
    Fault::KilledBefore,
    Fault::KilledAfter,
    Fault::DoneLater,
    Fault::Interrupted,
    Fault::Repeated,
];

#[tokio::test(start_paused = true)]
async fn whatever_step_fails_nothing_is_lost_and_nothing_is_leaked() {
    for (at, rivals) in (0..STEPS).flat_map(|at| [(at, 0), (at, 1), (at, 2)]) {
        for first in FAULTS {
            through(&[(at, first)], rivals, None).await;
            through(&[(at, first)], rivals, Some("apart")).await;
            for second in FAULTS {
                through(&[(at, first), (at + 1, second)], rivals, None).await;
            }
        }
    }
}

/// Schedules through these faults, and looks at what is left: at once, after what was sent has arrived late, and
/// after somebody has come across it.
async fn through(faults: &[(usize, Fault)], rivals: usize, group: Option<&str>) {
    let world = World::new(3, 0, faults).await;
    if let Some(group) = group {
        world.group(group, Policy::AntiAffinity).await;
    }
    world.placement.rivals.store(rivals, Ordering::Relaxed);
    let what = format!("{faults:?} with {rivals} rivals, in {group:?}");
    let scheduling = world.schedule_within(group, QUERY, Some("web"));
    let outcome = tokio::time::timeout(Duration::from_secs(60), scheduling).await;
    world.every_claim_is_known(&what);
    let requested = world.requested();
    // Where etcd does not answer at all, the error says that nobody knows.
    let unsure = matches!(&outcome, Ok(Err(error)) if error.to_string().contains("will tell whether"));
    match &outcome {
        Ok(Ok(Ok(scheduled))) => assert_eq!(requested, [scheduled.instance], "{what}"),
        Ok(Ok(Err(no_room))) => panic!("{what}: {no_room:?}"),
        Ok(Err(error)) => {
            assert!(unsure || requested.is_empty(), "{what}: {error} and yet requested");
        }
        Err(_killed) => assert!(requested.len() <= 1, "{what}"),
    }
    let told = matches!(outcome, Ok(Ok(Ok(_))));
    world.late_arrivals().await;
    world.every_claim_is_known(&what);
    let requested = world.requested();
    assert!(told || unsure || requested.is_empty() || outcome.is_err(), "{what}: requested later");
    world.swept().await;
    assert_eq!(world.requested(), requested, "{what}: a request was swept away");
    assert_eq!(world.claims(), requested, "{what}: claims");
    assert_eq!(world.under(&world.keys.instances()).len(), requested.len(), "{what}: indexes");
    assert_eq!(world.under("/ecompute/names/").len(), requested.len(), "{what}: names");
    let members = if group.is_some() { requested.len() } else { 0 };
    assert_eq!(world.under("/ecompute/members/").len(), members, "{what}: members");
}

#[tokio::test(start_paused = true)]
async fn a_claim_in_doubt_is_known_also_where_its_record_was_swept_while_the_host_slept() {
    // The record is the first step; giving the claim back, the second, fails.
    let world = World::new(1, 0, &[(1, Fault::Fails)]).await;
    let (cloud, guest, query) = (world.cloud(), guest(Some("web")), ResourceQuery::parse(QUERY).unwrap());
    let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
    let intent = Intent::write(&cloud, &wanted, &wanted.spec()).await.unwrap();
    let instance = intent.instance;
    world.etcd.memory.txn(Txn::new().delete(cloud.keys.instance(instance))).await.unwrap();
    world.placement.claims.lock().unwrap().insert(instance, node(0));
    intent.abandon(&cloud).await.unwrap_err();
    world.every_claim_is_known("swept");
    let left: Instance = decode(&world.under(&world.keys.instance(instance))[0].value).unwrap();
    assert!(left.name.is_none() && Timestamp::now().duration_since(left.created_at) < STALE / 2);
    world.swept().await;
    assert!(
        world.claims().is_empty() && world.under("/ecompute/").len() == world.under("/ecompute/alive").len()
    );
}

/// Somebody's clock is ahead, or its command slept: what is wrong is no node.
#[tokio::test]
async fn one_whose_record_was_taken_away_while_it_was_placed_is_told_that() {
    let world = World::new(1, 0, &[]).await;
    let (cloud, guest, query) = (world.cloud(), guest(Some("web")), ResourceQuery::parse(QUERY).unwrap());
    let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
    let intent = Intent::write(&cloud, &wanted, &wanted.spec()).await.unwrap();
    world.etcd.memory.txn(Txn::new().delete(cloud.keys.instance(intent.instance))).await.unwrap();
    let asked = super::request(&cloud, &intent, node(0), &wanted, None, None, false).await;
    let Requested::No(Some(error)) = asked else { panic!("it was requested, or its node is to blame") };
    assert!(error.to_string().contains("somebody else took"), "{error}");
    assert!(world.requested().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_was_requested_without_an_answer_is_told_also_where_its_node_gave_it_up_at_once() {
    let mut given_up = 0;
    for at in 0..STEPS {
        let mut world = World::new(1, 0, &[(at, Fault::AnswerLost)]).await;
        world.etcd.gives_up = true;
        let outcome = world.schedule(QUERY, Some("web")).await;
        let records = world.under(&world.keys.instances());
        let records = records.iter().map(|pair| decode::<Instance>(&pair.value).unwrap());
        let assigned: Vec<_> = records.filter(|record| record.assigned.is_some()).collect();
        if let ([record], []) = (&assigned[..], &world.requested()[..]) {
            given_up += 1;
            let made = outcome.unwrap().unwrap();
            assert_eq!(made.instance, record.instance, "its reason is found by that");
        }
    }
    assert_eq!(given_up, 1);
}

#[tokio::test(start_paused = true)]
async fn an_interruption_takes_back_what_is_not_requested_and_says_so() {
    let world = World::new(1, 0, &[(0, Fault::Interrupted)]).await;
    let error = world.schedule(QUERY, Some("web")).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Interrupted);
    assert_eq!(error.to_string(), "interrupted; nothing was requested");
    assert!(world.claims().is_empty() && world.under("/ecompute/instances").is_empty());
    assert!(world.under("/ecompute/names").is_empty());
}

#[tokio::test]
async fn a_name_is_borne_by_one_within_its_project() {
    let world = World::new(3, 0, &[]).await;
    let first = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    for spelling in ["web", "WEB"] {
        let error = world.schedule(QUERY, Some(spelling)).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Refused);
        assert!(error.to_string().contains(&first.instance.to_string()), "{error:?}");
    }
    assert_eq!(world.claims(), [first.instance], "nothing was claimed for those");
    assert_eq!(world.under(&world.keys.instances()).len(), 1);
    world.schedule(QUERY, Some("web2")).await.unwrap().unwrap();
    world.schedule(QUERY, None).await.unwrap().unwrap();
}

#[tokio::test]
async fn of_two_at_once_one_gets_the_name() {
    let world = World::new(9, 0, &[]).await;
    let (a, b, c) = tokio::join!(
        world.schedule(QUERY, Some("web")),
        world.schedule(QUERY, Some("web")),
        world.schedule(QUERY, Some("web"))
    );
    let won = [a, b, c].into_iter().filter(|outcome| matches!(outcome, Ok(Ok(_)))).count();
    assert_eq!((won, world.claims().len(), world.requested().len()), (1, 1, 1));
}

#[tokio::test]
async fn a_name_whose_bearer_is_gone_for_long_is_taken_over_and_one_that_is_not_is_kept() {
    for (age, placed, status, claimed, taken_over) in [
        (11, false, false, true, true),
        (9, false, false, true, false),
        // Its clock was ahead: a little, or by as much as nobody may wait for.
        (-9, false, false, true, false),
        (-11, false, false, true, true),
        (11, true, false, false, true),
        (11, true, true, false, false),
        // Somebody deleted its keys by hand: the guest may run, and stays counted.
        (11, true, false, true, false),
    ] {
        let age = SignedDuration::from_mins(age);
        let world = World::new(2, 0, &[]).await;
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let record = Instance {
            instance,
            project: "p".into(),
            user: "u".into(),
            name: Some("web".into()),
            spec: Spec {
                query: QUERY.into(),
                resources: Resources::new(),
                image: ImageRef::at("file:///x"),
                keys: Vec::new(),
                metadata: std::collections::BTreeMap::new(),
                user_data_bytes: None,
                token_required: false,
                snapshot: false,
            },
            power: ec_model::PowerWish::default(),
            restart: ec_model::Restart::No,
            group: None,
            before: None,
            kind: ec_model::Workload::Machine,
            volumes: Vec::new(),
            attached: None,
            made_of: None,
            locked: None,
            request_id: None,
            labels: std::collections::BTreeMap::new(),
            assigned: placed.then(|| Assigned { node: node(0), epoch: 1 }),
            generation: 1,
            created_at: Timestamp::now() - age,
        };
        let mut txn = Txn::new()
            .put(world.keys.instance(instance), encode(&record))
            .put(world.keys.name(ec_model::Workload::Machine, "p", "web", instance), "");
        if status {
            txn = txn.put(world.keys.status(node(0), instance), "{}");
        }
        world.etcd.memory.txn(txn).await.unwrap();
        if claimed {
            world.placement.claims.lock().unwrap().insert(instance, node(0));
        }
        let outcome = world.schedule(QUERY, Some("web")).await;
        assert_eq!(matches!(outcome, Ok(Ok(_))), taken_over, "{age} {placed} {status} {claimed}");
        assert_eq!(world.claims().contains(&instance), claimed && !taken_over, "given back first, or kept");
    }
}

#[tokio::test]
async fn dead_nodes_are_passed_over_however_many_and_fill_no_limit() {
    for (dead, query) in [(5, QUERY), (40, QUERY), (600, QUERY), (40, "resources=VCPU:1,MEMORY_MB:1&limit=1")]
    {
        let world = World::new(dead + 1, dead, &[]).await;
        let scheduled = world.schedule(query, None).await.unwrap().unwrap();
        assert_eq!(scheduled.node, node(dead), "{dead} dead ones before it");
    }
    let world = World::new(20, 20, &[]).await;
    let no_room = world.schedule(QUERY, None).await.unwrap().unwrap_err();
    assert_eq!((no_room.not_alive.len(), no_room.lost_races), (20, 0));
    assert!(world.under("/ecompute/instances").is_empty() && world.claims().is_empty());
}

#[tokio::test]
async fn an_agent_that_puts_its_sign_of_life_anew_is_alive() {
    // The record, the claim, the request.
    let world = World::new(1, 0, &[(2, Fault::SignsAnew)]).await;
    let scheduled = world.schedule(QUERY, None).await.unwrap().unwrap();
    assert_eq!(world.requested(), [scheduled.instance]);
}

#[tokio::test]
async fn a_limit_counts_the_living() {
    let world = World::new(6, 3, &[]).await;
    world.placement.rivals.store(2, Ordering::Relaxed);
    let query = "resources=VCPU:1,MEMORY_MB:1&limit=2";
    // Both of the living that it allows were lost, and so candidates are asked for anew.
    let scheduled = world.schedule(query, None).await.unwrap().unwrap();
    assert!([node(3), node(4)].contains(&scheduled.node), "{scheduled:?}");
    for wrong in ["limit=0", "limit=x", "limit=-1"] {
        let error = world.schedule(&format!("{QUERY}&{wrong}"), None).await.unwrap_err();
        assert!(error.kind() == Kind::Wrong && error.to_string().contains(wrong), "{error:?}");
    }
}

#[tokio::test]
async fn room_that_others_took_meanwhile_is_looked_for_elsewhere() {
    let world = World::new(3, 0, &[]).await;
    world.placement.rivals.store(4, Ordering::Relaxed);
    let scheduled = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    assert_eq!(world.requested(), [scheduled.instance]);
    assert_eq!(world.under(&world.keys.instances()).len(), 1);
    assert_eq!(world.under("/ecompute/names/").len(), 1);
}

#[tokio::test]
async fn who_lost_a_race_goes_on_where_others_do_not() {
    let mut gone_to = HashSet::new();
    for _ in 0..32 {
        let world = World::new(12, 0, &[]).await;
        assert_eq!(world.schedule(QUERY, None).await.unwrap().unwrap().node, node(0), "placement's order");
        world.placement.rivals.store(1, Ordering::Relaxed);
        gone_to.insert(world.schedule(QUERY, None).await.unwrap().unwrap().node);
    }
    assert!(gone_to.len() > 2, "{gone_to:?}");
    // Nor are those tried again at once that were lost already.
    let world = World::new(2, 0, &[]).await;
    world.placement.rivals.store(1, Ordering::Relaxed);
    assert_eq!(world.schedule(QUERY, None).await.unwrap().unwrap().node, node(1));
}

#[tokio::test]
async fn the_request_says_what_was_asked_for() {
    let world = World::new(1, 0, &[]).await;
    let scheduled = world.schedule(QUERY, Some("Web")).await.unwrap().unwrap();
    let pair = &world.under(&world.keys.all_requests())[0];
    let request: Request = decode(&pair.value).unwrap();
    assert_eq!((request.instance, request.name.as_deref()), (scheduled.instance, Some("Web")));
    assert_eq!((request.epoch, request.generation), (1, 1));
    let spec = request.spec.unwrap();
    assert!(spec.token_required);
    assert_eq!((spec.query.as_str(), spec.user_data_bytes), (QUERY, Some(6)));
    let record: Instance = decode(&world.under(&world.keys.instances())[0].value).unwrap();
    assert_eq!(record.spec, spec, "so that it can be placed again by its own conditions");
    assert!(!String::from_utf8_lossy(&pair.value).contains("secret"));
}

#[tokio::test]
async fn an_agent_that_does_not_read_our_requests_is_passed_over() {
    let world = World::new(2, 0, &[]).await;
    let old = Alive { formats: BTreeMap::new(), ..alive(0) };
    for value in [encode(&old), encode(&alive(1)), b"garbage".to_vec()] {
        world.etcd.memory.txn(Txn::new().put(world.keys.alive(node(0)), value)).await.unwrap();
        // One that is passed over uses no limit up.
        let scheduled = world.schedule(&format!("{QUERY}&limit=1"), None).await.unwrap().unwrap();
        assert_eq!(scheduled.node, node(1));
        assert_eq!(world.claims(), [scheduled.instance]);
        let none = world.schedule(QUERY, None).await.unwrap().unwrap_err();
        assert!(none.not_alive.contains(&node(0)));
        assert_eq!((world.claims().len(), world.under(&world.keys.instances()).len()), (1, 1));
        crate::destroy(&world.cloud(), scheduled.instance).await.unwrap();
        world.placement.release(scheduled.instance).await.unwrap();
    }
}

#[tokio::test]
async fn what_stands_twice_is_refused_before_anything_is_written() {
    let world = World::new(1, 0, &[]).await;
    for query in ["resources=VCPU:1&resources=MEMORY_MB:1", &format!("{QUERY}&limit=1&limit=2")] {
        let error = world.schedule(query, None).await.unwrap_err();
        assert!(error.kind() == Kind::Wrong && error.to_string().contains("stands twice"), "{error:?}");
    }
    let several = format!("{QUERY}&required=A&required=in:B,C&member_of=x&member_of=y");
    world.schedule(&several, None).await.unwrap().unwrap();
}

#[tokio::test]
async fn what_a_command_writes_has_its_id_and_a_look_leaves_that_of_the_wish() {
    let world = World::new(1, 0, &[]).await;
    let Scheduled { instance, node } = world.schedule(QUERY, Some("web")).await.unwrap().unwrap();
    let ids = async || {
        let read = async |key: String| world.etcd.memory.get(&key).await.unwrap().0.unwrap().value;
        let request: Request = decode(&read(world.keys.request(node, instance)).await).unwrap();
        let actions: ec_model::Actions = decode(&read(world.keys.actions(instance)).await).unwrap();
        let record = world.etcd.memory.get(&world.keys.instance(instance)).await.unwrap().0;
        let record = record.and_then(|pair| decode::<Instance>(&pair.value).unwrap().request_id);
        (request.request_id, record, actions.actions.last().unwrap().request_id)
    };
    let first = Some(REQUEST);
    assert_eq!(ids().await, (first, first, first));
    let found = crate::find(&world.cloud(), instance).await.unwrap();
    assert_eq!(crate::View::found(&found).request_id, first);

    let another = world.cloud().for_another();
    assert_ne!(another.request_id, first);
    let verb = crate::Verb::Lock(String::new());
    crate::act(&another, instance, &verb).await.unwrap();
    assert_eq!(ids().await, (another.request_id, another.request_id, another.request_id));
    crate::act(&world.cloud(), instance, &crate::Verb::Unlock).await.unwrap();
    assert_eq!(ids().await, (first, first, first));

    // Asked once more it is the first wish that is carried out.
    crate::destroy(&another, instance).await.unwrap();
    crate::destroy(&world.cloud(), instance).await.unwrap();
    assert_eq!(ids().await, (another.request_id, None, another.request_id));
    let found = crate::find(&world.cloud(), instance).await.unwrap();
    assert_eq!(crate::View::found(&found).request_id, another.request_id);
}

#[tokio::test]
async fn names_are_looked_for_in_the_project_of_the_instance_that_is_renamed() {
    use crate::{Verb, act};

    let world = World::new(3, 0, &[]).await;
    let others = Cloud { project: "others".to_owned(), ..world.cloud() };
    let run = async |cloud: &Cloud, name: &str| {
        let query = ResourceQuery::parse(QUERY).unwrap();
        let guest = guest(Some(name));
        let wanted = Wanted::new(Ask::new(&query).unwrap(), &guest).unwrap();
        schedule(cloud, &wanted, &world.stop).await.unwrap().unwrap().instance
    };
    let theirs = run(&others, "db").await;
    run(&others, "mail").await;
    run(&world.cloud(), "web").await;
    // By its uuid anybody asks something of it.
    let rename = async |name: &str| act(&world.cloud(), theirs, &Verb::Rename(name.to_owned())).await;
    rename("web").await.unwrap();
    let taken = rename("mail").await.unwrap_err();
    assert!(matches!(&taken, CloudError::Taken { project, .. } if project == "others"), "{taken}");
}

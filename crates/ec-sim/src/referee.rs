//! What must never be, whatever breaks. The referee sees every transaction that is applied and everything that the
//! hypervisors do, and remembers it by itself: it believes no program's word about anything.

use std::collections::{BTreeMap, BTreeSet};

use ec_hypervisor::{Observed, Operation};
use ec_model::{Desired, InstanceId, NodeId, Request, State, Status, decode};
use ec_store::{KeyValue, Op, Txn};
use serde_json::Value;

use crate::{
    door::content,
    node::PROCESSORS,
    world::{Actor, PLACEMENT, World},
};

/// What the referee knows of an instance.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// A user was told that it is placed, and where.
    pub(crate) acknowledged: Option<NodeId>,
    /// A user has asked for its end.
    pub(crate) wished_away: bool,
    /// A user was told that it goes.
    pub(crate) doomed: bool,
    /// Its guest was started, and so may have written its disk.
    pub(crate) wrote: bool,
    /// It was told to be ACTIVE.
    was_active: bool,
    /// The nemesis did something to it, so that it may be in trouble.
    pub(crate) disturbed: bool,
}

#[derive(Default)]
pub(crate) struct Referee {
    findings: Vec<String>,
    known: BTreeMap<InstanceId, Known>,
    /// Which start of an agent put this record under `agents/`.
    signs: BTreeMap<Vec<u8>, Actor>,
    /// Keys that no program can read, with what lies there.
    sealed: BTreeMap<String, Vec<u8>>,
    sealed_guests: BTreeSet<InstanceId>,
    /// etcd was put back to an older state at least once.
    pub(crate) restored: bool,
    pub(crate) transactions: u64,
}

impl Referee {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn findings(&self) -> &[String] {
        &self.findings
    }

    pub(crate) fn found(&mut self, what: impl Into<String>) {
        self.findings.push(what.into());
    }

    pub(crate) fn instances(&self) -> impl Iterator<Item = (InstanceId, &Known)> {
        self.known.iter().map(|(instance, known)| (*instance, known))
    }

    pub(crate) fn known(&self, instance: InstanceId) -> Known {
        self.known.get(&instance).cloned().unwrap_or_default()
    }

    pub(crate) fn disturbed(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().disturbed = true;
    }

    pub(crate) fn wished_away(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().wished_away = true;
    }

    /// A user was told that it goes.
    pub(crate) fn doomed(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().doomed = true;
    }

    /// A user was told that the instance is placed: it is in etcd, or has come to its end there.
    pub(crate) fn acknowledged(&mut self, world: &World, instance: InstanceId, node: NodeId) {
        self.known.entry(instance).or_default().acknowledged = Some(node);
        let there = content(world, &world.keys.request(node, instance)).is_some()
            || content(world, &world.keys.status(node, instance)).is_some();
        if !there && !self.restored && !self.known.get(&instance).is_some_and(|known| known.wished_away) {
            self.found(format!("{instance} was acknowledged, and etcd knows nothing of it"));
        }
    }

    pub(crate) fn seal(&mut self, key: String, value: Vec<u8>, guest: InstanceId) {
        self.sealed.insert(key, value);
        self.sealed_guests.insert(guest);
    }

    pub(crate) fn sealed_guests(&self) -> &BTreeSet<InstanceId> {
        &self.sealed_guests
    }

    /// Nothing that cannot be read was touched.
    fn look_at_sealed(&mut self, world: &World) {
        let mut broken = Vec::new();
        for (key, value) in &self.sealed {
            if content(world, key).is_none_or(|pair| pair.value != *value) {
                broken.push(format!("the key {key}, which nobody can read, was changed or deleted"));
            }
        }
        self.findings.extend(broken);
    }

    /// etcd is another from now on.
    pub(crate) fn replaced(&mut self) {
        self.restored = true;
    }

    /// A transaction was applied; `before`: what lay under the keys that it wrote.
    pub(crate) fn applied(&mut self, world: &World, actor: Actor, txn: &Txn, before: &[Option<KeyValue>]) {
        self.transactions += 1;
        for (op, old) in txn.then.iter().zip(before) {
            let (key, new) = match op {
                Op::Put { key, value, .. } => (key.as_str(), Some(value.as_slice())),
                Op::Delete(key) if old.is_some() => (key.as_str(), None),
                Op::Delete(_) => continue,
            };
            if self.sealed.contains_key(key) {
                self.found(format!("{actor} wrote {key}, which it cannot read"));
            }
            if let Some(line) = told(world, key, new) {
                world.log(actor, line);
            }
            self.look_at_writer(world, actor, key, new);
            self.look_at_request(world, actor, txn, key, old.as_ref(), new);
            self.look_at_status(world, key, new);
            self.look_at_index(world, key, old.as_ref(), new);
        }
        if txn.then.iter().any(|op| op.key().starts_with(PLACEMENT)) {
            self.look_at_placement(world, txn, before);
        }
        self.look_at_sealed(world);
    }

    /// Each key has one writer, and an agent writes only while it is the node.
    fn look_at_writer(&mut self, world: &World, actor: Actor, key: &str, new: Option<&[u8]>) {
        let keys = &world.keys;
        let owner = |prefix: String| key.strip_prefix(prefix.as_str()).is_some();
        let allowed = match actor {
            Actor::Nemesis => true,
            Actor::Replica(_) => key.starts_with(PLACEMENT),
            Actor::User(_) => {
                let request = key.starts_with(&keys.all_requests()) && new.is_some();
                let user_data = key.starts_with("/ecompute/userdata/") && new.is_some();
                request || user_data || owner(keys.instances()) || key.starts_with("/ecompute/names/")
            }
            Actor::Agent(node, _) => {
                let presence =
                    [keys.agent(node), keys.alive(node), keys.node(node)].iter().any(|own| key == own);
                let ends = (owner(keys.requests(node)) || owner(keys.all_user_data(node))) && new.is_none();
                presence || ends || owner(keys.statuses(node))
            }
        };
        if !allowed {
            self.found(format!("{actor} wrote {key}, which is another's"));
        }
        let Actor::Agent(node, number) = actor else { return };
        if key == keys.agent(node) {
            if let Some(value) = new {
                self.signs.insert(value.to_vec(), actor);
            }
            return;
        }
        // Put in one transaction with the key above.
        if key == keys.alive(node) {
            return;
        }
        let sign = content(world, &keys.agent(node));
        let holder = sign.and_then(|pair| self.signs.get(&pair.value).copied());
        if holder != Some(actor) {
            self.found(format!("the {number}. agent of {actor} wrote {key} while it was not the node"));
        }
    }

    /// A request goes when its instance has come to its end, and not before.
    fn look_at_request(
        &mut self,
        world: &World,
        actor: Actor,
        txn: &Txn,
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        let Ok((node, instance)) = world.keys.parse_request(key) else { return };
        if let Some(request) = new.and_then(|value| decode::<Request>(value).ok()) {
            let known = self.known.entry(instance).or_default();
            if request.desired == Desired::Destroyed && !known.wished_away {
                self.found(format!("{actor} asked for the end of {instance}, which no user wished"));
            }
            return;
        }
        if new.is_some() {
            return;
        }
        let Some(request) = old.and_then(|old| decode::<Request>(&old.value).ok()) else { return };
        let known = self.known.entry(instance).or_default();
        // A copy of it under another node's prefix is that node's to refuse.
        let is_its_node = known.acknowledged.is_none_or(|at| at == node);
        let (wrote, wished_away) = (known.wrote && is_its_node, known.wished_away);
        let here = world.computers.iter().find(|computer| computer.node == node);
        let left = here.and_then(|computer| observed(computer, instance));
        if request.desired == Desired::Destroyed || wished_away {
            if left.is_some_and(|left| left.domain.is_some() || left.volume) {
                self.found(format!(
                    "the request of {instance} is gone, and its guest is still there: {left:?}"
                ));
            }
            return;
        }
        let status = world.keys.status(node, instance);
        let tells = txn.then.iter().any(|op| {
            matches!(op, Op::Put { key, value, .. }
                if *key == status && decode::<Status>(value).is_ok_and(|status| status.state == State::Error))
        });
        if wrote {
            self.found(format!(
                "the request of {instance}, whose guest ran, was deleted and no user wished it"
            ));
        } else if !tells {
            self.found(format!("the request of {instance} was deleted and nobody was told why"));
        }
    }

    fn look_at_status(&mut self, world: &World, key: &str, new: Option<&[u8]>) {
        let Ok((_, instance)) = world.keys.parse_status(key) else { return };
        let Some(status) = new.and_then(|value| decode::<Status>(value).ok()) else { return };
        let restored = self.restored;
        let known = self.known.entry(instance).or_default();
        match status.state {
            State::Active => known.was_active = true,
            State::Error if !restored && !known.disturbed => {
                let reason = status.reason.unwrap_or_default();
                self.found(format!("{instance} is in ERROR, and nothing was done to it: {reason}"));
            }
            State::Unclaimed if !restored => {
                self.found(format!("{instance} is UNCLAIMED, and etcd was never put back"));
            }
            _ => {}
        }
    }

    /// While an instance is asked for, it can be looked up; a name is one instance's.
    fn look_at_index(&mut self, world: &World, key: &str, old: Option<&KeyValue>, new: Option<&[u8]>) {
        if let Some(rest) = key.strip_prefix("/ecompute/names/") {
            let name = rest.rsplit_once('/').map_or(rest, |(name, _)| name);
            let bearers = world.store.content(&format!("/ecompute/names/{name}/")).pairs.len();
            if new.is_some() && bearers > 1 {
                self.found(format!("{bearers} instances bear the name {name}"));
            }
            return;
        }
        let Ok(instance) = world.keys.parse_instance(key) else { return };
        if new.is_some() || old.is_none() {
            return;
        }
        let wanted = |node: NodeId| {
            let pair = content(world, &world.keys.request(node, instance))?;
            decode::<Request>(&pair.value).ok().filter(|request| request.desired == Desired::Active)
        };
        if let Some(computer) = world.computers.iter().find(|computer| wanted(computer.node).is_some()) {
            let node = computer.node;
            self.found(format!("the index of {instance} was taken away, which is asked for on {node}"));
        }
    }

    /// What is used is never more than there is; a guest that runs keeps its claim.
    fn look_at_placement(&mut self, world: &World, txn: &Txn, before: &[Option<KeyValue>]) {
        let consumers = format!("{PLACEMENT}/consumers/");
        for (op, old) in txn.then.iter().zip(before) {
            let (Op::Delete(key), Some(_)) = (op, old) else { continue };
            let Some(instance) = key.strip_prefix(&consumers).and_then(|text| text.parse().ok()) else {
                continue;
            };
            let known = self.known.entry(instance).or_default();
            if known.wrote && !known.wished_away && !self.restored {
                self.found(format!("the claim of {instance}, whose guest ran, was given back"));
            }
        }
        let mut used: BTreeMap<String, u64> = BTreeMap::new();
        for pair in world.store.content(&consumers).pairs {
            let Ok(consumer) = serde_json::from_slice::<Value>(&pair.value) else { continue };
            for (provider, amounts) in consumer["allocations"].as_object().into_iter().flatten() {
                *used.entry(provider.clone()).or_default() += amounts["VCPU"].as_u64().unwrap_or(0);
            }
        }
        for (provider, used) in used {
            if used > PROCESSORS {
                self.found(format!("{used} processors of {provider} are allocated, and it has {PROCESSORS}"));
            }
        }
    }

    /// The hypervisor of a node did something.
    pub(crate) fn touched(
        &mut self,
        world: &World,
        node: NodeId,
        what: Operation,
        instance: InstanceId,
        before: Observed,
        _after: Observed,
    ) {
        if self.sealed_guests.contains(&instance) {
            self.found(format!("{what:?} of {instance}, whose request nobody can read"));
        }
        let known = self.known.entry(instance).or_default();
        match what {
            Operation::Start => {
                if known.was_active {
                    let found = format!("{instance} was started again after it had been ACTIVE");
                    self.findings.push(found);
                }
                known.wrote = true;
            }
            Operation::Destroy if known.wrote && before.volume && !known.wished_away => {
                self.found(format!(
                    "the disk of {instance}, which its guest wrote, was deleted and no user wished it"
                ));
            }
            Operation::CreateOverlay if known.wrote && !known.wished_away => {
                self.found(format!("the disk of {instance}, which its guest wrote, was made anew"));
            }
            _ => {}
        }
        let hosts = world.computers.iter().filter(|computer| {
            observed(computer, instance).is_some_and(|observed| observed.domain.is_some())
        });
        if hosts.count() > 1 {
            self.found(format!("{instance} is on more than one host"));
        }
        if self.restored {
            return;
        }
        if let Some(computer) = world.computers.iter().find(|computer| computer.node == node)
            && computer.hypervisor.running() as u64 > PROCESSORS
        {
            self.found(format!("more guests run on {node} than it has room for"));
        }
    }
}

/// What a computer's hypervisor has of an instance; its answer is there at once.
pub(crate) fn observed(computer: &crate::node::Computer, instance: InstanceId) -> Option<Observed> {
    use ec_hypervisor::Hypervisor;
    use futures::FutureExt;
    let observed = computer.hypervisor.observe(instance).now_or_never()?.ok()?;
    (observed != Observed::default()).then_some(observed)
}

/// A write as the log has it; nothing of what is only bookkeeping.
pub(crate) fn told(world: &World, key: &str, new: Option<&[u8]>) -> Option<String> {
    let keys = &world.keys;
    if let Some(rest) = key.strip_prefix(PLACEMENT) {
        let instance = rest.strip_prefix("/consumers/")?;
        return Some(match new {
            Some(_) => format!("claim {instance}"),
            None => format!("release {instance}"),
        });
    }
    let short = key.strip_prefix("/ecompute/")?;
    let Some(value) = new else { return Some(format!("delete {short}")) };
    let more = if keys.parse_request(key).is_ok() {
        decode::<Request>(value).map_or("unreadable".into(), |request| format!("{:?}", request.desired))
    } else if keys.parse_status(key).is_ok() {
        decode::<Status>(value).map_or("unreadable".into(), |status| {
            let reason = status.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            format!("{}{reason}", status.state)
        })
    } else {
        String::new()
    };
    Some(format!("put {short} {more}").trim_end().to_owned())
}

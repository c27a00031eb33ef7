//! Rules for placement: room, claims, marks.

use std::{collections::BTreeMap, sync::Arc};

use ec_model::{Desired, InstanceId, NodeId, Request, Resources, State, Status, decode};
use ec_store::{KeyValue, Op, Txn};
use serde_json::Value;

use super::{Referee, observed};
use crate::{
    door::content,
    node::{Computer, PROCESSORS},
    world::{PLACEMENT, World},
};

/// As a node is marked of which nothing is to be offered.
pub(super) const DISABLED: &str = "COMPUTE_STATUS_DISABLED";
/// Who is marked was not alive for so many seconds at least, of so many before, and not so long ago.
const MISSED: usize = 20;
const LATELY: u64 = 400;
const LAST: u64 = 300;

/// What a controller gives a node beside DISABLED, which an operator may give, too.
const DOWN: &str = "CUSTOM_ECOMPUTE_NODE_DOWN";

pub(super) fn has_trait(record: &[u8], name: &str) -> bool {
    let record: Value = serde_json::from_slice(record).unwrap_or_default();
    record["traits"].as_array().into_iter().flatten().any(|known| known == name)
}

/// Whether placement offers nothing of a node; nothing where it does not know it.
pub(crate) fn marked(world: &World, node: NodeId) -> Option<bool> {
    content(world, &format!("{PLACEMENT}/providers/{node}")).map(|pair| has_trait(&pair.value, DISABLED))
}

/// What a consumer takes, by its record, of all providers together.
fn taken(record: &[u8]) -> Resources {
    let record: Value = serde_json::from_slice(record).unwrap_or_default();
    let mut taken = Resources::new();
    for amounts in record["allocations"].as_object().into_iter().flat_map(|all| all.values()) {
        for (class, amount) in amounts.as_object().into_iter().flatten() {
            *taken.entry(class.clone()).or_default() += amount.as_u64().unwrap_or(0);
        }
    }
    taken
}

/// What is taken, by provider and class.
type Used = BTreeMap<(String, String), u64>;

/// Adds what a consumer takes, by its record.
fn count(record: &[u8], used: &mut Used) {
    let record: Value = serde_json::from_slice(record).unwrap_or_default();
    for (provider, amounts) in record["allocations"].as_object().into_iter().flatten() {
        for (class, amount) in amounts.as_object().into_iter().flatten() {
            let key = (provider.clone(), class.clone());
            *used.entry(key).or_default() += amount.as_u64().unwrap_or(0);
        }
    }
}

/// So much of a class a provider gives out, by its record.
pub(super) fn offered(record: &[u8], class: &str) -> f64 {
    let record: Value = serde_json::from_slice(record).unwrap_or_default();
    let inventory = &record["inventories"][class];
    let number = |field: &str, default: f64| inventory[field].as_f64().unwrap_or(default);
    (number("total", 0.0) - number("reserved", 0.0)) * number("allocation_ratio", 1.0)
}

/// So much of a class a node gives out, by placement.
pub(crate) fn offered_by(world: &World, node: NodeId, class: &str) -> f64 {
    content(world, &format!("{PLACEMENT}/providers/{node}")).map_or(0.0, |pair| offered(&pair.value, class))
}

/// So much of a class is allocated of a provider.
pub(super) fn used_of(world: &World, provider: NodeId, class: &str) -> u64 {
    let mut used = Used::new();
    for pair in world.store.content(&format!("{PLACEMENT}/consumers/")).pairs {
        count(&pair.value, &mut used);
    }
    used.get(&(provider.to_string(), class.to_owned())).copied().unwrap_or(0)
}

/// Whether each provider has room for what an instance is to have of it, by its capacity alone, beside what all others have; or has it
/// given that much already.
pub(super) fn has_room(world: &World, instance: InstanceId, wanted: &Value) -> bool {
    let (mut used, mut had, mut asked) = (Used::new(), Used::new(), Used::new());
    let own = format!("{PLACEMENT}/consumers/{instance}");
    for pair in world.store.content(&format!("{PLACEMENT}/consumers/")).pairs {
        count(&pair.value, if pair.key == own { &mut had } else { &mut used });
    }
    for (provider, amounts) in wanted.as_object().into_iter().flatten() {
        for (class, amount) in amounts["resources"].as_object().into_iter().flatten() {
            asked.insert((provider.clone(), class.clone()), amount.as_u64().unwrap_or(0));
        }
    }
    asked.iter().all(|(place, amount)| {
        let used = used.get(place).copied().unwrap_or(0);
        let record = content(world, &format!("{PLACEMENT}/providers/{}", place.0));
        let has_it = had.get(place) >= Some(amount);
        record.is_some_and(|record| has_it || (used + amount) as f64 <= offered(&record.value, &place.1))
    })
}

/// Whether it is asked for, and was not given up.
fn is_wanted(world: &World, instance: InstanceId) -> bool {
    world.computers.iter().any(|computer| {
        let read = |key: String| content(world, &key).map(|pair| pair.value);
        let request = read(world.keys.request(computer.node, instance));
        let status = read(world.keys.status(computer.node, instance));
        let failed = status
            .and_then(|value| decode::<Status>(&value).ok())
            .is_some_and(|status| status.state == State::Error);
        let wanted = request
            .and_then(|value| decode::<Request>(&value).ok())
            .is_some_and(|request| request.desired == Desired::Active);
        wanted && !failed
    })
}

impl Referee {
    /// What is used is never more than there is; a guest that runs keeps its claim.
    pub(super) fn look_at_placement(&mut self, world: &World, txn: &Txn, before: &[Option<KeyValue>]) {
        let consumers = format!("{PLACEMENT}/consumers/");
        self.look_at_change_of_provider(txn, before);
        for (op, old) in txn.then.iter().zip(before) {
            self.look_at_mark(world, op, old.as_ref());
            if let Op::Put { key, value, .. } = op {
                self.look_at_generation(txn, key, old.as_ref(), value);
            }
            let instance = op.key().strip_prefix(&consumers).and_then(|text| text.parse().ok());
            let Some(instance) = instance else { continue };
            if let Op::Put { value, .. } = op {
                let known = self.known.entry(instance).or_default();
                (known.claimed, known.told_unclaimed) = (world.elapsed().as_secs(), None);
                let (was, is) = (old.as_ref().map(|old| taken(&old.value)).unwrap_or_default(), taken(value));
                let is_less = was.iter().any(|(class, amount)| is.get(class) < Some(amount));
                self.look_at_claim(instance, is_less);
                if old.is_some() {
                    self.look_at_surplus(world, instance, &was);
                }
                continue;
            }
            let known = self.known(instance);
            // Nobody asks for it, and disk and domain were taken one after the other.
            let is_gone = known.request_lost
                && world.computers.iter().all(|computer| observed(computer, instance).is_none());
            // One that another node is to hand over goes there when that node does so.
            let is_sure = !(known.claim_lost || known.was_revived || known.moved);
            let is_there = |computer: &Arc<Computer>| {
                observed(computer, instance).is_some_and(|seen| seen.domain.is_some() || seen.volume)
                    && !(known.wished_away && self.is_forgotten(world, computer.node))
            };
            if is_sure && !self.restored && world.computers.iter().any(is_there) {
                self.findings
                    .push(format!("the claim of {instance} was given back, and its guest or disk is there"));
            }
            let (wrote, excused) = (known.wrote, known.wished_away || known.claim_lost || is_gone);
            if self.restored || excused {
                continue;
            }
            if wrote {
                self.found(format!("the claim of {instance}, whose guest ran, was given back"));
            } else if is_wanted(world, instance) {
                self.found(format!("the claim of {instance}, which is asked for, was given back"));
            } else {
                let known = self.known.entry(instance).or_default();
                known.unclaimed = Some(world.elapsed().as_secs() - known.claimed);
            }
        }
        let mut used = Used::new();
        for pair in world.store.content(&consumers).pairs {
            count(&pair.value, &mut used);
        }
        // Whatever the records of the nodes say that they have.
        for ((provider, _), used) in used.iter().filter(|((_, class), _)| class == "VCPU") {
            if *used > PROCESSORS {
                self.found(format!("{used} processors of {provider} are allocated, and it has {PROCESSORS}"));
            }
        }
        self.look_at_growth(world, txn, before, &used);
    }

    /// Where more is taken than before, it is no more than what its provider gives out. What is taken already may be more than
    /// that: there may be less by now, or room is kept for guests that are not counted.
    fn look_at_growth(&mut self, world: &World, txn: &Txn, before: &[Option<KeyValue>], used: &Used) {
        let (consumers, providers) = (format!("{PLACEMENT}/consumers/"), format!("{PLACEMENT}/providers/"));
        let (mut was, mut is) = (Used::new(), Used::new());
        for (op, old) in txn.then.iter().zip(before).filter(|(op, _)| op.key().starts_with(&consumers)) {
            if let Some(old) = old {
                count(&old.value, &mut was);
            }
            if let Op::Put { value, .. } = op {
                count(value, &mut is);
            }
        }
        for (place, amount) in is {
            let grew = amount > was.get(&place).copied().unwrap_or(0);
            let used = used.get(&place).copied().unwrap_or(0);
            let (provider, class) = place;
            let key = format!("{providers}{provider}");
            // In one transaction somebody may claim, and somebody else say then that there is less.
            let earlier = txn.then.iter().zip(before).filter(|(op, _)| op.key() == key);
            let records = earlier.filter_map(|(_, old)| old.clone()).chain(content(world, &key));
            let most = records.map(|pair| offered(&pair.value, &class)).fold(0.0, f64::max);
            if grew && used as f64 > most {
                self.found(format!("{used} of {class} of {provider} are allocated, and it gives out {most}"));
            }
        }
    }

    /// Only a node that nobody speaks for is marked.
    fn look_at_mark(&mut self, world: &World, op: &Op, old: Option<&KeyValue>) {
        let Op::Put { key, value, .. } = op else { return };
        let provider = key.strip_prefix(PLACEMENT).and_then(|rest| rest.strip_prefix("/providers/"));
        let Some(node) = provider.and_then(|text| text.parse::<NodeId>().ok()) else { return };
        if !has_trait(value, DOWN) || old.is_some_and(|old| has_trait(&old.value, DOWN)) {
            return;
        }
        let now = world.elapsed().as_secs();
        let missed = self.missed.get(&node).map(Vec::as_slice).unwrap_or_default();
        let lately = missed.iter().filter(|second| **second + LATELY >= now).count();
        if lately < MISSED || missed.last().is_none_or(|last| last + LAST < now) {
            self.found(format!("{node} was marked as down, and was missing for {lately} s of late"));
        }
    }

    /// Who is alive at this second.
    pub(crate) fn look_at_nodes(&mut self, world: &World) {
        for computer in &world.computers {
            if content(world, &world.keys.alive(computer.node)).is_none() {
                self.missed.entry(computer.node).or_default().push(world.elapsed().as_secs());
            }
        }
    }

    /// A node whose agent was down for long, with everything else well.
    pub(crate) fn is_marked(&mut self, world: &World, node: NodeId) {
        // An older etcd may not know that there is such a node.
        let is_known = content(world, &world.keys.node(node)).is_some();
        if is_known && marked(world, node) == Some(false) {
            self.found(format!("the agent of {node} is down, and no controller has marked the node"));
        }
    }
}

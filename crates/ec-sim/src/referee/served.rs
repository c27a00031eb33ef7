//! Rules for what placement answers: it was so, and what it carried out was asked for as it then was.
//!
//! The state of placement is the same as long as its clock in etcd is. So where nobody wrote between a question and its answer,
//! the answer has to be what lies in etcd, whichever replica gave it and however far that had come.

use std::collections::BTreeSet;

use ec_model::{InstanceId, NodeId, State, Status, decode};
use ec_placement_client::{Answer, Request};
use ec_store::{KeyValue, Op, Revision, Txn};
use serde_json::Value;

use super::{
    Known, Referee,
    room::{has_room, offered_by},
    size,
};
use crate::{
    door::content,
    node::PROCESSORS,
    world::{Actor, PLACEMENT, World},
};

/// What somebody asks placement, and when that is of placement's own history.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    about: About,
    asked_at: (u64, Option<Revision>),
}

#[derive(Debug, Clone)]
enum About {
    /// What a consumer holds.
    Consumer(InstanceId),
    /// That a consumer is to hold this, and something else than it did at this generation; none: than nothing.
    Claim(InstanceId, Option<i64>, Value),
    /// That a consumer which holds nothing is to hold what was reserved for it of providers, which were at these generations.
    ClaimReserved(InstanceId, Vec<(NodeId, Option<i64>)>),
    /// That a consumer is to hold nothing.
    Release(InstanceId),
    /// A provider.
    Provider(NodeId),
    /// That something of a provider be otherwise than it was at this generation.
    Change(NodeId, Option<i64>),
    /// Who holds something of a provider.
    Holders(NodeId),
}

impl About {
    fn of(request: &Request) -> Option<Self> {
        let path = request.url.path().trim_start_matches('/');
        if (request.method.as_str(), path) == ("POST", "reshaper") {
            let body = request.body.as_ref()?;
            let consumers = body["allocations"].as_object()?;
            let given = |inventory: &Value| inventory["resource_provider_generation"].as_i64();
            let providers = body["inventories"].as_object().into_iter().flatten();
            let providers = providers.filter_map(|(id, of)| Some((id.parse().ok()?, given(of)))).collect();
            return Some(Self::ClaimReserved(consumers.keys().next()?.parse().ok()?, providers));
        }
        let mut path = path.split('/');
        let (kind, id, part, more) = (path.next()?, path.next()?, path.next(), path.next());
        Some(match (request.method.as_str(), kind, part, more) {
            ("GET", "allocations", None, None) => Self::Consumer(id.parse().ok()?),
            ("DELETE", "allocations", None, None) => Self::Release(id.parse().ok()?),
            ("PUT", "allocations", None, None) => {
                let body = request.body.as_ref()?;
                Self::Claim(
                    id.parse().ok()?,
                    body["consumer_generation"].as_i64(),
                    body["allocations"].clone(),
                )
            }
            ("GET", "resource_providers", None, None) => Self::Provider(id.parse().ok()?),
            ("GET", "resource_providers", Some("allocations"), None) => Self::Holders(id.parse().ok()?),
            ("PUT", "resource_providers", Some(_), _) => {
                let given = request.body.as_ref()?["resource_provider_generation"].as_i64();
                Self::Change(id.parse().ok()?, given)
            }
            _ => return None,
        })
    }
}

/// When that is of placement's own history: in which etcd, and at which moment of its clock.
fn moment(world: &World) -> (u64, Option<Revision>) {
    let clock = content(world, &format!("{PLACEMENT}/clock"));
    (world.era(), clock.map(|pair| pair.mod_revision))
}

impl Question {
    pub(crate) fn of(world: &World, request: &Request) -> Option<Self> {
        Some(Self { about: About::of(request)?, asked_at: moment(world) })
    }
}

fn read(pair: Option<&KeyValue>) -> Option<Value> {
    pair.and_then(|pair| serde_json::from_slice(&pair.value).ok())
}

fn consumer(world: &World, instance: InstanceId) -> Option<Value> {
    read(content(world, &format!("{PLACEMENT}/consumers/{instance}")).as_ref())
}

fn generation(record: Option<&Value>) -> Option<i64> {
    record?["generation"].as_i64()
}

/// Whether there is a consumer that nobody can read: it holds what it held before, which does not lie there any more.
fn has_damage(world: &World) -> bool {
    let consumers = world.store.content(&format!("{PLACEMENT}/consumers/")).pairs;
    consumers.iter().any(|pair| read(Some(pair)).is_none())
}

fn generation_of(world: &World, provider: NodeId) -> Option<i64> {
    read(content(world, &format!("{PLACEMENT}/generations/{provider}")).as_ref())?.as_i64()
}

impl Referee {
    /// Somebody wants a consumer to hold something else, which may be carried out from now on.
    pub(crate) fn asked(&mut self, actor: Actor, question: &Question) {
        let (instance, generation) = match question.about {
            About::Claim(instance, generation, _) => (instance, generation),
            About::ClaimReserved(instance, ref providers) => {
                for (provider, generation) in providers {
                    self.changes_asked.entry(*provider).or_default().insert(*generation);
                }
                (instance, None)
            }
            About::Change(provider, generation) => {
                self.changes_asked.entry(provider).or_default().insert(generation);
                return;
            }
            _ => return,
        };
        self.counting.insert((actor, instance));
        self.known.entry(instance).or_default().claims_asked.insert(generation);
    }

    /// It was answered.
    pub(crate) fn answered(&mut self, world: &World, actor: Actor, question: &Question, answer: &Answer) {
        if moment(world) != question.asked_at || has_damage(world) {
            return;
        }
        let status = answer.status.as_u16();
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let code = body["errors"][0]["code"].as_str().unwrap_or_default();
        let wrong = match question.about {
            About::Consumer(instance) => {
                let is = generation(consumer(world, instance).as_ref());
                let told = body["consumer_generation"].as_i64();
                (status == 200 && told != is)
                    .then(|| format!("{instance} is at the generation {told:?}, and it is at {is:?}"))
            }
            About::Claim(instance, asked, ref wanted) => {
                let is = generation(consumer(world, instance).as_ref());
                let is_full = body.to_string().contains("would exceed the capacity");
                match code {
                    "placement.concurrent_update" if asked == is => {
                        Some(format!("{instance} is not at the generation {asked:?}, and it is"))
                    }
                    _ if status == 409 && is_full && has_room(world, instance, wanted) => {
                        Some(format!("there is no room for {instance}, and there is"))
                    }
                    _ => None,
                }
            }
            // Of two generations and two inventories the answer does not say which it was.
            About::ClaimReserved(..) => None,
            About::Release(instance) => (status == 404 && consumer(world, instance).is_some())
                .then(|| format!("{instance} holds nothing, and it does")),
            About::Provider(provider) => {
                let is = generation_of(world, provider);
                let told = body["generation"].as_i64();
                ([200, 404].contains(&status) && told != is).then(|| {
                    format!("provider {provider} is at the generation {told:?}, and it is at {is:?}")
                })
            }
            About::Change(provider, given) => {
                let is = generation_of(world, provider);
                let is_old = code == "placement.concurrent_update" && given == is;
                (is_old || status == 404 && is.is_some()).then(|| {
                    format!("provider {provider} is not at the generation {given:?}, and it is at {is:?}")
                })
            }
            About::Holders(provider) => {
                let told: Vec<InstanceId> = body["allocations"]
                    .as_object()
                    .map(|all| all.keys().filter_map(|key| key.parse().ok()).collect())
                    .unwrap_or_default();
                let holds = |instance: &InstanceId| {
                    consumer(world, *instance)
                        .is_some_and(|record| !record["allocations"][provider.to_string()].is_null())
                };
                let all = world.store.content(&format!("{PLACEMENT}/consumers/")).pairs;
                let ids = all.iter().filter_map(|pair| pair.key.rsplit('/').next()?.parse().ok());
                let is: Vec<InstanceId> = ids.filter(holds).collect();
                if status == 200 {
                    // What was counted when it began it need not reserve.
                    let counted = self.counted.entry(actor).or_default();
                    if counted.0 != world.era() {
                        *counted = (world.era(), BTreeSet::new());
                    }
                    counted.1.extend(told.iter().copied());
                }
                let differ =
                    is.iter().find(|one| !told.contains(one)).or(told.iter().find(|one| !is.contains(one)));
                differ.filter(|_| status == 200).map(|one| {
                    format!(
                        "{} of {provider} is held by {one}, and that is not so",
                        if is.contains(one) { "nothing" } else { "something" }
                    )
                })
            }
        };
        if let Some(wrong) = wrong {
            self.found(format!("{actor} was told by placement that {wrong}"));
        }
    }

    /// An answer is on its way to whoever asked, and comes there.
    pub(crate) fn heard(&mut self, world: &World, actor: Actor, question: &Question, answer: &Answer) {
        if moment(world) != question.asked_at || has_damage(world) {
            return;
        }
        let (Actor::Agent(node, _), About::Consumer(instance), 200) =
            (actor, &question.about, answer.status.as_u16())
        else {
            return;
        };
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let has_none = body["allocations"][node.to_string()].is_null();
        self.known.entry(*instance).or_default().told_unclaimed = has_none.then_some(node);
    }

    /// Nothing is started by a node that was told that nothing is claimed for it there, and has not claimed it since.
    pub(super) fn look_at_told(&mut self, world: &World, node: NodeId, instance: InstanceId) {
        let told = self.known(instance).told_unclaimed;
        let holds = consumer(world, instance)
            .is_some_and(|record| !record["allocations"][node.to_string()].is_null());
        if told == Some(node) && !holds {
            self.found(format!(
                "{instance} was started on {node}, which was told that nothing is claimed for it there"
            ));
        }
    }

    /// An agent that comes up has as much reserved as the guests that are there take of which it was told that they are not counted.
    pub(super) fn look_at_reserve(&mut self, world: &World, actor: Actor, key: &str) {
        let Actor::Agent(node, _) = actor else { return };
        if key != world.keys.alive(node) || !self.came_up.insert(actor) {
            return;
        }
        let Some((era, counted)) = self.counted.get(&actor) else { return };
        let Some(computer) = world.computers.iter().find(|computer| computer.node == node) else { return };
        let is_sure = |known: &Known| {
            let harmed = known.disturbed || known.record_lost || known.record_garbled || known.extended;
            known.wrote && !(known.is_volume || known.wished_away || harmed)
        };
        // Once it is told of as UNCLAIMED, or its claim is asked for, it is being counted, and what was reserved for it may be given
        // free for that: of a class that is given out several times it is reserved in steps.
        let missed = self.known.iter().filter(|(instance, known)| {
            is_sure(known) && !counted.contains(instance) && !self.counting.contains(&(actor, **instance))
        });
        let is_told = |instance: InstanceId| {
            let status = content(world, &world.keys.status(node, instance));
            let status = status.and_then(|pair| decode::<Status>(&pair.value).ok());
            status.is_some_and(|status| status.state == State::Unclaimed)
        };
        let taken: u64 = missed
            .filter(|(instance, _)| consumer(world, **instance).is_none() && !is_told(**instance))
            .filter_map(|(instance, _)| Some(size(computer, *instance)?.vcpus))
            .sum();
        let offered = offered_by(world, node, "VCPU");
        // What it had told before an older etcd came it tells anew a moment later.
        let lately = self.restored_at.is_some_and(|at| (world.elapsed() - at).as_secs() < 60);
        if *era == world.era() && !lately && taken > 0 && offered + taken as f64 > PROCESSORS as f64 {
            self.found(format!(
                "{node} came up and gives out {offered} processors, of which its guests that are not counted take {taken}"
            ));
        }
    }

    /// A consumer is written as somebody asked for who knew how it was; and generations only ever grow: that of a provider with
    /// each claim of it.
    pub(super) fn look_at_generation(&mut self, txn: &Txn, key: &str, old: Option<&KeyValue>, new: &[u8]) {
        let Some((kind, id)) = key.strip_prefix(PLACEMENT).and_then(|rest| rest[1..].split_once('/')) else {
            return;
        };
        let new: Value = serde_json::from_slice(new).unwrap_or_default();
        let (was, is, grows) = match kind {
            "consumers" => (generation(read(old).as_ref()), generation(Some(&new)), true),
            "generations" => (read(old).and_then(|old| old.as_i64()), new.as_i64(), is_claimed_of(txn, id)),
            _ => return,
        };
        if was > is || grows && was == is {
            self.found(format!("the generation of {kind} {id} went from {was:?} to {is:?}"));
        }
        if kind == "consumers"
            && let Ok(instance) = id.parse::<InstanceId>()
            && !self.restored
            && self.known.get(&instance).is_none_or(|known| !known.claims_asked.contains(&was))
        {
            self.found(format!(
                "{instance} was given a claim at the generation {was:?}, and nobody asked for that"
            ));
        }
    }
}

impl Referee {
    /// What a provider has and can is otherwise as somebody asked for who knew how it was.
    pub(super) fn look_at_change_of_provider(&mut self, txn: &Txn, before: &[Option<KeyValue>]) {
        if self.restored {
            return;
        }
        let (providers, generations) =
            (format!("{PLACEMENT}/providers/"), format!("{PLACEMENT}/generations/"));
        let mut wrong = Vec::new();
        for (op, old) in txn.then.iter().zip(before) {
            let (Op::Put { key, value, .. }, Some(old)) = (op, old) else { continue };
            let Some(id) = key.strip_prefix(&providers) else { continue };
            let new: Value = serde_json::from_slice(value).unwrap_or_default();
            let (Some(old), Ok(provider)) = (read(Some(old)), id.parse::<NodeId>()) else { continue };
            if ["inventories", "traits", "aggregates"].iter().all(|of| old[of] == new[of]) {
                continue;
            }
            let counter = format!("{generations}{id}");
            let was = txn.then.iter().zip(before).find(|(op, _)| op.key() == counter);
            let was = was.and_then(|(_, old)| read(old.as_ref())?.as_i64());
            if self.changes_asked.get(&provider).is_none_or(|asked| !asked.contains(&was)) {
                wrong.push(format!(
                    "provider {provider} was changed at the generation {was:?}, and nobody asked for that"
                ));
            }
        }
        wrong.into_iter().for_each(|wrong| self.found(wrong));
    }
}

/// Whether somebody is given something of a provider.
fn is_claimed_of(txn: &Txn, provider: &str) -> bool {
    let consumers = format!("{PLACEMENT}/consumers/");
    txn.then.iter().any(|op| match op {
        Op::Put { key, value, .. } if key.starts_with(&consumers) => {
            let record: Value = serde_json::from_slice(value).unwrap_or_default();
            !record["allocations"][provider].is_null()
        }
        _ => false,
    })
}

//! Rules for what users are told of an instance that stays as it is meanwhile: what can be done is not refused and not called
//! done, what is called done was written, and a list has all that there is, as its node tells of it.

use std::collections::{BTreeMap, BTreeSet};

use ec_cloud::{Acted, CloudError, CloudResult, Verb, View};
use ec_model::{Instance, InstanceId, Node, NodeId, Record, Request, Status, Workload, decode};
use ec_plan::verbs::{Verdict, judge, shown};
use ec_store::{KeyValue, Op, Revision, Txn};

use super::Referee;
use crate::{
    door::content,
    world::{Actor, World},
};

/// How an instance stands: all that a verb goes by, and its node's record, which may say that it was revoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    era: u64,
    node: Option<KeyValue>,
    record: KeyValue,
    request: KeyValue,
    status: Option<KeyValue>,
}

impl Standing {
    /// None of one that lacks a record or a request, of which nothing but its end can be asked.
    pub(crate) fn of(world: &World, instance: InstanceId) -> Option<Self> {
        let record = content(world, &world.keys.instance(instance))?;
        let node = read::<Instance>(Some(&record))?.node()?;
        let request = content(world, &world.keys.request(node, instance))?;
        let status = content(world, &world.keys.status(node, instance));
        let host = content(world, &world.keys.node(node));
        Some(Self { era: world.era(), node: host, record, request, status })
    }

    /// None where one of them cannot be read, or where they are not of one another; nor of a volume, of which more is asked,
    /// and where the node may not be let in.
    fn verdict(&self, verb: &Verb) -> Option<Verdict> {
        let record: Instance = read(Some(&self.record))?;
        let is_let_in = read::<Node>(self.node.as_ref()).is_some_and(|node| !node.revoked);
        if record.kind == Workload::Volume || !is_let_in {
            return None;
        }
        let request: Request = read(Some(&self.request))?;
        let status = match &self.status {
            Some(pair) => Some(read::<Status>(Some(pair))?),
            None => None,
        };
        let is_placed = record.assigned.map(|assigned| assigned.epoch) == Some(request.epoch);
        is_placed.then(|| judge(verb, &record, &request, status.as_ref()))
    }
}

fn read<T: Record>(pair: Option<&KeyValue>) -> Option<T> {
    decode(&pair?.value).ok()
}

/// Whether that is refused by more than how the instance stands: its history, what there is room for, its image, and of what
/// disk it is to be a copy.
fn is_of_more(verb: &Verb, verdict: &Verdict, why: &str) -> bool {
    match verb {
        Verb::Confirm | Verb::Revert => matches!(verdict, Verdict::Already(_)),
        Verb::Resize(_) => ["its node cannot give it that", "placement holds no allocation for it"]
            .iter()
            .any(|what| why.contains(what)),
        Verb::Rescue(_) => why.contains("a rescue disk is made of an image"),
        Verb::Rebuild(_) => {
            ["cannot make a copy of", "is copied there only", "is not known whether its agent reads that"]
                .iter()
                .any(|what| why.contains(what))
        }
        _ => false,
    }
}

/// Where all of etcd is.
pub(crate) fn moment(world: &World) -> (u64, Revision) {
    (world.era(), world.store.revision())
}

/// In how many transactions somebody wrote requests, and in how many these or records.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wrote {
    requests: u64,
    any: u64,
}

/// Who asks for something, and what they had written before.
pub(crate) struct Asking {
    actor: Actor,
    before: Wrote,
}

impl Asking {
    pub(crate) fn by(world: &World, actor: Actor) -> Self {
        Self { actor, before: world.judge(|referee, _| referee.asked_by(actor)) }
    }

    /// The end of something was asked for, and that answered: that it is gone is all that was wanted.
    pub(crate) fn ended<T>(self, world: &World, what: &str, told: &CloudResult<T>) {
        if !matches!(told, Err(CloudError::NotFound(_))) {
            self.answered(world, what, told.as_ref().map(|_| false));
        }
    }

    /// What they asked was answered so: whether it is written now, or was so before.
    pub(crate) fn answered(self, world: &World, what: &str, told: Result<bool, &CloudError>) {
        use CloudError::{Busy, Interrupted, Invalid, NotFound, Refused, Unreadable};
        world.judge(|referee, _| {
            let is = referee.asked_by(self.actor);
            let is_written = is.requests > self.before.requests;
            let wrong = match told {
                Ok(true) if is.any == self.before.any => "it is written, and nothing was".to_owned(),
                // Whoever is told no more than that goes by it. A record is brought to what came of an earlier wish on the way.
                Err(
                    why @ (Busy(_) | Interrupted | Invalid(_) | NotFound(_) | Refused(_) | Unreadable(_)),
                ) if is_written => {
                    format!("{why}, and it was written")
                }
                Ok(_) | Err(_) => return,
            };
            referee.found(format!("{} asked to {what} and was told: {wrong}", self.actor));
        });
    }
}

/// Who asked something of this is told of nothing else that is not there.
pub(crate) fn answered_of<T>(world: &World, actor: Actor, named: InstanceId, told: &CloudResult<T>) {
    let Err(CloudError::NotFound(why)) = told else { return };
    if !why.contains(&named.to_string()) {
        world.judge(|referee, _| referee.found(format!("{actor} asked of {named}, and was told: {why}")));
    }
}

impl Referee {
    fn asked_by(&self, actor: Actor) -> Wrote {
        self.asked.get(&actor).copied().unwrap_or_default()
    }

    pub(super) fn count_asked(&mut self, world: &World, actor: Actor, txn: &Txn) {
        let is_request = |op: &Op| world.keys.parse_request(op.key()).is_ok();
        let is_record = |op: &Op| world.keys.parse_instance(op.key()).is_ok();
        let wrote = self.asked.entry(actor).or_default();
        wrote.requests += u64::from(txn.then.iter().any(is_request));
        wrote.any += u64::from(txn.then.iter().any(|op| is_request(op) || is_record(op)));
    }

    /// A user asked this of an instance that stood so, and was told that.
    pub(crate) fn acted(
        &mut self,
        world: &World,
        (actor, verb): (Actor, &Verb),
        instance: InstanceId,
        stood: Option<&Standing>,
        told: &CloudResult<Acted>,
    ) {
        let Some(stood) = stood.filter(|stood| Standing::of(world, instance).as_ref() == Some(stood)) else {
            return;
        };
        let Some(verdict) = stood.verdict(verb) else { return };
        let wrong = match (told, verdict) {
            (Ok(Acted { already: None, .. }), _) => "it is written, and nothing was".to_owned(),
            (Ok(Acted { already: Some(why), .. }), Verdict::Do(_)) => format!("{why}, and it can be done"),
            (Ok(Acted { already: Some(why), .. }), Verdict::Refuse(_)) => {
                format!("{why}, and it cannot be done")
            }
            (Err(CloudError::Refused(why)), verdict) if is_of_more(verb, &verdict, why) => return,
            (Err(CloudError::Refused(why)), Verdict::Do(_) | Verdict::Already(_)) => {
                format!("{why}, and it can be done")
            }
            _ => return,
        };
        self.found(format!("{actor} asked to {} {instance} and was told: {wrong}", verb.name()));
    }

    /// A user who asked when all stood so was told that these are all instances.
    pub(crate) fn listed(&mut self, world: &World, actor: Actor, stood: (u64, Revision), views: &[View]) {
        if moment(world) != stood {
            return;
        }
        let keys = &world.keys;
        let under = |prefix: &str| world.store.content(prefix).pairs;
        let told: BTreeMap<InstanceId, &View> = views.iter().map(|view| (view.instance, view)).collect();
        let mut there = BTreeSet::new();
        let mut orders: BTreeMap<(NodeId, InstanceId), KeyValue> = BTreeMap::new();
        for pair in under(&keys.all_requests()) {
            let Ok(of) = keys.parse_request(&pair.key) else { continue };
            there.insert(of.1);
            orders.insert(of, pair);
        }
        there.extend(
            under(&keys.all_statuses()).iter().filter_map(|pair| Some(keys.parse_status(&pair.key).ok()?.1)),
        );
        for pair in under(&keys.instances()) {
            let Ok(instance) = keys.parse_instance(&pair.key) else { continue };
            there.insert(instance);
            let Some(record) = read::<Instance>(Some(&pair)) else { continue };
            if record.kind != Workload::Machine || record.instance != instance {
                continue;
            }
            let Some(view) = told.get(&instance) else {
                self.found(format!("{actor} lists all instances, and {instance} is missing"));
                continue;
            };
            let Some(node) = record.node() else { continue };
            let Some(order) = read::<Request>(orders.get(&(node, instance))) else { continue };
            let Some(status) = content(world, &keys.status(node, instance)) else { continue };
            let Some(status) = read::<Status>(Some(&status)) else { continue };
            // Of another life it is not shown.
            let is_its = (status.instance, status.node, status.epoch) == (instance, node, order.epoch);
            if order.instance != instance || !is_its {
                continue;
            }
            let is = (Some(node), shown(&record, &order, &status).to_string());
            let said = (view.node, view.state.clone());
            if is != said {
                self.found(format!(
                    "{actor} lists all instances, and {instance} is {said:?} there, and it is {is:?}"
                ));
            }
        }
        for instance in told.keys().filter(|instance| !there.contains(*instance)) {
            self.found(format!("{actor} lists all instances, and there is {instance}, which is not there"));
        }
    }
}

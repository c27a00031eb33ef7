//! What a transaction has to demand before it writes: the rules of `docs/keyspace.md`.
//!
//! A comparison that is missing does harm only where somebody is quicker in just that moment, and most histories have
//! no such moment. So every transaction is held to what it must compare, whether it did harm or not.

use std::collections::BTreeSet;

use ec_model::{
    Desired, Group, Handover, Instance, InstanceId, Node, NodeId, Policy, Record, Request, Status, Token,
    Workload, decode, placement_tokens,
};
use ec_store::{Compare, KeyValue, Op, Txn};
use serde_json::Value;

use super::{
    Referee,
    catalog::of_catalog,
    groups::{GROUPS, MEMBERS},
    volumes::{holder, of_attach},
};
use crate::{
    door::content,
    world::{Actor, PLACEMENT, World},
};

const NAMES: [&str; 2] = ["/ecompute/names/", "/ecompute/volume-names/"];

/// Whether it holds only while the key is as it was read.
fn compares(txn: &Txn, key: &str) -> bool {
    txn.when.iter().any(|compare| match compare {
        Compare::Absent(own) | Compare::Unchanged(own, _) | Compare::Holds(own, _) => own == key,
        Compare::Present(_) | Compare::NoneUnder(_) | Compare::NoneSince(..) | Compare::NotBefore(..) => {
            false
        }
    })
}

fn writes(txn: &Txn, key: &str) -> bool {
    txn.then.iter().any(|op| op.key() == key)
}

impl Referee {
    /// A transaction demands that what its writes stand on is as it was read.
    pub(super) fn look_at_demands(
        &mut self,
        world: &World,
        actor: Actor,
        txn: &Txn,
        before: &[Option<KeyValue>],
        late: bool,
    ) {
        let mut lacking = Vec::new();
        for (op, old) in txn.then.iter().zip(before) {
            let stands_on = match actor {
                Actor::Nemesis => continue,
                Actor::Agent(node, _) => of_agent(world, node, op, old.as_ref()),
                Actor::User(_) | Actor::Controller(_) => {
                    let mut stands_on = match op.key().strip_prefix(MEMBERS) {
                        Some(place) => self.of_member(world, txn, op, place),
                        None => of_tool(world, txn, op, old.as_ref()),
                    };
                    lacking.extend(of_revoked(world, op, old.as_ref()));
                    lacking.extend(of_what_is_there(world, txn, op, old.as_ref()));
                    lacking.extend(of_end(world, txn, op, old.as_ref()));
                    stands_on.extend(of_forgotten(world, txn, op));
                    // Who has given it up may have looked once more since.
                    if !late {
                        stands_on.extend(self.of_token(actor, op));
                    }
                    if world.keys.parse_instance(op.key()).is_ok() {
                        stands_on.extend(of_attach(world, txn, old.as_ref(), written(op), &mut lacking));
                    }
                    stands_on
                }
                Actor::Replica(_) => of_replica(world, txn, op, old.as_ref(), &mut lacking),
            };
            let missing = stands_on.into_iter().filter(|key| !compares(txn, key));
            lacking.extend(missing.map(|key| format!("{} without comparing {key}", op.key())));
        }
        for what in lacking {
            self.found(format!("{actor} wrote {what}"));
        }
    }
}

/// Whoever ends a volume that a machine had last stands on what is told of that.
fn of_end(world: &World, txn: &Txn, op: &Op, old: Option<&KeyValue>) -> Option<String> {
    let keys = &world.keys;
    let volume = keys.parse_instance(op.key()).ok().filter(|_| matches!(op, Op::Delete(_)))?;
    let record = decode::<Instance>(&old?.value).ok().filter(|record| record.kind == Workload::Volume)?;
    let holder = record.attached?.to_string();
    let is_asked = txn.then.iter().any(|op| keys.parse_request(op.key()).is_ok_and(|of| of.1 == volume));
    let speaks = |compare: &Compare| match compare {
        Compare::Absent(key) | Compare::Unchanged(key, _) => key.ends_with(&holder),
        _ => false,
    };
    (is_asked && !txn.when.iter().any(speaks))
        .then(|| format!("{} without comparing what is told of {holder}", op.key()))
}

/// A record that says of itself what it did not before, a name or a place in a group, goes with the key that tells others of it: that is
/// written, or there.
fn of_what_is_there(world: &World, txn: &Txn, op: &Op, old: Option<&KeyValue>) -> Vec<String> {
    let keys = &world.keys;
    let told = |record: &Instance| {
        let name = record.name.as_ref();
        let name = name.map(|name| keys.name(record.kind, &record.project, name, record.instance));
        name.into_iter().chain(keys.membership(record)).collect::<Vec<_>>()
    };
    let record = |value: &[u8]| keys.parse_instance(op.key()).ok().and(decode::<Instance>(value).ok());
    let before = old.and_then(|old| record(&old.value)).map(|record| told(&record)).unwrap_or_default();
    let after = written(op).and_then(record).map(|record| told(&record)).unwrap_or_default();
    let is_there = |key: &String| {
        txn.when.iter().any(|compare| matches!(compare, Compare::Present(there) if there == key))
    };
    after
        .into_iter()
        .filter(|key| !before.contains(key) && !writes(txn, key) && !is_there(key))
        .map(|key| format!("{} without comparing {key}", op.key()))
        .collect()
}

/// An agent writes while it is the node, and what it says of an instance is said of the request that it read.
fn of_agent(world: &World, node: NodeId, op: &Op, old: Option<&KeyValue>) -> Vec<String> {
    let (keys, key) = (&world.keys, op.key());
    let mut stands_on = vec![keys.agent(node)];
    if key == keys.node(node) {
        stands_on.push(key.to_owned());
    }
    if let Some(instance) = instance_of(world, node, key) {
        stands_on.push(keys.request(node, instance));
        // Nor does an older word take the place of one that its agent did not hear of.
        let is_read = old.is_none_or(|old| decode::<Status>(&old.value).is_ok());
        if matches!(op, Op::Put { .. }) && key == keys.status(node, instance) && is_read {
            stands_on.push(key.to_owned());
        }
    }
    stands_on
}

/// The instance that a node's key speaks of.
fn instance_of(world: &World, node: NodeId, key: &str) -> Option<InstanceId> {
    let keys = &world.keys;
    [
        keys.requests(node),
        keys.statuses(node),
        keys.all_user_data(node),
        keys.all_held(node),
        keys.all_held_user_data(node),
    ]
    .iter()
    .find_map(|prefix| key.strip_prefix(prefix.as_str())?.parse().ok())
}

/// Who changes a request or a record compares it; who asks for an instance does so while its node is alive and its
/// record is as it was written; a name is taken while nobody bears it, and goes with its record; so does a place in a group,
/// which is taken as its policy says.
fn of_tool(world: &World, txn: &Txn, op: &Op, old: Option<&KeyValue>) -> Vec<String> {
    let (keys, key) = (&world.keys, op.key());
    if let Ok((node, instance)) = keys.parse_request(key) {
        let mut stands_on = vec![key.to_owned()];
        let request = match op {
            Op::Put { value, .. } => decode::<Request>(value).ok(),
            Op::Delete(_) => None,
        };
        let is_wanted = request.as_ref().is_some_and(|request| request.desired == Desired::Active);
        let of_before = old.and_then(|old| decode::<Request>(&old.value).ok());
        let is_new = request.as_ref().map(|request| request.generation)
            != of_before.as_ref().map(|request| request.generation);
        // A wish to destroy takes the record away, with what that names.
        if is_wanted || writes(txn, &keys.instance(instance)) {
            stands_on.push(keys.instance(instance));
        }
        let handover = |request: Option<&Request>| request.and_then(|request| request.handover);
        if let (Some(Handover::From(giver)), None) =
            (handover(of_before.as_ref()), handover(request.as_ref()))
            && request.is_some()
            && !is_wanted
        {
            // It comes from nowhere any more.
            stands_on.push(keys.request(giver, instance));
        }
        if is_wanted {
            // A wish for one that is placed waits for its node.
            if old.is_none() {
                stands_on.push(keys.alive(node));
                stands_on.extend(brought_back(world, txn, node, instance));
                stands_on.extend(with_others(world, txn, instance, request.as_ref()));
                stands_on.extend(come_to(world, txn, node, instance));
            } else if is_new && !waits_for_a_node(world, txn) {
                // It waits for one that was let in: the sign of life goes with the rights, or the node's record tells.
                stands_on.push(keys.alive(node));
            }
            if let (Some(was), Some(is)) = (&of_before, &request) {
                stands_on.extend(of_holder(world, was, is));
            }
            let access = |request: Option<&Request>| request.and_then(|request| request.access);
            if old.is_some()
                && access(request.as_ref()).is_some_and(|wish| Some(wish) != access(of_before.as_ref()))
            {
                // Whoever is to look at it is shown it by who is let in.
                stands_on.push(keys.alive(node));
            }
            let format = |request: Option<&Request>| request.map_or(1, Record::format);
            let is_later = format(request.as_ref()) > format(of_before.as_ref());
            if is_later && is_new {
                // Its agent has to be one that reads that.
                stands_on.push(keys.alive(node));
            }
        }
        return stands_on;
    }
    if let Ok(instance) = keys.parse_instance(key) {
        let requested =
            txn.then.iter().any(|op| keys.parse_request(op.key()).is_ok_and(|of| of.1 == instance));
        let before = old.and_then(|old| decode::<Instance>(&old.value).ok());
        let after = written(op).and_then(|value| decode::<Instance>(value).ok());
        if requested {
            // It goes, or is placed, with its request, which says what that stands on; and who had it has it no more.
            return of_former(world, before.as_ref(), after.as_ref());
        }
        let mut stands_on = vec![key.to_owned()];
        let generations = [&before, &after].map(|record| record.as_ref().map(|record| record.generation));
        let node = before.as_ref().and_then(|record| record.node());
        if let (Some(node), true) = (node, generations[0] < generations[1]) {
            // A wish that its node need not hear of.
            stands_on.push(keys.request(node, instance));
            return stands_on;
        }
        let attached = [&before, &after].map(|record| record.as_ref().and_then(|record| record.attached));
        if let Some(node) = node.filter(|_| after.is_some() && attached[0] != attached[1]) {
            // Nobody has the volume any more; or one is brought back that has it, and the volume is asked for by nobody yet.
            stands_on.push(keys.request(node, instance));
            stands_on.extend(attached[0].map(|holder| keys.instance(holder)));
            return stands_on;
        }
        if let Some(node) = node.filter(|_| matches!(op, Op::Put { .. })) {
            // It is about to be swept: nobody asks for it, and nobody tells of it.
            stands_on.extend([keys.request(node, instance), keys.status(node, instance)]);
        }
        return stands_on;
    }
    if key.starts_with(&keys.all_actions()) {
        // Two who note something at once: neither is forgotten.
        return if matches!(op, Op::Put { .. }) && old.is_some() { vec![key.to_owned()] } else { Vec::new() };
    }
    if let Some(group) = key.strip_prefix(GROUPS) {
        let members = format!("{MEMBERS}{group}/");
        let is_alone = |compare: &Compare| matches!(compare, Compare::NoneUnder(under) if *under == members);
        return match op {
            Op::Put { .. } => vec![key.to_owned()],
            Op::Delete(_) if txn.when.iter().any(is_alone) => Vec::new(),
            Op::Delete(_) => vec![members],
        };
    }
    if key.starts_with(&placement_tokens(PLACEMENT)) || key.starts_with(&keys.nodes()) {
        return of_operator(txn, op, old);
    }
    let of_catalog = of_catalog(world, txn, op);
    if !of_catalog.is_empty() {
        return of_catalog;
    }
    let is_name = NAMES.iter().any(|names| key.starts_with(names));
    let Some((name, bearer)) = key.rsplit_once('/').filter(|_| is_name) else { return Vec::new() };
    let name = format!("{name}/");
    let record = bearer.parse().map(|bearer| keys.instance(bearer)).unwrap_or_default();
    match op {
        Op::Put { .. } => {
            let is_free = |compare: &Compare| matches!(compare, Compare::NoneUnder(under) if *under == name);
            // Its bearer hands it on to itself, under another uuid.
            let handed_on = |op: &Op| matches!(op, Op::Delete(key) if key.starts_with(&name));
            let settled = txn.when.iter().any(is_free) || txn.then.iter().any(handed_on);
            if settled { Vec::new() } else { vec![name] }
        }
        Op::Delete(_) if writes(txn, &record) => Vec::new(),
        Op::Delete(_) => vec![record],
    }
}

/// A volume comes to another machine while the one that had it has it no more, by what is wanted of that; and to another node with the
/// machine that has it while that is as it was.
fn of_former(world: &World, before: Option<&Instance>, after: Option<&Instance>) -> Vec<String> {
    let keys = &world.keys;
    let [was, is] = [before, after].map(|record| record.and_then(|record| record.attached));
    let [from, to] = [before, after].map(|record| record.and_then(Instance::node));
    if let Some(holder) = was.filter(|_| was == is && from.is_some() && from != to) {
        return vec![keys.instance(holder)];
    }
    let Some(former) = was.filter(|was| is.is_some_and(|is| is != *was)) else { return Vec::new() };
    let record = keys.instance(former);
    let machine = content(world, &record).and_then(|pair| decode::<Instance>(&pair.value).ok());
    let request = machine.and_then(|machine| Some(keys.request(machine.node()?, former)));
    let is_there = |key: &String| content(world, key).is_some();
    std::iter::once(record).chain(request.filter(is_there)).collect()
}

/// A volume that a machine has is changed while nobody locks the machine.
fn of_holder(world: &World, was: &Request, is: &Request) -> Option<String> {
    let is_changed = was.rebuild != is.rebuild || was.resize != is.resize;
    let holder = holder(world, is.instance).filter(|_| is_changed && is.kind == Workload::Volume)?;
    Some(world.keys.instance(holder.instance))
}

/// What it stands on of others that a machine is asked for with its volumes, or a volume that a machine is to have: who has which.
fn with_others(world: &World, txn: &Txn, instance: InstanceId, request: Option<&Request>) -> Vec<String> {
    let keys = &world.keys;
    let record = |of: InstanceId| {
        let pair = content(world, &keys.instance(of))?;
        Some(decode::<Instance>(&pair.value).ok())
    };
    let mut stands_on = Vec::new();
    for volume in request.iter().flat_map(|request| &request.volumes).map(|has| has.volume) {
        stands_on.push(keys.instance(volume));
        let node = record(volume).flatten().and_then(|record| record.node());
        stands_on.extend(node.map(|node| keys.request(node, volume)));
    }
    let own = txn.then.iter().find(|op| op.key() == keys.instance(instance)).and_then(written);
    let holder = own.and_then(|value| decode::<Instance>(value).ok()?.attached);
    // One that is not to have it any more, or is lost, has no say.
    let has_it = |holder: &InstanceId| {
        let machine = record(*holder).flatten();
        machine.is_some_and(|machine| machine.volumes.iter().any(|has| has.volume == instance))
    };
    stands_on.extend(holder.filter(has_it).map(|holder| keys.instance(holder)));
    stands_on
}

/// A volume comes to a node that tells of none of that uuid, and has noted none.
fn come_to(world: &World, txn: &Txn, node: NodeId, volume: InstanceId) -> Vec<String> {
    let keys = &world.keys;
    let goes = txn.then.iter().any(|op| {
        let leaves = keys.parse_request(op.key()).is_ok_and(|(from, of)| of == volume && from != node);
        let handover = written(op).and_then(|value| decode::<Request>(value).ok()?.handover);
        leaves && handover == Some(Handover::To(node))
    });
    if goes { vec![keys.status(node, volume), keys.held(node, volume)] } else { Vec::new() }
}

/// Whether it holds only while a node is as it was: that of the machine, where it is of a machine and of its volume.
fn waits_for_a_node(world: &World, txn: &Txn) -> bool {
    let [alive, known] = [world.keys.all_alive(), world.keys.nodes()];
    txn.when.iter().any(|compare| match compare {
        Compare::Absent(key) | Compare::Unchanged(key, _) | Compare::Holds(key, _) => {
            key.starts_with(&alive) || key.starts_with(&known)
        }
        Compare::Present(_) | Compare::NoneUnder(_) | Compare::NoneSince(..) | Compare::NotBefore(..) => {
            false
        }
    })
}

/// Nothing new is wanted of a node that is let in no more: whoever has its credentials may still read what is.
fn of_revoked(world: &World, op: &Op, old: Option<&KeyValue>) -> Option<String> {
    let (node, _) = world.keys.parse_request(op.key()).ok()?;
    let record = decode::<Node>(&content(world, &world.keys.node(node))?.value).ok()?;
    if !record.revoked || content(world, &world.keys.alive(node)).is_some() {
        return None;
    }
    let wanted = decode::<Request>(written(op)?).ok().filter(|wanted| wanted.desired == Desired::Active)?;
    let before = old.and_then(|old| decode::<Request>(&old.value).ok());
    // What was locked may be unlocked.
    let is_same = before.is_some_and(|before| {
        let unlocked = Request { generation: wanted.generation, request_id: wanted.request_id, ..before };
        unlocked == wanted
    });
    (!is_same).then(|| format!("{} though the node was revoked", op.key()))
}

/// A node's record is written by its agent, too; and a token goes in the place of which another comes as it was read.
fn of_operator(txn: &Txn, op: &Op, old: Option<&KeyValue>) -> Vec<String> {
    let is_replaced = txn.then.iter().any(|op| matches!(op, Op::Put { .. }));
    match op {
        Op::Put { .. } if old.is_some() => vec![op.key().to_owned()],
        Op::Delete(key) if is_replaced => vec![key.clone()],
        _ => Vec::new(),
    }
}

/// What an agent would have taken away goes while that agent is not there, and as it was read.
fn of_forgotten(world: &World, txn: &Txn, op: &Op) -> Vec<String> {
    let (keys, key) = (&world.keys, op.key());
    if !matches!(op, Op::Delete(_)) {
        return Vec::new();
    }
    if let Some(node) = key.strip_prefix(&keys.nodes()).and_then(|node| node.parse().ok()) {
        return vec![key.to_owned(), keys.agent(node)];
    }
    let Ok((node, instance)) = keys.parse_status(key) else { return Vec::new() };
    let request = keys.request(node, instance);
    // Its request tells all that counts, where there is one.
    let is_alone = txn.when.contains(&Compare::Absent(request.clone()));
    let own = is_alone.then(|| key.to_owned());
    [keys.agent(node), keys.alive(node), request].into_iter().chain(own).collect()
}

/// What its node keeps of an instance that is brought back by it.
fn brought_back(world: &World, txn: &Txn, node: NodeId, instance: InstanceId) -> Vec<String> {
    let keys = &world.keys;
    let (held, data) = (keys.held(node, instance), keys.held_user_data(node, instance));
    let is_there = |key: &str| content(world, key).is_some();
    let mut stands_on = Vec::new();
    if is_there(&held) {
        stands_on.extend([held, keys.status(node, instance)]);
    }
    if is_there(&data) && writes(txn, &keys.user_data(node, instance)) {
        stands_on.push(data);
    }
    stands_on
}

impl Referee {
    /// What somebody saw of tokens.
    pub(crate) fn saw_tokens(&mut self, actor: Actor, tokens: &[KeyValue]) {
        let of = |pair: &KeyValue| Some((pair.key.clone(), decode::<Token>(&pair.value).ok()?.provider?));
        self.tokens.insert(actor, tokens.iter().filter_map(of).collect());
    }

    /// A node is given a token in place of those that it was seen to have: were they taken away since, nobody lets it in.
    fn of_token(&self, actor: Actor, op: &Op) -> Vec<String> {
        let token = written(op).filter(|_| op.key().starts_with(&placement_tokens(PLACEMENT)));
        let node = token.and_then(|value| decode::<Token>(value).ok()?.provider);
        let seen = node.and_then(|_| self.tokens.get(&actor)).into_iter().flatten();
        seen.filter(|(key, of)| Some(*of) == node && key != op.key()).map(|(key, _)| key.clone()).collect()
    }

    /// Whoever takes a place in a group compares the group, and what its policy says of others' places.
    fn of_member(&mut self, world: &World, txn: &Txn, op: &Op, place: &str) -> Vec<String> {
        let Some((node, instance)) = world.keys.parse_member(op.key()).ok() else { return Vec::new() };
        let record = world.keys.instance(instance);
        if let Op::Delete(_) = op {
            return match content(world, &record) {
                _ if writes(txn, &record) => Vec::new(),
                Some(_) => vec![record],
                // Its record was taken away by hand, and its guest runs while its node is asked for it.
                None => vec![record, world.keys.request(node, instance)],
            };
        }
        let group: Vec<&str> = place.splitn(3, '/').take(2).collect();
        let (group, members) =
            (format!("{GROUPS}{}", group.join("/")), format!("{MEMBERS}{}/", group.join("/")));
        let there = format!("{members}{node}/");
        let policy = content(world, &group).and_then(|pair| decode::<Group>(&pair.value).ok());
        let had_some = !self.joined.insert(members.clone());
        // It is where it is.
        let is_back = content(world, &world.keys.held(node, instance)).is_some();
        let is_demanded = |compare: &Compare| match (policy.as_ref().map(|group| group.policy), compare) {
            (Some(Policy::AntiAffinity), Compare::NoneUnder(under)) => *under == there,
            (Some(Policy::Affinity), Compare::NoneUnder(under)) => *under == members,
            (Some(Policy::Affinity), Compare::Present(peer)) => peer.starts_with(&there),
            // In the last of its rounds it goes anywhere; in no history anybody comes to that.
            (Some(Policy::SoftAntiAffinity), Compare::NoneSince(under, _)) => *under == there,
            (Some(Policy::SoftAntiAffinity), _) => is_back,
            // Who saw that it has none goes where it likes while that is so. Who saw some joins them, or does not.
            (Some(Policy::SoftAffinity), Compare::NoneUnder(under)) => *under == members,
            (Some(Policy::SoftAffinity), _) => is_back || had_some,
            _ => false,
        };
        if txn.when.iter().any(is_demanded) { vec![group] } else { vec![group, members] }
    }
}

/// A replica of eplacement compares clock and epoch, all that it writes, and all that its decision counts at; and
/// whatever that is, it rewrites.
fn of_replica(
    world: &World,
    txn: &Txn,
    op: &Op,
    old: Option<&KeyValue>,
    lacking: &mut Vec<String>,
) -> Vec<String> {
    let Some((kind, id)) = op.key().strip_prefix(PLACEMENT).and_then(|rest| rest[1..].split_once('/')) else {
        return of_clock(txn, op, old, lacking);
    };
    let key = |kind: &str, id: &str| format!("{PLACEMENT}/{kind}/{id}");
    let is_there = |key: &String| content(world, key).is_some();
    let mut stands_on: BTreeSet<String> =
        [key(if kind == "providers" { "generations" } else { kind }, id)].into();
    let (before, after) = (read(old.map(|old| &*old.value)), read(written(op)));
    let counted = match kind {
        "consumers" => at(&before).chain(at(&after)).map(|provider| key("generations", provider)).collect(),
        "providers" => {
            let [before, after] = [custom_traits(&before), custom_traits(&after)];
            before.symmetric_difference(&after).map(|name| key("traits", name)).collect()
        }
        _ => Vec::new(),
    };
    for guard in counted {
        if is_there(&guard) && !writes(txn, &guard) {
            lacking.push(format!("{} without rewriting {guard}", op.key()));
        }
        if is_there(&guard) {
            stands_on.insert(guard);
        }
    }
    stands_on.into_iter().collect()
}

/// Every transaction but one about whose turn it is writes the clock, in the history that its replica knows.
fn of_clock(txn: &Txn, op: &Op, old: Option<&KeyValue>, lacking: &mut Vec<String>) -> Vec<String> {
    let [clock, epoch, turn] = ["clock", "epoch", "turn"].map(|name| format!("{PLACEMENT}/{name}"));
    // With what it was taken for it goes, as its replica knows of nobody who took it since: at worst others wait for that one less.
    let goes_along = matches!(op, Op::Delete(_)) && txn.then.len() > 1;
    if *op.key() == turn && !goes_along {
        return vec![turn];
    }
    let is_known = |compare: &Compare| matches!(compare, Compare::NotBefore(key, _) if *key == clock);
    if *op.key() == clock && old.is_some() && !txn.when.iter().any(is_known) {
        lacking.push(format!("{clock} without comparing it"));
    }
    vec![epoch]
}

fn written(op: &Op) -> Option<&[u8]> {
    match op {
        Op::Put { value, .. } => Some(value),
        Op::Delete(_) => None,
    }
}

fn read(record: Option<&[u8]>) -> Value {
    record.and_then(|record| serde_json::from_slice(record).ok()).unwrap_or_default()
}

/// The providers that a consumer's record takes from.
fn at(consumer: &Value) -> impl Iterator<Item = &String> {
    consumer["allocations"].as_object().into_iter().flat_map(|allocations| allocations.keys())
}

/// The traits of a provider's record that somebody made.
fn custom_traits(provider: &Value) -> BTreeSet<&str> {
    let traits = provider["traits"].as_array().into_iter().flatten().filter_map(Value::as_str);
    traits.filter(|name| name.starts_with("CUSTOM_")).collect()
}

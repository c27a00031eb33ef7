//! Rules for volumes: whoever asks, and whatever breaks, one machine has one at a time, and what a guest may have written
//! stays.

use std::collections::{BTreeMap, BTreeSet};

use ec_hypervisor::Operation;
use ec_model::{
    Attachment, CopyOf, Desired, ImageRef, Instance, InstanceId, NodeId, Power, Request, State, Status,
    Workload, decode,
};
use ec_store::{Compare, KeyValue, Op, Txn};
use jiff::Timestamp;

use super::{Referee, disk_bytes, observed};
use crate::{
    door::content,
    node::Computer,
    world::{Actor, World},
};

/// Which machines are to have which volumes, by their records.
fn wanted(world: &World) -> BTreeMap<InstanceId, Vec<InstanceId>> {
    let pairs = world.store.content(&world.keys.instances()).pairs;
    let mut wanted: BTreeMap<InstanceId, Vec<InstanceId>> = BTreeMap::new();
    for record in pairs.iter().filter_map(|pair| decode::<Instance>(&pair.value).ok()) {
        for has in &record.volumes {
            wanted.entry(has.volume).or_default().push(record.instance);
        }
    }
    wanted
}

/// The volumes that a computer's domain of an instance has, as it is defined and of the guest that is up.
fn had(computer: &Computer, instance: InstanceId) -> BTreeSet<InstanceId> {
    let all = computer.hypervisor.volumes().into_iter();
    let own = all.filter(|(machine, _)| *machine == instance);
    own.flat_map(|(_, volumes)| volumes).flatten().map(|has| has.volume).collect()
}

/// What is wanted of an instance, by its record.
pub(super) fn record(world: &World, of: InstanceId) -> Option<Instance> {
    decode(&content(world, &world.keys.instance(of))?.value).ok()
}

/// The machine that is to have this volume, by the records of both.
pub(super) fn holder(world: &World, volume: InstanceId) -> Option<Instance> {
    let machine = record(world, record(world, volume)?.attached?)?;
    machine.volumes.iter().any(|has| has.volume == volume).then_some(machine)
}

/// Whether whoever looked a moment before has seen what was told then.
fn is_old(world: &World, told: Timestamp) -> bool {
    world.now().duration_since(told).as_secs() > 5
}

/// Whether its end was asked for, wherever it is.
fn is_doomed(world: &World, instance: InstanceId) -> bool {
    world.computers.iter().any(|computer| {
        let request = content(world, &world.keys.request(computer.node, instance));
        let request = request.and_then(|pair| decode::<Request>(&pair.value).ok());
        request.is_some_and(|request| request.desired == Desired::Destroyed)
    })
}

/// What is made anew of which copy where this snapshot is restored, as the instance stands by now.
pub(crate) fn restored_of(world: &World, snapshot: InstanceId) -> BTreeMap<InstanceId, String> {
    let record = |of| record(world, of);
    let copied = record(snapshot).and_then(|record| record.spec.image.copied());
    let Some((machine, copied)) = copied.and_then(|copied| Some((record(copied.disk)?, copied))) else {
        return BTreeMap::new();
    };
    let own = CopyOf::disk(Workload::Volume, snapshot);
    let url = |of: &CopyOf| ImageRef::copy_of(of).url;
    let has = |volume: &InstanceId| machine.volumes.iter().any(|has| has.volume == *volume);
    let beside = copied.beside.iter().filter(|volume| has(volume));
    let beside = beside.map(|volume| (*volume, url(&CopyOf { held: Some(*volume), ..own.clone() })));
    let first = Attachment::root_of(&machine.volumes).unwrap_or(machine.instance);
    beside.chain([(first, url(&own))]).collect()
}

/// A machine as it was before somebody had it restored from a snapshot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Before {
    pub(crate) instance: InstanceId,
    /// It runs, and is to.
    runs: bool,
    is_locked: bool,
    /// So many wishes of it there were.
    wishes: u32,
}

fn machine(world: &World, instance: InstanceId) -> Option<(Instance, Request)> {
    let record = record(world, instance)?;
    let request = content(world, &world.keys.request(record.node()?, instance))?;
    Some((record, decode(&request.value).ok()?))
}

impl Referee {
    /// Somebody is about to have a machine restored from this snapshot of it.
    pub(crate) fn before_restore(&self, world: &World, snapshot: InstanceId) -> Option<Before> {
        let instance = record(world, snapshot)?.spec.image.copied()?.disk;
        let (record, request) = machine(world, instance)?;
        let status = content(world, &world.keys.status(record.node()?, instance))?;
        let status = decode::<Status>(&status.value).ok()?;
        let is_done = status.power_generation >= request.power.generation;
        let runs = status.state == State::Active && request.power.power == Power::Running && is_done;
        let wishes = self.known(instance).wishes;
        Some(Before { instance, runs, is_locked: record.locked.is_some(), wishes })
    }

    /// A user was told that it is restored, who wished so much of the machine for that: it is as open and as up as before.
    pub(crate) fn after_restore(&mut self, world: &World, before: Before, own: u32) {
        let Before { instance, runs, is_locked, wishes } = before;
        let Some((record, request)) = machine(world, instance).filter(|_| !self.restored) else { return };
        if self.known(instance).wishes != wishes + own {
            return;
        }
        if let Some(why) = record.locked.filter(|_| !is_locked) {
            self.found(format!("{instance} was told to be restored, and is locked: {why}"));
        }
        if runs && request.power.power != Power::Running {
            self.found(format!("{instance} ran, was told to be restored, and is not to run any more"));
        }
    }

    /// A user was told that a snapshot is restored, of which these are the copies.
    pub(crate) fn told_restored(&mut self, copies: &BTreeMap<InstanceId, String>) {
        for (disk, of) in copies {
            if !self.restored && !self.known(*disk).disks_of.contains(of) {
                self.found(format!("the disk of {disk} was told to be restored, and was never made of {of}"));
            }
        }
    }

    /// A volume is asked for by one machine at most, and none that a machine is to have is asked to end.
    pub(super) fn look_at_volumes(
        &mut self,
        world: &World,
        actor: Actor,
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        if let Some(record) = world.keys.parse_instance(key).ok().and(new)
            && let Ok(record) = decode::<Instance>(record)
        {
            if let Some(was) = old.and_then(|old| decode::<Instance>(&old.value).ok()) {
                self.look_at_holder(world, actor, &was, &record);
            }
            let known = self.known.entry(record.instance).or_default();
            known.is_volume = record.kind == Workload::Volume;
            if let (Some(node), Some(before)) = (record.node(), known.acknowledged)
                && known.is_volume
                && node != before
            {
                // It moves: what its new node tells begins anew.
                (known.acknowledged, known.was_active, known.told) = (Some(node), false, None);
                (known.rebuild_acknowledged, known.resize_acknowledged) = (None, None);
            }
            let copied = record.spec.image.copied();
            known.copy_of = copied.as_ref().map(|copied| copied.disk);
            known.beside = copied.map(|copied| copied.beside).unwrap_or_default();
            known.volumes = record.volumes.iter().map(|has| has.volume).collect();
            let root = Attachment::root_of(&record.volumes);
            let before = known.root;
            known.root = root.or(before);
            if record.assigned.is_some() && !self.restored && before.is_some() && root != before {
                self.found(format!("{actor} wrote that {} boots from another disk", record.instance));
            }
            self.look_at_given(world, actor, &record, old);
            self.look_at_nodes_of_volumes(world, actor, &record);
            let wanted = wanted(world);
            for volume in record.volumes.iter().map(|has| has.volume) {
                if wanted.get(&volume).is_some_and(|machines| machines.len() > 1) {
                    self.found(format!(
                        "{actor} wrote that {} is to have {volume}, which another is to have",
                        record.instance
                    ));
                }
            }
        }
        let Some((node, volume)) = world.keys.parse_request(key).ok().filter(|_| new.is_some()) else {
            return;
        };
        let ends = new.and_then(|new| decode::<Request>(new).ok());
        if ends.is_none_or(|request| request.desired != Desired::Destroyed) {
            return;
        }
        if let Some(machines) = wanted(world).get(&volume) {
            self.found(format!("{actor} asked for the end of {volume}, which {} is to have", machines[0]));
        }
        self.look_at_elsewhere(world, actor, node, volume);
        // Both of whoever was ended on a node that is away may be asked to go.
        if let Some(holder) = self.holder(world, volume, None).filter(|holder| !is_doomed(world, *holder)) {
            self.found(format!("{actor} asked for the end of {volume}, which {holder} has"));
        }
    }

    /// No machine is to have from now on what is being made anew.
    fn look_at_given(&mut self, world: &World, actor: Actor, machine: &Instance, old: Option<&KeyValue>) {
        let before = old.and_then(|old| decode::<Instance>(&old.value).ok());
        let had = |volume: InstanceId| {
            before.iter().flat_map(|record| &record.volumes).any(|has| has.volume == volume)
        };
        for volume in machine.volumes.iter().map(|has| has.volume).filter(|volume| !had(*volume)) {
            let known = self.known(volume);
            let node = record(world, volume).and_then(|record| record.node());
            let Some(node) = node.filter(|_| !(self.restored || known.status_lost)) else { continue };
            let wished = content(world, &world.keys.request(node, volume))
                .and_then(|pair| decode::<Request>(&pair.value).ok())
                .and_then(|request| request.rebuild);
            let told = content(world, &world.keys.status(node, volume))
                .and_then(|pair| decode::<Status>(&pair.value).ok())
                .and_then(|status| status.rebuilt);
            if wished.map(|wish| wish.wished_at) > told.map(|told| told.wished_at) {
                let machine = machine.instance;
                self.found(format!(
                    "{actor} wrote that {machine} is to have {volume}, which is being made anew"
                ));
            }
        }
    }

    /// What a machine is to have lies where that is.
    fn look_at_nodes_of_volumes(&mut self, world: &World, actor: Actor, machine: &Instance) {
        let Some(node) = machine.node().filter(|_| !self.restored) else { return };
        for volume in machine.volumes.iter().map(|has| has.volume) {
            let other = record(world, volume).and_then(|record| record.node());
            if let Some(other) = other.filter(|other| *other != node) {
                let machine = machine.instance;
                self.found(format!("{actor} wrote that {machine} of {node} is to have {volume} of {other}"));
            }
        }
    }

    /// Nobody asks for the end of a volume where it is not, while another node tells that it has it.
    fn look_at_elsewhere(&mut self, world: &World, actor: Actor, node: NodeId, volume: InstanceId) {
        let others = world.computers.iter().filter(|computer| computer.node != node);
        for other in others {
            let status = content(world, &world.keys.status(other.node, volume));
            let Some(status) = status.and_then(|pair| decode::<Status>(&pair.value).ok()) else { continue };
            let has_it = status.state == State::Unclaimed && status.kind == Workload::Volume;
            if has_it && is_old(world, status.since) {
                let other = other.node;
                self.found(format!(
                    "{actor} asked for the end of {volume} on {node}, and {other} tells that it has it"
                ));
            }
        }
    }

    /// Who asks for a snapshot asks for all disks that its guest has, by the word of its agent, and for none that is being given or
    /// taken.
    pub(crate) fn snapshot_asked(&mut self, status: &Status, of: &CopyOf) {
        let has: BTreeSet<InstanceId> =
            status.volumes.iter().filter(|has| !has.is_root()).map(|has| has.volume).collect();
        let asked: BTreeSet<InstanceId> = of.beside.iter().copied().collect();
        let is_unsettled = status.volumes_changing || status.volumes_failed.is_some();
        if has != asked || is_unsettled || status.is_rescued() && !has.is_empty() {
            let machine = of.disk;
            self.found(format!(
                "a snapshot is asked for of {machine} with {asked:?}, and it tells of {has:?}"
            ));
        }
    }

    /// A wish for a new disk is told to be carried out when one is there that was made since.
    pub(super) fn look_at_rebuilt(&mut self, instance: InstanceId, request: &Request, status: &Status) {
        let restored = self.restored;
        let known = self.known.entry(instance).or_default();
        let told = status.rebuilt.as_ref();
        let before = std::mem::replace(&mut known.rebuilt_told, told.map(|told| told.wished_at));
        let wished_at = request.rebuild.as_ref().map(|wish| wish.wished_at);
        let Some(told) = told.filter(|told| told.failed.is_none() && Some(told.wished_at) > before) else {
            return;
        };
        let is_newest = Some(told.wished_at) == wished_at && known.made_of != wished_at;
        let is_sure = !(restored || known.disturbed || known.record_lost || known.moved);
        if is_newest && is_sure && known.replaced_with < known.rebuild_count {
            self.found(format!(
                "{instance} was told to have a new disk, and none was made since that was wished"
            ));
        }
    }

    /// A volume changes hands, or its node, once no other machine has it; and what is told of it there is newer.
    fn look_at_holder(&mut self, world: &World, actor: Actor, was: &Instance, is: &Instance) {
        if is.kind != Workload::Volume {
            return;
        }
        let volume = is.instance;
        let [before, after] = [was, is].map(|record| record.assigned);
        let moves = before.is_some() && was.node() != is.node();
        if moves && before.map(|at| at.epoch) >= after.map(|at| at.epoch) {
            self.found(format!("{actor} wrote that {volume} is elsewhere, by no newer epoch"));
        }
        if (moves || was.attached != is.attached)
            && let Some(holder) = self.holder(world, volume, is.attached)
        {
            self.found(format!("{actor} wrote that {volume} changes hands, which {holder} has"));
        }
    }

    /// A machine whose hypervisor has a volume, other than this one; but for one to which something was done that its agent
    /// could not know.
    fn holder(&self, world: &World, volume: InstanceId, but: Option<InstanceId>) -> Option<InstanceId> {
        let all = world.computers.iter().flat_map(|computer| computer.hypervisor.volumes());
        let is_sure = |machine: &InstanceId| {
            let known = self.known(*machine);
            let harmed = known.disturbed || known.vanished || known.was_revived || known.by_hand;
            !(harmed || known.status_lost || known.request_lost || known.record_lost)
        };
        let has_it = all.filter(|(_, has)| has.iter().flatten().any(|has| has.volume == volume));
        has_it
            .map(|(machine, _)| machine)
            .filter(|machine| Some(*machine) != but && !self.restored)
            .find(is_sure)
    }

    /// A disk that was made of the newest wish is not made of it once more; nor after its user was told that the old one stays.
    pub(super) fn look_at_made(
        &mut self,
        world: &World,
        node: NodeId,
        what: Operation,
        instance: InstanceId,
        late: bool,
    ) {
        let is_made = matches!(what, Operation::CreateOverlay | Operation::CreateVolume);
        if !(is_made || matches!(what, Operation::CreateSuccessor | Operation::ReplaceOverlay)) {
            return;
        }
        let request = content(world, &world.keys.request(node, instance));
        let Some(request) = request.and_then(|pair| decode::<Request>(&pair.value).ok()) else { return };
        if let Some(spec) = &request.spec {
            self.known.entry(instance).or_default().disks_of.insert(spec.image.url.clone());
        }
        if late || what == Operation::CreateSuccessor {
            return;
        }
        let wished_at = request.rebuild.map(|wish| wish.wished_at);
        let status = content(world, &world.keys.status(node, instance));
        let status = status.and_then(|pair| decode::<Status>(&pair.value).ok());
        let is_known = status.as_ref().is_some_and(|status| status.observed_generation >= request.generation);
        let given_up = status.and_then(|status| status.rebuilt).filter(|told| told.failed.is_some());
        let is_given_up = given_up.is_some_and(|told| Some(told.wished_at) == wished_at);
        let asked = request.spec.as_ref().and_then(|spec| spec.resources.get("DISK_GB").copied());
        let computer = world.computers.iter().find(|computer| computer.node == node);
        let bytes = computer.and_then(|computer| disk_bytes(computer, instance));
        if what == Operation::CreateVolume && bytes > asked.map(|gb| gb << 30) {
            self.found(format!("{instance} was made with {bytes:?} bytes, and {asked:?} GiB are asked for"));
        }
        let known = self.known.entry(instance).or_default();
        if is_made {
            known.made_of = wished_at.filter(|_| is_known);
        } else if wished_at.is_some()
            && known.made_of == wished_at
            // Nobody knows any more what it was made of.
            && !(self.restored || known.vanished && known.status_lost)
        {
            self.found(format!("the disk of {instance} was made of a wish, and once more of the same"));
        } else if is_given_up && !self.restored {
            self.found(format!("the disk of {instance} was replaced, of which was told that it stays"));
        }
    }

    /// Once a machine is told to have heard of what is asked for, its domain has nothing but that and what is told.
    pub(super) fn look_at_volumes_told(
        &mut self,
        world: &World,
        (node, instance): (NodeId, InstanceId),
        request: &Request,
        status: &Status,
    ) {
        let is_heard = status.epoch == request.epoch && status.observed_generation >= request.generation;
        // What is destroyed has them until its domain is gone, whatever was told of it before.
        let is_to_end = request.desired == Desired::Destroyed;
        let known = self.known(instance);
        if !is_heard || is_to_end || self.restored || known.status_lost || known.set_late {
            return;
        }
        let Some(computer) = world.computers.iter().find(|computer| computer.node == node) else { return };
        let named: BTreeSet<InstanceId> =
            request.volumes.iter().chain(&status.volumes).map(|has| has.volume).collect();
        for volume in had(computer, instance).difference(&named) {
            self.found(format!("{instance} has {volume}, of which its status tells nothing any more"));
        }
    }

    /// No two guests have one volume, what a guest has is written by it, and what its agent gives it is told before.
    pub(super) fn look_at_domains(
        &mut self,
        world: &World,
        node: NodeId,
        what: Operation,
        instance: InstanceId,
        late: bool,
    ) {
        let Some(computer) = world.computers.iter().find(|computer| computer.node == node) else { return };
        let mut holders: BTreeMap<InstanceId, InstanceId> = BTreeMap::new();
        for (machine, [_, up]) in computer.hypervisor.volumes() {
            for volume in up.iter().map(|has| has.volume) {
                // What somebody deletes under its guest nobody has any more.
                if observed(computer, volume).is_some_and(|seen| seen.volume) {
                    let known = self.known.entry(volume).or_default();
                    (known.wrote, known.wrote_disk) = (true, true);
                }
                if let Some(other) = holders.insert(volume, machine) {
                    self.found(format!("the guests of {other} and {machine} have {volume}, both"));
                }
            }
        }
        if late || what != Operation::SetVolumes || self.restored || self.known(instance).status_lost {
            return;
        }
        let status = content(world, &world.keys.status(node, instance));
        let told = status.and_then(|pair| decode::<Status>(&pair.value).ok());
        let told: BTreeSet<InstanceId> =
            told.iter().flat_map(|status| &status.volumes).map(|has| has.volume).collect();
        for volume in had(computer, instance).difference(&told) {
            self.found(format!("{instance} has {volume}, and its status tells nothing of it"));
        }
    }
}

/// Whoever gives a machine a volume stands on the records and the requests of both; who takes one away on that of the volume, which may
/// be locked.
pub(super) fn of_attach(
    world: &World,
    txn: &Txn,
    old: Option<&KeyValue>,
    new: Option<&[u8]>,
    lacking: &mut Vec<String>,
) -> Vec<String> {
    let volumes = |value: &[u8]| -> BTreeSet<InstanceId> {
        let record = decode::<Instance>(value).ok();
        record.iter().flat_map(|record| &record.volumes).map(|has| has.volume).collect()
    };
    let before = old.map(|old| volumes(&old.value)).unwrap_or_default();
    let Some(new) = new else { return Vec::new() };
    let mut stands_on = Vec::new();
    for volume in volumes(new).difference(&before) {
        let record = world.keys.instance(*volume);
        let node = content(world, &record)
            .and_then(|pair| decode::<Instance>(&pair.value).ok())
            .and_then(|record| record.node());
        let request = node.map(|node| world.keys.request(node, *volume));
        // Whoever asks for its end at that moment compares its request.
        if let Some(request) = request.filter(|request| content(world, request).is_some()) {
            if !txn.then.iter().any(|op| matches!(op, Op::Put { key, .. } if *key == request)) {
                lacking.push(format!("a machine's volume without writing {request}"));
            }
            stands_on.push(request);
        }
        stands_on.push(record);
    }
    // Of one that is brought back its node tells what it has no more.
    let machine = decode::<Instance>(new).ok().map(|record| record.instance);
    let is_request = |key: &str| world.keys.parse_request(key).is_ok_and(|(_, of)| Some(of) == machine);
    let is_brought_back =
        txn.when.iter().any(|compare| matches!(compare, Compare::Absent(key) if is_request(key)))
            && txn.then.iter().any(|op| is_request(op.key()));
    for volume in before.difference(&volumes(new)).filter(|_| !is_brought_back) {
        let record = world.keys.instance(*volume);
        let of_volume = content(world, &record).and_then(|pair| decode::<Instance>(&pair.value).ok());
        if of_volume.is_some_and(|of_volume| of_volume.locked.is_some()) {
            lacking.push(format!("that a machine has {volume} no more, which is locked"));
        }
        stands_on.push(record);
    }
    stands_on
}

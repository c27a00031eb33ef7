//! What must never be, whatever breaks. The referee sees every transaction that is applied and everything that the
//! hypervisors do, and remembers it by itself: it believes no program's word about anything.

mod answers;
mod catalog;
mod copies;
mod demands;
pub(crate) mod denied;
mod ends;
mod fences;
mod groups;
mod healing;
mod ids;
pub(crate) mod keys;
mod room;
pub(crate) mod said;
mod served;
mod volumes;
mod wishes;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use ec_cloud::{ImageChange, Verb};
use ec_hypervisor::{DomainSize, End, Observed, Operation, RunState};
use ec_model::{ImageId, InstanceId, NodeId, State, Status, decode};
use ec_store::{KeyValue, Op, Revision, Txn};
use jiff::Timestamp;
use serde_json::Value;

pub(crate) use room::{marked, offered_by};
pub(crate) use served::Question;
pub(crate) use volumes::restored_of;
pub(crate) use wishes::asked_of;

use self::{answers::Being, catalog::Lives, keys::told, said::Wrote};
use crate::{
    door::content,
    node::PROCESSORS,
    world::{Actor, PLACEMENT, World},
};

/// Epoch and generation, state and reason.
type Told = (u64, u64, State, String);

/// What the referee knows of an instance.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// A user was told that it is placed, and where.
    pub(crate) acknowledged: Option<NodeId>,
    /// The how manyth that a user was told of.
    pub(crate) number: usize,
    /// An older etcd came that knows nothing of it.
    pub(crate) lost: bool,
    /// It is a volume, and of which other it is a copy.
    pub(crate) is_volume: bool,
    pub(crate) copy_of: Option<InstanceId>,
    /// And of these, at the same moment.
    pub(crate) beside: Vec<InstanceId>,
    /// A user wished that it grows, which may arrive.
    pub(crate) extended: bool,
    /// A user wished that it be with another node.
    moved: bool,
    /// The volumes that it was to have, by its record, and the one of them that it boots from.
    volumes: Vec<InstanceId>,
    pub(crate) root: Option<InstanceId>,
    /// So many users are about asking for its end.
    askers: u32,
    /// The generation of the newest wish for its volumes that a user was told of.
    pub(crate) volumes_acknowledged: u64,
    /// Who began with it.
    maker: Option<Actor>,
    /// A user has asked for its end.
    pub(crate) wished_away: bool,
    /// A user was told that it goes.
    pub(crate) doomed: bool,
    /// Its guest was started, and so may have written its disk.
    pub(crate) wrote: bool,
    /// It was told to be ACTIVE, and etcd knows of it.
    was_active: bool,
    /// What was told last.
    told: Option<Told>,
    /// The same, of the times before, the newest first: all that an agent knows that lost the answers to its last words.
    told_before: VecDeque<Told>,
    /// What was told last came late, in the place of newer words.
    pub(crate) told_late: bool,
    /// A call that its agent had given up made something of it after its removal: the next look sweeps that.
    revived: bool,
    /// That has happened at least once.
    pub(crate) was_revived: bool,
    /// A user has wished something of its power, which may arrive.
    pub(crate) power_wished: bool,
    /// So many wishes of it there were.
    wishes: u32,
    /// The generation of the newest wish for its power that a user was told of.
    pub(crate) power_acknowledged: u64,
    /// So many wishes for a new disk there were, which may have arrived.
    rebuilds_wished: u32,
    /// The newest of them that a user was told of.
    pub(crate) rebuild_acknowledged: Option<Timestamp>,
    /// As the how manyth transactions it was asked for first, and its end.
    request_count: u64,
    end_count: u64,
    /// As the how manyth transactions the newest of them was written, and the disk was made that is to take the old one's place.
    rebuild_count: u64,
    successor_count: u64,
    /// As the how manyth the newest of them was written that its agent had told to have taken up, and the one of which
    /// the disk was made then.
    pub(crate) rebuild_taken_up: u64,
    successor_of: u64,
    /// As the how manyth the disk was made that took the old one's place last.
    replaced_with: u64,
    /// Of which wish, as the how manyth transaction it was written.
    replaced_of: u64,
    /// So many wishes for a rescue disk there were, which may have arrived.
    pub(crate) rescues_wished: u32,
    /// The newest wish for another size that a user was told of.
    pub(crate) resize_acknowledged: Option<Timestamp>,
    /// The wish for a new disk of which its first one was made, by what its agent had told to have taken up.
    made_of: Option<Timestamp>,
    /// The URLs of all that its disks, and what was to take their place, were made of.
    disks_of: BTreeSet<String>,
    /// A guest may have written the disk that there is now.
    wrote_disk: bool,
    /// So many disks were replaced that a guest may have written.
    replaced: u32,
    /// Who wrote its record last, and at which revision and as the how manyth transaction that was.
    record_written: Option<(Actor, Revision)>,
    record_count: u64,
    /// As the how manyth transaction its claim was written last.
    claim_count: u64,
    /// When it was claimed.
    claimed: u64,
    /// At which generations of what it holds somebody asked that it hold something else.
    claims_asked: BTreeSet<Option<i64>>,
    /// Its claim was given back so old, and before it was requested: a command that slept too long requests it in
    /// vain.
    unclaimed: Option<u64>,
    /// The nemesis took its claim.
    pub(crate) claim_lost: bool,
    /// The agent of this node was told by placement that nothing is claimed for it there, the last time that it asked.
    told_unclaimed: Option<NodeId>,
    /// The nemesis took all that there was of its guest.
    pub(crate) vanished: bool,
    /// The nemesis took its status.
    status_lost: bool,
    /// The nemesis took its request: nobody asks for it any more.
    pub(crate) request_lost: bool,
    /// A call that its agent had given up made its disk once more, of the size that it had then.
    pub(crate) made_late: bool,
    /// Nobody was told whether a start of it came to be: its agent ended, or did not hear of it.
    pub(crate) start_unknown: bool,
    /// The last call that set its volumes was one that its agent had given up, which has yet to look what it has.
    set_late: bool,
    /// Its node's record was taken: what that knew is lost.
    pub(crate) record_lost: bool,
    /// Its node's record could not be read for a while: what was asked for meanwhile was not kept there.
    pub(crate) record_garbled: bool,
    /// So it came to its end, all that was wished of it being done, and nobody has wished anything since.
    ended: Option<End>,
    /// So many wishes there were that end a guest, and so often its node ended it.
    ends_wished: u32,
    ends: u32,
    /// Epoch and generation of the newest request by which its node told anything.
    pub(crate) taken_up: Option<(u64, u64)>,
    /// The newest wish for its power that was told to be carried out.
    power_told: u64,
    /// When it was last seen up, halted and down.
    seen: BTreeMap<Being, Duration>,
    /// Where its node ended it for its user, and by a request of which epoch.
    destroyed: BTreeMap<NodeId, u64>,
    /// The newest wish for a new disk that was told to be carried out.
    rebuilt_told: Option<Timestamp>,
    /// The newest wish for another size that was told to be carried out, and whether it was told last to be at that.
    size_told: Option<Timestamp>,
    resizing: bool,
    /// When it was told first that its guest is asked to end, which it is till another word.
    asked_to_end: Option<Duration>,
    /// So often in a row its policy had it started again, and when it was last.
    restarts: (u32, Duration),
    /// Somebody did something with it by hand.
    by_hand: bool,
    /// The nemesis did something to it, so that it may be in trouble.
    pub(crate) disturbed: bool,
}

impl Known {
    /// Whether somebody took its disk, its record and its status, by which alone its node could tell that it ever ran.
    pub(crate) fn is_unknown(&self) -> bool {
        self.disturbed && self.record_lost && self.status_lost
    }
}

impl Known {
    /// It is a machine, and a user was told where.
    pub(crate) fn is_placed_machine(&self) -> bool {
        self.acknowledged.is_some() && !self.is_volume
    }
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
    /// At which seconds nodes were not alive.
    missed: BTreeMap<NodeId, Vec<u64>>,
    /// As of which generations somebody wanted providers to be otherwise.
    changes_asked: BTreeMap<NodeId, BTreeSet<Option<i64>>>,
    /// What each has asked for.
    asked: BTreeMap<Actor, Wrote>,
    /// How often something was written by which room is found.
    room_changes: u64,
    /// What lets somebody in to look at a guest, and by which wish.
    words: BTreeMap<String, (InstanceId, u64)>,
    /// Groups that had a member.
    joined: BTreeSet<String>,
    /// Nodes that somebody has forgotten.
    forgotten: BTreeSet<NodeId>,
    /// What became of flavors, keypairs and groups, by their keys.
    lives: BTreeMap<String, Lives>,
    /// The tokens that somebody saw last, and whose they are.
    tokens: BTreeMap<Actor, Vec<(String, NodeId)>>,
    /// Images whose records somebody took away.
    images_lost: BTreeSet<ImageId>,
    /// Images that users were told of, and those that somebody is about to delete.
    images: BTreeSet<ImageId>,
    images_asked_away: BTreeSet<ImageId>,
    /// What somebody changed of images, one after the other.
    image_changes: BTreeMap<Actor, Vec<ImageChange>>,
    /// etcd was put back to an older state at least once.
    pub(crate) restored: bool,
    /// When it was last.
    restored_at: Option<std::time::Duration>,
    /// Somebody took claims of guests that are there, so that their room may be sold to others, too.
    pub(crate) claims_lost: bool,
    /// For whom something is claimed of its node, as an agent was told, and in which etcd.
    counted: BTreeMap<Actor, (u64, BTreeSet<InstanceId>)>,
    /// Starts of agents that were alive.
    came_up: BTreeSet<Actor>,
    /// Whose claim an agent has asked for.
    counting: BTreeSet<(Actor, InstanceId)>,
    pub(crate) transactions: u64,
    /// What was done since all was to be at rest, to whom and by whom.
    deeds: Option<Vec<(InstanceId, String)>>,
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

    pub(crate) fn forgotten(&mut self, node: NodeId) {
        self.forgotten.insert(node);
    }

    /// A start of it may come to be, or not, and its agent does not hear of that.
    pub(crate) fn start_unknown(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().start_unknown = true;
    }

    /// An agent of the node has ended, whatever it was about.
    pub(crate) fn agent_ended(&mut self, node: NodeId) {
        for known in self.known.values_mut().filter(|known| known.acknowledged.is_none_or(|at| at == node)) {
            known.start_unknown = true;
        }
    }

    /// Its user ended it, and it was forgotten with its node: what is left of it where its host comes back is kept until somebody asks
    /// for its end there.
    pub(crate) fn forgotten_there(&mut self, instance: InstanceId) {
        let known = self.known.entry(instance).or_default();
        (known.request_lost, known.doomed) = (true, false);
    }

    /// Whether somebody forgets this node, of whose host nothing is heard: nobody waits for what users have ended there.
    fn is_forgotten(&self, world: &World, node: NodeId) -> bool {
        self.forgotten.contains(&node) && content(world, &world.keys.agent(node)).is_none()
    }

    pub(crate) fn vanished(&mut self, instance: InstanceId) {
        let known = self.known.entry(instance).or_default();
        // Of a disk that is gone there is nothing to lose.
        (known.vanished, known.wrote_disk) = (true, false);
        self.forget(instance);
    }

    pub(crate) fn record_lost(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().record_lost = true;
    }

    pub(crate) fn record_garbled(&mut self, instance: InstanceId) {
        let known = self.known.entry(instance).or_default();
        (known.record_garbled, known.disturbed) = (true, true);
    }

    /// Its node's record, which nobody could read, is not what it was.
    pub(crate) fn record_touched(&mut self, instance: InstanceId) {
        let known = self.known(instance);
        // What another node has by now is not kept where it was; nor is that of which somebody took all else.
        let is_forgotten = known.request_lost || known.lost && known.disturbed;
        if !(known.wished_away || known.moved || is_forgotten) {
            self.found(format!("the record of {instance}, which nobody can read, was changed or deleted"));
        }
    }

    pub(crate) fn status_lost(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().status_lost = true;
        self.forget(instance);
    }

    pub(crate) fn request_lost(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().request_lost = true;
        self.forget(instance);
    }

    /// That it ran is known to nobody any more, where nothing of its guest is there, and no status that must say so.
    fn forget(&mut self, instance: InstanceId) {
        let restored = self.restored;
        let known = self.known.entry(instance).or_default();
        if known.vanished && (!known.was_active || known.status_lost || known.request_lost || restored) {
            (known.wrote, known.was_active) = (false, false);
        }
    }

    pub(crate) fn claim_lost(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().claim_lost = true;
        self.claims_lost = true;
    }

    pub(crate) fn wished_away(&mut self, instance: InstanceId) {
        let known = self.known.entry(instance).or_default();
        (known.wished_away, known.askers) = (true, known.askers + 1);
    }

    /// One who asked for its end was refused, and nothing was written.
    pub(crate) fn spared(&mut self, instance: InstanceId) {
        let known = self.known.entry(instance).or_default();
        known.askers -= 1;
        known.wished_away = known.askers > 0;
    }

    /// A user wishes something of it, which may arrive from now on. Another disk costs its guest a stop and a start.
    pub(crate) fn wished(&mut self, instance: InstanceId, verb: &Verb) {
        let known = self.known.entry(instance).or_default();
        (known.power_wished, known.ended) = (true, None);
        known.wishes += 1;
        known.rebuilds_wished += u32::from(matches!(verb, Verb::Rebuild(_) | Verb::Remake(..)));
        known.rescues_wished += u32::from(matches!(verb, Verb::Rescue(_)));
        known.extended |= matches!(verb, Verb::Resize(_));
    }

    /// A user was told that this wish for a new disk is written.
    pub(crate) fn rebuild_acknowledged(&mut self, instance: InstanceId, wished_at: Timestamp) {
        let known = self.known.entry(instance).or_default();
        known.rebuild_acknowledged = known.rebuild_acknowledged.max(Some(wished_at));
    }

    /// A user was told that this wish for another size is written.
    pub(crate) fn resize_acknowledged(&mut self, instance: InstanceId, wished_at: Timestamp) {
        let known = self.known.entry(instance).or_default();
        known.resize_acknowledged = known.resize_acknowledged.max(Some(wished_at));
    }

    /// A user was told that this wish for its power is written.
    pub(crate) fn power_acknowledged(&mut self, instance: InstanceId, generation: u64) {
        let known = self.known.entry(instance).or_default();
        known.power_acknowledged = known.power_acknowledged.max(generation);
    }

    /// A user wishes that it grows.
    pub(crate) fn extended(&mut self, volume: InstanceId) {
        self.known.entry(volume).or_default().extended = true;
    }

    /// A user wishes that it be with another node.
    pub(crate) fn moves(&mut self, volume: InstanceId) {
        self.known.entry(volume).or_default().moved = true;
    }

    /// A user was told that this wish for its volumes is written.
    pub(crate) fn volumes_acknowledged(&mut self, instance: InstanceId, generation: u64) {
        let known = self.known.entry(instance).or_default();
        known.volumes_acknowledged = known.volumes_acknowledged.max(generation);
    }

    /// Who began with it.
    pub(crate) fn maker(&self, instance: InstanceId) -> Option<Actor> {
        self.known.get(&instance)?.maker
    }

    /// Everything is as it is asked for, and nothing is done until [`Self::deeds`] is asked.
    pub(crate) fn rests(&mut self) {
        self.deeds = Some(Vec::new());
    }

    /// Whether all is to be at rest.
    pub(crate) fn is_resting(&self) -> bool {
        self.deeds.is_some()
    }

    /// What was done to instances since all was to be at rest.
    pub(crate) fn deeds(&mut self) -> Vec<(InstanceId, String)> {
        self.deeds.take().unwrap_or_default()
    }

    /// A user was told that it goes.
    pub(crate) fn doomed(&mut self, instance: InstanceId) {
        self.known.entry(instance).or_default().doomed = true;
    }

    /// A user was told that the instance is placed: it is in etcd, or has come to its end there.
    pub(crate) fn acknowledged(&mut self, world: &World, instance: InstanceId, node: NodeId) {
        let number = self.known.values().filter(|known| known.acknowledged.is_some()).count() + 1;
        let known = self.known.entry(instance).or_default();
        (known.acknowledged, known.number) = (Some(node), number);
        let there = content(world, &world.keys.request(node, instance)).is_some()
            || content(world, &world.keys.status(node, instance)).is_some();
        let excused = |known: &Known| known.wished_away || known.request_lost;
        if !there && !self.restored && !self.known.get(&instance).is_some_and(excused) {
            self.found(format!("{instance} was acknowledged, and etcd knows nothing of it"));
        }
    }

    pub(crate) fn seal(&mut self, key: String, value: Vec<u8>, guest: InstanceId) {
        self.sealed.insert(key, value);
        self.sealed_guests.insert(guest);
    }

    /// Instances whose requests nobody can read.
    pub(crate) fn sealed_requests(&self, world: &World) -> Vec<InstanceId> {
        self.sealed.keys().filter_map(|key| Some(world.keys.parse_request(key).ok()?.1)).collect()
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

    /// This claim is another's, and nobody's to give back.
    pub(crate) fn seal_claim(&mut self, world: &World, consumer: InstanceId) {
        let key = format!("{PLACEMENT}/consumers/{consumer}");
        if let Some(pair) = content(world, &key) {
            self.seal(key, pair.value, consumer);
        }
    }

    /// etcd is another from now on. What it tells of a guest before its first address is what its agent goes by.
    pub(crate) fn replaced(&mut self, world: &World) {
        (self.restored, self.restored_at) = (true, Some(world.elapsed()));
        for pair in world.store.content(&world.keys.all_statuses()).pairs {
            let Ok((_, instance)) = world.keys.parse_status(&pair.key) else { continue };
            let Ok(status) = decode::<Status>(&pair.value) else { continue };
            if is_before_active(status.state) {
                self.known.entry(instance).or_default().was_active = false;
            }
        }
        for (instance, known) in &mut self.known {
            known.lost |= content(world, &world.keys.instance(*instance)).is_none();
        }
        for instance in self.known.keys().copied().collect::<Vec<_>>() {
            self.forget(instance);
        }
    }

    /// A transaction was applied; `before`: what lay under the keys that it wrote; `late`: after its sender had given
    /// it up.
    pub(crate) fn applied(
        &mut self,
        world: &World,
        actor: Actor,
        txn: &Txn,
        before: &[Option<KeyValue>],
        late: bool,
    ) {
        self.transactions += 1;
        if let Some(deeds) = self.deeds.as_mut() {
            let of = |key: &str| self.known.keys().copied().find(|instance| speaks_of(key, *instance));
            let keys = txn.then.iter().map(Op::key);
            deeds.extend(keys.filter_map(|key| Some((of(key)?, format!("{actor} wrote {key}")))));
        }
        self.count_asked(world, actor, txn);
        self.look_at_demands(world, actor, txn, before, late);
        self.look_at_wish(world, actor, txn, before);
        for (op, old) in txn.then.iter().zip(before) {
            let (key, new) = match op {
                Op::Put { key, value, .. } => (key.as_str(), Some(value.as_slice())),
                Op::Delete(key) if old.is_some() => (key.as_str(), None),
                Op::Delete(_) => continue,
            };
            if self.sealed.contains_key(key) {
                self.found(format!("{actor} wrote {key}, which it cannot read"));
            } else if let Some(instance) = self.sealed_guests.iter().find(|guest| speaks_of(key, **guest)) {
                let found =
                    format!("{actor} wrote {key}, and what is asked or told of {instance} nobody can read");
                self.found(found);
            }
            if let Some(line) = told(world, key, new) {
                world.log(actor, line);
            }
            self.look_at_writer(world, actor, key, old.as_ref(), new);
            self.look_at_request(world, actor, txn, key, old.as_ref(), new);
            self.look_at_status(world, key, new, late);
            self.look_at_index(world, actor, key, old.as_ref(), new);
            self.look_at_group(world, actor, key, new);
            self.look_at_image(world, (actor, late), key, old.as_ref(), new);
            self.look_at_life(world, key, new);
            self.look_at_volumes(world, actor, key, old.as_ref(), new);
            self.look_at_healing(world, actor, (txn, before), key, old.as_ref(), new);
            self.look_at_fence(world, actor, txn, key, old.as_ref());
            if new.is_some() {
                self.look_at_reserve(world, actor, key);
            }
        }
        self.look_at_room(world, txn);
        if txn.then.iter().any(|op| op.key().starts_with(PLACEMENT)) {
            self.look_at_placement(world, txn, before);
        }
        self.look_at_sealed(world);
    }

    /// The hypervisor of a node did something.
    pub(crate) fn touched(
        &mut self,
        world: &World,
        node: NodeId,
        what: Operation,
        instance: InstanceId,
        before: Observed,
        late: bool,
    ) {
        if let Some(deeds) = self.deeds.as_mut() {
            deeds.push((instance, format!("{node} did {what:?} of {instance}")));
        }
        if self.sealed_guests.contains(&instance) {
            self.found(format!("{what:?} of {instance}, whose request nobody can read"));
        }
        self.known.entry(instance).or_default().seen.insert(Being::of(&before), world.elapsed());
        self.see(world, instance);
        let known = self.known.entry(instance).or_default();
        known.revived = late && what != Operation::Destroy;
        known.was_revived |= known.revived;
        known.made_late |= late && what == Operation::CreateOverlay;
        if what == Operation::SetVolumes {
            known.set_late = late;
        }
        // A call that its agent had given up comes after what was wished since, and is told as what it made.
        let is_power = !matches!(
            what,
            Operation::CreateOverlay
                | Operation::CreateSuccessor
                | Operation::DropSuccessor
                | Operation::CreateRescue
                | Operation::DropRescue
                | Operation::Define
                | Operation::Persist
                | Operation::GrowDisk
                | Operation::CreateVolume
                | Operation::SetVolumes
                | Operation::HandOver
                | Operation::Grow
                | Operation::Redefine
                | Operation::Destroy
        );
        // What lies beside its disk then may be taken for what was to take its place, which took it already.
        known.disturbed |= late && (is_power || what == Operation::CreateSuccessor);
        let is_up = matches!(before.domain, Some(RunState::Running | RunState::Paused(_)));
        if what == Operation::PowerOff && is_up && !late {
            self.look_at_end(instance);
            self.look_at_grace(world, node, instance);
        }
        if !late {
            self.look_at_destroyed(world, node, what, instance);
        }
        if matches!(what, Operation::Start | Operation::StartRescue) && !late {
            self.look_at_restart(world, node, instance, before);
            self.look_at_told(world, node, instance);
        }
        let known = self.known.entry(instance).or_default();
        match what {
            Operation::Start | Operation::StartRescue => {
                if known.was_active && !late && !known.power_wished && !known.disturbed && !self.restored {
                    let found = format!("{instance} was started again after it had been ACTIVE");
                    self.findings.push(found);
                }
                (known.wrote, known.wrote_disk) = (true, true);
                if what == Operation::StartRescue && known.rescues_wished == 0 {
                    self.findings
                        .push(format!("{instance} was started from a rescue disk, and no user wished it"));
                }
                let is_claim_lost = known.claim_lost;
                let claim = content(world, &format!("{PLACEMENT}/consumers/{instance}"));
                if claim.is_none() && !self.restored && !known.claim_lost {
                    self.found(format!("{instance} was started without a claim"));
                }
                let computer = world.computers.iter().find(|computer| computer.node == node);
                let size = computer.and_then(|computer| size(computer, instance));
                let (has, claimed) = (size.map_or(0, |size| size.vcpus), claimed(world, instance, "VCPU"));
                if has > claimed && !self.restored && !is_claim_lost {
                    self.found(format!(
                        "{instance} was started with {has} processors, and has claimed {claimed}"
                    ));
                }
            }
            Operation::ShutDown
            | Operation::PowerOff
            | Operation::Pause
            | Operation::Save
            | Operation::DropMemory
                if !known.power_wished =>
            {
                self.found(format!("{what:?} of {instance}, and no user wished anything of its power"));
            }
            Operation::CreateSuccessor => {
                known.successor_count = self.transactions;
                known.successor_of = known.rebuild_taken_up;
            }
            Operation::ReplaceOverlay => {
                let is_sure = !(self.restored || known.disturbed || known.record_lost);
                if known.rebuild_count > 0 && known.replaced_of >= known.rebuild_count && is_sure {
                    self.findings.push(format!("the disk of {instance} was replaced twice for one wish"));
                }
                (known.replaced_with, known.replaced_of) = (known.successor_count, known.successor_of);
                known.replaced += u32::from(std::mem::take(&mut known.wrote_disk));
                if known.replaced > known.rebuilds_wished {
                    self.found(format!(
                        "the disk of {instance} was replaced more often than any user wished"
                    ));
                }
            }
            Operation::Destroy
                if matches!(
                    before.domain,
                    Some(RunState::Running | RunState::Paused(_) | RunState::Saved)
                ) && !(late || known.wished_away || self.restored) =>
            {
                self.found(format!("{instance} was destroyed while its guest was up, and no user wished it"));
            }
            Operation::Destroy if known.wrote && before.volume && !known.wished_away => {
                self.found(format!(
                    "the disk of {instance}, which its guest wrote, was deleted and no user wished it"
                ));
            }
            // One that is late fails as long as it hangs, and finds what is there since: libvirt makes none in its place.
            Operation::CreateVolume
                if known.wrote
                    && !known.wished_away
                    && !known.is_unknown()
                    && !(late && (known.disturbed || known.rebuilds_wished > 0)) =>
            {
                self.found(format!("the disk of {instance}, which a guest may have written, was made anew"));
            }
            Operation::CreateOverlay
                if known.wrote && !(known.wished_away || known.is_unknown() || late && known.disturbed) =>
            {
                self.found(format!("the disk of {instance}, which its guest wrote, was made anew"));
            }
            _ => {}
        }
        self.look_at_made(world, node, what, instance, late);
        if before.volume {
            self.look_at_copies(world, node, what, instance, late);
        }
        self.look_at_domains(world, node, what, instance, late);
        let hosts = world.computers.iter().filter(|computer| {
            observed(computer, instance).is_some_and(|observed| observed.domain.is_some())
        });
        if hosts.count() > 1 {
            self.found(format!("{instance} is on more than one host"));
        }
        if self.restored || self.claims_lost {
            return;
        }
        if let Some(computer) = world.computers.iter().find(|computer| computer.node == node)
            && computer.hypervisor.processors() > PROCESSORS
        {
            self.found(format!("more guests run on {node} than it has room for"));
        }
    }
}

/// Whether the last part of a key is this instance.
fn speaks_of(key: &str, instance: InstanceId) -> bool {
    key.rsplit('/').next().and_then(|last| last.parse().ok()) == Some(instance)
}

/// Whether an agent that reads this may think that nobody ever saw its guest work.
fn is_before_active(state: State) -> bool {
    matches!(state, State::Scheduled | State::Preparing | State::Starting | State::Error)
}

/// So much of a class an instance has claimed, of all providers.
pub(crate) fn claimed(world: &World, instance: InstanceId, class: &str) -> u64 {
    let pair = content(world, &format!("{PLACEMENT}/consumers/{instance}"));
    let consumer =
        pair.and_then(|pair| serde_json::from_slice::<Value>(&pair.value).ok()).unwrap_or_default();
    let allocations = consumer["allocations"].as_object().into_iter().flat_map(|all| all.values());
    allocations.filter_map(|amounts| amounts[class].as_u64()).sum()
}

/// How large a computer's hypervisor has an instance.
pub(crate) fn size(computer: &crate::node::Computer, instance: InstanceId) -> Option<DomainSize> {
    use ec_hypervisor::Hypervisor;
    use futures::FutureExt;
    computer.hypervisor.size(instance).now_or_never()?.ok()?
}

/// How large a computer's hypervisor has the disk of an instance.
pub(crate) fn disk_bytes(computer: &crate::node::Computer, instance: InstanceId) -> Option<u64> {
    use ec_hypervisor::Hypervisor;
    use futures::FutureExt;
    computer.hypervisor.disk_bytes(instance).now_or_never()?.ok()?
}

/// What a computer's hypervisor has of an instance; its answer is there at once.
pub(crate) fn observed(computer: &crate::node::Computer, instance: InstanceId) -> Option<Observed> {
    use ec_hypervisor::Hypervisor;
    use futures::FutureExt;
    let observed = computer.hypervisor.observe(instance).now_or_never()?.ok()?;
    (!observed.is_nothing()).then_some(observed)
}

//! Rules for wishes: what may be wished of an instance as it stands, by its keys at that moment, and what a wish must not
//! change beside what it names.
//!
//! They are less than the table of verbs (`docs/lifecycle.md`): what would cost a user something.

use ec_model::{
    Assigned, Desired, Instance, InstanceId, NodeId, Power, Request, Resources, Spec, State, Status,
    Workload, decode, greater,
};
use ec_plan::sizes::missed;
use ec_store::{KeyValue, Op, Txn};
use jiff::Timestamp;

use super::{Referee, claimed, disk_bytes, size, volumes::holder};
use crate::{
    door::content,
    world::{Actor, World},
};

const DISK: &str = "DISK_GB";

/// What somebody wishes of one that is asked for: before and after.
struct Wish {
    node: NodeId,
    order: [Request; 2],
    record: [Instance; 2],
    status: Option<Status>,
    /// By the same transaction another is asked for again.
    brings_back: bool,
}

fn amount(of: &Resources, class: &str) -> u64 {
    of.get(class).copied().unwrap_or(0)
}

/// How much is asked for, or was before a resize that is neither confirmed nor reverted. A volume that could not grow has what it has.
pub(crate) fn asked_of(world: &World, record: &Instance) -> Resources {
    let keys = &world.keys;
    let read = |key: String| content(world, &key).map(|pair| pair.value);
    let (node, volume) = (record.node(), record.instance);
    let request = node.and_then(|node| decode::<Request>(&read(keys.request(node, volume))?).ok());
    let status = node.and_then(|node| decode::<Status>(&read(keys.status(node, volume))?).ok());
    let missed = request.as_ref().and_then(|request| missed(request, status.as_ref()));
    if let Some(was) = missed.filter(|was| record.kind == Workload::Volume && !was.resources.is_empty()) {
        return was.resources.clone();
    }
    let before = record.before.as_ref().map(|before| before.resources.clone()).unwrap_or_default();
    greater(&record.spec.resources, &before)
}

/// This, where that counts with the image of another.
fn with_image_of(counts: bool, other: &Spec, spec: &Spec) -> Spec {
    let image = if counts { &other.image } else { &spec.image };
    Spec { image: image.clone(), ..spec.clone() }
}

impl Wish {
    /// What is said of it, where it was locked before.
    fn breaks_lock(&self) -> Option<&'static str> {
        let [was, is] = &self.record;
        let why = was.locked.as_ref()?;
        // Whoever restores it has it locked till its disk is the one of the snapshot, too.
        let restores = why.starts_with("snapshot ") && self.order[0].rebuild != self.order[1].rebuild;
        let kept = Instance {
            locked: was.locked.clone(),
            generation: was.generation,
            request_id: was.request_id,
            // Whoever brings a machine back says that it has the volume that it has.
            attached: if self.brings_back || is.attached.is_none() { was.attached } else { is.attached },
            spec: with_image_of(restores, &was.spec, &is.spec),
            made_of: if restores { was.made_of.clone() } else { is.made_of.clone() },
            ..is.clone()
        };
        let [before, after] = &self.order;
        let order = |order: &Request| {
            let Request { power, restart, rebuild, rescue, resize, name, spec, volumes, .. } = order.clone();
            let rebuild = (!restores).then_some(rebuild);
            let spec = spec.map(|spec| with_image_of(restores, before.spec.as_ref().unwrap_or(&spec), &spec));
            (power, restart, rebuild, rescue, resize, name, spec, volumes)
        };
        (kept != *was || order(before) != order(after)).then_some("which is locked")
    }

    /// What is said of it, of a volume whose machine is locked.
    fn breaks_lock_of_holder(&self, holder: Option<&Instance>) -> Option<&'static str> {
        let [was, is] = &self.order;
        let why = holder?.locked.as_ref()?;
        let (disk, size) = (was.rebuild != is.rebuild, was.resize != is.resize);
        let restores = why.starts_with("snapshot ") && !size;
        ((disk || size) && !restores).then_some("whose machine is locked")
    }

    /// What is said of a wish for a disk, a size or volumes, where another is under way, or none can be.
    fn meets_another(&self) -> Option<&'static str> {
        let [was, is] = &self.order;
        let disk = was.rebuild != is.rebuild;
        let rescue = was.rescue != is.rescue && is.rescue.is_some();
        let size = was.resize != is.resize;
        let volumes = was.volumes != is.volumes;
        if !(disk || rescue || size || volumes) || self.record[0].kind == Workload::Volume {
            return None;
        }
        // One that was stopped before its first start was built by then, and is started from a rescue disk as well.
        let is_built = |status: &&Status| {
            status.started_at.is_some()
                || status.power_generation != 0
                || was.rescue.is_some()
                || !matches!(status.state, State::Scheduled | State::Preparing | State::Starting)
        };
        let Some(status) = self.status.as_ref().filter(is_built) else {
            // It is defined with its volumes.
            return (!volumes).then_some("which is being built");
        };
        let [rebuilt, resized] = [
            status.rebuilt.as_ref().map(|was| was.wished_at),
            status.resized.as_ref().map(|was| was.wished_at),
        ];
        let gets_disk = rebuilt < was.rebuild.as_ref().map(|wish| wish.wished_at);
        let gets_size = resized < was.resize.map(|wish| wish.wished_at);
        let given_up = |wished_at| {
            let told = status.rescued.as_ref();
            told.is_some_and(|told| told.wished_at == wished_at && told.failed.is_some())
        };
        let is_rescued =
            status.is_rescued() || was.rescue.as_ref().is_some_and(|wish| !given_up(wish.wished_at));
        let never_ran = status.state == State::Error && status.started_at.is_none();
        let failed = status.resized.as_ref().is_some_and(|was| was.failed.is_some());
        let is_unsettled = self.record[0].before.is_some() && !failed;
        let goes_on = size && self.record[1].before.is_some();
        let is_suspended = status.state == State::Suspended
            && was.power.power == Power::Suspended
            && status.power_generation >= was.power.generation;
        // Whatever its size, one in ERROR is given another disk; and a newer wish for one takes the place of that.
        let again = disk && gets_disk || rescue && was.rescue.is_some();
        let is_wrong = status.state == State::Error || again;
        [
            (gets_disk && !disk && !never_ran, "which gets a new disk"),
            (gets_size && !is_wrong, "which gets another size"),
            // What never ran and failed boots from nothing, and goes.
            (is_rescued && !rescue && !never_ran, "which boots from a rescue disk"),
            (
                is_unsettled && !is_wrong && !volumes && (!size || goes_on),
                "whose size is neither confirmed nor reverted",
            ),
            // Of a size that it never got only the claim goes.
            (is_suspended && !(size && failed), "whose memory is saved"),
        ]
        .into_iter()
        .find_map(|(is_so, what)| is_so.then_some(what))
    }

    /// What is said of the end of a resize, and of what is kept till then.
    fn loses_size(&self) -> Option<&'static str> {
        let [was, is] = &self.record;
        let [old, new] = [&was.spec.resources, &is.spec.resources];
        let is_wished = self.order[0].resize != self.order[1].resize;
        if was.kind == Workload::Volume {
            // One that could not grow may be wished to stay as it is.
            let missed = missed(&self.order[0], self.status.as_ref()).filter(|was| !was.resources.is_empty());
            let has = missed.map_or(old, |was| &was.resources);
            return (amount(new, DISK) < amount(has, DISK)).then_some("which is a volume, and never shrinks");
        }
        let told = self.status.as_ref().and_then(|status| status.resized.as_ref());
        // What was asked for may be what it never got.
        let has = match &was.before {
            Some(before) => told
                .map_or(amount(old, DISK), |told| amount(&told.resources, DISK))
                .max(amount(&before.resources, DISK)),
            None => amount(old, DISK),
        };
        match (&was.before, &is.before) {
            (Some(before), Some(kept)) if before != kept => Some("and forgot what it was before"),
            (None, Some(kept)) if *old != kept.resources => Some("and noted what it never was before"),
            // It was reverted.
            (Some(before), None) if is_wished => {
                let is_back = ["VCPU", "MEMORY_MB"]
                    .iter()
                    .all(|class| amount(new, class) == amount(&before.resources, class));
                let disk = told.map_or(0, |told| amount(&told.resources, DISK));
                let shrinks = amount(new, DISK) < amount(&before.resources, DISK).max(disk);
                (!is_back || shrinks).then_some("back to what it was not before")
            }
            (Some(_), None) => {
                let is_there = told.is_some_and(|told| {
                    told.failed.is_none()
                        && Some(told.wished_at) >= self.order[0].resize.map(|wish| wish.wished_at)
                });
                (!is_there || old != new).then_some("and confirmed what it is not")
            }
            _ if is_wished && amount(new, DISK) < has => Some("whose disk never shrinks"),
            _ if !is_wished && old != new => Some("and wished it no other size"),
            _ => None,
        }
    }

    /// What is said of a wish that its node never hears of, since it is placed elsewhere by now.
    fn is_late(&self) -> Option<&'static str> {
        let ([was, is], [record, _]) = (&self.order, &self.record);
        let placed = Some(Assigned { node: self.node, epoch: was.epoch });
        let is_wish = was.generation != is.generation && was.handover == is.handover;
        (is_wish && record.assigned != placed).then_some("which is placed elsewhere by now")
    }

    /// What is said of a wish that is told by when it was made, where that is not later than the one before it.
    fn repeats(&self) -> Option<&'static str> {
        let [was, is] = &self.order;
        let told = self.status.as_ref();
        let times = [
            [was, is].map(|order| order.rebuild.as_ref().map(|wish| wish.wished_at)),
            [was, is].map(|order| order.rescue.as_ref().map(|wish| wish.wished_at)),
            [was, is].map(|order| order.resize.map(|wish| wish.wished_at)),
        ];
        let last = [
            told.and_then(|status| status.rebuilt.as_ref()).map(|was| was.wished_at),
            told.and_then(|status| status.rescued.as_ref()).map(|was| was.wished_at),
            told.and_then(|status| status.resized.as_ref()).map(|was| was.wished_at),
        ];
        let is_older = |([was, is], last): ([Option<Timestamp>; 2], Option<Timestamp>)| {
            was != is && is.is_some() && (is <= was || is <= last)
        };
        times.into_iter().zip(last).any(is_older).then_some("as of no later time than what was wished before")
    }

    /// What is said of a wish that a volume cannot be wished.
    fn is_of_machines(&self) -> Option<&'static str> {
        let [was, is] = &self.order;
        if self.record[0].kind != Workload::Volume {
            return None;
        }
        if self.record[0].spec.is_snapshot() && (was.rebuild != is.rebuild || was.resize != is.resize) {
            return Some("which is a snapshot, and never changes");
        }
        (was.power != is.power || was.rescue != is.rescue).then_some("which is a volume")
    }
}

impl Referee {
    /// A user's wish is one that can be wished as all stands, and changes nothing beside.
    pub(super) fn look_at_wish(
        &mut self,
        world: &World,
        actor: Actor,
        txn: &Txn,
        before: &[Option<KeyValue>],
    ) {
        if !matches!(actor, Actor::User(_)) {
            return;
        }
        let is_asked =
            |(op, old): (&Op, &Option<KeyValue>)| old.is_none() && world.keys.parse_request(op.key()).is_ok();
        let brings_back = txn.then.iter().zip(before).any(is_asked);
        for (op, old) in txn.then.iter().zip(before) {
            let Ok((node, instance)) = world.keys.parse_request(op.key()) else { continue };
            let (Op::Put { value, .. }, Some(old)) = (op, old) else { continue };
            let (Ok(was), Ok(is)) = (decode::<Request>(&old.value), decode::<Request>(value)) else {
                continue;
            };
            let key = world.keys.instance(instance);
            let written = txn.then.iter().zip(before).find(|(op, _)| *op.key() == *key);
            let [record, after] = match written {
                Some((Op::Put { value, .. }, old)) => {
                    [old.as_ref().map(|old| old.value.clone()), Some(value.clone())]
                }
                Some((Op::Delete(_), old)) => [old.as_ref().map(|old| old.value.clone()), None],
                None => {
                    let there = content(world, &key).map(|pair| pair.value);
                    [there.clone(), there]
                }
            };
            let read = |value: Option<Vec<u8>>| value.and_then(|value| decode::<Instance>(&value).ok());
            let Some(record) = read(record) else { continue };
            if is.desired == Desired::Destroyed {
                if was.desired == Desired::Active && record.locked.is_some() {
                    self.found(format!("{actor} asked for the end of {instance}, which is locked"));
                }
                continue;
            }
            let Some(after) = read(after) else { continue };
            let known = self.known(instance);
            // Who asks went by newer words than there are now.
            if known.told_late {
                continue;
            }
            // Of which nobody can tell any more how it stands, or which came back.
            let told = !(known.status_lost || self.restored);
            let status = content(world, &world.keys.status(node, instance));
            let status = status.and_then(|pair| decode::<Status>(&pair.value).ok());
            let wish = Wish { node, order: [was, is], record: [record, after], status, brings_back };
            let of_how_it_stands =
                || wish.meets_another().or_else(|| wish.loses_size()).or_else(|| wish.repeats());
            let holder = holder(world, instance);
            let wrong = wish.breaks_lock().or_else(|| wish.breaks_lock_of_holder(holder.as_ref()));
            let wrong = wrong.or_else(|| wish.is_of_machines()).or_else(|| wish.is_late());
            if let Some(what) = wrong.or_else(|| of_how_it_stands().filter(|_| told)) {
                self.found(format!("{actor} wished something of {instance}, {what}"));
            }
        }
    }

    /// What is given back of a claim is needed by nobody: neither by what it is, nor by what it was and may be again.
    pub(super) fn look_at_surplus(&mut self, world: &World, instance: InstanceId, old: &Resources) {
        let record = content(world, &world.keys.instance(instance));
        let record = record.and_then(|pair| decode::<Instance>(&pair.value).ok());
        let Some(record) = record.filter(|_| !(self.restored || self.claims_lost)) else { return };
        let mut needed = asked_of(world, &record);
        for computer in &world.computers {
            let vcpus = size(computer, instance).map_or(0, |size| size.vcpus);
            let gb = disk_bytes(computer, instance).unwrap_or(0).div_ceil(1 << 30);
            let of_disk = if record.kind == Workload::Volume { gb } else { 0 };
            let is = [("VCPU".to_owned(), vcpus), (DISK.to_owned(), of_disk)].into();
            needed = greater(&needed, &is);
        }
        for (class, needed) in needed {
            let (had, has) = (amount(old, &class), claimed(world, instance, &class));
            if has < had && has < needed {
                self.found(format!(
                    "{class} of {instance} was given back, of which it needs {needed}: {has}"
                ));
            }
        }
    }
}

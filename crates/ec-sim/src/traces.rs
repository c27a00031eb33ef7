//! What there is of an instance, wherever it lies.

use std::collections::{BTreeMap, BTreeSet};

use ec_hypervisor::{DomainSize, Observed, RunState};
use ec_model::{
    Attachment, CopyOf, Desired, InstanceId, NodeId, Power, Request, Size, State, Status, Workload, decode,
};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    door::content,
    node::{Computer, PROCESSORS},
    referee::{disk_bytes, observed, size},
    world::{PLACEMENT, World},
};

/// Everything that there is of an instance, wherever it lies.
pub(crate) struct Traces {
    pub(crate) request: Option<Request>,
    pub(crate) status: Option<Status>,
    pub(crate) claim: bool,
    pub(crate) index: bool,
    pub(crate) domain: bool,
    pub(crate) volume: bool,
    pub(crate) record: bool,
    /// Its record says that a start was begun.
    pub(crate) marked: bool,
    /// As its hypervisor has it.
    pub(crate) guest: Observed,
    /// It is a volume, by what is asked for or told.
    pub(crate) is_volume: bool,
    /// How large its disk is, where it is a volume's.
    pub(crate) disk_bytes: u64,
    /// There is a disk to boot from in the place of its own.
    pub(crate) rescue_disk: bool,
    /// There is a disk that is to take the place of its own.
    pub(crate) successor: bool,
    /// What its disk was made of, as its hypervisor has it.
    pub(crate) origin: Option<String>,
    /// How large that has it.
    pub(crate) size: Option<DomainSize>,
    /// Where there is anything of its guest.
    pub(crate) host: Option<NodeId>,
}

/// The agents' own records, by node: whether a start was begun.
pub(crate) type Records = BTreeMap<NodeId, BTreeMap<String, bool>>;

pub(crate) fn records(world: &World) -> Records {
    let of = |computer: &Computer| (computer.node, computer.records().unwrap_or_default());
    world.computers.iter().map(|computer| of(computer)).collect()
}

impl Traces {
    pub(crate) fn of(world: &World, records: &Records, instance: InstanceId) -> Self {
        let keys = &world.keys;
        let get = |key: String| content(world, &key);
        let nodes = || world.computers.iter().map(|computer| computer.node);
        let request = nodes().find_map(|node| get(keys.request(node, instance)));
        let status = nodes().find_map(|node| get(keys.status(node, instance)));
        let seen: Vec<_> =
            world.computers.iter().filter_map(|computer| observed(computer, instance)).collect();
        let name = instance.to_string();
        let recorded = |computer: &Computer| {
            records.get(&computer.node).is_some_and(|records| records.contains_key(&name))
        };
        let here = |computer: &Computer| {
            recorded(computer) || observed(computer, instance).is_some_and(|seen| seen.domain.is_some())
        };
        let request: Option<Request> = request.and_then(|pair| decode(&pair.value).ok());
        let status: Option<Status> = status.and_then(|pair| decode(&pair.value).ok());
        // Of one that boots from a volume, its disk is that.
        let disk = request.as_ref().and_then(|request| Attachment::root_of(&request.volumes));
        let has_disk = |computer: &Computer| {
            observed(computer, disk.unwrap_or(instance)).is_some_and(|seen| seen.volume)
        };
        let kind = request.as_ref().map(|request| request.kind).or(status.as_ref().map(|status| status.kind));
        let measured = world.computers.iter().find_map(|computer| disk_bytes(computer, instance));
        Self {
            request,
            status,
            is_volume: kind == Some(Workload::Volume),
            disk_bytes: measured.unwrap_or_default(),
            claim: get(format!("{PLACEMENT}/consumers/{instance}")).is_some(),
            index: get(keys.instance(instance)).is_some(),
            domain: seen.iter().any(|seen| seen.domain.is_some()),
            volume: world.computers.iter().any(|computer| has_disk(computer)),
            record: world.computers.iter().any(|computer| recorded(computer)),
            marked: records.values().any(|records| records.get(&name) == Some(&true)),
            rescue_disk: world.computers.iter().any(|computer| computer.hypervisor.has_rescue_disk(instance)),
            successor: world.computers.iter().any(|computer| computer.hypervisor.has_successor(instance)),
            guest: seen.into_iter().find(|seen| seen.domain.is_some()).unwrap_or_default(),
            origin: world.computers.iter().find_map(|computer| computer.hypervisor.origin(instance)),
            size: world.computers.iter().find_map(|computer| size(computer, instance)),
            host: world.computers.iter().find(|computer| here(computer)).map(|computer| computer.node),
        }
    }

    pub(crate) fn is_anything(&self) -> bool {
        self.request.is_some()
            || self.status.is_some()
            || self.claim
            || self.index
            || self.domain
            || self.volume
            || self.record
            || self.rescue_disk
            || self.successor
    }

    /// Whether what is told is how it is.
    pub(crate) fn is_true(&self) -> bool {
        if self.is_volume {
            let is_told = self.status.as_ref().is_some_and(|status| status.state == State::Active);
            return !is_told || self.volume;
        }
        let runs = matches!(self.guest.domain, Some(RunState::Running));
        let is_paused = matches!(self.guest.domain, Some(RunState::Paused(_)));
        match self.status.as_ref().map(|status| status.state) {
            Some(State::Active) => runs && !self.guest.transient && !self.guest.rescued,
            Some(State::Rescued) => runs && !self.guest.transient && self.guest.rescued,
            Some(State::Paused) => is_paused,
            Some(State::Stopped | State::Suspended) => !runs && !is_paused,
            Some(
                State::Stopping
                | State::Rebooting
                | State::Suspending
                | State::Rebuilding
                | State::Rescuing
                | State::Unrescuing
                | State::Resizing,
            ) => false,
            _ => true,
        }
    }

    /// Whether the last wish for its power was not lost, and was carried out, where nobody `disturbed` it.
    pub(crate) fn is_as_wished(&self, acknowledged: u64, disturbed: bool) -> bool {
        let (Some(request), Some(status)) = (&self.request, &self.status) else { return true };
        if request.desired != Desired::Active || status.state == State::Error || self.is_volume {
            return true;
        }
        // One that was suspended and not resumed yet when it was to be stopped or paused does not run as it is.
        // And one that did not run any more when it was to be halted is stopped.
        let halted = match request.power.power {
            Power::Running => false,
            Power::Stopped => status.state == State::Suspended,
            Power::Paused | Power::Suspended => matches!(status.state, State::Suspended | State::Stopped),
        };
        let state = match request.power.power {
            Power::Running => State::Active,
            Power::Paused => State::Paused,
            Power::Suspended => State::Suspended,
            Power::Stopped => State::Stopped,
        };
        request.power.generation >= acknowledged
            && status.power_generation >= request.power.generation
            // It runs from its rescue disk, until that ends by itself.
            && (disturbed || status.state == state || halted || status.is_rescued())
    }

    /// Whether the last wish for a new disk was not lost, and its end was told.
    pub(crate) fn is_rebuilt(&self, acknowledged: Option<Timestamp>) -> bool {
        let (Some(request), Some(status)) = (&self.request, &self.status) else { return true };
        let wished = request.rebuild.as_ref().map(|wish| wish.wished_at);
        let told = status.rebuilt.as_ref().map(|rebuilt| rebuilt.wished_at);
        request.desired != Desired::Active
            || status.state == State::Error
            || wished >= acknowledged && told >= wished
    }

    /// Whether it boots from the disk that it shall boot from, and there is no other to boot from; but for one that a `late`
    /// call made, which goes with the next wish.
    pub(crate) fn is_rescued_as_wished(&self, late: bool) -> bool {
        let (Some(request), Some(status)) = (&self.request, &self.status) else { return true };
        let told = status.rescued.as_ref().map(|rescued| rescued.wished_at);
        let is_told = match &request.rescue {
            Some(wish) => told == Some(wish.wished_at),
            None => !status.is_rescued(),
        };
        request.desired != Desired::Active
            || status.state == State::Error
            || is_told && (status.is_rescued() == self.rescue_disk || late)
    }

    /// Whether what is told is told by the newest request, or a later one.
    pub(crate) fn is_taken_up(&self) -> bool {
        let (Some(request), Some(status)) = (&self.request, &self.status) else { return true };
        request.desired != Desired::Active || status.observed_generation >= request.generation
    }

    /// Whether whoever wished to look at it last was answered: whatever is wrong with it, its agent tells.
    pub(crate) fn is_answered(&self) -> bool {
        let (Some(request), Some(status)) = (&self.request, &self.status) else { return true };
        let told = status.access.as_ref().map(|access| access.generation);
        request.desired != Desired::Active
            || status.state == State::Error && status.started_at.is_none()
            || request.access.is_none_or(|wish| Some(wish.generation) == told)
    }

    /// Why a wish for a disk or a size was given up, where one was; but for what cannot be while memory is saved, or as a copy
    /// of what is larger or gone.
    pub(crate) fn given_up(&self) -> Option<&str> {
        let status = self.status.as_ref().filter(|status| status.state != State::Error)?;
        let rebuilt = status.rebuilt.as_ref().and_then(|was| was.failed.as_deref());
        let resized = status.resized.as_ref().and_then(|was| was.failed.as_deref());
        let rescued = status.rescued.as_ref().and_then(|was| was.failed.as_deref());
        // Since that was asked for, what it is to be a copy of may have grown, or gone, and a guest be up with it.
        let can_be = [" are less than the ", "nothing to copy", "a guest is up with it"];
        let rebuilt = rebuilt.filter(|why| !can_be.iter().any(|it| why.contains(it)));
        rebuilt.or(resized).or(rescued.filter(|why| !why.contains("its memory lies on the node's disk")))
    }

    /// Whether the last wish for another size was not lost, and its end was told.
    pub(crate) fn is_resized(&self, acknowledged: Option<Timestamp>) -> bool {
        let (Some(request), Some(status)) = (&self.request, &self.status) else { return true };
        let wished = request.resize.map(|wish| wish.wished_at);
        let told = status.resized.as_ref().map(|resized| resized.wished_at);
        request.desired != Desired::Active
            || status.state == State::Error
            || wished >= acknowledged && told >= wished
    }

    /// What is wrong with how large it is, by what it is asked for.
    pub(crate) fn is_of_another_size(&self) -> Option<String> {
        let (request, status) = (self.request.as_ref()?, self.status.as_ref()?);
        if self.is_volume {
            let wanted = Size::of(&request.spec.as_ref()?.resources).disk_gb;
            let failed = status.resized.as_ref().is_some_and(|resized| resized.failed.is_some());
            // Of several disks the first alone is measured.
            let is_one = request.spec.as_ref().is_some_and(|spec| !spec.image.is_of_several());
            let is_less = self.volume && is_one && self.disk_bytes < wanted << 30;
            return (status.state == State::Active && !failed && is_less)
                .then(|| format!("it is to be {wanted} GB, and is {} bytes", self.disk_bytes));
        }
        let size = self.size?;
        let wanted = Size::of(&request.spec.as_ref()?.resources);
        let failed = status.resized.as_ref().is_some_and(|resized| resized.failed.is_some());
        let was_measured = request.resize.is_some();
        let rests = matches!(status.state, State::Active | State::Stopped) && !status.is_rescued();
        let is_so = (size.vcpus, size.memory_mb) == (wanted.vcpus, wanted.memory_mb)
            && size.disk_bytes >= wanted.disk_gb << 30;
        (request.desired == Desired::Active && was_measured && rests && !failed && !is_so)
            .then(|| format!("it is to be {wanted:?}, and is {size:?}"))
    }

    /// What is wrong with what its disk was made of, by what it is asked to be made of, where nothing is told of that; `root`:
    /// the volume from which an instance boots.
    pub(crate) fn is_of_other_bytes(
        &self,
        root: impl Fn(InstanceId) -> Option<InstanceId>,
    ) -> Option<String> {
        let (request, status, origin) =
            (self.request.as_ref()?, self.status.as_ref()?, self.origin.as_ref()?);
        let image = &request.spec.as_ref()?.image;
        let is_excused = status.rebuilt.as_ref().is_some_and(|rebuilt| rebuilt.failed.is_some());
        if request.desired != Desired::Active || status.state == State::Error || is_excused {
            return None;
        }
        let is_so = match image.copied() {
            Some(of) => {
                let of_root = CopyOf { disk: root(of.disk).unwrap_or(of.disk), ..of.clone() };
                [of, of_root].iter().any(|of| *origin == of.to_string())
            }
            None => origin.is_empty() == image.is_none() && !origin.contains(':'),
        };
        (!is_so).then(|| format!("its disk is to be made of {:?}, and was of {origin:?}", image.url))
    }

    /// What is wrong with the volumes that its domain has, by those that it is to have, where nothing is told of that.
    pub(crate) fn has_other_volumes(&self) -> Option<String> {
        let (request, status) = (self.request.as_ref()?, self.status.as_ref()?);
        let can_have = !matches!(self.guest.domain, None | Some(RunState::Saved)) && !self.guest.rescued;
        let is_excused = status.is_rescued() || status.volumes_failed.is_some();
        if request.desired != Desired::Active || !can_have || is_excused {
            return None;
        }
        let is_so = self.guest.volumes == Attachment::fingerprint(&request.volumes);
        if !is_so {
            return Some(format!("it is to have {:?}, and has others", request.volumes));
        }
        let is_told = status.volumes == request.volumes && !status.volumes_changing;
        (!is_told).then(|| format!("it has {:?}, and tells of {:?}", request.volumes, status.volumes))
    }

    pub(crate) fn is_only_claim(&self) -> bool {
        let Self { request, status, claim, index, domain, volume, record, .. } = self;
        *claim && !(request.is_some() || status.is_some() || *index || *domain || *volume || *record)
    }

    pub(crate) fn told(&self) -> String {
        let mut told: Vec<String> = Vec::new();
        told.extend(self.request.as_ref().map(|request| format!("request {:?}", request.desired)));
        told.extend(self.status.as_ref().map(|status| {
            format!("status {} {}", status.state, status.reason.as_deref().unwrap_or_default())
        }));
        for (is, name) in [
            (self.claim, "claim"),
            (self.index, "index"),
            (self.domain, "domain"),
            (self.volume, "volume"),
            (self.record, "record"),
            (self.rescue_disk, "rescue disk"),
            (self.successor, "disk to come"),
        ] {
            told.extend(is.then(|| name.to_owned()));
        }
        if told.is_empty() { "nothing".to_owned() } else { told.join(", ") }
    }
}

/// Whether placement has room for so many processors more where a guest is.
pub(crate) fn has_room(world: &World, traces: &Traces, more: u64) -> bool {
    let of_node = traces.host.and_then(|node| Some((node, inventory(world, node, "VCPU")?)));
    of_node.is_some_and(|(node, inventory)| used(world, node).0 + more as f64 <= inventory.offered)
}

/// What a node has of a class, by placement.
struct Inventory {
    /// That may be given out.
    offered: f64,
    ratio: f64,
}

fn inventory(world: &World, node: NodeId, class: &str) -> Option<Inventory> {
    let record = content(world, &format!("{PLACEMENT}/providers/{node}"))?;
    let record: Value = serde_json::from_slice(&record.value).ok()?;
    let inventory = &record["inventories"][class];
    let number = |field: &str| inventory[field].as_f64().unwrap_or(0.0);
    let ratio = number("allocation_ratio").max(1.0);
    Some(Inventory { offered: (number("total") - number("reserved")) * ratio, ratio })
}

/// How many processors of a node are claimed, and by whom.
fn used(world: &World, node: NodeId) -> (f64, BTreeSet<String>) {
    let (mut used, mut counted) = (0.0, BTreeSet::new());
    for pair in world.store.content(&format!("{PLACEMENT}/consumers/")).pairs {
        let Ok(consumer) = serde_json::from_slice::<Value>(&pair.value) else { continue };
        if let Some(amounts) = consumer["allocations"].get(node.to_string()) {
            used += amounts["VCPU"].as_f64().unwrap_or(0.0);
            counted.extend(pair.key.rsplit('/').next().map(str::to_owned));
        }
    }
    (used, counted)
}

/// Whether placement has no room to count a guest, and its node keeps as much free as all take there that are not
/// counted. What is reserved is given out several times, so that it comes in steps.
pub(crate) fn is_kept_free(world: &World, traces: &Traces) -> bool {
    let Some(node) = traces.host else { return false };
    // Of disks there is always room, but where a lock came back with an older etcd.
    if traces.is_volume {
        return inventory(world, node, "DISK_GB").is_some_and(|disks| disks.offered <= 0.0);
    }
    let Some(Inventory { offered, ratio }) = inventory(world, node, "VCPU") else { return false };
    let (used, counted) = used(world, node);
    let here = world.computers.iter().find(|computer| computer.node == node);
    let records = here.and_then(|computer| computer.records().ok()).unwrap_or_default();
    let vcpus = |size: Option<DomainSize>| size.map_or(1.0, |size| size.vcpus as f64);
    let takes = |one| vcpus(here.and_then(|here| size(here, one)));
    let is_machine = |one: &InstanceId| !world.judge(|referee, _| referee.known(*one).is_volume);
    let names = records.keys().filter(|name| !counted.contains(*name)).filter_map(|name| name.parse().ok());
    let own = vcpus(traces.size);
    // One whose record somebody took is among them, too.
    let unrecorded = if traces.record { 0.0 } else { own };
    let uncounted = names.filter(is_machine).map(takes).sum::<f64>() + unrecorded;
    let all = PROCESSORS as f64;
    let without_it = all - ((uncounted - own) / ratio).ceil() * ratio;
    // A lock that came back with an older etcd is an operator's for all that its agent knows.
    let is_locked = offered <= 0.0;
    is_locked || offered <= all - uncounted && used + own > without_it
}

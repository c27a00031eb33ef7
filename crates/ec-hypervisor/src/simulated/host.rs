//! The state of the simulated host and what the operations do to it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::Ipv4Addr,
    path::PathBuf,
    time::Duration,
};

use ec_model::{Address, AddressSource, Attachment, BaseImage, CopyOf, InstanceId, NodeId};
use tokio::time::Instant;

use crate::{DomainSize, DomainSpec, End, Observed, Pause, Room, RunState, Usage, VolumeSource};

#[derive(Debug, Default)]
pub(super) struct Host {
    machines: HashMap<InstanceId, Machine>,
    addresses_given: u32,
    pub(super) address_delay: Duration,
    /// Guests do not hear when they are asked to end.
    pub(super) deaf: bool,
    /// Guests do not let go of volumes.
    pub(super) clings: bool,
}

/// What is of one instance; never without domain and volume both.
#[derive(Debug)]
struct Machine {
    node: NodeId,
    volume: Option<Volume>,
    /// Beside the volume, to replace it.
    successor: Option<Volume>,
    /// To boot from in its place.
    rescue: Option<Volume>,
    domain: Option<Domain>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Volume {
    base: PathBuf,
    capacity: u64,
    /// Of a snapshot of several disks, the capacity of the copy of each volume beside its first.
    beside: BTreeMap<InstanceId, u64>,
}

#[derive(Debug)]
struct Domain {
    state: RunState,
    transient: bool,
    /// It was started from its rescue disk last.
    rescued: bool,
    vcpus: u64,
    memory_mb: u64,
    /// Volumes as it is defined, and those of the guest that is up.
    volumes: Vec<Attachment>,
    volumes_up: Vec<Attachment>,
    /// What it was started with room for; none before its first start.
    room: Option<Room>,
    address: Option<(Ipv4Addr, Instant)>,
    console: String,
    usage: Usage,
}

impl Volume {
    fn on(base: &BaseImage, capacity: Option<u64>) -> Result<Self, String> {
        let capacity = capacity.unwrap_or(base.virtual_size);
        if capacity < base.virtual_size {
            return Err(format!("{capacity} bytes are less than the image's {}", base.virtual_size));
        }
        Ok(Self { base: base.path.clone(), capacity, beside: BTreeMap::new() })
    }

    fn copies(&self) -> u64 {
        CopyOf::fingerprint(&self.beside.keys().copied().collect::<Vec<_>>())
    }
}

impl Machine {
    fn is_empty(&self) -> bool {
        self.volume.is_none() && self.successor.is_none() && self.rescue.is_none() && self.domain.is_none()
    }

    fn refuse_rescued(&self) -> Result<(), String> {
        let is_up = |domain: &Domain| {
            matches!(domain.state, RunState::Running | RunState::Paused(_)) && domain.rescued
        };
        if self.domain.as_ref().is_some_and(is_up) { Err("the guest is up from it".into()) } else { Ok(()) }
    }

    /// As this node sees it, which need not be its own.
    fn seen_by(&self, node: NodeId) -> Observed {
        if self.node == node {
            return self.observed();
        }
        let foreign = self.domain.is_some() && self.volume.is_some();
        Observed { foreign, ..Observed::default() }
    }

    fn observed(&self) -> Observed {
        Observed {
            domain: self.domain.as_ref().map(|domain| domain.state),
            volume: self.volume.is_some(),
            successor: self.successor.is_some(),
            transient: self.domain.as_ref().is_some_and(|domain| domain.transient),
            rescued: self.domain.as_ref().is_some_and(Domain::is_rescued),
            volumes: self.domain.as_ref().map_or(0, Domain::volumes),
            copies: self.volume.as_ref().map_or(0, Volume::copies),
            foreign: false,
        }
    }
}

impl Domain {
    fn is_up(&self) -> bool {
        matches!(self.state, RunState::Running | RunState::Paused(_))
    }

    fn has(&self, volume: InstanceId) -> bool {
        let up = self.volumes_up.iter().filter(|_| self.is_up() || self.state == RunState::Saved);
        self.volumes.iter().chain(up).any(|has| has.volume == volume)
    }

    /// The volume that it boots from; none where it has a disk of its own.
    fn root(&self) -> Option<InstanceId> {
        Attachment::root_of(&self.volumes).or(Attachment::root_of(&self.volumes_up))
    }

    fn volumes(&self) -> u64 {
        let [defined, up] = [&self.volumes, &self.volumes_up].map(|has| Attachment::fingerprint(has));
        // One that is rescued has none, and is defined with those that it has afterwards.
        if self.is_rescued() {
            return defined;
        }
        let is_of_both = self.is_up() && !self.transient || self.state == RunState::Saved;
        if is_of_both && up != defined {
            return Observed::OTHER_VOLUMES;
        }
        if self.is_up() { up } else { defined }
    }

    /// As libvirt tells it, which forgets how a guest was started when it ends.
    fn is_rescued(&self) -> bool {
        self.rescued && matches!(self.state, RunState::Running | RunState::Paused(_) | RunState::Saved)
    }
}

impl Host {
    fn ours(&self, node: NodeId, instance: InstanceId) -> Option<&Machine> {
        self.machines.get(&instance).filter(|machine| machine.node == node)
    }

    /// The machine, made where there is none; an error where it is another node's.
    fn machine(&mut self, node: NodeId, instance: InstanceId) -> Result<&mut Machine, String> {
        let machine = self.machines.entry(instance).or_insert(Machine {
            node,
            volume: None,
            successor: None,
            rescue: None,
            domain: None,
        });
        if machine.node == node { Ok(machine) } else { Err(foreign()) }
    }

    pub(super) fn list(&self, node: NodeId) -> HashMap<InstanceId, Observed> {
        let seen = self.machines.iter().map(|(instance, machine)| (*instance, machine.seen_by(node)));
        seen.filter(|(_, observed)| *observed != Observed::default()).collect()
    }

    pub(super) fn observe(&self, node: NodeId, instance: InstanceId) -> Observed {
        self.machines.get(&instance).map(|machine| machine.seen_by(node)).unwrap_or_default()
    }

    pub(super) fn create_overlay(
        &mut self,
        node: NodeId,
        instance: InstanceId,
        base: &BaseImage,
        capacity: Option<u64>,
    ) -> Result<bool, String> {
        let volume = Volume::on(base, capacity)?;
        let machine = self.machine(node, instance)?;
        if machine.volume.as_ref() == Some(&volume) {
            return Ok(false);
        }
        if machine.domain.as_ref().is_some_and(|domain| domain.state == RunState::Running) {
            return Err("the domain runs on another overlay".into());
        }
        machine.volume = Some(volume);
        Ok(true)
    }

    pub(super) fn create_successor(
        &mut self,
        node: NodeId,
        instance: InstanceId,
        source: &VolumeSource,
        capacity: Option<u64>,
    ) -> Result<bool, String> {
        let disk = self.disk(node, source, capacity)?;
        let machine = self.machine(node, instance)?;
        // A copy that is whole stays, whatever it is of.
        if matches!(source, VolumeSource::Copy(_)) && machine.successor.is_some() {
            return Ok(false);
        }
        machine.successor = Some(disk);
        Ok(true)
    }

    pub(super) fn create_volume(
        &mut self,
        node: NodeId,
        volume: InstanceId,
        source: &VolumeSource,
        capacity: Option<u64>,
    ) -> Result<bool, String> {
        let is_up = |machine: &Machine| machine.domain.as_ref().is_some_and(Domain::is_up);
        if self.machines.get(&volume).is_some_and(is_up) {
            return Err("a domain is up with it".into());
        }
        // What a copy is made of is not looked at where it is there, by its name, from when it is whole.
        if let VolumeSource::Copy(of) = source
            && let Some(has) = self.machine(node, volume)?.volume.as_mut()
        {
            // What is claimed for a snapshot of several disks is all of theirs.
            let wanted = capacity.filter(|_| of.beside.is_empty()).unwrap_or_default();
            let is_smaller = has.capacity < wanted;
            has.capacity = has.capacity.max(wanted);
            return Ok(is_smaller);
        }
        let disk = self.disk(node, source, capacity)?;
        let machine = self.machine(node, volume)?;
        // What is there stays: whose disk it is may have grown it since, or another node handed it over.
        if let Some(has) = machine.volume.as_mut().filter(|has| has.base == disk.base) {
            let is_smaller = has.capacity < disk.capacity;
            has.capacity = has.capacity.max(disk.capacity);
            return Ok(is_smaller);
        }
        machine.volume = Some(disk);
        Ok(true)
    }

    fn disk(&self, node: NodeId, source: &VolumeSource, capacity: Option<u64>) -> Result<Volume, String> {
        match source {
            VolumeSource::Empty => {
                Ok(Volume { base: PathBuf::new(), capacity: capacity.unwrap_or(0), beside: BTreeMap::new() })
            }
            VolumeSource::Image(base) => Volume::on(base, capacity),
            VolumeSource::Copy(of) => self.copy(node, of, capacity),
        }
    }

    fn copy(&self, node: NodeId, of: &CopyOf, capacity: Option<u64>) -> Result<Volume, String> {
        let disk = |of: InstanceId| self.ours(node, of)?.volume.as_ref();
        let first = match of.held {
            None => disk(of.disk).map(|volume| volume.capacity),
            Some(held) => disk(of.disk).and_then(|volume| volume.beside.get(&held).copied()),
        };
        let first = first.ok_or("there is nothing to copy")?;
        let mut beside = BTreeMap::new();
        let user = self.user_of(of.disk).unwrap_or(of.disk);
        for volume in &of.beside {
            if self.user_of(*volume) != Some(user) {
                return Err(format!("volume {volume} is not with the guest that has the first"));
            }
            beside.insert(*volume, disk(*volume).ok_or("there is nothing to copy")?.capacity);
        }
        let has = beside.values().fold(first, |sum, capacity| sum + capacity);
        let capacity = capacity.unwrap_or(has);
        if capacity < has {
            return Err(format!("{capacity} bytes are less than the {has} to copy"));
        }
        let capacity = if beside.is_empty() { capacity } else { first };
        Ok(Volume { base: PathBuf::from(of.to_string()), capacity, beside })
    }

    pub(super) fn has_user(&self, volume: InstanceId) -> bool {
        self.user_of(volume).is_some()
    }

    /// The volumes of each domain, as it is defined and of the guest that is up or was saved, in order.
    pub(super) fn volumes(&self) -> Vec<(InstanceId, [Vec<Attachment>; 2])> {
        let of = |domain: &Domain| {
            let up =
                if domain.is_up() || domain.state == RunState::Saved { &domain.volumes_up[..] } else { &[] };
            [domain.volumes.clone(), up.to_vec()]
        };
        let domains =
            self.machines.iter().filter_map(|(id, machine)| Some((*id, of(machine.domain.as_ref()?))));
        let mut all: Vec<_> = domains.collect();
        all.sort_unstable_by_key(|(instance, _)| *instance);
        all
    }

    /// Whether a guest that is up has this volume.
    fn is_up_with(&self, volume: InstanceId) -> bool {
        let has =
            |domain: &Domain| domain.is_up() && domain.volumes_up.iter().any(|has| has.volume == volume);
        self.machines.values().filter_map(|machine| machine.domain.as_ref()).any(has)
    }

    /// The machine whose domain has this volume.
    fn user_of(&self, volume: InstanceId) -> Option<InstanceId> {
        let has = |machine: &Machine| machine.domain.as_ref().is_some_and(|domain| domain.has(volume));
        self.machines.iter().find(|(_, machine)| has(machine)).map(|(instance, _)| *instance)
    }

    pub(super) fn set_volumes(
        &mut self,
        node: NodeId,
        instance: InstanceId,
        volumes: &[Attachment],
    ) -> Result<bool, String> {
        for Attachment { volume, .. } in volumes {
            self.refuse_unusable(node, instance, *volume)?;
        }
        let clings = self.clings;
        let machine = self.machines.get_mut(&instance).filter(|machine| machine.node == node);
        let domain = machine.and_then(|machine| machine.domain.as_mut()).ok_or("domain not found")?;
        if domain.state == RunState::Saved {
            return Err("its memory is saved".into());
        }
        if domain.root() != Attachment::root_of(volumes) {
            return Err("the disk that it boots from is not changed".into());
        }
        let before = domain.volumes();
        if !domain.transient {
            domain.volumes = volumes.to_vec();
        }
        if domain.is_up() {
            let mut kept = std::mem::replace(&mut domain.volumes_up, volumes.to_vec());
            kept.retain(|has| clings && !volumes.contains(has));
            domain.volumes_up.extend_from_slice(&kept);
            if let Some(has) = kept.first() {
                return Err(format!("the guest does not let go of {}", has.device));
            }
        }
        Ok(before != domain.volumes())
    }

    /// Nodes of one host have one storage.
    pub(super) fn hand_over(&mut self, node: NodeId, volume: InstanceId, to: NodeId) -> Result<bool, String> {
        if let Some(other) = self.user_of(volume) {
            return Err(format!("the domain {other} has it"));
        }
        let machine = self.machines.get_mut(&volume).filter(|machine| machine.node == node);
        let Some(machine) = machine.filter(|machine| machine.volume.is_some()) else { return Ok(false) };
        machine.node = to;
        Ok(true)
    }

    /// Another node of this host that has a volume's disk.
    pub(super) fn other_with(&self, node: NodeId, volume: InstanceId) -> Option<NodeId> {
        let machine = self.machines.get(&volume).filter(|machine| machine.node != node)?;
        machine.volume.as_ref().map(|_| machine.node)
    }

    /// Takes a volume's disk away, for another host; nothing where there is none.
    pub(super) fn take_volume(&mut self, node: NodeId, volume: InstanceId) -> Result<Option<Volume>, String> {
        if let Some(other) = self.user_of(volume) {
            return Err(format!("the domain {other} has it"));
        }
        let machine = self.machines.get_mut(&volume).filter(|machine| machine.node == node);
        let taken = machine.and_then(|machine| machine.volume.take());
        self.forget_empty(volume);
        Ok(taken)
    }

    /// Puts one there that another host had.
    pub(super) fn put_volume(&mut self, node: NodeId, volume: InstanceId, disk: Volume) {
        if let Ok(machine) = self.machine(node, volume) {
            machine.volume = Some(disk);
        }
    }

    /// An error where a volume's disk is not there, or is another domain's.
    fn refuse_unusable(&self, node: NodeId, instance: InstanceId, volume: InstanceId) -> Result<(), String> {
        if self.ours(node, volume).is_none_or(|machine| machine.volume.is_none()) {
            return Err(format!("the disk of volume {volume} is not there"));
        }
        match self.user_of(volume).filter(|other| *other != instance) {
            Some(other) => Err(format!("{other} has volume {volume}")),
            None => Ok(()),
        }
    }

    pub(super) fn origin(&self, node: NodeId, instance: InstanceId) -> Option<String> {
        Some(self.ours(node, instance)?.volume.as_ref()?.base.display().to_string())
    }

    pub(super) fn disk_bytes(&self, node: NodeId, instance: InstanceId) -> Option<u64> {
        self.ours(node, instance)?.volume.as_ref().map(|volume| volume.capacity)
    }

    pub(super) fn replace_overlay(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        let machine = self.machine(node, instance)?;
        let state = machine.domain.as_ref().map(|domain| domain.state);
        if matches!(state, Some(RunState::Running | RunState::Paused(_))) {
            return Err("the domain runs".into());
        }
        if self.is_up_with(instance) {
            return Err("a guest is up with it".into());
        }
        let mut domains = self.machines.values().filter_map(|machine| machine.domain.as_ref());
        if domains.any(|domain| domain.state == RunState::Saved && domain.has(instance)) {
            return Err("the memory of a guest goes on with it as it is".into());
        }
        let machine = self.machine(node, instance)?;
        let successor = machine.successor.take().ok_or("it has no successor")?;
        machine.volume = Some(successor);
        if let Some(domain) = machine.domain.as_mut().filter(|domain| domain.state == RunState::Saved) {
            domain.state = RunState::Ended(End::ByHand);
        }
        Ok(true)
    }

    pub(super) fn drop_successor(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        match self.machines.get_mut(&instance) {
            Some(machine) if machine.node != node => Err(foreign()),
            Some(machine) => {
                let dropped = machine.successor.take().is_some();
                self.forget_empty(instance);
                Ok(dropped)
            }
            None => Ok(false),
        }
    }

    pub(super) fn create_rescue(
        &mut self,
        node: NodeId,
        instance: InstanceId,
        base: &BaseImage,
    ) -> Result<bool, String> {
        let volume = Volume::on(base, None)?;
        let has_root = |machine: &Machine| machine.domain.as_ref().is_some_and(|it| it.root().is_some());
        let has_disk = |machine: &Machine| machine.volume.is_some() || has_root(machine);
        if !self.machines.get(&instance).is_some_and(has_disk) {
            return Err("it has no disk of its own".to_owned());
        }
        let machine = self.machine(node, instance)?;
        machine.refuse_rescued()?;
        machine.rescue = Some(volume);
        Ok(true)
    }

    pub(super) fn drop_rescue(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        let Some(machine) = self.machines.get_mut(&instance) else { return Ok(false) };
        if machine.node != node {
            return Err(foreign());
        }
        machine.refuse_rescued()?;
        if let Some(domain) = machine.domain.as_mut().filter(|domain| domain.is_rescued()) {
            domain.state = RunState::Ended(End::ByHand);
        }
        let dropped = machine.rescue.take().is_some();
        self.forget_empty(instance);
        Ok(dropped)
    }

    pub(super) fn define(&mut self, node: NodeId, spec: &DomainSpec) -> Result<bool, String> {
        let is_defined = self.ours(node, spec.instance).is_some_and(|machine| machine.domain.is_some());
        if let Some(root) = spec.root().filter(|_| !is_defined) {
            self.refuse_unusable(node, spec.instance, root)?;
        }
        let is_usable = |has: &&Attachment| self.refuse_unusable(node, spec.instance, has.volume).is_ok();
        let volumes = spec.volumes.iter().filter(is_usable).cloned().collect();
        let machine = self.machine(node, spec.instance)?;
        if let Some(domain) = &mut machine.domain {
            refuse_other(domain, spec)?;
            return Ok(std::mem::take(&mut domain.transient));
        }
        machine.domain = Some(Domain {
            state: RunState::NotStarted,
            transient: false,
            rescued: false,
            vcpus: spec.vcpus,
            memory_mb: spec.memory_mb,
            volumes,
            volumes_up: Vec::new(),
            room: None,
            address: None,
            console: String::new(),
            usage: Usage::default(),
        });
        Ok(true)
    }

    /// Whether it was undefined, or none where it is not up.
    pub(super) fn persist(&mut self, node: NodeId, instance: InstanceId) -> Option<bool> {
        let domain = self.running(node, instance).ok().flatten()?;
        Some(std::mem::take(&mut domain.transient))
    }

    pub(super) fn grow_disk(
        &mut self,
        node: NodeId,
        instance: InstanceId,
        capacity: u64,
    ) -> Result<bool, String> {
        let machine = self.machine(node, instance)?;
        let Some(volume) = &mut machine.volume else {
            self.forget_empty(instance);
            return Err("it has no disk".into());
        };
        let is_larger = capacity > volume.capacity;
        volume.capacity = volume.capacity.max(capacity);
        Ok(is_larger)
    }

    pub(super) fn redefine(&mut self, node: NodeId, spec: &DomainSpec) -> Result<bool, String> {
        let machine = self.machines.get_mut(&spec.instance).ok_or("domain not found")?;
        if machine.node != node {
            return Err(foreign());
        }
        let domain = machine.domain.as_mut().ok_or("domain not found")?;
        if !matches!(domain.state, RunState::NotStarted | RunState::Ended(_)) {
            return Err("the domain is up, or its memory is saved".into());
        }
        refuse_other(domain, spec)?;
        let before = std::mem::replace(&mut domain.vcpus, spec.vcpus);
        let memory_before = std::mem::replace(&mut domain.memory_mb, spec.memory_mb);
        Ok((before, memory_before) != (spec.vcpus, spec.memory_mb))
    }

    pub(super) fn grow(&mut self, node: NodeId, spec: &DomainSpec) -> Result<bool, String> {
        let domain = self.running(node, spec.instance)?.ok_or("the guest does not run")?;
        refuse_other(domain, spec)?;
        let room = domain.room.ok_or("it was never started")?;
        let more = spec.memory_mb.checked_sub(domain.memory_mb).ok_or("it has more memory")?;
        let most = room.memory_mb.unwrap_or(domain.memory_mb);
        if spec.vcpus < domain.vcpus || spec.vcpus > room.vcpus || spec.memory_mb > most {
            return Err("there is no room for that in how it was started".into());
        }
        if more % Room::MEMORY_STEP_MB != 0 {
            return Err("memory is added in whole steps".into());
        }
        let before = std::mem::replace(&mut domain.vcpus, spec.vcpus);
        domain.memory_mb = spec.memory_mb;
        // Growing defines it for good.
        let undefined = std::mem::take(&mut domain.transient);
        Ok(before != spec.vcpus || more > 0 || undefined)
    }

    pub(super) fn resume(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        let machine = self.machines.get_mut(&instance).filter(|machine| machine.node == node);
        let domain = machine.and_then(|machine| machine.domain.as_mut()).ok_or("domain not found")?;
        match domain.state {
            RunState::Running => Ok(false),
            RunState::Paused(_) => {
                domain.state = RunState::Running;
                Ok(true)
            }
            RunState::NotStarted | RunState::Ended(_) | RunState::Saved => {
                Err("domain is not running".into())
            }
        }
    }

    /// A domain of ours that runs, paused ones included; none where it does not.
    fn running(&mut self, node: NodeId, instance: InstanceId) -> Result<Option<&mut Domain>, String> {
        let machine = self.machines.get_mut(&instance).filter(|machine| machine.node == node);
        let domain = machine.and_then(|machine| machine.domain.as_mut()).ok_or("domain not found")?;
        Ok(Some(domain).filter(|domain| matches!(domain.state, RunState::Running | RunState::Paused(_))))
    }

    /// A guest that runs hears it, and has ended at once; unless it is deaf.
    pub(super) fn shut_down(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        let deaf = self.deaf;
        let hears = self.running(node, instance)?.is_some_and(|domain| domain.state == RunState::Running);
        Ok(hears && !deaf && self.end(instance, End::ByGuest))
    }

    pub(super) fn power_off(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        let Some(domain) = self.running(node, instance)? else { return Ok(false) };
        domain.state = RunState::Running;
        Ok(self.end(instance, End::ByHand))
    }

    pub(super) fn halt(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        match self.running(node, instance)? {
            Some(domain) if domain.state == RunState::Running => {
                domain.state = RunState::Paused(Pause::ByHand);
                Ok(true)
            }
            Some(_) => Ok(false),
            None => Err("domain is not running".into()),
        }
    }

    pub(super) fn save(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        match self.running(node, instance)? {
            Some(Domain { transient: true, .. }) => Err("cannot save a transient domain".into()),
            Some(domain) => {
                domain.state = RunState::Saved;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    pub(super) fn drop_memory(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        match self.running(node, instance)? {
            Some(_) => Err("the guest is up".into()),
            None => Ok(self.forget_memory(instance)),
        }
    }

    pub(super) fn size(&self, node: NodeId, instance: InstanceId) -> Option<DomainSize> {
        let machine = self.ours(node, instance)?;
        let domain = machine.domain.as_ref()?;
        Some(DomainSize {
            vcpus: domain.vcpus,
            memory_mb: domain.memory_mb,
            disk_bytes: machine.volume.as_ref().map_or(0, |volume| volume.capacity),
        })
    }

    /// Each guest that runs does a little between any two looks.
    pub(super) fn usage(&mut self, node: NodeId, instances: &[InstanceId]) -> HashMap<InstanceId, Usage> {
        let mut told = HashMap::new();
        for instance in instances {
            let machine = self.machines.get_mut(instance).filter(|machine| machine.node == node);
            let Some(domain) = machine.and_then(|machine| machine.domain.as_mut()) else { continue };
            match domain.state {
                RunState::Running => {
                    domain.usage.cpu_ns += 1_000_000;
                    domain.usage.disk_bytes += 512;
                    domain.usage.net_bytes += 60;
                }
                RunState::Paused(_) => {}
                RunState::NotStarted | RunState::Ended(_) | RunState::Saved => {
                    domain.usage = Usage::default();
                    continue;
                }
            }
            told.insert(*instance, domain.usage);
        }
        told
    }

    /// Changes the domain's state from outside of the agent's hands; whether there was one.
    fn happen(&mut self, instance: InstanceId, change: impl FnOnce(&mut RunState)) -> bool {
        let domain = self.machines.get_mut(&instance).and_then(|machine| machine.domain.as_mut());
        domain.map(|domain| change(&mut domain.state)).is_some()
    }

    /// As after a power cut: what was defined for good is there, and does not run.
    pub(super) fn restart(&mut self) {
        for machine in self.machines.values_mut() {
            machine.domain = machine.domain.take().filter(|domain| !domain.transient);
            if let Some(domain) = machine.domain.as_mut().filter(|domain| domain.state != RunState::Saved) {
                domain.state = RunState::NotStarted;
            }
        }
        self.machines.retain(|_, machine| !machine.is_empty());
    }

    /// As `virsh undefine`: a domain that runs lives on until it ends.
    pub(super) fn undefine(&mut self, instance: InstanceId) {
        let Some(machine) = self.machines.get_mut(&instance) else { return };
        match &mut machine.domain {
            Some(domain) if matches!(domain.state, RunState::Running | RunState::Paused(_)) => {
                domain.transient = true;
            }
            _ => machine.domain = None,
        }
        self.forget_empty(instance);
    }

    pub(super) fn delete_volumes(&mut self, instance: InstanceId) {
        if let Some(machine) = self.machines.get_mut(&instance) {
            (machine.volume, machine.successor, machine.rescue) = (None, None, None);
        }
        self.forget_empty(instance);
    }

    pub(super) fn delete_volume(&mut self, instance: InstanceId) {
        if let Some(machine) = self.machines.get_mut(&instance) {
            machine.volume = None;
        }
        self.forget_empty(instance);
    }

    pub(super) fn delete_copy(&mut self, snapshot: InstanceId, disk: InstanceId) {
        let volume = self.machines.get_mut(&snapshot).and_then(|machine| machine.volume.as_mut());
        volume.and_then(|volume| volume.beside.remove(&disk));
    }

    fn forget_empty(&mut self, instance: InstanceId) {
        if self.machines.get(&instance).is_some_and(Machine::is_empty) {
            self.machines.remove(&instance);
        }
    }

    pub(super) fn start(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        self.begin(node, instance, false)
    }

    pub(super) fn start_rescue(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        self.begin(node, instance, true)
    }

    fn begin(&mut self, node: NodeId, instance: InstanceId, rescued: bool) -> Result<bool, String> {
        let next = self.addresses_given + 1;
        let known_at = Instant::now() + self.address_delay;
        let there: HashSet<InstanceId> =
            self.machines.iter().filter(|(_, machine)| machine.volume.is_some()).map(|(id, _)| *id).collect();
        let others = self.machines.iter().filter(|(id, _)| **id != instance);
        let up = others.filter_map(|(_, machine)| machine.domain.as_ref().filter(|domain| domain.is_up()));
        let locked: HashSet<InstanceId> =
            up.flat_map(|domain| domain.volumes_up.iter().map(|has| has.volume)).collect();
        let machine = self.machines.get_mut(&instance).ok_or("domain not found")?;
        if machine.node != node {
            return Err(foreign());
        }
        let domain = machine.domain.as_mut().ok_or("domain not found")?;
        if domain.state == RunState::Running {
            return Ok(false);
        }
        let root = domain.root();
        // Saved memory is of the disks that its guest had.
        let rescued = if domain.state == RunState::Saved { domain.rescued } else { rescued };
        let has_disk = root.map_or(machine.volume.is_some(), |root| there.contains(&root));
        if !has_disk || (rescued && machine.rescue.is_none()) {
            return Err("cannot access the volume: no such file or directory".into());
        }
        if !rescued && domain.volumes.iter().any(|has| !there.contains(&has.volume)) {
            return Err("cannot access a volume: no such file or directory".into());
        }
        // A rescued one has the disk that it boots from otherwise as its second.
        if domain.volumes.iter().any(|has| (!rescued || has.is_root()) && locked.contains(&has.volume)) {
            return Err("another process has the write lock of a volume".into());
        }
        if domain.state != RunState::Saved {
            domain.volumes_up = domain.volumes.clone();
            domain.volumes_up.retain(|has| !rescued || has.is_root());
        }
        domain.rescued = rescued;
        // What was saved has the room that it had.
        if domain.state != RunState::Saved {
            domain.room = Some(Room::of(domain.vcpus, domain.memory_mb, false));
        }
        let [_, b, c, d] = next.to_be_bytes();
        let address = domain.address.map_or(Ipv4Addr::new(10, b, c, d), |(address, _)| address);
        domain.state = RunState::Running;
        domain.address = Some((address, known_at));
        self.addresses_given = next;
        Ok(true)
    }

    pub(super) fn destroy(&mut self, node: NodeId, instance: InstanceId) -> Result<bool, String> {
        match self.machines.get(&instance) {
            Some(machine) if machine.node != node => Err(foreign()),
            _ => Ok(self.machines.remove(&instance).is_some()),
        }
    }

    pub(super) fn addresses(
        &self,
        node: NodeId,
        instances: &[InstanceId],
    ) -> HashMap<InstanceId, Vec<Address>> {
        let address = |instance: &InstanceId| {
            let domain = self.ours(node, *instance)?.domain.as_ref()?;
            let (ip, known_at) = domain.address?;
            let known = domain.state == RunState::Running && known_at <= Instant::now();
            known.then(|| {
                let mac = instance.mac(0);
                (*instance, vec![Address { ip: ip.into(), mac, nic: 0, source: AddressSource::Lease }])
            })
        };
        instances.iter().filter_map(address).collect()
    }

    pub(super) fn console_tail(&self, node: NodeId, instance: InstanceId, max_bytes: usize) -> String {
        let console = self
            .ours(node, instance)
            .and_then(|machine| machine.domain.as_ref())
            .map_or("", |domain| domain.console.as_str());
        let mut start = console.len().saturating_sub(max_bytes);
        while !console.is_char_boundary(start) {
            start += 1;
        }
        console[start..].to_owned()
    }

    pub(super) fn set_console(&mut self, instance: InstanceId, text: &str) {
        if let Some(domain) = self.machines.get_mut(&instance).and_then(|machine| machine.domain.as_mut()) {
            text.clone_into(&mut domain.console);
        }
    }

    /// What a guest says to what is typed: the same.
    pub(super) fn type_on_console(&mut self, instance: InstanceId, text: &str) {
        if let Some(domain) = self.machines.get_mut(&instance).and_then(|machine| machine.domain.as_mut()) {
            domain.console.push_str(text);
        }
    }

    pub(super) fn end(&mut self, instance: InstanceId, why: End) -> bool {
        match self.machines.get_mut(&instance).and_then(|machine| machine.domain.as_mut()) {
            Some(domain) if domain.state == RunState::Running => {
                domain.state = RunState::Ended(why);
                let transient = domain.transient;
                if transient {
                    self.undefine(instance);
                }
                true
            }
            _ => false,
        }
    }

    pub(super) fn forget_memory(&mut self, instance: InstanceId) -> bool {
        let domain = self.machines.get_mut(&instance).and_then(|machine| machine.domain.as_mut());
        let Some(domain) = domain.filter(|domain| domain.state == RunState::Saved) else { return false };
        domain.state = RunState::Ended(End::ByHand);
        true
    }

    pub(super) fn pause(&mut self, instance: InstanceId, why: Pause) -> bool {
        self.happen(instance, |state| *state = RunState::Paused(why))
    }

    pub(super) fn has_rescue_disk(&self, instance: InstanceId) -> bool {
        self.machines.get(&instance).is_some_and(|machine| machine.rescue.is_some())
    }

    pub(super) fn has_successor(&self, instance: InstanceId) -> bool {
        self.machines.get(&instance).is_some_and(|machine| machine.successor.is_some())
    }

    /// Processors of all that run.
    pub(super) fn processors(&self) -> u64 {
        let domains = self.machines.values().filter_map(|machine| machine.domain.as_ref());
        domains.filter(|domain| domain.state == RunState::Running).map(|domain| domain.vcpus).sum()
    }

    pub(super) fn count(&self, state: RunState) -> usize {
        let domains = self.machines.values().filter_map(|machine| machine.domain.as_ref());
        domains.filter(|domain| domain.state == state).count()
    }
}

/// An error where the domain boots from another disk than this says.
fn refuse_other(domain: &Domain, spec: &DomainSpec) -> Result<(), String> {
    if domain.root() == spec.root() {
        return Ok(());
    }
    Err("the domain boots from another disk, and stays so".into())
}

fn foreign() -> String {
    "it does not carry this node's mark, so it is left alone".into()
}

//! A hypervisor in memory: no guests, but the same answers, with latency, failures and hangs to set.
//!
//! Tests of the agent and benchmarks of many nodes in one process use it. It keeps time by the tokio
//! clock, so that it runs under paused time, and it counts every call and every effect per instance: a
//! test asks "was this defined once and started once" instead of guessing from the outcome.

mod console;
mod host;
mod knobs;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use async_trait::async_trait;
use bytes::Bytes;
use ec_model::{Address, Attachment, BaseImage, InstanceId, NodeId};
use tokio::{
    net::UnixStream,
    sync::{Notify, broadcast, mpsc},
};

use crate::{
    Console, DomainSize, DomainSpec, HostInfo, Hypervisor, HypervisorError, HypervisorEvent,
    HypervisorResult, Observed, Printed, Usage, VolumeSource,
};
use host::Host;
use knobs::Knobs;

/// Hints waiting for a slow receiver; one that lags behind further looks at everything.
const EVENTS: usize = 256;

/// The operations of [`Hypervisor`], to set knobs on and to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each is the method of the same name")]
pub enum Operation {
    Prepare,
    List,
    Observe,
    CreateOverlay,
    CreateSuccessor,
    ReplaceOverlay,
    DropSuccessor,
    CreateRescue,
    DropRescue,
    Define,
    Persist,
    CreateVolume,
    SetVolumes,
    Volumes,
    HasVolume,
    HandOver,
    DiskBytes,
    GrowDisk,
    Grow,
    Redefine,
    Start,
    StartRescue,
    Resume,
    ShutDown,
    PowerOff,
    Pause,
    Save,
    DropMemory,
    Size,
    Destroy,
    Addresses,
    Usage,
    ConsoleTail,
    OpenConsole,
    FollowConsole,
    OpenGraphics,
    ReadDisk,
}

impl Operation {
    const fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare the host",
            Self::List => "list the instances",
            Self::Observe => "observe the instance",
            Self::CreateOverlay => "create the overlay",
            Self::CreateSuccessor => "create the overlay's successor",
            Self::ReplaceOverlay => "replace the overlay",
            Self::DropSuccessor => "drop the overlay's successor",
            Self::CreateRescue => "create the rescue disk",
            Self::DropRescue => "drop the rescue disk",
            Self::Define => "define the domain",
            Self::Persist => "define the domain that is up",
            Self::CreateVolume => "create the volume",
            Self::SetVolumes => "set the volumes",
            Self::Volumes => "look which volumes it has",
            Self::HasVolume => "look for the volume",
            Self::HandOver => "hand the volume over",
            Self::DiskBytes => "measure the disk",
            Self::GrowDisk => "grow the disk",
            Self::Grow => "grow the guest",
            Self::Redefine => "define the domain anew",
            Self::Start => "start the domain",
            Self::StartRescue => "start the domain from its rescue disk",
            Self::Resume => "resume the domain",
            Self::ShutDown => "shut the domain down",
            Self::PowerOff => "power the domain off",
            Self::Pause => "pause the domain",
            Self::Save => "save the domain",
            Self::DropMemory => "drop the saved memory",
            Self::Size => "measure the domain",
            Self::Destroy => "destroy the domain",
            Self::Addresses => "read the addresses",
            Self::Usage => "read what guests use",
            Self::ConsoleTail => "read the console",
            Self::OpenConsole => "open the console",
            Self::FollowConsole => "follow the console",
            Self::OpenGraphics => "open the screen",
            Self::ReadDisk => "read the disk",
        }
    }
}

/// A simulated host as one node sees it. A clone is the same host and the same node.
#[derive(Debug, Clone)]
pub struct SimulatedHypervisor {
    node: NodeId,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// The hosts whose disks lie on the same storage.
    beside: Mutex<HashMap<NodeId, Weak<Shared>>>,
    /// Wakes calls that hang, when what they hang on may have been released.
    released: Notify,
    events: broadcast::Sender<HypervisorEvent>,
}

#[derive(Debug)]
struct Inner {
    host: Host,
    knobs: Knobs,
    /// Whose consoles somebody has open.
    open_consoles: HashSet<InstanceId>,
}

impl SimulatedHypervisor {
    /// An empty host where guests have their address as soon as they run.
    pub fn new(node: NodeId) -> Self {
        Self {
            node,
            shared: Arc::new(Shared {
                inner: Mutex::new(Inner {
                    host: Host::default(),
                    knobs: Knobs::default(),
                    open_consoles: HashSet::new(),
                }),
                beside: Mutex::default(),
                released: Notify::new(),
                events: broadcast::channel(EVENTS).0,
            }),
        }
    }

    /// The same host as another node's agent sees it: what carries the other mark is not there for it.
    pub fn as_node(&self, node: NodeId) -> Self {
        Self { node, shared: Arc::clone(&self.shared) }
    }

    /// From now on this host and that one have their disks on the same storage.
    pub fn share_storage(&self, other: &Self) {
        self.beside().insert(other.node, Arc::downgrade(&other.shared));
        other.beside().insert(self.node, Arc::downgrade(&self.shared));
    }

    fn beside(&self) -> MutexGuard<'_, HashMap<NodeId, Weak<Shared>>> {
        self.shared.beside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it holds the lock with the state half changed.
        self.shared.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: HypervisorEvent) {
        // Nobody listening is not an error: events are hints.
        let _ = self.shared.events.send(event);
    }

    /// Counts the call, then takes the time and the failure that the knobs ask for.
    async fn enter(&self, operation: Operation, instance: Option<InstanceId>) -> HypervisorResult<()> {
        let (latency, fault) = self.inner().knobs.begin(operation, instance);
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        loop {
            let mut released = std::pin::pin!(self.shared.released.notified());
            // Registered before the check, so that a release in between is not missed.
            released.as_mut().enable();
            if !self.inner().knobs.hangs(operation) {
                break;
            }
            released.await;
        }
        if self.inner().knobs.unreachable {
            return Err(HypervisorError::Unreachable {
                uri: "simulated:///".into(),
                detail: format!("switched off, could not {}", operation.name()),
            });
        }
        fault.map_or(Ok(()), Err)
    }

    /// An error where it is a volume that a domain has.
    fn refuse_used(&self, operation: Operation, volume: InstanceId) -> HypervisorResult<()> {
        match self.inner().host.has_user(volume) {
            true => Err(not_now(operation, volume, "a domain has it")),
            false => Ok(()),
        }
    }

    /// Why a volume's disk is not made here, where a node beside has it.
    fn second(&self, volume: InstanceId) -> Option<String> {
        let others: Vec<_> =
            self.beside().iter().filter_map(|(node, other)| Some((*node, other.upgrade()?))).collect();
        let has = |(node, other): &(NodeId, Arc<Shared>)| {
            let inner = other.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.host.observe(*node, volume).volume
        };
        let beside = others.iter().find(|other| has(other)).map(|(node, _)| *node);
        let other = beside.or_else(|| self.inner().host.other_with(self.node, volume));
        other.map(|node| format!("node {node} has its disk, which is not made once more"))
    }

    /// Runs `change` on the host; when it changed something, counts the effect and tells the listeners.
    fn change(
        &self,
        operation: Operation,
        instance: InstanceId,
        change: impl FnOnce(&mut Host) -> Result<bool, String>,
    ) -> HypervisorResult<()> {
        let mut inner = self.inner();
        let changed = change(&mut inner.host).map_err(|detail| HypervisorError::Failed {
            what: format!("{} {instance}", operation.name()),
            detail,
        })?;
        if changed {
            inner.knobs.count_effect(operation, instance);
            drop(inner);
            self.tell(HypervisorEvent::Changed(instance));
        }
        Ok(())
    }
}

fn not_now(operation: Operation, instance: InstanceId, why: &str) -> HypervisorError {
    HypervisorError::NotNow { what: format!("{} {instance}", operation.name()), detail: why.to_owned() }
}

#[async_trait]
impl Hypervisor for SimulatedHypervisor {
    async fn prepare(&self) -> HypervisorResult<HostInfo> {
        self.enter(Operation::Prepare, None).await?;
        Ok(HostInfo { version: "simulated hypervisor".into(), virt_type: "simulated".into(), bridge: None })
    }

    async fn list(&self) -> HypervisorResult<HashMap<InstanceId, Observed>> {
        self.enter(Operation::List, None).await?;
        Ok(self.inner().host.list(self.node))
    }

    async fn observe(&self, instance: InstanceId) -> HypervisorResult<Observed> {
        self.enter(Operation::Observe, Some(instance)).await?;
        Ok(self.inner().host.observe(self.node, instance))
    }

    async fn create_overlay(
        &self,
        instance: InstanceId,
        base: &BaseImage,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.enter(Operation::CreateOverlay, Some(instance)).await?;
        self.change(Operation::CreateOverlay, instance, |host| {
            host.create_overlay(self.node, instance, base, capacity_bytes)
        })
    }

    async fn create_successor(
        &self,
        instance: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.enter(Operation::CreateSuccessor, Some(instance)).await?;
        self.change(Operation::CreateSuccessor, instance, |host| {
            host.create_successor(self.node, instance, source, capacity_bytes)
        })
    }

    async fn replace_overlay(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::ReplaceOverlay, Some(instance)).await?;
        let is_gone = !self.inner().host.observe(self.node, instance).volume;
        let second = if is_gone { self.second(instance) } else { None };
        self.change(Operation::ReplaceOverlay, instance, |host| {
            second.map_or_else(|| host.replace_overlay(self.node, instance), Err)
        })
    }

    async fn drop_successor(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::DropSuccessor, Some(instance)).await?;
        self.change(Operation::DropSuccessor, instance, |host| host.drop_successor(self.node, instance))
    }

    async fn create_rescue(&self, instance: InstanceId, base: &BaseImage) -> HypervisorResult<()> {
        self.enter(Operation::CreateRescue, Some(instance)).await?;
        self.change(Operation::CreateRescue, instance, |host| host.create_rescue(self.node, instance, base))
    }

    async fn drop_rescue(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::DropRescue, Some(instance)).await?;
        self.change(Operation::DropRescue, instance, |host| host.drop_rescue(self.node, instance))
    }

    async fn define(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.enter(Operation::Define, Some(spec.instance)).await?;
        self.change(Operation::Define, spec.instance, |host| host.define(self.node, spec))
    }

    async fn persist(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let (operation, instance) = (Operation::Persist, spec.instance);
        self.enter(operation, Some(instance)).await?;
        let persisted = self.inner().host.persist(self.node, instance);
        let changed = persisted.ok_or_else(|| not_now(operation, instance, "it ended"))?;
        self.change(operation, instance, |_| Ok(changed))
    }

    async fn create_volume(
        &self,
        volume: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.enter(Operation::CreateVolume, Some(volume)).await?;
        self.refuse_used(Operation::CreateVolume, volume)?;
        if let Some(why) = self.second(volume) {
            return Err(not_now(Operation::CreateVolume, volume, &why));
        }
        self.change(Operation::CreateVolume, volume, |host| {
            host.create_volume(self.node, volume, source, capacity_bytes)
        })
    }

    async fn has_volume(&self, volume: InstanceId) -> HypervisorResult<bool> {
        self.enter(Operation::HasVolume, Some(volume)).await?;
        match self.second(volume) {
            Some(why) => Err(not_now(Operation::HasVolume, volume, &why)),
            None => Ok(self.inner().host.observe(self.node, volume).volume),
        }
    }

    /// Copies take no time of their own here.
    fn give_up_copy(&self, _: InstanceId) {}

    async fn set_volumes(&self, instance: InstanceId, volumes: &[Attachment]) -> HypervisorResult<()> {
        self.enter(Operation::SetVolumes, Some(instance)).await?;
        self.change(Operation::SetVolumes, instance, |host| host.set_volumes(self.node, instance, volumes))
    }

    async fn volumes_of(&self, instance: InstanceId) -> HypervisorResult<Vec<Attachment>> {
        self.enter(Operation::Volumes, Some(instance)).await?;
        let of_all = self.inner().host.volumes();
        let has = of_all.into_iter().find(|(owner, _)| *owner == instance).map(|(_, has)| has.concat());
        let each_once: BTreeSet<Attachment> = has.into_iter().flatten().collect();
        Ok(each_once.into_iter().collect())
    }

    async fn hand_over(&self, volume: InstanceId, node: NodeId) -> HypervisorResult<()> {
        self.enter(Operation::HandOver, Some(volume)).await?;
        let other = self.beside().get(&node).and_then(Weak::upgrade);
        let Some(other) = other.filter(|other| !Arc::ptr_eq(other, &self.shared)) else {
            return self.change(Operation::HandOver, volume, |host| host.hand_over(self.node, volume, node));
        };
        let mut taken = None;
        self.change(Operation::HandOver, volume, |host| {
            taken = host.take_volume(self.node, volume)?;
            Ok(taken.is_some())
        })?;
        if let Some(disk) = taken {
            other.inner.lock().unwrap_or_else(PoisonError::into_inner).host.put_volume(node, volume, disk);
        }
        Ok(())
    }

    async fn disk_bytes(&self, instance: InstanceId) -> HypervisorResult<Option<u64>> {
        self.enter(Operation::DiskBytes, Some(instance)).await?;
        Ok(self.inner().host.disk_bytes(self.node, instance))
    }

    async fn grow_disk(&self, instance: InstanceId, capacity_bytes: u64) -> HypervisorResult<()> {
        self.enter(Operation::GrowDisk, Some(instance)).await?;
        self.change(Operation::GrowDisk, instance, |host| host.grow_disk(self.node, instance, capacity_bytes))
    }

    async fn grow(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.enter(Operation::Grow, Some(spec.instance)).await?;
        self.change(Operation::Grow, spec.instance, |host| host.grow(self.node, spec))
    }

    async fn redefine(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.enter(Operation::Redefine, Some(spec.instance)).await?;
        self.change(Operation::Redefine, spec.instance, |host| host.redefine(self.node, spec))
    }

    async fn start(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::Start, Some(instance)).await?;
        self.change(Operation::Start, instance, |host| host.start(self.node, instance))
    }

    async fn start_rescue(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let instance = spec.instance;
        self.enter(Operation::StartRescue, Some(instance)).await?;
        self.change(Operation::StartRescue, instance, |host| host.start_rescue(self.node, instance))
    }

    async fn resume(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::Resume, Some(instance)).await?;
        self.change(Operation::Resume, instance, |host| host.resume(self.node, instance))
    }

    async fn shut_down(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::ShutDown, Some(instance)).await?;
        self.change(Operation::ShutDown, instance, |host| host.shut_down(self.node, instance))
    }

    async fn power_off(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::PowerOff, Some(instance)).await?;
        self.change(Operation::PowerOff, instance, |host| host.power_off(self.node, instance))
    }

    async fn pause(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::Pause, Some(instance)).await?;
        self.change(Operation::Pause, instance, |host| host.halt(self.node, instance))
    }

    async fn save(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::Save, Some(instance)).await?;
        self.change(Operation::Save, instance, |host| host.save(self.node, instance))
    }

    async fn drop_memory(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::DropMemory, Some(instance)).await?;
        self.change(Operation::DropMemory, instance, |host| host.drop_memory(self.node, instance))
    }

    async fn size(&self, instance: InstanceId) -> HypervisorResult<Option<DomainSize>> {
        self.enter(Operation::Size, Some(instance)).await?;
        Ok(self.inner().host.size(self.node, instance))
    }

    async fn destroy(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.enter(Operation::Destroy, Some(instance)).await?;
        // Of one whose disk is gone nobody loses anything.
        if self.inner().host.observe(self.node, instance).volume {
            self.refuse_used(Operation::Destroy, instance)?;
        }
        self.change(Operation::Destroy, instance, |host| host.destroy(self.node, instance))
    }

    async fn addresses(
        &self,
        instances: &[InstanceId],
    ) -> HypervisorResult<HashMap<InstanceId, Vec<Address>>> {
        self.enter(Operation::Addresses, None).await?;
        Ok(self.inner().host.addresses(self.node, instances))
    }

    async fn network_trouble(&self) -> HypervisorResult<Option<String>> {
        Ok(self.inner().knobs.network_trouble.clone())
    }

    async fn bridge(&self) -> HypervisorResult<Option<String>> {
        Ok(self.inner().knobs.bridge.clone())
    }

    async fn usage(&self, instances: &[InstanceId]) -> HypervisorResult<HashMap<InstanceId, Usage>> {
        self.enter(Operation::Usage, None).await?;
        Ok(self.inner().host.usage(self.node, instances))
    }

    async fn console_tail(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<String> {
        self.enter(Operation::ConsoleTail, Some(instance)).await?;
        Ok(self.inner().host.console_tail(self.node, instance, max_bytes))
    }

    async fn open_console(&self, instance: InstanceId) -> HypervisorResult<Console> {
        self.enter(Operation::OpenConsole, Some(instance)).await?;
        self.begin_console(instance)
    }

    async fn follow_console(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<Printed> {
        self.enter(Operation::FollowConsole, Some(instance)).await?;
        Ok(self.begin_following(instance, max_bytes))
    }

    async fn open_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream> {
        self.enter(Operation::OpenGraphics, Some(instance)).await?;
        self.begin_graphics(instance)
    }

    async fn read_disk(&self, volume: InstanceId) -> HypervisorResult<mpsc::Receiver<Bytes>> {
        self.enter(Operation::ReadDisk, Some(volume)).await?;
        self.begin_reading(volume)
    }

    fn events(&self) -> broadcast::Receiver<HypervisorEvent> {
        self.shared.events.subscribe()
    }
}

//! What a test sets and what it asks for afterwards.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use ec_model::{Attachment, InstanceId};

use super::{Operation, SimulatedHypervisor};
use crate::{End, HypervisorError, HypervisorEvent, Pause, RunState};

#[derive(Debug, Default)]
pub(super) struct Knobs {
    latency: HashMap<Operation, Duration>,
    /// Failures by the number of the call, counted from the first call of all.
    faults: HashMap<Operation, HashMap<u64, HypervisorError>>,
    hanging: HashSet<Operation>,
    pub(super) unreachable: bool,
    pub(super) network_trouble: Option<String>,
    pub(super) bridge: Option<String>,
    calls: HashMap<Operation, u64>,
    calls_of: HashMap<(Operation, InstanceId), u64>,
    effects: HashMap<(Operation, InstanceId), u64>,
}

impl Knobs {
    pub(super) fn begin(
        &mut self,
        operation: Operation,
        instance: Option<InstanceId>,
    ) -> (Duration, Option<HypervisorError>) {
        let calls = self.calls.entry(operation).or_default();
        *calls += 1;
        let fault = self.faults.get_mut(&operation).and_then(|faults| faults.remove(calls));
        if let Some(instance) = instance {
            *self.calls_of.entry((operation, instance)).or_default() += 1;
        }
        (self.latency.get(&operation).copied().unwrap_or_default(), fault)
    }

    pub(super) fn hangs(&self, operation: Operation) -> bool {
        self.hanging.contains(&operation)
    }

    pub(super) fn count_effect(&mut self, operation: Operation, instance: InstanceId) {
        *self.effects.entry((operation, instance)).or_default() += 1;
    }
}

impl SimulatedHypervisor {
    /// Every call of `operation` takes this long before it does anything.
    pub fn set_latency(&self, operation: Operation, latency: Duration) {
        self.inner().knobs.latency.insert(operation, latency);
    }

    /// The next call of `operation` fails with `error` and changes nothing.
    pub fn fail_next(&self, operation: Operation, error: HypervisorError) {
        self.fail_nth(operation, 1, error);
    }

    /// The `nth` call of `operation` from now (1 is the next) fails with `error` and changes nothing.
    pub fn fail_nth(&self, operation: Operation, nth: u64, error: HypervisorError) {
        let mut inner = self.inner();
        let call = inner.knobs.calls.get(&operation).copied().unwrap_or_default() + nth;
        inner.knobs.faults.entry(operation).or_default().insert(call, error);
    }

    /// From now on calls of `operation` do not come back until [`release`](Self::release), and have no
    /// effect before that.
    pub fn hang(&self, operation: Operation) {
        self.inner().knobs.hanging.insert(operation);
    }

    /// Lets calls of `operation` go on, those that hang and those to come.
    pub fn release(&self, operation: Operation) {
        self.inner().knobs.hanging.remove(&operation);
        self.shared.released.notify_waiters();
    }

    /// Takes the hypervisor away or gives it back; guests run on meanwhile. Listeners are told to look at
    /// everything both times.
    pub fn set_unreachable(&self, unreachable: bool) {
        self.inner().knobs.unreachable = unreachable;
        self.tell(HypervisorEvent::LookAtAll);
    }

    /// A network of the guests is not there for that reason, or is there.
    pub fn set_network_trouble(&self, why: Option<&str>) {
        self.inner().knobs.network_trouble = why.map(str::to_owned);
    }

    /// The guests' network has that bridge from now on.
    pub fn set_bridge(&self, bridge: &str) {
        self.inner().knobs.bridge = Some(bridge.to_owned());
    }

    /// Guests started from now on have their address this long after their start.
    pub fn set_address_delay(&self, delay: Duration) {
        self.inner().host.address_delay = delay;
    }

    /// Guests do not hear any more, or hear again, when they are asked to end.
    pub fn set_deaf(&self, deaf: bool) {
        self.inner().host.deaf = deaf;
    }

    /// Guests do not let go of volumes any more, or do again, when these are taken from them; their next starts are without them.
    pub fn set_clinging(&self, clings: bool) {
        self.inner().host.clings = clings;
    }

    /// The guest powers off by itself; nothing happens where it does not run.
    pub fn end_guest(&self, instance: InstanceId) {
        self.end_guest_by(instance, End::ByGuest);
    }

    /// The guest ends for that reason; nothing happens where it does not run.
    pub fn end_guest_by(&self, instance: InstanceId, why: End) {
        if self.inner().host.end(instance, why) {
            self.tell(HypervisorEvent::Changed(instance));
        }
    }

    /// The memory that was saved of the guest is deleted; nothing happens where none was.
    pub fn forget_memory(&self, instance: InstanceId) {
        if self.inner().host.forget_memory(instance) {
            self.tell(HypervisorEvent::Changed(instance));
        }
    }

    /// The guest is paused for that reason; nothing happens where there is no such domain.
    pub fn pause_guest(&self, instance: InstanceId, why: Pause) {
        if self.inner().host.pause(instance, why) {
            self.tell(HypervisorEvent::Changed(instance));
        }
    }

    /// The host is started anew: no guest runs any more, and what was not defined for good is gone.
    pub fn restart_host(&self) {
        self.inner().host.restart();
        self.tell(HypervisorEvent::LookAtAll);
    }

    /// Somebody undefines the domain, as `virsh undefine` does; no event tells.
    pub fn undefine(&self, instance: InstanceId) {
        self.inner().host.undefine(instance);
    }

    /// Somebody deletes the files of all its disks; no event tells.
    pub fn delete_volumes(&self, instance: InstanceId) {
        self.inner().host.delete_volumes(instance);
    }

    /// Somebody deletes the disk's file; no event tells.
    pub fn delete_volume(&self, instance: InstanceId) {
        self.inner().host.delete_volume(instance);
    }

    /// Somebody deletes the copy of this disk that lies beside a snapshot of several; no event tells.
    pub fn delete_copy(&self, snapshot: InstanceId, disk: InstanceId) {
        self.inner().host.delete_copy(snapshot, disk);
    }

    /// What the guest has written to its console; nothing happens where there is no such domain.
    pub fn set_console(&self, instance: InstanceId, text: &str) {
        self.inner().host.set_console(instance, text);
    }

    /// How often `operation` was called, failed and hanging calls included.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.inner().knobs.calls.get(&operation).copied().unwrap_or_default()
    }

    /// How often `operation` was called for `instance`; operations without an instance count nowhere here.
    pub fn calls_of(&self, operation: Operation, instance: InstanceId) -> u64 {
        self.inner().knobs.calls_of.get(&(operation, instance)).copied().unwrap_or_default()
    }

    /// How often `operation` changed something of `instance`: a second start of a running guest is a call
    /// and no effect.
    pub fn effects(&self, operation: Operation, instance: InstanceId) -> u64 {
        self.inner().knobs.effects.get(&(operation, instance)).copied().unwrap_or_default()
    }

    /// Whether there is a disk to boot it from in the place of its own.
    pub fn has_rescue_disk(&self, instance: InstanceId) -> bool {
        self.inner().host.has_rescue_disk(instance)
    }

    /// Whether there is a disk beside its own that is to take the place of that.
    pub fn has_successor(&self, instance: InstanceId) -> bool {
        self.inner().host.has_successor(instance)
    }

    /// The volumes of each domain, as it is defined and of the guest that is up or was saved, in order.
    pub fn volumes(&self) -> Vec<(InstanceId, [Vec<Attachment>; 2])> {
        self.inner().host.volumes()
    }

    /// What the disk of this machine or volume was made of: the path of an image, or the URL of what it is a copy of.
    pub fn origin(&self, instance: InstanceId) -> Option<String> {
        self.inner().host.origin(self.node, instance)
    }

    /// How many processors the guests have that run now, of every node on this host.
    pub fn processors(&self) -> u64 {
        self.inner().host.processors()
    }

    /// How many guests run now, of every node on this host.
    pub fn running(&self) -> usize {
        self.inner().host.count(RunState::Running)
    }
}

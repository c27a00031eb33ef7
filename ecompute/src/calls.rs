//! What the agent calls outside, counted on the way: how often, for how long, and whether it answers.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use ec_calls::{Service, Sign};
use ec_hypervisor::{
    AddressRoom, Console, DomainSize, DomainSpec, HostInfo, Hypervisor, HypervisorError, HypervisorEvent,
    HypervisorResult, Observed, Printed, Usage, VolumeSource,
};
use ec_model::{Address, Attachment, BaseImage, InstanceId, NodeId};
use ec_runtime::Host;
use tokio::{
    net::UnixStream,
    sync::{broadcast, mpsc},
};

/// All that are called.
#[derive(Debug)]
pub(crate) struct Calls {
    pub(crate) etcd: Arc<Service>,
    pub(crate) placement: Arc<Service>,
    pub(crate) libvirt: Arc<Service>,
}

impl Calls {
    /// None yet.
    pub(crate) fn new(host: &Host) -> Self {
        let service = || Arc::new(Service::new(host));
        Self { etcd: service(), placement: service(), libvirt: service() }
    }

    /// By their names.
    pub(crate) fn named(&self) -> [(&'static str, &Service); 3] {
        [("etcd", &self.etcd), ("placement", &self.placement), ("libvirt", &self.libvirt)]
    }
}

/// A hypervisor whose calls are counted.
pub(crate) struct CountedHypervisor(pub(crate) Arc<dyn Hypervisor>, pub(crate) Arc<Service>);

impl CountedHypervisor {
    /// A call about all that is here.
    async fn all<T>(&self, call: impl Future<Output = HypervisorResult<T>>) -> HypervisorResult<T> {
        let sign = |outcome: &HypervisorResult<T>| match outcome {
            Err(
                error @ (HypervisorError::Unreachable { .. }
                | HypervisorError::TimedOut { .. }
                | HypervisorError::Busy { .. }),
            ) => Sign::Silent(error.to_string()),
            _ => Sign::Answered,
        };
        self.1.call(call, sign).await
    }

    /// A call about one instance, whose domain alone may hang.
    async fn one<T>(&self, call: impl Future<Output = HypervisorResult<T>>) -> HypervisorResult<T> {
        let sign = |outcome: &HypervisorResult<T>| match outcome {
            Err(error @ HypervisorError::Unreachable { .. }) => Sign::Silent(error.to_string()),
            Err(HypervisorError::TimedOut { .. } | HypervisorError::Busy { .. }) => Sign::None,
            _ => Sign::Answered,
        };
        self.1.call(call, sign).await
    }
}

#[async_trait]
impl Hypervisor for CountedHypervisor {
    async fn prepare(&self) -> HypervisorResult<HostInfo> {
        self.all(self.0.prepare()).await
    }

    async fn list(&self) -> HypervisorResult<HashMap<InstanceId, Observed>> {
        self.all(self.0.list()).await
    }

    async fn observe(&self, instance: InstanceId) -> HypervisorResult<Observed> {
        self.one(self.0.observe(instance)).await
    }

    async fn create_overlay(
        &self,
        instance: InstanceId,
        base: &BaseImage,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.one(self.0.create_overlay(instance, base, capacity_bytes)).await
    }

    async fn create_successor(
        &self,
        instance: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.one(self.0.create_successor(instance, source, capacity_bytes)).await
    }

    async fn replace_overlay(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.replace_overlay(instance)).await
    }

    async fn drop_successor(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.drop_successor(instance)).await
    }

    async fn create_rescue(&self, instance: InstanceId, base: &BaseImage) -> HypervisorResult<()> {
        self.one(self.0.create_rescue(instance, base)).await
    }

    async fn drop_rescue(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.drop_rescue(instance)).await
    }

    async fn define(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.one(self.0.define(spec)).await
    }

    async fn create_volume(
        &self,
        volume: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.one(self.0.create_volume(volume, source, capacity_bytes)).await
    }

    fn give_up_copy(&self, owner: InstanceId) {
        self.0.give_up_copy(owner);
    }

    async fn set_volumes(&self, instance: InstanceId, volumes: &[Attachment]) -> HypervisorResult<()> {
        self.one(self.0.set_volumes(instance, volumes)).await
    }

    async fn volumes_of(&self, instance: InstanceId) -> HypervisorResult<Vec<Attachment>> {
        self.one(self.0.volumes_of(instance)).await
    }

    async fn has_volume(&self, volume: InstanceId) -> HypervisorResult<bool> {
        self.one(self.0.has_volume(volume)).await
    }

    async fn hand_over(&self, volume: InstanceId, node: NodeId) -> HypervisorResult<()> {
        self.one(self.0.hand_over(volume, node)).await
    }

    async fn disk_bytes(&self, instance: InstanceId) -> HypervisorResult<Option<u64>> {
        self.one(self.0.disk_bytes(instance)).await
    }

    async fn grow_disk(&self, instance: InstanceId, capacity_bytes: u64) -> HypervisorResult<()> {
        self.one(self.0.grow_disk(instance, capacity_bytes)).await
    }

    async fn persist(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.one(self.0.persist(spec)).await
    }

    async fn grow(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.one(self.0.grow(spec)).await
    }

    async fn redefine(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.one(self.0.redefine(spec)).await
    }

    async fn start(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.start(instance)).await
    }

    async fn start_rescue(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.one(self.0.start_rescue(spec)).await
    }

    async fn resume(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.resume(instance)).await
    }

    async fn shut_down(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.shut_down(instance)).await
    }

    async fn power_off(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.power_off(instance)).await
    }

    async fn pause(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.pause(instance)).await
    }

    async fn save(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.save(instance)).await
    }

    async fn drop_memory(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.drop_memory(instance)).await
    }

    async fn size(&self, instance: InstanceId) -> HypervisorResult<Option<DomainSize>> {
        self.one(self.0.size(instance)).await
    }

    async fn destroy(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.one(self.0.destroy(instance)).await
    }

    async fn addresses(
        &self,
        instances: &[InstanceId],
    ) -> HypervisorResult<HashMap<InstanceId, Vec<Address>>> {
        if instances.is_empty() {
            // Answered without asking anybody.
            return self.0.addresses(instances).await;
        }
        self.all(self.0.addresses(instances)).await
    }

    async fn usage(&self, instances: &[InstanceId]) -> HypervisorResult<HashMap<InstanceId, Usage>> {
        self.all(self.0.usage(instances)).await
    }

    async fn console_tail(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<String> {
        // A file of this host: it says nothing of the hypervisor.
        self.0.console_tail(instance, max_bytes).await
    }

    async fn open_console(&self, instance: InstanceId) -> HypervisorResult<Console> {
        self.one(self.0.open_console(instance)).await
    }

    async fn follow_console(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<Printed> {
        // As above.
        self.0.follow_console(instance, max_bytes).await
    }

    async fn open_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream> {
        self.one(self.0.open_graphics(instance)).await
    }

    async fn read_disk(&self, volume: InstanceId) -> HypervisorResult<mpsc::Receiver<Bytes>> {
        self.one(self.0.read_disk(volume)).await
    }

    async fn address_room(&self) -> HypervisorResult<Option<AddressRoom>> {
        self.all(self.0.address_room()).await
    }

    async fn network_trouble(&self) -> HypervisorResult<Option<String>> {
        self.all(self.0.network_trouble()).await
    }

    async fn bridge(&self) -> HypervisorResult<Option<String>> {
        self.all(self.0.bridge()).await
    }

    async fn protect(&self) -> HypervisorResult<()> {
        self.all(self.0.protect()).await
    }

    fn events(&self) -> broadcast::Receiver<HypervisorEvent> {
        self.0.events()
    }
}

#[cfg(test)]
mod tests {
    use ec_hypervisor::{Operation, SimulatedHypervisor};
    use ec_model::NodeId;

    use super::*;

    fn timed_out() -> HypervisorError {
        HypervisorError::TimedOut { what: "it".to_owned(), seconds: 30 }
    }

    #[tokio::test]
    async fn a_domain_that_hangs_is_not_a_hypervisor_that_is_away() {
        let simulated = Arc::new(SimulatedHypervisor::new(NodeId::new(uuid::Uuid::from_u128(9))));
        let calls = Calls::new(&Host::default());
        let counted = CountedHypervisor(Arc::clone(&simulated) as _, Arc::clone(&calls.libvirt));
        let one = InstanceId::new(uuid::Uuid::from_u128(1));
        let up = || calls.libvirt.part.standing().ok;
        counted.addresses(&[]).await.unwrap();
        counted.console_tail(one, 1).await.unwrap();
        assert!(!up(), "neither asked it");
        counted.list().await.unwrap();
        assert!(up());
        simulated.fail_next(Operation::Observe, timed_out());
        counted.observe(one).await.unwrap_err();
        assert!(up(), "one domain");
        simulated.fail_next(Operation::List, timed_out());
        counted.list().await.unwrap_err();
        assert!(!up(), "all of it");
        counted.observe(one).await.unwrap();
        assert!(up());
        simulated.set_unreachable(true);
        counted.observe(one).await.unwrap_err();
        assert!(!up());
        assert_eq!(calls.libvirt.failures.get(), 3);
    }
}

//! What the agent calls outside, counted on the way: how often, for how long, and whether it answers.
//!
//! Each is handed on as it is, behind the same trait; so nothing else in the agent need count.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use ec_hypervisor::{
    Console, DomainSize, DomainSpec, HostInfo, Hypervisor, HypervisorError, HypervisorEvent,
    HypervisorResult, Observed, Usage,
};
use ec_model::{Address, BaseImage, InstanceId};
use ec_placement_client::{Answer, Request, Transport};
use ec_runtime::Host;
use ec_serve::metrics::{Counter, Histogram};
use ec_store::{
    KeyValue, LeaseId, Listing, Revision, Server, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch,
};
use tokio::{
    net::UnixStream,
    sync::{broadcast, mpsc},
    time::Instant,
};

use crate::standing::Part;

/// Microseconds.
const BOUNDS: [u64; 9] = [1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 5_000_000, 30_000_000];

/// One that is called.
#[derive(Debug)]
pub(crate) struct Service {
    /// Whether it answers.
    pub(crate) part: Part,
    /// How long calls took, those that failed among them.
    pub(crate) durations: Histogram<9>,
    /// Calls that failed.
    pub(crate) failures: Counter,
}

/// What a call tells of whether its service answers.
enum Sign {
    Answered,
    Silent(String),
    /// One thing of it hangs; the rest may answer.
    None,
}

impl Service {
    fn new(host: &Host) -> Self {
        Self { part: Part::new(host), durations: Histogram::of_times(BOUNDS), failures: Counter::default() }
    }

    async fn call<T, E>(
        &self,
        call: impl Future<Output = Result<T, E>>,
        sign: impl FnOnce(&Result<T, E>) -> Sign,
    ) -> Result<T, E> {
        let began = Instant::now();
        let outcome = call.await;
        self.durations.took(began.elapsed());
        self.failures.add(u64::from(outcome.is_err()));
        match sign(&outcome) {
            Sign::Answered => self.part.up(),
            Sign::Silent(why) => self.part.down(why),
            Sign::None => {}
        }
        outcome
    }
}

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

/// A store whose calls are counted. What a watch brings later is none.
pub(crate) struct CountedStore(pub(crate) Arc<dyn Store>, pub(crate) Arc<Service>);

impl CountedStore {
    async fn call<T>(&self, call: impl Future<Output = StoreResult<T>>) -> StoreResult<T> {
        let sign = |outcome: &Result<_, StoreError>| match outcome {
            Err(error) if error.is_transient() => Sign::Silent(error.to_string()),
            _ => Sign::Answered,
        };
        self.1.call(call, sign).await
    }
}

#[async_trait]
impl Store for CountedStore {
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        self.call(self.0.get(key)).await
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.call(self.0.get_at(key, revision)).await
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.call(self.0.list(prefix)).await
    }

    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        self.call(self.0.keys(prefix)).await
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        self.call(self.0.txn(txn)).await
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.call(self.0.watch(prefix, from)).await
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        self.call(self.0.grant(ttl)).await
    }

    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId> {
        self.call(self.0.grant_for(key, ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.call(self.0.keep_alive(lease)).await
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.call(self.0.revoke(lease)).await
    }

    async fn server(&self) -> StoreResult<Server> {
        self.call(self.0.server()).await
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        self.call(self.0.compact(revision)).await
    }
}

/// A way to placement whose calls are counted.
pub(crate) struct CountedTransport(pub(crate) Arc<dyn Transport>, pub(crate) Arc<Service>);

#[async_trait]
impl Transport for CountedTransport {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        // A refusal is an answer; a server's own failure is as good as none.
        let sign = |outcome: &Result<Answer, String>| match outcome {
            Err(why) => Sign::Silent(why.clone()),
            Ok(answer) if answer.status.is_server_error() => {
                Sign::Silent(format!("it answers HTTP {}", answer.status.as_u16()))
            }
            Ok(_) => Sign::Answered,
        };
        self.1.call(self.0.exchange(request), sign).await
    }
}

/// A hypervisor whose calls are counted.
pub(crate) struct CountedHypervisor(pub(crate) Arc<dyn Hypervisor>, pub(crate) Arc<Service>);

impl CountedHypervisor {
    /// A call about all that is here.
    async fn all<T>(&self, call: impl Future<Output = HypervisorResult<T>>) -> HypervisorResult<T> {
        let sign = |outcome: &HypervisorResult<T>| match outcome {
            Err(error @ (HypervisorError::Unreachable { .. } | HypervisorError::TimedOut { .. })) => {
                Sign::Silent(error.to_string())
            }
            _ => Sign::Answered,
        };
        self.1.call(call, sign).await
    }

    /// A call about one instance, whose domain alone may hang.
    async fn one<T>(&self, call: impl Future<Output = HypervisorResult<T>>) -> HypervisorResult<T> {
        let sign = |outcome: &HypervisorResult<T>| match outcome {
            Err(error @ HypervisorError::Unreachable { .. }) => Sign::Silent(error.to_string()),
            Err(HypervisorError::TimedOut { .. }) => Sign::None,
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
        base: &BaseImage,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        self.one(self.0.create_successor(instance, base, capacity_bytes)).await
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

    async fn follow_console(
        &self,
        instance: InstanceId,
        max_bytes: usize,
    ) -> HypervisorResult<mpsc::Receiver<Bytes>> {
        // As above.
        self.0.follow_console(instance, max_bytes).await
    }

    async fn open_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream> {
        self.one(self.0.open_graphics(instance)).await
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
    use ec_store::MemoryStore;
    use reqwest::StatusCode;

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

    struct Says(Result<u16, &'static str>);

    #[async_trait]
    impl Transport for Says {
        async fn exchange(&self, _: Request) -> Result<Answer, String> {
            let status = self.0.map_err(str::to_owned)?;
            Ok(Answer { status: StatusCode::from_u16(status).unwrap(), body: Vec::new(), ahead: None })
        }
    }

    #[tokio::test]
    async fn a_refusal_is_an_answer_and_a_servers_failure_is_none() {
        let calls = Calls::new(&Host::default());
        for (says, up) in [(Ok(200), true), (Ok(503), false), (Ok(404), true), (Err("gone"), false)] {
            let counted = CountedTransport(Arc::new(Says(says)), Arc::clone(&calls.placement));
            let (method, url) = (reqwest::Method::GET, "http://placement".parse().unwrap());
            let request = Request { method, url, headers: Default::default(), body: None };
            assert_eq!(
                counted.exchange(request).await.map(|answer| answer.status.as_u16()).is_ok(),
                says.is_ok()
            );
            assert_eq!(calls.placement.part.standing().ok, up, "{says:?}");
        }
        assert_eq!(calls.placement.failures.get(), 1);

        let (store, etcd) = (MemoryStore::new(), Arc::clone(&calls.etcd));
        let counted = CountedStore(Arc::new(store.clone()), etcd);
        counted.keep_alive(LeaseId(7)).await.unwrap_err();
        assert!(calls.etcd.part.standing().ok, "it answers that there is no such lease");
        store.faults().set_reachable(false);
        counted.get("/x").await.unwrap_err();
        assert!(!calls.etcd.part.standing().ok);
    }
}

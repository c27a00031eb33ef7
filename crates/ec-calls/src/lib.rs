//! What a program calls outside, counted on the way: how often, for how long, and whether it answers.
//!
//! Each is handed on as it is, behind the same trait; so nothing else in the program need count.

mod standing;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ec_placement_client::{Answer, Request, Transport};
use ec_runtime::Host;
use ec_serve::metrics::{Counter, Exposition, Histogram};
use ec_store::{
    KeyValue, LeaseId, Listing, Revision, Server, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch,
};
pub use standing::{Part, Standing, parts, readiness, write_parts};
use tokio::time::Instant;

/// Microseconds.
const BOUNDS: [u64; 9] = [1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 5_000_000, 30_000_000];

/// One that is called.
#[derive(Debug)]
pub struct Service {
    /// Whether it answers.
    pub part: Part,
    /// How long calls took, those that failed among them.
    pub durations: Histogram<9>,
    /// Calls that failed.
    pub failures: Counter,
}

/// What a call tells of whether its service answers.
pub enum Sign {
    /// It answers.
    Answered,
    /// It does not, and why.
    Silent(String),
    /// Neither: one thing of it hangs, and the rest may answer; or it answers, and does no more than that.
    None,
}

impl Service {
    /// Not called yet.
    pub fn new(host: &Host) -> Self {
        Self { part: Part::new(host), durations: Histogram::of_times(BOUNDS), failures: Counter::default() }
    }

    /// Counts a call; `sign` says what it tells.
    pub async fn call<T, E>(
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

/// The calls, as a program of this name shows them in its numbers.
pub fn write_calls(text: &mut Exposition, program: &str, services: &[(&'static str, &Service)]) {
    let name = format!("{program}_call_duration_seconds");
    let mut family = text.histograms(&name, "Calls to what the program stands on.");
    for (service, calls) in services {
        family.histogram(&[("service", *service)], &calls.durations);
    }
    let name = format!("{program}_call_failures_total");
    let mut family = text.counters(&name, "Of these, those that failed.");
    for (service, calls) in services {
        family.sample(&[("service", *service)], calls.failures.get());
    }
}

/// A store whose calls are counted. What a watch brings later is none.
pub struct CountedStore {
    store: Arc<dyn Store>,
    calls: Arc<Service>,
    /// It had no space for a change, and was not seen to have some since.
    full: AtomicBool,
}

impl CountedStore {
    /// Counts the calls of this store there.
    pub fn new(store: Arc<dyn Store>, calls: Arc<Service>) -> Self {
        Self { store, calls, full: AtomicBool::new(false) }
    }

    async fn call<T>(&self, call: impl Future<Output = StoreResult<T>>) -> StoreResult<T> {
        let sign = |outcome: &Result<_, StoreError>| match outcome {
            Err(error) if error.is_transient() => Sign::Silent(error.to_string()),
            Err(error @ StoreError::Full(_)) => {
                self.full.store(true, Ordering::Relaxed);
                Sign::Silent(error.to_string())
            }
            // It still answers reads.
            _ if self.full.load(Ordering::Relaxed) => Sign::None,
            _ => Sign::Answered,
        };
        let outcome = self.calls.call(call, sign).await;
        // Who wants nothing more to be changed would never hear that changes are taken again.
        if outcome.is_ok()
            && self.full.load(Ordering::Relaxed)
            && let Ok(server) = self.store.server().await
        {
            match server.trouble() {
                None => {
                    self.full.store(false, Ordering::Relaxed);
                    self.calls.part.up();
                }
                Some((what, remedy)) => self.calls.part.down(format!("{what}; what helps: {remedy}")),
            }
        }
        outcome
    }
}

#[async_trait]
impl Store for CountedStore {
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        self.call(self.store.get(key)).await
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.call(self.store.get_at(key, revision)).await
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.call(self.store.list(prefix)).await
    }

    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        self.call(self.store.keys(prefix)).await
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        self.call(self.store.txn(txn)).await
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        self.call(self.store.watch(prefix, from)).await
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        self.call(self.store.grant(ttl)).await
    }

    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId> {
        self.call(self.store.grant_for(key, ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.call(self.store.keep_alive(lease)).await
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.call(self.store.revoke(lease)).await
    }

    async fn server(&self) -> StoreResult<Server> {
        self.call(self.store.server()).await
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        self.call(self.store.compact(revision)).await
    }
}

/// A way to placement whose calls are counted.
pub struct CountedTransport(pub Arc<dyn Transport>, pub Arc<Service>);

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

#[cfg(test)]
mod tests {
    use ec_store::MemoryStore;
    use reqwest::StatusCode;

    use super::*;

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
        let (placement, etcd) =
            (Arc::new(Service::new(&Host::default())), Arc::new(Service::new(&Host::default())));
        for (says, up) in [(Ok(200), true), (Ok(503), false), (Ok(404), true), (Err("gone"), false)] {
            let counted = CountedTransport(Arc::new(Says(says)), Arc::clone(&placement));
            let (method, url) = (reqwest::Method::GET, "http://placement".parse().unwrap());
            let request = Request { method, url, headers: Default::default(), body: None };
            assert_eq!(
                counted.exchange(request).await.map(|answer| answer.status.as_u16()).is_ok(),
                says.is_ok()
            );
            assert_eq!(placement.part.standing().ok, up, "{says:?}");
        }
        assert_eq!(placement.failures.get(), 1);

        let store = MemoryStore::new();
        let counted = CountedStore::new(Arc::new(store.clone()), Arc::clone(&etcd));
        counted.keep_alive(LeaseId(7)).await.unwrap_err();
        assert!(etcd.part.standing().ok, "it answers that there is no such lease");
        store.faults().set_reachable(false);
        counted.get("/x").await.unwrap_err();
        assert!(!etcd.part.standing().ok);
    }
    #[tokio::test]
    async fn a_store_without_space_is_not_as_it_must_be_until_it_has_some() {
        let (store, etcd) = (MemoryStore::new(), Arc::new(Service::new(&Host::default())));
        let counted = CountedStore::new(Arc::new(store.clone()), Arc::clone(&etcd));
        let write = || counted.txn(Txn::new().put("/x", "y"));
        write().await.unwrap();
        store.faults().fail_writes(Some(StoreError::Full("database space exceeded".into())));
        counted.get("/x").await.unwrap();
        assert!(etcd.part.standing().ok, "nobody knows yet");
        write().await.unwrap_err();
        counted.get("/x").await.unwrap();
        let standing = etcd.part.standing();
        assert!(!standing.ok && standing.why.unwrap().contains("alarm disarm"));
        store.faults().set_reachable(false);
        counted.get("/x").await.unwrap_err();
        assert!(etcd.part.standing().why.unwrap().contains("not reachable"));
        store.faults().set_reachable(true);
        counted.get("/x").await.unwrap();
        assert!(etcd.part.standing().why.unwrap().contains("no space"));
        store.faults().fail_writes(None);
        counted.get("/x").await.unwrap();
        assert!(etcd.part.standing().ok, "also where nothing more is written");
    }
}

//! Performing effects for one instance. Each is idempotent; between any two a crash is safe.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{DomainSpec, HypervisorError};
use ec_image::ImageError;
use ec_metadata::{InstanceRecord, RecordDir};
use ec_model::{
    Address, IndexEntry, InstanceId, Observed, Progress, RECORD_VERSION, Request, Resources, State, Status,
    encode,
};
use ec_placement_client::PlacementError;
use ec_plan::Effect;
use ec_store::{Compare, Revision, StoreError, Txn};
use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::parts::Parts;

/// How long the status of a failed instance can be read before it goes by itself.
pub(crate) const ERROR_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Progress is for people: once a second is enough, and keeps etcd's history small.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

/// How much of a failed guest's console goes with its ERROR.
const CONSOLE_TAIL_BYTES: usize = 4096;

/// What is to be done for an instance.
#[derive(Debug)]
pub(crate) enum Work {
    /// These effects, in order.
    Effects(&'static [Effect]),
    /// Write ERROR with this reason.
    Fail(String),
    /// Write these addresses, which also makes it ACTIVE.
    Addresses(Vec<Address>),
}

/// Everything a worker needs to know of its instance.
#[derive(Debug)]
pub(crate) struct Job {
    /// The instance.
    pub(crate) instance: InstanceId,
    /// What to do.
    pub(crate) work: Work,
    /// Its request, where there is a readable one.
    pub(crate) request: Option<Request>,
    /// The revision of its request's key, where there is one.
    pub(crate) request_revision: Option<Revision>,
    /// Its status as last written.
    pub(crate) status: Option<Status>,
    /// What it holds in placement.
    pub(crate) allocated: Option<Resources>,
}

/// How a job ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// All was done.
    Done,
    /// It was asked to stop, at a safe point.
    Abandoned,
    /// For a passing reason; try again later.
    Retry(String),
    /// For good.
    Failed(String),
}

/// What the driver learns of a job's end.
#[derive(Debug)]
pub(crate) struct Report {
    /// The instance.
    pub(crate) instance: InstanceId,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// The status as it now lies in etcd.
    pub(crate) status: Option<Status>,
    /// What the hypervisor has now; `None` where it could not be asked or need not be.
    pub(crate) observed: Option<Observed>,
    /// Whether the node's record is there now.
    pub(crate) record: Option<bool>,
    /// Whether the allocation was given back.
    pub(crate) released: bool,
    /// Whether the request's key was deleted by this job.
    pub(crate) request_dropped: bool,
}

enum Stop {
    Abandoned,
    Retry(String),
    Failed(String),
}

impl From<StoreError> for Stop {
    // etcd may refuse for a while (no space, no quorum): nothing about the instance is wrong.
    fn from(error: StoreError) -> Self {
        Self::Retry(error.to_string())
    }
}

impl From<PlacementError> for Stop {
    fn from(error: PlacementError) -> Self {
        Self::Retry(error.to_string())
    }
}

impl From<HypervisorError> for Stop {
    fn from(error: HypervisorError) -> Self {
        if error.is_transient() { Self::Retry(error.to_string()) } else { Self::Failed(error.to_string()) }
    }
}

impl From<ImageError> for Stop {
    fn from(error: ImageError) -> Self {
        Self::Failed(ec_runtime::exit::chain(&error))
    }
}

/// Performs a job to its end.
pub(crate) async fn perform(
    parts: Arc<Parts>,
    pool: Arc<Semaphore>,
    job: Job,
    cancel: CancellationToken,
) -> Report {
    let mut worker = Worker {
        report: Report {
            instance: job.instance,
            outcome: Outcome::Done,
            status: job.status.clone(),
            observed: None,
            record: None,
            released: false,
            request_dropped: false,
        },
        parts,
        pool,
        permit: None,
        cancel,
        job,
        touched_hypervisor: false,
    };
    let stopped = worker.run().await;
    worker.report.outcome = match stopped {
        Ok(()) => Outcome::Done,
        Err(Stop::Abandoned) => Outcome::Abandoned,
        Err(Stop::Retry(why)) => Outcome::Retry(why),
        Err(Stop::Failed(why)) => Outcome::Failed(why),
    };
    if worker.touched_hypervisor {
        worker.report.observed = worker.parts.hypervisor.observe(worker.job.instance).await.ok();
    }
    worker.report
}

struct Worker {
    parts: Arc<Parts>,
    pool: Arc<Semaphore>,
    /// Held from the first effect that loads the host until the end of the job.
    permit: Option<OwnedSemaphorePermit>,
    cancel: CancellationToken,
    job: Job,
    report: Report,
    touched_hypervisor: bool,
}

impl Worker {
    async fn run(&mut self) -> Result<(), Stop> {
        match &mut self.job.work {
            Work::Effects(effects) => {
                for effect in *effects {
                    if self.cancel.is_cancelled() {
                        return Err(Stop::Abandoned);
                    }
                    pause_for_test(*effect);
                    self.effect(*effect).await?;
                }
                Ok(())
            }
            Work::Fail(reason) => {
                let reason = std::mem::take(reason);
                self.fail(reason).await
            }
            Work::Addresses(addresses) => {
                let addresses = std::mem::take(addresses);
                pause_for_test_named("before-addresses");
                let mut status = self.next_status(State::Active);
                status.ip =
                    addresses.iter().find(|address| address.nic == 0).or(addresses.first()).map(|a| a.ip);
                status.addresses = addresses;
                self.write(status).await
            }
        }
    }

    async fn effect(&mut self, effect: Effect) -> Result<(), Stop> {
        let instance = self.job.instance;
        tracing::debug!(%instance, ?effect, "acting");
        let parts = Arc::clone(&self.parts);
        match effect {
            Effect::Announce(state) => {
                let status = self.next_status(state);
                self.write(status).await
            }
            Effect::PrepareDisk => self.prepare_disk().await,
            Effect::Define => {
                self.take_permit().await?;
                let spec = self.domain_spec()?;
                self.touched_hypervisor = true;
                Ok(parts.hypervisor.define(&spec).await?)
            }
            Effect::Start => {
                self.take_permit().await?;
                self.touched_hypervisor = true;
                Ok(parts.hypervisor.start(instance).await?)
            }
            Effect::NoteStart => {
                let mut status = self.next_status(State::Starting);
                status.started_at = Some(status.updated_at);
                self.write(status).await
            }
            Effect::RemoveDomain => {
                self.take_permit().await?;
                self.touched_hypervisor = true;
                parts.hypervisor.destroy(instance).await.map_err(|error| Stop::Retry(error.to_string()))
            }
            Effect::DropRecord => {
                self.records(move |records| records.remove(instance)).await?;
                self.report.record = Some(false);
                Ok(())
            }
            Effect::Release => {
                parts.placement.release(instance).await?;
                self.report.released = true;
                Ok(())
            }
            Effect::DropKeys => self.drop_keys().await,
            Effect::EndInError => self.end_in_error().await,
        }
    }

    async fn prepare_disk(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let parts = Arc::clone(&self.parts);
        let request = self.request()?.clone();
        let Some(wanted) = &request.image else {
            return Err(Stop::Failed("its request names no image".to_owned()));
        };
        let disk_gb = self.job.allocated.as_ref().and_then(|amounts| amounts.get("DISK_GB")).copied();
        let disk_bytes = disk_gb.map(|gb| gb.saturating_mul(1 << 30));

        let (progress, mut steps) = watch::channel(None::<Progress>);
        let fetch = parts.images.fetch(wanted, disk_bytes, progress);
        tokio::pin!(fetch);
        let mut period = tokio::time::interval(PROGRESS_PERIOD);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick comes at once, when there is nothing to tell yet.
        period.tick().await;
        let cancel = self.cancel.clone();
        let image = loop {
            tokio::select! {
                image = &mut fetch => break image?,
                () = cancel.cancelled() => return Err(Stop::Abandoned),
                _ = period.tick() => {
                    let step = steps.borrow_and_update().clone();
                    if step.is_some() && self.report.status.as_ref().is_none_or(|status| status.progress != step) {
                        let mut status = self.next_status(State::Preparing);
                        status.progress = step;
                        // Not telling progress must not end a download.
                        self.write(status).await.ok();
                    }
                }
            }
        };

        self.take_permit().await?;
        let record = InstanceRecord {
            version: RECORD_VERSION,
            instance,
            name: hostname(&request),
            macs: self.macs(),
            base_digest: Some(image.base.digest.clone()),
            keys: request.keys.clone(),
            user_data: request.user_data.clone(),
            token_required: false,
            project: request.project.clone(),
            created_at: request.created_at,
        };
        self.records(move |records| records.put(&record)).await?;
        self.report.record = Some(true);
        pause_for_test_named("before-overlay");
        let capacity = disk_bytes.filter(|_| parts.settings.resize);
        self.touched_hypervisor = true;
        parts.hypervisor.create_overlay(instance, &image.base, capacity).await?;
        Ok(())
    }

    /// Works on the node's records, which waits for the disk.
    async fn records<T, E>(
        &self,
        work: impl FnOnce(&RecordDir) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Stop>
    where
        T: Send + 'static,
        E: std::error::Error + Send + 'static,
    {
        let records = Arc::clone(&self.parts.records);
        tokio::task::spawn_blocking(move || work(&records))
            .await
            .map_err(|error| Stop::Retry(error.to_string()))?
            .map_err(|error| Stop::Retry(ec_runtime::exit::chain(&error)))
    }

    fn macs(&self) -> Vec<ec_model::MacAddr> {
        (0..self.parts.settings.nics()).map(|nic| self.job.instance.mac(nic)).collect()
    }

    fn domain_spec(&self) -> Result<DomainSpec, Stop> {
        let amount = |class: &str| {
            self.job
                .allocated
                .as_ref()
                .and_then(|amounts| amounts.get(class))
                .copied()
                .filter(|amount| *amount > 0)
        };
        let missing = |class: &str| {
            Stop::Failed(format!("its allocation has no {class}, which a virtual machine needs"))
        };
        Ok(DomainSpec {
            instance: self.job.instance,
            title: hostname(self.request()?),
            vcpus: amount("VCPU").ok_or_else(|| missing("VCPU"))?,
            memory_mb: amount("MEMORY_MB").ok_or_else(|| missing("MEMORY_MB"))?,
        })
    }

    fn request(&self) -> Result<&Request, Stop> {
        self.job.request.as_ref().ok_or_else(|| Stop::Failed("its request cannot be read".to_owned()))
    }

    /// Waiting for a place in the pool ends when the work is not wanted any more.
    async fn take_permit(&mut self) -> Result<(), Stop> {
        if self.permit.is_none() {
            let acquired = tokio::select! {
                acquired = Arc::clone(&self.pool).acquire_owned() => acquired,
                () = self.cancel.cancelled() => return Err(Stop::Abandoned),
            };
            self.permit = Some(acquired.map_err(|_| Stop::Abandoned)?);
        }
        Ok(())
    }

    async fn fail(&mut self, reason: String) -> Result<(), Stop> {
        let mut status = self.next_status(State::Error);
        if status.started_at.is_some() {
            let console = self.parts.hypervisor.console_tail(self.job.instance, CONSOLE_TAIL_BYTES).await;
            status.console = console.ok().filter(|text| !text.is_empty());
        }
        tracing::warn!(instance = %self.job.instance, reason, "instance failed");
        status.reason = Some(reason);
        self.write(status).await
    }

    async fn drop_keys(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let keys = &self.parts.settings.keys;
        let txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(self.parts.status_key(instance))
            .delete(keys.instance(instance));
        self.end(txn).await?;
        self.report.status = None;
        Ok(())
    }

    /// The request goes; status and index stay, on a lease, for people to read.
    async fn end_in_error(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let mut status = self.next_status(State::Error);
        status.reason = self.report.status.as_ref().and_then(|old| old.reason.clone());
        status.console = self.report.status.as_ref().and_then(|old| old.console.clone());
        let index = IndexEntry { version: RECORD_VERSION, node: self.parts.node, name: status.name.clone() };
        let lease = self.parts.store.grant(ERROR_RETENTION).await?;
        let txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .put_leased(self.parts.status_key(instance), encode(&status), lease)
            .put_leased(self.parts.settings.keys.instance(instance), encode(&index), lease);
        let ended = self.end(txn).await;
        if ended.is_err() {
            // Where the outcome is unknown the keys may hang on it: they would go with it, so it stays
            // only if it may be in use.
            if matches!(ended, Err(Stop::Abandoned)) {
                self.parts.store.revoke(lease).await.ok();
            }
            return ended;
        }
        self.report.status = Some(status);
        Ok(())
    }

    /// Commits the end of a request, unless somebody changed it meanwhile: then all is decided anew.
    async fn end(&mut self, txn: Txn) -> Result<(), Stop> {
        if self.parts.store.txn(txn).await?.succeeded {
            self.report.request_dropped = true;
            Ok(())
        } else {
            Err(Stop::Abandoned)
        }
    }

    fn request_as_seen(&self) -> Compare {
        let key = self.parts.request_key(self.job.instance);
        match self.job.request_revision {
            Some(revision) => Compare::Unchanged(key, revision),
            None => Compare::Absent(key),
        }
    }

    /// The status to write next: what was known, in this state, now.
    fn next_status(&self, state: State) -> Status {
        let now = Timestamp::now();
        let old = self.report.status.as_ref();
        Status {
            version: RECORD_VERSION,
            instance: self.job.instance,
            node: self.parts.node,
            state,
            reason: None,
            progress: None,
            ip: old.and_then(|old| old.ip),
            addresses: old.map(|old| old.addresses.clone()).unwrap_or_default(),
            name: self.job.request.as_ref().map(hostname).or_else(|| old.and_then(|old| old.name.clone())),
            console: None,
            since: old.filter(|old| old.state == state).map_or(now, |old| old.since),
            started_at: old.and_then(|old| old.started_at),
            updated_at: now,
        }
    }

    async fn write(&mut self, status: Status) -> Result<(), Stop> {
        let key = self.parts.status_key(self.job.instance);
        self.parts.store.txn(Txn::new().put(key, encode(&status))).await?;
        self.report.status = Some(status);
        Ok(())
    }
}

/// The guest's hostname: as asked for, else made from the uuid's first part.
pub(crate) fn hostname(request: &Request) -> String {
    request.name.clone().unwrap_or_else(|| {
        let uuid = request.instance.to_string();
        format!("vm-{}", uuid.split('-').next().unwrap_or(&uuid))
    })
}

/// A named stop for crash tests; nothing at all in a shipped binary.
fn pause_for_test(effect: Effect) {
    let name = match effect {
        Effect::Announce(_) => "before-announce",
        Effect::PrepareDisk => "before-disk",
        Effect::Define => "before-define",
        Effect::Start => "before-start",
        Effect::NoteStart => "before-note-start",
        Effect::RemoveDomain => "before-remove-domain",
        Effect::DropRecord => "before-drop-record",
        Effect::Release => "before-release",
        Effect::DropKeys => "before-drop-keys",
        Effect::EndInError => "before-end-in-error",
    };
    pause_for_test_named(name);
}

#[cfg(feature = "failpoints")]
fn pause_for_test_named(name: &'static str) {
    // Tests wait for this line before they kill.
    tracing::info!(point = name, "failpoint");
    // A point that sleeps holds up its own instance only.
    tokio::task::block_in_place(|| fail::fail_point!(name));
}

#[cfg(not(feature = "failpoints"))]
fn pause_for_test_named(_: &'static str) {}

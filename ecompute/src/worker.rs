//! Performing effects for one instance. Each is idempotent; between any two a crash is safe.

mod guest;

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{HypervisorError, RunState};
use ec_image::ImageError;
use ec_metadata::InstanceRecord;
use ec_model::{Address, InstanceId, Observed, RECORD_VERSION, Request, Resources, State, Status, encode};
use ec_placement_client::PlacementError;
use ec_plan::{Effect, RecordFacts};
use ec_runtime::planted;
use ec_store::{Compare, Revision, StoreError, Txn};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    look::ask_placement,
    parts::Parts,
    register::refresh,
    world::{Held, StatusEntry},
};

/// How long the status of a failed instance can be read before it goes by itself.
pub(crate) const ERROR_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Nothing is written under a node that may be another's by now, nor of a request that is another by now.
const NOT_OURS: &str = "this node's key in etcd is not ours at this moment, or the request has just changed";

/// How much of a failed guest's console goes with its ERROR.
const CONSOLE_TAIL_BYTES: usize = 4096;

/// What is to be done for an instance.
#[derive(Debug)]
pub(crate) enum Work {
    /// These effects, in order.
    Effects(Vec<Effect>),
    /// Write ERROR with this reason.
    Fail(String),
    /// Write these addresses of a guest that runs, which makes one that was requested ACTIVE.
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
    /// Its status as last read or written.
    pub(crate) status: StatusEntry,
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
    /// For a reason that may pass; if it has not in a while, it is for good.
    RetryBounded(String),
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
    pub(crate) status: StatusEntry,
    /// What the hypervisor has now; nothing where this job changed nothing there.
    pub(crate) observed: Option<Result<Observed, HypervisorError>>,
    /// The node's record now, where this job changed it.
    pub(crate) record: Option<RecordFacts>,
    /// Whether it was noted that a user destroyed the instance here.
    pub(crate) buried: bool,
    /// What it holds in placement now, where this job changed that.
    pub(crate) allocation: Option<Held>,
    /// Whether a paused guest was let go on.
    pub(crate) resumed: bool,
    /// Whether all that it did was to tell a failure.
    pub(crate) told_failure: bool,
    /// Whether the request's key was deleted by this job.
    pub(crate) request_dropped: bool,
}

enum Stop {
    Abandoned,
    Retry(String),
    RetryBounded(String),
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
        let text = ec_runtime::exit::chain(&error);
        if error.is_transient() { Self::RetryBounded(text) } else { Self::Failed(text) }
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
            buried: false,
            allocation: None,
            resumed: false,
            told_failure: matches!(job.work, Work::Fail(_)),
            request_dropped: false,
        },
        parts,
        pool,
        permit: None,
        cancel,
        job,
        touched_hypervisor: false,
        first_start: false,
    };
    worker.report.outcome = match worker.run().await {
        Ok(()) => Outcome::Done,
        Err(Stop::Abandoned) => Outcome::Abandoned,
        Err(Stop::Retry(why)) => {
            worker.tell_delay(&why).await;
            Outcome::Retry(why)
        }
        Err(Stop::RetryBounded(why)) => {
            worker.tell_delay(&why).await;
            Outcome::RetryBounded(why)
        }
        Err(Stop::Failed(why)) => Outcome::Failed(why),
    };
    if worker.touched_hypervisor {
        worker.report.observed = Some(worker.parts.hypervisor.observe(worker.job.instance).await);
    }
    worker.report
}

struct Worker {
    parts: Arc<Parts>,
    pool: Arc<Semaphore>,
    /// Held while the host is loaded: from the first effect until the definition, and for the start.
    permit: Option<OwnedSemaphorePermit>,
    cancel: CancellationToken,
    job: Job,
    report: Report,
    touched_hypervisor: bool,
    /// This job marked the guest as started, which before it was not.
    first_start: bool,
}

impl Worker {
    async fn run(&mut self) -> Result<(), Stop> {
        match &mut self.job.work {
            Work::Effects(effects) => {
                for effect in std::mem::take(effects) {
                    if self.cancel.is_cancelled() {
                        return Err(Stop::Abandoned);
                    }
                    pause_for_test(&effect);
                    self.effect(effect).await?;
                }
                Ok(())
            }
            Work::Fail(reason) => {
                let reason = std::mem::take(reason);
                tracing::warn!(instance = %self.job.instance, reason, "instance failed");
                self.announce(State::Error, Some(reason)).await
            }
            Work::Addresses(addresses) => {
                let addresses = std::mem::take(addresses);
                pause_for_test_named("before-addresses");
                let mut status = match self.report.status.known() {
                    // It runs, and is no request's all the same.
                    Some(old) if old.state == State::Unclaimed => {
                        Status { reason: old.reason.clone(), ..self.next_status(State::Unclaimed) }
                    }
                    _ => self.next_status(State::Active),
                };
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
            Effect::Announce(state, reason) => self.announce(state, reason).await,
            Effect::PrepareDisk => self.prepare_disk().await,
            Effect::KeepRecord => self.keep_record().await,
            Effect::Define => {
                self.take_permit().await?;
                let spec = self.domain_spec().await?;
                self.touched_hypervisor = true;
                parts.hypervisor.define(&spec).await?;
                // The pool serves in turn: of many at once all are made before the first is started, which is
                // faster for all, since guests that boot take the processors.
                self.permit = None;
                Ok(())
            }
            Effect::MarkStarted => self.mark_started(true).await,
            Effect::Start => self.start().await,
            Effect::NoteStart => {
                let mut status = self.next_status(State::Starting);
                status.started_at = Some(status.updated_at);
                self.write(status).await
            }
            Effect::Resume => {
                tracing::info!(%instance, "there is room again: letting the paused guest go on");
                self.touched_hypervisor = true;
                self.report.resumed = true;
                parts.hypervisor.resume(instance).await.map_err(|error| Stop::Retry(error.to_string()))
            }
            Effect::Bury if planted("not-buried") => Ok(()),
            Effect::Bury => {
                self.records(move |records| records.bury(instance)).await?;
                self.report.buried = true;
                Ok(())
            }
            Effect::RemoveDomain if planted("domain-kept") => Ok(()),
            Effect::RemoveDomain => {
                self.take_permit().await?;
                self.touched_hypervisor = true;
                parts.hypervisor.destroy(instance).await.map_err(|error| Stop::Retry(error.to_string()))
            }
            Effect::DropRecord if planted("record-kept") => {
                self.report.record = Some(RecordFacts::Absent);
                Ok(())
            }
            Effect::DropRecord => {
                self.records(move |records| records.remove(instance)).await?;
                self.no_longer_uncounted();
                self.report.record = Some(RecordFacts::Absent);
                Ok(())
            }
            Effect::Claim => self.claim().await,
            Effect::Release if planted("claim-not-released") => Ok(()),
            Effect::Release => self.release().await,
            Effect::DropKeys => self.drop_keys().await,
            Effect::EndInError => self.end_in_error().await,
        }
    }

    /// Writes the status with that state; what people may have to act upon is logged too.
    async fn announce(&mut self, state: State, reason: Option<String>) -> Result<(), Stop> {
        // What is tried again and fails again is told once.
        let told = |old: &Status| state == State::Error && old.state == state && old.reason == reason;
        if self.report.status.known().is_some_and(told) {
            return Ok(());
        }
        let mut status = self.next_status(state);
        if let Some(reason) = &reason {
            tracing::info!(instance = %self.job.instance, %state, reason, "told");
        }
        // What a guest said last is what people need where it did not come up.
        let in_trouble = reason.is_some() && matches!(state, State::Starting | State::Stopped | State::Error);
        if in_trouble && status.ip.is_none() && status.started_at.is_some() {
            let console = self.parts.hypervisor.console_tail(self.job.instance, CONSOLE_TAIL_BYTES).await;
            status.console = console.ok().filter(|text| !text.is_empty());
        }
        status.reason = reason;
        if status.name.is_none() && self.job.request.is_none() {
            status.name = self.record().await?.map(|record| record.name);
        }
        self.write(status).await
    }

    /// Whoever waits is told what for. That this may fail, too, changes nothing.
    async fn tell_delay(&mut self, why: &str) {
        let Some(status) = self.report.status.known() else { return };
        let state = status.state;
        let reason = Some(format!("{why}; trying again"));
        let under_way = matches!(state, State::Preparing | State::Starting | State::Destroying);
        if under_way && status.reason != reason {
            self.announce(state, reason).await.ok();
        }
    }

    /// Starts the domain. One that certainly did not start is as one that never was started.
    async fn start(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        self.take_permit().await?;
        self.touched_hypervisor = true;
        match self.parts.hypervisor.start(instance).await {
            Ok(()) => {
                tracing::info!("STARTED INSTANCE {instance}");
                // What comes now loads only etcd.
                self.permit = None;
                Ok(())
            }
            Err(error @ (HypervisorError::Failed { .. } | HypervisorError::NotNow { .. }))
                if self.first_start =>
            {
                let observed = self.parts.hypervisor.observe(instance).await?;
                if matches!(observed.domain, None | Some(RunState::NotStarted)) {
                    self.mark_started(false).await?;
                }
                Err(error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Notes on the node's disk whether a guest may have written its own.
    async fn mark_started(&mut self, started: bool) -> Result<(), Stop> {
        let instance = self.job.instance;
        let changed = self
            .records(move |records| match records.get(instance)? {
                Some(record) if record.started != started => {
                    records.put(&InstanceRecord { started, ..record }).map(|()| true)
                }
                _ => Ok(false),
            })
            .await?;
        if changed {
            self.first_start = started;
            self.report.record = Some(RecordFacts::Kept { started });
        }
        Ok(())
    }

    /// Claims what a guest takes that is here and that placement does not know of. Where there is no room, as
    /// much of the inventory is reserved.
    async fn claim(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let amounts = self.amounts().await?;
        let (project, user) = match &self.job.request {
            Some(request) => (request.project.clone(), request.user.clone()),
            None => (self.record().await?.map(|record| record.project).unwrap_or_default(), String::new()),
        };
        let [project, user] =
            [project, user].map(|text| if text.is_empty() { "default".to_owned() } else { text });
        let (placement, node) = (&self.parts.placement, self.parts.node);
        let claim = || placement.claim_exact(instance, node, &amounts, &project, &user);
        let mut claimed = claim().await;
        if matches!(claimed, Err(PlacementError::Conflict(_))) && self.no_longer_uncounted() {
            // What stands in its way may be what is kept free for it.
            claimed = match refresh(&self.parts).await {
                Ok(()) => claim().await,
                Err(error) => Err(error),
            };
        }
        let Err(error) = claimed else {
            self.no_longer_uncounted();
            tracing::info!(%instance, ?amounts, "counted a guest that placement did not know of");
            self.report.allocation = Some(Held::Here { amounts, since: Instant::now() });
            return Ok(());
        };
        // Until it is counted, as much is kept free for it.
        self.parts.uncounted.send_if_modified(|uncounted| {
            uncounted.insert(instance, amounts.clone()).as_ref() != Some(&amounts)
        });
        Err(match error {
            PlacementError::Conflict(why) => {
                Stop::Retry(format!("placement has no room to count it, so as much is reserved: {why}"))
            }
            error => error.into(),
        })
    }

    /// Gives back what the instance holds here. What it holds on other nodes is not this node's to give back.
    async fn release(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        match ask_placement(&self.parts, instance).await? {
            Held::Here { .. } => self.parts.placement.release(instance).await?,
            Held::Elsewhere => {
                tracing::warn!(%instance, "its allocation is on other resource providers, and stays there");
            }
            Held::Nothing => {}
        }
        self.no_longer_uncounted();
        self.report.allocation = Some(Held::Nothing);
        Ok(())
    }

    fn no_longer_uncounted(&self) -> bool {
        let instance = self.job.instance;
        self.parts.uncounted.send_if_modified(|uncounted| uncounted.remove(&instance).is_some())
    }

    fn request(&self) -> Result<&Request, Stop> {
        self.job.request.as_ref().ok_or_else(|| Stop::Retry("it has no request that can be read".to_owned()))
    }

    /// Waiting for a place in the pool ends when the work is not wanted any more.
    async fn take_permit(&mut self) -> Result<(), Stop> {
        if self.permit.is_none() {
            let acquired = tokio::select! {
                biased;
                acquired = Arc::clone(&self.pool).acquire_owned() => acquired,
                () = self.cancel.cancelled() => return Err(Stop::Abandoned),
            };
            self.permit = Some(acquired.map_err(|_| Stop::Abandoned)?);
        }
        Ok(())
    }

    async fn drop_keys(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let user_data = self.parts.settings.keys.user_data(self.parts.node, instance);
        let txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(user_data)
            .delete(self.parts.status_key(instance));
        self.end(txn).await?;
        self.report.status = StatusEntry::Absent;
        tracing::info!("ENDED INSTANCE {instance}");
        Ok(())
    }

    /// The request goes; the status stays, on a lease, for people to read.
    async fn end_in_error(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let mut status = self.next_status(State::Error);
        let old = self.report.status.known();
        status.reason = old.and_then(|old| old.reason.clone());
        status.console = old.and_then(|old| old.console.clone());
        let lease = self.parts.store.grant(ERROR_RETENTION).await?;
        let txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(self.parts.settings.keys.user_data(self.parts.node, instance))
            .put_leased(self.parts.status_key(instance), encode(&status), lease);
        let ended = self.end(txn).await;
        if ended.is_err() {
            // Where the outcome is unknown the keys may hang on it: they would go with it, so it stays
            // only if it may be in use.
            if matches!(ended, Err(Stop::Abandoned)) {
                self.parts.store.revoke(lease).await.ok();
            }
            return ended;
        }
        self.report.status = StatusEntry::Known(Box::new(status));
        tracing::info!("ENDED INSTANCE {instance} IN ERROR");
        Ok(())
    }

    /// Commits the end of a request, unless somebody changed it meanwhile: then all is decided anew.
    async fn end(&mut self, txn: Txn) -> Result<(), Stop> {
        if self.fenced(txn).await? {
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
        let now = self.parts.host.now();
        let old = self.report.status.known();
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
        // A write that comes late must not take the place of what was told when the request ended.
        let txn = Txn::new().when(self.request_as_seen()).put(key, encode(&status));
        if !self.fenced(txn).await? {
            // A newer wish is not held up by the pause before another try.
            let newer = self.cancel.is_cancelled();
            return Err(if newer { Stop::Abandoned } else { Stop::Retry(NOT_OURS.to_owned()) });
        }
        self.report.status = StatusEntry::Known(Box::new(status));
        Ok(())
    }

    /// Commits a transaction if the node's key is still ours; whether all its conditions held.
    async fn fenced(&self, txn: Txn) -> Result<bool, Stop> {
        let fence = || self.parts.presence.fence().ok_or_else(|| Stop::Retry(NOT_OURS.to_owned()));
        let first = fence()?;
        if planted("unfenced") {
            return Ok(self.parts.store.txn(txn).await?.succeeded);
        }
        let mut succeeded = self.parts.store.txn(txn.clone().when(first.clone())).await?.succeeded;
        // Our own keys may have been put anew meanwhile.
        let now = fence()?;
        if !succeeded && now != first {
            succeeded = self.parts.store.txn(txn.when(now)).await?.succeeded;
        }
        if !succeeded {
            self.parts.presence.doubt();
        }
        Ok(succeeded)
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
fn pause_for_test(effect: &Effect) {
    let name = match effect {
        Effect::Announce(..) => "before-announce",
        Effect::PrepareDisk => "before-disk",
        Effect::KeepRecord => "before-keep-record",
        Effect::Define => "before-define",
        Effect::MarkStarted => "before-mark-started",
        Effect::Start => "before-start",
        Effect::NoteStart => "before-note-start",
        Effect::Resume => "before-resume",
        Effect::Bury => "before-bury",
        Effect::RemoveDomain => "before-remove-domain",
        Effect::DropRecord => "before-drop-record",
        Effect::Claim => "before-claim",
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
    let hold = || fail::fail_point!(name);
    match tokio::runtime::Handle::current().runtime_flavor() {
        // Nothing else could take over what this thread serves.
        tokio::runtime::RuntimeFlavor::CurrentThread => hold(),
        // A point that sleeps holds up its own instance only.
        _ => tokio::task::block_in_place(hold),
    }
}

#[cfg(not(feature = "failpoints"))]
fn pause_for_test_named(_: &'static str) {}

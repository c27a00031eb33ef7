//! Performing effects for one instance. Each is idempotent; between any two a crash is safe.

mod claims;
mod guest;
mod intent;
mod keys;
mod lost;
mod rebuild;
mod rescue;
mod resize;
mod volume;

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{DomainSpec, HypervisorError, HypervisorResult, RunState};
use ec_image::{CachedImage, ImageError};
use ec_metadata::InstanceRecord;
use ec_model::{Request, RequestId, State, Workload};
use ec_placement_client::{PlacementClient, PlacementError};
use ec_plan::{
    RecordFacts,
    engine::{Change, Held, Job, Outcome, Report, Requested, StatusEntry, Work},
    machine::Effect,
    status::{self, Order, Subject},
};
use ec_runtime::planted;
use ec_store::StoreError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::{look::record_facts, parts::Parts};

/// How much of a failed guest's console goes with its ERROR.
const CONSOLE_TAIL_BYTES: usize = 4096;
/// Within so long a guest's process answers that does not hang.
const COMES_BACK: Duration = Duration::from_secs(1);

/// Why a job does not go on.
enum Stop {
    Abandoned,
    Retry(String),
    RetryBounded(String),
    Failed(String),
}

impl Stop {
    /// Nothing comes after giving up: what cannot be given up now is tried again, after a pause.
    fn for_now(self) -> Self {
        match self {
            Self::Failed(why) | Self::RetryBounded(why) => Self::Retry(why),
            other => other,
        }
    }
}

/// What failed of it now may succeed later, or be seen to be done.
fn retry(error: HypervisorError) -> Stop {
    Stop::Retry(error.to_string())
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

/// What is told to a job while it is under way.
#[derive(Default)]
pub(crate) struct Reins {
    /// To stop at its next safe point.
    pub(crate) cancel: CancellationToken,
    /// To go on for a request that differs in nothing that this is about.
    pub(crate) newer: watch::Sender<Option<Requested>>,
}

/// The job's end of them.
pub(crate) struct Heard {
    cancel: CancellationToken,
    newer: watch::Receiver<Option<Requested>>,
}

impl Reins {
    pub(crate) fn heard(&self) -> Heard {
        Heard { cancel: self.cancel.clone(), newer: self.newer.subscribe() }
    }
}

/// Performs a job to its end.
pub(crate) async fn perform(
    parts: Arc<Parts>,
    pool: Arc<Semaphore>,
    job: Job,
    Heard { cancel, newer }: Heard,
) -> Report {
    let request = job.request.as_deref();
    let subject = Subject {
        instance: job.instance,
        node: parts.node,
        name: request.map(hostname),
        kept: job.kept,
        order: request.map(Order::of),
        why: job.why.to_string(),
    };
    let mut worker = Worker {
        status: job.status.clone(),
        done: Vec::new(),
        parts,
        pool,
        permit: None,
        cancel,
        newer,
        subject,
        job,
        touched_hypervisor: false,
        standing_on: None,
        first_start: false,
        unsure: false,
    };
    let outcome = match worker.run().await {
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
        let observed = worker.parts.hypervisor.observe(worker.job.instance).await;
        worker.done.push(Change::Observed(observed.map_err(|error| error.to_string())));
    }
    Report { instance: worker.job.instance, done: worker.done, outcome }
}

struct Worker {
    parts: Arc<Parts>,
    pool: Arc<Semaphore>,
    /// Held while the host is loaded: from the first effect until the definition, and for the start.
    permit: Option<OwnedSemaphorePermit>,
    cancel: CancellationToken,
    newer: watch::Receiver<Option<Requested>>,
    subject: Subject,
    job: Job,
    /// As it lies in etcd.
    status: StatusEntry,
    /// What is otherwise than when the job began.
    done: Vec<Change>,
    touched_hypervisor: bool,
    /// What the disk stands on that is made: it is not evicted before the record names it and the disk is there.
    standing_on: Option<CachedImage>,
    /// This job marked the guest as started, which before it was not.
    first_start: bool,
    /// Nobody knows whether the last write of the status was done.
    unsure: bool,
}

impl Worker {
    async fn run(&mut self) -> Result<(), Stop> {
        match &mut self.job.work {
            Work::Effects(effects) => {
                let effects = std::mem::take(effects);
                if self.has_lost_memory(&effects).await? {
                    return Ok(());
                }
                for effect in effects {
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
                tracing::warn!(reason, "instance failed");
                self.announce(State::Error, Some(reason)).await
            }
            Work::Delayed(why) => {
                let why = std::mem::take(why);
                self.tell_delay(&why).await;
                Ok(())
            }
            Work::Addresses(addresses) => {
                let addresses = std::mem::take(addresses);
                pause_for_test_named("before-addresses");
                let status =
                    status::addressed(&self.subject, self.status.known(), addresses, self.parts.host.now());
                self.write(status).await
            }
        }
    }

    /// Whether a guest that is told to go on where it was cannot: what was saved of it went since anybody looked, which libvirt tells
    /// nobody, and would boot it anew. What is seen is told first, and what is to be done is planned by that.
    async fn has_lost_memory(&mut self, effects: &[Effect]) -> Result<bool, Stop> {
        let is_suspended = self.status.known().is_some_and(|status| status.state == State::Suspended);
        if !(is_suspended && effects.contains(&Effect::Start)) {
            return Ok(false);
        }
        self.touched_hypervisor = true;
        let observed = self.parts.hypervisor.observe(self.job.instance).await?;
        Ok(matches!(observed.domain, Some(RunState::NotStarted | RunState::Ended(_))))
    }

    async fn effect(&mut self, effect: Effect) -> Result<(), Stop> {
        let instance = self.job.instance;
        tracing::debug!(?effect, "acting");
        self.take_up();
        let parts = Arc::clone(&self.parts);
        match effect {
            Effect::Announce(state, reason) => self.announce(state, reason).await,
            Effect::PrepareDisk => self.prepare_disk().await,
            Effect::KeepRecord => self.keep_record().await,
            Effect::KeepIntent => self.keep_intent().await,
            Effect::Persist => {
                self.take_permit().await?;
                let spec = self.domain_spec().await?;
                self.touched_hypervisor = true;
                Ok(parts.hypervisor.persist(&spec).await?)
            }
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
            Effect::Start => self.start(None).await,
            Effect::StartRescue => {
                let spec = self.domain_spec().await?;
                self.start(Some(spec)).await
            }
            Effect::NoteStart => {
                let status = status::started(&self.subject, self.status.known(), self.parts.host.now());
                self.write(status).await
            }
            Effect::Resume => {
                tracing::info!("letting the paused guest go on");
                self.of_guest(parts.hypervisor.resume(instance)).await?.map_err(retry)?;
                self.done.push(Change::Resumed);
                Ok(())
            }
            Effect::ShutDown => {
                tracing::info!("asking the guest to end");
                let asked = self.of_guest(parts.hypervisor.shut_down(instance)).await?;
                match asked {
                    Ok(()) => self.done.push(Change::AskedToEnd),
                    // It was not, and could hear.
                    Err(HypervisorError::Unreachable { .. } | HypervisorError::Busy { .. }) => {}
                    Err(_) => self.done.push(Change::AskedInVain),
                }
                asked.map_err(retry)
            }
            Effect::PowerOff if planted("not-ended") => {
                // It is asked for again at once, and a history of nothing else takes minutes to play.
                tokio::time::sleep(Duration::from_secs(5)).await;
                self.touched_hypervisor = true;
                Ok(())
            }
            Effect::PowerOff => {
                tracing::info!("ending the guest");
                self.touched_hypervisor = true;
                parts.hypervisor.power_off(instance).await.map_err(retry)
            }
            Effect::Pause => self.of_guest(parts.hypervisor.pause(instance)).await?.map_err(retry),
            // These take turns of their own: all else of this node would wait for them.
            Effect::Save => {
                self.touched_hypervisor = true;
                parts.hypervisor.save(instance).await.map_err(retry)
            }
            Effect::DropMemory => {
                tracing::info!("deleting the guest's saved memory");
                self.touched_hypervisor = true;
                parts.hypervisor.drop_memory(instance).await.map_err(retry)
            }
            Effect::NotePower(state, reason) => {
                let old = self.status.known();
                let status = status::powered(&self.subject, old, state, reason, self.parts.host.now());
                tracing::info!(%state, reason = status.reason, "power is as wished");
                self.write(status).await
            }
            Effect::Reopen(restarts) => {
                tracing::info!(restarts, "starting it again: {}", self.subject.why);
                let old = self.status.known();
                let status = status::reopened(&self.subject, old, restarts, self.parts.host.now());
                self.write(status).await
            }
            Effect::PrepareRebuild => self.prepare_rebuild().await,
            Effect::ReplaceDisk => self.replace_disk().await,
            Effect::GiveUpRebuild(reason) => self.give_up_rebuild(reason).await.map_err(Stop::for_now),
            Effect::NoteRebuild => self.note_rebuild().await,
            Effect::DropSuccessor => self.drop_successor().await,
            Effect::PrepareRescue => self.prepare_rescue().await,
            Effect::EnterRescue => self.enter_rescue().await,
            Effect::LeaveRescue => self.leave_rescue().await,
            Effect::GiveUpRescue(reason) => self.give_up_rescue(reason).await.map_err(Stop::for_now),
            Effect::NoteRescue => self.note_rescue().await,
            Effect::Cover => self.cover().await,
            Effect::Grow => self.grow().await,
            Effect::Resize => self.resize().await,
            Effect::GiveUpResize(reason) if self.is_volume() => {
                self.give_up_extend(reason).await.map_err(Stop::for_now)
            }
            Effect::GiveUpResize(reason) => self.give_up_resize(reason).await.map_err(Stop::for_now),
            Effect::NoteResize => self.note_resize().await,
            Effect::SetVolumes => self.set_volumes().await,
            Effect::NoteVolumes => self.note_volumes().await,
            Effect::PrepareVolume => self.prepare_volume().await,
            Effect::HandOver => self.hand_over().await,
            Effect::Receive => self.receive().await,
            Effect::Extend => self.extend().await,
            Effect::Admit(_) => self.admit().await,
            Effect::Bury if planted("not-buried") => Ok(()),
            Effect::Bury => {
                let request = self.job.request.as_ref();
                // One that nobody could tell the placement of is whatever comes.
                let epoch = request.map(|request| request.epoch).filter(|epoch| *epoch > 0);
                self.records(move |records| records.bury(instance, epoch)).await?;
                self.done.push(Change::Buried(epoch));
                Ok(())
            }
            Effect::RemoveDomain if planted("domain-kept") => Ok(()),
            Effect::RemoveDomain => {
                self.take_permit().await?;
                self.touched_hypervisor = true;
                parts.hypervisor.destroy(instance).await.map_err(retry)
            }
            Effect::DropRecord if planted("record-kept") => {
                self.done.push(Change::Record(RecordFacts::Absent));
                Ok(())
            }
            Effect::DropRecord => {
                self.records(move |records| records.remove(instance)).await?;
                self.no_longer_uncounted();
                self.done.push(Change::Record(RecordFacts::Absent));
                Ok(())
            }
            Effect::Reread => self.reread().await,
            Effect::Claim => self.claim().await,
            Effect::Release if planted("claim-not-released") => {
                self.done.push(Change::Allocation(Held::Nothing));
                Ok(())
            }
            Effect::Ascertain => self.ascertain().await,
            Effect::Inquire => self.inquire().await,
            Effect::Release => self.release().await,
            Effect::DropKeys => self.drop_keys().await,
            Effect::EndInError => self.end_in_error().await,
        }
    }

    /// Waits for what the guest's own process is asked, which may hang: who wishes otherwise meanwhile, its end say, does not wait for
    /// that long.
    async fn of_guest(
        &mut self,
        call: impl Future<Output = HypervisorResult<()>>,
    ) -> Result<HypervisorResult<()>, Stop> {
        self.touched_hypervisor = true;
        let wished_otherwise = async {
            self.cancel.cancelled().await;
            tokio::time::sleep(COMES_BACK).await;
        };
        tokio::select! {
            biased;
            called = call => Ok(called),
            () = wished_otherwise => Err(Stop::Abandoned),
        }
    }

    /// Lets look at it whoever wishes to by the request that this goes on for, which may be a newer wish than it was begun for.
    async fn admit(&mut self) -> Result<(), Stop> {
        let request = self.request()?;
        // Nobody may have heard that what was told last was written: an older word must not take its place.
        self.read_again().await?;
        let parts = Arc::clone(&self.parts);
        let old = self.status.known().ok_or_else(|| Stop::Retry("it has no status yet".to_owned()))?;
        let Some(wish) = status::looked_for(&request, Some(old)) else { return Ok(()) };
        let access = parts.streams.admit(self.job.instance, wish, &parts.host);
        let status = status::admitted(old, access, parts.host.now());
        self.write(status).await
    }

    /// Goes on for the newest request that differs in nothing that this is about: what is told from then on is told of that.
    fn take_up(&mut self) {
        if let Some(Requested { record: Ok(request), revision }) = self.newer.borrow_and_update().clone() {
            (self.subject.name, self.subject.order) = (Some(hostname(&request)), Some(Order::of(&request)));
            (self.job.request, self.job.request_revision) = (Some(request), Some(revision));
        }
    }

    /// Lets look at it who wishes to, in the midst of what takes long.
    async fn let_look(&mut self) {
        self.take_up();
        // Where it cannot be now, it is when this is over.
        self.admit().await.ok();
    }

    fn is_volume(&self) -> bool {
        self.job.request.as_ref().is_some_and(|request| request.kind == Workload::Volume)
    }

    /// Writes the status with that state; what people may have to act upon is logged too.
    async fn announce(&mut self, state: State, reason: Option<String>) -> Result<(), Stop> {
        let old = self.status.known();
        if status::is_told(&self.subject, old, state, reason.as_deref()) {
            return Ok(());
        }
        if let Some(reason) = &reason {
            tracing::info!(%state, reason, "told");
        }
        let with_console = status::wants_console(old, state, reason.as_deref());
        let mut status = status::announced(&self.subject, old, state, reason, self.parts.host.now());
        if with_console {
            let console = self.parts.hypervisor.console_tail(self.job.instance, CONSOLE_TAIL_BYTES).await;
            status.console = console.ok().filter(|text| !text.is_empty());
        }
        if status.name.is_none()
            && let Some((kind, name)) = self.known_as().await?
        {
            (status.kind, status.name) = (kind.unwrap_or(status.kind), Some(name));
        }
        self.write(status).await
    }

    /// Whoever waits is told what for. That this may fail, too, changes nothing.
    async fn tell_delay(&mut self, why: &str) {
        if self.unsure {
            // It may lie in etcd, and is newer than what is known of it.
            return;
        }
        let now = self.parts.host.now();
        let waiting = self.status.known().and_then(|old| status::waiting(&self.subject, old, why, now));
        let Some(status) = waiting else { return };
        // Nor does it take the place of what a job before told without hearing that it was done.
        if self.is_told_last().await {
            tracing::info!(state = %status.state, why, "told that it waits");
            self.write(status).await.ok();
        }
    }

    /// Starts the domain, or as that one from its rescue disk. One that certainly did not start is as one that never was
    /// started.
    async fn start(&mut self, rescue: Option<DomainSpec>) -> Result<(), Stop> {
        let instance = self.job.instance;
        // Others may go on meanwhile.
        if let Err(stop) = self.bring_back_images(rescue.is_some()).await {
            self.not_started().await?;
            return Err(stop);
        }
        self.take_permit().await?;
        self.touched_hypervisor = true;
        self.be_as_noted().await?;
        let started = match rescue {
            Some(spec) => self.parts.hypervisor.start_rescue(&spec).await,
            None => self.parts.hypervisor.start(instance).await,
        };
        match started {
            Ok(()) => {
                tracing::info!("STARTED INSTANCE {instance}");
                // What comes now loads only etcd.
                self.permit = None;
                Ok(())
            }
            Err(error @ (HypervisorError::Failed { .. } | HypervisorError::NotNow { .. })) => {
                self.not_started().await?;
                Err(error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Its start failed: of a first one that is noted, where nobody else started it.
    async fn not_started(&mut self) -> Result<(), Stop> {
        if !self.first_start {
            return Ok(());
        }
        let observed = self.parts.hypervisor.observe(self.job.instance).await?;
        if matches!(observed.domain, None | Some(RunState::NotStarted)) {
            self.mark_started(false).await?;
        }
        Ok(())
    }

    /// Notes on the node's disk whether a guest may have written its own.
    async fn mark_started(&mut self, started: bool) -> Result<(), Stop> {
        let instance = self.job.instance;
        let changed = self
            .records(move |records| match records.get(instance)? {
                Some(record) if record.started != started => {
                    let record = InstanceRecord { started, ..record };
                    records.put(&record).map(|()| Some(record_facts(&record)))
                }
                _ => Ok(None),
            })
            .await?;
        if let Some(facts) = changed {
            self.first_start = started;
            self.done.push(Change::Record(facts));
        }
        Ok(())
    }

    /// Placement, asked on behalf of who wants what is done.
    fn placement(&self) -> PlacementClient {
        self.parts.placement.on_behalf(self.request_id())
    }

    fn request_id(&self) -> Option<RequestId> {
        self.job.request.as_ref()?.request_id
    }

    fn request(&self) -> Result<Arc<Request>, Stop> {
        self.job.request.clone().ok_or_else(|| Stop::Retry("it has no request that can be read".to_owned()))
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
        Effect::KeepIntent => "before-keep-intent",
        Effect::Define => "before-define",
        Effect::Persist => "before-persist",
        Effect::MarkStarted => "before-mark-started",
        Effect::Start => "before-start",
        Effect::StartRescue => "before-start-rescue",
        Effect::NoteStart => "before-note-start",
        Effect::Resume => "before-resume",
        Effect::ShutDown => "before-shut-down",
        Effect::PowerOff => "before-power-off",
        Effect::Pause => "before-pause",
        Effect::Save => "before-save",
        Effect::DropMemory => "before-drop-memory",
        Effect::NotePower(..) => "before-note-power",
        Effect::Reopen(_) => "before-reopen",
        Effect::PrepareRebuild => "before-prepare-rebuild",
        Effect::ReplaceDisk => "before-replace-disk",
        Effect::GiveUpRebuild(_) => "before-give-up-rebuild",
        Effect::NoteRebuild => "before-note-rebuild",
        Effect::DropSuccessor => "before-drop-successor",
        Effect::PrepareRescue => "before-prepare-rescue",
        Effect::EnterRescue => "before-enter-rescue",
        Effect::LeaveRescue => "before-leave-rescue",
        Effect::GiveUpRescue(_) => "before-give-up-rescue",
        Effect::NoteRescue => "before-note-rescue",
        Effect::Cover => "before-cover",
        Effect::Grow => "before-grow",
        Effect::Resize => "before-resize",
        Effect::GiveUpResize(_) => "before-give-up-resize",
        Effect::NoteResize => "before-note-resize",
        Effect::SetVolumes => "before-tell-volumes",
        Effect::NoteVolumes => "before-note-volumes",
        Effect::PrepareVolume => "before-volume",
        Effect::HandOver => "before-hand-over",
        Effect::Receive => "before-receive",
        Effect::Extend => "before-extend",
        Effect::Admit(_) => "before-admit",
        Effect::Bury => "before-bury",
        Effect::RemoveDomain => "before-remove-domain",
        Effect::DropRecord => "before-drop-record",
        Effect::Reread => "before-reread",
        Effect::Claim => "before-claim",
        Effect::Ascertain => "before-ascertain",
        Effect::Inquire => "before-inquire",
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

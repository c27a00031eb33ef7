//! The one loop of the agent: list, compare, act, watch.
//!
//! Everything that happens arrives here as a hint that an instance deserves a look: a change under the
//! node's request prefix, an event of the hypervisor, the end of a job, an address, the clock. The look
//! itself ([`Driver::consider`]) takes only facts and asks [`ec_plan::decide`] what to do, so that a hint
//! that never came costs time and nothing else: every [`LOOK_PERIOD`] everything is looked at anyway.
//!
//! One instance has at most one job. A destroy that arrives meanwhile asks the job to stop at its next
//! safe point, and is decided when it has.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ec_hypervisor::{HypervisorError, HypervisorEvent};
use ec_model::{InstanceId, Observed, Resources, RunState, State, Status};
use ec_placement_client::PlacementError;
use ec_plan::{Decision, Effect, Limits, Wanted, decide, ran};
use ec_runtime::planted;
use ec_store::{Change, Event, FollowOptions, Relist, StoreError, follow_on_demand};
use tokio::{
    sync::{Semaphore, broadcast, mpsc, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    addresses::{self, Found, look_for_addresses},
    look::{Seen, ask_placement, look_at_all},
    parts::Parts,
    worker::{Job, Outcome, Report, Work, perform},
    world::{Held, Running, World},
};

/// Everything is looked at so often, whatever hints came. Catches what events missed.
const LOOK_PERIOD: Duration = Duration::from_secs(30);
/// What could not be looked at is looked at again after so long.
const LOOK_SOON: Duration = Duration::from_secs(1);
/// An audit that failed is tried again after so long.
const AUDIT_RETRY: Duration = Duration::from_secs(2);
/// Timers (another try, a deadline) are looked at so often.
const TICK: Duration = Duration::from_millis(250);
/// The prefix is listed anew so often, should a watch ever lose an event.
const RESYNC: Duration = Duration::from_secs(300);
/// A paused guest that was let go on is let go on again at the earliest after so long.
const RESUME_PERIOD: Duration = Duration::from_secs(10);
/// An image that could not be had for so long is given up at the next failure. Each try has some patience of its
/// own ([`ec_image::CacheConfig::patience`]), and pauses grow between them.
const IMAGE_PATIENCE: Duration = Duration::from_secs(60);
/// Jobs under way get so long to reach a safe point when the agent ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(20);

/// What asynchronous questions answer.
enum Answer {
    /// Everything there is, as of the moment a look began.
    Looked { begun: u64, seen: Result<Seen, String> },
    /// One instance's domain and volume.
    Observed(InstanceId, u64, Result<Observed, HypervisorError>),
    /// One instance's allocation.
    Allocation(InstanceId, Result<Held, PlacementError>),
    /// Whether control tools asked for an instance.
    Whose(InstanceId, Result<Whose, StoreError>),
    /// Every allocation on this node.
    Audited(u64, Result<HashMap<InstanceId, Resources>, PlacementError>),
}

/// What control tools have to do with an allocation that no request speaks of here.
enum Whose {
    /// Nothing: it is somebody else's.
    Foreign,
    /// They asked for the instance, and have not requested it.
    AskedFor,
    /// They have requested it, and the watch has not told.
    Requested,
}

/// Something that the loop cannot do without has ended.
#[derive(Debug, thiserror::Error)]
#[error("{0} ended unexpectedly; the agent is deaf without")]
pub(crate) struct Deaf(&'static str);

/// Runs until `shutdown`; returns when every job has reached a safe point.
pub(crate) async fn run(parts: Arc<Parts>, shutdown: CancellationToken) -> Result<(), Deaf> {
    let (answers, inbox) = mpsc::channel(1024);
    let (reports, finished) = mpsc::channel(1024);
    let (wanted_addresses, wanted) = watch::channel(addresses::Wanted::default());
    let (found, addresses) = mpsc::channel(64);
    let tasks = TaskTracker::new();
    tasks.spawn(look_for_addresses(Arc::clone(&parts.hypervisor), wanted, found));
    let prefix = parts.settings.keys.requests(parts.node);
    let options = FollowOptions { resync: RESYNC, ..FollowOptions::default() };
    let (changes, relist) = follow_on_demand(Arc::clone(&parts.store), prefix, options);
    let driver = Driver {
        limits: Limits {
            address: parts.settings.address_timeout,
            grace: if planted("audit-at-once") { Duration::ZERO } else { parts.settings.audit_grace },
        },
        pool: Arc::new(Semaphore::new(parts.settings.workers)),
        world: World::default(),
        answers,
        reports,
        wanted_addresses,
        listed: false,
        looked: false,
        looking: false,
        auditing: false,
        look_due: Instant::now(),
        audit_due: None,
        relist,
        tasks: tasks.clone(),
        parts,
    };
    let ended = driver.run(changes, inbox, finished, addresses, &shutdown).await;
    tasks.close();
    if tokio::time::timeout(SHUTDOWN_GRACE, tasks.wait()).await.is_err() {
        tracing::warn!(
            "work is still under way after {} s; the next start goes on with it",
            SHUTDOWN_GRACE.as_secs()
        );
    }
    ended
}

struct Driver {
    parts: Arc<Parts>,
    limits: Limits,
    world: World,
    pool: Arc<Semaphore>,
    tasks: TaskTracker,
    answers: mpsc::Sender<Answer>,
    reports: mpsc::Sender<Report>,
    wanted_addresses: watch::Sender<addresses::Wanted>,
    /// The requests have been listed once.
    listed: bool,
    /// Statuses, domains and records have been listed once. Before both, nothing is decided.
    looked: bool,
    looking: bool,
    auditing: bool,
    look_due: Instant,
    /// When an audit that failed is tried again.
    audit_due: Option<Instant>,
    /// Has the requests listed anew, where the watch was found to be silent.
    relist: Relist,
}

impl Driver {
    async fn run(
        mut self,
        mut changes: mpsc::Receiver<Change>,
        mut inbox: mpsc::Receiver<Answer>,
        mut finished: mpsc::Receiver<Report>,
        mut addresses: mpsc::Receiver<Found>,
        shutdown: &CancellationToken,
    ) -> Result<(), Deaf> {
        let mut events = self.parts.hypervisor.events();
        let mut held = self.parts.presence.subscribe();
        let mut registered = self.parts.registered.subscribe();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Every arm is a channel or a timer: dropping one that did not fire loses nothing.
        let ended = loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break Ok(()),
                change = changes.recv() => match change {
                    Some(change) => self.changed(change),
                    None => break Err(Deaf("the watch on this node's requests")),
                },
                report = finished.recv() => match report {
                    Some(report) => self.finished(report),
                    None => break Err(Deaf("the workers' channel")),
                },
                answer = inbox.recv() => match answer {
                    Some(answer) => self.answered(answer),
                    None => break Err(Deaf("the channel of answers")),
                },
                found = addresses.recv() => match found {
                    Some(found) => self.found(found),
                    None => break Err(Deaf("the search for addresses")),
                },
                event = events.recv() => match event {
                    Ok(HypervisorEvent::Changed(instance)) => self.happened(instance),
                    Ok(HypervisorEvent::LookAtAll) | Err(broadcast::error::RecvError::Lagged(_)) => self.look(),
                    Err(broadcast::error::RecvError::Closed) => break Err(Deaf("the hypervisor's events")),
                },
                // Keys that had to be put anew tell of an etcd that may be another.
                _ = held.changed() => {
                    self.look();
                    self.audit();
                }
                // The sender lives in the parts.
                _ = registered.changed() => self.audit(),
                _ = tick.tick() => self.tick(),
            }
        };
        for (_, entry) in self.world.iter() {
            if let Some(running) = &entry.running {
                running.cancel.cancel();
            }
        }
        // The senders of this driver go with it; jobs under way report to nobody, and that is fine.
        ended
    }

    fn changed(&mut self, change: Change) {
        let (keys, node) = (&self.parts.settings.keys, self.parts.node);
        match change {
            Change::Reset(listing) => {
                self.world.reset_requests(keys, node, &listing.pairs);
                self.listed = true;
                self.look();
                self.consider_all();
            }
            Change::Events(batch) => {
                let touched = batch.events.into_iter().filter_map(|event| match event {
                    Event::Put(pair) => self.world.put_request(keys, node, &pair),
                    Event::Delete { key, .. } => self.world.delete_request(keys, node, &key),
                });
                for instance in touched.collect::<Vec<_>>() {
                    self.consider(instance);
                }
            }
            Change::Lost(error) => {
                tracing::warn!(%error, "lost the watch on this node's requests; trying on")
            }
        }
    }

    fn happened(&mut self, instance: InstanceId) {
        // A job looks for itself when it has ended, and till then nothing is taken from a look. One that nobody
        // here knows is looked at: a call of ours that came back late may have made it.
        if self.world.get(instance).is_none_or(|entry| entry.running.is_none()) {
            self.observe(instance);
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        if now >= self.look_due {
            self.look();
            self.audit();
        }
        if self.audit_due.is_some_and(|due| now >= due) {
            self.audit();
        }
        let due: Vec<_> = self
            .world
            .iter_mut()
            .filter(|(_, entry)| entry.running.is_none())
            .filter_map(|(instance, entry)| {
                let retry = entry.retry.is_some_and(|retry| now >= retry.at);
                let wake = entry.wake.is_some_and(|wake| now >= wake);
                if wake {
                    entry.wake = None;
                }
                (retry || wake).then_some(instance)
            })
            .collect();
        for instance in due {
            self.consider(instance);
        }
    }

    /// Asks etcd, the hypervisor and the records for everything there is.
    fn look(&mut self) {
        self.look_due = Instant::now() + if self.looked { LOOK_PERIOD } else { LOOK_SOON };
        if self.looking {
            return;
        }
        self.looking = true;
        let begun = self.world.begin_look();
        let (parts, answers) = (Arc::clone(&self.parts), self.answers.clone());
        self.tasks.spawn(async move {
            let seen = look_at_all(&parts).await;
            answers.send(Answer::Looked { begun, seen }).await.ok();
        });
    }

    fn observe(&mut self, instance: InstanceId) {
        let begun = self.world.begin_look();
        let (parts, answers) = (Arc::clone(&self.parts), self.answers.clone());
        self.tasks.spawn(async move {
            let observed = parts.hypervisor.observe(instance).await;
            answers.send(Answer::Observed(instance, begun, observed)).await.ok();
        });
    }

    fn ask_placement(&mut self, instance: InstanceId) {
        self.asking(instance);
        let (parts, answers) = (Arc::clone(&self.parts), self.answers.clone());
        self.tasks.spawn(async move {
            let held = ask_placement(&parts, instance).await;
            answers.send(Answer::Allocation(instance, held)).await.ok();
        });
    }

    fn ask_whose(&mut self, instance: InstanceId) {
        self.asking(instance);
        let (parts, answers) = (Arc::clone(&self.parts), self.answers.clone());
        self.tasks.spawn(async move {
            let whose = ask_whose(&parts, instance).await;
            answers.send(Answer::Whose(instance, whose)).await.ok();
        });
    }

    /// Asking counts as work under way, so that it is done once at a time.
    fn asking(&mut self, instance: InstanceId) {
        let entry = self.world.touch(instance);
        entry.running = Some(Running { cancel: CancellationToken::new(), wanted: entry.wanted() });
    }

    fn audit(&mut self) {
        if self.auditing || !self.looked {
            return;
        }
        (self.auditing, self.audit_due) = (true, None);
        let begun = self.world.begin_look();
        let (parts, answers) = (Arc::clone(&self.parts), self.answers.clone());
        self.tasks.spawn(async move {
            let held = parts.placement.provider_allocations(parts.node).await;
            answers.send(Answer::Audited(begun, held)).await.ok();
        });
    }

    fn answered(&mut self, answer: Answer) {
        match answer {
            Answer::Looked { begun, seen: Ok(seen) } => {
                self.looking = false;
                self.world.take_look(begun, seen);
                let blind = self.world.iter().any(|(_, entry)| !entry.is_seen());
                self.look_due = Instant::now() + if blind { LOOK_SOON } else { LOOK_PERIOD };
                let first = !self.looked;
                self.looked = true;
                if first {
                    self.audit();
                }
                self.consider_all();
            }
            Answer::Looked { seen: Err(error), .. } => {
                self.looking = false;
                self.look_due = Instant::now() + LOOK_SOON;
                tracing::warn!(error, "failed to look at everything; trying on");
            }
            Answer::Observed(instance, begun, Ok(observed)) => {
                match self.world.get_mut(instance) {
                    Some(entry) if entry.touched < begun && entry.running.is_none() => {
                        entry.observe(observed);
                        self.consider(instance);
                    }
                    // What else is known of it, the look tells.
                    None if observed != Observed::default() => self.look(),
                    _ => {}
                }
            }
            Answer::Observed(_, _, Err(error)) => tracing::debug!(%error, "failed to observe an instance"),
            Answer::Allocation(instance, held) => {
                let entry = self.world.touch(instance);
                entry.running = None;
                match held {
                    Ok(held) => {
                        entry.retry = None;
                        entry.allocation = Some(held);
                    }
                    Err(error) => {
                        entry.retry_later();
                        tracing::warn!(%instance, %error, "failed to ask for its allocation; trying on");
                    }
                }
                self.consider(instance);
            }
            Answer::Whose(instance, whose) => {
                let entry = self.world.touch(instance);
                entry.running = None;
                match whose {
                    Ok(Whose::Foreign) => entry.asked_for = Some(false),
                    Ok(Whose::AskedFor) => entry.asked_for = Some(true),
                    Ok(Whose::Requested) => {
                        entry.retry_later();
                        self.relist.now();
                        tracing::warn!(%instance, "the watch on this node's requests is silent: listing anew");
                    }
                    Err(error) => {
                        entry.retry_later();
                        tracing::warn!(%instance, %error, "failed to ask whether it is ours; trying on");
                    }
                }
                self.consider(instance);
            }
            Answer::Audited(begun, held) => {
                self.auditing = false;
                match held {
                    Ok(held) => {
                        self.parts.uncounted.send_if_modified(|uncounted| {
                            let before = uncounted.len();
                            uncounted.retain(|instance, _| !held.contains_key(instance));
                            uncounted.len() != before
                        });
                        for instance in self.world.take_audit(begun, &held) {
                            self.ask_placement(instance);
                        }
                        self.consider_all();
                    }
                    // Not registered yet, or not any more, which the registration makes good.
                    Err(PlacementError::NotFound(_)) => {}
                    Err(error) => {
                        tracing::warn!(%error, "failed to audit this node's allocations; trying on");
                        self.audit_due = Some(Instant::now() + AUDIT_RETRY);
                    }
                }
            }
        }
    }

    fn found(&mut self, mut found: Found) {
        for instance in found.waiting {
            let Some(entry) = self.world.get_mut(instance) else { continue };
            let in_vain = entry.status.known().is_some_and(|status| status.ip.is_none())
                && found.addresses.get(&instance).is_none_or(Vec::is_empty);
            if in_vain && entry.searched_in_vain(self.limits.address) {
                self.consider(instance);
                self.want_addresses();
            }
        }
        found.addresses.retain(|_, addresses| !addresses.is_empty());
        for (instance, addresses) in found.addresses {
            let Some(entry) = self.world.get(instance) else { continue };
            let Some(status) = entry.status.known() else { continue };
            let merged = merge(&status.addresses, addresses);
            let is_up = match status.state {
                State::Starting | State::Active => {
                    entry.wanted() == Wanted::Active && status.started_at.is_some()
                }
                State::Unclaimed => entry.wanted() == Wanted::Nothing,
                _ => false,
            };
            let runs = entry.observed().domain == Some(RunState::Running) && entry.running.is_none();
            if is_up && runs && (status.ip.is_none() || merged != status.addresses) {
                self.begin(instance, Work::Addresses(merged));
            }
        }
    }

    fn finished(&mut self, report: Report) {
        let instance = report.instance;
        let entry = self.world.touch(instance);
        let cancelled = entry.running.take().is_some_and(|running| running.cancel.is_cancelled());
        entry.status = report.status;
        match report.observed {
            None => {}
            Some(Ok(observed)) => entry.observe(observed),
            // Anything may have become of it.
            Some(Err(error)) => {
                tracing::debug!(%instance, %error, "failed to observe an instance after work on it");
                entry.lose_sight();
                self.look_due = self.look_due.min(Instant::now() + LOOK_SOON);
            }
        }
        if let Some(record) = report.record {
            entry.record = record;
        }
        entry.buried |= report.buried;
        if !matches!(report.outcome, Outcome::RetryBounded(_)) {
            entry.without_image = None;
        }
        if let Some(allocation) = report.allocation {
            entry.allocation = Some(allocation);
        }
        if report.request_dropped {
            entry.request = None;
        }
        match report.outcome {
            Outcome::Done if report.resumed => {
                entry.resumed = Some(Instant::now());
                self.observe(instance);
                return;
            }
            Outcome::Done => {
                // What failed for good stays so until its time comes, although telling it worked.
                if !report.told_failure {
                    entry.retry = None;
                }
                // Who has its addresses is not waited for any more.
                self.want_addresses();
            }
            Outcome::Abandoned if cancelled => {}
            Outcome::Abandoned => entry.retry_later(),
            Outcome::Retry(why) => {
                tracing::warn!(%instance, why, "did not work for now; trying again");
                entry.retry_later();
                // What stopped it may have changed what is there.
                self.observe(instance);
            }
            Outcome::RetryBounded(why)
                if entry.without_image.get_or_insert_with(Instant::now).elapsed() < IMAGE_PATIENCE =>
            {
                tracing::warn!(%instance, why, "did not work for now; trying again");
                entry.retry_later();
            }
            Outcome::RetryBounded(reason) | Outcome::Failed(reason) => {
                if ran(&entry.facts()) {
                    // It is kept, and tried again: what is wrong with it may be mended.
                    entry.retry_later();
                }
                self.begin(instance, Work::Fail(reason));
                return;
            }
        }
        self.consider(instance);
    }

    fn consider_all(&mut self) {
        for instance in self.world.ids() {
            self.consider(instance);
        }
        self.want_addresses();
    }

    /// Decides about one instance and begins what is to be done.
    fn consider(&mut self, instance: InstanceId) {
        if !(self.listed && self.looked) {
            return;
        }
        let Some(entry) = self.world.get_mut(instance) else { return };
        let wanted = entry.wanted();
        if let Some(running) = &entry.running
            && !planted("two-jobs-at-once")
        {
            // The newest wish wins over work begun for another.
            if running.wanted != wanted {
                running.cancel.cancel();
            }
            return;
        }
        if entry.retry.is_some_and(|retry| Instant::now() < retry.at) {
            return;
        }
        if !entry.is_seen() && wanted != Wanted::Destroyed {
            return;
        }
        entry.wake = None;
        let decision = decide(&entry.facts(), &self.limits);
        match decision {
            // It ran into the same wall again.
            Decision::Run(effects)
                if effects.contains(&Effect::Resume) && entry.resumed_lately(RESUME_PERIOD) =>
            {
                entry.wake_in(RESUME_PERIOD);
            }
            Decision::Settled => entry.retry = None,
            Decision::Run(effects) => self.begin(instance, Work::Effects(effects)),
            Decision::Fail(reason) => self.begin(instance, Work::Fail(reason)),
            Decision::AskPlacement => self.ask_placement(instance),
            Decision::AskWhose => self.ask_whose(instance),
            Decision::AwaitAddress => self.want_addresses(),
            Decision::LookAgain(after) => entry.wake_in(after),
            Decision::Report(what) => {
                if entry.reported != Some(what) {
                    entry.reported = Some(what);
                    let why = entry.request.as_ref().and_then(|request| request.record.as_ref().err());
                    tracing::warn!(%instance, why, "{what}");
                }
            }
        }
        self.world.forget_if_empty(instance);
    }

    fn begin(&mut self, instance: InstanceId, work: Work) {
        let cancel = CancellationToken::new();
        let entry = self.world.touch(instance);
        entry.running = Some(Running { cancel: cancel.clone(), wanted: entry.wanted() });
        let request = entry.request.as_ref();
        let job = Job {
            instance,
            work,
            request: request.and_then(|request| request.record.as_ref().ok()).cloned(),
            request_revision: request.map(|request| request.revision),
            status: entry.status.clone(),
            allocated: entry.allocation.as_ref().and_then(Held::amounts),
        };
        let (parts, pool, reports) = (Arc::clone(&self.parts), Arc::clone(&self.pool), self.reports.clone());
        self.tasks.spawn(async move {
            let report = perform(parts, pool, job, cancel).await;
            reports.send(report).await.ok();
        });
    }

    fn want_addresses(&self) {
        let nics = self.parts.settings.nics();
        let mut wanted = addresses::Wanted::default();
        for (instance, entry) in self.world.iter() {
            let running = entry.observed().domain == Some(RunState::Running);
            let up = |status: &&Status| {
                running && (entry.wanted() == Wanted::Active || status.state == State::Unclaimed)
            };
            let Some(status) = entry.status.known().filter(up) else { continue };
            // Nobody may ever ask for an address on the second interface's network: not waited for endlessly.
            let fresh = status.started_at.is_some_and(|started| {
                self.parts.host.now().duration_since(started).unsigned_abs() < self.limits.address
            });
            let complete = (0..nics).all(|nic| status.addresses.iter().any(|address| address.nic == nic));
            // Who was looked for in vain long enough is looked for on, but not all the time.
            let waiting =
                (status.ip.is_none() && entry.searched() < self.limits.address) || (fresh && !complete);
            let list = if waiting { &mut wanted.waiting } else { &mut wanted.known };
            list.push(instance);
        }
        wanted.waiting.sort_unstable();
        wanted.known.sort_unstable();
        self.wanted_addresses.send_if_modified(|current| {
            let changed = *current != wanted;
            *current = wanted;
            changed
        });
    }
}

/// Whose an allocation is of which no request is known here. What the watch has not told is no reason to give it
/// back, so the request itself is asked for, too.
async fn ask_whose(parts: &Parts, instance: InstanceId) -> Result<Whose, StoreError> {
    if parts.store.get(&parts.settings.keys.instance(instance)).await?.0.is_none() {
        return Ok(Whose::Foreign);
    }
    if planted("silent-watch-believed") {
        return Ok(Whose::AskedFor);
    }
    let (request, _) = parts.store.get(&parts.request_key(instance)).await?;
    Ok(if request.is_some() { Whose::Requested } else { Whose::AskedFor })
}

/// What is known now replaces what was known of the same interface; interfaces of which nothing is
/// known now keep what they had. Of each interface the best comes first, as it was told.
fn merge(old: &[ec_model::Address], new: Vec<ec_model::Address>) -> Vec<ec_model::Address> {
    let mut merged: Vec<_> =
        old.iter().filter(|address| new.iter().all(|fresh| fresh.nic != address.nic)).cloned().collect();
    merged.extend(new);
    merged.sort_by_key(|address| address.nic);
    merged
}

#[cfg(test)]
mod tests {
    use ec_model::{Address, AddressSource, MacAddr};

    use super::*;

    #[test]
    fn a_new_address_replaces_the_old_one_of_its_interface_only() {
        let address = |nic, ip: &str| Address {
            ip: ip.parse().unwrap(),
            mac: MacAddr([0x52, 0, 0, 0, 0, nic]),
            nic,
            source: AddressSource::Lease,
        };
        let old = [address(0, "10.0.0.1"), address(1, "10.1.0.1")];
        assert_eq!(
            merge(&old, vec![address(0, "10.0.0.2")]),
            [address(0, "10.0.0.2"), address(1, "10.1.0.1")]
        );
        assert_eq!(merge(&old, vec![]), old);
    }
}

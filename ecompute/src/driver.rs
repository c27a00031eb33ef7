//! The agent's loop: what happens goes into [`Engine`], what comes out is performed. Nothing is decided here.
//!
//! Whatever takes time is a task of its own, whose end is the next event. A task or a channel that ends otherwise
//! ends the loop, and with it the agent.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ec_hypervisor::HypervisorEvent;
use ec_model::{InstanceId, RequestId};
use ec_plan::{
    Limits,
    engine::{Command, Engine, Event, Found, Job, Now, Search, Setup, Tell, Work},
    machine::Effect,
};
use ec_runtime::planted;
use ec_store::{Change, FollowOptions, Relist, follow_on_demand};
use tokio::{
    sync::{Semaphore, broadcast, mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

use crate::{
    about::about,
    addresses::look_for_addresses,
    jobs,
    look::{ask_placement, ask_whose, audit, changed, look_at_all},
    parts::Parts,
    port::Inquiry,
    worker::{Reins, perform},
};

/// The prefix is listed anew so often, should a watch ever lose an event.
const RESYNC: Duration = Duration::from_secs(300);
/// Jobs under way get so long to reach a safe point when the agent ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(20);

/// Questions that wait to be answered.
const INQUIRIES: usize = 16;

/// Something that the loop cannot do without has ended.
#[derive(Debug, thiserror::Error)]
#[error("{0} ended unexpectedly; the agent is deaf without")]
pub(crate) struct Deaf(&'static str);

/// Runs until `shutdown`; returns when every job has reached a safe point.
pub(crate) async fn run(parts: Arc<Parts>, shutdown: CancellationToken) -> Result<(), Deaf> {
    let (search, wanted) = watch::channel(Search::default());
    let (found, addresses) = mpsc::channel(64);
    let (ask, inquiries) = mpsc::channel(INQUIRIES);
    // There is one loop in the life of an agent.
    parts.inquiries.set(ask).ok();
    tokio::spawn(look_for_addresses(Arc::clone(&parts.hypervisor), wanted, found));
    let grace = if planted("audit-at-once") { Duration::ZERO } else { parts.settings.audit_grace };
    let limits = Limits { address: parts.settings.address_timeout, grace };
    let setup = Setup { limits, nics: parts.settings.nics() };
    let start = Instant::now();
    let prefix = parts.settings.keys.requests(parts.node);
    let options = FollowOptions { resync: RESYNC, ..FollowOptions::default() };
    let (changes, relist) = follow_on_demand(Arc::clone(&parts.store), prefix, None, options);
    let mut driver = Driver {
        engine: Engine::new(setup, Now { since_start: Duration::ZERO, stamp: parts.host.now() }),
        start,
        pool: Arc::new(Semaphore::new(parts.settings.workers)),
        tasks: JoinSet::new(),
        running: HashMap::new(),
        search,
        relist,
        parts,
    };
    let ended = driver.run(changes, addresses, inquiries, &shutdown).await;
    driver.take(Event::Ending);
    let rest = async { while driver.tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(SHUTDOWN_GRACE, rest).await.is_err() {
        tracing::warn!(
            "work is still under way after {} s; the next start goes on with it",
            SHUTDOWN_GRACE.as_secs()
        );
        driver.tasks.detach_all();
    }
    ended
}

struct Driver {
    parts: Arc<Parts>,
    engine: Engine,
    start: Instant,
    pool: Arc<Semaphore>,
    /// Each ends with what it has to tell.
    tasks: JoinSet<Event>,
    /// Jobs under way.
    running: HashMap<InstanceId, Reins>,
    search: watch::Sender<Search>,
    /// Has the requests listed anew, where the watch was found to be silent.
    relist: Relist,
}

impl Driver {
    async fn run(
        &mut self,
        mut changes: mpsc::Receiver<Change>,
        mut addresses: mpsc::Receiver<Found>,
        mut inquiries: mpsc::Receiver<Inquiry>,
        shutdown: &CancellationToken,
    ) -> Result<(), Deaf> {
        let parts = Arc::clone(&self.parts);
        let mut hints = parts.hypervisor.events();
        let mut held = parts.presence.subscribe();
        let mut registered = parts.registered.subscribe();
        loop {
            // What never comes due waits for as long as nothing else does.
            let due = self.start + self.engine.next_due().unwrap_or(Duration::from_secs(3600));
            // Every arm is a channel, a timer or a set of tasks: dropping one that did not fire loses nothing.
            let event = tokio::select! {
                biased;
                () = shutdown.cancelled() => return Ok(()),
                change = changes.recv() => match change {
                    Some(change) => changed(&parts, change),
                    None => return Err(Deaf("the watch on this node's requests")),
                },
                Some(ended) = self.tasks.join_next() => match ended {
                    Ok(event) => event,
                    Err(error) => {
                        tracing::error!(%error, "a task broke");
                        return Err(Deaf("a task of the agent's loop"));
                    }
                },
                found = addresses.recv() => match found {
                    Some(found) => Event::Found(found),
                    None => return Err(Deaf("the search for addresses")),
                },
                hint = hints.recv() => match hint {
                    Ok(HypervisorEvent::Changed(instance)) => Event::Hint(instance),
                    Ok(HypervisorEvent::LookAtAll) | Err(broadcast::error::RecvError::Lagged(_)) => Event::HintAll,
                    Err(broadcast::error::RecvError::Closed) => return Err(Deaf("the hypervisor's events")),
                },
                // The senders of these two live in the parts.
                _ = held.changed() => Event::PresenceChanged,
                _ = registered.changed() => Event::Registered,
                () = tokio::time::sleep_until(due) => Event::Due,
                // Last: whoever asks without end keeps it from nothing that it has to do. Its sender lives in the parts.
                Some(inquiry) = inquiries.recv() => {
                    inquiry(&self.engine);
                    continue;
                }
            };
            self.take(event);
        }
    }

    /// Gives the engine what has happened, and performs what it wants.
    fn take(&mut self, event: Event) {
        if let Event::Ended(report) = &event {
            self.running.remove(&report.instance);
        }
        let now = Now { since_start: self.start.elapsed(), stamp: self.parts.host.now() };
        for command in self.engine.on(event, now) {
            self.perform(command);
        }
    }

    fn perform(&mut self, command: Command) {
        let parts = Arc::clone(&self.parts);
        match command {
            Command::LookAtAll(begun) => {
                self.tasks.spawn(async move { Event::Looked(begun, look_at_all(&parts).await) });
            }
            Command::Observe(instance, begun) => {
                let observe = async move {
                    let observed = parts.hypervisor.observe(instance).await;
                    Event::Observed(instance, begun, observed.map_err(|error| error.to_string()))
                };
                self.tasks.spawn(observe.instrument(self.about(instance)));
            }
            Command::AskPlacement(instance) => {
                let request_id = self.engine.request_id(instance);
                let ask = async move {
                    let held = ask_placement(&parts, instance, request_id).await;
                    Event::Allocation(instance, held.map_err(|error| error.to_string()))
                };
                self.tasks.spawn(ask.instrument(self.about(instance)));
            }
            Command::AskWhose(instance) => {
                self.tasks.spawn(async move {
                    let whose = ask_whose(&parts, instance).await;
                    Event::Whose(instance, whose.map_err(|error| error.to_string()))
                });
            }
            Command::Relist => self.relist.now(),
            Command::Audit(begun) => {
                self.tasks.spawn(async move { Event::Audited(begun, audit(&parts).await) });
            }
            Command::Begin(job) => {
                let (reins, pool) = (Reins::default(), Arc::clone(&self.pool));
                let heard = reins.heard();
                self.running.insert(job.instance, reins);
                let (kind, began) = (jobs::kind(&job.work), Instant::now());
                let span = about(job.instance, parts.node, request_of(&job));
                let work = async move {
                    let report = perform(Arc::clone(&parts), pool, *job, heard).await;
                    parts.jobs.ended(kind, &report.outcome, began.elapsed());
                    Event::Ended(report)
                };
                self.tasks.spawn(work.instrument(span));
            }
            Command::Cancel(instance) => {
                if let Some(reins) = self.running.get(&instance) {
                    reins.cancel.cancel();
                }
            }
            Command::TakeUp(instance, newer) => {
                if let Some(reins) = self.running.get(&instance) {
                    reins.newer.send_replace(Some(newer));
                }
            }
            Command::Search(search) => {
                self.search.send_replace(search);
            }
            Command::Counted(counted) => {
                parts.uncounted.send_if_modified(|uncounted| {
                    let before = uncounted.len();
                    uncounted.retain(|instance, _| !counted.contains(instance));
                    uncounted.len() != before
                });
            }
            Command::Tell(Tell { warning, instance, what, why }) => {
                // Of what concerns the whole node there is nothing more to be said.
                let span = instance.map_or_else(Span::none, |instance| self.about(instance));
                span.in_scope(|| match warning {
                    true => tracing::warn!(error = why, "{what}"),
                    false => tracing::debug!(error = why, "{what}"),
                });
            }
        }
    }

    /// What lines about an instance have in common.
    fn about(&self, instance: InstanceId) -> Span {
        about(instance, self.parts.node, self.engine.request_id(instance))
    }
}

/// On behalf of which command a job is: whoever wishes to look at a guest wants nothing else of it.
fn request_of(job: &Job) -> Option<RequestId> {
    match &job.work {
        Work::Effects(effects) if let [Effect::Admit(wish)] = &effects[..] => wish.request_id,
        _ => job.request.as_ref()?.request_id,
    }
}

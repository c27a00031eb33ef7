//! The agent's brain: what happens goes in, what is to be done comes out.
//!
//! ```text
//!   what happens                   Engine::on                              what is to be done
//!  ┌──────────────────┐   ┌──────────────────────────────────────┐   ┌──────────────────────────┐
//!  │ requests, looks, │   │ learn it ─▶ known (by instance)      │   │ look, observe, ask, audit│
//!  │ answers, reports,├──▶│                │ facts               ├──▶│ begin or cancel a job    │
//!  │ addresses, hints,│   │                ▼                     │   │ look for addresses       │
//!  │ the clock        │   │         machine::plan ─▶ why         │   │ tell the operator        │
//!  └──────────────────┘   │ agenda: when to look, try, plan again│   └────────────┬─────────────┘
//!           ▲             └──────────────────────────────────────┘                │
//!           └──────────────── the runtime performs it and tells what came of it ──┘
//! ```
//!
//! It has no I/O, reads no clock and rolls no dice: time comes with every event, and the same events give the same
//! commands. Whatever happens is but a hint that an instance deserves a look; the plan is made from facts, so that
//! a hint that never came costs time and nothing else: every [`LOOK_PERIOD`] everything is looked at anyway.
//!
//! One instance has at most one job. A wish that changes meanwhile asks the job to stop at its next safe point, and
//! is planned for when it has; but for one that differs by a look at the guest, a name, a label or a lock alone, for
//! which it goes on.

mod agenda;
mod ended;
mod event;
mod job;
mod known;
mod look;
mod search;
mod sight;
#[cfg(test)]
mod tests;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use agenda::{Agenda, What};
use ec_model::{CopyOf, InstanceId, RequestId};
use known::{Busy, Copying, Known};

pub use event::{Audit, Begun, Command, Event, Now, Tell, Whose};
pub use job::{Change, Job, Outcome, Report, Work};
pub use known::{Held, Requested, StatusEntry};
pub use look::Seen;
pub use search::{Found, Search};
pub use sight::Sight;

use crate::{
    Facts, Limits, Wanted,
    machine::{self, Next, Problem, Question, Until},
    status,
};

/// Everything is looked at so often, whatever hints came. Catches what events missed.
pub const LOOK_PERIOD: Duration = Duration::from_secs(30);
/// What could not be looked at is looked at again after so long.
pub const LOOK_SOON: Duration = Duration::from_secs(1);
/// What waits until its disk is copied looks again after so long.
pub const COPY_PERIOD: Duration = Duration::from_secs(1);
/// An audit that failed is tried again after so long, doubled with each failure in a row up to [`LOOK_PERIOD`].
pub const AUDIT_RETRY: Duration = Duration::from_secs(2);
/// An image that could not be had for so long is given up at the next failure. Each try has some patience of its
/// own, and pauses grow between them.
pub const IMAGE_PATIENCE: Duration = Duration::from_secs(60);
/// What failed for a passing reason is tried again after so long, doubled with each failure in a row.
pub const RETRY_FIRST: Duration = Duration::from_millis(500);
/// Pauses between tries grow up to this.
pub const RETRY_MOST: Duration = Duration::from_secs(30);

/// What an agent is told once, at its start.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// The times that plans depend on.
    pub limits: Limits,
    /// How many interfaces a guest has.
    pub nics: u8,
}

/// What one agent knows and has under way.
#[derive(Debug)]
pub struct Engine {
    setup: Setup,
    known: BTreeMap<InstanceId, Known>,
    agenda: Agenda,
    /// Counts looks, to tell which began before a change.
    looks: u64,
    /// The requests have been listed once.
    listed: bool,
    /// Everything was looked at once. Before both, nothing is decided.
    looked: bool,
    looking: bool,
    auditing: bool,
    /// That the last of them failed was said.
    look_failed: bool,
    /// How many audits failed in a row, or were not told of all.
    audits_failed: u32,
    /// What users destroyed here, as the last look saw it: known before an older etcd brings its request back.
    buried: BTreeMap<InstanceId, Option<u64>>,
    /// Whose addresses are looked for, and whether that may have changed.
    search: Search,
    search_again: bool,
    now: Now,
    commands: Vec<Command>,
}

impl Engine {
    /// An agent that knows nothing yet, and is due at once.
    pub fn new(setup: Setup, now: Now) -> Self {
        let mut agenda = Agenda::default();
        agenda.set(What::Look, now.since_start);
        Self {
            setup,
            known: BTreeMap::new(),
            agenda,
            looks: 0,
            listed: false,
            looked: false,
            looking: false,
            auditing: false,
            look_failed: false,
            audits_failed: 0,
            buried: BTreeMap::new(),
            search: Search::default(),
            search_again: false,
            now,
            commands: Vec::new(),
        }
    }

    /// When it wants to be told that it is [`Event::Due`], counted from the start.
    pub fn next_due(&self) -> Option<Duration> {
        self.agenda.next()
    }

    /// What it is about with an instance, or waits for.
    pub fn why(&self, instance: InstanceId) -> Option<&str> {
        self.known.get(&instance).map(|known| &*known.why)
    }

    /// The id of the command that wrote what is wanted of an instance, where it tells that.
    pub fn request_id(&self, instance: InstanceId) -> Option<RequestId> {
        self.known.get(&instance)?.request.as_ref()?.record.as_ref().ok()?.request_id
    }

    /// Takes what has happened; answers what is to be done about it, in this order.
    pub fn on(&mut self, event: Event, now: Now) -> Vec<Command> {
        self.now = now;
        match event {
            Event::Listed(requests) => self.listed(requests),
            Event::Changed(requests) => {
                let changed: Vec<_> = requests.iter().map(|(instance, _)| *instance).collect();
                for (instance, request) in requests {
                    self.request(instance, request);
                }
                for instance in changed {
                    self.consider(instance);
                }
            }
            Event::WatchLost(why) => {
                self.warn(None, "lost the watch on this node's requests; trying on", Some(why));
            }
            Event::Looked(begun, seen) => self.looked_at_all(begun, seen),
            Event::Observed(instance, begun, observed) => self.observed(instance, begun, observed),
            Event::Allocation(instance, held) => {
                let held = held.map(|held| {
                    let (now, known) = (self.now, self.touch(instance));
                    // An audit asks again for what it misses, whatever waits for its next try.
                    let is_news = !known.holds(&held);
                    known.hold(held, now);
                    if is_news {
                        self.no_failure(instance);
                    }
                });
                self.answered(instance, held, "failed to ask for its allocation; trying on");
            }
            Event::Whose(instance, whose) => {
                let whose = whose.and_then(|whose| {
                    if whose == Whose::Requested {
                        self.commands.push(Command::Relist);
                        return Err("it is requested, and the watch on requests has not told".to_owned());
                    }
                    self.touch(instance).asked_for = Some(whose == Whose::AskedFor);
                    Ok(())
                });
                self.answered(instance, whose, "failed to ask whether it is ours; trying on");
            }
            Event::Audited(begun, held) => self.audited(begun, held),
            Event::Found(found) => self.found(found),
            // While a job is under way nothing is taken from a look; most look for themselves when they have ended,
            // and those that do not are followed by one. One that nobody here knows is looked at: a call of ours that
            // came back late may have made it.
            Event::Hint(instance) => match self.known.get_mut(&instance) {
                Some(known) if known.busy.is_some() => known.hinted = true,
                _ => self.observe(instance),
            },
            Event::HintAll => self.look(),
            Event::Ended(report) => self.ended(report),
            Event::PresenceChanged => {
                self.look();
                self.audit();
            }
            Event::Registered => self.audit(),
            Event::Due => self.due(),
            Event::Ending => self.cancel_all(),
        }
        if std::mem::take(&mut self.search_again) {
            self.search_for();
        }
        std::mem::take(&mut self.commands)
    }

    fn due(&mut self) {
        while let Some(what) = self.agenda.take(self.now.since_start) {
            match what {
                What::Look => {
                    self.look();
                    self.audit();
                }
                What::Audit => self.audit(),
                What::Retry(instance) | What::Wake(instance) => self.consider(instance),
            }
        }
    }

    fn cancel_all(&mut self) {
        for (instance, known) in &mut self.known {
            if let Some(Busy::Working { cancelled: cancelled @ false, .. }) = &mut known.busy {
                *cancelled = true;
                self.commands.push(Command::Cancel(*instance));
            }
        }
    }

    fn listed(&mut self, requests: Vec<(InstanceId, Requested)>) {
        let listed: BTreeSet<_> = requests.iter().map(|(instance, _)| *instance).collect();
        let looks = self.looks;
        for (instance, known) in &mut self.known {
            // What an emptied etcd knew nothing of may be ours again in one that was put back.
            known.asked_for = None;
            if !listed.contains(instance) {
                if known.lose_request() {
                    known.touched = looks;
                }
                // Where etcd was put back, placement may have forgotten it too. Of what is not here the allocation is
                // all that is known, and since when.
                if known.is_here() {
                    known.forget_allocation();
                }
            }
        }
        for (instance, request) in requests {
            let is_known = self.known.get(&instance).is_some_and(|known| known.request.is_some());
            self.request(instance, Some(request));
            if self.listed && !is_known {
                self.touch(instance).came_back();
            }
        }
        self.listed = true;
        self.look();
        self.audit();
        self.consider_all();
    }

    /// Takes a request. Not marked as changed: a look under way says nothing of requests, and all of the rest.
    fn request(&mut self, instance: InstanceId, request: Option<Requested>) {
        match request {
            Some(request) => {
                let before = self.entry(instance).request.replace(request);
                // A new wish is tried at once, whatever failed before. One that is only listed again is none.
                if before != self.entry(instance).request {
                    self.entry(instance).forget_failure_of_volumes();
                    self.no_failure(instance);
                }
            }
            None => {
                if self.known.get_mut(&instance).is_some_and(Known::lose_request) {
                    self.touch(instance);
                    self.look();
                }
            }
        }
    }

    /// A question of a plan was answered, or not.
    fn answered(&mut self, instance: InstanceId, answer: Result<(), String>, failed: &'static str) {
        self.touch(instance).busy = None;
        if let Err(why) = answer {
            let about = self.touch(instance).why.clone();
            self.retry_later(instance, &why);
            self.warn(Some(instance), failed, Some(why.clone()));
            // Whoever waits is told what for.
            let known = self.touch(instance);
            let waits = known.wanted() == Wanted::Active;
            let news = known.status.known().is_some_and(|old| status::delayed(old, &why).is_some());
            if waits && news {
                return self.begin(instance, Work::Delayed(why), about);
            }
        }
        self.consider(instance);
        self.follow_hint(instance);
    }

    /// Looks at what a hint told of while nothing could be taken from a look.
    fn follow_hint(&mut self, instance: InstanceId) {
        let Some(known) = self.known.get_mut(&instance).filter(|known| known.busy.is_none()) else { return };
        if std::mem::take(&mut known.hinted) {
            self.observe(instance);
        }
    }

    fn consider_all(&mut self) {
        for instance in self.known.keys().copied().collect::<Vec<_>>() {
            self.consider(instance);
        }
        self.search_again = true;
    }

    /// Plans for one instance and begins what is to be done.
    fn consider(&mut self, instance: InstanceId) {
        if !(self.listed && self.looked) {
            return;
        }
        let Some(known) = self.known.get_mut(&instance) else { return };
        match &mut known.busy {
            // Who looks at it, or names it, costs it nothing of what was done.
            Some(Busy::Working { request: Some(request), cancelled: false, takes_up, .. })
                if let Some(newer) = known.request.as_ref().filter(|newer| newer.goes_on_from(request)) =>
            {
                (*request, *takes_up) = (newer.clone(), true);
                self.commands.push(Command::TakeUp(instance, newer.clone()));
                return;
            }
            // The newest wish wins over work begun for another.
            Some(Busy::Working { request, cancelled: cancelled @ false, .. })
                if *request != known.request =>
            {
                *cancelled = true;
                self.commands.push(Command::Cancel(instance));
                return;
            }
            Some(_) => return,
            None => {}
        }
        if self.agenda.has(What::Retry(instance)) {
            return;
        }
        self.agenda.clear(What::Wake(instance));
        let facts = self.facts(instance);
        let plan = machine::plan(&facts, &self.setup.limits);
        let Some(known) = self.known.get_mut(&instance) else { return };
        if known.why != plan.why {
            known.why = plan.why.clone();
            self.tell(false, Some(instance), plan.why.clone(), None);
        }
        match plan.next {
            Next::Settled | Next::Stuck(Problem::Told) => self.no_failure(instance),
            Next::Run(effects) => self.begin(instance, Work::Effects(effects), plan.why),
            Next::Ask(question) => self.ask(instance, question),
            Next::Wait(Until::Address) => {
                self.no_failure(instance);
                self.search_again = true;
            }
            // The look that is due soon plans again.
            Next::Wait(Until::Sight) => {}
            Next::Wait(Until::Copied) => self.wait_for_copy(instance, facts.generation, plan.why),
            Next::Wait(Until::After(pause)) => {
                self.agenda.set(What::Wake(instance), self.now.since_start + pause);
            }
            Next::Stuck(Problem::Failed(reason)) => self.begin(instance, Work::Fail(reason), plan.why),
            Next::Stuck(Problem::Report(what)) => self.report(instance, what),
        }
        if self.known.get(&instance).is_some_and(Known::is_empty) {
            self.forget(instance);
        }
    }

    /// Looks again after a while whether its disk is copied; what no state says of that is told first.
    fn wait_for_copy(&mut self, instance: InstanceId, generation: u64, why: Cow<'static, str>) {
        let told = self.known.get(&instance).and_then(|known| known.status.known());
        match told {
            Some(told) if status::is_news(told, generation, &why) => {
                self.begin(instance, Work::Delayed(why.to_string()), why);
            }
            _ => self.agenda.set(What::Wake(instance), self.now.since_start + COPY_PERIOD),
        }
    }

    fn forget(&mut self, instance: InstanceId) {
        self.known.remove(&instance);
        self.no_failure(instance);
        self.agenda.clear(What::Wake(instance));
    }

    /// What is known of an instance, with the disk that it boots from.
    fn facts(&self, instance: InstanceId) -> Facts {
        let nothing = Known::default();
        let of = |instance| self.known.get(&instance).unwrap_or(&nothing);
        let known = of(instance);
        let mut facts = known.facts(self.now);
        if let Some(root) = known.root().map(of) {
            facts.on_volume = true;
            facts.unseen |= root.is_unseen();
            facts.observed.volume = root.is_made();
        }
        if facts.takes_disk() {
            facts.copied_by = self.copied_by(instance, &facts);
        }
        facts
    }

    /// What is to be a copy of a disk, and is made before that is otherwise. Of two that are to be copies of each other the one that
    /// was wished first is made first: what has no disk yet, and what goes, waits for nobody.
    fn copied_by(&self, disk: InstanceId, facts: &Facts) -> Option<InstanceId> {
        let is_to_be_copy = facts.wanted == Wanted::Active && facts.is_to_be_rebuilt();
        let since = facts.rebuild.wished.filter(|_| is_to_be_copy);
        let root_of = |machine: &InstanceId| self.known.get(machine).and_then(Known::root);
        let is_of_it = |of: &CopyOf| {
            of.disk == disk
                || of.beside.contains(&disk)
                || (of.held.is_none() && root_of(&of.disk) == Some(disk))
        };
        let is_first = |(other, known): &(&InstanceId, &Known)| {
            let is_copy = **other != disk && known.copy().is_some_and(|of| is_of_it(&of));
            is_copy
                && known.copies(self.now).is_some_and(|copying| match (copying, since) {
                    (Copying::Anew(at), Some(since)) => (at, **other) < (since, disk),
                    _ => true,
                })
        };
        self.known.iter().find(is_first).map(|(other, _)| *other)
    }

    /// Plans for what boots from a volume, where that may be otherwise than it was.
    fn consider_who_boots_from(&mut self, volume: InstanceId, was_made: bool) {
        if self.is_made(volume) == was_made {
            return;
        }
        let boots = self.known.iter().filter(|(_, known)| known.root() == Some(volume));
        for instance in boots.map(|(instance, _)| *instance).collect::<Vec<_>>() {
            self.consider(instance);
        }
    }

    fn is_made(&self, volume: InstanceId) -> bool {
        self.known.get(&volume).is_some_and(Known::is_made)
    }

    /// Tells the operator of an instance that is left as it is, once.
    fn report(&mut self, instance: InstanceId, what: &'static str) {
        let Some(known) = self.known.get_mut(&instance) else { return };
        if known.reported.replace(what) != Some(what) {
            let why = known.request.as_ref().and_then(|request| request.record.as_ref().err()).cloned();
            self.warn(Some(instance), what, why);
        }
    }

    /// Asking counts as work under way, so that it is done once at a time.
    fn ask(&mut self, instance: InstanceId, question: Question) {
        self.touch(instance).busy = Some(Busy::Asking);
        self.commands.push(match question {
            Question::Placement => Command::AskPlacement(instance),
            Question::Whose => Command::AskWhose(instance),
        });
    }

    fn begin(&mut self, instance: InstanceId, work: Work, why: Cow<'static, str>) {
        let known = self.touch(instance);
        let tells_failure = matches!(work, Work::Fail(_) | Work::Delayed(_));
        let (request, cancelled, takes_up) = (known.request.clone(), false, false);
        known.busy = Some(Busy::Working { request, tells_failure, cancelled, takes_up });
        let request = known.request.as_ref();
        let job = Job {
            instance,
            work,
            why,
            request: request.and_then(|request| request.record.clone().ok()),
            request_revision: request.map(|request| request.revision),
            kept: known.record.kept(),
            status: known.status.clone(),
            allocated: known.amounts().cloned(),
        };
        self.commands.push(Command::Begin(Box::new(job)));
    }

    /// What is known of an instance, marked as changed now.
    fn touch(&mut self, instance: InstanceId) -> &mut Known {
        let looks = self.looks;
        let known = self.entry(instance);
        known.touched = looks;
        known
    }

    /// What is known of an instance; of one that is new, whether it was destroyed here.
    fn entry(&mut self, instance: InstanceId) -> &mut Known {
        let buried = self.buried.get(&instance).copied();
        self.known.entry(instance).or_insert_with(|| Known::new(buried))
    }

    fn warn(&mut self, instance: Option<InstanceId>, what: &'static str, why: Option<String>) {
        self.tell(true, instance, what, why);
    }

    fn tell(
        &mut self,
        warning: bool,
        instance: Option<InstanceId>,
        what: impl Into<Cow<'static, str>>,
        why: Option<String>,
    ) {
        self.commands.push(Command::Tell(Tell { warning, instance, what: what.into(), why }));
    }
}

//! What is known of one instance: what its plan is made from.

use std::{borrow::Cow, sync::Arc, time::Duration};

use ec_model::{
    AccessWish, Attachment, CopyOf, Desired, Edition, Handover, InstanceId, Observed, Power, Request,
    Resources, RunState, Size, State, Status, Workload,
};
use jiff::Timestamp;

use super::{Change, Now};
use crate::{
    Allocation, Asked, Facts, KnownStatus, PowerFacts, RebuildFacts, RecordFacts, RescueFacts, RescuedFacts,
    ResizeFacts, StatusFacts, VolumesFacts, Wanted, fingerprint, machine::ran, status, verbs::is_built,
};

/// Between two searches for an address more time may pass in which nobody looked; no more than this counts.
const SEARCH_STEP: Duration = Duration::from_secs(1);

/// A disk that is to be a copy, and is not made yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copying {
    /// The first of what has none.
    New,
    /// In the place of another, as was wished then.
    Anew(Timestamp),
}

/// A request as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requested {
    /// The record, or why it cannot be read.
    pub record: Result<Arc<Request>, String>,
    /// The revision that wrote it.
    pub revision: i64,
}

impl Requested {
    /// Whether what is under way for another, which may be a download or a copy of hours, goes on for it: all that it wants beyond that is
    /// that somebody may look at the instance, another name, or what only its record in etcd tells: labels, a lock.
    pub(super) fn goes_on_from(&self, before: &Self) -> bool {
        let (Ok(newer), Ok(older)) = (&self.record, &before.record) else { return false };
        let same = Request { access: newer.access, ..Request::clone(older) };
        if **newer == same {
            return newer.access != older.access;
        }
        let Request { generation, request_id, ref name, .. } = **newer;
        **newer == Request { generation, request_id, name: name.clone(), ..same }
    }
}

/// A status as it lies in etcd.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StatusEntry {
    /// There is none.
    #[default]
    Absent,
    /// It cannot be read.
    Unreadable,
    /// It was read, or written by us, at this revision.
    Known(Box<Status>, i64),
}

impl StatusEntry {
    /// The status, where it can be read.
    pub fn known(&self) -> Option<&Status> {
        match self {
            Self::Known(status, _) => Some(status),
            Self::Absent | Self::Unreadable => None,
        }
    }
}

/// What placement holds for an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Held {
    /// Nothing.
    Nothing,
    /// Something, but from other nodes' providers.
    Elsewhere,
    /// These amounts, from this node's providers.
    Here(Resources),
}

/// Work under way for an instance; there is never more than one.
#[derive(Debug)]
pub(super) enum Busy {
    /// A question that its plan needs answered.
    Asking,
    /// A job.
    Working {
        /// The request that it was begun for.
        request: Option<Requested>,
        /// All that it does is to tell a failure.
        tells_failure: bool,
        /// It was asked to stop at its next safe point.
        cancelled: bool,
        /// It was told to go on for another request, and may have met that before.
        takes_up: bool,
    },
}

/// Everything known of one instance.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) request: Option<Requested>,
    /// Its status as last read or written.
    pub(super) status: StatusEntry,
    observed: Observed,
    /// Work of ours changed what the hypervisor has, and it could not be asked since.
    unseen: bool,
    /// What was seen of it may be old. Its request came with a listing after the watch was lost, perhaps of an etcd that was put back: a status
    /// of it may be there as well, which this agent wrote and has forgotten. Or the request is gone by which it waited for a disk
    /// of another node: that may have come.
    unread: bool,
    pub(super) record: RecordFacts,
    /// Its user destroyed it here, as of that placement where it is known.
    pub(super) buried: Option<Option<u64>>,
    /// This node holds it in etcd, so that it can be brought back.
    pub(super) held: bool,
    /// What placement has; `None` is not known.
    allocation: Option<Held>,
    /// When this agent first saw that it has something here.
    held_since: Duration,
    /// Whether control tools asked for it, where that was looked up.
    pub(super) asked_for: Option<bool>,
    pub(super) busy: Option<Busy>,
    /// While it was busy, the hypervisor hinted that something of it changed.
    pub(super) hinted: bool,
    /// How often it has failed in a row, for passing reasons.
    pub(super) failures: u32,
    /// Since when its image cannot be had, and nothing else is wrong.
    pub(super) without_image: Option<Duration>,
    /// For how long an address was looked for in vain since the guest runs. Counts only looks that worked.
    searched: Duration,
    last_search: Option<Duration>,
    /// When it was let go on last, after a pause.
    resumed: Option<Duration>,
    /// When it was tried in vain to give it its volumes.
    volumes_failed: Option<Duration>,
    /// When the guest that runs was asked first and last to end.
    asked_to_end: Option<(Duration, Duration)>,
    /// It could not be asked, and was not seen since. Its time runs from when it is: that of a daemon that stands still is not its own.
    asked_in_vain: bool,
    /// When it was first seen not to run.
    ended: Option<Duration>,
    /// What was reported to the operator last, so that it is said once.
    pub(super) reported: Option<&'static str>,
    /// The last look that had begun when our own work changed what a look sees; up to it they say nothing of it.
    pub(super) touched: u64,
    /// What the agent is about.
    pub(super) why: Cow<'static, str>,
}

impl Known {
    /// Of an instance of which nothing is known but whether its user destroyed it here.
    pub(super) fn new(buried: Option<Option<u64>>) -> Self {
        Self { buried, ..Self::default() }
    }

    /// What the request wants.
    pub(super) fn wanted(&self) -> Wanted {
        match &self.request {
            None => Wanted::Nothing,
            Some(Requested { record: Err(_), .. }) => Wanted::Unreadable,
            Some(Requested { record: Ok(request), .. }) => match request.desired {
                Desired::Active => Wanted::Active,
                Desired::Destroyed => Wanted::Destroyed,
            },
        }
    }

    /// Whether what is asked for is what its user destroyed here. A volume that comes from another node is not, where it was placed
    /// later than what was destroyed: an older etcd had it here, and it was somewhere else.
    fn is_buried(&self) -> bool {
        let comes_since = |destroyed: u64| {
            self.readable().is_some_and(|request| {
                matches!(request.handover, Some(Handover::From(_))) && request.epoch > destroyed
            })
        };
        self.buried.is_some_and(|epoch| !epoch.is_some_and(comes_since))
    }

    /// The facts, as plans are made from them.
    pub(super) fn facts(&self, now: Now) -> Facts {
        Facts {
            kind: self.kind(),
            wanted: self.wanted(),
            generation: self.readable().map_or(0, |request| request.generation),
            edition: self.readable().map(Edition::of),
            handover: self.readable().and_then(|request| request.handover),
            power: self.power(),
            metadata: self
                .readable()
                .and_then(|request| request.spec.as_ref())
                .map_or(0, |spec| fingerprint(&spec.metadata)),
            rebuild: RebuildFacts {
                wished: self
                    .readable()
                    .and_then(|request| request.rebuild.as_ref())
                    .map(|wish| wish.wished_at),
                told: self.status.known().and_then(|status| status.rebuilt.as_ref()).map(|was| was.wished_at),
            },
            rescue: RescueFacts {
                wished: self
                    .readable()
                    .and_then(|request| request.rescue.as_ref())
                    .map(|wish| wish.wished_at),
                told: self.status.known().and_then(|status| status.rescued.as_ref()).map(RescuedFacts::of),
            },
            resize: self.resize(),
            volumes: self.volumes(now),
            held: self.amounts().map(Size::of).unwrap_or_default(),
            access: self.access(),
            status: match &self.status {
                StatusEntry::Absent => StatusFacts::Absent,
                StatusEntry::Unreadable => StatusFacts::Unreadable,
                StatusEntry::Known(status, _) => StatusFacts::Known(KnownStatus {
                    state: status.state,
                    reason: status.reason.clone(),
                    epoch: status.epoch,
                    generation: status.observed_generation,
                    has_address: status.ip.is_some(),
                    start_noted: status.started_at.is_some(),
                    restarts: status.restarts,
                }),
            },
            observed: self.observed,
            copies: self.copy().map_or(0, |of| CopyOf::fingerprint(&of.beside)),
            on_volume: false,
            copied_by: None,
            unseen: self.is_unseen(),
            record: self.record,
            buried: self.is_buried(),
            is_held: self.held,
            allocation: match &self.allocation {
                None => Allocation::Unknown,
                Some(Held::Nothing) => Allocation::Absent,
                Some(Held::Elsewhere) => Allocation::Elsewhere,
                Some(Held::Here(_)) => {
                    Allocation::Held { seen_for: now.since_start.saturating_sub(self.held_since) }
                }
            },
            asked_for: self.asked_for,
            searched: self.searched,
            resumed: self.resumed.map(|resumed| now.since_start.saturating_sub(resumed)),
            asked_to_end: self.asked_to_end.map(|(first, last)| Asked {
                first: now.since_start.saturating_sub(first),
                last: now.since_start.saturating_sub(last),
            }),
            ran_for: self.ran_for(now),
            ended_for: self.ended.map_or(Duration::ZERO, |ended| now.since_start.saturating_sub(ended)),
        }
    }

    pub(super) fn readable(&self) -> Option<&Request> {
        self.request.as_ref()?.record.as_deref().ok()
    }

    /// The volume that it boots from; none where it has a disk of its own.
    pub(super) fn root(&self) -> Option<InstanceId> {
        let wanted = self.readable().and_then(|request| Attachment::root_of(&request.volumes));
        wanted.or(self.record.root())
    }

    /// Of a volume, whether a machine can boot from it: its disk is there, and is not being made.
    pub(super) fn is_made(&self) -> bool {
        self.observed.volume && !matches!(self.record, RecordFacts::Kept { started: false, .. })
    }

    /// What its disk is a copy of, or is to be.
    pub(super) fn copy(&self) -> Option<CopyOf> {
        let request = self.readable().filter(|_| self.wanted() == Wanted::Active)?;
        request.spec.as_ref()?.image.copied()
    }

    /// That the disk of one that is a copy ([`Self::copy`]) has yet to be made; nothing where it is, or was given up, or nobody
    /// can tell.
    pub(super) fn copies(&self, now: Now) -> Option<Copying> {
        let facts = self.facts(now);
        if matches!(facts.handover, Some(Handover::To(_))) || facts.status == StatusFacts::Unreadable {
            return None;
        }
        if ran(&facts) {
            // One that runs and is not counted has to be first, for which what is to go may have to.
            let waits =
                facts.observed.domain == Some(RunState::Running) && facts.allocation == Allocation::Absent;
            let wished = facts.rebuild.wished.filter(|_| facts.is_to_be_rebuilt() && !waits);
            return wished.map(Copying::Anew);
        }
        // A copy has its name once it is whole, and one that another node had was made there.
        let is_made = facts.observed.volume || facts.handover.is_some();
        let is_given_up = facts.buried || self.status.known().is_some_and(|told| told.state == State::Error);
        (!is_made && !is_given_up).then_some(Copying::New)
    }

    /// What the request says of power, and whether the status tells that it is so.
    pub(super) fn power(&self) -> PowerFacts {
        let Some(request) = self.readable() else { return PowerFacts::default() };
        let wish = &request.power;
        let is_pending = |status: &Status| {
            // By which one is started again that was brought back, whose wish has no number; also where that failed.
            let is_up = matches!(self.observed.domain, Some(RunState::Running | RunState::Paused(_)));
            let is_start = match status.state {
                State::Starting => true,
                State::Error => is_built(status) && wish.power == Power::Running && !is_up,
                _ => false,
            };
            status.power_generation < wish.generation || is_start && status.power_generation == 0
        };
        // Of one that is to run once more without a new wish: its guest was ended for this one before, or long ago. So it is told
        // then; in any other state it has yet to be ended.
        let ran = matches!(self.record, RecordFacts::Kept { started: true, .. });
        let was_ended = |status: &Status| {
            (ran || is_built(status))
                && matches!(status.state, State::Starting | State::Error)
                && status.power_generation == 0
                && status.observed_generation >= wish.generation
        };
        PowerFacts {
            // Nothing is wished of its power while it boots from its rescue disk: it runs, until it ends by itself.
            wanted: if self.record.is_rescued() { Power::Running } else { wish.power },
            pending: self.status.known().is_some_and(is_pending),
            generation: wish.generation,
            anew: wish.anew && !self.status.known().is_some_and(was_ended),
            grace: Duration::from_secs(wish.grace_seconds.into()),
            restart: request.restart,
        }
    }

    /// For who looks in: what nobody asks for any more its status tells of.
    pub(super) fn kind_told(&self) -> Workload {
        let requested = self.readable().map(|request| request.kind);
        requested.or_else(|| self.status.known().map(|status| status.kind)).unwrap_or_default()
    }

    /// As the request has it.
    fn kind(&self) -> Workload {
        self.readable().map(|request| request.kind).unwrap_or_default()
    }

    /// Which volumes it shall have, and of which the status tells.
    fn volumes(&self, now: Now) -> VolumesFacts {
        let wanted = self.readable().map(|request| Attachment::fingerprint(&request.volumes));
        let is_plain = |status: &&Status| !status.volumes_changing && status.volumes_failed.is_none();
        let status = self.status.known().filter(is_plain);
        VolumesFacts {
            wanted: wanted.unwrap_or_default(),
            told: status.map(|status| Attachment::fingerprint(&status.volumes)),
            failed: self.volumes_failed.map(|failed| now.since_start.saturating_sub(failed)),
        }
    }

    /// How large it shall be, and of which wish for that the status tells.
    fn resize(&self) -> ResizeFacts {
        let spec = self.readable().and_then(|request| request.spec.as_ref());
        let told = self.status.known().and_then(|status| status.resized.as_ref());
        ResizeFacts {
            wanted: spec.map(|spec| Size::of(&spec.resources)).unwrap_or_default(),
            wished: self.readable().and_then(|request| request.resize).map(|wish| wish.wished_at),
            told: told.map(|was| was.wished_at),
            told_failed: told.is_some_and(|was| was.failed.is_some()),
        }
    }

    /// The wish to look at it, where the status is not of this one: not of a later either, in an etcd that was put back.
    fn access(&self) -> Option<AccessWish> {
        status::looked_for(self.readable()?, self.status.known())
    }

    /// To its end, where that is told. Clocks of the wall go back at times; then it ran for no time at all.
    fn ran_for(&self, now: Now) -> Duration {
        let Some(status) = self.status.known() else { return Duration::ZERO };
        let end = if status.state == State::Stopped { status.since } else { now.stamp };
        let ran = status.started_at.map(|started| end.duration_since(started));
        ran.and_then(|ran| Duration::try_from(ran).ok()).unwrap_or_default()
    }

    /// Takes what a job changed or learnt.
    pub(super) fn learn(&mut self, change: Change, now: Now) {
        match change {
            Change::Status(status) => {
                // What is held is written and deleted with it.
                self.held = status.known().is_some_and(|status| status.state == State::Unclaimed);
                self.status = status;
            }
            Change::Observed(Ok(observed)) => self.observe(observed, now),
            // Anything may have become of it.
            Change::Observed(Err(_)) => self.unseen = true,
            Change::Record(record) => self.record = record,
            Change::Buried(epoch) => self.buried = Some(epoch),
            Change::Unburied => self.buried = None,
            Change::Allocation(held) => self.hold(held, now),
            Change::AskedToEnd => self.ask_to_end(now),
            Change::AskedInVain => self.asked_in_vain = true,
            Change::Resumed => self.resumed = Some(now.since_start),
            Change::VolumesFailed => self.volumes_failed = Some(now.since_start),
            // Told of the request that the job had.
            Change::RequestDropped => {}
        }
    }

    fn ask_to_end(&mut self, now: Now) {
        let first = self.asked_to_end.map_or(now.since_start, |(first, _)| first);
        self.asked_to_end = Some((first, now.since_start));
    }

    /// What the hypervisor has, as it was last seen.
    pub(super) fn observed(&self) -> Observed {
        self.observed
    }

    /// Whether the hypervisor has anything of it.
    pub(super) fn is_here(&self) -> bool {
        !self.observed.is_nothing()
    }

    /// Whether its processors run.
    pub(super) fn runs(&self) -> bool {
        self.observed.domain == Some(RunState::Running)
    }

    /// Whether it is not known what the hypervisor has, or what was told of it.
    pub(super) fn is_unseen(&self) -> bool {
        self.unseen || self.unread
    }

    /// Takes that it is requested, and may have been before.
    pub(super) fn came_back(&mut self) {
        self.unread = true;
    }

    /// Takes that nobody requests it any more; whether it is to be looked at for that.
    pub(super) fn lose_request(&mut self) -> bool {
        let request = self.request.take().and_then(|request| request.record.ok());
        let waited = request.is_some_and(|request| matches!(request.handover, Some(Handover::From(_))));
        self.unread |= waited;
        waited
    }

    /// Takes the status that lies in etcd.
    pub(super) fn read(&mut self, status: StatusEntry) {
        (self.status, self.unread) = (status, false);
    }

    /// Takes what the hypervisor has now.
    pub(super) fn observe(&mut self, observed: Observed, now: Now) {
        self.unseen = false;
        self.hinted = false;
        if observed.domain != Some(RunState::Running) {
            (self.searched, self.last_search) = (Duration::ZERO, None);
        }
        let asked_in_vain = std::mem::take(&mut self.asked_in_vain);
        if matches!(observed.domain, Some(RunState::Running | RunState::Paused(_))) {
            self.ended = None;
            if asked_in_vain {
                self.ask_to_end(now);
            }
        } else {
            self.asked_to_end = None;
            self.ended.get_or_insert(now.since_start);
        }
        self.observed = observed;
    }

    /// Takes what placement has now. What it goes on holding here it holds since it was first seen.
    pub(super) fn hold(&mut self, held: Held, now: Now) {
        if !matches!(self.allocation, Some(Held::Here(_))) {
            self.held_since = now.since_start;
        }
        self.allocation = Some(held);
    }

    /// Whether that is what placement has, as far as is known.
    pub(super) fn holds(&self, held: &Held) -> bool {
        self.allocation.as_ref() == Some(held)
    }

    /// A new wish is tried at once.
    pub(super) fn forget_failure_of_volumes(&mut self) {
        self.volumes_failed = None;
    }

    /// What placement has is to be asked for again.
    pub(super) fn forget_allocation(&mut self) {
        self.allocation = None;
    }

    /// The amounts that it holds here.
    pub(super) fn amounts(&self) -> Option<&Resources> {
        match &self.allocation {
            Some(Held::Here(amounts)) => Some(amounts),
            None | Some(Held::Nothing | Held::Elsewhere) => None,
        }
    }

    /// For how long an address was looked for in vain.
    pub(super) fn searched(&self) -> Duration {
        self.searched
    }

    /// Counts a search for an address that worked and found none; whether it made `limit` full.
    pub(super) fn searched_in_vain(&mut self, limit: Duration, now: Now) -> bool {
        let before = self.searched;
        let since = |last| now.since_start.saturating_sub(last).min(SEARCH_STEP);
        self.searched += self.last_search.map_or(Duration::ZERO, since);
        self.last_search = Some(now.since_start);
        before < limit && self.searched >= limit
    }

    /// Nothing is known any more.
    pub(super) fn is_empty(&self) -> bool {
        self.is_gone() && self.buried.is_none()
    }

    /// Nothing is left of it, but perhaps that its user destroyed it here.
    pub(super) fn is_gone(&self) -> bool {
        self.request.is_none()
            && self.status == StatusEntry::Absent
            && !self.is_here()
            && !self.is_unseen()
            && self.record == RecordFacts::Absent
            && !self.held
            && self.busy.is_none()
            && self.amounts().is_none()
    }
}

#[cfg(test)]
mod tests {
    use ec_model::{Access, AccessKind, End, Pause, PowerWish, Restart};
    use jiff::Timestamp;

    use super::*;
    use crate::engine::tests::requested;

    fn at(seconds: f64) -> Now {
        Now { since_start: Duration::from_secs_f64(seconds), stamp: Timestamp::UNIX_EPOCH }
    }

    #[test]
    fn only_time_in_which_somebody_looked_counts_as_a_search() {
        let mut known = Known::default();
        let runs = Observed { domain: Some(RunState::Running), volume: true, ..Observed::default() };
        known.observe(runs, at(0.0));
        let limit = Duration::from_secs(2);
        assert!(!known.searched_in_vain(limit, at(0.0)), "the first look says nothing of the time before");
        assert!(!known.searched_in_vain(limit, at(100.0)));
        assert_eq!(known.searched(), SEARCH_STEP, "nobody looked for most of it");
        assert!(known.searched_in_vain(limit, at(101.0)));
        assert!(!known.searched_in_vain(limit, at(102.0)), "full once");
        known.observe(Observed { domain: None, ..runs }, at(0.0));
        assert_eq!(known.searched(), Duration::ZERO);
    }

    #[test]
    fn volumes_that_cannot_be_had_are_tried_again_later_and_for_a_new_wish_at_once() {
        let mut known = wished(PowerWish::default(), 1, None);
        let volumes = vec![Attachment {
            volume: ec_model::InstanceId::new(uuid::Uuid::from_u128(7)),
            device: "vdb".into(),
        }];
        let fingerprint = Attachment::fingerprint(&volumes);
        let change = |known: &mut Known, change: &dyn Fn(&mut Request)| {
            let Some(Requested { record: Ok(record), .. }) = &mut known.request else {
                panic!("it is asked for")
            };
            change(Arc::make_mut(record));
        };
        change(&mut known, &|request| request.volumes.clone_from(&volumes));
        assert_eq!(known.facts(at(1.0)).kind, Workload::Machine);
        let facts = known.facts(at(1.0)).volumes;
        assert_eq!(facts, VolumesFacts { wanted: fingerprint, told: Some(0), failed: None });
        let mut told = |changing: bool, failed: Option<&str>| {
            let StatusEntry::Known(status, _) = &mut known.status else { panic!("it is told") };
            (status.volumes, status.volumes_changing) = (volumes.clone(), changing);
            status.volumes_failed = failed.map(str::to_owned);
            known.facts(at(1.0)).volumes.told
        };
        assert_eq!(told(true, None), None, "it is on its way");
        assert_eq!(told(false, Some("no")), None, "it is not so");
        assert_eq!(told(false, None), Some(fingerprint));
        known.learn(Change::VolumesFailed, at(2.0));
        assert_eq!(known.facts(at(5.0)).volumes.failed, Some(Duration::from_secs(3)));
        known.forget_failure_of_volumes();
        assert_eq!(known.facts(at(5.0)).volumes.failed, None);
        change(&mut known, &|request| request.kind = Workload::Volume);
        assert_eq!(known.facts(at(1.0)).kind, Workload::Volume);
        assert_eq!(known.kind_told(), Workload::Volume);
        known.request = None;
        assert_eq!(known.kind_told(), Workload::Machine, "its status says so");
        let StatusEntry::Known(status, _) = &mut known.status else { panic!("it is told") };
        status.kind = Workload::Volume;
        assert_eq!(known.kind_told(), Workload::Volume);
    }

    #[test]
    fn what_is_told_to_be_unclaimed_is_held() {
        let mut known = wished(PowerWish::default(), 1, None);
        for (state, held) in [(State::Unclaimed, true), (State::Active, false)] {
            let StatusEntry::Known(mut status, _) = known.status.clone() else { panic!("it is told") };
            status.state = state;
            known.learn(Change::Status(StatusEntry::Known(status, 1)), at(1.0));
            assert_eq!(known.held, held, "{state}");
        }
    }

    /// One that is asked for so, of which this was carried out.
    fn wished(wish: PowerWish, carried_out: u64, started: Option<i64>) -> Known {
        let Requested { record, revision } = requested(Desired::Active);
        let request =
            Request { power: wish, restart: Restart::Always, generation: 9, ..(*record.unwrap()).clone() };
        let order = crate::status::Order::of(&request);
        let subject = crate::status::Subject {
            instance: request.instance,
            node: ec_model::NodeId::new(uuid::Uuid::from_u128(9)),
            name: None,
            kept: None,
            order: Some(order),
            why: String::new(),
        };
        let status = crate::status::announced(&subject, None, State::Active, None, Timestamp::UNIX_EPOCH);
        let started_at = started.map(|second| Timestamp::from_second(second).unwrap());
        let status = Status { power_generation: carried_out, started_at, restarts: 3, ..status };
        Known {
            request: Some(Requested { record: Ok(Arc::new(request)), revision }),
            status: StatusEntry::Known(Box::new(status), 1),
            ..Known::default()
        }
    }

    /// What a node keeps of one that was started.
    fn kept_started() -> RecordFacts {
        RecordFacts::Kept {
            started: true,
            rebuilt: None,
            metadata: 0,
            root: None,
            intent: None,
            rescued: None,
            size: crate::SizeFacts::default(),
            rescue_begun: false,
        }
    }

    #[test]
    fn a_wish_is_pending_until_the_status_tells_that_it_was_carried_out() {
        let wish = PowerWish { power: Power::Stopped, generation: 5, grace_seconds: 7, anew: true };
        for (carried_out, pending) in [(0, true), (4, true), (5, false), (6, false)] {
            let facts = wished(wish.clone(), carried_out, None).facts(at(0.0));
            let expected = PowerFacts {
                wanted: Power::Stopped,
                pending,
                generation: 5,
                anew: true,
                grace: Duration::from_secs(7),
                restart: Restart::Always,
            };
            assert_eq!((facts.power, facts.generation), (expected, 9));
        }
        let unnumbered = PowerWish { generation: 0, ..wish.clone() };
        for (state, carried_out, pending) in [
            (State::Starting, 0, true),
            (State::Starting, 1, false),
            (State::Stopped, 0, false),
            (State::Unclaimed, 0, false),
        ] {
            let mut healed = wished(unnumbered.clone(), carried_out, None);
            let StatusEntry::Known(status, _) = &mut healed.status else { panic!("it is known") };
            status.state = state;
            assert_eq!(healed.facts(at(0.0)).power.pending, pending, "{state}, {carried_out}");
        }
        // Its start failed: tried on, and its reason stands meanwhile. What shall not run is not started.
        for (power, started, domain, pending) in [
            (Power::Running, Some(1), None, true),
            (Power::Running, Some(1), Some(RunState::Running), false),
            (Power::Running, None, None, false),
            (Power::Stopped, Some(1), None, false),
        ] {
            let mut failed = wished(PowerWish { power, ..unnumbered.clone() }, 0, started);
            failed.observed.domain = domain;
            let StatusEntry::Known(status, _) = &mut failed.status else { panic!("it is known") };
            status.state = State::Error;
            assert_eq!(failed.facts(at(0.0)).power.pending, pending, "{power:?}, {started:?}, {domain:?}");
        }
        // Of one that is to run again, what its status was written with is done; a reboot that is wished since is not.
        for (state, carried_out, started, wished_since, is_anew) in [
            (State::Error, 0, Some(1), false, false),
            (State::Starting, 0, Some(1), false, false),
            (State::Error, 0, Some(1), true, true),
            (State::Error, 4, Some(1), false, true),
            // Nothing of it was ended yet.
            (State::Rebooting, 0, Some(1), false, true),
            (State::Active, 0, Some(1), false, true),
            // Never built: what it is called tells nothing of a start.
            (State::Error, 0, None, false, true),
        ] {
            let generation = if wished_since { 10 } else { 9 };
            let reboot = PowerWish { power: Power::Running, generation: 9, ..wish.clone() };
            let mut again = wished(reboot.clone(), carried_out, started);
            let StatusEntry::Known(status, _) = &mut again.status else { panic!("it is known") };
            (status.state, status.reason) = (state, Some("it did not start".to_owned()));
            let Some(Requested { record: Ok(request), .. }) = &mut again.request else {
                panic!("it is asked for")
            };
            Arc::make_mut(request).power.generation = generation;
            let power = again.facts(at(0.0)).power;
            assert_eq!(
                (power.pending, power.anew),
                (true, is_anew),
                "{state} {carried_out} {started:?} {wished_since}"
            );
        }
        // Nobody noted that its start worked, and its record tells of one.
        let mut ran = wished(PowerWish { power: Power::Running, ..wish.clone() }, 0, None);
        ran.record = kept_started();
        let StatusEntry::Known(status, _) = &mut ran.status else { panic!("it is known") };
        status.state = State::Error;
        assert!(!ran.facts(at(0.0)).power.anew);
        let mut rescued = wished(wish.clone(), 5, None);
        for (failed, wanted) in [(false, Power::Running), (true, Power::Stopped)] {
            let rescue = RescuedFacts { wished_at: Timestamp::UNIX_EPOCH, failed };
            rescued.record = kept_started();
            let RecordFacts::Kept { rescued: was, .. } = &mut rescued.record else { panic!("it is kept") };
            *was = Some(rescue);
            assert_eq!(rescued.facts(at(0.0)).power.wanted, wanted, "from its rescue disk it runs");
        }
        let mut lost = wished(wish, 0, None);
        lost.status = StatusEntry::Absent;
        assert!(!lost.facts(at(0.0)).power.pending, "nobody knows what was carried out");
        lost.request = None;
        let facts = lost.facts(at(0.0));
        assert_eq!((facts.power, facts.generation), (PowerFacts::default(), 0));
    }

    #[test]
    fn a_wish_to_look_is_open_until_the_status_answers_this_one_and_no_other() {
        let wish = |generation| AccessWish { kind: AccessKind::Log, generation, request_id: None };
        let known = |wished: Option<u64>, answered: Option<u64>| {
            let mut known = wished_access(wished.map(wish));
            if let StatusEntry::Known(status, _) = &mut known.status {
                status.access = answered.map(|generation| Access {
                    kind: AccessKind::Log,
                    generation,
                    ticket: None,
                    reason: None,
                    expires_at: Timestamp::UNIX_EPOCH,
                });
            }
            known.facts(at(0.0)).access
        };
        assert_eq!((known(None, None), known(None, Some(3))), (None, None));
        assert_eq!((known(Some(3), None), known(Some(3), Some(2))), (Some(wish(3)), Some(wish(3))));
        assert_eq!(known(Some(3), Some(3)), None);
        assert_eq!(known(Some(3), Some(4)), Some(wish(3)), "etcd was put back");
        let untold = Known { status: StatusEntry::Absent, ..wished_access(Some(wish(3))) };
        assert_eq!(untold.facts(at(0.0)).access, None, "nothing is told yet that it could stand beside");
    }

    fn wished_access(access: Option<AccessWish>) -> Known {
        let mut known = wished(PowerWish::default(), 1, None);
        let request = known.readable().unwrap().clone();
        let record = Ok(Arc::new(Request { access, ..request }));
        known.request = Some(Requested { record, revision: 1 });
        known
    }

    #[test]
    fn how_long_a_guest_ran_is_told_by_the_wall_and_how_long_it_does_not_by_this_agent() {
        let at_wall = |second| Now {
            since_start: Duration::from_secs(100),
            stamp: Timestamp::from_second(second).unwrap(),
        };
        let ran = |started, now| wished(PowerWish::default(), 1, started).facts(at_wall(now)).ran_for;
        assert_eq!(ran(Some(10), 70), Duration::from_secs(60));
        assert_eq!(ran(Some(70), 10), Duration::ZERO, "the clock was put back");
        assert_eq!(ran(None, 70), Duration::ZERO);
        let mut stopped = wished(PowerWish::default(), 1, Some(10));
        if let StatusEntry::Known(status, _) = &mut stopped.status {
            (status.state, status.since) = (State::Stopped, Timestamp::from_second(15).unwrap());
        }
        let ran = stopped.facts(at_wall(70)).ran_for;
        assert_eq!(ran, Duration::from_secs(5), "to its end, however long ago that was");

        let mut known = Known::default();
        let seen = |domain| Observed { domain: Some(domain), volume: true, ..Observed::default() };
        known.observe(seen(RunState::Ended(End::Crashed)), at(10.0));
        known.observe(seen(RunState::Ended(End::Crashed)), at(20.0));
        assert_eq!(known.facts(at(30.0)).ended_for, Duration::from_secs(20), "since it was seen first");
        for up in [RunState::Running, RunState::Paused(Pause::ByHand)] {
            known.observe(seen(up), at(40.0));
            assert_eq!(known.facts(at(50.0)).ended_for, Duration::ZERO);
            known.observe(seen(RunState::NotStarted), at(60.0));
            assert_eq!(known.facts(at(61.0)).ended_for, Duration::from_secs(1));
        }
    }

    #[test]
    fn a_guest_was_asked_to_end_from_the_first_time_until_it_has() {
        let mut known = Known::default();
        let runs = Observed { domain: Some(RunState::Running), volume: true, ..Observed::default() };
        known.observe(runs, at(0.0));
        assert_eq!(known.facts(at(1.0)).asked_to_end, None);
        known.learn(Change::AskedToEnd, at(10.0));
        known.observe(runs, at(11.0));
        known.learn(Change::AskedToEnd, at(20.0));
        let [first, last] = [15, 5].map(Duration::from_secs);
        assert_eq!(known.facts(at(25.0)).asked_to_end, Some(Asked { first, last }));
        known.observe(Observed { domain: Some(RunState::Saved), ..runs }, at(26.0));
        assert_eq!(known.facts(at(27.0)).asked_to_end, None);

        // One that could not be asked has its time from when it is seen to be up still.
        known.observe(runs, at(30.0));
        known.learn(Change::AskedInVain, at(31.0));
        known.learn(Change::Observed(Err("no answer".into())), at(31.0));
        assert_eq!(known.facts(at(90.0)).asked_to_end, None);
        known.observe(runs, at(100.0));
        known.observe(runs, at(101.0));
        let asked = |first, last| {
            let [first, last] = [first, last].map(Duration::from_secs);
            Some(Asked { first, last })
        };
        assert_eq!(known.facts(at(103.0)).asked_to_end, asked(3, 3));
        known.learn(Change::AskedInVain, at(110.0));
        known.observe(runs, at(110.0));
        assert_eq!(known.facts(at(112.0)).asked_to_end, asked(12, 2));
        known.learn(Change::AskedInVain, at(113.0));
        for ended_or_up in [Observed { domain: Some(RunState::Ended(End::ByGuest)), ..runs }, runs] {
            known.observe(ended_or_up, at(114.0));
        }
        assert_eq!(known.facts(at(115.0)).asked_to_end, None, "this is another start");
    }

    #[test]
    fn an_allocation_is_held_since_it_was_first_seen() {
        let mut known = Known::default();
        let here = || Held::Here(Resources::new());
        let seen_for = |known: &Known, now| match known.facts(now).allocation {
            Allocation::Held { seen_for } => seen_for,
            other => panic!("{other:?}"),
        };
        known.hold(here(), at(10.0));
        known.hold(here(), at(20.0));
        assert_eq!(seen_for(&known, at(30.0)), Duration::from_secs(20));
        known.hold(Held::Nothing, at(40.0));
        known.hold(here(), at(50.0));
        assert_eq!(seen_for(&known, at(60.0)), Duration::from_secs(10));
    }

    #[test]
    fn each_thing_that_is_known_of_an_instance_keeps_it_in_mind() {
        let here = Observed { volume: true, ..Observed::default() };
        let known = |change: &dyn Fn(&mut Known)| {
            let mut known = Known::default();
            change(&mut known);
            known
        };
        assert!(Known::default().is_empty());
        let request = Requested { record: Err("rubbish".to_owned()), revision: 1 };
        let something: [&dyn Fn(&mut Known); 9] = [
            &|known| known.request = Some(request.clone()),
            &|known| known.status = StatusEntry::Unreadable,
            &|known| known.observe(here, at(0.0)),
            &|known| known.learn(Change::Observed(Err("blind".to_owned())), at(0.0)),
            &|known| known.record = RecordFacts::Unreadable,
            &|known| known.buried = Some(None),
            &|known| known.held = true,
            &|known| known.busy = Some(Busy::Asking),
            &|known| known.hold(Held::Here(Resources::new()), at(0.0)),
        ];
        for (number, change) in something.into_iter().enumerate() {
            assert!(!known(change).is_empty(), "number {number}");
        }
        for held in [Held::Nothing, Held::Elsewhere] {
            assert!(known(&|known| known.hold(held.clone(), at(0.0))).is_empty(), "{held:?}");
        }
    }

    #[test]
    fn what_the_hypervisor_has_is_unseen_from_work_that_could_not_look_until_somebody_does() {
        let mut known = Known::default();
        let runs = Observed { domain: Some(RunState::Running), volume: true, ..Observed::default() };
        known.observe(runs, at(0.0));
        assert_eq!((known.is_here(), known.runs(), known.is_unseen()), (true, true, false));
        known.learn(Change::Observed(Err("blind".to_owned())), at(0.0));
        assert_eq!((known.is_here(), known.runs(), known.is_unseen()), (true, true, true));
        known.learn(Change::Observed(Ok(Observed::default())), at(0.0));
        assert_eq!((known.is_here(), known.runs(), known.is_unseen()), (false, false, false));
    }
}

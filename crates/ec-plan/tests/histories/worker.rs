//! A job, effect by effect, on what is outside. It does there what the agent's worker does on the real parts.

use std::collections::{BTreeSet, VecDeque};

use ec_model::{
    Access, AccessWish, Attachment, Desired, End, InstanceId, Observed, Pause, Rebuilt, Rescued, Resized,
    RunState, Size, State, Status,
};
use ec_plan::{
    RecordFacts, RescuedFacts, SizeFacts,
    engine::{Change, Held, Job, Outcome, Report, StatusEntry, Work},
    machine::Effect,
    status::{self, Order, Subject, Volumes},
};
use jiff::Timestamp;

use crate::outside::{Images, Outside, Room, Thing, Wish, attachments, greater, node, resources};

/// The answer to a wish.
fn admitted(wish: AccessWish) -> Access {
    let AccessWish { kind, generation, .. } = wish;
    Access { kind, generation, ticket: None, reason: None, expires_at: Timestamp::UNIX_EPOCH }
}

/// Why a job stops.
enum Stop {
    Abandoned,
    Retry,
    RetryBounded,
    Failed,
}

/// What simulated failures say.
pub(crate) const BROKEN: &str = "broken";

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) job: Job,
    pub(crate) cancelled: bool,
    left: VecDeque<Effect>,
    subject: Subject,
    status: StatusEntry,
    done: Vec<Change>,
    touched: bool,
    first_start: bool,
    /// All is done but to look at what came of it.
    outcome: Option<Outcome>,
}

impl Worker {
    pub(crate) fn new(job: Job) -> Self {
        let left = match &job.work {
            Work::Effects(effects) => effects.clone().into(),
            Work::Fail(reason) => [Effect::Announce(State::Error, Some(reason.clone()))].into(),
            Work::Delayed(_) | Work::Addresses(_) => VecDeque::new(),
        };
        Self {
            subject: Subject {
                instance: job.instance,
                node: node(),
                name: None,
                kept: job.kept,
                order: job.request.as_deref().map(Order::of),
                why: job.why.to_string(),
            },
            status: job.status.clone(),
            job,
            cancelled: false,
            left,
            done: Vec::new(),
            touched: false,
            first_start: false,
            outcome: None,
        }
    }

    /// What it was begun for.
    pub(crate) fn wish(&self) -> Option<Wish> {
        match (&self.job.request, self.job.request_revision) {
            (Some(request), _) if request.desired == Desired::Active => Some(Wish::Active),
            (Some(_), _) => Some(Wish::Destroyed),
            (None, Some(_)) => Some(Wish::Rubbish),
            (None, None) => None,
        }
    }

    /// One effect, or the end.
    pub(crate) fn step(&mut self, outside: &mut Outside) -> Option<Report> {
        if let Some(outcome) = self.outcome.take() {
            if self.touched {
                let seen =
                    if outside.blind { Err(BROKEN.to_owned()) } else { Ok(self.thing(outside).observed) };
                self.done.push(Change::Observed(seen));
            }
            return Some(Report {
                instance: self.job.instance,
                done: std::mem::take(&mut self.done),
                outcome,
            });
        }
        let stopped = if self.cancelled {
            Err(Stop::Abandoned)
        } else {
            match (self.left.pop_front(), &self.job.work) {
                (Some(effect), _) => self.perform(effect, outside),
                (None, Work::Addresses(addresses)) => {
                    let addresses = addresses.clone();
                    let now = outside.stamp();
                    self.write(outside, |subject, old| status::addressed(subject, old, addresses, now))
                }
                (None, Work::Delayed(why)) => {
                    let now = outside.stamp();
                    let known = self.status.known();
                    let waiting = known.and_then(|old| status::waiting(&self.subject, old, why, now));
                    // That this may fail, too, changes nothing.
                    if let Some(waiting) = waiting {
                        _ = self.write(outside, |_, _| waiting);
                    }
                    Ok(())
                }
                (None, _) => Ok(()),
            }
        };
        self.outcome = match stopped {
            Ok(()) if !self.left.is_empty() => return None,
            Ok(()) => Some(Outcome::Done),
            Err(Stop::Abandoned) => Some(Outcome::Abandoned),
            Err(Stop::Retry) => Some(Outcome::Retry(BROKEN.to_owned())),
            Err(Stop::RetryBounded) => Some(Outcome::RetryBounded(BROKEN.to_owned())),
            Err(Stop::Failed) => Some(Outcome::Failed(BROKEN.to_owned())),
        };
        None
    }

    fn thing<'a>(&self, outside: &'a mut Outside) -> &'a mut Thing {
        outside.thing(self.job.instance)
    }

    fn now_is(&mut self, outside: &mut Outside, status: StatusEntry) {
        self.thing(outside).keys.status = status.clone();
        self.status = status.clone();
        self.done.push(Change::Status(status));
    }

    fn write(
        &mut self,
        outside: &mut Outside,
        make: impl FnOnce(&Subject, Option<&Status>) -> Status,
    ) -> Result<(), Stop> {
        if !outside.etcd_up {
            return Err(Stop::Retry);
        }
        let status = make(&self.subject, self.status.known());
        self.now_is(outside, StatusEntry::Known(Box::new(status), 1));
        Ok(())
    }

    fn record(&mut self, outside: &mut Outside, record: RecordFacts) {
        self.thing(outside).record = record;
        self.done.push(Change::Record(record));
    }

    /// Deletes the request's key, unless it is another by now.
    fn end(
        &mut self,
        outside: &mut Outside,
        status: impl FnOnce(&Self, Timestamp) -> StatusEntry,
    ) -> Result<(), Stop> {
        if !outside.etcd_up {
            return Err(Stop::Retry);
        }
        let thing = self.thing(outside);
        if thing.keys.request.map(|(_, revision)| revision) != self.job.request_revision {
            return Err(Stop::Abandoned);
        }
        thing.ended |= thing.wish() == Some(Wish::Destroyed);
        if thing.wish().is_some() {
            outside.put(self.job.instance, None);
        }
        let status = status(self, outside.stamp());
        self.now_is(outside, status);
        self.done.push(Change::RequestDropped);
        Ok(())
    }

    /// The wish for a new disk of which nothing is known but that it was, or what the status tells of a later one.
    fn wished_at(&self) -> Option<Timestamp> {
        let wished =
            self.job.request.as_ref().and_then(|request| request.rebuild.clone()).map(|wish| wish.wished_at);
        let told = self.status.known().and_then(|status| status.rebuilt.as_ref()).map(|was| was.wished_at);
        wished.max(told)
    }

    /// What its request has the guest told.
    fn metadata(&self) -> u64 {
        let spec = self.job.request.as_ref().and_then(|request| request.spec.as_ref());
        spec.map_or(0, |spec| ec_plan::fingerprint(&spec.metadata))
    }

    /// Of which request its record keeps a copy.
    fn edition(&self) -> Option<ec_model::Edition> {
        self.job.request.as_deref().map(ec_model::Edition::of)
    }

    fn note_rebuilt(&mut self, outside: &mut Outside) {
        let wished = self.job.request.as_ref().and_then(|request| request.rebuild.clone());
        let mut record = self.thing(outside).record;
        if let RecordFacts::Kept { rebuilt, .. } = &mut record {
            *rebuilt = wished.map(|wish| wish.wished_at);
            self.record(outside, record);
        }
    }

    fn note_rescued(&mut self, outside: &mut Outside, rescued: Option<RescuedFacts>) {
        let mut record = self.thing(outside).record;
        if let RecordFacts::Kept { rescued: noted, .. } = &mut record {
            *noted = rescued;
            self.record(outside, record);
        }
    }

    /// The wish to boot from another disk, with this outcome.
    fn rescue(&self, failed: bool) -> Result<RescuedFacts, Stop> {
        let wish = self.job.request.as_ref().and_then(|request| request.rescue.as_ref());
        wish.map(|wish| RescuedFacts { wished_at: wish.wished_at, failed }).ok_or(Stop::Retry)
    }

    /// The record as it is, but for whether a guest may have written the disk.
    fn mark(&mut self, outside: &mut Outside, started: bool) {
        let mut record = self.thing(outside).record;
        if let RecordFacts::Kept { started: noted, .. } = &mut record {
            *noted = started;
            self.record(outside, record);
        }
    }

    /// The record as it is, but for how large it is.
    fn note_size(&mut self, outside: &mut Outside, size: SizeFacts) {
        let mut record = self.thing(outside).record;
        if let RecordFacts::Kept { size: noted, .. } = &mut record {
            *noted = size;
            self.record(outside, record);
        }
    }

    /// How large it shall be.
    fn wanted(&self) -> Size {
        let spec = self.job.request.as_ref().and_then(|request| request.spec.as_ref());
        spec.map(|spec| Size::of(&spec.resources)).unwrap_or_default()
    }

    /// The last wish for that, or that which was noted.
    fn resized_at(&self, noted: Option<Timestamp>) -> Option<Timestamp> {
        self.job.request.as_ref().and_then(|request| request.resize).map(|wish| wish.wished_at).or(noted)
    }

    /// What it is noted to be, and is to be, where that can be made.
    fn begin_resize(&self, thing: &Thing) -> Result<(SizeFacts, Size), Stop> {
        let RecordFacts::Kept { size, .. } = thing.record else { unreachable!("looked at before") };
        let wanted = self.wanted();
        let wanted = Size { disk_gb: wanted.disk_gb.max(size.is.disk_gb), ..wanted };
        let held = self.job.allocated.as_ref().map(Size::of).unwrap_or_default();
        assert!(held.covers(wanted), "nobody grows beyond what is claimed: {thing:?}");
        let is_here = thing.observed.domain.is_some() && thing.observed.volume;
        is_here.then_some((size, wanted)).ok_or(Stop::Retry)
    }

    fn tell_volumes(&mut self, outside: &mut Outside, volumes: Volumes) -> Result<(), Stop> {
        let now = outside.stamp();
        let old = self.status.known().cloned().ok_or(Stop::Retry)?;
        self.write(outside, |subject, _| status::with_volumes(subject, &old, volumes, now))
    }

    fn perform(&mut self, effect: Effect, outside: &mut Outside) -> Result<(), Stop> {
        if let Some((which, may_pass)) = outside.lasting
            && which == std::mem::discriminant(&effect)
        {
            self.touched = true;
            return Err(if may_pass { Stop::Retry } else { Stop::Failed });
        }
        let instance: InstanceId = self.job.instance;
        let (images, start_broken, now) = (outside.images, outside.start_broken, outside.stamp());
        let deaf = outside.deaf;
        let (placement_up, etcd_up) = (outside.placement_up, outside.etcd_up);
        let thing = outside.thing(instance);
        match effect {
            Effect::Announce(state, reason) => {
                if matches!(self.job.work, Work::Fail(_)) && reason.as_deref() != Some(BROKEN) {
                    assert!(!thing.wrote || thing.disk_deleted, "what ever ran does not fail: {thing:?}");
                }
                if !status::is_told(&self.subject, self.status.known(), state, reason.as_deref()) {
                    self.write(outside, |subject, old| status::announced(subject, old, state, reason, now))?;
                }
            }
            Effect::PrepareDisk => {
                assert!(
                    thing.observed.domain.is_none() || thing.late,
                    "a disk is never made anew under a domain: {thing:?}"
                );
                assert!(!thing.wrote || thing.disk_deleted, "nothing is built twice: {thing:?}");
                match images {
                    Images::Fine => {}
                    Images::Away => return Err(Stop::RetryBounded),
                    Images::Broken => return Err(Stop::Failed),
                }
                (thing.observed.volume, self.touched) = (true, true);
                let wished = self.job.request.as_ref().and_then(|request| request.rebuild.clone());
                let (rebuilt, metadata) = (wished.map(|wish| wish.wished_at), self.metadata());
                let intent = self.edition();
                let is = self.job.allocated.as_ref().map(Size::of).unwrap_or_default();
                self.thing(outside).size = is;
                let size = SizeFacts { is, ..SizeFacts::default() };
                self.record(
                    outside,
                    RecordFacts::Kept {
                        started: false,
                        rebuilt,
                        rescued: None,
                        metadata,
                        intent,
                        root: None,
                        size,
                        rescue_begun: false,
                    },
                );
            }
            Effect::KeepRecord => {
                assert_eq!(self.wish(), Some(Wish::Active), "the request tells what it says");
                let (rebuilt, metadata, intent) = (self.wished_at(), self.metadata(), self.edition());
                let rescued = self.status.known().and_then(|status| status.rescued.as_ref());
                let rescued = rescued.map(RescuedFacts::of);
                let resized = self.status.known().and_then(|status| status.resized.as_ref());
                let size = SizeFacts {
                    is: self.thing(outside).size,
                    wished_at: resized.map(|was| was.wished_at),
                    failed: resized.is_some_and(|was| was.failed.is_some()),
                    ..SizeFacts::default()
                };
                self.record(
                    outside,
                    RecordFacts::Kept {
                        started: true,
                        rebuilt,
                        rescued,
                        metadata,
                        intent,
                        root: None,
                        size,
                        rescue_begun: false,
                    },
                );
            }
            Effect::KeepIntent
            | Effect::PrepareRebuild
            | Effect::ReplaceDisk
            | Effect::GiveUpRebuild(_)
            | Effect::PrepareRescue
            | Effect::EnterRescue
            | Effect::LeaveRescue
            | Effect::GiveUpRescue(_)
            | Effect::Grow
            | Effect::Resize
            | Effect::GiveUpResize(_)
                if !matches!(thing.record, RecordFacts::Kept { .. }) =>
            {
                self.done.push(Change::Record(thing.record));
                return Err(Stop::Retry);
            }
            Effect::KeepIntent => {
                let (metadata, intent) = (self.metadata(), self.edition());
                if let RecordFacts::Kept { started, rebuilt, rescued, size, .. } = thing.record {
                    self.record(
                        outside,
                        RecordFacts::Kept {
                            started,
                            rebuilt,
                            rescued,
                            metadata,
                            intent,
                            root: None,
                            size,
                            rescue_begun: false,
                        },
                    );
                }
            }
            Effect::PrepareRebuild => match images {
                Images::Fine => thing.observed.successor = true,
                Images::Away => return Err(Stop::RetryBounded),
                Images::Broken => return Err(Stop::Failed),
            },
            Effect::ReplaceDisk => {
                assert!(thing.observed.successor, "there is a new disk: {thing:?}");
                // Somebody started it meanwhile.
                if thing.is_up() {
                    return Err(Stop::Failed);
                }
                thing.replaced += u32::from(std::mem::take(&mut thing.wrote_disk));
                assert!(
                    thing.replaced <= thing.rebuilds_wished,
                    "a disk is made anew as often as its user wished: {thing:?}"
                );
                (thing.observed.successor, thing.observed.volume, self.touched) = (false, true, true);
                thing.disk_deleted = false;
                if thing.observed.domain == Some(RunState::Saved) {
                    thing.observed.domain = Some(RunState::Ended(End::Unknown));
                }
                self.note_rebuilt(outside);
            }
            Effect::GiveUpRebuild(_) => {
                thing.observed.successor = false;
                self.note_rebuilt(outside);
            }
            Effect::DropSuccessor => (thing.observed.successor, self.touched) = (false, true),
            Effect::NoteRebuild => {
                self.done.push(Change::Record(thing.record));
                let wished = self.job.request.as_ref().and_then(|request| request.rebuild.clone());
                let (wished_at, failed) = match thing.record {
                    RecordFacts::Kept { rebuilt, .. } => (rebuilt, None),
                    RecordFacts::Absent | RecordFacts::Unreadable => {
                        (wished.map(|wish| wish.wished_at), Some(BROKEN.to_owned()))
                    }
                };
                let rebuilt = wished_at.map(|wished_at| Rebuilt { wished_at, failed });
                self.write(outside, |subject, old| status::rebuilt(subject, old, rebuilt, now))?;
            }
            Effect::PrepareRescue => {
                assert!(!thing.is_up() || !thing.observed.rescued, "not under its guest: {thing:?}");
                match images {
                    Images::Fine => thing.rescue_disk = true,
                    Images::Away => return Err(Stop::RetryBounded),
                    Images::Broken => return Err(Stop::Failed),
                }
            }
            Effect::EnterRescue => {
                let rescued = self.rescue(false)?;
                self.note_rescued(outside, Some(rescued));
            }
            Effect::LeaveRescue | Effect::GiveUpRescue(_) if thing.is_up() && thing.observed.rescued => {
                return Err(Stop::Retry);
            }
            Effect::LeaveRescue | Effect::GiveUpRescue(_) => {
                let rescued = match effect {
                    Effect::LeaveRescue => None,
                    _ => Some(self.rescue(true)?),
                };
                let thing = outside.thing(instance);
                (thing.rescue_disk, self.touched) = (false, true);
                if thing.observed.domain == Some(RunState::Saved) && thing.observed.rescued {
                    thing.observed.domain = Some(RunState::Ended(End::Unknown));
                    thing.observed.rescued = false;
                }
                self.note_rescued(outside, rescued);
            }
            Effect::NoteRescue => {
                let record = thing.record;
                self.done.push(Change::Record(record));
                let rescued = match record {
                    RecordFacts::Kept { rescued, .. } => rescued,
                    RecordFacts::Unreadable => Some(self.rescue(true)?),
                    RecordFacts::Absent => return Err(Stop::Retry),
                };
                let rescued = rescued.map(|RescuedFacts { wished_at, failed }| Rescued {
                    wished_at,
                    failed: failed.then(|| BROKEN.to_owned()),
                });
                self.write(outside, |subject, old| status::rescued(subject, old, rescued, now))?;
            }
            Effect::Cover => {
                if !placement_up || thing.keys.room != Room::Here {
                    return Err(Stop::Retry);
                }
                let is = match thing.record {
                    RecordFacts::Kept { size, .. } => size.is,
                    RecordFacts::Absent | RecordFacts::Unreadable => thing.size,
                };
                let takes = if thing.record.is_rescued() { is } else { greater(is, self.wanted()) };
                thing.keys.claimed = greater(thing.keys.claimed, takes);
                let held = outside.held(instance);
                self.done.push(Change::Allocation(held));
            }
            Effect::Grow => {
                let (size, wanted) = self.begin_resize(thing)?;
                assert!(wanted.covers(size.is), "nothing is taken from a guest that runs: {thing:?}");
                self.touched = true;
                self.note_size(outside, SizeFacts { growing: Some(wanted), ..size });
                let thing = self.thing(outside);
                if start_broken || thing.observed.domain != Some(RunState::Running) {
                    return self.write(outside, |subject, old| {
                        status::announced(subject, old, State::Resizing, None, now)
                    });
                }
                thing.size = wanted;
                let wished_at = self.resized_at(size.wished_at);
                let size = SizeFacts { is: wanted, wished_at, ..SizeFacts::default() };
                self.note_size(outside, size);
            }
            Effect::Resize => {
                let (size, wanted) = self.begin_resize(thing)?;
                if thing.is_up() && thing.size.vcpus != wanted.vcpus {
                    return Err(Stop::Failed);
                }
                let unproven = size.is.vcpus != wanted.vcpus;
                thing.before = if size.unproven { thing.before } else { size.is };
                (thing.size, self.touched) = (wanted, true);
                let wished_at = self.resized_at(size.wished_at);
                let size = SizeFacts { is: wanted, wished_at, unproven, ..SizeFacts::default() };
                self.note_size(outside, size);
            }
            Effect::GiveUpResize(_) => {
                let RecordFacts::Kept { size, .. } = thing.record else { unreachable!("seen above") };
                if size.growing.is_some() && self.status.known().map(|was| was.state) != Some(State::Resizing)
                {
                    return self.write(outside, |subject, old| {
                        status::announced(subject, old, State::Resizing, None, now)
                    });
                }
                let old = if size.unproven { thing.before } else { size.is };
                if thing.is_up() && thing.size.vcpus != old.vcpus {
                    return Err(Stop::Retry);
                }
                let is = Size { disk_gb: thing.size.disk_gb.max(old.disk_gb), ..old };
                (thing.size, self.touched) = (is, true);
                let wished_at = self.resized_at(size.wished_at);
                self.note_size(outside, SizeFacts { is, wished_at, failed: true, ..SizeFacts::default() });
            }
            Effect::NoteResize => {
                self.done.push(Change::Record(thing.record));
                let noted = match thing.record {
                    RecordFacts::Kept { size, .. } => size.wished_at,
                    RecordFacts::Absent | RecordFacts::Unreadable => None,
                };
                let wished_at = self.resized_at(None).max(noted);
                let mut failed = Some(BROKEN.to_owned());
                if let RecordFacts::Kept { size, .. } = thing.record {
                    failed = (size.failed && size.wished_at == wished_at).then(|| BROKEN.to_owned());
                    let size = SizeFacts { wished_at, failed: failed.is_some(), unproven: false, ..size };
                    self.note_size(outside, size);
                }
                let resources = resources(self.thing(outside).size);
                let resized = wished_at.map(|wished_at| Resized { wished_at, failed, resources });
                self.write(outside, |subject, old| status::resized(subject, old, resized, now))?;
            }
            Effect::SetVolumes => {
                let holds = outside.stubborn && self.thing(outside).is_up();
                let wanted = attachments(self.thing(outside).keys.volumes);
                let wanted = self.job.request.as_ref().map_or(wanted, |request| request.volumes.clone());
                let told = self.status.known().map(|status| status.volumes.clone()).unwrap_or_default();
                let either: BTreeSet<Attachment> = told.into_iter().chain(wanted.clone()).collect();
                let either: Vec<Attachment> = either.into_iter().collect();
                self.tell_volumes(outside, Volumes::Changing(either.clone()))?;
                self.touched = true;
                let thing = self.thing(outside);
                if holds || matches!(thing.observed.domain, None | Some(RunState::Saved)) {
                    self.tell_volumes(outside, Volumes::Failed(either, BROKEN.to_owned()))?;
                    self.done.push(Change::VolumesFailed);
                } else {
                    assert!(!thing.observed.rescued, "a rescued guest has none: {thing:?}");
                    thing.observed.volumes = Attachment::fingerprint(&wanted);
                }
            }
            Effect::NoteVolumes => {
                let wanted = self.job.request.as_ref().map(|request| request.volumes.clone());
                self.tell_volumes(outside, Volumes::Are(wanted.unwrap_or_default()))?;
            }
            Effect::PrepareVolume | Effect::Extend | Effect::HandOver | Effect::Receive => {
                unreachable!("none of these is a volume")
            }
            Effect::Persist => {
                if !thing.is_up() {
                    return Err(Stop::Retry);
                }
                (thing.observed.transient, self.touched) = (false, true);
            }
            Effect::Define => {
                (thing.observed.transient, self.touched) = (false, true);
                if thing.observed.domain.is_none() {
                    assert!(thing.observed.volume || thing.disk_deleted, "{thing:?}");
                    thing.observed.domain = Some(RunState::NotStarted);
                    let volumes = self.job.request.as_ref().map(|request| request.volumes.as_slice());
                    thing.observed.volumes = Attachment::fingerprint(volumes.unwrap_or_default());
                    // As large as the node noted, else as is claimed.
                    let disk_gb = thing.size.disk_gb;
                    thing.size = match thing.record {
                        RecordFacts::Kept { size, .. } => size.is,
                        RecordFacts::Absent | RecordFacts::Unreadable => {
                            Size { disk_gb, ..thing.keys.claimed }
                        }
                    };
                }
            }
            Effect::MarkStarted => {
                if matches!(thing.record, RecordFacts::Kept { started: false, .. }) {
                    self.first_start = true;
                    self.mark(outside, true);
                }
            }
            Effect::Start | Effect::StartRescue => {
                assert!(self.job.allocated.is_some(), "nothing runs without a claim: {thing:?}");
                self.touched = true;
                let rescues = match thing.observed.domain {
                    Some(RunState::Saved) => thing.observed.rescued,
                    _ => effect == Effect::StartRescue,
                };
                let is_whole = thing.observed.volume && (thing.rescue_disk || !rescues);
                if start_broken || !is_whole || thing.observed.domain.is_none() {
                    if self.first_start && matches!(thing.observed.domain, None | Some(RunState::NotStarted))
                    {
                        self.mark(outside, false);
                    }
                    return Err(Stop::Failed);
                }
                // Without any record a disk that is there counts as written.
                assert!(
                    !matches!(thing.record, RecordFacts::Kept { started: false, .. }) || thing.wrote,
                    "marked before it runs: {thing:?}"
                );
                assert!(!rescues || thing.rescue_wished, "its user wished that: {thing:?}");
                if thing.observed.domain != Some(RunState::Running) {
                    thing.observed.rescued = rescues;
                }
                (thing.observed.domain, thing.wrote) = (Some(RunState::Running), true);
                thing.wrote_disk = true;
            }
            Effect::NoteStart => self.write(outside, |subject, old| status::started(subject, old, now))?,
            Effect::Resume => {
                (thing.observed.domain, self.touched) = (Some(RunState::Running), true);
                self.done.push(Change::Resumed);
            }
            Effect::ShutDown => {
                self.touched = true;
                if !deaf && thing.runs() {
                    outside.end(instance, End::ByGuest);
                }
                self.done.push(Change::AskedToEnd);
            }
            Effect::PowerOff => {
                self.touched = true;
                outside.end(instance, End::ByHand);
            }
            Effect::Pause | Effect::Save if !thing.is_up() => return Err(Stop::Retry),
            Effect::Pause => {
                (thing.observed.domain, self.touched) = (Some(RunState::Paused(Pause::ByHand)), true);
            }
            Effect::Save if thing.observed.transient => return Err(Stop::Retry),
            Effect::Save => (thing.observed.domain, self.touched) = (Some(RunState::Saved), true),
            Effect::DropMemory => {
                assert!(thing.keys.power.anew, "only who boots it anew gives its memory up: {thing:?}");
                self.touched = true;
                if thing.observed.domain == Some(RunState::Saved) {
                    thing.observed.domain = Some(RunState::Ended(End::Unknown));
                    thing.observed.rescued = false;
                }
            }
            Effect::NotePower(state, reason) => {
                self.write(outside, |subject, old| status::powered(subject, old, state, reason, now))?;
            }
            Effect::Reopen(restarts) => {
                self.write(outside, |subject, old| status::reopened(subject, old, restarts, now))?;
            }
            Effect::Admit(wish) => {
                let Some(old) = self.status.known().cloned() else { unreachable!("nobody was told of it") };
                self.write(outside, |_, _| status::admitted(&old, admitted(wish), now))?;
            }
            Effect::Bury => {
                assert!(thing.user_destroyed, "only a user destroys: {thing:?}");
                thing.buried = true;
                self.done.push(Change::Buried(None));
            }
            Effect::RemoveDomain => {
                assert!(!thing.is_dear(), "only a user's destroy deletes what a guest wrote: {thing:?}");
                assert!(
                    !thing.runs() || thing.user_destroyed,
                    "only a user's destroy ends a guest that runs: {thing:?}"
                );
                (thing.observed, thing.late, self.touched) = (Observed::default(), false, true);
                thing.rescue_disk = false;
            }
            Effect::DropRecord => self.record(outside, RecordFacts::Absent),
            Effect::Claim => {
                if !placement_up || thing.keys.room == Room::Elsewhere {
                    return Err(Stop::Retry);
                }
                thing.keys.room = Room::Here;
                let held = outside.held(instance);
                self.done.push(Change::Allocation(held));
            }
            Effect::Ascertain => {
                self.touched = true;
                if thing.observed.domain.is_some() || thing.observed.volume {
                    return Err(Stop::Retry);
                }
            }
            Effect::Reread => {
                self.done.push(Change::Record(thing.record));
                if matches!(thing.record, RecordFacts::Kept { .. }) {
                    return Err(Stop::Abandoned);
                }
            }
            Effect::Inquire => {
                if !etcd_up || thing.keys.request.is_some() {
                    return Err(Stop::Retry);
                }
            }
            Effect::Release => {
                if !placement_up {
                    return Err(Stop::Retry);
                }
                assert!(!thing.foreign, "others' allocations stay: {thing:?}");
                if thing.keys.room == Room::Here {
                    assert!(
                        thing.observed.domain.is_none() || thing.late,
                        "room is never given back under a domain: {thing:?}"
                    );
                    thing.keys.room = Room::None;
                }
                self.done.push(Change::Allocation(Held::Nothing));
            }
            Effect::DropKeys => self.end(outside, |_, _| StatusEntry::Absent)?,
            Effect::EndInError => self.end(outside, |worker, now| {
                let status = status::ended_in_error(&worker.subject, worker.status.known(), now);
                StatusEntry::Known(Box::new(status), 1)
            })?,
        }
        Ok(())
    }
}

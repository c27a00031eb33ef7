//! What is outside the agent, as plain data: etcd, placement, a hypervisor, the node's disk; and what nobody in it
//! remembers, which is what histories are judged by.

use std::{collections::BTreeMap, mem::Discriminant, sync::Arc, time::Duration};

use ec_model::{
    AccessKind, AccessWish, Address, AddressSource, Attachment, Desired, End, ImageRef, InstanceId, NodeId,
    Observed, Pause, Power, PowerWish, Rebuild, Request, Rescue, Resize, Resources, Restart, RunState, Size,
    Spec, State,
};
use ec_plan::{
    RecordFacts,
    engine::{Held, Requested, Seen, StatusEntry},
    machine::Effect,
};
use jiff::Timestamp;

use crate::agent::News;

/// What a request's key says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    Active,
    Destroyed,
    Rubbish,
}

/// Where an allocation is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Room {
    #[default]
    None,
    Here,
    Elsewhere,
}

/// What lies in etcd of one instance, and so goes with it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys {
    /// With the revision that wrote it.
    pub(crate) request: Option<(Wish, i64)>,
    /// What it says of power.
    pub(crate) power: PowerWish,
    pub(crate) restart: Restart,
    pub(crate) rebuild: Option<Rebuild>,
    pub(crate) rescue: Option<Rescue>,
    pub(crate) resize: Option<Resize>,
    /// How large it shall be, and is claimed.
    pub(crate) size: Size,
    pub(crate) claimed: Size,
    /// So many volumes it shall have.
    pub(crate) volumes: u8,
    /// What its user calls it; told to its guest.
    pub(crate) metadata: u8,
    /// Somebody's last wish to look at it.
    pub(crate) access: Option<AccessWish>,
    pub(crate) status: StatusEntry,
    /// Control tools asked for the instance.
    pub(crate) index: bool,
    pub(crate) room: Room,
}

/// One instance as it really is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Thing {
    pub(crate) keys: Keys,
    pub(crate) saved: Option<Keys>,
    pub(crate) observed: Observed,
    /// How large its domain and its disk are, and were before they were made larger.
    pub(crate) size: Size,
    pub(crate) before: Size,
    pub(crate) record: RecordFacts,
    pub(crate) buried: bool,
    /// A guest ran: its disk holds what nobody else has.
    pub(crate) wrote: bool,
    /// A user destroyed the instance.
    pub(crate) user_destroyed: bool,
    /// For so many new disks its user has wished, and so many took the place of what a guest may have written.
    pub(crate) rebuilds_wished: u32,
    pub(crate) replaced: u32,
    /// A guest ran on the disk that there is now.
    pub(crate) wrote_disk: bool,
    /// A disk to boot from in the place of its own, and that its user ever wished one.
    pub(crate) rescue_disk: bool,
    pub(crate) rescue_wished: bool,
    /// That destroy was done to its end once.
    pub(crate) ended: bool,
    /// Somebody deleted the disk's file; that one is not on us.
    pub(crate) disk_deleted: bool,
    /// A call of before came late: a domain is there that nobody could expect.
    pub(crate) late: bool,
    /// A claim was made for it, and when. A uuid is used once.
    pub(crate) claimed: Option<Duration>,
    /// Somebody else's claim, not one of our tools.
    pub(crate) foreign: bool,
    /// Its request came in time, so that its claim has to be there.
    pub(crate) in_time: bool,
    /// Somebody took what belongs to it, so that nothing is promised any more.
    pub(crate) robbed: bool,
}

impl Thing {
    pub(crate) fn runs(&self) -> bool {
        self.observed.domain == Some(RunState::Running)
    }

    /// Running, or paused.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.observed.domain, Some(RunState::Running | RunState::Paused(_)))
    }

    pub(crate) fn wish(&self) -> Option<Wish> {
        self.keys.request.map(|(wish, _)| wish)
    }

    pub(crate) fn state(&self) -> Option<State> {
        self.keys.status.known().map(|status| status.state)
    }

    /// Whether its disk holds what only its user may have deleted.
    pub(crate) fn is_dear(&self) -> bool {
        self.wrote && self.observed.volume && !self.disk_deleted && !self.user_destroyed
    }
}

/// How an image is to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Images {
    Fine,
    Away,
    Broken,
}

#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) things: BTreeMap<InstanceId, Thing>,
    pub(crate) now: Duration,
    pub(crate) revision: i64,
    pub(crate) etcd_up: bool,
    pub(crate) placement_up: bool,
    /// The hypervisor does what it is told, and does not say what it has.
    pub(crate) blind: bool,
    pub(crate) images: Images,
    pub(crate) start_broken: bool,
    /// Guests have addresses.
    pub(crate) addresses: bool,
    pub(crate) deaf: bool,
    /// Nor let go of volumes.
    pub(crate) stubborn: bool,
    /// What fails whenever it is tried, and whether for a reason that may pass.
    pub(crate) lasting: Option<(Discriminant<Effect>, bool)>,
    /// What the agent's watch has to tell yet; dropped while there is no agent.
    pub(crate) news: Vec<News>,
}

/// Claims whose requests do not come for so long are given back.
pub(crate) const GRACE: Duration = Duration::from_secs(60);

/// What happens outside.
#[derive(Debug, Clone)]
pub(crate) enum Happening {
    /// eschedule claims; killed after that it never requests.
    Claim,
    /// It writes its request.
    Request,
    /// Somebody else allocates on this node.
    ForeignClaim,
    Destroy,
    RequestKeyDeleted,
    StatusKeyDeleted,
    /// A request, a status or a record that cannot be read.
    Rubbish,
    StatusRubbish,
    RecordRubbish,
    AllocationDeleted,
    AllocationMoved,
    /// A user's wish for power, with some patience or none, and anew or not.
    Power(Power, bool, bool),
    /// A user wishes a new disk.
    Rebuild,
    /// A user wishes it booted from another disk, or from its own again.
    Rescue(bool),
    /// Somebody starts a guest from its own disk by hand.
    StartedByHand,
    /// A user wishes another size, for which there is room, or goes back to one: processors and disk.
    Resize(u8, u8),
    /// Control gives back what is claimed and not needed.
    Settle,
    /// A user has the guest told something else.
    Metadata(u8),
    /// A user has it have so many volumes.
    Volumes(u8),
    /// Somebody wishes to look at it.
    Access,
    /// The user sets another restart policy.
    Restart(Restart),
    GuestEnds,
    GuestCrashes,
    GuestPaused(Pause),
    /// libvirtd forgets why a domain does not run; so does a start of the host.
    LibvirtdRestarts,
    /// `virsh undefine`: at once, or when the guest ends.
    Undefined,
    DiskDeleted,
    RecordDeleted,
    /// A define that was under way in libvirtd when the agent was killed.
    LateDefine,
    /// A new disk that was made for it then.
    LateSuccessor,
    /// etcd is emptied, or restored to what it was.
    EtcdEmptied,
    EtcdSaved,
    EtcdRestored,
    /// The watch breaks, and lists anew.
    WatchBreaks,
    Etcd(bool),
    Placement(bool),
    Blind(bool),
    Images(Images),
    StartBroken(bool),
    Addresses(bool),
    /// Guests do not hear when they are asked to end.
    Deaf(bool),
    /// They do not let go of volumes.
    Stubborn(bool),
}

/// So many volumes.
pub(crate) fn attachments(count: u8) -> Vec<Attachment> {
    let one = |number: u8| Attachment {
        volume: InstanceId::new(uuid::Uuid::from_u128(100 + u128::from(number))),
        device: format!("vd{}", char::from(b'b' + number)),
    };
    (0..count).map(one).collect()
}

/// The smallest that there is.
pub(crate) const SMALL: Size = Size { vcpus: 1, memory_mb: 128, disk_gb: 1 };

pub(crate) fn resources(size: Size) -> Resources {
    [("VCPU", size.vcpus), ("MEMORY_MB", size.memory_mb), ("DISK_GB", size.disk_gb)]
        .map(|(class, amount)| (class.to_owned(), amount))
        .into()
}

/// Of each the greater.
pub(crate) fn greater(a: Size, b: Size) -> Size {
    Size {
        vcpus: a.vcpus.max(b.vcpus),
        memory_mb: a.memory_mb.max(b.memory_mb),
        disk_gb: a.disk_gb.max(b.disk_gb),
    }
}

/// What a request says that it shall be, with this in its metadata; 0: nothing.
pub(crate) fn spec(metadata: u8, size: Size) -> Spec {
    let items = (metadata > 0).then(|| ("which".to_owned(), metadata.to_string()));
    Spec {
        query: String::new(),
        resources: resources(size),
        image: ImageRef::default(),
        keys: Vec::new(),
        metadata: items.into_iter().collect(),
        user_data_bytes: None,
        token_required: false,
        snapshot: false,
    }
}

impl Outside {
    pub(crate) fn new(instances: &[InstanceId]) -> Self {
        Self {
            things: instances.iter().map(|instance| (*instance, Thing::default())).collect(),
            now: Duration::ZERO,
            revision: 1,
            etcd_up: true,
            placement_up: true,
            blind: false,
            images: Images::Fine,
            start_broken: false,
            addresses: false,
            deaf: false,
            stubborn: false,
            lasting: None,
            news: Vec::new(),
        }
    }

    /// From now on all that could be broken works.
    pub(crate) fn heal(&mut self) {
        (self.etcd_up, self.placement_up, self.blind) = (true, true, false);
        (self.images, self.start_broken, self.addresses) = (Images::Fine, false, true);
        self.stubborn = false;
        for thing in self.things.values_mut() {
            if let Some(RunState::Paused(Pause::Storage { room })) = &mut thing.observed.domain {
                *room = true;
            }
        }
    }

    pub(crate) fn stamp(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH + self.now
    }

    pub(crate) fn thing(&mut self, instance: InstanceId) -> &mut Thing {
        self.things.entry(instance).or_default()
    }

    /// Writes a request's key, or deletes it.
    pub(crate) fn put(&mut self, instance: InstanceId, wish: Option<Wish>) {
        self.revision += 1;
        let request = wish.map(|wish| (wish, self.revision));
        self.thing(instance).keys.request = request;
        self.news.push(News::Changed(instance, request));
    }

    pub(crate) fn happen(&mut self, instance: InstanceId, happening: &Happening) {
        let now = self.now;
        let Some(thing) = self.things.get_mut(&instance) else { return };
        match happening {
            Happening::Claim if thing.claimed.is_none() => {
                (thing.keys.index, thing.keys.room, thing.claimed) = (true, Room::Here, Some(now));
                (thing.keys.size, thing.keys.claimed) = (SMALL, SMALL);
            }
            Happening::Request if thing.claimed.is_some() && thing.keys.index && thing.wish().is_none() => {
                // One instance is requested once.
                if thing.in_time || thing.ended || thing.observed != Observed::default() {
                    return;
                }
                let in_time = thing.claimed.is_some_and(|claimed| now < claimed + GRACE) && !thing.robbed;
                assert!(
                    !in_time || thing.keys.room == Room::Here,
                    "a claim whose request is under way is not taken: {self:?}"
                );
                thing.in_time = in_time;
                self.put(instance, Some(Wish::Active));
            }
            Happening::ForeignClaim if thing.claimed.is_none() => {
                (thing.keys.room, thing.claimed, thing.foreign) = (Room::Here, Some(now), true);
            }
            // Also without a request, where a status tells of it; a request that cannot be read is not touched.
            Happening::Destroy
                if matches!(thing.wish(), Some(Wish::Active | Wish::Destroyed))
                    || thing.wish().is_none() && thing.keys.status != StatusEntry::Absent =>
            {
                (thing.keys.index, thing.user_destroyed) = (false, true);
                self.put(instance, Some(Wish::Destroyed));
            }
            Happening::RequestKeyDeleted if thing.wish().is_some() => {
                thing.robbed = true;
                self.put(instance, None);
            }
            Happening::StatusKeyDeleted => thing.keys.status = StatusEntry::Absent,
            Happening::Rubbish if thing.wish().is_some() => self.put(instance, Some(Wish::Rubbish)),
            Happening::StatusRubbish if thing.keys.status != StatusEntry::Absent => {
                thing.keys.status = StatusEntry::Unreadable;
            }
            Happening::RecordRubbish if thing.record != RecordFacts::Absent => {
                thing.record = RecordFacts::Unreadable;
            }
            Happening::AllocationDeleted => (thing.keys.room, thing.robbed) = (Room::None, true),
            Happening::AllocationMoved if thing.keys.room == Room::Here => {
                (thing.keys.room, thing.robbed) = (Room::Elsewhere, true);
            }
            Happening::Power(power, patient, anew) if thing.wish() == Some(Wish::Active) => {
                let generation = thing.keys.power.generation + 1;
                let grace_seconds = if *patient { 60 } else { 0 };
                let anew = *anew && *power == Power::Running;
                thing.keys.power = PowerWish { power: *power, generation, grace_seconds, anew };
                self.put(instance, Some(Wish::Active));
            }
            Happening::Rebuild if thing.wish() == Some(Wish::Active) => {
                let told = thing.keys.status.known().and_then(|status| status.rebuilt.as_ref());
                let last =
                    thing.keys.rebuild.as_ref().map(|wish| wish.wished_at).max(told.map(|was| was.wished_at));
                let now = Timestamp::UNIX_EPOCH + now;
                let wished_at = last.map_or(now, |last| now.max(last + Duration::from_nanos(1)));
                (thing.keys.rebuild, thing.rebuilds_wished) =
                    (Some(Rebuild { wished_at, before: None }), thing.rebuilds_wished + 1);
                self.put(instance, Some(Wish::Active));
            }
            Happening::Rescue(wanted) if thing.wish() == Some(Wish::Active) => {
                let told = thing.keys.status.known().and_then(|status| status.rescued.as_ref());
                let last = thing.keys.rescue.as_ref().map(|wish| wish.wished_at);
                let last = last.max(told.map(|was| was.wished_at));
                let now = Timestamp::UNIX_EPOCH + now;
                let wished_at = last.map_or(now, |last| now.max(last + Duration::from_nanos(1)));
                thing.keys.rescue =
                    wanted.then(|| Rescue { wished_at, image: spec(0, thing.keys.size).image });
                thing.rescue_wished |= wanted;
                self.put(instance, Some(Wish::Active));
            }
            Happening::StartedByHand
                if thing.wrote
                    && thing.observed.volume
                    && matches!(thing.observed.domain, Some(RunState::Ended(_) | RunState::NotStarted)) =>
            {
                (thing.observed.domain, thing.wrote_disk) = (Some(RunState::Running), true);
                self.news.push(News::Hint(instance));
            }
            Happening::Resize(vcpus, disk) if thing.wish() == Some(Wish::Active) => {
                let told = thing.keys.status.known().and_then(|status| status.resized.as_ref());
                let last = thing.keys.resize.map(|wish| wish.wished_at).max(told.map(|was| was.wished_at));
                let now = Timestamp::UNIX_EPOCH + now;
                let wished_at = last.map_or(now, |last| now.max(last + Duration::from_nanos(1)));
                let disk_gb = thing.keys.size.disk_gb.max((*disk).into());
                thing.keys.size = Size { vcpus: (*vcpus).into(), memory_mb: 128, disk_gb };
                thing.keys.claimed = greater(thing.keys.claimed, thing.keys.size);
                thing.keys.resize = Some(Resize { wished_at });
                self.put(instance, Some(Wish::Active));
            }
            Happening::Settle => {
                let told = thing.keys.status.known().and_then(|status| status.resized.as_ref());
                let is_told = told.map(|was| was.wished_at) >= thing.keys.resize.map(|wish| wish.wished_at);
                if thing.wish() == Some(Wish::Active) && is_told && thing.keys.room == Room::Here {
                    thing.keys.claimed = greater(thing.keys.size, thing.size);
                }
            }
            Happening::Metadata(metadata) if thing.wish() == Some(Wish::Active) => {
                thing.keys.metadata = *metadata;
                self.put(instance, Some(Wish::Active));
            }
            Happening::Volumes(count) if thing.wish() == Some(Wish::Active) => {
                thing.keys.volumes = *count;
                self.put(instance, Some(Wish::Active));
            }
            Happening::Access if thing.wish() == Some(Wish::Active) => {
                let generation = thing.keys.access.map_or(1, |wish| wish.generation + 1);
                thing.keys.access =
                    Some(AccessWish { kind: AccessKind::Console, generation, request_id: None });
                self.put(instance, Some(Wish::Active));
            }
            Happening::Restart(policy) if thing.wish() == Some(Wish::Active) => {
                thing.keys.restart = *policy;
                self.put(instance, Some(Wish::Active));
            }
            Happening::GuestEnds => self.end(instance, End::ByGuest),
            Happening::GuestCrashes => self.end(instance, End::Crashed),
            Happening::GuestPaused(why) if thing.runs() => {
                thing.observed.domain = Some(RunState::Paused(*why));
                self.news.push(News::Hint(instance));
            }
            Happening::LibvirtdRestarts => {
                if let Some(domain @ RunState::Ended(_)) = &mut thing.observed.domain {
                    *domain = RunState::NotStarted;
                }
                self.news.push(News::HintAll);
            }
            Happening::Undefined => match thing.observed.domain {
                Some(RunState::Running | RunState::Paused(_)) => thing.observed.transient = true,
                _ => {
                    (thing.observed.domain, thing.observed.rescued) = (None, false);
                    thing.observed.volumes = 0;
                }
            },
            Happening::DiskDeleted => (thing.observed.volume, thing.disk_deleted) = (false, true),
            Happening::RecordDeleted => thing.record = RecordFacts::Absent,
            Happening::LateDefine if thing.observed.domain.is_none() && thing.claimed.is_some() => {
                (thing.observed.domain, thing.late) = (Some(RunState::NotStarted), true);
            }
            Happening::LateSuccessor if thing.rebuilds_wished > 0 => thing.observed.successor = true,
            Happening::EtcdEmptied => {
                for thing in self.things.values_mut() {
                    (thing.keys, thing.robbed) = (Keys::default(), true);
                }
                self.news.extend([News::Listing, News::Presence]);
            }
            Happening::EtcdSaved => {
                for thing in self.things.values_mut() {
                    thing.saved = Some(thing.keys.clone());
                }
            }
            Happening::EtcdRestored => {
                for thing in self.things.values_mut() {
                    if let Some(saved) = thing.saved.clone() {
                        (thing.keys, thing.robbed) = (saved, true);
                    }
                }
                self.news.extend([News::Listing, News::Presence]);
            }
            Happening::WatchBreaks => self.news = vec![News::Lost, News::Listing],
            Happening::Etcd(up) => self.etcd_up = *up,
            Happening::Placement(up) => self.placement_up = *up,
            Happening::Blind(blind) => self.blind = *blind,
            Happening::Images(images) => self.images = *images,
            Happening::StartBroken(broken) => self.start_broken = *broken,
            Happening::Addresses(there) => self.addresses = *there,
            Happening::Deaf(deaf) => self.deaf = *deaf,
            Happening::Stubborn(stubborn) => self.stubborn = *stubborn,
            _ => {}
        }
    }

    /// A guest that is up ends, and its domain with it where that was not defined for good.
    pub(crate) fn end(&mut self, instance: InstanceId, why: End) {
        let thing = self.thing(instance);
        if thing.is_up() {
            thing.observed.domain = (!thing.observed.transient).then_some(RunState::Ended(why));
            if thing.observed.transient {
                thing.observed.volumes = 0;
            }
            (thing.observed.transient, thing.observed.rescued) = (false, false);
            self.news.push(News::Hint(instance));
        }
    }

    /// Every request, as a listing has it.
    pub(crate) fn requests(&self) -> Vec<(InstanceId, Requested)> {
        let requests = self.things.iter();
        requests.filter_map(|(id, thing)| Some((*id, self.requested(*id, thing.keys.request?)))).collect()
    }

    pub(crate) fn requested(&self, instance: InstanceId, (wish, revision): (Wish, i64)) -> Requested {
        let desired = match wish {
            Wish::Active => Ok(Desired::Active),
            Wish::Destroyed => Ok(Desired::Destroyed),
            Wish::Rubbish => Err("rubbish".to_owned()),
        };
        let Keys { power, restart, rebuild, rescue, resize, size, volumes, metadata, access, .. } =
            &self.things[&instance].keys;
        let record = desired.map(|desired| {
            Arc::new(Request {
                kind: ec_model::Workload::Machine,
                volumes: attachments(*volumes),
                instance,
                epoch: 1,
                generation: power.generation,
                desired,
                power: power.clone(),
                restart: *restart,
                rebuild: rebuild.clone(),
                rescue: rescue.clone(),
                resize: *resize,
                handover: None,
                name: None,
                spec: Some(spec(*metadata, *size)),
                project: String::new(),
                user: String::new(),
                request_id: None,
                access: *access,
                created_at: Timestamp::UNIX_EPOCH,
            })
        });
        Requested { record, revision }
    }

    pub(crate) fn statuses(&self) -> BTreeMap<InstanceId, StatusEntry> {
        let statuses = self.things.iter().filter(|(_, thing)| thing.keys.status != StatusEntry::Absent);
        statuses.map(|(instance, thing)| (*instance, thing.keys.status.clone())).collect()
    }

    pub(crate) fn domains(&self) -> BTreeMap<InstanceId, Observed> {
        let here = self.things.iter().filter(|(_, thing)| thing.observed != Observed::default());
        here.map(|(instance, thing)| (*instance, thing.observed)).collect()
    }

    /// A look's last part; the first two were seen before.
    pub(crate) fn seen(
        &self,
        statuses: BTreeMap<InstanceId, StatusEntry>,
        observed: BTreeMap<InstanceId, Observed>,
    ) -> Seen {
        let records = self.things.iter().filter(|(_, thing)| thing.record != RecordFacts::Absent);
        let is_unclaimed = |status: &StatusEntry| match status {
            StatusEntry::Known(status, _) => status.state == State::Unclaimed,
            StatusEntry::Absent | StatusEntry::Unreadable => false,
        };
        let unclaimed = statuses.iter().filter(|(_, status)| is_unclaimed(status));
        Seen {
            // Goes with the status.
            held: unclaimed.map(|(instance, _)| *instance).collect(),
            statuses,
            observed,
            records: records.map(|(instance, thing)| (*instance, thing.record)).collect(),
            buried: self.things.iter().filter(|(_, thing)| thing.buried).map(|(id, _)| (*id, None)).collect(),
        }
    }

    pub(crate) fn held(&self, instance: InstanceId) -> Held {
        match self.things[&instance].keys.room {
            Room::None => Held::Nothing,
            Room::Here => Held::Here(resources(self.things[&instance].keys.claimed)),
            Room::Elsewhere => Held::Elsewhere,
        }
    }
}

pub(crate) fn node() -> NodeId {
    NodeId::new(uuid::Uuid::from_u128(0xfe))
}

pub(crate) fn address(instance: InstanceId) -> Address {
    Address { ip: [192, 0, 2, 1].into(), mac: instance.mac(0), nic: 0, source: AddressSource::Lease }
}

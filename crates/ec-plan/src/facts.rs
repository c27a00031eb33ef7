//! What is known of one instance at one moment.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use ec_model::{
    AccessWish, Edition, Handover, InstanceId, Observed, Power, Rescued, Restart, Size, State, Workload,
};
use jiff::Timestamp;

/// What the request says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// There is no request.
    Nothing,
    /// Built and running.
    Active,
    /// Gone.
    Destroyed,
    /// The record cannot be read: malformed, or of a later release.
    Unreadable,
}

/// What is known of the instance's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// Not asked yet, or placement does not answer.
    Unknown,
    /// Placement has none.
    Absent,
    /// Placement has one, but from other nodes' providers.
    Elsewhere,
    /// Placement has one from this node's providers.
    Held {
        /// For how long this agent has seen it.
        seen_for: Duration,
    },
}

/// The status as it lies in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatusFacts {
    /// There is none.
    Absent,
    /// It cannot be read: malformed, or of a later release.
    Unreadable,
    /// It was read.
    Known(KnownStatus),
}

/// What decisions need of a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownStatus {
    /// The state written last.
    pub state: State,
    /// The reason written with it.
    pub reason: Option<String>,
    /// The epoch of the request that it was written for, or that its node kept.
    pub epoch: u64,
    /// The generation of that.
    pub generation: u64,
    /// Whether it holds an address.
    pub has_address: bool,
    /// Whether the start of the domain was noted, by this agent or one before it.
    pub start_noted: bool,
    /// How often in a row its restart policy has started it again.
    pub restarts: u32,
}

/// What the request says of power.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PowerFacts {
    /// How it shall be.
    pub wanted: Power,
    /// The wish was not carried out yet, as far as the status tells.
    pub pending: bool,
    /// The generation that brought the wish.
    pub generation: u64,
    /// A guest that runs is ended first.
    pub anew: bool,
    /// How long a guest may take to end by itself.
    pub grace: Duration,
    /// What follows when it ends without anybody's wish.
    pub restart: Restart,
}

/// What the request says of a new disk, and the status of what came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RebuildFacts {
    /// The last wish: [`ec_model::Rebuild::wished_at`].
    pub wished: Option<Timestamp>,
    /// The last one of which the status tells what came of it.
    pub told: Option<Timestamp>,
}

/// What the request says of booting from another disk, and the status of what came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RescueFacts {
    /// The wish, where there is one: [`ec_model::Rescue::wished_at`].
    pub wished: Option<Timestamp>,
    /// What the status tells.
    pub told: Option<RescuedFacts>,
}

/// What came of a wish to boot from another disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RescuedFacts {
    /// Which it was: [`ec_model::Rescue::wished_at`].
    pub wished_at: Timestamp,
    /// It boots from its own disk, since that could not be.
    pub failed: bool,
}

impl RescuedFacts {
    /// Of what was written down.
    pub fn of(rescued: &Rescued) -> Self {
        Self { wished_at: rescued.wished_at, failed: rescued.failed.is_some() }
    }
}

/// What the request says of a size, and the status of what came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResizeFacts {
    /// How large it was asked for last.
    pub wanted: Size,
    /// The last wish for another size: [`ec_model::Resize::wished_at`].
    pub wished: Option<Timestamp>,
    /// The last one of which the status tells what came of it.
    pub told: Option<Timestamp>,
    /// It tells that it failed.
    pub told_failed: bool,
}

/// What the request says of volumes, and the status of those that it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VolumesFacts {
    /// Those that it is to have, as [`ec_model::Attachment::fingerprint`] has them.
    pub wanted: u64,
    /// Those that the status tells, in the same way; none where it tells besides why it has not those that it is to have.
    pub told: Option<u64>,
    /// How long ago this agent tried in vain to give it those.
    pub failed: Option<Duration>,
}

/// How large it is, as its node noted it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SizeFacts {
    /// What its domain was made with.
    pub is: Size,
    /// The last wish for another size that came to its end here: [`ec_model::Resize::wished_at`].
    pub wished_at: Option<Timestamp>,
    /// That wish failed.
    pub failed: bool,
    /// Nobody saw it run with this size yet; what it was before is noted, too.
    pub unproven: bool,
    /// What it is being given: it may have that already.
    pub growing: Option<Size>,
}

/// For how long a guest has been asked to end, by this agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// Since it was asked first.
    pub first: Duration,
    /// Since it was asked last.
    pub last: Duration,
}

/// The node's own record of an instance, on its disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RecordFacts {
    /// There is none.
    #[default]
    Absent,
    /// It cannot be read: damaged, or of a later release.
    Unreadable,
    /// It was read.
    Kept {
        /// A start was begun: from then on a guest may have written its disk.
        started: bool,
        /// The last wish for a new disk that came to its end here: [`ec_model::Rebuild::wished_at`].
        rebuilt: Option<Timestamp>,
        /// What came of the last wish to boot from another disk, for as long as that is in force.
        rescued: Option<RescuedFacts>,
        /// A disk to be rescued from was begun, and may be there.
        rescue_begun: bool,
        /// What the guest is told of itself in its user's words, as [`fingerprint`] has it.
        metadata: u64,
        /// Of which request it keeps a copy, so that an etcd that lost it can be told again.
        intent: Option<Edition>,
        /// The volume that it boots from by that; none where it has a disk of its own.
        root: Option<InstanceId>,
        /// How large it is.
        size: SizeFacts,
    },
}

impl RecordFacts {
    /// Whether its guest is started from its rescue disk.
    pub fn is_rescued(self) -> bool {
        matches!(self, Self::Kept { rescued: Some(RescuedFacts { failed: false, .. }), .. })
    }

    /// Of which request it keeps a copy.
    pub fn kept(self) -> Option<Edition> {
        match self {
            Self::Kept { intent, .. } => intent,
            Self::Absent | Self::Unreadable => None,
        }
    }

    /// The volume that it boots from, as the request has it of which it keeps a copy.
    pub fn root(self) -> Option<InstanceId> {
        match self {
            Self::Kept { root, .. } => root,
            Self::Absent | Self::Unreadable => None,
        }
    }

    /// Whether nobody saw it run with its size yet.
    pub fn is_unproven(self) -> bool {
        matches!(self, Self::Kept { size: SizeFacts { unproven: true, .. }, .. })
    }
}

/// Everything known of one instance at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// What kind of workload it is.
    pub kind: Workload,
    /// What shall be.
    pub wanted: Wanted,
    /// The generation of the request; 0 where there is none.
    pub generation: u64,
    /// Which of its requests that is; none where there is none that can be read.
    pub edition: Option<Edition>,
    /// That it moves from one node to another, as its request has it.
    pub handover: Option<Handover>,
    /// Whether and how it shall run.
    pub power: PowerFacts,
    /// Whether its disk is to be made anew.
    pub rebuild: RebuildFacts,
    /// Whether it is to be booted from another disk.
    pub rescue: RescueFacts,
    /// How large it shall be.
    pub resize: ResizeFacts,
    /// Which volumes it shall have.
    pub volumes: VolumesFacts,
    /// What the guest shall be told of itself in its user's words, as [`fingerprint`] has it.
    pub metadata: u64,
    /// Somebody's wish to look at it that was not answered yet, as far as the status tells.
    pub access: Option<AccessWish>,
    /// What was written last.
    pub status: StatusFacts,
    /// What the hypervisor has, as it was last seen. Of one that boots from a volume, [`Observed::volume`] is that this is
    /// there and made.
    pub observed: Observed,
    /// The disks whose copies are to lie beside it, as [`Observed::copies`] has them.
    pub copies: u64,
    /// It boots from a volume, and has no disk of its own.
    pub on_volume: bool,
    /// What is to be a copy of its disk, was wished before that was to change or go, and is not made yet.
    pub copied_by: Option<InstanceId>,
    /// Work of ours changed what the hypervisor has, and it could not be asked since; or what is told of it was not read since its request
    /// came back.
    pub unseen: bool,
    /// The node's own record.
    pub record: RecordFacts,
    /// A user's destroy was begun here. A uuid is used once, so whatever turns up later goes too; but for a volume that comes from
    /// another node, and was placed here later than what was destroyed.
    pub buried: bool,
    /// This node holds it in etcd, so that it can be brought back.
    pub is_held: bool,
    /// What placement has.
    pub allocation: Allocation,
    /// For how large a machine there is room in that, where it is held here.
    pub held: Size,
    /// Whether control tools of this cloud asked for the instance; `None` is not known.
    pub asked_for: Option<bool>,
    /// For how long this agent has looked for an address and found none.
    pub searched: Duration,
    /// How long ago it was let go on after a pause, by this agent.
    pub resumed: Option<Duration>,
    /// That the guest was asked to end, and runs on.
    pub asked_to_end: Option<Asked>,
    /// For how long it ran, or runs, since it was started, by the clock on the wall; that it ended is known once it is told.
    pub ran_for: Duration,
    /// For how long this agent has seen that it does not run.
    pub ended_for: Duration,
}

/// Tells one metadata from another within one process; 0 of none.
pub fn fingerprint(metadata: &BTreeMap<String, String>) -> u64 {
    if metadata.is_empty() {
        return 0;
    }
    let mut hasher = DefaultHasher::new();
    metadata.hash(&mut hasher);
    hasher.finish()
}

impl Facts {
    /// Whether a new disk is wished that this node has neither made nor given up. Where its record does not tell, nobody
    /// can, and nothing is made.
    pub fn is_to_be_rebuilt(&self) -> bool {
        let RecordFacts::Kept { rebuilt, .. } = self.record else { return false };
        rebuilt.max(self.rebuild.told) < self.rebuild.wished
    }

    /// Whether its disk is about to be another, to be another node's, or to go.
    pub fn takes_disk(&self) -> bool {
        self.wanted == Wanted::Destroyed
            || self.is_to_be_rebuilt()
            || matches!(self.handover, Some(Handover::To(_)))
    }

    /// Whether it is to be booted from another disk, which this node has neither begun nor given up. What is in force of
    /// an other wish goes first.
    pub fn is_to_be_rescued(&self) -> bool {
        let RecordFacts::Kept { rescued, .. } = self.record else { return false };
        let is_other = rescued.is_none_or(|was| Some(was.wished_at) != self.rescue.wished);
        self.rescue.wished.is_some() && is_other && !self.record.is_rescued() && !self.rescue_was_given_up()
    }

    /// Whether its user was told that the rescue disk that is wished does not come.
    pub fn rescue_was_given_up(&self) -> bool {
        let told = self.rescue.told;
        told.is_some_and(|told| told.failed && Some(told.wished_at) == self.rescue.wished)
    }

    /// Whether it boots from its rescue disk, or runs from it still: nothing is done about its size meanwhile.
    pub fn boots_elsewhere(&self) -> bool {
        self.record.is_rescued() || self.observed.rescued
    }

    /// How large it is to be made, where it is not so and nobody found yet that it cannot be. What nobody ever wished
    /// another size for is as it was made, and disks never shrink.
    pub fn size_to_have(&self) -> Option<Size> {
        let RecordFacts::Kept { size, .. } = self.record else { return None };
        let ResizeFacts { wanted, wished, .. } = self.resize;
        // Without a wish, in an etcd of before the first, what failed last counts: nobody else would ever say that it is enough.
        let was_given_up = size.failed && (wished.is_none() || size.wished_at == wished);
        let is_measured = wished.is_some() || size.wished_at.is_some() || size.growing.is_some();
        if self.boots_elsewhere()
            || was_given_up
            || !is_measured
            || wanted.vcpus == 0
            || wanted.memory_mb == 0
        {
            return None;
        }
        let wanted = Size { disk_gb: wanted.disk_gb.max(size.is.disk_gb), ..wanted };
        (wanted != size.is || size.growing.is_some()).then_some(wanted)
    }

    /// To how many GiB a volume is to grow, where nobody found yet that it cannot.
    pub fn gigabytes_to_have(&self) -> Option<u64> {
        let RecordFacts::Kept { size, .. } = self.record else { return None };
        let ResizeFacts { wanted, wished, .. } = self.resize;
        let was_given_up = size.failed && size.wished_at == wished;
        (wished.is_some() && !was_given_up && wanted.disk_gb > size.is.disk_gb).then_some(wanted.disk_gb)
    }

    /// Whether what fails now is that it gets another size.
    pub fn is_being_resized(&self) -> bool {
        if self.kind == Workload::Volume {
            return self.observed.volume && self.gigabytes_to_have().is_some();
        }
        let is_here = self.observed.domain.is_some() && self.observed.volume;
        is_here && !self.boots_elsewhere() && (self.record.is_unproven() || self.size_to_have().is_some())
    }
}

/// The times that decisions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A guest without an address for so long is told.
    pub address: Duration,
    /// An allocation without a request for this long belongs to a claim whose request never arrived.
    pub grace: Duration,
}

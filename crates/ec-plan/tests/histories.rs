//! Random histories of one instance on one host, with an agent that is killed between any two effects.
//!
//! The world performs effects exactly as the agent does and remembers what the agent does not: whether a guest
//! ever wrote its disk, and whether a user asked for the end. Whatever happens, in whatever order: a disk that a
//! guest wrote goes only by a user's destroy, nothing is leaked, nothing is lost, and once the world is kind a
//! fixpoint is reached.

use std::time::Duration;

use ec_model::{End, Observed, Pause, RunState, State};
use ec_plan::{
    Allocation, Decision, Effect, Facts, KnownStatus, Limits, RecordFacts, StatusFacts, Wanted, decide, ran,
};
use proptest::prelude::*;

const LIMITS: Limits = Limits { address: Duration::from_secs(300), grace: Duration::from_secs(60) };

/// So often an agent looks in one of its lives.
const LOOKS: usize = 8;

/// What can happen from outside, and the agent's own looks.
#[derive(Debug, Clone)]
enum Happening {
    /// eschedule writes its intent, claims and requests.
    Request,
    /// eschedule is killed between claim and request.
    ClaimOnly,
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
    GuestEnds,
    GuestPaused(Pause),
    /// libvirtd forgets why a domain does not run; so does a start of the host.
    LibvirtdRestarts,
    /// `virsh undefine`: at once, or when the guest ends.
    Undefined,
    DiskDeleted,
    RecordDeleted,
    /// A define that was under way in libvirtd when the agent was killed.
    LateDefine,
    /// etcd is emptied, or restored to what it was.
    EtcdEmptied,
    EtcdSaved,
    EtcdRestored,
    AddressKnown,
    PlacementDown,
    PlacementUp,
    ImageBroken(bool),
    StartBroken(bool),
    /// Seconds pass in which the agent looks for addresses.
    Time(u64),
    /// An agent starts, and is killed after so many effects, or has nothing more to do.
    Agent(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    let pause = prop_oneof![
        any::<bool>().prop_map(|room| Pause::Storage { room }),
        Just(Pause::ByHand),
        Just(Pause::Crashed),
        Just(Pause::Other)
    ];
    prop_oneof![
        8 => Just(Happening::Request),
        1 => Just(Happening::ClaimOnly),
        1 => Just(Happening::ForeignClaim),
        2 => Just(Happening::Destroy),
        1 => Just(Happening::RequestKeyDeleted),
        1 => Just(Happening::StatusKeyDeleted),
        1 => Just(Happening::Rubbish),
        1 => Just(Happening::StatusRubbish),
        1 => Just(Happening::RecordRubbish),
        1 => Just(Happening::AllocationDeleted),
        1 => Just(Happening::AllocationMoved),
        1 => Just(Happening::GuestEnds),
        1 => pause.prop_map(Happening::GuestPaused),
        1 => Just(Happening::LibvirtdRestarts),
        1 => Just(Happening::Undefined),
        1 => Just(Happening::DiskDeleted),
        1 => Just(Happening::RecordDeleted),
        1 => Just(Happening::LateDefine),
        1 => Just(Happening::EtcdEmptied),
        1 => Just(Happening::EtcdSaved),
        1 => Just(Happening::EtcdRestored),
        4 => Just(Happening::AddressKnown),
        1 => Just(Happening::PlacementDown),
        2 => Just(Happening::PlacementUp),
        1 => any::<bool>().prop_map(Happening::ImageBroken),
        1 => any::<bool>().prop_map(Happening::StartBroken),
        2 => (1..400_u64).prop_map(Happening::Time),
        16 => (0..24_usize).prop_map(Happening::Agent),
    ]
}

/// Where an allocation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    None,
    Here,
    Elsewhere,
}

/// What lies in etcd, and so goes with it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Etcd {
    wanted: Wanted,
    status: StatusFacts,
    /// The index: control tools asked for the instance.
    index: bool,
    room: Room,
}

/// One host, one instance, as they really are.
#[derive(Debug)]
struct World {
    etcd: Etcd,
    saved: Option<Etcd>,
    observed: Observed,
    record: RecordFacts,
    buried: bool,
    placement_up: bool,
    image_broken: bool,
    start_broken: bool,
    searched: Duration,
    /// What the agent remembers of the allocation and the index; forgotten when it is killed.
    known: Allocation,
    asked_for: Option<bool>,
    /// A guest ran: its disk holds what nobody else has.
    wrote: bool,
    /// A user destroyed the instance.
    user_destroyed: bool,
    /// That destroy was done to its end once.
    ended: bool,
    /// Somebody deleted the disk's file; that one is not on us.
    disk_deleted: bool,
    requested: bool,
}

impl World {
    fn new() -> Self {
        Self {
            etcd: Etcd {
                wanted: Wanted::Nothing,
                status: StatusFacts::Absent,
                index: false,
                room: Room::None,
            },
            saved: None,
            observed: Observed::default(),
            record: RecordFacts::Absent,
            buried: false,
            placement_up: true,
            image_broken: false,
            start_broken: false,
            searched: Duration::ZERO,
            known: Allocation::Unknown,
            asked_for: None,
            wrote: false,
            user_destroyed: false,
            ended: false,
            disk_deleted: false,
            requested: false,
        }
    }

    fn facts(&self) -> Facts {
        Facts {
            wanted: self.etcd.wanted,
            status: self.etcd.status.clone(),
            observed: self.observed,
            record: self.record,
            buried: self.buried,
            allocation: self.known,
            asked_for: self.asked_for,
            searched: self.searched,
        }
    }

    fn happen(&mut self, happening: &Happening) {
        match happening {
            // An instance's uuid is used once: eschedule never asks for the same one again.
            Happening::Request if self.fresh() => {
                (self.etcd.index, self.etcd.room, self.etcd.wanted) = (true, Room::Here, Wanted::Active);
                self.requested = true;
            }
            Happening::ClaimOnly if self.fresh() => {
                (self.etcd.index, self.etcd.room, self.requested) = (true, Room::Here, true);
            }
            Happening::ForeignClaim if self.fresh() => {
                (self.etcd.room, self.requested) = (Room::Here, true);
            }
            // Also without a request, where a status tells of it; a request that cannot be read is not touched.
            Happening::Destroy
                if matches!(self.etcd.wanted, Wanted::Active | Wanted::Destroyed)
                    || self.etcd.wanted == Wanted::Nothing && self.etcd.status != StatusFacts::Absent =>
            {
                (self.etcd.wanted, self.etcd.index, self.user_destroyed) = (Wanted::Destroyed, false, true);
            }
            Happening::RequestKeyDeleted => self.etcd.wanted = Wanted::Nothing,
            Happening::StatusKeyDeleted => self.etcd.status = StatusFacts::Absent,
            Happening::Rubbish if self.etcd.wanted != Wanted::Nothing => {
                self.etcd.wanted = Wanted::Unreadable
            }
            Happening::StatusRubbish if self.etcd.status != StatusFacts::Absent => {
                self.etcd.status = StatusFacts::Unreadable;
            }
            Happening::RecordRubbish if self.record != RecordFacts::Absent => {
                self.record = RecordFacts::Unreadable;
            }
            Happening::AllocationDeleted => self.etcd.room = Room::None,
            Happening::AllocationMoved if self.etcd.room == Room::Here => self.etcd.room = Room::Elsewhere,
            Happening::GuestEnds if self.runs() => self.end_guest(),
            Happening::GuestPaused(why) if self.runs() => self.observed.domain = Some(RunState::Paused(*why)),
            Happening::LibvirtdRestarts if matches!(self.observed.domain, Some(RunState::Ended(_))) => {
                self.observed.domain = Some(RunState::NotStarted);
            }
            Happening::Undefined => match self.observed.domain {
                Some(RunState::Running | RunState::Paused(_)) => self.observed.transient = true,
                _ => self.observed.domain = None,
            },
            Happening::DiskDeleted => (self.observed.volume, self.disk_deleted) = (false, true),
            Happening::RecordDeleted => self.record = RecordFacts::Absent,
            Happening::LateDefine if self.observed.domain.is_none() && self.requested => {
                self.observed.domain = Some(RunState::NotStarted);
            }
            Happening::EtcdEmptied => self.etcd = Self::new().etcd,
            Happening::EtcdSaved => self.saved = Some(self.etcd.clone()),
            Happening::EtcdRestored => {
                if let Some(saved) = self.saved.clone() {
                    self.etcd = saved;
                }
            }
            Happening::AddressKnown => self.address_known(),
            Happening::PlacementDown => self.placement_up = false,
            Happening::PlacementUp => self.placement_up = true,
            Happening::ImageBroken(broken) => self.image_broken = *broken,
            Happening::StartBroken(broken) => self.start_broken = *broken,
            Happening::Time(seconds) => self.pass(Duration::from_secs(*seconds)),
            Happening::Agent(effects) => {
                // One life of an agent: it looks until it is killed, or for a while.
                let mut budget = *effects;
                for _ in 0..LOOKS {
                    if budget == 0 || !self.look(&mut budget) {
                        break;
                    }
                }
                (self.known, self.asked_for, self.searched) = (Allocation::Unknown, None, Duration::ZERO);
            }
            _ => {}
        }
    }

    fn fresh(&self) -> bool {
        !self.requested
    }

    fn runs(&self) -> bool {
        self.observed.domain == Some(RunState::Running)
    }

    fn end_guest(&mut self) {
        self.observed.domain =
            if self.observed.transient { None } else { Some(RunState::Ended(End::ByGuest)) };
        self.observed.transient = false;
    }

    fn pass(&mut self, time: Duration) {
        if self.runs() {
            self.searched += time;
        }
        if let Allocation::Held { seen_for } = &mut self.known {
            *seen_for += time;
        }
    }

    fn address_known(&mut self) {
        let runs = self.runs() && self.etcd.wanted == Wanted::Active;
        if let StatusFacts::Known(status) = &mut self.etcd.status
            && runs
            && status.start_noted
            && matches!(status.state, State::Starting | State::Active)
        {
            (status.has_address, status.state, status.reason) = (true, State::Active, None);
        }
    }

    fn ask_placement(&mut self) {
        if self.placement_up {
            self.known = match (self.etcd.room, self.known) {
                (Room::None, _) => Allocation::Absent,
                (Room::Elsewhere, _) => Allocation::Elsewhere,
                (Room::Here, Allocation::Held { seen_for }) => Allocation::Held { seen_for },
                (Room::Here, _) => Allocation::Held { seen_for: Duration::ZERO },
            };
        }
    }

    /// One look: decides, and performs effects as long as there is `budget`. Answers whether anything is left to do.
    fn look(&mut self, budget: &mut usize) -> bool {
        if self.placement_up && (self.etcd.wanted == Wanted::Nothing || self.observed != Observed::default())
        {
            self.ask_placement(); // the audit
        }
        match decide(&self.facts(), &LIMITS) {
            Decision::Settled | Decision::Report(_) => false,
            Decision::LookAgain(_) | Decision::AwaitAddress => true,
            Decision::AskPlacement => {
                self.ask_placement();
                true
            }
            Decision::AskWhose => {
                self.asked_for = Some(self.etcd.index);
                true
            }
            Decision::Fail(reason) => {
                assert!(!reason.is_empty());
                assert!(!self.wrote || self.disk_deleted, "what ever ran does not fail: {self:?}");
                if *budget > 0 {
                    *budget -= 1;
                    self.announce(State::Error, Some(reason));
                }
                true
            }
            Decision::Run(effects) => {
                for effect in &effects {
                    if *budget == 0 || !self.perform(effect) {
                        break;
                    }
                    *budget -= 1;
                }
                true
            }
        }
    }

    fn announce(&mut self, state: State, reason: Option<String>) {
        let (has_address, start_noted) = match &self.etcd.status {
            StatusFacts::Known(status) => (status.has_address, status.start_noted),
            _ => (false, false),
        };
        self.etcd.status = StatusFacts::Known(KnownStatus { state, reason, has_address, start_noted });
    }

    /// Whether it worked; what did not is tried again at the next look.
    fn perform(&mut self, effect: &Effect) -> bool {
        match effect {
            Effect::Announce(state, reason) => self.announce(*state, reason.clone()),
            Effect::PrepareDisk => {
                assert!(self.observed.domain.is_none(), "a disk is never made anew under a domain: {self:?}");
                assert!(!self.wrote || self.disk_deleted, "nothing is built twice: {self:?}");
                if self.image_broken {
                    self.announce(State::Error, Some("broken".into()));
                    return false;
                }
                (self.record, self.observed.volume) = (RecordFacts::Kept { started: false }, true);
            }
            Effect::KeepRecord => {
                assert_eq!(self.etcd.wanted, Wanted::Active, "the request tells what it says: {self:?}");
                self.record = RecordFacts::Kept { started: true };
            }
            Effect::Define => {
                self.observed.transient = false;
                if self.observed.domain.is_none() {
                    assert!(self.observed.volume, "{self:?}");
                    self.observed.domain = Some(RunState::NotStarted);
                }
            }
            Effect::MarkStarted => {
                if let RecordFacts::Kept { started } = &mut self.record {
                    *started = true;
                }
            }
            Effect::Start => {
                assert!(self.known != Allocation::Absent, "nothing runs without a claim: {self:?}");
                if self.start_broken || !self.observed.volume {
                    // As the worker does it: a start that certainly did not happen is unmarked and told.
                    if !self.wrote && self.record == (RecordFacts::Kept { started: true }) {
                        self.record = RecordFacts::Kept { started: false };
                    }
                    self.announce(State::Error, Some("broken".into()));
                    return false;
                }
                assert!(
                    self.record != RecordFacts::Kept { started: false } && self.record != RecordFacts::Absent
                        || self.wrote,
                    "marked before it runs: {self:?}"
                );
                self.observed.domain = Some(RunState::Running);
                self.wrote = true;
            }
            Effect::NoteStart => {
                if !matches!(self.etcd.status, StatusFacts::Known(_)) {
                    self.announce(State::Starting, None);
                }
                if let StatusFacts::Known(status) = &mut self.etcd.status {
                    (status.start_noted, status.state) = (true, State::Starting);
                }
            }
            Effect::Resume => self.observed.domain = Some(RunState::Running),
            Effect::Bury => self.buried = true,
            Effect::RemoveDomain => {
                let written = self.wrote && self.observed.volume && !self.disk_deleted;
                assert!(
                    !written || self.user_destroyed,
                    "only a user's destroy deletes what a guest wrote: {self:?}"
                );
                assert!(
                    !self.runs() || self.user_destroyed,
                    "only a user's destroy ends a guest that runs: {self:?}"
                );
                self.observed = Observed::default();
            }
            Effect::DropRecord => self.record = RecordFacts::Absent,
            Effect::Claim => {
                if !self.placement_up {
                    return false;
                }
                assert_eq!(self.etcd.room, Room::None, "{self:?}");
                (self.etcd.room, self.known) = (Room::Here, Allocation::Held { seen_for: Duration::ZERO });
            }
            Effect::Release => {
                if !self.placement_up {
                    return false;
                }
                self.ask_placement();
                if self.etcd.room == Room::Here {
                    assert!(
                        self.observed.domain.is_none(),
                        "room is never given back under a domain: {self:?}"
                    );
                    (self.etcd.room, self.known) = (Room::None, Allocation::Absent);
                }
            }
            Effect::DropKeys => {
                self.ended |= self.etcd.wanted == Wanted::Destroyed;
                (self.etcd.wanted, self.etcd.status) = (Wanted::Nothing, StatusFacts::Absent);
            }
            Effect::EndInError => self.etcd.wanted = Wanted::Nothing,
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn whatever_happens_a_fixpoint_without_loss_or_leak_is_reached(history in prop::collection::vec(happening(), 0..50)) {
        let mut world = World::new();
        for happening in &history {
            world.happen(happening);
        }

        // The world is kind from now on; an address comes at last, time goes on.
        (world.placement_up, world.image_broken, world.start_broken) = (true, false, false);
        if let Some(RunState::Paused(Pause::Storage { room })) = &mut world.observed.domain {
            *room = true;
        }
        let before = world.facts();
        let mut looks = 0;
        while world.look(&mut usize::MAX.clone()) {
            world.address_known();
            world.pass(Duration::from_secs(10));
            looks += 1;
            prop_assert!(looks < 100, "no fixpoint: {world:?}");
        }

        let domain = world.observed.domain.is_some();
        let unreadable = world.etcd.wanted == Wanted::Unreadable || world.etcd.status == StatusFacts::Unreadable;
        prop_assert!(world.etcd.wanted != Wanted::Destroyed, "a destroy is never lost: {world:?}");
        if unreadable {
            prop_assert_eq!(world.observed, before.observed, "what cannot be read is not touched");
            prop_assert_eq!(world.record, before.record, "what cannot be read is not touched");
            return Ok(());
        }
        let state = match &world.etcd.status {
            StatusFacts::Known(status) => Some(status.state),
            _ => None,
        };
        if before.wanted == Wanted::Active && !world.user_destroyed && !ran(&before)
            && world.etcd.room == Room::Here && state != Some(State::Error)
        {
            prop_assert_eq!(state, Some(State::Active), "a request is never lost");
        }
        if world.etcd.wanted == Wanted::Active {
            prop_assert!(
                matches!(state, Some(State::Active | State::Paused | State::Stopped | State::Error)),
                "{world:?}"
            );
            // Or nobody is left who knows how large it was.
            let unknown = !domain && world.record == RecordFacts::Unreadable && world.etcd.room != Room::Here;
            prop_assert!(
                (state == Some(State::Error)) == (!world.observed.volume || unknown),
                "an error of what is kept is a missing disk or size: {world:?}"
            );
        }
        if world.runs() && world.etcd.wanted == Wanted::Nothing {
            prop_assert_eq!(state, Some(State::Unclaimed), "nobody runs unseen");
        }
        if world.ended {
            prop_assert_eq!(world.observed, Observed::default(), "what was destroyed does not come back");
            prop_assert_eq!(world.etcd.wanted, Wanted::Nothing, "what was destroyed does not come back");
        }
        if domain {
            prop_assert!(world.etcd.room != Room::None, "nobody runs uncounted: {world:?}");
            prop_assert!(!world.observed.transient || world.record == RecordFacts::Absent, "{world:?}");
        }
        if world.etcd.wanted == Wanted::Nothing && state != Some(State::Unclaimed) {
            prop_assert_eq!(world.observed, Observed::default(), "nothing is leaked");
            prop_assert_eq!(world.record, RecordFacts::Absent, "no record is leaked");
            prop_assert!(state.is_none() || state == Some(State::Error), "only errors are left to read");
            if world.etcd.room == Room::Here {
                prop_assert!(!world.etcd.index, "no allocation of ours is leaked: {world:?}");
            }
        }
    }
}

fn unrequested(allocation: Allocation, asked_for: Option<bool>) -> Facts {
    Facts {
        wanted: Wanted::Nothing,
        status: StatusFacts::Absent,
        observed: Observed::default(),
        record: RecordFacts::Absent,
        buried: false,
        allocation,
        asked_for,
        searched: Duration::ZERO,
    }
}

#[test]
fn a_claim_whose_request_never_came_is_released_after_its_grace_and_not_before_and_nobody_elses_ever() {
    let held = |seconds| Allocation::Held { seen_for: Duration::from_secs(seconds) };
    let decided = |seconds, whose| decide(&unrequested(held(seconds), whose), &LIMITS);
    assert_eq!(decided(20, Some(true)), Decision::LookAgain(Duration::from_secs(40)));
    assert_eq!(decided(60, None), Decision::AskWhose);
    assert_eq!(decided(60, Some(true)), Decision::Run(vec![Effect::Release]));
    assert!(matches!(decided(60, Some(false)), Decision::Report(_)));
}

#[test]
fn destroying_wins_whatever_the_instance_is_doing() {
    for state in
        [State::Scheduled, State::Preparing, State::Starting, State::Active, State::Stopped, State::Error]
    {
        for domain in
            [None, Some(RunState::NotStarted), Some(RunState::Running), Some(RunState::Ended(End::Crashed))]
        {
            let facts = Facts {
                wanted: Wanted::Destroyed,
                status: StatusFacts::Known(KnownStatus {
                    state,
                    reason: None,
                    has_address: false,
                    start_noted: true,
                }),
                observed: Observed { domain, volume: true, transient: false },
                record: RecordFacts::Kept { started: true },
                ..unrequested(Allocation::Unknown, None)
            };
            let Decision::Run(effects) = decide(&facts, &LIMITS) else { panic!("{facts:?}") };
            assert_eq!(effects.last(), Some(&Effect::DropKeys));
        }
    }
}

#[test]
fn a_running_guest_without_an_address_is_told_and_left_running() {
    let facts = |searched| Facts {
        wanted: Wanted::Active,
        status: StatusFacts::Known(KnownStatus {
            state: State::Starting,
            reason: None,
            has_address: false,
            start_noted: true,
        }),
        observed: Observed { domain: Some(RunState::Running), volume: true, transient: false },
        record: RecordFacts::Kept { started: true },
        searched: Duration::from_secs(searched),
        ..unrequested(Allocation::Held { seen_for: Duration::ZERO }, None)
    };
    assert_eq!(decide(&facts(299), &LIMITS), Decision::AwaitAddress);
    let Decision::Run(effects) = decide(&facts(300), &LIMITS) else { panic!("it is told") };
    let [Effect::Announce(State::Starting, Some(reason))] = &effects[..] else { panic!("{effects:?}") };
    assert!(reason.contains("no address"), "{reason}");
}

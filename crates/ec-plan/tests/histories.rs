//! Random histories of one instance: requests, crashes between any two effects, placement going away,
//! guests that end, operators who delete keys. Whatever happened, when it stops happening a fixpoint is
//! reached in which nothing is lost and nothing is leaked; and on the way nothing is ever built twice.

use ec_model::{Observed, RunState, State};
use ec_plan::{Allocation, Decision, Effect, Facts, Limits, StatusFacts, Wanted, decide};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

const LIMITS: Limits =
    Limits { address: SignedDuration::from_secs(300), grace: SignedDuration::from_secs(60) };

/// What can happen between two looks of the agent.
#[derive(Debug, Clone, Copy)]
enum Happening {
    /// eschedule claims and writes its request.
    Request,
    /// eschedule is killed between the claim and the request.
    ClaimOnly,
    /// The user destroys.
    Destroy,
    /// An operator deletes the request key by hand.
    RequestKeyDeleted,
    /// An operator deletes the status key by hand.
    StatusKeyDeleted,
    /// The request key is overwritten with rubbish.
    Rubbish,
    /// An operator removes the allocation.
    AllocationDeleted,
    /// The guest powers off, or its process dies.
    GuestEnds,
    /// libvirtd forgets why a domain does not run.
    LibvirtdRestarts,
    /// The guest gets its address.
    AddressKnown,
    PlacementDown,
    PlacementUp,
    /// Every download fails from now on, or works again.
    ImageBroken(bool),
    /// Seconds pass.
    Time(i64),
    /// The agent looks once, and is killed after so many effects (all of them, where there are fewer).
    Agent(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        3 => Just(Happening::Request),
        1 => Just(Happening::ClaimOnly),
        2 => Just(Happening::Destroy),
        1 => Just(Happening::RequestKeyDeleted),
        1 => Just(Happening::StatusKeyDeleted),
        1 => Just(Happening::Rubbish),
        1 => Just(Happening::AllocationDeleted),
        1 => Just(Happening::GuestEnds),
        1 => Just(Happening::LibvirtdRestarts),
        3 => Just(Happening::AddressKnown),
        1 => Just(Happening::PlacementDown),
        2 => Just(Happening::PlacementUp),
        1 => any::<bool>().prop_map(Happening::ImageBroken),
        2 => (1..400_i64).prop_map(Happening::Time),
        12 => (0..8_usize).prop_map(Happening::Agent),
    ]
}

/// One host, one instance, as they really are.
#[derive(Debug)]
struct World {
    now: Timestamp,
    wanted: Wanted,
    status: Option<StatusFacts>,
    observed: Observed,
    record: bool,
    allocated: bool,
    placement_up: bool,
    image_broken: bool,
    /// What the agent remembers of the allocation; forgotten when it is killed.
    known: Allocation,
    /// The instance has been ACTIVE: from then on its disk holds a user's data.
    was_active: bool,
    /// The request was there at some time and nobody deleted its key by hand.
    acknowledged: bool,
}

impl World {
    fn new() -> Self {
        Self {
            now: Timestamp::UNIX_EPOCH,
            wanted: Wanted::Nothing,
            status: None,
            observed: Observed::default(),
            record: false,
            allocated: false,
            placement_up: true,
            image_broken: false,
            known: Allocation::Unknown,
            was_active: false,
            acknowledged: false,
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            // An instance's uuid is used once: eschedule never asks for the same one again.
            Happening::Request if self.fresh() => {
                (self.allocated, self.wanted, self.acknowledged) = (true, Wanted::Active, true);
            }
            Happening::ClaimOnly if self.fresh() => self.allocated = true,
            // Also without a request (after an ERROR, or when its key was deleted), as eschedule does.
            Happening::Destroy if self.wanted != Wanted::Nothing || self.status.is_some() => {
                self.wanted = Wanted::Destroyed;
            }
            Happening::RequestKeyDeleted if self.wanted != Wanted::Nothing => {
                (self.wanted, self.acknowledged) = (Wanted::Nothing, false);
            }
            Happening::StatusKeyDeleted => self.status = None,
            Happening::Rubbish if self.wanted != Wanted::Nothing => {
                (self.wanted, self.acknowledged) = (Wanted::Unreadable, false);
            }
            Happening::AllocationDeleted => self.allocated = false,
            Happening::GuestEnds if self.observed.domain == Some(RunState::Running) => {
                self.observed.domain = Some(RunState::Ended);
            }
            Happening::LibvirtdRestarts if self.observed.domain == Some(RunState::Ended) => {
                self.observed.domain = Some(RunState::NotStarted);
            }
            Happening::AddressKnown => self.address_known(),
            Happening::PlacementDown => self.placement_up = false,
            Happening::PlacementUp => self.placement_up = true,
            Happening::ImageBroken(broken) => self.image_broken = broken,
            Happening::Time(seconds) => self.now += SignedDuration::from_secs(seconds),
            Happening::Agent(effects) => {
                self.look(effects);
                self.known = Allocation::Unknown;
            }
            _ => {}
        }
    }

    fn fresh(&self) -> bool {
        self.wanted == Wanted::Nothing
            && !self.allocated
            && self.status.is_none()
            && self.observed == Observed::default()
    }

    fn address_known(&mut self) {
        if self.observed.domain == Some(RunState::Running)
            && let Some(status) = &mut self.status
            && status.started_at.is_some()
            && status.state == State::Starting
        {
            (status.has_address, status.state) = (true, State::Active);
            self.was_active = true;
        }
    }

    fn ask_placement(&mut self) {
        if self.placement_up {
            self.known = match (self.allocated, self.known) {
                (true, Allocation::Held { since }) => Allocation::Held { since },
                (true, _) => Allocation::Held { since: self.now },
                (false, _) => Allocation::Absent,
            };
        }
    }

    /// One look: decides, and performs at most `budget` effects. Answers whether anything is left to do.
    fn look(&mut self, budget: usize) -> bool {
        if self.placement_up && self.wanted == Wanted::Nothing {
            self.ask_placement(); // the audit
        }
        let facts = Facts {
            wanted: self.wanted,
            status: self.status,
            observed: self.observed,
            record: self.record,
            allocation: self.known,
        };
        match decide(&facts, self.now, &LIMITS) {
            Decision::Settled | Decision::Report(_) => false,
            Decision::LookAgain(_) | Decision::AwaitAddress(_) => true,
            Decision::AskPlacement => {
                self.ask_placement();
                true
            }
            Decision::Fail(reason) => {
                assert!(!reason.is_empty());
                if budget > 0 {
                    self.fail();
                }
                true
            }
            Decision::Run(effects) => {
                if self.wanted == Wanted::Nothing {
                    assert!(
                        self.observed.domain.is_none() || !effects.contains(&Effect::RemoveDomain),
                        "a domain that no request speaks of is never removed: {self:?}"
                    );
                }
                for effect in effects.iter().take(budget) {
                    if !self.perform(*effect) {
                        break;
                    }
                }
                true
            }
        }
    }

    fn announce(&mut self, state: State) {
        let old = self.status;
        self.status = Some(StatusFacts {
            state,
            has_address: old.is_some_and(|status| status.has_address),
            started_at: old.and_then(|status| status.started_at),
        });
    }

    fn fail(&mut self) {
        self.announce(State::Error);
    }

    /// Whether it worked; what did not is tried again at the next look.
    fn perform(&mut self, effect: Effect) -> bool {
        match effect {
            Effect::Announce(state) => self.announce(state),
            Effect::PrepareDisk => {
                assert!(self.observed.domain.is_none(), "a disk is never made anew under a domain: {self:?}");
                assert!(!self.was_active, "nothing is built twice: {self:?}");
                if self.image_broken {
                    self.fail();
                    return false;
                }
                (self.record, self.observed.volume) = (true, true);
            }
            Effect::Define => {
                assert!(self.observed.volume && self.observed.domain.is_none(), "{self:?}");
                self.observed.domain = Some(RunState::NotStarted);
            }
            Effect::Start => {
                assert_eq!(self.observed.domain, Some(RunState::NotStarted), "{self:?}");
                assert!(self.known != Allocation::Absent, "nothing runs without a claim: {self:?}");
                self.observed.domain = Some(RunState::Running);
            }
            Effect::NoteStart => {
                if let Some(status) = &mut self.status {
                    status.started_at = Some(self.now);
                } else {
                    self.announce(State::Starting);
                    self.perform(Effect::NoteStart);
                }
            }
            Effect::RemoveDomain => self.observed = Observed::default(),
            Effect::DropRecord => self.record = false,
            Effect::Release => {
                assert!(self.observed.domain.is_none(), "room is never given back under a domain: {self:?}");
                if !self.placement_up {
                    return false;
                }
                (self.allocated, self.known) = (false, Allocation::Absent);
            }
            Effect::DropKeys => (self.wanted, self.status) = (Wanted::Nothing, None),
            Effect::EndInError => self.wanted = Wanted::Nothing,
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn whatever_happens_a_fixpoint_without_loss_or_leak_is_reached(history in prop::collection::vec(happening(), 0..40)) {
        let mut world = World::new();
        for happening in history {
            world.happen(happening);
        }

        // The world is kind from now on; an address comes at last, time goes on.
        (world.placement_up, world.image_broken) = (true, false);
        let acknowledged = world.acknowledged && world.wanted == Wanted::Active;
        let allocated = world.allocated;
        let failed_before = world.status.is_some_and(|status| status.state == State::Error);
        let ended_before = matches!(world.observed.domain, Some(RunState::Ended));
        let was_active = world.was_active;
        let mut looks = 0;
        while world.look(usize::MAX) {
            world.address_known();
            world.now += SignedDuration::from_secs(10);
            looks += 1;
            prop_assert!(looks < 100, "no fixpoint: {world:?}");
        }

        let domain = world.observed.domain.is_some();
        prop_assert!(world.wanted != Wanted::Destroyed, "a destroy is never lost: {world:?}");
        if acknowledged && allocated && !failed_before && !ended_before && !was_active {
            prop_assert_eq!(world.status.map(|status| status.state), Some(State::Active), "a request is never lost");
        }
        if world.wanted == Wanted::Active {
            let state = world.status.map(|status| status.state);
            prop_assert!(domain && matches!(state, Some(State::Active | State::Stopped)), "{world:?}");
        }
        prop_assert_eq!(world.observed.volume, domain, "no disk is leaked");
        prop_assert_eq!(world.record, domain, "no record is leaked");
        prop_assert!(!world.allocated || domain, "no allocation is leaked");
        if !domain && world.status.is_some() {
            prop_assert_eq!(world.status.map(|status| status.state), Some(State::Error), "only errors are left to read");
        }
    }
}

#[test]
fn a_claim_whose_request_never_came_is_released_after_its_grace_and_not_before() {
    let since = Timestamp::UNIX_EPOCH;
    let facts = Facts {
        wanted: Wanted::Nothing,
        status: None,
        observed: Observed::default(),
        record: false,
        allocation: Allocation::Held { since },
    };
    let due = since + LIMITS.grace;
    assert_eq!(decide(&facts, since, &LIMITS), Decision::LookAgain(due));
    assert_eq!(decide(&facts, due, &LIMITS), Decision::Run(&[Effect::Release]));
}

#[test]
fn destroying_wins_whatever_the_instance_is_doing() {
    for state in
        [State::Scheduled, State::Preparing, State::Starting, State::Active, State::Stopped, State::Error]
    {
        for domain in [None, Some(RunState::NotStarted), Some(RunState::Running), Some(RunState::Ended)] {
            let facts = Facts {
                wanted: Wanted::Destroyed,
                status: Some(StatusFacts { state, has_address: false, started_at: None }),
                observed: Observed { domain, volume: true },
                record: true,
                allocation: Allocation::Unknown,
            };
            let Decision::Run(effects) = decide(&facts, Timestamp::UNIX_EPOCH, &LIMITS) else {
                panic!("{facts:?}")
            };
            assert_eq!(effects.last(), Some(&Effect::DropKeys));
        }
    }
}

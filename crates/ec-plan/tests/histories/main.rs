//! Random histories of two instances on one host, with the agent's real engine: its agent is killed between any two
//! effects, its looks and questions are answered late, etcd, placement and the hypervisor go away and come back.
//!
//! The outside remembers what the agent does not: whether a guest ever wrote its disk, and whether a user asked for
//! the end. Whatever happens, in whatever order: a disk that a guest wrote goes only by a user's destroy, nothing is
//! leaked, nothing is lost, and once the world is kind all comes to rest.

mod agent;
mod lasting;
mod outside;
mod worker;

use std::time::Duration;

use agent::Agent;
use ec_model::{Attachment, InstanceId, Observed, Pause, Power, Restart, RunState, Size, State};
use ec_plan::{RecordFacts, RescuedFacts, engine::StatusEntry};
use outside::{Happening, Images, Outside, Room, Thing, Wish};
use proptest::prelude::*;

/// What goes on.
#[derive(Debug, Clone)]
enum Turn {
    /// Something happens to one of the instances.
    Happens(bool, Happening),
    /// The agent, started if there is none, takes so many steps, of whatever the dice say.
    Steps(Vec<u8>),
    /// Everything under way comes to its end.
    Ends,
    /// Seconds pass; what comes due is told.
    Time(u64),
    /// It looks for addresses, for so many seconds.
    Search(u64),
    Kill,
}

fn happening() -> impl Strategy<Value = Happening> {
    let pause = prop_oneof![
        any::<bool>().prop_map(|room| Pause::Storage { room }),
        Just(Pause::ByHand),
        Just(Pause::Crashed),
        Just(Pause::Other)
    ];
    let power = prop_oneof![
        2 => Just(Power::Running),
        2 => Just(Power::Stopped),
        1 => Just(Power::Paused),
        1 => Just(Power::Suspended)
    ];
    let restart = prop_oneof![Just(Restart::No), Just(Restart::OnFailure), Just(Restart::Always)];
    let images = prop_oneof![Just(Images::Fine), Just(Images::Away), Just(Images::Broken)];
    prop_oneof![
        8 => Just(Happening::Claim),
        8 => Just(Happening::Request),
        1 => Just(Happening::ForeignClaim),
        2 => Just(Happening::Destroy),
        1 => Just(Happening::RequestKeyDeleted),
        1 => Just(Happening::StatusKeyDeleted),
        1 => Just(Happening::Rubbish),
        1 => Just(Happening::StatusRubbish),
        1 => Just(Happening::RecordRubbish),
        1 => Just(Happening::AllocationDeleted),
        1 => Just(Happening::AllocationMoved),
        4 => (power, any::<bool>(), any::<bool>()).prop_map(|(p, patient, anew)| Happening::Power(p, patient, anew)),
        3 => Just(Happening::Access),
        1 => restart.prop_map(Happening::Restart),
        2 => Just(Happening::Rebuild),
        3 => any::<bool>().prop_map(Happening::Rescue),
        1 => Just(Happening::StartedByHand),
        3 => (1..4_u8, 1..4_u8).prop_map(|(vcpus, disk)| Happening::Resize(vcpus, disk)),
        2 => Just(Happening::Settle),
        1 => (0..3_u8).prop_map(Happening::Metadata),
        1 => any::<bool>().prop_map(Happening::Deaf),
        2 => (0..3_u8).prop_map(Happening::Volumes),
        1 => any::<bool>().prop_map(Happening::Stubborn),
        1 => Just(Happening::GuestEnds),
        1 => Just(Happening::GuestCrashes),
        1 => pause.prop_map(Happening::GuestPaused),
        1 => Just(Happening::LibvirtdRestarts),
        1 => Just(Happening::Undefined),
        1 => Just(Happening::DiskDeleted),
        1 => Just(Happening::RecordDeleted),
        1 => Just(Happening::LateDefine),
        1 => Just(Happening::LateSuccessor),
        1 => Just(Happening::EtcdEmptied),
        1 => Just(Happening::EtcdSaved),
        1 => Just(Happening::EtcdRestored),
        1 => Just(Happening::WatchBreaks),
        1 => any::<bool>().prop_map(Happening::Etcd),
        2 => any::<bool>().prop_map(Happening::Placement),
        3 => any::<bool>().prop_map(Happening::Blind),
        1 => images.prop_map(Happening::Images),
        1 => any::<bool>().prop_map(Happening::StartBroken),
        4 => any::<bool>().prop_map(Happening::Addresses),
    ]
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        24 => (any::<bool>(), happening()).prop_map(|(which, what)| Turn::Happens(which, what)),
        12 => prop::collection::vec(any::<u8>(), 0..12).prop_map(Turn::Steps),
        6 => Just(Turn::Ends),
        3 => (0..4_u64).prop_map(Turn::Time),
        2 => (1..100_u64).prop_map(Turn::Time),
        3 => (1..4_u64).prop_map(Turn::Search),
        1 => Just(Turn::Search(400)),
        2 => Just(Turn::Kill),
    ]
}

struct History {
    outside: Outside,
    agent: Option<Agent>,
}

impl History {
    fn agent(&mut self) -> (&mut Agent, &mut Outside) {
        let outside = &mut self.outside;
        (self.agent.get_or_insert_with(|| Agent::new(outside)), outside)
    }

    fn kill(&mut self) {
        if let Some(agent) = self.agent.take() {
            agent.replay();
        }
    }

    fn take(&mut self, turn: &Turn, instances: &[InstanceId]) {
        match turn {
            Turn::Happens(which, what) => self.outside.happen(instances[usize::from(*which)], what),
            Turn::Steps(dice) => {
                let (agent, outside) = self.agent();
                agent.due(outside, outside.now);
                for die in dice {
                    agent.step(outside, usize::from(*die));
                }
            }
            Turn::Ends => self.end(),
            Turn::Time(seconds) => {
                let until = self.outside.now + Duration::from_secs(*seconds);
                if let Some(agent) = &mut self.agent {
                    while agent.due(&mut self.outside, until) {}
                }
                self.outside.now = until;
            }
            Turn::Search(seconds) => {
                for _ in 0..*seconds {
                    let (agent, outside) = self.agent();
                    agent.search(outside, true);
                    outside.now += Duration::from_secs(1);
                }
            }
            Turn::Kill => self.kill(),
        }
    }

    /// Everything under way comes to its end, and what that begins, too: without time nothing goes on for ever.
    fn end(&mut self) {
        let (agent, outside) = self.agent();
        for step in 0.. {
            assert!(step < 2_000, "no end: {outside:?}");
            if !agent.step(outside, 0) {
                break;
            }
        }
    }

    /// Nothing happens any more but what the agent does: how it comes to rest.
    fn rest(&mut self) {
        let mut quiet = 0;
        for due in 0.. {
            assert!(due < 400, "no rest: {:?}", self.outside);
            let before = self.agent().0.begun.len();
            let (agent, outside) = self.agent();
            agent.due(outside, Duration::MAX);
            self.end();
            let (agent, outside) = self.agent();
            agent.search(outside, due % 10 == 0);
            self.end();
            quiet = if self.agent().0.begun.len() == before { quiet + 1 } else { 0 };
            // Looks come every half minute: this is longer than any pause and any grace.
            if quiet > 10 {
                return;
            }
        }
    }
}

/// It boots from the disk that is wanted, and there is no other where that is its own.
fn judge_rescue(thing: &Thing) -> Result<(), TestCaseError> {
    let RecordFacts::Kept { rescued, .. } = thing.record else { return Ok(()) };
    let told = thing.keys.status.known().and_then(|status| status.rescued.as_ref()).map(RescuedFacts::of);
    if thing.state() == Some(State::Error) || thing.keys.room == Room::Elsewhere {
        return Ok(());
    }
    prop_assert_eq!(told, rescued, "what is so is told: {:?}", thing);
    let in_force = thing.record.is_rescued();
    match &thing.keys.rescue {
        Some(wish) => prop_assert_eq!(rescued.map(|was| was.wished_at), Some(wish.wished_at), "{:?}", thing),
        None => prop_assert!(!in_force, "{thing:?}"),
    }
    if thing.is_up() {
        prop_assert_eq!(thing.observed.rescued, in_force, "{:?}", thing);
    }
    prop_assert!(thing.rescue_disk || !in_force, "{thing:?}");
    Ok(())
}

/// It has the volumes that are wanted, and that is told.
fn judge_volumes(thing: &Thing) -> Result<(), TestCaseError> {
    let changes = !matches!(thing.observed.domain, None | Some(RunState::Saved));
    if !changes || thing.record.is_rescued() || thing.observed.rescued {
        return Ok(());
    }
    let wanted = outside::attachments(thing.keys.volumes);
    prop_assert_eq!(thing.observed.volumes, Attachment::fingerprint(&wanted), "{:?}", thing);
    let told = thing
        .keys
        .status
        .known()
        .map(|status| (status.volumes.clone(), status.volumes_changing, status.volumes_failed.is_some()));
    prop_assert_eq!(told, Some((wanted, false, false)), "{:?}", thing);
    Ok(())
}

/// What has to hold of an instance at rest, `before` being how it was before the world became kind.
fn judge(before: &Thing, thing: &Thing, restarted: bool) -> Result<(), TestCaseError> {
    prop_assert!(thing.wish() != Some(Wish::Destroyed), "a destroy is never lost: {thing:?}");
    if thing.wish() == Some(Wish::Rubbish) || thing.keys.status == StatusEntry::Unreadable {
        if restarted {
            prop_assert_eq!(thing.observed, before.observed, "what cannot be read is not touched");
            prop_assert_eq!(thing.record, before.record, "what cannot be read is not touched");
        }
        return Ok(());
    }
    let (state, domain) = (thing.state(), thing.observed.domain.is_some());
    if thing.wish().is_none() && !domain && !thing.observed.volume {
        prop_assert!(!thing.observed.successor, "nothing lies beside what is gone: {thing:?}");
    }
    let may_have_run = before.wrote || before.observed.volume || before.keys.status != StatusEntry::Absent;
    if before.wish() == Some(Wish::Active)
        && !thing.user_destroyed
        && !may_have_run
        && thing.keys.room == Room::Here
        && thing.keys.rescue.is_none()
        && state != Some(State::Error)
    {
        let wanted = match thing.keys.power.power {
            Power::Running => State::Active,
            Power::Paused => State::Paused,
            Power::Suspended => State::Suspended,
            Power::Stopped => State::Stopped,
        };
        prop_assert_eq!(state, Some(wanted), "a request is never lost");
    }
    if thing.wish() == Some(Wish::Active) {
        prop_assert!(
            matches!(
                state,
                Some(
                    State::Active
                        | State::Paused
                        | State::Stopped
                        | State::Suspended
                        | State::Rescued
                        | State::Error
                )
            ),
            "{thing:?}"
        );
        let carried_out = thing.keys.status.known().map(|status| status.power_generation);
        prop_assert!(
            carried_out >= Some(thing.keys.power.generation)
                || state == Some(State::Error)
                || thing.keys.room == Room::Elsewhere,
            "a wish for power is never lost: {thing:?}"
        );
        if let RecordFacts::Kept { metadata, .. } = thing.record {
            let wished = ec_plan::fingerprint(&outside::spec(thing.keys.metadata, thing.keys.size).metadata);
            prop_assert_eq!(
                metadata,
                wished,
                "a guest is told what its user wants it to be told: {:?}",
                thing
            );
        }
        let told = thing.keys.status.known().and_then(|status| status.rebuilt.as_ref());
        prop_assert!(
            told.map(|was| was.wished_at) >= thing.keys.rebuild.as_ref().map(|wish| wish.wished_at)
                || state == Some(State::Error)
                || thing.keys.room == Room::Elsewhere,
            "a wish for a new disk is never lost: {thing:?}"
        );
        judge_rescue(thing)?;
        judge_volumes(thing)?;
        let told = thing.keys.status.known().and_then(|status| status.resized.as_ref());
        // Memory that was saved is of the size that it was saved with. While it is rescued, the wish waits.
        let is_measured = domain
            && thing.observed.volume
            && thing.observed.domain != Some(RunState::Saved)
            && !thing.record.is_rescued()
            && thing.keys.room == Room::Here;
        prop_assert!(
            told.map(|was| was.wished_at) >= thing.keys.resize.map(|wish| wish.wished_at)
                || !is_measured
                || state == Some(State::Error),
            "a wish for another size is never lost: {thing:?}"
        );
        if let RecordFacts::Kept { size, .. } = thing.record
            && is_measured
        {
            let wanted =
                outside::greater(thing.keys.size, Size { disk_gb: size.is.disk_gb, ..Size::default() });
            let wanted = Size { vcpus: thing.keys.size.vcpus, ..wanted };
            let is_so = size.is == wanted || size.failed || size.wished_at.is_none();
            prop_assert!(is_so, "it has the size that is wanted: {thing:?}");
            prop_assert!(size.wished_at.is_none() || thing.size == size.is, "as it is noted: {thing:?}");
            prop_assert!(
                size.wished_at.is_none() || thing.keys.claimed.covers(thing.size),
                "nobody is larger than what is claimed: {thing:?}"
            );
        }
        let answered = thing.keys.status.known().and_then(|status| status.access.as_ref());
        let answered = answered.map(|access| access.generation);
        prop_assert!(
            thing.keys.access.is_none_or(|wish| answered == Some(wish.generation)),
            "a wish to look at it is never lost: {thing:?}"
        );
        let is_down = matches!(thing.observed.domain, Some(RunState::Ended(_) | RunState::NotStarted));
        prop_assert!(state != Some(State::Stopped) || is_down, "{thing:?}");
        prop_assert_eq!(
            state == Some(State::Suspended),
            thing.observed.domain == Some(RunState::Saved) && thing.observed.volume,
            "{:?}",
            thing
        );
        // Or nobody is left who knows how large it was.
        let unknown = !domain && thing.record == RecordFacts::Unreadable && thing.keys.room != Room::Here;
        prop_assert!(
            (state == Some(State::Error)) == (!thing.observed.volume || unknown),
            "an error of what is kept is a missing disk or size: {thing:?}"
        );
        if thing.runs() && thing.observed.volume {
            let state_of = if thing.observed.rescued { State::Rescued } else { State::Active };
            prop_assert_eq!(state, Some(state_of), "who runs and has an address is active");
        }
    }
    if thing.runs() && thing.wish().is_none() {
        prop_assert_eq!(state, Some(State::Unclaimed), "nobody runs unseen");
    }
    if thing.ended {
        prop_assert_eq!(thing.observed, Observed::default(), "what was destroyed does not come back");
        prop_assert_eq!(thing.wish(), None, "what was destroyed does not come back");
    }
    if domain {
        prop_assert!(thing.keys.room != Room::None, "nobody runs uncounted: {thing:?}");
        prop_assert!(!thing.observed.transient || thing.record == RecordFacts::Absent, "{thing:?}");
    }
    if thing.wish().is_none() && state != Some(State::Unclaimed) {
        prop_assert_eq!(thing.observed, Observed::default(), "nothing is leaked");
        prop_assert_eq!(thing.record, RecordFacts::Absent, "no record is leaked");
        prop_assert!(state.is_none() || state == Some(State::Error), "only errors are left to read");
        if thing.keys.room == Room::Here {
            prop_assert!(!thing.keys.index, "no allocation of ours is leaked: {thing:?}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn whatever_happens_all_comes_to_rest_without_loss_or_leak(
        turns in prop::collection::vec(turn(), 0..60),
        restarted: bool,
    ) {
        let instances = [1, 2].map(|number| InstanceId::new(uuid::Uuid::from_u128(number)));
        let mut history = History { outside: Outside::new(&instances), agent: None };
        for turn in &turns {
            history.take(turn, &instances);
        }
        if restarted {
            history.kill();
        }
        history.outside.heal();
        let before = history.outside.things.clone();
        history.rest();
        for (instance, thing) in &history.outside.things {
            judge(&before[instance], thing, restarted)?;
        }
        history.kill();
    }
}

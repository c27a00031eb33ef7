//! What fails whenever it is tried is tried on, after pauses that grow: whatever it is, and whatever happened before.

use std::{mem::discriminant, time::Duration};

use ec_model::{InstanceId, State};
use ec_plan::{RecordFacts, engine::StatusEntry, machine::Effect};
use proptest::prelude::*;

use crate::{
    History, Turn,
    outside::{Happening, Outside},
    turn,
};

const HOUR: Duration = Duration::from_secs(3600);

/// Of each instance some jobs for each try, which come to be half a minute apart.
const MOST_JOBS: usize = 1_200;

/// What may fail for good: all that is asked of the hypervisor, of images, or of placement.
fn for_good() -> Vec<Effect> {
    use Effect::*;
    vec![
        PrepareDisk,
        KeepRecord,
        KeepIntent,
        Persist,
        Define,
        Start,
        StartRescue,
        PrepareRebuild,
        ReplaceDisk,
        DropSuccessor,
        PrepareRescue,
        EnterRescue,
        LeaveRescue,
        Cover,
        Grow,
        Resize,
        SetVolumes,
        RemoveDomain,
        Claim,
        Ascertain,
    ]
}

/// What fails only for reasons that may pass: what is written, what is given up, what is done again whatever it said.
fn for_now() -> Vec<Effect> {
    use Effect::*;
    let why = || "broken".to_owned();
    vec![
        Announce(State::Active, None),
        MarkStarted,
        NoteStart,
        Resume,
        ShutDown,
        PowerOff,
        Pause,
        Save,
        DropMemory,
        NotePower(State::Active, None),
        Reopen(0),
        GiveUpRebuild(why()),
        NoteRebuild,
        GiveUpRescue(why()),
        NoteRescue,
        GiveUpResize(why()),
        NoteResize,
        NoteVolumes,
        Bury,
        DropRecord,
        Reread,
        Inquire,
        Release,
        DropKeys,
        EndInError,
    ]
}

fn lasting() -> impl Strategy<Value = (Effect, bool)> {
    let for_good = for_good().into_iter().map(|effect| (effect, false));
    let for_now = for_now().into_iter().map(|effect| (effect, true));
    prop::sample::select(for_good.chain(for_now).collect::<Vec<_>>())
}

impl History {
    /// An hour in which nothing happens but what the agent does; how many jobs that were.
    fn hour(&mut self) -> usize {
        let before = self.agent().0.begun.len();
        let until = self.outside.now + HOUR;
        self.end();
        loop {
            let (agent, outside) = self.agent();
            if !agent.due(outside, until) {
                return agent.begun.len() - before;
            }
            self.end();
            let (agent, outside) = self.agent();
            agent.search(outside, false);
            self.end();
            let jobs = &self.agent().0.begun[before..];
            assert!(jobs.len() < MOST_JOBS, "so much is done: {:#?}", &jobs[jobs.len() - 30..]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn whatever_fails_whenever_it_is_tried_is_tried_after_pauses(
        turns in prop::collection::vec(turn(), 0..60),
        (effect, may_pass) in lasting(),
        since in 0..60_usize,
    ) {
        let instances = [1, 2].map(|number| InstanceId::new(uuid::Uuid::from_u128(number)));
        let mut history = History { outside: Outside::new(&instances), agent: None };
        for (number, turn) in turns.iter().enumerate() {
            if number == since {
                history.outside.lasting = Some((discriminant(&effect), may_pass));
            }
            history.take(turn, &instances);
        }
        history.outside.heal();
        history.outside.lasting = Some((discriminant(&effect), may_pass));
        let jobs = history.hour();
        prop_assert!(jobs < MOST_JOBS, "{jobs} jobs: {:?}", history.outside);
    }
}

/// One that was made large and then small, of which an older etcd knows neither wish, and that cannot be large any more.
fn small_again() -> History {
    let instance = InstanceId::new(uuid::Uuid::from_u128(1));
    let mut history = History { outside: Outside::new(&[instance]), agent: None };
    history.outside.heal();
    let mut take = |turn| history.take(&turn, &[instance; 2]);
    take(Turn::Happens(false, Happening::Claim));
    take(Turn::Happens(false, Happening::Request));
    take(Turn::Search(2));
    take(Turn::Ends);
    take(Turn::Happens(false, Happening::Resize(3, 1)));
    take(Turn::Ends);
    let thing = history.outside.thing(instance);
    let RecordFacts::Kept { size, .. } = &mut thing.record else { unreachable!("it was built") };
    // As if it had been made so: nobody ever wished it another size.
    (size.wished_at, thing.keys.resize) = (None, None);
    if let StatusEntry::Known(status, _) = &mut thing.keys.status {
        status.resized = None;
    }
    history.kill();
    let mut take = |turn| history.take(&turn, &[instance; 2]);
    take(Turn::Happens(false, Happening::EtcdSaved));
    take(Turn::Happens(false, Happening::Resize(1, 1)));
    take(Turn::Ends);
    take(Turn::Time(100));
    take(Turn::Ends);
    assert_eq!(history.outside.thing(instance).size.vcpus, 1);
    history.take(&Turn::Happens(false, Happening::EtcdRestored), &[instance; 2]);
    history
}

#[test]
fn a_size_that_an_older_etcd_wants_and_that_cannot_be_had_is_given_up_and_told() {
    let mut history = small_again();
    history.outside.lasting = Some((discriminant(&Effect::Grow), false));
    history.hour();
    let (_, thing) = history.outside.things.first_key_value().unwrap();
    assert!(thing.runs() && thing.state() == Some(State::Active), "{thing:?}");
    let told = thing.keys.status.known().and_then(|status| status.resized.as_ref());
    assert!(told.is_some_and(|told| told.failed.is_some()), "{thing:?}");
    // Nor does it start any more at all.
    let mut history = small_again();
    history.outside.start_broken = true;
    history.hour();
    assert_eq!(history.outside.things.first_key_value().unwrap().1.size.vcpus, 1);
}

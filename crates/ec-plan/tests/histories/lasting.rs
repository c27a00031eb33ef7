//! What fails whenever it is tried is tried on, after pauses that grow: whatever it is, and whatever happened before.

use std::{mem::discriminant, time::Duration};

use ec_model::{InstanceId, State};
use ec_plan::machine::Effect;
use proptest::prelude::*;

use crate::{History, outside::Outside, turn};

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

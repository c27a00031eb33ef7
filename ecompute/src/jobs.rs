//! How often jobs of each kind ended how, and how long they took.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use ec_plan::{
    engine::{Outcome, Work},
    machine::Effect,
};
use ec_serve::metrics::{Family, Histogram};

/// Microseconds: from a write in etcd to the download of an image.
const BOUNDS: [u64; 10] =
    [10_000, 50_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 15_000_000, 60_000_000, 300_000_000];

/// How a job ends.
const ENDS: [&str; 4] = ["done", "abandoned", "retry", "failed"];

/// See the module. Its labels are words of this program: there are no more than kinds times ends.
#[derive(Debug)]
pub(crate) struct Jobs(Mutex<BTreeMap<(&'static str, &'static str), Histogram<10>>>);

impl Default for Jobs {
    /// With those that are watched over: what begins with the first failure does not grow by it.
    fn default() -> Self {
        let builds = ENDS.map(|end| (("build", end), Histogram::of_times(BOUNDS)));
        Self(Mutex::new(builds.into_iter().collect()))
    }
}

impl Jobs {
    /// A job of this kind ended.
    pub(crate) fn ended(&self, kind: &'static str, outcome: &Outcome, took: Duration) {
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.entry((kind, end(outcome))).or_insert_with(|| Histogram::of_times(BOUNDS)).took(took);
    }

    /// Writes them all.
    pub(crate) fn write(&self, family: &mut Family<'_>) {
        for ((kind, outcome), took) in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            family.histogram(&[("kind", *kind), ("outcome", *outcome)], took);
        }
    }
}

/// What work is for, in one word: that of its effects which takes it furthest.
pub(crate) fn kind(work: &Work) -> &'static str {
    let effects = match work {
        Work::Effects(effects) => effects,
        Work::Addresses(_) => return "address",
        Work::Fail(_) | Work::Delayed(_) => return "tell",
    };
    let any = |wanted: &[Effect]| effects.iter().any(|effect| wanted.contains(effect));
    let takes_away = [
        Effect::RemoveDomain,
        Effect::DropSuccessor,
        Effect::DropRecord,
        Effect::DropKeys,
        Effect::EndInError,
    ];
    if any(&takes_away) {
        "destroy"
    } else if any(&[
        Effect::PrepareDisk,
        Effect::PrepareRebuild,
        Effect::PrepareRescue,
        Effect::PrepareVolume,
        Effect::Define,
    ]) {
        "build"
    } else if any(&[Effect::Resize, Effect::Grow, Effect::Extend])
        || effects.iter().any(|effect| matches!(effect, Effect::GiveUpResize(_)))
    {
        "resize"
    } else if any(&[Effect::Start, Effect::StartRescue, Effect::Resume]) {
        "start"
    } else if any(&[Effect::ShutDown, Effect::PowerOff, Effect::Pause, Effect::Save, Effect::DropMemory]) {
        "stop"
    } else if any(&[Effect::Claim, Effect::Cover, Effect::Release]) {
        "claim"
    } else {
        "tell"
    }
}

fn end(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "done",
        Outcome::Abandoned => "abandoned",
        Outcome::Retry(_) | Outcome::RetryBounded(_) => "retry",
        Outcome::Failed(_) => "failed",
    }
}

#[cfg(test)]
mod tests {
    use ec_model::State;

    use super::*;

    #[test]
    fn a_job_is_called_by_what_takes_it_furthest() {
        let tell = Effect::Announce(State::Preparing, None);
        for (effects, wanted) in [
            (vec![tell.clone()], "tell"),
            (vec![tell.clone(), Effect::PrepareDisk, Effect::Define, Effect::Start], "build"),
            (vec![tell.clone(), Effect::MarkStarted, Effect::Start, Effect::NoteStart], "start"),
            (vec![tell.clone(), Effect::PrepareVolume], "build"),
            (vec![Effect::Cover, Effect::Grow, tell.clone()], "resize"),
            (vec![Effect::Cover, Effect::Extend, tell.clone()], "resize"),
            (vec![tell.clone(), Effect::Claim], "claim"),
            (vec![tell.clone(), Effect::ShutDown], "stop"),
            (vec![Effect::Resume, tell.clone()], "start"),
            (vec![tell, Effect::RemoveDomain, Effect::Release, Effect::DropKeys], "destroy"),
        ] {
            assert_eq!(kind(&Work::Effects(effects.clone())), wanted, "{effects:?}");
        }
        assert_eq!(kind(&Work::Addresses(vec![])), "address");
        assert_eq!(kind(&Work::Fail("no".to_owned())), "tell");
    }
}

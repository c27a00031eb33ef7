//! Single calls that go wrong, each in a way that was said before: those that a scenario names by the line which the
//! log has of them.

use std::{borrow::Cow, sync::PoisonError, time::Duration};

use crate::{
    life::Life,
    world::{Actor, World},
};

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Arrives,
    IsLost,
    LosesItsAnswer,
    /// It is done, and once more, and the second answer is told: by placement, to which something in between has asked it twice.
    IsRepeated,
    IsLate(Duration),
    /// Whoever is called says no. Placement answers with this HTTP status.
    IsRefused(u16),
    /// It was done, and told to have failed: by the hypervisor, or by etcd, whose space ended with this write.
    IsDenied,
    /// The caller is killed before it goes out.
    Kills,
    /// It is done, and the caller is killed before it hears of it.
    KillsAfterwards,
}

impl Fate {
    fn told(self) -> String {
        match self {
            Self::Arrives => "arrives".to_owned(),
            Self::IsLost => "is lost on its way".to_owned(),
            Self::LosesItsAnswer => "is done, and its answer is lost".to_owned(),
            Self::IsRepeated => "is done twice, and its first answer is lost".to_owned(),
            Self::IsLate(by) => format!("is done {} s late", by.as_secs()),
            Self::IsRefused(0) => "is refused".to_owned(),
            Self::IsRefused(status) => format!("is answered with {status}"),
            Self::IsDenied => "is done, and told to have failed".to_owned(),
            Self::Kills => "is not done, for its caller is killed".to_owned(),
            Self::KillsAfterwards => "is done, and its caller is killed".to_owned(),
        }
    }
}

/// Calls to come that go wrong.
#[derive(Debug, Clone)]
pub(crate) struct Snag {
    /// As the log has them: n1, u1, p1.
    who: Cow<'static, str>,
    /// How the call's line begins.
    call: &'static str,
    fate: Fate,
    /// How many of them.
    times: usize,
}

impl World {
    /// So many calls of somebody, whose lines begin so, meet this fate.
    pub(crate) fn snag(
        &self,
        who: impl Into<Cow<'static, str>>,
        call: &'static str,
        fate: Fate,
        times: usize,
    ) {
        let who = who.into();
        let mut snags = self.snags.lock().unwrap_or_else(PoisonError::into_inner);
        snags.push(Snag { who, call, fate, times });
    }

    /// No call that was named goes wrong any more.
    pub(crate) fn clear_snags(&self) {
        self.snags.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether a call that is about to be made was named, and what becomes of it. Nothing comes back to who is killed
    /// before it.
    pub(crate) async fn snagged(&self, who: Actor, life: &Life, calls: &[String]) -> Option<Fate> {
        let caller = who.to_string();
        let (call, fate) = {
            let mut snags = self.snags.lock().unwrap_or_else(PoisonError::into_inner);
            if !snags.iter().any(|snag| snag.who == caller) {
                return None;
            }
            let calls: Vec<String> = calls.iter().map(|call| self.named(call)).collect();
            let named = |snag: &Snag| calls.iter().find(|call| call.starts_with(snag.call)).cloned();
            let (place, call) = snags
                .iter()
                .enumerate()
                .filter(|(_, snag)| snag.who == caller)
                .find_map(|(place, snag)| Some((place, named(snag)?)))?;
            let snag = &mut snags[place];
            let fate = snag.fate;
            snag.times = snag.times.saturating_sub(1);
            if snag.times == 0 {
                snags.remove(place);
            }
            (call, fate)
        };
        self.log(who, format!("     (`{call}` {})", fate.told()));
        if fate == Fate::Kills {
            self.end(who, life).await;
        }
        Some(fate)
    }

    /// Kills who calls; nothing comes back to it.
    pub(crate) async fn end(&self, who: Actor, life: &Life) {
        if let Actor::Replica(number) = who {
            self.replicas.kill(number);
        }
        life.end();
        life.gate().await;
    }
}

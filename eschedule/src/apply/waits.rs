//! What `apply --wait` waits for: that all that was asked for is so.

use ec_cloud::{Acted, Awaited, Scheduled, Step, until_done, until_gone};
use ec_model::{InstanceId, NodeId};
use ec_runtime::exit::{Failure, tell};

use super::{Applied, Making};
use crate::{acting::tell_later, shown::Shown};

/// What was asked for of one, as far as it is waited for.
pub(super) enum Asked {
    /// It is made; this is what is done meanwhile.
    Made(Scheduled, &'static str),
    /// It goes.
    Gone(Scheduled),
    /// It is to be otherwise.
    Otherwise(Scheduled, Awaited),
}

impl Asked {
    /// What there is to wait for of what was asked of one that is called so.
    pub(super) fn of(name: &str, instance: InstanceId, acted: &Acted) -> Option<Self> {
        let awaited = acted.awaited?;
        tell_later(acted.node, acted.node_alive, &format!("{name} is changed"));
        Some(Self::Otherwise(Scheduled { instance, node: acted.node }, awaited))
    }

    /// The same of one that is to go.
    pub(super) fn gone(name: &str, instance: InstanceId, node: NodeId, alive: bool) -> Self {
        tell_later(node, alive, &format!("{name} is taken away"));
        Self::Gone(Scheduled { instance, node })
    }
}

impl Making<'_> {
    /// Waits until all is so, one after the other; what is not is told in the line of what was done.
    pub(super) async fn until_all(
        &self,
        asked: impl Iterator<Item = (&mut Applied, Asked)>,
    ) -> Result<(), Failure> {
        let mut failed: Option<Failure> = None;
        for (one, asked) in asked {
            let Err(failure) = self.until(&one.name, &asked).await else { continue };
            one.undo(&failure.message);
            let is_interrupted = self.stop.is_cancelled();
            let failure = Failure { message: format!("{}: {}", one.name, failure.message), ..failure };
            if let Some(before) = failed.replace(failure) {
                tell(&format!("eschedule: {}", before.message));
            }
            if is_interrupted {
                break;
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn until(&self, name: &str, asked: &Asked) -> Result<(), Failure> {
        let cloud = &self.session.cloud;
        let (shown, outcome) = match *asked {
            Asked::Made(made, doing) => return self.until_there(made, name, doing).await,
            Asked::Gone(Scheduled { instance, node }) => {
                let shown = Shown::of(name, "going");
                let gone = until_gone(cloud, node, instance, self.patience, |step| shown.step(step));
                let outcome = self.unless_stopped(gone).await;
                (shown, outcome)
            }
            Asked::Otherwise(Scheduled { instance, node }, awaited) => {
                let shown = Shown::of(name, "changing");
                let seen = |step: Step<'_>| shown.step_of_volume(step);
                let done = until_done(cloud, node, instance, awaited, self.patience, seen);
                let outcome = self.unless_stopped(done).await.map(drop);
                (shown, outcome)
            }
        };
        shown.finish();
        outcome
    }
}

//! What `apply --wait` waits for: that all that was asked for is so.

use ec_cloud::{Acted, Awaited, CloudError, Scheduled, Step, until_done, until_gone};
use ec_model::{InstanceId, NodeId};
use ec_runtime::exit::{Failure, tell};

use super::{Applied, Making};
use crate::shown::Shown;

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
        unless_alive(name, acted.node, acted.node_alive, "changed");
        Some(Self::Otherwise(Scheduled { instance, node: acted.node }, awaited))
    }

    /// The same of one that is to go.
    pub(super) fn gone(name: &str, instance: InstanceId, node: NodeId, alive: bool) -> Self {
        unless_alive(name, node, alive, "taken away");
        Self::Gone(Scheduled { instance, node })
    }
}

/// Says that a node that is not alive does it later.
fn unless_alive(name: &str, node: NodeId, alive: bool, done: &str) {
    if !alive {
        tell(&format!("eschedule: node {node} is not alive: {name} is {done} when it is back"));
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
        match asked {
            Asked::Made(made, doing) => self.until_there(*made, name, doing).await,
            Asked::Gone(of) => self.until_done(name, "going", *of, None).await,
            Asked::Otherwise(of, awaited) => self.until_done(name, "changing", *of, Some(*awaited)).await,
        }
    }

    /// Waits until it is as it was asked to be, or gone where nothing is awaited of it.
    async fn until_done(
        &self,
        name: &str,
        doing: &str,
        Scheduled { instance, node }: Scheduled,
        awaited: Option<Awaited>,
    ) -> Result<(), Failure> {
        let shown = Shown::of(name, doing);
        let outcome = self.unless_stopped(self.comes(instance, node, awaited, &shown)).await;
        shown.finish();
        outcome
    }

    async fn comes(
        &self,
        instance: InstanceId,
        node: NodeId,
        awaited: Option<Awaited>,
        shown: &Shown,
    ) -> Result<(), CloudError> {
        let (cloud, seen) = (&self.session.cloud, |step: Step<'_>| shown.step_of_volume(step));
        match awaited {
            Some(awaited) => until_done(cloud, node, instance, awaited, self.patience, seen).await.map(drop),
            None => until_gone(cloud, node, instance, self.patience, seen).await,
        }
    }
}

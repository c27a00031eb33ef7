//! What `apply --wait` waits for: that all that was asked for is so, by this command or one before.

use ec_cloud::{Acted, Awaited, Scheduled, Step, View, attach, find_placed, until_done, until_gone};
use ec_model::{InstanceId, NodeId, State};
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
    /// Whose that is.
    fn whose(&self) -> InstanceId {
        match self {
            Self::Made(of, _) | Self::Gone(of) | Self::Otherwise(of, _) => of.instance,
        }
    }

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
    /// Waits until all is so, one after the other; what is not is told in the line of what was done, where something was.
    pub(super) async fn until_all(&self, asked: Vec<(&mut Applied, Asked)>) -> Result<(), Failure> {
        let now: Vec<_> = asked.iter().map(|(_, asked)| asked.whose()).collect();
        let before = self.asked_before(&now).await?;
        let asked = asked.into_iter().map(|(one, asked)| (one.name.clone(), Some(one), asked));
        let mut failed: Option<Failure> = None;
        for (name, one, asked) in asked.chain(before.into_iter().map(|(name, asked)| (name, None, asked))) {
            let Err(failure) = self.until(&name, &asked).await else { continue };
            if let Some(one) = one {
                one.undo(&failure.message);
            }
            let is_interrupted = self.stop.is_cancelled();
            let failure = Failure { message: format!("{name}: {}", failure.message), ..failure };
            if let Some(before) = failed.replace(failure) {
                tell(&format!("eschedule: {}", before.message));
            }
            if is_interrupted {
                break;
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// What of the file's was asked for before, and is being made or given still; but for these.
    async fn asked_before(&self, but: &[InstanceId]) -> Result<Vec<(String, Asked)>, Failure> {
        let cloud = &self.session.cloud;
        let mut asked = Vec::new();
        for (number, made) in &self.instances {
            let state = View::of(&find_placed(cloud, made.instance).await?).state;
            let is_built =
                matches!(State::named(&state), Some(State::Scheduled | State::Preparing | State::Starting));
            if is_built && !but.contains(&made.instance) {
                asked.push((self.of.instances[*number].name.clone(), Asked::Made(*made, "building")));
            }
        }
        for (number, made) in &self.volumes {
            let (wish, view) = (&self.of.volumes[*number], ec_cloud::volume(cloud, made.instance).await?);
            if view.status == "creating" && !but.contains(&made.instance) {
                asked.push((wish.name.clone(), Asked::Made(*made, "creating")));
            }
            let holder = wish.holder.and_then(|holder| self.instances.get(&holder));
            if let Some(holder) = holder.filter(|holder| view.instance == Some(holder.instance)) {
                // It is to have it already: that is said, with what there is to wait for.
                let attached = attach(cloud, made.instance, holder.instance, None).await;
                let acted = attached.map_err(|error| self.session.failed(error))?.acted;
                let name = wish.name.clone();
                asked.extend(Asked::of(&name, holder.instance, &acted).map(|asked| (name, asked)));
            }
        }
        Ok(asked)
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

//! What `apply --wait` waits for: that all that was asked for is so, by this command or one before.

use ec_cloud::{Acted, Awaited, Scheduled, Step, View, attach, find_placed, until_done, until_gone};
use ec_model::{InstanceId, NodeId, Request, State, Status};
use ec_runtime::exit::Failure;
use tokio::time::Instant;

use super::{Applied, making::Making};
use crate::{acting::tell_later, several, shown::Shown};

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

    /// Whether all of it is waited for by that.
    fn is_whole(&self) -> bool {
        matches!(self, Self::Made(..) | Self::Gone(_))
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

/// Tells why one is not so, and notes it as [`several::note`] does.
pub(super) fn note(failed: &mut Option<Failure>, name: &str, failure: Failure) {
    several::note(failed, &Failure { message: format!("{name}: {}", failure.message), ..failure });
}

/// What is asked of a volume and has not come to its end: also one that somebody has is told as in use meanwhile.
fn being_changed(request: Option<&Request>, status: Option<&Status>) -> Vec<Awaited> {
    let Some(request) = request else { return Vec::new() };
    let (rebuilt, resized) = status.map_or((None, None), |status| {
        let rebuilt = status.rebuilt.as_ref().map(|came| came.wished_at);
        (rebuilt, status.resized.as_ref().map(|came| came.wished_at))
    });
    let rebuild = request.rebuild.as_ref().map(|wish| wish.wished_at).filter(|at| Some(*at) > rebuilt);
    let resize = request.resize.map(|wish| wish.wished_at).filter(|at| Some(*at) > resized);
    rebuild.map(Awaited::Rebuild).into_iter().chain(resize.map(Awaited::Resize)).collect()
}

impl Making<'_> {
    /// Waits until all is so, one after the other: first what this run asked for. All of it was asked for by now, so the time of all
    /// runs at once. What is not so is told in the line of what was done, where something was.
    pub(super) async fn until_all(&self, asked: Vec<(&mut Applied, Asked)>) -> Result<(), Failure> {
        let now: Vec<_> = asked.iter().map(|(_, asked)| asked.whose()).collect();
        // What was only changed may not be made yet.
        let mut told: Vec<_> =
            asked.iter().filter(|(_, asked)| asked.is_whole()).map(|(_, asked)| asked.whose()).collect();
        let mut failed: Option<Failure> = None;
        let end = Instant::now() + self.patience;
        for (one, asked) in asked {
            let Err(failure) = self.until(&one.name, &asked, end).await else { continue };
            told.push(asked.whose());
            one.undo(&failure.message);
            note(&mut failed, &one.name, failure);
            if self.stop.is_cancelled() {
                return failed.map_or(Ok(()), Err);
            }
        }
        for number in self.instances.keys() {
            let name = &self.of.instances[*number].name;
            self.until_before(&mut failed, name, self.instance_before(*number, &told).await, end).await;
        }
        for number in self.volumes.keys() {
            let name = &self.of.volumes[*number].name;
            self.until_before(&mut failed, name, self.volume_before(*number, &now).await, end).await;
        }
        failed.map_or(Ok(()), Err)
    }

    /// Waits for what was asked for before, and notes why it is not so.
    async fn until_before(
        &self,
        failed: &mut Option<Failure>,
        name: &str,
        before: Result<Vec<Asked>, Failure>,
        end: Instant,
    ) {
        let outcome = async {
            for asked in before? {
                self.until(name, &asked, end).await?;
            }
            Ok(())
        };
        // Who does not wait any more was told so.
        if !self.stop.is_cancelled()
            && let Err(failure) = outcome.await
        {
            note(failed, name, failure);
        }
    }

    /// What was asked for before of an instance of the file, and is being done still; but for these.
    async fn instance_before(&self, number: usize, but: &[InstanceId]) -> Result<Vec<Asked>, Failure> {
        let made = self.instances[&number];
        if but.contains(&made.instance) {
            return Ok(Vec::new());
        }
        let state = View::of(&find_placed(&self.session.cloud, made.instance).await?).state;
        let is_built =
            matches!(State::named(&state), Some(State::Scheduled | State::Preparing | State::Starting));
        Ok(is_built.then_some(Asked::Made(made, "building")).into_iter().collect())
    }

    /// Waits until nothing is asked of a volume that its agent has not carried out, or given up.
    pub(super) async fn until_at_rest(&self, volume: InstanceId, name: &str) -> Result<(), Failure> {
        let known = find_placed(&self.session.cloud, volume).await?;
        let (request, status) = (known.request.record(), known.status.record());
        let told = status.map_or(0, |status| status.observed_generation);
        let heard = request.map(|request| request.generation).filter(|asked| *asked > told);
        for awaited in being_changed(request, status).into_iter().chain(heard.map(Awaited::Heard)) {
            let of = Scheduled { instance: volume, node: known.node };
            let end = Instant::now() + self.patience;
            self.until(name, &Asked::Otherwise(of, awaited), end).await?;
        }
        Ok(())
    }

    /// The same of a volume, and of its being given to who is to have it.
    async fn volume_before(&self, number: usize, but: &[InstanceId]) -> Result<Vec<Asked>, Failure> {
        let (cloud, made, wish) = (&self.session.cloud, self.volumes[&number], &self.of.volumes[number]);
        let view = ec_cloud::volume(cloud, made.instance).await?;
        let mut asked = Vec::new();
        if view.status == "creating" && !but.contains(&made.instance) {
            asked.push(Asked::Made(made, "creating"));
        }
        if !but.contains(&made.instance) {
            let known = find_placed(cloud, made.instance).await?;
            let being = being_changed(known.request.record(), known.status.record());
            asked.extend(being.into_iter().map(|awaited| Asked::Otherwise(made, awaited)));
        }
        let holder = wish.holder.and_then(|holder| self.instances.get(&holder));
        if let Some(holder) = holder.filter(|holder| view.instance == Some(holder.instance)) {
            // It is to have it already: that is said, with what there is to wait for.
            let attached = attach(cloud, made.instance, holder.instance, None).await;
            let acted = attached.map_err(|error| self.session.failed(error))?.acted;
            asked.extend(Asked::of(&wish.name, holder.instance, &acted));
        }
        Ok(asked)
    }

    /// Waits for one until `end`; that it is so already is seen at any time.
    async fn until(&self, name: &str, asked: &Asked, end: Instant) -> Result<(), Failure> {
        let cloud = &self.session.cloud;
        let left = end.saturating_duration_since(Instant::now());
        let (shown, outcome) = match *asked {
            Asked::Made(made, doing) => return self.until_there(made, name, doing, left).await,
            Asked::Gone(Scheduled { instance, node }) => {
                let shown = Shown::of(name, "going");
                let gone = until_gone(cloud, node, instance, left, |step| shown.step(step));
                let outcome = self.unless_stopped(gone).await;
                (shown, outcome)
            }
            Asked::Otherwise(Scheduled { instance, node }, awaited) => {
                let shown = Shown::of(name, "changing");
                let seen = |step: Step<'_>| shown.step_of_volume(step);
                let done = until_done(cloud, node, instance, awaited, left, seen);
                let outcome = self.unless_stopped(done).await.map(drop);
                (shown, outcome)
            }
        };
        shown.finish();
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use ec_cloud::Volumes;
    use ec_model::{Rebuild, Resize, decode};
    use jiff::Timestamp;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::config::Session;

    #[tokio::test(start_paused = true)]
    async fn all_that_was_asked_for_is_given_the_same_time() {
        let (session, shared) = (Session::in_memory().await, BTreeMap::new());
        let none = Volumes::new("shop", (&[], &[]), (&[], &[]), &shared);
        let (stop, patience) = (CancellationToken::new(), Duration::from_secs(60));
        let making = Making::new(&session, &none, &[], &stop, patience);
        let mut done = ["a", "b", "c"].map(|name| Applied::new("set", name));
        let mut asked = Vec::new();
        for (one, number) in done.iter_mut().zip(1u128..) {
            let uuid = uuid::Uuid::from_u128(number);
            let record = format!(
                r#"{{"version":1,"instance":"{uuid}","name":"{}","generation":1,
                "spec":{{"query":"resources=VCPU:2","image":{{"url":""}}}},
                "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#,
                one.name
            );
            session.put(decode(record.as_bytes()).unwrap()).await;
            let of = Scheduled { instance: InstanceId::new(uuid), node: NodeId::new(uuid) };
            asked.push((one, Asked::Otherwise(of, Awaited::Heard(1))));
        }
        let begun = Instant::now();
        making.until_all(asked).await.unwrap_err();
        assert!(begun.elapsed() >= patience && begun.elapsed() < patience * 2, "{:?}", begun.elapsed());
        assert!(done.iter().all(|one| one.undone), "each was looked at");
    }

    #[test]
    fn the_first_that_failed_says_how_all_ends_unless_somebody_interrupted() {
        let mut failed = None;
        for (code, ends) in [(3, 3), (1, 3), (130, 130), (1, 130)] {
            note(&mut failed, "web", Failure { code, message: "it failed".to_owned() });
            let Some(Failure { code, message }) = &failed else { panic!("it is noted") };
            assert_eq!((*code, message.as_str()), (ends, ""), "each was told by then");
        }
    }

    #[test]
    fn a_volume_is_waited_for_until_what_was_asked_of_it_last_came_to_an_end() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let uuid = uuid::Uuid::nil();
        let request = format!(
            r#"{{"version": 1, "instance": "{uuid}", "project": "p", "user": "u", "epoch": 1, "generation": 1,
            "desired": "active", "created_at": "1970-01-01T00:00:00Z"}}"#
        );
        let status = format!(
            r#"{{"version": 1, "instance": "{uuid}", "node": "{uuid}", "state": "ACTIVE",
            "since": "1970-01-01T00:00:00Z", "updated_at": "1970-01-01T00:00:00Z"}}"#
        );
        let mut request: Request = decode(request.as_bytes()).unwrap();
        let mut status: Status = decode(status.as_bytes()).unwrap();
        assert_eq!(being_changed(Some(&request), Some(&status)), []);
        request.resize = Some(Resize { wished_at: at(2) });
        request.rebuild = Some(Rebuild { wished_at: at(1), before: None });
        let both = [Awaited::Rebuild(at(1)), Awaited::Resize(at(2))];
        assert_eq!(being_changed(Some(&request), Some(&status)), both);
        assert_eq!(being_changed(Some(&request), None), both);
        status.rebuilt = Some(ec_model::Rebuilt { wished_at: at(1), failed: Some("no".to_owned()) });
        assert_eq!(being_changed(Some(&request), Some(&status)), [Awaited::Resize(at(2))]);
        let resources = ec_model::Resources::new();
        status.resized = Some(ec_model::Resized { wished_at: at(2), failed: None, resources });
        assert_eq!(being_changed(Some(&request), Some(&status)), []);
        assert_eq!(being_changed(None, None), []);
    }
}

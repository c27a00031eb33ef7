//! Rules for the ends of guests: one that ended by itself is started again as its policy says, and one that runs is ended as often
//! as somebody wished what ends it.

use std::time::Duration;

use ec_hypervisor::{End, Observed, Operation, RunState};
use ec_model::{Desired, GRACE_SECONDS, InstanceId, NodeId, Power, Request, Restart, State, Status, decode};
use ec_store::KeyValue;

use super::{Referee, observed};
use crate::{door::content, node::Computer, world::World};

/// A guest that crashes is started again so often in a row (`docs/lifecycle.md`), and what was long ago does not count.
const RESTARTS_MOST: u32 = 5;
const RESTARTS_FORGOTTEN: Duration = Duration::from_secs(600);

fn request(world: &World, node: NodeId, instance: InstanceId) -> Option<Request> {
    decode(&content(world, &world.keys.request(node, instance))?.value).ok()
}

fn status(world: &World, node: NodeId, instance: InstanceId) -> Option<Status> {
    decode(&content(world, &world.keys.status(node, instance))?.value).ok()
}

/// Whether all that is wished is told to be carried out.
fn is_carried_out(request: &Request, status: &Status) -> bool {
    status.observed_generation >= request.generation
        && status.power_generation >= request.power.generation
        && status.rebuilt.as_ref().map(|was| was.wished_at)
            >= request.rebuild.as_ref().map(|wish| wish.wished_at)
        && status.rescued.as_ref().map(|was| was.wished_at)
            == request.rescue.as_ref().map(|wish| wish.wished_at)
        && status.resized.as_ref().map(|was| was.wished_at) >= request.resize.map(|wish| wish.wished_at)
}

impl Referee {
    /// A guest that runs ends for that reason, and no program has done it.
    pub(crate) fn ends(&mut self, world: &World, computer: &Computer, instance: InstanceId, why: End) {
        let runs = observed(computer, instance).is_some_and(|seen| seen.domain == Some(RunState::Running));
        let status = status(world, computer.node, instance);
        let (Some(request), Some(status), true) = (request(world, computer.node, instance), status, runs)
        else {
            return;
        };
        // What starts it once more is still to come.
        let is_done = request.desired == Desired::Active
            && request.power.power == Power::Running
            && status.state == State::Active
            && is_carried_out(&request, &status);
        self.known.entry(instance).or_default().ended = is_done.then_some(why);
    }

    /// Somebody does something with it by hand. What they started begins a new row of starts.
    pub(crate) fn handled(&mut self, instance: InstanceId) {
        let known = self.known.entry(instance).or_default();
        (known.ended, known.by_hand, known.restarts.0) = (None, true, 0);
    }

    /// A request is another from now on.
    pub(super) fn look_at_change(&mut self, instance: InstanceId, old: Option<&KeyValue>, is: &Request) {
        let transactions = self.transactions;
        let known = self.known.entry(instance).or_default();
        (known.ended, known.restarts.0) = (None, 0);
        if is.desired == Desired::Destroyed && known.end_count == 0 {
            known.end_count = transactions;
        }
        let Some(was) = old.and_then(|old| decode::<Request>(&old.value).ok()) else {
            known.request_count = transactions;
            return;
        };
        if was.rebuild != is.rebuild {
            known.rebuild_count = transactions;
        }
        let ends = is.power.power == Power::Stopped || is.power.anew;
        let wishes = [
            was.power != is.power && ends,
            was.rebuild != is.rebuild,
            was.rescue != is.rescue,
            was.resize != is.resize,
        ];
        known.ends_wished += u32::try_from(wishes.iter().filter(|wish| **wish).count()).unwrap_or(0);
    }

    /// Its node ends a guest that is up.
    pub(super) fn look_at_end(&mut self, instance: InstanceId) {
        let restored = self.restored;
        let known = self.known.entry(instance).or_default();
        known.ends += 1;
        let is_excused = restored || known.disturbed || known.status_lost || known.request_lost;
        if known.ends > known.ends_wished && !is_excused {
            let found =
                format!("{instance} was ended for the {}. time, and that was wished less often", known.ends);
            self.found(found);
        }
    }

    /// Its node ends a guest that was asked to end, and was to be given time for it.
    pub(super) fn look_at_grace(&mut self, world: &World, node: NodeId, instance: InstanceId) {
        let status = status(world, node, instance);
        let Some(request) = request(world, node, instance) else { return };
        // What was wished since its node told that is not heard of yet.
        let status = status.filter(|status| status.observed_generation >= request.generation);
        let state = status.map(|status| status.state);
        let grace = match state {
            Some(State::Stopping | State::Rebooting) => request.power.grace_seconds,
            Some(State::Resizing) => GRACE_SECONDS,
            _ => return,
        };
        let known = self.known(instance);
        let given = known.asked_to_end.map_or(0, |asked| (world.elapsed() - asked).as_secs());
        let excused = self.restored || known.told_late || known.status_lost || known.request_lost;
        if given < u64::from(grace) && !excused {
            self.found(format!(
                "{instance} was ended after {given} s, and was to have {grace} s to end by itself"
            ));
        }
    }

    /// Who was ended to get another size is told to have it once it runs with that: whether it can, its start shows.
    pub(super) fn look_at_size(
        &mut self,
        world: &World,
        (node, instance): (NodeId, InstanceId),
        request: &Request,
        status: &Status,
    ) {
        let told = status.resized.as_ref();
        let known = self.known.entry(instance).or_default();
        let before = std::mem::replace(&mut known.size_told, told.map(|told| told.wished_at));
        let was_resizing = std::mem::replace(&mut known.resizing, status.state == State::Resizing);
        let is_news = told.is_some_and(|told| told.failed.is_none() && Some(told.wished_at) > before);
        let computer = world.computers.iter().find(|computer| computer.node == node);
        let domain = computer.and_then(|computer| observed(computer, instance)).and_then(|seen| seen.domain);
        let is_down = matches!(domain, Some(RunState::NotStarted | RunState::Ended(_)));
        let is_to_run = request.power.power == Power::Running && request.desired == Desired::Active;
        let is_sure = !(self.restored || known.disturbed || known.by_hand);
        if is_news && was_resizing && is_down && is_to_run && is_sure {
            self.found(format!("{instance} was told to have its new size before it was started with it"));
        }
    }

    /// What a node ended for its user is not made there once more, by no request but of one that was brought there since.
    pub(super) fn look_at_destroyed(
        &mut self,
        world: &World,
        node: NodeId,
        what: Operation,
        instance: InstanceId,
    ) {
        let request = request(world, node, instance);
        let is_made = matches!(
            what,
            Operation::CreateOverlay | Operation::CreateVolume | Operation::Define | Operation::Start
        );
        let known = self.known.entry(instance).or_default();
        match (what, request) {
            (Operation::Destroy, Some(request)) if request.desired == Desired::Destroyed => {
                let epoch = known.destroyed.entry(node).or_default();
                *epoch = (*epoch).max(request.epoch);
            }
            (_, request) if is_made => {
                let is_since = |epoch: &u64| request.is_some_and(|request| request.epoch > *epoch);
                if known.destroyed.get(&node).is_some_and(|epoch| !is_since(epoch)) {
                    self.found(format!("{what:?} of {instance}, which {node} had ended for its user"));
                }
            }
            _ => {}
        }
    }

    /// Its node starts a guest.
    pub(super) fn look_at_restart(
        &mut self,
        world: &World,
        node: NodeId,
        instance: InstanceId,
        before: Observed,
    ) {
        let restored = self.restored;
        let policy = request(world, node, instance).map(|request| request.restart).unwrap_or_default();
        if policy == Restart::OnFailure && before.domain == Some(RunState::Ended(End::Crashed)) && !restored {
            self.look_at_row(world, instance);
        }
        let down = matches!(before.domain, Some(RunState::Ended(_) | RunState::NotStarted));
        self.look_at_wanted(world, node, instance, down);
        let known = self.known.entry(instance).or_default();
        let is_down = matches!(before.domain, Some(RunState::Ended(_)));
        let Some(why) = known.ended.take().filter(|_| is_down && !restored && !known.status_lost) else {
            return;
        };
        let is_due = match policy {
            Restart::No => false,
            Restart::OnFailure => why == End::Crashed,
            Restart::Always => why != End::ByHand,
        };
        if !is_due {
            self.found(format!(
                "{instance} ended ({why:?}) and was started again, and nobody wished that: {policy}"
            ));
        }
    }

    /// A guest that is down is not started where its user was told that it is paused, suspended or stopped, and wished nothing since.
    fn look_at_wanted(&mut self, world: &World, node: NodeId, instance: InstanceId, is_down: bool) {
        let status = status(world, node, instance);
        let (Some(request), Some(status)) = (request(world, node, instance), status) else { return };
        let is_done = request.power.power != Power::Running && is_carried_out(&request, &status);
        if is_down && is_done && !self.restored {
            let power = request.power.power;
            self.found(format!(
                "{instance} was started, and its user was told that it is {power:?} as wished"
            ));
        }
    }

    /// One that crashed is started again.
    fn look_at_row(&mut self, world: &World, instance: InstanceId) {
        let now = world.elapsed();
        let known = self.known.entry(instance).or_default();
        let (count, last) = known.restarts;
        // One that ran for long begins anew.
        let count = if now - last < RESTARTS_FORGOTTEN { count + 1 } else { 1 };
        known.restarts = (count, now);
        // The first may be what somebody wished, and of one whose agent was killed in its midst nothing may be noted.
        if count > RESTARTS_MOST + 4 && !known.status_lost {
            self.found(format!("{instance} was started again for the {count}. time in a row"));
        }
    }
}

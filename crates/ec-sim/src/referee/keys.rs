//! Rules for what lies in etcd of instances.

use ec_model::{
    Desired, Handover, Held, Instance, InstanceId, NodeId, PowerWish, Request, State, Status, Workload,
    decode, placement_tokens,
};
use ec_store::{KeyValue, Op, Txn};

use super::{
    Known, Referee,
    groups::{GROUPS, MEMBERS},
    is_before_active, observed,
};
use crate::{
    door::content,
    node::CLONES,
    world::{Actor, PLACEMENT, World},
};

/// A claim that is not requested stays for so many seconds.
const GRACE: u64 = 60;
/// So many words in a row an agent loses the answers to.
const UNHEARD: usize = 4;
/// What is left of a command counts as that after so many seconds.
const STALE: i64 = 600;

impl Referee {
    /// Each key has one writer, and an agent writes only while it is the node.
    pub(super) fn look_at_writer(
        &mut self,
        world: &World,
        actor: Actor,
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        let keys = &world.keys;
        let owner = |prefix: String| key.strip_prefix(prefix.as_str()).is_some();
        let allowed = match actor {
            Actor::Nemesis => true,
            Actor::Replica(_) => key.starts_with(PLACEMENT),
            Actor::Controller(_) => {
                // It goes, or is to go some time from now, as it is.
                let is_same = old.is_some_and(|old| new == Some(&*old.value));
                let history = owner(keys.all_actions()) && (new.is_none() || is_same);
                let beside = ["/ecompute/names/", "/ecompute/volume-names/", MEMBERS]
                    .iter()
                    .any(|under| key.starts_with(under));
                history || owner(keys.instances()) || beside
            }
            Actor::User(_) => {
                let request = key.starts_with(&keys.all_requests()) && new.is_some();
                let user_data = key.starts_with("/ecompute/userdata/") && new.is_some();
                let beside =
                    ["/ecompute/names/", "/ecompute/volume-names/", "/ecompute/actions/", MEMBERS, GROUPS]
                        .iter()
                        .any(|under| key.starts_with(under));
                let catalog = [
                    keys.images(),
                    keys.all_image_names(),
                    keys.all_public_images(),
                    keys.flavors(),
                    keys.all_keypairs(),
                ];
                let operator = [placement_tokens(PLACEMENT), keys.nodes()].into_iter().any(owner)
                    || owner(keys.all_alive()) && new.is_none()
                    || owner("/ecompute/agents/".to_owned()) && new.is_none();
                // As its agent would have, of which nothing is heard.
                let ends =
                    self.forgotten.iter().filter(|node| self.is_forgotten(world, **node)).any(|node| {
                        let beside =
                            [keys.all_user_data(*node), keys.all_held(*node), keys.all_held_user_data(*node)];
                        let goes =
                            [keys.requests(*node), keys.statuses(*node)].into_iter().chain(beside).any(owner);
                        goes && new.is_none() || owner(format!("/ecompute/outcomes/{node}/"))
                    });
                request
                    || ends
                    || user_data
                    || operator
                    || catalog.into_iter().any(owner)
                    || owner(keys.instances())
                    || beside
            }
            Actor::Agent(node, _) => {
                let presence =
                    [keys.agent(node), keys.alive(node), keys.node(node)].iter().any(|own| key == own);
                let ends = (owner(keys.requests(node)) || owner(keys.all_user_data(node))) && new.is_none();
                let held = owner(keys.all_held(node)) || owner(keys.all_held_user_data(node));
                presence
                    || ends
                    || held
                    || owner(keys.statuses(node))
                    || owner(format!("/ecompute/outcomes/{node}/"))
            }
        };
        if !allowed {
            self.found(format!("{actor} wrote {key}, which is another's"));
        }
        let Actor::Agent(node, number) = actor else { return };
        if key == keys.agent(node) {
            let Some(value) = new else { return };
            self.signs.insert(value.to_vec(), actor);
            if number < CLONES {
                return;
            }
            match old.and_then(|old| self.signs.get(&old.value)) {
                Some(Actor::Agent(_, before)) if *before < CLONES => {
                    self.found(format!("a clone of {actor} took the node over while its agent was alive"));
                }
                // A scenario looks on.
                _ if world.is_calm() => {}
                // Nobody was the node, so it may be; with a guest's disk on the other computer it must not go on here.
                _ => {
                    for clone in world.clones.iter().filter(|clone| clone.node == node) {
                        clone.keep_down(true);
                    }
                }
            }
            return;
        }
        // Put in one transaction with the key above.
        if key == keys.alive(node) {
            return;
        }
        let sign = content(world, &keys.agent(node));
        let holder = sign.and_then(|pair| self.signs.get(&pair.value).copied());
        // Two histories may count the same revision, of whichever of two computers.
        let by_a_clone = matches!(holder, Some(Actor::Agent(_, other)) if other >= CLONES);
        if holder != Some(actor) && !(by_a_clone && self.restored) {
            self.found(format!("the {number}. agent of {actor} wrote {key} while it was not the node"));
        }
    }

    /// A request goes when its instance has come to its end, and not before.
    pub(super) fn look_at_request(
        &mut self,
        world: &World,
        actor: Actor,
        txn: &Txn,
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        let Ok((node, instance)) = world.keys.parse_request(key) else { return };
        if let Some(request) = new.and_then(|value| decode::<Request>(value).ok()) {
            let known = self.known.entry(instance).or_default();
            if request.desired == Desired::Destroyed && !known.wished_away {
                self.found(format!("{actor} asked for the end of {instance}, which no user wished"));
            }
            let is_placed = old.is_none();
            if request.desired == Desired::Active
                && is_placed
                && content(world, &world.keys.alive(node)).is_none()
            {
                self.found(format!("{actor} requested {instance} on {node}, which is not alive"));
            }
            self.look_at_change(instance, old, &request);
            let before = old.and_then(|old| decode::<Request>(&old.value).ok());
            // To ask once more for what is asked for is no change.
            let stands = before.is_none_or(|before| {
                (before.generation, before.desired) == (request.generation, request.desired)
                    || before.generation < request.generation && before.desired == Desired::Active
            });
            if !stands && !self.restored {
                self.found(format!("{actor} changed the request of {instance}, and not into a newer one"));
            }
            return;
        }
        if new.is_some() {
            return;
        }
        let Some(request) = old.and_then(|old| decode::<Request>(&old.value).ok()) else { return };
        let known = self.known.entry(instance).or_default();
        let status = world.keys.status(node, instance);
        // A copy of it under another node's prefix is that node's to refuse.
        let is_its_node = known.acknowledged.is_none_or(|at| at == node);
        let (wrote, wished_away, revived) = (known.wrote && is_its_node, known.wished_away, known.revived);
        let here = world.computers.iter().find(|computer| computer.node == node);
        let left = here.and_then(|computer| observed(computer, instance));
        if request.desired == Desired::Destroyed || wished_away {
            let is_waited_for = !self.is_forgotten(world, node);
            if !revived && is_waited_for && left.is_some_and(|left| left.domain.is_some() || left.volume) {
                self.found(format!(
                    "the request of {instance} is gone, and its guest is still there: {left:?}"
                ));
            }
            if request.desired == Desired::Destroyed && content(world, &status).is_some() {
                self.found(format!("the wish to destroy {instance} is gone, and its status is still there"));
            }
            return;
        }
        if let Some(Handover::To(other)) = request.handover {
            // That may have handed it over to a third since.
            let others = world.computers.iter().filter(|computer| computer.node != node);
            let is_there = others.filter_map(|computer| observed(computer, instance)).any(|seen| seen.volume);
            let excused = self.restored || self.known(instance).disturbed;
            if left.is_some_and(|left| left.volume) || !(is_there || excused) {
                self.found(format!("{node} forgot {instance}, which was to go to {other}, and nobody has"));
            }
            return;
        }
        let tells = txn.then.iter().any(|op| {
            matches!(op, Op::Put { key, value, .. }
                if *key == status && decode::<Status>(value).is_ok_and(|status| status.state == State::Error))
        });
        // Of a volume of which an older etcd told nothing, and whose disk and record were taken, nobody knows that it was written.
        let is_forgotten = self.restored && known.is_volume && known.disturbed;
        let is_elsewhere = txn.then.iter().any(|op| {
            matches!(op, Op::Put { key, value, .. } if *key == status
            && decode::<Status>(value).is_ok_and(|status| {
                status.reason.is_some_and(|reason| reason.contains("which is not made once more"))
            }))
        });
        if wrote && !is_forgotten && !is_elsewhere {
            self.found(format!(
                "the request of {instance}, whose guest ran, was deleted and no user wished it"
            ));
        } else if !tells {
            self.found(format!("the request of {instance} was deleted and nobody was told why"));
        }
    }

    /// What is told follows from what was told before, and from the newest wish.
    pub(super) fn look_at_status(&mut self, world: &World, key: &str, new: Option<&[u8]>, late: bool) {
        let Ok((node, instance)) = world.keys.parse_status(key) else { return };
        let Some(status) = new.and_then(|value| decode::<Status>(value).ok()) else { return };
        let known = self.known.entry(instance).or_default();
        known.power_told = known.power_told.max(status.power_generation);
        let restored = self.restored;
        let request = content(world, &world.keys.request(node, instance))
            .and_then(|pair| decode::<Request>(&pair.value).ok());
        self.look_at_access(instance, &status, request.as_ref());
        if let Some(request) = request.as_ref().filter(|_| !late) {
            self.look_at_size(world, (node, instance), request, &status);
            self.look_at_rebuilt(instance, request, &status);
            self.look_at_volumes_told(world, (node, instance), request, &status);
        }
        // What it is to be a copy of may be gone by then, or larger.
        let origin = self.known(instance).copy_of.map(|of| self.known(of));
        let is_another =
            |origin: Known| origin.wished_away || origin.disturbed || origin.extended || origin.moved;
        let mut lost_disk = origin.as_ref().is_some_and(|origin| is_another(origin.clone()));
        let root = origin.as_ref().and_then(|origin| origin.root);
        lost_disk |= root.is_some_and(|root| is_another(self.known(root)));
        // Of a snapshot, the volumes may be with others by then.
        let is_apart = |volume: &InstanceId| {
            let had = origin.as_ref().is_some_and(|origin| origin.volumes.contains(volume));
            !had || is_another(self.known(*volume))
        };
        lost_disk |= self.known(instance).beside.iter().any(is_apart);
        // And so may be what it is to have beside its own disk.
        lost_disk |= self.known(instance).volumes.into_iter().any(|volume| self.known(volume).disturbed);
        let known = self.known.entry(instance).or_default();
        if late {
            // It takes the place of newer words, till its agent looks.
            known.was_active &= !is_before_active(status.state);
            known.ended = None;
            known.told_late = true;
            known.wrote |= known.is_volume && status.state == State::Active;
            // And may say the same once more.
            known.told_before.push_front((
                status.epoch,
                status.observed_generation,
                status.state,
                status.reason.clone().unwrap_or_default(),
            ));
            // Its agent does once more what it says is under way.
            known.ends_wished += u32::from(matches!(status.state, State::Rebooting | State::Stopping));
            return self.forget(instance);
        }
        let held = content(world, &world.keys.held(node, instance));
        let held = held
            .and_then(|pair| decode::<Held>(&pair.value).ok())
            .filter(|_| status.state == State::Unclaimed);
        if held
            .and_then(|held| held.intent.request().ok())
            .is_some_and(|kept| kept.record.kind != status.kind)
        {
            let kind = status.kind.word();
            self.found(format!("{instance} is told to be a {kind}, and its node holds another"));
            return;
        }
        let known = self.known.entry(instance).or_default();
        // A copy of its request under another node's prefix says nothing of it.
        if known.acknowledged.is_some_and(|at| at != node) {
            return;
        }
        if request.as_ref().is_some_and(|request| request.generation == status.observed_generation) {
            known.taken_up = known.taken_up.max(Some((status.epoch, status.observed_generation)));
            known.rebuild_taken_up = known.rebuild_count;
        }
        known.told_late = false;
        let harmed = restored || known.disturbed || lost_disk;
        let reason = status.reason.unwrap_or_default();
        let state = status.state;
        let wrong = match state {
            // Its old node is slow, or not there.
            State::Error if reason.contains("has not handed it over") => None,
            State::Error if !harmed && known.unclaimed.is_none_or(|age| age < GRACE) => {
                Some("nothing was done to it")
            }
            State::Stopped | State::Paused | State::Suspended
                if !harmed && !known.wished_away && !known.power_wished =>
            {
                Some("nothing was done to it")
            }
            State::Stopping
            | State::Rebooting
            | State::Suspending
            | State::Rebuilding
            | State::Rescuing
            | State::Rescued
            | State::Unrescuing
            | State::Resizing
                if !known.power_wished =>
            {
                Some("no user wished it")
            }
            // A disk alone may be anybody's.
            State::Unclaimed if !(restored || known.request_lost) && (known.wrote || !known.revived) => {
                Some("etcd was never put back")
            }
            // Somebody took all by which one could tell.
            State::Preparing if known.is_unknown() => None,
            State::Scheduled | State::Preparing if known.was_active && !restored => Some("it was ACTIVE"),
            State::Starting if known.was_active && !harmed && !known.power_wished => Some("it was ACTIVE"),
            _ => None,
        };
        known.was_active |= state == State::Active;
        // One that is halted hears nothing, and has its time all the same.
        known.asked_to_end = matches!(state, State::Stopping | State::Rebooting | State::Resizing)
            .then(|| known.asked_to_end.unwrap_or(world.elapsed()));
        // From then on somebody may have written it.
        known.wrote |= known.is_volume && state == State::Active;
        // Somebody had deleted its status: what is told since is all that is known.
        known.was_active &= !(known.status_lost && is_before_active(state));
        // Whoever looks is answered, or waits and is told what for, and what was told before stays.
        let told = (status.epoch, status.observed_generation, state, reason.clone());
        let was_told = known.told.as_ref() == Some(&told) || known.told_before.contains(&told);
        let waits = status.doing.as_ref().is_some_and(|doing| doing.ends_with(ec_plan::status::AGAIN));
        let only_answers = (status.access.is_some() || waits) && was_told;
        if let Some(before) = known.told.replace(told) {
            known.told_before.push_front(before);
            known.told_before.truncate(UNHEARD);
        }
        if let Some(why) = wrong {
            self.found(format!("{instance} is told to be {state}, and {why}: {reason}"));
        }
        if let Some(request) = request
            && (status.epoch, status.observed_generation) != (request.epoch, request.generation)
            && !(restored || only_answers)
        {
            self.found(format!("{instance} is told to be {state} by a wish that is not its newest"));
        }
    }

    /// Whoever is let in to look wished that, by the request as it is at that moment, and by a word of their own: one that
    /// is given twice lets somebody else in, too. What was told before may be told again.
    fn look_at_access(&mut self, instance: InstanceId, status: &Status, request: Option<&Request>) {
        let Some(access) = &status.access else { return };
        let Some(word) = &access.ticket else { return };
        let this = (instance, access.generation);
        match self.words.insert(word.0.clone(), this) {
            Some(before) if before == this => {}
            Some(_) => self.found(format!("the word that lets in to {instance} was given to others, too")),
            None => {
                let wish = request.and_then(|request| request.access);
                // With an etcd that was put back the same revision may be another request's.
                let is_wished =
                    wish.map(|wish| (wish.generation, wish.kind)) == Some((access.generation, access.kind));
                if !is_wished && !self.restored {
                    self.found(format!(
                        "somebody is let in to look at {instance}, and nobody wishes that now"
                    ));
                }
            }
        }
    }

    /// While an instance is asked for, it can be looked up; a name is one instance's.
    pub(super) fn look_at_index(
        &mut self,
        world: &World,
        actor: Actor,
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        let prefixes = [Workload::Machine, Workload::Volume].map(|kind| world.keys.all_names(kind));
        if let Some(prefix) = prefixes.iter().find(|prefix| key.starts_with(*prefix)) {
            let rest = key.strip_prefix(prefix).unwrap_or_default();
            let (name, bearer) = rest.rsplit_once('/').unwrap_or((rest, ""));
            let record = bearer.parse().ok().and_then(|bearer| content(world, &world.keys.instance(bearer)));
            let record = record.and_then(|pair| decode::<Instance>(&pair.value).ok());
            let named = record.is_some_and(|record| {
                record.name.is_some_and(|own| {
                    key == world.keys.name(record.kind, &record.project, &own, record.instance)
                })
            });
            if named != new.is_some() {
                self.found(format!("{actor} wrote {key}, and the instance is not called so, or is"));
            }
            let bearers = world.store.content(&format!("{prefix}{name}/")).pairs.len();
            if new.is_some() && bearers > 1 {
                self.found(format!("{bearers} instances bear the name {name}"));
            }
            return;
        }
        let Ok(instance) = world.keys.parse_instance(key) else { return };
        let known = self.known.entry(instance).or_default();
        let maker = *known.maker.get_or_insert(actor);
        let before = old.and_then(|old| decode::<Instance>(&old.value).ok());
        // One that is placed is any user's to wish something of.
        let is_wish = new.is_some() && before.as_ref().is_some_and(|before| before.assigned.is_some());
        let is_young =
            before.is_some_and(|before| world.now().duration_since(before.created_at).as_secs() < STALE);
        // One that its node holds was placed, whatever an older etcd says of it.
        let after = new.and_then(|new| decode::<Instance>(new).ok()).and_then(|record| record.node());
        let is_held = after.is_some_and(|node| content(world, &world.keys.held(node, instance)).is_some());
        if is_young && !is_wish && !is_held && actor != maker && !known.wished_away {
            self.found(format!("{actor} wrote {key}, at which a command may still be"));
        }
        if new.is_some() || old.is_none() {
            return;
        }
        let wanted = |node: NodeId| {
            let pair = content(world, &world.keys.request(node, instance))?;
            // Who hands it over does that whatever is wished of it since, and its new node sweeps it then.
            let is_wanted = |request: &Request| {
                request.desired == Desired::Active && !matches!(request.handover, Some(Handover::To(_)))
            };
            decode::<Request>(&pair.value).ok().filter(is_wanted)
        };
        if let Some(computer) = world.computers.iter().find(|computer| wanted(computer.node).is_some()) {
            let node = computer.node;
            self.found(format!("the index of {instance} was taken away, which is asked for on {node}"));
        }
    }
}

/// A write as the log has it; nothing of what is only bookkeeping.
fn asked(request: &Request) -> String {
    let PowerWish { power, generation, anew, .. } = &request.power;
    match (request.desired, generation) {
        (Desired::Active, 2..) => format!("Active, {power:?}{}", if *anew { " anew" } else { "" }),
        (desired, _) => format!("{desired:?}"),
    }
}

/// What a change of a key is, in words.
pub(crate) fn told(world: &World, key: &str, new: Option<&[u8]>) -> Option<String> {
    let keys = &world.keys;
    if let Some(rest) = key.strip_prefix(PLACEMENT) {
        let instance = rest.strip_prefix("/consumers/")?;
        return Some(match new {
            Some(_) => format!("claim {instance}"),
            None => format!("release {instance}"),
        });
    }
    let short = key.strip_prefix("/ecompute/")?;
    // Each says once more what is said beside it.
    if ["actions/", "outcomes/"].iter().any(|history| short.starts_with(history)) {
        return None;
    }
    let Some(value) = new else { return Some(format!("delete {short}")) };
    let more = if keys.parse_request(key).is_ok() {
        decode::<Request>(value).map_or("unreadable".into(), |request| asked(&request))
    } else if keys.parse_status(key).is_ok() {
        decode::<Status>(value).map_or("unreadable".into(), |status| {
            let reason = status.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            format!("{}{reason}", status.state)
        })
    } else {
        String::new()
    };
    Some(format!("put {short} {more}").trim_end().to_owned())
}

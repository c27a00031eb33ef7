//! Rules for what is brought back: whatever was under way when it was lost, its guest goes on as it is.

use ec_model::{
    Desired, Edition, Handover, Held, Instance, InstanceId, NodeId, Request, Size, State, Status, Workload,
    decode,
};
use ec_store::{KeyValue, Txn};

use super::Referee;
use crate::{
    door::content,
    world::{Actor, World},
};

impl Referee {
    /// A request for what its node holds asks for nothing that is not done: it starts, ends, rebuilds and resizes no guest.
    pub(super) fn look_at_healing(
        &mut self,
        world: &World,
        actor: Actor,
        (txn, before): (&Txn, &[Option<KeyValue>]),
        key: &str,
        old: Option<&KeyValue>,
        new: Option<&[u8]>,
    ) {
        let Ok((node, instance)) = world.keys.parse_request(key) else { return };
        let request = new.and_then(|new| decode::<Request>(new).ok());
        let (Some(request), None) = (request.filter(|request| request.desired == Desired::Active), old)
        else {
            return;
        };
        let Some(held) = read::<Held>(world, &world.keys.held(node, instance)) else { return };
        let record_key = world.keys.instance(instance);
        let recorded = txn.then.iter().zip(before).find(|(op, _)| *op.key() == *record_key);
        let recorded = recorded.and_then(|(_, old)| decode::<Instance>(&old.as_ref()?.value).ok());
        let wrong = undone(world, node, instance, &request, &held);
        let wrong = wrong.into_iter().chain(older(world, node, &request, &held, recorded.as_ref()));
        for what in wrong {
            self.found(format!("{actor} brought {instance} back, {what}"));
        }
    }
}

/// What the request goes back to, of which more is known: of the placement by which it was recorded until then, and of what its user
/// said of it last.
fn older(
    world: &World,
    node: NodeId,
    request: &Request,
    held: &Held,
    recorded: Option<&Instance>,
) -> Option<&'static str> {
    if request.handover.is_some() {
        // It goes to where it is asked for, and stays what it is there.
        return None;
    }
    let placed = recorded.and_then(|recorded| recorded.assigned);
    if placed.is_some_and(|placed| {
        placed.epoch > request.epoch || placed.node != node && placed.epoch == request.epoch
    }) {
        return Some("and it was recorded elsewhere, by a placement that is not older");
    }
    if recorded.is_some_and(|recorded| request.generation <= recorded.generation) {
        return Some("by no newer generation than it is recorded with");
    }
    let kept = held.intent.record().ok().flatten().map(|kept| kept.record);
    let is_here = placed.is_some_and(|placed| placed.node == node && placed.epoch == request.epoch);
    let since = kept.as_ref().map_or(0, |kept| kept.generation);
    let newest = recorded.filter(|recorded| is_here && recorded.generation >= since);
    let newest = newest.or(kept.as_ref()).or(recorded)?;
    let record = read::<Instance>(world, &world.keys.instance(held.instance))?;
    let said = |record: &Instance| {
        let Instance { labels, locked, restart, spec, .. } = record.clone();
        (labels, locked, restart, spec.metadata)
    };
    (said(&record) != said(newest))
        .then_some("and its labels, its metadata, its lock or its policy are not what they were last")
}

fn read<T: ec_model::Record>(world: &World, key: &str) -> Option<T> {
    content(world, key).and_then(|pair| decode(&pair.value).ok())
}

/// What the request leaves to be done, or gets wrong.
fn undone(
    world: &World,
    node: NodeId,
    instance: InstanceId,
    request: &Request,
    held: &Held,
) -> Vec<&'static str> {
    let status = read::<Status>(world, &world.keys.status(node, instance));
    let record = read::<Instance>(world, &world.keys.instance(instance));
    let kept = held.intent.request().ok().map(|kept| kept.record);
    let told = status.as_ref().filter(|status| status.state == State::Unclaimed);
    let edition = told.map(|status| Edition { epoch: status.epoch, generation: status.observed_generation });
    let rebuilt = held.rebuilt.as_ref().map(|rebuilt| rebuilt.wished_at);
    let in_force = held.rescued.as_ref().filter(|rescued| rescued.failed.is_none());
    let rescued = held.rescued.as_ref().map(|rescued| rescued.wished_at);
    let resized = held.resized.as_ref().map(|resized| resized.wished_at);
    let wished = request.rescue.as_ref().map(|wish| wish.wished_at);
    let spec = request.spec.as_ref();
    let wanted = spec.map(|spec| Size::of(&spec.resources)).unwrap_or_default();
    let is = Size::of(&held.resources);
    // What nobody ever wished another size for is as it was allocated; and one that could not have it is not asked again.
    let is_measured = held.resized.as_ref().is_some_and(|resized| resized.failed.is_none());
    let rules = [
        (
            edition.is_some() && edition == held.intent.edition(),
            "of which its node does not tell what it holds",
        ),
        (
            kept.as_ref().is_some_and(|kept| {
                let stays = matches!(request.handover, Some(Handover::From(_))) && kept.epoch < request.epoch;
                kept.desired == Desired::Active && (kept.epoch == request.epoch || stays)
            }),
            "which was not wanted any more, or was placed otherwise",
        ),
        (
            told.is_some_and(|status| {
                status.power_generation == request.power.generation && !request.power.anew
            }),
            "with a wish for its power that is to be carried out",
        ),
        (
            request.rebuild.as_ref().map(|wish| wish.wished_at) <= rebuilt,
            "with a wish for a new disk that is to be made",
        ),
        (
            wished.is_none() && in_force.is_none() || wished.is_some() && wished == rescued,
            "to boot from another disk than it does",
        ),
        (
            // Only a volume is still to have what its node heard of, which only grows.
            request.resize.map(|wish| wish.wished_at) == resized
                || kept.is_some_and(|kept| kept.kind == Workload::Volume && kept.resize == request.resize),
            "with a wish for another size that is to be given",
        ),
        (
            !is_measured || (wanted.vcpus, wanted.memory_mb) == (is.vcpus, is.memory_mb),
            "with another size than it has",
        ),
        (
            record.is_some_and(|record| {
                // One that goes to where it is asked for is another size there, which it comes to have.
                let goes_to = match request.handover {
                    Some(Handover::To(to)) => Some(to),
                    Some(Handover::From(_)) | None => None,
                };
                (goes_to.is_some() || Some(&record.spec) == spec)
                    && record.node() == goes_to.or(Some(node))
                    && record.generation == request.generation
            }),
            "and its record says otherwise",
        ),
    ];
    rules.into_iter().filter(|(is_so, _)| !is_so).map(|(_, what)| what).collect()
}

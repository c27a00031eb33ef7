//! Rules for copies: a disk stays as it is until what was asked to be a copy of it before is made.

use ec_hypervisor::Operation;
use ec_model::{Attachment, CopyOf, Desired, InstanceId, NodeId, Request, State, Status, decode};

use super::{Known, Referee, observed, volumes::record};
use crate::{door::content, world::World};

/// Whether this is a copy of a disk, or with others.
fn is_of(world: &World, of: &CopyOf, disk: InstanceId) -> bool {
    let boots_from_it = || {
        let machine = record(world, of.disk).filter(|_| of.held.is_none());
        machine.is_some_and(|machine| Attachment::root_of(&machine.volumes) == Some(disk))
    };
    of.disk == disk || of.beside.contains(&disk) || boots_from_it()
}

/// Whether a node was asked to make this, and has told neither that it is there nor that it cannot be.
fn is_to_be_made(world: &World, node: NodeId, copy: InstanceId) -> bool {
    let request = content(world, &world.keys.request(node, copy));
    let request = request.and_then(|pair| decode::<Request>(&pair.value).ok());
    let status = content(world, &world.keys.status(node, copy));
    let told = status.and_then(|pair| decode::<Status>(&pair.value).ok()).map(|status| status.state);
    let computer = world.computers.iter().find(|computer| computer.node == node);
    let is_there = computer.and_then(|computer| observed(computer, copy)).is_some_and(|seen| seen.volume);
    let is_wanted = request
        .is_some_and(|it| it.desired == Desired::Active && it.handover.is_none() && it.rebuild.is_none());
    is_wanted && !is_there && matches!(told, None | Some(State::Scheduled | State::Preparing))
}

impl Referee {
    /// A node takes away what lay on a disk, by a newer wish than that for a copy of it.
    pub(super) fn look_at_copies(
        &mut self,
        world: &World,
        node: NodeId,
        what: Operation,
        disk: InstanceId,
        late: bool,
    ) {
        let known = self.known(disk);
        let since = match what {
            Operation::Destroy => known.end_count,
            Operation::ReplaceOverlay => known.rebuild_count,
            _ => return,
        };
        if late || since == 0 || self.restored || known.disturbed || known.request_lost || known.moved {
            return;
        }
        let is_first = |(copy, of): &(InstanceId, &Known)| {
            let is_sure = of.acknowledged == Some(node)
                && of.request_count > 0
                && of.request_count < since
                && !(of.wished_away || of.disturbed || of.vanished || of.request_lost || of.status_lost);
            is_sure
                && record(world, *copy)
                    .and_then(|record| record.spec.image.copied())
                    .is_some_and(|of| is_of(world, &of, disk))
                && is_to_be_made(world, node, *copy)
        };
        let first = self.instances().find(is_first).map(|(copy, _)| copy);
        if let Some(copy) = first {
            self.found(format!(
                "{what:?} of {disk}, of which {copy} was asked to be a copy before, and is not made"
            ));
        }
    }
}

//! What is written bears the id of the command that wrote it.

use ec_model::{Actions, Instance, Request, RequestId, decode};
use ec_store::{KeyValue, Op, Txn};

use super::Referee;
use crate::world::{Actor, World};

impl Referee {
    /// What is wanted now, or is noted, has the id of the command that wants it; what was wanted before keeps its own.
    pub(crate) fn look_at_request_ids(
        &mut self,
        world: &World,
        (actor, own): (Actor, Option<RequestId>),
        txn: &Txn,
        before: &[Option<KeyValue>],
    ) {
        for (op, old) in txn.then.iter().zip(before) {
            let Op::Put { key, value, .. } = op else { continue };
            let old = old.as_ref().map(|old| old.value.as_slice());
            if old == Some(value.as_slice()) {
                continue;
            }
            let wanted = if world.keys.parse_request(key).is_ok() {
                of_request(old, value, own)
            } else if world.keys.parse_instance(key).is_ok() {
                of_record(old, value, own)
            } else if key.starts_with(&world.keys.all_actions()) {
                decode::<Actions>(value)
                    .is_ok_and(|actions| actions.actions.last().is_none_or(|it| it.request_id == own))
            } else {
                true
            };
            if !wanted {
                self.found(format!(
                    "{actor} wrote {key}, and not with the id of its own command, or with that of another's"
                ));
            }
        }
    }
}

fn of_request(old: Option<&[u8]>, new: &[u8], own: Option<RequestId>) -> bool {
    let (old, Ok(new)) = (old.and_then(|old| decode::<Request>(old).ok()), decode::<Request>(new)) else {
        return true;
    };
    let Some(old) = old else { return new.request_id == own };
    let is_news = new.generation > old.generation;
    let looks = new.access.filter(|wish| old.access.is_none_or(|was| was.generation != wish.generation));
    new.request_id == if is_news { own } else { old.request_id }
        && looks.is_none_or(|wish| wish.request_id == own)
}

fn of_record(old: Option<&[u8]>, new: &[u8], own: Option<RequestId>) -> bool {
    let (old, Ok(new)) = (old.and_then(|old| decode::<Instance>(old).ok()), decode::<Instance>(new)) else {
        return true;
    };
    match old {
        Some(old) if new.generation == old.generation => new.request_id == old.request_id,
        _ => new.request_id == own,
    }
}

//! Rules for what is written only to be in another's way: who takes back what a command began, or gives back what one claimed,
//! writes the record anew before, so that a command which only slept cannot finish any more.
//!
//! Most histories have nobody who sleeps at that moment, so it is held to that whether it did harm or not.

use ec_model::InstanceId;
use ec_store::{KeyValue, Op, Txn};

use super::Referee;
use crate::{
    door::content,
    world::{Actor, World},
};

impl Referee {
    /// Who takes away a record that another made was the last to write it; or asks for its end in that moment, which compares
    /// it as it was read.
    pub(super) fn look_at_fence(
        &mut self,
        world: &World,
        actor: Actor,
        txn: &Txn,
        key: &str,
        old: Option<&KeyValue>,
    ) {
        let Ok(instance) = world.keys.parse_instance(key) else { return };
        let (restored, count) = (self.restored, self.transactions);
        let known = self.known.entry(instance).or_default();
        if let Some(pair) = content(world, key) {
            (known.record_written, known.record_count) = (Some((actor, pair.mod_revision)), count);
            return;
        }
        let is_asked = |op: &Op| world.keys.parse_request(op.key()).is_ok_and(|of| of.1 == instance);
        let is_own = known.maker.is_none_or(|maker| maker == actor);
        // What was written beside all programs is nobody's.
        let revision = old.map(|old| old.mod_revision);
        let by_another = known
            .record_written
            .is_some_and(|(writer, written)| writer != actor && Some(written) == revision);
        if by_another && !(is_own || restored || txn.then.iter().any(is_asked)) {
            self.found(format!("{actor} took the record of {instance} away, and had not written it anew"));
        }
    }

    /// A claim is written; who makes it less has written the record since it was written last.
    pub(super) fn look_at_claim(&mut self, instance: InstanceId, is_less: bool) {
        let excused = self.restored || self.claims_lost;
        let count = self.transactions;
        let known = self.known.entry(instance).or_default();
        let is_fenced = known.record_count > known.claim_count;
        known.claim_count = count;
        if is_less && !is_fenced && !excused {
            self.found(format!(
                "of the claim of {instance} some was given back, and its record was not written since it was claimed"
            ));
        }
    }
}

//! Decides commands, one after the other on one draft: those of a batch, and which may be one.

use std::collections::BTreeSet;

use ec_placement_model::{Change, Draft, Key, ModelError, Outcome, Seconds, decide};
use ec_store::Txn;

use super::{Answer, Limits, Pending, WriteError, lanes::Choice};
use crate::store::{
    keys::{self, Keys, Stand},
    view::{Stance, View},
};

/// The decisions on a batch, before they are written.
#[derive(Debug)]
pub(super) struct Plan {
    /// What tells this transaction from all others.
    pub(super) id: String,
    /// In the order of the batch, for as many as fit.
    pub(super) answers: Vec<Answer>,
    /// What writes them; none where nothing changes.
    pub(super) txn: Option<Txn>,
    /// Whether any answer stands only on what is known here.
    pub(super) needs_fresh: bool,
}

/// What becomes of the view once the transaction is written.
#[derive(Debug)]
pub(super) struct Landing {
    /// What of the store it was decided on.
    pub(super) stand: Stand,
    /// What it changes.
    pub(super) changes: Vec<Change>,
    /// Every record that it stands on.
    pub(super) records: Vec<Key>,
}

/// Decides commands, as many as fit into one transaction of this id.
pub(super) fn plan<'p>(
    view: &View,
    keys: &Keys,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending>,
    id: String,
    now: Seconds,
) -> (Plan, Landing) {
    view.stand(|state, stance| plan_on(&mut Draft::new(state), stance, keys, limits, commands, id, now))
}

fn plan_on<'p>(
    draft: &mut Draft<'_>,
    Stance { stand, whole }: Stance,
    keys: &Keys,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending>,
    id: String,
    now: Seconds,
) -> (Plan, Landing) {
    let mut answers = Vec::new();
    let (mut needs_fresh, mut beat) = (false, false);
    for pending in commands {
        beat |= pending.command.is_none();
        let before = draft.savepoint();
        let answer = decide_next(draft, pending, now);
        if let Some(operations) = excess(draft, limits) {
            // It takes nothing with it: what it looked at is nobody's condition.
            draft.forget(before);
            if answers.is_empty() {
                answers.push(Err(WriteError::TooBig { operations, limit: limits.operations }));
                let landing = Landing { stand, changes: Vec::new(), records: Vec::new() };
                return (Plan { id, answers, txn: None, needs_fresh: false }, landing);
            }
            break;
        }
        needs_fresh |= answer.is_err();
        answers.push(answer.map_err(WriteError::Refused));
    }
    let idle = draft.changes().len() == 0 && !beat;
    // Where what we wrote ourselves is here and what others wrote before it is not, no moment of etcd was like
    // that. So an answer that writes nothing is put to etcd, too.
    let txn = (!idle || !whole).then(|| keys.txn(draft, stand, &id));
    let records = draft.seen().keys().cloned().collect();
    let landing = Landing { stand, changes: draft.written(), records };
    (Plan { id, answers, txn, needs_fresh: needs_fresh || idle }, landing)
}

/// Which commands fill a transaction that stands on no record that is under way.
pub(super) fn choose<'p>(
    view: &View,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending>,
    is_under_way: impl Fn(&Key) -> bool,
    now: Seconds,
) -> Choice {
    view.stand(|state, _| choose_on(&mut Draft::new(state), limits, commands, is_under_way, now))
}

fn choose_on<'p>(
    draft: &mut Draft<'_>,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending>,
    is_under_way: impl Fn(&Key) -> bool,
    now: Seconds,
) -> Choice {
    let mut taken = Vec::new();
    // What those stand on that wait for what is under way: nobody overtakes them there.
    let mut awaited: BTreeSet<Key> = BTreeSet::new();
    for pending in commands {
        let before = draft.savepoint();
        // Whatever the answer is: it will be decided again.
        decide_next(draft, pending, now).ok();
        let looks = || draft.seen_since(before);
        if looks().any(|key| is_under_way(key) || awaited.contains(key)) {
            awaited.extend(looks().cloned());
            draft.forget(before);
            taken.push(false);
        } else if excess(draft, limits).is_some() {
            return Choice { taken, full: true };
        } else {
            taken.push(true);
        }
    }
    Choice { taken, full: false }
}

fn decide_next(draft: &mut Draft<'_>, pending: &Pending, now: Seconds) -> Result<Outcome, ModelError> {
    pending.command.as_ref().map_or(Ok(Outcome::Done), |command| decide(draft, command, now))
}

/// How many operations the transaction of a draft has, where that is too many.
fn excess(draft: &Draft<'_>, limits: Limits) -> Option<usize> {
    let (conditions, changes) = Keys::operations(draft);
    let operations = (conditions + keys::CONDITIONS).max(changes + keys::CHANGES);
    (operations > limits.operations).then_some(operations)
}

#[cfg(test)]
mod tests;

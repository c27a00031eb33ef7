//! Decides commands, one after the other on one draft: those of a batch, and which may be one.

use std::collections::BTreeSet;

use ec_runtime::planted;
use ec_store::{Compare, Txn};
use jiff::Timestamp;

use super::{Answer, Limits, Pending, WriteError, lanes::Choice};
use crate::{
    model::{Commands, Model},
    prefix::{self, Stand},
    view::{Stance, View},
};

/// The decisions on a batch, before they are written.
#[derive(Debug)]
pub(super) struct Plan<O, R> {
    /// What tells this transaction from all others.
    pub(super) id: String,
    /// In the order of the batch, for as many as fit.
    pub(super) answers: Vec<Answer<O, R>>,
    /// What writes them; none where nothing changes.
    pub(super) txn: Option<Txn>,
    /// Whether any answer stands only on what is known here.
    pub(super) needs_fresh: bool,
}

/// What becomes of the view once the transaction is written.
pub(super) struct Landing<C, K> {
    /// What of the store it was decided on.
    pub(super) stand: Stand,
    /// What it changes.
    pub(super) changes: Vec<C>,
    /// Every record that it stands on.
    pub(super) records: Vec<K>,
}

type Planned<M> = (
    Plan<<M as Commands>::Outcome, <M as Commands>::Refusal>,
    Landing<<M as Model>::Change, <M as Model>::Key>,
);

/// Decides commands, as many as fit into one transaction of this id.
pub(super) fn plan<'p, M: Commands>(
    view: &View<M>,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending<M>>,
    id: String,
    now: Timestamp,
) -> Planned<M> {
    let model = view.model();
    view.stand(|state, stance| plan_on(model, &mut M::draft(state), stance, limits, commands, id, now))
}

fn plan_on<'p, M: Commands>(
    model: &M,
    draft: &mut M::Draft<'_>,
    Stance { stand, whole }: Stance,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending<M>>,
    id: String,
    now: Timestamp,
) -> Planned<M> {
    let mut answers = Vec::new();
    let (mut needs_fresh, mut beat) = (false, false);
    for pending in commands {
        beat |= pending.command.is_none();
        let before = M::savepoint(draft);
        let answer = decide_next::<M>(draft, pending, now);
        if let Some(operations) = excess::<M>(draft, limits) {
            // It takes nothing with it: what it looked at is nobody's condition.
            M::forget(draft, before);
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
    let idle = M::size(draft) == 0 && !beat;
    // Where what we wrote ourselves is here and what others wrote before it is not, no moment of etcd was like
    // that. So an answer that writes nothing is put to etcd, too.
    let txn = (!idle || !whole).then(|| txn(model, draft, &stand, &id));
    let records = M::seen(draft).map(|(key, _)| key.clone()).collect();
    let landing = Landing { stand, changes: M::written(draft), records };
    (Plan { id, answers, txn, needs_fresh: needs_fresh || idle }, landing)
}

/// The transaction that makes a draft true, if nothing that it stands on has changed.
fn txn<M: Commands>(model: &M, draft: &M::Draft<'_>, stand: &Stand, id: &str) -> Txn {
    let mut txn = model.prefix().beat(stand, id);
    if !planted("race-not-compared") {
        txn.when.extend(M::seen(draft).map(|(key, revision)| {
            let guard = model.guard(key);
            if revision == 0 { Compare::Absent(guard) } else { Compare::Unchanged(guard, revision) }
        }));
    }
    txn.then.extend(model.writes(draft));
    txn
}

/// Which commands fill a transaction that stands on no record that is under way.
pub(super) fn choose<'p, M: Commands>(
    view: &View<M>,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending<M>>,
    is_under_way: impl Fn(&M::Key) -> bool,
    now: Timestamp,
) -> Choice {
    view.stand(|state, _| choose_on(&mut M::draft(state), limits, commands, is_under_way, now))
}

fn choose_on<'p, M: Commands>(
    draft: &mut M::Draft<'_>,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending<M>>,
    is_under_way: impl Fn(&M::Key) -> bool,
    now: Timestamp,
) -> Choice {
    let mut taken = Vec::new();
    // What those stand on that wait for what is under way: nobody overtakes them there.
    let mut awaited: BTreeSet<M::Key> = BTreeSet::new();
    for pending in commands {
        let before = M::savepoint(draft);
        // Whatever the answer is: it will be decided again.
        decide_next::<M>(draft, pending, now).ok();
        let looks = || M::seen_since(draft, before);
        if looks().any(|key| is_under_way(key) || awaited.contains(key)) {
            awaited.extend(looks().cloned());
            M::forget(draft, before);
            taken.push(false);
        } else if excess::<M>(draft, limits).is_some() {
            return Choice { taken, full: true };
        } else {
            taken.push(true);
        }
    }
    Choice { taken, full: false }
}

fn decide_next<M: Commands>(
    draft: &mut M::Draft<'_>,
    pending: &Pending<M>,
    now: Timestamp,
) -> Result<M::Outcome, M::Refusal> {
    pending
        .command
        .as_ref()
        .map_or_else(|| Ok(M::Outcome::default()), |command| M::decide(draft, command, now))
}

/// How many operations the transaction of a draft has, where that is too many.
fn excess<M: Commands>(draft: &M::Draft<'_>, limits: Limits) -> Option<usize> {
    let (conditions, changes) = (M::seen(draft).len(), M::size(draft));
    let operations = (conditions + prefix::CONDITIONS).max(changes + prefix::CHANGES);
    (operations > limits.operations).then_some(operations)
}

#[cfg(test)]
mod tests;

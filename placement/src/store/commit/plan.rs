//! Decides the commands of a batch, one after the other on one draft.

use ec_placement_model::{Change, Draft, Outcome, Seconds, decide};
use ec_store::Txn;

use super::{Answer, Limits, Pending, WriteError};
use crate::store::{
    keys::{self, Keys, Stand},
    view::View,
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
    view.stand(|state, stand| plan_on(&mut Draft::new(state), stand, keys, limits, commands, id, now))
}

fn plan_on<'p>(
    draft: &mut Draft<'_>,
    stand: Stand,
    keys: &Keys,
    limits: Limits,
    commands: impl Iterator<Item = &'p Pending>,
    id: String,
    now: Seconds,
) -> (Plan, Landing) {
    let limit = limits.operations;
    let mut answers = Vec::new();
    let (mut needs_fresh, mut beat) = (false, false);
    for pending in commands {
        let Some(command) = &pending.command else {
            beat = true;
            answers.push(Ok(Outcome::Done));
            continue;
        };
        let before = draft.savepoint();
        let answer = decide(draft, command, now).map_err(WriteError::Refused);
        let (conditions, changes) = Keys::operations(draft);
        let operations = (conditions + keys::CONDITIONS).max(changes + keys::CHANGES);
        if operations > limit {
            // It takes nothing with it: what it looked at is nobody's condition.
            draft.forget(before);
            if answers.is_empty() {
                answers.push(Err(WriteError::TooBig { operations, limit }));
                let landing = Landing { stand, changes: Vec::new() };
                return (Plan { id, answers, txn: None, needs_fresh: false }, landing);
            }
            break;
        }
        needs_fresh |= answer.is_err();
        answers.push(answer);
    }
    let txn = (draft.changes().len() > 0 || beat).then(|| keys.txn(draft, stand, &id));
    let needs_fresh = needs_fresh || txn.is_none();
    (Plan { id, answers, txn, needs_fresh }, Landing { stand, changes: draft.written() })
}

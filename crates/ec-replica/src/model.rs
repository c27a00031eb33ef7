//! What a replica has to be told of what it holds: how records read, and how commands on them are decided.

use std::{error::Error, fmt::Debug, hash::Hash};

use ec_store::{KeyValue, Op, Revision, Store};
use jiff::Timestamp;

use crate::Prefix;

/// What a pair of the store is to a model.
#[derive(Debug, Clone)]
pub enum Reading<C> {
    /// A record, and what it says.
    Sound(Vec<C>),
    /// A record that cannot be read.
    Unreadable {
        /// Why.
        why: String,
        /// What it says all the same.
        known: Option<C>,
        /// That it cannot be read.
        change: C,
    },
    /// Nothing of the model's.
    Foreign,
}

impl<C> Reading<C> {
    /// All that it says; none where it is nothing of the model's.
    pub fn into_changes(self) -> Option<Vec<C>> {
        match self {
            Self::Sound(changes) => Some(changes),
            Self::Unreadable { known, change, .. } => Some(known.into_iter().chain([change]).collect()),
            Self::Foreign => None,
        }
    }
}

/// What lies under a prefix, and what it is in memory: all that a [`Reader`](crate::Reader) needs.
///
/// Whoever writes there writes the prefix's `clock` with it, as a [`Replica`](crate::Replica) does: how far the state is
/// is told by that key alone.
pub trait Model: Send + Sync + 'static {
    /// All records.
    type State: Clone + Default + Send + Sync + 'static;
    /// What a record is of. Several pairs of the store may be one record.
    type Key: Clone + Debug + Ord + Hash + Send + Sync + 'static;
    /// A pair of the store as it is from now on.
    type Change: Send + 'static;

    /// Why nothing is served while an import is under way, or where one broke off.
    const IMPORTING: &'static str;

    /// Where it lies.
    fn prefix(&self) -> &Prefix;

    /// Reads a pair that is none of those that every prefix has. What cannot be read is a change, too.
    fn read(&self, pair: &KeyValue) -> Reading<Self::Change>;

    /// What the deletion of a key means; none where it is nothing of the model's.
    fn deleted(&self, key: &str) -> Option<Self::Change>;

    /// What must be known of a record that was found unreadable and says nothing: from its past, where that matters.
    fn recall(
        &self,
        store: &dyn Store,
        unreadable: &KeyValue,
    ) -> impl Future<Output = Option<Self::Change>> + Send {
        let _ = (store, unreadable);
        async { None }
    }

    /// What a change is of.
    fn key(change: &Self::Change) -> Self::Key;

    /// The same change, written at this revision.
    fn written_at(change: Self::Change, revision: Revision) -> Self::Change;

    /// Applies changes, in their order.
    fn apply(state: &mut Self::State, changes: impl IntoIterator<Item = Self::Change>);
}

/// What may be asked of a model: all that a [`Replica`](crate::Replica) needs beside.
///
/// Commands are decided one after the other on one *draft*: a state with changes on top that are not written yet. It
/// remembers every record that was looked at or written, absent ones too. A decision may stand on nothing else: their
/// revisions are what its transaction compares. So whatever could make a decision another must change one of them.
pub trait Commands: Model {
    /// A change that somebody asks for.
    type Command: Send + Sync + 'static;
    /// What came of it. The default is what comes of a write that nobody asked anything of.
    type Outcome: Default + Debug + Send + Sync + 'static;
    /// Why it must not be.
    type Refusal: Error + Send + Sync + 'static;
    /// See the trait.
    type Draft<'s>;
    /// A place in a draft to go back to.
    type Savepoint: Copy;

    /// No changes yet.
    fn draft(state: &Self::State) -> Self::Draft<'_>;

    /// Carries a command out on a draft. Refused, it leaves no change there; what was looked at stays, but where it is
    /// refused for a record whose revision the state does not know: nothing that is written could stand on that.
    ///
    /// # Errors
    /// Why it is refused.
    fn decide(
        draft: &mut Self::Draft<'_>,
        command: &Self::Command,
        now: Timestamp,
    ) -> Result<Self::Outcome, Self::Refusal>;

    /// Here, to come back to.
    fn savepoint(draft: &Self::Draft<'_>) -> Self::Savepoint;

    /// Takes back every change since, and forgets what was looked at since: as if nothing had been.
    fn forget(draft: &mut Self::Draft<'_>, to: Self::Savepoint);

    /// Every record that decisions stand on, in its order, with its revision in the state; 0: it must not be there.
    fn seen<'d>(draft: &'d Self::Draft<'_>) -> impl ExactSizeIterator<Item = (&'d Self::Key, Revision)>;

    /// The records that were looked at since, and by no earlier decision.
    fn seen_since<'d>(
        draft: &'d Self::Draft<'_>,
        savepoint: Self::Savepoint,
    ) -> impl Iterator<Item = &'d Self::Key>;

    /// How many [`Self::writes`] there will be, at most; nothing only where nothing changes. Asked after each decision.
    fn size(draft: &Self::Draft<'_>) -> usize;

    /// The key of the store whose revision stands for a record: it is written whenever anything of the record is.
    fn guard(&self, key: &Self::Key) -> String;

    /// What makes the changes true in the store.
    fn writes(&self, draft: &Self::Draft<'_>) -> Vec<Op>;

    /// What the changes are once they are written, at whichever revision [`Model::written_at`] is told.
    fn written(draft: &Self::Draft<'_>) -> Vec<Self::Change>;
}

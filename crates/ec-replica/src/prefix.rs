//! The keys that every prefix has beside its model's records, and where a transaction believes the store to be.

use std::sync::Arc;

use ec_runtime::planted;
use ec_store::{Compare, KeyValue, Revision, Txn};

/// What every key of a model begins with.
///
/// ```text
///   <prefix>/clock     written by every transaction: its revision is that of the newest
///   <prefix>/epoch     which replica was the last to find itself on this very store
///   <prefix>/turn      which replica asks the others to let it write
///   <prefix>/import    there while an import is under way, or where one broke off
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// With a slash at its end.
    root: Arc<str>,
}

/// One of the keys that every prefix has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Common {
    /// See [`Prefix::clock`].
    Clock,
    /// See [`Prefix::epoch`].
    Epoch,
    /// See [`Prefix::turn`].
    Turn,
    /// See [`Prefix::import`].
    Import,
}

/// Where a transaction believes the store to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stand {
    /// The revision of the clock that is known.
    pub(crate) clock: Revision,
    /// The epoch that is known; none: there is none.
    pub(crate) epoch: Option<Epoch>,
    /// Which listing of the store all this began with.
    pub(crate) listing: u64,
}

/// What is known of the epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Epoch {
    /// The id of the transaction that wrote it, and not when that was: of two histories behind one backup, each may have
    /// written its own at the same revision.
    Of(Arc<[u8]>),
    /// No replica writes so much: it was put by hand, at this revision. To send it with each transaction may be more than
    /// etcd takes.
    Foreign(Revision),
}

/// No transaction's id is longer.
const ID_MAX: usize = 256;

impl Epoch {
    /// As it lies in etcd.
    pub(crate) fn of(pair: &KeyValue) -> Self {
        if pair.value.len() > ID_MAX {
            return Self::Foreign(pair.mod_revision);
        }
        Self::Of(pair.value.as_slice().into())
    }
}

/// Conditions that every transaction has beside those of its decisions: on the clock and on the epoch.
pub(crate) const CONDITIONS: usize = 2;
/// Changes that it may have beside theirs: the clock, the epoch, and the turn that it gives back.
pub(crate) const CHANGES: usize = 3;

impl Prefix {
    /// With or without a slash at its end.
    pub fn new(prefix: &str) -> Self {
        Self { root: format!("{}/", prefix.trim_end_matches('/')).into() }
    }

    /// What every key begins with, its slash included.
    pub fn as_str(&self) -> &str {
        &self.root
    }

    /// The key that every transaction writes.
    pub fn clock(&self) -> String {
        format!("{}clock", self.root)
    }

    /// The key that a replica writes before its first transaction on a store that it has come (back) to.
    pub fn epoch(&self) -> String {
        format!("{}epoch", self.root)
    }

    /// The key of whoever asks the others to wait.
    pub fn turn(&self) -> String {
        format!("{}turn", self.root)
    }

    /// The key that marks an import that is not complete.
    pub fn import(&self) -> String {
        format!("{}import", self.root)
    }

    /// What a key is beneath this prefix; none where it is outside.
    pub fn strip<'k>(&self, key: &'k str) -> Option<&'k str> {
        key.strip_prefix(&*self.root)
    }

    /// Which of the keys that every prefix has this is; none where it is the model's, or nobody's.
    pub fn common(&self, key: &str) -> Option<Common> {
        match self.strip(key)? {
            "clock" => Some(Common::Clock),
            "epoch" => Some(Common::Epoch),
            "turn" => Some(Common::Turn),
            "import" => Some(Common::Import),
            _ => None,
        }
    }

    /// The transaction that is nothing but a write: on the store that is known, where it is still that.
    ///
    /// A store that was put back behind what is known does not have the clock that far. Where it has been
    /// written since, whoever did so has written the epoch before.
    pub(crate) fn beat(&self, stand: &Stand, id: &str) -> Txn {
        let mut txn = Txn::new().put(self.clock(), id);
        let epoch = self.epoch();
        if !planted("epoch-not-compared") {
            txn = txn.when(match &stand.epoch {
                None => Compare::Absent(epoch),
                Some(Epoch::Of(id)) => Compare::Holds(epoch, id.to_vec()),
                Some(Epoch::Foreign(revision)) => Compare::Unchanged(epoch, *revision),
            });
        }
        if stand.clock == 0 { txn } else { txn.when(Compare::NotBefore(self.clock(), stand.clock)) }
    }
}

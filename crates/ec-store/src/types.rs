//! Keys, values, transactions and events, free of etcd's own types.

use ec_runtime::left_out_here;
use sha2::{Digest as _, Sha256};

/// A revision of the whole store: every change has one, and they only grow.
pub type Revision = i64;

/// A lease's id, as the store gave it, or as a key has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub i64);

impl LeaseId {
    /// The id of the lease that is this key's own, the same in every program.
    pub fn of_key(key: &str) -> Self {
        let digest = Sha256::digest(key.as_bytes());
        // 63 bits: etcd wants none below zero, and takes 0 for "any".
        let id = digest.iter().take(8).fold(0_i64, |id, byte| (id << 8 | i64::from(*byte)) & i64::MAX);
        Self(id.max(1))
    }
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The revision that created the key.
    pub create_revision: Revision,
    /// The revision that last changed it.
    pub mod_revision: Revision,
    /// How often it was written since it was created: 1 for the first time. Whoever sees every write sees
    /// it grow by one.
    pub version: i64,
    /// The lease it hangs on.
    pub lease: Option<LeaseId>,
}

/// What lay under a prefix at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// In key order.
    pub pairs: Vec<KeyValue>,
    /// The revision at which they were read; a watch goes on from the one after it.
    pub revision: Revision,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    /// There is no such key.
    Absent(String),
    /// There is such a key.
    Present(String),
    /// The key was last changed at exactly this revision.
    Unchanged(String, Revision),
    /// There is such a key, and this is what lies under it.
    Holds(String, Vec<u8>),
    /// There is no key that begins with this prefix.
    NoneUnder(String),
    /// No key that begins with this prefix was written after this revision. That one was deleted does not matter.
    NoneSince(String, Revision),
    /// The key was last changed at this revision or later: the store is not one that went back behind it.
    NotBefore(String, Revision),
}

impl Compare {
    /// The key that is looked at, or the prefix.
    pub fn key(&self) -> &str {
        match self {
            Self::Absent(key)
            | Self::Present(key)
            | Self::Unchanged(key, _)
            | Self::Holds(key, _)
            | Self::NoneUnder(key)
            | Self::NoneSince(key, _)
            | Self::NotBefore(key, _) => key,
        }
    }
}

impl Op {
    /// The key that is changed.
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete(key) => key,
        }
    }
}

/// A change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Write a key.
    Put {
        /// The key.
        key: String,
        /// The new value.
        value: Vec<u8>,
        /// The lease to hang it on.
        lease: Option<LeaseId>,
    },
    /// Delete a key; none there is not an error.
    Delete(String),
}

/// Changes that happen together if every condition holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    /// All must hold.
    pub when: Vec<Compare>,
    /// Done in this order; a key may stand in it once.
    pub then: Vec<Op>,
}

impl Txn {
    /// An empty transaction.
    pub fn new() -> Self {
        Self::default()
    }

    /// Conditions or changes, whichever are more: what etcd's `--max-txn-ops` bounds.
    pub fn operations(&self) -> usize {
        self.when.len().max(self.then.len())
    }

    /// Bytes of its keys and values, those of the conditions included; on the wire come some more for each.
    pub fn bytes(&self) -> usize {
        let of_condition = |compare: &Compare| match compare {
            Compare::Holds(key, value) => key.len() + value.len(),
            other => other.key().len(),
        };
        let when: usize = self.when.iter().map(of_condition).sum();
        let then: usize = self
            .then
            .iter()
            .map(|op| match op {
                Op::Put { key, value, .. } => key.len() + value.len(),
                Op::Delete(key) => key.len(),
            })
            .sum();
        when + then
    }

    /// Adds a condition.
    #[must_use]
    #[track_caller]
    pub fn when(mut self, compare: Compare) -> Self {
        if !left_out_here() {
            self.when.push(compare);
        }
        self
    }

    /// Adds conditions.
    #[must_use]
    #[track_caller]
    pub fn when_all(mut self, compares: impl IntoIterator<Item = Compare>) -> Self {
        if !left_out_here() {
            self.when.extend(compares);
        }
        self
    }

    /// Adds a write.
    #[must_use]
    pub fn put(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.then.push(Op::Put { key: key.into(), value: value.into(), lease: None });
        self
    }

    /// Adds a write of a key that goes with its lease.
    #[must_use]
    pub fn put_leased(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>, lease: LeaseId) -> Self {
        self.then.push(Op::Put { key: key.into(), value: value.into(), lease: Some(lease) });
        self
    }

    /// Adds a deletion.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.then.push(Op::Delete(key.into()));
        self
    }
}

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxnOutcome {
    /// Whether the conditions held, so that the changes were made.
    pub succeeded: bool,
    /// The store's revision afterwards.
    pub revision: Revision,
}

/// One change under a watched prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A key was written.
    Put(KeyValue),
    /// A key was deleted, at this revision.
    Delete {
        /// The key.
        key: String,
        /// The revision of the deletion.
        revision: Revision,
    },
}

impl Event {
    /// The key that changed.
    pub fn key(&self) -> &str {
        match self {
            Self::Put(pair) => &pair.key,
            Self::Delete { key, .. } => key,
        }
    }

    /// The revision that changed it.
    pub fn revision(&self) -> Revision {
        match self {
            Self::Put(pair) => pair.mod_revision,
            Self::Delete { revision, .. } => *revision,
        }
    }
}

/// Changes that arrived together. May be empty: a sign of life, with progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchBatch {
    /// In order of revision.
    pub events: Vec<Event>,
    /// Where a new watch must begin so that nothing is missed and nothing comes twice.
    pub resume_from: Revision,
}

/// What helps where etcd has no space left.
pub(crate) const GIVES_SPACE: &str =
    "`etcdctl compact` and `defrag`, or a larger --quota-backend-bytes, and then `etcdctl alarm disarm`";

/// A server of the store, as it tells of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Its release: `3.5.16`.
    pub version: String,
    /// The cluster that it belongs to.
    pub cluster: u64,
    /// Which member of it.
    pub member: u64,
    /// The term of its leader. Within one cluster it only grows.
    pub term: u64,
    /// The revision of the store.
    pub revision: Revision,
    /// What is wrong with its cluster, in its own words: alarms, or that it has no leader.
    pub errors: Vec<String>,
}

impl Server {
    /// Why it takes no change, and what helps; `None`: it does.
    pub fn trouble(&self) -> Option<(&'static str, &'static str)> {
        let raised = |alarm: &str| self.errors.iter().any(|error| error.contains(alarm));
        if raised("alarm:NOSPACE") {
            return Some(("it has no space left (alarm NOSPACE), and takes no change", GIVES_SPACE));
        }
        raised("alarm:CORRUPT").then_some((
            "its members differ (alarm CORRUPT), and it takes no change",
            "etcd's own documentation says how the data of a member is replaced",
        ))
    }

    /// What is to be said of a release that works but is not what we recommend; `None`: nothing.
    pub fn advice(&self) -> Option<String> {
        let mut numbers = self.version.split('.').map_while(|part| part.parse::<u32>().ok());
        let (major, minor) = (numbers.next()?, numbers.next()?);
        ((major, minor) < (3, 5)).then(|| {
            format!(
                "this etcd is {}: 3.5 or newer is recommended, since 3.4 may lose watch events around compactions and \
                 gets slower by large transactions until it is started anew",
                self.version
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(version: &str, errors: &[&str]) -> Server {
        let errors = errors.iter().map(|error| (*error).to_owned()).collect();
        Server { version: version.into(), cluster: 1, member: 1, term: 1, revision: 1, errors }
    }

    #[test]
    fn a_server_that_takes_no_change_says_what_helps() {
        assert_eq!(server("3.5.16", &[]).trouble(), None);
        let full = server("3.5.16", &["memberID:1 alarm:NOSPACE "]).trouble().unwrap();
        assert!(full.1.contains("alarm disarm"), "{full:?}");
        assert!(server("3.4.23", &["memberID:1 alarm:CORRUPT "]).trouble().unwrap().0.contains("differ"));
    }

    #[test]
    fn what_a_condition_compares_with_is_sent_along() {
        let txn =
            Txn::new().when(Compare::Holds("/a".into(), vec![0; 10])).when(Compare::Absent("/b".into()));
        assert_eq!(txn.put("/c", "12").delete("/d").bytes(), 12 + 2 + 4 + 2);
    }

    #[test]
    fn only_an_old_server_gets_advice() {
        let advice = |version: &str| server(version, &[]).advice();
        assert!(advice("3.4.23").unwrap().contains("3.5 or newer"));
        assert_eq!((advice("3.5.16"), advice("3.6.0-rc.1"), advice("4.0.0")), (None, None, None));
        // Whoever does not tell is not blamed.
        assert_eq!(advice("3.x"), None);
    }
}

//! A whole cloud as one document: out of our store, out of any Placement API, and into an empty store.

use std::{collections::BTreeMap, sync::Arc};

use ec_store::{Op, Store, StoreError, Txn};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    model::{Change, Consumer, Key, Name, NamedRecord, Provider, Record, Seconds, State, intern},
    store::Keys,
};

mod live;

pub use live::fetch;

/// The version of the document.
const VERSION: u32 = 1;

/// Everything that placement knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Of this document.
    pub version: u32,
    /// Traits that users made.
    pub traits: Vec<String>,
    /// Resource classes that users made.
    pub resource_classes: Vec<String>,
    /// By uuid.
    pub providers: BTreeMap<Uuid, SnapshotProvider>,
    /// By uuid.
    pub consumers: BTreeMap<Uuid, Consumer>,
}

/// A provider with its generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotProvider {
    /// Counts its changes.
    pub generation: i64,
    /// All else.
    #[serde(flatten)]
    pub provider: Provider,
}

/// Why a transfer failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// etcd said no, or nothing.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is something already.
    #[error(
        "there are {0} records under {1} already; an import goes into an empty place only: choose another --prefix"
    )]
    NotEmpty(usize, String),
    /// A stored record cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The other side did not answer as it should.
    #[error("{0}")]
    Source(String),
    /// What was written is not what was read.
    #[error("the two sides differ after the import: {0}")]
    Differs(String),
}

impl Snapshot {
    /// Of a state.
    pub fn of(state: &State) -> Self {
        let providers = state.providers().filter_map(|(_, node)| {
            let provider = (**node.provider.as_ref()?).clone();
            let generation = node.generation.as_ref().map_or(0, |stored| stored.record);
            Some((node.uuid, SnapshotProvider { generation, provider }))
        });
        Self {
            version: VERSION,
            traits: state.custom_traits().keys().map(ToString::to_string).collect(),
            resource_classes: state.custom_classes().keys().map(ToString::to_string).collect(),
            providers: providers.collect(),
            consumers: state.consumers().map(|(uuid, stored)| (*uuid, (*stored.record).clone())).collect(),
        }
    }

    /// Refuses a document of a newer program.
    ///
    /// # Errors
    /// Both versions.
    pub fn check_version(&self) -> Result<(), TransferError> {
        if self.version == VERSION {
            return Ok(());
        }
        Err(TransferError::Source(format!(
            "the document's version is {}; this program reads {VERSION}",
            self.version
        )))
    }

    /// The first things in which two differ, but for times, which an API does not tell.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        compare("trait", &keyed(&self.traits), &keyed(&other.traits), &mut found);
        compare(
            "resource class",
            &keyed(&self.resource_classes),
            &keyed(&other.resource_classes),
            &mut found,
        );
        compare(
            "provider",
            &timeless(&self.providers, strip_provider),
            &timeless(&other.providers, strip_provider),
            &mut found,
        );
        compare(
            "consumer",
            &timeless(&self.consumers, strip_consumer),
            &timeless(&other.consumers, strip_consumer),
            &mut found,
        );
        found
    }

    fn records(&self, now: Seconds) -> Vec<(Key, Record)> {
        let mut records = Vec::new();
        for name in &self.traits {
            records.push((Key::Trait(intern(name)), Record::Trait(NamedRecord::new(now))));
        }
        for name in &self.resource_classes {
            records.push((Key::Class(intern(name)), Record::Class(NamedRecord::new(now))));
        }
        for (uuid, one) in &self.providers {
            let name = Arc::clone(&one.provider.name);
            records.push((Key::ProviderName(name), Record::ProviderName(*uuid)));
            records.push((
                Key::Provider(*uuid),
                Record::Provider(Arc::new(one.provider.clone()), one.generation),
            ));
        }
        for (uuid, consumer) in &self.consumers {
            records.push((Key::Consumer(*uuid), Record::Consumer(Arc::new(consumer.clone()))));
        }
        records
    }
}

fn keyed(names: &[String]) -> BTreeMap<String, ()> {
    names.iter().map(|name| (name.clone(), ())).collect()
}

fn timeless<T: Clone>(all: &BTreeMap<Uuid, T>, strip: fn(&mut T)) -> BTreeMap<Uuid, T> {
    let mut all = all.clone();
    all.values_mut().for_each(strip);
    all
}

fn strip_provider(one: &mut SnapshotProvider) {
    (one.provider.created_at, one.provider.updated_at) = (0, 0);
}

fn strip_consumer(one: &mut Consumer) {
    one.created_at = 0;
    one.allocations.sort_by_key(|(provider, _)| *provider);
}

fn compare<K: Ord + std::fmt::Display, V: PartialEq>(
    what: &str,
    left: &BTreeMap<K, V>,
    right: &BTreeMap<K, V>,
    found: &mut Vec<String>,
) {
    for (key, value) in left {
        match right.get(key) {
            None => found.push(format!("{what} {key} is missing")),
            Some(other) if other != value => found.push(format!("{what} {key} is another")),
            Some(_) => {}
        }
    }
    found.extend(
        right.keys().filter(|key| !left.contains_key(key)).map(|key| format!("{what} {key} is too many")),
    );
}

/// Reads what lies under the prefix, as of one revision.
///
/// # Errors
/// etcd is not there, or a record cannot be read.
pub async fn load(store: &dyn Store, keys: &Keys) -> Result<State, TransferError> {
    let listing = store.list(keys.prefix()).await?;
    let mut state = State::default();
    for pair in &listing.pairs {
        let change: Option<Change> = keys.read(pair).map_err(TransferError::Unreadable)?;
        state.apply(change);
    }
    Ok(state)
}

/// Writes a snapshot where nothing is, and reads it back to compare.
///
/// # Errors
/// There is something already; etcd is not there; what was read back differs.
pub async fn import(
    store: &dyn Store,
    keys: &Keys,
    snapshot: &Snapshot,
    operations: usize,
    now: Seconds,
) -> Result<(), TransferError> {
    snapshot.check_version()?;
    let before = store.list(keys.prefix()).await?.pairs.len();
    if before > 0 {
        return Err(TransferError::NotEmpty(before, keys.prefix().to_owned()));
    }
    let puts: Vec<Op> = snapshot
        .records(now)
        .iter()
        .flat_map(|(key, record)| keys.puts(key, record))
        .map(|put| Op::Put { key: put.key, value: put.value, lease: None })
        .collect();
    for chunk in puts.chunks(operations.saturating_sub(1).max(1)) {
        let txn = Txn { when: Vec::new(), then: chunk.to_vec() };
        store.txn(txn.put(keys.clock(), "import")).await?;
    }
    let after = Snapshot::of(&load(store, keys).await?);
    let differences = snapshot.differences(&after);
    match differences.first() {
        None => Ok(()),
        Some(first) => Err(TransferError::Differs(format!("{first} ({} in all)", differences.len()))),
    }
}

/// A name from outside.
fn named(text: &str) -> Name {
    intern(text)
}

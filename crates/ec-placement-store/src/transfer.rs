//! A whole cloud as one document: out of our store, out of any Placement API, and into an empty store.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use ec_placement_model::{
    Change, Consumer, Key, Name, NamedRecord, Provider, Record, Seconds, State, Stored,
    check::{broken, loose, warnings},
    intern, is_custom, is_custom_name, is_standard_class, is_standard_trait,
};
use ec_store::{Compare, KeyValue, Op, Revision, Store, StoreError, Txn};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeSeed};
use uuid::Uuid;

use crate::{Common, Keys, Model, document::DOCUMENT};

/// Characters of a provider's name, as of the API's schema, which takes none at all, too.
const NAME_MAX: usize = 200;

/// So many things that do not fit together are told of one document.
const FINDINGS: usize = 10;

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
    #[serde(deserialize_with = "counted_from_one")]
    pub consumers: BTreeMap<Uuid, Consumer>,
}

fn counted_from_one<'de, D: Deserializer<'de>>(document: D) -> Result<BTreeMap<Uuid, Consumer>, D::Error> {
    let mut consumers: BTreeMap<Uuid, Consumer> = Deserialize::deserialize(document)?;
    consumers.values_mut().for_each(count_from_one);
    Ok(consumers)
}

/// Those that OpenStack made up for what was claimed before it knew consumers have the generation 0 there, and had it here for as
/// long as an import kept it.
fn count_from_one(consumer: &mut Consumer) {
    if consumer.generation == 0 {
        consumer.generation = 1;
    }
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
    /// Somebody else wrote meanwhile.
    #[error(
        "somebody else wrote under {0} during the import, and was not disturbed: nobody may write there meanwhile; say \
         the same again, and where that is refused, delete what lies there, or choose another --prefix"
    )]
    Met(String),
    /// A stored record cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// It uses names that nobody made and that this program does not know.
    #[error(
        "nothing was imported: there are providers or consumers with {0}, which no user made and this release of eplacement does not know; \
         use one that does, or take them off there first"
    )]
    Unknown(String),
    /// Not all of it can be read, or served.
    #[error("it cannot be imported: {0}")]
    Unsound(String),
    /// The other side did not answer as it should.
    #[error("{0}")]
    Source(String),
    /// What was written is not what was read.
    #[error(
        "the two sides differ after the import: {0}; nothing is served there: change it in a document (`eplacement export --from` writes \
         one), or at the source, and import again, which takes the place of what was written"
    )]
    Differs(String),
}

impl Snapshot {
    /// The version of the document.
    pub const VERSION: u32 = 1;

    /// Reads a document.
    ///
    /// # Errors
    /// It is none, or something stands twice in it, or something that this program does not know.
    pub fn read(text: &[u8]) -> Result<Self, String> {
        let read = |text| {
            DOCUMENT.deserialize(&mut serde_json::Deserializer::from_slice(text))?;
            serde_json::from_slice(text)
        };
        read(text).map_err(|error: serde_json::Error| match error.is_data() {
            true => error.to_string(),
            false => format!("it is no JSON, which `eplacement export` writes: {error}"),
        })
    }

    /// Of a state.
    pub fn of(state: &State) -> Self {
        let providers = state.providers().filter_map(|(_, node)| {
            let provider = (**node.provider.as_ref()?).clone();
            let generation = node.generation.as_ref().map_or(0, |stored| stored.record);
            Some((node.uuid, SnapshotProvider { generation, provider }))
        });
        let consumers = state.consumers().map(|(uuid, stored)| {
            let mut consumer = (*stored.record).clone();
            count_from_one(&mut consumer);
            (*uuid, consumer)
        });
        Self {
            version: Self::VERSION,
            traits: state.custom_traits().keys().map(ToString::to_string).collect(),
            resource_classes: state.custom_classes().keys().map(ToString::to_string).collect(),
            providers: providers.collect(),
            consumers: consumers.collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.traits.is_empty()
            && self.resource_classes.is_empty()
            && self.providers.is_empty()
            && self.consumers.is_empty()
    }

    /// Refuses a document of a newer program.
    ///
    /// # Errors
    /// Both versions.
    pub fn check_version(&self) -> Result<(), TransferError> {
        if self.version == Self::VERSION {
            return Ok(());
        }
        Err(TransferError::Source(format!(
            "the document's version is {}; this program reads {}",
            self.version,
            Self::VERSION
        )))
    }

    /// Refuses what uses standard traits or resource classes of a newer OpenStack: they would be served, and no query could ask for them.
    ///
    /// # Errors
    /// All of these names.
    pub fn check_names(&self) -> Result<(), TransferError> {
        let (traits, classes) = self.unknown_names();
        let unknown: BTreeSet<Name> = traits.into_iter().chain(classes).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(TransferError::Unknown(unknown.into_iter().collect::<Vec<_>>().join(", ")))
    }

    /// The traits, and the resource classes, that no user made and this release does not know.
    fn unknown_names(&self) -> (BTreeSet<Name>, BTreeSet<Name>) {
        let providers = || self.providers.values().map(|one| &one.provider);
        let traits = providers().flat_map(|provider| &provider.traits);
        let offered = providers().flat_map(|provider| provider.inventories.iter().map(|(class, _)| class));
        let allocations = self.consumers.values().flat_map(|consumer| &consumer.allocations);
        let used = allocations.flat_map(|(_, amounts)| amounts.iter().map(|(class, _)| class));
        let traits = traits.filter(|name| !is_standard_trait(name) && !is_custom(name));
        let classes = offered.chain(used).filter(|name| !is_standard_class(name) && !is_custom(name));
        (traits.cloned().collect(), classes.cloned().collect())
    }

    /// Refuses what could not be read once it is there, or not be served. The first of what does not fit together all the same, or should be
    /// looked at: who is to have it back has nothing else, and what is there without what it belongs to does no harm.
    ///
    /// # Errors
    /// The first of what was found.
    pub fn check_sound(&self) -> Result<Vec<String>, TransferError> {
        // Wherever it shall lie.
        let keys = Keys::new("");
        let (mut state, mut refused) = (State::default(), Vec::new());
        for put in self.records(0).iter().flat_map(|(key, record)| keys.puts(key, record)) {
            let pair = KeyValue {
                key: put.key,
                value: put.value,
                create_revision: 1,
                mod_revision: 1,
                version: 1,
                lease: None,
            };
            let bytes = pair.key.len() + pair.value.len();
            if bytes > BYTES_MAX {
                // It may be the key that is too long.
                let key: String = pair.key.chars().take(NAME_MAX).collect();
                refused.push(format!(
                    "{key} is {bytes} bytes, more than the {BYTES_MAX} that can be written at once"
                ));
                continue;
            }
            // One without the prefix of its kind is among the names that are refused.
            if let Some(changes) = keys.read(&pair).into_changes() {
                state.apply(changes);
            }
        }
        refused.extend(self.refused_names());
        // They are told by `check_names`, and whoever has nothing else takes them all the same.
        let (traits, classes) = self.unknown_names();
        let known = || Some(Stored { record: NamedRecord::new(0), revision: 1 });
        state.apply(traits.into_iter().map(|name| Change::Trait(name, known())));
        state.apply(classes.into_iter().map(|name| Change::Class(name, known())));
        refused.extend(twice("trait", &self.traits).chain(twice("resource class", &self.resource_classes)));
        refused.extend(broken(&state));
        if refused.is_empty() {
            return Ok(first(loose(&state).into_iter().chain(warnings(&state)).collect()));
        }
        Err(TransferError::Unsound(first(refused).join("; ")))
    }

    /// Names that the API would not have taken.
    fn refused_names(&self) -> Vec<String> {
        let mut refused = Vec::new();
        for (uuid, one) in &self.providers {
            let length = one.provider.name.chars().count();
            if length > NAME_MAX {
                refused
                    .push(format!("provider {uuid}: its name has {length} characters, more than {NAME_MAX}"));
            }
        }
        let traits = self.traits.iter().filter(|name| !is_custom_name(name)).map(|name| ("trait", name));
        // The API's pattern takes one line's end behind a class.
        let odd = |name: &&String| !is_custom_name(name.strip_suffix('\n').unwrap_or(name));
        let classes = self.resource_classes.iter().filter(odd).map(|name| ("resource class", name));
        refused.extend(traits.chain(classes).map(|(what, name)| {
            format!(
                "{what} {name:?} is no custom name: wanted CUSTOM_, then capitals, digits and underscores"
            )
        }));
        refused
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

/// So many of them as are told, and how many more there are.
fn first(mut findings: Vec<String>) -> Vec<String> {
    let more = findings.len().saturating_sub(FINDINGS);
    findings.truncate(FINDINGS);
    findings.extend((more > 0).then(|| format!("and {more} more")));
    findings
}

/// Of names, those that stand in a list more than once.
fn twice(what: &str, names: &[String]) -> impl Iterator<Item = String> {
    let mut seen = BTreeSet::new();
    names
        .iter()
        .filter(move |name| !seen.insert(*name))
        .map(move |name| format!("{what} {name} stands twice"))
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

/// What lies under the prefix.
pub struct Loaded {
    /// The state that it stands for, with what of it cannot be read.
    pub state: State,
    /// What to do where an import is under way there, or broke off.
    pub importing: Option<String>,
    /// Keys that are not ours.
    pub foreign: Vec<String>,
}

impl Loaded {
    fn of(pairs: &[KeyValue], keys: &Keys) -> Self {
        let mut loaded = Self { state: State::default(), importing: None, foreign: Vec::new() };
        for pair in pairs {
            if let Some(common) = keys.prefix().common(&pair.key) {
                if common == Common::Import {
                    loaded.importing =
                        Some(mark(pair, keys).map_or_else(|why| why, |_| Keys::IMPORTING.into()));
                }
                continue;
            }
            match keys.read(pair).into_changes() {
                Some(changes) => loaded.state.apply(changes),
                None => loaded.foreign.push(pair.key.clone()),
            }
        }
        loaded
    }

    /// The state, if all of it is there and can be read.
    ///
    /// # Errors
    /// The first record that cannot be.
    pub fn whole(self) -> Result<State, TransferError> {
        if let Some(why) = self.importing {
            return Err(TransferError::Unreadable(why));
        }
        let trouble = self.state.unreadable().next().map(str::to_owned);
        trouble.map_or(Ok(self.state), |why| Err(TransferError::Unreadable(why)))
    }
}

/// Reads what lies under the prefix, as of one revision.
///
/// # Errors
/// etcd is not there.
pub async fn load(store: &dyn Store, keys: &Keys) -> Result<Loaded, TransferError> {
    Ok(Loaded::of(&store.list(keys.prefix().as_str()).await?.pairs, keys))
}

/// Bytes of one transaction of an import.
const BYTES_MAX: usize = 1 << 20;

/// What stands in the key that marks an import which is under way, or broke off.
#[derive(Serialize, Deserialize)]
struct Mark {
    /// The id that the import gives to its transactions.
    id: String,
    /// When it began.
    now: Seconds,
}

/// What stands in that key, or what to do where no import can go on with it.
fn mark(pair: &KeyValue, keys: &Keys) -> Result<Mark, String> {
    serde_json::from_slice(&pair.value).map_err(|error| {
        let (key, prefix) = (&pair.key, keys.prefix().as_str());
        format!(
            "{key} is not what an import writes ({error}), so that none can be finished: delete that key; where an import broke off, \
             delete all that lies under {prefix}, and import again"
        )
    })
}

/// What is missing of an import: nothing where something else is there.
struct Missing {
    /// The changes left.
    ops: VecDeque<Op>,
    /// What the clock must still be; none: not there.
    clock: Option<Revision>,
    mark: Mark,
    /// So many records of another document are taken away.
    discarded: usize,
}

/// What an import has to write where this lies under the prefix.
fn missing(
    pairs: &[KeyValue],
    keys: &Keys,
    snapshot: &Snapshot,
    now: Seconds,
) -> Result<Missing, TransferError> {
    // What a replica writes that has served nothing yet is no record.
    let prefix = keys.prefix();
    let records: Vec<&KeyValue> = pairs.iter().filter(|pair| prefix.common(&pair.key).is_none()).collect();
    let not_empty = || TransferError::NotEmpty(records.len(), prefix.as_str().to_owned());
    let find = |key: &str| pairs.iter().find(|pair| pair.key == key);
    let found = find(&prefix.import()).map(|pair| mark(pair, keys));
    let clock = find(&prefix.clock());
    let mark = match found {
        None if records.is_empty() => Mark { id: format!("import-{:016x}", rand::random::<u64>()), now },
        None => return Err(not_empty()),
        Some(mark) => {
            let mark = mark.map_err(TransferError::Unreadable)?;
            // Somebody has written there since: that is not ours to take away.
            if clock.is_none_or(|clock| clock.value != mark.id.as_bytes()) {
                return Err(not_empty());
            }
            mark
        }
    };
    let mut there: BTreeMap<&str, &[u8]> =
        records.iter().map(|pair| (pair.key.as_str(), pair.value.as_slice())).collect();
    let mut ops: VecDeque<Op> = VecDeque::new();
    for put in snapshot.records(mark.now).iter().flat_map(|(key, record)| keys.puts(key, record)) {
        if there.remove(put.key.as_str()) != Some(put.value.as_slice()) {
            ops.push_back(Op::Put { key: put.key, value: put.value, lease: None });
        }
    }
    // Of another document whose import broke off.
    let discarded = there.len();
    ops.extend(there.into_keys().map(|key| Op::Delete(key.to_owned())));
    Ok(Missing { ops, clock: clock.map(|pair| pair.mod_revision), mark, discarded })
}

/// Writes a snapshot where nothing is, and reads it back to compare. One that broke off goes on where it
/// stopped when it is done again, with the same document or another. Answered is how much of another was taken away, and the first of
/// what does not fit together in this one, and was taken all the same ([`Snapshot::check_sound`]).
///
/// # Errors
/// It could not be read or served; there is something already, or somebody writes there meanwhile; etcd is not there; what was read back differs.
pub async fn import(
    store: &dyn Store,
    keys: &Keys,
    snapshot: &Snapshot,
    operations: usize,
    now: Seconds,
) -> Result<Vec<String>, TransferError> {
    snapshot.check_version()?;
    let mut loose = snapshot.check_sound()?;
    let prefix = keys.prefix();
    let listing = store.list(keys.prefix().as_str()).await?;
    let before = Loaded::of(&listing.pairs, keys);
    // Done before, and only the answer was lost; or said twice.
    if !snapshot.is_empty()
        && let Ok(state) = before.whole()
        && snapshot.differences(&Snapshot::of(&state)).is_empty()
    {
        return Ok(loose);
    }
    let Missing { mut ops, mut clock, mark, discarded } = missing(&listing.pairs, keys, snapshot, now)?;
    if discarded > 0 {
        loose.insert(
            0,
            format!("{discarded} records of another document, whose import broke off here, were taken away"),
        );
    }
    let text = serde_json::to_string(&mark).map_err(|error| TransferError::Unreadable(error.to_string()))?;
    loop {
        // Every transaction writes the clock, so that one of anybody else would show there.
        let mut txn = Txn::new().when(match clock {
            None => Compare::Absent(prefix.clock()),
            Some(revision) => Compare::Unchanged(prefix.clock(), revision),
        });
        txn = txn.put(prefix.clock(), mark.id.clone()).put(prefix.import(), text.clone());
        // Who was here before and has not seen the mark yet writes nothing any more.
        txn = txn.put(prefix.epoch(), mark.id.clone());
        let mut bytes = txn.bytes();
        while txn.then.len() < operations
            && let Some(op) = ops.pop_front()
        {
            let more = Txn { when: Vec::new(), then: vec![op.clone()] }.bytes();
            if bytes + more > BYTES_MAX && txn.then.len() > 3 {
                ops.push_front(op);
                break;
            }
            bytes += more;
            txn.then.push(op);
        }
        clock = Some(write(store, keys, txn).await?);
        if ops.is_empty() {
            break;
        }
    }
    let listing = store.list(keys.prefix().as_str()).await?;
    let after = Snapshot::of(&Loaded { importing: None, ..Loaded::of(&listing.pairs, keys) }.whole()?);
    let differences = snapshot.differences(&after);
    if let Some(first) = differences.first() {
        return Err(TransferError::Differs(format!("{first} ({} in all)", differences.len())));
    }
    let done = Txn::new().when(match clock {
        None => Compare::Absent(prefix.clock()),
        Some(revision) => Compare::Unchanged(prefix.clock(), revision),
    });
    write(store, keys, done.delete(prefix.import())).await?;
    Ok(loose)
}

async fn write(store: &dyn Store, keys: &Keys, txn: Txn) -> Result<Revision, TransferError> {
    let outcome = store.txn(txn).await?;
    if outcome.succeeded {
        Ok(outcome.revision)
    } else {
        Err(TransferError::Met(keys.prefix().as_str().to_owned()))
    }
}

//! Where each record lies, and how it reads: placement as a model of `ec-replica`. What is decided on it is
//! `ec-placement-model`'s matter.
//!
//! ```text
//!   <prefix>/providers/<uuid>     a provider: name, parent, inventories, traits, aggregates
//!   <prefix>/generations/<uuid>   its generation, a number: rewritten with *every* write that concerns the
//!                                 provider, so that its revision stands for all of it
//!   <prefix>/names/<name>         the uuid of the provider with this name
//!   <prefix>/consumers/<uuid>     a consumer with its allocations
//!   <prefix>/traits/<name>        a trait that a user made
//!   <prefix>/classes/<name>       a resource class that a user made
//! ```

use std::sync::Arc;

use ec_placement_model::{
    Change, Command, Consumer, Draft, Extra, Key, ModelError, Name, NamedRecord, Outcome, Part, Provider,
    Record, Savepoint, State, Stored, decide, generation_problem, intern, is_custom,
};
use ec_replica::{Commands, Model, Prefix, Reading};
use ec_store::{KeyValue, Op, Revision, Store};
use jiff::Timestamp;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use uuid::Uuid;

use super::recall::recall;

/// The newest version of records that is understood.
const VERSION: u32 = 1;

/// The layout under one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    prefix: Prefix,
}

/// A record to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Put {
    /// Where.
    pub key: String,
    /// What.
    pub value: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct NameRecord {
    version: u32,
    provider: Uuid,
}

impl Keys {
    /// The layout under `prefix`, with or without a slash at its end.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: Prefix::new(prefix) }
    }

    fn provider(&self, uuid: &Uuid) -> String {
        format!("{}providers/{uuid}", self.prefix.as_str())
    }

    /// What a key is of; none where it is none of ours.
    pub(super) fn key_of(&self, key: &str) -> Option<Key> {
        Some(self.split(key)?.0)
    }

    /// What a key is of; none where it is not as we write it.
    fn split(&self, key: &str) -> Option<(Key, Part)> {
        let (kind, id) = self.prefix.strip(key)?.split_once('/')?;
        // One spelling only: another one would be the same provider, or consumer, a second time.
        let uuid = || {
            let uuid = id.parse::<Uuid>().ok()?;
            (*uuid.hyphenated().encode_lower(&mut Uuid::encode_buffer()) == *id).then_some(uuid)
        };
        Some(match kind {
            "providers" => (Key::Provider(uuid()?), Part::Record),
            "generations" => (Key::Provider(uuid()?), Part::Generation),
            "consumers" => (Key::Consumer(uuid()?), Part::Record),
            "names" => (Key::ProviderName(Name::from(id)), Part::Record),
            "traits" if is_custom(id) => (Key::Trait(intern(id)), Part::Record),
            "classes" if is_custom(id) => (Key::Class(intern(id)), Part::Record),
            _ => return None,
        })
    }

    fn ops(&self, draft: &Draft<'_>, key: &Key, record: Option<&Record>, ops: &mut Vec<Op>) {
        let Some(record) = record else {
            // Made and taken away again in one draft: it was never there.
            if !draft.is_in_base(key) {
                return;
            }
            if let Key::Provider(uuid) = key {
                ops.push(Op::Delete(self.provider(uuid)));
            }
            return ops.push(Op::Delete(self.guard(key)));
        };
        let unchanged = match (key, record) {
            (Key::Provider(uuid), Record::Provider(provider, _)) => draft.is_base_record(uuid, provider),
            _ => false,
        };
        let extra = draft.base().extra(key);
        for mut put in self.puts(key, record).into_iter().skip(usize::from(unchanged)) {
            if let Some(extra) =
                extra.filter(|_| self.split(&put.key).is_some_and(|(_, part)| part == Part::Record))
            {
                put.value = with_extra(put.value, extra);
            }
            ops.push(Op::Put { key: put.key, value: put.value, lease: None });
        }
    }

    /// How a record is written: a provider as two keys, its own record first.
    pub fn puts(&self, key: &Key, record: &Record) -> Vec<Put> {
        let guard = self.guard(key);
        match record {
            Record::Provider(provider, generation) => {
                let mut puts = Vec::with_capacity(2);
                if let Key::Provider(uuid) = key {
                    puts.push(Put { key: self.provider(uuid), value: encode(&**provider) });
                }
                puts.push(Put { key: guard, value: encode(generation) });
                puts
            }
            Record::Consumer(consumer) => vec![Put { key: guard, value: encode(&**consumer) }],
            Record::ProviderName(provider) => {
                vec![Put { key: guard, value: encode(&NameRecord { version: VERSION, provider: *provider }) }]
            }
            Record::Trait(record) | Record::Class(record) => vec![Put { key: guard, value: encode(record) }],
        }
    }
}

impl Model for Keys {
    type State = State;
    type Key = Key;
    type Change = Change;

    const IMPORTING: &'static str =
        "an import is under way, or broke off; then finish it with the same `eplacement import`";

    fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    fn read(&self, pair: &KeyValue) -> Reading<Change> {
        let Some((key, part)) = self.split(&pair.key) else { return Reading::Foreign };
        let revision = pair.mod_revision;
        let read = match (&key, part) {
            (Key::Provider(uuid), Part::Generation) => serde_json::from_slice(&pair.value)
                .map_err(|error| error.to_string())
                .and_then(|record| generation_problem(record).map_or(Ok(record), Err))
                .map(|record| (Change::Generation(*uuid, Some(Stored { record, revision })), None))
                .map_err(|why| (why, None)),
            (Key::Provider(uuid), Part::Record) => decode::<Provider>(&pair.value)
                .map(|(record, extra)| (Change::Provider(*uuid, Some(Arc::new(record))), extra))
                .map_err(|(why, _)| (why, None)),
            (Key::Consumer(uuid), _) => {
                let stored = |record| Some(Stored { record: Arc::new(record), revision });
                decode::<Consumer>(&pair.value)
                    .map(|(record, extra)| (Change::Consumer(*uuid, stored(record)), extra))
                    .map_err(|(why, record)| {
                        // What it uses is nobody else's, whatever cannot be read beside that.
                        let record = record.or_else(|| Consumer::salvage(&pair.value));
                        (why, record.map(|record| Change::Consumer(*uuid, stored(record))))
                    })
            }
            (Key::ProviderName(name), _) => decode::<NameRecord>(&pair.value)
                .map(|(record, extra)| {
                    let record = record.provider;
                    (Change::ProviderName(Arc::clone(name), Some(Stored { record, revision })), extra)
                })
                .map_err(|(why, _)| (why, None)),
            (Key::Trait(name), _) => decode::<NamedRecord>(&pair.value)
                .map(|(record, extra)| {
                    (Change::Trait(Arc::clone(name), Some(Stored { record, revision })), extra)
                })
                .map_err(|(why, record)| {
                    // It is there, with its name in the key.
                    let record = record.unwrap_or_else(|| NamedRecord::new(0));
                    let stored = Stored { record, revision };
                    (why, Some(Change::Trait(Arc::clone(name), Some(stored))))
                }),
            (Key::Class(name), _) => decode::<NamedRecord>(&pair.value)
                .map(|(record, extra)| {
                    (Change::Class(Arc::clone(name), Some(Stored { record, revision })), extra)
                })
                .map_err(|(why, record)| {
                    // It is there, with its name in the key.
                    let record = record.unwrap_or_else(|| NamedRecord::new(0));
                    let stored = Stored { record, revision };
                    (why, Some(Change::Class(Arc::clone(name), Some(stored))))
                }),
        };
        match read {
            Ok((change, None)) => Reading::Sound(vec![change]),
            Ok((change, Some(extra))) => Reading::Sound(vec![change, Change::Extra(key, extra)]),
            Err((why, known)) => {
                let why = format!("cannot read {}: {why}", pair.key);
                let change = Change::Unreadable { key, part, why: why.clone() };
                Reading::Unreadable { why, known, change }
            }
        }
    }

    fn deleted(&self, key: &str) -> Option<Change> {
        Some(match self.split(key)? {
            (Key::Provider(uuid), Part::Record) => Change::Provider(uuid, None),
            (Key::Provider(uuid), Part::Generation) => Change::Generation(uuid, None),
            (Key::Consumer(uuid), _) => Change::Consumer(uuid, None),
            (Key::ProviderName(name), _) => Change::ProviderName(name, None),
            (Key::Trait(name), _) => Change::Trait(name, None),
            (Key::Class(name), _) => Change::Class(name, None),
        })
    }

    async fn recall(&self, store: &dyn Store, unreadable: &KeyValue) -> Option<Change> {
        recall(store, self, unreadable).await
    }

    fn key(change: &Change) -> Key {
        change.key()
    }

    fn written_at(change: Change, revision: Revision) -> Change {
        change.written_at(revision)
    }

    fn apply(state: &mut State, changes: impl IntoIterator<Item = Change>) {
        state.apply(changes);
    }
}

impl Commands for Keys {
    type Command = Command;
    type Outcome = Outcome;
    type Refusal = ModelError;
    type Draft<'s> = Draft<'s>;
    type Savepoint = Savepoint;

    fn draft(state: &State) -> Draft<'_> {
        Draft::new(state)
    }

    fn decide(draft: &mut Draft<'_>, command: &Command, now: Timestamp) -> Result<Outcome, ModelError> {
        decide(draft, command, now.as_second())
    }

    fn savepoint(draft: &Draft<'_>) -> Savepoint {
        draft.savepoint()
    }

    fn forget(draft: &mut Draft<'_>, to: Savepoint) {
        draft.forget(to);
    }

    fn seen<'d>(draft: &'d Self::Draft<'_>) -> impl ExactSizeIterator<Item = (&'d Key, Revision)> {
        draft.seen().iter().map(|(key, revision)| (key, *revision))
    }

    fn seen_since<'d>(draft: &'d Self::Draft<'_>, savepoint: Savepoint) -> impl Iterator<Item = &'d Key> {
        draft.seen_since(savepoint)
    }

    fn size(draft: &Draft<'_>) -> usize {
        // A provider is two keys; where only its generation changes, one of them.
        let both = draft.changes().filter(|(key, record)| match (key, record) {
            (Key::Provider(uuid), Some(Record::Provider(record, _))) => !draft.is_base_record(uuid, record),
            (Key::Provider(_), None) => true,
            _ => false,
        });
        draft.changes().len() + both.count()
    }

    fn guard(&self, key: &Key) -> String {
        let root = self.prefix.as_str();
        match key {
            Key::Provider(uuid) => format!("{root}generations/{uuid}"),
            Key::Consumer(uuid) => format!("{root}consumers/{uuid}"),
            Key::ProviderName(name) => format!("{root}names/{name}"),
            Key::Trait(name) => format!("{root}traits/{name}"),
            Key::Class(name) => format!("{root}classes/{name}"),
        }
    }

    fn writes(&self, draft: &Draft<'_>) -> Vec<Op> {
        let mut ops = Vec::new();
        for (key, record) in draft.changes() {
            self.ops(draft, key, record.as_ref(), &mut ops);
        }
        ops
    }

    fn written(draft: &Draft<'_>) -> Vec<Change> {
        draft.written()
    }
}

#[expect(clippy::expect_used, reason = "records have text keys and no map that fails")]
fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("records are JSON")
}

/// A record that says of which version it is.
trait Versioned {
    fn version(&self) -> u32;

    /// What is wrong with what it says.
    fn problem(&self) -> Option<String> {
        None
    }
}

impl Versioned for NameRecord {
    fn version(&self) -> u32 {
        self.version
    }
}

impl Versioned for Provider {
    fn version(&self) -> u32 {
        Self::version(self)
    }

    fn problem(&self) -> Option<String> {
        Self::problem(self)
    }
}

impl Versioned for Consumer {
    fn version(&self) -> u32 {
        Self::version(self)
    }

    fn problem(&self) -> Option<String> {
        Self::problem(self)
    }
}

impl Versioned for NamedRecord {
    fn version(&self) -> u32 {
        Self::version(self)
    }
}

/// Why a record cannot be read; and as much as can be read of it, where it is of a newer release.
type Unread<T> = (String, Option<T>);

/// A record, and what it holds that this release does not know.
fn decode<T: DeserializeOwned + Serialize + Versioned>(
    value: &[u8],
) -> Result<(T, Option<Arc<Extra>>), Unread<T>> {
    let record: T = serde_json::from_slice(value).map_err(|error| (error.to_string(), None))?;
    let version = record.version();
    if version > VERSION {
        let sound = record.problem().is_none();
        return Err((format!("its version is {version}, newer than this program"), sound.then_some(record)));
    }
    if let Some(problem) = record.problem() {
        return Err((problem, None));
    }
    let known = encode(&record);
    // Almost all are exactly as we write them.
    let extra = if known == value { Extra::default() } else { unknown(value, &known) };
    Ok((record, (!extra.is_empty()).then(|| Arc::new(extra))))
}

/// What one JSON document has that another does not.
fn unknown(all: &[u8], known: &[u8]) -> Extra {
    match (serde_json::from_slice(all), serde_json::from_slice(known)) {
        (Ok(all), Ok(known)) => Extra::between(&all, &known),
        _ => Extra::default(),
    }
}

/// Puts what a record held beside what we know back into it.
fn with_extra(value: Vec<u8>, extra: &Extra) -> Vec<u8> {
    let Ok(mut record) = serde_json::from_slice::<Value>(&value) else { return value };
    extra.restore(&mut record);
    serde_json::to_vec(&record).unwrap_or(value)
}

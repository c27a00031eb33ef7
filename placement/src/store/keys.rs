//! Where each record lies, and how it reads.
//!
//! ```text
//!   <prefix>/providers/<uuid>     a provider: name, parent, inventories, traits, aggregates
//!   <prefix>/generations/<uuid>   its generation, a number: rewritten with *every* write that concerns the
//!                                 provider, so that its revision stands for all of it
//!   <prefix>/names/<name>         the uuid of the provider with this name
//!   <prefix>/consumers/<uuid>     a consumer with its allocations
//!   <prefix>/traits/<name>        a trait that a user made
//!   <prefix>/classes/<name>       a resource class that a user made
//!   <prefix>/clock                written by every transaction: its revision is that of the newest
//! ```

use std::sync::Arc;

use ec_store::{Compare, KeyValue, Op, Txn};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use crate::model::{Change, Consumer, Draft, Key, Name, NamedRecord, Provider, Record, Stored, intern};

/// The newest version of records that is understood.
const VERSION: u32 = 1;

/// The layout under one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// With a slash at its end.
    root: Arc<str>,
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

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Keys {
    /// The layout under `prefix`, with or without a slash at its end.
    pub fn new(prefix: &str) -> Self {
        Self { root: format!("{}/", prefix.trim_end_matches('/')).into() }
    }

    /// What every key begins with.
    pub fn prefix(&self) -> &str {
        &self.root
    }

    /// The key that every transaction writes.
    pub fn clock(&self) -> String {
        format!("{}clock", self.root)
    }

    fn provider(&self, uuid: &Uuid) -> String {
        format!("{}providers/{uuid}", self.root)
    }

    /// The key whose revision stands for a record.
    fn guard(&self, key: &Key) -> String {
        let root = &self.root;
        match key {
            Key::Provider(uuid) => format!("{root}generations/{uuid}"),
            Key::Consumer(uuid) => format!("{root}consumers/{uuid}"),
            Key::ProviderName(name) => format!("{root}names/{name}"),
            Key::Trait(name) => format!("{root}traits/{name}"),
            Key::Class(name) => format!("{root}classes/{name}"),
        }
    }

    /// Reads a pair from the store. `None`: not a record of ours, or one that says nothing about the state.
    ///
    /// # Errors
    /// A record that cannot be read, with its key.
    pub fn read(&self, pair: &KeyValue) -> Result<Option<Change>, String> {
        let bad = |why: String| format!("cannot read {}: {why}", pair.key);
        let Some((kind, id)) = self.split(&pair.key) else { return Ok(None) };
        let uuid = || id.parse::<Uuid>().map_err(|error| bad(error.to_string()));
        let revision = pair.mod_revision;
        Ok(Some(match kind {
            "providers" => {
                Change::Provider(uuid()?, Some(Arc::new(decode::<Provider>(&pair.value).map_err(bad)?)))
            }
            "generations" => {
                let record = serde_json::from_slice(&pair.value).map_err(|error| bad(error.to_string()))?;
                Change::Generation(uuid()?, Some(Stored { record, revision }))
            }
            "consumers" => {
                let record = Arc::new(decode::<Consumer>(&pair.value).map_err(bad)?);
                Change::Consumer(uuid()?, Some(Stored { record, revision }))
            }
            "names" => {
                let record = decode::<NameRecord>(&pair.value).map_err(bad)?.provider;
                Change::ProviderName(id.into(), Some(Stored { record, revision }))
            }
            "traits" => {
                let record = decode::<NamedRecord>(&pair.value).map_err(bad)?;
                Change::Trait(intern(id), Some(Stored { record, revision }))
            }
            "classes" => {
                let record = decode::<NamedRecord>(&pair.value).map_err(bad)?;
                Change::Class(intern(id), Some(Stored { record, revision }))
            }
            _ => return Ok(None),
        }))
    }

    /// What the deletion of a key means.
    pub fn deleted(&self, key: &str) -> Option<Change> {
        let (kind, id) = self.split(key)?;
        Some(match kind {
            "providers" => Change::Provider(id.parse().ok()?, None),
            "generations" => Change::Generation(id.parse().ok()?, None),
            "consumers" => Change::Consumer(id.parse().ok()?, None),
            "names" => Change::ProviderName(Name::from(id), None),
            "traits" => Change::Trait(intern(id), None),
            "classes" => Change::Class(intern(id), None),
            _ => return None,
        })
    }

    fn split<'k>(&self, key: &'k str) -> Option<(&'k str, &'k str)> {
        key.strip_prefix(&*self.root)?.split_once('/')
    }

    /// The transaction that makes a draft true, if nothing that it stands on has changed.
    pub fn txn(&self, draft: &Draft<'_>, id: &str) -> Txn {
        let mut txn = Txn::new().put(self.clock(), id);
        for (key, revision) in draft.seen() {
            let guard = self.guard(key);
            txn.when.push(if *revision == 0 {
                Compare::Absent(guard)
            } else {
                Compare::Unchanged(guard, *revision)
            });
        }
        for (key, record) in draft.changes() {
            self.ops(draft, key, record.as_ref(), &mut txn.then);
        }
        txn
    }

    fn ops(&self, draft: &Draft<'_>, key: &Key, record: Option<&Record>, ops: &mut Vec<Op>) {
        let Some(record) = record else {
            // Made and taken away again in one draft: it was never there.
            if draft.seen().get(key).is_some_and(|revision| *revision == 0) {
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
        ops.extend(self.puts(key, record).into_iter().skip(usize::from(unchanged)).map(|put| Op::Put {
            key: put.key,
            value: put.value,
            lease: None,
        }));
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

#[expect(clippy::expect_used, reason = "records have text keys and no map that fails")]
fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("records are JSON")
}

fn decode<T: DeserializeOwned>(value: &[u8]) -> Result<T, String> {
    serde_json::from_slice::<T>(value).map_err(|error| error.to_string()).and_then(|record| {
        let Versioned { version } = serde_json::from_slice(value).map_err(|error| error.to_string())?;
        if version > VERSION {
            Err(format!("its version is {version}, newer than this program"))
        } else {
            Ok(record)
        }
    })
}

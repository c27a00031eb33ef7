//! The records that lie in etcd, as JSON, and the rules by which they may change from release to release.
//!
//! Every kind of record counts its own formats ([`Record::FORMAT`]), and every record says as its `version` which it is of. A reader
//! passes over fields that it does not know; who changes a record that it read ([`Doc`]) writes them back. A record
//! of a later format than the reader's is refused as a whole, by everybody alike: nobody acts upon half of it.
//! So a field that may be overlooked is just added, and one that may not be comes with a new format. What an agent
//! reads it says itself ([`Alive::formats`]), and nothing else is written for it.

mod access;
mod catalog;
mod held;
mod history;
mod image;
mod instance;
mod node;
mod power;
mod rebuild;
mod request;
mod rescue;
mod resize;
mod status;
mod token;
mod volume;

use std::fmt;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

pub use access::{Access, AccessKind, AccessWish, Ticket};
pub use catalog::{Flavor, Group, Keypair, Policy};
pub use held::{Edition, Held, Intent};
pub use history::{Action, ActionVerb, Actions, HISTORY_MAX, Outcome, Outcomes};
pub use image::{Image, ImageStatus, Visibility};
pub use instance::{Assigned, CopyOf, ImageRef, Instance, OF_INSTANCE, OF_VOLUME, Spec};
pub use node::{Alive, Node, SharedStorage, Trouble, TroubleKind};
pub use power::{GRACE_SECONDS, Power, PowerWish, Restart};
pub use rebuild::{Rebuild, Rebuilt};
pub use request::{Desired, Handover, Request};
pub use rescue::{Rescue, Rescued};
pub use resize::{Extent, Resize, Resized, Resources, Size, greater};
pub use status::{Address, AddressSource, BEING_COPIED, Progress, State, Status};
pub use token::{Token, token_digest};
pub use volume::{Attachment, Workload};

/// The most user-data one instance may have, in bytes, before encoding.
pub const USER_DATA_MAX: usize = 64 * 1024;

/// A record that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Not the JSON that belongs there.
    #[error("not a valid {what} record: {detail}")]
    Malformed {
        /// Which kind of record was expected.
        what: &'static str,
        /// What the JSON reader says.
        detail: String,
    },
    /// Written by a later release than this one.
    #[error("{what} record has version {found}, this program reads up to {reads}: update it")]
    TooNew {
        /// Which kind of record it is.
        what: &'static str,
        /// The format found.
        found: u32,
        /// The last format that this release knows.
        reads: u32,
    },
}

/// A kind of record.
pub trait Record: DeserializeOwned + Serialize {
    /// What messages call it, and [`Alive::formats`].
    const WHAT: &'static str;
    /// The last format that this release reads, and writes.
    const FORMAT: u32;

    /// The format that this one needs: where an earlier one holds all of it, who reads no later can have it, too.
    fn format(&self) -> u32 {
        Self::FORMAT
    }
}

impl Record for Instance {
    const WHAT: &'static str = "instance";
    /// The second has volumes.
    const FORMAT: u32 = 2;

    fn format(&self) -> u32 {
        if self.kind.is_machine() && self.volumes.is_empty() { 1 } else { 2 }
    }
}

impl Record for Request {
    const WHAT: &'static str = "request";
    /// The second has images of an image store, and SHA-512; the third has volumes; the fourth has them move.
    const FORMAT: u32 = 4;

    fn format(&self) -> u32 {
        if self.handover.is_some() {
            return 4;
        }
        if !self.kind.is_machine() || !self.volumes.is_empty() {
            return 3;
        }
        let images =
            self.spec.iter().map(|spec| &spec.image).chain(self.rescue.iter().map(|wish| &wish.image));
        images.map(ImageRef::format).max().unwrap_or(1)
    }
}

impl Record for Status {
    const WHAT: &'static str = "status";
    const FORMAT: u32 = 1;
}

impl Record for Node {
    const WHAT: &'static str = "node";
    const FORMAT: u32 = 1;
}

impl Record for Alive {
    const WHAT: &'static str = "sign of life";
    const FORMAT: u32 = 1;
}

impl Record for Actions {
    const WHAT: &'static str = "actions";
    const FORMAT: u32 = 1;
}

impl Record for Outcomes {
    const WHAT: &'static str = "outcomes";
    const FORMAT: u32 = 1;
}

impl Record for Flavor {
    const WHAT: &'static str = "flavor";
    const FORMAT: u32 = 1;
}

impl Record for Group {
    const WHAT: &'static str = "group";
    const FORMAT: u32 = 1;
}

impl Record for Image {
    const WHAT: &'static str = "image";
    const FORMAT: u32 = 1;
}

impl Record for Keypair {
    const WHAT: &'static str = "keypair";
    const FORMAT: u32 = 1;
}

impl Record for Held {
    const WHAT: &'static str = "held";
    const FORMAT: u32 = 1;
}

impl Record for Token {
    const WHAT: &'static str = "token";
    const FORMAT: u32 = 1;
}

/// What every record says, whichever release wrote it.
#[derive(Deserialize)]
#[serde(expecting = "an object with a `version`")]
struct Version {
    version: u32,
}

#[derive(Serialize)]
struct Written<'a, R> {
    version: u32,
    #[serde(flatten)]
    record: &'a R,
}

/// The version of a record that begins with it, as what is written here does, without a look at the rest.
fn first_version(value: &[u8]) -> Option<u32> {
    let after = value.strip_prefix(br#"{"version":"#)?;
    serde_json::Deserializer::from_slice(after).into_iter().next()?.ok()
}

/// What is wrong with a record and where; of what it holds in a wrong place, which may be of any size and a secret, only the beginning.
fn in_short(error: &serde_json::Error) -> String {
    const ENDS: usize = 60;
    let text: Vec<char> = error.to_string().chars().collect();
    if text.len() <= 3 * ENDS {
        return text.into_iter().collect();
    }
    let (first, last) = (&text[..ENDS], &text[text.len() - ENDS..]);
    first.iter().chain(&['…']).chain(last).collect()
}

/// Reads a record from the value of its key.
pub fn decode<R: Record>(value: &[u8]) -> Result<R, RecordError> {
    decode_part::<R, R>(value)
}

/// Reads what `P` has of a record: most of what a look at thousands costs is what it has no use for.
pub fn decode_part<R: Record, P: DeserializeOwned>(value: &[u8]) -> Result<P, RecordError> {
    let malformed =
        |error: serde_json::Error| RecordError::Malformed { what: R::WHAT, detail: in_short(&error) };
    // Before the rest: a later release may have other fields, and then its format explains more than the first of them.
    let version = match first_version(value) {
        Some(version) => version,
        None => serde_json::from_slice::<Version>(value).map_err(malformed)?.version,
    };
    if version > R::FORMAT {
        return Err(RecordError::TooNew { what: R::WHAT, found: version, reads: R::FORMAT });
    }
    serde_json::from_slice(value).map_err(malformed)
}

/// Writes a record as the value of its key.
pub fn encode<R: Record>(record: &R) -> Vec<u8> {
    // Every record is maps with string keys, numbers and strings: serde_json cannot fail on it.
    serde_json::to_vec(&Written { version: record.format(), record }).unwrap_or_default()
}

/// A record that is read to be changed: what it holds beside what this release knows stays in it.
#[derive(Debug, Clone)]
pub struct Doc<R> {
    raw: Value,
    read: Value,
    /// The record, to change.
    pub record: R,
}

impl<R: Record> Doc<R> {
    /// Reads the value of its key.
    ///
    /// # Errors
    /// As [`decode`].
    pub fn decode(value: &[u8]) -> Result<Self, RecordError> {
        let record = decode::<R>(value)?;
        let raw = serde_json::from_slice(value)
            .map_err(|error| RecordError::Malformed { what: R::WHAT, detail: in_short(&error) })?;
        Ok(Self { raw, read: plain(&record), record })
    }

    /// A new one.
    pub fn new(record: R) -> Self {
        let raw =
            serde_json::to_value(Written { version: record.format(), record: &record }).unwrap_or_default();
        Self { raw, read: plain(&record), record }
    }

    /// All that it was read from.
    pub(crate) fn into_value(self) -> Value {
        self.raw
    }

    /// The new value of its key.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = self.raw.clone();
        take_over(&mut value, &self.read, &plain(&self.record));
        // It comes first.
        if let Value::Object(fields) = &mut value {
            fields.remove("version");
        }
        serde_json::to_vec(&Written { version: self.record.format(), record: &value }).unwrap_or_default()
    }
}

fn plain<R: Record>(record: &R) -> Value {
    serde_json::to_value(record).unwrap_or_default()
}

/// Makes the differences between `old` and `new` in `value`; of objects only what differs, and of lists only what was not in them.
fn take_over(value: &mut Value, old: &Value, new: &Value) {
    if old == new {
        return;
    }
    if let (Value::Array(items), Value::Array(old), Value::Array(new)) = (&mut *value, old, new)
        && items.len() == old.len()
    {
        *items = taken_over(std::mem::take(items), old, new);
        return;
    }
    let (Value::Object(fields), Value::Object(old), Value::Object(new)) = (&mut *value, old, new) else {
        *value = new.clone();
        return;
    };
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        fields.remove(name);
    }
    for (name, new) in new {
        let none = || if new.is_object() { Value::Object(Map::new()) } else { Value::Null };
        let was = old.get(name).cloned().unwrap_or_else(none);
        take_over(fields.entry(name).or_insert_with(|| was.clone()), &was, new);
    }
}

/// The list `new`, of which each that is equal to one of `old` is as that was in `items`; each of these is taken once.
fn taken_over(items: Vec<Value>, old: &[Value], new: &[Value]) -> Vec<Value> {
    let mut left: Vec<(&Value, Value)> = old.iter().zip(items).collect();
    let mut take = |new: &Value| {
        let place = left.iter().position(|(old, _)| *old == new)?;
        Some(left.remove(place).1)
    };
    new.iter().map(|new| take(new).unwrap_or_else(|| new.clone())).collect()
}

/// Bytes that travel as base64 in JSON.
#[derive(Clone, PartialEq, Eq)]
pub struct Blob(pub Vec<u8>);

impl fmt::Debug for Blob {
    // User-data holds secrets; logs must not.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blob({} bytes)", self.0.len())
    }
}

impl Serialize for Blob {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64_STANDARD.decode(text).map(Self).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests;

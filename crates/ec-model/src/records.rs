//! The records that lie in etcd, as JSON. Readers ignore fields they do not know, so that agents and
//! tools one version apart understand each other; a record of a newer major `version` is refused.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use base64::{Engine, prelude::BASE64_STANDARD};
use jiff::Timestamp;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{InstanceId, MacAddr, NodeId};

/// The version written into every record.
pub const RECORD_VERSION: u32 = 1;

/// The most user-data one instance may have, in bytes, before encoding.
pub const USER_DATA_MAX: usize = 64 * 1024;

/// Amounts by resource class, as allocated: `VCPU` in processors, `MEMORY_MB` in MiB, `DISK_GB` in GiB.
pub type Resources = BTreeMap<String, u64>;

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
    #[error("{what} record has version {found}, this program reads up to {RECORD_VERSION}: update it")]
    TooNew {
        /// Which kind of record it is.
        what: &'static str,
        /// The version found.
        found: u32,
    },
}

/// A record with a name and a version.
pub trait Record: DeserializeOwned + Serialize {
    /// What messages call it.
    const WHAT: &'static str;
    /// The version it was written with.
    fn version(&self) -> u32;
}

/// Reads a record from the value of its key.
pub fn decode<R: Record>(value: &[u8]) -> Result<R, RecordError> {
    let too_new = |found| RecordError::TooNew { what: R::WHAT, found };
    let record: R = serde_json::from_slice(value).map_err(|error| {
        // A later release may have other fields: what it says of its version explains more than the first of them.
        match serde_json::from_slice::<Versioned>(value) {
            Ok(Versioned { version }) if version > RECORD_VERSION => too_new(version),
            _ => RecordError::Malformed { what: R::WHAT, detail: error.to_string() },
        }
    })?;
    if record.version() > RECORD_VERSION {
        return Err(too_new(record.version()));
    }
    Ok(record)
}

/// What every record says, whichever release wrote it.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Writes a record as the value of its key.
pub fn encode<R: Record>(record: &R) -> Vec<u8> {
    // Every record is maps with string keys, numbers and strings: serde_json cannot fail on it.
    serde_json::to_vec(record).unwrap_or_default()
}

macro_rules! record {
    ($type:ty, $what:literal) => {
        impl Record for $type {
            const WHAT: &'static str = $what;
            fn version(&self) -> u32 {
                self.version
            }
        }
    };
}
record!(Request, "request");
record!(Status, "status");
record!(NodeRecord, "node");
record!(IndexEntry, "index");

/// What shall be of an instance. Written by control tools only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// See [`RECORD_VERSION`].
    pub version: u32,
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// What shall be.
    pub desired: Desired,
    /// The guest's hostname; where there is none, one is made from the instance's uuid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What was claimed, for readers; the agent builds from the allocation itself.
    #[serde(default)]
    pub resources: Resources,
    /// What to boot. A request to destroy needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageRef>,
    /// Public keys in OpenSSH's form, for the guest's metadata.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
    /// How many bytes of user-data lie under [`crate::Keyspace::user_data`]; nothing where there is none. Apart,
    /// so that whoever lists requests does not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_bytes: Option<u64>,
    /// Whether the metadata service answers this guest only with a token (as EC2's IMDSv2 where it is required).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub token_required: bool,
    /// The project that the allocation is accounted to.
    #[serde(default)]
    pub project: String,
    /// The user that the allocation is accounted to.
    #[serde(default)]
    pub user: String,
    /// When the instance was asked for.
    pub created_at: Timestamp,
}

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Desired {
    /// Built, started, with an address.
    Active,
    /// Gone, with everything that belonged to it.
    Destroyed,
}

/// Where a disk's content comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRef {
    /// `http://`, `https://` or `file://`.
    pub url: String,
    /// The content's SHA-256, in hex, where the user demands one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
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

/// Where an instance stands. The life: `SCHEDULED → PREPARING → STARTING → ACTIVE`, `STOPPED` when the
/// guest has ended by itself, `DESTROYING` until its keys are gone, `ERROR` with a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// Seen by the agent, not begun.
    Scheduled,
    /// Image and overlay are being made.
    Preparing,
    /// The domain is defined, or runs and has no address yet.
    Starting,
    /// The domain runs and has its address.
    Active,
    /// The domain is there and its processors are halted: by hand, by an I/O error, by a full disk of the host.
    Paused,
    /// The domain is there and does not run.
    Stopped,
    /// Being taken apart.
    Destroying,
    /// Failed; the reason says why.
    Error,
    /// A guest of ours that no request speaks of: etcd was restored to a time before it. It runs on and is counted.
    Unclaimed,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Scheduled => "SCHEDULED",
            Self::Preparing => "PREPARING",
            Self::Starting => "STARTING",
            Self::Active => "ACTIVE",
            Self::Paused => "PAUSED",
            Self::Stopped => "STOPPED",
            Self::Destroying => "DESTROYING",
            Self::Error => "ERROR",
            Self::Unclaimed => "UNCLAIMED",
        })
    }
}

/// What is of an instance. Written by its node's agent only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// See [`RECORD_VERSION`].
    pub version: u32,
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// The node, as in the key.
    pub node: NodeId,
    /// Where it stands.
    pub state: State,
    /// Why, where the state needs a reason: always with `ERROR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How far a long step is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The first address of the first interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// Every address known, of every interface.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Address>,
    /// The guest's hostname.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The end of the guest's console, with an error that came after its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<String>,
    /// When the state was entered.
    pub since: Timestamp,
    /// When the domain was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// When this record was written.
    pub updated_at: Timestamp,
}

/// How far a long step is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What is under way: `image`.
    pub step: String,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

impl Progress {
    /// Percent done, where the whole is known.
    pub fn percent(&self) -> Option<u64> {
        self.total.filter(|total| *total > 0).map(|total| (self.done.min(total)) * 100 / total)
    }
}

/// One address of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// The interface it belongs to.
    pub mac: MacAddr,
    /// Number of the interface: 0 on the network, 1 on the bridge.
    pub nic: u8,
    /// How it became known.
    pub source: AddressSource,
}

/// How an address became known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressSource {
    /// A DHCP lease of the libvirt network.
    Lease,
    /// The host's neighbour table.
    Arp,
    /// The guest agent.
    Agent,
}

/// A living agent. The key is on a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// See [`RECORD_VERSION`].
    pub version: u32,
    /// The node, as in the key; its resource provider's uuid.
    pub node: NodeId,
    /// Its resource provider's name.
    pub name: String,
    /// The release of the agent.
    pub agent: String,
    /// How guests run: `kvm` or `qemu` (emulated).
    pub virt_type: String,
    /// The machine it runs on (machine-id(5)), hashed with the state directory: two agents with one uuid differ in it.
    #[serde(default)]
    pub machine: String,
    /// That machine's hostname, for messages.
    #[serde(default)]
    pub host: String,
    /// When the agent came up.
    pub started_at: Timestamp,
}

/// That an instance was asked for, and where it lives. Written by control tools only: before anything is
/// claimed, so that a claim without a request is known as ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexEntry {
    /// See [`RECORD_VERSION`].
    pub version: u32,
    /// The node under whose prefixes its request and status lie; none while it is being placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The project within which its name is its own.
    #[serde(default)]
    pub project: String,
    /// When it was asked for.
    pub created_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request() -> Request {
        Request {
            version: RECORD_VERSION,
            instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
            desired: Desired::Active,
            name: Some("web".into()),
            resources: [("VCPU".into(), 1)].into(),
            image: Some(ImageRef { url: "file:///x".into(), sha256: None }),
            keys: vec!["ssh-ed25519 AAAA".into()],
            user_data_bytes: Some(3),
            token_required: false,
            project: "p".into(),
            user: "u".into(),
            created_at: Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_request_reads_back_as_written_and_user_data_hides_from_debug() {
        let request = request();
        assert_eq!(decode::<Request>(&encode(&request)).unwrap(), request);
        assert_eq!(format!("{:?}", Blob(vec![0, 255, 10])), "Blob(3 bytes)");
    }

    #[test]
    fn unknown_fields_are_ignored_and_a_newer_version_is_refused() {
        let mut json: serde_json::Value = serde_json::from_slice(&encode(&request())).unwrap();
        json["later"] = 1.into();
        assert!(decode::<Request>(json.to_string().as_bytes()).is_ok());
        json["version"] = 2.into();
        let error = decode::<Request>(json.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn a_newer_record_without_the_fields_of_today_is_told_as_newer() {
        let error = decode::<Request>(br#"{"version":99,"of":"tomorrow"}"#).unwrap_err().to_string();
        assert!(error.contains("version 99"), "{error}");
        let error = decode::<Request>(br#"{"version":1,"of":"today"}"#).unwrap_err().to_string();
        assert!(error.contains("not a valid request record"), "{error}");
    }

    proptest! {
        #[test]
        fn no_value_makes_a_reader_panic(value: Vec<u8>) {
            let _ = decode::<Request>(&value);
            let _ = decode::<Status>(&value);
            let _ = decode::<NodeRecord>(&value);
            let _ = decode::<IndexEntry>(&value);
        }

        #[test]
        fn any_bytes_survive_the_json(bytes: Vec<u8>) {
            let json = serde_json::to_vec(&Blob(bytes.clone())).unwrap();
            prop_assert_eq!(serde_json::from_slice::<Blob>(&json).unwrap(), Blob(bytes));
        }
    }
}

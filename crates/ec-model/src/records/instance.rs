//! What users want, and where it is.

use std::{collections::BTreeMap, fmt};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use super::{Attachment, Extent, PowerWish, Resources, Restart, Workload, volume::fingerprint};
use crate::{ImageId, InstanceId, NodeId, RequestId, request_id::overlooked};

/// The intent: an instance that somebody wants, and where it is. Written by control tools only: before anything is
/// claimed, so that a claim without a request is known as ours; gone with the wish to destroy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// What kind of workload it is.
    #[serde(default, skip_serializing_if = "Workload::is_machine")]
    pub kind: Workload,
    /// The project that it is accounted to, and within which its name is its own.
    #[serde(default)]
    pub project: String,
    /// The user that it is accounted to.
    #[serde(default)]
    pub user: String,
    /// Its name; where there is none, one is made from its uuid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What users tell it apart by; nothing of ours depends on them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The [`crate::Group`] of its project that it is a member of, once it is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// What it shall be.
    pub spec: Spec,
    /// Where its disk is a copy, the image that the copied disk was made of, as far as that was known: it tells whom its guest lets in.
    /// Nothing else hangs on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_of: Option<ImageRef>,
    /// Whether and how it shall run.
    #[serde(default)]
    pub power: PowerWish,
    /// What follows when it ends without anybody's wish.
    #[serde(default)]
    pub restart: Restart,
    /// What it was before a resize that is neither confirmed nor reverted; none where there is no such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Extent>,
    /// The volumes that it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Attachment>,
    /// Of a volume, the machine that has it, or had it last: it has it no more where that does not say so itself, nor tells
    /// of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached: Option<InstanceId>,
    /// Nothing is done to it but to unlock it; why, in its user's words, which may be none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<String>,
    /// Where it is: the only truth of that. None while it is being placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<Assigned>,
    /// Counts the changes of what is wanted, from 1 on.
    pub generation: u64,
    /// Of the command that wrote what is wanted last, also where nothing is placed yet. None of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "overlooked")]
    pub request_id: Option<RequestId>,
    /// When it was asked for.
    pub created_at: Timestamp,
}

impl Instance {
    /// The image that its own disk was made of first, as far as it tells.
    pub fn image(&self) -> Option<&ImageRef> {
        let of_copied = self.made_of.as_ref().filter(|_| self.spec.image.copied().is_some());
        of_copied.or_else(|| Some(&self.spec.image).filter(|of| !of.is_none() && of.copied().is_none()))
    }

    /// The node under whose prefixes its request and status lie.
    pub fn node(&self) -> Option<NodeId> {
        self.assigned.map(|assigned| assigned.node)
    }
}

/// Where an instance is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assigned {
    /// The node.
    pub node: NodeId,
    /// Which placement of the instance: of the first 1, of a later one more, and at least the seconds since 1970 then, which no etcd that was
    /// put back repeats. Whatever speaks of another epoch speaks of another life.
    pub epoch: u64,
}

/// What an instance shall be, as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The placement query as it was asked, so that the instance can be placed again by its own conditions.
    pub query: String,
    /// What the query asks for in all. The agent builds from the allocation itself.
    #[serde(default)]
    pub resources: Resources,
    /// What to boot; what a volume is made of, where that is an image.
    #[serde(default, skip_serializing_if = "ImageRef::is_none")]
    pub image: ImageRef,
    /// Public keys in OpenSSH's form, for the guest's metadata.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
    /// What the guest is told of itself in its user's words, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// How many bytes of user-data lie under [`crate::Keyspace::user_data`]; nothing where there is none. Apart,
    /// so that whoever lists requests does not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_bytes: Option<u64>,
    /// Whether the metadata service answers this guest only with a token (as EC2's IMDSv2 where it is required).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub token_required: bool,
    /// Whether it is a snapshot: a volume that stays as it was made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub snapshot: bool,
}

impl Spec {
    /// Whether it is a volume that stays as it was made. That of several disks was one before there was a word for it.
    pub fn is_snapshot(&self) -> bool {
        self.snapshot || self.image.is_of_several()
    }
}

/// What the URL of a copy begins with, before the uuid of the disk.
pub const OF_VOLUME: &str = "volume:";
/// The same for an instance's own disk.
pub const OF_INSTANCE: &str = "instance:";

/// What a disk is a copy of.
///
/// ```text
///   instance:A            the disk of machine A               volume:V      the disk of volume V
///   instance:A+V+W        a snapshot: A's own, V and W, of one moment; V and W are among the volumes that A has
///   volume:S/V            of snapshot S, the copy of V that it has beside its first
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOf {
    /// What kind of workload the disk is of.
    pub kind: Workload,
    /// The disk.
    pub disk: InstanceId,
    /// Which of the disks in a snapshot; its first where this is none.
    pub held: Option<InstanceId>,
    /// The volumes that are copied at the same moment, and lie beside the copy.
    pub beside: Vec<InstanceId>,
}

impl CopyOf {
    /// Of one disk that is there.
    pub const fn disk(kind: Workload, disk: InstanceId) -> Self {
        Self { kind, disk, held: None, beside: Vec::new() }
    }

    /// Tells one set of copied disks from another within one process; 0 of none.
    pub fn fingerprint(disks: &[InstanceId]) -> u64 {
        fingerprint(disks)
    }

    fn parse(url: &str) -> Option<Self> {
        if let Some(volume) = url.strip_prefix(OF_VOLUME) {
            let (volume, held) = match volume.split_once('/') {
                Some((volume, held)) => (volume, Some(held.parse().ok()?)),
                None => (volume, None),
            };
            return Some(Self { held, ..Self::disk(Workload::Volume, volume.parse().ok()?) });
        }
        let mut disks = url.strip_prefix(OF_INSTANCE)?.split('+').map(|disk| disk.parse().ok());
        let disk = disks.next()??;
        Some(Self { beside: disks.collect::<Option<_>>()?, ..Self::disk(Workload::Machine, disk) })
    }
}

impl fmt::Display for CopyOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.kind {
            Workload::Machine => OF_INSTANCE,
            Workload::Volume => OF_VOLUME,
        };
        write!(f, "{scheme}{}", self.disk)?;
        self.beside.iter().try_for_each(|volume| write!(f, "+{volume}"))?;
        self.held.map_or(Ok(()), |held| write!(f, "/{held}"))
    }
}

/// Where a disk's content comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRef {
    /// `http://`, `https://` or `file://`; `s3://` of an image store; or what it is a copy of ([`CopyOf`]).
    pub url: String,
    /// The content's SHA-256, in hex, where the user or the image's record demands one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Its SHA-512, in the same way: some publish no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha512: Option<String>,
    /// Which image of the catalogue it was asked for by. Nothing hangs on it: the image may be gone by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<ImageId>,
    /// What that was called then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ImageRef {
    /// Whether it is none: a volume may be empty.
    pub fn is_none(&self) -> bool {
        self.url.is_empty()
    }

    /// What lies at a URL, whatever it is.
    pub fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }

    /// Its URL as people and logs may have it: without user, password, fragment and the values of its query, which may be a
    /// signature.
    pub fn told(&self) -> String {
        let Ok(mut url) = Url::parse(&self.url) else {
            // What does not parse may hold a password all the same.
            return match self.url.contains('@') {
                true => "(not shown: it has an `@`)".to_owned(),
                false => self.url.chars().take_while(|c| *c != '?').take(120).collect(),
            };
        };
        // Both fail only for URLs that cannot have a user.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.set_fragment(None);
        let query = url.query().is_some();
        url.set_query(None);
        if query { format!("{url}?…") } else { url.into() }
    }

    /// A copy of other disks of its node.
    pub fn copy_of(copied: &CopyOf) -> Self {
        Self::at(copied.to_string())
    }

    /// What it is a copy of.
    pub fn copied(&self) -> Option<CopyOf> {
        CopyOf::parse(&self.url)
    }

    /// Whether it is a snapshot of more than one disk.
    pub fn is_of_several(&self) -> bool {
        self.copied().is_some_and(|copied| !copied.beside.is_empty())
    }

    /// Whether both are the same content from the same place, by whatever name they were asked for.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.url, &self.sha256, &self.sha512) == (&other.url, &other.sha256, &other.sha512)
    }

    /// The format of a request that asks for it: an agent that reads only the first would overlook something of it, or
    /// not understand it.
    pub fn format(&self) -> u32 {
        match self {
            _ if self.copied().is_some() => 3,
            Self { sha512: Some(_), .. } => 2,
            _ if self.url.starts_with("s3://") => 2,
            _ => 1,
        }
    }
}

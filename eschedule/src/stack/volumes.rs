//! Volumes in a stack's file, and which instance has which.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use ec_model::{Attachment, OF_INSTANCE, OF_VOLUME};
use ec_runtime::exit::Failure;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

use super::{
    Count, Entry, InstanceEntry, LABELS, Place, Source, Stack, numbered, once_each,
    schema::without_nulls,
    texts::{AnyText, Digest, HostName, LABEL_KEY, LabelKey, Word, keys},
    too_many_labels,
};

/// What a copy of a disk begins with, as editors are told.
const COPY: &str = "^(volume|instance):";

/// One volume, or several that are alike.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = without_nulls, extend(
    "anyOf" = [{"required": ["size"]}, {"required": ["image"], "properties": {"image": {"pattern": COPY}}}],
    "if" = {"required": ["sha256"]},
    "then" = {"required": ["image"], "properties": {"image": {"not": {"pattern": COPY}}}}
))]
pub(crate) struct VolumeEntry {
    /// So many, called by the name and a number from 1 on; without it one, called by the name alone.
    #[serde(default)]
    #[schemars(with = "Count")]
    pub(crate) count: Option<Count>,
    /// How large, in GiB. It may grow, and never shrinks; without it, as large as what it is a copy of.
    #[serde(default)]
    #[schemars(with = "Gigabytes")]
    pub(crate) size: Option<Gigabytes>,
    /// What it is made of: an image's name or URL, or as a copy `volume:NAME` or `instance:NAME`; without it, it is
    /// empty. A volume keeps what it was made with.
    #[serde(default)]
    #[schemars(with = "AnyText")]
    pub(crate) image: Option<String>,
    /// The SHA-256 that the image must have, in hex.
    #[serde(default)]
    #[schemars(with = "Digest")]
    pub(crate) sha256: Option<Digest>,
    /// What each has for labels, beside that of the stack.
    #[serde(default, deserialize_with = "once_each")]
    #[schemars(extend("propertyNames" = keys(LABEL_KEY), "maxProperties" = LABELS))]
    pub(crate) labels: BTreeMap<LabelKey, Word>,
}

impl Entry for VolumeEntry {
    const SUCH_AS: &str = "keys with values, as `size: 10`";

    fn mistake(&self) -> Option<Cow<'static, str>> {
        if self.size.is_none() && !self.image.as_deref().is_some_and(is_copy) {
            return Some(
                "wanted `size`, in GiB; only a copy, of `image: volume:NAME` or `instance:NAME`, is as large as what it is of"
                    .into(),
            );
        }
        if self.sha256.is_some() && self.image.as_deref().is_none_or(is_copy) {
            return Some(
                "`sha256` goes with an image: nobody knows a digest of an empty disk, or of a copy".into(),
            );
        }
        too_many_labels(self.labels.len())
    }
}

/// Whether what it is made of is another disk.
fn is_copy(image: &str) -> bool {
    image.starts_with(OF_VOLUME) || image.starts_with(OF_INSTANCE)
}

/// So much of a class placement counts: its tables have 32 bits with a sign.
const GIGABYTES_MAX: u64 = i32::MAX as u64;

/// How large, in GiB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gigabytes(pub(crate) u64);

/// Checked while its reader knows where it stands.
struct FromOne;

impl Visitor<'_> for FromOne {
    type Value = Gigabytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of GiB")
    }

    fn visit_u64<E: Error>(self, size: u64) -> Result<Gigabytes, E> {
        match size {
            0 => Err(E::custom("0 GB are too few: a volume has at least 1")),
            size if size > GIGABYTES_MAX => {
                Err(E::custom(format!("{size} GB are too many: a volume has {GIGABYTES_MAX} at most")))
            }
            size => Ok(Gigabytes(size)),
        }
    }
}

impl<'de> Deserialize<'de> for Gigabytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_u64(FromOne)
    }
}

impl JsonSchema for Gigabytes {
    fn schema_name() -> Cow<'static, str> {
        "Gigabytes".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": 1, "maximum": GIGABYTES_MAX})
    }
}

/// A volume of the file.
pub(crate) struct NamedVolume<'a> {
    /// What it is called.
    pub(crate) name: String,
    /// Which entry says it.
    pub(crate) entry: &'a str,
    /// What that says.
    pub(crate) says: &'a VolumeEntry,
    /// What the instance is called that has it.
    pub(crate) holder: Option<String>,
    /// Which of those that the instance has it is: guests find them in that order.
    pub(crate) place: usize,
    /// Whether that boots from it.
    pub(crate) boots: bool,
}

impl Stack {
    /// Each volume by its name.
    pub(crate) fn named_volumes(&self) -> impl Iterator<Item = NamedVolume<'_>> {
        let holders = self.holders();
        self.volumes.iter().flat_map(move |(HostName(entry), says)| {
            let holder = holders.get(&entry.to_ascii_lowercase()).copied();
            let boots = holder.is_some_and(|(_, says, _)| boots_from(entry, says));
            numbered(entry, says.count).map(move |(number, name)| {
                let place = holder.map_or(0, |(.., place)| place);
                let holder = holder.and_then(|(holder, says, _)| match (number, says.count) {
                    (None, _) => Some(holder.clone()),
                    (Some(number), Some(Count(count))) => {
                        (number <= count).then(|| format!("{holder}-{number}"))
                    }
                    (Some(_), None) => None,
                });
                NamedVolume { name, entry, says, holder, place, boots }
            })
        })
    }

    /// Which entry has which volume, by that's name in small letters, and which of its volumes that is: the first that says so.
    fn holders(&self) -> BTreeMap<String, (&String, &InstanceEntry, usize)> {
        let mut holders = BTreeMap::new();
        for (HostName(name), says) in &self.instances {
            let listed = says.volumes.iter().zip(0..);
            for (HostName(volume), place) in listed.chain(says.boot.iter().map(|volume| (volume, 0))) {
                holders.entry(volume.to_ascii_lowercase()).or_insert((name, says, place));
            }
        }
        holders
    }

    /// That each volume that an instance has is there, and is no other's.
    pub(super) fn check_volumes(&self, source: &Source) -> Result<(), Failure> {
        let mut holders: BTreeMap<String, &str> = BTreeMap::new();
        // Of two that differ in the case of letters alone the first.
        let volumes = self.volumes.iter().rev();
        let volumes: BTreeMap<String, (&String, &VolumeEntry)> =
            volumes.map(|(name, says)| (name.0.to_ascii_lowercase(), (&name.0, says))).collect();
        for (HostName(entry), says) in &self.instances {
            let place = Place::of(&["instances", entry, "volumes"]);
            let count = says.volumes.len() + usize::from(says.boot.is_some());
            if count > Attachment::MOST {
                let why = format!("{count} volumes are more than {}", Attachment::MOST);
                return Err(source.wrong(&place, Failure::usage(why)));
            }
            let boot = Place::of(&["instances", entry, "boot"]);
            let listed = says.volumes.iter().enumerate();
            let listed = listed.map(|(number, name)| (place.clone().item(number), name));
            for (place, HostName(name)) in says.boot.iter().map(|name| (boot.clone(), name)).chain(listed) {
                let wrong = |why| source.wrong(&place, Failure::usage(why));
                let Some((name, volume)) = volumes.get(&name.to_ascii_lowercase()).copied() else {
                    return Err(wrong(format!("the file has no volume `{name}`")));
                };
                if let Some(other) = holders.insert(name.to_ascii_lowercase(), entry) {
                    return Err(wrong(format!(
                        "`{other}` has `{name}` already, and one instance has it at a time"
                    )));
                }
                if let Some(why) = each_its_own(name, volume.count, entry, says.count) {
                    return Err(wrong(why));
                }
            }
        }
        Ok(())
    }
}

fn boots_from(volume: &str, instance: &InstanceEntry) -> bool {
    instance.boot.as_ref().is_some_and(|name| name.0.eq_ignore_ascii_case(volume))
}

/// Why not each of so many instances has one of so many volumes. There may be more volumes: those of instances that go stay.
fn each_its_own(
    volume: &str,
    volumes: Option<Count>,
    instance: &str,
    instances: Option<Count>,
) -> Option<String> {
    match (volumes, instances) {
        (None, Some(Count(1))) => Some(format!(
            "`{volume}` has no `count`, and `{instance}` has one: give it a `count` of 1, or leave out both"
        )),
        (None, Some(Count(count))) => Some(format!(
            "`{volume}` is one volume, and `{instance}` are several instances: give it a `count` of {count} or more"
        )),
        (Some(_), None) => Some(format!(
            "`{volume}` are several volumes, and `{instance}` is one instance: leave out one `count`, or give it both"
        )),
        (Some(Count(volumes)), Some(Count(count))) if volumes < count => {
            Some(format!("`{volume}` are {volumes} volumes, and `{instance}` are {count} instances"))
        }
        _ => None,
    }
}

//! A stack's file: its form, of which docs/stack.schema.json is made, and what it says of each instance.

mod filled;
mod once;
mod place;
mod schema;
mod texts;
mod volumes;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fmt,
    io::Read,
    marker::PhantomData,
    path::{Path, PathBuf},
};

use ec_cloud::nameable;
use ec_model::{Attachment, input};
use ec_runtime::{
    config::{parse, without_mark},
    exit::Failure,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error, MapAccess, Visitor, value::MapAccessDeserializer},
};

use crate::{
    catalog::Placing,
    cli::Policy,
    spec::{is_stdin, opened},
};
use filled::Filled;
use once::{Once, once_each};
pub(crate) use place::{Place, Source};
pub(crate) use schema::schema;
use schema::without_nulls;
pub(crate) use texts::HostName;
use texts::{
    AnyText, CATALOG_NAME, CatalogName, Digest, HOST_NAME, LABEL_KEY, LabelKey, METADATA_KEY, MetadataKey,
    Query, Word, keys,
};
pub(crate) use volumes::{NamedVolume, VolumeEntry};

/// So many instances one entry may make.
const MOST: u16 = 1000;

/// So many bytes a file may have.
const FILE_MAX: u64 = 1 << 20;

/// What a file says.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "A stack of etcd-compute")]
pub(crate) struct Stack {
    /// What the stack is called: its instances and volumes have the label `stack` with this value.
    pub(crate) stack: CatalogName,
    /// Groups of the project that there shall be, by their names.
    #[serde(default, deserialize_with = "whole_entries")]
    #[schemars(extend("propertyNames" = keys(CATALOG_NAME)))]
    pub(crate) groups: BTreeMap<CatalogName, GroupEntry>,
    /// Volumes that there shall be, by their names.
    #[serde(default, deserialize_with = "whole_entries")]
    #[schemars(extend("propertyNames" = keys(HOST_NAME)))]
    pub(crate) volumes: BTreeMap<HostName, VolumeEntry>,
    /// Instances that there shall be, by their names.
    #[serde(default, deserialize_with = "whole_entries")]
    #[schemars(extend("propertyNames" = keys(HOST_NAME)))]
    pub(crate) instances: BTreeMap<HostName, InstanceEntry>,
}

/// A group.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupEntry {
    /// Where its members may be.
    pub(crate) policy: Placing,
}

/// One instance, or several that are alike.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = without_nulls, extend(
    "oneOf" = [{"required": ["flavor"]}, {"required": ["query"]}],
    "if" = {"required": ["boot"]},
    "then" = {"properties": {"image": false, "sha256": false, "volumes": {"maxItems": Attachment::MOST - 1}}}
))]
pub(crate) struct InstanceEntry {
    /// So many, called by the name and a number from 1 on; without it one, called by the name alone.
    #[serde(default)]
    #[schemars(with = "Count")]
    pub(crate) count: Option<Count>,
    /// What room each takes: a flavor's name. Either this or `query`.
    #[serde(default)]
    #[schemars(with = "CatalogName")]
    pub(crate) flavor: Option<CatalogName>,
    /// What room each takes: a resources query.
    #[serde(default)]
    #[schemars(with = "Query")]
    pub(crate) query: Option<Query>,
    /// What to boot: a URL, the name of an image (of `images` in schedule.yaml, or of the catalogue), or a copy of the disk of
    /// `volume:NAME` or `instance:NAME`; without it the `image` of schedule.yaml.
    #[serde(default)]
    #[schemars(with = "AnyText")]
    pub(crate) image: Option<String>,
    /// The SHA-256 that the image must have, in hex.
    #[serde(default)]
    #[schemars(with = "Digest")]
    pub(crate) sha256: Option<Digest>,
    /// Which of the file's volumes it boots from, in the place of an image; of several instances, each from that of its own
    /// number. It has no disk of its own then, and keeps what it boots from.
    #[serde(default)]
    #[schemars(with = "HostName")]
    pub(crate) boot: Option<HostName>,
    /// Public ssh keys: keypairs' names, or files, seen from where this file is. An instance keeps what it was made with.
    #[serde(default)]
    #[schemars(with = "Vec<AnyText>", extend("maxItems" = input::KEYS_MAX))]
    pub(crate) keys: Vec<String>,
    /// A file given to the guest, seen from where this file is. An instance keeps what it was made with.
    #[serde(default)]
    #[schemars(with = "AnyText")]
    pub(crate) user_data: Option<PathBuf>,
    /// Whether each guest is given its metadata only with a session token; also without it where `defaults.require_token` of
    /// schedule.yaml says so. An instance keeps what it was made with.
    #[serde(default)]
    pub(crate) require_token: bool,
    /// The group that each is a member of.
    #[serde(default)]
    #[schemars(with = "CatalogName")]
    pub(crate) group: Option<CatalogName>,
    /// Which of the file's volumes it has; of several instances, each that of its own number.
    #[serde(default)]
    #[schemars(extend("maxItems" = Attachment::MOST, "uniqueItems" = true))]
    pub(crate) volumes: Vec<HostName>,
    /// What each has for labels, beside that of the stack.
    #[serde(default, deserialize_with = "once_each")]
    #[schemars(extend("propertyNames" = keys(LABEL_KEY), "maxProperties" = LABELS))]
    pub(crate) labels: BTreeMap<LabelKey, Word>,
    /// What each guest is told by its metadata service.
    #[serde(default, deserialize_with = "once_each")]
    #[schemars(extend("propertyNames" = keys(METADATA_KEY), "maxProperties" = input::METADATA_MAX))]
    pub(crate) metadata: BTreeMap<MetadataKey, Word>,
    /// What follows when a guest ends by itself.
    #[serde(default)]
    #[schemars(with = "Policy")]
    pub(crate) restart: Option<Policy>,
}

/// What can only be judged as a whole.
trait Entry: DeserializeOwned {
    /// How one begins, for whoever wrote something else.
    const SUCH_AS: &str;

    /// What is wrong with it.
    fn mistake(&self) -> Option<Cow<'static, str>>;
}

impl Entry for InstanceEntry {
    const SUCH_AS: &str = "keys with values, as `flavor: small`";

    fn mistake(&self) -> Option<Cow<'static, str>> {
        if self.boot.is_some() && (self.image.is_some() || self.sha256.is_some()) {
            return Some(
                "wanted either `boot` or `image`: what boots from a volume is made of no image".into(),
            );
        }
        let count = self.metadata.len();
        if count > input::METADATA_MAX {
            return Some(format!("{count} items of metadata are more than {}", input::METADATA_MAX).into());
        }
        let count = self.keys.len();
        if count > input::KEYS_MAX {
            return Some(format!("{count} keys are more than {}", input::KEYS_MAX).into());
        }
        too_many_labels(self.labels.len()).or_else(|| {
            (self.flavor.is_some() == self.query.is_some())
                .then_some("wanted either `flavor` or `query`".into())
        })
    }
}

impl Entry for GroupEntry {
    const SUCH_AS: &str = "keys with values, as `policy: affinity`";

    fn mistake(&self) -> Option<Cow<'static, str>> {
        None
    }
}

/// So many labels what is of a stack may have beside the stack's.
const LABELS: usize = input::LABELS_MAX - 1;

/// What is wrong with so many labels, beside that of the stack.
fn too_many_labels(count: usize) -> Option<Cow<'static, str>> {
    (count > LABELS).then(|| format!("{count} labels beside the stack's are more than {LABELS}").into())
}

/// One that is checked where its reader still knows its place.
struct Whole<E>(E);

impl<'de, E: Entry> Deserialize<'de> for Whole<E> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OfWhole(PhantomData))
    }
}

struct OfWhole<E>(PhantomData<E>);

impl<'de, E: Entry> Visitor<'de> for OfWhole<E> {
    type Value = Whole<E>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(E::SUCH_AS)
    }

    fn visit_map<A: MapAccess<'de>>(self, said: A) -> Result<Whole<E>, A::Error> {
        let entry = E::deserialize(MapAccessDeserializer::new(Once::of(said)))?;
        entry.mistake().map_or(Ok(Whole(entry)), |mistake| Err(A::Error::custom(mistake)))
    }
}

fn whole_entries<'de, D: Deserializer<'de>, K: Deserialize<'de> + Ord, E: Entry>(
    deserializer: D,
) -> Result<BTreeMap<K, E>, D::Error> {
    let whole: BTreeMap<K, Whole<E>> = once_each(deserializer)?;
    Ok(whole.into_iter().map(|(name, Whole(entry))| (name, entry)).collect())
}

/// How many.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count(pub(crate) u16);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let count = u64::deserialize(deserializer)?;
        let is_few = u16::try_from(count).ok().filter(|count| *count <= MOST);
        is_few.map(Self).ok_or_else(|| D::Error::custom(format!("{count} are more than {MOST}")))
    }
}

impl JsonSchema for Count {
    fn schema_name() -> Cow<'static, str> {
        "Count".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": 0, "maximum": MOST})
    }
}

/// Nothing where a file says nothing at all.
#[derive(Default)]
struct Said(Option<Stack>);

impl<'de> Deserialize<'de> for Said {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OfFile)
    }
}

struct OfFile;

impl<'de> Visitor<'de> for OfFile {
    type Value = Said;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys with values")
    }

    fn visit_unit<E>(self) -> Result<Said, E> {
        Ok(Said(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, said: A) -> Result<Said, A::Error> {
        Stack::deserialize(MapAccessDeserializer::new(Once::of(said))).map(|stack| Said(Some(stack)))
    }
}

impl Stack {
    /// Reads a file, or standard input where that is `-`; what it says, and how it says it.
    ///
    /// # Errors
    /// What is wrong, with line, column and key.
    pub(crate) fn read(file: &Path) -> Result<(Self, Source), Failure> {
        // What it names is seen from the current directory then.
        let path = if is_stdin(file) { Path::new("standard input") } else { file };
        let wrong = |why: String| Failure::usage(format!("{}: {why}", path.display()));
        let mut bytes = Vec::new();
        // Some files never end.
        opened(file)
            .and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes))
            .map_err(|error| wrong(format!("cannot be read: {error}")))?;
        if bytes.len() as u64 > FILE_MAX {
            return Err(wrong(format!("has more than the {FILE_MAX} bytes that a stack's file may have")));
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let before = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
            let (line, column) = (
                before.split('\n').count(),
                before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1,
            );
            Failure::usage(format!("{}:{line}:{column}: this is no text in UTF-8", path.display()))
        })?;
        let Filled = parse(&text, path)?;
        let said: Said = parse(&text, path)?;
        let stack = said
            .0
            .ok_or_else(|| wrong("it says nothing: wanted `stack: NAME` and `instances:`".to_owned()))?;
        let source = Source { path: path.to_owned(), text: without_mark(&text).to_owned() };
        stack.check(&source)?;
        Ok((stack, source))
    }

    /// What only shows with all of it read.
    fn check(&self, source: &Source) -> Result<(), Failure> {
        let instances = self.named().map(|(name, entry, _)| (name, entry));
        alone(instances, "an instance")
            .map_err(|(entry, why)| source.wrong(&Place::of(&["instances", entry]), Failure::usage(why)))?;
        let volumes = self.named_volumes().map(|volume| (volume.name, volume.entry));
        alone(volumes, "a volume")
            .map_err(|(entry, why)| source.wrong(&Place::of(&["volumes", entry]), Failure::usage(why)))?;
        // Which may be called otherwise than a host.
        let mut groups: Vec<&CatalogName> = self.groups.keys().collect();
        groups.sort_by_key(|CatalogName(name)| name.to_ascii_lowercase());
        if let Some([CatalogName(one), CatalogName(other)]) =
            groups.array_windows().find(|[one, other]| one.0.eq_ignore_ascii_case(&other.0))
        {
            let why = format!("`{other}` is the group `{one}`, too");
            return Err(source.wrong(&Place::of(&["groups", other]), Failure::usage(why)));
        }
        for volume in self.named_volumes() {
            nameable(&volume.name)
                .map_err(|error| source.wrong(&Place::of(&["volumes", volume.entry]), error.into()))?;
        }
        self.check_volumes(source)
    }

    /// Each instance by its name, with its entry and what that says.
    pub(crate) fn named(&self) -> impl Iterator<Item = (String, &str, &InstanceEntry)> {
        self.instances.iter().flat_map(|(HostName(entry), says)| {
            numbered(entry, says.count).map(move |(_, name)| (name, entry.as_str(), says))
        })
    }

    /// The entry that an instance of this name is of.
    pub(crate) fn entry_of(&self, name: &str) -> &str {
        self.named().find(|(called, ..)| called == name).map_or("", |(_, entry, _)| entry)
    }
}

/// The names that an entry makes, with their numbers where it has any.
fn numbered(entry: &str, count: Option<Count>) -> impl Iterator<Item = (Option<u16>, String)> + use<> {
    let names = match count {
        None => vec![(None, entry.to_owned())],
        Some(Count(count)) => (1..=count).map(|number| (Some(number), format!("{entry}-{number}"))).collect(),
    };
    names.into_iter()
}

/// That no two are called alike, and each can be; else which entry is wrong, and why.
fn alone<'a>(named: impl Iterator<Item = (String, &'a str)>, what: &str) -> Result<(), (&'a str, String)> {
    let mut names: BTreeMap<String, &str> = BTreeMap::new();
    for (name, entry) in named {
        match names.insert(name.to_ascii_lowercase(), entry) {
            Some(other) => return Err((entry, format!("`{name}` is {what} of `{other}`, too"))),
            None if input::is_hostname(&name) => {}
            None => return Err((entry, format!("`{name}` is no hostname: it is too long"))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(text: &str) -> Result<Stack, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.yaml");
        fs::write(&path, text).unwrap();
        let shown = path.display().to_string();
        let read = Stack::read(&path).map(|(stack, _)| stack);
        read.map_err(|failure| failure.message.replace(&shown, "s.yaml"))
    }

    #[test]
    fn an_entry_is_one_instance_or_so_many() {
        let text =
            "stack: shop\ninstances:\n  db: {flavor: big}\n  web: {count: 2, query: \"resources=VCPU:1\"}\n";
        let stack = read(text).unwrap();
        let names: Vec<String> = stack.named().map(|(name, ..)| name).collect();
        assert_eq!(names, ["db", "web-1", "web-2"]);
    }

    #[test]
    fn of_several_instances_each_has_the_volume_of_its_own_number() {
        let text = "stack: shop\nvolumes:\n  logs: {size: 1}\n  data: {size: 1, count: 3}\ninstances:\n  db: {flavor: big, volumes: [logs]}\n  web: {count: 2, flavor: big, volumes: [DATA]}\n";
        let stack = read(text).unwrap();
        let named: Vec<_> = stack.named_volumes().map(|volume| (volume.name, volume.holder)).collect();
        let has = |volume: &str, holder: &str| (volume.to_owned(), Some(holder.to_owned()));
        let wanted =
            [has("data-1", "web-1"), has("data-2", "web-2"), ("data-3".to_owned(), None), has("logs", "db")];
        assert_eq!(named, wanted);
    }

    #[test]
    fn what_is_no_text_is_told_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.yaml");
        fs::write(&path, b"stack: s\ninstances:\n  w\xc3\xa4: \xff\n").unwrap();
        let told = Stack::read(&path).map(|_| ()).unwrap_err().message;
        assert!(told.ends_with("s.yaml:3:7: this is no text in UTF-8"), "{told}");
    }

    #[test]
    fn mistakes_are_told_with_their_places_in_one_line() {
        let mut wrong = Vec::new();
        for (text, wanted) in [
            ("", "s.yaml: it says nothing"),
            ("instances: {}\n", "missing field `stack`"),
            ("stack: a/b\n", "s.yaml:1:8: stack: `a/b`: wanted 1 to 63"),
            (
                "stack: s\ninstances:\n  web: {flavour: x}\n",
                "s.yaml:3:9: instances.web: unknown key `flavour`; did you mean `flavor`?",
            ),
            ("stack: s\ninstances:\n  web: {count: many}\n", "s.yaml:3:16: instances.web.count"),
            ("stack: s\ninstances:\n  web: {count: 1001}\n", "1001 are more than 1000"),
            ("stack: s\ninstances:\n  web: {query: x}\n", "s.yaml:3:16: instances.web.query"),
            ("stack: s\ngroups:\n  g: {policy: near}\n", "s.yaml:3:15: groups.g.policy: unknown word `near`"),
            ("stack: s\ninstances:\n  web_1: {flavor: x}\n", "`web_1`: wanted letters"),
            ("stack: s\ninstances:\n  web: {flavor: x, labels: {\"a b\": c}}\n", "`a b`: wanted a key"),
            (
                "stack: s\ninstances:\n  a: {flavor: x}\n  web: {}\n",
                "s.yaml:4:8: instances.web: wanted either `flavor` or `query`",
            ),
            (
                "stack: s\ninstances:\n  web: 1\n",
                "s.yaml:3:8: instances.web: invalid type: integer `1`, wanted keys",
            ),
            ("- stack\n", "invalid type: sequence, wanted keys with values"),
            (
                "stack: s\ninstances:\n  web: {flavor: x, labels: {stack: c}}\n",
                "`stack`: the stack's name tells that",
            ),
            (
                "stack: s\ninstances:\n  web: {flavor: x}\n  web: {flavor: y}\n",
                "s.yaml:4:3: instances: `web` is there twice",
            ),
            (
                "stack: s\ninstances:\n  web: {flavor: x, labels: {a: b, a: c}}\n",
                "s.yaml:3:35: instances.web.labels: `a` is there twice",
            ),
            (
                "stack: s\ninstances:\n  web:\n    flavor: x\n    count: 1\n    flavor: y\n",
                "s.yaml:6:5: instances.web: `flavor` is there twice",
            ),
            (
                "stack: s\ninstances: {}\nvolumes: {}\ninstances: {}\n",
                "s.yaml:4:1: `instances` is there twice",
            ),
            (
                "stack: s\ngroups:\n  g: {policy: affinity, policy: affinity}\n",
                "s.yaml:3:25: groups.g: `policy` is there twice",
            ),
            (
                "stack: s\ngroups: {g: {policy: affinity}, g: {policy: affinity}}\n",
                "s.yaml:2:33: groups: `g`",
            ),
            ("stack: s\ninstances:\n", "s.yaml:2:11: instances: nothing is said here: leave it out"),
            (
                "stack: s\ninstances:\n  a: {query: x, flavor: ~}\n",
                "s.yaml:3:25: instances.a.flavor: nothing is said here",
            ),
            (
                "stack: s\ninstances:\n  a: {flavor: x, keys: [me, null]}\n",
                "s.yaml:3:29: instances.a.keys[1]: nothing is said here",
            ),
            (
                "stack: s\ninstances:\n  a: {flavor: x, labels: {b: }}\n",
                "instances.a.labels.b: nothing is said",
            ),
            (
                "stack: s\ninstances:\n  a: {flavor: x, sha256: ab}\n",
                "s.yaml:3:26: instances.a.sha256: `ab`: wanted 64",
            ),
            (
                "stack: s\nvolumes:\n  a: {size: 1, sha256: ab}\n",
                "s.yaml:3:24: volumes.a.sha256: `ab`: wanted 64",
            ),
            (
                "stack: s\ninstances:\n  WEB-1: {flavor: x}\n  web: {flavor: x, count: 1}\n",
                "s.yaml:4:8: instances.web: `web-1` is an instance of `WEB-1`, too",
            ),
            (
                "stack: s\ngroups:\n  Web: {policy: affinity}\n  web: {policy: anti-affinity}\n",
                "s.yaml:4:8: groups.web: `web` is the group `Web`, too",
            ),
            (
                "stack: s\nvolumes:\n  D-1: {size: 1}\n  d: {size: 1, count: 1}\n",
                "s.yaml:4:6: volumes.d: `d-1` is a volume of `D-1`, too",
            ),
            (
                "stack: s\ninstances:\n  a: {flavor: x, boot: d, image: i}\n",
                "s.yaml:3:6: instances.a: wanted either `boot` or `image`",
            ),
            (
                "stack: s\ninstances:\n  a: {flavor: x, boot: d}\n",
                "instances.a.boot: the file has no volume `d`",
            ),
            (
                "stack: s\nvolumes:\n  d: {size: 1}\ninstances:\n  a: {flavor: x, boot: d, volumes: [d]}\n",
                "`a` has `d` already, and one instance has it at a time",
            ),
            ("stack: s\ninstances:\n  web: {count: 99999999}\n", "99999999 are more than 1000"),
            (
                "stack: s\nvolumes:\n  ok: {size: 1}\n  image-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab: {size: 1}\n",
                "a copy that an image is made from is called so",
            ),
            ("stack: s\nvolumes:\n  d: {size: 0}\n", "s.yaml:3:13: volumes.d.size: 0 GB are too few"),
            ("stack: s\nvolumes:\n  d: {size: 5G}\n", "s.yaml:3:13: volumes.d.size: invalid type"),
            ("stack: s\nvolumes:\n  d: {image: debian}\n", "s.yaml:3:6: volumes.d: wanted `size`, in GiB"),
            ("stack: s\nvolumes:\n  d: 5\n", "wanted keys with values, as `size: 10`"),
            ("stack: s\nvolumes:\n  d: {sise: 1}\n", "unknown key `sise`; did you mean `size`?"),
            ("stack: s\nvolumes:\n  a_b: {size: 1}\n", "`a_b`: wanted letters"),
            (
                "stack: s\ninstances:\n  x: {flavor: a, volumes: [d]}\n",
                "s.yaml:3:28: instances.x.volumes[0]: the file has no volume `d`",
            ),
            (
                "stack: s\nvolumes: {d: {size: 1}}\ninstances:\n  x: {flavor: a, volumes: [d]}\n  y: {flavor: a, volumes: [D]}\n",
                "s.yaml:5:28: instances.y.volumes[0]: `x` has `d` already, and one instance has it at a time",
            ),
            (
                "stack: s\nvolumes: {d: {size: 1}}\ninstances:\n  x: {flavor: a, volumes: [d, d]}\n",
                "s.yaml:4:31: instances.x.volumes[1]: `x` has `d` already",
            ),
            (
                "stack: s\nvolumes: {d: {size: 1}}\ninstances:\n  x: {count: 2, flavor: a, volumes: [d]}\n",
                "s.yaml:4:38: instances.x.volumes[0]: `d` is one volume, and `x` are several instances: give it a `count` of 2 or more",
            ),
            (
                "stack: s\nvolumes: {d: {size: 1, count: 1}}\ninstances:\n  x: {count: 2, flavor: a, volumes: [d]}\n",
                "`d` are 1 volumes, and `x` are 2 instances",
            ),
            (
                "stack: s\nvolumes: {d: {size: 1, count: 1}}\ninstances:\n  x: {flavor: a, volumes: [d]}\n",
                "`d` are several volumes, and `x` is one instance",
            ),
        ] {
            let told = read(text).map_or_else(|told| told, |_| "nothing".to_owned());
            if !(told.contains(wanted) && told.lines().count() == 1) {
                wrong.push(format!("{text}{told}\n"));
            }
        }
        let many = |what: &str| {
            let items: String = (0..129).map(|number| format!("      k{number}: v\n")).collect();
            format!("stack: s\ninstances:\n  web:\n    flavor: x\n    {what}:\n{items}")
        };
        for (what, wanted) in [
            ("labels", "s.yaml:4:5: instances.web: 129 labels beside the stack's are more than 127"),
            ("metadata", "s.yaml:4:5: instances.web: 129 items of metadata are more than 128"),
        ] {
            let told = read(&many(what)).unwrap_err();
            assert!(told.contains(wanted), "{told}");
        }
        assert!(wrong.is_empty(), "{}", wrong.concat());
    }
}

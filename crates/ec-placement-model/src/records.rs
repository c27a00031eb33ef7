//! What is stored, one record per thing, and how it reads as JSON.

use std::{
    collections::HashSet,
    sync::{Arc, LazyLock, PoisonError, RwLock},
};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
    ser::SerializeMap,
};
use uuid::Uuid;

/// The version of every record that this program writes.
const VERSION: u32 = 1;

/// The largest number that an inventory may have, as of the API's schema: 2³¹ − 1.
pub const MAX_INT: i64 = 0x7fff_ffff;

/// Seconds since 1970.
pub type Seconds = i64;

/// A name that many records share: of a trait, a resource class, a project. Equal names made by [`intern`]
/// are one piece of memory.
pub type Name = Arc<str>;

/// Amounts by resource class, sorted by it.
pub type Amounts = Vec<(Name, i64)>;

/// Inventories by resource class, sorted by it.
pub type Inventories = Vec<(Name, Inventory)>;

/// Names that nobody uses any more are dropped whenever the pool has doubled.
struct Pool {
    names: HashSet<Name>,
    sweep_at: usize,
}

static POOL: LazyLock<RwLock<Pool>> =
    LazyLock::new(|| RwLock::new(Pool { names: HashSet::new(), sweep_at: 1024 }));

/// The shared name of this text.
pub fn intern(text: &str) -> Name {
    if let Some(name) = POOL.read().unwrap_or_else(PoisonError::into_inner).names.get(text) {
        return Arc::clone(name);
    }
    let mut pool = POOL.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = pool.names.get(text) {
        return Arc::clone(name);
    }
    if pool.names.len() >= pool.sweep_at {
        pool.names.retain(|name| Arc::strong_count(name) > 1);
        pool.sweep_at = (pool.names.len() * 2).max(1024);
    }
    let name: Name = text.into();
    pool.names.insert(Arc::clone(&name));
    name
}

/// What a provider has of one resource class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    /// All there is.
    pub total: i64,
    /// What of it is not to be allocated.
    #[serde(skip_serializing_if = "is_zero")]
    pub reserved: i64,
    /// The least that one allocation may take.
    #[serde(skip_serializing_if = "is_one")]
    pub min_unit: i64,
    /// The most that one allocation may take.
    #[serde(skip_serializing_if = "is_max")]
    pub max_unit: i64,
    /// What every allocation must be a multiple of.
    #[serde(skip_serializing_if = "is_one")]
    pub step_size: i64,
    /// How many times over it may be allocated.
    #[serde(skip_serializing_if = "is_unity")]
    pub allocation_ratio: f64,
}

fn is_zero(value: &i64) -> bool {
    *value == 0
}

fn is_one(value: &i64) -> bool {
    *value == 1
}

fn is_max(value: &i64) -> bool {
    *value == MAX_INT
}

#[expect(clippy::float_cmp, reason = "the default is exactly this number")]
fn is_unity(value: &f64) -> bool {
    *value == 1.0
}

impl Default for Inventory {
    fn default() -> Self {
        Self { total: 0, reserved: 0, min_unit: 1, max_unit: MAX_INT, step_size: 1, allocation_ratio: 1.0 }
    }
}

/// A generation beyond this cannot be told by JSON's numbers any more.
const MAX_GENERATION: i64 = 1 << 53;

/// What is wrong with a generation that was stored.
pub fn generation_problem(generation: i64) -> Option<String> {
    (!(0..=MAX_GENERATION).contains(&generation)).then(|| format!("its generation is {generation}"))
}

impl Inventory {
    /// What is wrong with it, where somebody else wrote it: the API would have refused it.
    fn problem(&self) -> Option<String> {
        let Self { total, reserved, min_unit, max_unit, step_size, allocation_ratio } = *self;
        for (what, value, least) in [
            ("total", total, 0),
            ("reserved", reserved, 0),
            ("min_unit", min_unit, 1),
            ("max_unit", max_unit, 1),
            ("step_size", step_size, 1),
        ] {
            if !(least..=MAX_INT).contains(&value) {
                return Some(format!("{what} is {value}, and must be between {least} and {MAX_INT}"));
            }
        }
        // One below nothing is taken, as upstream takes it: then there is nothing to allocate.
        (!allocation_ratio.is_finite()).then(|| format!("allocation_ratio is {allocation_ratio}"))
    }

    /// What may be allocated altogether.
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "as the API has it")]
    pub fn capacity(&self) -> i64 {
        ((self.total - self.reserved) as f64 * self.allocation_ratio) as i64
    }

    /// Whether one allocation may be of this size.
    pub fn admits(&self, amount: i64) -> bool {
        amount >= self.min_unit && amount <= self.max_unit && amount % self.step_size == 0
    }
}

/// A resource provider, but for its generation, which changes far more often and is kept beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provider {
    pub(super) version: u32,
    /// Unique.
    pub name: Name,
    /// The provider above it in its tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Uuid>,
    /// By resource class, sorted by it.
    #[serde(default, with = "by_name", skip_serializing_if = "Vec::is_empty")]
    pub inventories: Inventories,
    /// Sorted.
    #[serde(default, deserialize_with = "names", skip_serializing_if = "Vec::is_empty")]
    pub traits: Vec<Name>,
    /// Sorted.
    #[serde(default, deserialize_with = "sorted", skip_serializing_if = "Vec::is_empty")]
    pub aggregates: Vec<Uuid>,
    /// When it was made.
    pub created_at: Seconds,
    /// When it, or something of it, was last changed.
    pub updated_at: Seconds,
}

impl Provider {
    /// One with nothing in it.
    pub fn new(name: &str, parent: Option<Uuid>, now: Seconds) -> Self {
        Self {
            version: VERSION,
            name: name.into(),
            parent,
            inventories: Vec::new(),
            traits: Vec::new(),
            aggregates: Vec::new(),
            created_at: now,
            updated_at: now,
        }
    }

    /// The version of the record.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// What is wrong with it, where somebody else wrote it.
    pub fn problem(&self) -> Option<String> {
        self.inventories
            .iter()
            .find_map(|(class, inventory)| Some(format!("of {class}, {}", inventory.problem()?)))
    }

    /// What it has of a class.
    pub fn inventory(&self, class: &str) -> Option<&Inventory> {
        self.inventories.iter().find(|(name, _)| **name == *class).map(|(_, inventory)| inventory)
    }

    /// Whether it has a trait.
    pub fn has_trait(&self, name: &str) -> bool {
        self.traits.binary_search_by(|own| (**own).cmp(name)).is_ok()
    }

    /// Whether it is in an aggregate.
    pub fn in_aggregate(&self, aggregate: &Uuid) -> bool {
        self.aggregates.binary_search(aggregate).is_ok()
    }
}

/// Who uses resources: there only while it has allocations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Consumer {
    version: u32,
    /// Counts the writes of its allocations.
    pub generation: i64,
    /// Whose it is.
    #[serde(deserialize_with = "name")]
    pub project: Name,
    /// Whose it is.
    #[serde(deserialize_with = "name")]
    pub user: Name,
    /// What kind it is; none where it was written by a client that does not know kinds.
    #[serde(
        default,
        rename = "type",
        deserialize_with = "optional_name",
        skip_serializing_if = "Option::is_none"
    )]
    pub consumer_type: Option<Name>,
    /// What it uses, by provider.
    #[serde(with = "by_provider")]
    pub allocations: Vec<(Uuid, Amounts)>,
    /// When its allocations were written.
    pub created_at: Seconds,
}

impl Consumer {
    /// The version of the record.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// One that is about to get allocations.
    pub fn new(project: Name, user: Name, consumer_type: Option<Name>, now: Seconds) -> Self {
        Self {
            version: VERSION,
            generation: 0,
            project,
            user,
            consumer_type,
            allocations: Vec::new(),
            created_at: now,
        }
    }

    /// What is wrong with it, where somebody else wrote it.
    pub fn problem(&self) -> Option<String> {
        let amounts = self.allocations.iter().flat_map(|(_, amounts)| amounts);
        amounts
            .filter(|(_, amount)| !(1..=MAX_INT).contains(amount))
            .map(|(class, amount)| format!("its amount of {class} is {amount}"))
            .next()
            .or_else(|| generation_problem(self.generation))
    }

    /// What a record uses of which little else can be read; none where that cannot be read either.
    pub fn salvage(value: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Uses {
            #[serde(with = "by_provider")]
            allocations: Vec<(Uuid, Amounts)>,
        }
        let Uses { allocations } = serde_json::from_slice(value).ok()?;
        let nobody = intern("");
        let salvaged = Self { allocations, ..Self::new(Arc::clone(&nobody), nobody, None, 0) };
        salvaged.problem().is_none().then_some(salvaged)
    }
}

/// A trait or resource class that a user has made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedRecord {
    version: u32,
    /// When.
    pub created_at: Seconds,
}

impl NamedRecord {
    /// The version of the record.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// One made now.
    pub fn new(now: Seconds) -> Self {
        Self { version: VERSION, created_at: now }
    }
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    struct Text;
    impl Visitor<'_> for Text {
        type Value = Name;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a name")
        }
        fn visit_str<E>(self, text: &str) -> Result<Name, E> {
            Ok(intern(text))
        }
    }
    from.deserialize_str(Text)
}

/// A name in a place where serde wants a type.
struct Interned(Name);

impl<'de> Deserialize<'de> for Interned {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        name(from).map(Self)
    }
}

fn optional_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Name>, D::Error> {
    Ok(Option::<Interned>::deserialize(from)?.map(|interned| interned.0))
}

fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Name>, D::Error> {
    let names = Vec::<Interned>::deserialize(from)?.into_iter().map(|interned| interned.0);
    Ok(in_order(names.collect()))
}

fn sorted<'de, D: Deserializer<'de>, T: Deserialize<'de> + Ord>(from: D) -> Result<Vec<T>, D::Error> {
    Vec::deserialize(from).map(in_order)
}

/// Somebody else may have written it in any order.
fn in_order<T: Ord>(mut all: Vec<T>) -> Vec<T> {
    all.sort_unstable();
    all.dedup();
    all
}

/// A list of pairs that reads as an object, in order.
fn write_map<'a, S: Serializer, K: Serialize + 'a, V: Serialize + 'a>(
    pairs: impl ExactSizeIterator<Item = (K, &'a V)>,
    to: S,
) -> Result<S::Ok, S::Error> {
    let mut map = to.serialize_map(Some(pairs.len()))?;
    for (key, value) in pairs {
        map.serialize_entry(&key, value)?;
    }
    map.end()
}

struct Pairs<K, V>(std::marker::PhantomData<(K, V)>);

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Visitor<'de> for Pairs<K, V> {
    type Value = Vec<(K, V)>;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::with_capacity(map.size_hint().unwrap_or(0));
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

fn read_map<'de, D: Deserializer<'de>, K: Deserialize<'de>, V: Deserialize<'de>>(
    from: D,
) -> Result<Vec<(K, V)>, D::Error> {
    from.deserialize_map(Pairs(std::marker::PhantomData))
}

mod by_name {
    use super::{Deserialize, Deserializer, Interned, Name, Serialize, Serializer, read_map, write_map};

    pub(super) fn serialize<S: Serializer, V: Serialize>(
        pairs: &[(Name, V)],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        write_map(pairs.iter().map(|(name, value)| (&**name, value)), to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, V: Deserialize<'de>>(
        from: D,
    ) -> Result<Vec<(Name, V)>, D::Error> {
        let mut pairs: Vec<(Name, V)> =
            read_map(from)?.into_iter().map(|(Interned(name), value)| (name, value)).collect();
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(pairs)
    }
}

mod by_provider {
    use super::{
        Amounts, Deserialize, Deserializer, Serialize, Serializer, Uuid, by_name, read_map, write_map,
    };

    #[derive(Serialize, Deserialize)]
    struct Resources(#[serde(with = "by_name")] Amounts);

    pub(super) fn serialize<S: Serializer>(pairs: &[(Uuid, Amounts)], to: S) -> Result<S::Ok, S::Error> {
        let pairs: Vec<(Uuid, Resources)> =
            pairs.iter().map(|(provider, amounts)| (*provider, Resources(amounts.clone()))).collect();
        write_map(pairs.iter().map(|(provider, amounts)| (provider, amounts)), to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(Uuid, Amounts)>, D::Error> {
        let pairs: Vec<(Uuid, Resources)> = read_map(from)?;
        Ok(pairs.into_iter().map(|(provider, Resources(amounts))| (provider, amounts)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_back_as_written_and_stay_small() {
        let mut provider = Provider::new("node-1", Some(Uuid::from_u128(1)), 5);
        provider.inventories = vec![
            (intern("MEMORY_MB"), Inventory { total: 4096, reserved: 512, ..Inventory::default() }),
            (intern("VCPU"), Inventory { total: 8, allocation_ratio: 4.0, ..Inventory::default() }),
        ];
        provider.traits = vec![intern("CUSTOM_A"), intern("HW_CPU_X86_AVX")];
        let text = serde_json::to_string(&provider).unwrap();
        assert_eq!(
            text,
            "{\"version\":1,\"name\":\"node-1\",\"parent\":\"00000000-0000-0000-0000-000000000001\",\
             \"inventories\":{\"MEMORY_MB\":{\"total\":4096,\"reserved\":512},\
             \"VCPU\":{\"total\":8,\"allocation_ratio\":4.0}},\
             \"traits\":[\"CUSTOM_A\",\"HW_CPU_X86_AVX\"],\"created_at\":5,\"updated_at\":5}"
        );
        assert_eq!(serde_json::from_str::<Provider>(&text).unwrap(), provider);

        let mut consumer = Consumer::new(intern("p"), intern("u"), None, 7);
        consumer.allocations = vec![(Uuid::from_u128(2), vec![(intern("VCPU"), 1)])];
        let text = serde_json::to_string(&consumer).unwrap();
        assert_eq!(
            text,
            "{\"version\":1,\"generation\":0,\"project\":\"p\",\"user\":\"u\",\"allocations\":\
             {\"00000000-0000-0000-0000-000000000002\":{\"VCPU\":1}},\"created_at\":7}"
        );
        assert_eq!(serde_json::from_str::<Consumer>(&text).unwrap(), consumer);
    }

    /// As somebody writes them by hand, or imports them.
    #[test]
    fn lists_in_any_order_are_sorted_when_they_are_read() {
        let [first, second] = [1, 2].map(Uuid::from_u128);
        let provider: Provider = serde_json::from_value(serde_json::json!({
            "version": 1, "name": "n", "created_at": 5, "updated_at": 5,
            "traits": ["HW_CPU_X86_AVX", "CUSTOM_B", "CUSTOM_A", "CUSTOM_B"],
            "aggregates": [second, first, second],
        }))
        .unwrap();
        assert_eq!(provider.traits, ["CUSTOM_A", "CUSTOM_B", "HW_CPU_X86_AVX"].map(intern));
        assert_eq!(provider.aggregates, [first, second]);
        assert!(provider.traits.iter().all(|name| provider.has_trait(name)));
        assert!(provider.aggregates.iter().all(|aggregate| provider.in_aggregate(aggregate)));
    }

    #[test]
    fn capacity_is_cut_to_whole_units() {
        let inventory = |total, reserved, allocation_ratio| Inventory {
            total,
            reserved,
            allocation_ratio,
            ..Inventory::default()
        };
        assert_eq!(inventory(10, 3, 1.5).capacity(), 10);
        assert_eq!(inventory(5, 6, 1.0).capacity(), -1);
        assert_eq!(inventory(MAX_INT, 0, 3.0e38).capacity(), i64::MAX);
    }

    #[test]
    fn a_name_is_kept_once() {
        assert!(Arc::ptr_eq(&intern("CUSTOM_ONCE"), &intern("CUSTOM_ONCE")));
    }
}

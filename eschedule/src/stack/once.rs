//! Keys that come twice: the reader would take the last without a word, or tell the place of what they stand in.

use std::{collections::BTreeSet, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IntoDeserializer, MapAccess, Visitor, value::MapAccessDeserializer},
};

/// What is read of keys with values where each key comes once.
pub(super) fn once_each<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_map(OnceEach(PhantomData))
}

struct OnceEach<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OnceEach<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys with values")
    }

    fn visit_map<A: MapAccess<'de>>(self, said: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(Once::of(said)))
    }
}

/// Keys with values, the second of which that is called so is a mistake.
pub(super) struct Once<A> {
    said: A,
    keys: BTreeSet<String>,
}

impl<A> Once<A> {
    pub(super) const fn of(said: A) -> Self {
        Self { said, keys: BTreeSet::new() }
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Once<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        self.said.next_key_seed(Key { seed, keys: &mut self.keys })
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.said.next_value_seed(seed)
    }
}

/// Looked at while its reader knows where it stands.
struct Key<'a, K> {
    seed: K,
    keys: &'a mut BTreeSet<String>,
}

impl<'de, K: DeserializeSeed<'de>> DeserializeSeed<'de> for Key<'_, K> {
    type Value = K::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<K::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de, K: DeserializeSeed<'de>> Visitor<'de> for Key<'_, K> {
    type Value = K::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<K::Value, E> {
        if !self.keys.insert(key.to_owned()) {
            return Err(E::custom(format!("`{key}` is there twice")));
        }
        self.seed.deserialize(key.into_deserializer())
    }
}

//! What a document may say, looked at before it is read: JSON has nothing against a member that stands twice, and of two the last
//! would win without a word. With a consumer that is somebody's claim. Nor would a field that is spelt wrong be missed by anybody.

use std::{collections::HashSet, fmt};

use serde::{
    Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use uuid::Uuid;

/// What stands in a place.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    /// Anything that has no fields of ours.
    Any,
    /// These fields, of which some may be left out.
    Of(&'static [(&'static str, Shape)]),
    /// One of these by whatever name.
    By(&'static Shape),
}

use Shape::{Any, By, Of};

/// A whole document.
pub(super) const DOCUMENT: Shape = Of(&[
    ("version", Any),
    ("traits", Any),
    ("resource_classes", Any),
    ("providers", By(&PROVIDER)),
    ("consumers", By(&CONSUMER)),
]);

const PROVIDER: Shape = Of(&[
    ("version", Any),
    ("generation", Any),
    ("name", Any),
    ("parent", Any),
    ("inventories", By(&INVENTORY)),
    ("traits", Any),
    ("aggregates", Any),
    ("created_at", Any),
    ("updated_at", Any),
]);

const INVENTORY: Shape = Of(&[
    ("total", Any),
    ("reserved", Any),
    ("min_unit", Any),
    ("max_unit", Any),
    ("step_size", Any),
    ("allocation_ratio", Any),
]);

const CONSUMER: Shape = Of(&[
    ("version", Any),
    ("generation", Any),
    ("project", Any),
    ("user", Any),
    ("type", Any),
    ("allocations", By(&By(&Any))),
    ("created_at", Any),
]);

/// The same uuid in another spelling is the same.
#[derive(PartialEq, Eq, Hash)]
enum Member {
    Uuid(Uuid),
    Other(String),
}

impl Member {
    fn of(name: &str) -> Self {
        name.parse().map_or_else(|_| Self::Other(name.to_owned()), Self::Uuid)
    }
}

impl Shape {
    fn within<E: Error>(self, name: &str) -> Result<Self, E> {
        match self {
            Any => Ok(Any),
            By(shape) => Ok(*shape),
            Of(fields) => match fields.iter().find(|(own, _)| *own == name) {
                Some((_, shape)) => Ok(*shape),
                None => {
                    let known: Vec<&str> = fields.iter().map(|(own, _)| *own).collect();
                    Err(E::custom(format_args!(
                        "unknown field `{name}`, expected one of {}",
                        known.join(", ")
                    )))
                }
            },
        }
    }
}

impl<'de> DeserializeSeed<'de> for Shape {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Shape {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON document")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            let within = self.within(&name)?;
            if !seen.insert(Member::of(&name)) {
                return Err(A::Error::custom(format_args!("{name} stands twice")));
            }
            map.next_value_seed(within)?;
        }
        Ok(())
    }
}

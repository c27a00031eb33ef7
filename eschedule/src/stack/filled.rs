//! Keys with nothing behind them: what was meant there nobody knows, and as a text it would be read as `null`.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// A file of which each key and each item says something.
#[derive(Default)]
pub(super) struct Filled;

/// The same of what is within it.
struct Something;

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Looked { may_be_nothing: true }).map(|()| Self)
    }
}

impl<'de> Deserialize<'de> for Something {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Looked { may_be_nothing: false }).map(|()| Self)
    }
}

struct Looked {
    may_be_nothing: bool,
}

impl<'de> Visitor<'de> for Looked {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys with values, a list or a text")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        match self.may_be_nothing {
            true => Ok(()),
            false => Err(E::custom("nothing is said here: leave it out, or say it; an empty text is \"\"")),
        }
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i128<E>(self, _: i128) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u128<E>(self, _: u128) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut said: A) -> Result<(), A::Error> {
        while let Some(Something) = said.next_element()? {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut said: A) -> Result<(), A::Error> {
        while let Some((IgnoredAny, Something)) = said.next_entry()? {}
        Ok(())
    }
}

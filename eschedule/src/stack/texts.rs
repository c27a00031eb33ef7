//! The texts of a stack's file: what each may be, told to its reader and, as a schema, to editors.

use std::{borrow::Cow, fmt};

use ec_model::{ResourceQuery, input};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

/// A text that is checked while its reader knows where it stands: afterwards that is only known of what is around it.
struct Checked<F>(F);

impl<T, F: FnOnce(&str) -> Result<T, String>> Visitor<'_> for Checked<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(|why| E::custom(format!("`{text}`: {why}")))
    }
}

/// A text that is checked as it is read, so that a mistake is told with its place.
macro_rules! checked {
    ($name:ident, $what:literal, $schema:expr, $check:expr) => {
        #[doc = $what]
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) struct $name(pub(crate) String);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(Checked(|text: &str| {
                    let checked: Result<(), String> = $check(text);
                    checked.map(|()| Self(text.to_owned()))
                }))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let mut schema: Schema = $schema;
                schema.insert("description".to_owned(), $what.into());
                schema
            }
        }
    };
}

// What editors are told of texts; the rules are those of `ec_model::input`.
pub(super) const CATALOG_NAME: &str = "^[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}$";
pub(super) const HOST_NAME: &str = concat!(
    "^(?![0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$)(?!.{254})",
    "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?([.][A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$"
);
pub(super) const LABEL_KEY: &str = "^(?!stack$)[A-Za-z0-9_.:/-]{1,63}$";
pub(super) const METADATA_KEY: &str = "^[A-Za-z0-9_.: -]{1,255}$";
const WORD: &str = "^[^\\u0000-\\u001f\\u007f-\\u009f]{0,255}$";

/// What the keys of a map are.
pub(super) fn keys(pattern: &str) -> serde_json::Value {
    serde_json::json!({"pattern": pattern})
}

/// A text; YAML's numbers and truths are as good where they stand for one.
fn text(pattern: &str) -> Schema {
    json_schema!({"type": ["string", "number", "boolean"], "pattern": pattern})
}

checked!(
    CatalogName,
    "1 to 63 letters, digits, and - _ . @, in any case of letters, the first a letter or a digit",
    text(CATALOG_NAME),
    |text: &str| { input::catalog_name(text).map(drop) }
);
checked!(
    HostName,
    "a hostname: letters, digits and hyphens, at most 63 in each part, and not a uuid",
    text(HOST_NAME),
    |text: &str| {
        let wanted = "wanted letters, digits and hyphens, at most 63 in each part, and not a uuid";
        if input::is_hostname(text) { Ok(()) } else { Err(wanted.to_owned()) }
    }
);
checked!(LabelKey, "1 to 63 letters, digits, and - _ . : /", text(LABEL_KEY), |text: &str| {
    match input::label_key(text)?.as_str() {
        ec_cloud::STACK => Err("the stack's name tells that".to_owned()),
        _ => Ok(()),
    }
});
checked!(MetadataKey, "1 to 255 letters, digits, blanks, and - _ . :", text(METADATA_KEY), |text: &str| {
    input::metadata_key(text).map(drop)
});
checked!(Word, "one line of at most 255 characters", text(WORD), |text: &str| {
    input::line(text, 255).map(drop)
});
checked!(
    Query,
    "a resources query, for example resources=VCPU:1,MEMORY_MB:512",
    json_schema!({"type": "string"}),
    |text: &str| { ResourceQuery::parse(text).map(drop).map_err(|error| error.to_string()) }
);

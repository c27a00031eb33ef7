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
    "^(?![0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$)(?![0-9A-Fa-f]{32}$)(?!.{254})",
    "(?!-)(?!.*[.]-)(?!.*-[.])(?!.*-$)[A-Za-z0-9-]{1,63}([.][A-Za-z0-9-]{1,63})*$"
);
pub(super) const LABEL_KEY: &str = "^(?!stack$)[A-Za-z0-9_.:/-]{1,63}$";
pub(super) const METADATA_KEY: &str = "^[A-Za-z0-9_.: -]{1,255}$";
const SHA256: &str = "^[0-9A-Fa-f]{64}$";
/// One `resources=CLASS:AMOUNT` at least; the rest is left to its reader, who knows what may be escaped where.
const QUERY: &str = "^[?]*([^&]*&)*(resources|[^&=]*%)[^&=]*=[^&]*(:|%3[Aa])";
const WORD: &str = "^[^\\u0000-\\u001f\\u007f-\\u009f]{0,255}$";

/// A text of which only shows elsewhere whether it will do.
pub(super) struct AnyText;

impl JsonSchema for AnyText {
    fn schema_name() -> Cow<'static, str> {
        "Text".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["string", "number", "boolean"]})
    }
}

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
    "a hostname: letters, digits and hyphens, at most 63 in each part and 253 in all, and not a uuid",
    text(HOST_NAME),
    |text: &str| {
        if input::is_hostname(text) { Ok(()) } else { Err(format!("wanted {}", input::HOSTNAME)) }
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
checked!(Digest, "a SHA-256: 64 hexadecimal digits", text(SHA256), |text: &str| {
    match input::is_sha256(text) {
        true => Ok(()),
        false => Err("wanted 64 hexadecimal digits".to_owned()),
    }
});
checked!(
    Query,
    "a resources query, for example resources=VCPU:1,MEMORY_MB:512",
    json_schema!({"type": "string", "pattern": QUERY}),
    |text: &str| { ResourceQuery::parse(text).map(drop).map_err(|error| error.to_string()) }
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use regress::Regex;
    use serde::de::DeserializeOwned;

    use super::*;

    /// Whether its schema takes it, as editors read that, and whether its reader does.
    struct Both {
        what: &'static str,
        pattern: Regex,
        is_read: fn(&str) -> bool,
    }

    impl Both {
        fn of<T: JsonSchema + DeserializeOwned>(what: &'static str) -> Self {
            let schema = schemars::schema_for!(T);
            let pattern = schema.get("pattern").and_then(|pattern| pattern.as_str()).unwrap();
            let is_read = |text: &str| serde_json::from_value::<T>(text.into()).is_ok();
            Self { what, pattern: Regex::with_flags(pattern, "u").unwrap(), is_read }
        }

        fn all() -> [Self; 6] {
            [
                Self::of::<CatalogName>("name"),
                Self::of::<HostName>("hostname"),
                Self::of::<LabelKey>("label's key"),
                Self::of::<MetadataKey>("metadata's key"),
                Self::of::<Word>("value"),
                Self::of::<Digest>("digest"),
            ]
        }

        /// That both say the same of it.
        fn agree(text: &str) -> Result<(), String> {
            thread_local!(static ALL: [Both; 6] = Both::all());
            ALL.with(|all| {
                let differs = |both: &&Both| both.pattern.find(text).is_some() != (both.is_read)(text);
                let told =
                    |both: &Both| format!("as a {}: {text:?} is read: {}", both.what, (both.is_read)(text));
                all.iter().find(differs).map_or(Ok(()), |both| Err(told(both)))
            })
        }
    }

    #[test]
    fn the_schema_takes_what_its_reader_takes_at_every_edge() {
        let mut texts: Vec<String> = [
            "",
            "stack",
            "stacks",
            "Stack",
            "a\n",
            "\na",
            "a\u{2028}",
            "a.",
            ".a",
            "a..b",
            "a.-b",
            "a-.b",
            "-",
            "_",
            "@",
            "ä",
            "a=b",
            "\u{1f}",
            "\u{7f}",
            "\u{9f}",
            "\u{a0}",
            "\u{1f600}",
            "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
            "7D3C1F0A2B4E4C559A7E0123456789AB",
            "7d3c1f0a2b4e4c559a7e0123456789a",
            "0123456789abcdefABCDEF0123456789abcdefABCDEF0123456789abcdefABCD",
            "urn:uuid:7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
            "{7d3c1f0a-2b4e-4c55-9a7e-0123456789ab}",
            "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab.a",
        ]
        .map(str::to_owned)
        .to_vec();
        for length in [1, 2, 61, 62, 63, 64, 252, 253, 254, 255, 256] {
            texts.extend(["a", "0", "-", " ", "ü", "\u{1f600}", "a.", "."].map(|of| of.repeat(length)));
            texts.push(format!("{}a", "a.".repeat(length / 2)));
            texts.push(format!("{}.b", "a".repeat(length)));
        }
        texts.extend([63, 64, 65].map(|length| "F".repeat(length)));
        // Each character that is not alike by itself, within what is taken.
        texts.extend((0..=0x100).filter_map(char::from_u32).flat_map(|c| [c.to_string(), format!("a{c}b")]));
        let wrong: Vec<String> = texts.iter().filter_map(|text| Both::agree(text).err()).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn the_schema_takes_queries_and_nothing_that_asks_for_nothing() {
        let query = Both::of::<Query>("query");
        for (text, is_one) in [
            ("resources=VCPU:1,MEMORY_MB:1", true),
            ("?limit=1&&required=A&resources_d=DISK_GB:1", true),
            ("%72esources=VCPU%3A1", true),
            ("x", false),
            ("", false),
            ("small", false),
            ("VCPU:1", false),
            ("required=A:1", false),
            ("resources=VCPU", false),
            ("resources", false),
        ] {
            let both = (query.pattern.find(text).is_some(), (query.is_read)(text));
            assert_eq!(both, (is_one, is_one), "{text}");
        }
    }

    proptest! {
        #[test]
        fn the_schema_takes_what_its_reader_takes(
            text in prop_oneof![
                any::<String>(),
                "[A-Za-z0-9_.:/@ -]{0,12}",
                "[A-Za-z0-9.-]{58,68}",
                "([a-z0-9-]{55,64}[.]){3,4}[a-z0-9-]{50,64}",
                "[a-z0-9_. :-]{250,258}",
                "[0-9A-Fa-f]{7,8}(-?[0-9A-Fa-f]{4}){3}-?[0-9A-Fa-f]{11,13}",
                "[a-c\u{1f}\u{20}\u{7e}-\u{a1}]{0,6}",
                "s?stack[a-z]?",
                "[0-9A-Fa-f]{63,65}",
            ],
        ) {
            prop_assert_eq!(Both::agree(&text), Ok(()));
        }

        #[test]
        fn the_schema_takes_each_query_that_its_reader_takes(
            text in "[?]{0,2}(&|limit=1|required=[A,]{1,3}|resources(_a)?=[A-Z]{1,3}(:|%3A|%3a|,)[0-9]{1,2}(,B:1)?|%72esources=A:1){0,4}",
        ) {
            let query = Both::of::<Query>("query");
            prop_assert!(query.pattern.find(&text).is_some() || !(query.is_read)(&text), "{}", text);
        }
    }
}

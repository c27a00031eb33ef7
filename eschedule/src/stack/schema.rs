//! What editors are told of a stack's file.

use ec_runtime::exit::Failure;
use schemars::Schema;
use serde_json::Value;

use super::Stack;

/// The schema of such files.
pub(crate) fn schema() -> Result<String, Failure> {
    let schema = serde_json::to_string_pretty(&schemars::schema_for!(Stack));
    let schema = schema.map_err(|error| Failure::failed(format!("failed to write the schema: {error}")))?;
    Ok(format!("{schema}\n"))
}

/// What a file leaves out is none, and cannot be written as `null`.
pub(super) fn without_nulls(schema: &mut Schema) {
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else { return };
    for of in properties.values_mut().filter_map(Value::as_object_mut) {
        if of.get("default").is_some_and(Value::is_null) {
            of.remove("default");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use regress::Regex;
    use serde_json::Map;

    use super::*;

    /// `BLESS=1` writes it anew.
    #[test]
    fn the_schema_that_is_published_is_that_of_the_types() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/stack.schema.json");
        let is = schema().map_err(|failure| failure.message).unwrap();
        if std::env::var_os("BLESS").is_some() {
            fs::write(path, &is).unwrap();
        }
        assert!(
            fs::read_to_string(path).unwrap_or_default() == is,
            "docs/stack.schema.json is not the types': BLESS=1"
        );
    }

    /// Of JSON Schema, so much as ours needs.
    struct Judge {
        root: Value,
    }

    impl Judge {
        fn takes(&self, schema: &Value, value: &Value) -> bool {
            match schema {
                Value::Bool(takes) => *takes,
                Value::Object(says) => says.iter().all(|(word, what)| self.holds(says, word, what, value)),
                other => panic!("no schema: {other}"),
            }
        }

        fn holds(&self, says: &Map<String, Value>, word: &str, what: &Value, value: &Value) -> bool {
            let list = || what.as_array().unwrap();
            let text = || what.as_str().unwrap();
            let most = || what.as_u64().unwrap();
            let any =
                |schemas: &Vec<Value>| schemas.iter().filter(|schema| self.takes(schema, value)).count();
            let keys = value.as_object();
            let all_keys = |holds: &dyn Fn(&String, &Value) -> bool| {
                keys.is_none_or(|keys| keys.iter().all(|(key, value)| holds(key, value)))
            };
            match word {
                "$schema" | "$defs" | "title" | "description" | "default" => true,
                "$ref" => self.takes(self.root.pointer(text().strip_prefix('#').unwrap()).unwrap(), value),
                "type" => {
                    let is_of = |of: &Value| match of.as_str().unwrap() {
                        "object" => value.is_object(),
                        "array" => value.is_array(),
                        "string" => value.is_string(),
                        "boolean" => value.is_boolean(),
                        "number" => value.is_number(),
                        "integer" => value.is_u64() || value.is_i64(),
                        of => panic!("{of}"),
                    };
                    what.as_array().map_or_else(|| is_of(what), |types| types.iter().any(is_of))
                }
                "const" => value == what,
                "enum" => list().contains(value),
                "pattern" => value
                    .as_str()
                    .is_none_or(|value| Regex::with_flags(text(), "u").unwrap().find(value).is_some()),
                "minimum" => value.as_u64().is_none_or(|value| value >= most()),
                "maximum" => value.as_u64().is_none_or(|value| value <= most()),
                "items" => {
                    value.as_array().is_none_or(|items| items.iter().all(|item| self.takes(what, item)))
                }
                "maxItems" => value.as_array().is_none_or(|items| items.len() as u64 <= most()),
                "uniqueItems" => value.as_array().is_none_or(|items| {
                    items.iter().enumerate().all(|(number, item)| !items[..number].contains(item))
                }),
                "required" => {
                    list().iter().all(|key| keys.is_none_or(|keys| keys.contains_key(key.as_str().unwrap())))
                }
                "maxProperties" => keys.is_none_or(|keys| keys.len() as u64 <= most()),
                "propertyNames" => all_keys(&|key, _| self.takes(what, &key.as_str().into())),
                "properties" => {
                    all_keys(&|key, value| what.get(key).is_none_or(|schema| self.takes(schema, value)))
                }
                "additionalProperties" => all_keys(&|key, value| {
                    let is_named = says.get("properties").is_some_and(|named| named.get(key).is_some());
                    is_named || self.takes(what, value)
                }),
                "not" => !self.takes(what, value),
                "anyOf" => any(list()) > 0,
                "oneOf" => any(list()) == 1,
                "if" => !self.takes(what, value) || self.takes(&says["then"], value),
                "then" => says.contains_key("if"),
                word => panic!("`{word}` is not known here"),
            }
        }
    }

    #[test]
    fn the_schema_takes_the_files_that_their_reader_takes() {
        let judge = Judge { root: schemars::schema_for!(Stack).to_value() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.yaml");
        let instance = |says: &str| {
            let volumes: String = (0..17).map(|number| format!("  v{number}: {{size: 1}}\n")).collect();
            format!("stack: s\nvolumes:\n{volumes}instances:\n  a: {{{says}}}\n")
        };
        let volume = |says: &str| format!("stack: s\nvolumes:\n  a: {{{says}}}\n");
        let many = |count: usize| (0..count).map(|number| format!("k{number}: v, ")).collect::<String>();
        let items = |count: usize| (0..count).map(|number| format!("v{number}, ")).collect::<String>();
        let digest = "aB".repeat(32);
        let mut wrong = Vec::new();
        for (text, is_taken) in [
            ("stack: s\n".to_owned(), true),
            ("stack: 7\ngroups: {g: {policy: affinity}}\ninstances: {}\nvolumes: {}\n".to_owned(), true),
            ("instances: {}\n".to_owned(), false),
            ("stack:\n".to_owned(), false),
            ("stack: s\ninstances:\n".to_owned(), false),
            ("stack: s\nvolumes: ~\n".to_owned(), false),
            ("stack: s\ngroups: null\n".to_owned(), false),
            ("stack: s\ngroups: {g: }\n".to_owned(), false),
            ("stack: s\ngroups: {g: {}}\n".to_owned(), false),
            ("stack: s\ngroups: {g: {policy: near}}\n".to_owned(), false),
            ("stack: s\ninstances: {a_b: {flavor: x}}\n".to_owned(), false),
            ("stack: s\nmore: {}\n".to_owned(), false),
            (instance("flavor: x"), true),
            (instance("flavor: 7, image: 12, keys: [1, me], user_data: 5, count: 1000"), true),
            (instance("query: 'resources=VCPU:1', restart: no, group: g, metadata: {a: b}"), true),
            (instance("query: x"), false),
            (instance("query: ''"), false),
            (instance("query: 'resources=VCPU'"), false),
            (instance("flavor: x, query: 'resources=VCPU:1'"), false),
            (instance("flavor: ~, query: 'resources=VCPU:1'"), false),
            (instance("image: x"), false),
            (instance("flavor: x, image: "), false),
            (instance("flavor: x, keys: "), false),
            (instance("flavor: x, keys: [~]"), false),
            (instance("flavor: x, labels: "), false),
            (instance("flavor: x, labels: {a: }"), false),
            (instance("flavor: x, labels: {a: ''}"), true),
            (instance("flavor: x, labels: {stack: a}"), false),
            (instance("flavor: x, restart: "), false),
            (instance("flavor: x, restart: never"), false),
            (instance("flavor: x, count: "), false),
            (instance("flavor: x, count: 1001"), false),
            (instance("flavor: x, sha256: ab"), false),
            (instance(&format!("flavor: x, sha256: {digest}")), true),
            (instance("flavor: x, boot: v0"), true),
            (instance("flavor: x, boot: v0, image: i"), false),
            (instance(&format!("flavor: x, boot: v0, sha256: {digest}")), false),
            (instance(&format!("flavor: x, volumes: [{}]", items(16))), true),
            (instance(&format!("flavor: x, volumes: [{}]", items(17))), false),
            (instance(&format!("flavor: x, boot: v16, volumes: [{}]", items(15))), true),
            (instance(&format!("flavor: x, boot: v16, volumes: [{}]", items(16))), false),
            (instance("flavor: x, volumes: [v0, v0]"), false),
            (instance(&format!("flavor: x, keys: [{}]", items(64))), true),
            (instance(&format!("flavor: x, keys: [{}]", items(65))), false),
            (instance(&format!("flavor: x, labels: {{{}}}", many(127))), true),
            (instance(&format!("flavor: x, labels: {{{}}}", many(128))), false),
            (instance(&format!("flavor: x, metadata: {{{}}}", many(128))), true),
            (instance(&format!("flavor: x, metadata: {{{}}}", many(129))), false),
            (volume("size: 1"), true),
            (volume("size: 0"), false),
            (volume("size: "), false),
            (volume("size: 2147483647"), true),
            (volume("size: 2147483648"), false),
            (volume("image: i"), false),
            (volume("image: 'volume:a'"), true),
            (volume("image: 'instance:a', size: 5, count: 3"), true),
            (volume(&format!("size: 1, image: i, sha256: {digest}")), true),
            (volume("size: 1, image: i, sha256: ab"), false),
            (volume(&format!("size: 1, sha256: {digest}")), false),
            (volume(&format!("size: 1, image: 'volume:a', sha256: {digest}")), false),
            (volume(&format!("size: 1, labels: {{{}}}", many(127))), true),
            (volume(&format!("size: 1, labels: {{{}}}", many(128))), false),
        ] {
            fs::write(&path, &text).unwrap();
            let read = Stack::read(&path).map(drop).map_err(|failure| failure.message);
            let value: Value = serde_yaml::from_str(&text).unwrap();
            if (judge.takes(&judge.root, &value), read.is_ok()) != (is_taken, is_taken) {
                wrong.push(format!("{text}is taken: {is_taken}; the reader says: {read:?}\n"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.concat());
    }
}

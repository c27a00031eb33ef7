//! Where in a file something stands of which only shows that it is wrong after all of it was read.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use ec_runtime::exit::{FAILED, Failure, USAGE};
use serde::de::{
    DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor,
};

/// A file, as it was read.
pub(crate) struct Source {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// A place in a file: keys from without to within, and of a list, which of its items.
#[derive(Debug, Clone)]
pub(crate) struct Place<'a> {
    keys: Vec<&'a str>,
    item: Option<usize>,
}

impl<'a> Place<'a> {
    /// Where these keys lead.
    pub(crate) fn of(keys: &[&'a str]) -> Self {
        Self { keys: keys.to_vec(), item: None }
    }

    /// Where this key leads from there.
    pub(crate) fn key(mut self, key: &'a str) -> Self {
        self.keys.push(key);
        self
    }

    /// This item of the list there, counted from 0 on.
    pub(crate) fn item(self, number: usize) -> Self {
        Self { item: Some(number), ..self }
    }
}

/// As the reader of files tells it.
impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.keys.join("."))?;
        self.item.map_or(Ok(()), |number| write!(f, "[{number}]"))
    }
}

impl Source {
    /// A failure that comes of what stands there, with its place. Whoever cannot be reached is no mistake of the file's.
    pub(crate) fn wrong(&self, place: &Place<'_>, failure: Failure) -> Failure {
        if !matches!(failure.code, FAILED | USAGE) {
            return failure;
        }
        let at = self.find(place).map(|(line, column)| format!(":{line}:{column}")).unwrap_or_default();
        Failure { message: format!("{}{at}: {place}: {}", self.path.display(), failure.message), ..failure }
    }

    /// Where files lie that this one names.
    pub(crate) fn directory(&self) -> PathBuf {
        self.path.parent().map(Path::to_owned).unwrap_or_default()
    }

    /// Line and column of what stands there; where nothing does, of what is around it.
    fn find(&self, place: &Place<'_>) -> Option<(usize, usize)> {
        let (mut keys, mut item) = (place.keys.as_slice(), place.item);
        loop {
            let reader = serde_yaml::Deserializer::from_str(&self.text);
            if let Err(found) = (To { keys, item }).deserialize(reader) {
                return found.location().map(|place| (place.line(), place.column()));
            }
            if item.take().is_none() {
                keys = keys.split_last()?.1;
            }
        }
    }
}

/// Reads as far as a place and fails there, for a reader tells places of failures only. Where there is no such place, it
/// comes to its end.
struct To<'a> {
    keys: &'a [&'a str],
    item: Option<usize>,
}

impl To<'_> {
    fn is_there(&self) -> bool {
        self.keys.is_empty() && self.item.is_none()
    }
}

impl<'de> DeserializeSeed<'de> for To<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Whatever is neither keys nor a list ends the way.
impl<'de> Visitor<'de> for To<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("something else")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut said: A) -> Result<(), A::Error> {
        if self.is_there() {
            return Err(A::Error::invalid_type(Unexpected::Map, &self));
        }
        while let Some(key) = said.next_key::<String>()? {
            match self.keys {
                [first, rest @ ..] if *first == key => {
                    said.next_value_seed(To { keys: rest, item: self.item })?;
                }
                _ => _ = said.next_value::<IgnoredAny>()?,
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut said: A) -> Result<(), A::Error> {
        if self.is_there() {
            return Err(A::Error::invalid_type(Unexpected::Seq, &self));
        }
        let wanted = self.item.filter(|_| self.keys.is_empty());
        for number in 0.. {
            let is_over = if wanted == Some(number) {
                said.next_element_seed(To { keys: &[], item: None })?.is_none()
            } else {
                said.next_element::<IgnoredAny>()?.is_none()
            };
            if is_over {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str, place: &Place<'_>) -> String {
        let source = Source { path: PathBuf::from("s.yaml"), text: text.to_owned() };
        source.wrong(place, Failure::failed("it is so")).message
    }

    #[test]
    fn a_place_is_told_by_line_and_column_however_it_is_written() {
        let web = || Place::of(&["instances", "web"]);
        let block = "stack: s\n# of it\ninstances:\n  db: {image: x}\n  web:\n    flavor: none\n    keys:\n      - me\n      - ghost\n";
        for (text, place, wanted) in [
            (block, web().key("flavor"), "s.yaml:6:13: instances.web.flavor: it is so"),
            (block, web().key("keys").item(1), "s.yaml:9:9: instances.web.keys[1]: it is so"),
            (block, web(), "s.yaml:6:5: instances.web: it is so"),
            (
                block,
                Place::of(&["instances", "db"]).key("image"),
                "s.yaml:4:15: instances.db.image: it is so",
            ),
            // Nothing is said of it there.
            (block, web().key("image"), "s.yaml:6:5: instances.web.image: it is so"),
            (block, web().key("keys").item(2), "s.yaml:8:7: instances.web.keys[2]: it is so"),
            (block, Place::of(&["groups"]), "s.yaml:1:1: groups: it is so"),
            (
                "instances: {7: {flavor: &it none}, web: {flavor: *it}}",
                Place::of(&["instances", "7", "flavor"]),
                "s.yaml:1:25: instances.7.flavor: it is so",
            ),
        ] {
            assert_eq!(told(text, &place), wanted);
        }
    }

    #[test]
    fn who_cannot_be_reached_is_no_mistake_of_a_file() {
        let source = Source { path: PathBuf::from("s.yaml"), text: "stack: s".to_owned() };
        let away = Failure { code: ec_runtime::exit::UNREACHABLE, message: "etcd is away".to_owned() };
        assert_eq!(source.wrong(&Place::of(&["stack"]), away).message, "etcd is away");
    }
}

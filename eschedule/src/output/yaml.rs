//! YAML that readers of either version of it take as it is meant: to those of 1.1 (PyYAML, and what stands on it) `no` is a boolean,
//! `12:30:45` a number, and a day is one.

use serde::Serialize;
use serde_yaml::Value;
use uuid::Uuid;

/// A value as a document.
pub(crate) fn document<T: Serialize + ?Sized>(value: &T) -> Result<String, serde_yaml::Error> {
    // Begins with a letter, so that it is taken for nothing else.
    let mut marks = Marks { mark: format!("q{}", Uuid::new_v4().simple()), quoted: Vec::new() };
    let marked = marks.marked(serde_yaml::to_value(value)?);
    let text = serde_yaml::to_string(&marked)?;
    let mut pieces = text.split(&marks.mark);
    let mut whole = pieces.next().unwrap_or_default().to_owned();
    // They stand in the order in which they were made.
    for (piece, quoted) in pieces.zip(&marks.quoted) {
        whole.push_str(quoted);
        whole.push_str(piece.split_once(NUMBERED).map_or(piece, |(_, after)| after));
    }
    Ok(whole)
}

/// What stands for strings in a document until that is written, which says of none how it is to be written.
struct Marks {
    /// No string has it in it.
    mark: String,
    /// The strings, as they are to stand there.
    quoted: Vec<String>,
}

impl Marks {
    fn marked(&mut self, value: Value) -> Value {
        match value {
            Value::String(text) if is_another(&text) => {
                self.quoted.push(quoted(&text));
                // No key is twice in a mapping.
                Value::String(format!("{}{}{NUMBERED}", self.mark, self.quoted.len()))
            }
            Value::Sequence(all) => Value::Sequence(all.into_iter().map(|one| self.marked(one)).collect()),
            Value::Mapping(all) => Value::Mapping(
                all.into_iter().map(|(key, one)| (self.marked(key), self.marked(one))).collect(),
            ),
            other => other,
        }
    }
}

/// What ends a mark's number.
const NUMBERED: char = 'e';

/// Characters that end a line to readers of YAML.
const SEPARATORS: [char; 3] = ['\u{85}', '\u{2028}', '\u{2029}'];

/// Whether a string may be taken for something else as the library writes it: without quotes, or with a separator as it is. One with
/// controls in it that library writes as it should.
fn is_another(text: &str) -> bool {
    const WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];
    let begins = |c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.' | '=' | '<' | '~');
    text.contains(SEPARATORS)
        || !text.contains(char::is_control)
            && (text.starts_with(begins) || WORDS.iter().any(|word| text.eq_ignore_ascii_case(word)))
}

fn quoted(text: &str) -> String {
    if !text.contains(SEPARATORS) {
        return format!("'{}'", text.replace('\'', "''"));
    }
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        _ if c.is_control() || SEPARATORS.contains(&c) => format!("\\u{:04x}", u32::from(c)),
        _ => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn what_version_1_1_takes_for_something_else_is_quoted() {
        let texts =
            ["no", "On", "y", "NULL", "12:30:45", "1_000", "2026-11-29", "=", "<<", "~", ".5", "-1", "it's"];
        let text = document(&texts).unwrap();
        let lines = [
            "- 'no'",
            "- 'On'",
            "- 'y'",
            "- 'NULL'",
            "- '12:30:45'",
            "- '1_000'",
            "- '2026-11-29'",
            "- '='",
            "- '<<'",
            "- '~'",
            "- '.5'",
            "- '-1'",
            "- it's",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn whatever_is_written_is_read_again() {
        let texts = [
            "no",
            "'0'",
            "0'0",
            "1: 2 # x",
            "-\n- 1",
            "yes\u{7f}",
            "",
            " 1",
            "1 ",
            "web",
            "ü",
            "2\u{2028}\"",
            "\u{85}\n\\",
            "<<",
        ];
        let value: BTreeMap<&str, Vec<&str>> = texts.iter().map(|text| (*text, texts.to_vec())).collect();
        let text = document(&value).unwrap();
        let read: BTreeMap<String, Vec<String>> = serde_yaml::from_str(&text).unwrap();
        assert!(read.keys().eq(value.keys()), "{:?}", read.keys());
        assert!(read.values().all(|all| *all == texts), "{text}");
        let numbers = document(&(1, 2.5, true, None::<u8>)).unwrap();
        assert_eq!(numbers, "- 1\n- 2.5\n- true\n- null\n");
    }
}

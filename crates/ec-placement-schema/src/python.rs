//! Values as Python writes them: on one line (`repr`), and over several (`pprint`, 72 wide).
//!
//! Everything here is bounded: a document may be megabytes, a message must not.

use std::borrow::Cow;

use serde_json::Value;

/// About how many characters of a document are quoted in one place.
pub(crate) const QUOTED: usize = 2000;
/// Of a longer text no more is looked at: more than can be quoted.
const LONGEST_TEXT: usize = 2 * QUOTED;
/// Of a document with more values no more are looked at: each takes a character at least.
const MOST_VALUES: usize = QUOTED + 1000;
/// The width of `pprint` as `jsonschema` asks for it.
const WIDTH: isize = 72;

/// A value to be quoted, its dicts in the order in which they are to appear.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Quoted<'a> {
    /// A number, or `True`, `False`, `None`.
    Word(String),
    Text(Cow<'a, str>),
    List(Vec<Quoted<'a>>),
    Dict(Vec<(&'a str, Quoted<'a>)>),
}

impl<'a> Quoted<'a> {
    pub(crate) fn word(word: &str) -> Self {
        Self::Word(word.to_owned())
    }

    pub(crate) fn text(text: &'a str) -> Self {
        Self::Text(Cow::Borrowed(head(text)))
    }

    /// A dict of texts.
    pub(crate) fn pairs(pairs: &[(&'a str, &'a str)]) -> Self {
        let pairs = pairs.iter().take(MOST_VALUES);
        Self::Dict(pairs.map(|(name, value)| (head(name), Self::text(value))).collect())
    }

    /// A value of JSON. With `as_float`, a number beyond 64 bits is taken to be a float; otherwise
    /// to be an integer that did not fit.
    pub(crate) fn json(value: &'a Value, as_float: bool) -> Self {
        Self::within(value, as_float, &mut { MOST_VALUES })
    }

    fn within(value: &'a Value, as_float: bool, left: &mut usize) -> Self {
        *left = left.saturating_sub(1);
        match value {
            Value::Null => Self::word("None"),
            Value::Bool(true) => Self::word("True"),
            Value::Bool(false) => Self::word("False"),
            Value::Number(number) => Self::Word(match number.as_f64() {
                Some(value) if number.is_f64() => match as_float {
                    false if value.abs() >= 18_446_744_073_709_551_616.0 => format!("{value}"),
                    _ => float(value),
                },
                _ => number.to_string(),
            }),
            Value::String(text) => Self::text(text),
            Value::Array(items) => {
                let mut list = Vec::new();
                for item in items {
                    if *left == 0 {
                        break;
                    }
                    list.push(Self::within(item, as_float, left));
                }
                Self::List(list)
            }
            Value::Object(entries) => {
                let mut dict = Vec::new();
                for (key, value) in entries {
                    if *left == 0 {
                        break;
                    }
                    dict.push((head(key), Self::within(value, as_float, left)));
                }
                Self::Dict(dict)
            }
        }
    }

    /// On one line.
    pub(crate) fn repr(&self) -> String {
        let mut out = Sink::new(QUOTED);
        self.write(&mut out);
        out.finish()
    }

    /// Over several lines, each indented by four.
    pub(crate) fn pretty(&self, most: usize) -> String {
        let mut out = Sink::new(most);
        self.layout(&mut out, 0, 0, 0);
        let mut text = String::from("    ");
        text.push_str(&out.finish().replace('\n', "\n    "));
        text
    }

    fn write(&self, out: &mut Sink) {
        match self {
            Self::Word(word) => out.put(word),
            Self::Text(text) => write_text(text, out),
            Self::List(items) => {
                out.put("[");
                for (at, item) in items.iter().enumerate() {
                    if out.is_full() {
                        return;
                    }
                    out.put(if at == 0 { "" } else { ", " });
                    item.write(out);
                }
                out.put("]");
            }
            Self::Dict(entries) => {
                out.put("{");
                for (at, (key, value)) in entries.iter().enumerate() {
                    if out.is_full() {
                        return;
                    }
                    out.put(if at == 0 { "" } else { ", " });
                    write_text(key, out);
                    out.put(": ");
                    value.write(out);
                }
                out.put("}");
            }
        }
    }

    /// As `PrettyPrinter._format`: on the line if it fits, otherwise broken up.
    fn layout(&self, out: &mut Sink, indent: isize, allowance: isize, level: usize) {
        if out.is_full() {
            return;
        }
        let room = usize::try_from(WIDTH - indent - allowance).unwrap_or(0);
        let mut line = Sink::new(room);
        self.write(&mut line);
        if !line.overflowed {
            return out.put(&line.text);
        }
        match self {
            Self::Word(word) => out.put(word),
            Self::Text(text) => layout_text(text, out, indent, allowance, level + 1),
            Self::List(items) => {
                out.put("[");
                let last = items.len().saturating_sub(1);
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        out.put(",");
                        out.new_line(indent + 1);
                    }
                    let after = if at == last { allowance + 1 } else { 1 };
                    item.layout(out, indent + 1, after, level + 1);
                    if out.is_full() {
                        return;
                    }
                }
                out.put("]");
            }
            Self::Dict(entries) => {
                out.put("{");
                let last = entries.len().saturating_sub(1);
                for (at, (key, value)) in entries.iter().enumerate() {
                    if at > 0 {
                        out.put(",");
                        out.new_line(indent + 1);
                    }
                    let key = repr(key);
                    out.put(&key);
                    out.put(": ");
                    let after = if at == last { allowance + 1 } else { 1 };
                    value.layout(out, indent + 1 + width(&key) + 2, after, level + 1);
                    if out.is_full() {
                        return;
                    }
                }
                out.put("}");
            }
        }
    }
}

/// A text on one line, in quotes.
pub(crate) fn repr(text: &str) -> String {
    let mut out = Sink::new(QUOTED);
    write_text(head(text), &mut out);
    out.finish()
}

/// Texts in quotes, with commas between.
pub(crate) fn listed<'t>(texts: impl IntoIterator<Item = &'t str>) -> String {
    let mut out = Sink::new(QUOTED);
    for (at, text) in texts.into_iter().enumerate() {
        if out.is_full() {
            break;
        }
        out.put(if at == 0 { "" } else { ", " });
        write_text(head(text), &mut out);
    }
    out.finish()
}

/// A float: the shortest digits that read back as it, as a decimal fraction or with an exponent.
pub(crate) fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(-4..16) => {
            let plain = format!("{value}");
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        Err(_) => scientific,
    }
}

/// As much of a text as is ever looked at.
fn head(text: &str) -> &str {
    match text.char_indices().nth(LONGEST_TEXT) {
        Some((end, _)) => text.get(..end).unwrap_or(text),
        None => text,
    }
}

fn width(text: &str) -> isize {
    isize::try_from(text.chars().count()).unwrap_or(isize::MAX)
}

fn write_text(text: &str, out: &mut Sink) {
    let quote = if text.contains('\'') && !text.contains('"') { "\"" } else { "'" };
    out.put(quote);
    for char in text.chars() {
        if out.is_full() {
            return;
        }
        let mut buffer = [0; 4];
        match char {
            '\\' => out.put("\\\\"),
            '\n' => out.put("\\n"),
            '\r' => out.put("\\r"),
            '\t' => out.put("\\t"),
            '\'' if quote == "'" => out.put("\\'"),
            ' '..='~' => out.put(char.encode_utf8(&mut buffer)),
            _ if is_printable(char) => out.put(char.encode_utf8(&mut buffer)),
            _ => out.put(&match u32::from(char) {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.put(quote);
}

/// Python's notion of printable, which is the one of Rust's `escape_debug` of a text (behind its
/// start, where combining characters are escaped, too).
fn is_printable(char: char) -> bool {
    let mut text = String::from("a");
    text.push(char);
    !text.escape_debug().any(|char| char == '\\')
}

/// As `PrettyPrinter._pprint_str`: lines apart, and those too long broken behind spaces.
fn layout_text(text: &str, out: &mut Sink, indent: isize, allowance: isize, level: usize) {
    if text.is_empty() {
        return out.put("''");
    }
    let outermost = isize::from(level == 1);
    let (indent, allowance) = (indent + outermost, allowance + outermost);
    let room = WIDTH - indent;
    let lines = lines(text);
    let mut chunks = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let is_last_line = at + 1 == lines.len();
        let whole = repr(line);
        if width(&whole) <= room - if is_last_line { allowance } else { 0 } {
            chunks.push(whole);
            continue;
        }
        let parts = parts(line);
        let mut current = String::new();
        for (at, part) in parts.iter().enumerate() {
            let is_end = is_last_line && at + 1 == parts.len();
            let candidate = format!("{current}{part}");
            if width(&repr(&candidate)) > room - if is_end { allowance } else { 0 } {
                if !current.is_empty() {
                    chunks.push(repr(&current));
                }
                current = (*part).to_owned();
            } else {
                current = candidate;
            }
        }
        if !current.is_empty() {
            chunks.push(repr(&current));
        }
    }
    if let [chunk] = chunks.as_slice() {
        return out.put(chunk);
    }
    out.put(if level == 1 { "(" } else { "" });
    for (at, chunk) in chunks.iter().enumerate() {
        if at > 0 {
            out.new_line(indent);
        }
        out.put(chunk);
    }
    out.put(if level == 1 { ")" } else { "" });
}

/// The lines with their ends, as `str.splitlines(True)` has them.
fn lines(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    let is_end =
        |char: char| matches!(char, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    while let Some(at) = rest.find(is_end) {
        let end = if rest[at..].starts_with("\r\n") {
            at + 2
        } else {
            at + rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        let (line, after) = rest.split_at(end);
        lines.push(line);
        rest = after;
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Words, each with the spaces behind it.
fn parts(line: &str) -> Vec<&str> {
    let is_space = |char: char| char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}');
    let mut parts = Vec::new();
    let mut rest = line;
    while !rest.is_empty() {
        let word = rest.find(is_space).unwrap_or(rest.len());
        let spaces = rest[word..].find(|char| !is_space(char)).unwrap_or(rest.len() - word);
        let (part, after) = rest.split_at(word + spaces);
        parts.push(part);
        rest = after;
    }
    parts
}

/// A text that takes no more than so many characters.
struct Sink {
    text: String,
    room: usize,
    overflowed: bool,
}

impl Sink {
    fn new(room: usize) -> Self {
        Self { text: String::new(), room, overflowed: false }
    }

    fn is_full(&self) -> bool {
        self.overflowed
    }

    fn put(&mut self, text: &str) {
        if self.overflowed {
            return;
        }
        let length = text.chars().count();
        if length <= self.room {
            self.text.push_str(text);
            self.room -= length;
        } else {
            self.text.extend(text.chars().take(self.room));
            self.overflowed = true;
        }
    }

    fn new_line(&mut self, indent: isize) {
        let spaces = usize::try_from(indent).unwrap_or(0).min(self.room.saturating_add(1));
        self.put("\n");
        self.put(&" ".repeat(spaces));
    }

    /// The text, with `...` where it was cut.
    fn finish(mut self) -> String {
        if self.overflowed {
            self.text.push_str("...");
        }
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_does() {
        for (value, expected) in [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (3.40282e38, "3.40282e+38"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(float(value), expected);
        }
    }

    #[test]
    fn texts_are_quoted_as_python_does() {
        for (text, expected) in [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("'\"", "'\\'\"'"),
            ("\\\n\r\t\u{0}\u{7f}\u{85}", "'\\\\\\n\\r\\t\\x00\\x7f\\x85'"),
            ("é\u{301}日😀", "'é\u{301}日😀'"),
            ("\u{a0}\u{200b}\u{2028}\u{e000}\u{10ffff}", "'\\xa0\\u200b\\u2028\\ue000\\U0010ffff'"),
        ] {
            assert_eq!(repr(text), expected);
        }
    }

    #[test]
    fn what_is_quoted_is_bounded() {
        let mut nested = Value::from("x".repeat(10_000));
        for _ in 0..120 {
            nested = serde_json::json!({ "k".repeat(10_000): nested, "other": vec![0; 1000] });
        }
        let quoted = Quoted::json(&nested, false);
        assert_eq!(quoted.repr().len(), QUOTED + 3);
        assert!(quoted.pretty(QUOTED).len() < 4 * QUOTED);
        assert!(quoted.pretty(QUOTED).ends_with("..."));
    }
}

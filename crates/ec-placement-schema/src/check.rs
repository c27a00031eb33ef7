//! Checking a document against a schema, and telling the error that says most.
//!
//! Every error is looked at, and the most relevant one is kept: as `jsonschema.best_match` has it,
//! the one nearest to the root of the document; of several at one depth, the one whose path sorts
//! last; of several in one place, any before an `anyOf`, then one whose value is of the type that
//! its schema asks for, then the first. If it is an `anyOf`, the least relevant error of its
//! alternatives is told in its place, unless two are as good as each other.

use std::{
    cmp::{Ordering, Reverse},
    collections::HashSet,
    fmt::Write as _,
};

use serde_json::Value;

use crate::{
    python::{self, QUOTED, Quoted},
    schema::{Keyword, Schema, Type, Uuid, is_integral},
};

/// A value of a document or of a query.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Node<'a> {
    Json(&'a Value),
    Text(&'a str),
    /// The parameters of a query, each name once.
    Pairs(&'a [(&'a str, &'a str)]),
}

impl<'a> Node<'a> {
    fn as_str(self) -> Option<&'a str> {
        match self {
            Self::Json(value) => value.as_str(),
            Self::Text(text) => Some(text),
            Self::Pairs(_) => None,
        }
    }

    fn as_number(self) -> Option<&'a serde_json::Number> {
        match self {
            Self::Json(Value::Number(number)) => Some(number),
            _ => None,
        }
    }

    fn as_array(self) -> Option<&'a [Value]> {
        match self {
            Self::Json(value) => value.as_array().map(Vec::as_slice),
            _ => None,
        }
    }

    /// The number of keys, if it is an object.
    fn keys(self) -> Option<usize> {
        match self {
            Self::Json(value) => value.as_object().map(serde_json::Map::len),
            Self::Pairs(pairs) => Some(pairs.len()),
            Self::Text(_) => None,
        }
    }

    fn get(self, key: &str) -> Option<Self> {
        match self {
            Self::Json(value) => value.as_object()?.get(key).map(Self::Json),
            Self::Pairs(pairs) => {
                pairs.iter().find(|(name, _)| *name == key).map(|(_, value)| Self::Text(value))
            }
            Self::Text(_) => None,
        }
    }

    fn for_each_entry(self, mut each: impl FnMut(&'a str, Self)) {
        match self {
            Self::Json(Value::Object(entries)) => {
                entries.iter().for_each(|(key, value)| each(key, Self::Json(value)));
            }
            Self::Pairs(pairs) => {
                pairs.iter().for_each(|(name, value)| each(name, Self::Text(value)));
            }
            _ => {}
        }
    }

    fn is(self, kind: Type) -> bool {
        match (kind, self) {
            (Type::Object, Self::Pairs(_)) | (Type::String, Self::Text(_)) => true,
            (_, Self::Pairs(_) | Self::Text(_)) => false,
            (Type::Array, Self::Json(value)) => value.is_array(),
            (Type::Integer, Self::Json(value)) => is_integral(value),
            (Type::Null, Self::Json(value)) => value.is_null(),
            (Type::Number, Self::Json(value)) => value.is_number(),
            (Type::Object, Self::Json(value)) => value.is_object(),
            (Type::String, Self::Json(value)) => value.is_string(),
        }
    }

    fn quoted(self, as_float: bool) -> Quoted<'a> {
        match self {
            Self::Json(value) => Quoted::json(value, as_float),
            Self::Text(text) => Quoted::text(text),
            Self::Pairs(pairs) => Quoted::pairs(pairs),
        }
    }
}

/// One step of a path into a document or into a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// The way to where the check is, as a list on the stack.
#[derive(Clone, Copy, Debug)]
enum Trail<'t, 'a> {
    Root,
    Below(&'t Trail<'t, 'a>, Step<'a>),
}

impl<'a> Trail<'_, 'a> {
    fn steps(&self) -> Vec<Step<'a>> {
        let mut steps = Vec::new();
        let mut trail = self;
        while let Trail::Below(up, step) = trail {
            steps.push(*step);
            trail = up;
        }
        steps.reverse();
        steps
    }
}

/// An error: which rule refused what, and where.
#[derive(Debug)]
struct Fault<'a> {
    path: Vec<Step<'a>>,
    /// The way to the schema, without the keyword.
    schema_path: Vec<Step<'a>>,
    schema: &'a Schema,
    keyword: &'a Keyword,
    node: Node<'a>,
    /// The key that is missing, if one is.
    missing: &'a str,
    /// Why the alternatives of an `anyOf` refused.
    context: Vec<Fault<'a>>,
}

/// Checks a value. The error is the text of the most relevant fault.
pub(crate) fn check(schema: &Schema, node: Node<'_>) -> Result<(), String> {
    let mut best: Option<Fault<'_>> = None;
    walk(schema, node, &Trail::Root, &Trail::Root, &mut |fault| {
        if best.as_ref().is_none_or(|best| fault.relevance(best) == Ordering::Greater) {
            best = Some(fault);
        }
    });
    match best {
        Some(fault) => Err(fault.most_telling().to_text()),
        None => Ok(()),
    }
}

fn walk<'a>(
    schema: &'a Schema,
    node: Node<'a>,
    path: &Trail<'_, 'a>,
    schema_path: &Trail<'_, 'a>,
    tell: &mut dyn FnMut(Fault<'a>),
) {
    for keyword in &schema.keywords {
        let at = Trail::Below(schema_path, Step::Key(keyword.name()));
        let fault = |missing, context| Fault {
            path: path.steps(),
            schema_path: schema_path.steps(),
            schema,
            keyword,
            node,
            missing,
            context,
        };
        match keyword {
            Keyword::Properties(properties) => {
                for (name, schema) in properties {
                    if let Some(value) = node.get(name) {
                        let step = Step::Key(name);
                        let (path, at) = (Trail::Below(path, step), Trail::Below(&at, step));
                        walk(schema, value, &path, &at, tell);
                    }
                }
            }
            Keyword::PatternProperties(patterns) => {
                for (pattern, text, schema) in patterns {
                    let at = Trail::Below(&at, Step::Key(text));
                    node.for_each_entry(|key, value| {
                        if pattern.matches(key) {
                            walk(schema, value, &Trail::Below(path, Step::Key(key)), &at, tell);
                        }
                    });
                }
            }
            Keyword::Items(schema) => {
                for (index, item) in node.as_array().unwrap_or_default().iter().enumerate() {
                    let path = Trail::Below(path, Step::Index(index));
                    walk(schema, Node::Json(item), &path, &at, tell);
                }
            }
            Keyword::Required(names) if node.keys().is_some() => {
                for name in names {
                    if node.get(name).is_none() {
                        tell(fault(name, Vec::new()));
                    }
                }
            }
            Keyword::AnyOf(schemas) => {
                let mut context = Vec::new();
                let fits = schemas.iter().enumerate().any(|(index, schema)| {
                    let before = context.len();
                    let at = Trail::Below(&Trail::Root, Step::Index(index));
                    walk(schema, node, &Trail::Root, &at, &mut |fault| context.push(fault));
                    context.len() == before
                });
                if !fits {
                    tell(fault("", context));
                }
            }
            _ if refuses(keyword, schema, node) => tell(fault("", Vec::new())),
            _ => {}
        }
    }
}

/// Whether a rule that looks at nothing but the value itself refuses it.
fn refuses(keyword: &Keyword, schema: &Schema, node: Node<'_>) -> bool {
    let shorter = |least: usize| {
        // The length in characters is never more than that in bytes.
        node.as_str().is_some_and(|text| text.len() < least || text.chars().count() < least)
    };
    match keyword {
        Keyword::Type(kind) => !node.is(*kind),
        Keyword::Types(kinds) => !kinds.iter().any(|kind| node.is(*kind)),
        Keyword::NoAdditionalProperties => {
            let mut extra = false;
            node.for_each_entry(|key, _| extra = extra || !schema.names(key));
            extra
        }
        Keyword::MinProperties(least) => node.keys().is_some_and(|keys| keys < *least),
        Keyword::MinItems(least) => node.as_array().is_some_and(|items| items.len() < *least),
        Keyword::UniqueItems => node.as_array().is_some_and(has_twins),
        Keyword::MinLength(least) => shorter(*least),
        Keyword::MaxLength(most) => {
            node.as_str().is_some_and(|text| text.len() > *most && text.chars().count() > *most)
        }
        Keyword::Pattern(pattern) => node.as_str().is_some_and(|text| !pattern.matches(text)),
        Keyword::Enum(values) => !node.as_str().is_some_and(|text| values.contains(&text)),
        Keyword::Uuid(Uuid::Like) => !node.as_str().is_some_and(is_uuid_like),
        Keyword::Uuid(Uuid::Dashed) => node.as_str().is_some_and(|text| !is_dashed_uuid(text)),
        Keyword::Minimum(bound) => is_beyond(node, f64::from(*bound), Ordering::Less),
        Keyword::Maximum(bound) => is_beyond(node, f64::from(*bound), Ordering::Greater),
        Keyword::MaximumFloat(bound) => is_beyond(node, *bound, Ordering::Greater),
        Keyword::Properties(_)
        | Keyword::PatternProperties(_)
        | Keyword::Items(_)
        | Keyword::Required(_)
        | Keyword::AnyOf(_) => false,
    }
}

/// Whether a number lies on that side of a bound. The bounds are small enough, or coarse enough,
/// that a float tells it of any integer.
fn is_beyond(node: Node<'_>, bound: f64, side: Ordering) -> bool {
    let value = node.as_number().and_then(serde_json::Number::as_f64);
    value.and_then(|value| value.partial_cmp(&bound)) == Some(side)
}

/// Whether two items are equal.
fn has_twins(items: &[Value]) -> bool {
    let mut texts = HashSet::with_capacity(items.len());
    let mut others = HashSet::new();
    items.iter().any(|item| match item {
        Value::String(text) => !texts.insert(text.as_str()),
        other => {
            let mut spelling = String::new();
            spell(other, &mut spelling);
            !others.insert(spelling)
        }
    })
}

/// Writes a value such that equal values are written alike: `1` as `1.0`, and keys sorted.
fn spell(value: &Value, out: &mut String) {
    match value {
        Value::Number(number) if is_integral(value) && number.is_f64() => {
            let _ = write!(out, "{}", number.as_f64().unwrap_or_default());
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                spell(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Object(entries) => {
            let mut entries: Vec<_> = entries.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| *key);
            out.push('{');
            for (key, value) in entries {
                let _ = write!(out, "{key:?}:");
                spell(value, out);
                out.push(',');
            }
            out.push('}');
        }
        plain => {
            let _ = write!(out, "{plain}");
        }
    }
}

/// Whether it can be read as a uuid, dashes or none.
fn is_uuid_like(text: &str) -> bool {
    // The usual way of writing one, without a copy.
    let is_usual = text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    is_usual || {
        let bare = text.replace("urn:", "").replace("uuid:", "");
        let bare = bare.trim_matches(['{', '}']).replace('-', "");
        bare.len() == 32 && bare.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

/// Whether it can be read as a uuid and has dashes where one has them. (Python reads the digits as
/// it does any number, with `_` between them; that is left out.)
fn is_dashed_uuid(text: &str) -> bool {
    is_uuid_like(text) && [8, 13, 18, 23].iter().all(|at| text.as_bytes().get(*at) == Some(&b'-'))
}

impl<'a> Fault<'a> {
    /// How this one compares with another in how much it says.
    fn relevance(&self, other: &Self) -> Ordering {
        (Reverse(self.path.len()), &self.path, !self.is_weak(), !self.is_of_type()).cmp(&(
            Reverse(other.path.len()),
            &other.path,
            !other.is_weak(),
            !other.is_of_type(),
        ))
    }

    fn is_weak(&self) -> bool {
        matches!(self.keyword, Keyword::AnyOf(_))
    }

    /// Whether the value is of the type that the schema asks for.
    fn is_of_type(&self) -> bool {
        self.schema.keywords.iter().any(|keyword| match keyword {
            Keyword::Type(kind) => self.node.is(*kind),
            Keyword::Types(kinds) => kinds.iter().any(|kind| self.node.is(*kind)),
            _ => false,
        })
    }

    /// The fault itself, or the one of its alternatives that stands out.
    fn most_telling(mut self) -> Self {
        let mut context = std::mem::take(&mut self.context);
        context.sort_by(Self::relevance);
        match context.as_slice() {
            [] => return self,
            [first, second, ..] if first.relevance(second) == Ordering::Equal => return self,
            _ => {}
        }
        context.swap_remove(0).most_telling()
    }

    fn to_text(&self) -> String {
        let asks_number = |keyword: &Keyword| matches!(keyword, Keyword::Type(Type::Number));
        let as_float = self.node.is(Type::Number) && self.schema.keywords.iter().any(asks_number);
        let instance = self.node.quoted(as_float);
        format!(
            "{}\n\nFailed validating '{}' in schema{}:\n{}\n\nOn instance{}:\n{}",
            self.message(&instance),
            self.keyword.name(),
            indices(&self.schema_path),
            self.schema.quoted().pretty(usize::MAX),
            indices(&self.path),
            instance.pretty(QUOTED),
        )
    }

    fn message(&self, instance: &Quoted<'a>) -> String {
        let wrong = match self.keyword {
            Keyword::Required(_) => {
                return format!("{} is a required property", python::repr(self.missing));
            }
            Keyword::NoAdditionalProperties => return self.extra_keys(),
            Keyword::Type(kind) => format!("is not of type '{}'", kind.name()),
            Keyword::Types(kinds) => {
                format!("is not of type {}", python::listed(kinds.iter().map(|kind| kind.name())))
            }
            Keyword::MinProperties(1) | Keyword::MinItems(1) | Keyword::MinLength(1) => {
                "should be non-empty".to_owned()
            }
            Keyword::MinProperties(_) => "does not have enough properties".to_owned(),
            Keyword::MinItems(_) | Keyword::MinLength(_) => "is too short".to_owned(),
            Keyword::MaxLength(_) => "is too long".to_owned(),
            Keyword::UniqueItems => "has non-unique elements".to_owned(),
            Keyword::Pattern(pattern) => {
                format!("does not match {}", python::repr(&pattern.to_string()))
            }
            Keyword::Enum(values) => {
                format!("is not one of [{}]", python::listed(values.iter().copied()))
            }
            Keyword::Uuid(_) => "is not a 'uuid'".to_owned(),
            Keyword::Minimum(bound) => format!("is less than the minimum of {bound}"),
            Keyword::Maximum(bound) => format!("is greater than the maximum of {bound}"),
            Keyword::MaximumFloat(bound) => {
                format!("is greater than the maximum of {}", python::float(*bound))
            }
            Keyword::AnyOf(_) => "is not valid under any of the given schemas".to_owned(),
            Keyword::Properties(_) | Keyword::PatternProperties(_) | Keyword::Items(_) => {
                "is not valid".to_owned()
            }
        };
        format!("{} {wrong}", instance.repr())
    }

    fn extra_keys(&self) -> String {
        let mut extra = Vec::new();
        self.node.for_each_entry(|key, _| {
            if !self.schema.names(key) {
                extra.push(key);
            }
        });
        extra.sort_unstable();
        let one = extra.len() == 1;
        let keys = python::listed(extra);
        match self.schema.patterns() {
            Some(patterns) => {
                let verb = if one { "does" } else { "do" };
                format!("{keys} {verb} not match any of the regexes: {}", python::listed(patterns))
            }
            None => {
                let verb = if one { "was" } else { "were" };
                format!("Additional properties are not allowed ({keys} {verb} unexpected)")
            }
        }
    }
}

/// A path as the indices of Python that lead there.
fn indices(steps: &[Step<'_>]) -> String {
    let mut text = String::new();
    for step in steps {
        let _ = match step {
            Step::Key(key) => write!(text, "[{}]", python::repr(key)),
            Step::Index(index) => write!(text, "[{index}]"),
        };
    }
    text
}

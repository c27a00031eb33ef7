//! A schema: its keywords in the order in which they are checked and printed, and the small
//! functions that put one together.

use serde_json::Value;

use crate::{pattern::Pattern, python::Quoted};

/// A type of JSON Schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Array,
    Integer,
    Null,
    Number,
    Object,
    String,
}

impl Type {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Array => "array",
            Self::Integer => "integer",
            Self::Null => "null",
            Self::Number => "number",
            Self::Object => "object",
            Self::String => "string",
        }
    }
}

/// How strictly a uuid is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Uuid {
    /// In bodies: any way of writing one, dashes or none, `urn:uuid:`, braces.
    Like,
    /// In queries: with its four dashes.
    Dashed,
}

/// One rule of a schema.
#[derive(Clone, Debug)]
pub(crate) enum Keyword {
    Type(Type),
    Types(&'static [Type]),
    Properties(Vec<(&'static str, Schema)>),
    PatternProperties(Vec<(Pattern, String, Schema)>),
    NoAdditionalProperties,
    MinProperties(usize),
    Required(Vec<&'static str>),
    Items(Box<Schema>),
    MinItems(usize),
    UniqueItems,
    MinLength(usize),
    MaxLength(usize),
    Pattern(Pattern),
    Enum(&'static [&'static str]),
    Uuid(Uuid),
    Minimum(u32),
    Maximum(u32),
    MaximumFloat(f64),
    AnyOf(Vec<Schema>),
}

impl Keyword {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Type(_) | Self::Types(_) => "type",
            Self::Properties(_) => "properties",
            Self::PatternProperties(_) => "patternProperties",
            Self::NoAdditionalProperties => "additionalProperties",
            Self::MinProperties(_) => "minProperties",
            Self::Required(_) => "required",
            Self::Items(_) => "items",
            Self::MinItems(_) => "minItems",
            Self::UniqueItems => "uniqueItems",
            Self::MinLength(_) => "minLength",
            Self::MaxLength(_) => "maxLength",
            Self::Pattern(_) => "pattern",
            Self::Enum(_) => "enum",
            Self::Uuid(_) => "format",
            Self::Minimum(_) => "minimum",
            Self::Maximum(_) | Self::MaximumFloat(_) => "maximum",
            Self::AnyOf(_) => "anyOf",
        }
    }

    fn quoted(&self) -> Quoted<'_> {
        let texts =
            |texts: &[&'static str]| Quoted::List(texts.iter().map(|text| Quoted::text(text)).collect());
        match self {
            Self::Type(kind) => Quoted::text(kind.name()),
            Self::Types(kinds) => Quoted::List(kinds.iter().map(|kind| Quoted::text(kind.name())).collect()),
            Self::Properties(properties) => {
                Quoted::Dict(properties.iter().map(|(name, schema)| (*name, schema.quoted())).collect())
            }
            Self::PatternProperties(patterns) => Quoted::Dict(
                patterns.iter().map(|(_, text, schema)| (text.as_str(), schema.quoted())).collect(),
            ),
            Self::NoAdditionalProperties => Quoted::word("False"),
            Self::UniqueItems => Quoted::word("True"),
            Self::MinProperties(least) | Self::MinItems(least) | Self::MinLength(least) => {
                Quoted::Word(least.to_string())
            }
            Self::MaxLength(most) => Quoted::Word(most.to_string()),
            Self::Required(names) => texts(names),
            Self::Items(schema) => schema.quoted(),
            Self::Pattern(pattern) => Quoted::Text(pattern.to_string().into()),
            Self::Enum(values) => texts(values),
            Self::Uuid(_) => Quoted::text("uuid"),
            Self::Minimum(bound) | Self::Maximum(bound) => Quoted::Word(bound.to_string()),
            Self::MaximumFloat(bound) => Quoted::Word(crate::python::float(*bound)),
            Self::AnyOf(schemas) => Quoted::List(schemas.iter().map(Schema::quoted).collect()),
        }
    }
}

/// The rules of one place of a document.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schema {
    pub(crate) keywords: Vec<Keyword>,
}

impl Schema {
    pub(crate) fn of(keywords: impl Into<Vec<Keyword>>) -> Self {
        Self { keywords: keywords.into() }
    }

    /// The same schema with one more rule.
    pub(crate) fn and(mut self, keyword: Keyword) -> Self {
        self.keywords.push(keyword);
        self
    }

    /// The schema as a dict of Python's.
    pub(crate) fn quoted(&self) -> Quoted<'_> {
        Quoted::Dict(self.keywords.iter().map(|keyword| (keyword.name(), keyword.quoted())).collect())
    }

    /// Whether the key is named by a property or by a pattern.
    pub(crate) fn names(&self, key: &str) -> bool {
        self.keywords.iter().any(|keyword| match keyword {
            Keyword::Properties(properties) => properties.iter().any(|(name, _)| *name == key),
            Keyword::PatternProperties(patterns) => patterns.iter().any(|(pattern, ..)| pattern.matches(key)),
            _ => false,
        })
    }

    /// The texts of the patterns, sorted, if keys are matched with patterns.
    pub(crate) fn patterns(&self) -> Option<Vec<&str>> {
        self.keywords.iter().find_map(|keyword| match keyword {
            Keyword::PatternProperties(patterns) => {
                let mut texts: Vec<&str> = patterns.iter().map(|(_, text, _)| text.as_str()).collect();
                texts.sort_unstable();
                Some(texts)
            }
            _ => None,
        })
    }
}

/// The rule that keys which match a pattern hold what its schema says.
pub(crate) fn matching(patterns: impl IntoIterator<Item = (Pattern, Schema)>) -> Keyword {
    Keyword::PatternProperties(
        patterns.into_iter().map(|(pattern, schema)| (pattern, pattern.to_string(), schema)).collect(),
    )
}

/// The rule that these keys hold what their schemas say.
pub(crate) fn properties(properties: impl IntoIterator<Item = (&'static str, Schema)>) -> Keyword {
    Keyword::Properties(properties.into_iter().collect())
}

/// An object of these keys and no others.
pub(crate) fn closed(
    keys: impl IntoIterator<Item = (&'static str, Schema)>,
    required: &[&'static str],
) -> Schema {
    Schema::of([
        Keyword::Type(Type::Object),
        properties(keys),
        Keyword::Required(required.to_vec()),
        Keyword::NoAdditionalProperties,
    ])
}

/// An object of these keys, none of them required, and no others.
pub(crate) fn optional(keys: impl IntoIterator<Item = (&'static str, Schema)>) -> Schema {
    Schema::of([Keyword::Type(Type::Object), properties(keys), Keyword::NoAdditionalProperties])
}

pub(crate) fn string() -> Schema {
    Schema::of([Keyword::Type(Type::String)])
}

pub(crate) fn integer() -> Schema {
    Schema::of([Keyword::Type(Type::Integer)])
}

pub(crate) fn uuid(how: Uuid) -> Schema {
    string().and(Keyword::Uuid(how))
}

/// A name of 1 to 255 characters, such as a project's id.
pub(crate) fn short_text() -> Schema {
    string().and(Keyword::MinLength(1)).and(Keyword::MaxLength(255))
}

/// Whether the number counts as an integer: `2.0` does.
pub(crate) fn is_integral(value: &Value) -> bool {
    value.as_f64().is_some_and(|float| float.is_finite() && float.fract() == 0.0)
}

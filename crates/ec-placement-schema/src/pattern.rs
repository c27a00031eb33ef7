//! The patterns that the schemas use. Each has its text, which messages quote, and its meaning,
//! written out: none of them needs an engine for regular expressions.
//!
//! As in Python, `$` also matches in front of a newline that ends the text.

use std::fmt;

/// A pattern of a string or of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// The id of a provider or a consumer, as a key.
    Uuid,
    /// A resource class, a trait or a type of consumers.
    Name,
    /// A resource class of one's own.
    CustomName,
    /// A type of consumers to ask for; or all of them, or those without.
    ConsumerTypeAsked,
    /// A positive number as a text.
    Positive,
    /// The name of a parameter of a request group, with a number behind it or none (1.25).
    Numbered(&'static str),
    /// The name of a parameter of a request group, with a suffix behind it or none (1.33).
    Suffixed(&'static str),
    /// A suffix as a key of `mappings`, anywhere in it.
    Suffix,
}

impl fmt::Display for Pattern {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid => out.write_str("^[0-9a-fA-F-]{36}$"),
            Self::Name => out.write_str("^[A-Z0-9_]+$"),
            Self::CustomName => out.write_str("^CUSTOM_[A-Z0-9_]+$"),
            Self::ConsumerTypeAsked => out.write_str("^[A-Z0-9_]+$|^all|^unknown$"),
            Self::Positive => out.write_str("^[1-9][0-9]*$"),
            Self::Numbered(kind) => write!(out, "^{kind}([1-9][0-9]*)?$"),
            Self::Suffixed(kind) => write!(out, "^{kind}([a-zA-Z0-9_-]{{1,64}})?$"),
            Self::Suffix => out.write_str("[a-zA-Z0-9_-]{1,64}"),
        }
    }
}

impl Pattern {
    /// Whether the pattern is found in the text.
    pub(crate) fn matches(self, text: &str) -> bool {
        let line = text.strip_suffix('\n').unwrap_or(text);
        match self {
            Self::Uuid => {
                line.len() == 36 && line.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
            }
            Self::Name => is_name(line),
            Self::CustomName => line.strip_prefix("CUSTOM_").is_some_and(is_name),
            Self::ConsumerTypeAsked => is_name(line) || text.starts_with("all") || line == "unknown",
            Self::Positive => is_positive(line),
            Self::Numbered(kind) => {
                line.strip_prefix(kind).is_some_and(|rest| rest.is_empty() || is_positive(rest))
            }
            Self::Suffixed(kind) => {
                line.strip_prefix(kind).is_some_and(|rest| rest.len() <= 64 && rest.bytes().all(is_of_suffix))
            }
            Self::Suffix => text.bytes().any(is_of_suffix),
        }
    }
}

fn is_name(text: &str) -> bool {
    let of_name = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    !text.is_empty() && text.bytes().all(of_name)
}

fn is_positive(text: &str) -> bool {
    !text.is_empty() && !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_of_suffix(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pattern_takes_what_its_text_says() {
        let long = "a".repeat(64);
        for (pattern, text, expected) in [
            (Pattern::Uuid, "ae3fdca6-bb29-4d1a-8d1d-0d0b2a1f0d3c", true),
            (Pattern::Uuid, "ae3fdca6-bb29-4d1a-8d1d-0d0b2a1f0d3c\n", true),
            (Pattern::Uuid, "ae3fdca6bb294d1a8d1d0d0b2a1f0d3c", false),
            (Pattern::Name, "VCPU", true),
            (Pattern::Name, "VCPU\n", true),
            (Pattern::Name, "VCPU\n\n", false),
            (Pattern::Name, "", false),
            (Pattern::Name, "\n", false),
            (Pattern::Name, "VCPÜ", false),
            (Pattern::CustomName, "CUSTOM_", false),
            (Pattern::CustomName, "CUSTOM_A", true),
            (Pattern::ConsumerTypeAsked, "allure", true),
            (Pattern::ConsumerTypeAsked, "unknown\n", true),
            (Pattern::ConsumerTypeAsked, "unknowns", false),
            (Pattern::Positive, "10", true),
            (Pattern::Positive, "01", false),
            (Pattern::Numbered("resources"), "resources", true),
            (Pattern::Numbered("resources"), "resources7", true),
            (Pattern::Numbered("resources"), "resources07", false),
            (Pattern::Suffixed("in_tree"), "in_tree_A-b", true),
            (Pattern::Suffixed("in_tree"), "in_tree@", false),
            (Pattern::Suffix, "@a", true),
            (Pattern::Suffix, "", false),
        ] {
            assert_eq!(pattern.matches(text), expected, "{pattern} and {text:?}");
        }
        assert!(Pattern::Suffixed("required").matches(&format!("required{long}")));
        assert!(!Pattern::Suffixed("required").matches(&format!("required{long}a")));
    }
}

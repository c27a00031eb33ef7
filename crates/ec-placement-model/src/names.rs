//! Which trait and resource class names there are without anybody having made them.

use std::{collections::HashSet, sync::LazyLock};

use super::{records::Name, standard};

/// What every name begins with that users make.
const CUSTOM: &str = "CUSTOM_";

static TRAITS: LazyLock<HashSet<&str>> = LazyLock::new(|| standard::TRAITS.iter().copied().collect());
static CLASSES: LazyLock<HashSet<&str>> =
    LazyLock::new(|| standard::RESOURCE_CLASSES.iter().copied().collect());

/// Whether a name is one that users make and delete.
pub fn is_custom(name: &str) -> bool {
    name.starts_with(CUSTOM)
}

/// Whether a name is one that the API lets users make: `CUSTOM_`, then capitals, digits and underscores.
pub fn is_custom_name(name: &str) -> bool {
    name.len() <= 255
        && name.strip_prefix(CUSTOM).is_some_and(|rest| {
            !rest.is_empty()
                && rest.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
        })
}

/// Whether a trait is in os-traits.
pub fn is_standard_trait(name: &str) -> bool {
    TRAITS.contains(name)
}

/// Whether a resource class is in os-resource-classes.
pub fn is_standard_class(name: &str) -> bool {
    CLASSES.contains(name)
}

/// Standard classes in the order of their list, then those of users.
pub(super) fn class_order(name: &str) -> usize {
    standard::RESOURCE_CLASSES.iter().position(|own| *own == name).unwrap_or(usize::MAX)
}

/// Names of traits, standard ones first.
pub fn standard_first(traits: &[Name]) -> impl Iterator<Item = &Name> {
    let own = |custom| traits.iter().filter(move |name| is_custom(name) == custom);
    own(false).chain(own(true))
}

//! The grammar of an allocation-candidates query, as users write it on the command line.
//!
//! Only what can be told without the server is checked here: the form of the string, the names of its parameters and
//! the `resources` groups. Everything else goes through untouched, and the server has the last word
//! (OpenStack Placement API reference, "List allocation candidates").

use std::{collections::BTreeSet, num::IntErrorKind};

use crate::Resources;

/// So many bytes a query may have as it stands in a URL, of which clients can write less than 64 KiB.
pub const QUERY_MAX: usize = 60_000;

/// A query that no Placement API would understand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// It is part of no URL.
    #[error("the query takes {0} bytes of a URL, wanted {QUERY_MAX} at most")]
    TooLong(usize),
    /// There is no `resources` group at all.
    #[error("the query asks for nothing; wanted for example `resources=VCPU:1,MEMORY_MB:256`")]
    NoResources,
    /// A part without `=`.
    #[error("`{0}` is not of the form `key=value`, for example `resources=VCPU:1,MEMORY_MB:256`")]
    NotAPair(String),
    /// A group's value is not a list of class and amount.
    #[error("`{part}` in `{key}` is not of the form `CLASS:AMOUNT`, for example `VCPU:1`")]
    NotAnAmount {
        /// The group.
        key: String,
        /// The part in it.
        part: String,
    },
    /// An amount that is no number of 64 bits.
    #[error("`{part}` in `{key}` is more than any resource provider has")]
    TooMuch {
        /// The group.
        key: String,
        /// The part in it.
        part: String,
    },
    /// A class that a group asks for twice: servers take the last, and the user may have meant both.
    #[error("`{key}` asks for {class} twice")]
    Twice {
        /// The group.
        key: String,
        /// The class.
        class: String,
    },
    /// A parameter that is none of an allocation-candidates query.
    #[error(
        "a query has no `{0}`; it has resources, required, member_of and in_tree, each also with a suffix, and \
         group_policy, root_required, same_subtree and limit"
    )]
    Unknown(String),
    /// A broken percent escape.
    #[error("`{0}` is not valid percent-encoded UTF-8")]
    NotText(String),
}

/// A checked query: the parameters in their order, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceQuery {
    text: String,
    pairs: Vec<(String, String)>,
}

impl ResourceQuery {
    /// Reads `resources=VCPU:1,…&required=…`; a leading `?` does not count.
    pub fn parse(text: &str) -> Result<Self, QueryError> {
        let text = text.trim_start_matches('?');
        let mut pairs = Vec::new();
        for part in text.split('&').filter(|part| !part.is_empty()) {
            if !part.contains('=') {
                return Err(QueryError::NotAPair(part.to_owned()));
            }
            let Some((key, value)) = url::form_urlencoded::parse(part.as_bytes()).next() else {
                return Err(QueryError::NotAPair(part.to_owned()));
            };
            if key.contains('\u{fffd}') || value.contains('\u{fffd}') {
                return Err(QueryError::NotText(part.to_owned()));
            }
            if !is_known(&key) {
                return Err(QueryError::Unknown(key.into_owned()));
            }
            if is_group(&key) {
                let mut classes = BTreeSet::new();
                for (class, _) in amounts(&key, &value)? {
                    if !classes.insert(class.clone()) {
                        return Err(QueryError::Twice { key: key.into_owned(), class });
                    }
                }
            }
            pairs.push((key.into_owned(), value.into_owned()));
        }
        if !pairs.iter().any(|(key, _)| is_group(key)) {
            return Err(QueryError::NoResources);
        }
        let written =
            url::form_urlencoded::Serializer::new(String::new()).extend_pairs(&pairs).finish().len();
        match written <= QUERY_MAX {
            true => Ok(Self { text: text.to_owned(), pairs }),
            false => Err(QueryError::TooLong(written)),
        }
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The same query with one more demand of a kind of which placement takes one parameter, a list.
    #[must_use]
    pub fn also(&self, key: &str, value: &str) -> Self {
        let mut query = self.clone();
        match query.pairs.iter_mut().find(|(known, _)| known == key) {
            Some((_, list)) => *list = format!("{list},{value}"),
            None => query.pairs.push((key.to_owned(), value.to_owned())),
        }
        query
    }

    /// The same query, asking for this much of a class: in the first group that asks for it, else in the first of all.
    ///
    /// # Errors
    /// It is none any more, which a class's name can bring about.
    pub fn with(&self, class: &str, amount: u64) -> Result<Self, QueryError> {
        let asked = |part: &&str| {
            let group = url::form_urlencoded::parse(part.as_bytes()).next().filter(|(key, _)| is_group(key));
            group.map(|(key, value)| (key.into_owned(), amounts("", &value).unwrap_or_default()))
        };
        let parts: Vec<&str> = self.text.split('&').collect();
        let has =
            |part: &&str| asked(part).is_some_and(|(_, amounts)| amounts.iter().any(|(c, _)| c == class));
        let place = parts.iter().position(has).or(parts.iter().position(|part| asked(part).is_some()));
        let changed = parts.iter().enumerate().map(|(number, part)| match asked(part) {
            Some((key, mut amounts)) if Some(number) == place => {
                amounts.retain(|(known, _)| known != class);
                amounts.push((class.to_owned(), amount));
                let amounts: Vec<String> =
                    amounts.iter().map(|(class, amount)| format!("{class}:{amount}")).collect();
                format!("{key}={}", amounts.join(","))
            }
            _ => (*part).to_owned(),
        });
        Self::parse(&changed.collect::<Vec<_>>().join("&"))
    }

    /// The same query, asking for nothing of a class. A group that asked for nothing else goes with all that is demanded of it.
    ///
    /// # Errors
    /// Nothing is left of it.
    pub fn without(&self, class: &str) -> Result<Self, QueryError> {
        let asked = |value: &str| amounts("", value).unwrap_or_default();
        let gone = self.pairs.iter().filter_map(|(key, value)| {
            let suffix = key.strip_prefix(GROUP)?;
            let asked = asked(value);
            (!asked.is_empty() && asked.iter().all(|(asked, _)| asked == class)).then_some(suffix)
        });
        let gone: Vec<&str> = gone.collect();
        let is_of_gone = |key: &str| {
            let mut suffixes = OF_GROUPS.iter().filter_map(|kind| key.strip_prefix(kind));
            suffixes.any(|suffix| gone.contains(&suffix))
        };
        let left = self.text.split('&').filter_map(|part| {
            let (key, value) = url::form_urlencoded::parse(part.as_bytes()).next()?;
            let rest = |list: Vec<String>| (!list.is_empty()).then(|| format!("{key}={}", list.join(",")));
            match &*key {
                key if is_of_gone(key) => None,
                "same_subtree" => {
                    let suffixes = value.split(',').filter(|suffix| !gone.contains(&suffix.trim()));
                    rest(suffixes.map(str::to_owned).collect())
                }
                key if is_group(key) && asked(&value).iter().any(|(asked, _)| asked == class) => {
                    let others = asked(&value).into_iter().filter(|(asked, _)| asked != class);
                    rest(others.map(|(class, amount)| format!("{class}:{amount}")).collect())
                }
                _ => Some(part.to_owned()),
            }
        });
        Self::parse(&left.collect::<Vec<_>>().join("&"))
    }

    /// The parameters, decoded, in their order.
    pub fn pairs(&self) -> &[(String, String)] {
        &self.pairs
    }

    /// Amounts of all groups together, by class.
    pub fn total(&self) -> Resources {
        let mut total = Resources::new();
        for (key, value) in self.pairs.iter().filter(|(key, _)| is_group(key)) {
            for (class, amount) in amounts(key, value).unwrap_or_default() {
                let sum: &mut u64 = total.entry(class).or_default();
                *sum = sum.saturating_add(amount);
            }
        }
        total
    }
}

/// How the parameter begins that says what a group asks for.
const GROUP: &str = "resources";
/// How those begin that say something of a group.
const OF_GROUPS: [&str; 4] = [GROUP, "required", "member_of", "in_tree"];

/// `resources` or `resources<suffix>`; suffixes are limited by the server, not here.
fn is_group(key: &str) -> bool {
    key.starts_with(GROUP)
}

/// The parameters of microversion 1.39.
fn is_known(key: &str) -> bool {
    let of_all = ["group_policy", "root_required", "same_subtree", "limit"];
    OF_GROUPS.iter().any(|known| key.starts_with(known)) || of_all.contains(&key)
}

fn amounts(key: &str, value: &str) -> Result<Vec<(String, u64)>, QueryError> {
    value
        .split(',')
        .map(|part| {
            let (key, named) = (key.to_owned(), part.split_once(':').filter(|(class, _)| !class.is_empty()));
            let Some((class, amount)) = named else {
                return Err(QueryError::NotAnAmount { key, part: part.to_owned() });
            };
            match amount.parse::<u64>().map_err(|error| *error.kind()) {
                Ok(amount) => Ok((class.to_owned(), amount)),
                Err(IntErrorKind::PosOverflow) => Err(QueryError::TooMuch { key, part: part.to_owned() }),
                Err(_) => Err(QueryError::NotAnAmount { key, part: part.to_owned() }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_class_is_asked_for_once_in_each_group() {
        let twice = ResourceQuery::parse("resources=VCPU:1,MEMORY_MB:256,VCPU:2").unwrap_err();
        assert_eq!(twice.to_string(), "`resources` asks for VCPU twice");
        assert!(ResourceQuery::parse("resources=VCPU:1&resources2=VCPU:2").is_ok());
    }

    #[test]
    fn a_class_is_left_out_of_all_groups() {
        let query = ResourceQuery::parse(
            "resources=VCPU:1,DISK_GB:5&required=HW_CPU_X86_AVX2&resources2=DISK_GB:1&limit=3",
        );
        let without = query.unwrap().without("DISK_GB").unwrap();
        assert_eq!(without.text(), "resources=VCPU:1&required=HW_CPU_X86_AVX2&limit=3");
        assert_eq!(without.without("DISK_GB").unwrap(), without);
        let told = ResourceQuery::parse("resources=VCPU%3A1&resources1=DISK_GB:2").unwrap();
        assert_eq!(told.without("DISK_GB").unwrap().text(), "resources=VCPU%3A1", "as it was written");
        assert_eq!(without.without("VCPU"), Err(QueryError::NoResources));
        let granular = "resources=VCPU:1&required=HW_A&resources_D=DISK_GB:9&required_D=SSD&in_tree_D=x&member_of_E=y\
                        &resources_E=SRIOV:1,DISK_GB:1&same_subtree=_D,_E&same_subtree=_D&group_policy=none";
        let left = "resources=VCPU:1&required=HW_A&member_of_E=y&resources_E=SRIOV:1&same_subtree=_E&group_policy=none";
        assert_eq!(ResourceQuery::parse(granular).unwrap().without("DISK_GB").unwrap().text(), left);
    }

    #[test]
    fn every_parameter_that_placement_knows_is_let_through() {
        let text = "resources1=VCPU:1&resources_NET=VCPU:1&required1=A&member_of1=a&in_tree1=b&group_policy=none\
                    &root_required=C&same_subtree=1,_NET&limit=7";
        assert_eq!(ResourceQuery::parse(text).unwrap().pairs().len(), 9);
    }

    #[test]
    fn the_classic_query_and_granular_groups_are_read() {
        let query = ResourceQuery::parse(
            "resources=VCPU:1,MEMORY_MB:256&required=HW_CPU_X86_AVX2,!CUSTOM_X&resources_net=VCPU:2&member_of=in:a,b",
        )
        .unwrap();
        assert_eq!(query.total(), [("MEMORY_MB".to_owned(), 256), ("VCPU".to_owned(), 3)].into());
        assert_eq!(query.pairs()[1], ("required".to_owned(), "HW_CPU_X86_AVX2,!CUSTOM_X".to_owned()));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        for (text, wanted) in [
            ("", "asks for nothing"),
            ("required=X", "asks for nothing"),
            ("resources", "`resources` is not of the form `key=value`, for"),
            ("resources=VCPU", "`VCPU` in `resources`"),
            ("resources=VCPU:x", "`VCPU:x`"),
            ("resources=VCPU:-1", "`VCPU:-1` in `resources` is not of the form"),
            ("resources=VCPU:18446744073709551616", "is more than any resource provider has"),
            ("resources=:1", "`:1`"),
            ("resources=VCPU:1,", "``"),
            ("resources=VCPU:%ff", "percent-encoded"),
            ("resources=VCPU:1&bogus=1", "has no `bogus`; it has resources, required,"),
            ("resources=VCPU:1&limited=1", "has no `limited`"),
        ] {
            let error = ResourceQuery::parse(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn a_query_is_as_long_as_a_url_may_be_and_no_longer() {
        let long = |bytes: usize| {
            // Its colon takes three.
            let begun = "resources=VCPU:1&required=";
            ResourceQuery::parse(&format!("{begun}{}", "A".repeat(bytes - begun.len() - 2)))
        };
        assert!(long(QUERY_MAX).is_ok());
        let told = long(QUERY_MAX + 1).unwrap_err().to_string();
        assert_eq!(told, "the query takes 60001 bytes of a URL, wanted 60000 at most");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".*") {
            let _ = ResourceQuery::parse(&text);
            let _ = ResourceQuery::parse(&format!("resources={text}")).map(|query| query.total());
        }
    }

    #[test]
    fn a_demand_is_added_to_the_list_of_its_kind_or_as_its_first() {
        let query = ResourceQuery::parse("?resources=VCPU:1&&required=A").unwrap();
        assert_eq!(query.text(), "resources=VCPU:1&&required=A");
        let more = query.also("required", "!B").also("in_tree", "x");
        let pairs: Vec<(&str, &str)> =
            more.pairs().iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("resources", "VCPU:1"), ("required", "A,!B"), ("in_tree", "x")]);
    }

    #[test]
    fn another_amount_takes_the_place_of_the_one_that_is_asked_for() {
        for (text, changed) in [
            ("resources=VCPU:1,DISK_GB:1&required=A", "resources=VCPU:1,DISK_GB:5&required=A"),
            ("resources=VCPU:1&required=A%2CB", "resources=VCPU:1,DISK_GB:5&required=A%2CB"),
            ("resources=VCPU:1&resources_d=DISK_GB%3A1", "resources=VCPU:1&resources_d=DISK_GB:5"),
        ] {
            assert_eq!(ResourceQuery::parse(text).unwrap().with("DISK_GB", 5).unwrap().text(), changed);
        }
    }

    #[test]
    fn what_is_no_text_is_told_wherever_it_stands() {
        for text in ["resources=VCPU:1&%ff=x", "resources=VCPU:1&required=%ff"] {
            assert!(matches!(ResourceQuery::parse(text), Err(QueryError::NotText(_))), "{text}");
        }
    }
}

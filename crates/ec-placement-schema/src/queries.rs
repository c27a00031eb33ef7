//! The schemas of queries: objects whose values are texts.

use std::sync::LazyLock;

use crate::{
    Minor, Query, Steps,
    pattern::Pattern,
    schema::{Keyword, Schema, Type, Uuid, closed, matching, optional, properties, short_text, string, uuid},
};

/// The schemas of a request, by the microversion that brought them.
pub(crate) fn steps(query: Query) -> &'static Steps {
    static PROVIDERS: Steps =
        LazyLock::new(|| [0, 3, 4, 14, 18].map(|minor| (minor, providers(minor))).into());
    static CANDIDATES: Steps = LazyLock::new(|| {
        let mut steps = vec![];
        steps.extend([10, 16, 17, 21].map(|minor| (minor, candidates_of_one_group(minor))));
        steps.extend([25, 31, 33, 35, 36].map(|minor| (minor, candidates_of_groups(minor))));
        steps
    });
    static TRAITS: Steps =
        LazyLock::new(|| vec![(6, optional([("name", string()), ("associated", string())]))]);
    static USAGES: Steps = LazyLock::new(|| [9, 38].map(|minor| (minor, usages(minor))).into());

    match query {
        Query::ResourceProviders => &PROVIDERS,
        Query::AllocationCandidates => &CANDIDATES,
        Query::Traits => &TRAITS,
        Query::Usages => &USAGES,
    }
}

fn providers(minor: Minor) -> Schema {
    let keys = [
        (0, "name", string()),
        (0, "uuid", uuid(Uuid::Dashed)),
        (3, "member_of", string()),
        (4, "resources", string()),
        (14, "in_tree", uuid(Uuid::Dashed)),
        (18, "required", string()),
    ];
    optional(keys.into_iter().filter(|(since, ..)| *since <= minor).map(|(_, name, schema)| (name, schema)))
}

/// How many candidates to answer with. A query's value is always a text.
fn limit() -> Schema {
    Schema::of([
        Keyword::Types(&[Type::Integer, Type::String]),
        Keyword::Pattern(Pattern::Positive),
        Keyword::Minimum(1),
        Keyword::MinLength(1),
    ])
}

/// A text, told in a list of one type.
fn text_of_list() -> Schema {
    Schema::of([Keyword::Types(&[Type::String])])
}

/// Before 1.25 there was one group, and it had to ask for resources.
fn candidates_of_one_group(minor: Minor) -> Schema {
    let keys = [
        (10, "resources", string()),
        (16, "limit", limit()),
        (17, "required", text_of_list()),
        (21, "member_of", text_of_list()),
    ];
    closed(
        keys.into_iter().filter(|(since, ..)| *since <= minor).map(|(_, name, schema)| (name, schema)),
        &["resources"],
    )
}

fn candidates_of_groups(minor: Minor) -> Schema {
    let policy = string().and(Keyword::Enum(&["none", "isolate"]));
    let mut keys = vec![("limit", limit()), ("group_policy", policy)];
    if minor >= 35 {
        keys.push(("root_required", text_of_list()));
    }
    if minor >= 36 {
        keys.push(("same_subtree", text_of_list()));
    }
    let mut kinds = vec!["resources", "required", "member_of"];
    if minor >= 31 {
        kinds.push("in_tree");
    }
    let of_group = if minor >= 33 { Pattern::Suffixed } else { Pattern::Numbered };
    Schema::of([
        Keyword::Type(Type::Object),
        properties(keys),
        Keyword::NoAdditionalProperties,
        matching(kinds.into_iter().map(|kind| (of_group(kind), string()))),
    ])
}

fn usages(minor: Minor) -> Schema {
    let mut keys = vec![("project_id", short_text()), ("user_id", short_text())];
    if minor >= 38 {
        let consumer_type = string()
            .and(Keyword::Pattern(Pattern::ConsumerTypeAsked))
            .and(Keyword::MinLength(1))
            .and(Keyword::MaxLength(255));
        keys.push(("consumer_type", consumer_type));
    }
    closed(keys, &["project_id"])
}

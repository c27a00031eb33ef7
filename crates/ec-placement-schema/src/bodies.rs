//! The schemas of request bodies.

use std::sync::LazyLock;

use crate::{
    Body, Minor, Steps,
    pattern::Pattern,
    schema::{Keyword, Schema, Type, Uuid, closed, integer, matching, properties, short_text, string, uuid},
};

/// The greatest amount: that of a signed integer of SQL.
const MAX_AMOUNT: u32 = i32::MAX.unsigned_abs();
/// The greatest ratio: that of a float of single precision of SQL, as upstream rounds it.
const MAX_RATIO: f64 = 3.40282e38;

/// The schemas of a request, by the microversion that brought them.
pub(crate) fn steps(body: Body) -> &'static Steps {
    static PROVIDER_CREATE: Steps =
        LazyLock::new(|| vec![(0, provider(true, false)), (14, provider(true, true))]);
    static PROVIDER_UPDATE: Steps =
        LazyLock::new(|| vec![(0, provider(false, false)), (14, provider(false, true))]);
    static RESOURCE_CLASS: Steps = LazyLock::new(|| vec![(2, resource_class())]);
    static INVENTORY_POST: Steps = LazyLock::new(|| vec![(0, inventory_post())]);
    static INVENTORY_PUT: Steps =
        LazyLock::new(|| vec![(0, inventory(&["total", "resource_provider_generation"]))]);
    static INVENTORIES_PUT: Steps = LazyLock::new(|| vec![(0, inventories())]);
    static AGGREGATES: Steps =
        LazyLock::new(|| vec![(1, aggregate_list()), (19, aggregates_with_generation())]);
    static PROVIDER_TRAITS: Steps = LazyLock::new(|| vec![(6, provider_traits())]);
    static ALLOCATIONS_PUT: Steps = LazyLock::new(|| {
        let mut steps = vec![(0, allocation_list(false)), (8, allocation_list(true))];
        steps.extend([12, 28, 34, 38].map(|minor| (minor, allocations_of_one(minor, minor < 28))));
        steps
    });
    static ALLOCATIONS_POST: Steps =
        LazyLock::new(|| [13, 28, 34, 38].map(|minor| (minor, allocations_of_many(minor, 1))).into());
    static RESHAPER: Steps = LazyLock::new(|| [30, 34, 38].map(|minor| (minor, reshaper(minor))).into());

    match body {
        Body::ResourceProviderCreate => &PROVIDER_CREATE,
        Body::ResourceProviderUpdate => &PROVIDER_UPDATE,
        Body::ResourceClassCreate => &RESOURCE_CLASS,
        Body::InventoryPost => &INVENTORY_POST,
        Body::InventoryPut => &INVENTORY_PUT,
        Body::InventoriesPut => &INVENTORIES_PUT,
        Body::Aggregates => &AGGREGATES,
        Body::ProviderTraits => &PROVIDER_TRAITS,
        Body::AllocationsPut => &ALLOCATIONS_PUT,
        Body::AllocationsPost => &ALLOCATIONS_POST,
        Body::Reshaper => &RESHAPER,
    }
}

fn provider(with_uuid: bool, with_parent: bool) -> Schema {
    let mut keys = vec![("name", string().and(Keyword::MaxLength(200)))];
    if with_uuid {
        keys.push(("uuid", uuid(Uuid::Like)));
    }
    if with_parent {
        let parent = [uuid(Uuid::Like), Schema::of([Keyword::Type(Type::Null)])];
        keys.push(("parent_provider_uuid", Schema::of([Keyword::AnyOf(parent.into())])));
    }
    closed(keys, &["name"])
}

fn resource_class() -> Schema {
    let name = string().and(Keyword::Pattern(Pattern::CustomName)).and(Keyword::MaxLength(255));
    closed([("name", name)], &["name"])
}

fn inventory_keys() -> Vec<(&'static str, Schema)> {
    let amount = |least| integer().and(Keyword::Maximum(MAX_AMOUNT)).and(Keyword::Minimum(least));
    let ratio = Schema::of([Keyword::Type(Type::Number), Keyword::MaximumFloat(MAX_RATIO)]);
    vec![
        ("resource_provider_generation", integer()),
        ("total", amount(1)),
        ("reserved", amount(0)),
        ("min_unit", amount(1)),
        ("max_unit", amount(1)),
        ("step_size", amount(1)),
        ("allocation_ratio", ratio),
    ]
}

fn inventory(required: &[&'static str]) -> Schema {
    closed(inventory_keys(), required)
}

fn inventory_post() -> Schema {
    let mut keys = inventory_keys();
    keys.push(("resource_class", string().and(Keyword::Pattern(Pattern::Name))));
    closed(keys, &["total", "resource_class"])
}

fn inventories() -> Schema {
    let by_class =
        Schema::of([Keyword::Type(Type::Object), matching([(Pattern::Name, inventory(&["total"]))])]);
    closed(
        [("resource_provider_generation", integer()), ("inventories", by_class)],
        &["resource_provider_generation", "inventories"],
    )
}

fn aggregate_list() -> Schema {
    Schema::of([Keyword::Type(Type::Array), Keyword::Items(uuid(Uuid::Like).into()), Keyword::UniqueItems])
}

fn aggregates_with_generation() -> Schema {
    closed(
        [("aggregates", aggregate_list()), ("resource_provider_generation", integer())],
        &["aggregates", "resource_provider_generation"],
    )
}

fn provider_traits() -> Schema {
    let traits = Schema::of([Keyword::Type(Type::Array), Keyword::Items(short_text().into())]);
    closed(
        [("traits", traits), ("resource_provider_generation", integer())],
        &["traits", "resource_provider_generation"],
    )
}

/// Amounts by resource class, at least one.
fn resources() -> Schema {
    Schema::of([
        Keyword::Type(Type::Object),
        Keyword::MinProperties(1),
        matching([(Pattern::Name, integer().and(Keyword::Minimum(1)))]),
        Keyword::NoAdditionalProperties,
    ])
}

/// A consumer's allocations as a list, as they were before 1.12.
fn allocation_list(with_owner: bool) -> Schema {
    let provider = Schema::of([
        Keyword::Type(Type::Object),
        properties([("uuid", uuid(Uuid::Like))]),
        Keyword::NoAdditionalProperties,
        Keyword::Required(vec!["uuid"]),
    ]);
    let allocation = closed(
        [("resource_provider", provider), ("resources", resources())],
        &["resource_provider", "resources"],
    );
    let list =
        Schema::of([Keyword::Type(Type::Array), Keyword::MinItems(1), Keyword::Items(allocation.into())]);
    let mut keys = vec![("allocations", list)];
    let mut required = vec!["allocations"];
    if with_owner {
        keys.extend([("project_id", short_text()), ("user_id", short_text())]);
        required.extend(["project_id", "user_id"]);
    }
    closed(keys, &required)
}

/// A consumer's allocations by provider, and what the microversion wants to know of the consumer.
fn allocations_of_one(minor: Minor, some_required: bool) -> Schema {
    let allocation = closed([("generation", integer()), ("resources", resources())], &["resources"]);
    let by_provider = Schema::of([
        Keyword::Type(Type::Object),
        Keyword::MinProperties(usize::from(some_required)),
        matching([(Pattern::Uuid, allocation)]),
        Keyword::NoAdditionalProperties,
    ]);
    let mut keys =
        vec![("allocations", by_provider), ("project_id", short_text()), ("user_id", short_text())];
    let mut required = vec!["allocations", "project_id", "user_id"];
    if minor >= 28 {
        let generation =
            Schema::of([Keyword::Types(&[Type::Integer, Type::Null]), Keyword::NoAdditionalProperties]);
        keys.push(("consumer_generation", generation));
        required.push("consumer_generation");
    }
    if minor >= 34 {
        keys.push(("mappings", mappings()));
    }
    if minor >= 38 {
        let consumer_type = string()
            .and(Keyword::Pattern(Pattern::Name))
            .and(Keyword::MinLength(1))
            .and(Keyword::MaxLength(255));
        keys.push(("consumer_type", consumer_type));
        required.push("consumer_type");
    }
    Schema::of([
        Keyword::Type(Type::Object),
        properties(keys),
        Keyword::NoAdditionalProperties,
        Keyword::Required(required),
    ])
}

/// Which providers serve which request group.
fn mappings() -> Schema {
    let providers = Schema::of([
        Keyword::Type(Type::Array),
        Keyword::MinItems(1),
        Keyword::Items(uuid(Uuid::Like).into()),
    ]);
    Schema::of([
        Keyword::Type(Type::Object),
        Keyword::MinProperties(1),
        matching([(Pattern::Suffix, providers)]),
    ])
}

/// The allocations of several consumers.
fn allocations_of_many(minor: Minor, least: usize) -> Schema {
    Schema::of([
        Keyword::Type(Type::Object),
        Keyword::MinProperties(least),
        Keyword::NoAdditionalProperties,
        matching([(Pattern::Uuid, allocations_of_one(minor, false))]),
    ])
}

fn reshaper(minor: Minor) -> Schema {
    let by_provider = Schema::of([
        Keyword::Type(Type::Object),
        matching([(Pattern::Uuid, inventories())]),
        Keyword::MinProperties(1),
        Keyword::NoAdditionalProperties,
    ]);
    closed(
        [("inventories", by_provider), ("allocations", allocations_of_many(minor, 0))],
        &["inventories", "allocations"],
    )
}

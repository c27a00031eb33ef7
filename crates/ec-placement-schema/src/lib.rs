//! What the body of a request to the Placement API, or its query, may look like, by microversion,
//! and the words for what is wrong with it.
//!
//! OpenStack's server checks with Python's `jsonschema` and sends its message on to the client,
//! and clients' tests look into that text. So the text is part of the interface: which of several
//! errors is told (all of them are found, and the most relevant one is taken by the same rules),
//! its first line, the part of the schema that refused, and the part of the document that
//! was refused, both laid out as Python's `pprint` does it.
//!
//! ```text
//! 0 is less than the minimum of 1
//!
//! Failed validating 'minimum' in schema['properties']['total']:
//!     {'type': 'integer', 'maximum': 2147483647, 'minimum': 1}
//!
//! On instance['total']:
//!     0
//! ```
//!
//! The schemas use seventeen keywords and a handful of patterns, so the checker is written for
//! these: it tells the errors in the order of Python's, takes a document as it lies, allocates
//! next to nothing for one that is right, and needs no regular expressions.
//!
//! It differs from Python's where it must:
//! * What is quoted of a document ends after about 2,000 characters, with `...`.
//! * `serde_json` sorts the keys of an object (unless its `preserve_order` is on), so an object is
//!   quoted sorted where Python quotes it as it was written. Queries are quoted as written.
//! * `serde_json` holds an integer beyond 64 bits as a float. It is quoted with the digits which
//!   that float has. A float may also be off in its last digit, as `serde_json` reads it.
//!
//! As in JSON Schema, `2.0` is an integer. What passed as an integer may therefore be a float of
//! integral value, and, where a schema has no maximum, one beyond 64 bits.

mod bodies;
mod check;
mod pattern;
mod python;
mod queries;
mod schema;

use std::sync::LazyLock;

use check::Node;
use schema::Schema;
use serde_json::Value;

/// N of the microversion 1.N.
pub type Minor = u32;

/// The requests which have a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Body {
    /// `POST /resource_providers`
    ResourceProviderCreate,
    /// `PUT /resource_providers/{uuid}`
    ResourceProviderUpdate,
    /// `POST /resource_classes`, and `PUT /resource_classes/{name}`: before 1.7 of its body, from
    /// there of `{"name": …}` with the name in the path.
    ResourceClassCreate,
    /// `POST /resource_providers/{uuid}/inventories`
    InventoryPost,
    /// `PUT /resource_providers/{uuid}/inventories/{resource_class}`
    InventoryPut,
    /// `PUT /resource_providers/{uuid}/inventories`
    InventoriesPut,
    /// `PUT /resource_providers/{uuid}/aggregates`
    Aggregates,
    /// `PUT /resource_providers/{uuid}/traits`
    ProviderTraits,
    /// `PUT /allocations/{consumer}`
    AllocationsPut,
    /// `POST /allocations`
    AllocationsPost,
    /// `POST /reshaper`
    Reshaper,
}

/// The requests whose query is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Query {
    /// `GET /resource_providers`
    ResourceProviders,
    /// `GET /allocation_candidates`
    AllocationCandidates,
    /// `GET /traits`
    Traits,
    /// `GET /usages`
    Usages,
}

/// A schema and the microversions in which it changed, in rising order.
type Steps = LazyLock<Vec<(Minor, Schema)>>;

/// The schema of a microversion: that of the last step up to it, or the first one of all.
fn schema_at(steps: &'static Steps, minor: Minor) -> Option<&'static Schema> {
    let at = steps.partition_point(|(since, _)| *since <= minor);
    steps.get(at.saturating_sub(1)).map(|(_, schema)| schema)
}

/// Checks the body of a request in a microversion.
///
/// # Errors
///
/// The text of the most relevant error, as `str()` of Python's `jsonschema.ValidationError`. A
/// server puts `JSON does not validate: ` in front.
pub fn check_body(body: Body, minor: Minor, document: &Value) -> Result<(), String> {
    match schema_at(bodies::steps(body), minor) {
        Some(schema) => check::check(schema, Node::Json(document)),
        None => Ok(()),
    }
}

/// Checks the query of a request in a microversion. Of a parameter given more than once the last
/// value counts.
///
/// # Errors
///
/// `Invalid query string parameters: ` and the text of the most relevant error.
pub fn check_query(query: Query, minor: Minor, pairs: &[(String, String)]) -> Result<(), String> {
    let mut parameters: Vec<(&str, &str)> = Vec::with_capacity(pairs.len());
    let mut places = std::collections::HashMap::with_capacity(pairs.len());
    for (name, value) in pairs {
        let place = *places.entry(name.as_str()).or_insert(parameters.len());
        match parameters.get_mut(place) {
            Some(parameter) => parameter.1 = value,
            None => parameters.push((name, value)),
        }
    }
    match schema_at(queries::steps(query), minor) {
        Some(schema) => check::check(schema, Node::Pairs(&parameters))
            .map_err(|error| format!("Invalid query string parameters: {error}")),
        None => Ok(()),
    }
}

//! `/resource_providers`, with their aggregates.

use std::{collections::HashSet, sync::Arc};

use ec_placement_model::{
    Command, Key, ModelError, Node, Outcome, Provider, State,
    search::{self, SearchError},
};
use ec_placement_schema::Body;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{
    Call,
    body::{as_asked, integer},
    error::{ApiError, ApiResult, code},
    params::{exact_uuid, uuid_like},
    policy::Rule,
    reply::{Reply, now},
    search::Sought,
};
use crate::store::Unavailable;

const LIST: Rule = Rule("placement:resource_providers:list");
const CREATE: Rule = Rule("placement:resource_providers:create");
const SHOW: Rule = Rule("placement:resource_providers:show");
const UPDATE: Rule = Rule("placement:resource_providers:update");
const DELETE: Rule = Rule("placement:resource_providers:delete");
const AGGREGATES: Rule = Rule("placement:resource_providers:aggregates:list");
const SET_AGGREGATES: Rule = Rule("placement:resource_providers:aggregates:update");

/// The path of a provider.
pub(super) fn path(uuid: &Uuid) -> String {
    format!("/resource_providers/{uuid}")
}

/// A provider that is there, as handlers look at it.
pub(super) struct Found {
    pub(super) uuid: Uuid,
    pub(super) provider: Arc<Provider>,
    pub(super) generation: i64,
    pub(super) root: Uuid,
}

/// Refuses to tell of what cannot be read.
pub(super) fn readable(state: &State, key: &Key) -> ApiResult<()> {
    match state.trouble_with(key) {
        None => Ok(()),
        Some(why) => Err(Unavailable(why.to_owned()).into()),
    }
}

/// Refuses to tell of what is used, or left, where that is not known.
pub(super) fn use_known(state: &State) -> ApiResult<()> {
    state.use_unknown().map_or(Ok(()), |why| Err(Unavailable(why).into()))
}

/// The provider that a path names.
pub(super) fn find(state: &State, text: &str) -> ApiResult<Found> {
    let missing = || ApiError::not_found(format!("No resource provider with uuid {text} found"));
    let uuid = exact_uuid(text).ok_or_else(missing)?;
    readable(state, &Key::Provider(uuid))?;
    state.find(&uuid).and_then(|node| found(state, node)).ok_or_else(missing)
}

/// A node as handlers look at it, where it is a provider.
fn found(state: &State, node: &Node) -> Option<Found> {
    let provider = Arc::clone(node.provider.as_ref()?);
    let generation = node.generation.as_ref().map_or(0, |stored| stored.record);
    Some(Found { uuid: node.uuid, provider, generation, root: state.node(node.root).uuid })
}

/// What came of a write, as a provider. Every command on a provider answers with one.
pub(super) fn written(outcome: Outcome) -> ApiResult<Found> {
    match outcome {
        Outcome::Provider { uuid, provider, generation, root } => {
            Ok(Found { uuid, provider, generation, root })
        }
        _ => Err(ApiError::new(500, "the command did not answer with a provider")),
    }
}

/// Refusals that are the same wherever a provider is named in the path.
pub(super) fn gone(error: &ModelError) -> Option<ApiError> {
    match error {
        ModelError::ProviderNotFound(_) => Some(ApiError::not_found(error.to_string())),
        _ => None,
    }
}

impl Call<'_> {
    fn provider_json(&self, found: &Found) -> Value {
        let path = path(&found.uuid);
        let mut links = vec![json!({"rel": "self", "href": path})];
        let kinds =
            [("inventories", 0), ("usages", 0), ("aggregates", 1), ("traits", 6), ("allocations", 11)];
        for (rel, since) in kinds {
            if self.at_least(since) {
                links.push(json!({"rel": rel, "href": format!("{path}/{rel}")}));
            }
        }
        let mut document = json!({
            "uuid": found.uuid,
            "name": found.provider.name,
            "generation": found.generation,
            "links": links,
        });
        if self.at_least(14) {
            document["parent_provider_uuid"] = json!(found.provider.parent);
            document["root_provider_uuid"] = json!(found.root);
        }
        document
    }
}

pub(super) async fn list(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    let filter = call.provider_filter()?;
    call.read(|state| if filter.resources.is_empty() { Ok(()) } else { use_known(state) }).await?;
    let find = move |state: &State, budget| {
        let slots = search::providers(state, &filter, budget)?;
        Ok(slots.into_iter().filter_map(|slot| found(state, state.node(slot))).collect::<Vec<Found>>())
    };
    let providers = call.search(Sought::Providers, find, |providers| providers).await?.map_err(|error| {
        ApiError::bad_request(match error {
            SearchError::UnknownTrait(_) => format!("Invalid trait(s) in \"required\" parameter: {error}"),
            _ => format!("Invalid resource class in resources parameter: {error}"),
        })
    })?;
    let modified = providers.iter().map(|found| found.provider.updated_at).max();
    let documents: Vec<Value> = providers.iter().map(|found| call.provider_json(found)).collect();
    Ok(Reply::json(&json!({ "resource_providers": documents }), modified.unwrap_or_else(now)))
}

/// What a body says of a parent, which must not be nobody's uuid.
fn parent_in(document: &Value) -> Result<Option<Option<Uuid>>, ModelError> {
    let parent = |text| exact_uuid(text).ok_or_else(ModelError::no_parent);
    document.get("parent_provider_uuid").map(|said| said.as_str().map(parent).transpose()).transpose()
}

fn name_in(document: &Value) -> String {
    document.get("name").and_then(Value::as_str).unwrap_or_default().to_owned()
}

pub(super) async fn create(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(CREATE)?;
    let document = call.json(Body::ResourceProviderCreate)?;
    let name = name_in(&document);
    let given = document.get("uuid").and_then(Value::as_str).filter(|text| !text.is_empty());
    let uuid = given.and_then(uuid_like).unwrap_or_else(|| call.api.replica.host().uuid());
    let refused = |error: ModelError| match error {
        ModelError::ProviderExists(_) => ApiError::conflict(error.to_string()).code(code::DUPLICATE_NAME),
        error => {
            ApiError::bad_request(format!("Unable to create resource provider \"{name}\", {uuid}: {error}"))
        }
    };
    let parent = parent_in(&document).map_err(refused)?.flatten();
    let command = Command::CreateProvider { uuid, name: name.clone(), parent };
    let outcome = call.write(command, refused).await?;
    let found = written(outcome)?;
    let location = path(&uuid);
    if call.at_least(20) {
        Ok(Reply::json(&call.provider_json(&found), found.provider.updated_at).location(location))
    } else {
        Ok(Reply::empty(201).location(location))
    }
}

pub(super) async fn show(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(SHOW)?;
    let found = call.read(|state| find(state, call.name(0))).await?;
    Ok(Reply::json(&call.provider_json(&found), found.provider.updated_at))
}

pub(super) async fn update(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let document = call.json(Body::ResourceProviderUpdate);
    let uuid = call
        .prepare(|state| {
            let found = find(state, call.name(0))?;
            as_asked(&document).map(|_| found.uuid)
        })
        .await?;
    let document = document?;
    let refused = |error: ModelError| {
        if let Some(error) = gone(&error) {
            return error;
        }
        match error {
            ModelError::ProviderExists(name) => {
                ApiError::conflict(format!("Conflicting resource provider {name} already exists."))
                    .code(code::DUPLICATE_NAME)
            }
            error => {
                ApiError::bad_request(format!("Unable to save resource provider {}: {error}", call.name(0)))
            }
        }
    };
    let command = Command::UpdateProvider {
        uuid,
        name: name_in(&document),
        parent: parent_in(&document).map_err(refused)?,
        may_move: call.at_least(37),
    };
    let outcome = call.write(command, refused).await?;
    let found = written(outcome)?;
    Ok(Reply::json(&call.provider_json(&found), found.provider.updated_at))
}

pub(super) async fn delete(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(DELETE)?;
    let text = call.name(0);
    let missing = || ApiError::not_found(format!("No resource provider with uuid {text} found for delete"));
    let uuid = exact_uuid(text).ok_or_else(missing)?;
    call.write(Command::DeleteProvider(uuid), |error| match error {
        ModelError::ProviderHasChildren => {
            ApiError::conflict(format!("Unable to delete parent resource provider {uuid}: {error}"))
                .code(code::CANNOT_DELETE_PARENT)
        }
        ModelError::ProviderInUse => {
            ApiError::conflict(format!("Unable to delete resource provider {uuid}: {error}"))
                .code(code::PROVIDER_IN_USE)
        }
        _ => missing(),
    })
    .await?;
    Ok(Reply::empty(204))
}

fn aggregates_reply(call: &Call<'_>, found: &Found, aggregates: &[Uuid]) -> Reply {
    let mut document = json!({ "aggregates": aggregates });
    if call.at_least(19) {
        document["resource_provider_generation"] = found.generation.into();
    }
    Reply::json(&document, now())
}

pub(super) async fn aggregates(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(AGGREGATES)?;
    let found = call.read(|state| find(state, call.name(0))).await?;
    Ok(aggregates_reply(call, &found, &found.provider.aggregates))
}

pub(super) async fn set_aggregates(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(SET_AGGREGATES)?;
    let conflict = || {
        ApiError::conflict(
            "Resource provider's generation already changed. Please update the generation and try again.",
        )
        .code(code::CONCURRENT_UPDATE)
    };
    let asked = call.json(Body::Aggregates).and_then(|document| {
        let (generation, list) = if call.at_least(19) {
            (Some(integer(&document["resource_provider_generation"])?), &document["aggregates"])
        } else {
            (None, &document)
        };
        let texts = list.as_array().into_iter().flatten().filter_map(Value::as_str);
        // One in two spellings is one.
        let mut seen = HashSet::new();
        let aggregates: Vec<Uuid> = texts.filter_map(uuid_like).filter(|uuid| seen.insert(*uuid)).collect();
        Ok((generation, aggregates))
    });
    let provider = call
        .prepare(|state| {
            let found = find(state, call.name(0))?;
            as_asked(&asked).map(|_| found.uuid)
        })
        .await?;
    let (generation, aggregates) = asked?;
    let command = Command::SetAggregates { provider, generation, aggregates: aggregates.clone() };
    let outcome = call.write(command, |error| gone(&error).unwrap_or_else(conflict)).await?;
    // In the order in which they came.
    Ok(aggregates_reply(call, &written(outcome)?, &aggregates))
}

//! `/allocations`, and those of a provider.

use std::collections::{HashMap, hash_map::Entry};

use ec_placement_model::{
    Amounts, Command, Consumer, ConsumerWrite, ExpectedGeneration, Key, ModelError, Scope, Seconds, State,
    intern,
};
use ec_placement_schema::Body;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{
    Call,
    body::integer,
    error::{ApiError, ApiResult, code},
    params::{exact_uuid, uuid_like},
    policy::Rule,
    providers::{find, readable, use_known},
    reply::{Reply, now},
};

const MANAGE: Rule = Rule("placement:allocations:manage");
const LIST: Rule = Rule("placement:allocations:list");
const UPDATE: Rule = Rule("placement:allocations:update");
const DELETE: Rule = Rule("placement:allocations:delete");
const OF_PROVIDER: Rule = Rule("placement:resource_providers:allocations:list");

/// The kind of those that are instances.
const INSTANCE: &str = "INSTANCE";

/// What a consumer's kind reads as, where nobody said it.
pub(super) const UNKNOWN_TYPE: &str = "unknown";

fn amounts_json(amounts: &Amounts) -> Value {
    amounts.iter().map(|(class, amount)| (class.to_string(), (*amount).into())).collect::<Map<_, _>>().into()
}

pub(super) async fn show(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    let uuid = uuid_like(call.name(0));
    let (document, modified) = call
        .read(|state| {
            if let Some(uuid) = uuid {
                readable(state, &Key::Consumer(uuid))?;
            }
            // What others use is nobody's to see who speaks for one project.
            let may_see = |consumer: &Consumer| match &call.identity.scope {
                Some(Scope::Project(own)) => consumer.project == *own,
                _ => true,
            };
            let stored = uuid.and_then(|uuid| state.consumer(&uuid)).filter(|stored| may_see(&stored.record));
            let Some(stored) = stored else {
                return Ok((json!({"allocations": {}}), now()));
            };
            let consumer = &stored.record;
            let mut allocations = Map::new();
            for (provider, amounts) in &consumer.allocations {
                let generation = state
                    .find(provider)
                    .and_then(|node| node.generation.as_ref())
                    .map_or(0, |stored| stored.record);
                allocations.insert(
                    provider.to_string(),
                    json!({"generation": generation, "resources": amounts_json(amounts)}),
                );
            }
            let mut document = json!({ "allocations": allocations });
            if call.at_least(12) {
                document["project_id"] = json!(consumer.project);
                document["user_id"] = json!(consumer.user);
            }
            if call.at_least(28) {
                document["consumer_generation"] = consumer.generation.into();
            }
            if call.at_least(38) {
                document["consumer_type"] = consumer.consumer_type.as_deref().unwrap_or(UNKNOWN_TYPE).into();
            }
            Ok((document, consumer.created_at))
        })
        .await?;
    Ok(Reply::json(&document, modified))
}

pub(super) async fn of_provider(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(OF_PROVIDER)?;
    let text = call.name(0);
    let (document, modified) = call
        .read(|state| {
            let found = find(state, text).map_err(|error| ApiError {
                detail: format!("Resource provider '{text}' not found: {}", error.detail),
                ..error
            })?;
            use_known(state)?;
            let mut modified: Option<Seconds> = None;
            let mut allocations = Map::new();
            for uuid in state.find(&found.uuid).iter().flat_map(|node| &node.consumers) {
                let Some(stored) = state.consumer(uuid) else { continue };
                let consumer = &stored.record;
                modified = modified.max(Some(consumer.created_at));
                let own = consumer.allocations.iter().find(|(provider, _)| *provider == found.uuid);
                let mut entry = json!({"resources": own.map(|(_, amounts)| amounts_json(amounts))});
                if call.at_least(28) {
                    entry["consumer_generation"] = consumer.generation.into();
                }
                allocations.insert(uuid.to_string(), entry);
            }
            let document = json!({
                "allocations": allocations,
                "resource_provider_generation": found.generation,
            });
            Ok((document, modified.unwrap_or_else(now)))
        })
        .await?;
    Ok(Reply::json(&document, modified))
}

/// A provider named in a body, as of 1.12: what is nobody's uuid is not there.
fn provider_in(text: &str) -> ApiResult<Uuid> {
    exact_uuid(text).ok_or_else(|| {
        ApiError::bad_request(format!("Allocation for resource provider '{text}' that does not exist."))
    })
}

fn amounts_in(resources: &Value) -> ApiResult<Amounts> {
    let entries = resources.as_object().into_iter().flatten();
    let mut amounts: Amounts =
        entries.map(|(class, amount)| Ok((intern(class), integer(amount)?))).collect::<ApiResult<_>>()?;
    amounts.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(amounts)
}

impl Call<'_> {
    /// All that a body says of one consumer.
    pub(super) fn consumer_in(&self, uuid: Uuid, document: &Value) -> ApiResult<ConsumerWrite> {
        let mut allocations: Vec<(Uuid, Amounts)> = Vec::new();
        match &document["allocations"] {
            Value::Array(list) => {
                let mut places: HashMap<Uuid, usize> = HashMap::new();
                for one in list {
                    let text = one["resource_provider"]["uuid"].as_str().unwrap_or_default();
                    let (provider, amounts) = (provider_in(text)?, amounts_in(&one["resources"])?);
                    // Said twice, the last counts.
                    match places.entry(provider) {
                        Entry::Occupied(place) => allocations[*place.get()].1 = amounts,
                        Entry::Vacant(place) => {
                            place.insert(allocations.len());
                            allocations.push((provider, amounts));
                        }
                    }
                }
            }
            by_provider => {
                for (text, one) in by_provider.as_object().into_iter().flatten() {
                    allocations.push((provider_in(text)?, amounts_in(&one["resources"])?));
                }
            }
        }
        let text = |key: &str| document.get(key).and_then(Value::as_str).map(intern);
        let generation = match document.get("consumer_generation") {
            Some(given) if self.at_least(28) => {
                ExpectedGeneration::Exactly(if given.is_null() { None } else { Some(integer(given)?) })
            }
            _ => ExpectedGeneration::Any,
        };
        Ok(ConsumerWrite {
            uuid,
            generation,
            owner: text("project_id").zip(text("user_id")),
            consumer_type: text("consumer_type").filter(|_| self.at_least(38)),
            allocations,
        })
    }

    /// All that a body says of many consumers.
    pub(super) fn consumers_in(&self, document: &Value) -> ApiResult<Vec<ConsumerWrite>> {
        let entries = document.as_object().into_iter().flatten();
        let mut seen: HashMap<Uuid, &str> = HashMap::new();
        entries
            .map(|(text, one)| {
                let uuid = uuid_like(text)
                    .ok_or_else(|| ApiError::bad_request(format!("Malformed consumer_uuid: {text}")))?;
                if let Some(other) = seen.insert(uuid, text) {
                    return Err(ApiError::bad_request(format!(
                        "One consumer is in the request twice: {other} and {text}."
                    )));
                }
                self.consumer_in(uuid, one)
            })
            .collect()
    }
}

/// How a refused allocation reads; `whose` stands where upstream names the consumer.
pub(super) fn refused(error: &ModelError, whose: &str) -> ApiError {
    match error {
        ModelError::AllocationProviderNotFound(_) => ApiError::bad_request(error.to_string()),
        ModelError::ConsumerGeneration { .. } => {
            ApiError::conflict(error.to_string()).code(code::CONCURRENT_UPDATE)
        }
        ModelError::ClassNotFound(_) => {
            ApiError::bad_request(format!("Unable to allocate inventory{whose} {error}"))
        }
        error => ApiError::conflict(format!("Unable to allocate inventory: {error}")),
    }
}

pub(super) async fn set(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let text = call.name(0);
    let uuid =
        uuid_like(text).ok_or_else(|| ApiError::bad_request(format!("Malformed consumer_uuid: {text}")))?;
    let document = call.json(Body::AllocationsPut)?;
    let consumer = call.consumer_in(uuid, &document)?;
    if consumer.consumer_type.as_deref() == Some(INSTANCE) {
        call.instance.set(uuid).ok();
    }
    call.write(Command::SetAllocations(vec![consumer]), |error| {
        refused(&error, &format!(" for consumer {uuid}:"))
    })
    .await?;
    Ok(Reply::empty(204))
}

pub(super) async fn set_many(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(MANAGE)?;
    let document = call.json(Body::AllocationsPost)?;
    let consumers = call.consumers_in(&document)?;
    call.write(Command::SetAllocations(consumers), |error| refused(&error, "")).await?;
    Ok(Reply::empty(204))
}

pub(super) async fn delete(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(DELETE)?;
    let text = call.name(0);
    let missing = || ApiError::not_found(format!("No allocations for consumer '{text}'"));
    let uuid = uuid_like(text).ok_or_else(missing)?;
    let kind = |state: &State| Some(state.consumer(&uuid)?.record.consumer_type.as_deref()? == INSTANCE);
    if call.api.replica.peek(kind) == Some(true) {
        call.instance.set(uuid).ok();
    }
    call.write(Command::DeleteAllocations(uuid), |_| missing()).await?;
    Ok(Reply::empty(204))
}

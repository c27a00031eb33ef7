//! `/traits`, and those of a provider.

use ec_placement_model::{
    Command, Key, ModelError, Outcome, Seconds, State, intern, is_custom_name, is_standard_trait, standard,
    standard_first,
};
use ec_placement_schema::{Body, Query};
use serde_json::{Value, json};

use super::{
    Call,
    body::integer,
    error::{ApiError, ApiResult, code},
    params::exact_uuid,
    policy::Rule,
    providers::{Found, find, gone, readable, written},
    reply::{Reply, now},
};

const LIST: Rule = Rule("placement:traits:list");
const SHOW: Rule = Rule("placement:traits:show");
const UPDATE: Rule = Rule("placement:traits:update");
const DELETE: Rule = Rule("placement:traits:delete");
const PROVIDER_LIST: Rule = Rule("placement:resource_providers:traits:list");
const PROVIDER_UPDATE: Rule = Rule("placement:resource_providers:traits:update");
const PROVIDER_DELETE: Rule = Rule("placement:resource_providers:traits:delete");

/// When the standard names were made: with this program, for all that anybody can know.
pub(super) const STANDARD_SINCE: Seconds = 1_700_000_000;

fn not_found(name: &str) -> ApiError {
    ApiError::not_found(ModelError::TraitNotFound(name.to_owned()).to_string())
}

/// When a trait was made, where there is such a trait.
fn created_at(state: &State, name: &str) -> Option<Seconds> {
    match state.custom_traits().get(name) {
        Some(stored) => Some(stored.record.created_at),
        None => is_standard_trait(name).then_some(STANDARD_SINCE),
    }
}

pub(super) async fn list(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    call.check_query(Query::Traits)?;
    let name = match call.param("name") {
        None => None,
        Some(text) => Some(text.split_once(':').ok_or_else(|| {
            ApiError::bad_request(format!(
                "Badly formatted name parameter. Expected name query string parameter in form: \
                 ?name=[in|startswith]:[name1,name2|prefix]. Got: \"{text}\""
            ))
        })?),
    };
    let associated = match call.param("associated").map(str::to_lowercase).as_deref() {
        None => None,
        Some("true") => Some(true),
        Some("false") => Some(false),
        Some(_) => {
            return Err(ApiError::bad_request(
                "The query parameter \"associated\" only accepts \"true\" or \"false\"",
            ));
        }
    };
    let wanted = |state: &State, own: &str| {
        let named = match name {
            Some(("in", list)) => list.split(',').any(|name| name == own),
            // In any case, as most databases look for it.
            Some(("startswith", prefix)) => {
                own.get(..prefix.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(prefix))
            }
            _ => true,
        };
        named && associated.is_none_or(|wanted| wanted != state.with_trait(own).is_empty())
    };
    let (names, modified) = call
        .read(|state| {
            let custom = state.custom_traits().keys().map(|name| &**name);
            let names: Vec<String> = standard::TRAITS
                .iter()
                .copied()
                .chain(custom)
                .filter(|own| wanted(state, own))
                .map(str::to_owned)
                .collect();
            let modified = names.iter().filter_map(|name| created_at(state, name)).max();
            Ok((names, modified))
        })
        .await?;
    Ok(Reply::json(&json!({ "traits": names }), modified.unwrap_or_else(now)))
}

pub(super) async fn show(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(SHOW)?;
    let name = call.name(0);
    let created = call
        .read(|state| {
            readable(state, &Key::Trait(intern(name)))?;
            created_at(state, name).ok_or_else(|| not_found(name))
        })
        .await?;
    Ok(Reply::empty(204).dated(created))
}

pub(super) async fn ensure(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let name = call.name(0);
    if !is_custom_name(name) {
        return Err(ApiError::bad_request(
            "The trait is invalid. A valid trait must be no longer than 255 characters, start with the prefix \
             \"CUSTOM_\" and use following characters: \"A\"-\"Z\", \"0\"-\"9\" and \"_\"",
        ));
    }
    let outcome = call
        .write(Command::EnsureTrait(intern(name)), |error| ApiError::bad_request(error.to_string()))
        .await?;
    let (created, at) = match outcome {
        Outcome::Ensured { created, created_at } => (created, created_at),
        _ => (false, now()),
    };
    let reply = Reply::empty(if created { 201 } else { 204 }).location(format!("/traits/{name}"));
    Ok(reply.dated(at))
}

pub(super) async fn delete(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(DELETE)?;
    call.write(Command::DeleteTrait(intern(call.name(0))), |error| match error {
        ModelError::TraitNotFound(_) => ApiError::not_found(error.to_string()),
        ModelError::TraitInUse(_) => ApiError::conflict(error.to_string()),
        error => ApiError::bad_request(error.to_string()),
    })
    .await?;
    Ok(Reply::empty(204))
}

fn provider_reply(found: &Found) -> Reply {
    let names: Vec<_> = standard_first(&found.provider.traits).collect();
    let document = json!({"traits": names, "resource_provider_generation": found.generation});
    let modified = if found.provider.traits.is_empty() { now() } else { found.provider.updated_at };
    Reply::json(&document, modified)
}

pub(super) async fn of_provider(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(PROVIDER_LIST)?;
    Ok(provider_reply(&call.read(|state| find(state, call.name(0))).await?))
}

pub(super) async fn set_for_provider(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(PROVIDER_UPDATE)?;
    let document = call.json(Body::ProviderTraits)?;
    let generation = Some(integer(&document["resource_provider_generation"])?);
    let names = document["traits"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let traits = names.map(intern).collect();
    let text = call.name(0);
    let provider = exact_uuid(text)
        .ok_or_else(|| ApiError::not_found(format!("No resource provider with uuid {text} found")))?;
    let outcome = call
        .write(Command::SetTraits { provider, generation, traits }, |error| {
            gone(&error).unwrap_or_else(|| match error {
                ModelError::TraitsNotFound(_) => ApiError::bad_request(error.to_string()),
                _ => ApiError::conflict(
                    "Resource provider's generation already changed. Please update the generation and try again.",
                )
                .code(code::CONCURRENT_UPDATE),
            })
        })
        .await?;
    Ok(provider_reply(&written(outcome)?))
}

pub(super) async fn clear_for_provider(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(PROVIDER_DELETE)?;
    let text = call.name(0);
    let provider = exact_uuid(text)
        .ok_or_else(|| ApiError::not_found(format!("No resource provider with uuid {text} found")))?;
    let command = Command::SetTraits { provider, generation: None, traits: Vec::new() };
    call.write(command, |error| {
        gone(&error).unwrap_or_else(|| ApiError::conflict(error.to_string()).code(code::CONCURRENT_UPDATE))
    })
    .await?;
    Ok(Reply::empty(204))
}

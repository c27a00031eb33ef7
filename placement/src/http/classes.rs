//! `/resource_classes`

use ec_placement_model::{
    Command, Key, ModelError, Outcome, Seconds, State, intern, is_standard_class, standard,
};
use ec_placement_schema::{Body, check_body};
use serde_json::{Value, json};

use super::{
    Call,
    error::{ApiError, ApiResult},
    policy::Rule,
    providers::readable,
    reply::{Reply, now},
    traits::STANDARD_SINCE,
};

const LIST: Rule = Rule("placement:resource_classes:list");
const CREATE: Rule = Rule("placement:resource_classes:create");
const SHOW: Rule = Rule("placement:resource_classes:show");
const UPDATE: Rule = Rule("placement:resource_classes:update");
const DELETE: Rule = Rule("placement:resource_classes:delete");

fn path(name: &str) -> String {
    format!("/resource_classes/{name}")
}

fn class_json(name: &str) -> Value {
    json!({"name": name, "links": [{"rel": "self", "href": path(name)}]})
}

fn created_at(state: &State, name: &str) -> Option<Seconds> {
    match state.custom_classes().get(name) {
        Some(stored) => Some(stored.record.created_at),
        None => is_standard_class(name).then_some(STANDARD_SINCE),
    }
}

fn not_found(name: &str) -> ApiError {
    ApiError::not_found(ModelError::ClassNotFound(name.to_owned()).to_string())
}

pub(super) async fn list(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    let (classes, modified) = call
        .read(|state| {
            let custom = state.custom_classes();
            let modified = custom.values().map(|stored| stored.record.created_at).max();
            let names = standard::RESOURCE_CLASSES.iter().copied().chain(custom.keys().map(|name| &**name));
            Ok((names.map(class_json).collect::<Vec<_>>(), modified.unwrap_or(STANDARD_SINCE)))
        })
        .await?;
    Ok(Reply::json(&json!({ "resource_classes": classes }), modified))
}

pub(super) async fn create(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(CREATE)?;
    let document = call.json(Body::ResourceClassCreate)?;
    let name = document["name"].as_str().unwrap_or_default();
    call.write(Command::CreateClass(intern(name)), |_| {
        ApiError::conflict(format!("Conflicting resource class already exists: {name}"))
    })
    .await?;
    Ok(Reply::empty(201).location(path(name)))
}

pub(super) async fn show(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(SHOW)?;
    let name = call.name(0);
    let created = call
        .read(|state| {
            readable(state, &Key::Class(intern(name)))?;
            created_at(state, name).ok_or_else(|| not_found(name))
        })
        .await?;
    Ok(Reply::json(&class_json(name), created))
}

pub(super) async fn rename(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let document = call.json(Body::ResourceClassCreate)?;
    let (from, to) = (call.name(0), document["name"].as_str().unwrap_or_default());
    call.write(Command::RenameClass { from: intern(from), to: intern(to) }, |error| match error {
        ModelError::ClassNotFound(name) => not_found(&name),
        ModelError::ClassKeepsName(_) => ApiError::bad_request(error.to_string()),
        _ => ApiError::conflict(format!("Resource class already exists: {to}")),
    })
    .await?;
    // Upstream sends no date here.
    Ok(Reply { last_modified: None, no_cache: false, ..Reply::json(&class_json(to), now()) })
}

pub(super) async fn ensure(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let name = call.name(0);
    check_body(Body::ResourceClassCreate, call.minor, &json!({ "name": name }))
        .map_err(|error| ApiError::bad_request(format!("JSON does not validate: {error}")))?;
    let outcome = call
        .write(Command::EnsureClass(intern(name)), |error| ApiError::bad_request(error.to_string()))
        .await?;
    let created = matches!(outcome, Outcome::Ensured { created: true, .. });
    Ok(Reply::empty(if created { 201 } else { 204 }).location(path(name)))
}

pub(super) async fn delete(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(DELETE)?;
    call.write(Command::DeleteClass(intern(call.name(0))), |error| match error {
        ModelError::ClassNotFound(name) => not_found(&name),
        ModelError::ClassInUse(_) => ApiError::conflict(format!("Error in delete resource class: {error}")),
        error => ApiError::bad_request(format!("Error in delete resource class: {error}")),
    })
    .await?;
    Ok(Reply::empty(204))
}

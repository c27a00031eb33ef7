//! `/resource_providers/{uuid}/inventories`

use ec_placement_model::{Command, Inventories, Inventory, ModelError, intern};
use ec_placement_schema::Body;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{
    Call,
    body::{as_asked, integer},
    error::{ApiError, ApiResult, code},
    params::exact_uuid,
    policy::Rule,
    providers::{Found, find, gone, path, written},
    reply::Reply,
};

const LIST: Rule = Rule("placement:resource_providers:inventories:list");
const CREATE: Rule = Rule("placement:resource_providers:inventories:create");
const SHOW: Rule = Rule("placement:resource_providers:inventories:show");
const UPDATE: Rule = Rule("placement:resource_providers:inventories:update");
const DELETE: Rule = Rule("placement:resource_providers:inventories:delete");

fn inventory_json(inventory: &Inventory) -> Value {
    json!({
        "total": inventory.total,
        "reserved": inventory.reserved,
        "min_unit": inventory.min_unit,
        "max_unit": inventory.max_unit,
        "step_size": inventory.step_size,
        "allocation_ratio": inventory.allocation_ratio,
    })
}

fn all_reply(found: &Found) -> Reply {
    let inventories: Map<String, Value> = found
        .provider
        .inventories
        .iter()
        .map(|(class, inventory)| (class.to_string(), inventory_json(inventory)))
        .collect();
    // As upstream has it, nothing has no date.
    let modified = (!inventories.is_empty()).then_some(found.provider.updated_at);
    let document = json!({"resource_provider_generation": found.generation, "inventories": inventories});
    Reply { last_modified: modified, ..Reply::json(&document, found.provider.updated_at) }
}

fn one_reply(found: &Found, inventory: &Inventory) -> Reply {
    let mut document = inventory_json(inventory);
    // As upstream has it: a generation that has not been counted up yet is left out.
    if found.generation != 0 {
        document["resource_provider_generation"] = found.generation.into();
    }
    Reply::json(&document, found.provider.updated_at)
}

/// An inventory of a body, with defaults for what it does not say.
pub(super) fn inventory_in(document: &Value) -> ApiResult<Inventory> {
    let mut inventory = Inventory::default();
    let fields = [
        ("total", &mut inventory.total),
        ("reserved", &mut inventory.reserved),
        ("min_unit", &mut inventory.min_unit),
        ("max_unit", &mut inventory.max_unit),
        ("step_size", &mut inventory.step_size),
    ];
    for (key, field) in fields {
        if let Some(value) = document.get(key) {
            *field = integer(value)?;
        }
    }
    if let Some(ratio) = document.get("allocation_ratio").and_then(Value::as_f64) {
        inventory.allocation_ratio = ratio;
    }
    Ok(inventory)
}

/// The inventories of a body, by class.
pub(super) fn inventories_in(document: &Value) -> ApiResult<Inventories> {
    let entries = document.as_object().into_iter().flatten();
    entries.map(|(class, value)| Ok((intern(class), inventory_in(value)?))).collect()
}

impl Call<'_> {
    /// What can be allocated must be more than nothing; from 1.26 on, not less.
    fn check_capacity(&self, provider: &Uuid, class: &str, inventory: &Inventory) -> Result<(), String> {
        let (least, words) =
            if self.at_least(26) { (0, "greater than") } else { (1, "greater than or equal to") };
        if inventory.capacity() >= least {
            return Ok(());
        }
        Err(format!(
            "Invalid inventory for '{class}' on resource provider '{provider}'. The reserved value is {words} total."
        ))
    }
}

pub(super) async fn list(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    Ok(all_reply(&call.read(|state| find(state, call.name(0))).await?))
}

pub(super) async fn show(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(SHOW)?;
    let found = call.read(|state| find(state, call.name(0))).await?;
    let class = call.name(1);
    let inventory = found
        .provider
        .inventory(class)
        .ok_or_else(|| ApiError::not_found(format!("No inventory of class {class} for {}", found.uuid)))?;
    Ok(one_reply(&found, inventory))
}

fn unable(verb: &str, provider: &str, error: impl std::fmt::Display) -> ApiError {
    ApiError::bad_request(format!("Unable to {verb} inventory for resource provider {provider}: {error}"))
}

fn update_conflict(error: &ModelError) -> ApiError {
    ApiError::conflict(format!("update conflict: {error}")).code(code::CONCURRENT_UPDATE)
}

pub(super) async fn create(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(CREATE)?;
    let text = call.name(0);
    let asked = call.json(Body::InventoryPost).and_then(|document| {
        let class = document.get("resource_class").and_then(Value::as_str).unwrap_or_default();
        Ok((intern(class), inventory_in(&document)?))
    });
    let found = call
        .prepare(|state| {
            let found = find(state, text)?;
            let (class, inventory) = as_asked(&asked)?;
            call.check_capacity(&found.uuid, class, inventory)
                .map_err(|error| unable("create", text, error))?;
            Ok(found)
        })
        .await?;
    let (class, inventory) = asked?;
    let command =
        Command::AddInventory { provider: found.uuid, class: class.clone(), inventory: inventory.clone() };
    let outcome = call
        .write(command, |error| {
            gone(&error).unwrap_or_else(|| match error {
                ModelError::InventoryExists => {
                    ApiError::conflict(format!("Update conflict: {error}")).code(code::CONCURRENT_UPDATE)
                }
                error => unable("create", text, error),
            })
        })
        .await?;
    let found = written(outcome)?;
    let location = format!("{}/inventories/{class}", path(&found.uuid));
    Ok(one_reply(&found, &inventory).status(201).location(location))
}

pub(super) async fn set(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let text = call.name(0);
    let asked = call.json(Body::InventoriesPut).and_then(|document| {
        let inventories = inventories_in(&document["inventories"])?;
        Ok((integer(&document["resource_provider_generation"])?, inventories))
    });
    let provider = call
        .prepare(|state| {
            let found = find(state, text)?;
            let (generation, inventories) = as_asked(&asked)?;
            expect_generation(&found, *generation)?;
            for (class, inventory) in inventories {
                call.check_capacity(&found.uuid, class, inventory)
                    .map_err(|error| unable("update", text, error))?;
            }
            Ok(found.uuid)
        })
        .await?;
    let (generation, inventories) = asked?;
    let command = Command::SetInventories { provider, generation: Some(generation), inventories };
    let outcome = call
        .write(command, |error| {
            gone(&error).unwrap_or_else(|| match &error {
                ModelError::ClassNotFound(_) => ApiError::bad_request(format!(
                    "Unknown resource class in inventory for resource provider {text}: {error}"
                )),
                ModelError::InventoryInUse { .. } => {
                    ApiError::conflict(format!("update conflict: {error}")).code(code::INVENTORY_IN_USE)
                }
                ModelError::ProviderGeneration { .. } => generation_conflict(),
                _ => update_conflict(&error),
            })
        })
        .await?;
    Ok(all_reply(&written(outcome)?))
}

fn generation_conflict() -> ApiError {
    ApiError::conflict("resource provider generation conflict").code(code::CONCURRENT_UPDATE)
}

fn expect_generation(found: &Found, given: i64) -> ApiResult<()> {
    if found.generation == given { Ok(()) } else { Err(generation_conflict()) }
}

pub(super) async fn update(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(UPDATE)?;
    let (text, class) = (call.name(0), call.name(1));
    let asked = call.json(Body::InventoryPut).and_then(|document| {
        Ok((integer(&document["resource_provider_generation"])?, inventory_in(&document)?))
    });
    let provider = call
        .prepare(|state| {
            let found = find(state, text)?;
            let (generation, inventory) = as_asked(&asked)?;
            expect_generation(&found, *generation)?;
            call.check_capacity(&found.uuid, class, inventory)
                .map_err(|error| unable("update", text, error))?;
            Ok(found.uuid)
        })
        .await?;
    let (generation, inventory) = asked?;
    let command =
        Command::UpdateInventory { provider, generation, class: intern(class), inventory: inventory.clone() };
    let outcome = call
        .write(command, |error| {
            gone(&error).unwrap_or_else(|| match &error {
                ModelError::InventoryNotFound(class) => ApiError::bad_request(format!(
                    "No inventory record with resource class for resource provider {text}: No inventory of class \
                     {class} found."
                )),
                // Upstream lets this one through to its general answer for what is not found.
                ModelError::ClassNotFound(_) => ApiError::not_found(error.to_string()),
                ModelError::ProviderGeneration { .. } => generation_conflict(),
                _ => update_conflict(&error),
            })
        })
        .await?;
    Ok(one_reply(&written(outcome)?, &inventory))
}

pub(super) async fn delete(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(DELETE)?;
    let (text, class) = (call.name(0), call.name(1));
    let provider = exact_uuid(text)
        .ok_or_else(|| ApiError::not_found(format!("No resource provider with uuid {text} found")))?;
    call.write(Command::DeleteInventory { provider, class: intern(class) }, |error| {
        gone(&error).unwrap_or_else(|| match &error {
            ModelError::InventoryInUse { .. } => {
                ApiError::conflict(format!("Unable to delete inventory of class {class}: {error}"))
                    .code(code::CONCURRENT_UPDATE)
            }
            _ => ApiError::not_found(format!("No inventory of class {class} found for delete: {error}")),
        })
    })
    .await?;
    Ok(Reply::empty(204))
}

pub(super) async fn delete_all(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(DELETE)?;
    let text = call.name(0);
    let provider = exact_uuid(text)
        .ok_or_else(|| ApiError::not_found(format!("No resource provider with uuid {text} found")))?;
    let command = Command::SetInventories { provider, generation: None, inventories: Vec::new() };
    call.write(command, |error| {
        gone(&error).unwrap_or_else(|| ApiError::conflict(error.to_string()).code(code::INVENTORY_IN_USE))
    })
    .await?;
    Ok(Reply::empty(204))
}

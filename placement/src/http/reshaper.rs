//! `/reshaper`

use ec_placement_model::{Command, ModelError};
use ec_placement_schema::Body;

use super::{
    Call, allocations,
    body::integer,
    error::{ApiError, ApiResult, code},
    inventories::inventories_in,
    params::exact_uuid,
    policy::RESHAPE,
    reply::Reply,
};

pub(super) async fn reshape(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(RESHAPE)?;
    let document = call.json(Body::Reshaper)?;
    let not_found = |text: &str| {
        ApiError::bad_request(format!(
            "Resource provider {text} in inventories not found: No resource provider with uuid {text} found"
        ))
        .code(code::PROVIDER_NOT_FOUND)
    };
    let mut inventories = Vec::new();
    for (text, one) in document["inventories"].as_object().into_iter().flatten() {
        let provider = exact_uuid(text).ok_or_else(|| not_found(text))?;
        let generation = integer(&one["resource_provider_generation"])?;
        inventories.push((provider, generation, inventories_in(&one["inventories"])?));
    }
    let consumers = call.consumers_in(&document["allocations"])?;
    call.write(Command::Reshape { inventories, consumers }, |error| match &error {
        ModelError::ProviderNotFound(uuid) => not_found(&uuid.to_string()),
        ModelError::ProviderGeneration { .. } => {
            ApiError::conflict(error.to_string()).code(code::CONCURRENT_UPDATE)
        }
        ModelError::InventoryInUse { .. } => {
            ApiError::conflict(format!("update conflict: {error}")).code(code::INVENTORY_IN_USE)
        }
        ModelError::ClassNotFound(_) => ApiError::bad_request(format!("malformed reshaper data: {error}")),
        _ => allocations::refused(&error, ""),
    })
    .await?;
    Ok(Reply::empty(204))
}

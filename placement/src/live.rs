//! A snapshot of a running Placement API: OpenStack's, or ours.

use std::collections::BTreeMap;

use ec_placement_model::{Amounts, Consumer, Inventory, Provider, Seconds, intern, is_custom};
use ec_placement_store::transfer::{Snapshot, SnapshotProvider, TransferError};
use ec_runtime::exit::chain;
use futures::{StreamExt, TryStreamExt, stream};
use reqwest::Client;
use serde::{Deserialize, de::DeserializeOwned};
use uuid::Uuid;

/// Requests at a time.
const AT_A_TIME: usize = 8;
/// What is asked for.
const MICROVERSION: &str = "placement 1.39";

#[derive(Deserialize)]
struct Listed {
    uuid: Uuid,
    name: String,
    generation: i64,
    parent_provider_uuid: Option<Uuid>,
}

#[derive(Deserialize)]
struct Providers {
    resource_providers: Vec<Listed>,
}

#[derive(Deserialize)]
struct Traits {
    traits: Vec<String>,
}

#[derive(Deserialize)]
struct Aggregates {
    aggregates: Vec<Uuid>,
}

#[derive(Deserialize)]
struct Inventories {
    inventories: BTreeMap<String, Inventory>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Classes {
    resource_classes: Vec<Named>,
}

#[derive(Deserialize)]
struct OfProvider {
    /// By consumer, as it was spelt when it was made: OpenStack keeps that, and may find it by nothing else.
    allocations: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct Resources {
    resources: BTreeMap<String, i64>,
}

#[derive(Deserialize)]
struct OfConsumer {
    allocations: BTreeMap<Uuid, Resources>,
    project_id: Option<String>,
    user_id: Option<String>,
    consumer_generation: Option<i64>,
    consumer_type: Option<String>,
}

struct Source<'a> {
    client: Client,
    endpoint: &'a str,
    token: &'a str,
}

impl Source<'_> {
    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, TransferError> {
        let url = format!("{}{path}", self.endpoint);
        let failed = |error: reqwest::Error| {
            TransferError::Source(format!("GET {url}: {}", chain(&error.without_url())))
        };
        let request = self.client.get(&url).header("X-Auth-Token", self.token);
        let answer = request.header("OpenStack-API-Version", MICROVERSION).send().await.map_err(failed)?;
        if !answer.status().is_success() {
            return Err(TransferError::Source(format!("GET {url}: {}", answer.status())));
        }
        answer.json().await.map_err(failed)
    }

    async fn provider(
        &self,
        listed: Listed,
        now: Seconds,
    ) -> Result<(Uuid, SnapshotProvider, Vec<String>), TransferError> {
        let path = format!("/resource_providers/{}", listed.uuid);
        let mut provider = Provider::new(&listed.name, listed.parent_provider_uuid, now);
        let inventories: Inventories = self.get(&format!("{path}/inventories")).await?;
        provider.inventories =
            inventories.inventories.into_iter().map(|(class, own)| (intern(&class), own)).collect();
        let traits: Traits = self.get(&format!("{path}/traits")).await?;
        provider.traits = traits.traits.iter().map(|name| intern(name)).collect();
        provider.traits.sort_unstable();
        let aggregates: Aggregates = self.get(&format!("{path}/aggregates")).await?;
        provider.aggregates = aggregates.aggregates;
        provider.aggregates.sort_unstable();
        // OpenStack tells one that was said in two spellings twice.
        provider.aggregates.dedup();
        let users = self.users(listed.uuid).await?.into_keys().collect();
        Ok((listed.uuid, SnapshotProvider { generation: listed.generation, provider }, users))
    }

    /// By consumer, in its spelling, what a provider tells of those that use it.
    async fn users(&self, provider: Uuid) -> Result<BTreeMap<String, serde_json::Value>, TransferError> {
        let users: OfProvider = self.get(&format!("/resource_providers/{provider}/allocations")).await?;
        Ok(users.allocations)
    }

    /// A consumer of which a provider tells; nothing where it has ended since.
    async fn consumer(
        &self,
        uuid: Uuid,
        told: &Told,
        now: Seconds,
    ) -> Result<Option<(Uuid, Consumer)>, TransferError> {
        let path = format!("/allocations/{}", told.spelt);
        let found: OfConsumer = self.get(&path).await?;
        let (Some(project), Some(user)) = (found.project_id, found.user_id) else {
            // A cloud that runs has some that end between two questions.
            if !self.users(told.by).await?.contains_key(&told.spelt) {
                return Ok(None);
            }
            // Left out, what it uses would be given to somebody else.
            return Err(TransferError::Source(format!(
                "GET {}{path} tells of nothing, and provider {} tells that this consumer uses some of it: say the same again, and where \
                 that is refused, have that provider's allocations mended there first",
                self.endpoint, told.by
            )));
        };
        let kind = found.consumer_type.filter(|kind| kind != "unknown").map(|kind| intern(&kind));
        let mut consumer = Consumer::new(intern(&project), intern(&user), kind, now);
        // OpenStack has 0 for those that it made up for what was claimed before it knew consumers.
        consumer.generation = found.consumer_generation.unwrap_or(1).max(1);
        consumer.allocations = found
            .allocations
            .into_iter()
            .map(|(provider, own)| {
                let amounts: Amounts =
                    own.resources.into_iter().map(|(class, amount)| (intern(&class), amount)).collect();
                (provider, amounts)
            })
            .collect();
        Ok(Some((uuid, consumer)))
    }
}

/// A consumer of which a provider tells.
struct Told {
    /// As the provider spells it.
    spelt: String,
    /// One of the providers that tell of it.
    by: Uuid,
}

/// Notes a consumer of which a provider tells, in the provider's spelling.
fn note(consumers: &mut BTreeMap<Uuid, Told>, spelt: String, by: Uuid) -> Result<(), TransferError> {
    let uuid = Uuid::try_parse(&spelt)
        .map_err(|error| TransferError::Source(format!("the consumer {spelt} is no uuid: {error}")))?;
    match consumers.get(&uuid) {
        Some(other) if other.spelt != spelt => Err(TransferError::Source(format!(
            "{} and {spelt} are two consumers there, and would be one here: have one of them end, or claim as another uuid, first",
            other.spelt
        ))),
        _ => {
            consumers.insert(uuid, Told { spelt, by });
            Ok(())
        }
    }
}

/// Reads everything from a Placement API. Nobody should write there meanwhile: an API tells one thing after
/// the other. A consumer that ends meanwhile is left out.
///
/// # Errors
/// The request that failed, and how.
pub async fn fetch(
    client: Client,
    endpoint: &str,
    token: &str,
    now: Seconds,
) -> Result<Snapshot, TransferError> {
    let source = Source { client, endpoint: endpoint.trim_end_matches('/'), token };
    let traits: Traits = source.get("/traits").await?;
    let classes: Classes = source.get("/resource_classes").await?;
    let listed: Providers = source.get("/resource_providers").await?;
    let mut snapshot = Snapshot {
        version: Snapshot::VERSION,
        traits: traits.traits.into_iter().filter(|name| is_custom(name)).collect(),
        resource_classes: classes
            .resource_classes
            .into_iter()
            .map(|class| class.name)
            .filter(|name| is_custom(name))
            .collect(),
        ..Snapshot::default()
    };
    let mut consumers: BTreeMap<Uuid, Told> = BTreeMap::new();
    let mut providers = stream::iter(listed.resource_providers)
        .map(|listed| source.provider(listed, now))
        .buffer_unordered(AT_A_TIME);
    while let Some((uuid, provider, users)) = providers.try_next().await? {
        snapshot.providers.insert(uuid, provider);
        users.into_iter().try_for_each(|spelt| note(&mut consumers, spelt, uuid))?;
    }
    drop(providers);
    let mut found = stream::iter(&consumers)
        .map(|(uuid, told)| source.consumer(*uuid, told, now))
        .buffer_unordered(AT_A_TIME);
    while let Some(consumer) = found.try_next().await? {
        snapshot.consumers.extend(consumer);
    }
    drop(found);
    Ok(snapshot)
}

//! Requests and answers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use ec_model::{InstanceId, NodeId, ResourceQuery, Resources};
use reqwest::{Method, StatusCode, Url, header};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::{
    Candidate, Candidates, Claim, ConsumerAllocations, Inventory, PlacementError, PlacementResult, Provider,
    types::{
        CandidatesBody, ConsumerBody, InventoriesBody, ProviderAllocationsBody, ProvidersBody, ResourcesOf,
        TraitNamesBody, TraitsBody,
    },
};

/// The microversion of every request: the newest that OpenStack Placement 16 speaks.
pub const MICROVERSION: &str = "placement 1.39";

/// The consumer type of an instance (wanted from 1.38 on).
const CONSUMER_TYPE: &str = "INSTANCE";

/// How often a write is decided anew after a generation conflict. Conflicts come from operators and
/// from claims on the same provider, which are short: eight tries outlast them.
const CONFLICT_TRIES: usize = 8;

/// Where placement is and how to be let in.
#[derive(Clone)]
pub struct PlacementConfig {
    /// Base URL.
    pub endpoint: String,
    /// Sent as `X-Auth-Token`.
    pub token: String,
    /// For one request, from begin to end.
    pub timeout: Duration,
}

impl std::fmt::Debug for PlacementConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlacementConfig")
            .field("endpoint", &self.endpoint)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// A client of one Placement endpoint. Cheap to clone.
#[derive(Clone)]
pub struct PlacementClient {
    http: reqwest::Client,
    base: Url,
    token: header::HeaderValue,
}

impl PlacementClient {
    /// A client; nothing is sent yet.
    pub fn new(config: &PlacementConfig) -> PlacementResult<Self> {
        let invalid = |why: String| {
            PlacementError::Invalid(format!("placement.endpoint `{}` is not usable: {why}", config.endpoint))
        };
        let mut base = Url::parse(&config.endpoint).map_err(|error| invalid(error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") || base.host().is_none() {
            return Err(invalid("wanted for example http://localhost:8080".to_owned()));
        }
        // Url::join replaces the last segment unless the path ends with a slash.
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        let mut token = header::HeaderValue::from_str(&config.token).map_err(|_| {
            PlacementError::Invalid("placement.token has characters that no header may have".into())
        })?;
        token.set_sensitive(true);
        let mut builder = reqwest::Client::builder()
            .timeout(config.timeout)
            .connect_timeout(config.timeout.min(Duration::from_secs(3)))
            .user_agent(concat!("etcd-compute/", env!("CARGO_PKG_VERSION")));
        if base.scheme() == "http" {
            // Loading the system's certificates costs milliseconds that a plain connection never needs.
            builder = builder.tls_certs_only([]);
        }
        let http = builder.build().map_err(|error| invalid(chain(&error)))?;
        Ok(Self { http, base, token })
    }

    /// The base URL, for messages.
    pub fn endpoint(&self) -> &str {
        self.base.as_str()
    }

    /// Whether a Placement API answers and lets us in; tells the newest microversion it speaks.
    pub async fn probe(&self) -> PlacementResult<String> {
        let root: serde_json::Value = self.get("", NO_QUERY).await?;
        let newest = root["versions"][0]["max_version"].as_str().ok_or_else(|| {
            PlacementError::Refused(format!("{} answers, but not as a Placement API", self.base))
        })?;
        // The root is open to everybody, so that only another request shows whether the token is good.
        let _: serde_json::Value = self.get("resource_providers", &[("name", "etcd-compute-probe")]).await?;
        Ok(newest.to_owned())
    }

    /// Every way to satisfy the query, in the server's order.
    pub async fn candidates(&self, query: &ResourceQuery) -> PlacementResult<Candidates> {
        let body: CandidatesBody = self.get("allocation_candidates", query.pairs()).await?;
        let roots = body
            .provider_summaries
            .into_iter()
            .filter_map(|(provider, summary)| Some((provider, summary.root_provider_uuid?)))
            .collect();
        let candidates = body
            .allocation_requests
            .into_iter()
            .map(|request| Candidate {
                allocations: request.allocations.into_iter().map(|(rp, of)| (rp, of.resources)).collect(),
                mappings: request.mappings,
            })
            .collect();
        Ok(Candidates { candidates, roots })
    }

    /// Claims a candidate for a consumer that must not exist. [`PlacementError::Conflict`] where the
    /// room is gone meanwhile, or the consumer is there already.
    pub async fn claim(&self, claim: &Claim<'_>) -> PlacementResult<()> {
        let allocations: BTreeMap<_, _> = claim
            .candidate
            .allocations
            .iter()
            .map(|(rp, resources)| (rp, ResourcesOf { resources: resources.clone() }))
            .collect();
        let body = json!({
            "allocations": allocations,
            "mappings": claim.candidate.mappings,
            "project_id": claim.project,
            "user_id": claim.user,
            "consumer_generation": null,
            "consumer_type": CONSUMER_TYPE,
        });
        self.send(Method::PUT, &format!("allocations/{}", claim.instance), Some(&body)).await.map(drop)
    }

    /// What the consumer holds; `None` where it holds nothing.
    pub async fn allocations(&self, instance: InstanceId) -> PlacementResult<Option<ConsumerAllocations>> {
        let body: ConsumerBody = self.get(&format!("allocations/{instance}"), NO_QUERY).await?;
        let allocations: BTreeMap<NodeId, Resources> =
            body.allocations.into_iter().map(|(rp, of)| (rp, of.resources)).collect();
        Ok((!allocations.is_empty()).then_some(ConsumerAllocations { allocations }))
    }

    /// Everything that is allocated from one provider, by consumer.
    pub async fn provider_allocations(
        &self,
        node: NodeId,
    ) -> PlacementResult<HashMap<InstanceId, Resources>> {
        let body: ProviderAllocationsBody =
            self.get(&format!("resource_providers/{node}/allocations"), NO_QUERY).await?;
        Ok(body.allocations.into_iter().map(|(consumer, of)| (consumer, of.resources)).collect())
    }

    /// Gives back everything that the consumer holds; nothing held is not an error.
    pub async fn release(&self, instance: InstanceId) -> PlacementResult<()> {
        match self.send(Method::DELETE, &format!("allocations/{instance}"), None).await {
            Ok(_) | Err(PlacementError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes sure that the node's provider exists under this name; an existing one is taken over.
    pub async fn ensure_provider(&self, node: NodeId, name: &str) -> PlacementResult<Provider> {
        let path = format!("resource_providers/{node}");
        let existing = match self.get::<Provider>(&path, NO_QUERY).await {
            Ok(provider) => provider,
            Err(PlacementError::NotFound(_)) => {
                let body = json!({"uuid": node, "name": name});
                match self.send(Method::POST, "resource_providers", Some(&body)).await {
                    Ok(answer) => return parse(&self.base, &answer),
                    // Another start of the same agent may have been quicker; else the name is taken.
                    Err(PlacementError::Conflict(_)) => match self.get::<Provider>(&path, NO_QUERY).await {
                        Ok(provider) => provider,
                        Err(PlacementError::NotFound(_)) => return Err(self.name_taken(node, name).await?),
                        Err(error) => return Err(error),
                    },
                    Err(error) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        if existing.name == name {
            return Ok(existing);
        }
        match self.send(Method::PUT, &path, Some(&json!({"name": name}))).await {
            Ok(answer) => parse(&self.base, &answer),
            Err(PlacementError::Conflict(_)) => Err(self.name_taken(node, name).await?),
            Err(error) => Err(error),
        }
    }

    async fn name_taken(&self, node: NodeId, name: &str) -> PlacementResult<PlacementError> {
        let body: ProvidersBody = self.get("resource_providers", &[("name", name)]).await?;
        Ok(match body.resource_providers.first() {
            Some(owner) => PlacementError::NameTaken {
                name: name.to_owned(),
                owner: owner.uuid.to_string(),
                node: node.to_string(),
            },
            None => PlacementError::Conflict(format!("resource provider `{name}` changes at this moment")),
        })
    }

    /// Sets the inventory of these classes anew, all at once. Classes that are not among them stay: an
    /// operator added them, and placement would refuse to drop what is in use.
    pub async fn set_inventory(
        &self,
        node: NodeId,
        inventory: &BTreeMap<String, Inventory>,
    ) -> PlacementResult<()> {
        self.change_inventory(node, |current| {
            let mut wanted = current.clone();
            wanted.extend(inventory.iter().map(|(class, amounts)| (class.clone(), amounts.clone())));
            wanted
        })
        .await
    }

    /// Locks the provider: nothing more can be claimed, because every processor is reserved.
    pub async fn lock(&self, node: NodeId) -> PlacementResult<()> {
        self.change_inventory(node, |current| {
            let mut locked = current.clone();
            if let Some(vcpu) = locked.get_mut("VCPU") {
                vcpu.reserved = vcpu.total;
            }
            locked
        })
        .await
    }

    async fn change_inventory(
        &self,
        node: NodeId,
        change: impl Fn(&BTreeMap<String, Inventory>) -> BTreeMap<String, Inventory>,
    ) -> PlacementResult<()> {
        let path = format!("resource_providers/{node}/inventories");
        let mut tries = 0;
        loop {
            let current: InventoriesBody = self.get(&path, NO_QUERY).await?;
            let wanted = change(&current.inventories);
            if wanted == current.inventories {
                return Ok(());
            }
            let body = json!({
                "resource_provider_generation": current.resource_provider_generation,
                "inventories": wanted,
            });
            let written = self.send(Method::PUT, &path, Some(&body)).await;
            if !is_worth_another_try(&written, &mut tries) {
                return written.map(drop);
            }
        }
    }

    /// Sets the provider's traits: `ours` are added, and those that `is_ours` says we manage are dropped
    /// where they are no longer among them. What operators added by hand stays. Custom traits are created
    /// where placement does not know them; standard ones that this server does not know are left out.
    pub async fn set_traits(
        &self,
        node: NodeId,
        ours: &BTreeSet<String>,
        is_ours: impl Fn(&str) -> bool,
    ) -> PlacementResult<()> {
        for custom in ours.iter().filter(|name| name.starts_with("CUSTOM_")) {
            self.send(Method::PUT, &format!("traits/{custom}"), None).await?;
        }
        let mut known = BTreeSet::new();
        // One query may name many traits, but a URL has its bounds.
        for chunk in ours.iter().collect::<Vec<_>>().chunks(40) {
            let names = chunk.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(",");
            let body: TraitNamesBody = self.get("traits", &[("name", format!("in:{names}"))]).await?;
            known.extend(body.traits);
        }
        let path = format!("resource_providers/{node}/traits");
        let mut tries = 0;
        loop {
            let current: TraitsBody = self.get(&path, NO_QUERY).await?;
            let current_set: BTreeSet<String> = current.traits.into_iter().collect();
            let wanted: BTreeSet<String> =
                current_set.iter().filter(|name| !is_ours(name)).chain(&known).cloned().collect();
            if wanted == current_set {
                return Ok(());
            }
            let body = json!({
                "resource_provider_generation": current.resource_provider_generation,
                "traits": wanted,
            });
            let written = self.send(Method::PUT, &path, Some(&body)).await;
            if !is_worth_another_try(&written, &mut tries) {
                return written.map(drop);
            }
        }
    }

    /// Usage of a provider by resource class.
    pub async fn usages(&self, node: NodeId) -> PlacementResult<Resources> {
        let body: serde_json::Value =
            self.get(&format!("resource_providers/{node}/usages"), NO_QUERY).await?;
        serde_json::from_value(body["usages"].clone())
            .map_err(|error| PlacementError::Refused(format!("usages that cannot be read: {error}")))
    }

    /// Inventory of a provider by resource class.
    pub async fn inventory(&self, node: NodeId) -> PlacementResult<BTreeMap<String, Inventory>> {
        let body: InventoriesBody =
            self.get(&format!("resource_providers/{node}/inventories"), NO_QUERY).await?;
        Ok(body.inventories)
    }

    async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(impl AsRef<str>, impl AsRef<str>)],
    ) -> PlacementResult<T> {
        let mut url = self.url(path)?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let answer = self.exchange(self.http.get(url), path).await?;
        parse(&self.base, &answer)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> PlacementResult<Vec<u8>> {
        let mut request = self.http.request(method, self.url(path)?);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.exchange(request, path).await
    }

    fn url(&self, path: &str) -> PlacementResult<Url> {
        self.base
            .join(path)
            .map_err(|error| PlacementError::Invalid(format!("`{path}` is not a path: {error}")))
    }

    async fn exchange(&self, request: reqwest::RequestBuilder, path: &str) -> PlacementResult<Vec<u8>> {
        let unreachable =
            |detail: String| PlacementError::Unreachable { endpoint: self.base.to_string(), detail };
        let answer = request
            .header("X-Auth-Token", self.token.clone())
            .header("OpenStack-API-Version", MICROVERSION)
            .header(header::ACCEPT, "application/json")
            .send()
            .await
            .map_err(|error| unreachable(chain(&error.without_url())))?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(|error| unreachable(chain(&error.without_url())))?.to_vec();
        if status.is_success() {
            return Ok(body);
        }
        let detail = detail(&body).unwrap_or_else(|| format!("HTTP {status}"));
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                PlacementError::Denied { endpoint: self.base.to_string(), status: status.as_u16() }
            }
            StatusCode::NOT_FOUND => {
                PlacementError::NotFound(path.replacen("resource_providers/", "resource provider ", 1))
            }
            StatusCode::CONFLICT => PlacementError::Conflict(detail),
            status if status.is_server_error() => unreachable(format!("HTTP {status}: {detail}")),
            _ => PlacementError::Refused(detail),
        })
    }
}

const NO_QUERY: &[(&str, &str)] = &[];

/// After a generation conflict the provider is read again and the write decided anew.
fn is_worth_another_try<T>(written: &PlacementResult<T>, tries: &mut usize) -> bool {
    *tries += 1;
    matches!(written, Err(PlacementError::Conflict(_))) && *tries < CONFLICT_TRIES
}

fn parse<T: DeserializeOwned>(base: &Url, body: &[u8]) -> PlacementResult<T> {
    serde_json::from_slice(body).map_err(|error| {
        PlacementError::Refused(format!("{base} answers something that is not the Placement API: {error}"))
    })
}

/// The `detail` of the API's error document, in one line and without webob's preamble.
fn detail(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    let text = body["errors"][0]["detail"].as_str()?;
    let text = text.rsplit("\n\n").find(|part| !part.trim().is_empty()).unwrap_or(text);
    Some(text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(500).collect())
}

/// An error with its causes: the transport's own text alone says only that something failed.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detail_of_an_error_is_one_line_without_preamble() {
        let body = br#"{"errors":[{"status":400,"title":"Bad Request","detail":"The server could not comply with the request since it is either malformed or otherwise incorrect.\n\n No such trait(s): NOPE.  ","request_id":"x"}]}"#;
        assert_eq!(detail(body).unwrap(), "No such trait(s): NOPE.");
        assert_eq!(detail(b"<html>"), None);
    }

    #[test]
    fn an_endpoint_that_is_no_url_is_refused_with_an_example() {
        rustls::crypto::ring::default_provider().install_default().ok();
        for endpoint in ["", "localhost:8080", "ftp://x", "http://"] {
            let config = PlacementConfig {
                endpoint: endpoint.into(),
                token: "t".into(),
                timeout: Duration::from_secs(1),
            };
            assert!(matches!(PlacementClient::new(&config), Err(PlacementError::Invalid(_))), "{endpoint}");
        }
    }
}

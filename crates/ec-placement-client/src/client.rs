//! Requests and answers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use ec_model::{InstanceId, NodeId, RequestId, ResourceQuery, Resources, SharedStorage};
use reqwest::Method;
use serde_json::json;
use uuid::Uuid;

use crate::{
    Candidate, Candidates, Claim, ConsumerAllocations, Inventory, PlacementConfig, PlacementError,
    PlacementResult, Provider, Transport,
    types::{
        AggregatesBody, CandidatesBody, ConsumerBody, InventoriesBody, ProviderAllocationsBody,
        ProvidersBody, ResourcesOf, TraitNamesBody, TraitsBody,
    },
    wire::{RESHAPER, Wire},
};

/// The consumer type of an instance: what of a node's allocations is ours. Told and answered from 1.38 on.
pub const CONSUMER_TYPE: &str = "INSTANCE";

/// The trait of a provider that is not to be used: nothing new is placed there. OpenStack's own word for it.
pub const DISABLED: &str = "COMPUTE_STATUS_DISABLED";

/// Says beside [`DISABLED`] that it was set because the node's agent is gone, and goes when that is back.
const DOWN: &str = "CUSTOM_ECOMPUTE_NODE_DOWN";

/// The trait of a provider that shares what it has with all providers of its aggregates (Placement API, "shared resource
/// providers").
pub const SHARES: &str = "MISC_SHARES_VIA_AGGREGATE";

/// How often a write is decided anew after a generation conflict. Conflicts come from operators and
/// from claims on the same provider, which are short: eight tries outlast them.
const CONFLICT_TRIES: usize = 8;

/// A client of one Placement endpoint. Cheap to clone.
#[derive(Clone)]
pub struct PlacementClient {
    wire: Wire,
}

impl PlacementClient {
    /// A client; nothing is sent yet. The files that the settings name are read.
    pub fn new(config: &PlacementConfig) -> PlacementResult<Self> {
        Ok(Self { wire: Wire::new(config)? })
    }

    /// The same client by another way than connections of its own.
    #[must_use]
    pub fn over(self, transport: Arc<dyn Transport>) -> Self {
        Self { wire: self.wire.over(transport) }
    }

    /// The same client, whose way to the server goes through something else first.
    #[must_use]
    pub fn through(self, wrap: impl FnOnce(Arc<dyn Transport>) -> Arc<dyn Transport>) -> Self {
        Self { wire: self.wire.through(wrap) }
    }

    /// The same client, which tells the server on behalf of which request it asks, as OpenStack's services do among
    /// themselves; of none, where there is none.
    #[must_use]
    pub fn on_behalf(&self, request_id: Option<RequestId>) -> Self {
        Self { wire: self.wire.clone().on_behalf(request_id) }
    }

    /// The base URL, for messages: without a password in it.
    pub fn endpoint(&self) -> &str {
        &self.wire.told
    }

    /// So many seconds the clock of the server's host is ahead of this one's, as its last answers told; none where they did not.
    pub fn clock_ahead(&self) -> Option<i64> {
        self.wire.ahead()
    }

    /// Whether a Placement API answers and lets us in; tells the newest microversion it speaks.
    pub async fn probe(&self) -> PlacementResult<String> {
        let root: serde_json::Value = self.wire.get("", NO_QUERY).await?;
        let newest = root["versions"][0]["max_version"].as_str().ok_or_else(|| {
            PlacementError::Refused(format!("{} answers, but not as a Placement API", self.endpoint()))
        })?;
        // The root is open to everybody, so that only another request shows whether the token is good.
        let _: serde_json::Value =
            self.wire.get("resource_providers", &[("name", "etcd-compute-probe")]).await?;
        Ok(newest.to_owned())
    }

    /// Ways to satisfy the query, in the server's order: all, or so many. A limit in the query itself does
    /// not count.
    pub async fn candidates(
        &self,
        query: &ResourceQuery,
        limit: Option<usize>,
    ) -> PlacementResult<Candidates> {
        let limit = limit.map(|limit| limit.to_string());
        let pairs: Vec<(&str, &str)> = query
            .pairs()
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .filter(|(key, _)| *key != "limit")
            .chain(limit.iter().map(|limit| ("limit", limit.as_str())))
            .collect();
        let body: CandidatesBody = self.wire.get("allocation_candidates", &pairs).await?;
        let candidates = body
            .allocation_requests
            .into_iter()
            .map(|request| Candidate {
                allocations: request.allocations.into_iter().map(|(rp, of)| (rp, of.resources)).collect(),
                mappings: request.mappings,
            })
            .collect();
        Ok(Candidates { candidates, summaries: body.provider_summaries })
    }

    /// Those of the traits that some provider has.
    pub async fn associated_traits(&self, names: &BTreeSet<String>) -> PlacementResult<BTreeSet<String>> {
        let mut found = BTreeSet::new();
        for query in trait_queries(names) {
            let pairs = [("name", query), ("associated", "true".to_owned())];
            let body: TraitNamesBody = self.wire.get("traits", &pairs).await?;
            found.extend(body.traits);
        }
        Ok(found)
    }

    /// Claims a candidate for a consumer that must not exist. [`PlacementError::Conflict`] where the
    /// room is gone meanwhile, or the consumer is there already.
    pub async fn claim(&self, claim: &Claim<'_>) -> PlacementResult<()> {
        let mappings = Some(&claim.candidate.mappings);
        self.allocate(claim.instance, &claim.candidate.allocations, mappings, claim.project, claim.user).await
    }

    /// Claims these amounts for a consumer that must not exist: for a guest that is there and has no claim.
    /// [`PlacementError::Conflict`] as with [`Self::claim`].
    pub async fn claim_exact(
        &self,
        instance: InstanceId,
        allocations: &BTreeMap<NodeId, Resources>,
        project: &str,
        user: &str,
    ) -> PlacementResult<()> {
        self.allocate(instance, allocations, None, project, user).await
    }

    async fn allocate(
        &self,
        instance: InstanceId,
        allocations: &BTreeMap<NodeId, Resources>,
        mappings: Option<&BTreeMap<String, Vec<NodeId>>>,
        project: &str,
        user: &str,
    ) -> PlacementResult<()> {
        let mut body = new_consumer(allocations, project, user);
        if let Some(mappings) = mappings {
            body["mappings"] = json!(mappings);
        }
        self.wire.send(Method::PUT, &format!("allocations/{instance}"), Some(&body)).await.map(drop)
    }

    /// As [`Self::claim_exact`], of room that is reserved for the consumer on `node`: with the claim that inventory becomes what
    /// `change` makes of it, in one write (`POST /reshaper`), so that nobody else is given the room in between. OpenStack's own
    /// placement lets those do it that have the role `service`, from 1.30 on: [`PlacementError::Denied`] and
    /// [`PlacementError::NotFound`] else.
    pub async fn claim_reserved(
        &self,
        instance: InstanceId,
        allocations: &BTreeMap<NodeId, Resources>,
        (project, user): (&str, &str),
        node: NodeId,
        change: impl Fn(&BTreeMap<String, Inventory>) -> BTreeMap<String, Inventory>,
    ) -> PlacementResult<()> {
        let with_claim = |inventory| {
            let body = json!({
                "inventories": { node.to_string(): inventory },
                "allocations": { instance.to_string(): new_consumer(allocations, project, user) },
            });
            (Method::POST, RESHAPER.to_owned(), body)
        };
        self.write_inventory(node, |current| Some(change(current)), with_claim).await.map(drop)
    }

    /// What the consumer holds; `None` where it holds nothing.
    pub async fn allocations(&self, instance: InstanceId) -> PlacementResult<Option<ConsumerAllocations>> {
        let body: ConsumerBody = self.wire.get(&format!("allocations/{instance}"), NO_QUERY).await?;
        let allocations: BTreeMap<NodeId, Resources> =
            body.allocations.into_iter().map(|(rp, of)| (rp, of.resources)).collect();
        Ok((!allocations.is_empty()).then_some(ConsumerAllocations {
            allocations,
            // OpenStack's word for none.
            consumer_type: body.consumer_type.filter(|kind| kind != "unknown"),
            project: body.project_id,
            user: body.user_id,
            generation: body.consumer_generation,
        }))
    }

    /// Sets what a consumer holds, that was seen to hold `seen`. [`PlacementError::Conflict`] where somebody has changed
    /// that since, and where there is no room.
    pub async fn reallocate(
        &self,
        instance: InstanceId,
        seen: &ConsumerAllocations,
        allocations: &BTreeMap<NodeId, Resources>,
    ) -> PlacementResult<()> {
        let body = json!({
            "allocations": held(allocations.iter().filter(|(_, resources)| !resources.is_empty())),
            "project_id": seen.project,
            "user_id": seen.user,
            "consumer_generation": seen.generation,
            "consumer_type": seen.consumer_type.as_deref().unwrap_or(CONSUMER_TYPE),
        });
        self.wire.send(Method::PUT, &format!("allocations/{instance}"), Some(&body)).await.map(drop)
    }

    /// What a provider has, beside amounts.
    pub async fn traits(&self, node: NodeId) -> PlacementResult<BTreeSet<String>> {
        let body: TraitsBody = self.wire.get(&format!("resource_providers/{node}/traits"), NO_QUERY).await?;
        Ok(body.traits.into_iter().collect())
    }

    /// All providers of the tree that this one belongs to, itself among them; none where there is no such
    /// provider.
    pub async fn tree(&self, node: NodeId) -> PlacementResult<BTreeSet<NodeId>> {
        let body: ProvidersBody =
            self.wire.get("resource_providers", &[("in_tree", node.to_string())]).await?;
        Ok(body.resource_providers.into_iter().map(|provider| provider.uuid).collect())
    }

    /// Whether a provider is one of those that `member_of` or `in_tree` (the `demand`) find with this value.
    pub async fn is_where(&self, provider: NodeId, demand: &str, value: &str) -> PlacementResult<bool> {
        let query = [("uuid", provider.to_string()), (demand, value.to_owned())];
        let body: ProvidersBody = self.wire.get("resource_providers", &query).await?;
        Ok(!body.resource_providers.is_empty())
    }

    /// Everything that is allocated from one provider, by consumer.
    pub async fn provider_allocations(
        &self,
        node: NodeId,
    ) -> PlacementResult<HashMap<InstanceId, Resources>> {
        let body: ProviderAllocationsBody =
            self.wire.get(&format!("resource_providers/{node}/allocations"), NO_QUERY).await?;
        Ok(body.allocations.into_iter().map(|(consumer, of)| (consumer, of.resources)).collect())
    }

    /// Gives back everything that the consumer holds; nothing held is not an error.
    pub async fn release(&self, instance: InstanceId) -> PlacementResult<()> {
        match self.wire.send(Method::DELETE, &format!("allocations/{instance}"), None).await {
            Ok(_) | Err(PlacementError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A provider as it is; `None` where there is no such.
    pub async fn provider(&self, provider: NodeId) -> PlacementResult<Option<Provider>> {
        match self.wire.get(&format!("resource_providers/{provider}"), NO_QUERY).await {
            Ok(provider) => Ok(Some(provider)),
            Err(PlacementError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes a provider away; that there is none is no error. [`PlacementError::Conflict`] where something of it is claimed, or it is
    /// the parent of others.
    pub async fn delete_provider(&self, provider: NodeId) -> PlacementResult<()> {
        match self.wire.send(Method::DELETE, &format!("resource_providers/{provider}"), None).await {
            Ok(_) | Err(PlacementError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// All providers.
    pub async fn providers(&self) -> PlacementResult<Vec<Provider>> {
        let body: ProvidersBody = self.wire.get("resource_providers", NO_QUERY).await?;
        Ok(body.resource_providers)
    }

    /// The provider with this name.
    pub async fn named(&self, name: &str) -> PlacementResult<Option<Provider>> {
        let body: ProvidersBody = self.wire.get("resource_providers", &[("name", name)]).await?;
        Ok(body.resource_providers.into_iter().next())
    }

    /// Makes sure that the node's provider exists under this name; an existing one is taken over.
    pub async fn ensure_provider(&self, node: NodeId, name: &str) -> PlacementResult<Provider> {
        let path = format!("resource_providers/{node}");
        let existing = match self.wire.get::<Provider>(&path, NO_QUERY).await {
            Ok(provider) => provider,
            Err(PlacementError::NotFound(_)) => {
                let body = json!({"uuid": node, "name": name});
                match self.wire.send(Method::POST, "resource_providers", Some(&body)).await {
                    Ok(answer) => return self.wire.parse(&answer),
                    // Another start of the same agent may have been quicker; else the name is taken.
                    Err(PlacementError::Conflict(_)) => {
                        match self.wire.get::<Provider>(&path, NO_QUERY).await {
                            Ok(provider) => provider,
                            Err(PlacementError::NotFound(_)) => {
                                return Err(self.name_taken(node, name).await?);
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        if existing.name == name {
            return Ok(existing);
        }
        match self.wire.send(Method::PUT, &path, Some(&json!({"name": name}))).await {
            Ok(answer) => self.wire.parse(&answer),
            Err(PlacementError::Conflict(_)) => Err(self.name_taken(node, name).await?),
            Err(error) => Err(error),
        }
    }

    async fn name_taken(&self, node: NodeId, name: &str) -> PlacementResult<PlacementError> {
        Ok(match self.named(name).await? {
            Some(owner) => PlacementError::NameTaken {
                name: name.to_owned(),
                owner: owner.uuid.to_string(),
                node: node.to_string(),
            },
            None => {
                PlacementError::Conflict(format!("resource provider `{name}` changes at this moment").into())
            }
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
        .map(drop)
    }

    /// Has the provider offer nothing of a class any more. [`PlacementError::Conflict`] where something of it is in use.
    pub async fn drop_inventory(&self, node: NodeId, class: &str) -> PlacementResult<()> {
        self.change_inventory(node, |current| {
            let mut wanted = current.clone();
            wanted.remove(class);
            wanted
        })
        .await
        .map(drop)
    }

    /// Makes shared storage known where it is not, by a provider that shares what it has with those of its aggregate, and has a node
    /// be one of them.
    pub async fn join_shared(&self, storage: &SharedStorage, node: NodeId) -> PlacementResult<()> {
        self.ensure_provider(storage.provider, &storage.provider_name()).await?;
        self.set_traits(storage.provider, &[SHARES.to_owned()].into(), |_| false).await?;
        self.change_aggregates(storage.provider, |own| _ = own.insert(storage.aggregate())).await?;
        self.change_aggregates(node, |own| _ = own.insert(storage.aggregate())).await
    }

    /// Storage that nodes share, of those that are ours.
    pub async fn shared_storages(&self) -> PlacementResult<Vec<SharedStorage>> {
        let body: ProvidersBody = self.wire.get("resource_providers", &[("required", SHARES)]).await?;
        Ok(body.resource_providers.iter().filter_map(Provider::storage).collect())
    }

    /// The nodes that share a storage.
    pub async fn shares_of(&self, storage: &SharedStorage) -> PlacementResult<Vec<NodeId>> {
        let query = [("member_of", storage.aggregate().to_string())];
        let body: ProvidersBody = self.wire.get("resource_providers", &query).await?;
        let members = body.resource_providers.into_iter().map(|provider| provider.uuid);
        Ok(members.filter(|member| *member != storage.provider).collect())
    }

    /// Has a node share a storage no more.
    pub async fn leave_shared(&self, storage: &SharedStorage, node: NodeId) -> PlacementResult<()> {
        self.change_aggregates(node, |own| _ = own.remove(&storage.aggregate())).await
    }

    /// The storages that a node shares with others.
    pub async fn shared_by(&self, node: NodeId) -> PlacementResult<Vec<SharedStorage>> {
        let path = format!("resource_providers/{node}/aggregates");
        let own: AggregatesBody = self.wire.get(&path, NO_QUERY).await?;
        if own.aggregates.is_empty() {
            return Ok(Vec::new());
        }
        // Of its aggregates there may be many, and of their members more.
        let mut storages = self.shared_storages().await?;
        storages.retain(|storage| own.aggregates.contains(&storage.aggregate()));
        Ok(storages)
    }

    /// Changes which aggregates a provider is in.
    async fn change_aggregates(
        &self,
        provider: NodeId,
        change: impl Fn(&mut BTreeSet<Uuid>),
    ) -> PlacementResult<()> {
        let path = format!("resource_providers/{provider}/aggregates");
        let mut tries = 0;
        loop {
            let current: AggregatesBody = self.wire.get(&path, NO_QUERY).await?;
            let mut wanted = current.aggregates.clone();
            change(&mut wanted);
            if wanted == current.aggregates {
                return Ok(());
            }
            let body = json!({
                "resource_provider_generation": current.resource_provider_generation,
                "aggregates": wanted,
            });
            let written = self.wire.send(Method::PUT, &path, Some(&body)).await;
            if !is_worth_another_try(&written, &mut tries) {
                return written.map(drop);
            }
        }
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
        .map(drop)
    }

    /// Has the provider's inventory be what `change` makes of it. Where somebody else writes at the same moment, it is asked again, of
    /// what stands there then. Answers what the provider's changes are counted up to then, at least.
    pub async fn change_inventory(
        &self,
        node: NodeId,
        change: impl Fn(&BTreeMap<String, Inventory>) -> BTreeMap<String, Inventory>,
    ) -> PlacementResult<u64> {
        let changed = |current: &BTreeMap<_, _>| Some(change(current)).filter(|wanted| wanted != current);
        let alone = |inventory| (Method::PUT, format!("resource_providers/{node}/inventories"), inventory);
        self.write_inventory(node, changed, alone).await
    }

    /// Has a provider's inventory be what `change` makes of it, where that makes something of it, by the request that `write` makes of
    /// that and of the generation that was read. Answers which it has then, at least.
    async fn write_inventory(
        &self,
        node: NodeId,
        change: impl Fn(&BTreeMap<String, Inventory>) -> Option<BTreeMap<String, Inventory>>,
        write: impl Fn(serde_json::Value) -> (Method, String, serde_json::Value),
    ) -> PlacementResult<u64> {
        let path = format!("resource_providers/{node}/inventories");
        let mut tries = 0;
        loop {
            let current: InventoriesBody = self.wire.get(&path, NO_QUERY).await?;
            let generation = current.resource_provider_generation;
            let Some(wanted) = change(&current.inventories) else { return Ok(generation) };
            let (method, path, body) = write(json!({
                "resource_provider_generation": generation,
                "inventories": wanted,
            }));
            let written = self.wire.send(method, &path, Some(&body)).await;
            if !is_worth_another_try(&written, &mut tries) {
                return written.map(|_| generation + 1);
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
        let known = self.known_traits(ours).await?;
        self.change_traits(node, |current| {
            current.iter().filter(|name| !is_ours(name)).chain(&known).cloned().collect()
        })
        .await
        .map(drop)
    }

    /// Those of the traits that placement knows; custom ones are created.
    async fn known_traits(&self, names: &BTreeSet<String>) -> PlacementResult<BTreeSet<String>> {
        for custom in names.iter().filter(|name| name.starts_with("CUSTOM_")) {
            self.wire.send(Method::PUT, &format!("traits/{custom}"), None).await?;
        }
        let mut known = BTreeSet::new();
        for query in trait_queries(names) {
            let body: TraitNamesBody = self.wire.get("traits", &[("name", query)]).await?;
            known.extend(body.traits);
        }
        Ok(known)
    }

    /// Changes which traits a provider has. Whether anything was to be changed.
    async fn change_traits(
        &self,
        provider: NodeId,
        change: impl Fn(&BTreeSet<String>) -> BTreeSet<String>,
    ) -> PlacementResult<bool> {
        let path = format!("resource_providers/{provider}/traits");
        let mut tries = 0;
        loop {
            let current: TraitsBody = self.wire.get(&path, NO_QUERY).await?;
            let current_set: BTreeSet<String> = current.traits.into_iter().collect();
            let wanted = change(&current_set);
            if wanted == current_set {
                return Ok(false);
            }
            let body = json!({
                "resource_provider_generation": current.resource_provider_generation,
                "traits": wanted,
            });
            let written = self.wire.send(Method::PUT, &path, Some(&body)).await;
            if !is_worth_another_try(&written, &mut tries) {
                return written.map(|_| true);
            }
        }
    }

    /// The providers that are marked as down by [`Self::mark_down`].
    pub async fn marked_down(&self) -> PlacementResult<BTreeSet<NodeId>> {
        self.having(DOWN).await
    }

    /// The providers where nothing new is to be placed, by a controller's mark or an operator's.
    pub async fn disabled(&self) -> PlacementResult<BTreeSet<NodeId>> {
        self.having(DISABLED).await
    }

    /// The providers that have the trait.
    async fn having(&self, name: &str) -> PlacementResult<BTreeSet<NodeId>> {
        // Placement refuses to look for a trait that nobody has made yet.
        if self.associated_traits(&[name.to_owned()].into()).await?.is_empty() {
            return Ok(BTreeSet::new());
        }
        let body: ProvidersBody = self.wire.get("resource_providers", &[("required", name)]).await?;
        Ok(body.resource_providers.into_iter().map(|provider| provider.uuid).collect())
    }

    /// Marks a provider as of a node that is down, so that nothing new is placed there, or takes the mark away. Both
    /// traits come and go in one write, so that a mark is always known as ours. Whether anything was changed: one that
    /// is not there, and one that an operator disabled, stays as it is.
    pub async fn mark_down(&self, node: NodeId, down: bool) -> PlacementResult<bool> {
        let is_right = |current: &BTreeSet<String>| {
            current.contains(DOWN) == down || (down && current.contains(DISABLED))
        };
        let current = match self.traits(node).await {
            Err(PlacementError::NotFound(_)) => return Ok(false),
            current => current?,
        };
        // No name is made where there is nothing to be done.
        if is_right(&current) {
            return Ok(false);
        }
        let marks = [DISABLED, DOWN].map(str::to_owned).into();
        let known = if down { self.known_traits(&marks).await? } else { BTreeSet::new() };
        // A placement that was put back at this moment knows the mark no more: without it, it would be an operator's for ever. Whoever
        // looks again makes it anew.
        if down && !known.contains(DOWN) {
            return Ok(false);
        }
        // Decided on what is written over: an operator may have disabled it since.
        self.change_traits(node, |current| {
            if is_right(current) {
                return current.clone();
            }
            current.iter().filter(|name| !marks.contains(*name)).chain(&known).cloned().collect()
        })
        .await
    }

    /// Usage of a provider by resource class.
    pub async fn usages(&self, node: NodeId) -> PlacementResult<Resources> {
        let body: serde_json::Value =
            self.wire.get(&format!("resource_providers/{node}/usages"), NO_QUERY).await?;
        serde_json::from_value(body["usages"].clone())
            .map_err(|error| PlacementError::Refused(format!("usages that cannot be read: {error}")))
    }

    /// Inventory of a provider by resource class.
    pub async fn inventory(&self, node: NodeId) -> PlacementResult<BTreeMap<String, Inventory>> {
        self.counted_inventory(node).await.map(|(inventory, _)| inventory)
    }

    /// The same, and what the provider's changes are counted up to.
    pub async fn counted_inventory(
        &self,
        node: NodeId,
    ) -> PlacementResult<(BTreeMap<String, Inventory>, u64)> {
        let body: InventoriesBody =
            self.wire.get(&format!("resource_providers/{node}/inventories"), NO_QUERY).await?;
        Ok((body.inventories, body.resource_provider_generation))
    }
}

const NO_QUERY: &[(&str, &str)] = &[];

/// Amounts by provider, as claims have them.
fn held<'a>(
    allocations: impl IntoIterator<Item = (&'a NodeId, &'a Resources)>,
) -> BTreeMap<&'a NodeId, ResourcesOf> {
    allocations
        .into_iter()
        .map(|(rp, resources)| (rp, ResourcesOf { resources: resources.clone() }))
        .collect()
}

/// What a consumer is to hold that must not exist.
fn new_consumer(allocations: &BTreeMap<NodeId, Resources>, project: &str, user: &str) -> serde_json::Value {
    json!({
        "allocations": held(allocations),
        "project_id": project,
        "user_id": user,
        "consumer_generation": null,
        "consumer_type": CONSUMER_TYPE,
    })
}

/// After a generation conflict the provider is read again and the write decided anew.
fn is_worth_another_try<T>(written: &PlacementResult<T>, tries: &mut usize) -> bool {
    *tries += 1;
    matches!(written, Err(PlacementError::Conflict(_))) && *tries < CONFLICT_TRIES
}

/// The names for as many `name` parameters: one may name many traits, but a URL has its bounds.
fn trait_queries(names: &BTreeSet<String>) -> Vec<String> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.chunks(40).map(|chunk| format!("in:{}", chunk.join(","))).collect()
}

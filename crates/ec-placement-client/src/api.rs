//! What the use-cases of control ask of placement, whoever answers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use ec_model::{InstanceId, NodeId, RequestId, ResourceQuery, Resources, SharedStorage};

use crate::{Candidates, Claim, ConsumerAllocations, Inventory, PlacementClient, PlacementResult, Provider};

/// How long a server may take to tell its time: what takes longer tells nothing.
const TELLS_TIME: Duration = Duration::from_secs(2);

/// Placement, over HTTP or in the same process.
#[async_trait]
pub trait Placement: Send + Sync {
    /// The same, which is told on behalf of which request it is asked, if any.
    fn on_behalf(&self, request_id: Option<RequestId>) -> Arc<dyn Placement>;

    /// So many seconds the clock of its host is ahead of this one's, by an answer of now; none where it does not answer soon, or
    /// does not tell.
    async fn compare_clocks(&self) -> Option<i64>;

    /// Ways to satisfy the query, in the server's order: all, or so many.
    async fn candidates(&self, query: &ResourceQuery, limit: Option<usize>) -> PlacementResult<Candidates>;

    /// Claims a candidate for a consumer that must not exist. [`crate::PlacementError::Conflict`] where the room is
    /// gone meanwhile, or the consumer is there already.
    async fn claim(&self, claim: &Claim<'_>) -> PlacementResult<()>;

    /// Gives back whatever the consumer holds; nothing to give back is no error.
    async fn release(&self, instance: InstanceId) -> PlacementResult<()>;

    /// What the consumer holds; none where it holds nothing.
    async fn allocations(&self, instance: InstanceId) -> PlacementResult<Option<ConsumerAllocations>>;

    /// Sets what a consumer holds, that was seen to hold `seen`. [`crate::PlacementError::Conflict`] where somebody has
    /// changed that since, and where there is no room.
    async fn reallocate(
        &self,
        instance: InstanceId,
        seen: &ConsumerAllocations,
        allocations: &BTreeMap<NodeId, Resources>,
    ) -> PlacementResult<()>;

    /// Everything that is allocated from one provider, by consumer.
    async fn provider_allocations(&self, node: NodeId) -> PlacementResult<HashMap<InstanceId, Resources>>;

    /// What a provider has, beside amounts.
    async fn traits(&self, node: NodeId) -> PlacementResult<BTreeSet<String>>;

    /// Whether a provider is one of those that `member_of` or `in_tree` (the `demand`) find with this value.
    async fn is_where(&self, provider: NodeId, demand: &str, value: &str) -> PlacementResult<bool>;

    /// A provider, where there is such a one.
    async fn provider(&self, provider: NodeId) -> PlacementResult<Option<Provider>>;

    /// Takes a provider away; that there is none is no error. [`crate::PlacementError::Conflict`] where something of it is
    /// claimed, or it is the parent of others.
    async fn delete_provider(&self, provider: NodeId) -> PlacementResult<()>;

    /// What a provider has, by resource class.
    async fn inventory(&self, node: NodeId) -> PlacementResult<BTreeMap<String, Inventory>>;

    /// What of it is used, by resource class.
    async fn usages(&self, node: NodeId) -> PlacementResult<Resources>;

    /// Those of the traits that some provider has.
    async fn associated_traits(&self, names: &BTreeSet<String>) -> PlacementResult<BTreeSet<String>>;

    /// The providers that are marked as down by [`Self::mark_down`].
    async fn marked_down(&self) -> PlacementResult<BTreeSet<NodeId>>;

    /// The providers where nothing new is to be placed, by a controller's mark or an operator's.
    async fn disabled(&self) -> PlacementResult<BTreeSet<NodeId>>;

    /// Marks a provider as of a node that is down, so that nothing new is placed there, or takes the mark away. Whether
    /// anything was changed: one that is not there, and one that an operator disabled, stays as it is.
    async fn mark_down(&self, node: NodeId, down: bool) -> PlacementResult<bool>;

    /// Storage that nodes share, of those that are ours.
    async fn shared_storages(&self) -> PlacementResult<Vec<SharedStorage>>;

    /// Makes shared storage known where it is not, and has a node be one of those that share it.
    async fn join_shared(&self, storage: &SharedStorage, node: NodeId) -> PlacementResult<()>;
    /// Has a node share storage with others no more.
    async fn leave_shared(&self, storage: &SharedStorage, node: NodeId) -> PlacementResult<()>;
}

#[async_trait]
impl Placement for PlacementClient {
    fn on_behalf(&self, request_id: Option<RequestId>) -> Arc<dyn Placement> {
        Arc::new(Self::on_behalf(self, request_id))
    }

    async fn compare_clocks(&self) -> Option<i64> {
        // Whatever it answers has a date. What an earlier answer told may be of before a clock was set.
        tokio::time::timeout(TELLS_TIME, self.probe()).await.ok();
        self.clock_ahead()
    }

    async fn candidates(&self, query: &ResourceQuery, limit: Option<usize>) -> PlacementResult<Candidates> {
        Self::candidates(self, query, limit).await
    }

    async fn claim(&self, claim: &Claim<'_>) -> PlacementResult<()> {
        Self::claim(self, claim).await
    }

    async fn release(&self, instance: InstanceId) -> PlacementResult<()> {
        Self::release(self, instance).await
    }

    async fn allocations(&self, instance: InstanceId) -> PlacementResult<Option<ConsumerAllocations>> {
        Self::allocations(self, instance).await
    }

    async fn reallocate(
        &self,
        instance: InstanceId,
        seen: &ConsumerAllocations,
        allocations: &BTreeMap<NodeId, Resources>,
    ) -> PlacementResult<()> {
        Self::reallocate(self, instance, seen, allocations).await
    }

    async fn provider_allocations(&self, node: NodeId) -> PlacementResult<HashMap<InstanceId, Resources>> {
        Self::provider_allocations(self, node).await
    }

    async fn traits(&self, node: NodeId) -> PlacementResult<BTreeSet<String>> {
        Self::traits(self, node).await
    }

    async fn is_where(&self, provider: NodeId, demand: &str, value: &str) -> PlacementResult<bool> {
        Self::is_where(self, provider, demand, value).await
    }

    async fn provider(&self, provider: NodeId) -> PlacementResult<Option<Provider>> {
        Self::provider(self, provider).await
    }

    async fn delete_provider(&self, provider: NodeId) -> PlacementResult<()> {
        Self::delete_provider(self, provider).await
    }

    async fn inventory(&self, node: NodeId) -> PlacementResult<BTreeMap<String, Inventory>> {
        Self::inventory(self, node).await
    }

    async fn usages(&self, node: NodeId) -> PlacementResult<Resources> {
        Self::usages(self, node).await
    }

    async fn associated_traits(&self, names: &BTreeSet<String>) -> PlacementResult<BTreeSet<String>> {
        Self::associated_traits(self, names).await
    }

    async fn marked_down(&self) -> PlacementResult<BTreeSet<NodeId>> {
        Self::marked_down(self).await
    }

    async fn disabled(&self) -> PlacementResult<BTreeSet<NodeId>> {
        Self::disabled(self).await
    }

    async fn mark_down(&self, node: NodeId, down: bool) -> PlacementResult<bool> {
        Self::mark_down(self, node, down).await
    }

    async fn shared_storages(&self) -> PlacementResult<Vec<SharedStorage>> {
        Self::shared_storages(self).await
    }

    async fn join_shared(&self, storage: &SharedStorage, node: NodeId) -> PlacementResult<()> {
        Self::join_shared(self, storage, node).await
    }

    async fn leave_shared(&self, storage: &SharedStorage, node: NodeId) -> PlacementResult<()> {
        Self::leave_shared(self, storage, node).await
    }
}

//! The documents of the API, as far as we read and write them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_model::{InstanceId, NodeId, Resources, SharedStorage};
use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

use crate::SHARES;

/// A resource provider.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Provider {
    /// Its uuid; of a node, the node's own.
    pub uuid: NodeId,
    /// Its unique name.
    pub name: String,
    /// Counts its changes; a write that carries an old one is refused.
    pub generation: u64,
    /// The top of its tree: itself, where it is no part of another.
    #[serde(default)]
    pub root_provider_uuid: Option<NodeId>,
}

impl Provider {
    /// The host that it is, or is a part of.
    pub fn root(&self) -> NodeId {
        self.root_provider_uuid.unwrap_or(self.uuid)
    }

    /// The shared storage that it is, if it is one of ours.
    pub fn storage(&self) -> Option<SharedStorage> {
        let storage = SharedStorage::named(self.name.strip_prefix("storage:")?);
        (storage.provider == self.uuid).then_some(storage)
    }
}

/// What a provider has of one resource class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// All there is, in the unit of the class.
    pub total: u64,
    /// What is not for allocation; equal to `total` locks the class.
    pub reserved: u64,
    /// The least one allocation may take.
    pub min_unit: u64,
    /// The most one allocation may take.
    pub max_unit: u64,
    /// Allocations come in multiples of this.
    pub step_size: u64,
    /// `(total - reserved) * allocation_ratio` may be allocated.
    pub allocation_ratio: f64,
}

/// One way to satisfy a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// What to take from which provider, as the claim must send it.
    pub allocations: BTreeMap<NodeId, Resources>,
    /// Which provider serves which group; sent back with the claim.
    pub mappings: BTreeMap<String, Vec<NodeId>>,
}

/// What a query found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Candidates {
    /// In the server's order.
    pub candidates: Vec<Candidate>,
    /// All providers of the trees that they touch.
    pub summaries: HashMap<NodeId, Summary>,
}

/// A provider, as an answer to a query shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Summary {
    /// The root of its tree: where a candidate takes from a part of a host, its root is the host.
    #[serde(default)]
    pub root_provider_uuid: Option<NodeId>,
    /// What it has, by class.
    #[serde(default)]
    pub resources: BTreeMap<String, Amount>,
    /// What it can.
    #[serde(default)]
    pub traits: BTreeSet<String>,
}

/// How much of a class there is, and how much is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Amount {
    /// `(total - reserved) * allocation_ratio`; nothing where that is less.
    #[serde(deserialize_with = "at_least_nothing")]
    pub capacity: u64,
    /// What is allocated.
    pub used: u64,
}

/// Placement takes ratios below nothing, and what is reserved may be more than there is.
fn at_least_nothing<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    i64::deserialize(from).map(|amount| amount.max(0).unsigned_abs())
}

impl Candidates {
    /// The hosts that a candidate touches: the roots of its providers, without repetition, and without those that only share
    /// what they have.
    pub fn hosts(&self, candidate: &Candidate) -> Vec<NodeId> {
        let providers = candidate.allocations.keys().filter(|rp| !self.shares(**rp));
        let mut hosts: Vec<_> = providers.map(|rp| self.root(*rp)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// Whether a provider only shares what it has with others.
    pub fn shares(&self, provider: NodeId) -> bool {
        self.summaries.get(&provider).is_some_and(|summary| summary.traits.contains(SHARES))
    }

    /// The storage that a candidate takes all that it takes from, and shares with the nodes that may be its host.
    pub fn storage_alone(&self, candidate: &Candidate) -> Option<NodeId> {
        let mut providers = candidate.allocations.keys();
        let alone = (providers.next().copied()).filter(|_| providers.next().is_none());
        alone.filter(|provider| self.shares(*provider))
    }

    /// The root of a provider's tree.
    pub fn root(&self, provider: NodeId) -> NodeId {
        self.summaries.get(&provider).and_then(|summary| summary.root_provider_uuid).unwrap_or(provider)
    }
}

/// A claim to be made for a consumer that must not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim<'a> {
    /// The consumer.
    pub instance: InstanceId,
    /// What it takes.
    pub candidate: &'a Candidate,
    /// Whom it is accounted to.
    pub project: &'a str,
    /// Who asked.
    pub user: &'a str,
}

/// Everything one consumer holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsumerAllocations {
    /// By provider.
    pub allocations: BTreeMap<NodeId, Resources>,
    /// What kind of consumer it is: of ours [`crate::CONSUMER_TYPE`]. None where nobody said it, and from a
    /// server older than 1.38.
    pub consumer_type: Option<String>,
    /// Whom it is accounted to.
    pub project: Option<String>,
    /// Who asked.
    pub user: Option<String>,
    /// Counts its changes; a write that carries an old one is refused.
    pub generation: Option<u64>,
}

impl ConsumerAllocations {
    /// Amounts of all providers together, by class.
    pub fn total(&self) -> Resources {
        let mut total = Resources::new();
        for resources in self.allocations.values() {
            for (class, amount) in resources {
                let sum = total.entry(class.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
        }
        total
    }
}

// The wire forms.

#[derive(Deserialize)]
pub(crate) struct CandidatesBody {
    pub(crate) allocation_requests: Vec<AllocationRequest>,
    #[serde(default)]
    pub(crate) provider_summaries: HashMap<NodeId, Summary>,
}

#[derive(Deserialize)]
pub(crate) struct AllocationRequest {
    pub(crate) allocations: BTreeMap<NodeId, ResourcesOf>,
    #[serde(default)]
    pub(crate) mappings: BTreeMap<String, Vec<NodeId>>,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct ResourcesOf {
    pub(crate) resources: Resources,
}

#[derive(Deserialize)]
pub(crate) struct ConsumerBody {
    pub(crate) allocations: BTreeMap<NodeId, ResourcesOf>,
    #[serde(default)]
    pub(crate) consumer_type: Option<String>,
    #[serde(default)]
    pub(crate) project_id: Option<String>,
    #[serde(default)]
    pub(crate) user_id: Option<String>,
    #[serde(default)]
    pub(crate) consumer_generation: Option<u64>,
}

#[derive(Deserialize)]
pub(crate) struct ProviderAllocationsBody {
    pub(crate) allocations: HashMap<InstanceId, ResourcesOf>,
}

#[derive(Deserialize)]
pub(crate) struct InventoriesBody {
    pub(crate) inventories: BTreeMap<String, Inventory>,
    pub(crate) resource_provider_generation: u64,
}

#[derive(Deserialize)]
pub(crate) struct AggregatesBody {
    pub(crate) aggregates: BTreeSet<Uuid>,
    #[serde(default)]
    pub(crate) resource_provider_generation: u64,
}

#[derive(Deserialize)]
pub(crate) struct TraitsBody {
    pub(crate) traits: Vec<String>,
    #[serde(default)]
    pub(crate) resource_provider_generation: u64,
}

#[derive(Deserialize)]
pub(crate) struct TraitNamesBody {
    pub(crate) traits: Vec<String>,
}

#[derive(Deserialize)]
pub(crate) struct ProvidersBody {
    pub(crate) resource_providers: Vec<Provider>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_below_nothing_is_nothing() {
        for (told, capacity) in [("-4", 0), ("0", 0), ("9223372036854775807", 9_223_372_036_854_775_807)] {
            let text = format!(r#"{{"capacity": {told}, "used": 1}}"#);
            let amount: Amount = serde_json::from_str(&text).unwrap();
            assert_eq!(amount, Amount { capacity, used: 1 });
        }
    }
}

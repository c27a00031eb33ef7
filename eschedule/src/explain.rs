//! Why there was no room: what is short where, what nobody has, who is locked or dead.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_model::{NodeId, NodeRecord, ResourceQuery, Resources, decode};
use ec_placement_client::{Amount, Inventory, Summary};
use ec_runtime::exit::Failure;
use ec_store::Store;
use futures::{StreamExt, TryStreamExt};
use serde::Serialize;

use crate::{
    config::Session,
    lookup::CONCURRENCY,
    nodes::{capacity, is_locked},
    schedule::NoRoom,
};

/// So many nodes are told of by name; more help nobody.
const TOLD: usize = 3;
/// Of so many nodes JSON tells.
const LISTED: usize = 20;
/// So many nodes that no summary shows are asked singly: they are full or locked.
const ASKED: usize = 64;

/// Why nothing was placed.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Reasons {
    /// Traits that the query requires, and that no provider has.
    pub(crate) traits_nobody_has: BTreeSet<String>,
    /// The living nodes, that which lacks least first; not more than some.
    pub(crate) nearest: Vec<Lack>,
    /// How many nodes live.
    pub(crate) living: usize,
    /// Living nodes all of whose processors are reserved.
    pub(crate) locked: Vec<String>,
    /// Nodes that have room or could have it, and whose agents are not alive.
    pub(crate) not_alive: Vec<String>,
    /// Claims that others were quicker with.
    pub(crate) taken_by_others: usize,
}

/// What one node lacks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Lack {
    pub(crate) node: NodeId,
    pub(crate) name: String,
    /// By class.
    pub(crate) short: BTreeMap<String, Short>,
    pub(crate) traits_missing: BTreeSet<String>,
    pub(crate) traits_forbidden: BTreeSet<String>,
}

/// What of a class is wanted, and what there is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Short {
    wanted: u64,
    free: u64,
    capacity: u64,
    /// The most that one claim may take, where that is what stands in the way.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_once: Option<u64>,
}

/// What the query wants of a node, as far as it can be told apart.
#[derive(Debug, Default, PartialEq)]
struct Demands {
    total: Resources,
    required: BTreeSet<String>,
    /// One of each is enough.
    any: Vec<BTreeSet<String>>,
    forbidden: BTreeSet<String>,
}

impl Demands {
    fn of(query: &ResourceQuery) -> Self {
        let mut demands = Self { total: query.total(), ..Self::default() };
        for (_, value) in query.pairs().iter().filter(|(key, _)| key.starts_with("required")) {
            if let Some(any) = value.strip_prefix("in:") {
                demands.any.push(any.split(',').map(str::to_owned).collect());
                continue;
            }
            for name in value.split(',') {
                match name.strip_prefix('!') {
                    Some(name) => demands.forbidden.insert(name.to_owned()),
                    None => demands.required.insert(name.to_owned()),
                };
            }
        }
        demands
    }
}

/// A host with all of its parts together.
#[derive(Debug, Clone, Default, PartialEq)]
struct Host {
    name: String,
    amounts: BTreeMap<String, Amount>,
    /// The most that one claim may take, where that was asked for.
    at_once: BTreeMap<String, u64>,
    traits: BTreeSet<String>,
}

/// Looks into placement and etcd once more, for the reason.
pub(crate) async fn explain(
    session: &Session,
    query: &ResourceQuery,
    seen: &NoRoom,
) -> Result<Reasons, Failure> {
    let demands = Demands::of(query);
    let nodes = session.settings.keys.nodes();
    let listing = session.store.list(&nodes).await?;
    let alive: HashMap<NodeId, String> = (listing.pairs.iter())
        .filter_map(|pair| {
            let node = session.settings.keys.parse_node(&pair.key).ok()?;
            Some((node, decode::<NodeRecord>(&pair.value).map_or_else(|_| node.to_string(), |r| r.name)))
        })
        .collect();
    let mut summaries: HashMap<NodeId, Summary> = HashMap::new();
    for class in demands.total.keys() {
        let query = ResourceQuery::parse(&format!("resources={class}:1"))
            .map_err(|error| Failure::failed(error.to_string()))?;
        summaries.extend(session.placement.candidates(&query, None).await?.summaries);
    }
    let mut wanted_traits = demands.required.clone();
    wanted_traits.extend(demands.any.iter().flatten().cloned());
    let somebody_has = session.placement.associated_traits(&wanted_traits).await?;

    let mut hosts: HashMap<NodeId, Host> = HashMap::new();
    for (provider, summary) in summaries {
        let host = hosts.entry(summary.root_provider_uuid.unwrap_or(provider)).or_default();
        for (class, amount) in summary.resources {
            let sum = host.amounts.entry(class).or_default();
            sum.capacity += amount.capacity;
            sum.used += amount.used;
        }
        host.traits.extend(summary.traits);
    }
    let unseen: Vec<NodeId> =
        alive.keys().copied().filter(|node| !hosts.contains_key(node)).take(ASKED).collect();
    let full: Vec<(NodeId, Host)> = futures::stream::iter(unseen)
        .map(async |node| Ok::<_, Failure>((node, singly(session, node).await?)))
        .buffer_unordered(CONCURRENCY)
        .try_collect()
        .await?;
    hosts.extend(full);
    let mut not_alive: BTreeSet<NodeId> = seen.not_alive.iter().copied().collect();
    not_alive.extend(hosts.keys().filter(|node| !alive.contains_key(node)));
    hosts.retain(|node, _| alive.contains_key(node));
    for (node, host) in &mut hosts {
        host.name = alive.get(node).cloned().unwrap_or_default();
    }
    let mut reasons = judge(&demands, &hosts, &somebody_has);
    // What lacks nothing in sum may be too much for one claim.
    for lack in reasons.nearest.iter_mut().filter(|lack| lack.is_nothing()).take(TOLD) {
        if let (Ok(inventory), Some(host)) =
            (session.placement.inventory(lack.node).await, hosts.get_mut(&lack.node))
        {
            host.at_once = inventory.iter().map(|(class, of)| (class.clone(), of.max_unit)).collect();
            *lack = lack_of(lack.node, host, &demands);
        }
    }
    reasons.taken_by_others = seen.lost_races;
    reasons.not_alive = futures::stream::iter(not_alive.into_iter().take(LISTED))
        .map(async |node| {
            let provider = session.placement.provider(node).await.ok().flatten();
            provider.map_or_else(|| node.to_string(), |provider| provider.name)
        })
        .buffered(CONCURRENCY)
        .collect()
        .await;
    Ok(reasons)
}

/// One that no summary shows; empty where placement does not know it.
async fn singly(session: &Session, node: NodeId) -> Result<Host, Failure> {
    let (Ok(inventory), Ok(used)) =
        tokio::join!(session.placement.inventory(node), session.placement.usages(node))
    else {
        return Ok(Host::default());
    };
    let amount = |class: &String, of: &Inventory| Amount {
        capacity: capacity(of),
        used: used.get(class).copied().unwrap_or(0),
    };
    Ok(Host {
        amounts: inventory.iter().map(|(class, of)| (class.clone(), amount(class, of))).collect(),
        ..Host::default()
    })
}

/// The reasons, from what is known of the living.
fn judge(demands: &Demands, hosts: &HashMap<NodeId, Host>, somebody_has: &BTreeSet<String>) -> Reasons {
    let mut traits_nobody_has: BTreeSet<String> =
        demands.required.difference(somebody_has).cloned().collect();
    for any in demands.any.iter().filter(|any| any.is_disjoint(somebody_has)) {
        traits_nobody_has.insert(any.iter().cloned().collect::<Vec<_>>().join(" or "));
    }
    let mut locked: Vec<String> = Vec::new();
    let mut lacks: Vec<Lack> = Vec::new();
    for (node, host) in hosts {
        let capacity = host.amounts.iter().map(|(class, amount)| (class.clone(), amount.capacity)).collect();
        if is_locked(&capacity) {
            locked.push(host.name.clone());
        } else {
            lacks.push(lack_of(*node, host, demands));
        }
    }
    locked.sort();
    lacks.sort_by(|a, b| a.weight().total_cmp(&b.weight()).then_with(|| a.name.cmp(&b.name)));
    lacks.truncate(LISTED);
    Reasons { traits_nobody_has, nearest: lacks, living: hosts.len(), locked, ..Reasons::default() }
}

fn lack_of(node: NodeId, host: &Host, demands: &Demands) -> Lack {
    let mut short = BTreeMap::new();
    for (class, wanted) in &demands.total {
        let Amount { capacity, used } = host.amounts.get(class).copied().unwrap_or_default();
        let free = capacity.saturating_sub(used);
        let at_once = host.at_once.get(class).copied().filter(|most| most < wanted);
        if free < *wanted || at_once.is_some() {
            short.insert(class.clone(), Short { wanted: *wanted, free, capacity, at_once });
        }
    }
    let mut traits_missing: BTreeSet<String> = demands.required.difference(&host.traits).cloned().collect();
    for any in demands.any.iter().filter(|any| any.is_disjoint(&host.traits)) {
        traits_missing.insert(any.iter().cloned().collect::<Vec<_>>().join(" or "));
    }
    let traits_forbidden = demands.forbidden.intersection(&host.traits).cloned().collect();
    Lack { node, name: host.name.clone(), short, traits_missing, traits_forbidden }
}

impl Lack {
    fn is_nothing(&self) -> bool {
        self.short.is_empty() && self.traits_missing.is_empty() && self.traits_forbidden.is_empty()
    }

    /// How far it is from taking what was asked for: whole parts of the amounts, traits more than any of them.
    #[expect(clippy::cast_precision_loss, reason = "only for an order")]
    fn weight(&self) -> f64 {
        let short: f64 =
            self.short.values().map(|s| 1.0 - s.free.min(s.wanted) as f64 / s.wanted.max(1) as f64).sum();
        short + 10.0 * (self.traits_missing.len() + self.traits_forbidden.len()) as f64
    }

    fn text(&self) -> String {
        let mut parts = Vec::new();
        for (class, s) in &self.short {
            parts.push(match s.at_once {
                Some(most) if s.free >= s.wanted => {
                    format!("{class}:{} is more than the {most} that one instance may take", s.wanted)
                }
                _ => format!(
                    "{class} is short by {} ({} of {} free)",
                    s.wanted - s.free.min(s.wanted),
                    s.free,
                    s.capacity
                ),
            });
        }
        parts.extend(self.traits_missing.iter().map(|name| format!("trait {name} is missing")));
        parts.extend(self.traits_forbidden.iter().map(|name| format!("it has the forbidden trait {name}")));
        if parts.is_empty() {
            parts.push(
                "has enough of everything: aggregates, groups, or steps of the query leave it out".to_owned(),
            );
        }
        format!("on {}: {}", self.name, parts.join(", "))
    }
}

impl Reasons {
    /// One line for people.
    pub(crate) fn text(&self) -> String {
        let mut parts = Vec::new();
        if !self.traits_nobody_has.is_empty() {
            let names: Vec<_> = self.traits_nobody_has.iter().cloned().collect();
            parts.push(format!("no node has the trait {}", names.join(", ")));
        }
        parts.extend(self.nearest.iter().take(TOLD).map(Lack::text));
        let others = self.living.saturating_sub(self.locked.len());
        if others > TOLD {
            parts.push(format!("{} more nodes lack more", others - TOLD));
        }
        if !self.locked.is_empty() {
            parts.push(format!("locked (all reserved): {}", some(&self.locked)));
        }
        if !self.not_alive.is_empty() {
            parts.push(format!("not alive: {}", some(&self.not_alive)));
        }
        if self.taken_by_others > 0 {
            parts.push(format!("{} claims were lost to others", self.taken_by_others));
        }
        if self.living == 0 && self.not_alive.is_empty() {
            parts.push("no node is there: no agent has registered with this etcd".to_owned());
        }
        parts.join("; ")
    }
}

/// The first few, and how many there are beside them.
fn some(names: &[String]) -> String {
    let told = names.iter().take(TOLD).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(TOLD) {
        0 => told,
        more => format!("{told} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, vcpu: (u64, u64), traits: &[&str]) -> (NodeId, Host) {
        let amounts = [
            ("VCPU".to_owned(), Amount { capacity: vcpu.0, used: vcpu.1 }),
            ("MEMORY_MB".to_owned(), Amount { capacity: 1024, used: 0 }),
        ];
        let host = Host {
            name: name.to_owned(),
            amounts: amounts.into(),
            at_once: BTreeMap::new(),
            traits: traits.iter().map(|&name| name.to_owned()).collect(),
        };
        (NodeId::new(uuid::Uuid::new_v4()), host)
    }

    fn reasons(query: &str, hosts: &[(NodeId, Host)]) -> Reasons {
        let demands = Demands::of(&ResourceQuery::parse(query).unwrap());
        let has = hosts.iter().flat_map(|(_, host)| host.traits.clone()).collect();
        judge(&demands, &hosts.iter().cloned().collect(), &has)
    }

    #[test]
    fn the_node_that_lacks_least_comes_first_with_what_it_lacks() {
        let hosts = [host("far", (8, 8), &[]), host("near", (8, 5), &[]), host("shut", (0, 0), &[])];
        let reasons = reasons("resources=VCPU:4,MEMORY_MB:256", &hosts);
        assert_eq!(
            reasons.text(),
            "on near: VCPU is short by 1 (3 of 8 free); on far: VCPU is short by 4 (0 of 8 free); locked (all reserved): shut"
        );
    }

    #[test]
    fn traits_are_told_that_nobody_has_and_that_a_node_has_not() {
        let hosts = [host("a", (8, 0), &["HW_X"]), host("b", (8, 0), &["HW_Y", "CUSTOM_OLD"])];
        let text =
            reasons("resources=VCPU:1&required=CUSTOM_GOLD,HW_Y,!CUSTOM_OLD&required=in:HW_P,HW_Q", &hosts)
                .text();
        for wanted in [
            "no node has the trait CUSTOM_GOLD, HW_P or HW_Q",
            "on a: trait CUSTOM_GOLD is missing, trait HW_P or HW_Q is missing, trait HW_Y is missing",
            "it has the forbidden trait CUSTOM_OLD",
        ] {
            assert!(text.contains(wanted), "wanted `{wanted}`: {text}");
        }
    }

    #[test]
    fn many_nodes_are_told_in_one_line_of_bounded_length() {
        let hosts: Vec<_> = (0..1000).map(|n| host(&format!("n{n:04}"), (8, 8), &[])).collect();
        let text = reasons("resources=VCPU:1", &hosts).text();
        assert!(text.contains("997 more nodes lack more") && text.len() < 500, "{text}");
        assert_eq!(reasons("resources=VCPU:1", &hosts).nearest.len(), LISTED);
        assert!(reasons("resources=VCPU:1", &[]).text().contains("no node is there"));
    }

    #[test]
    fn what_one_claim_may_not_take_is_told_as_that() {
        let (node, mut host) = host("a", (64, 0), &[]);
        host.at_once = [("VCPU".to_owned(), 16)].into();
        let demands = Demands::of(&ResourceQuery::parse("resources=VCPU:32").unwrap());
        let text = lack_of(node, &host, &demands).text();
        assert_eq!(text, "on a: VCPU:32 is more than the 16 that one instance may take");
    }
}

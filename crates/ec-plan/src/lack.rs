//! Why nobody took what was asked for: what is short where, what nobody has, who is locked or dead.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_model::{NodeId, Policy, ResourceQuery, Resources};
use serde::Serialize;

/// So many nodes are told of by name; more help nobody.
const TOLD: usize = 3;
/// Of so many nodes programs are told.
const LISTED: usize = 20;

/// What a node has of a resource class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// What may be allocated in all: (total - reserved) × ratio.
    pub capacity: u64,
    /// What is.
    pub used: u64,
}

/// Why nothing was placed.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Reasons {
    /// Traits that the query requires, and that no provider has.
    pub traits_nobody_has: BTreeSet<String>,
    /// The living nodes, that which lacks least first; not more than some.
    pub nearest: Vec<Lack>,
    /// How many nodes live.
    pub living: usize,
    /// Living nodes all of whose processors are reserved.
    pub locked: Vec<String>,
    /// Living nodes of which placement has no inventory.
    pub without_inventory: Vec<String>,
    /// Living nodes of which placement does not tell, and why.
    pub untold: Vec<String>,
    /// The node that was asked for, where there is none of that uuid.
    pub no_such_node: Option<NodeId>,
    /// Nodes that have room or could have it, and whose agents are not alive.
    pub not_alive: Vec<String>,
    /// Claims, and places in the group, that others were quicker with.
    pub taken_by_others: usize,
    /// The group, where it leaves nodes out that have room.
    pub group: Option<Bar>,
}

/// A group that leaves nodes out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bar {
    /// Its name.
    pub name: String,
    /// Where its members may be.
    pub policy: Policy,
    /// How many nodes have room and are left out.
    pub nodes: usize,
}

impl Bar {
    fn text(&self) -> String {
        let Self { name, policy, nodes } = self;
        let where_they_are = match policy {
            Policy::Affinity => format!("its members are on another than the {nodes} that have room"),
            Policy::AntiAffinity | Policy::SoftAffinity | Policy::SoftAntiAffinity => {
                format!("it has a member on each of the {nodes} that have room")
            }
        };
        format!("the group `{name}` ({policy}) leaves no node: {where_they_are}")
    }
}

/// What one node lacks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lack {
    /// Which.
    pub node: NodeId,
    /// What people call it.
    pub name: String,
    /// By class.
    pub short: BTreeMap<String, Short>,
    /// That the query requires.
    pub traits_missing: BTreeSet<String>,
    /// That it must not have.
    pub traits_forbidden: BTreeSet<String>,
}

/// What of a class is wanted, and what there is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Short {
    wanted: u64,
    free: u64,
    capacity: u64,
    /// The most that one claim may take, where that is what stands in the way.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_once: Option<u64>,
}

/// What the query wants of a node, as far as it can be told apart.
#[derive(Debug, Default, PartialEq)]
pub struct Demands {
    /// Amounts by class, of all groups together.
    pub total: Resources,
    /// All of these traits.
    pub required: BTreeSet<String>,
    /// One of each is enough.
    pub any: Vec<BTreeSet<String>>,
    /// None of these.
    pub forbidden: BTreeSet<String>,
}

impl Demands {
    /// Of a query.
    pub fn of(query: &ResourceQuery) -> Self {
        let mut demands = Self { total: query.total(), ..Self::default() };
        let about_traits = |key: &str| key.starts_with("required") || key == "root_required";
        for (_, value) in query.pairs().iter().filter(|(key, _)| about_traits(key)) {
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
pub struct Host {
    /// What people call it.
    pub name: String,
    /// By class.
    pub amounts: BTreeMap<String, Amount>,
    /// The most that one claim may take, where that was asked for.
    pub at_once: BTreeMap<String, u64>,
    /// Of any of its parts.
    pub traits: BTreeSet<String>,
}

/// An agent that ends reserves all processors, so that nothing more comes.
pub fn is_locked(capacity: &Resources) -> bool {
    capacity.get("VCPU") == Some(&0)
}

/// The reasons, from what is known of the living.
pub fn judge(demands: &Demands, hosts: &HashMap<NodeId, Host>, somebody_has: &BTreeSet<String>) -> Reasons {
    let mut traits_nobody_has: BTreeSet<String> =
        demands.required.difference(somebody_has).cloned().collect();
    for any in demands.any.iter().filter(|any| any.is_disjoint(somebody_has)) {
        traits_nobody_has.insert(any.iter().cloned().collect::<Vec<_>>().join(" or "));
    }
    let (mut locked, mut without_inventory) = (Vec::new(), Vec::new());
    let mut lacks: Vec<Lack> = Vec::new();
    for (node, host) in hosts {
        let capacity = host.amounts.iter().map(|(class, amount)| (class.clone(), amount.capacity)).collect();
        if host.amounts.is_empty() {
            without_inventory.push(host.name.clone());
        } else if is_locked(&capacity) {
            locked.push(host.name.clone());
        } else {
            lacks.push(lack_of(*node, host, demands));
        }
    }
    locked.sort();
    without_inventory.sort();
    lacks.sort_by(|a, b| a.weight().total_cmp(&b.weight()).then_with(|| a.name.cmp(&b.name)));
    lacks.truncate(LISTED);
    let living = hosts.len();
    Reasons { traits_nobody_has, nearest: lacks, living, locked, without_inventory, ..Reasons::default() }
}

/// What one host lacks.
pub fn lack_of(node: NodeId, host: &Host, demands: &Demands) -> Lack {
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
    /// Whether it has enough of everything.
    pub fn is_nothing(&self) -> bool {
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
    pub fn text(&self) -> String {
        let mut parts = Vec::new();
        if !self.traits_nobody_has.is_empty() {
            let names: Vec<_> = self.traits_nobody_has.iter().cloned().collect();
            parts.push(format!("no node has the trait {}", names.join(", ")));
        }
        parts.extend(self.group.as_ref().map(Bar::text));
        parts.extend(self.nearest.iter().take(TOLD).map(Lack::text));
        let left_out = self.group.as_ref().map_or(0, |group| group.nodes);
        let told = self.locked.len() + self.without_inventory.len() + self.untold.len() + left_out;
        match self.living.saturating_sub(told).saturating_sub(TOLD) {
            0 => {}
            1 => parts.push("1 more node lacks more".to_owned()),
            others => parts.push(format!("{others} more nodes lack more")),
        }
        if !self.locked.is_empty() {
            parts.push(format!("locked (all reserved): {}", some(&self.locked)));
        }
        if !self.without_inventory.is_empty() {
            parts.push(format!("without inventory in placement: {}", some(&self.without_inventory)));
        }
        if !self.untold.is_empty() {
            parts.push(format!("placement does not tell of {}", some(&self.untold)));
        }
        if !self.not_alive.is_empty() {
            parts.push(format!("not alive: {}", some(&self.not_alive)));
        }
        match self.taken_by_others {
            0 => {}
            1 => parts.push("1 claim was lost to others".to_owned()),
            many => parts.push(format!("{many} claims were lost to others")),
        }
        if self.living == 0 && self.not_alive.is_empty() {
            parts.push(match self.no_such_node {
                Some(node) => format!("there is no node {node}: `eschedule nodes` shows all"),
                None => "no node is there: no agent has registered with this etcd".to_owned(),
            });
        }
        parts.join("; ")
    }
}

/// The first few of names, and how many there are beside them.
pub fn some(names: &[String]) -> String {
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
    fn what_the_root_must_have_is_told_like_what_any_part_must_have() {
        let demands = |query| Demands::of(&ResourceQuery::parse(query).unwrap());
        let root = demands("resources=VCPU:1&root_required=HW_CPU_X86_AVX,!CUSTOM_OLD");
        assert_eq!(root, demands("resources=VCPU:1&required=HW_CPU_X86_AVX,!CUSTOM_OLD"));
        assert_eq!(root.required.len() + root.forbidden.len(), 2);
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
    fn nodes_of_which_placement_has_no_inventory_are_told_and_lack_nothing_singly() {
        let new = |name: &str| {
            let (node, known) = host(name, (8, 8), &[]);
            (node, Host { amounts: BTreeMap::new(), ..known })
        };
        let mut hosts = vec![new("z"), new("b")];
        let text = |hosts: &[_]| reasons("resources=VCPU:1", hosts).text();
        assert_eq!(text(&hosts), "without inventory in placement: b, z");
        hosts.extend(["c", "d", "e"].map(|name| host(name, (8, 8), &[])));
        let three = text(&hosts);
        assert!(
            !three.contains("more nodes") && three.ends_with("; without inventory in placement: b, z"),
            "{three}"
        );
        hosts.push(host("f", (8, 8), &[]));
        assert!(text(&hosts).contains("; 1 more node lacks more; without"));
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
    fn a_group_that_leaves_nodes_out_is_told_before_what_others_lack() {
        let full =
            reasons("resources=VCPU:4", &(0..9).map(|_| host("full", (4, 4), &[])).collect::<Vec<_>>());
        let bar = |policy| Some(Bar { name: "web".to_owned(), policy, nodes: 5 });
        let text = Reasons { group: bar(Policy::AntiAffinity), ..full }.text();
        let wanted = "the group `web` (anti-affinity) leaves no node: it has a member on each of the 5 that have room; on full";
        assert!(text.starts_with(wanted) && text.contains("1 more node lacks more"), "{text}");
        let text = Reasons { group: bar(Policy::Affinity), ..Reasons::default() }.text();
        assert!(text.contains("its members are on another than the 5 that have room"), "{text}");
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
    fn a_node_that_there_is_not_and_one_that_placement_does_not_tell_of_are_told_as_that() {
        let node = NodeId::new(uuid::Uuid::from_u128(7));
        let text = Reasons { no_such_node: Some(node), ..Reasons::default() }.text();
        assert_eq!(text, format!("there is no node {node}: `eschedule nodes` shows all"));
        let text =
            Reasons { living: 1, untold: vec!["a: timed out".to_owned()], ..Reasons::default() }.text();
        assert_eq!(text, "placement does not tell of a: timed out");
    }

    #[test]
    fn what_one_claim_may_not_take_is_told_as_that() {
        let (node, mut host) = host("a", (64, 0), &[]);
        host.at_once = [("VCPU".to_owned(), 16)].into();
        let demands = Demands::of(&ResourceQuery::parse("resources=VCPU:32").unwrap());
        let text = lack_of(node, &host, &demands).text();
        assert_eq!(text, "on a: VCPU:32 is more than the 16 that one instance may take");
    }

    #[test]
    fn enough_is_no_lack_and_one_less_is() {
        let lack = |free: u64, most: Option<u64>, traits: &[&str], query: &str| {
            let (node, mut host) = host("a", (8, 8 - free), traits);
            host.at_once = most.map(|most| ("VCPU".to_owned(), most)).into_iter().collect();
            lack_of(node, &host, &Demands::of(&ResourceQuery::parse(query).unwrap()))
        };
        assert!(lack(4, None, &[], "resources=VCPU:4").is_nothing());
        assert!(lack(4, Some(4), &["HW_X"], "resources=VCPU:4&required=HW_X,!HW_Y").is_nothing());
        assert!(!lack(3, None, &[], "resources=VCPU:4").is_nothing());
        assert!(!lack(8, Some(3), &[], "resources=VCPU:4").is_nothing());
        assert!(!lack(8, None, &[], "resources=VCPU:4&required=HW_X").is_nothing());
        assert!(!lack(8, None, &["HW_Y"], "resources=VCPU:4&required=!HW_Y").is_nothing());
        let text = lack(2, Some(3), &[], "resources=VCPU:4").text();
        assert_eq!(text, "on a: VCPU is short by 2 (2 of 8 free)", "first of all there is not enough");
        let text = lack(8, None, &[], "resources=VCPU:4").text();
        assert!(text.contains("has enough of everything"), "{text}");
    }

    #[test]
    fn who_lacks_a_part_comes_before_who_lacks_all_and_traits_count_more_than_any_amounts() {
        let demands = "resources=VCPU:4,MEMORY_MB:256,DISK_GB:10&required=HW_X,!HW_Y";
        // In their order, from whom lacks nothing to whom lacks most; the names say the reverse.
        let all = [
            (4, 256, 10, &["HW_X"][..]),
            (3, 256, 10, &["HW_X"]),
            (1, 256, 10, &["HW_X"]),
            (0, 256, 10, &["HW_X"]),
            (1, 64, 10, &["HW_X"]),
            (0, 0, 0, &["HW_X"]),
            (4, 256, 10, &[]),
            (3, 256, 10, &[]),
            (4, 256, 10, &["HW_Y"]),
        ];
        let hosts: Vec<_> = (0..9)
            .rev()
            .zip(all)
            .map(|(number, (vcpu, memory, disk, traits))| {
                let (node, mut host) = host(&number.to_string(), (4, 4 - vcpu), traits);
                host.amounts.insert("MEMORY_MB".to_owned(), Amount { capacity: 256, used: 256 - memory });
                host.amounts.insert("DISK_GB".to_owned(), Amount { capacity: 10, used: 10 - disk });
                (node, host)
            })
            .collect();
        let names: Vec<String> = reasons(demands, &hosts).nearest.into_iter().map(|lack| lack.name).collect();
        assert_eq!(names, ["8", "7", "6", "5", "4", "3", "2", "1", "0"]);
    }

    #[test]
    fn what_there_is_none_of_is_not_told() {
        let three: Vec<_> = ["a", "b", "c"].map(|name| host(name, (8, 8), &[])).into();
        let mut reasons = reasons("resources=VCPU:1", &three);
        let text = reasons.text();
        for part in ["more nodes", "locked", "inventory", "not alive", "lost to others", "no node"] {
            assert!(!text.contains(part), "{part}: {text}");
        }
        reasons.taken_by_others = 2;
        reasons.not_alive = ["d", "e", "f", "g", "h"].map(str::to_owned).into();
        let text = reasons.text();
        assert!(text.contains("; not alive: d, e, f and 2 more; 2 claims were lost to others"), "{text}");
        reasons.taken_by_others = 1;
        assert!(reasons.text().contains("; 1 claim was lost to others"), "{}", reasons.text());
    }
}

//! Which of the offered candidates to try, and in which order.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use ec_model::{InstanceId, NodeId, Policy, Resources};
use uuid::Uuid;

/// A candidate to be tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Try {
    /// Its place among the offers.
    pub offer: usize,
    /// The node that is to build there.
    pub node: NodeId,
}

/// What is to be tried, and whom that leaves out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// In this order.
    pub tries: Vec<Try>,
    /// Hosts that have room, and nobody there who would build.
    pub not_alive: BTreeSet<NodeId>,
    /// Nodes that have room, and that the group leaves out.
    pub left_out: BTreeSet<NodeId>,
}

/// The members that there are of the group which an instance shall go into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peers {
    /// Where members may be.
    pub policy: Policy,
    /// Where they are.
    pub on: BTreeMap<NodeId, BTreeSet<InstanceId>>,
    /// The revision at which they were read.
    pub as_of: i64,
}

impl Peers {
    /// Whether one more may go to this node.
    pub fn allow(&self, node: NodeId) -> bool {
        match self.policy {
            Policy::Affinity => self.on.is_empty() || self.on.contains_key(&node),
            Policy::AntiAffinity => !self.on.contains_key(&node),
            Policy::SoftAffinity | Policy::SoftAntiAffinity => true,
        }
    }

    /// Whether one of these would be tried before this node.
    pub fn prefer(&self, nodes: &[NodeId], to: NodeId) -> bool {
        nodes.iter().any(|node| self.rank(*node) < self.rank(to))
    }

    /// Before which others a node is tried: the smaller first.
    fn rank(&self, node: NodeId) -> usize {
        let there = self.on.get(&node).map_or(0, BTreeSet::len);
        match self.policy {
            Policy::SoftAffinity => usize::MAX - there,
            Policy::SoftAntiAffinity => there,
            Policy::Affinity | Policy::AntiAffinity => 0,
        }
    }
}

/// What a user wants of where instances go, beside that there is room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// To the node that is the least full afterwards.
    Spread,
    /// To the node that is the fullest afterwards.
    Pack,
    /// To the next node by uuid, after the one where the project's newest instance went.
    RoundRobin,
    /// To any.
    Random,
    /// One that is called the same to the same node again, as long as that node has room: its image is there.
    Sticky,
}

/// In which order offers are tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// As placement has them.
    Given,
    /// Those first that are the least full.
    Emptiest,
    /// Those first that are the fullest.
    Fullest,
    /// By uuid, from the one after this on.
    After(Option<NodeId>),
    /// As it is drawn for this word: the same for the same, and whoever comes or goes changes no others' order.
    Drawn(String),
}

/// What is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The hosts that it takes from.
    pub hosts: Vec<NodeId>,
    /// How full its host is with it: see [`fullness`].
    pub fullness: u64,
}

/// How full a host is when it gives what is wanted, in millionths, by the class of which there is least; of each class it
/// has so much in use, of so much in all.
pub fn fullness(wanted: &Resources, host: impl Fn(&str) -> (u64, u64)) -> u64 {
    let shares = wanted.iter().map(|(class, wanted)| {
        let (used, capacity) = host(class);
        (used + wanted).saturating_mul(1_000_000) / capacity.max(1)
    });
    shares.max().unwrap_or_default()
}

impl Order {
    /// The places of the offers, in this order. Equals stay as placement has them.
    fn places(&self, offers: &[Offer]) -> Vec<usize> {
        let mut places: Vec<usize> = (0..offers.len()).collect();
        let host = |place: &usize| offers[*place].hosts.first().copied();
        match self {
            Self::Given => {}
            Self::Emptiest => places.sort_by_key(|place| offers[*place].fullness),
            Self::Fullest => places.sort_by_key(|place| Reverse(offers[*place].fullness)),
            Self::After(last) => places.sort_by_key(|place| (host(place) <= *last, host(place))),
            Self::Drawn(word) => {
                places.sort_by_cached_key(|place| host(place).map(|node| lot(node, word)));
            }
        }
        places
    }
}

/// A node's lot where lots are drawn for this word.
fn lot(node: NodeId, word: &str) -> Uuid {
    Uuid::new_v5(&node.uuid(), word.as_bytes())
}

/// Puts what is left to be tried in the order that is drawn for this word.
pub fn draw(tries: &mut [Try], word: &str) {
    tries.sort_by_cached_key(|each| lot(each.node, word));
}

/// Chooses among offers, which come in placement's order: the first of `limit` by what the group likes better, and then by
/// their order, that a living node can build. Those of dead nodes, and of nodes that the group leaves out, use the limit up
/// as little as they would be built.
pub fn choose(
    offers: &[Offer],
    order: &Order,
    alive: &HashSet<NodeId>,
    peers: Option<&Peers>,
    limit: usize,
) -> Choice {
    let builder = |offer: usize| offers[offer].hosts.iter().copied().find(|host| alive.contains(host));
    let mut places = order.places(offers);
    if let Some(peers) = peers {
        places.sort_by_key(|place| builder(*place).map(|node| peers.rank(node)));
    }
    let mut choice = Choice::default();
    for offer in places {
        let hosts = &offers[offer].hosts;
        match builder(offer) {
            Some(node) if peers.is_some_and(|peers| !peers.allow(node)) => _ = choice.left_out.insert(node),
            Some(_) if choice.tries.len() == limit => break,
            Some(node) => choice.tries.push(Try { offer, node }),
            None => choice.not_alive.extend(hosts),
        }
    }
    choice
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u128) -> NodeId {
        NodeId::new(Uuid::from_u128(number))
    }

    fn offer(hosts: &[u128], fullness: u64) -> Offer {
        Offer { hosts: hosts.iter().map(|number| node(*number)).collect(), fullness }
    }

    #[test]
    fn the_living_are_tried_in_order_and_the_dead_use_no_limit_up() {
        let offers = [&[1][..], &[2], &[9, 3], &[4], &[5]].map(|hosts| offer(hosts, 0));
        let alive = [2, 3, 4, 5].map(node).into();
        let choice = choose(&offers, &Order::Given, &alive, None, 2);
        assert_eq!(choice.tries, [Try { offer: 1, node: node(2) }, Try { offer: 2, node: node(3) }]);
        assert_eq!(choice.not_alive, [node(1)].into());
        assert_eq!(choose(&offers, &Order::Given, &alive, None, usize::MAX).tries.len(), 4);
        assert_eq!(choose(&offers, &Order::Given, &HashSet::new(), None, 5).not_alive.len(), 6);
        let alive = [1, 5].map(node).into();
        let choice = choose(&offers, &Order::After(Some(node(1))), &alive, None, 1);
        assert_eq!(choice.tries, [Try { offer: 4, node: node(5) }], "the limit counts what is tried");
    }

    #[test]
    fn a_group_leaves_nodes_out_or_has_them_tried_first() {
        let offers = [1, 2, 3, 4].map(|number| offer(&[number], 0));
        let alive = [1, 2, 3].map(node).into();
        let peers = |policy, on: &[(u128, u128)]| {
            let on = on.iter().map(|(number, count)| {
                let members =
                    (0..*count).map(|member| InstanceId::new(Uuid::from_u128(number * 100 + member)));
                (node(*number), members.collect())
            });
            Peers { policy, on: on.collect(), as_of: 1 }
        };
        let nodes = |numbers: &[u128]| numbers.iter().map(|number| node(*number)).collect::<Vec<_>>();
        let with = |policy, on: &[(u128, u128)], limit| {
            let choice = choose(&offers, &Order::Given, &alive, Some(&peers(policy, on)), limit);
            assert_eq!(choice.not_alive.iter().copied().collect::<Vec<_>>(), nodes(&[4]), "{policy}");
            (choice.tries.into_iter().map(|each| each.node).collect(), choice.left_out.into_iter().collect())
        };
        for (policy, on, limit, tries, left_out) in [
            (Policy::AntiAffinity, &[][..], 9, &[1, 2, 3][..], &[][..]),
            (Policy::AntiAffinity, &[(1, 1), (3, 2)], 1, &[2], &[1, 3]),
            (Policy::AntiAffinity, &[(1, 1), (2, 1), (3, 1)], 9, &[], &[1, 2, 3]),
            (Policy::Affinity, &[], 9, &[1, 2, 3], &[]),
            (Policy::Affinity, &[(2, 1)], 1, &[2], &[1, 3]),
            (Policy::Affinity, &[(7, 1)], 9, &[], &[1, 2, 3]),
            (Policy::SoftAntiAffinity, &[(1, 2), (2, 1)], 9, &[3, 2, 1], &[]),
            (Policy::SoftAffinity, &[(3, 2), (2, 1)], 9, &[3, 2, 1], &[]),
            (Policy::SoftAffinity, &[], 9, &[1, 2, 3], &[]),
        ] {
            assert_eq!(with(policy, on, limit), (nodes(tries), nodes(left_out)), "{policy} {on:?}");
        }
        // One that others are preferred to by now.
        for (policy, preferred) in [
            (Policy::SoftAntiAffinity, &[2, 3][..]),
            (Policy::SoftAffinity, &[1]),
            (Policy::AntiAffinity, &[]),
            (Policy::Affinity, &[]),
        ] {
            let peers = peers(policy, &[(1, 2), (2, 1), (3, 1)]);
            for other in [1, 2, 3] {
                let is_preferred = peers.prefer(&nodes(&[other]), node(if other == 1 { 2 } else { 1 }));
                assert_eq!(is_preferred, preferred.contains(&other), "{policy} {other}");
                assert!(!peers.prefer(&nodes(&[other]), node(other)), "{policy}: it is as good as itself");
            }
        }
    }

    #[test]
    fn a_host_is_as_full_as_the_class_of_which_there_is_least_makes_it() {
        let wanted =
            [("VCPU", 2), ("MEMORY_MB", 100)].map(|(class, amount)| (class.to_owned(), amount)).into();
        let of = |vcpu, memory| fullness(&wanted, |class| if class == "VCPU" { vcpu } else { memory });
        assert_eq!(of((1, 4), (0, 1000)), 750_000);
        assert_eq!(of((0, 16), (300, 1000)), 400_000);
        // Of what it does not have there is less than nothing.
        assert_eq!(of((0, 0), (0, 1000)), 2_000_000);
        assert_eq!(fullness(&Resources::new(), |_| (1, 1)), 0);
    }

    #[test]
    fn every_order_tries_each_offer_once() {
        let offers = [(3, 500), (1, 900), (2, 500), (4, 100)].map(|(number, full)| offer(&[number], full));
        let order = |order: Order| order.places(&offers);
        assert_eq!(order(Order::Given), [0, 1, 2, 3]);
        assert_eq!(order(Order::Emptiest), [3, 0, 2, 1]);
        assert_eq!(order(Order::Fullest), [1, 0, 2, 3]);
        assert_eq!(order(Order::After(None)), [1, 2, 0, 3]);
        assert_eq!(order(Order::After(Some(node(2)))), [0, 3, 1, 2]);
        assert_eq!(order(Order::After(Some(node(4)))), [1, 2, 0, 3]);
        let mut drawn = order(Order::Drawn("web".into()));
        let mut tries = [0, 1, 2, 3].map(|offer| Try { offer, node: offers[offer].hosts[0] });
        draw(&mut tries, "web");
        assert_eq!(tries.map(|each| each.offer).to_vec(), drawn, "what is left, too");
        drawn.sort_unstable();
        assert_eq!(drawn, [0, 1, 2, 3]);
    }

    #[test]
    fn what_is_drawn_for_a_word_stays_when_others_go_and_words_differ() {
        let offers: Vec<Offer> = (1..=20).map(|number| offer(&[number], 0)).collect();
        let hosts = |offers: &[Offer], word: &str| -> Vec<NodeId> {
            Order::Drawn(word.into()).places(offers).into_iter().map(|place| offers[place].hosts[0]).collect()
        };
        let all = hosts(&offers, "web");
        assert_eq!(all, hosts(&offers, "web"));
        assert_ne!(all, hosts(&offers, "db"));
        let without: Vec<NodeId> = all.iter().copied().filter(|host| *host != node(7)).collect();
        let fewer: Vec<Offer> = offers.into_iter().filter(|offer| offer.hosts != [node(7)]).collect();
        assert_eq!(hosts(&fewer, "web"), without);
    }
}

//! Which of the offered candidates to try, and in which order.

use std::collections::{BTreeSet, HashSet};

use ec_model::NodeId;

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
}

/// Chooses among offers, each told by the hosts that it takes from, in placement's order: the first of `limit`
/// that a living node can build. Those of dead nodes use the limit up as little as they would be built.
pub fn choose(offers: &[Vec<NodeId>], alive: &HashSet<NodeId>, limit: usize) -> Choice {
    let mut choice = Choice::default();
    for (offer, hosts) in offers.iter().enumerate() {
        match hosts.iter().copied().find(|host| alive.contains(host)) {
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
        NodeId::new(uuid::Uuid::from_u128(number))
    }

    #[test]
    fn the_living_are_tried_in_order_and_the_dead_use_no_limit_up() {
        let offers = [vec![node(1)], vec![node(2)], vec![node(9), node(3)], vec![node(4)], vec![node(5)]];
        let alive = [2, 3, 4, 5].map(node).into();
        let choice = choose(&offers, &alive, 2);
        assert_eq!(choice.tries, [Try { offer: 1, node: node(2) }, Try { offer: 2, node: node(3) }]);
        assert_eq!(choice.not_alive, [node(1)].into());
        assert_eq!(choose(&offers, &alive, usize::MAX).tries.len(), 4);
        assert_eq!(choose(&offers, &HashSet::new(), 5).not_alive.len(), 6);
    }
}

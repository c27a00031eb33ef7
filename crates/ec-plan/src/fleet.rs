//! What must be done about nodes that nobody speaks for: pure, from what was seen of all of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_model::NodeId;

/// What is to be done about one node. Doing it twice, or by two controllers at once, does no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// Placement shall offer nothing of it.
    MarkDown(NodeId),
    /// It is back: placement may offer it again.
    MarkUp(NodeId),
}

/// What one look saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Every node that there is, alive or not.
    pub known: BTreeSet<NodeId>,
    /// Those whose agents are alive.
    pub alive: BTreeSet<NodeId>,
    /// Those that are marked as down, by a controller.
    pub marked: BTreeSet<NodeId>,
}

/// For how long nodes have been missing, as far as somebody looked.
#[derive(Debug)]
pub struct Fleet {
    patience: Duration,
    /// Between two looks at most so much counts: who slept, or had no etcd, has seen nobody missing.
    step: Duration,
    missing: BTreeMap<NodeId, Duration>,
    last: Option<Duration>,
}

impl Fleet {
    /// A node is down that was missing for `patience`, counted in steps of at most `step` between two looks.
    pub fn new(patience: Duration, step: Duration) -> Self {
        Self { patience, step, missing: BTreeMap::new(), last: None }
    }

    /// Takes what a look saw at `now`, by a clock that only grows, and answers what is to be done.
    pub fn look(&mut self, seen: &Seen, now: Duration) -> Vec<Move> {
        let passed = self.last.map_or(Duration::ZERO, |last| now.saturating_sub(last).min(self.step));
        self.last = Some(now);
        let gone = seen.known.difference(&seen.alive);
        self.missing = gone
            .map(|node| (*node, self.missing.get(node).map_or(Duration::ZERO, |before| *before + passed)))
            .collect();
        let down = self
            .missing
            .iter()
            .filter(|(node, missing)| **missing >= self.patience && !seen.marked.contains(*node));
        let up = seen.marked.intersection(&seen.alive);
        down.map(|(node, _)| Move::MarkDown(*node)).chain(up.map(|node| Move::MarkUp(*node))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);
    const STEP: Duration = Duration::from_secs(10);

    fn nodes(numbers: &[u128]) -> BTreeSet<NodeId> {
        numbers.iter().map(|n| NodeId::new(uuid::Uuid::from_u128(*n))).collect()
    }

    fn seen(known: &[u128], alive: &[u128], marked: &[u128]) -> Seen {
        Seen { known: nodes(known), alive: nodes(alive), marked: nodes(marked) }
    }

    fn node(n: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn a_node_that_is_missing_long_enough_is_marked_once_and_unmarked_when_it_is_back() {
        let mut fleet = Fleet::new(PATIENCE, STEP);
        for seconds in [0, 10, 20] {
            assert_eq!(fleet.look(&seen(&[1, 2], &[2], &[]), Duration::from_secs(seconds)), []);
        }
        let now = Duration::from_secs(30);
        assert_eq!(fleet.look(&seen(&[1, 2], &[2], &[]), now), [Move::MarkDown(node(1))]);
        assert_eq!(fleet.look(&seen(&[1, 2], &[2], &[]), now), [Move::MarkDown(node(1))], "it did not work");
        assert_eq!(fleet.look(&seen(&[1, 2], &[2], &[1]), now), []);
        assert_eq!(fleet.look(&seen(&[1, 2], &[1, 2], &[1]), now), [Move::MarkUp(node(1))]);
        assert_eq!(fleet.look(&seen(&[1, 2], &[2], &[]), now), [], "from the beginning");
    }

    #[test]
    fn whoever_slept_or_could_not_look_has_seen_nobody_missing() {
        let mut fleet = Fleet::new(PATIENCE, STEP);
        fleet.look(&seen(&[1], &[], &[]), Duration::from_secs(0));
        assert_eq!(fleet.look(&seen(&[1], &[], &[]), Duration::from_secs(3600)), []);
        fleet.look(&seen(&[1], &[1], &[]), Duration::from_secs(3601));
        assert_eq!(fleet.look(&seen(&[1], &[], &[]), Duration::from_secs(7200)), [], "a short absence each");
    }

    #[test]
    fn a_mark_on_a_node_that_nobody_knows_is_left_alone() {
        let mut fleet = Fleet::new(PATIENCE, STEP);
        for seconds in 0..100 {
            assert_eq!(fleet.look(&seen(&[], &[], &[7]), Duration::from_secs(seconds)), []);
        }
    }
}

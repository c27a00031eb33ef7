//! What must be done about nodes that nobody speaks for: pure, from what was seen of all of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_model::{InstanceId, NodeId, Resources};

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
    /// Those that are let in no more.
    pub revoked: BTreeSet<NodeId>,
}

impl Seen {
    /// Those whose agents should be alive, and are not.
    pub fn missing(&self) -> usize {
        self.known.difference(&self.alive).filter(|node| !self.revoked.contains(*node)).count()
    }
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

/// For how long instances have held the same, which is more than they were asked for, as far as somebody looked.
#[derive(Debug)]
pub struct Surplus {
    patience: Duration,
    step: Duration,
    seen: BTreeMap<InstanceId, (Resources, Duration)>,
    last: Option<Duration>,
}

impl Surplus {
    /// It is left for `patience`, counted as [`Fleet::new`] counts: whoever claims it may be about to ask for it.
    pub fn new(patience: Duration, step: Duration) -> Self {
        Self { patience, step, seen: BTreeMap::new(), last: None }
    }

    /// Takes what a look saw at `now`, by a clock that only grows, and answers whose claims are to be looked into.
    pub fn look(&mut self, held: BTreeMap<InstanceId, Resources>, now: Duration) -> Vec<InstanceId> {
        let passed = self.last.map_or(Duration::ZERO, |last| now.saturating_sub(last).min(self.step));
        self.last = Some(now);
        let counted = held.into_iter().map(|(instance, held)| {
            let before = self.seen.get(&instance).filter(|(before, _)| *before == held);
            let time = before.map_or(Duration::ZERO, |(_, time)| *time + passed);
            (instance, (held, time))
        });
        self.seen = counted.collect();
        let due = self.seen.iter().filter(|(_, (_, time))| *time >= self.patience);
        due.map(|(instance, _)| *instance).collect()
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
        Seen { known: nodes(known), alive: nodes(alive), marked: nodes(marked), ..Seen::default() }
    }

    fn node(n: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn nobody_misses_a_node_that_is_let_in_no_more() {
        let of = |revoked| Seen { revoked: nodes(revoked), ..seen(&[1, 2, 3, 4], &[1], &[2]) };
        assert_eq!(of(&[]).missing(), 3);
        assert_eq!(of(&[3, 4]).missing(), 1);
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
    fn what_is_claimed_beyond_what_is_asked_for_is_looked_into_when_it_has_stayed_the_same() {
        let one = InstanceId::new(uuid::Uuid::from_u128(1));
        let held = |amount: u64| BTreeMap::from([(one, Resources::from([("VCPU".to_owned(), amount)]))]);
        let mut surplus = Surplus::new(PATIENCE, STEP);
        let mut look = |held, seconds| surplus.look(held, Duration::from_secs(seconds));
        assert_eq!(look(held(2), 0), []);
        assert_eq!(look(held(2), 1000), [], "nobody looked for most of it");
        assert_eq!(look(held(2), 1010), []);
        assert_eq!(look(held(2), 1020), [one]);
        assert_eq!(look(held(2), 1021), [one], "it did not work");
        assert_eq!(look(held(3), 1031), [], "somebody claims more at this moment");
        assert_eq!(look(BTreeMap::new(), 1041), []);
        assert_eq!(look(held(3), 1051), [], "from the beginning");
    }

    #[test]
    fn a_mark_on_a_node_that_nobody_knows_is_left_alone() {
        let mut fleet = Fleet::new(PATIENCE, STEP);
        for seconds in 0..100 {
            assert_eq!(fleet.look(&seen(&[], &[], &[7]), Duration::from_secs(seconds)), []);
        }
    }
}

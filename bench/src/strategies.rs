//! How evenly each strategy fills a fleet, and how much of what is free is left in pieces, on simulated nodes: the order is
//! the product's, the nodes are numbers.
//!
//! Nodes of three sizes, instances of four, drawn by a seed. The fleet is filled, and then kept as full by as many that come
//! as go; looked at is meanwhile.

use std::collections::{HashMap, HashSet};

use ec_model::{NodeId, Resources};
use ec_plan::choice::{Offer, Order, choose, fullness};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use uuid::Uuid;

use crate::stats::{Figure, Goal, Samples};

const SEEDS: [u64; 3] = [1, 2, 3];
const NODES: usize = 200;
const ARRIVALS: usize = 6000;
/// So many of a hundred of the fleet's processors are kept in use.
const FILL: u64 = 75;
/// Looked at after each so many.
const LOOK: usize = 200;
/// So many names there are for instances.
const NAMES: usize = 400;

/// VCPU, MEMORY_MB, DISK_GB.
type Amounts = [u64; 3];
const CLASSES: [&str; 3] = ["VCPU", "MEMORY_MB", "DISK_GB"];
const HOSTS: [Amounts; 3] = [[16, 65_536, 1000], [32, 131_072, 2000], [64, 524_288, 4000]];
/// With how many of a hundred are so.
const GUESTS: [(Amounts, u32); 4] =
    [([1, 2048, 20], 50), ([2, 8192, 40], 30), ([4, 16_384, 80], 15), (LARGE, 5)];
/// For which what is free may lie in too small pieces.
const LARGE: Amounts = [16, 65_536, 200];

#[derive(Clone, Copy)]
enum By {
    Given,
    Spread,
    Pack,
    RoundRobin,
    Random,
    Sticky,
}

/// A strategy, with the names of its figures.
const STRATEGIES: [(By, [&str; 3]); 5] = [
    (By::Spread, ["spread: unevenness", "spread: free in pieces", "spread: same node again"]),
    (By::Pack, ["pack: unevenness", "pack: free in pieces", "pack: same node again"]),
    (
        By::RoundRobin,
        ["round-robin: unevenness", "round-robin: free in pieces", "round-robin: same node again"],
    ),
    (By::Random, ["random: unevenness", "random: free in pieces", "random: same node again"]),
    (By::Sticky, ["sticky: unevenness", "sticky: free in pieces", "sticky: same node again"]),
];

struct Node {
    id: NodeId,
    has: Amounts,
    used: Amounts,
}

impl Node {
    fn has_room(&self, wanted: Amounts) -> bool {
        (0..3).all(|class| self.used[class] + wanted[class] <= self.has[class])
    }

    fn full(&self, wanted: &Resources) -> u64 {
        fullness(wanted, |name| {
            let class = CLASSES.iter().position(|class| *class == name).unwrap_or(0);
            (self.used[class], self.has[class])
        })
    }

    fn take(&mut self, wanted: Amounts) {
        (0..3).for_each(|class| self.used[class] += wanted[class]);
    }

    fn give(&mut self, back: Amounts) {
        (0..3).for_each(|class| self.used[class] -= back[class]);
    }
}

fn resources(amounts: Amounts) -> Resources {
    CLASSES.iter().zip(amounts).map(|(class, amount)| ((*class).to_owned(), amount)).collect()
}

/// What was seen of a strategy.
#[derive(Default)]
struct Seen {
    unevenness: Samples,
    pieces: Samples,
    again: Samples,
}

/// Measures each beside placement's own order.
pub(crate) fn measure() -> Vec<Figure> {
    let given = fill(By::Given);
    let mut figures = Vec::new();
    for (by, [unevenness, pieces, again]) in STRATEGIES {
        let seen = fill(by);
        let mut add = |name, ours, of_given: &Samples, goals| {
            let bare = Some(("the first that placement offers", of_given.clone()));
            figures.push(Figure { name, unit: "%", ours, bare, goals });
        };
        // What each is for; of the rest it is told what it costs.
        let goal = |is: bool, goal| if is { vec![goal] } else { Vec::new() };
        add(unevenness, seen.unevenness, &given.unevenness, goal(matches!(by, By::Spread), Goal::Ratio(0.5)));
        add(pieces, seen.pieces, &given.pieces, goal(matches!(by, By::Pack), Goal::Ratio(1.0)));
        add(again, seen.again, &given.again, Vec::new());
    }
    figures
}

fn fill(by: By) -> Seen {
    let mut seen = Seen::default();
    for seed in SEEDS {
        run(by, seed, &mut seen);
    }
    seen
}

#[expect(clippy::cast_precision_loss, reason = "these are small numbers")]
fn run(by: By, seed: u64, seen: &mut Seen) {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut nodes: Vec<Node> = (0..NODES)
        .map(|_| {
            let has = HOSTS[dice.random_range(0..HOSTS.len())];
            Node { id: NodeId::new(Uuid::from_u128(dice.random())), has, used: [0; 3] }
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    let alive: HashSet<NodeId> = nodes.iter().map(|node| node.id).collect();
    let total: u64 = nodes.iter().map(|node| node.has[0]).sum();
    let wanted_used = total * FILL / 100;
    let mut there: Vec<(usize, Amounts)> = Vec::new();
    let mut last = None;
    let mut before: HashMap<usize, NodeId> = HashMap::new();
    let mut again: Vec<bool> = Vec::new();
    for arrival in 0..ARRIVALS {
        while nodes.iter().map(|node| node.used[0]).sum::<u64>() > wanted_used {
            let (node, amounts) = there.swap_remove(dice.random_range(0..there.len()));
            nodes[node].give(amounts);
        }
        let wanted = GUESTS.choose_weighted(&mut dice, |guest| guest.1).map_or(LARGE, |guest| guest.0);
        let name = dice.random_range(0..NAMES);
        let order = match by {
            By::Given => Order::Given,
            By::Spread => Order::Emptiest,
            By::Pack => Order::Fullest,
            By::RoundRobin => Order::After(last),
            By::Random => Order::Drawn(Uuid::from_u128(dice.random()).to_string()),
            By::Sticky => Order::Drawn(format!("default/{name}")),
        };
        let resources = resources(wanted);
        let free: Vec<usize> = (0..NODES).filter(|node| nodes[*node].has_room(wanted)).collect();
        let offers: Vec<Offer> = free
            .iter()
            .map(|node| Offer { hosts: vec![nodes[*node].id], fullness: nodes[*node].full(&resources) })
            .collect();
        let choice = choose(&offers, &order, &alive, None, 1);
        // No room at all: it does not come.
        let Some(tried) = choice.tries.first() else { continue };
        let node = free[tried.offer];
        nodes[node].take(wanted);
        there.push((node, wanted));
        last = Some(tried.node);
        if let Some(was) = before.insert(name, tried.node) {
            again.push(was == tried.node);
        }
        if arrival > ARRIVALS / 2 && arrival % LOOK == 0 {
            look(&nodes, seen);
        }
    }
    seen.again.push(100.0 * again.iter().filter(|is| **is).count() as f64 / again.len().max(1) as f64);
}

/// Standard deviation of how full nodes are, and how much of the free processors no large instance can have.
#[expect(clippy::cast_precision_loss, reason = "these are small numbers")]
fn look(nodes: &[Node], seen: &mut Seen) {
    let nothing = resources([0; 3]);
    let shares: Vec<f64> = nodes.iter().map(|node| node.full(&nothing) as f64 / 10_000.0).collect();
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let variance = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / shares.len() as f64;
    seen.unevenness.push(variance.sqrt());
    let free: u64 = nodes.iter().map(|node| node.has[0] - node.used[0]).sum();
    let fit = |node: &Node| (0..3).map(|class| (node.has[class] - node.used[class]) / LARGE[class]).min();
    let large: u64 = nodes.iter().filter_map(fit).sum();
    seen.pieces.push(100.0 - 100.0 * (large * LARGE[0]) as f64 / free.max(1) as f64);
}

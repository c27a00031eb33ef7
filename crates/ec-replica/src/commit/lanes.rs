//! Which commands set out together, and when: the order in which they wait, and what is under way. It does nothing
//! itself, and knows no store, no view and no clock.
//!
//! ```text
//!                  what did not fit, what still has time
//!            ┌────────────────────────────────────────────┐
//!            ▼                                            │
//!   ─▶ waiting, by their arrival ─┬─ nothing under way ─▶ lane 1: a Batch ─▶ its records, sent ─▶ answered
//!            ▲                    │
//!            │                    └─ all lanes sent, and ─▶ lane 2, 3, 4, the same
//!            │                       many wait, or etcd      │
//!            └── stands on what is    is slow: choose ───────┘
//!                under way, or does
//!                not fill one
//! ```
//!
//! One transaction at a time is what costs least: commands gather meanwhile, and share the next one. So another sets
//! out beside it only when that makes no smaller ones: when what waits fills it; or when etcd is so slow that the
//! processor has nothing to do.
//!
//! **Nothing sets out beside trouble.** While any lane is being decided, has met others' writes, or does not know
//! whether it was written, none is added: then all goes as if there was one at a time.
//!
//! **What is under way together is about different records.** Every decision notes all that it looked at, absent
//! records too, and whatever could make it another rewrites one of these. So one on a view that lacks what is under way
//! is the same as after it, where no record of one is among the other's. That only saves conflicts: lanes meet in
//! etcd as replicas do, by the comparisons of their transactions, and need no other proof than these. So a lane that
//! is decided again goes out whatever it stands on by then.
//!
//! **Nobody is overtaken for ever.** Commands are looked at in the order in which they came. Whoever stands on
//! what is under way is passed over, and whoever came later and stands on what that one does, too. So a record that
//! is free again is the oldest one's.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

/// So many batches may be under way at a time.
const LANES: usize = 4;

/// An answer that takes so long is etcd's or its way's matter, and not for want of processors here.
const SLOW: Duration = Duration::from_millis(25);

/// By their arrival.
pub(super) type Arrival = u64;

/// Which of those under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Number(u64);

/// What a lane is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    /// Whatever comes first: nothing is under way.
    Alone,
    /// What stands on nothing that is under way, if it fills a transaction.
    Full,
    /// What stands on nothing that is under way.
    Any,
}

/// Commands that may set out.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// Which of [`Lanes::waiting`], from its front, are taken. Those that are not are passed over, but for those
    /// behind the last one that was looked at.
    pub(super) taken: Vec<bool>,
    /// Whether more would not fit.
    pub(super) full: bool,
}

#[derive(Debug)]
struct Lane<K> {
    /// All records that any of its attempts stood on.
    records: BTreeSet<K>,
    /// Since when its transaction is under way; none: it is being decided, or in trouble.
    sent: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lanes<C, K> {
    /// What one transaction may hold.
    operations: usize,
    waiting: BTreeMap<Arrival, C>,
    arrivals: Arrival,
    /// So many of the first that wait were looked at, and could not set out beside what is under way.
    passed_over: usize,
    under_way: BTreeMap<Number, Lane<K>>,
    numbers: u64,
}

impl<C, K: Ord> Lanes<C, K> {
    /// Nothing waits, for transactions of so many operations.
    pub(super) fn new(operations: usize) -> Self {
        Self {
            operations,
            waiting: BTreeMap::new(),
            arrivals: 0,
            passed_over: 0,
            under_way: BTreeMap::new(),
            numbers: 0,
        }
    }

    /// Whether nothing waits and nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// How many more commands may come in. The others wait where they are.
    pub(super) fn room(&self) -> usize {
        let most = (self.passed_over + self.operations).min(LANES * self.operations);
        most.saturating_sub(self.waiting.len())
    }

    /// A command comes in.
    pub(super) fn push(&mut self, command: C) {
        self.waiting.insert(self.arrivals, command);
        self.arrivals += 1;
    }

    /// What waits, the oldest first.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &C> {
        self.waiting.values()
    }

    /// Whether a record is one of those that something under way stands on.
    pub(super) fn is_under_way(&self, record: &K) -> bool {
        self.under_way.values().any(|lane| lane.records.contains(record))
    }

    /// Whether more could set out beside what is under way, if it waited.
    pub(super) fn may_grow(&self) -> bool {
        (1..LANES).contains(&self.under_way.len()) && self.under_way.values().all(|lane| lane.sent.is_some())
    }

    /// What may set out now.
    pub(super) fn growth(&self, now: Instant) -> Option<Growth> {
        if self.under_way.is_empty() {
            return (!self.waiting.is_empty()).then_some(Growth::Alone);
        }
        let new = self.waiting.len() - self.passed_over;
        if !self.may_grow() || new == 0 {
            return None;
        }
        let newest = self.under_way.values().filter_map(|lane| lane.sent).max();
        if newest.is_some_and(|sent| now.saturating_duration_since(sent) >= SLOW) {
            return Some(Growth::Any);
        }
        // Almost every command changes two records or more.
        (new >= self.operations / 2).then_some(Growth::Full)
    }

    /// As many as there may be: nothing is under way that they could meet.
    pub(super) fn all(&self) -> Choice {
        Choice { taken: vec![true; self.waiting.len().min(self.operations)], full: true }
    }

    /// These set out, if they are enough.
    pub(super) fn set_out(&mut self, growth: Growth, choice: &Choice) -> Option<(Number, Vec<(Arrival, C)>)> {
        let count = choice.taken.iter().filter(|taken| **taken).count();
        if count == 0 || growth == Growth::Full && !choice.full {
            self.passed_over = choice.taken.len();
            return None;
        }
        self.passed_over = choice.taken.len() - count;
        let arrivals: Vec<Arrival> = self
            .waiting
            .keys()
            .zip(&choice.taken)
            .filter_map(|(arrival, taken)| taken.then_some(*arrival))
            .collect();
        let commands =
            arrivals.into_iter().filter_map(|arrival| self.waiting.remove_entry(&arrival)).collect();
        self.numbers += 1;
        let number = Number(self.numbers);
        self.under_way.insert(number, Lane { records: BTreeSet::new(), sent: None });
        Some((number, commands))
    }

    /// A lane was decided, on these records.
    pub(super) fn decided(&mut self, number: Number, records: impl IntoIterator<Item = K>) {
        if let Some(lane) = self.under_way.get_mut(&number) {
            lane.records.extend(records);
        }
    }

    /// Its transaction is under way, without these commands.
    pub(super) fn sent(
        &mut self,
        number: Number,
        rest: impl IntoIterator<Item = (Arrival, C)>,
        now: Instant,
    ) {
        self.waiting.extend(rest);
        if let Some(lane) = self.under_way.get_mut(&number) {
            lane.sent = Some(now);
        }
    }

    /// It is not any more.
    pub(super) fn answered(&mut self, number: Number) {
        if let Some(lane) = self.under_way.get_mut(&number) {
            lane.sent = None;
        }
    }

    /// A lane has ended, without these commands. Whatever waited for it may set out.
    pub(super) fn ended(&mut self, number: Number, rest: impl IntoIterator<Item = (Arrival, C)>) {
        self.waiting.extend(rest);
        self.under_way.remove(&number);
        self.passed_over = 0;
    }
}

#[cfg(test)]
mod tests;

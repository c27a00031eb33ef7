//! The one queue of due times.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_model::InstanceId;

/// What is to be done when its time comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    /// Look at everything.
    Look,
    /// Ask placement again for every allocation on this node.
    Audit,
    /// Another try, of what failed for a passing reason. Until then nothing is tried.
    Retry(InstanceId),
    /// Plan again: a plan that changes by itself.
    Wake(InstanceId),
}

/// Each of them has one time at most. Times count from the agent's start.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    due: BTreeSet<(Duration, What)>,
    at: BTreeMap<What, Duration>,
}

impl Agenda {
    /// Due then, and at no other time.
    pub(super) fn set(&mut self, what: What, at: Duration) {
        self.clear(what);
        self.at.insert(what, at);
        self.due.insert((at, what));
    }

    /// Due then, unless it is due before.
    pub(super) fn set_sooner(&mut self, what: What, at: Duration) {
        let current = self.at.get(&what).copied().unwrap_or(at);
        self.set(what, at.min(current));
    }

    /// Not due any more.
    pub(super) fn clear(&mut self, what: What) {
        if let Some(at) = self.at.remove(&what) {
            self.due.remove(&(at, what));
        }
    }

    /// Whether it is still to come.
    pub(super) fn has(&self, what: What) -> bool {
        self.at.contains_key(&what)
    }

    /// When something is due next.
    pub(super) fn next(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Takes the first that is due by now, in order of time.
    pub(super) fn take(&mut self, now: Duration) -> Option<What> {
        let (at, what) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.clear(what);
        Some(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_is_due_comes_in_order_of_time_and_once() {
        let one = InstanceId::new(uuid::Uuid::from_u128(1));
        let mut agenda = Agenda::default();
        assert_eq!(agenda.next(), None);
        agenda.set(What::Retry(one), second(3));
        agenda.set(What::Look, second(30));
        agenda.set(What::Wake(one), second(3));
        agenda.set(What::Audit, second(2));
        assert_eq!(agenda.next(), Some(second(2)));
        assert_eq!(agenda.take(second(1)), None, "not before its time");
        let due: Vec<_> = std::iter::from_fn(|| agenda.take(second(3))).collect();
        assert_eq!(due, [What::Audit, What::Retry(one), What::Wake(one)]);
        assert_eq!(agenda.next(), Some(second(30)));
    }

    #[test]
    fn each_has_one_time_and_sooner_wins_only_where_it_is_asked_to() {
        let mut agenda = Agenda::default();
        agenda.set(What::Look, second(5));
        agenda.set(What::Look, second(9));
        assert_eq!(agenda.next(), Some(second(9)), "the later word holds");
        agenda.set_sooner(What::Look, second(12));
        assert_eq!(agenda.next(), Some(second(9)));
        agenda.set_sooner(What::Look, second(2));
        assert_eq!(agenda.next(), Some(second(2)));
        assert_eq!(agenda.take(second(99)), Some(What::Look));
        assert!(!agenda.has(What::Look) && agenda.take(second(99)).is_none());
        agenda.set(What::Audit, second(1));
        agenda.clear(What::Audit);
        assert_eq!(agenda.next(), None);
    }
}

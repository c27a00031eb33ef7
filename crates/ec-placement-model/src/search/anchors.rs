//! Where to look: anchors, by way of the index that has the fewest.

use std::{cmp::Reverse, collections::HashSet};

use super::{
    Budget, Query, SearchError,
    fit::{Fit, is_sharing, steps_for},
};
use crate::{Node, Slot, State};

/// The anchors that a query allows.
pub(super) struct Anchors<'a> {
    state: &'a State,
    query: &'a Query,
}

impl<'a> Anchors<'a> {
    pub(super) fn new(state: &'a State, query: &'a Query) -> Self {
        Self { state, query }
    }

    /// Whether what is asked of roots rules all of them out.
    pub(super) fn is_empty(&self, budget: &mut Budget) -> Result<bool, SearchError> {
        if self.query.root_required.is_empty() && self.query.root_forbidden.is_empty() {
            return Ok(false);
        }
        for (slot, node) in self.state.providers() {
            if node.root == slot && self.allows(slot, budget)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether an anchor is as roots are asked to be.
    pub(super) fn allows(&self, anchor: Slot, budget: &mut Budget) -> Result<bool, SearchError> {
        budget.spend(steps_for(self.query.root_required.len() + self.query.root_forbidden.len()))?;
        let node = self.state.node(anchor);
        let allowed = node.provider.as_ref().is_some_and(|provider| {
            self.query.root_required.iter().all(|name| provider.has_trait(name))
                && !self.query.root_forbidden.iter().any(|name| provider.has_trait(name))
        });
        // One that is allowed is counted with those who lie there.
        budget.spend(usize::from(!allowed))?;
        Ok(allowed)
    }

    /// Every anchor at which any group can be served, through the group with the fewest; each once, whether it is allowed or not.
    pub(super) fn smallest(&'a self, fits: &'a [Fit<'a>]) -> Box<dyn Iterator<Item = Slot> + 'a> {
        match fits.iter().min_by_key(|fit| self.weight(fit)) {
            Some(fit) => self.of_group(fit),
            None => Box::new(std::iter::empty()),
        }
    }

    /// Every anchor at which a group may be served; each once, whether it is allowed or not.
    pub(super) fn of_group(&'a self, fit: &'a Fit<'a>) -> Box<dyn Iterator<Item = Slot> + 'a> {
        let mut seen = HashSet::new();
        let providers = self.sources(fit).into_iter().min_by_key(|source| self.source_weight(source));
        let Some(source) = providers else { return Box::new(std::iter::empty()) };
        let anchors = self.slots(source).flat_map(|slot| self.anchors_of(self.state.node(slot)));
        Box::new(anchors.filter(move |anchor| seen.insert(*anchor)))
    }

    /// The root of a provider's tree; and, where it shares, of every tree in its aggregates.
    fn anchors_of(&self, node: &'a Node) -> impl Iterator<Item = Slot> + 'a {
        let state = self.state;
        let aggregates = match &node.provider {
            Some(provider) if is_sharing(node) => provider.aggregates.as_slice(),
            _ => &[],
        };
        let others = aggregates.iter().flat_map(|aggregate| state.in_aggregate(aggregate));
        std::iter::once(node.root).chain(others.map(|slot| state.node(*slot).root))
    }

    /// The ways to find the providers of a group. Each has all of them, and others.
    fn sources(&self, fit: &'a Fit<'a>) -> Vec<Source<'a>> {
        let group = fit.group;
        let mut sources: Vec<_> =
            group.resources.iter().map(|(class, amount)| Source::Class(class, *amount)).collect();
        // Several providers together have the traits, or their root is in the aggregate.
        if !fit.together {
            sources.extend(group.required.iter().map(|any| Source::Traits(any)));
            sources.extend(group.member_of.iter().map(|any| Source::Aggregates(any)));
        }
        sources
    }

    fn slots(&self, source: Source<'a>) -> Box<dyn Iterator<Item = Slot> + 'a> {
        let state = self.state;
        match source {
            Source::Class(class, amount) => {
                let enough = (Reverse(i64::MAX), 0)..=(Reverse(amount), Slot::MAX);
                Box::new(state.with_class(class).range(enough).map(|(_, slot)| *slot))
            }
            Source::Traits(any) => Box::new(any.iter().flat_map(|name| state.with_trait(name)).copied()),
            Source::Aggregates(any) => {
                Box::new(any.iter().flat_map(|aggregate| state.in_aggregate(aggregate)).copied())
            }
        }
    }

    fn source_weight(&self, source: &Source<'a>) -> usize {
        match source {
            Source::Class(class, amount) => {
                let enough = (Reverse(i64::MAX), 0)..=(Reverse(*amount), Slot::MAX);
                let all = self.state.with_class(class);
                // Few or none are counted; of many, it is enough to know that they are.
                let few = all.range(enough).take(FEW).count();
                if few < FEW { few } else { all.len() }
            }
            Source::Traits(any) => any.iter().map(|name| self.state.with_trait(name).len()).sum(),
            Source::Aggregates(any) => any.iter().map(|one| self.state.in_aggregate(one).len()).sum(),
        }
    }

    /// How many anchors a group has at most, roughly: what shares has many.
    fn weight(&self, fit: &'a Fit<'a>) -> usize {
        let Some(source) = self.sources(fit).into_iter().min_by_key(|source| self.source_weight(source))
        else {
            return usize::MAX;
        };
        let weight = self.source_weight(&source);
        if self.state.sharing().is_empty() || weight >= FEW {
            return weight;
        }
        let reached = |slot: Slot| match &self.state.node(slot).provider {
            Some(provider) if is_sharing(self.state.node(slot)) => {
                provider.aggregates.iter().map(|one| self.state.in_aggregate(one).len()).sum()
            }
            _ => 1,
        };
        self.slots(source).map(reached).sum()
    }
}

/// More than this are many.
const FEW: usize = 64;

enum Source<'a> {
    Class(&'a crate::Name, i64),
    Traits(&'a [crate::Name]),
    Aggregates(&'a [uuid::Uuid]),
}

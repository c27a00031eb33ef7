//! Who fits one group of a query.

use uuid::Uuid;

use super::{Budget, Group, SearchError};
use crate::{Key, Node, Provider, SHARING, Slot, State};

/// A group, ready to be held against providers.
pub(super) struct Fit<'a> {
    state: &'a State,
    pub(super) group: &'a Group,
    /// Whether several providers may serve it together.
    pub(super) together: bool,
    /// The root of the tree that it must be served from.
    tree: Option<Slot>,
    /// Whether aggregates are asked for that nobody is in.
    pub(super) no_members: bool,
    /// What it takes to hold it against one provider besides the step that everybody costs who is looked at.
    weight: usize,
    /// How many names of traits are required, all lists together.
    traits: usize,
}

/// Who lies at an anchor: its tree, and who shares with it from elsewhere.
pub(super) struct Pool {
    pub(super) anchor: Slot,
    pub(super) tree: Vec<Slot>,
    pub(super) sharing: Vec<Slot>,
}

impl Pool {
    pub(super) fn new(state: &State, anchor: Slot) -> Self {
        let tree = state.subtree(anchor);
        let mut sharing: Vec<Slot> = Vec::new();
        if !state.sharing().is_empty() {
            for provider in tree.iter().filter_map(|slot| state.node(*slot).provider.as_ref()) {
                for aggregate in &provider.aggregates {
                    sharing.extend(
                        state.sharing_in(aggregate).iter().filter(|slot| state.node(**slot).root != anchor),
                    );
                }
            }
            sharing.sort_unstable();
            sharing.dedup();
        }
        Self { anchor, tree, sharing }
    }

    fn len(&self) -> usize {
        self.tree.len() + self.sharing.len()
    }

    /// Steps to look at it: one for the anchor, and for everybody there.
    pub(super) fn steps(&self) -> usize {
        1 + self.len()
    }
}

impl<'a> Fit<'a> {
    /// Where so many names stand before it in the query; it adds its own.
    pub(super) fn new(
        state: &'a State,
        group: &'a Group,
        before: &mut usize,
        budget: &mut Budget,
    ) -> Result<Self, SearchError> {
        // Where nothing is shared and nothing nested, one provider serves all of it in any case.
        let together = group.suffix.is_empty() && (state.has_trees() || !state.sharing().is_empty());
        let tree = group.in_tree.flatten().and_then(|uuid| state.find(&uuid)).map(|node| node.root);
        let no_members = no_members(state, &group.member_of, budget)?;
        let traits = names(&group.required);
        let aggregates = names(&group.member_of) + group.forbidden_aggregates.len();
        let own = group.resources.len().max(1) + traits + group.forbidden.len() + aggregates;
        // Of all groups together: there may be as many of these as names in a list.
        let weight = steps_for(*before + own) - steps_for(*before);
        *before += own;
        Ok(Self { state, group, together, tree, no_members, weight, traits })
    }

    /// Whether it can be seen without looking further that nobody fits.
    pub(super) fn is_hopeless(&self) -> bool {
        self.no_members || (self.group.in_tree.is_some() && self.tree.is_none())
    }

    /// Steps to hold the group against everybody at an anchor, who have been counted once.
    pub(super) fn steps_at(&self, pool: &Pool) -> usize {
        self.weight * pool.len()
    }

    /// Steps to look whether providers have the traits together.
    pub(super) fn steps_together(&self, picked: &[Slot]) -> usize {
        picked.len() * (1 + steps_for(self.traits))
    }

    /// Whether anything at an anchor serves the group.
    pub(super) fn matches_at(&self, anchor: Slot, budget: &mut Budget) -> Result<bool, SearchError> {
        let pool = Pool::new(self.state, anchor);
        budget.spend(pool.steps() + self.steps_at(&pool))?;
        if !self.together {
            return Ok(!self.alone(&pool).is_empty());
        }
        // Traits are met by the providers together: some combination must do.
        let (mut found, mut steps, left) = (false, 0, budget.left());
        super::combine::product(&self.choices(&pool), &mut |picked| {
            steps += self.steps_together(picked);
            found = self.traits_together(picked);
            !found && steps <= left
        });
        budget.spend(steps)?;
        Ok(found)
    }

    /// The providers at an anchor each of which serves the whole group.
    pub(super) fn alone(&self, pool: &Pool) -> Vec<Slot> {
        let all = pool.tree.iter().chain(&pool.sharing);
        all.copied().filter(|slot| self.serves_alone(self.state.node(*slot))).collect()
    }

    fn serves_alone(&self, node: &Node) -> bool {
        let Some(provider) = &node.provider else { return false };
        let group = self.group;
        if group.resources.is_empty() {
            // As upstream: what is only forbidden does not make a provider wanted; and `in_tree` is not
            // looked at.
            if group.required.is_empty() && group.member_of.is_empty() {
                return false;
            }
        } else if self.tree.is_some_and(|root| root != node.root) {
            return false;
        }
        (0..group.resources.len()).all(|index| self.has_room(node, provider, index))
            && has_traits(provider, &group.required)
            && !group.forbidden.iter().any(|name| provider.has_trait(name))
            && self.is_member(node)
            && !self.is_forbidden_member(node)
    }

    /// For each class, the providers at an anchor that may serve it.
    pub(super) fn choices(&self, pool: &Pool) -> Vec<Vec<Slot>> {
        let state = self.state;
        let anchor = state.node(pool.anchor);
        let anchor_is_member = self.is_member(anchor);
        let group = self.group;
        if !group.forbidden_aggregates.is_empty() && self.is_forbidden_member(anchor) {
            return vec![Vec::new(); group.resources.len()];
        }
        let own = pool.tree.iter().map(|slot| (*slot, true));
        // Who shares is not in the tree that was asked for.
        let shared = pool.sharing.iter().map(|slot| (*slot, false)).filter(|_| group.in_tree.is_none());
        let mut candidates = Vec::new();
        for (slot, in_tree) in own.chain(shared) {
            let node = state.node(slot);
            let Some(provider) = &node.provider else { continue };
            let member = self.is_member(node) || (in_tree && anchor_is_member);
            let in_wanted_tree = self.tree.is_none_or(|root| root == node.root);
            if member
                && in_wanted_tree
                && !self.is_forbidden_member(node)
                && !group.forbidden.iter().any(|name| provider.has_trait(name))
            {
                candidates.push((slot, node, provider));
            }
        }
        (0..group.resources.len())
            .map(|index| {
                let fitting =
                    candidates.iter().filter(|(_, node, provider)| self.has_room(node, provider, index));
                fitting.map(|(slot, ..)| *slot).collect()
            })
            .collect()
    }

    /// Whether providers together have the traits that are required.
    pub(super) fn traits_together(&self, picked: &[Slot]) -> bool {
        self.group.required.iter().all(|any| {
            picked
                .iter()
                .filter_map(|slot| self.state.node(*slot).provider.as_ref())
                .any(|provider| any.iter().any(|name| provider.has_trait(name)))
        })
    }

    fn has_room(&self, node: &Node, provider: &Provider, index: usize) -> bool {
        let (class, amount) = &self.group.resources[index];
        // Of what cannot be read nothing can be claimed.
        self.state.trouble_with(&Key::Provider(node.uuid)).is_none()
            && has_room(node, provider, class, *amount)
    }

    pub(super) fn is_member(&self, node: &Node) -> bool {
        is_member(node, &self.group.member_of)
    }

    fn is_forbidden_member(&self, node: &Node) -> bool {
        in_any(node, &self.group.forbidden_aggregates)
    }
}

/// Whether an amount of a class can be allocated.
pub(super) fn has_room(node: &Node, provider: &Provider, class: &str, amount: i64) -> bool {
    provider.inventory(class).is_some_and(|inventory| {
        inventory.admits(amount) && node.used(class).saturating_add(amount) <= inventory.capacity()
    })
}

pub(super) fn has_traits(provider: &Provider, required: &[Vec<crate::Name>]) -> bool {
    required.iter().all(|any| any.iter().any(|name| provider.has_trait(name)))
}

pub(super) fn is_member(node: &Node, member_of: &[Vec<Uuid>]) -> bool {
    member_of.iter().all(|any| in_any(node, any))
}

/// Whether aggregates are asked for that nobody is in. Who is in all of them is in the one that has the fewest, too: nobody else is
/// looked at.
pub(super) fn no_members(
    state: &State,
    member_of: &[Vec<Uuid>],
    budget: &mut Budget,
) -> Result<bool, SearchError> {
    let members = |any: &&Vec<Uuid>| any.iter().map(|one| state.in_aggregate(one).len()).sum::<usize>();
    let Some(fewest) = member_of.iter().min_by_key(members) else { return Ok(false) };
    for slot in fewest.iter().flat_map(|aggregate| state.in_aggregate(aggregate)) {
        budget.spend(1 + steps_for(names(member_of)))?;
        if is_member(state.node(*slot), member_of) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// So many names of a query are looked for in what it takes anyway to look at a provider. An ordinary query has no more.
const HANDFUL: usize = 16;

/// Steps to hold a provider that is looked at against so many names.
pub(super) fn steps_for(names: usize) -> usize {
    names.saturating_sub(HANDFUL)
}

/// How many there are in lists.
pub(super) fn names<T>(lists: &[Vec<T>]) -> usize {
    lists.iter().map(Vec::len).sum()
}

pub(super) fn in_any(node: &Node, aggregates: &[Uuid]) -> bool {
    node.provider.as_ref().is_some_and(|provider| aggregates.iter().any(|own| provider.in_aggregate(own)))
}

/// Whether a provider's inventory serves others.
pub(super) fn is_sharing(node: &Node) -> bool {
    node.provider.as_ref().is_some_and(|provider| provider.has_trait(SHARING))
}

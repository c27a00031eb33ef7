//! Groups, each with those who could serve it, put together into candidates.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use super::{
    Budget, Candidate, Candidates, Query, SearchError, Summary,
    anchors::Anchors,
    fit::{Fit, Pool},
};
use crate::{Name, Slot, State};

/// Calls `each` with every way to pick one out of each list, the last list's first, until it says `false`.
pub(super) fn product(lists: &[Vec<Slot>], each: &mut dyn FnMut(&[Slot]) -> bool) {
    // Where one has nothing there is no way, and nobody goes through the others for that.
    let first: Option<Vec<Slot>> = lists.iter().map(|list| list.first().copied()).collect();
    let Some(mut picked) = first else { return };
    let mut places = vec![0; lists.len()];
    while each(&picked) {
        let Some(on) = (0..lists.len()).rev().find(|at| places[*at] + 1 < lists[*at].len()) else { return };
        places[on] += 1;
        places[on + 1..].fill(0);
        for at in on..lists.len() {
            picked[at] = lists[at][places[at]];
        }
    }
}

/// Steps that stand for the memory of what is kept, so that the budget bounds that, too.
const KEPT: usize = 8;

/// A way to serve the group: who serves each of its resources; one provider where it has none.
type Picks = Vec<Slot>;

/// Goes through anchors and gathers candidates. Providers in them are slots of the state.
pub(super) struct Combiner<'a> {
    state: &'a State,
    query: &'a Query,
    fits: &'a [Fit<'a>],
    anchors: &'a Anchors<'a>,
    /// The classes of each group's resources, as numbers.
    classes: Vec<Vec<usize>>,
    /// By number.
    class_names: Vec<Name>,
    /// Whether the same candidate may be found at two anchors.
    repeats: bool,
    seen: HashSet<Candidate>,
    budget: Budget,
    pub(super) found: Vec<Candidate>,
}

impl<'a> Combiner<'a> {
    pub(super) fn new(
        state: &'a State,
        query: &'a Query,
        fits: &'a [Fit<'a>],
        anchors: &'a Anchors<'a>,
        budget: Budget,
    ) -> Self {
        let repeats = !state.sharing().is_empty();
        let mut class_names: Vec<Name> = Vec::new();
        let mut numbers: HashMap<Name, usize> = HashMap::new();
        let mut number = |class: &Name| {
            *numbers.entry(Arc::clone(class)).or_insert_with(|| {
                class_names.push(Arc::clone(class));
                class_names.len() - 1
            })
        };
        let classes = query
            .groups
            .iter()
            .map(|group| group.resources.iter().map(|(class, _)| number(class)).collect())
            .collect();
        Self {
            state,
            query,
            fits,
            anchors,
            classes,
            class_names,
            repeats,
            seen: HashSet::new(),
            budget,
            found: Vec::new(),
        }
    }

    /// All of one anchor, then all of the next, until there are `most`.
    pub(super) fn depth_first(
        &mut self,
        anchors: impl Iterator<Item = Slot>,
        most: Option<usize>,
    ) -> Result<(), SearchError> {
        let most = most.unwrap_or(usize::MAX);
        for anchor in anchors {
            if self.found.len() >= most {
                break;
            }
            self.at(anchor, most)?;
        }
        Ok(())
    }

    /// One of each anchor in turn, until there are `most`.
    pub(super) fn breadth_first(
        &mut self,
        anchors: impl Iterator<Item = Slot>,
        most: Option<usize>,
    ) -> Result<(), SearchError> {
        let most = most.unwrap_or(usize::MAX);
        let mut by_anchor = Vec::new();
        for anchor in anchors {
            self.at(anchor, most)?;
            by_anchor.push(std::mem::take(&mut self.found).into_iter());
        }
        while !by_anchor.is_empty() {
            by_anchor.retain_mut(|candidates| {
                let next = if self.found.len() < most { candidates.next() } else { None };
                let goes_on = next.is_some();
                self.found.extend(next);
                goes_on
            });
        }
        Ok(())
    }

    fn at(&mut self, anchor: Slot, most: usize) -> Result<(), SearchError> {
        if !self.anchors.allows(anchor, &mut self.budget)? {
            return Ok(());
        }
        let pool = Pool::new(self.state, anchor);
        self.budget.spend(pool.steps())?;
        let mut ways = Vec::with_capacity(self.fits.len());
        for fit in self.fits {
            self.budget.spend(fit.steps_at(&pool))?;
            let group_ways = if fit.together { self.together(fit, &pool)? } else { self.alone(fit, &pool) };
            if group_ways.is_empty() {
                return Ok(());
            }
            self.budget.spend(group_ways.len())?;
            ways.push(group_ways);
        }
        self.combine(&ways, most)
    }

    fn alone(&self, fit: &Fit<'_>, pool: &Pool) -> Vec<Picks> {
        let resources = fit.group.resources.len().max(1);
        fit.alone(pool).into_iter().map(|slot| vec![slot; resources]).collect()
    }

    fn together(&mut self, fit: &Fit<'_>, pool: &Pool) -> Result<Vec<Picks>, SearchError> {
        let choices = fit.choices(pool);
        let mut ways = Vec::new();
        let mut steps = 0;
        let left = self.budget.left();
        product(&choices, &mut |picked| {
            steps += fit.steps_together(picked);
            if fit.traits_together(picked) {
                steps += KEPT;
                ways.push(picked.to_vec());
            }
            steps <= left
        });
        self.budget.spend(steps)?;
        Ok(ways)
    }

    /// Chooses a way for the first group, for the next, and so on; a choice that cannot be is not followed further. What
    /// was chosen is a list, and no calls in calls: a query may have more groups than a thread has room for these.
    fn combine(&mut self, ways: &[Vec<Picks>], most: usize) -> Result<(), SearchError> {
        let mut partial = Partial { chosen: Vec::with_capacity(ways.len()), taken: Vec::new() };
        // Of each group that was chosen for, and the one after it: which way is next, and how much was taken before.
        let mut levels = vec![(0, 0)];
        while let Some((next, before)) = levels.last_mut() {
            partial.taken.truncate(*before);
            let index = partial.chosen.len();
            let Some(picks) = ways.get(index).and_then(|group_ways| group_ways.get(*next)) else {
                if index == ways.len() {
                    if self.same_subtrees_hold(&partial.chosen)? && self.shape_is_known(&partial.taken) {
                        self.emit(&partial)?;
                    }
                    if self.found.len() >= most {
                        return Ok(());
                    }
                }
                levels.pop();
                partial.chosen.pop();
                continue;
            };
            *next += 1;
            // What was taken or chosen before is looked through.
            self.budget.spend(1 + partial.taken.len().max(partial.chosen.len()))?;
            let is_named = !self.query.groups[index].suffix.is_empty();
            if self.query.isolate && is_named && self.is_taken(&partial.chosen, picks[0]) {
                continue;
            }
            if self.take(index, picks, &mut partial.taken) {
                levels.push((0, partial.taken.len()));
                partial.chosen.push(picks.clone());
            }
        }
        Ok(())
    }

    /// Adds what a group takes, as long as there is enough for it and for what was taken before.
    fn take(&self, index: usize, picks: &Picks, taken: &mut Vec<Taken>) -> bool {
        let resources = self.query.groups[index].resources.iter().zip(&self.classes[index]);
        resources.zip(picks).all(|(((class, amount), id), slot)| {
            let before: i64 = taken
                .iter()
                .filter(|(own_slot, own_class, _)| own_slot == slot && own_class == id)
                .fold(0, |sum, (.., amount)| sum.saturating_add(*amount));
            taken.push((*slot, *id, *amount));
            // Alone it fits: that was looked at.
            before == 0 || {
                let node = self.state.node(*slot);
                let sum = before.saturating_add(*amount);
                let inventory = node.provider.as_ref().and_then(|provider| provider.inventory(class));
                inventory.is_some_and(|inventory| {
                    sum <= inventory.max_unit && node.used(class).saturating_add(sum) <= inventory.capacity()
                })
            }
        })
    }

    fn is_taken(&self, chosen: &[Picks], slot: Slot) -> bool {
        chosen
            .iter()
            .zip(&self.query.groups)
            .any(|(picks, group)| !group.suffix.is_empty() && picks[0] == slot)
    }

    fn same_subtrees_hold(&mut self, chosen: &[Picks]) -> Result<bool, SearchError> {
        for groups in &self.query.same_subtrees {
            let members: BTreeSet<Slot> = groups.iter().flat_map(|index| &chosen[*index]).copied().collect();
            self.budget.spend(groups.len() + members.len() * members.len())?;
            let is_top = |top: &Slot| members.iter().all(|member| self.is_below(*member, *top));
            if !members.is_empty() && !members.iter().any(is_top) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_below(&self, slot: Slot, top: Slot) -> bool {
        let mut at = Some(slot);
        for _ in 0..=self.state.node_count() {
            match at {
                Some(here) if here == top => return true,
                Some(here) => at = self.state.node(here).parent,
                None => return false,
            }
        }
        false
    }

    /// Clients that do not know of trees get no two providers of one.
    fn shape_is_known(&self, taken: &[Taken]) -> bool {
        if self.query.nested_aware || !self.state.has_trees() {
            return true;
        }
        let used: BTreeSet<Slot> = taken.iter().map(|(slot, ..)| *slot).collect();
        let roots: BTreeSet<Slot> = used.iter().map(|slot| self.state.node(*slot).root).collect();
        roots.len() == used.len()
    }

    fn emit(&mut self, partial: &Partial) -> Result<(), SearchError> {
        self.budget.spend(partial.taken.len() + partial.chosen.len() + KEPT)?;
        let mut taken = partial.taken.clone();
        taken.sort_by_key(|(slot, class, _)| (*slot, *class));
        let mut allocations: Vec<(Slot, Name, i64)> = Vec::with_capacity(taken.len());
        let mut last = None;
        for (slot, class, amount) in taken {
            match allocations.last_mut() {
                Some(sum) if last == Some((slot, class)) => sum.2 += amount,
                _ => allocations.push((slot, Arc::clone(&self.class_names[class]), amount)),
            }
            last = Some((slot, class));
        }
        let mappings = partial
            .chosen
            .iter()
            .map(|picks| {
                let mut providers = picks.clone();
                providers.sort_unstable();
                providers.dedup();
                providers
            })
            .collect();
        let candidate = Candidate { allocations, mappings };
        if !self.repeats || self.seen.insert(candidate.clone()) {
            self.found.push(candidate);
        }
        Ok(())
    }
}

/// Provider, class as a number, amount.
type Taken = (Slot, usize, i64);

struct Partial {
    chosen: Vec<Picks>,
    taken: Vec<Taken>,
}

/// Turns slots into what outlives the state, and adds the summaries.
pub(super) fn answer(state: &State, query: &Query, mut found: Vec<Candidate>) -> Candidates {
    let mut places: HashMap<Slot, u32> = HashMap::new();
    let mut providers = Vec::new();
    let mut place = |slot: Slot| {
        *places.entry(slot).or_insert_with(|| {
            providers.push(state.node(slot).uuid);
            u32::try_from(providers.len() - 1).unwrap_or(u32::MAX)
        })
    };
    let mut shown: BTreeSet<Slot> = BTreeSet::new();
    let only_used = !query.nested_aware && state.has_trees();
    for candidate in &mut found {
        for (slot, ..) in &mut candidate.allocations {
            shown.insert(if only_used { *slot } else { state.node(*slot).root });
            *slot = place(*slot);
        }
        for slot in candidate.mappings.iter_mut().flatten() {
            *slot = place(*slot);
        }
    }
    let slots: Vec<Slot> = if only_used {
        shown.into_iter().collect()
    } else {
        shown.into_iter().flat_map(|root| state.subtree(root)).collect()
    };
    let summaries = slots.into_iter().filter_map(|slot| summary(state, slot)).collect();
    Candidates { providers, candidates: found, summaries }
}

fn summary(state: &State, slot: Slot) -> Option<Summary> {
    let node = state.node(slot);
    let provider = Arc::clone(node.provider.as_ref()?);
    let used = provider.inventories.iter().map(|(class, _)| node.used(class)).collect();
    Some(Summary { uuid: node.uuid, root: state.node(node.root).uuid, provider, used })
}

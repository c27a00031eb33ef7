//! The list of providers, filtered.

use uuid::Uuid;

use super::{
    Budget, SearchError,
    fit::{has_room, has_traits, in_any, is_member, names, no_members, steps_for},
    known_class, known_trait,
};
use crate::{Key, Name, Slot, State};

/// Which providers are wanted.
#[derive(Debug, Clone, Default)]
pub struct ProviderFilter {
    /// The one with this name.
    pub name: Option<String>,
    /// The one with this uuid; nobody where what was said is nobody's.
    pub uuid: Option<Option<Uuid>>,
    /// Those in the tree of this provider; nobody where what was said is nobody's uuid.
    pub in_tree: Option<Option<Uuid>>,
    /// Of each of these lists, one trait at least.
    pub required: Vec<Vec<Name>>,
    /// None of these traits.
    pub forbidden: Vec<Name>,
    /// Of each of these lists, one aggregate at least.
    pub member_of: Vec<Vec<Uuid>>,
    /// None of these aggregates.
    pub forbidden_aggregates: Vec<Uuid>,
    /// With so much left of each.
    pub resources: Vec<(Name, i64)>,
}

/// The providers that are wanted, found in so many steps: one for each provider that is looked at, and for each name
/// beyond the first handful that it is held against.
///
/// # Errors
/// A name that is not known, unless what stands before it has no match anyway; or more steps would have to be taken.
pub fn providers(state: &State, filter: &ProviderFilter, budget: u64) -> Result<Vec<Slot>, SearchError> {
    let mut budget = Budget(budget);
    let tree = match filter.in_tree {
        Some(uuid) => match uuid.and_then(|uuid| state.find(&uuid)) {
            Some(node) => Some(node.root),
            None => return Ok(Vec::new()),
        },
        None => None,
    };
    filter.required.iter().flatten().try_for_each(|name| known_trait(state, name))?;
    if nobody_has(state, &filter.required, &mut budget)? {
        return Ok(Vec::new());
    }
    filter.forbidden.iter().try_for_each(|name| known_trait(state, name))?;
    if no_members(state, &filter.member_of, &mut budget)? {
        return Ok(Vec::new());
    }
    for (class, _) in &filter.resources {
        known_class(state, class)?;
    }
    let wanted = |slot: Slot| {
        let node = state.node(slot);
        node.provider.as_ref().is_some_and(|record| {
            // Its generation would be a guess.
            state.trouble_with(&Key::Provider(node.uuid)).is_none()
                && filter.name.as_ref().is_none_or(|name| **name == *record.name)
                && filter.uuid.is_none_or(|uuid| uuid == Some(node.uuid))
                && tree.is_none_or(|root| root == node.root)
                && has_traits(record, &filter.required)
                && !filter.forbidden.iter().any(|name| record.has_trait(name))
                && is_member(node, &filter.member_of)
                && !in_any(node, &filter.forbidden_aggregates)
                && filter.resources.iter().all(|(class, amount)| has_room(node, record, class, *amount))
        })
    };
    // One provider, or one tree, is found without going through all.
    let candidates: Vec<Slot> = match (&filter.name, filter.uuid, tree) {
        (Some(name), ..) => {
            state.provider_name(name).and_then(|own| state.slot_of(&own.record)).into_iter().collect()
        }
        (_, Some(uuid), _) => uuid.and_then(|uuid| state.slot_of(&uuid)).into_iter().collect(),
        (_, _, Some(root)) => state.subtree(root),
        _ => state.providers().map(|(slot, _)| slot).collect(),
    };
    let traits = names(&filter.required) + filter.forbidden.len();
    let aggregates = names(&filter.member_of) + filter.forbidden_aggregates.len();
    budget.spend(candidates.len() * (1 + steps_for(traits + aggregates + filter.resources.len())))?;
    Ok(candidates.into_iter().filter(|slot| wanted(*slot)).collect())
}

/// Whether traits are asked for that nobody has. Who has one of each list has one of the rarest list, too: nobody else is looked at.
fn nobody_has(state: &State, required: &[Vec<Name>], budget: &mut Budget) -> Result<bool, SearchError> {
    let bearers = |any: &&Vec<Name>| any.iter().map(|name| state.with_trait(name).len()).sum::<usize>();
    let Some(fewest) = required.iter().min_by_key(bearers) else { return Ok(false) };
    for slot in fewest.iter().flat_map(|name| state.with_trait(name)) {
        budget.spend(1 + steps_for(names(required)))?;
        if state.node(*slot).provider.as_ref().is_some_and(|record| has_traits(record, required)) {
            return Ok(false);
        }
    }
    Ok(true)
}

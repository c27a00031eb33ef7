//! Allocation candidates: which providers together could serve a request.
//!
//! A candidate hangs on an *anchor*, the root of a tree: what serves it lies in that tree, or shares with it
//! through an aggregate. So the search goes from anchor to anchor, found through the smallest index that the
//! query allows, and looks at each on its own; with a limit it stops as soon as it has enough.
//!
//! ```text
//!   Query ─▶ names known? ─▶ anchors (lazily, from one index) ─▶ per anchor: who fits each group
//!                                                                    ─▶ combine groups ─▶ Candidates
//! ```
//!
//! The rules are those of OpenStack Placement as its code has them; where that has defects, the right
//! answer is given instead.

mod anchors;
mod combine;
mod fit;
mod providers;

use std::sync::Arc;

use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use uuid::Uuid;

pub use self::providers::{ProviderFilter, providers};
use self::{anchors::Anchors, combine::Combiner, fit::Fit};
use crate::{Name, Provider, State, is_standard_class, is_standard_trait};

/// Steps that one search may take. A query of many groups over a wide tree has more combinations than
/// anybody can count; it is refused when they have taken this long, which is some seconds.
pub const BUDGET: u64 = 20_000_000;

/// Steps that a search may still take.
struct Budget(u64);

impl Budget {
    fn spend(&mut self, steps: usize) -> Result<(), SearchError> {
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        self.0 = self.0.checked_sub(steps).ok_or(SearchError::TooWide)?;
        Ok(())
    }

    fn left(&self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// What one group asks for.
#[derive(Debug, Clone, Default)]
pub struct Group {
    /// Empty: may be served by several providers; else by one.
    pub suffix: String,
    /// Amounts by class.
    pub resources: Vec<(Name, i64)>,
    /// Of each of these lists, one trait at least.
    pub required: Vec<Vec<Name>>,
    /// None of these traits.
    pub forbidden: Vec<Name>,
    /// Of each of these lists, one aggregate at least.
    pub member_of: Vec<Vec<Uuid>>,
    /// None of these aggregates.
    pub forbidden_aggregates: Vec<Uuid>,
    /// Only from the tree of this provider; of nobody where what was said is nobody's uuid.
    pub in_tree: Option<Option<Uuid>>,
}

/// What is asked for.
#[derive(Debug, Clone, Default)]
pub struct Query {
    /// In the order of their first mention.
    pub groups: Vec<Group>,
    /// At most so many candidates.
    pub limit: Option<usize>,
    /// Whether each group with a suffix must have a provider of its own.
    pub isolate: bool,
    /// Traits that the anchor must have.
    pub root_required: Vec<Name>,
    /// Traits that the anchor must not have.
    pub root_forbidden: Vec<Name>,
    /// For each: indexes of groups whose providers must lie below one of them.
    pub same_subtrees: Vec<Vec<usize>>,
    /// Whether the client knows of trees (1.29), so that a candidate may have two providers of one tree.
    pub nested_aware: bool,
}

/// How answers are chosen; upstream's options of the same names.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Candidates in random order, so that a limit leaves a random choice of them: drawn from this seed.
    pub randomize: Option<u64>,
    /// No more candidates than these are looked for, whatever the query says.
    pub max_candidates: Option<usize>,
    /// One candidate from each tree in turn, instead of all from one tree first.
    pub breadth_first: bool,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// No such class.
    #[error("No such resource class {0}.")]
    UnknownClass(String),
    /// No such trait.
    #[error("No such trait(s): {0}.")]
    UnknownTrait(String),
    /// Too many combinations.
    #[error(
        "The request groups have too many combinations to look at. Ask for fewer groups, say `limit`, or narrow the \
         groups with `required`, `member_of` or `in_tree`."
    )]
    TooWide,
}

/// One candidate. Providers are indexes into [`Candidates::providers`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Provider, class, amount; sorted by provider.
    pub allocations: Vec<(u32, Name, i64)>,
    /// Who serves each group, in the order of the query's groups.
    pub mappings: Vec<Vec<u32>>,
}

/// What a client should know of a provider that candidates use, or that is in the tree of one.
#[derive(Debug, Clone)]
pub struct Summary {
    /// Its uuid.
    pub uuid: Uuid,
    /// The top of its tree.
    pub root: Uuid,
    /// Its record.
    pub provider: Arc<Provider>,
    /// What is used of it, in the order of its inventories.
    pub used: Vec<i64>,
}

/// The answer.
#[derive(Debug, Clone, Default)]
pub struct Candidates {
    /// Uuids, for the candidates' indexes.
    pub providers: Vec<Uuid>,
    /// The candidates.
    pub candidates: Vec<Candidate>,
    /// Of the trees that they use.
    pub summaries: Vec<Summary>,
}

/// Finds candidates, in so many steps: [`BUDGET`] where there is time. A provider that is held against more than a handful
/// of names takes a step for each of the others.
///
/// # Errors
/// A name in the query that is not known, unless what stands before it in the query has no match anyway.
pub fn search(
    state: &State,
    query: &Query,
    options: Options,
    budget: u64,
) -> Result<Candidates, SearchError> {
    let mut budget = Budget(budget);
    for name in query.root_required.iter().chain(&query.root_forbidden) {
        known_trait(state, name)?;
    }
    let mut names = 0;
    let fits = query.groups.iter().map(|group| Fit::new(state, group, &mut names, &mut budget));
    let fits = fits.collect::<Result<Vec<Fit<'_>>, SearchError>>()?;
    let anchors = Anchors::new(state, query);
    if anchors.is_empty(&mut budget)? {
        return Ok(Candidates::default());
    }
    // As the first unknown name in the order of groups makes an error, so does the first group without a
    // match make an empty answer: what comes first counts.
    for (index, group) in query.groups.iter().enumerate() {
        if let Some(error) = unknown_name(state, group, &fits[index]) {
            let Some(error) = error else { return Ok(Candidates::default()) };
            for fit in &fits[..index] {
                if !is_served(&anchors, fit, &mut budget)? {
                    return Ok(Candidates::default());
                }
            }
            return Err(error);
        }
    }
    if fits.iter().any(Fit::is_hopeless) {
        return Ok(Candidates::default());
    }
    let most = if options.randomize.is_some() {
        options.max_candidates
    } else {
        least(query.limit, options.max_candidates)
    };
    let mut combiner = Combiner::new(state, query, &fits, &anchors, budget);
    if options.breadth_first {
        combiner.breadth_first(anchors.smallest(&fits), most)?;
    } else {
        combiner.depth_first(anchors.smallest(&fits), most)?;
    }
    let mut found = combiner.found;
    if let Some(seed) = options.randomize {
        let mut random = StdRng::seed_from_u64(seed);
        found.shuffle(&mut random);
        found.truncate(query.limit.unwrap_or(usize::MAX));
    }
    Ok(combine::answer(state, query, found))
}

/// Whether a group can be served anywhere.
fn is_served(anchors: &Anchors<'_>, fit: &Fit<'_>, budget: &mut Budget) -> Result<bool, SearchError> {
    if fit.is_hopeless() {
        return Ok(false);
    }
    for anchor in anchors.of_group(fit) {
        if anchors.allows(anchor, budget)? && fit.matches_at(anchor, budget)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn least(a: Option<usize>, b: Option<usize>) -> Option<usize> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn known_trait(state: &State, name: &Name) -> Result<(), SearchError> {
    if is_standard_trait(name) || state.custom_traits().contains_key(name) {
        Ok(())
    } else {
        Err(SearchError::UnknownTrait(name.to_string()))
    }
}

fn known_class(state: &State, name: &Name) -> Result<(), SearchError> {
    if is_standard_class(name) || state.custom_classes().contains_key(name) {
        Ok(())
    } else {
        Err(SearchError::UnknownClass(name.to_string()))
    }
}

/// The first name of a group that is not known. `Some(None)`: there is one, but something before it has no
/// match already.
fn unknown_name(state: &State, group: &Group, fit: &Fit<'_>) -> Option<Option<SearchError>> {
    if let Some(error) = group.resources.iter().find_map(|(class, _)| known_class(state, class).err()) {
        return Some(Some(error));
    }
    let traits = group.required.iter().flatten().chain(&group.forbidden);
    let error = traits.into_iter().find_map(|name| known_trait(state, name).err())?;
    Some((!fit.no_members).then_some(error))
}

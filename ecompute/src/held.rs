//! What instances and volumes hold in placement, asked by their names.
//!
//! Of a node's own provider one answer tells all. Of a storage's that would be what all of its nodes hold, asked for by each of them
//! again and again: the more nodes, the longer the answer, and the more often. So of storage that is shared a node asks for what it knows.

use std::collections::{BTreeMap, BTreeSet};

use ec_model::{InstanceId, NodeId, Resources};
use ec_placement_client::{PlacementClient, PlacementResult};
use futures::StreamExt;

#[cfg(test)]
mod tests;

/// So many questions are under way at once.
const AT_A_TIME: usize = 16;

/// What somebody holds, by provider: nothing of any, perhaps.
type ByProvider = BTreeMap<NodeId, Resources>;

/// What each of these holds. Of one whose record placement cannot read only that is not known; fails where none of them is answered.
pub(crate) async fn held_by(
    placement: &PlacementClient,
    consumers: BTreeSet<InstanceId>,
) -> PlacementResult<BTreeMap<InstanceId, PlacementResult<ByProvider>>> {
    let ask = async |consumer| {
        let held = placement.allocations(consumer).await;
        (consumer, held.map(|held| held.map(|held| held.allocations).unwrap_or_default()))
    };
    let answers: Vec<_> =
        futures::stream::iter(consumers).map(ask).buffer_unordered(AT_A_TIME).collect().await;
    let mut answers = answers.into_iter().collect::<BTreeMap<_, _>>();
    match answers.values().all(Result::is_err).then(|| answers.pop_first()).flatten() {
        Some((_, Err(error))) => Err(error),
        _ => Ok(answers),
    }
}

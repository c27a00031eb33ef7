//! Destroying: change what is wanted; the node's agent does it, now or when it is back.

use ec_model::{Desired, IndexEntry, InstanceId, NodeId, RECORD_VERSION, Request, encode};
use ec_runtime::planted;
use ec_store::{Compare, Revision, Txn};

use crate::{
    Cloud, CloudError, CloudResult,
    intent::{STALE, sweep},
    lookup::{Found, Known, Read, find},
};

/// Another writer changed the request in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// Who will do it.
pub enum Doomed {
    /// The agent of this node, when it is alive.
    By {
        /// Which.
        node: NodeId,
        /// Whether its agent is.
        alive: bool,
    },
    /// There was nothing but an index, and that is gone.
    Already,
}

/// Asks for the instance's end. Asking again is not an error.
pub async fn destroy(cloud: &Cloud, instance: InstanceId) -> CloudResult<Doomed> {
    for _ in 0..TRIES {
        let known = match find(cloud, instance).await? {
            Found::Placed(known) => known,
            Found::Unplaced(entry, revision) => match take_away(cloud, instance, entry, revision).await? {
                true => return Ok(Doomed::Already),
                // It was placed at this moment.
                false => continue,
            },
        };
        let doomed = Doomed::By { node: known.node, alive: known.node_alive };
        let Some(txn) = wish(cloud, &known)? else { return Ok(doomed) };
        // Where the outcome is unknown the next look tells it.
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(doomed),
            Ok(_) | Err(ec_store::StoreError::Unknown(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("the request of {instance} keeps changing; try again")))
}

/// Writes the wish, and takes index and name away; nothing where it is written already.
fn wish(cloud: &Cloud, known: &Known) -> CloudResult<Option<Txn>> {
    let keys = &cloud.keys;
    let key = keys.request(known.node, known.instance);
    let (request, unchanged) = match &known.request {
        Read::Here(request, revision) => {
            if request.desired == Desired::Destroyed && known.index.is_none() {
                return Ok(None);
            }
            let request = Request { desired: Desired::Destroyed, ..request.clone() };
            (request, Compare::Unchanged(key.clone(), *revision))
        }
        // After an ERROR, of a guest that nobody claims, or when somebody deleted the key: what is left is cleaned
        // up the same way.
        Read::Absent => (gone(cloud, known), Compare::Absent(key.clone())),
        Read::Unreadable(why) => {
            return Err(CloudError::Unreadable(format!(
                "the request of {} at {key} cannot be read, so nothing was changed: {why}; use the release that wrote it, or mend the key with etcdctl",
                known.instance
            )));
        }
    };
    let mut txn = Txn::new().when(unchanged).put(key, encode(&request)).delete(keys.instance(known.instance));
    if let Some(name) = &request.name
        && !planted("name-kept")
    {
        txn = txn.delete(keys.name(&request.project, name, known.instance));
    }
    Ok(Some(txn))
}

fn gone(cloud: &Cloud, known: &Known) -> Request {
    let index = known.index.as_ref().map(|(entry, _)| entry);
    let named = index.and_then(|entry| entry.name.clone());
    let project = index.map_or(&cloud.project, |entry| &entry.project);
    Request {
        version: RECORD_VERSION,
        instance: known.instance,
        desired: Desired::Destroyed,
        name: named.or_else(|| known.status.record().and_then(|status| status.name.clone())),
        resources: ec_model::Resources::new(),
        image: None,
        keys: Vec::new(),
        user_data_bytes: None,
        token_required: false,
        project: project.clone(),
        user: cloud.user.clone(),
        created_at: cloud.host.now(),
    }
}

/// What a killed command left, when it is old enough to be that. Whether it was.
async fn take_away(
    cloud: &Cloud,
    instance: InstanceId,
    entry: IndexEntry,
    revision: Revision,
) -> CloudResult<bool> {
    let age = cloud.host.now().duration_since(entry.created_at);
    if age < STALE {
        return Err(CloudError::Busy(format!(
            "instance {instance} is being placed since {}; if its command was killed, destroy it again in {} s",
            entry.created_at,
            (STALE - age).as_secs()
        )));
    }
    sweep(cloud, instance, entry, revision).await
}

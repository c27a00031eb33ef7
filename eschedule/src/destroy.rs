//! Destroying: change what is wanted; the node's agent does it, now or when it is back.

use ec_model::{Desired, RECORD_VERSION, Request, encode};
use ec_runtime::exit::Failure;
use ec_store::{Compare, Store, Txn};
use jiff::Timestamp;

use crate::{
    config::Session,
    lookup::{Known, find},
};

/// Another writer changed the request in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// Asks for the instance's end. Asking again is not an error.
pub(crate) async fn destroy(session: &Session, mut known: Known) -> Result<Known, Failure> {
    let keys = &session.settings.keys;
    for _ in 0..TRIES {
        let key = keys.request(known.node, known.instance);
        let (request, unchanged) = match &known.request {
            Some((request, _)) if request.desired == Desired::Destroyed => return Ok(known),
            Some((request, revision)) => (
                Request { desired: Desired::Destroyed, ..request.clone() },
                Compare::Unchanged(key.clone(), *revision),
            ),
            // After an ERROR, or when somebody deleted the key: what is left is cleaned up the same way.
            None => (gone(session, &known), Compare::Absent(key.clone())),
        };
        let txn = Txn::new().when(unchanged).put(key, encode(&request)).delete(keys.instance(known.instance));
        // Where the outcome is unknown the next look tells it.
        match session.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(known),
            Ok(_) | Err(ec_store::StoreError::Unknown(_)) => known = find(session, known.instance).await?,
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::failed(format!("the request of {} keeps changing; try again", known.instance)))
}

fn gone(session: &Session, known: &Known) -> Request {
    Request {
        version: RECORD_VERSION,
        instance: known.instance,
        desired: Desired::Destroyed,
        name: known.status.as_ref().and_then(|status| status.name.clone()),
        resources: ec_model::Resources::new(),
        image: None,
        keys: Vec::new(),
        user_data_bytes: None,
        token_required: false,
        project: session.settings.project.clone(),
        user: session.settings.user.clone(),
        created_at: Timestamp::now(),
    }
}

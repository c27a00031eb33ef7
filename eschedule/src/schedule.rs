//! Scheduling: candidates, a claim, a request.

use std::{collections::HashSet, time::Duration};

use ec_model::{
    Blob, Desired, IndexEntry, InstanceId, NodeId, RECORD_VERSION, Request, ResourceQuery, encode,
};
use ec_placement_client::{Candidate, Claim, PlacementError};
use ec_runtime::exit::{Failure, UNREACHABLE};
use ec_store::{Compare, Store, StoreError, Txn};
use jiff::Timestamp;

use crate::{config::Session, spec::GuestSpec};

/// How long to find out what became of a write whose answer was lost.
const RESOLVE_TRIES: u32 = 10;

/// How often candidates are asked for anew after races were lost.
const ROUNDS: u32 = 5;

/// An instance with its node.
pub(crate) struct Scheduled {
    pub(crate) instance: InstanceId,
    pub(crate) node: NodeId,
}

/// Claims the first candidate that can be had and requests the instance there; the inner error says why
/// there is no room.
pub(crate) async fn schedule(
    session: &Session,
    query: &ResourceQuery,
    guest: GuestSpec,
) -> Result<Result<Scheduled, NoRoom>, Failure> {
    let mut no_room = NoRoom::default();
    for _ in 0..ROUNDS {
        match attempt(session, query, &guest).await? {
            Ok(scheduled) => return Ok(Ok(scheduled)),
            Err(none) => no_room = none,
        }
        // Whoever won took room somewhere, but there may be other room that no candidate of then showed.
        if no_room.lost_races == 0 {
            break;
        }
    }
    Ok(Err(no_room))
}

async fn attempt(
    session: &Session,
    query: &ResourceQuery,
    guest: &GuestSpec,
) -> Result<Result<Scheduled, NoRoom>, Failure> {
    let nodes = session.settings.keys.nodes();
    // etcd is asked at the same time, so that nothing is claimed which could not be requested.
    let (alive, found) = tokio::join!(session.store.list(&nodes), session.placement.candidates(query, None));
    let alive: HashSet<NodeId> =
        alive?.pairs.iter().filter_map(|pair| session.settings.keys.parse_node(&pair.key).ok()).collect();
    let found = found.map_err(|error| match error {
        PlacementError::Refused(why) => Failure::usage(format!("placement refuses the query: {why}")),
        error => error.into(),
    })?;

    let mut no_room = NoRoom { candidates: found.candidates.len(), ..NoRoom::default() };
    for candidate in &found.candidates {
        let Some(node) = found.hosts(candidate).into_iter().find(|host| alive.contains(host)) else {
            no_room.not_alive += 1;
            continue;
        };
        needs_of_a_machine(candidate)?;
        // A new one for each claim: OpenStack keeps the consumer of some claims that it refused.
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let claim =
            Claim { instance, candidate, project: &session.settings.project, user: &session.settings.user };
        match session.placement.claim(&claim).await {
            Ok(()) => {}
            Err(PlacementError::Conflict(_)) => {
                no_room.lost_races += 1;
                continue;
            }
            // The answer was lost: the claim may stand, and must not.
            Err(error @ PlacementError::Unreachable { .. }) => {
                session.placement.release(instance).await.ok();
                return Err(error.into());
            }
            Err(error) => return Err(error.into()),
        }
        let request = Request {
            version: RECORD_VERSION,
            instance,
            desired: Desired::Active,
            name: guest.name.clone(),
            resources: query.total(),
            image: Some(guest.image.clone()),
            keys: guest.keys.clone(),
            user_data_bytes: guest.user_data.as_ref().map(|data| data.0.len() as u64),
            token_required: false,
            project: session.settings.project.clone(),
            user: session.settings.user.clone(),
            created_at: Timestamp::now(),
        };
        if write_request(session, node, &request, guest.user_data.as_ref()).await? {
            return Ok(Ok(Scheduled { instance, node }));
        }
        // The agent has died since it was listed.
        release(session, instance).await?;
        no_room.not_alive += 1;
    }
    Ok(Err(no_room))
}

/// Why there was no room.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NoRoom {
    candidates: usize,
    not_alive: usize,
    lost_races: usize,
}

impl NoRoom {
    /// One line for people.
    pub(crate) fn explain(&self) -> String {
        if self.candidates == 0 {
            return "no resource provider has room for this query with these traits and aggregates; `eschedule nodes` shows what is left".to_owned();
        }
        format!(
            "of {} candidates {} are on nodes whose agent is not alive and {} were taken by others meanwhile",
            self.candidates, self.not_alive, self.lost_races
        )
    }
}

fn needs_of_a_machine(candidate: &Candidate) -> Result<(), Failure> {
    for class in ["VCPU", "MEMORY_MB"] {
        if !candidate
            .allocations
            .values()
            .any(|resources| resources.get(class).is_some_and(|amount| *amount > 0))
        {
            return Err(Failure::usage(format!(
                "the query asks for no {class}, which a virtual machine needs: add for example `{class}:{}`",
                if class == "VCPU" { 1 } else { 256 }
            )));
        }
    }
    Ok(())
}

/// Whether the request was written: not where the node's agent is no longer alive.
async fn write_request(
    session: &Session,
    node: NodeId,
    request: &Request,
    user_data: Option<&Blob>,
) -> Result<bool, Failure> {
    let keys = &session.settings.keys;
    let index = IndexEntry {
        version: RECORD_VERSION,
        node: Some(node),
        name: request.name.clone(),
        project: request.project.clone(),
        created_at: request.created_at,
    };
    let key = keys.request(node, request.instance);
    let mut txn = Txn::new()
        .when(Compare::Present(keys.node(node)))
        .when(Compare::Absent(key.clone()))
        .put(key.clone(), encode(request))
        .put(keys.instance(request.instance), encode(&index));
    if let Some(data) = user_data {
        txn = txn.put(keys.user_data(node, request.instance), data.0.clone());
    }
    match session.store.txn(txn).await {
        Ok(outcome) => Ok(outcome.succeeded),
        Err(StoreError::Unknown(why)) => match resolve(session, &key).await {
            Some(true) => Ok(true),
            Some(false) => {
                release(session, request.instance).await?;
                Err(Failure {
                    code: UNREACHABLE,
                    message: format!("failed to write the request: {why}; the claim is released"),
                })
            }
            None => Err(Failure {
                code: UNREACHABLE,
                message: format!(
                    "etcd broke off while the request was written: {why}; `eschedule show {}` will tell whether it arrived, and if not its claim is released by the node",
                    request.instance
                ),
            }),
        },
        Err(error) => {
            release(session, request.instance).await?;
            Err(error.into())
        }
    }
}

/// Whether the key is there after a write whose answer was lost; `None` where etcd does not answer.
async fn resolve(session: &Session, key: &str) -> Option<bool> {
    for _ in 0..RESOLVE_TRIES {
        if let Ok((pair, _)) = session.store.get(key).await {
            return Some(pair.is_some());
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    None
}

async fn release(session: &Session, instance: InstanceId) -> Result<(), Failure> {
    session.placement.release(instance).await.map_err(|error| {
        let failure = Failure::from(error);
        Failure {
            code: failure.code,
            message: format!(
                "failed to release the claim of {instance}, which its node will do: {}",
                failure.message
            ),
        }
    })
}

//! Scheduling: an intent, candidates, a claim, a request; and the way back from each of these.

use std::{collections::HashSet, future::Future};

use ec_model::{
    Desired, IndexEntry, InstanceId, Keyspace, NodeId, RECORD_VERSION, Request, ResourceQuery, encode,
};
use ec_placement_client::{Candidate, Candidates, Claim, PlacementError};
use ec_runtime::exit::{Failure, INTERRUPTED};
use ec_store::{Compare, Store, StoreError, Txn};
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    intent::{Back, Claims, Intent, Place, Reached, STALE},
    spec::GuestSpec,
};

/// So many candidates are asked for, then so many, then all: most often the first of a few will do, and all of
/// 5,000 are megabytes.
const LIMITS: [Option<usize>; 3] = [Some(16), Some(256), None];

/// Of more hosts than these, the keys of all nodes are read in one go instead of each its own.
const SINGLY: usize = 64;

/// How often candidates are asked for anew after races were lost.
const ROUNDS: u32 = 5;

/// An instance with its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheduled {
    pub(crate) instance: InstanceId,
    pub(crate) node: NodeId,
}

/// Why nothing was placed, as far as it was seen on the way.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NoRoom {
    /// Hosts that have room, and whose agents are not alive.
    pub(crate) not_alive: HashSet<NodeId>,
    /// Claims that others were quicker with.
    pub(crate) lost_races: usize,
}

/// What was asked for, checked before anything is written.
pub(crate) struct Wanted<'a> {
    query: &'a ResourceQuery,
    /// How many living nodes may be tried.
    limit: usize,
    guest: &'a GuestSpec,
}

impl<'a> Wanted<'a> {
    pub(crate) fn new(query: &'a ResourceQuery, guest: &'a GuestSpec) -> Result<Self, Failure> {
        for (number, (key, _)) in query.pairs().iter().enumerate() {
            // Of any other placement takes one and passes over the rest without a word.
            let may_repeat = key.starts_with("required") || key.starts_with("member_of");
            if !may_repeat && query.pairs().iter().take(number).any(|(other, _)| other == key) {
                return Err(Failure::usage(format!(
                    "`{key}` stands twice in the query: give it once, as in `resources=VCPU:1,MEMORY_MB:256`"
                )));
            }
        }
        let total = query.total();
        for (class, example) in [("VCPU", 1), ("MEMORY_MB", 256)] {
            if total.get(class).is_none_or(|amount| *amount == 0) {
                return Err(Failure::usage(format!(
                    "the query asks for no {class}, which a virtual machine needs: add for example `{class}:{example}`"
                )));
            }
        }
        let limit = query.pairs().iter().find(|(key, _)| key == "limit");
        let limit = match limit.map(|(_, value)| (value, value.parse::<usize>())) {
            None => usize::MAX,
            Some((_, Ok(limit))) if limit > 0 => limit,
            Some((value, _)) => {
                return Err(Failure::usage(format!(
                    "limit={value} is not usable: wanted a number from 1 on"
                )));
            }
        };
        Ok(Self { query, limit, guest })
    }
}

/// Claims the first candidate that can be had and requests the instance there; the inner error says what stood
/// in the way. Whatever else happens, nothing stays; where that cannot be seen to, the error says what does.
pub(crate) async fn schedule<P: Claims>(
    place: &Place<'_, P>,
    wanted: &Wanted<'_>,
    stop: &CancellationToken,
) -> Result<Result<Scheduled, NoRoom>, Failure> {
    let begun = Instant::now();
    let mut seen = NoRoom::default();
    // At the same time: the intent is needed only for the claim.
    let (intent, mut found) =
        tokio::join!(Intent::write(place, &wanted.guest.naming), look(place, wanted, LIMITS[0], stop));
    let mut intent = intent?;
    let (mut round, mut widened) = (0, 0);
    loop {
        let (candidates, alive) = match found {
            Ok(found) => found,
            Err(failure) => return Err(given_up(place, intent, Reached::Intent, failure).await),
        };
        let lost_before = seen.lost_races;
        let mut tried = 0;
        for candidate in &candidates.candidates {
            let hosts = candidates.hosts(candidate);
            let Some(node) = hosts.iter().copied().find(|host| alive.contains(host)) else {
                seen.not_alive.extend(hosts);
                continue;
            };
            if tried == wanted.limit {
                break;
            }
            if tried > 0 {
                // A new uuid for each claim: OpenStack keeps the consumer of some claims that it refused.
                intent = intent.renewed(place, &wanted.guest.naming).await?;
            }
            tried += 1;
            if begun.elapsed() > STALE.unsigned_abs() / 2 {
                // Stopped and continued, perhaps: what was begun may count as left over at any moment.
                let late = Failure::failed("this took minutes, so it was given up; try again");
                return Err(given_up(place, intent, Reached::Intent, late).await);
            }
            if stop.is_cancelled() {
                return Err(given_up(place, intent, Reached::Intent, interrupted()).await);
            }
            match claim(place, &intent, candidate).await {
                Ok(true) => {}
                Ok(false) => {
                    seen.lost_races += 1;
                    continue;
                }
                Err(error @ PlacementError::Unreachable { .. }) => {
                    let instance = intent.instance;
                    // Told by the first error already, where this one fails, too.
                    return Err(match intent.abandon(place).await {
                        Ok(()) => and(error.into(), "nothing was requested and the claim is given back"),
                        Err(_) => and(
                            error.into(),
                            &format!(
                                "nothing was requested; where {instance} was claimed nevertheless, its node gives it back"
                            ),
                        ),
                    });
                }
                Err(error) => return Err(given_up(place, intent, Reached::Intent, error.into()).await),
            }
            if stop.is_cancelled() {
                return Err(given_up(place, intent, Reached::Claim, interrupted()).await);
            }
            match request(place, &intent, node, wanted).await {
                Requested::Yes => return Ok(Ok(Scheduled { instance: intent.instance, node })),
                // The agent has died since it was looked for, or the index was taken away.
                Requested::No(None) => {
                    if let Err(error) = place.placement.release(intent.instance).await {
                        return Err(given_up(place, intent, Reached::Claim, error.into()).await);
                    }
                    seen.not_alive.insert(node);
                }
                Requested::No(Some(failure)) => {
                    return Err(given_up(place, intent, Reached::Claim, failure).await);
                }
                Requested::Unknown(failure) => {
                    let instance = intent.instance;
                    let key = place.keys.request(node, instance);
                    return match intent.take_back(place, Reached::Request(&key)).await {
                        Ok(Back::Requested) => Ok(Ok(Scheduled { instance, node })),
                        Ok(Back::Nothing) => {
                            Err(and(failure, "nothing was requested and the claim is given back"))
                        }
                        Err(second) => Err(and(failure, &second.message)),
                    };
                }
            }
        }
        let lost = seen.lost_races > lost_before;
        let all = LIMITS[widened].is_none_or(|limit| candidates.candidates.len() < limit);
        // Whoever won took room somewhere, but there may be other room that no candidate of then showed.
        round += u32::from(lost);
        if (all || tried >= wanted.limit) && (!lost || round >= ROUNDS) {
            break;
        }
        widened = (widened + 1).min(LIMITS.len() - 1);
        found = look(place, wanted, LIMITS[widened], stop).await;
        if tried > 0 {
            intent = intent.renewed(place, &wanted.guest.naming).await?;
        }
    }
    intent.take_back(place, Reached::Intent).await?;
    Ok(Err(seen))
}

/// Candidates, and the living among their hosts. Only reads, so an interruption ends it at once.
async fn look<P: Claims>(
    place: &Place<'_, P>,
    wanted: &Wanted<'_>,
    limit: Option<usize>,
    stop: &CancellationToken,
) -> Result<(Candidates, HashSet<NodeId>), Failure> {
    let look = async {
        let found = place.placement.candidates(wanted.query, limit).await.map_err(refused)?;
        let alive = alive(place.store, place.keys, &found).await?;
        Ok((found, alive))
    };
    tokio::select! {
        looked = look => looked,
        () = stop.cancelled() => Err(interrupted()),
    }
}

fn refused(error: PlacementError) -> Failure {
    match error {
        PlacementError::Refused(why) => Failure::usage(format!("placement refuses the query: {why}")),
        error => error.into(),
    }
}

fn interrupted() -> Failure {
    Failure { code: INTERRUPTED, message: "interrupted; nothing was requested".to_owned() }
}

fn and(mut failure: Failure, more: &str) -> Failure {
    failure.message = format!("{}; {more}", failure.message);
    failure
}

/// The failure, after what was begun is taken back.
async fn given_up<P: Claims>(
    place: &Place<'_, P>,
    intent: Intent,
    reached: Reached<'_>,
    failure: Failure,
) -> Failure {
    let instance = intent.instance;
    match intent.take_back(place, reached).await {
        Ok(_) => failure,
        Err(second) => and(
            failure,
            &format!(
                "what was begun for {instance} could not be taken back ({}): its node gives a claim back, `eschedule list` takes the rest away in ten minutes",
                second.message
            ),
        ),
    }
}

/// The living among the candidates' hosts.
async fn alive(
    store: &dyn Store,
    keys: &Keyspace,
    found: &Candidates,
) -> Result<HashSet<NodeId>, StoreError> {
    let hosts: HashSet<NodeId> =
        found.candidates.iter().flat_map(|candidate| found.hosts(candidate)).collect();
    if hosts.len() > SINGLY {
        let all = store.keys(&keys.nodes()).await?;
        return Ok(all.iter().filter_map(|key| keys.parse_node(key).ok()).collect());
    }
    let looks = hosts.into_iter().map(|host| is_alive(store, keys, host));
    let looked = futures::future::try_join_all(looks).await?;
    Ok(looked.into_iter().flatten().collect())
}

fn is_alive<'a>(
    store: &'a dyn Store,
    keys: &Keyspace,
    host: NodeId,
) -> impl Future<Output = Result<Option<NodeId>, StoreError>> + use<'a> {
    let key = keys.node(host);
    async move { Ok(store.get(&key).await?.0.map(|_| host)) }
}

/// Whether the candidate is ours now; not where somebody else was quicker.
async fn claim<P: Claims>(
    place: &Place<'_, P>,
    intent: &Intent,
    candidate: &Candidate,
) -> Result<bool, PlacementError> {
    let claim = Claim { instance: intent.instance, candidate, project: place.project, user: place.user };
    match place.placement.claim(&claim).await {
        Ok(()) => Ok(true),
        Err(PlacementError::Conflict(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What became of a request.
enum Requested {
    Yes,
    /// Certainly not: a condition did not hold, or etcd says why.
    No(Option<Failure>),
    /// Nobody knows yet.
    Unknown(Failure),
}

async fn request<P: Claims>(
    place: &Place<'_, P>,
    intent: &Intent,
    node: NodeId,
    wanted: &Wanted<'_>,
) -> Requested {
    let (keys, instance, guest) = (place.keys, intent.instance, wanted.guest);
    let request = Request {
        version: RECORD_VERSION,
        instance,
        desired: Desired::Active,
        name: intent.entry.name.clone(),
        resources: wanted.query.total(),
        image: Some(guest.image.clone()),
        keys: guest.keys.clone(),
        user_data_bytes: guest.user_data.as_ref().map(|data| data.0.len() as u64),
        token_required: guest.token_required,
        project: place.project.to_owned(),
        user: place.user.to_owned(),
        created_at: Timestamp::now(),
    };
    let index = IndexEntry { node: Some(node), ..intent.entry.clone() };
    let key = keys.request(node, instance);
    let mut txn = Txn::new()
        .when(Compare::Present(keys.node(node)))
        .when(Compare::Unchanged(keys.instance(instance), intent.revision))
        .when(Compare::Absent(key.clone()))
        .put(key, encode(&request))
        .put(keys.instance(instance), encode(&index));
    if let Some(data) = &guest.user_data {
        txn = txn.put(keys.user_data(node, instance), data.0.clone());
    }
    match place.store.txn(txn).await {
        Ok(outcome) if outcome.succeeded => Requested::Yes,
        Ok(_) => Requested::No(None),
        Err(error @ StoreError::Unknown(_)) => Requested::Unknown(error.into()),
        Err(error) => Requested::No(Some(error.into())),
    }
}

#[cfg(test)]
mod tests;

//! Scheduling: an intent, candidates, a claim, a request; and the way back from each of these.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use ec_model::{Alive, Assigned, Desired, Instance, InstanceId, Node, NodeId, Request, decode, encode};
use ec_placement_client::{Candidate, Candidates, Claim, PlacementError};
use ec_plan::choice::{Order, Peers, Try, draw};
use ec_runtime::planted;
use ec_store::{Compare, KeyValue, StoreError, Txn};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Ask, Cloud, CloudError, CloudResult, Wanted,
    ask::ROOT_REQUIRED,
    group::tidy,
    history::{Asked, begin},
    intent::{Back, Intent, Reached, STALE, lost},
    moving::next_epoch,
    source::note_copy,
    volume::given,
};

/// Of more hosts than these, the keys of all nodes are read in one go instead of each its own.
const SINGLY: usize = 64;

/// So often a volume may be changed by others while an instance that is to boot from it is requested, or an instance while a copy is.
const TRIES: u32 = 3;

/// How often candidates are asked for anew after races were lost.
const ROUNDS: u32 = 5;

/// The same of a soft group, whose members go where they are told to but in the last: what is preferred changes with each that
/// somebody else places.
const ROUNDS_OF_SOFT: u32 = 30;

/// An instance with its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduled {
    /// The instance.
    pub instance: InstanceId,
    /// Where it will be built.
    pub node: NodeId,
}

/// Why nothing was placed, as far as it was seen on the way.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NoRoom {
    /// Hosts that have room, and whose agents are not alive.
    pub not_alive: HashSet<NodeId>,
    /// Claims, and places in the group, that others were quicker with.
    pub lost_races: usize,
    /// Hosts that have room, and that the group leaves out.
    pub left_out: BTreeSet<NodeId>,
}

/// Claims the first candidate that can be had and requests the instance there; the inner error says what stood
/// in the way. Whatever else happens, nothing stays; where that cannot be seen to, the error says what does.
///
/// # Errors
/// What failed, and what stays of what was begun, where anything does.
pub async fn schedule(
    cloud: &Cloud,
    wanted: &Wanted<'_>,
    stop: &CancellationToken,
) -> CloudResult<Result<Scheduled, NoRoom>> {
    let mut seen = NoRoom::default();
    let wanted = &wanted.beside_source(cloud).await?;
    // At the same time: the intent is needed only for the claim.
    let spec = wanted.spec();
    let (limits, order) = (wanted.ask.limits(), wanted.ask.order(cloud).await?);
    let (intent, mut found) =
        tokio::join!(Intent::write(cloud, wanted, &spec), look(cloud, &wanted.ask, limits[0], stop));
    let mut intent = intent?;
    let (mut round, mut widened) = (0, 0);
    loop {
        let looked = match found {
            Ok(looked) => looked,
            Err(error) => return Err(given_up(cloud, intent, Reached::Intent, error).await),
        };
        let lost_before = seen.lost_races;
        let mut tried = 0;
        let choice = wanted.ask.choose(&looked, &order);
        let Looked { found: candidates, alive, mut peers, .. } = looked;
        let is_soft = peers.as_ref().is_some_and(|peers| peers.policy.is_soft());
        let rounds = if is_soft { ROUNDS_OF_SOFT } else { ROUNDS };
        let nodes: Vec<NodeId> = choice.tries.iter().map(|Try { node, .. }| *node).collect();
        // In the last round it goes wherever there is room.
        let preferring = (is_soft && round + 1 < rounds).then_some(&nodes[..]);
        seen.not_alive.extend(choice.not_alive);
        seen.left_out = choice.left_out;
        let mut tries = VecDeque::from(choice.tries);
        // Neither a user nor a group likes one better than another.
        let mut to_draw = order == Order::Given && peers.is_none();
        loop {
            // Others are at the same candidates in the same order, and would be quicker with each of them.
            if to_draw && seen.lost_races > 0 {
                draw(tries.make_contiguous(), &cloud.host.uuid().to_string());
                to_draw = false;
            }
            let Some(Try { offer, node }) = tries.pop_front() else { break };
            // Others' members have come since it was chosen.
            if peers.as_ref().is_some_and(|peers| !peers.allow(node)) {
                seen.left_out.insert(node);
                continue;
            }
            let candidate = &candidates.candidates[offer];
            if tried > 0 {
                // A new uuid for each claim: OpenStack keeps the consumer of some claims that it refused.
                intent = renewed(cloud, intent, wanted).await?;
            }
            tried += 1;
            if cloud.host.now().duration_since(intent.record.created_at) > STALE / 2 {
                // Stopped and continued, perhaps, or the host slept: what was begun may count as left over at any moment.
                let late = CloudError::Busy("this took minutes, so it was given up; try again".into());
                return Err(given_up(cloud, intent, Reached::Intent, late).await);
            }
            if stop.is_cancelled() {
                return Err(given_up(cloud, intent, Reached::Intent, CloudError::Interrupted).await);
            }
            match claim(cloud, &intent, candidate).await {
                Ok(Claimed::Yes) => {}
                Ok(Claimed::No) => {
                    seen.lost_races += 1;
                    continue;
                }
                Ok(Claimed::Perhaps) => {
                    if let Err(error) = cloud.placement.release(intent.instance).await {
                        return Err(given_up(cloud, intent, Reached::Claim, error.into()).await);
                    }
                    seen.lost_races += 1;
                    continue;
                }
                Err(error @ PlacementError::Unreachable { .. }) => {
                    let instance = intent.instance;
                    // Told by the first error already, where this one fails, too.
                    return Err(match intent.abandon(cloud).await {
                        Ok(()) => {
                            CloudError::from(error).and("nothing was requested and the claim is given back")
                        }
                        Err(_) => CloudError::from(error).and(format!(
                            "nothing was requested; where {instance} was claimed nevertheless, its node gives it back"
                        )),
                    });
                }
                Err(error) => return Err(given_up(cloud, intent, Reached::Intent, error.into()).await),
            }
            if stop.is_cancelled() {
                return Err(given_up(cloud, intent, Reached::Claim, CloudError::Interrupted).await);
            }
            let sign = alive.get(&node).cloned().flatten();
            match request_within(cloud, &intent, node, wanted, sign, &mut peers, preferring).await {
                Requested::Yes => return Ok(Ok(Scheduled { instance: intent.instance, node })),
                // The agent has died since it was looked for, or does not understand us.
                given_back @ (Requested::No(None) | Requested::LeftOut | Requested::Crowded) => {
                    if let Err(error) = cloud.placement.release(intent.instance).await {
                        return Err(given_up(cloud, intent, Reached::Claim, error.into()).await);
                    }
                    match given_back {
                        Requested::LeftOut => {
                            seen.lost_races += 1;
                            seen.left_out.insert(node);
                        }
                        Requested::Crowded => seen.lost_races += 1,
                        _ => _ = seen.not_alive.insert(node),
                    }
                }
                Requested::No(Some(error)) => {
                    return Err(given_up(cloud, intent, Reached::Claim, error).await);
                }
                Requested::Unknown(error) => {
                    let instance = intent.instance;
                    let key = cloud.keys.request(node, instance);
                    return match intent.take_back(cloud, Reached::Request(&key)).await {
                        Ok(Back::Requested) => Ok(Ok(Scheduled { instance, node })),
                        Ok(Back::Nothing | Back::Changed) => {
                            Err(error.and("nothing was requested and the claim is given back"))
                        }
                        Err(second) => Err(error.and(second.to_string())),
                    };
                }
            }
        }
        let lost = seen.lost_races > lost_before;
        let all = limits[widened].is_none_or(|limit| candidates.candidates.len() < limit);
        // Whoever won took room somewhere, but there may be other room that no candidate of then showed.
        round += u32::from(lost);
        if (all || tried >= wanted.ask.limit) && (!lost || round >= rounds) {
            let left_over = match &wanted.ask.group {
                Some(group) if !seen.left_out.is_empty() => tidy(cloud, &group.group.name).await,
                _ => Ok(0),
            };
            match left_over {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => return Err(given_up(cloud, intent, Reached::Intent, error).await),
            }
        }
        widened = (widened + 1).min(limits.len() - 1);
        found = look(cloud, &wanted.ask, limits[widened], stop).await;
        if tried > 0 {
            intent = renewed(cloud, intent, wanted).await?;
        }
    }
    intent.take_back(cloud, Reached::Intent).await?;
    Ok(Err(seen))
}

/// The same intent under a new uuid; where that fails, what was begun is taken back.
async fn renewed(cloud: &Cloud, intent: Intent, wanted: &Wanted<'_>) -> CloudResult<Intent> {
    match intent.clone().renewed(cloud, wanted).await {
        Ok(next) => Ok(next),
        Err(error) => Err(given_up(cloud, intent, Reached::Intent, error).await),
    }
}

/// What is there to choose among.
pub(crate) struct Looked {
    pub(crate) found: Candidates,
    /// The living among their hosts.
    pub(crate) alive: Signs,
    /// The living nodes of each storage that a candidate takes all that it takes from, in the order in which they are tried.
    pub(crate) members: HashMap<NodeId, Vec<NodeId>>,
    /// The members of the group that it is for.
    pub(crate) peers: Option<Peers>,
}

impl Looked {
    /// The nodes that could build there.
    pub(crate) fn hosts(&self, candidate: &Candidate) -> Vec<NodeId> {
        match self.found.storage_alone(candidate) {
            Some(storage) => self.members.get(&storage).cloned().unwrap_or_default(),
            None => self.found.hosts(candidate),
        }
    }
}

/// Looks what is there. Only reads, so an interruption ends it at once.
pub(crate) async fn look(
    cloud: &Cloud,
    ask: &Ask<'_>,
    limit: Option<usize>,
    stop: &CancellationToken,
) -> CloudResult<Looked> {
    let look = async {
        let found = match cloud.placement.candidates(&ask.asked, limit).await {
            // An OpenStack of before 2019 has no such parameter; there, nobody marks nodes for us either.
            Err(PlacementError::Refused(why)) if why.contains(ROOT_REQUIRED) => {
                cloud.placement.candidates(&ask.plain, limit).await
            }
            found => found,
        };
        let found = found.map_err(refused)?;
        let mut alive = alive(cloud, &found, ask.format).await?;
        let members = members(cloud, ask, &found, &mut alive).await?;
        let peers = match &ask.group {
            Some(group) => Some(group.peers(cloud).await?),
            None => None,
        };
        Ok(Looked { found, alive, members, peers })
    };
    tokio::select! {
        biased;
        looked = look => looked,
        () = stop.cancelled() => Err(CloudError::Interrupted),
    }
}

fn refused(error: PlacementError) -> CloudError {
    match error {
        PlacementError::Refused(why) => CloudError::Invalid(format!("placement refuses the query: {why}")),
        error => error.into(),
    }
}

/// The error, after what was begun is taken back.
async fn given_up(cloud: &Cloud, intent: Intent, reached: Reached<'_>, error: CloudError) -> CloudError {
    let instance = intent.instance;
    match intent.take_back(cloud, reached).await {
        Ok(_) => error,
        Err(second) => error.and(format!(
            "what was begun for {instance} could not be taken back ({second}): its node gives a claim back, `eschedule list` takes the rest away in ten minutes"
        )),
    }
}

/// The living nodes, with their signs of life where those were read.
type Signs = HashMap<NodeId, Option<KeyValue>>;

/// The living among the candidates' hosts.
async fn alive(cloud: &Cloud, found: &Candidates, format: u32) -> Result<Signs, StoreError> {
    let hosts: BTreeSet<NodeId> =
        found.candidates.iter().flat_map(|candidate| found.hosts(candidate)).collect();
    if hosts.len() > SINGLY {
        let all = cloud.store.keys(&cloud.keys.all_alive()).await?;
        return Ok(all.iter().filter_map(|key| Some((cloud.keys.parse_alive(key).ok()?, None))).collect());
    }
    let looks = hosts.into_iter().map(async |host| Ok((host, sign_of(cloud, host, format).await?)));
    let looked: Vec<_> = futures::future::try_join_all(looks).await?;
    Ok(looked.into_iter().filter(|(_, sign)| sign.is_some()).collect())
}

/// The living nodes of the storages that candidates take all that they take from: which of them it is, placement leaves open. They
/// are tried in a random order, so that none gets all. Those where nothing new is to be placed are passed over, as placement would,
/// unless it is the one that is asked for.
async fn members(
    cloud: &Cloud,
    ask: &Ask<'_>,
    found: &Candidates,
    alive: &mut Signs,
) -> CloudResult<HashMap<NodeId, Vec<NodeId>>> {
    let storages: BTreeSet<NodeId> =
        found.candidates.iter().filter_map(|candidate| found.storage_alone(candidate)).collect();
    let mut members: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
    if storages.is_empty() {
        return Ok(members);
    }
    for sign in cloud.store.list(&cloud.keys.all_alive()).await?.pairs {
        let Ok(Alive { node, storage: Some(storage), .. }) = decode(&sign.value) else { continue };
        if storages.contains(&storage.provider) && is_understood(cloud, node, &sign, ask.format) {
            members.entry(storage.provider).or_default().push(node);
            alive.insert(node, Some(sign));
        }
    }
    if ask.node.is_none() {
        let closed = closed(cloud).await?;
        members.values_mut().for_each(|nodes| nodes.retain(|node| !closed.contains(node)));
    }
    let drawn = cloud.host.uuid();
    for nodes in members.values_mut() {
        nodes.sort_by_cached_key(|node| Uuid::new_v5(&drawn, node.uuid().as_bytes()));
    }
    Ok(members)
}

/// The nodes where nothing new is to be placed: a controller or an operator disabled them, or their hosts are in trouble.
async fn closed(cloud: &Cloud) -> CloudResult<BTreeSet<NodeId>> {
    let mut closed = cloud.placement.disabled().await?;
    let records = cloud.store.list(&cloud.keys.nodes()).await?.pairs;
    // What cannot be read is no trouble of its host.
    let read = records.iter().filter_map(|pair| decode::<Node>(&pair.value).ok());
    closed.extend(read.filter(|record| !record.troubles.is_empty()).map(|record| record.node));
    Ok(closed)
}

/// The sign of life of a node whose agent can be asked by a request of that format.
async fn sign_of(cloud: &Cloud, node: NodeId, format: u32) -> Result<Option<KeyValue>, StoreError> {
    let sign = cloud.store.get(&cloud.keys.alive(node)).await?.0;
    Ok(sign.filter(|sign| is_understood(cloud, node, sign, format)))
}

/// Whether an agent can be asked so. One that cannot is as one that is dead: it uses no limit up.
fn is_understood(cloud: &Cloud, node: NodeId, sign: &KeyValue, format: u32) -> bool {
    let Some(why) = not_understood(node, &sign.value, format) else { return true };
    (cloud.notice)(&format!("node {node} is passed over: {why}; use the same release on both sides"));
    false
}

/// What became of a claim.
enum Claimed {
    Yes,
    /// Somebody else was quicker.
    No,
    /// Something changed while it was decided, or its uuid, which nobody else knows, has a claim: then this one was done, and asked for
    /// once more by something in between. Nobody would give it back any more once its record is gone.
    Perhaps,
}

async fn claim(cloud: &Cloud, intent: &Intent, candidate: &Candidate) -> Result<Claimed, PlacementError> {
    let claim = Claim { instance: intent.instance, candidate, project: &cloud.project, user: &cloud.user };
    match cloud.placement.claim(&claim).await {
        Ok(()) => Ok(Claimed::Yes),
        Err(PlacementError::Conflict(conflict)) if conflict.does_not_fit => Ok(Claimed::No),
        Err(PlacementError::Conflict(_)) => Ok(Claimed::Perhaps),
        Err(error) => Err(error),
    }
}

/// What became of a request.
enum Requested {
    Yes,
    /// Certainly not: a condition did not hold, or etcd says why.
    No(Option<CloudError>),
    /// Certainly not: others are members of its group since it was looked, and leave its node out.
    LeftOut,
    /// Certainly not: others are members of its group since it was looked, and another node is preferred now.
    Crowded,
    /// Nobody knows yet.
    Unknown(CloudError),
}

/// Requests; where its group has other members than was seen, and they let it, again.
async fn request_within(
    cloud: &Cloud,
    intent: &Intent,
    node: NodeId,
    wanted: &Wanted<'_>,
    sign: Option<KeyValue>,
    peers: &mut Option<Peers>,
    preferring: Option<&[NodeId]>,
) -> Requested {
    let by_others = wanted.guest.has_volumes() || wanted.guest.image.copied().is_some();
    let mut left = if by_others { TRIES } else { 0 };
    let mut sign = sign;
    // The agent lives, and has put its sign anew since that was looked for.
    let is_anew = async |before: Option<KeyValue>| {
        let Some(before) = before else { return false };
        let now = sign_of(cloud, node, wanted.ask.format).await.ok().flatten();
        now.is_some_and(|now| now.mod_revision != before.mod_revision)
    };
    loop {
        let requested =
            request(cloud, intent, node, wanted, sign.clone(), peers.as_ref(), preferring.is_some()).await;
        let Requested::No(None) = &requested else { return requested };
        // A volume, or what is copied, was changed meanwhile; the next look says whether it can still have that.
        if left > 0 {
            left -= 1;
            sign = None;
            continue;
        }
        let now = match &wanted.ask.group {
            Some(group) => match group.peers_still(cloud).await {
                Ok(now) => Some(now),
                Err(error) => return Requested::No(Some(error)),
            },
            None => None,
        };
        let now = now.filter(|now| peers.as_ref().is_none_or(|peers| peers.on != now.on));
        let Some(now) = now else {
            match is_anew(sign.take()).await {
                true => continue,
                false => return requested,
            }
        };
        let allow = now.allow(node);
        let is_crowded = preferring.is_some_and(|nodes| now.prefer(nodes, node));
        *peers = Some(now);
        if !allow {
            return Requested::LeftOut;
        }
        if is_crowded {
            return Requested::Crowded;
        }
    }
}

async fn request(
    cloud: &Cloud,
    intent: &Intent,
    node: NodeId,
    wanted: &Wanted<'_>,
    sign: Option<KeyValue>,
    peers: Option<&Peers>,
    prefers: bool,
) -> Requested {
    let (keys, instance) = (&cloud.keys, intent.instance);
    let alive = match sign {
        Some(sign) => sign,
        None => match sign_of(cloud, node, wanted.ask.format).await {
            Ok(Some(sign)) => sign,
            Ok(None) => return Requested::No(None),
            Err(error) => return Requested::No(Some(error.into())),
        },
    };
    let epoch = intent.record.assigned.map_or(1, |before| next_epoch(cloud, before.epoch));
    let assigned = Assigned { node, epoch };
    let given = given(cloud, wanted.guest, instance, node, Txn::new()).await;
    let (volumes, txn) = match given {
        Ok(given) => given,
        Err(error) => return Requested::No(Some(error)),
    };
    let record = Instance { assigned: Some(assigned), volumes, ..intent.record.clone() };
    let request = Request {
        instance,
        kind: record.kind,
        volumes: record.volumes.clone(),
        epoch: assigned.epoch,
        generation: record.generation,
        desired: Desired::Active,
        power: record.power.clone(),
        restart: record.restart,
        rebuild: None,
        rescue: None,
        resize: None,
        handover: None,
        name: record.name.clone(),
        project: record.project.clone(),
        user: record.user.clone(),
        spec: Some(record.spec.clone()),
        access: None,
        request_id: record.request_id,
        created_at: record.created_at,
    };
    let key = keys.request(node, instance);
    let mut txn = txn.when(Compare::Unchanged(alive.key, alive.mod_revision));
    if !planted("request-without-index") {
        txn = txn.when(Compare::Unchanged(keys.instance(instance), intent.revision));
    }
    txn = txn
        .when(Compare::Absent(key.clone()))
        .put(key, encode(&request))
        .put(keys.instance(instance), encode(&record));
    txn = begin(cloud, Asked::create(&record, node), txn);
    txn = match note_copy(cloud, &record, txn).await {
        Ok(txn) => txn,
        Err(error) => return Requested::No(Some(error)),
    };
    if let (Some(group), Some(peers), Some(membership)) = (&wanted.ask.group, peers, keys.membership(&record))
    {
        txn = group.demand(cloud, peers, node, prefers, txn).put(membership, "");
    }
    if let Some(data) = &wanted.guest.user_data {
        txn = txn.put(keys.user_data(node, instance), data.0.clone());
    }
    match cloud.store.txn(txn).await {
        Ok(outcome) if outcome.succeeded => Requested::Yes,
        // Of what did not hold, this is the only thing that another place would not help against.
        Ok(_) => match cloud.store.get(&keys.instance(instance)).await {
            Ok((Some(pair), _)) if pair.mod_revision == intent.revision => Requested::No(None),
            Ok(_) => Requested::No(Some(lost(instance))),
            Err(error) => Requested::No(Some(error.into())),
        },
        Err(error @ StoreError::Unknown(_)) => Requested::Unknown(error.into()),
        // It has come to its end, so that the record tells what that was.
        Err(error @ StoreError::Full(_)) => match cloud.store.get(&keys.instance(instance)).await {
            Ok((Some(pair), _)) if decode::<Instance>(&pair.value).is_ok_and(|it| it.assigned.is_some()) => {
                Requested::Yes
            }
            Ok(_) => Requested::No(Some(error.into())),
            Err(_) => Requested::Unknown(error.into()),
        },
        Err(error) => Requested::No(Some(error.into())),
    }
}

/// Why an agent cannot be asked: it is of a release that does not read what this one writes.
pub(crate) fn not_understood(node: NodeId, alive: &[u8], format: u32) -> Option<String> {
    match decode::<Alive>(alive) {
        Ok(alive) if alive.node != node => Some(format!("its sign of life names node {}", alive.node)),
        Ok(alive) if alive.reads::<Request>(format) => None,
        Ok(alive) => {
            Some(format!("its agent is of release {}, which does not read our requests", alive.agent))
        }
        Err(error) => Some(format!("what its agent says of itself cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests;

//! Waiting for an outcome, and telling on the way how far it is.

use std::{sync::Arc, time::Duration};

use ec_model::{
    BEING_COPIED, Instance, InstanceId, NodeId, Power, Record, Request, State, Status, Workload, decode,
    decode_part,
};
use ec_plan::status::is_started_again;
use ec_store::{Change, Event, FollowOptions, follow};
use jiff::Timestamp;
use serde::Deserialize;

use crate::{Cloud, CloudError, CloudResult, sizes::settle};

/// So long etcd is given to tell how it stands.
const FIRST_LOOK: Duration = Duration::from_secs(5);

/// What etcd refuses for so long it goes on to refuse: rights that are given anew are there sooner.
const REFUSES: Duration = Duration::from_secs(10);

/// What is seen while something is waited for.
#[derive(Debug)]
pub enum Step<'a> {
    /// The instance's status is this now.
    Status(&'a Status),
    /// The store is away, in these words; it is waited for.
    Lost(String),
}

/// Waits until the instance is ACTIVE.
///
/// # Errors
/// It came to ERROR, STOPPED, or an end from elsewhere; the time ran out.
pub async fn until_active(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
    seen: impl Fn(Step<'_>),
) -> CloudResult<Status> {
    until_status(cloud, node, instance, timeout, seen, |status| settled(instance, status), |_| Ok(())).await
}

/// Waits until `judge` has an answer to a status, or nobody wants the instance any more, or what is wanted of it does not stand.
pub(crate) async fn until_status(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
    seen: impl Fn(Step<'_>),
    judge: impl Fn(Status) -> CloudResult<Option<Status>>,
    stands: impl Fn(&Request) -> CloudResult<()>,
) -> CloudResult<Status> {
    let key = cloud.keys.status(node, instance);
    let mut reason = None;
    let status = watch_key::<Status, _>(cloud, key, timeout, &seen, |key| match key.value() {
        Some(value) => {
            let status: Status = decode(value)?;
            seen(Step::Status(&status));
            reason.clone_from(&status.reason);
            judge(status)
        }
        // Not there yet, or not any more: that the request tells.
        None => Ok(None),
    });
    let outcome = tokio::select! {
        biased;
        outcome = status => outcome,
        error = withdrawn(cloud, node, instance, timeout, stands) => Err(error),
    };
    outcome.map_err(|error| match (error, reason) {
        (CloudError::TimedOut(text), Some(reason)) => CloudError::TimedOut(format!("{text}: {reason}")),
        (error, _) => error,
    })
}

/// Whether there is nothing more to wait for.
fn settled(instance: InstanceId, status: Status) -> CloudResult<Option<Status>> {
    let why = status.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let what_it_is = status.kind.word();
    let elsewhere =
        |what: &str| Err(CloudError::Elsewhere(format!("{what_it_is} {instance} is {what}{why}")));
    match status.state {
        State::Active | State::VerifyResize => Ok(Some(status)),
        // The node has looked for an address as long as it was told to.
        State::Starting if status.started_at.is_some() && status.reason.is_some() => {
            elsewhere("up and has no IP yet")
        }
        State::Scheduled
        | State::Preparing
        | State::Starting
        | State::Paused
        | State::Rebooting
        | State::Stopping
        | State::Suspending
        | State::Rebuilding
        | State::Rescuing
        | State::Unrescuing
        | State::Resizing => Ok(None),
        // By its restart policy.
        State::Stopped if is_started_again(status.reason.as_deref()) => Ok(None),
        State::Error => elsewhere("in ERROR"),
        State::Rescued => elsewhere("RESCUED: it runs from its rescue disk"),
        State::Stopped => elsewhere("STOPPED"),
        State::Suspended => elsewhere("SUSPENDED"),
        State::Destroying => {
            Err(CloudError::Elsewhere(format!("{what_it_is} {instance} is being destroyed")))
        }
        State::Unclaimed => elsewhere("UNCLAIMED: it runs, and nobody asks for it"),
        State::Unknown => elsewhere("in a state that this release does not know"),
    }
}

/// Waits until nobody wants the instance any more, or what is wanted of it does not stand; never ends well.
async fn withdrawn(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
    stands: impl Fn(&Request) -> CloudResult<()>,
) -> CloudError {
    let key = cloud.keys.request(node, instance);
    let mut kind = Workload::default();
    // The other watch tells of an outage.
    let gone = watch_key::<Request, _>(cloud, key, timeout, &|_| (), |key| {
        kind = key.value().and_then(kind_of::<Request>).unwrap_or(kind);
        if let Some(request) = key.value().and_then(|value| decode::<Request>(value).ok()) {
            stands(&request)?;
        }
        Ok(key.value().is_none().then_some(()))
    })
    .await;
    match gone {
        // How it stood at last the other watch tells.
        Err(CloudError::TimedOut(_)) => return std::future::pending().await,
        Err(error) => return error,
        Ok(()) => {}
    }
    // A request goes at the end of a destroy, and after an ERROR, whose status stays.
    let status = cloud.store.get(&cloud.keys.status(node, instance)).await;
    match status.map(|(pair, _)| pair.and_then(|pair| decode::<Status>(&pair.value).ok())) {
        Ok(Some(status)) => match settled(instance, status) {
            Err(error) => error,
            Ok(_) => CloudError::Elsewhere(format!("the request of {instance} was deleted")),
        },
        Ok(None) => CloudError::Elsewhere(format!("{} {instance} was destroyed", kind.word())),
        Err(error) => error.into(),
    }
}

/// What there is to wait for when something was asked of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// That its wish for power of this generation is carried out, or a later one that comes to the same.
    Power {
        /// Which.
        generation: u64,
        /// What was wished.
        power: Power,
    },
    /// That the disk that was wished then is made, or cannot be.
    Rebuild(Timestamp),
    /// That it runs from the rescue disk that was wished then, or cannot.
    Rescue {
        /// When.
        wished_at: Timestamp,
        /// By which generation; a later one may have taken it back.
        generation: u64,
    },
    /// That it boots from its own disk, as was wished by this generation.
    Unrescue(u64),
    /// That it has the size that was wished then, or cannot have it.
    Resize(Timestamp),
    /// That its agent acts by what is wanted since this generation.
    Heard(u64),
    /// That it has a volume, or has it no more, or cannot.
    Volume {
        /// By which generation; a later one may have wished otherwise, or something of others.
        generation: u64,
        /// Of which.
        volume: InstanceId,
        /// Whether it is to have it.
        has: bool,
    },
}

/// Waits until what was asked for is done. Answers how the instance is then.
///
/// # Errors
/// It cannot be done; the instance is withdrawn, or comes to an ERROR; the time ran out.
pub async fn until_done(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    awaited: Awaited,
    timeout: Duration,
    seen: impl Fn(Step<'_>),
) -> CloudResult<Status> {
    let judge = |status| match awaited {
        Awaited::Power { generation, power } => powered(instance, generation, power, status),
        Awaited::Rebuild(wished_at) => rebuilt(instance, wished_at, status),
        Awaited::Rescue { wished_at, generation } => rescued(instance, wished_at, generation, status),
        Awaited::Unrescue(generation) => unrescued(instance, generation, status),
        Awaited::Resize(wished_at) => resized(instance, wished_at, status),
        Awaited::Heard(generation) => Ok(heard(generation, status)),
        Awaited::Volume { generation, volume, has } => with_volume(instance, generation, volume, has, status),
    };
    let stands = |request: &Request| stands(instance, awaited, request);
    let status = until_status(cloud, node, instance, timeout, seen, judge, stands).await?;
    if let Awaited::Resize(_) = awaited
        && let Some(why) = status.resized.as_ref().and_then(|resized| resized.failed.as_ref())
    {
        return Err(not_resized(cloud, &status, why).await);
    }
    // One that was reverted does not need any more what it was.
    if matches!(awaited, Awaited::Resize(_))
        && let Err(error) = settle(cloud, instance).await
    {
        (cloud.notice)(&format!("{instance}: what it does not need is given back by a controller: {error}"));
    }
    Ok(status)
}

/// An error where a wish was taken back. Its agent may never have heard of it, and tells nothing of it then.
fn stands(instance: InstanceId, awaited: Awaited, request: &Request) -> CloudResult<()> {
    let what = match (awaited, &request.rescue) {
        (Awaited::Rescue { wished_at, generation }, wish)
            if request.generation > generation
                && wish.as_ref().is_none_or(|wish| wish.wished_at != wished_at) =>
        {
            if wish.is_some() {
                RESCUED_ONCE_MORE
            } else {
                UNRESCUED
            }
        }
        (Awaited::Unrescue(generation), Some(_)) if request.generation > generation => RESCUED_ONCE_MORE,
        _ => return Ok(()),
    };
    Err(CloudError::Elsewhere(format!("instance {instance} {what}")))
}

const RESCUED_ONCE_MORE: &str = "was to be rescued once more by somebody else";
const UNRESCUED: &str = "was to boot from its own disk again";

fn powered(
    instance: InstanceId,
    generation: u64,
    power: Power,
    status: Status,
) -> CloudResult<Option<Status>> {
    // Told since the wish is known, or was carried out: that is what came of it.
    let heard = status.power_generation.max(status.observed_generation);
    if status.state == State::Error && heard >= generation {
        return settled(instance, status);
    }
    let came_to = match status.state {
        State::Paused => Power::Paused,
        State::Suspended => Power::Suspended,
        State::Stopped => Power::Stopped,
        _ => Power::Running,
    };
    if status.power_generation > generation && came_to != power {
        return Err(CloudError::Elsewhere(format!(
            "instance {instance} is {}: something else was asked for since",
            status.state
        )));
    }
    if status.power_generation >= generation {
        // It did not run any more when it was to be halted, or ended as soon as it was started.
        return match came_to {
            Power::Stopped if power != Power::Stopped => settled(instance, status),
            _ => Ok(Some(status)),
        };
    }
    Ok(None)
}

fn rebuilt(instance: InstanceId, wished_at: Timestamp, status: Status) -> CloudResult<Option<Status>> {
    let kind = status.kind;
    let elsewhere = |what: String| Err(CloudError::Elsewhere(format!("{} {instance} {what}", kind.word())));
    match &status.rebuilt {
        Some(rebuilt) if rebuilt.wished_at > wished_at => {
            let what = if kind.is_machine() { "rebuilt" } else { "restored" };
            elsewhere(format!("was to be {what} once more by somebody else"))
        }
        Some(rebuilt) if rebuilt.wished_at == wished_at => match (&rebuilt.failed, status.state) {
            (Some(why), _) => elsewhere(format!("has its old disk still: {why}")),
            // It has its new disk, and is on the way to where it was wanted.
            (None, State::Rebuilding) => Ok(None),
            (None, State::Error) => settled(instance, status),
            (None, _) => Ok(Some(status)),
        },
        _ => Ok(None),
    }
}

fn rescued(
    instance: InstanceId,
    wished_at: Timestamp,
    generation: u64,
    status: Status,
) -> CloudResult<Option<Status>> {
    let elsewhere = |what: String| Err(CloudError::Elsewhere(format!("instance {instance} {what}")));
    match &status.rescued {
        Some(rescued) if rescued.wished_at > wished_at => elsewhere(RESCUED_ONCE_MORE.to_owned()),
        Some(rescued) if rescued.wished_at == wished_at => match (&rescued.failed, status.state) {
            (Some(why), _) => elsewhere(format!("boots from its own disk still: {why}")),
            (None, State::Rescuing | State::Starting) => Ok(None),
            (None, State::Error) => settled(instance, status),
            (None, _) => Ok(Some(status)),
        },
        _ if status.state == State::Unrescuing && status.observed_generation > generation => {
            elsewhere(UNRESCUED.to_owned())
        }
        _ => Ok(None),
    }
}

fn resized(instance: InstanceId, wished_at: Timestamp, status: Status) -> CloudResult<Option<Status>> {
    let kind = status.kind.word();
    let elsewhere = |what: String| Err(CloudError::Elsewhere(format!("{kind} {instance} {what}")));
    match &status.resized {
        Some(resized) if resized.wished_at > wished_at => {
            elsewhere("was to be of yet another size by somebody else".to_owned())
        }
        Some(resized) if resized.wished_at == wished_at => match (&resized.failed, status.state) {
            // What is to be done then hangs on more than that.
            (Some(_), _) => Ok(Some(status)),
            (None, State::Resizing) => Ok(None),
            (None, State::Error) => settled(instance, status),
            (None, _) => Ok(Some(status)),
        },
        // Its disk is gone, or has not come: nothing grows.
        _ if status.kind == Workload::Volume && status.state == State::Error => settled(instance, status),
        _ => Ok(None),
    }
}

/// That one could not be given the size that was wished last, and what helps: to go back is tried again where that was wished.
async fn not_resized(cloud: &Cloud, status: &Status, why: &str) -> CloudError {
    let (kind, instance) = (status.kind, status.instance);
    let helps = match kind {
        Workload::Volume => format!("volume extend {instance}` tries it again"),
        Workload::Machine if was_to_go_back(cloud, instance).await => {
            format!("resize --revert {instance}` tries it again")
        }
        Workload::Machine => format!("resize --revert {instance}` gives back what was claimed for more"),
    };
    CloudError::Elsewhere(format!(
        "{} {instance} is as large as it was before that: {why}; `eschedule {helps}",
        kind.word()
    ))
}

/// Whether an instance was wished to be as large as it was before, by its record.
async fn was_to_go_back(cloud: &Cloud, instance: InstanceId) -> bool {
    let pair = cloud.store.get(&cloud.keys.instance(instance)).await.ok().and_then(|(pair, _)| pair);
    let record = pair.and_then(|pair| decode::<Instance>(&pair.value).ok());
    record.is_some_and(|record| record.before.is_none())
}

fn heard(generation: u64, status: Status) -> Option<Status> {
    (status.observed_generation >= generation).then_some(status)
}

fn with_volume(
    instance: InstanceId,
    generation: u64,
    volume: InstanceId,
    has: bool,
    status: Status,
) -> CloudResult<Option<Status>> {
    if status.observed_generation < generation || status.volumes_changing {
        return Ok(None);
    }
    match &status.volumes_failed {
        // That ends, and then its agent does it.
        Some(why) if why.contains(BEING_COPIED) => Ok(None),
        Some(why) => Err(CloudError::Elsewhere(format!(
            "instance {instance} has not the volumes that it is to have: {why}; its agent tries it again"
        ))),
        None if status.volumes.iter().any(|one| one.volume == volume) == has => Ok(Some(status)),
        None if status.observed_generation > generation => {
            let what = if has { "is not to have" } else { "is to have" };
            let again = if has { "any more" } else { "again" };
            Err(CloudError::Elsewhere(format!("instance {instance} {what} volume {volume} {again}")))
        }
        None => Ok(None),
    }
}

fn unrescued(instance: InstanceId, generation: u64, status: Status) -> CloudResult<Option<Status>> {
    let is_on_its_way = matches!(status.state, State::Rescuing | State::Unrescuing)
        // It is to be started.
        || status.power_generation == 0;
    match status.state {
        _ if status.observed_generation < generation || status.is_rescued() => Ok(None),
        State::Error => settled(instance, status),
        _ if is_on_its_way => Ok(None),
        _ => Ok(Some(status)),
    }
}

/// Waits until nothing is left of the instance.
///
/// # Errors
/// The time ran out.
pub async fn until_gone(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
    seen: impl Fn(Step<'_>),
) -> CloudResult<()> {
    // The request's key goes in the same transaction as all others.
    let key = cloud.keys.request(node, instance);
    let judge = |key: Key<'_>| match key {
        Key::Is(_) => Ok(None),
        Key::IsNot => Ok(Some(())),
        Key::IsNotYet => Err(CloudError::Elsewhere(
            "etcd was put back to an earlier time meanwhile, which knows nothing of it; look what there is"
                .to_owned(),
        )),
    };
    watch_key::<Request, _>(cloud, key, timeout, &seen, judge).await
}

/// How a key stands.
#[derive(Clone, Copy)]
enum Key<'a> {
    Is(&'a [u8]),
    IsNot,
    /// It is not in an etcd that was put back to an earlier time since it was looked for first.
    IsNotYet,
}

impl<'a> Key<'a> {
    fn value(self) -> Option<&'a [u8]> {
        match self {
            Self::Is(value) => Some(value),
            Self::IsNot | Self::IsNotYet => None,
        }
    }
}

/// Looks at a key, which has such a record, now and after each change, until `judge` has an answer.
async fn watch_key<R: Record, T>(
    cloud: &Cloud,
    key: String,
    timeout: Duration,
    seen: &impl Fn(Step<'_>),
    mut judge: impl FnMut(Key<'_>) -> CloudResult<Option<T>>,
) -> CloudResult<T> {
    // A uuid at its end makes the key the only one with this prefix.
    let mut changes = follow(Arc::clone(&cloud.store), key.clone(), FollowOptions::default());
    let begun = tokio::time::Instant::now();
    // How it stands is looked at once, however little time is left.
    let mut patience = timeout.max(FIRST_LOOK);
    // The newest that was heard of.
    let mut heard = 0;
    let mut kind = None;
    // When etcd, which does not tell it any more, is asked whether it refuses to.
    let mut doubt = None;
    loop {
        let end = begun + patience;
        let until = doubt.map_or(end, |doubt| end.min(doubt));
        let Ok(change) = tokio::time::timeout_at(until, changes.recv()).await else {
            if doubt.is_some() {
                match cloud.store.get(&key).await {
                    Err(error) if !error.is_transient() => return Err(error.into()),
                    _ if until < end => {
                        doubt = Some(tokio::time::Instant::now() + REFUSES);
                        continue;
                    }
                    _ => {}
                }
            }
            return Err(out_of_time(cloud, &key, kind, timeout).await);
        };
        if !matches!(change, Some(Change::Lost(_))) {
            (patience, doubt) = (timeout, None);
        }
        let answer = match change {
            Some(Change::Reset(listing)) => {
                let found = listing.pairs.iter().find(|pair| pair.key == key);
                kind = found.and_then(|pair| kind_of::<R>(&pair.value)).or(kind);
                let is_earlier = listing.revision < heard;
                heard = listing.revision;
                judge(match found {
                    Some(pair) => Key::Is(&pair.value),
                    None if is_earlier => Key::IsNotYet,
                    None => Key::IsNot,
                })?
            }
            // The last word on the key is the one that holds.
            Some(Change::Events(batch)) => {
                heard = heard.max(batch.resume_from - 1);
                match batch.events.into_iter().rev().find(|event| event.key() == key) {
                    Some(Event::Put(pair)) => {
                        kind = kind_of::<R>(&pair.value).or(kind);
                        judge(Key::Is(&pair.value))?
                    }
                    Some(Event::Delete { .. }) => judge(Key::IsNot)?,
                    None => None,
                }
            }
            Some(Change::Lost(error)) => {
                doubt = (!error.is_transient()).then(|| tokio::time::Instant::now() + REFUSES);
                seen(Step::Lost(error.to_string()));
                None
            }
            None => return Err(CloudError::Unavailable("the watch ended".into())),
        };
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
}

/// Of what kind of workload a record is.
fn kind_of<R: Record>(value: &[u8]) -> Option<Workload> {
    #[derive(Deserialize)]
    struct Part {
        #[serde(default)]
        kind: Workload,
    }
    decode_part::<R, Part>(value).ok().map(|part| part.kind)
}

/// It goes on, and how far it is is asked of it by the word of its kind: as was heard, or else as its record has it.
async fn out_of_time(cloud: &Cloud, key: &str, heard: Option<Workload>, timeout: Duration) -> CloudError {
    let instance = key.rsplit('/').next().unwrap_or_default();
    let kind = match (heard, instance.parse()) {
        (None, Ok(instance)) => {
            let pair = cloud.store.get(&cloud.keys.instance(instance)).await.ok().and_then(|(pair, _)| pair);
            pair.and_then(|pair| kind_of::<Instance>(&pair.value))
        }
        _ => heard,
    };
    let show = if kind == Some(Workload::Volume) { "volume show" } else { "show" };
    // A part of the first second may have gone before; all of it, where others were waited for.
    let time = match timeout.as_secs_f64().round() {
        0.0 => "in time".to_owned(),
        seconds => format!("after {seconds} s"),
    };
    CloudError::TimedOut(format!(
        "not done {time}; it goes on, `eschedule {show} {instance}` shows how far it is"
    ))
}

#[cfg(test)]
mod tests {
    use ec_placement_client::{PlacementClient, PlacementSection};
    use ec_runtime::Host;
    use ec_store::{MemoryStore, Store, StoreError, Txn};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_etcd_refuses_to_tell_is_not_waited_for_and_an_outage_is() {
        ec_runtime::install_tls_provider();
        let nowhere = PlacementSection::default().settings().unwrap();
        let store = MemoryStore::new();
        let cloud = Cloud {
            host: Host::default(),
            store: Arc::new(store.clone()),
            placement: Arc::new(PlacementClient::new(&nowhere).unwrap()),
            keys: ec_model::Keyspace::new("/r"),
            project: "p".to_owned(),
            user: "u".to_owned(),
            request_id: None,
            notice: |_| (),
        };
        let (node, instance) =
            (NodeId::new(uuid::Uuid::from_u128(2)), InstanceId::new(uuid::Uuid::from_u128(1)));
        store.txn(Txn::new().put(cloud.keys.request(node, instance), "x")).await.unwrap();
        let refuse = |count| store.faults().fail_next(count, StoreError::Refused("permission denied".into()));
        let wait = async || {
            let begun = tokio::time::Instant::now();
            let waited = until_gone(&cloud, node, instance, Duration::from_secs(1800), |_| ()).await;
            (waited.map_err(|error| error.to_string()), begun.elapsed().as_secs())
        };
        // It is away first, and then it refuses.
        store.faults().set_reachable(false);
        refuse(usize::MAX);
        let (waited, ()) = tokio::join!(wait(), async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            store.faults().set_reachable(true);
        });
        assert_eq!(waited.0.unwrap_err(), "etcd refused: permission denied");
        assert!((70..80).contains(&waited.1), "{}", waited.1);
        // For a moment, after which it is away, and then tells.
        let (waited, ()) = tokio::join!(wait(), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            store.faults().set_reachable(false);
            refuse(0);
            tokio::time::sleep(Duration::from_secs(60)).await;
            store.faults().set_reachable(true);
            store.txn(Txn::new().delete(cloud.keys.request(node, instance))).await.unwrap();
        });
        waited.0.unwrap();
        assert!((61..70).contains(&waited.1), "{}", waited.1);
    }

    fn status(state: State, started: bool, reason: Option<&str>) -> Status {
        let (instance, node) = (uuid::Uuid::from_u128(1), uuid::Uuid::from_u128(2));
        Status {
            instance: InstanceId::new(instance),
            node: NodeId::new(node),
            epoch: 1,
            observed_generation: 1,
            power_generation: 1,
            rebuilt: None,
            rescued: None,
            resized: None,
            kind: Workload::Machine,
            volumes: Vec::new(),
            volumes_changing: false,
            volumes_failed: None,
            restarts: 0,
            state,
            reason: reason.map(str::to_owned),
            doing: None,
            progress: None,
            ip: None,
            addresses: Vec::new(),
            name: None,
            console: None,
            access: None,
            since: Timestamp::UNIX_EPOCH,
            started_at: started.then_some(Timestamp::UNIX_EPOCH),
            updated_at: Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_volume_that_is_being_copied_is_waited_for_and_any_other_trouble_is_told() {
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        let told = |why: &str| {
            let failed = Status { volumes_failed: Some(why.to_owned()), ..status(State::Active, true, None) };
            with_volume(instance, 1, instance, false, failed).map(|done| done.is_some())
        };
        assert!(!told("vdb is being copied, and is taken from the guest after that").unwrap());
        let why = told("the guest does not let go of vdb").unwrap_err().to_string();
        assert!(why.contains("does not let go of vdb; its agent tries it again"), "{why}");
    }

    #[test]
    fn a_wish_for_power_is_done_by_a_later_one_only_where_that_comes_to_the_same() {
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        let told = |state, power_generation| Status { power_generation, ..status(state, true, None) };
        let is = |power, status| powered(instance, 5, power, status).map(|done| done.is_some());
        for (state, came_to) in [
            (State::Active, Power::Running),
            (State::Paused, Power::Paused),
            (State::Suspended, Power::Suspended),
            (State::Stopped, Power::Stopped),
        ] {
            for power in [Power::Running, Power::Paused, Power::Suspended, Power::Stopped] {
                assert!(!is(power, told(state, 4)).unwrap(), "{state} before");
                // What the guest did since is its own; but one that ended is not what was waited for.
                let ended = came_to == Power::Stopped && power != Power::Stopped;
                assert_eq!(is(power, told(state, 5)).ok(), (!ended).then_some(true), "{state} {power:?}");
                match is(power, told(state, 6)) {
                    Ok(done) => assert!(done && power == came_to, "{state} {power:?}"),
                    Err(why) => {
                        assert!(power != came_to && why.to_string().contains("something else"), "{why}");
                    }
                }
            }
        }
        for power in [Power::Running, Power::Paused, Power::Suspended, Power::Stopped] {
            assert!(!is(power, told(State::Error, 4)).unwrap(), "{power:?}: it may have failed before");
            for generation in [5, 6] {
                let failed = is(power, told(State::Error, generation)).unwrap_err();
                assert!(failed.to_string().ends_with("is in ERROR"), "{power:?}: {failed}");
            }
        }
    }

    #[test]
    fn a_disk_that_could_not_be_made_anew_is_told_of_by_the_word_of_its_kind() {
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        let at = |second| Timestamp::from_second(second).unwrap();
        let told = |kind, second, failed: Option<&str>| {
            let failed = failed.map(str::to_owned);
            let was = Some(ec_model::Rebuilt { wished_at: at(second), failed });
            rebuilt(instance, at(5), Status { kind, rebuilt: was, ..status(State::Active, true, None) })
        };
        for (kind, word, done) in
            [(Workload::Machine, "instance", "rebuilt"), (Workload::Volume, "volume", "restored")]
        {
            for (told, words) in [
                (told(kind, 5, Some("no image")), "has its old disk still: no image".to_owned()),
                (told(kind, 6, None), format!("was to be {done} once more by somebody else")),
            ] {
                assert_eq!(told.unwrap_err().to_string(), format!("{word} {instance} {words}"));
            }
            assert!(told(kind, 5, None).unwrap().is_some());
        }
    }

    #[test]
    fn a_rescue_is_waited_for_until_it_is_told_or_taken_back_and_its_end_until_it_is_up_again() {
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        let at = |second| Timestamp::from_second(second).unwrap();
        let told = |state, observed_generation, rescued: Option<(i64, Option<&str>)>| Status {
            observed_generation,
            rescued: rescued.map(|(second, failed)| ec_model::Rescued {
                wished_at: at(second),
                failed: failed.map(str::to_owned),
            }),
            ..status(state, true, None)
        };
        let waited = |status| rescued(instance, at(5), 3, status);
        for (state, generation, was) in [
            (State::Active, 2, None),
            (State::Rescuing, 3, None),
            (State::Rescuing, 3, Some((5, None))),
            (State::Starting, 3, Some((5, None))),
            (State::Rescuing, 4, None),
            (State::Unrescuing, 3, Some((4, None))),
        ] {
            assert!(matches!(waited(told(state, generation, was)), Ok(None)), "{state} {generation} {was:?}");
        }
        assert!(waited(told(State::Rescued, 3, Some((5, None)))).unwrap().is_some());
        assert!(waited(told(State::Stopped, 3, Some((5, None)))).unwrap().is_some(), "it ended by itself");
        for (status, why) in [
            (told(State::Active, 3, Some((5, Some("no image")))), "boots from its own disk still: no image"),
            (told(State::Rescuing, 4, Some((6, None))), "once more by somebody else"),
            (told(State::Unrescuing, 4, None), "boot from its own disk again"),
            (told(State::Error, 3, Some((5, None))), "in ERROR"),
        ] {
            let error = waited(status).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }

        let waited = |status| unrescued(instance, 3, status);
        let before = Status { power_generation: 0, ..told(State::Starting, 3, None) };
        for status in [
            told(State::Active, 2, None),
            told(State::Rescued, 3, Some((5, None))),
            told(State::Unrescuing, 3, None),
            before,
        ] {
            assert!(matches!(waited(status), Ok(None)));
        }
        for state in [State::Starting, State::Active, State::Stopped] {
            assert!(waited(told(state, 3, None)).unwrap().is_some(), "{state}");
        }
        assert!(waited(told(State::Error, 3, None)).is_err());
    }

    #[test]
    fn what_is_tried_again_is_waited_for_and_what_will_not_come_is_not() {
        let judged = |state, started, reason| {
            settled(InstanceId::new(uuid::Uuid::from_u128(1)), status(state, started, reason))
        };
        for (state, started) in [(State::Preparing, false), (State::Starting, false), (State::Paused, true)] {
            assert!(
                matches!(judged(state, started, Some("virtlogd is away; trying again")), Ok(None)),
                "{state}"
            );
        }
        assert!(matches!(judged(State::Starting, true, None), Ok(None)), "it boots");
        let told = judged(State::Starting, true, Some("no address was seen in 300 s")).unwrap_err();
        assert!(
            told.to_string().ends_with("is up and has no IP yet: no address was seen in 300 s"),
            "{told}"
        );
        assert!(judged(State::Active, true, None).unwrap().is_some());
        let crashed = |pause| judged(State::Stopped, true, Some(pause));
        assert!(matches!(crashed("it crashed; it is started again in 4 s"), Ok(None)));
        assert!(crashed("it crashed 8 times in a row, and is left now").is_err());
        for state in [State::Error, State::Stopped, State::Destroying, State::Unclaimed] {
            assert!(judged(state, true, None).is_err(), "{state}");
        }
    }
}

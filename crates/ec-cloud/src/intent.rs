//! The intent to place an instance: its record and its name, written before anything is claimed.
//!
//! A claim without a request is taken back by its node, but only where a record says that it is ours. So the
//! record comes first and goes last: whatever moment a command is killed at, what it leaves is found by it.

use std::time::Duration;

use ec_model::{Desired, Instance, InstanceId, PowerWish, Spec, Status, Workload, decode, encode};
use ec_runtime::planted;
use ec_store::{Compare, KeyValue, LeaseId, Revision, Store, StoreError, Txn};
use jiff::SignedDuration;
use tokio::time::Instant;

use crate::{
    Cloud, CloudError, CloudResult, Wanted,
    lookup::{
        Claimed, Found, Known, Read, below, claimed, find, never_ran, read as read_of, somewhere, verb_of_end,
    },
    source,
    tend::clocks_differ,
};

/// A command takes seconds. What is left of one after so long will not be finished by it.
pub(crate) const STALE: SignedDuration = SignedDuration::from_mins(10);

/// How long to find out what became of a write whose answer was lost: a leader is elected meanwhile.
pub(crate) const RESOLVE_TIME: Duration = Duration::from_secs(10);

/// Between two tries.
pub(crate) const PAUSE: Duration = Duration::from_millis(300);

/// Names come and go while we look; so often is enough for anybody.
const TRIES: usize = 5;

/// What a guest shall be called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Naming {
    /// By its uuid alone.
    #[default]
    None,
    /// So.
    Name(String),
    /// This, and the beginning of its uuid.
    Prefix(String),
}

impl Naming {
    /// The name of an instance.
    pub fn of(&self, instance: InstanceId) -> Option<String> {
        match self {
            Self::None => None,
            Self::Name(name) => Some(name.clone()),
            Self::Prefix(prefix) => {
                Some(format!("{prefix}{}", instance.to_string().chars().take(8).collect::<String>()))
            }
        }
    }
}

/// A record that stands in etcd, and the revision at which it does.
#[derive(Debug, Clone)]
pub(crate) struct Intent {
    pub(crate) instance: InstanceId,
    pub(crate) record: Instance,
    pub(crate) revision: Revision,
}

/// How far a command came with an intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached<'a> {
    /// Nothing is claimed under its uuid.
    Intent,
    /// It may hold a claim.
    Claim,
    /// It holds one, and its request may be on its way to this key.
    Request(&'a str),
}

/// How taking something back ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Back {
    /// Nothing is left.
    Nothing,
    /// Its record was written anew, or taken away, by somebody else meanwhile: what is left is theirs to see to.
    Changed,
    /// The request is there after all: the instance will be built.
    Requested,
}

impl Intent {
    /// Writes record and name of a new instance. A name that is taken is refused, with who bears it.
    pub(crate) async fn write(cloud: &Cloud, wanted: &Wanted<'_>, spec: &Spec) -> CloudResult<Self> {
        let made_of = source::origin(cloud, &spec.image).await;
        for _ in 0..TRIES {
            let mut intent = Self::new(cloud, wanted, spec);
            intent.record.made_of.clone_from(&made_of);
            match cloud.store.txn(intent.alone(cloud, intent.put(cloud, Txn::new()))).await {
                Ok(outcome) if outcome.succeeded => {
                    return Ok(Self { revision: outcome.revision, ..intent });
                }
                Ok(_) => {
                    if let Some(name) = &intent.record.name {
                        free(cloud, intent.record.kind, name).await?;
                    }
                }
                Err(StoreError::Unknown(why)) => return intent.resolved(cloud, &why).await,
                Err(error) => return Err(error.into()),
            }
        }
        Err(CloudError::Busy("the name is taken and given back again and again; try again".into()))
    }

    fn new(cloud: &Cloud, Wanted { ask, guest }: &Wanted<'_>, spec: &Spec) -> Self {
        let instance = InstanceId::new(cloud.host.uuid());
        let record = Instance {
            instance,
            kind: guest.kind,
            volumes: Vec::new(),
            attached: None,
            made_of: None,
            project: cloud.project.clone(),
            user: cloud.user.clone(),
            name: guest.naming.of(instance),
            labels: guest.labels.clone(),
            group: ask.group.as_ref().map(|joining| joining.group.name.clone()),
            spec: spec.clone(),
            power: PowerWish::default(),
            restart: guest.restart,
            before: None,
            locked: None,
            request_id: cloud.request_id,
            assigned: None,
            generation: 1,
            created_at: cloud.host.now(),
        };
        Self { instance, record, revision: 0 }
    }

    /// Adds its writing to a transaction.
    fn put(&self, cloud: &Cloud, txn: Txn) -> Txn {
        let key = cloud.keys.instance(self.instance);
        let txn = txn.when(Compare::Absent(key.clone())).put(key, encode(&self.record));
        match &self.record.name {
            Some(name) => txn.put(cloud.keys.name(self.record.kind, &cloud.project, name, self.instance), ""),
            None => txn,
        }
    }

    /// Adds the demand that nobody bears its name.
    fn alone(&self, cloud: &Cloud, txn: Txn) -> Txn {
        match &self.record.name {
            Some(_) if planted("name-unchecked") => txn,
            Some(name) => {
                txn.when(Compare::NoneUnder(cloud.keys.names(self.record.kind, &cloud.project, name)))
            }
            None => txn,
        }
    }

    /// Adds its end to a transaction.
    fn delete(&self, cloud: &Cloud, mut txn: Txn) -> Txn {
        let key = cloud.keys.instance(self.instance);
        txn = txn
            .when(Compare::Unchanged(key.clone(), self.revision))
            .delete(key)
            .delete(cloud.keys.actions(self.instance));
        if let Some(membership) = cloud.keys.membership(&self.record) {
            txn = txn.delete(membership);
        }
        match &self.record.name {
            Some(name) => {
                txn.delete(cloud.keys.name(self.record.kind, &self.record.project, name, self.instance))
            }
            None => txn,
        }
    }

    /// After a write whose answer was lost: it stands, or an error. What may still arrive later holds nothing
    /// but a name, which is taken over when it is old.
    async fn resolved(self, cloud: &Cloud, why: &str) -> CloudResult<Self> {
        (cloud.notice)(&format!(
            "{why}; asking etcd whether it was written, for {} s",
            RESOLVE_TIME.as_secs()
        ));
        match read(&*cloud.store, &cloud.keys.instance(self.instance)).await {
            Some(Some(pair)) => Ok(Self { revision: pair.mod_revision, ..self }),
            _ => Err(CloudError::Unavailable(format!(
                "etcd broke off before anything was claimed: {why}; nothing was requested{}",
                self.record.name.as_ref().map_or_else(String::new, |name| format!(
                    ", and the name `{name}` may stay taken for {} s",
                    STALE.as_secs()
                ))
            ))),
        }
    }

    /// The same intent under a new uuid. Nothing may be claimed under the old one.
    pub(crate) async fn renewed(self, cloud: &Cloud, wanted: &Wanted<'_>) -> CloudResult<Self> {
        let mut next = Self::new(cloud, wanted, &self.record.spec);
        next.record.made_of.clone_from(&self.record.made_of);
        let mut txn = next.put(cloud, self.delete(cloud, Txn::new()));
        if next.record.name != self.record.name {
            txn = next.alone(cloud, txn);
        }
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => Ok(Self { revision: outcome.revision, ..next }),
            Ok(_) => Err(lost(self.instance)),
            Err(StoreError::Unknown(why)) => next.resolved(cloud, &why).await,
            Err(error) => Err(error.into()),
        }
    }

    /// Gives up after a claim whose answer was lost. It may still arrive, and only where there is a record does its
    /// node give it back; so that stays, without the name, until somebody comes across it.
    pub(crate) async fn abandon(self, cloud: &Cloud) -> CloudResult<()> {
        let (released, kept) =
            tokio::join!(cloud.placement.release(self.instance), self.keep_nameless(cloud));
        kept?;
        Ok(released?)
    }

    /// Whatever stands there: somebody may have swept the record away while this host slept.
    async fn keep_nameless(&self, cloud: &Cloud) -> CloudResult<()> {
        let key = cloud.keys.instance(self.instance);
        let nameless = Instance { name: None, created_at: cloud.host.now(), ..self.record.clone() };
        let mut stands = Compare::Unchanged(key.clone(), self.revision);
        for _ in 0..TRIES {
            let mut txn = Txn::new().when(stands).put(key.clone(), encode(&nameless));
            if let Some(name) = &self.record.name {
                txn = txn.delete(cloud.keys.name(self.record.kind, &cloud.project, name, self.instance));
            }
            if cloud.store.txn(txn).await?.succeeded {
                return Ok(());
            }
            stands = match cloud.store.get(&key).await?.0 {
                Some(pair) => Compare::Unchanged(key.clone(), pair.mod_revision),
                None => Compare::Absent(key.clone()),
            };
        }
        Err(lost(self.instance))
    }

    /// Takes back what was begun: the claim where there may be one, then record and name. Where the request may
    /// be on its way, the record is written anew first, so that it cannot arrive any more.
    pub(crate) async fn take_back(mut self, cloud: &Cloud, reached: Reached<'_>) -> CloudResult<Back> {
        if let Reached::Request(key) = reached
            && !planted("request-not-fenced")
        {
            match self.fence(cloud, key).await? {
                Some(revision) => self.revision = revision,
                None => return Ok(Back::Requested),
            }
        }
        if reached != Reached::Intent && !planted("claim-kept") {
            cloud.placement.release(self.instance).await?;
        }
        match cloud.store.txn(self.delete(cloud, Txn::new())).await {
            Ok(outcome) if outcome.succeeded => Ok(Back::Nothing),
            Ok(_) => Ok(Back::Changed),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the record anew, so that a request which demands it as it was cannot arrive any more. Answers its
    /// revision; none where the request is there already.
    async fn fence(&self, cloud: &Cloud, request: &str) -> CloudResult<Option<Revision>> {
        let key = cloud.keys.instance(self.instance);
        let begun = Instant::now();
        while begun.elapsed() < RESOLVE_TIME {
            let fence = Txn::new()
                .when(Compare::Unchanged(key.clone(), self.revision))
                .put(key.clone(), encode(&self.record));
            match cloud.store.txn(fence).await {
                Ok(outcome) if outcome.succeeded => return Ok(Some(outcome.revision)),
                // The request came first, or an earlier try was done after all; or this one was, and left no space.
                Ok(_) | Err(StoreError::Full(_)) => {
                    let ((request, _), (found, _)) =
                        tokio::try_join!(cloud.store.get(request), cloud.store.get(&key))?;
                    let assigned =
                        found.as_ref().map(|pair| decode::<Instance>(&pair.value).map(|r| r.assigned));
                    return match (request, assigned, found) {
                        // Its node may have been quick, and given it up: that says its status.
                        (Some(_), ..) | (None, Some(Ok(Some(_))), _) => Ok(None),
                        // There was no space for it.
                        (None, Some(Ok(None)), Some(pair)) if pair.mod_revision == self.revision => {
                            tokio::time::sleep(PAUSE).await;
                            continue;
                        }
                        (None, Some(Ok(None)), Some(pair)) => Ok(Some(pair.mod_revision)),
                        _ => Err(lost(self.instance)),
                    };
                }
                Err(error) if error.is_transient() => tokio::time::sleep(PAUSE).await,
                Err(error) => return Err(error.into()),
            }
        }
        Err(CloudError::Unavailable(format!(
            "etcd does not answer; `eschedule show {}` will tell whether the request arrived",
            self.instance
        )))
    }
}

pub(crate) fn lost(instance: InstanceId) -> CloudError {
    CloudError::Busy(format!(
        "somebody else took {instance} away while it was being placed; nothing was requested, try again"
    ))
}

/// The key after a write whose answer was lost; `None` where etcd does not answer.
async fn read(store: &dyn Store, key: &str) -> Option<Option<KeyValue>> {
    let begun = Instant::now();
    while begun.elapsed() < RESOLVE_TIME {
        if let Ok((pair, _)) = store.get(key).await {
            return Some(pair);
        }
        tokio::time::sleep(PAUSE).await;
    }
    None
}

/// The instance as it is wanted, from its key; else why that cannot be read.
pub(crate) fn wanted(instance: InstanceId, value: &[u8]) -> Result<Instance, String> {
    let record = decode::<Instance>(value).map_err(|error| error.to_string())?;
    if record.instance == instance {
        Ok(record)
    } else {
        Err(format!("it names instance {}, its key another", record.instance))
    }
}

/// Sees to it that nobody bears the name, where those who do are only left-overs; else the error says who.
pub(crate) async fn free(cloud: &Cloud, kind: Workload, name: &str) -> CloudResult<()> {
    let names = cloud.keys.names(kind, &cloud.project, name);
    let taken = |by: &str| CloudError::Taken {
        name: name.to_owned(),
        project: cloud.project.clone(),
        by: by.to_owned(),
    };
    for key in cloud.store.keys(&names).await? {
        let Ok(instance) = key.trim_start_matches(&names).parse::<InstanceId>() else {
            return Err(taken(&format!("the key {key}, which is none of ours")));
        };
        match clear(cloud, key, instance).await? {
            Left::Nothing => {}
            Left::Stands => return Err(taken(&bearer(cloud, kind, instance).await?)),
            Left::BeingPlaced(record) => return Err(taken(&being_placed(cloud, &record))),
            Left::Unreadable => {
                let key = cloud.keys.instance(instance);
                return Err(taken(&format!("{instance}, whose key {key} this release cannot read")));
            }
        }
    }
    Ok(())
}

/// Looks whether a new one of that kind could bear the name now; the error says who does. Nothing is changed.
///
/// # Errors
/// [`CloudError::Taken`].
pub async fn name_is_free(cloud: &Cloud, kind: Workload, name: &str) -> CloudResult<()> {
    let names = cloud.keys.names(kind, &cloud.project, name);
    for instance in below(cloud, &names, &names).await? {
        match find(cloud, instance).await {
            // Somebody took its record away by hand.
            Err(CloudError::NotFound(_)) => {}
            Ok(Found::Placed(known)) if known.record.is_none() && !is_wanted(&known) => {}
            // A killed command left it.
            Ok(Found::Unplaced(record, _)) if young_for(cloud, &record).is_none() => {
                trust_age(cloud, &record).await?;
            }
            found => {
                let by = match found {
                    Ok(Found::Unplaced(record, _)) => being_placed(cloud, &record),
                    _ => bearer(cloud, kind, instance).await?,
                };
                let (name, project) = (name.to_owned(), cloud.project.clone());
                return Err(CloudError::Taken { name, project, by });
            }
        }
    }
    Ok(())
}

/// Who bears a name; of one that failed besides how it is given back, for as long as that can be read of it.
async fn bearer(cloud: &Cloud, kind: Workload, instance: InstanceId) -> CloudResult<String> {
    let pair = cloud.store.get(&cloud.keys.instance(instance)).await?.0;
    let Some(pair) = pair else {
        return Ok(format!("{instance}, whose record etcd lacks: `eschedule heal` writes it anew"));
    };
    let record = wanted(instance, &pair.value).ok();
    let has_failed = match &record {
        Some(record) => failed(cloud, record).await?.is_some(),
        None => false,
    };
    let verb = verb_of_end(kind);
    if record.is_some_and(|record| record.assigned.is_none() && young_for(cloud, &record).is_none()) {
        return Ok(format!(
            "{instance}, of which etcd lost all but that: `eschedule heal` brings it back, `eschedule {verb} {instance}` ends it"
        ));
    }
    Ok(match has_failed {
        true => {
            format!(
                "{instance}, which is in ERROR and never ran: `eschedule {verb} {instance}` frees the name"
            )
        }
        false => instance.to_string(),
    })
}

/// Whether it failed before it ever ran, and was given up: its node tells so, and no request has it built any more. Answers what is
/// to be compared by who acts upon that: a request that comes back is written with the record.
pub(crate) async fn failed(cloud: &Cloud, record: &Instance) -> CloudResult<Option<[Compare; 2]>> {
    let (Some(assigned), instance) = (record.assigned, record.instance) else { return Ok(None) };
    let request = cloud.keys.request(assigned.node, instance);
    if cloud.store.get(&request).await?.0.is_some() {
        return Ok(None);
    }
    let key = cloud.keys.status(assigned.node, instance);
    let pair = cloud.store.get(&key).await?.0;
    let Read::Here(status, revision) = read_of::<Status>(pair.as_ref(), assigned.node, instance) else {
        return Ok(None);
    };
    Ok(never_ran(&status, assigned).then_some([Compare::Absent(request), Compare::Unchanged(key, revision)]))
}

/// What is left of a key that goes with an instance's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Left {
    Nothing,
    /// There is such an instance.
    Stands,
    /// A command may still be at it.
    BeingPlaced(Box<Instance>),
    /// This release cannot read the record.
    Unreadable,
}

/// Takes a name or a membership away whose instance is gone, or only left over; with the instance then.
pub(crate) async fn clear(cloud: &Cloud, key: String, instance: InstanceId) -> CloudResult<Left> {
    let Some(pair) = cloud.store.get(&cloud.keys.instance(instance)).await?.0 else {
        let is_lost = match find(cloud, instance).await {
            Ok(Found::Placed(known)) => is_wanted(&known),
            // Written at this moment.
            Ok(Found::Unplaced(..)) => true,
            Err(CloudError::NotFound(_)) => false,
            Err(error) => return Err(error),
        };
        return Ok(match is_lost || !drop_alone(cloud, key, instance).await? {
            true => Left::Stands,
            false => Left::Nothing,
        });
    };
    let Ok(record) = wanted(instance, &pair.value) else { return Ok(Left::Unreadable) };
    let is_at_it = record.assigned.is_none() && young_for(cloud, &record).is_some();
    let unplaced = is_at_it.then(|| Box::new(record.clone()));
    Ok(match sweep(cloud, record, pair.mod_revision).await? {
        true => Left::Nothing,
        false => unplaced.map_or(Left::Stands, Left::BeingPlaced),
    })
}

/// Whether one is asked for still, as far as anybody can read that: where its record is gone, `heal` makes it of the request, with its
/// name and its place in a group.
pub(crate) fn is_wanted(known: &Known) -> bool {
    match &known.request {
        Read::Here(request, _) => request.desired == Desired::Active,
        Read::Absent => false,
        Read::Unreadable(_) => true,
    }
}

/// For how long a command may still be at one that is not placed, by its record; none where that was killed. One that began later
/// than now by another clock was killed, too, where that is far ahead: its name would be taken until then.
pub(crate) fn young_for(cloud: &Cloud, record: &Instance) -> Option<SignedDuration> {
    let left = STALE - cloud.host.now().duration_since(record.created_at);
    Some(left).filter(|left| left.is_positive() && *left <= STALE * 2)
}

/// An error where the clock of this host may be why a command that is at it seems to have been killed. Who began it wrote when, by a
/// clock of its own.
pub(crate) async fn trust_age(cloud: &Cloud, record: &Instance) -> CloudResult<()> {
    let Some(why) = clocks_differ(cloud.placement.compare_clocks().await) else { return Ok(()) };
    Err(CloudError::Refused(format!(
        "{why}: a command may still be at {}, which seems to be left of one of {} that was killed, so it stays, with its name",
        record.instance, record.created_at
    )))
}

/// What is to be said of one that a command may still be at, and for how long it is in the way at most.
fn being_placed(cloud: &Cloud, record: &Instance) -> String {
    let left = young_for(cloud, record).unwrap_or_default();
    format!(
        "{}, which is being placed since {}; if its command was killed or lost etcd, the name is free in {} s",
        record.instance,
        record.created_at,
        left.as_secs().max(1)
    )
}

/// Takes a key away that goes with an instance's record, where that is not there: both are written and deleted together, so
/// somebody took the record away by hand. A member stays whose node is asked for it, or tells of it: `heal` brings it back where it
/// was. Whether it was that.
pub(crate) async fn drop_alone(cloud: &Cloud, key: String, instance: InstanceId) -> CloudResult<bool> {
    let mut txn = Txn::new().when(Compare::Absent(cloud.keys.instance(instance)));
    if let Ok((node, _)) = cloud.keys.parse_member(&key) {
        txn = txn
            .when(Compare::Absent(cloud.keys.request(node, instance)))
            .when(Compare::Absent(cloud.keys.status(node, instance)));
    }
    Ok(cloud.store.txn(txn.delete(key)).await?.succeeded)
}

/// Takes away what is left of a command that was killed, or of an instance that failed long ago: no request, no
/// status, and old. Whether it was that; an error where this host's clock cannot tell how old it is.
///
/// Once it was requested its claim is its node's matter: the guest may be there although somebody deleted its keys, and
/// then it must stay counted. So only what holds nothing any more is taken away then. Nor does a record without a node tell that it
/// was not requested, where any node tells of it: etcd was put back to the moment before.
pub(crate) async fn sweep(cloud: &Cloud, record: Instance, revision: Revision) -> CloudResult<bool> {
    if young_for(cloud, &record).is_some() && !planted("sweep-the-young") {
        return Ok(false);
    }
    trust_age(cloud, &record).await?;
    // Whoever follows the command that left it finds its end, too.
    let cloud = &cloud.on_behalf(record.request_id.or(cloud.request_id));
    let instance = record.instance;
    let key = cloud.keys.instance(instance);
    // Written anew, so that a command which only slept cannot finish any more.
    let mut fence = Txn::new().when(Compare::Unchanged(key.clone(), revision)).put(key, encode(&record));
    let node = match record.node() {
        Some(_) if cloud.placement.allocations(instance).await?.is_some() => return Ok(false),
        None if somewhere(cloud, instance).await?.is_some() => return Ok(false),
        Some(node) => Some(node),
        // It may be about to tell.
        None => match claimed(cloud, instance).await? {
            Claimed::Of(node) => Some(node),
            Claimed::Nothing | Claimed::OfStorage => None,
        },
    };
    if let Some(node) = node {
        if !planted("sweep-asked-for") {
            fence = fence.when(Compare::Absent(cloud.keys.request(node, instance)));
        }
        fence = fence.when(Compare::Absent(cloud.keys.status(node, instance)));
    }
    let outcome = cloud.store.txn(fence).await?;
    if !outcome.succeeded {
        return Ok(false);
    }
    let reached = if record.assigned.is_some() { Reached::Intent } else { Reached::Claim };
    let left = Intent { instance, record, revision: outcome.revision };
    // What was done to it may have hung on its own lease, after a wish to destroy it; now nothing does, unless its user has destroyed it
    // meanwhile.
    if left.take_back(cloud, reached).await? == Back::Nothing {
        cloud.store.revoke(LeaseId::of_key(&cloud.keys.actions(instance))).await?;
    }
    Ok(true)
}

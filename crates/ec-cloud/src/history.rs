//! What was done to an instance: noted with what is wanted, in the same transaction, and read again with what its nodes
//! say came of it.

use std::collections::BTreeSet;

use ec_model::{
    Action, ActionVerb, Actions, Doc, Instance, InstanceId, NodeId, Outcomes, Status, Workload, decode,
    encode,
};
use ec_plan::history::{Fate, Happening, RETENTION, told};
use ec_store::{Compare, LeaseId, Txn};
use jiff::Timestamp;

use crate::{
    Cloud, CloudError, CloudResult,
    lookup::{below, is_beginning, resolve, resolve_name},
};

/// Something that is asked of an instance.
pub(crate) struct Asked {
    pub(crate) instance: InstanceId,
    pub(crate) node: NodeId,
    pub(crate) verb: ActionVerb,
    pub(crate) detail: Option<String>,
    pub(crate) at: Timestamp,
    /// Of what is wanted since.
    pub(crate) generation: u64,
    /// Done by being written down, where the verb alone does not say so.
    pub(crate) at_once: bool,
    /// Which volume is to be attached or detached.
    pub(crate) volume: Option<InstanceId>,
}

impl Asked {
    fn by(self, cloud: &Cloud) -> Action {
        let Self { node, verb, detail, at, generation, at_once, volume, .. } = self;
        let (user, project, request_id) = (cloud.user.clone(), cloud.project.clone(), cloud.request_id);
        let asked_at = Some(cloud.host.now()).filter(|now| *now < at);
        Action { at, asked_at, verb, detail, user, project, node, generation, at_once, volume, request_id }
    }

    /// By what it is found again.
    pub(crate) fn mark(&self) -> Mark {
        Mark { instance: self.instance, verb: self.verb, at: self.at, generation: self.generation }
    }

    /// Of the instance that is made.
    pub(crate) fn create(record: &Instance, node: NodeId) -> Self {
        let (verb, at, generation) = (ActionVerb::Create, record.created_at, record.generation);
        Self::new(record.instance, node, verb, at, generation)
    }

    /// In no other words than the verb.
    pub(crate) fn new(
        instance: InstanceId,
        node: NodeId,
        verb: ActionVerb,
        at: Timestamp,
        generation: u64,
    ) -> Self {
        Self { instance, node, verb, detail: None, at, generation, at_once: false, volume: None }
    }
}

/// By what a command finds again what it asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    instance: InstanceId,
    verb: ActionVerb,
    at: Timestamp,
    generation: u64,
}

/// What a command asked for, and what that comes to, where etcd did not answer: it may have been written, or be so yet.
#[derive(Debug)]
pub(crate) struct Unheard<T>(Vec<(Mark, T)>);

impl<T> Default for Unheard<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Unheard<T> {
    pub(crate) fn note(&mut self, mark: Mark, comes_to: T) {
        self.0.push((mark, comes_to));
    }

    /// What the last of it comes to.
    pub(crate) fn last(&self) -> Option<&T> {
        self.0.last().map(|(_, comes_to)| comes_to)
    }

    /// What comes of the one that was written after all, whatever others wrote since: its line was written with it.
    ///
    /// # Errors
    /// Nobody can read that.
    pub(crate) async fn written(&self, cloud: &Cloud) -> CloudResult<Option<&T>> {
        let Some((Mark { instance, .. }, _)) = self.0.first() else { return Ok(None) };
        let Some(pair) = cloud.store.get(&cloud.keys.actions(*instance)).await?.0 else { return Ok(None) };
        let actions = decode::<Actions>(&pair.value).map_err(|error| {
            CloudError::Unavailable(format!(
                "etcd did not answer whether it was asked for, and what was done to {instance} cannot be read ({error}); look at it before \
                 you ask again"
            ))
        })?;
        let is_of = |mark: &Mark, action: &Action| {
            (action.verb, action.at, action.generation, action.request_id)
                == (mark.verb, mark.at, mark.generation, cloud.request_id)
        };
        let mut all = self.0.iter();
        let written = all.find(|(mark, _)| actions.actions.iter().any(|action| is_of(mark, action)));
        Ok(written.map(|(_, comes_to)| comes_to))
    }

    /// What is told where it is refused by now: what was asked before may have been written, or be so yet.
    pub(crate) fn doubt(&self, error: CloudError) -> CloudError {
        let why = match error {
            CloudError::Refused(why) if !self.0.is_empty() => format!("it is refused: {why}"),
            // It may be gone with all that was asked of it.
            CloudError::NotFound(why) | CloudError::Busy(why) if !self.0.is_empty() => why,
            error => return error,
        };
        CloudError::Unavailable(format!(
            "etcd did not answer whether it was asked for, and by now {why}; look at it before you ask again"
        ))
    }
}

/// Adds the beginning of a history to the transaction that makes the instance.
pub(crate) fn begin(cloud: &Cloud, asked: Asked, txn: Txn) -> Txn {
    let instance = asked.instance;
    let actions = Actions { instance, actions: vec![asked.by(cloud)] };
    txn.put(cloud.keys.actions(instance), encode(&actions))
}

/// Adds what is asked for to its transaction, which then demands that nobody else added something meanwhile. What a later
/// release wrote stays as it is.
pub(crate) async fn note(cloud: &Cloud, asked: Asked, txn: Txn, lease: Option<LeaseId>) -> CloudResult<Txn> {
    let instance = asked.instance;
    let key = cloud.keys.actions(instance);
    let (mut actions, unchanged) = match cloud.store.get(&key).await?.0 {
        Some(pair) => match Doc::<Actions>::decode(&pair.value) {
            Ok(actions) => (actions, Compare::Unchanged(key.clone(), pair.mod_revision)),
            Err(_) => return Ok(txn),
        },
        None => (Doc::new(Actions { instance, actions: Vec::new() }), Compare::Absent(key.clone())),
    };
    actions.record.push(asked.by(cloud));
    let (txn, value) = (txn.when(unchanged), actions.encode());
    Ok(match lease {
        Some(lease) => txn.put_leased(key, value, lease),
        None => txn.put(key, value),
    })
}

/// The last of these things that was asked of the instance, as far as is known.
pub(crate) async fn last_of(
    cloud: &Cloud,
    instance: InstanceId,
    verbs: &[ActionVerb],
) -> CloudResult<Option<ActionVerb>> {
    let pair = cloud.store.get(&cloud.keys.actions(instance)).await?.0;
    let actions = pair.and_then(|pair| decode::<Actions>(&pair.value).ok());
    let verb = |action: &Action| verbs.contains(&action.verb).then_some(action.verb);
    Ok(actions.and_then(|actions| actions.actions.iter().rev().find_map(verb)))
}

/// The same for a wish to destroy: the history goes by itself some time after. The lease is not given back where the
/// wish was not written: it may be used by another's.
pub(crate) async fn note_end(cloud: &Cloud, asked: Asked, txn: Txn) -> CloudResult<Txn> {
    let key = cloud.keys.actions(asked.instance);
    let lease = cloud.store.grant_for(&key, RETENTION).await?;
    note(cloud, asked, txn, Some(lease)).await
}

/// Has the history of an instance of which nothing else is left go by itself some time from now, where it would not: somebody took all
/// else away by hand.
pub(crate) async fn let_fade(cloud: &Cloud, instance: InstanceId) -> CloudResult<()> {
    let key = cloud.keys.actions(instance);
    let Some(pair) = cloud.store.get(&key).await?.0.filter(|pair| pair.lease.is_none()) else {
        return Ok(());
    };
    let lease = cloud.store.grant_for(&key, RETENTION).await?;
    let txn = Txn::new()
        .when(Compare::Unchanged(key.clone(), pair.mod_revision))
        .when(Compare::Absent(cloud.keys.instance(instance)));
    cloud.store.txn(txn.put_leased(key, pair.value, lease)).await?;
    Ok(())
}

/// The instance that is called so, or else the volume, of which there is a history, too.
async fn machine_or_volume(cloud: &Cloud, text: &str) -> CloudResult<InstanceId> {
    // A volume's name may be the beginning of a uuid, too.
    for kind in [Workload::Machine, Workload::Volume] {
        match resolve_name(cloud, kind, text).await {
            Err(CloudError::NotFound(_)) => {}
            resolved => return resolved,
        }
    }
    resolve(cloud, text).await
}

/// What was done to the instance, or else the volume, that is called so, and what came of it, in the order of time. Also of one that was
/// destroyed, for a day, by its uuid.
///
/// # Errors
/// Nothing is known of it: [`CloudError::NotFound`].
pub async fn history(cloud: &Cloud, text: &str) -> CloudResult<Vec<Happening>> {
    let instance = match machine_or_volume(cloud, text).await {
        Err(CloudError::NotFound(why)) if is_beginning(&text.to_ascii_lowercase()) => {
            let actions = cloud.keys.all_actions();
            let beginning = text.to_ascii_lowercase();
            match below(cloud, &format!("{actions}{beginning}"), &actions).await?[..] {
                [instance] => instance,
                _ => return Err(CloudError::NotFound(why)),
            }
        }
        // Names go with the wish to destroy.
        Err(CloudError::NotFound(why)) => {
            return Err(CloudError::NotFound(format!(
                "{why}; one that was destroyed is told of for a day, by its uuid"
            )));
        }
        resolved => resolved?,
    };
    let key = cloud.keys.actions(instance);
    let Some(pair) = cloud.store.get(&key).await?.0 else {
        return Err(CloudError::NotFound(format!(
            "nothing is recorded of what was done to {instance}: it never was, or was destroyed more than a day ago"
        )));
    };
    let actions: Actions = decode(&pair.value).map_err(|error| {
        CloudError::Unreadable(format!("the history of {instance} at {key} cannot be read: {error}"))
    })?;
    let nodes: BTreeSet<NodeId> = actions.actions.iter().map(|action| action.node).collect();
    let mut outcomes: Vec<Outcomes> = Vec::new();
    let mut statuses: Vec<Status> = Vec::new();
    let mut unread: BTreeSet<NodeId> = BTreeSet::new();
    for node in nodes {
        // Before what came of it, which is never older then.
        let status = cloud.store.get(&cloud.keys.status(node, instance)).await?.0;
        statuses.extend(status.and_then(|pair| decode(&pair.value).ok()));
        let key = cloud.keys.outcomes(node, instance);
        match cloud.store.get(&key).await?.0.map(|pair| decode::<Outcomes>(&pair.value)) {
            Some(Ok(of)) => outcomes.push(of),
            // What others tell of is no less known.
            Some(Err(error)) => {
                (cloud.notice)(&format!("what came of it on node {node}, at {key}, cannot be read: {error}"));
                unread.insert(node);
            }
            None => {}
        }
    }
    let mut told = told(&actions, &outcomes, &statuses);
    // That these are done their status tells, too.
    let is_by_status = |verb| {
        use ActionVerb::{AttachVolume, DetachVolume, Set};
        matches!(verb, Set | AttachVolume | DetachVolume)
    };
    for happening in told.iter_mut().filter(|happening| unread.contains(&happening.node)) {
        let is_known = |verb: ActionVerb| {
            verb.is_done_at_once() || (is_by_status(verb) && happening.outcome == Some(Fate::Done))
        };
        if happening.verb.is_some_and(|verb| !is_known(verb)) {
            happening.outcome = Some(Fate::Unknown);
        }
    }
    Ok(told)
}

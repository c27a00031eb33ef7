//! What the agent knows of every instance: the facts that decisions are made from.
//!
//! Only the driver's task owns it, so that there is one order of all changes.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use ec_model::{
    Desired, InstanceId, Keyspace, NodeId, Observed, Request, Resources, RunState, Status, decode,
};
use ec_plan::{Allocation, Facts, KnownStatus, RecordFacts, StatusFacts, Wanted};
use ec_runtime::planted;
use ec_store::{KeyValue, Revision};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A request as it was read.
#[derive(Debug, Clone)]
pub(crate) struct RequestEntry {
    /// The record, or why it cannot be read.
    pub(crate) record: Result<Request, String>,
    /// The revision that wrote it.
    pub(crate) revision: Revision,
}

/// Work under way for an instance; there is never more than one.
#[derive(Debug)]
pub(crate) struct Running {
    /// Asks it to stop at its next safe point.
    pub(crate) cancel: CancellationToken,
    /// What it was begun for.
    pub(crate) wanted: Wanted,
}

/// When to try again what failed for a passing reason.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Retry {
    /// Not before.
    pub(crate) at: Instant,
    /// How often it has failed in a row.
    pub(crate) failures: u32,
}

/// A status as it lies in etcd.
#[derive(Debug, Clone, Default)]
pub(crate) enum StatusEntry {
    /// There is none.
    #[default]
    Absent,
    /// It cannot be read.
    Unreadable,
    /// It was read, or written by us.
    Known(Box<Status>),
}

impl StatusEntry {
    /// The status, where it can be read.
    pub(crate) fn known(&self) -> Option<&Status> {
        match self {
            Self::Known(status) => Some(status),
            Self::Absent | Self::Unreadable => None,
        }
    }
}

/// Everything known of one instance.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// Its request.
    pub(crate) request: Option<RequestEntry>,
    /// Its status as last read or written.
    pub(crate) status: StatusEntry,
    /// What the hypervisor has.
    observed: Observed,
    /// Work of ours changed what the hypervisor has, and it could not be asked since.
    unseen: bool,
    /// The node's own record.
    pub(crate) record: RecordFacts,
    /// Its user destroyed it here.
    pub(crate) buried: bool,
    /// What placement has; `None` is not known.
    pub(crate) allocation: Option<Held>,
    /// Whether control tools asked for it, where that was looked up.
    pub(crate) asked_for: Option<bool>,
    /// Work under way.
    pub(crate) running: Option<Running>,
    /// After a passing failure.
    pub(crate) retry: Option<Retry>,
    /// Since when its image cannot be had, and nothing else is wrong.
    pub(crate) without_image: Option<Instant>,
    /// A time at which a decision changes by itself.
    pub(crate) wake: Option<Instant>,
    /// For how long an address was looked for in vain since the guest runs. Counts only looks that worked.
    searched: Duration,
    last_search: Option<Instant>,
    /// When it was let go on last, after a pause.
    pub(crate) resumed: Option<Instant>,
    /// What was reported to the operator last, so that it is said once.
    pub(crate) reported: Option<&'static str>,
    /// When our own work last changed what a look sees; looks begun before say nothing about it.
    pub(crate) touched: u64,
}

/// What placement holds for an instance.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    /// Nothing.
    Nothing,
    /// Something, but from other nodes' providers.
    Elsewhere,
    /// These amounts, from this node's providers.
    Here {
        /// By class.
        amounts: Resources,
        /// When this agent saw it first.
        since: Instant,
    },
}

impl Held {
    /// The amounts, where there are some from this node.
    pub(crate) fn amounts(&self) -> Option<Resources> {
        match self {
            Self::Here { amounts, .. } => Some(amounts.clone()),
            Self::Nothing | Self::Elsewhere => None,
        }
    }
}

/// Between two searches for an address more time may pass in which nobody looked; no more than this counts.
const SEARCH_STEP: Duration = Duration::from_secs(1);

impl Entry {
    /// What the request wants.
    pub(crate) fn wanted(&self) -> Wanted {
        match &self.request {
            None => Wanted::Nothing,
            Some(RequestEntry { record: Err(_), .. }) => Wanted::Unreadable,
            Some(RequestEntry { record: Ok(request), .. }) => match request.desired {
                Desired::Active => Wanted::Active,
                Desired::Destroyed => Wanted::Destroyed,
            },
        }
    }

    /// The facts, as the decision wants them.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            wanted: self.wanted(),
            status: match &self.status {
                StatusEntry::Absent => StatusFacts::Absent,
                StatusEntry::Unreadable => StatusFacts::Unreadable,
                StatusEntry::Known(status) => StatusFacts::Known(KnownStatus {
                    state: status.state,
                    reason: status.reason.clone(),
                    has_address: status.ip.is_some(),
                    start_noted: status.started_at.is_some(),
                }),
            },
            observed: self.observed,
            record: self.record,
            buried: self.buried || (planted("unrequested-is-destroyed") && self.request.is_none()),
            allocation: match &self.allocation {
                None => Allocation::Unknown,
                Some(Held::Nothing) => Allocation::Absent,
                Some(Held::Elsewhere) => Allocation::Elsewhere,
                Some(Held::Here { since, .. }) => Allocation::Held { seen_for: since.elapsed() },
            },
            asked_for: self.asked_for,
            searched: self.searched,
        }
    }

    /// What the hypervisor has.
    pub(crate) fn observed(&self) -> Observed {
        self.observed
    }

    /// Whether it is known what the hypervisor has; else nothing but a destroy may be decided.
    pub(crate) fn is_seen(&self) -> bool {
        !self.unseen
    }

    /// What the hypervisor has is not what it had, and nobody knows what it is.
    pub(crate) fn lose_sight(&mut self) {
        self.unseen = true;
    }

    /// Takes what the hypervisor has now.
    pub(crate) fn observe(&mut self, observed: Observed) {
        self.unseen = false;
        if observed.domain != Some(RunState::Running) {
            (self.searched, self.last_search) = (Duration::ZERO, None);
        }
        self.observed = observed;
    }

    /// For how long an address was looked for in vain.
    pub(crate) fn searched(&self) -> Duration {
        self.searched
    }

    /// Counts a search for an address that worked and found none; whether it made `limit` full.
    pub(crate) fn searched_in_vain(&mut self, limit: Duration) -> bool {
        let now = Instant::now();
        let before = self.searched;
        self.searched += self.last_search.map_or(Duration::ZERO, |last| (now - last).min(SEARCH_STEP));
        self.last_search = Some(now);
        before < limit && self.searched >= limit
    }

    /// Plans another try, later each time: half a second, doubled up to half a minute.
    pub(crate) fn retry_later(&mut self) {
        let failures = self.retry.map_or(0, |retry| retry.failures) + 1;
        let pause =
            Duration::from_millis(500 << failures.min(7).saturating_sub(1)).min(Duration::from_secs(30));
        self.retry = Some(Retry { at: Instant::now() + pause, failures });
    }

    /// Whether it was let go on within this time.
    pub(crate) fn resumed_lately(&self, within: Duration) -> bool {
        self.resumed.is_some_and(|resumed| resumed.elapsed() < within)
    }

    /// Decides again after so long.
    pub(crate) fn wake_in(&mut self, after: Duration) {
        self.wake = Some(Instant::now() + after);
    }

    fn is_empty(&self) -> bool {
        self.request.is_none()
            && matches!(self.status, StatusEntry::Absent)
            && self.observed == Observed::default()
            && !self.unseen
            && self.record == RecordFacts::Absent
            && !self.buried
            && self.running.is_none()
            && !matches!(self.allocation, Some(Held::Here { .. }))
    }
}

/// All instances of this node.
#[derive(Debug, Default)]
pub(crate) struct World {
    /// In order, so that what is done for all of them is done in the same order each time.
    entries: BTreeMap<InstanceId, Entry>,
    /// Counts looks and changes, to tell an old look from a new change.
    clock: u64,
}

impl World {
    /// The moment of a look that begins now.
    pub(crate) fn begin_look(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The entry, made where there is none, marked as changed now.
    pub(crate) fn touch(&mut self, instance: InstanceId) -> &mut Entry {
        self.clock += 1;
        let entry = self.entries.entry(instance).or_default();
        entry.touched = self.clock;
        entry
    }

    /// The entry, where there is one.
    pub(crate) fn get_mut(&mut self, instance: InstanceId) -> Option<&mut Entry> {
        self.entries.get_mut(&instance)
    }

    /// The entry, where there is one.
    pub(crate) fn get(&self, instance: InstanceId) -> Option<&Entry> {
        self.entries.get(&instance)
    }

    /// Every instance known.
    pub(crate) fn ids(&self) -> Vec<InstanceId> {
        self.entries.keys().copied().collect()
    }

    /// Every entry.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (InstanceId, &Entry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    /// Every entry, to change.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (InstanceId, &mut Entry)> {
        self.entries.iter_mut().map(|(id, entry)| (*id, entry))
    }

    /// Drops the entry if nothing is known any more.
    pub(crate) fn forget_if_empty(&mut self, instance: InstanceId) {
        if self.entries.get(&instance).is_some_and(Entry::is_empty) {
            self.entries.remove(&instance);
        }
    }

    /// Takes a request as read from its key. Answers whose it is, where the key is one of ours.
    pub(crate) fn put_request(
        &mut self,
        keys: &Keyspace,
        node: NodeId,
        pair: &KeyValue,
    ) -> Option<InstanceId> {
        let instance = request_instance(keys, node, &pair.key)?;
        let record = decode::<Request>(&pair.value).map_err(|error| error.to_string()).and_then(|request| {
            if request.instance == instance {
                Ok(request)
            } else {
                Err(format!("it names instance {}, its key another", request.instance))
            }
        });
        // Not marked as changed: a look under way says nothing of requests, and all of the rest.
        let entry = self.entries.entry(instance).or_default();
        // A new wish is tried at once, whatever failed before.
        entry.retry = None;
        entry.request = Some(RequestEntry { record, revision: pair.mod_revision });
        Some(instance)
    }

    /// Takes note that a request's key is gone.
    pub(crate) fn delete_request(&mut self, keys: &Keyspace, node: NodeId, key: &str) -> Option<InstanceId> {
        let instance = request_instance(keys, node, key)?;
        if let Some(entry) = self.entries.get_mut(&instance) {
            entry.request = None;
        }
        Some(instance)
    }

    /// Takes the whole list of requests: what is not on it is gone.
    pub(crate) fn reset_requests(&mut self, keys: &Keyspace, node: NodeId, pairs: &[KeyValue]) {
        let listed: HashSet<InstanceId> =
            pairs.iter().filter_map(|pair| self.put_request(keys, node, pair)).collect();
        for (instance, entry) in &mut self.entries {
            if !listed.contains(instance) {
                entry.request = None;
            }
        }
    }
}

fn request_instance(keys: &Keyspace, node: NodeId, key: &str) -> Option<InstanceId> {
    match keys.parse_request(key) {
        Ok((owner, instance)) if owner == node => Some(instance),
        Ok(_) => None,
        Err(error) => {
            tracing::warn!(%error, "a key under this node's prefix is not a request; left alone");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use ec_model::{RECORD_VERSION, encode};

    use super::*;

    #[test]
    fn a_request_that_comes_during_a_look_does_not_make_the_look_worthless() {
        let (keys, node) = (Keyspace::default(), NodeId::new(uuid::Uuid::from_u128(1)));
        let instance = InstanceId::new(uuid::Uuid::from_u128(2));
        let request = Request {
            version: RECORD_VERSION,
            instance,
            desired: Desired::Active,
            name: None,
            resources: Resources::default(),
            image: None,
            keys: vec![],
            user_data_bytes: None,
            token_required: false,
            project: String::new(),
            user: String::new(),
            created_at: jiff::Timestamp::UNIX_EPOCH,
        };
        let mut world = World::default();
        let begun = world.begin_look();
        let key = keys.request(node, instance);
        let pair = KeyValue {
            key,
            value: encode(&request),
            create_revision: 5,
            mod_revision: 5,
            version: 1,
            lease: None,
        };
        assert_eq!(world.put_request(&keys, node, &pair), Some(instance));
        assert!(world.get(instance).unwrap().touched < begun);
        world.touch(instance);
        assert!(world.get(instance).unwrap().touched > begun, "our own work does");
    }
}

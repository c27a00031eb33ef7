//! What the agent knows of every instance: the facts that decisions are made from.
//!
//! Only the driver's task owns it, so that there is one order of all changes.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use ec_model::{Desired, InstanceId, Keyspace, NodeId, Observed, Request, Resources, Status, decode};
use ec_plan::{Allocation, Facts, StatusFacts, Wanted};
use ec_store::{KeyValue, Revision};
use jiff::Timestamp;
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

/// Everything known of one instance.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// Its request.
    pub(crate) request: Option<RequestEntry>,
    /// Its status as last written.
    pub(crate) status: Option<Status>,
    /// What the hypervisor has.
    pub(crate) observed: Observed,
    /// Whether the node's record is there.
    pub(crate) record: bool,
    /// What placement has; `None` is not known.
    pub(crate) allocation: Option<Held>,
    /// Work under way.
    pub(crate) running: Option<Running>,
    /// After a passing failure.
    pub(crate) retry: Option<Retry>,
    /// A time at which a decision changes by itself.
    pub(crate) wake: Option<Timestamp>,
    /// What was reported to the operator last, so that it is said once.
    pub(crate) reported: Option<&'static str>,
    /// When our own work last changed what a look sees; looks begun before say nothing about it.
    pub(crate) touched: u64,
}

/// What placement holds for an instance.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    /// Amounts; nothing where there is no allocation.
    pub(crate) amounts: Option<Resources>,
    /// When it was first seen.
    pub(crate) since: Timestamp,
}

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
            status: self.status.as_ref().map(|status| StatusFacts {
                state: status.state,
                has_address: status.ip.is_some(),
                started_at: status.started_at,
            }),
            observed: self.observed,
            record: self.record,
            allocation: match &self.allocation {
                None => Allocation::Unknown,
                Some(Held { amounts: None, .. }) => Allocation::Absent,
                Some(Held { amounts: Some(_), since }) => Allocation::Held { since: *since },
            },
        }
    }

    /// Plans another try, later each time: half a second, doubled up to half a minute.
    pub(crate) fn retry_later(&mut self) {
        let failures = self.retry.map_or(0, |retry| retry.failures) + 1;
        let pause =
            Duration::from_millis(500 << failures.min(7).saturating_sub(1)).min(Duration::from_secs(30));
        self.retry = Some(Retry { at: Instant::now() + pause, failures });
    }

    fn is_empty(&self) -> bool {
        self.request.is_none()
            && self.status.is_none()
            && self.observed == Observed::default()
            && !self.record
            && self.running.is_none()
            && self.allocation.as_ref().is_none_or(|held| held.amounts.is_none())
    }
}

/// All instances of this node.
#[derive(Debug, Default)]
pub(crate) struct World {
    entries: HashMap<InstanceId, Entry>,
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
            user_data: None,
            project: String::new(),
            user: String::new(),
            created_at: Timestamp::UNIX_EPOCH,
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

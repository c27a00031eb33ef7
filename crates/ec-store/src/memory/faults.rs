//! Faults of the store in memory, on request.

use tokio::time::Instant;

use super::{MemoryStore, state::State};
use crate::{StoreError, StoreResult};

/// What shall go wrong.
#[derive(Default)]
pub(super) struct Plan {
    /// Operations to come that fail before anything is done.
    fail: Option<(usize, StoreError)>,
    /// Writes to come that are done and answered with "unknown".
    lose_answers: usize,
    /// What every write fails with, while reads work.
    fail_writes: Option<StoreError>,
    unreachable: bool,
    /// Watches opened before this generation tell nothing any more, not even that they broke.
    frozen: u64,
    /// Counted up to break every watch opened before.
    generation: u64,
    /// So many leaders came after the first.
    elections: u64,
}

impl Plan {
    pub(super) fn elections(&self) -> u64 {
        self.elections
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn is_frozen(&self, generation: u64) -> bool {
        generation < self.frozen
    }

    pub(super) fn before_operation(&mut self) -> StoreResult<()> {
        if self.unreachable {
            return Err(unreachable());
        }
        match &mut self.fail {
            Some((left, error)) if *left > 0 => {
                *left -= 1;
                Err(error.clone())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn before_write(&mut self) -> StoreResult<()> {
        self.before_operation()?;
        self.fail_writes.clone().map_or(Ok(()), Err)
    }

    /// What is wrong, as etcd tells it.
    pub(super) fn alarms(&self) -> Vec<String> {
        let is_full = matches!(self.fail_writes, Some(StoreError::Full(_)));
        is_full.then(|| "memberID:1 alarm:NOSPACE ".to_owned()).into_iter().collect()
    }

    pub(super) fn after_write(&mut self) -> StoreResult<()> {
        if self.lose_answers == 0 {
            return Ok(());
        }
        self.lose_answers -= 1;
        Err(StoreError::Unknown("the answer was lost on request".into()))
    }

    /// What a broken watch says.
    pub(super) fn broken(&self) -> StoreError {
        if self.unreachable { unreachable() } else { StoreError::Unknown("the watch stream broke".into()) }
    }
}

fn unreachable() -> StoreError {
    StoreError::Unreachable { endpoints: "memory".into(), detail: "made unreachable on request".into() }
}

/// Everything a store held at one moment, as a backup of etcd does.
#[derive(Clone)]
pub struct Backup(State);

impl std::fmt::Debug for Backup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Backup(revision {})", self.0.revision())
    }
}

/// Makes a [`MemoryStore`] misbehave.
#[derive(Debug, Clone)]
pub struct Faults {
    store: MemoryStore,
}

impl Faults {
    pub(super) fn new(store: MemoryStore) -> Self {
        Self { store }
    }

    /// The next `count` operations fail with `error` and do nothing. Replaces an earlier request.
    pub fn fail_next(&self, count: usize, error: StoreError) {
        self.store.look(|shared| shared.plan.fail = Some((count, error)));
    }

    /// From now on every write fails with this, and reads work; `None`: they work again.
    pub fn fail_writes(&self, error: Option<StoreError>) {
        self.store.look(|shared| shared.plan.fail_writes = error);
    }

    /// The next `count` writes are done, and answered with [`StoreError::Unknown`].
    pub fn lose_answers(&self, count: usize) {
        self.store.look(|shared| shared.plan.lose_answers = count);
    }

    /// The next `count` changes of the store give no event to any watch, now or later.
    pub fn lose_events(&self, count: usize) {
        self.store.look(|shared| shared.state.silent_changes = count);
    }

    /// Every watch open now ends with an error.
    pub fn break_watches(&self) {
        self.store.look(|shared| shared.plan.generation += 1);
    }

    /// Every watch open now tells nothing any more, not even that it broke, as if its peer had gone without a
    /// word. New ones are not concerned.
    pub fn freeze_watches(&self) {
        self.store.look(|shared| {
            shared.plan.generation += 1;
            shared.plan.frozen = shared.plan.generation;
        });
    }

    /// From now on every operation fails and every watch ends, until it is made reachable again. Leases
    /// go on running out meanwhile.
    pub fn set_reachable(&self, reachable: bool) {
        self.store.look(|shared| {
            shared.plan.unreachable = !reachable;
            shared.plan.generation += u64::from(!reachable);
        });
    }

    /// As if etcd had been restarted: watches end, leases get their whole time again.
    pub fn restart(&self) {
        self.store.look(|shared| {
            shared.plan.generation += 1;
        });
        self.elect();
    }

    /// As if etcd had elected another leader: leases get their whole time again, and who has a watch notices nothing.
    pub fn elect(&self) {
        self.store.look(|shared| {
            shared.plan.elections += 1;
            shared.state.renew_all(Instant::now());
        });
    }

    /// What the store holds now.
    pub fn backup(&self) -> Backup {
        self.store.look(|shared| Backup(shared.state.clone()))
    }

    /// Puts an older content, with its older revision, in place of the present one; watches end.
    pub fn restore(&self, backup: &Backup) {
        self.store.look(|shared| {
            shared.state.replace(backup.0.clone());
            shared.state.renew_all(Instant::now());
            shared.plan.generation += 1;
        });
    }

    /// As if etcd had lost its data: empty, at revision 1; watches end.
    pub fn wipe(&self) {
        self.restore(&Backup(State::new()));
    }
}

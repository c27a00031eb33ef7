//! A program's way to the store: answers, and transactions, come late or not at all; the referee sees each that is
//! applied.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use ec_model::{RequestId, placement_tokens};
use ec_store::{
    KeyValue, LeaseId, Listing, Op, Revision, Server, Store, StoreError, StoreResult, Txn, TxnOutcome, Watch,
    WatchBatch,
};
use tokio::time::sleep;

use crate::{
    life::Life,
    referee::keys::told,
    snag::Fate,
    world::{Actor, PLACEMENT, World},
};

/// No transaction is later than this.
pub(crate) const LATEST: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) world: Arc<World>,
    pub(crate) actor: Actor,
    pub(crate) life: Life,
    /// Of the command whose way it is.
    pub(crate) request_id: Option<RequestId>,
}

fn unknown<T>(why: &str) -> StoreResult<T> {
    Err(StoreError::Unknown(why.into()))
}

impl Door {
    /// On the way there: what comes of a call of a dead or cut off program.
    async fn enter(&self) -> StoreResult<()> {
        self.life.gate().await;
        self.world.way().await;
        self.far().await;
        self.life.gate().await;
        if self.world.is_cut(self.actor) {
            let detail = "the network is down".to_owned();
            return Err(StoreError::Unreachable { endpoints: "etcd".into(), detail });
        }
        Ok(())
    }

    /// Who touches what a sleeping command left wakes it, and meets it.
    async fn stir(&self, mut keys: impl Iterator<Item = &str>) {
        let woken = |key: &str| {
            self.world.keys.parse_instance(key).is_ok_and(|instance| self.world.wake_maker(instance))
        };
        if keys.any(woken) {
            sleep(self.world.millis(0..60)).await;
            self.life.gate().await;
        }
    }

    async fn far(&self) {
        if let Some(more) = self.world.distance(self.actor) {
            sleep(more).await;
        }
    }

    async fn leave(&self) {
        self.world.way().await;
        self.far().await;
        self.life.gate().await;
    }

    fn fate(&self) -> Fate {
        if !self.world.chance(self.world.storm().etcd) {
            return Fate::Arrives;
        }
        match self.world.pick(0..10) {
            0..3 => Fate::IsLost,
            3..7 => Fate::LosesItsAnswer,
            7..9 => Fate::IsLate(self.world.millis(5..1000)),
            _ => Fate::IsLate(self.world.millis(1000..u64::try_from(LATEST.as_millis()).unwrap_or(1001))),
        }
    }

    async fn read<T>(&self, answer: impl Future<Output = StoreResult<T>>) -> StoreResult<T> {
        self.enter().await?;
        let answer = answer.await;
        self.leave().await;
        answer
    }

    pub(crate) async fn write<T: Send>(
        &self,
        answer: impl Future<Output = StoreResult<T>>,
    ) -> StoreResult<T> {
        self.enter().await?;
        match self.fate() {
            Fate::IsLost => {
                sleep(Duration::from_secs(2)).await;
                unknown("the request was lost")
            }
            Fate::LosesItsAnswer => {
                answer.await.ok();
                sleep(Duration::from_secs(2)).await;
                self.life.gate().await;
                unknown("the answer was lost")
            }
            _ => {
                let answer = answer.await;
                self.leave().await;
                answer
            }
        }
    }

    async fn apply(&self, txn: Txn, late: bool) -> StoreResult<TxnOutcome> {
        let before: Vec<Option<KeyValue>> =
            txn.then.iter().map(|op| content(&self.world, op.key())).collect();
        let outcome = self.world.store.txn(txn.clone()).await;
        if let Ok(TxnOutcome { succeeded: true, .. }) = &outcome
            && !txn.then.is_empty()
        {
            self.world.judge(|referee, world| {
                referee.look_at_request_ids(world, (self.actor, self.request_id), &txn, &before);
                referee.applied(world, self.actor, &txn, &before, late);
            });
            if let Actor::Agent(..) = self.actor {
                let told = txn.then.iter().filter_map(|op| self.world.keys.parse_status(op.key()).ok());
                told.for_each(|(_, instance)| self.world.happened_to(instance));
            }
        }
        outcome
    }
}

/// A key as it is, whoever asks.
pub(crate) fn content(world: &World, key: &str) -> Option<KeyValue> {
    world.store.content(key).pairs.into_iter().find(|pair| pair.key == key)
}

#[async_trait]
impl Store for Door {
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        let answer = self.read(self.world.store.get(key)).await;
        self.stir(std::iter::once(key)).await;
        answer
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        self.read(self.world.store.get_at(key, revision)).await
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        let listing = self.read(self.world.store.list(prefix)).await;
        if let Ok(listing) = &listing
            && prefix == placement_tokens(PLACEMENT)
        {
            self.world.judge(|referee, _| referee.saw_tokens(self.actor, &listing.pairs));
        }
        listing
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        if txn.then.is_empty() {
            return self.read(self.world.store.txn(txn)).await;
        }
        let era = self.world.era();
        self.enter().await?;
        if self.world.era() != era {
            return unknown("etcd was replaced");
        }
        self.stir(txn.then.iter().map(Op::key)).await;
        let calls: Vec<String> = txn.then.iter().filter_map(|op| told_of(&self.world, op)).collect();
        let snagged = self.world.snagged(self.actor, &self.life, &calls).await;
        match snagged.unwrap_or_else(|| self.fate()) {
            Fate::Arrives | Fate::IsRepeated => {
                let answer = self.apply(txn, false).await;
                self.leave().await;
                answer
            }
            Fate::IsRefused(_) => Err(StoreError::Refused("refused on request".into())),
            Fate::IsDenied => {
                self.apply(txn, false).await.ok();
                self.leave().await;
                Err(StoreError::Full("mvcc: database space exceeded".into()))
            }
            Fate::Kills | Fate::KillsAfterwards => {
                self.apply(txn, false).await.ok();
                self.world.end(self.actor, &self.life).await;
                unknown("the caller is dead")
            }
            Fate::IsLost => {
                sleep(Duration::from_secs(2)).await;
                self.life.gate().await;
                unknown("the request was lost")
            }
            Fate::LosesItsAnswer => {
                self.apply(txn, false).await.ok();
                sleep(Duration::from_secs(2)).await;
                self.life.gate().await;
                unknown("the answer was lost")
            }
            Fate::IsLate(by) => {
                let door = self.clone();
                tokio::spawn(async move {
                    sleep(by).await;
                    if door.world.era() == era {
                        let summary = summary(&txn);
                        if door.apply(txn, true).await.is_ok_and(|outcome| outcome.succeeded) {
                            door.world
                                .log(door.actor, format!("     (the last came {by:?} late: {summary})"));
                        }
                    }
                });
                sleep(Duration::from_secs(2)).await;
                self.life.gate().await;
                unknown("no answer in time")
            }
        }
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        let inner = self.read(self.world.store.watch(prefix, from)).await?;
        Ok(Box::new(LateWatch { inner, door: self.clone(), deafened: self.world.deafened(self.actor) }))
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        self.write(self.world.store.grant(ttl)).await
    }

    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId> {
        self.write(self.world.store.grant_for(key, ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.read(self.world.store.keep_alive(lease)).await
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.write(self.world.store.revoke(lease)).await
    }

    async fn server(&self) -> StoreResult<Server> {
        self.read(self.world.store.server()).await
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        self.write(self.world.store.compact(revision)).await
    }
}

/// A write as the log has it.
fn told_of(world: &World, op: &Op) -> Option<String> {
    match op {
        Op::Put { key, value, .. } => told(world, key, Some(value)),
        Op::Delete(key) => told(world, key, None),
    }
}

/// Which keys a transaction writes.
fn summary(txn: &Txn) -> String {
    let keys: Vec<&str> = txn.then.iter().map(Op::key).collect();
    keys.join(" ")
}

/// Tells everything in order, some of it late, and nothing to who is cut off.
struct LateWatch {
    inner: Box<dyn Watch>,
    door: Door,
    /// How often its owner had been deafened when it began.
    deafened: u64,
}

#[async_trait]
impl Watch for LateWatch {
    async fn next(&mut self) -> StoreResult<WatchBatch> {
        self.door.life.gate().await;
        let batch = self.inner.next().await;
        self.door.life.gate().await;
        if self.door.world.deafened(self.door.actor) > self.deafened {
            return std::future::pending().await;
        }
        if self.door.world.is_cut(self.door.actor) {
            return unknown("the network is down");
        }
        self.door.far().await;
        if self.door.world.chance(10) {
            sleep(self.door.world.millis(1..300)).await;
            self.door.life.gate().await;
        }
        batch
    }
}

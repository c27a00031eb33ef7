//! What lies in etcd of an instance. All of it is written only while this agent is the node.

use ec_model::{Doc, Outcome, Outcomes, Status, encode};
use ec_plan::{
    engine::{Change, StatusEntry},
    history::{self, RETENTION},
    status,
};
use ec_runtime::planted;
use ec_store::{Compare, LeaseId, StoreResult, Txn};

use super::{Stop, Worker};
use crate::look::status_entry;

/// Nothing is written under a node that may be another's by now, nor of a request that is another by now.
pub(super) const NOT_OURS: &str =
    "this node's key in etcd is not ours at this moment, or the request has just changed";

/// What came of an instance, as it is to be written.
struct Notes {
    key: String,
    outcomes: Doc<Outcomes>,
    /// What they hung on before. Nothing else hangs on it but the status, which is written or deleted with them.
    lease: Option<LeaseId>,
}

impl Worker {
    pub(super) async fn drop_keys(&mut self) -> Result<(), Stop> {
        let ended = history::ended(self.status.known(), self.parts.host.now());
        self.leave_keys(Some(ended)).await?;
        tracing::info!("ENDED INSTANCE {}", self.job.instance);
        Ok(())
    }

    /// Nothing is left of it here but what came of it, which goes by itself.
    pub(super) async fn leave_keys(&mut self, outcome: Option<Outcome>) -> Result<(), Stop> {
        let instance = self.job.instance;
        let user_data = self.parts.settings.keys.user_data(self.parts.node, instance);
        let mut txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(user_data)
            .delete(self.parts.status_key(instance));
        txn = self.hold(None, txn).await?;
        if let Some(notes) = self.outcomes_with(outcome).await? {
            let lease = self.parts.store.grant_for(&notes.key, RETENTION).await?;
            txn = txn.put_leased(notes.key, notes.outcomes.encode(), lease);
        }
        self.end(txn).await?;
        self.now_is(StatusEntry::Absent);
        Ok(())
    }

    /// The request goes; the status stays, on a lease, for people to read.
    pub(super) async fn end_in_error(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let status = status::ended_in_error(&self.subject, self.status.known(), self.parts.host.now());
        let outcomes = self.outcomes_with(history::noted(self.status.known(), &status)).await?;
        let lease = self.parts.store.grant_for(&self.outcomes_key(), RETENTION).await?;
        let mut txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(self.parts.settings.keys.user_data(self.parts.node, instance))
            .put_leased(self.parts.status_key(instance), encode(&status), lease);
        if let Some(notes) = outcomes {
            txn = txn.put_leased(notes.key, notes.outcomes.encode(), lease);
        }
        let revision = self.end(self.status_as_known(txn)).await?;
        self.now_is(StatusEntry::Known(Box::new(status), revision));
        tracing::info!("ENDED INSTANCE {instance} IN ERROR");
        Ok(())
    }

    /// Commits the end of a request, unless somebody changed it meanwhile: then all is decided anew. The revision of that.
    async fn end(&mut self, txn: Txn) -> Result<i64, Stop> {
        let Some(revision) = self.fenced(txn).await? else {
            self.give_back_unused().await.ok();
            return Err(Stop::Abandoned);
        };
        self.done.push(Change::RequestDropped);
        Ok(revision)
    }

    /// Ends the lease that was taken for an end that did not come. An earlier write of that end, whose answer was lost,
    /// may use it; it cannot any more, if it has not by now: it demanded the same as this one.
    async fn give_back_unused(&self) -> Result<(), Stop> {
        let outcomes = self.outcomes_key();
        let lease = LeaseId::of_key(&outcomes);
        for key in [outcomes, self.parts.status_key(self.job.instance)] {
            let hangs = self.parts.store.get(&key).await?.0.is_some_and(|pair| pair.lease == Some(lease));
            if hangs {
                return Ok(());
            }
        }
        self.give_back(Some(lease)).await;
        Ok(())
    }

    /// Ends a lease on which nothing hangs any more. It would run out by itself.
    async fn give_back(&self, lease: Option<LeaseId>) {
        if let Some(lease) = lease {
            self.parts.store.revoke(lease).await.ok();
        }
    }

    /// What came of the instance here, with one more; nothing where a later release wrote it, which stays as it is.
    async fn outcomes_with(&self, outcome: Option<Outcome>) -> Result<Option<Notes>, Stop> {
        let (node, instance) = (self.parts.node, self.job.instance);
        let key = self.outcomes_key();
        let there = self.parts.store.get(&key).await?.0;
        let lease = there.as_ref().and_then(|pair| pair.lease);
        let mut outcomes = match there.map(|pair| Doc::decode(&pair.value)) {
            Some(Ok(outcomes)) => outcomes,
            Some(Err(error)) => {
                tracing::warn!(%error, "what came of it is not noted");
                return Ok(None);
            }
            None => Doc::new(Outcomes { instance, node, outcomes: Vec::new() }),
        };
        if let Some(outcome) = outcome {
            outcomes.record.push(outcome);
        }
        Ok(Some(Notes { key, outcomes, lease }))
    }

    /// What is kept after the end hangs on this key's own lease.
    fn outcomes_key(&self) -> String {
        self.parts.settings.keys.outcomes(self.parts.node, self.job.instance)
    }

    fn request_as_seen(&self) -> Compare {
        let key = self.parts.request_key(self.job.instance);
        match self.job.request_revision {
            Some(revision) => Compare::Unchanged(key, revision),
            None => Compare::Absent(key),
        }
    }

    /// Only the last one counts: progress is told often.
    fn now_is(&mut self, status: StatusEntry) {
        self.done.retain(|change| !matches!(change, Change::Status(_)));
        self.done.push(Change::Status(status.clone()));
        self.status = status;
    }

    /// Takes what lies in etcd of its status for what was told last.
    pub(super) async fn read_again(&mut self) -> Result<(), Stop> {
        let there = self.lies_there().await?;
        if there != self.status {
            self.now_is(there);
        }
        Ok(())
    }

    /// Whether what lies in etcd of its status is what is known of it.
    pub(super) async fn is_told_last(&self) -> bool {
        self.lies_there().await.is_ok_and(|there| there.known() == self.status.known())
    }

    /// What lies in etcd of its status.
    async fn lies_there(&self) -> StoreResult<StatusEntry> {
        let there = self.parts.store.get(&self.parts.status_key(self.job.instance)).await?.0;
        Ok(there.map(|pair| status_entry(&pair)).unwrap_or_default())
    }

    /// What lies in etcd of its status is what was told or read last: nothing came in between, say of our own whose answer was lost.
    fn status_as_known(&self, txn: Txn) -> Txn {
        let key = self.parts.status_key(self.job.instance);
        match &self.status {
            StatusEntry::Known(_, revision) => txn.when(Compare::Unchanged(key, *revision)),
            StatusEntry::Absent => txn.when(Compare::Absent(key)),
            StatusEntry::Unreadable => txn,
        }
    }

    /// Writes its status.
    pub(super) async fn write(&mut self, status: Status) -> Result<(), Stop> {
        let key = self.parts.status_key(self.job.instance);
        // A write that comes late must not take the place of what was told when the request ended.
        let mut txn = self.hold(Some(&status), Txn::new().put(key, encode(&status))).await?;
        let mut before = None;
        if let Some(outcome) = history::noted(self.status.known(), &status)
            && let Some(notes) = self.outcomes_with(Some(outcome)).await?
        {
            txn = txn.put(notes.key, notes.outcomes.encode());
            before = notes.lease;
        }
        if !planted("older-wish-told") {
            txn = txn.when(self.request_as_seen());
        }
        let written = self.fenced(self.status_as_known(txn)).await;
        self.unsure = written.is_err();
        let Some(revision) = written? else {
            // A newer wish is not held up by the pause before another try.
            if self.cancel.is_cancelled() || self.newer.has_changed().is_ok_and(|is| is) {
                return Err(Stop::Abandoned);
            }
            let known = self.status.clone();
            self.read_again().await?;
            let is_other = self.status != known;
            return Err(if is_other { Stop::Abandoned } else { Stop::Retry(NOT_OURS.to_owned()) });
        };
        self.give_back(before).await;
        self.now_is(StatusEntry::Known(Box::new(status), revision));
        Ok(())
    }

    /// Commits a transaction if the node's key is still ours; at which revision, where all its conditions held.
    async fn fenced(&self, txn: Txn) -> Result<Option<i64>, Stop> {
        let fence = || self.parts.presence.fence().ok_or_else(|| Stop::Retry(NOT_OURS.to_owned()));
        let first = fence()?;
        if planted("unfenced") {
            let outcome = self.parts.store.txn(txn).await?;
            return Ok(outcome.succeeded.then_some(outcome.revision));
        }
        let mut outcome = self.parts.store.txn(txn.clone().when(first.clone())).await?;
        // Our own keys may have been put anew meanwhile.
        let now = fence()?;
        if !outcome.succeeded && now != first {
            outcome = self.parts.store.txn(txn.when(now)).await?;
        }
        if !outcome.succeeded {
            self.parts.presence.doubt();
        }
        Ok(outcome.succeeded.then_some(outcome.revision))
    }
}

//! What lies in etcd of an instance. All of it is written only while this agent is the node.

use std::time::Duration;

use ec_model::{Status, encode};
use ec_plan::{
    engine::{Change, StatusEntry},
    status,
};
use ec_runtime::planted;
use ec_store::{Compare, Txn};

use super::{Stop, Worker};

/// How long the status of a failed instance can be read before it goes by itself.
const ERROR_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Nothing is written under a node that may be another's by now, nor of a request that is another by now.
const NOT_OURS: &str = "this node's key in etcd is not ours at this moment, or the request has just changed";

impl Worker {
    pub(super) async fn drop_keys(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let user_data = self.parts.settings.keys.user_data(self.parts.node, instance);
        let txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(user_data)
            .delete(self.parts.status_key(instance));
        self.end(txn).await?;
        self.now_is(StatusEntry::Absent);
        tracing::info!("ENDED INSTANCE {instance}");
        Ok(())
    }

    /// The request goes; the status stays, on a lease, for people to read.
    pub(super) async fn end_in_error(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let status = status::ended_in_error(&self.subject, self.status.known(), self.parts.host.now());
        let lease = self.parts.store.grant(ERROR_RETENTION).await?;
        let txn = Txn::new()
            .when(self.request_as_seen())
            .delete(self.parts.request_key(instance))
            .delete(self.parts.settings.keys.user_data(self.parts.node, instance))
            .put_leased(self.parts.status_key(instance), encode(&status), lease);
        let ended = self.end(txn).await;
        if ended.is_err() {
            // Where the outcome is unknown the keys may hang on it: they would go with it, so it stays
            // only if it may be in use.
            if matches!(ended, Err(Stop::Abandoned)) {
                self.parts.store.revoke(lease).await.ok();
            }
            return ended;
        }
        self.now_is(StatusEntry::Known(Box::new(status)));
        tracing::info!("ENDED INSTANCE {instance} IN ERROR");
        Ok(())
    }

    /// Commits the end of a request, unless somebody changed it meanwhile: then all is decided anew.
    async fn end(&mut self, txn: Txn) -> Result<(), Stop> {
        if self.fenced(txn).await? {
            self.done.push(Change::RequestDropped);
            Ok(())
        } else {
            Err(Stop::Abandoned)
        }
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

    /// Writes its status.
    pub(super) async fn write(&mut self, status: Status) -> Result<(), Stop> {
        let key = self.parts.status_key(self.job.instance);
        // A write that comes late must not take the place of what was told when the request ended.
        let mut txn = Txn::new().put(key, encode(&status));
        if !planted("older-wish-told") {
            txn = txn.when(self.request_as_seen());
        }
        let written = self.fenced(txn).await;
        self.unsure = written.is_err();
        if !written? {
            // A newer wish is not held up by the pause before another try.
            let newer = self.cancel.is_cancelled();
            return Err(if newer { Stop::Abandoned } else { Stop::Retry(NOT_OURS.to_owned()) });
        }
        self.now_is(StatusEntry::Known(Box::new(status)));
        Ok(())
    }

    /// Commits a transaction if the node's key is still ours; whether all its conditions held.
    async fn fenced(&self, txn: Txn) -> Result<bool, Stop> {
        let fence = || self.parts.presence.fence().ok_or_else(|| Stop::Retry(NOT_OURS.to_owned()));
        let first = fence()?;
        if planted("unfenced") {
            return Ok(self.parts.store.txn(txn).await?.succeeded);
        }
        let mut succeeded = self.parts.store.txn(txn.clone().when(first.clone())).await?.succeeded;
        // Our own keys may have been put anew meanwhile.
        let now = fence()?;
        if !succeeded && now != first {
            succeeded = self.parts.store.txn(txn.when(now)).await?.succeeded;
        }
        if !succeeded {
            self.parts.presence.doubt();
        }
        Ok(succeeded)
    }
}

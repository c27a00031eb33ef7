//! What is wanted of an instance, kept on the node: should etcd lose it, it can be told again.

use ec_metadata::InstanceRecord;
use ec_model::{Held, Intent, State, Status, Workload, decode, encode};
use ec_runtime::planted;
use ec_store::Txn;

use super::{Stop, Worker, guest::spec_of, hostname};

impl Worker {
    /// From then on the metadata service tells the guest what is wished now, and this node knows what was asked for.
    pub(super) async fn keep_intent(&mut self) -> Result<(), Stop> {
        let request = self.request()?;
        let metadata = spec_of(&request)?.metadata.clone();
        let intent = Some(self.intent().await?);
        let record = self.own_record().await?;
        self.put_record(InstanceRecord { metadata, intent, ..record }).await
    }

    /// Request and record as they lie in etcd.
    pub(super) async fn intent(&self) -> Result<Intent, Stop> {
        let (store, instance) = (&self.parts.store, self.job.instance);
        let keys = (self.parts.request_key(instance), self.parts.settings.keys.instance(instance));
        let ((request, _), (record, _)) = tokio::try_join!(store.get(&keys.0), store.get(&keys.1))?;
        // A newer one is a job of its own.
        let request = request.filter(|pair| Some(pair.mod_revision) == self.job.request_revision);
        let request = request.ok_or(Stop::Abandoned)?;
        Intent::of(&request.value, record.as_ref().map(|pair| pair.value.as_slice()))
            .map_err(|error| Stop::Retry(error.to_string()))
    }

    /// What that is and how it is called of which no request speaks and no status did: this node alone knows, or what it held of it
    /// while it could read its record.
    pub(super) async fn known_as(&self) -> Result<Option<(Option<Workload>, String)>, Stop> {
        if let Some(record) = self.record().await? {
            let kept = record.intent.and_then(|intent| intent.request().ok());
            return Ok(Some((kept.map(|kept| kept.record.kind), record.name)));
        }
        let key = self.parts.settings.keys.held(self.parts.node, self.job.instance);
        let held = self.parts.store.get(&key).await?.0.and_then(|pair| decode::<Held>(&pair.value).ok());
        let kept = held.and_then(|held| held.intent.request().ok());
        Ok(kept.map(|kept| (Some(kept.record.kind), hostname(&kept.record))))
    }

    /// Adds to the writing of a status that what is known of an instance without a request is held for it; or, once that
    /// is over, no more.
    pub(super) async fn hold(&self, status: Option<&Status>, txn: Txn) -> Result<Txn, Stop> {
        let (keys, node, instance) = (&self.parts.settings.keys, self.parts.node, self.job.instance);
        let (key, data_key) = (keys.held(node, instance), keys.held_user_data(node, instance));
        if status.is_none_or(|status| status.state != State::Unclaimed) {
            // Whatever was told last: of a write whose answer was lost nobody here knows.
            return Ok(txn.delete(key).delete(data_key));
        }
        let Some(record) = self.record().await? else { return Ok(txn) };
        let Some(intent) = record.intent else { return Ok(txn) };
        let data = record.user_data.map(|data| data.0);
        let held = Held {
            instance,
            node,
            intent,
            rebuilt: record.rebuilt,
            rescued: record.rescued,
            resized: record.resized,
            resources: record.resources,
            user_data_bytes: data.as_ref().map(|data| data.len() as u64),
        };
        if planted("nothing-held") {
            return Ok(txn);
        }
        let txn = txn.put(key, encode(&held));
        Ok(match data {
            Some(data) => txn.put(data_key, data),
            None => txn,
        })
    }
}

//! A copy of all that an etcd holds, as one of its members has it.

use std::time::Duration;

use etcd_client::SnapshotStreaming;
use tokio::time::timeout;

use super::{
    EtcdStore,
    endpoints::{Lane, Repeat},
    failure::{Failure, classify},
};
use crate::{StoreError, StoreResult};

/// A member that sends nothing for so long sends nothing any more.
const SILENCE: Duration = Duration::from_secs(60);

/// What is read before, to learn how far the cluster is. No key of anybody's is called so.
const ANY: &str = "\0";

const CUT_OFF: &str =
    "the member that answers has no leader: it is cut off from the others, and may lack what they have";

/// Such a copy on its way: the member's database, and behind it 32 bytes, which are the SHA-256 of all before.
pub struct Snapshot(SnapshotStreaming);

/// A piece of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// What comes next.
    pub bytes: Vec<u8>,
    /// How many bytes are still to come, as far as the member tells.
    pub remaining: u64,
}

impl EtcdStore {
    /// Begins a copy of all that the cluster holds at this moment, or later. Only the administrator of etcd may, where it asks who
    /// somebody is.
    ///
    /// # Errors
    /// etcd is away, or does not let us; or no member that we reach has the others behind it.
    pub async fn snapshot(&self) -> StoreResult<Snapshot> {
        let begun = self.endpoints.run(Lane::Requests, Repeat::Safe, |client| async move {
            // A member gives a copy of what it has, also where it is cut off from the others and has what was long ago.
            let status = client.maintenance_client().status().await.map_err(classify)?;
            if status.leader() == 0 {
                return Err(Failure::Unsent(CUT_OFF.to_owned()));
            }
            // One that does not know yet that it is cut off answers no read that has to be of now; one that answers has caught up.
            client.kv_client().get(ANY, None).await.map_err(classify)?;
            client.maintenance_client().snapshot().await.map_err(classify)
        });
        begun.await.map(Snapshot).map_err(|failure| self.endpoints.error(failure, Repeat::Safe))
    }
}

impl Snapshot {
    /// The next piece; none after the last. Whether that was all of it is told by the digest alone.
    ///
    /// # Errors
    /// It broke off.
    pub async fn next(&mut self) -> StoreResult<Option<Piece>> {
        let broke = |why: String| StoreError::Unknown(format!("the snapshot broke off: {why}"));
        let answer = timeout(SILENCE, self.0.message())
            .await
            .map_err(|_| broke(format!("etcd sent nothing for {} s", SILENCE.as_secs())))?
            .map_err(|error| broke(error.to_string()))?;
        Ok(answer.map(|answer| Piece { bytes: answer.blob().to_vec(), remaining: answer.remaining_bytes() }))
    }
}

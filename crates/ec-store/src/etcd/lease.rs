//! Renewal of leases: one open stream per lease, opened again by itself.
//!
//! A stream is taken out of the table while it is used and put back only after a clean answer. So a
//! renewal that fails, runs out of time or is cancelled half-way leaves no stream behind whose next
//! message would be the answer to an older question.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use etcd_client::{LeaseKeepAliveStream, LeaseKeeper};
use tokio::time::timeout;

use super::{
    endpoints::{Endpoints, Lane, Repeat},
    failure::{Failure, classify},
};
use crate::{LeaseId, StoreError, StoreResult};

/// Open streams kept at most; beyond that, renewals open one each time. A program has one lease or two.
const STREAMS_MAX: usize = 64;

/// The open streams by lease.
#[derive(Default)]
pub(super) struct Keepers(Mutex<HashMap<LeaseId, Keeper>>);

struct Keeper {
    endpoint: usize,
    ask: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    /// The time that the last renewal gave.
    ttl: Duration,
}

impl Keeper {
    async fn renew(&mut self) -> Result<Duration, Failure> {
        self.ask.keep_alive().await.map_err(classify)?;
        match self.answers.message().await.map_err(classify)? {
            // An expired lease is no error on an open stream: it comes back with no time left.
            Some(answer) => match u64::try_from(answer.ttl()) {
                Ok(seconds) if seconds > 0 => {
                    self.ttl = Duration::from_secs(seconds);
                    Ok(self.ttl)
                }
                _ => Err(Failure::LeaseGone),
            },
            None => Err(Failure::Broken("the renewal stream ended".into())),
        }
    }
}

impl Keepers {
    fn table(&self) -> MutexGuard<'_, HashMap<LeaseId, Keeper>> {
        // The table is whole between any two statements, so a panic elsewhere cannot have spoilt it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the stream of a lease that is not wanted any more.
    pub(super) fn forget(&self, lease: LeaseId) {
        self.table().remove(&lease);
    }

    fn keep(&self, lease: LeaseId, keeper: Keeper) {
        let mut table = self.table();
        if table.len() < STREAMS_MAX {
            table.insert(lease, keeper);
        }
    }

    /// Renews once, on the open stream or on a new one.
    pub(super) async fn renew(&self, endpoints: &Endpoints, lease: LeaseId) -> StoreResult<Duration> {
        // Taken in a statement of its own: a guard in an `if let` would live through the whole of it.
        let open = self.table().remove(&lease);
        if let Some(mut keeper) = open {
            // However long a request may take, enough of the lease is to be left for another member.
            let patience = endpoints.timeout().min(keeper.ttl / 3);
            match timeout(patience, keeper.renew()).await {
                Ok(Ok(ttl)) => {
                    self.keep(lease, keeper);
                    return Ok(ttl);
                }
                Ok(Err(Failure::LeaseGone)) => return Err(StoreError::LeaseLost(lease)),
                // The server restarted, or froze, or the token ran out: all cured by a new stream.
                Ok(Err(_)) | Err(_) => _ = endpoints.leave(keeper.endpoint),
            }
        }
        let renewed = endpoints
            .run_at(Lane::Requests, Repeat::Safe, |client, endpoint| async move {
                let (ask, answers) = client.lease_client().keep_alive(lease.0).await.map_err(classify)?;
                let mut keeper = Keeper { endpoint, ask, answers, ttl: Duration::ZERO };
                // Opening renews as well, but does not tell the time granted.
                let ttl = keeper.renew().await?;
                Ok((ttl, keeper))
            })
            .await;
        match renewed {
            Ok((ttl, keeper)) => {
                self.keep(lease, keeper);
                Ok(ttl)
            }
            Err(Failure::LeaseGone) => Err(StoreError::LeaseLost(lease)),
            Err(failure) => Err(endpoints.error(failure, Repeat::Safe)),
        }
    }
}

//! The store proper: etcd, through `etcd-client`, which no other crate may use.
//!
//! `etcd-client` is a thin stub, so everything that makes a connection survive is here: the choice of
//! the endpoint ([`endpoints`]), what an error means ([`failure`]), watches that end when they should
//! ([`watch`]) and leases whose streams recover ([`lease`]).

mod config;
mod endpoints;
mod failure;
mod lease;
mod section;
mod snapshot;
mod users;
mod watch;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use etcd_client::{CompareOp, GetOptions, LeaseGrantOptions, PutOptions, TxnOp};

pub use config::{EtcdConfig, EtcdTls};
pub use section::EtcdSection;
pub use snapshot::{Piece, Snapshot};
pub use users::Grant;

use self::{
    endpoints::{Endpoints, Lane, Repeat},
    failure::{Failure, classify},
    lease::Keepers,
};
use crate::{
    Compare, KeyValue, LeaseId, Listing, Op, Revision, Server, Store, StoreError, StoreResult, Txn,
    TxnOutcome, Watch,
};

/// The largest answer accepted, in bytes. gRPC's own limit of 4 MiB is soon passed by a listing.
const ANSWER_MAX: usize = 64 << 20;

/// Keys in the first page of a listing: with values of 64 KiB a page stays well under [`ANSWER_MAX`].
const PAGE: i64 = 512;

/// Pages of small values grow up to here: etcd 3.4 walks all keys that are left for every page.
const PAGE_MAX: i64 = 16_384;

/// A page with less than so many bytes is followed by a larger one.
const PAGE_SMALL: usize = 2 << 20;

/// The smallest page tried: 16 values of etcd's largest request (1.5 MiB) fit into [`ANSWER_MAX`].
const PAGE_MIN: i64 = 16;

/// How often a listing begins again because its revision was compacted away between two pages.
const LIST_ATTEMPTS: usize = 5;

/// What a listing is read for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Pairs,
    Keys,
}

/// etcd as a [`Store`]. Clones share connections.
#[derive(Clone)]
pub struct EtcdStore {
    endpoints: Arc<Endpoints>,
    keepers: Arc<Keepers>,
}

impl std::fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdStore").field("endpoints", &self.endpoints.names()).finish_non_exhaustive()
    }
}

impl EtcdStore {
    /// Prepares connections to the endpoints of `config`; they are made, and users authenticated, when
    /// something is first asked of them.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where the settings cannot work: an endpoint without a port, a certificate
    /// file that is missing or holds no certificate.
    pub async fn connect(config: EtcdConfig) -> StoreResult<Self> {
        let endpoints = Arc::new(Endpoints::prepare(&config).await?);
        Ok(Self { endpoints, keepers: Arc::default() })
    }

    /// A new lease, with an id of its own or this one.
    async fn granted(&self, ttl: Duration, id: Option<LeaseId>) -> Result<LeaseId, Failure> {
        // Whole seconds upwards: never less than was asked for.
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1000).max(1)).unwrap_or(i64::MAX);
        let options = id.map(|id| LeaseGrantOptions::new().with_id(id.0));
        let lease = self
            .endpoints
            .run(Lane::Requests, Repeat::Safe, |client| {
                let options = options.clone();
                async move { client.lease_client().grant(seconds, options).await.map_err(classify) }
            })
            .await?;
        Ok(LeaseId(lease.id()))
    }

    /// A whole listing, begun anew where it must be.
    async fn list_wanted(&self, prefix: &str, what: Wanted) -> StoreResult<Listing> {
        let mut page = PAGE;
        let mut restarts = 0;
        loop {
            match self.list_once(prefix, page, what).await {
                Ok(listing) => return Ok(listing),
                Err(Failure::TooBig(_)) if page > PAGE_MIN => page = (page / 4).max(PAGE_MIN),
                // Compacted between two pages; or the store was replaced by an older one.
                Err(Failure::Compacted | Failure::Future) if restarts < LIST_ATTEMPTS => restarts += 1,
                Err(failure) => return Err(self.endpoints.error(failure, Repeat::Safe)),
            }
        }
    }

    /// One attempt at a whole listing, in pages of `page` keys at first.
    async fn list_once(&self, prefix: &str, mut page: i64, what: Wanted) -> Result<Listing, Failure> {
        let end = prefix_end(prefix);
        let mut start = if prefix.is_empty() { vec![0] } else { prefix.as_bytes().to_vec() };
        let mut listing = Listing { pairs: Vec::new(), revision: 0 };
        loop {
            let mut options =
                GetOptions::new().with_range(end.clone()).with_limit(page).with_revision(listing.revision);
            if what == Wanted::Keys {
                options = options.with_keys_only();
            }
            let mut answer = self
                .endpoints
                .run(Lane::Requests, Repeat::Safe, |client| {
                    let (start, options) = (start.clone(), options.clone());
                    async move {
                        let mut kv = client.kv_client().max_decoding_message_size(ANSWER_MAX);
                        kv.get(start, Some(options)).await.map_err(classify)
                    }
                })
                .await?;
            if listing.revision == 0 {
                listing.revision = header_revision(answer.header())?;
            }
            let more = answer.more();
            let pairs = answer.take_kvs();
            let size: usize = pairs.iter().map(|pair| pair.key().len() + pair.value().len()).sum();
            // Not where a page was too big before.
            if page >= PAGE && size < PAGE_SMALL {
                page = (page * 2).min(PAGE_MAX);
            }
            let Some(last) = pairs.last() else { return Ok(listing) };
            // The first key after `last` is `last` with a zero byte behind it.
            start = last.key().to_vec();
            start.push(0);
            listing.pairs.extend(pairs.into_iter().map(key_value));
            if !more {
                return Ok(listing);
            }
        }
    }
}

#[async_trait]
impl Store for EtcdStore {
    async fn get(&self, key: &str) -> StoreResult<(Option<KeyValue>, Revision)> {
        let answer = self
            .endpoints
            .run(Lane::Requests, Repeat::Safe, |client| async move {
                let mut kv = client.kv_client().max_decoding_message_size(ANSWER_MAX);
                let mut answer = kv.get(key, None).await.map_err(classify)?;
                let revision = header_revision(answer.header())?;
                Ok((answer.take_kvs().pop().map(key_value), revision))
            })
            .await;
        answer.map_err(|failure| self.endpoints.error(failure, Repeat::Safe))
    }

    async fn get_at(&self, key: &str, revision: Revision) -> StoreResult<Option<KeyValue>> {
        let answer = self
            .endpoints
            .run(Lane::Requests, Repeat::Safe, |client| async move {
                let options = GetOptions::new().with_revision(revision);
                let mut kv = client.kv_client().max_decoding_message_size(ANSWER_MAX);
                let mut answer = kv.get(key, Some(options)).await.map_err(classify)?;
                Ok(answer.take_kvs().pop().map(key_value))
            })
            .await;
        answer.map_err(|failure| match failure {
            Failure::Compacted | Failure::Future => {
                StoreError::Compacted { wanted: revision, first: revision + 1 }
            }
            failure => self.endpoints.error(failure, Repeat::Safe),
        })
    }

    async fn list(&self, prefix: &str) -> StoreResult<Listing> {
        self.list_wanted(prefix, Wanted::Pairs).await
    }

    async fn keys(&self, prefix: &str) -> StoreResult<Vec<String>> {
        let listing = self.list_wanted(prefix, Wanted::Keys).await?;
        Ok(listing.pairs.into_iter().map(|pair| pair.key).collect())
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let lease = txn.then.iter().find_map(|op| match op {
            Op::Put { lease, .. } => *lease,
            Op::Delete(_) => None,
        });
        let repeat = if txn.then.is_empty() { Repeat::Safe } else { Repeat::Unsafe };
        let wire = wire_txn(txn);
        let outcome = self
            .endpoints
            .run(Lane::Requests, repeat, |client| {
                let wire = wire.clone();
                async move {
                    let answer = client.kv_client().txn(wire).await.map_err(classify)?;
                    let revision = header_revision(answer.header())?;
                    Ok(TxnOutcome { succeeded: answer.succeeded(), revision })
                }
            })
            .await;
        outcome.map_err(|failure| match (failure, lease) {
            (Failure::LeaseGone, Some(lease)) => StoreError::LeaseLost(lease),
            (failure, _) => self.endpoints.error(failure, repeat),
        })
    }

    async fn watch(&self, prefix: &str, from: Revision) -> StoreResult<Box<dyn Watch>> {
        Ok(Box::new(watch::open(&self.endpoints, prefix, from).await?))
    }

    async fn grant(&self, ttl: Duration) -> StoreResult<LeaseId> {
        // Granting twice is harmless: the lease that nobody knows expires empty.
        let granted = self.granted(ttl, None).await;
        granted.map_err(|failure| self.endpoints.error(failure, Repeat::Safe))
    }

    async fn grant_for(&self, key: &str, ttl: Duration) -> StoreResult<LeaseId> {
        let lease = LeaseId::of_key(key);
        loop {
            match self.granted(ttl, Some(lease)).await {
                Err(Failure::LeaseExists) => {}
                granted => return granted.map_err(|failure| self.endpoints.error(failure, Repeat::Safe)),
            }
            let renewed = self.keepers.renew(&self.endpoints, lease).await;
            self.keepers.forget(lease);
            match renewed {
                // It ended in this moment.
                Err(StoreError::LeaseLost(_)) => {}
                renewed => return renewed.map(|_| lease),
            }
        }
    }

    async fn keep_alive(&self, lease: LeaseId) -> StoreResult<Duration> {
        self.keepers.renew(&self.endpoints, lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> StoreResult<()> {
        self.keepers.forget(lease);
        let done = self
            .endpoints
            .run(Lane::Requests, Repeat::Safe, |client| async move {
                client.lease_client().revoke(lease.0).await.map_err(classify)
            })
            .await;
        match done {
            Ok(_) | Err(Failure::LeaseGone) => Ok(()),
            Err(failure) => Err(self.endpoints.error(failure, Repeat::Safe)),
        }
    }

    async fn server(&self) -> StoreResult<Server> {
        let answer = self
            .endpoints
            .run(Lane::Requests, Repeat::Safe, |client| async move {
                client.maintenance_client().status().await.map_err(classify)
            })
            .await;
        let status = answer.map_err(|failure| self.endpoints.error(failure, Repeat::Safe))?;
        let header = status.header();
        Ok(Server {
            version: status.version().to_owned(),
            cluster: header.map_or(0, etcd_client::ResponseHeader::cluster_id),
            member: header.map_or(0, etcd_client::ResponseHeader::member_id),
            term: status.raft_term(),
            revision: header.map_or(0, etcd_client::ResponseHeader::revision),
            errors: status.errors().to_vec(),
        })
    }

    async fn compact(&self, revision: Revision) -> StoreResult<()> {
        let done = self
            .endpoints
            .run(Lane::Requests, Repeat::Safe, |client| async move {
                client.kv_client().compact(revision, None).await.map_err(classify)
            })
            .await;
        match done {
            Ok(_) | Err(Failure::Compacted) => Ok(()),
            Err(failure) => Err(self.endpoints.error(failure, Repeat::Safe)),
        }
    }
}

/// The first key after every key that begins with `prefix`; etcd takes a lone zero byte as "no end".
fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // A byte of UTF-8 is never 0xff, so the last one can always be counted up.
    match end.last_mut() {
        Some(last) => *last += 1,
        None => end.push(0),
    }
    end
}

/// Every answer of etcd has a header; one without is not etcd's.
fn header_revision(header: Option<&etcd_client::ResponseHeader>) -> Result<Revision, Failure> {
    header
        .map(etcd_client::ResponseHeader::revision)
        .ok_or_else(|| Failure::Refused("the answer has no header, so it is not etcd that answers".into()))
}

fn key_value(pair: etcd_client::KeyValue) -> KeyValue {
    let (create_revision, mod_revision) = (pair.create_revision(), pair.mod_revision());
    let version = pair.version();
    let lease = (pair.lease() != 0).then(|| LeaseId(pair.lease()));
    let (key, value) = pair.into_key_value();
    KeyValue { key: key_text(key), value, create_revision, mod_revision, version, lease }
}

/// Our own keys are text. Those of strangers need not be; they come out garbled, so that whoever
/// parses keys can complain about them, and nothing breaks.
fn key_text(key: Vec<u8>) -> String {
    String::from_utf8(key).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn wire_txn(txn: Txn) -> etcd_client::Txn {
    let when: Vec<_> = txn
        .when
        .into_iter()
        .map(|compare| match compare {
            Compare::Absent(key) => etcd_client::Compare::create_revision(key, CompareOp::Equal, 0),
            Compare::Present(key) => etcd_client::Compare::create_revision(key, CompareOp::Greater, 0),
            Compare::Unchanged(key, revision) => {
                etcd_client::Compare::mod_revision(key, CompareOp::Equal, revision)
            }
            Compare::Holds(key, value) => etcd_client::Compare::value(key, CompareOp::Equal, value),
            // Of a range, every key must compare, and where there is none, one that was never made does.
            Compare::NoneUnder(prefix) => {
                let end = prefix_end(&prefix);
                etcd_client::Compare::create_revision(prefix, CompareOp::Equal, 0).with_range(end)
            }
            Compare::NoneSince(prefix, revision) => {
                let end = prefix_end(&prefix);
                etcd_client::Compare::mod_revision(prefix, CompareOp::Less, revision + 1).with_range(end)
            }
            Compare::NotBefore(key, revision) => {
                etcd_client::Compare::mod_revision(key, CompareOp::Greater, revision - 1)
            }
        })
        .collect();
    let then: Vec<_> = txn
        .then
        .into_iter()
        .map(|op| match op {
            Op::Put { key, value, lease } => {
                let options = lease.map(|lease| PutOptions::new().with_lease(lease.0));
                TxnOp::put(key, value, options)
            }
            Op::Delete(key) => TxnOp::delete(key, None),
        })
        .collect();
    etcd_client::Txn::new().when(when).and_then(then)
}

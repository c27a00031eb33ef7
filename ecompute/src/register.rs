//! The node's presence: its resource provider in placement, and its key in etcd under a lease.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use ec_hypervisor::HostInfo;
use ec_model::{Keyspace, NodeId, NodeRecord, RECORD_VERSION, encode};
use ec_placement_client::{PlacementClient, PlacementError};
use ec_store::{LeaseId, Store, StoreError, Txn};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::{config::Settings, inventory};

/// How long the node's key outlives a dead agent. Long enough for etcd to elect a leader and for an
/// agent to be restarted, short enough that schedulers soon pass a dead node over.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(15);

/// Sets provider, inventory and traits anew. What was locked by the last end is unlocked by this.
pub(crate) async fn register(
    placement: &PlacementClient,
    node: NodeId,
    settings: &Settings,
) -> Result<(), PlacementError> {
    let measured = inventory::measure(&settings.state_dir).map_err(PlacementError::Invalid)?;
    let provider = placement.ensure_provider(node, &settings.name).await?;
    placement.set_inventory(node, &inventory::inventory(&measured, settings)).await?;
    let mut traits: BTreeSet<String> = settings.traits.clone();
    // Not a Linux on x86, or no /proc: then there are no such traits.
    traits.extend(
        std::fs::read_to_string("/proc/cpuinfo").map(|text| inventory::cpu_traits(&text)).unwrap_or_default(),
    );
    placement.set_traits(node, &traits, inventory::is_measured_trait).await?;
    tracing::info!(%node, name = provider.name, ?measured, traits = traits.len(), "registered with placement");
    Ok(())
}

/// Keeps the node's key alive until asked to end, then revokes its lease. A lost lease, a wiped or
/// restarted etcd: the key is put again.
pub(crate) async fn keep_alive(
    store: Arc<dyn Store>,
    keys: Keyspace,
    node: NodeId,
    name: String,
    host: HostInfo,
    shutdown: CancellationToken,
) {
    let record = NodeRecord {
        version: RECORD_VERSION,
        node,
        name,
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        virt_type: host.virt_type,
        machine: String::new(),
        host: String::new(),
        started_at: Timestamp::now(),
    };
    let (key, value) = (keys.node(node), encode(&record));
    let mut lease: Option<LeaseId> = None;
    let mut lost = false;
    loop {
        let outcome = renew(store.as_ref(), lease, &key, &value).await;
        let pause = match outcome {
            Ok(renewed) => {
                if lost {
                    tracing::info!("etcd is back");
                }
                (lease, lost) = (Some(renewed), false);
                LEASE_TTL / 3
            }
            Err(StoreError::LeaseLost(_)) => {
                lease = None;
                Duration::ZERO
            }
            Err(error) => {
                if !lost {
                    tracing::warn!(%error, "failed to renew this node's lease; trying on");
                }
                lost = true;
                Duration::from_secs(1)
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
    }
    if let Some(lease) = lease
        && let Err(error) = store.revoke(lease).await
    {
        tracing::warn!(%error, "failed to revoke this node's lease; it runs out by itself");
    }
}

async fn renew(
    store: &dyn Store,
    lease: Option<LeaseId>,
    key: &str,
    value: &[u8],
) -> Result<LeaseId, StoreError> {
    let Some(lease) = lease else {
        let lease = store.grant(LEASE_TTL).await?;
        return match store.txn(Txn::new().put_leased(key, value, lease)).await {
            Ok(_) => Ok(lease),
            Err(error) => {
                // Not left behind: the next try takes a new one.
                store.revoke(lease).await.ok();
                Err(error)
            }
        };
    };
    store.keep_alive(lease).await?;
    // Somebody deleted the key by hand, or a predecessor's lease took it along.
    let (current, _) = store.get(key).await?;
    if current.is_none_or(|current| current.lease != Some(lease)) {
        store.txn(Txn::new().put_leased(key, value, lease)).await?;
    }
    Ok(lease)
}

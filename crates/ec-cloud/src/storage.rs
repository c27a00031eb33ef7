//! Storage that nodes share: what there is, and which nodes may use it where they may not say so themselves.

use std::collections::BTreeMap;

use ec_model::{Alive, NodeId, SharedStorage, decode};
use ec_placement_client::PlacementError;
use ec_store::KeyValue;
use serde::Serialize;

use crate::{Cloud, CloudError, CloudResult, nodes::capacity};

const DISK: &str = "DISK_GB";

/// What people and scripts see of shared storage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StorageView {
    /// What its nodes call it.
    pub storage: String,
    /// The resource provider of which the disks there are claimed.
    pub provider: NodeId,
    /// The living nodes whose guests have their disks there, with their names.
    pub nodes: BTreeMap<NodeId, String>,
    /// What is claimed, in GiB.
    pub used_gb: u64,
    /// What may be claimed in all, in GiB.
    pub capacity_gb: u64,
}

/// All shared storage that placement knows of.
///
/// # Errors
/// etcd or placement does not answer.
pub async fn storages(cloud: &Cloud) -> CloudResult<Vec<StorageView>> {
    let signs = async { Ok::<_, CloudError>(cloud.store.list(&cloud.keys.all_alive()).await?) };
    let known = async { Ok(cloud.placement.shared_storages().await?) };
    let (signs, known) = tokio::try_join!(signs, known)?;
    let alive: Vec<Alive> = signs.pairs.iter().filter_map(|pair| decode(&pair.value).ok()).collect();
    let mut views = Vec::new();
    for storage in known {
        let provider = storage.provider;
        let inventory = cloud.placement.inventory(provider).await?;
        let used = cloud.placement.usages(provider).await?;
        let nodes = alive.iter().filter(|node| node.storage.as_ref() == Some(&storage));
        views.push(StorageView {
            provider,
            nodes: nodes.map(|node| (node.node, node.name.clone())).collect(),
            used_gb: used.get(DISK).copied().unwrap_or(0),
            capacity_gb: inventory.get(DISK).map_or(0, capacity),
            storage: storage.name,
        });
    }
    views.sort_by(|a, b| a.storage.cmp(&b.storage));
    Ok(views)
}

/// Of the living nodes that share storage with others, which: its resource provider.
///
/// # Errors
/// etcd does not answer.
pub async fn sharing(cloud: &Cloud) -> CloudResult<BTreeMap<NodeId, NodeId>> {
    let signs = cloud.store.list(&cloud.keys.all_alive()).await?.pairs;
    let alive = signs.iter().filter_map(|pair| decode::<Alive>(&pair.value).ok());
    Ok(alive.filter_map(|node| Some((node.node, node.storage?.provider))).collect())
}

/// Lets a node use shared storage, which is made known to placement where it is not. Doing it again changes nothing.
///
/// # Errors
/// [`CloudError::NotFound`] where placement does not know the node; [`CloudError::Refused`] where that is alive and has its disks
/// elsewhere: what was claimed of the storage would be taken of there.
pub async fn join_storage(cloud: &Cloud, storage: &SharedStorage, node: NodeId) -> CloudResult<()> {
    let sign = cloud.store.get(&cloud.keys.alive(node)).await?.0;
    let alive = sign.and_then(|sign| decode::<Alive>(&sign.value).ok());
    if let Some(alive) = alive.filter(|alive| alive.storage.as_ref() != Some(storage)) {
        return Err(CloudError::Refused(match alive.storage {
            Some(own) => format!(
                "node {node} has its disks on storage `{}`, as the `shared_storage` of its compute.yaml says",
                own.name
            ),
            None => format!(
                "node {node} has its disks on its own storage: name `{}` as `shared_storage` in its compute.yaml, start its agent anew, \
                 and say this again",
                storage.name
            ),
        }));
    }
    match cloud.placement.join_shared(storage, node).await {
        Err(PlacementError::NotFound(_)) => Err(CloudError::NotFound(format!(
            "placement knows no node {node}: start its agent, which makes it known, and say this again"
        ))),
        joined => Ok(joined?),
    }
}

/// Has a node use shared storage no more. Doing it again changes nothing.
///
/// # Errors
/// [`CloudError::NotFound`] where placement does not know the node; [`CloudError::Refused`] where that lives on it.
pub async fn leave_storage(cloud: &Cloud, storage: &SharedStorage, node: NodeId) -> CloudResult<()> {
    if storage_of(cloud, node).await?.is_some_and(|(_, own)| own == *storage) {
        return Err(CloudError::Refused(format!(
            "node {node} has its disks there, as the `shared_storage` of its compute.yaml says: empty the node, change that, and start its agent anew before"
        )));
    }
    match cloud.placement.leave_shared(storage, node).await {
        Err(PlacementError::NotFound(_)) => {
            Err(CloudError::NotFound(format!("placement knows no node {node}")))
        }
        left => Ok(left?),
    }
}

/// Whether both nodes are alive and have their disks on one storage that they share, by what [`storage_of`] told of them.
pub(crate) fn is_one(
    one: Option<&(KeyValue, SharedStorage)>,
    other: Option<&(KeyValue, SharedStorage)>,
) -> bool {
    one.zip(other).is_some_and(|((_, one), (_, other))| one == other)
}

/// The storage that a living node shares with others, with its sign of life.
pub(crate) async fn storage_of(
    cloud: &Cloud,
    node: NodeId,
) -> CloudResult<Option<(KeyValue, SharedStorage)>> {
    let sign = cloud.store.get(&cloud.keys.alive(node)).await?.0;
    Ok(sign.and_then(|sign| {
        let storage = decode::<Alive>(&sign.value).ok()?.storage?;
        Some((sign, storage))
    }))
}

//! `eschedule storage`: what nodes share.

use clap::Subcommand;
use ec_cloud::{CloudResult, join_storage, leave_storage, node_named, storages};
use ec_model::{NodeId, SharedStorage, input::is_hostname};
use ec_runtime::exit::Failure;

use crate::{cli::Output, config::Session, output, several::note};

pub(crate) const EXAMPLES: &str = "\
A directory that several hosts have mounted (NFS, say) is named in the compute.yaml of each:

  shared_storage: {name: nfs, path: /srv/guests}

Guests' disks lie there then, and DISK_GB is claimed of the storage, once for all of its nodes.
Where each node has a token of its own for placement (eschedule node add), an operator says which
may use it.

Examples:
  eschedule storage list
  eschedule storage join nfs host1 host2
  eschedule storage leave nfs host2";

/// What is done with it.
#[derive(Subcommand)]
pub(crate) enum StorageCommand {
    /// List shared storage, how much of it is claimed, and whose guests' disks lie there
    List,
    /// Let nodes use shared storage that may not say so themselves, once their compute.yaml names it
    Join {
        /// As its nodes call it in their compute.yaml
        #[arg(value_name = "STORAGE", value_parser = storage)]
        storage: SharedStorage,
        /// The nodes, by name or uuid
        #[arg(value_name = "NODE", required = true)]
        nodes: Vec<String>,
    },
    /// Have nodes that may not say so themselves use shared storage no more, after it was taken out of their compute.yaml
    Leave {
        /// As its nodes called it in their compute.yaml
        #[arg(value_name = "STORAGE", value_parser = storage)]
        storage: SharedStorage,
        /// The nodes, by name or uuid
        #[arg(value_name = "NODE", required = true)]
        nodes: Vec<String>,
    },
}

fn storage(name: &str) -> Result<SharedStorage, String> {
    let wanted = "wanted letters, digits and hyphens, at most 63";
    if is_hostname(name) { Ok(SharedStorage::named(name)) } else { Err(wanted.to_owned()) }
}

/// Does it.
pub(crate) async fn storage_command(
    session: &Session,
    command: StorageCommand,
    output: Output,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        StorageCommand::List => output::storages(output, &storages(cloud).await?),
        StorageCommand::Join { storage, nodes } => {
            let join = async |node| join_storage(cloud, &storage, node).await;
            each(session, &storage, &nodes, join, output).await
        }
        StorageCommand::Leave { storage, nodes } => {
            let leave = async |node| leave_storage(cloud, &storage, node).await;
            each(session, &storage, &nodes, leave, output).await
        }
    }
}

/// Asks it of each node, and shows the storage as it is then. One that is refused keeps no other from it.
async fn each(
    session: &Session,
    storage: &SharedStorage,
    nodes: &[String],
    ask: impl AsyncFn(NodeId) -> CloudResult<()>,
    output: Output,
) -> Result<(), Failure> {
    let mut failed = None;
    for node in all_named(session, nodes).await? {
        if let Err(error) = ask(node).await {
            note(&mut failed, &session.failed(error));
        }
    }
    if let Err(failure) = show(session, storage, output).await {
        note(&mut failed, &failure);
    }
    failed.map_or(Ok(()), Err)
}

/// The nodes; nothing is changed where one of them is not known.
async fn all_named(session: &Session, nodes: &[String]) -> Result<Vec<NodeId>, Failure> {
    let mut found = Vec::new();
    for node in nodes {
        found.push(node_named(&session.cloud, node).await?);
    }
    Ok(found)
}

async fn show(session: &Session, storage: &SharedStorage, output: Output) -> Result<(), Failure> {
    let mut views = storages(&session.cloud).await?;
    views.retain(|view| view.provider == storage.provider);
    output::storages(output, &views)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use ec_cloud::CloudError;
    use ec_runtime::exit::FAILED;

    use super::*;

    #[tokio::test]
    async fn one_node_that_is_refused_keeps_no_other_from_being_asked() {
        let session = Session::in_memory().await;
        let nodes: Vec<NodeId> = (1..=3).map(|number| NodeId::new(uuid::Uuid::from_u128(number))).collect();
        let asked = RefCell::new(Vec::new());
        let ask = async |node: NodeId| {
            asked.borrow_mut().push(node);
            if node == nodes[1] { Err(CloudError::Refused(format!("not {node}"))) } else { Ok(()) }
        };
        let shared = SharedStorage::named("nfs");
        let named: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let failed = each(&session, &shared, &named, ask, Output::Json).await.unwrap_err();
        assert_eq!(asked.take(), nodes);
        // Placement does not answer who is to show the storage: what failed first is told by the code.
        assert_eq!(failed.code, FAILED);
    }
}

//! `eschedule storage`: what nodes share.

use clap::Subcommand;
use ec_cloud::{join_storage, leave_storage, node_named, storages};
use ec_model::{NodeId, SharedStorage, input::is_hostname};
use ec_runtime::exit::Failure;

use crate::{cli::Output, config::Session, output};

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
            for node in all_named(session, &nodes).await? {
                join_storage(cloud, &storage, node).await?;
            }
            show(session, &storage, output).await
        }
        StorageCommand::Leave { storage, nodes } => {
            for node in all_named(session, &nodes).await? {
                leave_storage(cloud, &storage, node).await?;
            }
            show(session, &storage, output).await
        }
    }
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

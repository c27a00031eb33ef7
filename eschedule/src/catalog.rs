//! `eschedule flavor`, `eschedule keypair` and `eschedule group`: what has a name, so that it need not be said each time.

use std::{collections::HashSet, path::PathBuf};

use clap::{Subcommand, ValueEnum};
use ec_cloud::CloudError;
use ec_model::{Policy, ResourceQuery, input::catalog_name};
use ec_runtime::exit::Failure;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::{
    cli::Output,
    config::Session,
    output::{self, Deleted},
    several::Told,
    spec::keys_in,
};

pub(crate) const FLAVORS: &str = "\
A flavor is a name for a placement query, the same for all projects. What an instance was made
with is copied into its record: a flavor that is deleted or made anew changes no instance.

Examples:
  eschedule flavor create small 'resources=VCPU:1,MEMORY_MB:512,DISK_GB:5'
  eschedule flavor create fast 'resources=VCPU:4,MEMORY_MB:4096,DISK_GB:20&required=HW_CPU_X86_AVX2'
  eschedule run web --flavor small";

pub(crate) const KEYPAIRS: &str = "\
A keypair is a name for public ssh keys within the project of schedule.yaml; private keys are
neither made nor kept. Guests are given the keys as they were when the guest was asked for.

Examples:
  eschedule keypair add me ~/.ssh/id_ed25519.pub
  eschedule run web --flavor small --key me";

pub(crate) const GROUPS: &str = "\
A group says of instances of the project of schedule.yaml where they may be, each seen from the
others. Its policy holds however many commands place members at once, and it is never changed.

Examples:
  eschedule group create web --policy anti-affinity
  eschedule run web1 --flavor small --group web
  eschedule run web2 --flavor small --group web
      on another node than web1, or nowhere
  eschedule group show web";

/// What is done to flavors.
#[derive(Subcommand)]
pub(crate) enum FlavorCommand {
    /// Give a query a name
    Create {
        /// Letters, digits, and - _ . @, in any case of letters
        #[arg(value_parser = catalog_name)]
        name: String,
        /// What an instance takes: for example resources=VCPU:1,MEMORY_MB:512
        query: String,
    },
    /// List all flavors
    List,
    /// Show a flavor
    Show {
        /// Its name
        #[arg(value_name = "FLAVOR")]
        name: String,
    },
    /// Delete flavors; instances that were made with them stay as they are
    Delete {
        /// Their names
        #[arg(value_name = "FLAVOR", required = true)]
        names: Vec<String>,
    },
}

/// What is done to keypairs.
#[derive(Subcommand)]
pub(crate) enum KeypairCommand {
    /// Give the public keys of a file a name
    Add {
        /// Letters, digits, and - _ . @, in any case of letters
        #[arg(value_parser = catalog_name)]
        name: String,
        /// A file as ~/.ssh/id_ed25519.pub, with one key in each line; `-` is standard input
        file: PathBuf,
    },
    /// List the project's keypairs
    List,
    /// Show a keypair with its keys, as guests are given them
    Show {
        /// Its name
        #[arg(value_name = "KEYPAIR")]
        name: String,
    },
    /// Delete keypairs; guests keep what they were given
    Delete {
        /// Their names
        #[arg(value_name = "KEYPAIR", required = true)]
        names: Vec<String>,
    },
}

/// What is done to groups.
#[derive(Subcommand)]
pub(crate) enum GroupCommand {
    /// Make a group, which has no members yet
    Create {
        /// Letters, digits, and - _ . @, in any case of letters
        #[arg(value_parser = catalog_name)]
        name: String,
        /// Where its members may be
        #[arg(long, value_name = "POLICY")]
        policy: Placing,
    },
    /// List the project's groups with their members
    List,
    /// Show a group with its members
    Show {
        /// Its name
        #[arg(value_name = "GROUP")]
        name: String,
    },
    /// Delete groups that have no members
    Delete {
        /// Their names
        #[arg(value_name = "GROUP", required = true)]
        names: Vec<String>,
    },
}

/// Where members of a group may be.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Placing {
    /// All on one node
    Affinity,
    /// Each on a node of its own
    AntiAffinity,
    /// Where most of the others are, if there is room
    SoftAffinity,
    /// Where fewest of the others are, of those that have room
    SoftAntiAffinity,
}

impl From<Placing> for Policy {
    fn from(placing: Placing) -> Self {
        match placing {
            Placing::Affinity => Self::Affinity,
            Placing::AntiAffinity => Self::AntiAffinity,
            Placing::SoftAffinity => Self::SoftAffinity,
            Placing::SoftAntiAffinity => Self::SoftAntiAffinity,
        }
    }
}

/// Deletes each. One that fails does not keep the others from being deleted.
async fn delete_each(
    session: &Session,
    what: &str,
    names: &[String],
    output: Output,
    delete: impl AsyncFn(&str) -> Result<(), CloudError>,
) -> Result<(), Failure> {
    let of_failed = |word: &str, _, why: &str| Deleted::failed(&session.cloud, word, why);
    let mut told = Told::new(output, names.len() == 1, &of_failed);
    let mut said = HashSet::new();
    for name in names.iter().filter(|name| said.insert(name.to_ascii_lowercase())) {
        match delete(name).await {
            Ok(()) => told.tell(Deleted::one(&session.cloud, what, name, "DELETED")),
            Err(error) => told.fail(name, &error.into()),
        }
    }
    told.end()
}

/// Does it.
pub(crate) async fn group(session: &Session, command: GroupCommand, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        GroupCommand::Create { name, policy } => {
            output::group(output, &ec_cloud::create_group(cloud, &name, policy.into(), None).await?)
        }
        GroupCommand::List => output::groups(output, &ec_cloud::groups(cloud).await?),
        GroupCommand::Show { name } => output::group(output, &ec_cloud::group(cloud, &name).await?),
        GroupCommand::Delete { names } => {
            let delete = async |name: &str| ec_cloud::delete_group(cloud, name).await;
            delete_each(session, "GROUP", &names, output, delete).await
        }
    }
}

/// Does it.
pub(crate) async fn flavor(session: &Session, command: FlavorCommand, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        FlavorCommand::Create { name, query } => {
            let query = ResourceQuery::parse(&query).map_err(|error| Failure::usage(error.to_string()))?;
            let flavor = ec_cloud::create_flavor(cloud, &name, &query).await?;
            output::flavor(output, &flavor)
        }
        FlavorCommand::List => output::flavors(output, &ec_cloud::flavors(cloud).await?),
        FlavorCommand::Show { name } => output::flavor(output, &ec_cloud::flavor(cloud, &name).await?),
        FlavorCommand::Delete { names } => {
            let delete = async |name: &str| ec_cloud::delete_flavor(cloud, name).await;
            delete_each(session, "FLAVOR", &names, output, delete).await
        }
    }
}

/// Does it.
pub(crate) async fn keypair(
    session: &Session,
    command: KeypairCommand,
    output: Output,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        KeypairCommand::Add { name, file } => {
            let keys = keys_in(&file, "FILE").await?;
            let keypair = ec_cloud::add_keypair(cloud, &name, keys).await?;
            output::keypair(output, &keypair)
        }
        KeypairCommand::List => output::keypairs(output, &ec_cloud::keypairs(cloud).await?),
        KeypairCommand::Show { name } => {
            let keypair = ec_cloud::keypair(cloud, &name).await?;
            output::keypair(output, &keypair.ok_or_else(|| ec_cloud::no_keypair(&name))?)
        }
        KeypairCommand::Delete { names } => {
            let delete = async |name: &str| ec_cloud::delete_keypair(cloud, name).await;
            delete_each(session, "KEYPAIR", &names, output, delete).await
        }
    }
}

//! `eschedule list`: which instances, in which order, how many.

use clap::{Args, ValueEnum, builder::NonEmptyStringValueParser};
use ec_cloud::{Cloud, CloudError, Filter, SortBy, VolumeFilter, VolumeView, Whose, node_named, resolve};
use ec_model::{State, Workload, input::LabelSelector};
use ec_runtime::exit::{Failure, tell};

use crate::{
    acting::no_volume,
    cli::Output,
    config::Session,
    output::{self, Names},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule list --state ERROR,UNKNOWN            what is in trouble
  eschedule list --node host1 --label role=web    what of the web servers is on one node
  eschedule list --project shop --sort created    one project's, the oldest first
  eschedule list --limit 100 --after web          the next hundred";

/// What every list is narrowed by.
#[derive(Args)]
struct WhoseArgs {
    /// Only those on this node: its name or its uuid
    #[arg(long, value_name = "NODE")]
    node: Option<String>,

    /// Only those with this label; given more than once, with all of them
    #[arg(long, value_name = "KEY[=VALUE]", value_parser = ec_model::input::label_selector)]
    label: Vec<LabelSelector>,

    /// Only those of this project
    #[arg(long, value_name = "PROJECT", value_parser = crate::config::owner)]
    project: Option<String>,
}

impl WhoseArgs {
    /// The same, with the node's uuid.
    async fn whose(self, cloud: &Cloud) -> Result<Whose, CloudError> {
        let node = match &self.node {
            Some(text) => Some(node_named(cloud, text).await?),
            None => None,
        };
        Ok(Whose { node, labels: self.label, project: self.project })
    }
}

/// Which instances are meant.
#[derive(Args)]
pub(crate) struct Which {
    /// Only those in this state; more with commas, or given again
    #[arg(long, value_name = "STATE", value_delimiter = ',', value_parser = state)]
    state: Vec<State>,

    #[command(flatten)]
    whose: WhoseArgs,
}

impl Which {
    /// The same, with the node's uuid.
    ///
    /// # Errors
    /// There is no such node.
    pub(crate) async fn filter(self, cloud: &Cloud) -> Result<Filter, CloudError> {
        Ok(Filter { states: self.state, whose: self.whose.whose(cloud).await? })
    }
}

/// Which volumes, or snapshots, are meant.
#[derive(Args)]
pub(crate) struct WhichVolumes {
    /// Only those of this status; more with commas, or given again
    #[arg(long, value_name = "STATUS", value_delimiter = ',', value_parser = VolumeView::STATUSES)]
    status: Vec<String>,

    #[command(flatten)]
    whose: WhoseArgs,

    /// Only those that this instance has, and snapshots of it: its name or its uuid
    #[arg(long, value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
    instance: Option<String>,
}

impl WhichVolumes {
    /// The volumes that are meant, of all that there are.
    ///
    /// # Errors
    /// There is no such node or instance, or etcd does not answer.
    pub(crate) async fn volumes(self, cloud: &Cloud) -> Result<Vec<VolumeView>, CloudError> {
        let whose = self.whose.whose(cloud).await?;
        let instance = match &self.instance {
            Some(text) => Some(resolve(cloud, text).await?),
            None => None,
        };
        let filter = VolumeFilter { statuses: self.status, whose, instance };
        let mut volumes = ec_cloud::volumes(cloud).await?;
        volumes.retain(|volume| filter.takes(volume));
        Ok(volumes)
    }
}

/// What of the list is shown.
#[derive(Args)]
pub(crate) struct Listing {
    #[command(flatten)]
    which: Which,

    /// What they are ordered by; equals by name and uuid
    #[arg(long, value_name = "FIELD", default_value = "node")]
    sort: Sort,

    /// Not more than so many; how many follow is told on standard error
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    /// Only what follows this instance in that order
    #[arg(long, value_name = "INSTANCE")]
    after: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Sort {
    Node,
    Name,
    State,
    Ip,
    Project,
    /// The oldest first
    Created,
}

impl From<Sort> for SortBy {
    fn from(sort: Sort) -> Self {
        match sort {
            Sort::Node => Self::Node,
            Sort::Name => Self::Name,
            Sort::State => Self::State,
            Sort::Ip => Self::Ip,
            Sort::Project => Self::Project,
            Sort::Created => Self::Created,
        }
    }
}

/// The state that a word is, in any case of letters.
pub(crate) fn state(word: &str) -> Result<State, String> {
    State::named(&word.to_ascii_uppercase()).ok_or_else(|| {
        let all = State::ALL.map(State::name);
        format!("wanted one of {}", all.join(", "))
    })
}

/// Prints the list.
pub(crate) async fn list(session: &Session, listing: Listing, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let filter = listing.which.filter(cloud).await?;
    let after = match &listing.after {
        Some(text) => Some(no_volume(cloud, text).await?),
        None => None,
    };
    let limit = listing.limit.map(|limit| limit as usize);
    let page = ec_cloud::page(ec_cloud::list(cloud).await?, &filter, listing.sort.into(), after, limit)?;
    let names = Names::of(cloud, Workload::Machine, output).await?;
    output::instances(output, &page.views, &names)?;
    if let Some(last) = page.views.last().filter(|_| page.more > 0) {
        tell(&format!("eschedule: {} more follow: `--after {}` goes on", page.more, last.instance));
    }
    Ok(())
}

//! `eschedule list`: which instances, in which order, how many.

use clap::{Args, ValueEnum, builder::NonEmptyStringValueParser};
use ec_cloud::{
    Cloud, CloudError, Filter, SortBy, SortVolumesBy, VolumeFilter, VolumeView, Whose, node_named, resolve,
    resolve_volume,
};
use ec_model::{InstanceId, State, Workload, input::LabelSelector};
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
struct WhichVolumes {
    /// Only those of this status; more with commas, or given again
    #[arg(long, value_name = "STATUS", value_delimiter = ',', value_parser = VolumeView::STATUSES)]
    status: Vec<String>,

    #[command(flatten)]
    whose: WhoseArgs,

    /// Only those that this instance has, and snapshots of it: its name or its uuid
    #[arg(long, value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
    instance: Option<String>,
}

/// What of the list of volumes, or of snapshots, is shown.
#[derive(Args)]
pub(crate) struct ListingVolumes {
    #[command(flatten)]
    which: WhichVolumes,

    /// What they are ordered by; equals by name and uuid
    #[arg(long, value_name = "FIELD", default_value = "node")]
    sort: SortVolumes,

    #[command(flatten)]
    most: Most,

    /// Only what follows this one in that order: its name or its uuid
    #[arg(long, value_name = "VOLUME")]
    after: Option<String>,
}

impl ListingVolumes {
    /// The volumes that are meant, or the snapshots among them; how many follow is told.
    ///
    /// # Errors
    /// There is no such node, instance or volume, or etcd does not answer.
    pub(crate) async fn volumes(self, cloud: &Cloud, snapshots: bool) -> Result<Vec<VolumeView>, CloudError> {
        let Self { which, sort, most, after } = self;
        let whose = which.whose.whose(cloud).await?;
        let instance = match &which.instance {
            Some(text) => Some(resolve(cloud, text).await?),
            None => None,
        };
        let after = match &after {
            Some(text) => Some(resolve_volume(cloud, text).await?),
            None => None,
        };
        let filter = VolumeFilter { statuses: which.status, whose, instance, snapshots };
        let all = ec_cloud::volumes(cloud).await?;
        let page = ec_cloud::page_of_volumes(all, &filter, sort.into(), after, most.limit())?;
        tell_more(page.more, page.views.last().map(|last| last.volume));
        Ok(page.views)
    }
}

/// How much of a list is shown.
#[derive(Args)]
struct Most {
    /// Not more than so many; how many follow is told on standard error
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
}

impl Most {
    fn limit(&self) -> Option<usize> {
        self.limit.map(|limit| limit as usize)
    }
}

/// How many follow a page that is the last of which.
fn tell_more(more: usize, last: Option<InstanceId>) {
    if let Some(last) = last.filter(|_| more > 0) {
        tell(&format!("eschedule: {more} more follow: `--after {last}` goes on"));
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum SortVolumes {
    Node,
    Name,
    Status,
    /// The largest first
    Size,
    Project,
    /// The oldest first
    Created,
}

impl From<SortVolumes> for SortVolumesBy {
    fn from(sort: SortVolumes) -> Self {
        match sort {
            SortVolumes::Node => Self::Node,
            SortVolumes::Name => Self::Name,
            SortVolumes::Status => Self::Status,
            SortVolumes::Size => Self::Size,
            SortVolumes::Project => Self::Project,
            SortVolumes::Created => Self::Created,
        }
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

    #[command(flatten)]
    most: Most,

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
    let all = ec_cloud::list(cloud).await?;
    let page = ec_cloud::page(all, &filter, listing.sort.into(), after, listing.most.limit())?;
    let names = Names::of(cloud, Workload::Machine, output).await?;
    output::instances(output, &page.views, &names)?;
    tell_more(page.more, page.views.last().map(|last| last.instance));
    Ok(())
}

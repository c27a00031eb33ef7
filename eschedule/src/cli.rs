//! The grammar of the command line.

mod act;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{
    Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::NonEmptyStringValueParser,
    error::{ContextKind, ContextValue},
    parser::ValueSource,
};
use clap_complete::Shell;
use ec_model::{RequestId, Restart, input::LabelSelector};
use ec_runtime::{LogFormat, exit::answered};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::{
    apply::Apply,
    catalog::{FlavorCommand, GroupCommand, KeypairCommand},
    cluster::{ClusterCommand, NodeCommand},
    heal::Healing,
    image::ImageCommand,
    list::Listing,
    reach::Reach,
    run::{Place, Run},
    snapshot::SnapshotCommand,
    storage::StorageCommand,
    top::Top,
    volume::VolumeCommand,
    watch::Watching,
};

pub(crate) use act::{Act, Resizing, Size};

/// So much of a wrong value is repeated, in characters.
const SHOWN: usize = 80;

/// Nobody waits longer for a virtual machine.
pub(crate) const YEAR: u64 = 365 * 24 * 3600;

/// By these a configuration is named.
pub(crate) const CONFIG: &str = "--config";
pub(crate) const CONFIG_VARIABLE: &str = "ESCHEDULE_CONFIG";

/// What stands before a command goes with none, so that clap's own line of both would be refused.
const USAGE: &str = "\
eschedule [OPTIONS] <QUERY|INSTANCE> [IMAGE_URL]
       eschedule <COMMAND>";

const EXAMPLES: &str = "\
Examples:
  eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
      claims room, requests a virtual machine there, prints its node and instance
  eschedule --wait --name web --key ~/.ssh/id_ed25519.pub \\
      'resources=VCPU:1,MEMORY_MB:512&required=HW_CPU_X86_AVX2' https://host/image.qcow2
      the same on a node with a trait, with a name, a key and an image, until it has its IP
  eschedule 7d3c1f0a-2b4e-4c55-9a7e-0123456789ab
      prints the IP of an instance
  eschedule run web --flavor small --image debian --key me --label role=front --wait
      the same with names for room, image and keys (`flavor`, `image`, `keypair`)
  eschedule stop web db; eschedule start --wait --label role=front
      asks two guests to end; starts all with a label again and waits until they run
  eschedule list --state ERROR -o name
      prints the names of instances that are in trouble, or uuids where a name means another
  eschedule destroy web
      destroys an instance, also one in ERROR or UNCLAIMED, and what a killed command left

Names are a project's own, in any case of letters. An instance that is called as a command is
(`list`, `watch`) is asked for by its uuid. What schedule.yaml says under `defaults` serves where
the command line says nothing. Ctrl-C takes back what is not yet requested, and says what stays.

Exit codes:
  0 done, 1 refused or failed (no capacity, not found, ERROR, a full disk),
  2 wrong usage or configuration, 3 etcd or placement (or what else is asked) not reachable,
  130 interrupted, 141 nobody reads standard output";

/// Puts virtual machines where they fit.
///
/// Asks placement for allocation candidates, claims one, and writes a request for its node into etcd; the
/// node's agent does the rest. Results go to standard output, everything else to standard error.
#[derive(Parser)]
#[command(name = "eschedule", version, after_help = EXAMPLES, override_usage = USAGE, subcommand_negates_reqs = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// A resources query to schedule, or an instance (uuid or name) whose IP to print
    #[arg(value_name = "QUERY|INSTANCE", required = true, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) target: Option<String>,

    /// What to boot: http://, https:// or file://, the name of an image, or a copy of the disk of volume:NAME or instance:NAME
    /// [default: `image` of schedule.yaml]
    #[arg(value_name = "IMAGE_URL")]
    pub(crate) image: Option<String>,

    #[command(flatten)]
    pub(crate) spec: Spec,

    #[command(flatten)]
    pub(crate) place: Place,

    #[command(flatten)]
    pub(crate) waiting: Waiting,

    /// Configuration file [default: what ESCHEDULE_CONFIG names, ./schedule.yaml, /etc/ecompute/schedule.yaml, then
    /// defaults]
    // Not by clap's `env`: each usage line that it prints would begin with it.
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) config: Option<OsString>,

    /// The id that this command has in etcd, in placement and in logs: `req-` and a uuid [default: a new one]
    #[arg(long, value_name = "ID", global = true)]
    pub(crate) request_id: Option<RequestId>,

    /// How log lines look; RUST_LOG decides which there are, and without it there are none
    #[arg(long, value_name = "FORMAT", default_value = "text", global = true)]
    pub(crate) log_format: LogFormat,

    /// How results are printed
    #[arg(long, short, value_name = "FORMAT", default_value = "table", global = true)]
    pub(crate) output: Output,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    /// The options that are not everywhere the same and stand before a command, or beside a query or an instance.
    #[arg(skip)]
    pub(crate) given: Vec<String>,
}

/// What the guest shall be, beside its resources.
#[derive(Args, Default)]
pub(crate) struct Spec {
    /// The guest's hostname, of which each project has one [default: `defaults.name_prefix` of schedule.yaml and the
    /// beginning of its uuid]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    #[command(flatten)]
    pub(crate) given: Given,
}

/// What the guest is given, and what is told of it.
#[derive(Args, Default)]
pub(crate) struct Given {
    /// A file given to the guest as user-data, byte for byte, up to 64 KiB; `-` is standard input
    /// [default: `defaults.user_data`]
    #[arg(long, value_name = "FILE")]
    pub(crate) user_data: Option<PathBuf>,

    /// Public ssh keys for the guest: a keypair's name, or a file, `-` for standard input; may be given more than once
    /// [default: `defaults.keys`]
    #[arg(long, value_name = "KEYPAIR|FILE")]
    pub(crate) key: Vec<String>,

    /// The SHA-256 that the image must have, in hex
    #[arg(long, value_name = "DIGEST")]
    pub(crate) sha256: Option<String>,

    /// Boot from this volume itself, which outlives the instance, in the place of an image: then it has no disk of its own
    #[arg(long, value_name = "VOLUME", conflicts_with = "sha256")]
    pub(crate) boot_volume: Option<String>,

    /// Where the files lie that are named here; none where they are seen from the current directory.
    #[arg(skip)]
    pub(crate) beside: Option<PathBuf>,

    /// It boots from a volume that has yet to be made.
    #[arg(skip)]
    pub(crate) boots: bool,

    /// The keys of one that is there, which keeps them: no others are read.
    #[arg(skip)]
    pub(crate) keeps_keys: Option<Vec<String>>,

    /// Give the guest its metadata only with a session token, as EC2's IMDSv2 [default: `defaults.require_token`]
    #[arg(long)]
    pub(crate) require_token: bool,

    #[command(flatten)]
    pub(crate) traits: Traits,
}

/// Whether and how long to wait.
#[derive(Args, Clone, Copy)]
pub(crate) struct Waiting {
    /// Wait for the outcome, telling how far it is
    #[arg(long)]
    pub(crate) wait: bool,

    /// Stop waiting after so many seconds (exit code 1; the instance goes on)
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, requires = "wait", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(..=YEAR))]
    pub(crate) timeout: u64,
}

/// `--wait` and `--timeout` of what is done at once, which change nothing: scripts give them to all verbs.
pub(crate) fn at_once() -> [Arg; 2] {
    let timeout = Arg::new("timeout").long("timeout").value_name("SECONDS").requires("wait").hide(true);
    [waits_anyway("It is done at once: taken, so that all verbs take it"), timeout]
}

/// `--wait`, where it changes nothing, with why.
pub(crate) fn waits_anyway(why: &'static str) -> Arg {
    Arg::new("wait").long("wait").action(ArgAction::SetTrue).help(why)
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    #[value(alias = "text")]
    Table,
    /// For scripts
    Json,
    /// For scripts, and people
    Yaml,
    /// Only names, or uuids where there is none, a line each
    Name,
}

/// Which instances.
#[derive(Args, Clone, Default)]
pub(crate) struct Instances {
    /// Names, uuids, or the beginnings of uuids that no other has
    #[arg(value_name = "INSTANCE", required_unless_present = "label", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) instances: Vec<String>,

    /// Instead of INSTANCE: those of the project that have this label; given more than once, all of them
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "instances", value_parser = ec_model::input::label_selector)]
    pub(crate) label: Vec<LabelSelector>,
}

/// Which instances, where `--label` says what is done to them.
#[derive(Args, Clone)]
pub(crate) struct Named {
    /// Names, uuids, or the beginnings of uuids that no other has
    #[arg(value_name = "INSTANCE", required_unless_present = "select", value_parser = NonEmptyStringValueParser::new())]
    instances: Vec<String>,

    /// Instead of INSTANCE: those of the project that have this label; given more than once, all of them
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "instances", value_parser = ec_model::input::label_selector)]
    select: Vec<LabelSelector>,
}

impl From<Named> for Instances {
    fn from(named: Named) -> Self {
        Self { instances: named.instances, label: named.select }
    }
}

/// What is told of an instance, and what follows its end.
#[derive(Args, Default)]
pub(crate) struct Traits {
    /// A label; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::label)]
    pub(crate) label: Vec<(String, String)>,

    /// An item of metadata, which the guest is told by its metadata service; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::metadata)]
    pub(crate) meta: Vec<(String, String)>,

    /// When the guest ends by itself: leave it STOPPED, start it again if it crashed (five times in a row at most), or
    /// always start it again
    #[arg(long, value_name = "POLICY")]
    pub(crate) restart: Option<Policy>,
}

#[derive(Debug, Clone, Copy, ValueEnum, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Policy {
    No,
    OnFailure,
    Always,
}

impl From<Policy> for Restart {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::No => Self::No,
            Policy::OnFailure => Self::OnFailure,
            Policy::Always => Self::Always,
        }
    }
}

impl Cli {
    /// What was typed; where that cannot be, or was a question, how the process ends after its answer.
    pub(crate) fn read() -> Result<Self, ExitCode> {
        let wrong = |error| answered("eschedule", &brief(error));
        let mut command = Self::command();
        let matches = command.try_get_matches_from_mut(std::env::args_os()).map_err(wrong)?;
        let mut cli = Self::from_arg_matches(&matches).map_err(wrong)?;
        let is_given = |arg: &&Arg| {
            !arg.is_global_set()
                && matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
        };
        let given = command.get_arguments().filter(is_given).filter_map(Arg::get_long);
        cli.given = given.map(|option| format!("--{option}")).collect();
        Ok(cli)
    }

    /// The configuration's file that is named, and by what; none where that is empty.
    pub(crate) fn named(&self) -> Option<(&'static str, PathBuf)> {
        let file = self.config.clone().map(|file| (CONFIG, file));
        let file = file.or_else(|| std::env::var_os(CONFIG_VARIABLE).map(|file| (CONFIG_VARIABLE, file)));
        file.filter(|(_, file)| !file.is_empty()).map(|(by, file)| (by, file.into()))
    }
}

/// That somebody may have mistyped a command: any word else is taken for what is asked for without one.
pub(crate) fn meant(word: &str) -> Option<String> {
    let command = Cli::command();
    let names = command.get_subcommands().map(clap::Command::get_name);
    let near = names.map(|name| (strsim::damerau_levenshtein(&word.to_lowercase(), name), name)).min();
    // Of words as short as these, more than a third that is otherwise makes another.
    near.filter(|(distance, _)| 3 * distance <= word.chars().count())
        .map(|(_, name)| format!("did you mean `{name}`?"))
}

/// An error of what was typed, which repeats no more of what was typed than can be read.
fn brief(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue)
        && value.chars().count() > SHOWN
    {
        let value: String = value.chars().take(SHOWN).chain(['…']).collect();
        error.insert(ContextKind::InvalidValue, ContextValue::String(value));
    }
    error
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Destroy instances
    #[command(
        mut_arg("instances", |words| words.help("Names, uuids, or beginnings of uuids of eight characters or more")),
        after_help = "Examples:\n  eschedule destroy web db --wait\n  eschedule destroy --label role=web"
    )]
    Destroy {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    #[command(flatten)]
    Act(Act),
    /// Give instances another size on their nodes, by a flavor or a resources query; then confirm or revert that
    ///
    /// A larger disk grows while the guest runs, and none ever shrinks. More processors or memory it is given while it runs where libvirt
    /// can; else it is asked to end, ended after 60 s, and started again. What it had before stays claimed beside until --confirm
    /// forgets it or --revert goes back to it.
    #[command(after_help = act::RESIZES, override_usage = act::RESIZE_USAGE)]
    Resize(Resizing),
    #[command(flatten)]
    Reach(Reach),
    /// Schedule an instance by a flavor, with names for image and keys
    ///
    /// The same as the grammar without a command, for people: NAME is the guest's hostname, of which each project has
    /// one; what room it takes says a flavor (`eschedule flavor list`), or a query.
    #[command(after_help = crate::run::EXAMPLES)]
    Run(Box<Run>),
    /// Make instances, groups and volumes what a file says of them
    ///
    /// What is otherwise is told before. An instance or a volume of the file that is not there is asked for; labels, metadata and
    /// what follows its end are set; volumes are given, taken and made larger; another image, room or group is told, and left to
    /// you.
    #[command(after_help = crate::apply::EXAMPLES)]
    Apply(Apply),
    /// List instances, those of all projects, by node and name
    ///
    /// Takes away what commands that were killed left more than ten minutes ago, where it may.
    #[command(after_help = crate::list::EXAMPLES)]
    List(Listing),
    /// Print how instances are, and each change of it as it happens
    ///
    /// One line for each instance that is there, then one for each change, until it is interrupted. With -o json each is
    /// a JSON document in a line of its own.
    #[command(after_help = crate::watch::EXAMPLES)]
    Watch(Watching),
    /// Show nodes and instances on the whole screen, as they change; act on the selected
    ///
    /// Nodes with their load and with what is taken of them; instances with their state and with what they use. `?` tells the
    /// keys: to filter, to order, to see everything of one, to start, stop, reboot and destroy it, to see its console.
    #[command(after_help = crate::top::EXAMPLES)]
    Top(Top),
    /// Show everything known of instances
    #[command(after_help = crate::show::EXAMPLES)]
    Show {
        #[command(flatten)]
        instances: Instances,
    },
    /// Print what was done to an instance, or a volume, by whom, when, and what came of it
    ///
    /// The last 32 things that were asked for, and the last 32 that came of them or by themselves. Of a destroyed instance, by its
    /// uuid, for a day. A name is an instance's, or that of a volume where no instance bears it.
    #[command(after_help = crate::events::EXAMPLES)]
    Events {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
    },
    /// Explain a state, an instance, or who would take a resources query now, and why nobody does
    #[command(after_help = crate::explain::EXAMPLES)]
    Explain {
        /// A state as `list` shows it, a query, or an instance's name or uuid; one that is named like a state is told by its uuid
        #[arg(value_name = "STATE|QUERY|INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        word: String,
    },
    /// Bring back what nodes hold of instances and etcd lacks, after it was put back to a backup, or emptied
    ///
    /// Name, labels, lock, user-data and all else that was wanted of them, as their nodes knew it. Guests run on: nothing is
    /// started, ended or made anew by it. Of what is asked for by now nothing is changed.
    #[command(after_help = crate::heal::EXAMPLES)]
    Heal(Healing),
    /// List the nodes, alive or not, with what is taken of what they have
    #[command(after_help = "Examples:\n  eschedule nodes\n  eschedule nodes -o name")]
    Nodes,
    /// Look at every part of the cluster, and say of each finding how to mend it
    ///
    /// This command's own settings, each member of etcd, placement, every node with its agent's own word, and the instances.
    #[command(after_help = crate::doctor::EXAMPLES)]
    Doctor,
    /// Give placement queries names
    #[command(subcommand, after_help = crate::catalog::FLAVORS)]
    Flavor(FlavorCommand),
    /// Give public ssh keys names, within the project
    #[command(subcommand, after_help = crate::catalog::KEYPAIRS)]
    Keypair(KeypairCommand),
    /// Give what is booted names: of a URL, a file, or a known distribution
    #[command(subcommand, after_help = crate::image::EXAMPLES)]
    Image(ImageCommand),
    /// Make disks with a life of their own, and give them to instances
    #[command(subcommand, after_help = crate::volume::EXAMPLES)]
    Volume(VolumeCommand),
    /// Keep all disks of an instance as they are at one moment, and go back to that
    #[command(subcommand, after_help = crate::snapshot::EXAMPLES)]
    Snapshot(SnapshotCommand),
    /// See what storage nodes share, and say which nodes may
    #[command(subcommand, after_help = crate::storage::EXAMPLES)]
    Storage(StorageCommand),
    /// Keep instances apart or together, within the project
    #[command(subcommand, after_help = crate::catalog::GROUPS)]
    Group(GroupCommand),
    /// Begin a cluster of many hosts, with certificates and rights
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Say which hosts belong to the cluster
    #[command(subcommand, after_help = crate::cluster::NODES)]
    Node(NodeCommand),
    /// Print what a shell runs to complete commands, options, and names that the cluster has
    ///
    /// For example in ~/.bashrc: source <(eschedule completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write manual pages
    #[command(after_help = "Examples:\n  eschedule man /usr/local/share/man/man1")]
    Man {
        /// Into this directory
        directory: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole help of a command, in one line.
    fn help(name: &str) -> String {
        let mut command = Cli::command();
        let help = command.find_subcommand_mut(name).unwrap().render_long_help().to_string();
        help.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn who_loses_a_disk_by_a_mistake_is_told_how_much_of_a_uuid_is_wanted() {
        for (name, is_said) in [("destroy", true), ("rebuild", true), ("stop", false)] {
            assert_eq!(help(name).contains("eight characters or more"), is_said, "{name}");
        }
    }

    #[test]
    fn every_verb_takes_that_it_is_waited_for_also_where_that_changes_nothing() {
        for line in [
            "lock web",
            "unlock web",
            "rename web www",
            "volume rename data old",
            "volume set data --label a=b",
            "snapshot restore before",
            "snapshot create web before",
            "stop web",
            "set web --label a=b",
        ] {
            let words = line.split(' ').chain(["--wait", "--timeout", "60"]);
            let taken = Cli::command().try_get_matches_from(["eschedule"].into_iter().chain(words));
            assert!(taken.is_ok(), "{line}: {}", taken.unwrap_err());
        }
        assert!(help("lock").contains("--wait It is done at once"));
    }

    #[test]
    fn the_time_of_apply_is_for_all_that_is_waited_for_together() {
        assert!(help("apply").contains("with --wait for all of it, from when the last was asked for"));
    }
}

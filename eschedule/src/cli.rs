//! The grammar of the command line.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use clap_complete::Shell;

/// Nobody waits longer for a virtual machine.
const YEAR: u64 = 365 * 24 * 3600;

const EXAMPLES: &str = "\
Examples:
  eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
      claims room, requests a virtual machine there, prints its node and instance
  eschedule --wait --name web --key ~/.ssh/id_ed25519.pub \\
      'resources=VCPU:1,MEMORY_MB:512&required=HW_CPU_X86_AVX2' https://host/image.qcow2
      the same on a node with a trait, with a name, a key and an image, until it has its IP
  eschedule 7d3c1f0a-2b4e-4c55-9a7e-0123456789ab
      prints the IP of an instance
  eschedule destroy web
      destroys an instance, also one in ERROR or UNCLAIMED, and what a killed command left

Names are a project's own, in any case of letters. What schedule.yaml says under `defaults` serves where the
command line says nothing. Ctrl-C takes back what is not yet requested, and says what stays.

Exit codes:
  0 done, 1 refused or failed (no capacity, not found, ERROR, a full disk), 2 wrong usage or configuration,
  3 etcd or placement not reachable, 130 interrupted, 141 nobody reads standard output";

/// Puts virtual machines where they fit.
///
/// Asks placement for allocation candidates, claims one, and writes a request for its node into etcd; the
/// node's agent does the rest. Results go to standard output, everything else to standard error.
#[derive(Parser)]
#[command(name = "eschedule", version, after_help = EXAMPLES, subcommand_negates_reqs = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// A resources query to schedule, or an instance (uuid or name) whose IP to print
    #[arg(value_name = "QUERY|INSTANCE", required = true, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) target: Option<String>,

    /// What to boot: http://, https:// or file:// [default: `image` of schedule.yaml]
    #[arg(value_name = "IMAGE_URL")]
    pub(crate) image: Option<String>,

    #[command(flatten)]
    pub(crate) spec: Spec,

    #[command(flatten)]
    pub(crate) waiting: Waiting,

    /// Configuration file [default: ./schedule.yaml, then /etc/ecompute/schedule.yaml, then defaults]
    #[arg(long, value_name = "FILE", env = "ESCHEDULE_CONFIG", global = true)]
    pub(crate) config: Option<OsString>,

    /// How results are printed
    #[arg(long, short, value_name = "FORMAT", default_value = "text", global = true)]
    pub(crate) output: Output,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// What the guest shall be, beside its resources.
#[derive(Args, Default)]
pub(crate) struct Spec {
    /// The guest's hostname, of which each project has one [default: `defaults.name_prefix` of schedule.yaml and the
    /// beginning of its uuid]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    /// A file given to the guest as user-data, byte for byte, up to 64 KiB [default: `defaults.user_data`]
    #[arg(long, value_name = "FILE")]
    pub(crate) user_data: Option<PathBuf>,

    /// A file with public ssh keys for the guest; may be given more than once [default: `defaults.keys`]
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Vec<PathBuf>,

    /// The SHA-256 that the image must have, in hex
    #[arg(long, value_name = "DIGEST")]
    pub(crate) sha256: Option<String>,

    /// Give the guest its metadata only with a session token, as EC2's IMDSv2 [default: `defaults.require_token`]
    #[arg(long)]
    pub(crate) require_token: bool,
}

/// Whether and how long to wait.
#[derive(Args, Clone, Copy)]
pub(crate) struct Waiting {
    /// Wait for the outcome, telling how far it is
    #[arg(long)]
    pub(crate) wait: bool,

    /// Stop waiting after so many seconds (exit code 1; the instance goes on)
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(..=YEAR))]
    pub(crate) timeout: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Text,
    /// For scripts
    Json,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Destroy an instance
    Destroy {
        /// Its uuid or name
        instance: String,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// List all instances
    ///
    /// Takes away what commands that were killed left more than ten minutes ago, where it may.
    List,
    /// Show everything known of an instance
    Show {
        /// Its uuid or name
        instance: String,
    },
    /// List the nodes whose agents are alive or that hold instances, with what is taken of what they have
    Nodes,
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write manual pages
    Man {
        /// Into this directory
        directory: PathBuf,
    },
}

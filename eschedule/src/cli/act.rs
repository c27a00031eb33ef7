//! The grammar of what is done to instances that are there.

use std::collections::BTreeMap;

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use ec_cloud::{Change, Verb, resolve_name};
use ec_model::{GRACE_SECONDS, Restart, Workload, input::LabelSelector};
use ec_runtime::exit::Failure;

use super::{Instances, Named, Traits, Waiting, at_once};
use crate::{
    config::Session,
    spec::{certain_ref, hostname, image_ref, once_each},
};

/// Characters that a reason may have: what OpenStack's Compute API takes for `locked_reason`.
const REASON_MAX: usize = 255;

pub(super) const RESIZE_USAGE: &str = "\
eschedule resize [OPTIONS] <INSTANCE>... <QUERY>
       eschedule resize [OPTIONS] --flavor <FLAVOR>|--confirm|--revert <INSTANCE>...
       eschedule resize [OPTIONS] --label <KEY[=VALUE]> <QUERY>
       eschedule resize [OPTIONS] --flavor <FLAVOR>|--confirm|--revert --label <KEY[=VALUE]>";

const REBUILD_USAGE: &str = "\
eschedule rebuild [OPTIONS] <INSTANCE> [IMAGE]
       eschedule rebuild [OPTIONS] --image <IMAGE> <INSTANCE>...
       eschedule rebuild [OPTIONS] [--image <IMAGE>] --label <KEY[=VALUE]>";

const REBUILDS: &str = "\
Examples:
  eschedule rebuild web --wait                from the image that it has
  eschedule rebuild web debian:13             from another
  eschedule rebuild --image debian:13 web db
  eschedule rebuild --image debian:13 --label role=web";

pub(super) const RESIZES: &str = "\
Examples:
  eschedule resize web --flavor large --wait
      the new size, until the guest runs with it (VERIFY_RESIZE)
  eschedule resize web 'resources=VCPU:2,MEMORY_MB:1024,DISK_GB:10'
      the same by a query
  eschedule resize --label role=web --flavor large
      all that have the label
  eschedule resize --confirm web db
      keeps it, and gives back what is not needed any more
  eschedule resize web --revert --wait
      goes back, but for the disk";

/// How long a guest may take to end.
#[derive(Args, Clone, Copy)]
pub(crate) struct Grace {
    /// End the guest hard when it has not ended by itself in so many seconds; 0: at once
    #[arg(long, value_name = "SECONDS", default_value_t = GRACE_SECONDS, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(..=86_400))]
    pub(crate) grace: u32,
}

/// What is done to instances that are there.
#[derive(Subcommand)]
pub(crate) enum Act {
    /// Start instances that do not run
    #[command(after_help = "Examples:\n  eschedule start web db --wait\n  eschedule start --label role=web")]
    Start {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Stop instances: ask their guests to end, and end those that do not
    #[command(
        after_help = "Examples:\n  eschedule stop web --wait\n  eschedule stop web --grace 0            at once, as when power fails"
    )]
    Stop {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        grace: Grace,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Stop instances and start them again
    #[command(
        after_help = "Examples:\n  eschedule reboot web --wait\n  eschedule reboot web --hard             at once, as by the reset button"
    )]
    Reboot {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        grace: Grace,
        /// Do not ask the guests, as with --grace 0
        #[arg(long, conflicts_with = "grace")]
        hard: bool,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Halt instances where they are; their memory stays taken
    #[command(after_help = "Examples:\n  eschedule pause web")]
    Pause {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Let paused instances go on
    #[command(after_help = "Examples:\n  eschedule unpause web")]
    Unpause {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Save instances' memory to their nodes' disks and end them
    #[command(after_help = "Examples:\n  eschedule suspend web --wait\n  eschedule suspend --label role=web")]
    Suspend {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Let suspended instances go on where they were
    #[command(after_help = "Examples:\n  eschedule resume web --wait")]
    Resume {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Give an instance a new disk, made from the image asked for last or another; what its guest wrote is lost
    ///
    /// It keeps its uuid, its claim and its addresses. Its guest runs on until the new disk is there, and then is ended; it is
    /// started again if it was wanted running. An image that cannot be had leaves everything as it was.
    #[command(after_help = REBUILDS, override_usage = REBUILD_USAGE)]
    Rebuild(Rebuilding),
    /// Boot instances from rescue disks, with their own beside them as the second, so that these can be mended
    ///
    /// Each keeps its uuid, its claim and its addresses, and the guest of the rescue disk gets the same metadata. Its guest runs on
    /// until the rescue disk is there; then it is asked to end, and ended after 60 s. An image that cannot be had leaves everything as
    /// it was.
    #[command(
        after_help = "Examples:\n  eschedule rescue web --wait                     from the image that web has\n  eschedule rescue web --image debian:13 --wait   from another"
    )]
    Rescue {
        #[command(flatten)]
        instances: Instances,
        /// What to make the rescue disk from: http://, https://, file://, or the name of an image
        /// [default: each instance's own image]
        #[arg(long, value_name = "IMAGE")]
        image: Option<String>,
        /// The SHA-256 that the image must have, in hex
        #[arg(long, value_name = "DIGEST", requires = "image")]
        sha256: Option<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Boot rescued instances from their own disks again; what was written to the rescue disk is lost
    #[command(after_help = "Examples:\n  eschedule unrescue web --wait")]
    Unrescue {
        #[command(flatten)]
        instances: Instances,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Let nothing be done to instances but to unlock them
    #[command(args = at_once(), after_help = "Examples:\n  eschedule lock db --reason 'holds the books'")]
    Lock {
        #[command(flatten)]
        instances: Instances,
        /// Why, for whoever is refused
        #[arg(long, value_name = "TEXT", default_value = "", value_parser = reason)]
        reason: String,
    },
    /// Let things be done to locked instances again
    #[command(args = at_once(), after_help = "Examples:\n  eschedule unlock db")]
    Unlock {
        #[command(flatten)]
        instances: Instances,
    },
    /// Call an instance otherwise; its guest's hostname stays
    #[command(args = at_once(), after_help = "Examples:\n  eschedule rename web www")]
    Rename {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
        /// What no other of the project is called
        name: String,
    },
    /// Set labels and metadata of instances, and what follows when they end by themselves
    ///
    /// With --wait until their nodes know: then guests are told of their metadata so. Labels hold at once.
    #[command(
        after_help = "Examples:\n  eschedule set web db --label role=web --meta tier=front\n  eschedule set web --restart on-failure\n  eschedule set --select role=web --label tier=front"
    )]
    Set {
        #[command(flatten)]
        instances: Named,
        #[command(flatten)]
        traits: Traits,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Take labels and metadata off instances
    #[command(
        after_help = "Examples:\n  eschedule unset web db --label role --meta tier\n  eschedule unset --select role=web --label tier"
    )]
    Unset {
        #[command(flatten)]
        instances: Named,
        /// The label's key; may be given more than once
        #[arg(long, value_name = "KEY", required_unless_present = "meta", value_parser = ec_model::input::label_key)]
        label: Vec<String>,
        /// The key of an item of metadata; may be given more than once
        #[arg(long, value_name = "KEY", value_parser = ec_model::input::metadata_key)]
        meta: Vec<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
}

/// Which instances get a new disk, and what that is made from.
#[derive(Args)]
pub(crate) struct Rebuilding {
    /// Its name, its uuid, or eight characters or more of its beginning; behind it, without --image, what to make the disk from. With
    /// --image several
    #[arg(value_name = "INSTANCE", required_unless_present = "label", value_parser = NonEmptyStringValueParser::new())]
    words: Vec<String>,

    /// Instead of INSTANCE: those of the project that have this label; given more than once, all of them. What to make their disks
    /// from says --image; without it each has the one that was asked for last
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "words", value_parser = ec_model::input::label_selector)]
    label: Vec<LabelSelector>,

    /// What to make the disk from: http://, https://, file://, the name of an image, or a copy of the disk of volume:NAME or
    /// instance:NAME [default: the one that was asked for last]
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,

    /// The SHA-256 that the image must have, in hex
    #[arg(long, value_name = "DIGEST")]
    sha256: Option<String>,

    #[command(flatten)]
    waiting: Waiting,
}

impl Rebuilding {
    async fn what(self, session: &Session) -> Result<(Verb, Instances, Waiting), Failure> {
        let Self { words, label, image, sha256, waiting } = self;
        let (instances, image, is_named) = match (&words[..], image) {
            (_, Some(image)) => (words, Some(image), false),
            ([], None) => (words, None, false),
            ([instance], None) => (vec![instance.clone()], None, false),
            ([instance, image], None) => (vec![instance.clone()], Some(image.clone()), true),
            _ => return Err(Failure::usage("several are rebuilt from one image: say `--image IMAGE`")),
        };
        let image = match (image, sha256) {
            (Some(image), sha256) => match certain_ref(session, &image, sha256.as_deref()).await {
                Ok(read) => Some(read),
                // Somebody wants two of them rebuilt. What is an image is one, whoever is called so, too.
                Err(_) if is_named && is_instance(session, &image).await => {
                    return Err(Failure::usage(format!(
                        "`{image}` is an instance and no image, and stands where the image does: one is rebuilt at a time, or several from one image (`--image IMAGE`)"
                    )));
                }
                Err(failure) => return Err(failure),
            },
            (None, None) => None,
            (None, Some(_)) => return Err(Failure::usage("--sha256 goes with an image")),
        };
        Ok((Verb::Rebuild(image), Instances { instances, label }, waiting))
    }
}

/// Whether an instance of the project bears the name.
async fn is_instance(session: &Session, name: &str) -> bool {
    resolve_name(&session.cloud, Workload::Machine, name).await.is_ok()
}

/// Which instances, and how large they shall be.
#[derive(Args)]
pub(crate) struct Resizing {
    /// Names, uuids, or the beginnings of uuids that no other has; behind them, without --flavor, --confirm and --revert, a resources
    /// query
    #[arg(value_name = "INSTANCE", required_unless_present = "label", value_parser = NonEmptyStringValueParser::new())]
    words: Vec<String>,

    /// Instead of INSTANCE: those of the project that have this label; given more than once, all of them
    #[arg(long, value_name = "KEY[=VALUE]", value_parser = ec_model::input::label_selector)]
    label: Vec<LabelSelector>,

    #[command(flatten)]
    to: Extent,

    #[command(flatten)]
    pub(crate) waiting: Waiting,
}

/// What becomes of the size of instances.
pub(crate) enum Size {
    /// What a flavor of this name says.
    Flavor(String),
    /// What a query says.
    Query(String),
    /// It is as it was given last.
    Confirm,
    /// It is as it was before.
    Revert,
}

impl Resizing {
    /// Which instances, and what becomes of them.
    ///
    /// # Errors
    /// What was given cannot be.
    pub(crate) fn what(self) -> Result<(Instances, Size, Waiting), Failure> {
        let Self { mut words, label, to, waiting } = self;
        let size = match to {
            Extent { confirm: true, .. } => Size::Confirm,
            Extent { revert: true, .. } => Size::Revert,
            Extent { flavor: Some(flavor), .. } => Size::Flavor(flavor),
            Extent { .. } => match words.pop_if(|word| is_query(word)) {
                Some(query) => Size::Query(query),
                None => {
                    return Err(Failure::usage(
                        "wanted how large it shall be: --flavor FLAVOR, or behind INSTANCE a query as `resources=VCPU:2,MEMORY_MB:1024`; or --confirm, or --revert",
                    ));
                }
            },
        };
        if let Some(query) = words.iter().find(|word| is_query(word)) {
            return Err(Failure::usage(format!(
                "`{query}` is a query, and goes with none of --flavor, --confirm and --revert, nor with another"
            )));
        }
        match (&words[..], &label[..]) {
            ([], []) => Err(Failure::usage("wanted who: INSTANCE before the query, or --label")),
            ([word, ..], [_, ..]) => Err(Failure::usage(format!(
                "`{word}` cannot be used with --label, which says in its place who is meant"
            ))),
            _ => Ok((Instances { instances: words, label }, size, waiting)),
        }
    }
}

/// Whether it is a query, which no name and no uuid looks like.
fn is_query(word: &str) -> bool {
    word.contains('=')
}

/// How large.
#[derive(Args)]
#[group(id = "extent", multiple = false)]
struct Extent {
    /// A flavor's name
    #[arg(long, value_name = "FLAVOR")]
    flavor: Option<String>,

    /// Keep the size that the last resize gave it
    #[arg(long)]
    confirm: bool,

    /// Go back to the size that it had before; a disk that was grown stays so
    #[arg(long)]
    revert: bool,
}

impl Act {
    /// What is asked of which, and whether its outcome is waited for.
    ///
    /// # Errors
    /// What was given cannot be.
    pub(crate) async fn what(self, session: &Session) -> Result<(Verb, Instances, Waiting), Failure> {
        let at_once = Waiting { wait: false, timeout: 0 };
        Ok(match self {
            Self::Start { instances, waiting } => (Verb::Start, instances, waiting),
            Self::Stop { instances, grace, waiting } => (Verb::Stop(grace.grace), instances, waiting),
            Self::Reboot { instances, grace, hard, waiting } => {
                (Verb::Reboot(if hard { 0 } else { grace.grace }), instances, waiting)
            }
            Self::Pause { instances, waiting } => (Verb::Pause, instances, waiting),
            Self::Unpause { instances, waiting } => (Verb::Unpause, instances, waiting),
            Self::Suspend { instances, waiting } => (Verb::Suspend, instances, waiting),
            Self::Resume { instances, waiting } => (Verb::Resume, instances, waiting),
            Self::Rebuild(rebuilding) => rebuilding.what(session).await?,
            Self::Rescue { instances, image, sha256, waiting } => {
                let image = match image {
                    Some(image) => Some(image_ref(session, &image, sha256.as_deref()).await?),
                    None => None,
                };
                (Verb::Rescue(image), instances, waiting)
            }
            Self::Unrescue { instances, waiting } => (Verb::Unrescue, instances, waiting),
            Self::Lock { instances, reason } => (Verb::Lock(reason), instances, at_once),
            Self::Unlock { instances } => (Verb::Unlock, instances, at_once),
            Self::Rename { instance, name } => (
                Verb::Rename(hostname("NAME", &name)?),
                Instances { instances: vec![instance], ..Instances::default() },
                at_once,
            ),
            Self::Set { instances, traits, waiting } => {
                let set = |words: BTreeMap<String, String>| {
                    words.into_iter().map(|(key, value)| (key, Some(value))).collect()
                };
                let change = Change {
                    labels: set(once_each("--label", &traits.label)?),
                    metadata: set(once_each("--meta", &traits.meta)?),
                    restart: traits.restart.map(Restart::from),
                };
                if change == Change::default() {
                    return Err(Failure::usage("nothing to set: give --label, --meta or --restart"));
                }
                (Verb::Set(change), instances.into(), waiting)
            }
            Self::Unset { instances, label, meta, waiting } => {
                let unset = |keys: Vec<String>| keys.into_iter().map(|key| (key, None)).collect();
                let change = Change { labels: unset(label), metadata: unset(meta), restart: None };
                (Verb::Set(change), instances.into(), waiting)
            }
        })
    }
}

/// One line, as it stands in a record that everybody reads.
fn reason(text: &str) -> Result<String, String> {
    ec_model::input::line(text, REASON_MAX)
}

//! `eschedule volume`: disks with a life of their own.

use std::{collections::BTreeMap, time::Duration};

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use ec_cloud::{
    Acted, Ask, Change, Cloud, CloudError, Doomed, NewVolume, Scheduled, Verb, VolumeView, act, find_placed,
    move_volume, node_named, node_of_copy, node_to_come_to, resolve, resolve_volume, until_active,
    until_done, until_gone,
};
use ec_model::{ImageRef, InstanceId, NodeId, OF_VOLUME, Workload, input::LabelSelector};
use ec_runtime::{
    exit::{Failure, INTERRUPTED, tell},
    shutdown_on_signals,
};

use crate::{
    acting::{CERTAIN, Patience, tell_later},
    cli::{Output, Waiting, at_once},
    config::Session,
    list::ListingVolumes,
    output::{self, Deleted, Names},
    run,
    several::{Asked, Told, each},
    shown::Shown,
    spec::{certain_ref, image_ref, once_each},
};

pub(crate) const EXAMPLES: &str = "\
A volume is a disk on the storage of one node, or on storage that nodes share, where it moves to
the node of who is to have it. Instances can have it, one at a time, whether they run or not; it
stays when they go. A guest finds it as /dev/disk/by-id/virtio- and the beginning of its uuid.
What it takes is claimed as DISK_GB.

Examples:
  eschedule volume create data --size 10 --for db --wait
      an empty one of 10 GiB, on the node where instance db is
  eschedule volume attach data db --wait
      db has it from now on, also after it was started anew
  eschedule volume extend data 20
      it grows while db goes on; its file system the guest grows itself
  eschedule volume clone data copy
      a copy, as it is at this moment
  eschedule volume delete data
      and all that was written on it";

/// A volume is handed over within milliseconds, where both nodes are alive.
const MOVES_WITHIN: Duration = Duration::from_secs(60);

/// What is done to volumes.
#[derive(Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make a volume: empty, of an image, or as a copy of another
    Create(Box<Creating>),
    /// List volumes, those of all projects, by node and name
    List(Box<ListingVolumes>),
    /// Show a volume
    Show {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
    },
    /// Give a volume to an instance of its node, or of another that shares its storage, whether that runs or not
    Attach {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// The instance's name or uuid
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
        /// What the instance's domain calls it, vdb to vdz; guests may call it otherwise [default: the first that is free]
        #[arg(long, value_name = "DEVICE")]
        device: Option<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Have a volume that no instance has be with another node, which has the same shared storage
    ///
    /// `attach` does it by itself where the instance is with another node of the storage.
    Move {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// The node's name or uuid
        node: String,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Take a volume from the instance that has it; unmount it there first
    Detach {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// Only where this instance has it: its name or uuid
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: Option<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Make a volume larger, also while an instance has it; none ever shrinks
    Extend {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// How large it shall be, in GiB
        #[arg(value_name = "GB", allow_negative_numbers = true, required_unless_present = "gigabytes")]
        size: Option<u64>,
        /// The same
        #[arg(long = "size", value_name = "GB", allow_negative_numbers = true, conflicts_with = "size")]
        gigabytes: Option<u64>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Call a volume otherwise
    #[command(args = at_once())]
    Rename {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// What no other volume of the project is called
        name: String,
    },
    /// Set labels of a volume, and take them off
    #[command(args = at_once())]
    Set {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// A label; may be given more than once
        #[arg(long, value_name = "KEY=VALUE", required_unless_present = "unset", value_parser = ec_model::input::label)]
        label: Vec<(String, String)>,
        /// The key of a label that goes; may be given more than once
        #[arg(long, value_name = "KEY", value_parser = ec_model::input::label_key)]
        unset: Vec<String>,
    },
    /// Make a volume that is a copy of another as it is now, also while an instance writes it; as `create --copy-of`
    Clone {
        /// What is copied: its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// What the copy shall be called
        name: String,
        /// How large, in GiB [default: as what it is a copy of]
        #[arg(long, value_name = "GB", allow_negative_numbers = true)]
        size: Option<u64>,
        /// A label; may be given more than once
        #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::label)]
        label: Vec<(String, String)>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Make a snapshot of a volume as it is now, also while an instance writes it: a copy that nothing changes (`eschedule snapshot`)
    Snapshot {
        /// What is copied: its name, its uuid, or the beginning of that
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// What the snapshot shall be called
        name: String,
        /// A label; may be given more than once
        #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::label)]
        label: Vec<(String, String)>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Make a volume anew as a copy of another, or of an image; what was written on it goes, and its name and uuid stay
    ///
    /// Not while an instance that has it runs.
    Restore {
        /// Its name, its uuid, or eight characters or more of its beginning
        #[arg(value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
        volume: String,
        /// What it is made of: volume:NAME, a snapshot's copy of it as volume:SNAPSHOT/NAME, or an image
        #[arg(value_name = "DISK|IMAGE", value_parser = NonEmptyStringValueParser::new())]
        of: String,
        /// The SHA-256 that the image must have, in hex
        #[arg(long, value_name = "DIGEST")]
        sha256: Option<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Delete volumes that no instance has, with all that was written on them
    Delete {
        /// Names, uuids, or beginnings of uuids of eight characters or more
        #[arg(value_name = "VOLUME", required_unless_present = "label", value_parser = NonEmptyStringValueParser::new())]
        volumes: Vec<String>,
        /// Instead of VOLUME: those of the project that have this label, but for snapshots; given more than once, all of them
        #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "volumes", value_parser = ec_model::input::label_selector)]
        label: Vec<LabelSelector>,
        #[command(flatten)]
        waiting: Waiting,
    },
}

/// `eschedule volume create`.
#[derive(Args)]
pub(crate) struct Creating {
    /// What it shall be called, of which each project has one
    name: String,

    /// How large, in GiB [default: as what it is a copy of]
    #[arg(long, value_name = "GB", allow_negative_numbers = true)]
    size: Option<u64>,

    /// Make it of this image: a name or a URL; or as a copy, of volume:NAME or of the disk of instance:NAME
    #[arg(long, value_name = "IMAGE|URL", conflicts_with = "copy_of")]
    image: Option<String>,

    /// The SHA-256 that the image must have, in hex
    #[arg(long, value_name = "DIGEST", requires = "image")]
    sha256: Option<String>,

    /// Make it a copy of this volume as it is now, also while an instance writes it; as `--image volume:VOLUME`
    #[arg(long, value_name = "VOLUME", value_parser = NonEmptyStringValueParser::new())]
    copy_of: Option<String>,

    /// On this node: its name or its uuid
    #[arg(long, value_name = "NODE", conflicts_with = "for_instance")]
    node: Option<String>,

    /// On the node where this instance is
    #[arg(long = "for", value_name = "INSTANCE")]
    for_instance: Option<String>,

    /// A label; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::label)]
    label: Vec<(String, String)>,

    #[command(flatten)]
    waiting: Waiting,
}

impl VolumeCommand {
    /// Whether it takes back, when it is interrupted, what it began with.
    pub(crate) const fn is_long(&self) -> bool {
        matches!(self, Self::Create(_) | Self::Clone { .. } | Self::Snapshot { .. })
    }
}

/// Does it.
pub(crate) async fn volume(session: &Session, command: VolumeCommand, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        VolumeCommand::Create(creating) => create(session, *creating, output).await,
        VolumeCommand::List(listing) => {
            let volumes = listing.volumes(cloud, false).await?;
            output::volumes(output, &volumes, &Names::of(cloud, Workload::Volume, output).await?)
        }
        VolumeCommand::Show { volume } => show(session, resolve_volume(cloud, &volume).await?, output).await,
        VolumeCommand::Attach { volume, instance, device, waiting } => {
            let (volume, instance) =
                (resolve_volume(cloud, &volume).await?, resolve(cloud, &instance).await?);
            let patience = Patience::new(waiting)?;
            let acted = give(session, volume, instance, device.as_deref(), &patience).await?;
            done(session, &patience, instance, &acted, "attaching").await?;
            show_asked(session, volume, output).await
        }
        VolumeCommand::Move { volume, node, waiting } => {
            let (volume, node) = (resolve_volume(cloud, &volume).await?, node_named(cloud, &node).await?);
            let patience = Patience::new(waiting)?;
            match patience.left() {
                Some(timeout) => bring(session, volume, node, &patience, timeout).await?,
                None => {
                    move_volume(cloud, volume, node).await.map_err(|error| session.failed(error))?;
                }
            }
            show_asked(session, volume, output).await
        }
        VolumeCommand::Detach { volume, instance, waiting } => {
            let volume = resolve_volume(cloud, &volume).await?;
            let from = match instance {
                Some(instance) => Some(resolve(cloud, &instance).await?),
                None => None,
            };
            let patience = Patience::new(waiting)?;
            match ec_cloud::detach(cloud, volume, from).await.map_err(|error| session.failed(error))? {
                None => tell(&format!("eschedule: no instance has volume {volume}")),
                Some(detached) => {
                    done(session, &patience, detached.instance, &detached.acted, "detaching").await?;
                }
            }
            // It is seen as it is without this, too.
            if let Err(error) = ec_cloud::let_go(cloud, volume).await {
                tell(&format!("eschedule: {error}"));
            }
            show_asked(session, volume, output).await
        }
        VolumeCommand::Rename { volume, name } => {
            let volume = is_volume(cloud, &volume).await?;
            let acted = act(cloud, volume, &Verb::Rename(name)).await;
            tell_acted(volume, &acted.map_err(|error| session.failed(error))?);
            show_asked(session, volume, output).await
        }
        VolumeCommand::Set { volume, label, unset } => {
            let set = once_each("--label", &label)?.into_iter().map(|(key, value)| (key, Some(value)));
            let mut labels: BTreeMap<_, _> = set.collect();
            for key in unset {
                if labels.insert(key.clone(), None).is_some_and(|value| value.is_some()) {
                    return Err(Failure::usage(format!("label {key} is both set and taken off")));
                }
            }
            let volume = is_volume(cloud, &volume).await?;
            let change = Change { labels, ..Change::default() };
            let acted = act(cloud, volume, &Verb::Set(change)).await;
            tell_acted(volume, &acted.map_err(|error| session.failed(error))?);
            show_asked(session, volume, output).await
        }
        VolumeCommand::Extend { volume, size, gigabytes, waiting } => {
            let size = size.or(gigabytes).unwrap_or_default();
            let volume = resolve_volume(cloud, &volume).await?;
            let patience = Patience::new(waiting)?;
            let acted = ec_cloud::extend_volume(cloud, volume, size).await;
            let acted = acted.map_err(|error| session.failed(error))?;
            done(session, &patience, volume, &acted, "extending").await?;
            show_asked(session, volume, output).await
        }
        VolumeCommand::Clone { volume, name, size, label, waiting } => {
            let labels = once_each("--label", &label)?;
            let image = image_ref(session, &format!("{OF_VOLUME}{volume}"), None).await?;
            let new = NewVolume {
                name: Some(name),
                size_gb: size,
                image: Some(image),
                labels,
                ..NewVolume::default()
            };
            make(session, &new, waiting, output).await
        }
        VolumeCommand::Snapshot { volume, name, label, waiting } => {
            let labels = once_each("--label", &label)?;
            let image = image_ref(session, &format!("{OF_VOLUME}{volume}"), None).await?;
            let new = NewVolume {
                name: Some(name),
                image: Some(image),
                labels,
                snapshot: true,
                ..NewVolume::default()
            };
            make(session, &new, waiting, output).await
        }
        VolumeCommand::Restore { volume, of, sha256, waiting } => {
            let volume = certain(session, &volume, looked_for(cloud, &volume).await?)?;
            let image = certain_ref(session, &of, sha256.as_deref()).await?;
            let patience = Patience::new(waiting)?;
            remake(session, volume, &image, &patience).await?;
            show_asked(session, volume, output).await
        }
        VolumeCommand::Delete { volumes, label, waiting } => {
            let words = match label.is_empty() {
                true => volumes,
                false => uuids(ec_cloud::select_volumes(cloud, &label, false).await?),
            };
            let meant = async |word: &str| certain(session, word, looked_for(cloud, word).await?);
            delete(session, "VOLUME", &words, &label, meant, waiting, output).await
        }
    }
}

/// Has a volume be made anew of this.
pub(crate) async fn remake(
    session: &Session,
    volume: InstanceId,
    of: &ImageRef,
    patience: &Patience,
) -> Result<(), Failure> {
    let acted = ec_cloud::restore_volume(&session.cloud, volume, of).await;
    let acted = acted.map_err(|error| session.failed(error))?;
    done(session, patience, volume, &acted, "restoring").await
}

/// Has a volume come to an instance and asks that this has it; what there is to wait for then.
pub(crate) async fn give(
    session: &Session,
    volume: InstanceId,
    instance: InstanceId,
    device: Option<&str>,
    patience: &Patience,
) -> Result<Acted, Failure> {
    let cloud = &session.cloud;
    if let Some(node) = node_to_come_to(cloud, volume, instance, device).await? {
        bring(session, volume, node, patience, patience.left().unwrap_or(MOVES_WITHIN)).await?;
    }
    let attached = ec_cloud::attach(cloud, volume, instance, device).await;
    Ok(attached.map_err(|error| session.failed(error))?.acted)
}

/// The volume that a word means; a uuid may be anybody's.
async fn is_volume(cloud: &Cloud, text: &str) -> Result<InstanceId, Failure> {
    let volume = resolve_volume(cloud, text).await?;
    Ok(ec_cloud::volume(cloud, volume).await?.volume)
}

/// Has a volume come to a node, and waits for it.
async fn bring(
    session: &Session,
    volume: InstanceId,
    node: NodeId,
    patience: &Patience,
    timeout: Duration,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let moved = move_volume(cloud, volume, node).await.map_err(|error| session.failed(error))?;
    let shown = Shown::new("moving");
    let there = until_active(cloud, moved.node, volume, timeout, |step| shown.step_of_volume(step));
    let there = patience.wait(session, volume, there).await;
    shown.finish();
    there.map(drop)
}

async fn show(session: &Session, volume: InstanceId, output: Output) -> Result<(), Failure> {
    let view = ec_cloud::volume(&session.cloud, volume).await?;
    output::volume(output, &view, &Names::of(&session.cloud, Workload::Volume, output).await?)
}

/// The same of one of which something was asked for before: that holds, whatever fails here.
async fn show_asked(session: &Session, volume: InstanceId, output: Output) -> Result<(), Failure> {
    let shown = show(session, volume, output).await;
    shown.map_err(|failure| run::with(failure, &format!("what was asked of volume {volume} goes on")))
}

async fn create(session: &Session, creating: Creating, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let node = match (&creating.node, &creating.for_instance) {
        (Some(node), _) => Some(node_named(cloud, node).await?),
        (None, Some(instance)) => {
            let instance = resolve(cloud, instance).await?;
            Some(find_placed(cloud, instance).await?.node)
        }
        (None, None) => None,
    };
    let copied = creating.copy_of.as_ref().map(|volume| format!("{OF_VOLUME}{volume}"));
    let image = match copied.as_ref().or(creating.image.as_ref()) {
        Some(image) => Some(image_ref(session, image, creating.sha256.as_deref()).await?),
        None => None,
    };
    let labels: BTreeMap<String, String> = once_each("--label", &creating.label)?;
    let new = NewVolume {
        name: Some(creating.name.clone()),
        size_gb: creating.size,
        image,
        node,
        labels,
        snapshot: false,
    };
    make(session, &new, creating.waiting, output).await
}

/// Makes a volume, and shows it.
pub(crate) async fn make(
    session: &Session,
    new: &NewVolume,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let patience = Patience::new(waiting)?;
    let stop = match patience.left() {
        Some(_) => patience.stop.clone(),
        None => shutdown_on_signals()
            .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?,
    };
    let scheduled =
        ec_cloud::create_volume(cloud, new, &stop).await.map_err(|error| session.failed(error))?;
    let Scheduled { instance: volume, node } = match scheduled {
        Ok(scheduled) => scheduled,
        Err(no_room) => {
            let query = ec_cloud::room_of(cloud, new).await?;
            let ask = Ask::of_volume(&query, node_of_copy(cloud, new).await?.or(new.node))?;
            return Err(run::no_allocations(session, &ask, &no_room, output).await?);
        }
    };
    if let Some(timeout) = patience.left() {
        let shown = Shown::new("claimed");
        let made = until_active(cloud, node, volume, timeout, |step| shown.step_of_volume(step));
        let made = patience.wait(session, volume, made).await;
        shown.finish();
        made?;
    }
    let requested = format!("volume {volume} is requested on {node} and goes on");
    show(session, volume, output).await.map_err(|failure| run::with(failure, &requested))?;
    if stop.is_cancelled() {
        return Err(Failure { code: INTERRUPTED, message: format!("interrupted; {requested}") });
    }
    Ok(())
}

/// Whole uuids, as somebody may have typed them.
pub(crate) fn uuids(volumes: Vec<InstanceId>) -> Vec<String> {
    volumes.iter().map(ToString::to_string).collect()
}

/// Deletes each that is meant, as [`each`] says; what was selected by labels is spared where somebody has changed them since.
pub(crate) async fn delete(
    session: &Session,
    what: &str,
    volumes: &[String],
    selectors: &[LabelSelector],
    meant: impl AsyncFn(&str) -> Result<InstanceId, Failure>,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let patience = Patience::new(waiting)?;
    let ask = async |volume, word: &str| {
        let doomed = ec_cloud::delete_selected_volume(cloud, volume, selectors).await;
        let doomed = doomed.map_err(|error| session.failed(error))?;
        let Doomed::By { node, alive } = doomed else {
            return Ok(Asked::Done(Deleted::one(cloud, what, word, "DELETED")));
        };
        tell_later(node, alive, &format!("{volume} is deleted"));
        Ok(match patience.left() {
            None => Asked::Done(Deleted::one(cloud, what, word, "DELETING")),
            Some(_) => Asked::Awaited((node, word.to_owned()), "deleting".to_owned()),
        })
    };
    let wait = async |volume, (node, word): (NodeId, String), shown: &Shown| {
        let left = patience.left().unwrap_or_default();
        let gone = until_gone(cloud, node, volume, left, |step| shown.step(step));
        patience.wait(session, volume, gone).await?;
        Ok(Deleted::one(cloud, what, &word, "DELETED"))
    };
    let of_failed = |word: &str, _, why: &str| Deleted::failed(cloud, word, why);
    // One was named, which is no list.
    let is_one = selectors.is_empty() && volumes.len() == 1;
    let told = Told::new(output, is_one, &of_failed);
    each(told, volumes, &patience, meant, ask, wait).await
}

/// What a word means, where it means a volume.
pub(crate) async fn looked_for(cloud: &Cloud, text: &str) -> Result<VolumeView, CloudError> {
    ec_cloud::volume(cloud, resolve_volume(cloud, text).await?).await
}

/// The volume that was looked for by a word, where a mistake costs a disk.
pub(crate) fn certain(session: &Session, text: &str, found: VolumeView) -> Result<InstanceId, Failure> {
    named(session, text, found.volume, found.name.as_deref(), "what was written on it would be lost")?;
    Ok(found.volume)
}

/// That a word is a volume's name, or enough of its uuid: what is done to it has such a `cost`.
pub(crate) fn named(
    session: &Session,
    text: &str,
    volume: InstanceId,
    name: Option<&str>,
    cost: &str,
) -> Result<(), Failure> {
    // A name that is borne by nobody any more may well be the beginning of another's uuid.
    if text.len() >= CERTAIN || name.is_some_and(|name| name.eq_ignore_ascii_case(text)) {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "no volume of project `{}` is named `{text}`; {volume} begins so, and {cost}: give {CERTAIN} characters of that or more",
        session.cloud.project
    )))
}

/// Says what is not as whoever asked would think.
pub(crate) fn tell_acted(instance: InstanceId, Acted { node, node_alive, awaited, already }: &Acted) {
    if let Some(why) = already {
        tell(&format!("eschedule: {instance}: {why}"));
    }
    tell_later(*node, *node_alive || awaited.is_none(), "it is done");
}

/// Waits for what was asked for, where it is to be waited for.
pub(crate) async fn done(
    session: &Session,
    patience: &Patience,
    instance: InstanceId,
    acted: &Acted,
    doing: &str,
) -> Result<(), Failure> {
    tell_acted(instance, acted);
    let Acted { node, awaited, .. } = acted;
    let Some(awaited) = awaited else { return Ok(()) };
    let Some(timeout) = patience.left() else { return Ok(()) };
    let shown = Shown::new(doing);
    let outcome =
        until_done(&session.cloud, *node, instance, *awaited, timeout, |step| shown.step_of_volume(step));
    let outcome = patience.wait(session, instance, outcome).await;
    shown.finish();
    outcome.map(drop)
}

/// What a volume is called: its name, or its uuid.
pub(crate) fn called(view: &VolumeView) -> String {
    view.name.clone().unwrap_or_else(|| view.volume.to_string())
}

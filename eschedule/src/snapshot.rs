//! `eschedule snapshot`: all disks of an instance, as they are at one moment. A snapshot is a volume that is a copy of an
//! instance's own disk, with copies of the volumes that it had beside.

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use ec_cloud::{
    CloudError, Known, NewVolume, VolumeView, act, find_placed, resolve, resolve_volume, restore_volume,
    snapshot_of,
};
use ec_model::{Attachment, CopyOf, ImageRef, InstanceId, Power, State, Workload};
use ec_plan::verbs::{Verb, locked};
use ec_runtime::exit::{Failure, tell};

use crate::{
    acting::Patience,
    cli::{Output, Waiting},
    config::Session,
    output,
    spec::once_each,
    volume::{called, delete, done, make, named},
};

pub(crate) const EXAMPLES: &str = "\
A snapshot lies beside the instance, on the storage of its node, and outlives it. It has all disks of the instance as they are at one
moment, though the instance goes on; where its guest has an agent, its file systems are at rest then. It is a volume, is claimed
as one, and nothing changes it any more.

Examples:
  eschedule snapshot create db before-upgrade --wait
  eschedule snapshot restore before-upgrade
      stops db, makes its disk and its volumes anew as they were, and starts it again
  eschedule run db2 --flavor small --image volume:before-upgrade
      another that boots from it
  eschedule volume create old --size 10 --image volume:before-upgrade/data
      what was on volume data
  eschedule image add golden volume:before-upgrade --size 10
      its first disk, for all nodes; the size, where it is of several
  eschedule snapshot delete before-upgrade";

/// What is done with snapshots.
#[derive(Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Copy all disks of an instance as they are at this moment
    Create {
        /// The instance's name or uuid
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
        /// What it shall be called, of which each project has one beside its volumes
        name: String,
        /// How much to claim for it, in GiB [default: what the disks have together]
        #[arg(long, value_name = "GB", allow_negative_numbers = true)]
        size: Option<u64>,
        /// A label; may be given more than once
        #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::label)]
        label: Vec<(String, String)>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// List the snapshots of all projects, by node and name
    List,
    /// Show a snapshot
    Show {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "SNAPSHOT", value_parser = NonEmptyStringValueParser::new())]
        snapshot: String,
    },
    /// Make an instance's disk, and the volumes that it still has, anew as they were; what was written since goes
    ///
    /// A running instance is stopped for it and started again; till its volumes are as they were it is locked. Volumes that it had
    /// then and has no more stay as they are, which is told. Where this is broken off, run it again.
    Restore(Restoring),
    /// Delete snapshots
    Delete {
        /// Names, uuids, or beginnings of uuids of eight characters or more
        #[arg(value_name = "SNAPSHOT", required = true, value_parser = NonEmptyStringValueParser::new())]
        snapshots: Vec<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
}

/// `eschedule snapshot restore`.
#[derive(Args)]
pub(crate) struct Restoring {
    /// Its name, its uuid, or eight characters or more of its beginning
    #[arg(value_name = "SNAPSHOT", value_parser = NonEmptyStringValueParser::new())]
    snapshot: String,

    /// The guest gets so many seconds to end by itself
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(..=3600))]
    grace: u32,

    /// Stop waiting for one of the steps after so many seconds (exit code 1; what is under way goes on)
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
}

/// Does it.
pub(crate) async fn snapshot(
    session: &Session,
    command: SnapshotCommand,
    output: Output,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        SnapshotCommand::Create { instance, name, size, label, waiting } => {
            let instance = resolve(cloud, &instance).await?;
            let new = NewVolume {
                name: Some(name),
                size_gb: size,
                image: Some(snapshot_of(cloud, instance).await?),
                node: None,
                labels: once_each("--label", &label)?,
            };
            make(session, &new, waiting, output).await
        }
        SnapshotCommand::List => {
            let mut all = ec_cloud::volumes(cloud).await?;
            all.retain(|volume| volume.snapshot);
            output::snapshots(output, &all)
        }
        SnapshotCommand::Show { snapshot } => output::volume(output, &known(session, &snapshot).await?),
        SnapshotCommand::Restore(restoring) => restore(session, &restoring, output).await,
        SnapshotCommand::Delete { snapshots, waiting } => {
            // None goes where one of them is something else.
            for snapshot in &snapshots {
                known(session, snapshot).await?;
            }
            delete(session, "SNAPSHOT", &snapshots, waiting, output).await
        }
    }
}

async fn known(session: &Session, text: &str) -> Result<VolumeView, Failure> {
    let cloud = &session.cloud;
    let view = ec_cloud::volume(cloud, resolve_volume(cloud, text).await?).await?;
    if view.snapshot {
        return Ok(view);
    }
    Err(Failure::failed(format!(
        "`{text}` is a volume, and no snapshot of an instance: see `eschedule volume`"
    )))
}

async fn restore(session: &Session, restoring: &Restoring, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let patience = Patience::new(Waiting { wait: true, timeout: restoring.timeout })?;
    let view = known(session, &restoring.snapshot).await?;
    let cost = "what its instance wrote since would be lost";
    named(session, &restoring.snapshot, view.volume, view.name.as_deref(), cost)?;
    let name = called(&view);
    if view.status != "available" {
        return Err(Failure::failed(format!("snapshot {name} is {}, and cannot be restored", view.status)));
    }
    let instance = view.copy_of.ok_or_else(|| Failure::failed(format!("nobody knows whose {name} is")))?;
    let asked = async |of: InstanceId, verb: Verb, doing: &str| -> Result<(), Failure> {
        let acted = act(cloud, of, &verb).await.map_err(|error| session.failed(error))?;
        done(session, &patience, of, &acted, doing).await
    };
    let kept = find_placed(cloud, view.volume).await?.record.and_then(|record| record.locked);
    let reason = |starts: bool| {
        format!("instance {instance} is being restored from it{}", if starts { STARTS } else { "" })
    };
    let is_ours = kept.as_ref().is_none_or(|kept| [true, false].map(reason).contains(kept));
    let machine = match find_placed(cloud, instance).await {
        Ok(machine) => machine,
        Err(error) => {
            if matches!(error, CloudError::NotFound(_)) && kept.is_some() && is_ours {
                asked(view.volume, Verb::Unlock, "unlocking").await?;
            }
            let failure = session.failed(error);
            let hint = format!("`eschedule run NAME --image volume:{name}` boots another from it");
            return Err(Failure { message: format!("{}; {hint}", failure.message), ..failure });
        }
    };
    let mut held = Held::of(&name, instance, &machine)?;
    // One that broke off after it had stopped it, or unlocked it, left word of that here.
    held.starts |= kept.as_ref() == Some(&reason(true));
    if kept.is_none() {
        asked(view.volume, Verb::Hold(reason(held.starts)), "locking").await?;
    }
    let mut is_begun = held.is_locked || kept.is_some();
    let steps = async {
        if held.is_locked && !is_down(&machine) {
            // Somebody has started it beside this, and locked nobody can stop it.
            asked(instance, Verb::LetGo(held.reason(&name)), "unlocking").await?;
            held.is_locked = false;
        }
        if !held.is_locked {
            if !is_down(&machine) {
                let acted = act(cloud, instance, &Verb::Stop(restoring.grace)).await;
                let acted = acted.map_err(|error| session.failed(error))?;
                is_begun = true;
                done(session, &patience, instance, &acted, "stopping").await?;
            }
            asked(instance, Verb::Hold(held.reason(&name)), "locking").await?;
            is_begun = true;
            if !is_down(&find_placed(cloud, instance).await?) {
                asked(instance, Verb::LetGo(held.reason(&name)), "unlocking").await?;
                return Err(Failure::failed(format!("somebody started {instance} meanwhile")));
            }
        }
        // From now on it keeps the volumes that it has, unless somebody unlocks it.
        let has = held.volumes(session, instance, &name).await?;
        let (volumes, gone): (Vec<InstanceId>, Vec<InstanceId>) =
            view.beside.iter().partition(|volume| has.iter().any(|has| has.volume == **volume));
        for volume in gone {
            tell(&format!(
                "eschedule: {instance} has not volume {volume} any more, which stays as it is: `eschedule volume restore {volume} volume:{name}/{volume}`"
            ));
        }
        for volume in volumes {
            held.volumes(session, instance, &name).await?;
            let of = CopyOf { held: Some(volume), ..CopyOf::disk(Workload::Volume, view.volume) };
            let acted = restore_volume(cloud, volume, &ImageRef::copy_of(&of)).await;
            let acted = acted.map_err(|error| session.failed(error))?;
            done(session, &patience, volume, &acted, "restoring").await?;
        }
        let own = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, view.volume));
        // One that boots from a volume has that for its own.
        let root = Attachment::root_of(&has);
        if let Some(root) = root {
            held.volumes(session, instance, &name).await?;
            let acted = restore_volume(cloud, root, &own).await.map_err(|error| session.failed(error))?;
            done(session, &patience, root, &acted, "restoring").await?;
        }
        asked(instance, Verb::LetGo(held.reason(&name)), "unlocking").await?;
        if root.is_none() {
            asked(instance, Verb::Rebuild(Some(own)), "restoring").await?;
        }
        if held.starts {
            asked(instance, Verb::Start, "starting").await?;
        }
        Ok(())
    };
    let outcome: Result<(), Failure> = steps.await;
    if let Err(failure) = outcome {
        if !is_begun {
            // It is as it was, and so is the snapshot.
            let_go(session, view.volume, reason(held.starts)).await?;
            return Err(failure);
        }
        return Err(Failure {
            message: format!(
                "{}; not all of {instance} is restored: run `eschedule snapshot restore {name}` again",
                failure.message
            ),
            ..failure
        });
    }
    if is_ours {
        let_go(session, view.volume, kept.unwrap_or_else(|| reason(held.starts))).await?;
    }
    output::volume(output, &view)
}

/// Whether it is stopped, and nobody has asked for anything else since.
fn is_down(machine: &Known) -> bool {
    let wished = machine.request.record().map(|request| (request.power.generation, request.power.power));
    machine.status.record().is_some_and(|status| {
        let is_pending = wished.is_some_and(|(generation, power)| {
            generation > status.power_generation && power != Power::Stopped
        });
        status.state == State::Stopped && !is_pending
    })
}

/// Takes the lock off a snapshot that a restore put there; another that came since stays.
async fn let_go(session: &Session, snapshot: InstanceId, reason: String) -> Result<(), Failure> {
    match act(&session.cloud, snapshot, &Verb::LetGo(reason)).await {
        Ok(_) | Err(CloudError::Refused(_)) => Ok(()),
        Err(error) => Err(session.failed(error)),
    }
}

/// What is known of an instance that is being restored. While its volumes are, it is locked: nobody starts it on some that are
/// restored and some that are not, and whoever looks at it, or goes on with a restore that broke off, is told.
struct Held {
    /// It is, by a restore that broke off.
    is_locked: bool,
    /// It ran, and is to again.
    starts: bool,
}

/// In the reason of the locks of one that ran, and of its snapshot.
const STARTS: &str = ", and then it is started";

impl Held {
    /// # Errors
    /// Somebody locked it for another reason.
    fn of(snapshot: &str, instance: InstanceId, machine: &Known) -> Result<Self, Failure> {
        let Some(reason) = machine.record.as_ref().and_then(|record| record.locked.as_deref()) else {
            return Ok(Self { is_locked: false, starts: !is_down(machine) });
        };
        let mut held = [true, false].into_iter().map(|starts| Self { is_locked: true, starts });
        held.find(|held| held.reason(snapshot) == reason)
            .ok_or_else(|| Failure::failed(format!("cannot restore instance {instance}: {}", locked(reason))))
    }

    /// The volumes of what is locked for this.
    ///
    /// # Errors
    /// Somebody unlocked it meanwhile, or locked it for another reason.
    async fn volumes(
        &self,
        session: &Session,
        instance: InstanceId,
        snapshot: &str,
    ) -> Result<Vec<Attachment>, Failure> {
        let machine = find_placed(&session.cloud, instance).await?;
        let record = machine.record.filter(|record| record.locked == Some(self.reason(snapshot)));
        let lost =
            || Failure::failed(format!("somebody else unlocked or locked instance {instance} meanwhile"));
        Ok(record.ok_or_else(lost)?.volumes)
    }

    fn reason(&self, snapshot: &str) -> String {
        let starts = if self.starts { STARTS } else { "" };
        format!(
            "snapshot {snapshot} is being restored{starts}; broken off, `eschedule snapshot restore {snapshot}` goes on"
        )
    }
}

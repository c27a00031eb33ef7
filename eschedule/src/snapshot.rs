//! `eschedule snapshot`: all disks of an instance, as they are at one moment. A snapshot is a volume that is a copy of an
//! instance's own disk, with copies of the volumes that it had beside.

use std::{cell::RefCell, time::Duration};

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use ec_cloud::{Cloud, CloudError, NewVolume, Restoring, VolumeView, resolve, restore_snapshot, snapshot_of};
use ec_model::{CopyOf, ImageRef, Workload, input::LabelSelector};
use ec_plan::verbs::Verb;
use ec_runtime::exit::{Failure, tell};

use crate::{
    acting::Patience,
    cli::{Output, Waiting, waits_anyway},
    config::Session,
    list::ListingVolumes,
    output::{self, Names},
    shown::Shown,
    spec::once_each,
    volume::{self, called, certain, delete, make, named, remake, tell_acted, uuids},
};

pub(crate) const EXAMPLES: &str = "\
A snapshot lies beside the instance, on the storage of its node, and outlives it. It has all disks
of the instance as they are at one moment, though the instance goes on; where its guest has an
agent, its file systems are at rest then. It is a volume, is claimed as one, and nothing changes
it any more. `eschedule volume snapshot` makes one of a volume alone, which is restored by the
same command, while no instance runs with that.

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
        /// How much to claim for it, in GiB; the copy of one disk is as large, and no smaller disk is restored from it [default: what the disks have together]
        #[arg(long, value_name = "GB", allow_negative_numbers = true)]
        size: Option<u64>,
        /// A label; may be given more than once
        #[arg(long, value_name = "KEY=VALUE", value_parser = ec_model::input::label)]
        label: Vec<(String, String)>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// List snapshots, those of all projects, by node and name
    List(Box<ListingVolumes>),
    /// Show a snapshot
    Show {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "SNAPSHOT", value_parser = NonEmptyStringValueParser::new())]
        snapshot: String,
    },
    /// Make an instance's disk, and the volumes that it still has, or a volume, anew as they were; what was written since goes
    ///
    /// A running instance is stopped for it and started again; till all its disks are as they were it is locked. Volumes that it had
    /// then and has no more stay as they are, which is told. Where this is broken off, run it again.
    #[command(arg = waits_anyway("It waits in any case: taken, so that all verbs take it"))]
    Restore(Restore),
    /// Delete snapshots
    Delete {
        /// Names, uuids, or beginnings of uuids of eight characters or more
        #[arg(value_name = "SNAPSHOT", required_unless_present = "label", value_parser = NonEmptyStringValueParser::new())]
        snapshots: Vec<String>,
        /// Instead of SNAPSHOT: those of the project that have this label; given more than once, all of them
        #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "snapshots", value_parser = ec_model::input::label_selector)]
        label: Vec<LabelSelector>,
        #[command(flatten)]
        waiting: Waiting,
    },
}

/// `eschedule snapshot restore`.
#[derive(Args)]
pub(crate) struct Restore {
    /// Its name, its uuid, or eight characters or more of its beginning
    #[arg(value_name = "SNAPSHOT", value_parser = NonEmptyStringValueParser::new())]
    snapshot: String,

    /// The guest gets so many seconds to end by itself
    #[arg(long, value_name = "SECONDS", default_value_t = ec_model::GRACE_SECONDS, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(..=86_400))]
    grace: u32,

    /// Stop waiting for one of the steps after so many seconds (exit code 1; what is under way goes on)
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(..=86400))]
    timeout: u64,
}

impl SnapshotCommand {
    /// Whether it takes back, when it is interrupted, what it began with, or says what goes on.
    pub(crate) const fn is_long(&self) -> bool {
        matches!(self, Self::Create { .. } | Self::Restore(_))
    }
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
                snapshot: true,
            };
            make(session, &new, waiting, output).await
        }
        SnapshotCommand::List(listing) => {
            let all = listing.volumes(cloud, true).await?;
            output::snapshots(output, &all, &Names::of(cloud, Workload::Volume, output).await?)
        }
        SnapshotCommand::Show { snapshot } => {
            let view = known(session, &snapshot).await?;
            output::volume(output, &view, &Names::of(cloud, Workload::Volume, output).await?)
        }
        SnapshotCommand::Restore(restoring) => restore(session, &restoring, output).await,
        SnapshotCommand::Delete { snapshots, label, waiting } => {
            // None goes where one of them is something else; one that is gone is told of beside the others.
            for snapshot in &snapshots {
                match looked_for(cloud, snapshot).await {
                    Err(CloudError::NotFound(_)) => {}
                    // Nothing tells any more what it was.
                    Ok(view) if view.status == "deleting" => {}
                    view => is_snapshot(&view?, snapshot)?,
                }
            }
            let words = match label.is_empty() {
                true => snapshots,
                false => uuids(ec_cloud::select_volumes(cloud, &label, true).await?),
            };
            let meant = async |word: &str| {
                let view = looked_for(cloud, word).await?;
                // Somebody may have made it since, or called it so.
                if view.status != "deleting" {
                    is_snapshot(&view, word)?;
                }
                certain(session, word, view)
            };
            delete(session, "SNAPSHOT", &words, &label, meant, waiting, output).await
        }
    }
}

async fn known(session: &Session, text: &str) -> Result<VolumeView, Failure> {
    let view = looked_for(&session.cloud, text).await?;
    is_snapshot(&view, text)?;
    Ok(view)
}

/// What a word means, whatever it is.
async fn looked_for(cloud: &Cloud, text: &str) -> Result<VolumeView, CloudError> {
    volume::looked_for(cloud, text).await.map_err(|error| match error {
        CloudError::NotFound(_) => CloudError::NotFound(format!(
            "no snapshot of project `{}` is named `{text}`, nor is that one's uuid; `eschedule snapshot list` shows all",
            cloud.project
        )),
        error => error,
    })
}

fn is_snapshot(view: &VolumeView, text: &str) -> Result<(), Failure> {
    match view.snapshot {
        true => Ok(()),
        false => {
            Err(Failure::failed(format!("`{text}` is a volume, and no snapshot: see `eschedule volume`")))
        }
    }
}

async fn restore(session: &Session, restoring: &Restore, output: Output) -> Result<(), Failure> {
    let patience = Patience::new(Waiting { wait: true, timeout: restoring.timeout })?;
    let view = known(session, &restoring.snapshot).await?;
    let cost = "what was written since would be lost";
    named(session, &restoring.snapshot, view.volume, view.name.as_deref(), cost)?;
    if let (Some(volume), Some(Workload::Volume)) = (view.copy_of, view.copy_of_kind) {
        let copy = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, view.volume));
        remake(session, volume, &copy, &patience).await?;
        return output::volume(output, &view, &Names::of(&session.cloud, Workload::Volume, output).await?);
    }
    let shown = RefCell::new(None::<Shown>);
    let told = |what: Restoring<'_>| match what {
        Restoring::Asks(_, verb) => *shown.borrow_mut() = Some(Shown::new(doing(verb))),
        Restoring::Asked(of, acted) => tell_acted(of, acted),
        Restoring::Step(step) => {
            if let Some(shown) = &*shown.borrow() {
                shown.step_of_volume(step);
            }
        }
        Restoring::Ended => {
            if let Some(shown) = shown.borrow_mut().take() {
                shown.finish();
            }
        }
        Restoring::Left { volume, is_there } => {
            let copy = format!("volume:{}/{volume}", called(&view));
            let hint = match is_there {
                true => format!("which stays as it is: `eschedule volume restore {volume} {copy}`"),
                false => format!("which is deleted: `eschedule volume create NAME --image {copy}`"),
            };
            tell(&format!("eschedule: its instance has not volume {volume} any more, {hint}"));
        }
    };
    let timeout = Duration::from_secs(restoring.timeout);
    let restored =
        restore_snapshot(&session.cloud, view.volume, restoring.grace, timeout, &patience.stop, told);
    let restored = restored.await;
    if let Some(shown) = shown.take() {
        shown.finish();
    }
    restored.map_err(|error| session.failed(error))?;
    // Not locked any more, where one that broke off had locked it.
    let view = ec_cloud::volume(&session.cloud, view.volume).await.unwrap_or(view);
    output::volume(output, &view, &Names::of(&session.cloud, Workload::Volume, output).await?)
}

/// What is done, in a word.
fn doing(verb: &Verb) -> &'static str {
    match verb {
        Verb::Stop(_) => "stopping",
        Verb::Start => "starting",
        Verb::Hold(_) => "locking",
        Verb::LetGo(_) | Verb::Unlock => "unlocking",
        _ => "restoring",
    }
}

#[cfg(test)]
mod tests {
    use ec_model::Instance;
    use ec_runtime::exit::FAILED;

    use super::*;

    /// One with that name.
    async fn put(session: &Session, number: u128, name: &str, snapshot: bool) -> Instance {
        let uuid = uuid::Uuid::from_u128(number);
        let text = format!(
            r#"{{"version":1,"instance":"{uuid}","kind":"volume","name":"{name}","generation":1,
            "spec":{{"query":"resources=DISK_GB:1","image":{{"url":""}},"snapshot":{snapshot}}},
            "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        session.put(ec_model::decode(text.as_bytes()).unwrap()).await
    }

    #[tokio::test]
    async fn what_is_gone_keeps_no_other_from_being_deleted_and_a_volume_does() {
        let session = Session::in_memory().await;
        let (data, snap) = (put(&session, 1, "data", false).await, put(&session, 2, "snap", true).await);
        let is_there = async |one: &Instance| {
            let key = session.cloud.keys.instance(one.instance);
            session.cloud.store.get(&key).await.unwrap().0.is_some()
        };
        for (words, left) in [(["data", "snap"], true), (["gone", "snap"], false)] {
            let command = SnapshotCommand::Delete {
                snapshots: words.map(str::to_owned).to_vec(),
                label: Vec::new(),
                waiting: Waiting { wait: false, timeout: 0 },
            };
            let failed = snapshot(&session, command, Output::Json).await.unwrap_err();
            assert_eq!((failed.code, is_there(&snap).await), (FAILED, left), "{words:?}: {failed:?}");
        }
        assert!(is_there(&data).await);
    }
}

//! What `apply` does, step by step, and what it knows of what was made so far.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_cloud::{
    Ask, Cloud, CloudError, Difference, Doomed, NoRoom, Prune, STACK, Scheduled, Verb, View, VolumeStep,
    Volumes, Wanted, act, destroy_called, differences, find, find_placed, resolve_name,
};
use ec_model::{Instance, InstanceId, NodeId, Workload, input::LabelSelector};
use ec_runtime::exit::{Failure, INTERRUPTED, tell};
use tokio_util::sync::CancellationToken;

use super::{Applied, entry::Entry, waits::Asked};
use crate::{
    config::Session,
    run::{self, asked, reason},
    shown::Shown,
};

/// What is made, as far as that is.
pub(super) struct Making<'a> {
    pub(super) session: &'a Session,
    /// What the file says, and what there was.
    pub(super) of: &'a Volumes<'a>,
    pub(super) entries: &'a [Entry],
    pub(super) stop: &'a CancellationToken,
    /// How long one thing is waited for.
    pub(super) patience: Duration,
    /// The file's instances, by their numbers.
    pub(super) instances: BTreeMap<usize, Scheduled>,
    /// The file's volumes.
    pub(super) volumes: BTreeMap<usize, Scheduled>,
    /// Instances of the file that were not made.
    missing_instances: BTreeSet<usize>,
    /// Volumes of the file that were not made.
    missing_volumes: BTreeSet<usize>,
    /// Volumes that were not taken from who has them.
    pub(super) held: BTreeSet<InstanceId>,
    /// What another made meanwhile who applies this stack, too, and where.
    pub(super) found: BTreeMap<InstanceId, NodeId>,
    /// What was asked for by the last step.
    pub(super) asked: Option<Asked>,
}

impl<'a> Making<'a> {
    pub(super) fn new(
        session: &'a Session,
        of: &'a Volumes<'a>,
        entries: &'a [Entry],
        stop: &'a CancellationToken,
        patience: Duration,
    ) -> Self {
        let placed = |record: &Instance| Some(Scheduled { instance: record.instance, node: record.node()? });
        let instances = (0..of.instances.len())
            .filter_map(|number| Some((number, of.instance_there(number).and_then(placed)?)));
        let volumes =
            (0..of.volumes.len()).filter_map(|number| Some((number, of.there(number).and_then(placed)?)));
        let (instances, volumes) = (instances.collect(), volumes.collect());
        let (missing_instances, missing_volumes) = (BTreeSet::new(), BTreeSet::new());
        Self {
            session,
            of,
            entries,
            stop,
            patience,
            instances,
            volumes,
            missing_instances,
            missing_volumes,
            held: BTreeSet::new(),
            found: BTreeMap::new(),
            asked: None,
        }
    }

    /// Notes that what this step makes is not there, or that what it frees is not free.
    pub(super) fn note_missing(&mut self, step: &Difference) {
        match step {
            Difference::Run(number) => _ = self.missing_instances.insert(*number),
            Difference::Volume(VolumeStep::Create(number)) => _ = self.missing_volumes.insert(*number),
            Difference::Volume(VolumeStep::Detach { volume, .. }) => _ = self.held.insert(*volume),
            Difference::Destroy(instance, _) => {
                let there = (0..self.of.volumes.len()).filter_map(|number| self.of.there(number));
                let has = there.filter(|record| record.attached == Some(*instance));
                self.held.extend(has.map(|record| record.instance));
            }
            _ => {}
        }
    }

    /// Why a step cannot be done, where what it needs was to be made and was not.
    pub(super) fn lacks(&self, step: &Difference) -> Option<String> {
        let given = match step {
            Difference::Volume(VolumeStep::Attach(number, _)) => Some(*number),
            Difference::Run(number) => self.of.root_of(*number),
            _ => None,
        };
        let is_held = |record: &Instance| self.held.contains(&record.instance);
        if let Some(number) = given.filter(|number| self.of.there(*number).is_some_and(is_held)) {
            let name = &self.of.volumes[number].name;
            return Some(format!("volume `{name}` was not taken from who has it"));
        }
        let (volume, holder) = match step {
            Difference::Volume(VolumeStep::Create(number)) if !self.volumes.contains_key(number) => {
                (None, self.of.volumes[*number].holder)
            }
            Difference::Volume(VolumeStep::Attach(number, instance)) => (Some(*number), Some(*instance)),
            _ => return None,
        };
        let volume = volume.filter(|number| self.missing_volumes.contains(number));
        let holder = holder.filter(|number| self.missing_instances.contains(number));
        match (holder, volume) {
            (Some(holder), _) => Some(format!(
                "instance `{}`, which is to have it, was not made",
                self.of.instances[holder].name
            )),
            (None, Some(_)) => Some("it was not made".to_owned()),
            (None, None) => None,
        }
    }

    /// Does one of them.
    pub(super) async fn perform(&mut self, step: &Difference, one: &mut Applied) -> Result<(), Failure> {
        let (session, cloud) = (self.session, &self.session.cloud);
        let is_told = matches!(
            step,
            Difference::Stands(..)
                | Difference::Keep(..)
                | Difference::Foreign(..)
                | Difference::DeleteGroup(_)
                | Difference::KeepGroup(..)
                | Difference::Volume(VolumeStep::Stands(..) | VolumeStep::Keep(..))
        );
        if !is_told {
            one.request_id = cloud.request_id;
        }
        match step {
            Difference::Run(number) => {
                let made = self.run(*number).await?;
                (one.instance, one.node) = (Some(made.instance), Some(made.node));
                if self.found.contains_key(&made.instance) {
                    one.request_id = None;
                }
                self.instances.insert(*number, made);
                self.asked = Some(Asked::Made(made, "building"));
            }
            Difference::Set(instance, name, change) => {
                let acted = act(cloud, *instance, &Verb::Set(change.clone())).await;
                let acted = acted.map_err(|error| session.failed(error))?;
                one.node = Some(acted.node);
                self.asked = Asked::of(name, *instance, &acted);
            }
            Difference::Destroy(instance, name) => {
                self.until_copied(*instance).await?;
                // Whoever took it out of the stack since, or gave it a name of the file, has spared it.
                match destroy_called(cloud, *instance, name, &[of_stack(self.of.stack)]).await {
                    Ok(Doomed::By { node, alive }) => {
                        one.node = Some(node);
                        self.asked = Some(Asked::gone(&one.name, *instance, node, alive));
                    }
                    // The same file was applied twice at once.
                    Ok(_) | Err(CloudError::NotFound(_)) => {}
                    Err(error) => return Err(session.failed(error)),
                }
            }
            Difference::Volume(step) => self.volume(step, one).await?,
            // Members that were told may be what a killed command left: who deletes looks.
            Difference::DeleteGroup(name) | Difference::KeepGroup(name, _) => {
                match ec_cloud::delete_group_of(cloud, name, self.of.stack).await {
                    Ok(()) if one.what == "keep" => {
                        tell(&format!("- {name}"));
                        (one.what, one.note) = ("delete", None);
                    }
                    // The same file was applied twice at once.
                    Ok(()) | Err(CloudError::NotFound(_)) => {}
                    // Somebody has joined it since, or made another of that name.
                    Err(CloudError::Refused(why)) => {
                        if one.what != "keep" {
                            tell(&format!("= {name}: {why}"));
                        }
                        (one.what, one.note) = ("keep", Some(why));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Difference::Stands(..) | Difference::Keep(..) | Difference::Foreign(..) => {}
        }
        Ok(())
    }

    /// Asks for an instance, where its volumes lie, or where there is room for those that are to be made, too.
    async fn run(&mut self, number: usize) -> Result<Scheduled, Failure> {
        let (session, cloud) = (self.session, &self.session.cloud);
        let Entry { query, guest, place, .. } = &self.entries[number];
        let mut place = place.on(self.of.node_for(number));
        let mut guest = guest.clone();
        if let Some(volume) = self.of.root_of(number) {
            let root = self.root(number, volume, &place).await?;
            guest.boot = Some(root.instance);
            place = place.on(Some(root.node));
        }
        for last in (0..LOOKS).rev().map(|left| left == 0) {
            let roomy = self.room(number, &place, true).await?;
            let place = if roomy.is_some() { &place.on(roomy) } else { &place };
            let wanted = Wanted::new(asked(session, query, &guest, place).await?, &guest)?;
            match ec_cloud::schedule(cloud, &wanted, self.stop).await {
                Err(CloudError::Taken { name, .. })
                    if is_of_stack(cloud, Workload::Machine, &name, self.of.stack).await =>
                {
                    if let Some(made) = self.made_by_another(Workload::Machine, &name).await? {
                        self.found.insert(made.instance, made.node);
                        return Ok(made);
                    }
                }
                outcome => match outcome.map_err(|error| session.failed(error))? {
                    Ok(placed) => return Ok(placed),
                    // That node had room a moment ago, and others may have it still.
                    Err(_) if roomy.is_some() && !last => {}
                    Err(none) => return Err(no_room(session, wanted.ask(), &none).await),
                },
            }
        }
        Err(given_back(&self.of.instances[number].name))
    }

    /// The node that has room for an instance and for those of its volumes that are to be made; none where there are none.
    pub(super) async fn room(
        &self,
        number: usize,
        place: &run::Place,
        has_root: bool,
    ) -> Result<Option<NodeId>, Failure> {
        let Entry { query, guest, .. } = &self.entries[number];
        let more = self.of.room_for(number, has_root);
        if more == 0 {
            return Ok(None);
        }
        let query = ec_cloud::room_from(&self.session.cloud, query, &guest.image).await?;
        let own = query.total().get(DISK).copied().unwrap_or(0);
        let both =
            query.with(DISK, own.saturating_add(more)).map_err(|error| Failure::usage(error.to_string()))?;
        let ask = asked(self.session, &both, guest, place).await?;
        match ec_cloud::preview(&self.session.cloud, &ask).await? {
            Ok(preview) => Ok(Some(preview.node)),
            Err(none) => Err(no_room(self.session, &ask, &none).await),
        }
    }

    /// One of the file's instances, which is there, or is placed at this moment by another who applies the same file.
    pub(super) async fn instance(&mut self, number: usize) -> Result<Scheduled, Failure> {
        if let Some(known) = self.instances.get(&number) {
            return Ok(*known);
        }
        let made = self.made(Workload::Machine, &self.of.instances[number].name).await?;
        self.instances.insert(number, made);
        Ok(made)
    }

    /// What is otherwise of what another made: it may have been made by another revision of the file.
    pub(super) async fn otherwise(
        &self,
        shared: &BTreeMap<NodeId, NodeId>,
    ) -> Result<Vec<Difference>, Failure> {
        if self.found.is_empty() {
            return Ok(Vec::new());
        }
        let (stack, instances, volumes) = (self.of.stack, self.of.instances, self.of.volumes);
        let (there, stored) = ec_cloud::standing(&self.session.cloud, stack).await?;
        let of_volumes = Volumes::new(stack, (instances, volumes), (&there, &stored), shared);
        let mut steps = differences(stack, instances, &there, false);
        steps.extend(of_volumes.differences(Prune::default()));
        // Who has a volume is seen to by steps that this run has anyway.
        steps.retain(|step| match step {
            Difference::Set(of, ..)
            | Difference::Stands(of, ..)
            | Difference::Volume(
                VolumeStep::Set(of, ..) | VolumeStep::Stands(of, ..) | VolumeStep::Extend { volume: of, .. },
            ) => self.found.contains_key(of),
            _ => false,
        });
        Ok(steps)
    }

    /// What another made, or is about to.
    pub(super) async fn made(&self, kind: Workload, name: &str) -> Result<Scheduled, Failure> {
        let made = self.made_by_another(kind, name).await?;
        made.ok_or_else(|| {
            Failure::failed(format!("there is no {} `{name}` any more; try again", kind.word()))
        })
    }

    /// The same; nothing where it has given that up. An error where that is not placed in some seconds: its command is at it
    /// still, or was killed.
    pub(super) async fn made_by_another(
        &self,
        kind: Workload,
        name: &str,
    ) -> Result<Option<Scheduled>, Failure> {
        let cloud = &self.session.cloud;
        // Of one that is there nothing is told.
        let shown: OnceCell<Shown> = OnceCell::new();
        let mut left = PLACED;
        let made = loop {
            let found = async { find_placed(cloud, resolve_name(cloud, kind, name).await?).await };
            match found.await {
                Ok(known) => break Ok(Some(Scheduled { instance: known.instance, node: known.node })),
                Err(CloudError::NotFound(_)) => break Ok(None),
                Err(CloudError::Busy(_)) if left > 0 => {
                    left -= 1;
                    shown.get_or_init(|| Shown::new(&format!("waiting for who places {name}")));
                    tokio::select! {
                        () = tokio::time::sleep(PAUSE) => {}
                        () = self.stop.cancelled() => break Err(interrupted()),
                    }
                }
                Err(error) => break Err(error.into()),
            }
        };
        if let Some(shown) = shown.get() {
            shown.finish();
        }
        made
    }
}

pub(super) fn interrupted() -> Failure {
    Failure { code: INTERRUPTED, message: "interrupted; the same again goes on".to_owned() }
}

pub(super) fn given_back(name: &str) -> Failure {
    Failure::failed(format!("the name `{name}` is taken and given back again and again; try again"))
}

pub(super) async fn no_room(session: &Session, ask: &Ask<'_>, none: &NoRoom) -> Failure {
    Failure::failed(format!("no allocations left: {}", reason(session, ask, none).await))
}

/// So often it is looked whether another has placed it by now, and so long between two looks.
const PLACED: u32 = 50;
const PAUSE: Duration = Duration::from_millis(200);

pub(super) const DISK: &str = "DISK_GB";

/// So often a name's bearer may be another between two questions: who loses a race for room hands the name on to its next uuid.
pub(super) const LOOKS: usize = 5;

/// What takes all that is of the stack.
pub(super) fn of_stack(stack: &str) -> LabelSelector {
    LabelSelector { key: STACK.to_owned(), value: Some(stack.to_owned()) }
}

/// Whether what bears that name is of the stack.
pub(super) async fn is_of_stack(cloud: &Cloud, kind: Workload, name: &str, stack: &str) -> bool {
    for _ in 0..LOOKS {
        let found = async { Ok(View::found(&find(cloud, resolve_name(cloud, kind, name).await?).await?)) };
        match found.await {
            Err(CloudError::NotFound(_)) => {}
            found => return found.is_ok_and(|view| view.labels.get(STACK).is_some_and(|of| of == stack)),
        }
    }
    false
}

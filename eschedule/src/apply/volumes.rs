//! The volumes of a stack: what its file says of them, what is told, and what is done.

use std::{cell::OnceCell, collections::HashMap, time::Duration};

use ec_cloud::{
    Ask, CloudError, Doomed, NewVolume, Placed, Refused, STACK, Scheduled, Standing, Step, Verb, VolumeStep,
    Volumes, Wished, WishedVolume, act, attach, create_volume, delete_called_volume, detach, extend_volume,
    is_made, move_volume, node_of_copy, node_to_come_to, room_of, takes_volumes, until_active, until_free,
};
use ec_model::{ImageRef, InstanceId, NodeId, State, Workload};
use ec_runtime::exit::Failure;

use super::{
    Applied,
    making::{LOOKS, Making, given_back, interrupted, is_of_stack, no_room, of_stack},
    waits::Asked,
    words,
};
use crate::{
    config::Session,
    run,
    shown::Shown,
    spec::{IN_FILE, Mistake, Part, demanded},
    stack::{NamedVolume, Place, Source, Stack, VolumeEntry},
};

/// The volumes of the file, those of an instance in the order of its list.
fn named(stack: &Stack) -> Vec<NamedVolume<'_>> {
    let mut named: Vec<NamedVolume<'_>> = stack.named_volumes().collect();
    named.sort_by_key(|volume| volume.place);
    named
}

/// What the file says of each volume, with what its names stand for.
pub(super) async fn wished(
    session: &Session,
    stack: &Stack,
    source: &Source,
    instances: &[Wished],
    stored: &[Standing],
) -> Result<Vec<WishedVolume>, Failure> {
    let placed = Placed::of(stored);
    let numbers: HashMap<&str, usize> = (instances.iter().map(|wish| wish.name.as_str()).zip(0..)).collect();
    let mut wished = Vec::new();
    for NamedVolume { name, entry, says, holder, boots, .. } in named(stack) {
        let is_there = placed.named(&name).is_some();
        let (mut image, mut copied_on) = (None, None);
        // One that is there was made of something, which may be gone since.
        if let Some(text) = says.image.as_ref().filter(|_| !is_there) {
            let found = seed(session, text, says).await;
            let (found, node) = found.map_err(|Mistake { part, failure }| {
                let key = if part == Part::Sha256 { "sha256" } else { "image" };
                source.wrong(&Place::of(&["volumes", entry, key]), failure)
            })?;
            (image, copied_on) = (Some(found), node);
        }
        wished.push(WishedVolume {
            size_gb: says.size.map(|size| size.0),
            image,
            copied_on,
            labels: says.labels.iter().map(|(key, value)| (key.0.clone(), value.0.clone())).collect(),
            boots,
            holder: holder.and_then(|holder| numbers.get(holder.as_str()).copied()),
            name,
        });
    }
    Ok(wished)
}

/// What a volume that there is not yet is made of, and where that lies which it is to be a copy of.
async fn seed(
    session: &Session,
    text: &str,
    says: &VolumeEntry,
) -> Result<(ImageRef, Option<NodeId>), Mistake> {
    let digest = says.sha256.as_ref().map(|digest| digest.0.as_str());
    let image = demanded(session, text, digest, &IN_FILE).await?;
    let size_gb = says.size.map(|size| size.0);
    let new = NewVolume { size_gb, image: Some(image.clone()), ..NewVolume::default() };
    Ok((image, node_of_copy(&session.cloud, &new).await.map_err(Failure::from)?))
}

/// A mistake of the file's, with its place.
pub(super) fn refused(stack: &Stack, source: &Source, of: &Volumes<'_>, refused: Refused) -> Failure {
    let named = named(stack);
    match refused {
        Refused::Volume(number, why) => {
            source.wrong(&Place::of(&["volumes", named[number].entry]), Failure::failed(why))
        }
        Refused::Size(number, why) => {
            source.wrong(&Place::of(&["volumes", named[number].entry, "size"]), Failure::failed(why))
        }
        Refused::Instance(number, why) => {
            let entry = stack.entry_of(&of.instances[number].name);
            source.wrong(&Place::of(&["instances", entry, "volumes"]), Failure::failed(why))
        }
    }
}

/// A step as it is told.
pub(super) fn told(step: &VolumeStep, of: &Volumes<'_>) -> Applied {
    let new = |what, name: &str, volume: Option<InstanceId>, note| Applied {
        volume,
        note,
        of_volume: true,
        ..Applied::new(what, name)
    };
    match step {
        VolumeStep::Create(number) => {
            let wish = &of.volumes[*number];
            new("create", &wish.name, None, Some(described(wish)))
        }
        VolumeStep::Set(volume, name, change) => new("set", name, Some(*volume), Some(words(change))),
        VolumeStep::Extend { volume, name, from, to } => {
            new("extend", name, Some(*volume), Some(format!("extend it from {from} to {to} GiB")))
        }
        VolumeStep::Detach { volume, name, from, called } => Applied {
            instance: Some(*from),
            ..new("detach", name, Some(*volume), Some(format!("detach it from {called}")))
        },
        VolumeStep::Attach(number, instance) => Applied {
            instance: of.instance_there(*instance).map(|record| record.instance),
            ..new(
                "attach",
                &of.volumes[*number].name,
                of.there(*number).map(|record| record.instance),
                Some(format!("attach it to {}", of.instances[*instance].name)),
            )
        },
        VolumeStep::Stands(volume, name, why) => new("stands", name, Some(*volume), Some(why.clone())),
        VolumeStep::Delete(volume, name) => new(
            "delete-volume",
            name,
            Some(*volume),
            Some("delete it, and all that was written on it".to_owned()),
        ),
        VolumeStep::Keep(volume, name) => {
            let why = "the file does not name it, and it stays; `--prune-volumes` deletes it, and all that was written on it";
            new("keep", name, Some(*volume), Some(why.to_owned()))
        }
    }
}

/// What a new one is.
fn described(wish: &WishedVolume) -> String {
    let size = wish.size_gb.map(|size| format!("{size} GiB"));
    let of =
        wish.image.as_ref().map(|image| format!("of {}", image.name.clone().unwrap_or_else(|| image.told())));
    size.into_iter().chain(of).collect::<Vec<_>>().join(" ")
}

impl Making<'_> {
    /// Does what is to be done of a volume.
    pub(super) async fn volume(&mut self, step: &VolumeStep, one: &mut Applied) -> Result<(), Failure> {
        let (session, cloud) = (self.session, &self.session.cloud);
        match step {
            VolumeStep::Create(number) => {
                let made = match self.volumes.get(number) {
                    // An instance boots from it by now.
                    Some(made) => *made,
                    None => self.create(*number).await?,
                };
                (one.volume, one.node) = (Some(made.instance), Some(made.node));
                if self.found.contains_key(&made.instance) {
                    one.request_id = None;
                }
                self.volumes.insert(*number, made);
                self.asked = Some(Asked::Made(made, "creating"));
            }
            VolumeStep::Set(volume, _, change) => {
                let acted = act(cloud, *volume, &Verb::Set(change.clone())).await;
                one.node = Some(acted.map_err(|error| session.failed(error))?.node);
            }
            VolumeStep::Extend { volume, to, .. } => {
                let acted =
                    extend_volume(cloud, *volume, *to).await.map_err(|error| session.failed(error))?;
                one.node = Some(acted.node);
                self.asked = Asked::of(&one.name, *volume, &acted);
            }
            VolumeStep::Detach { volume, from, .. } => {
                let given_to = self.given_to(*volume);
                // Who is to have it would not: then it is not taken from who has it.
                if let Some(to) = given_to {
                    takes_volumes(cloud, to).await.map_err(|error| session.failed(error))?;
                }
                let detached = match detach(cloud, *volume, Some(*from)).await {
                    // The same file was applied twice at once.
                    Err(CloudError::Refused(_))
                        if given_to.is_some()
                            && ec_cloud::volume(cloud, *volume)
                                .await
                                .is_ok_and(|view| view.instance == given_to) =>
                    {
                        None
                    }
                    outcome => outcome.map_err(|error| session.failed(error))?,
                };
                if let Some(detached) = detached {
                    (one.instance, one.node) = (Some(detached.instance), Some(detached.acted.node));
                    self.asked = Asked::of(&one.name, detached.instance, &detached.acted);
                }
            }
            VolumeStep::Attach(number, instance) => {
                let instance = self.instance(*instance).await?;
                let volume = match self.volumes.get(number) {
                    Some(known) => *known,
                    None => self.made(Workload::Volume, &self.of.volumes[*number].name).await?,
                };
                (one.volume, one.instance) = (Some(volume.instance), Some(instance.instance));
                one.node = Some(instance.node);
                let name = &self.of.volumes[*number].name;
                self.until_there(volume, name, "creating", self.patience).await?;
                let (volume, instance) = (volume.instance, instance.instance);
                self.unless_stopped(until_free(cloud, volume, Some(instance), self.patience)).await?;
                if let Some(node) = node_to_come_to(cloud, volume, instance, None).await? {
                    // This run may have asked for another size, or other labels.
                    self.until_at_rest(volume, name).await?;
                    let moved =
                        move_volume(cloud, volume, node).await.map_err(|error| session.failed(error))?;
                    self.volumes.insert(*number, moved);
                    self.until_there(moved, name, "moving", self.patience).await?;
                }
                let attached = attach(cloud, volume, instance, None).await;
                let acted = attached.map_err(|error| session.failed(error))?.acted;
                self.asked = Asked::of(name, instance, &acted);
            }
            VolumeStep::Delete(volume, name) => {
                self.until_copied(*volume).await?;
                let deleted = async {
                    until_free(cloud, *volume, None, self.patience).await?;
                    delete_called_volume(cloud, *volume, name, &[of_stack(self.of.stack)]).await
                };
                let doomed = self.unless_stopped(async {
                    match deleted.await {
                        // The same file was applied twice at once.
                        Err(CloudError::NotFound(_)) => Ok(Doomed::Already),
                        outcome => outcome,
                    }
                });
                if let Doomed::By { node, alive } = doomed.await? {
                    self.asked = Some(Asked::gone(&one.name, *volume, node, alive));
                }
            }
            VolumeStep::Stands(..) | VolumeStep::Keep(..) => {}
        }
        Ok(())
    }

    /// The instance that is there, to which the file gives a volume.
    fn given_to(&self, volume: InstanceId) -> Option<InstanceId> {
        let is_it = |number: &usize| self.of.there(*number).is_some_and(|record| record.instance == volume);
        let number = (0..self.of.volumes.len()).find(is_it)?;
        Some(self.instances.get(&self.of.volumes[number].holder?)?.instance)
    }

    /// Makes a volume, beside the instance that is to have it.
    async fn create(&mut self, number: usize) -> Result<Scheduled, Failure> {
        let wish = &self.of.volumes[number];
        let node = match wish.holder {
            Some(holder) => Some(self.instance(holder).await?.node),
            None => None,
        };
        self.create_on(number, node).await
    }

    /// The volume that an instance is to boot from: made where there is room for both, if it is not there, and nobody's.
    pub(super) async fn root(
        &mut self,
        instance: usize,
        number: usize,
        place: &run::Place,
    ) -> Result<Scheduled, Failure> {
        let made = match self.volumes.get(&number) {
            Some(known) => *known,
            None => {
                let roomy = self.room(instance, place, false).await?;
                self.create_on(number, roomy.or(self.of.node_for(instance))).await?
            }
        };
        self.volumes.insert(number, made);
        self.until_there(made, &self.of.volumes[number].name, "creating", self.patience).await?;
        self.unless_stopped(until_free(&self.session.cloud, made.instance, None, self.patience)).await?;
        Ok(made)
    }

    async fn create_on(&mut self, number: usize, node: Option<NodeId>) -> Result<Scheduled, Failure> {
        let wish = &self.of.volumes[number];
        let (session, cloud) = (self.session, &self.session.cloud);
        let mut labels = wish.labels.clone();
        labels.insert(STACK.to_owned(), self.of.stack.to_owned());
        let (name, size_gb, image) = (Some(wish.name.clone()), wish.size_gb, wish.image.clone());
        let new = NewVolume { name, size_gb, image, node, labels, snapshot: false };
        for _ in 0..LOOKS {
            match create_volume(cloud, &new, self.stop).await {
                Err(CloudError::Taken { name, .. })
                    if is_of_stack(cloud, Workload::Volume, &name, self.of.stack).await =>
                {
                    if let Some(made) = self.made_by_another(Workload::Volume, &name).await? {
                        self.found.insert(made.instance, made.node);
                        return Ok(made);
                    }
                }
                outcome => match outcome.map_err(|error| session.failed(error))? {
                    Ok(made) => return Ok(made),
                    Err(none) => {
                        let query = room_of(cloud, &new).await?;
                        let ask = Ask::of_volume(&query, node)?;
                        return Err(no_room(session, &ask, &none).await);
                    }
                },
            }
        }
        Err(given_back(&wish.name))
    }

    /// Waits until all that this run made as copies of a disk is there: it cannot be made once that is gone. An error where one is to
    /// be made still.
    pub(super) async fn until_copied(&self, disk: InstanceId) -> Result<(), Failure> {
        let is_of_it = |image: &ImageRef| {
            image
                .copied()
                .is_some_and(|of| of.disk == disk || of.held == Some(disk) || of.beside.contains(&disk))
        };
        for (number, wish) in self.of.volumes.iter().enumerate() {
            let there = self.of.there(number).map(|record| &record.spec.image);
            if !there.or(wish.image.as_ref()).is_some_and(is_of_it) {
                continue;
            }
            let Some(made) = self.volumes.get(&number) else {
                return Err(Failure::failed(format!(
                    "volume `{}` is to be a copy of it and is not made yet: apply without `--prune` first",
                    wish.name
                )));
            };
            self.until_there(*made, &wish.name, "creating", self.patience).await?;
        }
        for (number, made) in &self.instances {
            let is_copy = is_of_it(&self.entries[*number].guest.image);
            // It may have been stopped since it was made.
            if is_copy && !is_made(&self.session.cloud, made.instance).await? {
                self.until_there(*made, &self.of.instances[*number].name, "building", self.patience).await?;
            }
        }
        Ok(())
    }

    /// Waits until one is there that is called so, and tells what is being done meanwhile.
    pub(super) async fn until_there(
        &self,
        Scheduled { instance, node }: Scheduled,
        name: &str,
        doing: &str,
        patience: Duration,
    ) -> Result<(), Failure> {
        // Of one that is there nothing is told.
        let shown: OnceCell<Shown> = OnceCell::new();
        let made = until_active(&self.session.cloud, node, instance, patience, |step| match step {
            Step::Status(status) if status.state == State::Active => {}
            step => shown.get_or_init(|| Shown::of(name, doing)).step(step),
        });
        let made = self.unless_stopped(made).await;
        if let Some(shown) = shown.get() {
            shown.finish();
        }
        made.map(drop)
    }

    /// What comes of it, unless whoever applies does not wait any more.
    pub(super) async fn unless_stopped<T>(
        &self,
        outcome: impl Future<Output = Result<T, CloudError>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            outcome = outcome => outcome.map_err(|error| self.session.failed(error)),
            () = self.stop.cancelled() => {
                Err(interrupted())
            }
        }
    }
}

//! Restoring a snapshot: an instance's disk, and the volumes that it still has, are made anew as they were.
//!
//! ```text
//!   each step can be ─▶ lock the snapshot ─▶ stop ─▶ lock the instance ─▶ its volumes, one by one ─▶ its own disk
//!                                                 ─▶ unlock it ─▶ start, if it ran ─▶ unlock the snapshot ─▶ wait until it runs
//! ```
//!
//! What cannot be is found before anything is done, lest disks of two moments are left. A disk that is gone is no hindrance: it comes back.
//!
//! The locks say what is under way, to whoever looks, to whoever would start the guest on disks of two moments, and to the same
//! command: said again it goes on with what was broken off.

use std::{fmt::Write as _, time::Duration};

use ec_model::{Attachment, CopyOf, ImageRef, InstanceId, Power, Request, State, Workload};
use ec_plan::{
    status::{AND_STOPPED, NOT_WHOLE, is_lost, is_started_again},
    verbs::{Verb, Verdict, is_to_be_made_anew, locked, once_stopped},
};
use tokio_util::sync::CancellationToken;

use crate::{
    Acted, Cloud, CloudError, CloudResult, Known, Step, VolumeView, act,
    act::{can_be_made_of, could_be, docs},
    find_placed, until_done, volume,
    volume::{known_volume, remake_volume},
};

/// What happens while one is restored.
#[derive(Debug)]
pub enum Restoring<'a> {
    /// This is about to be asked of an instance or a volume.
    Asks(InstanceId, &'a Verb),
    /// It was, and is waited for where there is something to wait for.
    Asked(InstanceId, &'a Acted),
    /// How far that is.
    Step(Step<'a>),
    /// That is done, or cannot be.
    Ended,
    /// The instance has this volume no more, which stays as it is, or is there no more.
    Left {
        /// Which.
        volume: InstanceId,
        /// Whether it is there.
        is_there: bool,
    },
}

/// Restores a snapshot. The guest gets `grace` seconds to end by itself, and each step is waited for so long at most.
///
/// # Errors
/// It is no snapshot, or cannot be restored: [`CloudError::Refused`], with nothing changed. Else the error says that not all is
/// restored, and the same again goes on.
pub async fn restore_snapshot(
    cloud: &Cloud,
    snapshot: InstanceId,
    grace: u32,
    timeout: Duration,
    stop: &CancellationToken,
    told: impl Fn(Restoring<'_>),
) -> CloudResult<()> {
    let view = volume(cloud, snapshot).await?;
    let name = view.name.clone().unwrap_or_else(|| snapshot.to_string());
    if !view.snapshot || view.copy_of_kind != Some(Workload::Machine) {
        return Err(CloudError::Refused(format!("{name} is a volume, and no snapshot of an instance")));
    }
    let Some(instance) = view.copy_of else {
        return Err(CloudError::Refused(format!("nobody knows whose {name} is")));
    };
    if let Some(why) = not_there(cloud, &name, instance, &view).await {
        return Err(CloudError::Refused(why));
    }
    let asker = Asker { cloud, timeout, stop, told: &told };
    let kept = find_placed(cloud, snapshot).await?.record.and_then(|record| record.locked);
    let reasons = [true, false].map(|starts| reason(instance, starts));
    let is_ours = kept.as_ref().is_none_or(|kept| reasons.contains(kept));
    let machine = match find_placed(cloud, instance).await {
        Ok(machine) => machine,
        Err(error) => {
            if matches!(error, CloudError::NotFound(_)) && kept.is_some() && is_ours {
                asker.ask(snapshot, Verb::Unlock).await?;
            }
            return Err(error.and(boots_another(&name)));
        }
    };
    let mut held = Held::of(name, instance, &machine)?;
    if kept.is_none() && !held.is_locked {
        // Before anything is locked for it.
        held.could_be(cloud, &view, &machine, grace).await?;
    }
    // One that broke off after it had stopped it, or unlocked it, left word of that here.
    held.starts |= kept.as_ref() == Some(&reasons[0]);
    if kept.is_none() {
        asker.ask(snapshot, Verb::Hold(reason(instance, held.starts))).await?;
    }
    held.is_begun |= kept.is_some();
    let restored = held.restore(&asker, &view, &machine, grace).await;
    let kept = kept.unwrap_or_else(|| reason(instance, held.starts));
    match restored {
        Ok(start) => {
            // Its start is asked for: nothing is left for which the snapshot would have to stay locked.
            if is_ours {
                let_go(&asker, snapshot, kept).await?;
            }
            match start {
                Some(acted) => asker.wait(instance, &Verb::Start, acted).await,
                None => Ok(()),
            }
        }
        Err(error) if held.is_begun && is_doomed(cloud, instance).await => {
            let error = error.and(boots_another(&held.snapshot));
            if is_ours { let_go(&asker, snapshot, kept).await.and(Err(error)) } else { Err(error) }
        }
        // It was stopped for this, and another who locked it since has taken it over.
        Err(error) if held.is_begun && is_ours && !held.is_locked && held.is_anothers(cloud).await => {
            let_go(&asker, snapshot, kept).await.and(Err(error))
        }
        // Its user unlocked it, or another restore of it that came to its end.
        Err(error) if held.is_begun && held.is_let_go(cloud).await => Err(error.and(format!(
            "{instance} is not locked for that any more, so that another restore of it may have come to its end: look at it before you run \
             `eschedule snapshot restore {}` again, which takes away what was written since; `eschedule unlock {snapshot}` lets the snapshot \
             be deleted",
            held.snapshot
        ))),
        Err(error) if held.is_begun => {
            let name = &held.snapshot;
            // Its agent may have found only now that its disks are gone.
            let is_gone = match volume(cloud, snapshot).await {
                Ok(view) => not_there(cloud, name, instance, &view).await,
                Err(_) => None,
            };
            let again = || format!("run `eschedule snapshot restore {name}` again");
            Err(error.and(format!("not all of {instance} is restored: {}", is_gone.unwrap_or_else(again))))
        }
        // It is as it was, and so is the snapshot.
        Err(error) => let_go(&asker, snapshot, kept).await.and(Err(error)),
    }
}

/// What helps where there is nothing any more that could be restored.
fn boots_another(snapshot: &str) -> String {
    format!("`eschedule run NAME --image volume:{snapshot}` boots another from it")
}

/// Why a snapshot cannot be restored as it stands; where one broke off that had locked the instance, what helps that.
async fn not_there(cloud: &Cloud, name: &str, instance: InstanceId, view: &VolumeView) -> Option<String> {
    let mut why = match view.reason.as_deref() {
        Some(NOT_WHOLE) => format!("snapshot {name} cannot be restored: {NOT_WHOLE}"),
        _ if view.status == "available" => return None,
        _ => format!("snapshot {name} is {}, and cannot be restored", view.status),
    };
    let machine = find_placed(cloud, instance).await;
    let held = machine.ok().and_then(|machine| Held::of(name.to_owned(), instance, &machine).ok());
    if held.is_some_and(|held| held.is_locked) {
        let _ = write!(
            why,
            "; {instance} is stopped and locked for it: `eschedule unlock {instance} {}` and `eschedule start {instance}` have it \
             go on with the disks that it has",
            view.volume
        );
    }
    Some(why)
}

/// Whether somebody destroyed it meanwhile.
async fn is_doomed(cloud: &Cloud, instance: InstanceId) -> bool {
    match find_placed(cloud, instance).await {
        Ok(machine) => machine.is_doomed(),
        Err(error) => matches!(error, CloudError::NotFound(_)),
    }
}

/// Why a snapshot is locked meanwhile.
fn reason(instance: InstanceId, starts: bool) -> String {
    format!("instance {instance} is being restored from it{}", if starts { STARTS } else { "" })
}

/// Takes the lock off a snapshot that a restore put there; another that came since stays.
async fn let_go(
    asker: &Asker<'_, impl Fn(Restoring<'_>)>,
    snapshot: InstanceId,
    reason: String,
) -> CloudResult<()> {
    match asker.ask(snapshot, Verb::LetGo(reason)).await {
        Ok(()) | Err(CloudError::Refused(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Who asks for one thing after the other.
struct Asker<'a, T> {
    cloud: &'a Cloud,
    timeout: Duration,
    stop: &'a CancellationToken,
    told: &'a T,
}

impl<T: Fn(Restoring<'_>)> Asker<'_, T> {
    /// Asks for this, and waits until it is so.
    async fn ask(&self, of: InstanceId, verb: Verb) -> CloudResult<()> {
        (self.told)(Restoring::Asks(of, &verb));
        let acted = act(self.cloud, of, &verb).await;
        self.until_done(of, acted?).await
    }

    /// Waits until what was asked is so.
    async fn wait(&self, of: InstanceId, verb: &Verb, acted: Acted) -> CloudResult<()> {
        (self.told)(Restoring::Asks(of, verb));
        self.until_done(of, acted).await
    }

    /// Has a volume be made anew of an instance that is locked for this reason.
    async fn remake(&self, volume: InstanceId, reason: String, of: &ImageRef) -> CloudResult<()> {
        (self.told)(Restoring::Asks(volume, &Verb::Rebuild(Some(of.clone()))));
        let acted = remake_volume(self.cloud, volume, reason, of).await;
        self.until_done(volume, acted?).await
    }

    async fn until_done(&self, of: InstanceId, acted: Acted) -> CloudResult<()> {
        (self.told)(Restoring::Asked(of, &acted));
        let done = match acted.awaited {
            Some(awaited) => {
                let step = |step: Step<'_>| (self.told)(Restoring::Step(step));
                let done = until_done(self.cloud, acted.node, of, awaited, self.timeout, step);
                tokio::select! {
                    done = done => done.map(drop),
                    () = self.stop.cancelled() => {
                        Err(CloudError::BrokenOff(format!("what was asked of {of} last goes on")))
                    }
                }
            }
            None => Ok(()),
        };
        (self.told)(Restoring::Ended);
        done
    }
}

/// In the reason of the locks of one that ran, and of its snapshot.
const STARTS: &str = ", and then it is started";

/// What is known of an instance that is being restored. While its volumes are, it is locked: nobody starts it on some disks that are
/// restored and some that are not, and whoever looks at it, or goes on with a restore that broke off, is told.
struct Held {
    /// What the snapshot is called.
    snapshot: String,
    instance: InstanceId,
    /// It is, by a restore that broke off.
    is_locked: bool,
    /// It ran, and is to again.
    starts: bool,
    /// Something of it was changed.
    is_begun: bool,
}

impl Held {
    /// # Errors
    /// Somebody locked it for another reason.
    fn of(snapshot: String, instance: InstanceId, machine: &Known) -> CloudResult<Self> {
        let new = |is_locked, starts| Self {
            snapshot: snapshot.clone(),
            instance,
            is_locked,
            starts,
            is_begun: is_locked,
        };
        let Some(reason) = machine.record.as_ref().and_then(|record| record.locked.as_deref()) else {
            return Ok(new(false, runs(machine)));
        };
        let mut held = [true, false].into_iter().map(|starts| new(true, starts));
        held.find(|held| held.reason() == reason).ok_or_else(|| {
            CloudError::Refused(format!("cannot restore instance {instance}: {}", locked(instance, reason)))
        })
    }

    fn reason(&self) -> String {
        let Self { snapshot, starts, .. } = self;
        let starts = if *starts { STARTS } else { "" };
        format!(
            "snapshot {snapshot} is being restored{starts}; broken off, `eschedule snapshot restore {snapshot}` goes on"
        )
    }

    /// Whether the instance is locked, and not for this.
    async fn is_anothers(&self, cloud: &Cloud) -> bool {
        let machine = find_placed(cloud, self.instance).await.ok();
        let lock = machine.and_then(|machine| machine.record?.locked);
        lock.is_some_and(|lock| lock != self.reason())
    }

    /// Whether it was locked for this, and is not any more.
    async fn is_let_go(&self, cloud: &Cloud) -> bool {
        let machine = find_placed(cloud, self.instance).await;
        let record = machine.ok().and_then(|machine| machine.record);
        self.is_locked && record.is_some_and(|record| record.locked != Some(self.reason()))
    }

    /// All of it, from where one that broke off was; with what came of asking for its start, where it ran.
    async fn restore(
        &mut self,
        asker: &Asker<'_, impl Fn(Restoring<'_>)>,
        view: &VolumeView,
        machine: &Known,
        grace: u32,
    ) -> CloudResult<Option<Acted>> {
        let instance = self.instance;
        // Whatever was changed since one broke off; what is locked for it nobody changed.
        if self.is_begun && !self.is_locked {
            self.could_be(asker.cloud, view, machine, grace).await?;
        }
        self.stop_and_lock(asker, machine, grace).await?;
        // From now on it keeps the volumes that it has, unless somebody unlocks it.
        let has = self.volumes(asker.cloud).await?;
        for volume in &view.beside {
            if !has.iter().any(|has| has.volume == *volume) {
                let found = find_placed(asker.cloud, *volume).await;
                let is_there = !matches!(found, Err(CloudError::NotFound(_)));
                (asker.told)(Restoring::Left { volume: *volume, is_there });
            }
        }
        for (volume, of) in renewed(view, &has) {
            self.volumes(asker.cloud).await?;
            asker.remake(volume, self.reason(), &of).await?;
        }
        if Attachment::root_of(&has).is_none() {
            asker.ask(instance, Verb::Remake(self.reason(), own(view))).await?;
        }
        asker.ask(instance, Verb::LetGo(self.reason())).await?;
        // All is restored: what comes of a start is its own affair.
        self.is_begun = false;
        match self.starts {
            true => act(asker.cloud, instance, &Verb::Start).await.map(Some),
            false => Ok(None),
        }
    }

    /// Whether all of it could be restored, as it stands.
    ///
    /// # Errors
    /// One of the steps is refused, or one of the disks is too small.
    async fn could_be(
        &self,
        cloud: &Cloud,
        view: &VolumeView,
        machine: &Known,
        grace: u32,
    ) -> CloudResult<()> {
        let instance = self.instance;
        let refused = |why: String| CloudError::Refused(format!("cannot restore instance {instance}: {why}"));
        if !is_down(machine) {
            could_be(machine, &Verb::Stop(grace))?.map_err(refused)?;
        }
        let (record, order) = docs(machine)?;
        let has = &record.record.volumes;
        for (volume, of) in renewed(view, has) {
            let disk = known_volume(cloud, volume).await?;
            let anew = could_be(&disk, &Verb::Rebuild(Some(of.clone())))?;
            anew.map_err(|why| refused(format!("its volume {volume}: {why}")))?;
            can_be_made_of(cloud, &disk, &of).await?;
        }
        if Attachment::root_of(has).is_none() {
            let (verb, status) = (Verb::Rebuild(Some(own(view))), machine.status.record());
            if let Verdict::Refuse(why) = once_stopped(&verb, &record.record, &order.record, status) {
                return Err(refused(why));
            }
            can_be_made_of(cloud, machine, &own(view)).await?;
        }
        Ok(())
    }

    /// Has it be stopped and locked for this.
    async fn stop_and_lock(
        &mut self,
        asker: &Asker<'_, impl Fn(Restoring<'_>)>,
        machine: &Known,
        grace: u32,
    ) -> CloudResult<()> {
        // Broken off while its own disk was made, that goes on, and is begun anew.
        let is_remade = machine.request.record().is_some_and(|request| {
            request.power.power == Power::Stopped && is_to_be_made_anew(request, machine.status.record())
        });
        if self.is_locked && (is_down(machine) || is_remade) {
            return Ok(());
        }
        if self.is_locked {
            // Somebody has started it beside this, and what is locked nobody can stop.
            asker.ask(self.instance, Verb::LetGo(self.reason())).await?;
            (self.is_locked, self.starts) = (false, true);
        }
        if !is_down(machine) {
            let stop = Verb::Stop(grace);
            (asker.told)(Restoring::Asks(self.instance, &stop));
            let acted = act(asker.cloud, self.instance, &stop).await?;
            self.is_begun = true;
            let stopped = asker.until_done(self.instance, acted).await;
            // Of one that has neither disk nor domain there is nothing that could be stopped, which its agent tells.
            if let Err(error) = stopped {
                let is_told = matches!(error, CloudError::Elsewhere(_));
                if !is_told || !is_down(&find_placed(asker.cloud, self.instance).await?) {
                    return Err(error);
                }
            }
        }
        asker.ask(self.instance, Verb::Hold(self.reason())).await?;
        (self.is_begun, self.is_locked) = (true, true);
        if is_down(&find_placed(asker.cloud, self.instance).await?) {
            return Ok(());
        }
        asker.ask(self.instance, Verb::LetGo(self.reason())).await?;
        self.is_locked = false;
        Err(CloudError::Busy(format!("somebody started {} meanwhile", self.instance)))
    }

    /// The volumes of what is locked for this.
    ///
    /// # Errors
    /// Somebody unlocked it meanwhile, or locked it for another reason.
    async fn volumes(&self, cloud: &Cloud) -> CloudResult<Vec<Attachment>> {
        let record = find_placed(cloud, self.instance).await?.record;
        let record = record.filter(|record| record.locked == Some(self.reason()));
        let volumes = record.map(|record| record.volumes);
        volumes.ok_or_else(|| {
            CloudError::Busy(format!("somebody else unlocked or locked instance {} meanwhile", self.instance))
        })
    }
}

/// The copy of its first disk.
fn own(view: &VolumeView) -> ImageRef {
    ImageRef::copy_of(&CopyOf::disk(Workload::Volume, view.volume))
}

/// Which of the volumes that an instance has are made anew, in this order, each of its copy. One that it boots from is its first disk.
fn renewed(view: &VolumeView, has: &[Attachment]) -> Vec<(InstanceId, ImageRef)> {
    let beside = view.beside.iter().filter(|volume| has.iter().any(|has| has.volume == **volume));
    let copied = beside.map(|volume| {
        let of = CopyOf { held: Some(*volume), ..CopyOf::disk(Workload::Volume, view.volume) };
        (*volume, ImageRef::copy_of(&of))
    });
    copied.chain(Attachment::root_of(has).map(|root| (root, own(view)))).collect()
}

/// Whether it is stopped, and is to be: one that ended by itself its agent may start, locked or not. Without its disk it is an ERROR then.
fn is_down(machine: &Known) -> bool {
    let (Some(request), Some(status)) = (machine.request.record(), machine.status.record()) else {
        return false;
    };
    let Request { power: wish, .. } = request;
    let is_done = match status.state {
        State::Stopped => status.power_generation >= wish.generation,
        _ => is_lost(status) && status.observed_generation >= wish.generation,
    };
    wish.power == Power::Stopped && is_done
}

/// Whether it runs, or is about to: somebody has asked for that, or its policy starts it again. Of one that lost its disk, whether it did.
fn runs(machine: &Known) -> bool {
    machine.status.record().is_none_or(|status| {
        let was_stopped = status.reason.as_ref().is_some_and(|reason| reason.contains(AND_STOPPED));
        let is_to_be = machine.request.record().is_some_and(|request| request.power.power != Power::Stopped);
        let is_down = status.state == State::Stopped || is_lost(status) && (was_stopped || !is_to_be);
        let is_started = is_started_again(status.reason.as_deref());
        let is_asked_for = machine.request.record().is_some_and(|request| {
            request.power.generation > status.power_generation && request.power.power != Power::Stopped
        });
        !is_down || is_started || is_asked_for
    })
}

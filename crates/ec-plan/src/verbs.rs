//! What users may ask for when: one table of verbs and situations, with a sentence for each that is not done.
//!
//! It follows OpenStack's Compute API where that has a word: what it answers with 409 is refused here, but for what
//! docs/lifecycle.md tells to be otherwise. That prints the table, and a test holds the two together.

mod situation;

use std::{collections::BTreeMap, fmt};

use ec_model::{
    ActionVerb, Attachment, Desired, Extent, ImageRef, Instance, InstanceId, Power, PowerWish, Request,
    Restart, State, Status, Workload,
    input::{LABELS_MAX, METADATA_MAX},
};

use crate::{
    sizes,
    status::{is_lost, is_started_again},
    volumes::renewable,
};
pub use situation::{Situation, is_to_be_made_anew, shown};

/// Why nothing is done to unlock one.
pub const NOT_LOCKED: &str = "it is not locked";
pub(crate) use situation::is_built;
use situation::is_so_by_wish;

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verb {
    /// Let it run.
    Start,
    /// Let it end, by itself within so many seconds.
    Stop(u32),
    /// End it, by itself within so many seconds, and start it again.
    Reboot(u32),
    /// Halt its processors.
    Pause,
    /// Let them go on.
    Unpause,
    /// Save its memory and end it.
    Suspend,
    /// Go on from there.
    Resume,
    /// Make its disk anew, from this image or from the one that it has; what the guest wrote goes.
    Rebuild(Option<ImageRef>),
    /// The same of one that is locked for this reason, from this image; it stays locked. Of a volume, whose machine is locked so.
    Remake(String, ImageRef),
    /// Boot it from a disk made of this image, or of the one that it has, with its own beside it.
    Rescue(Option<ImageRef>),
    /// Boot it from its own again.
    Unrescue,
    /// Make it as large as this; what it was is kept until that is confirmed.
    Resize(Extent),
    /// Let it be as large as it was made.
    Confirm,
    /// Make it as large as it was before; its disk stays as it is.
    Revert,
    /// Let nothing be done to it, for this reason.
    Lock(String),
    /// The same, unless it is locked for another.
    Hold(String),
    /// Let things be done to it again.
    Unlock,
    /// The same, where it is locked for this reason.
    LetGo(String),
    /// Call it so. Its guest's hostname stays.
    Rename(String),
    /// Change what is told of it, or follows its end.
    Set(Change),
}

/// What is changed beside power; what is not named stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Labels, by their keys; without a value they go.
    pub labels: BTreeMap<String, Option<String>>,
    /// What its guest is told of itself, by key; without a value it goes.
    pub metadata: BTreeMap<String, Option<String>>,
    /// What follows when it ends without anybody's wish.
    pub restart: Option<Restart>,
}

impl Change {
    /// Makes it in a record.
    pub fn make(&self, instance: &mut Instance) {
        change(&mut instance.labels, &self.labels);
        change(&mut instance.spec.metadata, &self.metadata);
        instance.restart = self.restart.unwrap_or(instance.restart);
    }
}

/// Which it changes. Values are left out: they may be long, and nobody else's matter.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = |words: &BTreeMap<String, Option<String>>, set: bool| {
            let keys = words.iter().filter(|(_, value)| value.is_some() == set).map(|(key, _)| key.as_str());
            keys.collect::<Vec<_>>().join(" ")
        };
        let parts = [
            ("labels", keys(&self.labels, true)),
            ("without labels", keys(&self.labels, false)),
            ("metadata", keys(&self.metadata, true)),
            ("without metadata", keys(&self.metadata, false)),
            ("restart", self.restart.map(|restart| restart.to_string()).unwrap_or_default()),
        ];
        let parts = parts.into_iter().filter(|(_, words)| !words.is_empty());
        let parts: Vec<String> = parts.map(|(what, words)| format!("{what} {words}")).collect();
        f.write_str(&parts.join(", "))
    }
}

fn change(words: &mut BTreeMap<String, String>, changes: &BTreeMap<String, Option<String>>) {
    for (key, value) in changes {
        match value {
            Some(value) => _ = words.insert(key.clone(), value.clone()),
            None => _ = words.remove(key),
        }
    }
}

impl Verb {
    /// As it stands in an instance's history, and how, where the word does not say all.
    pub fn recorded(&self) -> (ActionVerb, Option<String>) {
        match self {
            Self::Start => (ActionVerb::Start, None),
            Self::Stop(grace) => (ActionVerb::Stop, Some(format!("grace {grace} s"))),
            Self::Reboot(0) => (ActionVerb::Reboot, Some("hard".to_owned())),
            Self::Reboot(grace) => (ActionVerb::Reboot, Some(format!("grace {grace} s"))),
            Self::Pause => (ActionVerb::Pause, None),
            Self::Unpause => (ActionVerb::Unpause, None),
            Self::Suspend => (ActionVerb::Suspend, None),
            Self::Resume => (ActionVerb::Resume, None),
            Self::Rebuild(image) => (ActionVerb::Rebuild, image.as_ref().map(ImageRef::told)),
            Self::Remake(_, image) => (ActionVerb::Rebuild, Some(image.told())),
            Self::Rescue(image) => (ActionVerb::Rescue, image.as_ref().map(ImageRef::told)),
            Self::Unrescue => (ActionVerb::Unrescue, None),
            Self::Resize(extent) => (ActionVerb::Resize, Some(extent.query.clone())),
            Self::Confirm => (ActionVerb::ConfirmResize, None),
            Self::Revert => (ActionVerb::RevertResize, None),
            Self::Lock(reason) | Self::Hold(reason) => {
                (ActionVerb::Lock, Some(reason.clone()).filter(|reason| !reason.is_empty()))
            }
            Self::Unlock | Self::LetGo(_) => (ActionVerb::Unlock, None),
            Self::Rename(name) => (ActionVerb::Rename, Some(name.clone())),
            Self::Set(change) => (ActionVerb::Set, Some(change.to_string())),
        }
    }

    /// What the command line calls it.
    pub fn name(&self) -> &'static str {
        self.name_of(Workload::Machine)
    }

    /// The word by which that is asked of a workload of this kind.
    pub fn name_of(&self, kind: Workload) -> &'static str {
        match self {
            Self::Resize(_) if kind == Workload::Volume => "extend",
            Self::Rebuild(_) | Self::Remake(..) if kind == Workload::Volume => "restore",
            Self::Start => "start",
            Self::Stop(0) => "stop --grace 0",
            Self::Stop(_) => "stop",
            Self::Reboot(0) => "reboot --hard",
            Self::Reboot(_) => "reboot",
            Self::Pause => "pause",
            Self::Unpause => "unpause",
            Self::Suspend => "suspend",
            Self::Resume => "resume",
            Self::Rebuild(_) | Self::Remake(..) => "rebuild",
            Self::Rescue(_) => "rescue",
            Self::Unrescue => "unrescue",
            Self::Resize(_) => "resize",
            Self::Confirm => "resize --confirm",
            Self::Revert => "resize --revert",
            Self::Lock(_) | Self::Hold(_) => "lock",
            Self::Unlock | Self::LetGo(_) => "unlock",
            Self::Rename(_) => "rename",
            Self::Set(_) => "set",
        }
    }
}

/// What becomes of what is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is done: this is wanted from now on. The generation is the caller's to set.
    Do(Wish),
    /// It is so already, or comes to be so; in these words.
    Already(String),
    /// It cannot be; in these words.
    Refuse(String),
}

/// What is wanted from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// This of its power, once it can be.
    Power(PowerWish),
    /// It is locked, for this reason, or is not.
    Locked(Option<String>),
    /// A new disk, from this image or from the one that it has.
    Rebuild(Option<ImageRef>),
    /// It boots from a disk made of this image, or of the one that it has.
    Rescue(Option<ImageRef>),
    /// It boots from its own disk.
    Unrescue,
    /// It is as large as this.
    Resize(Extent),
    /// It stays as large as it is.
    Confirm,
    /// It is as large as it was before.
    Revert,
    /// It is called so.
    Name(String),
    /// This is changed.
    Set(Change),
}

/// What helps one that is rescued and does not run.
pub const RESCUED_OFF: &str =
    "`eschedule start` boots its rescue disk again, `eschedule unrescue` its own disk";

/// Why what is asked of machines is not asked of a volume.
pub const IS_VOLUME: &str = "it is a volume: `eschedule volume --help` tells what can be asked of one";

/// What becomes of a verb, asked of an instance of which control has this record and this request, and whose agent
/// tells this.
pub fn judge(verb: &Verb, instance: &Instance, request: &Request, status: Option<&Status>) -> Verdict {
    if request.desired == Desired::Destroyed {
        return Verdict::Refuse("it is being destroyed".to_owned());
    }
    match (verb, &instance.locked) {
        // It is another's lock that is held ([`crate::volumes::open`]).
        (Verb::Remake(_, image), _) if instance.kind == Workload::Volume => {
            return judge(&Verb::Rebuild(Some(image.clone())), instance, request, status);
        }
        (Verb::Remake(reason, image), Some(before)) if reason == before => {
            let open = Instance { locked: None, ..instance.clone() };
            return judge(&Verb::Rebuild(Some(image.clone())), &open, request, status);
        }
        (Verb::LetGo(_) | Verb::Remake(..), None) => {
            return Verdict::Refuse("somebody else unlocked it meanwhile".to_owned());
        }
        (Verb::Lock(reason), None) => return Verdict::Do(Wish::Locked(Some(reason.clone()))),
        // Another reason takes the place of the one before; none is no other.
        (Verb::Lock(reason), Some(before)) if !reason.is_empty() && reason != before => {
            return Verdict::Do(Wish::Locked(Some(reason.clone())));
        }
        (Verb::Lock(_), Some(_)) => return Verdict::Already("it is locked already".to_owned()),
        (Verb::Hold(reason), None) => return Verdict::Do(Wish::Locked(Some(reason.clone()))),
        (Verb::Hold(reason), Some(before)) if reason == before => {
            return Verdict::Already("it is locked already".to_owned());
        }
        (Verb::LetGo(reason), Some(before)) if reason == before => {
            return Verdict::Do(Wish::Locked(None));
        }
        (Verb::Unlock, Some(_)) => return Verdict::Do(Wish::Locked(None)),
        (Verb::Unlock, None) => return Verdict::Already(NOT_LOCKED.to_owned()),
        (_, Some(reason)) => return Verdict::Refuse(locked(instance.instance, reason)),
        (Verb::Rename(name), None) if instance.name.as_ref() == Some(name) => {
            return Verdict::Already(format!("it is called `{name}` already"));
        }
        (Verb::Rename(name), None) => return Verdict::Do(Wish::Name(name.clone())),
        (Verb::Set(Change { metadata, restart, .. }), None)
            if instance.kind == Workload::Volume && !(metadata.is_empty() && restart.is_none()) =>
        {
            return Verdict::Refuse(IS_VOLUME.to_owned());
        }
        (Verb::Set(change), None) => {
            let mut changed = instance.clone();
            change.make(&mut changed);
            if changed == *instance {
                return Verdict::Already("all of that is so already".to_owned());
            }
            let counted = [
                (changed.labels.len(), LABELS_MAX, "labels"),
                (changed.spec.metadata.len(), METADATA_MAX, "items of metadata"),
            ];
            if let Some((many, most, what)) = counted.into_iter().find(|(many, most, _)| many > most) {
                return Verdict::Refuse(format!("it would have {many} {what}, more than {most}"));
            }
            return Verdict::Do(Wish::Set(change.clone()));
        }
        (Verb::Resize(_) | Verb::Rebuild(_), None) if instance.spec.is_snapshot() => {
            return Verdict::Refuse("it is a snapshot, and stays as it was made".to_owned());
        }
        (Verb::Rebuild(Some(image)), None) if instance.kind == Workload::Volume => {
            return match renewable(status) {
                Ok(()) => Verdict::Do(Wish::Rebuild(Some(image.clone()))),
                Err(why) => Verdict::Refuse(why),
            };
        }
        (Verb::Resize(_), None)
            if instance.kind == Workload::Volume && is_to_be_made_anew(request, status) =>
        {
            return Verdict::Refuse("it is being made anew; ask again when that is done".to_owned());
        }
        (Verb::Resize(extent), None) if instance.kind == Workload::Volume => {
            return sizes::extend(extent, instance, request, status);
        }
        (Verb::Rebuild(_), None) if Attachment::root_of(&instance.volumes).is_some() => {
            let why = "it boots from a volume: `eschedule volume restore` makes that anew";
            return Verdict::Refuse(why.to_owned());
        }
        (Verb::Resize(extent), None)
            if Attachment::root_of(&instance.volumes).is_some() && sizes::of_disk(&extent.resources) > 0 =>
        {
            let why = "it boots from a volume, and has no disk of its own: leave DISK_GB out, `eschedule volume extend` makes its volume larger";
            return Verdict::Refuse(why.to_owned());
        }
        (_, None) if instance.kind == Workload::Volume => {
            return Verdict::Refuse(IS_VOLUME.to_owned());
        }
        (_, None) => {}
    }
    let situation = Situation::of(instance, request, status);
    let is_rescued = matches!(situation, Situation::Rescued | Situation::RescuedOff);
    if let (Verb::Rescue(Some(image)), true, Some(wish)) = (verb, is_rescued, &request.rescue)
        && !image.is_same(&wish.image)
    {
        return Verdict::Refuse(
            "it is rescued with another image; `eschedule unrescue` boots it from its own disk first"
                .to_owned(),
        );
    }
    // It is to be stopped once it was built, and that is taken back.
    let situation = match (verb, situation) {
        (Verb::Start, Situation::Building) if request.power.power != Power::Running => Situation::Stopping,
        // Of its rescue disk no stop is kept, so its policy, which tells that it does, starts it again.
        (Verb::Stop(_), Situation::RescuedOff)
            if request.restart != Restart::No
                && status.is_some_and(|status| is_started_again(status.reason.as_deref())) =>
        {
            Situation::Rescued
        }
        // It ended by itself: its policy, or one that is set later, would start it again.
        (Verb::Stop(_), Situation::Stopped) if request.power.power != Power::Stopped => Situation::Stopping,
        _ => situation,
    };
    let verdict = sizes::judge(verb, instance, request, status, situation);
    match verdict.unwrap_or_else(|| in_situation(verb, situation)) {
        // A guest that was told to end has the time that it was told.
        Verdict::Do(Wish::Power(wish)) if *verb == Verb::Start && situation == Situation::Stopping => {
            let grace_seconds = wish.grace_seconds.max(request.power.grace_seconds);
            Verdict::Do(Wish::Power(PowerWish { grace_seconds, ..wish }))
        }
        // Who asks twice is not told that it is so while it is not.
        Verdict::Already(_)
            if matches!(verb, Verb::Start | Verb::Unpause | Verb::Resume | Verb::Pause)
                && status.is_some_and(|status| is_so_by_wish(situation, request, status)) =>
        {
            Verdict::Already("that is asked for already, and yet to be done".to_owned())
        }
        verdict => verdict,
    }
}

/// What would become of a verb, asked of an instance once it is stopped, and else as it is now.
pub fn once_stopped(verb: &Verb, instance: &Instance, request: &Request, status: Option<&Status>) -> Verdict {
    let power = PowerWish { power: Power::Stopped, ..request.power.clone() };
    let status = status.map(|status| Status {
        // Without its disk it stays an ERROR.
        state: if is_lost(status) { status.state } else { State::Stopped },
        power_generation: status.power_generation.max(power.generation),
        ..status.clone()
    });
    judge(verb, instance, &Request { power, ..request.clone() }, status.as_ref())
}

/// Why nothing is done to what is locked. By its uuid, which unlocks a volume, too.
pub fn locked(instance: InstanceId, reason: &str) -> String {
    let reason = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    format!("it is locked{reason}; `eschedule unlock {instance}` lets things be done to it again")
}

/// The table.
fn in_situation(verb: &Verb, situation: Situation) -> Verdict {
    use Situation as S;
    let wish = |power, grace_seconds, anew| {
        Verdict::Do(Wish::Power(PowerWish { power, generation: 0, grace_seconds, anew }))
    };
    let to = |power| wish(power, ec_model::GRACE_SECONDS, false);
    let already = || Verdict::Already(format!("it is {situation} already"));
    let refuse = |hint: &str| Verdict::Refuse(format!("it is {situation}{hint}"));
    const UNPAUSE: &str = "; `eschedule unpause` lets it go on";
    const RESUME: &str = "; `eschedule resume` lets it go on";
    const START: &str = "; `eschedule start` starts it";
    const UNRESCUE: &str = "; `eschedule unrescue` boots it from its own disk again";
    const OWN: &str = " and boots from its own disk";
    const VERIFY: &str =
        "; `eschedule resize --confirm` lets it be so, `eschedule resize --revert` goes back";
    const LATER: &str = "; ask again when that is done";
    match (verb, situation) {
        (Verb::Start, S::Stopped | S::Stopping | S::RescuedOff | S::Error) => to(Power::Running),
        (Verb::Start, S::Running | S::Rebooting) => already(),
        (Verb::Start, S::Building) => {
            Verdict::Already("it is being built, and started when that is done".to_owned())
        }
        (Verb::Start, S::Paused) => refuse(UNPAUSE),

        (Verb::Stop(grace), S::Building | S::Running | S::Stopping | S::Rebooting | S::Error) => {
            wish(Power::Stopped, *grace, false)
        }
        (Verb::Stop(_), S::Stopped | S::RescuedOff) => already(),
        // It cannot hear.
        (Verb::Stop(0), S::Paused) => wish(Power::Stopped, 0, false),
        (Verb::Stop(_), S::Paused) => {
            refuse("; `eschedule unpause` lets it go on, `eschedule stop --grace 0` ends it as it is")
        }

        (Verb::Reboot(grace), S::Running | S::Stopping | S::Error) => wish(Power::Running, *grace, true),
        // Memory that does not come back well could only be destroyed otherwise.
        (Verb::Reboot(0), S::Paused | S::Suspended | S::Stopped | S::Rebooting | S::RescuedOff) => {
            wish(Power::Running, 0, true)
        }
        // It may wait for a guest that stands still, and goes on once that has ended.
        (Verb::Stop(0), S::Rebuilding | S::Resizing) => wish(Power::Stopped, 0, false),
        (Verb::Reboot(0), S::Rebuilding | S::Resizing) => wish(Power::Running, 0, true),
        (Verb::Reboot(_), S::Rebooting) => already(),
        (Verb::Reboot(_), S::Stopped) => refuse(START),
        (Verb::Reboot(_), S::RescuedOff) => refuse(&format!("; {RESCUED_OFF}")),
        (Verb::Reboot(_), S::Paused) => refuse(UNPAUSE),

        (Verb::Pause, S::Running) => to(Power::Paused),
        (Verb::Pause, S::Paused) => already(),
        (Verb::Unpause, S::Paused) => to(Power::Running),
        (Verb::Unpause, S::Running) => already(),

        (Verb::Suspend, S::Running) => to(Power::Suspended),
        (Verb::Suspend, S::Suspending | S::Suspended) => already(),
        (Verb::Suspend, S::Paused) => refuse(UNPAUSE),
        // Also of one that cannot be saved, say for want of room: tried for ever, it would be nobody's to take back.
        (Verb::Resume, S::Suspended | S::Suspending) => to(Power::Running),
        (Verb::Resume, S::Running) => already(),
        (Verb::Resume, S::Paused) => refuse(UNPAUSE),

        // A newer wish takes the place of one that is not done, say for want of its image.
        (Verb::Rebuild(image), S::Running | S::Stopped | S::Rebuilding | S::Error) => {
            Verdict::Do(Wish::Rebuild(image.clone()))
        }
        (Verb::Rebuild(_), S::Paused) => refuse(UNPAUSE),

        (Verb::Rescue(image), S::Running | S::Stopped | S::Rescuing | S::Error) => {
            Verdict::Do(Wish::Rescue(image.clone()))
        }
        (Verb::Rescue(_), S::Rescued | S::RescuedOff) => already(),
        (Verb::Rescue(_), S::Paused) => refuse(UNPAUSE),
        (Verb::Unrescue, S::Rescuing | S::Rescued | S::RescuedOff) => Verdict::Do(Wish::Unrescue),
        (Verb::Unrescue, S::Unrescuing | S::Running) => already(),
        (Verb::Unrescue, S::Paused | S::Stopped | S::Error) => refuse(OWN),

        (Verb::Resize(extent), S::Running | S::Stopped) => Verdict::Do(Wish::Resize(extent.clone())),
        (Verb::Resize(_), S::Paused) => refuse(UNPAUSE),
        (Verb::Confirm, S::Resized) => Verdict::Do(Wish::Confirm),
        (Verb::Revert, S::Resized) => Verdict::Do(Wish::Revert),
        (Verb::Confirm | Verb::Revert, S::Resizing) => refuse(LATER),
        (Verb::Confirm | Verb::Revert, _) => Verdict::Already(sizes::NOT_RESIZED.to_owned()),

        (Verb::Unpause | Verb::Resume | Verb::Pause | Verb::Suspend, S::Stopped) => refuse(START),
        (_, S::Suspended) => refuse(RESUME),
        (_, S::Suspending) => refuse("; ask again when that is done, or `eschedule resume` takes it back"),
        (_, S::Rescuing) => refuse("; ask again when that is done, or `eschedule unrescue` takes it back"),
        (_, S::Rescued | S::RescuedOff) => refuse(UNRESCUE),
        (_, S::Building | S::Stopping | S::Rebooting | S::Rebuilding | S::Unrescuing | S::Resizing) => {
            refuse(LATER)
        }
        (_, S::Resized) => refuse(VERIFY),
        (_, S::Error) => refuse(": `eschedule show` tells why"),
        // Judged before.
        (
            Verb::Remake(..)
            | Verb::Lock(_)
            | Verb::Hold(_)
            | Verb::Unlock
            | Verb::LetGo(_)
            | Verb::Rename(_)
            | Verb::Set(_),
            _,
        ) => already(),
    }
}

#[cfg(test)]
mod tests;

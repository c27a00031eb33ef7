//! What was done to an instance: what users asked for, written by those who asked, and what came of it, written by the
//! agent. Each is a short list, so that a whole history is two reads, and bounded whatever is done.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Rebuilt, Rescued, Resized, State};
use crate::{InstanceId, NodeId, RequestId, request_id::overlooked};

/// So many of either are kept; the oldest go.
pub const HISTORY_MAX: usize = 32;

/// The longest reason or detail, in characters: a list is not to be made of pages.
const TEXT_MAX: usize = 400;

/// What users asked of an instance, the newest last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actions {
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// At most [`HISTORY_MAX`].
    pub actions: Vec<Action>,
}

/// What a user asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// When. Of a rebuild, a rescue and a resize, which wish it is: [`super::Rebuild::wished_at`].
    pub at: Timestamp,
    /// When by the clock of who asked, where `at` is later: a wish is later than the last, by whosever clock that was. None of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_at: Option<Timestamp>,
    /// What.
    pub verb: ActionVerb,
    /// How, in words, where the verb does not say all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Who asked.
    #[serde(default)]
    pub user: String,
    /// The project for which.
    #[serde(default)]
    pub project: String,
    /// The node that was told.
    pub node: NodeId,
    /// The generation of what is wanted since.
    pub generation: u64,
    /// It was done by being written down, where the verb alone does not say so: no agent has to do anything.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_once: bool,
    /// Which volume was to be attached or detached; none of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<InstanceId>,
    /// Of the command by which; none of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "overlooked")]
    pub request_id: Option<RequestId>,
}

/// The words are those of OpenStack's Compute API, where that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActionVerb {
    /// To be made.
    Create,
    /// To run.
    Start,
    /// To end.
    Stop,
    /// To end and start again.
    Reboot,
    /// To be halted.
    Pause,
    /// To go on.
    Unpause,
    /// To be saved and ended.
    Suspend,
    /// To go on from what was saved.
    Resume,
    /// To have a new disk.
    Rebuild,
    /// To boot from another disk.
    Rescue,
    /// To boot from its own again.
    Unrescue,
    /// To be of another size.
    Resize,
    /// To stay as large as it was made.
    #[serde(rename = "confirmResize")]
    ConfirmResize,
    /// To be as large as it was before.
    #[serde(rename = "revertResize")]
    RevertResize,
    /// To be left as it is.
    Lock,
    /// To be changed again.
    Unlock,
    /// To be called otherwise.
    Rename,
    /// To have other labels, metadata or another restart policy.
    Set,
    /// To have a volume.
    #[serde(rename = "attach_volume")]
    AttachVolume,
    /// To have it no more.
    #[serde(rename = "detach_volume")]
    DetachVolume,
    /// To be copied, as its disks are at one moment.
    #[serde(rename = "createImage")]
    CreateImage,
    /// To be with another node.
    Migrate,
    /// To be asked for again as its node knew it, after etcd had lost that.
    Heal,
    /// To be destroyed.
    Delete,
    /// One that a later release has.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for ActionVerb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Create => "create",
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Reboot => "reboot",
            Self::Pause => "pause",
            Self::Unpause => "unpause",
            Self::Suspend => "suspend",
            Self::Resume => "resume",
            Self::Rebuild => "rebuild",
            Self::Rescue => "rescue",
            Self::Unrescue => "unrescue",
            Self::Resize => "resize",
            Self::ConfirmResize => "confirmResize",
            Self::RevertResize => "revertResize",
            Self::Lock => "lock",
            Self::Unlock => "unlock",
            Self::Rename => "rename",
            Self::Set => "set",
            Self::AttachVolume => "attach_volume",
            Self::DetachVolume => "detach_volume",
            Self::CreateImage => "createImage",
            Self::Migrate => "migrate",
            Self::Heal => "heal",
            Self::Delete => "delete",
            Self::Unknown => "unknown",
        })
    }
}

impl ActionVerb {
    /// Whether it is done by being written down, whatever is asked for by it: no agent has to do anything.
    pub fn is_done_at_once(self) -> bool {
        use ActionVerb::{ConfirmResize, CreateImage, Heal, Lock, Rename, Unlock};
        matches!(self, ConfirmResize | Lock | Unlock | Rename | CreateImage | Heal)
    }
}

/// What came of an instance on a node, the newest last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcomes {
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// The node, as in the key.
    pub node: NodeId,
    /// At most [`HISTORY_MAX`].
    pub outcomes: Vec<Outcome>,
}

/// How an instance came to stand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Since when.
    pub at: Timestamp,
    /// How; none: it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// Why, where the status says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The generation of the request that was acted upon last.
    pub generation: u64,
    /// The generation of the wish for power that was carried out last.
    #[serde(default)]
    pub power_generation: u64,
    /// What came of the last wish for a new disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuilt: Option<Rebuilt>,
    /// What came of the wish to boot it from another disk, for as long as that was in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescued: Option<Rescued>,
    /// What came of the last wish for another size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resized: Option<Resized>,
    /// How often in a row it was started again by its restart policy.
    #[serde(default, skip_serializing_if = "super::status::is_zero")]
    pub restarts: u32,
    /// The volumes that it had; none where they were being changed, or could not be, and of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<InstanceId>>,
}

impl Actions {
    /// One more.
    pub fn push(&mut self, mut action: Action) {
        action.detail = action.detail.map(cut);
        push(&mut self.actions, action);
    }
}

impl Outcomes {
    /// One more.
    pub fn push(&mut self, mut outcome: Outcome) {
        outcome.reason = outcome.reason.map(cut);
        push(&mut self.outcomes, outcome);
    }
}

fn cut(text: String) -> String {
    if text.chars().count() > TEXT_MAX { text.chars().take(TEXT_MAX).collect() } else { text }
}

fn push<T>(list: &mut Vec<T>, item: T) {
    list.push(item);
    list.drain(..list.len().saturating_sub(HISTORY_MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(second: i64, reason: &str) -> Outcome {
        Outcome {
            at: Timestamp::from_second(second).unwrap(),
            state: Some(State::Error),
            reason: Some(reason.to_owned()),
            generation: 1,
            power_generation: 0,
            rebuilt: None,
            rescued: None,
            resized: None,
            restarts: 0,
            volumes: None,
        }
    }

    #[test]
    fn the_oldest_go_and_long_reasons_are_cut() {
        let (instance, node) = (InstanceId::new(uuid::Uuid::nil()), NodeId::new(uuid::Uuid::nil()));
        let mut told = Outcomes { instance, node, outcomes: Vec::new() };
        for second in 0..40 {
            told.push(outcome(second, "x"));
        }
        let seconds: Vec<i64> = told.outcomes.iter().map(|outcome| outcome.at.as_second()).collect();
        assert_eq!(seconds, (8..40).collect::<Vec<_>>());
        told.push(outcome(40, &"ü".repeat(1000)));
        assert_eq!(told.outcomes[HISTORY_MAX - 1].reason.as_ref().unwrap().chars().count(), TEXT_MAX);
    }

    #[test]
    fn words_are_those_of_the_api_and_those_of_later_releases_are_read() {
        let text = |verb| serde_json::to_string(&verb).unwrap();
        assert_eq!(
            (text(ActionVerb::Unpause), text(ActionVerb::Delete)),
            ("\"unpause\"".into(), "\"delete\"".into())
        );
        assert_eq!(serde_json::from_str::<ActionVerb>("\"evacuate\"").unwrap(), ActionVerb::Unknown);
        for word in "create start stop reboot pause unpause suspend resume rebuild rescue unrescue resize confirmResize revertResize lock unlock rename set createImage heal delete unknown".split(' ') {
            let verb: ActionVerb = serde_json::from_str(&format!("\"{word}\"")).unwrap();
            assert_eq!((verb.to_string().as_str(), text(verb)), (word, format!("\"{word}\"")));
        }
        use ActionVerb::{AttachVolume, DetachVolume, Rebuild, Rename, Set};
        assert!(Rename.is_done_at_once() && ActionVerb::CreateImage.is_done_at_once());
        assert!(![Rebuild, Set, AttachVolume, DetachVolume].iter().any(|verb| verb.is_done_at_once()));
    }
}

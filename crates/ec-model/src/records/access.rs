//! Looking at a guest from elsewhere: who wishes it, and how its node's agent lets them in.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{RequestId, request_id::overlooked};

/// What there is to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessKind {
    /// Its serial console, to read and to type on.
    Console,
    /// What it printed there, and prints.
    Log,
    /// Its screen, keyboard and mouse, as VNC has them.
    Vnc,
    /// The file of a volume that nobody has and that stands on no image, as it lies in its node's pool.
    Disk,
    /// One that a later release has. The agent says that it does not know it.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Console => "console",
            Self::Log => "log",
            Self::Vnc => "screen",
            Self::Disk => "disk",
            Self::Unknown => "unknown",
        })
    }
}

/// The last wish to look at an instance. It changes nothing of what is wanted of the instance, so that it counts by
/// itself and is not in its [`crate::Instance`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AccessWish {
    /// What at.
    pub kind: AccessKind,
    /// Counts these wishes.
    pub generation: u64,
    /// Of the command that wishes it; none of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "overlooked")]
    pub request_id: Option<RequestId>,
}

/// What became of a wish to look at an instance: a ticket, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// What at.
    pub kind: AccessKind,
    /// Of which wish: [`AccessWish::generation`].
    pub generation: u64,
    /// What lets in whoever brings it to the agent's port ([`crate::Alive::url`]), once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<Ticket>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The ticket is good until then, and no longer than the agent that gave it lives.
    pub expires_at: Timestamp,
}

/// A word that lets in whoever has it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket(pub String);

impl fmt::Debug for Ticket {
    // A secret; logs must not have it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_to_look_at_has_a_word_for_messages() {
        let kinds =
            [AccessKind::Console, AccessKind::Log, AccessKind::Vnc, AccessKind::Disk, AccessKind::Unknown];
        assert_eq!(kinds.map(|kind| kind.to_string()), ["console", "log", "screen", "disk", "unknown"]);
    }

    #[test]
    fn a_ticket_is_in_no_log() {
        assert_eq!(format!("{:?}", Ticket("secret".to_owned())), "Ticket");
    }
}

//! What users want of an instance's power, and what follows a crash.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether and how a guest shall run. One that this release does not know makes its record unreadable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    /// Its processors run.
    #[default]
    Running,
    /// Its processors are halted, its memory is held.
    Paused,
    /// It does not run; its memory lies on the node's disk.
    Suspended,
    /// It does not run.
    Stopped,
}

/// A user's last wish for an instance's power. It is carried out once: what becomes of the guest afterwards, by itself
/// or by an operator's hand, is told and not undone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerWish {
    /// How it shall be.
    pub power: Power,
    /// The generation that brought the wish: [`crate::Instance::generation`] as it was then.
    pub generation: u64,
    /// How long a guest may take to end by itself once it is asked to, in seconds; then it is ended. 0: it is ended
    /// without being asked.
    #[serde(default = "grace")]
    pub grace_seconds: u32,
    /// A guest that runs is ended first: a reboot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anew: bool,
}

/// How long a guest may take to end by itself where nobody says otherwise, in seconds: what OpenStack's
/// `shutdown_timeout` is where nobody sets it.
pub const GRACE_SECONDS: u32 = 60;

fn grace() -> u32 {
    GRACE_SECONDS
}

impl Default for PowerWish {
    /// That of a new instance.
    fn default() -> Self {
        Self { power: Power::Running, generation: 1, grace_seconds: GRACE_SECONDS, anew: false }
    }
}

/// What follows when a guest ends without anybody's wish.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// Nothing: it is STOPPED.
    #[default]
    No,
    /// One that crashed is started again, some times in a row.
    OnFailure,
    /// It is started again, also where it powered itself off.
    Always,
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::No => "no",
            Self::OnFailure => "on-failure",
            Self::Always => "always",
        })
    }
}

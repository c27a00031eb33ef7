//! What users give names to, so that they need not say it each time.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A placement query that has a name. What an instance was made with is copied into its [`crate::Spec`], so that nothing
/// hangs on the flavor afterwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flavor {
    /// The name, in the letters that it was given in.
    pub name: String,
    /// What is asked of placement.
    pub query: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Instances of a project that shall be near to each other, or far. Its members are the instances that bear it
/// ([`crate::Instance::group`]); it is never changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The name, in the letters that it was given in.
    pub name: String,
    /// The project whose it is.
    pub project: String,
    /// Where its members may be.
    pub policy: Policy,
    /// The stack whose file it was made from; none where it was made by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Where the members of a group may be, in the words of OpenStack's Compute API. One that this release does not know makes
/// the group unreadable: nobody guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// All on one node.
    Affinity,
    /// Each on a node of its own.
    AntiAffinity,
    /// Where most of the others are, if there is room.
    SoftAffinity,
    /// Where fewest of the others are, of those that have room.
    SoftAntiAffinity,
}

impl Policy {
    /// Whether it only prefers nodes to others, and leaves none out.
    pub fn is_soft(self) -> bool {
        matches!(self, Self::SoftAffinity | Self::SoftAntiAffinity)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Affinity => "affinity",
            Self::AntiAffinity => "anti-affinity",
            Self::SoftAffinity => "soft-affinity",
            Self::SoftAntiAffinity => "soft-anti-affinity",
        })
    }
}

/// Public keys that have a name within a project. Like a [`Flavor`]'s query they are copied where they are used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keypair {
    /// The name, in the letters that it was given in.
    pub name: String,
    /// The project whose it is.
    pub project: String,
    /// Public keys in OpenSSH's form.
    pub keys: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
}

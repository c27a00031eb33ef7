//! A user's wish that an instance is booted from another disk, so that its own can be mended, and what came of it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::ImageRef;

/// An instance is to be booted from a disk made of this image, with its own beside it, for as long as this is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rescue {
    /// When it was wished: later than each wish for the same before, and so which of them it is.
    pub wished_at: Timestamp,
    /// What that disk is made from.
    pub image: ImageRef,
}

/// What came of the last of these wishes, for as long as that is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rescued {
    /// Which it was: [`Rescue::wished_at`].
    pub wished_at: Timestamp,
    /// Why it still boots from its own disk; nothing where it boots from the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

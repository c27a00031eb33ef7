//! A user's wish for a new disk, and what came of it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A user's last wish for a disk made anew from the image of the spec. It is carried out once, or fails once: its node
/// notes that on its own disk, so that an etcd that was put back has nothing made anew a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rebuild {
    /// When it was wished: later than each wish for the same before, and so which of them it is.
    pub wished_at: Timestamp,
}

/// What came of the last of these wishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilt {
    /// Which it was: [`Rebuild::wished_at`].
    pub wished_at: Timestamp,
    /// Why the disk is still the old one; nothing where it is new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

//! Images of the catalogue: what has a name and is booted, where its bytes are and what they must be.
//!
//! ```text
//!              a URL ──────────────────────▶ active ──▶ pending_delete ──▶ gone
//!  bytes ──▶ saving ──(all came, a disk)──▶    ▲ │
//!              └──(given up, or nobody is at it any more)──▶ pending_delete
//! ```
//!
//! The words are those of OpenStack's Image API. Who deletes marks the record first, then takes the bytes away and then
//! the record: whoever is killed in between leaves a record that says what is still to be done.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{ImageRef, Resources};
use crate::ImageId;

/// Who sends an image's bytes says at least this often that it is still at it.
const STALE: SignedDuration = SignedDuration::from_mins(10);
/// So far a clock may be ahead of another one.
const AHEAD: SignedDuration = SignedDuration::from_hours(24);

/// An image that has a name. What an instance is made from is copied into its [`crate::Spec`]: nothing refers to this afterwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The image, as in the key.
    pub id: ImageId,
    /// The name, in the letters that it was given in; unique within the project.
    pub name: String,
    /// The project whose it is.
    pub project: String,
    /// Who else may use it.
    #[serde(default)]
    pub visibility: Visibility,
    /// How it stands with its bytes.
    pub status: ImageStatus,
    /// Whether it can be deleted only once this is taken back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protected: bool,
    /// Where the bytes are.
    pub url: String,
    /// Whether they are an object of our image store, which goes with this record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stored: bool,
    /// By which a store that takes them in parts knows those that came so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<String>,
    /// Their SHA-256, in hex, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Their SHA-512, in hex, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha512: Option<String>,
    /// How many there are, where somebody counted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// How they are packed: `gzip`, `xz` or `zstd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// What disk is in them, where somebody looked: `qcow2` or `raw`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_format: Option<String>,
    /// The size of that disk, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_size: Option<u64>,
    /// The least `DISK_GB` of an instance made from it.
    #[serde(default)]
    pub min_disk: u64,
    /// The least `MEMORY_MB` of an instance made from it.
    #[serde(default)]
    pub min_ram: u64,
    /// What else is said of it, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub properties: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was changed last; while its bytes are on their way, when somebody was last at it.
    pub updated_at: Timestamp,
}

/// Who may use an image. A word that this release does not know makes the image unreadable: nobody guesses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Visibility {
    /// Its project.
    #[default]
    Private,
    /// Everybody.
    Public,
}

/// How it stands with an image's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageStatus {
    /// On their way.
    Saving,
    /// It can be used.
    Active,
    /// It is being taken away.
    PendingDelete,
    /// One that a later release has.
    #[serde(other)]
    Unknown,
}

impl ImageStatus {
    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Saving => "saving",
            Self::Active => "active",
            Self::PendingDelete => "pending_delete",
            Self::Unknown => "unknown",
        }
    }

    /// Whether an image that stands so bears its name.
    pub fn has_name(self) -> bool {
        self != Self::PendingDelete
    }
}

impl Image {
    /// Whether a project may use it.
    pub fn is_seen_by(&self, project: &str) -> bool {
        self.project == project || self.visibility == Visibility::Public
    }

    /// Whether nobody is at it any more who would bring it to its end: whoever comes across it takes it away.
    pub fn is_left_over(&self, now: Timestamp) -> bool {
        match self.status {
            ImageStatus::Saving => !self.is_tended(now),
            ImageStatus::PendingDelete => !self.may_be_sent(now),
            ImageStatus::Active | ImageStatus::Unknown => false,
        }
    }

    /// Whether a command may still be sending its bytes, also where somebody deletes it meanwhile: what comes late is found by its record.
    pub fn may_be_sent(&self, now: Timestamp) -> bool {
        self.stored && self.size.is_none() && self.is_tended(now)
    }

    /// Whether somebody said lately that they are at it. Who said so later than now has another clock, which may be wrong by some; of
    /// one that is wrong by more nobody waits for the time that it showed.
    fn is_tended(&self, now: Timestamp) -> bool {
        let age = now.duration_since(self.updated_at);
        age < STALE && age > -AHEAD
    }

    /// What an instance of this size is made from.
    ///
    /// # Errors
    /// Why none can be.
    pub fn usable(&self, resources: &Resources) -> Result<ImageRef, String> {
        if self.status != ImageStatus::Active {
            let later = match self.status {
                ImageStatus::Saving => ": its bytes are still on their way",
                ImageStatus::PendingDelete => ": it is being deleted",
                _ => ": a later release wrote that",
            };
            return Err(format!("is {}{later}", self.status.name()));
        }
        self.fits(resources)?;
        Ok(ImageRef {
            url: self.url.clone(),
            sha256: self.sha256.clone(),
            sha512: self.sha512.clone(),
            id: Some(self.id),
            name: Some(self.name.clone()),
        })
    }

    /// Whether what is made from it may be of this size.
    ///
    /// # Errors
    /// What it needs.
    pub fn fits(&self, resources: &Resources) -> Result<(), String> {
        // Its disk has to have room, whatever is said of it.
        let disk = self.virtual_size.map_or(0, |bytes| bytes.div_ceil(1 << 30)).max(self.min_disk);
        for (class, least) in [("DISK_GB", disk), ("MEMORY_MB", self.min_ram)] {
            // What is not asked for at all is not bounded by the claim.
            if let Some(asked) = resources.get(class).filter(|asked| **asked < least) {
                return Err(format!("needs {class}:{least}, and {class}:{asked} is asked for"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        Image {
            id: ImageId::new(uuid::Uuid::from_u128(1)),
            name: "Debian".to_owned(),
            project: "p".to_owned(),
            visibility: Visibility::Private,
            status: ImageStatus::Active,
            protected: false,
            url: "https://host/x".to_owned(),
            stored: false,
            upload: None,
            sha256: Some("a".repeat(64)),
            sha512: None,
            size: None,
            compression: None,
            disk_format: None,
            virtual_size: None,
            min_disk: 5,
            min_ram: 512,
            properties: BTreeMap::new(),
            created_at: Timestamp::UNIX_EPOCH,
            updated_at: Timestamp::UNIX_EPOCH,
        }
    }

    fn asked(disk: Option<u64>, memory: u64) -> Resources {
        let disk = disk.map(|disk| ("DISK_GB".to_owned(), disk));
        disk.into_iter().chain([("MEMORY_MB".to_owned(), memory)]).collect()
    }

    #[test]
    fn an_image_is_used_by_who_asks_for_enough_and_refused_to_others_with_what_is_lacking() {
        let used = image().usable(&asked(Some(5), 512)).unwrap();
        assert_eq!((used.url.as_str(), used.name.as_deref()), ("https://host/x", Some("Debian")));
        assert_eq!((used.sha256.unwrap().len(), used.id), (64, Some(image().id)));
        assert!(image().usable(&asked(None, 513)).is_ok());
        let error = image().usable(&asked(Some(4), 512)).unwrap_err();
        assert_eq!(error, "needs DISK_GB:5, and DISK_GB:4 is asked for");
        let error = image().usable(&asked(Some(9), 511)).unwrap_err();
        assert_eq!(error, "needs MEMORY_MB:512, and MEMORY_MB:511 is asked for");
        // As large as its disk is, too.
        for (bytes, least) in [(5 << 30, 5), ((5 << 30) + 1, 6), (1, 5)] {
            let image = Image { virtual_size: Some(bytes), ..image() };
            assert!(image.usable(&asked(Some(least), 512)).is_ok(), "{bytes}");
            let error = image.usable(&asked(Some(least - 1), 512)).unwrap_err();
            assert_eq!(error, format!("needs DISK_GB:{least}, and DISK_GB:{} is asked for", least - 1));
        }
    }

    #[test]
    fn only_an_active_image_is_used_and_only_one_that_goes_has_no_name() {
        for (status, why) in [
            (ImageStatus::Saving, "is saving: its bytes are still on their way"),
            (ImageStatus::PendingDelete, "is pending_delete: it is being deleted"),
            (ImageStatus::Unknown, "is unknown: a later release wrote that"),
        ] {
            let image = Image { status, ..image() };
            assert_eq!(image.usable(&asked(None, 512)).unwrap_err(), why);
            assert_eq!(status.has_name(), status != ImageStatus::PendingDelete);
        }
        assert!(ImageStatus::Active.has_name());
        let later: ImageStatus = serde_json::from_str("\"deactivated\"").unwrap();
        assert_eq!(later, ImageStatus::Unknown);
        for status in [ImageStatus::Saving, ImageStatus::Active, ImageStatus::PendingDelete] {
            assert_eq!(serde_json::to_value(status).unwrap(), status.name());
        }
        assert!(serde_json::from_str::<Visibility>("\"shared\"").is_err(), "nobody guesses who may");
    }

    #[test]
    fn a_project_sees_its_own_images_and_public_ones() {
        let public = Image { visibility: Visibility::Public, ..image() };
        for (image, project, seen) in
            [(image(), "p", true), (image(), "q", false), (public.clone(), "q", true), (public, "p", true)]
        {
            assert_eq!(image.is_seen_by(project), seen, "{project}");
        }
    }

    #[test]
    fn bytes_that_nobody_sends_any_more_and_an_end_that_broke_off_are_left_over() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        for (status, seconds, left) in [
            (ImageStatus::Saving, 599, false),
            (ImageStatus::Saving, 600, true),
            (ImageStatus::Saving, -86_399, false),
            (ImageStatus::Saving, -86_400, true),
            (ImageStatus::PendingDelete, 0, true),
            (ImageStatus::Active, 1_000_000, false),
            (ImageStatus::Unknown, 1_000_000, false),
        ] {
            let image = Image { status, ..image() };
            assert_eq!(image.is_left_over(at(seconds)), left, "{status:?} after {seconds} s");
        }
        // It was deleted while its bytes were on their way.
        for (stored, size, seconds, left) in [
            (true, None, 599, false),
            (true, None, 600, true),
            (true, None, -86_400, true),
            (true, Some(1), 0, true),
            (false, None, 0, true),
        ] {
            let image = Image { status: ImageStatus::PendingDelete, stored, size, ..image() };
            assert_eq!(image.is_left_over(at(seconds)), left, "{stored} {size:?} after {seconds} s");
        }
    }
}

//! A user's wish for a new disk, and what came of it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::ImageRef;

/// A user's last wish for a disk made anew from the image of the spec. It is carried out once, or fails once: its node
/// notes that on its own disk, so that an etcd that was put back has nothing made anew a second time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuild {
    /// When it was wished: later than each wish for the same before, and so which of them it is.
    pub wished_at: Timestamp,
    /// What the disk was made from when it was wished. Unknown where an older release wished it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<ImageRef>,
}

impl Rebuild {
    /// What the disk is made from, of which `wanted` was wished last: that, unless this wish is not carried out, or failed.
    pub fn disk<'a>(wish: Option<&'a Self>, wanted: &'a ImageRef, came: Option<&Rebuilt>) -> &'a ImageRef {
        let is_done =
            |wish: &Self| came.is_some_and(|came| came.wished_at >= wish.wished_at && came.failed.is_none());
        match wish {
            Some(wish) if !is_done(wish) => wish.before.as_ref().unwrap_or(wanted),
            _ => wanted,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_of_the_image_that_it_was_made_from_and_not_of_one_that_failed() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let image = |name: &str| ImageRef::at(format!("file:///{name}"));
        let wish = |before: Option<&str>| Rebuild { wished_at: at(2), before: before.map(image) };
        let came = |second, failed: bool| {
            Some(Rebuilt { wished_at: at(second), failed: failed.then(|| "no such image".to_owned()) })
        };
        for (wish, came, disk) in [
            (None, None, "wanted"),
            (Some(wish(Some("old"))), None, "old"),
            (Some(wish(Some("old"))), came(1, false), "old"),
            (Some(wish(Some("old"))), came(2, true), "old"),
            (Some(wish(Some("old"))), came(2, false), "wanted"),
            (Some(wish(Some("old"))), came(3, false), "wanted"),
            (Some(wish(None)), came(2, true), "wanted"),
        ] {
            let is = Rebuild::disk(wish.as_ref(), &image("wanted"), came.as_ref()).clone();
            assert_eq!(is, image(disk), "{wish:?}, {came:?}");
        }
    }
}

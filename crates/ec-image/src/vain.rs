//! What was fetched in vain: bytes without the digest that is demanded stay without it, and who tries again, as for a guest that
//! cannot be started without them, need not wait for gigabytes each time to learn so.
//!
//! Not for ever: what came may have been changed on the way, or by one of several mirrors that say the same of what they have, and
//! the origin has been right all along.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{ImageError, source::Wanted};

/// So many are remembered, the last ones: each is of an image that is demanded by a wrong digest, or that was replaced.
const MOST: usize = 64;

/// For so long: four times an hour all of it comes, where twice a minute somebody asks.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// What an origin says that its answer is: the validator that stands for exactly these bytes, and how many there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) validator: String,
    pub(crate) size: Option<u64>,
}

/// One that was not what was wanted.
#[derive(Debug)]
struct Try {
    wanted: Wanted,
    offer: Offer,
    error: ImageError,
    at: Instant,
}

/// Kept while the agent runs, and no longer than [`KEPT`].
#[derive(Debug, Default)]
pub(crate) struct Vain(Mutex<Vec<Try>>);

impl Vain {
    /// Why this offer is not what is wanted, where it was tried not long ago.
    pub(crate) fn known(&self, wanted: &Wanted, offer: &Offer, now: Instant) -> Option<ImageError> {
        let tried = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |was: &&Try| {
            was.wanted.is_same(wanted) && was.offer == *offer && now.duration_since(was.at) < KEPT
        };
        let same = tried.iter().find(is_same)?;
        Some(ImageError::InVain { why: Box::new(same.error.clone()), kept: KEPT })
    }

    /// Remembers what came of it, where that is the fault of these bytes.
    pub(crate) fn note(&self, wanted: &Wanted, offer: Offer, error: &ImageError, now: Instant) {
        if !matches!(error, ImageError::Checksum { .. }) {
            return;
        }
        let mut tried = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tried.retain(|was| !was.wanted.is_same(wanted));
        let surplus = (tried.len() + 1).saturating_sub(MOST);
        tried.drain(..surplus);
        tried.push(Try { wanted: wanted.clone(), offer, error: error.clone(), at: now });
    }
}

#[cfg(test)]
mod tests {
    use ec_model::ImageRef;

    use super::*;

    #[test]
    fn the_last_are_remembered_for_a_while_and_only_what_the_bytes_are_to_blame_for() {
        let vain = Vain::default();
        let wanted = |number: usize| {
            let sha256 = Some(format!("{number:064}"));
            Wanted::parse(&ImageRef { sha256, ..ImageRef::at("https://host/disk") }).unwrap()
        };
        let offer = || Offer { validator: "\"one\"".to_owned(), size: Some(1) };
        let error = ImageError::Checksum {
            url: "https://host/disk".to_owned(),
            algorithm: "SHA-256",
            expected: "b".to_owned(),
            actual: "a".to_owned(),
        };
        let now = Instant::now();
        let known = |number, offer: &Offer, now| vain.known(&wanted(number), offer, now);
        vain.note(&wanted(0), offer(), &ImageError::Interrupted, now);
        assert!(known(0, &offer(), now).is_none());
        for number in 0..=MOST {
            vain.note(&wanted(number), offer(), &error, now);
        }
        assert!(known(0, &offer(), now).is_none());
        assert!(known(1, &Offer { size: None, ..offer() }, now).is_none());
        let last = now + KEPT - Duration::from_secs(1);
        assert_eq!(
            known(1, &offer(), last).unwrap().to_string(),
            "the image https://host/disk has SHA-256 a, b was demanded: it came so not long ago, and what its server calls the same \
             is fetched again 15 minutes after that"
        );
        assert!(known(1, &offer(), now + KEPT).is_none());
        // Fetched once more, and as before.
        vain.note(&wanted(1), offer(), &error, now + KEPT);
        assert!(known(1, &offer(), last + KEPT).is_some());
    }
}

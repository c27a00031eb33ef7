//! What was fetched in vain: bytes without the digest that is demanded stay without it, and who tries again, as for a guest that
//! cannot be started without them, need not wait for gigabytes each time to learn so.

use std::sync::{Mutex, PoisonError};

use crate::{ImageError, source::Wanted};

/// So many are remembered, the last ones: each is of an image that is demanded by a wrong digest, or that was replaced.
const MOST: usize = 64;

/// What an origin says that its answer is: the validator that stands for exactly these bytes, and how many there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) validator: String,
    pub(crate) size: Option<u64>,
}

/// Kept as long as the agent runs.
#[derive(Debug, Default)]
pub(crate) struct Vain(Mutex<Vec<(Wanted, Offer, ImageError)>>);

impl Vain {
    /// Why this offer is not what is wanted, where it was tried before.
    pub(crate) fn known(&self, wanted: &Wanted, offer: &Offer) -> Option<ImageError> {
        let tried = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = tried.iter().find(|(was, gave, _)| was.is_same(wanted) && gave == offer);
        same.map(|(_, _, error)| error.clone())
    }

    /// Remembers what came of it, where that is the fault of these bytes.
    pub(crate) fn note(&self, wanted: &Wanted, offer: Offer, error: &ImageError) {
        if !matches!(error, ImageError::Checksum { .. }) {
            return;
        }
        let mut tried = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tried.retain(|(was, ..)| !was.is_same(wanted));
        let surplus = (tried.len() + 1).saturating_sub(MOST);
        tried.drain(..surplus);
        tried.push((wanted.clone(), offer, error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use ec_model::ImageRef;

    use super::*;

    #[test]
    fn the_last_are_remembered_and_only_what_the_bytes_are_to_blame_for() {
        let vain = Vain::default();
        let wanted = |number: usize| {
            let sha256 = Some(format!("{number:064}"));
            Wanted::parse(&ImageRef { sha256, ..ImageRef::at("https://host/disk") }).unwrap()
        };
        let offer = || Offer { validator: "\"one\"".to_owned(), size: Some(1) };
        let error = ImageError::Checksum {
            url: "https://host/disk".to_owned(),
            algorithm: "SHA-256",
            expected: String::new(),
            actual: String::new(),
        };
        vain.note(&wanted(0), offer(), &ImageError::Interrupted);
        assert!(vain.known(&wanted(0), &offer()).is_none());
        for number in 0..=MOST {
            vain.note(&wanted(number), offer(), &error);
        }
        assert!(vain.known(&wanted(0), &offer()).is_none());
        assert!(vain.known(&wanted(1), &offer()).is_some());
        assert!(vain.known(&wanted(1), &Offer { size: None, ..offer() }).is_none());
    }
}

//! Content on its way into the cache: written, hashed and checked while it comes.
//!
//! A landing lives in a blocking thread. Dropping it at any moment removes what it wrote.

use std::{io::Write, sync::Arc};

use ec_model::{BaseImage, Progress};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::{
    HEADER_LEN, ImageError, InspectError,
    flight::State,
    index::{Entry, Index, Validators, hex},
    inspect, inspect_file,
    shelf::{Landed, Reservation, Shelf, Temporary},
    source::Wanted,
};

/// Progress is told every so many bytes; each telling wakes everyone who waits.
const PROGRESS_STEP: u64 = 1 << 20;

/// Where content lands.
#[derive(Clone)]
pub(crate) struct Ground {
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) index: Arc<Index>,
}

impl Ground {
    /// What the URL gave last, where the cache still has it.
    pub(crate) fn known(&self, wanted: &Wanted) -> Option<(Entry, Landed)> {
        let entry = self.index.get(wanted.source.url())?;
        if wanted.digest.as_ref().is_some_and(|digest| *digest != entry.digest) {
            return None;
        }
        if !self.shelf.has(&entry.digest, entry.size) {
            return None;
        }
        let landed = self.shelf.find(&entry.digest)?;
        Some((entry, landed))
    }
}

pub(crate) struct Landing {
    ground: Ground,
    wanted: Wanted,
    state: watch::Sender<State>,
    room: Reservation,
    temporary: Temporary,
    hash: Sha256,
    header: Vec<u8>,
    written: u64,
    told: u64,
    expected: Option<u64>,
}

impl Landing {
    /// Takes room and a file for content of `expected` bytes, where that is known.
    pub(crate) fn begin(
        ground: Ground,
        wanted: Wanted,
        state: watch::Sender<State>,
        expected: Option<u64>,
    ) -> Result<Self, ImageError> {
        let mut room = ground.shelf.reservation();
        room.cover(expected.unwrap_or(1), expected.is_some())?;
        let temporary = ground.shelf.temporary()?;
        let landing = Self {
            ground,
            wanted,
            state,
            room,
            temporary,
            hash: Sha256::new(),
            header: Vec::new(),
            written: 0,
            told: 0,
            expected,
        };
        landing.tell();
        Ok(landing)
    }

    /// How many bytes have come.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// How many bytes are to come in all, where that is known.
    pub(crate) fn expected(&self) -> Option<u64> {
        self.expected
    }

    /// Takes the next bytes. What the beginning gives away is refused at once, not when all has come.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        self.written += bytes.len() as u64;
        self.room.cover(self.written, false)?;
        self.temporary.file.write_all(bytes).map_err(ImageError::cache("write", &self.temporary.path))?;
        self.hash.update(bytes);
        if self.header.len() < HEADER_LEN {
            let missing = HEADER_LEN - self.header.len();
            self.header.extend(&bytes[..bytes.len().min(missing)]);
            if self.header.len() == HEADER_LEN {
                let inspected = inspect(&self.header, self.expected)
                    .map_err(|refusal| ImageError::Refused { url: self.wanted.label.clone(), refusal })?;
                self.state.send_modify(|state| state.virtual_size = inspected.virtual_size);
            }
        }
        if self.written - self.told >= PROGRESS_STEP {
            self.told = self.written;
            self.tell();
        }
        Ok(())
    }

    /// All has come: checks the whole, gives it its place, remembers what the URL gave.
    pub(crate) fn finish(mut self, validators: Validators) -> Result<Landed, ImageError> {
        self.tell();
        let url = || self.wanted.label.clone();
        if let Some(expected) = self.expected
            && expected != self.written
        {
            return Err(ImageError::Truncated {
                url: url(),
                received: self.written,
                expected: Some(expected),
            });
        }
        let path = &self.temporary.path;
        let inspected = inspect_file(&mut self.temporary.file).map_err(|error| match error {
            InspectError::Refused(refusal) => ImageError::Refused { url: url(), refusal },
            InspectError::Read(source) => ImageError::cache("read", path)(source),
        })?;
        let digest = hex(&self.hash.finalize());
        if let Some(expected) = self.wanted.digest.as_ref().filter(|expected| **expected != digest) {
            return Err(ImageError::Checksum { url: url(), expected: expected.clone(), actual: digest });
        }
        let entry = Entry::new(url(), digest.clone(), self.written, validators);
        let base = BaseImage {
            path: path.clone(),
            format: inspected.format,
            virtual_size: inspected.virtual_size.unwrap_or(self.written),
            digest,
        };
        let landed = self.ground.shelf.place(self.temporary, base)?;
        drop(self.room);
        self.ground.index.put(self.wanted.source.url(), &entry)?;
        self.ground.index.prune(|entry| self.ground.shelf.has(&entry.digest, entry.size))?;
        tracing::info!(
            url = self.wanted.label,
            digest = landed.base.digest,
            bytes = self.written,
            format = landed.base.format.name(),
            "image is in the cache"
        );
        Ok(landed)
    }

    fn tell(&self) {
        let progress = Progress { step: "image".to_owned(), done: self.written, total: self.expected };
        self.state.send_modify(|state| state.progress = Some(progress));
    }
}

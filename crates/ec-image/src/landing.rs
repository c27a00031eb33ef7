//! Content on its way into the cache: unpacked, written, hashed and checked while it comes.
//!
//! A landing lives in a blocking thread. Dropping it at any moment removes what it wrote.
//!
//! ```text
//!   bytes as published ──▶ digests that were demanded
//!         └──▶ Unpacker ──▶ Disk ──▶ the temporary file, its header, the digest by which the base is called
//! ```

use std::{
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    sync::Arc,
};

use bytes::Bytes;
use ec_model::{BaseImage, DiskFormat, Progress};
use sha2::{Digest, Sha256, Sha512};
use tokio::sync::{mpsc, watch};

use crate::{
    HEADER_LEN, ImageError, InspectError,
    flight::State,
    index::{Entry, Index, Validators, hex},
    inspect, inspect_file,
    shelf::{Landed, Reservation, Shelf, Temporary},
    source::Wanted,
    unpack::{Sink, Unpacked, Unpacker},
};

/// Progress is told every so many bytes; each telling wakes everyone who waits.
const PROGRESS_STEP: u64 = 1 << 20;

/// What a file system need not keep.
static EMPTY: [u8; 4096] = [0; 4096];

/// Where content lands.
#[derive(Clone)]
pub(crate) struct Ground {
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) index: Arc<Index>,
}

impl Ground {
    /// What the URL gave last, or before where digests are demanded, if the cache still has it and it had all of these.
    pub(crate) fn known(&self, wanted: &Wanted) -> Option<(Entry, Landed)> {
        let (sha256, sha512) = (wanted.sha256.as_deref(), wanted.sha512.as_deref());
        // Whoever demands none wants what is there now.
        let count = if sha256.or(sha512).is_some() { usize::MAX } else { 1 };
        let mut given = self.index.get(wanted.source.url())?.given().into_iter().take(count);
        let is_there = |entry: &Entry| entry.has(sha256, sha512) && self.shelf.has(&entry.digest, entry.size);
        let entry = given.find(is_there)?;
        let landed = self.shelf.find(&entry.digest)?;
        Some((entry, landed))
    }
}

/// What goes from an origin to the thread that writes. Its end without a `End` means: it broke off.
pub(crate) enum Piece {
    Chunk(Bytes),
    End,
}

/// How a writer ended that did not fail.
pub(crate) enum Written {
    Whole(Landed),
    BrokenOff(Box<Landing>),
}

/// Takes pieces until the last one. Where they end without one, what came is given back.
pub(crate) fn land(
    mut landing: Landing,
    validators: Validators,
    mut inbox: mpsc::Receiver<Piece>,
) -> Result<Written, ImageError> {
    loop {
        match inbox.blocking_recv() {
            Some(Piece::Chunk(bytes)) => landing.push(&bytes)?,
            Some(Piece::End) => return landing.finish(validators).map(Written::Whole),
            None => return Ok(Written::BrokenOff(Box::new(landing))),
        }
    }
}

pub(crate) struct Landing {
    ground: Ground,
    wanted: Wanted,
    state: watch::Sender<State>,
    unpacker: Unpacker<Disk>,
    /// Of the bytes as they came, where one is demanded.
    sha512: Option<Sha512>,
    received: u64,
    told: u64,
    expected: Option<u64>,
}

/// The disk itself, as it comes out of what it was packed in.
struct Disk {
    label: String,
    state: watch::Sender<State>,
    room: Reservation,
    temporary: Temporary,
    hash: Sha256,
    header: Vec<u8>,
    written: u64,
    told: u64,
    expected: Option<u64>,
    format: Option<DiskFormat>,
    /// Why no more is taken.
    failed: Option<ImageError>,
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
        let disk = Disk {
            label: wanted.label.clone(),
            state: state.clone(),
            room,
            temporary,
            hash: Sha256::new(),
            header: Vec::new(),
            written: 0,
            told: 0,
            expected,
            format: None,
            failed: None,
        };
        let sha512 = wanted.sha512.is_some().then(Sha512::new);
        let unpacker = Unpacker::new(disk);
        let landing = Self { ground, wanted, state, unpacker, sha512, received: 0, told: 0, expected };
        landing.tell();
        Ok(landing)
    }

    /// How many bytes have come.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// How many bytes are to come in all, where that is known.
    pub(crate) fn expected(&self) -> Option<u64> {
        self.expected
    }

    /// Takes the next bytes. What the beginning gives away is refused at once, not when all has come.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        self.received += bytes.len() as u64;
        if let Some(hash) = &mut self.sha512 {
            hash.update(bytes);
        }
        if let Err(error) = self.unpacker.write(bytes) {
            let why = self.unpacker.sink().and_then(|disk| disk.failed.take());
            return Err(why.unwrap_or_else(|| self.damaged(error)));
        }
        if self.received - self.told >= PROGRESS_STEP {
            self.told = self.received;
            self.tell();
        }
        Ok(())
    }

    /// All has come: checks the whole, gives it its place, remembers what the URL gave.
    pub(crate) fn finish(mut self, validators: Validators) -> Result<Landed, ImageError> {
        self.tell();
        let label = self.wanted.label.clone();
        let url = || label.clone();
        if let Some(expected) = self.expected
            && expected != self.received
        {
            return Err(ImageError::Truncated {
                url: url(),
                received: self.received,
                expected: Some(expected),
            });
        }
        let sha512 = self.sha512.take().map(|hash| hex(&hash.finalize()));
        let packing = self.unpacker.packing().map_or("nothing", |packing| packing.name());
        let Unpacked { sink: mut disk, packed } = match self.unpacker.finish() {
            Ok(unpacked) => unpacked,
            Err(error) => return Err(damaged(&label, packing, error)),
        };
        let path = &disk.temporary.path;
        // What it ends with may have been left out.
        disk.temporary.file.set_len(disk.written).map_err(ImageError::cache("write", path))?;
        let inspected = inspect_file(&mut disk.temporary.file).map_err(|error| match error {
            InspectError::Refused(refusal) => ImageError::Refused { url: url(), refusal },
            InspectError::Read(source) => ImageError::cache("read", path)(source),
        })?;
        let digest = hex(&disk.hash.finalize());
        let published = packed.map_or_else(|| digest.clone(), |(_, digest)| digest);
        let demands = [
            ("SHA-256", &self.wanted.sha256, Some(&published)),
            ("SHA-512", &self.wanted.sha512, sha512.as_ref()),
        ];
        for (algorithm, expected, actual) in demands {
            if let (Some(expected), Some(actual)) = (expected, actual)
                && expected != actual
            {
                let (expected, actual) = (expected.clone(), actual.clone());
                return Err(ImageError::Checksum { url: url(), algorithm, expected, actual });
            }
        }
        let entry = Entry::new(url(), digest.clone(), disk.written, validators).published(published, sha512);
        let base = BaseImage {
            path: path.clone(),
            format: inspected.format,
            virtual_size: inspected.virtual_size.unwrap_or(disk.written),
            digest,
        };
        let landed = self.ground.shelf.place(disk.temporary, base)?;
        drop(disk.room);
        let index = &self.ground.index;
        let remembered = index.put(self.wanted.source.url(), &entry);
        // The image is there: without an entry it is fetched once more the next time, and that is all.
        if let Err(error) =
            remembered.and_then(|()| index.prune(|entry| self.ground.shelf.has(&entry.digest, entry.size)))
        {
            tracing::warn!(url = self.wanted.label, %error, "the image is in the cache, but its URL was not remembered");
        }
        tracing::info!(
            url = self.wanted.label,
            digest = landed.base.digest,
            bytes = disk.written,
            received = self.received,
            format = landed.base.format.name(),
            "image is in the cache"
        );
        Ok(landed)
    }

    fn damaged(&self, error: io::Error) -> ImageError {
        let packing = self.unpacker.packing().map_or("nothing", |packing| packing.name());
        damaged(&self.wanted.label, packing, error)
    }

    /// Tells how far it is.
    pub(crate) fn tell(&self) {
        let progress = Progress { step: "image".to_owned(), done: self.received, total: self.expected };
        self.state.send_modify(|state| state.progress = Some(progress));
    }
}

fn damaged(url: &str, packing: &'static str, error: io::Error) -> ImageError {
    ImageError::Unpacking { url: url.to_owned(), packing, source: Arc::new(error) }
}

/// Writes bytes that come to lie at `at`, and leaves out what of a block is zeroes: most of a raw disk is free space. Answers how many
/// it did not leave out.
fn write_with_holes(file: &mut File, at: u64, mut bytes: &[u8]) -> io::Result<u64> {
    let mut written = 0;
    let block = EMPTY.len();
    let to_block = usize::try_from(at.next_multiple_of(block as u64) - at).map_err(io::Error::other)?;
    let (begun, blocks) = bytes.split_at(to_block.min(bytes.len()));
    let pieces: Vec<&[u8]> =
        std::iter::once(begun).filter(|begun| !begun.is_empty()).chain(blocks.chunks(block)).collect();
    let is_empty = |piece: &[u8]| EMPTY.starts_with(piece);
    for alike in pieces.chunk_by(|one, next| is_empty(one) == is_empty(next)) {
        let (run, behind) = bytes.split_at(alike.iter().map(|piece| piece.len()).sum());
        if is_empty(alike[0]) {
            file.seek(SeekFrom::Current(i64::try_from(run.len()).map_err(io::Error::other)?))?;
        } else {
            file.write_all(run)?;
            written += run.len() as u64;
        }
        bytes = behind;
    }
    Ok(written)
}

impl Disk {
    fn take(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        // A little that comes may be much that comes out: whoever let go meanwhile does not wait for the end of it.
        if self.state.is_closed() {
            return Err(ImageError::Interrupted);
        }
        let at = self.written;
        self.written += bytes.len() as u64;
        self.room.cover(self.written, false)?;
        self.room.write(bytes.len() as u64)?;
        let written = write_with_holes(&mut self.temporary.file, at, bytes)
            .map_err(ImageError::cache("write", &self.temporary.path))?;
        self.room.wrote(written);
        self.hash.update(bytes);
        if self.header.len() < HEADER_LEN {
            let missing = HEADER_LEN - self.header.len();
            self.header.extend(&bytes[..bytes.len().min(missing)]);
            if self.header.len() == HEADER_LEN {
                let inspected = inspect(&self.header, self.expected)
                    .map_err(|refusal| ImageError::Refused { url: self.label.clone(), refusal })?;
                self.state.send_modify(|state| state.virtual_size = inspected.virtual_size);
                self.format = Some(inspected.format);
            }
        }
        // How large a raw disk is that comes packed nobody knows before its end; who wanted less need not wait for that.
        if self.format == Some(DiskFormat::Raw)
            && self.expected.is_none()
            && self.written - self.told >= PROGRESS_STEP
        {
            self.told = self.written;
            self.state.send_modify(|state| state.at_least = self.written);
        }
        Ok(())
    }
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.take(bytes) {
            Ok(()) => Ok(bytes.len()),
            Err(error) => {
                self.failed = Some(error);
                Err(io::Error::other("the cache takes no more"))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for Disk {
    fn was_packed(&mut self) {
        self.expected = None;
    }
}

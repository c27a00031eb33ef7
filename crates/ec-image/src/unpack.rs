//! What comes packed, unpacked while it comes: told by its first bytes, never by a name.
//!
//! Only as much memory is taken as each decoder needs for its window, which is bounded whatever a header asks for. How much
//! comes out is bounded by whoever takes it: a [`Sink`] that fails ends it at once.

use std::io::{self, Write};

use flate2::write::MultiGzDecoder;
use liblzma::{
    stream::{CONCATENATED, Stream},
    write::XzDecoder,
};
use sha2::{Digest, Sha256};
use zstd::stream::{raw, zio};

use crate::index::hex;

/// The longest beginning by which a packing is told.
const MAGIC_LEN: usize = 6;

/// What `xz -9` needs, and as much again.
const XZ_MEMORY_MAX: u64 = 128 << 20;

/// How content is packed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// RFC 1952, one member or several.
    Gzip,
    /// The .xz format, one stream or several.
    Xz,
    /// RFC 8878, one frame or several.
    Zstd,
}

impl Packing {
    const ALL: [(Self, &'static [u8]); 3] =
        [(Self::Gzip, b"\x1f\x8b"), (Self::Xz, b"\xfd7zXZ\0"), (Self::Zstd, b"\x28\xb5\x2f\xfd")];
    /// How a frame of zstd goes on that has nothing of the content, behind a byte from 0x50 to 0x5f (RFC 8878, 3.1.2). Some
    /// that pack in many parts begin with one.
    const SKIPPED: &'static [u8] = b"\x2a\x4d\x18";

    /// As it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        }
    }

    /// Whether what is called so is unpacked here.
    pub fn is_known(name: &str) -> bool {
        Self::ALL.iter().any(|(packing, _)| packing.name() == name)
    }

    /// The packing of what begins so; none where it is as it is.
    pub(crate) fn of(beginning: &[u8]) -> Option<Self> {
        if matches!(beginning, [0x50..=0x5f, behind @ ..] if behind.starts_with(Self::SKIPPED)) {
            return Some(Self::Zstd);
        }
        Self::ALL.into_iter().find(|(_, magic)| beginning.starts_with(magic)).map(|(packing, _)| packing)
    }
}

/// Where what was unpacked goes.
pub(crate) trait Sink: Write {
    /// What comes was packed: told before the first byte.
    fn was_packed(&mut self) {}
}

/// Takes bytes as they come, and gives on what was packed in them.
pub(crate) struct Unpacker<S: Sink> {
    beginning: Vec<u8>,
    way: Way<S>,
    /// Of what came, where that is not what is given on.
    packed: Option<(Packing, Sha256)>,
}

enum Way<S: Sink> {
    Undecided(S),
    Plain(S),
    Gzip(Box<MultiGzDecoder<S>>),
    Xz(Box<XzDecoder<S>>),
    Zstd(Box<zio::Writer<S, raw::Decoder<'static>>>),
    /// Setting up a decoder failed.
    Broken,
}

/// All that came was unpacked.
pub(crate) struct Unpacked<S> {
    pub(crate) sink: S,
    /// How it was packed, and the SHA-256 of it as it was.
    pub(crate) packed: Option<(Packing, String)>,
}

impl<S: Sink> Unpacker<S> {
    pub(crate) fn new(sink: S) -> Self {
        Self { beginning: Vec::new(), way: Way::Undecided(sink), packed: None }
    }

    /// How it is packed, once that is known.
    pub(crate) fn packing(&self) -> Option<Packing> {
        self.packed.as_ref().map(|(packing, _)| *packing)
    }

    pub(crate) fn sink(&mut self) -> Option<&mut S> {
        match &mut self.way {
            Way::Undecided(sink) | Way::Plain(sink) => Some(sink),
            Way::Gzip(decoder) => Some(decoder.get_mut()),
            Way::Xz(decoder) => Some(decoder.get_mut()),
            Way::Zstd(writer) => Some(writer.writer_mut()),
            Way::Broken => None,
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if !matches!(self.way, Way::Undecided(_)) {
            return self.give_on(bytes);
        }
        self.beginning.extend(bytes);
        if self.beginning.len() < MAGIC_LEN { Ok(()) } else { self.decide() }
    }

    /// That was all. Fails where it is the beginning of something only.
    pub(crate) fn finish(mut self) -> io::Result<Unpacked<S>> {
        if matches!(self.way, Way::Undecided(_)) {
            self.decide()?;
        }
        let sink = match self.way {
            Way::Undecided(sink) | Way::Plain(sink) => sink,
            Way::Gzip(decoder) => decoder.finish()?,
            Way::Xz(decoder) => decoder.finish()?,
            Way::Zstd(mut writer) => {
                writer.finish()?;
                writer.into_inner().0
            }
            Way::Broken => return Err(io::ErrorKind::InvalidData.into()),
        };
        Ok(Unpacked { sink, packed: self.packed.map(|(packing, hash)| (packing, hex(&hash.finalize()))) })
    }

    fn decide(&mut self) -> io::Result<()> {
        let beginning = std::mem::take(&mut self.beginning);
        let Way::Undecided(mut sink) = std::mem::replace(&mut self.way, Way::Broken) else { return Ok(()) };
        let packing = Packing::of(&beginning);
        if let Some(packing) = packing {
            sink.was_packed();
            self.packed = Some((packing, Sha256::new()));
        }
        self.way = match packing {
            None => Way::Plain(sink),
            Some(Packing::Gzip) => Way::Gzip(Box::new(MultiGzDecoder::new(sink))),
            Some(Packing::Xz) => {
                let stream = Stream::new_stream_decoder(XZ_MEMORY_MAX, CONCATENATED)?;
                Way::Xz(Box::new(XzDecoder::new_stream(sink, stream)))
            }
            // Windows of more than 128 MiB are refused by the decoder itself.
            Some(Packing::Zstd) => Way::Zstd(Box::new(zio::Writer::new(sink, raw::Decoder::new()?))),
        };
        self.give_on(&beginning)
    }

    fn give_on(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some((_, hash)) = &mut self.packed {
            hash.update(bytes);
        }
        match &mut self.way {
            Way::Undecided(sink) | Way::Plain(sink) => sink.write_all(bytes),
            Way::Gzip(decoder) => decoder.write_all(bytes),
            Way::Xz(decoder) => decoder.write_all(bytes),
            Way::Zstd(writer) => writer.write_all(bytes),
            Way::Broken => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use proptest::prelude::*;

    use super::*;

    /// Takes so much and no more.
    struct Bounded(Vec<u8>, usize);

    impl Write for Bounded {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.len() + bytes.len() > self.1 {
                return Err(io::Error::other("enough"));
            }
            self.0.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink for Bounded {}

    fn packed(packing: Option<Packing>, content: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        match packing {
            None => bytes.extend(content),
            Some(Packing::Gzip) => {
                let mut encoder = flate2::read::GzEncoder::new(content, flate2::Compression::fast());
                encoder.read_to_end(&mut bytes).unwrap();
            }
            Some(Packing::Xz) => {
                liblzma::read::XzEncoder::new(content, 1).read_to_end(&mut bytes).unwrap();
            }
            Some(Packing::Zstd) => bytes = zstd::stream::encode_all(content, 1).unwrap(),
        }
        bytes
    }

    fn unpack(bytes: &[u8], step: usize, most: usize) -> io::Result<Unpacked<Bounded>> {
        let mut unpacker = Unpacker::new(Bounded(Vec::new(), most));
        for piece in bytes.chunks(step) {
            unpacker.write(piece)?;
        }
        unpacker.finish()
    }

    const WAYS: [Option<Packing>; 4] = [None, Some(Packing::Gzip), Some(Packing::Xz), Some(Packing::Zstd)];

    fn content() -> Vec<u8> {
        (0..300_000_u32).flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 9).to_le_bytes()).collect()
    }

    #[test]
    fn what_was_packed_comes_out_in_whatever_pieces_it_comes_in() {
        let content = content();
        for way in WAYS {
            let bytes = packed(way, &content);
            for step in [1, 5, 6, 7, 1 << 16, bytes.len()] {
                let out = unpack(&bytes, step, content.len()).unwrap();
                assert!(out.sink.0 == content, "{way:?} by {step}");
                assert_eq!(out.packed.as_ref().map(|(packing, _)| *packing), way);
                let digest = way.map(|_| hex(&Sha256::digest(&bytes)));
                assert_eq!(out.packed.map(|(_, digest)| digest), digest);
            }
        }
    }

    #[test]
    fn several_in_a_row_are_one() {
        for way in WAYS {
            let bytes = [packed(way, b"first "), packed(way, b"second")].concat();
            assert_eq!(unpack(&bytes, 3, 100).unwrap().sink.0, b"first second", "{way:?}");
        }
    }

    #[test]
    fn frames_of_zstd_that_have_nothing_of_the_disk_are_passed_over() {
        for first in 0x50..=0x5f {
            let skipped = [&[first, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"any"].concat();
            let zstd = |content| packed(Some(Packing::Zstd), content);
            let bytes = [&skipped[..], &zstd(b"first "), &skipped, &zstd(b"second"), &skipped].concat();
            for step in [1, 3, 4096] {
                let unpacked = unpack(&bytes, step, 100).unwrap();
                assert_eq!(unpacked.sink.0, b"first second", "{first:x} {step}");
                assert_eq!(unpacked.packed.unwrap().0, Packing::Zstd);
            }
        }
    }

    #[test]
    fn what_is_torn_or_damaged_is_an_error_wherever_it_is() {
        let content = content();
        for way in WAYS.into_iter().flatten() {
            let whole = packed(Some(way), &content);
            for length in [6, 7, 20, whole.len() / 2, whole.len() - 5, whole.len() - 1] {
                assert!(unpack(&whole[..length], 4096, 1 << 30).is_err(), "{way:?} torn at {length}");
            }
            let mut damaged = whole.clone();
            let middle = damaged.len() / 2;
            damaged[middle] ^= 0x55;
            // zstd's encoder adds no checksum here: what it cannot tell is told by the digest.
            let out = unpack(&damaged, 4096, 1 << 30);
            assert!(way == Packing::Zstd || out.is_err(), "{way:?}");
            let behind = [whole, b"and something else".to_vec()].concat();
            assert!(unpack(&behind, 4096, 1 << 30).is_err(), "{way:?} with something behind");
        }
    }

    #[test]
    fn a_bomb_ends_where_its_taker_has_enough() {
        let zeros = vec![0; 64 << 20];
        for way in WAYS.into_iter().flatten() {
            let bomb = packed(Some(way), &zeros);
            assert!(bomb.len() < zeros.len() / 100, "{way:?}: {}", bomb.len());
            let mut unpacker = Unpacker::new(Bounded(Vec::new(), 1 << 20));
            assert!(unpacker.write(&bomb).is_err(), "{way:?}");
            assert!(unpacker.sink().unwrap().0.len() <= 1 << 20, "{way:?}");
        }
    }

    #[test]
    fn a_window_beyond_the_bound_is_refused() {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(30).unwrap();
        encoder.write_all(&content()).unwrap();
        assert!(unpack(&encoder.finish().unwrap(), 4096, 1 << 30).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_hang(magic in 0_usize..4, bytes: Vec<u8>, step in 1_usize..64) {
            let mut all = magic.checked_sub(1).map(|at| Packing::ALL[at].1.to_vec()).unwrap_or_default();
            all.extend(bytes);
            let _ = unpack(&all, step, 1 << 20);
        }
    }
}

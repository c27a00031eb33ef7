//! What bytes are that somebody sends us, told while they come: how they are packed, which disk is in them, or why they
//! cannot be used. The cache judges by the same rules when it fetches them, and then looks at all of a disk's structure.

use std::io::{self, Write};

use sha2::{Digest, Sha256, Sha512};

use crate::{
    HEADER_LEN, Refusal,
    index::hex,
    inspect,
    unpack::{Packing, Sink, Unpacked, Unpacker},
};

/// Looks at bytes as they come.
pub struct Probe {
    unpacker: Unpacker<Look>,
    hash: Sha256,
    /// Where it is demanded.
    long: Option<Sha512>,
    size: u64,
}

/// What they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// How many they are.
    pub size: u64,
    /// Their SHA-256, in hex.
    pub sha256: String,
    /// Their SHA-512, where it was to be found.
    pub sha512: Option<String>,
    /// How they are packed, if they are.
    pub packing: Option<Packing>,
    /// The format of the disk in them.
    pub format: ec_model::DiskFormat,
    /// The size of that disk, in bytes.
    pub virtual_size: u64,
}

/// Why they cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProbeFailure {
    /// They are no disk that can be used.
    #[error("{0}")]
    Refused(Refusal),
    /// What they are packed in is damaged, ends too early, or is not all.
    #[error(
        "it is packed with {packing} and cannot be unpacked: it is damaged, not whole, or something follows its end"
    )]
    Unpacking {
        /// With what.
        packing: &'static str,
        /// What the decoder says.
        #[source]
        source: io::Error,
    },
}

/// The beginning of a disk, and its length.
#[derive(Default)]
struct Look {
    header: Vec<u8>,
    length: u64,
    refusal: Option<Refusal>,
}

impl Write for Look {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.length += bytes.len() as u64;
        if self.header.len() < HEADER_LEN {
            let missing = HEADER_LEN - self.header.len();
            self.header.extend(&bytes[..bytes.len().min(missing)]);
            if self.header.len() == HEADER_LEN
                && let Err(refusal) = inspect(&self.header, None)
            {
                self.refusal = Some(refusal);
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for Look {}

impl Probe {
    /// Finds the SHA-256, and the SHA-512 where that is wanted, too.
    pub fn new(sha512: bool) -> Self {
        let long = sha512.then(Sha512::new);
        Self { unpacker: Unpacker::new(Look::default()), hash: Sha256::new(), long, size: 0 }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// Why they cannot be used, as soon as that is known.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), ProbeFailure> {
        self.size += bytes.len() as u64;
        self.hash.update(bytes);
        if let Some(long) = &mut self.long {
            long.update(bytes);
        }
        self.unpacker.write(bytes).map_err(|source| {
            let refusal = self.unpacker.sink().and_then(|look| look.refusal.take());
            refusal.map_or_else(|| unpacking(self.unpacker.packing(), source), ProbeFailure::Refused)
        })
    }

    /// That was all.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn finish(self) -> Result<Probed, ProbeFailure> {
        let packing = self.unpacker.packing();
        let finished = self.unpacker.finish();
        let Unpacked { sink: look, .. } = finished.map_err(|source| unpacking(packing, source))?;
        if let Some(refusal) = look.refusal {
            return Err(ProbeFailure::Refused(refusal));
        }
        let inspected = inspect(&look.header, Some(look.length)).map_err(ProbeFailure::Refused)?;
        Ok(Probed {
            size: self.size,
            sha256: hex(&self.hash.finalize()),
            sha512: self.long.map(|long| hex(&long.finalize())),
            packing,
            format: inspected.format,
            virtual_size: inspected.virtual_size.unwrap_or(look.length),
        })
    }
}

fn unpacking(packing: Option<Packing>, source: io::Error) -> ProbeFailure {
    ProbeFailure::Unpacking { packing: packing.map_or("nothing", Packing::name), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(bytes: &[u8], step: usize) -> Result<Probed, ProbeFailure> {
        let mut probe = Probe::new(true);
        for piece in bytes.chunks(step) {
            probe.push(piece)?;
        }
        probe.finish()
    }

    #[test]
    fn a_disk_is_told_as_it_is_and_packed() {
        let disk = vec![0; 1 << 20];
        let packed = zstd::stream::encode_all(&disk[..], 1).unwrap();
        for (bytes, packing) in [(disk.clone(), None), (packed, Some(Packing::Zstd))] {
            let probed = probe(&bytes, 4096).unwrap();
            assert_eq!(probed.sha256, hex(&Sha256::digest(&bytes)));
            assert_eq!(probed.sha512, Some(hex(&Sha512::digest(&bytes))));
            assert_eq!((probed.size, probed.virtual_size), (bytes.len() as u64, 1 << 20));
            assert_eq!((probed.packing, probed.format.name()), (packing, "raw"));
        }
    }

    #[test]
    fn what_is_no_disk_is_told_packed_or_not_and_long_or_short() {
        let page = b"<!doctype html><p>404".to_vec();
        let long = [page.clone(), vec![b' '; 1 << 20]].concat();
        let mut backed = b"QFI\xfb\0\0\0\x03".to_vec();
        backed.extend([0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 4]);
        backed.resize(512, 0);
        for (bytes, why) in [
            (Vec::new(), "it is empty"),
            (page, "HTML"),
            (long, "HTML"),
            (vec![0; 513], "not a multiple"),
            (zstd::stream::encode_all(&b"\x1f\x8b\x08 and so on"[..], 1).unwrap(), "compressed with gzip"),
        ] {
            for bytes in [bytes.clone(), zstd::stream::encode_all(&bytes[..], 1).unwrap()] {
                let error = probe(&bytes, 1000).map(|_| ()).unwrap_err();
                assert!(error.to_string().contains(why), "{why}: {error}");
                if why.contains("gzip") {
                    break;
                }
            }
        }
        let torn = zstd::stream::encode_all(&vec![1; 1 << 20][..], 1).unwrap();
        let error = probe(&torn[..torn.len() - 3], 1000).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("packed with zstd") && error.contains("not whole"), "{error}");
        let more = [&torn[..], b"more"].concat();
        let error = probe(&more, 1000).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("something follows its end"), "{error}");
        assert!(probe(&backed, 100).is_err());
    }
}

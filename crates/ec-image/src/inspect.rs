//! Tells from the content, never from the name, what an image is, or why it cannot be used.

use std::io::{self, Read, Seek, SeekFrom};

use ec_model::DiskFormat;

use crate::{foreign, qcow2};

/// How much of the beginning of an image [`inspect`] wants to see, in bytes: as far as the mark of a
/// CD image lies.
pub const HEADER_LEN: usize = 0x9000;

/// Raw disks are whole sectors.
const SECTOR: u64 = 512;

/// What an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspected {
    /// Its format.
    pub format: DiskFormat,
    /// The size of the disk in it, in bytes; of a raw disk it is known with the size of the file.
    pub virtual_size: Option<u64>,
    qcow2: Option<qcow2::Header>,
}

/// Why an image cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No bytes at all.
    #[error("it is empty")]
    Empty,
    /// A web page.
    #[error("it is an HTML page, not a disk: check where it is from")]
    Html,
    /// Some other text.
    #[error("it is text, not a disk: check where it is from")]
    Text,
    /// Compressed as a whole.
    #[error("it is compressed with {with}: unpack it and offer the disk itself")]
    Compressed {
        /// The compressor.
        with: &'static str,
    },
    /// An archive of files.
    #[error("it is a {format} archive: unpack it and offer the disk itself")]
    Archive {
        /// The kind of archive.
        format: &'static str,
    },
    /// Another hypervisor's disk.
    #[error("it is a {format} disk: convert it with `qemu-img convert -O qcow2`")]
    Foreign {
        /// The format.
        format: &'static str,
    },
    /// An ISO without a boot sector.
    #[error("it is a CD image, which does not boot as a disk")]
    CdImage,
    /// Not whole sectors.
    #[error("it is {size} bytes long, which is not a multiple of {SECTOR}: no raw disk, or a truncated one")]
    PartialSector {
        /// The size of the file, in bytes.
        size: u64,
    },
    /// A disk of no size.
    #[error("the disk in it has size 0")]
    NoDisk,
    /// A qcow2 of a version that is not known.
    #[error("it is qcow2 version {version}, 2 and 3 can be used")]
    Qcow2Version {
        /// The version found.
        version: u32,
    },
    /// A qcow2 that is not the whole disk.
    #[error("it lies on a backing file ({name}): flatten it with `qemu-img convert -O qcow2`")]
    BackingFile {
        /// The name in the header, made fit for a line of text.
        name: String,
    },
    /// A qcow2 whose sectors are elsewhere.
    #[error("its data lies in another file: flatten it with `qemu-img convert -O qcow2`")]
    ExternalDataFile,
    /// Encrypted.
    #[error("it is encrypted")]
    Encrypted,
    /// A qcow2 that qemu has marked as corrupt.
    #[error("it is marked as corrupt: repair it with `qemu-img check -r all`")]
    MarkedCorrupt,
    /// A qcow2 with what backups keep beside the disk, which is not checked here.
    #[error("it has persistent dirty bitmaps: leave them out with `qemu-img convert -O qcow2`")]
    Bitmaps,
    /// A qcow2 with features that came later than this program.
    #[error("it uses qcow2 features that are not known here (incompatible feature bits {bits:#x})")]
    UnknownFeatures {
        /// The unknown bits.
        bits: u64,
    },
    /// A qcow2 with more tables than anybody goes through in time.
    #[error(
        "its clusters of {cluster} bytes are too small for its size: convert it with `qemu-img convert -O qcow2 -o cluster_size=2M`"
    )]
    Scattered {
        /// The size of a cluster, in bytes.
        cluster: u64,
    },
    /// A qcow2 that contradicts itself.
    #[error("its qcow2 structure is damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
    /// A qcow2 that refers to more than there is.
    #[error("it is truncated: {what} ends at byte {end}, the file at byte {size}")]
    Truncated {
        /// What lies beyond the end.
        what: &'static str,
        /// Where it ends, in bytes.
        end: u64,
        /// Where the file ends, in bytes.
        size: u64,
    },
}

/// [`inspect_file`] came to no answer, or to a refusal.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The image cannot be used.
    #[error("the image cannot be used")]
    Refused(#[source] Refusal),
    /// The image cannot be read.
    #[error("failed to read the image")]
    Read(#[source] io::Error),
}

/// Tells what an image is from its first [`HEADER_LEN`] bytes (all, where it has fewer) and, where it is
/// known, its size in bytes.
///
/// Pure: no bytes can make it panic, read anything else or work for long.
pub fn inspect(header: &[u8], size: Option<u64>) -> Result<Inspected, Refusal> {
    if header.starts_with(qcow2::MAGIC) {
        let parsed = qcow2::Header::parse(header)?;
        return Ok(Inspected {
            format: DiskFormat::Qcow2,
            virtual_size: Some(parsed.virtual_size),
            qcow2: Some(parsed),
        });
    }
    if let Some(refusal) = foreign::refusal(header) {
        return Err(refusal);
    }
    match size {
        Some(0) => Err(Refusal::Empty),
        Some(size) if size % SECTOR != 0 => Err(Refusal::PartialSector { size }),
        size => Ok(Inspected { format: DiskFormat::Raw, virtual_size: size, qcow2: None }),
    }
}

/// Tells what a whole image is, and for a qcow2 also whether everything it refers to is there and whether its
/// reference counts are right: what `qemu-img check` finds corrupt is refused.
///
/// Reads at most about as much as the image has bytes of tables.
pub fn inspect_file(image: &mut (impl Read + Seek)) -> Result<Inspected, InspectError> {
    let size = image.seek(SeekFrom::End(0)).map_err(InspectError::Read)?;
    image.rewind().map_err(InspectError::Read)?;
    let mut header = Vec::new();
    image.by_ref().take(HEADER_LEN as u64).read_to_end(&mut header).map_err(InspectError::Read)?;
    let inspected = inspect(&header, Some(size)).map_err(InspectError::Refused)?;
    if let Some(header) = &inspected.qcow2 {
        qcow2::check(image, size, header)?;
    }
    Ok(inspected)
}

/// The name of the file that a disk stands on; nothing where it stands on none, as all do that are no qcow2.
///
/// # Errors
/// It cannot be read, or its header tells of a name that is not there.
pub fn stands_on(disk: &mut impl Read) -> io::Result<Option<String>> {
    let mut header = Vec::new();
    disk.take(HEADER_LEN as u64).read_to_end(&mut header)?;
    if !header.starts_with(qcow2::MAGIC) {
        return Ok(None);
    }
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "its qcow2 header is damaged");
    qcow2::backing_file(&header).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_raw_disk_is_whole_sectors() {
        assert_eq!(inspect(&[0; 512], Some(512)).unwrap().virtual_size, Some(512));
        assert_eq!(inspect(&[0; 512], None).unwrap().virtual_size, None);
        assert_eq!(inspect(&[0; 513], Some(513)), Err(Refusal::PartialSector { size: 513 }));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes: Vec<u8>, size: Option<u64>) {
            let _ = inspect(&bytes, size);
            let _ = inspect_file(&mut Cursor::new(bytes));
        }

        #[test]
        fn no_qcow2_header_makes_the_parser_panic(
            version in 0_u32..5,
            bytes in proptest::collection::vec(any::<u8>(), 0..4096),
        ) {
            let mut image = qcow2::MAGIC.to_vec();
            image.extend(version.to_be_bytes());
            image.extend(bytes);
            let _ = inspect(&image, None);
            let _ = inspect_file(&mut Cursor::new(image));
        }
    }
}

//! The header of a qcow2 image, and the walk over its tables that finds what is missing.
//!
//! Every number in the file is somebody else's claim: each is checked before it is used, sums cannot
//! overflow, and the walk reads no table twice, so its work is bounded by the size of the file.

use std::io::{Read, Seek, SeekFrom};

use crate::{InspectError, Refusal};

pub(crate) const MAGIC: &[u8] = b"QFI\xfb";

/// The limits are qemu's own: what it would not open is refused here already.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
const L1_ENTRIES_MAX: u64 = (32 << 20) / 8;
const REFCOUNT_TABLE_MAX: u64 = 8 << 20;
const SNAPSHOTS_MAX: u32 = 65_536;
const SNAPSHOT_EXTRA_MAX: u32 = 1024;

const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// Dirty (bit 0: only reference counts may be behind, which a reader does not use), corrupt, external
/// data file, compression type and extended L2 entries.
const INCOMPATIBLE_KNOWN: u64 = 0b1_1111;

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const L2_COMPRESSED: u64 = 1 << 62;
const L2_ZERO: u64 = 1;

/// The bytes of a version 2 header, and the least of a version 3 header.
const V2_LEN: usize = 72;
const V3_LEN: u32 = 104;
const COMPRESSION_TYPE: usize = 104;

/// What the header says, checked for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) virtual_size: u64,
    cluster_bits: u32,
    extended_l2: bool,
    l1: Table,
    refcounts: Table,
    snapshots: u32,
    snapshots_offset: u64,
}

/// A table of 64-bit entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Table {
    offset: u64,
    entries: u64,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.len() < V2_LEN {
            return Err(truncated("its header", V2_LEN as u64, bytes.len() as u64));
        }
        let version = be32(bytes, 4);
        if !matches!(version, 2 | 3) {
            return Err(Refusal::Qcow2Version { version });
        }
        let features = if version == 3 { v3_features(bytes)? } else { 0 };
        let backing_offset = be64(bytes, 8);
        if backing_offset != 0 {
            return Err(Refusal::BackingFile { name: backing_name(bytes, backing_offset, be32(bytes, 16)) });
        }
        if be32(bytes, 32) != 0 {
            return Err(Refusal::Encrypted);
        }
        let cluster_bits = be32(bytes, 20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(damaged("its cluster size is impossible"));
        }
        let refcount_clusters = u64::from(be32(bytes, 56));
        let header = Self {
            virtual_size: be64(bytes, 24),
            cluster_bits,
            extended_l2: features & INCOMPATIBLE_EXTENDED_L2 != 0,
            l1: Table { offset: be64(bytes, 40), entries: u64::from(be32(bytes, 36)) },
            // At most 2^32 clusters of 2^21 bytes, so this cannot overflow.
            refcounts: Table { offset: be64(bytes, 48), entries: (refcount_clusters << cluster_bits) / 8 },
            snapshots: be32(bytes, 60),
            snapshots_offset: be64(bytes, 64),
        };
        header.validate()?;
        Ok(header)
    }

    fn validate(&self) -> Result<(), Refusal> {
        if self.virtual_size == 0 {
            return Err(Refusal::NoDisk);
        }
        if i64::try_from(self.virtual_size).is_err() {
            return Err(damaged("its virtual size is impossible"));
        }
        let per_l1_entry = self.l2_entries() << self.cluster_bits;
        if self.virtual_size.div_ceil(per_l1_entry) > self.l1.entries {
            return Err(damaged("its L1 table is too small for its virtual size"));
        }
        if self.l1.entries > L1_ENTRIES_MAX {
            return Err(damaged("its L1 table is impossibly big"));
        }
        if self.refcounts.entries == 0 {
            return Err(damaged("it has no reference counts"));
        }
        if self.refcounts.entries * 8 > REFCOUNT_TABLE_MAX {
            return Err(damaged("its reference count table is impossibly big"));
        }
        if self.snapshots > SNAPSHOTS_MAX {
            return Err(damaged("it has impossibly many snapshots"));
        }
        Ok(())
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// How many clusters one L2 table describes.
    fn l2_entries(&self) -> u64 {
        self.cluster() / if self.extended_l2 { 16 } else { 8 }
    }
}

fn v3_features(bytes: &[u8]) -> Result<u64, Refusal> {
    if bytes.len() < V3_LEN as usize {
        return Err(truncated("its header", u64::from(V3_LEN), bytes.len() as u64));
    }
    let incompatible = be64(bytes, 72);
    let unknown = incompatible & !INCOMPATIBLE_KNOWN;
    if unknown != 0 {
        return Err(Refusal::UnknownFeatures { bits: unknown });
    }
    if incompatible & INCOMPATIBLE_DATA_FILE != 0 {
        return Err(Refusal::ExternalDataFile);
    }
    if incompatible & INCOMPATIBLE_CORRUPT != 0 {
        return Err(Refusal::MarkedCorrupt);
    }
    if be32(bytes, 96) > 6 {
        return Err(damaged("its reference count width is impossible"));
    }
    let header_length = be32(bytes, 100);
    if header_length < V3_LEN || !header_length.is_multiple_of(8) {
        return Err(damaged("its header length is impossible"));
    }
    // zlib is 0, zstd 1.
    if header_length > V3_LEN && bytes.get(COMPRESSION_TYPE).is_some_and(|kind| *kind > 1) {
        return Err(damaged("its compression type is not known"));
    }
    Ok(incompatible)
}

/// The name of the backing file, fit for one line of an error.
fn backing_name(bytes: &[u8], offset: u64, length: u32) -> String {
    let name = usize::try_from(offset)
        .ok()
        .and_then(|start| bytes.get(start..start.saturating_add(length as usize)))
        .unwrap_or_default();
    if name.is_empty() {
        return "name unreadable".to_owned();
    }
    String::from_utf8_lossy(name).chars().take(120).flat_map(char::escape_debug).collect()
}

/// Whether all that the image refers to lies within its `size` bytes.
pub(crate) fn check(image: &mut (impl Read + Seek), size: u64, header: &Header) -> Result<(), InspectError> {
    let words = usize::try_from((size >> header.cluster_bits) / 64 + 1)
        .map_err(|_| refuse(damaged("it is impossibly big")))?;
    let mut walk = Walk { image, size, header, seen: vec![0; words] };
    walk.refcounts()?;
    walk.l1("its L1 table", header.l1)?;
    walk.snapshots()
}

struct Walk<'a, R> {
    image: &'a mut R,
    size: u64,
    header: &'a Header,
    /// One bit for each cluster of the file that was read as an L2 table: snapshots share most of
    /// theirs, and an image made to keep us busy may name one table a million times.
    seen: Vec<u64>,
}

impl<R: Read + Seek> Walk<'_, R> {
    fn refcounts(&mut self) -> Result<(), InspectError> {
        for block in self.table("its reference count table", self.header.refcounts)? {
            let offset = block & !511;
            if offset != 0 {
                self.aligned(offset)?;
                self.within("a reference count block", offset, self.header.cluster())?;
            }
        }
        Ok(())
    }

    fn l1(&mut self, what: &'static str, table: Table) -> Result<(), InspectError> {
        for entry in self.table(what, table)? {
            let offset = entry & OFFSET_MASK;
            if offset == 0 {
                continue;
            }
            self.aligned(offset)?;
            self.within("an L2 table", offset, self.header.cluster())?;
            // Within the file, so its number is below the number of bits.
            let cluster = offset >> self.header.cluster_bits;
            let (word, bit) = (cluster / 64, 1 << (cluster % 64));
            let Some(word) = usize::try_from(word).ok().and_then(|word| self.seen.get_mut(word)) else {
                continue;
            };
            if *word & bit == 0 {
                *word |= bit;
                self.l2(offset)?;
            }
        }
        Ok(())
    }

    fn l2(&mut self, offset: u64) -> Result<(), InspectError> {
        let table = self.table("an L2 table", Table { offset, entries: self.header.cluster() / 8 })?;
        if self.header.extended_l2 {
            for pair in table.chunks_exact(2) {
                // The second half says which parts of the cluster are allocated: its low 32 bits.
                let allocated = pair[1] & 0xffff_ffff != 0;
                self.l2_entry(pair[0], allocated || pair[0] & L2_COMPRESSED != 0)?;
            }
        } else {
            for entry in table {
                self.l2_entry(entry, entry & L2_COMPRESSED != 0 || entry & L2_ZERO == 0)?;
            }
        }
        Ok(())
    }

    /// `read` tells whether a reader of the disk would look at the cluster in the file.
    fn l2_entry(&self, entry: u64, read: bool) -> Result<(), InspectError> {
        if !read {
            return Ok(());
        }
        if entry & L2_COMPRESSED != 0 {
            let shift = 62 - (self.header.cluster_bits - 8);
            let offset = entry & ((1 << shift) - 1);
            let sectors = (entry & (L2_COMPRESSED - 1)) >> shift;
            let end = (offset & !511) + (sectors + 1) * 512;
            // The length is in whole sectors, and the file may end within the last one.
            if offset >= self.size || end > self.size.saturating_add(511) {
                return Err(refuse(truncated("a compressed cluster", end, self.size)));
            }
            return Ok(());
        }
        let offset = entry & OFFSET_MASK;
        if offset == 0 {
            return Ok(());
        }
        self.aligned(offset)?;
        // The last cluster of a file need not be whole: what is missing reads as zeroes.
        if offset >= self.size {
            return Err(refuse(truncated("a cluster", offset + self.header.cluster(), self.size)));
        }
        Ok(())
    }

    fn snapshots(&mut self) -> Result<(), InspectError> {
        let mut offset = self.header.snapshots_offset;
        let mut l1_bytes = 0_u64;
        for _ in 0..self.header.snapshots {
            let mut entry = [0; 40];
            self.within("its snapshot table", offset, entry.len() as u64)?;
            self.read(offset, &mut entry)?;
            let extra = be32(&entry, 36);
            if extra > SNAPSHOT_EXTRA_MAX {
                return Err(refuse(damaged("its snapshot table is impossible")));
            }
            let names = u64::from(be16(&entry, 12)) + u64::from(be16(&entry, 14));
            // Within the file plus about 130 KiB: no overflow.
            offset = (offset + 40 + u64::from(extra) + names).next_multiple_of(8);

            let l1 = Table { offset: be64(&entry, 0), entries: u64::from(be32(&entry, 8)) };
            l1_bytes += l1.entries * 8;
            // Tables of their own cannot be more than the file; others were made to keep us busy.
            if l1.entries > L1_ENTRIES_MAX || l1_bytes > self.size {
                return Err(refuse(damaged("the L1 tables of its snapshots are impossible")));
            }
            self.l1("the L1 table of a snapshot", l1)?;
        }
        Ok(())
    }

    fn table(&mut self, what: &'static str, table: Table) -> Result<Vec<u64>, InspectError> {
        if table.entries == 0 {
            return Ok(Vec::new());
        }
        self.aligned(table.offset)?;
        self.within(what, table.offset, table.entries * 8)?;
        // Bounded: L1 by its limit, the others by 8 MiB and by a cluster; and it is in the file.
        let mut bytes = vec![0; usize::try_from(table.entries * 8).unwrap_or_default()];
        self.read(table.offset, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry)).collect())
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), InspectError> {
        self.image.seek(SeekFrom::Start(offset)).map_err(InspectError::Read)?;
        self.image.read_exact(bytes).map_err(InspectError::Read)
    }

    fn aligned(&self, offset: u64) -> Result<(), InspectError> {
        if offset != 0 && offset.is_multiple_of(self.header.cluster()) {
            Ok(())
        } else {
            Err(refuse(damaged("a table or cluster lies where none can be")))
        }
    }

    fn within(&self, what: &'static str, offset: u64, length: u64) -> Result<(), InspectError> {
        let end = offset.saturating_add(length);
        if end <= self.size { Ok(()) } else { Err(refuse(truncated(what, end, self.size))) }
    }
}

fn damaged(what: &'static str) -> Refusal {
    Refusal::Damaged { what }
}

fn truncated(what: &'static str, end: u64, size: u64) -> Refusal {
    Refusal::Truncated { what, end, size }
}

fn refuse(refusal: Refusal) -> InspectError {
    InspectError::Refused(refusal)
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(field(bytes, at))
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(field(bytes, at))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(field(bytes, at))
}

/// Callers have checked the length; what is not there reads as zeroes all the same.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A version 3 header of a 1 GiB disk with 64 KiB clusters.
    fn header() -> Vec<u8> {
        let mut bytes = vec![0; 112];
        bytes[..4].copy_from_slice(MAGIC);
        for (at, value) in [(4, 3_u32), (20, 16), (36, 2), (56, 1), (96, 4), (100, 112)] {
            bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        for (at, value) in [(24, 1_u64 << 30), (40, 0x30000), (48, 0x10000)] {
            bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
        }
        bytes
    }

    fn with(at: usize, value: &[u8]) -> Result<Header, Refusal> {
        let mut bytes = header();
        bytes[at..at + value.len()].copy_from_slice(value);
        Header::parse(&bytes)
    }

    #[test]
    fn a_sane_header_gives_the_size_of_the_disk() {
        assert_eq!(Header::parse(&header()).unwrap().virtual_size, 1 << 30);
        assert!(with(72, &1_u64.to_be_bytes()).is_ok(), "dirty is harmless to a reader");
        assert!(with(104, &[1]).is_ok(), "zstd is known");
    }

    #[test]
    fn each_thing_that_cannot_be_used_is_called_by_its_name() {
        let name = |result: Result<Header, Refusal>| result.unwrap_err().to_string();
        for (at, value, wanted) in [
            (4, vec![0, 0, 0, 1], "version 1"),
            (8, vec![0, 0, 0, 0, 0, 0, 0, 1], "backing file"),
            (8, vec![255; 8], "name unreadable"),
            (32, vec![0, 0, 0, 2], "encrypted"),
            (20, vec![0, 0, 0, 8], "cluster size"),
            (20, vec![0, 0, 0, 64], "cluster size"),
            (24, vec![0; 8], "size 0"),
            (24, vec![255; 8], "virtual size is impossible"),
            (24, vec![0x7f, 255, 255, 255, 255, 255, 255, 255], "L1 table is too small"),
            (36, vec![255; 4], "L1 table is impossibly big"),
            (56, vec![0; 4], "no reference counts"),
            (56, vec![255; 4], "reference count table is impossibly big"),
            (60, vec![255; 4], "impossibly many snapshots"),
            (72, 2_u64.to_be_bytes().to_vec(), "marked as corrupt"),
            (72, 4_u64.to_be_bytes().to_vec(), "another file"),
            (72, 0x8000_0000_0000_0020_u64.to_be_bytes().to_vec(), "feature bits 0x8000000000000020"),
            (96, vec![0, 0, 0, 7], "reference count width"),
            (100, vec![0, 0, 0, 8], "header length"),
            (104, vec![2], "compression type"),
        ] {
            let text = name(with(at, &value));
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert!(name(Header::parse(&header()[..60])).contains("truncated"));
        assert!(name(Header::parse(&header()[..90])).contains("truncated"));
    }

    #[test]
    fn a_table_named_a_million_times_is_read_once() {
        // Every L1 entry names the same L2 table; without the bitmap this would read 2 MiB each time.
        let entries = 1_u32 << 20;
        let mut bytes = header();
        bytes[20..24].copy_from_slice(&21_u32.to_be_bytes());
        bytes[36..40].copy_from_slice(&entries.to_be_bytes());
        bytes[40..48].copy_from_slice(&(6_u64 << 20).to_be_bytes());
        bytes[48..56].copy_from_slice(&(2_u64 << 20).to_be_bytes());
        bytes.resize(6 << 20, 0);
        bytes.extend((4_u64 << 20).to_be_bytes().repeat(entries as usize));
        let begun = std::time::Instant::now();
        crate::inspect_file(&mut std::io::Cursor::new(bytes)).unwrap();
        assert!(begun.elapsed() < std::time::Duration::from_secs(20));
    }
}

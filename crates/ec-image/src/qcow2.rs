//! The header of a qcow2 image, and the walk over its tables that finds what `qemu-img check` would: what is
//! missing, bits that mean nothing, and clusters that are used oftener than their reference count says.
//!
//! Every number in the file is somebody else's claim: each is checked before it is used, sums cannot
//! overflow. Counting is done for [`WINDOW`] clusters at a time, so its memory is bounded; for each of them every
//! table is gone through once, so that the work is bounded, too, where both are ([`GONE_THROUGH_MAX`]).

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
const COPIED: u64 = 1 << 63;
const L2_COMPRESSED: u64 = 1 << 62;

/// Bits without a meaning; where one is set, nobody can say what was meant.
const REFCOUNT_RESERVED: u64 = 0x1ff;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const AUTOCLEAR_BITMAPS: u64 = 1;

/// Header extensions.
const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_CRYPTO: u32 = 0x0537_be77;

/// Clusters whose references are counted in one go: 64 GiB of the usual ones, 8 MiB of memory.
const WINDOW: u64 = 1 << 20;
/// L2 tables that are named, by the disk and its snapshots together.
const L2_TABLES_MAX: usize = 1 << 22;
/// Bytes of tables that are gone through in all: minutes of work, and what 5 TiB in the usual clusters have.
const GONE_THROUGH_MAX: u64 = 64 << 30;

/// The bytes of a version 2 header, and the least of a version 3 header.
const V2_LEN: usize = 72;
const V3_LEN: u32 = 104;
/// A cluster of 32 sectors is the least that can be described in parts.
const EXTENDED_L2_CLUSTER_BITS_MIN: u32 = 14;
const COMPRESSION_TYPE: usize = 104;

/// What the header says, checked for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) virtual_size: u64,
    cluster_bits: u32,
    extended_l2: bool,
    /// The bits of one reference count, as a power of two.
    refcount_order: u32,
    /// Where header extensions begin.
    extensions: u64,
    bitmaps: bool,
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
        if be64(bytes, 8) != 0 {
            return Err(Refusal::BackingFile { name: backing_name(bytes) });
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
            refcount_order: if version == 3 { be32(bytes, 96) } else { 4 },
            extensions: if version == 3 { u64::from(be32(bytes, 100)) } else { V2_LEN as u64 },
            bitmaps: version == 3 && be64(bytes, 88) & AUTOCLEAR_BITMAPS != 0,
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
        if self.extensions > self.cluster() {
            return Err(damaged("its header length is impossible"));
        }
        if self.extended_l2 && self.cluster_bits < EXTENDED_L2_CLUSTER_BITS_MIN {
            return Err(damaged("its clusters are too small for extended L2 entries"));
        }
        let places = [self.l1.offset, self.refcounts.offset, self.snapshots_offset];
        if places.iter().any(|place| !place.is_multiple_of(self.cluster()) || i64::try_from(*place).is_err())
        {
            return Err(damaged("a table or cluster lies where none can be"));
        }
        if self.bitmaps {
            return Err(Refusal::Bitmaps);
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
    // zlib is 0, zstd 1; what is not zlib is told by a feature, too.
    let kind = bytes.get(COMPRESSION_TYPE).copied().filter(|_| header_length > V3_LEN).unwrap_or_default();
    if kind > 1 || (kind != 0) != (incompatible & INCOMPATIBLE_COMPRESSION != 0) {
        return Err(damaged("its compression type is not known"));
    }
    Ok(incompatible)
}

/// What a header says of a backing file; nothing where it says what cannot be.
pub(crate) fn backing_file(header: &[u8]) -> Option<Option<String>> {
    if be64(header.get(..V2_LEN)?, 8) == 0 {
        return Some(None);
    }
    String::from_utf8(backing_bytes(header)?.to_vec()).ok().map(Some)
}

/// The name of the backing file, fit for one line of an error.
fn backing_name(header: &[u8]) -> String {
    backing_bytes(header).map_or_else(
        || "name unreadable".to_owned(),
        |name| String::from_utf8_lossy(name).chars().take(120).flat_map(char::escape_debug).collect(),
    )
}

/// The name of the backing file as it stands in the header, where that has one.
fn backing_bytes(header: &[u8]) -> Option<&[u8]> {
    let start = usize::try_from(be64(header, 8)).ok()?;
    let name = header.get(start..start.checked_add(be32(header, 16) as usize)?)?;
    (!name.is_empty()).then_some(name)
}

/// Whether all that the image refers to lies within its `size` bytes, and belongs to one purpose.
pub(crate) fn check(image: &mut (impl Read + Seek), size: u64, header: &Header) -> Result<(), InspectError> {
    let mut walk = Walk {
        image,
        size,
        header,
        regions: vec![(0, header.cluster())],
        tables: Vec::new(),
        blocks: Vec::new(),
        window: Window::default(),
    };
    walk.extensions()?;
    walk.refcounts()?;
    walk.l1("its L1 table", header.l1, true)?;
    walk.snapshots()?;
    // Who names a table several times comes to stand beside each other.
    walk.tables.sort_unstable();
    let clusters = size.div_ceil(header.cluster());
    let tables = walk.tables.chunk_by(|a, b| a & !3 == b & !3).count() as u64;
    let at_a_time = (tables * header.cluster()).saturating_add(walk.regions.len() as u64 * 16);
    if clusters.div_ceil(WINDOW).saturating_mul(at_a_time) > GONE_THROUGH_MAX {
        return Err(refuse(Refusal::Scattered { cluster: header.cluster() }));
    }
    for first in (0..clusters).step_by(usize::try_from(WINDOW).unwrap_or(usize::MAX)) {
        walk.count(first, WINDOW.min(clusters - first))?;
    }
    Ok(())
}

struct Walk<'a, R> {
    image: &'a mut R,
    size: u64,
    header: &'a Header,
    /// What is used beside L2 tables and what they name: place and length in bytes.
    regions: Vec<(u64, u64)>,
    /// The places of all L2 tables, as often as they are named. The lowest bits of a place are free: the first
    /// tells that the disk itself names it, and not a snapshot, the second that it is marked as nobody else's.
    tables: Vec<u64>,
    /// The places of the blocks of reference counts, 0 where there is none.
    blocks: Vec<u64>,
    window: Window,
}

/// The clusters whose references are being counted.
#[derive(Default)]
struct Window {
    first: u64,
    found: Vec<u32>,
    stored: Vec<u32>,
}

impl Window {
    fn place(&self, cluster: u64) -> Option<usize> {
        let place = usize::try_from(cluster.checked_sub(self.first)?).ok()?;
        (place < self.found.len()).then_some(place)
    }
}

impl<R: Read + Seek> Walk<'_, R> {
    fn extensions(&mut self) -> Result<(), InspectError> {
        let end = self.header.cluster().min(self.size);
        let mut offset = self.header.extensions;
        while offset + 8 <= end {
            let mut head = [0; 8];
            self.read(offset, &mut head)?;
            let (kind, length) = (be32(&head, 0), u64::from(be32(&head, 4)));
            offset += 8;
            let sane = length <= self.header.cluster() - offset
                && !(kind == EXTENSION_BACKING_FORMAT && length >= 16)
                && kind != EXTENSION_CRYPTO;
            if !sane {
                return Err(refuse(damaged("a header extension is impossible")));
            }
            // qemu wants a sane length of the last one, too.
            if kind == EXTENSION_END {
                return Ok(());
            }
            offset += length.next_multiple_of(8);
        }
        Ok(())
    }

    fn refcounts(&mut self) -> Result<(), InspectError> {
        let table = self.header.refcounts;
        let blocks = self.table("its reference count table", table)?;
        self.regions.push((table.offset, table.entries * 8));
        for block in &blocks {
            if block & REFCOUNT_RESERVED != 0 {
                return Err(refuse(damaged("its reference count table has reserved bits set")));
            }
            if *block != 0 {
                self.aligned(*block)?;
                self.within("a reference count block", *block, self.header.cluster())?;
                self.regions.push((*block, self.header.cluster()));
            }
        }
        self.blocks = blocks;
        Ok(())
    }

    fn l1(&mut self, what: &'static str, table: Table, active: bool) -> Result<(), InspectError> {
        let entries = self.table(what, table)?;
        self.regions.push((table.offset, table.entries * 8));
        for entry in entries {
            if entry & L1_RESERVED != 0 {
                return Err(refuse(damaged("an L1 table has reserved bits set")));
            }
            if entry == 0 {
                continue;
            }
            let offset = entry & OFFSET_MASK;
            self.aligned(offset)?;
            self.within("an L2 table", offset, self.header.cluster())?;
            if self.tables.len() >= L2_TABLES_MAX {
                return Err(refuse(damaged("it has impossibly many L2 tables")));
            }
            let copied = entry & COPIED != 0;
            self.tables.push(offset | u64::from(active) | u64::from(copied) << 1);
        }
        Ok(())
    }

    /// Counts what is used among the clusters from `first` on, and compares it with what the image says.
    fn count(&mut self, first: u64, clusters: u64) -> Result<(), InspectError> {
        // Bounded by WINDOW.
        let length = usize::try_from(clusters).unwrap_or_default();
        self.window = Window { first, found: vec![0; length], stored: vec![0; length] };
        self.read_stored()?;
        let regions = std::mem::take(&mut self.regions);
        for (offset, length) in &regions {
            self.used(*offset, *length, 1)?;
        }
        self.regions = regions;
        let tables = std::mem::take(&mut self.tables);
        for same in tables.chunk_by(|a, b| a & !3 == b & !3) {
            let offset = same[0] & !3;
            let times = u32::try_from(same.len()).unwrap_or(u32::MAX);
            self.used(offset, self.header.cluster(), times)?;
            for table in same.iter().filter(|table| **table & 1 != 0) {
                self.marked_rightly(offset, table & 2 != 0)?;
            }
            self.l2(offset, times, same.iter().any(|table| table & 1 != 0))?;
        }
        self.tables = tables;
        let window = &self.window;
        if window.found.iter().zip(&window.stored).any(|(found, stored)| found > stored) {
            return Err(refuse(damaged("a cluster is used oftener than its reference count says")));
        }
        Ok(())
    }

    /// Reads what the image says of the window's clusters.
    fn read_stored(&mut self) -> Result<(), InspectError> {
        let order = self.header.refcount_order;
        // Of one block; a cluster has at least 512 bytes, so this is at least 64.
        let per_block = (self.header.cluster() * 8) >> order;
        let (first, end) = (self.window.first, self.window.first + self.window.found.len() as u64);
        let mut bytes = vec![0; usize::try_from(self.header.cluster()).unwrap_or_default()];
        for block in first / per_block..end.div_ceil(per_block) {
            let place = usize::try_from(block).ok().and_then(|block| self.blocks.get(block));
            let Some(offset) = place.copied().filter(|offset| *offset != 0) else { continue };
            self.read(offset, &mut bytes)?;
            for cluster in (block * per_block).max(first)..((block + 1) * per_block).min(end) {
                let within = usize::try_from(cluster % per_block).unwrap_or_default();
                if let Some(place) = self.window.place(cluster) {
                    self.window.stored[place] = stored_count(&bytes, within, order);
                }
            }
        }
        Ok(())
    }

    /// Notes that `times` users have these bytes.
    fn used(&mut self, offset: u64, length: u64, times: u32) -> Result<(), InspectError> {
        if length == 0 {
            return Ok(());
        }
        let bits = self.header.cluster_bits;
        let last = (offset.saturating_add(length - 1)) >> bits;
        let end = self.window.first + self.window.found.len() as u64;
        for cluster in (offset >> bits).max(self.window.first)..last.saturating_add(1).min(end) {
            if let Some(place) = self.window.place(cluster) {
                let found = &mut self.window.found[place];
                *found =
                    found.checked_add(times).ok_or_else(|| refuse(damaged("a cluster is used too often")))?;
            }
        }
        Ok(())
    }

    /// A table or cluster of the disk itself is marked as nobody else's if and only if it is counted once.
    fn marked_rightly(&self, offset: u64, copied: bool) -> Result<(), InspectError> {
        let place = self.window.place(offset >> self.header.cluster_bits);
        match place.map(|place| self.window.stored[place]) {
            Some(stored) if (stored == 1) != copied => {
                Err(refuse(damaged("a cluster is marked as shared that is not, or the other way round")))
            }
            _ => Ok(()),
        }
    }

    fn l2(&mut self, offset: u64, times: u32, active: bool) -> Result<(), InspectError> {
        let table = self.table("an L2 table", Table { offset, entries: self.header.cluster() / 8 })?;
        if self.header.extended_l2 {
            for pair in table.chunks_exact(2) {
                self.l2_entry(pair[0], Some(pair[1]), times, active)?;
            }
        } else {
            for entry in table {
                self.l2_entry(entry, None, times, active)?;
            }
        }
        Ok(())
    }

    /// `parts` says, where clusters have parts, which are allocated (its low 32 bits) and which read as zeroes.
    fn l2_entry(
        &mut self,
        entry: u64,
        parts: Option<u64>,
        times: u32,
        active: bool,
    ) -> Result<(), InspectError> {
        let (zeroes, allocated) = parts.map_or((0, 0), |parts| (parts >> 32, parts & 0xffff_ffff));
        if entry & L2_COMPRESSED != 0 {
            if entry & COPIED != 0 || parts.is_some_and(|parts| parts != 0) {
                return Err(refuse(damaged("a compressed cluster is described as none can be")));
            }
            let shift = 62 - (self.header.cluster_bits - 8);
            let offset = entry & ((1 << shift) - 1);
            let sectors = (entry & (L2_COMPRESSED - 1)) >> shift;
            let end = (offset & !511) + (sectors + 1) * 512;
            // The length is in whole sectors, and the file may end within the last one.
            if offset >= self.size || end > self.size.saturating_add(511) {
                return Err(refuse(truncated("a compressed cluster", end, self.size)));
            }
            return self.used(offset, end - offset, times);
        }
        if entry & L2_RESERVED != 0 {
            return Err(refuse(damaged("an L2 table has reserved bits set")));
        }
        let offset = entry & OFFSET_MASK;
        if zeroes & allocated != 0 || (offset == 0 && allocated != 0) {
            return Err(refuse(damaged("the parts of a cluster are described as none can be")));
        }
        if offset == 0 {
            return Ok(());
        }
        self.aligned(offset)?;
        // The last cluster of a file need not be whole: what is missing reads as zeroes.
        if offset >= self.size {
            return Err(refuse(truncated("a cluster", offset + self.header.cluster(), self.size)));
        }
        if active {
            self.marked_rightly(offset, entry & COPIED != 0)?;
        }
        self.used(offset, self.header.cluster(), times)
    }

    fn snapshots(&mut self) -> Result<(), InspectError> {
        let begin = self.header.snapshots_offset;
        let mut offset = begin;
        let mut l1_bytes = 0_u64;
        for _ in 0..self.header.snapshots {
            offset = offset.next_multiple_of(8);
            let mut entry = [0; 40];
            self.within("its snapshot table", offset, entry.len() as u64)?;
            self.read(offset, &mut entry)?;
            let extra = be32(&entry, 36);
            if extra > SNAPSHOT_EXTRA_MAX {
                return Err(refuse(damaged("its snapshot table is impossible")));
            }
            let names = u64::from(be16(&entry, 12)) + u64::from(be16(&entry, 14));
            // Within the file plus about 130 KiB: no overflow.
            offset += 40 + u64::from(extra) + names;
            self.within("its snapshot table", begin, offset - begin)?;

            let l1 = Table { offset: be64(&entry, 0), entries: u64::from(be32(&entry, 8)) };
            l1_bytes += l1.entries * 8;
            // Tables of their own cannot be more than the file; others were made to keep us busy.
            if l1.entries > L1_ENTRIES_MAX || l1_bytes > self.size {
                return Err(refuse(damaged("the L1 tables of its snapshots are impossible")));
            }
            self.aligned(l1.offset)?;
            self.l1("the L1 table of a snapshot", l1, false)?;
        }
        self.regions.push((begin, offset - begin));
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

/// One reference count of a block; what is more than 32 bits can say is as good as the most they can.
fn stored_count(block: &[u8], number: usize, order: u32) -> u32 {
    match order {
        // Parts of a byte, the first in its lowest bits.
        0..=2 => {
            let bits = 1 << order;
            let byte = block.get(number * bits / 8).copied().unwrap_or_default();
            u32::from(byte >> (number * bits % 8)) & ((1 << bits) - 1)
        }
        3 => u32::from(block.get(number).copied().unwrap_or_default()),
        4 => u32::from(be16(block, number * 2)),
        5 => be32(block, number * 4),
        _ => u32::try_from(be64(block, number * 8)).unwrap_or(u32::MAX),
    }
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
        let mut zstd = header();
        zstd[79] = 8;
        zstd[104] = 1;
        assert!(Header::parse(&zstd).is_ok(), "zstd is known");
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
            (104, vec![1], "compression type"),
            (79, vec![8], "compression type"),
            (47, vec![1], "lies where none can be"),
            (71, vec![1], "lies where none can be"),
            (95, vec![1], "dirty bitmaps"),
            (100, vec![0, 1, 0, 8], "header length"),
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
        let error = crate::inspect_file(&mut std::io::Cursor::new(bytes)).unwrap_err();
        assert!(
            matches!(error, InspectError::Refused(Refusal::Damaged { .. })),
            "no reference count says so"
        );
        assert!(begun.elapsed() < std::time::Duration::from_secs(20));
    }

    #[test]
    fn tables_that_nobody_could_go_through_in_time_are_refused_at_once() {
        use std::os::unix::fs::FileExt;
        let entries = 1_u32 << 18;
        let mut bytes = header();
        bytes[20..24].copy_from_slice(&9_u32.to_be_bytes());
        bytes[36..40].copy_from_slice(&entries.to_be_bytes());
        bytes[40..48].copy_from_slice(&1024_u64.to_be_bytes());
        bytes[48..56].copy_from_slice(&512_u64.to_be_bytes());
        bytes.resize(1024, 0);
        // A table for each, one behind the other, and then nothing for a long way.
        bytes.extend((1..=u64::from(entries)).flat_map(|table| ((table << 24) + 512).to_be_bytes()));
        let mut image = tempfile::tempfile().unwrap();
        image.write_all_at(&bytes, 0).unwrap();
        image.set_len(8 << 40).unwrap();
        let error = crate::inspect_file(&mut image).unwrap_err();
        assert!(matches!(error, InspectError::Refused(Refusal::Scattered { cluster: 512 })), "{error:?}");
    }

    #[test]
    fn reference_counts_of_every_width_are_read() {
        let block = [0b1010_0111, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde];
        assert_eq!([0, 1, 3, 7].map(|number| stored_count(&block, number, 0)), [1, 1, 0, 1]);
        assert_eq!([0, 1, 2, 3].map(|number| stored_count(&block, number, 1)), [3, 1, 2, 2]);
        assert_eq!([0, 1, 2].map(|number| stored_count(&block, number, 2)), [7, 10, 2]);
        assert_eq!([0, 1].map(|number| stored_count(&block, number, 3)), [0xa7, 0x12]);
        assert_eq!([0, 1].map(|number| stored_count(&block, number, 4)), [0xa712, 0x3456]);
        assert_eq!(stored_count(&block, 1, 5), 0x789a_bcde);
        assert_eq!(stored_count(&block, 0, 6), u32::MAX);
    }
}

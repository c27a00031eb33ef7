//! What a file system has left, and what of that is left to others: guests' disks lie most often on the same one, and grow as they are
//! written. A guest whose disk finds no more room stands still.

use std::{io, path::Path};

use nix::sys::statvfs::statvfs;

use crate::Size;

/// The most that is left free, and the part of the whole that is where that is less.
const KEPT_MAX: u64 = 1 << 30;
const KEPT_PART: u64 = 20;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Space {
    pub(crate) free: u64,
    pub(crate) whole: u64,
}

/// May take as long as the file system takes to answer.
pub(crate) fn space(path: &Path) -> io::Result<Space> {
    let stat = statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    Ok(Space { free: bytes(stat.blocks_available()), whole: bytes(stat.blocks()) })
}

impl Space {
    /// What is left free of it.
    fn kept(self) -> u64 {
        KEPT_MAX.min(self.whole / KEPT_PART)
    }

    /// Whether so many bytes may be written. Of a file system that does not tell its size nothing is known before it is full.
    pub(crate) fn admit(self, wanted: u64) -> io::Result<()> {
        let (free, kept) = (self.free, self.kept());
        if self.whole == 0 || wanted.saturating_add(kept) <= free {
            return Ok(());
        }
        let why = format!(
            "{} wanted for what is being fetched, {} free, of which {} stay free for guests",
            Size(wanted),
            Size(free),
            Size(kept)
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn some_stays_free_for_guests_and_both_numbers_are_told() {
        let large = Space { free: 10 * GIB, whole: 100 * GIB };
        large.admit(9 * GIB).unwrap();
        let error = large.admit(9 * GIB + 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(
            error.to_string(),
            "9.0 GiB wanted for what is being fetched, 10.0 GiB free, of which 1.0 GiB stay free for guests"
        );
        let small = Space { free: 2 * GIB, whole: 10 * GIB };
        small.admit(2 * GIB - GIB / 2).unwrap();
        small.admit(2 * GIB - GIB / 2 + 1).unwrap_err();
        Space { free: 0, whole: 0 }.admit(u64::MAX).unwrap();
    }

    #[test]
    fn a_file_system_tells_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let told = space(dir.path()).unwrap();
        assert!(told.free <= told.whole && told.whole > 0, "{told:?}");
    }
}

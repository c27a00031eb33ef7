//! Giving back the memory that only a start needs.
#![expect(unsafe_code, reason = "the kernel is advised about addresses")]

use std::{ffi::c_void, io, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};

/// Drops the mapped pages of all code, of the program and of its libraries. What runs again is mapped again
/// from the page cache at its next step; what only the start ran does not count as resident any more.
///
/// Linking and starting touch most pages of libvirt and the two dozen libraries behind it, and an agent
/// then waits for weeks.
pub fn forget_code() -> io::Result<()> {
    for (start, length) in code(&std::fs::read_to_string("/proc/self/maps")?) {
        let Some(start) = NonNull::new(start as *mut c_void) else { continue };
        // SAFETY: the range is a mapping of a file that this process can execute and not write, so that
        // nothing but the file's own content is in it, and that content comes back at the next access.
        // A library that is unloaded in between makes the call fail, which changes nothing.
        unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) }.ok();
    }
    Ok(())
}

/// Start and length of each mapping of a file that is code and was never written (proc_pid_maps(5)).
fn code(maps: &str) -> Vec<(usize, usize)> {
    let mapping = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (range, rights, _offset, _device, inode) =
            (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let (start, end) = range.split_once('-')?;
        let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
        (rights == "r-xp" && inode != "0").then(|| (start, end.saturating_sub(start)))
    };
    maps.lines().filter_map(mapping).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_dropped() {
        let maps = "\
            00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/program\n\
            00651000-00652000 r--p 00051000 08:02 173521      /usr/bin/program\n\
            00652000-00655000 rw-p 00052000 08:02 173521      /usr/bin/program\n\
            7fffb2c0d000-7fffb2c2e000 rw-p 00000000 00:00 0   [stack]\n\
            7fffb2d48000-7fffb2d49000 r-xp 00000000 00:00 0   [vdso]\n";
        assert_eq!(code(maps), [(0x0040_0000, 0x52000)]);
    }

    #[test]
    fn the_program_goes_on_without_its_pages() {
        forget_code().unwrap();
        assert!(!code(&std::fs::read_to_string("/proc/self/maps").unwrap()).is_empty());
    }
}

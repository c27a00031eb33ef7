//! Giving back the memory that only a start needs.
#![expect(unsafe_code, reason = "the kernel is advised about addresses")]

use std::{ffi::c_void, io, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};

/// Drops the mapped pages of all code and constants, of the program and of its libraries. What is needed
/// again is mapped again from the page cache at its next access; what only the start needed does not count
/// as resident any more.
///
/// Linking and starting touch most pages of libvirt and the two dozen libraries behind it, and an agent
/// then waits for weeks.
pub fn forget_code() -> io::Result<()> {
    for (start, length) in untouched(&std::fs::read_to_string("/proc/self/smaps")?) {
        let Some(start) = NonNull::new(start as *mut c_void) else { continue };
        // SAFETY: the range is a mapping of a file that this process cannot write and has not written, so
        // that nothing but the file's own content is in it, and that content comes back at the next access.
        // Between the look at the mappings and this call nothing else comes to lie there: nothing in this
        // process unloads a library.
        unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) }.ok();
    }
    Ok(())
}

/// Start and length of each read-only mapping of a file of which no page was ever written
/// (proc_pid_smaps(5)): what the linker has relocated is read-only, too, but has pages of its own, in memory
/// or swapped out.
fn untouched(smaps: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        let mut fields = line.split_ascii_whitespace();
        match fields.next() {
            Some("Anonymous:") => candidate = candidate.filter(|_| fields.next() == Some("0")),
            // Comes after the other.
            Some("Swap:") => found.extend(candidate.take().filter(|_| fields.next() == Some("0"))),
            Some(key) if !key.ends_with(':') => candidate = mapping(key, fields),
            _ => {}
        }
    }
    found
}

fn mapping<'a>(range: &str, mut rest: impl Iterator<Item = &'a str>) -> Option<(usize, usize)> {
    let (rights, _offset, _device, inode) = (rest.next()?, rest.next()?, rest.next()?, rest.next()?);
    let (start, end) = range.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    (matches!(rights, "r-xp" | "r--p") && inode != "0").then(|| (start, end.saturating_sub(start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_never_written_is_dropped() {
        let smaps = "\
            00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/program\nRss: 4 kB\nAnonymous: 0 kB\nSwap: 0 kB\n\
            00651000-00652000 r--p 00051000 08:02 173521      /usr/bin/program\nRss: 4 kB\nAnonymous: 4 kB\nSwap: 0 kB\n\
            00652000-00655000 rw-p 00052000 08:02 173521      /usr/bin/program\nRss: 4 kB\nAnonymous: 0 kB\nSwap: 0 kB\n\
            00655000-00656000 r--p 00055000 08:02 173521      /usr/bin/program\nRss: 4 kB\nAnonymous: 0 kB\nSwap: 0 kB\n\
            00656000-00657000 r--p 00056000 08:02 173521      /usr/bin/program\nRss: 0 kB\nAnonymous: 0 kB\nSwap: 4 kB\n\
            7fffb2d48000-7fffb2d49000 r-xp 00000000 00:00 0   [vdso]\nRss: 4 kB\nAnonymous: 0 kB\nSwap: 0 kB\n";
        assert_eq!(untouched(smaps), [(0x0040_0000, 0x52000), (0x0065_5000, 0x1000)]);
    }

    #[test]
    fn the_program_goes_on_without_its_pages() {
        forget_code().unwrap();
        assert!(!untouched(&std::fs::read_to_string("/proc/self/smaps").unwrap()).is_empty());
    }
}

//! Which failures of the file system pass.

use std::io;

use nix::errno::Errno;

/// Whether what the file system refused may work later, with nothing about the file itself changed: its server or its disk is in
/// trouble, or who speaks to that for the kernel is gone (of FUSE and Ceph), or it is full, or to be mended, or mounted to be read
/// alone, which the kernel makes of one in trouble, or this host is short of something.
pub fn may_pass(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(
            Errno::EIO
                | Errno::ESTALE
                | Errno::ETIMEDOUT
                | Errno::ENOTCONN
                | Errno::ECONNABORTED
                | Errno::ESHUTDOWN
                | Errno::EHOSTDOWN
                | Errno::EHOSTUNREACH
                | Errno::EUCLEAN
                | Errno::ENOSPC
                | Errno::EDQUOT
                | Errno::EROFS
                | Errno::EMFILE
                | Errno::ENFILE
                | Errno::ENOMEM
                | Errno::ENOLCK
                | Errno::EAGAIN
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_stays_away_and_one_whose_disk_is_in_trouble_may_come_back() {
        let of_the_file = [Errno::ENOENT, Errno::EACCES, Errno::ENOTDIR, Errno::EISDIR, Errno::EINVAL];
        let passing = [
            [Errno::EIO, Errno::ESTALE, Errno::ETIMEDOUT, Errno::ENOTCONN, Errno::ESHUTDOWN, Errno::EUCLEAN],
            [Errno::ENOSPC, Errno::EDQUOT, Errno::EROFS, Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM],
        ];
        for errno in of_the_file {
            assert!(!may_pass(&errno.into()), "{errno}");
        }
        for errno in passing.into_iter().flatten() {
            assert!(may_pass(&errno.into()), "{errno}");
        }
        assert!(!may_pass(&io::Error::other("said by nobody's kernel")));
    }
}

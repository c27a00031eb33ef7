//! What an image's file tells of itself, and of who has it open.

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
    path::Path,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};

/// By a lock on this byte of an image, QEMU is told to start no guest that writes it (its `RAW_LOCK_SHARED_BASE` and
/// `BLK_PERM_WRITE`).
const NO_WRITER: i64 = 201;
/// The byte that it locks while it may write.
const WRITER: i64 = 101;

/// The capacity of an image in bytes, as its head has it (QEMU's `docs/interop/qcow2.txt`).
pub(super) fn capacity_in(path: &Path) -> io::Result<u64> {
    Ok(number(&head_of(&File::open(path)?)?, 24))
}

/// The beginning of a qcow2 image's header (<https://www.qemu.org/docs/master/interop/qcow2.html>).
fn head_of(file: &File) -> io::Result<[u8; 48]> {
    let mut head = [0; 48];
    file.read_exact_at(&mut head, 0)?;
    if !head.starts_with(b"QFI\xfb") {
        return Err(io::Error::new(ErrorKind::InvalidData, "it is no qcow2 image"));
    }
    Ok(head)
}

/// The number of eight bytes there.
fn number(head: &[u8; 48], at: usize) -> u64 {
    head[at..at + 8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Whether an image stands on another.
pub(super) fn stands_on_another(file: &File) -> io::Result<bool> {
    Ok(number(&head_of(file)?, 8) != 0)
}

/// The name that an image has for the one that it stands on.
pub(super) fn backing_in(file: &File) -> io::Result<Option<String>> {
    let head = head_of(file)?;
    let (place, length) = (number(&head, 8), number(&head, 16) >> 32);
    if place == 0 {
        return Ok(None);
    }
    let damaged = || io::Error::new(ErrorKind::InvalidData, "its backing file has no name");
    // QEMU opens none with a longer one.
    let length = usize::try_from(length).ok().filter(|length| *length <= 1023).ok_or_else(damaged)?;
    let mut name = vec![0; length];
    file.read_exact_at(&mut name, place)?;
    Ok(Some(String::from_utf8_lossy(&name).into_owned()))
}

/// Whether it is an image that stands on no other, with anything in it: it has tables of clusters then. An error where that
/// cannot be read.
pub(super) fn holds_data_alone(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let head = match head_of(&file) {
        // What was broken off while it was made is no image yet.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
        head => head?,
    };
    let (backing, tables, place) = (number(&head, 8), number(&head, 32) & 0xffff_ffff, number(&head, 40));
    if backing != 0 {
        return Ok(false);
    }
    // 32 MiB of them stand for more than any disk has.
    let mut table = vec![0; usize::try_from(tables.min(4 << 20)).unwrap_or_default() * 8];
    file.read_exact_at(&mut table, place)?;
    Ok(table.iter().any(|byte| *byte != 0))
}

/// Whether QEMU writes an image, on this host or another that has the same file system: as long as it may, it holds a lock on the byte
/// that stands for that (QEMU's `block/file-posix.c`).
pub(crate) fn is_written(path: &Path) -> io::Result<bool> {
    has_lock(path, WRITER, 1)
}

/// Whether QEMU has a file open, of which it locks single bytes; one that is not there nobody has.
pub(crate) fn is_locked(path: &Path) -> io::Result<bool> {
    // To the end of whatever a file can have.
    has_lock(path, 0, 0)
}

fn has_lock(path: &Path, start: i64, length: i64) -> io::Result<bool> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let mut found = lock(libc::F_WRLCK, start, length);
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(found.l_type != lock(libc::F_UNLCK, 0, 0).l_type)
}

fn lock(kind: i32, start: i64, length: i64) -> libc::flock {
    let number = |number| i16::try_from(number).unwrap_or_default();
    libc::flock {
        l_type: number(kind),
        l_whence: number(libc::SEEK_SET),
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

/// As long as the file is open, QEMU starts no guest that writes the image in it.
pub(crate) fn keep_from_writing(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    fcntl(&file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, NO_WRITER, 1)))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_holds_data_by_itself_is_told_from_an_empty_one_and_from_one_on_an_image() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let run = |program: &str, arguments: &[&str]| {
            let output = std::process::Command::new(program).args(arguments).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        };
        let [base, alone, above, none] = ["base", "alone", "above", "none"].map(at);
        run("qemu-img", &["create", "-q", "-f", "qcow2", &base, "8M"]);
        run("qemu-img", &["create", "-q", "-f", "qcow2", &alone, "1T"]);
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &above]);
        let holds = |path: &str| holds_data_alone(Path::new(path)).unwrap();
        assert!(!holds(&base) && !holds(&alone) && !holds(&above) && !holds(&none));
        for path in [&base, &alone, &above] {
            run("qemu-io", &["-c", "write -P 7 1M 512", path]);
        }
        assert!(holds(&base) && holds(&alone));
        assert!(!holds(&above), "what it stands on can be had again");
        std::fs::write(&none, "no image").unwrap();
        assert!(!holds(&none));
        // As something else left it, or a power cut.
        std::fs::write(&none, vec![0; 4096]).unwrap();
        holds_data_alone(Path::new(&none)).unwrap_err();
        let head = std::fs::read(&alone).unwrap();
        std::fs::write(&none, &head[..4096]).unwrap();
        holds_data_alone(Path::new(&none)).unwrap_err();
    }

    #[test]
    fn a_file_that_somebody_locks_is_told_from_one_that_nobody_has() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        assert!(!is_locked(&path).unwrap());
        std::fs::write(&path, "").unwrap();
        assert!(!is_locked(&path).unwrap());
        // As QEMU says that it reads: a shared lock on a byte that is not there.
        let file = File::open(&path).unwrap();
        fcntl(&file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, 100, 1))).unwrap();
        assert!(is_locked(&path).unwrap() && !is_written(&path).unwrap());
        fcntl(&file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, 101, 1))).unwrap();
        assert!(is_written(&path).unwrap());
        drop(file);
        assert!(!is_locked(&path).unwrap());
    }
}

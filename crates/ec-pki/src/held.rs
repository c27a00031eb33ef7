//! Files that are not whole yet. Whoever writes one holds it locked, by which it is told from what others left that were killed.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, RenameFlags, renameat2},
};

/// Makes a file by a name that `name` gives anew each time, for its owner only, and holds it as long as it is open. Where a file system
/// knows no locks, nobody finds it to be nobody's either.
///
/// # Errors
/// It cannot be made.
pub fn create_held(name: impl Fn() -> PathBuf) -> io::Result<(PathBuf, File)> {
    loop {
        // Never the same name twice: who is about to sweep the one would remove the other.
        let path = name();
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        if is_held(&path, &file)? {
            return Ok((path, file));
        }
    }
}

/// Locks it, and tells whether it is there still: it was nobody's before, and may have been swept.
fn is_held(path: &Path, file: &File) -> io::Result<bool> {
    file.lock().ok();
    let own = file.metadata()?;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        there => there.map(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())),
    }
}

/// Removes those files of a directory whose names are such, and that nobody holds. What cannot be removed stays.
pub fn sweep(directory: &Path, is_such: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_file = || entry.file_type().is_ok_and(|kind| kind.is_file());
        if entry.file_name().to_str().is_some_and(&is_such)
            && is_file()
            && let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            fs::remove_file(entry.path()).ok();
        }
    }
}

/// Renames a file, and replaces nothing that came there meanwhile.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] where something is there; it cannot be renamed.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        // NFS and others know no such renaming.
        Err(Errno::EINVAL | Errno::ENOSYS) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        renamed => Ok(renamed?),
    }
}

/// Where a file lies: the parent of a bare name is empty.
pub fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_swept_before_it_was_held_is_made_anew() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("half");
        let create = || File::create_new(&path).unwrap();
        let swept = || sweep(place.path(), |name| name == "half");
        let file = create();
        assert!(is_held(&path, &file).unwrap());
        swept();
        assert!(path.exists(), "somebody holds it");
        drop(file);
        swept();
        assert!(!path.exists());
        let file = create();
        swept();
        assert!(!is_held(&path, &file).unwrap(), "it was taken for what was left");
        let other = create();
        assert!(!is_held(&path, &file).unwrap(), "that is another one");
        assert!(is_held(&path, &other).unwrap());
    }

    #[test]
    fn a_bare_name_means_the_directory_where_one_is() {
        assert_eq!(directory(Path::new("host1.bundle")), Path::new("."));
        assert_eq!(directory(Path::new("/etc/ecompute/ca.pem")), Path::new("/etc/ecompute"));
    }
}

//! Files with and without secrets, written whole or not at all.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use nix::unistd::{Gid, Group};

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Its owner only.
    Secret,
    /// Its owner, and the members of the group with this id.
    Group(u32),
    /// Everybody.
    Public,
}

/// Writes a file, in place of one that is there; of a secret that a group may read, that goes on. Whoever reads it, and whenever this breaks off, finds the old or the new one.
///
/// # Errors
/// Why it cannot be written.
pub fn write(path: &Path, content: impl AsRef<[u8]>, access: Access) -> io::Result<()> {
    put_down(path, content.as_ref(), access).inspect_err(|_| {
        // Half of one is none.
        fs::remove_file(half(path)).ok();
    })?;
    fs::rename(half(path), path)?;
    File::open(directory(path))?.sync_all()
}

/// The same of a key and its certificate, which are of use together only: what breaks off before both are written whole leaves those
/// that were there.
///
/// # Errors
/// Why they cannot be written, and which.
pub fn write_pair(pair: [(&Path, &str, Access); 2]) -> Result<(), (PathBuf, io::Error)> {
    let of = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    for (path, content, access) in pair {
        put_down(path, content.as_bytes(), access).map_err(of(path))?;
    }
    for (path, ..) in pair {
        fs::rename(half(path), path).map_err(of(path))?;
    }
    for (path, ..) in pair {
        File::open(directory(path)).and_then(|directory| directory.sync_all()).map_err(of(path))?;
    }
    Ok(())
}

/// What a file is called until it is whole.
fn half(path: &Path) -> PathBuf {
    let mut half = path.as_os_str().to_owned();
    half.push(".new");
    PathBuf::from(half)
}

fn put_down(path: &Path, content: &[u8], access: Access) -> io::Result<()> {
    let mode = match access {
        Access::Secret => 0o600,
        Access::Group(_) => 0o640,
        Access::Public => 0o644,
    };
    let half = half(path);
    // Of a try that was killed, perhaps with another mode.
    match fs::remove_file(&half) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&half)?;
    // Whom an operator let read a secret reads the next one too, unless that was everybody.
    let before = fs::metadata(path).ok().filter(|before| {
        let mode = before.permissions().mode();
        access != Access::Public && mode & 0o070 != 0 && mode & 0o007 == 0
    });
    // A group that there is no more read it before its host, or the package, was installed anew.
    let is_there = |group: u32| Group::from_gid(Gid::from_raw(group)).is_ok_and(|found| found.is_some());
    let (group, mut mode) = match (before, access) {
        (Some(before), Access::Group(group)) if !is_there(before.gid()) => (Some(group), mode),
        (Some(before), _) => (Some(before.gid()), before.permissions().mode() & 0o777),
        (None, Access::Group(group)) => (Some(group), mode),
        (None, _) => (None, mode),
    };
    if let Some(group) = group {
        match fchown(&file, None, Some(group)) {
            // Only root can give it to a group that is not its own.
            Err(error) if access == Access::Secret && error.kind() == io::ErrorKind::PermissionDenied => {
                mode = 0o600;
            }
            given => given?,
        }
    }
    // Whatever the umask is.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()
}

/// Where a file lies: the parent of a bare name is empty.
fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_its_owners_also_where_something_else_was_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, "open to all").unwrap();
        fs::write(directory.path().join("key.new"), "half").unwrap();
        write(&path, "secret", Access::Secret).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "secret");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let group = fs::metadata(&path).unwrap().gid();
        write(&path, "shared", Access::Group(group)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        // Somebody let its group read it, and then everybody.
        for (mode, kept) in [(0o440, 0o440), (0o644, 0o600)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            write(&path, "secret", Access::Secret).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, kept);
        }
    }

    #[test]
    fn of_a_pair_both_are_written_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let [key, certificate] = ["a.key", "a.pem"].map(|name| directory.path().join(name));
        let put = |text: &str, certificate: &Path| {
            write_pair([(&key, text, Access::Secret), (certificate, text, Access::Public)])
        };
        put("old", &certificate).unwrap();
        let (missing, _) = put("new", &directory.path().join("missing/a.pem")).unwrap_err();
        assert!(missing.ends_with("missing/a.pem"), "{missing:?}");
        assert_eq!(fs::read_to_string(&key).unwrap(), "old");
        put("new", &certificate).unwrap();
        for (file, mode) in [(&key, 0o600), (&certificate, 0o644)] {
            assert_eq!(fs::read_to_string(file).unwrap(), "new");
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, mode);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_bare_name_means_the_directory_where_one_is() {
        assert_eq!(directory(Path::new("host1.bundle")), Path::new("."));
        assert_eq!(directory(Path::new("/etc/ecompute/ca.pem")), Path::new("/etc/ecompute"));
    }
}

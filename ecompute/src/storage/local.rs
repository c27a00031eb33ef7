//! Guests' disks on a file system of this node's own, which may be one by itself: whether it is mounted is told by what lies in it.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, symlink},
    path::Path,
};

use super::{StorageError, new_id, read};
use crate::{
    config::DISKS,
    identity::{keep, keep_name},
};

/// Beside the disks: a link that leads to an id which nothing else has, so nowhere. Of a file libvirt would make a volume of their pool.
pub(crate) const MARK: &str = "etcd-compute.disks";
/// In the state directory: the id of what its guests' disks lie on.
pub(super) const USED: &str = "local-disks";

/// Whether what lies there may be what this node's guests have their disks on.
pub(super) fn check(state_dir: &Path) -> Result<(), StorageError> {
    let (disks, used) = (state_dir.join(DISKS), state_dir.join(USED));
    match (id(&used)?, marked(&disks.join(MARK))?) {
        (Some(noted), found) if found.as_ref() != Some(&noted) => {
            Err(StorageError::OtherDisks { disks, noted, found, used })
        }
        _ => Ok(()),
    }
}

/// Makes sure of it, and notes it the first time. What was marked by an agent before this one, whose state is lost, is taken over.
///
/// # Errors
/// What lies there is not what this node has used.
pub(super) fn take(state_dir: &Path) -> Result<(), StorageError> {
    check(state_dir)?;
    let (disks, used) = (state_dir.join(DISKS), state_dir.join(USED));
    if id(&used)?.is_some() {
        return Ok(());
    }
    let failed = |what, path: &Path| {
        let path = path.to_owned();
        move |source| StorageError::Io { what, path, source }
    };
    let mark = disks.join(MARK);
    let id = match marked(&mark)? {
        Some(id) => id,
        None => {
            // Others than its owner may pass, as QEMU has to.
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o711)
                .create(&disks)
                .map_err(failed("make directory", &disks))?;
            let id = new_id();
            symlink(&id, &mark).and_then(|()| keep_name(&mark)).map_err(failed("make", &mark))?;
            id
        }
    };
    // Last: a start that was broken off before finds a mark and no note, and takes it over.
    keep(&used, &used.with_extension("new"), id).map_err(failed("write", &used))
}

/// The id that the mark leads to.
fn marked(mark: &Path) -> Result<Option<String>, StorageError> {
    match fs::read_link(mark) {
        Ok(id) => Ok(Some(id.display().to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StorageError::Io { what: "read", path: mark.to_owned(), source }),
    }
}

/// What is written there; an empty file says nothing.
fn id(path: &Path) -> Result<Option<String>, StorageError> {
    Ok(read(path)?.filter(|id| !id.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_that_are_not_mounted_are_missed_and_those_of_another_are_not_taken_for_them() {
        let state = tempfile::tempdir().unwrap();
        let (disks, away) = (state.path().join(DISKS), state.path().join("away"));
        let refused = || take(state.path()).unwrap_err().to_string();
        check(state.path()).unwrap();
        assert!(!disks.exists(), "looking makes nothing");
        for _ in 0..2 {
            take(state.path()).unwrap();
        }
        fs::rename(&disks, &away).unwrap();
        assert!(refused().contains("is missing") && !disks.exists());
        fs::create_dir(&disks).unwrap();
        let why = refused();
        assert!(why.contains("mount that there again") && why.contains("local-disks"), "{why}");
        assert_eq!(fs::read_dir(&disks).unwrap().count(), 0, "nothing is written there");
        symlink("another", disks.join(MARK)).unwrap();
        assert!(refused().contains("says `another`"));
        // Of an operator who says that the first ones will not come again.
        fs::remove_file(state.path().join(USED)).unwrap();
        take(state.path()).unwrap();
        assert_eq!(fs::read_to_string(state.path().join(USED)).unwrap(), "another\n");
        fs::remove_dir_all(&disks).unwrap();
        fs::rename(&away, &disks).unwrap();
        assert!(refused().contains("and `another` is noted"));
    }

    #[test]
    fn a_first_start_that_was_broken_off_is_taken_up() {
        let state = tempfile::tempdir().unwrap();
        let disks = state.path().join(DISKS);
        fs::create_dir(&disks).unwrap();
        symlink("one", disks.join(MARK)).unwrap();
        fs::write(state.path().join(USED), "").unwrap();
        take(state.path()).unwrap();
        assert_eq!(fs::read_to_string(state.path().join(USED)).unwrap(), "one\n");
        assert_eq!(fs::read_dir(&disks).unwrap().count(), 1);
    }
}

//! Where the state directory lay when its guests were made: libvirt knows their disks, images and consoles by that path.

use std::path::Path;

use super::{Recorded, StorageError, read};
use crate::identity::keep;

/// In the state directory: its own path.
const PLACE: &str = "place";

/// Refuses a state directory that was moved or copied, for as long as it has records of guests: these would go on writing what lies
/// at the old place, and a destroy would delete what lies at the new one. Nor is one taken that is reached by both paths: what a domain
/// names is told by its path from what somebody moved.
pub(crate) fn check(state_dir: &Path, recorded: &[Recorded]) -> Result<(), StorageError> {
    let noted = state_dir.join(PLACE);
    match read(&noted)? {
        Some(before) if !recorded.is_empty() && !before.is_empty() && Path::new(&before) != state_dir => {
            Err(StorageError::MovedState { place: state_dir.to_owned(), before, noted })
        }
        _ => Ok(()),
    }
}

/// Makes sure of it, and notes the path where no guest is known by another.
///
/// # Errors
/// It was moved.
pub(crate) fn take(state_dir: &Path, recorded: &[Recorded]) -> Result<(), StorageError> {
    check(state_dir, recorded)?;
    let noted = state_dir.join(PLACE);
    if read(&noted)?.is_some_and(|before| Path::new(&before) == state_dir) {
        return Ok(());
    }
    // On a full disk an agent is wanted that makes room: the next start notes it.
    if let Err(error) = keep(&noted, &noted.with_extension("new"), state_dir.display()) {
        tracing::warn!(%error, "failed to note in {} where this state directory lies", noted.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use ec_model::InstanceId;

    use super::*;

    #[test]
    fn a_state_directory_that_was_moved_is_refused_while_guests_are_known_by_its_old_path() {
        let all = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| all.path().join(name));
        let guest = [Recorded { disk: InstanceId::new(uuid::Uuid::nil()), is_made: true }];
        fs::create_dir(&old).unwrap();
        check(&old, &guest).unwrap();
        assert_eq!(fs::read_dir(&old).unwrap().count(), 0, "looking makes nothing");
        // Of a release that noted nothing.
        take(&old, &guest).unwrap();
        take(&old, &guest).unwrap();
        fs::rename(&old, &new).unwrap();
        for refused in [check(&new, &guest), take(&new, &guest)] {
            let why = refused.unwrap_err().to_string();
            assert!(why.contains(&format!("was {}", old.display())) && why.contains("new/place"), "{why}");
        }
        // A copy: guests write the other.
        fs::create_dir(&old).unwrap();
        take(&new, &guest).unwrap_err();
        fs::remove_dir(&old).unwrap();
        symlink(&new, &old).unwrap();
        take(&new, &guest).unwrap_err();
        take(&old, &guest).unwrap();
        fs::remove_file(&old).unwrap();
        take(&new, &guest).unwrap_err();
        // Nobody is known by a path.
        take(&new, &[]).unwrap();
        take(&new, &guest).unwrap();
    }
}

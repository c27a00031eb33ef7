//! Room for what has to be written where the disk is full: a file of nothing that is given up for it.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use crate::records::{RecordFileError, remove};

const BYTES: u64 = 64 << 10;

/// Such a file.
#[derive(Debug, Clone)]
pub(crate) struct Spare(PathBuf);

/// Whether the file system is full, or what its owner may have of it.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

impl Spare {
    pub(crate) fn new(directory: &Path, name: &str) -> Self {
        Self(directory.join(name))
    }

    /// Writes with the room that is there, or with this where there is none. Who has written what shall stay calls [`Self::keep`].
    pub(crate) fn write(
        &self,
        mut write: impl FnMut() -> io::Result<()>,
    ) -> Result<io::Result<()>, RecordFileError> {
        match write() {
            Err(error) if is_full(&error) && remove(&self.0)? => Ok(write()),
            written => Ok(written),
        }
    }

    /// Makes it where there is none, and room for it. Of bytes that no file system stores as less.
    pub(crate) fn keep(&self) {
        let made =
            File::options().write(true).create_new(true).mode(0o600).open(&self.0).and_then(|mut file| {
                io::copy(&mut File::open("/dev/urandom")?.take(BYTES), &mut file)?;
                file.sync_all()
            });
        match made {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                // Half of one is none.
                let _ = fs::remove_file(&self.0);
                tracing::debug!(%error, path = %self.0.display(), "there is no spare room");
            }
            _ => {}
        }
    }
}

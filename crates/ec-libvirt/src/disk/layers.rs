//! What stands on what: an external snapshot leaves the disk behind as the backing file of another, whatever that is called.

use std::{
    fs::{File, metadata},
    io::{self, ErrorKind},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use super::image::backing_in;

/// More files than that are in nobody's chain, unless it leads back into itself.
const CHAIN: usize = 256;

/// How many files of its chain below one that is one of `below`; nothing where it stands on none of these.
pub(super) fn depth_on(file: &Path, below: &[PathBuf]) -> io::Result<Option<usize>> {
    let mut at = file.to_owned();
    for depth in 1..=CHAIN {
        let Some(backing) = backing_of(&at)? else { return Ok(None) };
        // QEMU's own words for what it opens, which have the path in them as it is.
        if backing.starts_with("json:") {
            let names = |below: &PathBuf| backing.contains(&format!("{}\"", super::name_of(below)));
            return Ok(below.iter().any(names).then_some(depth));
        }
        let path = backing.strip_prefix("file:").unwrap_or(&backing);
        at = at.parent().unwrap_or(Path::new("/")).join(path);
        let place = followed(&at);
        if below.iter().any(|below| followed(below) == place) {
            return Ok(Some(depth));
        }
    }
    Ok(None)
}

/// The name that a file has for what it stands on. Of no image, and of what was broken off while it was made, there is none.
fn backing_of(path: &Path) -> io::Result<Option<String>> {
    // Whoever opens a pipe waits for its other end.
    let backing = match metadata(path).map(|found| found.file_type()) {
        Ok(kind) if kind.is_file() || kind.is_block_device() => {
            File::open(path).and_then(|file| backing_in(&file))
        }
        Ok(_) => return Ok(None),
        Err(error) => Err(error),
    };
    match backing {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound
                    | ErrorKind::NotADirectory
                    | ErrorKind::UnexpectedEof
                    | ErrorKind::InvalidData
                    | ErrorKind::InvalidInput
            ) =>
        {
            Ok(None)
        }
        backing => backing,
    }
}

/// One path for a file, whatever links lead to it, and also where it is gone.
fn followed(path: &Path) -> PathBuf {
    let in_directory = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(in_directory).unwrap_or_else(|| path.to_owned())
}

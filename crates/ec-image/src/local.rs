//! Images from `file://` URLs: copied, because a base must never change under its overlays.

use std::{
    fs::{self, File},
    io::Read,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::watch;

use crate::{
    ImageError,
    flight::State,
    index::{FileStamp, Validators},
    landing::{Ground, Landing},
    shelf::Landed,
    source::Wanted,
};

const CHUNK: usize = 1 << 20;

/// Sets the flag when the async side loses interest.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Brings the file into the cache, or finds it there unchanged.
pub(crate) async fn bring(
    ground: Ground,
    wanted: Wanted,
    path: std::path::PathBuf,
    state: watch::Sender<State>,
) -> Result<Landed, ImageError> {
    let stop = StopOnDrop(Arc::default());
    let stopped = Arc::clone(&stop.0);
    tokio::task::spawn_blocking(move || copy(ground, wanted, &path, state, &stopped))
        .await
        .map_err(|_| ImageError::Interrupted)?
}

fn copy(
    ground: Ground,
    wanted: Wanted,
    path: &Path,
    state: watch::Sender<State>,
    stopped: &AtomicBool,
) -> Result<Landed, ImageError> {
    let failed = |source| ImageError::Local { path: path.to_owned(), source: Arc::new(source) };
    // Looked at before it is opened: opening a pipe would wait for a writer.
    let meta = fs::metadata(path).map_err(failed)?;
    if !meta.is_file() {
        return Err(ImageError::NotAFile { path: path.to_owned() });
    }
    let stamp = FileStamp::of(&meta);
    if let Some((entry, landed)) = ground.known(&wanted)
        && entry.validators.file == Some(stamp)
    {
        return Ok(landed);
    }
    let mut file = File::open(path).map_err(failed)?;
    let mut landing = Landing::begin(ground, wanted, state, Some(meta.len()))?;
    let mut chunk = vec![0; CHUNK];
    loop {
        if stopped.load(Ordering::Relaxed) {
            return Err(ImageError::Interrupted);
        }
        match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => landing.push(&chunk[..length])?,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    // Both the file that was read and the one that has the name now must be the one that was looked at.
    let read = FileStamp::of(&file.metadata().map_err(failed)?);
    let named = FileStamp::of(&fs::metadata(path).map_err(failed)?);
    if read != stamp || named != stamp {
        return Err(ImageError::Changed { path: path.to_owned() });
    }
    landing.finish(Validators { file: Some(stamp), ..Validators::default() })
}

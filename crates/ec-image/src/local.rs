//! Images from `file://` URLs: copied, because a base must never change under its overlays.

use std::{
    io::Read,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ec_runtime::Host;
use tokio::sync::watch;

use crate::{
    ImageError,
    access::Local,
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
    host: &Host,
    local: Arc<Local>,
    ground: Ground,
    wanted: Wanted,
    path: std::path::PathBuf,
    state: watch::Sender<State>,
) -> Result<Landed, ImageError> {
    let stop = StopOnDrop(Arc::default());
    let stopped = Arc::clone(&stop.0);
    host.blocking(move || copy(&local, ground, wanted, &path, state, &stopped))
        .await
        .map_err(|_| ImageError::Interrupted)?
}

fn copy(
    local: &Local,
    ground: Ground,
    wanted: Wanted,
    path: &Path,
    state: watch::Sender<State>,
    stopped: &AtomicBool,
) -> Result<Landed, ImageError> {
    let failed = |source| ImageError::Local { path: path.to_owned(), source: Arc::new(source) };
    let mut file = local.open(path)?;
    let meta = file.metadata().map_err(failed)?;
    let stamp = FileStamp::of(&meta);
    if let Some((entry, landed)) = ground.known(&wanted)
        && entry.is_of(stamp)
    {
        return Ok(landed);
    }
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
    let named = FileStamp::of(&local.open(path)?.metadata().map_err(failed)?);
    if read != stamp || named != stamp {
        return Err(ImageError::Changed { path: path.to_owned() });
    }
    landing.finish(Validators { file: Some(stamp), ..Validators::default() })
}

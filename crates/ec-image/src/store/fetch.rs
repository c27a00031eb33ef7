//! Images out of a bucket, for the cache. An object never changes, so what the cache has of it is not asked for again.

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use super::ImageStore;
use crate::{
    ImageError,
    flight::State,
    index::Validators,
    landing::{Ground, Landing, Piece, Written, land},
    shelf::Landed,
    source::Wanted,
};

/// Chunks between the socket and the disk.
const CHUNKS: usize = 8;

/// Brings the object into the cache, or finds it there. What breaks off on the way is asked for again by the store's client.
pub(crate) async fn bring(
    store: &ImageStore,
    ground: Ground,
    wanted: Wanted,
    state: watch::Sender<State>,
    stall_timeout: Duration,
    came: impl Fn(u64),
) -> Result<Landed, ImageError> {
    let (look_in, look_for) = (ground.clone(), wanted.clone());
    let known = tokio::task::spawn_blocking(move || look_in.known(&look_for)).await;
    if let Some((_, landed)) = known.map_err(|_| ImageError::Interrupted)? {
        return Ok(landed);
    }
    let url = wanted.label.clone();
    let failed = |source| ImageError::Store { url: url.clone(), source: Arc::new(source) };
    let stalled = || ImageError::Stalled { url: url.clone(), after: stall_timeout };
    // The client tries for as long as its patience is before it says that a store does not answer; of one that takes the
    // connection, and says nothing, it knows no end.
    let opened = timeout(stall_timeout, store.read(wanted.source.url().as_str())).await;
    let (size, mut bytes) = opened.map_err(|_| stalled())?.map_err(failed)?;
    let (pieces, inbox) = mpsc::channel(CHUNKS);
    let writer = tokio::task::spawn_blocking(move || {
        let landing = Landing::begin(ground, wanted, state, Some(size))?;
        land(landing, Validators::default(), inbox)
    });
    let broken = loop {
        let piece = match timeout(stall_timeout, bytes.next()).await {
            Err(_) => break Some(stalled()),
            Ok(Some(Ok(chunk))) => {
                came(chunk.len() as u64);
                Piece::Chunk(chunk)
            }
            Ok(Some(Err(error))) => break Some(failed(error)),
            Ok(None) => Piece::End,
        };
        let last = matches!(piece, Piece::End);
        // A writer that listens no more has failed, and says why below.
        if pieces.send(piece).await.is_err() || last {
            break None;
        }
    };
    drop(pieces);
    match writer.await.map_err(|_| ImageError::Interrupted)?? {
        Written::Whole(landed) => Ok(landed),
        Written::BrokenOff(_) => Err(broken.unwrap_or(ImageError::Interrupted)),
    }
}

//! Images out of a bucket, for the cache. An object never changes, so what the cache has of it is not asked for again, and what has come
//! of it is kept where the connection breaks.

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
    tries::Tries,
};

/// Chunks between the socket and the disk.
const CHUNKS: usize = 8;

/// What came before the connection broke, and the tag of the object that it is of.
struct Partial {
    landing: Landing,
    tag: String,
}

/// Brings the object into the cache, or finds it there. A connection on which nothing comes for the first of the two `times` has broken; what
/// breaks is asked for again, from where it ended, as long as the last progress is not longer ago than the second.
pub(crate) async fn bring(
    store: &ImageStore,
    ground: Ground,
    wanted: Wanted,
    state: watch::Sender<State>,
    (stall_timeout, patience): (Duration, Duration),
    came: impl Fn(u64),
) -> Result<Landed, ImageError> {
    let (look_in, look_for) = (ground.clone(), wanted.clone());
    let known = tokio::task::spawn_blocking(move || look_in.known(&look_for)).await;
    if let Some((_, landed)) = known.map_err(|_| ImageError::Interrupted)? {
        return Ok(landed);
    }
    let object = Object { store, ground, wanted, state, stall_timeout };
    let mut partial = None;
    let mut tries = Tries::new();
    loop {
        let error = match object.attempt(&mut partial, &came).await {
            Err(error) => error,
            landed => return landed,
        };
        let reached = partial.as_ref().map_or(0, |partial| partial.landing.received());
        match tries.next(reached, patience) {
            Some(pause) if error.is_of_the_way() => {
                let url = &object.wanted.label;
                tracing::debug!(url, %error, reached, "fetching the image again");
                tokio::time::sleep(pause).await;
            }
            _ => return Err(error),
        }
    }
}

/// What is fetched, and where it lands.
struct Object<'a> {
    store: &'a ImageStore,
    ground: Ground,
    wanted: Wanted,
    state: watch::Sender<State>,
    stall_timeout: Duration,
}

impl Object<'_> {
    /// One try, which goes on with what came before.
    async fn attempt(
        &self,
        partial: &mut Option<Partial>,
        came: &impl Fn(u64),
    ) -> Result<Landed, ImageError> {
        let url = || self.wanted.label.clone();
        let failed = |error| ImageError::Store { url: url(), answer: Arc::new(error) };
        let stalled = || ImageError::Stalled { url: url(), after: self.stall_timeout };
        let rest = partial.as_ref().map(|begun| (begun.landing.received(), begun.tag.as_str()));
        let asked = self.store.read(self.wanted.source.url().as_str(), rest);
        // The client tries for as long as its patience is before it says that a store does not answer; of one that takes the
        // connection, and says nothing, it knows no end.
        let found = match timeout(self.stall_timeout, asked).await.map_err(|_| stalled())? {
            Ok(found) => found,
            Err(object_store::Error::Precondition { .. }) if partial.is_some() => {
                // Somebody put another object there: the next try asks for all of it.
                let received = partial.take().map_or(0, |begun| begun.landing.received());
                return Err(ImageError::Truncated { url: url(), received, expected: None });
            }
            Err(error) => return Err(failed(error)),
        };
        let (size, tag) = (found.meta.size, found.meta.e_tag.clone().filter(|tag| !tag.starts_with("W/")));
        let begun = partial.take().filter(|begun| Some(&begun.tag) == tag.as_ref());
        let mut received = begun.as_ref().map_or(0, |begun| begun.landing.received());
        if found.range.start != received {
            return Err(ImageError::Truncated { url: url(), received, expected: Some(size) });
        }
        let mut bytes = found.into_stream();
        let (pieces, inbox) = mpsc::channel(CHUNKS);
        let (ground, wanted, state) = (self.ground.clone(), self.wanted.clone(), self.state.clone());
        let writer = tokio::task::spawn_blocking(move || {
            let landing = match begun {
                Some(begun) => begun.landing,
                None => Landing::begin(ground, wanted, state, Some(size))?,
            };
            land(landing, Validators::default(), inbox)
        });
        let broken = loop {
            let piece = match timeout(self.stall_timeout, bytes.next()).await {
                Ok(Some(Ok(chunk))) => {
                    received += chunk.len() as u64;
                    came(chunk.len() as u64);
                    Piece::Chunk(chunk)
                }
                // What breaks behind the last byte lacks nothing.
                Ok(None) => Piece::End,
                Ok(Some(Err(_))) | Err(_) if received == size => Piece::End,
                Ok(Some(Err(error))) => break Some(failed(error)),
                Err(_) => break Some(stalled()),
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
            Written::BrokenOff(landing) => {
                *partial = tag.map(|tag| Partial { landing: *landing, tag });
                Err(broken.unwrap_or(ImageError::Interrupted))
            }
        }
    }
}

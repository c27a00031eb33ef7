//! Images over HTTP: asked for with a condition where the cache has something, tried again where the
//! connection fails, cut off where nothing comes any more. There is no limit on the whole time: a big
//! image over a slow line takes what it takes.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use reqwest::{Client, Response, StatusCode, header, redirect};
use tokio::sync::{OnceCell, mpsc, watch};

use crate::{
    ImageError,
    flight::State,
    index::{Entry, Validators},
    landing::{Ground, Landing},
    shelf::Landed,
    source::Wanted,
};

const REDIRECTS_MAX: usize = 10;

/// Pauses before the tries after the first.
const RETRIES: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1)];

/// Chunks between the socket and the disk.
const CHUNKS: usize = 8;

pub(crate) struct Origin {
    /// Made at the first use: the certificates of the system take memory.
    client: OnceCell<Client>,
    stall_timeout: Duration,
}

/// What goes from the connection to the thread that writes. Its end without a `End` means: never mind.
enum Piece {
    Chunk(Bytes),
    End,
}

impl Origin {
    pub(crate) fn new(stall_timeout: Duration) -> Self {
        Self { client: OnceCell::new(), stall_timeout }
    }

    async fn client(&self) -> Result<&Client, ImageError> {
        let stall_timeout = self.stall_timeout;
        self.client
            .get_or_try_init(|| async move {
                tokio::task::spawn_blocking(move || build(stall_timeout))
                    .await
                    .map_err(|_| ImageError::Interrupted)?
            })
            .await
    }

    /// Brings the image into the cache, or finds it there unchanged or the origin away.
    pub(crate) async fn bring(
        &self,
        ground: Ground,
        wanted: Wanted,
        state: watch::Sender<State>,
    ) -> Result<Landed, ImageError> {
        let (look_in, look_for) = (ground.clone(), wanted.clone());
        let mut known = tokio::task::spawn_blocking(move || look_in.known(&look_for))
            .await
            .map_err(|_| ImageError::Interrupted)?;
        let mut pauses = RETRIES.into_iter();
        loop {
            let error = match self.attempt(&ground, &wanted, &state, &mut known).await {
                Err(error) => error,
                landed => return landed,
            };
            let broken = matches!(error, ImageError::Unreachable { .. } | ImageError::Truncated { .. });
            if broken && let Some(pause) = pauses.next() {
                tracing::debug!(url = wanted.label, %error, "fetching the image again");
                tokio::time::sleep(pause).await;
                continue;
            }
            return match known {
                Some((_, landed)) if error.origin_is_away() => {
                    tracing::warn!(
                        url = wanted.label, digest = landed.base.digest, %error,
                        "the image is used as cached, unchecked"
                    );
                    Ok(landed)
                }
                _ => Err(error),
            };
        }
    }

    async fn attempt(
        &self,
        ground: &Ground,
        wanted: &Wanted,
        state: &watch::Sender<State>,
        known: &mut Option<(Entry, Landed)>,
    ) -> Result<Landed, ImageError> {
        let mut request = self.client().await?.get(wanted.source.url().clone());
        if let Some((entry, _)) = &*known {
            if let Some(etag) = &entry.validators.etag {
                request = request.header(header::IF_NONE_MATCH, etag);
            }
            if let Some(date) = &entry.validators.last_modified {
                request = request.header(header::IF_MODIFIED_SINCE, date);
            }
        }
        let response = request.send().await.map_err(|error| self.failed(wanted, error))?;
        match (response.status(), &*known) {
            (StatusCode::OK, _) => {
                // What the cache has is out of date; its pin must not keep the room that this one needs.
                *known = None;
                self.receive(response, ground, wanted, state).await
            }
            (StatusCode::NOT_MODIFIED, Some((_, landed))) => Ok(landed.clone()),
            (status, _) => Err(ImageError::Status { url: wanted.label.clone(), status: status.as_u16() }),
        }
    }

    async fn receive(
        &self,
        mut response: Response,
        ground: &Ground,
        wanted: &Wanted,
        state: &watch::Sender<State>,
    ) -> Result<Landed, ImageError> {
        let expected = response.content_length();
        let validators = validators(&response);
        let (pieces, inbox) = mpsc::channel(CHUNKS);
        let (ground, owned, state) = (ground.clone(), wanted.clone(), state.clone());
        let writer =
            tokio::task::spawn_blocking(move || land(ground, owned, state, expected, validators, inbox));
        let mut received = 0;
        let broken = loop {
            let piece = match response.chunk().await {
                Ok(Some(chunk)) => {
                    received += chunk.len() as u64;
                    Piece::Chunk(chunk)
                }
                Ok(None) => Piece::End,
                Err(error) if error.is_timeout() => break Some(self.failed(wanted, error)),
                Err(error) => {
                    tracing::debug!(url = wanted.label, error = %error.without_url(), "the body broke off");
                    break Some(ImageError::Truncated { url: wanted.label.clone(), received, expected });
                }
            };
            let last = matches!(piece, Piece::End);
            // A writer that listens no more has failed, and says why below.
            if pieces.send(piece).await.is_err() || last {
                break None;
            }
        };
        drop(pieces);
        // Waited for in any case: who gets an error finds no temporary file any more. Where both failed,
        // what is wrong with the content says more than how the connection ended.
        let landed = writer.await.map_err(|_| ImageError::Interrupted)?;
        match (landed, broken) {
            (Err(ImageError::Interrupted), Some(broken)) => Err(broken),
            (landed, _) => landed,
        }
    }

    fn failed(&self, wanted: &Wanted, error: reqwest::Error) -> ImageError {
        let url = wanted.label.clone();
        if error.is_timeout() {
            return ImageError::Stalled { url, after: self.stall_timeout };
        }
        let redirect = error.is_redirect();
        let (connect, broken) = (error.is_connect(), error.is_request());
        let too_many = redirect && redirects_ran_out(&error);
        // The URL in it would show its secrets.
        let source = Arc::new(error.without_url());
        if too_many {
            ImageError::TooManyRedirects { url, limit: REDIRECTS_MAX }
        } else if connect || (broken && !redirect) {
            ImageError::Unreachable { url, source }
        } else {
            ImageError::BadAnswer { url, source }
        }
    }
}

fn land(
    ground: Ground,
    wanted: Wanted,
    state: watch::Sender<State>,
    expected: Option<u64>,
    validators: Validators,
    mut inbox: mpsc::Receiver<Piece>,
) -> Result<Landed, ImageError> {
    let mut landing = Landing::begin(ground, wanted, state, expected)?;
    loop {
        match inbox.blocking_recv() {
            Some(Piece::Chunk(bytes)) => landing.push(&bytes)?,
            Some(Piece::End) => return landing.finish(validators),
            None => return Err(ImageError::Interrupted),
        }
    }
}

fn build(stall_timeout: Duration) -> Result<Client, ImageError> {
    // reqwest panics where no provider is installed; a program that has chosen one keeps its choice.
    rustls::crypto::ring::default_provider().install_default().ok();
    Client::builder()
        .user_agent(concat!("etcd-compute/", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::limited(REDIRECTS_MAX))
        .connect_timeout(stall_timeout)
        .read_timeout(stall_timeout)
        // Images come rarely: a connection kept open would only cost memory.
        .pool_max_idle_per_host(0)
        .build()
        .map_err(|error| ImageError::Client { source: Arc::new(error) })
}

fn validators(response: &Response) -> Validators {
    let text = |name| response.headers().get(name)?.to_str().ok().map(str::to_owned);
    Validators { etag: text(header::ETAG), last_modified: text(header::LAST_MODIFIED), file: None }
}

/// reqwest has one kind for all that can be wrong with a redirect; only this cause has its own name.
fn redirects_ran_out(error: &reqwest::Error) -> bool {
    std::error::Error::source(error).is_some_and(|cause| cause.to_string().contains("too many redirects"))
}

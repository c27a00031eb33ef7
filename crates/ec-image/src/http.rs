//! Images over HTTP: asked for with a condition where the cache has something; where the connection fails,
//! tried again from where it ended; cut off where nothing comes any more, or next to nothing. There is no
//! limit on the whole time: a big image over a slow line takes what it takes. But while others wait for their turn,
//! what comes slowly goes behind them, and goes on from where it was when its turn comes again, where its server lets it.
//! A turn is needed for what is received, and not for being told that nothing changed, or that nothing is there.
//!
//! No proxy is used, whatever the environment says: a proxy resolves names itself, and so would be a way
//! around [`Addresses`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use reqwest::{Client, Response, StatusCode, header, redirect};
use tokio::{
    sync::{OnceCell, Semaphore, SemaphorePermit, mpsc, watch},
    time::timeout,
};
use url::Url;

use crate::{
    ImageError,
    access::{Addresses, Forbidden},
    flight::State,
    index::{Entry, Validators},
    landing::{Ground, Landing, Piece, Written, land},
    shelf::Landed,
    source::Wanted,
    tries::Tries,
    turns::Turns,
    vain::{Offer, Vain},
};

const REDIRECTS_MAX: usize = 10;

/// No scheme that anybody would know again is longer.
const SCHEME_MAX: usize = 32;

/// Where the cache has what the URL gave last, an origin that is away is not waited for longer.
const PATIENCE_WITH_COPY: Duration = Duration::from_secs(2);

/// The least that must come, in bytes a second, over [`Origin::window`].
const RATE_MIN: u64 = 1 << 10;
/// The same while others wait.
const RATE_FAIR: u64 = 256 << 10;

/// Downloads at once; each has a thread and a file.
const AT_ONCE: usize = 8;

/// So many of these may go on below the fair rate although others wait: what would begin anew each time would never come to its end. The
/// rest is for who comes.
const SLOW_AT_ONCE: usize = 6;

/// Chunks between the socket and the disk.
const CHUNKS: usize = 8;

pub(crate) struct Origin {
    /// Made at the first use: the certificates of the system take memory.
    client: OnceCell<Client>,
    stall_timeout: Duration,
    patience: Duration,
    addresses: Addresses,
    turns: Turns,
    slow: Semaphore,
    vain: Vain,
    /// Bytes that came.
    downloaded: AtomicU64,
}

/// How far the tries have come.
struct Course<'a> {
    /// What the cache has of it.
    known: Option<(Entry, Landed)>,
    partial: Option<Partial>,
    /// How many bytes of the image were there at the end of the last try.
    reached: u64,
    turn: Option<SemaphorePermit<'a>>,
}

/// What came before the connection broke, and how to ask for the rest of the same.
struct Partial {
    landing: Landing,
    validators: Validators,
    /// A strong validator: a server that has other content by now sends that from its beginning.
    strong: String,
}

/// Why a redirect is not followed.
#[derive(Debug, thiserror::Error)]
enum Astray {
    #[error("too many redirects")]
    TooMany,
    #[error("a redirect from https:// to http://")]
    Downgrade,
}

impl Origin {
    pub(crate) fn new(stall_timeout: Duration, patience: Duration, addresses: Addresses) -> Self {
        let (client, turns, downloaded) = (OnceCell::new(), Turns::new(AT_ONCE), AtomicU64::new(0));
        let slow = Semaphore::new(SLOW_AT_ONCE);
        let vain = Vain::default();
        Self { client, stall_timeout, patience, addresses, turns, slow, vain, downloaded }
    }

    /// How many bytes of images have come so far, those of tries that failed among them.
    pub(crate) fn downloaded(&self) -> u64 {
        self.downloaded.load(Ordering::Relaxed)
    }

    /// Counts bytes that came by another way.
    pub(crate) fn came(&self, bytes: u64) {
        self.downloaded.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Says so where the URL itself names an address that is not fetched from.
    pub(crate) fn permit(&self, url: &Url, label: &str) -> Result<(), ImageError> {
        let forbidden = |Forbidden(ip)| ImageError::Forbidden { url: label.to_owned(), ip };
        self.addresses.permit_url(url).map_err(forbidden)
    }

    /// How long too little may come.
    fn window(&self) -> Duration {
        self.stall_timeout * 2
    }

    async fn client(&self) -> Result<&Client, ImageError> {
        let (stall_timeout, addresses) = (self.stall_timeout, self.addresses.clone());
        self.client
            .get_or_try_init(|| async move {
                tokio::task::spawn_blocking(move || build(stall_timeout, addresses))
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
        let known = tokio::task::spawn_blocking(move || look_in.known(&look_for))
            .await
            .map_err(|_| ImageError::Interrupted)?;
        let mut course = Course { known, partial: None, reached: 0, turn: None };
        let mut tries = Tries::new();
        loop {
            course.reached = 0;
            let outcome = self.attempt(&ground, &wanted, &state, &mut course).await;
            course.turn = None;
            let error = match outcome {
                Ok(Some(landed)) => return Ok(landed),
                Ok(None) => {
                    let asked = Instant::now();
                    course.turn = Some(self.turns.take(&state).await?);
                    tries.waited(asked.elapsed());
                    continue;
                }
                Err(error) => error,
            };
            let (known, reached) = (&course.known, course.reached);
            let patience =
                if known.is_some() { self.patience.min(PATIENCE_WITH_COPY) } else { self.patience };
            if error.is_of_the_way()
                && let Some(pause) = tries.next(reached, patience)
            {
                tracing::debug!(url = wanted.label, %error, reached, "fetching the image again");
                tokio::time::sleep(pause).await;
                continue;
            }
            return match course.known {
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

    /// One try. Nothing where the image would come, and all turns are taken: that connection is not kept open while it waits.
    async fn attempt<'a>(
        &'a self,
        ground: &Ground,
        wanted: &Wanted,
        state: &watch::Sender<State>,
        course: &mut Course<'a>,
    ) -> Result<Option<Landed>, ImageError> {
        let mut request = self.client().await?.get(wanted.source.url().clone());
        if let Some(partial) = &course.partial {
            request = request
                .header(header::RANGE, format!("bytes={}-", partial.landing.received()))
                .header(header::IF_RANGE, &partial.strong);
        } else if let Some((entry, _)) = &course.known {
            if let Some(etag) = &entry.validators.etag {
                request = request.header(header::IF_NONE_MATCH, etag);
            }
            if let Some(date) = &entry.validators.last_modified {
                request = request.header(header::IF_MODIFIED_SINCE, date);
            }
        }
        let response = match timeout(self.window(), request.send()).await {
            Ok(response) => response.map_err(|error| self.failed(wanted, error))?,
            Err(_) => return Err(ImageError::Stalled { url: wanted.label.clone(), after: self.window() }),
        };
        let status = || {
            let (url, status) = (wanted.label.clone(), response.status().as_u16());
            match leads_nowhere(status, text(&response, header::LOCATION).as_deref()) {
                Some(how) => ImageError::Nowhere { url, how },
                None => ImageError::Status { url, status },
            }
        };
        let is_begun = course.partial.is_some();
        let offer = offered(&response);
        if let Some(error) = offer.as_ref().and_then(|offer| self.vain.known(wanted, offer, Instant::now())) {
            return Err(error);
        }
        let outcome = match response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT if !self.has_turn(course) => Ok(None),
            StatusCode::OK => {
                // What the cache has is out of date, and what came before is not the beginning of this: neither
                // must keep the room that this one needs.
                course.known = None;
                course.partial = None;
                self.receive(response, None, ground, wanted, state, course).await.map(Some)
            }
            StatusCode::PARTIAL_CONTENT => match course.partial.take() {
                Some(begun) if continues(&response, &begun) => {
                    self.receive(response, Some(begun), ground, wanted, state, course).await.map(Some)
                }
                // An answer to another question: the next try asks for all of it.
                Some(_) => Err(broken_off(wanted, 0, None)),
                None => Err(status()),
            },
            // The rest that was asked for is not there: the next try asks for all of it.
            StatusCode::RANGE_NOT_SATISFIABLE if is_begun => {
                let begun = course.partial.take();
                let begun = begun.map(|partial| (partial.landing.received(), partial.landing.expected()));
                let (received, expected) = begun.unwrap_or_default();
                Err(broken_off(wanted, received, expected))
            }
            StatusCode::NOT_MODIFIED => match &course.known {
                Some((_, landed)) => Ok(Some(landed.clone())),
                None => Err(status()),
            },
            _ => Err(status()),
        };
        if let (Some(offer), Err(error)) = (offer, &outcome) {
            self.vain.note(wanted, offer, error, Instant::now());
        }
        outcome
    }

    /// Whether it is its turn, or one is free.
    fn has_turn<'a>(&'a self, course: &mut Course<'a>) -> bool {
        course.turn = course.turn.take().or_else(|| self.turns.at_once());
        course.turn.is_some()
    }

    async fn receive(
        &self,
        mut response: Response,
        begun: Option<Partial>,
        ground: &Ground,
        wanted: &Wanted,
        state: &watch::Sender<State>,
        course: &mut Course<'_>,
    ) -> Result<Landed, ImageError> {
        let (landing, expected, validators, strong) = match begun {
            Some(begun) => {
                let expected = begun.landing.expected();
                (Some(begun.landing), expected, begun.validators, Some(begun.strong))
            }
            None => (None, response.content_length(), validators(&response), strong(&response)),
        };
        let mut received = landing.as_ref().map_or(0, Landing::received);
        course.reached = received;
        let (pieces, inbox) = mpsc::channel(CHUNKS);
        let (ground, owned, state) = (ground.clone(), wanted.clone(), state.clone());
        let remembered = validators.clone();
        let writer = tokio::task::spawn_blocking(move || {
            let landing = match landing {
                Some(landing) => {
                    landing.tell();
                    landing
                }
                None => Landing::begin(ground, owned, state, expected)?,
            };
            land(landing, remembered, inbox)
        });
        let mut meter = Meter::new(self.window());
        let mut stays = None;
        let broken = loop {
            let asked = Instant::now();
            let chunk = response.chunk().await;
            let piece = match chunk {
                Ok(Some(chunk)) => {
                    received += chunk.len() as u64;
                    self.downloaded.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    course.reached = received;
                    if let Some((bytes, rate)) = meter.measure(asked.elapsed(), chunk.len()) {
                        let is_slow = rate < RATE_FAIR && self.turns.are_wanted();
                        stays = stays.take().filter(|_| is_slow);
                        if is_slow && strong.is_none() && stays.is_none() {
                            stays = self.slow.try_acquire().ok();
                        }
                        if rate < RATE_MIN || is_slow && stays.is_none() {
                            let (url, window) = (wanted.label.clone(), self.window());
                            let others_wait = rate >= RATE_MIN;
                            break Some(ImageError::Crawl { url, bytes, window, others_wait });
                        }
                    }
                    Piece::Chunk(chunk)
                }
                Ok(None) if expected.is_some_and(|expected| received < expected) => {
                    break Some(broken_off(wanted, received, expected));
                }
                Ok(None) => Piece::End,
                Err(error) if error.is_timeout() => break Some(self.failed(wanted, error)),
                Err(error) => {
                    tracing::debug!(url = wanted.label, error = %error.without_url(), "the body broke off");
                    break Some(broken_off(wanted, received, expected));
                }
            };
            let last = matches!(piece, Piece::End);
            // A writer that listens no more has failed, and says why below.
            if pieces.send(piece).await.is_err() || last {
                break None;
            }
        };
        drop(pieces);
        // Waited for in any case: who gets an error finds no temporary file any more, unless the next try goes
        // on with it. Where both failed, what is wrong with the content says more than how the connection ended.
        let written = writer.await.map_err(|_| ImageError::Interrupted)??;
        match written {
            Written::Whole(landed) => Ok(landed),
            Written::BrokenOff(landing) => {
                course.partial = strong.map(|strong| Partial { landing: *landing, validators, strong });
                Err(broken.unwrap_or(ImageError::Interrupted))
            }
        }
    }

    fn failed(&self, wanted: &Wanted, error: reqwest::Error) -> ImageError {
        let url = wanted.label.clone();
        if let Some(Forbidden(ip)) = cause(&error) {
            return ImageError::Forbidden { url, ip: *ip };
        }
        match cause(&error) {
            Some(Astray::TooMany) => return ImageError::TooManyRedirects { url, limit: REDIRECTS_MAX },
            Some(Astray::Downgrade) => return ImageError::Downgrade { url },
            None => {}
        }
        if error.is_timeout() {
            return ImageError::Stalled { url, after: self.stall_timeout };
        }
        let redirect = error.is_redirect();
        let (connect, broken) = (error.is_connect(), error.is_request());
        // The URL in it would show its secrets.
        let source = Arc::new(error.without_url());
        if connect || (broken && !redirect) {
            ImageError::Unreachable { url, source }
        } else {
            ImageError::BadAnswer { url, source }
        }
    }
}

fn broken_off(wanted: &Wanted, received: u64, expected: Option<u64>) -> ImageError {
    ImageError::Truncated { url: wanted.label.clone(), received, expected }
}

/// How quickly it comes. Only time in which the connection was waited for counts: a slow disk is not the
/// origin's fault.
struct Meter {
    window: Duration,
    waited: Duration,
    bytes: u64,
}

impl Meter {
    fn new(window: Duration) -> Self {
        Self { window, waited: Duration::ZERO, bytes: 0 }
    }

    /// Takes what came after how long. Answers at the end of a window how much came within it, and in bytes a second.
    fn measure(&mut self, waited: Duration, bytes: usize) -> Option<(u64, u64)> {
        self.waited += waited;
        self.bytes += bytes as u64;
        if self.waited < self.window {
            return None;
        }
        let rate = u128::from(self.bytes) * 1000 / self.waited.as_millis().max(1);
        let measured = (self.bytes, u64::try_from(rate).unwrap_or(u64::MAX));
        *self = Self::new(self.window);
        Some(measured)
    }
}

fn build(stall_timeout: Duration, addresses: Addresses) -> Result<Client, ImageError> {
    // reqwest panics where no provider is installed; a program that has chosen one keeps its choice.
    rustls::crypto::ring::default_provider().install_default().ok();
    let resolver = Arc::new(addresses.clone());
    Client::builder()
        .user_agent(concat!("etcd-compute/", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::custom(move |attempt| follow(attempt, &addresses)))
        // The URL may hold a secret, which is not the next server's to know.
        .referer(false)
        .dns_resolver(resolver)
        .no_proxy()
        .connect_timeout(stall_timeout)
        .read_timeout(stall_timeout)
        // Images come rarely: a connection kept open would only cost memory.
        .pool_max_idle_per_host(0)
        .build()
        .map_err(|error| ImageError::Client { source: Arc::new(error) })
}

fn follow(attempt: redirect::Attempt<'_>, addresses: &Addresses) -> redirect::Action {
    let secure = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
    if attempt.previous().len() > REDIRECTS_MAX {
        return attempt.error(Astray::TooMany);
    }
    match (attempt.url().scheme(), secure) {
        ("http", true) => attempt.error(Astray::Downgrade),
        ("http" | "https", _) => match addresses.permit_url(attempt.url()) {
            Ok(()) => attempt.follow(),
            Err(forbidden) => attempt.error(forbidden),
        },
        // Told by the answer, as what is no address for any client.
        _ => attempt.stop(),
    }
}

/// How a redirect that was not followed is told, in a sentence's part: by its status code, and the URL that it leads to, which may hold
/// secrets. None where it is no redirect.
pub fn leads_nowhere(status: u16, location: Option<&str>) -> Option<String> {
    let is_redirect = matches!(status, 301 | 302 | 303 | 307 | 308);
    let scheme = location.and_then(|location| Url::parse(location).ok()).map(|url| url.scheme().to_owned());
    let how = match scheme.filter(|scheme| scheme.len() <= SCHEME_MAX) {
        Some(scheme) => format!("to a URL of {scheme}:, and only http:// and https:// are followed"),
        None => "and names no place that can be followed".to_owned(),
    };
    is_redirect.then(|| format!("redirects (HTTP status {status}) {how}"))
}

fn text(response: &Response, name: header::HeaderName) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(str::to_owned)
}

fn validators(response: &Response) -> Validators {
    Validators {
        etag: text(response, header::ETAG),
        last_modified: text(response, header::LAST_MODIFIED),
        file: None,
    }
}

/// What stands for exactly these bytes: an entity tag that is not weak or, where there is none, a date of change
/// that was over when the answer was made (RFC 9110, 8.8.2.2).
fn strong(response: &Response) -> Option<String> {
    if let Some(etag) = text(response, header::ETAG) {
        return (!etag.starts_with("W/")).then_some(etag);
    }
    let changed = text(response, header::LAST_MODIFIED)?;
    let answered = text(response, header::DATE)?;
    let parse = |date: &str| jiff::fmt::rfc2822::parse(date).ok().map(|time| time.timestamp());
    (parse(&changed)? < parse(&answered)?).then_some(changed)
}

/// What is there, where an answer gives all of it. The rest of what was begun is none: where the two do not belong together, it is neither
/// of them that is to blame.
fn offered(response: &Response) -> Option<Offer> {
    let validator = (response.status() == StatusCode::OK).then(|| strong(response)).flatten()?;
    Some(Offer { validator, size: response.content_length() })
}

/// Whether a partial answer is the rest of what was begun.
fn continues(response: &Response, begun: &Partial) -> bool {
    let same = text(response, header::ETAG).is_none_or(|etag| begun.validators.etag.as_ref() == Some(&etag));
    let range = text(response, header::CONTENT_RANGE);
    let range = range.as_deref().and_then(content_range);
    same && range.is_some_and(|(first, total)| {
        first == begun.landing.received()
            && (total.is_none() || begun.landing.expected().is_none() || total == begun.landing.expected())
    })
}

/// The first byte and the whole length of `bytes 5-9/10`.
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let first = range.split_once('-')?.0.trim().parse().ok()?;
    Some((first, total.trim().parse().ok()))
}

/// What of this kind lies among the causes of an error.
fn cause<E: std::error::Error + 'static>(error: &reqwest::Error) -> Option<&E> {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crawl_is_told_from_a_pause() {
        let second = Duration::from_secs(1);
        let mut meter = Meter::new(60 * second);
        // One burst buys a minute, and no more.
        let minute = |meter: &mut Meter, bytes| (0..60).find_map(|_| meter.measure(second, bytes));
        assert_eq!(meter.measure(second, 1 << 20), None);
        assert_eq!((0..59).find_map(|_| meter.measure(second, 1)), Some(((1 << 20) + 59, 17_477)));
        assert_eq!(minute(&mut meter, 1), Some((60, 1)));
        assert_eq!(minute(&mut meter, 1024), Some((60 << 10, RATE_MIN)));
    }

    #[test]
    fn a_redirect_that_is_not_followed_says_where_it_leads_and_no_secret() {
        let told = |location| leads_nowhere(302, location).unwrap();
        for (location, wanted) in [
            (
                Some("file:///etc/shadow"),
                "redirects (HTTP status 302) to a URL of file:, and only http:// and https:// are followed",
            ),
            (
                Some("ftp://me:secret@host/x"),
                "redirects (HTTP status 302) to a URL of ftp:, and only http:// and https:// are followed",
            ),
            (Some("http://"), "redirects (HTTP status 302) and names no place that can be followed"),
            (None, "redirects (HTTP status 302) and names no place that can be followed"),
        ] {
            assert_eq!(told(location), wanted);
        }
        assert!(told(Some(&format!("{}:x", "a".repeat(99)))).len() < 99);
        assert!(
            [200, 206, 304, 404].iter().all(|status| leads_nowhere(*status, Some("file:///x")).is_none())
        );
    }

    #[test]
    fn content_ranges_are_read() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, None)));
        for bad in ["bytes */10", "items 5-9/10", "bytes 5/10", ""] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}

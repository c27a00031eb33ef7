//! One client per endpoint and the choice between them.
//!
//! The library's own balancer keeps handing requests to dead endpoints, so we begin with one of them by chance, stay with it
//! until it fails, and then move on to the next. Whether a failed request is tried again there depends
//! on what it does: see [`Repeat`].

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use ec_runtime::Files;
use etcd_client::Client;
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout_at},
};

use super::{
    config::EtcdConfig,
    failure::{Failure, classify},
};
use crate::{StoreError, StoreResult, types::GIVES_SPACE};

/// Before the only endpoint is asked once more: long enough for a listener that is just being opened.
const SECOND_TRY_AFTER: Duration = Duration::from_millis(100);

/// Before etcd is asked again whose users or roles were changed meanwhile; doubled each time, since who makes a cluster's roles changes
/// them dozens of times in a row.
const OUTDATED_PAUSE: Duration = Duration::from_millis(10);
const OUTDATED_PAUSE_MAX: Duration = Duration::from_millis(320);

/// Which connection of an endpoint to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Requests with one answer.
    Requests,
    /// Watches. On a connection of their own, so that a large catch-up does not delay a lease's renewal.
    Watches,
}

/// Whether doing it twice is the same as doing it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    /// Yes: tried again whenever an attempt failed.
    Safe,
    /// No: tried again only if it was certainly not sent.
    Unsafe,
}

/// The endpoints, and which of them is in use.
pub(super) struct Endpoints {
    slots: Vec<Slot>,
    current: AtomicUsize,
    timeout: Duration,
    /// Of the last write nothing was heard, nor of anything since.
    unanswered: AtomicBool,
}

struct Slot {
    requests: Connection,
    watches: Connection,
}

struct Connection {
    url: String,
    config: Arc<EtcdConfig>,
    require_leader: bool,
    /// Held while authenticating, so that requests which start together authenticate once.
    current: Mutex<Current>,
}

/// What is used at the moment.
struct Current {
    client: Client,
    authenticated: bool,
    /// What it was made of.
    files: Files,
}

impl Connection {
    async fn prepare(config: &Arc<EtcdConfig>, url: &str, require_leader: bool) -> StoreResult<Self> {
        let keys = config.tls.iter().filter_map(|tls| tls.client.as_ref()).map(|(_, key)| key.as_path());
        let certificates = config.certificates().chain(keys);
        let files = Files::new(certificates.map(Path::to_owned));
        let client = make(config, url, require_leader).await?;
        let current = Mutex::new(Current { client, authenticated: false, files });
        Ok(Self { url: url.to_owned(), config: Arc::clone(config), require_leader, current })
    }

    /// The client, authenticated where that is wanted. Where its certificates were written anew, one that uses these; what is under way
    /// goes on by the one before.
    async fn client(&self) -> Result<Client, Failure> {
        let mut current = self.current.lock().await;
        if let Some(look) = current.files.changed() {
            match make(&self.config, &self.url, self.require_leader).await {
                Ok(client) => {
                    (current.client, current.authenticated) = (client, false);
                    current.files.use_as(look);
                }
                Err(error) => tracing::warn!(%error, "certificates stay as they were"),
            }
        }
        let client = current.client.clone();
        if !current.authenticated {
            if let (Some(user), Some(password)) = (&self.config.user, &self.config.password) {
                // The token is shared by every clone of the client.
                let credentials = Some((user.clone(), password.clone()));
                client.clone().update_user(credentials).await.map_err(classify)?;
            }
            current.authenticated = true;
        }
        Ok(client)
    }
}

/// A client, which connects when it is used.
async fn make(config: &EtcdConfig, url: &str, require_leader: bool) -> StoreResult<Client> {
    let options = config.options(require_leader).await?;
    Client::connect([url], Some(options)).await.map_err(|error| {
        StoreError::Invalid(format!("etcd endpoint `{url}` cannot be used: {}", text(classify(error))))
    })
}

impl Endpoints {
    /// Checks the settings and makes the clients, which connect when they are used.
    pub(super) async fn prepare(config: &EtcdConfig) -> StoreResult<Self> {
        let urls = config.urls()?;
        config.check_credentials()?;
        let config = Arc::new(config.clone());
        let mut slots = Vec::with_capacity(urls.len());
        for url in urls {
            let requests = Connection::prepare(&config, &url, false).await?;
            // Without a leader a watch would only be silent; so it is made to fail instead.
            let watches = Connection::prepare(&config, &url, true).await?;
            slots.push(Slot { requests, watches });
        }
        // All clients are configured alike, and would all be at the first member, and stay there.
        let current = AtomicUsize::new(rand::random_range(0..slots.len()));
        Ok(Self { slots, current, timeout: config.timeout, unanswered: AtomicBool::new(false) })
    }

    /// The endpoints for messages.
    pub(super) fn names(&self) -> String {
        let urls: Vec<_> = self.slots.iter().map(|slot| slot.requests.url.as_str()).collect();
        urls.join(", ")
    }

    /// The time for one request to one endpoint.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Which endpoint is in use.
    pub(super) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed) % self.slots.len()
    }

    /// Moves away from an endpoint, unless somebody else has done so meanwhile. Answers the next one.
    pub(super) fn leave(&self, failed: usize) -> usize {
        let next = (failed + 1) % self.slots.len();
        match self.current.compare_exchange(failed, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => {
                if next != failed {
                    tracing::debug!(
                        from = self.slots[failed].requests.url,
                        to = self.slots[next].requests.url,
                        "changing etcd endpoint"
                    );
                }
                next
            }
            Err(other) => other % self.slots.len(),
        }
    }

    /// Whether there are tokens at all: who has none is known by a certificate, or not known.
    pub(super) fn has_user(&self) -> bool {
        self.slots.iter().any(|slot| slot.requests.config.user.is_some())
    }

    /// Lets the next request of a lane authenticate again.
    pub(super) async fn forget_token(&self, lane: Lane, index: usize) {
        self.connection(lane, index).current.lock().await.authenticated = false;
    }

    fn connection(&self, lane: Lane, index: usize) -> &Connection {
        let slot = &self.slots[index % self.slots.len()];
        match lane {
            Lane::Requests => &slot.requests,
            Lane::Watches => &slot.watches,
        }
    }

    /// Runs `op` with the client of the endpoint in use, and of the others where that one fails.
    ///
    /// Takes at most the timeout for every endpoint; where all refuse connections, next to no time.
    pub(super) async fn run<T, F, R>(&self, lane: Lane, repeat: Repeat, op: F) -> Result<T, Failure>
    where
        F: Fn(Client) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        self.run_at(lane, repeat, |client, _| op(client)).await
    }

    /// Like [`Self::run`], for an `op` that wants to know which endpoint it got.
    pub(super) async fn run_at<T, F, R>(&self, lane: Lane, repeat: Repeat, op: F) -> Result<T, Failure>
    where
        F: Fn(Client, usize) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        let count = self.slots.len();
        let deadline = Instant::now() + self.timeout * u32::try_from(count).unwrap_or(u32::MAX);
        let mut index = self.current();
        let mut authenticate_again = true;
        let mut attempt = 1;
        let mut pause = OUTDATED_PAUSE;
        loop {
            let until = deadline.min(Instant::now() + self.timeout);
            let failure = match self.attempt(lane, index, until, &op).await {
                Ok(value) => {
                    if lane == Lane::Requests {
                        self.unanswered.store(false, Ordering::Relaxed);
                    }
                    return Ok(value);
                }
                Err(failure) => failure,
            };
            match failure {
                Failure::StaleToken(_) if authenticate_again => {
                    authenticate_again = false;
                    self.forget_token(lane, index).await;
                    continue;
                }
                // Asked of the same one again: there is nothing wrong with it.
                Failure::Outdated(_) if Instant::now() + pause < deadline => {
                    sleep(pause).await;
                    // Some tokens tell as of when they are; to log in anew costs etcd more than what is asked.
                    if pause > OUTDATED_PAUSE {
                        self.forget_token(lane, index).await;
                    }
                    pause = (pause * 2).min(OUTDATED_PAUSE_MAX);
                    continue;
                }
                Failure::Broken(_) if repeat == Repeat::Unsafe => {
                    self.unanswered.store(true, Ordering::Relaxed);
                    self.leave(index);
                    return Err(failure);
                }
                Failure::Unsent(_) | Failure::Broken(_) => index = self.leave(index),
                definite => return Err(definite),
            }
            if attempt >= count.max(2) || Instant::now() >= deadline {
                return Err(failure);
            }
            if attempt >= count {
                sleep(SECOND_TRY_AFTER).await;
            }
            attempt += 1;
        }
    }

    async fn attempt<T, F, R>(&self, lane: Lane, index: usize, until: Instant, op: &F) -> Result<T, Failure>
    where
        F: Fn(Client, usize) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        let silent = || format!("no answer within {:?}", self.timeout);
        // Until the client is there, the request itself has not been sent.
        let client = match timeout_at(until, self.connection(lane, index).client()).await {
            Ok(Ok(client)) => client,
            Ok(Err(Failure::Broken(text))) => return Err(Failure::Unsent(text)),
            Ok(Err(failure)) => return Err(failure),
            Err(_) => return Err(Failure::Unsent(silent())),
        };
        timeout_at(until, op(client, index)).await.unwrap_or_else(|_| Err(Failure::Broken(silent())))
    }

    /// What the caller is told. What is safe to repeat is never reported as of unknown outcome; but who wanted to find out what became
    /// of a write is told that nobody knows.
    pub(super) fn error(&self, failure: Failure, repeat: Repeat) -> StoreError {
        match failure {
            Failure::Broken(text) if repeat == Repeat::Unsafe => StoreError::Unknown(text),
            Failure::Full(text) if repeat == Repeat::Unsafe => StoreError::Full(text),
            Failure::Unsent(mut detail) | Failure::Broken(mut detail) | Failure::Outdated(mut detail) => {
                if self.unanswered.load(Ordering::Relaxed) {
                    detail.push_str(UNANSWERED);
                }
                StoreError::Unreachable { endpoints: self.names(), detail }
            }
            Failure::Full(text) => StoreError::Refused(format!("{text}; what helps: {GIVES_SPACE}")),
            failure => StoreError::Refused(text(failure)),
        }
    }
}

/// What is told besides after a write of which nothing was heard.
const UNANSWERED: &str = ", and a write before this was not answered either: it may have been done, so look before you ask for it again";

/// The text of a failure whose kind no longer matters.
pub(super) fn text(failure: Failure) -> String {
    match failure {
        Failure::Unsent(text)
        | Failure::Broken(text)
        | Failure::StaleToken(text)
        | Failure::Outdated(text)
        | Failure::TooBig(text)
        | Failure::Full(text)
        | Failure::Refused(text) => text,
        Failure::LeaseGone => "requested lease not found".into(),
        Failure::LeaseExists => "lease already exists".into(),
        Failure::Compacted => "required revision has been compacted".into(),
        Failure::Future => "required revision is a future revision".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn endpoints() -> Endpoints {
        let config = EtcdConfig {
            endpoints: vec!["127.0.0.1:1".into(), "127.0.0.1:2".into()],
            timeout: Duration::from_secs(2),
            ..EtcdConfig::default()
        };
        Endpoints::prepare(&config).await.unwrap()
    }

    /// A write to an etcd whose users or roles are changed while it looks at each of the first `changes` tries; and how many there were.
    async fn write(endpoints: &Endpoints, changes: usize) -> (Result<(), Failure>, usize) {
        let tries = AtomicUsize::new(0);
        let written = endpoints.run(Lane::Requests, Repeat::Unsafe, |_| {
            let before = tries.fetch_add(1, Ordering::Relaxed);
            async move {
                if before < changes { Err(Failure::Outdated("auth store is old".into())) } else { Ok(()) }
            }
        });
        (written.await, tries.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn clients_begin_at_different_members_and_name_them_as_they_are_configured() {
        let mut begun = std::collections::BTreeSet::new();
        for _ in 0..64 {
            let endpoints = endpoints().await;
            assert_eq!(endpoints.names(), "http://127.0.0.1:1, http://127.0.0.1:2");
            begun.insert(endpoints.current());
        }
        assert_eq!(begun, [0, 1].into());
    }

    #[tokio::test(start_paused = true)]
    async fn what_meets_changes_of_users_is_asked_for_until_they_end() {
        let endpoints = endpoints().await;
        let (begun, first) = (Instant::now(), endpoints.current());
        let (written, tries) = write(&endpoints, 6).await;
        assert!(written.is_ok() && tries == 7, "{written:?} after {tries}");
        assert!(begun.elapsed() >= OUTDATED_PAUSE * 63, "the pauses grow: {:?}", begun.elapsed());
        assert_eq!(endpoints.current(), first, "there is nothing wrong with the one that says so");
    }

    #[tokio::test(start_paused = true)]
    async fn what_meets_changes_of_users_for_ever_was_not_done() {
        let endpoints = endpoints().await;
        let begun = Instant::now();
        let (written, tries) = write(&endpoints, usize::MAX).await;
        let took = begun.elapsed();
        assert!(took > Duration::from_secs(3) && took <= Duration::from_secs(4), "{took:?}");
        assert!(tries < 30, "{tries} tries");
        let error = endpoints.error(written.unwrap_err(), Repeat::Unsafe);
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    }
}

//! The cache as its user sees it.

use std::{
    collections::HashSet,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ec_model::{BaseImage, ImageRef, Progress};
use ec_runtime::Host;
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use ipnet::IpNet;
use tokio::sync::watch;

use crate::{
    ImageError, ImageStore, StoreSection,
    access::{Addresses, Local},
    flight::{self, Flights, State},
    http::Origin,
    index::Index,
    landing::Ground,
    local,
    shelf::{Landed, Pin, Shelf},
    source::{Source, Wanted},
    store,
    turns::Turns,
};

/// At once from files and the image store, which wait for no server that somebody else may have made slow.
const AT_ONCE: usize = 8;

/// How a cache is set up.
#[derive(Debug, Clone)]
pub struct CacheConfig {
    /// Where it lies; made where there is none.
    pub directory: PathBuf,
    /// The most that bases and downloads under way may take together, in bytes.
    pub max_bytes: u64,
    /// A connection on which not a byte comes for so long is given up, and so is one on which less than
    /// 1 KiB a second comes for twice as long.
    pub stall_timeout: Duration,
    /// What fails on the way is tried again, as long as the last progress is not longer ago.
    pub patience: Duration,
    /// The directories below which files may be read as images.
    pub local: Vec<PathBuf>,
    /// Networks that may be fetched from although they are loopback or link-local.
    pub allow_addresses: Vec<IpNet>,
    /// The image store that objects may be fetched from.
    pub store: Option<StoreSection>,
    /// The machine that it lies on.
    pub host: Host,
}

impl CacheConfig {
    /// Long enough for a server that has to wake its disks.
    pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);

    /// Long enough for a server to start anew; who asked is told of what takes longer.
    pub const PATIENCE: Duration = Duration::from_secs(20);

    /// A cache of at most `max_bytes` in `directory`, with the usual times, that reads no local files.
    pub fn new(directory: impl Into<PathBuf>, max_bytes: u64) -> Self {
        Self {
            directory: directory.into(),
            max_bytes,
            stall_timeout: Self::STALL_TIMEOUT,
            patience: Self::PATIENCE,
            local: Vec::new(),
            allow_addresses: Vec::new(),
            store: None,
            host: Host::default(),
        }
    }
}

/// A cache of base images. Clones are the same cache; a directory belongs to one cache at a time.
#[derive(Clone)]
pub struct ImageCache {
    inner: Arc<Inner>,
}

type Opened = Shared<BoxFuture<'static, Result<Ground, ImageError>>>;

/// The files of the cache, once their file system has answered.
struct Opening {
    host: Host,
    open: Arc<dyn Fn() -> Result<Ground, ImageError> + Send + Sync>,
    /// The try under way, or the one that did.
    last: Mutex<Option<Opened>>,
}

impl Opening {
    fn last(&self) -> MutexGuard<'_, Option<Opened>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) -> Opened {
        let (host, open) = (self.host.clone(), Arc::clone(&self.open));
        async move { host.blocking(move || open()).await.map_err(|_| ImageError::Interrupted)? }
            .boxed()
            .shared()
    }

    async fn ground(&self) -> Result<Ground, ImageError> {
        let this = self.last().get_or_insert_with(|| self.begin()).clone();
        let outcome = this.clone().await;
        if outcome.is_err() {
            // The file system may be well again when the next one asks.
            self.last().take_if(|last| last.ptr_eq(&this));
        }
        outcome
    }
}

struct Inner {
    host: Host,
    opening: Opening,
    local: Arc<Local>,
    origin: Origin,
    store: Option<ImageStore>,
    stall_timeout: Duration,
    patience: Duration,
    flights: Arc<Flights>,
    turns: Turns,
}

/// A base image that stays in the cache at least as long as this value lives.
///
/// Once an overlay lies on it, the closure given to [`ImageCache::open`] must name its digest before
/// this is dropped.
#[derive(Clone)]
pub struct CachedImage {
    /// The image.
    pub base: BaseImage,
    _pin: Arc<Pin>,
}

impl std::fmt::Debug for CachedImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachedImage").field("base", &self.base).finish_non_exhaustive()
    }
}

impl ImageCache {
    /// Opens the cache: makes its directories and sweeps what a crash left.
    ///
    /// `in_use` gives the digests of the bases that overlays lie on. It is asked from a blocking thread,
    /// and only when something has to be evicted.
    pub async fn open(
        config: CacheConfig,
        in_use: impl Fn() -> HashSet<String> + Send + Sync + 'static,
    ) -> Result<Self, ImageError> {
        let cache = Self::begin(config, in_use)?;
        cache.opened().await?;
        Ok(cache)
    }

    /// The same, without waiting for the file system that it lies on: that is [`Self::opened`], and whoever fetches does it, too.
    pub fn begin(
        config: CacheConfig,
        in_use: impl Fn() -> HashSet<String> + Send + Sync + 'static,
    ) -> Result<Self, ImageError> {
        let CacheConfig {
            directory,
            max_bytes,
            stall_timeout,
            patience,
            local,
            allow_addresses,
            store,
            host,
        } = config;
        let store = store.as_ref().map(ImageStore::open_directly).transpose();
        let store = store.map_err(|error| ImageError::BadStore { source: Arc::new(error) })?;
        let in_use = Arc::new(in_use);
        let open = move || {
            let in_use = Arc::clone(&in_use);
            let shelf = Shelf::open(&directory, max_bytes, Box::new(move || in_use()))?;
            let index = Index::open(&directory)?;
            index.prune(|entry| shelf.has(&entry.digest, entry.size))?;
            Ok(Ground { shelf: Arc::new(shelf), index: Arc::new(index) })
        };
        let opening = Opening { host: host.clone(), open: Arc::new(open), last: Mutex::default() };
        let inner = Inner {
            host,
            opening,
            local: Arc::new(Local(local)),
            store,
            stall_timeout,
            patience,
            origin: Origin::new(stall_timeout, patience, Addresses(allow_addresses.into())),
            flights: Arc::default(),
            turns: Turns::new(AT_ONCE),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns once its directories are made and swept, however long the file system takes to answer.
    ///
    /// # Errors
    /// The cache cannot be used now. It is opened anew for whoever asks, or fetches, next.
    pub async fn opened(&self) -> Result<(), ImageError> {
        self.inner.opening.ground().await.map(drop)
    }

    /// The image, from the cache where its origin says that it is still the same.
    ///
    /// However many ask for the same image at once, it comes once, and `progress` tells each of them how
    /// far it is. Dropping the future lets go; some seconds after the last one did the download ends and leaves
    /// nothing behind. An image whose disk is bigger than `max_virtual_size` bytes is refused to this
    /// caller as soon as that is known.
    ///
    /// With a digest demanded that this very URL gave before, the origin is not asked at all. What only others'
    /// URLs gave is fetched: a digest is no secret, and an image may be. An origin that cannot
    /// be reached does not matter where the cache has what it gave last.
    pub async fn fetch(
        &self,
        wanted: &ImageRef,
        max_virtual_size: Option<u64>,
        progress: watch::Sender<Option<Progress>>,
    ) -> Result<CachedImage, ImageError> {
        let key = flight::key(wanted);
        let wanted = Wanted::parse(wanted)?;
        let too_large = |size: u64, needed: Option<u64>| {
            let allowed = max_virtual_size.filter(|allowed| size > *allowed)?;
            Some(ImageError::VirtualSize { url: wanted.label.clone(), needed, allowed })
        };
        let fits = |size: u64| too_large(size, Some(size)).map_or(Ok(()), Err);
        let hand_out = |landed: Landed| {
            fits(landed.base.virtual_size)?;
            Ok(CachedImage { base: landed.base, _pin: landed.pin })
        };
        self.inner.permit(&wanted)?;
        if wanted.sha256.is_some() || wanted.sha512.is_some() {
            let (ground, wanted) = (self.inner.opening.ground().await?, wanted.clone());
            let found = self.inner.host.blocking(move || ground.known(&wanted)).await;
            if let Some((_, landed)) = found.map_err(|_| ImageError::Interrupted)? {
                return hand_out(landed);
            }
        }
        let flight = self.inner.flights.join(key, |state| {
            let (inner, wanted) = (Arc::clone(&self.inner), wanted.clone());
            async move { inner.bring(wanted, state).await }
        });
        let mut state = flight.state();
        let outcome = loop {
            {
                let now = state.borrow_and_update();
                if now.progress.is_some() {
                    progress.send_if_modified(|told| {
                        let news = *told != now.progress;
                        told.clone_from(&now.progress);
                        news
                    });
                }
                if let Some(outcome) = &now.outcome {
                    break outcome.clone().and_then(hand_out);
                }
                if let Err(error) = now.virtual_size.map_or(Ok(()), fits) {
                    break Err(error);
                }
                if let Some(error) = too_large(now.at_least, None) {
                    break Err(error);
                }
            }
            if state.changed().await.is_err() {
                break Err(ImageError::Interrupted);
            }
        };
        flight.end();
        outcome
    }

    /// How many bytes of images have been downloaded since the cache was opened, those of failed tries among them.
    pub fn downloaded(&self) -> u64 {
        self.inner.origin.downloaded()
    }
}

impl Inner {
    /// Whether this node fetches from there at all, whatever the cache has.
    fn permit(&self, wanted: &Wanted) -> Result<(), ImageError> {
        match &wanted.source {
            Source::Http(url) => self.origin.permit(url, &wanted.label),
            Source::File { path, .. } => self.local.permit(path),
            Source::Object(url) => self.store_of(url, &wanted.label).map(drop),
        }
    }

    /// The store that this node reads objects of.
    fn store_of(&self, url: &url::Url, label: &str) -> Result<&ImageStore, ImageError> {
        self.store.as_ref().filter(|store| store.has(url.as_str())).ok_or_else(|| ImageError::NoStore {
            url: label.to_owned(),
            known: self.store.as_ref().map(|store| store.url().to_owned()),
        })
    }

    async fn bring(&self, wanted: Wanted, state: watch::Sender<State>) -> Result<Landed, ImageError> {
        let ground = self.opening.ground().await?;
        match wanted.source.clone() {
            // Whose turn it is it knows itself: who is slow gives it up.
            Source::Http(_) => self.origin.bring(ground, wanted, state).await,
            Source::Object(url) => {
                let _turn = self.turns.take(&state).await?;
                let store = self.store_of(&url, &wanted.label)?;
                let came = |bytes| self.origin.came(bytes);
                let times = (self.stall_timeout, self.patience);
                store::bring(store, ground, wanted, state, times, came).await
            }
            Source::File { path, .. } => {
                let _turn = self.turns.take(&state).await?;
                let local = Arc::clone(&self.local);
                let url = wanted.label.clone();
                let brought = local::bring(&self.host, local, ground, wanted, path.clone(), state).await;
                let Err(ImageError::Local { source, .. }) = &brought else { return brought };
                let is_gone = source.kind() == io::ErrorKind::NotFound;
                let (store, local) = (self.store.clone(), Arc::clone(&self.local));
                let look = move || {
                    if store.is_some_and(|store| store.misses(&path)) {
                        return Some(ImageError::StoreAway { url });
                    }
                    let directory = local.misses(&path).filter(|_| is_gone)?.to_owned();
                    Some(ImageError::LocalAway { path, directory })
                };
                let away = self.host.blocking(look).await.ok().flatten();
                away.map_or(brought, Err)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_opening_that_failed_is_tried_again_for_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("images");
        std::fs::write(&directory, "in the way").unwrap();
        let cache = ImageCache::begin(CacheConfig::new(&directory, 1 << 20), HashSet::new).unwrap();
        cache.opened().await.unwrap_err();
        std::fs::remove_file(&directory).unwrap();
        cache.opened().await.unwrap();
        // Another opening would find the directory locked.
        cache.opened().await.unwrap();
    }
}

//! What the tests share.

use std::{
    collections::HashSet,
    future::Future,
    path::Path,
    time::{Duration, Instant},
};

use ec_image::{CacheConfig, CachedImage, ImageCache, ImageError};
use ec_model::{ImageRef, Progress};
use tokio::sync::watch;

pub(crate) use ec_image::testing::{Server, Step, answer, ok};

pub(crate) fn image(url: &str) -> ImageRef {
    ImageRef::at(url)
}

/// A raw disk that no two seeds share.
pub(crate) fn disk(seed: u8, sectors: usize) -> Vec<u8> {
    let mut bytes = vec![0; sectors * 512];
    for (place, byte) in bytes.iter_mut().enumerate() {
        *byte = seed.wrapping_add(u8::try_from(place % 251).unwrap());
    }
    bytes[0] = 0;
    bytes
}

pub(crate) async fn open(directory: &Path) -> ImageCache {
    open_with(directory, 64 << 20, Duration::from_secs(10)).await
}

pub(crate) async fn open_with(directory: &Path, max_bytes: u64, stall_timeout: Duration) -> ImageCache {
    open_cache(config(directory, max_bytes, stall_timeout)).await
}

/// A cache that may fetch from the tests' servers and read the tests' files.
pub(crate) fn config(directory: &Path, max_bytes: u64, stall_timeout: Duration) -> CacheConfig {
    CacheConfig {
        stall_timeout,
        patience: Duration::from_secs(2),
        local: vec![std::env::temp_dir()],
        allow_addresses: vec!["127.0.0.0/8".parse().unwrap()],
        ..CacheConfig::new(directory, max_bytes)
    }
}

pub(crate) async fn open_cache(config: CacheConfig) -> ImageCache {
    ImageCache::open(config, HashSet::new).await.unwrap()
}

pub(crate) async fn fetch(cache: &ImageCache, image: &ImageRef) -> Result<CachedImage, ImageError> {
    cache.fetch(image, None, no_progress()).await
}

pub(crate) fn no_progress() -> watch::Sender<Option<Progress>> {
    watch::Sender::new(None)
}

/// The error with all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

pub(crate) fn temporary_files(directory: &Path) -> usize {
    std::fs::read_dir(directory.join("tmp")).unwrap().count()
}

/// Waits for a state, not for a time.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, check: impl Fn() -> F) {
    let begun = Instant::now();
    while !check().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

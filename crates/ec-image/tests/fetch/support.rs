//! A web server that does exactly as a script says, also what no real one would.

use std::{
    collections::HashSet,
    future::Future,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ec_image::{CacheConfig, CachedImage, ImageCache, ImageError};
use ec_model::{ImageRef, Progress};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::{Semaphore, watch},
};

/// One thing that the server does on a connection; after the last it closes.
pub(crate) enum Step {
    Send(Vec<u8>),
    /// Waits for a permit, without end where none comes.
    Wait(Arc<Semaphore>),
}

pub(crate) struct Server {
    pub(crate) url: String,
    hits: Arc<AtomicUsize>,
    pub(crate) heads: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    /// `script` gets the number of the request (0 is the first) and its head.
    pub(crate) async fn start(script: impl Fn(usize, &str) -> Vec<Step> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (hits, heads) = (Arc::new(AtomicUsize::new(0)), Arc::<Mutex<Vec<String>>>::default());
        let script = Arc::new(script);
        let (count, log) = (Arc::clone(&hits), Arc::clone(&heads));
        let task = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let (count, log, script) = (Arc::clone(&count), Arc::clone(&log), Arc::clone(&script));
                tokio::spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        match socket.read_u8().await {
                            Ok(byte) => head.push(byte),
                            Err(_) => return,
                        }
                    }
                    let head = String::from_utf8(head).unwrap();
                    let number = count.fetch_add(1, Ordering::SeqCst);
                    log.lock().unwrap().push(head.clone());
                    for step in script(number, &head) {
                        match step {
                            Step::Send(bytes) => {
                                if socket.write_all(&bytes).await.is_err() {
                                    return;
                                }
                            }
                            Step::Wait(permit) => permit.acquire().await.unwrap().forget(),
                        }
                    }
                    let _ = socket.shutdown().await;
                });
            }
        });
        Self { url, hits, heads, task }
    }

    pub(crate) fn hits(&self) -> usize {
        self.hits.load(Ordering::SeqCst)
    }

    pub(crate) fn image(&self) -> ImageRef {
        image(&format!("{}/disk", self.url))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn image(url: &str) -> ImageRef {
    ImageRef { url: url.to_owned(), sha256: None }
}

pub(crate) fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend(body);
    bytes
}

pub(crate) fn ok(body: &[u8]) -> Vec<Step> {
    vec![Step::Send(answer("200 OK", "", body))]
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
    let config = CacheConfig { directory: directory.to_owned(), max_bytes, stall_timeout };
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

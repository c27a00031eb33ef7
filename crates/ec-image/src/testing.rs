//! A web server for tests that does exactly as a script says, also what no real one would.
#![expect(clippy::unwrap_used, reason = "support of tests, which end by panicking")]

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use ec_model::ImageRef;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::Semaphore,
};

/// One thing that the server does on a connection; after the last it closes.
pub enum Step {
    /// Sends these bytes.
    Send(Vec<u8>),
    /// Waits for a permit, without end where none comes.
    Wait(Arc<Semaphore>),
}

/// The server; it ends when the value is dropped.
pub struct Server {
    /// Its URL, without a slash at the end.
    pub url: String,
    hits: Arc<AtomicUsize>,
    /// The requests' heads, in the order in which they came.
    pub heads: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    /// `script` gets the number of the request (0 is the first) and its head.
    pub async fn start(script: impl Fn(usize, &str) -> Vec<Step> + Send + Sync + 'static) -> Self {
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

    /// How many requests came.
    pub fn hits(&self) -> usize {
        self.hits.load(Ordering::SeqCst)
    }

    /// An image on it.
    pub fn image(&self) -> ImageRef {
        ImageRef::at(format!("{}/disk", self.url))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An answer with the body's length; further headers end with `\r\n` each.
pub fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend(body);
    bytes
}

/// The body, as it should be answered.
pub fn ok(body: &[u8]) -> Vec<Step> {
    vec![Step::Send(answer("200 OK", "", body))]
}

//! Images whose bytes are copied from a URL into the image store: their origin is asked once, whatever number of nodes there
//! are.

use std::{io, path::Path, time::Duration};

use ec_runtime::exit::{Failure, chain};
use futures::TryStreamExt;
use tokio_util::io::StreamReader;

use super::send::Sender;

/// So long nothing may come of what is fetched.
const STALLED: Duration = Duration::from_secs(60);

/// Opens what lies at this URL.
pub(super) async fn sender(url: &str) -> Result<Sender, Failure> {
    if let Some(path) = url.strip_prefix("file://") {
        return Sender::file(Path::new(path)).await;
    }
    let unreachable = |error: reqwest::Error| {
        Failure::failed(format!("cannot fetch {url}: {}; nothing was added", chain(&error.without_url())))
    };
    // Packed or not, the digests are of what is published: nothing is unpacked on the way.
    let client = reqwest::Client::builder()
        .user_agent(concat!("etcd-compute/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(STALLED)
        .read_timeout(STALLED)
        .build()
        .map_err(unreachable)?;
    let answer = client.get(url).send().await.map_err(unreachable)?;
    if !answer.status().is_success() {
        let status = answer.status().as_u16();
        return Err(Failure::failed(format!(
            "{url} was answered with HTTP status {status}: nothing was added"
        )));
    }
    let size = answer.content_length();
    let pieces = answer.bytes_stream().map_err(|error| io::Error::other(chain(&error.without_url())));
    Ok(Sender::of(StreamReader::new(Box::pin(pieces)), url.to_owned(), size))
}

//! What a distribution publishes of an image, asked for when it is added.

use std::{collections::BTreeMap, time::Duration};

use ec_model::ImageRef;
use ec_runtime::exit::{Failure, UNREACHABLE, chain};

use super::{
    fetched::{answer, by_proxy},
    known::Known,
};
use crate::bounded;

/// Files of digests are some kilobytes.
const LENGTH_MAX: usize = 1 << 20;

/// Nobody waits longer for one.
const PATIENCE: Duration = Duration::from_secs(30);

/// The image, with the digest that is published.
pub(crate) async fn published(known: Known, mirrors: &BTreeMap<String, String>) -> Result<ImageRef, Failure> {
    found(known, mirrors).await.map_err(|failure| Failure {
        message: format!("{}; `image_mirrors` of schedule.yaml names another place", failure.message),
        ..failure
    })
}

async fn found(known: Known, mirrors: &BTreeMap<String, String>) -> Result<ImageRef, Failure> {
    let (url, sums) = known.urls(mirrors);
    let text = read(&sums).await?;
    let name = known.name;
    known
        .image(url, &text)
        .ok_or_else(|| Failure::failed(format!("{sums} tells no SHA-256 and no SHA-512 of {name}")))
}

async fn read(url: &str) -> Result<String, Failure> {
    let unreachable = |error: reqwest::Error| Failure {
        code: UNREACHABLE,
        message: format!(
            "cannot read the published digests at {url}{}: {}",
            by_proxy(url),
            chain(&error.without_url())
        ),
    };
    // A digest that came another way than by HTTPS proves nothing, unless that is what was configured.
    let client = reqwest::Client::builder().https_only(url.starts_with("https://")).timeout(PATIENCE);
    let answer = answer(client, url, unreachable).await?;
    let bytes = bounded::read(answer, LENGTH_MAX)
        .await
        .map_err(unreachable)?
        .ok_or_else(|| Failure::failed(format!("{url} is too large for a file of digests")))?;
    String::from_utf8(bytes).map_err(|_| Failure::failed(format!("{url} is not text")))
}

//! How often an image is downloaded of its origin for fifty nodes: where it was copied to the image store, from which nodes fetch it,
//! against each node fetching it from its origin.

use std::{collections::HashSet, fs, path::Path};

use anyhow::{Context, Result, ensure};
use ec_image::{
    CacheConfig, ImageCache, StoreSection,
    testing::{Server, ok},
};
use ec_model::ImageRef;
use ec_tests::{Stack, tiny_image};
use futures::future::try_join_all;
use tokio::sync::watch;

use crate::stats::{Figure, Goal, Samples};

const NODES: usize = 50;
/// Where the store is.
const PLACE: &str = "image-store";
/// What each node's cache may hold, in bytes.
const ROOM: u64 = 1 << 30;
/// How often the origin may be asked for all of it.
const DOWNLOADS: f64 = 1.5;

/// Measures with the stack's command line; nodes are as many image caches as agents would have.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let image = fs::read(tiny_image())?;
    let server = Server::start(move |_, _| ok(&image)).await;
    let place = stack.directory().join(PLACE);
    let store = format!("file://{}", place.display());
    let section: StoreSection = serde_json::from_value(serde_json::json!({"url": store}))?;
    let file = stack.file("schedule.yaml");
    let before = fs::read_to_string(&file)?;
    fs::write(&file, format!("{before}\nimage_store: {{url: \"{store}\"}}\n"))?;
    let copied = copied(stack, &server);
    fs::write(&file, before)?;
    let copied = copied?;
    let (mut ours, mut bare) = (Samples::default(), Samples::default());
    fetched(stack.directory(), "store", &section, &copied).await?;
    let once = downloads(&server);
    ours.push(once);
    fetched(stack.directory(), "origin", &section, &server.image()).await?;
    bare.push(downloads(&server) - once);
    Ok(vec![Figure {
        name: "downloads of an image's origin, by 50 nodes",
        unit: "downloads",
        ours,
        bare: Some(("the same without `image add --copy`", bare)),
        goals: vec![Goal::AtMost(DOWNLOADS)],
    }])
}

/// The image, once it lies in the store.
fn copied(stack: &Stack, server: &Server) -> Result<ImageRef> {
    let output = stack.eschedule(&["image", "add", "copied", &server.image().url, "--copy", "-o", "json"])?;
    ensure!(output.status.success(), "{output:?}");
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let text = |field: &str| shown[field].as_str().map(str::to_owned);
    let url = text("url").context("it has a URL")?;
    Ok(ImageRef { sha256: text("sha256"), ..ImageRef::at(url) })
}

/// How often it was asked for.
#[expect(clippy::cast_precision_loss, reason = "some hundreds")]
fn downloads(server: &Server) -> f64 {
    let heads = server.heads.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    heads.iter().filter(|head| head.starts_with("GET ")).count() as f64
}

/// Has each node fetch it, all at once.
async fn fetched(directory: &Path, name: &str, store: &StoreSection, image: &ImageRef) -> Result<()> {
    let (loopback, place) = ("127.0.0.0/8".parse()?, directory.join(PLACE));
    let nodes = (0..NODES).map(async |node| {
        let directory = directory.join(format!("{name}-{node}"));
        let config = CacheConfig {
            store: Some(store.clone()),
            local: vec![place.clone()],
            allow_addresses: vec![loopback],
            ..CacheConfig::new(&directory, ROOM)
        };
        let cache = ImageCache::open(config, HashSet::new).await?;
        let fetched = cache.fetch(image, None, watch::Sender::new(None)).await?;
        drop((fetched, cache));
        fs::remove_dir_all(&directory).with_context(|| format!("failed to remove {}", directory.display()))
    });
    try_join_all(nodes).await.map(drop)
}

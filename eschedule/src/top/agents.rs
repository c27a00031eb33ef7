//! What the agents' own ports say of what their guests use.

use std::time::Duration;

use ec_cloud::NodeView;
use ec_model::NodeId;
use ec_runtime::exit::Failure;
use futures::StreamExt;
use reqwest::{Client, redirect};

use super::rates::Reading;
use crate::{config::Settings, reach::trust};

/// So long one may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// So many are asked at a time.
const CONCURRENCY: usize = 16;

/// A way to them.
#[derive(Clone)]
pub(super) struct Agents(Client);

impl Agents {
    /// What is trusted of etcd is trusted of agents.
    pub(super) fn new(settings: &Settings) -> Result<Self, Failure> {
        let builder = Client::builder().timeout(PATIENCE).redirect(redirect::Policy::none()).no_proxy();
        let builder = match &settings.etcd.tls {
            Some(tls) => builder.tls_backend_preconfigured(trust(tls).map_err(Failure::usage)?),
            // Agents with TLS cannot be known for what they are then.
            None => builder.tls_certs_only([]),
        };
        let failed = |error| Failure::failed(format!("failed to set up HTTP: {error}"));
        Ok(Self(builder.build().map_err(failed)?))
    }

    /// Asks each node's agent; none where it cannot be reached, or does not know.
    pub(super) async fn ask(&self, nodes: &[NodeView]) -> Vec<(NodeId, Option<Reading>)> {
        let ask = async |(node, url): (NodeId, Option<String>)| {
            let reading = match url {
                Some(url) => self.reading(&url).await.ok(),
                None => None,
            };
            (node, reading)
        };
        let asked: Vec<_> = nodes.iter().map(|node| (node.node, node.url.clone())).collect();
        futures::stream::iter(asked).map(ask).buffer_unordered(CONCURRENCY).collect().await
    }

    async fn reading(&self, url: &str) -> reqwest::Result<Reading> {
        self.0.get(format!("{url}/usage")).send().await?.error_for_status()?.json().await
    }
}

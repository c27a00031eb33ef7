//! What the agents' own ports say.

use std::time::Duration;

use ec_cloud::NodeView;
use ec_model::NodeId;
use ec_runtime::exit::{Failure, chain};
use futures::StreamExt;
use reqwest::{Client, redirect};
use serde::de::DeserializeOwned;

use crate::{bounded, config::Settings, reach::trust};

/// So long one may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// So many are asked at a time: where packet rules drop what is sent to a thousand, each is waited for in vain.
const CONCURRENCY: usize = 128;
/// An answer of more bytes is none: what an agent with ten thousand instances says takes a few megabytes.
const LENGTH_MAX: usize = 16 << 20;

/// A way to them.
#[derive(Clone)]
pub(crate) struct Agents(Client);

impl Agents {
    /// What is trusted of etcd is trusted of agents.
    pub(crate) fn new(settings: &Settings) -> Result<Self, Failure> {
        let builder = Client::builder().timeout(PATIENCE).redirect(redirect::Policy::none()).no_proxy();
        let builder = match &settings.etcd.tls {
            Some(tls) => builder.tls_backend_preconfigured(trust(tls).map_err(Failure::usage)?),
            // Agents with TLS cannot be known for what they are then.
            None => builder.tls_certs_only([]),
        };
        let failed = |error| Failure::failed(format!("failed to set up HTTP: {error}"));
        Ok(Self(builder.build().map_err(failed)?))
    }

    /// Asks each node's agent for what it says at `path`, a JSON document; none where it has no port. The error says why it does not.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        nodes: &[NodeView],
        path: &str,
    ) -> Vec<(NodeId, Option<Result<T, String>>)> {
        let ask = async |(node, url): (NodeId, Option<String>)| {
            let answer = match url {
                Some(url) => Some(self.one(&format!("{url}{path}")).await),
                None => None,
            };
            (node, answer)
        };
        let asked: Vec<_> = nodes.iter().map(|node| (node.node, node.url.clone())).collect();
        futures::stream::iter(asked).map(ask).buffer_unordered(CONCURRENCY).collect().await
    }

    /// Whatever the status: that something is not well stands in a document, too.
    async fn one<T: DeserializeOwned>(&self, url: &str) -> Result<T, String> {
        let failed = |error: reqwest::Error| chain(&error);
        let answer = self.0.get(url).send().await.map_err(failed)?;
        let document = bounded::read(answer, LENGTH_MAX)
            .await
            .map_err(failed)?
            .ok_or_else(|| format!("{url} answered with more than {} MB", LENGTH_MAX >> 20))?;
        serde_json::from_slice(&document)
            .map_err(|error| format!("{url} answered with what is no such document: {error}"))
    }
}

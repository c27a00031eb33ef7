//! Tokens that lie in etcd: who joins the cloud gets one, and who leaves it loses it, while servers run.

use std::{collections::HashMap, sync::Arc, sync::RwLock};

use ec_model::{Token, decode};
use ec_store::{Change, Event, FollowOptions, KeyValue, Store, follow};

/// The tokens of one prefix, by their digests, as they were last known.
#[derive(Debug, Default)]
pub(crate) struct Stored(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Whether there may be some that were not read yet.
    awaited: bool,
    tokens: HashMap<String, Token>,
}

impl Stored {
    /// Whom the token of this digest lets in, where it is known.
    ///
    /// # Errors
    /// In a sentence, that they were not read yet.
    pub(crate) fn find(&self, digest: &str) -> Result<Option<Token>, &'static str> {
        let known = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        match known.tokens.get(digest) {
            Some(token) => Ok(Some(token.clone())),
            None if known.awaited => Err("Tokens are not read from etcd yet; try again."),
            None => Ok(None),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner));
    }

    /// Keeps them as they are in the store, for ever. While that is away they stay as they were.
    pub(crate) async fn keep(self: Arc<Self>, store: Arc<dyn Store>, prefix: String) {
        self.change(|known| known.awaited = true);
        let mut changes = follow(store, prefix.clone(), FollowOptions::default());
        while let Some(change) = changes.recv().await {
            match change {
                Change::Reset(listing) => {
                    let tokens = listing.pairs.iter().filter_map(|pair| read(&prefix, pair)).collect();
                    self.change(|known| *known = Known { awaited: false, tokens });
                }
                Change::Events(batch) => self.change(|known| {
                    for event in &batch.events {
                        let key = match event {
                            Event::Put(pair) => &pair.key,
                            Event::Delete { key, .. } => key,
                        };
                        // Also where the new one cannot be read: the old one is no more.
                        known.tokens.remove(key.strip_prefix(&prefix).unwrap_or_default());
                        if let Event::Put(pair) = event {
                            known.tokens.extend(read(&prefix, pair));
                        }
                    }
                }),
                Change::Lost(error) => tracing::debug!(%error, "tokens are not followed"),
            }
        }
    }
}

fn read(prefix: &str, pair: &KeyValue) -> Option<(String, Token)> {
    let digest = pair.key.strip_prefix(prefix)?;
    match decode::<Token>(&pair.value) {
        Ok(token) => Some((digest.to_owned(), token)),
        Err(error) => {
            tracing::warn!(key = pair.key, %error, "this token lets nobody in");
            None
        }
    }
}

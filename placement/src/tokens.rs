//! Tokens that lie in etcd: who joins the cloud gets one, and who leaves it loses it, while servers run.

use std::{collections::HashMap, sync::Arc, sync::RwLock, time::Duration};

use ec_model::{Token, decode};
use ec_store::{Change, Event, FollowOptions, KeyValue, Store, follow_on_demand};

/// All are listed so often, in case an event was lost: for no longer does one let in that was taken away. Counted here,
/// since the follower counts anew with each watch, and watches may break all the time.
const LIST_AGAIN: Duration = Duration::from_secs(15);

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
        let (mut changes, relist) = follow_on_demand(store, prefix.clone(), None, FollowOptions::default());
        let mut list_again = tokio::time::interval(LIST_AGAIN);
        list_again.reset();
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => self.take_up(&prefix, change),
                    None => return,
                },
                _ = list_again.tick() => relist.now(),
            }
        }
    }

    fn take_up(&self, prefix: &str, change: Change) {
        match change {
            Change::Reset(listing) => {
                let tokens = listing.pairs.iter().filter_map(|pair| read(prefix, pair)).collect();
                self.change(|known| *known = Known { awaited: false, tokens });
            }
            Change::Events(batch) => self.change(|known| {
                for event in &batch.events {
                    let key = match event {
                        Event::Put(pair) => &pair.key,
                        Event::Delete { key, .. } => key,
                    };
                    // Also where the new one cannot be read: the old one is no more.
                    known.tokens.remove(key.strip_prefix(prefix).unwrap_or_default());
                    if let Event::Put(pair) = event {
                        known.tokens.extend(read(prefix, pair));
                    }
                }
            }),
            Change::Lost(error) => tracing::debug!(%error, "tokens are not followed"),
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

#[cfg(test)]
mod tests {
    use ec_store::{MemoryStore, Txn};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_whose_deletion_was_not_heard_of_lets_in_for_seconds_only_though_watches_break() {
        let store = MemoryStore::new();
        let put = async |name: &str| {
            let token = r#"{"version": 1, "name": "control"}"#;
            store.txn(Txn::new().put(format!("/t/{name}"), token)).await.unwrap();
        };
        put("a").await;
        let stored = Arc::<Stored>::default();
        tokio::spawn(Arc::clone(&stored).keep(Arc::new(store.clone()), "/t/".into()));
        let lets_in = |name: &str| matches!(stored.find(name), Ok(Some(_)));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(lets_in("a"));
        store.faults().lose_events(1);
        store.txn(Txn::new().delete("/t/a")).await.unwrap();
        put("b").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(lets_in("a") && lets_in("b"), "the event was lost");
        for _ in 0..LIST_AGAIN.as_secs() {
            store.faults().break_watches();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!(!lets_in("a") && lets_in("b"));
    }
}

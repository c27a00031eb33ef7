//! Tokens that lie in etcd: who joins the cloud gets one, and who leaves it loses it, while servers run.

use std::{collections::HashMap, sync::Arc, sync::RwLock, time::Duration};

use ec_model::{Token, decode};
use ec_store::{Change, Event, FollowOptions, KeyValue, Store, StoreError, follow_on_demand};
use tokio::time::Instant;

/// All are listed so often, in case an event was lost: for no longer does one let in that was taken away. Counted here,
/// since the follower counts anew with each watch, and watches may break all the time.
const LIST_AGAIN: Duration = Duration::from_secs(15);

/// Where etcd refuses to tell them for so long, none is believed any more: one that was taken away would let in for ever. Long
/// enough for rights that are being given anew.
const REFUSED: Duration = Duration::from_secs(60);

/// The tokens of one prefix, by their digests, as they were last known.
#[derive(Debug, Default)]
pub(crate) struct Stored(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    standing: Standing,
    tokens: HashMap<String, Token>,
    /// Whether there ever was one.
    has_had: bool,
}

/// What is to be thought of a token that is not known.
#[derive(Debug, Default)]
enum Standing {
    /// There is none: all are known, as they were when etcd was there last.
    #[default]
    Read,
    /// It may be one of those that were not read yet.
    Awaited,
    /// It may be one of those that etcd does not let this server read.
    Refused { since: Instant, why: String, are_forgotten: bool },
}

impl Standing {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Read => Ok(()),
            Self::Awaited => Err("tokens are not read from etcd yet".to_owned()),
            Self::Refused { why, .. } => Err(format!("tokens that lie in etcd cannot be read: {why}")),
        }
    }
}

impl Known {
    /// The tokens are as etcd has them.
    fn read_again(&mut self) {
        if let Standing::Refused { .. } = std::mem::replace(&mut self.standing, Standing::Read) {
            tracing::info!("tokens that lie in etcd are read again");
        }
        self.has_had |= !self.tokens.is_empty();
    }
}

impl Stored {
    /// Whom the token of this digest lets in, where it is known.
    ///
    /// # Errors
    /// Why it cannot be told whom it lets in.
    pub(crate) fn find(&self, digest: &str) -> Result<Option<Token>, String> {
        let known = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        match known.tokens.get(digest) {
            Some(token) => Ok(Some(token.clone())),
            None => known.standing.check().map(|()| None),
        }
    }

    /// Whether it can be told of every token whom it lets in. Where `others` come in without etcd, and no token was ever seen there, a
    /// right to read them is not missed: clouds whose tokens are all listed in the configuration never gave it.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn ready(&self, others: bool) -> Result<(), String> {
        let known = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        match &known.standing {
            Standing::Refused { .. } if others && !known.has_had => Ok(()),
            standing => standing.check(),
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Known) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Keeps them as they are in the store, for ever. While that is away they stay as they were; while it refuses to tell them, for a
    /// minute.
    pub(crate) async fn keep(self: Arc<Self>, store: Arc<dyn Store>, prefix: String) {
        self.change(|known| known.standing = Standing::Awaited);
        let (mut changes, relist) = follow_on_demand(store, prefix.clone(), None, FollowOptions::default());
        let mut list_again = tokio::time::interval(LIST_AGAIN);
        list_again.reset();
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => self.take_up(&prefix, change),
                    None => return,
                },
                _ = list_again.tick() => {
                    self.forget_refused();
                    relist.now();
                }
            }
        }
    }

    fn take_up(&self, prefix: &str, change: Change) {
        match change {
            Change::Reset(listing) => {
                let tokens = listing.pairs.iter().filter_map(|pair| read(prefix, pair)).collect();
                self.change(|known| {
                    known.tokens = tokens;
                    known.read_again();
                });
            }
            Change::Events(batch) => self.change(|known| {
                // They follow upon what was known, unless that was forgotten: then a listing tells it.
                if !matches!(known.standing, Standing::Refused { are_forgotten: true, .. }) {
                    known.read_again();
                }
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
                known.has_had |= !known.tokens.is_empty();
            }),
            // The server's state is told to be lost with it.
            Change::Lost(error) if error.is_transient() => tracing::debug!(%error, "tokens are not followed"),
            Change::Lost(error) => self.refused(&error, prefix),
        }
    }

    fn refused(&self, error: &StoreError, prefix: &str) {
        tracing::warn!(
            %error,
            "tokens that lie in etcd, below {prefix}, cannot be read: in a minute none of them is taken any more; this server's user \
             needs the right to read there, which `eschedule cluster init` and scripts/etcd-roles.sh give"
        );
        let why = error.to_string();
        self.change(|known| {
            let are_forgotten = matches!(known.standing, Standing::Refused { are_forgotten: true, .. });
            known.standing = Standing::Refused { since: Instant::now(), why, are_forgotten };
        });
    }

    fn forget_refused(&self) {
        let forgotten = self.change(|known| match &mut known.standing {
            Standing::Refused { since, are_forgotten, .. } if since.elapsed() >= REFUSED => {
                *are_forgotten = true;
                std::mem::take(&mut known.tokens)
            }
            _ => HashMap::new(),
        });
        if !forgotten.is_empty() {
            tracing::warn!(
                tokens = forgotten.len(),
                "tokens that lie in etcd are not taken until they can be read"
            );
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
    use ec_store::{MemoryStore, Txn, WatchBatch};

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

    #[tokio::test(start_paused = true)]
    async fn those_that_may_not_be_read_let_in_for_a_minute_and_then_it_is_said_why_they_do_not() {
        let store = MemoryStore::new();
        let token = r#"{"version": 1, "name": "control"}"#;
        store.txn(Txn::new().put("/t/a", token)).await.unwrap();
        let refuse = |count| store.faults().fail_next(count, StoreError::Refused("permission denied".into()));
        let wait = async |seconds| tokio::time::sleep(Duration::from_secs(seconds)).await;
        // Never, from the beginning.
        refuse(usize::MAX);
        let stored = Arc::<Stored>::default();
        tokio::spawn(Arc::clone(&stored).keep(Arc::new(store.clone()), "/t/".into()));
        wait(1).await;
        stored.ready(true).expect("nobody is known to need them");
        for told in [stored.find("a").err(), stored.find("b").err(), stored.ready(false).err()] {
            let told = told.unwrap();
            assert!(told.contains("cannot be read: etcd refused: permission denied"), "{told}");
        }
        refuse(0);
        wait(30).await;
        let lets_in = |name: &str| matches!(stored.find(name), Ok(Some(_)));
        assert!(lets_in("a") && stored.ready(false).is_ok() && matches!(stored.find("b"), Ok(None)));
        // Not any more. What is not known may be one that came since.
        refuse(usize::MAX);
        wait(LIST_AGAIN.as_secs() + 1).await;
        assert!(lets_in("a") && stored.find("b").is_err() && stored.ready(true).is_err());
        wait(REFUSED.as_secs() + LIST_AGAIN.as_secs()).await;
        assert!(stored.find("a").is_err(), "it may have been taken away");
        refuse(0);
        wait(30).await;
        assert!(lets_in("a") && stored.ready(false).is_ok());
        // One that is away says nothing of them.
        store.faults().set_reachable(false);
        wait(600).await;
        assert!(lets_in("a") && matches!(stored.find("b"), Ok(None)));
    }

    #[test]
    fn a_watch_that_goes_on_tells_that_they_can_be_read_where_none_was_forgotten() {
        let stored = Stored::default();
        let pair = |key: &str| KeyValue {
            key: key.to_owned(),
            value: br#"{"version": 1, "name": "control"}"#.to_vec(),
            create_revision: 1,
            mod_revision: 1,
            version: 1,
            lease: None,
        };
        let events = |key: &str| {
            let events = vec![Event::Put(pair(key))];
            stored.take_up("/t/", Change::Events(WatchBatch { events, resume_from: 2 }));
        };
        let refuse = || stored.take_up("/t/", Change::Lost(StoreError::Refused("no".to_owned())));
        refuse();
        assert!(stored.ready(false).is_err());
        events("/t/a");
        assert!(stored.ready(false).is_ok() && matches!(stored.find("b"), Ok(None)));
        refuse();
        stored.change(|known| {
            known.tokens.clear();
            let Standing::Refused { are_forgotten, .. } = &mut known.standing else { panic!() };
            *are_forgotten = true;
        });
        events("/t/b");
        assert!(stored.find("a").is_err() && matches!(stored.find("b"), Ok(Some(_))));
    }
}

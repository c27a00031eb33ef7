//! What a consumer used before its record became unreadable: a replica that was there then remembers it, one
//! that reads the state anew asks etcd's history. Both must count the same, or one of them gives the room away.

use std::time::Duration;

use ec_placement_model::{Change, Key};
use ec_replica::Model;
use ec_store::{KeyValue, Store, StoreError};

use super::Keys;

/// So many writes are looked back at.
const WRITES: usize = 16;

/// The wait before etcd is asked again.
const PAUSE: Duration = Duration::from_millis(500);

/// What must be known beside an unreadable record: the last that could be read, or that nobody knows it.
pub(super) async fn recall(store: &dyn Store, keys: &Keys, unreadable: &KeyValue) -> Option<Change> {
    let Some(Key::Consumer(uuid)) = keys.key_of(&unreadable.key) else { return None };
    let mut pair = unreadable.clone();
    let mut writes = 0;
    while writes < WRITES {
        // It never was anything else, so nobody was ever given room for it.
        if pair.version <= 1 {
            return None;
        }
        pair = match store.get_at(&pair.key, pair.mod_revision - 1).await {
            Ok(before) => before?,
            Err(error) if error.is_transient() => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            Err(StoreError::Compacted { .. }) => break,
            Err(error) => {
                tracing::warn!(key = pair.key, %error, "cannot look back at what this consumer used");
                break;
            }
        };
        writes += 1;
        if let Some(changes) = keys.read(&pair).into_changes()
            && let Some(known) = changes.into_iter().find(|change| matches!(change, Change::Consumer(..)))
        {
            return Some(known);
        }
    }
    Some(Change::UseUnknown(uuid))
}

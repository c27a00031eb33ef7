//! A watch on etcd, made to end whenever it would otherwise be silent for ever.

use std::sync::Arc;

use async_trait::async_trait;
use etcd_client::{EventType, WatchOptions, WatchResponse, WatchStream};

use super::{
    ANSWER_MAX,
    endpoints::{Endpoints, Lane, Repeat},
    failure::{Failure, OUTDATED, classify},
    key_text, key_value,
};
use crate::{Event, Revision, StoreError, StoreResult, Watch, WatchBatch};

/// An accepted watch.
pub(super) struct EtcdWatch {
    endpoints: Arc<Endpoints>,
    endpoint: usize,
    stream: WatchStream,
    /// Where a new watch would have to begin.
    next: Revision,
    /// How it ended: said again to whoever asks again.
    over: Option<StoreError>,
}

/// Opens a watch and waits until etcd has accepted it.
pub(super) async fn open(endpoints: &Arc<Endpoints>, prefix: &str, from: Revision) -> StoreResult<EtcdWatch> {
    let opened = endpoints
        .run_at(Lane::Watches, Repeat::Safe, |client, endpoint| async move {
            let options = WatchOptions::new().with_prefix().with_start_revision(from).with_progress_notify();
            let mut watches = client.watch_client().max_decoding_message_size(ANSWER_MAX);
            let mut stream = watches.watch(prefix, Some(options)).await.map_err(classify)?;
            match stream.message().await.map_err(classify)? {
                Some(answer) if answer.created() && !answer.canceled() => Ok((endpoint, stream)),
                Some(answer) => Err(refusal(answer.cancel_reason(), endpoints.has_user())),
                None => Err(Failure::Broken("the watch stream ended".into())),
            }
        })
        .await;
    let (endpoint, stream) = opened.map_err(|failure| endpoints.error(failure, Repeat::Safe))?;
    Ok(EtcdWatch { endpoints: Arc::clone(endpoints), endpoint, stream, next: from, over: None })
}

/// A watch that etcd refuses is cancelled with words, not with a status. Before 3.4.22 and 3.5.6 etcd says "permission denied" of a
/// token that it does not know (any more), too: who has one (`has_user`) gets another before that is believed.
fn refusal(reason: &str, has_user: bool) -> Failure {
    let says = |phrase: &str| reason.contains(phrase);
    let is_denied = says("permission denied");
    if says(OUTDATED) {
        Failure::Outdated(reason.to_owned())
    } else if says("invalid auth token") || (is_denied && has_user) {
        Failure::StaleToken(reason.to_owned())
    } else if is_denied {
        Failure::Refused(reason.to_owned())
    } else {
        Failure::Broken(format!("the watch was cancelled: {reason}"))
    }
}

impl EtcdWatch {
    async fn receive(&mut self) -> StoreResult<WatchBatch> {
        loop {
            let failure = match self.stream.message().await {
                Ok(Some(answer)) if answer.canceled() && answer.compact_revision() > 0 => {
                    return Err(StoreError::Compacted {
                        wanted: self.next,
                        first: answer.compact_revision(),
                    });
                }
                Ok(Some(answer)) if answer.canceled() => {
                    refusal(answer.cancel_reason(), self.endpoints.has_user())
                }
                Ok(Some(answer)) if answer.created() => continue,
                Ok(Some(answer)) => return Ok(self.batch(&answer)),
                Ok(None) => Failure::Broken("the watch stream ended".into()),
                Err(error) => classify(error),
            };
            return Err(match failure {
                // A catch-up of many large values. It would be as large the next time, while a listing
                // comes in pages: to the caller this is the same as history that is gone.
                Failure::TooBig(text) => {
                    tracing::debug!(error = text, "the changes missed are too many for one message");
                    StoreError::Compacted { wanted: self.next, first: self.next }
                }
                Failure::StaleToken(text) | Failure::Outdated(text) => {
                    self.endpoints.forget_token(Lane::Watches, self.endpoint).await;
                    self.endpoints.error(Failure::Broken(text), Repeat::Safe)
                }
                failure @ Failure::Refused(_) => self.endpoints.error(failure, Repeat::Safe),
                failure => {
                    self.endpoints.leave(self.endpoint);
                    self.endpoints.error(failure, Repeat::Safe)
                }
            });
        }
    }

    fn batch(&mut self, answer: &WatchResponse) -> WatchBatch {
        let events: Vec<Event> = answer
            .events()
            .iter()
            .filter_map(|event| {
                let pair = event.kv()?;
                Some(match event.event_type() {
                    EventType::Put => Event::Put(key_value(pair.clone())),
                    EventType::Delete => {
                        Event::Delete { key: key_text(pair.key().to_vec()), revision: pair.mod_revision() }
                    }
                })
            })
            .collect();
        match events.last() {
            // Never the header's revision: while catching up, it is the store's current one, and runs
            // ahead of the events delivered.
            Some(last) => self.next = self.next.max(last.revision() + 1),
            None => {
                let progress = answer.header().map_or(0, |header| header.revision() + 1);
                self.next = self.next.max(progress);
            }
        }
        WatchBatch { events, resume_from: self.next }
    }
}

#[async_trait]
impl Watch for EtcdWatch {
    async fn next(&mut self) -> StoreResult<WatchBatch> {
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        let result = self.receive().await;
        self.over = result.as_ref().err().cloned();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_is_believed_of_a_new_token_alone() {
        let denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
        assert!(matches!(refusal(denied, true), Failure::StaleToken(_)));
        assert!(matches!(refusal(denied, false), Failure::Refused(_)));
        assert!(matches!(refusal("etcdserver: invalid auth token", true), Failure::StaleToken(_)));
        let outdated = "etcdserver: revision of auth store is old";
        assert!(matches!(refusal(outdated, false), Failure::Outdated(_)), "also of who has a certificate");
        assert!(matches!(refusal("etcdserver: no leader", true), Failure::Broken(_)));
    }
}

//! How a read comes to see everything that was written before it: it asks etcd how far the state is, and
//! waits until the state in memory is there. Requests that wait at the same time share one question.
//!
//! The answer tells, too, whether etcd is still the one that was read: its clock never goes back, and never
//! shows another transaction at the same revision.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use ec_store::{Revision, Store};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    Unavailable, ended,
    history::{Clock, History, Progress},
};

/// Requests that may wait for the question; beyond them, the next wait to be let in.
const QUEUE: usize = 4096;

/// The clock, and the revision of all of etcd that showed it.
type Answer = Result<(Clock, Revision), Unavailable>;
type Question = oneshot::Sender<Answer>;

/// See the module. Clones ask together.
#[derive(Clone)]
pub(crate) struct Barrier {
    questions: mpsc::Sender<Question>,
    history: Arc<History>,
    /// What etcd said last.
    known: Arc<AtomicI64>,
}

impl Barrier {
    /// The barrier, and the task that asks for it.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        clock: String,
        history: Arc<History>,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (questions, queue) = mpsc::channel(QUEUE);
        let asked = ask(store, clock, Arc::clone(&history), queue);
        let task = async move { _ = stop.run_until_cancelled(asked).await };
        (Self { questions, history, known: Arc::default() }, task)
    }

    /// Revisions that are known to be in etcd and not in the view.
    pub(crate) fn lag(&self) -> i64 {
        (self.known.load(Ordering::Relaxed) - self.history.revision()).max(0)
    }

    /// Returns when the view has everything that was written before this call.
    pub(crate) async fn pass(&self, patience: Duration) -> Result<(), Unavailable> {
        let until = Instant::now() + patience;
        let asked = async {
            let (answer, answered) = oneshot::channel();
            self.questions.send(answer).await.map_err(|_| ended())?;
            answered.await.map_err(|_| ended())?
        };
        let (clock, at) = tokio::time::timeout_at(until, asked)
            .await
            .map_err(|_| Unavailable("etcd does not answer".into()))??;
        self.known.store(clock.revision, Ordering::Relaxed);
        self.history.reach(&clock, at, until.saturating_duration_since(Instant::now())).await
    }
}

/// What an answer says of the etcd that gave it.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It is the one that was read, or may be.
    Same,
    /// It is another one.
    Other(String),
}

/// `before`: what was known when the question was sent, by the watch and by our own writes.
fn judge(before: &Progress, clock: &Clock, revision: Revision) -> Verdict {
    let told = (before.clock.revision, &before.clock.id);
    let (newest, id) = match &before.written {
        Some((written, id)) if *written > told.0 => (*written, id),
        _ => told,
    };
    let known = before.through.max(newest);
    if revision < known {
        return Verdict::Other(format!(
            "etcd went back from revision {known} to {revision}: it was restored, emptied or replaced"
        ));
    }
    if clock.revision < newest {
        return Verdict::Other(format!(
            "the state in etcd went back from revision {newest} to {}: it was restored, emptied or replaced",
            clock.revision
        ));
    }
    if clock.revision == newest && clock.id != *id {
        return Verdict::Other(format!(
            "etcd has another history than was seen here, at revision {}: it was restored or replaced",
            clock.revision
        ));
    }
    Verdict::Same
}

async fn ask(
    store: Arc<dyn Store>,
    clock: String,
    history: Arc<History>,
    mut queue: mpsc::Receiver<Question>,
) {
    let mut waiting = Vec::new();
    while queue.recv_many(&mut waiting, QUEUE).await > 0 {
        let before = history.progress();
        // The clock's own revision, not that of all of etcd: others write there, too, and of that we see
        // nothing.
        let answer = match store.get(&clock).await {
            Ok((pair, revision)) => {
                let clock = Clock::of(pair.as_ref());
                match judge(&before, &clock, revision) {
                    Verdict::Same => Ok((clock, revision)),
                    // Read anew meanwhile: the next question is about that.
                    Verdict::Other(why) if history.progress().listings != before.listings => {
                        Err(Unavailable(why))
                    }
                    Verdict::Other(why) => Err(history.doubt(&why)),
                }
            }
            Err(error) => Err(Unavailable(error.to_string())),
        };
        for question in waiting.drain(..) {
            // Whoever has gone does not wait for an answer.
            question.send(answer.clone()).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use ec_store::KeyValue;

    use super::*;

    fn clock(revision: Revision, id: &str) -> Clock {
        let value = id.as_bytes().to_vec();
        let key = String::new();
        Clock::of(Some(&KeyValue {
            key,
            value,
            create_revision: 1,
            mod_revision: revision,
            version: 1,
            lease: None,
        }))
    }

    #[test]
    fn an_etcd_that_went_back_or_has_another_history_is_known() {
        let mut before = Progress { through: 12, clock: clock(10, "a"), ..Progress::default() };
        assert_eq!(judge(&before, &clock(10, "a"), 12), Verdict::Same);
        assert_eq!(judge(&before, &clock(14, "b"), 14), Verdict::Same);
        for (clock, revision) in
            [(clock(10, "a"), 11), (clock(9, "b"), 40), (clock(10, "b"), 40), (Clock::default(), 40)]
        {
            assert!(matches!(judge(&before, &clock, revision), Verdict::Other(_)), "{clock:?} {revision}");
        }
        // What was written here and not told by the watch yet is known, too.
        before.written = Some((20, "b".into()));
        assert_eq!(judge(&before, &clock(20, "b"), 20), Verdict::Same);
        assert_eq!(judge(&before, &clock(22, "c"), 23), Verdict::Same);
        for (clock, revision) in [(clock(10, "a"), 15), (clock(14, "c"), 30), (clock(20, "c"), 30)] {
            assert!(matches!(judge(&before, &clock, revision), Verdict::Other(_)), "{clock:?} {revision}");
        }
    }
}

//! One call on a thread of its own, with a deadline; what hangs is remembered per instance.
//!
//! A thread per call costs some 50 µs against a call's millisecond, and unlike the runtime's own blocking
//! threads it does not hold up the end of the process when it hangs. The lanes bound the threads.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    thread,
    time::Duration,
};

use ec_model::InstanceId;
use tokio::sync::oneshot;

/// What a call is about: while one hangs, others of the same scope fail at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scope {
    /// The host as a whole; never refused.
    Host,
    /// One instance.
    Instance(InstanceId),
    /// Ending or destroying one instance. On its own, because killing a stuck guest is what frees a hung call.
    End(InstanceId),
}

/// The calls that nobody waits for any longer and that have not come back, by scope.
#[derive(Debug, Default)]
pub(crate) struct Hung(Mutex<HashMap<Scope, usize>>);

impl Hung {
    pub(crate) fn is(&self, scope: Scope) -> bool {
        scope != Scope::Host && self.map().contains_key(&scope)
    }

    fn map(&self) -> std::sync::MutexGuard<'_, HashMap<Scope, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, scope: Scope) {
        *self.map().entry(scope).or_default() += 1;
    }

    fn remove(&self, scope: Scope) {
        let mut map = self.map();
        if let Some(count) = map.get_mut(&scope) {
            *count -= 1;
            if *count == 0 {
                map.remove(&scope);
            }
        }
    }
}

/// Who waits for a call, to the deadline or until nobody wants to know any more: one that has not come back by then hangs.
struct Waiting<'a> {
    state: Arc<AtomicU8>,
    hung: &'a Hung,
    scope: Scope,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.state.load(Ordering::Acquire) == DONE {
            return;
        }
        self.hung.add(self.scope);
        let given_up =
            self.state.compare_exchange(RUNNING, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !given_up {
            self.hung.remove(self.scope);
        }
    }
}

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const GIVEN_UP: u8 = 2;

/// How a call on a thread ended, where it has no result.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// The deadline passed; the thread goes on.
    Deadline,
    /// The thread could not be started, or ended without a result.
    Thread(String),
}

/// Runs `work` on a new thread and waits for it until `timeout`. The turn is held until the thread ends.
pub(crate) async fn run<T: Send + 'static>(
    turn: impl Send + 'static,
    hung: &Arc<Hung>,
    scope: Scope,
    timeout: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoResult> {
    let state = Arc::new(AtomicU8::new(RUNNING));
    let (sender, receiver) = oneshot::channel();
    let on_thread = (Arc::clone(&state), Arc::clone(hung));
    let spawned = thread::Builder::new().name("libvirt-call".into()).spawn(move || {
        let result = work();
        // Forgotten before the answer goes out, so that who has the answer can call again.
        if on_thread.0.swap(DONE, Ordering::AcqRel) == GIVEN_UP {
            on_thread.1.remove(scope);
        }
        drop(turn);
        // Nobody waits after the deadline.
        let _ = sender.send(result);
    });
    spawned.map_err(|error| NoResult::Thread(format!("no thread for the call: {error}")))?;
    let waiting = Waiting { state, hung, scope };
    match tokio::time::timeout(timeout, receiver).await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(_)) => {
            waiting.state.store(DONE, Ordering::Release);
            Err(NoResult::Thread("the call's thread ended without a result".into()))
        }
        Err(_) => Err(NoResult::Deadline),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn a_hung_call_is_given_up_remembered_for_its_instance_only_and_forgotten_when_it_ends() {
        let (hung, permits) = (Arc::new(Hung::default()), Arc::new(Semaphore::new(2)));
        let [one, two] = [1u128, 2].map(|n| format!("{n:032x}").parse::<InstanceId>().unwrap());
        let (release, gate) = mpsc::channel::<()>();
        let permit = Arc::clone(&permits).acquire_owned().await.unwrap();
        let timeout = Duration::from_millis(50);
        let result = run(permit, &hung, Scope::Instance(one), timeout, move || gate.recv()).await;
        assert_eq!(result.unwrap_err(), NoResult::Deadline);
        assert!(hung.is(Scope::Instance(one)));
        assert!(!hung.is(Scope::Instance(two)));
        assert!(!hung.is(Scope::End(one)), "to end it is the cure");
        assert_eq!(permits.available_permits(), 1, "the thread still counts");

        let permit = Arc::clone(&permits).acquire_owned().await.unwrap();
        let result = run(permit, &hung, Scope::Instance(two), Duration::from_secs(10), || 7).await;
        assert_eq!(result.unwrap(), 7);

        release.send(()).unwrap();
        let both = tokio::time::timeout(Duration::from_secs(10), permits.acquire_many(2)).await;
        assert!(both.is_ok(), "the thread came back");
        assert!(!hung.is(Scope::Instance(one)));
    }

    #[tokio::test]
    async fn a_call_that_nobody_waits_for_any_more_is_remembered_as_one_that_hangs() {
        let hung = Arc::new(Hung::default());
        let scope = Scope::Instance("1".repeat(32).parse().unwrap());
        let (release, gate) = mpsc::channel::<()>();
        let (ended, end) = mpsc::channel::<()>();
        let call = run(ended, &hung, scope, Duration::from_secs(60), move || gate.recv());
        let given_up = tokio::time::timeout(Duration::from_millis(20), call).await;
        assert!(given_up.is_err());
        assert!(hung.is(scope));
        release.send(()).unwrap();
        assert!(end.recv_timeout(Duration::from_secs(10)).is_err(), "its turn ends with the thread");
        assert!(!hung.is(scope));

        let dies = run((), &hung, scope, Duration::from_secs(60), || panic!("on purpose")).await;
        assert!(matches!(dies, Err(NoResult::Thread(_))));
        assert!(!hung.is(scope), "what ended does not hang");
    }
}

//! Tasks that must not end while the program runs: one that does is noticed, and the program ends loudly,
//! so that whoever supervises it starts it again, instead of going on with a part of it missing.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

/// Such tasks. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct Tasks {
    stop: CancellationToken,
    failed: CancellationToken,
    first: Arc<OnceLock<String>>,
}

impl Tasks {
    /// None yet. After `stop` they may end.
    pub fn new(stop: CancellationToken) -> Self {
        Self { stop, failed: CancellationToken::new(), first: Arc::default() }
    }

    /// Starts a task; `name` says what it does.
    pub fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let work = tokio::spawn(work);
        let tasks = self.clone();
        tokio::spawn(async move {
            let how = match work.await {
                Ok(()) if tasks.stop.is_cancelled() => return,
                Ok(()) => "ended".to_owned(),
                Err(error) if error.is_panic() => {
                    let cause = error.into_panic();
                    let text = cause.downcast_ref::<&str>().copied();
                    let text = text.or_else(|| cause.downcast_ref::<String>().map(String::as_str));
                    format!("panicked: {}", text.unwrap_or("for an unknown reason"))
                }
                // The runtime ends.
                Err(_) => return,
            };
            tracing::error!(task = name, error = how, "a task that must not end has ended");
            // Only the first is told of: the others may have followed from it.
            tasks.first.set(format!("the task that is {name} {how}")).ok();
            tasks.failed.cancel();
        });
    }

    /// Whether one has ended though nobody asked for that.
    pub fn has_failed(&self) -> bool {
        self.failed.is_cancelled()
    }

    /// Waits until one has ended though nobody asked for that; answers which, and how.
    pub async fn failed(&self) -> String {
        self.failed.cancelled().await;
        self.first.get().cloned().unwrap_or_default()
    }
}

/// Makes any panic, of whatever task or thread, the end of the process: for programs whose short tasks hold
/// states that nobody else would bring on.
pub fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_or_ends_is_told_of_and_one_that_was_asked_to_is_not() {
        let stop = CancellationToken::new();
        let tasks = Tasks::new(stop.clone());
        tasks.spawn("counting", async {
            let nothing: Vec<u8> = Vec::new();
            std::hint::black_box(nothing[std::hint::black_box(1)]);
        });
        let told = tasks.failed().await;
        assert!(told.contains("counting panicked: index out of bounds"), "{told}");
        assert!(tasks.has_failed());

        let tasks = Tasks::new(stop.clone());
        tasks.spawn("waiting", async {});
        assert_eq!(tasks.failed().await, "the task that is waiting ended");

        let tasks = Tasks::new(stop.clone());
        let end = stop.clone();
        tasks.spawn("serving", async move { end.cancelled().await });
        stop.cancel();
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert!(!tasks.has_failed());
    }
}

//! Waiting for an outcome, and telling on the way how far it is.

use std::{io::IsTerminal, sync::Arc, time::Duration};

use ec_model::{InstanceId, NodeId, State, Status, decode};
use ec_runtime::exit::{Failure, tell};
use ec_store::{Change, Event, FollowOptions, Store, follow};
use indicatif::{ProgressBar, ProgressStyle};

use crate::config::Session;

/// Waits until the instance is ACTIVE. ERROR, STOPPED, an end from elsewhere, and the time running out are failures.
pub(crate) async fn until_active(
    session: &Session,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
) -> Result<Status, Failure> {
    let keys = &session.settings.keys;
    let shown = Shown::new();
    shown.tell("claimed");
    let status = watch_key(session, keys.status(node, instance), timeout, |value| match value {
        Some(value) => {
            let status: Status = decode(value).map_err(|error| Failure::failed(error.to_string()))?;
            shown.status(&status);
            settled(instance, status)
        }
        // Not there yet, or not any more: that the request tells.
        None => Ok(None),
    });
    let outcome = tokio::select! {
        outcome = status => outcome,
        failure = withdrawn(session, node, instance, timeout) => Err(failure),
    };
    shown.finish();
    outcome
}

/// Whether there is nothing more to wait for.
fn settled(instance: InstanceId, status: Status) -> Result<Option<Status>, Failure> {
    let why = status.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    match status.state {
        State::Active => Ok(Some(status)),
        // The node has looked for an address as long as it was told to.
        State::Starting if status.reason.is_some() => {
            Err(Failure::failed(format!("instance {instance} is up and has no IP yet{why}")))
        }
        State::Scheduled | State::Preparing | State::Starting | State::Paused => Ok(None),
        State::Error => Err(Failure::failed(format!("instance {instance} is in ERROR{why}"))),
        State::Stopped => Err(Failure::failed(format!("instance {instance} is STOPPED and has no IP{why}"))),
        State::Destroying => Err(Failure::failed(format!("instance {instance} is being destroyed"))),
        State::Unclaimed => Err(Failure::failed(format!(
            "instance {instance} is UNCLAIMED: it runs, and nobody asks for it{why}"
        ))),
    }
}

/// Waits until nobody wants the instance any more; never ends well.
async fn withdrawn(session: &Session, node: NodeId, instance: InstanceId, timeout: Duration) -> Failure {
    let keys = &session.settings.keys;
    let key = keys.request(node, instance);
    let gone = watch_key(session, key, timeout, |value| Ok(value.is_none().then_some(()))).await;
    if let Err(failure) = gone {
        return failure;
    }
    // A request goes at the end of a destroy, and after an ERROR, whose status stays.
    let status = session.store.get(&keys.status(node, instance)).await;
    match status.map(|(pair, _)| pair.and_then(|pair| decode::<Status>(&pair.value).ok())) {
        Ok(Some(status)) => match settled(instance, status) {
            Err(failure) => failure,
            Ok(_) => Failure::failed(format!("the request of {instance} was deleted")),
        },
        Ok(None) => Failure::failed(format!("instance {instance} was destroyed")),
        Err(error) => error.into(),
    }
}

/// Waits until nothing is left of the instance.
pub(crate) async fn until_gone(
    session: &Session,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
) -> Result<(), Failure> {
    let shown = Shown::new();
    shown.tell("destroying");
    // The request's key goes in the same transaction as all others.
    let key = session.settings.keys.request(node, instance);
    let outcome = watch_key(session, key, timeout, |value| Ok(value.is_none().then_some(()))).await;
    shown.finish();
    outcome
}

/// Looks at a key now and after each change, until `judge` has an answer.
async fn watch_key<T>(
    session: &Session,
    key: String,
    timeout: Duration,
    mut judge: impl FnMut(Option<&[u8]>) -> Result<Option<T>, Failure>,
) -> Result<T, Failure> {
    let store: Arc<dyn Store> = Arc::new(session.store.clone());
    // A uuid at its end makes the key the only one with this prefix.
    let mut changes = follow(store, key.clone(), FollowOptions::default());
    let deadline = tokio::time::Instant::now() + timeout;
    loop {
        let change = tokio::time::timeout_at(deadline, changes.recv()).await.map_err(|_| {
            Failure::failed(format!(
                "not done after {} s; it goes on, `eschedule list` shows how far it is",
                timeout.as_secs()
            ))
        })?;
        let answer = match change {
            Some(Change::Reset(listing)) => {
                judge(listing.pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value.as_slice()))?
            }
            // The last word on the key is the one that holds.
            Some(Change::Events(batch)) => {
                match batch.events.into_iter().rev().find(|event| event.key() == key) {
                    Some(Event::Put(pair)) => judge(Some(&pair.value))?,
                    Some(Event::Delete { .. }) => judge(None)?,
                    None => None,
                }
            }
            Some(Change::Lost(error)) => {
                tell(&format!("eschedule: {error}; waiting on"));
                None
            }
            None => return Err(Failure::failed("the watch ended")),
        };
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
}

/// What the user sees: a moving line on a terminal, a line for each change elsewhere.
struct Shown {
    bar: Option<ProgressBar>,
    last: std::cell::RefCell<String>,
}

impl Shown {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { bar, last: std::cell::RefCell::default() }
    }

    fn status(&self, status: &Status) {
        let text = match (status.state, &status.progress) {
            (State::Scheduled, _) => status.reason.clone().unwrap_or_else(|| "scheduled".to_owned()),
            (State::Preparing, Some(progress)) => match progress.percent() {
                Some(percent) => format!("{} {percent} %", progress.step),
                None => format!("{} {} MiB", progress.step, progress.done >> 20),
            },
            (State::Preparing, None) => "preparing".to_owned(),
            (State::Starting, _) if status.started_at.is_some() => "booting".to_owned(),
            (State::Starting, _) => "starting".to_owned(),
            (State::Paused, _) => match &status.reason {
                Some(reason) => format!("paused: {reason}"),
                None => "paused".to_owned(),
            },
            (State::Active, _) => status.ip.map_or_else(|| "active".to_owned(), |ip| format!("IP {ip}")),
            (state, _) => state.to_string().to_lowercase(),
        };
        self.tell(&text);
    }

    fn tell(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None if *self.last.borrow() != text => tell(text),
            None => {}
        }
        text.clone_into(&mut self.last.borrow_mut());
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

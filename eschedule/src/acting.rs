//! What is done to instances that are there: one after the other, each answered for by itself.

use std::time::Duration;

use ec_cloud::{Acted, Doomed, Verb, resolve, until_active, until_gone, until_powered};
use ec_model::{InstanceId, State};
use ec_runtime::exit::{Failure, print, tell};
use serde_json::{Value, json};

use crate::{
    cli::{Instances, Waiting},
    config::Session,
    output,
    shown::Shown,
};

/// What came of one: a line for people, and the same for scripts.
struct Done {
    line: String,
    json: Value,
}

/// Asks the same of each.
pub(crate) async fn act(
    session: &Session,
    verb: &Verb,
    instances: &Instances,
    waiting: Waiting,
    json: bool,
) -> Result<(), Failure> {
    each(session, instances, json, async |instance| act_on(session, verb, instance, waiting).await).await
}

/// Destroys each.
pub(crate) async fn destroy(
    session: &Session,
    instances: &Instances,
    waiting: Waiting,
    json: bool,
) -> Result<(), Failure> {
    each(session, instances, json, async |instance| destroy_one(session, instance, waiting).await).await
}

/// One that fails does not keep the others from being done. The first failure is the outcome of all, and of one alone.
async fn each(
    session: &Session,
    instances: &Instances,
    json: bool,
    work: impl AsyncFn(InstanceId) -> Result<Done, Failure>,
) -> Result<(), Failure> {
    let mut failed = None::<Failure>;
    let mut done = Vec::new();
    for text in &instances.instances {
        let outcome = match resolve(&session.cloud, text).await {
            Ok(instance) => work(instance).await,
            Err(error) => Err(error.into()),
        };
        match outcome {
            Ok(one) if json => done.push(one.json),
            Ok(one) => print(&one.line)?,
            // The last word is the process's own.
            Err(failure) => match &failed {
                None => failed = Some(failure),
                Some(_) => tell(&format!("eschedule: {}", failure.message)),
            },
        }
    }
    if json {
        match done.pop() {
            Some(one) if instances.instances.len() == 1 => output::json(&one)?,
            last => output::json(&done.into_iter().chain(last).collect::<Vec<_>>())?,
        }
    }
    failed.map_or(Ok(()), Err)
}

async fn act_on(
    session: &Session,
    verb: &Verb,
    instance: InstanceId,
    waiting: Waiting,
) -> Result<Done, Failure> {
    let Acted { node, node_alive, awaited, already } = ec_cloud::act(&session.cloud, instance, verb).await?;
    if let Some(why) = &already {
        tell(&format!("eschedule: {instance}: {why}"));
    }
    if awaited.is_some() && !node_alive {
        tell(&format!("eschedule: node {node} is not alive: it is done to {instance} when it is back"));
    }
    let state = match awaited {
        Some(generation) if waiting.wait => {
            let shown = Shown::new(&under_way(verb).to_lowercase());
            let timeout = Duration::from_secs(waiting.timeout);
            let (cloud, seen) = (&session.cloud, |step: ec_cloud::Step<'_>| shown.step(step));
            let outcome = async {
                let status = until_powered(cloud, node, instance, generation, timeout, seen).await?;
                // Who waits for a guest that runs wants to reach it.
                match status.state {
                    State::Starting => until_active(cloud, node, instance, timeout, seen).await,
                    _ => Ok(status),
                }
            };
            let outcome = outcome.await;
            shown.finish();
            outcome?.state.to_string()
        }
        _ => under_way(verb).to_owned(),
    };
    let line = match &already {
        Some(_) => format!("NOTHING TO DO FOR INSTANCE {instance} ON {node}"),
        None => format!("{state} INSTANCE {instance} ON {node}"),
    };
    let state = already.is_none().then_some(state);
    let json = json!({"instance": instance, "node": node, "node_alive": node_alive, "state": state, "note": already});
    Ok(Done { line, json })
}

fn under_way(verb: &Verb) -> &'static str {
    match verb {
        Verb::Start => "STARTING",
        Verb::Stop(_) => "STOPPING",
        Verb::Reboot(_) => "REBOOTING",
        Verb::Pause => "PAUSING",
        Verb::Unpause => "UNPAUSING",
        Verb::Suspend => "SUSPENDING",
        Verb::Resume => "RESUMING",
        Verb::Lock(_) => "LOCKED",
        Verb::Unlock => "UNLOCKED",
        Verb::Rename(_) => "RENAMED",
        Verb::Set(_) => "SET",
    }
}

async fn destroy_one(session: &Session, instance: InstanceId, waiting: Waiting) -> Result<Done, Failure> {
    let (node, alive) = match ec_cloud::destroy(&session.cloud, instance).await? {
        Doomed::By { node, alive } => (Some(node), alive),
        Doomed::Already => (None, false),
    };
    if let Some(node) = node.filter(|_| !alive) {
        tell(&format!("eschedule: node {node} is not alive: {instance} is destroyed when it is back"));
    }
    let done = match node {
        Some(node) if waiting.wait => {
            let shown = Shown::new("destroying");
            let timeout = Duration::from_secs(waiting.timeout);
            let outcome = until_gone(&session.cloud, node, instance, timeout, |step| shown.step(step)).await;
            shown.finish();
            outcome?;
            "DESTROYED"
        }
        Some(_) => "DESTROYING",
        None => "DESTROYED",
    };
    let line = match node {
        Some(node) => format!("{done} INSTANCE {instance} ON {node}"),
        None => format!("{done} INSTANCE {instance}, WHICH WAS NEVER PLACED"),
    };
    let json = json!({"instance": instance, "node": node, "node_alive": alive, "state": done});
    Ok(Done { line, json })
}

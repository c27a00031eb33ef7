//! What is done to instances that are there: one after the other, each answered for by itself.

use std::time::Duration;

use ec_cloud::{
    Acted, Ask, Cloud, Doomed, Verb, View, find, resolve, select, until_active, until_done, until_gone,
};
use ec_model::{Extent, InstanceId, NodeId, ResourceQuery, State};
use ec_runtime::exit::{Failure, print, tell};
use serde::Serialize;

use crate::{
    cli::{Instances, Output, Resizing, Waiting},
    config::Session,
    output,
    shown::Shown,
};

/// What came of one.
#[derive(Serialize)]
pub(crate) struct Done {
    pub(crate) instance: InstanceId,
    /// Where it is; none where it was never placed.
    pub(crate) node: Option<NodeId>,
    pub(crate) node_alive: bool,
    /// How it is now, or what is under way; none where there was nothing to do.
    pub(crate) state: Option<String>,
    /// Why there was nothing to do.
    pub(crate) note: Option<String>,
    /// The same for people.
    #[serde(skip)]
    pub(crate) line: String,
}

/// Asks the same of each.
pub(crate) async fn act(
    session: &Session,
    verb: &Verb,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    each(session, instances, output, async |instance| act_on(session, verb, instance, waiting).await).await
}

/// Gives an instance another size, by a flavor's name or a query; or has what there is of that confirmed or reverted.
pub(crate) async fn resize(session: &Session, resizing: Resizing, output: Output) -> Result<(), Failure> {
    let Resizing { instance, to, waiting } = resizing;
    let verb = if to.confirm {
        Verb::Confirm
    } else if to.revert {
        Verb::Revert
    } else {
        let text = match &to.flavor {
            Some(flavor) => ec_cloud::flavor(&session.cloud, flavor).await?.query,
            None => to.query.unwrap_or_default(),
        };
        let query = ResourceQuery::parse(&text).map_err(|error| Failure::usage(error.to_string()))?;
        // What a virtual machine needs it needs here, too.
        Ask::new(&query)?;
        Verb::Resize(Extent { query: query.text().to_owned(), resources: query.total() })
    };
    let instances = Instances { instances: vec![instance], ..Instances::default() };
    act(session, &verb, &instances, waiting, output).await
}

/// Destroys each.
pub(crate) async fn destroy(
    session: &Session,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    each(session, instances, output, async |instance| destroy_one(session, instance, waiting).await).await
}

/// One that fails does not keep the others from being done. The first failure is the outcome of all, and of one alone.
async fn each(
    session: &Session,
    instances: &Instances,
    output: Output,
    work: impl AsyncFn(InstanceId) -> Result<Done, Failure>,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let mut texts = instances.instances.clone();
    if !instances.label.is_empty() {
        texts.extend(select(cloud, &instances.label).await?.iter().map(ToString::to_string));
    }
    let mut failed = None::<Failure>;
    let mut done = Vec::new();
    for text in &texts {
        let outcome = match resolve(cloud, text).await {
            Ok(instance) => {
                // Asked before: what is destroyed has none afterwards.
                let name =
                    if output == Output::Name { name_of(cloud, instance).await } else { String::new() };
                work(instance).await.map(|one| (one, name))
            }
            Err(error) => Err(error.into()),
        };
        match outcome {
            Ok((one, _)) if output == Output::Table => print(&one.line)?,
            Ok((_, name)) if output == Output::Name => print(&name)?,
            Ok((one, _)) => done.push(one),
            // The last word is the process's own.
            Err(failure) => match &failed {
                None => failed = Some(failure),
                Some(_) => tell(&format!("eschedule: {}", failure.message)),
            },
        }
    }
    match done.as_slice() {
        // One that was named is no list.
        [one] if instances.instances.len() == 1 => output.print_fields(one)?,
        all => output.print_fields(all)?,
    }
    failed.map_or(Ok(()), Err)
}

/// What an instance is called, where that can be found out; else its uuid.
async fn name_of(cloud: &Cloud, instance: InstanceId) -> String {
    let view = find(cloud, instance).await.map(|found| View::found(&found));
    output::called(view.ok().and_then(|view| view.name).as_ref(), instance)
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
        Some(awaited) if waiting.wait => {
            let shown = Shown::new(&under_way(verb).to_lowercase());
            let timeout = Duration::from_secs(waiting.timeout);
            let (cloud, seen) = (&session.cloud, |step: ec_cloud::Step<'_>| shown.step(step));
            let outcome = async {
                let status = until_done(cloud, node, instance, awaited, timeout, seen).await?;
                // Who waits for a guest that runs wants to reach it.
                match status.state {
                    State::Starting => until_active(cloud, node, instance, timeout, seen).await,
                    _ => Ok(status),
                }
            };
            let outcome = outcome.await;
            shown.finish();
            match (outcome?.state, verb) {
                // Its agent tells how it is besides.
                (State::Active | State::Stopped, Verb::Resize(_)) => State::VerifyResize,
                (state, _) => state,
            }
            .to_string()
        }
        _ => under_way(verb).to_owned(),
    };
    let line = match &already {
        Some(_) => format!("NOTHING TO DO FOR INSTANCE {instance} ON {node}"),
        None => format!("{state} INSTANCE {instance} ON {node}"),
    };
    let state = already.is_none().then_some(state);
    Ok(Done { instance, node: Some(node), node_alive, state, note: already, line })
}

/// The word for what is under way then.
pub(crate) fn under_way(verb: &Verb) -> &'static str {
    match verb {
        Verb::Start => "STARTING",
        Verb::Stop(_) => "STOPPING",
        Verb::Reboot(_) => "REBOOTING",
        Verb::Pause => "PAUSING",
        Verb::Unpause => "UNPAUSING",
        Verb::Suspend => "SUSPENDING",
        Verb::Resume => "RESUMING",
        Verb::Rebuild(_) => "REBUILDING",
        Verb::Rescue(_) => "RESCUING",
        Verb::Unrescue => "UNRESCUING",
        Verb::Resize(_) | Verb::Revert => "RESIZING",
        Verb::Confirm => "CONFIRMED",
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
    Ok(Done { instance, node, node_alive: alive, state: Some(done.to_owned()), note: None, line })
}

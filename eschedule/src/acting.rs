//! What is done to instances that are there: one after the other, each answered for by itself.

use std::{collections::HashSet, time::Duration};

use ec_cloud::{
    Acted, Ask, Cloud, CloudError, Doomed, Verb, View, destroy_selected, find, find_placed, resolve, select,
    until_active, until_done, until_gone,
};
use ec_model::{
    Attachment, Extent, InstanceId, NodeId, RequestId, ResourceQuery, State, input::LabelSelector,
};
use ec_runtime::{
    exit::{Failure, INTERRUPTED, print, tell},
    shutdown_on_signals,
};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{
    cli::{Instances, Output, Resizing, Waiting},
    config::Session,
    output::{self, Mood},
    shown::Shown,
};

/// So many characters of a uuid are no chance, where a mistake costs a disk.
pub(crate) const CERTAIN: usize = 8;

/// What came of one.
#[derive(Default, Serialize)]
pub(crate) struct Done {
    /// None where it is not known which is meant.
    pub(crate) instance: Option<InstanceId>,
    /// Where it is; none where it was never placed, or that is not known.
    pub(crate) node: Option<NodeId>,
    pub(crate) node_alive: Option<bool>,
    /// How it is now, or what is under way; none where there was nothing to do, or it failed.
    pub(crate) state: Option<String>,
    /// Why there was nothing to do.
    pub(crate) note: Option<String>,
    /// The id of the command.
    pub(crate) request_id: Option<RequestId>,
    /// The word by which it was asked for, where it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) asked: Option<String>,
    /// What failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// The same for people.
    #[serde(skip)]
    pub(crate) line: String,
}

impl Done {
    /// Of one that failed.
    fn failed(asked: &str, instance: Option<InstanceId>, why: &str) -> Self {
        Self { instance, asked: Some(asked.to_owned()), error: Some(why.to_owned()), ..Self::default() }
    }
}

/// Asks the same of each.
pub(crate) async fn act(
    session: &Session,
    verb: &Verb,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let certain = matches!(verb, Verb::Rebuild(_));
    let patience = Patience::new(waiting)?;
    let work = async |instance, _: &[LabelSelector]| act_on(session, verb, instance, &patience).await;
    each(session, instances, output, certain, work, &patience).await
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
        let query = match to.flavor.is_some() && boots_from_volume(session, &instance).await? {
            true => query.without("DISK_GB").map_err(|error| Failure::usage(error.to_string()))?,
            false => query,
        };
        Verb::Resize(Extent { query: query.text().to_owned(), resources: query.total() })
    };
    let instances = Instances { instances: vec![instance], ..Instances::default() };
    act(session, &verb, &instances, waiting, output).await
}

/// Whether an instance has no disk of its own, so that what a flavor says of one is not meant.
async fn boots_from_volume(session: &Session, instance: &str) -> Result<bool, Failure> {
    let instance = resolve(&session.cloud, instance).await?;
    let record = find_placed(&session.cloud, instance).await?.record;
    Ok(record.is_some_and(|record| Attachment::root_of(&record.volumes).is_some()))
}

/// Destroys each.
pub(crate) async fn destroy(
    session: &Session,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let patience = Patience::new(waiting)?;
    let work = async |instance, selectors: &[LabelSelector]| {
        destroy_one(session, instance, selectors, &patience).await
    };
    each(session, instances, output, true, work, &patience).await
}

/// How long an outcome is waited for.
pub(crate) struct Patience {
    /// None where it is not waited for at all.
    pub(crate) timeout: Option<Duration>,
    /// Whether somebody pressed Ctrl-C while something is waited for; otherwise that ends the process at once.
    pub(crate) stop: CancellationToken,
}

impl Patience {
    pub(crate) fn new(waiting: Waiting) -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("failed to listen for signals: {error}"));
        let stop =
            if waiting.wait { shutdown_on_signals().map_err(failed)? } else { CancellationToken::new() };
        Ok(Self { timeout: waiting.wait.then_some(Duration::from_secs(waiting.timeout)), stop })
    }

    /// What comes of something that was asked of an instance, unless somebody does not wait any more.
    pub(crate) async fn wait<T>(
        &self,
        session: &Session,
        instance: InstanceId,
        outcome: impl Future<Output = Result<T, CloudError>>,
    ) -> Result<T, Failure> {
        let interrupted = Failure {
            code: INTERRUPTED,
            message: format!(
                "interrupted: what was asked of {instance} goes on; `eschedule show {instance}` tells how far it is"
            ),
        };
        tokio::select! {
            outcome = outcome => outcome.map_err(|error| session.failed(error)),
            () = self.stop.cancelled() => Err(interrupted),
        }
    }
}

/// Keeps the first failure, which is the process's own last word, and tells of each after it.
pub(crate) fn note(failed: &mut Option<Failure>, failure: Failure) {
    match failed {
        None => *failed = Some(failure),
        Some(_) => tell(&format!("eschedule: {}", failure.message)),
    }
}

/// That somebody interrupted the command before it came to this one.
pub(crate) fn nothing_asked(text: &str) -> Failure {
    Failure { code: INTERRUPTED, message: format!("interrupted: nothing was asked of {text}") }
}

/// One that fails does not keep the others from being done. The first failure is the outcome of all, and of one alone.
/// What costs a disk must be `certain`.
async fn each(
    session: &Session,
    instances: &Instances,
    output: Output,
    certain: bool,
    work: impl AsyncFn(InstanceId, &[LabelSelector]) -> Result<Done, Failure>,
    patience: &Patience,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let mut texts = instances.instances.clone();
    if !instances.label.is_empty() {
        texts.extend(select(cloud, &instances.label).await?.iter().map(ToString::to_string));
    }
    let named: HashSet<&String> = instances.instances.iter().collect();
    // Named twice it is asked once, whichever way: once it is gone its name would mean nobody.
    let (mut words, mut asked) = (HashSet::new(), HashSet::new());
    texts.retain(|text| words.insert(text.clone()));
    let request_id = cloud.request_id;
    let mut failed = None::<Failure>;
    let mut done = Vec::new();
    for text in &texts {
        if patience.stop.is_cancelled() {
            done.push(Done::failed(text, None, "interrupted before anything was asked of it"));
            note(&mut failed, nothing_asked(text));
            continue;
        }
        let meant = meant(cloud, text, certain).await;
        let instance = meant.as_ref().ok().copied();
        if instance.is_some_and(|instance| !asked.insert(instance)) {
            continue;
        }
        let outcome = match meant {
            Ok(instance) => {
                let selectors = if named.contains(text) { &[][..] } else { &instances.label };
                one(cloud, (instance, selectors), output, &work).await
            }
            Err(error) => Err(error.into()),
        };
        match outcome {
            Ok((one, _)) if output == Output::Table => print(&one.line)?,
            Ok((_, name)) if output == Output::Name => print(&output::plain(&name))?,
            Ok((one, _)) => done.push(Done { request_id, ..one }),
            Err(failure) => {
                done.push(Done { request_id, ..Done::failed(text, instance, &failure.message) });
                note(&mut failed, failure);
            }
        }
    }
    match done.as_slice() {
        // One that was named is no list.
        [one] if instances.instances.len() == 1 => output.print_fields(one)?,
        all => output.print_fields(all)?,
    }
    failed.map_or(Ok(()), Err)
}

/// What comes of one, and what that is called where names are wanted.
async fn one(
    cloud: &Cloud,
    (instance, selectors): (InstanceId, &[LabelSelector]),
    output: Output,
    work: &impl AsyncFn(InstanceId, &[LabelSelector]) -> Result<Done, Failure>,
) -> Result<(Done, String), Failure> {
    if output != Output::Name {
        return Ok((work(instance, selectors).await?, String::new()));
    }
    // Asked before, since what is destroyed has none afterwards, and again, since it may be renamed.
    let before = name_of(cloud, instance).await;
    let one = work(instance, selectors).await?;
    let name = name_of(cloud, instance).await.or(before);
    Ok((one, output::called(name.as_ref(), instance)))
}

/// The instance that a word means.
async fn meant(cloud: &Cloud, text: &str, certain: bool) -> Result<InstanceId, CloudError> {
    let instance = resolve(cloud, text).await?;
    // A name that is borne by nobody any more may well be the beginning of another's uuid.
    if certain
        && text.len() < CERTAIN
        && instance.to_string().starts_with(text)
        && !bears(cloud, instance, text).await
    {
        return Err(CloudError::NotFound(format!(
            "no instance of project `{}` is named `{text}`; {instance} begins so, and what it wrote would be lost: give {CERTAIN} characters of that or more",
            cloud.project
        )));
    }
    Ok(instance)
}

async fn bears(cloud: &Cloud, instance: InstanceId, name: &str) -> bool {
    name_of(cloud, instance).await.is_some_and(|called| called.eq_ignore_ascii_case(name))
}

/// What an instance is called, where it has a name and that can be found out.
async fn name_of(cloud: &Cloud, instance: InstanceId) -> Option<String> {
    find(cloud, instance).await.ok().and_then(|found| View::found(&found).name)
}

async fn act_on(
    session: &Session,
    verb: &Verb,
    instance: InstanceId,
    patience: &Patience,
) -> Result<Done, Failure> {
    let Acted { node, node_alive, awaited, already } =
        ec_cloud::act(&session.cloud, instance, verb).await.map_err(|error| session.failed(error))?;
    if let Some(why) = &already {
        tell(&format!("eschedule: {instance}: {why}"));
    }
    if awaited.is_some() && !node_alive {
        tell(&format!("eschedule: node {node} is not alive: it is done to {instance} when it is back"));
    }
    let state = match (awaited, patience.timeout) {
        (Some(awaited), Some(timeout)) => {
            let shown = Shown::new(&under_way(verb).to_lowercase());
            // How it stood before tells nothing of what is under way, and how it stands at the end the result does.
            let seen = |step: ec_cloud::Step<'_>| match step {
                ec_cloud::Step::Status(status) if output::mood_of(status.state) != Some(Mood::UnderWay) => {}
                step => shown.step(step),
            };
            let cloud = &session.cloud;
            let outcome = async {
                let status = until_done(cloud, node, instance, awaited, timeout, seen).await?;
                // Who waits for a guest that runs wants to reach it.
                match status.state {
                    State::Starting => until_active(cloud, node, instance, timeout, seen).await,
                    _ => Ok(status),
                }
            };
            let outcome = patience.wait(session, instance, outcome).await;
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
    let (instance, node, node_alive) = (Some(instance), Some(node), Some(node_alive));
    Ok(Done { instance, node, node_alive, state, note: already, line, ..Done::default() })
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
        Verb::Lock(_) | Verb::Hold(_) => "LOCKED",
        Verb::Unlock | Verb::LetGo(_) => "UNLOCKED",
        Verb::Rename(_) => "RENAMED",
        Verb::Set(_) => "SET",
    }
}

/// Destroys one; where it was selected, only while it is what was.
async fn destroy_one(
    session: &Session,
    instance: InstanceId,
    selectors: &[LabelSelector],
    patience: &Patience,
) -> Result<Done, Failure> {
    let doomed = destroy_selected(&session.cloud, instance, selectors).await;
    let (node, alive) = match doomed.map_err(|error| session.failed(error))? {
        Doomed::By { node, alive } => (Some(node), alive),
        Doomed::Already => (None, false),
    };
    if let Some(node) = node.filter(|_| !alive) {
        tell(&format!("eschedule: node {node} is not alive: {instance} is destroyed when it is back"));
    }
    let done = match (node, patience.timeout) {
        (Some(node), Some(timeout)) => {
            let shown = Shown::new("destroying");
            let gone = until_gone(&session.cloud, node, instance, timeout, |step| shown.step(step));
            let outcome = patience.wait(session, instance, gone).await;
            shown.finish();
            outcome?;
            "DESTROYED"
        }
        (Some(_), None) => "DESTROYING",
        (None, _) => "DESTROYED",
    };
    let line = match node {
        Some(node) => format!("{done} INSTANCE {instance} ON {node}"),
        None => format!("{done} INSTANCE {instance}, WHICH WAS NEVER PLACED"),
    };
    let (instance, node_alive, state) = (Some(instance), Some(alive), Some(done.to_owned()));
    Ok(Done { instance, node, node_alive, state, line, ..Done::default() })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Settings;

    #[tokio::test]
    async fn who_interrupts_before_all_were_asked_is_not_told_that_all_is_done() {
        ec_runtime::install_tls_provider();
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../schedule.yaml");
        let settings = Settings::load(Some(Path::new(shipped))).map_err(|failure| failure.message).unwrap();
        let session = Session::open(settings).await.map_err(|failure| failure.message).unwrap();
        let patience = Patience { timeout: None, stop: CancellationToken::new() };
        patience.stop.cancel();
        let instances = Instances { instances: vec!["one".into(), "two".into()], ..Instances::default() };
        let work = async |_, _: &[LabelSelector]| panic!("it was asked");
        let failed = each(&session, &instances, Output::Table, false, work, &patience).await.unwrap_err();
        assert_eq!(
            (failed.code, failed.message.as_str()),
            (INTERRUPTED, "interrupted: nothing was asked of one")
        );
    }
}

//! What is done to instances that are there.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use ec_cloud::{
    Acted, Ask, Awaited, Cloud, CloudError, Doomed, Kind, Verb, View, destroy_selected, find, find_placed,
    resolve, resolve_name, select, until_active, until_done, until_gone,
};
use ec_model::{
    Attachment, Extent, Instance, InstanceId, NodeId, RequestId, ResourceQuery, State, Status, Workload,
    decode, input::LabelSelector,
};
use ec_runtime::{
    exit::{Failure, INTERRUPTED, tell},
    shutdown_on_signals,
};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{
    cli::{Instances, Output, Resizing, Size, Waiting},
    config::Session,
    output::{self, Mood},
    several::{self, Asked, One, Told},
    shown::Shown,
};

/// So many characters of a uuid are no chance, where a mistake costs a disk.
pub(crate) const CERTAIN: usize = 8;

/// What came of one.
#[derive(Default, Serialize)]
pub(crate) struct Done {
    /// None where it is not known which is meant.
    pub(crate) instance: Option<InstanceId>,
    /// Where it is; none where it was never placed, only a claim was left of it, or that is not known.
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

    /// Of one that no node has to do with, and of which this was so.
    fn gone(instance: InstanceId, which: &str) -> Self {
        Self {
            instance: Some(instance),
            node_alive: Some(false),
            state: Some("DESTROYED".to_owned()),
            line: format!("DESTROYED INSTANCE {instance}, {which}"),
            ..Self::default()
        }
    }

    /// Of one that is so now, or on the way there.
    fn being(self, state: &str) -> Self {
        let [instance, node] = [self.instance.map(|it| it.to_string()), self.node.map(|it| it.to_string())]
            .map(Option::unwrap_or_default);
        let line = format!("{state} INSTANCE {instance} ON {node}");
        Self { state: Some(state.to_owned()), line, ..self }
    }
}

/// What of an instance is otherwise afterwards, as far as it matters for how it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changes {
    /// Nothing that does.
    Nothing,
    /// Its name: it is told by the new one.
    Name,
    /// What was written on its disk is lost: who is meant must be certain.
    Disk,
}

/// Asks the same of each.
pub(crate) async fn act(
    session: &Session,
    verb: &Verb,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let changes = match verb {
        Verb::Rebuild(_) => Changes::Disk,
        Verb::Rename(_) => Changes::Name,
        _ => Changes::Nothing,
    };
    act_by(session, async |_| Ok(verb), changes, instances, waiting, output).await
}

/// Asks of each what this says of it.
async fn act_by<'a>(
    session: &Session,
    verb_of: impl AsyncFn(InstanceId) -> Result<&'a Verb, Failure>,
    changes: Changes,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let patience = Patience::new(waiting)?;
    let ask = async |instance, selectors: &[LabelSelector]| {
        ask_of(session, verb_of(instance).await?, instance, selectors, &patience).await
    };
    let wait = async |done: Done, awaited, shown: &Shown| {
        let state = come_to(session, awaited, shown, &patience).await?;
        Ok(done.being(&state))
    };
    each(session, instances, output, changes, ask, wait, &patience).await
}

/// Gives instances another size, by a flavor's name or a query; or has what there is of that confirmed or reverted.
pub(crate) async fn resize(session: &Session, resizing: Resizing, output: Output) -> Result<(), Failure> {
    let (instances, size, waiting) = resizing.what()?;
    let parsed = |text: &str| ResourceQuery::parse(text).map_err(|error| Failure::usage(error.to_string()));
    let (query, is_flavor) = match size {
        Size::Confirm => return act(session, &Verb::Confirm, &instances, waiting, output).await,
        Size::Revert => return act(session, &Verb::Revert, &instances, waiting, output).await,
        Size::Query(query) => (parsed(&query)?, false),
        Size::Flavor(flavor) => (parsed(&ec_cloud::flavor(&session.cloud, &flavor).await?.query)?, true),
    };
    // What a virtual machine needs it needs here, too: then something is left of it without its disk.
    Ask::new(&query)?;
    let verb = resize_to(&query);
    if !is_flavor {
        return act(session, &verb, &instances, waiting, output).await;
    }
    let diskless = query.without("DISK_GB").map_err(|error| Failure::usage(error.to_string()))?;
    let diskless = resize_to(&diskless);
    let verb_of = async |instance| match boots_from_volume(session, instance).await? {
        true => Ok(&diskless),
        false => Ok(&verb),
    };
    act_by(session, verb_of, Changes::Nothing, &instances, waiting, output).await
}

fn resize_to(query: &ResourceQuery) -> Verb {
    Verb::Resize(Extent { query: query.text().to_owned(), resources: query.total() })
}

/// Whether it has no disk of its own, so that what a flavor says of one is not meant. Where it cannot be resized that is told when it
/// is asked.
async fn boots_from_volume(session: &Session, instance: InstanceId) -> Result<bool, Failure> {
    match find_placed(&session.cloud, instance).await {
        Ok(known) => Ok(known.record.is_some_and(|it| Attachment::root_of(&it.volumes).is_some())),
        Err(error) if error.kind() == Kind::Unreachable => Err(error.into()),
        Err(_) => Ok(false),
    }
}

/// Destroys each.
pub(crate) async fn destroy(
    session: &Session,
    instances: &Instances,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let patience = Patience::new(waiting)?;
    let ask = async |instance, selectors: &[LabelSelector]| {
        ask_to_go(session, instance, selectors, &patience).await
    };
    let wait = async |done: Done, (instance, node), shown: &Shown| {
        let left = patience.left().unwrap_or_default();
        let gone = until_gone(&session.cloud, node, instance, left, |step| shown.step(step));
        patience.wait(session, instance, gone).await?;
        Ok(done.being("DESTROYED"))
    };
    each(session, instances, output, Changes::Disk, ask, wait, &patience).await
}

/// Says what is done later, unless the node that does it is alive.
pub(crate) fn tell_later(node: NodeId, alive: bool, what: &str) {
    if !alive {
        tell(&format!("eschedule: node {node} is not alive: {what} when it is back"));
    }
}

/// How long outcomes are waited for, all of one command together.
pub(crate) struct Patience {
    /// None where they are not waited for at all.
    until: Option<Instant>,
    /// Whether somebody pressed Ctrl-C.
    pub(crate) stop: CancellationToken,
}

impl Patience {
    pub(crate) fn new(waiting: Waiting) -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("failed to listen for signals: {error}"));
        Ok(Self::until(waiting, shutdown_on_signals().map_err(failed)?))
    }

    /// The same of who listens for signals already.
    pub(crate) fn until(waiting: Waiting, stop: CancellationToken) -> Self {
        let until = Instant::now() + Duration::from_secs(waiting.timeout);
        Self { until: waiting.wait.then_some(until), stop }
    }

    /// How much of that is left; none where nothing is waited for at all.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(Instant::now()))
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

/// Asks each, as [`several::each`] says.
async fn each<W>(
    session: &Session,
    instances: &Instances,
    output: Output,
    changes: Changes,
    ask: impl AsyncFn(InstanceId, &[LabelSelector]) -> Result<(Done, Option<W>), Failure>,
    wait: impl AsyncFn(Done, W, &Shown) -> Result<Done, Failure>,
    patience: &Patience,
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let mut words = instances.instances.clone();
    if !instances.label.is_empty() {
        words.extend(select(cloud, &instances.label).await?.iter().map(ToString::to_string));
    }
    let named: HashSet<&str> = instances.instances.iter().map(String::as_str).collect();
    let meant = async |word: &str| Ok(meant(cloud, word, changes == Changes::Disk).await?);
    let called = async |instance| match output {
        Output::Name => output::called(own_name_of(cloud, instance).await.as_ref(), instance),
        _ => String::new(),
    };
    // Of one that is not done in time it is known, too.
    let places = RefCell::new(HashMap::new());
    let ask = async |instance, word: &str| {
        let selectors = if named.contains(word) { &[][..] } else { &instances.label };
        // What is destroyed has no name afterwards, and who looks for one then looks through all keys.
        let before = if changes == Changes::Name { None } else { Some(called(instance).await) };
        let (done, awaited) = ask(instance, selectors).await?;
        places.borrow_mut().insert(instance, (done.node, done.node_alive));
        let name = match before {
            Some(name) => name,
            None => called(instance).await,
        };
        Ok(match awaited {
            None => Asked::Done(one(cloud, done, name)),
            Some(awaited) => {
                let first = done.state.as_deref().unwrap_or_default().to_lowercase();
                Asked::Awaited((done, name, awaited), first)
            }
        })
    };
    let wait = async |_, (done, name, awaited), shown: &Shown| {
        Ok(one(cloud, wait(done, awaited, shown).await?, name))
    };
    let request_id = cloud.request_id;
    let of_failed = |word: &str, instance: Option<InstanceId>, why: &str| {
        let place = instance.and_then(|instance| places.borrow().get(&instance).copied());
        let (node, node_alive) = place.unwrap_or_default();
        Done { node, node_alive, request_id, ..Done::failed(word, instance, why) }
    };
    let told = Told::new(output, instances.instances.len() == 1, &of_failed);
    several::each(told, &words, patience, meant, ask, wait).await
}

/// What came of one that is called so.
fn one(cloud: &Cloud, done: Done, name: String) -> One<Done> {
    let line = done.line.clone();
    One { fields: Done { request_id: cloud.request_id, ..done }, line, name }
}

/// The instance that a word means, where it means one: a uuid may be all that somebody has of a volume, of which much else is asked.
pub(crate) async fn no_volume(cloud: &Cloud, text: &str) -> Result<InstanceId, CloudError> {
    let instance = resolve(cloud, text).await?;
    let pair = cloud.store.get(&cloud.keys.instance(instance)).await?.0;
    // Of one without a record, or whose record cannot be read, others tell.
    match pair.and_then(|pair| decode::<Instance>(&pair.value).ok()) {
        Some(record) if !record.kind.is_machine() => Err(CloudError::Refused(format!(
            "{text} is a volume: `eschedule volume show {text}` tells how it stands"
        ))),
        _ => Ok(instance),
    }
}

/// The instance that a word means, where a mistake may cost a disk.
async fn meant(cloud: &Cloud, text: &str, certain: bool) -> Result<InstanceId, CloudError> {
    let instance = resolve(cloud, text).await?;
    // A name that is borne by nobody any more may well be the beginning of another's uuid.
    if certain
        && text.len() < CERTAIN
        && instance.to_string().starts_with(&text.to_ascii_lowercase())
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

/// The same, where whoever says that name means this one: it is of the project, and nobody else bears the name.
pub(crate) async fn own_name_of(cloud: &Cloud, instance: InstanceId) -> Option<String> {
    let name = name_of(cloud, instance).await?;
    let meant = resolve_name(cloud, Workload::Machine, &name).await.ok();
    (meant == Some(instance)).then_some(name)
}

/// What is waited for of an instance on a node.
type Awaiting = (InstanceId, NodeId, Awaited);

/// Asks it of one.
async fn ask_of(
    session: &Session,
    verb: &Verb,
    instance: InstanceId,
    selectors: &[LabelSelector],
    patience: &Patience,
) -> Result<(Done, Option<Awaiting>), Failure> {
    let acted = ec_cloud::act_selected(&session.cloud, instance, verb, selectors).await;
    let Acted { node, node_alive, awaited, already } = acted.map_err(|error| session.failed(error))?;
    if let Some(why) = &already {
        tell(&format!("eschedule: {instance}: {why}"));
    }
    tell_later(node, node_alive || awaited.is_none(), &format!("it is done to {instance}"));
    let awaited = awaited.filter(|_| patience.left().is_some()).map(|awaited| (instance, node, awaited));
    let done = Done {
        instance: Some(instance),
        node: Some(node),
        node_alive: Some(node_alive),
        line: format!("NOTHING TO DO FOR INSTANCE {instance} ON {node}"),
        ..Done::default()
    };
    let done = match already {
        // What is on its way there is waited for.
        Some(why) => Done { note: Some(why), ..done },
        None => done.being(under_way(verb)),
    };
    Ok((done, awaited))
}

/// Waits for what was asked for; how the instance is then.
async fn come_to(
    session: &Session,
    (instance, node, awaited): Awaiting,
    shown: &Shown,
    patience: &Patience,
) -> Result<String, Failure> {
    let left = || patience.left().unwrap_or_default();
    // How it stood before tells nothing of what is under way, and how it stands at the end the result does.
    let seen = |step: ec_cloud::Step<'_>| match step {
        ec_cloud::Step::Status(status) if output::mood_of(status.state) != Some(Mood::UnderWay) => {}
        step => shown.step(step),
    };
    let cloud = &session.cloud;
    let outcome = async {
        let status = until_done(cloud, node, instance, awaited, left(), seen).await?;
        // Who waits for a guest that runs wants to reach it.
        match status.state {
            State::Starting if !matches!(awaited, Awaited::Heard(_)) => {
                until_active(cloud, node, instance, left(), seen).await
            }
            _ => Ok(status),
        }
    };
    let status = patience.wait(session, instance, outcome).await?;
    Ok(as_listed(cloud, &status).await)
}

/// In which state `list` has an instance that came to this: what its user wished of it counts there, too.
pub(crate) async fn as_listed(cloud: &Cloud, status: &Status) -> String {
    match find_placed(cloud, status.instance).await {
        Ok(known) => View::of(&known).state,
        // What was waited for is done, and told by its agent, whatever cannot be read now.
        Err(_) => status.state.to_string(),
    }
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
        Verb::Rebuild(_) | Verb::Remake(..) => "REBUILDING",
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

/// Asks for the end of one; where it was selected, only while it is what was.
async fn ask_to_go(
    session: &Session,
    instance: InstanceId,
    selectors: &[LabelSelector],
    patience: &Patience,
) -> Result<(Done, Option<(InstanceId, NodeId)>), Failure> {
    let doomed = destroy_selected(&session.cloud, instance, selectors).await;
    Ok(going(instance, doomed.map_err(|error| session.failed(error))?, patience.left().is_some()))
}

/// What is told of one whose end was asked for, and where that is waited for.
fn going(instance: InstanceId, doomed: Doomed, is_waited: bool) -> (Done, Option<(InstanceId, NodeId)>) {
    match doomed {
        Doomed::By { node, alive } => {
            let done = Done {
                instance: Some(instance),
                node: Some(node),
                node_alive: Some(alive),
                ..Done::default()
            };
            tell_later(node, alive, &format!("{instance} is destroyed"));
            (done.being("DESTROYING"), is_waited.then_some((instance, node)))
        }
        Doomed::Already => (Done::gone(instance, "WHICH WAS NEVER PLACED"), None),
        Doomed::Released => (Done::gone(instance, "OF WHICH A CLAIM OF SHARED STORAGE WAS LEFT"), None),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ec_runtime::exit::UNREACHABLE;
    use ec_store::{MemoryStore, Store, StoreError};

    use super::*;

    #[tokio::test]
    async fn who_cannot_be_resized_is_told_so_when_it_is_asked() {
        let mut session = Session::in_memory().await;
        let uuid = uuid::Uuid::from_u128(7);
        let text = format!(
            r#"{{"version":1,"instance":"{uuid}","name":"web","generation":1,
            "spec":{{"query":"resources=VCPU:1","image":{{"url":""}}}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        let unplaced = InstanceId::new(uuid);
        let txn = ec_store::Txn::new().put(session.cloud.keys.instance(unplaced), text);
        session.cloud.store.txn(txn).await.unwrap();
        assert!(!boots_from_volume(&session, unplaced).await.unwrap());
        let away = MemoryStore::new();
        away.faults().set_reachable(false);
        session.cloud.store = Arc::new(away);
        assert_eq!(boots_from_volume(&session, unplaced).await.unwrap_err().code, UNREACHABLE);
    }

    #[tokio::test]
    async fn who_interrupts_before_all_were_asked_is_not_told_that_all_is_done() {
        let session = Session::in_memory().await;
        let patience = Patience { until: None, stop: CancellationToken::new() };
        patience.stop.cancel();
        let instances = Instances { instances: vec!["one".into(), "two".into()], ..Instances::default() };
        let ask = async |_, _: &[LabelSelector]| panic!("it was asked");
        let wait = async |done, (), _: &Shown| Ok(done);
        let failed = each(&session, &instances, Output::Table, Changes::Nothing, ask, wait, &patience)
            .await
            .unwrap_err();
        assert_eq!(failed.code, INTERRUPTED);
    }

    #[tokio::test]
    async fn what_was_waited_for_is_told_as_the_list_tells_it() {
        let uuid = uuid::Uuid::from_u128(7);
        let record = |before: &str| {
            let text = format!(
                r#"{{"version":1,"instance":"{uuid}","name":"web","generation":1,
                "spec":{{"query":"resources=VCPU:2","image":{{"url":""}}}},{before}
                "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
            );
            ec_model::decode(text.as_bytes()).unwrap()
        };
        let told = |state: &str| {
            format!(
                r#"{{"version":1,"instance":"{uuid}","node":"{uuid}","epoch":1,"observed_generation":1,
                "state":"{state}","since":"1970-01-01T00:00:00Z","updated_at":"1970-01-01T00:00:00Z"}}"#
            )
        };
        let before = r#""before":{"query":"resources=VCPU:1","resources":{}},"#;
        for (before, state, listed) in [
            ("", "ACTIVE", "ACTIVE"),
            (before, "ACTIVE", "VERIFY_RESIZE"),
            (before, "STOPPED", "VERIFY_RESIZE"),
            (before, "PAUSED", "PAUSED"),
        ] {
            let session = Session::in_memory().await;
            let web = session.put(record(before)).await;
            let key = session.cloud.keys.status(web.node().unwrap(), web.instance);
            let txn = ec_store::Txn::new().put(key, told(state));
            session.cloud.store.txn(txn).await.unwrap();
            let patience = Patience {
                until: Some(Instant::now() + Duration::from_secs(60)),
                stop: CancellationToken::new(),
            };
            let awaited = (web.instance, web.node().unwrap(), Awaited::Heard(1));
            let state = come_to(&session, awaited, &Shown::new("set"), &patience).await.unwrap();
            assert_eq!(state, listed, "{before}");
        }
        // It is gone by then: its agent's word holds.
        let session = Session::in_memory().await;
        let status = ec_model::decode(told("ACTIVE").as_bytes()).unwrap();
        assert_eq!(as_listed(&session.cloud, &status).await, "ACTIVE");
    }

    #[test]
    fn what_was_never_placed_is_told_apart_from_what_left_a_claim() {
        let instance = InstanceId::new(uuid::Uuid::from_u128(7));
        let told = |doomed| {
            let (done, awaited) = going(instance, doomed, true);
            (done.line, done.state.unwrap(), awaited.is_some())
        };
        let node = NodeId::new(uuid::Uuid::from_u128(8));
        for (doomed, line, state, is_awaited) in [
            (Doomed::Already, "DESTROYED INSTANCE {}, WHICH WAS NEVER PLACED", "DESTROYED", false),
            (
                Doomed::Released,
                "DESTROYED INSTANCE {}, OF WHICH A CLAIM OF SHARED STORAGE WAS LEFT",
                "DESTROYED",
                false,
            ),
            (
                Doomed::By { node, alive: true },
                &format!("DESTROYING INSTANCE {{}} ON {node}"),
                "DESTROYING",
                true,
            ),
        ] {
            let line = line.replace("{}", &instance.to_string());
            assert_eq!(told(doomed), (line, state.to_owned(), is_awaited));
        }
    }

    #[tokio::test]
    async fn what_is_destroyed_is_not_looked_for_again_for_its_name() {
        let (mut session, store) = (Session::in_memory().await, MemoryStore::new());
        session.cloud.store = Arc::new(store.clone());
        let uuid = uuid::Uuid::from_u128(7);
        let web = format!(
            r#"{{"version":1,"instance":"{uuid}","name":"web","generation":1,
            "spec":{{"query":"resources=VCPU:1","image":{{"url":""}}}},
            "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        session.put(ec_model::decode(web.as_bytes()).unwrap()).await;
        let patience = Patience { until: None, stop: CancellationToken::new() };
        let instances = Instances { instances: vec!["web".into()], ..Instances::default() };
        for (changes, is_asked) in [(Changes::Disk, false), (Changes::Nothing, false), (Changes::Name, true)]
        {
            let ask = async |instance, _: &[LabelSelector]| {
                store.faults().fail_next(1, StoreError::Unknown("as told".into()));
                Ok((Done { instance: Some(instance), ..Done::default() }, None::<()>))
            };
            let wait = async |done, (), _: &Shown| Ok(done);
            let done = each(&session, &instances, Output::Name, changes, ask, wait, &patience).await;
            done.unwrap();
            assert_eq!(store.get("any").await.is_ok(), is_asked, "{changes:?}");
        }
    }
}

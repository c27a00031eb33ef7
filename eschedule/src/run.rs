//! Scheduling, by a query alone or with names, and the classic question for an address.

use std::{net::IpAddr, time::Duration};

use clap::{Args, ValueEnum};
use ec_cloud::{
    Acted, Ask, Cloud, CloudError, Guest, Joining, Naming, NoRoom, Reasons, Scheduled, Strategy, View,
    Wanted, find_placed, name_is_free, node_named, resolve_volume, until_active,
};
use ec_model::{InstanceId, NodeId, RequestId, ResourceQuery, State, Status, Workload};
use ec_runtime::{
    exit::{Failure, INTERRUPTED, print, tell},
    shutdown_on_signals,
};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::{
    acting::{Patience, as_listed, no_volume, own_name_of},
    cli::{Given, Output, Waiting},
    config::Session,
    explain,
    output::called,
    shown::Shown,
    spec, volume,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule run web --flavor small --image debian --key me --wait
      a flavor, an image and a keypair by their names
  eschedule run db --query 'resources=VCPU:2,MEMORY_MB:2048' --label role=db --restart on-failure
      what room it takes is said here; the image is schedule.yaml's
  eschedule run db --flavor small --volume data --wait
      where volume data lies, and with it
  eschedule run web --flavor small --dry-run
      says where it would go now and why, and does nothing";

/// An instance with a name.
#[derive(Args)]
#[group(id = "room", required = true, multiple = false, args = ["flavor", "query"])]
pub(crate) struct Run {
    /// The guest's hostname
    name: String,

    /// What room it takes: a flavor's name
    #[arg(long, value_name = "FLAVOR")]
    flavor: Option<String>,

    /// What room it takes: a resources query
    #[arg(long, value_name = "QUERY")]
    query: Option<String>,

    /// What to boot: the name of an image (`eschedule image`, or `images` of schedule.yaml), or a URL; or a copy of
    /// the disk of volume:NAME or instance:NAME [default: `image` of schedule.yaml]
    #[arg(long, value_name = "IMAGE|URL")]
    image: Option<String>,

    /// A volume that it shall have: it goes where that lies; may be given more than once
    #[arg(long, value_name = "VOLUME")]
    volume: Vec<String>,

    #[command(flatten)]
    given: Given,

    #[command(flatten)]
    place: Place,

    #[command(flatten)]
    waiting: Waiting,
}

/// Where it shall go.
#[derive(Args, Clone, Default)]
pub(crate) struct Place {
    /// On this node only: its name or its uuid
    #[arg(long, value_name = "NODE")]
    node: Option<String>,

    /// As a member of this group, which leaves nodes out or prefers some (`eschedule group`)
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,

    /// Which node first, of those that have room [default: `strategy` of schedule.yaml, else as placement has them]
    #[arg(long, value_name = "STRATEGY")]
    strategy: Option<Order>,

    /// Say where it would go now and why, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Which node first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// The least full
    Spread,
    /// The fullest
    Pack,
    /// The next by uuid, after the one where the project's newest instance went
    RoundRobin,
    /// Any
    Random,
    /// For an instance of the same name the same again, while it has room
    Sticky,
}

impl From<Order> for Strategy {
    fn from(order: Order) -> Self {
        match order {
            Order::Spread => Self::Spread,
            Order::Pack => Self::Pack,
            Order::RoundRobin => Self::RoundRobin,
            Order::Random => Self::Random,
            Order::Sticky => Self::Sticky,
        }
    }
}

impl Place {
    /// In this group, where one is told; else anywhere.
    pub(crate) fn within(group: Option<String>) -> Self {
        Self { group, ..Self::default() }
    }

    /// The same on this node only, where one is told.
    pub(crate) fn on(&self, node: Option<NodeId>) -> Self {
        Self { node: node.map(|node| node.to_string()), ..self.clone() }
    }
}

/// What came of a request.
#[derive(Default, Serialize)]
pub(crate) struct Made {
    pub(crate) instance: Option<InstanceId>,
    pub(crate) node: Option<NodeId>,
    pub(crate) state: Option<State>,
    pub(crate) ip: Option<IpAddr>,
    /// The id of the command.
    pub(crate) request_id: Option<RequestId>,
    /// What failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Why there was no room, in a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// The same, to be counted with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasons: Option<Reasons>,
}

/// Where an instance is reached.
#[derive(Serialize)]
pub(crate) struct Reached {
    pub(crate) instance: InstanceId,
    pub(crate) state: String,
    pub(crate) ip: IpAddr,
}

/// `eschedule run`.
pub(crate) async fn run(session: &Session, run: Run, output: Output) -> Result<(), Failure> {
    let text = match (&run.flavor, run.query) {
        (Some(flavor), _) => ec_cloud::flavor(&session.cloud, flavor).await?.query,
        (None, query) => query.unwrap_or_default(),
    };
    let query = ResourceQuery::parse(&text).map_err(|error| Failure::usage(error.to_string()))?;
    let (image, size) = (run.image.as_deref(), query.total());
    let mut guest = spec::read(session, Some(&run.name), &spec::RUN, &run.given, image, &size).await?;
    let query = if run.flavor.is_some() { sized(query, &guest)? } else { query };
    for text in &run.volume {
        let volume = resolve_volume(&session.cloud, text).await?;
        if guest.boot == Some(volume) || guest.volumes.contains(&volume) {
            return Err(Failure::usage(format!("--volume: `{text}` is named twice")));
        }
        guest.volumes.push(volume);
    }
    let place = match guest.volumes[..] {
        [] => run.place,
        _ => beside_volumes(session, &guest, run.place).await?,
    };
    schedule(session, &query, &guest, &place, run.waiting, output).await
}

/// The same place where an instance can have its volumes.
async fn beside_volumes(session: &Session, guest: &Guest, place: Place) -> Result<Place, Failure> {
    let cloud = &session.cloud;
    let wanted = match (&place.node, guest.boot) {
        (Some(node), _) => Some(node_named(cloud, node).await?),
        // It boots nowhere else.
        (None, Some(boot)) => ec_cloud::volume(cloud, boot).await?.node,
        (None, None) => None,
    };
    Ok(place.on(ec_cloud::node_with(cloud, &guest.volumes, wanted).await?))
}

/// A flavor's room for a guest: one that boots from a volume has no disk of its own.
pub(crate) fn sized(query: ResourceQuery, guest: &Guest) -> Result<ResourceQuery, Failure> {
    if guest.boot.is_none() {
        return Ok(query);
    }
    query.without("DISK_GB").map_err(|error| Failure::usage(error.to_string()))
}

/// What is asked for, with all that is said of where it shall go.
pub(crate) async fn asked<'a>(
    session: &Session,
    query: &'a ResourceQuery,
    guest: &Guest,
    place: &Place,
) -> Result<Ask<'a>, Failure> {
    let mut ask = Ask::new(query)?.of(&guest.image);
    if let Some(order) = place.strategy.or(session.settings.strategy) {
        let name = match &guest.naming {
            Naming::Name(name) => Some(name.as_str()),
            Naming::None | Naming::Prefix(_) => None,
        };
        ask = ask.by(order.into(), name);
    }
    if let Some(node) = &place.node {
        ask = ask.on(node_named(&session.cloud, node).await?)?;
    }
    if let Some(group) = &place.group {
        ask = ask.within(Joining::new(&session.cloud, group).await?);
    }
    let ask = ask.beside(&session.cloud, &guest.image).await?;
    Ok(ask.on_volume(&session.cloud, guest.boot).await?)
}

/// Schedules, and tells of it in the classic words.
pub(crate) async fn schedule(
    session: &Session,
    query: &ResourceQuery,
    guest: &Guest,
    place: &Place,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    // What is refused in earnest is not previewed.
    let wanted = Wanted::new(asked(session, query, guest, place).await?, guest)?;
    if place.dry_run {
        if let Naming::Name(name) = &guest.naming {
            name_is_free(&session.cloud, Workload::Machine, name).await?;
        }
        return explain::preview(session, wanted.ask(), output).await;
    }
    let stop = shutdown_on_signals()
        .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
    hear(&stop);
    let scheduled = ec_cloud::schedule(&session.cloud, &wanted, &stop).await;
    let Scheduled { node, instance } = match scheduled.map_err(|error| session.failed(error))? {
        Ok(scheduled) => scheduled,
        Err(no_room) => return Err(no_allocations(session, wanted.ask(), &no_room, output).await?),
    };
    // Whatever fails from here on, the instance is there.
    let requested = |failure: Failure| beside(failure, node, instance);
    if output == Output::Table {
        print(&format!("NOTIFIED TARGET, {node}, OF INSTANCE {instance}")).map_err(requested)?;
    }
    let patience = Patience::until(waiting, stop.clone());
    let made = Made {
        instance: Some(instance),
        node: Some(node),
        request_id: session.cloud.request_id,
        ..Made::default()
    };
    let outcome = async {
        let attached = given(session, &patience, guest, instance).await.map_err(requested)?;
        let Some(timeout) = patience.left() else { return Ok((State::Scheduled, None)) };
        let status = tokio::select! {
            status = wait_for_active(session, node, instance, timeout) => {
                status.map_err(|error| session.failed(error))?
            }
            () = stop.cancelled() => return Err(Failure { code: INTERRUPTED, message: going_on(instance) }),
        };
        had(session, &patience, instance, &attached).await?;
        Ok((status.state, status.ip))
    };
    let (state, ip) = match outcome.await {
        Ok(outcome) => outcome,
        Err(failure) => {
            let made = Made { error: Some(failure.message.clone()), ..made };
            output.print_fields(&made).map_err(requested)?;
            return Err(failure);
        }
    };
    let made = Made { state: Some(state), ip, ..made };
    let name = || vec![called(guest.naming.of(instance).as_ref(), instance)];
    let lines = || ip.map(|ip| ip.to_string()).unwrap_or_default();
    output.print(&made, name, lines).map_err(requested)?;
    if stop.is_cancelled() {
        return Err(Failure { code: INTERRUPTED, message: going_on(instance) });
    }
    Ok(())
}

/// Has an instance have its volumes: those that lie on its node were requested with it, others come there.
async fn given(
    session: &Session,
    patience: &Patience,
    guest: &Guest,
    instance: InstanceId,
) -> Result<Vec<Acted>, Failure> {
    let mut attached = Vec::new();
    for volume in &guest.volumes {
        let acted = volume::give(session, *volume, instance, None, patience).await.map_err(|failure| {
            with(failure, &format!("`eschedule volume attach {volume} {instance}` tries it again"))
        })?;
        attached.push(acted);
    }
    Ok(attached)
}

/// Waits until an instance that is up has what was given to it.
async fn had(
    session: &Session,
    patience: &Patience,
    instance: InstanceId,
    attached: &[Acted],
) -> Result<(), Failure> {
    for acted in attached {
        volume::done(session, patience, instance, acted, "attaching").await?;
    }
    Ok(())
}

async fn wait_for_active(
    session: &Session,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
) -> Result<Status, CloudError> {
    let shown = Shown::new("claimed");
    let outcome = until_active(&session.cloud, node, instance, timeout, |step| shown.step(step)).await;
    shown.finish();
    outcome
}

fn going_on(instance: InstanceId) -> String {
    format!(
        "interrupted after the request was written: {instance} goes on, `eschedule destroy {instance}` ends it"
    )
}

/// The failure, with the instance that nobody would know of otherwise.
fn beside(failure: Failure, node: NodeId, instance: InstanceId) -> Failure {
    with(failure, &format!("instance {instance} is requested on {node} and goes on"))
}

/// The failure, and what is so all the same.
pub(crate) fn with(mut failure: Failure, more: &str) -> Failure {
    failure.message =
        if failure.message.is_empty() { more.to_owned() } else { format!("{}; {more}", failure.message) };
    failure
}

/// The classic words for it.
pub(crate) const NO_ROOM: &str = "NO ALLOCATIONS LEFT";

/// That there is no room, for scripts, and why, in a line.
pub(crate) async fn no_room_for(
    cloud: &Cloud,
    ask: &Ask<'_>,
    no_room: &NoRoom,
    request_id: Option<RequestId>,
) -> (Made, String) {
    let reasons = ec_cloud::explain(cloud, ask, no_room).await;
    let text = in_words(&reasons);
    let made = Made {
        error: Some("no allocations left".to_owned()),
        reason: Some(text.clone()),
        reasons: reasons.ok(),
        request_id,
        ..Made::default()
    };
    (made, text)
}

/// The classic words are the result; the reason goes where errors go.
pub(crate) async fn no_allocations(
    session: &Session,
    ask: &Ask<'_>,
    no_room: &NoRoom,
    output: Output,
) -> Result<Failure, Failure> {
    let cloud = &session.cloud;
    let (made, text) = no_room_for(cloud, ask, no_room, cloud.request_id).await;
    output.print(&made, Vec::new, || NO_ROOM.to_owned())?;
    Ok(Failure::failed(format!("no allocations left: {text}")))
}

/// Why there is no room, in a line.
pub(crate) async fn reason(session: &Session, ask: &Ask<'_>, no_room: &NoRoom) -> String {
    in_words(&ec_cloud::explain(&session.cloud, ask, no_room).await)
}

fn in_words(reasons: &Result<Reasons, CloudError>) -> String {
    match reasons {
        Ok(reasons) => reasons.text(),
        Err(error) => format!("the reason cannot be told: {error}"),
    }
}

/// The classic question: `eschedule <instance>`.
pub(crate) async fn address(
    session: &Session,
    instance: &str,
    hint: &str,
    waiting: Waiting,
    output: Output,
) -> Result<(), Failure> {
    let instance = no_volume(&session.cloud, instance).await.map_err(|error| match error {
        CloudError::NotFound(_) => CloudError::NotFound(format!(
            "no instance of project `{}` is named `{instance}`, no uuid is or begins so, and it is no resources query; `eschedule list` shows all{hint}",
            session.cloud.project
        )),
        error => error,
    })?;
    let known = find_placed(&session.cloud, instance).await?;
    let mut view = View::of(&known);
    // One that has its address keeps it, whether it runs or not.
    if waiting.wait && view.ip.is_none() {
        let timeout = Duration::from_secs(waiting.timeout);
        let status = wait_for_active(session, known.node, instance, timeout).await?;
        view.state = as_listed(&session.cloud, &status).await;
        (view.ip, view.reason) = (status.ip, status.reason);
    }
    match view.ip {
        Some(ip) => {
            let name = match output {
                Output::Name => own_name_of(&session.cloud, instance).await,
                _ => None,
            };
            let name = called(name.as_ref(), instance);
            output.print(&Reached { instance, state: view.state, ip }, || vec![name], || ip.to_string())
        }
        None => {
            let reason = view.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            Err(Failure::failed(format!("instance {instance} has no IP, it is {}{reason}", view.state)))
        }
    }
}

/// Tells once that the signal was heard: what is being written comes to its end first.
fn hear(stop: &CancellationToken) {
    let stop = stop.clone();
    tokio::spawn(async move {
        stop.cancelled().await;
        tell("eschedule: interrupted; a second time ends at once");
    });
}

#[cfg(test)]
mod tests {
    use ec_runtime::exit::USAGE;

    use super::*;

    #[tokio::test]
    async fn an_address_that_is_known_is_not_waited_for_whatever_its_guest_does() {
        let uuid = uuid::Uuid::from_u128(7);
        let record = format!(
            r#"{{"version":1,"instance":"{uuid}","name":"web","generation":1,
            "spec":{{"query":"resources=VCPU:2","image":{{"url":""}}}},
            "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        for (state, ip, is_told) in [
            ("PAUSED", r#""ip":"10.0.0.1","#, true),
            ("RESCUED", r#""ip":"10.0.0.1","#, true),
            ("STOPPED", r#""ip":"10.0.0.1","#, true),
            ("PAUSED", "", false),
            ("STOPPED", "", false),
        ] {
            let session = Session::in_memory().await;
            let web = session.put(ec_model::decode(record.as_bytes()).unwrap()).await;
            let status = format!(
                r#"{{"version":1,"instance":"{uuid}","node":"{uuid}","epoch":1,"observed_generation":1,{ip}
                "state":"{state}","since":"1970-01-01T00:00:00Z","updated_at":"1970-01-01T00:00:00Z"}}"#
            );
            let key = session.cloud.keys.status(web.node().unwrap(), web.instance);
            session.cloud.store.txn(ec_store::Txn::new().put(key, status)).await.unwrap();
            let waiting = Waiting { wait: true, timeout: 1 };
            let told = address(&session, "web", "", waiting, Output::Table).await;
            assert_eq!(told.is_ok(), is_told, "{state} {ip}: {told:?}");
        }
    }

    #[tokio::test]
    async fn what_would_be_refused_is_not_previewed() {
        let session = Session::in_memory().await;
        let query = ResourceQuery::parse("resources=VCPU:1,MEMORY_MB:256").unwrap();
        let labels = (0..=ec_model::input::LABELS_MAX).map(|number| (format!("k{number}"), String::new()));
        let guest = Guest { labels: labels.collect(), ..Guest::default() };
        let place = Place { dry_run: true, ..Place::default() };
        let waiting = Waiting { wait: false, timeout: 0 };
        let refused = schedule(&session, &query, &guest, &place, waiting, Output::Table).await.unwrap_err();
        assert!(refused.code == USAGE && refused.message.contains("labels are more than"), "{refused:?}");
    }
}

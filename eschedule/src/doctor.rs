//! `eschedule doctor`: looks at every part from where it stands, and says of each finding how to mend it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ec_cloud::{
    CloudError, Healed, Kind, NodeView, View, VolumeView, list, stored_images, unrecorded_images,
};
use ec_image::ImageStore;
use ec_model::{Image, ImageId, ImageStatus, TroubleKind};
use ec_placement_client::PlacementClient;
use ec_plan::{host::CLOCKS, lack::some, status::AGAIN};
use ec_runtime::exit::{FAILED, Failure, UNREACHABLE, chain};
use ec_store::{EtcdConfig, EtcdStore, Server, Store};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::{
    agents::Agents,
    cli::Output,
    config::{Session, Settings},
    image,
    output::{Mood, called, mood, plain},
};

pub(crate) const EXAMPLES: &str = "\
Exit code 0 where nothing failed (warnings are no failures), 3 where etcd or placement cannot be
reached, else 1. What concerns one host only, `ecompute --check` sees there.

Examples:
  eschedule doctor
  eschedule doctor -o json | jq '.[] | select(.level != \"ok\")'";

/// So long one part may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// A node that has been missing for so long is marked, where a controller runs.
const MARKED_AFTER: &str = "a minute";

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// It works, and should be looked at.
    Warning,
    /// It does not work.
    Failed,
}

/// What was found of one part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// Which part.
    pub(crate) part: String,
    /// How bad it is.
    pub(crate) level: Level,
    /// What was found.
    pub(crate) found: String,
    /// How to mend it; none where nothing is to be mended.
    pub(crate) mend: Option<String>,
    /// The exit code that it stands for.
    #[serde(skip)]
    code: u8,
}

impl Finding {
    fn ok(part: impl Into<String>, found: impl Into<String>) -> Self {
        Self { part: part.into(), level: Level::Ok, found: found.into(), mend: None, code: 0 }
    }

    pub(crate) fn warning(
        part: impl Into<String>,
        found: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self { level: Level::Warning, mend: Some(mend.into()), ..Self::ok(part, found) }
    }

    fn failed(part: impl Into<String>, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { level: Level::Failed, mend: Some(mend.into()), code: FAILED, ..Self::ok(part, found) }
    }

    fn unreachable(part: impl Into<String>, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { code: UNREACHABLE, ..Self::failed(part, found, mend) }
    }

    fn line(&self) -> String {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Warning => "WARNING",
            Level::Failed => "FAILED",
        };
        let mend = self.mend.as_ref().map_or_else(String::new, |mend| format!(": {mend}"));
        // Nodes and their agents have a say in it.
        plain(&format!("{:<16} {level:<7} {}{mend}", self.part, self.found))
    }
}

/// Looks at everything, and tells what was found.
pub(crate) async fn doctor(session: &Session, output: Output) -> Result<(), Failure> {
    let mut findings = vec![configuration(&session.settings)];
    findings.extend(session.settings.warnings.iter().map(|warning| own(warning)));
    let (etcd, placement) = tokio::join!(etcd(session), placement(session));
    let (etcd, etcd_answers) = etcd;
    let both_answer = etcd_answers && placement.iter().all(|finding| finding.level != Level::Failed);
    findings.extend(etcd.into_iter().chain(placement));
    if both_answer {
        findings.extend(nodes(session).await);
    }
    if etcd_answers {
        let (instances, volumes, records, images) =
            tokio::join!(instances(session), volumes(session), records(session), images(session));
        findings.extend(instances.into_iter().chain(volumes).chain(records).chain(images));
    }
    let code = findings.iter().map(|finding| finding.code).max().unwrap_or(0);
    let lines = || findings.iter().map(Finding::line).collect::<Vec<_>>().join("\n");
    let names = || {
        let bad = findings.iter().filter(|finding| finding.level != Level::Ok);
        bad.map(|finding| finding.part.clone()).collect()
    };
    output.print(&findings, names, lines)?;
    // All is told already.
    if code == 0 { Ok(()) } else { Err(Failure { code, message: String::new() }) }
}

fn configuration(settings: &Settings) -> Finding {
    let none = || "defaults (no schedule.yaml)".to_owned();
    let named = settings.file.as_ref().map_or_else(none, |path| path.display().to_string());
    Finding::ok("configuration", format!("{named}, keys below {}", settings.keys.root()))
}

/// What the settings themselves warn of says how to mend it, behind the last colon.
fn own(warning: &str) -> Finding {
    let (found, mend) = warning.split_once(": ").unwrap_or((warning, "see docs/security.md"));
    Finding::warning("configuration", found, mend)
}

/// What there is to say of it, and whether any member answers.
async fn etcd(session: &Session) -> (Vec<Finding>, bool) {
    let config = &session.settings.etcd;
    let asked = config.endpoints.iter().map(async |endpoint| {
        let one = EtcdConfig { endpoints: vec![endpoint.clone()], ..config.clone() };
        let server = async { EtcdStore::connect(one).await?.server().await };
        let answer = match timeout(PATIENCE, server).await {
            Ok(answer) => answer.map_err(|error| chain(&error)),
            Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
        };
        (endpoint.clone(), answer)
    });
    let answers = futures::future::join_all(asked).await;
    let mut findings = of_members(&answers);
    findings.extend(config.open_door().await.map(|door| own(&door)));
    (findings, answers.iter().any(|(_, answer)| answer.is_ok()))
}

fn of_members(answers: &[(String, Result<Server, String>)]) -> Vec<Finding> {
    let living = answers.iter().filter(|(_, answer)| answer.is_ok()).count();
    let clusters: BTreeSet<u64> =
        answers.iter().filter_map(|(_, answer)| Some(answer.as_ref().ok()?.cluster)).collect();
    let mut findings: Vec<_> = answers
        .iter()
        .map(|(endpoint, answer)| match answer {
            Ok(server) if let Some((trouble, mend)) = server.trouble() => {
                Finding::failed("etcd", format!("{endpoint}: {trouble}"), mend)
            }
            Ok(server) => match server.advice() {
                None => Finding::ok("etcd", format!("{endpoint} is {}", server.version)),
                Some(_) => Finding::warning(
                    "etcd",
                    format!(
                        "{endpoint} is {}, which may lose watch events around compactions",
                        server.version
                    ),
                    "upgrade it to 3.5 or newer",
                ),
            },
            Err(why) if living > 0 => Finding::warning(
                "etcd",
                format!("{endpoint}: {why}"),
                "start this member, or take it out of etcd.endpoints; the others answer",
            ),
            Err(why) => Finding::unreachable(
                "etcd",
                format!("{endpoint}: {why}"),
                "start etcd there, or set `etcd` in schedule.yaml",
            ),
        })
        .collect();
    if clusters.len() > 1 {
        findings.push(Finding::failed(
            "etcd",
            "the endpoints are of different clusters",
            "name the members of one in etcd.endpoints",
        ));
    }
    findings
}

async fn placement(session: &Session) -> Vec<Finding> {
    let config = &session.settings.placement;
    let mend = "start placement there, or set `placement` in schedule.yaml";
    let client = match PlacementClient::new(config) {
        Ok(client) => client,
        Err(error) => {
            return vec![Finding::failed("placement", chain(&error), "see `placement` in schedule.yaml")];
        }
    };
    let found = match timeout(PATIENCE, client.probe()).await {
        Ok(Ok(newest)) => Finding::ok("placement", format!("{} speaks up to {newest}", client.endpoint())),
        Ok(Err(error)) if error.is_transient() => Finding::unreachable("placement", chain(&error), mend),
        Ok(Err(error)) => Finding::failed("placement", chain(&error), "see `placement` in schedule.yaml"),
        Err(_) => {
            let why = format!("{}: no answer within {} s", client.endpoint(), PATIENCE.as_secs());
            Finding::unreachable("placement", why, mend)
        }
    };
    let door = config.open_door().map(|door| own(&door));
    std::iter::once(found).chain(client.clock_ahead().and_then(clock)).chain(door).collect()
}

fn clock(ahead: i64) -> Option<Finding> {
    let mend = "one of them is wrong: see `timedatectl` on both";
    (ahead.unsigned_abs() > CLOCKS).then(|| Finding::warning("clock", ec_cloud::clock_in_words(ahead), mend))
}

fn not_known(part: &str, error: &CloudError) -> Finding {
    let code = if error.kind() == Kind::Unreachable { UNREACHABLE } else { FAILED };
    Finding { code, ..Finding::failed(part, chain(error), "see its log") }
}

async fn instances(session: &Session) -> Vec<Finding> {
    match list(&session.cloud).await {
        Ok(instances) => of_instances(&instances, Timestamp::now()),
        Err(error) => vec![not_known("instances", &error)],
    }
}

async fn volumes(session: &Session) -> Vec<Finding> {
    match ec_cloud::volumes(&session.cloud).await {
        Ok(volumes) => of_volumes(&volumes),
        Err(error) => vec![not_known("volumes", &error)],
    }
}

/// Records that somebody deleted, or damaged.
async fn records(session: &Session) -> Vec<Finding> {
    let cloud = &session.cloud;
    let found = tokio::try_join!(
        ec_cloud::unrecorded(cloud),
        ec_cloud::unfound(cloud),
        ec_cloud::unreadable(cloud),
        ec_cloud::unnamed_images(cloud),
        ec_cloud::lost_groups(cloud)
    );
    let (found, unfound, damaged, unnamed, groups) = match found {
        Ok(found) => found,
        Err(error) => return vec![not_known("records", &error)],
    };
    let mend = "use the release that wrote it, or mend or delete the key with etcdctl";
    let of_damaged = |(key, why): (String, String)| {
        Finding::warning("records", format!("key {key} cannot be read: {why}"), mend)
    };
    let of_lost = |lost: &[Healed], what: &str| {
        let named = lost.iter().map(|lost| called(lost.name.as_ref(), lost.instance));
        of_those("records", named, what, "`eschedule heal` writes them anew")
    };
    let lost = of_lost(&found, "are asked for, and etcd lacks their records");
    let unfound = of_lost(&unfound, "have lost the keys of their names, or of their places in groups");
    let unnamed = of_those(
        "records",
        unnamed.iter().map(|image| format!("{} ({})", image.name, image.id)),
        "are images that have lost the keys of their names",
        "`eschedule image set UUID --name NAME` writes them anew",
    );
    let groups = of_those(
        "records",
        groups.into_iter(),
        "are groups that have members, and etcd lacks what they are",
        "`eschedule group create NAME --policy POLICY` makes them anew with their members, by the policy that they had",
    );
    lost.into_iter()
        .chain(unfound)
        .chain(unnamed)
        .chain(groups)
        .chain(damaged.into_iter().map(of_damaged))
        .collect()
}

/// What lies in the image store, and is to lie there.
async fn images(session: &Session) -> Vec<Finding> {
    let mend = "see `image_store` in schedule.yaml";
    let store = match image::store(session) {
        Ok(store) => store,
        Err(failure) => return vec![Finding::failed("image store", failure.message, mend)],
    };
    // First, so that what is sent meanwhile has a record.
    let there = match timeout(PATIENCE, store.images()).await {
        Ok(Ok(there)) => there,
        Ok(Err(error)) => return vec![Finding::warning("image store", chain(&error), mend)],
        Err(_) => {
            let why = format!("{}: no answer within {} s", store.url(), PATIENCE.as_secs());
            return vec![Finding::warning("image store", why, mend)];
        }
    };
    let cloud = &session.cloud;
    let known = async { Ok((stored_images(cloud).await?, unrecorded_images(cloud, there.clone()).await?)) };
    match known.await {
        Ok((stored, unrecorded)) => of_images(&store, &stored, &there, &unrecorded),
        Err(error) => vec![not_known("image store", &error)],
    }
}

fn of_images(
    store: &ImageStore,
    stored: &[Image],
    there: &BTreeSet<ImageId>,
    unrecorded: &BTreeSet<ImageId>,
) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Err(error) = store.attend(stored) {
        let mend = "mount it; images that lie there cannot be had from here until then";
        found.push(Finding::failed("image store", chain(&error), mend));
        if there.is_empty() {
            return found;
        }
        // Or it is mounted, and another time's catalogue was put back.
    }
    let is_whole = |image: &&Image| image.status == ImageStatus::Active && store.keeps(image);
    let gone = stored.iter().filter(is_whole).filter(|image| !there.contains(&image.id));
    let url = store.url();
    let findings = [
        of_those(
            "image store",
            gone.map(|image| image.name.clone()),
            "are in the catalogue, and their bytes are gone",
            "add them anew, after `eschedule image delete`",
        ),
        of_those(
            "image store",
            unrecorded.iter().map(ToString::to_string),
            &format!("lie at {url}, and etcd has no record of them"),
            &format!(
                "`eschedule image add NAME {url}/UUID` makes an image of the bytes of one; what nobody needs is deleted by hand"
            ),
        ),
    ];
    found.extend(findings.into_iter().flatten());
    match found.is_empty() {
        true => vec![Finding::ok("image store", format!("{} images lie at {url}", there.len()))],
        false => found,
    }
}

/// What etcd and placement know of them together, and what their agents say.
async fn nodes(session: &Session) -> Vec<Finding> {
    let mut findings = Vec::new();
    match ec_cloud::nodes(&session.cloud).await {
        Ok(nodes) => {
            let asked = match Agents::new(&session.settings) {
                Ok(agents) => agents.ask::<Ready>(&nodes, "/readyz").await,
                Err(failure) => {
                    findings.push(Finding::failed("nodes", failure.message, "see `etcd` in schedule.yaml"));
                    Vec::new()
                }
            };
            let ready: BTreeMap<_, _> =
                asked.into_iter().filter_map(|(node, answer)| Some((node, answer?))).collect();
            findings.extend(of_nodes(&nodes));
            findings.extend(nodes.iter().flat_map(|node| of_node(node, ready.get(&node.node))));
        }
        Err(error) => findings.push(not_known("nodes", &error)),
    }
    findings
}

/// What an agent's port says of the parts that it stands on.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Ready {
    parts: BTreeMap<String, PartOfAgent>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct PartOfAgent {
    ok: bool,
    why: Option<String>,
}

fn of_nodes(nodes: &[NodeView]) -> Vec<Finding> {
    // Of whom nothing can be read it may be another's record, or nobody's.
    let living = nodes.iter().filter(|node| node.alive && node.agent.is_some()).count();
    let mut findings = vec![match living {
        0 => Finding::failed(
            "nodes",
            "no agent is alive",
            "start `ecompute` on a host, with the same `etcd` (and prefix) as here",
        ),
        _ => Finding::ok("nodes", format!("{living} of {} are alive", nodes.len())),
    }];
    // What placement does not know, or does not tell of, nobody can mark there.
    let unmarked: Vec<_> = nodes
        .iter()
        .filter(|node| !node.alive && !node.disabled && !node.revoked && !node.capacity.is_empty())
        .map(node_called)
        .collect();
    if !unmarked.is_empty() {
        findings.push(Finding::warning(
            "econtroller",
            format!("nobody has marked {} in placement as dead", some(&unmarked)),
            format!("start `econtroller`, if none runs and this is so for more than {MARKED_AFTER}"),
        ));
    }
    let releases: BTreeSet<_> = nodes.iter().filter_map(|node| node.agent.as_deref()).collect();
    let others: Vec<_> = releases
        .into_iter()
        .filter(|release| *release != env!("CARGO_PKG_VERSION"))
        .map(str::to_owned)
        .collect();
    if !others.is_empty() {
        findings.push(Finding::warning(
            "releases",
            format!("agents are of {}, this command of {}", some(&others), env!("CARGO_PKG_VERSION")),
            "both work together; finish the upgrade",
        ));
    }
    findings
}

/// What a node is called; its uuid where nobody knows that.
fn node_called(node: &NodeView) -> String {
    if node.name == "-" { node.node.to_string() } else { node.name.clone() }
}

/// How many instances and volumes are there.
fn holds(node: &NodeView) -> String {
    match node.volumes {
        0 => format!("{} instances are there", node.instances),
        volumes => format!("{} instances and {volumes} volumes are there", node.instances),
    }
}

fn of_node(node: &NodeView, ready: Option<&Result<Ready, String>>) -> Vec<Finding> {
    let part = format!("node {}", node_called(node));
    if node.revoked {
        let found = format!("it was revoked, and {}", holds(node));
        let mend = "`eschedule node add --uuid` lets it in again, which ends what `eschedule destroy` was said of; `eschedule node forget` concludes that without it";
        return vec![Finding::failed(part, found, mend)];
    }
    if !node.alive {
        let found = format!("its agent is not alive, and {}", holds(node));
        let mend = format!(
            "start `ecompute` there; `ecompute --check` tells what is in its way. One that never comes back: end what was there \
             (`eschedule list --node {node}`, `eschedule volume list --node {node}`), then `eschedule node forget {node}`",
            node = node_called(node)
        );
        return vec![Finding::failed(part, found, mend)];
    }
    // Who is alive told its release, if anybody can read it.
    if let (None, Some(note)) = (&node.agent, &node.note) {
        let mend = "an agent that is there writes it anew once it was started again; if there is none, delete that key";
        return vec![Finding::failed(part, note, mend)];
    }
    let mut findings: Vec<_> = node
        .troubles
        .iter()
        .map(|trouble| {
            let mend = match trouble.kind {
                TroubleKind::Memory => {
                    "end what uses it: stop guests, or make them smaller; it takes new work again by itself"
                }
                TroubleKind::Disk => {
                    "make room there, or mount what is missing; it takes new work again by itself"
                }
                TroubleKind::Clock => "see `timedatectl` on both; it takes new work again by itself",
                TroubleKind::Network => {
                    "`virsh net-list --all` and `ip link` show there what is missing; addresses become more by `virsh net-edit`, with a larger range or a shorter lease; it takes new work again by itself"
                }
                TroubleKind::Unknown => "see `ecompute --check` there",
            };
            Finding::warning(&part, format!("{} (since {})", trouble.why, trouble.since), mend)
        })
        .collect();
    if node.disabled {
        let mend = "take the trait COMPUTE_STATUS_DISABLED away, if nobody wants it so";
        findings.push(Finding::warning(&part, "placement offers nothing of it", mend));
    }
    if node.locked && node.troubles.is_empty() {
        let mend = "see `reserved` in its compute.yaml; an agent that was just started needs a moment, and one whose node nobody \
                    wants locked is started anew, which unlocks it";
        findings.push(Finding::warning(&part, "all its processors are reserved", mend));
    }
    if node.capacity.is_empty() {
        let mend = "see its agent's log: it registers again by itself, or says what is in its way";
        findings.push(Finding::failed(&part, "placement does not know what it has", mend));
    }
    match ready {
        Some(Ok(ready)) => {
            let down = ready.parts.iter().filter(|(_, part)| !part.ok);
            findings.extend(down.map(|(name, state)| {
                let why = state.why.as_deref().unwrap_or("it does not say why");
                Finding::failed(&part, format!("{name}: {why}"), "see `ecompute --check` there")
            }));
        }
        Some(Err(why)) => {
            let mend = "consoles and `top` need it: see `listen` in its compute.yaml, and firewalls between";
            findings.push(Finding::warning(&part, format!("its port is not reached from here: {why}"), mend));
        }
        // It has none.
        None => {}
    }
    if findings.is_empty() {
        let found = match ready {
            Some(_) => "alive, and all that it stands on is well",
            None => {
                "alive; it has no port (`listen` in its compute.yaml), so what it stands on was not asked for"
            }
        };
        findings.push(Finding::ok(part, found));
    }
    findings
}

/// Those that are on their way for longer are told of.
const ON_ITS_WAY: jiff::SignedDuration = jiff::SignedDuration::from_mins(15);

/// Those of whom is told for longer that something fails are told of.
const IN_THE_WAY: jiff::SignedDuration = jiff::SignedDuration::from_mins(1);

/// What is to be done of what only its node knows.
const RESTORED: &str = "etcd was restored or emptied: `eschedule heal` brings back what their nodes know";

/// What instances can need somebody for, and what is to be done then.
const ILLS: [(&str, &str); 6] = [
    ("in ERROR", "`eschedule show` tells why"),
    ("run, and no request speaks of them", RESTORED),
    ("cannot be told of", "`eschedule show` tells why"),
    ("on their way for long", "`eschedule explain` tells what they wait for"),
    ("kept from what is being done, which is tried again", "`eschedule show` tells by what"),
    ("without the volumes that they are to have, or with others", "`eschedule show` tells why"),
];

/// Which of [`ILLS`] an instance has.
fn ill(view: &View, now: Timestamp) -> Option<usize> {
    match view.state.as_str() {
        "ERROR" => Some(0),
        "UNCLAIMED" => Some(1),
        "UNKNOWN" => Some(2),
        // It waits for its user.
        "VERIFY_RESIZE" => None,
        state if view.node_alive && mood(state) == Some(Mood::UnderWay) => {
            // What was asked for a moment ago is told by nobody yet.
            let since = if state == "SCHEDULED" { view.created_at } else { view.since };
            let time = now.duration_since(since?);
            match is_tried_again(view) {
                true => (time > IN_THE_WAY).then_some(4),
                false => (time > ON_ITS_WAY).then_some(3),
            }
        }
        _ if view.node_alive && is_tried_again(view) => {
            (now.duration_since(view.since?) > IN_THE_WAY).then_some(4)
        }
        _ if view.node_alive && view.volumes_failed => Some(5),
        _ => None,
    }
}

/// Whether it is told that something is in the way of what is being done: with the state, or beside one that it is no part of.
fn is_tried_again(view: &View) -> bool {
    [&view.reason, &view.doing].into_iter().flatten().any(|why| why.ends_with(AGAIN))
}

/// That these need somebody, where there are any.
fn of_those(part: &str, named: impl Iterator<Item = String>, what: &str, mend: &str) -> Option<Finding> {
    let named: Vec<_> = named.collect();
    let found = || format!("{} {what}: {}", named.len(), some(&named));
    (!named.is_empty()).then(|| Finding::warning(part, found(), mend))
}

fn of_instances(instances: &[View], now: Timestamp) -> Vec<Finding> {
    let mut findings = vec![Finding::ok("instances", format!("there are {}", instances.len()))];
    for (number, (what, mend)) in ILLS.iter().enumerate() {
        let these = instances.iter().filter(|view| ill(view, now) == Some(number));
        let named = these.map(|view| called(view.name.as_ref(), view.instance));
        findings.extend(of_those("instances", named, what, mend));
    }
    findings
}

/// What volumes can need somebody for, by their status, and what is to be done then.
const ILLS_OF_VOLUMES: [(&str, &str, &str); 3] = [
    (
        "error",
        "in error",
        "`eschedule volume show` tells why; a disk that was moved away is taken up again where it is put back",
    ),
    ("unclaimed", "are there, and no request speaks of them", RESTORED),
    ("unknown", "cannot be told of", "`eschedule volume show` tells why"),
];

fn of_volumes(volumes: &[VolumeView]) -> Vec<Finding> {
    let mut findings = vec![Finding::ok("volumes", format!("there are {}", volumes.len()))];
    for (status, what, mend) in ILLS_OF_VOLUMES {
        let these = volumes.iter().filter(|view| view.status == status);
        let named = these.map(|view| called(view.name.as_ref(), view.volume));
        findings.extend(of_those("volumes", named, what, mend));
    }
    findings
}

#[cfg(test)]
mod tests;

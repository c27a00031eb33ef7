//! What results look like: for each a table, what it is called, and its fields, which docs/cli.md tells.

mod fit;
mod image;
mod table;
mod volume;
mod yaml;

use std::{collections::HashMap, os::fd::AsFd, time::Duration};

use ec_cloud::{
    Cloud, CloudError, GroupView, Healed, NodeNames, NodeView, Outcome, StorageView, View, bearing,
};
use ec_model::{Flavor, InstanceId, Keypair, Rebuild, RequestId, Restart, Workload};
use ec_plan::status::AGAIN;
use ec_runtime::exit::{Failure, NOBODY_READS, print};
use jiff::Timestamp;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use crate::{cli::Output, cluster::Added, several::One, shown::how_far};
pub(crate) use image::{image, images};
pub(crate) use table::{List, Mood, coloured, mood, mood_of, plain};
use table::{row, table, trimmed, without_controls};
pub(crate) use volume::{lines as volume_lines, snapshots, volume, volumes};
pub(crate) use yaml::document;

impl Output {
    /// Prints a result: its fields, what it is called, or the lines for people.
    pub(crate) fn print<T: Serialize + ?Sized>(
        self,
        value: &T,
        names: impl FnOnce() -> Vec<String>,
        lines: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        let failed = |why: String| Failure::failed(format!("failed to write the answer: {why}"));
        let text = match self {
            Self::Table => lines(),
            Self::Json => escaped(serde_json::to_string_pretty(value)).map_err(failed)?,
            Self::Yaml => document(value).map_err(|error| failed(error.to_string()))?,
            Self::Name => names().iter().map(|name| plain(name)).collect::<Vec<_>>().join("\n"),
        };
        if text.is_empty() { Ok(()) } else { print(&text) }
    }

    /// Prints the fields of a result, where they are wanted; of the rest people are told by and by.
    pub(crate) fn print_fields<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Failure> {
        self.print(value, Vec::new, String::new)
    }
}

/// JSON that does nothing to a terminal: the controls from U+007F on, which need not be escaped, are. They stand nowhere but in strings.
pub(crate) fn escaped(json: serde_json::Result<String>) -> Result<String, String> {
    let json = json.map_err(|error| error.to_string())?;
    let is_left = |c: char| ('\u{7f}'..='\u{9f}').contains(&c);
    if !json.contains(is_left) {
        return Ok(json);
    }
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if is_left(c) { text.push_str(&format!("\\u{:04x}", u32::from(c))) } else { text.push(c) }
    }
    Ok(text)
}

/// Ends when nobody reads standard output any more, of which who prints nothing would not hear.
pub(crate) async fn nobody_reads() -> Failure {
    const PERIOD: Duration = Duration::from_secs(1);
    let gone = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
    loop {
        tokio::time::sleep(PERIOD).await;
        let output = std::io::stdout();
        let mut asked = [PollFd::new(output.as_fd(), PollFlags::empty())];
        let told = poll(&mut asked, PollTimeout::ZERO).is_ok_and(|told| told > 0);
        if told && asked[0].revents().is_some_and(|is| is.intersects(gone)) {
            return Failure { code: NOBODY_READS, message: String::new() };
        }
    }
}

/// What an instance is called: its name, or its uuid.
pub(crate) fn called(name: Option<&String>, instance: InstanceId) -> String {
    name.cloned().unwrap_or_else(|| instance.to_string())
}

/// What scripts may call those of a kind by, of which `-o name` tells. Whoever has no name there that means it, and no other, is told
/// by its uuid: one of another project, one whose name is free since its end is wished, one that nobody recorded.
#[derive(Default)]
pub(crate) struct Names(HashMap<InstanceId, String>);

impl Names {
    /// Where names are told; nobody is asked for them elsewhere.
    pub(crate) async fn of(cloud: &Cloud, kind: Workload, output: Output) -> Result<Self, CloudError> {
        Ok(Self(if output == Output::Name { bearing(cloud, kind).await? } else { HashMap::new() }))
    }

    /// The word for one that bears this name, or bore it.
    pub(crate) fn word(&self, name: Option<&String>, instance: InstanceId) -> String {
        let means_it =
            |name: &&String| self.0.get(&instance).is_some_and(|borne| borne.eq_ignore_ascii_case(name));
        called(name.filter(means_it), instance)
    }
}

/// A list of instances.
pub(crate) fn instances(output: Output, views: &[View], names: &Names) -> Result<(), Failure> {
    output.print(
        views,
        || views.iter().map(|view| names.word(view.name.as_ref(), view.instance)).collect(),
        || {
            let header = ["INSTANCE", "NAME", "NODE", "STATE", "IP", "REASON"];
            let mut list = List::new(&header, &[0, 3, 4], &[1, 0, 3, 4, 5, 2]);
            for view in views {
                list.row([
                    view.instance.to_string(),
                    view.name.clone().unwrap_or_else(|| "-".to_owned()),
                    view.node.map_or_else(|| "-".to_owned(), |node| node.to_string()),
                    view.state.clone(),
                    view.ip.map_or_else(|| "-".to_owned(), |ip| ip.to_string()),
                    reason(view),
                ]);
            }
            list.text()
        },
    )
}

/// What nodes hold and etcd lacks, and what comes of it.
pub(crate) fn healed(output: Output, list: &[Healed], names: &Names) -> Result<(), Failure> {
    if matches!(output, Output::Table) {
        crate::heal::nothing(list);
    }
    output.print(
        list,
        || list.iter().map(|healed| names.word(healed.name.as_ref(), healed.instance)).collect(),
        || {
            let line = |healed: &Healed| {
                let outcome = match healed.outcome {
                    Outcome::Lost => "lost, can be brought back",
                    Outcome::Healed => "healed",
                    Outcome::Left => "left as it is",
                };
                let name = healed.name.as_deref().map(plain).unwrap_or_default();
                let notes = healed.notes.iter().map(|note| format!("\n    {}", plain(note)));
                let Healed { instance, node, .. } = healed;
                format!("{instance}  {name}  on {node}: {outcome}{}", notes.collect::<String>())
            };
            list.iter().map(line).collect::<Vec<_>>().join("\n")
        },
    )
}

/// The reason, and before it that nobody keeps it up to date; behind it what is waited for, but not what is done about it.
fn reason(view: &View) -> String {
    let waits = view.doing.clone().filter(|doing| doing.ends_with(AGAIN));
    told(is_dead(view), [&view.reason, &waits])
}

/// The same, and behind it what is done about it.
pub(crate) fn reason_and_doing(view: &View) -> String {
    told(is_dead(view), [&view.reason, &view.doing])
}

/// Whether what is told of it is of an agent that tells nothing any more.
pub(crate) fn is_dead(view: &View) -> bool {
    view.node.is_some() && !view.node_alive
}

/// What there is to say of something, first that nobody is at it.
fn told(is_dead: bool, told: [&Option<String>; 2]) -> String {
    let told = told.into_iter().flatten().map(String::as_str);
    is_dead.then_some("its node is not alive").into_iter().chain(told).collect::<Vec<_>>().join("; ")
}

/// Why something is locked, or that it is.
fn locked(reason: &str) -> String {
    if reason.is_empty() { "yes".to_owned() } else { reason.to_owned() }
}

/// What is not known is a dash.
pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// A list of nodes; `names` tells what each can be asked for by. One whose name means another, too, is told by its uuid.
pub(crate) fn nodes(output: Output, nodes: &[NodeView], names: &NodeNames) -> Result<(), Failure> {
    let called = |node: &NodeView| {
        if names.means(&node.name, node.node) { node.name.clone() } else { node.node.to_string() }
    };
    output.print(
        nodes,
        || nodes.iter().map(called).collect(),
        || {
            let header = ["NODE", "NAME", "VIRT", "VCPU", "MEMORY_MB", "DISK_GB", "AGENT", "SINCE", "NOTE"];
            let mut list = List::new(&header, &[0, 3, 4, 5], &[1, 0, 8, 3, 4, 5, 2, 6, 7]);
            for node in nodes {
                let amount = |class: &str| {
                    let used = node.used.get(class).copied().unwrap_or(0);
                    or_dash(node.capacity.get(class).map(|capacity| format!("{used}/{capacity}")))
                };
                list.row([
                    node.node.to_string(),
                    node.name.clone(),
                    or_dash(node.virt_type.clone()),
                    amount("VCPU"),
                    amount("MEMORY_MB"),
                    amount("DISK_GB"),
                    or_dash(node.agent.clone()),
                    or_dash(node.started_at.map(when)),
                    node.note.clone().unwrap_or_default(),
                ]);
            }
            list.text()
        },
    )
}

pub(crate) fn when(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A list of flavors.
pub(crate) fn flavors(output: Output, flavors: &[Flavor]) -> Result<(), Failure> {
    let names = || flavors.iter().map(|flavor| flavor.name.clone()).collect();
    output.print(flavors, names, || {
        let mut list = List::new(&["FLAVOR", "QUERY", "CREATED"], &[0, 2], &[0, 1, 2]);
        for flavor in flavors {
            list.row([flavor.name.clone(), flavor.query.clone(), when(flavor.created_at)]);
        }
        list.text()
    })
}

/// One flavor.
pub(crate) fn flavor(output: Output, flavor: &Flavor) -> Result<(), Failure> {
    output.print(
        flavor,
        || vec![flavor.name.clone()],
        || {
            let mut table = table(&[]);
            let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
            row("flavor", flavor.name.clone());
            row("query", flavor.query.clone());
            row("created", flavor.created_at.to_string());
            trimmed(&table)
        },
    )
}

/// A list of keypairs.
pub(crate) fn keypairs(output: Output, keypairs: &[Keypair]) -> Result<(), Failure> {
    let names = || keypairs.iter().map(|keypair| keypair.name.clone()).collect();
    output.print(keypairs, names, || {
        let mut list = List::new(&["KEYPAIR", "KEYS", "CREATED"], &[0, 2], &[0, 1, 2]);
        for keypair in keypairs {
            let keys: Vec<String> = keypair.keys.iter().map(|key| brief(key)).collect();
            list.row([keypair.name.clone(), keys.join(", "), when(keypair.created_at)]);
        }
        list.text()
    })
}

/// One keypair.
pub(crate) fn keypair(output: Output, keypair: &Keypair) -> Result<(), Failure> {
    output.print(
        keypair,
        || vec![keypair.name.clone()],
        || {
            let mut table = table(&[]);
            let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
            row("keypair", keypair.name.clone());
            for key in &keypair.keys {
                row("key", key.clone());
            }
            row("created", keypair.created_at.to_string());
            trimmed(&table)
        },
    )
}

/// Storage that nodes share.
pub(crate) fn storages(output: Output, storages: &[StorageView]) -> Result<(), Failure> {
    let names = || storages.iter().map(|view| view.storage.clone()).collect();
    output.print(storages, names, || {
        let mut list = List::new(&["STORAGE", "USED", "CAPACITY", "NODES"], &[0, 3], &[0, 1, 2, 3]);
        for view in storages {
            let nodes: Vec<&str> = view.nodes.values().map(String::as_str).collect();
            let size = |gigabytes: u64| format!("{gigabytes} GiB");
            list.row([view.storage.clone(), size(view.used_gb), size(view.capacity_gb), nodes.join(", ")]);
        }
        list.text()
    })
}

/// A list of groups.
pub(crate) fn groups(output: Output, groups: &[GroupView]) -> Result<(), Failure> {
    let names = || groups.iter().map(|view| view.group.name.clone()).collect();
    output.print(groups, names, || {
        let mut list = List::new(&["GROUP", "POLICY", "MEMBERS", "CREATED"], &[0, 3], &[0, 1, 2, 3]);
        for GroupView { group, members } in groups {
            let count = members.len().to_string();
            list.row([group.name.clone(), group.policy.to_string(), count, when(group.created_at)]);
        }
        list.text()
    })
}

/// One group with its members.
pub(crate) fn group(output: Output, view: &GroupView) -> Result<(), Failure> {
    let GroupView { group, members } = view;
    output.print(
        view,
        || vec![group.name.clone()],
        || {
            let mut table = table(&[]);
            let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
            row("group", group.name.clone());
            row("policy", group.policy.to_string());
            if let Some(stack) = &group.stack {
                row("stack", stack.clone());
            }
            row("created", group.created_at.to_string());
            for member in members {
                row("member", format!("{} on {}", member.instance, member.node));
            }
            trimmed(&table)
        },
    )
}

/// A public key without what only machines read of it.
fn brief(key: &str) -> String {
    let words: Vec<&str> =
        key.split_whitespace().enumerate().filter(|(n, _)| *n != 1).map(|(_, w)| w).collect();
    words.join(" ")
}

/// Nodes that belong to the cluster.
pub(crate) fn members(output: Output, nodes: &[Added]) -> Result<(), Failure> {
    let names = || nodes.iter().map(|node| node.name.clone()).collect();
    output.print(nodes, names, || {
        let mut list = List::new(&["NODE", "UUID"], &[0], &[0, 1]);
        for node in nodes {
            list.row([node.name.clone(), node.node.to_string()]);
        }
        list.text()
    })
}

/// That something with a name is there no more.
pub(crate) fn deleted(output: Output, what: &str, name: &str) -> Result<(), Failure> {
    let One { fields, line, name } = Deleted::by(None, what, name, "DELETED");
    output.print(&fields, || vec![name], || line)
}

/// What came of one that was to be deleted.
#[derive(Default, Serialize)]
pub(crate) struct Deleted {
    /// None where it failed.
    pub(crate) deleted: Option<String>,
    /// It may be on its way still.
    pub(crate) state: Option<String>,
    /// The id of the command, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_id: Option<RequestId>,
    /// The word by which it was asked for, where it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) asked: Option<String>,
    /// What failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

impl Deleted {
    pub(crate) fn one(cloud: &Cloud, what: &str, name: &str, state: &str) -> One<Self> {
        Self::by(cloud.request_id, what, name, state)
    }

    fn by(request_id: Option<RequestId>, what: &str, name: &str, state: &str) -> One<Self> {
        let (deleted, state_told) = (Some(name.to_owned()), Some(state.to_owned()));
        One {
            fields: Self { deleted, state: state_told, request_id, ..Self::default() },
            line: format!("{state} {what} {}", plain(name)),
            name: name.to_owned(),
        }
    }

    pub(crate) fn failed(cloud: &Cloud, asked: &str, why: &str) -> Self {
        let (asked, error) = (Some(asked.to_owned()), Some(why.to_owned()));
        Self { request_id: cloud.request_id, asked, error, ..Self::default() }
    }
}

/// All of one instance, as lines for people.
pub(crate) fn lines_of(view: &View) -> String {
    let mut table = table(&[]);
    let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
    row("instance", view.instance.to_string());
    row("name", view.name.clone().unwrap_or_else(|| "-".to_owned()));
    if let Some(node) = view.node {
        row("node", if view.node_alive { node.to_string() } else { format!("{node} (not alive)") });
    }
    if let Some(group) = &view.group {
        row("group", group.clone());
    }
    row("state", view.state.clone());
    if let Some(reason) = &view.reason {
        row("reason", reason.clone());
    }
    if let Some(doing) = &view.doing {
        row("doing", doing.clone());
    }
    if let Some(record) = &view.record {
        if let Some(reason) = &record.locked {
            row("locked", locked(reason));
        }
        if let Some(before) = &record.before {
            row("before", format!("{} (kept until the resize is confirmed or reverted)", before.query));
        }
        for (key, value) in &record.labels {
            row("label", format!("{key}={value}"));
        }
        for (key, value) in &record.spec.metadata {
            row("metadata", format!("{key}={value}"));
        }
    }
    if let Some(status) = &view.status {
        for address in &status.addresses {
            row("address", format!("{} ({}, interface {})", address.ip, address.mac, address.nic));
        }
        for volume in &status.volumes {
            let how = if status.volumes_changing { ", being changed" } else { "" };
            row("volume", format!("{} as {}{how}", volume.volume, volume.device));
        }
        if let Some(why) = &status.volumes_failed {
            row("volumes", format!("not as they are to be: {why}"));
        }
        if let Some(progress) = &status.progress {
            row("progress", how_far(progress));
        }
        if let Some(why) = status.rebuilt.as_ref().and_then(|rebuilt| rebuilt.failed.as_ref()) {
            row("rebuild", format!("failed, it has its old disk: {why}"));
        }
        if let Some(why) = status.rescued.as_ref().and_then(|rescued| rescued.failed.as_ref()) {
            row("rescue", format!("failed, it boots from its own disk: {why}"));
        }
        if let Some(why) = status.resized.as_ref().and_then(|resized| resized.failed.as_ref()) {
            row("resize", format!("failed, it {}: {why}", size_still_had(view)));
        }
        row("since", status.since.to_string());
        if let Some(started) = status.started_at {
            row("started", started.to_string());
        }
    }
    if let Some(request) = &view.request {
        if let Some(spec) = &request.spec {
            let resources: Vec<_> =
                spec.resources.iter().map(|(class, amount)| format!("{class}:{amount}")).collect();
            row("resources", resources.join(","));
            row("query", spec.query.clone());
            let came = view.status.as_ref().and_then(|status| status.rebuilt.as_ref());
            let image = Rebuild::disk(request.rebuild.as_ref(), &spec.image, came);
            let called = image.name.as_ref().map(|name| format!("{name}: ")).unwrap_or_default();
            row("image", format!("{called}{}", image.told()));
        }
        let wish = &request.power;
        let pending = view.status.as_ref().is_some_and(|status| status.power_generation < wish.generation);
        row("power", format!("{}{}", word(&wish.power), if pending { ", not yet" } else { "" }));
        if request.restart != Restart::No {
            row("restart", word(&request.restart));
        }
        row("requested", request.created_at.to_string());
    }
    let mut text = trimmed(&table);
    if let Some(console) = view.status.as_ref().and_then(|status| status.console.as_ref()) {
        text.push_str(&format!("\n\nend of the console:\n{}", without_controls(console, &['\n', '\t'])));
    }
    text
}

/// What one has that could not be given another size: where it was to go back that is the newer one.
fn size_still_had(view: &View) -> &'static str {
    match &view.record {
        Some(record) if record.before.is_none() => {
            "is as large as it was before that, and `eschedule resize --revert` tries it again"
        }
        Some(_) | None => "has its old size",
    }
}

/// As records have it.
pub(crate) fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_same_in_it_and_does_nothing_to_a_terminal() {
        let text = "a\u{9b}31m\u{7f}\u{80}\u{9f}\u{a0}\u{1b}[0m\n\"ü\\";
        for json in [serde_json::to_string(&[text]), serde_json::to_string_pretty(&[text])] {
            let json = escaped(json).unwrap();
            assert!(json.contains("\\u009b31m\\u007f\\u0080\\u009f\u{a0}\\u001b[0m"), "{json}");
            assert!(json.chars().all(|c| c == '\n' || !c.is_control()), "{json}");
            assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [text]);
        }
    }

    #[test]
    fn a_list_tells_what_is_waited_for_and_not_what_is_done() {
        let view = |doing: &str| View {
            node_alive: true,
            reason: None,
            doing: Some(doing.to_owned()),
            ..crate::fields::view(false)
        };
        assert_eq!(reason(&view("starting it")), "");
        let waits = "its network is not there; trying again";
        assert_eq!(reason(&view(waits)), waits);
        let dead = View { node_alive: false, ..view(waits) };
        assert_eq!(reason(&dead), format!("its node is not alive; {waits}"));
    }

    #[test]
    fn which_size_one_has_that_could_not_be_resized_hangs_on_where_it_was_to_go() {
        let mut view = crate::fields::view(true);
        let status = view.status.as_mut().unwrap();
        let resized = status.resized.as_mut().unwrap();
        resized.failed = Some("no room".to_owned());
        assert!(lines_of(&view).contains("failed, it has its old size: no room"));
        view.record.as_mut().unwrap().before = None;
        let lines = lines_of(&view);
        assert!(lines.contains("it is as large as it was before that, and `eschedule resize --revert` tries it again: no room"), "{lines}");
    }

    #[test]
    fn a_key_is_told_without_its_blob() {
        assert_eq!(brief("ssh-ed25519 AAAA me@here and there"), "ssh-ed25519 me@here and there");
        assert_eq!(brief("ssh-ed25519 AAAA"), "ssh-ed25519");
    }
}

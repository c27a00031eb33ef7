//! What results look like: for each a table, what it is called, and its fields, which docs/cli.md tells.

use std::io::IsTerminal;

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Row, Table, presets::NOTHING};
use ec_cloud::{GroupView, NodeView, View};
use ec_model::{Flavor, InstanceId, Keypair, Restart, State};
use ec_runtime::exit::{Failure, print};
use jiff::Timestamp;
use serde::Serialize;

use crate::cli::Output;

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
            Self::Json => serde_json::to_string_pretty(value).map_err(|error| failed(error.to_string()))?,
            Self::Yaml => serde_yaml::to_string(value).map_err(|error| failed(error.to_string()))?,
            Self::Name => names().iter().map(|name| plain(name)).collect::<Vec<_>>().join("\n"),
        };
        if text.is_empty() { Ok(()) } else { print(&text) }
    }

    /// Prints the fields of a result, where they are wanted; of the rest people are told by and by.
    pub(crate) fn print_fields<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Failure> {
        self.print(value, Vec::new, String::new)
    }
}

/// What an instance is called: its name, or its uuid.
pub(crate) fn called(name: Option<&String>, instance: InstanceId) -> String {
    name.cloned().unwrap_or_else(|| instance.to_string())
}

fn called_all(views: &[View]) -> Vec<String> {
    views.iter().map(|view| called(view.name.as_ref(), view.instance)).collect()
}

/// A list of instances.
pub(crate) fn instances(output: Output, views: &[View]) -> Result<(), Failure> {
    output.print(
        views,
        || called_all(views),
        || {
            let mut list = List::new(&["INSTANCE", "NAME", "NODE", "STATE", "IP", "REASON"], &[0, 3, 4]);
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

/// The reason, and before it that nobody keeps it up to date.
fn reason(view: &View) -> String {
    let dead = view.node.is_some() && !view.node_alive;
    let dead = dead.then_some("its node is not alive");
    dead.into_iter().chain(view.reason.as_deref()).collect::<Vec<_>>().join("; ")
}

/// A list of nodes.
pub(crate) fn nodes(output: Output, nodes: &[NodeView]) -> Result<(), Failure> {
    let called = |node: &NodeView| if node.name == "-" { node.node.to_string() } else { node.name.clone() };
    output.print(
        nodes,
        || nodes.iter().map(called).collect(),
        || {
            let header = ["NODE", "NAME", "VIRT", "VCPU", "MEMORY_MB", "DISK_GB", "AGENT", "SINCE", "NOTE"];
            let mut list = List::new(&header, &[0, 3, 4, 5]);
            let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
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
        let mut list = List::new(&["FLAVOR", "QUERY", "CREATED"], &[0, 2]);
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
        let mut list = List::new(&["KEYPAIR", "KEYS", "CREATED"], &[0, 2]);
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

/// A list of groups.
pub(crate) fn groups(output: Output, groups: &[GroupView]) -> Result<(), Failure> {
    let names = || groups.iter().map(|view| view.group.name.clone()).collect();
    output.print(groups, names, || {
        let mut list = List::new(&["GROUP", "POLICY", "MEMBERS", "CREATED"], &[0, 3]);
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

/// That something with a name is there no more.
pub(crate) fn deleted(output: Output, what: &str, name: &str) -> Result<(), Failure> {
    let deleted = Deleted { deleted: name };
    output.print(&deleted, || vec![name.to_owned()], || format!("DELETED {what} {name}"))
}

#[derive(Serialize)]
pub(crate) struct Deleted<'a> {
    pub(crate) deleted: &'a str,
}

/// All of one instance.
pub(crate) fn instance(output: Output, view: &View) -> Result<(), Failure> {
    output.print(view, || called_all(std::slice::from_ref(view)), || lines_of(view))
}

/// The same, as lines for people.
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
            row("locked", if reason.is_empty() { "yes".to_owned() } else { reason.clone() });
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
        if let Some(progress) = &status.progress {
            row(
                "progress",
                progress.percent().map_or_else(|| format!("{} bytes", progress.done), |p| format!("{p} %")),
            );
        }
        if let Some(why) = status.rebuilt.as_ref().and_then(|rebuilt| rebuilt.failed.as_ref()) {
            row("rebuild", format!("failed, it has its old disk: {why}"));
        }
        if let Some(why) = status.rescued.as_ref().and_then(|rescued| rescued.failed.as_ref()) {
            row("rescue", format!("failed, it boots from its own disk: {why}"));
        }
        if let Some(why) = status.resized.as_ref().and_then(|resized| resized.failed.as_ref()) {
            row("resize", format!("failed, it has its old size: {why}"));
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
            row("image", spec.image.url.clone());
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

/// As records have it.
pub(crate) fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn row<const N: usize>(table: &mut Table, cells: [String; N]) {
    table.add_row(cells.map(|cell| plain(&cell)));
}

/// A table with one line for each of many. On a terminal it is as wide as that: columns give way, those that are told
/// apart by or copied last.
#[derive(Clone)]
pub(crate) struct List {
    table: Table,
    rows: Vec<Vec<String>>,
    /// How wide each column is.
    widths: Vec<usize>,
    /// Which column is a state's.
    state: Option<usize>,
    coloured: bool,
}

impl List {
    /// With these columns, of which these are never cut.
    pub(crate) fn new(header: &[&str], whole: &[usize]) -> Self {
        let mut table = table(header);
        for column in whole {
            if let Some(column) = table.column_mut(*column) {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        // Blanks have no colour.
        table.style_text_only();
        let state = header.iter().position(|name| *name == "STATE");
        let widths = header.iter().map(|name| name.len()).collect();
        Self { table, rows: Vec::new(), widths, state, coloured: coloured() }
    }

    /// Adds a line.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        let cells: Vec<String> = cells.iter().map(|cell| plain(cell)).collect();
        for (width, cell) in self.widths.iter_mut().zip(&cells) {
            *width = (*width).max(cell.chars().count());
        }
        self.rows.push(cells);
    }

    /// All of it.
    pub(crate) fn text(mut self) -> String {
        // A blank at each side.
        let width: usize = self.widths.iter().map(|width| width + 2).sum();
        let is_too_wide = self.table.width().is_some_and(|room| width > usize::from(room));
        for cells in self.rows {
            let cells = cells.into_iter().enumerate().map(|(number, text)| {
                let colour = colour(&text).filter(|_| self.coloured && self.state == Some(number));
                let cell = Cell::new(if is_too_wide { first_part(text) } else { text });
                match colour {
                    Some(colour) => cell.fg(colour),
                    None => cell,
                }
            });
            let mut row = Row::from(cells);
            row.max_height(1);
            self.table.add_row(row);
        }
        trimmed(&self.table)
    }
}

/// Of a uuid its beginning, which is understood wherever all of it is, as long as no other begins so.
fn first_part(text: String) -> String {
    match uuid::Uuid::try_parse(&text) {
        Ok(_) => text.chars().take(8).collect(),
        Err(_) => text,
    }
}

/// Whether people look, and want colours (<https://no-color.org>).
pub(crate) fn coloured() -> bool {
    std::io::stdout().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb")
}

fn colour(state: &str) -> Option<Color> {
    mood(state).map(|mood| match mood {
        Mood::Well => Color::Green,
        Mood::Trouble => Color::Red,
        Mood::UnderWay => Color::Yellow,
    })
}

/// What a colour tells of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    Well,
    Trouble,
    UnderWay,
}

/// What runs, what is in trouble, and what is on its way.
pub(crate) fn mood(state: &str) -> Option<Mood> {
    mood_of(State::ALL.into_iter().find(|known| known.to_string() == state)?)
}

/// The same of a state.
pub(crate) fn mood_of(state: State) -> Option<Mood> {
    match state {
        State::Active => Some(Mood::Well),
        State::Error | State::Unclaimed | State::Unknown => Some(Mood::Trouble),
        State::Paused | State::Stopped | State::Suspended | State::Rescued => None,
        State::Scheduled
        | State::Preparing
        | State::Starting
        | State::Stopping
        | State::Rebooting
        | State::Suspending
        | State::Rebuilding
        | State::Rescuing
        | State::Unrescuing
        | State::Resizing
        | State::VerifyResize
        | State::Destroying => Some(Mood::UnderWay),
    }
}

/// Text that guests, servers and other people's records may have put together, without what would move a
/// terminal's cursor or break a line.
pub(crate) fn plain(text: &str) -> String {
    without_controls(text, &[])
}

fn without_controls(text: &str, keep: &[char]) -> String {
    text.chars().map(|c| if c.is_control() && !keep.contains(&c) { ' ' } else { c }).collect()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    // As wide as a terminal; elsewhere as what is in it.
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !header.is_empty() {
        let mut names = Row::from(header.to_vec());
        // Cut where there is no room, and not set letter below letter.
        names.max_height(1);
        table.set_header(names);
    }
    table
}

/// Without the blanks at both ends of the lines, of which each has one at its beginning.
fn trimmed(table: &Table) -> String {
    let line = |line: String| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned();
    table.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_say_moves_no_cursor() {
        assert_eq!(plain("a\u{1b}[2Jb\r\n\u{9b}c"), "a [2Jb   c");
        assert_eq!(without_controls("login:\n\u{7}\tok", &['\n', '\t']), "login:\n \tok");
        let mut lines = List::new(&["A", "B"], &[]);
        lines.row(["x\ny".to_owned(), "z".to_owned()]);
        assert_eq!(lines.text().lines().count(), 2);
    }

    #[test]
    fn a_list_that_is_too_wide_for_its_terminal_is_cut_where_it_may_be() {
        let mut list = List::new(&["INSTANCE", "REASON"], &[0]);
        let long = "no image was there where one should have been";
        list.row(["7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".to_owned(), long.to_owned()]);
        let wide = list.clone().text();
        assert!(wide.ends_with(long), "elsewhere nothing is cut: {wide}");
        list.table.set_width(60);
        let text = list.clone().text();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        assert!(
            text.contains("\n7d3c1f0a  no image") && text.ends_with(long),
            "the beginning of a uuid is enough: {text}"
        );
        list.table.set_width(30);
        assert!(list.text().ends_with('…'));
    }

    #[test]
    fn only_states_are_coloured_and_only_where_that_is_wanted() {
        let lines = |coloured| {
            let mut list = List { coloured, ..List::new(&["NAME", "STATE"], &[]) };
            list.table.enforce_styling();
            list.row(["ACTIVE".to_owned(), "ERROR".to_owned()]);
            list.text()
        };
        assert!(!lines(false).contains('\u{1b}'));
        let line = lines(true);
        let line = line.lines().last().unwrap();
        assert!(line.starts_with("ACTIVE") && line.contains("\u{1b}[38;5;9mERROR\u{1b}[39m"), "{line:?}");
    }

    #[test]
    fn a_key_is_told_without_its_blob() {
        assert_eq!(brief("ssh-ed25519 AAAA me@here and there"), "ssh-ed25519 me@here and there");
        assert_eq!(brief("ssh-ed25519 AAAA"), "ssh-ed25519");
    }
}
